"""The server's identity: keys, certificates, rotation, fresh evidence, rate limit."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import (
    AttestationError,
    ChannelBindingError,
    EvidenceUnavailableError,
    InvalidPolicyError,
    KeyRotatedError,
    MalformedEvidenceError,
    NotGenuineError,
)
from attestation.evidence import Evidence
from attestation.peer import PeerVerifier
from attestation.policy import UnsafeAllowSimulated
from attestation.rate_limit import TokenBucket
from attestation.ratls import OID_EVIDENCE, ServerIdentity, fresh_evidence
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

MakeStatement = Callable[..., Statement]
NONCE, EXPORTER = b"n" * 32, b"e" * 32


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


class Failing:
    """A provider that can be switched off."""

    def __init__(self, inner: SimulatedPsp) -> None:
        self.inner, self.broken = inner, False

    def evidence(self, report_data: bytes) -> Evidence:
        if self.broken:
            raise EvidenceUnavailableError("switched off")
        return self.inner.evidence(report_data)


class Counting:
    """Counts what it is asked for."""

    def __init__(self, inner: SimulatedPsp) -> None:
        self.inner, self.count = inner, 0

    def evidence(self, report_data: bytes) -> Evidence:
        self.count += 1
        time.sleep(0.05)  # as a real one: long enough for others to come
        return self.inner.evidence(report_data)


def at_once(work: Callable[[], None]) -> None:
    """Rotate in the caller's thread, so that a test sees the result."""
    work()


def leaf(identity: ServerIdentity) -> bytes:
    return identity.credential().certificate.public_bytes(Encoding.DER)


def test_the_certificate_passes_and_gives_a_verdict(
    identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    verifier = PeerVerifier(policy)
    verified = verifier.certificate(leaf(identity))
    body = fresh_evidence(identity, NONCE, EXPORTER)
    verdict = verifier.fresh(verified, body, nonce=NONCE, exporter=EXPORTER, tls_version="TLSv1.3")
    assert verdict.simulated
    assert verdict.fresh_evidence
    assert verdict.model_identity == bytes(range(32)).hex()
    assert verdict.as_dict()["protection"] == "lpn"


@pytest.mark.parametrize(
    ("nonce", "exporter"), [(b"x" * 32, EXPORTER), (NONCE, b"x" * 32), (EXPORTER, NONCE)]
)
def test_fresh_evidence_is_bound_to_nonce_and_exporter(
    identity: ServerIdentity, policy: UnsafeAllowSimulated, nonce: bytes, exporter: bytes
) -> None:
    verifier = PeerVerifier(policy)
    verified = verifier.certificate(leaf(identity))
    body = fresh_evidence(identity, NONCE, EXPORTER)
    with pytest.raises(ChannelBindingError):
        verifier.fresh(verified, body, nonce=nonce, exporter=exporter, tls_version="TLSv1.3")


def test_fresh_evidence_must_come_from_the_certificates_guest(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    provider = Failing(psp)
    identity = ServerIdentity(provider, statement())
    verifier = PeerVerifier(policy)
    verified = verifier.certificate(leaf(identity))
    provider.inner = psp.altered(report_id=bytes(32))
    body = fresh_evidence(identity, NONCE, EXPORTER)
    with pytest.raises(ChannelBindingError, match="report_id"):
        verifier.fresh(verified, body, nonce=NONCE, exporter=EXPORTER, tls_version="TLSv1.3")


def test_lengths_of_nonce_and_exporter_are_checked(identity: ServerIdentity) -> None:
    for nonce, exporter in ((b"", EXPORTER), (NONCE, b""), (NONCE * 2, EXPORTER)):
        with pytest.raises(EvidenceUnavailableError):
            fresh_evidence(identity, nonce, exporter)


def test_keys_are_p256_and_live_a_day(identity: ServerIdentity) -> None:
    certificate = identity.credential().certificate
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(hours=24)
    assert "key" not in repr(identity.credential())


@pytest.mark.parametrize("lifetime", [timedelta(0), timedelta(minutes=10), timedelta(hours=25)])
def test_lifetimes_out_of_range_are_refused(
    psp: SimulatedPsp, statement: MakeStatement, lifetime: timedelta
) -> None:
    with pytest.raises(InvalidPolicyError):
        ServerIdentity(psp, statement(), lifetime=lifetime)


def test_rotation_before_expiry_keeps_the_previous_key_usable(
    psp: SimulatedPsp, statement: MakeStatement
) -> None:
    clock = Clock()
    identity = ServerIdentity(psp, statement(), clock=clock, background=at_once)
    first = identity.credential()
    clock.now += timedelta(hours=11)
    assert identity.credential() is first
    clock.now += timedelta(hours=2)
    second = identity.credential()
    assert second.spki != first.spki
    assert clock.now < first.expires < second.expires
    assert fresh_evidence(identity, NONCE, EXPORTER, spki=first.spki)
    assert fresh_evidence(identity, NONCE, EXPORTER, spki=second.spki)
    clock.now += timedelta(hours=13)
    identity.credential()
    with pytest.raises(KeyRotatedError, match="rotated out"):
        fresh_evidence(identity, NONCE, EXPORTER, spki=first.spki)


def test_a_failed_rotation_keeps_a_valid_key_and_is_retried(
    psp: SimulatedPsp, statement: MakeStatement
) -> None:
    clock, provider = Clock(), Failing(psp)
    identity = ServerIdentity(provider, statement(), clock=clock, background=at_once)
    first = identity.credential()
    provider.broken = True
    clock.now += timedelta(hours=13)
    assert identity.credential() is first
    provider.broken = False
    assert identity.credential() is first  # not yet
    clock.now += timedelta(minutes=2)
    second = identity.credential()
    assert second is not first
    provider.broken = True
    clock.now += timedelta(hours=25)
    with pytest.raises(EvidenceUnavailableError):
        identity.credential()


def test_connections_do_not_wait_for_a_rotation(psp: SimulatedPsp, statement: MakeStatement) -> None:
    clock, waiting, release = Clock(), threading.Event(), threading.Event()

    class Slow(Failing):
        def evidence(self, report_data: bytes) -> Evidence:
            if self.broken:
                waiting.set()
                assert release.wait(60)
            return self.inner.evidence(report_data)

    provider = Slow(psp)
    identity = ServerIdentity(provider, statement(), clock=clock)
    first = identity.credential()
    provider.broken = True
    clock.now += timedelta(hours=13)
    assert identity.credential() is first
    assert waiting.wait(60)
    assert identity.credential() is first  # the security processor is busy, this connection is not held up
    release.set()
    deadline = time.monotonic() + 60
    while identity.credential() is first:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_expired_key_is_never_served_and_made_anew_once(
    psp: SimulatedPsp, statement: MakeStatement
) -> None:
    clock, provider, together = Clock(), Counting(psp), threading.Barrier(8)
    identity = ServerIdentity(provider, statement(), clock=clock)
    clock.now += timedelta(hours=48)

    def connect(_: int) -> bytes:
        together.wait(60)
        return identity.credential().spki

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(connect, range(8)))
    assert len(made) == 1
    assert provider.count == 2


def test_the_key_is_never_written_anywhere(psp: SimulatedPsp, statement: MakeStatement) -> None:
    written: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open":
            _, mode, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) or (mode and set(mode) & set("wax+")):
                written.append(str(arguments[0]))

    sys.addaudithook(hook)
    try:
        clock = Clock()
        identity = ServerIdentity(psp, statement(), clock=clock, background=at_once)
        clock.now += timedelta(hours=13)
        assert fresh_evidence(identity, NONCE, EXPORTER, spki=identity.credential().spki)
        seen = list(written)
        open(os.devnull, "w").close()  # the control: the hook does see writes
    finally:
        watching = False
    assert seen == []
    assert written == [os.devnull]


def test_the_revocation_list_that_was_sent_is_judged(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    class WithList:
        crl: bytes | None = None

        def evidence(self, report_data: bytes) -> Evidence:
            evidence = psp.evidence(report_data)
            return evidence if self.crl is None else replace(evidence, crl=self.crl)

    provider = WithList()
    identity = ServerIdentity(provider, statement())
    verified = PeerVerifier(policy).certificate(leaf(identity))
    provider.crl = b"not a list"
    with pytest.raises(AttestationError):
        PeerVerifier(policy).certificate(leaf(ServerIdentity(provider, statement())))
    body = fresh_evidence(identity, NONCE, EXPORTER)
    with pytest.raises(AttestationError):
        PeerVerifier(policy).fresh(verified, body, nonce=NONCE, exporter=EXPORTER, tls_version="TLSv1.3")


def test_an_expired_certificate_is_refused(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    clock = Clock()
    der = leaf(ServerIdentity(psp, statement(), clock=clock))
    for shift in (timedelta(hours=24), -timedelta(minutes=6)):
        with pytest.raises(NotGenuineError, match="server certificate is valid"):
            PeerVerifier(policy, clock=lambda shift=shift: clock.now + shift).certificate(der)  # type: ignore[misc]


def test_oversized_evidence_is_not_put_into_a_certificate(
    psp: SimulatedPsp, statement: MakeStatement
) -> None:
    class Huge:
        def evidence(self, report_data: bytes) -> Evidence:
            evidence = psp.evidence(report_data)
            return Evidence(evidence.report, bytes(70000), evidence.ask, evidence.ark)

    with pytest.raises(EvidenceUnavailableError, match="more than clients accept"):
        ServerIdentity(Huge(), statement())


@given(data=st.data())
def test_mutated_certificates_raise_nothing_unexpected(
    identity: ServerIdentity, policy: UnsafeAllowSimulated, data: st.DataObject
) -> None:
    der = bytearray(leaf(identity))
    for _ in range(data.draw(st.integers(1, 3))):
        der[data.draw(st.integers(0, len(der) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.just(len(der)) | st.integers(0, len(der)))
    if bytes(der[:end]) != leaf(identity):
        with pytest.raises(AttestationError):
            PeerVerifier(policy).certificate(bytes(der[:end]))


def test_a_certificate_without_evidence_is_refused(psp: SimulatedPsp, policy: UnsafeAllowSimulated) -> None:
    der = psp.evidence(bytes(64)).vcek
    with pytest.raises(AttestationError):
        PeerVerifier(policy).certificate(der)
    with pytest.raises(MalformedEvidenceError):
        PeerVerifier(policy).certificate(bytes(80000))


def test_the_evidence_extension_has_its_registered_oid(identity: ServerIdentity) -> None:
    assert OID_EVIDENCE.dotted_string == "2.23.133.5.4.9"
    assert identity.credential().certificate.extensions.get_extension_for_oid(OID_EVIDENCE)


def test_token_bucket() -> None:
    now = 100.0
    bucket = TokenBucket(rate=2.0, burst=3, clock=lambda: now)
    assert [bucket.try_take() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.try_take() == pytest.approx(0.5)
    now += 0.25
    assert bucket.try_take() == pytest.approx(0.25)
    now += 0.25
    assert bucket.try_take() == 0.0
    now += 3600
    assert [bucket.try_take() == 0.0 for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_token_buckets_need_positive_numbers(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(rate=rate, burst=burst)
