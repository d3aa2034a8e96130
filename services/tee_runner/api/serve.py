"""Runs the service: model, worker session, engine, RA-TLS listener, metrics."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import uvicorn

from attestation.evidence import EvidenceProvider
from attestation.policy import DEFAULT_SECURITY_BITS
from attestation.ratls import ServerIdentity
from attestation.server import ratls_protocol
from attestation.statement import SECURITY_BITS, Statement
from tee_runner.api.app import create_app
from tee_runner.api.errors import without_values
from tee_runner.api.metrics import serve_metrics
from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.engine.scheduler import Scheduler
from tee_runner.engine.warm_up import warm_up
from tee_runner.models.loader import LoadedModel
from tee_runner.protection.base import Progress, Protection

log = logging.getLogger(__name__)

SERVICE_NAME = "gelo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen. Port 0 takes a free one; ``metrics_port`` None serves no metrics."""

    host: str
    port: int
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 0
    queue_limit: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The ports the service got."""

    port: int
    metrics_port: int | None


def statement_for(runtime: Runtime) -> Statement:
    """What the service says of itself in its attestation."""
    return Statement(
        model_identity=runtime.model.identity,
        protection=runtime.scheme.name,
        protection_parameters=runtime.protection_parameters,
        service=SERVICE_NAME,
        software_version=version("gelo-llm"),
    )


def report_protection(scheme: type[Protection], parameters: Mapping[str, int | float | str]) -> None:
    """Log what the operands are protected by, and what the operator must know of it."""
    bits = parameters.get(SECURITY_BITS)
    level = "" if bits is None else f", {bits} bits against known attacks"
    log.info("protection: %s%s", scheme.name, level)
    for name, value in sorted(parameters.items()):
        log.debug("protection: %s = %s", name, value)
    if scheme.warning:
        log.warning("%s", scheme.warning)
    if isinstance(bits, int | float) and bits < DEFAULT_SECURITY_BITS:
        log.warning(
            "%s has %s bits: clients refuse less than %d unless their policy says otherwise",
            scheme.name, bits, DEFAULT_SECURITY_BITS,
        )  # fmt: skip


def serve(
    model: LoadedModel,
    runtime_options: RuntimeOptions,
    options: ServeOptions,
    *,
    provider: EvidenceProvider,
    progress: Progress | None = None,
    on_ready: Callable[[Listening], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM. ``provider`` has the evidence signed.

    Raises:
        WorkerError: the worker cannot be reached at the start.
        AttestationError: no evidence can be had.
        OSError: a port cannot be bound.
    """
    runtime = Runtime(model, runtime_options, progress)
    scheduler = Scheduler(runtime, queue_limit=options.queue_limit)
    try:
        runtime.connect(progress)
        warm_up(runtime, progress)
        report_protection(runtime.scheme, runtime.protection_parameters)
        identity = ServerIdentity(provider, statement_for(runtime))
        listener = _listen(options.host, options.port)
        metrics = options.metrics_port
        if metrics is not None:
            metrics = serve_metrics(scheduler, host=options.metrics_host, port=metrics)
        listening = Listening(port=listener.getsockname()[1], metrics_port=metrics)
        log.info("serving %s at https://%s:%d", model.directory.name, options.host, listening.port)
        scheduler.start()
        _Server(identity, scheduler, lambda: on_ready(listening)).run(sockets=[listener])
    finally:
        scheduler.stop()
        runtime.close()


class _Server(uvicorn.Server):
    """A uvicorn server over RA-TLS that says when it accepts connections."""

    def __init__(self, identity: ServerIdentity, scheduler: Scheduler, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                without_values(create_app(scheduler, identity)),
                http=ratls_protocol(identity),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=3,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener
