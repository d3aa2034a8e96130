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

from tee_runner.decoder.kv_elements import scale_of, widen
from tee_runner.vector import exp, matmul_add, tanh

KEY_BLOCK = 64
# Stacked query rows of a task; with 64 keys and heads of 128 its buffers take about 100 KiB.
_QUERY_ROWS = 64
# Up to here (a decode step) keys and values are used where they lie: copying them into tiles
# would cost more than it saves.
_FEW_ROWS = 8
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@numba.njit(nogil=True, cache=True)
def query_block(group: int) -> int:
    """Query positions of a task when ``group`` query heads share a key/value head."""
    return max(1, _QUERY_ROWS // group)


@numba.njit(nogil=True, cache=True)
def _load_keys(
    keys: Any, scales: Any, slot: int, first: int, skip: int, count: int, head: int, depth: int, tile: Any
) -> None:
    """Keys ``first + skip .. first + count`` transposed into those columns of ``tile`` (depth, 64)."""
    offset = head * depth
    for j in range(skip, count):
        scale = scale_of(keys, scales, slot, first + j, head)
        for d in range(depth):
            tile[d, j] = widen(keys[slot, first + j, offset + d]) * scale


@numba.njit(nogil=True, cache=True)
def _load_values(
    values: Any, scales: Any, slot: int, first: int, skip: int, count: int, head: int, depth: int, tile: Any
) -> None:
    offset = head * depth
    for j in range(skip, count):
        scale = scale_of(values, scales, slot, first + j, head)
        for d in range(depth):
            tile[j, d] = widen(values[slot, first + j, offset + d]) * scale


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(query: Any, key: Any) -> Any:
    total = _ZERO
    for d in range(query.shape[0]):
        total += query[d] * widen(key[d])
    return total


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _add_scaled(output: Any, value: Any, weight: Any) -> None:
    for d in range(value.shape[0]):
        output[d] += weight * widen(value[d])


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
def _cap(scores: Any, softcap: Any) -> None:
    inverse = _ONE / softcap
    for j in range(scores.shape[0]):
        scores[j] = softcap * tanh(scores[j] * inverse)


@numba.njit(nogil=True, cache=True)
def _softmax_block(
    scores: Any, output: Any, maxima: Any, sums: Any, rows: int, group: int, position: int,
    first: int, count: int, window: int, softcap: Any,
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
        if softcap > _ZERO:
            _cap(seen, softcap)
        largest = max(maxima[r], _row_max(seen, high - low))
        correction = exp(maxima[r] - largest) if maxima[r] > _MINUS_INFINITY else _ZERO
        sums[r] = sums[r] * correction + _exp_row(seen, largest, high - low)
        if correction != _ONE:
            output[r, :] *= correction
        maxima[r] = largest


@numba.njit(nogil=True, cache=True)
def _task(
    queries: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any, out: Any, slot: int,
    row: int, count: int, past: int, head: int, group: int, depth: int, window: int, softcap: Any,
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
    scores = np.zeros((padded, KEY_BLOCK), np.float32)
    output = np.zeros((padded, wide), np.float32)
    maxima = np.full(padded, _MINUS_INFINITY, np.float32)
    sums = np.zeros(padded, np.float32)
    columns = slice(head * depth, (head + 1) * depth)
    capacity = keys.shape[1]
    # Before this position no query sees anything, and a ring may hold something newer there.
    oldest = max(0, past + 1 - window) if window > 0 else 0
    for first in range(oldest // KEY_BLOCK * KEY_BLOCK, past + count, KEY_BLOCK):
        block = min(KEY_BLOCK, past + count - first)
        skip = max(0, oldest - first)
        place = first % capacity
        if few:
            for j in range(skip, block):
                key = keys[slot, place + j, columns]
                scale = scale_of(keys, key_scales, slot, place + j, head)
                for r in range(rows):
                    scores[r, j] = _dot(q[r], key) * scale
        else:
            _load_keys(keys, key_scales, slot, place, skip, block, head, depth, key_tile)
            scores[:] = _ZERO
            matmul_add(
                q.ctypes.data, depth, key_tile.ctypes.data, KEY_BLOCK, scores.ctypes.data, KEY_BLOCK,
                padded, depth, KEY_BLOCK,
            )  # fmt: skip
        _softmax_block(scores, output, maxima, sums, rows, group, past, first, block, window, softcap)
        if few:
            for j in range(skip, block):
                value = values[slot, place + j, columns]
                scale = scale_of(values, value_scales, slot, place + j, head)
                for r in range(rows):
                    _add_scaled(output[r], value, scores[r, j] * scale)
        else:
            scores[rows:, :] = _ZERO
            _load_values(values, value_scales, slot, place, skip, block, head, depth, value_tile)
            matmul_add(
                scores.ctypes.data + skip * 4, KEY_BLOCK, value_tile.ctypes.data + skip * wide * 4, wide,
                output.ctypes.data, wide, padded, block - skip, wide,
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
    queries: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any, out: Any, tasks: Any,
    group: int, depth: int, window: int, softcap: Any,
) -> None:  # fmt: skip
    """Attention for a ragged batch, on the calling thread.

    Args:
        queries: ``(n, heads·depth)`` float32, scaled.
        keys: ``(slots, capacity, kv_heads·depth)`` float32, uint16 holding bfloat16, or int8;
            likewise ``values``. Position p lies at p modulo the capacity, which holds every
            position of a sequence, or is a multiple of 64 and at least the window plus the
            sequence's rows in the batch, less one. The batch's own keys and values are in them.
        key_scales: ``(slots, capacity, kv_heads)`` float32 factors of int8 keys, else unused;
            likewise ``value_scales``.
        out: ``(n, heads·depth)`` float32.
        tasks: ``(t, 5)`` int64 rows of slot, first row, row count, position of the first row,
            kv head.
        group: query heads per kv head.
        window: positions a query sees, itself included; 0 for all.
        softcap: float32; scores become softcap·tanh(score / softcap); 0 for none.
    """
    for t in range(tasks.shape[0]):
        _task(
            queries, keys, values, key_scales, value_scales, out, tasks[t, 0], tasks[t, 1], tasks[t, 2],
            tasks[t, 3], tasks[t, 4], group, depth, window, softcap,
        )  # fmt: skip


@numba.njit(nogil=True, cache=True, parallel=True)
def attention_parallel(
    queries: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any, out: Any, tasks: Any,
    group: int, depth: int, window: int, softcap: Any,
) -> None:  # fmt: skip
    """:func:`attention` on all threads."""
    for t in numba.prange(tasks.shape[0]):
        _task(
            queries, keys, values, key_scales, value_scales, out, tasks[t, 0], tasks[t, 1], tasks[t, 2],
            tasks[t, 3], tasks[t, 4], group, depth, window, softcap,
        )  # fmt: skip
