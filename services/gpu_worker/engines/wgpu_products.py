"""What products of every kind share on a GPU: the device, resident weights, and the round trip.

One command buffer uploads, multiplies and downloads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.wgpu_device import AdapterSummary, engine_errors, open_device
from gpu_worker.engines.wgpu_native import NativeDevice, open_native
from gpu_worker.engines.wgpu_pipelines import Pipelines
from gpu_worker.engines.wgpu_plan import WORKGROUP_TARGETS, GemmPlan, PlanLimits, Slab
from gpu_worker.engines.wgpu_staging import StagingSlot, Workspace

# The host fills and empties one slot while the device works on the other.
_SLOTS = 2
# Uniform bindings start at multiples of 256 bytes on every adapter.
_PARAMS_BYTES = 32
_PARAMS_STRIDE = 256
# Large products are cut into submissions of about this size, which overlap transfer and arithmetic.
DEFAULT_CHUNK_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class WeightState:
    """A resident weight, ``k`` and ``n`` padded; ``buffers[i]`` holds ``slabs[i]``."""

    k: int
    n: int
    rows: int
    slabs: tuple[Slab, ...]
    buffers: list[Any] = field(default_factory=list)
    bind_groups: dict[tuple[int, str], Any] = field(default_factory=dict)
    bind_version: int = -1

    def destroy(self) -> None:
        """Free the device's memory."""
        self.bind_groups.clear()
        while self.buffers:
            self.buffers.pop().destroy()


State = TypeVar("State", bound=WeightState)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """An open device and what products share on it; several engines may use one in turn."""

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
        use_f16: bool = False,
        max_binding_bytes: int | None = None,
        workgroup_target: int | None = None,
        use_native: bool = True,
    ) -> GpuDevice:
        """Open ``adapter``; the options are those of :class:`gpu_worker.engines.wgpu.WgpuEngine`.

        Raises:
            EngineError: it does not open.
        """
        device = open_device(adapter, use_f16=use_f16)
        native = open_native(device) if use_native else None
        max_buffer = adapter.limits["max-buffer-size"]
        binding = min(adapter.limits["max-storage-buffer-binding-size"], max_buffer)
        limits = PlanLimits(
            binding_bytes=min(binding, max_binding_bytes or binding) // 256 * 256,
            workgroup_bytes=adapter.limits["max-compute-workgroup-storage-size"],
            max_groups=adapter.limits["max-compute-workgroups-per-dimension"],
            workgroup_target=workgroup_target or WORKGROUP_TARGETS[adapter.device_type],
            f16=use_f16,
        )
        return cls(
            device=device,
            native=native,
            limits=limits,
            workspace=Workspace(device, limits.binding_bytes),
            slots=tuple(StagingSlot(device, native, max_buffer) for _ in range(_SLOTS)),
        )

    def submit(self, commands: Any) -> int:
        """Send a command buffer; the number to :meth:`wait` for."""
        if self.native is not None:
            return self.native.submit(commands)
        self.device.queue.submit([commands])
        return 0

    def wait(self, submission: int) -> None:
        """Wait for a submission. Without the native calls, mapping a buffer waits."""
        if self.native is not None:
            self.native.wait(submission)

    def close(self) -> None:
        """Frees all buffers and closes the device."""
        for slot in self.slots:
            slot.destroy()
        self.workspace.destroy()
        self.device.destroy()


class GpuProducts(Generic[State]):
    """Products of one kind on a device. Results have 4 bytes an element."""

    # Of the wire's operand and result.
    OPERAND: ClassVar[type[np.generic]]
    RESULT: ClassVar[type[np.generic]]

    def __init__(self, on: GpuDevice, reduce_source: str, chunk_bytes: int, *, own: bool = True) -> None:
        """``own``: :meth:`close` closes the device, too."""
        self._on = on
        self._own = own
        self._chunk_bytes = chunk_bytes
        with engine_errors("the kernels do not compile"):
            self._pipelines = Pipelines(on.device, on.native, reduce_source)
        self._weights: set[State] = set()
        self._closed = False

    @abstractmethod
    def _plan(self, state: State, rows: int) -> tuple[GemmPlan, ...]:
        """A plan for each slab."""

    @abstractmethod
    def _write_operand(self, host: NDArray[np.uint8], operand: NDArray[Any], state: State) -> None:
        """Fill ``host`` with the operand's rows, padded to ``state.k`` elements by zeros."""

    @property
    def resident_bytes(self) -> int:
        """Device memory that the loaded weights take, padding included."""
        return sum(buffer.size for state in self._weights for buffer in state.buffers)

    def unload(self, weight: LoadedWeight) -> None:
        """Frees the weight's memory.

        Raises:
            EngineError: this engine does not hold it.
        """
        state = self._state(weight)
        self._weights.remove(state)
        state.destroy()

    def close(self) -> None:
        """Frees all weights, and the device if it is its own. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for state in self._weights:
            state.destroy()
        self._weights.clear()
        if self._own:
            with engine_errors("the device does not close"):
                self._on.close()

    def _load(
        self, state: State, weight: NDArray[Any], item_bytes: int, write: Callable[[Any, Slab], None]
    ) -> LoadedWeight:
        """Make ``weight`` resident; ``write`` fills the mapped buffer of a slab."""
        d_out, d_in = weight.shape
        try:
            with engine_errors(f"a weight {d_out} x {d_in} does not load"):
                for slab in state.slabs:
                    buffer = self._on.device.create_buffer(
                        label="weight", size=item_bytes * state.k * slab.width, usage="STORAGE",
                        mapped_at_creation=True,
                    )  # fmt: skip
                    state.buffers.append(buffer)
                    write(buffer, slab)
                    buffer.unmap()
                    # wgpu keeps the upload in memory of its own until something is submitted.
                    self._on.wait(self._on.submit(self._on.device.create_command_encoder().finish()))
        except EngineError:
            state.destroy()
            raise
        self._weights.add(state)
        return LoadedWeight(d_in=d_in, d_out=d_out, format=WeightFormat.of(weight.dtype), state=state)

    def matmul(self, weight: LoadedWeight, operand: NDArray[Any], out: NDArray[Any]) -> None:
        """``out[...] = operand @ weight.T``: ``(m, d_in)`` to ``(m, d_out)``, m >= 1.

        The operand may be memory that another process writes: it is copied once and left as it is.

        Raises:
            EngineError: wrong shapes or types, a weight this engine does not hold, or the device fails.
        """
        state = self._state(weight)
        self._check_arrays(weight, operand, out)
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

    def _state(self, weight: LoadedWeight) -> State:
        self._require_open()
        state: Any = weight.state
        if not isinstance(state, WeightState) or state not in self._weights:
            raise EngineError("this weight is not loaded in this engine (any more)")
        return state

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _check_arrays(self, weight: LoadedWeight, operand: NDArray[Any], out: NDArray[Any]) -> None:
        wanted, made = np.dtype(self.OPERAND), np.dtype(self.RESULT)
        if operand.dtype != wanted or operand.ndim != 2 or operand.shape[1] != weight.d_in:
            raise EngineError(
                f"the operand must be {wanted} (m, {weight.d_in}), not {operand.dtype} {operand.shape}"
            )
        if operand.shape[0] < 1:
            raise EngineError("the operand has no rows")
        expected = (operand.shape[0], weight.d_out)
        if out.dtype != made or out.shape != expected or not out.flags.writeable:
            raise EngineError(f"out must be writable {made} {expected}, not {out.dtype} {out.shape}")

    def _operand_bytes(self, state: State, rows: int) -> int:
        return np.dtype(self.OPERAND).itemsize * rows * state.k

    def _reserve(
        self, state: State, plans: dict[int, tuple[GemmPlan, ...]], slots: tuple[StagingSlot, ...]
    ) -> None:
        """Grows every buffer to what all chunks of this product need, before the first is submitted."""
        rows = max(plans)
        space = self._on.workspace
        params = _PARAMS_STRIDE * len(state.slabs)
        operand, result = self._operand_bytes(state, rows), 4 * rows * state.n
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
        self, slot: StagingSlot, state: State, operand: NDArray[Any], plans: tuple[GemmPlan, ...]
    ) -> None:
        """Submits one chunk of rows; nothing waits."""
        rows = operand.shape[0]
        params_bytes, operand_bytes = _PARAMS_STRIDE * len(plans), self._operand_bytes(state, rows)
        host = slot.upload.to_host()
        _write_params(host[:params_bytes], rows, state, plans)
        self._write_operand(host[params_bytes : params_bytes + operand_bytes], operand, state)
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
        slot.submission = self._on.submit(encoder.finish())
        slot.download.request_host()
        slot.upload.request_host()

    def _dispatch(self, compute: Any, state: State, index: int, plan: GemmPlan) -> None:
        split = plan.splits > 1
        compute.set_pipeline(self._pipelines.gemm(plan.kernel))
        compute.set_bind_group(0, self._bind_group(state, index, "partial" if split else "direct"))
        compute.dispatch_workgroups(*plan.grid)
        if split:
            compute.set_pipeline(self._pipelines.reduce)
            compute.set_bind_group(0, self._bind_group(state, index, "reduce"))
            compute.dispatch_workgroups(*plan.reduce_grid)

    def _bind_group(self, state: State, index: int, kind: str) -> Any:
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

    def _finish(self, slot: StagingSlot, start: int, stop: int, state: State, out: NDArray[Any]) -> None:
        """Waits for the chunk in ``slot`` and copies its rows to ``out``."""
        self._on.wait(slot.submission)
        result = slot.download.to_host()[: 4 * (stop - start) * state.n].view(self.RESULT)
        out[start:stop] = result.reshape(stop - start, state.n)[:, : out.shape[1]]
        slot.download.to_device()


def _write_params(
    host: NDArray[np.uint8], rows: int, state: WeightState, plans: tuple[GemmPlan, ...]
) -> None:
    """One ``Params`` of ``kernels/params.wgsl`` per slab, ``_PARAMS_STRIDE`` bytes apart."""
    table = host.view(np.uint32).reshape(len(plans), _PARAMS_STRIDE // 4)
    for row, slab, plan in zip(table, state.slabs, plans, strict=True):
        result = (state.n // 4, slab.start // 4)
        gemm = (slab.width // 4, 0) if plan.splits > 1 else result
        row[: _PARAMS_BYTES // 4] = (rows, state.k, slab.width, plan.splits, *gemm, *result)
