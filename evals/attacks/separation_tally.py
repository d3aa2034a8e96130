"""What the separation attacks found, put together into an outcome."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import Curve, Outcome, Plot, View
from evals.attacks.separation import RECOVERED, SAMPLES_PER_SOURCE, Place, Separation, label

_LEVELS = np.linspace(0.0, 1.0, 21)


def unusable(view: View) -> str:
    """Why no operand of ``view`` can be separated: the shapes found."""
    shapes = {o.operand.shape for capture in view.captures for o in capture.offloads}
    found = ", ".join(f"{s}x{d}" for s, d in sorted(shapes)[:6])
    return (
        f"no captured operand of the attacked offloads has at least {SAMPLES_PER_SOURCE} columns per row "
        f"(shapes: {found or 'none'})"
    )


def _exceedance(cosines: NDArray[np.float64]) -> list[float]:
    return [float((cosines >= level).mean()) for level in _LEVELS]


class Tally:
    """Collects separations by place and variant.

    The headline is the variant that recovers most rows, then the one furthest above its own floor;
    the chance level is that variant's floor.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[Place, str], Separation] = {}
        self.details: dict[str, float] = {}
        self.notes: list[str] = []
        self._planted: list[float] = []

    def add(self, place: Place, variant: str, separation: Separation) -> None:
        """Note one result."""
        self.found[place, variant] = separation
        key = f"{label(place)}, {variant}"
        self.details[f"{key}: p95"] = separation.p95
        self.details[f"{key}: recovered"] = separation.recovered
        self.details[f"{key}: floor p95"] = separation.floor

    def control(self, place: Place, p95: float) -> None:
        """Note what the solver achieves on planted sources in mixtures of the same size."""
        self._planted.append(p95)
        self.details[f"{label(place)}, planted Laplacian sources: p95"] = p95

    def _rank(self, key: tuple[Place, str]) -> tuple[float, float]:
        separation = self.found[key]
        return round(separation.recovered, 2), separation.p95 - separation.floor

    def outcome(
        self, attack: str, measure: str, rng: np.random.Generator, plots: Sequence[Plot] = ()
    ) -> Outcome:
        """The outcome: headline, interval, details, and how many rows lie above each |cosine|."""
        place, variant = best = max(self.found, key=self._rank)
        separation = self.found[best]
        curves = []
        for one in dict.fromkeys(p for p, _ in self.found):
            strongest = max((k for k in self.found if k[0] == one), key=self._rank)
            cosines = self.found[strongest].pooled
            curves.append(
                Curve(label=f"{label(one)}, {strongest[1]}", x=_LEVELS.tolist(), y=_exceedance(cosines))
            )
        floor = np.concatenate([cosines for draw in separation.floors for cosines in draw])
        curves.append(Curve(label="random demixing", x=_LEVELS.tolist(), y=_exceedance(floor)))
        exceedance = Plot(
            title="Rows recovered to a given cosine",
            x_label="|cosine|",
            y_label="fraction of data rows at or above",
            curves=curves,
        )
        control = max(self._planted, default=float("nan"))
        details = {
            "recovered": separation.recovered,
            "mean": float(separation.pooled.mean()),
            "rows": float(separation.pooled.size),
            **self.details,
        }
        return Outcome(
            attack=attack,
            measure=measure,
            value=separation.p95,
            chance=separation.floor,
            interval=separation.interval(rng),
            details=details,
            plots=(*plots, exceedance),
            notes=(f"strongest at {label(place)}: {variant}", *self.notes),
            interpretable=not control < RECOVERED,
            reason="" if not control < RECOVERED else f"planted Laplacian sources: p95 {control:.2f}",
        )
