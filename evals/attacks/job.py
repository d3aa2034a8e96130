"""One process of a run: it captures, and attacks what it captured.

python -m evals.attacks.job FD

``FD`` is a connection to :mod:`evals.attacks.pool`, which sends a :class:`Setup`, then one :class:`Task`
after another. It ends when the connection does.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from evals.attacks import kept
from evals.attacks.capture import RecordingWorker, capture, recording_worker, view, weight_places
from evals.attacks.conditions import CONDITIONS, Condition, Place
from evals.attacks.corpus import Corpus, corpus
from evals.attacks.drivers import ATTACKS
from evals.attacks.game import EACH, game_corpus
from evals.attacks.messages import Attacked, Captured, Failed, Finished, Progressed, Setup, Task
from evals.attacks.model import Attack, CorpusName, Report, Truth, View
from evals.attacks.public import PublicModel
from evals.attacks.results import CaptureRecord, Result, stored_outcome
from tee_runner.models import LoadedModel, load_model

# Texts of 256, 1024 and 2048 tokens; the first one runs several times under fresh masks.
_LONG_TEXTS: Final = 3
# Prompts of the short corpus per set of batches that decode.
_PROMPTS_PER_DECODE: Final = 64
# The game is decided on the first offloads: many captures, each of few offloads.
_GAME_OFFLOADS: Final = 5
# Results are functions of operands and public weights. They are kept, to check that, of so many prompts.
_PROMPTS_WITH_RESULTS: Final = 64
_REPORT_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What a process needs for all its tasks. ``known``: places of the weights by digest."""

    model: LoadedModel
    public: PublicModel
    known: Mapping[str, Place]
    worker: RecordingWorker


def perform(task: Task, setup: Setup, bench: _Bench, connection: Connection) -> None:
    """Capture, run the attacks, and tell the parent of each.

    Raises:
        CaptureError, WorkerError: captures could not be made.
    """
    condition = CONDITIONS[task.condition]
    model = bench.model
    texts = _corpus(task.corpus, model, setup)
    begin = time.perf_counter()
    captures, truth = capture(
        model,
        condition,
        texts,
        seed=setup.seed,
        results=task.corpus == "short" and setup.prompts <= _PROMPTS_WITH_RESULTS,
        places=_places(condition, model, task.corpus),
        known=bench.known,
        worker=bench.worker,
        progress=_reporter(connection, f"{task}: capture"),
    )
    offloads = [o for c in captures for o in c.offloads]
    record = CaptureRecord(
        captures=len(captures),
        offloads=len(offloads),
        operand_bytes=sum(o.operand.nbytes for o in offloads),
        seconds=time.perf_counter() - begin,
    )
    connection.send(Captured(record))
    seen = view(condition, texts, captures, bench.public)
    for name in task.attacks:
        progress = _reporter(connection, f"{task}: {name}")
        result = attacked(ATTACKS[name], seen, truth, setup.seed, setup.source, progress)
        connection.send(Attacked(name, result))


def attacked(attack: Attack, seen: View, truth: Truth, seed: int, source: str, progress: Report) -> Result:
    """Run one attack. What it raises is recorded, and ends nothing."""
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


def _corpus(name: CorpusName, model: LoadedModel, setup: Setup) -> Corpus:
    if name == "game":
        return game_corpus(EACH, model.tokenizer, setup.seed)
    sizes = {
        "short": setup.prompts,
        "long": _LONG_TEXTS,
        "decode": max(1, setup.prompts // _PROMPTS_PER_DECODE),
    }
    return corpus(name, sizes[name], model.tokenizer, setup.seed)


def _places(condition: Condition, model: LoadedModel, name: CorpusName) -> tuple[Place, ...]:
    places = condition.places(model.config.num_layers, name)
    return places[:_GAME_OFFLOADS] if name == "game" else places


def _reporter(connection: Connection, current: str) -> Report:
    """Sends progress, not more often than anyone can see."""
    last = time.perf_counter()
    connection.send(Progressed(current, 0.0))

    def report(fraction: float) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= _REPORT_S:
            last = now
            connection.send(Progressed(current, fraction))

    return report


class _Closed(Exception):  # noqa: N818 - the usual end, not an error
    """The parent has gone, or has no more to do."""


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise _Closed from None


def serve(connection: Connection) -> None:
    """Do tasks until the parent closes the connection."""
    setup: Setup = _received(connection)
    kept.share(setup.shared)
    model = load_model(setup.directory)
    with recording_worker() as worker:
        bench = _Bench(
            model=model,
            public=PublicModel(model.config, model.weights, tokenizer=model.tokenizer),
            known=weight_places(model.weights),
            worker=worker,
        )
        while True:
            task: Task = _received(connection)
            perform(task, setup, bench, connection)
            connection.send(Finished())


def main(arguments: list[str]) -> None:
    """See the module."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    connection = Connection(int(arguments[0]))
    try:
        serve(connection)
    except _Closed:
        pass
    except Exception as error:
        failed = Failed(f"{type(error).__name__}: {error}", getattr(error, "remedy", ""))
        with contextlib.suppress(OSError):
            connection.send(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
