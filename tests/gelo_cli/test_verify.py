"""`gelo verify`: the report, the document, and an exit code for each class of failure."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attestation import errors
from attestation.document import recheck
from attestation.errors import AttestationError, Mismatch
from attestation.policy import SIMULATED_MEASUREMENT, SIMULATED_WARNING, UNPINNED, UnsafeAllowSimulated
from attestation.policy_file import template
from gelo_cli.main import app
from gelo_cli.verify import EXIT_CODES, exit_code

MODEL = bytes(range(32))


def gelo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def policy_file(directory: Path, *changes: tuple[str, str], model: bytes = MODEL) -> Path:
    text = template(measurement=SIMULATED_MEASUREMENT, model_identity=model)
    for old, new in (("unsafe_allow_simulated = false", "unsafe_allow_simulated = true"), *changes):
        assert old in text
        text = text.replace(old, new)
    path = directory / "policy.toml"
    path.write_text(text)
    return path


def test_an_acceptable_service(service: Any, tmp_path: Path) -> None:
    result = gelo(service.url, "--policy", str(policy_file(tmp_path)))
    assert result.exit_code == 0, result.output
    for words in ("REPORT_DATA", "RFC 9266", "as pinned", SIMULATED_MEASUREMENT.hex(), "Genoa"):
        assert words in result.stdout
    assert SIMULATED_WARNING in result.stderr
    assert "SIMULATED" in result.stdout
    assert "[bold]gelo[/]" in result.stdout  # the peer's words are text, never markup


def test_the_document_is_the_output_and_can_be_checked_again(service: Any, tmp_path: Path) -> None:
    saved = tmp_path / "verification.json"
    result = gelo(service.url, "--policy", str(policy_file(tmp_path)), "--json", "--save", str(saved))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads(saved.read_bytes())
    assert document["format"] == "gelo-verification/1"
    assert document["service"] == service.url
    assert document["acceptable"] is True
    assert document["simulated"] is True
    assert document["warnings"] == [SIMULATED_WARNING]
    assert document["error"] is None
    assert document["policy"]["source"] == "policy.toml"
    assert len(document["policy"]["sha256"]) == 64
    assert document["policy"]["unsafe_allow_simulated"] is True
    assert document["verdict"]["model_identity"] == MODEL.hex()
    checked = {check["check"].partition(":")[0] for check in document["checks"]}
    assert checked == {"certificate", "chain", "report", "policy", "statement", "binding"}
    assert "revocation: no list was sent" in gelo(service.url, "--allow-simulated").stdout
    assert all(check["value"] for check in document["checks"])
    assert stat.S_ISREG(saved.stat().st_mode)
    assert list(tmp_path.glob(".verification*")) == []
    policy = UnsafeAllowSimulated.only(model_identity=MODEL, service=UNPINNED)
    assert recheck(saved.read_bytes(), policy).statement.model_identity == MODEL
    with pytest.raises(errors.PolicyRefusedError):
        recheck(saved.read_bytes(), UnsafeAllowSimulated.only(model_identity=bytes(32), service=UNPINNED))


def test_a_refusal_lists_every_mismatch_and_can_be_saved(service: Any, tmp_path: Path) -> None:
    path = policy_file(tmp_path, ('name = "unpinned"', 'name = "other"'), model=bytes(32))
    saved = tmp_path / "refusal.json"
    result = gelo(service.url, "--policy", str(path), "--json", "--save", str(saved))
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document == json.loads(saved.read_bytes())
    assert document["acceptable"] is False
    assert document["error"]["code"] == "policy-refused"
    found = {mismatch["field"]: mismatch for mismatch in document["error"]["mismatches"]}
    assert found.keys() == {"model_identity", "service"}
    assert found["service"]["got"] == "[bold]gelo[/]"
    assert all(mismatch["remedy"] and mismatch["fault"] for mismatch in found.values())
    for words in ("model_identity", "expected", "up to", "[bold]gelo[/]"):
        assert words in result.stderr
    with pytest.raises(errors.MalformedEvidenceError):
        recheck(saved.read_bytes(), UnsafeAllowSimulated.only(model_identity=UNPINNED, service=UNPINNED))


def test_simulated_evidence_has_its_own_exit_code(service: Any, tmp_path: Path) -> None:
    path = policy_file(tmp_path, ("unsafe_allow_simulated = true", "unsafe_allow_simulated = false"))
    result = gelo(service.url, "--policy", str(path))
    assert result.exit_code == 6
    assert not result.stdout
    assert gelo(service.url, "--policy", str(path), "--allow-simulated").exit_code == 0


def test_an_unreachable_service_gives_no_verdict(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = gelo(f"https://127.0.0.1:{port}", "--policy", str(policy_file(tmp_path)), "--json")
    assert result.exit_code == 7
    assert "cannot be reached" in result.stderr
    assert json.loads(result.stdout)["error"]["code"] == "evidence-unavailable"


@pytest.mark.parametrize(
    ("url", "policy"),
    [
        ("http://127.0.0.1:1", "good"),
        ("not a url", "good"),
        ("https://127.0.0.1:1", "absent"),
        ("https://127.0.0.1:1", "empty"),
        ("https://127.0.0.1:1", "suffix"),
    ],
)
def test_what_cannot_be_right_is_said_before_anything_is_connected(
    tmp_path: Path, url: str, policy: str
) -> None:
    path = policy_file(tmp_path)
    if policy != "good":
        path = tmp_path / ("policy.yaml" if policy == "suffix" else "other.toml")
        if policy != "absent":
            path.write_text("")
    result = gelo(url, "--policy", str(path))
    assert result.exit_code == 8
    assert "error:" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [(), ("--measurement", "00" * 48), ("--model-identity", "00" * 32), ("--allow-plain",)],
)
def test_a_policy_file_is_not_mixed_with_options(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file = ("--policy", str(policy_file(tmp_path))) if arguments else ()
    result = gelo("https://127.0.0.1:1", *file, *arguments)
    assert result.exit_code == 2
    assert "error:" in result.stderr


def every_error() -> list[AttestationError]:
    mismatch = Mismatch("field", "a", "b", "do something")
    made: list[AttestationError] = []
    for name in errors.__dict__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, AttestationError) and not name.startswith("_"):
            listing = issubclass(kind, errors.PolicyRefusedError | errors.ChannelBindingError)
            made.append(kind([mismatch]) if listing else kind("what happened"))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.code)
def test_no_failure_looks_like_success(error: AttestationError) -> None:
    assert exit_code(error) != 0


def test_exit_codes_are_distinct_and_documented() -> None:
    codes = [code for _, code, _ in EXIT_CODES]
    assert len(set(codes)) == len(codes)
    text = " ".join(CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "200"}).stdout.split())
    for _, code, meaning in EXIT_CODES:
        assert f"{code}: {meaning}" in text
