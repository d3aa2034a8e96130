"""Peers that speak TLS, and then misbehave: what they can cost a client is bounded."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st
from OpenSSL import SSL

from attestation.client import connect, verify
from attestation.errors import AttestationError, ChannelBindingError, EvidenceUnavailableError
from attestation.evidence import FRESH_MEDIA_TYPE, MAX_EVIDENCE_SIZE, encode_fresh
from attestation.peer import PeerVerifier
from attestation.policy import UnsafeAllowSimulated
from attestation.ratls import OID_EVIDENCE, Credential, ServerIdentity
from attestation.server import _RaTlsProtocol
from attestation.simulated import SimulatedPsp
from attestation.statement import PURPOSE_FRESH, Statement, report_data
from attestation.tls import _response_body

Serve = Callable[..., AbstractContextManager[Any]]
Behaviour = Callable[[SSL.Connection], None]


@contextlib.contextmanager
def peer(context: SSL.Context, behave: Behaviour) -> Iterator[str]:
    """The URL of a server that does the handshake, reads once, and then behaves."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                connection = SSL.Connection(context, sock)
                connection.set_accept_state()
                with contextlib.suppress(SSL.Error, OSError):
                    connection.do_handshake()
                    connection.recv(65536)
                    behave(connection)
                sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def drip(connection: SSL.Connection) -> None:
    """A byte now and then: every single read is quick, the whole never ends."""
    while True:
        connection.sendall(b"H")
        time.sleep(0.02)


def flood(connection: SSL.Connection) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 16000)


def redirect(connection: SSL.Connection) -> None:
    connection.sendall(b"HTTP/1.1 302 Found\r\nlocation: https://elsewhere/\r\ncontent-length: 0\r\n\r\n")


def test_a_peer_that_drips_is_left_after_the_timeout(
    identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with peer(identity.credential().context, drip) as url:
        started = time.monotonic()
        with pytest.raises(httpx.ConnectTimeout):
            verify(url, policy, timeout=0.3)
        with connect(url, policy, timeout=0.3) as client, pytest.raises(httpx.ConnectTimeout):
            client.post("/secret", content=b"prompt")
        assert time.monotonic() - started < 10


def test_a_peer_that_floods_is_left(identity: ServerIdentity, policy: UnsafeAllowSimulated) -> None:
    with (
        peer(identity.credential().context, flood) as url,
        pytest.raises(EvidenceUnavailableError, match="head"),
    ):
        verify(url, policy)


def test_a_redirect_is_not_followed(identity: ServerIdentity, policy: UnsafeAllowSimulated) -> None:
    with (
        peer(identity.credential().context, redirect) as url,
        pytest.raises(EvidenceUnavailableError, match="status 302"),
    ):
        verify(url, policy)


def test_tls_1_2_is_refused(identity: ServerIdentity, policy: UnsafeAllowSimulated) -> None:
    credential = identity.credential()
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_max_proto_version(SSL.TLS1_2_VERSION)
    context.use_certificate(credential.certificate)
    context.use_privatekey(credential.key)
    with peer(context, redirect) as url, pytest.raises(httpx.ConnectError, match="TLS"):
        verify(url, policy)


@given(
    head=st.binary(max_size=40) | st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 409 x", b"HTTP/1.1 200"]),
    fields=st.lists(
        st.binary(max_size=40)
        | st.sampled_from([b"content-length: 3", b"Content-Length:99999999999999", b"transfer-encoding: x"]),
        max_size=4,
    ),
    body=st.binary(max_size=8),
)
def test_arbitrary_answers_are_bodies_incomplete_or_refused(
    head: bytes, fields: list[bytes], body: bytes
) -> None:
    answer = b"\r\n".join([head, *fields]) + b"\r\n\r\n" + body
    try:
        found = _response_body(bytearray(answer))
    except AttestationError:
        return
    assert found is None or answer.endswith(b"\r\n\r\n" + found)


@given(data=st.data())
def test_mutated_fresh_evidence_is_refused(
    identity: ServerIdentity, policy: UnsafeAllowSimulated, data: st.DataObject
) -> None:
    nonce, exporter = bytes(32), bytes(range(32))
    verifier = PeerVerifier(policy)
    verified = verifier.certificate(identity.credential().certificate.public_bytes(Encoding.DER))
    good = identity.fresh_evidence(nonce, exporter)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.just(len(bad)) | st.integers(0, len(bad)))
    if bytes(bad[:end]) != good:
        with pytest.raises(AttestationError):
            verifier.fresh(verified, bytes(bad[:end]), nonce=nonce, exporter=exporter, tls_version="TLSv1.3")


@pytest.mark.parametrize("size", [MAX_EVIDENCE_SIZE + 1, 100_000])
def test_a_huge_certificate_is_refused(policy: UnsafeAllowSimulated, size: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "me")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.UnrecognizedExtension(OID_EVIDENCE, bytes(size)), critical=False)
        .sign(key, SHA256())
    )
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.use_certificate(certificate)
    context.use_privatekey(key)
    with peer(context, redirect) as url, pytest.raises((AttestationError, httpx.ConnectError)):
        verify(url, policy)


def test_a_cut_answer_is_an_error_and_not_the_end(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    class Cut:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/attestation":
                await running.app(scope, receive, send)
                return
            # Without a length, the end of the connection is the end of the answer: only TLS tells a cut.
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            protocols[-1].raw.close()

    protocols: list[_RaTlsProtocol] = []
    made = _RaTlsProtocol.connection_made

    def recording(protocol: _RaTlsProtocol, transport: Any) -> None:
        protocols.append(protocol)
        made(protocol, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_RaTlsProtocol, "connection_made", recording)
        with (
            serve(identity, app=Cut()) as server,
            connect(server.url, policy) as client,
            pytest.raises(httpx.ReadError, match="close_notify"),
        ):
            client.get("/")


@dataclass
class Leaked:
    """The real service's TLS key in an attacker's hands."""

    stolen: Credential

    def credential(self) -> Credential:
        return self.stolen


@dataclass
class OwnGuest:
    """Answers with fresh evidence from a guest of the attacker's own, over everything that is asked for."""

    psp: SimulatedPsp
    spki: bytes
    statement: Statement
    seen: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["path"])
        data = report_data(
            purpose=PURPOSE_FRESH,
            spki=self.spki,
            statement=self.statement.encode(),
            nonce=bytes.fromhex(scope["query_string"].decode().partition("=")[2]),
            exporter=scope["extensions"]["ratls.exporter"],
        )
        body = encode_fresh(self.psp.evidence(data))
        headers = [
            (b"content-type", FRESH_MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def test_a_thief_of_the_key_with_a_guest_of_his_own_is_refused(
    serve: Serve, psp: SimulatedPsp, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    credential = identity.credential()
    guest = OwnGuest(psp.altered(report_id=bytes(32)), credential.spki, identity.statement)
    with (
        serve(Leaked(credential), app=guest) as attacker,
        connect(attacker.url, policy) as client,
        pytest.raises(ChannelBindingError, match="report_id"),
    ):
        client.post("/secret", content=b"prompt")
    assert guest.seen == ["/attestation"]
