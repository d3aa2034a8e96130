"""The verifying client's connections: answers that are no evidence, silence, bad addresses, rotation."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from OpenSSL import SSL

from attestation.client import AsyncRaTlsTransport, RaTlsTransport, connect, verify
from attestation.errors import (
    AttestationError,
    EvidenceUnavailableError,
    InvalidPolicyError,
    MalformedEvidenceError,
)
from attestation.policy import UnsafeAllowSimulated
from attestation.ratls import ServerIdentity
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

Serve = Callable[..., AbstractContextManager[Any]]
MakeStatement = Callable[..., Statement]

RESPONSES = [
    (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", EvidenceUnavailableError, "status 404"),
    (b"HTTP/1.1 429 Slow\r\ncontent-length: 0\r\n\r\n", EvidenceUnavailableError, "status 429"),
    (b"SSH-2.0-OpenSSH\r\n\r\n", EvidenceUnavailableError, "not HTTP"),
    (b"HTTP/1.1 200 OK\r\n\r\n", EvidenceUnavailableError, "one content length"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", EvidenceUnavailableError, "one content length"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx", EvidenceUnavailableError, "one"),
    (
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        EvidenceUnavailableError,
        "one",
    ),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 70000\r\n\r\n", EvidenceUnavailableError, "longer than"),
    (
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxHTTP/1.1 200 OK",
        EvidenceUnavailableError,
        "longer than",
    ),
    (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20000, EvidenceUnavailableError, "head"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", MalformedEvidenceError, "fresh evidence"),
    (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", MalformedEvidenceError, "truncated"),
]


class RawServer:
    """TLS with a given identity, then the same bytes for everybody."""

    def __init__(self, identity: ServerIdentity, answer: bytes, host: str = "127.0.0.1") -> None:
        self.context, self.answer = identity.credential().context, answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve)

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            connection = SSL.Connection(self.context, sock)
            connection.set_accept_state()
            try:
                connection.do_handshake()
                connection.recv(65536)
                connection.sendall(self.answer)
                connection.shutdown()
                connection.recv(65536)
            except SSL.Error:
                pass
            connection.close()

    def __enter__(self) -> RawServer:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


@pytest.mark.parametrize(("answer", "error", "match"), RESPONSES)
def test_bad_answers_to_the_fresh_request_are_refused(
    identity: ServerIdentity,
    policy: UnsafeAllowSimulated,
    answer: bytes,
    error: type[AttestationError],
    match: str,
) -> None:
    with RawServer(identity, answer) as server, pytest.raises(error, match=match):
        verify(f"https://127.0.0.1:{server.port}", policy)


def test_a_peer_that_hangs_up_is_a_connect_error(
    identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with RawServer(identity, b"HTTP/1.1 200 OK\r\ncontent-") as server, pytest.raises(httpx.ConnectError):
        verify(f"https://127.0.0.1:{server.port}", policy)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x03\x00\x02\x02\x28", b""]
)
def test_a_peer_without_tls_is_a_connect_error(policy: UnsafeAllowSimulated, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_once() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(65536)
                sock.sendall(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        with pytest.raises(httpx.ConnectError):
            verify(f"https://127.0.0.1:{listener.getsockname()[1]}", policy)
        thread.join()


def test_a_silent_peer_runs_into_the_connect_timeout(policy: UnsafeAllowSimulated) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(httpx.ConnectTimeout):
            verify(url, policy, timeout=0.2)
        with connect(url, policy, timeout=0.2) as client, pytest.raises(httpx.ConnectTimeout):
            client.get("/")

        async def session() -> None:
            async with httpx.AsyncClient(transport=AsyncRaTlsTransport(policy), timeout=0.2) as client:
                with pytest.raises(httpx.ConnectTimeout):
                    await client.get(url)

        asyncio.run(session())


def test_a_read_timeout_is_httpx_s(running: Any, policy: UnsafeAllowSimulated) -> None:
    timeout = httpx.Timeout(30, read=0.2)
    with connect(running.url, policy, timeout) as client, client.stream("GET", "/endless") as response:
        lines = response.iter_lines()
        assert next(lines) == "data: 0"
        with pytest.raises(httpx.ReadTimeout):
            list(lines)


def test_nothing_listens(policy: UnsafeAllowSimulated) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(httpx.ConnectError):
        verify(f"https://127.0.0.1:{port}", policy)


@pytest.mark.parametrize(
    "url", ["http://localhost", "localhost:8000", "https://", "", "https://[::1", "ftp://x"]
)
def test_only_https_urls(policy: UnsafeAllowSimulated, url: str) -> None:
    with pytest.raises(InvalidPolicyError):
        verify(url, policy)
    with pytest.raises(InvalidPolicyError):
        connect(url, policy)


def test_the_transport_never_speaks_plain_http(running: Any, policy: UnsafeAllowSimulated) -> None:
    with httpx.Client(transport=RaTlsTransport(policy)) as client, pytest.raises(httpx.UnsupportedProtocol):
        client.get(f"http://127.0.0.1:{running.port}/")


def test_rotation_does_not_disturb_open_connections(
    serve: Serve, psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    now = [datetime.now(UTC)]
    identity = ServerIdentity(psp, statement(), clock=lambda: now[0], background=lambda work: work())
    transport = RaTlsTransport(policy)
    with serve(identity) as running, httpx.Client(transport=transport, base_url=running.url) as client:
        client.get("/")
        first = transport.verdict
        now[0] += timedelta(hours=13)
        # The rotated certificate starts 13 hours from now, which this clock allows for.
        later = verify(running.url, policy, clock=lambda: now[0])
        assert first is not None
        assert later.key_sha256 != first.key_sha256
        assert client.get("/").status_code == 200
        assert transport.verdict is first
        assert client.get("/attestation?nonce=" + "ab" * 32).status_code == 200
