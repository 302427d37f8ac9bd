"""What a program of the Hopper latent attention with half of the columns copies: of its queries, and of blocks."""
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
from pallas_kernels.mla import mosaic_gpu_sm90_copy as producer
from pallas_kernels.mla.mosaic_gpu_sm90_records import Arrays, Static

arith, ir = utils.arith, utils.ir


def produce(static: Static, arrays: Arrays, smem: dict, item: Item, at) -> None:
    """This program's columns of all blocks of the item, as far ahead as the ring has room.

    What comes after is asked for before there is room, so that it comes from the L2 then: a block's place is free for
    less time than device memory takes.
    """
    stages = static.config.stages
    for i, ids in enumerate(producer.first_ids(static, arrays, item, at)):
        block = item.begin + i

        @pl.when(block < item.end)
        def _(i=i, ids=ids, block=block):
            _copy(static, arrays, smem, jnp.int32(i), block, ids)

    ids_of = lambda block: producer.page_ids(static, arrays, item, block)  # noqa: E731
    first, ahead = item.begin + stages, static.config.ahead
    ids = [ids_of(first + n) for n in range(max(ahead, 1))]
    for n in range(ahead):
        _ask(static, arrays, first + n, item.end, ids[n])

    def step(block, ids):
        following = ids_of(block + len(ids))
        if ahead:
            _ask(static, arrays, block + ahead, item.end, following)
        i = block - item.begin
        stage = lax.rem(i, stages)
        barriers.wait(smem["free"], stage, lax.div(i, stages) - 1)
        _copy(static, arrays, smem, stage, block, ids[0])
        return (*ids[1:], following)

    lax.fori_loop(first, item.end, step, tuple(ids))


def _ask(static: Static, arrays: Arrays, block, end, ids: tuple) -> None:
    # ask for this program's half of the rows of a block, of each page, if it is one of the item
    rows, pitch = min(static.config.block_kv, static.page_size), static.k_dim * jnp.dtype(static.dtype).itemsize
    half, scalar = rows // 2, plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * 2, rows_io.LANES))
    def inline(_, pool, first, when, lanes):
        first, when = rows_io.value_of(first), rows_io.value_of(when)
        lane = arith.remui(utils.thread_idx(), constant(THREADS))
        wanted = arith.cmpi(arith.CmpIPredicate.ne, when, constant(0))
        with mgpu.when(arith.andi(wanted, arith.cmpi(arith.CmpIPredicate.ult, lane, constant(static.pages)))):
            page_id = utils.vector.extract(lanes.registers.item(), dynamic_position=[], static_position=[0])
            row = arith.addi(arith.muli(page_id, constant(static.page_size)), first)
            i8 = ir.IntegerType.get_signless(8)
            source = rows_io.address_of(row, pitch, utils.memref_ptr(pool), i8)
            copies.asm("cp.async.bulk.prefetch.L2.global [$0], $1;", source, constant(half * pitch), constraints="l,r")

    first = producer.start_of(static, block) + lax.axis_index("sharers") * half
    inline(arrays.pages, jnp.asarray(first, jnp.int32), (block < end).astype(jnp.int32), *ids)


def _copy(static: Static, arrays: Arrays, smem: dict, stage, block, ids: tuple) -> None:
    # one copy a page and part of the columns; the pages are spread over the four warps
    names, full = static.column_parts, smem["full"]
    rings = [smem[name] for name in names]
    block_kv, size = static.config.block_kv, jnp.dtype(static.dtype).itemsize
    rows, rank = min(block_kv, static.page_size), lax.axis_index("sharers")
    layouts = [copies.transforms(ring.shape[2], size, s) for ring, s in zip(rings, static.column_swizzles, strict=True)]
    nbytes = sum(block_kv * ring.shape[2] * size for ring in rings)
    scalar = plgpu.Layout.WG_SPLAT(())
    types = (plgpu.RefType(), *(plgpu.RefType(layout) for _, layout in layouts), plgpu.RefType(), *[scalar] * 4)

    @plgpu.inline_mgpu(arg_types=(*types, rows_io.LANES))
    def inline(ctx, pool, *refs):
        *smem, words, place, stage, start, rank, lanes = refs
        place, stage, start, rank, lanes = (x.registers.item() for x in (place, stage, start, rank, lanes))
        warp = arith.remui(utils.warp_idx(), constant(4))
        barrier = gpu_barriers.place_of(words, place)
        for mine in range(min(4, static.pages)):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, warp, constant(mine))):
                one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)
                if mine == 0:  # bytes may arrive before they are announced: the phase waits for this arrival
                    copies._expect(barrier, nbytes, one)
                for j in range(mine, static.pages, 4):
                    page_id = copies._lane(lanes, j)
                    for ring, (swizzle, _), first in zip(smem, layouts, (0, static.v_dim), strict=False):
                        width = ir.MemRefType(ring.type).shape[2] * ir.MemRefType(ring.type).shape[4]
                        column = arith.addi(arith.muli(rank, constant(width)), constant(first))
                        target = (_index(stage), mgpu.ds(j * (rows // 8), rows // 8))
                        ctx.async_copy(
                            src_ref=pool,
                            dst_ref=utils.memref_slice(ring, target),
                            gmem_slice=(_index(page_id), mgpu.ds(_index(start), rows), mgpu.ds(_index(column), width)),
                            gmem_transform=(mgpu.TileTransform((8, swizzle // size)),),
                            swizzle=swizzle,
                            barrier=barrier,
                            arrive=False,
                            predicate=one,
                        )

    scalars = (full.first + stage, stage, producer.start_of(static, block), rank)
    inline(arrays.pages, *rings, full.words, *(jnp.asarray(x, jnp.int32) for x in scalars), *ids)


def load_queries(static: Static, arrays: Arrays, smem: dict, rows: Rows, who) -> None:
    """This program's columns of the queries of a warpgroup's 64 rows, the last row again where there is none."""
    size = jnp.dtype(static.dtype).itemsize
    pitch = static.k_dim * size
    for name, first, swizzle in zip(static.column_parts, (0, static.v_dim), static.column_swizzles, strict=False):
        target = smem[f"{name}_q"]
        column = (lax.axis_index("sharers") * target.shape[2] + first) * size

        def address(refs, values, row):
            first, offset, used, begin, column = values
            row = arith.minsi(arith.addi(row, begin), arith.subi(used, constant(1)))
            i8 = ir.IntegerType.get_signless(8)
            at = rows_io.address_of(rows_io.array_row(row, first, offset, rows), pitch, utils.memref_ptr(refs[0]), i8)
            return utils.getelementptr(at, [column], i8)

        scalars = (rows.first, rows.offset, rows.used, who * 64, column)
        producer.copy_rows(target, who, 0, (arrays.q,), scalars, address, swizzle)
    copies.commit_gathered()
    copies.wait_gathered(0)


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)
