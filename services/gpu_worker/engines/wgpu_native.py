"""What wgpu-native offers and wgpu-py does not: exact waits, mapping without a thread, unchecked shaders.

wgpu-py waits for the whole queue when it maps a buffer, on a thread of its own. These calls wait for one
submission, on the calling thread, with the GIL released. They use wgpu-py's private bindings, so everything
here has a portable counterpart and :func:`open_native` answers ``None`` when a binding is missing.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any, Literal

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
    """The native calls for one wgpu device."""

    def __init__(self, device: Any, bindings: _Bindings) -> None:
        self._device = device
        self._queue = device.queue
        self._api = bindings
        self._index = bindings.ffi.new("WGPUSubmissionIndex *")
        self._commands = bindings.ffi.new("WGPUCommandBuffer[1]")

    def submit(self, commands: Any) -> int:
        """Submits one command buffer and returns its submission index."""
        self._commands[0] = commands._internal
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

    def finish_map(self, ticket: int) -> None:
        """Waits until the mapping is done.

        Raises:
            EngineError: the buffer cannot be mapped.
        """
        for block in (False, True):
            if ticket in self._api.map_status:
                break
            self._api.poll(self._device._internal, block, self._api.ffi.NULL)
        status = self._api.map_status.pop(ticket, None)
        if status != self._api.lib.WGPUMapAsyncStatus_Success:
            raise EngineError(f"a staging buffer cannot be mapped (status {status}); the GPU may be lost")

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


def open_native(device: Any) -> NativeDevice | None:
    """The native calls for ``device``, or ``None`` if this version of wgpu-py hides them."""
    bindings = _bindings()
    return None if bindings is None else NativeDevice(device, bindings)
