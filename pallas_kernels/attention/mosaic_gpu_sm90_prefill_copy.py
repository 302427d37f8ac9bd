"""What the copying warpgroup of the Hopper prefill does: a tile's queries, then its key and value blocks, tile by tile.

Queries come by the threads, 16 bytes each, as a tile's rows lie anywhere; keys and values by the copy engine, one copy
a page, from pages of 8 tokens and more, and by the threads from smaller ones. All of it completes on barriers in shared
memory, and runs as far ahead of the computing warpgroups as the rings have room.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_schedule as schedules
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_float8 import widen
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_config import WIDE_STAGES
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import (
    FIELDS,
    THREADS,
    TILE_WORDS,
    Arrays,
    Barrier,
    Static,
    Tile,
)
from pallas_kernels.attention.mosaic_gpu_sm90_rows import Rows, constant

arith, gpu, ir, llvm, nvvm = utils.arith, utils.gpu, utils.ir, utils.llvm, utils.nvvm

_CHUNK = 16  # bytes a thread copies at once


def init_barriers(smem: dict) -> None:
    """Make a program's barriers; all its threads call this."""
    barriers = [x for x in smem.values() if isinstance(x, Barrier)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def inline(_, words):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.BLOCK)
        for barrier in barriers:
            for i in range(barrier.places):
                place = _place_of(words, constant(barrier.first + i))
                nvvm.mbarrier_init(place.get_ptr(), constant(barrier.arrivals), predicate=one)
        copies.asm("fence.mbarrier_init.release.cluster;")
        gpu.barrier()

    inline(smem["words"])


def wait(barrier: Barrier, stage, phase) -> None:
    """Wait until phase `phase` (0 or 1) of a barrier is complete."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar))
    def inline(_, words, stage, phase):
        odd = arith.cmpi(arith.CmpIPredicate.ne, rows_io.value_of(phase), constant(0))
        _place_of(words, rows_io.value_of(stage)).wait_parity(odd)

    inline(barrier.words, *(jnp.asarray(x, jnp.int32) for x in (barrier.first + stage, phase)))


def arrive(barrier: Barrier, stage: jax.Array | int) -> None:
    """One arrival of this warpgroup at a barrier."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, stage):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        copies.asm(
            "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; }",
            arith.extui(ir.IntegerType.get_signless(32), one),
            _address(_place_of(words, rows_io.value_of(stage))),
            constraints="r,r",
        )

    inline(barrier.words, jnp.asarray(barrier.first + stage, jnp.int32))


def my_tiles(static: Static, arrays: Arrays):
    """How many tiles this program has: those with key blocks, which come first, and all."""

    def mine(count):
        total = count * static.kv_heads
        rounds = total // static.programs
        return rounds + (_place(static, rounds) < total).astype(jnp.int32)

    some, every = rows_io.load_scalars(arrays.counts, jnp.int32(0), 2)
    return mine(some), mine(every)


def _place(static: Static, round_):
    # Dealt to and fro: who gets the longest tile of a round gets the shortest of the next.
    program = lax.axis_index("programs")
    mine = jnp.where(round_ % 2 == 0, program, static.programs - 1 - program)
    return round_ * static.programs + mine


def load_tile(static: Static, arrays: Arrays, turn, some) -> Tile:
    """Tile number `turn` of this program, from device memory; `some` of all tiles have key blocks."""
    at, head = schedules.of_place(_place(static, turn), some, static.kv_heads)
    return Tile(*rows_io.load_scalars(arrays.tiles, at, FIELDS - 1), head=head)


def put_tile(ref, place, tile: Tile) -> None:
    """Hand a tile to the computing warpgroups, through shared memory."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[scalar] * (FIELDS + 1)))
    def inline(_, memref, place, *fields):
        one = utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP)
        base = arith.addi(copies.shared_address(memref), arith.muli(rows_io.value_of(place), constant(4 * TILE_WORDS)))
        for i, field in enumerate(fields):
            rows_io.store_if(one, arith.addi(base, constant(4 * i)), rows_io.value_of(field), "shared")

    inline(ref, *(jnp.asarray(x, jnp.int32) for x in (place, *tile)))


def get_tile(ref, place) -> Tile:
    """The tile that `put_tile` left, for all threads of a warpgroup."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=(result,) * FIELDS)
    def inline(_, memref, place):
        i32 = ir.IntegerType.get_signless(32)
        base = arith.addi(copies.shared_address(memref), arith.muli(rows_io.value_of(place), constant(4 * TILE_WORDS)))
        four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
        words = []
        for i in range(0, FIELDS, 4):
            text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
            at = arith.addi(base, constant(4 * i))
            loaded = llvm.inline_asm(four, [at], text, "=r,=r,=r,=r,r", has_side_effects=True)
            words += [llvm.extractvalue(i32, loaded, [j]) for j in range(4)]
        return tuple(mgpu.FragmentedArray.splat(word, (), is_signed=True) for word in words[:FIELDS])

    return Tile(*inline(ref, jnp.asarray(place, jnp.int32)))


def proxy_fence() -> None:
    """What was stored to shared memory by threads can be read by products from here on."""

    @plgpu.inline_mgpu()
    def inline(_):
        copies.asm("fence.proxy.async.shared::cta;")

    inline()


def produce(static: Static, arrays: Arrays, smem: dict) -> None:
    """All tiles of this program."""
    _, count = my_tiles(static, arrays)
    (some,) = rows_io.load_scalars(arrays.counts, jnp.int32(0), 1)
    offset = jnp.int32(0)
    if arrays.page_offset is not None:
        (offset,) = rows_io.load_scalars(arrays.page_offset, jnp.int32(0), 1)
    kind = _Blocks if static.narrow is None else _Narrow
    blocks, q_stages = kind(static, arrays, smem, offset), static.config.q_stages

    def step(turn, done):
        tile = load_tile(
            static, arrays, turn, some
        )  # not a tile ahead: that would take registers, and the rings are ahead
        blocks.first(tile, done)
        stage = lax.rem(turn, q_stages)
        wait(smem["q_free"], stage, (lax.div(turn, q_stages) & 1) ^ 1)
        _gather_q(static, arrays, smem, tile, stage)
        put_tile(smem["words"], stage, tile)
        arrive(smem["q_full"], stage)
        blocks.rest(tile, done)
        return done + tile.blocks

    lax.fori_loop(0, count, step, jnp.int32(0))


class _Blocks:
    """Keys and values of a tile into the rings; keys run a block ahead, as products want them."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, offset):
        self.static, self.arrays, self.smem, self.offset = static, arrays, smem, offset

    def first(self, tile: Tile, done) -> None:
        """Start the first block of keys."""
        self._start("k", tile, jnp.int32(0), done, tile.blocks > 0)

    def rest(self, tile: Tile, done) -> None:
        """Start all others."""

        def step(i, _):
            self._start("k", tile, i, done, i < tile.blocks)
            self._start("v", tile, i - 1, done, True)

        lax.fori_loop(1, tile.blocks + 1, step, None)

    def _start(self, name: str, tile: Tile, i, done, when) -> None:
        # wait for block i's place in its ring, and start copying there
        stages = self.static.config.stages
        at = done + i
        load(
            self.static,
            self.arrays,
            dict(k=self.arrays.k, v=self.arrays.v)[name],
            self.smem[name],
            full=self.smem[f"{name}_full"],
            free=self.smem[f"{name}_free"],
            tile=tile,
            offset=self.offset,
            block=tile.begin + i,
            stage=lax.rem(at, stages),
            phase=(lax.div(at, stages) & 1) ^ 1,
            when=when,
            first_warp=0 if name == "k" else 2,
        )


class _Narrow:
    """8-bit keys and values into rings of their own, and widened from there into those that products read."""

    def __init__(self, static: Static, arrays: Arrays, smem: dict, offset):
        self.static, self.arrays, self.smem, self.offset = static, arrays, smem, offset

    def first(self, tile: Tile, done) -> None:
        """Start the first blocks."""
        for i in range(self.static.config.stages):
            self._start("k", tile, jnp.int32(i), done)
            self._start("v", tile, jnp.int32(i), done)

    def rest(self, tile: Tile, done) -> None:
        """Widen block after block, and start those that follow."""

        def step(i, _):
            self._widen("k", tile, i, done)
            self._start("k", tile, i + self.static.config.stages, done)
            self._widen("v", tile, i, done)
            self._start("v", tile, i + self.static.config.stages, done)

        lax.fori_loop(0, tile.blocks, step, None)

    def _start(self, name: str, tile: Tile, i, done) -> None:
        load(
            self.static,
            self.arrays,
            dict(k=self.arrays.k, v=self.arrays.v)[name],
            self.smem[f"{name}_bits"],
            full=self.smem[f"{name}_bits_full"],
            free=None,
            tile=tile,
            offset=self.offset,
            block=tile.begin + i,
            stage=lax.rem(done + i, self.static.config.stages),
            phase=0,
            when=i < tile.blocks,
            first_warp=0 if name == "k" else 2,
        )

    def _widen(self, name: str, tile: Tile, i, done) -> None:
        stages, at = self.static.config.stages, done + i
        stage, wide = lax.rem(at, stages), lax.rem(at, WIDE_STAGES)
        wait(self.smem[f"{name}_bits_full"], stage, lax.div(at, stages) & 1)
        wait(self.smem[f"{name}_free"], wide, (lax.div(at, WIDE_STAGES) & 1) ^ 1)
        widen(self.smem[f"{name}_bits"], self.smem[name].at[wide], stage, self.static.narrow)
        arrive(self.smem[f"{name}_full"], wide)


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
            wait(free, stage, phase)  # all threads, as all arrive
            _engine(*rest, True, first_warp)
            _arrive_all(full, stage)

        @pl.when(jnp.logical_not(aligned))
        def _():
            _gather_block(*rest)
            arrive(full, stage)


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
        barrier = _place_of(words, at["full"])
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
                    _place_of(words, at["free"]).wait_parity(odd)
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
        wait(free, stage, phase)
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
    _arrive_copied(full, stage)


def _gather_q(static: Static, arrays: Arrays, smem: dict, tile: Tile, stage) -> None:
    # a tile's rows, the last one again where there is none
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
    _arrive_copied(smem["q_full"], stage)


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


def _arrive_all(barrier: Barrier, stage) -> None:
    # each thread arrives
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, stage):
        address = _address(_place_of(words, rows_io.value_of(stage)))
        copies.asm("mbarrier.arrive.shared::cta.b64 _, [$0];", address, constraints="r")

    inline(barrier.words, jnp.asarray(barrier.first + stage, jnp.int32))


def _arrive_copied(barrier: Barrier, stage) -> None:
    # each thread arrives once its copies so far have landed
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def inline(_, words, stage):
        address = _address(_place_of(words, rows_io.value_of(stage)))
        copies.asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", address, constraints="r")

    inline(barrier.words, jnp.asarray(barrier.first + stage, jnp.int32))


def _table_entry(table, seq, entry, width: int | None = None):
    i32 = ir.IntegerType.get_signless(32)
    width = width or ir.MemRefType(table.type).shape[1]
    at = arith.addi(arith.muli(seq, constant(width)), entry)
    return llvm.load(i32, utils.getelementptr(utils.memref_ptr(table), [at], i32))


def _layout(dim: int, itemsize: int) -> tuple[int | None, tuple]:
    # swizzle and transforms of rows in shared memory; 8-bit ones lie row after row
    return (None, ()) if itemsize == 1 else copies.transforms(dim, itemsize)


def _place_of(memref, stage):
    return utils.BarrierRef(utils.memref_ptr(memref), stage, None, 1)


def _address(barrier):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), barrier.get_ptr())


def _index(x):
    return arith.index_cast(ir.IndexType.get(), x)
