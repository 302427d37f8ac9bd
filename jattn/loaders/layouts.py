"""How a file's array becomes ours, where the two differ. Each function takes the array and the hyperparameters."""

import numpy as np

from jattn.loaders.hparams import HParams


def split_half(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows [num_heads * head_dim, in] from adjacent rope pairs (2j, 2j + 1) to pairs (j, j + head_dim / 2).

    Source: the permutation of llama.cpp's converter, undone.

    >>> split_half(np.arange(4.0)[:, None], 1).ravel().tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def adjacent_q(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """Query rows whose rope pairs the file keeps adjacent."""
    return split_half(array, hparams.num_q_heads)


def adjacent_k(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """Key rows whose rope pairs the file keeps adjacent."""
    return split_half(array, hparams.num_kv_heads)


def latent_q(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """Query rows [num_q_heads * (nope + rope), in] of latent attention, rotary rows in half-split order."""
    if not hparams.adjacent_rope:
        return array
    heads = array.reshape(hparams.num_q_heads, -1, array.shape[-1])
    for head in heads:  # views
        head[hparams.qk_nope_head_dim :] = split_half(head[hparams.qk_nope_head_dim :], 1)
    return array


def latent_kv(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """Rows of the latent, then of the shared rotary key, the latter in half-split order."""
    if hparams.adjacent_rope:
        array[hparams.kv_lora_rank :] = split_half(array[hparams.kv_lora_rank :], 1)
    return array


def latent_to_keys(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """[heads * (nope + v), latent] -> the keys' part, [heads, nope, latent]."""
    return array.reshape(hparams.num_q_heads, -1, array.shape[-1])[:, : hparams.qk_nope_head_dim]


def latent_to_values(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """[heads * (nope + v), latent] -> the values' part, [heads, latent, v]."""
    return array.reshape(hparams.num_q_heads, -1, array.shape[-1])[:, hparams.qk_nope_head_dim :].swapaxes(1, 2)


def one_plus(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """A norm weight kept as its distance from 1."""
    array += 1
    return array


def halves_swapped(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """Columns [hidden state, embedding] of a projection of both -> [embedding, hidden state].

    >>> halves_swapped(np.array([[1, 2, 3, 4]]), None).tolist()
    [[3, 4, 1, 2]]
    """
    return np.roll(array, array.shape[1] // 2, axis=1)


def even_columns(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """The gates of [experts, in, 2 * out], as [experts, out, in]."""
    return array[..., 0::2].swapaxes(1, 2)


def odd_columns(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """The up projections of [experts, in, 2 * out], as [experts, out, in]."""
    return array[..., 1::2].swapaxes(1, 2)


def even_entries(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """The gates' biases of [experts, 2 * out]."""
    return array[..., 0::2]


def odd_entries(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """The up projections' biases of [experts, 2 * out]."""
    return array[..., 1::2]


def swapped(array: np.ndarray, hparams: HParams) -> np.ndarray:
    """[experts, in, out] as [experts, out, in]."""
    return array.swapaxes(1, 2)
