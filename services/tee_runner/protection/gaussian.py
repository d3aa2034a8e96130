"""Standard normals from a secret stream."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.rng import SecretStream
from tee_runner.simd import LANES, gaussian_pairs
from tee_runner.vector import gaussian_pair

# Words drawn and converted at a time, in place: 128 KiB, so that they are still in cache when converted.
_PIECE = 1 << 15
# More normals than this are drawn in parts of so many, each from a stream of its own, on all cores.
# Which normals come out does not depend on the number of cores.
PART = 1 << 17


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _pairs(first: Any, second: Any, cosine: Any, sine: Any) -> None:
    """Normals of pairs of words; ``cosine`` and ``sine`` may be ``first`` and ``second`` themselves."""
    whole = first.shape[0] // LANES * LANES
    gaussian_pairs(first.ctypes.data, second.ctypes.data, cosine.ctypes.data, sine.ctypes.data, whole)
    for i in range(whole, first.shape[0]):
        x, y = gaussian_pair(first[i], second[i])
        cosine[i] = x
        sine[i] = y


def fill_normals(stream: SecretStream, out: NDArray[np.float32]) -> None:
    """Overwrite ``out`` ``(n,)`` float32 with independent standard normals."""
    if out.size <= PART:
        _fill(stream, out)
        return
    parts = [out[start : start + PART] for start in range(0, out.size, PART)]
    # list() waits for all of them, and raises what one of them raised.
    list(_threads().map(_fill, stream.fork(len(parts)), parts))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="gelo-normals")


def _fill(stream: SecretStream, out: NDArray[np.float32]) -> None:
    # Words are drawn to where their normals go: nothing else holds them, and nothing is left to wipe.
    words = out.view(np.uint32)
    for start in range(0, out.size, _PIECE):
        part, drawn = out[start : start + _PIECE], words[start : start + _PIECE]
        half = part.size // 2
        stream.fill(drawn[: 2 * half])
        _pairs(drawn[:half], drawn[half : 2 * half], part[:half], part[half : 2 * half])
        if part.size % 2:
            last, spare = stream.words(2), np.empty(1, dtype=np.float32)
            _pairs(last[:1], last[1:], part[-1:], spare)
            last.fill(0)
            spare.fill(0.0)


def standard_normals(stream: SecretStream, count: int) -> NDArray[np.float32]:
    """``count`` independent standard normals, float32."""
    normals = np.empty(count, dtype=np.float32)
    fill_normals(stream, normals)
    return normals
