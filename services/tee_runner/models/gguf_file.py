"""Reader for the GGUF container: metadata and tensor table, every length checked against the file.

The format is specified in ``ggml/docs/gguf.md``. The file is mapped, never read whole, and a
declared count is believed only when that many entries still fit into the bytes that remain.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from tee_runner.errors import ModelError, UnsupportedModelError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

MAX_METADATA_KEYS: Final = 4096
MAX_TENSORS: Final = 65_536
MAX_ARRAY_LENGTH: Final = 4_194_304  # the largest vocabularies have well under a million entries
MAX_STRING_BYTES: Final = 4_194_304  # chat templates run to some ten kilobytes
MAX_DIMS: Final = 4
MAX_ALIGNMENT: Final = 65_536

_SCALARS: Final[dict[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table. ``shape`` is in row-major (NumPy) order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class _Cursor:
    """A position in the mapped file; every read is bounds-checked."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._size - self.position

    def scalar(self, layout: struct.Struct) -> int | float | bool:
        value: int | float | bool = layout.unpack(self.take(layout.size))[0]
        return value

    def u32(self) -> int:
        return int(self.scalar(_SCALARS[4]))

    def u64(self) -> int:
        return int(self.scalar(_SCALARS[10]))

    def take(self, count: int) -> bytes:
        if count > self.remaining:
            raise ModelError(f"The GGUF file ends in the middle of its header, at byte {self.position}.")
        start = self.position
        self.position += count
        return self._data[start : self.position]

    def string(self) -> str:
        length = self.u64()
        if length > MAX_STRING_BYTES:
            raise ModelError(f"The GGUF header holds a string of {length} bytes (limit {MAX_STRING_BYTES}).")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"The GGUF header holds a string that is not UTF-8: {error.reason}.") from None

    def value(self, kind: int) -> Value:
        if kind == _ARRAY:
            return self._array()
        return self._element(kind)

    def _element(self, kind: int) -> Scalar:
        if kind == _STRING:
            return self.string()
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ModelError(f"The GGUF header uses the unknown or unsupported value type {kind}.")
        return self.scalar(layout)

    def _array(self) -> list[Scalar]:
        kind = self.u32()
        count = self.u64()
        smallest = 8 if kind == _STRING else _SCALARS[kind].size if kind in _SCALARS else 0
        if smallest == 0:
            raise ModelError(f"The GGUF header holds an array of the unsupported value type {kind}.")
        if count > MAX_ARRAY_LENGTH or count * smallest > self.remaining:
            raise ModelError(f"The GGUF header declares an array of {count} entries, more than it can hold.")
        return [self._element(kind) for _ in range(count)]


class GgufFile:
    """Metadata and tensors of one GGUF file (versions 2 and 3, little-endian).

    Raises ``ModelError`` for anything that is not such a file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot open the GGUF file {path}: {error}.") from error
        self._size = len(self._map)
        cursor = _Cursor(self._map, self._size)
        if cursor.take(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file (bad magic).")
        version = cursor.u32()
        if version not in (2, 3):
            raise UnsupportedModelError(f"GGUF version {version} is not supported (2 and 3 are).")
        tensor_count, key_count = cursor.u64(), cursor.u64()
        if tensor_count > MAX_TENSORS or key_count > MAX_METADATA_KEYS:
            raise ModelError(f"The GGUF header declares {tensor_count} tensors and {key_count} keys.")
        self.metadata: dict[str, Value] = self._read_metadata(cursor, key_count)
        self.tensors: dict[str, GgufTensor] = self._read_tensors(cursor, tensor_count)

    @staticmethod
    def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = cursor.string()
            if key in metadata:
                raise ModelError(f"The GGUF metadata key {key!r} appears twice.")
            metadata[key] = cursor.value(cursor.u32())
        return metadata

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        entries: list[GgufTensor] = []
        for _ in range(count):
            name = cursor.string()
            rank = cursor.u32()
            if not 1 <= rank <= MAX_DIMS:
                raise ModelError(f"GGUF tensor {name!r} has {rank} dimensions.")
            shape = tuple(cursor.u64() for _ in range(rank))[::-1]
            kind = cursor.u32()
            entries.append(_describe(name, shape, kind, cursor.u64()))
        alignment = self.metadata.get("general.alignment", 32)
        if (
            type(alignment) is not int
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1) != 0
        ):
            raise ModelError(f"GGUF general.alignment = {alignment!r} is not a power of two within bounds.")
        base = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise ModelError(f"GGUF tensor {entry.name!r} appears twice.")
            start = base + entry.offset
            if entry.offset % alignment or start + entry.nbytes > self._size:
                raise ModelError(f"GGUF tensor {entry.name!r} lies outside the file or is misaligned.")
            tensors[entry.name] = GgufTensor(entry.name, entry.shape, entry.kind, start, entry.nbytes)
        return tensors

    def read(self, name: str, *, rows: slice | None = None) -> NDArray[np.float32]:
        """The tensor ``name``, dequantised: its row-major shape, float32, writable.

        ``rows`` takes a range of its first dimension only. Raises ``ModelError`` when there is no
        such tensor, and ``UnsupportedModelError`` for a block format that cannot be dequantised.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"The GGUF file has no tensor {name!r}.")
        raw = np.frombuffer(self._map, np.uint8, count=tensor.nbytes, offset=tensor.offset)
        lines = math.prod(tensor.shape[:-1])  # a block never crosses from one line to the next
        shape = tensor.shape
        blocks = raw.reshape(lines, -1)
        if rows is not None:
            start, stop, _ = rows.indices(shape[0])
            shape = (stop - start, *shape[1:])
            if len(tensor.shape) == 1:
                if shape != tensor.shape:
                    raise ValueError("a vector is read whole")
            else:
                each = lines // tensor.shape[0]
                blocks = blocks[start * each : stop * each]
        try:
            values = np.asarray(dequantize(blocks, tensor.kind))
        except NotImplementedError:
            raise UnsupportedModelError(
                f"GGUF tensor {name!r} has the block format {tensor.kind.name}, which is not supported."
            ) from None
        return np.array(values.reshape(shape), np.float32)


def _describe(name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        quantisation = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError):
        raise UnsupportedModelError(f"GGUF tensor {name!r} has the unknown block format {kind}.") from None
    if min(shape) < 1 or shape[-1] % block:
        raise ModelError(f"GGUF tensor {name!r} has the impossible shape {shape}.")
    return GgufTensor(name, shape, quantisation, offset, math.prod(shape) // block * block_bytes)
