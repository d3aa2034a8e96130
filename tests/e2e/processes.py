"""Starts, kills and restarts real worker processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

HANG_GUARD_S = 180.0
_SERVE = """
import logging, sys
from gpu_worker.engines import create_engine
from gpu_worker.server import WorkerSettings, serve
logging.basicConfig(level="INFO")
serve(create_engine(sys.argv[1]), WorkerSettings(address=sys.argv[2]))
"""


@dataclass(slots=True)
class WorkerProcess:
    """A worker that is listening on ``address``; ``log`` grows as it writes to stderr."""

    process: subprocess.Popen[str]
    address: str = ""
    log: list[str] = field(default_factory=list)
    _listening: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        if not self._listening.wait(HANG_GUARD_S) or not self.address:
            self.kill()
            raise RuntimeError("the worker did not start:\n" + "".join(self.log))

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)
            if "listening on " in line:
                self.address = line.rpartition("listening on ")[2].strip()
                self._listening.set()
        self._listening.set()

    @property
    def port(self) -> int:
        """The port it got."""
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait(HANG_GUARD_S)

    def stop(self) -> None:
        """Ask it to end, and insist that it does."""
        self.process.terminate()
        try:
            self.process.wait(HANG_GUARD_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def start_worker(engine: str = "cpu", *, port: int = 0) -> WorkerProcess:
    """A worker process on the loopback interface; port 0 picks a free one."""
    return start_python(["-c", _SERVE, engine, f"127.0.0.1:{port}"])


def start_python(arguments: Sequence[str]) -> WorkerProcess:
    """A Python process that logs ``listening on HOST:PORT`` as a worker does."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    return WorkerProcess(process)
