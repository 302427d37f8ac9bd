"""Text to ids and back, whole and streamed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from jattn.loaders.byte_level import BYTE_OF, token_bytes
from jattn.loaders.errors import ModelFileError
from jattn.loaders.tokenizer import StreamDecoder, Tokenizer

VOCAB = 256 + 6 + 3
START, END, TOOL = VOCAB - 3, VOCAB - 2, VOCAB - 1
ids_lists = st.lists(st.integers(0, VOCAB - 1), max_size=40)
TEXTS = [
    "The year 2024, 12345 times.",
    "Grüße, 北京 🙂👩‍👩‍👧",
    "  two\n\n\tspaces  ",
    "don't I'LL",
    "a\u0301 \u00a0 \u2028",
]


def cut(items, places):
    """Split a sequence at the given places, in order."""
    edges = [0, *sorted(place % (len(items) + 1) for place in places), len(items)]
    return [items[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def test_the_byte_alphabet_is_the_tokenizers_packages():
    assert set(BYTE_OF) == set(ByteLevel.alphabet()) and sorted(BYTE_OF.values()) == list(range(256))
    assert token_bytes("Ġwörd") == b" w" + bytes([0xF6]) + b"rd"
    assert token_bytes("Ġ北") == " 北".encode()


def test_reference_prompts_encode_to_the_reference_ids(smol_tokenizer, reference):
    for name, prompt in reference["prompts"].items():
        assert smol_tokenizer.encode(prompt["text"]) == prompt["prompt_ids"], name


def test_reference_greedy_ids_decode_to_the_reference_text(smol_tokenizer, reference):
    for name, prompt in reference["prompts"].items():
        assert smol_tokenizer.decode(prompt["numpy"]["greedy32"]) == prompt["numpy"]["text"], name
        text = smol_tokenizer.decode(prompt["numpy"]["greedy32"], skip_special=True)
        assert "<|im_end|>" not in text


def test_the_real_tokenizer_knows_its_ends(smol_tokenizer):
    assert (smol_tokenizer.vocab_size, smol_tokenizer.bos_id, smol_tokenizer.eos_ids) == (49152, 1, (2,))
    assert smol_tokenizer.add_bos is False


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(text, smol_tokenizer, tiny_tokenizer):
    assert smol_tokenizer.decode(smol_tokenizer.encode(text)) == text
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


@given(text=st.text())
def test_any_text_survives_the_round_trip_when_every_byte_is_a_token(text, tiny_tokenizer):
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text


@given(ids=ids_lists, places=st.lists(st.integers(0, 99), max_size=6), skip=st.booleans())
def test_streamed_pieces_join_to_the_whole_text(ids, places, skip, tiny_tokenizer):
    stream = StreamDecoder(tiny_tokenizer, skip_special=skip)
    pieces = [stream.push(part) for part in cut(ids, places)]
    assert "".join(pieces) + stream.flush() == tiny_tokenizer.decode(ids, skip_special=skip)


@given(text=st.text(alphabet="aé北🙂👩\u200d", max_size=12))
def test_a_stream_of_valid_text_never_shows_a_replacement_character(text, tiny_tokenizer):
    stream = StreamDecoder(tiny_tokenizer)
    shown = ""
    for token in tiny_tokenizer.encode(text):
        shown += stream.push([token])
        assert text.startswith(shown)
    assert shown == text and stream.flush() == ""


def test_an_incomplete_character_is_held_back_and_replaced_only_at_the_end(tiny_tokenizer):
    stream = StreamDecoder(tiny_tokenizer)
    *first, last = tiny_tokenizer.encode("🙂")
    assert stream.push(first) == "" and stream.push([last]) == "🙂"
    assert stream.push(first) == "" and stream.flush() == "\ufffd"
    assert tiny_tokenizer.decode(first) == "\ufffd"


def test_special_tokens_in_text_become_their_ids_and_can_be_left_out(tiny_tokenizer):
    ids = tiny_tokenizer.encode("<|im_start|>a<tool><|im_end|>")
    assert [ids[0], *ids[2:]] == [START, TOOL, END]
    assert tiny_tokenizer.decode(ids) == "<|im_start|>a<tool><|im_end|>"
    assert tiny_tokenizer.decode(ids, skip_special=True) == "a<tool>"


def test_the_begin_token_comes_once_where_the_file_asks_for_it(vocabulary):
    tokenizer = Tokenizer.from_metadata(vocabulary | {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("") == [START] and tokenizer.encode("<|im_start|>") == [START]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.encode("<|im_start|>", add_bos=True) == [START, START]


def test_the_end_of_turn_token_ends_an_answer_too(vocabulary):
    by_name = Tokenizer.from_metadata(vocabulary | {"tokenizer.ggml.eos_token_id": START})
    assert by_name.eos_ids == (START, END)
    by_key = Tokenizer.from_metadata(vocabulary | {"tokenizer.ggml.eot_token_id": 5})
    assert by_key.eos_ids == (END, 5)


@pytest.mark.parametrize(
    "pre, words", [("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])]
)
def test_each_pre_tokenizer_keeps_as_many_digits_together_as_its_model_does(pre, words, vocabulary):
    tokenizer = Tokenizer.from_metadata(vocabulary | {"tokenizer.ggml.pre": pre})
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234", add_bos=False)] == words


def test_only_qwen2_composes_characters(vocabulary):
    decoded = {}
    for pre in ("smollm", "qwen2", "llama-bpe"):
        tokenizer = Tokenizer.from_metadata(vocabulary | {"tokenizer.ggml.pre": pre})
        decoded[pre] = tokenizer.decode(tokenizer.encode("e\u0301", add_bos=False))
    assert decoded == {"smollm": "e\u0301", "qwen2": "\u00e9", "llama-bpe": "e\u0301"}


def test_llama_bpe_adds_a_begin_token_where_the_file_is_silent(vocabulary):
    silent = {key: value for key, value in vocabulary.items() if key != "tokenizer.ggml.add_bos_token"}
    assert Tokenizer.from_metadata(silent | {"tokenizer.ggml.pre": "llama-bpe"}).encode("a")[0] == START
    assert Tokenizer.from_metadata(silent).encode("a")[0] != START


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"tokenizer.ggml.pre": "tekken"},
            "tokenizer.ggml.pre is 'tekken': want one of gpt-4o, llama-bpe, qwen2, smollm",
        ),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv': only 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "the file has no score for each of"),
        ({"tokenizer.ggml.merges": None}, "no list of texts tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merge 'ab' is not two parts"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "merges do not fit the vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types for 265 tokens"),
        ({"tokenizer.ggml.eos_token_id": 265}, "eos_token_id is 265: want 0 to 264"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused(change, message, vocabulary):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_metadata(vocabulary | change)


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_is_refused(token_id, tiny_tokenizer):
    with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary: want 0 to {VOCAB - 1}"):
        tiny_tokenizer.decode([0, token_id])


def test_text_that_is_no_unicode_and_a_begin_token_that_is_not_there_are_refused(tiny_tokenizer, vocabulary):
    with pytest.raises(ValueError, match="lone surrogates"):
        tiny_tokenizer.encode("a\ud83d")
    without = {key: value for key, value in vocabulary.items() if "bos" not in key}
    with pytest.raises(ValueError, match="names no begin token"):
        Tokenizer.from_metadata(without).encode("a", add_bos=True)
