"""A source of reports and collateral together: what a service hands out."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attestation.client import verify
from attestation.collateral import Collateral
from attestation.errors import CollateralError, EvidenceUnavailableError
from attestation.policy import UnsafeAllowSimulated
from attestation.providers.base import HardwareEvidence, SignedReport
from attestation.providers.certificate_table import GUIDS, OfferedCertificates
from attestation.providers.configfs_tsm import ConfigfsTsm
from attestation.providers.sev_guest import SevGuest
from attestation.ratls import ServerIdentity
from attestation.report import Report
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

DATA = bytes(range(64))


@dataclass
class FixedCollateral:
    """Collateral of the session's simulated chip; notes what it was asked with."""

    psp: SimulatedPsp
    offered: list[OfferedCertificates] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    error: CollateralError | None = None

    def collateral(self, report: Report, offered: OfferedCertificates) -> Collateral:
        self.reports.append(report)
        self.offered.append(offered)
        if self.error is not None:
            raise self.error
        evidence = self.psp.evidence(DATA)
        return Collateral(evidence.vcek, evidence.ask, evidence.ark, evidence.crl)  # type: ignore[arg-type]


@dataclass
class FixedSource:
    """Answers with the given bytes."""

    report: bytes
    table: bytes = b""

    def signed_report(self, report_data: bytes) -> SignedReport:
        return SignedReport(self.report, self.table)


@pytest.fixture
def collateral(psp: SimulatedPsp) -> FixedCollateral:
    return FixedCollateral(psp)


def test_evidence_is_report_and_collateral(psp: SimulatedPsp, collateral: FixedCollateral) -> None:
    report = psp.evidence(DATA).report
    evidence = HardwareEvidence(FixedSource(report), collateral).evidence(DATA)
    assert evidence.report == report
    assert (evidence.vcek, evidence.ask, evidence.ark) == (
        psp.evidence(DATA).vcek, psp.evidence(DATA).ask, psp.evidence(DATA).ark,
    )  # fmt: skip
    assert collateral.reports[0].raw == report
    assert collateral.offered == [OfferedCertificates()]


def test_the_hosts_table_reaches_the_collateral(
    psp: SimulatedPsp, collateral: FixedCollateral, table: Callable[[dict[uuid.UUID, bytes]], bytes]
) -> None:
    evidence = psp.evidence(DATA)
    offered = table({GUIDS["vcek"]: evidence.vcek, GUIDS["ask"]: evidence.ask})
    HardwareEvidence(FixedSource(evidence.report, offered), collateral).evidence(DATA)
    assert collateral.offered == [OfferedCertificates(vcek=evidence.vcek, ask=evidence.ask)]


def test_a_table_that_cannot_be_read_is_as_none(
    psp: SimulatedPsp, collateral: FixedCollateral, caplog: pytest.LogCaptureFixture
) -> None:
    source = FixedSource(psp.evidence(DATA).report, b"\xff" * 100)
    with caplog.at_level(logging.WARNING):
        HardwareEvidence(source, collateral).evidence(DATA)
    assert collateral.offered == [OfferedCertificates()]
    assert "certificates that the host offers" in caplog.text


def test_a_report_over_other_data_is_refused(psp: SimulatedPsp, collateral: FixedCollateral) -> None:
    source = FixedSource(psp.evidence(bytes(64)).report)
    with pytest.raises(EvidenceUnavailableError, match="other data"):
        HardwareEvidence(source, collateral).evidence(DATA)
    assert not collateral.reports


@pytest.mark.parametrize("raw", [b"", bytes(1183), bytes(1184), b"\xff" * 1184])
def test_a_report_that_cannot_be_read_is_refused(raw: bytes, collateral: FixedCollateral) -> None:
    with pytest.raises(EvidenceUnavailableError, match="cannot be read"):
        HardwareEvidence(FixedSource(raw), collateral).evidence(DATA)


@pytest.mark.parametrize("key_info", [0b00010, 0b11100, 0b11110])
def test_an_unsigned_report_is_refused(psp: SimulatedPsp, collateral: FixedCollateral, key_info: int) -> None:
    source = FixedSource(psp.altered(key_info=key_info).evidence(DATA).report)
    with pytest.raises(EvidenceUnavailableError, match="MASK_CHIP_KEY"):
        HardwareEvidence(source, collateral).evidence(DATA)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_report_data_has_64_bytes(psp: SimulatedPsp, collateral: FixedCollateral, length: int) -> None:
    with pytest.raises(EvidenceUnavailableError, match="64 bytes"):
        HardwareEvidence(FixedSource(b""), collateral).evidence(bytes(length))


def test_without_collateral_there_is_no_evidence(psp: SimulatedPsp, collateral: FixedCollateral) -> None:
    collateral.error = CollateralError("none")
    with pytest.raises(CollateralError):
        HardwareEvidence(FixedSource(psp.evidence(DATA).report), collateral).evidence(DATA)


@pytest.mark.parametrize("kind", ["configfs", "sev-guest"])
def test_a_service_on_each_source_is_accepted_by_a_client(
    kind: str,
    root: Path,
    tmp_path: Path,
    configfs: Any,
    driver: Any,
    collateral: FixedCollateral,
    statement: Callable[..., Statement],
    policy: UnsafeAllowSimulated,
    serve: Any,
) -> None:
    (tmp_path / "sev-guest").touch()
    source = (
        ConfigfsTsm(root, configfs=configfs)
        if kind == "configfs"
        else SevGuest(tmp_path / "sev-guest", ioctl=driver)
    )
    identity = ServerIdentity(HardwareEvidence(source, collateral), statement())
    with serve(identity) as running:
        verdict = verify(running.url, policy)
    assert verdict.fresh_evidence
    assert len(collateral.reports) == 2
