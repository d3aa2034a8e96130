"""What products of every kind share on a GPU: the device, resident weights, and the round trip.

One command buffer uploads, multiplies and downloads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.wgpu_device import AdapterSummary, engine_errors, open_device
from gpu_worker.engines.wgpu_native import NativeDevice, open_native
from gpu_worker.engines.wgpu_pipelines import Pipelines
from gpu_worker.engines.wgpu_plan import WORKGROUP_TARGETS, GemmPlan, PlanLimits, Slab
from gpu_worker.engines.wgpu_staging import StagingSlot, Workspace

# Being woken costs about 40 us on a GPU; a decode step's product takes less than this.
_PATIENCE_S = 300e-6
# The host fills and empties one slot while the device works on the other.
_SLOTS = 2
# Uniform bindings start at multiples of 256 bytes on every adapter.
_PARAMS_BYTES = 32
_PARAMS_STRIDE = 256
# Numbers of rows whose plans a weight remembers.
_PREPARED_MAX = 256
# Large products are cut into submissions of about this size, which overlap transfer and arithmetic.
DEFAULT_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a product of some number of rows needs: a plan for each slab, and their parameters' bytes."""

    plans: tuple[GemmPlan, ...]
    parameters: NDArray[np.uint8]


class Commands(Protocol):
    """Copies and dispatches, recorded in order and submitted at once."""

    def __enter__(self) -> Self:
        """Itself."""

    def __exit__(self, *_: object) -> None:
        """Forget what was not submitted."""

    def copy(self, source: Any, source_at: int, target: Any, target_at: int, size: int) -> None:
        """``size`` bytes from one buffer to another."""

    def dispatch(self, pipeline: Any, group: Any, grid: tuple[int, int, int]) -> None:
        """Run ``pipeline`` on the buffers of ``group``, in ``grid`` workgroups."""

    def finish(self) -> None:
        """There are no more of them."""

    def submit(self) -> int:
        """Send all of it, after :meth:`finish`; the number to :meth:`GpuDevice.wait` for."""


class PortableCommands:
    """:class:`Commands` through wgpu-py's public calls."""

    def __init__(self, device: Any) -> None:
        self._queue = device.queue
        self._encoder = device.create_command_encoder()
        self._finished: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def copy(self, source: Any, source_at: int, target: Any, target_at: int, size: int) -> None:
        self._encoder.copy_buffer_to_buffer(source, source_at, target, target_at, size)

    def dispatch(self, pipeline: Any, group: Any, grid: tuple[int, int, int]) -> None:
        compute = self._encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*grid)
        compute.end()

    def finish(self) -> None:
        self._finished = self._encoder.finish()

    def submit(self) -> int:
        self._queue.submit([self._finished])
        return 0


@dataclass(slots=True, kw_only=True, eq=False)
class WeightState:
    """A resident weight, ``k`` and ``n`` padded; ``buffers[i]`` holds ``slabs[i]``."""

    k: int
    n: int
    rows: int
    slabs: tuple[Slab, ...]
    buffers: list[Any] = field(default_factory=list)
    prepared: dict[int, Prepared] = field(default_factory=dict)
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
        # A software device computes on the cores that asking would take.
        patience = _PATIENCE_S if adapter.hardware_gpu else 0.0
        native = open_native(device, patience=patience) if use_native else None
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

    def commands(self) -> Commands:
        """An empty list of commands, a context manager."""
        return PortableCommands(self.device) if self.native is None else self.native.commands()

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
                    with self._on.commands() as nothing:
                        nothing.finish()
                        self._on.wait(nothing.submit())
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
            prepared = {rows: self._prepare(state, rows) for rows in {min(state.rows, m), m - starts[-1]}}
            slots = self._on.slots
            self._reserve(state, prepared, slots[: len(starts)])
            in_flight: deque[tuple[StagingSlot, int, int]] = deque()
            for index, start in enumerate(starts):
                if len(in_flight) == len(slots):
                    self._finish(*in_flight.popleft(), state, out)
                slot = slots[index % len(slots)]
                stop = min(start + state.rows, m)
                self._start(slot, state, operand[start:stop], prepared[stop - start])
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

    def _prepare(self, state: State, rows: int) -> Prepared:
        ready = state.prepared.get(rows)
        if ready is None:
            if len(state.prepared) == _PREPARED_MAX:
                state.prepared.clear()
            plans = self._plan(state, rows)
            ready = state.prepared[rows] = Prepared(plans, _parameters(rows, state, plans))
        return ready

    def _operand_bytes(self, state: State, rows: int) -> int:
        return np.dtype(self.OPERAND).itemsize * rows * state.k

    def _reserve(self, state: State, prepared: dict[int, Prepared], slots: tuple[StagingSlot, ...]) -> None:
        """Grows every buffer to what all chunks of this product need, before the first is submitted."""
        rows = max(prepared)
        space = self._on.workspace
        params = _PARAMS_STRIDE * len(state.slabs)
        operand, result = self._operand_bytes(state, rows), 4 * rows * state.n
        space.reserve("params", params)
        space.reserve("operand", operand)
        space.reserve("result", result)
        partial = max(plan.partial_bytes for chunk in prepared.values() for plan in chunk.plans)
        if partial:
            space.reserve("partial", partial)
        for slot in slots:
            slot.reserve(params + operand, result)
        if state.bind_version != space.version:
            state.bind_groups.clear()
            state.bind_version = space.version

    def _start(self, slot: StagingSlot, state: State, operand: NDArray[Any], prepared: Prepared) -> None:
        """Submits one chunk of rows; nothing waits."""
        rows = operand.shape[0]
        params_bytes, operand_bytes = prepared.parameters.size, self._operand_bytes(state, rows)
        host = slot.upload.to_host()
        host[:params_bytes] = prepared.parameters
        self._write_operand(host[params_bytes : params_bytes + operand_bytes], operand, state)
        slot.upload.to_device()
        slot.download.to_device()
        space = self._on.workspace
        with self._on.commands() as commands:
            commands.copy(slot.upload.buffer, 0, space["params"], 0, params_bytes)
            commands.copy(slot.upload.buffer, params_bytes, space["operand"], 0, operand_bytes)
            for index, plan in enumerate(prepared.plans):
                self._dispatch(commands, state, index, plan)
            commands.copy(space["result"], 0, slot.download.buffer, 0, 4 * rows * state.n)
            commands.finish()
            submission = commands.submit()
        slot.download.request_host(submission)
        slot.upload.request_host(submission)

    def _dispatch(self, commands: Commands, state: State, index: int, plan: GemmPlan) -> None:
        split = plan.splits > 1
        group = self._bind_group(state, index, "partial" if split else "direct")
        commands.dispatch(self._pipelines.gemm(plan.kernel), group, plan.grid)
        if split:
            group = self._bind_group(state, index, "reduce")
            commands.dispatch(self._pipelines.reduce, group, plan.reduce_grid)

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
        result = slot.download.to_host()[: 4 * (stop - start) * state.n].view(self.RESULT)
        out[start:stop] = result.reshape(stop - start, state.n)[:, : out.shape[1]]
        slot.download.to_device()


def _parameters(rows: int, state: WeightState, plans: tuple[GemmPlan, ...]) -> NDArray[np.uint8]:
    """One ``Params`` of ``kernels/params.wgsl`` per slab, ``_PARAMS_STRIDE`` bytes apart."""
    table = np.zeros((len(plans), _PARAMS_STRIDE // 4), np.uint32)
    for row, slab, plan in zip(table, state.slabs, plans, strict=True):
        result = (state.n // 4, slab.start // 4)
        gemm = (slab.width // 4, 0) if plan.splits > 1 else result
        row[: _PARAMS_BYTES // 4] = (rows, state.k, slab.width, plan.splits, *gemm, *result)
    return table.view(np.uint8).reshape(-1)
