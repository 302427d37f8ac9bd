"""Hyperparameters of a decoder, read from GGUF metadata into a plain record."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.loaders.errors import ModelFileError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """What the file says about stretching rope. A model that does not implement `kind` must refuse it."""

    kind: str  # "linear", "yarn", "longrope", or "freq_factors": a divisor for each frequency, as Llama 3.1 has
    factor: float | None = None
    original_max_context: int | None = None
    freq_factors: tuple[float, ...] | None = None  # [head_dim / 2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HParams:
    """Sizes and constants of a decoder, as the file states them."""

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

    @property
    def q_dim(self) -> int:
        """Rows of the query projection."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


def read_hparams(
    arch: str, metadata: Mapping[str, Any], *, tied_embeddings: bool, freq_factors: tuple[float, ...] | None
) -> HParams:
    """The record for keys `{arch}.*`, with the format's own defaults for what may be left out.

    Raises: ModelFileError naming the key that is missing, of the wrong kind, or outside what decoders here do.
    """
    keys = _Keys(arch, metadata)
    num_q_heads, d_model = keys.count("attention.head_count"), keys.count("embedding_length")
    num_kv_heads = keys.count("attention.head_count_kv", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelFileError(
            f"{num_q_heads} query heads over {num_kv_heads} kv heads: want a multiple; fetch the file again"
        )
    head_dim = keys.count("attention.key_length", d_model // num_q_heads)
    keys.expect("attention.value_length", head_dim, "values as wide as keys")
    keys.expect("rope.dimension_count", head_dim, "all features of a head rotated")
    keys.expect("expert_count", 0, "a dense MLP")
    return HParams(
        num_layers=keys.count("block_count"),
        d_model=d_model,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=keys.count("feed_forward_length"),
        vocab_size=keys.count("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        max_context=keys.count("context_length"),
        rms_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.real("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(keys, freq_factors),
        tied_embeddings=tied_embeddings,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
    )


def _rope_scaling(keys: "_Keys", freq_factors: tuple[float, ...] | None) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    original = keys.get("rope.scaling.original_context_length", None)
    if kind == "none":
        kind = "freq_factors" if freq_factors is not None else None
    if kind is None:
        return None
    return RopeScaling(
        kind=str(kind),
        factor=keys.get("rope.scaling.factor", None),
        original_max_context=original,
        freq_factors=freq_factors,
    )


class _Keys:
    """Checked access to the keys of one architecture."""

    def __init__(self, arch: str, metadata: Mapping[str, Any]):
        self.arch, self.metadata = arch, metadata

    def get(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelFileError(
                f"metadata {self.arch}.{key} is {_show(value)}: want a whole number above 0, the same in all layers"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelFileError(f"metadata {self.arch}.{key} is {_show(value)}: want a number above 0")
        return float(value)

    def expect(self, key: str, want: int, why: str) -> None:
        value = self.get(key, want)
        if value != want:
            raise ModelFileError(f"metadata {self.arch}.{key} is {_show(value)}: only {want} is supported ({why})")


def _show(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]
