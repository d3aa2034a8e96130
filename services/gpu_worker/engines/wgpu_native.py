"""What wgpu-native offers and wgpu-py does not: exact waits, mapping without a thread, unchecked shaders.

wgpu-py waits for the whole queue when it maps a buffer, on a thread of its own. These calls wait for one
submission, on the calling thread, with the GIL released; commands are recorded without an object and a
dictionary for each. They use wgpu-py's private bindings, so everything here has a portable counterpart and
:func:`open_native` answers ``None`` when a binding is missing.
"""

from __future__ import annotations

import time
from functools import cache
from itertools import count
from typing import Any, Literal, Self

from gpu_worker.engines.base import EngineError

MapMode = Literal["READ", "WRITE"]

_MAP_CALLBACK = "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)"


class _Bindings:
    """Process-wide: its callback must outlive every buffer that was ever asked to map."""

    def __init__(self) -> None:
        from wgpu.backends.wgpu_native import GPUShaderModule, ffi, lib
        from wgpu.backends.wgpu_native._api import libf, to_c_string_view

        self.ffi = ffi
        self.lib = lib
        # libf raises what the native library reports as an error; lib would only log it.
        self.submit = libf.wgpuQueueSubmitForIndex
        self.poll = libf.wgpuDevicePoll
        self.map_async = libf.wgpuBufferMapAsync
        self.mapped_range = libf.wgpuBufferGetMappedRange
        self.unmap = libf.wgpuBufferUnmap
        self.create_shader = libf.wgpuDeviceCreateShaderModuleTrusted
        self.create_encoder = libf.wgpuDeviceCreateCommandEncoder
        self.copy = libf.wgpuCommandEncoderCopyBufferToBuffer
        self.begin_pass = libf.wgpuCommandEncoderBeginComputePass
        self.set_pipeline = libf.wgpuComputePassEncoderSetPipeline
        self.set_bind_group = libf.wgpuComputePassEncoderSetBindGroup
        self.dispatch = libf.wgpuComputePassEncoderDispatchWorkgroups
        self.end_pass = libf.wgpuComputePassEncoderEnd
        self.finish = libf.wgpuCommandEncoderFinish
        self.release_pass = libf.wgpuComputePassEncoderRelease
        self.release_encoder = libf.wgpuCommandEncoderRelease
        self.release_commands = libf.wgpuCommandBufferRelease
        self.shader_class = GPUShaderModule
        self.string_view = to_c_string_view
        self.map_status: dict[int, int] = {}
        self.tickets = count(1)
        self.map_callback = ffi.callback(_MAP_CALLBACK, self._on_mapped)
        ffi.typeof("WGPUSubmissionIndex *")
        ffi.typeof("WGPUBufferMapCallbackInfo *")
        ffi.typeof("WGPUShaderSourceWGSL *")

    def _on_mapped(self, status: int, _message: object, ticket: Any, _unused: object) -> None:
        self.map_status[int(self.ffi.cast("uintptr_t", ticket))] = status


@cache
def _bindings() -> _Bindings | None:
    try:
        return _Bindings()
    except Exception:
        # Another version of wgpu-py moved a private name: the portable calls do the same, slower.
        return None


class NativeDevice:
    """The native calls for one wgpu device.

    ``patience``: how many seconds to ask for a result again and again before waiting to be woken.
    """

    def __init__(self, device: Any, bindings: _Bindings, patience: float) -> None:
        self._device = device
        self._patience = patience
        self._queue = device.queue
        self._api = bindings
        self._index = bindings.ffi.new("WGPUSubmissionIndex *")
        self._commands = bindings.ffi.new("WGPUCommandBuffer[1]")

    def commands(self) -> NativeCommands:
        """An empty list of commands."""
        return NativeCommands(self._device, self._api, self._submit)

    def _submit(self, commands: Any) -> int:
        self._commands[0] = commands
        return int(self._api.submit(self._queue._internal, 1, self._commands))

    def wait(self, submission: int) -> None:
        """Blocks until that submission is done, whatever was submitted after it."""
        self._index[0] = submission
        self._api.poll(self._device._internal, True, self._index)

    def request_map(self, buffer: Any, mode: MapMode) -> int:
        """Asks for a buffer to be mapped once the GPU is done with it, and returns a ticket."""
        ticket = next(self._api.tickets)
        info = self._api.ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode = self._api.lib.WGPUCallbackMode_AllowProcessEvents
        info.callback = self._api.map_callback
        info.userdata1 = self._api.ffi.cast("void *", ticket)
        flag = self._api.lib.WGPUMapMode_Read if mode == "READ" else self._api.lib.WGPUMapMode_Write
        self._api.map_async(buffer._internal, flag, 0, buffer.size, info[0])
        return ticket

    def finish_map(self, ticket: int, submission: int | None) -> None:
        """Waits until the mapping is done, which follows ``submission`` if there is one.

        Raises:
            EngineError: the buffer cannot be mapped.
        """
        status = self._api.map_status
        deadline = time.perf_counter() + self._patience
        while ticket not in status:
            self._api.poll(self._device._internal, False, self._api.ffi.NULL)
            if time.perf_counter() >= deadline:
                break
        if ticket not in status and submission is not None:
            self.wait(submission)
        for block in (False, True):
            if ticket not in status:
                self._api.poll(self._device._internal, block, self._api.ffi.NULL)
        if status.pop(ticket, None) != self._api.lib.WGPUMapAsyncStatus_Success:
            raise EngineError("a staging buffer cannot be mapped; the GPU may be lost")

    def mapped(self, buffer: Any) -> Any:
        """The mapped bytes of ``buffer`` as a writable buffer object, valid until :meth:`unmap`."""
        address = self._api.mapped_range(buffer._internal, 0, buffer.size)
        if address == self._api.ffi.NULL:
            raise EngineError("a staging buffer has no mapped range; the GPU may be lost")
        return self._api.ffi.buffer(address, buffer.size)

    def unmap(self, buffer: Any) -> None:
        """Gives the buffer back to the GPU."""
        self._api.unmap(buffer._internal)

    def create_shader(self, source: str, label: str) -> Any:
        """A shader module without run-time bounds checks.

        The kernels clamp every index themselves, and the checks cost a good part of the memory bandwidth.
        """
        ffi, lib = self._api.ffi, self._api.lib
        # Every cffi object must live until the call below returns.
        code = self._api.string_view(source)
        wgsl = ffi.new("WGPUShaderSourceWGSL *")
        wgsl.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        wgsl.code = code
        name = self._api.string_view(label)
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", wgsl)
        descriptor.label = name
        module = self._api.create_shader(self._device._internal, descriptor, 0)
        return self._api.shader_class(label, module, self._device)


class NativeCommands:
    """Copies and dispatches, recorded in order and submitted at once."""

    def __init__(self, device: Any, api: _Bindings, submit: Any) -> None:
        self._api = api
        self._submit = submit
        self._encoder = api.create_encoder(device._internal, api.ffi.NULL)
        self._pass: Any = None
        self._finished: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pass is not None:
            self._api.release_pass(self._pass)
        self._api.release_encoder(self._encoder)
        if self._finished is not None:
            self._api.release_commands(self._finished)

    def copy(self, source: Any, source_at: int, target: Any, target_at: int, size: int) -> None:
        """``size`` bytes from one buffer to another."""
        self._end_pass()
        self._api.copy(self._encoder, source._internal, source_at, target._internal, target_at, size)

    def dispatch(self, pipeline: Any, group: Any, grid: tuple[int, int, int]) -> None:
        """Run ``pipeline`` on the buffers of ``group``, in ``grid`` workgroups."""
        if self._pass is None:
            self._pass = self._api.begin_pass(self._encoder, self._api.ffi.NULL)
        self._api.set_pipeline(self._pass, pipeline._internal)
        self._api.set_bind_group(self._pass, 0, group._internal, 0, self._api.ffi.NULL)
        self._api.dispatch(self._pass, *grid)

    def finish(self) -> None:
        """There are no more of them."""
        self._end_pass()
        self._finished = self._api.finish(self._encoder, self._api.ffi.NULL)

    def submit(self) -> int:
        """Send all of it, after :meth:`finish`; the number to wait for."""
        return int(self._submit(self._finished))

    def _end_pass(self) -> None:
        if self._pass is not None:
            ended, self._pass = self._pass, None
            self._api.end_pass(ended)
            self._api.release_pass(ended)


def open_native(device: Any, *, patience: float = 0.0) -> NativeDevice | None:
    """The native calls for ``device``, or ``None`` if this version of wgpu-py hides them."""
    bindings = _bindings()
    return None if bindings is None else NativeDevice(device, bindings, patience)
