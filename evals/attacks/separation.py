"""Blind source separation of masked operands: what the attacks on U = A·[H; S] share.

The d columns of an operand are samples of s mixed sources, its rows. An attack looks for a demixing
whose rows are rows of H, up to order, sign and scale. Whitening, solvers, scoring, and the floor:
the same scoring of random rotations of the same white mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from evals.attacks import separation_kernels as kernels
from evals.attacks.kept import kept
from evals.attacks.model import HEAD_LAYER, Op, Truth, View
from evals.attacks.public import PublicModel

Float32 = NDArray[np.float32]
Place = tuple[int, Op]
Solver = Callable[[Sequence[Float32], np.random.Generator], list[Float32]]

RECOVERED = 0.95
# A whitened mixture needs more samples than sources.
SAMPLES_PER_SOURCE = 2
# Mixtures of more rows are left out (decode blocks of many sequences laid end to end).
MAX_SOURCES = 96
# Random demixings for the floor: so many rows in all, and at most so many of each mixture.
FLOOR_ROWS, FLOOR_DRAWS = 400, 4
# JADE diagonalises the dominant cumulant matrices, so many per source (or all, if there are fewer).
DOMINANT_PER_SOURCE = 4
# Eigenvalues of the covariance below this fraction of the largest are float16 rounding.
_RANK_TOLERANCE = 1e-6
_MATRIX_BYTES = 256 << 20
_ICA_TOLERANCE = np.float32(1e-4)
# Rotations by less than this cost less than 10⁻⁵ of a cosine each.
_JACOBI_THRESHOLD = 4e-3
_JACOBI_SWEEPS = 40
_PUBLIC_SEQUENCES, _PUBLIC_LENGTH, _PUBLIC_SEED = 8, 64, 20_262


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One operand to separate.

    ``operand`` ``(s, d)`` is what a demixing is applied to, ``features`` ``(s, d)`` what it is
    learnt from, ``rows`` ``(n, d)`` the plaintext rows sought (for scoring).
    """

    operand: Float32
    features: Float32
    rows: Float32


def as_float(operand: NDArray[np.generic]) -> Float32:
    """An operand as numbers: float16 as it is, ring elements (uint32) as signed integers."""
    if operand.dtype == np.uint32:
        operand = operand.view(np.int32)
    return operand.astype(np.float32)


def places(view: View) -> list[Place]:
    """The offloads attacked: layer 0 qkv, gate_up and down of layer 2 and of layer 0.8·L.

    Those of them that were captured; if none was (the LM head alone), all that were.
    """
    captured = {(o.layer, o.op) for capture in view.captures[:1] for o in capture.offloads}
    deep = int(0.8 * view.model.config.num_layers)
    wanted: list[Place] = [(0, "qkv"), (2, "gate_up"), (2, "down"), (deep, "gate_up"), (deep, "down")]
    return [place for place in wanted if place in captured] or sorted(captured)


def label(place: Place) -> str:
    """A place as a key of the details."""
    layer, op = place
    return op if layer == HEAD_LAYER else f"layer{layer}.{op}"


def mixtures(view: View, truth: Truth, place: Place) -> list[Mixture]:
    """The mixtures of one place: of the prefill, or in the decode corpus of the first decode step.

    Left out: operands with fewer than 2·s columns (no whitening) and those of more than
    ``MAX_SOURCES`` rows.
    """
    forward = 1 if view.corpus == "decode" else 0
    found = []
    for capture, secret in zip(view.captures, truth.prompts, strict=True):
        for offload in capture.select(*place, forward):
            s, d = offload.operand.shape
            if d >= SAMPLES_PER_SOURCE * s and s <= MAX_SOURCES:
                operand = as_float(offload.operand)
                rows = secret.rows[forward, *place].astype(np.float32)
                found.append(Mixture(operand=operand, features=operand, rows=rows))
    return found


@dataclass(frozen=True, slots=True)
class Columns:
    """Public statistics of the columns of an offload: their means and deviations ``(d,)``."""

    mean: Float32
    deviation: Float32

    def equalise(self, mixture: Mixture) -> Mixture:
        """The mean's direction removed from the features and columns scaled to like deviation.

        Right multiplication commutes with the mask: (A·X)·R = A·(X·R). What all rows share hides
        what tells them apart.
        """
        direction = self.mean / max(float(np.linalg.norm(self.mean)), 1e-12)
        features = mixture.features
        features = features - np.outer(features @ direction, direction)
        return replace(mixture, features=(features / self.deviation).astype(np.float32))


def public_columns(model: PublicModel, wanted: Sequence[Place]) -> dict[Place, Columns]:
    """Column statistics from the public model on sequences of random tokens, the same for all attacks."""
    return kept(model, ("columns", tuple(wanted)), lambda: _columns(model, wanted))


def _columns(model: PublicModel, wanted: Sequence[Place]) -> dict[Place, Columns]:
    rng = np.random.default_rng(_PUBLIC_SEED)
    tokens = rng.integers(0, model.config.vocab_size, (_PUBLIC_SEQUENCES, _PUBLIC_LENGTH))
    passes = model.rows(tokens.tolist(), set(wanted))
    columns = {}
    for place in wanted:
        rows = np.concatenate([rows[place] for rows in passes])
        deviation = rows.std(axis=0)
        floor = max(0.1 * float(np.median(deviation)), 1e-12)
        columns[place] = Columns(rows.mean(axis=0), np.maximum(deviation, np.float32(floor)))
    return columns


def whiten(features: Float32) -> tuple[Float32, Float32]:
    """Features ``(s, d)`` to r ≤ s rows of unit covariance, and the ``(r, s)`` map that does it."""
    if not len(features):
        return features, np.zeros((0, 0), dtype=np.float32)
    centred = features - features.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh((centred @ centred.T / centred.shape[1]).astype(np.float64))
    kept = values > _RANK_TOLERANCE * values[-1]
    transform = (vectors[:, kept] / np.sqrt(values[kept])).T.astype(np.float32)
    return transform @ centred, transform


def _pad(arrays: Sequence[Float32]) -> tuple[Float32, NDArray[np.int64]]:
    ranks = np.array([len(array) for array in arrays], dtype=np.int64)
    out = np.zeros((len(arrays), int(ranks.max()), *arrays[0].shape[1:]), dtype=np.float32)
    for array, target in zip(arrays, out, strict=True):
        target[: len(array)] = array
    return out, ranks


def fast_ica(white: Sequence[Float32], rng: np.random.Generator, *, iterations: int = 60) -> list[Float32]:
    """Rotations ``(r, r)`` by symmetric FastICA, log cosh contrast, from random starts.

    Hyvärinen, IEEE TNN 10(3), 1999. Gaussian sources never settle: the kernel's patience or
    ``iterations`` ends those.
    """
    padded, ranks = _pad(white)
    width = int(ranks.max())
    rotations = np.zeros((len(white), width, width), dtype=np.float32)
    for rotation, r in zip(rotations, ranks, strict=True):
        rotation[:r, :r] = rng.standard_normal((r, r), dtype=np.float32)
    steps = np.zeros(len(white), dtype=np.int64)
    kernels.fast_ica(padded, ranks, rotations, iterations, _ICA_TOLERANCE, steps)
    return [rotation[:r, :r] for rotation, r in zip(rotations, ranks, strict=True)]


def cumulant_matrices(white: Float32) -> Float32:
    """Fourth-order cumulant matrices of white rows ``(r, d)``, packed: ``(r·(r + 1)/2, M)``.

    Of the set over an orthonormal basis of the symmetric matrices the dominant eigenmatrices, as in
    Cardoso & Souloumiac (1993, section 3.2), but four per source instead of one.
    """
    r, d = white.shape
    j, i = np.tril_indices(r)
    products = white[i] * white[j]
    products /= np.float32(np.sqrt(d))
    cumulants: Float32 = products @ products.T
    # White rows: E[x_i·x_j]·E[x_k·x_l] is 1 where i = j and k = l, the other two pairings where
    # {i, j} = {k, l}.
    diagonal = np.flatnonzero(i == j)
    cumulants[np.ix_(diagonal, diagonal)] -= np.float32(1)
    cumulants[np.diag_indices_from(cumulants)] -= np.where(i == j, 2, 1).astype(np.float32)
    weight = np.where(i == j, 1.0, np.sqrt(2.0)).astype(np.float32)
    cumulants *= weight
    count = DOMINANT_PER_SOURCE * r
    if count >= len(cumulants):
        return cumulants
    symmetric = weight[:, None] * cumulants
    basis: Float32 = symmetric[:, np.argsort(-np.linalg.norm(symmetric, axis=0), kind="stable")[:count]]
    for _ in range(2):
        basis = (symmetric @ basis).astype(np.float32)
        basis /= np.linalg.norm(basis, axis=0).astype(np.float32)
    orthonormal: Float32 = np.linalg.qr(basis)[0].astype(np.float32)
    return cumulants @ orthonormal


def joint_diagonalise(matrices: Sequence[Float32], *, sweeps: int = _JACOBI_SWEEPS) -> list[Float32]:
    """Rotations ``(r, r)`` that jointly diagonalise each packed set ``(r·(r + 1)/2, M)``."""
    sizes = np.array([len(packed) for packed in matrices])
    ranks = ((np.sqrt(8 * sizes + 1) - 1) / 2 + 0.5).astype(np.int64)
    counts = np.array([packed.shape[1] for packed in matrices])
    shape = (len(matrices), int(sizes.max()), int(counts.max()))
    batch = np.zeros(shape, dtype=np.float32)
    for packed, target in zip(matrices, batch, strict=True):
        target[: packed.shape[0], : packed.shape[1]] = packed
    rotations = np.zeros((len(matrices), int(ranks.max()), int(ranks.max())), dtype=np.float32)
    used = np.zeros(len(matrices), dtype=np.int64)
    kernels.joint_diagonalise(batch, ranks, counts, rotations, sweeps, _JACOBI_THRESHOLD, used)
    return [rotation[:r, :r] for rotation, r in zip(rotations, ranks, strict=True)]


def _chunks(white: Sequence[Float32]) -> Iterator[list[int]]:
    """Problems of like size together, each chunk's matrices within ``_MATRIX_BYTES``."""
    order = sorted(range(len(white)), key=lambda b: -len(white[b]))
    while order:
        entries = max(1, len(white[order[0]]) * (len(white[order[0]]) + 1) // 2)
        count = max(2, _MATRIX_BYTES // (4 * entries * entries))
        yield order[:count]
        order = order[count:]


def jade(white: Sequence[Float32], rng: np.random.Generator) -> list[Float32]:
    """Rotations ``(r, r)`` by JADE; draws nothing. Cardoso & Souloumiac, IEE Proc. F 140(6), 1993."""
    rotations: dict[int, Float32] = {}
    for chunk in _chunks(white):
        found = joint_diagonalise([cumulant_matrices(white[b]) for b in chunk])
        rotations.update(zip(chunk, found, strict=True))
    return [rotations[b] for b in range(len(white))]


def lagged_covariances(white: Float32, lags: Sequence[int]) -> Float32:
    """Symmetrised covariances of white rows ``(r, d)`` over column lags: ``(r·(r + 1)/2, M)``."""
    j, i = np.tril_indices(len(white))
    out = []
    for lag in lags:
        covariance = white[:, :-lag] @ white[:, lag:].T / np.float32(white.shape[1] - lag)
        out.append((0.5 * (covariance + covariance.T))[i, j])
    return np.stack(out, axis=1)


def aligned_cosines(recovered: Float32, rows: Float32) -> NDArray[np.float64]:
    """|cosine| of each of ``rows`` ``(n, d)`` with the recovered row the best assignment gives it.

    Hungarian: each of ``recovered`` ``(k, d)`` serves at most one; a row without partner scores 0.
    """
    scores = np.zeros(len(rows))
    if not len(recovered):
        return scores
    left = recovered / np.maximum(np.linalg.norm(recovered, axis=1, keepdims=True), 1e-30)
    right = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    cosines = np.abs(left @ right.T).astype(np.float64)
    partner, row = linear_sum_assignment(cosines, maximize=True)
    scores[row] = cosines[partner, row]
    return scores


def random_rotation(r: int, rng: np.random.Generator) -> Float32:
    """A Haar-random orthogonal ``(r, r)`` matrix."""
    q, upper = np.linalg.qr(rng.standard_normal((r, r)))
    return (q * np.sign(np.diag(upper))).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Separation:
    """|cosines| of data rows, one array per mixture, and the same of random demixing, per draw."""

    cosines: Sequence[NDArray[np.float64]]
    floors: Sequence[Sequence[NDArray[np.float64]]]

    def split(self) -> list[Separation]:
        """One for each mixture."""
        return [
            Separation([cosines], [[draw[index]] for draw in self.floors])
            for index, cosines in enumerate(self.cosines)
        ]

    @property
    def pooled(self) -> NDArray[np.float64]:
        """All rows together."""
        return np.concatenate(self.cosines)

    @property
    def p95(self) -> float:
        """The 95th percentile over rows."""
        return percentile(self.pooled)

    @property
    def floor(self) -> float:
        """The same of random demixing: mean over draws."""
        return float(np.mean([percentile(np.concatenate(draw)) for draw in self.floors]))

    @property
    def recovered(self) -> float:
        """The fraction of rows with |cosine| ≥ 0.95."""
        return float((self.pooled >= RECOVERED).mean())

    def interval(self, rng: np.random.Generator, resamples: int = 200) -> tuple[float, float] | None:
        """A 95 % bootstrap interval of ``p95``, resampling mixtures; None if there is but one."""
        count = len(self.cosines)
        if count < 2:
            return None
        draws = [
            percentile(np.concatenate([self.cosines[k] for k in rng.integers(0, count, count)]))
            for _ in range(resamples)
        ]
        low, high = np.quantile(draws, (0.025, 0.975))
        return float(low), float(high)


def percentile(cosines: NDArray[np.float64]) -> float:
    """The 95th percentile."""
    return float(np.quantile(cosines, 0.95))


def _floors(
    bases: Sequence[Float32], problems: Sequence[Mixture], rng: np.random.Generator
) -> list[list[NDArray[np.float64]]]:
    rows = sum(len(m.rows) for m in problems)
    return [
        [
            aligned_cosines(random_rotation(len(basis), rng) @ basis, m.rows)
            for basis, m in zip(bases, problems, strict=True)
        ]
        for _ in range(min(FLOOR_DRAWS, -(-FLOOR_ROWS // max(rows, 1))))
    ]


def as_seen(problems: Sequence[Mixture], rng: np.random.Generator) -> Separation:
    """Operand rows taken as they are; the floor is a random rotation of the operand."""
    operands = [m.operand for m in problems]
    return Separation(
        [aligned_cosines(m.operand, m.rows) for m in problems], _floors(operands, problems, rng)
    )


def separate(problems: Sequence[Mixture], solver: Solver, rng: np.random.Generator) -> Separation:
    """Whiten, demix with ``solver``, score."""
    whitened = [whiten(m.features) for m in problems]
    rotations = solver([white for white, _ in whitened], rng)
    bases = [transform @ m.operand for m, (_, transform) in zip(problems, whitened, strict=True)]
    cosines = [
        aligned_cosines(rotation @ basis, m.rows)
        for m, basis, rotation in zip(problems, bases, rotations, strict=True)
    ]
    return Separation(cosines, _floors(bases, problems, rng))


def planted(problems: Sequence[Mixture], solver: Solver, rng: np.random.Generator) -> float:
    """``p95`` of the solver on Laplacian sources in mixtures as large as two of ``problems``."""
    chosen = problems[:: max(1, len(problems) // 2)][:2]
    control = []
    for m in chosen:
        sources = rng.laplace(size=m.operand.shape).astype(np.float32)
        operand = random_rotation(len(sources), rng) @ sources
        control.append(Mixture(operand=operand, features=operand, rows=sources))
    return separate(control, solver, rng).p95
