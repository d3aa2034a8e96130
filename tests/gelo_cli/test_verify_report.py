"""`gelo verify-report`: exit codes and output, on real reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attestation.policy_file import template
from gelo_cli.main import app

DATA = Path(__file__).parents[1] / "attestation" / "data"
GENOA = ("genoa_cdai_report_v5.bin", "genoa_cdai_vcek.der", "genoa_trustee_ask_ark_asvk.pem")
TURIN = ("turin_ms_report.bin", "turin_ms_vcek.pem", "turin_trustee_ask_ark_asvk.pem")
MILAN = ("milan_ms_report.bin", "milan_ms_vcek.pem", "milan_trustee_ask_ark_asvk.pem")
AUTUMN = "2026-10-01T00:00:00Z"
REPORT = (DATA / GENOA[0]).read_bytes()


def run(files: tuple[str, str, str], *options: str, at: str = AUTUMN) -> Result:
    report, vek, chain = (str(DATA / name) for name in files)
    return CliRunner().invoke(
        app, ["verify-report", report, "--vek", vek, "--chain", chain, "--at", at, *options]
    )


def as_json(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code
    return found


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Accepts the Genoa report; does not insist on a revocation list."""
    path = tmp_path / "policy.toml"
    text = template(measurement=REPORT[0x90:0xC0])
    path.write_text(text.replace('revocation = "required"', 'revocation = "if-sent"'))
    return path


def test_a_genuine_and_acceptable_report(policy: Path) -> None:
    result = run(GENOA, "--policy", str(policy), "--report-data", REPORT[0x50:0x90].hex(), "--json")
    assert result.exit_code == 0, result.output
    found = as_json(result)
    assert (found["genuine"], found["acceptable"], found["outcome"]) == (True, True, "acceptable")
    assert found["not_checked"] == ["revocation", "chip_id", "statement (model, protection, service)"]
    assert found["report"]["measurement"] == REPORT[0x90:0xC0].hex()
    assert found["tcb"]["launch"]["snp"] == 27


def test_people_can_read_it() -> None:
    result = run(GENOA)
    assert result.exit_code == 0
    assert "genuine and acceptable, judged at 2026-10-01 00:00:00 UTC" in result.output
    assert REPORT[0x90:0xC0].hex() in result.output
    assert "not checked: measurement" in result.output


def test_a_refusal_names_every_mismatch() -> None:
    found = as_json(run(TURIN, "--json", "--report-data", "00" * 64))
    assert (found["outcome"], found["exit_code"]) == ("refused", 3)
    assert (found["genuine"], found["acceptable"]) == (True, False)
    fields = [mismatch["field"] for mismatch in found["mismatches"]]
    assert fields == ["host_data", "family_id", "image_id", "guest_svn", "id_key_digest"]
    shown = run(TURIN)
    assert shown.exit_code == 3
    assert "refused by the policy" in shown.output
    assert "host_data" in shown.output


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--report-data", "07" * 64, "report_data"),
        ("--policy", "other", "measurement"),
        ("--policy", "revocation", "revocation"),
        ("--policy", "strict", "policy.smt"),
    ],
)
def test_the_policy_refuses(policy: Path, option: str, value: str, field: str) -> None:
    if option == "--policy":
        edits = {
            "other": (REPORT[0x90:0xC0].hex(), "00" * 48),
            "revocation": ("if-sent", "required"),
            "strict": ('"standard"', '"strict"'),
        }
        policy.write_text(policy.read_text().replace(*edits[value]))
        value = str(policy)
    found = as_json(run(GENOA, option, value, "--json"))
    assert found["exit_code"] == 3
    assert field in [mismatch["field"] for mismatch in found["mismatches"]]


def test_a_report_that_is_not_genuine_names_every_failed_check() -> None:
    found = as_json(run(("genoa_neg_chip_id_flip.bin", *GENOA[1:]), "--json"))
    assert (found["outcome"], found["exit_code"], found["genuine"]) == ("not-genuine", 2, False)
    assert ["CHIP_ID" in f["message"] or "signature" in f["message"] for f in found["failures"]] == [
        True,
        True,
    ]
    assert found["report"]["version"] == 5
    shown = run(("genoa_neg_chip_id_flip.bin", *GENOA[1:]))
    assert shown.exit_code == 2
    assert "not genuine" in shown.output


@pytest.mark.parametrize(
    ("files", "at"),
    [
        ((GENOA[0], GENOA[1], TURIN[2]), AUTUMN),
        ((GENOA[0], "genoa_ms_vcek.pem", GENOA[2]), AUTUMN),
        (GENOA, "2020-01-01T00:00:00Z"),
        (GENOA, "2050-01-01T00:00:00+02:00"),
    ],
)
def test_not_genuine(files: tuple[str, str, str], at: str) -> None:
    assert as_json(run(files, "--json", at=at))["exit_code"] == 2


def test_a_revocation_list_is_checked(tmp_path: Path) -> None:
    spring = "2026-03-01T00:00:00Z"
    crl = DATA / "milan_crl_openpcc.der"
    found = as_json(run(MILAN, "--crl", str(crl), "--json", at=spring))
    assert found["exit_code"] == 3
    assert found["revocation"]["number"] == 6
    assert "revocation" not in found["not_checked"]
    assert as_json(run(MILAN, "--crl", str(crl), "--json"))["exit_code"] == 2  # expired in May
    assert as_json(run(GENOA, "--crl", str(crl), "--json"))["exit_code"] == 2
    damaged = tmp_path / "crl.der"
    damaged.write_bytes(crl.read_bytes()[:-1])
    assert as_json(run(MILAN, "--crl", str(damaged), "--json", at=spring))["exit_code"] == 4


@pytest.mark.parametrize(
    "name", ["genoa_neg_truncated.bin", "genoa_neg_trailing.bin", "genoa_neg_reserved_flip.bin", "README.md"]
)
def test_an_unreadable_report(name: str) -> None:
    found = as_json(run((name, *GENOA[1:]), "--json"))
    assert (found["outcome"], found["exit_code"]) == ("unreadable", 4)
    assert found["failures"][0]["message"]


@pytest.mark.parametrize(
    "options",
    [
        ("--at", "yesterday"),
        ("--at", "2026-10-01"),
        ("--at", "2026-10-01T00:00:00"),
        ("--at", "2026-W40-4T00:00:00Z"),
        ("--at", "2026-13-01T00:00:00Z"),
        ("--at", "0001-01-01T00:00:00+23:00"),
        ("--report-data", "00"),
        ("--report-data", "zz" * 64),
        ("--policy", "absent.toml"),
        ("--vek", "absent.der"),
        ("--chain", "absent.pem"),
        ("--crl", "absent.crl"),
        ("--vek", str(DATA / GENOA[2])),
        ("--chain", str(DATA / GENOA[1])),
        ("--chain", str(DATA / "README.md")),
        ("--crl", str(DATA / GENOA[1])),
    ],
)
def test_other_unreadable_inputs(options: tuple[str, str]) -> None:
    found = as_json(run(GENOA, *options, "--json"))
    assert found["exit_code"] == 4
    assert found["failures"][0]["message"]


def test_a_report_alone_proves_nothing() -> None:
    result = CliRunner().invoke(app, ["verify-report", str(DATA / GENOA[0])])
    assert result.exit_code == 4
    assert "--vek and --chain are needed" in result.output


def test_large_files_are_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    with large.open("wb") as file:
        file.truncate(10_000_000)
    assert as_json(run((str(large), *GENOA[1:]), "--json"))["exit_code"] == 4
