"""The forward pass over a ragged batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder import kernels
from tee_runner.decoder.attention import attention, attention_parallel, query_block
from tee_runner.decoder.config import DecoderConfig, LayerConfig, RopeConfig
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.decoder.ple import per_layer_delta, per_layer_inputs
from tee_runner.decoder.rope import rope_tables
from tee_runner.decoder.weights import DecoderWeights, LayerWeights, LinearSpec
from tee_runner.memory import on_lines
from tee_runner.profile import Profile
from tee_runner.protection.base import Float32, ForwardSession, Linear

# Multiply-adds of attention below which one thread is done before others would have woken up.
_SERIAL_ATTENTION = 1 << 21
_EMPTY = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """Rows of several sequences laid end to end.

    ``tokens`` ``(n,)`` int64. Sequence i owns the next ``counts[i]`` rows, continues cache slot
    ``slots[i]``, and has logits computed for its last ``sampled[i]`` rows.
    """

    tokens: NDArray[np.int64]
    slots: Sequence[int]
    counts: Sequence[int]
    sampled: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearHandles:
    """The worker's weights, in the order of ``DecoderWeights.linears``."""

    handles: tuple[Linear, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer, ready to run: its shape, its weights, and the worker's handles of them."""

    index: int
    shape: LayerConfig
    weights: LayerWeights
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    cosines: Float32
    sines: Float32
    # Empty where the model has none.
    q_norm: Float32
    k_norm: Float32
    v_norm: Float32
    scale: np.float32
    # Query heads per key/value head; positions a query sees, 0 for all.
    group: int
    window: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one forward pass share."""

    batch: RaggedBatch
    cache: KvCache
    session: ForwardSession
    pasts: list[int]
    row_slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    # Keys that the pass's rows see without a window, summed.
    seen: int
    tasks: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict)


def _check_layer(shape: LayerConfig, layer: LayerWeights, *, has_ple: bool) -> None:
    sizes = (layer.qkv.d_out, layer.o.d_in, layer.gate_up.d_out, layer.down.d_in)
    if sizes != (shape.qkv_dim, shape.q_dim, 2 * shape.intermediate_size, shape.intermediate_size):
        raise ValueError(f"{layer.qkv.name} and its neighbours do not have the layer's sizes")
    if (layer.ple is not None) != has_ple:
        raise ValueError(f"per-layer inputs are incomplete at {layer.qkv.name}")


class Decoder:
    """A model ready to run. Not thread-safe: buffers are reused between passes."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, linears: LinearHandles, *, max_len: int,
        profile: Profile | None = None,
    ) -> None:  # fmt: skip
        """Binds ``linears`` to the layers and makes the RoPE tables.

        Raises:
            ValueError: they are not the linears of ``weights``, or those do not fit ``config``.
        """
        self.config = config
        self._weights = weights
        self._profile = profile or Profile()
        self._buffers: dict[str, Float32] = {}
        self._epsilon = np.float32(config.rms_norm_eps)
        self._softcap = np.float32(config.attn_logit_softcap or 0.0)
        self._geglu = config.activation == "gelu_tanh"
        handles = iter(linears.handles)

        def bound(spec: LinearSpec) -> Linear:
            handle = next(handles, None)
            wanted = (spec.name, spec.d_in, spec.d_out)
            if handle is None or (handle.name, handle.d_in, handle.d_out) != wanted:
                raise ValueError(f"the handle of {spec.name} is missing, or in another place")
            return handle

        tables: dict[tuple[RopeConfig, int], tuple[Float32, Float32]] = {}
        self._layers: list[_Layer] = []
        for index, layer in enumerate(weights.layers):
            shape = config.layer(index)
            _check_layer(shape, layer, has_ple=weights.ple is not None)
            key = (shape.rope, shape.head_dim)
            if key not in tables:
                tables[key] = rope_tables(shape.rope, shape.head_dim, max_len)
            scale = 1.0 / math.sqrt(shape.head_dim) if config.query_scale is None else config.query_scale
            cosines, sines = tables[key]
            self._layers.append(
                _Layer(
                    index=index,
                    shape=shape,
                    weights=layer,
                    qkv=bound(layer.qkv),
                    o=bound(layer.o),
                    gate_up=bound(layer.gate_up),
                    down=bound(layer.down),
                    cosines=cosines,
                    sines=sines,
                    q_norm=_EMPTY if layer.q_norm is None else layer.q_norm,
                    k_norm=_EMPTY if layer.k_norm is None else layer.k_norm,
                    v_norm=np.ones(shape.head_dim, dtype=np.float32) if config.value_norm else _EMPTY,
                    scale=np.float32(scale),
                    group=shape.num_heads // shape.num_kv_heads,
                    window=shape.window or 0,
                )
            )
        self._head = bound(weights.lm_head)

    def forward(self, batch: RaggedBatch, cache: KvCache, session: ForwardSession) -> Float32:
        """Logits ``(sum(sampled), vocab_size)`` float32; the cache grows by the batch's rows.

        The returned array is reused by the next call.

        Raises:
            WorkerError: an offload failed. The cache's lengths are unchanged then, so the pass
                can be repeated.
            CapacityError: a sequence would outgrow its slot.
        """
        n = len(batch.tokens)
        pasts = [cache.reserve(slot, count) for slot, count in zip(batch.slots, batch.counts, strict=True)]
        step = _Pass(
            batch, cache, session, pasts,
            row_slots=np.repeat(np.asarray(batch.slots, dtype=np.int64), batch.counts),
            positions=np.concatenate(
                [np.arange(p, p + c, dtype=np.int64) for p, c in zip(pasts, batch.counts, strict=True)]
            ),
            seen=sum(c * (p + c) for p, c in zip(pasts, batch.counts, strict=True)),
        )  # fmt: skip
        rows = self._weights.embed(batch.tokens)
        normed = self._buffer("normed", n, self.config.hidden_size)
        delta = self._buffer("delta", n, self.config.hidden_size)
        ple = self._weights.ple
        inputs = None if ple is None else per_layer_inputs(ple, batch.tokens, rows, self._epsilon)
        kernels.rms_norm(rows, self._layers[0].weights.input_norm, self._epsilon, normed)
        for layer in self._layers:
            weights = layer.weights
            self._attention(layer, normed, step, delta)
            self._close(rows, delta, weights.attention_out_norm, 1.0, weights.post_attention_norm, normed)
            self._mlp(layer, normed, step, delta)
            last = layer.index + 1 == len(self._layers)
            following = self._weights.final_norm if last else self._layers[layer.index + 1].weights.input_norm
            out_norm = weights.mlp_out_norm
            if weights.ple is not None and inputs is not None:
                self._close(rows, delta, out_norm, 1.0, None, normed)
                per_layer_delta(rows, inputs[layer.index], weights.ple, delta)
                out_norm = weights.ple.norm
            self._close(rows, delta, out_norm, weights.output_scale, following, normed)
        logits = self._logits(normed, step)
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            cache.lengths[slot] += count
        return logits

    def _close(
        self, rows: Float32, delta: Float32, post_norm: Float32 | None, factor: float,
        norm: Float32 | None, normed: Float32,
    ) -> None:  # fmt: skip
        """Join ``delta`` to the residual, and normalise that for the next operand."""
        if post_norm is None and factor == 1.0 and norm is not None:
            kernels.add_and_norm(rows, delta, norm, self._epsilon, normed)
            return
        kernels.add_normed(
            rows, delta, _EMPTY if post_norm is None else post_norm, np.float32(factor),
            _EMPTY if norm is None else norm, self._epsilon, normed,
        )  # fmt: skip

    def _attention(self, layer: _Layer, normed: Float32, step: _Pass, delta: Float32) -> None:
        n, weights, shape, cache, index = len(normed), layer.weights, layer.shape, step.cache, layer.index
        qkv = self._buffer("qkv", n, layer.qkv.d_out)
        step.session.linear(layer.qkv, normed, step.batch.counts, qkv)
        if weights.qkv_bias is not None:
            kernels.add_bias(qkv, weights.qkv_bias)
        queries = self._buffer("queries", n, shape.q_dim)
        keys, values = cache.keys[index], cache.values[index]
        key_scales, value_scales = cache.key_scales[index], cache.value_scales[index]
        kernels.qkv_to_cache(
            qkv, queries, keys, values, key_scales, value_scales, step.row_slots, step.positions,
            layer.cosines, layer.sines, layer.q_norm, layer.k_norm, layer.v_norm, self._epsilon, layer.scale,
        )  # fmt: skip
        attended = self._buffer("attended", n, shape.q_dim)
        attend = attention if step.seen * shape.q_dim < _SERIAL_ATTENTION else attention_parallel
        begin = time.perf_counter_ns()
        attend(
            queries, keys, values, key_scales, value_scales, attended, self._tasks(layer, step),
            layer.group, shape.head_dim, layer.window, self._softcap,
        )  # fmt: skip
        self._profile.add("attention", time.perf_counter_ns() - begin)
        step.session.linear(layer.o, attended, step.batch.counts, delta)
        if weights.o_bias is not None:
            kernels.add_bias(delta, weights.o_bias)

    def _mlp(self, layer: _Layer, normed: Float32, step: _Pass, delta: Float32) -> None:
        n, weights = len(normed), layer.weights
        gate_up = self._buffer("gate_up", n, layer.gate_up.d_out)
        step.session.linear(layer.gate_up, normed, step.batch.counts, gate_up)
        if weights.gate_up_bias is not None:
            kernels.add_bias(gate_up, weights.gate_up_bias)
        activated = self._buffer("activated", n, layer.down.d_in)
        if self._geglu:
            activate = kernels.geglu if n < kernels.PARALLEL_ROWS else kernels.geglu_parallel
        else:
            activate = kernels.swiglu if n < kernels.PARALLEL_ROWS else kernels.swiglu_parallel
        activate(gate_up, activated)
        step.session.linear(layer.down, activated, step.batch.counts, delta)
        if weights.down_bias is not None:
            kernels.add_bias(delta, weights.down_bias)

    def _logits(self, normed: Float32, step: _Pass) -> Float32:
        batch = step.batch
        ends = np.cumsum(batch.counts)
        chosen = [
            np.arange(end - wanted, end) for end, wanted in zip(ends, batch.sampled, strict=True) if wanted
        ]
        logits = self._buffer("logits", sum(batch.sampled), self.config.vocab_size)
        if chosen:
            rows = np.ascontiguousarray(normed[np.concatenate(chosen)])
            step.session.linear(self._head, rows, batch.sampled, logits)
            if self.config.final_logit_softcap is not None:
                kernels.softcap(logits, np.float32(self.config.final_logit_softcap))
        return logits

    def _tasks(self, layer: _Layer, step: _Pass) -> NDArray[np.int64]:
        """Attention tasks, long ones first within a sequence so that threads finish together."""
        heads = layer.shape.num_kv_heads
        known = step.tasks.get((heads, layer.group))
        if known is not None:
            return known
        block = query_block(layer.group)
        tasks = []
        row = 0
        for slot, count, past in zip(step.batch.slots, step.batch.counts, step.pasts, strict=True):
            for first in reversed(range(0, count, block)):
                size = min(block, count - first)
                tasks += [(slot, row + first, size, past + first, head) for head in range(heads)]
            row += count
        step.tasks[heads, layer.group] = made = np.asarray(tasks, dtype=np.int64)
        return made

    def _buffer(self, name: str, rows: int, columns: int) -> Float32:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < rows * columns:
            buffer = self._buffers[name] = on_lines(rows * columns, np.float32)
        return buffer[: rows * columns].reshape(rows, columns)
