"""Continuous batching over a runtime double whose answers depend on every token it was fed."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.engine.runtime import Runtime
from tee_runner.engine.sampling import SamplingParams
from tee_runner.engine.scheduler import Scheduler
from tee_runner.engine.sequence import Event, GenerationRequest
from tee_runner.errors import CapacityError, InvalidRequestError
from tee_runner.protection.gelo.haar import Haar
from tee_runner.protection.gelo.hd3 import Hd3
from tee_runner.protection.plain import Plain

from .conftest import Start
from .doubles import PATIENCE, VOCAB, Client, FakeRuntime, answer, prompt_of, request


def test_one_request(make: Start) -> None:
    scheduler, runtime = make()
    client = Client()
    scheduler.submit(request([3, 1, 4], 6), client)
    scheduler.start()
    end = client.wait()
    scheduler.stop()
    assert client.tokens == answer([3, 1, 4], 6)
    assert (end.reason, end.prompt_tokens, end.completion_tokens, end.error) == ("length", 3, 6, None)
    # One pass for the prompt, one per further token; the last token is never fed.
    assert [batch.counts for batch in runtime.batches] == [[3], *[[1]] * 5]
    assert runtime.cache.free_slots == 4
    assert not runtime.cache.keys[0].any()
    stats = scheduler.stats
    assert (stats.requests, stats.failures, stats.prompt_tokens, stats.generated_tokens) == (1, 0, 3, 6)
    assert (stats.steps, stats.running, stats.waiting) == (6, 0, 0)


def test_requests_are_batched_and_do_not_mix(make: Start) -> None:
    scheduler, runtime = make(slots=3, step_rows=50)
    work = [(prompt_of(i, length), count) for i, (length, count) in enumerate(
        [(4, 9), (170, 3), (1, 12), (60, 1), (33, 7), (2, 2), (200, 5)]
    )]  # fmt: skip
    clients = [Client() for _ in work]
    for (prompt, count), client in zip(work, clients, strict=True):
        scheduler.submit(request(prompt, count), client)
    scheduler.start()
    for (prompt, count), client in zip(work, clients, strict=True):
        assert client.wait().reason == "length"
        assert client.tokens == answer(prompt, count)
    assert max(len(batch.counts) for batch in runtime.batches) == 3
    assert any({1} < set(batch.counts) for batch in runtime.batches)  # decode next to prefill
    for batch in runtime.batches:
        assert sum(count for count in batch.counts if count > 1) <= 50


def test_a_request_joins_while_others_decode(make: Start) -> None:
    scheduler, runtime = make()
    first, second = Client(), Client()

    def join(step: int) -> None:
        if step == 5:
            scheduler.submit(request([9, 9], 4), second)

    runtime.before_step = join
    scheduler.submit(request([1, 2], 20), first)
    scheduler.start()
    assert first.wait().reason == second.wait().reason == "length"
    assert first.tokens == answer([1, 2], 20)
    assert second.tokens == answer([9, 9], 4)
    assert runtime.batches[6].counts == [1, 2]  # in the very next step


def test_a_long_prompt_does_not_stall_those_who_decode(make: Start) -> None:
    scheduler, runtime = make(step_rows=16)
    talker, reader = Client(), Client()
    scheduler.submit(request([5], 40), talker)
    scheduler.submit(request(prompt_of(1, 400), 2), reader)
    scheduler.start()
    talker.wait()
    reader.wait()
    # 400 rows at 16 a step: 25 steps, and the other one advanced in each of them.
    assert [batch.counts for batch in runtime.batches[:25]] == [[1, 16]] * 25
    assert talker.tokens == answer([5], 40)
    assert reader.tokens == answer(prompt_of(1, 400), 2)


def test_prompts_share_the_rows_of_a_step_in_order(make: Start) -> None:
    scheduler, runtime = make(step_rows=16)
    clients = [Client() for _ in range(3)]
    for i, (client, length) in enumerate(zip(clients, (40, 20, 30), strict=True)):
        scheduler.submit(request(prompt_of(i, length), 1), client)
    scheduler.start()
    for client in clients:
        client.wait()
    # 40 = 16 + 16 + 8, then 8 + 12 of the second, 4 + 16 + 10 of the third.
    assert [batch.counts for batch in runtime.batches] == [[16], [16], [8, 8], [12, 4], [16], [10]]


def test_slots_go_to_requests_in_order(make: Start) -> None:
    scheduler, runtime = make(slots=2)
    order: list[int] = []
    clients = []
    for i in range(8):
        client = Client()

        def sink(event: Event, i: int = i, client: Client = client) -> None:
            if not client.events:
                order.append(i)
            client(event)

        scheduler.submit(request(prompt_of(i, 3 + i), 2 + i % 3), sink)
        clients.append(client)
    assert scheduler.stats.waiting == 8
    scheduler.start()
    for client in clients:
        client.wait()
    assert order == sorted(order)
    assert max(len(batch.slots) for batch in runtime.batches) == 2


def test_queue_limit(make: Start) -> None:
    scheduler, _ = make(slots=1, queue_limit=3)
    clients = [Client() for _ in range(3)]
    for client in clients:
        scheduler.submit(request([1]), client)
    with pytest.raises(CapacityError, match="full"):
        scheduler.submit(request([1]), Client())
    assert scheduler.stats.requests == 3
    scheduler.start()
    for client in clients:
        client.wait()
    late = Client()
    scheduler.submit(request([1]), late)
    assert late.wait().reason == "length"


@pytest.mark.parametrize(
    "bad",
    [
        request([]),
        request([1], 0),
        request([1], -3),
        request([1] * 101, 1),
        request([1] * 50, 51),
        request([1, VOCAB]),
        request([-1, 1]),
    ],
)
def test_requests_that_cannot_be_served_are_refused_at_once(make: Start, bad: GenerationRequest) -> None:
    scheduler, _ = make(max_len=100)
    with pytest.raises(InvalidRequestError):
        scheduler.submit(bad, Client())
    assert scheduler.stats.requests == scheduler.stats.waiting == 0


def test_the_context_can_be_filled_to_the_last_token(make: Start) -> None:
    scheduler, _ = make(max_len=100)
    client = Client()
    scheduler.submit(request(prompt_of(1, 60), 40), client)
    scheduler.start()
    assert client.wait().reason == "length"
    assert client.tokens == answer(prompt_of(1, 60), 40)


def test_seeded_sampling_is_independent_of_the_batch(make: Start) -> None:
    drawn = []
    sampling = SamplingParams(temperature=30.0, seed=5)
    for others in (0, 3):
        scheduler, _ = make()
        clients = [Client() for _ in range(1 + others)]
        for i, client in enumerate(clients[1:]):
            scheduler.submit(request([i], 15, sampling=SamplingParams(temperature=1.0)), client)
        scheduler.submit(request([1, 2], 12, sampling=sampling, ignore_eos=True), clients[0])
        scheduler.start()
        clients[0].wait()
        drawn.append(clients[0].tokens)
        scheduler.stop()
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 3


def test_the_scheme_works_ahead_only_while_nothing_runs(make: Start) -> None:
    scheduler, runtime = make()
    scheduler.start()
    assert runtime.idled.wait(PATIENCE)
    client = Client()
    runtime.before_step = lambda step: runtime.idled.clear() if step == 0 else None
    seen: list[bool] = []
    runtime.override = lambda history: seen.append(runtime.idled.is_set())
    scheduler.submit(request([1], 30), client)
    client.wait()
    assert seen == [False] * 30
    assert runtime.idled.wait(PATIENCE)


@pytest.mark.parametrize("scheme", [Plain, Haar, Hd3])
@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 6)), min_size=1, max_size=9),
    slots=st.integers(1, 5),
    step_rows=st.sampled_from([1, 7, 24, 56, 100]),
)
def test_every_request_is_answered_within_the_buffers(
    scheme: Any, work: list[tuple[int, int]], slots: int, step_rows: int
) -> None:
    runtime = FakeRuntime(slots=slots, step_rows=step_rows, scheme=scheme)
    scheduler = Scheduler(cast(Runtime, runtime))
    clients = [Client() for _ in work]
    for i, ((length, count), client) in enumerate(zip(work, clients, strict=True)):
        scheduler.submit(request(prompt_of(i, length), count), client)
    scheduler.start()
    for i, ((length, count), client) in enumerate(zip(work, clients, strict=True)):
        assert client.wait().reason == "length"
        assert client.tokens == answer(prompt_of(i, length), count)
    scheduler.stop()
    # The double checks the operand's rows; here, that each step did at least its share.
    rows = sum(length + count - 1 for length, count in work)
    assert sum(len(batch.tokens) for batch in runtime.batches) == rows
    for batch in runtime.batches:
        assert sum(count for count in batch.counts if count > 1) <= step_rows
    # Logits are asked for where a token is drawn, and nowhere else.
    assert sum(sum(batch.sampled) for batch in runtime.batches) == sum(count for _, count in work)
    assert runtime.cache.free_slots == slots
