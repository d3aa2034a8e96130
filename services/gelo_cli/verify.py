"""`gelo verify`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from attestation.errors import (
    AttestationError,
    ChannelBindingError,
    EvidenceUnavailableError,
    InvalidPolicyError,
    MalformedEvidenceError,
    NotGenuineError,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from gelo_cli.console import CliError, err, out, reported_errors
from gelo_cli.options import (
    AllowPlainOption,
    AllowSimulatedOption,
    MeasurementOption,
    ModelIdentityOption,
    PolicyOption,
)

if TYPE_CHECKING:
    from attestation import AnyPolicy, Verdict
    from attestation.document import Document

EXIT_CODES: tuple[tuple[type[AttestationError], int, str], ...] = (
    (NotGenuineError, 2, "not genuine: a signature, chain, root, validity period or revocation"),
    (PolicyRefusedError, 3, "genuine, but refused by the policy"),
    (MalformedEvidenceError, 4, "evidence that cannot be read"),
    (ChannelBindingError, 5, "evidence made for another key or connection: somebody may be relaying"),
    (SimulatedEvidenceRefusedError, 6, "simulated evidence that the policy does not accept"),
    (EvidenceUnavailableError, 7, "no fresh evidence, or the service cannot be reached"),
    (InvalidPolicyError, 8, "a policy, or a URL, that cannot be right"),
)
"""Exit code of `gelo verify` for each class of failure; 2 also stands for a wrong command line."""


def exit_code(error: AttestationError) -> int:
    """The exit code for ``error``."""
    return next((code for kind, code, _ in EXIT_CODES if isinstance(error, kind)), 1)


def verify(
    url: Annotated[str, typer.Argument(help="https://host:port of the service.")],
    policy_file: PolicyOption = None,
    allow_simulated: AllowSimulatedOption = False,
    allow_plain: AllowPlainOption = False,
    model_identity: ModelIdentityOption = None,
    measurement: MeasurementOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The verification document on stdout, also of a refusal.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the verification document to this file.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for connecting and verifying together.", min=0.1, max=30)
    ] = 10.0,
) -> None:
    from gelo_cli.policies import client_policy_from

    with reported_errors():
        try:
            expected = client_policy_from(
                allow_simulated=allow_simulated, allow_plain=allow_plain, model_identity=model_identity,
                measurements=measurement, policy_file=policy_file,
            )  # fmt: skip
            document, verdict, error = judge(url, expected.policy, expected.source, timeout=timeout)
        except InvalidPolicyError as invalid:
            raise CliError(invalid.message, remedy=invalid.remedy, code=exit_code(invalid)) from None
        if save is not None:
            from attestation import document as documents

            documents.save(save, document)
    if as_json:
        from attestation.document import encode

        out.file.write(encode(document).decode())
    if verdict is not None:
        if not as_json:
            _show(verdict)
        for warning in verdict.warnings:
            err.print(Text(warning, "bold yellow"))
    if error is not None:
        show_refusal(error)
        raise typer.Exit(exit_code(error))


verify.__doc__ = """Check a service's attestation and say what was checked.

Exit code 0: acceptable. Otherwise:

""" + "\n\n".join(f"{code}: {meaning}." for _, code, meaning in EXIT_CODES)


def judge(
    url: str, policy: AnyPolicy, source: dict[str, object], *, timeout: float
) -> tuple[Document, Verdict | None, AttestationError | None]:
    """The verification document of the service at ``url``, and the verdict or what refused it.

    Raises:
        InvalidPolicyError: ``url`` is not an https URL.
    """
    import httpx

    from attestation import client, document

    client.https_url(url)
    try:
        verdict = client.verify(url, policy, timeout=timeout)
    except AttestationError as error:
        return document.refused(url, error, time=datetime.now(UTC), policy=source), None, error
    except httpx.HTTPError as failure:
        gone = EvidenceUnavailableError(
            f"{url} cannot be reached ({type(failure).__name__}).", remedy="Is the service running there?"
        )
        return document.refused(url, gone, time=datetime.now(UTC), policy=source), None, gone
    return document.accepted(url, verdict, policy=source), verdict, None


def _show(verdict: Verdict) -> None:
    from gelo_cli.policies import verdict_table

    out.print(verdict_table(verdict))
    out.print()
    for check, value in verdict.checked():
        out.print(Text.assemble(("✓ ", "green"), check))
        out.print(Text(f"    {value}", "dim"))
    if verdict.revocation_expires is None:
        out.print(Text("– revocation: no list was sent, and the policy does not require one", "yellow"))


def show_refusal(error: AttestationError) -> None:
    """Say on stderr what was wrong, whose fault it is and what to do."""
    from gelo_cli.policies import mismatch_table

    mismatches = getattr(error, "mismatches", ())
    message = getattr(error, "heading", "") if mismatches else error.message
    word = "no verdict: " if isinstance(error, EvidenceUnavailableError) else "refused: "
    err.print(Text.assemble((word, "bold red"), message))
    if mismatches:
        err.print(mismatch_table(mismatches))
    if error.remedy:
        err.print(Text(error.remedy))
