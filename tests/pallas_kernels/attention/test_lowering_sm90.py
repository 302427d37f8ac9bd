"""On Hopper the door takes the Mosaic kernels, and they lower without the device."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false

import dataclasses
import functools
import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import AttnSpec, ForwardMode, PagedKV, make_plan
from pallas_kernels._common.masks import Rules
from pallas_kernels.attention import mosaic_gpu_sm90 as sm90
from pallas_kernels.attention import mosaic_gpu_sm90_schedule as schedules
from pallas_kernels.attention.mosaic_gpu_sm90_config import Config, heuristic
from pallas_kernels.attention.mosaic_gpu_sm90_tuned import tuned

SEQS, PAGES = 4, 8


def write_attend(spec, choice, mode, q_len, page_size, tree):
    """A step through the door, and the shapes of its arrays."""

    def make():
        lens = np.full(SEQS, PAGES * page_size)
        bits = jnp.ones((SEQS * q_len, 1), jnp.uint32) if tree else None
        table = np.zeros((SEQS, PAGES), np.int32)
        plan = make_plan(mode, lens, np.full(SEQS, q_len), table, page_size=page_size, tree=bits)
        cache = PagedKV.create(spec, num_layers=2, num_pages=PAGES, page_size=page_size, dtype=jnp.bfloat16)
        rows = jnp.zeros((SEQS * q_len, spec.num_q_heads + 2 * spec.num_kv_heads, spec.head_dim), jnp.bfloat16)
        q, k, v = jnp.split(rows, (spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads), axis=1)
        return q, k, v, cache, plan, jnp.zeros(spec.num_q_heads)

    def step(q, k, v, cache, plan, sinks):
        given = sinks if spec.sinks else None
        return jattn.write_attend(q, k, v, cache, plan, layer=1, spec=spec, choice=choice, sinks=given)

    return step, jax.eval_shape(make)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("mode", "q_len", "tree"), [("DECODE", 1, False), ("TARGET_VERIFY", 8, True)])
@pytest.mark.parametrize(
    "extras", [{}, dict(sliding_window=100, sinks=True, logit_soft_cap=30.0), dict(kv_dtype="fp8_e4m3")]
)
def test_a_bfloat16_step_on_hopper_is_mosaic_kernels(page_size, mode, q_len, tree, extras):
    spec = AttnSpec(num_q_heads=8, num_kv_heads=2, head_dim=128, **extras)
    choice = jattn.resolve(spec, "native", "cuda-sm90")
    assert [row.set for row in choice.rows] == ["hopper"] * 3 and choice.skipped == ()
    step, args = write_attend(spec, choice, ForwardMode[mode], q_len, page_size, tree)
    text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") >= 2  # the write and the attention


def test_what_the_kernels_lack_goes_to_plain_jax_with_the_reason():
    spec = AttnSpec(num_q_heads=8, num_kv_heads=2, head_dim=128, kv_dtype="fp8_e4m3", kv_scales="token")
    choice = jattn.resolve(spec, "native", "cuda-sm90")
    assert [choice.row(op).set for op in ("attend", "write_kv")] == ["xla", "xla"]
    assert "hopper/attend lacks per_token_scales" in choice.skipped


@pytest.mark.parametrize(
    ("head_dim", "dtype", "message"),
    [(72, jnp.bfloat16, "page_size=16, head dims 72 and 72"), (128, jnp.float32, "float32, float32, float32")],
)
def test_a_shape_or_dtype_without_a_kernel_is_one_clear_error(head_dim, dtype, message):
    spec = AttnSpec(num_q_heads=8, num_kv_heads=2, head_dim=head_dim)
    choice = jattn.resolve(spec, "native", "cuda-sm90")
    step, args = write_attend(spec, choice, ForwardMode.DECODE, 1, 16, False)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == jnp.bfloat16 else x.dtype), args)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(step), *args)


def test_a_page_size_or_scales_without_a_kernel_are_one_clear_error():
    def call(page, kv_heads=2, **scales):
        pool = jax.ShapeDtypeStruct((8, page, kv_heads, 128), jnp.uint8)
        q = jax.ShapeDtypeStruct((4, 8, 128), jnp.bfloat16)
        i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        arrays = dict(page_table=i32((4, 2)), seq_lens=i32((4,)), cu_q_lens=i32((5,)), **scales)
        static = dict(max_q_len=1, sm_scale=1.0, kv_dtype=jnp.float8_e4m3fn)
        run = lambda q, k, v, arrays: sm90.paged_attention(q, k, v, **arrays, **static)  # noqa: E731
        return jax.eval_shape(run, q, pool, pool, arrays)

    assert call(16)[0].shape == (4, 8, 128)
    with pytest.raises(ValueError, match="page_size=3, head dims 128 and 128"):
        call(3)
    with pytest.raises(ValueError, match="one scale for all 8-bit values; resolve with prefer"):
        call(16, k_scale=jax.ShapeDtypeStruct((8, 16, 2), jnp.float32))


def test_measured_sizes_are_found_by_the_facts_of_a_call_and_are_legal():
    rows = json.loads(resources.files("pallas_kernels.attention").joinpath("tuned/h200.json").read_text())["rows"]
    for row in rows:
        assert row["ms"] < row["heuristic_ms"] and tuned(**row["facts"]) == Config(**row["config"])
    assert tuned(max_q_len=-1) is None


def test_short_contexts_of_one_request_are_one_launch_and_long_ones_fill_the_card():
    facts = dict(max_q_len=1, group=4, kv_heads=8, num_seqs=1, head_dim=128, page_size=64)
    assert heuristic(**facts, kv_room=1024) == Config(stages=2, cluster=8)
    assert (heuristic(**facts, kv_room=8192).splits, heuristic(**facts, kv_room=8192).parts) == (True, 16)
    lens = dict(
        seq_lens=jnp.full(1, 8192), cu_q_lens=jnp.arange(2, dtype=jnp.int32), num_tokens=1, max_q_len=1, group=4
    )
    table = dict(page_table=jnp.zeros((1, 128), jnp.int32), page_size=64)
    cut = schedules.make(heuristic(**facts, kv_room=8192), Rules(sm_scale=1.0), None, **lens, **table)
    assert (cut.items[:, schedules.END] - cut.items[:, schedules.BEGIN]).tolist() == [8] * 16


def test_a_call_of_equal_requests_wastes_no_program():
    rules = Rules(sm_scale=1.0)
    lens = dict(seq_lens=jnp.full(16, 4096), cu_q_lens=jnp.arange(17, dtype=jnp.int32) * 16)
    sizes = dict(num_tokens=256, max_q_len=16, group=4, page_table=jnp.zeros((16, 64), jnp.int32), page_size=64)
    whole = schedules.make(Config(), rules, None, **lens, **sizes)
    assert whole.items.shape[0] == 16
    assert whole.items[:, schedules.TOKENS].tolist() == [16] * 16
    cut = schedules.make(dataclasses.replace(Config(), splits=True, parts=33), rules, None, **lens, **sizes)
    blocks = np.asarray(cut.items[:, schedules.END] - cut.items[:, schedules.BEGIN])
    assert sorted(set(blocks[np.asarray(cut.items[:, schedules.TOKENS]) > 0].tolist())) == [32]
    assert int(blocks.sum()) == 16 * 64


def test_wide_trees_are_shared_by_two_programs_as_far_as_shared_memory_goes():
    facts = dict(group=4, kv_heads=8, num_seqs=64, head_dim=128, kv_room=4160, page_size=16)
    wide = heuristic(**facts, max_q_len=64, plain_tree=True)
    assert (wide.sharers, wide.rows, wide.block_kv, wide.stages) == (2, 256, 128, 3)
    assert heuristic(**facts, max_q_len=64).block_kv == 64  # more bits a row, or a mask that takes registers
    assert heuristic(**facts, max_q_len=32, plain_tree=True).sharers == 1  # one program has all 128 rows
    with pytest.raises(ValueError, match="sharers"):
        Config(sharers=2)
