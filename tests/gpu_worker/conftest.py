"""Engines and servers shared by the worker's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gelo.v1 import worker_pb2, worker_pb2_grpc
from gpu_worker.engines.base import Engine, EngineError, EngineInfo, LoadedWeight
from gpu_worker.server import RunningWorker, WorkerSettings, start

HANG_GUARD_S = 120.0


@dataclass
class NumpyEngine(Engine):
    """The plain reference, which counts what is resident and fails on request."""

    resident: list[LoadedWeight] = field(default_factory=list)
    failing: bool = False
    closed: bool = False
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            name="cpu", adapter="NumPy", backend="test", hardware_gpu=False, limits={"threads": 1}
        )
    )

    def load(self, weight: NDArray[np.float16]) -> LoadedWeight:
        """See :meth:`Engine.load`."""
        if self.failing:
            raise EngineError("no memory")
        loaded = LoadedWeight(d_in=weight.shape[1], d_out=weight.shape[0], state=weight.astype(np.float32))
        self.resident.append(loaded)
        return loaded

    def unload(self, weight: LoadedWeight) -> None:
        """See :meth:`Engine.unload`."""
        self.resident = [other for other in self.resident if other is not weight]

    def matmul(self, weight: LoadedWeight, operand: NDArray[np.float16], out: NDArray[np.float32]) -> None:
        """See :meth:`Engine.matmul`."""
        if self.failing:
            raise EngineError("device lost")
        if self.closed or not any(weight is other for other in self.resident):
            raise AssertionError("an unloaded weight or a closed engine was used")
        assert isinstance(weight.state, np.ndarray)
        out[...] = operand.astype(np.float32) @ weight.state.T

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        self.closed = True


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight and its name on the wire."""

    values: NDArray[np.float16]
    name: str = "w"

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return self.values.tobytes()

    @property
    def digest(self) -> bytes:
        """Their SHA-256."""
        return sha256(self.data).digest()

    @property
    def reference(self) -> worker_pb2.WeightRef:
        """As the protocol names it."""
        d_out, d_in = self.values.shape
        return worker_pb2.WeightRef(name=self.name, sha256=self.digest, d_in=d_in, d_out=d_out)


def make_weight(d_out: int, d_in: int, seed: int = 0) -> Weight:
    """Small integers, so that products are exact in any order."""
    return Weight(np.random.default_rng(seed).integers(-8, 9, (d_out, d_in)).astype(np.float16))


@dataclass(frozen=True, slots=True)
class Service:
    """A served worker and a stub to it."""

    running: RunningWorker
    engine: NumpyEngine
    channel: grpc.Channel
    stub: worker_pb2_grpc.WorkerStub

    def upload(self, *weights: Weight) -> None:
        """Upload each in one chunk."""
        for weight in weights:
            parts = [
                worker_pb2.UploadWeightRequest(weight=weight.reference),
                worker_pb2.UploadWeightRequest(chunk=weight.data),
            ]
            self.stub.UploadWeight(iter(parts), timeout=HANG_GUARD_S)

    def open(self, *weights: Weight, doorbell: bool = False) -> worker_pb2.OpenSessionReply:
        """A session with these weights."""
        request = worker_pb2.OpenSessionRequest(
            weights=[weight.reference for weight in weights], want_doorbell=doorbell
        )
        reply: worker_pb2.OpenSessionReply = self.stub.OpenSession(request, timeout=HANG_GUARD_S)
        return reply


StartService = Callable[..., Service]


@pytest.fixture
def start_service() -> Iterator[StartService]:
    started: list[Service] = []

    def begin(*, weight_memory: int = 1 << 30, doorbell: bool = True, max_sessions: int = 64) -> Service:
        engine = NumpyEngine()
        settings = WorkerSettings(
            address="127.0.0.1:0", weight_memory=weight_memory, doorbell=doorbell, max_sessions=max_sessions
        )
        running = start(engine, settings)
        channel = grpc.insecure_channel(f"127.0.0.1:{running.port}")
        service = Service(running, engine, channel, worker_pb2_grpc.WorkerStub(channel))
        started.append(service)
        return service

    yield begin
    for service in started:
        service.channel.close()
        service.running.stop()


@pytest.fixture
def service(start_service: StartService) -> Service:
    return start_service()
