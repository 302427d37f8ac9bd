"""Queries, keys and values of the Hopper prefill from device memory to shared memory, on their way to a barrier.

Queries come by the threads, 16 bytes each, as a tile's rows lie anywhere; keys and values by the copy engine, one copy
a page, from pages of 8 tokens and more and from packed rows, and by the threads from smaller pages and packed
rows that start at no multiple of 8.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as barriers
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import (
    THREADS,
    Arrays,
    Static,
    Tile,
)
from pallas_kernels.attention.mosaic_gpu_sm90_rows import Rows, constant

arith, gpu, ir, llvm, nvvm = utils.arith, utils.gpu, utils.ir, utils.llvm, utils.nvvm

_CHUNK = 16  # bytes a thread copies at once


def load(
    static: Static, arrays: Arrays, pool, ring, *, full, free, tile: Tile, offset, block, stage, phase, when, first_warp
) -> None:
    """Start the copy of a block of keys into `ring[stage]` if `when`, once `free` has reached `phase` there.

    first_warp: which of the four warps starts the first page.
    """
    rest = (static, arrays, pool, ring, full, free, tile, offset, block, stage, phase)
    if static.gathers:
        pl.when(when)(lambda: _gather_block(*rest))
        return
    if not static.gathers_some:
        _engine(*rest, when, first_warp)
        return

    @pl.when(when)
    def _():
        aligned = starts_aligned(tile)

        @pl.when(aligned)
        def _():
            barriers.wait(free, stage, phase)  # all threads, as all arrive
            _engine(*rest, True, first_warp)
            barriers.arrive_all(full, stage)

        @pl.when(jnp.logical_not(aligned))
        def _():
            _gather_block(*rest)
            barriers.arrive(full, stage)


def starts_aligned(tile: Tile):
    """Whether the copy engine can copy this tile's packed keys."""
    return (tile.kv_row & 7) == 0


def _engine(
    static: Static, arrays: Arrays, pool, ring, full, free, tile: Tile, offset, block, stage, phase, when, first_warp
) -> None:
    # one copy a page, or one of packed rows
    config, page = static.config, static.page_size
    dim, size = pool.shape[-1], jnp.dtype(pool.dtype).itemsize
    swizzle, layout = _layout(dim, jnp.dtype(ring.dtype).itemsize)
    tiling = () if swizzle is None else (mgpu.TileTransform((8, swizzle // size)),)
    unit = 1 if swizzle is None else 8  # rows that an index of the ring steps over
    rows = config.block_kv if page is None else min(config.block_kv, page)
    parts = config.block_kv // rows
    scalar = plgpu.Layout.WG_SPLAT(())
    refs = [pool, ring, full.words, *([] if page is None else [arrays.page_table])]
    types = [plgpu.RefType(layout) if ref is ring else plgpu.RefType() for ref in refs]
    names = ("seq", "offset", "head", "kv_len", "kv_row", "block", "stage", "full", "free", "phase", "when")

    @plgpu.inline_mgpu(arg_types=(*types, *[scalar] * len(names)))
    def inline(ctx, *args):
        pool, smem, words, *others = args[: len(refs)]
        at = {name: rows_io.value_of(x) for name, x in zip(names, args[len(refs) :], strict=True)}
        warp = arith.remui(utils.warp_idx(), constant(4))
        wanted = arith.cmpi(arith.CmpIPredicate.ne, at["when"], constant(0))
        barrier = barriers.place_of(words, at["full"])
        first = arith.muli(at["block"], constant(config.block_kv))
        for mine in range(min(4, parts)):
            here = arith.cmpi(arith.CmpIPredicate.eq, warp, constant((first_warp + mine) % 4))
            with mgpu.when(arith.andi(here, wanted)):
                places = []
                for j in range(mine, parts, 4):
                    key = arith.addi(first, constant(j * rows))
                    if page is None:
                        places.append((mgpu.ds(_index(arith.addi(at["kv_row"], key)), rows), _index(at["head"])))
                        continue
                    # keys past the last have their page in its place: never an entry of the table that means nothing
                    key = arith.minsi(key, arith.subi(at["kv_len"], constant(1)))
                    entry = arith.divui(key, constant(page))
                    start = arith.subi(first, arith.muli(entry, constant(page))) if page > rows else constant(0)
                    id_ = arith.addi(_table_entry(others[-1], at["seq"], entry), at["offset"])
                    places.append((_index(id_), mgpu.ds(_index(start), rows), _index(at["head"])))
                if free is not None:
                    odd = arith.cmpi(arith.CmpIPredicate.ne, at["phase"], constant(0))
                    barriers.place_of(words, at["free"]).wait_parity(odd)
                one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)
                if mine == 0:  # bytes may arrive before they are announced: the phase waits for this arrival
                    copies._expect(barrier, config.block_kv * dim * size, one)
                for j, place in zip(range(mine, parts, 4), places, strict=True):
                    ctx.async_copy(
                        src_ref=pool,
                        dst_ref=utils.memref_slice(
                            smem, (_index(at["stage"]), mgpu.ds(j * (rows // unit), rows // unit))
                        ),
                        gmem_slice=place,
                        gmem_transform=tiling,
                        swizzle=swizzle,
                        barrier=barrier,
                        arrive=False,
                        predicate=one,
                    )

    places = full.first + stage, 0 if free is None else free.first + stage
    scalars = (tile.seq, offset, tile.head, tile.kv_len, tile.kv_row, block, stage, *places, phase)
    inline(*refs, *(jnp.asarray(x, jnp.int32) for x in scalars), jnp.asarray(when).astype(jnp.int32))


def _gather_block(
    static: Static, arrays: Arrays, pool, ring, full, free, tile: Tile, offset, block, stage, phase
) -> None:
    # rows of small pages, or packed ones, 16 bytes a thread at once
    if free is not None:
        barriers.wait(free, stage, phase)
    config, page = static.config, static.page_size
    heads, row_bytes = pool.shape[-2], pool.shape[-1] * jnp.dtype(pool.dtype).itemsize
    swizzle, layout = _layout(pool.shape[-1], jnp.dtype(ring.dtype).itemsize)
    scalar = plgpu.Layout.WG_SPLAT(())
    tables = [] if page is None else [arrays.page_table]
    types = (plgpu.RefType(), plgpu.RefType(layout), *[plgpu.RefType() for _ in tables], *[scalar] * 8)

    def some(i):
        @plgpu.inline_mgpu(arg_types=types)
        def inline(_, pool, smem, *others):
            seq, offset, head, kv_len, kv_row, first, stage, i = (rows_io.value_of(x) for x in others[len(tables) :])
            i64, i8 = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)

            def source(row):
                key = arith.minsi(arith.addi(first, row), arith.subi(kv_len, constant(1)))
                if page is None:
                    token = arith.addi(kv_row, key)
                else:
                    entry = arith.divui(key, constant(page))
                    id_ = arith.addi(_table_entry(others[0], seq, entry, arrays.page_table.shape[1]), offset)
                    token = arith.addi(arith.muli(id_, constant(page)), arith.remui(key, constant(page)))
                place = arith.addi(arith.muli(arith.extsi(i64, token), utils.c(heads, i64)), arith.extsi(i64, head))
                return utils.getelementptr(utils.memref_ptr(pool), [arith.muli(place, utils.c(row_bytes, i64))], i8)

            base = copies.shared_address(smem)
            base = arith.addi(base, arith.muli(stage, constant(config.block_kv * row_bytes)))
            _copy_pass(base, source, i, config.block_kv, row_bytes, swizzle)

        scalars = (tile.seq, offset, tile.head, tile.kv_len, tile.kv_row, block * config.block_kv, stage, i)
        inline(pool, ring, *tables, *(jnp.asarray(x, jnp.int32) for x in scalars))

    lax.fori_loop(0, _passes(config.block_kv, row_bytes, stage), lambda i, _: some(i), None)
    barriers.arrive_copied(full, stage)


def gather_q(static: Static, arrays: Arrays, smem: dict, tile: Tile, stage) -> None:
    """Start the copies of a tile's queries, the last row again where there is none; each thread arrives at `q_full`."""
    group, row_bytes = static.group, static.k_dim * 2
    rows = Rows(tile.row, tile.head * group, tile.tokens * group, group, static.kv_heads * group)
    swizzle, layout = _layout(static.k_dim, 2)
    scalar = plgpu.Layout.WG_SPLAT(())

    def some(i):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(layout), *[scalar] * 5))
        def inline(_, gmem, smem, first, offset, used, stage, i):
            first, offset, used, stage, i = (rows_io.value_of(x) for x in (first, offset, used, stage, i))
            i8 = ir.IntegerType.get_signless(8)

            def source(row):
                row = rows_io.array_row(arith.minsi(row, arith.subi(used, constant(1))), first, offset, rows)
                return rows_io.address_of(row, row_bytes, utils.memref_ptr(gmem), i8)

            size = constant(static.config.rows * row_bytes)
            base = arith.addi(copies.shared_address(smem), arith.muli(stage, size))
            _copy_pass(base, source, i, static.config.rows, row_bytes, swizzle)

        scalars = (rows.first, rows.offset, rows.used, stage, i)
        inline(arrays.q, smem["q"], *(jnp.asarray(x, jnp.int32) for x in scalars))

    lax.fori_loop(0, _passes(static.config.rows, row_bytes, tile.tokens), lambda i, _: some(i), None)
    barriers.arrive_copied(smem["q_full"], stage)


def _passes(rows: int, row_bytes: int, some):
    # no constant, given some number that is not negative, or all passes' addresses are kept in registers
    return -(-rows * row_bytes // _CHUNK // THREADS) + jnp.minimum(some, 0)


def _copy_pass(base, source, i, rows: int, row_bytes: int, swizzle: int | None) -> None:
    # chunk `thread + 128 i` of a block of rows: row n // chunks, bytes 16 * (n % chunks) of it
    lane = arith.remui(utils.thread_idx(), constant(THREADS))
    chunks = row_bytes // _CHUNK
    linear = arith.addi(lane, arith.muli(i, constant(THREADS)))

    def copy():
        row, byte = (
            arith.divui(linear, constant(chunks)),
            arith.muli(arith.remui(linear, constant(chunks)), constant(_CHUNK)),
        )
        address = utils.getelementptr(source(row), [byte], ir.IntegerType.get_signless(8))
        target = arith.addi(base, copies.swizzled(row, byte, row_bytes, swizzle))
        copies.asm("cp.async.cg.shared.global [$0], [$1], 16;", target, address, constraints="r,l")

    if rows * chunks % THREADS == 0:
        copy()
    else:
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, linear, constant(rows * chunks))):
            copy()


def _table_entry(table, seq, entry, width: int | None = None):
    i32 = ir.IntegerType.get_signless(32)
    width = width or ir.MemRefType(table.type).shape[1]
    at = arith.addi(arith.muli(seq, constant(width)), entry)
    return llvm.load(i32, utils.getelementptr(utils.memref_ptr(table), [at], i32))


def _layout(dim: int, itemsize: int) -> tuple[int | None, tuple]:
    # swizzle and transforms of rows in shared memory; 8-bit ones lie row after row
    return (None, ()) if itemsize == 1 else copies.transforms(dim, itemsize)


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)
