"""Rotate a step's queries and keys and write keys and values into paged caches, on Hopper: one program a token.

What the projection gave goes straight to its places: XLA would cut it into three arrays, and the write would read them
again. Rotation in float32, then rounding to the rows' dtype, as `x * cos - y * sin` in plain JAX.

Source: arXiv:2104.09864 (rotary embedding); arXiv:2309.06180 (paging).
"""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._common import float8
from pallas_kernels._common.rows import check_slots
from pallas_kernels.kv_write import mosaic_gpu_sm90 as write

# the MLIR that Mosaic GPU itself is written in
arith, ir, llvm = utils.arith, utils.ir, utils.llvm

_VALUES = write.VALUES


class _Static(NamedTuple):
    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    capacity: int
    kind: Any  # of the pages' values

    @property
    def width(self) -> int:
        """Values of a token."""
        return (self.q_heads + self.kv_heads) * self.dim + self.kv_heads * self.v_dim


def serves(*, head_dim: int, v_dim: int, dtype) -> bool:
    """Whether heads of these widths can be rotated and written here, in this dtype."""
    wide = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return wide and head_dim % (2 * _VALUES) == 0 and v_dim % _VALUES == 0


def rotate_write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    rows: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slots: jax.Array,
    *,
    page_offset: jax.Array | int = 0,
    num_pages: int | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    kv_dtype: jax.typing.DTypeLike | None = None,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries, and the pages with the rotated keys and the values of `rows` at `slots` of one layer.

    Args:
      rows: [tokens, q_heads * dim + kv_heads * (dim + v_dim)], bfloat16 or float16: queries, keys and values of each
        head in turn, not rotated.
      cos, sin: f32[tokens, dim / 2]; features i and i + dim / 2 of a head are a pair.
      The rest as in `pallas_kernels.kv_write.xla.write_kv`, without scales a row; pages in place when donated.
    Returns: q [tokens, q_heads, dim] in rows' dtype, of padding rows too; k_pages, v_pages.
    Raises: ValueError if shapes disagree, or for widths and dtypes that `serves` denies.
    """
    tokens, width = rows.shape
    kv_heads, dim, v_dim = *k_pages.shape[2:], v_pages.shape[3]
    q_heads, rest = divmod(width - kv_heads * (dim + v_dim), dim)
    if rest or q_heads < 1 or v_pages.shape[2] != kv_heads or cos.shape != (tokens, dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            f"rows{list(rows.shape)}, cos{list(cos.shape)}, sin{list(sin.shape)} into pages k{list(k_pages.shape)}, "
            f"v{list(v_pages.shape)}: want queries, keys and values of every head, and a phase for half the features"
        )
    if not serves(head_dim=dim, v_dim=v_dim, dtype=rows.dtype):
        raise ValueError(
            f"heads of {dim} and {v_dim} values of {rows.dtype}: this kernel rotates bfloat16 and float16, in "
            f"multiples of {2 * _VALUES} and {_VALUES}; rotate with XLA and use write_kv"
        )
    check_slots(k_pages)
    kind = float8.kind_of(k_pages, kv_dtype)
    if kind not in (rows.dtype, *float8.KINDS):
        raise ValueError(f"pages of {kind} for rows of {rows.dtype}: want the same, or 8-bit floats")
    if tokens == 0:
        return jnp.zeros((0, q_heads, dim), rows.dtype), k_pages, v_pages
    capacity = (k_pages.shape[0] if num_pages is None else num_pages) * k_pages.shape[1]
    given = (k_pages.dtype, v_pages.dtype)
    scales = jnp.ones(2, jnp.float32)
    if kind in float8.KINDS:
        k_pages, v_pages = (float8.to_stored(x, jnp.uint8) for x in (k_pages, v_pages))
        scales = write.inverses(k_scale, v_scale)
    static = _Static(q_heads, kv_heads, dim, v_dim, capacity, kind)
    launch = pl.kernel(
        functools.partial(_kernel, static=static, interpret=bool(interpret)),
        out_type=jax.ShapeDtypeStruct((tokens, q_heads * dim), rows.dtype),
        mesh=plgpu.Mesh(grid=(tokens,), grid_names=("tokens",)),
        cost_estimate=pl.CostEstimate(
            flops=3 * tokens * (q_heads + kv_heads) * dim,
            bytes_accessed=tokens * (2 * width * rows.dtype.itemsize + 4 * dim),
            transcendentals=0,
        ),
        interpret=interpret,
        name="jattn_rotate_write",
    )
    offset = jnp.asarray(page_offset, jnp.int32).reshape(1)
    refs = jax.new_ref(k_pages), jax.new_ref(v_pages)
    q = launch(rows, cos, sin, slots, offset, scales, *refs)
    k_pages, v_pages = (float8.to_stored(jax.freeze(ref), dtype) for ref, dtype in zip(refs, given, strict=True))
    return q.reshape(tokens, q_heads, dim), k_pages, v_pages


def _kernel(rows, cos, sin, slots, offset, scales, k_pages, v_pages, q, *, static: _Static, interpret: bool):
    # rows [tokens, width], cos, sin f32[tokens, dim / 2], slots i32[tokens] -> pages [pages, page_size, heads, dim], q
    token = lax.axis_index("tokens")
    slot, size = slots[token], k_pages.shape[1]
    held = (slot >= 0) & (slot < static.capacity)
    row = slot + offset[0] * size
    if not interpret:
        _rotate(rows, cos, sin, scales, k_pages, q, token, row, held, static)
        _copy(rows, scales, v_pages, token, row, held, static)
        return
    heads, dim = static.q_heads + static.kv_heads, static.dim
    value = rows[token]
    turned = value[: heads * dim].reshape(heads, dim).astype(jnp.float32)
    low, high = turned[:, : dim // 2], turned[:, dim // 2 :]
    c, s = cos[token][None], sin[token][None]
    turned = jnp.concatenate([low * c - high * s, high * c + low * s], axis=1).astype(rows.dtype)
    q[token] = turned[: static.q_heads].reshape(-1)

    @pl.when(held)
    def _():
        values = value[heads * dim :].reshape(static.kv_heads, static.v_dim)
        for i, (x, pages) in enumerate(((turned[static.q_heads :], k_pages), (values, v_pages))):
            pages[row // size, row % size] = write.as_stored(x, scales[i], static.kind, pages.dtype)


def _rotate(rows, cos, sin, scales, k_pages, q, token, row, held, static: _Static) -> None:
    # a thread's unit: 8 features of the first half of a head, and the 8 that they turn with
    half, units = static.dim // 2, static.dim // (2 * _VALUES)
    heads = static.q_heads + static.kv_heads
    narrow = write.NARROW.get(jnp.dtype(static.kind))
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 6 + (scalar,) * 3)
    def inline(_, source, cos, sin, factors, pages, out, *scalars):
        token, row, held = (x.registers.item() for x in scalars)
        kind, stored, f32 = (*(utils.dtype_to_ir_type(r.dtype) for r in (rows, k_pages)), ir.F32Type.get())
        wide = ir.VectorType.get((_VALUES,), f32)
        base = write.row_of(source, token, static.width, kind)
        phases = [write.row_of(ref, token, half, f32) for ref in (cos, sin)]
        to_q = write.row_of(out, token, static.q_heads * static.dim, kind)
        to_k = write.row_of(pages, row, static.kv_heads * static.dim, stored)
        held = arith.cmpi(arith.CmpIPredicate.ne, held, _i32(0))
        lane = arith.remui(utils.thread_idx(), _i32(utils.WARPGROUP_SIZE))
        work = []
        for start in range(0, heads * units, utils.WARPGROUP_SIZE):  # all loads before the first store
            unit = arith.addi(lane, _i32(start))
            inside = arith.minsi(unit, _i32(heads * units - 1))  # past the end the last again: no branch
            head = arith.divui(inside, _i32(units))
            col = arith.muli(arith.remui(inside, _i32(units)), _i32(_VALUES))
            at = arith.addi(arith.muli(head, _i32(static.dim)), col)
            vector = ir.VectorType.get((_VALUES,), kind)
            pair = [_load(vector, base, arith.addi(at, _i32(n)), kind) for n in (0, half)]
            turn = [_load(wide, phase, col, f32) for phase in phases]
            work.append((unit, head, at, pair, turn))
        factor = None
        if narrow:
            factor = llvm.load(f32, utils.memref_ptr(factors))
        for unit, head, at, pair, (c, s) in work:
            low, high = (arith.extf(wide, x) for x in pair)
            turned = [
                arith.subf(arith.mulf(low, c), arith.mulf(high, s)),
                arith.addf(arith.mulf(high, c), arith.mulf(low, s)),
            ]
            turned = [arith.truncf(ir.VectorType.get((_VALUES,), kind), x) for x in turned]
            exists = arith.cmpi(arith.CmpIPredicate.slt, unit, _i32(heads * units))
            is_q = arith.cmpi(arith.CmpIPredicate.slt, head, _i32(static.q_heads))
            is_k = arith.cmpi(arith.CmpIPredicate.sge, head, _i32(static.q_heads))
            place = arith.subi(at, _i32(static.q_heads * static.dim))
            for value, n in zip(turned, (0, half), strict=True):
                target = utils.getelementptr(to_q, [arith.addi(at, _i32(n))], kind)
                write.store_if(arith.andi(exists, is_q), target, value)
                kept = value if factor is None else write.narrowed(value, factor, narrow)
                target = utils.getelementptr(to_k, [arith.addi(place, _i32(n))], stored)
                write.store_if(arith.andi(arith.andi(exists, is_k), held), target, kept)

    inline(rows, cos, sin, scales, k_pages, q, token, row, held.astype(jnp.int32))


def _copy(rows, scales, pages, token, row, held, static: _Static) -> None:
    # values, which come last in a row
    first, count = (static.q_heads + static.kv_heads) * static.dim, static.kv_heads * static.v_dim
    write.move(rows, pages, scales, token, row, held, 1, static.kind, width=static.width, first=first, count=count)


def _load(vector, base, at, kind):
    return llvm.load(vector, utils.getelementptr(base, [at], kind))


def _i32(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))
