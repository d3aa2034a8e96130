"""The distinguishing game: which of two chosen prompts does the worker see?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evals.attacks.classifiers import Float64, Labels, play, roc
from evals.attacks.model import Attack, CorpusName, Curve, Offload, Outcome, Plot, Report, Truth, View

# So many of the first offloads are used: an attacker who chose the prompts knows the plaintext of all.
_OFFLOADS = 5
_DIRECTIONS = 8
_SMALL = 1e-12


class Distinguish(Attack):
    """Two prompts of equal length, many captures of either under fresh secrets, one classifier."""

    name = "distinguish"
    title = "Distinguishing game"
    source = "IND-CPA as a game; Goldwasser and Micali, 1984"
    assumes = (
        "chooses two prompts of equal length, may encrypt them under fresh secrets as often as he likes; "
        "public weights"
    )
    measures = "advantage 2·accuracy - 1 on held-out captures"
    corpora: ClassVar[tuple[CorpusName, ...]] = ("game",)

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`. The labels of the training half are the attacker's own choice."""
        pair, labels = chosen_prompts(truth)
        first = view.captures[0].offloads if view.captures else ()
        places = [
            (o.layer, o.op) for o in first
            if o.forward == 0 and all(c.select(o.layer, o.op, 0) for c in view.captures)
        ][:_OFFLOADS]  # fmt: skip
        reason = ""
        if len(pair) != 2 or len(pair[0]) != len(pair[1]):
            reason = f"the captures are of {len(pair)} prompts, not of two of equal length"
        elif min(np.bincount(labels, minlength=2)) < 4:
            reason = f"{np.bincount(labels, minlength=2).tolist()} captures of the two prompts are too few"
        elif not places:
            reason = "the captures have no offload of the prefill in common"
        if reason:
            return Outcome(attack=self.name, measure=self.measures, applicable=False, reason=reason)
        candidates = view.model.rows(pair, set(places))
        bytes_: list[Float64] = []
        statistics, gram, residuals = [], [], []
        # The LM head sees the last position only.
        references = [
            _Reference([c[place][-1:] if place[1] == "lm_head" else c[place] for c in candidates])
            for place in places
        ]
        for i, capture in enumerate(view.captures):
            offloads = [capture.select(*place, 0)[0] for place in places]
            bytes_.append(_wire_bytes(offloads[0]))
            parts = [_features(o, r) for o, r in zip(offloads, references, strict=True)]
            statistics.append(np.concatenate([p[0] for p in parts]))
            gram.append(np.concatenate([p[1] for p in parts]))
            residuals.append(np.concatenate([p[2] for p in parts]))
            progress(0.7 * (i + 1) / len(view.captures))
        features = {
            "wire bytes": _stacked(bytes_),
            "byte histogram": np.stack([np.bincount(b.astype(np.int64), minlength=256) for b in bytes_])
            * 1.0,
            "statistics": np.stack(statistics),
            "column Gram": np.stack(gram),
            "row space": np.stack(residuals),
        }
        features["all statistics"] = np.hstack(
            [features["statistics"], features["column Gram"], features["row space"]]
        )
        game = play(features, labels, rng, lambda done: progress(0.7 + 0.3 * done))
        false, true = roc(game.scores, game.labels)
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=game.value,
            chance=0.0,
            interval=game.interval,
            details={
                "held-out captures": float(game.held_out),
                "training captures": float(len(labels) - game.held_out),
                **{f"advantage: {pair}": value for pair, value in game.advantages.items()},
            },
            plots=(
                Plot(
                    title=f"Distinguishing game, {game.chosen}",
                    x_label="false positive rate",
                    y_label="true positive rate",
                    curves=(
                        Curve(label="held-out captures", x=false.tolist(), y=true.tolist()),
                        Curve(label="chance", x=(0.0, 1.0), y=(0.0, 1.0)),
                    ),
                ),
            ),
            notes=(
                f"chosen by cross-validation on the training half: {game.chosen}",
                "the other pairs' advantages are not corrected for there being several",
            ),
        )


def chosen_prompts(truth: Truth) -> tuple[list[tuple[int, ...]], Labels]:
    """The distinct prompts of the captures, sorted, and which of them each capture is of."""
    prompts = [p.tokens[0][: p.prompt_lengths[0]] for p in truth.prompts]
    distinct = sorted(set(prompts))
    return distinct, np.array([distinct.index(p) for p in prompts], dtype=np.int64)


def numbers(operand: NDArray[np.generic]) -> Float64:
    """The operand as reals; ring elements are centred and scaled to [-1/2, 1/2)."""
    if np.issubdtype(operand.dtype, np.unsignedinteger):
        bits = 8 * operand.dtype.itemsize
        return operand.astype(np.float64) / 2.0**bits - 0.5
    return operand.astype(np.float64)


class _Reference:
    """What the two prompts look like at one place: rows of either, and directions apart."""

    def __init__(self, rows: Sequence[NDArray[np.float32]]) -> None:
        unit = [r.astype(np.float64) for r in rows]
        self.rows = [r / np.maximum(np.linalg.norm(r, axis=1, keepdims=True), _SMALL) for r in unit]
        difference = self.rows[0] - self.rows[1]
        mean = self.rows[0].mean(0) - self.rows[1].mean(0)
        axes = [np.linalg.svd(m, full_matrices=False)[2][:_DIRECTIONS] for m in (*self.rows, difference)]
        directions = np.vstack([difference, mean, *axes])
        sizes = np.linalg.norm(directions, axis=1)
        self.directions = directions[sizes > _SMALL] / sizes[sizes > _SMALL, None]


def _features(offload: Offload, reference: _Reference) -> tuple[Float64, Float64, Float64]:
    """Simple statistics, column-Gram projections, and row-space residuals of one operand."""
    U = numbers(offload.operand)
    d = U.shape[1]
    norms = np.sort(np.linalg.norm(U, axis=1))
    _, sizes, basis = np.linalg.svd(U, full_matrices=False)
    centred = U - U.mean()
    spread = max(float(centred.std()), _SMALL)
    kurtosis = np.sort(np.mean((U - U.mean(1, keepdims=True)) ** 4, 1) / np.maximum(U.var(1), _SMALL) ** 2)
    energy = np.sum(U**2, 0)
    total = max(float(energy.sum()), _SMALL)
    statistics = np.concatenate([
        norms, kurtosis, sizes, np.log(energy + _SMALL), energy / total,
        [U.mean(), spread, np.mean(centred**3) / spread**3, np.mean(centred**4) / spread**4,
         np.abs(U).max(), np.log(total)],
    ])  # fmt: skip
    # v'(U'U)v by directions: an orthogonal A leaves U'U = H'H + S'S.
    along = np.sum((U @ reference.directions.T) ** 2, 0)
    gram = np.concatenate([along / total * d, np.log(along + _SMALL)])
    kept = sizes > 1e-6 * sizes[0]
    residuals = []
    for rows in reference.rows:
        coordinates = rows @ basis[kept].T
        if kept.sum() < d:
            # Distance of each unit row to rowspace(U).
            distance = np.sqrt(np.maximum(1 - np.sum(coordinates**2, 1), _SMALL))
        else:
            # The row space is everything: leverage h'(U'U)^-1 h instead.
            distance = np.sum((coordinates / sizes[kept]) ** 2, 1)
        residuals.append(np.log(distance))
    first, second = residuals
    contrast = np.array(
        [first.mean() - second.mean(), first.max() - second.max(), first.min() - second.min()]
    )
    return statistics, gram, np.concatenate([first, second, contrast])


def _wire_bytes(offload: Offload) -> Float64:
    return np.frombuffer(np.ascontiguousarray(offload.operand).tobytes(), dtype=np.uint8).astype(np.float64)


def _stacked(rows: Sequence[Float64]) -> Float64:
    """Rows of possibly different lengths as one matrix, zeros after the shorter ones."""
    out = np.zeros((len(rows), max(map(len, rows))))
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
