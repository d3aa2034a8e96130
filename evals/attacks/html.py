"""The report as one page that needs nothing else: style and plots are inline, there is no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from evals.attacks.gates import Status
from evals.attacks.model import Attack
from evals.attacks.report import Report, cell, describe, number
from evals.attacks.results import Result
from evals.attacks.svg import plot_svg

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8886; --pass: #1a7f37; --fail: #d1242f; --open: #9a6700; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top; }
.wide { overflow-x: auto; }
.headlines { border-left: 4px solid var(--line); padding: .2rem 1rem; }
.pass { color: var(--pass); } .fail { color: var(--fail); font-weight: 600; } .open { color: var(--open); }
.dim { opacity: .7; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; width: 26rem; max-width: 100%; } figcaption { font-size: 13px; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
details { margin: .3rem 0; } summary { cursor: pointer; }
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_CLASSES: Final = {Status.PASS: "pass", Status.FAIL: "fail"}


def page(report: Report) -> str:
    """The whole page."""
    body = "\n".join(
        [*_head(report), *_matrix(report), *_gates(report), *_conditions(report), *_attacks(report)]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Attack results</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(report: Report) -> Iterator[str]:
    results = report.results
    yield "<h1>Attack results</h1>"
    yield '<div class="headlines">'
    for line in report.headlines():
        kind = (
            "pass"
            if ": PASSES" in line
            else "fail"
            if ": FAILS" in line or line.startswith("CONTROL")
            else ""
        )
        yield f'<p class="{kind}">{escape(line)}</p>'
    yield "</div>"
    settings = results.settings
    captures, attacks = report.seconds()
    facts = {
        "model": f"{settings.model}, identity {settings.model_identity}",
        "short prompts": settings.prompts,
        "seed": settings.seed,
        "versions": ", ".join(f"{name} {value}" for name, value in settings.versions.items()),
        "code (SHA-256)": ", ".join(results.sources()) or "–",
        "machine": ", ".join(f"{name} {value}" for name, value in results.machine.items()),
        "time": f"captures {captures:.0f} s, attacks {attacks:.0f} s",
    }
    yield _table(("", ""), [(name, str(value)) for name, value in facts.items()])


def _matrix(report: Report) -> Iterator[str]:
    results = report.results
    names = list(results.conditions)
    worst = {(g.condition, g.attack, g.corpus): g.status for g in report.gates if g.condition in names}
    yield "<h2>Matrix</h2>"
    yield (
        "<p>Value, and in brackets what knowing nothing gives. n/a: the wire does not carry what the attack "
        "needs. *: the attack failed its own control. Colours are those of the gates.</p>"
    )
    yield '<div class="wide"><table><tr><th>attack</th><th>corpus</th>'
    yield "".join(
        f'<th title="{escape(results.conditions[name].title)}">{escape(name)}</th>' for name in names
    )
    yield "</tr>"
    for attack, corpus in report.rows():
        yield f'<tr><td><a href="#{escape(attack.name)}">{escape(attack.title)}</a></td><td>{corpus}</td>'
        for name in names:
            result = results.results.get((name, attack.name, corpus))
            kind = _class(worst.get((name, attack.name, corpus)))
            yield f'<td class="{kind}">{escape(cell(result))}</td>'
        yield "</tr>"
    yield "</table></div>"


def _gates(report: Report) -> Iterator[str]:
    yield f"<h2>Gates</h2><p>{escape(report.counted())}</p><div class='wide'><table>"
    yield _row("th", ("gate", "condition", "attack", "corpus", "rule", "status", "value", "chance", "why"))
    for gate in report.gates:
        texts = (gate.kind, gate.condition, gate.attack, gate.corpus, gate.rule)
        yield "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in texts)
        yield f'<td class="{_class(gate.status)}">{escape(gate.status)}</td>'
        yield f"<td>{number(gate.value)}</td><td>{number(gate.chance)}</td>"
        yield f"<td>{escape(gate.detail)}</td></tr>"
    yield "</table></div>"


def _conditions(report: Report) -> Iterator[str]:
    yield "<h2>Conditions</h2>"
    rows = []
    for name, record in report.results.conditions.items():
        parameters = ", ".join(f"{key} {value}" for key, value in record.parameters.items())
        captured = "; ".join(
            f"{corpus}: {c.captures} captures, {c.offloads} offloads, {c.operand_bytes / 1e6:.1f} MB, "
            f"{c.seconds:.1f} s"
            for (condition, corpus), c in report.results.captures.items()
            if condition == name
        )
        rows.append((name, record.title, record.scheme, parameters, captured))
    yield _table(("name", "what", "scheme", "public parameters", "captured"), rows)


def _attacks(report: Report) -> Iterator[str]:
    yield "<h2>Attacks</h2>"
    for attack in report.attacks.values():
        own = list(report.results.of(attack.name))
        if not own:
            continue
        name = escape(attack.name)
        yield f'<h3 id="{name}">{escape(attack.title)} <span class="dim">{name}</span></h3>'
        yield _table(
            ("", ""),
            [("source", attack.source), ("assumes", attack.assumes), ("measures", attack.measures)],
        )
        for condition, corpus, result in own:
            yield from _result(attack, condition, corpus, result)


def _result(attack: Attack, condition: str, corpus: str, result: Result) -> Iterator[str]:
    outcome = result.outcome
    line = f"raised {result.error}" if outcome is None else describe(outcome)
    yield (
        f"<details><summary><b>{escape(condition)}</b>, {escape(corpus)}: {escape(line)} "
        f'<span class="dim">{result.seconds:.1f} s</span></summary>'
    )
    if outcome is not None:
        if outcome.measure != attack.measures:
            yield f"<p>Measured: {escape(outcome.measure)}</p>"
        for note in outcome.notes:
            yield f"<p>{escape(note)}</p>"
        if outcome.details:
            yield _table(("detail", "value"), [(n, number(v)) for n, v in outcome.details.items()])
        yield '<div class="plots">'
        for plot in outcome.plots:
            yield f"<figure>{plot_svg(plot)}<figcaption>{escape(plot.title)}</figcaption></figure>"
        yield "</div>"
    yield "</details>"


def _class(status: Status | None) -> str:
    return "" if status is None else _CLASSES.get(status, "open")


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = _row("th", header) if any(header) else ""
    return f'<div class="wide"><table>{head}{"".join(_row("td", row) for row in rows)}</table></div>'


def _row(tag: str, texts: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts) + "</tr>"
