"""The vector building blocks against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from scipy.linalg import hadamard

from tee_runner.vector import (
    _log,
    bits_from_float,
    exp,
    float_from_bits,
    gaussian_pair,
    matmul_add,
    walsh_hadamard,
)

from .doubles import SINGLE_ROUNDING, box_muller

# Compiled anew in every run: a cached copy would hide a change of the inlined functions.


@numba.njit
def _exp_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


@numba.njit
def _log_all(x: Any, out: Any) -> None:
    for i in range(x.shape[0]):
        out[i] = _log(x[i])


@numba.njit(fastmath={"contract"})
def _pair_all(first: Any, second: Any, cosine: Any, sine: Any) -> None:
    for i in range(first.shape[0]):
        x, y = gaussian_pair(first[i], second[i])
        cosine[i] = x
        sine[i] = y


@numba.njit
def _bits_round_trip(x: Any, bits: Any, back: Any) -> None:
    for i in range(x.shape[0]):
        bits[i] = bits_from_float(x[i])
        back[i] = float_from_bits(bits[i])


def test_bit_casts_are_exact() -> None:
    x = np.array([0.0, -0.0, 1.0, -1.5, 1e-45, 3.4e38, np.inf, -np.inf, np.nan], np.float32)
    bits, back = np.empty(len(x), np.uint32), np.empty(len(x), np.float32)
    _bits_round_trip(x, bits, back)
    np.testing.assert_array_equal(bits, x.view(np.uint32))
    np.testing.assert_array_equal(back.view(np.uint32), x.view(np.uint32))


def test_exp_has_the_documented_relative_error() -> None:
    x = np.concatenate(
        [np.linspace(-87.0, 88.0, 700_001), np.linspace(-1.0, 1.0, 100_001), [0.0, -0.0, 1e-30, -1e-30]]
    ).astype(np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out / expected - 1.0)) < 2e-7
    assert out[-4] == 1.0


def test_exp_clamps_to_the_normal_range() -> None:
    x = np.array([-1e30, -1000.0, -87.5, -np.inf, 88.5, 1000.0, 1e30, np.inf], np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    np.testing.assert_allclose(out[:4], np.exp(-87.0), rtol=2e-7)
    np.testing.assert_allclose(out[4:], np.exp(88.0), rtol=2e-7)


def test_log_is_accurate_over_the_range_of_a_uniform() -> None:
    # Down to the smallest uniform, 2⁻³³, and next to 1, where ln(x) ≈ x - 1 must keep its digits.
    low = 2.0 ** -np.linspace(0.01, 33.0, 200_001)
    near_one = 1.0 - np.arange(1, 4096) * 2.0**-24
    x = np.concatenate([low, near_one]).astype(np.float32)
    out = np.empty_like(x)
    _log_all(x, out)
    expected = np.log(x.astype(np.float64))
    # Three roundings of magnitudes up to the result, 2⁻²⁴ each, and Cephes' own 2⁻²⁴.
    assert np.max(np.abs(out / expected - 1.0)) < 4 * SINGLE_ROUNDING


def test_gaussian_pair_is_box_muller() -> None:
    generator = np.random.default_rng(5)
    edges = np.array([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**30, 3 * 2**30, 2**32 - 1, 2**32 - 128])
    first, second = (grid.ravel() for grid in np.meshgrid(edges, edges))
    first = np.concatenate([first, generator.integers(0, 2**32, 300_000)]).astype(np.uint32)
    second = np.concatenate([second, generator.integers(0, 2**32, 300_000)]).astype(np.uint32)
    cosine, sine = np.empty(len(first), np.float32), np.empty(len(first), np.float32)
    _pair_all(first, second, cosine, sine)
    x, y = box_muller(first, second)
    # Relative to the radius: 2 roundings in it, and in the sine one of π/2 times its argument
    # (slope at most π), one per term of the series it is left with and the series' 1e-9.
    tolerance = 8 * SINGLE_ROUNDING * np.hypot(x, y)
    assert (np.abs(cosine - x) <= tolerance).all()
    assert (np.abs(sine - y) <= tolerance).all()
    # The radius alone is the logarithm: ln u = -r²/2.
    logarithm = -(cosine.astype(np.float64) ** 2 + sine.astype(np.float64) ** 2) / 2
    np.testing.assert_allclose(logarithm, -(x**2 + y**2) / 2, rtol=16 * SINGLE_ROUNDING)
    assert np.max(np.hypot(cosine, sine)) < 6.8


@pytest.mark.parametrize("rows", [1 << i for i in range(13)])
def test_walsh_hadamard_is_exact_on_integers(rows: int) -> None:
    # Sums of at most 4096 integers below 9 are exact in float32 in any order.
    values = np.random.default_rng(rows).integers(-8, 9, (rows, 64)).astype(np.float32)
    expected = hadamard(rows, dtype=np.float32) @ values
    for width in (16, 32, 48, 64):
        tile = np.ascontiguousarray(values[:, :width])
        walsh_hadamard(tile.ctypes.data, rows, width)
        np.testing.assert_array_equal(tile, expected[:, :width])


@pytest.mark.parametrize("rows", [2, 16, 128, 1024, 8192])
def test_walsh_hadamard_is_its_own_inverse(rows: int) -> None:
    values = np.random.default_rng(rows).standard_normal((rows, 16)).astype(np.float32)
    tile = values.copy()
    walsh_hadamard(tile.ctypes.data, rows, 16)
    walsh_hadamard(tile.ctypes.data, rows, 16)
    # 2·log₂(rows) additions, each one rounding of the column norm at worst.
    tolerance = 2 * np.log2(rows) * SINGLE_ROUNDING * np.linalg.norm(values, axis=0)
    assert (np.abs(tile / rows - values) <= tolerance).all()


@pytest.mark.parametrize("rows", [4, 8, 20])
@pytest.mark.parametrize("columns", [16, 48, 64, 80, 192])
@pytest.mark.parametrize("depth", [1, 2, 17, 130])
def test_matmul_add_matches_float64(rows: int, columns: int, depth: int) -> None:
    generator = np.random.default_rng([rows, columns, depth])
    a = generator.standard_normal((rows, depth + 3)).astype(np.float32)
    b = generator.standard_normal((depth, columns + 5)).astype(np.float32)
    c = generator.standard_normal((rows + 1, columns + 7)).astype(np.float32)
    out = c.copy()
    matmul_add(
        a.ctypes.data, depth + 3, b.ctypes.data, columns + 5, out.ctypes.data, columns + 7,
        rows, depth, columns,
    )  # fmt: skip
    A, B = a[:, :depth].astype(np.float64), b[:, :columns].astype(np.float64)
    C = c[:rows, :columns].astype(np.float64)
    # One fused rounding per step of a sum of depth + 1 terms.
    tolerance = (depth + 1) * SINGLE_ROUNDING * (np.abs(A) @ np.abs(B) + np.abs(C))
    assert (np.abs(out[:rows, :columns] - (C + A @ B)) <= tolerance).all()
    # Nothing beside the block is touched.
    np.testing.assert_array_equal(out[rows:], c[rows:])
    np.testing.assert_array_equal(out[:, columns:], c[:, columns:])
