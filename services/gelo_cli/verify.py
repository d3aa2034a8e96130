"""`gelo verify`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gelo_cli.console import CliError, err, out, reported_errors
from gelo_cli.options import (
    AllowPlainOption,
    AllowSimulatedOption,
    MeasurementOption,
    ModelIdentityOption,
)


def verify(
    url: Annotated[str, typer.Argument(help="https://host:port of the service.")],
    allow_simulated: AllowSimulatedOption = False,
    allow_plain: AllowPlainOption = False,
    model_identity: ModelIdentityOption = None,
    measurement: MeasurementOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole verdict as JSON.")] = False,
) -> None:
    """Check a service's attestation and say what was checked. Exit code 0 only if it is acceptable."""
    import httpx

    from attestation.client import verify as verify_service
    from gelo_cli.policies import policy_from, verdict_table

    with reported_errors():
        policy = policy_from(
            allow_simulated=allow_simulated, allow_plain=allow_plain,
            model_identity=model_identity, measurements=measurement,
        )  # fmt: skip
        try:
            verdict = verify_service(url, policy)
        except httpx.HTTPError as error:
            raise CliError(f"{url} cannot be reached ({type(error).__name__}).") from error
    if as_json:
        out.file.write(json.dumps(dict(verdict.as_dict()), indent=2) + "\n")
        return
    out.print(verdict_table(verdict))
    for check in verdict.checks:
        out.print(f"[green]✓[/] {check}", highlight=False)
    for warning in verdict.warnings:
        err.print(f"[bold yellow]{warning}[/]")
