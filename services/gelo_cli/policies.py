"""The client's policy from command-line options, and a verdict as a table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from attestation import UNPINNED, AnyPolicy, Policy, Product, UnsafeAllowSimulated, Verdict
from attestation.errors import InvalidPolicyError, Mismatch
from attestation.policy import DEFAULT_PROTECTION, MEASUREMENT_SIZE, UNPROTECTED
from attestation.statement import MODEL_IDENTITY_SIZE, parse_digest
from gelo_cli.console import CliError


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What to hold the service to. ``source`` is what a verification document says about it."""

    policy: AnyPolicy
    source: dict[str, object]


def policy_from(
    *,
    allow_simulated: bool,
    allow_plain: bool,
    model_identity: str | None,
    measurements: Sequence[str] | None,
    policy_file: Path | None = None,
) -> AnyPolicy:
    """The policy of ``client_policy_from``."""
    return client_policy_from(
        allow_simulated=allow_simulated, allow_plain=allow_plain, model_identity=model_identity,
        measurements=measurements, policy_file=policy_file,
    ).policy  # fmt: skip


def client_policy_from(
    *,
    allow_simulated: bool,
    allow_plain: bool,
    model_identity: str | None,
    measurements: Sequence[str] | None,
    policy_file: Path | None = None,
) -> ClientPolicy:
    """What to hold the service to, from a policy file or from options.

    Raises:
        CliError: nothing says which software to expect, so that there would be nothing to check, or a
            policy file and options that belong into it are given together.
        InvalidPolicyError: the policy file, or a digest, cannot be right.
    """
    if policy_file is None:
        policy = _from_options(
            allow_simulated=allow_simulated, allow_plain=allow_plain,
            model_identity=model_identity, measurements=measurements,
        )  # fmt: skip
        source: dict[str, object] = {"source": "command line"}
    else:
        if allow_plain or model_identity or measurements:
            raise CliError(
                "A policy file says everything: it cannot be mixed with --measurement, --model-identity "
                "or --allow-plain.",
                remedy="Write it into the file.",
                code=2,
            )
        policy, source = _from_file(policy_file)
        if allow_simulated and isinstance(policy, Policy):
            policy = UnsafeAllowSimulated(policy)
    return ClientPolicy(
        policy, {**source, "unsafe_allow_simulated": isinstance(policy, UnsafeAllowSimulated)}
    )


def _from_file(path: Path) -> tuple[AnyPolicy, dict[str, object]]:
    from attestation.policy_file import parse_policy
    from attestation.strict_data import MAX_DATA_SIZE

    try:
        with path.open("rb") as file:
            data = file.read(MAX_DATA_SIZE + 1)
    except OSError as error:
        raise InvalidPolicyError(
            f"The policy {path} cannot be read ({error.strerror}).", remedy="Check the path."
        ) from None
    policy = parse_policy(data, syntax=path.suffix.lower())
    return policy, {"source": path.name, "sha256": hashlib.sha256(data).hexdigest()}


def _from_options(
    *,
    allow_simulated: bool,
    allow_plain: bool,
    model_identity: str | None,
    measurements: Sequence[str] | None,
) -> AnyPolicy:
    identity = (
        parse_digest(model_identity, MODEL_IDENTITY_SIZE, "model identity") if model_identity else UNPINNED
    )
    protection = DEFAULT_PROTECTION | (UNPROTECTED if allow_plain else frozenset())
    if not measurements:
        if not allow_simulated:
            raise CliError(
                "Without a launch measurement to expect, evidence proves nothing about the software.",
                remedy="Give --policy FILE or --measurement HEX, or for a development service "
                "--allow-simulated.",
                code=2,
            )
        return UnsafeAllowSimulated.only(
            model_identity=identity, service=UNPINNED, allowed_protection=protection
        )
    policy = Policy(
        measurements=frozenset(parse_digest(m, MEASUREMENT_SIZE, "measurement") for m in measurements),
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
    table = _two_columns(title)
    pinned = "as pinned" if verdict.model_pinned else "not pinned"
    rows = (
        (
            "evidence",
            f"SEV-SNP report v{verdict.report_version}, {verdict.product}, signature and chain hold",
        ),
        ("measurement", f"{verdict.measurement[:32]}… accepted by the policy"),
        ("model", f"{verdict.model_identity[:32]}… ({pinned})"),
        ("protection", verdict.protection_shown),
        ("channel", f"{verdict.tls_version}, key {verdict.key_sha256[:16]}… bound to the report"),
        ("freshness", "report over this client's nonce and this connection's exporter"),
    )
    for name, value in rows:
        table.add_row(name, Text(value))  # not markup: the peer chose some of the words
    return table


def mismatch_table(mismatches: Sequence[Mismatch]) -> Table:
    """Every expectation that was not met: what, whose fault, what to do."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("field", "expected", "got", "up to", "what to do"):
        table.add_column(heading, overflow="fold")
    for mismatch in mismatches:
        table.add_row(*(Text(mismatch.as_dict()[k]) for k in ("field", "expected", "got", "fault", "remedy")))
    return table


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
