"""What a run found, in words: the same lines head the page, the Markdown summary and the terminal.

Everything here is derived from results and gates; no verdict is written down beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evals.attacks.gates import Gate, Status, evaluate, overall
from evals.attacks.model import Attack, CorpusName, Outcome
from evals.attacks.results import Result, Results


@dataclass(frozen=True, slots=True)
class Report:
    """Results, the attacks that may be among them, and the gates that follow."""

    results: Results
    attacks: Mapping[str, Attack]
    gates: Sequence[Gate]

    def rows(self) -> list[tuple[Attack, CorpusName]]:
        """The matrix's rows: attack and corpus, as far as there are results."""
        present = {(attack, corpus) for _, attack, corpus in self.results.results}
        return [(a, c) for a in self.attacks.values() for c in a.corpora if (a.name, c) in present]

    def gates_of(self, condition: str) -> list[Gate]:
        """The gates of one condition."""
        return [gate for gate in self.gates if gate.condition == condition]

    def headlines(self) -> list[str]:
        """The first lines: controls, then one line per condition, worst first."""
        controls = [g for g in self.gates if g.kind == "control"]
        passed = sum(g.status is Status.PASS for g in controls)
        lines = [f"Controls on plain operands: {passed} of {len(controls)} passed."]
        lines += [f"CONTROL {_judged(g)}" for g in controls if g.status is not Status.PASS]
        conditions = [(n, c) for n, c in self.results.conditions.items() if not c.is_control]
        order = {Status.FAIL: 0, Status.NOT_RUN: 1, Status.PASS: 2}
        judged = [(overall(self.gates_of(name)), name, record) for name, record in conditions]
        for status, name, record in sorted(judged, key=lambda entry: order[entry[0]]):
            lines.append(f"{name} ({record.title}): {_verdict(status, self.gates_of(name))}")
        return lines

    def seconds(self) -> tuple[float, float]:
        """Time that captures and attacks took."""
        captures = sum(c.seconds for c in self.results.captures.values())
        return captures, sum(r.seconds for r in self.results.results.values())

    def counts(self) -> dict[Status, int]:
        """How many gates came out how."""
        return {status: sum(g.status is status for g in self.gates) for status in Status}

    def counted(self) -> str:
        """:meth:`counts` in words."""
        return ", ".join(f"{count} {status}" for status, count in self.counts().items() if count)


def make_report(results: Results, attacks: Mapping[str, Attack]) -> Report:
    """The report of ``results``."""
    return Report(results, attacks, evaluate(results, {n: a.corpora for n, a in attacks.items()}))


def number(value: float) -> str:
    """Three decimals, or as many significant digits as a small value needs."""
    if math.isnan(value):
        return "–"
    if value == 0 or 0.0005 <= abs(value) < 1e4:
        return f"{value:.3f}"
    return f"{value:.2e}"


def cell(result: Result | None) -> str:
    """A result in a table: value, chance in brackets."""
    if result is None:
        return ""
    if result.outcome is None:
        return "error"
    outcome = result.outcome
    if not outcome.applicable:
        return "n/a"
    mark = "" if outcome.interpretable else " *"
    return f"{number(outcome.value)} ({number(outcome.chance)}){mark}"


def describe(outcome: Outcome) -> str:
    """An outcome in one line."""
    if not outcome.applicable:
        return f"not applicable: {outcome.reason}"
    text = f"{number(outcome.value)}, chance {number(outcome.chance)}"
    if outcome.interval is not None:
        text += f", 95 % interval {number(outcome.interval[0])} to {number(outcome.interval[1])}"
    if not outcome.interpretable:
        text += f"; not interpretable: {outcome.reason}"
    return text


def _verdict(status: Status, gates: Sequence[Gate]) -> str:
    if status is Status.PASS:
        return f"PASSES all {sum(g.status is Status.PASS for g in gates)} gates that apply."
    if status is Status.NOT_RUN:
        open_ = [g for g in gates if g.status in (Status.NOT_RUN, Status.NOT_INTERPRETABLE)]
        if not open_:
            return "NOT JUDGED: no gate applies."
        return f"NOT JUDGED: {len(open_)} of {len(gates)} gates without a result that counts."
    broken = [g for g in gates if g.status is Status.FAIL]
    found = "; ".join(
        f"{g.attack} ({g.corpus}) {number(g.value)}"
        + ("" if math.isnan(g.chance) else f", chance {number(g.chance)}")
        for g in broken
    )
    return f"FAILS {len(broken)} of {len(gates)} gates. It does not hide the prompt from: {found}."


def named(gate: Gate) -> str:
    """Which gate it is."""
    return f"{gate.condition}: {gate.kind}, {gate.attack} ({gate.corpus}) {gate.rule}"


def came_out(gate: Gate) -> str:
    """Status, value and why."""
    value = "" if math.isnan(gate.value) else f" {number(gate.value)}"
    return f"{gate.status.upper()}{value}" + (f": {gate.detail}" if gate.detail else "")


def _judged(gate: Gate) -> str:
    return f"{gate.attack} ({gate.corpus}): {came_out(gate)}; required {gate.rule}"
