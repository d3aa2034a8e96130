"""How one element of the KV cache is stored, and read back as float32.

The storage is known from the array's type, at compile time: float32 as it is, bfloat16 as its
bits in a uint16, or int8 with one float32 scale for each head of each position.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from tee_runner.vector import bits_from_float, float_from_bits

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LEVELS = np.float32(127.0)


def widen(value):  # type: ignore[no-untyped-def]
    """A stored element as float32; an int8 one still lacks its :func:`scale_of`."""
    raise TypeError("only inside compiled code")


@overload(widen, inline="always")
def _widen(value):  # type: ignore[no-untyped-def]  # numba compares signatures
    if value == types.float32:
        return lambda value: value
    if value == types.uint16:
        return lambda value: float_from_bits(np.uint32(value) << np.uint32(16))
    if value == types.int8:
        return lambda value: np.float32(value)
    return None


def scale_of(cache, scales, slot, place, head):  # type: ignore[no-untyped-def]
    """What the elements of a head at a place are multiplied by: 1 unless they are int8."""
    raise TypeError("only inside compiled code")


@overload(scale_of, inline="always")
def _scale_of(cache, scales, slot, place, head):  # type: ignore[no-untyped-def]
    if cache.dtype == types.int8:
        return lambda cache, scales, slot, place, head: scales[slot, place, head]
    return lambda cache, scales, slot, place, head: _ONE


@numba.njit(nogil=True, cache=True, inline="always")
def _bfloat16(value: Any) -> Any:
    """The bits of a float32 rounded to bfloat16, to nearest even."""
    bits = bits_from_float(value)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(bits >> np.uint32(16))


@numba.njit(nogil=True, cache=True)
def _quantise(head: Any, out: Any) -> Any:
    """``out = round(head / scale)`` in -127 … 127; returns the scale, max|head| / 127."""
    largest = _ZERO
    for c in range(head.shape[0]):
        largest = max(largest, abs(head[c]))
    inverse = _LEVELS / largest if largest > _ZERO else _ZERO
    # Below 127 / the largest float32, the quotient overflows; such a head is zero in effect.
    inverse = inverse if inverse < np.float32(np.inf) else _ZERO
    for c in range(head.shape[0]):
        out[c] = np.int8(np.rint(head[c] * inverse))
    return largest / _LEVELS


def store_head(cache, scales, slot, place, head, values):  # type: ignore[no-untyped-def]
    """Write ``values`` ``(depth,)`` float32 as head ``head`` of ``cache[slot, place]``."""
    raise TypeError("only inside compiled code")


@overload(store_head)
def _store_head(cache, scales, slot, place, head, values):  # type: ignore[no-untyped-def]
    if cache.dtype == types.float32:

        def store(cache, scales, slot, place, head, values):  # type: ignore[no-untyped-def]
            depth = values.shape[0]
            out = cache[slot, place, head * depth : (head + 1) * depth]
            for c in range(depth):
                out[c] = values[c]

        return store
    if cache.dtype == types.uint16:

        def store(cache, scales, slot, place, head, values):  # type: ignore[no-untyped-def]
            depth = values.shape[0]
            out = cache[slot, place, head * depth : (head + 1) * depth]
            for c in range(depth):
                out[c] = _bfloat16(values[c])

        return store
    if cache.dtype == types.int8:

        def store(cache, scales, slot, place, head, values):  # type: ignore[no-untyped-def]
            depth = values.shape[0]
            out = cache[slot, place, head * depth : (head + 1) * depth]
            scales[slot, place, head] = _quantise(values, out)

        return store
    return None
