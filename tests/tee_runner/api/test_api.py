"""The HTTP front-end on a scheduler double: bodies, errors, streaming, limits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from attestation.errors import BadNonceError
from attestation.ratls import ServerIdentity
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement
from tee_runner.api.app import create_app
from tee_runner.api.body_limit import MAX_BODY_BYTES
from tee_runner.api.errors import without_values
from tee_runner.api.metrics import EngineCollector
from tee_runner.engine.scheduler import EngineStats
from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest, TokenEvent
from tee_runner.errors import CapacityError, GeloError, WorkerUnavailableError
from tee_runner.profile import Profile
from tee_runner.worker.transport import WireStats

USER = [{"role": "user", "content": "u"}]


class FakeTokenizer:
    """One id per character."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]], *, variables: dict[str, object]) -> str:
        given = "".join(f"[{name}={value!r}]" for name, value in variables.items())
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + given


@dataclass
class FakeModel:
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)


class FakeRuntime:
    """What the routes read of a runtime."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.connected = True
        self.integrity_failures = 0

        self.profile = Profile()

    def wire_stats(self) -> WireStats:
        return WireStats(offloads=3, bytes_sent=5, bytes_received=7, exchange_ns=11, worker_ns=2)


class FakeSequence:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeScheduler:
    """Plays ``events`` to every request from a thread of its own, as the engine does."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.stats = EngineStats(requests=4, generated_tokens=9)
        self.events: list[Event] = []
        self.refusal: GeloError | None = None
        self.requests: list[GenerationRequest] = []
        self.sequences: list[FakeSequence] = []

    def submit(self, request: GenerationRequest, sink: Callable[[Event], None]) -> FakeSequence:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        sequence = FakeSequence()
        self.sequences.append(sequence)
        threading.Thread(target=lambda: [sink(event) for event in self.events]).start()
        return sequence


def finished(reason: Any = "stop", text: str = "", error: GeloError | None = None) -> FinishEvent:
    return FinishEvent(reason=reason, text=text, prompt_tokens=3, completion_tokens=2, error=error)


@pytest.fixture(scope="module")
def identity() -> ServerIdentity:
    statement = Statement(
        model_identity=bytes(32),
        protection="gelo-hd3",
        protection_parameters={},
        service="gelo",
        software_version="0",
    )
    return ServerIdentity(SimulatedPsp(), statement)


@pytest.fixture
def scheduler() -> FakeScheduler:
    double = FakeScheduler()
    double.events = [
        TokenEvent(token_id=1, text="Hel"),
        TokenEvent(token_id=2, text="lo"),
        finished(text="!"),
    ]
    return double


@pytest.fixture
def app(scheduler: FakeScheduler, identity: ServerIdentity) -> FastAPI:
    return create_app(scheduler, identity)  # type: ignore[arg-type]


def call(app: FastAPI, method: str, path: str, **arguments: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://test") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(go())


def over_ratls(app: FastAPI) -> FastAPI:
    """The application as seen over a connection of some RA-TLS key."""

    async def connected(scope: Any, receive: Any, send: Any) -> None:
        extensions = {"ratls.exporter": bytes(32), "ratls.spki": bytes(91)}
        await app(scope | {"extensions": extensions}, receive, send)

    return connected  # type: ignore[return-value]


def post(app: FastAPI, body: Any) -> httpx.Response:
    return call(app, "POST", "/generate", json=body)


def test_whole_answer(app: FastAPI, scheduler: FakeScheduler) -> None:
    response = post(app, {"prompt": "abc", "max_tokens": 5, "seed": 7, "stop": ["x", "y"], "top_k": 3})
    assert response.status_code == 200
    assert response.json() == {
        "text": "Hello!",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    request = scheduler.requests[0]
    assert request.prompt == (97, 98, 99)
    assert (request.max_tokens, request.stop) == (5, ("x", "y"))
    assert (request.sampling.seed, request.sampling.top_k, request.sampling.temperature) == (7, 3, 0.0)


def test_messages_go_through_the_chat_template(app: FastAPI, scheduler: FakeScheduler) -> None:
    post(app, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]})
    assert bytes(scheduler.requests[0].prompt).decode() == "<system>s<user>u"


@pytest.mark.parametrize("thinking", [True, False])
def test_template_inputs_reach_the_template(app: FastAPI, scheduler: FakeScheduler, thinking: bool) -> None:
    post(app, {"messages": USER, "chat_template_kwargs": {"enable_thinking": thinking}})
    assert bytes(scheduler.requests[0].prompt).decode() == f"<user>u[enable_thinking={thinking}]"


def test_stream_has_one_event_per_token_and_a_final_one(app: FastAPI) -> None:
    response = post(app, {"prompt": "abc", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events] == ["token", "token", "done"]
    assert "".join(event["text"] for event in events) == "Hello!"
    assert [event["token_id"] for event in events[:2]] == [1, 2]
    assert events[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == 2


def test_length_is_reported(app: FastAPI, scheduler: FakeScheduler) -> None:
    scheduler.events = [TokenEvent(token_id=1, text="a"), finished("length")]
    assert post(app, {"prompt": "abc"}).json()["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        {"prompt": ""},
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "b"}]},
        {"messages": [{"role": "user", "content": "b", "extra": 1}]},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "max_tokens": "5"},
        {"prompt": "a", "temperature": -0.1},
        {"prompt": "a", "temperature": 101},
        {"prompt": "a", "top_p": 0},
        {"prompt": "a", "top_p": 1.01},
        {"prompt": "a", "top_k": -1},
        {"prompt": "a", "seed": -1},
        {"prompt": "a", "seed": 1 << 64},
        {"prompt": "a", "stop": ""},
        {"prompt": "a", "stop": ["x"] * 17},
        {"prompt": "a", "logit_bias": {}},
        {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": USER, "chat_template_kwargs": {"messages": "x"}},
        {"messages": USER, "chat_template_kwargs": {"bos_token": "x"}},
        {"messages": USER, "chat_template_kwargs": {"__class__": 1}},
        {"messages": USER, "chat_template_kwargs": {"a": [1]}},
        {"messages": USER, "chat_template_kwargs": {"a": "x" * 1025}},
        {"messages": USER, "chat_template_kwargs": {f"a{i}": i for i in range(17)}},
        {"prompt": 5},
        [],
        None,
    ],
)
def test_bad_requests_are_400_and_do_not_echo(app: FastAPI, scheduler: FakeScheduler, body: Any) -> None:
    response = post(app, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    assert error["fault"] == "client"
    assert error["message"]
    assert not scheduler.requests


def test_an_error_does_not_repeat_the_prompt(app: FastAPI) -> None:
    secret = "a very private sentence"
    for body in (
        {"prompt": secret, "max_tokens": 0},
        {"prompt": [secret]},
        {"prompt": "x", "stop": {secret: 1}},
        {"messages": USER, "chat_template_kwargs": {secret: 1}},
        {"messages": USER, "chat_template_kwargs": {"a": [secret]}},
    ):
        response = post(app, body)
        assert response.status_code == 400
        assert secret not in response.text


def test_not_json_is_400(app: FastAPI) -> None:
    headers = {"content-type": "application/json"}
    response = call(app, "POST", "/generate", content=b"{prompt", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("full"), 503), (WorkerUnavailableError("gone"), 502), (GeloError("?"), 500)],
)
def test_refusals_and_failures_keep_their_type(
    app: FastAPI, scheduler: FakeScheduler, error: GeloError, status: int
) -> None:
    scheduler.refusal = error
    response = post(app, {"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, error.code)
    scheduler.refusal = None
    scheduler.events = [TokenEvent(token_id=1, text="a"), finished("error", error=error)]
    response = post(app, {"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, error.code)
    streamed = post(app, {"prompt": "a", "stream": True}).text.split("\n\n")
    last = json.loads(streamed[-2].removeprefix("data: "))
    assert (last["type"], last["error"]["code"]) == ("error", error.code)


def test_unexpected_exceptions_are_500_without_details(app: FastAPI, scheduler: FakeScheduler) -> None:
    def explode(request: Any, sink: Any) -> Any:
        raise RuntimeError("token 12345")

    scheduler.submit = explode  # type: ignore[method-assign]
    response = post(app, {"prompt": "a"})
    assert response.status_code == 500
    assert "12345" not in response.text


def test_a_body_too_large_is_413_declared_or_sent(app: FastAPI) -> None:
    assert post(app, {"prompt": "a" * (MAX_BODY_BYTES + 1)}).status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(17):
            yield b"a" * (1 << 20)
        yield b'"}'

    response = call(app, "POST", "/generate", content=pieces())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_leaving_a_stream_cancels_the_sequence(app: FastAPI, scheduler: FakeScheduler) -> None:
    scheduler.events = [TokenEvent(token_id=1, text="a")]  # and then nothing: the engine is busy

    async def go() -> None:
        sent: list[dict[str, Any]] = []
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if b"token" in message.get("body", b""):
                left.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "https", "path": "/generate", "raw_path": b"/generate",
            "query_string": b"", "headers": [(b"content-type", b"application/json")], "client": None,
            "server": ("test", 443),
        }  # fmt: skip
        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(go())
    assert scheduler.sequences[0].cancelled.is_set()


def test_health_follows_the_worker(app: FastAPI, scheduler: FakeScheduler) -> None:
    assert call(app, "GET", "/health").status_code == 200
    scheduler.runtime.connected = False
    response = call(app, "GET", "/health")
    assert (response.status_code, response.json()["status"]) == (503, "degraded")


@pytest.mark.parametrize("query", ["", "?nonce=", "?nonce=zz", "?nonce=" + "0" * 63, "?nonce=" + "0" * 66])
def test_attestation_needs_a_nonce(app: FastAPI, query: str) -> None:
    response = call(over_ratls(app), "GET", "/attestation" + query)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == BadNonceError.code


def test_attestation_refuses_a_connection_that_is_not_ratls(app: FastAPI) -> None:
    response = call(app, "GET", "/attestation?nonce=" + "0" * 64)
    assert response.status_code == 500
    assert "RA-TLS" in response.json()["error"]["message"]


def test_unknown_routes_have_the_same_error_shape(app: FastAPI) -> None:
    response = call(app, "GET", "/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["fault"] == "client"


def test_metrics_are_counts_only(scheduler: FakeScheduler) -> None:
    families = {family.name: family for family in EngineCollector(scheduler).collect()}  # type: ignore[arg-type]
    assert families["gelo_bytes_sent"].samples[0].value == 5
    assert families["gelo_requests"].samples[0].value == 4
    assert families["gelo_worker_connected"].samples[0].value == 1
    labels = {name for family in families.values() for sample in family.samples for name in sample.labels}
    assert labels == {"bucket"}


def test_an_unexpected_exception_reaches_no_log_with_its_message(
    app: FastAPI, scheduler: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(request: Any, sink: Any) -> Any:
        raise RuntimeError("a very private sentence")

    scheduler.submit = explode  # type: ignore[method-assign]

    async def go() -> httpx.Response:
        # Raises what the application raises: the guard must let nothing through.
        transport = httpx.ASGITransport(app=without_values(app), raise_app_exceptions=True)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="https://test") as client:
            return await client.post("/generate", json={"prompt": "a"})

    assert asyncio.run(go()).status_code == 500
    assert "RuntimeError at " in caplog.text
    assert "private" not in caplog.text
