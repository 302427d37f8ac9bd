"""SentencePiece vocabularies of GGUF files, against the merge said in the plainest way."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.loaders.sentence_piece import SentencePiece
from jattn.loaders.tokenizer import StreamDecoder, Tokenizer

SPACE = "\u2581"
WORDS = [
    SPACE,
    *"abc",
    "ab",
    "aa",
    "aaa",
    "bc",
    "abc",
    f"{SPACE}a",
    f"{SPACE}ab",
    f"{SPACE}{SPACE}",
    "ca",
    "caa",
    "\u00e9",
]
SCORES = [-9.0, -8.0, -8.5, -8.2, -2.0, -1.0, -1.0, -3.0, -2.5, -1.5, -4.0, -1.0, -2.0, -6.0, -7.0]
TOKENS = ["<unk>", "<s>", "</s>", "<end_of_turn>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
AT = {token: i for i, token in enumerate(TOKENS)}
METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0] * 260 + SCORES,
    "tokenizer.ggml.token_type": [2, 3, 3, 3, *[6] * 256, *[1] * len(WORDS)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def plain_merge(text: str) -> list[str]:
    """Join the pair with the best score, the leftmost of equals, until no join is an entry."""
    pieces = list(text.replace(" ", SPACE))
    while True:
        joins = [
            (-SCORES[WORDS.index(left + right)], at)
            for at, (left, right) in enumerate(zip(pieces, pieces[1:], strict=False))
            if left + right in WORDS
        ]
        if not joins:
            return pieces
        at = min(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@settings(max_examples=300)
@given(st.text(alphabet="aabc  \u00e9\u4e2d", max_size=20))
def test_the_best_pair_is_joined_first_and_the_rest_falls_back_to_bytes(text):
    tokenizer = Tokenizer.from_metadata(METADATA | {"tokenizer.ggml.add_space_prefix": False})
    want = []
    for piece in plain_merge(text):
        want += [AT[piece]] if piece in WORDS else [AT[f"<0x{byte:02X}>"] for byte in piece.encode()]
    assert tokenizer.encode(text, add_bos=False) == want
    assert tokenizer.decode(want) == text


def test_begin_prefix_and_special_tokens():
    tokenizer = Tokenizer.from_metadata(METADATA)
    assert tokenizer.encode("ab") == [1, AT[f"{SPACE}ab"]]
    whole = tokenizer.encode("ab<end_of_turn>ab", add_bos=False)
    assert whole == [AT[f"{SPACE}ab"], AT["<end_of_turn>"], AT[f"{SPACE}ab"]]
    assert tokenizer.eos_ids == (2, 3) and tokenizer.encode("") == [1]


def test_a_character_in_bytes_is_held_back_until_it_is_whole():
    stream = StreamDecoder(Tokenizer.from_metadata(METADATA))
    texts = [stream.push([AT[f"<0x{byte:02X}>"]]) for byte in "\u4e2d".encode()]
    assert texts == ["", "", "\u4e2d"] and stream.flush() == ""


def test_without_byte_entries_a_strange_character_is_unknown():
    assert SentencePiece(["<unk>", "a"], [0.0, 0.0], whole=(), space_prefix=False, unknown_id=0)("a\u00e9") == [1, 0, 0]
    assert SentencePiece(["<unk>", "a"], [0.0, 0.0], whole=(), space_prefix=False, unknown_id=None)("a\u00e9") == [1]
