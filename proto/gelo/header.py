"""The 64-byte header of an offload: the same bytes inline over gRPC and in a slab."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER_BYTES = 64
_MAGIC = 0x4F4C4547  # "GELO"
_VERSION = 1
# magic, version, status, sequence, weight_id, rows, d_in, d_out, operand_offset,
# result_offset, compute_ns, kind
_LAYOUT = struct.Struct("<IHHQIIIIQQQQ")
# The first eight bytes of a header of status OK, as a little-endian integer.
PREAMBLE = _VERSION << 32 | _MAGIC
assert _LAYOUT.size == HEADER_BYTES  # noqa: S101 - a fact about this module, checked at import

MAX_DIMENSION = 1 << 24
MAX_ROWS = 1 << 20


class Status(IntEnum):
    """Outcome of an offload. A request carries ``OK``."""

    OK = 0
    BAD_REQUEST = 1
    ENGINE_FAILED = 2


class OperandKind(IntEnum):
    """What is multiplied: the element types of operand and result."""

    HALF = 0  # float16 operand, float32 result
    WORDS = 1  # uint32 operand and result, modulo 2^32

    @property
    def item_bytes(self) -> int:
        """Size of an operand's element; a result's has 4 bytes."""
        return 2 if self == OperandKind.HALF else 4


class HeaderError(ValueError):
    """Bytes that are not a valid header."""


class OffloadHeader(NamedTuple):
    """One matrix product: result ``(rows, d_out)`` = operand ``(rows, d_in)`` · weightᵀ.

    ``kind`` says in which arithmetic. Offsets are bytes from the start of the slab and 0 inline.
    ``compute_ns`` is filled in by the worker: time in its engine, for profiles only (untrusted).
    """

    sequence: int
    weight_id: int
    rows: int
    d_in: int
    d_out: int
    operand_offset: int = 0
    result_offset: int = 0
    compute_ns: int = 0
    status: Status = Status.OK
    kind: OperandKind = OperandKind.HALF

    @property
    def operand_bytes(self) -> int:
        """Size of the operand."""
        return self.rows * self.d_in * self.kind.item_bytes

    @property
    def result_bytes(self) -> int:
        """Size of the result."""
        return self.rows * self.d_out * 4

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _LAYOUT.pack(
            _MAGIC, _VERSION, self.status, self.sequence, self.weight_id, self.rows, self.d_in,
            self.d_out, self.operand_offset, self.result_offset, self.compute_ns, self.kind,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> OffloadHeader:
        """Parse 64 bytes from the other side.

        Raises:
            HeaderError: wrong length, magic, version, status or kind, or a size out of bounds.
        """
        if len(data) != HEADER_BYTES:
            raise HeaderError(f"a header has {HEADER_BYTES} bytes, got {len(data)}")
        magic, version, status, sequence, weight_id, rows, d_in, d_out, operand, result, ns, kind = (
            _LAYOUT.unpack(data)
        )
        if magic != _MAGIC or version != _VERSION:
            raise HeaderError("not a version 1 offload header")
        try:
            known, known_kind = Status(status), OperandKind(kind)
        except ValueError:
            raise HeaderError(f"unknown status {status} or kind {kind}") from None
        if not (0 < rows <= MAX_ROWS and 0 < d_in <= MAX_DIMENSION and 0 < d_out <= MAX_DIMENSION):
            raise HeaderError("rows, d_in or d_out out of bounds")
        return cls(
            sequence=sequence, weight_id=weight_id, rows=rows, d_in=d_in, d_out=d_out,
            operand_offset=operand, result_offset=result, compute_ns=ns, status=known,
            kind=known_kind,
        )  # fmt: skip
