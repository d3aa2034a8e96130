"""What the runner makes of a worker that is faulty or lies: the right typed error, and never a hang."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from tee_runner.errors import WorkerError, WorkerProtocolError, WorkerUnavailableError
from tee_runner.protection.base import Linear
from tee_runner.protection.schemes import scheme
from tee_runner.worker import slab_transport
from tee_runner.worker.client import TransportName, WorkerClient
from tee_runner.worker.inline_transport import InlineTransport
from tee_runner.worker.transport import Transport

from .conftest import SIZES, integers, quantised, remote, words
from .fake_worker import AnswerFault, AttachFault, FakeWorker

# Every test of wrong answers runs with weights of float16 and with weights of int8.
ARRAYS = [integers(0, 24, 40), integers(1, 40, 24), quantised(2, 24, 40), quantised(3, 24, 40)]
WEIGHTS = [remote(values) for values in ARRAYS]
TIMEOUT_S = 0.5
# A worker that answers wrongly does so at once: this only bounds a hang.
PATIENT_S = 120.0

PROTOCOL: tuple[AnswerFault, ...] = (
    "later sequence", "earlier sequence", "fewer rows", "more rows", "other weight", "other d_in",
    "other d_out", "other kind", "unknown status", "garbage", "zeros", "wrong magic", "wrong version",
    "unknown kind",
)  # fmt: skip
REPORTED: tuple[AnswerFault, ...] = ("bad request", "engine failed")
NOT_FINITE: tuple[AnswerFault, ...] = ("NaN", "+inf", "-inf", "one NaN", "huge")
GONE: tuple[AnswerFault, ...] = ("silent", "hang up")
INLINE: tuple[AnswerFault, ...] = (
    "short header", "long header", "no header", "short result", "long result", "no result",
)  # fmt: skip
EXPECTED: dict[AnswerFault, type[WorkerError]] = {
    **dict.fromkeys(PROTOCOL, WorkerProtocolError),
    **dict.fromkeys(REPORTED, WorkerError),
    **dict.fromkeys(GONE, WorkerUnavailableError),
}


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    worker = FakeWorker()
    yield worker
    worker.close()


@pytest.fixture(params=["slab", "grpc"])
def kind(request: pytest.FixtureRequest) -> TransportName:
    chosen: TransportName = request.param
    return chosen


def connect(worker: FakeWorker, kind: TransportName, timeout: float = PATIENT_S) -> Transport:
    client = WorkerClient(worker.address, timeout=timeout)
    client.provision(WEIGHTS)
    return client.open_session(WEIGHTS, SIZES, kind)


def offload(transport: Transport, operand: NDArray[np.float16]) -> NDArray[np.float32]:
    transport.operand(*operand.shape)[...] = operand
    return transport.exchange(0, len(operand), 40, 24)


def offload_words(transport: Transport, operand: NDArray[np.uint32]) -> NDArray[np.uint32]:
    transport.operand_words(*operand.shape)[...] = operand
    return transport.exchange_words(2, len(operand), 40, 24)


def assert_words(transport: Transport, seed: int) -> None:
    operand = words(seed, 3, 40)
    expected = operand @ ARRAYS[2].astype(np.uint32).T
    np.testing.assert_array_equal(offload_words(transport, operand), expected)


def assert_product(transport: Transport, seed: int) -> None:
    operand = integers(seed, 3, 40)
    expected = operand.astype(np.float32) @ ARRAYS[0].astype(np.float32).T
    np.testing.assert_array_equal(offload(transport, operand), expected)


def test_every_fault_has_a_test() -> None:
    covered = {"none", "abort", "flood", *PROTOCOL, *REPORTED, *NOT_FINITE, *GONE, *INLINE}
    assert covered == set(get_args(AnswerFault))


@pytest.mark.parametrize("good_answers", [0, 3])
@pytest.mark.parametrize("fault", EXPECTED)
def test_wrong_answers(
    worker: FakeWorker, kind: TransportName, fault: AnswerFault, good_answers: int
) -> None:
    worker.fault, worker.good_answers = fault, good_answers
    transport = connect(worker, kind, TIMEOUT_S if fault == "silent" else PATIENT_S)
    for seed in range(good_answers):
        assert_product(transport, seed)
    with pytest.raises(WorkerError) as error:
        offload(transport, integers(9, 3, 40))
    assert type(error.value) is EXPECTED[fault]
    assert transport.stats.offloads == good_answers
    transport.close()


@pytest.mark.parametrize("good_answers", [0, 2])
@pytest.mark.parametrize("fault", EXPECTED)
def test_wrong_answers_to_words(
    worker: FakeWorker, kind: TransportName, fault: AnswerFault, good_answers: int
) -> None:
    worker.fault, worker.good_answers = fault, good_answers
    transport = connect(worker, kind, TIMEOUT_S if fault == "silent" else PATIENT_S)
    for seed in range(good_answers):
        assert_words(transport, seed)
    with pytest.raises(WorkerError) as error:
        offload_words(transport, words(9, 3, 40))
    assert type(error.value) is EXPECTED[fault]
    assert transport.stats.offloads == good_answers
    transport.close()


@pytest.mark.parametrize("fault", INLINE)
def test_wrong_lengths_over_grpc(worker: FakeWorker, fault: AnswerFault) -> None:
    worker.fault = fault
    uses: tuple[Callable[[Transport], object], ...] = (
        lambda transport: offload(transport, integers(9, 3, 40)),
        lambda transport: offload_words(transport, words(9, 3, 40)),
    )
    for use in uses:
        transport = connect(worker, "grpc")
        with pytest.raises(WorkerProtocolError, match=r"length|header"):
            use(transport)
        transport.close()


def test_an_aborted_stream_quotes_little_of_the_worker(worker: FakeWorker) -> None:
    worker.fault = "abort"
    transport = connect(worker, "grpc")
    with pytest.raises(WorkerError, match="INTERNAL") as error:
        offload(transport, integers(9, 3, 40))
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()
    transport.close()


def test_unasked_replies_are_not_hoarded(worker: FakeWorker) -> None:
    """A worker that sends without end fills its own buffers, not the runner's memory."""
    worker.fault = "flood"
    transport = connect(worker, "grpc")
    assert isinstance(transport, InlineTransport)
    offload(transport, integers(9, 3, 40))
    pause = threading.Event()
    seen = -1
    # Until flow control stops the worker: it does not get further between two looks.
    for _ in range(200):
        pause.wait(0.1)
        if worker.replies_sent == seen:
            break
        seen = worker.replies_sent
    assert worker.replies_sent == seen
    assert transport._replies.qsize() == 0
    with pytest.raises(WorkerProtocolError, match="another request"):
        offload(transport, integers(9, 3, 40))
    transport.close()


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("name", ["plain", "gelo-haar", "gelo-hd3"])
@pytest.mark.parametrize("fault", NOT_FINITE)
@pytest.mark.parametrize("rows", [1, 30])
def test_results_that_are_not_finite_are_refused(
    worker: FakeWorker, kind: TransportName, name: str, fault: AnswerFault, rows: int
) -> None:
    """By every scheme, on both of its paths; a single NaN in the last element is enough."""
    worker.fault, worker.good_answers = fault, 1
    transport = connect(worker, kind)
    protection = scheme(name)(transport)
    linear = Linear(weight_id=0, name="layers.0.qkv", d_in=40, d_out=24)
    protection.provision([linear])
    data = np.random.default_rng(rows).standard_normal((rows, 40), np.float32)
    # So large that results of 3e38 overflow on their way back, whatever the mask (chance 1e-7: a mask whose
    # columns nearly cancel makes a finite value of them, wrong but not for this check to find).
    data *= np.float32(1e9)
    out = np.empty((rows, 24), np.float32)
    with protection.forward_session() as session:
        session.linear(linear, data, [rows], out)
        assert np.isfinite(out).all()
        with pytest.raises(WorkerProtocolError, match=r"layers\.0\.qkv is not finite"):
            session.linear(linear, data, [rows], out)
    transport.close()


@pytest.mark.parametrize("fault", [f for f in get_args(AttachFault) if f != "none"])
def test_a_refused_slab(worker: FakeWorker, fault: AttachFault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_transport, "_ATTACH_TIMEOUT_S", TIMEOUT_S)
    worker.attach_fault = fault
    with pytest.raises(WorkerUnavailableError):
        connect(worker, "slab")
    worker.attach_fault = "none"
    assert_product(connect(worker, "slab"), 1)


@pytest.mark.parametrize(
    "path",
    ["", "/nonexistent/doorbell", "/proc/self/mem", "/" + "x" * 200, "a\0b", "\0abstract", "/dev/null"],
)
def test_a_doorbell_path_that_leads_nowhere(worker: FakeWorker, path: str) -> None:
    worker.doorbell_path = path
    with pytest.raises(WorkerUnavailableError):
        connect(worker, "slab")


@pytest.mark.parametrize("path", ["", "/nonexistent/doorbell", "a\0b"])
def test_auto_falls_back_to_grpc(worker: FakeWorker, path: str) -> None:
    worker.doorbell_path = path
    transport = connect(worker, "auto")
    assert isinstance(transport, InlineTransport)
    assert_product(transport, 2)
    transport.close()


def test_a_stream_socket_is_not_a_doorbell(worker: FakeWorker, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "stream"))
        other.listen(1)
        worker.doorbell_path = str(tmp_path / "stream")
        with pytest.raises(WorkerUnavailableError, match="doorbell"):
            connect(worker, "slab")


@pytest.mark.parametrize("call", ["GetInfo", "MissingWeights", "UploadWeight", "OpenSession"])
def test_refused_calls(worker: FakeWorker, call: str) -> None:
    worker.refuse = (call,)
    with pytest.raises(WorkerError, match="INTERNAL") as error:
        connect(worker, "slab")
    assert type(error.value) is WorkerError
    assert len(str(error.value)) < 400


def test_what_a_worker_says_of_itself_is_bounded(worker: FakeWorker) -> None:
    client = WorkerClient(worker.address)
    info = client.info()
    assert len(info.engine) <= 64
    assert len(info.adapter) <= 128
    client.close()


def test_a_late_answer_is_not_taken_for_the_next(worker: FakeWorker, kind: TransportName) -> None:
    """After a timeout the runner's next request must not be served by the old answer."""
    worker.fault = "silent"
    transport = connect(worker, kind, TIMEOUT_S)
    with pytest.raises(WorkerUnavailableError, match="did not answer"):
        offload(transport, integers(1, 3, 40))
    with pytest.raises(WorkerError):
        offload(transport, integers(2, 3, 40))
    transport.close()
