"""Products modulo 2^32 on the CPU: uint32 operands times int8 or int16 weights, exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gpu_worker.engines import amx, ring_amx, ring_kernels, ring_product
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.memory import Arena, aligned_bytes
from gpu_worker.engines.microkernel import LANES
from gpu_worker.engines.ring_kernels import JOB_WORDS, PANELS, STEP
from gpu_worker.engines.ring_weights import RingWeight, check_weight, operand_shifts, weight_bytes
from gpu_worker.engines.team import Team

_log = logging.getLogger(__name__)

KernelName = Literal["amx", "dots", "words"]
# In the order of the kinds in ring_product.
KERNELS: tuple[KernelName, ...] = ("amx", "dots", "words")

# Columns packed at a time, so that packing a large weight needs little more memory than the result.
_PACK_PANELS = 256


@dataclass(frozen=True, slots=True)
class RingPanels:
    """``packed`` ``(panels, parts, quads, 16)``: words of four int8 of one column.

    A part is a byte of the weight, see :mod:`gpu_worker.engines.ring_weights`. The kernels see
    panels of ``steps`` steps; the operand is laid out to match.
    """

    packed: NDArray[np.uint32]

    @property
    def address(self) -> int:
        """Of the panels."""
        return int(self.packed.ctypes.data)

    @property
    def panels(self) -> int:
        """How many."""
        return int(self.packed.shape[0])

    @property
    def parts(self) -> int:
        """Bytes of a weight."""
        return int(self.packed.shape[1])

    @property
    def steps(self) -> int:
        """Of a panel, all parts."""
        return int(self.packed.shape[1] * self.packed.shape[2] * 4 // STEP)


class RingCpu:
    """``Y = y·Wᵀ mod 2^32`` on a team of threads, which stays the caller's.

    ``kernels``: the first that this machine has and that computes what it should is used. AMX
    tiles, AVX-512 byte dot products, and 32-bit words, which run anywhere. With AMX, dot products
    are used for few rows. ``kernel`` says which is used for many, ``kernels`` is for
    :func:`gpu_worker.engines.ring_product.multiply`. Not thread-safe, as the team is not.

    Raises:
        EngineError: none is left.
    """

    def __init__(self, team: Team, kernels: Sequence[KernelName] = KERNELS) -> None:
        self._team = team
        self._scratch = aligned_bytes(0)
        self._product = np.zeros(JOB_WORDS, dtype=np.int64)
        self._arena = Arena()
        self.kernels: NDArray[np.int64] = np.zeros((2, 2), dtype=np.int64)
        found: dict[KernelName, tuple[int, int]] = {}
        for name in kernels:
            if not found or name == "dots":
                found |= self._start(name)
        if not found:
            raise EngineError(f"none of the kernels {', '.join(kernels)} runs on this machine")
        self.kernel = next(iter(found))
        self.kernels[:] = found.get("dots", found[self.kernel]), found[self.kernel]

    def _start(self, name: KernelName) -> dict[KernelName, tuple[int, int]]:
        """Kind and address of the kernel by its ``name``; nothing if it does not do."""
        unavailable, compile_kernel = _STARTS[name]
        if reason := unavailable():
            _log.debug("no %s: %s", name, reason)
            return {}
        try:
            kernel = KERNELS.index(name), int(compile_kernel().address)
            self.kernels[:] = kernel
            if self._self_test():
                return {name: kernel}
            _log.warning("%s does not compute what it should and is not used", name)
        except Exception:
            _log.exception("%s does not start", name)
        return {}

    def _self_test(self) -> bool:
        """Small products through every path, extremes included."""
        generator = np.random.default_rng(0)
        weight = generator.integers(-128, 128, (67, 1100), dtype=np.int8)
        operand = generator.integers(0, 1 << 32, (40, 1100), dtype=np.uint32)
        weight[:3], operand[::5] = -128, 0xFFFFFFFF
        expected = operand @ weight.astype(np.uint32).T
        loaded = self.load(weight)
        for rows in (1, 2, 3, 4, 7, 13, 40):
            out = np.zeros((rows, 67), dtype=np.uint32)
            self.matmul(loaded, operand[:rows], out)
            if not np.array_equal(out, expected[:rows]):
                return False
        return True

    def load(self, weight: RingWeight) -> LoadedWeight:
        """Pack ``weight`` ``(d_out, d_in)`` int8 or int16: the same size, rounded up to whole panels.

        The array need not outlive the call.

        Raises:
            EngineError: it is no such matrix, an int16 value exceeds 32639, or it does not fit.
        """
        check_weight(weight)
        d_out, d_in = weight.shape
        shifts = operand_shifts(weight)
        panels = -(-d_out // (LANES * PANELS)) * PANELS
        quads = -(-d_in // STEP) * (STEP // 4)
        try:
            packed = self._arena.take(4 * panels * len(shifts) * quads * LANES).view(np.uint32)
            packed = packed.reshape(panels, len(shifts), quads, LANES)
            for first in range(0, panels, _PACK_PANELS):
                part = weight[first * LANES : (first + _PACK_PANELS) * LANES]
                for index, shift in enumerate(shifts):
                    _pack(weight_bytes(part, shift), packed[first : first + _PACK_PANELS, index])
        except MemoryError as error:
            raise EngineError(f"no memory for a weight of {weight.nbytes} bytes") from error
        form = WeightFormat.of(weight.dtype)
        return LoadedWeight(d_in=d_in, d_out=d_out, format=form, state=RingPanels(packed))

    def unload(self, weight: LoadedWeight) -> None:
        """The memory goes with the last reference."""

    def matmul(self, weight: LoadedWeight, operand: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
        """``out[...] = operand @ weight.T`` modulo 2^32: ``(m, d_in)`` to ``(m, d_out)`` uint32, m >= 1.

        The operand may be memory that another process writes: it is copied once and left as it is.

        Raises:
            EngineError: shapes or types do not fit.
        """
        state = weight.state
        if not isinstance(state, RingPanels):
            raise EngineError("this weight was loaded by another engine")
        if operand.dtype != np.uint32 or out.dtype != np.uint32 or operand.ndim != 2 or len(operand) < 1:
            raise EngineError("operand and result must be uint32 matrices with at least one row")
        rows = len(operand)
        if operand.shape[1] != weight.d_in or out.shape != (rows, weight.d_out):
            raise EngineError(f"shapes {operand.shape} and {out.shape} do not fit the weight")
        target = out if out.flags.c_contiguous and out.flags.aligned else np.empty_like(out, order="C")
        self._multiply(state, np.ascontiguousarray(operand), target)
        if target is not out:
            out[...] = target

    def _multiply(self, state: RingPanels, operand: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
        needed = ring_product.scratch_bytes(self.kernels[1, 0], len(operand), state.steps)
        if self._scratch.size < needed:
            self._scratch = aligned_bytes(needed)
        ring_product.multiply(
            self.kernels, state.address, state.panels, state.steps, state.parts, operand, out.ctypes.data,
            out.shape[1], self._scratch.ctypes.data, self._product, self._team.job, self._team.base,
        )  # fmt: skip


def _pack(values: NDArray[np.int8], packed: NDArray[np.uint32]) -> None:
    """``values`` ``(d_out, d_in)`` to panels ``(panels, quads, 16)`` of zeros."""
    d_out, d_in = values.shape
    panels, quads, _ = packed.shape
    padded = np.zeros((panels * LANES, 4 * quads), dtype=np.int8)
    padded[:d_out, :d_in] = values
    packed[...] = padded.view(np.uint32).reshape(panels, LANES, quads).transpose(0, 2, 1)


def _no_dots() -> str:
    missing = {"avx512f", "avx512vnni"} - amx.target_features()
    return f"the processor or numba's target lacks {', '.join(sorted(missing))}" if missing else ""


_STARTS: dict[KernelName, tuple[Callable[[], str], Callable[[], Any]]] = {
    "amx": (ring_amx.unavailable, ring_amx.kernel),
    "dots": (_no_dots, ring_kernels.dots_kernel),
    "words": (lambda: "", ring_kernels.words_kernel),
}
