"""Per-token log-probabilities of a text under a protection scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime
from tee_runner.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """``log_probs[i]`` is ln p(tokens[i + 1] | tokens[: i + 1]); ``nll`` is minus their mean."""

    tokens: list[int]
    log_probs: list[float]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats per predicted token."""
        return -float(np.mean(self.log_probs))


def score(
    runtime: Runtime, tokens: list[int], progress: Callable[[str, int, int], None] | None = None
) -> Score:
    """Run ``tokens`` through the protected forward pass in blocks, logits for every row.

    Raises:
        InvalidRequestError: fewer than two tokens, or more than the context holds.
        WorkerError: the worker failed.
    """
    if len(tokens) < 2:
        raise InvalidRequestError("A text of at least two tokens is needed.")
    if len(tokens) > runtime.max_len:
        raise InvalidRequestError(
            f"The text has {len(tokens)} tokens, the context holds {runtime.max_len}.",
            remedy="Score a shorter text, or raise --max-len if the model allows it.",
        )
    block = block_rows(runtime)
    slot = runtime.cache.take()
    log_probs: list[float] = []
    try:
        for first in range(0, len(tokens) - 1, block):
            part = tokens[first : min(first + block, len(tokens) - 1)]
            targets = tokens[first + 1 : first + 1 + len(part)]
            batch = RaggedBatch(
                tokens=np.asarray(part, dtype=np.int64), slots=[slot], counts=[len(part)], sampled=[len(part)]
            )
            log_probs += _log_probabilities(runtime.forward(batch), np.asarray(targets)).tolist()
            if progress is not None:
                progress("score", len(log_probs), len(tokens) - 1)
    finally:
        runtime.cache.release(slot)
    return Score(tokens=tokens, log_probs=log_probs)


def block_rows(runtime: Runtime) -> int:
    """The most rows whose layer and LM-head operands both fit the wire's buffers."""
    limit = min(runtime.head_rows, runtime.max_operand_rows)
    rows = 1
    while runtime.operand_rows([rows + 1]) <= limit:
        rows += 1
    return rows


def _log_probabilities(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    chosen: NDArray[np.float64] = values[np.arange(len(targets)), targets]
    log_probs: NDArray[np.float64] = chosen - np.log(np.exp(values).sum(axis=1))
    return log_probs
