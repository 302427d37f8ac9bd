"""8-bit weights with a scale a block, as DeepSeek-V3 stores them: `X` in e4m3, and `X_scale_inv`, to be multiplied by.

Source: https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md), arXiv:2412.19437, section 3.3.2.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

DTYPE, SUFFIX = "F8_E4M3", "_scale_inv"
_FINITE = ml_dtypes.float8_e4m3fn


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight [out, in].

    >>> scale_shape((576, 7168), (128, 128))
    (5, 56)
    """
    return tuple(-(-size // step) for size, step in zip(shape, block, strict=True))


def read_float8(shard: Path, name: str) -> np.ndarray:
    """A tensor's bytes as e4m3, mapped, not read: the package reads no 8-bit floats into NumPy.

    The file has been opened by the package before, so its header is whole.
    Source of the layout: https://huggingface.co/docs/safetensors (format).
    """
    with shard.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        info = json.loads(file.read(size))[name]
    offset = 8 + size + info["data_offsets"][0]
    return np.memmap(shard, np.uint8, "r", offset, tuple(info["shape"])).view(_FINITE)


def dequantise(stored: np.ndarray, scales: np.ndarray, block: tuple[int, int], dtype: DTypeLike) -> np.ndarray:
    """e4m3 [out, in] and f32 scales [out / block[0], in / block[1]], both rounded up, -> [out, in] in `dtype`.

    >>> dequantise(np.ones((3, 2), _FINITE), np.asarray([[2.0], [4.0]], np.float32), (2, 2), np.float32)[:, 0].tolist()
    [2.0, 2.0, 4.0]
    """
    out = np.empty(stored.shape, dtype)
    columns = np.repeat(scales, block[1], axis=1)[:, : stored.shape[1]]
    for place, scale in enumerate(columns):  # a band of rows at a time, so that the whole is held once
        rows = slice(place * block[0], (place + 1) * block[0])
        out[rows] = stored[rows].astype(np.float32) * scale
    return out
