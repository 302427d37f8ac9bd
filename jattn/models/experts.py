"""A mixture of experts as the MLP of a layer.

Sources: arXiv:2508.10925 (gpt-oss model card), section 2; arXiv:2405.04434 (DeepSeek-V2), section 2.2.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import RaggedDotDimensionNumbers

from jattn.models.config import ModelConfig
from jattn.models.layers import Linear, project
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.routing import route

# rows [rows, in] in groups, weights [groups, out, in]: each group of rows meets its own matrix
_BY_GROUP = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class ExpertLinear(nnx.Module):
    """One linear map an expert: W [experts, out, in], b [experts, out] only where asked for."""

    def __init__(self, num_experts: int, in_dim: int, out_dim: int, *, rngs: nnx.Rngs, dtype, bias: bool):
        shape = (num_experts, out_dim, in_dim)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * in_dim**-0.5)
        self.bias = nnx.Param(jnp.zeros(shape[:2], dtype)) if bias else None

    def __call__(self, x: jax.Array, expert: jax.Array, counts: jax.Array) -> jax.Array:
        """x [rows, in] sorted by `expert` i32[rows], of which `counts` i32[experts] each -> [rows, out] in x's dtype.

        XLA:CPU multiplies every row with every expert's matrix here, and reads them all.
        """
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # as in `project`
        y = jax.lax.ragged_dot_general(
            x, self.weight[...], counts, _BY_GROUP, precision=precision, preferred_element_type=jnp.float32
        )
        y = y.astype(x.dtype)
        return y if self.bias is None else y + self.bias[...][expert]


class Experts(nnx.Module):
    """Sum over the router's experts of share * down(gate, up), and the MLP that every token uses where there is one.

    An expert is down(activation(gate) * up); with `limit`, down((clamp(up) + 1) * gate * sigmoid(alpha * gate)).
    """

    def __init__(self, config: ModelConfig, *, rngs, dtype, weight_first):
        assert config.experts is not None
        self.options = options = config.experts
        self.activation = config.activation
        width, num = options.ffn_dim or config.ffn_dim, options.num_experts
        kwargs = dict(rngs=rngs, dtype=dtype)
        self.router = Linear(config.d_model, num, bias=options.bias, weight_first=weight_first, **kwargs)
        self.score_bias = nnx.Param(jnp.zeros((num,), jnp.float32)) if options.score_bias else None
        self.gate_up = ExpertLinear(num, config.d_model, 2 * width, bias=options.bias, **kwargs)
        self.down = ExpertLinear(num, width, config.d_model, bias=options.bias, **kwargs)
        width = options.shared_ffn_dim
        self.shared = MLP(config, width, weight_first=weight_first, **kwargs) if width else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [rows, d_model] -> same shape and dtype."""
        rows, top_k = x.shape[0], self.options.top_k
        chosen, shares = route(self._logits(x), None if self.score_bias is None else self.score_bias[...], self.options)
        order = jnp.argsort(chosen.reshape(-1), stable=True)  # row * top_k + place, those of one expert together
        expert = chosen.reshape(-1)[order]
        counts = jnp.bincount(expert, length=self.options.num_experts).astype(jnp.int32)
        gate, up = jnp.split(self.gate_up(x[order // top_k], expert, counts), 2, axis=-1)
        out = self.down(self._gated(gate, up), expert, counts)
        back = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(rows, top_k, -1)
        mixed = jnp.sum(back.astype(jnp.float32) * shares[..., None], axis=1).astype(x.dtype)
        return mixed if self.shared is None else mixed + self.shared(x)

    def _logits(self, x: jax.Array) -> jax.Array:
        # in float32 in any dtype: near ties decide which expert runs
        router = self.router
        logits = project(x, router.weight[...], weight_first=router.weight_first, out_dtype=jnp.float32)
        return logits if router.bias is None else logits + router.bias[...].astype(jnp.float32)[None, :]

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = self.options.limit
        if limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.options.alpha * gate)
