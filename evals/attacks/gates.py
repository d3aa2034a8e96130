"""What must hold, decided by a machine from the results of a run.

A gate whose input is missing is `not run`. A gate that says an attack fails counts only if the same attack
succeeded on plain operands in the same run; otherwise it is `not interpretable`. Neither is a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from evals.attacks.model import CorpusName, Outcome
from evals.attacks.results import Results

CONTROL: Final = "c0"
# What the attacks must reach on plain operands.
CONTROLS: Final[Mapping[str, float]] = {"nn": 0.50, "ima": 0.95, "ima-transformer": 0.50, "row-space": 0.99}
RECOVERY: Final = ("nn", "ima", "isa", "ima-transformer")
RECOVERY_LIMIT: Final = 0.10
# A recovery attack without a control of its own counts only if it reads this much of plain operands.
RECOVERY_CONTROL: Final = 0.50
AT_CHANCE: Final = ("row-space", "leverage", "prefix", "bank", "gram-fingerprint", "distinguish")
# At chance: the 95 % interval reaches down to chance, or the value exceeds chance by no more than this.
CHANCE_MARGIN: Final = 0.01
# HD3 must hide as much as Haar does.
AGREEMENT: Final = ("c2", "c3")
AGREEMENT_LIMIT: Final = 0.05
# Sizes differ by design: HD3 pads to a power of two.
NOT_COMPARED: Final = frozenset({"metadata"})
GRAM: Final = "gram-distance"
GRAM_DISTANCE: Final = 0.5
# Relative error of a Gram matrix of float16 rows: a few times 2⁻¹¹.
GRAM_PLAIN: Final = 2.0**-9

Corpora = Mapping[str, Sequence[CorpusName]]


class Status(StrEnum):
    """Outcome of a gate."""

    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    NOT_RUN = "not run"
    NOT_APPLICABLE = "not applicable"
    NOT_INTERPRETABLE = "not interpretable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One decision. ``rule`` says what was asked, ``detail`` why it came out so."""

    kind: str
    condition: str
    attack: str
    corpus: str
    rule: str
    status: Status
    value: float = math.nan
    chance: float = math.nan
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values; NaN as None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}


def evaluate(results: Results, attacks: Corpora) -> list[Gate]:
    """All gates of the conditions of ``results``; ``attacks`` gives the corpora of each known attack."""
    gates: list[Gate] = []
    for attack in (*CONTROLS, GRAM):
        gates += [_control(results, attack, corpus) for corpus in _corpora(results, CONTROL, attack, attacks)]
    for condition, record in results.conditions.items():
        if record.is_control:
            continue
        for kind, names in (("recovery", RECOVERY), ("hidden Gram", (GRAM,)), ("at chance", AT_CHANCE)):
            for attack in names:
                for corpus in _corpora(results, condition, attack, attacks):
                    gates.append(_hides(results, kind, condition, attack, corpus))
    for attack in attacks:
        if attack not in NOT_COMPARED:
            for corpus in _corpora(results, AGREEMENT[1], attack, attacks):
                gates.append(_agrees(results, attack, corpus))
    return gates


def at_chance(outcome: Outcome) -> bool:
    """Whether the outcome is what knowing nothing gives, see :data:`CHANCE_MARGIN`."""
    if outcome.interval is not None and outcome.interval[0] <= outcome.chance:
        return True
    return outcome.value <= outcome.chance + CHANCE_MARGIN


def overall(gates: Sequence[Gate]) -> Status:
    """One verdict: fail if a gate fails, pass if all that apply pass, otherwise not run."""
    if any(g.status is Status.FAIL for g in gates):
        return Status.FAIL
    applied = [g for g in gates if g.status is not Status.NOT_APPLICABLE]
    if applied and all(g.status is Status.PASS for g in applied):
        return Status.PASS
    return Status.NOT_RUN


def _corpora(results: Results, condition: str, attack: str, attacks: Corpora) -> Sequence[CorpusName]:
    """The corpora that an attack is judged on under a condition; at least one if it is missing."""
    record = results.conditions.get(condition)
    wanted = attacks.get(attack, ("short",))
    if record is None:
        return wanted[:1]
    return [corpus for corpus in wanted if corpus in record.corpora]


def _missing(results: Results, condition: str, attack: str, corpus: CorpusName) -> tuple[Status, str] | None:
    """Why an outcome cannot be judged; None if it can."""
    result = results.results.get((condition, attack, corpus))
    if result is None:
        return Status.NOT_RUN, "no result"
    if result.outcome is None:
        return Status.NOT_RUN, f"the attack raised {result.error}"
    if not result.outcome.applicable:
        return Status.NOT_APPLICABLE, result.outcome.reason
    if math.isnan(result.outcome.value):
        return Status.NOT_RUN, "the outcome has no value"
    return None


def _control(results: Results, attack: str, corpus: CorpusName) -> Gate:
    if attack == GRAM:
        rule = f"distance on plain operands <= {GRAM_PLAIN:.4f}: 0 up to float16"
    else:
        rule = f"on plain operands >= {CONTROLS[attack]:.0%}"
    missing = _missing(results, CONTROL, attack, corpus)
    # A control that does not apply has not succeeded.
    if missing is not None:
        status, detail = missing
        value = math.nan
        if status is Status.NOT_APPLICABLE:
            status = Status.NOT_RUN
    else:
        outcome = results.outcome(CONTROL, attack, corpus)
        assert outcome is not None  # noqa: S101 - not missing
        value, detail = outcome.value, ""
        good = value <= GRAM_PLAIN if attack == GRAM else value >= CONTROLS[attack]
        status = Status.PASS if good else Status.FAIL
        if not outcome.interpretable:
            status, detail = Status.NOT_INTERPRETABLE, outcome.reason
    return Gate(
        kind="control", condition=CONTROL, attack=attack, corpus=corpus, rule=rule, status=status,
        value=value, detail=detail,
    )  # fmt: skip


def _control_failure(results: Results, attack: str, corpus: CorpusName) -> str:
    """Why the attack's failure elsewhere says nothing; empty if its control succeeded."""
    missing = _missing(results, CONTROL, attack, corpus)
    if missing is not None:
        return f"no control: {missing[1]} for {CONTROL}"
    outcome = results.outcome(CONTROL, attack, corpus)
    assert outcome is not None  # noqa: S101 - not missing
    if attack == GRAM:
        return "" if outcome.value <= GRAM_PLAIN else "the distance is not 0 on plain operands"
    needed = CONTROLS.get(attack, RECOVERY_CONTROL if attack in RECOVERY else -math.inf)
    if outcome.value < needed or at_chance(outcome):
        return f"the attack reaches only {outcome.value:.3f} on plain operands"
    return ""


def _hides(results: Results, kind: str, condition: str, attack: str, corpus: CorpusName) -> Gate:
    rules = {
        "recovery": f"<= {RECOVERY_LIMIT:.0%} of the tokens, or at chance",
        "hidden Gram": f"distance >= {GRAM_DISTANCE}",
        "at chance": f"interval reaches chance, or value <= chance + {CHANCE_MARGIN}",
    }
    value = chance = math.nan
    missing = _missing(results, condition, attack, corpus)
    if missing is not None:
        status, detail = missing
    else:
        outcome = results.outcome(condition, attack, corpus)
        assert outcome is not None  # noqa: S101 - not missing
        value, chance, detail = outcome.value, outcome.chance, ""
        good = {
            # A guess of common tokens is right more often than that where few tokens are sought.
            "recovery": value <= RECOVERY_LIMIT or at_chance(outcome),
            "hidden Gram": value >= GRAM_DISTANCE,
            "at chance": at_chance(outcome),
        }[kind]
        status = Status.PASS if good else Status.FAIL
        if good:
            detail = outcome.reason if not outcome.interpretable else ""
            detail = detail or _control_failure(results, attack, corpus)
            if detail or not outcome.interpretable:
                status = Status.NOT_INTERPRETABLE
    return Gate(
        kind=kind, condition=condition, attack=attack, corpus=corpus, rule=rules[kind], status=status,
        value=value, chance=chance, detail=detail,
    )  # fmt: skip


def _agrees(results: Results, attack: str, corpus: CorpusName) -> Gate:
    first, second = AGREEMENT
    value = math.nan
    missing = [m for c in AGREEMENT if (m := _missing(results, c, attack, corpus))]
    if missing:
        # Not applicable only if it is so for both.
        both = all(m[0] is Status.NOT_APPLICABLE for m in missing) and len(missing) == len(AGREEMENT)
        status, detail = (Status.NOT_APPLICABLE if both else Status.NOT_RUN), missing[0][1]
    else:
        outcomes = [results.outcome(c, attack, corpus) for c in AGREEMENT]
        values = [o.value for o in outcomes if o is not None]
        value = abs(values[1] - values[0])
        status = Status.PASS if value <= AGREEMENT_LIMIT else Status.FAIL
        detail = f"{first}: {values[0]:.3f}, {second}: {values[1]:.3f}"
    return Gate(
        kind="agreement", condition=f"{first}, {second}", attack=attack, corpus=corpus,
        rule=f"|{second} - {first}| <= {AGREEMENT_LIMIT}", status=status, value=value, detail=detail,
    )  # fmt: skip
