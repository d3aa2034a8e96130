"""Tables of the DCT-IV cascade: public ones per s, and those that hold a mask's signs.

C x is a complex Fourier transform between two twiddles. For even s, of the s/2 numbers
x[2j] + i·x[s-1-2j]; rows 2k and s-1-2k come out of number k, so that everything between two
transforms (twiddle, sign flips, twiddle) is a real 2×2 matrix per number. For odd s it is the
real transform of length s of the permuted rows ±x[order] (Chan and Ho 1990, as in FFTW), two
columns at a time as one complex column: C x[k] = α·Z[q] + ᾱ·Z[s-q], q = (2k+1) mod s.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.gelo.fourier import Plan, plan


class PublicPlan(NamedTuple):
    """What depends on s alone."""

    passes: Plan
    # Even s: the 2×2 matrices (s/2, 4) that lead from rows to complex rows, and back.
    enter: NDArray[np.float32]
    # Odd s: nothing to enter, and α (s, 2) to leave.
    leave: NDArray[np.float32]
    # Which row comes at which place, and with which sign.
    order: NDArray[np.int64]
    flips: NDArray[np.float32]


def _half_turns(s: int) -> NDArray[np.float64]:
    """Even s: cos and sin of the twiddle before and after a transform, ``(2, s/2)``."""
    angles = -np.pi * (np.arange(s // 2) + 0.125) / s
    return np.stack([np.cos(angles), np.sin(angles)])


def _alphas(s: int) -> NDArray[np.float64]:
    """Odd s: real and imaginary part of α for each output, ``(2, s)``."""
    angles = np.pi * (2 * np.arange(s) + 1) / 4
    return np.asarray(np.stack([np.cos(angles), -np.sin(angles)]) / np.sqrt(2.0 * s))


def _table(*columns: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.ascontiguousarray(np.stack(columns, axis=-1), dtype=np.float32)


@functools.lru_cache(maxsize=64)
def public_plan(s: int) -> PublicPlan:
    """Tables for s rows."""
    if s % 2 == 0:
        c, i = _half_turns(s)
        g = np.sqrt(2.0 / s)
        leave = _table(c * g, -i * g, -i * g, -c * g)
        return PublicPlan(
            plan(s // 2), _table(c, -i, i, c), leave, np.arange(s), np.ones(s, dtype=np.float32)
        )
    # Row x̃[m] of the sequence extended with period 4s: even about -1/2, odd about s - 1/2.
    m = (s // 2 + 4 * np.arange(s)) % (4 * s)
    quarter = m // s
    order = np.choose(quarter, [m, 2 * s - 1 - m, m - 2 * s, 4 * s - 1 - m]).astype(np.int64)
    flips = np.choose(quarter, [1.0, -1.0, -1.0, 1.0]).astype(np.float32)
    return PublicPlan(plan(s), np.zeros((0, 2), np.float32), _table(*_alphas(s)), order, flips)


def secret_twists(signs: NDArray[np.float32]) -> NDArray[np.float32]:
    """What happens between two transforms, for D₁ and D₂ of ``signs`` (3, s)."""
    s = signs.shape[1]
    diagonals = signs[:2].astype(np.float64)
    if s % 2:
        public = public_plan(s)
        a, b = _alphas(s)[:, public.order]
        factor = diagonals[:, public.order] * public.flips
        return _table(factor * a, factor * b)
    # With u = Z·t: (p, q) = (d₀·Re u, -d₁·Im u), then (p + iq)·t, over √(s/2).
    c, i = _half_turns(s)
    upper, lower = diagonals[:, 0::2], diagonals[:, ::-1][:, 0::2]
    cross = (lower - upper) * c * i
    g = np.sqrt(2.0 / s)
    return _table(
        g * (upper * c * c + lower * i * i), g * cross, -g * cross, -g * (upper * i * i + lower * c * c)
    )
