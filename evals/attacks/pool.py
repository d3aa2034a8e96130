"""The processes of a run: each has a recording worker of its own and does one task after another.

What a task gives does not depend on how many there are: linear algebra runs on one thread in all of
them, and the compiled loops that use more give the same numbers on any number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Final, cast

from evals.attacks.messages import Failed, Finished, Message, Progressed, Setup, Task

_ONE_THREAD: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_STOP_TIMEOUT_S: Final = 30.0
_JOB: Final = ("-m", "evals.attacks.job")


class JobError(RuntimeError):
    """A process of the run could not do its task, or ended."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class _Job:
    """One process, what it works at, and what it last said of it."""

    def __init__(self, setup: Setup, threads: int) -> None:
        self.connection, theirs = Pipe()
        environment = dict.fromkeys(_ONE_THREAD, "1") | {"NUMBA_NUM_THREADS": str(threads)}
        command = [sys.executable, *_JOB, str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | environment,
                # A group of its own: Ctrl-C reaches this process alone, and its worker ends with it.
                start_new_session=True,
            )
        self.task: Task | None = None
        self.current = "starting"
        self._send(setup)

    def start(self, task: Task) -> None:
        """Begin ``task``."""
        self.task = task
        self._send(task)

    def receive(self) -> Message:
        """The next message.

        Raises:
            JobError: the process ended, or its task failed.
        """
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(message, Failed):
            raise JobError(f"{self.task}: {message.message}", remedy=message.remedy)
        if isinstance(message, Progressed):
            self.current = message.current
        return message

    def _send(self, value: Setup | Task) -> None:
        try:
            self.connection.send(value)
        except OSError:
            raise self._ended() from None

    def _ended(self) -> JobError:
        code = self.process.wait(_STOP_TIMEOUT_S)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return JobError(
            f"A process of the run {how} at: {self.current}.",
            remedy="Results so far are kept: run again to go on, with fewer --jobs if memory was short.",
        )

    def end(self) -> None:
        """Tell the process to end."""
        self.connection.close()
        self.process.terminate()

    def join(self) -> None:
        """Wait until it has ended, and its worker with it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def messages(tasks: Sequence[Task], setup: Setup, jobs: int) -> Iterator[tuple[int, Task, Message]]:
    """Do ``tasks`` in up to ``jobs`` processes: what they say, by number of the process and task.

    Tasks begin in their order. The last message of each is :class:`Finished`.

    Raises:
        JobError: a process ended, or a task could not be done. All processes are ended then.
    """
    left = deque(tasks)
    count = max(1, min(jobs, len(tasks)))
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    running: list[_Job] = []
    try:
        for _ in range(count):
            running.append(_Job(setup, threads))
            running[-1].start(left.popleft())
        while busy := [job for job in running if job.task is not None]:
            for ready in wait([job.connection for job in busy]):
                number = next(i for i, job in enumerate(running) if job.connection is ready)
                job = running[number]
                message, task = job.receive(), cast("Task", job.task)
                if isinstance(message, Finished):
                    job.task = None
                    if left:
                        job.start(left.popleft())
                yield number, task, message
    finally:
        for job in running:
            job.end()
        for job in running:
            job.join()
