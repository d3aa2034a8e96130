"""Walks by one place alone: candidates for the next token in the order of the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import HEAD_LAYER
from evals.attacks.public import PublicModel
from evals.attacks.steps import Place
from evals.attacks.walk import Beam, Evidence, Float32, Walk

Int64 = NDArray[np.int64]

HEAD: Place = (HEAD_LAYER, "lm_head")
# A beam stops early when its best candidate is this much closer than the second.
_GAP = 0.3


def walk_alone(
    model: PublicModel,
    beam: Beam,
    seen: Evidence,
    place: Place,
    known: Sequence[int],
    start: Sequence[int],
    true: Sequence[int],
) -> tuple[list[int], list[int], bool]:
    """The choice at each position given the true tokens before it, the truth's rank, and whether
    any choice was plausible. Up to the first error the choices are those of an unaided walk.
    """
    walk = Walk(model.prefix(known), len(known))
    true = true[: seen.rows(0)]
    # All orders by one pass over the truth; a walk that is lost early needs few of them.
    heads = model.rows([[*known, *true]], {HEAD})[0][HEAD][len(known) :]
    order = likely(model, start)
    chosen, ranks = list[int](), list[int]()
    for token, head in zip(true, heads, strict=True):
        ranks.append(int(np.flatnonzero(order == token)[0]))
        widths = beam.widths
        if not walk.prefix.tokens and widths[-1]:
            widths = (*widths, max(beam.opening, widths[-1]))
        choice, accepted = nearest(model, widths, seen, 0, place, walk, order)
        chosen.append(choice)
        step = model.step(walk.prefix, np.array([token]), {place})
        order = ranked(model, head[None])
        walk = walk.taken(step, 0, 0, accepted)
        if walk.lost():
            break
    return chosen, ranks, any(walk.accepted)


def nearest(
    model: PublicModel, widths: Sequence[int], seen: Evidence, forward: int, place: Place, walk: Walk,
    order: Int64,
) -> tuple[int, bool]:  # fmt: skip
    """The token of the smallest score, and whether it stands out."""
    scores = np.empty(0, dtype=np.float32)
    for width in widths:
        tokens = order[len(scores) : width or len(order)]
        if not len(tokens):
            continue
        rows = model.next_rows(walk.prefix, tokens, place)
        before = walk.rows.get((forward, place), ())
        scores = np.concatenate([scores, seen.score(forward, place, rows, before)])
        first, second = np.partition(scores, 1)[:2]
        if first < 1.0 and first <= _GAP * second:
            return int(order[np.argmin(scores)]), True
    return int(order[np.argmin(scores)]), bool(scores.min() <= 1.0)


def likely(model: PublicModel, tokens: Sequence[int]) -> Int64:
    """Tokens ``(V,)`` from the most to the least probable after ``tokens``."""
    return ranked(model, model.rows([tokens], {HEAD})[0][HEAD][-1:])


def ranked(model: PublicModel, row: Float32) -> Int64:
    """Tokens ``(V,)`` by the logits of one of the LM head's rows ``(1, hidden)``."""
    order: Int64 = np.argsort(-model.logits(row)[0], kind="stable")
    return order
