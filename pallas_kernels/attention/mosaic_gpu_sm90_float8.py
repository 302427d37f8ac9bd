"""8-bit floats in shared memory to float16, which Hopper's products read: exactly, two values an instruction.

Every value of both kinds is a float16. To bfloat16 there is no such instruction, and the five or so that make it took
as long as the bytes. NaN and infinity stay what they are.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_copy as copies

arith, ir, llvm = utils.arith, utils.ir, utils.llvm

_THREADS = utils.WARPGROUP_SIZE
_CHUNK = 16  # values a thread takes at once: 16 bytes, and 32 of the result
_KINDS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}


def widen(ring, wide, stage, kind) -> None:
    """Stage `stage` of `ring` u8[stages, rows, width] into `wide` f16[rows, width], for products to read.

    All warps of this warpgroup call it, after all have ended what read `wide` before.
    """
    form = _KINDS[jnp.dtype(kind).name]
    swizzle, transforms = copies.transforms(wide.shape[1], 2)
    rows, width = wide.shape
    chunks = rows * width // _CHUNK
    scalar = plgpu.Layout.WG_SPLAT(())

    def some(first, count: int) -> None:
        # chunks `first` to `first + count`

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), scalar, scalar))
        def inline(_, narrow, tile, stage, first):
            base = copies.shared_address(narrow)
            if width > 128:  # computed anew each time: wide heads leave no register for the addresses
                i32 = ir.IntegerType.get_signless(32)
                base = llvm.inline_asm(i32, [base], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
            base = arith.addi(base, arith.muli(stage.registers.item(), _i32(rows * width)))
            lane = arith.addi(arith.remui(utils.thread_idx(), _i32(_THREADS)), first.registers.item())
            target = copies.shared_address(tile)
            whole = count // _THREADS
            places = _places(base, target, lane, whole, width, swizzle)
            loaded = [_load(source) for source, _ in places]  # all on their way before the first is wanted
            for words, (_, targets) in zip(loaded, places, strict=True):
                _store(words, targets, form)
            if count % _THREADS:
                linear = arith.addi(lane, _i32(whole * _THREADS))
                with utils.when(arith.cmpi(arith.CmpIPredicate.slt, linear, _i32(chunks))):
                    source, targets = _place(base, target, linear, width, swizzle)
                    _store(_load(source), targets, form)

        inline(ring, wide, jnp.asarray(stage, jnp.int32), jnp.asarray(first, jnp.int32))

    at_once = (4 if width <= 128 else 1) * _THREADS  # wide heads leave few registers: a loop for them
    if chunks <= at_once:
        some(0, chunks)
    else:
        rounds, rest = divmod(chunks, at_once)
        end = rounds + jnp.minimum(stage, 0)  # no constant, or all rounds' addresses are kept in registers
        lax.fori_loop(0, end, lambda i, _: some(i * at_once, at_once), None)
        if rest:  # 128 rows of 80 or 96
            some(rounds * at_once, rest)
    copies.handed_over()


def _load(source):
    i32 = ir.IntegerType.get_signless(32)
    four = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    loaded = llvm.inline_asm(four, [source], text, "=r,=r,=r,=r,r", has_side_effects=True)
    return [llvm.extractvalue(i32, loaded, [i]) for i in range(4)]


def _store(words, targets, form) -> None:
    pairs = [pair for word in words for pair in _pairs(word, form)]
    for half, target in enumerate(targets):
        text = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
        copies.asm(text, target, *pairs[4 * half : 4 * half + 4], constraints="r,r,r,r,r")


def _places(base, target, lane, count: int, width: int, swizzle: int) -> list:
    # addresses of a thread's chunks; where a round of all threads takes whole tiles of 8 rows, they are evenly apart
    rows_a_round, rest = divmod(_THREADS * _CHUNK, width)
    if rest or rows_a_round % 8:
        return [_place(base, target, arith.addi(lane, _i32(i * _THREADS)), width, swizzle) for i in range(count)]
    source, targets = _place(base, target, lane, width, swizzle)
    step = rows_a_round * width
    return [
        (arith.addi(source, _i32(i * step)), [arith.addi(x, _i32(2 * i * step)) for x in targets]) for i in range(count)
    ]


def _place(base, target, linear, width: int, swizzle: int):
    # Address of a chunk, and of the two halves of its result. Eight threads store at once; taking four chunks of two
    # rows each, they use all banks.
    chunks = width // _CHUNK
    if chunks % 4:
        row, col = arith.divui(linear, _i32(chunks)), arith.remui(linear, _i32(chunks))
    else:
        rest = arith.remui(linear, _i32(2 * chunks))
        two = arith.muli(arith.divui(linear, _i32(2 * chunks)), _i32(2))
        row = arith.addi(two, arith.remui(arith.divui(rest, _i32(4)), _i32(2)))
        col = arith.addi(arith.remui(rest, _i32(4)), arith.muli(arith.divui(rest, _i32(8)), _i32(4)))
    source = arith.addi(base, arith.addi(arith.muli(row, _i32(width)), arith.muli(col, _i32(_CHUNK))))
    halves = [arith.addi(arith.muli(col, _i32(2 * _CHUNK)), _i32(16 * half)) for half in range(2)]
    return source, [arith.addi(target, copies.swizzled(row, byte, 2 * width, swizzle)) for byte in halves]


def _pairs(word, form: str):
    # the two pairs of float16 of four 8-bit floats
    for half in ("low", "high"):
        text = f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.{form} $0, {half}; }}"
        i32 = ir.IntegerType.get_signless(32)
        yield llvm.inline_asm(i32, [word], text, "=r,r", has_side_effects=False)


def _i32(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))
