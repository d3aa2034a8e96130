"""Mixtures whose sources are known, as an attack's view, for the separation attacks' tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import Capture, CorpusName, Offload, Op, PromptTruth, Truth, View
from evals.attacks.public import PublicModel
from evals.attacks.separation import Place, random_rotation

Rows = NDArray[np.float32]
Mask = Callable[[Rows, np.random.Generator], NDArray[np.generic]]
PLACE: Place = (0, "qkv")
LAYERS, VOCAB = 3, 50


class FlatModel:
    """A public model whose operands are standard normal rows: it gives nothing away."""

    config = SimpleNamespace(num_layers=LAYERS, vocab_size=VOCAB)

    def __init__(self, width: int) -> None:
        self._width = width

    def rows(
        self, sequences: Sequence[Sequence[int]], wanted: set[tuple[int, Op]] | None = None
    ) -> list[dict[tuple[int, Op], Rows]]:
        """See :meth:`PublicModel.rows`."""
        rng = np.random.default_rng(0)
        shape = (len(sequences[0]), self._width)
        return [
            {place: rng.standard_normal(shape, dtype=np.float32) for place in wanted or ()} for _ in sequences
        ]


def laplacian(n: int, d: int, rng: np.random.Generator) -> Rows:
    """Independent super-Gaussian rows."""
    return rng.laplace(size=(n, d)).astype(np.float32)


def gaussian(n: int, d: int, rng: np.random.Generator) -> Rows:
    """Independent rows no higher-order method can tell apart."""
    return rng.standard_normal((n, d), dtype=np.float32)


def coloured(n: int, d: int, rng: np.random.Generator) -> Rows:
    """Gaussian rows that differ in their autocorrelation: first-order autoregressions."""
    noise = rng.standard_normal((n, d + 200))
    poles = np.linspace(-0.9, 0.9, n)
    for t in range(1, noise.shape[1]):
        noise[:, t] += poles * noise[:, t - 1]
    return noise[:, 200:].astype(np.float32)


def shielded(rows: Rows, rng: np.random.Generator) -> NDArray[np.generic]:
    """A·[H; S] with two Gaussian shield rows and a fresh orthogonal A, float16."""
    norm = 4 * np.linalg.norm(rows, axis=1).mean() / np.sqrt(rows.shape[1])
    stack = np.concatenate([rows, norm * gaussian(2, rows.shape[1], rng)]).astype(np.float32)
    return (random_rotation(len(stack), rng) @ stack).astype(np.float16)


def plain(rows: Rows, rng: np.random.Generator) -> NDArray[np.generic]:
    """No mask."""
    return rows.astype(np.float16)


def ring(rows: Rows, rng: np.random.Generator) -> NDArray[np.generic]:
    """Uniform ring elements that say nothing about the rows."""
    return rng.integers(0, 2**32, (len(rows) + 2, rows.shape[1]), dtype=np.uint32)


def planted_view(
    texts: Sequence[Rows],
    mask: Mask,
    rng: np.random.Generator,
    *,
    passes: int = 1,
    corpus: CorpusName = "short",
) -> tuple[View, Truth]:
    """Each of ``texts`` captured ``passes`` times under fresh masks, and the truth."""
    captures, secrets = [], []
    forward = 1 if corpus == "decode" else 0
    for number, rows in enumerate(texts):
        for _ in range(passes):
            offload = Offload(forward=forward, layer=PLACE[0], op=PLACE[1], operand=mask(rows, rng))
            captures.append(Capture(prompt=number, offloads=(offload,)))
            known = {(forward, *PLACE): rows}
            secret = PromptTruth(prompt=number, text="", tokens=(), prompt_lengths=(len(rows),), rows=known)
            secrets.append(secret)
    model = cast(PublicModel, cast(Any, FlatModel(texts[0].shape[1])))
    view = View(
        condition="planted", scheme="planted", parameters={}, corpus=corpus, captures=captures, model=model
    )
    return view, Truth(prompts=secrets)
