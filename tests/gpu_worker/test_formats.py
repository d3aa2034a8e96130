"""Weights of every format beside each other: in each engine, and in sessions of a worker on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.header import OffloadHeader, OperandKind, Status
from gelo.slab import AttachMessage, Doorbell, Slab, SlabSizes
from gelo.v1 import worker_pb2, worker_pb2_grpc
from gpu_worker.engines import EngineName, create_engine
from gpu_worker.engines.base import AnyWeight, Engine, EngineError, LoadedWeight
from gpu_worker.engines.cpu import CpuEngine
from gpu_worker.engines.ring_weights import INT16_MAX
from gpu_worker.engines.wgpu_products import GpuDevice
from gpu_worker.server import WorkerSettings, start

from .conftest import HANG_GUARD_S, Service, Weight, integer_weight, make_weight

ENGINES: tuple[EngineName, ...] = ("cpu", "wgpu")
WEIGHTS = (
    make_weight(50, 33, 1), integer_weight(50, 33, 2), integer_weight(50, 33, 3, bits=16),
    make_weight(64, 192, 4), integer_weight(64, 192, 5), integer_weight(130, 70, 6, bits=16),
)  # fmt: skip
SIZES = SlabSizes(operand=80 * 192 * 4, result=80 * 130 * 4)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with closing(create_engine(request.param, threads=2)) as engine:
        yield engine


@pytest.fixture(scope="module", params=ENGINES)
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    running = start(create_engine(request.param, threads=2), WorkerSettings(address="127.0.0.1:0"))
    channel = grpc.insecure_channel(f"127.0.0.1:{running.port}")
    served = Service(running, running.service._engine, channel, worker_pb2_grpc.WorkerStub(channel))  # type: ignore[arg-type]
    served.upload(*WEIGHTS)
    yield served
    channel.close()
    running.stop()


def operand_for(weight: AnyWeight, rows: int, seed: int) -> NDArray[np.float16] | NDArray[np.uint32]:
    generator = np.random.default_rng(seed)
    if weight.dtype == np.float16:
        return generator.integers(-8, 9, (rows, weight.shape[1])).astype(np.float16)
    return generator.integers(0, 1 << 32, (rows, weight.shape[1]), dtype=np.uint32)


def product(weight: AnyWeight, operand: NDArray[np.float16] | NDArray[np.uint32]) -> NDArray[Any]:
    """Exact: small integers, or modulo 2^32."""
    wide = np.float32 if weight.dtype == np.float16 else np.uint32
    expected: NDArray[Any] = operand.astype(wide) @ weight.astype(wide).T
    return expected


# --- the engines -------------------------------------------------------------------------------------------


def assert_products(engine: Engine, held: list[tuple[AnyWeight, LoadedWeight]], rows: int) -> None:
    for seed, (values, loaded) in enumerate(held):
        operand = operand_for(values, rows, seed)
        expected = product(values, operand)
        out = np.full_like(expected, 7)
        engine.matmul(loaded, operand, out)
        np.testing.assert_array_equal(out, expected)


def test_products_in_turn(engine: Engine) -> None:
    held = [(weight.values, engine.load(weight.values)) for weight in WEIGHTS]
    assert [loaded.format for _, loaded in held] == [weight.format for weight in WEIGHTS]
    assert [loaded.size for _, loaded in held] == [len(weight.data) for weight in WEIGHTS]
    # Up and down: the kinds share the engine's buffers, which grow meanwhile.
    for rows in (1, 2, 3, 16, 70, 5, 1):
        assert_products(engine, held, rows)
    for _, loaded in held[::2]:
        engine.unload(loaded)
    assert_products(engine, held[1::2], 4)
    for _, loaded in held[1::2]:
        engine.unload(loaded)


@pytest.mark.parametrize("weight", WEIGHTS[:3], ids=["float16", "int8", "int16"])
def test_operands_and_results_of_another_type_are_refused(engine: Engine, weight: Weight) -> None:
    loaded = engine.load(weight.values)
    operand = operand_for(weight.values, 2, 0)
    result = np.zeros((2, 50), product(weight.values, operand).dtype)
    for bad in (np.uint32, np.float16, np.int32, np.float32, np.uint64):
        if bad != operand.dtype:
            with pytest.raises(EngineError):
                engine.matmul(loaded, np.ones(operand.shape, bad), result)
        if bad != result.dtype:
            with pytest.raises(EngineError):
                engine.matmul(loaded, operand, result.astype(bad))
    engine.matmul(loaded, operand, result)
    np.testing.assert_array_equal(result, product(weight.values, operand))
    engine.unload(loaded)


def test_weights_of_no_format_are_refused(engine: Engine) -> None:
    for dtype in (np.float32, np.float64, np.uint8, np.int32, np.uint16, np.bool_):
        with pytest.raises(EngineError, match="matrix"):
            engine.load(np.ones((3, 4), dtype))  # type: ignore[arg-type]
    for kind in WeightFormat:
        for shape in ((0, 4), (4, 0), (4,), (1, 2, 3)):
            with pytest.raises(EngineError, match="matrix"):
                engine.load(np.ones(shape, kind.dtype))
    with pytest.raises(EngineError, match="32639"):
        engine.load(np.full((2, 2), INT16_MAX + 1, np.int16))


def test_the_kinds_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[GpuDevice] = []
    honest = GpuDevice.open

    def open_once(*arguments: object, **options: object) -> GpuDevice:
        opened.append(honest(*arguments, **options))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(GpuDevice, "open", open_once)
    engine = create_engine("wgpu")
    held = [(weight.values, engine.load(weight.values)) for weight in WEIGHTS]
    assert_products(engine, held, 3)
    assert len(opened) == 1
    engine.close()
    engine.close()
    for _, loaded in held:
        with pytest.raises(EngineError, match="closed"):
            engine.matmul(loaded, np.ones((1, 33), np.uint32), np.ones((1, 50), np.uint32))


def test_a_weight_of_words_from_another_cpu_engine_is_refused() -> None:
    with closing(CpuEngine(1)) as mine, closing(CpuEngine(1)) as other:
        loaded = other.load(np.ones((3, 4), np.int8))
        with pytest.raises(EngineError, match="another engine"):
            mine.matmul(loaded, np.ones((1, 4), np.uint32), np.ones((1, 3), np.uint32))


# --- sessions ----------------------------------------------------------------------------------------------


def test_a_session_through_a_slab(service: Service) -> None:
    session = service.open(*WEIGHTS, doorbell=True)
    slab, descriptor = Slab.create(SIZES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(HANG_GUARD_S)
        peer.connect(session.doorbell_path)
        message = AttachMessage(session_id=session.session_id, sizes=SIZES).pack()
        socket.send_fds(peer, [message], [descriptor])
        os.close(descriptor)
        assert peer.recv(16) == b"ok"
        peer.settimeout(None)
        doorbell = Doorbell(slab, peer, runner=True, spins=100)
        sequence = 0
        for rows in (1, 2, 5, 16, 70):
            for weight_id, weight in enumerate(WEIGHTS):
                sequence += 1
                values, kind = weight.values, weight.format.kind
                operand = operand_for(values, rows, sequence)
                d_out, d_in = values.shape
                words = kind == OperandKind.WORDS
                (slab.operand_words if words else slab.operand)(rows, d_in)[...] = operand
                doorbell.ring_offload(sequence, weight_id, rows, d_in, d_out, kind)
                answer = OffloadHeader.unpack(doorbell.wait(HANG_GUARD_S))
                assert (answer.status, answer.kind) == (Status.OK, kind)
                result = (slab.result_words if words else slab.result)(rows, d_out)
                np.testing.assert_array_equal(result, product(values, operand))


def test_a_session_inline(service: Service) -> None:
    session = service.open(*WEIGHTS)
    messages = [worker_pb2.ComputeRequest(session_id=session.session_id)]
    expected = []
    for weight_id, weight in enumerate(WEIGHTS):
        operand = operand_for(weight.values, 3, weight_id)
        d_out, d_in = weight.values.shape
        header = OffloadHeader(weight_id + 1, weight_id, 3, d_in, d_out, kind=weight.format.kind)
        messages.append(worker_pb2.ComputeRequest(header=header.pack(), operand=operand.tobytes()))
        expected.append((header, product(weight.values, operand).tobytes()))
    replies = service.stub.Compute(iter(messages), timeout=HANG_GUARD_S)
    for reply, (header, result) in zip(replies, expected, strict=True):
        answer = OffloadHeader.unpack(reply.header)
        assert answer == header._replace(compute_ns=answer.compute_ns)
        assert reply.result == result


def test_an_int16_weight_beyond_the_engines_range_is_refused(service: Service) -> None:
    with pytest.raises(grpc.RpcError, match="32639"):
        service.upload(Weight(np.full((2, 2), INT16_MAX + 1, np.int16)))
