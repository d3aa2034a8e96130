"""Every real report at its dated clock, and every crafted negative with the reason it must have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from attestation.offline import Examination, Outcome, examine
from attestation.report import Product, SigningKey

DATA = Path(__file__).parent / "data"
AUTUMN_2026 = datetime(2026, 10, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Vector:
    """A real report, its certificates, and what is known about it."""

    report: str
    vek: str
    product: Product
    version: int
    key: SigningKey = SigningKey.VCEK
    at: datetime = AUTUMN_2026
    refused_for: frozenset[str] = frozenset()

    @property
    def chain(self) -> bytes:
        return (DATA / f"{self.product.value.lower()}_trustee_ask_ark_asvk.pem").read_bytes()

    def examine(self, report: bytes | None = None, vek: str | None = None, **changes: object) -> Examination:
        values = {
            "vek": (DATA / (vek or self.vek)).read_bytes(),
            "chain": self.chain,
            "crl": None,
            "at": self.at,
            "policy": None,
            "report_data": None,
            **changes,
        }
        raw = (DATA / self.report).read_bytes() if report is None else report
        return examine(raw, **values)  # type: ignore[arg-type]


AZURE = frozenset({"family_id", "image_id", "guest_svn", "id_key_digest"})
GENOA = Vector("genoa_cdai_report_v5.bin", "genoa_cdai_vcek.der", Product.GENOA, 5)
TURIN = Vector(
    "turin_ms_report.bin", "turin_ms_vcek.pem", Product.TURIN, 5, refused_for=AZURE | {"host_data"}
)
MILAN = Vector(
    "milan_ms_report.bin",
    "milan_ms_vcek.pem",
    Product.MILAN,
    3,
    refused_for=AZURE | {"product", "reported_tcb.snp"},
)
VECTORS = [
    GENOA,
    TURIN,
    MILAN,
    Vector(
        "genoa_ms_report.bin",
        "genoa_ms_vcek.pem",
        Product.GENOA,
        3,
        refused_for=AZURE | {"reported_tcb.snp", "launch_tcb.microcode"},
    ),
    Vector(
        "milan_cdai_az_v3_report_inner.bin",
        "milan_cdai_az_v3_vcek.der",
        Product.MILAN,
        3,
        refused_for=AZURE | {"product"},
    ),
    Vector(
        "milan_gsg_report_v2.bin",
        "milan_gsg_vcek.der",
        Product.MILAN,
        2,
        refused_for=frozenset({"policy.debug", "version", "current_firmware", "product"}),
    ),
    Vector(
        "milan_trustee_report.bin",
        "milan_trustee_vcek.der",
        Product.MILAN,
        2,
        refused_for=frozenset({"version", "committed_tcb", "platform_info.alias_check_complete"}),
    ),
    Vector(
        "milan_trustee_vlek_report.bin",
        "milan_trustee_vlek.der",
        Product.MILAN,
        3,
        key=SigningKey.VLEK,
        at=datetime(2025, 6, 1, tzinfo=UTC),
        refused_for=frozenset({"vmpl", "signing_key", "chip_id", "committed_tcb"}),
    ),
    Vector(
        "milan_openanolis_vlek_report.bin",
        "milan_openanolis_vlek.der",
        Product.MILAN,
        2,
        key=SigningKey.VLEK,
        at=datetime(2024, 10, 1, tzinfo=UTC),
        refused_for=frozenset({"vmpl", "signing_key", "chip_id", "version"}),
    ),
]
REPORTS = [vector.report for vector in VECTORS]


@pytest.mark.parametrize("vector", VECTORS, ids=REPORTS)
def test_real_reports_are_genuine_at_their_time(vector: Vector) -> None:
    found = vector.examine()
    assert found.genuine is not None, found.failures
    report = found.genuine.report
    assert (found.genuine.product, report.version, report.signing_key) == (
        vector.product, vector.version, vector.key,
    )  # fmt: skip
    assert not found.genuine.simulated
    assert found.outcome is (Outcome.REFUSED if vector.refused_for else Outcome.ACCEPTABLE)
    assert vector.refused_for <= {mismatch.field for mismatch in found.mismatches}


@pytest.mark.parametrize("vector", VECTORS, ids=REPORTS)
@pytest.mark.parametrize("year", [2019, 2050])
def test_real_reports_are_not_genuine_at_another_time(vector: Vector, year: int) -> None:
    found = vector.examine(at=datetime(year, 1, 1, tzinfo=UTC))
    assert found.outcome is Outcome.NOT_GENUINE
    assert found.genuine is None
    assert all("is valid" in failure.message for failure in found.failures)


@pytest.mark.parametrize("vector", VECTORS, ids=REPORTS)
def test_the_result_is_json_with_every_field(vector: Vector) -> None:
    result = json.loads(json.dumps(vector.examine().as_dict()))
    assert result["genuine"] is True
    assert result["exit_code"] in (0, 3)
    assert set(result["report"]) >= {
        "version", "guest_svn", "policy", "family_id", "image_id", "vmpl", "signature_algorithm",
        "current_tcb", "platform_info", "author_key_enabled", "chip_key_masked", "signing_key",
        "report_data", "measurement", "host_data", "id_key_digest", "author_key_digest", "report_id",
        "report_id_ma", "reported_tcb", "cpuid", "chip_id", "committed_tcb", "current_firmware",
        "committed_firmware", "launch_tcb", "launch_mitigations", "current_mitigations", "signature_r",
        "signature_s",
    }  # fmt: skip
    for mismatch in result["mismatches"]:
        assert all(mismatch[part] for part in ("field", "expected", "got", "fault", "remedy"))


NEGATIVES = {
    "measurement_flip": (0x090, 0x01, Outcome.NOT_GENUINE, "signature does not verify"),
    "report_data_flip": (0x050, 0x01, Outcome.NOT_GENUINE, "signature does not verify"),
    "policy_debug_flip": (0x00A, 0x08, Outcome.NOT_GENUINE, "signature does not verify"),
    "vmpl1_flip": (0x030, 0x01, Outcome.NOT_GENUINE, "signature does not verify"),
    "tcb_ucode_flip": (0x187, 0x01, Outcome.NOT_GENUINE, "REPORTED_TCB is"),
    "chip_id_flip": (0x1A0, 0x01, Outcome.NOT_GENUINE, "CHIP_ID is not"),
    "reserved_flip": (0x210, 0x01, Outcome.UNREADABLE, "Reserved bytes"),
    "sig_tail": (0x340, 0x01, Outcome.UNREADABLE, "Reserved bytes"),
    "version_99": (0x000, None, Outcome.UNREADABLE, "version 99"),
    "truncated": (-1, None, Outcome.UNREADABLE, "1183"),
    "trailing": (1184, None, Outcome.UNREADABLE, "1185"),
    "zero_signature": (0x2A0, None, Outcome.NOT_GENUINE, "not signed"),
}


@pytest.mark.parametrize("name", NEGATIVES)
def test_crafted_negatives_are_refused_with_the_right_reason(name: str) -> None:
    _, _, outcome, reason = NEGATIVES[name]
    found = GENOA.examine(report=(DATA / f"genoa_neg_{name}.bin").read_bytes())
    assert found.outcome is outcome
    assert any(reason in failure.message for failure in found.failures)


def test_every_crafted_negative_is_tested() -> None:
    files = {path.stem.removeprefix("genoa_neg_") for path in DATA.glob("genoa_neg_*.bin")}
    assert files == set(NEGATIVES)


@pytest.mark.parametrize("vector", VECTORS, ids=REPORTS)
@pytest.mark.parametrize("name", NEGATIVES)
def test_the_same_edits_are_refused_on_every_real_report(vector: Vector, name: str) -> None:
    offset, bit, outcome, reason = NEGATIVES[name]
    raw = bytearray((DATA / vector.report).read_bytes())
    if bit is not None:
        raw[offset] ^= bit
    elif name == "version_99":
        raw[0] = 99
    elif name == "truncated":
        del raw[-1]
    elif name == "trailing":
        raw.append(0)
    else:
        raw[0x2A0:] = bytes(0x200)
    if vector.key is SigningKey.VLEK and name == "chip_id_flip":
        reason = "signature does not verify"  # a VLEK certificate names no chip
    found = vector.examine(report=bytes(raw))
    assert found.outcome is outcome
    assert any(reason in failure.message for failure in found.failures)
    assert json.dumps(found.as_dict())


@pytest.mark.parametrize("kind", ["legacy", "new"])
def test_certificates_that_amd_did_not_sign(kind: str) -> None:
    vector = next(v for v in VECTORS if v.report == "milan_trustee_report.bin")
    found = vector.examine(vek=f"milan_neg_trustee_vcek_invalid_{kind}.der")
    assert found.outcome is Outcome.NOT_GENUINE
    assert any("did not sign" in failure.message for failure in found.failures)


def test_a_report_without_a_published_certificate_parses_only() -> None:
    found = MILAN.examine(report=(DATA / "milan_openpcc_gce_report_v4.bin").read_bytes())
    assert found.outcome is Outcome.NOT_GENUINE
    assert found.report is not None
    assert found.report["version"] == 4
    assert any("CHIP_ID" in failure.message for failure in found.failures)


@pytest.mark.parametrize("other", VECTORS, ids=REPORTS)
@pytest.mark.parametrize("vector", [GENOA, TURIN, MILAN], ids=["genoa", "turin", "milan"])
def test_another_machines_certificate_is_refused(vector: Vector, other: Vector) -> None:
    if vector.vek == other.vek:
        return
    found = vector.examine(vek=other.vek)
    assert found.outcome in (Outcome.NOT_GENUINE, Outcome.UNREADABLE)


@pytest.mark.parametrize("vector", [GENOA, TURIN, MILAN], ids=["genoa", "turin", "milan"])
def test_another_products_chain_is_refused(vector: Vector) -> None:
    for other in {GENOA, TURIN, MILAN} - {vector}:
        found = vector.examine(chain=other.chain)
        assert found.outcome is Outcome.NOT_GENUINE
        assert any("The root is" in failure.message for failure in found.failures)


def test_what_nobody_expected_is_listed() -> None:
    found = GENOA.examine()
    assert found.outcome is Outcome.ACCEPTABLE
    assert set(found.not_checked) == {
        "measurement", "report_data", "revocation", "chip_id", "statement (model, protection, service)",
    }  # fmt: skip
    assert found.genuine is not None
    expected = found.genuine.report.report_data
    assert "report_data" not in GENOA.examine(report_data=expected).not_checked
    wrong = GENOA.examine(report_data=bytes(64))
    assert wrong.outcome is Outcome.REFUSED
    assert [mismatch.field for mismatch in wrong.mismatches] == ["report_data"]
