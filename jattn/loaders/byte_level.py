"""The byte-level alphabet of GPT-2: every byte is written as one visible character of a vocabulary entry.

Source: https://github.com/openai/gpt-2 (the mapping); bytes that are visible Latin-1 stay themselves, the other 68 take
the code points from 256 on, in order.
"""

from collections.abc import Iterable

_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_HIDDEN)}


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level vocabulary entry stands for; a character outside the alphabet is its own UTF-8.

    >>> token_bytes("ĠParis"), token_bytes("âĤ")
    (b' Paris', b'\\xe2\\x82')
    """
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return b"".join(bytes((BYTE_OF[char],)) if char in BYTE_OF else char.encode() for char in token)


def join(pieces: Iterable[bytes]) -> str:
    """Text of the bytes; each maximal invalid part of a UTF-8 sequence becomes one U+FFFD."""
    return b"".join(pieces).decode("utf-8", errors="replace")
