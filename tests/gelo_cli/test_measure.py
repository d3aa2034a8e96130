"""`gelo measure`, and which evidence `gelo serve` agrees to serve with."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from attestation.policy_file import policy_from, template
from attestation.providers import select
from gelo_cli.main import app
from gelo_cli.options import EvidenceChoice
from gelo_cli.up import serve_arguments

IDENTITY = bytes(range(32)).hex()
KNOWN = (
    "d923a311e634542cc9e2b2b70893dac667420d7fbed90ca0"
    "e6eb1f81e8c55650c5c8d322199ddc7bb47ac1626434e293"
)  # fmt: skip
"""Of the guest below with two EPYC-v4: printed by sev-snp-measure's own command line."""

Run = Callable[..., Result]


def firmware() -> bytes:
    """Two pages with the metadata of an AmdSev build of OVMF; see tests/attestation/test_launch.py."""
    sections = (
        (0x800000, 0x9000, 1), (0x80A000, 0x3000, 1), (0x80D000, 0x1000, 2), (0x80E000, 0x1000, 3),
        (0x80F000, 0x1000, 4), (0x810000, 0x1000, 0x10), (0x811000, 0xF000, 1),
    )  # fmt: skip
    metadata = b"ASEV" + struct.pack("<III", 16 + 12 * len(sections), 1, len(sections))
    metadata += b"".join(struct.pack("<III", *section) for section in sections)
    footer = b""
    for guid, data in (
        ("00f771de-1a7e-4fcb-890e-68c77e2fb44e", struct.pack("<I", 0x80B004)),
        ("7255371f-3a3b-4b04-927b-1da6efa8d454", struct.pack("<II", 0x810C00, 0x400)),
        ("dc886566-984a-4798-a75e-5585a7bf67cc", struct.pack("<I", 1024)),
    ):
        footer += data + struct.pack("<H", len(data) + 18) + uuid.UUID(guid).bytes_le
    footer += struct.pack("<H", len(footer) + 18)
    footer += uuid.UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le + bytes(32)
    return (metadata.ljust(1024 - len(footer), b"\0") + footer).rjust(8192, b"\x90")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``gelo measure`` on a tiny guest; further arguments are appended, ``without`` options left out."""
    for name, data in (
        ("firmware", firmware()),
        ("kernel", b"tiny kernel"),
        ("initrd", b"tiny initrd\n"),
        ("append", b"console=ttyS0 panic=-1\n"),
    ):
        (tmp_path / name).write_bytes(data)
    options = {
        "--firmware": "firmware", "--kernel": "kernel", "--initrd": "initrd", "--append-file": "append",
    }  # fmt: skip

    def invoke(*arguments: str, without: tuple[str, ...] = ()) -> Result:
        given = [
            part
            for name, file in options.items()
            if name not in without
            for part in (name, str(tmp_path / file))
        ]
        fixed = {"--vcpus": "2", "--vcpu-type": "EPYC-v4", "--model-identity": IDENTITY}
        given += [part for name, text in fixed.items() if name not in without for part in (name, text)]
        return CliRunner().invoke(
            app, ["measure", *given, *arguments], env={"COLUMNS": "250", "NO_COLOR": "1"}
        )

    return invoke


def test_the_manifest_holds_the_known_digest(run: Run, tmp_path: Path) -> None:
    result = run("-o", str(tmp_path / "manifest.json"))
    assert result.exit_code == 0, result.output
    assert KNOWN in result.stderr
    document = json.loads((tmp_path / "manifest.json").read_bytes())
    assert document["measurements"] == [KNOWN]
    assert document["model_identity"] == IDENTITY
    assert document["versions"].keys() == {"gelo-llm", "sev-snp-measure"}
    assert policy_from(document["policy"])


def test_the_command_line_from_the_command_line(run: Run, tmp_path: Path) -> None:
    result = run("--append", "console=ttyS0 panic=-1", without=("--append-file",))
    assert json.loads(result.stdout)["measurements"] == [KNOWN]
    assert result.stdout == run().stdout


def test_several_numbers_and_types(run: Run) -> None:
    document = json.loads(run("--vcpus", "4", "--vcpu-type", "EPYC-Genoa").stdout)
    assert len(document["launches"]) == len(document["measurements"]) == 4
    assert KNOWN in document["measurements"]


def test_a_policy_of_ones_own(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(template(measurement=bytes(48)).replace('"standard"', '"strict"'))
    document = json.loads(run("--policy", str(own)).stdout)
    assert document["policy"]["platform"]["profile"] == "strict"
    assert document["policy"]["guest"]["measurements"] == [KNOWN]


@pytest.mark.parametrize(
    ("arguments", "without", "words"),
    [
        (("--append", "x"), (), "given once"),
        ((), ("--append-file",), "given once"),
        (("--model", "x"), (), "names the model"),
        ((), ("--model-identity",), "names the model"),
        (("--guest-features", "none"), (), "not a number"),
        (("--guest-features", "0"), (), "bit 0"),
        (("--vcpus", "0"), (), "1 to 512"),
        (("--vcpu-type", "Pentium"), (), "Pentium"),
        (("--policy", "own.yaml"), (), ".toml or .json"),
        (("--policy", "absent.toml"), (), "No such file"),
        (("--model-identity", "12"), ("--model-identity",), "model_identity"),
        (("--kernel", "absent"), ("--kernel",), "No such file"),
        ((), ("--kernel",), "--kernel"),
        ((), ("--initrd",), "--initrd"),
        ((), ("--vcpus",), "--vcpus"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    run: Run, arguments: tuple[str, ...], without: tuple[str, ...], words: str
) -> None:
    result = run(*arguments, without=without)
    assert result.exit_code != 0
    assert words in result.stderr
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    assert not result.stdout


def test_the_model_is_identified(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tee_runner.models.resolve_model", lambda name, **_: Path(name))
    monkeypatch.setattr(
        "tee_runner.models.identity.model_identity", lambda path, **_: path.name.encode().ljust(32, b"\0")
    )
    document = json.loads(run("--model", "tiny", without=("--model-identity",)).stdout)
    assert bytes.fromhex(document["model_identity"]).rstrip(b"\0") == b"tiny"


# `gelo serve --evidence`


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["serve", "--model", "/nonexistent", *arguments], env={"COLUMNS": "250", "NO_COLOR": "1"}
    )


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that is no SEV-SNP guest, whatever these tests run on."""
    real = select.resolve_kind

    def resolve(kind: select.EvidenceKind, **_: Any) -> select.EvidenceKind:
        return real(kind, root=tmp_path / "report", device=tmp_path / "device")

    monkeypatch.setattr(select, "resolve_kind", resolve)
    monkeypatch.setattr("tee_runner.hardening.forbid_memory_dumps", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("arguments", [(), ("--evidence", "auto")])
def test_serve_refuses_without_hardware_unless_simulated_is_asked_for(
    elsewhere: Path, arguments: tuple[str, ...]
) -> None:
    result = serve(*arguments)
    assert result.exit_code == 1
    assert "no SEV-SNP guest" in result.stderr
    assert "--evidence simulated" in result.stderr


def test_serve_takes_the_provider_that_was_asked_for(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[select.EvidenceKind] = []
    asked: list[bytes] = []

    def opening(kind: select.EvidenceKind) -> Any:
        opened.append(kind)
        return SimpleNamespace(evidence=asked.append)

    monkeypatch.setattr(select, "open_provider", opening)
    for choice in ("simulated", "configfs", "sev-guest"):
        result = serve("--evidence", choice)
        assert result.exit_code == 1
        assert "/nonexistent" in result.stderr
    (elsewhere / "report").mkdir()
    serve()
    assert [kind.value for kind in opened] == ["simulated", "configfs", "sev-guest", "configfs"]
    assert asked == [bytes(64)] * 4


def test_serve_stops_before_it_loads_a_model_if_there_is_no_evidence(elsewhere: Path) -> None:
    result = serve("--evidence", "sev-guest")
    assert result.exit_code == 1
    assert "/dev/sev-guest" in result.stderr
    assert "/nonexistent" not in result.stderr


def test_commands_that_start_a_runner_ask_for_simulated_evidence() -> None:
    worker = SimpleNamespace(ready={"port": 1})
    arguments = serve_arguments(
        worker,
        model="m",
        protection="plain",
        port=0,
        metrics_port=0,
        log_level="error",  # type: ignore[arg-type]
    )
    assert arguments[arguments.index("--evidence") + 1] == "simulated"


def test_the_choices_are_the_providers() -> None:
    assert [choice.value for choice in EvidenceChoice] == [kind.value for kind in select.EvidenceKind]
