"""The half-precision intrinsics against NumPy, whose conversions are exact and round to nearest even."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from gelo.f16 import float_to_half, half_to_float

ALL_HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


@numba.njit
def _widen(bits: Any, out: Any) -> None:
    for i in range(bits.shape[0]):
        out[i] = half_to_float(bits[i])  # type: ignore[call-arg]


@numba.njit
def _narrow(values: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        out[i] = float_to_half(values[i])  # type: ignore[call-arg]


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    out = np.empty(len(bits), np.float32)
    _widen(bits, out)
    return out


def assert_narrows_like_numpy(values: NDArray[np.float32]) -> None:
    """Equal bits, signed zeros included; a NaN must stay a NaN, its payload is free."""
    out = np.empty(len(values), np.uint16)
    _narrow(values, out)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    nan = np.isnan(values)
    assert np.isnan(out.view(np.float16)[nan]).all()
    np.testing.assert_array_equal(out[~nan], expected.view(np.uint16)[~nan])


def test_every_half_widens_exactly() -> None:
    out = widened(ALL_HALVES)
    expected = ALL_HALVES.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(out), nan)
    np.testing.assert_array_equal(out[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_every_half_survives_the_round_trip() -> None:
    assert_narrows_like_numpy(widened(ALL_HALVES))


def test_ties_and_their_neighbours() -> None:
    """The midpoint of every two adjacent halves (exact in f32), and the floats just beside it."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (finite[:-1] + finite[1:]) / np.float32(2)
    up, down = np.float32(np.inf), np.float32(-np.inf)
    values = np.concatenate([middle, np.nextafter(middle, up), np.nextafter(middle, down)])
    assert_narrows_like_numpy(np.concatenate([values, -values]))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_overflow(sign: float) -> None:
    edge = np.float32(65520.0)  # halfway between the largest half and the next power of two
    below = np.nextafter(edge, np.float32(0))
    values = np.array([65504, below, edge, 65536, 1e10, 3.4e38, np.inf], np.float32) * np.float32(sign)
    out = np.empty(len(values), np.uint16)
    _narrow(values, out)
    assert_narrows_like_numpy(values)
    assert np.isinf(out.view(np.float16)).tolist() == [False, False, True, True, True, True, True]


def test_subnormals() -> None:
    """Around 2^-24, the smallest half, and its half, below which everything is zero."""
    smallest = np.float32(2.0**-24)
    values = smallest * np.linspace(0, 1100, 200_001, dtype=np.float32)
    edges = np.array([2.0**-25, 2.0**-26, 1e-45, 1e-38, 0.0], np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(1)), np.nextafter(edges, np.float32(-1))])
    assert_narrows_like_numpy(np.concatenate([values, -values, edges, -edges]))


def test_random_floats() -> None:
    """A million of any bit pattern, and a million in the range of a half."""
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
    assert_narrows_like_numpy(anything)
    exponents = rng.uniform(-26, 17, 1_000_000)
    assert_narrows_like_numpy((rng.choice([-1.0, 1.0], 1_000_000) * 2.0**exponents).astype(np.float32))
