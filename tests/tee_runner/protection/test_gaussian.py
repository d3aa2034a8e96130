"""Normals in vectors against the scalar function and float64."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tee_runner.protection.gaussian import _PIECE, PART, fill_normals
from tee_runner.simd import gaussian_pairs

from .doubles import SINGLE_ROUNDING, box_muller, key_of


def test_vector_pairs_are_box_muller() -> None:
    generator = np.random.default_rng(6)
    edges = np.array([0, 1, 127, 2**31 - 1, 2**31, 2**31 + 1, 2**30, 3 * 2**30, 2**32 - 1, 2**32 - 128])
    first, second = (grid.ravel() for grid in np.meshgrid(edges, edges))
    count = 320_000
    first = np.concatenate([first, generator.integers(0, 2**32, count - len(first))]).astype(np.uint32)
    second = np.concatenate([second, generator.integers(0, 2**32, count - len(second))]).astype(np.uint32)
    cosine, sine = np.full((2, count), np.nan, np.float32)
    gaussian_pairs(first.ctypes.data, second.ctypes.data, cosine.ctypes.data, sine.ctypes.data, count)
    # The word is scaled and shifted in one fused rounding here, in two there: near u = 0, where
    # the shift matters, words below 2²⁴ are exact in both.
    x, y = box_muller(first, second)
    # As for the scalar function, relative to the radius; and one rounding of u near 1, where
    # -2·ln u ≈ 2(1 - u) turns it into an absolute error.
    radius = np.hypot(x, y)
    u_error = 2 * SINGLE_ROUNDING / np.maximum(radius, 2.0**-12)
    tolerance = 8 * SINGLE_ROUNDING * radius + u_error
    assert (np.abs(cosine - x) <= tolerance).all()
    assert (np.abs(sine - y) <= tolerance).all()
    assert np.max(np.hypot(cosine, sine)) < 6.8


@pytest.mark.parametrize("count", [1, 2, 15, 31, 32, 33, 1000, _PIECE - 1, _PIECE + 1, 3 * _PIECE + 7])
def test_fill_writes_every_element_once(count: int) -> None:
    out = np.full(count + 16, np.nan, np.float32)
    fill_normals(key_of(5).stream("normals"), out[:count])
    assert np.isfinite(out[:count]).all()
    assert np.isnan(out[count:]).all()
    assert len(np.unique(out[:count])) > 0.99 * count


def test_normals_are_normal() -> None:
    out = np.empty(1_000_000, np.float32)
    fill_normals(key_of(7).stream("normals"), out)
    assert stats.kstest(out[:200_000], "norm").pvalue > 1e-3
    values = out.astype(np.float64)
    # Moments of a normal: mean 0, 1, 0, 3 with variances 1, 2, 15, 96; five deviations.
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((values**power).mean() - moment) < 5 * np.sqrt(variance / len(values))
    # The two of a pair, half a piece apart, are independent.
    half = _PIECE // 2
    first, second = values[:half], values[half:_PIECE]
    assert abs(np.mean(first * second)) < 5 / np.sqrt(half)


def test_large_fills_come_from_a_stream_per_part() -> None:
    count = 3 * PART + 5
    out = np.full(count + 16, np.nan, np.float32)
    stream = key_of(8).stream("normals")
    fill_normals(stream, out[:count])
    assert np.isnan(out[count:]).all()
    following = stream.words(8)

    twin = key_of(8).stream("normals")
    parts = twin.fork(4)
    for part, start in zip(parts, range(0, count, PART), strict=True):
        expected = np.empty(min(PART, count - start), np.float32)
        fill_normals(part, expected)
        np.testing.assert_array_equal(out[start : start + len(expected)], expected)
    np.testing.assert_array_equal(twin.words(8), following)
    # No part repeats another, nor is correlated with it.
    first, second, third = (out[i * PART : (i + 1) * PART].astype(np.float64) for i in range(3))
    for x, y in ((first, second), (second, third), (first, third)):
        assert abs(np.mean(x * y)) < 5 / np.sqrt(PART)
