"""A grouped-query decoder and its next-token layers in NumPy float64, over a whole text and without a cache."""

import numpy as np

from jattn.models.config import ModelConfig
from jattn.models.decoder import Attention, Block, Decoder
from jattn.models.next_token import NextToken


def array(parameter) -> np.ndarray:
    """A parameter in float64."""
    return np.asarray(parameter[...], np.float64)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """x [rows, heads, width], row i at position i; feature j is paired with j + width / 2."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], -1)


def through_block(block: Block, config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """The stream [rows, d] behind a layer."""
    rows, heads, groups, width = len(x), config.num_q_heads, config.num_kv_heads, config.head_dim
    assert block.attn_norm is not None and isinstance(block.attn, Attention)
    mixed = norm(x, array(block.attn_norm.weight), config.rms_eps) @ array(block.attn.qkv.weight).T
    q, k, v = np.split(mixed.reshape(rows, -1, width), [heads, heads + groups], axis=1)
    q, k = rotated(q, config.rope_theta), rotated(k, config.rope_theta)
    k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * width**-0.5
    scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)
    x = x + out.reshape(rows, -1) @ array(block.attn.out.weight).T
    normed = norm(x, array(block.mlp_norm.weight), config.rms_eps)
    gate, up = np.split(normed @ array(block.mlp.gate_up.weight).T, 2, -1)
    return x + (gate / (1 + np.exp(-gate)) * up) @ array(block.mlp.down.weight).T


def hidden_of(model: Decoder, ids: list[int]) -> np.ndarray:
    """Final hidden states [tokens, d]."""
    x = array(model.embed)[ids]
    for block in model.layers:
        x = through_block(block, model.config, x)
    return norm(x, array(model.final_norm.weight), model.config.rms_eps)


def through_next(layer: NextToken, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """What a next-token layer makes of rows of embeddings and hidden states."""
    eps = layer.config.rms_eps
    both = [norm(embedded, array(layer.token_norm.weight), eps), norm(hidden, array(layer.hidden_norm.weight), eps)]
    x = through_block(layer.block, layer.config, np.concatenate(both, -1) @ array(layer.project.weight).T)
    return norm(x, array(layer.final_norm.weight), eps)
