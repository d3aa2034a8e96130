"""Matrix products on a GPU through WebGPU (wgpu-py)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gelo.header import OperandKind
from gpu_worker.engines.base import AnyWeight, Engine, EngineError, EngineInfo, LoadedWeight
from gpu_worker.engines.ring_weights import RingWeight
from gpu_worker.engines.ring_wgpu import RingWgpu
from gpu_worker.engines.wgpu_device import (
    AdapterSummary,
    Prefer,
    hardware_gpu_available,
    list_adapters,
    pick_adapter,
)
from gpu_worker.engines.wgpu_plan import (
    K_ALIGN,
    N_ALIGN,
    GemmPlan,
    Slab,
    plan_gemm,
    plan_slabs,
    round_up,
    rows_per_chunk,
)
from gpu_worker.engines.wgpu_products import DEFAULT_CHUNK_BYTES, GpuDevice, GpuProducts, WeightState
from gpu_worker.kernels.gemm import reduce_source

__all__ = ["AdapterSummary", "WgpuEngine", "hardware_gpu_available", "list_adapters", "pick_adapter"]

# Blocks of this edge stay in the processor's cache while they are transposed.
_TRANSPOSE_BLOCK = 128
_TRANSPOSE_BYTES = 4 << 20


class WgpuEngine(GpuProducts[WeightState], Engine):
    """Products on one wgpu adapter: those of f16 factors here, those modulo 2^32 in ``RingWgpu``.

    Args:
        prefer: ``"hardware"`` refuses a software device, ``"any"`` takes one if there is nothing better.
        adapter: this adapter instead of the preferred one.
        use_f16: store weights as native f16; by default if the adapter can.
        max_binding_bytes: stay below this storage binding size, even if the adapter allows more.
        chunk_bytes: cut larger operands and results into several submissions.
        workgroup_target: workgroups that fill the device; by default from its type.
        use_native: use wgpu-native's own calls where wgpu-py still exposes them.

    Raises:
        EngineError: no usable adapter, or it does not open.
    """

    OPERAND, RESULT = np.float16, np.float32

    def __init__(
        self,
        *,
        prefer: Prefer = "any",
        adapter: AdapterSummary | None = None,
        use_f16: bool | None = None,
        max_binding_bytes: int | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        workgroup_target: int | None = None,
        use_native: bool = True,
    ) -> None:
        adapter = adapter or pick_adapter(prefer)
        on = GpuDevice.open(
            adapter,
            use_f16=adapter.has_f16 if use_f16 is None else use_f16,
            max_binding_bytes=max_binding_bytes,
            workgroup_target=workgroup_target,
            use_native=use_native,
        )
        super().__init__(on, reduce_source("f32"), chunk_bytes)
        # Most sessions use one kind of weight only: made with the first weight of integers.
        self._ring: RingWgpu | None = None
        self.info = EngineInfo(
            name="wgpu",
            adapter=f"{adapter.name} ({adapter.device_type})",
            backend=adapter.backend,
            hardware_gpu=adapter.hardware_gpu,
            features=tuple(sorted(on.device.features)),
            limits=adapter.reported_limits,
        )

    @property
    def resident_bytes(self) -> int:
        """See :attr:`GpuProducts.resident_bytes`."""
        return super().resident_bytes + (0 if self._ring is None else self._ring.resident_bytes)

    def load(self, weight: AnyWeight) -> LoadedWeight:
        """See :meth:`Engine.load`."""
        self._require_open()
        if weight.dtype not in (np.float16, np.int8, np.int16) or weight.ndim != 2 or 0 in weight.shape:
            raise EngineError(
                f"a weight must be a non-empty matrix of float16, int8 or int16, "
                f"not {weight.dtype} {weight.shape}"
            )
        if weight.dtype == np.float16:
            return self._load_halves(weight)
        if self._ring is None:
            self._ring = RingWgpu(self._on, chunk_bytes=self._chunk_bytes)
        return self._ring.load(cast(RingWeight, weight))

    def unload(self, weight: LoadedWeight) -> None:
        """See :meth:`GpuProducts.unload`."""
        if self._ring is not None and weight.format.kind == OperandKind.WORDS:
            self._ring.unload(weight)
        else:
            super().unload(weight)

    def matmul(self, weight: LoadedWeight, operand: NDArray[Any], out: NDArray[Any]) -> None:
        """See :meth:`Engine.matmul`."""
        if self._ring is not None and weight.format.kind == OperandKind.WORDS:
            self._ring.matmul(weight, operand, out)
        else:
            super().matmul(weight, operand, out)

    def close(self) -> None:
        """See :meth:`GpuProducts.close`."""
        if self._ring is not None:
            self._ring.close()
        super().close()

    def _load_halves(self, weight: NDArray[Any]) -> LoadedWeight:
        """Transposes ``weight`` into padded slabs ``(k, width)`` on the device."""
        d_out, d_in = weight.shape
        k, n = round_up(d_in, K_ALIGN), round_up(d_out, N_ALIGN)
        slabs = plan_slabs(k, d_out, self._on.limits)
        rows = rows_per_chunk(k, n, self._chunk_bytes, self._on.limits)

        def write(buffer: Any, slab: Slab) -> None:
            depth = max(32, min(_TRANSPOSE_BLOCK, _TRANSPOSE_BYTES // (2 * slab.width)))
            for k0 in range(0, k, depth):
                block = _transposed_block(weight, slab, k0, min(depth, k - k0))
                buffer.write_mapped(block, 2 * k0 * slab.width)

        return self._load(WeightState(k=k, n=n, rows=rows, slabs=slabs), weight, 2, write)

    def _plan(self, state: WeightState, rows: int) -> tuple[GemmPlan, ...]:
        return tuple(plan_gemm(rows, state.k, slab.width, self._on.limits) for slab in state.slabs)

    def _write_operand(self, host: NDArray[np.uint8], operand: NDArray[Any], state: WeightState) -> None:
        # Old bytes in the padding could be NaN, which zero weights keep.
        rows, d_in = operand.shape
        padded = host.view(np.float16).reshape(rows, state.k)
        padded[:, :d_in] = operand
        padded[:, d_in:] = 0


def _transposed_block(weight: NDArray[Any], slab: Slab, k0: int, depth: int) -> NDArray[np.float16]:
    """Rows ``k0 : k0 + depth`` of the slab: ``(depth, width)`` f16, zero beyond the weight's real sizes."""
    block = np.zeros((depth, slab.width), np.float16)
    real = max(0, min(depth, weight.shape[1] - k0))
    for n0 in range(slab.start, slab.stop, _TRANSPOSE_BLOCK):
        n1 = min(n0 + _TRANSPOSE_BLOCK, slab.stop)
        block[:real, n0 - slab.start : n1 - slab.start] = weight[n0:n1, k0 : k0 + real].T
    return block
