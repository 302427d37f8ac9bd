"""Fill a decoder with named arrays, one at a time, so that loading holds the weights once."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.models.config import ModelConfig
from jattn.models.llama import Llama
from jattn.resolve import Choice
from jattn.spec import AttnSpec

# Our parameter's path in a layer -> the loader's tensors whose rows it stacks.
_LAYER = {
    ("attn_norm", "weight"): ("attn_norm",),
    ("attn", "qkv", "weight"): ("q", "k", "v"),
    ("attn", "out", "weight"): ("o",),
    ("mlp_norm", "weight"): ("ffn_norm",),
    ("mlp", "gate_up", "weight"): ("gate", "up"),
    ("mlp", "down", "weight"): ("down",),
}
_GLOBAL = {("embed",): "embed", ("final_norm", "weight"): "final_norm", ("lm_head", "weight"): "lm_head"}


def build_llama(
    config: ModelConfig,
    spec: AttnSpec,
    choice: Choice,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    dtype=jnp.float32,
    weight_first: bool = False,
) -> Llama:
    """A Llama whose parameters are `arrays`: (name, [out, in]) in any order, names as the loaders give them.

    Raises: ValueError naming the tensors that are missing, unknown, or of the wrong shape.
    """
    model = nnx.eval_shape(
        lambda: Llama(config, spec, choice, rngs=nnx.Rngs(0), dtype=dtype, weight_first=weight_first)
    )
    graphdef, state = nnx.split(model)
    slots = dict(nnx.to_flat_state(state))
    parts = {path: _parts(path) for path in slots}
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
            slots[path] = slots[path].replace(_stack(parts[path], held, slots[path].shape, dtype))
            del held, array  # before the loader makes the next one
    if missing:
        some = ", ".join(sorted(missing)[:6])
        raise ValueError(f"{len(missing)} tensors are missing: {some}{', ...' if len(missing) > 6 else ''}")
    return nnx.merge(graphdef, nnx.from_flat_state(slots))


def _parts(path: tuple) -> tuple[str, ...]:
    if path[0] == "layers":
        return tuple(f"layers.{path[1]}.{name}" for name in _LAYER[path[2:]])
    return (_GLOBAL[path],)


def _stack(names, held: dict[str, np.ndarray], shape, dtype) -> jax.Array:
    arrays = [held[name] for name in names]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if whole.shape != tuple(shape):
        raise ValueError(f"{' + '.join(names)}: shape {whole.shape}, but the hyperparameters want {tuple(shape)}")
    return jnp.asarray(whole, dtype)
