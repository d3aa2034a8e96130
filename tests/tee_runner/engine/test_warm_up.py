"""What happens before the first request."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine import warm_up as module
from tee_runner.engine.runtime import Runtime
from tee_runner.engine.warm_up import warm_up


class NotingRuntime:
    """Stands in for a runtime of 64 positions whose scheme has some work to do ahead."""

    def __init__(self, ahead: int) -> None:
        self.max_len = 64
        self.cache = self
        self.free = {0}
        self.counts: list[int] = []
        self.left = ahead
        self.done: list[str] = []

    def take(self) -> int:
        return self.free.pop()

    def release(self, slot: int) -> None:
        self.free.add(slot)

    def forward(self, batch: RaggedBatch) -> None:
        assert self.free == set()
        self.counts += batch.counts
        self.done.append("pass")

    def idle(self) -> bool:
        self.done.append("ahead")
        self.left -= 1
        return self.left >= 0

    def reset_stats(self) -> None:
        self.done.append("reset")


def warmed(runtime: NotingRuntime) -> NotingRuntime:
    stages: list[Any] = []
    warm_up(cast(Runtime, runtime), lambda *stage: stages.append(stage))
    assert stages[-1] == ("compile kernels", 3, 3)
    assert runtime.free == {0}
    return runtime


def test_both_kinds_of_prompt_and_a_step_run_and_then_what_is_made_ahead() -> None:
    runtime = warmed(NotingRuntime(ahead=7))
    assert runtime.counts == [2, 1, 63, 1]
    assert runtime.done == ["pass"] * 4 + ["ahead"] * 8 + ["reset"]


def test_work_ahead_does_not_keep_a_service_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AHEAD_S", 0.01)
    runtime = warmed(NotingRuntime(ahead=10**9))
    assert runtime.left > 0
