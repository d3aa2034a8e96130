"""TLS under uvicorn: hostile clients, big bodies, flow control in both directions."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest
from OpenSSL import SSL
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attestation.client import connect
from attestation.errors import EvidenceUnavailableError
from attestation.policy import UnsafeAllowSimulated
from attestation.ratls import ServerIdentity
from attestation.server import _RaTlsProtocol

Serve = Callable[..., AbstractContextManager[Any]]
BASES = pytest.mark.parametrize("base", [H11Protocol, HttpToolsProtocol])


def careless_context() -> ssl.SSLContext:
    """A client that checks nothing, to poke at the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextmanager
def raw(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Everything until the peer closes or resets."""
    received = b""
    try:
        while data := sock.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def test_plain_http_is_refused(running: Any) -> None:
    before = len(running.app.paths)
    with raw(running.port) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in read_all(sock)
    assert len(running.app.paths) == before


@pytest.mark.parametrize("junk", [os.urandom(4096), b"\x16\x03\x01\xff\xff" + bytes(70000), b"\x80" * 100])
def test_junk_is_refused(running: Any, junk: bytes) -> None:
    with raw(running.port) as sock:
        try:
            sock.sendall(junk)
        except ConnectionError:
            return
        sock.shutdown(socket.SHUT_WR)
        assert b"HTTP" not in read_all(sock)


def test_tls_1_2_is_refused(running: Any) -> None:
    context = careless_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with raw(running.port) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname="localhost")


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01"])
def test_a_silent_handshake_is_ended(serve: Serve, identity: ServerIdentity, first: bytes) -> None:
    with serve(identity, handshake_timeout=0.2) as running, raw(running.port) as sock:
        sock.sendall(first)
        assert read_all(sock) == b""


def test_a_silent_client_is_ended_after_the_handshake(serve: Serve, identity: ServerIdentity) -> None:
    with serve(identity, handshake_timeout=0.3) as running, raw(running.port) as sock:
        try:
            with careless_context().wrap_socket(sock, server_hostname="localhost") as tls:
                tls.sendall(b"GET / HTTP/1.1\r\nHo")
                assert read_all(tls) == b""
        except (ssl.SSLError, ConnectionError):
            pass  # ended during the handshake on a slow machine: ended all the same


def test_a_started_request_outlives_the_handshake_timeout(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = _RaTlsProtocol.connection_made

    def recording(protocol: _RaTlsProtocol, transport: Any) -> None:
        original(protocol, transport)
        made.append((protocol, protocol._timer))

    monkeypatch.setattr(_RaTlsProtocol, "connection_made", recording)
    with serve(identity) as running, connect(running.url, policy) as client:
        assert client.get("/").text == "hello https"
        ((protocol, timer),) = made
        assert timer is not None
        assert timer.cancelled()
        assert protocol._timer is None


def test_no_session_can_be_resumed(running: Any) -> None:
    context = careless_context()
    sessions: list[ssl.SSLSession | None] = []
    for _ in range(2):
        with raw(running.port) as sock:
            session = sessions[-1] if sessions else None
            with context.wrap_socket(sock, server_hostname="localhost", session=session) as tls:
                tls.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert b"hello" in read_all(tls)
                assert not tls.session_reused
                sessions.append(tls.session)


def test_the_exporter_is_that_of_the_connection(running: Any) -> None:
    connection = SSL.Connection(
        SSL.Context(SSL.TLS_CLIENT_METHOD), socket.create_connection(("127.0.0.1", running.port))
    )
    connection.set_connect_state()
    connection.do_handshake()
    expected = connection.export_keying_material(b"EXPORTER-Channel-Binding", 32, b"")
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.close()
    assert expected in running.app.exporters


def test_attestation_without_a_nonce_is_a_400(running: Any, policy: UnsafeAllowSimulated) -> None:
    with connect(running.url, policy) as client:
        assert client.get("/attestation").status_code == 400
        assert client.get("/attestation?nonce=00").status_code == 400
        assert client.get("/attestation?nonce=" + "0" * 64).status_code == 200


@BASES
def test_bodies_arrive_whole(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated, base: type[Any]
) -> None:
    body = os.urandom(3_000_000)
    with serve(identity, base=base) as running, connect(running.url, policy, timeout=60) as client:
        for _ in range(2):
            assert client.post("/digest", content=body).text == hashlib.sha256(body).hexdigest()
        assert len(set(running.app.exporters)) == 1  # all on one attested connection


@BASES
def test_server_sent_events(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated, base: type[Any]
) -> None:
    with serve(identity, base=base) as running, connect(running.url, policy) as client:
        with client.stream("GET", "/sse") as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines == [f"data: {number}" for number in range(50)] + ["data: [DONE]"]


def test_a_client_that_leaves_is_noticed(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with serve(identity) as running:
        with connect(running.url, policy) as client, client.stream("GET", "/endless") as response:
            assert next(response.iter_lines()) == "data: 0"
        assert running.app.disconnected.wait(60)


def test_a_client_whose_socket_vanishes_is_noticed(serve: Serve, identity: ServerIdentity) -> None:
    with serve(identity) as running:
        with raw(running.port) as sock, careless_context().wrap_socket(sock) as tls:
            tls.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            assert tls.recv(65536)
        assert running.app.disconnected.wait(60)


@BASES
def test_a_slow_reader_stalls_the_writer(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated, base: type[Any]
) -> None:
    with serve(identity, base=base) as running, connect(running.url, policy, timeout=60) as client:
        with client.stream("GET", "/flood") as response:
            assert running.app.stalled.wait(60)
            assert running.app.sent < 32 * 2**20
            assert sum(map(len, response.iter_raw())) == 64 * 2**20
        assert running.app.sent == 64 * 2**20


@BASES
def test_a_slow_application_stalls_the_reader(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated, base: type[Any]
) -> None:
    class Counting(base):  # type: ignore[misc]
        received = 0

        def data_received(self, data: bytes) -> None:
            Counting.received += len(data)
            super().data_received(data)

    body = os.urandom(8_000_000)
    with (
        serve(identity, base=Counting) as running,
        connect(running.url, policy, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        posting = pool.submit(client.post, "/digest?wait", content=body)
        last, unchanged = 0, 0
        while not last or unchanged < 20:
            time.sleep(0.01)
            unchanged = unchanged + 1 if Counting.received == last else 0
            last = Counting.received
        assert last < 1_000_000
        running.app.release.set()
        assert posting.result().text == hashlib.sha256(body).hexdigest()


def test_many_connections_at_once(running: Any, policy: UnsafeAllowSimulated) -> None:
    def one(number: int) -> str:
        with connect(running.url, policy, timeout=60) as client:
            return client.post("/digest", content=b"%d" % number).text

    with ThreadPoolExecutor(8) as pool:
        digests = list(pool.map(one, range(16)))
    assert digests == [hashlib.sha256(b"%d" % number).hexdigest() for number in range(16)]


def test_a_stopping_server_ends_handshakes(serve: Serve, identity: ServerIdentity) -> None:
    with serve(identity) as running:
        sock = socket.create_connection(("127.0.0.1", running.port), timeout=60)
        sock.sendall(b"\x16\x03\x01")
        with raw(running.port) as other, careless_context().wrap_socket(other) as tls:
            tls.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"hello" in read_all(tls)
    assert read_all(sock) == b""
    sock.close()


def test_keep_alive_reuses_the_attested_connection(running: Any, policy: UnsafeAllowSimulated) -> None:
    with connect(running.url, policy) as client:
        before = len(running.app.paths)
        assert [client.get("/").status_code for _ in range(5)] == [200] * 5
        assert running.app.paths[before:] == ["/attestation", *["/"] * 5]


def test_an_identity_without_evidence_serves_nobody(serve: Serve, policy: UnsafeAllowSimulated) -> None:
    class Broken:
        def credential(self) -> None:
            raise EvidenceUnavailableError("no evidence")

    with (
        serve(Broken()) as running,
        connect(running.url, policy) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get("/")
