"""Examining a stored report, for auditors: no connection, no statement, a clock that is given."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import IntEnum

from attestation.certificates import AMD_ROOTS, load_certificate
from attestation.errors import (
    AttestationError,
    MalformedEvidenceError,
    Mismatch,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.evidence import Evidence
from attestation.pem import CERTIFICATE, CRL, read_der
from attestation.pins import UNPINNED
from attestation.policy import (
    AnyPolicy,
    Policy,
    UnsafeAllowSimulated,
    standard_platform,
    validate_report,
)
from attestation.report import Product, parse_report
from attestation.rules import PlatformRules
from attestation.verify import GenuineReport, failed_checks, verify_evidence


class Outcome(IntEnum):
    """The result, which is also the exit code of ``gelo verify-report``."""

    ACCEPTABLE = 0
    NOT_GENUINE = 2
    REFUSED = 3
    UNREADABLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found. ``not_checked`` names expectations that nobody gave."""

    outcome: Outcome
    at: datetime
    report: dict[str, object] | None = None
    genuine: GenuineReport | None = None
    failures: tuple[AttestationError, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    warnings: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    certificates: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON-able values: every field of the report and every failed check."""
        genuine = self.genuine
        return {
            "outcome": self.outcome.name.lower().replace("_", "-"),
            "exit_code": int(self.outcome),
            "at": self.at.isoformat(),
            "genuine": genuine is not None,
            "acceptable": self.outcome is Outcome.ACCEPTABLE,
            "simulated": None if genuine is None else genuine.simulated,
            "product": None if genuine is None else genuine.product.value,
            "tcb": None if genuine is None else {n: tcb.as_dict() for n, tcb in genuine.tcbs.items()},
            "csp_id": None if genuine is None else genuine.csp_id,
            "revocation": None
            if genuine is None or genuine.revocation is None
            else genuine.revocation.as_dict(),
            "certificates_sha256": self.certificates,
            "failures": [
                {"code": failure.code, "message": failure.message, "remedy": failure.remedy}
                for failure in self.failures
            ],
            "mismatches": [mismatch.as_dict() for mismatch in self.mismatches],
            "not_checked": list(self.not_checked),
            "warnings": list(self.warnings),
            "report": self.report,
        }


def examine(
    report: bytes,
    *,
    vek: bytes,
    chain: bytes,
    crl: bytes | None,
    at: datetime,
    policy: AnyPolicy | None,
    report_data: bytes | None,
) -> Examination:
    """Judge a report of 1184 bytes with its certificates at the time ``at`` (timezone-aware).

    ``vek``, ``chain`` (ASK or ASVK, and ARK, in any order) and ``crl`` are PEM or DER. Without a
    ``policy``, the report is held against the ``standard`` profile for Genoa and Turin, and what only
    an auditor can know (measurement, revocation list, REPORT_DATA) is listed as not checked.
    """
    found = Examination(outcome=Outcome.UNREADABLE, at=at)
    try:
        found = replace(found, report=parse_report(report).as_dict())
        evidence = _evidence(report, vek, chain, crl)
        found = replace(found, certificates=_fingerprints(evidence))
        roots = AMD_ROOTS if policy is None else policy.roots
        failures = failed_checks(evidence, roots=roots, at=at)
        if failures:
            return replace(found, outcome=Outcome.NOT_GENUINE, failures=tuple(failures))
        genuine = verify_evidence(evidence, roots=roots, at=at)
    except MalformedEvidenceError as error:
        return replace(found, failures=(error,))
    except SimulatedEvidenceRefusedError as error:
        return replace(found, outcome=Outcome.NOT_GENUINE, failures=(error,))
    found = replace(found, genuine=genuine, not_checked=_not_checked(policy, genuine, report_data))
    try:
        warnings = validate_report(
            genuine,
            policy=_without_measurement(genuine) if policy is None else policy,
            expected_report_data=UNPINNED if report_data is None else report_data,
        )
    except PolicyRefusedError as error:
        return replace(found, outcome=Outcome.REFUSED, failures=(error,), mismatches=error.mismatches)
    return replace(found, outcome=Outcome.ACCEPTABLE, warnings=warnings)


def _evidence(report: bytes, vek: bytes, chain: bytes, crl: bytes | None) -> Evidence:
    """Sort out which certificate is which; whether they belong together is for verification to say."""
    veks = read_der(vek, CERTIFICATE, "VEK file")
    lists = [] if crl is None else read_der(crl, CRL, "revocation list")
    if len(veks) != 1 or len(lists) > 1:
        raise MalformedEvidenceError("The VEK file and the revocation list must hold one object each.")
    leaf = load_certificate(veks[0], "VEK").x509
    issuers = [load_certificate(der, "chain") for der in read_der(chain, CERTIFICATE, "chain")]
    roots = [c for c in issuers if c.x509.subject == c.x509.issuer]
    others = [c for c in issuers if c.x509.subject != c.x509.issuer]
    if not roots or not others:
        raise MalformedEvidenceError("The chain must hold the ASK (or ASVK) and the ARK.")
    ask = next((c for c in others if c.x509.subject == leaf.issuer), others[0])
    ark = next((c for c in roots if c.x509.subject == ask.x509.issuer), roots[0])
    return Evidence(report=report, vcek=veks[0], ask=ask.der, ark=ark.der, crl=lists[0] if lists else None)


def _fingerprints(evidence: Evidence) -> dict[str, str]:
    return {name: hashlib.sha256(getattr(evidence, name)).hexdigest() for name in ("vcek", "ask", "ark")}


def _without_measurement(genuine: GenuineReport) -> Policy:
    return Policy(
        measurements=frozenset({genuine.report.measurement}),
        products=frozenset({Product.GENOA, Product.TURIN}),
        model_identity=UNPINNED,
        service=UNPINNED,
        platform=replace(standard_platform(), revocation_required=False),
    )


def _not_checked(
    policy: AnyPolicy | None, genuine: GenuineReport, report_data: bytes | None
) -> tuple[str, ...]:
    rules = policy.policy if isinstance(policy, UnsafeAllowSimulated) else policy
    platform = None if rules is None else rules.platform
    missing = {
        "measurement": rules is None,
        "report_data": report_data is None,
        "revocation": genuine.revocation is None,
        "chip_id": not isinstance(platform, PlatformRules) or platform.chip_ids is UNPINNED,
        "statement (model, protection, service)": True,
    }
    return tuple(name for name, absent in missing.items() if absent)
