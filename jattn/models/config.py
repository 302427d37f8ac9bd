"""Hyperparameters of the decoder family, in the field's names."""

import dataclasses

from jattn.models.rope import Llama3Scaling
from jattn.spec import AttnSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family decoder: pre-norm, rotary, gated SiLU, grouped-query attention."""

    num_layers: int
    d_model: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_context: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    tied_embeddings: bool = True

    def attn_spec(self, kv_dtype: str | None = None) -> AttnSpec:
        """The attention layer of this model."""
        return AttnSpec(
            num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, kv_dtype=kv_dtype
        )
