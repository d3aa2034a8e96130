"""Attack 5: known rows, then FastICA on what they leave."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evals.attacks import separation as bss
from evals.attacks.model import Attack, CorpusName, Outcome, Report, Truth, View
from evals.attacks.separation_tally import Tally, unusable

_RIDGE = 1e-6


def ridge_residual(mixture: bss.Mixture, anchors: NDArray[np.bool_]) -> bss.Mixture:
    """What is left of the operand when the mixing directions of the anchors are removed.

    Ridge least squares B = H_K·Uᵀ(U·Uᵀ + λ·I)⁻¹ maps U to the anchors. With an orthogonal mask
    its rows span the anchors' mixing directions; the operand ``(s − K, d)`` returned is U in the
    orthogonal complement of that span.
    """
    u, known = mixture.operand.astype(np.float64), mixture.rows[anchors]
    gram = u @ u.T
    gram[np.diag_indices_from(gram)] += _RIDGE * np.trace(gram) / len(gram)
    demixing = np.linalg.solve(gram, u @ known.T)
    demixing /= np.linalg.norm(demixing, axis=0)
    left, values, _ = np.linalg.svd(demixing)
    rank = int((values > 1e-3 * values[0]).sum())
    rest = (left[:, rank:].T @ u).astype(np.float32)
    return bss.Mixture(operand=rest, features=rest, rows=mixture.rows[~anchors])


def projected(mixture: bss.Mixture, anchors: NDArray[np.bool_]) -> bss.Mixture:
    """The operand, to be demixed by what is learnt outside the anchors' span in row space."""
    _, values, right = np.linalg.svd(mixture.rows[anchors], full_matrices=False)
    span = right[values > 1e-4 * values[0]]
    features = mixture.operand - (mixture.operand @ span.T) @ span
    return bss.Mixture(operand=mixture.operand, features=features, rows=mixture.rows[~anchors])


def leading_quarter(n: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Anchors: the first quarter of the rows, as of a public template."""
    return np.arange(n) < n // 4


def random_half(n: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Anchors: half of the rows at random."""
    return rng.permutation(n) < n // 2


class AnchorIca(Attack):
    """FastICA beside known rows: by ridge residual, and by projection."""

    name = "anchor-ica"
    title = "Anchor ICA"
    source = (
        "Hyvärinen, Fast and robust fixed-point algorithms for ICA, IEEE TNN 10(3), 1999; known rows as in "
        "the GELO paper, section 4.3"
    )
    assumes = (
        "One operand, and some of its rows exactly: the first quarter (a public template) or a random half. "
        "Equalised variants also use column statistics of the public model on random tokens."
    )
    measures = (
        "95th percentile of |cosine| between the other data rows and recovered rows, best assignment, at the "
        "most separable offload; chance: random demixing of the same residual."
    )
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short", "decode")

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        measure = "p95 |cosine|"
        attacked = {p: m for p in bss.places(view) if (m := _anchored(bss.mixtures(view, truth, p)))}
        if not attacked:
            reason = f"{unusable(view)}, or none of those has two data rows"
            return Outcome(attack=self.name, measure=measure, applicable=False, reason=reason)
        columns = bss.public_columns(view.model, list(attacked))
        tally = Tally()
        for done, (place, problems) in enumerate(attacked.items()):
            halves = [random_half(len(m.rows), rng) for m in problems]
            quarters = [leading_quarter(len(m.rows), rng) for m in problems]
            unknown = [
                bss.Mixture(operand=m.operand, features=m.features, rows=m.rows[~known])
                for m, known in zip(problems, halves, strict=True)
            ]
            tally.add(place, "as seen", bss.as_seen(unknown, rng))
            variants = {
                "half known, ridge": [ridge_residual(m, a) for m, a in zip(problems, halves, strict=True)],
                "half known, projection": [projected(m, a) for m, a in zip(problems, halves, strict=True)],
                "quarter known, ridge": [
                    ridge_residual(m, a) for m, a in zip(problems, quarters, strict=True) if a.any()
                ],
            }
            for name, reduced in variants.items():
                if not reduced:
                    continue
                equalised = [columns[place].equalise(m) for m in reduced]
                tally.add(place, f"{name}, equalised", bss.separate(equalised, bss.fast_ica, rng))
                if name.startswith("half known, ridge"):
                    tally.add(place, f"{name}, blind", bss.separate(reduced, bss.fast_ica, rng))
            tally.control(place, bss.planted(problems, bss.fast_ica, rng))
            progress((done + 1) / len(attacked))
        return tally.outcome(self.name, measure, rng)


def _anchored(problems: list[bss.Mixture]) -> list[bss.Mixture]:
    """Those in which half of the rows can be known and half unknown."""
    return [m for m in problems if len(m.rows) >= 2]
