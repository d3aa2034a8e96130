"""Starting and stopping a recording worker."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evals.attacks.store import FILTER

_STOP_TIMEOUT_S: Final = 20.0


class CaptureError(RuntimeError):
    """A capture could not be made."""


@dataclass(slots=True)
class RecordingWorker:
    """A running recording worker. One at a time uses it; weights stay resident between captures."""

    process: subprocess.Popen[bytes]
    directory: Path
    address: str

    def record(self, weights: Sequence[str], *, results: bool) -> None:
        """What the next session's recording holds: offloads of these weights (SHA-256, hexadecimal)."""
        (self.directory / FILTER).write_text(json.dumps({"weights": list(weights), "results": results}))

    def sessions(self) -> list[Path]:
        """The recordings that are there, in the order in which the sessions opened."""
        return sorted(self.directory.glob("session-*"))


@contextlib.contextmanager
def recording_worker(directory: Path | None = None) -> Iterator[RecordingWorker]:
    """Start a worker process that records into ``directory`` (a temporary one if None), and stop it.

    Raises:
        CaptureError: it does not start.
    """
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="gelo-recording-"))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "evals.attacks.recording_worker"]
        command += [str(directory), "127.0.0.1:0", str(writer)]
        try:
            process = subprocess.Popen(command, pass_fds=[writer], stdin=subprocess.DEVNULL)
        finally:
            os.close(writer)
        stack.callback(_stop, process)
        with os.fdopen(reader) as pipe:
            port = pipe.readline().strip()
        if not port:
            raise CaptureError("the recording worker ended before it was ready; see its message above")
        yield RecordingWorker(process, directory, f"127.0.0.1:{port}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
