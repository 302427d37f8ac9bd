"""Hyperparameters of the decoder family, in the field's names: a model is a row of these, never a class."""

import dataclasses

from jattn.models.rope import Rope, Scaling
from jattn.spec import AttnSpec, MLASpec

SCORINGS, GROUP_SCORES = ("softmax", "sigmoid"), ("max", "top2")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of gated MLPs, of which each token uses the `top_k` that its router scores highest.

    Args:
      ffn_dim: width of an expert; None for the model's `ffn_dim`.
      scoring: router logits become scores by "softmax" over the experts or by "sigmoid", each for itself.
      score_bias: a learned f32 an expert is added to the scores for the choice, not for the shares.
      num_groups, top_groups: experts are cut into groups of neighbours, and only those of the best groups are chosen.
      group_score: a group counts as its best expert ("max") or as the sum of its best two ("top2").
      norm_topk: the shares of the chosen experts are scaled to sum to 1. routed_scale: factor on the shares.
      shared_ffn_dim: width of a gated MLP that every token uses besides; 0 for none.
      first_layer, every: layers first_layer, and from there each whose index is a multiple of `every`, have experts.
      bias: of the router and of the experts' projections.
      limit: clamp of the gate from above, of the up projection on both sides, with `alpha`, slope of the gate's
        sigmoid: gpt-oss. None for activation(gate) * up.
    """

    num_experts: int
    top_k: int
    ffn_dim: int | None = None
    scoring: str = "softmax"
    score_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    norm_topk: bool = True
    routed_scale: float = 1.0
    shared_ffn_dim: int = 0
    first_layer: int = 0
    every: int = 1
    bias: bool = False
    limit: float | None = None
    alpha: float = 1.0

    def __post_init__(self):
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} of num_experts={self.num_experts}: want 1 to num_experts")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring={self.scoring!r} is unknown: want one of {', '.join(SCORINGS)}")
        if self.group_score not in GROUP_SCORES:
            raise ValueError(f"group_score={self.group_score!r} is unknown: want one of {', '.join(GROUP_SCORES)}")
        if not 1 <= self.top_groups <= self.num_groups or self.num_experts % self.num_groups:
            raise ValueError(
                f"top_groups={self.top_groups} of num_groups={self.num_groups} over num_experts={self.num_experts}: "
                "want 1 to num_groups, and groups of one size"
            )
        if self.top_k > self.top_groups * (self.num_experts // self.num_groups):
            raise ValueError(
                f"top_k={self.top_k}, but top_groups={self.top_groups} of num_groups={self.num_groups} hold "
                f"{self.top_groups * (self.num_experts // self.num_groups)} experts: want at most that"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention in the place of grouped-query attention. Source: arXiv:2405.04434, section 2.1.

    Args:
      q_lora_rank: width of the queries' own latent; None projects queries in one matrix.
      latent_norm: RMS norm of the latent before it is cached, with `eps`, which DeepSeek's code fixes at 1e-6.
      rope_blocks: equal parts of the rotary features, each with the same frequencies: 1, or a KV head each in a model
        that was a GQA model before.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    latent_norm: bool = True
    eps: float = 1e-6
    rope_blocks: int = 1

    def __post_init__(self):
        if self.rope_blocks < 1 or self.qk_rope_head_dim % self.rope_blocks:
            raise ValueError(
                f"rope_blocks={self.rope_blocks} of qk_rope_head_dim={self.qk_rope_head_dim}: want equal parts"
            )


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
      activation: of the gate, "silu" or "gelu_tanh". experts: a mixture in the MLP's place, in the layers it names.
      mla: latent attention; `head_dim` then is the width of queries, and `num_kv_heads` says nothing.
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
    mla: MLAConfig | None = None

    def __post_init__(self):
        if self.mla is not None and self.head_dim != self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim:
            raise ValueError(f"head_dim={self.head_dim} of {self.mla}: want qk_nope_head_dim + qk_rope_head_dim")
        if self.mla is not None and (self.windows or self.sinks or self.attn_soft_cap is not None):
            raise ValueError("windows, sinks and attn_soft_cap are options of grouped-query attention: leave mla out")
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

    @property
    def rope_dim(self) -> int:
        """Features that share one set of rotary frequencies."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim // self.mla.rope_blocks

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has a mixture of experts in its MLP's place."""
        e = self.experts
        return e is not None and layer >= e.first_layer and layer % e.every == 0

    def attn_spec(self, kv_dtype: str | None = None, layer: int = 0) -> AttnSpec | MLASpec:
        """The attention of one layer; those of other layers differ from it in the window only.

        >>> config = ModelConfig(num_layers=2, d_model=8, num_q_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=8,
        ...     vocab_size=9, max_context=32, rms_eps=1e-6, rope_theta=1e4, windows=(16, None))
        >>> [spec.sliding_window for spec in config.attn_specs()]
        [16, None]
        """
        if self.mla is not None:
            return MLASpec(
                num_q_heads=self.num_q_heads,
                kv_lora_rank=self.mla.kv_lora_rank,
                qk_nope_head_dim=self.mla.qk_nope_head_dim,
                qk_rope_head_dim=self.mla.qk_rope_head_dim,
                v_head_dim=self.mla.v_head_dim,
                q_lora_rank=self.mla.q_lora_rank,
                sm_scale=self.sm_scale,
                kv_dtype=kv_dtype,
            )
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

    def attn_specs(self, kv_dtype: str | None = None) -> tuple[AttnSpec | MLASpec, ...]:
        """The attention of each layer."""
        return tuple(self.attn_spec(kv_dtype, layer) for layer in range(self.num_layers))
