"""Products modulo 2^32 on a GPU through WebGPU: uint32 operands times int8 or int16 weights, exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_worker.engines.base import LoadedWeight
from gpu_worker.engines.ring_plan import RING_K_ALIGN, plan_ring
from gpu_worker.engines.ring_weights import RingWeight, check_weight, operand_shifts, weight_bytes
from gpu_worker.engines.wgpu_device import AdapterSummary, Prefer, pick_adapter
from gpu_worker.engines.wgpu_plan import N_ALIGN, GemmPlan, Slab, plan_slabs, round_up, rows_per_chunk
from gpu_worker.engines.wgpu_products import DEFAULT_CHUNK_BYTES, GpuDevice, GpuProducts, WeightState
from gpu_worker.kernels.gemm import reduce_source

# Bytes of a weight packed at a time.
_PACK_BYTES = 4 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _RingState(WeightState):
    """``k`` counts every byte of a weight, see :mod:`gpu_worker.engines.ring_weights`."""

    shifts: tuple[int, ...]


class RingWgpu(GpuProducts[_RingState]):
    """``Y = y·Wᵀ mod 2^32`` on one wgpu device.

    Args:
        shared: the device; by default one of its own on ``adapter``, which :meth:`close` closes.
        adapter: for a device of its own, by default the preferred one.
        prefer: ``"hardware"`` refuses a software device, ``"any"`` takes one if there is nothing better.
        chunk_bytes: cut larger operands and results into several submissions.

    Raises:
        EngineError: no usable adapter, or it does not open.
    """

    OPERAND, RESULT = np.uint32, np.uint32

    def __init__(
        self,
        shared: GpuDevice | None = None,
        *,
        adapter: AdapterSummary | None = None,
        prefer: Prefer = "any",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        on = shared or GpuDevice.open(adapter or pick_adapter(prefer))
        super().__init__(on, reduce_source("u32"), chunk_bytes, own=shared is None)

    def load(self, weight: RingWeight) -> LoadedWeight:
        """Packs ``weight`` ``(d_out, d_in)`` into padded slabs on the device, one or two bytes a value.

        Raises:
            EngineError: it is no such matrix, an int16 value exceeds 32639, or it does not fit.
        """
        self._require_open()
        check_weight(weight)
        d_out, d_in = weight.shape
        shifts = operand_shifts(weight)
        part_k = round_up(d_in, RING_K_ALIGN)
        k, n = len(shifts) * part_k, round_up(d_out, N_ALIGN)
        slabs = plan_slabs(k, d_out, self._on.limits, item_bytes=1)
        rows = rows_per_chunk(k, n, self._chunk_bytes, self._on.limits, item_bytes=4)

        def write(buffer: Any, slab: Slab) -> None:
            depth = max(4, _PACK_BYTES // slab.width // 4 * 4)
            for part, shift in enumerate(shifts):
                for k0 in range(0, part_k, depth):
                    block = _packed_block(weight, slab, k0, min(depth, part_k - k0), shift)
                    buffer.write_mapped(block, (part * part_k + k0) * slab.width)

        return self._load(_RingState(shifts=shifts, k=k, n=n, rows=rows, slabs=slabs), weight, 1, write)

    def _plan(self, state: _RingState, rows: int) -> tuple[GemmPlan, ...]:
        return tuple(plan_ring(rows, state.k, slab.width, self._on.limits) for slab in state.slabs)

    def _write_operand(self, host: NDArray[np.uint8], operand: NDArray[Any], state: _RingState) -> None:
        """``operand`` once for each shift."""
        rows, d_in = operand.shape
        padded = host.view(np.uint32).reshape(rows, len(state.shifts), -1)
        for part, shift in enumerate(state.shifts):
            if shift:
                np.left_shift(operand, np.uint32(shift), out=padded[:, part, :d_in])
            else:
                padded[:, part, :d_in] = operand
        padded[:, :, d_in:] = 0


def _packed_block(weight: RingWeight, slab: Slab, k0: int, depth: int, shift: int) -> NDArray[np.uint32]:
    """Input indices ``k0 : k0 + depth`` of the slab as ``(depth / 4, width / 4, 4)`` words of four columns.

    Zero beyond the weight's real sizes.
    """
    values = weight_bytes(weight[slab.start : slab.stop, k0 : k0 + depth], shift)
    block = np.zeros((depth, slab.width), np.int8)
    block[: values.shape[1], : values.shape[0]] = values.T
    words = block.view(np.uint32).reshape(depth // 4, 4, slab.width // 4)
    return np.ascontiguousarray(words.transpose(0, 2, 1))
