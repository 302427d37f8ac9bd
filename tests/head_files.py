"""Draft heads as files: folders that a loader reads, with random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYER = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (48, 32),
    "mlp.up_proj": (48, 32),
    "mlp.down_proj": (32, 48),
}
IDS = np.array([7, 3, 12, 5, 40, 41, 42, 9])


def config_of(vocab_size: int, **more) -> dict[str, Any]:
    """config.json of a head for a model of width 32."""
    sizes = dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, num_hidden_layers=1
    )
    rest = dict(vocab_size=vocab_size, max_position_embeddings=64, rms_norm_eps=1e-5, model_type="llama")
    return {"architectures": ["LlamaForCausalLMEagle3"], **sizes, **rest, **more}


def tensors_of(kind: str, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors of an "eagle" or an "eagle3" head, as their authors name them."""
    draw = np.random.default_rng(11)
    wide = {name: (out, 64 if kind == "eagle3" and name[10:] in ("q_proj", "k_proj", "v_proj") else width)
            for name, (out, width) in LAYER.items()}  # fmt: skip
    front = "midlayer" if kind == "eagle3" else "layers.0"
    shapes = {f"{front}.{name}": shape for name, shape in wide.items()}
    shapes |= {f"{front}.post_attention_layernorm": (32,), "embed_tokens": (vocab_size, 32)}
    if kind == "eagle3":
        shapes |= {f"{front}.hidden_norm": (32,), f"{front}.input_layernorm": (32,), "norm": (32,), "fc": (32, 96)}
        shapes |= {"lm_head": (len(IDS), 32)}
    else:
        shapes |= {"fc": (32, 64)}
    found = {f"{name}.weight": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if kind == "eagle":
        return found | {"fc.bias": draw.standard_normal(32).astype(np.float32)}
    taken = np.zeros(vocab_size, bool)
    taken[IDS] = True
    return found | {"d2t": IDS - np.arange(len(IDS)), "t2d": taken}


def write(path: Path, kind: str, vocab_size: int, *, drop: tuple[str, ...] = (), **more) -> Path:
    """A folder with such a head. more: of config.json. drop: tensors that it lacks."""
    path.mkdir()
    if kind == "eagle3":
        more = {"draft_vocab_size": len(IDS), "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}, **more}
    (path / "config.json").write_text(json.dumps(config_of(vocab_size, **more)))
    save_file({n: x for n, x in tensors_of(kind, vocab_size).items() if n not in drop}, path / "model.safetensors")
    return path
