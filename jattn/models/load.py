"""Fill a decoder with named arrays, one at a time, so that loading holds the weights once."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.models.config import ModelConfig
from jattn.models.decoder import Decoder
from jattn.models.draft_head import Eagle, Eagle3
from jattn.models.next_token import NextToken
from jattn.resolve import Choice
from jattn.spec import AttnSpec, MLASpec

# Our parameter's path in a layer -> the loader's tensors that it stacks, output after output.
_LAYER = {
    ("attn_norm", "weight"): ("attn_norm",),
    ("attn", "qkv", "weight"): ("q", "k", "v"),
    ("attn", "qkv", "bias"): ("q_bias", "k_bias", "v_bias"),
    ("attn", "qkv_a", "weight"): ("q_a", "kv_a"),
    ("attn", "qkv_a", "bias"): ("q_a_bias", "kv_a_bias"),
    ("attn", "q_kv_a", "weight"): ("q", "kv_a"),
    ("attn", "q_kv_a", "bias"): ("q_bias", "kv_a_bias"),
    ("attn", "q_a_norm", "weight"): ("q_a_norm",),
    ("attn", "q_b", "weight"): ("q_b",),
    ("attn", "kv_a_norm", "weight"): ("kv_a_norm",),
    ("attn", "w_kc"): ("w_kc",),
    ("attn", "w_vc"): ("w_vc",),
    ("attn", "q_norm", "weight"): ("q_norm",),
    ("attn", "k_norm", "weight"): ("k_norm",),
    ("attn", "sinks"): ("sinks",),
    ("attn", "out", "weight"): ("o",),
    ("attn", "out", "bias"): ("o_bias",),
    ("post_attn_norm", "weight"): ("post_attn_norm",),
    ("mlp_norm", "weight"): ("ffn_norm",),
    ("mlp", "gate_up", "weight"): ("gate", "up"),
    ("mlp", "down", "weight"): ("down",),
    ("mlp", "router", "weight"): ("router",),
    ("mlp", "router", "bias"): ("router_bias",),
    ("mlp", "score_bias"): ("score_bias",),
    ("mlp", "shared", "gate_up", "weight"): ("shared_gate", "shared_up"),
    ("mlp", "shared", "down", "weight"): ("shared_down",),
    ("mlp", "gate_up", "bias"): ("gate_bias", "up_bias"),
    ("mlp", "down", "bias"): ("down_bias",),
    ("post_mlp_norm", "weight"): ("post_ffn_norm",),
}
_GLOBAL = {("embed",): "embed", ("final_norm", "weight"): "final_norm", ("lm_head", "weight"): "lm_head"}
_OUTPUTS = {"weight": -2, "bias": -1}  # axis of the outputs, with or without experts before it


def build_decoder(
    config: ModelConfig,
    spec: AttnSpec | MLASpec | tuple[AttnSpec | MLASpec, ...],
    choice: Choice | tuple[Choice, ...],
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    dtype=jnp.float32,
    weight_first: bool = False,
) -> Decoder:
    """A decoder whose parameters are `arrays`: (name, [out, in]) in any order, names as the loaders give them.

    Norms with `wide_norms` and sinks stay float32 in any dtype.
    Raises: ValueError naming the tensors that are missing, unknown, or of the wrong shape.
    """
    model = nnx.eval_shape(
        lambda: Decoder(config, spec, choice, rngs=nnx.Rngs(0), dtype=dtype, weight_first=weight_first)
    )
    return _filled(model, _parts, arrays)


def build_next(
    config: ModelConfig,
    spec: AttnSpec | MLASpec,
    choice: Choice,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    dtype=jnp.float32,
    weight_first: bool = False,
    index: int = 0,
) -> NextToken:
    """A layer behind a decoder's last, of `jattn.loaders.weights.load_next_arrays`; otherwise as `build_decoder`."""
    kwargs: dict[str, Any] = dict(dtype=dtype, weight_first=weight_first, index=index)
    model = nnx.eval_shape(lambda: NextToken(config, spec, choice, rngs=nnx.Rngs(0), **kwargs))
    return _filled(model, _next_parts, arrays)


def build_body(
    kind: str,
    config: ModelConfig,
    spec: AttnSpec,
    choice: Choice,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    feature_dim: int = 0,
    bias: bool = False,
    dtype=jnp.float32,
    weight_first: bool = False,
) -> Eagle | Eagle3:
    """The network of a draft head, of `jattn.loaders.draft_heads`; otherwise as `build_decoder`.

    Args: kind: "eagle", or "eagle3", which reads features of width `feature_dim`. bias: of EAGLE's `fc`.
    """

    def make() -> Eagle | Eagle3:
        kwargs: dict[str, Any] = dict(rngs=nnx.Rngs(0), dtype=dtype, weight_first=weight_first)
        if kind == "eagle":
            return Eagle(config, spec, choice, bias=bias, **kwargs)
        return Eagle3(config, spec, choice, feature_dim=feature_dim, **kwargs)

    return _filled(nnx.eval_shape(make), _body_parts, arrays)


def _filled[Model](model: Model, parts_of: Callable[[tuple], tuple[str, ...]], arrays) -> Model:
    graphdef, state = nnx.split(model)
    slots = dict(nnx.to_flat_state(state))
    parts = {path: parts_of(path) for path in slots}
    owner = {name: path for path, names in parts.items() for name in names}
    missing = set(owner)
    pending: dict[tuple, dict[str, np.ndarray]] = {}
    for name, array in arrays:
        if name not in owner:
            raise ValueError(f"tensor {name!r} is not part of this model: want {', '.join(sorted(owner)[:6])}, ...")
        path = owner[name]
        missing.discard(name)
        pending.setdefault(path, {})[name] = array
        if len(pending[path]) == len(parts[path]):
            held = pending.pop(path)
            slots[path] = slots[path].replace(_stack(parts[path], held, slots[path], _OUTPUTS.get(str(path[-1]))))
            del held, array  # before the loader makes the next one
    if missing:
        some = ", ".join(sorted(missing)[:6])
        raise ValueError(f"{len(missing)} tensors are missing: {some}{', ...' if len(missing) > 6 else ''}")
    return nnx.merge(graphdef, nnx.from_flat_state(slots))


def first_layers(model: Decoder, num_layers: int) -> Decoder:
    """The decoder of a model's first layers, under its own norm and head: a draft model that shares its arrays.

    Raises: ValueError if the model has fewer layers.
    """
    config = model.config
    if not 1 <= num_layers <= config.num_layers:
        raise ValueError(f"the first {num_layers} layers of a model of {config.num_layers}: want 1 to all of them")
    blocks = list(model.layers)[:num_layers]
    config = dataclasses.replace(config, num_layers=num_layers, windows=config.windows[:num_layers])
    specs = tuple(block.attn.spec for block in blocks)
    choices = tuple(block.attn.choice for block in blocks)
    shorter = nnx.eval_shape(lambda: Decoder(config, specs, choices, rngs=nnx.Rngs(0), weight_first=model.weight_first))
    graphdef, wanted = nnx.split(shorter)
    held = dict(nnx.to_flat_state(nnx.split(model)[1]))
    return nnx.merge(graphdef, nnx.from_flat_state({path: held[path] for path, _ in nnx.to_flat_state(wanted)}))


def _parts(path: tuple) -> tuple[str, ...]:
    if path[0] == "layers":
        return tuple(f"layers.{path[1]}.{name}" for name in _LAYER[path[2:]])
    return (_GLOBAL[path],)


def _next_parts(path: tuple) -> tuple[str, ...]:
    if path[0] == "block":
        return tuple(f"block.{name}" for name in _LAYER[path[1:]])
    return (str(path[0]),)


def _body_parts(path: tuple) -> tuple[str, ...]:
    if path[0] == "layers":
        return _parts(path)
    if path[0] == "fc":
        return ("fc",) if path[1] == "weight" else ("fc_bias",)
    return _LAYER.get(path, (str(path[0]),))  # norms of its own are called as they are


def _stack(names, held: dict[str, np.ndarray], slot, axis: int | None) -> jax.Array:
    arrays = [held[name] for name in names]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
    if whole.shape != tuple(slot.shape):
        raise ValueError(f"{' + '.join(names)}: shape {whole.shape}, but the hyperparameters want {tuple(slot.shape)}")
    return jnp.asarray(whole, slot.dtype)
