"""The route that gives fresh evidence: its limits and its refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from attestation import endpoint
from attestation.client import connect
from attestation.endpoint import CONNECTION_BURST, CONNECTION_RATE, FreshEvidenceEndpoint
from attestation.errors import EvidenceUnavailableError
from attestation.evidence import FRESH_MEDIA_TYPE, decode_fresh
from attestation.policy import UnsafeAllowSimulated
from attestation.ratls import ServerIdentity
from attestation.simulated import SimulatedPsp
from attestation.statement import PURPOSE_FRESH, Statement, report_data

NONCE = b"\xab" * 32
QUERY = b"nonce=" + b"ab" * 32


def ask(
    app: FreshEvidenceEndpoint,
    identity: Any,
    *,
    query: bytes = QUERY,
    exporter: bytes | None = bytes(32),
    method: str = "GET",
    spki: bytes | None = None,
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of one answer."""
    extensions = {} if exporter is None else {"ratls.exporter": exporter}
    extensions["ratls.spki"] = spki or identity.credential().spki
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "query_string": query, "extensions": extensions}
    asyncio.run(app(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def test_the_answer_is_evidence_over_nonce_and_exporter(identity: ServerIdentity) -> None:
    status, headers, body = ask(FreshEvidenceEndpoint(identity), identity)
    assert status == 200
    assert headers[b"content-type"].decode() == FRESH_MEDIA_TYPE
    assert headers[b"cache-control"] == b"no-store"
    assert decode_fresh(body).report[0x50:0x90] == report_data(
        purpose=PURPOSE_FRESH,
        spki=identity.credential().spki,
        statement=identity.statement.encode(),
        nonce=NONCE,
        exporter=bytes(32),
    )


@pytest.mark.parametrize(
    "query",
    [
        b"",
        b"nonce=",
        b"nonce=00",
        b"other=" + b"ab" * 32,
        QUERY + b"&" + QUERY,
        b"nonce=" + b"\xff" * 64,
        b"a=1&" * 8 + QUERY,
        QUERY + b"&x=" + b"y" * 400,
        b"nonce=%61" + b"ab" * 31 + b"z",
    ],
)
def test_bad_nonces_are_refused_before_they_cost_anything(identity: ServerIdentity, query: bytes) -> None:
    app = FreshEvidenceEndpoint(identity, rate=1.0, burst=1)
    for _ in range(3):
        status, _, body = ask(app, identity, query=query)
        assert status == 400
        assert json.loads(body)["error"]["code"] == "bad-nonce"
    assert ask(app, identity)[0] == 200


def test_other_methods_and_connections_are_refused(identity: ServerIdentity) -> None:
    app = FreshEvidenceEndpoint(identity)
    assert ask(app, identity, method="POST")[0] == 405
    assert ask(app, identity, exporter=None)[0] == 500


def test_one_connection_is_limited_without_limiting_others(identity: ServerIdentity) -> None:
    now = 100.0
    app = FreshEvidenceEndpoint(identity, clock=lambda: now)
    statuses = [ask(app, identity, exporter=b"a" * 32)[0] for _ in range(CONNECTION_BURST + 1)]
    assert statuses == [200] * CONNECTION_BURST + [429]
    _, headers, _ = ask(app, identity, exporter=b"a" * 32)
    assert int(headers[b"retry-after"]) == 1 / CONNECTION_RATE
    assert ask(app, identity, exporter=b"b" * 32)[0] == 200
    now += 1 / CONNECTION_RATE
    assert ask(app, identity, exporter=b"a" * 32)[0] == 200


def test_all_connections_together_are_limited(identity: ServerIdentity) -> None:
    app = FreshEvidenceEndpoint(identity, rate=0.5, burst=3, clock=lambda: 100.0)
    statuses = [ask(app, identity, exporter=b"%032d" % number)[0] for number in range(5)]
    assert statuses == [200, 200, 200, 429, 429]


def test_what_is_remembered_of_connections_is_bounded(
    identity: ServerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_REMEMBERED", 4)
    app = FreshEvidenceEndpoint(identity)
    for number in range(9):
        ask(app, identity, exporter=b"%032d" % number)
    assert len(app._connections) == 4


def test_a_rotated_key_and_missing_evidence_are_told_apart(
    psp: SimulatedPsp, statement: Callable[..., Statement]
) -> None:
    class Failing:
        broken = False

        def evidence(self, report_data: bytes) -> Any:
            if self.broken:
                raise EvidenceUnavailableError("switched off")
            return psp.evidence(report_data)

    now, provider = [datetime.now(UTC)], Failing()
    identity = ServerIdentity(provider, statement(), clock=lambda: now[0], background=lambda work: work())
    app, spki = FreshEvidenceEndpoint(identity), identity.credential().spki
    for _ in range(2):
        now[0] += timedelta(hours=13)
        identity.credential()
    status, _, body = ask(app, identity, spki=spki)
    assert (status, json.loads(body)["error"]["code"]) == (409, "key-rotated")
    provider.broken = True
    status, _, body = ask(app, identity)
    assert (status, json.loads(body)["error"]["code"]) == (503, "evidence-unavailable")


def test_it_serves_the_real_client(
    serve: Any, identity: ServerIdentity, policy: UnsafeAllowSimulated
) -> None:
    with (
        serve(identity, app=FreshEvidenceEndpoint(identity)) as running,
        connect(running.url, policy) as client,
    ):
        statuses = [client.get("/attestation?" + QUERY.decode()).status_code for _ in range(CONNECTION_BURST)]
        assert statuses == [200] * (CONNECTION_BURST - 1) + [429]  # the client itself used one
        assert isinstance(client, httpx.Client)
