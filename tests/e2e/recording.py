"""What an untrusted worker saw, and whether it gives secrets away.

A recording is everything that entered the worker (raw gRPC messages and metadata, slab headers, operands,
whole slabs at the end) and the results it computed for the LM head. :func:`leaks` searches it for the
secrets of the runs it covers. It knows nothing of any protection scheme: the same code must find
something under `plain`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student_t

from tests.e2e import word_search
from tests.e2e.word_search import quantised, shared_blinding, signed, unblinded

Float32 = NDArray[np.float32]

SHIELD_ROWS = 8
SHIELD_ENERGY = 4.0
# Chance, for one operand row, that an honest mask is taken for a leak. A run has about 10^4 rows.
_FALSE_ALARM = 1e-10


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
    rows: NDArray[np.float16] | NDArray[np.uint32]


@dataclass(slots=True)
class Recording:
    """``received`` are all other bytes with their source, ``head_results`` the LM head's results."""

    operands: list[Operand] = field(default_factory=list)
    received: list[tuple[str, bytes]] = field(default_factory=list)
    head_results: list[NDArray[Any]] = field(default_factory=list)
    uploaded: list[str] = field(default_factory=list)

    def blobs(self) -> Iterator[tuple[str, bytes]]:
        """Everything, as bytes. Operands that came inline are part of their messages."""
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
            if len(payload) < about["size"]:
                break  # still being written
            if about["kind"] == "operand":
                rows = np.frombuffer(payload, about["dtype"]).reshape(about["rows"], -1)
                recording.operands.append(Operand(names[about["weight"]], rows))
            elif about["kind"] == "result":
                if names[about["weight"]] == head:
                    values = np.frombuffer(payload, about["dtype"]).reshape(about["rows"], -1)
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
    """What must not be in a recording. ``offloads`` in the order of the operands.

    ``tokens`` leaves out what the chat template adds: it is the same for everyone.
    """

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
    if shared := shared_blinding([o.rows for o in recording.operands if o.rows.dtype == np.uint32]):
        found.append(f"operands: {shared} pairs of rows share their blinding")
    for index, result in enumerate(recording.head_results):
        rows = [logits for logits in secrets.logits if len(logits) == result.shape[1]]
        words = result.dtype == np.uint32
        bound = word_search.cosine_bound(result.shape[1]) if words else cosine_bound(1)
        if rows and cosines(result, np.stack(rows)).max() > bound:
            found.append(f"result {index} of lm_head: parallel to a logits row")
    found += _in_bytes(list(recording.blobs()), secrets, [o.rows for o in recording.operands])
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


def _in_clear(operand: NDArray[np.float16] | NDArray[np.uint32], rows: Float32) -> Iterator[str]:
    n, d = rows.shape
    scaled = rows.astype(np.float64) / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    seen = signed(operand).astype(np.float64)
    bound, share = cosine_bound(n), shield_share(n, d)
    if operand.dtype == np.uint32:
        bound, share = word_search.cosine_bound(d), word_search.outside_share(n, d)
        yield from unblinded(operand)
    if cosines(operand, rows).max() > bound:
        yield "a row is parallel to a plaintext row"
    if n < d:
        basis = np.linalg.qr(scaled.T)[0]
        outside = seen - seen @ basis @ basis.T
        if np.square(outside).sum() < share * np.square(seen).sum():
            yield "it lies in the span of the plaintext rows"


def cosines(left: NDArray[np.generic], right: NDArray[np.generic]) -> NDArray[np.float64]:
    """Absolute cosines between the rows of ``left`` and those of ``right``."""
    a, b = signed(left).astype(np.float64), signed(right).astype(np.float64)
    a /= np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-30)
    b /= np.maximum(np.linalg.norm(b, axis=1, keepdims=True), 1e-30)
    return np.abs(a @ b.T)


# Exact bytes. Multiplying by a power of two, or by -1, changes only the exponent and the sign of a floating
# point number (short of overflow and subnormals), so windows of consecutive mantissas are compared: of 7
# halves (70 bits) or 3 floats (69 bits), hashed to 64. Of each row one window is searched: the one whose
# smallest element is largest, which is the last to become subnormal. Among 10^9 windows and 10^4 secrets,
# chance hits have probability 10^13 / 2^64 < 10^-6. Integers, searched for when
# there are operands of words, are windows of four, none of them small, quantised as a runner would. Text and
# token ids are windows of whole bytes.


@dataclass(frozen=True, slots=True)
class _Window:
    """``width`` consecutive little-endian elements of ``size`` bytes, of which the low ``bits`` count.

    The first ``sieve`` of them decide quickly that a place is of no interest.
    """

    size: int
    bits: int
    width: int
    sieve: int


_HALF = _Window(2, 10, 7, sieve=2)
_FLOAT = _Window(4, 23, 3, sieve=1)
_WORD = _Window(4, 32, 4, sieve=2)
_TEXT = _Window(1, 8, 8, sieve=3)
_IDS32 = _Window(1, 8, 8, sieve=5)
_IDS64 = _Window(1, 8, 16, sieve=2)
_TABLE_BITS = 22
# Integers smaller than this may stand in a row anywhere.
_LEAST_INTEGER = 8


@numba.njit(nogil=True)
def _element(data: Any, position: int, size: int, bits: int) -> Any:
    value = np.uint64(0)
    for byte in range(size):
        value |= np.uint64(data[position + byte]) << np.uint64(8 * byte)
    return value & np.uint64((1 << bits) - 1)


@numba.njit(nogil=True)
def _hash(data: Any, position: int, size: int, bits: int, width: int) -> Any:
    hashed = np.uint64(0)
    for element in range(width):
        value = _element(data, position + element * size, size, bits)
        hashed = (hashed + value) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(29)
    return hashed


@numba.njit(nogil=True)
def _sieve(data: Any, position: int, size: int, bits: int, count: int) -> Any:
    value = np.uint64(0)
    for element in range(count):
        value = (value << np.uint64(7)) ^ _element(data, position + element * size, size, bits)
    return value & np.uint64((1 << _TABLE_BITS) - 1)


@numba.njit(nogil=True)
def _contains(data: Any, size: int, bits: int, width: int, sieve: int, table: Any, wanted: Any) -> bool:
    """Whether a window at any byte offset has one of the hashes ``wanted`` (sorted)."""
    for position in range(len(data) - size * width + 1):
        if table[_sieve(data, position, size, bits, sieve)]:
            hashed = _hash(data, position, size, bits, width)
            place = np.searchsorted(wanted, hashed)
            if place < len(wanted) and wanted[place] == hashed:
                return True
    return False


class _Needles:
    """Windows to look for."""

    def __init__(self, window: _Window, patterns: Iterable[bytes]) -> None:
        self._window = (window.size, window.bits, window.width, window.sieve)
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        hashes = set()
        for pattern in patterns:
            data = np.frombuffer(pattern, np.uint8)
            hashes.add(int(_hash(data, 0, window.size, window.bits, window.width)))
            self._table[int(_sieve(data, 0, window.size, window.bits, window.sieve))] = True
        self._wanted = np.array(sorted(hashes), np.uint64)

    def found_in(self, blob: bytes) -> bool:
        """Whether one of them occurs, at any byte offset."""
        data = np.frombuffer(blob, np.uint8)
        return len(self._wanted) > 0 and _contains(data, *self._window, self._table, self._wanted)


def _search(
    blobs: Sequence[tuple[str, bytes]], window: _Window, patterns: dict[str, list[bytes]]
) -> Iterator[str]:
    """Sources in which a pattern occurs, with the pattern's name."""
    anything = _Needles(window, [pattern for some in patterns.values() for pattern in some])
    named = {name: _Needles(window, some) for name, some in patterns.items()}
    for source, blob in blobs:
        if anything.found_in(blob):
            yield from (f"{source}: {name}" for name, needles in named.items() if needles.found_in(blob))


def _row_patterns(rows: Iterable[Float32], window: _Window) -> list[bytes]:
    patterns = []
    for row in rows:
        sizes = np.lib.stride_tricks.sliding_window_view(np.abs(row), window.width).min(axis=1)
        first = int(sizes.argmax())
        values = row[first : first + window.width].astype(np.float32)
        if values.all():
            # To where the exponents of a half are normal.
            values = np.ldexp(values, -int(np.frexp(np.abs(values).max())[1]))
            patterns.append(values.astype(np.float16 if window.size == 2 else np.float32).tobytes())
    return patterns


def _integer_patterns(rows: Iterable[Float32]) -> list[bytes]:
    patterns = []
    for row in rows:
        for values in quantised(row):
            sizes = np.lib.stride_tricks.sliding_window_view(np.abs(values), _WORD.width).min(axis=1)
            first = int(sizes.argmax())
            if sizes[first] >= _LEAST_INTEGER:
                patterns.append(values[first : first + _WORD.width].tobytes())
    return patterns


def rows_in_bytes(blobs: Sequence[tuple[str, bytes]], named: dict[str, Sequence[Float32]]) -> Iterator[str]:
    """Sources in which a row of ``named`` occurs as float16 or float32, times any power of two."""
    for window, kind in ((_HALF, "float16"), (_FLOAT, "float32")):
        patterns = {f"{name} as {kind}": _row_patterns(rows, window) for name, rows in named.items()}
        yield from _search(blobs, window, patterns)


def int8_rows_in_bytes(
    blobs: Sequence[tuple[str, bytes]], name: str, rows: Iterable[NDArray[np.int8]]
) -> Iterator[str]:
    """Sources in which 8 consecutive elements of one of ``rows`` occur as they are."""
    pieces = [piece for row in rows for piece in _pieces(row.tobytes(), _TEXT) if any(piece)]
    yield from _search(blobs, _TEXT, {name: pieces})


def _in_bytes(
    blobs: Sequence[tuple[str, bytes]], secrets: Secrets, operands: Sequence[NDArray[Any]]
) -> Iterator[str]:
    activations = [row for offload in secrets.offloads for row in offload.rows]
    yield from rows_in_bytes(blobs, {"an activation row": activations, "a logits row": secrets.logits})
    if any(operand.dtype == np.uint32 for operand in operands):
        integers = {"an activation row as integers": _integer_patterns(activations)}
        yield from _search(blobs, _WORD, integers)
    # A pair with a 0 is no evidence: it reads as one 64-bit number.
    pairs = [pair for pair in pairwise(secrets.tokens) if all(pair)]
    for window, dtype in ((_IDS32, "<i4"), (_IDS64, "<i8")):
        found = [np.array(pair, dtype).tobytes() for pair in pairs]
        yield from _search(blobs, window, {"two token ids in a row": found})
    texts = {"8 bytes of the prompt": secrets.prompt, "8 bytes of the answer": secrets.answer}
    yield from _search(blobs, _TEXT, {name: _pieces(text.encode(), _TEXT) for name, text in texts.items()})


def _pieces(data: bytes, window: _Window) -> list[bytes]:
    return [data[i : i + window.width] for i in range(len(data) - window.width + 1)]
