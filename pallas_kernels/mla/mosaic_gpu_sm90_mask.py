"""Which keys a tile of the Hopper latent attention sees, over scores in registers."""
# Inline code and the decorators of `jax.experimental.pallas.mosaic_gpu` are typed more loosely than what they make.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

import math

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import mosaic_gpu_sm90_prefill_softmax as ring_io
from pallas_kernels.attention import mosaic_gpu_sm90_rows as rows_io
from pallas_kernels.attention.mosaic_gpu_sm90_masks import iota
from pallas_kernels.attention.mosaic_gpu_sm90_records import Item
from pallas_kernels.attention.mosaic_gpu_sm90_rows import ROW, TILE, Rows, constant
from pallas_kernels.mla.mosaic_gpu_sm90_records import Arrays, Static

arith, ir, vector = utils.arith, utils.ir, utils.vector


def mask(static: Static, arrays: Arrays, item: Item, block, start, scores):
    """Scores f32[64, keys] of a block, -inf where a rule or the length hides the key.

    start: first of these 64 rows in the tile.
    """
    if not (static.interpret or static.packed and static.words):  # with both, registers are short either way
        first = block * static.config.block_kv
        if static.words:
            return _tree_inline(static, arrays, item, first, start, scores)
        return ring_io.mask(static, item, first, start, scores)
    shape = scores.shape
    key = iota(shape, 1) + block * static.config.block_kv
    seen = key < item.kv_len
    if static.words:
        node = key - item.high
        scores = jnp.where(seen & (node < 32 * static.words), scores, -jnp.inf)
        return _tree(static, arrays, item, node, start, scores)
    if static.rules.mask == "causal" and static.block_q > 1:
        place = (iota(shape, 0) + start) // static.group + item.first
        seen = seen & (key <= place)
    return jnp.where(seen, scores, -jnp.inf)


def _tree_inline(static: Static, arrays: Arrays, item: Item, first, start, scores):
    # Element by element against constants: columns by number would be kept in registers, which are short.
    scalar, rows = plgpu.Layout.WG_SPLAT(()), static.config.rows
    result = plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=TILE)
    words = []
    for word in range(static.words):
        where = Rows(jnp.int32(0), (item.tile * static.words + word) * rows, jnp.int32(rows), rows, 0)
        words.append(rows_io.load_vector(arrays.bits, where, start=start, interpret=False))

    @plgpu.inline_mgpu(arg_types=(TILE, scalar, scalar, *[ROW] * static.words), return_type=result)
    def inline(_, tile, node, end, *words):
        node, end = rows_io.value_of(node), rows_io.value_of(end)
        regs = np.empty_like(tile.registers)
        nothing, predicates = utils.c(-math.inf, ir.F32Type.get()), arith.CmpIPredicate
        near = None
        for at, row, col, _, lane_col in rows_io.places_of(scores.shape):
            if near is None:
                near, end = arith.addi(node, lane_col), arith.subi(end, lane_col)
            parts = []
            for i in range(2):
                place = rows_io.plus(near, col + i)
                seen = arith.cmpi(predicates.sgt, end, constant(col + i))
                for word, bits in enumerate(words):
                    mine = vector.extract(bits.registers.flat[row % 16 // 8], dynamic_position=[], static_position=[0])
                    bit = rows_io.plus(place, -32 * word)
                    others = arith.cmpi(predicates.uge, bit, constant(32))
                    shifted = arith.shrui(mine, arith.andi(bit, constant(31)))
                    set_ = arith.cmpi(predicates.ne, arith.andi(shifted, constant(1)), constant(0))
                    seen = arith.andi(seen, arith.ori(others, set_))
                score = vector.extract(tile.registers[at], dynamic_position=[], static_position=[i])
                parts.append(arith.select(seen, score, nothing))
            regs[at] = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), parts)
        return mgpu.FragmentedArray(_registers=regs, _layout=TILE.to_mgpu(), _is_signed=None)

    # of the block's first key: which node it is, and how many keys from it on are there and have bits
    end = jnp.minimum(item.kv_len, item.high + 32 * static.words) - first
    return inline(
        plgpu.layout_cast(scores, TILE), *(jnp.asarray(x, jnp.int32) for x in (first - item.high, end)), *words
    )


def _tree(static: Static, arrays: Arrays, item: Item, node, start, scores):
    # Word by word onto the scores, which takes fewer registers than a tile of bits; they are read here, as few blocks
    # hold nodes.
    rows = static.config.rows
    for word in range(static.words):
        where = Rows(jnp.int32(0), (item.tile * static.words + word) * rows, jnp.int32(rows), rows, 0)
        bits = rows_io.load_vector(arrays.bits, where, start=start, interpret=static.interpret)
        bits = lax.broadcast_in_dim(bits, scores.shape, (0,)) >> (node & 31).astype(jnp.uint32)
        hidden = (node >> 5 == word) & ((bits & jnp.uint32(1)) == 0)
        scores = jnp.where(hidden, -jnp.inf, scores)
    return scores
