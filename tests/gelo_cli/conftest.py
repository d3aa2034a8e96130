"""A small attested service, for the commands that need one but no model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from attestation.endpoint import FreshEvidenceEndpoint
from attestation.evidence import FRESH_PATH
from attestation.ratls import ServerIdentity
from attestation.server import ratls_protocol
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement

MODEL = bytes(range(32))


@dataclass
class Service:
    """Answers every path with its own name; remembers the paths."""

    evidence: FreshEvidenceEndpoint
    port: int = 0
    paths: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["path"] == FRESH_PATH:
            await self.evidence(scope, receive, send)
            return
        body = scope["path"].encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Simulated evidence, model ``MODEL``, service name with characters of a terminal markup."""
    statement = Statement(
        model_identity=MODEL,
        protection="lpn",
        protection_parameters={"security_bits": 134.5},
        service="[bold]gelo[/]",
        software_version="0.1.0",
    )
    identity = ServerIdentity(SimulatedPsp(), statement)
    app = Service(FreshEvidenceEndpoint(identity))
    listener = socket.create_server(("127.0.0.1", 0))
    app.port = listener.getsockname()[1]
    config = uvicorn.Config(app, http=ratls_protocol(identity), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    yield app
    server.should_exit = True
    thread.join()
