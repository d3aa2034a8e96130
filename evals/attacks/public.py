"""Public facts about a model, and its forward pass as anyone can run it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from evals.attacks.corpus import Encoder
from evals.attacks.model import HEAD_LAYER, Op
from evals.attacks.steps import Place, Prefix, Step
from tee_runner.decoder import kernels
from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.forward import Decoder, LinearHandles, RaggedBatch
from tee_runner.decoder.kernels import rms_norm
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.decoder.rope import rope_tables
from tee_runner.decoder.weights import DecoderWeights, LayerWeights, LinearSpec
from tee_runner.protection.base import Float32, ForwardSession, Linear

_OPS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down")
# Candidates of one batched step: bounds the memory of a step over the full vocabulary.
_STEP_ROWS = 4096
# The first layer's products of the whole vocabulary are kept up to this size.
_FIRST_BYTES = 512 << 20
_EMPTY = np.empty(0, dtype=np.float32)
_NO_SCALES = np.empty((0, 0, 0), dtype=np.float32)


class _Stop(Exception):  # noqa: N818 - ends a pass early, not an error
    """Nothing behind this offload is wanted."""


class _Local(ForwardSession):
    """Products on this machine; the rows of chosen offloads are kept."""

    def __init__(self, weights: list[Float32], wanted: set[tuple[int, Op]] | None, last: int) -> None:
        self._weights = weights
        self._wanted = wanted
        self._last = last
        self.rows: dict[tuple[int, Op], Float32] = {}

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        """See :meth:`ForwardSession.linear`."""
        index = weight.weight_id
        head = index == len(self._weights) - 1
        place: tuple[int, Op] = (HEAD_LAYER, "lm_head") if head else (index // 4, _OPS[index % 4])
        if self._wanted is None or place in self._wanted:
            self.rows[place] = rows.copy()
        if index >= self._last:
            raise _Stop
        np.matmul(rows, self._weights[index].T, out=out)


class PublicModel:
    """Weights, configuration, tokenizer and code are public: an attacker has all of this."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, *, tokenizer: Encoder | None = None,
        max_len: int = 4096,
    ) -> None:  # fmt: skip
        self._openings: dict[tuple[Place, bytes], Float32] = {}
        self.tokenizer = tokenizer
        self.config = config
        self.weights = weights
        self._max_len = min(max_len, config.max_position_embeddings)

    @cached_property
    def embedding(self) -> Float32:
        """The embedding table ``(V, hidden)`` float32."""
        return self.weights.embed(np.arange(self.config.vocab_size, dtype=np.int64))

    @cached_property
    def dictionary(self) -> Float32:
        """What every token looks like at layer 0: rmsnorm(E)·γ ``(V, hidden)`` float32."""
        out = np.empty_like(self.embedding)
        rms_norm(self.embedding, self.weights.layers[0].input_norm, np.float32(self.config.rms_norm_eps), out)
        return out

    def spec(self, layer: int, op: Op) -> LinearSpec:
        """The weight of an offload."""
        if op == "lm_head":
            return self.weights.lm_head
        spec: LinearSpec = getattr(self.weights.layers[layer], op)
        return spec

    @cached_property
    def _float_weights(self) -> list[Float32]:
        return [spec.load().astype(np.float32) for spec in self.weights.linears()]

    @cached_property
    def _handles(self) -> LinearHandles:
        return LinearHandles(
            handles=tuple(
                Linear(weight_id=i, name=s.name, d_in=s.d_in, d_out=s.d_out)
                for i, s in enumerate(self.weights.linears())
            )
        )

    def rows(
        self, sequences: Sequence[Sequence[int]], wanted: set[tuple[int, Op]] | None = None
    ) -> list[dict[tuple[int, Op], Float32]]:
        """Plaintext operand rows of the offloads ``wanted`` (None: all), of each sequence.

        One ragged pass over all sequences, ended after the last wanted offload. The LM head's rows
        are those of every position.
        """
        counts = [len(sequence) for sequence in sequences]
        session, _ = self._pass(sequences, wanted)
        bounds = np.cumsum([0, *counts])
        return [
            {place: rows[bounds[i] : bounds[i + 1]] for place, rows in session.rows.items()}
            for i in range(len(sequences))
        ]

    def _pass(self, sequences: Sequence[Sequence[int]], wanted: set[Place] | None) -> tuple[_Local, KvCache]:
        last = max(self._order(place) for place in (wanted or {(HEAD_LAYER, "lm_head")}))
        counts = [len(sequence) for sequence in sequences]
        cache = KvCache(self.config, slots=len(sequences), max_len=max(counts))
        decoder = Decoder(self.config, self.weights, self._handles, max_len=max(counts))
        session = _Local(self._float_weights, wanted, last)
        batch = RaggedBatch(
            tokens=np.concatenate([np.asarray(s, dtype=np.int64) for s in sequences]),
            slots=list(range(len(sequences))),
            counts=counts,
            sampled=counts,
        )
        with contextlib.suppress(_Stop):
            decoder.forward(batch, cache, session)
        return session, cache

    def next_token_logits(self, sequences: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits ``(B, V)`` float32 of the token that follows each sequence."""
        rows = self.rows(sequences, {(HEAD_LAYER, "lm_head")})
        return self.logits(np.stack([r[HEAD_LAYER, "lm_head"][-1] for r in rows]))

    @cached_property
    def _first_products(self) -> Float32 | None:
        """What the first layer's qkv makes of every token, bias included; None if that is too large."""
        spec, bias = self.spec(0, "qkv"), self.weights.layers[0].qkv_bias
        if 4 * self.config.vocab_size * spec.d_out > _FIRST_BYTES:
            return None
        products: Float32 = self.dictionary @ self._float_weights[0].T
        if bias is not None:
            products += bias
        return products

    def logits(self, rows: Float32) -> Float32:
        """Logits ``(B, V)`` float32 of LM-head operand rows ``(B, hidden)``."""
        logits: Float32 = rows @ self._float_weights[-1].T
        return logits

    def continuations(
        self, starts: Sequence[Sequence[int]], length: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Texts ``(B, length)`` int64 that begin with ``starts`` and go on as the model samples."""
        texts = np.zeros((len(starts), length), dtype=np.int64)
        given = np.asarray([min(len(start), length) for start in starts])
        for text, start, count in zip(texts, starts, given, strict=True):
            text[:count] = start[:count]
        session = _Local(self._float_weights, set(), len(self._float_weights))
        cache = KvCache(self.config, slots=len(starts), max_len=length)
        decoder = Decoder(self.config, self.weights, self._handles, max_len=length)
        ones = [1] * len(starts)
        for position in range(length - 1):
            batch = RaggedBatch(
                tokens=texts[:, position].copy(), slots=list(range(len(starts))), counts=ones, sampled=ones
            )
            drawn = _draw(decoder.forward(batch, cache, session), rng)
            free = given <= position + 1
            texts[free, position + 1] = drawn[free]
        return texts

    def prefix(self, tokens: Sequence[int], layers: int | None = None) -> Prefix:
        """Keys and values of ``tokens`` in the first ``layers`` layers (None: all)."""
        depth = self.config.num_layers if layers is None else layers
        if not tokens:
            return Prefix((), (), ())
        _, cache = self._pass([tokens], {(depth - 1, "o")})
        keys, values = ([kept[0] for kept in stored[:depth]] for stored in (cache.keys, cache.values))
        return Prefix(tuple(tokens), tuple(keys), tuple(values))

    def step(self, prefix: Prefix, tokens: NDArray[np.int64], wanted: set[Place]) -> Step:
        """Operand rows of each of C next-token candidates ``(C,)`` after ``prefix``.

        The candidates are alternatives: each attends to the prefix and to itself. The work is
        that of C rows, whatever the length of the prefix, up to the deepest place ``wanted``.

        Raises:
            ValueError: the prefix holds fewer layers than ``wanted`` needs, or is full; or the
                model's layers differ from one another (this step has its own forward pass).
        """
        return self.steps([prefix], [tokens], wanted)[0]

    def steps(
        self, prefixes: Sequence[Prefix], tokens: Sequence[NDArray[np.int64]], wanted: set[Place]
    ) -> list[Step]:
        """:meth:`step` for several prefixes with candidates of their own, as one batch.

        Raises:
            ValueError: a prefix holds fewer layers than ``wanted`` needs, or is full.
        """
        if self.config.layers:
            raise ValueError(f"candidates of {self.config.family} models are not computed in steps")
        deepest = max(self._order(place) for place in wanted)
        depth = min(deepest // 4 + 1, self.config.num_layers)
        for prefix in prefixes:
            if prefix.tokens and len(prefix.keys) < depth:
                raise ValueError(f"the prefix holds {len(prefix.keys)} layers, {depth} are needed")
            if len(prefix.tokens) >= self._max_len:
                raise ValueError(f"the prefix fills the context of {self._max_len}")
        owners = np.repeat(np.arange(len(prefixes)), [len(candidates) for candidates in tokens])
        joined = np.concatenate([np.asarray(candidates, dtype=np.int64) for candidates in tokens])
        parts = []
        for start in range(0, max(len(joined), 1), _STEP_ROWS):
            own = owners[start : start + _STEP_ROWS]
            groups = [
                (prefixes[i], slice(*(int(end) for end in np.searchsorted(own, [i, i + 1]))))
                for i in np.unique(own)
            ]
            parts.append(self._step(groups, joined[start : start + _STEP_ROWS], wanted, deepest))
        rows = {place: _joined([part[0][place] for part in parts]) for place in wanted}
        keys = tuple(_joined(layer) for layer in zip(*(part[1] for part in parts), strict=True))
        values = tuple(_joined(layer) for layer in zip(*(part[2] for part in parts), strict=True))
        bounds = np.searchsorted(owners, np.arange(len(prefixes) + 1))
        return [
            Step(
                prefix,
                joined[low:high],
                {place: kept[low:high] for place, kept in rows.items()},
                tuple(key[low:high] for key in keys),
                tuple(value[low:high] for value in values),
            )
            for prefix, low, high in zip(prefixes, bounds, bounds[1:], strict=False)
        ]

    def next_rows(self, prefix: Prefix, tokens: NDArray[np.int64], place: Place) -> Float32:
        """:meth:`step` for the rows ``(C, d_in)`` of one place. Those of the first position are kept."""
        if prefix.tokens:
            return self.step(prefix, tokens, {place}).rows[place]
        key = place, np.asarray(tokens, dtype=np.int64).tobytes()
        if key not in self._openings:
            self._openings[key] = self.step(prefix, tokens, {place}).rows[place]
        return self._openings[key]

    def _order(self, place: Place) -> int:
        layer, op = place
        return 4 * self.config.num_layers if op == "lm_head" else 4 * layer + _OPS.index(op)

    @cached_property
    def _rope(self) -> tuple[Float32, Float32]:
        return rope_tables(self.config.rope, self.config.head_dim, self._max_len)

    def _step(
        self, groups: Sequence[tuple[Prefix, slice]], tokens: NDArray[np.int64], wanted: set[Place],
        deepest: int,
    ) -> tuple[dict[Place, Float32], list[Float32], list[Float32]]:  # fmt: skip
        """Rows by place, keys and values by layer, of ``tokens``; ``groups`` says which follow what."""
        config, weights = self.config, self._float_weights
        epsilon = np.float32(config.rms_norm_eps)
        rows = self.embedding[tokens]
        normed = np.empty_like(rows)
        kept: dict[Place, Float32] = {}
        keys: list[Float32] = []
        values: list[Float32] = []

        def keep(layer: int, op: Op, operand: Float32) -> bool:
            """Keep the operand if it is wanted; whether anything deeper is."""
            if (layer, op) in wanted:
                kept[layer, op] = operand.copy()
            return self._order((layer, op)) < deepest

        def product(layer: int, op: Op, operand: Float32, bias: Float32 | None) -> Float32:
            out: Float32 = operand @ weights[4 * layer + _OPS.index(op)].T
            if bias is not None:
                out += bias
            return out

        for index, layer in enumerate(self.weights.layers):
            if 4 * index > deepest:
                break
            kernels.rms_norm(rows, layer.input_norm, epsilon, normed)
            keep(index, "qkv", normed)
            if index == 0 and self._first_products is not None:
                qkv = self._first_products[tokens]
            else:
                qkv = product(index, "qkv", normed, layer.qkv_bias)
            parts = [self._attend(prefix, index, layer, qkv[own]) for prefix, own in groups]
            attended, key, value = (_joined(kind) for kind in zip(*parts, strict=True))
            keys.append(key)
            values.append(value)
            if not keep(index, "o", attended):
                break
            rows += product(index, "o", attended, layer.o_bias)
            kernels.rms_norm(rows, layer.post_attention_norm, epsilon, normed)
            if not keep(index, "gate_up", normed):
                break
            activated = np.empty((len(rows), config.intermediate_size), dtype=np.float32)
            activate = kernels.swiglu_parallel if len(rows) >= kernels.PARALLEL_ROWS else kernels.swiglu
            activate(product(index, "gate_up", normed, layer.gate_up_bias), activated)
            if not keep(index, "down", activated):
                break
            rows += product(index, "down", activated, layer.down_bias)
        else:
            kernels.rms_norm(rows, self.weights.final_norm, epsilon, normed)
            keep(HEAD_LAYER, "lm_head", normed)
        return kept, keys, values

    def _attend(
        self, prefix: Prefix, index: int, layer: LayerWeights, qkv: Float32
    ) -> tuple[Float32, Float32, Float32]:
        """Attention output ``(C, q_dim)`` and own keys and values ``(C, kv_dim)`` at a layer."""
        config = self.config
        count, depth, heads = len(qkv), config.head_dim, config.num_kv_heads
        group = config.num_heads // heads
        position = len(prefix.tokens)
        cosines, sines = (table[position : position + 1] for table in self._rope)
        queries = np.empty((count, config.q_dim), dtype=np.float32)
        key = np.empty((count, 1, config.kv_dim), dtype=np.float32)
        value = np.empty_like(key)
        kernels.qkv_to_cache(
            qkv, queries, key, value, _NO_SCALES, _NO_SCALES, np.arange(count),
            np.zeros(count, dtype=np.int64), cosines, sines,
            _EMPTY if layer.q_norm is None else layer.q_norm,
            _EMPTY if layer.k_norm is None else layer.k_norm,
            _EMPTY, np.float32(config.rms_norm_eps), np.float32(1.0 / np.sqrt(depth)),
        )  # fmt: skip
        q = queries.reshape(count, heads, group, depth)
        own_keys, own_values = key.reshape(count, heads, depth), value.reshape(count, heads, depth)
        out = np.empty((count, heads, group, depth), dtype=np.float32)
        window = config.sliding_windows[index] if config.sliding_windows else None
        first = max(0, position + 1 - window) if window else 0
        for head in range(heads):
            columns = slice(head * depth, (head + 1) * depth)
            scores = np.empty((count, group, position - first + 1), dtype=np.float32)
            scores[..., -1] = np.einsum("cgd,cd->cg", q[:, head], own_keys[:, head])
            if position > first:
                past = prefix.keys[index][first:, columns]
                scores[..., :-1] = (q[:, head].reshape(-1, depth) @ past.T).reshape(count, group, -1)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            out[:, head] = scores[..., -1:] * own_values[:, head, None]
            if position > first:
                past = prefix.values[index][first:, columns]
                mixed = scores[..., :-1].reshape(count * group, -1) @ past
                out[:, head] += mixed.reshape(count, group, depth)
        return out.reshape(count, config.q_dim), key[:, 0], value[:, 0]


def _joined(parts: Sequence[Float32]) -> Float32:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _draw(logits: Float32, rng: np.random.Generator) -> NDArray[np.int64]:
    """One token of each row's distribution."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.cumsum(weights, axis=1, out=weights)
    points = rng.random(len(weights), dtype=np.float32) * weights[:, -1]
    return np.asarray(
        [min(np.searchsorted(row, p, side="right"), len(row) - 1)
         for row, p in zip(weights, points, strict=True)],
        dtype=np.int64,
    )  # fmt: skip
