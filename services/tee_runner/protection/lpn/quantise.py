"""Weights and activations as small integers, so that a product is exact and cannot overflow.

Weights: symmetric, one scale per output channel. Activations: one scale per row, b bits with sign,
b the most for which no sum of products can reach 2^30 in magnitude, whatever the row:
max_j ‖Wq[j]‖₁·(2^(b-1) - 1) < 2^30. A product modulo 2^32 is then the integer product, and every
value of magnitude 2^30 or more is a lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from gelo.f16 import half_to_float
from tee_runner.errors import ModelError

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
Signed = NDArray[np.int8] | NDArray[np.int16]

SUM_LIMIT: Final = 1 << 30  # what |x·W| stays below
MAX_ACTIVATION_BITS: Final = 16
# Wide weights get as many bits as leave the activations this many.
WIDE_ACTIVATION_BITS: Final = 12
_WIDEST: Final = 15
_FEWEST_BITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """``weight ≈ values · scales[:, None]``.

    ``values`` ``(d_out, d_in)`` int8 or int16, ``scales`` ``(d_out,)`` float32; activations have
    ``activation_bits`` bits, the sign included.
    """

    values: Signed
    scales: Float32
    activation_bits: int

    @property
    def levels(self) -> int:
        """Largest magnitude of a quantised activation."""
        return (1 << (self.activation_bits - 1)) - 1


def quantise(weight: Float16, *, wide: bool = False) -> QuantisedWeight:
    """``weight`` ``(d_out, d_in)`` in 8 bits, or with ``wide`` in as many of 15 as there is room for.

    Deterministic: the same weight gives the same bytes on every machine.

    Raises:
        ModelError: a value is not finite, or the rows are too long for any activation bits.
    """
    bits = np.ascontiguousarray(weight).view(np.uint16)
    largest = np.empty(len(bits), dtype=np.float32)
    _row_maxima(bits, largest)
    if not np.isfinite(largest).all():
        raise ModelError("A weight holds values that are not finite.")
    values: Signed = np.empty(bits.shape, dtype=np.int16 if wide else np.int8)
    for width in range(_WIDEST, 7, -1) if wide else (8,):
        levels = (1 << (width - 1)) - 1
        sums = np.empty(len(bits), dtype=np.int64)
        _quantise_rows(bits, largest, levels, values, sums)
        activation_bits = most_activation_bits(int(sums.max(initial=0)))
        if activation_bits >= WIDE_ACTIVATION_BITS:
            break
    if activation_bits < _FEWEST_BITS:
        raise ModelError(f"A weight with rows of {bits.shape[1]} values leaves no room for activations.")
    return QuantisedWeight(
        values=values, scales=largest / np.float32(levels), activation_bits=activation_bits
    )


def most_activation_bits(largest_sum: int) -> int:
    """The most bits b <= 16 with ``largest_sum``·(2^(b-1) - 1) < 2^30; ``largest_sum`` is max_j ‖Wq[j]‖₁."""
    bits = MAX_ACTIVATION_BITS
    while bits > 1 and largest_sum * ((1 << (bits - 1)) - 1) >= SUM_LIMIT:
        bits -= 1
    return bits


@numba.njit(nogil=True, cache=True, parallel=True)
def _row_maxima(weight: Any, largest: Any) -> None:
    """Largest magnitude of each row; not finite if one of its values is not."""
    for j in numba.prange(weight.shape[0]):
        # Without the sign, halves are ordered as their bits are, and what is not finite comes last.
        top = np.uint16(0)
        for i in range(weight.shape[1]):
            top = max(top, np.uint16(weight[j, i] & np.uint16(0x7FFF)))
        largest[j] = half_to_float(top)


@numba.njit(nogil=True, cache=True, parallel=True)
def _quantise_rows(weight: Any, largest: Any, levels: int, values: Any, sums: Any) -> None:
    for j in numba.prange(weight.shape[0]):
        factor = np.float32(0.0)
        if largest[j] > np.float32(0.0):
            factor = np.float32(levels) / largest[j]
        total = np.int64(0)
        for i in range(weight.shape[1]):
            value = np.int32(np.rint(half_to_float(weight[j, i]) * factor))
            values[j, i] = value
            total += abs(np.int64(value))
        sums[j] = total
