"""Linear algebra of subspace attacks: what an operand's rows span, and who lies in that span.

A mask that mixes rows, U = A·[H; S], leaves the row space of [H; S] as it was. Shapes: s operand
rows, d input width, r rank, N candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# What counts as rank: singular values this much above the largest that rounding alone makes.
_MARGIN = 1.1
# Likewise of the float32 arithmetic behind an operand, as a fraction of the largest singular value.
_FLOAT32_FLOOR = 8.0 * float(np.finfo(np.float32).eps)
# Squared residuals below this are computed again without cancellation.
_CANCELLED = 1e-2
# Candidates, and columns of bases, in one product: bounds what is held beside the candidates.
_CANDIDATE_CHUNK = 1024
_COLUMN_CHUNK = 1024


def wire_values(operand: NDArray[np.generic]) -> Float64:
    """An operand as real numbers ``(s, d)`` float64; unsigned words are read as signed."""
    if operand.dtype.kind == "u":
        operand = operand.view(operand.dtype.str.replace("u", "i"))
    values: Float64 = operand.astype(np.float64)
    return values


def representations(operand: NDArray[np.generic]) -> dict[str, Float64]:
    """Ways to read an operand as real numbers ``(s, d)`` float64.

    One for floats. Words of a ring: signed, and their low and high bytes (signed), in case blinding
    leaves either alone.
    """
    values = {"signed" if operand.dtype.kind == "u" else "values": wire_values(operand)}
    if operand.dtype.kind == "u":
        top = 8 * (operand.dtype.itemsize - 1)
        values["low byte"] = operand.astype(np.uint8).view(np.int8).astype(np.float64)
        high = operand >> operand.dtype.type(top)  # type: ignore[operator]
        values["high byte"] = high.astype(np.uint8).view(np.int8).astype(np.float64)
    return values


def unit_scaled(rows: NDArray[np.floating]) -> Float32:
    """Rows times the powers of two that bring their norms into [1, 2): a public rule of the schemes."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    exponents = np.where(norms > 0.0, 1 - np.frexp(norms)[1], 0)
    scaled: Float32 = np.ldexp(rows, exponents[:, None]).astype(np.float32)
    return scaled


def rounding_variance(operand: NDArray[np.generic]) -> Float64:
    """Variance of each element's rounding error ``(s, d)``: ulp²/12, zero for integers."""
    if operand.dtype.kind != "f":
        return np.zeros(operand.shape)
    ulp: Float64 = np.spacing(np.abs(operand)).astype(np.float64)
    return ulp * ulp / 12.0


def noise_edge(operand: NDArray[np.generic]) -> float:
    """The largest singular value that the rounding errors of ``operand`` are expected to have.

    The longest row plus the longest column of standard deviations, the leading term in Bandeira and van
    Handel 2016, "Sharp nonasymptotic bounds on the norm of random matrices with independent entries".
    """
    return _edge(rounding_variance(operand))


def _edge(variance: Float64) -> float:
    if not variance.size:
        return 0.0
    return math.sqrt(variance.sum(axis=1).max()) + math.sqrt(variance.sum(axis=0).max())


def spectrum(operand: NDArray[np.generic]) -> tuple[Float64, Float64]:
    """Singular values ``(q,)``, descending, and right singular vectors ``(q, d)``, q = min(s, d)."""
    values = wire_values(operand)
    s, d = values.shape
    if operand.dtype != np.float16 and (4 * min(s, d) <= max(s, d) or min(s, d) <= 64):
        _, singular, right = np.linalg.svd(values, full_matrices=False)
        return singular, right
    # Squaring halves the digits: float64 keeps 8, rounding to float16 left 4.
    if s >= d:
        squares, vectors = np.linalg.eigh(values.T @ values)
        right = vectors.T[::-1]
    else:
        squares, vectors = np.linalg.eigh(values @ values.T)
        right = (vectors.T @ values)[::-1]
        right /= np.maximum(np.linalg.norm(right, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return np.sqrt(np.maximum(squares[::-1], 0.0)), np.ascontiguousarray(right)


def basis(operand: NDArray[np.generic], rtol: float | None = None) -> Float32:
    """An orthonormal basis ``(r, d)`` float32 of the row space, strongest direction first.

    ``rtol``: singular values up to this fraction of the largest are noise. None: those are that the
    rounding of ``operand``'s own dtype can make (:func:`noise_edge`), or float32 arithmetic.
    """
    if not operand.size:
        return np.zeros((0, operand.shape[1]), dtype=np.float32)
    singular, right = spectrum(operand)
    if rtol is None:
        floor = max(_MARGIN * noise_edge(operand), _FLOAT32_FLOOR * singular[0])
    else:
        floor = rtol * singular[0]
    rows: Float32 = np.ascontiguousarray(right[singular > floor], dtype=np.float32)
    return rows


def joint_basis(operands: Sequence[NDArray[np.generic]]) -> Float32:
    """A basis ``(r, Σd_l)`` float32 of the row space of [U₁|U₂|…], operands of s rows that share A.

    Each operand is brought to unit RMS first, so that none hides below another's rounding.
    """
    scales = [1.0 / max(float(np.sqrt(np.mean(wire_values(u) ** 2))), 1e-30) for u in operands]
    joint = np.concatenate([wire_values(u) * c for u, c in zip(operands, scales, strict=True)], axis=1)
    variance = [rounding_variance(u) * c * c for u, c in zip(operands, scales, strict=True)]
    singular, right = spectrum(joint)
    floor = max(_MARGIN * _edge(np.concatenate(variance, axis=1)), _FLOAT32_FLOOR * singular[0])
    rows: Float32 = np.ascontiguousarray(right[singular > floor], dtype=np.float32)
    return rows


def complement(rows: Float32) -> Float32:
    """An orthonormal basis ``(d - r, d)`` float32 of what is orthogonal to ``rows`` ``(r, d)``."""
    r, d = rows.shape
    if not r:
        return np.eye(d, dtype=np.float32)
    full, _ = np.linalg.qr(rows.T.astype(np.float64), mode="complete")
    rest: Float32 = np.ascontiguousarray(full[:, r:].T, dtype=np.float32)
    return rest


def residuals(candidates: Float32, rows: Float32, rest: Float32 | None = None) -> Float32:
    """‖c − BᵀBc‖ / ‖c‖ of every candidate ``(N, d)`` to a basis B ``(r, d)``: ``(N,)`` float32.

    A zero candidate has residual 1: it says nothing. ``rest``: :func:`outside` of B, if it was made before.
    """
    only: Float32 = residuals_many(candidates, [rows], [rest])[0]
    return only


def outside(rows: Float32) -> Float32 | None:
    """The complement of a basis ``(r, d)`` if it is smaller; None if not."""
    return complement(rows) if 2 * len(rows) > rows.shape[1] else None


def residuals_many(
    candidates: Float32, bases: Sequence[Float32], rests: Sequence[Float32 | None] = ()
) -> Float32:
    """:func:`residuals` to each of M bases: ``(M, N)`` float32.

    Exact to float32 rounding: to the orthogonal complement where that is smaller, and where
    1 − ‖Bc‖² would cancel, from the difference itself.
    """
    candidates = np.asarray(candidates, dtype=np.float32)
    out = np.empty((len(bases), len(candidates)), dtype=np.float32)
    known = [rest if rest is not None else outside(b) for b, rest in zip_longest(bases, rests)]
    small = [b if rest is None else rest for b, rest in zip(bases, known, strict=True)]
    groups = [(g, np.concatenate([small[m] for m in g])) for g in _groups([len(b) for b in small])]
    for start in range(0, len(candidates), _CANDIDATE_CHUNK):
        chunk = candidates[start : start + _CANDIDATE_CHUNK]
        norms: Float32 = np.einsum("nd,nd->n", chunk, chunk)
        divisors: Float32 = np.where(norms > 0.0, norms, np.float32(1.0))
        for group, directions in groups:
            products = chunk @ directions.T
            place = 0
            for m in group:
                own = products[:, place : place + len(small[m])]
                place += len(small[m])
                squares: Float32 = np.einsum("nr,nr->n", own, own) / divisors
                if known[m] is None:
                    squares = _without_cancellation(chunk, own, small[m], squares, divisors)
                out[m, start : start + len(chunk)] = np.where(norms > 0.0, np.sqrt(squares), 1.0)
    return out


def _without_cancellation(
    candidates: Float32, inside: Float32, rows: Float32, squares: Float32, norms: Float32
) -> Float32:
    """1 − ``squares``, and the squared difference itself where that is small; of ``norms`` squared."""
    rest: Float32 = np.maximum(np.float32(1.0) - squares, np.float32(0.0))
    near = np.flatnonzero(rest < _CANCELLED)
    if len(near):
        difference = candidates[near] - inside[near] @ rows
        rest[near] = np.einsum("nd,nd->n", difference, difference) / norms[near]
    return rest


def _groups(widths: Sequence[int]) -> list[list[int]]:
    """Consecutive indices whose widths together stay within a chunk of columns."""
    groups: list[list[int]] = []
    used = _COLUMN_CHUNK + 1
    for index, width in enumerate(widths):
        if used + width > _COLUMN_CHUNK:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += width
    return groups


def leverages(candidates: Float32, operand: NDArray[np.generic], ridge: float | None = None) -> Float32:
    """ε·cᵀ(UᵀU + εI)⁻¹c of every candidate ``(N, d)``: ``(N,)`` float32.

    With U = A·[H; S] and A orthogonal, a row h of H has hᵀ(UᵀU)⁻¹h ≤ 1, and less than 1/j if it occurs
    j times. Outside the row space the first term of ‖residual‖² + Σ ε/(σᵢ² + ε)·(vᵢᵀc)² rules, inside it
    the second. ``ridge`` None: ε is what rounding adds to UᵀU.
    """
    candidates = np.asarray(candidates, dtype=np.float32)
    singular, right = spectrum(operand)
    if ridge is None:
        ridge = max(noise_edge(operand), _FLOAT32_FLOOR * float(singular[0])) ** 2
    kept = singular > np.sqrt(ridge)
    rows: Float32 = right[kept].astype(np.float32)
    weights: Float32 = np.sqrt(ridge / (singular[kept] ** 2 + ridge)).astype(np.float32)
    out = np.empty(len(candidates), dtype=np.float32)
    rest = complement(rows) if 2 * len(rows) > rows.shape[1] else None
    for start in range(0, len(candidates), _CANDIDATE_CHUNK):
        chunk = candidates[start : start + _CANDIDATE_CHUNK]
        inside = chunk @ rows.T
        if rest is None:
            norms: Float32 = np.einsum("nd,nd->n", chunk, chunk)
            outside = norms - np.einsum("nr,nr->n", inside, inside)
            near = np.flatnonzero(outside < _CANCELLED * norms)
            difference = chunk[near] - inside[near] @ rows
            outside[near] = np.einsum("nd,nd->n", difference, difference)
        else:
            products = chunk @ rest.T
            outside = np.einsum("nr,nr->n", products, products)
        inside *= weights
        out[start : start + len(chunk)] = outside + np.einsum("nr,nr->n", inside, inside)
    return out


def random_basis(rank: int, width: int, rng: np.random.Generator) -> Float32:
    """A basis ``(rank, width)`` float32 of a uniformly random subspace: what chance looks like."""
    rows, _ = np.linalg.qr(rng.standard_normal((width, rank)))
    directions: Float32 = np.ascontiguousarray(rows.T, dtype=np.float32)
    return directions


def joint_residuals(
    blocks: Sequence[Float32], joint: Float32, *, free_scales: bool = True
) -> Float32:  # fmt: skip
    """Residuals ``(N,)`` float32 of candidates that have one row per offload, to a joint basis.

    ``blocks[l]`` ``(N, d_l)``: the candidates' rows at offload l; ``joint`` ``(r, Σd_l)``: a basis of
    the row space of [U₁|U₂|…]. Offloads that share A are mixed with the same coefficients, but each
    has a scale of its own that the attacker may not know: with ``free_scales`` the residual is the
    smallest over all scales of the blocks, 1 − λₘₐₓ of the blocks' normalised projections' Gram.
    """
    count = len(blocks[0])
    bounds = np.cumsum([0, *(b.shape[1] for b in blocks)])
    projected = np.empty((count, len(blocks), len(joint)), dtype=np.float32)
    for index, block in enumerate(blocks):
        norms = np.linalg.norm(block, axis=1, keepdims=True)
        unit = block / np.where(norms > 0.0, norms, 1.0)
        projected[:, index] = unit @ joint[:, bounds[index] : bounds[index + 1]].T
    gram = projected.astype(np.float64) @ projected.astype(np.float64).transpose(0, 2, 1)
    if free_scales:
        inside = np.linalg.eigvalsh(gram)[:, -1]
    else:
        inside = gram.sum(axis=(1, 2)) / len(blocks)
    out: Float32 = np.sqrt(np.maximum(1.0 - inside, 0.0)).astype(np.float32)
    return out
