"""Row space: which vocabulary rows lie in the span of the first operand.

U = A·[H; S] has the row space of [H; S], whatever A is. At layer 0 the rows of H are rows of a public
table, so each of the V tokens can be tested alone. Shapes: s operand rows, d width, r rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evals.attacks.drivers.nearest import (
    describe_places,
    next_tokens,
    recovery,
    recovery_interval,
    row_tokens,
    shallowest,
)
from evals.attacks.model import HEAD_LAYER, Attack, Curve, Op, Outcome, Plot, PromptTruth, Report, Truth, View
from evals.attacks.subspace import (
    Float32,
    basis,
    random_basis,
    representations,
    residuals_many,
    unit_scaled,
)

Int64 = NDArray[np.int64]

# Operands scored in one product over the vocabulary.
_BATCH = 32
# Operands that also get random bases of the same rank, how often, and those on a simulated wire.
_CHANCE, _ROUNDS = 64, 2
_SIMULATED = 16
# Rows above which the simulated wire is left out: drawing a dense mask is O(s³).
_SIMULATED_ROWS = 520
_QUANTILES = np.linspace(0.0, 1.0, 101)
_TINY = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """One operand, the tokens in it (distinct, ``(m,)``) and its number of data rows."""

    prompt: int
    operand: NDArray[np.generic]
    tokens: Int64
    n: int
    # Plaintext rows ``(n, d)``, for the simulated wire only.
    rows: Float32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How one operand's residuals rank the vocabulary.

    ``hits`` ``(m,)``: the true token is among the m best. ``blind``: hits and claims of an attacker that
    picks the count, ``margin`` the (log) ratio that made it. ``true``, ``false``: quantiles of residuals.
    """

    rank: int
    hits: NDArray[np.bool_]
    precision: float
    blind: tuple[int, int]
    margin: float
    separated: bool
    gap: float
    true: Float32
    false: Float32


@dataclass(slots=True)
class _Tally:
    """Results of one way to read the operands."""

    found: list[Found] = field(default_factory=list)

    @property
    def value(self) -> float:
        return recovery([f.hits for f in self.found])

    @property
    def margin(self) -> float:
        return float(np.median([f.margin for f in self.found]))

    def summary(self) -> dict[str, float]:
        blind_hits = sum(f.blind[0] for f in self.found)
        claims = sum(f.blind[1] for f in self.found)
        return {
            "average precision": float(np.mean([f.precision for f in self.found])),
            "all tokens of an operand": float(np.mean([f.hits.all() for f in self.found])),
            "blind count: recall": blind_hits / max(1, sum(len(f.hits) for f in self.found)),
            "blind count: precision": blind_hits / max(1, claims),
            "every true below every false": float(np.mean([f.separated for f in self.found])),
            "gap: smallest false / largest true": float(np.median([f.gap for f in self.found])),
            "residual of true tokens": float(np.median([f.true[50] for f in self.found])),
            "residual of false tokens": float(np.median([f.false[50] for f in self.found])),
            "rank": float(np.mean([f.rank for f in self.found])),
        }


def ranking(scores: Float32, rng: np.random.Generator) -> Int64:
    """Candidates ``(N,)``, lowest score first; equal scores in random order."""
    shuffled = rng.permutation(len(scores))
    order: Int64 = shuffled[np.argsort(scores[shuffled], kind="stable")]
    return order


def blind_count(ordered: Float32, limit: int) -> tuple[int, float]:
    """How many candidates an attacker takes who does not know: up to the largest ratio of neighbours.

    Also the logarithm of that ratio. ``ordered`` ``(N,)`` are residuals in ascending order; a space of
    rank ``limit`` has no more independent rows than that.
    """
    steps = np.diff(np.log(np.maximum(ordered[: limit + 1], _TINY)))
    if not len(steps):
        return 1, 0.0
    return int(np.argmax(steps)) + 1, float(steps.max())


def judge(scores: Float32, tokens: Int64, rank: int, rng: np.random.Generator) -> Found:
    """Score a ranking of N candidates ``scores`` ``(N,)`` against the distinct true ``tokens`` ``(m,)``."""
    order = ranking(scores, rng)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    own = np.sort(places[tokens])
    is_true = np.zeros(len(scores), dtype=bool)
    is_true[tokens] = True
    true, false = scores[is_true], scores[~is_true]
    count, margin = blind_count(scores[order], rank)
    lowest, highest = max(float(false.min()), _TINY), max(float(true.max()), _TINY)
    return Found(
        rank=rank,
        hits=places[tokens] < len(tokens),
        precision=float(np.mean(np.arange(1, len(own) + 1) / (own + 1))),
        blind=(int(np.sum(own < count)), count),
        margin=margin,
        separated=highest < lowest,
        gap=lowest / highest,
        true=np.quantile(true, _QUANTILES).astype(np.float32),
        false=np.quantile(false, _QUANTILES).astype(np.float32),
    )


def simulated_wire(rows: Float32, shield_rows: int, energy: float, rng: np.random.Generator) -> Float32:
    """A·[H; S] ``(n + k, d)`` in float32 with a fresh Haar A: the same rows on a finer wire."""
    data = unit_scaled(rows).astype(np.float64)
    d = data.shape[1]
    deviation = energy * float(np.mean(np.linalg.norm(data, axis=1))) / np.sqrt(d)
    block = np.concatenate([data, deviation * rng.standard_normal((shield_rows, d))])
    mask, _ = np.linalg.qr(rng.standard_normal((len(block), len(block))))
    operand: Float32 = (mask @ block).astype(np.float32)
    return operand


def sought(view: View, truth: Truth, layer: int, op: Op) -> list[Sought]:
    """Every captured operand of one layer and op with the distinct tokens in it.

    Of the decode corpus only decode steps: a batch's prompts are what the other corpora have.
    """
    chosen = []
    for capture, secret in zip(view.captures, truth.prompts, strict=True):
        for offload in capture.select(layer, op):
            if view.corpus == "decode" and offload.forward == 0 and op != "lm_head":
                continue
            rows = secret.rows.get((offload.forward, layer, op))
            tokens = _tokens(view, secret, offload.forward, op, rows)
            if not len(tokens):
                continue
            chosen.append(
                Sought(
                    prompt=capture.prompt,
                    operand=offload.operand,
                    tokens=np.unique(tokens),
                    n=len(tokens),
                    rows=rows,
                )
            )
    return chosen


def _tokens(view: View, secret: PromptTruth, forward: int, op: Op, rows: Float32 | None) -> Int64:
    if op != "lm_head":
        return np.concatenate(row_tokens(secret, forward))
    return next_tokens(view.model, rows) if rows is not None else np.zeros(0, dtype=np.int64)


class RowSpace(Attack):
    """Residual of every vocabulary row to the row space of the layer-0 operand."""

    name = "row-space"
    title = "Row space"
    source = "This project. It uses only that A·[H; S] and [H; S] have the same row space."
    assumes = "Public weights, and the operand of the first layer's qkv. Nothing about A or the shield."
    measures = (
        "Fraction of an operand's distinct tokens that are among the m vocabulary rows of smallest "
        "residual to rowspace(U), m being how many there are; at the LM head the token that is predicted. "
        "Where the rank reaches the width every row lies in the space, and the order is random"
    )
    corpora = ("short", "long", "decode")

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`. Under 0.1 s per short prompt at a vocabulary of 49,152."""
        place = shallowest(view)
        if place is None or place[0] not in (0, HEAD_LAYER):
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no operand whose rows are a public table's; {describe_places(view)}",
            )  # fmt: skip
        items = sought(view, truth, *place)
        if not items:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason="no captured operand has tokens in the truth",
            )  # fmt: skip
        head = place[0] == HEAD_LAYER
        table = view.model.spec(*place).load().astype(np.float32) if head else view.model.dictionary
        names = list(representations(items[0].operand))
        tallies = {
            name: attack(
                table,
                items,
                lambda item, name=name: basis_of(item.operand, name),  # type: ignore[misc]
                rng,
                lambda fraction, i=i: progress((i + fraction) / (len(names) + 1)),  # type: ignore[misc]
            )
            for i, name in enumerate(names)
        }
        # Which reading shows something is seen without the truth: some residuals stand apart.
        best = max(tallies, key=lambda name: tallies[name].margin)
        tally = tallies[best]
        details = {f"read as {name}": t.value for name, t in tallies.items()} if len(names) > 1 else {}
        details |= tally.summary() | _by_rows(items, tally.found)
        details |= _simulated(view, table, items, rng)
        tokens = [len(item.tokens) for item in items]
        alike = sum(m * m for m in tokens) / sum(tokens) / len(table)
        chance = max(alike, _chance(table, items, tally.found, rng))
        details["chance if all tokens were alike"] = alike
        progress(1.0)
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=tally.value,
            chance=chance,
            interval=recovery_interval([f.hits for f in tally.found], rng),
            details=details,
            plots=_plots(items, tally.found, len(table)),
            notes=_notes(view, head),
        )


def basis_of(operand: NDArray[np.generic], name: str) -> Float32:
    """Basis of an operand read as ``name`` (:func:`evals.attacks.subspace.representations`)."""
    return basis(operand if operand.dtype.kind == "f" else representations(operand)[name])


def attack(
    table: Float32,
    items: Sequence[Sought],
    rows_of: Callable[[Sought], Float32],
    rng: np.random.Generator,
    progress: Report = lambda fraction: None,
) -> _Tally:
    """Rank ``table`` ``(V, d)`` by residual to each item's basis ``(r, d)`` from ``rows_of``."""
    tally = _Tally()
    for start in range(0, len(items), _BATCH):
        batch = items[start : start + _BATCH]
        bases = [rows_of(item) for item in batch]
        for item, rows, scores in zip(batch, bases, residuals_many(table, bases), strict=True):
            tally.found.append(judge(scores, item.tokens, len(rows), rng))
        progress((start + len(batch)) / len(items))
    return tally


def _chance(
    table: Float32, items: Sequence[Sought], found: Sequence[Found], rng: np.random.Generator
) -> float:
    """Recall from random bases of the same ranks.

    Above m/V: rows of rare tokens lie close together, so that frequent ones are more often extreme.
    """
    ranks = {id(item): f.rank for item, f in zip(items, found, strict=True)}
    width = table.shape[1]
    chosen = list(items[:_CHANCE]) * _ROUNDS
    control = attack(table, chosen, lambda item: random_basis(ranks[id(item)], width, rng), rng)
    return control.value


def _simulated(
    view: View, table: Float32, items: Sequence[Sought], rng: np.random.Generator
) -> dict[str, float]:
    """From the truth: what the same rows would show if the wire were float32."""
    energy = float(view.parameters.get("shield_energy", 0.0))
    wires = {
        id(item): simulated_wire(item.rows, max(0, len(item.operand) - item.n), energy, rng)
        for item in items[:_SIMULATED]
        if item.rows is not None and len(item.operand) <= _SIMULATED_ROWS and item.operand.dtype == np.float16
    }
    finer = [item for item in items if id(item) in wires]
    if not finer or "shield_energy" not in view.parameters:
        return {}
    tally = attack(table, finer, lambda item: basis(wires[id(item)]), rng)
    label = "what if the wire were float32 (simulated): "
    residual = tally.summary()["residual of true tokens"]
    return {label + "recall": tally.value, label + "residual of true tokens": residual}


def bucket(n: int) -> tuple[int, int]:
    """The powers of two around n: 2ᵏ⁻¹ + 1 … 2ᵏ."""
    top = 1 << (n - 1).bit_length()
    return top // 2 + 1, top


def _by_rows(items: Sequence[Sought], found: Sequence[Found]) -> dict[str, float]:
    groups: dict[tuple[int, int], list[Found]] = {}
    full = [f for i, f in zip(items, found, strict=True) if f.rank >= i.operand.shape[1]]
    tall = [f for i, f in zip(items, found, strict=True) if len(i.operand) >= i.operand.shape[1] > f.rank]
    for item, f in zip(items, found, strict=True):
        groups.setdefault(bucket(item.n), []).append(f)
    details = {
        f"recall, {low}-{high} rows" if low < high else f"recall, {low} row{'s' * (low > 1)}": recovery(
            [f.hits for f in group]
        )
        for (low, high), group in sorted(groups.items())
    }
    if tall:
        details["recall where s ≥ d but rank < d"] = recovery([f.hits for f in tall])
    if full:
        details["recall where rank = d"] = recovery([f.hits for f in full])
    details["operands"] = float(len(items))
    return details


def _plots(items: Sequence[Sought], found: Sequence[Found], vocabulary: int) -> list[Plot]:
    sizes = sorted({item.n for item in items})
    by_size: Mapping[int, list[tuple[Sought, Found]]] = {
        n: [(i, f) for i, f in zip(items, found, strict=True) if i.n == n] for n in sizes
    }
    fraction = _QUANTILES.tolist()
    return [
        Plot(
            title="Residual to rowspace(U)",
            x_label="fraction of tokens",
            y_label="residual",
            log_y=True,
            curves=[
                Curve(label=label, x=fraction, y=np.maximum(np.median(curves, axis=0), _TINY).tolist())
                for label, curves in (
                    ("tokens of the operand", [f.true for f in found]),
                    ("all other tokens", [f.false for f in found]),
                )
            ],
        ),
        Plot(
            title="Row space: recall by size",
            x_label="data rows",
            y_label="tokens recovered",
            log_x=True,
            curves=[
                Curve(
                    label="recovered",
                    x=sizes,
                    y=[recovery([f.hits for _, f in by_size[n]]) for n in sizes],
                ),
                Curve(
                    label="chance",
                    x=sizes,
                    y=[float(np.mean([len(i.tokens) for i, _ in by_size[n]])) / vocabulary for n in sizes],
                ),
            ],
        ),
    ]


def _notes(view: View, head: bool) -> list[str]:
    notes = []
    if head:
        notes.append("The first layers are not on the wire: rows of the LM head are tested instead.")
    if view.corpus == "long":
        notes.append("Repeated tokens add no rank, so that s ≥ d alone does not fill the space.")
    return notes
