"""Slabs and doorbells, the latter between two real processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gelo.header import OffloadHeader
from gelo.slab import (
    ATTACH_BYTES,
    CONTROL_BYTES,
    MAX_SLAB_BYTES,
    AttachMessage,
    Doorbell,
    DoorbellClosedError,
    DoorbellTimeoutError,
    Slab,
    SlabError,
    SlabSizes,
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HANG_GUARD_S = 60.0
SIZES = SlabSizes(operand=10_000, result=20_000)


# --- sizes and messages ------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 1 << 34), st.integers(1, 1 << 34))
def test_areas_are_page_aligned_and_do_not_overlap(operand: int, result: int) -> None:
    sizes = SlabSizes(operand=operand, result=result)
    assert sizes.result_start % 4096 == sizes.total % 4096 == 0
    assert CONTROL_BYTES + operand <= sizes.result_start < CONTROL_BYTES + operand + 4096
    assert sizes.result_start + result <= sizes.total < sizes.result_start + result + 4096


@pytest.mark.parametrize(
    ("operand", "result"),
    [(0, 1), (1, 0), (-1, 1), (1, -1), (MAX_SLAB_BYTES, 1), (1, MAX_SLAB_BYTES), (1 << 63, 1 << 63)],
)
def test_sizes_out_of_bounds(operand: int, result: int) -> None:
    with pytest.raises(SlabError):
        SlabSizes(operand=operand, result=result)


def test_largest_slab() -> None:
    assert SlabSizes(operand=4096, result=MAX_SLAB_BYTES - 8192).total == MAX_SLAB_BYTES
    with pytest.raises(SlabError):
        SlabSizes(operand=4096, result=MAX_SLAB_BYTES - 8191)


def test_attach_message_round_trip() -> None:
    message = AttachMessage(session_id=bytes(range(16)), sizes=SIZES)
    assert len(message.pack()) == ATTACH_BYTES == 32
    assert AttachMessage.unpack(message.pack()) == message


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_attach_messages_are_refused_only_by_slab_errors(data: bytes) -> None:
    try:
        message = AttachMessage.unpack(data)
    except SlabError:
        return
    assert message.pack() == data
    assert message.sizes.total <= MAX_SLAB_BYTES


# --- sealing -----------------------------------------------------------------------------------------------


@pytest.fixture
def made() -> Iterator[tuple[Slab, int]]:
    slab, descriptor = Slab.create(SIZES)
    yield slab, descriptor
    os.close(descriptor)


def memory_file(size: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_created_slab_can_neither_shrink_nor_grow_nor_be_unsealed(made: tuple[Slab, int]) -> None:
    _, descriptor = made
    assert os.fstat(descriptor).st_size == SIZES.total
    for size in (0, SIZES.total - 4096, SIZES.total + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(descriptor)


def test_both_sides_see_one_memory(made: tuple[Slab, int]) -> None:
    mine, descriptor = made
    theirs = Slab.attach(descriptor, SIZES)
    mine.operand(3, 5)[...] = np.arange(15).reshape(3, 5)
    np.testing.assert_array_equal(theirs.operand(3, 5), np.arange(15).reshape(3, 5))
    theirs.result(2, 7)[...] = -1.5
    assert (mine.result(2, 7) == -1.5).all()


def test_words_and_floats_are_the_same_memory(made: tuple[Slab, int]) -> None:
    slab, _ = made
    halves, words = slab.operand(3, 4), slab.operand_words(3, 4)
    assert (halves.dtype, words.dtype, words.shape) == (np.float16, np.uint32, (3, 4))
    assert slab.operand_words(3, 4) is words
    assert slab.operand(3, 4) is halves
    words[...] = 0x3C00_4000
    np.testing.assert_array_equal(halves.reshape(-1), np.tile([2, 1], 6))
    assert slab.memory[CONTROL_BYTES : CONTROL_BYTES + 48].tobytes() == words.tobytes()
    results = slab.result_words(5, 2)
    results[...] = 0x3F80_0000
    assert (slab.result(5, 2) == 1.0).all()
    assert slab.memory[SIZES.result_start : SIZES.result_start + 40].tobytes() == results.tobytes()


def test_words_take_twice_the_operand_area(made: tuple[Slab, int]) -> None:
    slab, _ = made
    slab.operand(5000, 1)
    slab.operand_words(2500, 1)
    for use in (
        lambda: slab.operand(5001, 1),
        lambda: slab.operand_words(2501, 1),
        lambda: slab.operand_words(0, 1),
        lambda: slab.result_words(5001, 1),
        lambda: slab.result_words(1, -1),
    ):
        with pytest.raises(SlabError):
            use()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50))
def test_the_areas_end_where_the_sizes_say(operand: int, result: int) -> None:
    slab, descriptor = Slab.create(SlabSizes(operand=operand, result=result))
    os.close(descriptor)
    halves, words, results = slab.areas()
    assert (halves.size, words.size, results.size) == (operand // 2, operand // 4, result // 4)
    for area, start in ((halves, CONTROL_BYTES), (words, CONTROL_BYTES), (results, slab.sizes.result_start)):
        assert area.size == 0 or area.ctypes.data == slab.memory.ctypes.data + start


@pytest.mark.parametrize(
    "seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, SEALS & ~fcntl.F_SEAL_SHRINK]
)
def test_attach_refuses_an_unsealed_file(seals: int) -> None:
    descriptor = memory_file(SIZES.total, seals)
    with pytest.raises(SlabError, match="not sealed"):
        Slab.attach(descriptor, SIZES)
    os.close(descriptor)


@pytest.mark.parametrize("difference", [-4096, -1, 1, 4096])
def test_attach_refuses_another_size(difference: int) -> None:
    descriptor = memory_file(SIZES.total + difference, SEALS)
    with pytest.raises(SlabError, match="size"):
        Slab.attach(descriptor, SIZES)
    os.close(descriptor)


def test_attach_refuses_what_is_not_a_memory_file(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(SIZES.total)
        with pytest.raises(SlabError):
            Slab.attach(file.fileno(), SIZES)
    with tempfile.TemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(SIZES.total)
        with pytest.raises(SlabError):
            Slab.attach(shared.fileno(), SIZES)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(SlabError):
        Slab.attach(ours.fileno(), SIZES)


# --- views -------------------------------------------------------------------------------------------------


def test_views_are_bounded(made: tuple[Slab, int]) -> None:
    slab, _ = made
    assert slab.operand(1, 5000).nbytes == SIZES.operand
    assert slab.result(5000, 1).nbytes == SIZES.result
    view: Callable[[int, int], object]
    for view, columns in ((slab.operand, 5000), (slab.result, 5000)):
        for rows, width in ((1, columns + 1), (2, columns), (0, 1), (1, 0), (-1, -1), (1 << 40, 1 << 40)):
            with pytest.raises(SlabError):
                view(rows, width)


def test_full_areas_leave_each_other_and_the_control_page_alone(made: tuple[Slab, int]) -> None:
    slab, _ = made
    slab.operand(1, 5000).view(np.uint8)[...] = 0xAA
    slab.result(1, 5000).view(np.uint8)[...] = 0xBB
    assert not slab.memory[:CONTROL_BYTES].any()
    assert (slab.operand(1, 5000).view(np.uint8) == 0xAA).all()
    slab.write_header(256, b"\xcc" * 64)
    slab.write_header(320, b"\xdd" * 64)
    assert slab.memory[256:320].tobytes() == b"\xcc" * 64
    assert slab.memory[320:384].tobytes() == b"\xdd" * 64
    assert (slab.memory == 0xCC).sum() == (slab.memory == 0xDD).sum() == 64


# --- doorbells ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """This side's slab and doorbell, and the process on the other side."""

    slab: Slab
    doorbell: Doorbell
    process: subprocess.Popen[bytes]

    def exchange(self, sequence: int) -> None:
        rows, width = 1 + sequence % 3, 4
        operand = (np.arange(rows * width).reshape(rows, width) + sequence) % 1000
        self.slab.operand(rows, width)[...] = operand
        header = OffloadHeader(sequence=sequence, weight_id=0, rows=rows, d_in=width, d_out=width)
        self.doorbell.ring(sequence, header.pack())
        answer = OffloadHeader.unpack(self.doorbell.wait(HANG_GUARD_S))
        assert (answer.sequence, answer.compute_ns) == (sequence, sequence)
        assert np.array_equal(self.slab.result(rows, width), 2 * operand)


StartPeer = Callable[..., Peer]


@pytest.fixture
def start_peer() -> Iterator[StartPeer]:
    started: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def start(mode: str, *, spins: int = 0, peer_spins: int = 0) -> Peer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slab, descriptor = Slab.create(SIZES)
        numbers = (descriptor, theirs.fileno(), SIZES.operand, SIZES.result, peer_spins)
        command = [
            sys.executable,
            str(Path(__file__).with_name("doorbell_peer.py")),
            *map(str, numbers),
            mode,
        ]
        process = subprocess.Popen(command, pass_fds=(descriptor, theirs.fileno()))
        started.append((process, ours))
        theirs.close()
        os.close(descriptor)
        ours.settimeout(HANG_GUARD_S)
        assert ours.recv(16) == b"up"
        ours.settimeout(None)
        return Peer(slab, Doorbell(slab, ours, runner=True, spins=spins), process)

    yield start
    for process, ours in started:
        ours.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("spins", "peer_spins"),
    [(0, 0), (0, 3000), (3000, 0), (1, 1), (3000, 3000)],
    ids=["both-sleep", "runner-sleeps", "worker-sleeps", "mixed", "both-spin"],
)
def test_thousands_of_exchanges(start_peer: StartPeer, spins: int, peer_spins: int) -> None:
    """A single lost wake-up would hang: the waiting side has nothing else to wake it."""
    peer = start_peer("echo", spins=spins, peer_spins=peer_spins)
    for sequence in range(1, 4001):
        peer.exchange(sequence)


def test_peer_that_sleeps_between_exchanges_is_woken(start_peer: StartPeer) -> None:
    peer = start_peer("echo", spins=3000, peer_spins=10)
    for sequence in range(1, 30):
        peer.exchange(sequence)
        # Long enough that the peer blocks on its socket.
        signal.sigtimedwait([], 0.01)


@pytest.mark.parametrize("spins", [0, 3000])
def test_peer_that_dies_while_waited_for(start_peer: StartPeer, spins: int) -> None:
    peer = start_peer("3", spins=spins)
    for sequence in (1, 2, 3):
        peer.exchange(sequence)
    header = OffloadHeader(sequence=4, weight_id=0, rows=1, d_in=1, d_out=1)
    peer.doorbell.ring(4, header.pack())
    with pytest.raises(DoorbellClosedError):
        peer.doorbell.wait(HANG_GUARD_S)
    assert peer.process.wait(HANG_GUARD_S) == 9


def test_killed_peer_is_noticed_when_waiting_and_when_ringing(start_peer: StartPeer) -> None:
    peer = start_peer("silent")
    peer.process.kill()
    peer.process.wait()
    with pytest.raises(DoorbellClosedError):
        peer.doorbell.wait(HANG_GUARD_S)
    # It had announced that it sleeps: ringing goes through the dead socket.
    peer.slab.memory[192] = 1
    with pytest.raises(DoorbellClosedError):
        peer.doorbell.ring(1, bytes(64))


@pytest.mark.parametrize("mode", ["silent", "flood"])
def test_peer_that_never_rings_times_out(start_peer: StartPeer, mode: str) -> None:
    """Wake-up bytes without a ring are not an answer, however many there are."""
    peer = start_peer(mode, spins=10)
    with pytest.raises(DoorbellTimeoutError):
        peer.doorbell.wait(0.3)
    # And the wait left no announcement behind.
    assert not peer.slab.memory[128:136].any()


def test_an_answer_after_a_timeout_is_seen_by_the_next_wait(start_peer: StartPeer) -> None:
    peer = start_peer("echo", spins=10)
    with pytest.raises(DoorbellTimeoutError):
        peer.doorbell.wait(0.05)
    peer.exchange(1)


def test_unread_wake_ups_do_not_block_the_ringer() -> None:
    """The other side announces a sleep and never reads: ringing must still return."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slab, descriptor = Slab.create(SIZES)
    os.close(descriptor)
    slab.memory[192] = 1
    with ours, theirs:
        doorbell = Doorbell(slab, ours, runner=True, spins=0)
        for sequence in range(1, 5000):
            doorbell.ring(sequence, bytes(64))


def test_memory_outlives_its_descriptor() -> None:
    slab, descriptor = Slab.create(SlabSizes(operand=2, result=4))
    os.close(descriptor)
    slab.operand(1, 1)[...] = 3
    assert slab.operand(1, 1)[0, 0] == 3
    assert len(slab.memory) == CONTROL_BYTES + 2 * mmap.PAGESIZE
