"""Ragged paged attention on TPU: prefill, decode, mixed batches and verification of trees in one call.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging); https://docs.jax.dev/en/latest/pallas/tpu/ (memory).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common import float8, ints, masks, tpu_rows
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels._common.tpu_devices import Device, device_named
from pallas_kernels._common.tpu_rows import LANES, Row, round_up
from pallas_kernels.attention import tpu_ahead
from pallas_kernels.attention import tpu_schedule as schedules
from pallas_kernels.attention.tpu_config import Config, Facts, block_kv, fitting, heuristic, rows_of
from pallas_kernels.attention.tpu_kernel import FIELDS, Refs, Static, program
from pallas_kernels.attention.tpu_schedule import Items

_VMEM_SHARE = 0.9  # of a core's vector memory: the compiler needs some for spills and for XLA's own


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None = None,
    *,
    page_table: jax.Array,
    page_offset: jax.Array | int = 0,
    seq_lens: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    sm_scale: float,
    mask: str = "causal",
    logit_soft_cap: float | None = None,
    sliding_window: int | None = None,
    sinks: jax.Array | None = None,
    tree_bits: jax.Array | None = None,
    tree_starts: jax.Array | None = None,
    tree_kv_positions: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    row: Row | None = None,
    num_splits: int = 1,
    config: Config | tuple[Config, ...] | None = None,
    device: str | None = None,
    vmem: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of packed queries over pages that already hold their keys; see `pallas_kernels.attention.xla`.

    Args: as there, but for the pool, which is one array of rows (`pallas_kernels._common.tpu_rows`):
      k_pages: [pages_total, page_size, lanes], keys and values of all heads of a token side by side; of a size that is
        no multiple of 8 as words, i32[pages_total, page_size, tiles, 1, 128], of entries of `kv_dtype`.
      v_pages: None.
      kv_heads, v_dim: of the rows; None takes q's heads and q's width.
      row: what a row holds, where it is another kind (`tpu_rows.LatentRow`).
      config: sizes; None takes `heuristic`. With several, a request uses the first whose block_q holds its rows.
      device: the generation to choose sizes for, as `tpu_devices.DEVICES` names them; None: sizes that fit any.
      vmem: bytes of vector memory that a program may use; None: most of what the device has.
    Returns, raises: as there; also ValueError for a dtype this kernel was not built for, or sizes that cannot fit.
    """
    tokens, q_heads, k_dim = q.shape
    row = row or Row(kv_heads=kv_heads or q_heads, k_dim=k_dim, v_dim=v_dim or k_dim)
    words = k_pages.ndim == 5
    kind = jnp.dtype(kv_dtype) if words and kv_dtype is not None else float8.kind_of(k_pages, kv_dtype)
    _check(q, k_pages, v_pages, kind, row, page_table, seq_lens, cu_q_lens, num_splits, sinks)
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = masks.make_tree(rules, tokens, tree_bits, tree_starts, tree_kv_positions, q_positions)
    chip = device_named(device)
    vmem = vmem_of(chip) if vmem is None else vmem
    out_dtype = q.dtype if num_splits == 1 else jnp.float32
    out = jnp.zeros((num_splits, tokens, q_heads, row.v_dim), out_dtype)
    lse = jnp.full((num_splits, tokens, q_heads), -jnp.inf, jnp.float32)
    facts = Facts(
        row=row,
        group=q_heads // row.kv_heads,
        max_q_len=max_q_len,
        page_size=k_pages.shape[1],
        kv_bytes=kind.itemsize,
        held_as_words=words,
        q_bytes=max(q.dtype.itemsize, 2),
        tree_words=0 if tree is None else tree.bits.shape[1] + 1,
    )
    if config is None:
        configs = heuristic(facts, vmem=vmem, cores=chip.cores)
    else:
        given = config if isinstance(config, tuple) else (config,)
        configs = tuple(fitting(one, facts, vmem) for one in given)
    call = functools.partial(
        _attend_class,
        rules=rules,
        row=row,
        kind=kind,
        facts=facts,
        page_table=page_table,
        page_offset=page_offset,
        sinks=sinks,
        scales=(k_scale, v_scale),
        out_dtype=out_dtype,
        vmem=vmem,
        interpret=interpret,
    )
    if any(row.kv_heads % one.heads for one in configs):
        raise ValueError(f"{configs} for {row.kv_heads} KV heads: want heads that divide them")
    if any(one.parts > 1 for one in configs) and (words or any(s is not None and s.ndim for s in (k_scale, v_scale))):
        raise ValueError(f"{configs}: parts > 1 takes pages of whole rows, and no scale of each token; want parts=1")
    shortest = 1
    for i, one in enumerate(configs):
        longest = max_q_len if i + 1 == len(configs) else min(one.block_q, max_q_len)
        items = (
            schedules.make(
                rules,
                tree,
                seq_lens=seq_lens,
                cu_q_lens=cu_q_lens,
                num_tokens=tokens,
                shortest=shortest,
                longest=longest,
                block_q=one.block_q,
                block_kv=one.block_pages * facts.page_size,
                splits=num_splits,
            )
            if tokens and seq_lens.shape[0]
            else None
        )
        if items is not None:
            mine, mine_lse = call(q, k_pages, items, tree, one)
            out = jnp.where(items.real[..., None, None], mine, out)
            lse = jnp.where(items.real[..., None], mine_lse, lse)
        shortest = one.block_q + 1
    return (out[0], lse[0]) if num_splits == 1 else (out, lse)


def vmem_of(device: Device) -> int:
    """Bytes of vector memory that a program may use."""
    return int(device.vmem_bytes * _VMEM_SHARE)


def _attend_class(
    q, pool, items: Items, tree: Tree | None, config: Config, *, rules, row: Row, kind, facts: Facts, page_table,
    page_offset, sinks, scales, out_dtype, vmem, interpret,
):  # fmt: skip
    # -> out [splits, tokens, q_heads, v_dim], lse [splits, tokens, q_heads]; wrong where not items.real
    static = _static(q, pool, kind, page_table, rules, row, facts, config, sinks, tree)
    chunk, rows = static.table_chunk, static.rows
    table = jnp.pad(page_table, [(0, 0), (0, static.table_chunks * chunk - page_table.shape[1])])
    operands = dict(
        items=schedules.fields(items, tree),
        counts=jnp.stack([items.busy, jnp.asarray(page_offset, jnp.int32)]),
        scales=_one_scale(scales, rules),
        table=table.reshape(-1, 1, chunk),
        q=_queries(static, q, items).astype(static.compute),
        pool=pool,
    )
    if any(scale is not None and scale.ndim for scale in scales):
        operands["token_scales"] = _scale_blocks(static, scales, page_table, page_offset)
    if tree is not None:
        lanes = round_up(facts.tree_words, LANES)
        operands["bits"] = schedules.tree_rows(items, rules, tree, lanes=lanes)
        if rules.sliding_window is not None:
            operands["places"] = schedules.key_places(items, tree, keys=static.keys, block_kv=static.block_kv)
    if sinks is not None:
        operands["sinks"] = _sink_rows(static, sinks)
    outs = _launch(static, operands, out_dtype, vmem, interpret)
    return _tokens(static, items, *outs, rows)


def _static(q, pool, kind, page_table, rules, row, facts, config, sinks, tree) -> Static:
    chunk = max(config.block_pages, LANES)
    wide = jnp.bfloat16 if q.dtype == jnp.bfloat16 and kind.itemsize <= 2 else jnp.float32
    return Static(
        config=config,
        rules=rules,
        row=row,
        group=facts.group,
        rows=rows_of(config, facts),
        page_size=facts.page_size,
        block_kv=block_kv(config, facts),
        blocks=-(-page_table.shape[1] // config.block_pages),
        table_chunk=chunk,
        table_chunks=max(-(-page_table.shape[1] // chunk), 1),
        tree_words=0 if tree is None else tree.bits.shape[1],
        sinks=sinks is not None,
        compute=wide,
        kind=kind,
        words=pool.ndim == 5,
    )


def _queries(static: Static, q, items: Items):
    # [items, tiles, rows, window]: heads, then tokens; zeros in the lanes of other heads
    row, heads, group = static.row, static.config.heads, static.group
    picked = ints.pick(q, items.tokens)  # [items, block_q, q_heads, k_dim]
    picked = picked.reshape(*picked.shape[:2], static.tiles, heads, group, row.k_dim)
    picked = jnp.moveaxis(picked, 1, 4)  # [items, tiles, heads, group, block_q, k_dim]
    placed = []
    for tile in range(static.tiles):
        base, wide = row.window("k", tile * heads, heads)
        for head in range(heads):
            at = row.offset("k", tile * heads + head) - base
            padding = [(0, 0)] * 3 + [(at, wide - at - row.k_dim)]
            placed.append(jnp.pad(picked[:, tile, head], padding))
    wide = placed[0].shape[-1]
    out = jnp.stack(placed, axis=1).reshape(picked.shape[0], static.tiles, heads * group * static.config.block_q, wide)
    return jnp.pad(out, [(0, 0), (0, 0), (0, static.rows - out.shape[2]), (0, 0)])


def _one_scale(scales, rules: Rules):
    # f32[2]: what all scores and all outputs are multiplied by
    k, v = (jnp.float32(1) if x is None or x.ndim else x.astype(jnp.float32) for x in scales)
    return jnp.stack([k * rules.sm_scale, v])


def _scale_blocks(static: Static, scales, page_table, page_offset):
    # f32[seqs * blocks, 2 * kv_heads, block_kv]: keys along lanes, as scores have them
    pages = static.blocks * static.config.block_pages
    table = jnp.pad(page_table, [(0, 0), (0, pages - page_table.shape[1])])

    def blocks(scale):
        if scale is None or scale.ndim == 0:
            return jnp.ones((table.shape[0], static.blocks, static.row.kv_heads, static.keys), jnp.float32)
        found = ints.clipped(scale.astype(jnp.float32), table + page_offset)  # [seqs, pages, page_size, kv_heads]
        found = found.reshape(table.shape[0], static.blocks, static.keys, static.row.kv_heads)
        return jnp.swapaxes(found, 2, 3)

    both = jnp.concatenate([blocks(scale) for scale in scales], axis=2)
    both = jnp.pad(both, [(0, 0)] * 3 + [(0, static.block_kv - static.keys)])
    return both.reshape(-1, *both.shape[2:])


def _sink_rows(static: Static, sinks):
    rows = jnp.repeat(sinks.astype(jnp.float32).reshape(static.tiles, -1), static.config.block_q, axis=1)
    rows = jnp.pad(rows, [(0, 0), (0, static.rows - rows.shape[1])])
    return jnp.broadcast_to(rows[..., None], (*rows.shape, LANES))


def _tokens(static: Static, items: Items, out, lse, rows):
    # rows of products -> packed tokens
    row, heads, group, block_q = static.row, static.config.heads, static.group, static.config.block_q
    used = heads * group * block_q

    def split(x):
        return x[:, :, :used].reshape(x.shape[0], static.tiles, heads, group, block_q, x.shape[-1])

    out, lse = split(out), split(lse[..., :1])[..., 0]
    parts = []
    for tile in range(static.tiles):
        base, _ = row.window("v", tile * heads, heads)
        for head in range(heads):
            at = row.offset("v", tile * heads + head) - base
            parts.append(out[:, tile, head, :, :, at : at + row.v_dim])
    out = jnp.stack(parts, axis=1)  # [items, kv_heads, group, block_q, v_dim]
    out = out.reshape(out.shape[0], row.kv_heads * group, block_q, row.v_dim)
    lse = lse.reshape(lse.shape[0], row.kv_heads * group, block_q)
    out, lse = jnp.moveaxis(out, 2, 1), jnp.moveaxis(lse, 2, 1)
    place = jnp.broadcast_to(items.place[None], items.item.shape)
    return ints.pick(out, items.item, place), ints.pick(lse, items.item, place)


def _launch(static: Static, operands: dict, out_dtype, vmem: int, interpret):
    row, config, tiles, rows = static.row, static.config, static.tiles, static.rows
    num_items = operands["q"].shape[0]
    wide_k, wide_v = (row.window(side, 0, config.heads)[1] for side in "kv")
    smem, hbm, whole = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pl.ANY, pltpu.VMEM))
    spaces = dict(items=smem, counts=smem, scales=smem, sinks=whole)
    results = dict(
        out=jax.ShapeDtypeStruct((num_items, tiles, rows, wide_v), out_dtype),
        lse=jax.ShapeDtypeStruct((num_items, tiles, rows, LANES), jnp.float32),
    )
    carry, depth = (tiles, rows, LANES), tpu_ahead.DEPTH if config.parts > 1 else 2
    scratch = dict(
        table_smem=pltpu.SMEM((2, 1, static.table_chunk), jnp.int32),
        kv=pltpu.VMEM((1 if static.words else depth, static.block_kv, row.lanes), static.kind),
        q_vmem=pltpu.VMEM((depth, tiles, rows, wide_k), static.compute),
        top=pltpu.VMEM(carry, jnp.float32),
        total=pltpu.VMEM(carry, jnp.float32),
        acc=pltpu.VMEM((tiles, rows, wide_v), jnp.float32),
        out_vmem=pltpu.VMEM((2, tiles, rows, wide_v), out_dtype),
        lse_vmem=pltpu.VMEM((2, *carry), jnp.float32),
    )
    if static.words:
        scratch["kv_words"] = pltpu.VMEM((2, static.block_kv, *operands["pool"].shape[2:]), jnp.int32)
    for name in ("bits", "places", "token_scales"):
        if name in operands:
            scratch[f"{name}_vmem"] = pltpu.VMEM((depth, *operands[name].shape[1:]), operands[name].dtype)
    if config.parts > 1:
        scratch["raw"] = pltpu.VMEM((rows, static.block_kv // config.parts), jnp.float32)
    semaphores = ("table", "kv", "q", "scale", "bits", "out")
    scratch |= {f"{name}_sem": pltpu.SemaphoreType.DMA((depth,)) for name in semaphores}
    names = (*operands, *results, *scratch)

    def body(*refs):
        run = tpu_ahead.program if config.parts > 1 else program
        run(static, Refs(**(dict.fromkeys(Refs._fields) | dict(zip(names, refs, strict=True)))))

    return pl.pallas_call(
        body,
        grid=(config.cores,),
        in_specs=[spaces.get(name, hbm) for name in operands],
        out_specs=[hbm, hbm],
        out_shape=list(results.values()),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem),
        cost_estimate=_cost(static, operands),
        interpret=interpret,
        name="jattn_attention",
    )(*operands.values())


def _cost(static: Static, operands: dict) -> pl.CostEstimate:
    # the table's room stands for the lengths, which are not known while tracing
    row, keys = static.row, operands["table"].size * static.page_size
    rows = row.kv_heads * static.group * static.config.block_q
    return pl.CostEstimate(
        flops=2 * keys * rows * (row.k_dim + row.v_dim),
        bytes_accessed=keys * row.lanes * static.kind.itemsize,
        transcendentals=keys * rows,
    )


_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_NARROW = tuple(jnp.dtype(kind) for kind in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2))


def _check(q, pool, v_pages, kind, row: Row, page_table, seq_lens, cu_q_lens, num_splits: int, sinks) -> None:
    if pool.ndim == 5 and pool.dtype == jnp.int32:
        fits = pool.shape[2:] == tpu_rows.word_shape(row, kind)
    else:
        fits = pool.ndim == 3 and pool.shape[2] == row.lanes
    if v_pages is not None or not fits or q.shape[1] % row.kv_heads:
        raise ValueError(
            f"pool{list(pool.shape)} for q{list(q.shape)} and {row}: the TPU kernel wants one array [pages, page_size, "
            f"lanes={row.lanes}] of rows (or of words), and a multiple of the KV heads; make the cache "
            "with layout='rows'"
        )
    if q.dtype not in _FLOATS or kind not in _FLOATS + _NARROW:
        raise ValueError(
            f"q and pool are {q.dtype} and {kind}: the TPU kernel wants bfloat16 or float32 queries, and pages "
            "of those, int8 or 8-bit floats; resolve with prefer=('xla',)"
        )
    if page_table.shape[0] != seq_lens.shape[0] or cu_q_lens.shape != (seq_lens.shape[0] + 1,):
        raise ValueError(
            f"page_table{list(page_table.shape)}, seq_lens{list(seq_lens.shape)}, cu_q_lens{list(cu_q_lens.shape)}: "
            "want a row a request, and one entry more in cu_q_lens"
        )
    if num_splits < 1 or (num_splits > 1 and sinks is not None):
        raise ValueError(
            f"num_splits={num_splits} with sinks {'given' if sinks is not None else 'None'}: want at least 1, and "
            "sinks applied once, after merge_states, when there is more than one"
        )


assert len(FIELDS) == 8
