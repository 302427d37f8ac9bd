"""Write a step's keys and values into paged caches on Hopper, in place: a program moves one token's rows of all heads.

Threads load 8 values each while the slot is on its way, and store them as the pages hold them, 8-bit floats scaled,
saturated and rounded to nearest even: one trip to memory and one back.
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import float8
from pallas_kernels._common.rows import check_slots

# the MLIR that Mosaic GPU itself is written in
arith, ir, llvm, mgpu_vector = utils.arith, utils.ir, utils.llvm, utils.vector

VALUES = 8
"""Values a thread moves at once."""
NARROW = {jnp.dtype(jnp.float8_e4m3fn): "e4m3x2", jnp.dtype(jnp.float8_e5m2): "e5m2x2"}
"""8-bit floats, and how the conversion of two is called."""


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Store rows at their slots of one layer; see `pallas_kernels.kv_write.xla`.

    Args: as there, without scales a row. k_pages, v_pages: 16 or 32-bit floats, or 8-bit floats as their bits (uint8)
      or themselves; in place when donated.
    Raises: ValueError if shapes disagree, a head is no multiple of 8 values, or for other pages.
    """
    tokens, heads, k_dim = k.shape
    if k_pages.shape[2:] != (heads, k_dim) or v_pages.shape[2:] != v.shape[1:] or v.shape[0] != tokens:
        raise ValueError(
            f"k{list(k.shape)}, v{list(v.shape)} into pages k{list(k_pages.shape)}, v{list(v_pages.shape)}: want equal "
            "heads and widths, and as many keys as values"
        )
    kind = float8.kind_of(k_pages, kv_dtype)
    dims = k_dim, v.shape[2]
    if any(dim % VALUES for dim in dims) or not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(
            f"heads of {dims[0]} and {dims[1]} values of {kind}: the Hopper kernel writes floats, in multiples of "
            f"{VALUES}; resolve with prefer=('xla',)"
        )
    check_slots(k_pages)
    if tokens == 0:
        return k_pages, v_pages
    capacity = (k_pages.shape[0] if num_pages is None else num_pages) * k_pages.shape[1]
    given = (k_pages.dtype, v_pages.dtype)
    if kind in float8.KINDS:
        k_pages, v_pages = (float8.to_stored(x, jnp.uint8) for x in (k_pages, v_pages))
        scales = inverses(k_scale, v_scale)
    else:
        k, v = k.astype(kind), v.astype(kind)
        scales = jnp.ones(2, jnp.float32)
    launch = pl.kernel(
        functools.partial(_kernel, capacity=capacity, kind=kind, interpret=bool(interpret)),
        out_type=(),
        mesh=plgpu.Mesh(grid=(tokens,), grid_names=("tokens",)),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=(k.size + v.size) * (k.dtype.itemsize + kind.itemsize), transcendentals=0
        ),
        interpret=interpret,
        name="jattn_kv_write",
    )
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    refs = jax.new_ref(k_pages), jax.new_ref(v_pages)
    launch(k, v, slots, offset, scales, *refs)
    k_pages, v_pages = (float8.to_stored(jax.freeze(ref), dtype) for ref, dtype in zip(refs, given, strict=True))
    return k_pages, v_pages


def _kernel(k, v, slots, offset, scales, k_pages, v_pages, *, capacity: int, kind, interpret: bool):
    # k, v [tokens, heads, dim], slots i32[tokens], offset i32[1], scales f32[2] -> pages [pages, page_size, heads, dim]
    token = lax.axis_index("tokens")
    slot, size = slots[token], k_pages.shape[1]
    held = (slot >= 0) & (slot < capacity)
    row = slot + offset[0] * size
    if not interpret:
        for i, (x, pages) in enumerate(((k, k_pages), (v, v_pages))):
            count = x.shape[1] * x.shape[2]
            move(x, pages, scales, token, row, held, i, kind, width=count, first=0, count=count)
        return

    @pl.when(held)
    def _():
        for i, (x, pages) in enumerate(((k, k_pages), (v, v_pages))):
            pages[row // size, row % size] = as_stored(x[token], scales[i], kind, pages.dtype)


def inverses(k_scale: jax.Array | None, v_scale: jax.Array | None) -> jax.Array:
    """What keys and values are multiplied with before they are narrowed, f32[2]."""
    ones = jnp.ones((), jnp.float32)
    return jnp.stack([1.0 / (ones if x is None else x.reshape(())) for x in (k_scale, v_scale)])


def as_stored(value, factor, kind, dtype):
    """An array as pages of `kind` hold it, whose arrays have `dtype`: what threads do, in plain JAX."""
    if kind in NARROW:
        top = float(jnp.finfo(kind).max)
        value = jnp.clip(value.astype(jnp.float32) * factor, -top, top).astype(kind)
    return float8.to_stored(value, dtype)


def move(x, pages, scales, token, row, held, which: int, kind, *, width: int, first: int, count: int) -> None:
    """`count` values of `x[token]`, from `first` on of its `width`, to row `row` of the pages if `held`.

    which: scale of the two. kind: of the pages' values.
    """
    narrow = NARROW.get(jnp.dtype(kind))
    values = count
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (scalar,) * 3)
    def inline(_, source, target, factors, *scalars):
        token, row, held = (x.registers.item() for x in scalars)
        kind, stored = (utils.dtype_to_ir_type(ref.dtype) for ref in (x, pages))
        base, to = row_of(source, token, width, kind), row_of(target, row, values, stored)
        base = utils.getelementptr(base, [first], kind)
        lane = arith.muli(arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE)), _i32(VALUES))
        starts = range(0, values, VALUES * utils.WARPGROUP_SIZE)
        places = [arith.addi(lane, _i32(start)) for start in starts]
        loaded = []
        for place in places:  # past the end the last values again: no branch before the loads
            inside = arith.minsi(place, _i32(values - VALUES))
            loaded.append(llvm.load(ir.VectorType.get((VALUES,), kind), utils.getelementptr(base, [inside], kind)))
        if narrow:
            factor = llvm.load(
                ir.F32Type.get(), utils.getelementptr(utils.memref_ptr(factors), [which], ir.F32Type.get())
            )
            loaded = [narrowed(value, factor, narrow) for value in loaded]
        held = arith.cmpi(arith.CmpIPredicate.ne, held, _i32(0))
        for place, value in zip(places, loaded, strict=True):
            inside = arith.andi(held, arith.cmpi(arith.CmpIPredicate.slt, place, _i32(values)))
            store_if(inside, utils.getelementptr(to, [place], stored), value)

    inline(x, pages, scales, token, row, held.astype(jnp.int32))


def row_of(memref, row, values: int, kind):
    """Where row `row` of `values` values begins, for inline code."""
    i64 = ir.IntegerType.get_signless(64)
    return utils.getelementptr(
        utils.memref_ptr(memref), [arith.muli(arith.extsi(i64, row), utils.c(values, i64))], kind
    )


def narrowed(vector, factor, narrow: str):
    """8 floats to 8 bytes: times the factor in float32, saturated, to nearest even."""
    f32, i16, i32 = ir.F32Type.get(), *(ir.IntegerType.get_signless(bits) for bits in (16, 32))
    element = ir.VectorType(vector.type).element_type
    pairs = []
    for i in range(0, VALUES, 2):
        two = [mgpu_vector.extract(vector, dynamic_position=[], static_position=[i + j]) for j in range(2)]
        two = [x if element == f32 else arith.extf(f32, x) for x in two]
        low, high = (arith.mulf(x, factor) for x in two)
        text = f"cvt.rn.satfinite.{narrow}.f32 $0, $1, $2;"
        pairs.append(llvm.inline_asm(i16, [high, low], text, "=h,f,f", has_side_effects=False))
    words = [
        arith.ori(arith.extui(i32, low), arith.shli(arith.extui(i32, high), _i32(16)))
        for low, high in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    return mgpu_vector.from_elements(ir.VectorType.get((len(words),), i32), words)


def store_if(condition, address, vector) -> None:
    """Store a vector where `condition` holds: predicated, one instruction each for up to 16 bytes."""
    i32 = ir.IntegerType.get_signless(32)
    kind = ir.VectorType(vector.type)
    count = kind.shape[0] * utils.bitwidth(kind.element_type) // 32
    words = mgpu_vector.bitcast(ir.VectorType.get((count,), i32), vector)
    words = [mgpu_vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(count)]
    held = arith.extui(i32, condition)
    for start in range(0, count, 4):
        some = words[start : start + 4]
        names = ", ".join(f"${i + 2}" for i in range(len(some)))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [held, utils.getelementptr(address, [start], i32), *some],
            f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.v{len(some)}.b32 [$1], {{{names}}}; }}",
            "r,l" + ",r" * len(some),
            has_side_effects=True,
        )


def _i32(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))
