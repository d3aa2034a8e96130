"""ATTESTATION_REPORT of SEV-SNP: bytes to fields, and nothing else.

Source: AMD publication 56860, "SEV Secure Nested Paging Firmware ABI Specification", table
ATTESTATION_REPORT (structure versions 2 to 5) and table TCB_VERSION. Parsing checks the format
(length, version, reserved gaps) and never whether a value is acceptable.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from attestation.errors import MalformedEvidenceError

REPORT_SIZE = 0x4A0
"""1184 bytes, in every version."""

SIGNED_SIZE = 0x2A0
"""The signature covers bytes 0 to 0x29F."""

VERSIONS = (2, 3, 4, 5)

_COMPONENT_SIZE = 72  # R and S, little-endian, zero-extended
_P384_SIZE = 48


class Product(Enum):
    """EPYC generation, which fixes the root certificate and the layout of TCB_VERSION."""

    MILAN = "Milan"
    GENOA = "Genoa"
    TURIN = "Turin"


class SigningKey(IntEnum):
    """KEY_INFO bits 4:2. Other values are reserved."""

    VCEK = 0
    VLEK = 1
    NONE = 7


@dataclass(frozen=True, slots=True)
class Tcb:
    """TCB_VERSION: security patch levels, each 0 to 255. ``fmc`` exists from Turin on."""

    fmc: int | None
    bootloader: int
    tee: int
    snp: int
    microcode: int

    @classmethod
    def decode(cls, raw: bytes, product: Product) -> Tcb:
        """Decode 8 bytes in the layout of ``product``.

        Raises:
            MalformedEvidenceError: a reserved byte is not zero.
        """
        if product is Product.TURIN:
            reserved = raw[4:7]
            tcb = cls(raw[0], raw[1], raw[2], raw[3], raw[7])
        else:
            reserved = raw[2:6]
            tcb = cls(None, raw[0], raw[1], raw[6], raw[7])
        if any(reserved):
            raise MalformedEvidenceError(f"TCB_VERSION {raw.hex()} has reserved bytes that are not zero.")
        return tcb

    def encode(self, product: Product) -> bytes:
        """The 8 bytes that ``decode`` reads."""
        if product is Product.TURIN:
            head = bytes([self.fmc or 0, self.bootloader, self.tee, self.snp, 0, 0, 0])
        else:
            head = bytes([self.bootloader, self.tee, 0, 0, 0, 0, self.snp])
        return head + bytes([self.microcode])

    def as_dict(self) -> dict[str, int]:
        """The components that exist, by name."""
        parts = {"bootloader": self.bootloader, "tee": self.tee, "snp": self.snp, "microcode": self.microcode}
        return parts if self.fmc is None else {"fmc": self.fmc, **parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The fields of one report. Byte strings keep the order of the report.

    ``policy`` and ``platform_info`` are the raw 64-bit words. The four ``*_tcb`` are raw: their
    layout depends on the product, which a version 2 report does not name. ``raw`` holds all 1184
    bytes: signatures are checked over it and never over a re-serialisation.
    """

    version: int
    guest_svn: int
    policy: int
    family_id: bytes
    image_id: bytes
    vmpl: int
    signature_algorithm: int
    current_tcb: bytes
    platform_info: int
    author_key_enabled: bool
    chip_key_masked: bool
    signing_key: int
    report_data: bytes
    measurement: bytes
    host_data: bytes
    id_key_digest: bytes
    author_key_digest: bytes
    report_id: bytes
    report_id_ma: bytes
    reported_tcb: bytes
    cpuid: tuple[int, int, int] | None
    chip_id: bytes
    committed_tcb: bytes
    current_firmware: tuple[int, int, int]
    committed_firmware: tuple[int, int, int]
    launch_tcb: bytes
    launch_mitigations: int | None
    current_mitigations: int | None
    signature_r: int
    signature_s: int
    raw: bytes = field(repr=False)

    @property
    def signed_bytes(self) -> bytes:
        """Bytes 0 to 0x29F. The key for anything that must recognise a replay, as ECDSA is malleable."""
        return self.raw[:SIGNED_SIZE]

    @property
    def debug(self) -> bool:
        """POLICY bit 19: the hypervisor may read and write the guest's memory."""
        return bool(self.policy >> 19 & 1)

    @property
    def migration_agent(self) -> bool:
        """POLICY bit 18: a migration agent may be associated with the guest."""
        return bool(self.policy >> 18 & 1)

    @property
    def product(self) -> Product | None:
        """From the CPUID family and model of version 3 and later; None if absent or unknown."""
        if self.cpuid is None:
            return None
        family, model, _ = self.cpuid
        if family == 0x19 and model <= 0x0F:
            return Product.MILAN
        if family == 0x19 and (0x10 <= model <= 0x1F or 0xA0 <= model <= 0xAF):
            return Product.GENOA
        if family == 0x1A and model <= 0x11:
            return Product.TURIN
        return None


def parse_report(raw: bytes) -> Report:
    """Parse one ATTESTATION_REPORT of exactly 1184 bytes.

    Raises:
        MalformedEvidenceError: wrong length, unknown version, or a reserved byte is not zero.
    """
    if len(raw) != REPORT_SIZE:
        raise MalformedEvidenceError(f"An attestation report has {REPORT_SIZE} bytes, this has {len(raw)}.")
    version, guest_svn, policy = struct.unpack_from("<IIQ", raw, 0x00)
    if version not in VERSIONS:
        raise MalformedEvidenceError(f"Report version {version} is unknown (known: 2 to 5).")
    vmpl, signature_algorithm = struct.unpack_from("<II", raw, 0x30)
    platform_info, key_info = struct.unpack_from("<QI", raw, 0x40)
    if key_info >> 5:
        raise MalformedEvidenceError("Reserved bits of KEY_INFO (0x048) are not zero.")
    _check_reserved(raw, version)
    mitigations = struct.unpack_from("<QQ", raw, 0x1F8) if version >= 5 else (None, None)
    return Report(
        version=version,
        guest_svn=guest_svn,
        policy=policy,
        family_id=raw[0x10:0x20],
        image_id=raw[0x20:0x30],
        vmpl=vmpl,
        signature_algorithm=signature_algorithm,
        current_tcb=raw[0x38:0x40],
        platform_info=platform_info,
        author_key_enabled=bool(key_info & 1),
        chip_key_masked=bool(key_info >> 1 & 1),
        signing_key=key_info >> 2 & 7,
        report_data=raw[0x50:0x90],
        measurement=raw[0x90:0xC0],
        host_data=raw[0xC0:0xE0],
        id_key_digest=raw[0xE0:0x110],
        author_key_digest=raw[0x110:0x140],
        report_id=raw[0x140:0x160],
        report_id_ma=raw[0x160:0x180],
        reported_tcb=raw[0x180:0x188],
        cpuid=(raw[0x188], raw[0x189], raw[0x18A]) if version >= 3 else None,
        chip_id=raw[0x1A0:0x1E0],
        committed_tcb=raw[0x1E0:0x1E8],
        current_firmware=(raw[0x1EA], raw[0x1E9], raw[0x1E8]),
        committed_firmware=(raw[0x1EE], raw[0x1ED], raw[0x1EC]),
        launch_tcb=raw[0x1F0:0x1F8],
        launch_mitigations=mitigations[0],
        current_mitigations=mitigations[1],
        signature_r=int.from_bytes(raw[0x2A0 : 0x2A0 + _P384_SIZE], "little"),
        signature_s=int.from_bytes(raw[0x2E8 : 0x2E8 + _P384_SIZE], "little"),
        raw=raw,
    )


def _check_reserved(raw: bytes, version: int) -> None:
    gaps = (
        (0x4C, 0x50),
        (0x18B if version >= 3 else 0x188, 0x1A0),
        (0x1EB, 0x1EC),
        (0x1EF, 0x1F0),
        (0x208 if version >= 5 else 0x1F8, SIGNED_SIZE),
        (0x2A0 + _P384_SIZE, 0x2A0 + _COMPONENT_SIZE),
        (0x2E8 + _P384_SIZE, REPORT_SIZE),
    )
    for start, end in gaps:
        if any(raw[start:end]):
            raise MalformedEvidenceError(f"Reserved bytes {start:#05x} to {end - 1:#05x} are not zero.")
