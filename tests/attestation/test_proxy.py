"""The local proxy: everything is forwarded over verified connections, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from attestation.document import recheck
from attestation.errors import InvalidPolicyError
from attestation.policy import SIMULATED_WARNING, UnsafeAllowSimulated
from attestation.proxy import DOCUMENT_PATH, LocalProxy
from attestation.ratls import ServerIdentity
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

Serve = Callable[..., AbstractContextManager[Any]]
ORIGIN = "https://app.example"


@dataclass
class Proxied:
    """A running proxy, and the requests that reached the service behind it."""

    port: int
    documents: list[Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def proxying(service: str, policy: Any, origins: tuple[str, ...] = ()) -> Iterator[Proxied]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    proxied = Proxied(port, [])
    app: list[LocalProxy] = []

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if not app:  # the transport belongs to the server's event loop
            app.append(
                LocalProxy(
                    service,
                    policy,
                    hosts=[f"127.0.0.1:{port}", f"localhost:{port}"],
                    origins=origins,
                    source={"source": "test"},
                    on_document=lambda made, _verdict: proxied.documents.append(made),
                )
            )
        await app[0](scope, receive, send)

    server = uvicorn.Server(
        uvicorn.Config(
            call, http="h11", ws="none", lifespan="off", log_level="critical", server_header=False,
            date_header=False, timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield proxied
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def local(running: Any, policy: UnsafeAllowSimulated) -> Iterator[Proxied]:
    """A proxy to a well-behaved service, which pages of ``ORIGIN`` may use."""
    with proxying(running.url, policy, (ORIGIN,)) as proxied:
        yield proxied


def test_requests_and_answers_pass_through(local: Proxied, running: Any) -> None:
    body = os.urandom(3_000_000)
    with httpx.Client(base_url=local.url, timeout=60) as client:
        assert client.get("/").text == "hello https"
        assert client.post("/digest", content=body).text == hashlib.sha256(body).hexdigest()
        chunks = (body[start : start + 70_000] for start in range(0, len(body), 70_000))
        assert client.post("/digest", content=chunks).text == hashlib.sha256(body).hexdigest()
        assert client.head("/").headers["content-length"] == "11"


def test_an_answer_is_streamed_as_it_comes(local: Proxied) -> None:
    with httpx.stream("GET", f"{local.url}/endless", timeout=60) as response:
        assert next(response.iter_lines()) == "data: 0"  # the service never ends this answer
    with httpx.stream("GET", f"{local.url}/sse", timeout=60) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_a_client_that_leaves_ends_the_request_to_the_service(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with serve(identity) as service, proxying(service.url, policy) as local:
        with httpx.stream("GET", f"{local.url}/endless", timeout=60) as response:
            lines = response.iter_lines()  # kept: a generator that is dropped closes the response
            assert next(lines) == "data: 0"
            assert not service.app.disconnected.is_set()
        assert service.app.disconnected.wait(60)


def test_a_slow_reader_stalls_the_service(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with (
        serve(identity) as service,
        proxying(service.url, policy) as local,
        httpx.stream("GET", f"{local.url}/flood", timeout=60) as response,
    ):
        assert service.app.stalled.wait(60)
        assert service.app.sent < 48 * 2**20
        assert sum(map(len, response.iter_raw())) == 64 * 2**20


@dataclass
class Echo:
    """Evidence, and otherwise the request's own line and fields."""

    attestation: Any
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/attestation":
            await self.attestation(scope, receive, send)
            return
        values = {
            "method": scope["method"],
            "target": scope["raw_path"].decode() + "?" + scope["query_string"].decode(),
            "headers": [[name.decode(), value.decode()] for name, value in scope["headers"]],
        }
        body = json.dumps(values).encode()
        headers = [*self.headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def echo(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> Iterator[tuple[Echo, Any, Proxied]]:
    app = Echo(running.app)
    with serve(identity, app=app) as service, proxying(service.url, policy) as local:
        yield app, service, local


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(request)
        received = b""
        while data := sock.recv(65536):
            received += data
    return received


@pytest.mark.parametrize(
    "target", ["/v1/chat/completions?a=1&a=%20b", "//elsewhere.example/x", "/%2e%2e/%00?", "/a;b=c/?q=%2F"]
)
def test_any_path_goes_to_the_service_as_it_is(echo: tuple[Echo, Any, Proxied], target: str) -> None:
    _, service, local = echo
    answer = raw(
        local.port,
        f"PUT {target} HTTP/1.1\r\nHost: localhost:{local.port}\r\nConnection: close, X-Hop\r\n"
        "X-Hop: 1\r\nTE: trailers\r\nProxy-Authorization: secret\r\nAuthorization: Bearer key\r\n"
        "Content-Length: 0\r\n\r\n".encode(),
    )
    values = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert values["method"] == "PUT"
    assert values["target"].rstrip("?") == target.rstrip("?")
    headers = dict(values["headers"])
    assert headers["host"] == f"127.0.0.1:{service.port}"
    assert headers["authorization"] == "Bearer key"
    assert not {"x-hop", "te", "proxy-authorization", "transfer-encoding"} & headers.keys()


def test_the_path_of_the_service_comes_first(
    echo: tuple[Echo, Any, Proxied], policy: UnsafeAllowSimulated
) -> None:
    _, service, _ = echo
    with proxying(f"{service.url}/base/", policy) as local:
        assert httpx.get(f"{local.url}/x?y=1").json()["target"] == "/base/x?y=1"


def test_errors_and_fields_of_the_service_pass_through(echo: tuple[Echo, Any, Proxied]) -> None:
    app, _, local = echo
    app.status = 429
    app.headers = (
        (b"retry-after", b"7"), (b"x-gelo-verification", b"forged"), (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
    )  # fmt: skip
    response = httpx.get(f"{local.url}/x")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "forged" not in response.headers["x-gelo-verification"]


def test_a_response_names_its_verification_document(local: Proxied, policy: UnsafeAllowSimulated) -> None:
    response = httpx.get(f"{local.url}/")
    digest = response.headers["x-gelo-verification"]
    assert response.headers["x-gelo-warning"] == SIMULATED_WARNING
    found = httpx.get(f"{local.url}{DOCUMENT_PATH}/{digest}")
    assert hashlib.sha256(found.content).hexdigest() == digest
    assert httpx.get(f"{local.url}{DOCUMENT_PATH}").status_code == 200
    document = found.json()
    assert document["acceptable"] is True
    assert document["policy"] == {"source": "test"}
    assert document in local.documents
    assert recheck(found.content, policy).statement.service == "gelo"
    assert httpx.get(f"{local.url}{DOCUMENT_PATH}/{'0' * 64}").status_code == 404
    assert httpx.post(f"{local.url}{DOCUMENT_PATH}").status_code == 405


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "evil.example"}, 421, "host-refused"),
        ({"host": "127.0.0.1"}, 421, "host-refused"),
        ({"host": "127.0.0.1:1"}, 421, "host-refused"),
        ({"host": "127.0.0.1.evil.example:{port}"}, 421, "host-refused"),
        ({"origin": "https://evil.example"}, 403, "origin-refused"),
        ({"origin": "null"}, 403, "origin-refused"),
        ({"origin": "http://127.0.0.1:{port}"}, 403, "origin-refused"),
        ({"origin": ORIGIN + ".evil.example"}, 403, "origin-refused"),
        ({"sec-fetch-site": "cross-site"}, 403, "origin-refused"),
        ({"sec-fetch-site": "same-site"}, 403, "origin-refused"),
    ],
)
def test_web_pages_and_other_names_are_kept_out(
    local: Proxied, running: Any, headers: dict[str, str], status: int, code: str
) -> None:
    before = len(running.app.paths)
    filled = {name: value.format(port=local.port) for name, value in headers.items()}
    for method in ("GET", "POST", "OPTIONS"):
        response = httpx.request(method, f"{local.url}/digest", headers=filled)
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert "access-control-allow-origin" not in response.headers
    assert len(running.app.paths) == before


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.0\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: 127.0.0.1:%d\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n",
        b"TRACE / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nOrigin: https://app.example\r\nOrigin: https://evil\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_odd_requests_reach_nobody(local: Proxied, running: Any, head: bytes) -> None:
    before = len(running.app.paths)
    request = head.replace(b"%d", str(local.port).encode()) + b"Connection: close\r\n\r\n"
    answer = raw(local.port, request)
    assert answer.split()[1][:1] == b"4"
    assert len(running.app.paths) == before


def test_pages_of_an_allowed_origin_may_call(local: Proxied) -> None:
    preflight = httpx.options(
        f"{local.url}/digest",
        headers={
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        },
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    headers = {"origin": ORIGIN, "sec-fetch-site": "cross-site"}
    response = httpx.post(f"{local.url}/digest", content=b"x", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["vary"] == "origin"


def test_a_service_that_is_refused_gets_nothing(
    serve: Serve, psp: SimulatedPsp, statement: Callable[..., Statement], policy: UnsafeAllowSimulated
) -> None:
    with (
        serve(ServerIdentity(psp.altered(vmpl=1), statement())) as service,
        proxying(service.url, policy) as local,
    ):
        response = httpx.post(f"{local.url}/secret", content=b"prompt")
        assert response.status_code == 502
        error = response.json()["error"]
        assert error["code"] == "policy-refused"
        assert "vmpl" in error["message"]
        assert service.app.paths == []
        assert local.documents == []


def test_a_service_that_is_away_is_a_502(policy: UnsafeAllowSimulated) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with proxying(f"https://127.0.0.1:{port}", policy) as local:
        response = httpx.post(f"{local.url}/x", content=b"prompt")
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "service-unreachable"


def test_an_answer_that_is_cut_stays_cut(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    async def cut(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/attestation":
            await running.app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.sleep(0.05)  # returns without the end: the server closes the connection

    with (
        serve(identity, app=cut) as service,
        proxying(service.url, policy) as local,
        httpx.stream("GET", f"{local.url}/") as response,
    ):
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            response.read()


def test_only_https_services(policy: UnsafeAllowSimulated) -> None:
    with pytest.raises(InvalidPolicyError):
        LocalProxy("http://127.0.0.1:1", policy, hosts=[], source={})
