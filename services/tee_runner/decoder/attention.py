"""Causal grouped-query attention over the KV cache, blocked, with an online softmax.

One task is a (sequence, key/value head, query block). It walks the keys in blocks of 64,
keeps running maxima and sums per query row (Milakov & Gimelshein 2018; Dao et al. 2022), and
never holds more than one block of scores. The query heads that share a key/value head are
stacked, so that both products of a block are small matrix products.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from tee_runner.vector import exp, float_from_bits, matmul_add

KEY_BLOCK = 64
# Stacked query rows of a task; with 64 keys and heads of 128 its buffers take about 100 KiB.
_QUERY_ROWS = 64
# Up to here (a decode step) keys and values are used where they lie: copying them into tiles
# would cost more than it saves.
_FEW_ROWS = 8
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


def _widen(value):  # type: ignore[no-untyped-def]
    """A stored cache element as float32: float32 itself, or bfloat16 bits in a uint16."""
    raise TypeError("only inside compiled code")


@overload(_widen, inline="always")
def _widen_overload(value):  # type: ignore[no-untyped-def]  # numba compares signatures
    if value == types.float32:
        return lambda value: value
    if value == types.uint16:
        return lambda value: float_from_bits(np.uint32(value) << np.uint32(16))
    return None


@numba.njit(nogil=True, cache=True)
def query_block(group: int) -> int:
    """Query positions of a task when ``group`` query heads share a key/value head."""
    return max(1, _QUERY_ROWS // group)


@numba.njit(nogil=True, cache=True)
def _load_keys(keys: Any, slot: int, first: int, count: int, offset: int, depth: int, tile: Any) -> None:
    """Keys ``first .. first+count`` transposed into ``tile`` (depth, 64)."""
    for j in range(count):
        for d in range(depth):
            tile[d, j] = _widen(keys[slot, first + j, offset + d])


@numba.njit(nogil=True, cache=True)
def _load_values(values: Any, slot: int, first: int, count: int, offset: int, depth: int, tile: Any) -> None:
    for j in range(count):
        for d in range(depth):
            tile[j, d] = _widen(values[slot, first + j, offset + d])


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(query: Any, key: Any) -> Any:
    total = _ZERO
    for d in range(query.shape[0]):
        total += query[d] * _widen(key[d])
    return total


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _add_scaled(output: Any, value: Any, weight: Any) -> None:
    for d in range(value.shape[0]):
        output[d] += weight * _widen(value[d])


@numba.njit(nogil=True, cache=True)
def _row_max(scores: Any, count: int) -> Any:
    largest = _MINUS_INFINITY
    for j in range(count):
        largest = max(largest, scores[j])
    return largest


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _exp_row(scores: Any, largest: Any, count: int) -> Any:
    """Replace scores by exp(score - largest); returns their sum."""
    total = _ZERO
    for j in range(count):
        p = exp(scores[j] - largest)
        scores[j] = p
        total += p
    return total


@numba.njit(nogil=True, cache=True)
def _softmax_block(
    scores: Any, output: Any, maxima: Any, sums: Any, rows: int, group: int, position: int,
    first: int, count: int, window: int,
) -> None:  # fmt: skip
    """Turn a block of scores into weights and rescale what was accumulated so far."""
    for r in range(rows):
        own = position + r // group
        # Keys this query may see within the block: [low, high).
        high = min(count, own + 1 - first)
        low = max(0, own + 1 - window - first) if window > 0 else 0
        if high <= low:
            scores[r, :] = _ZERO
            continue
        scores[r, :low] = _ZERO
        scores[r, high:] = _ZERO
        seen = scores[r, low:high]
        largest = max(maxima[r], _row_max(seen, high - low))
        correction = exp(maxima[r] - largest) if maxima[r] > _MINUS_INFINITY else _ZERO
        sums[r] = sums[r] * correction + _exp_row(seen, largest, high - low)
        if correction != _ONE:
            output[r, :] *= correction
        maxima[r] = largest


@numba.njit(nogil=True, cache=True)
def _task(
    queries: Any, keys: Any, values: Any, out: Any, slot: int, row: int, count: int, past: int,
    head: int, group: int, depth: int, window: int,
) -> None:  # fmt: skip
    """Query rows ``row .. row+count`` of one sequence, positions from ``past``, one kv head."""
    rows = count * group
    padded = (rows + 3) // 4 * 4
    wide = (depth + 15) // 16 * 16
    q = np.zeros((padded, depth), np.float32)
    for i in range(count):
        for g in range(group):
            start = (head * group + g) * depth
            q[i * group + g, :] = queries[row + i, start : start + depth]
    few = rows <= _FEW_ROWS
    key_tile = np.zeros((1 if few else depth, KEY_BLOCK), np.float32)
    value_tile = np.zeros((1 if few else KEY_BLOCK, wide), np.float32)
    scores = np.empty((padded, KEY_BLOCK), np.float32)
    output = np.zeros((padded, wide), np.float32)
    maxima = np.full(padded, _MINUS_INFINITY, np.float32)
    sums = np.zeros(padded, np.float32)
    offset = head * depth
    start = max(0, past + 1 - window) // KEY_BLOCK * KEY_BLOCK if window > 0 else 0
    for first in range(start, past + count, KEY_BLOCK):
        block = min(KEY_BLOCK, past + count - first)
        if few:
            for j in range(block):
                key = keys[slot, first + j, offset : offset + depth]
                for r in range(rows):
                    scores[r, j] = _dot(q[r], key)
        else:
            _load_keys(keys, slot, first, block, offset, depth, key_tile)
            scores[:] = _ZERO
            matmul_add(
                q.ctypes.data, depth, key_tile.ctypes.data, KEY_BLOCK, scores.ctypes.data, KEY_BLOCK,
                padded, depth, KEY_BLOCK,
            )  # fmt: skip
        _softmax_block(scores, output, maxima, sums, rows, group, past, first, block, window)
        if few:
            for j in range(block):
                value = values[slot, first + j, offset : offset + depth]
                for r in range(rows):
                    _add_scaled(output[r], value, scores[r, j])
        else:
            scores[rows:, :] = _ZERO
            _load_values(values, slot, first, block, offset, depth, value_tile)
            matmul_add(
                scores.ctypes.data, KEY_BLOCK, value_tile.ctypes.data, wide, output.ctypes.data, wide,
                padded, block, wide,
            )  # fmt: skip
    for i in range(count):
        for g in range(group):
            r = i * group + g
            target = (head * group + g) * depth
            inverse = _ONE / sums[r]
            for d in range(depth):
                out[row + i, target + d] = output[r, d] * inverse


@numba.njit(nogil=True, cache=True)
def attention(
    queries: Any, keys: Any, values: Any, out: Any, tasks: Any, group: int, depth: int, window: int
) -> None:
    """Attention for a ragged batch, on the calling thread.

    Args:
        queries: ``(n, heads·depth)`` float32, scaled by 1/√depth.
        keys: ``(slots, max_len, kv_heads·depth)`` float32, or uint16 holding bfloat16; likewise
            ``values``. The batch's own keys and values are in them already.
        out: ``(n, heads·depth)`` float32.
        tasks: ``(t, 5)`` int64 rows of slot, first row, row count, position of the first row,
            kv head.
        group: query heads per kv head.
        window: positions a query sees, itself included; 0 for all.
    """
    for t in range(tasks.shape[0]):
        _task(
            queries, keys, values, out, tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3],
            tasks[t, 4], group, depth, window,
        )  # fmt: skip


@numba.njit(nogil=True, cache=True, parallel=True)
def attention_parallel(
    queries: Any, keys: Any, values: Any, out: Any, tasks: Any, group: int, depth: int, window: int
) -> None:
    """:func:`attention` on all threads."""
    for t in numba.prange(tasks.shape[0]):
        _task(
            queries, keys, values, out, tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3],
            tasks[t, 4], group, depth, window,
        )  # fmt: skip
