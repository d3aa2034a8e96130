"""Attacks on other systems' wires: obfuscated tables, substituted token ids, attention scores.

Each looks in the captures for what it needs. If it is there, it attacks; if not, the outcome says
what was looked for and what was found instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from evals.attacks.drivers.inversion import Pairs, Ridge
from evals.attacks.drivers.nearest import (
    Float32,
    Int64,
    recovery,
    recovery_interval,
    row_tokens,
    top_tokens,
    unit_rows,
    wire_rows,
)
from evals.attacks.drivers.substitution import decipher
from evals.attacks.model import OPS, Attack, Offload, Outcome, PromptTruth, Report, Truth, View

# Of a softmax row's sum: what float16 rounding of its terms leaves open.
_SUM_TOLERANCE = 2e-2
# Of a product's norm: float16 operands, float32 sums.
_PRODUCT_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Found:
    """An offload that carries what was looked for."""

    offload: Offload
    secret: PromptTruth


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a look through all captures found, and what it saw."""

    found: list[Found]
    seen: str


def _inspect(view: View, truth: Truth, carries: Any) -> list[Found]:
    return [
        Found(offload, secret)
        for capture, secret in zip(view.captures, truth.prompts, strict=True)
        for offload in capture.offloads
        if carries(offload)
    ]


def find_tables(view: View, truth: Truth) -> Inspection:
    """Operands indexed by token: as many rows as the vocabulary has entries."""
    vocabulary = view.model.config.vocab_size
    found = _inspect(view, truth, lambda o: o.operand.ndim == 2 and len(o.operand) == vocabulary)
    most = max((len(o.operand) for c in view.captures for o in c.offloads), default=0)
    return Inspection(found, f"operands have at most {most} rows, a token table {vocabulary}")


def find_token_ids(view: View, truth: Truth) -> Inspection:
    """Operands that are a list of integers below the vocabulary size."""
    vocabulary = view.model.config.vocab_size

    def carries(offload: Offload) -> bool:
        operand = offload.operand
        if operand.size != max(operand.shape, default=0):
            return False
        values = operand.astype(np.float64).ravel()
        return bool(np.all((values == np.round(values)) & (values >= 0) & (values < vocabulary)))

    found = _inspect(view, truth, carries)
    kinds = sorted({str(o.operand.dtype) for c in view.captures for o in c.offloads})
    narrowest = min((min(o.operand.shape) for c in view.captures for o in c.offloads), default=0)
    widths = sorted({o.operand.shape[-1] for c in view.captures for o in c.offloads})
    return Inspection(
        found,
        f"no operand is a list of integers below {vocabulary}: they are {', '.join(kinds)} matrices of "
        f"widths {', '.join(map(str, widths))}, the smallest side {narrowest}",
    )


def find_attention_scores(view: View, truth: Truth) -> Inspection:
    """Operands ``(h, n, n)``, or rows that are no linear layer's and sum to 1 as softmax rows do."""
    heads = view.model.config.num_heads

    def carries(offload: Offload) -> bool:
        operand = offload.operand
        if operand.ndim == 3:
            return bool(operand.shape[0] == heads and operand.shape[1] <= operand.shape[2])
        if operand.ndim != 2 or not operand.size or operand.shape[1] == _width(view, offload):
            return False
        values = wire_rows(operand)
        return bool(np.all(values >= 0) and np.all(np.abs(values.sum(axis=1) - 1.0) < _SUM_TOLERANCE))

    found = _inspect(view, truth, carries)
    offloads = [o for c in view.captures for o in c.offloads]
    fit = sum(o.operand.ndim == 2 and o.operand.shape[1] == _width(view, o) for o in offloads)
    return Inspection(
        found,
        f"{fit} of {len(offloads)} operands are matrices of the width of a public linear weight, and none "
        f"is ({heads}, n, n) or has softmax rows",
    )


def _width(view: View, offload: Offload) -> int:
    return view.model.spec(offload.layer, offload.op).d_in if offload.op in OPS else -1


def foreign_products(view: View) -> tuple[int, int]:
    """Results that are not operand times public weight, and results that were kept.

    A scheme that sends obfuscated weights would show here. One offload of each layer and op is
    tried; ring schemes are compared modulo 2³², so only float operands count.
    """
    tried: set[tuple[int, str]] = set()
    foreign = 0
    for offload in (o for c in view.captures for o in c.offloads):
        place = (offload.layer, offload.op)
        floats = np.issubdtype(offload.operand.dtype, np.floating)
        if offload.result is None or not floats or offload.op not in OPS or place in tried:
            continue
        tried.add(place)
        weight = view.model.spec(*place).load().astype(np.float32)
        operand, result = wire_rows(offload.operand), wire_rows(offload.result)
        if operand.shape[1] != weight.shape[1] or result.shape[1] != len(weight):
            foreign += 1
            continue
        error = float(np.linalg.norm(operand @ weight.T - result)) / max(float(np.linalg.norm(result)), 1e-30)
        foreign += bool(error > _PRODUCT_TOLERANCE)
    return foreign, len(tried)


class _Conditional(Attack):
    """Runs where an inspection finds what it needs."""

    needs: ClassVar[str]

    @abstractmethod
    def inspect(self, view: View, truth: Truth) -> Inspection:
        """Look for what the attack needs."""

    @abstractmethod
    def attack(
        self, view: View, truth: Truth, found: list[Found], rng: np.random.Generator
    ) -> tuple[list[NDArray[np.bool_]], float]:
        """Which tokens of each offload were recovered, and the chance."""

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        inspection = self.inspect(view, truth)
        if not inspection.found:
            progress(1.0)
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"needs {self.needs}; {inspection.seen}",
            )  # fmt: skip
        hits, chance = self.attack(view, truth, inspection.found, rng)
        progress(1.0)
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=recovery(hits),
            chance=chance,
            interval=recovery_interval(hits, rng),
            details={"offloads": float(len(inspection.found))},
        )


class _TableAttack(_Conditional):
    """Matches the rows of an obfuscated token table to tokens by what obfuscation leaves alone."""

    needs = "an obfuscated table with one row for each token"
    measures = "Fraction of the table's rows whose token is found"

    def inspect(self, view: View, truth: Truth) -> Inspection:
        """Token tables, and whether products used other weights than the public ones."""
        tables = find_tables(view, truth)
        foreign, tried = foreign_products(view)
        found = [f for f in tables.found if self.usable(f.offload)]
        products = (
            f"{foreign} of {tried} results tried are not products with the public weight"
            if tried
            else "no results were kept to compare with the public weights"
        )
        return Inspection(found, f"{tables.seen}; {products}")

    def usable(self, offload: Offload) -> bool:
        """Whether a table comes with all that the attack wants."""
        return True

    @abstractmethod
    def invariants(self, view: View, offload: Offload) -> tuple[Float32, Float32]:
        """What is compared: of the obfuscated rows ``(V, m)``, and of the public ones."""

    def attack(
        self, view: View, truth: Truth, found: list[Found], rng: np.random.Generator
    ) -> tuple[list[NDArray[np.bool_]], float]:
        """Nearest invariants."""
        hits = []
        public = unit_rows(view.model.embedding)
        for item in found:
            o = item.offload
            plain = item.secret.rows[o.forward, o.layer, o.op]
            tokens = top_tokens(unit_rows(plain), public, 1)[:, 0]
            theirs, ours = self.invariants(view, o)
            center, spread = ours.mean(axis=0), ours.std(axis=0) + np.float32(1e-12)
            named = cKDTree((ours - center) / spread).query((theirs - center) / spread)[1]
            hits.append(tokens == named)
        return hits, 1.0 / view.model.config.vocab_size


class VocabularyMatching(_TableAttack):
    """VMA: rows sorted, so that a secret order of the columns does not matter."""

    name = "vma"
    title = "Vocabulary matching (VMA)"
    source = "AloePri (arXiv 2603.01499), Appendix F: row-sort matching of weight pairs"
    assumes = "An obfuscated token table on the wire, and the public table."

    def invariants(self, view: View, offload: Offload) -> tuple[Float32, Float32]:
        """Sorted quantiles of each row."""
        theirs = np.sort(wire_rows(offload.operand), axis=1)
        ours = np.sort(view.model.embedding, axis=1)
        points = np.linspace(0.0, 1.0, 16)
        columns = [np.round(points * (t.shape[1] - 1)).astype(np.int64) for t in (theirs, ours)]
        return theirs[:, columns[0]], ours[:, columns[1]]


class InvariantAttack(_TableAttack):
    """IA: moments of each token's gate activations, which a change of basis leaves alone."""

    name = "ia"
    title = "Invariant attack (IA)"
    source = "AloePri (arXiv 2603.01499), Appendix F: Avg(e·W_gate) = Avg(ẽ·W̃_gate)"
    assumes = "An obfuscated token table and its products with an obfuscated gate weight."
    needs = "an obfuscated table with one row for each token, and its products with the gate weight"

    def usable(self, offload: Offload) -> bool:
        """Products of the gate must have been kept."""
        return offload.op == "gate_up" and offload.result is not None

    def invariants(self, view: View, offload: Offload) -> tuple[Float32, Float32]:
        """Mean, root mean square, and cube and fourth roots of the next moments."""
        half = view.model.config.intermediate_size
        weight = view.model.spec(offload.layer, "gate_up").load()[:half].astype(np.float32)
        assert offload.result is not None  # noqa: S101 - see usable
        return _moments(wire_rows(offload.result)[:, :half]), _moments(view.model.embedding @ weight.T)


def _moments(values: Float32) -> Float32:
    third = np.cbrt((values**3).mean(axis=1))
    fourth = np.sqrt(np.sqrt((values**4).mean(axis=1)))
    return np.stack([values.mean(axis=1), np.sqrt((values**2).mean(axis=1)), third, fourth], axis=1)


class TokenFrequency(_Conditional):
    """TFMA and SDA: a fixed substitution of token ids, by how often and where they stand."""

    name = "tfma-sda"
    title = "Token frequency and substitution (TFMA, SDA)"
    source = "AloePri (arXiv 2603.01499), Appendix F: token frequency matching, substitution deciphering"
    assumes = "Token ids on the wire under one fixed substitution; half of the prompts' texts known."
    measures = "Fraction of tokens deciphered"
    needs = "a list of (substituted) token ids"

    def inspect(self, view: View, truth: Truth) -> Inspection:
        """Lists of ids."""
        return find_token_ids(view, truth)

    def attack(
        self, view: View, truth: Truth, found: list[Found], rng: np.random.Generator
    ) -> tuple[list[NDArray[np.bool_]], float]:
        """Ranks of frequency first, then neighbours; statistics from the known half's texts."""
        order = {p: i for i, p in enumerate(sorted({s.prompt for s in truth.prompts}))}
        known = [np.concatenate(row_tokens(s, 0)) for s in truth.prompts if order[s.prompt] % 2 == 0]
        sought = [f for f in found if order[f.secret.prompt] % 2] or found
        texts = [f.offload.operand.ravel().astype(np.int64) for f in sought]
        key = decipher(texts, known)
        hits = []
        for item, text in zip(sought, texts, strict=True):
            tokens = np.concatenate(row_tokens(item.secret, item.offload.forward))
            named = np.asarray([key.get(int(symbol), -1) for symbol in text[: len(tokens)]])
            hits.append(named == tokens[: len(named)])
        return hits, 1.0 / view.model.config.vocab_size


class AttentionScoreInversion(_Conditional):
    """ISA on attention scores: ridge from a position's scores to its embedding."""

    name = "isa-attention"
    title = "ISA on attention scores"
    source = "AloePri (arXiv 2603.01499), Appendix F: internal-state attack on attention scores"
    assumes = "Attention scores (h, n, n) on the wire; half of the prompts known with their captures."
    measures = "Fraction of tokens of unknown prompts that are the nearest embedding of the prediction"
    needs = "attention scores"

    def inspect(self, view: View, truth: Truth) -> Inspection:
        """Score tensors."""
        return find_attention_scores(view, truth)

    def attack(
        self, view: View, truth: Truth, found: list[Found], rng: np.random.Generator
    ) -> tuple[list[NDArray[np.bool_]], float]:
        """Every second prompt is known. Of all penalties the best is reported: an upper bound."""
        answers = unit_rows(view.model.embedding)
        width = max(f.offload.operand.shape[-1] for f in found)
        items = [(f.secret.prompt, *_score_rows(f, width)) for f in found]
        order = {p: i for i, p in enumerate(sorted({p for p, _, _ in items}))}
        known = [(rows, tokens) for p, rows, tokens in items if order[p] % 2 == 0]
        sought = [(rows, tokens) for p, rows, tokens in items if order[p] % 2]
        if not sought:
            sought = known
        pairs = Pairs.of(np.concatenate([r for r, _ in known]), np.concatenate([t for _, t in known]))
        ridge = Ridge(pairs.rows, answers[pairs.tokens])
        best: list[NDArray[np.bool_]] = []
        for index in range(len(ridge.alphas)):
            hits = [
                top_tokens(ridge.predict(Pairs.of(r, t).rows, index), answers, 1)[:, 0] == t
                for r, t in sought
            ]
            if not best or recovery(hits) > recovery(best):
                best = hits
        common = Counter(pairs.tokens.tolist()).most_common(1)[0][0]
        return best, recovery([t == common for _, t in sought])


def _score_rows(found: Found, width: int) -> tuple[Float32, Int64]:
    """One row of features for each position: its scores of all heads, padded to ``width``."""
    operand = found.offload.operand
    scores = wire_rows(operand)
    tokens = np.concatenate(row_tokens(found.secret, found.offload.forward))
    if scores.ndim == 2:
        # Heads one below the other.
        scores = scores.reshape(-1, len(tokens), scores.shape[1])
    heads, n, m = scores.shape
    padded = np.zeros((n, heads, width), dtype=np.float32)
    padded[:, :, :m] = np.swapaxes(scores, 0, 1)
    return padded.reshape(n, heads * width), tokens[:n]
