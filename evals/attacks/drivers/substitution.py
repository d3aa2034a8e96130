"""Deciphering a fixed substitution of tokens by how often and next to what they stand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from evals.attacks.drivers.nearest import Int64

# Symbols that are matched by the words around them, and how often.
_DECIPHERED = 400
_ROUNDS = 10


def decipher(texts: list[Int64], known: list[Int64]) -> dict[int, int]:
    """A substitution from symbols of ``texts`` to tokens of ``known``.

    Symbols are matched by rank of frequency. The most frequent ones are assigned anew (optimally, one
    to one), first by their profiles, then in rounds by their neighbours under the key so far.
    """
    symbols = [s for s, _ in Counter(np.concatenate(texts).tolist()).most_common()]
    tokens = [t for t, _ in Counter(np.concatenate(known).tolist()).most_common()]
    size = min(len(symbols), len(tokens), _DECIPHERED)
    (alone, follows), (their_alone, they_follow) = (
        _statistics(known, tokens[:size]), _statistics(texts, symbols[:size])
    )  # fmt: skip
    profiles = np.stack([_profiles(alone, follows), _profiles(their_alone, they_follow)])
    _, key = linear_sum_assignment(cdist(profiles[1], profiles[0], "sqeuclidean"))
    for _ in range(_ROUNDS):
        likeness = np.outer(their_alone, alone)
        likeness += they_follow @ follows[:, key].T + they_follow.T @ follows[key]
        rows, columns = linear_sum_assignment(likeness, maximize=True)
        previous, key = key, columns[np.argsort(rows)]
        if np.array_equal(previous, key):
            break
    substitution = dict(zip(symbols, tokens, strict=False))
    substitution.update({symbols[i]: tokens[int(t)] for i, t in enumerate(key)})
    return substitution


def _statistics(texts: list[Int64], alphabet: list[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Square roots of the frequencies of symbols ``(size,)`` and of what follows what ``(size, size)``."""
    index = {symbol: i for i, symbol in enumerate(alphabet)}
    alone = np.zeros(len(alphabet))
    follows = np.zeros((len(alphabet), len(alphabet)))
    for text in texts:
        places = [index.get(symbol, -1) for symbol in text.tolist()]
        for place in places:
            alone[place] += place >= 0
        for a, b in pairwise(places):
            if a >= 0 and b >= 0:
                follows[a, b] += 1.0
    return np.sqrt(alone / max(alone.sum(), 1.0)), np.sqrt(follows / max(follows.sum(), 1.0))


def _profiles(alone: NDArray[np.float64], follows: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a substitution does not change of a symbol: how often it stands, alone, twice, and by whom."""
    return np.concatenate(
        [
            alone[:, None],
            np.diagonal(follows)[:, None],
            np.sort(follows, axis=1)[:, ::-1],
            np.sort(follows.T, axis=1)[:, ::-1],
        ],
        axis=1,
    )
