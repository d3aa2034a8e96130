"""Known beginnings of a text, and candidates for the token that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import Op

Float32 = NDArray[np.float32]
Place = tuple[int, Op]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that are taken as known, and their keys and values.

    ``keys[layer]`` and ``values[layer]`` are ``(p, kv_dim)`` float32 for p tokens; only the
    layers that the steps so far went through.
    """

    tokens: tuple[int, ...]
    keys: tuple[Float32, ...]
    values: tuple[Float32, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What C candidates for the next token give: ``rows[place]`` ``(C, d_in)`` float32 operand
    rows, and per layer passed the candidates' own keys and values ``(C, kv_dim)``.
    """

    prefix: Prefix
    tokens: NDArray[np.int64]
    rows: Mapping[Place, Float32]
    keys: tuple[Float32, ...]
    values: tuple[Float32, ...]

    def take(self, index: int) -> Prefix:
        """The prefix with candidate ``index`` appended."""

        def grow(old: tuple[Float32, ...], new: tuple[Float32, ...]) -> tuple[Float32, ...]:
            if not self.prefix.tokens:
                return tuple(n[index : index + 1].copy() for n in new)
            return tuple(np.concatenate([o, n[index : index + 1]]) for o, n in zip(old, new, strict=False))

        tokens = (*self.prefix.tokens, int(self.tokens[index]))
        return Prefix(tokens, grow(self.prefix.keys, self.keys), grow(self.prefix.values, self.values))
