"""Every family against the logits that transformers computed, in each kind of step that serving takes."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from packed_run import PAGE, TABLE, TOLERANCE, Run, within

import jattn
from jattn.modes import ForwardMode
from jattn.plan import make_plan

SHARED = 24  # tokens that both prompts begin with
DEEPSEEK = ("deepseek-v2", "deepseek-v2-groups", "deepseek-v3")
LONG = {  # by hand: `test_latent` takes these steps in a form each
    "test_logits_of_whole_prompts": ("deepseek-v2-groups",),
    "test_logits_in_chunks_then_token_by_token_then_of_drafts": DEEPSEEK,
    "test_logits_of_a_tree_whose_two_branches_are_the_two_prompts": ("deepseek-v2", "deepseek-v3"),
}


def test_logits_of_whole_prompts(family, checkpoint):
    held = checkpoint(family)
    run = Run(held.build(), held.prompts)
    parts = run.take(ForwardMode.EXTEND, [len(prompt) for prompt in held.prompts], rows=80, longest=40)
    for got, want in zip(parts, held.logits, strict=True):
        within(got, want)


def test_logits_in_chunks_then_token_by_token_then_of_drafts(family, checkpoint):
    held = checkpoint(family)
    run = Run(held.build(), held.prompts)
    got: list[list[np.ndarray]] = [[], []]

    def keep(parts):
        for rows, part in zip(got, parts, strict=True):
            rows.append(part)

    for counts in ((9, 3), (0, 12), (11, 5), (4, 0)):  # ragged, with a prompt that waits
        keep(run.take(ForwardMode.EXTEND, counts, rows=20, longest=12))
    for _ in range(6):
        keep(run.take(ForwardMode.DECODE, (1, 1), rows=2, longest=1))
    for counts in ((5, 4), (5, 5), (0, 1)):
        keep(run.take(ForwardMode.TARGET_VERIFY, counts, rows=12, longest=6))
    for rows, want in zip(got, held.logits, strict=True):
        rows = np.concatenate(rows)
        within(rows, want[: len(rows)])
        assert len(rows) >= 36


def test_logits_of_a_tree_whose_two_branches_are_the_two_prompts(family, checkpoint):
    held = checkpoint(family)
    first, second = held.prompts
    assert first[:SHARED] == second[:SHARED] and first[SHARED] != second[SHARED]
    run = Run(held.build(), [first, second])
    for _ in range(2):
        run.take(ForwardMode.EXTEND, (SHARED // 2, 0), rows=20, longest=12)
    deep = 6
    nodes = [i for pair in zip(first[SHARED:][:deep], second[SHARED:][:deep], strict=True) for i in pair]
    # node 2 i + b stands at depth i of branch b; it sees the nodes of its branch up to itself
    bits = np.asarray([[sum(1 << (2 * j + b) for j in range(i + 1))] for i in range(deep) for b in (0, 1)], np.uint32)
    plan = make_plan(
        ForwardMode.TARGET_VERIFY,
        np.asarray([SHARED + 2 * deep, 0]),
        np.asarray([2 * deep, 0]),
        TABLE,
        page_size=PAGE,
        tree=bits,
    )
    (rows, _) = run.run([nodes, []], plan)
    for branch, want in enumerate(held.logits):
        within(rows[branch::2], want[SHARED : SHARED + deep])


def scaled(config, **changes):
    return dict(rope_scaling=dataclasses.replace(config.rope_scaling, **changes))


def mixed(config, **changes):
    return dict(experts=dataclasses.replace(config.experts, **changes))


def latent(config, **changes):
    return dict(mla=dataclasses.replace(config.mla, **changes))


def plain(**changes):
    return lambda config: changes


NO_SCALING, NO_WINDOWS = plain(rope_scaling=None), plain(windows=())
NO_QKV_BIAS = plain(qkv_bias=False), ("q_bias", "k_bias", "v_bias")
NO_QK_NORM = plain(qk_norm=False), ("q_norm", "k_norm")
NO_POST_NORMS = plain(post_norms=False), ("post_attn_norm", "post_ffn_norm")
GEMMA = {
    "windows": (NO_WINDOWS, ()),
    "post norms": NO_POST_NORMS,
    "embedding scale": (plain(embed_scale=None), ()),
    "query scale": (plain(sm_scale=None), ()),
    "activation": (plain(activation="silu"), ()),
}
MIXTURE = {
    "experts a token": (functools.partial(mixed, top_k=2), ()),
    "shared experts": (functools.partial(mixed, shared_ffn_dim=0), ("shared_gate", "shared_up", "shared_down")),
    "norm of the latent": (functools.partial(latent, latent_norm=False), ("kv_a_norm",)),
    "scale": (plain(sm_scale=1.0), ()),
}
GROUPED = {
    "groups": (functools.partial(mixed, top_groups=4), ()),
    "fewer groups": (functools.partial(mixed, num_groups=2, top_groups=1), ()),
    "scale of experts": (functools.partial(mixed, routed_scale=1.0), ()),
    "scaling": (NO_SCALING, ()),
    "ramp's end": (functools.partial(scaled, beta_slow=1.0), ()),
}
# family -> feature -> (what the config says without it, tensors that go with it)
FEATURES = {
    "llama-linear": {"scaling": (NO_SCALING, ()), "factor": (functools.partial(scaled, factor=5.0), ())},
    "llama-llama3": {
        "scaling": (NO_SCALING, ()),
        "low band": (functools.partial(scaled, low_freq_factor=0.1), ()),
        "high band": (functools.partial(scaled, high_freq_factor=1.5), ()),
        "context": (functools.partial(scaled, original_max_context=64), ()),
    },
    "llama-yarn": {
        "scaling": (NO_SCALING, ()),
        "amplitude": (functools.partial(scaled, amplitude=1.0), ()),
        "rounded ramp": (functools.partial(scaled, truncate=False), ()),
        "ramp's begin": (functools.partial(scaled, beta_fast=2.0), ()),
        "ramp's end": (functools.partial(scaled, beta_slow=0.5), ()),
    },
    "mistral": {"windows": (NO_WINDOWS, ()), "one key more": (plain(windows=(10,) * 2), ())},
    "qwen2": {
        "biases": NO_QKV_BIAS,
        "windows": (NO_WINDOWS, ()),
        "first layer": (plain(windows=(11,) * 2), ()),
    },
    "qwen3": {"norms of q and k": NO_QK_NORM},
    "gemma2": GEMMA
    | {
        "which layers": (plain(windows=(None, 8)), ()),
        "cap on attention": (plain(attn_soft_cap=None), ()),
        "cap on logits": (plain(final_soft_cap=None), ()),
    },
    "gemma3": GEMMA
    | {
        "norms of q and k": NO_QK_NORM,
        "theta of window layers": (plain(window_rope_theta=None), ()),
        "scaling": (NO_SCALING, ()),
    },
    "deepseek-v2": MIXTURE,
    "deepseek-v2-groups": MIXTURE
    | GROUPED
    | {
        "amplitude": (functools.partial(scaled, amplitude=1.0), ()),
        "scoring": (functools.partial(mixed, scoring="sigmoid"), ()),
    },
    "deepseek-v3": MIXTURE
    | GROUPED
    | {
        "score of a group": (functools.partial(mixed, group_score="max"), ()),
        "shares of sum 1": (functools.partial(mixed, norm_topk=False), ()),
        "bias of the choice": (functools.partial(mixed, score_bias=False), ("score_bias",)),
        "scoring": (functools.partial(mixed, scoring="softmax"), ()),
    },
    "gpt-oss": {
        "sinks": (plain(sinks=False), ("sinks",)),
        "windows": (NO_WINDOWS, ()),
        "which layers": (plain(windows=(None, 8)), ()),
        "biases": NO_QKV_BIAS,
        "bias of the output": (plain(out_bias=False), ("o_bias",)),
        "scaling": (NO_SCALING, ()),
        "unrounded ramp": (functools.partial(scaled, truncate=True), ()),
        "clamp": (functools.partial(mixed, limit=math.inf), ()),
        "slope": (functools.partial(mixed, alpha=1.0), ()),
        "experts a token": (functools.partial(mixed, top_k=1), ()),
    },
}
ZEROED = {
    "qwen2": ("q_bias", "k_bias", "v_bias"),
    "gpt-oss": ("router_bias", "gate_bias", "up_bias", "down_bias", "sinks", "o_bias", "q_bias", "k_bias", "v_bias"),
}


@pytest.mark.long  # a program each
@pytest.mark.parametrize(
    ("family_name", "feature"), [(name, feature) for name, features in FEATURES.items() for feature in features]
)
def test_a_model_without_one_of_its_features_has_other_logits(family_name, feature, checkpoint):
    held = checkpoint(family_name)
    change, without = FEATURES[family_name][feature]
    model = held.build(dataclasses.replace(held.config, **change(held.config)), without)
    assert distance(model, held) > 50 * TOLERANCE


@pytest.mark.parametrize("family_name", ZEROED)
def test_a_model_without_one_of_its_tensors_has_other_logits(family_name, checkpoint):
    held = checkpoint(family_name)
    for tensor in ZEROED[family_name]:
        arrays = {
            name: np.zeros_like(array) if name == f"layers.1.{tensor}" else array for name, array in held.arrays.items()
        }
        assert distance(dataclasses.replace(held, arrays=arrays).build(), held) > 10 * TOLERANCE, tensor


def distance(model, held):
    run = Run(model, held.prompts)
    parts = run.take(ForwardMode.EXTEND, [len(prompt) for prompt in held.prompts], rows=80, longest=40)
    return max(np.abs(got - want).max() for got, want in zip(parts, held.logits, strict=True))


SERVED = ("gemma3", "gpt-oss", "llama-linear", "qwen2")  # the others by hand: an engine each, compiled for speed


@pytest.mark.parametrize("name", [n if n in SERVED else pytest.param(n, marks=pytest.mark.long) for n in FEATURES])
def test_greedy_ids_through_generate(name, checkpoint):
    held = checkpoint(name)
    answers = jattn.generate(
        held.prompts,
        model=str(held.path),
        draft="ngram",
        num_steps=1,
        max_new_tokens=12,
        ignore_eos=True,
        page_size=PAGE,
        dtype="float32",
    )
    assert [answer.ids for answer in answers] == held.greedy
    assert all(answer.compilations_while_serving == 0 for answer in answers)
