"""The gRPC service and the doorbell, as seen by well- and ill-behaved clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gelo.header import OffloadHeader, OperandKind, Status
from gelo.v1 import worker_pb2, worker_pb2_grpc
from gpu_worker.server import MAX_MESSAGE_BYTES, MAX_WEIGHTS, WorkerSettings, start
from tests.e2e.processes import WorkerProcess, start_worker

from .conftest import HANG_GUARD_S, NumpyEngine, Service, StartService, Weight, integer_weight, make_weight
from .service_calls import WEIGHT, code_of, compute, header, operand_of

# --- control calls -----------------------------------------------------------------------------------------


def test_info(service: Service) -> None:
    info = service.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=HANG_GUARD_S)
    assert (info.engine, info.adapter, info.backend, info.hardware_gpu) == ("cpu", "NumPy", "test", False)
    assert info.limits == {"threads": 1}
    assert info.max_message_bytes == MAX_MESSAGE_BYTES
    assert info.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert info.version


@pytest.mark.parametrize("name", ["", "gelo.v1.Worker"])
def test_health(service: Service, name: str) -> None:
    stub = health_pb2_grpc.HealthStub(service.channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=HANG_GUARD_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service(service: Service) -> None:
    stub = health_pb2_grpc.HealthStub(service.channel)
    with pytest.raises(grpc.RpcError) as error:
        stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=HANG_GUARD_S)
    assert code_of(error) == grpc.StatusCode.NOT_FOUND


def test_a_port_in_use_is_an_os_error(service: Service) -> None:
    engine = NumpyEngine()
    with pytest.raises(OSError, match="cannot listen"):
        start(engine, WorkerSettings(address=f"127.0.0.1:{service.running.port}"))
    assert engine.closed


def test_missing_weights(service: Service) -> None:
    other = make_weight(3, 3, seed=1)
    request = worker_pb2.MissingWeightsRequest(weights=[WEIGHT.reference, other.reference])
    assert list(service.stub.MissingWeights(request).sha256) == [WEIGHT.digest, other.digest]
    service.upload(other)
    assert list(service.stub.MissingWeights(request).sha256) == [WEIGHT.digest]
    service.upload(WEIGHT)
    assert not service.stub.MissingWeights(request).sha256


def test_the_same_bytes_in_another_shape_are_missing(service: Service) -> None:
    wide, tall = Weight(np.ones((2, 6), np.float16)), Weight(np.ones((6, 2), np.float16))
    service.upload(wide)
    request = worker_pb2.MissingWeightsRequest(weights=[wide.reference, tall.reference])
    assert list(service.stub.MissingWeights(request).sha256) == [tall.digest]
    with pytest.raises(grpc.RpcError):
        service.open(tall)
    service.upload(tall)
    service.open(wide, tall)


def test_the_same_bytes_in_another_format_are_missing(service: Service) -> None:
    halves = make_weight(6, 4)
    shorts = Weight(halves.values.view(np.int16))
    assert halves.digest == shorts.digest
    service.upload(halves)
    request = worker_pb2.MissingWeightsRequest(weights=[halves.reference, shorts.reference])
    assert list(service.stub.MissingWeights(request).sha256) == [shorts.digest]
    with pytest.raises(grpc.RpcError) as error:
        service.open(shorts)
    assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION
    service.upload(shorts)
    service.open(halves, shorts)


@pytest.mark.parametrize("number", [3, 2**31 - 1, -1])
def test_unknown_weight_formats_are_refused_everywhere(service: Service, number: Any) -> None:
    service.upload(WEIGHT)
    strange = worker_pb2.WeightRef(sha256=WEIGHT.digest, d_in=4, d_out=6, format=number)
    calls: list[Callable[[], object]] = [
        lambda: service.stub.MissingWeights(worker_pb2.MissingWeightsRequest(weights=[strange])),
        lambda: service.stub.OpenSession(worker_pb2.OpenSessionRequest(weights=[strange])),
        lambda: service.stub.UploadWeight(iter([Part(weight=strange), Part(chunk=WEIGHT.data)])),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError, match="unknown weight format") as error:
            call()
        assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert len(service.engine.resident) == 1


@pytest.mark.parametrize("call", ["MissingWeights", "OpenSession"])
def test_malformed_weight_lists(service: Service, call: str) -> None:
    kind = {"MissingWeights": worker_pb2.MissingWeightsRequest, "OpenSession": worker_pb2.OpenSessionRequest}
    short = worker_pb2.WeightRef(sha256=bytes(31), d_in=1, d_out=1)
    for weights in ([short], [WEIGHT.reference] * (MAX_WEIGHTS + 1)):
        with pytest.raises(grpc.RpcError) as error:
            getattr(service.stub, call)(kind[call](weights=weights), timeout=HANG_GUARD_S)
        assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT


# --- uploads -----------------------------------------------------------------------------------------------

Part = worker_pb2.UploadWeightRequest


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [Part()],
        [Part(chunk=WEIGHT.data)],
        [Part(weight=WEIGHT.reference)],
        [Part(weight=WEIGHT.reference), Part(chunk=WEIGHT.data[:-1])],
        [Part(weight=WEIGHT.reference), Part(chunk=WEIGHT.data + b"\0")],
        [Part(weight=WEIGHT.reference), Part(chunk=WEIGHT.data[::-1])],
        [Part(weight=WEIGHT.reference), Part(chunk=bytes(1 << 20)), Part(chunk=bytes(1 << 20))],
        [Part(weight=worker_pb2.WeightRef(sha256=WEIGHT.digest)), Part(chunk=b"")],
        [Part(weight=worker_pb2.WeightRef(sha256=b"x", d_in=4, d_out=6)), Part(chunk=WEIGHT.data)],
        [Part(weight=worker_pb2.WeightRef(sha256=WEIGHT.digest, d_in=2**32 - 1, d_out=2**32 - 1))],
        [Part(weight=WEIGHT.reference), Part(weight=WEIGHT.reference)],
    ],
    ids=[
        "nothing", "empty", "no-reference", "no-bytes", "short", "long", "other-bytes", "far-too-long",
        "no-shape", "no-hash", "huge-shape", "reference-twice",
    ],
)  # fmt: skip
def test_hostile_uploads(service: Service, parts: list[worker_pb2.UploadWeightRequest]) -> None:
    with pytest.raises(grpc.RpcError) as error:
        service.stub.UploadWeight(iter(parts), timeout=HANG_GUARD_S)
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert not service.engine.resident
    service.upload(WEIGHT)
    assert len(service.engine.resident) == 1


def test_an_upload_that_breaks_off_leaves_nothing(service: Service) -> None:
    def parts() -> Iterator[worker_pb2.UploadWeightRequest]:
        yield Part(weight=WEIGHT.reference)
        yield Part(chunk=WEIGHT.data[:10])
        call.cancel()

    call = service.stub.UploadWeight.future(parts(), timeout=HANG_GUARD_S)
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        call.result()
    assert not service.engine.resident


def test_uploads_beyond_the_memory(start_service: StartService) -> None:
    service = start_service(weight_memory=100)
    with pytest.raises(grpc.RpcError) as error:
        service.upload(make_weight(10, 10))
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    service.upload(WEIGHT)
    service.open(WEIGHT)
    with pytest.raises(grpc.RpcError, match="no room"):
        service.upload(make_weight(10, 4, seed=2))


def test_an_engine_without_memory(service: Service) -> None:
    service.engine.failing = True
    with pytest.raises(grpc.RpcError) as error:
        service.upload(WEIGHT)
    assert code_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED


# --- sessions and offloads over gRPC -----------------------------------------------------------------------


def test_open_session_with_an_unknown_weight(service: Service) -> None:
    service.upload(WEIGHT)
    with pytest.raises(grpc.RpcError) as error:
        service.open(WEIGHT, make_weight(9, 9))
    assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION


def test_session_limit(start_service: StartService) -> None:
    service = start_service(max_sessions=2)
    first = service.open()
    service.open()
    with pytest.raises(grpc.RpcError) as error:
        service.open()
    assert code_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    service.stub.CloseSession(worker_pb2.CloseSessionRequest(session_id=first.session_id))
    service.open()


def test_a_doorbell_is_offered_only_on_request(service: Service, start_service: StartService) -> None:
    assert Path(service.open(doorbell=True).doorbell_path).is_socket()
    assert service.open(doorbell=False).doorbell_path == ""
    assert start_service(doorbell=False).open(doorbell=True).doorbell_path == ""


def test_compute(service: Service) -> None:
    other = make_weight(2, 9, seed=4)
    service.upload(WEIGHT, other)
    session = service.open(WEIGHT, other).session_id
    wide = operand_of(3, 9)
    first, second = compute(
        service,
        session,
        (header(sequence=5).pack(), operand_of().tobytes()),
        (header(sequence=9, weight_id=1, rows=3, d_in=9, d_out=2).pack(), wide.tobytes()),
    )
    answer = OffloadHeader.unpack(first.header)
    assert answer == header(sequence=5)._replace(compute_ns=answer.compute_ns)
    expected = operand_of().astype(np.float32) @ WEIGHT.values.astype(np.float32).T
    assert first.result == expected.tobytes()
    assert OffloadHeader.unpack(second.header).sequence == 9
    assert second.result == (wide.astype(np.float32) @ other.values.astype(np.float32).T).tobytes()


@pytest.mark.parametrize("bits", [8, 16])
def test_compute_with_words(service: Service, bits: int) -> None:
    """Beside a weight of float16 in the same session."""
    weight = integer_weight(5, 9, bits=bits)
    service.upload(WEIGHT, weight)
    words = np.random.default_rng(bits).integers(0, 1 << 32, (3, 9), dtype=np.uint32)
    head = header(sequence=7, weight_id=1, rows=3, d_in=9, d_out=5, kind=OperandKind.WORDS)
    first, second = compute(
        service,
        service.open(WEIGHT, weight).session_id,
        (head.pack(), words.tobytes()),
        (header(sequence=8).pack(), operand_of().tobytes()),
    )
    answer = OffloadHeader.unpack(first.header)
    assert answer == head._replace(compute_ns=answer.compute_ns)
    assert first.result == (words @ weight.values.astype(np.uint32).T).tobytes()
    assert OffloadHeader.unpack(second.header).status == Status.OK
    assert second.result == (operand_of().astype(np.float32) @ WEIGHT.values.astype(np.float32).T).tobytes()


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("weight", [WEIGHT, integer_weight(6, 4), integer_weight(6, 4, bits=16)])
def test_the_other_kind_is_refused_inline(service: Service, weight: Weight, size: int) -> None:
    """Whatever the operand's length: that of halves, that of words."""
    service.upload(weight)
    kind = weight.format.kind
    right, wrong = header(kind=kind), header(sequence=2, kind=OperandKind(1 - kind))
    good = bytes(2 * 4 * kind.item_bytes)
    bad, fine, cut = compute(
        service,
        service.open(weight).session_id,
        (wrong.pack(), bytes(size)),
        (right.pack(), good),
        (right.pack(), good[: len(good) // 2] if size == 16 else good * 2),
    )
    for reply, sent in ((bad, wrong), (cut, right)):
        assert OffloadHeader.unpack(reply.header) == sent._replace(status=Status.BAD_REQUEST)
        assert reply.result == b""
    assert OffloadHeader.unpack(fine.header).status == Status.OK


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"weight_id": 1}, 16),
        ({"weight_id": 2**32 - 1}, 16),
        ({"d_in": 6, "d_out": 4}, 24),
        ({"d_out": 7}, 16),
        ({"rows": 3}, 16),
        ({}, 0),
        ({}, 15),
        ({}, 17),
        ({"rows": 1 << 20}, 16),
    ],
)
def test_bad_offloads_are_answered_and_the_stream_goes_on(
    service: Service, changes: dict[str, int], size: int
) -> None:
    service.upload(WEIGHT)
    bad, good = compute(
        service,
        service.open(WEIGHT).session_id,
        (header(**changes).pack(), bytes(size)),
        (header(sequence=2).pack(), operand_of().tobytes()),
    )
    answer = OffloadHeader.unpack(bad.header)
    assert answer == header(**changes)._replace(status=Status.BAD_REQUEST)
    assert bad.result == b""
    assert OffloadHeader.unpack(good.header).status == Status.OK


def test_results_beyond_the_message_limit_are_refused(service: Service) -> None:
    tall = make_weight(4096, 1)
    service.upload(tall)
    rows = MAX_MESSAGE_BYTES // (4096 * 4) + 1
    head = header(rows=rows, d_in=1, d_out=4096).pack()
    (reply,) = compute(service, service.open(tall).session_id, (head, bytes(rows * 2)))
    assert OffloadHeader.unpack(reply.header).status == Status.BAD_REQUEST


@pytest.mark.parametrize("head", [b"", bytes(64), b"x" * 63, header().pack() + b"\0"])
def test_a_bad_header_ends_the_stream_and_the_session(service: Service, head: bytes) -> None:
    service.upload(WEIGHT)
    session = service.open(WEIGHT).session_id
    with pytest.raises(grpc.RpcError) as error:
        list(compute(service, session, (head, operand_of().tobytes())))
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as error:
        list(compute(service, session))
    assert code_of(error) == grpc.StatusCode.NOT_FOUND


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=80), st.binary(min_size=56, max_size=56)), st.binary(max_size=40))
def test_arbitrary_offloads_never_break_the_service(service: Service, head: bytes, operand: bytes) -> None:
    if len(head) == 56:
        head = b"GELO\1\0\0\0" + head
    service.upload(WEIGHT)
    session = service.open(WEIGHT).session_id
    outcome = grpc.StatusCode.OK
    try:
        for reply in compute(service, session, (head, operand)):
            OffloadHeader.unpack(reply.header)
    except grpc.RpcError as error:
        outcome = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    assert outcome in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
    service.stub.CloseSession(worker_pb2.CloseSessionRequest(session_id=session))


def test_one_stream_per_session(service: Service) -> None:
    service.upload(WEIGHT)
    session = service.open(WEIGHT).session_id
    replies = compute(service, session, (header().pack(), operand_of().tobytes()))
    next(replies)
    with pytest.raises(grpc.RpcError) as error:
        list(compute(service, session))
    assert code_of(error) == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("session", [b"", bytes(16), b"x" * 1000])
def test_unknown_sessions(service: Service, session: bytes) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(compute(service, session))
    assert code_of(error) == grpc.StatusCode.NOT_FOUND


def test_a_stream_without_a_message_is_refused(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(service.stub.Compute(iter(()), timeout=HANG_GUARD_S))
    assert code_of(error) == grpc.StatusCode.NOT_FOUND


def test_the_end_of_the_stream_ends_the_session(start_service: StartService) -> None:
    service = start_service(weight_memory=48)
    service.upload(WEIGHT)
    list(compute(service, service.open(WEIGHT).session_id))
    # Possible only because nothing is bound any more.
    service.upload(make_weight(6, 4, seed=7))


def test_an_engine_failure_is_a_status(service: Service) -> None:
    service.upload(WEIGHT)
    session = service.open(WEIGHT).session_id
    service.engine.failing = True
    (reply,) = compute(service, session, (header().pack(), operand_of().tobytes()))
    assert OffloadHeader.unpack(reply.header).status == Status.ENGINE_FAILED
    assert reply.result == b""


# --- as a process ------------------------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    process = start_worker()
    yield process
    process.kill()


def assert_words(stub: worker_pb2_grpc.WorkerStub) -> None:
    """An offload of words to the CPU engine."""
    weight = integer_weight(6, 4)
    parts = [Part(weight=weight.reference), Part(chunk=weight.data)]
    stub.UploadWeight(iter(parts), timeout=HANG_GUARD_S)
    session = stub.OpenSession(worker_pb2.OpenSessionRequest(weights=[weight.reference]))
    words = np.array([[0, 1, 2**31, 2**32 - 1], [5, 6, 7, 8]], np.uint32)
    messages = [
        worker_pb2.ComputeRequest(session_id=session.session_id),
        worker_pb2.ComputeRequest(header=header(kind=OperandKind.WORDS).pack(), operand=words.tobytes()),
    ]
    (reply,) = stub.Compute(iter(messages), timeout=HANG_GUARD_S)
    assert reply.result == (words @ weight.values.astype(np.uint32).T).tobytes()


def test_the_server_process(process: WorkerProcess) -> None:
    with grpc.insecure_channel(process.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=HANG_GUARD_S)
        assert info.engine == "cpu"
        assert info.backend == "numba"
        assert info.limits["threads"] >= 1
        parts = [Part(weight=WEIGHT.reference), Part(chunk=WEIGHT.data)]
        stub.UploadWeight(iter(parts), timeout=HANG_GUARD_S)
        session = stub.OpenSession(
            worker_pb2.OpenSessionRequest(weights=[WEIGHT.reference], want_doorbell=True)
        )
        messages = [
            worker_pb2.ComputeRequest(session_id=session.session_id),
            worker_pb2.ComputeRequest(header=header().pack(), operand=operand_of().tobytes()),
        ]
        (reply,) = stub.Compute(iter(messages), timeout=HANG_GUARD_S)
        expected = operand_of().astype(np.float32) @ WEIGHT.values.astype(np.float32).T
        assert reply.result == expected.tobytes()
        assert_words(stub)
        directory = Path(session.doorbell_path).parent
        assert directory.is_dir()
    process.stop()
    assert process.process.returncode == 0
    assert not directory.exists()
    assert any("engine cpu" in line for line in process.log)
