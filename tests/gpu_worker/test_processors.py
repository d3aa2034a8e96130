"""Threads of a team keep off each other's processors, and may use all of theirs afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from gelo.processors import move_off
from gpu_worker.engines import team as team_module
from gpu_worker.engines.cpu import CpuEngine
from gpu_worker.engines.team import keep_apart

ALLOWED = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two processors")


def on_a_thread(body: Callable[[], None]) -> None:
    """Run ``body`` on a thread of its own, whose affinity it may change; raises what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def start_on(processor: int) -> None:
    """Put the calling thread on ``processor`` and let it use all of them again: it stays for now."""
    os.sched_setaffinity(0, {processor})
    os.sched_setaffinity(0, ALLOWED)


@several
def test_a_thread_leaves_the_processors_that_are_taken() -> None:
    def body() -> None:
        for kept in ALLOWED[:8]:
            taken = np.array([p for p in ALLOWED if p != kept], dtype=np.int64)
            start_on(int(taken[0]))
            assert move_off(taken) is True
            assert os.sched_getaffinity(0) == set(ALLOWED)

    on_a_thread(body)


def test_a_thread_that_may_use_no_other_processor_stays() -> None:
    def body() -> None:
        os.sched_setaffinity(0, {ALLOWED[0]})
        assert move_off(np.array([ALLOWED[0]], dtype=np.int64)) is False
        assert os.sched_getaffinity(0) == {ALLOWED[0]}

    on_a_thread(body)


@several
def test_what_an_operator_allows_is_not_widened() -> None:
    def body() -> None:
        os.sched_setaffinity(0, set(ALLOWED[:2]))
        assert move_off(np.array([ALLOWED[0]], dtype=np.int64)) is True
        assert os.sched_getaffinity(0) == set(ALLOWED[:2])

    on_a_thread(body)


@pytest.mark.parametrize("number", [-1, 1 << 40, -(1 << 40), 64 * 128])
def test_numbers_of_no_processor_are_ignored(number: int) -> None:
    def body() -> None:
        assert move_off(np.array([number], dtype=np.int64)) is True
        assert os.sched_getaffinity(0) == set(ALLOWED)

    on_a_thread(body)


def places(*members: int) -> np.ndarray:
    """A job's words with where its members are, as :class:`Team` has them."""
    job = np.zeros(team_module._PLACES + len(members), dtype=np.int64)
    job[team_module._PLACES :] = members
    return job


@several
def test_a_helper_moves_only_if_a_member_before_it_is_there() -> None:
    def body() -> None:
        os.sched_setaffinity(0, {ALLOWED[1]})
        taken = np.empty(1, np.int64)
        apart = places(ALLOWED[0], -1)
        assert keep_apart(apart.ctypes.data, 1, taken) is False
        assert apart[-1] == ALLOWED[1]
        # The leader does not move away from helpers behind it.
        leads = places(-1, ALLOWED[1])
        assert keep_apart(leads.ctypes.data, 0, taken[:0]) is False
        # Here it would move, were it allowed to run anywhere else.
        shared = places(ALLOWED[1], -1)
        assert keep_apart(shared.ctypes.data, 1, taken) is True
        assert os.sched_getaffinity(0) == {ALLOWED[1]}
        os.sched_setaffinity(0, set(ALLOWED[:2]))
        if not keep_apart(shared.ctypes.data, 1, taken):  # the kernel moved it before
            assert shared[-1] == ALLOWED[0]

    on_a_thread(body)


@several
def test_a_helper_does_its_share_beside_a_leader_that_holds_its_processor() -> None:
    """Both start on one processor, of which the leader gives up nothing but by yielding."""
    engine = CpuEngine(threads=2)
    try:
        weight = engine.load(np.ones((64, 64), dtype=np.float16))
        operand, out = np.ones((1, 64), dtype=np.float16), np.empty((1, 64), dtype=np.float32)
        job = engine._team.job

        def body() -> None:
            os.sched_setaffinity(0, {ALLOWED[0]})
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                engine.matmul(weight, operand, out)
                assert (out == 64).all()
                leader, helper = job[team_module._PLACES :]
                assert leader == ALLOWED[0]
                if helper not in (-1, leader):
                    return
            pytest.fail("the helper stayed with the leader")

        on_a_thread(body)
    finally:
        engine.close()
