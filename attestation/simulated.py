"""A simulated PSP: evidence in AMD's exact formats from keys that anybody can make.

For development and tests on machines without SEV-SNP. Every certificate carries the label
``SIMULATED - NOT AMD``, every report ``SIMULATED_MEASUREMENT``; clients refuse both unless their
policy is ``UnsafeAllowSimulated``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import struct
import tempfile
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from attestation.certificates import OID_AMD, PSS, SIMULATED_LABEL
from attestation.errors import EvidenceUnavailableError
from attestation.evidence import Evidence
from attestation.policy import SIMULATED_MEASUREMENT
from attestation.report import REPORT_SIZE, SIGNED_SIZE, Product, Tcb

logger = logging.getLogger(__name__)

_CACHE_FILE = "authority.pem"
_MAX_CACHE_SIZE = 64 * 1024
_CPUID = {Product.MILAN: (0x19, 0x01, 1), Product.GENOA: (0x19, 0x11, 1), Product.TURIN: (0x1A, 0x02, 1)}
_TCB = {
    Product.MILAN: Tcb(None, 4, 0, 25, 219),
    Product.GENOA: Tcb(None, 10, 0, 27, 86),
    Product.TURIN: Tcb(1, 1, 1, 4, 81),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGuest:
    """What the simulated reports say about the guest. The defaults are what a policy accepts."""

    measurement: bytes = SIMULATED_MEASUREMENT
    version: int = 3
    policy: int = 0x30000  # bit 17 is always one; bit 16 allows SMT
    vmpl: int = 0
    platform_info: int = 0x25
    key_info: int = 0
    host_data: bytes = bytes(32)
    firmware: tuple[int, int, int] = (1, 55, 40)
    report_id: bytes = field(default_factory=lambda: secrets.token_bytes(32))


@dataclass(frozen=True, slots=True)
class _Authority:
    """The simulated ARK and ASK. The ARK's key is gone once it has signed both certificates."""

    ark: x509.Certificate
    ask: x509.Certificate
    ask_key: rsa.RSAPrivateKey = field(repr=False)


class SimulatedPsp:
    """An ``EvidenceProvider`` whose reports are signed by a key made in memory.

    ARK and ASK are RSA-4096 keys, which take seconds to make, so they are made once and kept in
    ``cache_dir`` (created 0700, file 0600; by default ``$XDG_CACHE_HOME/gelo/simulated-psp``).
    They are test keys and protect nothing. The VCEK is new with every instance.

    Raises:
        EvidenceUnavailableError: the cache directory cannot be used.
    """

    def __init__(
        self,
        *,
        cache_dir: Path | None = None,
        product: Product = Product.GENOA,
        guest: SimulatedGuest | None = None,
    ) -> None:
        logger.warning("The PSP is SIMULATED: evidence from this process proves nothing.")
        self.product = product
        self.guest = SimulatedGuest() if guest is None else guest
        self.tcb = _TCB[product]
        self._chip_id = hashlib.shake_256(b"GELO simulated chip").digest(
            8 if product is Product.TURIN else 64
        )
        self._authority = _load_or_create(cache_dir or default_cache_dir())
        self._vcek_key = ec.generate_private_key(ec.SECP384R1())
        self._vcek = self._issue_vcek()

    def with_guest(self, guest: SimulatedGuest) -> SimulatedPsp:
        """The same simulated chip with another guest on it."""
        other = object.__new__(SimulatedPsp)
        other.__dict__.update(self.__dict__)
        other.guest = guest
        return other

    def altered(self, **changes: object) -> SimulatedPsp:
        """Like ``with_guest``, for the same guest with some fields changed."""
        return self.with_guest(replace(self.guest, **changes))  # type: ignore[arg-type]

    def evidence(self, report_data: bytes) -> Evidence:
        """Evidence whose REPORT_DATA is the given 64 bytes.

        Raises:
            EvidenceUnavailableError: ``report_data`` has another length.
        """
        if len(report_data) != 64:
            raise EvidenceUnavailableError(f"REPORT_DATA has 64 bytes, not {len(report_data)}.")
        return Evidence(
            report=self._report(report_data),
            vcek=self._vcek.public_bytes(Encoding.DER),
            ask=self._authority.ask.public_bytes(Encoding.DER),
            ark=self._authority.ark.public_bytes(Encoding.DER),
        )

    def _report(self, report_data: bytes) -> bytes:
        guest, tcb = self.guest, self.tcb.encode(self.product)
        raw = bytearray(REPORT_SIZE)
        struct.pack_into("<IIQ", raw, 0x00, guest.version, 0, guest.policy)
        struct.pack_into("<II", raw, 0x30, guest.vmpl, 1)
        struct.pack_into("<QI", raw, 0x40, guest.platform_info, guest.key_info)
        firmware = bytes(reversed(guest.firmware))
        for offset, value in (
            (0x038, tcb),
            (0x050, report_data),
            (0x090, guest.measurement),
            (0x0C0, guest.host_data),
            (0x140, guest.report_id),
            (0x160, b"\xff" * 32),  # REPORT_ID_MA: no migration agent
            (0x180, tcb),
            (0x188, bytes(_CPUID[self.product]) if guest.version >= 3 else b""),
            (0x1A0, self._chip_id),
            (0x1E0, tcb),
            (0x1E8, firmware),
            (0x1EC, firmware),
            (0x1F0, tcb),
        ):
            raw[offset : offset + len(value)] = value
        if guest.version >= 5:
            struct.pack_into("<QQ", raw, 0x1F8, 0x3F, 0x3F)
        signature = self._vcek_key.sign(bytes(raw[:SIGNED_SIZE]), ec.ECDSA(SHA384()))
        r, s = decode_dss_signature(signature)
        raw[0x2A0:0x2E8] = r.to_bytes(72, "little")
        raw[0x2E8:0x330] = s.to_bytes(72, "little")
        return bytes(raw)

    def _issue_vcek(self) -> x509.Certificate:
        product, tcb = self.product, self.tcb
        turin = product is Product.TURIN
        name = product.value + ("-B0" if product is Product.MILAN else "")
        extensions = [("1", _integer(1 if turin else 0)), ("2", b"\x16" + bytes([len(name)]) + name.encode())]
        extensions += [("3.9", _integer(tcb.fmc or 0))] if turin else [("3.4", _integer(0))]
        levels = {1: tcb.bootloader, 2: tcb.tee, 5: 0, 6: 0, 7: 0, 3: tcb.snp, 8: tcb.microcode}
        extensions += [(f"3.{part}", _integer(level)) for part, level in levels.items()]
        extensions.append(("4", self._chip_id))
        builder = _builder(
            "SEV-VCEK", self._authority.ask.subject, self._vcek_key.public_key(), serial=1, days=2557
        )
        for suffix, value in extensions:
            extension = x509.UnrecognizedExtension(x509.ObjectIdentifier(OID_AMD + suffix), value)
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._authority.ask_key, SHA384(), rsa_padding=PSS)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/gelo/simulated-psp``, below ``~/.cache`` if that variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gelo" / "simulated-psp"


def _load_or_create(directory: Path) -> _Authority:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat()
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            raise EvidenceUnavailableError(
                f"{directory} belongs to another user or is writable by others.",
                remedy="Remove it, or give another cache directory for the simulated PSP.",
            )
        cached = _load(directory / _CACHE_FILE)
        if cached is None:
            cached = _create_authority()
            _store(cached, directory)
    except OSError as error:
        raise EvidenceUnavailableError(
            f"The simulated PSP cannot use its cache directory {directory} ({error.strerror}).",
            remedy="Set XDG_CACHE_HOME to a directory that can be written.",
        ) from None
    return cached


def _load(path: Path) -> _Authority | None:
    """The cached authority; None if there is none, or if it is damaged or expired."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CACHE_SIZE)
    except FileNotFoundError:
        return None
    try:
        ark, ask = x509.load_pem_x509_certificates(data)
        key = load_pem_private_key(data, password=None)
    except ValueError:
        return None
    now = datetime.now(UTC)
    if not isinstance(key, rsa.RSAPrivateKey) or key.public_key() != ask.public_key():
        return None
    if not all(c.not_valid_before_utc <= now <= c.not_valid_after_utc for c in (ark, ask)):
        return None
    return _Authority(ark, ask, key)


def _store(authority: _Authority, directory: Path) -> None:
    key = authority.ask_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificates = [certificate.public_bytes(Encoding.PEM) for certificate in (authority.ark, authority.ask)]
    # A temporary file (made 0600) and a rename: two processes that start together each see a whole file.
    descriptor, name = tempfile.mkstemp(dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"".join([*certificates, key]))
        Path(name).replace(directory / _CACHE_FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _create_authority() -> _Authority:
    ark_key = rsa.generate_private_key(public_exponent=65537, key_size=4096)
    ask_key = rsa.generate_private_key(public_exponent=65537, key_size=4096)
    root = _builder("SIM-ARK", _name("SIM-ARK"), ark_key.public_key(), serial=0x10000, days=9125)
    issuing = _builder("SIM-SEV", _name("SIM-ARK"), ask_key.public_key(), serial=0x10001, days=9125)
    ark = root.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    ask = issuing.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _Authority(
        ark.sign(ark_key, SHA384(), rsa_padding=PSS), ask.sign(ark_key, SHA384(), rsa_padding=PSS), ask_key
    )


def _builder(
    subject: str,
    issuer: x509.Name,
    key: rsa.RSAPublicKey | ec.EllipticCurvePublicKey,
    *,
    serial: int,
    days: int,
) -> x509.CertificateBuilder:
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(days=7)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, SIMULATED_LABEL),
            x509.NameAttribute(NameOID.COUNTRY_NAME, "US"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _integer(value: int) -> bytes:
    """A DER INTEGER of 0 to 255."""
    content = bytes([value]) if value < 0x80 else bytes([0, value])
    return b"\x02" + bytes([len(content)]) + content
