"""The TPU attention as a Pallas call: where each array lies, scratch memory, and its cost."""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.tpu_rows import LANES, round_up
from pallas_kernels.attention import tpu_ahead, tpu_fresh
from pallas_kernels.attention.tpu_kernel import program
from pallas_kernels.attention.tpu_records import Refs, Static


def launch(static: Static, operands: dict, out_dtype, vmem: int, interpret) -> list:
    """out, lse, and the pool where `static.writes`. Args: operands: by the names of `Refs`, in that order."""
    row, config, tiles, rows = static.row, static.config, static.tiles, static.rows
    num_items = operands["q"].shape[0]
    wide_k, wide_v = (row.window(side, 0, config.heads)[1] for side in "kv")
    smem, hbm, whole = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY, pltpu.VMEM))
    spaces = dict(items=smem, counts=smem, scales=smem, slots=smem, sinks=whole)
    results = dict(
        out=jax.ShapeDtypeStruct((num_items, tiles, rows, wide_v), out_dtype),
        lse=jax.ShapeDtypeStruct((num_items, tiles, rows, LANES), jnp.float32),
    )
    pool = operands["pool"]
    if static.writes:
        results["written"] = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    carry, depth = (tiles, rows, LANES), 3 if config.parts > 1 else 2
    scratch = dict(
        table_smem=pltpu.SMEM((2 * static.table_chunk,), jnp.int32),
        kv=pltpu.VMEM(_kv_sizes(static, bool(interpret)), static.held),
        q_vmem=pltpu.VMEM((depth, tiles, rows, wide_k), static.compute),
        top=pltpu.VMEM(carry, jnp.float32),
        total=pltpu.VMEM(carry, jnp.float32),
        acc=pltpu.VMEM((tiles, rows, wide_v), jnp.float32),
        out_vmem=pltpu.VMEM((2, tiles, rows, wide_v), out_dtype),
        lse_vmem=pltpu.VMEM((2, *carry), jnp.float32),
    )
    if static.words:
        scratch["kv_words"] = pltpu.VMEM((config.depth, static.block_kv, *pool.shape[2:]), jnp.int32)
    if static.latent:
        sizes = (1 if static.words else config.depth, static.block_kv, static.latent.lanes)
        scratch["kv_bytes"] = pltpu.VMEM(sizes, jnp.int8)
    if row.scales:
        scratch["token_scales"] = pltpu.VMEM((round_up(2 * row.kv_heads, 8), static.block_kv), jnp.float32)
    if static.writes:
        fresh, block_q = operands["fresh"], config.block_q
        scratch["fresh_vmem"] = pltpu.VMEM((depth, block_q, *fresh.shape[1:]), fresh.dtype)
        stage = (block_q, *fresh.shape[1:])
        if not static.words:
            groups = tpu_fresh.groups_of(block_q, static.step, static.keys)
            stage = (groups, static.step, row.held_lanes)
        scratch["stage"] = pltpu.VMEM((2, *stage), pool.dtype)
        scratch["staged"] = pltpu.SMEM((2, 2), jnp.int32)
    for name in ("bits", "places"):
        if name in operands:
            scratch[f"{name}_vmem"] = pltpu.VMEM((depth, *operands[name].shape[1:]), operands[name].dtype)
    if config.parts > 1:
        scratch["raw"] = pltpu.VMEM((rows, static.block_kv // config.parts), jnp.float32)
    semaphores = ("table", "kv", "q", "stage", "bits", "out")
    scratch |= {f"{name}_sem": pltpu.SemaphoreType.DMA((3,)) for name in semaphores}
    names = (*operands, *results, *scratch)

    def body(*refs):
        run = tpu_ahead.program if config.parts > 1 else program
        held: dict[str, Any] = dict.fromkeys(Refs._fields) | dict(zip(names, refs, strict=True))
        if len(held["kv"].shape) == 4:
            held["kv"] = held["kv"].reshape(config.depth, static.block_kv, row.lanes)
        if static.writes:
            held["pool"] = held["written"]  # the same memory
        run(static, Refs(**held))

    return pl.pallas_call(
        body,
        grid=(config.cores,),
        in_specs=[spaces.get(name, hbm) for name in operands],
        out_specs=[hbm] * len(results),
        out_shape=list(results.values()),
        scratch_shapes=list(scratch.values()),
        # Checks of each page's address are half of what starting its copy takes (20 bundles of a core become 10, v6e).
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=vmem, disable_bounds_checks=True
        ),
        cost_estimate=_cost(static, operands),
        input_output_aliases={list(operands).index("pool"): 2} if static.writes else {},
        interpret=interpret,
        name="jattn_attention",
    )(*operands.values())


def _kv_sizes(static: Static, interpreted: bool) -> tuple[int, ...]:
    if static.words or static.latent:
        return 1, static.block_kv, static.row.lanes
    if static.held.itemsize != 2 or static.row.lanes >= 1024 or interpreted:  # views of another shape don't interpret
        return static.config.depth, static.block_kv, static.row.lanes
    # As 8 rows and lanes, tiled as XLA tiles a pool: with tiles of 16 rows, which a v7x prefers, the copy of a page has
    # strides, and starting it takes 17 bundles instead of 5. Wide rows would take more to load than is won.
    return static.config.depth, static.block_kv // 8, 8, static.row.lanes


def _cost(static: Static, operands: dict) -> pl.CostEstimate:
    # the table's room stands for the lengths, which are not known while tracing
    row, keys = static.row, operands["table"].size * static.page_size
    rows = row.kv_heads * static.group * static.config.block_q
    return pl.CostEstimate(
        flops=2 * keys * rows * (row.k_dim + row.v_dim),
        bytes_accessed=keys * row.held_lanes * static.arriving.itemsize,
        transcendentals=keys * rows,
    )
