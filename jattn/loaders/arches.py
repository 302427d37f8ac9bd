"""Architectures as data: what a family is, and the tensors a file of it must hold, with shapes and our names."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jattn.loaders import layouts
from jattn.loaders.hparams import HParams

Reorder = Callable[[np.ndarray, HParams], np.ndarray]
When = Callable[[HParams, int], bool]  # of a layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor: ours and the file's name ({i} is the layer), the file's shape in names of `HParams` fields.

    Where the file's name has an {e}, the file keeps one tensor an expert, and ours is all of them, stacked.
    """

    ours: str
    theirs: str
    shape: tuple[str, ...]  # [out, in]
    reorder: Reorder | None = None  # makes ours of the file's array
    untied: bool = False  # present only where the output head is not the embedding
    when: When | None = None  # layers that have it; None: all

    @property
    def per_layer(self) -> bool:
        """One in each layer, not one in the file."""
        return "{i}" in self.theirs

    def names(self, hparams: HParams, layer: int) -> tuple[str, ...]:
        """The file's tensors of one layer that make ours; none where the layer has no such part."""
        if self.when is not None and not self.when(hparams, layer):
            return ()
        count = hparams.num_experts if "{e}" in self.theirs else 1
        return tuple(self.theirs.format(i=layer, e=expert) for expert in range(count))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What all models of a family share and no tensor shows."""

    name: str
    activation: str = "silu"
    scaled_embedding: bool = False  # times sqrt(d_model)
    wide_norms: bool = False
    full_every: int | None = (
        None  # with a window: layers n - 1, 2n - 1, ... see all keys; 0: none does; None: no window
    )
    window_by_flag: bool = False  # `use_sliding_window`, from layer `max_window_layers` on
    rope_theta: float = 10000.0  # where the file has none
    window_rope_theta: float | None = None
    final_soft_cap: bool = False
    attn_soft_cap: bool = False
    sm_scale_of_d_model: int | None = None  # the layer count at which queries are scaled by d_model / heads
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    yarn_truncate: bool = True
    tied_embeddings: bool = False  # where a Hugging Face config does not say
    latent: bool = False  # latent attention, with the widths in the file
    topk_method: str = "greedy"  # with latent attention: how experts are chosen where the file does not say
    scoring: str = "softmax"
    chained_next: bool = True  # of several layers that predict further ahead, each reads what the one before made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """An architecture as one file format spells it: the name in the file's header, and its tensors."""

    name: str
    family: Family
    tensors: tuple[TensorRow, ...]  # in the order in which they are loaded
    ignored: frozenset[str] = frozenset()  # tensors without weights of their own; {i} is the layer
    next_tensors: tuple[TensorRow, ...] = ()  # what a layer behind the last has besides a layer's own
    next_front: str = "model.layers.{behind}."  # of the names of such a layer; {index} counts them alone

    def has(self, ours: str) -> bool:
        """Whether layers hold the tensor that we call `ours`."""
        return any(row.ours == f"layers.{{i}}.{ours}" for row in self.tensors)

    def options(self, d_model: int) -> dict:
        """The fields of `HParams` that follow from the family and from which tensors there are."""
        family = self.family
        return dict(
            qkv_bias=self.has("q_bias"),
            out_bias=self.has("o_bias"),
            qk_norm=self.has("q_norm"),
            sinks=self.has("sinks"),
            post_norms=self.has("post_attn_norm"),
            wide_norms=family.wide_norms,
            embed_scale=d_model**0.5 if family.scaled_embedding else None,
            activation=family.activation,
        )


def layer_row(
    prefix: str, ours: str, theirs: str, *shape: str, reorder: Reorder | None = None, when: When | None = None
) -> TensorRow:
    """A tensor of a layer; `prefix` is what the file's names begin with."""
    return TensorRow(ours=f"layers.{{i}}.{ours}", theirs=prefix + theirs, shape=shape, reorder=reorder, when=when)


LLAMA = Family(name="llama")
MISTRAL = Family(name="mistral", full_every=0)
QWEN = Family(name="qwen", window_by_flag=True)
GEMMA2 = Family(
    name="gemma2",
    activation="gelu_tanh",
    scaled_embedding=True,
    wide_norms=True,
    full_every=2,
    final_soft_cap=True,
    attn_soft_cap=True,
    sm_scale_of_d_model=46,  # 27B, https://github.com/google/gemma_pytorch: query_pre_attn_scalar
    tied_embeddings=True,
)
GEMMA3 = Family(
    name="gemma3",
    activation="gelu_tanh",
    scaled_embedding=True,
    wide_norms=True,
    full_every=6,
    rope_theta=1e6,
    window_rope_theta=10000.0,
    sm_scale_of_d_model=62,  # 27B
    tied_embeddings=True,
)
GPT_OSS = Family(
    name="gpt-oss",
    wide_norms=True,
    full_every=2,
    rope_theta=150000.0,
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
    yarn_truncate=False,  # https://github.com/openai/gpt-oss: the ramp's ends are not rounded
)
MIMO = Family(name="mimo", window_by_flag=True, chained_next=False)
DEEPSEEK_V2 = Family(name="deepseek-v2", latent=True)
DEEPSEEK_V3 = Family(name="deepseek-v3", latent=True, topk_method="noaux_tc", scoring="sigmoid")


def _row(ours: str, theirs: str, *shape: str, reorder: Reorder | None = None) -> TensorRow:
    return layer_row("blk.{i}.", ours, theirs, *shape, reorder=reorder)


_EMBED = TensorRow(ours="embed", theirs="token_embd.weight", shape=("vocab_size", "d_model"))
_FINAL_NORM = TensorRow(ours="final_norm", theirs="output_norm.weight", shape=("d_model",))
_LM_HEAD = TensorRow(ours="lm_head", theirs="output.weight", shape=("vocab_size", "d_model"), untied=True)
_ATTN_NORM = (_row("attn_norm", "attn_norm.weight", "d_model"),)
_ATTENTION = (
    _row("q", "attn_q.weight", "q_dim", "d_model"),
    _row("k", "attn_k.weight", "kv_dim", "d_model"),
    _row("v", "attn_v.weight", "kv_dim", "d_model"),
    _row("o", "attn_output.weight", "d_model", "q_dim"),
)
_ADJACENT = (  # only Llama's converter permutes
    _row("q", "attn_q.weight", "q_dim", "d_model", reorder=layouts.adjacent_q),
    _row("k", "attn_k.weight", "kv_dim", "d_model", reorder=layouts.adjacent_k),
    *_ATTENTION[2:],
)
_QKV_BIAS = (
    _row("q_bias", "attn_q.bias", "q_dim"),
    _row("k_bias", "attn_k.bias", "kv_dim"),
    _row("v_bias", "attn_v.bias", "kv_dim"),
)
_QK_NORM = (
    _row("q_norm", "attn_q_norm.weight", "head_dim"),
    _row("k_norm", "attn_k_norm.weight", "head_dim"),
)
_MLP = (
    _row("ffn_norm", "ffn_norm.weight", "d_model"),
    _row("gate", "ffn_gate.weight", "ffn_dim", "d_model"),
    _row("up", "ffn_up.weight", "ffn_dim", "d_model"),
    _row("down", "ffn_down.weight", "d_model", "ffn_dim"),
)
_POST_NORMS = (
    _row("post_attn_norm", "post_attention_norm.weight", "d_model"),
    _row("post_ffn_norm", "post_ffw_norm.weight", "d_model"),
)
_EXPERTS = (
    _row("ffn_norm", "post_attention_norm.weight", "d_model"),  # the norm before the MLP, under its old name
    _row("router", "ffn_gate_inp.weight", "num_experts", "d_model"),
    _row("router_bias", "ffn_gate_inp.bias", "num_experts"),
    _row("gate", "ffn_gate_exps.weight", "num_experts", "ffn_dim", "d_model"),
    _row("gate_bias", "ffn_gate_exps.bias", "num_experts", "ffn_dim"),
    _row("up", "ffn_up_exps.weight", "num_experts", "ffn_dim", "d_model"),
    _row("up_bias", "ffn_up_exps.bias", "num_experts", "ffn_dim"),
    _row("down", "ffn_down_exps.weight", "num_experts", "d_model", "ffn_dim"),
    _row("down_bias", "ffn_down_exps.bias", "num_experts", "d_model"),
)
_SINKS = (_row("o_bias", "attn_output.bias", "d_model"), _row("sinks", "attn_sinks.weight", "num_q_heads"))


def _arch(name: str, family: Family, *layer: tuple[TensorRow, ...]) -> Arch:
    rows = tuple(row for part in layer for row in part)
    tensors = (_EMBED, _LM_HEAD, *rows, _FINAL_NORM)
    return Arch(name=name, family=family, tensors=tensors, ignored=frozenset({"rope_freqs.weight"}))


ARCHES: dict[str, Arch] = {
    "llama": _arch("llama", MISTRAL, _ATTN_NORM, _ADJACENT, _MLP),  # Mistral's files say llama, too
    "qwen2": _arch("qwen2", QWEN, _ATTN_NORM, _ATTENTION, _QKV_BIAS, _MLP),
    "qwen3": _arch("qwen3", QWEN, _ATTN_NORM, _ATTENTION, _QK_NORM, _MLP),
    "gemma2": _arch("gemma2", GEMMA2, _ATTN_NORM, _ATTENTION, _MLP, _POST_NORMS),
    "gemma3": _arch("gemma3", GEMMA3, _ATTN_NORM, _ATTENTION, _QK_NORM, _MLP, _POST_NORMS),
    "gpt-oss": _arch("gpt-oss", GPT_OSS, _ATTN_NORM, _ATTENTION, _QKV_BIAS, _SINKS, _EXPERTS),
}
"""What a GGUF file may hold. Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py"""
