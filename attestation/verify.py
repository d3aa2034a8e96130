"""Is the evidence genuine? Signatures, chain, validity, revocation, and certificate against report.

Says nothing on whether a genuine report is acceptable: that is ``policy``.
"""

from __future__ import annotations

from collections.abc import Callable
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
from attestation.crl import Crl, RevocationStatus, check_crl, load_crl
from attestation.errors import NotGenuineError, SimulatedEvidenceRefusedError
from attestation.evidence import Evidence
from attestation.report import Product, Report, SigningKey, Tcb, parse_report

_ECDSA_P384_SHA384 = 1  # 56860, table "Signature algorithms"
_P384_ORDER = (
    0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
)
_COMMON_NAMES: dict[int, str] = {SigningKey.VCEK: "SEV-VCEK", SigningKey.VLEK: "SEV-VLEK"}
_ISSUER_PREFIXES: dict[int, str] = {SigningKey.VCEK: "SEV-", SigningKey.VLEK: "SEV-VLEK-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenuineReport:
    """A report whose bytes were signed by a key that chains to a trusted root.

    ``simulated`` is True if that root is a simulated PSP's: then "genuine" means only
    self-consistent. ``root_sha256`` is the fingerprint of the ARK certificate, in hex. ``csp_id``
    is the cloud provider that a VLEK was made for. ``revocation`` is None if no list came along.
    """

    report: Report
    product: Product
    reported_tcb: Tcb
    committed_tcb: Tcb
    launch_tcb: Tcb
    current_tcb: Tcb
    csp_id: str | None
    root_sha256: str
    revocation: RevocationStatus | None
    simulated: bool

    @property
    def tcbs(self) -> dict[str, Tcb]:
        """The four patch levels by name."""
        return {
            "reported": self.reported_tcb,
            "committed": self.committed_tcb,
            "launch": self.launch_tcb,
            "current": self.current_tcb,
        }


@dataclass(frozen=True, slots=True)
class _Parsed:
    """Evidence whose every part has a valid format."""

    report: Report
    vek: Certificate
    ask: Certificate
    ark: Certificate
    info: VekInfo
    crl: Crl | None
    tcbs: dict[str, Tcb]

    @property
    def simulated(self) -> bool:
        return any(certificate.simulated for certificate in (self.vek, self.ask, self.ark))


def verify_evidence(
    evidence: Evidence, *, roots: TrustRoots, at: datetime, crl: bytes | None = None
) -> GenuineReport:
    """Verify a report and its chain at the time ``at`` (timezone-aware).

    ``crl`` is the ARK's revocation list in DER, by default the one in the evidence; whether one is
    needed is for the policy to say.

    Raises:
        MalformedEvidenceError: something cannot be parsed.
        SimulatedEvidenceRefusedError: the chain is a simulated PSP's and ``roots`` forbids those.
        NotGenuineError: a signature, root, validity period, patch level or chip id does not hold, or a
            certificate is revoked.
    """
    parsed = _parse(evidence, crl)
    for check in _checks(parsed, roots, at):
        check()
    report = parsed.report
    revocation = (
        None if parsed.crl is None else check_crl(parsed.crl, parsed.ark, (parsed.ark, parsed.ask), at)
    )
    return GenuineReport(
        report=report,
        product=parsed.info.product,
        reported_tcb=parsed.tcbs["reported"],
        committed_tcb=parsed.tcbs["committed"],
        launch_tcb=parsed.tcbs["launch"],
        current_tcb=parsed.tcbs["current"],
        csp_id=parsed.info.csp_id,
        root_sha256=parsed.ark.sha256,
        revocation=revocation,
        simulated=parsed.simulated,
    )


def failed_checks(
    evidence: Evidence, *, roots: TrustRoots, at: datetime, crl: bytes | None = None
) -> list[NotGenuineError]:
    """Every reason for which ``verify_evidence`` would refuse the evidence, for an auditor.

    Raises:
        MalformedEvidenceError, SimulatedEvidenceRefusedError: as ``verify_evidence``.
    """
    parsed = _parse(evidence, crl)
    checks = _checks(parsed, roots, at)
    if parsed.crl is not None:
        revocation_list = parsed.crl
        checks.append(lambda: check_crl(revocation_list, parsed.ark, (parsed.ark, parsed.ask), at))
    failures = []
    for check in checks:
        try:
            check()
        except NotGenuineError as error:
            failures.append(error)
    return failures


def _parse(evidence: Evidence, crl: bytes | None) -> _Parsed:
    report = parse_report(evidence.report)
    vek = load_certificate(evidence.vcek, "VEK")
    ask = load_certificate(evidence.ask, "ASK")
    ark = load_certificate(evidence.ark, "ARK")
    info = vek_info(vek)
    tcbs = {name: Tcb.decode(raw, info.product) for name, raw in report.raw_tcbs.items()}
    crl = evidence.crl if crl is None else crl
    return _Parsed(report, vek, ask, ark, info, None if crl is None else load_crl(crl), tcbs)


def _checks(parsed: _Parsed, roots: TrustRoots, at: datetime) -> list[Callable[[], object]]:
    """What must hold, in the order in which failures are reported. Each raises NotGenuineError.

    Raises:
        SimulatedEvidenceRefusedError: the chain is a simulated PSP's and ``roots`` forbids those.
    """
    vek, ask, ark, product = parsed.vek, parsed.ask, parsed.ark, parsed.info.product
    if parsed.simulated and not roots.unsafe_allow_simulated:
        raise SimulatedEvidenceRefusedError("The evidence comes from a simulated PSP, not from AMD hardware.")
    checks: list[Callable[[], object]] = []
    if not parsed.simulated:
        checks += [
            lambda: _check_root(ark, roots, product),
            lambda: _check_issuer_kind(parsed),
        ]
    return [
        *checks,
        lambda: check_validity(ark, at),
        lambda: check_validity(ask, at),
        lambda: check_validity(vek, at),
        lambda: check_issued_by(ark, ark),
        lambda: check_issued_by(ask, ark),
        lambda: check_issued_by(vek, ask),
        lambda: _check_key_kind(parsed),
        lambda: _check_product(parsed),
        lambda: _check_patch_levels(parsed),
        lambda: _check_chip(parsed),
        lambda: _check_signature(parsed.report, vek),
    ]


def _check_root(ark: Certificate, roots: TrustRoots, product: Product) -> None:
    pinned = roots.pins.get(ark.sha256)
    if pinned is None:
        raise NotGenuineError(f"The root certificate {ark.sha256} is not a trusted ARK.")
    if pinned is not product:
        raise NotGenuineError(f"The root is {pinned.value}'s, the endorsement certificate {product.value}'s.")


def _check_issuer_kind(parsed: _Parsed) -> None:
    """57230: a VCEK is issued by the product's ASK, a VLEK by its ASVK."""
    prefix = _ISSUER_PREFIXES.get(parsed.report.signing_key, "")
    if parsed.ask.common_name != prefix + parsed.info.product.value:
        raise NotGenuineError(
            "The issuing certificate is not the one for this product and kind of signing key."
        )


def _check_key_kind(parsed: _Parsed) -> None:
    if parsed.vek.common_name != _COMMON_NAMES.get(parsed.report.signing_key):
        raise NotGenuineError("The report names another kind of signing key than the certificate has.")


def _check_product(parsed: _Parsed) -> None:
    if parsed.report.version >= 3 and parsed.report.product is not parsed.info.product:
        raise NotGenuineError(
            f"The report's CPUID is not that of the certificate's product, {parsed.info.product.value}."
        )


def _check_patch_levels(parsed: _Parsed) -> None:
    reported, certified = parsed.tcbs["reported"], parsed.info.tcb
    if reported != certified:
        raise NotGenuineError(
            f"REPORTED_TCB is {reported.as_dict()}, the certificate is for {certified.as_dict()}."
        )


def _check_chip(parsed: _Parsed) -> None:
    hardware_id = parsed.info.hardware_id
    if parsed.report.signing_key == SigningKey.VLEK:
        if hardware_id is not None:
            raise NotGenuineError("A VLEK certificate must not name a chip.")
        if not parsed.info.csp_id:
            raise NotGenuineError("A VLEK certificate must name the cloud provider it was made for.")
        return
    size = 8 if parsed.info.product is Product.TURIN else 64
    if hardware_id is None or len(hardware_id) != size:
        raise NotGenuineError(f"The hardware id in the certificate does not have {size} bytes.")
    if hardware_id + bytes(64 - size) != parsed.report.chip_id:
        raise NotGenuineError("CHIP_ID is not the chip that the certificate is for.")


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
