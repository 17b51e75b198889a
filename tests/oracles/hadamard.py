"""The block Hadamard transform of an operand, along its last axis.

d points x become x diag(signs) H / sqrt(d), where H is Sylvester's matrix [d, d]. The sums are
float32: H of twice the points adds and subtracts what H makes of the two halves.
"""

import numpy as np

# Of NVFP4's weight gradient: arXiv 2509.25149.
NVIDIA_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def sylvester(points: int) -> np.ndarray:
    """Return the matrix of ones and minus ones, float64 [points, points]."""
    h = np.ones((1, 1))
    while len(h) < points:
        h = np.block([[h, h], [h, -h]])
    return h


def transform(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return the transform of float32 `x` [..., n], padded with zeros to whole blocks: float32."""
    points = len(signs)
    width = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % points)]
    padded = np.pad(x.astype(np.float32), width)
    blocks = padded.reshape(*x.shape[:-1], -1, points) * signs.astype(np.float32)
    return (_times_sylvester(blocks) * np.float32(points**-0.5)).reshape(padded.shape)


def _times_sylvester(x: np.ndarray) -> np.ndarray:
    if x.shape[-1] == 1:
        return x
    first, second = (_times_sylvester(half) for half in np.split(x, 2, axis=-1))
    return np.concatenate([first + second, first - second], axis=-1)
