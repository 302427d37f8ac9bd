"""What an n-gram search by hand says of a text."""

from jattn.combinators.ngram import MAX_MATCH


def match_len(text, end):
    """Tokens, at most MAX_MATCH, in which text[:end] and the whole text end alike."""
    n = 0
    while n < min(MAX_MATCH, end) and text[end - 1 - n] == text[len(text) - 1 - n]:
        n += 1
    return n
