"""The safetensors container, read through a memory map and written tensor by tensor.

The header is parsed here, with every bound checked, because the file is memory-mapped and handed
out as views: nothing is copied until a tensor is used, and no tensor needs to fit twice.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models.json_file import parse_json_object

Array = NDArray[Any]

MAX_HEADER_BYTES: Final = 100_000_000  # the bound of the reference implementation
MAX_DIMS: Final = 8
MAX_ELEMENTS: Final = 1 << 48

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: format dtype name, row-major shape, absolute byte offset and length."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def parse_header(header: bytes, data_start: int, data_bytes: int) -> dict[str, TensorEntry]:
    """The tensors that a safetensors JSON ``header`` declares over ``data_bytes`` of data.

    Raises ``ModelError`` for a header that is malformed, repeats a name, or whose tensors do not
    tile the data exactly, and ``UnsupportedModelError`` for a dtype other than F16, BF16, F32.
    """
    entries: dict[str, TensorEntry] = {}
    for name, fields in parse_json_object(header, what="the safetensors header").items():
        if name != "__metadata__":
            entries[name] = _parse_entry(name, fields, data_start, data_bytes)
    position = data_start
    for entry in sorted(entries.values(), key=lambda item: (item.offset, item.nbytes)):
        if entry.offset != position:
            raise ModelError(f"Tensor {entry.name!r} overlaps another or leaves a gap in the file.")
        position += entry.nbytes
    if position != data_start + data_bytes:
        raise ModelError("The safetensors file has bytes that belong to no tensor.")
    return entries


def _parse_entry(name: str, fields: object, data_start: int, data_bytes: int) -> TensorEntry:
    if not name.isprintable():
        raise ModelError(f"The safetensors header names a tensor {name!r}.")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"The safetensors header entry of {name!r} is malformed.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedModelError(f"Tensor {name!r} has dtype {dtype!r}; F16, BF16 and F32 are supported.")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape)
        or math.prod(shape) > MAX_ELEMENTS
    ):
        raise ModelError(f"Tensor {name!r} has an impossible shape.")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int for n in offsets)
        or not 0 <= offsets[0] <= offsets[1] <= data_bytes
    ):
        raise ModelError(f"Tensor {name!r} lies outside the safetensors file.")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise ModelError(
            f"Tensor {name!r} declares {offsets[1] - offsets[0]} bytes; its shape needs {nbytes}."
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + offsets[0], nbytes)


class SafetensorsFile:
    """One memory-mapped safetensors file. Raises ``ModelError`` for anything malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot open {path}: {error}.") from error
        size = len(self._map)
        if size < 8:
            raise ModelError(f"{path} is too short to be a safetensors file.")
        (header_bytes,) = struct.unpack("<Q", self._map[:8])
        if header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{path} declares a header of {header_bytes} bytes, more than it can hold.")
        start = 8 + header_bytes
        try:
            self.entries = parse_header(self._map[8:start], start, size - start)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path.name}: {error.message}") from None
        except ModelError as error:
            raise ModelError(f"{path.name}: {error.message}") from None

    def raw(self, name: str) -> memoryview:
        """The bytes of tensor ``name`` as a read-only view of the map (little-endian, row-major)."""
        entry = self.entries[name]
        return memoryview(self._map)[entry.offset : entry.offset + entry.nbytes]

    def array(self, name: str) -> Array:
        """Tensor ``name`` as a read-only view of the map, in its stored dtype and shape."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        return np.frombuffer(self._map, dtype, count=count, offset=entry.offset).reshape(entry.shape)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Let go of the memory behind bytes ``start`` to ``stop`` of tensor ``name``.

        They stay readable: reading them again fetches them from the file.
        """
        entry = self.entries[name]
        end = entry.offset + (entry.nbytes if stop is None else min(stop, entry.nbytes))
        # Whole pages only, the last one of the range left for the next.
        first = (entry.offset + start) // mmap.PAGESIZE * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written: its shape, and how to make it when its turn comes."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Array]


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorSource], progress: Callable[[int, int], None] | None = None
) -> None:
    """Write ``tensors`` to a new file, holding one of them in memory at a time, and sync it to disk.

    ``load`` must return an array of the declared dtype and shape. ``progress`` gets tensors done
    and in total. Raises ``FileExistsError`` when ``path`` exists.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, source in tensors.items():
        nbytes = math.prod(source.shape) * DTYPES[source.dtype].itemsize
        header[name] = {
            "dtype": source.dtype,
            "shape": list(source.shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("xb") as handle:
        handle.write(struct.pack("<Q", len(encoded)))
        handle.write(encoded)
        for done, (name, source) in enumerate(tensors.items(), start=1):
            array = np.ascontiguousarray(source.load())
            if array.dtype != DTYPES[source.dtype] or array.shape != source.shape:
                raise ValueError(f"{name}: {array.dtype}{array.shape} is not {source.dtype}{source.shape}")
            handle.write(array.reshape(-1).view(np.uint8).data)
            if progress is not None:
                progress(done, len(tensors))
        handle.flush()
        os.fsync(handle.fileno())
