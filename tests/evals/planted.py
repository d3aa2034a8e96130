"""A small public model whose rows are known, and operands made from them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import Capture, CorpusName, Offload, Op, PromptTruth, Truth, View
from evals.attacks.subspace import unit_scaled

Rows = NDArray[Any]
Place = tuple[int, Op]


class TableModel:
    """V tokens of width d. Deeper rows depend on every token so far, as a decoder's do."""

    def __init__(self, vocabulary: int, width: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.dictionary = rng.standard_normal((vocabulary, width)).astype(np.float32)
        self._mixes = rng.standard_normal((32, width, width)) / np.sqrt(width)

    def rows(self, sequences: Sequence[Sequence[int]], wanted: set[Place]) -> list[dict[Place, Rows]]:
        return [{place: self._rows(sequence, place) for place in wanted} for sequence in sequences]

    def next_token_logits(self, sequences: Sequence[Sequence[int]]) -> Rows:
        return np.stack([np.arange(self.config.vocab_size) + s[-1] for s in sequences]).astype(np.float32)

    def _rows(self, sequence: Sequence[int], place: Place) -> Rows:
        rows = self.dictionary[list(sequence)]
        if place == (0, "qkv"):
            return rows
        past = np.cumsum(rows, axis=0)
        mix = self._mixes[4 * place[0] + ("qkv", "o", "gate_up", "down").index(place[1])]
        return np.tanh((rows + 0.5 * past) @ mix).astype(np.float32)


def haar(size: int, rng: np.random.Generator) -> Rows:
    """A random orthogonal ``(size, size)``."""
    return np.linalg.qr(rng.standard_normal((size, size)))[0]


def masked(rows: Rows, rng: np.random.Generator, *, mask: Rows | None = None, shield: int = 8) -> Rows:
    """f16(A·[H; S]) with shield rows of 4 times the mean norm."""
    data = unit_scaled(rows).astype(np.float64)
    energy = 4.0 * np.linalg.norm(data, axis=1).mean() / np.sqrt(data.shape[1])
    block = np.concatenate([data, energy * rng.standard_normal((shield, data.shape[1]))])
    return ((haar(len(block), rng) if mask is None else mask) @ block).astype(np.float16)


def plain(rows: Rows, rng: np.random.Generator) -> Rows:
    """f16(H)."""
    return unit_scaled(rows).astype(np.float16)


def words(rows: Rows, rng: np.random.Generator) -> Rows:
    """Uniform elements of the ring of integers mod 2³²: what perfect blinding looks like."""
    return rng.integers(0, 2**32, rows.shape, dtype=np.uint32)


def gaussian(rows: Rows, rng: np.random.Generator) -> Rows:
    """Nothing of the rows but their shape."""
    return rng.standard_normal((len(rows) + 8, rows.shape[1])).astype(np.float16)


def view_of(
    model: TableModel,
    prompts: Sequence[Sequence[int]],
    operands: Sequence[dict[Place, Rows]],
    corpus: CorpusName = "short",
) -> tuple[View, Truth]:
    """Captures of one prefill each, with their truth."""
    captures, secrets = [], []
    for index, (tokens, wire) in enumerate(zip(prompts, operands, strict=True)):
        offloads = tuple(
            Offload(forward=0, layer=layer, op=op, operand=operand) for (layer, op), operand in wire.items()
        )
        captures.append(Capture(prompt=index, offloads=offloads))
        rows = model.rows([tokens], set(wire))[0]
        secrets.append(
            PromptTruth(
                prompt=index,
                text="",
                tokens=(tuple(tokens),),
                prompt_lengths=(len(tokens),),
                rows={(0, *place): values for place, values in rows.items()},
            )
        )
    view = View(
        condition="planted",
        scheme="planted",
        parameters={"shield_rows": 8, "shield_energy": 4.0},
        corpus=corpus,
        captures=captures,
        model=cast("Any", model),
    )
    return view, Truth(prompts=secrets)
