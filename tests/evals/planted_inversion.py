"""A small random model and views of it, for the inversion attacks' tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evals.attacks.drivers.simulate import simulate
from evals.attacks.model import Capture, Offload, Op, PromptTruth, Truth, View
from evals.attacks.public import PublicModel
from tee_runner.decoder.config import DecoderConfig, RopeConfig
from tee_runner.decoder.weights import DecoderWeights, LayerWeights, LinearSpec

VOCAB = 600
HIDDEN = 48
LAYERS = 5
MLP = 64
Operand = Callable[[NDArray[np.float32], np.random.Generator], NDArray[np.generic]]


def small_model(seed: int = 0) -> PublicModel:
    """Five layers of random weights, small enough that layers change a row little."""
    rng = np.random.default_rng(seed)
    config = DecoderConfig(
        family="llama", num_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=MLP, num_heads=3,
        num_kv_heads=1, head_dim=16, vocab_size=VOCAB, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e4), tie_word_embeddings=True,
    )  # fmt: skip
    table = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)

    def spec(name: str, d_in: int, d_out: int) -> LinearSpec:
        values = (rng.standard_normal((d_out, d_in)) * 0.3 / np.sqrt(d_in)).astype(np.float16)
        return LinearSpec(name=name, d_in=d_in, d_out=d_out, load=lambda: values)

    def gain() -> NDArray[np.float32]:
        return rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    head = table.astype(np.float16)
    layers = tuple(
        LayerWeights(
            input_norm=gain(), post_attention_norm=gain(),
            qkv=spec("qkv", HIDDEN, config.q_dim + 2 * config.kv_dim),
            o=spec("o", config.q_dim, HIDDEN),
            gate_up=spec("gate_up", HIDDEN, 2 * MLP),
            down=spec("down", MLP, HIDDEN),
        )
        for _ in range(LAYERS)
    )  # fmt: skip
    weights = DecoderWeights(
        embed=lambda ids: table[ids],
        layers=layers,
        final_norm=gain(),
        lm_head=LinearSpec(name="lm_head", d_in=HIDDEN, d_out=VOCAB, load=lambda: head),
    )
    return PublicModel(config, weights)


def plain(rows: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.generic]:
    """The rows themselves."""
    return simulate(rows, len(rows), "plain", {}, rng).astype(np.float16)


def ring(rows: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.generic]:
    """The rows in fixed point modulo 2³², in clear."""
    return np.rint(rows * 65536.0).astype(np.int32).view(np.uint32)


def noise(rows: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.generic]:
    """Nothing of the rows but their shape."""
    return rng.standard_normal(rows.shape).astype(np.float16)


def random_texts(rng: np.random.Generator, prompts: int, length: int) -> list[list[int]]:
    """Tokens drawn evenly."""
    return [rng.integers(0, VOCAB, length).tolist() for _ in range(prompts)]


def planted(
    model: PublicModel,
    operand: Operand,
    places: set[tuple[int, Op]],
    rng: np.random.Generator,
    *,
    prompts: int = 12,
    length: int = 12,
    scheme: str = "plain",
    parameters: Mapping[str, int | float | str] | None = None,
) -> tuple[View, Truth]:
    """What a worker would see of random prompts if operands were made by ``operand``."""
    texts = random_texts(rng, prompts, length)
    captures, secrets = [], []
    for prompt, (text, found) in enumerate(zip(texts, model.rows(texts, places), strict=True)):
        rows = {(0, layer, op): r[-1:] if op == "lm_head" else r for (layer, op), r in found.items()}
        offloads = [
            Offload(forward=0, layer=layer, op=op, operand=operand(r, rng))
            for (_, layer, op), r in rows.items()
        ]
        captures.append(Capture(prompt=prompt, offloads=tuple(offloads)))
        secrets.append(secret(prompt, text, rows))
    view = View(
        condition="planted", scheme=scheme, parameters=parameters or {}, corpus="short",
        captures=captures, model=model,
    )  # fmt: skip
    return view, Truth(prompts=secrets)


def secret(
    prompt: int, text: Sequence[int], rows: Mapping[tuple[int, int, Op], NDArray[np.float32]] | None = None
) -> PromptTruth:
    """The truth of a capture of one prompt."""
    return PromptTruth(
        prompt=prompt, text="", tokens=(tuple(text),), prompt_lengths=(len(text),), rows=rows or {}
    )
