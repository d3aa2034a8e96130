"""Matrix products on the CPU: for machines without a GPU, for tests, and as the reference."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.slab import Doorbell, Slab
from gpu_worker.engines import amx, cpu_loop
from gpu_worker.engines.amx_tiles import PANELS, STEP
from gpu_worker.engines.base import AnyWeight, Engine, EngineError, EngineInfo, LoadedWeight, OffloadLoop
from gpu_worker.engines.memory import Arena, aligned_bytes
from gpu_worker.engines.microkernel import LANES, padded_rows, widen_operand
from gpu_worker.engines.ring_cpu import KERNELS, RingCpu, RingPanels
from gpu_worker.engines.ring_weights import RingWeight
from gpu_worker.engines.team import Team

_log = logging.getLogger(__name__)

# By the bf16 values in a weight, the fewest rows that AMX multiplies. Milliseconds for 135M cold
# weights on one 2.6 GHz Xeon core with AMX (vector kernel / AMX with 1 / with 2 values):
# 2 rows 18.9/18.2/20.5, 4 rows 19.8/19.2/21.7, 5 rows 24.9/19.2/21.3, 9 rows 24.5/19.6/22.9,
# 16 rows 38.6/21.2/25.7, 32 rows 64.9/26.6/33.4, 64 rows 118/49.1/69.3, 256 rows 455/150/214.
_AMX_ROWS = {1: 2, 2: 5}


@dataclass(frozen=True, slots=True)
class _Panels:
    """``packed`` ``(panels, depth, 16)`` float16, padded with zeros: the last panel's columns,
    and with AMX the panels to a multiple of 4 and the depth to one of 32.

    ``planes`` is how many bf16 values make up one of its weights, 0 if it is not for AMX.
    """

    packed: NDArray[np.float16]
    planes: int


class CpuEngine(Engine):
    """Products on a team of ``threads`` (default: all cores): those of f16 factors here, those modulo
    2^32 in :class:`RingCpu`.

    ``use_amx`` None means: if this machine can. True on one that cannot is not an error, but a
    line in the log; ``info.features`` says what is in use.
    """

    def __init__(self, threads: int | None = None, use_amx: bool | None = None) -> None:
        self._team = Team(threads or len(os.sched_getaffinity(0)))
        self._scratch = np.empty(0, dtype=np.float32)
        self._padded_out = np.empty(0, dtype=np.float32)
        self._tiles = aligned_bytes(0).view(np.uint16)
        self._arena = Arena()
        self._amx: dict[int, int] = {}
        self._use_amx = use_amx
        # Most sessions use one kind of weight only: made with the first weight of integers.
        self._ring: RingCpu | None = None
        if use_amx is not False:
            self._start_amx(loud=bool(use_amx))
        vector = {"avx512f"} & amx.target_features()
        self.info = EngineInfo(
            name="cpu",
            adapter=_processor_name(),
            backend="numba",
            hardware_gpu=False,
            features=(*vector, *(("amx-bf16",) if self._amx else ())),
            limits={"threads": self._team.size},
        )

    def _start_amx(self, *, loud: bool) -> None:
        """Use AMX from now on if this machine has it and it computes what it should."""
        level = logging.WARNING if loud else logging.DEBUG
        if reason := amx.unavailable():
            _log.log(level, "no AMX: %s", reason)
            return
        try:
            self._amx = amx.kernel_addresses()
            correct = self._self_test()
        except Exception:
            _log.exception("AMX does not start")
            correct = False
        if not correct:
            _log.warning("AMX does not compute what it should; using vector instructions")
            self._amx = {}

    def _self_test(self) -> bool:
        """A small product of each kind, with results that are exact in f32."""
        for scale in (1, 2047):
            weight = (np.arange(80 * 40).reshape(80, 40) % 7 - 3).astype(np.float16) * np.float16(scale)
            for rows in (7, 19, 65):
                operand = (np.arange(rows * 40).reshape(rows, 40) % 11 - 5).astype(np.float16)
                out = np.empty((rows, 80), dtype=np.float32)
                self.matmul(self.load(weight), operand, out)
                if not np.array_equal(out, operand.astype(np.float32) @ weight.astype(np.float32).T):
                    return False
        return True

    def load(self, weight: AnyWeight) -> LoadedWeight:
        """See :meth:`Engine.load`. Packs into panels: the same size, rounded up."""
        if weight.dtype == np.float16 and weight.ndim == 2 and 0 not in weight.shape:
            return self._load_halves(weight)
        if self._ring is None:
            self._ring = RingCpu(self._team, KERNELS if self._use_amx is not False else KERNELS[1:])
            _log.info("products modulo 2^32: %s", self._ring.kernel)
        return self._ring.load(cast(RingWeight, weight))

    def _load_halves(self, weight: NDArray[Any]) -> LoadedWeight:
        d_out, d_in = weight.shape
        panels = -(-d_out // LANES)
        depth = d_in
        if self._amx:
            panels = -(-panels // PANELS) * PANELS
            depth = -(-d_in // STEP) * STEP
        try:
            words = self._arena.take(2 * panels * depth * LANES).view(np.uint16)
        except MemoryError as error:
            raise EngineError(f"no memory for a weight of {weight.nbytes} bytes") from error
        packed = words.view(np.float16).reshape(panels, depth, LANES)
        full = d_out // LANES
        packed[:full, :d_in] = weight[: full * LANES].reshape(full, LANES, d_in).transpose(0, 2, 1)
        if full * LANES < d_out:
            packed[full, :d_in, : d_out - full * LANES] = weight[full * LANES :].T
        planes = amx.planes_needed(words) if self._amx else 0
        return LoadedWeight(
            d_in=d_in, d_out=d_out, format=WeightFormat.FLOAT16, state=_Panels(packed, planes)
        )

    def loop(self, weights: Sequence[LoadedWeight], slab: Slab, doorbell: Doorbell) -> OffloadLoop:
        """See :meth:`Engine.loop`."""
        table = np.zeros((len(weights), cpu_loop.COLUMNS), dtype=np.int64)
        for row, weight in zip(table, weights, strict=True):
            row[: cpu_loop.OF_KIND] = (weight.d_in, weight.d_out, weight.format.kind)
            row[cpu_loop.OF_KIND :] = self._loop_row(weight)
        kernels = np.zeros((2, 2), dtype=np.int64) if self._ring is None else self._ring.kernels
        return cpu_loop.CpuLoop(self._team, table, kernels, slab, doorbell)

    def _loop_row(self, weight: LoadedWeight) -> tuple[int, ...]:
        state = weight.state
        if isinstance(state, _Panels):
            panels, depth, _ = state.packed.shape
            fewest = _AMX_ROWS.get(state.planes, cpu_loop.MAX_ROWS + 1)
            return state.packed.ctypes.data, panels, depth, fewest, self._amx.get(state.planes, 0)
        if isinstance(state, RingPanels) and self._ring is not None:
            return state.address, state.panels, state.steps, state.parts, 0
        raise EngineError("this weight was loaded by another engine")

    def unload(self, weight: LoadedWeight) -> None:
        """See :meth:`Engine.unload`. The memory goes with the last reference."""

    def matmul(self, weight: LoadedWeight, operand: NDArray[Any], out: NDArray[Any]) -> None:
        """See :meth:`Engine.matmul`."""
        state = weight.state
        if isinstance(state, RingPanels) and self._ring is not None:
            self._ring.matmul(weight, operand, out)
            return
        if not isinstance(state, _Panels):
            raise EngineError("this weight was loaded by another engine")
        if operand.dtype != np.float16 or out.dtype != np.float32:
            raise EngineError(f"types {operand.dtype} and {out.dtype} do not fit the weight")
        rows, d_in = operand.shape
        if d_in != weight.d_in or out.shape != (rows, weight.d_out):
            raise EngineError(f"shapes {operand.shape} and {out.shape} do not fit the weight")
        tiles = state.planes and rows >= _AMX_ROWS[state.planes]
        if not tiles or not self._multiply_amx(state, operand, out):
            self._multiply(state, operand, out)

    def _multiply(self, state: _Panels, operand: NDArray[np.float16], out: NDArray[np.float32]) -> None:
        """With vector instructions; the operand is widened to f32."""
        rows, d_in = operand.shape
        depth = state.packed.shape[1]
        padded = padded_rows(rows)
        self._scratch = _grown(self._scratch, padded * depth)
        scratch = self._scratch[: padded * depth].reshape(padded, depth)
        widen_operand(operand.view(np.uint16), scratch, rows, d_in)
        target = self._target(out, padded, len(state.packed))
        self._team.run(
            scratch.ctypes.data, depth * 4, state.packed.ctypes.data, depth,
            target.ctypes.data, target.shape[1] * 4, rows, len(state.packed),
        )  # fmt: skip
        if target is not out:
            out[...] = target[:rows, : out.shape[1]]

    def _multiply_amx(self, state: _Panels, operand: NDArray[np.float16], out: NDArray[np.float32]) -> bool:
        """With tiles; the operand is split into two bf16. False, and nothing done, if it is not finite."""
        rows, depth = len(operand), state.packed.shape[1]
        shape = amx.tiles_shape(rows, depth)
        size = shape[0] * shape[1] * shape[2] * shape[3] * shape[4]
        if self._tiles.size < size:
            self._tiles = aligned_bytes(2 * size).view(np.uint16)
        tiles = self._tiles[:size].reshape(shape)
        if not amx.split_operand(np.ascontiguousarray(operand).view(np.uint16), tiles):
            return False
        target = self._target(out, rows, len(state.packed))
        self._team.run(
            tiles.ctypes.data, shape[3] * shape[4] * 2, state.packed.ctypes.data, depth,
            target.ctypes.data, target.shape[1] * 4, rows, len(state.packed), self._amx[state.planes],
        )  # fmt: skip
        if target is not out:
            out[...] = target[:, : out.shape[1]]
        return True

    def _target(self, out: NDArray[np.float32], padded: int, panels: int) -> NDArray[np.float32]:
        """Where the kernels write: ``out`` itself if whole panels and ``padded`` rows fit it."""
        width = panels * LANES
        if out.shape == (padded, width):
            return out
        self._padded_out = _grown(self._padded_out, padded * width)
        return self._padded_out[: padded * width].reshape(padded, width)

    def close(self) -> None:
        """Stop the team."""
        self._team.close()


def _grown(buffer: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    return buffer if buffer.size >= size else np.empty(size, dtype=np.float32)


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
