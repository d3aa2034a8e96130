"""AMD's certificate chain: VCEK or VLEK, ASK or ASVK, ARK.

Sources: AMD publication 57230, "Versioned Chip Endorsement Key (VCEK) Certificate and KDS
Interface Specification" (certificate profile and extensions), RFC 5280, RFC 8017 (RSASSA-PSS).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.x509.oid import NameOID

from attestation.errors import MalformedEvidenceError, NotGenuineError
from attestation.report import Product, Tcb

MAX_CERTIFICATE_SIZE = 8192
"""AMD's certificates have 1.3 to 1.7 KB."""

SIMULATED_LABEL = "SIMULATED - NOT AMD"
"""Subject organizational unit of every certificate of the simulated PSP."""

PSS = padding.PSS(mgf=padding.MGF1(SHA384()), salt_length=48)

OID_AMD = "1.3.6.1.4.1.3704.1."

_OID_RSASSA_PSS = "1.2.840.113549.1.1.10"
_HEADER_SIZE = 4  # SEQUENCE with a two-byte length
_SIGNATURE_SIZE = 5 + 512  # BIT STRING with a two-byte length and no unused bits, RSA-4096 signature
_SERIAL_OFFSET = 13  # outer and inner SEQUENCE with two-byte lengths, then [0] { INTEGER 2 }


@dataclass(frozen=True, slots=True)
class TrustRoots:
    """Which ARKs are trusted: SHA-256 of the DER certificate, and the product each stands for.

    ``unsafe_allow_simulated`` also accepts any self-made root that carries the simulated label;
    it is set by ``policy.UnsafeAllowSimulated`` and by nothing else.
    """

    pins: Mapping[str, Product]
    unsafe_allow_simulated: bool = False


AMD_ROOTS = TrustRoots(
    MappingProxyType(
        {
            "69d063b45344d26a2e94e1f4210de49ef555308287d4c174445c95639a540bcd": Product.MILAN,
            "4c6598d19c18719c5dfd4a7d335f674e5bfe1d8f800cea2cf270c10d103db2f1": Product.GENOA,
            "1f084161a44bb6d93778a904877d4819cafa5d05ef4193b2ded9dd9c73dd3f6a": Product.TURIN,
        }
    )
)
"""AMD's root certificates, as published at kdsintf.amd.com/vcek/v1/<product>/cert_chain."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A parsed certificate together with the bytes that its issuer signed."""

    name: str
    der: bytes = field(repr=False)
    signed_bytes: bytes = field(repr=False)
    x509: x509.Certificate = field(repr=False)

    @property
    def sha256(self) -> str:
        """Fingerprint of the DER bytes, in hex."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def simulated(self) -> bool:
        """True if subject or issuer carries the simulated label."""
        names = (self.x509.subject, self.x509.issuer)
        units = [
            unit for name in names for unit in name.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        ]
        return any(unit.value == SIMULATED_LABEL for unit in units)

    @property
    def common_name(self) -> str:
        """The one common name of the subject; empty if there is none or several."""
        names = self.x509.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(names[0].value) if len(names) == 1 else ""


@dataclass(frozen=True, slots=True)
class VekInfo:
    """What AMD certifies about an endorsement key. ``hardware_id`` is absent from a VLEK."""

    product: Product
    tcb: Tcb
    hardware_id: bytes | None
    csp_id: str | None


def load_certificate(der: bytes, name: str, *, limit: int = MAX_CERTIFICATE_SIZE) -> Certificate:
    """Parse one DER certificate, called ``name`` in messages, of at most ``limit`` bytes.

    AMD numbers its endorsement certificates 0, which RFC 5280 forbids and newer X.509 parsers
    refuse. A copy with serial 1 is parsed instead; hash and signature are over the original.

    Raises:
        MalformedEvidenceError: too large, or not a certificate that can be read completely.
    """
    if len(der) > limit:
        raise MalformedEvidenceError(f"The {name} certificate has {len(der)} bytes.")
    readable = der
    zero_serial = der[_SERIAL_OFFSET : _SERIAL_OFFSET + 3] == b"\x02\x01\x00"
    if zero_serial:
        readable = der[: _SERIAL_OFFSET + 2] + b"\x01" + der[_SERIAL_OFFSET + 3 :]
    try:
        parsed = x509.load_der_x509_certificate(readable)
        signed = parsed.tbs_certificate_bytes
        if zero_serial:
            signed = signed[: _SERIAL_OFFSET - 2] + b"\x00" + signed[_SERIAL_OFFSET - 1 :]
        # These are decoded lazily: touch them here, where a failure means "malformed".
        _ = (parsed.public_key(), parsed.extensions, parsed.subject, parsed.issuer, parsed.version)
        _ = (parsed.not_valid_before_utc, parsed.not_valid_after_utc)
    except Exception as error:  # the parser has many exceptions without a common base
        raise MalformedEvidenceError(
            f"The {name} certificate cannot be read ({type(error).__name__})."
        ) from None
    return Certificate(name, der, signed, parsed)


def check_validity(certificate: Certificate, at: datetime) -> None:
    """Raises NotGenuineError unless the certificate is valid at ``at`` (timezone-aware)."""
    start, end = certificate.x509.not_valid_before_utc, certificate.x509.not_valid_after_utc
    if not start <= at <= end:
        raise NotGenuineError(
            f"The {certificate.name} certificate is valid {start:%Y-%m-%d %H:%M} to "
            f"{end:%Y-%m-%d %H:%M} UTC, not at {at:%Y-%m-%d %H:%M}.",
            remedy="Check this machine's clock; otherwise the service must renew its certificates.",
        )


def check_issued_by(child: Certificate, issuer: Certificate) -> None:
    """Raises NotGenuineError unless ``issuer`` is an RSA-4096 CA that signed ``child``.

    The signature is RSASSA-PSS with SHA-384, MGF1-SHA-384 and a salt of 48 bytes.
    """
    check_authority(issuer)
    _check_extensions(child)
    if child.x509.issuer != issuer.x509.subject:
        raise NotGenuineError(f"The {child.name} certificate names another issuer than the {issuer.name}.")
    check_signed_by(
        issuer,
        what=f"{child.name} certificate",
        der=child.der,
        signed=child.signed_bytes,
        signature=child.x509.signature,
        algorithm=child.x509.signature_algorithm_oid.dotted_string,
    )


def check_authority(issuer: Certificate, *, revocation_lists: bool = False) -> None:
    """Raises NotGenuineError unless ``issuer`` is a CA with an RSA-4096 key that may sign certificates.

    With ``revocation_lists``, it must also be allowed to sign those. RFC 5280 section 4.2.1.3: the
    key MUST be used for what KeyUsage asserts only, if that is there.
    """
    key = issuer.x509.public_key()
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != 4096:
        raise NotGenuineError(f"The {issuer.name} key is not RSA-4096.")
    extensions = issuer.x509.extensions
    try:
        authority = extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        authority = False
    try:
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        allowed = usage.key_cert_sign and (usage.crl_sign or not revocation_lists)
    except x509.ExtensionNotFound:
        allowed = True
    if not authority or not allowed:
        raise NotGenuineError(f"The {issuer.name} certificate is not a certificate authority's.")


def check_signed_by(
    issuer: Certificate, *, what: str, der: bytes, signed: bytes, signature: bytes, algorithm: str
) -> None:
    """Raises NotGenuineError unless ``issuer`` signed the part ``signed`` of the DER bytes ``der``."""
    key = issuer.x509.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise NotGenuineError(f"The {issuer.name} key is not RSA.")
    if algorithm != _OID_RSASSA_PSS:
        raise NotGenuineError(f"The {what} is not signed with RSASSA-PSS.")
    # RFC 5280 sections 4.1.1.2 and 5.1.1.2: the unsigned algorithm identifier MUST equal the signed one.
    identifier = der[_HEADER_SIZE + len(signed) : -_SIGNATURE_SIZE]
    if not identifier or identifier not in signed:
        raise NotGenuineError(f"The {what} names two different signature algorithms.")
    try:
        key.verify(signature, signed, PSS, SHA384())
    except InvalidSignature:
        raise NotGenuineError(f"The {issuer.name} did not sign the {what}.") from None


def _check_extensions(certificate: Certificate) -> None:
    """RFC 5280 section 4.2: a critical extension that is not understood MUST be refused."""
    understood = (x509.BasicConstraints, x509.KeyUsage)
    for extension in certificate.x509.extensions:
        if extension.critical and not isinstance(extension.value, understood):
            oid = extension.oid.dotted_string
            raise NotGenuineError(
                f"The {certificate.name} certificate has an unknown critical extension, {oid}."
            )


def vek_public_key(vek: Certificate) -> ec.EllipticCurvePublicKey:
    """The endorsement key, which must be on P-384.

    Raises:
        NotGenuineError: it is another kind of key.
    """
    key = vek.x509.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise NotGenuineError("The endorsement key is not on P-384.")
    return key


def vek_info(vek: Certificate) -> VekInfo:
    """Read the extensions 1.3.6.1.4.1.3704.1.* of a VCEK or VLEK certificate.

    Raises:
        MalformedEvidenceError: one is missing, badly encoded or of an unknown product.
    """
    name = _ia5(_extension(vek, "2"), "product name").split("-")[0]  # "Milan-B0" is Milan
    try:
        product = Product(name)
    except ValueError:
        raise MalformedEvidenceError("The endorsement certificate is for an unknown product.") from None
    level = {part: _integer(_extension(vek, f"3.{part}")) for part in (1, 2, 3, 8)}
    for part in (4, 5, 6, 7):  # patch levels of the bytes that TCB_VERSION reserves
        reserved = _optional_extension(vek, f"3.{part}")
        if reserved is not None and _integer(reserved):
            raise MalformedEvidenceError(
                f"The endorsement certificate has a patch level in reserved part {part}."
            )
    fmc = _integer(_extension(vek, "3.9")) if product is Product.TURIN else None
    csp = _optional_extension(vek, "5")
    return VekInfo(
        product=product,
        tcb=Tcb(fmc, level[1], level[2], level[3], level[8]),
        hardware_id=_optional_extension(vek, "4"),
        csp_id=None if csp is None else _ia5(csp, "CSP id"),
    )


def _optional_extension(vek: Certificate, suffix: str) -> bytes | None:
    try:
        value = vek.x509.extensions.get_extension_for_oid(x509.ObjectIdentifier(OID_AMD + suffix)).value
    except x509.ExtensionNotFound:
        return None
    if not isinstance(value, x509.UnrecognizedExtension):
        raise MalformedEvidenceError(f"Extension {OID_AMD}{suffix} is not raw bytes.")
    return value.value


def _extension(vek: Certificate, suffix: str) -> bytes:
    value = _optional_extension(vek, suffix)
    if value is None:
        raise MalformedEvidenceError(f"The endorsement certificate lacks extension {OID_AMD}{suffix}.")
    return value


def _integer(der: bytes) -> int:
    """A DER INTEGER between 0 and 255, which is what a patch level can be."""
    short = len(der) == 3 and der[:2] == b"\x02\x01" and der[2] < 0x80
    long = len(der) == 4 and der[:3] == b"\x02\x02\x00" and der[3] >= 0x80
    if not (short or long):
        raise MalformedEvidenceError(
            "A patch level in the endorsement certificate is not an INTEGER of one byte."
        )
    return der[-1]


def _ia5(der: bytes, what: str) -> str:
    """A DER IA5String of up to 127 printable characters."""
    text = der[2:]
    if len(der) < 2 or der[0] != 0x16 or der[1] != len(text) or len(text) > 127:
        raise MalformedEvidenceError(f"The {what} in the endorsement certificate is not an IA5String.")
    if any(not 0x20 <= character < 0x7F for character in text):
        raise MalformedEvidenceError(f"The {what} in the endorsement certificate is not printable.")
    return text.decode("ascii")
