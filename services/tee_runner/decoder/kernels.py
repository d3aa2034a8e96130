"""The row-wise steps between offloads: norms, RoPE and cache writes, SwiGLU.

Each comes as a function over a range of rows, run on the calling thread for a decode step and
on all threads for a prefill.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from tee_runner.vector import bits_from_float, exp

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
# Rows from which all threads are used.
PARALLEL_ROWS = 16


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _mean_square(row: Any) -> Any:
    total = _ZERO
    for c in range(row.shape[0]):
        total += row[c] * row[c]
    return total / np.float32(row.shape[0])


@numba.njit(nogil=True, cache=True)
def _normalise(row: Any, weight: Any, epsilon: Any, out: Any) -> None:
    factor = _ONE / np.sqrt(_mean_square(row) + epsilon)
    for c in range(row.shape[0]):
        out[c] = weight[c] * (row[c] * factor)


@numba.njit(nogil=True, cache=True)
def rms_norm(rows: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """RMSNorm (Zhang & Sennrich 2019): ``rows`` (n, d) f32, ``weight`` (d,), ``out`` (n, d)."""
    for i in range(rows.shape[0]):
        _normalise(rows[i], weight, epsilon, out[i])


@numba.njit(nogil=True, cache=True)
def add_bias(rows: Any, bias: Any) -> None:
    """``rows += bias``."""
    for i in range(rows.shape[0]):
        for c in range(bias.shape[0]):
            rows[i, c] += bias[c]


@numba.njit(nogil=True, cache=True)
def add_and_norm(rows: Any, delta: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """``rows += delta`` (the residual), then ``out = RMSNorm(rows)``."""
    for i in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            rows[i, c] += delta[i, c]
        _normalise(rows[i], weight, epsilon, out[i])


@numba.njit(nogil=True, cache=True)
def _swiglu_row(row: Any, out: Any) -> None:
    width = out.shape[0]
    for c in range(width):
        gate = row[c]
        out[c] = gate / (_ONE + exp(-gate)) * row[width + c]


@numba.njit(nogil=True, cache=True)
def swiglu(gate_up: Any, out: Any) -> None:
    """SwiGLU: ``gate_up`` (n, 2·d) f32 holds gate then up; ``out`` (n, d) = silu(gate)·up."""
    for i in range(out.shape[0]):
        _swiglu_row(gate_up[i], out[i])


@numba.njit(nogil=True, cache=True, parallel=True)
def swiglu_parallel(gate_up: Any, out: Any) -> None:
    """:func:`swiglu` on all threads."""
    for i in numba.prange(out.shape[0]):
        _swiglu_row(gate_up[i], out[i])


def _narrow(cache, value):  # type: ignore[no-untyped-def]
    """A float32 as an element of ``cache``: itself, or bfloat16 bits rounded to nearest even."""
    raise TypeError("only inside compiled code")


@overload(_narrow, inline="always")
def _narrow_overload(cache, value):  # type: ignore[no-untyped-def]  # numba compares signatures
    if cache.dtype == types.float32:
        return lambda cache, value: value
    if cache.dtype == types.uint16:

        def narrow(cache, value):  # type: ignore[no-untyped-def]
            bits = bits_from_float(value)
            bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            return np.uint16(bits >> np.uint32(16))

        return narrow
    return None


@numba.njit(nogil=True, cache=True)
def _rotate(head: Any, cosines: Any, sines: Any, scale: Any, out: Any) -> None:
    """RoPE in the half-split layout of Hugging Face checkpoints."""
    half = cosines.shape[0]
    for c in range(half):
        a, b = head[c], head[half + c]
        out[c] = (a * cosines[c] - b * sines[c]) * scale
        out[half + c] = (b * cosines[c] + a * sines[c]) * scale


@numba.njit(nogil=True, cache=True)
def _qkv_row(
    row: Any, queries: Any, keys: Any, values: Any, cosines: Any, sines: Any, q_norm: Any,
    k_norm: Any, epsilon: Any, scale: Any, scratch: Any,
) -> None:  # fmt: skip
    depth = scratch.shape[0]
    q_dim = queries.shape[0]
    kv_dim = keys.shape[0]
    for start in range(0, q_dim, depth):
        head = row[start : start + depth]
        if q_norm.shape[0]:
            _normalise(head, q_norm, epsilon, head)
        _rotate(head, cosines, sines, scale, queries[start : start + depth])
    for start in range(0, kv_dim, depth):
        head = row[q_dim + start : q_dim + start + depth]
        if k_norm.shape[0]:
            _normalise(head, k_norm, epsilon, head)
        _rotate(head, cosines, sines, _ONE, scratch)
        for c in range(depth):
            keys[start + c] = _narrow(keys, scratch[c])
    for c in range(kv_dim):
        values[c] = _narrow(values, row[q_dim + kv_dim + c])


@numba.njit(nogil=True, cache=True)
def qkv_to_cache(
    qkv: Any, queries: Any, keys: Any, values: Any, slots: Any, positions: Any, cosines: Any,
    sines: Any, q_norm: Any, k_norm: Any, epsilon: Any, scale: Any,
) -> None:  # fmt: skip
    """Split merged projections, normalise heads, rotate, scale queries, append keys and values.

    Args:
        qkv: ``(n, q_dim + 2·kv_dim)`` f32; used as scratch.
        queries: ``(n, q_dim)`` f32, written times ``scale``.
        keys: the layer's cache ``(slots, max_len, kv_dim)``; likewise ``values``.
        slots: ``(n,)`` int64 cache slot of each row; ``positions`` its position.
        cosines: RoPE table ``(max_len, head_dim / 2)``; likewise ``sines``.
        q_norm: ``(head_dim,)``, or empty for models without QK-norm; likewise ``k_norm``.
    """
    scratch = np.empty(2 * cosines.shape[1], np.float32)
    for i in range(qkv.shape[0]):
        slot, position = slots[i], positions[i]
        _qkv_row(
            qkv[i], queries[i], keys[slot, position], values[slot, position], cosines[position],
            sines[position], q_norm, k_norm, epsilon, scale, scratch,
        )  # fmt: skip
