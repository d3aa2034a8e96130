"""A runtime whose answers depend on every token it was fed, and clients that keep what they receive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tee_runner.decoder.config import DecoderConfig, RopeConfig
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest, TokenEvent
from tee_runner.profile import Profile
from tee_runner.protection.plain import Plain

VOCAB = 97
EOS = 96
PATIENCE = 180.0  # only a hang meets it
CONFIG = DecoderConfig(
    family="llama", num_layers=1, hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1,
    head_dim=8, vocab_size=VOCAB, max_position_embeddings=4096, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4), tie_word_embeddings=True,
)  # fmt: skip


def following(history: Sequence[int]) -> int:
    """The double's next token: it depends on every token, and on their order."""
    value = 1
    for token in history:
        value = (value * 31 + token) % 9973
    return value % (VOCAB - 1)  # never EOS


def answer(prompt: Sequence[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(following(history))
    return history[len(prompt) :]


class Letters:
    """A text decoder: one letter per token."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def finish(self) -> str:
        return ""


class FakeRuntime:
    """Serves :func:`following` and keeps the batches it was given."""

    def __init__(
        self, *, slots: int = 4, max_len: int = 2000, step_rows: int = 64, scheme: Any = Plain
    ) -> None:
        tokenizer = SimpleNamespace(incremental_decoder=Letters)
        self.model = SimpleNamespace(tokenizer=tokenizer, eos_ids=frozenset({EOS}), config=CONFIG)
        self.max_len = max_len
        self.cache = KvCache(CONFIG, slots=slots, max_len=max_len)
        self.options = SimpleNamespace(step_rows=step_rows, max_sequences=slots)
        self.operand_rows: Callable[[Sequence[int]], int] = scheme.operand_rows
        self.max_operand_rows = scheme.operand_rows([step_rows] + [1] * slots)
        self.profile = Profile()
        self.histories: dict[int, list[int]] = {}
        self.batches: list[RaggedBatch] = []
        self.before_step: Callable[[int], None] = lambda step: None
        self.override: Callable[[list[int]], int | None] = lambda history: None
        self.idled = threading.Event()

    def forward(self, batch: RaggedBatch) -> np.ndarray:
        self.before_step(len(self.batches))
        self.batches.append(batch)
        assert len(batch.slots) == len(batch.counts) == len(batch.sampled) == len(set(batch.slots))
        assert self.operand_rows(batch.counts) <= self.max_operand_rows
        logits, row = [], 0
        for slot, count, sampled in zip(batch.slots, batch.counts, batch.sampled, strict=True):
            past = self.cache.reserve(slot, count)
            history = self.histories.get(slot, [])[:past]
            history += batch.tokens[row : row + count].tolist()
            self.histories[slot] = history
            self.cache.keys[0][slot, past : past + count] = 1.0
            self.cache.lengths[slot] = past + count
            row += count
            if sampled:
                own = np.zeros(VOCAB, np.float32)
                chosen = self.override(history)
                own[following(history) if chosen is None else chosen] = 1.0
                logits.append(own)
        assert row == len(batch.tokens)
        return np.array(logits, np.float32).reshape(-1, VOCAB)

    def idle(self) -> bool:
        self.idled.set()
        return False


class Client:
    """Receives one request's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._finished: queue.Queue[FinishEvent] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, FinishEvent):
            self._finished.put(event)

    def wait(self) -> FinishEvent:
        return self._finished.get(timeout=PATIENCE)

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]


def request(prompt: Sequence[int], count: int = 5, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt=tuple(prompt), max_tokens=count, **fields)


def prompt_of(seed: int, length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist()
    return tokens
