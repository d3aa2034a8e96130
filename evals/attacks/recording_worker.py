"""The real worker, which also writes down what it is sent.

python -m evals.attacks.recording_worker DIRECTORY ADDRESS [READY_FD]

It knows what any worker knows: operands, the digests of public weights, and its own clock. Before a
session opens, whoever plays the attacker may put ``filter.json`` into the directory: ``weights``, the
digests (hexadecimal) to record, null for all, and ``results``, whether to keep results too. Each session
gets a folder there; see :mod:`evals.attacks.store`.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from evals.attacks.store import DONE, FILTER, OFFLOADS, OPERANDS, RESULTS, Record, record_line
from gelo.header import OffloadHeader, Status
from gelo.slab import Doorbell, Slab
from gpu_worker import server as server_module
from gpu_worker.engines import create_engine
from gpu_worker.session import Session, Sessions

# One session's files are written in large pieces: the worker must not become slow.
_BUFFER_BYTES: Final = 1 << 22


class Recording:
    """The files of one session."""

    def __init__(self, directory: Path, wanted: frozenset[str] | None, results: bool) -> None:
        directory.mkdir()
        self._directory = directory
        self._wanted = wanted
        self._operands: BinaryIO = (directory / OPERANDS).open("wb", buffering=_BUFFER_BYTES)
        self._results = (directory / RESULTS).open("wb", buffering=_BUFFER_BYTES) if results else None
        self._lines: list[str] = []
        self._step = 0
        self._last = -1

    def operand(self, weight_id: int, digest: str, operand: NDArray[np.generic]) -> Record | None:
        """Write an operand that has arrived; None if it is not to be recorded."""
        arrived = time.perf_counter_ns()
        # A pass uses the weights in order, each once.
        self._step += weight_id <= self._last
        self._last = weight_id
        if self._wanted is not None and digest not in self._wanted:
            return None
        offset = self._operands.tell()
        self._operands.write(np.ascontiguousarray(operand).view(np.uint8).data)
        return Record(
            weight=digest,
            step=self._step,
            shape=(operand.shape[0], operand.shape[1]),
            dtype=operand.dtype.str,
            offset=offset,
            result_shape=(0, 0),
            result_dtype="",
            result_offset=-1,
            arrived_ns=arrived,
            compute_ns=0,
        )

    def result(self, record: Record, result: NDArray[np.generic], compute_ns: int) -> None:
        """Complete ``record``."""
        values = {name: getattr(record, name) for name in Record.__dataclass_fields__}
        values["compute_ns"] = compute_ns
        if self._results is not None:
            values |= {
                "result_shape": (result.shape[0], result.shape[1]),
                "result_dtype": result.dtype.str,
                "result_offset": self._results.tell(),
            }
            self._results.write(np.ascontiguousarray(result).view(np.uint8).data)
        self._lines.append(record_line(Record(**values)))

    def close(self) -> None:
        """Make the recording readable."""
        self._operands.close()
        if self._results is not None:
            self._results.close()
        (self._directory / OFFLOADS).write_text("".join(self._lines))
        (self._directory / DONE).touch()


class RecordingSessions(Sessions):
    """Sessions that write down their offloads."""

    directory: Path

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recordings: dict[bytes, Recording] = {}
        self._numbers = itertools.count()

    def open(self, keys: list[bytes]) -> Session:
        """See :meth:`Sessions.open`."""
        session = super().open(keys)
        wanted, results = _read_filter(self.directory / FILTER)
        with self._lock:
            folder = self.directory / f"session-{next(self._numbers):05}"
            self._recordings[session.session_id] = Recording(folder, wanted, results)
        return session

    def loop(self, session: Session, slab: Slab, doorbell: Doorbell) -> None:
        """None: every offload comes by :meth:`execute`."""

    def execute(
        self,
        session: Session,
        header: OffloadHeader,
        operand: NDArray[Any],
        result: NDArray[Any],
    ) -> OffloadHeader:
        """See :meth:`Sessions.execute`."""
        recording = self._recordings.get(session.session_id)
        if recording is None:
            return super().execute(session, header, operand, result)
        digest = session.keys[header.weight_id][:32].hex()
        record = recording.operand(header.weight_id, digest, operand)
        answer = super().execute(session, header, operand, result)
        if record is not None and answer.status == Status.OK:
            recording.result(record, result, answer.compute_ns)
        return answer

    def close(self, session_id: bytes) -> None:
        """See :meth:`Sessions.close`."""
        super().close(session_id)
        with self._lock:
            recording = self._recordings.pop(session_id, None)
        if recording is not None:
            recording.close()


def _read_filter(path: Path) -> tuple[frozenset[str] | None, bool]:
    if not path.exists():
        return None, False
    values = json.loads(path.read_text())
    weights = values["weights"]
    return None if weights is None else frozenset(weights), bool(values["results"])


def main(arguments: list[str]) -> None:
    """See the module. The port is written to READY_FD as a line."""
    logging.basicConfig(level="WARNING")
    directory, address = Path(arguments[0]), arguments[1]

    def report(port: int) -> None:
        if len(arguments) > 2:
            with os.fdopen(int(arguments[2]), "w") as pipe:
                pipe.write(f"{port}\n")

    RecordingSessions.directory = directory
    vars(server_module)["Sessions"] = RecordingSessions
    settings = server_module.WorkerSettings(address=address)
    # As many threads as all else that was told so.
    threads = int(os.environ.get("NUMBA_NUM_THREADS", "0")) or None
    server_module.serve(create_engine("cpu", threads=threads), settings, on_ready=report)


if __name__ == "__main__":
    main(sys.argv[1:])
