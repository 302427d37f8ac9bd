"""Hyperparameters of the decoder family, in the field's names: a model is a row of these, never a class."""

import dataclasses

from jattn.models.rope import Rope, Scaling
from jattn.spec import AttnSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of gated MLPs, of which each token uses the `top_k` that its router scores highest."""

    num_experts: int
    top_k: int
    limit: float  # clamp of the gate from above, of the up projection on both sides
    alpha: float  # slope of the gate's sigmoid

    def __post_init__(self):
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} of num_experts={self.num_experts}: want 1 to num_experts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with rotary, grouped-query attention and a gated MLP; each option is off by default.

    Args:
      windows: keys that each layer sees, the query's own included, None for all; () means all in every layer.
      window_rope_theta: of the layers with a window where theirs is another; their frequencies are not scaled then.
      qkv_bias, out_bias: biases of the attention projections. qk_norm: RMS norm of each head before rope.
      sinks: one learned logit a query head. sm_scale, attn_soft_cap: as in `AttnSpec`.
      post_norms: attention and MLP are normed again before they are added to the stream.
      wide_norms: norms multiply by a float32 weight before they round to the model's dtype.
      embed_scale: factor on the embedding of the input. final_soft_cap: s -> cap * tanh(s / cap) on the logits.
      activation: of the gate, "silu" or "gelu_tanh". experts: a mixture in the MLP's place.
    """

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
    rope_scaling: Scaling | None = None
    tied_embeddings: bool = True
    windows: tuple[int | None, ...] = ()
    window_rope_theta: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    sm_scale: float | None = None
    attn_soft_cap: float | None = None
    post_norms: bool = False
    wide_norms: bool = False
    embed_scale: float | None = None
    final_soft_cap: float | None = None
    activation: str = "silu"
    experts: ExpertsConfig | None = None

    def __post_init__(self):
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"{len(self.windows)} windows for num_layers={self.num_layers}: want one each, or () for none"
            )

    def window(self, layer: int) -> int | None:
        """Keys that `layer` sees, None for all."""
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int) -> Rope:
        """The rotary embedding of `layer`."""
        if self.window(layer) is not None and self.window_rope_theta is not None:
            return Rope(theta=self.window_rope_theta)
        return Rope(theta=self.rope_theta, scaling=self.rope_scaling)

    def attn_spec(self, kv_dtype: str | None = None, layer: int = 0) -> AttnSpec:
        """The attention of one layer; those of other layers differ from it in the window only.

        >>> config = ModelConfig(num_layers=2, d_model=8, num_q_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=8,
        ...     vocab_size=9, max_context=32, rms_eps=1e-6, rope_theta=1e4, windows=(16, None))
        >>> [spec.sliding_window for spec in config.attn_specs()]
        [16, None]
        """
        return AttnSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sm_scale=self.sm_scale,
            logit_soft_cap=self.attn_soft_cap,
            sliding_window=self.window(layer),
            sinks=self.sinks,
            kv_dtype=kv_dtype,
        )

    def attn_specs(self, kv_dtype: str | None = None) -> tuple[AttnSpec, ...]:
        """The attention of each layer."""
        return tuple(self.attn_spec(kv_dtype, layer) for layer in range(self.num_layers))
