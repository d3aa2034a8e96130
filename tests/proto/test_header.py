"""The offload header: what is packed comes back, what is malformed is refused by one typed error."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gelo.header import (
    HEADER_BYTES,
    MAX_DIMENSION,
    MAX_ROWS,
    HeaderError,
    OffloadHeader,
    OperandKind,
    Status,
)

GOOD = OffloadHeader(
    sequence=7, weight_id=3, rows=5, d_in=576, d_out=960, operand_offset=4096, result_offset=1 << 20,
    compute_ns=123_456_789, status=Status.ENGINE_FAILED, kind=OperandKind.WORDS,
)  # fmt: skip
# The layout written out independently: offset, format, name.
FIELDS = {
    "magic": (0, "<I"),
    "version": (4, "<H"),
    "status": (6, "<H"),
    "sequence": (8, "<Q"),
    "weight_id": (16, "<I"),
    "rows": (20, "<I"),
    "d_in": (24, "<I"),
    "d_out": (28, "<I"),
    "operand_offset": (32, "<Q"),
    "result_offset": (40, "<Q"),
    "compute_ns": (48, "<Q"),
    "kind": (56, "<Q"),
}


def patched(field: str, value: int) -> bytes:
    data = bytearray(GOOD.pack())
    offset, layout = FIELDS[field]
    struct.pack_into(layout, data, offset, value)
    return bytes(data)


def test_bytes_on_the_wire_are_as_specified() -> None:
    data = GOOD.pack()
    assert len(data) == HEADER_BYTES == 64
    assert data[:4] == b"GELO"
    values = {name: struct.unpack_from(layout, data, offset)[0] for name, (offset, layout) in FIELDS.items()}
    assert values == {
        "magic": 0x4F4C4547, "version": 1, "status": 2, "sequence": 7, "weight_id": 3, "rows": 5, "d_in": 576,
        "d_out": 960, "operand_offset": 4096, "result_offset": 1 << 20, "compute_ns": 123_456_789,
        "kind": 1,
    }  # fmt: skip


def test_sizes() -> None:
    assert GOOD.operand_bytes == 5 * 576 * 4
    halves = GOOD._replace(kind=OperandKind.HALF)
    assert halves.operand_bytes == 5 * 576 * 2
    assert GOOD.result_bytes == halves.result_bytes == 5 * 960 * 4


u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    OffloadHeader,
    sequence=u64,
    weight_id=u32,
    rows=st.integers(1, MAX_ROWS),
    d_in=st.integers(1, MAX_DIMENSION),
    d_out=st.integers(1, MAX_DIMENSION),
    operand_offset=u64,
    result_offset=u64,
    compute_ns=u64,
    status=st.sampled_from(Status),
    kind=st.sampled_from(OperandKind),
)


@settings(max_examples=200, deadline=None)
@given(headers)
def test_round_trip(header: OffloadHeader) -> None:
    assert OffloadHeader.unpack(header.pack()) == header


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128])
def test_wrong_length(length: int) -> None:
    with pytest.raises(HeaderError, match="64 bytes"):
        OffloadHeader.unpack((GOOD.pack() * 2)[:length])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("magic", 0),
        ("magic", 0x47454C4F),
        ("version", 0),
        ("version", 2),
        ("status", 3),
        ("status", 0xFFFF),
        ("rows", 0),
        ("rows", MAX_ROWS + 1),
        ("rows", 2**32 - 1),
        ("d_in", 0),
        ("d_in", MAX_DIMENSION + 1),
        ("d_in", 2**32 - 1),
        ("d_out", 0),
        ("d_out", MAX_DIMENSION + 1),
        ("d_out", 2**32 - 1),
        ("kind", 2),
        ("kind", 1 << 8),
        ("kind", 1 << 32),
        ("kind", 1 << 63),
        ("kind", 2**64 - 1),
    ],
)
def test_malformed_field(field: str, value: int) -> None:
    with pytest.raises(HeaderError):
        OffloadHeader.unpack(patched(field, value))


@pytest.mark.parametrize(("field", "value"), [("rows", MAX_ROWS), ("d_in", MAX_DIMENSION), ("d_out", 1)])
def test_bounds_are_inclusive(field: str, value: int) -> None:
    assert OffloadHeader.unpack(patched(field, value)) == GOOD._replace(**{field: value})


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=130))
def test_arbitrary_bytes_give_only_header_errors(data: bytes) -> None:
    with contextlib.suppress(HeaderError):
        OffloadHeader.unpack(data)


near = st.one_of(st.integers(0, 2), st.sampled_from([MAX_ROWS, MAX_ROWS + 1, MAX_DIMENSION]), u32)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), u64, near, near, near, st.integers(0, 3) | u64)
def test_accepted_bytes_are_canonical(
    status: int, number: int, rows: int, d_in: int, d_out: int, kind: int
) -> None:
    """What passes has every field in bounds and packs to the same bytes: one reading per header."""
    sizes = (rows, d_in, d_out)
    data = struct.pack("<IHHQIIIIQQQQ", 0x4F4C4547, 1, status, number, 1, *sizes, 0, 0, number, kind)
    valid = status <= 2 and kind <= 1 and 0 < rows <= MAX_ROWS and min(d_in, d_out) > 0
    if valid and max(d_in, d_out) <= MAX_DIMENSION:
        assert OffloadHeader.unpack(data).pack() == data
    else:
        with pytest.raises(HeaderError):
            OffloadHeader.unpack(data)
