"""The runner's side of the end-to-end tests: a runtime and its scheduler, driven to the end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.engine.scheduler import Scheduler
from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest, TokenEvent
from tee_runner.models import LoadedModel
from tee_runner.protection.base import Protection
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.worker.client import TransportName

HANG_GUARD_S = 120.0

OnToken = Callable[[int], None]


@dataclass(slots=True)
class Answer:
    """What one request gave: tokens in order, the text, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishEvent | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A served model."""

    scheduler: Scheduler

    @property
    def runtime(self) -> Runtime:
        """Its runtime."""
        return self.scheduler.runtime

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, on_token: OnToken = lambda total: None
    ) -> list[Answer]:
        """Greedy answers to all prompts at once; ``on_token`` is told how many tokens there are."""
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        answers = [Answer() for _ in prompts]
        for index, prompt in enumerate(prompts):
            request = GenerationRequest(prompt=tuple(prompt), max_tokens=max_tokens)
            self.scheduler.submit(request, lambda event, index=index: events.put((index, event)))
        total = 0
        while any(answer.finish is None for answer in answers):
            index, event = events.get(timeout=HANG_GUARD_S)
            answers[index].text += event.text
            if isinstance(event, TokenEvent):
                answers[index].tokens.append(event.token_id)
                total += 1
                on_token(total)
            else:
                answers[index].finish = event
        return answers


@contextmanager
def running(
    model: LoadedModel,
    address: str,
    protection: str,
    *,
    transport: TransportName = "auto",
    scheme: type[Protection] | None = None,
    max_len: int = 512,
    worker_timeout: float = 120.0,
    pools: Path | None = None,
) -> Iterator[Running]:
    """Connect, serve, and stop. ``scheme`` stands in for the class that ``protection`` names.

    ``pools``: where those of `lpn` are kept, if anywhere.
    """
    options = RuntimeOptions(
        worker=address,
        protection=protection,
        transport=transport,
        max_len=max_len,
        worker_timeout=worker_timeout,
        lpn=LpnOptions(pool_directory=pools),
    )
    runtime = Runtime(model, options)
    if scheme is not None:
        runtime.scheme = scheme
    runtime.connect()
    scheduler = Scheduler(runtime)
    scheduler.start()
    try:
        yield Running(scheduler)
    finally:
        scheduler.stop()
        runtime.close()
