"""The gRPC service of the worker."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gelo.formats import WeightFormat
from gelo.header import HeaderError, OffloadHeader, OperandKind, Status
from gelo.v1 import worker_pb2, worker_pb2_grpc
from gpu_worker.doorbell import DoorbellServer
from gpu_worker.engines.base import Engine, EngineError
from gpu_worker.lock import EngineLock
from gpu_worker.session import Session, Sessions, fits
from gpu_worker.weights import UploadError, WeightStore, weight_key

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
MAX_WEIGHTS = 1 << 14
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How to serve. ``weight_memory`` is in bytes; ``address`` is host:port."""

    address: str
    weight_memory: int = 64 << 30
    doorbell: bool = True
    max_sessions: int = 64


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Implements ``gelo.v1.Worker`` on one engine."""

    def __init__(self, engine: Engine, settings: WorkerSettings) -> None:
        lock = self._lock = EngineLock()
        self._engine = engine
        self._store = WeightStore(engine, lock, capacity=settings.weight_memory)
        self._sessions = Sessions(engine, self._store, lock, limit=settings.max_sessions)
        self._doorbell = DoorbellServer(self._sessions) if settings.doorbell else None

    def close(self) -> None:
        """Stop the doorbell and the engine."""
        if self._doorbell is not None:
            self._doorbell.close()
        with self._lock:
            self._engine.close()

    def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetInfoReply:
        """What the worker runs on."""
        info = self._engine.info
        return worker_pb2.GetInfoReply(
            version=version("gelo-llm"),
            engine=info.name,
            adapter=info.adapter,
            backend=info.backend,
            hardware_gpu=info.hardware_gpu,
            features=info.features,
            limits=info.limits,
            max_message_bytes=MAX_MESSAGE_BYTES,
            boot_id=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
        )

    def MissingWeights(
        self, request: worker_pb2.MissingWeightsRequest, context: grpc.ServicerContext
    ) -> worker_pb2.MissingWeightsReply:
        """The hashes, of those asked, that must be uploaded."""
        keys = _keys(request.weights, context)
        missing = [key[:32] for key in keys if key not in self._store]
        return worker_pb2.MissingWeightsReply(sha256=missing)

    def UploadWeight(
        self, request_iterator: Iterator[worker_pb2.UploadWeightRequest], context: grpc.ServicerContext
    ) -> worker_pb2.UploadWeightReply:
        """Receive one weight."""
        first = next(request_iterator, None)
        if first is None or first.WhichOneof("part") != "weight":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an upload starts with its weight reference")
        weight = first.weight
        form = _format(weight, context)
        try:
            chunks = (message.chunk for message in request_iterator)
            self._store.add(weight.sha256, weight.d_in, weight.d_out, form, chunks)
        except UploadError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return worker_pb2.UploadWeightReply()

    def OpenSession(
        self, request: worker_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> worker_pb2.OpenSessionReply:
        """Bind weights to ids."""
        keys = _keys(request.weights, context)
        try:
            session = self._sessions.open(keys)
        except KeyError:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a weight of this session was not uploaded")
        except RuntimeError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        offered = self._doorbell is not None and request.want_doorbell
        return worker_pb2.OpenSessionReply(
            session_id=session.session_id,
            doorbell_path=str(self._doorbell.path) if offered and self._doorbell else "",
        )

    def CloseSession(
        self, request: worker_pb2.CloseSessionRequest, context: grpc.ServicerContext
    ) -> worker_pb2.CloseSessionReply:
        """Release a session's weights."""
        self._sessions.close(request.session_id)
        return worker_pb2.CloseSessionReply()

    def Compute(
        self, request_iterator: Iterator[worker_pb2.ComputeRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.ComputeReply]:
        """Offloads inline. The session ends with the stream."""
        first = next(request_iterator, None)
        session = self._sessions.claim(first.session_id) if first is not None else None
        if session is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such session")
        try:
            for request in request_iterator:
                yield self._compute(session, request, context)
        finally:
            self._sessions.close(session.session_id)

    def _compute(
        self, session: Session, request: worker_pb2.ComputeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.ComputeReply:
        try:
            header = OffloadHeader.unpack(request.header)
        except HeaderError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        good = fits(session, header) and len(request.operand) == header.operand_bytes
        if not good or header.result_bytes > MAX_MESSAGE_BYTES:
            return worker_pb2.ComputeReply(header=header._replace(status=Status.BAD_REQUEST).pack())
        words = header.kind == OperandKind.WORDS
        operand = np.frombuffer(request.operand, dtype=np.uint32 if words else np.float16)
        operand = operand.reshape(header.rows, header.d_in)
        result = np.empty((header.rows, header.d_out), dtype=np.uint32 if words else np.float32)
        answer = self._sessions.execute(session, header, operand, result)
        payload = result.tobytes() if answer.status == Status.OK else b""
        return worker_pb2.ComputeReply(header=answer.pack(), result=payload)


def _format(weight: worker_pb2.WeightRef, context: grpc.ServicerContext) -> WeightFormat:
    try:
        return WeightFormat(weight.format)
    except ValueError:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown weight format {weight.format}")
        raise


def _keys(weights: Sequence[worker_pb2.WeightRef], context: grpc.ServicerContext) -> list[bytes]:
    if len(weights) > MAX_WEIGHTS or any(len(weight.sha256) != 32 for weight in weights):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too many weights, or a malformed hash")
    return [weight_key(w.sha256, w.d_in, w.d_out, _format(w, context)) for w in weights]


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A started server: ``port`` is the one it got when 0 was asked for."""

    server: grpc.Server
    service: WorkerService
    port: int

    def stop(self) -> None:
        """Stop serving and free the engine."""
        self.server.stop(grace=1).wait()
        self.service.close()


def start(engine: Engine, settings: WorkerSettings) -> RunningWorker:
    """Serve in background threads.

    Raises:
        OSError: the address cannot be bound.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + (1 << 20)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + (1 << 20)),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=settings.max_sessions + 8), options=options)
    service = WorkerService(engine, settings)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    checks.set("gelo.v1.Worker", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    try:
        port = server.add_insecure_port(settings.address)
    except RuntimeError as error:
        service.close()
        raise OSError(f"cannot listen on {settings.address}: {error}") from error
    server.start()
    return RunningWorker(server, service, port)


def serve(
    engine: Engine, settings: WorkerSettings, *, on_ready: Callable[[int], None] = lambda _: None
) -> None:
    """Serve until SIGINT or SIGTERM; ``on_ready`` is told the port."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    running = start(engine, settings)
    info = engine.info
    host = settings.address.rpartition(":")[0]
    log.info("engine %s on %s (%s)", info.name, info.adapter, info.backend)
    log.info("features: %s; limits: %s", ", ".join(info.features) or "none", info.limits)
    log.info("listening on %s:%d", host, running.port)
    on_ready(running.port)
    stop.wait()
    running.stop()
