"""A decode step's row: unmasked and summed in one pass over a result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.protection.gelo.base import GeloProtection, Mask
from tee_runner.protection.gelo.decode_row import row_alone, row_back
from tee_runner.protection.gelo.hd3 import Hd3Mask

from .doubles import GELO_SCHEMES, SINGLE_ROUNDING, ExactTransport, key_of, matrix_of


def mask_of(kind: type[GeloProtection], key: int) -> Mask:
    return kind(ExactTransport(), key=key_of(key)).new_mask(1)


def normal_of(mask: Mask) -> float:
    """What the factor of a sent row has of the norms of A, which the row of the inverse lacks."""
    return float(mask.s) ** -1.5 if isinstance(mask, Hd3Mask) else 1.0


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@settings(max_examples=40, deadline=None)
@given(key=st.integers(1, 50), vectors=st.integers(1, 80), exponent=st.integers(-12, 12))
def test_row_and_sums_are_what_they_should_be(
    kind: type[GeloProtection], key: int, vectors: int, exponent: int
) -> None:
    rng = np.random.default_rng(key)
    d = 16 * vectors
    mask = mask_of(kind, key)
    result = (rng.standard_normal((mask.s, d)) * 2.0**exponent).astype(np.float32)
    v = rng.standard_normal((2, d)).astype(np.float32)
    out, sums = np.full((1, d), np.nan, np.float32), np.full((mask.s, 2), np.nan)
    assert not row_back(result, mask.inverse_row, 0.125 * normal_of(mask), out, v, sums)
    exact = result.astype(np.float64)
    expected = (matrix_of(mask).T @ exact)[:1] * 0.125
    size = np.linalg.norm(exact, axis=0) * 0.125
    assert (np.abs(out - expected) <= 16 * SINGLE_ROUNDING * size).all()
    # At most 32 additions a lane, then 16 lanes, each piece then exact in float64.
    terms = np.abs(exact) @ np.abs(v).T.astype(np.float64)
    assert (np.abs(sums - exact @ v.T.astype(np.float64)) <= 64 * SINGLE_ROUNDING * terms).all()
    # The same as unmasking alone.
    alone = np.empty_like(out)
    assert not row_alone(result, mask.inverse_row, 0.125 * normal_of(mask), alone)
    np.testing.assert_allclose(out, alone, rtol=0, atol=float(16 * SINGLE_ROUNDING * size.max()))
    mask.unapply(result, np.array([2.0], np.float32), np.float32(0.25), alone)
    np.testing.assert_allclose(out, alone, rtol=0, atol=float(16 * SINGLE_ROUNDING * size.max()))


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (7, 513), (8, 511), (-1, 527)])
def test_what_is_not_finite_is_noted(
    kind: type[GeloProtection], value: float, place: tuple[int, int]
) -> None:
    mask = mask_of(kind, 3)
    result = np.ones((mask.s, 528), np.float32)
    result[place] = value
    out, sums = np.empty((1, 528), np.float32), np.empty((mask.s, 2))
    assert row_back(result, mask.inverse_row, 1.0, out, np.ones((2, 528), np.float32), sums)
    assert row_alone(result, mask.inverse_row, 1.0, out)
