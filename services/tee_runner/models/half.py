"""Conversion to float16 that never turns a weight into infinity."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import ModelError

FLOAT16_MAX: Final = 65504.0

# Elements converted at a time, so that a large matrix is never held in float32 as a whole.
_CHUNK: Final = 1 << 22


def to_float16(values: NDArray[Any], *, name: str) -> NDArray[np.float16]:
    """``values`` (float16, bfloat16 or float32, any shape) as a C-contiguous float16 array.

    Raises ``ModelError`` naming the tensor when a value is not finite or exceeds 65504 in magnitude.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    result = np.empty(flat.shape, np.float16)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        # The negated comparison also catches NaN. In float16 every finite value is within range.
        wide = chunk if chunk.dtype == np.float32 else chunk.astype(np.float32)
        if not (np.abs(wide) <= FLOAT16_MAX).all():
            raise ModelError(
                f"Tensor {name!r} holds a value that float16 cannot represent.",
                remedy="This model cannot be served in float16.",
            )
        result[start : start + _CHUNK] = chunk
    return result.reshape(values.shape)
