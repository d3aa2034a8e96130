"""The row-wise steps between offloads: norms, RoPE and cache writes, gated activations.

Each comes as a function over a range of rows, run on the calling thread for a decode step and
on all threads for a prefill.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from tee_runner.decoder.kv_elements import store_head
from tee_runner.vector import exp, tanh

_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
# gelu_tanh(x) = x·σ(2·√(2/π)·(x + 0.044715·x³)) (Hendrycks & Gimpel 2016), the doubled factor.
_GELU = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBIC = np.float32(0.044715)
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


@numba.njit(nogil=True, cache=True, inline="always")
def _gelu_tanh(x: Any) -> Any:
    return x / (_ONE + exp(-_GELU * x * (_ONE + _GELU_CUBIC * x * x)))


@numba.njit(nogil=True, cache=True)
def _gated_gelu_row(gate: Any, other: Any, out: Any) -> None:
    for c in range(out.shape[0]):
        out[c] = _gelu_tanh(gate[c]) * other[c]


@numba.njit(nogil=True, cache=True)
def geglu(gate_up: Any, out: Any) -> None:
    """GeGLU (Shazeer 2020), tanh form: ``out`` (n, d) = gelu_tanh(gate)·up, laid out as in :func:`swiglu`."""
    width = out.shape[1]
    for i in range(out.shape[0]):
        _gated_gelu_row(gate_up[i, :width], gate_up[i, width:], out[i])


@numba.njit(nogil=True, cache=True, parallel=True)
def geglu_parallel(gate_up: Any, out: Any) -> None:
    """:func:`geglu` on all threads."""
    width = out.shape[1]
    for i in numba.prange(out.shape[0]):
        _gated_gelu_row(gate_up[i, :width], gate_up[i, width:], out[i])


@numba.njit(nogil=True, cache=True)
def gelu_times(gate: Any, other: Any, out: Any) -> None:
    """``out = gelu_tanh(gate)·other``, all ``(n, d)`` f32."""
    for i in range(out.shape[0]):
        _gated_gelu_row(gate[i], other[i], out[i])


@numba.njit(nogil=True, cache=True)
def softcap(rows: Any, cap: Any) -> None:
    """``rows = cap·tanh(rows / cap)`` in place: bounds logits to ±cap."""
    inverse = _ONE / cap
    for i in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            rows[i, c] = cap * tanh(rows[i, c] * inverse)


@numba.njit(nogil=True, cache=True)
def scale(rows: Any, factor: Any) -> None:
    """``rows *= factor``."""
    for i in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            rows[i, c] *= factor


@numba.njit(nogil=True, cache=True)
def add_normed(
    rows: Any, delta: Any, post_norm: Any, factor: Any, norm: Any, epsilon: Any, out: Any
) -> None:  # fmt: skip
    """``rows = (rows + RMSNorm(delta))·factor``, then ``out = RMSNorm(rows)``.

    ``post_norm`` ``(d,)`` is the inner norm's weight, ``norm`` the outer one's; an empty
    ``post_norm`` adds ``delta`` as it is, an empty ``norm`` leaves ``out`` alone. ``delta`` is
    used as scratch.
    """
    for i in range(rows.shape[0]):
        if post_norm.shape[0]:
            _normalise(delta[i], post_norm, epsilon, delta[i])
        for c in range(rows.shape[1]):
            rows[i, c] = (rows[i, c] + delta[i, c]) * factor
        if norm.shape[0]:
            _normalise(rows[i], norm, epsilon, out[i])


@numba.njit(nogil=True, cache=True)
def per_layer_inputs(
    projected: Any, embedded: Any, norm: Any, projection_scale: Any, input_scale: Any, epsilon: Any,
    out: Any,
) -> None:  # fmt: skip
    """What each layer's per-layer input is multiplied by.

    Args:
        projected: ``(n, layers·width)`` f32, the projection of the embedded rows; used as scratch.
        embedded: ``(n, layers·width)`` f32, the tokens' own rows of the per-layer table.
        norm: ``(width,)`` weight of the RMSNorm over each layer's part of the projection.
        projection_scale: the projection is multiplied by it before the norm.
        input_scale: the sum of both parts is multiplied by it.
        out: ``(layers, n, width)`` f32.
    """
    width = norm.shape[0]
    for i in range(projected.shape[0]):
        for layer in range(out.shape[0]):
            part = projected[i, layer * width : (layer + 1) * width]
            token = embedded[i, layer * width : (layer + 1) * width]
            for c in range(width):
                part[c] *= projection_scale
            _normalise(part, norm, epsilon, part)
            for c in range(width):
                out[layer, i, c] = (part[c] + token[c]) * input_scale


@numba.njit(nogil=True, cache=True)
def _rotate(head: Any, cosines: Any, sines: Any, scale: Any, out: Any) -> None:
    """RoPE in the half-split layout of Hugging Face checkpoints."""
    half = cosines.shape[0]
    for c in range(half):
        a, b = head[c], head[half + c]
        out[c] = (a * cosines[c] - b * sines[c]) * scale
        out[half + c] = (b * cosines[c] + a * sines[c]) * scale


@numba.njit(nogil=True, cache=True)
def qkv_to_cache(
    qkv: Any, queries: Any, keys: Any, values: Any, key_scales: Any, value_scales: Any, slots: Any,
    positions: Any, cosines: Any, sines: Any, q_norm: Any, k_norm: Any, v_norm: Any, epsilon: Any,
    scale: Any,
) -> None:  # fmt: skip
    """Split merged projections, normalise heads, rotate, scale queries, append keys and values.

    Args:
        qkv: ``(n, q_dim + 2·kv_dim)`` f32, used as scratch; or ``(n, q_dim + kv_dim)`` where keys
            and values share a projection, or ``(n, q_dim)`` for a layer that appends nothing.
        queries: ``(n, q_dim)`` f32, written times ``scale``.
        keys: the layer's cache ``(slots, capacity, kv_dim)`` f32, bfloat16 bits or int8; likewise
            ``values``. Position p lies at p modulo the capacity.
        key_scales: ``(slots, capacity, kv_heads)`` f32 of an int8 cache, else unused; likewise
            ``value_scales``.
        slots: ``(n,)`` int64 cache slot of each row; ``positions`` its position.
        cosines: RoPE table ``(max_len, head_dim / 2)``; likewise ``sines``.
        q_norm: ``(head_dim,)``, or empty for models without a norm of the query heads; likewise
            ``k_norm`` and ``v_norm``.
    """
    depth = 2 * cosines.shape[1]
    scratch = np.empty(depth, np.float32)
    q_dim = queries.shape[1]
    kv_dim = 0 if qkv.shape[1] == q_dim else keys.shape[2]
    value_start = qkv.shape[1] - kv_dim
    for i in range(qkv.shape[0]):
        row, slot, position = qkv[i], slots[i], positions[i]
        place = position % keys.shape[1]
        cosine, sine = cosines[position], sines[position]
        for start in range(0, q_dim, depth):
            head = row[start : start + depth]
            if q_norm.shape[0]:
                _normalise(head, q_norm, epsilon, head)
            _rotate(head, cosine, sine, scale, queries[i, start : start + depth])
        for h in range(kv_dim // depth):
            # Values first: where both share a projection, keys are normalised in place.
            value = row[value_start + h * depth : value_start + (h + 1) * depth]
            if v_norm.shape[0]:
                _normalise(value, v_norm, epsilon, scratch)
                value = scratch
            store_head(values, value_scales, slot, place, h, value)
            key = row[q_dim + h * depth : q_dim + (h + 1) * depth]
            if k_norm.shape[0]:
                _normalise(key, k_norm, epsilon, key)
            _rotate(key, cosine, sine, _ONE, scratch)
            store_head(keys, key_scales, slot, place, h, scratch)
