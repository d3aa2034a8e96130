"""The verifying client against good, wrong, lying and relaying servers."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import os
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from OpenSSL import SSL

from attestation.client import AsyncRaTlsTransport, RaTlsTransport, verify
from attestation.errors import (
    AttestationError,
    ChannelBindingError,
    MalformedEvidenceError,
    NotGenuineError,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.policy import (
    SIMULATED_MEASUREMENT,
    SIMULATED_WARNING,
    UNPINNED,
    Policy,
    UnsafeAllowSimulated,
)
from attestation.ratls import Credential, ServerIdentity
from attestation.report import Product
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

Serve = Callable[..., AbstractContextManager[Any]]
MakeStatement = Callable[..., Statement]
MODEL = bytes(range(32))


def test_a_good_service_is_verified_and_used(
    running: Any, policy: UnsafeAllowSimulated, caplog: pytest.LogCaptureFixture
) -> None:
    transport = RaTlsTransport(policy)
    before = transport.verdict
    assert before is None
    caplog.set_level(logging.WARNING)
    with httpx.Client(transport=transport, base_url=running.url) as client:
        assert client.get("/").text == "hello https"
    assert caplog.text.count(SIMULATED_WARNING) == 1
    verdict = transport.verdict
    assert verdict is not None
    document = json.loads(json.dumps(verdict.as_dict()))
    assert document["simulated"] is True
    assert document["warnings"] == [SIMULATED_WARNING]
    assert document["product"] == "Genoa"
    assert document["report_version"] == 3
    assert document["measurement"] == SIMULATED_MEASUREMENT.hex()
    assert document["model_identity"] == MODEL.hex()
    assert document["model_pinned"] is True
    assert document["protection"] == "lpn"
    assert document["tls_version"] == "TLSv1.3"
    assert document["fresh_evidence"] is True
    credential = running.app.identity.credential()
    assert document["key_sha256"] == hashlib.sha256(credential.spki).hexdigest()


def test_the_asynchronous_client_does_the_same(running: Any, policy: UnsafeAllowSimulated) -> None:
    body = os.urandom(3_000_000)

    async def session() -> None:
        transport = AsyncRaTlsTransport(policy)
        async with httpx.AsyncClient(transport=transport, base_url=running.url, timeout=60) as client:
            assert (await client.get("/")).text == "hello https"
            assert (await client.post("/digest", content=body)).text == hashlib.sha256(body).hexdigest()
            async with client.stream("GET", "/sse") as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            texts = await asyncio.gather(*(client.get("/") for _ in range(8)))
            assert {response.text for response in texts} == {"hello https"}
        assert transport.verdict is not None
        assert transport.verdict.fresh_evidence

    asyncio.run(session())


def test_verify_returns_the_verdict(running: Any, policy: UnsafeAllowSimulated) -> None:
    before = len(running.app.paths)
    verdict = verify(running.url, policy)
    assert verdict.simulated
    assert verdict.warnings == (SIMULATED_WARNING,)
    assert running.app.paths[before:] == ["/attestation"]


def refused(
    url: str, policy: Any, error: type[AttestationError], match: str | None = None, **options: Any
) -> AttestationError:
    """The peer at ``url`` is refused by all three ways to connect, before a request is sent."""
    with pytest.raises(error, match=match) as caught:
        verify(url, policy, **options)
    with httpx.Client(transport=RaTlsTransport(policy, **options)) as client, pytest.raises(error):
        client.post(f"{url}/secret", content=b"prompt")

    async def session() -> None:
        async with httpx.AsyncClient(transport=AsyncRaTlsTransport(policy, **options)) as client:
            with pytest.raises(error):
                await client.post(f"{url}/secret", content=b"prompt")

    asyncio.run(session())
    assert caught.type is error
    assert caught.value.code in {error.code}
    return caught.value


def test_simulated_evidence_needs_the_unsafe_policy(running: Any) -> None:
    policy = Policy(
        measurements=frozenset({SIMULATED_MEASUREMENT}),
        products=frozenset(Product),
        model_identity=UNPINNED,
        service=UNPINNED,
    )
    refused(running.url, policy, SimulatedEvidenceRefusedError)
    assert "/secret" not in running.app.paths


@pytest.mark.parametrize(
    ("guest", "field"),
    [
        ({"measurement": bytes(48)}, "measurement"),
        ({"policy": 0xB0000}, "policy.debug"),
        ({"vmpl": 1}, "vmpl"),
    ],
)
def test_wrong_guests_are_refused_in_the_handshake(
    serve: Serve,
    psp: SimulatedPsp,
    statement: MakeStatement,
    policy: UnsafeAllowSimulated,
    guest: dict[str, Any],
    field: str,
) -> None:
    with serve(ServerIdentity(psp.altered(**guest), statement())) as running:
        error = refused(running.url, policy, PolicyRefusedError, field)
        assert isinstance(error, PolicyRefusedError)
        assert [mismatch.field for mismatch in error.mismatches] == [field]
        assert running.app.paths == []


def test_another_model_is_refused(running: Any) -> None:
    policy = UnsafeAllowSimulated.only(model_identity=bytes(32), service="gelo")
    refused(running.url, policy, PolicyRefusedError, "model_identity")
    assert "/secret" not in running.app.paths


def test_the_plain_scheme_is_refused_unless_named(
    serve: Serve, psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    with serve(ServerIdentity(psp, statement(protection="plain", protection_parameters={}))) as running:
        refused(
            running.url,
            policy,
            PolicyRefusedError,
            "protection: expected one of gelo-auto, gelo-dct4",
        )
        assert running.app.paths == []
        baseline = UnsafeAllowSimulated.only(
            model_identity=MODEL, service="gelo", allowed_protection=frozenset({"plain"})
        )
        assert verify(running.url, baseline).protection == "plain"


def test_an_expired_certificate_is_refused(
    serve: Serve, psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    past = datetime.now(UTC) - timedelta(hours=30)
    with serve(ServerIdentity(psp, statement(), clock=lambda: past)) as running:
        refused(running.url, policy, NotGenuineError, "server certificate is valid")
        assert running.app.paths == []


def test_evidence_for_another_key_is_refused(
    serve: Serve, fixed_provider: Any, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    with serve(ServerIdentity(fixed_provider, statement())) as running:
        refused(running.url, policy, ChannelBindingError, "report_data")
        assert running.app.paths == []


class SelfMade:
    """An identity without evidence, or with the evidence of another certificate."""

    def __init__(self, donor: Credential | None = None, *, curve: Any = None, issuer: str = "me") -> None:
        key = ec.generate_private_key(curve or ec.SECP256R1())
        names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("me", issuer)]
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
            .not_valid_after(datetime.now(UTC) + timedelta(hours=1))
        )
        if donor is not None:
            extension = list(donor.certificate.extensions)[-1]
            builder = builder.add_extension(extension.value, critical=False)
        certificate = builder.sign(key, SHA256())
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.use_certificate(certificate)
        context.use_privatekey(key)
        self.made = Credential(certificate, key, b"", context, certificate.not_valid_after_utc)

    def credential(self) -> Credential:
        return self.made


def test_an_ordinary_certificate_is_refused(serve: Serve, policy: UnsafeAllowSimulated) -> None:
    with serve(SelfMade()) as running:
        refused(running.url, policy, MalformedEvidenceError, "no attestation evidence")
        assert running.app.paths == []


def test_stolen_evidence_is_refused(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with serve(SelfMade(identity.credential())) as running:
        refused(running.url, policy, ChannelBindingError, "report_data")
        assert running.app.paths == []


def test_another_curve_or_issuer_is_refused(
    serve: Serve, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with serve(SelfMade(identity.credential(), curve=ec.SECP384R1())) as running:
        refused(running.url, policy, NotGenuineError, "P-256")
    with serve(SelfMade(identity.credential(), issuer="you")) as running:
        refused(running.url, policy, NotGenuineError, "own key")


@dataclass
class Leaked:
    """The real service's TLS key and certificate in an attacker's hands."""

    stolen: Credential

    def credential(self) -> Credential:
        return self.stolen


@dataclass
class Relay:
    """Ends TLS with the leaked key, forwards to the real service, and would read every prompt."""

    upstream: int
    seen: list[tuple[str, str]] = field(default_factory=list)
    replay: bytes | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        target = scope["path"] + "?" + scope["query_string"].decode()
        self.seen.append((scope["method"], scope["path"]))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", self.upstream, context=context)
        connection.request(scope["method"], target)
        response = connection.getresponse()
        body = response.read() if self.replay is None else self.replay
        connection.close()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def test_a_relay_with_the_leaked_key_fails_at_fresh_evidence(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    assert verify(running.url, policy).fresh_evidence  # the real service is fine
    relay = Relay(running.port)
    with serve(Leaked(identity.credential()), app=relay) as attacker:
        error = refused(attacker.url, policy, ChannelBindingError, "report_data")
    # The leaked key passed the handshake each time, and nothing but the nonce ever reached the relay.
    assert relay.seen == [("GET", "/attestation")] * 3
    assert isinstance(error, ChannelBindingError)
    assert [mismatch.field for mismatch in error.mismatches] == ["report_data"]


def test_a_relay_that_replays_old_evidence_fails(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    relay = Relay(running.port, replay=identity.fresh_evidence(bytes(32), bytes(32)))
    with serve(Leaked(identity.credential()), app=relay) as attacker:
        refused(attacker.url, policy, ChannelBindingError)
    assert {path for _, path in relay.seen} == {"/attestation"}
