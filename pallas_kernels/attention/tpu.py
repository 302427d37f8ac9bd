"""Ragged paged attention on TPU: prefill, decode, mixed batches and verification of trees in one call.

Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180 (paging); https://docs.jax.dev/en/latest/pallas/tpu/ (memory).
"""
# Settings are passed on as mappings, which the checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._common import float8, masks, tpu_rows
from pallas_kernels._common.masks import Rules, Tree
from pallas_kernels._common.rows import check_splits
from pallas_kernels._common.tpu_devices import Device, device_named
from pallas_kernels._common.tpu_rows import LANES, LatentRow, Row, round_up
from pallas_kernels.attention import tpu_operands
from pallas_kernels.attention import tpu_schedule as schedules
from pallas_kernels.attention.tpu_config import Config, Facts, block_kv, fitting, heuristic, rows_of, tuned
from pallas_kernels.attention.tpu_launch import launch
from pallas_kernels.attention.tpu_records import Static
from pallas_kernels.attention.tpu_schedule import Items

_VMEM_SHARE = 0.9  # of a core's vector memory: the compiler needs some for spills and for XLA's own


class Fresh(NamedTuple):
    """A step's own keys and values, for the kernel to write."""

    rows: jax.Array  # [tokens, lanes] or i32[tokens, tiles, 1, 128], as the pool holds them
    slots: jax.Array  # i32[tokens], page * page_size + offset in the whole pool, -1 writes nothing


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
    token_scales: bool = False,
    num_splits: int = 1,
    fresh: Fresh | None = None,
    config: Config | tuple[Config, ...] | None = None,
    device: str | None = None,
    vmem: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Attention of packed queries over pages that already hold their keys; see `pallas_kernels.attention.xla`.

    Args: as there, but for the pool, which is one array of rows (`pallas_kernels._common.tpu_rows`):
      k_pages: [pages_total, page_size, lanes], keys and values of all heads of a token side by side; of a size that is
        no multiple of 8 as words, i32[pages_total, page_size, tiles, 1, 128], of entries of `kv_dtype`.
        With a scale a token, int8 rows that hold the scales, too (`Row.scales`).
      v_pages: None.
      kv_heads, v_dim: of the rows; None takes q's heads and q's width.
      row: what a row holds, where it is another kind (`tpu_rows.LatentRow`). token_scales: whether rows hold scales.
      k_scale, v_scale: None or f32 scalars.
      fresh: what the kernel writes to the pool first, each key where the table has it; a pool that is donated is
        written in place. Wants `can_write`.
      config: sizes; None takes `heuristic`. With several, a request uses the first whose block_q holds its rows.
      device: the generation to choose sizes for, as `tpu_devices.DEVICES` names them; None: sizes that fit any.
      vmem: bytes of vector memory that a program may use; None: most of what the device has.
    Returns: as there; with `fresh` also the pool.
    Raises: as there; also ValueError for a dtype this kernel was not built for, or sizes that cannot fit.
    """
    tokens, q_heads, k_dim = q.shape
    row = row or Row(kv_heads=kv_heads or q_heads, k_dim=k_dim, v_dim=v_dim or k_dim, scales=token_scales)
    kind = _kind(q, k_pages, row, kv_dtype)
    _check(q, k_pages, v_pages, kind, row, page_table, seq_lens, cu_q_lens, num_splits, sinks)
    if any(scale is not None and scale.ndim for scale in (k_scale, v_scale)):
        raise ValueError("k_scale, v_scale of each token: the TPU kernel reads them in the rows; want a cache of them")
    rules = Rules(sm_scale=sm_scale, mask=mask, logit_soft_cap=logit_soft_cap, sliding_window=sliding_window)
    tree = masks.make_tree(rules, tokens, tree_bits, tree_starts, tree_kv_positions, q_positions)
    chip = device_named(device)
    vmem = vmem_of(chip) if vmem is None else vmem
    out_dtype = q.dtype if num_splits == 1 else jnp.float32
    out = jnp.zeros((num_splits, tokens, q_heads, row.v_dim), out_dtype)
    lse = jnp.full((num_splits, tokens, q_heads), -jnp.inf, jnp.float32)
    facts = facts_of(q, k_pages, row, kind, max_q_len, tree_bits, writes=fresh is not None)
    configs = _configs(config, facts, vmem, chip)
    if fresh is not None and not can_write(configs, max_q_len):
        raise ValueError(f"fresh with max_q_len={max_q_len} and {configs}: want every request in one tile of queries")
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
        fresh=fresh,
        vmem=vmem,
        interpret=interpret,
    )
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
            mine, mine_lse, *written = call(q, k_pages, items, tree, one)
            k_pages = written[0] if written else k_pages
            out = jnp.where(items.real[..., None, None], mine, out)
            lse = jnp.where(items.real[..., None], mine_lse, lse)
        shortest = one.block_q + 1
    out, lse = (out[0], lse[0]) if num_splits == 1 else (out, lse)
    return (out, lse) if fresh is None else (out, lse, k_pages)


MAX_WRITTEN = 64  # new rows of a request that the kernel writes: more are a prefill, little beside whose products


def can_write(configs: tuple[Config, ...], max_q_len: int) -> bool:
    """Whether the kernel can write a step's own keys: every block must have one reader, and so a request one tile."""
    return max_q_len <= min(configs[-1].block_q, MAX_WRITTEN)


def configs_of(
    q: jax.Array,
    pool: jax.Array,
    *,
    writes: bool,
    max_q_len: int,
    kv_heads: int | None = None,
    v_dim: int | None = None,
    token_scales: bool = False,
    kv_dtype: jax.typing.DTypeLike | None = None,
    tree_bits: jax.Array | None = None,
    config: Config | tuple[Config, ...] | None = None,
    device: str | None = None,
    vmem: int | None = None,
) -> tuple[Config, ...]:
    """The sizes that `paged_attention` takes for these. Args: writes: whether with `fresh`; the rest as there."""
    row = Row(kv_heads=kv_heads or q.shape[1], k_dim=q.shape[2], v_dim=v_dim or q.shape[2], scales=token_scales)
    facts = facts_of(q, pool, row, _kind(q, pool, row, kv_dtype), max_q_len, tree_bits, writes=writes)
    chip = device_named(device)
    return _configs(config, facts, vmem_of(chip) if vmem is None else vmem, chip)


def facts_of(
    q: jax.Array, pool: jax.Array, row: Row, kind, max_q_len: int, tree_bits: jax.Array | None, *, writes: bool
) -> Facts:
    """What sizes of a call are chosen from. Args: kind: dtype of keys and values; the rest as in `paged_attention`."""
    return Facts(
        row=row,
        group=q.shape[1] // row.kv_heads,
        max_q_len=max_q_len,
        page_size=pool.shape[1],
        kv_bytes=row.held_dtype(kind).itemsize,
        held_as_words=pool.ndim == 5,
        q_bytes=max(q.dtype.itemsize, 2),
        tree_words=0 if tree_bits is None else tree_bits.shape[1] + 1,
        writes=writes,
    )


def _kind(q, pool, row: Row, kv_dtype) -> jnp.dtype:
    # dtype of keys and values once they are rows in vector memory
    if isinstance(row, LatentRow) and row.packed:
        return jnp.dtype(q.dtype)
    if kv_dtype is not None and (pool.ndim == 5 or row.scales):
        return jnp.dtype(kv_dtype)
    return float8.kind_of(pool, kv_dtype)


def _configs(config, facts: Facts, vmem: int, chip: Device) -> tuple[Config, ...]:
    if config is None:
        configs = heuristic(facts, vmem=vmem, cores=chip.cores, sizes=tuned(chip.name))
    else:
        given = config if isinstance(config, tuple) else (config,)
        configs = tuple(fitting(one, facts, vmem) for one in given)
    if any(facts.row.kv_heads % one.heads for one in configs):
        raise ValueError(f"{configs} for {facts.row.kv_heads} KV heads: want heads that divide them")
    if any(one.parts > 1 for one in configs) and facts.unpacked:
        raise ValueError(f"{configs}: parts > 1 takes pages of whole rows, as products read them; want parts=1")
    return configs


def vmem_of(device: Device) -> int:
    """Bytes of vector memory that a program may use."""
    return int(device.vmem_bytes * _VMEM_SHARE)


def _attend_class(
    q, pool, items: Items, tree: Tree | None, config: Config, *, rules, row: Row, kind, facts: Facts, page_table,
    page_offset, sinks, scales, out_dtype, fresh: Fresh | None, vmem, interpret,
):  # fmt: skip
    # -> out [splits, tokens, q_heads, v_dim], lse [splits, tokens, q_heads], wrong where not items.real; and the pool
    static = _static(q, pool, kind, page_table, rules, row, facts, config, sinks, tree)
    chunk = static.table_chunk
    table = jnp.pad(page_table, [(0, 0), (0, static.table_chunks * chunk - page_table.shape[1])])
    operands = dict(
        items=schedules.fields(items, tree),
        counts=jnp.stack([items.busy, jnp.asarray(page_offset, jnp.int32)]),
        scales=tpu_operands.one_scale(scales, rules),
    )
    if fresh is not None:
        operands["slots"] = fresh.slots
    operands |= dict(
        table=table.reshape(-1, 1, chunk),
        q=tpu_operands.queries(static, q, items).astype(static.compute),
        pool=pool,
    )
    if fresh is not None:
        operands["fresh"] = _spaced(static, fresh)
    if tree is not None:
        lanes = round_up(facts.tree_words, LANES)
        operands["bits"] = schedules.tree_rows(items, rules, tree, lanes=lanes)
        if rules.sliding_window is not None:
            operands["places"] = schedules.key_places(items, tree, keys=static.keys, block_kv=static.block_kv)
    if sinks is not None:
        operands["sinks"] = tpu_operands.sink_rows(static, sinks)
    out, lse, *written = launch(static, operands, out_dtype, vmem, interpret)
    return *tpu_operands.tokens(static, items, out, lse), *written


def _spaced(static: Static, fresh: Fresh):
    # rows that the kernel may take from any token on, block_q at a time
    rows = fresh.rows if static.words else fresh.rows[:, None]
    return jnp.pad(rows, [(0, static.config.block_q)] + [(0, 0)] * (rows.ndim - 1))


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
        writes=facts.writes,
    )


_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_NARROW = tuple(jnp.dtype(kind) for kind in (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2))


def _check(q, pool, v_pages, kind, row: Row, page_table, seq_lens, cu_q_lens, num_splits: int, sinks) -> None:
    if pool.ndim == 5 and pool.dtype == jnp.int32:
        fits = pool.shape[2:] == tpu_rows.word_shape(row, kind)
    else:
        fits = pool.ndim == 3 and pool.shape[2] == row.held_lanes and pool.dtype == row.held_dtype(kind)
    if v_pages is not None or not fits or q.shape[1] % row.kv_heads:
        raise ValueError(
            f"pool{list(pool.shape)} for q{list(q.shape)} and {row}: the TPU kernel wants one array [pages, page_size, "
            f"lanes={row.held_lanes}] of {row.held_dtype(kind)} rows (or of words), and a multiple of the KV heads; "
            "make the cache with layout='rows'"
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
    check_splits(num_splits, sinks)
