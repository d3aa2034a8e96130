"""The certificate table that a host hands to its guest together with a report.

Source: AMD publication 56421, "SEV-ES Guest-Hypervisor Communication Block Standardization",
section "SNP Extended Guest Request": entries of GUID (16 bytes, little-endian fields), offset and
length (32 bits each, little-endian) up to an entry of zeros; offsets count from the table's start.
The host writes it, so every number in it is hostile.
"""

from __future__ import annotations

import struct
import uuid
from dataclasses import dataclass, field

from attestation.certificates import MAX_CERTIFICATE_SIZE
from attestation.errors import MalformedEvidenceError
from attestation.evidence import MAX_CRL_ON_WIRE
from attestation.pem import CERTIFICATE, CRL, read_der

MAX_TABLE_SIZE = 32 * 1024
"""Linux hands over at most 16 KiB (SEV_FW_BLOB_MAX_SIZE)."""

MAX_ENTRIES = 32
"""The specification names five GUIDs; hosts may add their own."""

_ENTRY = struct.Struct("<16sII")
_PEM_OVERHEAD = 2

GUIDS = {
    "vcek": uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd"),
    "vlek": uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1"),
    "ask": uuid.UUID("4ab7b379-bbac-4fe4-a02f-05aef327c782"),
    "ark": uuid.UUID("c0b406a4-a803-4952-9743-3fb6014cd0ae"),
    "crl": uuid.UUID("92f81bc3-5811-4d3d-97ff-d19f88dc67ea"),
}
"""Names as in ``OfferedCertificates``; ``ask`` is the ASVK where the host has a VLEK."""

_NAMES = {guid.bytes_le: name for name, guid in GUIDS.items()}
_LIMITS = {
    name: _PEM_OVERHEAD * (MAX_CRL_ON_WIRE if name == "crl" else MAX_CERTIFICATE_SIZE) for name in GUIDS
}


@dataclass(frozen=True, slots=True)
class OfferedCertificates:
    """What the host offers, in DER, None where it offers nothing. Nothing is verified yet."""

    vcek: bytes | None = field(default=None, repr=False)
    vlek: bytes | None = field(default=None, repr=False)
    ask: bytes | None = field(default=None, repr=False)
    ark: bytes | None = field(default=None, repr=False)
    crl: bytes | None = field(default=None, repr=False)


def parse_certificate_table(data: bytes) -> OfferedCertificates:
    """The certificates in ``data``, which may be empty or all zeros: then the host offers none.

    Unknown GUIDs are skipped, once their bounds are checked.

    Raises:
        MalformedEvidenceError: too large, not terminated, an entry twice, an entry that reaches into
            the table, into another entry or beyond the data, or an object that is too large or
            neither DER nor PEM.
    """
    if len(data) > MAX_TABLE_SIZE:
        raise MalformedEvidenceError(f"The host's certificate table has {len(data)} bytes.")
    if not any(data):
        return OfferedCertificates()
    entries = _entries(data)
    _check_bounds(entries, len(data))
    found: dict[str, bytes] = {}
    for guid, offset, length in entries:
        name = _NAMES.get(guid)
        if name is None:
            continue
        if name in found:
            raise MalformedEvidenceError(f"The host's certificate table has two entries for the {name}.")
        found[name] = _object(name, data[offset : offset + length])
    return OfferedCertificates(**found)


def _entries(data: bytes) -> list[tuple[bytes, int, int]]:
    entries: list[tuple[bytes, int, int]] = []
    for index in range(MAX_ENTRIES + 1):
        start = index * _ENTRY.size
        if start + _ENTRY.size > len(data):
            raise MalformedEvidenceError("The host's certificate table does not end with an entry of zeros.")
        guid, offset, length = _ENTRY.unpack_from(data, start)
        if not any(guid):
            if offset or length:
                raise MalformedEvidenceError("An entry of the host's certificate table has no GUID.")
            return entries
        entries.append((guid, offset, length))
    raise MalformedEvidenceError(f"The host's certificate table has more than {MAX_ENTRIES} entries.")


def _check_bounds(entries: list[tuple[bytes, int, int]], size: int) -> None:
    end = (len(entries) + 1) * _ENTRY.size
    for _, offset, length in sorted(entries, key=lambda entry: entry[1]):
        if not length or offset < end or length > size - offset:
            raise MalformedEvidenceError(
                f"An entry of the host's certificate table (offset {offset}, length {length}) is empty, "
                "overlaps something or ends beyond the data."
            )
        end = offset + length


def _object(name: str, data: bytes) -> bytes:
    if len(data) > _LIMITS[name]:
        raise MalformedEvidenceError(f"The {name} in the host's certificate table has {len(data)} bytes.")
    objects = read_der(data, CRL if name == "crl" else CERTIFICATE, f"host's {name}")
    if len(objects) != 1:
        raise MalformedEvidenceError(f"The {name} in the host's certificate table is not one object.")
    return objects[0]
