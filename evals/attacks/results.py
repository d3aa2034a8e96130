"""Results of a run on disk: one JSON file, written anew after every attack, so that a run can go on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from evals.attacks.model import CorpusName, Curve, Outcome, Plot

FILE_NAME: Final = "results.json"
_FORMAT: Final = 1
# Longest curve that is stored; longer ones are thinned evenly.
_CURVE_POINTS: Final = 257

Key = tuple[str, str, CorpusName]


class ResultsError(ValueError):
    """A results file that is missing, damaged, or of another run."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides a run's numbers: equal settings give equal numbers, but for measured times."""

    seed: int
    prompts: int
    model: str
    model_identity: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRecord:
    """A condition as it was run. ``corpora`` are those it has, whether or not they were asked for."""

    title: str
    scheme: str
    parameters: Mapping[str, int | float | str]
    corpora: tuple[CorpusName, ...]
    is_control: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One attack on one corpus under one condition. ``outcome`` None: it raised ``error``.

    ``source`` is the digest of the code that made it, see :func:`evals.attacks.run.source_digest`.
    """

    outcome: Outcome | None
    seconds: float
    source: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """What was captured of one corpus, and how long it took."""

    captures: int
    offloads: int
    operand_bytes: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Results:
    """All results of a run so far."""

    settings: Settings
    conditions: dict[str, ConditionRecord] = field(default_factory=dict)
    captures: dict[tuple[str, CorpusName], CaptureRecord] = field(default_factory=dict)
    results: dict[Key, Result] = field(default_factory=dict)
    machine: dict[str, str | int] = field(default_factory=dict)
    _texts: dict[Key, tuple[Result, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def outcome(self, condition: str, attack: str, corpus: CorpusName) -> Outcome | None:
        """An attack's outcome; None if it did not run or raised."""
        result = self.results.get((condition, attack, corpus))
        return result.outcome if result else None

    def of(self, attack: str) -> Iterator[tuple[str, CorpusName, Result]]:
        """All results of one attack: condition, corpus, result."""
        for (condition, name, corpus), result in self.results.items():
            if name == attack:
                yield condition, corpus, result

    def sources(self) -> list[str]:
        """Digests of the code that made the results."""
        return sorted({r.source for r in self.results.values()})

    def save(self, directory: Path, gates: Sequence[Mapping[str, Any]] = ()) -> None:
        """Replace the file in ``directory`` in one step; ``gates`` go along for machines to read."""
        document = {
            "format": _FORMAT,
            "settings": asdict(self.settings),
            "machine": self.machine,
            "conditions": {name: asdict(c) for name, c in self.conditions.items()},
            "captures": [
                {"condition": name, "corpus": corpus, **asdict(record)}
                for (name, corpus), record in self.captures.items()
            ],
            "gates": list(gates),
        }
        results = ",\n".join(self._text(key, result) for key, result in self.results.items())
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f"{FILE_NAME}.partial"
        partial.write_text(f'{_json(document)[:-1]}, "results": [\n{results}\n]}}\n')
        os.replace(partial, directory / FILE_NAME)

    def _text(self, key: Key, result: Result) -> str:
        """A result as JSON. Kept: a file of hundreds is written after every one."""
        known = self._texts.get(key)
        if known is None or known[0] is not result:
            condition, attack, corpus = key
            entry = {"condition": condition, "attack": attack, "corpus": corpus, **asdict(result)}
            known = self._texts[key] = result, _json(entry)
        return known[1]


def load(directory: Path) -> Results:
    """What :meth:`Results.save` wrote.

    Raises:
        ResultsError: there is nothing, or it cannot be read.
    """
    path = directory / FILE_NAME
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResultsError(
            f"{directory} holds no attack results.", remedy="Run `gelo attack run` first."
        ) from None
    except ValueError:
        raise ResultsError(f"{path} is not JSON.") from None
    try:
        if document["format"] != _FORMAT:
            raise ResultsError(f"{path} has format {document['format']!r}, not {_FORMAT}.")
        return _parsed(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is not a results file: {error!r}.") from error


def _parsed(document: dict[str, Any]) -> Results:
    results = Results(settings=Settings(**document["settings"]), machine=document["machine"])
    for name, condition in document["conditions"].items():
        condition["corpora"] = tuple(condition["corpora"])
        results.conditions[name] = ConditionRecord(**condition)
    for record in document["captures"]:
        place = record.pop("condition"), record.pop("corpus")
        results.captures[place] = CaptureRecord(**record)
    for entry in document["results"]:
        key: Key = (entry.pop("condition"), entry.pop("attack"), entry.pop("corpus"))
        stored = entry.pop("outcome")
        results.results[key] = Result(outcome=stored and _outcome(stored), **entry)
    return results


def _outcome(stored: dict[str, Any]) -> Outcome:
    for name in ("value", "chance"):
        stored[name] = _number(stored[name])
    if stored["interval"] is not None:
        low, high = stored["interval"]
        stored["interval"] = (_number(low), _number(high))
    stored["details"] = {name: _number(value) for name, value in stored["details"].items()}
    stored["plots"] = tuple(
        Plot(**{**plot, "curves": tuple(Curve(**curve) for curve in plot["curves"])})
        for plot in stored["plots"]
    )
    stored["notes"] = tuple(stored["notes"])
    return Outcome(**stored)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def stored_outcome(outcome: Outcome) -> Outcome:
    """``outcome`` with plain Python numbers and curves of at most 257 points."""
    plots = tuple(
        Plot(
            title=plot.title,
            x_label=plot.x_label,
            y_label=plot.y_label,
            curves=tuple(_thinned(curve) for curve in plot.curves),
            log_x=plot.log_x,
            log_y=plot.log_y,
        )
        for plot in outcome.plots
    )
    interval = outcome.interval
    return Outcome(
        attack=outcome.attack,
        measure=outcome.measure,
        value=float(outcome.value),
        chance=float(outcome.chance),
        interval=None if interval is None else (float(interval[0]), float(interval[1])),
        details={str(name): float(value) for name, value in outcome.details.items()},
        plots=plots,
        notes=tuple(outcome.notes),
        applicable=bool(outcome.applicable),
        interpretable=bool(outcome.interpretable),
        reason=outcome.reason,
    )


def _thinned(curve: Curve) -> Curve:
    count = len(curve.x)
    kept: Sequence[int] = range(count)
    if count > _CURVE_POINTS:
        kept = sorted({round(i * (count - 1) / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)})
    return Curve(label=curve.label, x=[float(curve.x[i]) for i in kept], y=[float(curve.y[i]) for i in kept])


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(_finite(document), allow_nan=False)


def _finite(value: object) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {cast(str, name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
