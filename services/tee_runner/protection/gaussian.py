"""Standard normals from a secret stream."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.rng import SecretStream
from tee_runner.vector import gaussian_pair


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _pairs(first: Any, second: Any, cosine: Any, sine: Any) -> None:
    for i in range(first.shape[0]):
        x, y = gaussian_pair(first[i], second[i])
        cosine[i] = x
        sine[i] = y


def standard_normals(stream: SecretStream, count: int) -> NDArray[np.float32]:
    """``count`` independent standard normals, float32."""
    half = -(-count // 2)
    words = stream.words(2 * half)
    normals = np.empty(2 * half, dtype=np.float32)
    _pairs(words[:half], words[half:], normals[:half], normals[half:])
    words.fill(0)
    return normals[:count]
