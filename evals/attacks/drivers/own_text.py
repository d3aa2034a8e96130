"""Text an attacker writes himself: what the public model says after openings he knows.

Rows of such text at any layer cost him one pass each, and look like a victim's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evals.attacks.drivers.nearest import Float32, Int64, Place, next_tokens
from evals.attacks.kept import kept
from evals.attacks.public import PublicModel

SEQUENCES = 256
LENGTH = 32
# The text is a data set made once, not part of an experiment: its seed is its name.
_SEED = 20_261
_OPENING = 3

Corpus = list[tuple[Int64, Float32]]


def write(model: PublicModel, openings: Sequence[Sequence[int]], sequences: int, length: int) -> list[Int64]:
    """``sequences`` texts of ``length`` tokens drawn from the model after the openings in turn.

    One to three tokens of an opening are kept.
    """
    rng = np.random.default_rng(_SEED)
    order = rng.integers(0, len(openings), sequences)
    kept = rng.integers(1, _OPENING + 1, sequences)
    starts = [openings[opening][:keep] for opening, keep in zip(order, kept, strict=True)]
    return list(model.continuations(starts, length, rng))


def own_rows(
    model: PublicModel,
    openings: Sequence[Sequence[int]],
    place: Place,
    *,
    sequences: int | None = None,
    length: int | None = None,
) -> Corpus:
    """Own texts and their rows at ``place``: ``(tokens (n,), rows (n, d))`` each.

    :data:`SEQUENCES` texts of :data:`LENGTH` tokens unless told otherwise. At the LM head the tokens
    are those predicted. Kept, since every condition asks for the same.
    """
    sequences, length = sequences or SEQUENCES, length or LENGTH
    text = "own text", tuple(map(tuple, openings)), sequences, length

    def rows() -> Corpus:
        texts = kept(model, text, lambda: write(model, openings, sequences, length))
        found = [r[place] for r in model.rows([t.tolist() for t in texts], {place})]
        return [
            (next_tokens(model, r) if place[1] == "lm_head" else t, r)
            for t, r in zip(texts, found, strict=True)
        ]

    return kept(model, (*text, place), rows)


def training_pairs(corpus: Corpus) -> tuple[Float32, NDArray[np.int64]]:
    """Rows ``(N, d)`` and tokens ``(N,)`` of a corpus, laid end to end."""
    return np.concatenate([rows for _, rows in corpus]), np.concatenate([tokens for tokens, _ in corpus])
