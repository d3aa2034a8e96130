"""What an untrusted worker saw, and whether it gives secrets away.

A recording is everything that entered the worker (raw gRPC messages and metadata, slab headers, operands,
whole slabs at the end) and the results it computed for the LM head. :func:`leaks` searches it for the
secrets of the runs it covers. It knows nothing of any protection scheme: the same code must find
something under `plain`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

Float32 = NDArray[np.float32]
Words = NDArray[np.uint64]

SHIELD_ROWS = 8
SHIELD_ENERGY = 4.0
# Chance, for one operand row, that an honest mask is taken for a leak. A run has about 10^4 rows.
_FALSE_ALARM = 1e-10
_TEXT_BYTES = 8


# --- the file ----------------------------------------------------------------------------------------------


def write_record(file: BinaryIO, kind: str, payload: bytes, **about: object) -> None:
    """Append one record: a line of JSON, then the payload. One write, so that threads do not mix."""
    line = json.dumps({"kind": kind, "size": len(payload), **about}).encode()
    file.write(line + b"\n" + payload)
    file.flush()


@dataclass(frozen=True, slots=True)
class Operand:
    """One offload as received."""

    weight: str
    rows: NDArray[np.float16]


@dataclass(slots=True)
class Recording:
    """``received`` are all other bytes with their source, ``head_results`` the LM head's results."""

    operands: list[Operand] = field(default_factory=list)
    received: list[tuple[str, bytes]] = field(default_factory=list)
    head_results: list[Float32] = field(default_factory=list)
    uploaded: list[str] = field(default_factory=list)

    def blobs(self) -> Iterator[tuple[str, bytes]]:
        """Everything, as bytes."""
        for operand in self.operands:
            yield f"operand of {operand.weight}", operand.rows.tobytes()
        yield from self.received
        for result in self.head_results:
            yield "result of lm_head", result.tobytes()


def read_recording(path: Path, start: int, names: dict[str, str], head: str) -> tuple[Recording, int]:
    """The records from byte ``start`` on, and where they end. ``names`` maps digests to weights."""
    recording = Recording()
    with path.open("rb") as file:
        file.seek(start)
        while line := file.readline():
            about = json.loads(line)
            payload = file.read(about["size"])
            if about["kind"] == "operand":
                rows = np.frombuffer(payload, np.float16).reshape(about["rows"], -1)
                recording.operands.append(Operand(names[about["weight"]], rows))
            elif about["kind"] == "result":
                if names[about["weight"]] == head:
                    values = np.frombuffer(payload, np.float32).reshape(about["rows"], -1)
                    recording.head_results.append(values)
            elif about["kind"] == "upload":
                recording.uploaded.append(about["weight"])
            else:
                recording.received.append((about["source"], payload))
        return recording, file.tell()


# --- the secrets -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Offload:
    """The plaintext rows that the runner wanted multiplied."""

    weight: str
    rows: Float32


@dataclass(slots=True)
class Secrets:
    """What must not be in a recording. ``offloads`` in the order of the operands."""

    prompt: str = ""
    answer: str = ""
    tokens: list[int] = field(default_factory=list)
    offloads: list[Offload] = field(default_factory=list)
    logits: list[Float32] = field(default_factory=list)


# --- the search --------------------------------------------------------------------------------------------


def leaks(recording: Recording, secrets: Secrets) -> list[str]:
    """One sentence per secret found, without the secret; empty when there is none."""
    found = []
    if [o.weight for o in recording.operands] != [o.weight for o in secrets.offloads]:
        raise AssertionError("the recording and the secrets are of different runs")
    for index, (operand, offload) in enumerate(zip(recording.operands, secrets.offloads, strict=True)):
        found += [
            f"offload {index} ({operand.weight}): {text}" for text in _in_clear(operand.rows, offload.rows)
        ]
    plain = [row for offload in secrets.offloads for row in offload.rows]
    blobs = list(recording.blobs())
    found += _scaled_rows(blobs, plain, "an activation row")
    found += _scaled_rows(blobs, secrets.logits, "a logits row")
    for index, result in enumerate(recording.head_results):
        rows = [logits for logits in secrets.logits if len(logits) == result.shape[1]]
        if rows and _cosines(result, np.stack(rows)).max() > cosine_bound(1):
            found.append(f"result {index} of lm_head: parallel to a logits row")
    found += _token_ids(blobs, secrets.tokens)
    for what, text in (("prompt", secrets.prompt), ("answer", secrets.answer)):
        found += _text(blobs, text, what)
    return found


def cosine_bound(n: int) -> float:
    """How parallel an operand row may be to one of ``n`` plaintext rows by chance.

    A row of A·[H; S] is a·H + b·S with (a, b) uniform on the sphere. Independent directions would give
    cosines of order sqrt(1/d), but the rows of H are not independent: at worst all n are parallel, to g,
    of equal norm h. Then a·H = z·sqrt(n)·h·g and |b·S|² = 16·h²·Σ bᵢ² (shields are nearly orthogonal and
    have norm 4h), with z and the 8 bᵢ independent normals up to a common factor, so that

        cos² / (1 - cos²) = n z² / (16 Σ bᵢ²) = n / (16·8) · t²,    t ~ Student's t with 8 degrees.

    More shield rows, or rows of H that differ, make the cosine smaller. Norms after scaling lie in [1, 2),
    whose mean square exceeds the squared mean by at most 9/8. The bound is the cosine that t exceeds with
    probability 1e-10.
    """
    quantile = float(student_t.isf(_FALSE_ALARM / 2, SHIELD_ROWS))
    ratio = 9 / 8 * n * quantile**2 / (SHIELD_ENERGY**2 * SHIELD_ROWS)
    return math.sqrt(ratio / (1 + ratio))


def shield_share(n: int, d: int) -> float:
    """Half the least share of an operand's energy that lies outside the span of its n plaintext rows.

    A is orthogonal: of an energy of n·h²·9/8 (data) + 8·16·h² (shields), the shields' part outside an
    n-dimensional subspace of R^d is (1 - n/d) of theirs.
    """
    shield = SHIELD_ROWS * SHIELD_ENERGY**2
    return 0.5 * shield * (1 - n / d) / (shield + 9 / 8 * n)


def _in_clear(operand: NDArray[np.float16], rows: Float32) -> Iterator[str]:
    n, d = rows.shape
    scaled = rows.astype(np.float64) / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    seen = operand.astype(np.float64)
    cosine = _cosines(operand, rows).max()
    if cosine > cosine_bound(n):
        yield "a row is parallel to a plaintext row"
    if n < d:
        basis = np.linalg.svd(scaled, full_matrices=False)[2]
        outside = seen - seen @ basis.T @ basis
        if np.square(outside).sum() < shield_share(n, d) * np.square(seen).sum():
            yield "it lies in the span of the plaintext rows"


def _cosines(left: NDArray[np.generic], right: NDArray[np.generic]) -> NDArray[np.float64]:
    a, b = left.astype(np.float64), right.astype(np.float64)
    a /= np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-30)
    b /= np.maximum(np.linalg.norm(b, axis=1, keepdims=True), 1e-30)
    return np.abs(a @ b.T)


# Exact bytes at any scale. A power of two changes only the exponent of a floating point number (short of
# overflow and subnormals), so windows of consecutive (sign, mantissa) pairs are compared: of 6 halves (66
# bits) or 3 floats (72 bits), hashed to 64. Of each row one window is searched, the one whose smallest
# element is largest: the last to become subnormal. Among 10^9 windows and 10^4 secrets, chance hits have
# probability 10^13 / 2^64 < 10^-6.
_HALF = (np.dtype(np.uint16), 0x83FF, 6)
_FLOAT = (np.dtype(np.uint32), 0x807FFFFF, 3)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def _windows(bits: NDArray[np.generic], mask: int, width: int) -> Words:
    fields = bits.astype(np.uint64) & np.uint64(mask)
    count = len(fields) - width + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashed = np.zeros(count, np.uint64)
    for place in range(width):
        hashed = (hashed + fields[place : place + count]) * _MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    return hashed


def _key(row: Float32, kind: tuple[np.dtype[np.generic], int, int]) -> int | None:
    dtype, mask, width = kind
    sizes = np.lib.stride_tricks.sliding_window_view(np.abs(row), width).min(axis=1)
    first = int(sizes.argmax())
    window = row[first : first + width].astype(np.float32)
    if not window.all():
        return None
    if dtype.itemsize == 2:
        # To the middle of the range of a half, where its exponent is normal.
        window = np.ldexp(window, -int(np.frexp(np.abs(window).max())[1]))
        return int(_windows(window.astype(np.float16).view(np.uint16), mask, width)[0])
    return int(_windows(window.view(np.uint32), mask, width)[0])


def _scaled_rows(blobs: Sequence[tuple[str, bytes]], rows: Sequence[Float32], what: str) -> list[str]:
    found = []
    for kind in (_HALF, _FLOAT):
        dtype, mask, width = kind
        keys = {key for row in rows if len(row) >= width and (key := _key(row, kind)) is not None}
        if not keys:
            continue
        wanted = np.array(sorted(keys), np.uint64)
        for source, blob in blobs:
            for offset in range(dtype.itemsize):
                count = (len(blob) - offset) // dtype.itemsize
                if count < width:
                    continue
                stream = np.frombuffer(blob, dtype, count, offset)
                if _any_in(_windows(stream, mask, width), wanted):
                    found.append(f"{source}: {what} as float{8 * dtype.itemsize}")
    return found


def _any_in(values: Words, wanted: Words) -> bool:
    places = np.searchsorted(wanted, values)
    places[places == len(wanted)] = 0
    return bool((wanted[places] == values).any())


def _token_ids(blobs: Sequence[tuple[str, bytes]], tokens: Sequence[int]) -> list[str]:
    """Every two neighbouring ids, as int32 and as int64. Two zeros are no evidence."""
    pairs = {pair for pair in zip(tokens, tokens[1:], strict=False) if pair != (0, 0)}
    needles = {np.array(pair, dtype).tobytes() for pair in pairs for dtype in ("<i4", "<i8")}
    return [
        f"{source}: two token ids in a row"
        for source, blob in blobs
        if any(needle in blob for needle in needles)
    ]


def _text(blobs: Sequence[tuple[str, bytes]], text: str, what: str) -> list[str]:
    data = text.encode()
    windows = {data[i : i + _TEXT_BYTES] for i in range(len(data) - _TEXT_BYTES + 1)}
    if not windows:
        return []
    wanted = np.array(sorted(int.from_bytes(window, "little") for window in windows), np.uint64)
    found = []
    for source, blob in blobs:
        for offset in range(_TEXT_BYTES):
            count = (len(blob) - offset) // _TEXT_BYTES
            if count > 0 and _any_in(np.frombuffer(blob, "<u8", count, offset), wanted):
                found.append(f"{source}: {_TEXT_BYTES} bytes of the {what}")
                break
    return found
