"""Is the evidence genuine? Signatures, chain, validity, and certificate against report.

Says nothing on whether a genuine report is acceptable: that is ``policy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384

from attestation.certificates import (
    Certificate,
    TrustRoots,
    VekInfo,
    check_issued_by,
    check_validity,
    load_certificate,
    vek_info,
    vek_public_key,
)
from attestation.errors import NotGenuineError, SimulatedEvidenceRefusedError
from attestation.evidence import Evidence
from attestation.report import Product, Report, SigningKey, Tcb, parse_report

_ECDSA_P384_SHA384 = 1  # 56860, table "Signature algorithms"
_P384_ORDER = (
    0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
)
_COMMON_NAMES: dict[int, str] = {SigningKey.VCEK: "SEV-VCEK", SigningKey.VLEK: "SEV-VLEK"}


@dataclass(frozen=True, slots=True)
class GenuineReport:
    """A report whose bytes were signed by a key that chains to a trusted root.

    ``simulated`` is True if that root is a simulated PSP's: then "genuine" means only
    self-consistent. ``root_sha256`` is the fingerprint of the ARK certificate, in hex.
    """

    report: Report
    product: Product
    reported_tcb: Tcb
    root_sha256: str
    simulated: bool


def verify_evidence(evidence: Evidence, *, roots: TrustRoots, at: datetime) -> GenuineReport:
    """Verify a report and its chain at the time ``at`` (timezone-aware).

    Raises:
        MalformedEvidenceError: something cannot be parsed.
        SimulatedEvidenceRefusedError: the chain is a simulated PSP's and ``roots`` forbids those.
        NotGenuineError: a signature, root, validity period, patch level or chip id does not hold.
    """
    report = parse_report(evidence.report)
    vek = load_certificate(evidence.vcek, "VEK")
    ask = load_certificate(evidence.ask, "ASK")
    ark = load_certificate(evidence.ark, "ARK")
    simulated = any(certificate.simulated for certificate in (vek, ask, ark))
    if simulated and not roots.unsafe_allow_simulated:
        raise SimulatedEvidenceRefusedError("The evidence comes from a simulated PSP, not from AMD hardware.")
    info = vek_info(vek)
    if not simulated:
        _check_root(ark, roots, info.product)
    for certificate in (ark, ask, vek):
        check_validity(certificate, at)
    check_issued_by(ark, ark)
    check_issued_by(ask, ark)
    check_issued_by(vek, ask)
    tcb = _check_endorsement(report, vek, info)
    _check_signature(report, vek)
    return GenuineReport(report, info.product, tcb, ark.sha256, simulated)


def _check_root(ark: Certificate, roots: TrustRoots, product: Product) -> None:
    pinned = roots.pins.get(ark.sha256)
    if pinned is None:
        raise NotGenuineError(f"The root certificate {ark.sha256} is not a trusted ARK.")
    if pinned is not product:
        raise NotGenuineError(f"The root is {pinned.value}'s, the endorsement certificate {product.value}'s.")


def _check_endorsement(report: Report, vek: Certificate, info: VekInfo) -> Tcb:
    """The certificate must be about this report's key kind, product, patch levels and chip."""
    if vek.common_name != _COMMON_NAMES.get(report.signing_key):
        raise NotGenuineError("The report names another kind of signing key than the certificate has.")
    if report.version >= 3 and report.product is not info.product:
        raise NotGenuineError(
            f"The report's CPUID is not that of the certificate's product, {info.product.value}."
        )
    tcb = Tcb.decode(report.reported_tcb, info.product)
    if tcb != info.tcb:
        raise NotGenuineError(
            f"REPORTED_TCB is {tcb.as_dict()}, the certificate is for {info.tcb.as_dict()}."
        )
    if report.signing_key == SigningKey.VLEK:
        if info.hardware_id is not None:
            raise NotGenuineError("A VLEK certificate must not name a chip.")
        return tcb
    size = 8 if info.product is Product.TURIN else 64
    if info.hardware_id is None or len(info.hardware_id) != size:
        raise NotGenuineError(f"The hardware id in the certificate does not have {size} bytes.")
    if info.hardware_id + bytes(64 - size) != report.chip_id:
        raise NotGenuineError("CHIP_ID is not the chip that the certificate is for.")
    return tcb


def _check_signature(report: Report, vek: Certificate) -> None:
    if report.signature_algorithm != _ECDSA_P384_SHA384:
        raise NotGenuineError(
            f"Signature algorithm {report.signature_algorithm} is not ECDSA P-384 with SHA-384."
        )
    r, s = report.signature_r, report.signature_s
    if not (0 < r < _P384_ORDER and 0 < s < _P384_ORDER):
        raise NotGenuineError("The signature is out of range: the report is not signed.")
    try:
        vek_public_key(vek).verify(encode_dss_signature(r, s), report.signed_bytes, ec.ECDSA(SHA384()))
    except InvalidSignature:
        raise NotGenuineError("The report's signature does not verify: its bytes were altered.") from None
