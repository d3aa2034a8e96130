"""Leverage: candidates tested by hᵀ(UᵀU)⁻¹h, and jointly over offloads that share one A.

Where the rows of an operand fill its width, every candidate lies in their span, but a row that is in U
still has a leverage of at most 1. And operands of one forward pass have one A: the joint matrix
[U₁|U₂|…] = A·[[H₁|H₂|…]; [S₁|S₂|…]] is Σd_l wide, and its rank is at most s. Its row space holds the
joint rows [h₁|h₂|…] of the data; a candidate's follow from public weights and the tokens before it.
Shapes: s operand rows, d width, V vocabulary, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evals.attacks.drivers.nearest import describe_places, recovery, recovery_interval
from evals.attacks.drivers.row_space import Found, Sought, bucket, judge, sought
from evals.attacks.model import OPS, Attack, Capture, Offload, Op, Outcome, PromptTruth, Report, Truth, View
from evals.attacks.public import PublicModel
from evals.attacks.subspace import (
    Float32,
    joint_basis,
    joint_residuals,
    leverages,
    residuals,
    unit_scaled,
    wire_values,
)

Place = tuple[int, Op]

# Operands of the short corpus that are attacked: the row space has the rest.
_SHORT = 32
# Joint tests: captures, the most operand rows, and how much wider than s the joint matrix is made.
_JOINT_CAPTURES = 4
_JOINT_ROWS = 2100
_WIDTH = 1.5
# Candidates for the first token; after a prefix, the model's likeliest and random ones.
_FIRST = 2000
_LIKELY, _RANDOM = 64, 64
_PREFIXES = (1, 2, 4, 8, 16)
JOINT = "joint"
# Residuals below this are equally good: the runner's own rows differ from plaintext ones by as much.
_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One position, and how each test ranks ``candidates`` tokens there.

    Tests are the joint one (:data:`JOINT`) and each of its operands by itself. ``ranks``: how many others
    score no worse than the true token. ``margins``: logarithm of the second smallest residual over the
    smallest, which the attacker sees. ``true``, ``false``: joint residual of the true token, and the
    smallest of the others.
    """

    position: int
    candidates: int
    ranks: dict[str, int]
    margins: dict[str, float]
    true: float
    false: float


class Leverage(Attack):
    """Leverage at layer 0, and the joint row space of offloads that share A."""

    name = "leverage"
    title = "Leverage, joint over offloads"
    source = (
        "This project. Leverage scores: Hoaglin and Welsch 1978, The American Statistician 32(1); that an "
        "orthogonal A leaves UᵀU as it was, and that one A serves a whole forward pass, is all it uses."
    )
    assumes = (
        "Public weights and the operands of one forward pass. For a position after the first: the tokens "
        "before it, as an attacker has who walks from left to right."
    )
    measures = (
        "Long prompts: fraction of probed positions whose true token has the smallest residual, joint or to "
        "one operand alone, whichever shows the clearest winners; among 2,000 random tokens at the first "
        "position, and among the model's 64 likeliest and 64 random ones after a known prefix; captures with "
        "s ≥ d, where one layer's row space says nothing, come first. Short prompts: fraction of distinct "
        "tokens among the m of smallest leverage at layer 0"
    )
    corpora = ("short", "long")

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`. About 0.2 s per short prompt, 5 s per long one."""
        items = [item for item in sought(view, truth, 0, "qkv") if len(item.operand)]
        single = _first_of_each(items)[:_SHORT]
        found, nothing = [], []
        table = unit_scaled(view.model.dictionary) if single else np.zeros((0, 0), dtype=np.float32)
        for index, item in enumerate(single):
            found.append(alone(table, item, rng))
            nothing.append(alone(table, _random(item, rng), rng))
            progress(0.5 * (index + 1) / len(single))
        details = _summary(single, found, "recall") | _summary(single, nothing, "random operand")
        if view.corpus == "short":
            return self._short(view, found, nothing, details, rng)
        probes = []
        chosen = shared_mask(view)
        for index, position in enumerate(chosen):
            probes += probe(view.model, view.captures[position], truth.prompts[position], rng)
            progress(0.5 + 0.5 * (index + 1) / len(chosen))
        if not probes:
            return Outcome(
                attack=self.name, measure=self.measures, details=details, applicable=False,
                reason=f"no forward pass has two operands of equally many rows; {describe_places(view)}",
            )  # fmt: skip
        sizes = sorted({_first_rows(view.captures[position]) for position in chosen})
        test = clearest(probes)
        hits = [np.asarray([p.ranks[test] == 0]) for p in probes if test in p.ranks]
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=recovery(hits),
            chance=float(np.mean([1.0 / p.candidates for p in probes])),
            interval=recovery_interval(hits, rng),
            details=details | summary(probes),
            notes=[f"Operands of {', '.join(map(str, sizes))} rows; the headline is the test: {test}."],
        )

    def _short(
        self, view: View, found: Sequence[Found], nothing: Sequence[Found], details: dict[str, float],
        rng: np.random.Generator,
    ) -> Outcome:  # fmt: skip
        if not found:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no operand of the first layer's qkv; {describe_places(view)}",
            )  # fmt: skip
        hits = [f.hits for f in found]
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=recovery(hits),
            chance=recovery([f.hits for f in nothing]),
            interval=recovery_interval(hits, rng),
            details=details,
        )


def alone(table: Float32, item: Sought, rng: np.random.Generator) -> Found:
    """Rank ``table`` ``(V, d)``, norms in [1, 2) as in an operand, by leverage to one operand."""
    scores = np.sqrt(leverages(table, item.operand))
    return judge(scores, item.tokens, min(item.operand.shape), rng)


def shared_mask(view: View) -> list[int]:
    """Captures for the joint test, as positions in the view.

    One of each prompt with at least two operands of equally many rows in the first pass: first those
    with s ≥ d, then by size.
    """
    seen: set[int] = set()
    chosen = []
    for position, capture in enumerate(view.captures):
        if capture.prompt in seen or len(joint_offloads(capture)) < 2:
            continue
        if _first_rows(capture) <= _JOINT_ROWS:
            seen.add(capture.prompt)
            chosen.append(position)

    def order(position: int) -> tuple[bool, int]:
        first = joint_offloads(view.captures[position])[0].operand
        return first.shape[0] < first.shape[1], first.shape[0]

    return sorted(chosen, key=order)[:_JOINT_CAPTURES]


def _first_rows(capture: Capture) -> int:
    return len(joint_offloads(capture)[0].operand)


def joint_offloads(capture: Capture) -> list[Offload]:
    """The first pass's offloads, in order, of as many rows as the first, until wide enough for s."""
    offloads = sorted(
        (o for o in capture.offloads if o.forward == 0 and o.op != "lm_head"),
        key=lambda o: (o.layer, OPS.index(o.op)),
    )
    chosen: list[Offload] = []
    for offload in offloads:
        if len(offload.operand) != len(offloads[0].operand):
            continue
        chosen.append(offload)
        if sum(o.operand.shape[1] for o in chosen) >= _WIDTH * len(offload.operand) and len(chosen) > 1:
            break
    return chosen


def probe(model: PublicModel, capture: Capture, secret: PromptTruth, rng: np.random.Generator) -> list[Probe]:
    """Test the first token, and next tokens after correct prefixes, against one capture."""
    offloads = joint_offloads(capture)
    places: list[Place] = [(o.layer, o.op) for o in offloads]
    joint = joint_basis([_real(o.operand) for o in offloads])
    singles = [joint_basis([_real(o.operand)]) for o in offloads]
    tokens = secret.tokens[0]
    vocabulary = model.config.vocab_size
    first = rng.choice(vocabulary, size=min(_FIRST, vocabulary), replace=False)
    probes = []
    for length in (0, *(p for p in _PREFIXES if p < secret.prompt_lengths[0])):
        prefix = list(tokens[:length])
        if prefix:
            likely = np.argsort(-model.next_token_logits([prefix])[0])[:_LIKELY]
            others = np.concatenate([likely, rng.integers(0, vocabulary, _RANDOM)])
        else:
            others = first
        others = np.setdiff1d(others, [tokens[length]])
        pool = [int(tokens[length]), *(int(t) for t in others)]
        passes = model.rows([[*prefix, token] for token in pool], set(places))
        blocks = [np.stack([rows[place][-1] for rows in passes]) for place in places]
        scores = {JOINT: joint_residuals(blocks, joint)}
        for (layer, op), block, rows in zip(places, blocks, singles, strict=True):
            scores[f"layer {layer} {op} alone"] = residuals(block, rows)
        probes.append(
            Probe(
                position=length,
                candidates=len(pool),
                ranks={test: int(np.sum(s[1:] <= s[0])) for test, s in scores.items()},
                margins={test: _margin(s) for test, s in scores.items()},
                true=float(scores[JOINT][0]),
                false=float(scores[JOINT][1:].min()),
            )
        )
    return probes


def _real(operand: NDArray[np.generic]) -> NDArray[np.generic]:
    return operand if operand.dtype.kind == "f" else wire_values(operand)


def _margin(scores: Float32) -> float:
    best, second = np.maximum(np.partition(scores, 1)[:2], _FLOOR)
    return float(np.log(second / best))


def clearest(probes: Sequence[Probe]) -> str:
    """The test whose best candidates stand out most, in the median: chosen without the truth."""
    tests = list(dict.fromkeys(test for p in probes for test in p.margins))
    return max(tests, key=lambda test: float(np.median([p.margins.get(test, 0.0) for p in probes])))


def summary(probes: Sequence[Probe]) -> dict[str, float]:
    """Rates of every test; of the joint one by position."""
    details = {}
    for label, later in (("first token", False), ("next token", True)):
        group = [p for p in probes if (p.position > 0) == later]
        if group:
            ranks = [p.ranks[JOINT] for p in group]
            details[f"joint, {label}: recovered"] = float(np.mean([rank == 0 for rank in ranks]))
            details[f"joint, {label}: mean rank of the true one"] = float(np.mean(ranks))
            details[f"joint, {label}: chance"] = float(np.mean([1 / p.candidates for p in group]))
    details["joint residual of true tokens"] = float(np.median([p.true for p in probes]))
    details["smallest joint residual of others"] = float(np.median([p.false for p in probes]))
    for test in sorted({test for p in probes for test in p.ranks} - {JOINT}):
        details[f"{test}: recovered"] = float(
            np.mean([p.ranks[test] == 0 for p in probes if test in p.ranks])
        )
    details["positions probed"] = float(len(probes))
    return details


def _first_of_each(items: Sequence[Sought]) -> list[Sought]:
    """One operand of each prompt."""
    return list({item.prompt: item for item in reversed(items)}.values())[::-1]


def _random(item: Sought, rng: np.random.Generator) -> Sought:
    """A Gaussian operand in the place of the real one: what norms and the table's shape give away."""
    operand = rng.standard_normal(item.operand.shape).astype(np.float16)
    return replace(item, operand=operand)


def _summary(items: Sequence[Sought], found: Sequence[Found], label: str) -> dict[str, float]:
    groups: dict[tuple[str, int], list[NDArray[np.bool_]]] = {}
    for item, f in zip(items, found, strict=True):
        tall = "s ≥ d" if len(item.operand) >= item.operand.shape[1] else "s < d"
        groups.setdefault((tall, bucket(item.n)[1]), []).append(f.hits)
    return {
        f"layer 0 leverage, {tall}, up to {top} rows: {label}": recovery(hits)
        for (tall, top), hits in sorted(groups.items(), key=lambda g: g[0][1])
    }
