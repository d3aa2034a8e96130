"""What attestation costs a client: handshake and verification, cold and warm.

python -m bench.attestation [--repeats 200] [--json FILE]

The service runs in a process of its own, on loopback, with a simulated security processor: a real one
takes some milliseconds longer for each signature. "Cold" is the first connection of a client, which
judges the certificate's evidence and the fresh evidence; "warm" is a later one while the verdict on the
certificate is remembered, which judges the fresh evidence. "Added" compares with httpx over TLS 1.3 to
the same service, verifying nothing; it includes the round trip for the fresh evidence. The aims are
5 ms for a warm verification and 30 ms added to connecting.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import secrets
import socket
import ssl
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.hazmat.primitives.serialization import Encoding

from attestation.certificates import AMD_ROOTS
from attestation.client import RaTlsTransport
from attestation.endpoint import FreshEvidenceEndpoint
from attestation.evidence import Evidence
from attestation.peer import PeerVerifier
from attestation.pem import CERTIFICATE, read_der
from attestation.policy import UNPINNED, UnsafeAllowSimulated
from attestation.ratls import ServerIdentity
from attestation.server import ratls_protocol
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement
from attestation.verify import verify_evidence
from bench import report

DATA = Path(__file__).parent.parent / "tests" / "attestation" / "data"
WARM_AIM_MS, ADDED_AIM_MS = 5.0, 30.0
COLUMNS = ("what", "n", "median ms", "p95 ms", "aim ms")
AT = datetime(2026, 10, 1, tzinfo=UTC)  # within the validity of the real vectors


def serve(pipe: Connection) -> None:
    """The service's process: sends its port, runs until it is ended."""
    identity = ServerIdentity(SimulatedPsp(), statement())
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    endpoint = FreshEvidenceEndpoint(identity, rate=1e6, burst=10**6)
    config = uvicorn.Config(
        endpoint, http=ratls_protocol(identity), lifespan="off", log_level="critical", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


def statement() -> Statement:
    """What the service says of itself."""
    return Statement(
        model_identity=bytes(32), protection="gelo-hd3", protection_parameters={"shield_rows": 8},
        service="bench", software_version="0",
    )  # fmt: skip


def clocked(action: Callable[[], object], repeats: int, *, warm_ups: int = 3) -> list[float]:
    """Milliseconds of each call."""
    times = []
    for number in range(repeats + warm_ups):
        started = time.perf_counter()
        action()
        if number >= warm_ups:
            times.append((time.perf_counter() - started) * 1e3)
    return times


def row(what: str, times: list[float], aim: float | None = None) -> dict[str, Any]:
    """One row of the table."""
    return {
        "what": what, "n": len(times), "median ms": statistics.median(times),
        "p95 ms": sorted(times)[int(0.95 * (len(times) - 1))], "aim ms": aim,
    }  # fmt: skip


def offline(policy: UnsafeAllowSimulated, repeats: int) -> list[dict[str, Any]]:
    """Verification without a network."""
    identity = ServerIdentity(SimulatedPsp(), statement())
    der = identity.credential().certificate.public_bytes(Encoding.DER)
    nonce, exporter = secrets.token_bytes(32), secrets.token_bytes(32)
    body = identity.fresh_evidence(nonce, exporter)

    def judge(verifier: PeerVerifier) -> None:
        verified = verifier.certificate(der)
        verifier.fresh(verified, body, nonce=nonce, exporter=exporter, tls_version="TLSv1.3")

    def read(name: str) -> bytes:
        return read_der((DATA / name).read_bytes(), CERTIFICATE, name)[0]

    report_file = (DATA / "genoa_cdai_report_v5.bin").read_bytes()
    real = Evidence(report_file, *map(read, ("genoa_cdai_vcek.der", "genoa_ms_ask.pem", "genoa_ms_ark.pem")))
    warm = PeerVerifier(policy)
    identities = functools.partial(ServerIdentity, SimulatedPsp(), statement())
    cases: tuple[tuple[str, Callable[[], object], float | None], ...] = (
        ("service: new key and certificate", identities, None),
        ("service: fresh evidence", lambda: identity.fresh_evidence(nonce, exporter), None),
        ("real Genoa report and chain", lambda: verify_evidence(real, roots=AMD_ROOTS, at=AT), None),
        ("verification, cold", lambda: judge(PeerVerifier(policy)), None),
        ("verification, warm", lambda: judge(warm), WARM_AIM_MS),
    )
    return [row(what, clocked(action, repeats), aim) for what, action, aim in cases]


def online(policy: UnsafeAllowSimulated, url: str, repeats: int) -> list[dict[str, Any]]:
    """Whole requests; plain and attested connections in turn, so that both see the same machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3

    def connect(client: httpx.Client) -> None:
        client.get(url, headers={"connection": "close"})

    def connect_cold() -> None:
        with httpx.Client(transport=RaTlsTransport(policy), trust_env=False) as client:
            connect(client)

    with (
        httpx.Client(verify=context, trust_env=False) as plain,
        httpx.Client(transport=RaTlsTransport(policy), trust_env=False) as attested,
    ):
        ways: tuple[Callable[[], None], ...] = (
            lambda: connect(plain), connect_cold, lambda: connect(attested),
        )  # fmt: skip
        rounds = [[clocked(way, 1, warm_ups=0)[0] for way in ways] for _ in range(repeats + 3)][3:]
        bare, cold, warm = (list(times) for times in zip(*rounds, strict=True))
        kept_bare = clocked(lambda: plain.get(url), repeats)
        kept = clocked(lambda: attested.get(url), repeats)
    return [
        row("connect and request, nothing verified", bare),
        row("connect and request, attested, cold", cold),
        row("connect and request, attested, warm", warm),
        row("added to connecting, cold", [a - b for a, b in zip(cold, bare, strict=True)]),
        row("added to connecting, warm", [a - b for a, b in zip(warm, bare, strict=True)], ADDED_AIM_MS),
        row("request on a kept connection, nothing verified", kept_bare),
        row("request on a kept connection, attested", kept),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    logging.disable(logging.WARNING)  # that the evidence is simulated is in the table's title
    warnings.simplefilter("ignore")  # serial number 0 of AMD's certificates
    policy = UnsafeAllowSimulated.only(model_identity=UNPINNED, service="bench")
    ours, theirs = multiprocessing.Pipe()
    service = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    service.start()
    try:
        url = f"https://127.0.0.1:{ours.recv()}/"
        rows = [*offline(policy, arguments.repeats), *online(policy, url, arguments.repeats)]
    finally:
        service.terminate()
        service.join()
    report.show("Attestation, simulated processor, loopback", COLUMNS, rows)
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
