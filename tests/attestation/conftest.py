"""A simulated PSP for the whole session, and real uvicorn servers on loopback."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import uvicorn
from hypothesis import settings
from uvicorn.protocols.http.h11_impl import H11Protocol

from attestation.errors import BadNonceError
from attestation.evidence import FRESH_MEDIA_TYPE, Evidence, EvidenceProvider, parse_nonce
from attestation.policy import UnsafeAllowSimulated
from attestation.ratls import ServerIdentity, fresh_evidence
from attestation.server import ratls_protocol
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

EXAMPLES = int(os.environ.get("ATTESTATION_FUZZ_EXAMPLES", "100"))
"""Raise it for a long fuzzing run."""

settings.register_profile("attestation", deadline=None, max_examples=EXAMPLES, database=None)
settings.load_profile("attestation")

MODEL = bytes(range(32))
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's simulated ARK and ASK are kept."""
    return tmp_path_factory.mktemp("simulated-psp")


@pytest.fixture(scope="session")
def psp(cache_dir: Path) -> SimulatedPsp:
    """The session's simulated chip."""
    return SimulatedPsp(cache_dir=cache_dir)


def make_statement(**changes: Any) -> Statement:
    """A statement that ``make_policy`` accepts, with changes."""
    values: dict[str, Any] = {
        "model_identity": MODEL,
        "protection": "lpn",
        "protection_parameters": {"shift": 8, "security_bits": 134.5, "exact": True},
        "service": "gelo",
        "software_version": "0.1.0",
    }
    return Statement(**{**values, **changes})


@pytest.fixture(scope="session")
def statement() -> Callable[..., Statement]:
    """Factory of statements."""
    return make_statement


@pytest.fixture(scope="session")
def policy() -> UnsafeAllowSimulated:
    """Accepts the session's PSP with the default statement."""
    return UnsafeAllowSimulated.only(model_identity=MODEL, service="gelo")


@pytest.fixture(scope="session")
def identity(psp: SimulatedPsp) -> ServerIdentity:
    """The identity of a well-behaved service."""
    return ServerIdentity(psp, make_statement())


@dataclass
class App:
    """A small ASGI application that records what reached it."""

    identity: ServerIdentity
    paths: list[str] = field(default_factory=list)
    exporters: list[bytes] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    sent: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.paths.append(scope["path"])
        self.exporters.append(scope["extensions"]["ratls.exporter"])
        handler = getattr(self, "on_" + scope["path"].strip("/").replace("-", "_"), self.on_root)
        await handler(scope, receive, send)

    async def on_attestation(self, scope: Any, receive: Any, send: Any) -> None:
        extensions = scope["extensions"]
        query = parse_qs(scope["query_string"].decode())
        try:
            nonce = parse_nonce(query.get("nonce", [None])[0])
        except BadNonceError:
            await respond(send, b"", status=400)
            return
        body = fresh_evidence(
            self.identity, nonce, extensions["ratls.exporter"], spki=extensions["ratls.spki"]
        )
        await respond(send, body, content_type=FRESH_MEDIA_TYPE)

    async def on_root(self, scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"hello " + scope["scheme"].encode())

    async def on_digest(self, scope: Any, receive: Any, send: Any) -> None:
        """SHA-256 of the request's body, which is read only once ``release`` is set."""
        while scope["query_string"] == b"wait" and not self.release.is_set():
            await asyncio.sleep(0.01)
        digest, more = hashlib.sha256(), True
        while more:
            message = await receive()
            digest.update(message["body"])
            more = message.get("more_body", False)
        await respond(send, digest.hexdigest().encode())

    async def on_sse(self, scope: Any, receive: Any, send: Any) -> None:
        await start(send, "text/event-stream")
        for number in range(50):
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def on_endless(self, scope: Any, receive: Any, send: Any) -> None:
        await start(send, "text/event-stream")
        await receive()  # the empty request body
        await send({"type": "http.response.body", "body": b"data: 0\n\n", "more_body": True})
        if (await receive())["type"] == "http.disconnect":
            self.disconnected.set()

    async def on_flood(self, scope: Any, receive: Any, send: Any) -> None:
        """64 MiB in chunks; notes when the server makes it wait."""
        await start(send, "application/octet-stream")
        chunk = os.urandom(65536)
        for _ in range(1024):
            message = {"type": "http.response.body", "body": chunk, "more_body": True}
            sending = asyncio.ensure_future(send(message))
            if not (await asyncio.wait({sending}, timeout=0.3))[0]:
                self.stalled.set()
            await sending
            self.sent += len(chunk)
        await send({"type": "http.response.body", "body": b""})


async def start(send: Any, content_type: str, status: int = 200, length: int | None = None) -> None:
    """The head of a response."""
    headers = [(b"content-type", content_type.encode())]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def respond(send: Any, body: bytes, *, status: int = 200, content_type: str = "text/plain") -> None:
    """A whole response."""
    await start(send, content_type, status, len(body))
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class Running:
    """A server that listens."""

    app: Any
    port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"


Serve = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def serve() -> Serve:
    """``with serve(identity, app=..., ...) as running``: uvicorn with RA-TLS in a thread."""

    @contextlib.contextmanager
    def serving(
        identity: Any, *, app: Any = None, handshake_timeout: float = 10.0, base: Any = H11Protocol
    ) -> Iterator[Running]:
        app = App(identity) if app is None else app
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app,
            http=ratls_protocol(identity, handshake_timeout=handshake_timeout, base=base),
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        try:
            yield Running(app, listener.getsockname()[1])
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join()

    return serving


@pytest.fixture(scope="session")
def running(serve: Serve, identity: ServerIdentity) -> Iterator[Running]:
    """A well-behaved service for the whole session."""
    with serve(identity) as server:
        yield server


@dataclass(frozen=True)
class FixedProvider:
    """Answers every request with evidence for the same report data: evidence for another key."""

    inner: EvidenceProvider

    def evidence(self, report_data: bytes) -> Evidence:
        return self.inner.evidence(b"\x07" * 64)


@pytest.fixture(scope="session")
def fixed_provider(psp: SimulatedPsp) -> FixedProvider:
    """See ``FixedProvider``."""
    return FixedProvider(psp)


def read_certificates(name: str) -> list[bytes]:
    """The certificates of a PEM or DER file of ``data``, in DER."""
    data = (DATA / name).read_bytes()
    if not data.startswith(b"-----"):
        return [data]
    blocks = data.decode().split("-----BEGIN CERTIFICATE-----")[1:]
    return [base64.b64decode(block.partition("-----END")[0]) for block in blocks]


@pytest.fixture(scope="session")
def vector() -> Callable[[str], Evidence]:
    """Real evidence by name: genoa, genoa-v3, turin, milan-debug or milan-vlek."""
    files = {
        "genoa-v3": ("genoa_ms_report.bin", "genoa_ms_vcek.pem", "genoa_ms_ask.pem", "genoa_ms_ark.pem"),
        "genoa": ("genoa_cdai_report_v5.bin", "genoa_cdai_vcek.der", "genoa_ms_ask.pem", "genoa_ms_ark.pem"),
        "turin": ("turin_ms_report.bin", "turin_ms_vcek.pem", "turin_ms_ask.pem", "turin_ms_ark.pem"),
        "milan-debug": (
            "milan_gsg_report_v2.bin",
            "milan_gsg_vcek.der",
            "milan_ms_ask.pem",
            "milan_ms_ark.pem",
        ),
    }

    def load(name: str) -> Evidence:
        if name == "milan-vlek":
            _, ark, asvk = read_certificates("milan_trustee_ask_ark_asvk.pem")
            report = (DATA / "milan_trustee_vlek_report.bin").read_bytes()
            return Evidence(report, read_certificates("milan_trustee_vlek.der")[0], asvk, ark)
        report_file, *certificates = files[name]
        chain = [read_certificates(file)[0] for file in certificates]
        return Evidence((DATA / report_file).read_bytes(), *chain)

    return load
