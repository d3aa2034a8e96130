"""Cost of statistical decoding with a Fourier transform (SD 2.0, RLPN) on a two-part instance.

Carrier, Debris-Alazard, Meyer-Hilfiger and Tillich, "Statistical decoding 2.0: reducing decoding to LPN",
ASIACRYPT 2022. Products of the received word with dual words are noisy samples of a linear function of
the error on s positions, which a transform of s·2^s steps finds if there are 1/bias² of them.

Dual words come from an information set of the code without the s positions: rows of the
systematic parity check matrix have one entry outside it; sums of t of them, found by merging two lists,
are zero on λ of its k - s positions and random on the rest. In the attacker's favour: the errors of the
s positions cost nothing to find, the k - s - λ random positions are all taken where errors are rarest, and
their noise is the average over dual words rather than that of a typical one.
"""

from __future__ import annotations

from math import log2

import numpy as np

from tee_runner.protection.lpn.decoding import IMPOSSIBLE, Cost, Instance, log2_binomial


def statistical_decoding(instance: Instance) -> Cost:
    """The least cost over s, t and λ; log2 of bit operations (steps · n)."""
    k, redundancy = instance.dimension, instance.length - instance.dimension
    parts = [(w / n, n) for n, w in zip(instance.lengths, instance.weights, strict=True) if n]
    parts.sort()
    (rate, room), other = parts[0], parts[-1][0]
    if rate >= 0.5:
        return Cost(IMPOSSIBLE, 0.0)
    # log2 of the factor on the bias per random position and per row summed.
    random_rare, random_common = log2(1 - rate), log2(max(1 - other, 1e-9))
    row = log2(1 - 2 * rate)
    guessed = np.arange(1, min(k, 400))[:, None]
    best = Cost(IMPOSSIBLE, 0.0)
    for half in range(1, min(32, redundancy // 4) + 1):
        size = log2_binomial(redundancy // 2, half)
        # A zero beyond the list's size costs a bit and gains -2·log2(1 - rate), below one for rates
        # up to 0.29.
        last = int(size) + 1 if other < 0.29 else k
        zeroed = np.minimum(
            k, np.linspace(max(0, int(size) - 1), max(last, int(size)), 4 if other < 0.29 else 40)
        )
        zeroed = np.rint(zeroed)[None, :]
        free = np.maximum(k - guessed - zeroed, 0)
        rare = np.minimum(free, room)
        bias = rare * random_rare + (free - rare) * random_common + 2 * half * row
        samples = -2 * bias
        # Amortised steps per dual word: at least one.
        word = np.logaddexp2(0.0, zeroed + 1.0 - size)
        steps = np.logaddexp2(guessed + np.log2(guessed), np.logaddexp2(samples + word, size + 1))
        least = np.unravel_index(int(np.argmin(steps)), steps.shape)
        bits = float(steps[least]) + log2(instance.length)
        if bits < best.bits:
            s, zeros = int(guessed[least[0], 0]), int(zeroed[0, least[1]])
            memory = float(np.logaddexp2(s, size)) + log2(instance.length)
            best = Cost(bits, memory, {"s": s, "t": 2 * half, "zeros": zeros})
    return best
