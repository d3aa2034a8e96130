"""Whether the worker multiplied: Freivalds' check with a secret projection made beforehand.

R. Freivalds, "Probabilistic machines can use less running time" (IFIP 1977) and "Fast
probabilistic algorithms" (MFCS 1979): Y = U·Wᵀ is tested as Y·v = U·(Wᵀv) with a random v that
whoever made Y does not know. v and z = Wᵀv are made once per worker session and weight, so a
check costs O(d_in + d_out) per row and probe.

v is standard normal. For an error row e, e·v is normal with deviation ‖e‖, however e spreads
over its elements, so one probe misses it with probability at most √(2/π)·τ/‖e‖. Random signs
would do for e of one element, but e = (a, ±a) would pass every other probe at any size.

The tolerance τ is derived in docs/integrity.md. In short: given the rounding errors δ of an
honest row, δ·v is normal with deviation ‖δ‖, and for any order of summation, with at most
three roundings per term of relative error below 2⁻²⁴ that are independent and centred,
E‖δ‖² <= 2⁻⁴⁸·d_in·(σ₁(W)·‖u‖)², since every partial sum is W restricted to some columns,
applied to u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import GeloError, IntegrityError
from tee_runner.memory import on_lines
from tee_runner.protection.gaussian import standard_normals
from tee_runner.protection.integrity_kernels import (
    CHUNK,
    check,
    check_parallel,
    gram,
    project,
    project_parallel,
    project_weight,
)
from tee_runner.protection.rng import SecretKey

Float16 = NDArray[np.float16]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

DEFAULT_PROBES: Final = 2
MAX_PROBES: Final = 16
# An honest offload fails its check with probability at most 2 to the minus this.
_FALSE_ALARM_BITS: Final = 40
_UNIT_ROUNDOFF: Final = 2.0**-24
# What the check's own float32 arithmetic (z, v·Y and z·U) adds to d_in in the tolerance:
# sums of at most CHUNK / 16 terms a lane, eight times over.
_OWN_TERMS: Final = CHUNK // 8

# From this many rows on, kernels run on all threads: prompts, and decode steps of several sequences.
_PARALLEL_ROWS: Final = 64
# Shapes of offloads whose views are kept: prompts have many lengths.
_MAX_VIEWS: Final = 1 << 12
# Spectral norm: start vectors, rounds of WᵀW.
_VECTORS, _ROUNDS = 16, 4
# The estimate is below σ₁ / 1.34 with probability P(χ²₁₆ < 16·1.34⁻¹⁶) < 2⁻⁴⁰.
_NORM_MARGIN: Final = 1.34


def spectral_norm(weight: Float16) -> float:
    """An upper estimate of the largest singular value of ``(d_out, d_in)``, below σ₁ with P < 2⁻⁴⁰.

    E‖(WᵀW)⁴g‖² = Σσ¹⁶ for standard normal g: its 16th root, from the mean over 16 vectors g, is
    at least σ₁ up to the spread of a χ² with 16 degrees, which the 16th root and a margin of
    1.34 absorb. Typically 1.3 σ₁.
    """
    d_in = weight.shape[1]
    bits = np.ascontiguousarray(weight).view(np.uint16)
    vectors = standard_normals(SecretKey().stream("spectral norm"), _VECTORS * d_in).reshape(_VECTORS, d_in)
    parts = np.empty((numba.get_num_threads(), _VECTORS, d_in), dtype=np.float32)
    exponent = 0.0
    for _ in range(_ROUNDS):
        parts.fill(0.0)
        gram(bits, vectors, parts)
        following = parts.sum(axis=0)
        size = float(np.linalg.norm(following))
        if size == 0.0:
            return 0.0
        exponent += math.log(size)
        vectors = following / np.float32(size)
    return _NORM_MARGIN * math.exp((exponent - 0.5 * math.log(_VECTORS)) / (2 * _ROUNDS))


def deviations(rows: int, probes: int, d_out: int) -> float:
    """τ in units of the root of the bound on E‖δ‖², so that an offload fails with P <= 2⁻⁴⁰.

    Half of it for δ·v given δ: P(|N(0, 1)| > t) <= exp(-t²/2) for each row and probe. Half for
    ‖δ‖² above its mean: χ²_m <= m + 2√(mx) + 2x but for exp(-x), m = d_out (B. Laurent and
    P. Massart, Ann. Statist. 28(5), 2000, lemma 1).
    """
    bits = _FALSE_ALARM_BITS + 1
    tail = math.sqrt(2.0 * math.log(2.0) * (bits + math.log2(rows * probes)))
    x = math.log(2.0) * (bits + math.log2(rows))
    return tail * math.sqrt(1.0 + 2.0 * math.sqrt(x / d_out) + 2.0 * x / d_out)


@dataclass(frozen=True, slots=True)
class _Projection:
    """Secret: v ``(k, d_out)``, z ``(k, d_in)`` float32, k even. ``gain``: root of E‖δ‖² / ‖u‖²."""

    v: Float32
    z: Float32
    gain: float


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Views of private memory for one shape of offload; ``sent`` is ``operand`` as float16."""

    operand: NDArray[np.uint16]
    sent: NDArray[np.float16]
    result: Float32
    expected: Float64
    sums: Float64
    tolerance: Float64
    deviations: float


class Integrity:
    """The check of one worker session. One thread uses it.

    An offload is: write into :meth:`operand`, :meth:`begin`, send a copy of it, :meth:`expect`
    while the worker computes; :meth:`verified` gives a private copy of the result that passed.
    """

    def __init__(self, probes: int = DEFAULT_PROBES, key: SecretKey | None = None) -> None:
        """``key`` is for tests.

        Raises:
            ValueError: ``probes`` is out of range.
        """
        if not 1 <= probes <= MAX_PROBES:
            raise ValueError(f"the check takes 1 to {MAX_PROBES} probes")
        self.probes = probes
        self._stream = (key or SecretKey()).stream("integrity")
        # Kernels take probes in pairs; the second of an incomplete pair is zero and passes.
        self._pairs = probes + probes % 2
        self._projections: dict[int, _Projection] = {}
        # By weight and rows. Emptied when a buffer is replaced.
        self._offloads: dict[tuple[int, int], tuple[_Projection, _Buffers]] = {}
        self._operand: NDArray[np.uint16] = np.empty(0, dtype=np.uint16)
        self._views: dict[tuple[int, int], NDArray[np.uint16]] = {}
        self._result: Float32 = np.empty(0, dtype=np.float32)
        self._sums: Float64 = np.empty(0, dtype=np.float64)
        # The offload in progress, and whether its answer's projection is still to be computed.
        self._current: tuple[_Projection, _Buffers] | None = None
        self._waiting = False

    def add(self, weight_id: int, load: Callable[[], Float16], norm: float = 0.0) -> None:
        """Draw v for a weight and project the weight, which ``load`` reads, onto it.

        ``norm`` is its :func:`spectral_norm`, 0 to have it computed here.
        """
        weight = np.ascontiguousarray(load())
        d_out, d_in = weight.shape
        v = on_lines((self._pairs, d_out), np.float32)
        v.fill(0.0)
        v[: self.probes] = standard_normals(self._stream, self.probes * d_out).reshape(self.probes, d_out)
        parts = np.zeros((numba.get_num_threads(), self._pairs, d_in), dtype=np.float64)
        project_weight(weight.view(np.uint16), v, parts)
        z = on_lines((self._pairs, d_in), np.float32)
        z[...] = parts.sum(axis=0)
        parts.fill(0.0)
        norm = norm or spectral_norm(weight)
        gain = _UNIT_ROUNDOFF * math.sqrt(d_in + _OWN_TERMS) * norm
        self._projections[weight_id] = _Projection(v, z, gain)
        self._stream.ratchet()

    def operand(self, rows: int, d_in: int) -> NDArray[np.uint16]:
        """Private memory ``(rows, d_in)`` for the bits of the next operand, uninitialised."""
        view = self._views.get((rows, d_in))
        if view is not None:
            return view
        size = rows * d_in
        if self._operand.size < size:
            self._operand = on_lines(size, np.uint16)
            self._offloads.clear()
            self._views.clear()
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = self._views[rows, d_in] = self._operand[:size].reshape(rows, d_in)
        return view

    def begin(self, weight_id: int, rows: int) -> NDArray[np.float16]:
        """The operand, ``rows`` for weight ``weight_id``, is written; it is returned, to be sent.

        Raises:
            IntegrityError: the session is over.
        """
        current = self._offloads.get((weight_id, rows))
        if current is None:
            current = self._new_offload(weight_id, rows)
        self._current = current
        self._waiting = True
        return current[1].sent

    def expect(self) -> None:
        """Compute what the answer must be under the projection. Once per offload; more is idle."""
        if not self._waiting or self._current is None:
            return
        self._waiting = False
        projection, own = self._current
        kernel = project if len(own.operand) < _PARALLEL_ROWS else project_parallel
        kernel(own.operand, projection.z, projection.gain * own.deviations, own.expected, own.tolerance)

    def verified(self, name: str, result: Float32) -> Float32:
        """A private copy of ``result`` ``(rows, d_out)``, valid until the next call.

        Raises:
            GeloError: the operand was not finite, so there is nothing to check against.
            IntegrityError: it is not the product. All projections are overwritten: a failed
                check tells the worker something about them.
        """
        self.expect()
        if self._current is None:
            raise ValueError("no offload was begun")
        (projection, own), self._current = self._current, None
        kernel = check if len(own.result) < _PARALLEL_ROWS else check_parallel
        wrong = kernel(result, own.result, projection.v, own.sums, own.expected, own.tolerance)
        if wrong:
            self.refuse(name, finite=bool(np.isfinite(own.tolerance).all()))
        return own.result

    def projection(self, weight_id: int, rows: int) -> tuple[Float32, Float32, float]:
        """For compiled code that checks by itself: v ``(k, d_out)``, z ``(k, d_in)``, and τ / ‖u‖ of a row.

        They are secret, and zero once the session is over; then :attr:`over` is true.

        Raises:
            IntegrityError: it is over.
        """
        projection = self._projection_of(weight_id)
        spread = deviations(rows, self.probes, projection.v.shape[1])
        return projection.v, projection.z, projection.gain * spread

    @property
    def over(self) -> bool:
        """Whether a check failed, or all was wiped."""
        return not self._projections

    def refuse(self, name: str, *, finite: bool) -> NoReturn:
        """A result for ``name`` failed; ``finite`` says whether its operand was.

        Raises:
            As :meth:`verified`.
        """
        if not finite:
            raise GeloError(f"An operand for {name} is not finite in float16.")
        self.wipe()
        raise IntegrityError(
            f"The worker's result for {name} is not the product it was asked for.",
            remedy="Nothing of it was used and its session is closed. The worker is faulty or lying.",
        )

    def wipe(self) -> None:
        """Overwrite the projections. Nothing can be checked afterwards."""
        for projection in self._projections.values():
            projection.v.fill(0.0)
            projection.z.fill(0.0)
        self._projections.clear()
        self._offloads.clear()
        self._current = None
        self._sums.fill(0.0)

    def _projection_of(self, weight_id: int) -> _Projection:
        projection = self._projections.get(weight_id)
        if projection is None:
            raise IntegrityError("A result cannot be checked: this worker session is over.")
        return projection

    def _new_offload(self, weight_id: int, rows: int) -> tuple[_Projection, _Buffers]:
        projection = self._projection_of(weight_id)
        d_in, d_out = projection.z.shape[1], projection.v.shape[1]
        pairs = self._pairs
        if self._result.size < rows * d_out:
            self._result = on_lines(rows * d_out, np.float32)
            self._offloads.clear()
        if self._sums.size < rows * (2 * pairs + 1):
            self._sums.fill(0.0)
            self._sums = np.empty(rows * (2 * pairs + 1), dtype=np.float64)
            self._offloads.clear()
        if len(self._offloads) >= _MAX_VIEWS:
            self._offloads.clear()
        sums = self._sums
        buffers = _Buffers(
            operand=self._operand[: rows * d_in].reshape(rows, d_in),
            sent=self._operand[: rows * d_in].reshape(rows, d_in).view(np.float16),
            result=self._result[: rows * d_out].reshape(rows, d_out),
            expected=sums[: rows * pairs].reshape(rows, pairs),
            sums=sums[rows * pairs : 2 * rows * pairs].reshape(rows, pairs),
            tolerance=sums[2 * rows * pairs : rows * (2 * pairs + 1)],
            deviations=deviations(rows, self.probes, d_out),
        )
        self._offloads[weight_id, rows] = projection, buffers
        return projection, buffers
