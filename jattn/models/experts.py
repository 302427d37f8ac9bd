"""A mixture of experts as the MLP of a layer. Source: arXiv:2508.10925 (gpt-oss model card), section 2."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import RaggedDotDimensionNumbers

from jattn.models.config import ModelConfig
from jattn.models.layers import Linear

# rows [rows, in] in groups, weights [groups, out, in]: each group of rows meets its own matrix
_BY_GROUP = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class ExpertLinear(nnx.Module):
    """One linear map with bias an expert: W [experts, out, in], b [experts, out]."""

    def __init__(self, num_experts: int, in_dim: int, out_dim: int, *, rngs: nnx.Rngs, dtype):
        shape = (num_experts, out_dim, in_dim)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * in_dim**-0.5)
        self.bias = nnx.Param(jnp.zeros(shape[:2], dtype))

    def __call__(self, x: jax.Array, expert: jax.Array, counts: jax.Array) -> jax.Array:
        """x [rows, in] sorted by `expert` i32[rows], of which `counts` i32[experts] each -> [rows, out] in x's dtype.

        XLA:CPU multiplies every row with every expert's matrix here, and reads them all.
        """
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # as in `project`
        y = jax.lax.ragged_dot_general(
            x, self.weight[...], counts, _BY_GROUP, precision=precision, preferred_element_type=jnp.float32
        )
        return y.astype(x.dtype) + self.bias[...][expert]


class Experts(nnx.Module):
    """Sum over the router's top k experts of share * down((clamp(up) + 1) * gate * sigmoid(alpha * gate)).

    The shares are the softmax over the k best scores.
    """

    def __init__(self, config: ModelConfig, *, rngs, dtype, weight_first):
        assert config.experts is not None
        self.options = options = config.experts
        kwargs = dict(rngs=rngs, dtype=dtype)
        self.router = Linear(config.d_model, options.num_experts, bias=True, weight_first=weight_first, **kwargs)
        self.gate_up = ExpertLinear(options.num_experts, config.d_model, 2 * config.ffn_dim, **kwargs)
        self.down = ExpertLinear(options.num_experts, config.ffn_dim, config.d_model, **kwargs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [rows, d_model] -> same shape and dtype."""
        rows, top_k = x.shape[0], self.options.top_k
        scores, chosen = jax.lax.top_k(self.router(x).astype(jnp.float32), top_k)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # row * top_k + place, those of one expert together
        expert = chosen.reshape(-1)[order]
        counts = jnp.bincount(expert, length=self.options.num_experts).astype(jnp.int32)
        gate, up = jnp.split(self.gate_up(x[order // top_k], expert, counts), 2, axis=-1)
        gate, up = jnp.minimum(gate, self.options.limit), jnp.clip(up, -self.options.limit, self.options.limit)
        out = self.down((up + 1) * gate * jax.nn.sigmoid(self.options.alpha * gate), expert, counts)
        back = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(rows, top_k, -1)
        shares = jax.nn.softmax(scores, axis=-1)[..., None]
        return jnp.sum(back.astype(jnp.float32) * shares, axis=1).astype(x.dtype)
