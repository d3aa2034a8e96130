"""The solvers, the scoring and the floor of the separation attacks, on sources that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from evals.attacks import separation as bss
from evals.attacks.drivers.joint_diagonalisation import sobi

from .planted_mixtures import coloured, gaussian, laplacian


def uniform(n: int, d: int, rng: np.random.Generator) -> bss.Float32:
    return rng.uniform(-1, 1, (n, d)).astype(np.float32)


def mixed(sources: bss.Float32, rng: np.random.Generator) -> bss.Mixture:
    mixing = rng.standard_normal((len(sources), len(sources))).astype(np.float32)
    operand = mixing @ sources
    return bss.Mixture(operand=operand, features=operand, rows=sources)


@pytest.mark.parametrize("solver", [bss.fast_ica, bss.jade])
@pytest.mark.parametrize("sources", [laplacian, uniform])
def test_independent_sources_are_separated(solver, sources):
    rng = np.random.default_rng(1)
    found = bss.separate([mixed(sources(n, 3000, rng), rng) for n in (4, 9)], solver, rng)
    assert min(c.min() for c in found.cosines) >= 0.95
    assert found.recovered == 1.0
    assert found.floor < 0.95


def test_sobi_separates_sources_of_distinct_autocorrelation():
    rng = np.random.default_rng(2)
    found = bss.separate([mixed(coloured(5, 4000, rng), rng)], sobi, rng)
    assert found.pooled.min() >= 0.95


@pytest.mark.parametrize("solver", [bss.fast_ica, bss.jade, sobi])
def test_white_gaussian_sources_stay_at_the_floor(solver):
    rng = np.random.default_rng(3)
    found = bss.separate([mixed(gaussian(10, 1500, rng), rng) for _ in range(16)], solver, rng)
    spread = np.std([bss.percentile(np.concatenate(draw)) for draw in found.floors])
    assert abs(found.p95 - found.floor) < max(4 * spread, 0.05)
    assert found.recovered <= 0.02


@pytest.mark.parametrize("solver", [bss.fast_ica, bss.jade, sobi])
def test_a_result_does_not_depend_on_the_batch(solver):
    rng = np.random.default_rng(4)
    white = [bss.whiten(mixed(laplacian(n, 700, rng), rng).features)[0] for n in (3, 11, 7)]
    batched = solver(white, np.random.default_rng(5))
    serial_rng = np.random.default_rng(5)
    serial = [solver([z], serial_rng)[0] for z in white]
    for one, other in zip(batched, serial, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dominant_eigenmatrices_suffice():
    rng = np.random.default_rng(6)
    problem = mixed(laplacian(8, 6000, rng), rng)
    matrices = bss.cumulant_matrices(bss.whiten(problem.features)[0])
    assert matrices.shape == (36, 32)
    assert bss.separate([problem], bss.jade, rng).pooled.min() >= 0.95


def test_cumulant_matrices_are_the_fourth_order_cumulants():
    rng = np.random.default_rng(7)
    white, _ = bss.whiten(laplacian(4, 500, rng))
    delta = np.eye(4)
    full = np.einsum("it,jt,kt,lt->ijkl", white, white, white, white, optimize=True) / white.shape[1]
    full -= np.einsum("ij,kl->ijkl", delta, delta)
    full -= np.einsum("ik,jl->ijkl", delta, delta) + np.einsum("il,jk->ijkl", delta, delta)
    j, i = np.tril_indices(4)
    expected = full[i, j][:, i, j] * np.where(i == j, 1, np.sqrt(2))
    np.testing.assert_allclose(bss.cumulant_matrices(white), expected, atol=1e-4)


def test_joint_diagonalisation_finds_a_common_eigenbasis():
    rng = np.random.default_rng(8)
    basis = bss.random_rotation(6, rng)
    values = rng.standard_normal((5, 6))
    matrices = np.einsum("ki,mk,kj->ijm", basis, values, basis)
    j, i = np.tril_indices(6)
    (rotation,) = bss.joint_diagonalise([matrices[i, j].astype(np.float32)])
    np.testing.assert_allclose(np.abs(rotation @ basis.T).max(axis=1), 1, atol=1e-4)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(6), atol=1e-5)


def test_whitening_gives_unit_covariance_and_drops_dependent_rows():
    rng = np.random.default_rng(9)
    rows = laplacian(5, 400, rng)
    white, transform = bss.whiten(np.concatenate([rows, rows[:2] - rows[2:4]]))
    assert white.shape == (5, 400)
    assert transform.shape == (5, 7)
    np.testing.assert_allclose(white @ white.T / 400, np.eye(5), atol=1e-3)


def test_alignment_is_the_best_assignment_whatever_the_order_and_sign():
    rng = np.random.default_rng(10)
    rows = gaussian(4, 6, rng)
    recovered = gaussian(5, 6, rng)
    cosines = np.abs(recovered @ rows.T) / np.outer(
        np.linalg.norm(recovered, axis=1), np.linalg.norm(rows, axis=1)
    )
    best = max((cosines[list(order), range(4)] for order in itertools.permutations(range(5), 4)), key=np.sum)
    np.testing.assert_allclose(bss.aligned_cosines(recovered, rows), best, rtol=1e-5)
    exact = bss.aligned_cosines(-3 * rows[[2, 0, 3, 1]], rows)
    np.testing.assert_allclose(exact, 1, rtol=1e-5)


def test_rows_without_partner_score_nothing():
    rows = np.eye(3, 8, dtype=np.float32)
    np.testing.assert_array_equal(bss.aligned_cosines(rows[:1], rows), [1, 0, 0])
    np.testing.assert_array_equal(bss.aligned_cosines(rows[:0], rows), [0, 0, 0])


def test_ring_elements_are_signed_integers():
    operand = np.array([[1, 2**32 - 1, 2**31]], dtype=np.uint32)
    np.testing.assert_array_equal(bss.as_float(operand), np.array([[1, -1, -(2.0**31)]], dtype=np.float32))
    assert bss.as_float(np.array([[0.5]], dtype=np.float16)).dtype == np.float32


def test_random_rotations_are_orthogonal_and_differ():
    rng = np.random.default_rng(11)
    one, other = bss.random_rotation(7, rng), bss.random_rotation(7, rng)
    np.testing.assert_allclose(one @ one.T, np.eye(7), atol=1e-5)
    assert np.abs(one - other).max() > 0.1
