"""A grouped-query model written as an exactly equal model with latent attention.

Values of all KV heads are the latent (never normed), their rotated keys the shared rotary key, a block of rotary
features each. A query head is zero outside its own KV head's block, the part without rotation is empty, and a head's
value matrix picks its KV head's values out of the latent. Scale, frequencies, biases and norms of q and k carry over.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from jattn.models.config import MLAConfig, ModelConfig


def as_mla_config(config: ModelConfig) -> ModelConfig:
    """The hyperparameters of the equal MLA model.

    Raises: ValueError for a model that has latent attention already, or attention options that it knows nothing of.

    >>> config = ModelConfig(num_layers=1, d_model=8, num_q_heads=4, num_kv_heads=2, head_dim=4, ffn_dim=8,
    ...     vocab_size=9, max_context=32, rms_eps=1e-6, rope_theta=1e4)
    >>> as_mla_config(config).attn_spec().latent_dims
    16
    """
    if config.mla is not None:
        raise ValueError("as_mla of a model with latent attention: it is one already; leave as_mla out")
    given = dict(windows=any(config.windows), sinks=config.sinks, attn_soft_cap=config.attn_soft_cap)
    for name, value in given.items():
        if value:
            raise ValueError(f"as_mla of a model with {name}: latent attention has no such option; leave as_mla out")
    width = config.num_kv_heads * config.head_dim
    mla = MLAConfig(
        kv_lora_rank=width,
        qk_nope_head_dim=0,
        qk_rope_head_dim=width,
        v_head_dim=config.head_dim,
        latent_norm=False,
        rope_blocks=config.num_kv_heads,
    )
    scale = config.head_dim**-0.5 if config.sm_scale is None else config.sm_scale
    return dataclasses.replace(config, head_dim=width, windows=(), sm_scale=scale, mla=mla)


def as_mla_arrays(config: ModelConfig, arrays: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of the equal MLA model, one at a time, of a GQA model's (names and shapes of the loaders).

    Args: config: of the GQA model.
    """
    held: dict[str, np.ndarray] = {}
    for name, array in arrays:
        layer, _, tensor = name.rpartition(".")
        if tensor in ("q", "q_bias"):
            yield name, _in_own_block(array, config)
        elif tensor in ("k", "v", "k_bias", "v_bias"):
            held[name] = array
            kind = tensor[1:]
            pair = f"{layer}.v{kind}", f"{layer}.k{kind}"
            if all(part in held for part in pair):
                yield f"{layer}.kv_a{kind}", np.concatenate([held.pop(part) for part in pair])
            if not kind and f"{layer}.k" not in held and f"{layer}.v" not in held:
                yield (
                    f"{layer}.w_kc",
                    np.zeros((config.num_q_heads, 0, config.num_kv_heads * config.head_dim), array.dtype),
                )
                yield f"{layer}.w_vc", _own_values(config, array.dtype)
        else:
            yield name, array


def _in_own_block(array: np.ndarray, config: ModelConfig) -> np.ndarray:
    # rows [q_heads * head_dim, ...] -> [q_heads * kv_heads * head_dim, ...], zero outside of each head's block
    heads = array.reshape(config.num_q_heads, config.head_dim, *array.shape[1:])
    out = np.zeros((config.num_q_heads, config.num_kv_heads, *heads.shape[1:]), array.dtype)
    of = np.arange(config.num_q_heads) // (config.num_q_heads // config.num_kv_heads)
    out[np.arange(config.num_q_heads), of] = heads
    return out.reshape(-1, *array.shape[1:])


def _own_values(config: ModelConfig, dtype) -> np.ndarray:
    # [q_heads, kv_heads * head_dim, head_dim]: one of each head's KV head, zero elsewhere
    eye = np.eye(config.num_kv_heads * config.head_dim, dtype=dtype)
    blocks = eye.reshape(-1, config.num_kv_heads, config.head_dim).swapaxes(0, 1)
    return np.repeat(blocks, config.num_q_heads // config.num_kv_heads, axis=0)
