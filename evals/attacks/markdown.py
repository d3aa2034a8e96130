"""The summary of a run for the repository, in Markdown."""

from __future__ import annotations

from evals.attacks.gates import Status
from evals.attacks.report import Report, came_out, cell, named


def summary(report: Report) -> str:
    """The summary for the repository."""
    results = report.results
    settings = results.settings
    lines = ["# Attack results", ""]
    lines += [f"* {_escaped(line)}" for line in report.headlines()]
    versions = ", ".join(f"{name} {value}" for name, value in settings.versions.items())
    code = ", ".join(f"`{digest[:16]}…`" for digest in results.sources())
    captures, attacks = report.seconds()
    lines += [
        "",
        f"Gates: {report.counted()}.",
        "",
        f"Model {settings.model} (`{settings.model_identity[:16]}…`), {settings.prompts} short prompts, "
        f"seed {settings.seed}; {versions}; code {code}. Captures took {captures:.0f} s, "
        f"attacks {attacks:.0f} s on {results.machine.get('processors', '?')} processors.",
        "",
        "## Matrix",
        "",
        "Value, and in brackets what knowing nothing gives. `n/a`: the wire does not carry what the attack "
        "needs. `*`: the attack failed its own control.",
        "",
    ]
    names = list(results.conditions)
    lines.append("| attack | corpus | " + " | ".join(names) + " |")
    lines.append("|---|---|" + "---|" * len(names))
    for attack, corpus in report.rows():
        cells = [cell(results.results.get((name, attack.name, corpus))) for name in names]
        lines.append(f"| {_escaped(attack.title)} | {corpus} | " + " | ".join(cells) + " |")
    lines += ["", "## Conditions", "", "| name | what | scheme |", "|---|---|---|"]
    lines += [f"| {n} | {_escaped(c.title)} | {_escaped(c.scheme)} |" for n, c in results.conditions.items()]
    lines += ["", "## Gates that are not passed", "", "| gate | result |", "|---|---|"]
    for gate in report.gates:
        if gate.status not in (Status.PASS, Status.NOT_APPLICABLE):
            lines.append(f"| {_escaped(named(gate))} | {_escaped(came_out(gate))} |")
    reasons = _reasons(report)
    if reasons:
        lines += ["", "## Not applicable, not interpretable, errors", ""]
        lines += [f"* {_escaped(reason)}" for reason in reasons]
    return "\n".join(lines) + "\n"


def _reasons(report: Report) -> list[str]:
    reasons = []
    for (condition, attack, corpus), result in report.results.results.items():
        outcome = result.outcome
        where = f"{condition}, {attack}, {corpus}"
        if outcome is None:
            reasons.append(f"{where}: raised {result.error}")
        elif not outcome.applicable or not outcome.interpretable:
            kind = "not applicable" if not outcome.applicable else "not interpretable"
            reasons.append(f"{where}: {kind}: {outcome.reason}")
    return reasons


def _escaped(text: str) -> str:
    for symbol in ("\\", "|", "*", "_", "<", "`", "[", "]"):
        text = text.replace(symbol, "\\" + symbol)
    return text.replace("\n", " ")
