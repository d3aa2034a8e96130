"""The client's policy from command-line options, and a verdict as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from attestation import UNPINNED, AnyPolicy, Policy, Product, UnsafeAllowSimulated, Verdict
from attestation.policy import DEFAULT_PROTECTION
from attestation.statement import MODEL_IDENTITY_SIZE, parse_digest
from gelo_cli.console import CliError

_MEASUREMENT_BYTES = 48


def policy_from(
    *,
    allow_simulated: bool,
    allow_plain: bool,
    model_identity: str | None,
    measurements: Sequence[str] | None,
) -> AnyPolicy:
    """What to hold the service to.

    Raises:
        CliError: neither a measurement nor --allow-simulated: there would be nothing to check.
    """
    identity = (
        parse_digest(model_identity, MODEL_IDENTITY_SIZE, "model identity") if model_identity else UNPINNED
    )
    protection = DEFAULT_PROTECTION | ({"plain"} if allow_plain else set())
    if not measurements:
        if not allow_simulated:
            raise CliError(
                "Without a launch measurement to expect, evidence proves nothing about the software.",
                remedy="Give --measurement HEX, or for a development service --allow-simulated.",
                code=2,
            )
        return UnsafeAllowSimulated.only(
            model_identity=identity, service=UNPINNED, allowed_protection=protection
        )
    policy = Policy(
        measurements=frozenset(parse_digest(m, _MEASUREMENT_BYTES, "measurement") for m in measurements),
        products=frozenset({Product.GENOA, Product.TURIN}),
        model_identity=identity,
        service=UNPINNED,
        allowed_protection=protection,
    )
    return UnsafeAllowSimulated(policy) if allow_simulated else policy


def verdict_table(verdict: Verdict) -> Table:
    """What was verified, in a few lines."""
    title = (
        "[bold yellow]SIMULATED evidence: proves nothing[/]" if verdict.simulated else "[green]verified[/]"
    )
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    pinned = "as pinned" if verdict.model_pinned else "not pinned"
    rows = (
        (
            "evidence",
            f"SEV-SNP report v{verdict.report_version}, {verdict.product}, signature and chain hold",
        ),
        ("measurement", f"{verdict.measurement[:32]}… accepted by the policy"),
        ("model", f"{verdict.model_identity[:32]}… ({pinned})"),
        ("protection", verdict.protection),
        ("channel", f"{verdict.tls_version}, key {verdict.key_sha256[:16]}… bound to the report"),
        ("freshness", "report over this client's nonce and this connection's exporter"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table
