"""Choosing the next token, in the runner, from plaintext logits."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from tee_runner.errors import InvalidRequestError

MAX_TOP_K = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Temperature 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequestError("temperature must lie between 0 and 100.")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError("top_p must lie above 0 and not above 1.")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InvalidRequestError(f"top_k must lie between 0 and {MAX_TOP_K}.")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidRequestError("seed must be an unsigned 64-bit integer.")


class Sampler:
    """Draws the tokens of one sequence. With a seed, the same logits give the same tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        seed = params.seed
        key = (
            os.urandom(32)
            if seed is None
            else hashlib.sha256(b"gelo/sampler/" + seed.to_bytes(8, "big")).digest()
        )
        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def sample(self, logits: NDArray[np.float32]) -> int:
        """A token id from logits ``(vocab,)`` float32."""
        params = self._params
        if params.temperature == 0.0 or params.top_k == 1:
            return int(np.argmax(logits))
        candidates, weights = self._candidates(logits)
        cumulative = np.cumsum(weights)
        kept = len(cumulative)
        if params.top_p < 1.0:
            # The smallest set whose mass reaches top_p: the first index at or above it stays.
            kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        draw = self._uniform() * cumulative[min(kept, len(cumulative)) - 1]
        return int(candidates[min(int(np.searchsorted(cumulative, draw, side="right")), kept - 1)])

    def _candidates(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids by falling probability, and their unnormalised probabilities."""
        params = self._params
        if 0 < params.top_k < len(logits):
            ids = np.argpartition(logits, -params.top_k)[-params.top_k :]
        else:
            ids = np.arange(len(logits))
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        # Differences first: the largest stays 0 however small the temperature, and the rest may
        # overflow to -inf, which is probability 0.
        below = logits[ids].astype(np.float64)
        below -= below[0]
        with np.errstate(over="ignore"):
            return ids.astype(np.int64), np.exp(below / params.temperature)

    def _uniform(self) -> float:
        """53 uniform bits in [0, 1)."""
        word = int.from_bytes(self._stream.update(bytes(8)), "little")
        return (word >> 11) * 2.0**-53
