"""A pytest plug-in that puts the Hopper kernels behind every test of the door, on a GPU.

Where a test's arrays have a dtype that the kernels take, they answer in the place of plain JAX: heads are padded with
zeros to a width they take, and pages of another size are given as pages of one token; latents and their keys likewise.
With ON_HOPPER_FORM=prefill the
prefill kernel answers all calls without a tree, packed keys too; otherwise the decode kernel does.
"""

# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import os

import jax.numpy as jnp

import jattn.kernel_sets
from pallas_kernels._common import float8
from pallas_kernels.attention import mosaic_gpu_sm90 as attention
from pallas_kernels.attention import mosaic_gpu_sm90_prefill as prefill
from pallas_kernels.attention import xla as attention_xla
from pallas_kernels.kv_write import mosaic_gpu_sm90 as kv_write
from pallas_kernels.kv_write import xla as kv_write_xla
from pallas_kernels.mla import mosaic_gpu_sm90 as mla
from pallas_kernels.mla import xla as mla_xla

SERVED: dict[str, list[bool]] = dict(attend=[], write_kv=[], attend_latent=[])
PREFILL = os.environ.get("ON_HOPPER_FORM") == "prefill"


def paged_attention(
    q, k_pages, v_pages, *, page_table, page_offset=0, k_scale=None, v_scale=None, kv_dtype=None, **more
):
    """As `pallas_kernels.attention.xla.paged_attention`."""
    kind = float8.kind_of(k_pages, kv_dtype)
    fits = _fits(q, kind, k_scale, v_scale, more)
    SERVED["attend"].append(fits)
    given = dict(page_offset=page_offset, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, **more)
    if not fits:
        return attention_xla.paged_attention(q, k_pages, v_pages, page_table=page_table, **given)
    size, v_dim = k_pages.shape[1], v_pages.shape[3]
    if size not in attention.PAGE_SIZES:
        k_pages, v_pages = (x.reshape(-1, 1, *x.shape[2:]) for x in (k_pages, v_pages))
        places = page_table[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
        page_table, given["page_offset"] = places.reshape(len(page_table), -1), page_offset * size
    q, k_pages, v_pages = (_padded(x) for x in (q, k_pages, v_pages))
    function = prefill.paged_attention if PREFILL else attention.paged_attention
    out, lse = function(q, k_pages, v_pages, page_table=page_table, **given)
    return out[..., :v_dim], lse


def ragged_attention(q, k, v, *, k_scale=None, v_scale=None, **more):
    """As `pallas_kernels.attention.xla.ragged_attention`."""
    fits = PREFILL and _fits(q, k.dtype, k_scale, v_scale, more)
    SERVED["attend"].append(fits)
    function, v_dim = attention_xla.ragged_attention, v.shape[2]
    if fits:
        function = prefill.ragged_attention
        q, k, v = (_padded(x) for x in (q, k, v))
    out, lse = function(q, k, v, k_scale=k_scale, v_scale=v_scale, **more)
    return out[..., :v_dim], lse


def _fits(q, kind, k_scale, v_scale, more: dict) -> bool:
    # whether the kernels take these dtypes, scales and mask; the prefill kernel's calls lose what a tree would need
    whole = all(scale is None or scale.ndim == 0 for scale in (k_scale, v_scale))
    fits = q.dtype in (jnp.bfloat16, jnp.float16) and kind in (q.dtype, *float8.KINDS) and whole
    if PREFILL and more.get("mask") != "tree":
        for name in ("tree_bits", "tree_starts", "tree_kv_positions", "q_positions"):
            more.pop(name, None)
    if PREFILL:
        fits = fits and more.get("mask") != "tree" and (kind == q.dtype or q.dtype == jnp.float16)
    return fits


def _padded(x):
    want = next(dim for dim in attention.HEAD_DIMS if dim >= x.shape[-1])
    zeros = jnp.zeros((*x.shape[:-1], want - x.shape[-1]), x.dtype)
    return jnp.concatenate([x, zeros], axis=-1)


def write_kv(k_pages, v_pages, k, v, slots, **more):
    """As `pallas_kernels.kv_write.xla.write_kv`."""
    kind = float8.kind_of(k_pages, more.get("kv_dtype"))
    fits = "k_scales" not in more and k.shape[2] % 8 == v.shape[2] % 8 == 0 and jnp.issubdtype(kind, jnp.floating)
    SERVED["write_kv"].append(fits)
    return (kv_write if fits else kv_write_xla).write_kv(k_pages, v_pages, k, v, slots, **more)


def attend_latent(q, pages, *, latent_dim, page_table, page_offset=0, **more):
    """As `pallas_kernels.mla.xla.attend_latent`."""
    given = dict(page_table=page_table, page_offset=page_offset, **more)
    fits = q.dtype in (jnp.bfloat16, jnp.float16) and pages.dtype == q.dtype and q.shape[1] <= mla.MAX_HEADS
    SERVED["attend_latent"].append(fits)
    if not fits:
        return mla_xla.attend_latent(q, pages, latent_dim=latent_dim, **given)
    q, pages = (_padded_latent(x, latent_dim) for x in (q, pages))
    size, padded = pages.shape[1], latent_dim + -latent_dim % 32
    if size not in mla.PAGE_SIZES:
        pages = pages.reshape(-1, 1, pages.shape[2])
        places = page_table[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
        given |= dict(page_table=places.reshape(len(page_table), -1), page_offset=page_offset * size)
    out, lse = mla.attend_latent(q, pages, latent_dim=padded, **given)
    return out[..., :latent_dim], lse


def _padded_latent(x, latent_dim: int):
    parts = x[..., :latent_dim], x[..., latent_dim:]
    widths = -latent_dim % 32, -parts[1].shape[-1] % 16
    more = [(0, 0)] * (x.ndim - 1)
    return jnp.concatenate([jnp.pad(p, (*more, (0, w))) for p, w in zip(parts, widths, strict=True)], axis=-1)


def pytest_configure(config):
    """Put the kernels in the rows of plain JAX, which the tests resolve."""
    functions = dict(attend=paged_attention, write_kv=write_kv, attend_latent=attend_latent)
    ragged = dict(attend=ragged_attention)
    jattn.kernel_sets.KERNELS = tuple(
        dataclasses.replace(row, function=functions[row.op], ragged=ragged.get(row.op))
        if row.set == "xla" and row.op in functions
        else row
        for row in jattn.kernel_sets.KERNELS
    )


def pytest_sessionfinish():
    """Append how many of the traced calls the kernels served to the file that ON_HOPPER_LOG names, if any."""
    name = os.environ.get("ON_HOPPER_LOG")
    if name and any(SERVED.values()):
        with open(name, "a") as log:
            log.write("".join(f"{op} {sum(served)} of {len(served)}\n" for op, served in SERVED.items()))
