"""Resident weights by content hash."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from gelo.formats import WeightFormat
from gelo.header import MAX_DIMENSION
from gpu_worker.engines.base import Engine, LoadedWeight
from gpu_worker.lock import EngineLock

MAX_WEIGHT_BYTES = 1 << 33


class UploadError(ValueError):
    """An upload that cannot be accepted; the message says why."""


def weight_key(digest: bytes, d_in: int, d_out: int, form: WeightFormat) -> bytes:
    """What identifies a resident weight: the same bytes in another shape or format are another one."""
    return digest + struct.pack("<III", d_in, d_out, form)


class WeightStore:
    """Weights held by an engine, by :func:`weight_key`.

    At most ``capacity`` bytes, as uploaded. A new weight evicts the least recently bound ones that
    no open session uses. Thread-safe; ``lock`` serialises every use of the engine.
    """

    def __init__(self, engine: Engine, lock: EngineLock, *, capacity: int) -> None:
        self._engine = engine
        self._lock = lock
        self._capacity = capacity
        self._weights: OrderedDict[bytes, LoadedWeight] = OrderedDict()
        self._bound: dict[bytes, int] = {}
        self._bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._weights

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident weights, as uploaded."""
        return self._bytes

    def add(self, digest: bytes, d_in: int, d_out: int, form: WeightFormat, chunks: Iterable[bytes]) -> None:
        """Receive, check and load one weight.

        Raises:
            UploadError: bad shape, wrong length, wrong hash, or no room.
            EngineError: the engine cannot hold it.
        """
        if len(digest) != 32 or not (0 < d_in <= MAX_DIMENSION and 0 < d_out <= MAX_DIMENSION):
            raise UploadError("the weight's hash or shape is out of bounds")
        size = d_in * d_out * form.item_bytes
        if size > min(self._capacity, MAX_WEIGHT_BYTES):
            raise UploadError(f"a weight of {size} bytes exceeds this worker's limit")
        array = np.empty(size, dtype=np.uint8)
        hasher = hashlib.sha256()
        for offset, chunk in _placed(chunks, size):
            array[offset : offset + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            hasher.update(chunk)
        if hasher.digest() != digest:
            raise UploadError("the bytes received do not have the announced SHA-256")
        key = weight_key(digest, d_in, d_out, form)
        with self._lock:
            if key in self._weights:
                return
            self._make_room(size)
            self._weights[key] = self._engine.load(array.view(form.dtype).reshape(d_out, d_in))
            self._bytes += size

    def bind(self, keys: list[bytes]) -> list[LoadedWeight]:
        """The weights, kept resident until :meth:`release`.

        Raises:
            KeyError: one of them is not here.
        """
        with self._lock:
            weights = [self._weights[key] for key in keys]
            for key in keys:
                self._weights.move_to_end(key)
                self._bound[key] = self._bound.get(key, 0) + 1
            return weights

    def release(self, keys: list[bytes]) -> None:
        """Undo one :meth:`bind`."""
        with self._lock:
            for key in keys:
                self._bound[key] -= 1
                if not self._bound[key]:
                    del self._bound[key]

    def _make_room(self, size: int) -> None:
        for key in list(self._weights):
            if self._bytes + size <= self._capacity:
                return
            if key not in self._bound:
                weight = self._weights.pop(key)
                self._bytes -= weight.size
                self._engine.unload(weight)
        if self._bytes + size > self._capacity:
            raise UploadError("no room: the open sessions' weights fill this worker")


def _placed(chunks: Iterable[bytes], size: int) -> Iterator[tuple[int, bytes]]:
    """Chunks with their offsets; refuses too many and too few bytes."""
    offset = 0
    for chunk in chunks:
        if offset + len(chunk) > size:
            raise UploadError(f"more than the announced {size} bytes")
        yield offset, chunk
        offset += len(chunk)
    if offset != size:
        raise UploadError(f"{offset} of the announced {size} bytes arrived")
