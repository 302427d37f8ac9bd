"""Hyperparameters from a Hugging Face config.json. Each key is read, known to change nothing, or refused by name.

Source of the keys and their defaults: https://huggingface.co/docs/transformers/main_classes/configuration and the
configuration page of each model there. Both spellings of rope are read: `rope_theta` and `rope_scaling`, as files had
until 2025, and `rope_parameters`.
"""

import math
from collections.abc import Mapping
from typing import Any

from jattn.loaders.arches import Arch, Family
from jattn.loaders.errors import ModelFileError
from jattn.loaders.fields import Fields
from jattn.loaders.hf_arches import HF_ARCHES
from jattn.loaders.hf_deepseek import SILENT, latent_attention, latent_scale, routing
from jattn.loaders.hparams import HParams, RopeScaling

_SILENT = frozenset(
    "architectures model_type dtype torch_dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id "
    "initializer_range attention_dropout pretraining_tp output_router_logits router_aux_loss_coef "
    "initial_context_length cache_implementation _name_or_path tokenizer_class id2label label2id problem_type "
    "chunk_size_feed_forward is_encoder_decoder return_dict output_hidden_states output_attentions "
    "unsloth_version unsloth_fixed finetuning_task task_specific_params _sliding_window_pattern auto_map".split()
)  # numbers of a forward pass do not depend on these
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # ours -> theirs
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config(config: Mapping[str, Any]) -> tuple[Arch, HParams]:
    """The architecture's row and the hyperparameters of a decoded config.json.

    Raises: ModelFileError naming the key that is missing, of the wrong kind, or beyond what decoders here do.
    """
    kind = config.get("model_type")
    arch = HF_ARCHES.get(kind) if isinstance(kind, str) else None
    if arch is None:
        raise ModelFileError(f"model_type is {kind!r:.60}: want one of {', '.join(sorted(HF_ARCHES))}")
    fields, family = Fields(config), arch.family
    d_model, num_q_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    heads = latent_attention(fields, family) if family.latent else _heads(fields, d_model, num_q_heads)
    num_layers, max_context = fields.count("num_hidden_layers"), fields.count("max_position_embeddings")
    for key in ("hidden_act", "hidden_activation"):
        fields.expect(key, _ACTIVATIONS[family.activation], f"the activation of {arch.name}")
    fields.expect("attention_bias", arch.has("q_bias"), f"the projections of {arch.name}")
    fields.expect("partial_rotary_factor", 1.0, "all features of a head rotated")
    theta, window_theta, scaling = _rope(fields, family, max_context)
    hparams = HParams(
        num_layers=num_layers,
        d_model=d_model,
        num_q_heads=num_q_heads,
        ffn_dim=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        max_context=max_context,
        rms_eps=fields.real("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=fields.flag("tie_word_embeddings", family.tied_embeddings),
        bos_id=first_id(config.get("bos_token_id")),
        eos_id=first_id(config.get("eos_token_id")),
        windows=_windows(fields, family, num_layers),
        window_rope_theta=window_theta,
        sm_scale=_sm_scale(fields, family, heads["head_dim"], scaling),
        attn_soft_cap=fields.optional("attn_logit_softcapping") if family.attn_soft_cap else None,
        final_soft_cap=fields.optional("final_logit_softcapping") if family.final_soft_cap else None,
        scale_block=_scale_block(fields),
        num_next_layers=fields.count("num_nextn_predict_layers", 0, least=0) if _may_have_next(arch) else 0,
        **heads,
        **(routing(fields, family) if family.latent else _experts(fields, family) if arch.has("router") else {}),
        **arch.options(d_model),
    )
    fields.refuse_rest(_SILENT | SILENT if family.latent else _SILENT, arch.name)
    return arch, hparams


def _may_have_next(arch: Arch) -> bool:
    return arch.family.latent or bool(arch.next_tensors)


def _heads(fields: Fields, d_model: int, num_q_heads: int) -> dict[str, int]:
    num_kv_heads = fields.count("num_key_value_heads", num_q_heads)
    if num_q_heads % num_kv_heads:
        raise ModelFileError(f"{num_q_heads} query heads over {num_kv_heads} kv heads: want a multiple")
    return dict(num_kv_heads=num_kv_heads, head_dim=fields.count("head_dim", d_model // num_q_heads))


def _sm_scale(fields: Fields, family: Family, head_dim: int, scaling: RopeScaling | None) -> float | None:
    if family.latent:
        return latent_scale(fields, head_dim, scaling)
    return fields.real("query_pre_attn_scalar") ** -0.5 if family.sm_scale_of_d_model else None


def _experts(fields: Fields, family: Family) -> dict[str, Any]:
    return dict(
        num_experts=fields.count("num_local_experts"),
        experts_per_token=_experts_per_token(fields),
        swiglu_limit=fields.real("swiglu_limit", family.swiglu_limit),
        swiglu_alpha=fields.real("swiglu_alpha", family.swiglu_alpha),
    )


def _scale_block(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns of an 8-bit weight that share a scale, where the weights are stored so."""
    given = fields.get("quantization_config", {})
    if not given:
        return None
    quantised = Fields(given if isinstance(given, Mapping) else {}, label="quantization_config.")
    if quantised.get("quant_method") != "fp8" or quantised.get("fmt", "e4m3") != "e4m3":
        raise fields.error("quantization_config", given, "want quant_method fp8 with fmt e4m3, or a plain checkpoint")
    block = quantised.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise quantised.error("weight_block_size", block, "want two sizes, as [128, 128]")
    return block[0], block[1]


def first_id(value: Any) -> int | None:
    """A token id, or the first of a list of them."""
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int else None


def _experts_per_token(fields: Fields) -> int:
    count = fields.count("num_experts_per_tok")
    fields.expect("experts_per_token", count, "as num_experts_per_tok says")
    return count


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Keys that each layer sees: by `layer_types` where the file has them, else by the family's rule."""
    window, sliding = None, [False] * num_layers
    if family.window_by_flag:
        first, _ = fields.count("max_window_layers", num_layers, least=0), fields.get("sliding_window")
        window = fields.count("sliding_window") if fields.flag("use_sliding_window", False) else None
        sliding = [layer >= first for layer in range(num_layers)]
    elif family.full_every is not None:
        must = family.full_every > 0 or fields.get("sliding_window") is not None
        window = fields.count("sliding_window") if must else None
        every = fields.count("sliding_window_pattern", family.full_every, least=0)
        sliding = [every == 0 or (layer + 1) % every != 0 for layer in range(num_layers)]
    if window is None:
        sliding = [False] * num_layers
    types = fields.get("layer_types")
    if types is not None:
        listed = [kind == _SLIDING for kind in types] if isinstance(types, list) else []
        if len(listed) != num_layers or not {_FULL, _SLIDING}.issuperset(types):
            raise fields.error("layer_types", types, f"want {_FULL!r} or {_SLIDING!r} for each of {num_layers} layers")
        chosen = family.window_by_flag or family.full_every
        if listed != sliding and not (chosen and window is not None):
            raise fields.error("layer_types", types, f"want what sliding_window={window} implies in this family")
        sliding = listed
    return tuple(window if here else None for here in sliding) if any(sliding) else ()


def _rope(fields: Fields, family: Family, max_context: int) -> tuple[float, float | None, RopeScaling | None]:
    """Theta, theta of window layers where they have their own, and scaling, from either spelling."""
    own = family.window_rope_theta is not None
    given = fields.get("rope_parameters")
    if given is None:
        full = _mapping(fields, "rope_scaling", fields.get("rope_scaling", {}))
        full = {"rope_theta": fields.real("rope_theta", family.rope_theta), **full}
        local = {"rope_theta": fields.real("rope_local_base_freq", family.window_rope_theta)} if own else {}
    else:
        full = _mapping(fields, "rope_parameters", given)
        full, local = (full.get(_FULL), full.get(_SLIDING)) if own else (full, {})
        full, local = (_mapping(fields, "rope_parameters", part) for part in (full, local))
    theta, scaling = _one_rope(full, family, max_context)
    fields.expect("rope_theta", theta, "as rope_parameters says")
    if not own:
        return theta, None, scaling
    window_theta, window_scaling = _one_rope({"rope_theta": family.window_rope_theta, **local}, family, max_context)
    if window_scaling is not None:
        raise fields.error(f"rope_parameters.{_SLIDING}", dict(local), "only the rope of full layers may be scaled")
    return theta, window_theta, scaling


def _mapping(fields: Fields, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise fields.error(key, value, "want an object with rope_type and what that type needs")
    return value


def _one_rope(values: Mapping[str, Any], family: Family, max_context: int) -> tuple[float, RopeScaling | None]:
    fields = Fields(values, label="rope ")
    theta = fields.real("rope_theta", family.rope_theta)
    fields.expect("partial_rotary_factor", 1.0, "all features of a head rotated")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise fields.error("type", kind, f"want one of {', '.join(_SCALINGS)}")
    scaling = _SCALINGS[kind](fields, max_context)
    fields.refuse_rest(("type", "original_max_position_embeddings"), f"rope {kind}")
    return theta, scaling


def _linear(fields: Fields, max_context: int) -> RopeScaling:
    return RopeScaling(kind="linear", factor=fields.real("factor"))


def _llama3(fields: Fields, max_context: int) -> RopeScaling:
    low, high = fields.real("low_freq_factor"), fields.real("high_freq_factor")
    if low >= high:
        raise fields.error("low_freq_factor", low, f"want less than high_freq_factor={high}")
    return RopeScaling(
        kind="llama3",
        factor=fields.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_context=fields.count("original_max_position_embeddings", max_context),
    )


def _yarn(fields: Fields, max_context: int) -> RopeScaling:
    original = fields.count("original_max_position_embeddings", max_context)
    factor = fields.real("factor", max_context / original)
    scale, all_dim = fields.optional("mscale"), fields.optional("mscale_all_dim")
    gain = _yarn_gain(factor, scale) / _yarn_gain(factor, all_dim) if scale and all_dim else _yarn_gain(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_context=original,
        amplitude=fields.real("attention_factor", gain),
        beta_fast=fields.optional("beta_fast", 32.0),
        beta_slow=fields.optional("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def _yarn_gain(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCALINGS = {"default": lambda fields, max_context: None, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
