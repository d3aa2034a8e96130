"""Buffers that live as long as the engine: mapped staging pairs and the device's working memory.

All grow geometrically and never shrink, so a steady stream of calls allocates nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpu_worker.engines.base import EngineError
from gpu_worker.engines.wgpu_native import MapMode, NativeDevice

_MIN_BYTES = 64 * 1024
_USAGE: dict[MapMode, str] = {"READ": "MAP_READ|COPY_DST", "WRITE": "MAP_WRITE|COPY_SRC"}
WorkspacePart = Literal["params", "operand", "partial", "result"]
_WORKSPACE: dict[WorkspacePart, str] = {
    "params": "UNIFORM|COPY_DST",
    "operand": "STORAGE|COPY_DST",
    "partial": "STORAGE",
    "result": "STORAGE|COPY_SRC",
}


def grown_size(current: int, needed: int, limit: int) -> int:
    """The size of a buffer that had ``current`` bytes and must hold ``needed``, at most ``limit``.

    Raises:
        EngineError: ``needed`` exceeds ``limit``.
    """
    limit = limit // 256 * 256
    if needed > limit:
        raise EngineError(f"a buffer of {needed} bytes is needed; this adapter allows {limit}")
    if needed <= current:
        return current
    return min(limit, max(_MIN_BYTES, 2 * current, -(-needed // 256) * 256))


class StagingBuffer(ABC):
    """A buffer that is in turn the host's (mapped) and the device's."""

    def __init__(self, device: Any, mode: MapMode, size: int) -> None:
        self.buffer = device.create_buffer(label=f"staging-{mode.lower()}", size=size, usage=_USAGE[mode])
        self.size = size
        self._mode: MapMode = mode

    @abstractmethod
    def to_host(self) -> NDArray[np.uint8]:
        """Waits until the device is done with the buffer; its bytes, valid until :meth:`to_device`."""

    @abstractmethod
    def to_device(self) -> None:
        """Makes the buffer usable by the next submission. Harmless if it already is."""

    @abstractmethod
    def request_host(self, submission: int | None = None) -> None:
        """Lets the buffer become the host's as soon as what was submitted, last of all, is done with it."""

    def destroy(self) -> None:
        """Frees the memory."""
        self.to_device()
        self.buffer.destroy()


class NativeStagingBuffer(StagingBuffer):
    """Maps through wgpu-native, so a mapping follows its submission and nothing later."""

    def __init__(self, device: Any, mode: MapMode, size: int, native: NativeDevice) -> None:
        super().__init__(device, mode, size)
        self._native = native
        self._ticket: int | None = None
        self._submission: int | None = None
        self._mapped = False

    def request_host(self, submission: int | None = None) -> None:
        if not self._mapped and self._ticket is None:
            self._ticket = self._native.request_map(self.buffer, self._mode)
            self._submission = submission

    def to_host(self) -> NDArray[np.uint8]:
        self.request_host()
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            self._native.finish_map(ticket, self._submission)
            self._mapped = True
        return np.frombuffer(self._native.mapped(self.buffer), np.uint8)

    def to_device(self) -> None:
        # A submission that uses a buffer whose mapping is pending would end the process.
        if self._ticket is not None:
            self.to_host()
        if self._mapped:
            self._mapped = False
            self._native.unmap(self.buffer)


class PortableStagingBuffer(StagingBuffer):
    """Maps through wgpu-py's public calls, which wait for the whole queue and copy uploads once more."""

    def __init__(self, device: Any, mode: MapMode, size: int) -> None:
        super().__init__(device, mode, size)
        self._host: NDArray[np.uint8] | None = None
        self._held = False

    def request_host(self, submission: int | None = None) -> None:
        """Nothing: the public call waits at once, which :meth:`to_host` does in time."""

    def to_host(self) -> NDArray[np.uint8]:
        self._held = True
        if self._mode == "READ":
            self.buffer.map_sync("READ")
            return np.frombuffer(self.buffer.read_mapped(copy=False), np.uint8)
        if self._host is None:
            self._host = np.zeros(self.size, np.uint8)
        return self._host

    def to_device(self) -> None:
        if not self._held:
            return
        self._held = False
        if self._mode == "WRITE":
            self.buffer.map_sync("WRITE")
            self.buffer.write_mapped(self._host)
        self.buffer.unmap()


class StagingSlot:
    """One place of the ring: an upload and a download buffer."""

    def __init__(self, device: Any, native: NativeDevice | None, max_bytes: int) -> None:
        self._device = device
        self._native = native
        self._max_bytes = max_bytes
        self._buffers: dict[MapMode, StagingBuffer] = {}

    def reserve(self, upload_bytes: int, download_bytes: int) -> None:
        """Makes both buffers at least this large.

        Raises:
            EngineError: the device does not allow it.
        """
        self._reserve("WRITE", upload_bytes)
        self._reserve("READ", download_bytes)

    @property
    def upload(self) -> StagingBuffer:
        """Host to device; after :meth:`reserve`."""
        return self._buffers["WRITE"]

    @property
    def download(self) -> StagingBuffer:
        """Device to host; after :meth:`reserve`."""
        return self._buffers["READ"]

    def destroy(self) -> None:
        """Frees both buffers."""
        while self._buffers:
            self._buffers.popitem()[1].destroy()

    def _reserve(self, mode: MapMode, needed: int) -> None:
        old = self._buffers.get(mode)
        size = grown_size(old.size if old else 0, needed, self._max_bytes)
        if old and old.size == size:
            return
        if old:
            del self._buffers[mode]
            old.destroy()
        self._buffers[mode] = (
            PortableStagingBuffer(self._device, mode, size)
            if self._native is None
            else NativeStagingBuffer(self._device, mode, size, self._native)
        )


class Workspace:
    """The device's own buffers: kernel parameters, operand, partial sums, result.

    ``version`` changes whenever a buffer is replaced: bind groups made before are then stale.
    """

    def __init__(self, device: Any, max_bytes: int) -> None:
        self._device = device
        self._max_bytes = max_bytes
        self._buffers: dict[WorkspacePart, Any] = {}
        self.version = 0

    def __getitem__(self, part: WorkspacePart) -> Any:
        return self._buffers[part]

    def reserve(self, part: WorkspacePart, needed: int) -> None:
        """Makes that buffer at least this large.

        Raises:
            EngineError: the device does not allow it.
        """
        old = self._buffers.get(part)
        size = grown_size(old.size if old else 0, needed, self._max_bytes)
        if old and old.size == size:
            return
        self.version += 1
        if old:
            del self._buffers[part]
            old.destroy()
        self._buffers[part] = self._device.create_buffer(label=part, size=size, usage=_WORKSPACE[part])

    def destroy(self) -> None:
        """Frees all buffers."""
        while self._buffers:
            self._buffers.popitem()[1].destroy()
