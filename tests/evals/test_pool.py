"""Processes of a run: every task is done once, and one that ends is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evals.attacks import pool
from evals.attacks.messages import Finished, Progressed, Setup, Task

# Stands in for :mod:`evals.attacks.job`: says what it was told and what threads it has.
_ECHO = """
import os, sys
from multiprocessing.connection import Connection
from evals.attacks.messages import Finished, Progressed
connection = Connection(int(sys.argv[1]))
setup = connection.recv()
try:
    while True:
        task = connection.recv()
        threads = [os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")]
        connection.send(Progressed(f"{task} of {setup.prompts} on {threads}", 0.5))
        connection.send(Finished())
except EOFError:
    pass
"""
_KILLED = """
import os, signal, sys
from multiprocessing.connection import Connection
from evals.attacks.messages import Progressed
connection = Connection(int(sys.argv[1]))
connection.recv(), connection.recv()
connection.send(Progressed("c2, short: jade", 0.5))
os.kill(os.getpid(), signal.SIGKILL)
"""
TASKS = [Task(f"c{i}", "short", ("nn",)) for i in range(5)]


def setup(directory: Path) -> Setup:
    return Setup(directory=directory, prompts=7, seed=1, source="s", shared=directory)


def test_every_task_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_JOB", ("-c", _ECHO))
    told = list(pool.messages(TASKS, setup(tmp_path), 2))
    assert {job for job, _, _ in told} <= {0, 1}
    said = sorted(message.current for _, _, message in told if isinstance(message, Progressed))
    assert said == [f"c{i}, short of 7 on ['1', '1']" for i in range(5)]
    done = [task for _, task, message in told if isinstance(message, Finished)]
    assert sorted(done, key=str) == TASKS


def test_a_process_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_JOB", ("-c", _KILLED))
    with pytest.raises(pool.JobError, match=r"killed by signal 9 at: c2, short: jade") as caught:
        list(pool.messages(TASKS, setup(tmp_path), 1))
    assert "--jobs" in caught.value.remedy


def test_what_a_task_raises_is_told(tmp_path: Path) -> None:
    with pytest.raises(pool.JobError, match=r"c0, short: ModelError: There is no model directory"):
        list(pool.messages(TASKS[:1], setup(tmp_path / "nothing"), 1))


def test_processes_end_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_JOB", ("-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(pool, "wait", lambda connections: (_ for _ in ()).throw(KeyboardInterrupt))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(pool.messages(TASKS, setup(tmp_path), 2))
    assert time.monotonic() - begin < 30
