"""Engines and servers shared by the worker's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.header import OperandKind
from gelo.v1 import worker_pb2, worker_pb2_grpc
from gpu_worker.engines.base import AnyWeight, Engine, EngineError, EngineInfo, LoadedWeight
from gpu_worker.engines.ring_weights import INT16_MAX
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

    def load(self, weight: AnyWeight) -> LoadedWeight:
        """See :meth:`Engine.load`."""
        if self.failing:
            raise EngineError("no memory")
        form = WeightFormat.of(weight.dtype)
        wide = weight.astype(np.float32 if form.kind == OperandKind.HALF else np.uint32)
        loaded = LoadedWeight(d_in=weight.shape[1], d_out=weight.shape[0], format=form, state=wide)
        self.resident.append(loaded)
        return loaded

    def unload(self, weight: LoadedWeight) -> None:
        """See :meth:`Engine.unload`."""
        self.resident = [other for other in self.resident if other is not weight]

    def matmul(self, weight: LoadedWeight, operand: NDArray[Any], out: NDArray[Any]) -> None:
        """See :meth:`Engine.matmul`."""
        if self.failing:
            raise EngineError("device lost")
        if self.closed or not any(weight is other for other in self.resident):
            raise AssertionError("an unloaded weight or a closed engine was used")
        assert isinstance(weight.state, np.ndarray)
        out[...] = operand.astype(weight.state.dtype) @ weight.state.T

    def close(self) -> None:
        """See :meth:`Engine.close`."""
        self.closed = True


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight and its name on the wire."""

    values: AnyWeight
    name: str = "w"

    @property
    def format(self) -> WeightFormat:
        """What its values are."""
        return WeightFormat.of(self.values.dtype)

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
        number: Any = int(self.format)
        return worker_pb2.WeightRef(name=self.name, sha256=self.digest, d_in=d_in, d_out=d_out, format=number)


def make_weight(d_out: int, d_in: int, seed: int = 0) -> Weight:
    """Small integers, so that products are exact in any order."""
    return Weight(np.random.default_rng(seed).integers(-8, 9, (d_out, d_in)).astype(np.float16))


def integer_weight(d_out: int, d_in: int, seed: int = 0, bits: int = 8) -> Weight:
    """int8 or int16, for products modulo 2^32."""
    values = np.random.default_rng(seed).integers(-INT16_MAX, INT16_MAX + 1, (d_out, d_in), dtype=np.int16)
    return Weight(values.astype(np.int8) if bits == 8 else values)


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
