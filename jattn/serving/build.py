"""From what a file says to a model with its kernels chosen."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jattn.backends import BackendPolicy
from jattn.loaders.draft_heads import HeadFile
from jattn.loaders.hparams import HParams
from jattn.loaders.models import locate
from jattn.loaders.open import open_model
from jattn.loaders.shape import ModelShape, read_shape
from jattn.loaders.weights import ModelFile, OnTensor, load_arrays, load_next_arrays
from jattn.models.as_mla import as_mla_arrays, as_mla_config
from jattn.models.config import ExpertsConfig, MLAConfig, ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.draft_head import DraftHead
from jattn.models.load import build_body, build_decoder, build_next
from jattn.models.next_token import NextTokens
from jattn.models.rope import FactorScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling
from jattn.platforms import Platform, detect
from jattn.resolve import resolve
from jattn.spec import AttnSpec

Source = ModelFile | ModelShape


def open_source(model: str, random_weights: str | None = None) -> Source:
    """A model file; or with `random_weights` only the shape of one. Raises ModelFileError, one sentence."""
    return open_model(locate(model)) if random_weights is None else read_shape(random_weights)


def build_model(
    source: Source,
    *,
    platform: Platform,
    rules: BackendPolicy,
    page_size: int,
    topk: int | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    as_mla: bool = False,
    prefer: tuple[str, ...] = (),
    seed: int = 0,
    on_tensor: OnTensor | None = None,
) -> Decoder:
    """The model, on the device, each layer with the kernels that `rules` choose for it.

    Args: dtype: of the weights; None is float32 on a CPU and bfloat16 elsewhere. as_mla: a GQA model becomes its equal
      MLA model. prefer: kernel sets to try first. seed: of random weights, where `source` is a shape.
    Raises: ValueError, one sentence, for tensors, options or sizes that do not fit.
    """
    held = config_of(source.hparams)
    config = as_mla_config(held) if as_mla else held
    specs = config.attn_specs(kv_dtype)
    choices = {
        spec: resolve(
            spec, rules.name, platform, page_size=page_size, topk=topk, prefer=prefer, interpret=detect().is_cpu
        )
        for spec in dict.fromkeys(specs)
    }
    layers = (config, specs, tuple(choices[spec] for spec in specs))
    dtype = dtype or ("float32" if platform.is_cpu else "bfloat16")
    kwargs: dict[str, Any] = dict(dtype=jnp.dtype(dtype), weight_first=platform.is_cpu)
    if isinstance(source, ModelShape):
        return Decoder(*layers, rngs=nnx.Rngs(seed), **kwargs)
    arrays = load_arrays(source, on_tensor=on_tensor)
    return build_decoder(*layers, as_mla_arrays(held, arrays) if as_mla else arrays, **kwargs)


def build_head(
    head: HeadFile,
    target: Decoder,
    *,
    platform: Platform,
    rules: BackendPolicy,
    page_size: int,
    topk: int | None = None,
    prefer: tuple[str, ...] = (),
) -> DraftHead:
    """A draft head of `target`, in its dtype, each layer with the kernels that `rules` choose.

    Raises: ValueError, one sentence, where the head belongs to a target of another width, depth or vocabulary.
    """
    ours, hparams = target.config, head.hparams
    for what, theirs, own in (
        ("token embeddings", hparams.vocab_size, ours.vocab_size),
        ("hidden features", head.target_dim, ours.d_model),
    ):
        if theirs != own:
            raise ValueError(f"{head.path} is a head for {theirs} {what}, and the model has {own}: want its own head")
    layers = ours.num_layers
    taps = head.taps or ((2, layers // 2, layers - 3) if head.num_taps == 3 and layers >= 6 else None)
    if head.num_taps and (taps is None or len(taps) != head.num_taps or max(taps) > layers):
        raise ValueError(
            f"{head.path} reads {head.num_taps} layers, {head.taps}, of a model of {layers}: want its own head, or "
            "eagle_aux_hidden_state_layer_ids in its config.json"
        )
    config = config_of(hparams)
    spec = config.attn_spec()
    assert isinstance(spec, AttnSpec)
    choice = resolve(spec, rules.name, platform, page_size=page_size, topk=topk, prefer=prefer)
    dtype = target.embed.dtype
    body = build_body(
        head.kind,
        config,
        spec,
        choice,
        head.arrays(),
        feature_dim=head.num_taps * head.target_dim,
        bias=head.has_bias,
        dtype=dtype,
        weight_first=platform.is_cpu,
    )
    rows, ids = head.own("lm_head"), head.token_ids()
    own_width = hparams.d_model != ours.d_model  # then the target's embedding does not fit
    embed = head.own("embed_tokens") if own_width else None
    if own_width and (rows is None or embed is None):
        raise ValueError(
            f"{head.path} is {hparams.d_model} wide and the model {ours.d_model}: want lm_head and embed_tokens in it"
        )
    return DraftHead(
        body,
        target,
        rows=None if rows is None else jnp.asarray(rows, dtype),
        token_ids=None if ids is None else jnp.asarray(ids, jnp.int32),
        embed=None if embed is None else jnp.asarray(embed, dtype),
        taps=taps if head.num_taps and taps else (),
    )


def build_next_head(source: ModelFile, target: Decoder, *, num_layers: int | None = None) -> DraftHead:
    """The layer behind the model's last that predicts a token further ahead (MTP, NextN), as its draft head.

    Args: num_layers: so many of them, each for a step of its own; None is the first, for every step.
    Raises: ModelFileError where the model's file does not have them.
    """
    attn = target.layers[-1].attn
    kwargs: dict[str, Any] = dict(dtype=target.embed.dtype, weight_first=target.weight_first)
    layers = [
        build_next(target.config, attn.spec, attn.choice, load_next_arrays(source, index), index=index, **kwargs)
        for index in range(num_layers or 1)
    ]
    if num_layers is None:
        return DraftHead(layers[0], target)
    return DraftHead(NextTokens(layers, chained=source.table.family.chained_next), target)


_SCALINGS: dict[str, Callable[[dict], Scaling]] = {
    "linear": lambda given: LinearScaling(**given),
    "freq_factors": lambda given: FactorScaling(factors=given["freq_factors"]),
    "llama3": lambda given: Llama3Scaling(**given),
    "yarn": lambda given: YarnScaling(**given),
}
_EXPERTS = "shared_ffn_dim scoring score_bias num_groups top_groups group_score norm_topk routed_scale".split()


def config_of(hparams: HParams) -> ModelConfig:
    """Model hyperparameters from a file's: fields of the same name are the same thing."""
    scaling, given = None, {}
    if hparams.rope_scaling is not None:
        given = {name: value for name, value in dataclasses.asdict(hparams.rope_scaling).items() if value is not None}
        scaling = _SCALINGS[given.pop("kind")](given)
    own = {field.name for field in dataclasses.fields(ModelConfig)} - {"rope_scaling", "experts", "mla"}
    return ModelConfig(
        rope_scaling=scaling,
        experts=_experts_of(hparams) if hparams.num_experts else None,
        mla=_mla_of(hparams),
        **{name: getattr(hparams, name) for name in own},
    )


def _experts_of(hparams: HParams) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=hparams.num_experts,
        top_k=hparams.experts_per_token,
        ffn_dim=hparams.expert_ffn_dim,
        first_layer=hparams.first_expert_layer,
        every=hparams.expert_every,
        bias=hparams.swiglu_limit is not None,  # gpt-oss
        limit=hparams.swiglu_limit,
        alpha=hparams.swiglu_alpha or 1.0,
        **{name: getattr(hparams, name) for name in _EXPERTS},
    )


def _mla_of(hparams: HParams) -> MLAConfig | None:
    if hparams.kv_lora_rank is None or hparams.v_head_dim is None:
        return None
    return MLAConfig(
        kv_lora_rank=hparams.kv_lora_rank,
        v_head_dim=hparams.v_head_dim,
        **{name: getattr(hparams, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank")},
    )
