"""Static descriptions of an attention layer, in the field's terms. Hashable, so that they pick programs."""

import dataclasses
import math

import jax.numpy as jnp

from jattn.features import Feature

KV_DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "fp8_e4m3": jnp.float8_e4m3fn,
    "fp8_e5m2": jnp.float8_e5m2,
    "int8": jnp.int8,
}
_QUANTISED = {"fp8_e4m3": Feature.FP8_KV, "fp8_e5m2": Feature.FP8_KV, "int8": Feature.INT8_KV}


def check_page_size(page_size: int) -> None:
    """Refuse a page size that no cache here has. Raises ValueError with the value and the rule."""
    if not 1 <= page_size <= 256:
        raise ValueError(f"page_size={page_size}: want 1 to 256")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttnSpec:
    """One MHA/GQA layer.

    Args:
      num_q_heads, num_kv_heads: query head h reads KV head h // (num_q_heads // num_kv_heads).
      head_dim, v_head_dim: widths of keys and of values (`v_head_dim` defaults to `head_dim`); any integer.
      sm_scale: factor on q . k (default head_dim ** -0.5).
      logit_soft_cap: s -> cap * tanh(s / cap), after scaling and before the mask.
      sliding_window: keys seen, the query's own included, counted by position (so by depth in a draft tree).
      sinks: one more logit a query head in the softmax denominator, unscaled and uncapped; passed to `attend`.
      kv_dtype: a name of `KV_DTYPES`; None means the dtype of the keys.
      kv_scales: "tensor" (one scale a layer) or "token" (one a cached token and KV head); None picks "token" for
        int8 and "tensor" otherwise.
      alibi ... xai_temperature_len: known and not offered; `resolve` refuses them by name.

    Raises: ValueError naming the field, its value and the rule.

    >>> AttnSpec(num_q_heads=9, num_kv_heads=3, head_dim=64).group_size
    3
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    sm_scale: float | None = None
    logit_soft_cap: float | None = None
    sliding_window: int | None = None
    sinks: bool = False
    kv_dtype: str | None = None
    kv_scales: str | None = None
    alibi: bool = False
    cross_attention: bool = False
    chunked_local: int | None = None
    bidirectional_spans: bool = False
    xai_temperature_len: int | None = None

    def __post_init__(self):
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for field in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"AttnSpec.{field}={getattr(self, field)}: want at least 1")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"AttnSpec.num_q_heads={self.num_q_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        scale = self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        if not math.isfinite(scale):
            raise ValueError(f"AttnSpec.sm_scale={scale}: want a finite number, or None for head_dim ** -0.5")
        object.__setattr__(self, "sm_scale", scale)
        if self.logit_soft_cap is not None and not 0 < self.logit_soft_cap < math.inf:
            raise ValueError(f"AttnSpec.logit_soft_cap={self.logit_soft_cap}: want a positive cap, or None for no cap")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"AttnSpec.sliding_window={self.sliding_window}: want at least 1 (the query's own key), or None for off"
            )
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"AttnSpec.kv_dtype={self.kv_dtype!r}: want one of {', '.join(KV_DTYPES)}, or None")
        if self.kv_scales not in (None, "tensor", "token"):
            raise ValueError(f"AttnSpec.kv_scales={self.kv_scales!r}: want 'tensor', 'token' or None")
        if self.kv_scales is None:
            object.__setattr__(self, "kv_scales", "token" if self.kv_dtype == "int8" else "tensor")

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def quantised(self) -> bool:
        """Whether cached rows are stored with scales."""
        return self.kv_dtype in _QUANTISED

    def needs(self) -> frozenset[Feature]:
        """Features that any kernel serving this layer must provide."""
        asked = {
            Feature.UNEQUAL_HEAD_DIMS: self.v_head_dim != self.head_dim,
            Feature.WINDOW: self.sliding_window is not None,
            Feature.SOFT_CAP: self.logit_soft_cap is not None,
            Feature.SINKS: self.sinks,
            Feature.TOKEN_SCALES: self.quantised and self.kv_scales == "token",
            Feature.ALIBI: self.alibi,
            Feature.CROSS_ATTENTION: self.cross_attention,
            Feature.CHUNKED_LOCAL: self.chunked_local is not None,
            Feature.BIDIRECTIONAL_SPANS: self.bidirectional_spans,
            Feature.XAI_TEMPERATURE: self.xai_temperature_len is not None,
        }
        needs = {feature for feature, wanted in asked.items() if wanted}
        if self.kv_dtype in _QUANTISED:
            needs.add(_QUANTISED[self.kv_dtype])
        return frozenset(needs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """One multi-head latent attention layer (DeepSeek-V2, arXiv:2405.04434). Widths as in that paper's config.

    Args:
      kv_lora_rank: width of a token's latent, from which every head's key and value are made.
      qk_nope_head_dim, qk_rope_head_dim: widths of a head's key without and with rotation; the rotated part is one for
        all heads. Either may be 0, not both.
      v_head_dim: width of a head's value.
      q_lora_rank: width of the queries' own latent; attention does not see it.
      sm_scale: factor on q . k (default (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, in every form).
      kv_dtype: a name of `KV_DTYPES`; None means the cache's own. "fp8_e4m3" is the packed form of `MLACache`.

    Raises: ValueError naming the field, its value and the rule.

    >>> MLASpec(num_q_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128).latent_dims
    576
    """

    num_q_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    sm_scale: float | None = None
    kv_dtype: str | None = None

    def __post_init__(self):
        for field in ("num_q_heads", "kv_lora_rank", "v_head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"MLASpec.{field}={getattr(self, field)}: want at least 1")
        for field in ("qk_nope_head_dim", "qk_rope_head_dim"):
            if getattr(self, field) < 0:
                raise ValueError(f"MLASpec.{field}={getattr(self, field)}: want at least 0 (no such part)")
        if self.qk_head_dim == 0:
            raise ValueError("MLASpec.qk_nope_head_dim=0 and qk_rope_head_dim=0: want a key of at least 1")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"MLASpec.kv_dtype={self.kv_dtype!r}: want one of {', '.join(KV_DTYPES)}, or None")
        if self.sm_scale is None:
            object.__setattr__(self, "sm_scale", self.qk_head_dim**-0.5)

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dims(self) -> int:
        """Numbers of a cached token: its latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded(self) -> AttnSpec:
        """The layer with every head's keys and values made from the latents."""
        return AttnSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_q_heads,
            head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
            sm_scale=self.sm_scale,
        )

    def needs(self) -> frozenset[Feature]:
        """Features that any kernel serving this layer must provide."""
        kept = _QUANTISED.get(self.kv_dtype or "")
        return frozenset({Feature.MLA} if kept is None else {Feature.MLA, kept})
