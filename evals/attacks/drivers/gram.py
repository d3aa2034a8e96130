"""Gram: what inner products of an operand's rows, and of its columns, say about the prompt.

A mask U = A·[H; S] with A orthogonal hides which row is which in UUᵀ = A·[H; S][H; S]ᵀ·Aᵀ, but keeps
its eigenvalues, and keeps UᵀU = HᵀH + SᵀS altogether. Shapes: s operand rows, n data rows, d width,
N candidate prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evals.attacks.drivers.nearest import describe_places, recovery_interval
from evals.attacks.kept import kept
from evals.attacks.model import Attack, Outcome, Report, Truth, View
from evals.attacks.subspace import Float32, Float64, unit_scaled, wire_values

# Candidate prompts, the true one among them.
CANDIDATES = 1000
# Share of a made-up candidate's tokens that are drawn anew.
_REPLACED = 0.25
# Candidates drawn for each that is wanted: very short prompts repeat.
_ATTEMPTS = 4
# Prompts that are attacked.
_PROMPTS = 128
_TINY = 1e-12


def normalised_gram(rows: NDArray[np.generic], size: int) -> Float64:
    """Row Gram ``(size, size)`` float64 of trace 1; zeros where ``rows`` ``(n, d)`` end."""
    values = wire_values(rows)
    out = np.zeros((size, size))
    out[: len(values), : len(values)] = values @ values.T
    return out / max(float(np.trace(out)), _TINY)


def gram_distance(operand: NDArray[np.generic], rows: Float32) -> float:
    """‖G(U) − G(H)‖ / ‖G(H)‖ of the trace-normalised row Grams, in the order they came.

    ``operand`` ``(s, d)``, ``rows`` ``(n, d)`` with norms as schemes scale them; the smaller Gram is
    filled up with zeros. 0 for the rows themselves, up to rounding.
    """
    size = max(len(operand), len(rows))
    own = normalised_gram(rows, size)
    return float(np.linalg.norm(normalised_gram(operand, size) - own) / np.linalg.norm(own))


def made_up(
    own: Sequence[int], others: Sequence[Sequence[int]], count: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Up to ``count`` distinct candidates as long as ``own``, which is the first.

    The rest are windows of ``others`` laid end to end in random order, a quarter of their tokens
    replaced: half of these by tokens of ``own``, so that length and vocabulary tell little.
    """
    n = len(own)
    order = rng.permutation(len(others))
    pool = np.concatenate([np.asarray(others[i], dtype=np.int64) for i in order])
    candidates = {tuple(int(t) for t in own): None}
    starts = rng.integers(0, len(pool), _ATTEMPTS * count)
    windows = pool[(starts[:, None] + np.arange(n)) % len(pool)]
    replaced = rng.random(windows.shape)
    for source, low in ((pool, 0.0), (np.asarray(own, dtype=np.int64), _REPLACED / 2)):
        chosen = (replaced >= low) & (replaced < low + _REPLACED / 2)
        windows[chosen] = rng.choice(source, int(chosen.sum()))
    for window in windows.tolist():
        if len(candidates) == count:
            break
        candidates[tuple(window)] = None
    return list(candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """Covariance of the vocabulary's rows: eigenvalues ``(d,)``, ascending, and vectors ``(d, d)``."""

    values: Float64
    vectors: Float64

    @classmethod
    def of(cls, dictionary: Float32) -> Background:
        """From the rows ``(V, d)`` of the whole vocabulary, scaled as schemes do."""
        rows = unit_scaled(dictionary)
        values, vectors = np.linalg.eigh((rows.T @ rows).astype(np.float64) / len(rows))
        return cls(values=np.maximum(values, 0.0), vectors=vectors)

    def whitening(self, shield: float) -> Float64:
        """Inverse square root ``(d, d)``, with isotropic energy of ``shield`` times the trace added."""
        level = (1e-3 + shield) * float(self.values.mean())
        whiten: Float64 = (self.vectors / np.sqrt(self.values + level)) @ self.vectors.T
        return whiten


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """N equally long prompts: ``rows`` ``(K, d)`` of their distinct tokens, ``index`` ``(N, n)`` into them.

    ``rows`` have norms as schemes scale them. Inner products are taken once per pair of distinct tokens.
    """

    rows: Float32
    index: NDArray[np.int64]

    @classmethod
    def of(cls, dictionary: Float32, prompts: Sequence[Sequence[int]]) -> Candidates:
        """From token lists and the rows ``(V, d)`` of the vocabulary."""
        tokens, index = np.unique(np.asarray(prompts, dtype=np.int64), return_inverse=True)
        return cls(rows=unit_scaled(dictionary[tokens]), index=index.reshape(len(prompts), -1))

    def grams(self, rows: Float32) -> Float64:
        """HHᵀ of every candidate ``(N, n, n)``, ``rows`` ``(K, d)`` in the place of its own."""
        pairs = (rows @ rows.T).astype(np.float64)
        grams: Float64 = pairs[self.index[:, :, None], self.index[:, None, :]]
        return grams


def column_scores(operand: NDArray[np.generic], candidates: Candidates, whiten: Float64) -> Float64:
    """How well each candidate's HᵀH fits UᵀU: ``(N,)`` float64, larger is better.

    Cosine between UᵀU and HᵀH, both whitened by ``whiten`` ``(d, d)`` and without their isotropic part: a
    matched filter for a known pattern in a known background, on which a candidate's energy or effective
    rank has no bearing.
    """
    white: Float32 = candidates.rows @ whiten.astype(np.float32)
    wire = (wire_values(operand) @ whiten).astype(np.float32)
    wire /= max(float(np.linalg.norm(wire)), _TINY)
    # ⟨UᵀU, HᵀH⟩ = ‖HUᵀ‖², and ‖HᵀH‖ = ‖HHᵀ‖: no d×d matrix per candidate.
    energies = ((white @ wire.T).astype(np.float64) ** 2).sum(axis=1)
    inner = energies[candidates.index].sum(axis=1)
    grams = candidates.grams(white)
    traces = np.trace(grams, axis1=1, axis2=2)
    d = white.shape[1]
    own = np.sqrt(np.maximum((grams**2).sum(axis=(1, 2)) - traces**2 / d, _TINY))
    scores: Float64 = (inner - traces / d) / own
    return scores


def row_scores(
    operand: NDArray[np.generic], candidates: Candidates, energy: float, rng: np.random.Generator
) -> tuple[Float64, Float64]:
    """How well each candidate's HHᵀ fits UUᵀ, row by row and by its spectrum: two of ``(N,)``.

    For the spectrum the attacker adds shield rows of its own, ``energy`` times the RMS norm, to every
    candidate, and compares logarithms of sorted eigenvalues. Larger is better.
    """
    count, n = candidates.index.shape
    s = len(operand)
    size = max(s, n)
    grams = candidates.grams(candidates.rows)
    traces = np.trace(grams, axis1=1, axis2=2)
    own = normalised_gram(operand, size)
    # ‖G − own‖² = ‖G‖² − 2⟨G, own⟩ + ‖own‖².
    shares = grams / np.maximum(traces, _TINY)[:, None, None]
    inner = np.einsum("nij,ij->n", shares, own[:n, :n])
    direct: Float64 = 2.0 * inner - (shares**2).sum(axis=(1, 2))
    joined = np.zeros((count, size, size))
    joined[:, :n, :n] = grams
    if s > n:
        d = candidates.rows.shape[1]
        shield = rng.standard_normal((s - n, d)) * energy * np.sqrt(traces.mean() / n / d)
        cross = (candidates.rows @ shield.T)[candidates.index]
        joined[:, :n, n:] = cross
        joined[:, n:, :n] = cross.transpose(0, 2, 1)
        joined[:, n:, n:] = shield @ shield.T
    values: Float64 = np.linalg.eigvalsh(joined)[:, -s:].astype(np.float64)
    theirs: Float64 = np.linalg.eigvalsh(own)[None, -s:].astype(np.float64)
    spectral: Float64 = -np.linalg.norm(_log_shape(values) - _log_shape(theirs), axis=1)
    return direct, spectral


def _log_shape(values: Float64) -> Float64:
    """Logarithms of eigenvalues ``(N, s)`` as shares of their sum; noise below 10⁻⁷ is cut off."""
    shares = values / np.maximum(values.sum(axis=1, keepdims=True), _TINY)
    logs: Float64 = np.log(np.maximum(shares, 1e-7))
    return logs


def identified(scores: Float64, rng: np.random.Generator, true: int = 0) -> bool:
    """Whether the true candidate has the best score; ties are decided at random."""
    best = np.flatnonzero(scores >= scores.max())
    return bool(rng.choice(best) == true)


class GramDistance(Attack):
    """How far the operand's row Gram is from the data's."""

    name = "gram-distance"
    title = "Gram distance"
    source = "This project's normalisation of the distance between Gram matrices"
    assumes = "Nothing: a distance to the secret itself, not an attack."
    measures = (
        "Mean relative Frobenius distance of the trace-normalised row Grams of U and H at layer 0. 0: every "
        "inner product between tokens is on the wire. `chance`: the distance of a Gaussian operand"
    )

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        distances, random = [], []
        for capture, secret in zip(view.captures, truth.prompts, strict=True):
            for offload in capture.select(0, "qkv", forward=0):
                rows = secret.rows.get((0, 0, "qkv"))
                if rows is None:
                    continue
                data = unit_scaled(rows)
                distances.append(gram_distance(offload.operand, data))
                random.append(gram_distance(rng.standard_normal(offload.operand.shape), data))
        progress(1.0)
        if not distances:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no operand of the first layer's qkv; {describe_places(view)}",
            )  # fmt: skip
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=float(np.mean(distances)),
            chance=float(np.mean(random)),
            details={"smallest": min(distances), "largest": max(distances)},
        )


class GramFingerprint(Attack):
    """Which of 1,000 candidate prompts an operand belongs to, by its Gram matrices."""

    name = "gram-fingerprint"
    title = "Gram fingerprint"
    source = (
        "This project, from a property of the GELO paper's mask: an orthogonal A keeps UᵀU = HᵀH + SᵀS and "
        "the eigenvalues of UUᵀ"
    )
    assumes = "Public weights, the layer-0 operand, and 1,000 candidate prompts with the true one among them."
    measures = (
        "Fraction of prompts whose true text scores best of 1,000 equally long candidates by the column "
        "Gram UᵀU (whitened matched filter); details: by the row Gram as it stands, and by its spectrum. "
        "`chance` is the larger of 1/1,000 and what Gaussian operands give"
    )

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`. About 0.1 s per prompt of 32 tokens."""
        texts = [secret.tokens[0][: secret.prompt_lengths[0]] for secret in truth.prompts]
        found: dict[str, list[bool]] = {"column Gram": [], "row Gram": [], "row-Gram spectrum": []}
        nothing: list[bool] = []
        counts = []
        energy = float(view.parameters.get("shield_energy", 0.0))
        background = kept(view.model, ("background",), lambda: Background.of(view.model.dictionary))
        for index, capture in enumerate(view.captures[:_PROMPTS]):
            operands = capture.select(0, "qkv", forward=0)
            others = [t for t in texts if t != texts[index]]
            if not operands or not others:
                continue
            candidates = made_up(texts[index], others, CANDIDATES, rng)
            counts.append(len(candidates))
            operand = operands[0].operand
            prepared = Candidates.of(view.model.dictionary, candidates)
            extra = max(0, len(operand) - len(texts[index]))
            whiten = background.whitening(extra * energy**2 / len(texts[index]))
            direct, spectral = row_scores(operand, prepared, energy, rng)
            found["column Gram"].append(identified(column_scores(operand, prepared, whiten), rng))
            found["row Gram"].append(identified(direct, rng))
            found["row-Gram spectrum"].append(identified(spectral, rng))
            random = rng.standard_normal(operand.shape)
            nothing.append(identified(column_scores(random, prepared, whiten), rng))
            progress((index + 1) / min(_PROMPTS, len(view.captures)))
        hits = found["column Gram"]
        if not hits:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no operand of the first layer's qkv; {describe_places(view)}",
            )  # fmt: skip
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=float(np.mean(hits)),
            chance=max(float(np.mean(nothing)), float(np.mean([1.0 / count for count in counts]))),
            interval=recovery_interval([np.asarray([hit]) for hit in hits], rng),
            details={f"identified by {name}": float(np.mean(h)) for name, h in found.items()}
            | {"candidates": float(np.mean(counts)), "chance if all were alike": 1.0 / CANDIDATES},
        )
