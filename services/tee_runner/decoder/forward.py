"""The forward pass over a ragged batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder import kernels
from tee_runner.decoder.attention import attention, attention_parallel, query_block
from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.decoder.rope import rope_tables
from tee_runner.decoder.weights import DecoderWeights, LayerWeights
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
    """The worker's weights in the order of a forward pass: four per layer, then the head."""

    handles: tuple[Linear, ...]

    def layer(self, index: int) -> tuple[Linear, Linear, Linear, Linear]:
        """qkv, o, gate_up, down."""
        a, b, c, d = self.handles[4 * index : 4 * index + 4]
        return a, b, c, d

    @property
    def head(self) -> Linear:
        """The LM head."""
        return self.handles[-1]


class Decoder:
    """A model ready to run. Not thread-safe: buffers are reused between passes."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, linears: LinearHandles, *, max_len: int,
        profile: Profile | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self._weights = weights
        self._linears = linears
        self._cosines, self._sines = rope_tables(config.rope, config.head_dim, max_len)
        self._profile = profile or Profile()
        self._buffers: dict[str, Float32] = {}
        self._epsilon = np.float32(config.rms_norm_eps)
        self._scale = np.float32(1.0 / math.sqrt(config.head_dim))

    def forward(self, batch: RaggedBatch, cache: KvCache, session: ForwardSession) -> Float32:
        """Logits ``(sum(sampled), vocab_size)`` float32; the cache grows by the batch's rows.

        The returned array is reused by the next call.

        Raises:
            WorkerError: an offload failed. The cache's lengths are unchanged then, so the pass
                can be repeated.
            CapacityError: a sequence would outgrow its slot.
        """
        config = self.config
        n = len(batch.tokens)
        pasts = [cache.reserve(slot, count) for slot, count in zip(batch.slots, batch.counts, strict=True)]
        positions = np.concatenate(
            [np.arange(p, p + c, dtype=np.int64) for p, c in zip(pasts, batch.counts, strict=True)]
        )
        row_slots = np.repeat(np.asarray(batch.slots, dtype=np.int64), batch.counts)
        tasks = self._tasks(batch, pasts)
        work = sum(c * (p + c) for p, c in zip(pasts, batch.counts, strict=True)) * config.q_dim
        attend = attention if work < _SERIAL_ATTENTION else attention_parallel

        rows = self._weights.embed(batch.tokens)
        normed = self._buffer("normed", n, config.hidden_size)
        delta = self._buffer("delta", n, config.hidden_size)
        layers = self._weights.layers
        kernels.rms_norm(rows, layers[0].input_norm, self._epsilon, normed)
        for index, layer in enumerate(layers):
            self._attention(
                index, layer, normed, row_slots, positions, tasks, cache, session, batch, attend, delta
            )
            kernels.add_and_norm(rows, delta, layer.post_attention_norm, self._epsilon, normed)
            self._mlp(index, layer, normed, session, batch, delta)
            last = index + 1 == len(layers)
            following = self._weights.final_norm if last else layers[index + 1].input_norm
            kernels.add_and_norm(rows, delta, following, self._epsilon, normed)
        logits = self._head(normed, batch, session)
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            cache.lengths[slot] += count
        return logits

    def _attention(
        self, index: int, layer: LayerWeights, normed: Float32, row_slots: NDArray[np.int64],
        positions: NDArray[np.int64], tasks: NDArray[np.int64], cache: KvCache,
        session: ForwardSession, batch: RaggedBatch, attend: object, delta: Float32,
    ) -> None:  # fmt: skip
        config = self.config
        n = len(normed)
        qkv_weight, o_weight, _, _ = self._linears.layer(index)
        qkv = self._buffer("qkv", n, qkv_weight.d_out)
        session.linear(qkv_weight, normed, batch.counts, qkv)
        if layer.qkv_bias is not None:
            kernels.add_bias(qkv, layer.qkv_bias)
        queries = self._buffer("queries", n, config.q_dim)
        kernels.qkv_to_cache(
            qkv, queries, cache.keys[index], cache.values[index], row_slots, positions,
            self._cosines, self._sines,
            _EMPTY if layer.q_norm is None else layer.q_norm,
            _EMPTY if layer.k_norm is None else layer.k_norm,
            self._epsilon, self._scale,
        )  # fmt: skip
        attended = self._buffer("attended", n, config.q_dim)
        window = config.sliding_windows[index] if config.sliding_windows else None
        begin = time.perf_counter_ns()
        attend(  # type: ignore[operator]
            queries, cache.keys[index], cache.values[index], attended, tasks,
            config.num_heads // config.num_kv_heads, config.head_dim, window or 0,
        )  # fmt: skip
        self._profile.add("attention", time.perf_counter_ns() - begin)
        session.linear(o_weight, attended, batch.counts, delta)
        if layer.o_bias is not None:
            kernels.add_bias(delta, layer.o_bias)

    def _mlp(
        self, index: int, layer: LayerWeights, normed: Float32, session: ForwardSession,
        batch: RaggedBatch, delta: Float32,
    ) -> None:  # fmt: skip
        n = len(normed)
        _, _, gate_up_weight, down_weight = self._linears.layer(index)
        gate_up = self._buffer("gate_up", n, gate_up_weight.d_out)
        session.linear(gate_up_weight, normed, batch.counts, gate_up)
        if layer.gate_up_bias is not None:
            kernels.add_bias(gate_up, layer.gate_up_bias)
        activated = self._buffer("activated", n, down_weight.d_in)
        activate = kernels.swiglu if n < kernels.PARALLEL_ROWS else kernels.swiglu_parallel
        activate(gate_up, activated)
        session.linear(down_weight, activated, batch.counts, delta)
        if layer.down_bias is not None:
            kernels.add_bias(delta, layer.down_bias)

    def _head(self, normed: Float32, batch: RaggedBatch, session: ForwardSession) -> Float32:
        ends = np.cumsum(batch.counts)
        chosen = [
            np.arange(end - wanted, end) for end, wanted in zip(ends, batch.sampled, strict=True) if wanted
        ]
        logits = self._buffer("logits", sum(batch.sampled), self.config.vocab_size)
        if chosen:
            rows = np.ascontiguousarray(normed[np.concatenate(chosen)])
            session.linear(self._linears.head, rows, batch.sampled, logits)
        return logits

    def _tasks(self, batch: RaggedBatch, pasts: Sequence[int]) -> NDArray[np.int64]:
        """Attention tasks, long ones first within a sequence so that threads finish together."""
        config = self.config
        block = query_block(config.num_heads // config.num_kv_heads)
        tasks = []
        row = 0
        for slot, count, past in zip(batch.slots, batch.counts, pasts, strict=True):
            for first in reversed(range(0, count, block)):
                size = min(block, count - first)
                tasks += [
                    (slot, row + first, size, past + first, head) for head in range(config.num_kv_heads)
                ]
            row += count
        return np.asarray(tasks, dtype=np.int64)

    def _buffer(self, name: str, rows: int, columns: int) -> Float32:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < rows * columns:
            buffer = self._buffers[name] = np.empty(rows * columns, dtype=np.float32)
        return buffer[: rows * columns].reshape(rows, columns)
