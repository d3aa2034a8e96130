"""Batched blind source separation: one problem per thread.

Problems of a batch may differ in size: problem b uses the leading ``ranks[b]`` rows, the rest is
padding. Symmetric matrices are packed by their upper triangle, entry (i, j), i <= j, at
j·(j + 1)/2 + i, so that a smaller problem is a prefix of a larger one. A problem's result does not
depend on the batch it is in.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tee_runner.vector import exp

_FAST = {"reassoc", "contract", "nsz"}
# Newton–Schulz steps of a symmetric decorrelation: singular values down to 1e-3 of the largest.
_POLAR_STEPS = 40
_POLAR_ERROR = 1e-6
# FastICA ends when for so many iterations no more rows came to rest (Gaussian rows never do).
_PATIENCE = 12


@numba.njit(nogil=True, cache=True, inline="always")
def packed(i: Any, j: Any) -> Any:
    """The place of entry (i, j) of a packed symmetric matrix."""
    if i > j:
        return i * (i + 1) // 2 + j
    return j * (j + 1) // 2 + i


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _tanh(y: Any, slope: Any) -> None:
    """``y`` (r, d) becomes tanh(y); ``slope`` (r,) the sums of its derivative over each row."""
    one, two = np.float32(1.0), np.float32(2.0)
    for i in range(y.shape[0]):
        total = np.float32(0.0)
        for t in range(y.shape[1]):
            value = one - two / (exp(two * y[i, t]) + one)
            y[i, t] = value
            total += one - value * value
        slope[i] = total


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _tanh_moments(z: Any, w: Any, y: Any, slope: Any, g: Any) -> None:
    """``g`` (r, r) = E[tanh(W·z)·zᵀ] − diag(E[1 − tanh²(W·z)])·W; ``y`` (r, d), ``slope`` (r,) scratch."""
    r, d = z.shape
    np.dot(w, z, y)
    _tanh(y, slope)
    np.dot(y, z.T, g)
    scale = np.float32(1.0) / np.float32(d)
    for i in range(r):
        for k in range(r):
            g[i, k] = (g[i, k] - slope[i] * w[i, k]) * scale


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _decorrelate(x: Any, gram: Any, product: Any) -> None:
    """``x`` becomes (X·Xᵀ)^(−1/2)·X, by Newton–Schulz (Hyvärinen 1999, eq. 8)."""
    r = x.shape[0]
    np.dot(x, x.T, gram)
    norm = np.float32(0.0)
    for i in range(r):
        total = np.float32(0.0)
        for j in range(r):
            total += abs(gram[i, j])
        norm = max(norm, total)
    scale = np.float32(1.0) / np.sqrt(norm + np.float32(1e-30))
    for i in range(r):
        for j in range(r):
            x[i, j] *= scale
    for _ in range(_POLAR_STEPS):
        np.dot(x, x.T, gram)
        error = np.float32(0.0)
        for i in range(r):
            for j in range(r):
                target = np.float32(1.0) if i == j else np.float32(0.0)
                error = max(error, abs(gram[i, j] - target))
                gram[i, j] = np.float32(1.5) * target - np.float32(0.5) * gram[i, j]
        if error < np.float32(_POLAR_ERROR):
            break
        np.dot(gram, x, product)
        x[:] = product


@numba.njit(nogil=True, cache=True, parallel=True)
def fast_ica(z: Any, ranks: Any, w: Any, iterations: Any, tolerance: Any, steps: Any) -> None:
    """Symmetric FastICA with the log cosh contrast (Hyvärinen 1999, eq. 20 and 8).

    ``z`` (B, r, d) float32 white; ``w`` (B, r, r) float32, start in, demixing rotations out;
    ``steps`` (B,) int64, iterations used. Ends when no row turns by more than ``tolerance``
    (1 − |cosine|), or when the number of rows that do has not fallen for some iterations.
    """
    for b in numba.prange(z.shape[0]):
        r = ranks[b]
        rows = np.ascontiguousarray(z[b, :r])
        y = np.empty(rows.shape, dtype=np.float32)
        slope = np.empty(r, dtype=np.float32)
        now = np.ascontiguousarray(w[b, :r, :r])
        new = np.empty((r, r), dtype=np.float32)
        gram = np.empty((r, r), dtype=np.float32)
        product = np.empty((r, r), dtype=np.float32)
        _decorrelate(now, gram, product)
        used = 0
        fewest = r + 1
        waited = 0
        for _ in range(iterations):
            used += 1
            _tanh_moments(rows, now, y, slope, new)
            _decorrelate(new, gram, product)
            turning = 0
            for i in range(r):
                cosine = np.float32(0.0)
                for k in range(r):
                    cosine += new[i, k] * now[i, k]
                if np.float32(1.0) - abs(cosine) > tolerance:
                    turning += 1
            now[:] = new
            if turning < fewest:
                fewest = turning
                waited = 0
            elif turning < r:
                waited += 1
            if turning == 0 or waited > _PATIENCE:
                break
        w[b, :r, :r] = now
        steps[b] = used


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _angle(first: Any, second: Any, cross: Any) -> Any:
    """The Jacobi angle of one pair over all matrices (Cardoso & Souloumiac 1996, section 3)."""
    on = np.float32(0.0)
    off = np.float32(0.0)
    for m in range(first.shape[0]):
        h = first[m] - second[m]
        c = cross[m] + cross[m]
        on += h * h - c * c
        off += np.float32(2.0) * h * c
    return 0.5 * np.arctan2(off, on + np.hypot(on, off))


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _rotate(a: Any, b: Any, c: Any, s: Any) -> None:
    for m in range(a.shape[0]):
        x = a[m]
        y = b[m]
        a[m] = c * x + s * y
        b[m] = c * y - s * x


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _rotate_corner(first: Any, second: Any, cross: Any, c: Any, s: Any) -> None:
    cc, ss, cs = c * c, s * s, c * s
    for m in range(first.shape[0]):
        x, y, z = first[m], second[m], cross[m]
        first[m] = cc * x + (cs + cs) * z + ss * y
        second[m] = ss * x - (cs + cs) * z + cc * y
        cross[m] = cs * (y - x) + (cc - ss) * z


@numba.njit(nogil=True, cache=True, parallel=True)
def joint_diagonalise(
    matrices: Any, ranks: Any, counts: Any, rotations: Any, sweeps: Any, threshold: Any, used: Any
) -> None:
    """Jacobi joint diagonalisation (Cardoso & Souloumiac 1996) of real symmetric matrices.

    ``matrices`` (B, r·(r + 1)/2, M) float32, packed, overwritten by Vᵀ·M·V, of which problem b has
    ``counts[b]``; ``rotations``
    (B, r, r) float32 gets Vᵀ, so that its rows demix; ``used`` (B,) int64 sweeps. Ends when no angle
    of a sweep exceeds ``threshold`` radians.
    """
    for b in numba.prange(matrices.shape[0]):
        r = ranks[b]
        entries = matrices[b, :, : counts[b]]
        v = rotations[b]
        v[:] = np.float32(0.0)
        for i in range(r):
            v[i, i] = np.float32(1.0)
        count = 0
        for _ in range(sweeps):
            count += 1
            turned = False
            for j in range(1, r):
                for i in range(j):
                    ii, jj, ij = packed(i, i), packed(j, j), packed(i, j)
                    angle = _angle(entries[ii], entries[jj], entries[ij])
                    if abs(angle) <= threshold:
                        continue
                    turned = True
                    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
                    for k in range(r):
                        if k not in (i, j):
                            _rotate(entries[packed(k, i)], entries[packed(k, j)], c, s)
                    _rotate_corner(entries[ii], entries[jj], entries[ij], c, s)
                    _rotate(v[i, :r], v[j, :r], c, s)
            if not turned:
                break
        used[b] = count
