"""`gelo verify-report`: an attestation report from a file, for auditors."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from attestation.errors import AttestationError, InvalidPolicyError
from gelo_cli.console import err, out
from gelo_cli.options import PolicyOption

if TYPE_CHECKING:
    from attestation.offline import Examination

_MAX_INPUT = 1024 * 1024
_UNREADABLE = 4
_REPORT_DATA_SIZE = 64
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def verify_report(
    report: Annotated[Path, typer.Argument(help="The report, 1184 bytes as the firmware returned them.")],
    vek: Annotated[Path | None, typer.Option("--vek", help="VCEK or VLEK certificate, PEM or DER.")] = None,
    chain: Annotated[
        Path | None, typer.Option("--chain", help="ASK (or ASVK) and ARK in PEM, in any order.")
    ] = None,
    crl: Annotated[Path | None, typer.Option("--crl", help="The ARK's revocation list, PEM or DER.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="Judge at this time (RFC 3339) instead of now.")
    ] = None,
    policy_file: PolicyOption = None,
    report_data: Annotated[
        str | None, typer.Option("--report-data", help="Expected REPORT_DATA, 128 hexadecimal digits.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Every field and every failed check as JSON on stdout.")
    ] = False,
) -> None:
    """Judge a stored attestation report without any connection.

    Exit code 0: genuine and acceptable. 2: not genuine. 3: genuine, refused by the policy.
    4: an input cannot be read.

    Without --policy, the standard profile is held against the report; what nobody gave an expectation
    for is listed as not checked.
    """
    from attestation.offline import examine
    from attestation.policy_file import load_policy

    try:
        if vek is None or chain is None:
            raise InvalidPolicyError("--vek and --chain are needed: a report alone proves nothing.")
        found = examine(
            _read(report),
            vek=_read(vek),
            chain=_read(chain),
            crl=None if crl is None else _read(crl),
            at=_time(at),
            policy=None if policy_file is None else load_policy(policy_file),
            report_data=None if report_data is None else _digits(report_data),
        )
    except AttestationError as error:
        _complain(error, as_json)
        raise typer.Exit(_UNREADABLE) from None
    if as_json:
        out.file.write(json.dumps(found.as_dict(), indent=2) + "\n")
    else:
        _show(found)
    raise typer.Exit(int(found.outcome))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_INPUT + 1)
    except OSError as error:
        raise InvalidPolicyError(f"{path} cannot be read ({error.strerror}).") from None
    if len(data) > _MAX_INPUT:
        raise InvalidPolicyError(f"{path} is larger than {_MAX_INPUT} bytes.")
    return data


def _time(text: str | None) -> datetime:
    if text is None:
        return datetime.now(UTC)
    try:
        if not _RFC3339.fullmatch(text):
            raise ValueError
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidPolicyError(
            "--at must be a time as in RFC 3339, such as 2026-10-01T12:00:00Z."
        ) from None


def _digits(text: str) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != _REPORT_DATA_SIZE:
        raise InvalidPolicyError(f"--report-data must be {2 * _REPORT_DATA_SIZE} hexadecimal digits.")
    return data


def _complain(error: AttestationError, as_json: bool) -> None:
    if as_json:
        failure = {"code": error.code, "message": error.message, "remedy": error.remedy}
        body = {"outcome": "unreadable", "exit_code": _UNREADABLE, "failures": [failure]}
        out.file.write(json.dumps(body, indent=2) + "\n")
    err.print(Text.assemble(("unreadable: ", "bold red"), str(error)))


def _show(found: Examination) -> None:
    from attestation.offline import Outcome
    from gelo_cli.policies import mismatch_table

    words = {
        Outcome.ACCEPTABLE: ("genuine and acceptable", "green"),
        Outcome.NOT_GENUINE: ("not genuine", "bold red"),
        Outcome.REFUSED: ("genuine, but refused by the policy", "bold red"),
        Outcome.UNREADABLE: ("unreadable", "bold red"),
    }
    word, style = words[found.outcome]
    out.print(Text.assemble((word, style), f", judged at {found.at:%Y-%m-%d %H:%M:%S} UTC"))
    if found.genuine is not None:
        _show_report(found)
    for name in found.not_checked:
        out.print(Text.assemble(("not checked: ", "yellow"), name))
    if found.mismatches:
        err.print(mismatch_table(found.mismatches))
    else:
        for failure in found.failures:
            err.print(Text(f"✗ {failure}"))
    for warning in found.warnings:
        err.print(Text(warning, "bold yellow"))


def _show_report(found: Examination) -> None:
    genuine = found.genuine
    if genuine is None:
        return
    report = genuine.report
    levels = " ".join(f"{name}={level}" for name, level in genuine.reported_tcb.as_dict().items())
    rows = {
        "report": f"version {report.version}, {genuine.product.value}, VMPL {report.vmpl}",
        "measurement": report.measurement.hex(),
        "report data": report.report_data.hex(),
        "chip": report.chip_id.hex(),
        "patch levels": levels,
        "firmware": ".".join(map(str, report.current_firmware)),
        "root": genuine.root_sha256,
    }
    for name, value in rows.items():
        out.print(Text.assemble((f"{name:<13}", "dim"), value), soft_wrap=True)
