"""Checkpoints with several layers that predict further ahead, drawn: folders in the layouts that are published."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HF = Path(__file__).parent / "data" / "hf"
MIMO = {
    "token_layernorm": (32,),
    "hidden_layernorm": (32,),
    "input_proj": (32, 64),
    "final_layernorm": (32,),
}


def write_deepseek(path: Path, num_layers: int) -> dict[str, np.ndarray]:
    """The V3 checkpoint with so many layers behind its last, in the place of its one; their tensors."""
    held, config = _copied("deepseek-v3", path)
    front = f"model.layers.{config['num_hidden_layers']}."
    shapes = {name.removeprefix(front): x.shape for name, x in held.items() if name.startswith(front)}
    kept = {name: x for name, x in held.items() if not name.startswith(front)}
    drawn = {}
    for index in range(num_layers):
        layer = _drawn(shapes, index)
        layer |= {
            "embed_tokens.weight": kept["model.embed_tokens.weight"],
            "shared_head.head.weight": kept["lm_head.weight"],
        }
        drawn |= {f"model.layers.{config['num_hidden_layers'] + index}.{name}": x for name, x in layer.items()}
    return _write(path, kept, drawn, config | dict(num_nextn_predict_layers=num_layers))


def write_mimo(path: Path, num_layers: int) -> dict[str, np.ndarray]:
    """The Qwen2 checkpoint as a MiMo, with so many layers behind; their tensors."""
    held, config = _copied("qwen2", path)
    front = "model.layers.1."
    shapes = {name.removeprefix(front): x.shape for name, x in held.items() if name.startswith(front)}
    shapes |= {f"{name}.weight": shape for name, shape in MIMO.items()}
    drawn = {}
    for index in range(num_layers):
        drawn |= {f"model.mtp_layers.{index}.{name}": x for name, x in _drawn(shapes, index).items()}
    more = dict(model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=num_layers)
    return _write(path, held, drawn, config | more | dict(auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"}))


def _copied(name: str, path: Path) -> tuple[dict[str, np.ndarray], dict]:
    shutil.copytree(HF / name, path)
    return load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())


def _drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(40 + seed)
    found = {name: draw.standard_normal(shape) for name, shape in sorted(shapes.items())}
    scaled = {name: 1 + 0.4 * x if "norm" in name else x / x.shape[-1] ** 0.5 for name, x in found.items()}
    return {name: x.astype(np.float32) for name, x in scaled.items()}


def _write(path: Path, kept, drawn, config) -> dict[str, np.ndarray]:
    save_file(kept | drawn, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return drawn
