"""The architectures as Hugging Face checkpoints spell them: `model_type` of config.json, and tensor names."""

import dataclasses

from jattn.loaders import arches, layouts
from jattn.loaders.arches import Arch, Family, Reorder, TensorRow, When, layer_row
from jattn.loaders.hparams import HParams


def _row(ours: str, theirs: str, *shape: str, reorder: Reorder | None = None, when: When | None = None) -> TensorRow:
    return layer_row("model.layers.{i}.", ours, theirs, *shape, reorder=reorder, when=when)


def _norm(ours: str, theirs: str, *, one_plus: bool = False) -> TensorRow:
    return _row(ours, f"{theirs}.weight", "d_model", reorder=layouts.one_plus if one_plus else None)


_EMBED = TensorRow(ours="embed", theirs="model.embed_tokens.weight", shape=("vocab_size", "d_model"))
_LM_HEAD = TensorRow(ours="lm_head", theirs="lm_head.weight", shape=("vocab_size", "d_model"), untied=True)
_ATTENTION = (
    _row("q", "self_attn.q_proj.weight", "q_dim", "d_model"),
    _row("k", "self_attn.k_proj.weight", "kv_dim", "d_model"),
    _row("v", "self_attn.v_proj.weight", "kv_dim", "d_model"),
    _row("o", "self_attn.o_proj.weight", "d_model", "q_dim"),
)
_QKV_BIAS = (
    _row("q_bias", "self_attn.q_proj.bias", "q_dim"),
    _row("k_bias", "self_attn.k_proj.bias", "kv_dim"),
    _row("v_bias", "self_attn.v_proj.bias", "kv_dim"),
)
_QK_NORM = (
    _row("q_norm", "self_attn.q_norm.weight", "head_dim"),
    _row("k_norm", "self_attn.k_norm.weight", "head_dim"),
)
_QK_NORM_ONE_PLUS = (
    _row("q_norm", "self_attn.q_norm.weight", "head_dim", reorder=layouts.one_plus),
    _row("k_norm", "self_attn.k_norm.weight", "head_dim", reorder=layouts.one_plus),
)
_MLP = (
    _row("gate", "mlp.gate_proj.weight", "ffn_dim", "d_model"),
    _row("up", "mlp.up_proj.weight", "ffn_dim", "d_model"),
    _row("down", "mlp.down_proj.weight", "d_model", "ffn_dim"),
)
_NORMS = (_norm("attn_norm", "input_layernorm"), _norm("ffn_norm", "post_attention_layernorm"))
_FOUR_NORMS = (
    _norm("attn_norm", "input_layernorm", one_plus=True),
    _norm("post_attn_norm", "post_attention_layernorm", one_plus=True),
    _norm("ffn_norm", "pre_feedforward_layernorm", one_plus=True),
    _norm("post_ffn_norm", "post_feedforward_layernorm", one_plus=True),
)
_EXPERTS = (
    _row("router", "mlp.router.weight", "num_experts", "d_model"),
    _row("router_bias", "mlp.router.bias", "num_experts"),
    *(
        row
        for ours, columns, entries in (
            ("gate", layouts.even_columns, layouts.even_entries),
            ("up", layouts.odd_columns, layouts.odd_entries),
        )
        for row in (
            _row(ours, "mlp.experts.gate_up_proj", "num_experts", "d_model", "gate_up_dim", reorder=columns),
            _row(f"{ours}_bias", "mlp.experts.gate_up_proj_bias", "num_experts", "gate_up_dim", reorder=entries),
        )
    ),
    _row("down", "mlp.experts.down_proj", "num_experts", "ffn_dim", "d_model", reorder=layouts.swapped),
    _row("down_bias", "mlp.experts.down_proj_bias", "num_experts", "d_model"),
)
_SINKS = (_row("o_bias", "self_attn.o_proj.bias", "d_model"), _row("sinks", "self_attn.sinks", "num_q_heads"))


def _one_query_matrix(hparams: HParams, layer: int) -> bool:
    return hparams.q_lora_rank is None


def _query_latent(hparams: HParams, layer: int) -> bool:
    return hparams.q_lora_rank is not None


def _dense(hparams: HParams, layer: int) -> bool:
    return not hparams.has_experts(layer)


def _shared(hparams: HParams, layer: int) -> bool:
    return hparams.has_experts(layer) and hparams.shared_ffn_dim > 0


def _score_bias(hparams: HParams, layer: int) -> bool:
    return hparams.has_experts(layer) and hparams.score_bias


_LATENT = (
    _row("q", "self_attn.q_proj.weight", "q_dim", "d_model", reorder=layouts.latent_q, when=_one_query_matrix),
    _row("q_a", "self_attn.q_a_proj.weight", "q_lora_rank", "d_model", when=_query_latent),
    _row("q_a_norm", "self_attn.q_a_layernorm.weight", "q_lora_rank", when=_query_latent),
    _row("q_b", "self_attn.q_b_proj.weight", "q_dim", "q_lora_rank", reorder=layouts.latent_q, when=_query_latent),
    _row("kv_a", "self_attn.kv_a_proj_with_mqa.weight", "kv_a_dim", "d_model", reorder=layouts.latent_kv),
    _row("kv_a_norm", "self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
    _row("w_kc", "self_attn.kv_b_proj.weight", "kv_b_dim", "kv_lora_rank", reorder=layouts.latent_to_keys),
    _row("w_vc", "self_attn.kv_b_proj.weight", "kv_b_dim", "kv_lora_rank", reorder=layouts.latent_to_values),
    _row("o", "self_attn.o_proj.weight", "d_model", "out_dim"),
)
_ROUTED = (
    *(dataclasses.replace(row, when=_dense) for row in _MLP),
    _row("router", "mlp.gate.weight", "num_experts", "d_model", when=HParams.has_experts),
    _row("score_bias", "mlp.gate.e_score_correction_bias", "num_experts", when=_score_bias),
    *(
        _row(name, f"mlp.experts.{{e}}.{name}_proj.weight", *shape, when=HParams.has_experts)
        for name, *shape in (
            ("gate", "expert_ffn_dim", "d_model"),
            ("up", "expert_ffn_dim", "d_model"),
            ("down", "d_model", "expert_ffn_dim"),
        )
    ),
    *(
        _row(f"shared_{name}", f"mlp.shared_experts.{name}_proj.weight", *shape, when=_shared)
        for name, *shape in (
            ("gate", "shared_ffn_dim", "d_model"),
            ("up", "shared_ffn_dim", "d_model"),
            ("down", "d_model", "shared_ffn_dim"),
        )
    ),
)
_IGNORED = frozenset({"model.layers.{i}.self_attn.rotary_emb.inv_freq"})  # old Llama checkpoints; recomputed


_NEXT = (
    TensorRow(ours="token_norm", theirs="model.layers.{i}.enorm.weight", shape=("d_model",)),
    TensorRow(ours="hidden_norm", theirs="model.layers.{i}.hnorm.weight", shape=("d_model",)),
    TensorRow(ours="project", theirs="model.layers.{i}.eh_proj.weight", shape=("d_model", "two_d_model")),
    TensorRow(ours="final_norm", theirs="model.layers.{i}.shared_head.norm.weight", shape=("d_model",)),
)
# https://huggingface.co/XiaomiMiMo/MiMo-7B-Base: the hidden state comes first
_NEXT_MIMO = (
    TensorRow(ours="token_norm", theirs="model.layers.{i}.token_layernorm.weight", shape=("d_model",)),
    TensorRow(ours="hidden_norm", theirs="model.layers.{i}.hidden_layernorm.weight", shape=("d_model",)),
    TensorRow(
        ours="project",
        theirs="model.layers.{i}.input_proj.weight",
        shape=("d_model", "two_d_model"),
        reorder=layouts.halves_swapped,
    ),
    TensorRow(ours="final_norm", theirs="model.layers.{i}.final_layernorm.weight", shape=("d_model",)),
)


def _arch(name: str, family: Family, *layer: tuple[TensorRow, ...], one_plus: bool = False, **more) -> Arch:
    rows = tuple(row for part in layer for row in part)
    reorder = layouts.one_plus if one_plus else None
    final_norm = TensorRow(ours="final_norm", theirs="model.norm.weight", shape=("d_model",), reorder=reorder)
    tensors = (_EMBED, _LM_HEAD, *rows, final_norm)
    return Arch(name=name, family=family, tensors=tensors, ignored=_IGNORED, **more)


HF_ARCHES: dict[str, Arch] = {
    "llama": _arch("llama", arches.LLAMA, _NORMS, _ATTENTION, _MLP),
    "mistral": _arch("mistral", arches.MISTRAL, _NORMS, _ATTENTION, _MLP),
    "qwen2": _arch("qwen2", arches.QWEN, _NORMS, _ATTENTION, _QKV_BIAS, _MLP),
    "qwen3": _arch("qwen3", arches.QWEN, _NORMS, _ATTENTION, _QK_NORM, _MLP),
    "mimo": _arch(
        "mimo",
        arches.MIMO,
        _NORMS,
        _ATTENTION,
        _QKV_BIAS,
        _MLP,
        next_tensors=_NEXT_MIMO,
        next_front="model.mtp_layers.{index}.",
    ),
    "gemma2": _arch("gemma2", arches.GEMMA2, _FOUR_NORMS, _ATTENTION, _MLP, one_plus=True),
    "gemma3_text": _arch("gemma3_text", arches.GEMMA3, _FOUR_NORMS, _ATTENTION, _QK_NORM_ONE_PLUS, _MLP, one_plus=True),
    "gpt_oss": _arch("gpt_oss", arches.GPT_OSS, _NORMS, _ATTENTION, _QKV_BIAS, _SINKS, _EXPERTS),
    "deepseek_v2": _arch("deepseek_v2", arches.DEEPSEEK_V2, _NORMS, _LATENT, _ROUTED),
    "deepseek_v3": _arch("deepseek_v3", arches.DEEPSEEK_V3, _NORMS, _LATENT, _ROUTED, next_tensors=_NEXT),
}
