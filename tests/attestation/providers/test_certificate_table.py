"""The host's certificate table, with a hostile host."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import MalformedEvidenceError
from attestation.providers.certificate_table import (
    GUIDS,
    MAX_ENTRIES,
    MAX_TABLE_SIZE,
    OfferedCertificates,
    parse_certificate_table,
)

DER = b"\x30\x03\x02\x01\x01"
PEM = b"-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----\n"
OTHER = uuid.UUID("11111111-2222-3333-4444-555555555555")
Table = Callable[[dict[uuid.UUID, bytes]], bytes]


def entry(offset: int, length: int, guid: uuid.UUID = GUIDS["vcek"]) -> bytes:
    return struct.pack("<16sII", guid.bytes_le, offset, length)


def test_every_kind_is_read_and_unknown_ones_are_skipped(table: Table) -> None:
    objects = {guid: DER + bytes([number]) for number, guid in enumerate(GUIDS.values())}
    offered = parse_certificate_table(table({OTHER: b"anything", **objects}) + bytes(100))
    for name, guid in GUIDS.items():
        assert getattr(offered, name) == objects[guid]


def test_pem_becomes_der(table: Table) -> None:
    assert parse_certificate_table(table({GUIDS["ask"]: PEM})).ask == DER


@pytest.mark.parametrize("data", [b"", bytes(24), bytes(16384)])
def test_a_host_may_offer_nothing(data: bytes) -> None:
    assert parse_certificate_table(data) == OfferedCertificates()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "too large": (b"\x01" * (MAX_TABLE_SIZE + 1), "bytes"),
    "no terminator": (entry(24, 5), "zeros"),
    "cut off in an entry": (entry(48, 5)[:20], "zeros"),
    "endless entries": (entry(2000, 1, OTHER) * (MAX_ENTRIES + 1) + bytes(4000), "more than"),
    "no GUID": (struct.pack("<16sII", bytes(16), 48, 5) + bytes(24) + DER, "GUID"),
    "into the table": (entry(0, 24) + bytes(24) + DER, "overlaps"),
    "into the terminator": (entry(47, 5) + bytes(24) + DER, "overlaps"),
    "beyond the end": (entry(48, 6) + bytes(24) + DER, "beyond"),
    "offset beyond the end": (entry(4096, 1) + bytes(24) + DER, "beyond"),
    "sum wraps at 32 bits": (entry(0xFFFFFFFF, 0x00000031) + bytes(24) + DER, "beyond"),
    "largest length": (entry(48, 0xFFFFFFFF) + bytes(24) + DER, "beyond"),
    "empty object": (entry(48, 0) + bytes(24) + DER, "empty"),
    "overlapping objects": (
        entry(72, 5) + entry(74, 5, GUIDS["ask"]) + bytes(24) + DER + bytes(8), "overlaps",
    ),
    "twice": (entry(72, 5) + entry(77, 5) + bytes(24) + DER + DER, "two entries"),
    "not a certificate": (entry(48, 5) + bytes(24) + b"hello", "neither DER nor PEM"),
    "a chain in one entry": (entry(48, 2 * len(PEM)) + bytes(24) + PEM + PEM, "not one object"),
    "certificate too large": (entry(48, 16385) + bytes(24) + b"\x30" * 16385, "16385 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_refused(name: str) -> None:
    data, words = HOSTILE[name]
    with pytest.raises(MalformedEvidenceError, match=words):
        parse_certificate_table(data)


@given(data=st.binary(max_size=400))
def test_noise_never_crashes(data: bytes) -> None:
    try:
        offered = parse_certificate_table(data)
    except MalformedEvidenceError:
        return
    assert all(getattr(offered, name) is None or getattr(offered, name) for name in GUIDS)


@given(
    entries=st.lists(
        st.tuples(st.sampled_from([*GUIDS.values(), OTHER]), st.integers(0, 300), st.integers(0, 300)),
        max_size=6,
    ),
    body=st.binary(max_size=200),
)
def test_what_is_read_lies_inside_the_data(entries: list[Any], body: bytes) -> None:
    data = b"".join(entry(offset, length, guid) for guid, offset, length in entries) + bytes(24) + body
    try:
        offered = parse_certificate_table(data)
    except MalformedEvidenceError:
        return
    for guid, offset, length in entries:
        if guid == OTHER or data[offset : offset + 1] != b"\x30":
            continue
        name = next(name for name, known in GUIDS.items() if known == guid)
        assert getattr(offered, name) == data[offset : offset + length]
