"""Matrix products on a GPU through WebGPU (wgpu-py): one command buffer uploads, multiplies and downloads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_worker.engines.base import Engine, EngineError, EngineInfo, LoadedWeight
from gpu_worker.engines.wgpu_device import (
    AdapterSummary,
    Prefer,
    engine_errors,
    hardware_gpu_available,
    list_adapters,
    open_device,
    pick_adapter,
)
from gpu_worker.engines.wgpu_native import open_native
from gpu_worker.engines.wgpu_pipelines import Pipelines
from gpu_worker.engines.wgpu_plan import (
    K_ALIGN,
    N_ALIGN,
    WORKGROUP_TARGETS,
    GemmPlan,
    PlanLimits,
    Slab,
    plan_gemm,
    plan_slabs,
    round_up,
    rows_per_chunk,
)
from gpu_worker.engines.wgpu_staging import StagingSlot, Workspace

__all__ = ["AdapterSummary", "WgpuEngine", "hardware_gpu_available", "list_adapters", "pick_adapter"]

# The host fills and empties one slot while the device works on the other.
_RING_SLOTS = 2
# Uniform bindings start at multiples of 256 bytes on every adapter.
_PARAMS_BYTES = 32
_PARAMS_STRIDE = 256
# Large products are cut into submissions of about this size, which overlap transfer and arithmetic.
DEFAULT_CHUNK_BYTES = 64 << 20
# Blocks of this edge stay in the processor's cache while they are transposed.
_TRANSPOSE_BLOCK = 128
_TRANSPOSE_BYTES = 4 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _WeightState:
    """A resident weight, ``k`` and ``n`` padded; ``buffers[i]`` is ``slabs[i]`` as ``(k, width)`` f16."""

    k: int
    n: int
    rows: int
    slabs: tuple[Slab, ...]
    buffers: list[Any] = field(default_factory=list)
    bind_groups: dict[tuple[int, str], Any] = field(default_factory=dict)
    bind_version: int = -1


class WgpuEngine(Engine):
    """Products on one wgpu adapter.

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
        f16 = adapter.has_f16 if use_f16 is None else use_f16
        self._device: Any = open_device(adapter, use_f16=f16)
        self._limits = _plan_limits(adapter, f16, max_binding_bytes, workgroup_target)
        self._chunk_bytes = chunk_bytes
        self._native = open_native(self._device) if use_native else None
        with engine_errors("the kernels do not compile"):
            self._pipelines = Pipelines(self._device, self._native)
        self._workspace = Workspace(self._device, self._limits.binding_bytes)
        max_buffer = adapter.limits["max-buffer-size"]
        self._ring = [StagingSlot(self._device, self._native, max_buffer) for _ in range(_RING_SLOTS)]
        self._weights: set[_WeightState] = set()
        self._closed = False
        self.info = EngineInfo(
            name="wgpu",
            adapter=f"{adapter.name} ({adapter.device_type})",
            backend=adapter.backend,
            hardware_gpu=adapter.hardware_gpu,
            features=tuple(sorted(self._device.features)),
            limits=adapter.reported_limits,
        )

    @property
    def resident_bytes(self) -> int:
        """Device memory that the loaded weights take, padding included."""
        return sum(buffer.size for state in self._weights for buffer in state.buffers)

    def load(self, weight: NDArray[np.float16]) -> LoadedWeight:
        """Transposes ``weight`` ``(d_out, d_in)`` float16 into padded slabs ``(k, width)`` on the device.

        Raises:
            EngineError: wrong type, or it does not fit this adapter.
        """
        self._require_open()
        if weight.dtype != np.float16 or weight.ndim != 2 or 0 in weight.shape:
            raise EngineError(
                f"a weight must be a non-empty float16 matrix, not {weight.dtype} {weight.shape}"
            )
        d_out, d_in = weight.shape
        k, n = round_up(d_in, K_ALIGN), round_up(d_out, N_ALIGN)
        slabs = plan_slabs(k, d_out, self._limits)
        rows = rows_per_chunk(k, n, self._chunk_bytes, self._limits)
        state = _WeightState(k=k, n=n, rows=rows, slabs=slabs)
        try:
            with engine_errors(f"a weight {d_out} x {d_in} does not load"):
                for slab in slabs:
                    self._load_slab(state, slab, weight)
        except EngineError:
            _destroy(state)
            raise
        self._weights.add(state)
        return LoadedWeight(d_in=d_in, d_out=d_out, state=state)

    def unload(self, weight: LoadedWeight) -> None:
        """Frees the weight's memory.

        Raises:
            EngineError: this engine does not hold it.
        """
        state = self._state(weight)
        self._weights.remove(state)
        _destroy(state)

    def matmul(self, weight: LoadedWeight, operand: NDArray[np.float16], out: NDArray[np.float32]) -> None:
        """``out[...] = operand @ weight.T``; operand ``(m, d_in)`` f16, out ``(m, d_out)`` f32.

        Raises:
            EngineError: wrong shapes or types, a weight this engine does not hold, or the device fails.
        """
        state = self._state(weight)
        _check_arrays(weight, operand, out)
        m = operand.shape[0]
        starts = range(0, m, state.rows)
        with engine_errors("a product fails"):
            plans = {rows: self._plan(state, rows) for rows in {min(state.rows, m), m - starts[-1]}}
            self._reserve(state, plans, slots=min(len(starts), _RING_SLOTS))
            in_flight: deque[tuple[StagingSlot, int, int]] = deque()
            for index, start in enumerate(starts):
                if len(in_flight) == _RING_SLOTS:
                    self._finish(*in_flight.popleft(), state, out)
                slot = self._ring[index % _RING_SLOTS]
                stop = min(start + state.rows, m)
                self._start(slot, state, operand[start:stop], plans[stop - start])
                in_flight.append((slot, start, stop))
            while in_flight:
                self._finish(*in_flight.popleft(), state, out)

    def close(self) -> None:
        """Frees all weights and buffers and closes the device. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for state in self._weights:
            _destroy(state)
        self._weights.clear()
        with engine_errors("the device does not close"):
            for slot in self._ring:
                slot.destroy()
            self._workspace.destroy()
            self._device.destroy()

    def _load_slab(self, state: _WeightState, slab: Slab, weight: NDArray[np.float16]) -> None:
        buffer = self._device.create_buffer(
            label="weight", size=2 * state.k * slab.width, usage="STORAGE", mapped_at_creation=True
        )
        state.buffers.append(buffer)
        depth = max(32, min(_TRANSPOSE_BLOCK, _TRANSPOSE_BYTES // (2 * slab.width)))
        for k0 in range(0, state.k, depth):
            block = _transposed_block(weight, slab, k0, min(depth, state.k - k0))
            buffer.write_mapped(block, 2 * k0 * slab.width)
        buffer.unmap()
        # wgpu keeps the upload in memory of its own until something is submitted.
        self._wait(self._submit(self._device.create_command_encoder().finish()))

    def _state(self, weight: LoadedWeight) -> _WeightState:
        self._require_open()
        state = weight.state
        if not isinstance(state, _WeightState) or state not in self._weights:
            raise EngineError("this weight is not loaded in this engine (any more)")
        return state

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _plan(self, state: _WeightState, rows: int) -> tuple[GemmPlan, ...]:
        return tuple(plan_gemm(rows, state.k, slab.width, self._limits) for slab in state.slabs)

    def _reserve(self, state: _WeightState, plans: dict[int, tuple[GemmPlan, ...]], slots: int) -> None:
        """Grows every buffer to what all chunks of this product need, before the first is submitted."""
        rows = max(plans)
        params = _PARAMS_STRIDE * len(state.slabs)
        operand, result = 2 * rows * state.k, 4 * rows * state.n
        self._workspace.reserve("params", params)
        self._workspace.reserve("operand", operand)
        self._workspace.reserve("result", result)
        partial = max(plan.partial_bytes for chunk in plans.values() for plan in chunk)
        if partial:
            self._workspace.reserve("partial", partial)
        for slot in self._ring[:slots]:
            slot.reserve(params + operand, result)
        if state.bind_version != self._workspace.version:
            state.bind_groups.clear()
            state.bind_version = self._workspace.version

    def _start(
        self,
        slot: StagingSlot,
        state: _WeightState,
        operand: NDArray[np.float16],
        plans: tuple[GemmPlan, ...],
    ) -> None:
        """Submits one chunk of rows; nothing waits."""
        rows = operand.shape[0]
        params_bytes, operand_bytes = _PARAMS_STRIDE * len(plans), 2 * rows * state.k
        host = slot.upload.to_host()
        _write_params(host[:params_bytes], rows, state, plans)
        _write_operand(host[params_bytes : params_bytes + operand_bytes], operand, state.k)
        slot.upload.to_device()
        slot.download.to_device()
        space = self._workspace
        encoder = self._device.create_command_encoder()
        encoder.copy_buffer_to_buffer(slot.upload.buffer, 0, space["params"], 0, params_bytes)
        encoder.copy_buffer_to_buffer(slot.upload.buffer, params_bytes, space["operand"], 0, operand_bytes)
        compute = encoder.begin_compute_pass()
        for index, plan in enumerate(plans):
            self._dispatch(compute, state, index, plan)
        compute.end()
        encoder.copy_buffer_to_buffer(space["result"], 0, slot.download.buffer, 0, 4 * rows * state.n)
        slot.submission = self._submit(encoder.finish())
        slot.download.request_host()
        slot.upload.request_host()

    def _dispatch(self, compute: Any, state: _WeightState, index: int, plan: GemmPlan) -> None:
        split = plan.splits > 1
        compute.set_pipeline(self._pipelines.gemm(plan.kernel))
        compute.set_bind_group(0, self._bind_group(state, index, "partial" if split else "direct"))
        compute.dispatch_workgroups(*plan.grid)
        if split:
            compute.set_pipeline(self._pipelines.reduce)
            compute.set_bind_group(0, self._bind_group(state, index, "reduce"))
            compute.dispatch_workgroups(*plan.reduce_grid)

    def _bind_group(self, state: _WeightState, index: int, kind: str) -> Any:
        group = state.bind_groups.get((index, kind))
        if group is None:
            space = self._workspace
            params = {"buffer": space["params"], "offset": index * _PARAMS_STRIDE, "size": _PARAMS_BYTES}
            if kind == "reduce":
                group = self._pipelines.bind_reduce(params, space["partial"], space["result"])
            else:
                target = space["partial"] if kind == "partial" else space["result"]
                group = self._pipelines.bind_gemm(params, space["operand"], state.buffers[index], target)
            state.bind_groups[index, kind] = group
        return group

    def _finish(
        self, slot: StagingSlot, start: int, stop: int, state: _WeightState, out: NDArray[np.float32]
    ) -> None:
        """Waits for the chunk in ``slot`` and copies its rows to ``out``."""
        self._wait(slot.submission)
        result = slot.download.to_host()[: 4 * (stop - start) * state.n].view(np.float32)
        out[start:stop] = result.reshape(stop - start, state.n)[:, : out.shape[1]]
        slot.download.to_device()

    def _submit(self, commands: Any) -> int:
        if self._native is not None:
            return self._native.submit(commands)
        self._device.queue.submit([commands])
        return 0

    def _wait(self, submission: int) -> None:
        # Without the native calls, mapping a buffer waits.
        if self._native is not None:
            self._native.wait(submission)


def _plan_limits(
    adapter: AdapterSummary, f16: bool, max_binding_bytes: int | None, workgroup_target: int | None
) -> PlanLimits:
    binding = min(adapter.limits["max-storage-buffer-binding-size"], adapter.limits["max-buffer-size"])
    return PlanLimits(
        binding_bytes=min(binding, max_binding_bytes or binding) // 256 * 256,
        workgroup_bytes=adapter.limits["max-compute-workgroup-storage-size"],
        max_groups=adapter.limits["max-compute-workgroups-per-dimension"],
        workgroup_target=workgroup_target or WORKGROUP_TARGETS[adapter.device_type],
        f16=f16,
    )


def _check_arrays(weight: LoadedWeight, operand: NDArray[np.float16], out: NDArray[np.float32]) -> None:
    if operand.dtype != np.float16 or operand.ndim != 2 or operand.shape[1] != weight.d_in:
        raise EngineError(
            f"the operand must be float16 (m, {weight.d_in}), not {operand.dtype} {operand.shape}"
        )
    if operand.shape[0] < 1:
        raise EngineError("the operand has no rows")
    expected = (operand.shape[0], weight.d_out)
    if out.dtype != np.float32 or out.shape != expected or not out.flags.writeable:
        raise EngineError(f"out must be writable float32 {expected}, not {out.dtype} {out.shape}")


def _transposed_block(weight: NDArray[np.float16], slab: Slab, k0: int, depth: int) -> NDArray[np.float16]:
    """Rows ``k0 : k0 + depth`` of the slab: ``(depth, width)`` f16, zero beyond the weight's real sizes."""
    block = np.zeros((depth, slab.width), np.float16)
    real = max(0, min(depth, weight.shape[1] - k0))
    for n0 in range(slab.start, slab.stop, _TRANSPOSE_BLOCK):
        n1 = min(n0 + _TRANSPOSE_BLOCK, slab.stop)
        block[:real, n0 - slab.start : n1 - slab.start] = weight[n0:n1, k0 : k0 + real].T
    return block


def _write_params(
    host: NDArray[np.uint8], rows: int, state: _WeightState, plans: tuple[GemmPlan, ...]
) -> None:
    """One ``Params`` of ``kernels/params.wgsl`` per slab, ``_PARAMS_STRIDE`` bytes apart."""
    table = host.view(np.uint32).reshape(len(plans), _PARAMS_STRIDE // 4)
    for row, slab, plan in zip(table, state.slabs, plans, strict=True):
        result = (state.n // 4, slab.start // 4)
        gemm = (slab.width // 4, 0) if plan.splits > 1 else result
        row[: _PARAMS_BYTES // 4] = (rows, state.k, slab.width, plan.splits, *gemm, *result)


def _write_operand(host: NDArray[np.uint8], operand: NDArray[np.float16], k: int) -> None:
    """``operand`` with its rows padded to ``k`` by zeros; old bytes there could be NaN, which zero keeps."""
    rows, d_in = operand.shape
    padded = host.view(np.float16).reshape(rows, k)
    padded[:, :d_in] = operand
    padded[:, d_in:] = 0


def _destroy(state: _WeightState) -> None:
    state.bind_groups.clear()
    while state.buffers:
        state.buffers.pop().destroy()
