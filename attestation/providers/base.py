"""Evidence from hardware: a source of signed reports, and collateral that makes them verifiable."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field
from typing import Protocol

from attestation.collateral import Collateral
from attestation.errors import EvidenceUnavailableError, MalformedEvidenceError
from attestation.evidence import Evidence
from attestation.providers.certificate_table import OfferedCertificates, parse_certificate_table
from attestation.report import Report, SigningKey, parse_report

logger = logging.getLogger(__name__)

REPORT_DATA_SIZE = 64


@dataclass(frozen=True, slots=True)
class SignedReport:
    """1184 bytes from the firmware, and the host's certificate table (empty if it gave none)."""

    report: bytes = field(repr=False)
    certificate_table: bytes = field(repr=False)


class ReportSource(Protocol):
    """A way to the firmware of this machine."""

    def signed_report(self, report_data: bytes) -> SignedReport:
        """A new report over the given 64 bytes. May block for seconds while the platform is busy.

        Raises:
            EvidenceBusyError: the platform stayed busy.
            EvidenceUnavailableError: no report could be had.
        """
        ...


class CollateralSource(Protocol):
    """What completes a report: its certificates and their revocation list."""

    def collateral(self, report: Report, offered: OfferedCertificates) -> Collateral:
        """Verified collateral of the report's chip and patch levels.

        Raises:
            EvidenceUnavailableError: it could not be had completely, or the report does not verify.
        """
        ...


class HardwareEvidence:
    """An ``EvidenceProvider`` over a real SEV-SNP guest. Thread-safe if its parts are."""

    def __init__(self, source: ReportSource, collateral: CollateralSource) -> None:
        self._source = source
        self._collateral = collateral

    def evidence(self, report_data: bytes) -> Evidence:
        """See ``EvidenceProvider``. The certificates and the revocation list are always there.

        Raises:
            EvidenceUnavailableError: no report, no collateral, or a report that no client could accept.
        """
        if len(report_data) != REPORT_DATA_SIZE:
            raise EvidenceUnavailableError(
                f"REPORT_DATA has {REPORT_DATA_SIZE} bytes, not {len(report_data)}."
            )
        signed = self._source.signed_report(report_data)
        report = _parsed(signed.report)
        if not hmac.compare_digest(report.report_data, report_data):
            raise EvidenceUnavailableError(
                "The platform signed a report over other data than it was given.",
                remedy="Another process of this guest may be interfering with its requests.",
            )
        collateral = self._collateral.collateral(report, _offered(signed.certificate_table))
        return Evidence(
            report=signed.report,
            vcek=collateral.vek,
            ask=collateral.ask,
            ark=collateral.ark,
            crl=collateral.crl,
        )


def _parsed(raw: bytes) -> Report:
    try:
        report = parse_report(raw)
    except MalformedEvidenceError as error:
        raise EvidenceUnavailableError(
            f"The platform's report cannot be read. {error.message}",
            remedy="The firmware may be newer than this software.",
        ) from None
    if report.signing_key == SigningKey.NONE or report.chip_key_masked:
        raise EvidenceUnavailableError(
            "The host has its reports left unsigned (MASK_CHIP_KEY).",
            remedy="Only the owner of the host can change that, with SNP_CONFIG.",
        )
    return report


def _offered(table: bytes) -> OfferedCertificates:
    """What the host offers; nothing if its table cannot be read: all of it can be had from AMD."""
    try:
        return parse_certificate_table(table)
    except MalformedEvidenceError as error:
        logger.warning("Ignoring the certificates that the host offers: %s", error.message)
        return OfferedCertificates()
