"""Linear inversion: multi-α ridge regression from operand rows to embeddings.

The attacker knows half of the prompts and trains on their captures, and on rows that he computes
himself with the public weights. Vocabulary is disjoint between training and test: each half of the
vocabulary is recovered by a map that was fitted on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evals.attacks.drivers.nearest import (
    Block,
    Float32,
    Hits,
    Int64,
    Place,
    blocks,
    describe_places,
    hits_of,
    places,
    random_operand,
    recovery,
    recovery_interval,
    shallowest,
    top_tokens,
    unit_rows,
)
from evals.attacks.drivers.own_text import own_rows, training_pairs
from evals.attacks.model import HEAD_LAYER, Attack, Outcome, Report, Truth, View

# Ridge penalties in units of the mean variance of a coordinate.
ALPHAS = tuple(10.0**e for e in range(-7, 4))
# The choice of penalty and training set: known operands, and tokens that compete.
_JUDGED = 16
_RIVALS = 4096


class Ridge:
    """Ridge regression with intercept for several penalties at once.

    One eigendecomposition of the Gram matrix serves them all. ``x`` ``(N, d)``, ``y`` ``(N, m)``.
    """

    def __init__(self, x: Float32, y: Float32, alphas: Sequence[float] = ALPHAS) -> None:
        self._center, self._offset = x.mean(axis=0), y.mean(axis=0)
        centered = x - self._center
        gram = (centered.T @ centered).astype(np.float64)
        values, basis = np.linalg.eigh(gram)
        values = np.maximum(values, 0.0)
        # Rows that are all the same have no variance: then any penalty gives their mean target.
        unit = float(values.mean()) or 1.0
        self._basis = basis.astype(np.float32)
        self._projected = self._basis.T @ (centered.T @ (y - self._offset))
        self._gains = [(1.0 / (values + alpha * unit)).astype(np.float32) for alpha in alphas]
        self.alphas = tuple(alphas)

    def weights(self, index: int) -> Float32:
        """The map ``(d, m)`` of one penalty."""
        product: Float32 = self._basis @ (self._gains[index][:, None] * self._projected)
        return product

    def predict(self, x: Float32, index: int) -> Float32:
        """``(N, m)`` for the penalty ``alphas[index]``."""
        return np.asarray((x - self._center) @ self.weights(index) + self._offset, dtype=np.float32)

    def __call__(self, x: Float32) -> list[Float32]:
        """Predictions for every penalty."""
        turned = (x - self._center) @ self._basis
        return [(turned * gain) @ self._projected + self._offset for gain in self._gains]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Training pairs: rows ``(N, d)`` at norm √d, and their tokens ``(N,)``."""

    rows: Float32
    tokens: Int64

    @classmethod
    def of(cls, rows: Float32, tokens: Int64) -> Pairs:
        """Rows brought to norm √d: their scale is secret or carries nothing."""
        return cls(unit_rows(rows) * np.float32(np.sqrt(rows.shape[1])), tokens)

    def within(self, half: NDArray[np.bool_]) -> Pairs:
        """The pairs whose token is in ``half`` ``(V,)``."""
        kept = half[self.tokens]
        return Pairs(self.rows[kept], self.tokens[kept])

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(np.concatenate([self.rows, other.rows]), np.concatenate([self.tokens, other.tokens]))

    def __len__(self) -> int:
        return len(self.tokens)


def aligned_pairs(found: Sequence[Block]) -> Pairs:
    """Row i with token i: all that can be said of an operand whose mask is not known."""
    return Pairs.of(
        np.concatenate([b.rows[b.aligned] for b in found]), np.concatenate([b.tokens for b in found])
    )


def split(found: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """Prompts the attacker knows, and those he is after: every second one."""
    order = {prompt: i for i, prompt in enumerate(sorted({b.prompt for b in found}))}
    known = [b for b in found if order[b.prompt] % 2 == 0]
    return (known, [b for b in found if order[b.prompt] % 2]) if len(order) > 1 else ([], list(found))


def known_openings(view: View, truth: Truth) -> list[tuple[int, ...]]:
    """The texts of the prompts that the attacker knows (of the only one, its first token)."""
    order = {prompt: i for i, prompt in enumerate(sorted({s.prompt for s in truth.prompts}))}
    texts = {
        tokens[:length]: None
        for secret in truth.prompts
        if order[secret.prompt] % 2 == 0
        for tokens, length in zip(secret.tokens, secret.prompt_lengths, strict=True)
    }
    return list(texts) if len(order) > 1 else [text[:1] for text in texts]


@dataclass(frozen=True, slots=True)
class _Fitted:
    ridge: Ridge
    index: int
    training: str

    def predict(self, rows: Float32) -> Float32:
        return self.ridge.predict(Pairs.of(rows, np.empty(0, dtype=np.int64)).rows, self.index)


class _Inversion(Attack):
    """What both depths share."""

    corpora = ("short", "decode")
    # The targets of the regression and the dictionary of the answers are embeddings at norm 1.
    _missing: ClassVar[str]

    def _place(self, view: View) -> Place | None:
        raise NotImplementedError

    def _public(self, view: View, truth: Truth, place: Place) -> Pairs:
        """Pairs the attacker computes himself, without any capture."""
        if place == (0, "qkv"):
            return Pairs.of(view.model.dictionary, np.arange(view.model.config.vocab_size))
        return Pairs.of(*training_pairs(own_rows(view.model, known_openings(view, truth), place)))

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        place = self._place(view)
        if place is None:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"{self._missing} ({describe_places(view)})",
            )  # fmt: skip
        found = blocks(view, truth, place)
        public = self._public(view, truth, place)
        answers = unit_rows(view.model.embedding)
        vocabulary = len(answers)
        first = np.zeros(vocabulary, dtype=np.bool_)
        first[rng.permutation(vocabulary)[: vocabulary // 2]] = True
        progress(0.2)

        known, sought = split(found)
        halves = (first, ~first)
        fits = [_fit(known, public, ~tested, answers, rng) for tested in halves]
        progress(0.5)
        scores = _score(sought, [f.predict for f in fits], halves, answers)
        progress(0.8)
        blind = [replace(b, rows=random_operand(b.rows, rng)) for b in sought]
        floor = _score(blind, [f.predict for f in fits], halves, answers)
        progress(1.0)
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=recovery(scores.any_row),
            chance=recovery(floor.any_row),
            interval=recovery_interval(scores.any_row, rng),
            details={
                "aligned_rows": recovery(scores.aligned),
                "chance_aligned_rows": recovery(floor.aligned),
                "other_operand": recovery(scores.other),
                "layer": float(place[0]),
                "tokens": float(sum(len(h) for h in scores.any_row)),
                **{f"alpha_{i}": fit.ridge.alphas[fit.index] for i, fit in enumerate(fits)},
            },
            notes=[f"Half {i} trained on {fit.training}." for i, fit in enumerate(fits)],
        )


def _fit(
    known: Sequence[Block], public: Pairs, half: NDArray[np.bool_], answers: Float32, rng: np.random.Generator
) -> _Fitted:
    """The best of all penalties and training sets, fitted on the tokens of ``half``.

    Judged by the rule that the attack is scored by, on operands that the attacker knows (public
    rows if there are none): how many tokens of the other half are found among some thousands.
    """
    own = public.within(half)
    sets = {"rows computed from public weights": own}
    if known and len(captured := aligned_pairs(known).within(half)):
        sets["known captures and rows computed from public weights"] = captured + own
        sets["known captures"] = captured
    judged = known[:_JUDGED] or _plain_blocks(public.within(~half), rng)
    tokens = np.unique(np.concatenate([b.tokens for b in judged]))
    rivals = np.union1d(tokens, rng.integers(0, len(answers), _RIVALS))
    rows = Pairs.of(np.concatenate([b.rows for b in judged]), tokens[:0]).rows
    owner = np.repeat(np.arange(len(judged)), [len(b.rows) for b in judged])
    best: tuple[float, _Fitted] | None = None
    for name, pairs in sets.items():
        ridge = Ridge(pairs.rows, answers[pairs.tokens])
        for index, predicted in enumerate(ridge(rows)):
            named = rivals[np.argmax(predicted @ answers[rivals].T, axis=1)]
            hits = [np.isin(b.tokens, named[owner == i])[~half[b.tokens]] for i, b in enumerate(judged)]
            right = recovery(hits)
            if best is None or right > best[0]:
                best = right, _Fitted(ridge, index, name)
    assert best is not None  # noqa: S101 - there is always the public set
    return best[1]


def _plain_blocks(pairs: Pairs, rng: np.random.Generator) -> list[Block]:
    """Stand-ins for known operands: a few of the attacker's own rows, each its own block."""
    chosen = rng.permutation(len(pairs))[: 16 * _JUDGED]
    return [
        Block(prompt=-1, rows=pairs.rows[[i]], tokens=pairs.tokens[[i]], aligned=np.zeros(1, dtype=np.int64))
        for i in chosen
    ]


def _score(
    sought: Sequence[Block],
    predictors: Sequence[Callable[[Float32], Float32]],
    halves: Sequence[NDArray[np.bool_]],
    answers: Float32,
) -> Hits:
    """Every token by the predictor that did not train on it. Rows and their negatives vote."""
    bounds = np.cumsum([0, *(len(b.rows) for b in sought)])
    rows = np.concatenate([b.rows for b in sought])
    by_half = []
    for predict, half in zip(predictors, halves, strict=True):
        named = np.stack([top_tokens(predict(r), answers, 1)[:, 0] for r in (rows, -rows)], axis=1)
        # Only the tokens of its own half are its to name.
        named[~half[named]] = -1
        by_half.append(named)
    votes = np.concatenate(by_half, axis=1)
    return hits_of(sought, [votes[low:high] for low, high in pairwise(bounds)])


class EmbeddingInversion(_Inversion):
    """IMA: the shallowest operand on the wire."""

    name = "ima"
    title = "IMA (ridge)"
    source = "Song and Raghunathan, CCS 2020, linear inverter; AloePri (arXiv 2603.01499), Appendix F"
    assumes = (
        "Public weights; half of the prompts known together with their captures, row i taken to be "
        "token i. Training rows: those captures, the public dictionary, or both, whichever does better "
        "on known data"
    )
    measures = (
        "Fraction of tokens of unknown prompts that are the nearest embedding of the prediction from "
        "any row of their operand or its negative (TTRSR, top 1 of the whole vocabulary), vocabulary-disjoint"
    )
    _missing = "no qkv and no LM head on the wire"

    def _place(self, view: View) -> Place | None:
        return shallowest(view)


class InternalStateInversion(_Inversion):
    """ISA: an operand at 0.8 of the depth."""

    name = "isa"
    title = "ISA (ridge)"
    source = "Internal-state attack of AloePri (arXiv 2603.01499), Appendix F"
    assumes = (
        "As IMA; in place of the dictionary, rows of texts that the public model writes after the "
        "openings of known prompts"
    )
    measures = EmbeddingInversion.measures
    _missing = "no qkv behind the first layer on the wire"

    def _place(self, view: View) -> Place | None:
        """The captured qkv nearest to layer 0.8·L."""
        deep = [layer for layer, op in places(view) if op == "qkv" and layer > 0]
        if deep:
            wanted = 0.8 * view.model.config.num_layers
            return min(deep, key=lambda layer: abs(layer - wanted)), "qkv"
        return (HEAD_LAYER, "lm_head") if places(view) == [(HEAD_LAYER, "lm_head")] else None
