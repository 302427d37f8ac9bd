"""Hyperparameters of a decoder as a plain record, whatever file they were read from."""

import dataclasses


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
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None

    @property
    def q_dim(self) -> int:
        """Rows of the query projection."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def gate_up_dim(self) -> int:
        """Columns of a gate and an up projection that a file keeps as one."""
        return 2 * self.ffn_dim
