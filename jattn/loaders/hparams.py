"""Hyperparameters of a decoder as a plain record, whatever file they were read from."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """What the file says about stretching rope. A field that `kind` does not use is None."""

    kind: str  # "linear", "llama3", "yarn", or "freq_factors": a divisor for each frequency
    factor: float | None = None
    original_max_context: int | None = None
    freq_factors: tuple[float, ...] | None = None  # [head_dim / 2]
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    amplitude: float | None = None  # on cos and sin
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None


def _unshown(default: Any) -> Any:
    # of few families: left out of the repr, which stands in error messages
    return dataclasses.field(default=default, repr=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HParams:
    """Sizes and constants of a decoder, as the file states them, with its family's where the file has none.

    The options after `eos_id` mean what they mean in `jattn.models.config.ModelConfig`.
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
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    bos_id: int | None
    eos_id: int | None
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
    num_experts: int = 0  # 0: a dense MLP
    experts_per_token: int = 0
    expert_ffn_dim: int | None = _unshown(None)  # from here to `group_score` as in `jattn.models.config.ExpertsConfig`
    shared_ffn_dim: int = _unshown(0)
    scoring: str = _unshown("softmax")
    score_bias: bool = _unshown(False)
    num_groups: int = _unshown(1)
    top_groups: int = _unshown(1)
    group_score: str = _unshown("max")
    norm_topk: bool = _unshown(True)
    routed_scale: float = _unshown(1.0)
    first_expert_layer: int = _unshown(0)
    expert_every: int = _unshown(1)
    kv_lora_rank: int | None = _unshown(None)  # latent attention where it is set, as in `jattn.models.config.MLAConfig`
    q_lora_rank: int | None = _unshown(None)
    qk_nope_head_dim: int = _unshown(0)
    qk_rope_head_dim: int = _unshown(0)
    v_head_dim: int | None = _unshown(None)  # None: head_dim
    adjacent_rope: bool = _unshown(False)  # the file keeps rotary pairs (2j, 2j + 1) of latent attention together
    scale_block: tuple[int, int] | None = _unshown(None)  # 8-bit weights: rows and columns that share a scale
    num_next_layers: int = _unshown(0)  # layers behind the last that predict a token further ahead
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None

    @property
    def q_dim(self) -> int:
        """Rows of the query projection."""
        return self.num_q_heads * self.head_dim

    @property
    def out_dim(self) -> int:
        """Columns of the output projection."""
        return self.num_q_heads * (self.v_head_dim or self.head_dim)

    @property
    def kv_a_dim(self) -> int:
        """Rows of the projection to the latent and the shared rotary key."""
        return (self.kv_lora_rank or 0) + self.qk_rope_head_dim

    @property
    def kv_b_dim(self) -> int:
        """Rows of the projection from the latent to every head's key and value."""
        return self.num_q_heads * (self.qk_nope_head_dim + (self.v_head_dim or 0))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts; those behind the last layer have what the last would have."""
        every = self.expert_every
        return self.num_experts > 0 and layer >= self.first_expert_layer and layer % every == 0

    @property
    def kv_dim(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def two_d_model(self) -> int:
        """Columns of the projection of a token's embedding and a hidden state."""
        return 2 * self.d_model

    @property
    def gate_up_dim(self) -> int:
        """Columns of a gate and an up projection that a file keeps as one."""
        return 2 * self.ffn_dim
