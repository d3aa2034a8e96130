"""Products modulo 2^32 on a GPU through WebGPU: uint32 operands times int8 or int16 weights, exact.

As in :mod:`gpu_worker.engines.wgpu`, one command buffer uploads, multiplies and downloads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.ring_plan import (
    RING_K_ALIGN,
    RING_N_ALIGN,
    RingPlan,
    plan_ring,
    plan_ring_slabs,
    ring_rows_per_chunk,
)
from gpu_worker.engines.ring_weights import RingWeight, check_weight, operand_shifts, weight_bytes
from gpu_worker.engines.wgpu_device import AdapterSummary, Prefer, engine_errors, open_device, pick_adapter
from gpu_worker.engines.wgpu_native import NativeDevice, open_native
from gpu_worker.engines.wgpu_pipelines import Pipelines
from gpu_worker.engines.wgpu_plan import WORKGROUP_TARGETS, PlanLimits, Slab, round_up
from gpu_worker.engines.wgpu_staging import StagingSlot, Workspace
from gpu_worker.kernels.ring import RingKernel, ring_reduce_source

# The host fills and empties one slot while the device works on the other.
RING_SLOTS = 2
# Uniform bindings start at multiples of 256 bytes on every adapter.
_PARAMS_BYTES = 32
_PARAMS_STRIDE = 256
# Large products are cut into submissions of about this size, which overlap transfer and arithmetic.
DEFAULT_CHUNK_BYTES = 64 << 20
# Bytes of a weight packed at a time.
_PACK_BYTES = 4 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _WeightState:
    """A resident weight of padded size ``(k, n)``; ``buffers[i]`` is ``slabs[i]`` as packed bytes.

    ``k`` counts every byte of a weight, see :mod:`gpu_worker.engines.ring_weights`.
    """

    shifts: tuple[int, ...]
    k: int
    n: int
    rows: int
    slabs: tuple[Slab, ...]
    buffers: list[Any] = field(default_factory=list)
    bind_groups: dict[tuple[int, str], Any] = field(default_factory=dict)
    bind_version: int = -1


class _RingPipelines(Pipelines):
    """The same binding layouts, other kernels."""

    def __init__(self, device: Any, native: NativeDevice | None) -> None:
        super().__init__(device, native)
        self._ring: dict[RingKernel, Any] = {}
        self.reduce = self._compile("reduce", ring_reduce_source())

    def ring(self, kernel: RingKernel) -> Any:
        """The pipeline of ``kernel``."""
        pipeline = self._ring.get(kernel)
        if pipeline is None:
            pipeline = self._ring[kernel] = self._compile("gemm", kernel.source())
        return pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDevice:
    """An open device and what products share on it; another engine may use the same one in between."""

    device: Any
    native: NativeDevice | None
    limits: PlanLimits
    workspace: Workspace
    slots: tuple[StagingSlot, ...]

    @classmethod
    def open(
        cls,
        adapter: AdapterSummary,
        *,
        max_binding_bytes: int | None = None,
        workgroup_target: int | None = None,
        use_native: bool = True,
    ) -> RingDevice:
        """A device of its own on ``adapter``; see :class:`gpu_worker.engines.wgpu.WgpuEngine`.

        Raises:
            EngineError: it does not open.
        """
        device = open_device(adapter, use_f16=False)
        native = open_native(device) if use_native else None
        max_buffer = adapter.limits["max-buffer-size"]
        binding = min(adapter.limits["max-storage-buffer-binding-size"], max_buffer)
        limits = PlanLimits(
            binding_bytes=min(binding, max_binding_bytes or binding) // 256 * 256,
            workgroup_bytes=adapter.limits["max-compute-workgroup-storage-size"],
            max_groups=adapter.limits["max-compute-workgroups-per-dimension"],
            workgroup_target=workgroup_target or WORKGROUP_TARGETS[adapter.device_type],
            f16=False,
        )
        return cls(
            device=device,
            native=native,
            limits=limits,
            workspace=Workspace(device, limits.binding_bytes),
            slots=tuple(StagingSlot(device, native, max_buffer) for _ in range(RING_SLOTS)),
        )

    def close(self) -> None:
        """Frees all buffers and closes the device."""
        for slot in self.slots:
            slot.destroy()
        self.workspace.destroy()
        self.device.destroy()


class RingWgpu:
    """``Y = y·Wᵀ mod 2^32`` on one wgpu device.

    Args:
        shared: the device; by default one of its own on ``adapter``, which :meth:`close` closes.
        adapter: for a device of its own, by default the preferred one.
        prefer: ``"hardware"`` refuses a software device, ``"any"`` takes one if there is nothing better.
        chunk_bytes: cut larger operands and results into several submissions.

    Raises:
        EngineError: no usable adapter, or it does not open.
    """

    def __init__(
        self,
        shared: RingDevice | None = None,
        *,
        adapter: AdapterSummary | None = None,
        prefer: Prefer = "any",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._own = shared is None
        self._on = shared or RingDevice.open(adapter or pick_adapter(prefer))
        self._chunk_bytes = chunk_bytes
        with engine_errors("the kernels do not compile"):
            self._pipelines = _RingPipelines(self._on.device, self._on.native)
        self._weights: set[_WeightState] = set()
        self._closed = False

    @property
    def resident_bytes(self) -> int:
        """Device memory that the loaded weights take, padding included."""
        return sum(buffer.size for state in self._weights for buffer in state.buffers)

    def load(self, weight: RingWeight) -> LoadedWeight:
        """Packs ``weight`` ``(d_out, d_in)`` into padded slabs on the device, one or two bytes a value.

        Raises:
            EngineError: it is no such matrix, an int16 value exceeds 32639, or it does not fit.
        """
        self._require_open()
        check_weight(weight)
        d_out, d_in = weight.shape
        shifts = operand_shifts(weight)
        k, n = len(shifts) * round_up(d_in, RING_K_ALIGN), round_up(d_out, RING_N_ALIGN)
        slabs = plan_ring_slabs(k, d_out, self._on.limits)
        rows = ring_rows_per_chunk(k, n, self._chunk_bytes, self._on.limits)
        state = _WeightState(shifts=shifts, k=k, n=n, rows=rows, slabs=slabs)
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

    def matmul(self, weight: LoadedWeight, operand: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
        """``out[...] = operand @ weight.T`` modulo 2^32: ``(m, d_in)`` to ``(m, d_out)`` uint32, m >= 1.

        The operand may be memory that another process writes: it is copied once and left as it is.

        Raises:
            EngineError: wrong shapes or types, a weight this engine does not hold, or the device fails.
        """
        state = self._state(weight)
        _check_arrays(weight, operand, out)
        m = operand.shape[0]
        starts = range(0, m, state.rows)
        with engine_errors("a product fails"):
            plans = {rows: self._plan(state, rows) for rows in {min(state.rows, m), m - starts[-1]}}
            slots = self._on.slots
            self._reserve(state, plans, slots[: len(starts)])
            in_flight: deque[tuple[StagingSlot, int, int]] = deque()
            for index, start in enumerate(starts):
                if len(in_flight) == len(slots):
                    self._finish(*in_flight.popleft(), state, out)
                slot = slots[index % len(slots)]
                stop = min(start + state.rows, m)
                self._start(slot, state, operand[start:stop], plans[stop - start])
                in_flight.append((slot, start, stop))
            while in_flight:
                self._finish(*in_flight.popleft(), state, out)

    def close(self) -> None:
        """Frees all weights, and the device if it is its own. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for state in self._weights:
            _destroy(state)
        self._weights.clear()
        if self._own:
            with engine_errors("the device does not close"):
                self._on.close()

    def _load_slab(self, state: _WeightState, slab: Slab, weight: RingWeight) -> None:
        buffer = self._on.device.create_buffer(
            label="weight", size=state.k * slab.width, usage="STORAGE", mapped_at_creation=True
        )
        state.buffers.append(buffer)
        part_k = state.k // len(state.shifts)
        depth = max(4, _PACK_BYTES // slab.width // 4 * 4)
        for part, shift in enumerate(state.shifts):
            for k0 in range(0, part_k, depth):
                block = _packed_block(weight, slab, k0, min(depth, part_k - k0), shift)
                buffer.write_mapped(block, (part * part_k + k0) * slab.width)
        buffer.unmap()
        # wgpu keeps the upload in memory of its own until something is submitted.
        self._wait(self._submit(self._on.device.create_command_encoder().finish()))

    def _state(self, weight: LoadedWeight) -> _WeightState:
        self._require_open()
        state = weight.state
        if not isinstance(state, _WeightState) or state not in self._weights:
            raise EngineError("this weight is not loaded in this engine (any more)")
        return state

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _plan(self, state: _WeightState, rows: int) -> tuple[RingPlan, ...]:
        return tuple(plan_ring(rows, state.k, slab.width, self._on.limits) for slab in state.slabs)

    def _reserve(
        self, state: _WeightState, plans: dict[int, tuple[RingPlan, ...]], slots: tuple[StagingSlot, ...]
    ) -> None:
        """Grows every buffer to what all chunks of this product need, before the first is submitted."""
        rows = max(plans)
        space = self._on.workspace
        params = _PARAMS_STRIDE * len(state.slabs)
        operand, result = 4 * rows * state.k, 4 * rows * state.n
        space.reserve("params", params)
        space.reserve("operand", operand)
        space.reserve("result", result)
        partial = max(plan.partial_bytes for chunk in plans.values() for plan in chunk)
        if partial:
            space.reserve("partial", partial)
        for slot in slots:
            slot.reserve(params + operand, result)
        if state.bind_version != space.version:
            state.bind_groups.clear()
            state.bind_version = space.version

    def _start(
        self,
        slot: StagingSlot,
        state: _WeightState,
        operand: NDArray[np.uint32],
        plans: tuple[RingPlan, ...],
    ) -> None:
        """Submits one chunk of rows; nothing waits."""
        rows = operand.shape[0]
        params_bytes, operand_bytes = _PARAMS_STRIDE * len(plans), 4 * rows * state.k
        host = slot.upload.to_host()
        _write_params(host[:params_bytes], rows, state, plans)
        _write_operand(host[params_bytes : params_bytes + operand_bytes], operand, state)
        slot.upload.to_device()
        slot.download.to_device()
        space = self._on.workspace
        encoder = self._on.device.create_command_encoder()
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

    def _dispatch(self, compute: Any, state: _WeightState, index: int, plan: RingPlan) -> None:
        split = plan.splits > 1
        compute.set_pipeline(self._pipelines.ring(plan.kernel))
        compute.set_bind_group(0, self._bind_group(state, index, "partial" if split else "direct"))
        compute.dispatch_workgroups(*plan.grid)
        if split:
            compute.set_pipeline(self._pipelines.reduce)
            compute.set_bind_group(0, self._bind_group(state, index, "reduce"))
            compute.dispatch_workgroups(*plan.reduce_grid)

    def _bind_group(self, state: _WeightState, index: int, kind: str) -> Any:
        group = state.bind_groups.get((index, kind))
        if group is None:
            space = self._on.workspace
            params = {"buffer": space["params"], "offset": index * _PARAMS_STRIDE, "size": _PARAMS_BYTES}
            if kind == "reduce":
                group = self._pipelines.bind_reduce(params, space["partial"], space["result"])
            else:
                target = space["partial"] if kind == "partial" else space["result"]
                group = self._pipelines.bind_gemm(params, space["operand"], state.buffers[index], target)
            state.bind_groups[index, kind] = group
        return group

    def _finish(
        self, slot: StagingSlot, start: int, stop: int, state: _WeightState, out: NDArray[np.uint32]
    ) -> None:
        """Waits for the chunk in ``slot`` and copies its rows to ``out``."""
        self._wait(slot.submission)
        result = slot.download.to_host()[: 4 * (stop - start) * state.n].view(np.uint32)
        out[start:stop] = result.reshape(stop - start, state.n)[:, : out.shape[1]]
        slot.download.to_device()

    def _submit(self, commands: Any) -> int:
        if self._on.native is not None:
            return self._on.native.submit(commands)
        self._on.device.queue.submit([commands])
        return 0

    def _wait(self, submission: int) -> None:
        # Without the native calls, mapping a buffer waits.
        if self._on.native is not None:
            self._on.native.wait(submission)


def _check_arrays(weight: LoadedWeight, operand: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
    if operand.dtype != np.uint32 or operand.ndim != 2 or operand.shape[1] != weight.d_in:
        raise EngineError(
            f"the operand must be uint32 (m, {weight.d_in}), not {operand.dtype} {operand.shape}"
        )
    if operand.shape[0] < 1:
        raise EngineError("the operand has no rows")
    expected = (operand.shape[0], weight.d_out)
    if out.dtype != np.uint32 or out.shape != expected or not out.flags.writeable:
        raise EngineError(f"out must be writable uint32 {expected}, not {out.dtype} {out.shape}")


def _packed_block(weight: RingWeight, slab: Slab, k0: int, depth: int, shift: int) -> NDArray[np.uint32]:
    """Input indices ``k0 : k0 + depth`` of the slab as ``(depth / 4, width / 4, 4)`` words of four columns.

    Zero beyond the weight's real sizes.
    """
    values = weight_bytes(weight[slab.start : slab.stop, k0 : k0 + depth], shift)
    block = np.zeros((depth, slab.width), np.int8)
    block[: values.shape[1], : values.shape[0]] = values.T
    words = block.view(np.uint32).reshape(depth // 4, 4, slab.width // 4)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def _write_params(
    host: NDArray[np.uint8], rows: int, state: _WeightState, plans: tuple[RingPlan, ...]
) -> None:
    """One ``Params`` of ``kernels/params.wgsl`` per slab, ``_PARAMS_STRIDE`` bytes apart."""
    table = host.view(np.uint32).reshape(len(plans), _PARAMS_STRIDE // 4)
    for row, slab, plan in zip(table, state.slabs, plans, strict=True):
        result = (state.n // 4, slab.start // 4)
        gemm = (slab.width // 4, 0) if plan.splits > 1 else result
        row[: _PARAMS_BYTES // 4] = (rows, state.k, slab.width, plan.splits, *gemm, *result)


def _write_operand(host: NDArray[np.uint8], operand: NDArray[np.uint32], state: _WeightState) -> None:
    """``operand`` once for each shift, its rows padded by zeros."""
    rows, d_in = operand.shape
    padded = host.view(np.uint32).reshape(rows, len(state.shifts), -1)
    for part, shift in enumerate(state.shifts):
        if shift:
            np.left_shift(operand, np.uint32(shift), out=padded[:, part, :d_in])
        else:
            padded[:, part, :d_in] = operand
    padded[:, :, d_in:] = 0


def _destroy(state: _WeightState) -> None:
    state.bind_groups.clear()
    while state.buffers:
        state.buffers.pop().destroy()
