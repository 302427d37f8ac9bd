"""Architectures as data: which tensors a GGUF file of each must hold, their shapes, and our names for them."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor: ours and the file's name ({i} is the layer), its shape in names of `HParams` fields."""

    ours: str
    theirs: str
    shape: tuple[str, ...]  # [out, in]
    rope_heads: str | None = None  # the head count, where the file keeps rope's feature pairs adjacent
    untied: bool = False  # present only where the output head is not the embedding

    @property
    def per_layer(self) -> bool:
        """One in each layer, not one in the file."""
        return "{i}" in self.theirs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """An architecture that the loader knows: its name in `general.architecture` and its tensors."""

    name: str
    tensors: tuple[TensorRow, ...]  # in the order in which they are loaded
    ignored: frozenset[str]  # tensors that carry no weights: rope tables, read as hyperparameters or recomputed


def _layer(ours: str, theirs: str, *shape: str, rope_heads: str | None = None) -> TensorRow:
    return TensorRow(
        ours=f"layers.{{i}}.{ours}", theirs=f"blk.{{i}}.{theirs}.weight", shape=shape, rope_heads=rope_heads
    )


_EMBED = TensorRow(ours="embed", theirs="token_embd.weight", shape=("vocab_size", "d_model"))
_FINAL_NORM = TensorRow(ours="final_norm", theirs="output_norm.weight", shape=("d_model",))
_LM_HEAD = TensorRow(ours="lm_head", theirs="output.weight", shape=("vocab_size", "d_model"), untied=True)

ARCHES: dict[str, Arch] = {
    "llama": Arch(
        name="llama",
        tensors=(
            _EMBED,
            _LM_HEAD,
            _layer("attn_norm", "attn_norm", "d_model"),
            _layer("q", "attn_q", "q_dim", "d_model", rope_heads="num_q_heads"),
            _layer("k", "attn_k", "kv_dim", "d_model", rope_heads="num_kv_heads"),
            _layer("v", "attn_v", "kv_dim", "d_model"),
            _layer("o", "attn_output", "d_model", "q_dim"),
            _layer("ffn_norm", "ffn_norm", "d_model"),
            _layer("gate", "ffn_gate", "ffn_dim", "d_model"),
            _layer("up", "ffn_up", "ffn_dim", "d_model"),
            _layer("down", "ffn_down", "d_model", "ffn_dim"),
            _FINAL_NORM,
        ),
        ignored=frozenset({"rope_freqs.weight"}),
    ),
}
