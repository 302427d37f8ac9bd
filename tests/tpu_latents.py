"""The TPU latent attention over drawn batches, interpreted: as right as plain JAX, and its pool as it should be."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import functools

import drawn
import drawn_latents
import earned
import jax
import jax.numpy as jnp
import numpy as np
from drawn import Setup
from watched import CHECKED, assert_no_race

import jattn
from pallas_kernels._common import latent_rows, tpu_rows
from pallas_kernels.mla import tpu

_FP8 = "fp8_e4m3"


@functools.cache
def attend(setup: Setup, config, packed=False, writes=False):
    """The kernel behind a plan made in jit: out and lse, and the pool where it writes."""

    @jax.jit
    def run(q, seq_lens, q_lens, page_table, tree, pages, *rows):
        plan = drawn.plan_of(setup, seq_lens, q_lens, page_table, tree)
        more = dict(slots=plan.write_slots, num_pages=setup.num_pages) if writes else {}
        more |= {} if pages.ndim == 3 else dict(kv_dtype=jnp.float8_e4m3fn if packed else setup.dtype)
        out, lse, *pool = (tpu.write_attend_latent if writes else tpu.attend_latent)(
            q,
            *rows,
            pages,
            latent_dim=setup.v_head_dim,
            config=config,
            interpret=CHECKED,
            **drawn.asked_of(setup, plan),
            **more,
        )
        return *drawn.merged(setup, out, lse), *pool

    return run


def pool_of(setup: Setup, ins, packed: bool, held=None) -> np.ndarray:
    """The first `held` rows of each request (default: all of them) in one layer, poison elsewhere."""
    row = tpu_rows.LatentRow(k_dim=setup.head_dim, v_dim=setup.v_head_dim)
    layout = tpu_rows.LatentBytes(latent_dim=row.v_dim, rope_dim=row.k_dim - row.v_dim)
    lanes = layout.lanes if packed else row.lanes
    dtype = np.dtype(np.int8) if packed else jnp.dtype(setup.dtype)
    pool = np.full((drawn.NUM_LAYERS * setup.num_pages, setup.page_size, lanes), -1 if packed else np.nan).astype(dtype)
    for b, n in enumerate(ins.seq_lens if held is None else held):
        rows = ins.keys[b][:n, 0]
        if packed:
            latent, key = (x.astype(setup.dtype) for x in np.split(rows, [row.v_dim], axis=1))
            rows = np.asarray(layout.from_bits(jnp.asarray(_bits(setup, latent, key))))
        at = drawn.slots(setup, ins, b)[:n]
        pool[at // setup.page_size, at % setup.page_size] = np.pad(rows, ((0, 0), (0, lanes - rows.shape[1])))
    if tpu_rows.held_as_words(setup.page_size):
        return np.asarray(tpu_rows.to_words(jnp.asarray(pool)))
    return pool


def _bits(setup: Setup, latent, key):
    sizes = dict(qk_nope_head_dim=8, qk_rope_head_dim=key.shape[1], v_head_dim=8, kv_dtype=_FP8)
    spec = jattn.MLASpec(num_q_heads=setup.group, kv_lora_rank=latent.shape[1], **sizes)
    return drawn_latents.rows_of(spec, jnp.dtype(setup.dtype), latent, key)


def check(setup: Setup, config, data, packed=False, writes=False):
    """A drawn batch is attended to as right as plain JAX does; what is written lies in the pool, and nothing else."""
    ins = drawn.build(setup, data.draw(drawn.batches(setup)))
    ins.v_scales = ins.k_scales
    before = pool_of(setup, ins, packed, ins.seq_lens - ins.q_lens if writes else None)
    rows = [jnp.asarray(x) for x in np.split(ins.k[:, 0], [setup.v_head_dim], axis=1)] if writes else []
    out, lse, *pool = attend(setup, config, packed, writes)(*drawn.given(ins), jnp.asarray(before), *rows)
    assert_no_race()
    if writes:
        want = pool_of(setup, ins, packed)
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (pool[0], want)))
    if packed:  # what is attended to is what the bits say
        for b, keys in enumerate(ins.keys):
            if not len(keys):
                continue
            bits = _bits(setup, *np.split(keys[:, 0], [setup.v_head_dim], axis=1))
            read = latent_rows.unpack(jnp.asarray(bits), setup.v_head_dim, setup.dtype)
            ins.keys[b] = np.asarray(read)[:, None]
    ins.values = [keys[..., : setup.v_head_dim] for keys in ins.keys]  # the front of the row
    earned.compare(setup, ins, out, lse)
