"""Hyperparameters from GGUF metadata. Each key is read or refused: a feature left out makes wrong text, no error."""

import math
from collections.abc import Mapping
from typing import Any

from jattn.loaders.arches import Arch
from jattn.loaders.errors import ModelFileError
from jattn.loaders.fields import Fields
from jattn.loaders.hparams import HParams, RopeScaling

# keys that change no number here
_SILENT = ("rope.scaling.finetuned", "tensor_data_layout", "mm.tokens_per_image", "attention.layer_norm_epsilon")


def read_hparams(
    arch: Arch, metadata: Mapping[str, Any], *, tied_embeddings: bool, freq_factors: tuple[float, ...] | None
) -> HParams:
    """The record for keys `{arch}.*`, with the format's own defaults for what may be left out.

    Raises: ModelFileError naming the key that is missing, of the wrong kind, or outside what decoders here do.
    """
    prefix = f"{arch.name}."
    own = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    keys, family = Fields(own, label=f"metadata {prefix}"), arch.family
    num_q_heads, d_model = keys.count("attention.head_count"), keys.count("embedding_length")
    num_kv_heads = keys.count("attention.head_count_kv", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelFileError(
            f"{num_q_heads} query heads over {num_kv_heads} kv heads: want a multiple; fetch the file again"
        )
    head_dim = keys.count("attention.key_length", d_model // num_q_heads)
    keys.expect("attention.value_length", head_dim, "values as wide as keys")
    for key in ("rope.dimension_count", "rope.dimension_count_swa"):
        keys.expect(key, head_dim, "all features of a head rotated")
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.expect(key, head_dim, "heads of one width")
    keys.expect("attention.causal", True, "a causal decoder")
    if freq_factors is not None and len(freq_factors) != head_dim // 2:
        raise ModelFileError(
            f"rope_freqs.weight holds {len(freq_factors)} factors: want {head_dim // 2}, one a pair of features"
        )
    has_experts = arch.has("router")
    if not has_experts:
        keys.expect("expert_count", 0, "a dense MLP")
    num_layers = keys.count("block_count")
    wide = num_layers == family.sm_scale_of_d_model
    theta = keys.real("rope.freq_base", family.rope_theta)
    if family.window_rope_theta is None:
        keys.expect("rope.freq_base_swa", theta, "one rotary base for all layers")
    hparams = HParams(
        num_layers=num_layers,
        d_model=d_model,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_dim=_ffn_dim(keys, has_experts),
        vocab_size=keys.count("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        max_context=keys.count("context_length"),
        rms_eps=keys.real("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(keys, freq_factors, truncate=family.yarn_truncate),
        tied_embeddings=tied_embeddings,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        windows=_windows(keys, num_layers, family.full_every),
        window_rope_theta=family.window_rope_theta and keys.real("rope.freq_base_swa", family.window_rope_theta),
        sm_scale=(d_model // num_q_heads) ** -0.5 if wide else None,
        attn_soft_cap=keys.real("attn_logit_softcapping") if family.attn_soft_cap else None,
        final_soft_cap=keys.optional("final_logit_softcapping") if family.final_soft_cap else None,
        num_experts=keys.count("expert_count") if has_experts else 0,
        experts_per_token=keys.count("expert_used_count") if has_experts else 0,
        swiglu_limit=family.swiglu_limit,
        swiglu_alpha=family.swiglu_alpha,
        **arch.options(d_model),
    )
    keys.refuse_rest(_SILENT, arch.name)
    return hparams


def _ffn_dim(keys: Fields, has_experts: bool) -> int:
    dense = keys.get("feed_forward_length")
    return keys.count("expert_feed_forward_length", dense) if has_experts else keys.count("feed_forward_length")


def _windows(keys: Fields, num_layers: int, full_every: int | None) -> tuple[int | None, ...]:
    if full_every is None or (full_every == 0 and not keys.get("attention.sliding_window", 0)):
        return ()
    window, pattern = keys.count("attention.sliding_window"), keys.get("attention.sliding_window_pattern", full_every)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        sliding = [bool(entry) for entry in pattern]
    elif type(pattern) is int:
        sliding = [pattern == 0 or (layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        rule = f"want a number, or a flag for each of the {num_layers} layers"
        raise keys.error("attention.sliding_window_pattern", pattern, rule)
    return tuple(window if here else None for here in sliding)


def _rope_scaling(keys: Fields, freq_factors: tuple[float, ...] | None, *, truncate: bool) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type")
    factor = keys.optional("rope.scaling.factor", keys.optional("rope.scale_linear"))
    original = keys.get("rope.scaling.original_context_length", 0)
    gain = keys.optional("rope.scaling.attn_factor", keys.optional("rope.scaling.yarn_attn_factor", 1.0))
    keys.expect("rope.scaling.yarn_ext_factor", 1.0, "the whole ramp")
    fast = keys.optional("rope.scaling.yarn_beta_fast", 32.0)
    slow = keys.optional("rope.scaling.yarn_beta_slow", 1.0)
    if kind is None and factor not in (None, 1.0):
        kind = "linear"  # the format's default
    if kind in (None, "none"):
        return None if freq_factors is None else RopeScaling(kind="freq_factors", freq_factors=freq_factors)
    if freq_factors is not None or kind not in ("linear", "yarn"):
        raise keys.error("rope.scaling.type", kind, "want none, linear or yarn, and only none beside rope_freqs.weight")
    factor = keys.real("rope.scaling.factor", factor)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_context=keys.count("rope.scaling.original_context_length", original),
        amplitude=(gain or 1.0) * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )
