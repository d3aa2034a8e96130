"""ATTESTATION_REPORT of SEV-SNP: bytes to fields, and nothing else.

Source: AMD publication 56860, "SEV Secure Nested Paging Firmware ABI Specification", table
ATTESTATION_REPORT (structure versions 2 to 5) and table TCB_VERSION. Parsing checks the format
(length, version, reserved gaps) and never whether a value is acceptable.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum, IntFlag

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


class PolicyBit(IntFlag):
    """Bits of POLICY (56860, table GUEST_POLICY) above the ABI version. Bits 63:26 are reserved."""

    SMT = 1 << 16
    RESERVED_ONE = 1 << 17
    MIGRATE_MA = 1 << 18
    DEBUG = 1 << 19
    SINGLE_SOCKET = 1 << 20
    CXL_ALLOW = 1 << 21
    MEM_AES_256_XTS = 1 << 22
    RAPL_DIS = 1 << 23
    CIPHERTEXT_HIDING_DRAM = 1 << 24
    PAGE_SWAP_DISABLE = 1 << 25


POLICY_KNOWN_BITS = 26


class PlatformBit(IntFlag):
    """Bits of PLATFORM_INFO (56860, table PLATFORM_INFO)."""

    SMT_EN = 1 << 0
    TSME_EN = 1 << 1
    ECC_EN = 1 << 2
    RAPL_DIS = 1 << 3
    CIPHERTEXT_HIDING_DRAM_EN = 1 << 4
    ALIAS_CHECK_COMPLETE = 1 << 5
    IOMMU_WRITE_SAFE = 1 << 6
    TIO_EN = 1 << 7


TCB_NAMES = ("reported", "committed", "launch", "current")
"""The four TCB_VERSION fields of a report."""


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
    def replay_key(self) -> str:
        """SHA-256 of the signed bytes, in hex: the same for every signature over the same report."""
        return hashlib.sha256(self.signed_bytes).hexdigest()

    def policy_bit(self, bit: PolicyBit) -> bool:
        """Whether ``bit`` of POLICY is set."""
        return bool(self.policy & bit)

    def platform_bit(self, bit: PlatformBit) -> bool:
        """Whether ``bit`` of PLATFORM_INFO is set."""
        return bool(self.platform_info & bit)

    @property
    def debug(self) -> bool:
        """The hypervisor may read and write the guest's memory."""
        return self.policy_bit(PolicyBit.DEBUG)

    @property
    def migration_agent(self) -> bool:
        """A migration agent may be associated with the guest."""
        return self.policy_bit(PolicyBit.MIGRATE_MA)

    @property
    def policy_abi(self) -> tuple[int, int]:
        """POLICY bits 15:0: the oldest firmware ABI (major, minor) the guest may run on."""
        return (self.policy >> 8 & 0xFF, self.policy & 0xFF)

    @property
    def raw_tcbs(self) -> dict[str, bytes]:
        """The four TCB_VERSION fields, 8 bytes each, by name."""
        return {name: getattr(self, f"{name}_tcb") for name in TCB_NAMES}

    def as_dict(self) -> dict[str, object]:
        """Every field as a JSON-able value: byte strings in hex, patch levels where the product is known."""
        values: dict[str, object] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "raw":
                values[item.name] = value.hex() if isinstance(value, bytes) else value
        product = self.product
        if product is not None:
            for name, raw in self.raw_tcbs.items():
                values[f"{name}_tcb"] = Tcb.decode(raw, product).as_dict()
        for name in ("current_firmware", "committed_firmware"):
            values[name] = ".".join(map(str, getattr(self, name)))
        for name in ("signature_r", "signature_s"):
            values[name] = f"{getattr(self, name):096x}"
        values["cpuid"] = None if self.cpuid is None else "{:02x}/{:02x}/{:x}".format(*self.cpuid)
        values["product"] = None if product is None else product.value
        values["policy"] = {
            "raw": f"{self.policy:#x}",
            "abi": "{}.{}".format(*self.policy_abi),
            **{bit.name.lower(): self.policy_bit(bit) for bit in PolicyBit if bit.name},
        }
        values["platform_info"] = {
            "raw": f"{self.platform_info:#x}",
            **{bit.name.lower(): self.platform_bit(bit) for bit in PlatformBit if bit.name},
        }
        return values

    @property
    def product(self) -> Product | None:
        """From the CPUID family and model of version 3 and later; None if absent or unknown."""
        return product_of(self.cpuid)


def parse_report(raw: bytes) -> Report:
    """Parse one ATTESTATION_REPORT of exactly 1184 bytes.

    Raises:
        MalformedEvidenceError: wrong length, unknown version, or a reserved byte is not zero.
    """
    raw = bytes(raw)
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
    cpuid = (raw[0x188], raw[0x189], raw[0x18A]) if version >= 3 else None
    product = product_of(cpuid)
    mitigations = struct.unpack_from("<QQ", raw, 0x1F8) if version >= 5 else (None, None)
    report = Report(
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
        cpuid=cpuid,
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
    if product is not None:
        for tcb in report.raw_tcbs.values():
            Tcb.decode(tcb, product)
    return report


def product_of(cpuid: tuple[int, int, int] | None) -> Product | None:
    """The product with this CPUID family and model; None if absent or unknown."""
    if cpuid is None:
        return None
    family, model, _ = cpuid
    if family == 0x19 and model <= 0x0F:
        return Product.MILAN
    if family == 0x19 and (0x10 <= model <= 0x1F or 0xA0 <= model <= 0xAF):
        return Product.GENOA
    if family == 0x1A and model <= 0x11:
        return Product.TURIN
    return None


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
