"""The CPU engine's own loop, behind a real doorbell: what it answers, and what it leaves to Python."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gelo.doorbell_kernels import WORDS
from gelo.header import OffloadHeader, OperandKind, Status
from gelo.slab import AttachMessage, Doorbell, DoorbellClosedError, Slab, SlabSizes
from gelo.v1 import worker_pb2_grpc
from gpu_worker.engines.cpu import CpuEngine
from gpu_worker.engines.cpu_loop import MAX_ROWS
from gpu_worker.lock import EngineLock
from gpu_worker.server import WorkerSettings, start

from .conftest import HANG_GUARD_S, Service, Weight, integer_weight, make_weight

SIZES = SlabSizes(operand=200 * 96 * 4, result=200 * 192 * 4)
# The second has columns that are not whole panels, so that its results go through Python. Weights of
# both kinds in one session: float16 and integers, as the runner would have them of two schemes.
WEIGHTS = (
    make_weight(192, 96), make_weight(50, 33, 1), make_weight(64, 96, 2),
    integer_weight(192, 96, 3), integer_weight(50, 33, 4), integer_weight(70, 64, 5, bits=16),
)  # fmt: skip
SHAPES = [weight.values.shape[::-1] for weight in WEIGHTS]

Operand = NDArray[np.float16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Peer:
    """A runner's end."""

    slab: Slab
    doorbell: Doorbell
    socket: socket.socket

    def offload(self, sequence: int, weight_id: int, operand: Operand) -> OffloadHeader:
        rows, d_in = operand.shape
        kind = WEIGHTS[weight_id].format.kind
        place = self.slab.operand if kind == OperandKind.HALF else self.slab.operand_words
        place(rows, d_in)[...] = operand
        d_out = len(WEIGHTS[weight_id].values)
        self.slab.result_words(rows, d_out).fill(0xFFC00001)
        self.doorbell.ring_offload(sequence, weight_id, rows, d_in, d_out, kind)
        return OffloadHeader.unpack(self.doorbell.wait(HANG_GUARD_S))

    def result(self, weight_id: int, rows: int) -> NDArray[Any]:
        words = self.slab.result_words(rows, len(WEIGHTS[weight_id].values))
        return words if WEIGHTS[weight_id].format.kind == OperandKind.WORDS else words.view(np.float32)


@pytest.fixture(scope="module", params=[True, False], ids=["best", "vector"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    engine = CpuEngine(2, use_amx=request.param)
    running = start(engine, WorkerSettings(address="127.0.0.1:0"))
    channel = grpc.insecure_channel(f"127.0.0.1:{running.port}")
    served = Service(running, engine, channel, worker_pb2_grpc.WorkerStub(channel))  # type: ignore[arg-type]
    served.upload(*WEIGHTS)
    yield served
    channel.close()
    running.stop()


def connect(service: Service, weights: tuple[Weight, ...] = WEIGHTS, spins: int = 100) -> Peer:
    session = service.open(*weights, doorbell=True)
    slab, descriptor = Slab.create(SIZES)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(HANG_GUARD_S)
    peer.connect(session.doorbell_path)
    message = AttachMessage(session_id=session.session_id, sizes=SIZES).pack()
    socket.send_fds(peer, [message], [descriptor])
    os.close(descriptor)
    assert peer.recv(16) == b"ok"
    peer.settimeout(None)
    return Peer(slab, Doorbell(slab, peer, runner=True, spins=spins), peer)


@pytest.fixture
def peer(service: Service) -> Iterator[Peer]:
    connected = connect(service)
    with connected.socket:
        yield connected


def operand_of(rows: int, weight_id: int, seed: int = 0) -> Operand:
    generator, d_in = np.random.default_rng(seed), SHAPES[weight_id][0]
    if WEIGHTS[weight_id].format.kind == OperandKind.WORDS:
        return generator.integers(0, 1 << 32, (rows, d_in), dtype=np.uint32)
    return generator.integers(-8, 9, (rows, d_in)).astype(np.float16)


def assert_right(peer: Peer, answer: OffloadHeader, weight_id: int, operand: Operand) -> None:
    values = WEIGHTS[weight_id].values
    assert (answer.status, answer.weight_id, answer.rows) == (Status.OK, weight_id, len(operand))
    assert (answer.d_in, answer.d_out) == values.shape[::-1]
    assert answer.kind == WEIGHTS[weight_id].format.kind
    wide = np.float32 if answer.kind == OperandKind.HALF else np.uint32
    expected = operand.astype(wide) @ values.astype(wide).T
    np.testing.assert_array_equal(peer.result(weight_id, len(operand)), expected)


def test_every_row_count_and_weight(peer: Peer) -> None:
    """One after another: rows that the loop takes, and more than it takes, in any order."""
    sequence = 0
    for rows in (*range(1, MAX_ROWS + 3), 200, 1, 130, 16):
        for weight_id in range(len(WEIGHTS)):
            sequence += 1
            operand = operand_of(rows, weight_id, rows)
            answer = peer.offload(sequence, weight_id, operand)
            assert answer.sequence == sequence
            assert_right(peer, answer, weight_id, operand)


def test_both_sides_sleep_in_between(service: Service) -> None:
    peer = connect(service, spins=0)
    with peer.socket:
        for sequence in range(1, 6):
            time.sleep(0.02)  # longer than the loop spins
            weight_id = sequence % 2 * 3
            operand = operand_of(3, weight_id, sequence)
            assert_right(peer, peer.offload(sequence, weight_id, operand), weight_id, operand)


hostile_shapes = st.sampled_from(SHAPES) | st.tuples(
    st.sampled_from([0, 33, 96, 97, 2**32 - 1]), st.sampled_from([0, 50, 64, 192, 2**32 - 1])
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    status=st.sampled_from([0, 0, 0, 1, 2]), weight=st.integers(0, 7) | st.just(2**32 - 1),
    rows=st.integers(0, 300) | st.just(2**32 - 1), shape=hostile_shapes,
    preamble=st.sampled_from([None, None, None, 0, 2**64 - 1]),
    kind=st.sampled_from([0, 0, 1, 1, 2, 1 << 32, 1 << 63, 2**64 - 1]),
)  # fmt: skip
def test_a_hostile_header_is_refused_and_nothing_else_is_touched(
    service: Service, status: int, weight: int, rows: int, shape: tuple[int, int], preamble: int | None,
    kind: int,
) -> None:  # fmt: skip
    d_in, d_out = shape
    peer = connect(service)
    with peer.socket:
        peer.slab.memory[SIZES.result_start :] = 0xA5
        raw = bytearray(OffloadHeader(sequence=1, weight_id=weight, rows=rows, d_in=d_in, d_out=d_out).pack())
        raw[6:8] = status.to_bytes(2, "little")
        raw[56:] = kind.to_bytes(8, "little")
        if preamble is not None:
            raw[:8] = preamble.to_bytes(8, "little")
        peer.doorbell.ring(1, bytes(raw))
        known = status == 0 and weight < len(WEIGHTS) and shape == SHAPES[weight] and rows > 0
        known = known and kind == WEIGHTS[weight].format.kind
        good = known and rows * d_in * (4 if kind else 2) <= SIZES.operand
        good = good and rows * d_out * 4 <= SIZES.result
        try:
            answer = OffloadHeader.unpack(peer.doorbell.wait(HANG_GUARD_S))
        except DoorbellClosedError:
            assert (
                preamble is not None
                or kind > 1
                or not (0 < rows <= 1 << 20 and 0 < d_in <= 1 << 24 and 0 < d_out <= 1 << 24)
            )
            return
        assert answer.status == (Status.OK if good else Status.BAD_REQUEST)
        untouched = SIZES.result_start + (rows * d_out * 4 if good else 0)
        assert (peer.slab.memory[untouched:] == 0xA5).all()


def test_operands_that_are_not_finite_reach_the_result(peer: Peer) -> None:
    for rows in (1, 7, 14, 16):
        operand = operand_of(rows, 0)
        operand[-1, 5] = np.inf
        with np.errstate(invalid="ignore"):
            expected = operand.astype(np.float32) @ WEIGHTS[0].values.astype(np.float32).T
        answer = peer.offload(peer.doorbell.rung + 1, 0, operand)
        assert answer.status == Status.OK
        np.testing.assert_array_equal(peer.slab.result(rows, 192), expected)


def test_words_beyond_the_area_are_refused(peer: Peer) -> None:
    rows = SIZES.operand // (64 * 4) + 1
    assert rows * 70 * 4 <= SIZES.result
    peer.doorbell.ring_offload(1, 5, rows, 64, 70, OperandKind.WORDS)
    assert OffloadHeader.unpack(peer.doorbell.wait(HANG_GUARD_S)).status == Status.BAD_REQUEST
    operand = operand_of(rows - 1, 5)
    assert_right(peer, peer.offload(2, 5, operand), 5, operand)


@pytest.mark.parametrize("weight_id", [0, 3, 5])
def test_a_request_of_the_other_kind_is_refused(peer: Peer, weight_id: int) -> None:
    """Half the operand is there for such a request, or twice of it: neither is read as the other."""
    d_in, d_out = SHAPES[weight_id]
    other = OperandKind(1 - WEIGHTS[weight_id].format.kind)
    for sequence, rows in enumerate((1, 2, 64, 65), 1):
        peer.slab.memory[SIZES.result_start :] = 0xA5
        peer.doorbell.ring_offload(sequence, weight_id, rows, d_in, d_out, other)
        answer = OffloadHeader.unpack(peer.doorbell.wait(HANG_GUARD_S))
        assert (answer.status, answer.kind) == (Status.BAD_REQUEST, other)
        assert (peer.slab.memory[SIZES.result_start :] == 0xA5).all()
    operand = operand_of(3, weight_id)
    assert_right(peer, peer.offload(9, weight_id, operand), weight_id, operand)


def test_two_runners_share_the_engine(service: Service) -> None:
    """Neither's loop keeps the other out, and uploads get through, too."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            peer = connect(service)
            with peer.socket:
                for sequence in range(1, 300):
                    weight_id = (sequence + seed) % len(WEIGHTS)
                    operand = operand_of(1 + sequence % 20, weight_id, sequence)
                    assert_right(peer, peer.offload(sequence, weight_id, operand), weight_id, operand)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(5):
        service.upload(make_weight(5, 7, 100 + seed))
    for thread in threads:
        thread.join(HANG_GUARD_S)
        assert not thread.is_alive()
    assert failures == []


def keep_busy(peer: Peer, operand: Operand) -> None:
    for sequence in range(1, 1 << 30):
        peer.offload(sequence, 0, operand)


def test_closing_the_worker_ends_a_busy_loop() -> None:
    engine = CpuEngine(1)
    running = start(engine, WorkerSettings(address="127.0.0.1:0"))
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        service = Service(running, engine, channel, worker_pb2_grpc.WorkerStub(channel))  # type: ignore[arg-type]
        service.upload(*WEIGHTS)
        peer = connect(service)
        with peer.socket:
            stopper = threading.Timer(0.1, running.stop)
            stopper.start()
            operand = operand_of(1, 0)
            with pytest.raises(DoorbellClosedError):
                keep_busy(peer, operand)
            stopper.join(HANG_GUARD_S)
            assert not stopper.is_alive()


def test_the_lock_tells_that_it_is_wanted() -> None:
    lock = EngineLock()
    waiting = lock._waiting
    entered = threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    with lock, lock:
        assert waiting[0] == 0
        thread = threading.Thread(target=enter)
        thread.start()
        for _ in range(1000):
            if waiting[0]:
                break
            time.sleep(0.005)
        assert waiting[0] == 1
        assert not entered.is_set()
    assert entered.wait(HANG_GUARD_S)
    thread.join()
    assert waiting[0] == 0


ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")
@pytest.mark.parametrize("weight_id", [0, 3])
def test_the_loop_leaves_the_runners_processor(peer: Peer, weight_id: int) -> None:
    """It is put there before each offload, and answers from another; the kernel alone takes a while."""
    operand = operand_of(1, weight_id)
    assert_right(peer, peer.offload(1, weight_id, operand), weight_id, operand)
    # The last one; others may still be ending.
    loop = [thread for thread in threading.enumerate() if thread.name == "gelo-session"][-1].native_id
    assert loop is not None
    elsewhere: list[bool] = []

    def run() -> None:
        os.sched_setaffinity(0, {ALLOWED[0]})
        for sequence in range(2, 42):
            os.sched_setaffinity(loop, {ALLOWED[0]})
            os.sched_setaffinity(loop, ALLOWED)
            peer.offload(sequence, weight_id, operand)
            elsewhere.append(bool(peer.doorbell.words[WORDS + 1] != ALLOWED[0]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert sum(elsewhere) >= 30
    assert os.sched_getaffinity(loop) == set(ALLOWED)


@pytest.mark.parametrize("place", [-1, -(1 << 63), (1 << 63) - 1, 64 * 128])
def test_a_processor_that_is_none_changes_nothing(peer: Peer, place: int) -> None:
    operand = operand_of(1, 0)
    rows, d_in = operand.shape
    peer.slab.operand(rows, d_in)[...] = operand
    for sequence in range(1, 20):
        header = OffloadHeader(sequence=sequence, weight_id=0, rows=rows, d_in=d_in, d_out=192)
        peer.slab.memory[8:16].view(np.int64)[0] = place
        peer.doorbell.ring(sequence, header.pack())
        answer = OffloadHeader.unpack(peer.doorbell.wait(HANG_GUARD_S))
        assert_right(peer, answer, 0, operand)
