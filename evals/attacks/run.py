"""Runs attacks: each condition's captures are made once per corpus, then every attack sees them.

Results are stored after every attack. A run into a directory that holds results goes on with what is
missing; what raised is tried again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

import evals
import gelo
import gpu_worker
import tee_runner
from evals.attacks.capture import RecordingWorker, capture, recording_worker, view
from evals.attacks.conditions import CONDITIONS, Condition, Place
from evals.attacks.corpus import Corpus, corpus
from evals.attacks.drivers import ATTACKS
from evals.attacks.game import EACH, game_corpus
from evals.attacks.gates import evaluate
from evals.attacks.model import Attack, CorpusName, Report, Truth, View
from evals.attacks.public import PublicModel
from evals.attacks.results import (
    FILE_NAME,
    CaptureRecord,
    ConditionRecord,
    Key,
    Result,
    Results,
    ResultsError,
    Settings,
    load,
    stored_outcome,
)
from tee_runner.models import LoadedModel

# Texts of 256, 1024 and 2048 tokens; the first one runs several times under fresh masks.
_LONG_TEXTS: Final = 3
# Prompts of the short corpus per set of batches that decode.
_PROMPTS_PER_DECODE: Final = 64
# The game is decided on the first offloads: many captures, each of few offloads.
_GAME_OFFLOADS: Final = 5
# Results are functions of operands and public weights. They are kept, to check that, of so many prompts.
_PROMPTS_WITH_RESULTS: Final = 64
_VERSIONED: Final = ("gelo-llm", "numpy", "numba", "scipy", "torch")

Named = TypeVar("Named")


# Told how far a run is: done of total units of work, the current one, and its fraction.
Progress = Callable[[int, int, str, float], object]


def no_progress(done: int, total: int, current: str, fraction: float) -> None:
    """Report to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run. ``prompts``: size of the short corpus. ``redo``: run again what has a result."""

    conditions: Sequence[str]
    attacks: Sequence[str]
    prompts: int
    seed: int
    out: Path
    redo: bool = False


@dataclass(frozen=True, slots=True)
class _Work:
    """The attacks of one condition that want one corpus."""

    condition: Condition
    corpus: CorpusName
    attacks: tuple[Attack, ...]


class _Meter:
    """Counts units of work; called with the fraction of the current one."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._done, self._current = -1, ""

    def start(self, current: str) -> None:
        """The unit before is done, ``current`` begins."""
        self._done, self._current = self._done + 1, current
        self(0.0)

    def __call__(self, fraction: float) -> None:
        self._progress(self._done, self._total, self._current, fraction)


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
        CaptureError, WorkerError: captures could not be made.
    """
    conditions = _known(options.conditions, CONDITIONS, "condition")
    attacks = _known(options.attacks, ATTACKS, "attack")
    results = _results(model, options)
    for condition in conditions:
        results.conditions[condition.name] = _condition_record(condition)
    work = list(_work(results, conditions, attacks, redo=options.redo))
    public = PublicModel(model.config, model.weights, tokenizer=model.tokenizer)
    source = source_digest()
    meter = _Meter(progress, sum(1 + len(w.attacks) for w in work))
    _save(results, options.out)
    if not work:
        return results
    with recording_worker() as worker:
        for item in work:
            where = f"{item.condition.name}, {item.corpus}"
            meter.start(f"{where}: capture")
            seen, truth, record = _captured(model, public, item, options, worker, meter)
            results.captures[item.condition.name, item.corpus] = record
            for attack in item.attacks:
                meter.start(f"{where}: {attack.name}")
                key: Key = (item.condition.name, attack.name, item.corpus)
                results.results[key] = _attacked(attack, seen, truth, options.seed, source, meter)
                _save(results, options.out)
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


def _work(
    results: Results, conditions: Sequence[Condition], attacks: Sequence[Attack], *, redo: bool
) -> Iterator[_Work]:
    for condition in conditions:
        for name in condition_corpora(condition):
            missing = tuple(
                attack
                for attack in attacks
                if name in attack.corpora
                and (redo or results.outcome(condition.name, attack.name, name) is None)
            )
            if missing:
                yield _Work(condition, name, missing)


def _corpus(name: CorpusName, model: LoadedModel, options: Options) -> Corpus:
    if name == "game":
        return game_corpus(EACH, model.tokenizer, options.seed)
    sizes = {
        "short": options.prompts,
        "long": _LONG_TEXTS,
        "decode": max(1, options.prompts // _PROMPTS_PER_DECODE),
    }
    return corpus(name, sizes[name], model.tokenizer, options.seed)


def _places(condition: Condition, model: LoadedModel, name: CorpusName) -> tuple[Place, ...]:
    places = condition.places(model.config.num_layers, name)
    return places[:_GAME_OFFLOADS] if name == "game" else places


def _captured(
    model: LoadedModel, public: PublicModel, work: _Work, options: Options, worker: RecordingWorker,
    progress: Report,
) -> tuple[View, Truth, CaptureRecord]:  # fmt: skip
    texts = _corpus(work.corpus, model, options)
    begin = time.perf_counter()
    captures, truth = capture(
        model,
        work.condition,
        texts,
        seed=options.seed,
        results=work.corpus == "short" and options.prompts <= _PROMPTS_WITH_RESULTS,
        places=_places(work.condition, model, work.corpus),
        worker=worker,
        progress=progress,
    )
    offloads = [o for c in captures for o in c.offloads]
    record = CaptureRecord(
        captures=len(captures),
        offloads=len(offloads),
        operand_bytes=sum(o.operand.nbytes for o in offloads),
        seconds=time.perf_counter() - begin,
    )
    return view(work.condition, texts, captures, public), truth, record


def _attacked(attack: Attack, seen: View, truth: Truth, seed: int, source: str, progress: Report) -> Result:
    # A generator of its own for every result: which others ran before does not matter.
    names = (seen.condition, attack.name, seen.corpus)
    rng = np.random.default_rng([seed, *(zlib.crc32(name.encode()) for name in names)])
    begin = time.perf_counter()
    try:
        outcome = stored_outcome(attack.run(seen, truth, rng, progress))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Result(
            outcome=None,
            seconds=time.perf_counter() - begin,
            source=source,
            error=f"{type(error).__name__}: {error} ({where})",
        )
    return Result(outcome=outcome, seconds=time.perf_counter() - begin, source=source)


def _save(results: Results, out: Path) -> None:
    results.save(out, [gate.as_json() for gate in evaluate(results, attack_corpora())])
