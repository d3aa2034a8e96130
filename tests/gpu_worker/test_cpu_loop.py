"""The CPU engine's own loop, behind a real doorbell: what it answers, and what it leaves to Python."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gelo.header import OffloadHeader, Status
from gelo.slab import AttachMessage, Doorbell, DoorbellClosedError, Slab, SlabSizes
from gelo.v1 import worker_pb2_grpc
from gpu_worker.engines.cpu import CpuEngine
from gpu_worker.engines.cpu_loop import MAX_ROWS
from gpu_worker.lock import EngineLock
from gpu_worker.server import WorkerSettings, start

from .conftest import HANG_GUARD_S, Service, Weight, make_weight

SIZES = SlabSizes(operand=200 * 96 * 2, result=200 * 192 * 4)
# The second has columns that are not whole panels, so that its results go through Python.
WEIGHTS = (make_weight(192, 96), make_weight(50, 33, 1), make_weight(64, 96, 2))


@dataclass(frozen=True, slots=True)
class Peer:
    """A runner's end."""

    slab: Slab
    doorbell: Doorbell
    socket: socket.socket

    def offload(self, sequence: int, weight_id: int, operand: NDArray[np.float16]) -> OffloadHeader:
        rows, d_in = operand.shape
        self.slab.operand(rows, d_in)[...] = operand
        d_out = len(WEIGHTS[weight_id].values)
        self.slab.result(rows, d_out).fill(np.nan)
        self.doorbell.ring_offload(sequence, weight_id, rows, d_in, d_out)
        return OffloadHeader.unpack(self.doorbell.wait(HANG_GUARD_S))


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


def operand_of(rows: int, d_in: int, seed: int = 0) -> NDArray[np.float16]:
    return np.random.default_rng(seed).integers(-8, 9, (rows, d_in)).astype(np.float16)


def assert_right(peer: Peer, answer: OffloadHeader, weight_id: int, operand: NDArray[np.float16]) -> None:
    values = WEIGHTS[weight_id].values
    assert (answer.status, answer.weight_id, answer.rows) == (Status.OK, weight_id, len(operand))
    assert (answer.d_in, answer.d_out) == values.shape[::-1]
    expected = operand.astype(np.float32) @ values.astype(np.float32).T
    np.testing.assert_array_equal(peer.slab.result(len(operand), len(values)), expected)


def test_every_row_count_and_weight(peer: Peer) -> None:
    """One after another: rows that the loop takes, and more than it takes, in any order."""
    sequence = 0
    for rows in (*range(1, MAX_ROWS + 3), 200, 1, 130, 16):
        for weight_id in range(3):
            sequence += 1
            operand = operand_of(rows, WEIGHTS[weight_id].values.shape[1], rows)
            answer = peer.offload(sequence, weight_id, operand)
            assert answer.sequence == sequence
            assert_right(peer, answer, weight_id, operand)


def test_both_sides_sleep_in_between(service: Service) -> None:
    peer = connect(service, spins=0)
    with peer.socket:
        for sequence in range(1, 6):
            time.sleep(0.02)  # longer than the loop spins
            operand = operand_of(3, 96, sequence)
            assert_right(peer, peer.offload(sequence, 0, operand), 0, operand)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    status=st.sampled_from([0, 0, 0, 1, 2]), weight=st.integers(0, 4) | st.just(2**32 - 1),
    rows=st.integers(0, 300) | st.just(2**32 - 1), d_in=st.sampled_from([0, 33, 96, 97, 2**32 - 1]),
    d_out=st.sampled_from([0, 50, 64, 192, 2**32 - 1]), preamble=st.sampled_from([None, 0, 2**64 - 1]),
)  # fmt: skip
def test_a_hostile_header_is_refused_and_nothing_else_is_touched(
    service: Service, status: int, weight: int, rows: int, d_in: int, d_out: int, preamble: int | None
) -> None:
    peer = connect(service)
    with peer.socket:
        peer.slab.memory[SIZES.result_start :] = 0xA5
        raw = bytearray(OffloadHeader(sequence=1, weight_id=weight, rows=rows, d_in=d_in, d_out=d_out).pack())
        raw[6:8] = status.to_bytes(2, "little")
        if preamble is not None:
            raw[:8] = preamble.to_bytes(8, "little")
        peer.doorbell.ring(1, bytes(raw))
        shapes = [weight.values.shape[::-1] for weight in WEIGHTS]
        known = status == 0 and weight < 3 and (d_in, d_out) == shapes[weight] and rows > 0
        good = known and rows * d_in * 2 <= SIZES.operand and rows * d_out * 4 <= SIZES.result
        try:
            answer = OffloadHeader.unpack(peer.doorbell.wait(HANG_GUARD_S))
        except DoorbellClosedError:
            assert preamble is not None or not (
                0 < rows <= 1 << 20 and 0 < d_in <= 1 << 24 and 0 < d_out <= 1 << 24
            )
            return
        assert answer.status == (Status.OK if good else Status.BAD_REQUEST)
        untouched = SIZES.result_start + (rows * d_out * 4 if good else 0)
        assert (peer.slab.memory[untouched:] == 0xA5).all()


def test_operands_that_are_not_finite_reach_the_result(peer: Peer) -> None:
    for rows in (1, 7, 14, 16):
        operand = operand_of(rows, 96)
        operand[-1, 5] = np.inf
        with np.errstate(invalid="ignore"):
            expected = operand.astype(np.float32) @ WEIGHTS[0].values.astype(np.float32).T
        answer = peer.offload(peer.doorbell.rung + 1, 0, operand)
        assert answer.status == Status.OK
        np.testing.assert_array_equal(peer.slab.result(rows, 192), expected)


def test_two_runners_share_the_engine(service: Service) -> None:
    """Neither's loop keeps the other out, and uploads get through, too."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            peer = connect(service)
            with peer.socket:
                for sequence in range(1, 300):
                    weight_id = (sequence + seed) % 3
                    operand = operand_of(1 + sequence % 20, WEIGHTS[weight_id].values.shape[1], sequence)
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


def keep_busy(peer: Peer, operand: NDArray[np.float16]) -> None:
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
            operand = operand_of(1, 96)
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
