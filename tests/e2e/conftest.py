"""The real model and real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tee_runner.models import LoadedModel, load_model

from .processes import WorkerProcess, start_worker


@pytest.fixture(scope="session")
def model(smollm2_dir: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct."""
    return load_model(smollm2_dir)


@pytest.fixture(scope="module")
def cpu_worker() -> Iterator[WorkerProcess]:
    """One worker process with the CPU engine for a whole module."""
    worker = start_worker("cpu")
    yield worker
    worker.kill()


def chat(model: LoadedModel, question: str) -> list[int]:
    """Token ids of a conversation that asks ``question``, up to where the answer begins."""
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )
    return model.tokenizer.encode(text)
