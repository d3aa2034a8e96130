"""A scheduler over a runtime double."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tee_runner.engine.runtime import Runtime
from tee_runner.engine.scheduler import Scheduler

from .doubles import FakeRuntime

Start = Callable[..., tuple[Scheduler, FakeRuntime]]


@pytest.fixture
def make() -> Iterator[Start]:
    """A scheduler that is not started yet; stopped at the end."""
    made: list[Scheduler] = []

    def build(*, queue_limit: int = 64, **settings: Any) -> tuple[Scheduler, FakeRuntime]:
        runtime = FakeRuntime(**settings)
        scheduler = Scheduler(cast(Runtime, runtime), queue_limit=queue_limit)
        made.append(scheduler)
        return scheduler, runtime

    yield build
    for scheduler in made:
        scheduler.stop()
