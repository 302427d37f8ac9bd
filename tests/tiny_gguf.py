"""Tiny GGUF files, written with the `gguf` package's own writer."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jattn.loaders.byte_level import BYTE_OF

Q = gguf.GGMLQuantizationType
Packed = tuple[np.ndarray, gguf.GGMLQuantizationType | None]
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclasses.dataclass(kw_only=True)
class Parts:
    """What goes into a file: tests change it before `write`."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, Packed]

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in self.metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, (array, kind) in self.tensors.items():
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def pack(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> Packed:
    """Quantise, or make up valid packed bytes where the package cannot quantise."""
    try:
        return gguf.quantize(array, kind), kind
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // block * size)
        # bytes below 60 keep every half-precision scale finite
        return np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8), kind


def tiny_vocabulary() -> dict[str, Any]:
    """Every byte, a few merges, two control tokens and a user-defined one."""
    tokens = list(BYTE_OF)
    merges = ["1 2", "12 3", "Ġ a", "Ã ©", "ð Ł", "ðŁ ĺ"]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|im_start|>", "<|im_end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT,
    }


def llama_parts(
    *, dim: int = 32, kind: gguf.GGMLQuantizationType = Q.Q8_0, layers: int = 2, tied: bool = True
) -> Parts:
    """A llama of 4 query heads over 2 kv heads; every matrix is packed as `kind`."""
    vocabulary = tiny_vocabulary()
    vocab, heads, head_dim = len(vocabulary["tokenizer.ggml.tokens"]), 4, dim // 4
    draw = np.random.default_rng(7)
    shapes = {"token_embd": (vocab, dim), "output_norm": (dim,)} | ({} if tied else {"output": (vocab, dim)})
    for i in range(layers):
        block = {"attn_norm": (dim,), "ffn_norm": (dim,), "attn_q": (dim, dim), "attn_output": (dim, dim)}
        block |= {"attn_k": (dim // 2, dim), "attn_v": (dim // 2, dim)}
        block |= {"ffn_gate": (2 * dim, dim), "ffn_up": (2 * dim, dim), "ffn_down": (dim, 2 * dim)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    tensors: dict[str, Packed] = {}
    for name, shape in shapes.items():
        array = draw.standard_normal(shape).astype(np.float32)
        tensors[f"{name}.weight"] = (array, Q.F32) if len(shape) == 1 else pack(array, kind)
    sizes = {
        "block_count": layers,
        "context_length": 64,
        "embedding_length": dim,
        "feed_forward_length": 2 * dim,
        "attention.head_count": heads,
        "attention.head_count_kv": heads // 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 10000.0,
    }
    return Parts(arch="llama", metadata={f"llama.{k}": v for k, v in sizes.items()} | vocabulary, tensors=tensors)
