"""A pytest plug-in that puts the TPU kernels behind every test of the door, interpreted on a CPU.

    PYTHONPATH=. python -m pytest -p tests.pallas_kernels.on_tpu tests/jattn/test_attend_cases.py

Where a test's arrays have a dtype that the kernels take, they answer in the place of plain JAX: the pools of keys and
values are packed into rows before each call, latent rows padded to whole lanes. Memory is NaN before it is written.
With ON_TPU_RACES=1 a race fails the test. ON_TPU_PART=2/5 runs the second of five parts of the tests.
"""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn.kernel_sets
from pallas_kernels._common import float8, latent_rows, tpu_rows
from pallas_kernels.attention import tpu as attention
from pallas_kernels.attention import xla as attention_xla
from pallas_kernels.attention.tpu_config import Sizes
from pallas_kernels.kv_write import tpu as kv_write
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.mla import tpu as mla
from pallas_kernels.mla import xla as mla_xla

SERVED: dict[str, list[bool]] = dict(attend=[], write_kv=[], attend_latent=[])
SIZES = Sizes(block_bytes=1 << 12, rows=64, keys=128)  # 128 keys a block: the interpreter's time goes with them
RACES = bool(os.environ.get("ON_TPU_RACES"))
INTERPRET = pltpu.InterpretParams(detect_races=RACES, uninitialized_memory="nan")
_QUERIES = (jnp.bfloat16, jnp.float32)


def paged_attention(q, k_pages, v_pages, *, kv_dtype=None, **more):
    """As `pallas_kernels.attention.xla.paged_attention`."""
    kind = float8.kind_of(k_pages, kv_dtype)
    fits = q.dtype in _QUERIES and kind != jnp.float16 and k_pages.shape[0] > 0
    SERVED["attend"].append(fits)
    if not fits:
        return attention_xla.paged_attention(q, k_pages, v_pages, kv_dtype=kv_dtype, **more)
    scales = [more.pop(name) for name in ("k_scale", "v_scale") if _a_token(more.get(name))]
    rows = _rows(k_pages, v_pages, kind, scales)
    heads, v_dim = k_pages.shape[2], v_pages.shape[3]
    if scales:
        more |= dict(token_scales=True, kv_dtype=kind)
    if tpu_rows.held_as_words(k_pages.shape[1]):
        rows, more["kv_dtype"] = tpu_rows.to_words(rows), kind
    return attention.paged_attention(q, rows, None, kv_heads=heads, v_dim=v_dim, interpret=INTERPRET, **more)


def _bits(x):
    # what XLA:CPU moves as it is: it makes wider floats of 8-bit ones, and a NaN loses its own bits
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _rows(k_pages, v_pages, kind, scales):
    rows = tpu_rows.pack(_bits(k_pages), _bits(v_pages), *scales)
    return rows if scales else jax.lax.bitcast_convert_type(rows, kind)


def _a_token(scale) -> bool:
    return scale is not None and scale.ndim == 3


def write_kv(k_pages, v_pages, k, v, slots, *, kv_dtype=None, **more):
    """As `pallas_kernels.kv_write.xla.write_kv`."""
    kind = float8.kind_of(k_pages, kv_dtype)
    fits = kind != jnp.float16
    SERVED["write_kv"].append(fits)
    if not fits:
        return kv_write_xla.write_kv(k_pages, v_pages, k, v, slots, kv_dtype=kv_dtype, **more)
    scales = [more.pop(name) for name in ("k_scales", "v_scales") if name in more]
    row = tpu_rows.Row(kv_heads=k.shape[1], k_dim=k.shape[2], v_dim=v.shape[2], scales=bool(scales))
    rows = _rows(k_pages, v_pages, kind, scales)
    words = tpu_rows.held_as_words(k_pages.shape[1])
    more |= dict(token_scales=bool(scales), kv_dtype=kind)
    rows, _ = kv_write.write_kv(tpu_rows.to_words(rows) if words else rows, None, k, v, slots, **more)
    rows = tpu_rows.from_words(rows, row.held_dtype(kind), row.lanes) if words else rows
    if scales:
        held = tpu_rows.from_planes(rows[..., row.scales_at :], 2 * row.kv_heads, jnp.float32)
        scales = jnp.split(held, 2, axis=-1)
    sides = tpu_rows.unpack(_bits(rows), row)
    return *(jax.lax.bitcast_convert_type(x, k_pages.dtype) for x in sides), *scales


def attend_latent(q, pages, **more):
    """As `pallas_kernels.mla.xla.attend_latent`."""
    fits = q.dtype in _QUERIES and pages.dtype in (*_QUERIES, jnp.uint8) and pages.shape[0] > 0
    SERVED["attend_latent"].append(fits)
    if not fits:
        return mla_xla.attend_latent(q, pages, **more)
    if pages.dtype == jnp.uint8:
        latent_dim = more["latent_dim"]
        held = tpu_rows.LatentBytes(latent_dim=latent_dim, rope_dim=latent_rows.width(pages, latent_dim) - latent_dim)
        return mla.attend_latent(q, held.from_bits(pages), interpret=INTERPRET, **more)
    spare = jnp.zeros((*pages.shape[:2], -pages.shape[2] % tpu_rows.LANES), pages.dtype)
    return mla.attend_latent(q, jnp.concatenate([pages, spare], axis=-1), interpret=INTERPRET, **more)


def pytest_configure(config):
    """Put the kernels in the rows of plain JAX, which the tests resolve."""
    attention.tuned = lambda _: SIZES
    functions = dict(attend=paged_attention, write_kv=write_kv, attend_latent=attend_latent)
    jattn.kernel_sets.KERNELS = tuple(
        dataclasses.replace(row, function=functions[row.op]) if row.set == "xla" and row.op in functions else row
        for row in jattn.kernel_sets.KERNELS
    )


def pytest_collection_modifyitems(items):
    """Keep one part of the tests."""
    part, _, parts = os.environ.get("ON_TPU_PART", "1/1").partition("/")
    items[:] = items[int(part) - 1 :: int(parts)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test in which two accesses raced."""
    result = yield
    if RACES and any(any(SERVED[op]) for op in ("attend", "attend_latent")):  # writes are plain JAX on a CPU
        from watched import assert_no_race  # tests/ is on the path only once pytest has begun

        assert_no_race()
    return result


def pytest_sessionfinish():
    """Append how many of the traced calls the kernels served to the file that ON_TPU_LOG names, if any."""
    name = os.environ.get("ON_TPU_LOG")
    if name and any(SERVED.values()):
        with open(name, "a") as log:
            log.write("".join(f"{op} {sum(served)} of {len(served)}\n" for op, served in SERVED.items()))
