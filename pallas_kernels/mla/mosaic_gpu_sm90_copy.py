"""What the copying warpgroup of the Hopper latent attention does: blocks of latent rows into shared memory, in halves.

A half has a ring of its own, as the warpgroup that sums its values hands it back by itself. Pages of 8 tokens and more
come by the copy engine, one copy a page and half; with sharers each copies a part of it to all. Smaller pages are
gathered by the threads, 16 bytes each; packed rows are widened on the way (`mosaic_gpu_sm90_packed.py`).
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
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as gpu_barriers
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import THREADS
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import Rows, constant
from pallas_kernels.mla import mosaic_gpu_sm90_barriers as barriers
from pallas_kernels.mla import mosaic_gpu_sm90_packed as packed
from pallas_kernels.mla.mosaic_gpu_sm90_records import HALVES, Arrays, Static

arith, gpu, ir, llvm = utils.arith, utils.gpu, utils.ir, utils.llvm

_CHUNK = 16  # bytes a thread copies at once


def produce(static: Static, arrays: Arrays, smem: dict, item: Item, at) -> None:
    """All blocks of a program's item, as far ahead as the rings have room."""
    stages = static.config.stages
    if static.packed and not static.interpret:
        packed.produce(static, arrays, smem, item)
        return
    for i, ids in enumerate(_first_ids(static, arrays, item, at)):
        block = item.begin + i

        @pl.when(block < item.end)
        def _(i=i, ids=ids, block=block):
            for half in HALVES:
                _copy(static, arrays, smem, item, half, jnp.int32(i), block, ids)

    first, ahead = item.begin + stages, static.ahead
    asked = [_ids(static, arrays, item, first + n) for n in range(max(ahead, 1))]
    for n in range(ahead):
        _ask(static, arrays, first + n, item.end, asked[n])

    def step(block, asked):
        following = _ids(static, arrays, item, block + len(asked))
        if ahead:
            _ask(static, arrays, block + ahead, item.end, following)
        i = block - item.begin
        for half in HALVES:
            stage = lax.rem(i, stages)
            barriers.wait(smem[f"{half}_free"], stage, lax.div(i, stages) - 1)
            _copy(static, arrays, smem, item, half, stage, block, asked[0])
        return (*asked[1:], following)

    lax.fori_loop(first, item.end, step, tuple(asked))


def _ask(static: Static, arrays: Arrays, block, end, ids: tuple) -> None:
    # ask for a block's bytes, each sharer for a part of the page's rows, if it is one of the item
    pitch = static.k_dim * jnp.dtype(static.dtype).itemsize
    some, scalar = static.config.block_kv // static.config.sharers, plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 2, rows_io.LANES))
    def inline(_, pool, first, when, lanes):
        first, when, lanes = (x.registers.item() for x in (first, when, lanes))
        lane = arith.remui(utils.thread_idx(), constant(THREADS))
        wanted = arith.cmpi(arith.CmpIPredicate.ne, when, constant(0))
        with mgpu.when(arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0)))):
            page_id = utils.vector.extract(lanes, dynamic_position=[], static_position=[0])
            row = arith.addi(arith.muli(page_id, constant(static.page_size)), first)
            source = rows_io.address_of(row, pitch, utils.memref_ptr(pool), ir.IntegerType.get_signless(8))
            copies.asm("cp.async.bulk.prefetch.L2.global [$0], $1;", source, constant(some * pitch), constraints="l,r")

    first = _start(static, block) + lax.axis_index("sharers") * some
    inline(arrays.pages, jnp.asarray(first, jnp.int32), (block < end).astype(jnp.int32), *ids)


def _first_ids(static: Static, arrays: Arrays, item: Item, at) -> list[tuple]:
    # page ids of the blocks that fill the rings; an item holds them, as its copying warpgroup wants them at once
    stages, pages = static.config.stages, static.pages
    if static.interpret or not pages:
        return [_ids(static, arrays, item, item.begin + i) for i in range(stages)]
    starts = [len(Item._fields) + i * pages for i in range(stages)]
    found = [rows_io.load_lanes(arrays.items, at, start, start + pages - 1) for start in starts]
    return [(ids + arrays.page_offset[0],) for ids in found]


def _ids(static: Static, arrays: Arrays, item: Item, block) -> tuple:
    # page ids of a block; past the last key its page's. On a GPU a number a lane.
    if not static.pages:
        return ()
    size, last = static.page_size, jnp.maximum(item.kv_len - 1, 0) // static.page_size
    first = block * static.config.block_kv // size
    if not static.interpret:
        return (rows_io.load_lanes(arrays.page_table, item.seq, first, last) + arrays.page_offset[0],)
    entries = (jnp.clip(first + j, 0, last) for j in range(static.pages))
    return tuple(arrays.page_table[item.seq, entry] + arrays.page_offset[0] for entry in entries)


def _copy(static: Static, arrays: Arrays, smem: dict, item: Item, half: str, stage, block, ids: tuple) -> None:
    # start the copy of half a block into its ring
    if static.packed:
        packed.widen_plain(static, arrays, smem, item, half, stage, block)
    elif static.interpret:
        _interpreted(static, arrays, smem, item, half, stage, block, ids)
    elif static.gathers:
        _gather(static, arrays, smem, item, half, stage, block)
    else:
        _engine(static, arrays, smem, half, stage, block, ids)


def _column(static: Static, half: str) -> int:
    return 0 if half == "left" else static.widths[0]


def _start(static: Static, block):
    # first token of a block in its first page
    return block * static.config.block_kv % static.page_size if static.page_size > static.config.block_kv else 0


def _interpreted(static: Static, arrays: Arrays, smem: dict, item: Item, half: str, stage, block, ids) -> None:
    ring, full, block_kv = smem[half], smem[f"{half}_full"], static.config.block_kv
    columns = pl.ds(_column(static, half), ring.shape[2])
    if static.gathers:
        for j in range(block_kv):
            key = jnp.clip(block * block_kv + j, 0, item.kv_len - 1)
            page = arrays.page_table[item.seq, key // static.page_size] + arrays.page_offset[0]
            source = arrays.pages.at[page, pl.ds(key % static.page_size, 1), columns]
            plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(j, 1)], full.at[stage])
        return
    rows = min(block_kv, static.page_size)
    for j, page in enumerate(ids):
        source = arrays.pages.at[page, pl.ds(_start(static, block), rows), columns]
        plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(j * rows, rows)], full.at[stage])


def _engine(static: Static, arrays: Arrays, smem: dict, half: str, stage, block, ids: tuple) -> None:
    ring, full = smem[half], smem[f"{half}_full"]
    block_kv, width, size = static.config.block_kv, ring.shape[2], jnp.dtype(ring.dtype).itemsize
    rows, column = min(block_kv, static.page_size), _column(static, half)
    swizzle, layout = copies.transforms(width, size, static.swizzle)
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), plgpu.RefType(layout), plgpu.RefType(), *[scalar] * 3, rows_io.LANES)
    first_warp = 0 if half == "left" else 2

    @plgpu.inline_mgpu(arg_types=types)
    def inline(ctx, pool, smem, words, *scalars):
        place, stage, start, lanes = (x.registers.item() for x in scalars)
        warp = arith.remui(utils.warp_idx(), constant(4))
        barrier = gpu_barriers.place_of(words, place)
        together = None
        if static.together:
            together = [dim for dim in gpu.Dimension if ctx.cluster_size[dim] > 1]
        for mine in range(min(4, static.pages)):
            here = arith.cmpi(arith.CmpIPredicate.eq, warp, constant((first_warp + mine) % 4))
            with mgpu.when(here):
                one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)
                if mine == 0:  # bytes may arrive before they are announced: the phase waits for this arrival
                    copies._expect(barrier, block_kv * width * size, one)
                for j in range(mine, static.pages, 4):
                    target = (_index(stage), mgpu.ds(j * (rows // 8), rows // 8))
                    ctx.async_copy(
                        src_ref=pool,
                        dst_ref=utils.memref_slice(smem, target),
                        gmem_slice=(
                            _index(copies._lane(lanes, j)),
                            mgpu.ds(_index(start), rows),
                            mgpu.ds(column, width),
                        ),
                        gmem_transform=(mgpu.TileTransform((8, swizzle // size)),),
                        swizzle=swizzle,
                        barrier=barrier,
                        arrive=False,
                        predicate=one,
                        collective=together,
                    )

    scalars = (full.first + stage, stage, _start(static, block))
    inline(arrays.pages, ring, full.words, *(jnp.asarray(x, jnp.int32) for x in scalars), *ids)


def _gather(static: Static, arrays: Arrays, smem: dict, item: Item, half: str, stage, block) -> None:
    page, width = static.page_size, arrays.page_table.shape[1]
    pitch = static.k_dim * jnp.dtype(static.dtype).itemsize

    def address(refs, values, row):
        table, pool = refs
        seq, offset, kv_len, first = values
        # rows past the last key have it in their place: never an entry of the table that means nothing
        key = arith.minsi(arith.addi(first, row), arith.subi(kv_len, constant(1)))
        entry = arith.addi(arith.muli(seq, constant(width)), arith.divui(key, constant(page)))
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        id_ = arith.addi(llvm.load(i32, utils.getelementptr(utils.memref_ptr(table), [entry], i32)), offset)
        token = arith.addi(arith.muli(id_, constant(page)), arith.remui(key, constant(page)))
        return rows_io.address_of(token, pitch, utils.memref_ptr(pool), i8)

    scalars = (item.seq, arrays.page_offset[0], item.kv_len, block * static.config.block_kv)
    _copy_rows(static, smem[half], stage, _column(static, half), (arrays.page_table, arrays.pages), scalars, address)
    gpu_barriers.arrive_copied(smem[f"{half}_full"], stage)


def load_queries(static: Static, arrays: Arrays, target, half: str, rows: Rows, start) -> None:
    """Half of the queries of 64 rows into shared memory, the last row again where there is none, for products to read.

    Args: target: [1, 64, width of the half]. start: first of these rows in the tile.
    """
    column = _column(static, half)
    if static.interpret:
        shape = target.shape[1:]
        target[0] = rows_io.load(arrays.q, rows, shape=shape, start=start, column=column, interpret=True)
        plgpu.commit_smem()
        return
    pitch = static.k_dim * jnp.dtype(static.dtype).itemsize

    def address(refs, values, row):
        first, offset, used, begin = values
        row = arith.minsi(arith.addi(row, begin), arith.subi(used, constant(1)))
        i8 = ir.IntegerType.get_signless(8)
        return rows_io.address_of(rows_io.array_row(row, first, offset, rows), pitch, utils.memref_ptr(refs[0]), i8)

    scalars = (rows.first, rows.offset, rows.used, start)
    _copy_rows(static, target, jnp.minimum(rows.first, 0), column, (arrays.q,), scalars, address)
    copies.commit_gathered()
    copies.wait_gathered(0)


def _copy_rows(static: Static, target, place, column: int, refs: tuple, scalars: tuple, address) -> None:
    # Start copies of the rows of `target[place]`, 16 bytes a thread at once, from column `column` of the row that
    # `address` gives by the refs, the scalars and the row's number.
    size = jnp.dtype(target.dtype).itemsize
    rows, row_bytes = target.shape[1], target.shape[2] * size
    swizzle, layout = copies.transforms(target.shape[2], size, static.swizzle)
    chunks, scalar = row_bytes // _CHUNK, plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(layout), *[plgpu.RefType()] * len(refs), *[scalar] * (2 + len(scalars)))

    def some(n):
        @plgpu.inline_mgpu(arg_types=types)
        def inline(_, smem, *rest):
            memrefs, (place, n, *values) = rest[: len(refs)], (rows_io.value_of(x) for x in rest[len(refs) :])
            i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
            lane = arith.remui(utils.thread_idx(), constant(THREADS))
            linear = arith.addi(lane, arith.muli(n, constant(THREADS)))

            def copy():
                row = arith.divui(linear, constant(chunks))
                byte = arith.muli(arith.remui(linear, constant(chunks)), constant(_CHUNK))
                there = arith.addi(byte, constant(column * size))
                source = utils.getelementptr(address(memrefs, values, row), [there], i8)
                # made here each time, or it is kept in a register from the start of the program
                here = [copies.shared_address(smem)]
                base = llvm.inline_asm(i32, here, "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
                base = arith.addi(base, arith.muli(place, constant(rows * row_bytes)))
                to = arith.addi(base, copies.swizzled(row, byte, row_bytes, swizzle))
                copies.asm("cp.async.cg.shared.global [$0], [$1], 16;", to, source, constraints="r,l")

            if rows * chunks % THREADS == 0:
                copy()
            else:
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, linear, constant(rows * chunks))):
                    copy()

        inline(target, *refs, *(jnp.asarray(x, jnp.int32) for x in (place, n, *scalars)))

    # not a constant, or the addresses of all rounds are kept in registers
    rounds = -(-rows * chunks // THREADS) + jnp.minimum(place, 0)
    lax.fori_loop(0, rounds, lambda n, _: some(n), None)


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)
