"""The DCT-IV cascade at every size: orthogonal, as scipy computes it, and undone exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dct

from tee_runner.protection.gelo.auto import MAX_PADDING, Auto
from tee_runner.protection.gelo.base import SHIELD_ROWS
from tee_runner.protection.gelo.dct4 import (
    DENSE_ROWS,
    Dct4,
    Dct4DenseMask,
    Dct4Mask,
    cascade_matrix,
    dct4_matrix,
)
from tee_runner.protection.gelo.dct4_plan import public_plan
from tee_runner.protection.gelo.fourier import LARGEST_PRIME, factors, plan, space_floats, transform
from tee_runner.protection.gelo.hd3 import Hd3Mask, draw_signs
from tee_runner.protection.gelo.tiles import shield_size

from .doubles import (
    HALF_FLOOR,
    HALF_ROUNDING,
    SINGLE_ROUNDING,
    ExactTransport,
    Float32,
    Float64,
    dct4_reference,
    key_of,
)

# Powers of two, smooth, twice a prime, a prime, products of large primes.
LARGE = [512, 729, 1018, 1021, 1155, 2047, 2048, 2056, 3125, 4096, 4094, 4807, 8186, 8190, 8191, 8192]
ONE = np.float32(1.0)


def mask_of(s: int, key: int = 1) -> Dct4Mask:
    return Dct4Mask(Dct4(ExactTransport(), key=key_of(key)), s - SHIELD_ROWS)


def unapply(mask: Dct4Mask | Dct4DenseMask, result: Float64) -> Float32:
    out = np.full((mask.n, result.shape[1]), np.nan, np.float32)
    answer = np.ascontiguousarray(result, dtype=np.float32)
    assert mask.unapply(answer, np.ones(mask.n, np.float32), ONE, out) is False
    return out


def terms_of(length: int) -> int:
    """Terms that one transform adds up: p per prime factor, or two transforms and the chirps."""
    found = factors(length)
    if max(found, default=1) > LARGEST_PRIME:
        return 2 * 4 * (2 * length).bit_length()
    return sum(p if p > 8 else 4 for p in found)


def rounding(s: int) -> float:
    """Float32 error of a cascade relative to the norm of a column, per element.

    Each of three transforms is log₂s stages or, for a prime factor p, sums of (p-1)/2 products.
    The roundings are independent and of random sign, so they add up as square roots; each is of a
    partial sum below the column's norm. A factor 4 covers the largest of many elements.
    """
    terms = terms_of(s if s % 2 else s // 2)
    return 4 * float(np.sqrt(3 * (terms + 16))) * SINGLE_ROUNDING


@pytest.mark.parametrize("s", [1, 2, 9, 16, 48])
def test_matrix_is_scipys(s: int) -> None:
    C = dct4_matrix(s)
    np.testing.assert_allclose(C, dct(np.eye(s), type=4, norm="ortho", axis=0), atol=1e-14)
    np.testing.assert_allclose(C @ C, np.eye(s), atol=1e-13)


@pytest.mark.parametrize(
    "length", [*range(1, 41), 49, 97, 121, 143, 160, 256, 374, 599, 601, 1028, 1214, 1331, 4096]
)
def test_transform_is_the_dft(length: int) -> None:
    generator = np.random.default_rng(length)
    x = generator.standard_normal((length, 2, 16)).astype(np.float32)
    tiles = [x.copy().ravel(), np.full(x.size, np.nan, np.float32)]
    passes = plan(length)
    space = np.full(space_floats(passes, 16), np.nan, np.float32)
    found = tiles[int(transform(*tiles, 16, length, passes, space))].reshape(length, 2, 16)
    exact = np.fft.fft(x[:, 0].astype(np.float64) + 1j * x[:, 1].astype(np.float64), axis=0)
    norms = np.linalg.norm(x.astype(np.float64), axis=(0, 1)) * np.sqrt(length)
    error = np.abs(found[:, 0] + 1j * found[:, 1] - exact)
    terms = terms_of(length)
    assert (error <= 4 * np.sqrt(terms + 8) * SINGLE_ROUNDING * norms).all()


@settings(max_examples=200, deadline=None)
@given(length=st.integers(1, 20_000))
def test_factors_multiply_to_the_length(length: int) -> None:
    found = factors(length)
    assert np.prod(found, dtype=np.int64) == length
    large = [p for p in found if p > 8]
    assert found[len(found) - len(large) :] == large  # last, where they need no twiddles
    assert all(p % q for p in large for q in range(2, int(p**0.5) + 1))


def test_every_size_to_300_is_orthogonal_and_the_cascade() -> None:
    for s in range(SHIELD_ROWS + 1, 301):
        mask = mask_of(s)
        assert mask.s == s
        # Aᵀ·I: the first n columns of A, through the kernel.
        columns = unapply(mask, np.eye(s)).T.astype(np.float64)
        assert np.max(np.abs(columns.T @ columns - np.eye(mask.n))) < 1e-6
        A = dct4_reference(mask._signs, np.eye(s))
        assert np.max(np.abs(columns - A[:, : mask.n])) < 1e-6
        if s <= DENSE_ROWS:
            assert np.max(np.abs(cascade_matrix(mask._signs) - A)) < SINGLE_ROUNDING


@pytest.mark.parametrize("s", LARGE)
def test_large_sizes_are_orthogonal(s: int) -> None:
    mask = mask_of(s)
    assert set(np.unique(mask._signs)) == {-1.0, 1.0}
    probes = np.random.default_rng(s).standard_normal((s, 80))
    probes /= np.linalg.norm(probes, axis=0)
    mixed = dct4_reference(mask._signs, probes)
    np.testing.assert_allclose(np.linalg.norm(mixed, axis=0), 1.0, atol=1e-12)
    assert np.max(np.abs(unapply(mask, mixed) - probes[: mask.n])) < 1e-6


@pytest.mark.parametrize("s", [9, 10, 47, 48, 49, 50, 97, 256, 257, 300, 1021, 1030, 2056])
@pytest.mark.parametrize("d", [1, 31, 33, 112, 160])
def test_operand_is_the_rounded_mix(s: int, d: int) -> None:
    generator = np.random.default_rng([s, d])
    mask = mask_of(s)
    rows = generator.standard_normal((mask.n, d)).astype(np.float32)
    size = shield_size(mask.n, s, d)
    normals = np.full(size + 4096, np.nan, np.float32)  # poison behind the end
    normals[:size] = generator.standard_normal(size)
    operand = np.full((s, d), 0x7E00, np.uint16)
    scales = (2.0 ** generator.integers(-3, 3, mask.n)).astype(np.float32)
    mask.apply(rows, scales, normals[:size], np.float32(0.5), np.float32(16.0), operand)

    shield = 0.5 * normals[:size].reshape(SHIELD_ROWS, -1)[:, :d].astype(np.float64)
    block = np.concatenate([rows * scales[:, None].astype(np.float64), shield])
    expected = 16.0 * dct4_reference(mask._signs, block)
    single = 16.0 * rounding(s) * np.linalg.norm(block, axis=0)
    error = np.abs(operand.view(np.float16).astype(np.float64) - expected)
    assert (error <= HALF_ROUNDING * (np.abs(expected) + single) + HALF_FLOOR + single).all()


@settings(max_examples=60, deadline=None)
@given(s=st.integers(SHIELD_ROWS + 1, 700), d=st.integers(1, 130), seed=st.integers(0, 2**32 - 1))
def test_unapply_undoes_the_mask(s: int, d: int, seed: int) -> None:
    mask = mask_of(s, key=seed)
    block = np.random.default_rng(seed).standard_normal((s, d))
    error = np.abs(unapply(mask, dct4_reference(mask._signs, block)) - block[: mask.n])
    # The answer's rounding to float32 is one of the roundings.
    assert (error <= rounding(s) * np.linalg.norm(block, axis=0)).all()


def test_small_masks_are_multiplied_out_and_large_ones_are_not() -> None:
    protection = Dct4(ExactTransport(), key=key_of(1))
    assert isinstance(protection.new_mask(DENSE_ROWS - SHIELD_ROWS), Dct4DenseMask)
    assert isinstance(protection.new_mask(DENSE_ROWS - SHIELD_ROWS + 1), Dct4Mask)
    # Both kinds take the same signs from the same stream.
    dense, fast = Dct4(ExactTransport(), key=key_of(3)), Dct4(ExactTransport(), key=key_of(3))
    left = Dct4DenseMask(dense, 30)._mask[:38].astype(np.float64)
    right = dct4_reference(Dct4Mask(fast, 30)._signs, np.eye(38))
    assert np.max(np.abs(left - right)) < SINGLE_ROUNDING


@pytest.mark.parametrize("s", [9, 40, 257, 2056])
def test_plans_are_public_and_shared(s: int) -> None:
    assert public_plan(s) is public_plan(s)
    signs = draw_signs(key_of(1).stream("a"), s)
    assert signs.shape == (3, s)
    assert sorted(public_plan(s).order) == list(range(s))


def test_auto_pads_by_at_most_the_limit() -> None:
    protection = Auto(ExactTransport(), key=key_of(1))
    for n in range(1, 3000):
        exact = n + SHIELD_ROWS
        padded = 1 << (exact - 1).bit_length()
        expected = padded if padded <= MAX_PADDING * exact else exact
        assert Auto.block_rows(n) == expected
    assert isinstance(protection.new_mask(2), Hd3Mask)  # 16 rows for 10: exactly 1.6
    assert isinstance(protection.new_mask(1), Dct4DenseMask)  # 16 for 9
    assert isinstance(protection.new_mask(2041), Dct4Mask)  # 4096 for 2049
    assert isinstance(protection.new_mask(4088), Hd3Mask)
    assert Auto.operand_rows([1, 0, 2, 100]) == 9 + 16 + 128
