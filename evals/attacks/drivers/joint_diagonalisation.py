"""Attack 7: joint diagonalisation over several passes of the same text under fresh masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from evals.attacks import separation as bss
from evals.attacks.model import Attack, CorpusName, Curve, Outcome, Plot, Report, Truth, View
from evals.attacks.separation_tally import Tally

LAGS = tuple(range(1, 11))
# Shortest texts first.
_TEXTS = 1
# Passes joined. Of texts of some hundred rows fewer, and at one place only: the one of most columns.
_MOST_PASSES, _LONG_PASSES = 16, 4
_ICA_ITERATIONS = 40
_SWEEPS = 15
_WIDE: bss.Place = (0, "down")


def common_row_space(operands: Sequence[bss.Float32]) -> bss.Float32:
    """An orthonormal basis ``(r, d)`` of what the row spaces of ``operands`` ``(s, d)`` share.

    Eigenvectors of the mean projector: rows of H, present in every pass, have eigenvalue 1, shield
    rows, fresh in each, about 1/T (MAXVAR canonical correlation; Kettenring 1971). With T = 1 all
    of the row space.
    """
    bases = []
    for operand in operands:
        _, values, right = np.linalg.svd(operand.astype(np.float64), full_matrices=False)
        bases.append(right[values > 1e-3 * values[0]])
    if len(bases) == 1:
        whole: bss.Float32 = bases[0].astype(np.float32)
        return whole
    _, values, right = np.linalg.svd(np.concatenate(bases), full_matrices=False)
    # Squared singular values of the stacked bases are T times the mean projector's eigenvalues.
    share = values**2 / len(bases)
    common: bss.Float32 = right[share > 0.5 * (1 + 1 / len(bases))].astype(np.float32)
    return common


def _places(view: View) -> list[bss.Place]:
    """As of the other separation attacks; where of layer 2 nothing was captured, the widest of layer 0."""
    places = bss.places(view)
    captured = {(o.layer, o.op) for capture in view.captures[:1] for o in capture.offloads}
    return places if (2, "down") in captured or _WIDE not in captured else [*places, _WIDE]


def sobi(white: Sequence[bss.Float32], rng: np.random.Generator) -> list[bss.Float32]:
    """Rotations ``(r, r)`` by SOBI: lagged covariances over the columns, jointly diagonalised."""
    return bss.joint_diagonalise([bss.lagged_covariances(z, LAGS) for z in white], sweeps=_SWEEPS)


def fast_ica(white: Sequence[bss.Float32], rng: np.random.Generator) -> list[bss.Float32]:
    """FastICA within the time of this attack."""
    return bss.fast_ica(white, rng, iterations=_ICA_ITERATIONS)


def stacked(operands: Sequence[bss.Float32], rows: bss.Float32, rng: np.random.Generator) -> bss.Separation:
    """One demixing for all passes: it exists only if the mask is used again.

    The first pass is whitened; the lagged covariances of every pass, in its coordinates, are jointly
    diagonalised. Scored on the first pass.
    """
    first = bss.Mixture(operand=operands[0], features=operands[0], rows=rows)
    _, transform = bss.whiten(first.features)

    def solve(white: Sequence[bss.Float32], rng: np.random.Generator) -> list[bss.Float32]:
        centred = [u - u.mean(axis=1, keepdims=True) for u in operands[1:]]
        sets = [bss.lagged_covariances(z, LAGS) for z in (white[0], *(transform @ u for u in centred))]
        return bss.joint_diagonalise([np.concatenate(sets, axis=1)], sweeps=_SWEEPS)

    return bss.separate([first], solve, rng)


class JointDiagonalisation(Attack):
    """SOBI over T passes, by one demixing for all and in the row space they share."""

    name = "jd"
    title = "Joint diagonalisation over passes (SOBI)"
    source = (
        "Belouchrani, Abed-Meraim, Cardoso & Moulines, A blind source separation technique using "
        "second-order statistics, IEEE TSP 45(2), 1997; common row space: Kettenring, Biometrika 58(3), 1971"
    )
    assumes = (
        "T captures of the same text under fresh masks, with at least two columns per operand row: the "
        "game's prompts, and the long one that is captured several times."
    )
    measures = (
        "95th percentile of |cosine| between data rows and recovered rows, best assignment, at the largest "
        "T; the curve over T is flat where fresh masks give the attacker nothing. Chance: random demixing."
    )
    corpora: ClassVar[tuple[CorpusName, ...]] = ("long", "game")

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        measure = "p95 |cosine|"
        groups: dict[int, list[int]] = {}
        for index, capture in enumerate(view.captures):
            groups.setdefault(capture.prompt, []).append(index)
        repeated = [group[:_MOST_PASSES] for group in groups.values() if len(group) > 1]
        if not repeated:
            reason = f"no text was captured twice ({len(groups)} texts, {len(view.captures)} captures)"
            return Outcome(attack=self.name, measure=measure, applicable=False, reason=reason)
        tally, curves = Tally(), dict[str, dict[int, float]]()
        attacked, shapes = [], set()
        for place in _places(view):
            usable = []
            for group in repeated:
                operands = [bss.as_float(view.captures[i].select(*place, 0)[0].operand) for i in group]
                shapes.add(operands[0].shape)
                if all(u.shape[1] >= bss.SAMPLES_PER_SOURCE * u.shape[0] for u in operands):
                    usable.append((operands, truth.prompts[group[0]].rows[0, *place]))
            usable.sort(key=lambda item: len(item[1]))
            attacked += [(place, *item) for item in usable[:_TEXTS]]
        if attacked and len(attacked[0][1][0]) > bss.MAX_SOURCES:
            widest = max(attacked, key=lambda item: item[1][0].shape[1])
            attacked = [(widest[0], widest[1][:_LONG_PASSES], widest[2])]
        if not attacked:
            found = ", ".join(f"{s}x{d}" for s, d in sorted(shapes))
            reason = f"whitening needs d >= {bss.SAMPLES_PER_SOURCE}·s; shapes of repeated texts: {found}"
            return Outcome(attack=self.name, measure=measure, applicable=False, reason=reason)
        for done, (place, operands, rows) in enumerate(attacked):
            self._attack(place, operands, rows, tally, curves, rng)
            progress((done + 1) / len(attacked))
        plot = Plot(
            title="Cosine against the number of passes",
            x_label="passes T",
            y_label="p95 |cosine|",
            curves=[Curve(label=key, x=list(curve), y=list(curve.values())) for key, curve in curves.items()],
        )
        return tally.outcome(self.name, measure, rng, plots=(plot,))

    def _attack(
        self,
        place: bss.Place,
        operands: list[bss.Float32],
        rows: bss.Float32,
        tally: Tally,
        curves: dict[str, dict[int, float]],
        rng: np.random.Generator,
    ) -> None:
        between = (2, 4) if len(operands[0]) <= bss.MAX_SOURCES else ()
        passes = sorted({1, *(t for t in between if t < len(operands)), len(operands)})
        first = bss.Mixture(operand=operands[0], features=operands[0], rows=rows)
        tally.add(place, "as seen", bss.as_seen([first], rng))
        bases = [common_row_space(operands[:t]) for t in passes]
        shared = [bss.Mixture(operand=basis, features=basis, rows=rows) for basis in bases]
        found = {
            "one demixing, SOBI": [stacked(operands[:t], rows, rng) for t in passes],
            "common row space, SOBI": bss.separate(shared, sobi, rng).split(),
        }
        ends = [shared[0], shared[-1]]
        ica = bss.separate(ends, fast_ica, rng).split()
        for name, separations in found.items():
            self._note(place, name, passes, separations, tally, curves)
        self._note(place, "common row space, FastICA", [1, len(operands)], ica, tally, curves)
        tally.control(place, bss.planted(shared[-1:] if len(bases[-1]) else [first], fast_ica, rng))
        tally.details[f"{bss.label(place)}: rows shared by all passes"] = float(len(bases[-1]))

    def _note(
        self,
        place: bss.Place,
        name: str,
        passes: Sequence[int],
        separations: Sequence[bss.Separation],
        tally: Tally,
        curves: dict[str, dict[int, float]],
    ) -> None:
        tally.add(place, name, separations[-1])
        key = f"{bss.label(place)}, {name}"
        curves[key] = {t: s.p95 for t, s in zip(passes, separations, strict=True)}
        for t, separation in zip(passes, separations, strict=True):
            tally.details[f"{key}, T = {t}: p95"] = separation.p95
