"""Nearest neighbour: operand rows of the first layer against what every token looks like there.

The rules that all row-recovery attacks share are here: which token a row belongs to, and when it
counts as recovered. Shapes: s operand rows, n data rows, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from evals.attacks.model import HEAD_LAYER, Attack, Op, Outcome, PromptTruth, Report, Truth, View
from evals.attacks.public import PublicModel

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Place = tuple[int, Op]

# Rows scored against the whole vocabulary at a time.
_CHUNK = 512
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One operand with the tokens of its data rows.

    ``rows`` ``(s, d)`` float32; ``tokens`` ``(n,)``; ``aligned`` ``(n,)`` is the operand row that
    stands where the data row of each token would stand without a mask.
    """

    prompt: int
    rows: Float32
    tokens: Int64
    aligned: Int64


def wire_rows(operand: NDArray[np.generic]) -> Float32:
    """An operand as float32. Elements of the ring of integers mod 2³² are read as signed."""
    if operand.dtype == np.uint32:
        return operand.view(np.int32).astype(np.float32)
    return operand.astype(np.float32)


def unit_rows(rows: Float32) -> Float32:
    """Rows scaled to norm 1; zero rows stay zero."""
    scaled = np.empty(rows.shape, dtype=np.float32)
    # In parts that stay in the cache. Sums of a row do not depend on the part it is in.
    for begin in range(0, len(rows), _CHUNK):
        part = rows[begin : begin + _CHUNK]
        norms = np.linalg.norm(part, axis=1, keepdims=True)
        np.divide(part, np.maximum(norms, np.finfo(np.float32).tiny), out=scaled[begin : begin + _CHUNK])
    return scaled


def row_tokens(truth: PromptTruth, forward: int) -> list[Int64]:
    """The tokens of each sequence that enter a pass: its prompt in the first, one in each later."""
    return [
        np.asarray(tokens[0 if forward == 0 else length + forward - 1 : length + forward], dtype=np.int64)
        for tokens, length in zip(truth.tokens, truth.prompt_lengths, strict=True)
    ]


def next_tokens(model: PublicModel, rows: Float32) -> Int64:
    """The most probable token after each of the LM head's rows ``(n, hidden)``."""
    best: Int64 = np.argmax(model.logits(rows), axis=1)
    return best


def blocks(view: View, truth: Truth, place: Place) -> list[Block]:
    """Every captured operand of one layer and op, with the tokens sought.

    At the LM head that is the token its row predicts, elsewhere the token the row belongs to.

    Raises:
        ValueError: the truth does not have as many tokens as data rows.
    """
    layer, op = place
    found = []
    for capture, secret in zip(view.captures, truth.prompts, strict=True):
        for offload in capture.select(layer, op):
            plain = secret.rows.get((offload.forward, layer, op))
            if op == "lm_head":
                if plain is None:
                    raise ValueError(f"No plaintext rows of the LM head for prompt {secret.prompt}")
                tokens = next_tokens(view.model, plain)
                counts = [1] * len(tokens)
            else:
                sequences = row_tokens(secret, offload.forward)
                tokens = np.concatenate(sequences)
                counts = [len(sequence) for sequence in sequences]
                if plain is not None and len(plain) != len(tokens):
                    raise ValueError(
                        f"Prompt {secret.prompt}, pass {offload.forward}: "
                        f"{len(tokens)} tokens for {len(plain)} data rows"
                    )
            found.append(
                Block(
                    prompt=capture.prompt,
                    rows=wire_rows(offload.operand),
                    tokens=tokens,
                    aligned=_aligned(counts, len(offload.operand), view.parameters),
                )
            )
    return found


def _aligned(counts: Sequence[int], s: int, parameters: Mapping[str, int | float | str]) -> Int64:
    """Where each data row stands in an operand of ``s`` rows: first in its sequence's block.

    Blocks of n + k rows, or of the next power of two, if that gives s; else all rows share one.
    """
    k = int(parameters.get("shield_rows", 0))
    exact = [n + k if n else 0 for n in counts]
    for sizes in (exact, [1 << (size - 1).bit_length() if size else 0 for size in exact]):
        if sum(sizes) == s:
            starts = np.cumsum([0, *sizes[:-1]])
            return np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=True)])
    return np.arange(sum(counts))


def places(view: View) -> list[Place]:
    """The layers and ops of a view that have offloads."""
    return sorted({(o.layer, o.op) for capture in view.captures for o in capture.offloads})


def describe_places(view: View) -> str:
    """What is on the wire, for a reason that says what is missing."""
    seen = ", ".join(f"{op} of layer {layer}" if layer >= 0 else op for layer, op in places(view)[:8])
    return f"captured: {seen or 'nothing'}"


def shallowest(view: View) -> Place | None:
    """The captured offload nearest to the embedding: qkv of the first layer, else the LM head."""
    layers = [layer for layer, op in places(view) if op == "qkv"]
    if layers:
        return min(layers), "qkv"
    return (HEAD_LAYER, "lm_head") if (HEAD_LAYER, "lm_head") in places(view) else None


@njit(cache=True, nogil=True, parallel=True)
def _largest(scores: Any, sign: Any, best: Any) -> None:
    """``best[i]`` gets the columns of the largest ``sign · scores[i]``, in order."""
    m, columns = scores.shape
    k = best.shape[1]
    for i in prange(m):
        values = np.full(k, -np.inf, dtype=np.float32)
        for j in range(columns):
            value = sign * scores[i, j]
            if value > values[k - 1]:
                place = k - 1
                while place > 0 and values[place - 1] < value:
                    values[place] = values[place - 1]
                    best[i, place] = best[i, place - 1]
                    place -= 1
                values[place] = value
                best[i, place] = j


def top_tokens(rows: Float32, dictionary: Float32, k: int, *, both_signs: bool = False) -> Int64:
    """The ``k`` dictionary rows of largest inner product with each row: ``(m, k)``, best first.

    ``both_signs`` adds those of the negated rows: ``(m, k, 2)``.
    """
    signs = (1.0, -1.0) if both_signs else (1.0,)
    best = np.zeros((len(signs), len(rows), k), dtype=np.int64)
    for begin in range(0, len(rows), _CHUNK):
        scores = np.ascontiguousarray(rows[begin : begin + _CHUNK], dtype=np.float32) @ dictionary.T
        for out, sign in zip(best, signs, strict=True):
            _largest(scores, np.float32(sign), out[begin : begin + _CHUNK])
    return np.moveaxis(best, 0, -1) if both_signs else best[0]


def recovery(hits: Sequence[NDArray[np.bool_]]) -> float:
    """TTRSR: the fraction of all tokens that were recovered. ``hits`` has one array per operand."""
    total = sum(len(h) for h in hits)
    return float(sum(int(h.sum()) for h in hits) / total) if total else float("nan")


def recovery_interval(
    hits: Sequence[NDArray[np.bool_]], rng: np.random.Generator
) -> tuple[float, float] | None:
    """95 % bootstrap interval of :func:`recovery`, over operands. None if there are too few."""
    counts = np.asarray([(h.sum(), len(h)) for h in hits if len(h)], dtype=np.float64)
    if len(counts) < 2:
        return None
    weights = rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=_RESAMPLES)
    right, total = (weights @ counts).T
    low, high = np.quantile(right / total, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Hits:
    """Which tokens of each operand were named.

    By any of its rows; by the row that is aligned with the token; by any row of another operand,
    which is what common tokens account for (empty if there is only one operand).
    """

    any_row: list[NDArray[np.bool_]]
    aligned: list[NDArray[np.bool_]]
    other: list[NDArray[np.bool_]]


def hits_of(found: Sequence[Block], votes: Sequence[Int64]) -> Hits:
    """``votes[i]`` ``(s, ...)`` are the tokens that each row of operand i names."""
    return Hits(
        any_row=[np.isin(b.tokens, v) for b, v in zip(found, votes, strict=True)],
        aligned=[
            (v[b.aligned].reshape(len(b.tokens), -1) == b.tokens[:, None]).any(axis=1)
            for b, v in zip(found, votes, strict=True)
        ],
        other=[np.isin(b.tokens, votes[i - 1]) for i, b in enumerate(found)] if len(found) > 1 else [],
    )


def random_operand(rows: Float32, rng: np.random.Generator) -> Float32:
    """What knows nothing: Gaussian rows of the same shape."""
    return rng.standard_normal(rows.shape, dtype=np.float32)


class NearestNeighbour(Attack):
    """Cosine top-k of operand rows against the public dictionary."""

    name = "nn"
    title = "Nearest neighbour"
    source = (
        "Embedding inversion by search: Song and Raghunathan, CCS 2020; Morris et al., EMNLP 2023; "
        "AloePri (arXiv 2603.01499), Appendix F"
    )
    assumes = "Public weights. Each operand row is a token's row, up to scale and sign."
    measures = (
        "Fraction of tokens that are the best match of any row of their operand (TTRSR, top 1), every "
        "operand row and its negative voting; at the LM head the token that is predicted"
    )
    corpora = ("short", "decode")
    top = (1, 5, 10)

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        place = shallowest(view)
        if place is None or place[0] > 0:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no qkv of layer 0 and no LM head on the wire ({describe_places(view)})",
            )  # fmt: skip
        if place[1] == "lm_head":
            dictionary = view.model.spec(*place).load().astype(np.float32)
        else:
            dictionary = unit_rows(view.model.dictionary)
        found = blocks(view, truth, place)
        hits = self._hits([b.rows for b in found], found, dictionary)
        progress(0.5)
        floor = self._hits([random_operand(b.rows, rng) for b in found], found, dictionary)
        progress(1.0)
        details = {"operands": float(len(found)), "tokens": float(sum(len(b.tokens) for b in found))}
        for k in self.top:
            details[f"top_{k}"] = recovery(hits[k].any_row)
            details[f"aligned_rows_top_{k}"] = recovery(hits[k].aligned)
            details[f"other_operand_top_{k}"] = recovery(hits[k].other)
            details[f"chance_top_{k}"] = recovery(floor[k].any_row)
        return Outcome(
            attack=self.name,
            measure=self.measures,
            value=details["top_1"],
            chance=details["chance_top_1"],
            interval=recovery_interval(hits[1].any_row, rng),
            details=details,
        )

    def _hits(self, operands: list[Float32], found: list[Block], dictionary: Float32) -> dict[int, Hits]:
        """The hits for each k."""
        named = top_tokens(np.concatenate(operands), dictionary, max(self.top), both_signs=True)
        bounds = np.cumsum([0, *(len(rows) for rows in operands)])
        votes = [named[low:high] for low, high in pairwise(bounds)]
        return {k: hits_of(found, [v[:, :k] for v in votes]) for k in self.top}
