"""Bank: which of many candidate sentences was in the prompt.

One product scores the whole vocabulary against an operand; a candidate's score is a gather over its
tokens. Where layer 0 is not on the wire, or has at least as many rows as columns, candidates are run
through the public model instead. Shapes: N candidates, T tokens, s operand rows, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from evals.attacks.corpus import candidates
from evals.attacks.kept import kept
from evals.attacks.model import HEAD_LAYER, Attack, CorpusName, Outcome, Report, Truth, View
from evals.attacks.public import PublicModel
from evals.attacks.relative_leverage import relative_leverages
from evals.attacks.steps import Place
from evals.attacks.subspace import joint_basis, joint_residuals
from evals.attacks.walk import Evidence, evidence_of, score_vocabulary

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Tokens = tuple[int, ...]
Source = Callable[[PublicModel, int], Sequence[Tokens]]

_QKV: Place = (0, "qkv")
_HEAD: Place = (HEAD_LAYER, "lm_head")
# Weights, in a candidate's score, of what breaks ties among candidates that fit equally well.
_TIE = 1e-3
# A row space of this fraction of the width says yes to too much.
_FULL = 0.95


def public_sentences(model: PublicModel, count: int) -> list[Tokens]:
    """``count`` sentences as the prompts are made, with another seed.

    Raises:
        ValueError: the model came without a tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError("a bank of sentences needs a tokenizer: give PublicModel one, or Bank a source")
    return [prompt.tokens for prompt in candidates(count, model.tokenizer, _SEED)]


# Of the bank itself, which is public: any value but the corpora's.
_SEED = 0xBA4C


@dataclass(frozen=True, slots=True)
class Sentences:
    """Candidates: ``tokens``, and the distinct ones of each, padded with -1: ``(N, T)`` int32."""

    tokens: Sequence[Tokens]
    distinct: Int32

    @classmethod
    def of(cls, tokens: Sequence[Tokens]) -> Sentences:
        """From token ids."""
        width = max((len(sentence) for sentence in tokens), default=0)
        padded = np.full((len(tokens), width), -1, dtype=np.int32)
        for row, sentence in zip(padded, tokens, strict=True):
            row[: len(sentence)] = sentence
        padded.sort(axis=1)
        padded[:, 1:][padded[:, 1:] == padded[:, :-1]] = -1
        return cls(tokens, padded)


@njit(cache=True, nogil=True, parallel=True)
def _means(distinct: Any, values: Any, out: Any) -> None:
    """Mean of ``values`` ``(V, c)`` over the tokens of each row of ``distinct``, and their number."""
    for i in prange(distinct.shape[0]):
        count = 0
        for j in range(distinct.shape[1]):
            token = distinct[i, j]
            if token >= 0:
                count += 1
                for c in range(values.shape[1]):
                    out[i, c] += values[token, c]
        for c in range(values.shape[1]):
            out[i, c] /= max(count, 1)
        out[i, values.shape[1]] = count


def score(sentences: Sentences, tokens: Float32) -> Float32:
    """Scores ``(N,)``, smaller is likelier, from those of the vocabulary ``(V,)``: up to 1 is plausible.

    The mean logarithm over a candidate's distinct tokens of what is beyond plausible. Among equals
    the one that explains more tokens, and fits better below the limit.
    """
    floored = np.maximum(tokens, np.float32(1e-6))
    values = np.stack([np.log(np.maximum(floored, 1.0)), np.log(floored)], axis=1).astype(np.float32)
    out = np.zeros((len(sentences.tokens), 3), dtype=np.float32)
    _means(sentences.distinct, values, out)
    scores: Float32 = out[:, 0] + np.float32(_TIE) * (out[:, 1] - out[:, 2])
    return scores


def precision(scores: Float32, true: float, rng: np.random.Generator) -> float:
    """Average precision of the true candidate at a random place among the others: 1 / rank.

    ``scores`` ``(N - 1,)`` are those of the others. Its place decides among equal ones.
    """
    place = rng.integers(len(scores) + 1)
    ahead = np.count_nonzero(scores < true) + np.count_nonzero(scores[:place] == true)
    return 1.0 / (1.0 + float(ahead))


def expected_precision(size: int) -> float:
    """What a random order of ``size`` candidates gives: the mean of 1 / rank."""
    return float(np.sum(1.0 / np.arange(1, size + 1)) / size)


@dataclass(slots=True)
class _Found:
    """Average precisions by label, and the size of the bank behind each."""

    values: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, label: str, value: float, size: int) -> None:
        self.values.setdefault(label, []).append(value)
        self.sizes[label] = size

    def details(self) -> dict[str, float]:
        """Mean average precisions, and the chance of each."""
        means = {label: float(np.mean(values)) for label, values in self.values.items()}
        chances = {f"{label}: chance": expected_precision(size) for label, size in self.sizes.items()}
        return means | chances


class Bank(Attack):
    """Rank candidate sentences by how well they fit an operand.

    Args:
        sizes: candidates in the bank, the true one among them. The first is the headline.
        source: makes the bank; None: sentences from the generator of the corpora.
        opening: tokens of a long prompt that make its true sentence.
        forwarded: candidates where each has to be run through layers; at the LM head ``headed``.
        hard: candidates of the bank of permutations and near-duplicates; for ``hard_prompts`` prompts.
        shortlist: candidates that the first layer leaves where it has at least as many rows as columns.
    """

    name: ClassVar[str] = "bank"
    title: ClassVar[str] = "Candidate bank"
    source: ClassVar[str] = (
        "Trials published on the GELO authors' own wrapper (average precision 1.0 over 100,000 "
        "candidates). Leverage: Hoaglin and Welsch 1978, for more rows than columns."
    )
    assumes: ClassVar[str] = "Public weights; the true sentence is one of the candidates."
    measures: ClassVar[str] = "average precision of the true sentence in the bank"
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short", "long")

    def __init__(
        self, *, sizes: Sequence[int] = (10_000, 100_000), source: Source = public_sentences,
        opening: int = 24, forwarded: int = 1000, headed: int = 64, hard: int = 200, hard_prompts: int = 8,
        shortlist: int = 500,
    ) -> None:  # fmt: skip
        self._sizes = tuple(sizes)
        self._source = source
        # A function that another process does not know by name is told apart by its address.
        self._named = (
            repr(source) if "<" in source.__qualname__ else f"{source.__module__}.{source.__qualname__}"
        )
        self._opening = opening
        self._forwarded = forwarded
        self._headed = headed
        self._hard = hard
        self._hard_prompts = hard_prompts
        self._shortlist = shortlist

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        found, notes, headline = _Found(), list[str](), list[float]()
        size = 0
        evidence = evidence_of(view)
        first = {
            secret.prompt: index
            for index, secret in reversed(list(enumerate(truth.prompts)))
            if len(secret.tokens) == 1
        }
        chosen = sorted(first.values())
        score_vocabulary([evidence[index] for index in chosen], view.model)
        for done, index in enumerate(chosen):
            progress(done / len(chosen))
            seen, secret = evidence[index], truth.prompts[index]
            prompt = secret.tokens[0][: secret.prompt_lengths[0]]
            true = prompt[: self._opening] if view.corpus == "long" else prompt
            operands = {(o.layer, o.op): o.operand for o in view.captures[index].offloads if o.forward == 0}
            if _QKV in operands:
                value, size = self._first_layer(view, seen, operands, true, found, rng)
                if len(found.values.get("one word or the order changed, layer 0", ())) < self._hard_prompts:
                    self._hard_bank(view.model, seen, true, found, rng)
            elif place := next(iter(seen.places(0)), None):
                value, size = self._run_through(view.model, seen, place, true, found, rng)
            else:
                continue
            headline.append(value)
        progress(1.0)
        if not headline:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason="no captured prefill of one sequence has fewer operand rows than columns",
            )  # fmt: skip
        if "one word or the order changed, layer 0" in found.values:
            notes.append(
                "Half of the hard bank are permutations of the true sentence: the row space of layer 0 "
                "cannot tell them from it, rows that depend on the tokens before can."
            )
        mean, deviation = float(np.mean(headline)), float(np.std(headline))
        half = float(1.96 * deviation / np.sqrt(len(headline)))
        return Outcome(
            attack=self.name, measure=self.measures, value=mean, chance=expected_precision(size),
            interval=(max(0.0, mean - half), min(1.0, mean + half)) if len(headline) >= 8 else None,
            details=found.details() | {"prompts": float(len(headline)), "candidates": float(size)},
            notes=notes,
        )  # fmt: skip

    def _sentences(self, model: PublicModel, count: int) -> Sentences:
        return kept(model, ("bank", self._named, count), lambda: Sentences.of(self._source(model, count)))

    def _others(self, model: PublicModel, count: int, true: Tokens) -> tuple[Sentences, NDArray[np.bool_]]:
        """The bank, and which of it are not the true sentence: ``count`` - 1 of them."""
        bank = self._sentences(model, count)
        others = np.array([sentence != true for sentence in bank.tokens])
        others[np.flatnonzero(others)[count - 1 :]] = False
        return bank, others

    def _first_layer(
        self, view: View, seen: Evidence, operands: Mapping[Place, NDArray[np.generic]], true: Tokens,
        found: _Found, rng: np.random.Generator,
    ) -> tuple[float, int]:  # fmt: skip
        """By what every token looks like at layer 0."""
        model = view.model
        rows = len(operands[_QKV])
        space = seen.basis(0, _QKV)
        # Repeated tokens add rows but no rank: more rows than columns need not fill the space.
        alone = space is not None and len(space) <= _FULL * space.shape[1]
        if alone:
            tokens = seen.vocabulary(0, model)
            label = "layer 0"
        else:
            typical = self._sentences(model, self._sizes[0])
            tokens = relative_leverages(model, operands[_QKV], typical.distinct)
            label = f"layer 0, leverage at {rows} rows"
        values = []
        for size in self._sizes:
            bank, others = self._others(model, size, true)
            scores = score(bank, tokens)
            own = float(score(Sentences.of([true]), tokens)[0])
            values.append(precision(scores[others], own, rng))
            found.add(f"{label}: {size} candidates", values[-1], size)
            if not alone and size == self._sizes[0]:
                near = [bank.tokens[i] for i in np.argsort(scores) if others[i]][: self._shortlist]
                rank = np.count_nonzero(scores[others] <= own)
                joint = self._joint(view, operands, near, true, rng)
                if joint is not None:
                    # A truth that the first layer did not list stays where that had put it.
                    values[0] = joint if rank < self._shortlist else values[0]
                    found.add(f"joint over layer 0 at {rows} rows: {size} candidates", values[0], size)
        return values[0], self._sizes[0]

    def _joint(
        self, view: View, operands: Mapping[Place, NDArray[np.generic]], near: Sequence[Tokens],
        true: Tokens, rng: np.random.Generator,
    ) -> float | None:  # fmt: skip
        """By all operands of layer 0 that share A, side by side: wider than they have rows."""
        places = [place for place in operands if place[0] == 0]
        width = sum(operands[place].shape[1] for place in places)
        if view.parameters.get("per_offload") or len(operands[_QKV]) >= width:
            return None
        joint = joint_basis([operands[place] for place in places])
        head = [sentence[:8] for sentence in (*near, true)]
        rows = view.model.rows(head, set(places))
        blocks = [np.concatenate([r[place] for r in rows]) for place in places]
        logs = np.log(np.maximum(joint_residuals(blocks, joint), np.float32(1e-6)))
        means = _segments(logs, [len(sentence) for sentence in head])
        return precision(means[:-1], float(means[-1]), rng)

    def _hard_bank(
        self, model: PublicModel, seen: Evidence, true: Tokens, found: _Found, rng: np.random.Generator
    ) -> None:
        """Permutations and near-duplicates only: by the set of tokens, and by rows that see the order."""
        if seen.basis(0, _QKV) is None or len(set(true)) < 3:
            return
        others = near_duplicates(true, self._hard, model.config.vocab_size, self._pool(model), rng)
        tokens = seen.vocabulary(0, model)
        own = float(score(Sentences.of([true]), tokens)[0])
        label = "one word or the order changed"
        by_set = score(Sentences.of(others), tokens)
        found.add(f"{label}, layer 0", precision(by_set, own, rng), self._hard)
        places = [place for place in seen.places(0) if place[0] in (0, 1) and place != _QKV][:4]
        if places:
            scores = forwarded_scores(model, seen, places, [*others, true])
            found.add(f"{label}, in order", precision(scores[:-1], float(scores[-1]), rng), self._hard)

    def _pool(self, model: PublicModel) -> Int32:
        """Tokens of the bank, as often as they come."""
        distinct = self._sentences(model, self._sizes[0]).distinct
        pool: Int32 = distinct[distinct >= 0]
        return pool

    def _run_through(
        self, model: PublicModel, seen: Evidence, place: Place, true: Tokens, found: _Found,
        rng: np.random.Generator,
    ) -> tuple[float, int]:  # fmt: skip
        """By the rows of every candidate at the shallowest place on the wire."""
        size = self._headed if place == _HEAD else self._forwarded
        bank, others = self._others(model, size, true)
        key = "bank rows", self._named, size, place
        rows, counts = kept(model, key, lambda: _rows(model, place, bank.tokens))
        scores = _fits(seen, place, rows, counts)
        own = float(_fits(seen, place, *_rows(model, place, [true]))[0])
        value = precision(scores[others], own, rng)
        found.add(f"{place[1]} of layer {place[0]}: {size} candidates", value, size)
        return value, size


def _rows(model: PublicModel, place: Place, sentences: Sequence[Tokens]) -> tuple[Float32, list[int]]:
    """Rows of candidates at a place, end to end, and how many each has: one at the LM head."""
    parts = [r[place] for r in model.rows(sentences, {place})]
    if place == _HEAD:
        parts = [part[-1:] for part in parts]
    return np.concatenate(parts), [len(part) for part in parts]


def _segments(values: Float32, counts: Sequence[int]) -> Float32:
    """Means over consecutive segments."""
    starts = np.cumsum([0, *counts[:-1]])
    means: Float32 = (np.add.reduceat(values, starts) / np.asarray(counts)).astype(np.float32)
    return means


def _fits(seen: Evidence, place: Place, rows: Float32, counts: Sequence[int]) -> Float32:
    scores = np.log(np.maximum(seen.score(0, place, rows, ()), np.float32(1e-6)))
    return _segments(scores, counts)


def forwarded_scores(
    model: PublicModel, seen: Evidence, places: Sequence[Place], sentences: Sequence[Tokens]
) -> Float32:
    """Scores ``(N,)`` of candidates by their plaintext rows at some places."""
    rows = model.rows(sentences, set(places))
    counts = [len(sentence) for sentence in sentences]
    fits = [_fits(seen, place, np.concatenate([r[place] for r in rows]), counts) for place in places]
    mean: Float32 = np.mean(fits, axis=0, dtype=np.float32)
    return mean


def near_duplicates(
    true: Tokens, size: int, vocab_size: int, pool: Int32, rng: np.random.Generator
) -> list[Tokens]:
    """``size`` - 1 others: half are permutations, half have one token replaced by one of ``pool``.

    A sentence that has too few different permutations gives more of the other kind.
    """
    others: set[Tokens] = set()
    tries = 0
    while len(others) < size - 1:
        tries += 1
        changed = list(true)
        if len(others) < size // 2 and tries < 4 * size:
            changed = [true[i] for i in rng.permutation(len(true))]
        else:
            token = rng.choice(pool) if tries < 8 * size else rng.integers(vocab_size)
            changed[rng.integers(len(true))] = int(token)
        if tuple(changed) != true:
            others.add(tuple(changed))
    return sorted(others)
