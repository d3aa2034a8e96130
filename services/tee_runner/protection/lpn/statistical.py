"""Cost of attacks by dual words on a two-part instance: RLPN (SD 2.0), and low-weight words for many rows.

Carrier, Debris-Alazard, Meyer-Hilfiger and Tillich, "Statistical decoding 2.0: reducing decoding to LPN",
ASIACRYPT 2022. Products of the received word with dual words are noisy samples of a linear function of
the error on s positions, which a transform of s·2^s steps finds if there are 1/bias² of them.

Dual words come from an information set of the code without the s positions: rows of the
systematic parity check matrix have one entry outside it; sums of t of them, found by merging two lists,
are zero on λ of its k - s positions and random on the rest. The attacker either takes these for noise, or
hopes that they have no error at all and starts again with another information set if they do.
In the attacker's favour: the errors of the s positions cost nothing to find, the k - s - λ random
positions are all taken where errors are rarest, and their noise is the average over dual words
rather than that of a typical one.

Rows that share G share the dual words. A collection of N rows is told from uniform by 1/bias² samples in
all, over rows and words, so that the search for a word is paid once per N samples; there is no
transform then (s = 0), as every row has its own error.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, log2

import numpy as np

from tee_runner.protection.lpn.decoding import (
    IMPOSSIBLE,
    Binomials,
    Cost,
    Floats,
    Instance,
    Ints,
    log2_binomial,
    log2_elimination,
)

# Whether the random positions are hoped to be free of errors.
_HOPES = np.array([0.0, 1.0])


def statistical_decoding(instance: Instance) -> Cost:
    """One error: the least cost over s, t, λ and the two ways with random positions.

    log2 of bit operations (steps · n).
    """
    most = min(instance.dimension, 400)
    return _least(instance, np.arange(1, most, 3), _HOPES, 0.0)


def collection(instance: Instance, targets: float) -> Cost:
    """``targets`` errors of one code told from uniform: the least cost over t and λ, likewise."""
    return _least(instance, np.zeros((1, 1), np.int64), np.zeros(1), log2(targets))


def _clean(instance: Instance) -> Floats:
    """``[m]``: log2 of the probability that m positions have no error, drawn where that is likeliest."""
    (n1, n2), (w1, w2), n = instance.lengths, instance.weights, instance.length
    m = np.arange(instance.dimension + 1)
    even = np.rint(n1 - (n - m) * w1 / max(1, w1 + w2)).astype(np.int64)
    m1 = np.clip(even, np.maximum(0, m - n2), np.minimum(n1, m))
    binomial = Binomials(n)
    ways = binomial(2 * (n1 - m1), 2 * w1) + binomial(2 * (n2 - m + m1), 2 * w2)
    return np.minimum(ways - instance.log2_supports, 0.0)


@lru_cache(maxsize=1024)
def log2_biases(length: int, weight: int, most: int) -> tuple[float, ...]:
    """``[t]``, t ≤ ``most``: log2 of the bias of t positions of an error of ``weight`` in ``length``.

    (1 - 2·weight/length)^t as for independent errors, or the exact one where that is larger: at weights near
    half the length, errors drawn without repetition are even on t positions more often or less often than
    not. It is K_t(weight)/C(length, t), K the Krawtchouk polynomial, by its recurrence in t.
    """
    row = log2(max(abs(1 - 2 * weight / length), 1e-9))
    biases = []
    before, here = 0, 1
    for t in range(most + 1):
        exact = log2(abs(here)) - log2_binomial(length, t) if here else -inf
        biases.append(max(t * row, exact))
        before, here = here, ((length - 2 * weight) * here - (length - t + 1) * before) // (t + 1)
    return tuple(biases)


def _least(instance: Instance, guessed: Ints, hopes: Floats, shared: float) -> Cost:
    k, redundancy = instance.dimension, instance.length - instance.dimension
    parts = sorted((w / n, n, w) for n, w in zip(instance.lengths, instance.weights, strict=True) if n)
    (rate, room, weight), other = parts[0], parts[-1][0]
    # log2 of the factor on the bias per random position.
    random_rare, random_common = log2(max(1 - rate, 1e-9)), log2(max(1 - other, 1e-9))
    clean = _clean(instance)
    elimination = log2_elimination(instance.length, k)
    s = guessed.reshape(-1, 1, 1)
    transform = s + np.log2(np.maximum(s, 1))
    hope = hopes.reshape(1, 1, -1)
    best = Cost(IMPOSSIBLE, 0.0)
    most = min(32, redundancy // 4, room // 2)
    summed = log2_biases(room, weight, 2 * most)
    for half in range(1, most + 1):
        size = log2_binomial(redundancy // 2, half)
        # A zero beyond the lists' size costs a bit and gains -2·log2(1 - rate), below one for rates
        # up to 0.29.
        first = int(size + shared)
        last, count = (first + 1, 4) if other < 0.29 else (max(k, first), 24)
        zeros = np.rint(np.minimum(k, np.linspace(max(0, first - 1), last, count))).reshape(1, -1, 1)
        free = np.maximum(k - s - zeros, 0)
        rare = np.minimum(free, room)
        random = rare * random_rare + (free - rare) * random_common
        samples = -2 * ((1 - hope) * random + summed[2 * half])
        # Amortised steps per dual word: at least one.
        word = np.logaddexp2(0.0, zeros + 1.0 - size - shared)
        hoped = np.rint(hope * free).astype(np.int64)
        steps = np.logaddexp2(transform, np.logaddexp2(samples + word, size + 1))
        steps = np.logaddexp2(steps, elimination) - clean[hoped]
        least = np.unravel_index(int(np.argmin(steps)), steps.shape)
        bits = float(steps[least]) + log2(instance.length)
        if bits < best.bits:
            parameters = {"s": int(s[least[0], 0, 0]), "t": 2 * half, "zeros": int(zeros[0, least[1], 0])}
            parameters["hoped"] = int(hoped[least])
            memory = float(np.logaddexp2(parameters["s"], size)) + log2(instance.length)
            best = Cost(bits, memory, parameters)
    return best
