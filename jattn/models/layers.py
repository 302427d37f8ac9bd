"""Parts that every decoder shares: a linear map, a norm, and the split of a fused projection into heads."""

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.spec import AttnSpec


class Linear(nnx.Module):
    """y = x W^T + b with W [out, in]; b only where asked for.

    `weight_first` asks for W x^T, kept apart from the transpose around it. Measured on two AVX-512 cores, float32,
    XLA:CPU of jax 0.11.2, a 135M-parameter decoder step without attention, ms at 1 / 2 / 4 / 8 / 16 rows:
    W x^T behind a barrier 21 / 25 / 25 / 34 / 39; without the barrier (XLA swaps the operands back) 24 / 47 / 50 /
    61 / 91; x W^T 72 / 43 / 53 / 54 / 69. One row against [vocab, d] alone: 4 ms first, 15 ms last.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.float32,
        weight_first: bool = False,
        bias: bool = False,
    ):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (out_dim, in_dim), dtype) * in_dim**-0.5)
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if bias else None
        self.weight_first = weight_first

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [rows, in] -> [rows, out] in x's dtype, accumulated in float32."""
        y = project(x, self.weight[...], weight_first=self.weight_first)
        return y if self.bias is None else y + self.bias[...][None, :]


def project(x: jax.Array, weight: jax.Array, *, weight_first: bool, out_dtype=None) -> jax.Array:
    """x [rows, in], weight [out, in] -> [rows, out] in `out_dtype` (x's by default), accumulated in float32.

    float32 operands are multiplied in full float32 on every device.
    """
    out_dtype = out_dtype or x.dtype
    if weight_first:
        return jax.lax.optimization_barrier(_product(weight, x)).T.astype(out_dtype)
    if x.shape[0] != 1:
        return _product(x, weight).astype(out_dtype)
    return jax.lax.platform_dependent(x, weight, default=_product, cuda=_row_sums, rocm=_row_sums).astype(out_dtype)


def _product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    # HIGHEST is for float32: TF32 would lose 13 bits; narrower operands are exact products in any precision
    precision = jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=jnp.float32)


def _row_sums(x: jax.Array, weight: jax.Array) -> jax.Array:
    # One row on a GPU: a sum over each row of the weight reads it at the rate of a plain read, and a norm before it
    # becomes a part of it; as a product XLA gives it to a kernel for matrices.
    return jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=1)[None]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, statistics in float32. Source: arXiv:1910.07467.

    `wide` keeps the weight in float32 and rounds last; otherwise x is rounded first, as Llama's authors do.
    """

    def __init__(self, dim: int, eps: float, dtype=jnp.float32, *, wide: bool = False):
        self.weight = nnx.Param(jnp.ones((dim,), jnp.float32 if wide else dtype))
        self.eps, self.wide = eps, wide

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., dim] -> same shape and dtype."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        return (wide * scale * weight).astype(x.dtype) if self.wide else (wide * scale).astype(x.dtype) * weight


def split_heads(qkv: jax.Array, spec: AttnSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[tokens, (q_heads + kv_heads) * head_dim + kv_heads * v_head_dim] -> q, k, v [tokens, heads, width]."""
    tokens = qkv.shape[0]
    q_end = spec.num_q_heads * spec.head_dim
    k_end = q_end + spec.num_kv_heads * spec.head_dim
    return (
        qkv[:, :q_end].reshape(tokens, spec.num_q_heads, spec.head_dim),
        qkv[:, q_end:k_end].reshape(tokens, spec.num_kv_heads, spec.head_dim),
        qkv[:, k_end:].reshape(tokens, spec.num_kv_heads, spec.v_head_dim),
    )
