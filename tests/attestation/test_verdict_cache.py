"""Verdicts that are kept for a bounded time, and what they must never stand in for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

import attestation.peer
from attestation.client import (
    AsyncRaTlsTransport,
    RaTlsTransport,
    connect,
    connect_async,
    response_verdict,
    verify,
)
from attestation.errors import (
    AttestationError,
    ChannelBindingError,
    InvalidPolicyError,
    KeyRotatedError,
    NotGenuineError,
)
from attestation.evidence import FRESH_MEDIA_TYPE
from attestation.peer import PeerVerifier
from attestation.policy import UnsafeAllowSimulated
from attestation.ratls import Credential, ServerIdentity
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement
from attestation.verdict_cache import VerdictCache

Serve = Callable[..., AbstractContextManager[Any]]
MakeStatement = Callable[..., Statement]
MINUTE = timedelta(minutes=1)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The REPORT_DATA of every piece of evidence that is verified from here on."""
    seen: list[bytes] = []
    original = attestation.peer.verify_evidence

    def counting(evidence: Any, **options: Any) -> Any:
        seen.append(evidence.report[0x50:0x90])
        return original(evidence, **options)

    monkeypatch.setattr(attestation.peer, "verify_evidence", counting)
    return seen


def leaf(identity: ServerIdentity) -> bytes:
    return identity.credential().certificate.public_bytes(Encoding.DER)


@pytest.mark.parametrize("age", [timedelta(seconds=-1), timedelta(hours=25)])
def test_ages_out_of_range_are_refused(policy: UnsafeAllowSimulated, age: timedelta) -> None:
    with pytest.raises(InvalidPolicyError, match="24 hours"):
        VerdictCache(max_age=age)
    with pytest.raises(InvalidPolicyError):
        RaTlsTransport(policy, max_age=age)


@pytest.mark.parametrize(
    ("max_age", "moves", "verified"),
    [
        (10 * MINUTE, [0 * MINUTE, 9 * MINUTE], 1),
        (10 * MINUTE, [0 * MINUTE, 10 * MINUTE], 2),
        (10 * MINUTE, [0 * MINUTE, -MINUTE], 2),  # the clock was set back
        (0 * MINUTE, [0 * MINUTE, 0 * MINUTE], 3),
    ],
)
def test_a_certificate_is_verified_again_when_its_time_is_over(
    identity: ServerIdentity,
    policy: UnsafeAllowSimulated,
    chains: list[bytes],
    max_age: timedelta,
    moves: list[timedelta],
    verified: int,
) -> None:
    clock = Clock()
    verifier = PeerVerifier(policy, clock=clock, max_age=max_age)
    first = verifier.certificate(leaf(identity))
    for move in moves:
        clock.now += move
        assert verifier.certificate(leaf(identity)).spki == first.spki
    assert len(chains) == verified


def test_no_verdict_outlives_its_certificate(identity: ServerIdentity, policy: UnsafeAllowSimulated) -> None:
    clock = Clock()
    verifier = PeerVerifier(policy, clock=clock, max_age=timedelta(hours=24))
    expires = verifier.certificate(leaf(identity)).expires
    clock.now = expires - timedelta(seconds=1)
    assert verifier.certificate(leaf(identity))
    clock.now = expires + timedelta(seconds=1)
    with pytest.raises(NotGenuineError, match="server certificate is valid"):
        verifier.certificate(leaf(identity))


def test_another_certificate_of_the_same_key_is_not_in_the_cache(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    verifier = PeerVerifier(policy)
    der = bytearray(leaf(ServerIdentity(psp, statement())))
    verifier.certificate(bytes(der))
    der[-1] ^= 1  # the same key and evidence under a broken signature
    with pytest.raises(AttestationError):
        verifier.certificate(bytes(der))


def test_a_refused_certificate_is_not_remembered(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated, chains: list[bytes]
) -> None:
    verifier = PeerVerifier(policy)
    der = leaf(ServerIdentity(psp.altered(vmpl=1), statement()))
    for _ in range(2):
        with pytest.raises(AttestationError):
            verifier.certificate(der)
    assert len(chains) == 2
    assert len(verifier.cache) == 0


def test_the_cache_is_bounded(identity: ServerIdentity, policy: UnsafeAllowSimulated) -> None:
    verified = PeerVerifier(policy).certificate(leaf(identity))
    cache, now = VerdictCache(max_entries=3), datetime.now(UTC)
    for number in range(5):
        cache.put(b"%d" % number, verified, now)
    assert len(cache) == 3
    assert [cache.get(b"%d" % number, now) is None for number in range(5)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_the_second_connection_verifies_fresh_evidence_only(
    running: Any, policy: UnsafeAllowSimulated, chains: list[bytes]
) -> None:
    with httpx.Client(
        transport=RaTlsTransport(policy), base_url=running.url, headers={"connection": "close"}
    ) as client:
        verdicts = [response_verdict(client.get("/")) for _ in range(3)]
    assert len(chains) == 4  # one certificate, three connections
    assert len(set(chains)) == 4
    assert len({verdict.proof.nonce for verdict in verdicts}) == 3
    assert {verdict.key_sha256 for verdict in verdicts} == {verdicts[0].key_sha256}


@dataclass
class Leaked:
    """The real service's TLS key in an attacker's hands."""

    stolen: Credential

    def credential(self) -> Credential:
        return self.stolen


@dataclass
class Forwarder:
    """Answers with evidence that the real service made for the attacker's own connection to it."""

    identity: ServerIdentity
    seen: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["path"])
        nonce = bytes.fromhex(scope["query_string"].decode().partition("=")[2])
        body = self.identity.fresh_evidence(nonce, b"another exporter".ljust(32))
        headers = [
            (b"content-type", FRESH_MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def test_a_warm_cache_does_not_help_a_relay_with_the_leaked_key(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated, chains: list[bytes]
) -> None:
    relay = Forwarder(identity)
    with (
        serve(Leaked(identity.credential()), app=relay) as attacker,
        httpx.Client(transport=RaTlsTransport(policy)) as client,
    ):
        assert client.get(running.url).status_code == 200
        verified = len(chains)
        with pytest.raises(ChannelBindingError, match="report_data"):
            client.post(f"{attacker.url}/secret", content=b"prompt")
        assert len(chains) == verified + 1  # the certificate was known; its fresh evidence was judged
    assert relay.seen == ["/attestation"]


def test_an_idle_connection_is_replaced_when_its_verdict_is_too_old(
    running: Any, policy: UnsafeAllowSimulated
) -> None:
    nonces: list[bytes] = []
    for max_age, connections in ((timedelta(0), 3), (10 * MINUTE, 1)):
        transport = RaTlsTransport(policy, max_age=max_age)
        with httpx.Client(transport=transport, base_url=running.url) as client:
            nonces = [response_verdict(client.get("/")).proof.nonce for _ in range(3)]
        assert len(set(nonces)) == connections

    async def session() -> None:
        transport = AsyncRaTlsTransport(policy, max_age=timedelta(0))
        async with httpx.AsyncClient(transport=transport, base_url=running.url) as client:
            verdicts = [response_verdict(await client.get("/")) for _ in range(3)]
        assert len({verdict.proof.nonce for verdict in verdicts}) == 3

    asyncio.run(session())


def test_a_verdict_belongs_to_the_connection_of_its_response(
    serve: Serve, running: Any, psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    with (
        serve(ServerIdentity(psp, statement())) as other,
        httpx.Client(transport=RaTlsTransport(policy)) as client,
    ):
        first = response_verdict(client.get(running.url))
        second = response_verdict(client.get(other.url))
        again = response_verdict(client.get(running.url))
    assert first.key_sha256 != second.key_sha256
    assert again is first


def test_other_responses_have_no_verdict() -> None:
    with pytest.raises(LookupError):
        response_verdict(httpx.Response(200))


@dataclass
class Rotating:
    """A service that says ``times`` times that the connection's key has just been rotated out."""

    inner: Any
    times: int
    paths: list[str] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == "/attestation" and self.times:
            self.times -= 1
            await send({"type": "http.response.start", "status": 409, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.inner(scope, receive, send)


@pytest.mark.parametrize("how", ["verify", "blocking", "asynchronous"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_key_that_is_rotated_out_meanwhile_is_verified_anew_once(
    serve: Serve, running: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated, how: str, times: int
) -> None:
    app = Rotating(running.app, times)

    def use(url: str) -> None:
        if how == "verify":
            verify(url, policy)
        elif how == "blocking":
            with connect(url, policy) as client:
                assert client.post("/digest", content=b"prompt").status_code == 200
        else:

            async def session() -> None:
                async with connect_async(url, policy) as client:
                    assert (await client.post("/digest", content=b"prompt")).status_code == 200

            asyncio.run(session())

    with serve(identity, app=app) as server:
        if times == 1:
            use(server.url)
        else:
            with pytest.raises(KeyRotatedError) as caught:
                use(server.url)
            assert caught.value.code == "key-rotated"
    sent = [] if how == "verify" or times == 2 else ["/digest"]
    assert app.paths == ["/attestation", "/attestation", *sent]


def test_a_rotated_key_is_verified_like_the_first(
    serve: Serve,
    psp: SimulatedPsp,
    statement: MakeStatement,
    policy: UnsafeAllowSimulated,
    chains: list[bytes],
) -> None:
    clock = Clock()
    identity = ServerIdentity(psp, statement(), clock=clock, background=lambda work: work())
    transport = RaTlsTransport(policy, clock=clock)
    with (
        serve(identity) as running,
        httpx.Client(transport=transport, base_url=running.url, headers={"connection": "close"}) as client,
    ):
        first = response_verdict(client.get("/"))
        clock.now += timedelta(hours=13)
        second = response_verdict(client.get("/"))
        third = response_verdict(client.get("/"))
    assert first.key_sha256 != second.key_sha256 == third.key_sha256
    assert len(chains) == 5  # two certificates, three connections
