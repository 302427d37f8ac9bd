"""Folders of draft heads: what is read, written again, and refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from head_files import IDS, config_of, tensors_of, write

from jattn.loaders.draft_heads import read_head, write_head
from jattn.loaders.errors import ModelFileError

VOCAB = 50


def test_an_eagle_head_has_a_bias_and_no_first_norm(tmp_path):
    head = read_head(write(tmp_path / "head", "eagle", VOCAB))
    assert (head.kind, head.num_taps, head.taps, head.drafted, head.has_bias) == ("eagle", 0, None, VOCAB, True)
    arrays, theirs = dict(head.arrays()), tensors_of("eagle", VOCAB)
    assert "layers.0.attn_norm" not in arrays and head.token_ids() is None and head.own("lm_head") is None
    np.testing.assert_array_equal(arrays["layers.0.down"], theirs["layers.0.mlp.down_proj.weight"])
    np.testing.assert_array_equal(arrays["fc_bias"], theirs["fc.bias"])


def test_an_eagle3_head_has_taps_and_a_vocabulary(tmp_path):
    head = read_head(write(tmp_path / "head", "eagle3", VOCAB))
    assert (head.kind, head.num_taps, head.taps, head.drafted) == ("eagle3", 3, (1, 1, 2), len(IDS))
    ids, rows = head.token_ids(), head.own("lm_head")
    assert ids is not None and rows is not None
    assert ids.tolist() == IDS.tolist() and rows.shape == (len(IDS), 32)
    arrays, theirs = dict(head.arrays()), tensors_of("eagle3", VOCAB)
    np.testing.assert_array_equal(arrays["token_norm"], theirs["midlayer.input_layernorm.weight"])
    np.testing.assert_array_equal(arrays["k"], theirs["midlayer.self_attn.k_proj.weight"])


def test_what_is_written_is_read_again(tmp_path):
    first = read_head(write(tmp_path / "head", "eagle3", VOCAB))
    config = config_of(VOCAB, draft_vocab_size=len(IDS), eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 1]})
    arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in first.arrays()}
    write_head(tmp_path / "again", config, arrays, token_ids=first.token_ids(), metadata={"steps": "7"})
    again = read_head(tmp_path / "again")
    assert again.taps == (1, 2, 2) and again.own("lm_head") is None
    np.testing.assert_array_equal(again.token_ids(), IDS)
    for name, array in again.arrays():
        np.testing.assert_array_equal(array, arrays[name].astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("eagle3", dict(drop=("norm.weight",)), r"lacks tensor 'norm.weight': want shape \(32,\)"),
        ("eagle3", dict(drop=("d2t",)), "drafts 8 of 50 tokens but lacks tensor 'd2t'"),
        ("eagle3", dict(draft_vocab_size=9), r"'lm_head.weight' has shape \(8, 32\), but the config wants \(9, 32\)"),
        ("eagle3", dict(norm_before_residual=True), "norm_before_residual is True: only False is supported"),
        ("eagle3", dict(eagle_config={"eagle_aux_hidden_state_layer_ids": 3}), "as a list of layers"),
        ("eagle3", dict(num_hidden_layers=0), "num_hidden_layers is 0: want a whole number above 0"),
        ("eagle", dict(num_hidden_layers=2), "lacks tensor 'layers.1.self_attn.q_proj.weight'"),
        ("eagle", dict(drop=("fc.weight",)), "lacks tensor 'fc.weight'"),
        ("eagle", dict(rope_scaling={"type": "wild"}), "rope type is 'wild'"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, kind, changes, says):
    with pytest.raises(ModelFileError, match=says):
        read_head(write(tmp_path / "head", kind, VOCAB, **changes))


def test_a_vocabulary_outside_the_target_is_refused(tmp_path):
    head = read_head(write(tmp_path / "head", "eagle3", VOCAB))
    smaller = dataclasses.replace(head, hparams=dataclasses.replace(head.hparams, vocab_size=30))
    with pytest.raises(ModelFileError, match="d2t names 8 tokens from 3 to 42: want 8 different ones of 30"):
        smaller.token_ids()
