"""Random models of every family under `lpn`: bit for bit the logits of `plain-int8`, on the real engines.

SmolLM2 is in test_greedy.py; sequences that join late, on a worker in memory, in
tests/tee_runner/decoder/test_quantised.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.synthetic import qwen3_4b_shape, random_model
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.models import LoadedModel
from tee_runner.protection.base import Float32
from tee_runner.protection.lpn.options import LpnOptions
from tests.tee_runner.decoder.small_models import MILD, make

from .processes import WorkerProcess, start_worker

pytestmark = pytest.mark.e2e

LENGTHS = (3, 31, 1, 17, 70, 8, 40, 12)
TOKENS = 64
FAMILIES = ("llama3", "qwen2-window", "qwen3", "mistral", "gemma3", "gemma3-mqa", "gemma4", "gemma4-kv")


def wide_qwen3() -> LoadedModel:
    """Two layers, grouped heads and QK-norm, as wide as SmolLM2."""
    config = replace(
        qwen3_4b_shape(2, vocab=640), hidden_size=576, intermediate_size=1536, num_heads=8, num_kv_heads=2,
        head_dim=72, max_position_embeddings=256,
    )  # fmt: skip
    return random_model(config, seed=3)


@pytest.fixture(scope="module", params=["wide qwen3", *FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """All widths are such that `lpn` has secure parameters for them."""
    if request.param == "wide qwen3":
        return wide_qwen3()
    directory = tmp_path_factory.mktemp(request.param)
    return make(request.param, MILD, directory, intermediate_size=96).ours


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools")


@pytest.fixture(scope="module", params=["cpu", "wgpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    worker = start_worker(request.param)
    yield worker
    worker.kill()


def logits_of(model: LoadedModel, worker: WorkerProcess, protection: str, pools: Path) -> list[Float32]:
    """64 steps after eight prompts of different lengths, at once: the logits ``(8, vocab)`` of each.

    What follows the best token by so many as there were steps is fed: random models run in circles.
    """
    options = RuntimeOptions(
        worker=worker.address, protection=protection, max_sequences=8, lpn=LpnOptions(pool_directory=pools)
    )
    runtime = Runtime(model, options)
    generator = np.random.default_rng(1)
    fed = [generator.integers(0, model.config.vocab_size, n) for n in LENGTHS]
    slots = [runtime.cache.take() for _ in fed]
    steps: list[Float32] = []
    try:
        runtime.connect()
        for step in range(TOKENS):
            batch = RaggedBatch(
                tokens=np.concatenate(fed), slots=slots, counts=[len(part) for part in fed],
                sampled=[1] * len(fed),
            )  # fmt: skip
            steps.append(runtime.forward(batch).copy())
            following = (steps[-1].argmax(axis=1) + step) % model.config.vocab_size
            fed = [token[None] for token in following]
    finally:
        runtime.close()
    return steps


def test_blinding_changes_no_bit(model: LoadedModel, engine: WorkerProcess, pools: Path) -> None:
    plain = logits_of(model, engine, "plain-int8", pools)
    assert len({step.argmax(axis=1).tobytes() for step in plain}) > TOKENS // 2
    for mine, theirs in zip(logits_of(model, engine, "lpn", pools), plain, strict=True):
        assert np.isfinite(theirs).all()
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
