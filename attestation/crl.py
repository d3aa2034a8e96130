"""AMD's certificate revocation lists: which ASK and ASVK are no longer good.

Sources: AMD publication 57230 (a list per product, issued and signed by the ARK) and RFC 5280
section 5. Endorsement certificates all have the serial number 0 and the ASK as their issuer, so a
list names issuing keys only; a chip's patch levels are judged by ``tcb_floors`` instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from cryptography import x509

from attestation.certificates import Certificate, check_authority, check_signed_by
from attestation.errors import MalformedEvidenceError, NotGenuineError

MAX_CRL_SIZE = 0xFFFF
"""AMD's lists have under 1 KB; a list of this size has a two-byte length, as the parser expects."""

MAX_REVOKED = 1024
"""A product has a handful of issuing keys."""


@dataclass(frozen=True, slots=True)
class Crl:
    """A parsed list together with the bytes that its issuer signed. Nothing is verified yet."""

    der: bytes = field(repr=False)
    x509: x509.CertificateRevocationList = field(repr=False)
    issued: datetime
    expires: datetime
    number: int | None
    revoked: frozenset[int]


@dataclass(frozen=True, slots=True)
class RevocationStatus:
    """A verified list that revokes nothing in the chain, and how long it may be used."""

    issued: datetime
    expires: datetime
    number: int | None
    sha256: str

    def as_dict(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "issued": self.issued.isoformat(),
            "expires": self.expires.isoformat(),
            "number": self.number,
            "sha256": self.sha256,
        }


def load_crl(der: bytes) -> Crl:
    """Parse one DER list.

    Raises:
        MalformedEvidenceError: too large, not a list that can be read completely, or without an end of
            validity.
    """
    if len(der) > MAX_CRL_SIZE:
        raise MalformedEvidenceError(f"The revocation list has {len(der)} bytes.")
    try:
        parsed = x509.load_der_x509_crl(der)
        entries = len(parsed)
        revoked = (
            frozenset(entry.serial_number for entry in parsed) if entries <= MAX_REVOKED else frozenset()
        )
        # These are decoded lazily: touch them here, where a failure means "malformed".
        issued, expires, extensions = parsed.last_update_utc, parsed.next_update_utc, parsed.extensions
        _ = (parsed.issuer, parsed.signature, parsed.tbs_certlist_bytes, parsed.signature_algorithm_oid)
        critical = [e.oid.dotted_string for e in extensions if e.critical]
        critical += [e.oid.dotted_string for entry in parsed for e in entry.extensions if e.critical]
        numbers = [e.value.crl_number for e in extensions if isinstance(e.value, x509.CRLNumber)]
    except Exception as error:  # the parser has many exceptions without a common base
        raise MalformedEvidenceError(
            f"The revocation list cannot be read ({type(error).__name__})."
        ) from None
    if entries > MAX_REVOKED:
        raise MalformedEvidenceError(f"The revocation list has {entries} entries.")
    if expires is None:
        raise MalformedEvidenceError("The revocation list does not say until when it is valid.")
    if (
        critical
    ):  # RFC 5280 section 5.2: such a list MUST NOT be used; delta and indirect lists are among them
        raise MalformedEvidenceError(f"The revocation list has an unknown critical extension, {critical[0]}.")
    return Crl(der, parsed, issued, expires, numbers[0] if numbers else None, revoked)


def check_crl(crl: Crl, ark: Certificate, chain: Iterable[Certificate], at: datetime) -> RevocationStatus:
    """Verify a list of the ARK at the time ``at`` and hold the certificates of ``chain`` against it.

    Raises:
        NotGenuineError: another issuer, a signature that does not verify, outside its validity, or a
            certificate in the chain was issued by the ARK and is revoked.
    """
    check_authority(ark, revocation_lists=True)
    if crl.x509.issuer != ark.x509.subject:
        raise NotGenuineError(f"The revocation list names another issuer than the {ark.name}.")
    check_signed_by(
        ark,
        what="revocation list",
        der=crl.der,
        signed=crl.x509.tbs_certlist_bytes,
        signature=crl.x509.signature,
        algorithm=crl.x509.signature_algorithm_oid.dotted_string,
    )
    if not crl.issued <= at <= crl.expires:
        raise NotGenuineError(
            f"The revocation list is valid {crl.issued:%Y-%m-%d %H:%M} to {crl.expires:%Y-%m-%d %H:%M} UTC, "
            f"not at {at:%Y-%m-%d %H:%M}.",
            remedy="Check this machine's clock; otherwise the service must fetch the current list from AMD.",
        )
    for certificate in chain:
        serial = certificate.x509.serial_number
        if certificate.x509.issuer == ark.x509.subject and serial in crl.revoked:
            raise NotGenuineError(f"AMD has revoked the {certificate.name} certificate {serial:#x}.")
    return RevocationStatus(crl.issued, crl.expires, crl.number, hashlib.sha256(crl.der).hexdigest())
