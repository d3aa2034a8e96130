"""Quantised weights as bytes: what both engines for products modulo 2^32 accept and how they cut it up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu_worker.engines.base import EngineError

RingWeight = NDArray[np.int8] | NDArray[np.int16]

# An int16 weight must be 256·high + low with both of them int8.
INT16_MAX = 127 * 256 + 127


def check_weight(weight: RingWeight) -> None:
    """Accept a non-empty matrix of int8, or of int16 up to ``INT16_MAX``.

    Raises:
        EngineError: it is something else.
    """
    if weight.dtype not in (np.int8, np.int16) or weight.ndim != 2 or 0 in weight.shape:
        raise EngineError(
            f"a weight must be a non-empty int8 or int16 matrix, not {weight.dtype} {weight.shape}"
        )
    if weight.dtype == np.int16 and weight.max() > INT16_MAX:
        raise EngineError(f"an int16 weight must not exceed {INT16_MAX}, this one has {weight.max()}")


def operand_shifts(weight: RingWeight) -> tuple[int, ...]:
    """What the operand is shifted left by for each byte of a weight, the high byte first."""
    return (0,) if weight.dtype == np.int8 else (8, 0)


def weight_bytes(weight: RingWeight, shift: int) -> NDArray[np.int8]:
    """The part of ``weight`` that belongs to ``shift``: ``weight = sum(part << shift)``."""
    low = weight.astype(np.int8, copy=False)
    if not shift:
        return low
    high: NDArray[np.int8] = ((weight.astype(np.int32) - low) >> shift).astype(np.int8)
    return high
