"""What a program of the Hopper latent attention with half of the columns copies: its queries, and its part of blocks."""
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
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import Rows, constant
from pallas_kernels.mla import mosaic_gpu_sm90_barriers as barriers
from pallas_kernels.mla import mosaic_gpu_sm90_copy as producer
from pallas_kernels.mla.mosaic_gpu_sm90_records import Arrays, Static

arith, ir = utils.arith, utils.ir


def produce(static: Static, arrays: Arrays, smem: dict, item: Item, at) -> None:
    """This program's columns of all blocks of the item, as far ahead as the ring has room."""
    stages = static.config.stages
    for i, ids in enumerate(producer.first_ids(static, arrays, item, at)):
        block = item.begin + i

        @pl.when(block < item.end)
        def _(i=i, ids=ids, block=block):
            _copy(static, arrays, smem, jnp.int32(i), block, ids)

    def step(block, ids):
        following = producer.page_ids(static, arrays, item, block + 1)
        i = block - item.begin
        stage = lax.rem(i, stages)
        barriers.wait(smem["free"], stage, lax.div(i, stages) - 1)
        _copy(static, arrays, smem, stage, block, ids)
        return following

    first = item.begin + stages
    lax.fori_loop(first, item.end, step, producer.page_ids(static, arrays, item, first))


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

    start = block * block_kv % static.page_size if static.page_size > block_kv else 0
    scalars = (full.first + stage, stage, start, rank)
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
