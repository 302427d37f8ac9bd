"""The architectures as Hugging Face checkpoints spell them: `model_type` of config.json, and tensor names."""

from jattn.loaders import arches, layouts
from jattn.loaders.arches import Arch, Family, Reorder, TensorRow, layer_row


def _row(ours: str, theirs: str, *shape: str, reorder: Reorder | None = None) -> TensorRow:
    return layer_row("model.layers.{i}.", ours, theirs, *shape, reorder=reorder)


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
_IGNORED = frozenset({"model.layers.{i}.self_attn.rotary_emb.inv_freq"})  # old Llama checkpoints; recomputed


def _arch(name: str, family: Family, *layer: tuple[TensorRow, ...], one_plus: bool = False) -> Arch:
    rows = tuple(row for part in layer for row in part)
    reorder = layouts.one_plus if one_plus else None
    final_norm = TensorRow(ours="final_norm", theirs="model.norm.weight", shape=("d_model",), reorder=reorder)
    return Arch(name=name, family=family, tensors=(_EMBED, _LM_HEAD, *rows, final_norm), ignored=_IGNORED)


HF_ARCHES: dict[str, Arch] = {
    "llama": _arch("llama", arches.LLAMA, _NORMS, _ATTENTION, _MLP),
    "mistral": _arch("mistral", arches.MISTRAL, _NORMS, _ATTENTION, _MLP),
    "qwen2": _arch("qwen2", arches.QWEN, _NORMS, _ATTENTION, _QKV_BIAS, _MLP),
    "qwen3": _arch("qwen3", arches.QWEN, _NORMS, _ATTENTION, _QK_NORM, _MLP),
    "gemma2": _arch("gemma2", arches.GEMMA2, _FOUR_NORMS, _ATTENTION, _MLP, one_plus=True),
    "gemma3_text": _arch("gemma3_text", arches.GEMMA3, _FOUR_NORMS, _ATTENTION, _QK_NORM_ONE_PLUS, _MLP, one_plus=True),
    "gpt_oss": _arch("gpt_oss", arches.GPT_OSS, _NORMS, _ATTENTION, _QKV_BIAS, _SINKS, _EXPERTS),
}
