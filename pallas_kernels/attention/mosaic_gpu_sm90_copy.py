"""Blocks of keys and values from pages to shared memory on Hopper.

Pages of 8 tokens and more come by the copy engine, one copy a page: a copy fills whole swizzle rows. Smaller pages are
gathered by the threads, 16 bytes each, asynchronously into the same layout; a thread waits for its own copies.

A block's pages are spread over the four warps, and one thread announces all their bytes: starting a copy takes some 25
dependent instructions, and with one warp for all of them, at 16 tokens a page, copies held up products. The interpreter
runs `copy_gmem_to_smem`; the barriers here are 8 bytes of shared memory each, and their phase follows from the block
number.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io

# the MLIR that Mosaic GPU itself is written in
arith, gpu, ir, llvm, nvvm = utils.arith, utils.gpu, utils.ir, utils.llvm, utils.nvvm

_CHUNK = 16  # bytes a thread copies at once


def swizzle_bytes(dim: int, itemsize: int) -> int:
    """Bytes of the widest swizzle whose rows divide a head."""
    return next(width for width in (128, 64, 32) if (dim * itemsize) % width == 0)


def tiled(shape: tuple[int, ...], dtype, swizzle: int | None = None):
    """Shared memory in the layout that products read, with a swizzle in bytes or the widest."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(shape[-1], jnp.dtype(dtype).itemsize, swizzle)[1])


def transforms(dim: int, itemsize: int, swizzle: int | None = None) -> tuple[int, tuple]:
    """Swizzle of rows of `dim` in bytes, the widest unless given, and the transforms of that layout."""
    swizzle = swizzle or swizzle_bytes(dim, itemsize)
    return swizzle, (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def barriers(count: int):
    """Shared memory of `count` barriers, for `init_barriers`."""
    return plgpu.SMEM((2 * count,), jnp.int32)


def init_barriers(ref) -> None:
    """Make barriers of one arrival each; all threads of the program call this."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def inline(_, memref):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
        for i in range(ref.shape[0] // 2):
            nvvm.mbarrier_init(_barrier(memref, _i32(i)).get_ptr(), _i32(1), predicate=one)
        asm("fence.mbarrier_init.release.cluster;")
        gpu.barrier()

    inline(ref)


class Barriers(NamedTuple):
    """Some barriers of an array of them, one a stage."""

    ref: Any
    first: int

    def at(self, stage):
        """A barrier, for the interpreter."""
        return self.ref.at[stage + self.first]


def wait_barrier(barriers: Barriers, stage, phase) -> None:
    """Wait until phase `phase` (0 or 1) of a barrier is complete."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar))
    def inline(_, memref, stage, phase):
        stage, phase = stage.registers.item(), phase.registers.item()
        odd = arith.cmpi(arith.CmpIPredicate.ne, phase, _i32(0))
        _barrier(memref, stage, barriers.first).wait_parity(odd)

    inline(barriers.ref, jnp.asarray(stage, jnp.int32), jnp.asarray(phase, jnp.int32))


def _expect(barrier, nbytes: int, one) -> None:
    asm(
        "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; }",
        arith.extui(ir.IntegerType.get_signless(32), one),
        llvm.ptrtoint(ir.IntegerType.get_signless(32), barrier.get_ptr()),
        _i32(nbytes),
        constraints="r,r,r",
    )


def _barrier(memref, stage, first: int = 0):
    # barrier `first + stage`; what is constant is no register
    base = utils.getelementptr(utils.memref_ptr(memref), [2 * first], ir.IntegerType.get_signless(32))
    return utils.BarrierRef(base, stage, None, 1)


class Source(NamedTuple):
    """Pages of one request and KV head."""

    page_table: Any  # i32[seqs, max_pages]
    seq: Any
    offset: Any  # added to page ids
    head: Any
    kv_len: Any  # keys that may be read
    block: int  # keys a block
    page: int  # tokens a page
    in_lanes: bool  # whether lane n of each warp holds the id of a block's page n, or every thread all ids
    sharers: int  # programs of a cluster that each copy a part of a page, to all
    interpret: bool

    @property
    def gathers(self) -> bool:
        """Whether threads copy, and not the engine."""
        return self.page < 8

    @property
    def pages(self) -> int:
        """Page ids a block needs up front."""
        return 0 if self.gathers else max(self.block // self.page, 1)

    def ids(self, block) -> tuple:
        """Page ids of a block, loaded early so that nobody waits for them; past the end the last page's."""
        last = jnp.maximum(self.kv_len - 1, 0) // self.page
        first = block * (self.block // self.page) if self.page < self.block else block * self.block // self.page
        if self.in_lanes:
            found = rows_io.load_lanes(self.page_table, self.seq, first, last)
            return (found + self.offset,)
        entries = (jnp.clip(first + j, 0, last) for j in range(self.pages))
        return tuple(self.page_table[self.seq, entry] + self.offset for entry in entries)

    def copy(self, pages, ring, full: Barriers, stage, block, ids: tuple, when, first_warp: int = 0) -> None:
        """Start the copies of a block into `ring[stage]` if `when`; they complete on barrier `stage` of `full`.

        first_warp: which of the four warps starts the first page.
        """
        if self.interpret:
            pl.when(when)(lambda: self._interpreted(pages, ring, full.at(stage), stage, block, ids))
        elif self.gathers:
            pl.when(when)(lambda: self._gather(pages, ring, stage, block))
        else:
            self._engine(pages, ring, full, stage, block, ids, when, first_warp)

    def _interpreted(self, pages, ring, full, stage, block, ids: tuple) -> None:
        if self.gathers:
            return self._rows(pages, ring, full, stage, block)
        rows = min(self.block, self.page)
        for j, page in enumerate(ids):
            source = pages.at[page, pl.ds(self._start(block), rows), self.head]
            plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(j * rows, rows)], full)
        return None

    def _start(self, block):
        # first token of a block in its first page
        return block * self.block % self.page if self.page > self.block else 0

    def _engine(self, pages, ring, full: Barriers, stage, block, ids: tuple, when, first_warp: int) -> None:
        rows, dim, size = min(self.block, self.page), pages.shape[3], jnp.dtype(pages.dtype).itemsize
        swizzle, layout = _layout(pages, ring)
        scalar = plgpu.Layout.WG_SPLAT(())
        held = [rows_io.LANES if self.in_lanes else scalar] * len(ids)
        types = (plgpu.RefType(), plgpu.RefType(layout), plgpu.RefType(), *[scalar] * 4, *held)
        tiling = () if swizzle is None else (mgpu.TileTransform((8, swizzle // size)),)
        unit = 1 if swizzle is None else 8  # rows that an index of the ring steps over

        @plgpu.inline_mgpu(arg_types=types)
        def inline(ctx, pool, smem, barriers, *scalars):
            stage, start, head, when, *pages_ = (x.registers.item() for x in scalars)
            warp = arith.remui(utils.warp_idx(), _i32(4))
            wanted = arith.cmpi(arith.CmpIPredicate.ne, when, _i32(0))
            barrier = _barrier(barriers, stage, full.first)
            together = [dim for dim in gpu.Dimension if ctx.cluster_size[dim] > 1] if self.sharers > 1 else None
            page_id = (lambda j: _lane(pages_[0], j)) if self.in_lanes else pages_.__getitem__
            for mine in range(min(4, self.pages)):
                here = arith.cmpi(arith.CmpIPredicate.eq, warp, _i32((first_warp + mine) % 4))
                with mgpu.when(arith.andi(here, wanted)):
                    one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARP)
                    if mine == 0:  # bytes may arrive before they are announced: the phase waits for this arrival
                        _expect(barrier, self.block * dim * size, one)
                    for j in range(mine, self.pages, 4):
                        target = utils.memref_slice(smem, (_index(stage), mgpu.ds(j * (rows // unit), rows // unit)))
                        ctx.async_copy(
                            src_ref=pool,
                            dst_ref=target,
                            gmem_slice=(_index(page_id(j)), mgpu.ds(_index(start), rows), _index(head)),
                            gmem_transform=tiling,
                            swizzle=swizzle,
                            barrier=barrier,
                            arrive=False,
                            predicate=one,
                            collective=together,
                        )

        scalars = (stage, self._start(block), self.head, jnp.asarray(when).astype(jnp.int32))
        inline(pages, ring, full.ref, *(jnp.asarray(x, jnp.int32) for x in scalars), *ids)

    def _rows(self, pages, ring, full, stage, block) -> None:
        for j in range(self.block):
            key = jnp.clip(block * self.block + j, 0, self.kv_len - 1)
            page = self.page_table[self.seq, key // self.page] + self.offset
            source = pages.at[page, pl.ds(key % self.page, 1), self.head]
            plgpu.copy_gmem_to_smem(source, ring.at[stage, pl.ds(j, 1)], full)

    def _gather(self, pages, ring, stage, block) -> None:
        scalar = plgpu.Layout.WG_SPLAT(())
        dim, size = pages.shape[3], jnp.dtype(pages.dtype).itemsize
        swizzle, layout = _layout(pages, ring)
        types = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(layout), *[scalar] * 6)

        @plgpu.inline_mgpu(arg_types=types)
        def inline(_, table, pool, smem, *scalars):
            seq, offset, head, kv_len, block, stage = (x.registers.item() for x in scalars)
            first = arith.muli(block, _i32(self.block))
            row_at = self._row_address(table, pool, seq, offset, head, kv_len, first, dim * size)
            _copy_rows(smem, stage, row_at, self.block, dim * size, swizzle)

        args = (self.seq, self.offset, self.head, self.kv_len, block, stage)
        inline(self.page_table, pages, ring, *(jnp.asarray(x, jnp.int32) for x in args))

    def _row_address(self, table, pool, seq, offset, head, kv_len, first, row_bytes: int) -> Callable:
        heads, width = ir.MemRefType(pool.type).shape[2], ir.MemRefType(table.type).shape[1]
        i64, i32, i8 = (ir.IntegerType.get_signless(bits) for bits in (64, 32, 8))
        table_ptr, pool_ptr = utils.memref_ptr(table), utils.memref_ptr(pool)

        def address(row):
            key = arith.minsi(arith.addi(first, row), arith.subi(kv_len, _i32(1)))
            entry = arith.addi(arith.muli(seq, _i32(width)), arith.divui(key, _i32(self.page)))
            page = arith.addi(llvm.load(i32, utils.getelementptr(table_ptr, [entry], i32)), offset)
            token = arith.addi(arith.muli(page, _i32(self.page)), arith.remui(key, _i32(self.page)))
            place = arith.addi(arith.muli(arith.extsi(i64, token), utils.c(heads, i64)), arith.extsi(i64, head))
            return utils.getelementptr(pool_ptr, [arith.muli(place, utils.c(row_bytes, i64))], i8)

        return address


def arrivals(block: int, page: int) -> int:
    """Arrivals that a block's barrier waits for in the interpreter: one a copy."""
    return block if page < 8 else max(block // page, 1)


def commit_gathered() -> None:
    """Close a group of gathered copies."""
    _do(lambda: asm("cp.async.commit_group;"))


def wait_gathered(groups: int) -> None:
    """Wait until at most the last `groups` groups are under way, for the whole warpgroup and for products to read."""

    def wait():
        asm(f"cp.async.wait_group {groups};")
        asm("fence.proxy.async.shared::cta;")
        utils.warpgroup_barrier()

    _do(wait)


def handed_over() -> None:
    """Wait until all of this warpgroup has stored to shared memory what products read next."""

    def wait():
        asm("fence.proxy.async.shared::cta;")
        utils.warpgroup_barrier()

    _do(wait)


def warpgroup_barrier() -> None:
    """Wait for the four warps of this warpgroup; not for the interpreter, which knows whole warpgroups only."""
    _do(utils.warpgroup_barrier)


_TURNS = 14  # hardware barriers 14 and 15; Mosaic GPU counts from 1, one a warpgroup


def take_turn(who) -> None:
    """Wait until the other of two computing warpgroups has ended its turn."""
    _turn("bar.sync", who, lambda me: me)


def end_turn(who) -> None:
    """Let the other of two computing warpgroups go on."""
    _turn("bar.arrive", who, lambda me: arith.xori(me, _i32(1)))


def _turn(instruction: str, who, whose: Callable) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def inline(_, who):
        barrier = arith.addi(whose(who.registers.item()), _i32(_TURNS))
        asm(f"{instruction} $0, {2 * utils.WARPGROUP_SIZE};", barrier, constraints="r")

    inline(jnp.asarray(who, jnp.int32))


def cluster_barrier(*, reads: bool = True) -> None:
    """Wait for all threads of the cluster that have not ended; if `reads`, what they wrote can be read then."""
    arrive = "release" if reads else "relaxed"
    _do(lambda: asm(f"barrier.cluster.arrive.{arrive}.aligned;"))
    _do(lambda: asm("barrier.cluster.wait.acquire.aligned;"))


def _do(code: Callable[[], Any]) -> None:
    @plgpu.inline_mgpu()
    def inline(_):
        code()

    inline()


def asm(text: str, *operands, constraints: str = "") -> None:
    """An instruction without a result, which stays where it is."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)


def _layout(pages, ring) -> tuple[int | None, tuple]:
    # swizzle and transforms of a ring that holds pages as they are; 8-bit ones lie row after row
    if jnp.dtype(ring.dtype).itemsize == 1:
        return None, ()
    return transforms(pages.shape[3], jnp.dtype(ring.dtype).itemsize)


def _copy_rows(smem, stage, row_at: Callable, rows: int, row_bytes: int, swizzle: int | None) -> None:
    # chunk n of a block, n = thread + 128 i: row n // chunks, bytes 16 * (n % chunks) of it
    i8 = ir.IntegerType.get_signless(8)
    lane = arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE))
    chunks = row_bytes // _CHUNK
    base = arith.addi(shared_address(smem), arith.muli(stage, _i32(rows * row_bytes)))

    def copy(linear):
        row, byte = arith.divui(linear, _i32(chunks)), arith.muli(arith.remui(linear, _i32(chunks)), _i32(_CHUNK))
        source = utils.getelementptr(row_at(row), [byte], i8)
        target = arith.addi(base, swizzled(row, byte, row_bytes, swizzle))
        asm("cp.async.cg.shared.global [$0], [$1], 16;", target, source, constraints="r,l")

    for start in range(0, rows * chunks, utils.WARPGROUP_SIZE):
        linear = arith.addi(lane, _i32(start))
        if start + utils.WARPGROUP_SIZE <= rows * chunks:
            copy(linear)
        else:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, linear, _i32(rows * chunks))):
                copy(linear)


def swizzled(row, byte, row_bytes: int, swizzle: int | None):
    """Offset of a 16-byte chunk in a block of rows laid in tiles of 8 rows by `swizzle` bytes; None: row after row."""
    if swizzle is None:
        return arith.addi(arith.muli(row, _i32(row_bytes)), byte)
    inner = arith.addi(arith.muli(arith.remui(row, _i32(8)), _i32(swizzle)), arith.remui(byte, _i32(swizzle)))
    # within a tile the chunks are permuted by address bits 7 and on
    bits = arith.andi(arith.shrui(inner, _i32(7)), _i32(swizzle // _CHUNK - 1))
    inner = arith.xori(inner, arith.shli(bits, _i32(4)))
    tile = arith.addi(
        arith.muli(arith.divui(row, _i32(8)), _i32(row_bytes // swizzle)), arith.divui(byte, _i32(swizzle))
    )
    return arith.addi(arith.muli(tile, _i32(8 * swizzle)), inner)


def shared_address(smem):
    """Address of a reference within shared memory, i32."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(smem))


def _lane(x, lane: int):
    # what a lane of this warp holds
    word = utils.vector.extract(x, dynamic_position=[], static_position=[0])
    return nvvm.shfl_sync(_i32(-1), word, _i32(lane), _i32(0x1F), nvvm.ShflKind.idx)


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)


def _i32(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))
