"""The TPU attention over drawn batches, interpreted: as right as plain JAX, and its pool as it should be."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import dataclasses
import functools

import drawn
import earned
import jax
import jax.numpy as jnp
import numpy as np
from drawn import Setup
from watched import CHECKED, assert_no_race

from pallas_kernels._common import tpu_rows
from pallas_kernels.attention import tpu, tpu_write


def rows_of(setup: Setup, cache):
    """A cache's keys and values as the kernel's pool."""
    scales = (cache.k_scale, cache.v_scale) if cache.token_scales else ()
    pool = tpu_rows.pack(cache.k, cache.v, *scales)
    return tpu_rows.to_words(pool) if tpu_rows.held_as_words(setup.page_size) else pool


@functools.cache
def attend(setup: Setup, config, writes=False):
    """The kernel behind a plan made in jit: out and lse, and the pool where it writes."""
    spec = setup.spec

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, sinks, cache, k=None, v=None):
        plan = drawn.plan_of(setup, seq_lens, q_lens, page_table, tree)
        one_scale = cache.k_scale is not None and not cache.token_scales
        more = dict(slots=plan.write_slots, num_pages=cache.num_pages) if writes else {}
        out, lse, *pool = (tpu_write.write_attend if writes else tpu.paged_attention)(
            q,
            *((k, v) if writes else ()),
            rows_of(setup, cache),
            k_scale=cache.k_scale[drawn.LAYER] if one_scale else None,
            v_scale=cache.v_scale[drawn.LAYER] if one_scale else None,
            kv_dtype=cache.dtype,
            token_scales=setup.token_scales,
            logit_soft_cap=spec.logit_soft_cap,
            sliding_window=spec.sliding_window,
            sinks=sinks,
            kv_heads=spec.num_kv_heads,
            v_dim=spec.v_head_dim,
            config=config,
            interpret=CHECKED,
            **drawn.asked_of(setup, plan),
            **more,
        )
        return *drawn.merged(setup, out, lse), *pool

    return run


def check(setup, config, data):
    """A drawn batch is attended to as right as plain JAX does."""
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    sinks = None if ins.sinks is None else jnp.asarray(ins.sinks)
    out, lse, *_ = attend(setup, config)(*drawn.given(ins), sinks, drawn.cache(setup, ins))
    earned.compare(setup, ins, out, lse)
    assert_no_race()


def check_written(setup, config, data):
    """Keys that the call brings are attended to, and lie in the pool afterwards; nothing else there changed."""
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    sinks = None if ins.sinks is None else jnp.asarray(ins.sinks)
    before = drawn.cache(setup, ins, held=ins.seq_lens - ins.q_lens)
    out, lse, pool = attend(setup, config, writes=True)(
        *drawn.given(ins), sinks, before, jnp.asarray(ins.k), jnp.asarray(ins.v)
    )
    assert_no_race()
    row = tpu_rows.Row(kv_heads=setup.num_kv_heads, k_dim=setup.spec.head_dim, v_dim=setup.spec.v_head_dim)
    if setup.token_scales:
        row = dataclasses.replace(row, scales=True)
        rows = tpu_rows.from_words(pool, jnp.int8, row.lanes) if pool.ndim == 5 else pool
        scales = tpu_rows.from_planes(rows[..., row.scales_at :], 2 * setup.num_kv_heads, jnp.float32)
        k_scale, v_scale = jnp.split(scales, 2, axis=-1)
        drawn.take_scales(setup, ins, dataclasses.replace(before, k_scale=k_scale, v_scale=v_scale))
    want = rows_of(setup, drawn.cache(setup, ins))
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (pool, want)))
    earned.compare(setup, ins, out, lse)
