"""Walking a prompt left to right: what an operand says about candidates for the next token.

With public weights the plaintext row of any candidate is known as soon as the tokens before it are. A
mask that keeps the row space of [H; S] lets each be tested: the right one leaves a residual at the
level of float16 rounding. Shapes: s operand rows, d width, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import HEAD_LAYER, Capture, Op, View
from evals.attacks.public import PublicModel
from evals.attacks.steps import Place, Prefix, Step
from evals.attacks.subspace import (
    basis,
    outside,
    random_basis,
    residuals,
    residuals_many,
    rounding_variance,
    wire_values,
)

Float32 = NDArray[np.float32]
Scores = dict[Place, Float32]

# Residual that a right candidate may have besides rounding of its own operand, and its growth per
# layer: the runner computes on float16 results of the worker, and may keep its cache in bfloat16.
_FLOOR = 0.003
_GROWTH = 0.0004
_MOST = 0.3
# Scores: of a row seen before when a new one fits, and the lowest that is told from zero.
_REPEATED = 1.5
_ROUNDING = 0.02
# Captures whose vocabularies are scored together.
_VOCABULARIES = 32
_FIRST: Place = (0, "qkv")
# Positions in a row without a plausible candidate after which a walk is lost.
_PATIENCE = 2


class Evidence:
    """What one capture says about candidate rows."""

    def __init__(self, capture: Capture, parameters: Mapping[str, int | float | str]) -> None:
        self._operands = {(o.forward, (o.layer, o.op)): o.operand for o in capture.offloads}
        self._bases: dict[tuple[int, Place], Float32 | None] = {}
        self._outside: dict[tuple[int, Place], Float32 | None] = {}
        self._limits: dict[tuple[int, Place], float] = {}
        self._vocabulary: dict[int, Float32] = {}
        self._shields = _number(parameters, "shield_rows", 0.0)
        self._fraction = _number(parameters, "shield_fraction", 0.0)
        self._energy = _number(parameters, "shield_energy", 0.0)
        self._condition = _number(parameters, "condition_number", 1.0)

    @property
    def forwards(self) -> int:
        """Passes captured."""
        return 1 + max((forward for forward, _ in self._operands), default=-1)

    def places(self, forward: int, deepest: int | None = None) -> list[Place]:
        """Where candidates can be told apart in a pass: captured, and of a rank below the width.

        Up to layer ``deepest`` and without the LM head, or all (None).
        """
        captured = {p for f, p in self._operands if f == forward}
        wanted = captured if deepest is None else {p for p in captured if 0 <= p[0] <= deepest}
        found = [place for place in wanted if self.basis(forward, place) is not None]
        return sorted(found, key=lambda place: (place[0] == HEAD_LAYER, place))

    def rows(self, forward: int) -> int:
        """The most data rows that a pass can have: its operand rows less the public shield."""
        s = max((len(u) for (f, (_, op)), u in self._operands.items() if f == forward and op != "lm_head"),
                default=0)  # fmt: skip
        return self._data_rows(s)

    def _data_rows(self, s: int) -> int:
        return max(0, int((s - self._shields) / (1.0 + self._fraction)))

    def basis(self, forward: int, place: Place) -> Float32 | None:
        """The row space ``(r, d)`` of an offload; None if it was not captured, or is everything."""
        key = forward, place
        if key not in self._bases:
            operand = self._operands.get(key)
            rows = None if operand is None else basis(operand)
            self._bases[key] = rows if rows is not None and 0 < len(rows) < rows.shape[1] else None
        return self._bases[key]

    def randomised(self, rng: np.random.Generator) -> Evidence:
        """The same with random row spaces of the same ranks: what knowing nothing looks like."""
        other = copy(self)
        other._bases, other._outside, other._vocabulary = {}, {}, {}
        for key in self._operands:
            rows = self.basis(*key)
            other._bases[key] = None if rows is None else random_basis(len(rows), rows.shape[1], rng)
        return other

    def limit(self, forward: int, place: Place) -> float:
        """The residual up to which a candidate is plausibly right: public parameters and rounding.

        A data row of norm m comes back from the mix with the rounding error of a whole operand row;
        m follows from the operand's norm, the shield's energy and the number of rows. Errors of the
        offloads before add up as independent ones do.
        """
        key = forward, place
        if key not in self._limits:
            operand = self._operands[key]
            s, d = operand.shape
            n = self._data_rows(s)
            energy = float(np.sum(wire_values(operand) ** 2))
            norm = energy / max(n + (s - n) * self._energy**2, 1.0)
            rounding = float(np.mean(rounding_variance(operand))) * d
            noise = self._condition * np.sqrt(rounding / max(norm, np.finfo(np.float64).tiny))
            layer = max(place[0], 0)
            own = 2.0 * noise * (1.0 + np.sqrt(4.0 * layer))
            self._limits[key] = float(min(_MOST, _FLOOR + _GROWTH * layer + own))
        return self._limits[key]

    def score(self, forward: int, place: Place, rows: Float32, before: Sequence[Float32]) -> Float32:
        """Residuals ``(C,)`` of candidate rows over the limit: up to 1 is plausible.

        A row that repeats one ``before`` is in the row space whether it is right or not (``the the``
        at the start: attention over equal values gives that value). It is chosen only if no new row
        is plausible.
        """
        rows_basis = self.basis(forward, place)
        if rows_basis is None:
            raise ValueError(f"no row space at {place} in pass {forward}")
        limit = self.limit(forward, place)
        if (forward, place) not in self._outside:
            self._outside[forward, place] = outside(rows_basis)
        rest = self._outside[forward, place]
        scores: Float32 = residuals(rows, rows_basis, rest) / np.float32(limit)
        if before:
            units = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-30))
            cosine = np.max(units @ np.stack(before).T, axis=1)
            repeated = np.sqrt(np.maximum(2.0 - 2.0 * cosine, 0.0)) <= limit
            new = bool(np.any(scores[~repeated] <= 1.0))
            scores[repeated] = np.maximum(scores[repeated], np.float32(_REPEATED if new else 1.0))
        return scores

    def vocabulary(self, forward: int, model: PublicModel) -> Float32:
        """:meth:`score` of every token ``(V,)`` at layer 0 (qkv). Kept."""
        if forward not in self._vocabulary:
            self._vocabulary[forward] = self.score(forward, _FIRST, model.dictionary, ())
        return self._vocabulary[forward]

    @property
    def knows_vocabulary(self) -> bool:
        """Whether :meth:`vocabulary` of the first pass is known."""
        return 0 in self._vocabulary

    def keep_vocabulary(self, scores: Float32) -> None:
        """Note what :meth:`vocabulary` gives for the first pass."""
        self._vocabulary[0] = scores


def evidence_of(view: View) -> list[Evidence]:
    """What each capture of ``view`` says; the same objects for all attacks on it."""
    if "evidence" not in view.memo:
        view.memo["evidence"] = [Evidence(capture, view.parameters) for capture in view.captures]
    made: list[Evidence] = view.memo["evidence"]
    return made


def score_vocabulary(evidence: Sequence[Evidence], model: PublicModel) -> None:
    """Make :meth:`Evidence.vocabulary` of the first pass, for all at once where it is not known."""
    new = [seen for seen in evidence if seen.basis(0, _FIRST) is not None and not seen.knows_vocabulary]
    for start in range(0, len(new), _VOCABULARIES):
        batch = new[start : start + _VOCABULARIES]
        bases = [rows for seen in batch if (rows := seen.basis(0, _FIRST)) is not None]
        for seen, found in zip(batch, residuals_many(model.dictionary, bases), strict=True):
            seen.keep_vocabulary(found / np.float32(seen.limit(0, _FIRST)))


def _number(parameters: Mapping[str, int | float | str], name: str, default: float) -> float:
    value = parameters.get(name, default)
    return float(value) if isinstance(value, int | float) else default


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A walk that has one place only. Candidates come in the order of the model's own distribution.

    ``depth``: the layer as a fraction of the model's; the nearest captured layer at or above it, and
    at least 1, is used. ``widths``: how many candidates are tried, in stages, each stage only if the
    ones before have no acceptable candidate; 0 means the whole vocabulary. The first position, whose
    rows are the same for all prompts, has a last stage of ``opening``. ``prompts``: the first so many
    prompts, since a stage is a forward of all its candidates.
    """

    op: Op
    depth: float
    widths: tuple[int, ...]
    prompts: int
    opening: int = 4096


@dataclass(slots=True)
class Walk:
    """One hypothesis about a prompt."""

    prefix: Prefix
    known: int = 0
    # Unit rows of the tokens so far at each place, in each pass.
    rows: dict[tuple[int, Place], list[Float32]] = field(default_factory=dict)
    accepted: list[bool] = field(default_factory=list)
    # Positions at which a place alone chose the same token, up to its first other choice.
    agreed: dict[Place, int] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """Recovered tokens: all, or those up to the last acceptable one."""
        own = list(self.prefix.tokens[self.known :])
        if any(self.accepted):
            return own[: len(self.accepted) - self.accepted[::-1].index(True)]
        return own

    def lost(self) -> bool:
        """Whether the last positions had no acceptable candidate."""
        return len(self.accepted) >= _PATIENCE and not any(self.accepted[-_PATIENCE:])

    def taken(self, step: Step, index: int, forward: int, accepted: bool) -> Walk:
        """This hypothesis with candidate ``index`` of ``step`` appended."""
        rows = {key: list(kept) for key, kept in self.rows.items()}
        for place, candidates in step.rows.items():
            row = candidates[index]
            rows.setdefault((forward, place), []).append(row / max(float(np.linalg.norm(row)), 1e-30))
        return Walk(step.take(index), self.known, rows, [*self.accepted, accepted], dict(self.agreed))


@dataclass(slots=True)
class Tally:
    """Recovered against true tokens."""

    prompts: int = 0
    exact: int = 0
    positions: int = 0
    right: int = 0

    def add(self, recovered: Sequence[int], true: Sequence[int]) -> None:
        self.prompts += 1
        self.exact += list(recovered) == list(true)
        self.positions += len(true)
        self.right += sum(a == b for a, b in zip(recovered, true, strict=False))

    def details(self, label: str) -> dict[str, float]:
        """Fractions, by name."""
        return {
            f"{label}: prompts exact": self.exact / max(self.prompts, 1),
            f"{label}: positions": self.right / max(self.positions, 1),
            f"{label}: prompts attacked": float(self.prompts),
        }


def scored(seen: Evidence, forward: int, step: Step, places: Sequence[Place], walk: Walk) -> Scores:
    """Scores ``(C,)`` of a step's candidates at each place."""
    return {
        place: seen.score(forward, place, step.rows[place], walk.rows.get((forward, place), ()))
        for place in places
    }


def fused(scores: Scores) -> Float32:
    """One score ``(C,)`` of several places: the mean logarithm, none below rounding."""
    logs = [np.log(np.maximum(score, np.float32(_ROUNDING))) for score in scores.values()]
    mean: Float32 = np.mean(logs, axis=0, dtype=np.float32)
    return mean


def plausible(scores: Scores, index: int) -> bool:
    """Whether most places have the candidate within their limit."""
    return bool(np.median([float(score[index]) for score in scores.values()]) <= 1.0)


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
