"""Exact-noise LPN with a dense secret over a field or over Z/2^32: the published cost formulas.

N samples of a secret of k uniform elements of Z/q, t of them with noise: what (e, f) is when f is dense,
N = d, t = w_e. Formulas of Liu, Wang, Yang and Yu, "The hardness of LPN over any integer ring and field
for PCG applications", EUROCRYPT 2024 (ePrint 2022/712), in log2 of their units: field operations for Gauss
and statistical decoding, operations on vectors of N elements times N for ISD.

Over a large field the noise values hide nothing and help the attacker little: Gauss is best. Over
Z/2^32 reduction mod 2 keeps the code random and turns odd values into ones, so binary ISD applies,
whose lists hold supports without values; it is far cheaper than any list-based attack over the
ring. Noise uniform over the nonzero elements would be worse still: half of it vanishes mod 2.
"""

from __future__ import annotations

from math import floor, inf, log2

from tee_runner.protection.lpn.decoding import log2_binomial

# Exponent of matrix multiplication (Strassen), as in the paper.
_OMEGA = 2.8


def gauss(samples: int, dimension: int, weight: int) -> float:
    """Pooled Gauss: draw k samples until none has noise, invert. Any ring."""
    tries = log2_binomial(samples, weight) - log2_binomial(samples - dimension, weight)
    return _OMEGA * log2(min(dimension, samples - dimension)) + tries


def statistical_decoding(samples: int, dimension: int, weight: int, modulus: int) -> float:
    """Parity checks of k + 1 samples, each free of noise or of no use (theorem on SD)."""
    if modulus % 2 == 0:
        if samples - dimension <= weight:
            return inf
        bias = weight * log2((samples - weight + 1) / (samples - dimension - weight))
    else:
        bias = log2_binomial(samples, weight) - log2_binomial(samples - dimension - 1, weight)
    return log2(dimension + 1) + 2 * bias


def statistical_decoding_2(samples: int, dimension: int, weight: int, modulus: int) -> float:
    """SD 2.0 (Carrier et al. 2022) as the paper bounds it.

    As many coordinates of the secret as Gauss could pay for are guessed by a fast Fourier
    transform for free; the rest is statistical decoding.
    """
    binary = 2 if modulus % 2 == 0 else modulus
    guessed = min(dimension - 1, floor(gauss(samples, dimension, weight) / log2(binary)))
    return statistical_decoding(samples, dimension - guessed, weight, modulus)


def isd(samples: int, dimension: int, weight: int, modulus: int) -> float:
    """Stern-Dumer ISD over the field; an even modulus is reduced mod 2, its noise being odd.

    Searched over even p ≤ 24 and all l that make k + l even, until the merged list is empty.
    """
    q = 2 if modulus % 2 == 0 else modulus
    best = inf
    for p in range(0, min(weight, 24) + 1, 2):
        for window in range(2 - dimension % 2, samples - dimension - weight + p, 2):
            size = log2_binomial((dimension + window) // 2, p // 2) + p / 2 * log2(q - 1)
            merged = 2 * size - window * log2(q)
            rows = samples - dimension - window
            work = log2(rows * samples / log2(rows) + 2 * 2**size + 2 * 2**merged) + log2(samples)
            success = log2_binomial(rows, weight - p) - log2_binomial(samples, weight)
            success += window * log2(q) - p * log2(q - 1) + merged
            best = min(best, work - min(0.0, success))
            if merged < -8:
                break
    return best


def dense_secret(samples: int, dimension: int, weight: int, modulus: int) -> dict[str, float]:
    """log2 cost of every attack of the paper on exact noise; noise values odd if ``modulus`` is even."""
    return {
        "gauss": gauss(samples, dimension, weight),
        "statistical decoding": statistical_decoding(samples, dimension, weight, modulus),
        "statistical decoding 2.0": statistical_decoding_2(samples, dimension, weight, modulus),
        "isd": isd(samples, dimension, weight, modulus),
    }
