"""How requests end: by a token, by a stop string, cancelled, or failed, and that the others go on."""

from __future__ import annotations

import threading

import pytest

from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest
from tee_runner.errors import CapacityError, GeloError, WorkerError

from .conftest import Start
from .doubles import EOS, PATIENCE, Client, Letters, answer, request


def test_cancelling_a_running_request_frees_its_slot(make: Start) -> None:
    scheduler, runtime = make(slots=1)
    first, second = Client(), Client()
    running = scheduler.submit(request([1, 2], 1000), first)
    scheduler.submit(request([3], 3), second)

    def cancel(step: int) -> None:
        if step == 4:
            running.cancel()

    runtime.before_step = cancel
    scheduler.start()
    end = first.wait()
    assert (end.reason, end.completion_tokens) == ("cancelled", 5)
    assert first.tokens == answer([1, 2], 5)
    assert second.wait().reason == "length"
    assert second.tokens == answer([3], 3)
    scheduler.stop()
    assert not runtime.cache.keys[0].any()


def test_cancelling_a_waiting_request(make: Start) -> None:
    scheduler, runtime = make(slots=1)
    first, second, third = Client(), Client(), Client()
    scheduler.submit(request([1], 3), first)
    scheduler.submit(request([2], 3), second).cancel()
    scheduler.submit(request([3], 3), third)
    scheduler.start()
    assert second.wait().reason == "cancelled"
    assert second.tokens == []
    assert first.wait().reason == third.wait().reason == "length"
    assert not any(2 in batch.tokens[:1] and len(batch.tokens) > 1 for batch in runtime.batches)
    assert third.tokens == answer([3], 3)


@pytest.mark.parametrize("internal", [False, True])
def test_a_failed_pass_fails_its_requests_and_no_others(make: Start, internal: bool) -> None:
    scheduler, runtime = make(slots=2)
    clients = [Client() for _ in range(4)]
    error = RuntimeError("a secret") if internal else WorkerError("The worker is gone.")

    def fail(step: int) -> None:
        if step == 2:
            runtime.before_step = lambda step: None
            raise error

    runtime.before_step = fail
    for i, client in enumerate(clients):
        scheduler.submit(request([i + 1], 5), client)
    scheduler.start()
    for client in clients[:2]:
        end = client.wait()
        assert end.reason == "error"
        assert isinstance(end.error, GeloError)
        assert internal or end.error is error
        assert "secret" not in str(end.error)
        assert len(client.tokens) == 2
    for i, client in enumerate(clients[2:], start=3):
        assert client.wait().reason == "length"
        assert client.tokens == answer([i], 5)
    scheduler.stop()
    assert scheduler.stats.failures == 2
    assert runtime.cache.free_slots == 2
    assert not runtime.cache.keys[0].any()


def test_a_receiver_that_fails_does_not_stop_the_others(make: Start) -> None:
    scheduler, runtime = make()

    def broken(event: Event) -> None:
        raise RuntimeError("the client is gone")

    client = Client()
    scheduler.submit(request([1], 50), broken)
    scheduler.submit(request([2], 8), client)
    scheduler.start()
    assert client.wait().reason == "length"
    assert client.tokens == answer([2], 8)
    later = Client()
    scheduler.submit(request([3], 2), later)
    assert later.wait().reason == "length"
    scheduler.stop()
    assert runtime.cache.free_slots == 4


def test_a_text_decoder_that_fails_does_not_stop_the_others(make: Start) -> None:
    class Broken(Letters):
        def push(self, token_id: int) -> str:
            raise ValueError("a secret")

    scheduler, runtime = make()
    bad, good = Client(), Client()
    runtime.model.tokenizer.incremental_decoder = Broken
    scheduler.submit(request([1], 50), bad)
    runtime.model.tokenizer.incremental_decoder = Letters
    scheduler.submit(request([2], 8), good)
    scheduler.start()
    end = bad.wait()
    assert end.reason == "error"
    assert "secret" not in str(end.error)
    assert good.wait().reason == "length"
    assert good.tokens == answer([2], 8)
    scheduler.stop()
    assert scheduler.stats.failures == 1
    assert runtime.cache.free_slots == 4


def test_end_of_sequence(make: Start) -> None:
    scheduler, runtime = make()
    stopping, ignoring = Client(), Client()
    runtime.override = lambda history: EOS if len(history) == 4 else None
    scheduler.submit(request([1, 2], 9), stopping)
    scheduler.submit(request([3, 4], 4, ignore_eos=True), ignoring)
    scheduler.start()
    end = stopping.wait()
    assert (end.reason, end.completion_tokens) == ("stop", 3)
    assert stopping.tokens == answer([1, 2], 2)
    assert ignoring.wait().reason == "length"
    assert ignoring.tokens[2] == EOS
    assert len(ignoring.tokens) == 4


def test_stop_string_ends_the_request_and_frees_the_slot(make: Start) -> None:
    scheduler, _ = make(slots=1)
    text = "".join(Letters().push(token) for token in answer([7], 30))
    stop = text[10:13]
    client, other = Client(), Client()
    scheduler.submit(request([7], 30, stop=(stop,)), client)
    scheduler.submit(request([8], 2), other)
    scheduler.start()
    assert client.wait().reason == "stop"
    assert "".join(event.text for event in client.events) == text[: text.index(stop)]
    assert other.wait().reason == "length"


def test_stop_cancels_what_runs_and_waits(make: Start) -> None:
    scheduler, runtime = make(slots=2)
    clients = [Client() for _ in range(4)]
    reached = threading.Event()
    go_on = threading.Event()

    def pause(step: int) -> None:
        if step == 3:
            reached.set()
            assert go_on.wait(PATIENCE)

    runtime.before_step = pause
    for i, client in enumerate(clients):
        scheduler.submit(request([i], 1000), client)
    scheduler.start()
    assert reached.wait(PATIENCE)
    stopper = threading.Thread(target=scheduler.stop)
    stopper.start()
    go_on.set()
    stopper.join(PATIENCE)
    assert not stopper.is_alive()
    for client in clients:
        assert client.wait().reason == "cancelled"
        assert sum(isinstance(event, FinishEvent) for event in client.events) == 1
    assert clients[2].tokens == clients[3].tokens == []
    assert runtime.cache.free_slots == 2
    assert not runtime.cache.keys[0].any()
    with pytest.raises(CapacityError, match="shutting down"):
        scheduler.submit(request([1]), Client())


def test_a_failure_in_the_engine_itself_fails_the_request_and_not_the_engine(make: Start) -> None:
    scheduler, runtime = make()
    scheduler.start()
    # Accounting comes after the forward pass, outside the paths that expect failures.
    profile, runtime.profile = runtime.profile, None  # type: ignore[assignment]
    failed, served = Client(), Client()
    scheduler.submit(GenerationRequest(prompt=(5, 6), max_tokens=3), failed)
    end = failed.wait()
    assert (end.reason, type(end.error)) == ("error", GeloError)
    runtime.profile = profile
    scheduler.submit(GenerationRequest(prompt=(5, 6), max_tokens=3), served)
    assert served.wait().reason == "length"
