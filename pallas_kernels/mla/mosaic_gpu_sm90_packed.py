"""Packed 8-bit latent rows on Hopper: fetched early into the L2, then widened on their way to shared memory.

A row is 512 bits of e4m3, four float32 scales and 64 bfloat16, 656 bytes (`_common/latent_rows.py`). Beside queries and
two blocks of wide rows, shared memory has no room for what comes narrow. So the copying warpgroup asks for the bytes of
a block some blocks ahead, which takes no register and no barrier, and loads them 16 at a time from the L2.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAbstractUsage=false, reportPrivateImportUsage=false

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import latent_rows
from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies
from pallas_kernels.attention import mosaic_gpu_sm90_prefill_barriers as gpu_barriers
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_prefill_records import THREADS
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import constant
from pallas_kernels.mla import mosaic_gpu_sm90_barriers as barriers
from pallas_kernels.mla.mosaic_gpu_sm90_records import HALVES, Arrays, Static

arith, ir, llvm = utils.arith, utils.ir, utils.llvm

_AHEAD = 3  # blocks from the request for a block's bytes to the loads
_CHUNK = 16  # bytes a thread loads at once
_AT_ONCE = 4  # loads of a thread on their way


def ask(static: Static, arrays: Arrays, item: Item, block) -> None:
    """Ask for the bytes of the block `_AHEAD` blocks on, if it is one of the item."""
    page, block_kv, row_bytes = static.page_size, static.config.block_kv, arrays.pages.shape[2]
    rows = min(page, block_kv)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[scalar] * 5))
    def inline(_, table, pool, *scalars):
        seq, offset, kv_len, block, end = (rows_io.value_of(x) for x in scalars)
        lane = _anew(arith.remui(utils.thread_idx(), constant(THREADS)))
        first = arith.muli(arith.addi(block, constant(_AHEAD)), constant(block_kv))
        key = arith.addi(first, arith.muli(lane, constant(rows)))
        last = arith.minsi(arith.muli(_anew(end), constant(block_kv)), kv_len)
        some = arith.cmpi(arith.CmpIPredicate.slt, lane, constant(block_kv // rows))
        here = arith.cmpi(arith.CmpIPredicate.slt, key, last)
        with mgpu.when(arith.andi(some, here)):
            source = _row(table, pool, seq, offset, key, page, row_bytes, arrays.page_table.shape[1])
            size = constant(rows * row_bytes)
            copies.asm("cp.async.bulk.prefetch.L2.global [$0], $1;", source, size, constraints="l,r")

    scalars = (item.seq, arrays.page_offset[0], item.kv_len, block, item.end)
    inline(arrays.page_table, arrays.pages, *(jnp.asarray(x, jnp.int32) for x in scalars))


def produce(static: Static, arrays: Arrays, smem: dict, item: Item) -> None:
    """All blocks of a program's item, as far ahead as the rings have room."""
    stages = static.config.stages
    ahead = lambda i, _: ask(static, arrays, item, item.begin + i - _AHEAD)  # noqa: E731
    lax.fori_loop(0, _AHEAD + jnp.minimum(item.begin, 0), ahead, None)

    def step(block, _):
        i = block - item.begin
        stage = lax.rem(i, stages)
        ask(static, arrays, item, block)
        for half in HALVES:
            pl.when(i >= stages)(lambda half=half: barriers.wait(smem[f"{half}_free"], stage, lax.div(i, stages) - 1))
            _widen(static, arrays, smem, item, half, stage, block)

    lax.fori_loop(item.begin, item.end, step, None)


def _widen(static: Static, arrays: Arrays, smem: dict, item: Item, half: str, stage, block) -> None:
    # half of a block into its ring; each thread arrives when its part is there
    ring, widened = smem[half], static.widths[0]
    some = (static, arrays, ring, item, stage, block)
    _rows(*some, start=0 if half == "left" else widened, each=latent_rows.GROUP, narrow=True)
    if half == "right":  # the rotated key is behind the scales
        behind = latent_rows.num_bytes(static.v_dim, 0)
        _rows(*some, start=behind, each=arrays.pages.shape[2] - behind >> 1, narrow=False)
    gpu_barriers.proxy_fence()
    gpu_barriers.arrive_all(smem[f"{half}_full"], stage)


def _rows(static: Static, arrays: Arrays, ring, item: Item, stage, block, *, start: int, each: int, narrow: bool):
    # 2 * `each` bytes of each row of a block, from byte `start` on: a thread has `each` of them, all of one scale.
    # narrow: of e4m3; else of the key as it is.
    page, row_bytes, wide_row = static.page_size, arrays.pages.shape[2], ring.shape[2] * 2
    at_once = min(_AT_ONCE // (2 if static.words else 1), each // _CHUNK)  # a tree's programs have a register less
    scalar = plgpu.Layout.WG_SPLAT(())
    _, layout = copies.transforms(ring.shape[2], 2, static.swizzle)

    def some(n):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(layout), *[scalar] * 6))
        def inline(_, table, pool, smem, *scalars):
            seq, offset, kv_len, block, stage, done = (rows_io.value_of(x) for x in scalars)
            first = arith.muli(_anew(block), constant(static.config.block_kv))
            i8, f32 = ir.IntegerType.get_signless(8), ir.F32Type.get()
            lane = _anew(arith.remui(utils.thread_idx(), constant(THREADS)))
            row, side = arith.divui(lane, constant(2)), arith.remui(lane, constant(2))
            key = arith.minsi(arith.addi(first, row), arith.subi(kv_len, constant(1)))
            source = _row(table, pool, seq, offset, key, page, row_bytes, arrays.page_table.shape[1])
            at = arith.addi(arith.muli(side, constant(each)), done)
            place = utils.getelementptr(source, [arith.addi(at, constant(start))], i8)
            # all on their way before the first is wanted
            loaded = [_load(utils.getelementptr(place, [i * _CHUNK], i8)) for i in range(at_once)]
            scale = None
            if narrow:
                group = arith.addi(arith.muli(side, constant(4)), constant(static.v_dim + start // each * 4))
                scale = llvm.load(f32, utils.getelementptr(source, [group], i8))
            base = arith.addi(_anew(copies.shared_address(smem)), arith.muli(stage, constant(64 * wide_row)))
            to = arith.muli(at, constant(2)) if narrow else arith.addi(at, constant(2 * static.widths[0]))
            for i, words in enumerate(loaded):
                values = [pair for word in words for pair in _widened(word, scale)] if narrow else words
                for part in range(0, len(values), 4):
                    byte = arith.addi(to, constant(i * 4 * len(values) + 4 * part))
                    copies.asm(
                        "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
                        arith.addi(base, copies.swizzled(row, byte, wide_row, static.swizzle)),
                        *values[part : part + 4],
                        constraints="r,r,r,r,r",
                    )

        done = n * (at_once * _CHUNK)
        scalars = (item.seq, arrays.page_offset[0], item.kv_len, block, stage, done)
        inline(arrays.page_table, arrays.pages, ring, *(jnp.asarray(x, jnp.int32) for x in scalars))

    passes = each // (at_once * _CHUNK) + jnp.minimum(stage, 0)  # no constant, or all passes' addresses are kept
    lax.fori_loop(0, passes, lambda n, _: some(n), None)


def _anew(word):
    # the same word; what is computed from it is not kept in registers from one use to the next
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [word], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def _row(table, pool, seq, offset, key, page: int, row_bytes: int, width: int):
    # address of the row of a key
    i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
    entry = arith.addi(arith.muli(seq, constant(width)), arith.divui(key, constant(page)))
    id_ = arith.addi(llvm.load(i32, utils.getelementptr(utils.memref_ptr(table), [entry], i32)), offset)
    token = arith.addi(arith.muli(id_, constant(page)), arith.remui(key, constant(page)))
    return rows_io.address_of(token, row_bytes, utils.memref_ptr(pool), i8)


def _load(source):
    i32 = ir.IntegerType.get_signless(32)
    four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    text = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    loaded = llvm.inline_asm(four, [source], text, "=r,=r,=r,=r,l", has_side_effects=True)
    return [llvm.extractvalue(i32, loaded, [i]) for i in range(4)]


def _widened(word, scale):
    # the two pairs of bfloat16 of four e4m3 times their scale, rounded once
    i32 = ir.IntegerType.get_signless(32)
    for half in ("low", "high"):
        text = (
            "{ .reg .b16 low, high, a, b; .reg .b32 both; .reg .f32 x, y; mov.b32 {low, high}, $1; "
            f"cvt.rn.f16x2.e4m3x2 both, {half}; mov.b32 {{a, b}}, both; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
            "mul.f32 x, x, $2; mul.f32 y, y, $2; cvt.rn.bf16x2.f32 $0, y, x; }"
        )
        yield llvm.inline_asm(i32, [word, scale], text, "=r,r,f", has_side_effects=False)


def widen_plain(static: Static, arrays: Arrays, smem: dict, item: Item, half: str, stage, block) -> None:
    """The same for the interpreter."""
    ring, column = smem[half], 0 if half == "left" else static.widths[0]
    for j in range(static.config.block_kv):
        key = jnp.clip(block * static.config.block_kv + j, 0, item.kv_len - 1)
        page = arrays.page_table[item.seq, key // static.page_size] + arrays.page_offset[0]
        row = arrays.pages[page, key % static.page_size]
        ring[stage, j] = latent_rows.unpack(row, static.v_dim, static.dtype)[column : column + ring.shape[2]]
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem[f"{half}_full"].at[stage])
