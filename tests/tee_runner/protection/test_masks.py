"""The secret matrices: orthogonal, uniform, and applied as written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import hadamard

from tee_runner.protection.gaussian import standard_normals
from tee_runner.protection.gelo.base import SHIELD_ROWS, GeloProtection, Mask
from tee_runner.protection.gelo.haar import Haar, haar_matrix
from tee_runner.protection.gelo.hd3 import Hd3, Hd3Mask
from tee_runner.protection.gelo.kernels import operand_scale, row_scales
from tee_runner.protection.gelo.tiles import shield_size, tile_width

from .doubles import (
    GELO_SCHEMES,
    HALF_FLOOR,
    HALF_ROUNDING,
    SINGLE_ROUNDING,
    ExactTransport,
    Float32,
    Float64,
    key_of,
    matrix_of,
    scales_of,
    shield_of,
)

HAAR_SIZES = range(SHIELD_ROWS + 1, 301)
# Data rows of every HD3 size up to 1024: the fewest and the most.
HD3_ROWS = [1, 2, 3, 8, 9, 24, 25, 56, 57, 120, 121, 248, 249, 504, 505, 1016]
ONE = np.float32(1.0)


def new_mask(scheme: type[GeloProtection], n: int, key: int = 1) -> Mask:
    return scheme(ExactTransport(), key=key_of(key)).new_mask(n)


def unapply(mask: Mask, result: Float32) -> Float32:
    out = np.full((mask.n, result.shape[1]), np.nan, np.float32)
    rows = np.ascontiguousarray(result)
    assert mask.unapply(rows, np.ones(mask.n, np.float32), ONE, out) is False
    return out


def data_columns(mask: Mask) -> Float64:
    """The first n columns of A, through the kernel: Aᵀ·I, one column of I at a time."""
    return unapply(mask, np.eye(mask.s, dtype=np.float32)).T.astype(np.float64)


def hd3_reference(mask: Hd3Mask, columns: Float64) -> Float64:
    """A·columns in float64, by splitting Ĥ of 2048 and more into a Kronecker product."""
    small = 64
    inner, outer = hadamard(small, dtype=np.float64), hadamard(mask.s // small, dtype=np.float64)
    mixed = columns
    for signs in mask._signs:
        cube = mixed.reshape(mask.s // small, small, -1)
        mixed = np.einsum("ab,cd,bde->ace", outer, inner, cube, optimize=True).reshape(columns.shape)
        mixed = signs.astype(np.float64)[:, None] * mixed / np.sqrt(mask.s)
    return mixed


def test_haar_is_orthogonal_for_every_size() -> None:
    for s in HAAR_SIZES:
        mask = new_mask(Haar, s - SHIELD_ROWS)
        assert mask.s == s
        A = matrix_of(mask)
        assert np.max(np.abs(A.T @ A - np.eye(s))) < 1e-6
        columns = data_columns(mask)
        assert np.max(np.abs(columns.T @ columns - np.eye(mask.n))) < 1e-6
        assert np.max(np.abs(columns - A[:, : mask.n])) < 1e-6


@pytest.mark.parametrize("n", HD3_ROWS)
def test_hd3_is_orthogonal_up_to_1024(n: int) -> None:
    mask = new_mask(Hd3, n)
    assert mask.s >= n + SHIELD_ROWS
    assert mask.s & (mask.s - 1) == 0
    assert mask.s < 2 * (n + SHIELD_ROWS)
    A = matrix_of(mask)
    assert np.max(np.abs(A.T @ A - np.eye(mask.s))) < 1e-6
    columns = data_columns(mask)
    assert np.max(np.abs(columns.T @ columns - np.eye(n))) < 1e-6
    assert np.max(np.abs(columns - A[:, :n])) < 1e-6


@pytest.mark.parametrize("n", [1017, 2040, 2041, 4088, 4089, 8184])
def test_hd3_is_orthogonal_up_to_8192(n: int) -> None:
    mask = new_mask(Hd3, n)
    assert isinstance(mask, Hd3Mask)
    assert set(np.unique(mask._signs)) == {-1.0, 1.0}  # what makes the reference orthogonal
    probes = np.random.default_rng(n).standard_normal((mask.s, 48))
    probes /= np.linalg.norm(probes, axis=0)
    mixed = hd3_reference(mask, probes)
    np.testing.assert_allclose(np.linalg.norm(mixed, axis=0), 1.0, atol=1e-12)
    assert np.max(np.abs(unapply(mask, mixed.astype(np.float32)) - probes[:n])) < 1e-6


@pytest.mark.parametrize("scheme", GELO_SCHEMES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 24, 25, 100, 292])
def test_unit_rows_without_shield_show_the_mask(scheme: type[GeloProtection], n: int) -> None:
    mask = new_mask(scheme, n)
    operand = np.full((mask.s, n), 0x7E00, np.uint16)
    normals = np.ones(shield_size(n, mask.s, n), np.float32)
    mask.apply(
        np.eye(n, dtype=np.float32),
        np.ones(n, np.float32),
        normals,
        np.float32(0.0),
        np.float32(1024.0),
        operand,
    )
    A = matrix_of(mask)[:, :n]
    # 1024·A is rounded to float16 once; before that it is within a few float32 roundings.
    error = np.abs(operand.view(np.float16) / 1024.0 - A)
    assert (error <= HALF_ROUNDING * np.abs(A) + 32 * SINGLE_ROUNDING).all()


@pytest.mark.parametrize("scheme", GELO_SCHEMES)
@pytest.mark.parametrize("n", [1, 3, 8, 24, 25, 120, 280])
@pytest.mark.parametrize("d", [1, 15, 64, 65, 200, 576])
def test_operand_is_the_rounded_mix_of_rows_and_shield(scheme: type[GeloProtection], n: int, d: int) -> None:
    check_operand(scheme, n, d)


@pytest.mark.parametrize(("scheme", "n", "d"), [(Hd3, 1016, 200), (Hd3, 2000, 80), (Haar, 1030, 130)])
def test_operand_of_blocks_whose_tiles_are_narrow(scheme: type[GeloProtection], n: int, d: int) -> None:
    check_operand(scheme, n, d)


def check_operand(scheme: type[GeloProtection], n: int, d: int) -> None:
    generator = np.random.default_rng([n, d])
    mask = new_mask(scheme, n)
    k = mask.s - n
    rows = (generator.standard_normal((n, d)) * np.exp(generator.normal(0, 3, (n, 1)))).astype(np.float32)
    scales = np.empty(n, np.float32)
    mean = row_scales(rows, scales)
    expected_scales, expected_mean = scales_of(rows)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6)
    sigma = np.float32(4.0 * mean / np.sqrt(d))
    scale = np.float32(operand_scale(n, k, float(sigma)))
    # What lies behind the normals is poison: a kernel that reads on shows.
    size = shield_size(n, mask.s, d)
    normals = np.full(size + 65536, np.nan, np.float32)
    normals[:size] = generator.standard_normal(size)
    operand = np.full((mask.s, d), 0x7E00, np.uint16)
    mask.apply(rows, scales, normals[:size], sigma, scale, operand)

    block = np.concatenate(
        [rows * expected_scales[:, None], float(sigma) * shield_of(normals[:size], n, mask.s, d)]
    )
    A = hd3_reference(mask, block) if isinstance(mask, Hd3Mask) and mask.s >= 64 else matrix_of(mask) @ block
    expected = float(scale) * A
    norms = float(scale) * np.linalg.norm(block, axis=0)
    # Before the rounding to float16: a float32 dot product of s terms, or 3·log₂s stages of
    # additions, each one rounding of the column norm at worst; 4 for the scaling.
    steps = mask.s if scheme is Haar else 3 * np.log2(mask.s)
    single = (steps + 4) * SINGLE_ROUNDING * norms
    found = operand.view(np.float16).astype(np.float64)
    assert (
        np.abs(found - expected) <= HALF_ROUNDING * (np.abs(expected) + single) + HALF_FLOOR + single
    ).all()


@pytest.mark.parametrize("s", [9, 512, 1024, 1040, 2048, 4096, 8192, 16384])
def test_tiles_are_whole_vectors(s: int) -> None:
    width = tile_width(s)
    assert width % 16 == 0
    assert 16 <= width <= 64
    for d in (1, 32, 33, 576):
        assert shield_size(s - 8, s, d) == 8 * 32 * -(-d // 32)


@pytest.mark.parametrize("scheme", GELO_SCHEMES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 25, 120, 504])
def test_unapply_undoes_the_mask_and_the_scales(scheme: type[GeloProtection], n: int) -> None:
    generator = np.random.default_rng(n)
    mask = new_mask(scheme, n)
    block = generator.standard_normal((mask.s, 300))
    scales = (2.0 ** generator.integers(-20, 20, n)).astype(np.float32)
    out = np.empty((n, 300), np.float32)
    mixed = (matrix_of(mask) @ block).astype(np.float32)
    assert mask.unapply(mixed, scales, np.float32(0.25), out) is False
    norms = np.linalg.norm(block, axis=0)
    steps = mask.s if scheme is Haar else 3 * np.log2(mask.s)
    error = np.abs(out * scales[:, None] * 4.0 - block[:n])
    assert (error <= (steps + 8) * SINGLE_ROUNDING * norms).all()


def unfixed(normals: Float32, s: int) -> Float32:
    """QR as LAPACK gives it, without moving R's signs: not uniform."""
    return np.linalg.qr(normals.reshape(s, s).astype(np.float64))[0]


DRAWS, S = 4000, 12


def draws(make: Callable[[Float32, int], Float32]) -> Float64:
    stream = key_of(11).stream("haar")
    return np.stack([make(standard_normals(stream, S * S), S) for _ in range(DRAWS)]).astype(np.float64)


@pytest.fixture(scope="module")
def haar_draws() -> Float64:
    return draws(haar_matrix)


@pytest.fixture(scope="module")
def unfixed_draws() -> Float64:
    return draws(unfixed)


def trace_score(matrices: Float64) -> float:
    """Standard score of the mean trace: mean 0 and variance 1 under Haar measure."""
    return float(np.trace(matrices, axis1=1, axis2=2).mean() * np.sqrt(len(matrices)))


def column_pvalue(matrices: Float64, row: int) -> float:
    """Of one coordinate of the first column: (1 + A)/2 is Beta((s-1)/2, (s-1)/2) on the sphere."""
    half = (S - 1) / 2
    return float(stats.kstest((1 + matrices[:, row, 0]) / 2, stats.beta(half, half).cdf).pvalue)


def test_haar_entries_have_mean_zero_and_variance_one_over_s(haar_draws: Float64) -> None:
    # Var(a²) = 2(s-1)/(s²(s+2)); 144 cells each, so five deviations.
    means = haar_draws.mean(axis=0) * np.sqrt(DRAWS * S)
    assert np.max(np.abs(means)) < 5
    deviation = np.sqrt(2 * (S - 1) / (S**2 * (S + 2)) / DRAWS)
    assert np.max(np.abs((haar_draws**2).mean(axis=0) - 1 / S)) < 5 * deviation


def test_haar_trace_and_determinant_are_unbiased(haar_draws: Float64) -> None:
    assert abs(trace_score(haar_draws)) < 4
    assert abs(np.linalg.det(haar_draws).mean()) * np.sqrt(DRAWS) < 4


def test_haar_first_column_is_uniform_on_the_sphere(haar_draws: Float64) -> None:
    assert min(column_pvalue(haar_draws, row) for row in range(S)) > 1e-3 / S


def test_haar_is_invariant_under_a_fixed_rotation(haar_draws: Float64) -> None:
    rotation = haar_matrix(standard_normals(key_of(12).stream("fixed"), S * S), S)
    rotated = haar_draws @ rotation.astype(np.float64)
    assert abs(trace_score(rotated)) < 4
    assert column_pvalue(rotated, 0) > 1e-3


def test_the_same_statistics_reject_qr_without_the_sign_fix(unfixed_draws: Float64) -> None:
    assert abs(trace_score(unfixed_draws)) > 10
    assert column_pvalue(unfixed_draws, 0) < 1e-10
    assert abs(np.linalg.det(unfixed_draws).mean()) > 0.9


def test_hd3_entries_have_mean_zero_and_variance_one_over_s() -> None:
    protection = Hd3(ExactTransport(), key=key_of(13))
    count = 1000
    matrices = np.stack([matrix_of(protection.new_mask(8)) for _ in range(count)])
    s = matrices.shape[1]
    # Entries are bounded by 1, with variance 1/s; of a² it is at most its mean.
    assert np.max(np.abs(matrices.mean(axis=0))) < 5 / np.sqrt(s * count)
    assert np.max(np.abs((matrices**2).mean(axis=0) - 1 / s)) < 5 / np.sqrt(s * count)
    assert abs(np.trace(matrices, axis1=1, axis2=2).mean()) < 5 / np.sqrt(count)


def test_hd3_signs_are_independent_coins() -> None:
    protection = Hd3(ExactTransport(), key=key_of(14))
    signs = np.stack([protection.new_mask(56)._signs for _ in range(500)]).astype(np.float64)  # type: ignore[attr-defined]
    assert signs.shape == (500, 3, 64)
    limit = 5 / np.sqrt(500)
    assert np.max(np.abs(signs.mean(axis=0))) < limit
    # Every pair of the 192 signs of a mask: 18,336, each beyond five deviations with
    # probability 6e-7.
    flat = signs.reshape(500, -1)
    assert np.max(np.abs(flat.T @ flat / 500 - np.eye(192))) < limit


@pytest.mark.parametrize("scheme", GELO_SCHEMES)
@pytest.mark.parametrize("n", [1, 2, 5, 100])
def test_wipe_overwrites_the_mask(scheme: type[GeloProtection], n: int) -> None:
    mask = new_mask(scheme, n)
    held = [value for value in vars(mask).values() if isinstance(value, np.ndarray)]
    assert held
    assert all(array.any() for array in held)
    mask.wipe()
    assert not any(array.any() for array in held)


@pytest.mark.parametrize("scheme", GELO_SCHEMES)
def test_masks_of_one_stream_differ(scheme: type[GeloProtection]) -> None:
    protection = scheme(ExactTransport(), key=key_of(1))
    A, B = matrix_of(protection.new_mask(20)), matrix_of(protection.new_mask(20))
    other = matrix_of(new_mask(scheme, 20, key=2))
    # The angle between independent uniform matrices: tr(AᵀB) is about N(0, 1), of at most s.
    for left, right in [(A, B), (A, other), (B, other)]:
        assert abs(np.sum(left * right)) < 6
    np.testing.assert_array_equal(A, matrix_of(new_mask(scheme, 20)))
