"""Matrix products on the CPU: for machines without a GPU, for tests, and as the reference."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_worker.engines.base import Engine, EngineError, EngineInfo, LoadedWeight
from gpu_worker.engines.microkernel import LANES, padded_rows, widen_operand
from gpu_worker.engines.team import Team


@dataclass(frozen=True, slots=True)
class _Panels:
    """``packed`` ``(panels, d_in, 16)`` float16, the last panel padded with zero columns."""

    packed: NDArray[np.float16]


class CpuEngine(Engine):
    """f16 weights and operands, f32 accumulation, on a team of ``threads`` (default: all cores)."""

    def __init__(self, threads: int | None = None) -> None:
        self._team = Team(threads or len(os.sched_getaffinity(0)))
        self._scratch = np.empty(0, dtype=np.float32)
        self._padded_out = np.empty(0, dtype=np.float32)
        self.info = EngineInfo(
            name="cpu",
            adapter=_processor_name(),
            backend="numba",
            hardware_gpu=False,
            limits={"threads": self._team.size},
        )

    def load(self, weight: NDArray[np.float16]) -> LoadedWeight:
        """See :meth:`Engine.load`. Packs into panels: the same size, rounded up to 16 columns."""
        d_out, d_in = weight.shape
        panels = -(-d_out // LANES)
        try:
            packed = np.zeros((panels, d_in, LANES), dtype=np.float16)
        except MemoryError as error:
            raise EngineError(f"no memory for a weight of {weight.nbytes} bytes") from error
        full = d_out // LANES
        packed[:full] = weight[: full * LANES].reshape(full, LANES, d_in).transpose(0, 2, 1)
        if full < panels:
            packed[full, :, : d_out - full * LANES] = weight[full * LANES :].T
        return LoadedWeight(d_in=d_in, d_out=d_out, state=_Panels(packed))

    def unload(self, weight: LoadedWeight) -> None:
        """See :meth:`Engine.unload`. The memory goes with the last reference."""

    def matmul(self, weight: LoadedWeight, operand: NDArray[np.float16], out: NDArray[np.float32]) -> None:
        """See :meth:`Engine.matmul`."""
        state = weight.state
        if not isinstance(state, _Panels):
            raise EngineError("this weight was loaded by another engine")
        rows, d_in = operand.shape
        if d_in != weight.d_in or out.shape != (rows, weight.d_out):
            raise EngineError(f"shapes {operand.shape} and {out.shape} do not fit the weight")
        padded = padded_rows(rows)
        self._scratch = _grown(self._scratch, padded * d_in)
        scratch = self._scratch[: padded * d_in].reshape(padded, d_in)
        widen_operand(operand.view(np.uint16), scratch, rows, d_in)
        panels = len(state.packed)
        direct = padded == rows and panels * LANES == weight.d_out
        width = panels * LANES
        if not direct:
            self._padded_out = _grown(self._padded_out, padded * width)
        target = out if direct else self._padded_out[: padded * width].reshape(padded, width)
        self._team.run(
            scratch.ctypes.data, d_in * 4, state.packed.ctypes.data, d_in,
            target.ctypes.data, width * 4, rows, panels,
        )  # fmt: skip
        if not direct:
            out[...] = target[:rows, : weight.d_out]

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
