"""A worker process that dies in the middle of an answer, and one that takes its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tee_runner.errors import WorkerUnavailableError
from tee_runner.models import LoadedModel
from tee_runner.worker.client import TransportName

from .conftest import chat
from .processes import WorkerProcess, start_worker
from .running import Answer, running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TOKENS = 10


@pytest.fixture
def workers() -> Iterator[list[WorkerProcess]]:
    """Whatever is started here is ended."""
    started: list[WorkerProcess] = []
    yield started
    for worker in started:
        worker.kill()


def assert_lost(answer: Answer) -> None:
    finish = answer.finish
    assert finish is not None
    assert finish.reason == "error"
    assert isinstance(finish.error, WorkerUnavailableError)
    assert finish.error.fault == "worker"
    assert finish.completion_tokens == len(answer.tokens) < TOKENS


@pytest.mark.parametrize(
    ("transport", "protection"), [("slab", "gelo-hd3"), ("grpc", "gelo-haar"), ("slab", "lpn")]
)
def test_killed_and_restarted(
    model: LoadedModel, workers: list[WorkerProcess], transport: TransportName, protection: str
) -> None:
    first = start_worker()
    workers.append(first)
    prompts = [chat(model, "Name three rivers in Europe."), chat(model, "What is a prime number?")]
    with running(model, first.address, protection, transport=transport) as served:
        before = served.generate(prompts, TOKENS)
        assert [len(answer.tokens) for answer in before] == [TOKENS, TOKENS]

        lost = served.generate(prompts, TOKENS, on_token=lambda total: first.kill() if total == 6 else None)
        for answer, whole in zip(lost, before, strict=True):
            assert_lost(answer)
            # What had arrived until then was right.
            assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert not served.runtime.connected
        assert served.runtime.cache.free_slots == served.runtime.options.max_sequences
        assert served.scheduler.stats.failures == 2

        # Nobody listens: the next request fails too, and soon.
        (refused,) = served.generate(prompts[:1], TOKENS)
        assert_lost(refused)
        assert not refused.tokens

        second = start_worker(port=first.port)
        workers.append(second)
        after = served.generate(prompts, TOKENS)
        assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
        assert [answer.text for answer in after] == [answer.text for answer in before]
        assert served.runtime.connected


def test_a_restart_between_requests_costs_one_request(
    model: LoadedModel, workers: list[WorkerProcess]
) -> None:
    """The runner notices the restart when it next needs the worker."""
    first = start_worker()
    workers.append(first)
    prompt = chat(model, "What is a prime number?")
    with running(model, first.address, "plain") as served:
        (before,) = served.generate([prompt], TOKENS)
        first.kill()
        second = start_worker(port=first.port)
        workers.append(second)
        (lost,) = served.generate([prompt], TOKENS)
        assert_lost(lost)
        (after,) = served.generate([prompt], TOKENS)
        assert after.tokens == before.tokens
