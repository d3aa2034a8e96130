"""Gates: what passes, what fails, and what must never count as a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from evals.attacks.gates import Gate, Status, at_chance, evaluate, overall
from evals.attacks.model import CorpusName, Outcome
from evals.attacks.results import ConditionRecord, Result, Results, Settings

SHORT = (
    "nn", "ima", "isa", "ima-transformer", "gram-distance", "gram-fingerprint", "row-space", "leverage",
    "prefix", "bank", "metadata",
)  # fmt: skip
ATTACKS: dict[str, tuple[CorpusName, ...]] = {**dict.fromkeys(SHORT, ("short",)), "distinguish": ("game",)}
PLAIN = {
    "nn": 1.0, "ima": 0.99, "isa": 0.6, "ima-transformer": 0.7, "gram-distance": 0.0, "row-space": 1.0,
    "leverage": 1.0, "prefix": 1.0, "bank": 1.0, "gram-fingerprint": 1.0, "distinguish": 1.0, "metadata": 1.0,
}  # fmt: skip
HIDDEN = dict.fromkeys(PLAIN, 0.0) | {"gram-distance": 1.2, "metadata": 1.0}


def outcome(attack: str, value: float, **fields: Any) -> Outcome:
    return Outcome(attack=attack, measure="m", value=value, chance=0.0, **fields)


def results(
    values: Mapping[str, Mapping[str, float | Outcome]], *, conditions: tuple[str, ...] = ("c0", "c2", "c3")
) -> Results:
    made = Results(settings=Settings(seed=0, prompts=4, model="m", model_identity="00", versions={}))
    for name in conditions:
        made.conditions[name] = ConditionRecord(
            title=name, scheme=name, parameters={}, corpora=("short", "game"), is_control=name == "c0"
        )
    for condition, by_attack in values.items():
        for attack, value in by_attack.items():
            found = outcome(attack, value) if isinstance(value, float) else value
            made.results[condition, attack, ATTACKS[attack][0]] = Result(outcome=found, seconds=0, source="s")
    return made


def find(gates: list[Gate], condition: str, attack: str, kind: str = "") -> Gate:
    (gate,) = [g for g in gates if g.condition == condition and g.attack == attack and kind in ("", g.kind)]
    return gate


def test_a_scheme_that_hides_passes_with_its_controls() -> None:
    gates = evaluate(results({"c0": PLAIN, "c2": HIDDEN, "c3": HIDDEN}), ATTACKS)
    assert {g.status for g in gates} == {Status.PASS}
    assert overall(gates) is Status.PASS
    # Every kind of gate is there.
    assert {g.kind for g in gates} == {"control", "recovery", "hidden Gram", "at chance", "agreement"}


def test_nothing_is_passed_without_results() -> None:
    gates = evaluate(results({}), ATTACKS)
    assert gates
    assert {g.status for g in gates} == {Status.NOT_RUN}
    assert overall(gates) is Status.NOT_RUN
    empty = evaluate(results({}, conditions=()), ATTACKS)
    assert {g.status for g in empty} == {Status.NOT_RUN}


@pytest.mark.parametrize(
    ("attack", "value"),
    [
        ("row-space", 0.99),
        ("prefix", 0.5),
        ("bank", 0.02),
        ("distinguish", 0.3),
        ("nn", 0.11),
        ("gram-distance", 0.3),
    ],
)
def test_one_leak_fails_its_gate_and_the_scheme(attack: str, value: float) -> None:
    gates = evaluate(results({"c0": PLAIN, "c2": HIDDEN | {attack: value}, "c3": HIDDEN}), ATTACKS)
    assert find(gates, "c2", attack).status is Status.FAIL
    assert overall([g for g in gates if g.condition == "c2"]) is Status.FAIL
    assert overall([g for g in gates if g.condition == "c3"]) is Status.PASS


@pytest.mark.parametrize(
    ("attack", "value"), [("nn", 0.4), ("ima", 0.9), ("row-space", 0.98), ("gram-distance", 0.01)]
)
def test_a_weak_control_fails_and_takes_the_passes_with_it(attack: str, value: float) -> None:
    gates = evaluate(results({"c0": PLAIN | {attack: value}, "c2": HIDDEN, "c3": HIDDEN}), ATTACKS)
    assert find(gates, "c0", attack).status is Status.FAIL
    assert find(gates, "c2", attack).status is Status.NOT_INTERPRETABLE


@pytest.mark.parametrize(("attack", "value"), [("prefix", 0.005), ("isa", 0.3)])
def test_attacks_without_a_control_gate_must_still_work_on_plain(attack: str, value: float) -> None:
    gates = evaluate(results({"c0": PLAIN | {attack: value}, "c2": HIDDEN, "c3": HIDDEN}), ATTACKS)
    assert find(gates, "c2", attack).status is Status.NOT_INTERPRETABLE


def test_recovery_that_is_no_better_than_guessing_common_tokens_passes() -> None:
    guess = Outcome(attack="nn", measure="m", value=0.20, chance=0.18, interval=(0.15, 0.25))
    better = Outcome(attack="ima", measure="m", value=0.30, chance=0.18, interval=(0.25, 0.35))
    gates = evaluate(results({"c0": PLAIN, "c2": HIDDEN | {"nn": guess, "ima": better}}), ATTACKS)
    assert find(gates, "c2", "nn", "recovery").status is Status.PASS
    assert find(gates, "c2", "ima", "recovery").status is Status.FAIL


def test_a_missing_control_is_no_pass_but_a_leak_still_fails() -> None:
    gates = evaluate(results({"c2": HIDDEN | {"bank": 1.0}}, conditions=("c2",)), ATTACKS)
    assert find(gates, "c2", "row-space").status is Status.NOT_INTERPRETABLE
    assert "no control" in find(gates, "c2", "row-space").detail
    assert find(gates, "c2", "bank").status is Status.FAIL


def test_errors_and_attacks_that_do_not_apply() -> None:
    made = results({"c0": PLAIN, "c2": HIDDEN, "c3": HIDDEN})
    made.results["c2", "nn", "short"] = Result(outcome=None, seconds=0, source="s", error="ValueError: x")
    absent = outcome("isa", float("nan"), applicable=False, reason="no deep layer on the wire")
    made.results["c2", "isa", "short"] = Result(outcome=absent, seconds=0, source="s")
    gates = evaluate(made, ATTACKS)
    assert find(gates, "c2", "nn").status is Status.NOT_RUN
    assert "ValueError" in find(gates, "c2", "nn").detail
    assert find(gates, "c2", "isa").status is Status.NOT_APPLICABLE
    assert find(gates, "c2, c3", "isa").status is Status.NOT_RUN
    # What does not apply does not stand in the way; what did not run does.
    assert overall([g for g in gates if g.condition == "c2"]) is Status.NOT_RUN


def test_a_control_that_does_not_apply_has_not_succeeded() -> None:
    absent = outcome("nn", float("nan"), applicable=False, reason="r")
    gates = evaluate(results({"c0": {**PLAIN, "nn": absent}, "c2": HIDDEN, "c3": HIDDEN}), ATTACKS)
    assert find(gates, "c0", "nn").status is Status.NOT_RUN
    assert find(gates, "c2", "nn").status is Status.NOT_INTERPRETABLE


def test_an_uninterpretable_outcome_is_no_pass() -> None:
    weak = outcome("ima-transformer", 0.0, interpretable=False, reason="reached 12 % on plain operands")
    gates = evaluate(results({"c0": PLAIN, "c2": {**HIDDEN, "ima-transformer": weak}, "c3": HIDDEN}), ATTACKS)
    gate = find(gates, "c2", "ima-transformer")
    assert gate.status is Status.NOT_INTERPRETABLE
    assert "12 %" in gate.detail


def test_haar_and_hd3_must_agree() -> None:
    gates = evaluate(
        results({"c0": PLAIN, "c2": HIDDEN, "c3": HIDDEN | {"isa": 0.08, "nn": 0.04, "metadata": 0.2}}),
        ATTACKS,
    )
    assert find(gates, "c2, c3", "isa").status is Status.FAIL
    assert find(gates, "c2, c3", "nn").status is Status.PASS
    assert not [g for g in gates if g.attack == "metadata"]


@pytest.mark.parametrize(
    ("value", "interval", "expected"),
    [
        (0.0, None, True),
        (0.009, None, True),
        (0.02, None, False),
        (0.2, (-0.05, 0.4), True),
        (0.3, (0.05, 0.5), False),
        (0.005, (0.001, 0.01), True),
        (-0.3, (-0.5, -0.1), True),
    ],
)
def test_at_chance(value: float, interval: tuple[float, float] | None, expected: bool) -> None:
    assert at_chance(outcome("bank", value, interval=interval)) is expected


def test_gates_are_plain_json() -> None:
    import json

    gates = evaluate(results({"c0": PLAIN}), ATTACKS)
    stored = json.loads(json.dumps([g.as_json() for g in gates], allow_nan=False))
    assert {g["status"] for g in stored} == {"pass", "not run"}
