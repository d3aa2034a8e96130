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
        """A token id from logits ``(vocab,)`` float32.

        Draws by the Gumbel maximum (Gumbel 1954; Maddison et al. 2014): the noise belongs to the
        token id, so that the small differences that fresh masks leave in the logits change a
        seeded draw only where two tokens nearly tie.
        """
        params = self._params
        if params.temperature == 0.0 or params.top_k == 1:
            return int(np.argmax(logits))
        words = np.frombuffer(self._stream.update(bytes(4 * len(logits))), dtype="<u4")
        ids = self._candidates(logits)
        scaled = self._scaled(logits[ids])
        uniform = (words[ids] + 0.5) * 2.0**-32
        return int(ids[np.argmax(scaled - np.log(-np.log(uniform)))])

    def _candidates(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """Token ids that top_k and top_p leave."""
        params = self._params
        ids = np.arange(len(logits), dtype=np.int64)
        if 0 < params.top_k < len(logits):
            ids = np.argpartition(logits, -params.top_k)[-params.top_k :].astype(np.int64)
        if params.top_p < 1.0:
            ids = ids[np.argsort(-logits[ids], kind="stable")]
            cumulative = np.cumsum(np.exp(self._scaled(logits[ids])))
            # The smallest set whose mass reaches top_p: the first index at or above it stays.
            ids = ids[: int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1]
        return ids

    def _scaled(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Logits over temperature, the largest at 0: a tiny temperature gives -inf, not NaN."""
        with np.errstate(over="ignore"):
            scaled: NDArray[np.float64] = (
                logits.astype(np.float64) - logits.max()
            ) / self._params.temperature
        return scaled
