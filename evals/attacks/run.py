"""Runs attacks: each condition's captures are made once per corpus, then every attack sees them.

Conditions and corpora are spread over processes, see :mod:`evals.attacks.pool`. Results are stored after
every attack. A run into a directory that holds results goes on with what is missing; what raised is tried
again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar, get_args

import evals
import gelo
import gpu_worker
import tee_runner
from evals.attacks.conditions import CONDITIONS, Condition
from evals.attacks.drivers import ATTACKS
from evals.attacks.gates import evaluate
from evals.attacks.messages import Attacked, Captured, Finished, Progressed, Setup, Task
from evals.attacks.model import Attack, CorpusName
from evals.attacks.pool import messages
from evals.attacks.results import FILE_NAME, ConditionRecord, Results, ResultsError, Settings, load
from tee_runner.models import LoadedModel

_VERSIONED: Final = ("gelo-llm", "numpy", "numba", "scipy", "torch")

Named = TypeVar("Named")


# Told how far a run is: done of total units of work, and what each process is at, with its fraction.
Progress = Callable[[int, int, Mapping[int, tuple[str, float]]], object]


def no_progress(done: int, total: int, running: Mapping[int, tuple[str, float]]) -> None:
    """Report to nobody."""


def default_jobs() -> int:
    """A process for each core."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run. ``prompts``: size of the short corpus. ``redo``: run again what has a result.

    ``jobs``: processes, each of which needs about 3 GB at 64 prompts; results do not depend on it.
    """

    conditions: Sequence[str]
    attacks: Sequence[str]
    prompts: int
    seed: int
    out: Path
    redo: bool = False
    jobs: int = 1


def attack_corpora() -> dict[str, tuple[CorpusName, ...]]:
    """The corpora of every attack, for :func:`evals.attacks.gates.evaluate`."""
    return {name: attack.corpora for name, attack in ATTACKS.items()}


def condition_corpora(condition: Condition) -> tuple[CorpusName, ...]:
    """The corpora of a condition. Whatever prefills short prompts also plays the game."""
    game: tuple[CorpusName, ...] = ("game",) if "short" in condition.corpora else ()
    return (*condition.corpora, *game)


def run(model: LoadedModel, options: Options, progress: Progress = no_progress) -> Results:
    """Run what is missing of ``options``; returns all results in ``options.out``.

    An attack that raises is recorded with its error and does not end the run.

    Raises:
        ResultsError: the directory holds results of other settings, or a name is unknown.
        JobError: captures could not be made, or a process ended.
    """
    conditions = _known(options.conditions, CONDITIONS, "condition")
    attacks = _known(options.attacks, ATTACKS, "attack")
    results = _results(model, options)
    for condition in conditions:
        results.conditions[condition.name] = _condition_record(condition)
    # Captures of the game are few and small: at the end, they leave no process idle for long.
    tasks = sorted(_tasks(results, conditions, attacks, redo=options.redo), key=lambda t: t.corpus == "game")
    _save(results, options.out)
    if not tasks:
        return results
    total, done = sum(1 + len(task.attacks) for task in tasks), 0
    running: dict[int, tuple[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="gelo-attack-") as shared:
        setup = Setup(
            directory=model.directory,
            prompts=options.prompts,
            seed=options.seed,
            source=source_digest(),
            shared=Path(shared),
        )
        for job, task, message in messages(tasks, setup, options.jobs):
            match message:
                case Progressed(current, fraction):
                    running[job] = current, fraction
                case Captured(record):
                    results.captures[task.condition, task.corpus] = record
                    done += 1
                case Attacked(attack, result):
                    results.results[task.condition, attack, task.corpus] = result
                    _save(results, options.out)
                    done += 1
                case Finished():
                    running.pop(job, None)
            progress(done, total, running)
    return results


def source_digest() -> str:
    """SHA-256 over the code that decides results, hexadecimal: harness, runner, worker, wire."""
    digest = hashlib.sha256()
    for package in (evals, gelo, gpu_worker, tee_runner):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of what computes."""
    return {"python": platform.python_version(), **{name: version(name) for name in _VERSIONED}}


def _known(names: Sequence[str], known: Mapping[str, Named], kind: str) -> list[Named]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ResultsError(f"There is no {kind} {unknown[0]!r}.", remedy=f"Choose from: {', '.join(known)}.")
    return [known[name] for name in known if name in names]


def _results(model: LoadedModel, options: Options) -> Results:
    settings = Settings(
        seed=options.seed,
        prompts=options.prompts,
        model=model.directory.name,
        model_identity=model.identity.hex(),
        versions=versions(),
    )
    if not (options.out / FILE_NAME).exists():
        machine: dict[str, str | int] = {
            "processors": os.cpu_count() or 0,
            "architecture": platform.machine(),
        }
        return Results(settings=settings, machine=machine)
    results = load(options.out)
    for name in Settings.__dataclass_fields__:
        before, now = getattr(results.settings, name), getattr(settings, name)
        if before != now:
            raise ResultsError(
                f"{options.out} holds results with another {name.replace('_', ' ')}: {before}, not {now}.",
                remedy="Choose another --out, or the same settings to go on.",
            )
    return results


def _condition_record(condition: Condition) -> ConditionRecord:
    return ConditionRecord(
        title=condition.title,
        scheme=condition.base.name,
        parameters=condition.public_parameters(),
        corpora=condition_corpora(condition),
        is_control=condition.is_control,
    )


def _tasks(
    results: Results, conditions: Sequence[Condition], attacks: Sequence[Attack], *, redo: bool
) -> Iterator[Task]:
    for condition in conditions:
        for name in condition_corpora(condition):
            missing = tuple(
                attack.name
                for attack in attacks
                if name in attack.corpora
                and (redo or results.outcome(condition.name, attack.name, name) is None)
            )
            if missing:
                yield Task(condition.name, name, missing)


def _save(results: Results, out: Path) -> None:
    """In the order of conditions, corpora and attacks, whichever process was first."""
    corpora = get_args(CorpusName)

    def order(condition: str, corpus: CorpusName, attack: str = "") -> tuple[int, ...]:
        return _rank(CONDITIONS, condition), _rank(corpora, corpus), _rank(ATTACKS, attack)

    results.captures = dict(sorted(results.captures.items(), key=lambda item: order(*item[0])))
    results.results = dict(
        sorted(results.results.items(), key=lambda item: order(item[0][0], item[0][2], item[0][1]))
    )
    results.save(out, [gate.as_json() for gate in evaluate(results, attack_corpora())])


def _rank(names: Iterable[str], name: str) -> int:
    """Where ``name`` stands; what an older version knew comes last."""
    known = list(names)
    return known.index(name) if name in known else len(known)
