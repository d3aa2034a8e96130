"""A random model as its public facts, and captures of it that are planted here, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import HEAD_LAYER, Capture, CorpusName, Offload, Op, PromptTruth, Truth, View
from evals.attacks.public import PublicModel
from tee_runner.decoder.config import DecoderConfig, RopeConfig
from tee_runner.decoder.weights import DecoderWeights, LayerWeights, LinearSpec

VOCAB, HIDDEN, LAYERS = 400, 128, 3
OPS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down")
Mask = Callable[[NDArray[np.float32], np.random.Generator], NDArray[np.generic]]


def tiny_model(
    *, qk_norm: bool = False, window: int | None = None, bias: bool = False, seed: int = 0
) -> PublicModel:
    """A decoder of 3 layers and width 128 with random float16 weights."""
    rng = np.random.default_rng(seed)
    config = DecoderConfig(
        family="tiny", num_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=192, num_heads=4,
        num_kv_heads=2, head_dim=32, vocab_size=VOCAB, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0), tie_word_embeddings=False, qk_norm=qk_norm, qkv_bias=bias,
        o_bias=bias, mlp_bias=bias, sliding_windows=(window,) * LAYERS if window else (),
    )  # fmt: skip

    def spec(name: str, d_out: int, d_in: int) -> LinearSpec:
        weight = (rng.standard_normal((d_out, d_in)) * 1.5 / np.sqrt(d_in)).astype(np.float16)
        return LinearSpec(name=name, d_in=d_in, d_out=d_out, load=lambda: weight)

    def vector(size: int, mean: float = 1.0) -> NDArray[np.float32]:
        return (mean + 0.2 * rng.standard_normal(size)).astype(np.float32)

    embedding = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    layers = tuple(
        LayerWeights(
            input_norm=vector(HIDDEN), post_attention_norm=vector(HIDDEN),
            q_norm=vector(32) if qk_norm else None, k_norm=vector(32) if qk_norm else None,
            qkv_bias=vector(256, 0.0) if bias else None, o_bias=vector(HIDDEN, 0.0) if bias else None,
            gate_up_bias=vector(384, 0.0) if bias else None, down_bias=vector(HIDDEN, 0.0) if bias else None,
            qkv=spec(f"{i}.qkv", 256, HIDDEN), o=spec(f"{i}.o", HIDDEN, 128),
            gate_up=spec(f"{i}.gate_up", 384, HIDDEN), down=spec(f"{i}.down", HIDDEN, 192),
        )
        for i in range(LAYERS)
    )  # fmt: skip
    weights = DecoderWeights(
        embed=lambda ids: embedding[ids], layers=layers, final_norm=vector(HIDDEN),
        lm_head=spec("head", VOCAB, HIDDEN),
    )  # fmt: skip
    return PublicModel(config, weights)


def shielded(rows: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.generic]:
    """f16(A·[H; S]): a random orthogonal A and 8 shield rows of 4 times the mean norm."""
    norm = float(np.linalg.norm(rows, axis=1).mean())
    shield = 4.0 * norm / np.sqrt(rows.shape[1]) * rng.standard_normal((8, rows.shape[1]))
    mixed, _ = np.linalg.qr(rng.standard_normal((len(rows) + 8, len(rows) + 8)))
    return (mixed @ np.concatenate([rows, shield])).astype(np.float16)


def unrelated(rows: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.generic]:
    """Uniform words of a ring: nothing of the rows."""
    return rng.integers(0, 2**32, (len(rows) + 8, rows.shape[1]), dtype=np.uint32)


def planted(
    model: PublicModel,
    prompts: Sequence[Sequence[int]],
    mask: Mask,
    rng: np.random.Generator,
    *,
    corpus: CorpusName = "short",
    places: Callable[[int, Op], bool] = lambda layer, op: True,
) -> tuple[View, Truth]:
    """One capture per prompt: prefills, each operand made from the plaintext rows by ``mask``."""
    captures, secrets = [], []
    for index, (tokens, rows) in enumerate(zip(prompts, model.rows(prompts), strict=True)):
        wire = {place: r[-1:] if place[0] == HEAD_LAYER else r for place, r in rows.items() if places(*place)}
        offloads = tuple(
            Offload(forward=0, layer=layer, op=op, operand=mask(r, rng)) for (layer, op), r in wire.items()
        )
        captures.append(Capture(prompt=index, offloads=offloads))
        secrets.append(
            PromptTruth(
                prompt=index, text="", tokens=(tuple(tokens),), prompt_lengths=(len(tokens),),
                rows={(0, *place): r for place, r in wire.items()},
            )
        )  # fmt: skip
    view = View(
        condition="planted", scheme="planted", parameters={"shield_rows": 8, "shield_energy": 4.0},
        corpus=corpus, captures=captures, model=model,
    )  # fmt: skip
    return view, Truth(prompts=secrets)


def sentences(count: int, rng: np.random.Generator, shortest: int = 6, longest: int = 14) -> list[list[int]]:
    """Random token ids."""
    return [rng.integers(0, VOCAB, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]
