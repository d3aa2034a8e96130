"""Conversion to float16 that never turns a weight into infinity."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import ModelError

FLOAT16_MAX: Final = 65504.0

# Elements converted at a time, so that a large matrix is never held in float32 as a whole.
_CHUNK: Final = 1 << 20


def to_float16(
    values: NDArray[Any], *, name: str, out: NDArray[np.float16] | None = None
) -> NDArray[np.float16]:
    """``values`` (float16, bfloat16 or float32, any shape) as a C-contiguous float16 array.

    ``out`` receives the result when given: same shape, float16, C-contiguous.
    Raises ``ModelError`` naming the tensor when a value is not finite or exceeds 65504 in magnitude.
    """
    result = np.empty(values.shape, np.float16) if out is None else out
    source, target = np.ascontiguousarray(values).reshape(-1), result.reshape(-1)
    for start in range(0, source.size, _CHUNK):
        wide = source[start : start + _CHUNK].astype(np.float32, copy=False)
        # Not <= rather than >: the comparison must also fail for NaN.
        if not (np.abs(wide) <= FLOAT16_MAX).all():
            raise ModelError(
                f"Tensor {name!r} holds a value that float16 cannot represent.",
                remedy="This model cannot be served in float16.",
            )
        target[start : start + _CHUNK] = wide
    return result
