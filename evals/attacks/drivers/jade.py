"""Attack 6: JADE on single operands."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from evals.attacks import separation as bss
from evals.attacks.model import Attack, CorpusName, Outcome, Report, Truth, View
from evals.attacks.separation_tally import Tally, unusable


class Jade(Attack):
    """Joint diagonalisation of the fourth-order cumulants of each operand."""

    name = "jade"
    title = "JADE"
    source = "Cardoso & Souloumiac, Blind beamforming for non-Gaussian signals, IEE Proc. F 140(6), 1993"
    assumes = (
        "One operand; its rows mix non-Gaussian, roughly independent sources. The variant with equalised "
        "columns also uses column statistics of the public model on random tokens."
    )
    measures = (
        "95th percentile of |cosine| between data rows and recovered rows, best assignment, at the most "
        "separable offload; chance: random demixing."
    )
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short", "decode")

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        measure = "p95 |cosine|"
        attacked = {p: m for p in bss.places(view) if (m := bss.mixtures(view, truth, p))}
        if not attacked:
            return Outcome(
                attack=self.name, measure=measure, applicable=False, reason=unusable(view)
            )  # fmt: skip
        columns = bss.public_columns(view.model, list(attacked))
        tally = Tally()
        for done, (place, problems) in enumerate(attacked.items()):
            equalised = [columns[place].equalise(m) for m in problems]
            tally.add(place, "as seen", bss.as_seen(problems, rng))
            tally.add(place, "blind", bss.separate(problems, bss.jade, rng))
            tally.add(place, "equalised", bss.separate(equalised, bss.jade, rng))
            tally.control(place, bss.planted(problems, bss.jade, rng))
            progress((done + 1) / len(attacked))
        return tally.outcome(self.name, measure, rng)
