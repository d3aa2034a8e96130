"""Recordings, captures and truths on disk.

A recording is what the worker process writes, one folder per session::

    SESSION/operands.bin    the operands end to end, as they came
    SESSION/results.bin     the results, if they were asked for
    SESSION/offloads.jsonl  one line per offload: Record
    SESSION/done            empty; there once the session has ended

Captures and truths are stored in different directories, one ``.npz`` per capture.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import Capture, Offload, Op, PromptTruth, Truth

OPERANDS: Final = "operands.bin"
RESULTS: Final = "results.bin"
OFFLOADS: Final = "offloads.jsonl"
DONE: Final = "done"
# What to record, for sessions that open from then on; see evals.attacks.recording_worker.
FILTER: Final = "filter.json"
_INDEX: Final = "index.json"
_DONE_TIMEOUT_S: Final = 30.0


class StoreError(ValueError):
    """Files that are not there, or not what they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One offload as the worker names it.

    ``weight`` is the SHA-256 of the public weight, hexadecimal; ``step`` counts how often the session
    started over with its weights. Offsets are bytes in their files; -1: no result was kept. Times are in
    nanoseconds of the worker's clock.
    """

    weight: str
    step: int
    shape: tuple[int, int]
    dtype: str
    offset: int
    result_shape: tuple[int, int]
    result_dtype: str
    result_offset: int
    arrived_ns: int
    compute_ns: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A record with its data."""

    record: Record
    operand: NDArray[np.generic]
    result: NDArray[np.generic] | None


def read_recording(session: Path) -> list[Recorded]:
    """What the worker wrote of one session, in order, once the session has ended.

    Raises:
        StoreError: it does not end, or the files do not fit together.
    """
    deadline = time.monotonic() + _DONE_TIMEOUT_S
    while not (session / DONE).exists():
        if time.monotonic() > deadline:
            raise StoreError(f"the worker did not finish {session}")
        time.sleep(0.005)
    operands = np.fromfile(session / OPERANDS, dtype=np.uint8)
    results = np.fromfile(session / RESULTS, dtype=np.uint8) if (session / RESULTS).exists() else None
    recorded = []
    for line in (session / OFFLOADS).read_text().splitlines():
        values = json.loads(line)
        for name in ("shape", "result_shape"):
            values[name] = tuple(values[name])
        record = Record(**values)
        result = None
        if record.result_offset >= 0:
            if results is None:
                raise StoreError(f"{session / RESULTS} is missing")
            result = _array(results, record.result_offset, record.result_shape, record.result_dtype)
        operand = _array(operands, record.offset, record.shape, record.dtype)
        recorded.append(Recorded(record, operand, result))
    return recorded


def _array(data: NDArray[np.uint8], offset: int, shape: tuple[int, int], dtype: str) -> NDArray[np.generic]:
    kind = np.dtype(dtype)
    size = shape[0] * shape[1] * kind.itemsize
    if offset + size > len(data):
        raise StoreError("a recording is shorter than its records say")
    # Copied: offsets of mixed element types need not be aligned, and the file can be let go.
    return data[offset : offset + size].copy().view(kind).reshape(shape)


def write_captures(
    directory: Path, captures: Sequence[Capture], record: Mapping[str, Any] | None = None
) -> None:
    """Store ``captures``; ``record`` says how they were made (seeds, versions, condition).

    Raises:
        StoreError: the directory holds something already.
    """
    _new(directory)
    entries = []
    for number, capture in enumerate(captures):
        arrays: dict[str, NDArray[np.generic]] = {}
        offloads = []
        for i, offload in enumerate(capture.offloads):
            arrays[f"operand{i}"] = offload.operand
            if offload.result is not None:
                arrays[f"result{i}"] = offload.result
            offloads.append(
                [offload.forward, offload.layer, offload.op, offload.arrived_ns, offload.compute_ns]
            )
        _save(directory / f"{number:05}.npz", arrays)
        entries.append({"prompt": capture.prompt, "offloads": offloads})
    _write_json(directory / _INDEX, {"record": dict(record or {}), "captures": entries})


def read_captures(directory: Path) -> tuple[list[Capture], dict[str, Any]]:
    """What :func:`write_captures` stored, and its record.

    Raises:
        StoreError: there are none.
    """
    index = _read_json(directory / _INDEX, "captures")
    captures = []
    for number, entry in enumerate(index["captures"]):
        with np.load(directory / f"{number:05}.npz", allow_pickle=False) as arrays:
            offloads = tuple(
                Offload(
                    forward=forward,
                    layer=layer,
                    op=op,
                    operand=arrays[f"operand{i}"],
                    result=arrays.get(f"result{i}"),
                    arrived_ns=arrived,
                    compute_ns=computed,
                )
                for i, (forward, layer, op, arrived, computed) in enumerate(entry["offloads"])
            )
        captures.append(Capture(prompt=entry["prompt"], offloads=offloads))
    return captures, index["record"]


def write_truth(directory: Path, truth: Truth) -> None:
    """Store the secrets, for scoring.

    Raises:
        StoreError: the directory holds something already.
    """
    _new(directory)
    entries = []
    for number, prompt in enumerate(truth.prompts):
        _save(
            directory / f"{number:05}.npz", {f"rows{i}": rows for i, rows in enumerate(prompt.rows.values())}
        )
        entries.append(
            {
                "prompt": prompt.prompt,
                "text": prompt.text,
                "tokens": prompt.tokens,
                "prompt_lengths": prompt.prompt_lengths,
                "rows": list(prompt.rows),
            }
        )
    _write_json(directory / _INDEX, {"truth": entries})


def read_truth(directory: Path) -> Truth:
    """What :func:`write_truth` stored.

    Raises:
        StoreError: there is none.
    """
    prompts = []
    for number, entry in enumerate(_read_json(directory / _INDEX, "truth")["truth"]):
        with np.load(directory / f"{number:05}.npz", allow_pickle=False) as arrays:
            rows = {
                (int(forward), int(layer), cast(Op, op)): arrays[f"rows{i}"]
                for i, (forward, layer, op) in enumerate(entry["rows"])
            }
        prompts.append(
            PromptTruth(
                prompt=entry["prompt"],
                text=entry["text"],
                tokens=tuple(tuple(tokens) for tokens in entry["tokens"]),
                prompt_lengths=tuple(entry["prompt_lengths"]),
                rows=rows,
            )
        )
    return Truth(prompts=prompts)


def record_line(record: Record) -> str:
    """The line of ``record`` in its file."""
    return json.dumps(asdict(record)) + "\n"


def _new(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise StoreError(f"{directory} is not empty")


def _save(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    np.savez(path, allow_pickle=False, **cast(dict[str, Any], dict(arrays)))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value) + "\n")


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    if not path.exists():
        raise StoreError(f"{path.parent} holds no {kind}")
    value = json.loads(path.read_text())
    if not isinstance(value, dict) or kind not in value:
        raise StoreError(f"{path} is not an index of {kind}")
    return value
