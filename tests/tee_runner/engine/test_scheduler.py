"""Continuous batching over a runtime double whose answers depend on every token it was fed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.decoder.config import DecoderConfig, RopeConfig
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.engine.runtime import Runtime
from tee_runner.engine.sampling import SamplingParams
from tee_runner.engine.scheduler import Scheduler
from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest, TokenEvent
from tee_runner.errors import CapacityError, GeloError, InvalidRequestError, WorkerError
from tee_runner.profile import Profile
from tee_runner.protection.gelo.haar import Haar
from tee_runner.protection.gelo.hd3 import Hd3
from tee_runner.protection.plain import Plain

VOCAB = 97
EOS = 96
PATIENCE = 180.0  # only a hang meets it
CONFIG = DecoderConfig(
    family="llama", num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1,
    head_dim=8, vocab_size=VOCAB, max_position_embeddings=4096, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4), tie_word_embeddings=True,
)  # fmt: skip


def following(history: Sequence[int]) -> int:
    """The double's next token: it depends on every token, and on their order."""
    value = 1
    for token in history:
        value = (value * 31 + token) % 9973
    return value % (VOCAB - 1)  # never EOS


def answer(prompt: Sequence[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(following(history))
    return history[len(prompt) :]


class Letters:
    """A text decoder: one letter per token."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return ""


class FakeRuntime:
    """Serves :func:`following` and keeps the batches it was given."""

    def __init__(
        self, *, slots: int = 4, max_len: int = 2000, step_rows: int = 64, scheme: Any = Plain
    ) -> None:
        tokenizer = SimpleNamespace(incremental_decoder=Letters)
        self.model = SimpleNamespace(tokenizer=tokenizer, eos_ids=frozenset({EOS}), config=CONFIG)
        self.max_len = max_len
        self.cache = KvCache(CONFIG, slots=slots, max_len=max_len)
        self.options = SimpleNamespace(step_rows=step_rows, max_sequences=slots)
        self.operand_rows: Callable[[Sequence[int]], int] = scheme.operand_rows
        self.max_operand_rows = scheme.operand_rows([step_rows] + [1] * slots)
        self.profile = Profile()
        self.histories: dict[int, list[int]] = {}
        self.batches: list[RaggedBatch] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.override: Callable[[list[int]], int | None] = lambda history: None
        self.idled = threading.Event()

    def forward(self, batch: RaggedBatch) -> np.ndarray:
        self.before_step(len(self.batches))
        self.batches.append(batch)
        assert len(batch.slots) == len(batch.counts) == len(batch.sampled) == len(set(batch.slots))
        assert self.operand_rows(batch.counts) <= self.max_operand_rows
        logits, row = [], 0
        for slot, count, sampled in zip(batch.slots, batch.counts, batch.sampled, strict=True):
            past = self.cache.reserve(slot, count)
            history = self.histories.get(slot, [])[:past]
            history += batch.tokens[row : row + count].tolist()
            self.histories[slot] = history
            self.cache.keys[0][slot, past : past + count] = 1.0
            self.cache.lengths[slot] = past + count
            row += count
            if sampled:
                own = np.zeros(VOCAB, np.float32)
                chosen = self.override(history)
                own[following(history) if chosen is None else chosen] = 1.0
                logits.append(own)
        assert row == len(batch.tokens)
        return np.array(logits, np.float32).reshape(-1, VOCAB)

    def idle(self) -> bool:
        self.idled.set()
        return False


class Client:
    """Receives one request's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._finished: queue.Queue[FinishEvent] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, FinishEvent):
            self._finished.put(event)

    def wait(self) -> FinishEvent:
        return self._finished.get(timeout=PATIENCE)

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]


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


def request(prompt: Sequence[int], count: int = 5, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt=tuple(prompt), max_tokens=count, **fields)


def prompt_of(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist()
    return tokens


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
