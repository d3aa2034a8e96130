"""What a worker learns of per-layer embeddings: nothing, under any scheme, `plain` included.

The table is indexed by the token. A worker that saw a row of it, or which row, would know the token
from public weights alone. So two prompts of equal length must look alike to it in everything but the
operands' contents, and no row may appear, be it as stored, scaled, gated or projected.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tee_runner.decoder import forward as forward_module
from tee_runner.decoder import kernels, ple
from tee_runner.decoder.weights import LayerPle
from tee_runner.models import LoadedModel
from tee_runner.models.per_layer_table import PerLayerTable
from tee_runner.worker.client import TransportName
from tests.tee_runner.decoder.small_models import MILD, make, tokens_of

from .processes import WorkerProcess, start_python
from .recording import (
    Float32,
    Operand,
    Recording,
    cosine_bound,
    cosines,
    int8_rows_in_bytes,
    read_recording,
    rows_in_bytes,
)
from .running import running

pytestmark = pytest.mark.e2e

PROMPT, TOKENS = 14, 6
SCHEMES, TRANSPORTS = ("plain", "gelo-hd3"), ("slab", "grpc")


@dataclass(frozen=True, slots=True)
class Spy:
    """A spying worker process and its recording."""

    process: WorkerProcess
    path: Path


@dataclass(slots=True)
class Run:
    """What the worker received over one generation, and what it must not have."""

    recording: Recording = field(default_factory=Recording)
    answer: list[int] = field(default_factory=list)
    int8: list[np.ndarray[tuple[int, ...], np.dtype[np.int8]]] = field(default_factory=list)
    rows: dict[str, list[Float32]] = field(default_factory=dict)

    def add(self, name: str, rows: Float32) -> None:
        """Note the rows ``(.., width)`` of a secret."""
        self.rows.setdefault(name, []).extend(rows.reshape(-1, rows.shape[-1]).copy())


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spy]:
    path = tmp_path_factory.mktemp("spy") / "recording"
    process = start_python(["-m", "tests.e2e.spy_worker", str(path), "127.0.0.1:0"])
    yield Spy(process, path)
    process.kill()
    path.unlink()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A small Gemma 4 with shared keys and per-layer embeddings, which never ends a text early."""
    return replace(make("gemma4", MILD, tmp_path_factory.mktemp("gemma4")).ours, eos_ids=frozenset())


def table_of(model: LoadedModel) -> PerLayerTable:
    assert model.weights.ple is not None
    table = model.weights.ple.gather.__self__  # type: ignore[attr-defined]
    assert isinstance(table, PerLayerTable)
    return table


@contextmanager
def noting(run: Run) -> Iterator[None]:
    """Keep what the per-layer embeddings are at every stage."""

    def inputs(weights: object, tokens: object, rows: Float32, epsilon: object) -> Float32:
        made = ple.per_layer_inputs(weights, tokens, rows, epsilon)  # type: ignore[arg-type]
        run.add("a per-layer input", made)
        return made

    def gate(gate: Float32, other: Float32, out: Float32) -> None:
        gelu_times(gate, other, out)
        run.add("a gated row", out)

    def delta(rows: Float32, made: Float32, layer: LayerPle, out: Float32) -> None:
        ple.per_layer_delta(rows, made, layer, out)
        run.add("a projected row", out)

    gelu_times = kernels.gelu_times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_module, "per_layer_inputs", inputs)
        patch.setattr(forward_module, "per_layer_delta", delta)
        patch.setattr(kernels, "gelu_times", gate)
        yield


def generate(model: LoadedModel, spy: Spy, name: str, transport: TransportName, prompt: list[int]) -> Run:
    names = {hashlib.sha256(w.load().tobytes()).hexdigest(): w.name for w in model.weights.linears()}
    start = spy.path.stat().st_size
    run = Run()
    with noting(run), running(model, spy.process.address, name, transport=transport, max_len=64) as served:
        (answer,) = served.generate([prompt], TOKENS)
    run.answer = answer.tokens
    assert len(run.answer) == TOKENS
    # The worker writes its slab down when it sees the session end.
    for _ in range(500):
        run.recording, _ = read_recording(spy.path, start, names, model.weights.lm_head.name)
        if transport == "grpc" or any(source == "slab" for source, _ in run.recording.received):
            break
        time.sleep(0.02)
    assert set(run.recording.uploaded) <= set(names), "something other than a linear weight was uploaded"
    # What entered the model: the prompt, and all of the answer but its last token.
    fed = np.array([*prompt, *run.answer[:-1]])
    table = table_of(model)
    run.int8 = list(table._values[fed].reshape(-1, table.width))
    run.add("a row of the table", table.gather(fed))
    return run


def seen(run: Run) -> tuple[list[tuple[str, int]], list[tuple[str, tuple[int, ...]]]]:
    """Names, sizes and order of all that was received."""
    received = [(source, len(payload)) for source, payload in run.recording.received]
    return received, [(operand.weight, operand.rows.shape) for operand in run.recording.operands]


def found(run: Run, model: LoadedModel) -> list[str]:
    """One sentence per secret that the worker got."""
    width = model.config.per_layer_input_width
    blobs = list(run.recording.blobs())
    sentences = list(rows_in_bytes(blobs, dict(run.rows)))
    sentences += int8_rows_in_bytes(blobs, "a row of the table as int8", run.int8)
    for operand in run.recording.operands:
        if operand.rows.shape[1] in (width, width * model.config.num_layers):
            sentences.append(f"operand of {operand.weight}: as wide as per-layer inputs")
        for name, rows in run.rows.items():
            alike = np.stack(rows)
            # In high dimension only: among a few elements, parallel rows are no coincidence.
            if alike.shape[1] == operand.rows.shape[1] and (
                cosines(operand.rows, alike).max() > cosine_bound(PROMPT)
            ):
                sentences.append(f"operand of {operand.weight}: parallel to {name}")
    return sentences


@pytest.fixture(scope="module")
def uploaded(gemma: LoadedModel, spy: Spy) -> None:
    """The worker holds the weights: later sessions send none."""
    generate(gemma, spy, "plain", "grpc", tokens_of(30, PROMPT))


@pytest.mark.usefixtures("uploaded")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_prompts_of_equal_length_look_alike(
    gemma: LoadedModel, spy: Spy, name: str, transport: TransportName
) -> None:
    first, second = (generate(gemma, spy, name, transport, tokens_of(seed, PROMPT)) for seed in (31, 32))
    assert first.answer != second.answer
    assert seen(first) == seen(second)
    assert len(first.recording.operands) == TOKENS * (4 * gemma.config.num_layers + 1)
    for run in (first, second):
        assert found(run, gemma) == []
    # The operands' contents do differ: the two runs are not one.
    assert any(
        (a.rows != b.rows).any()
        for a, b in zip(first.recording.operands, second.recording.operands, strict=True)
    )


def test_the_worker_holds_none_of_the_weights_around_the_table(gemma: LoadedModel) -> None:
    held = [spec.load().tobytes() for spec in gemma.weights.linears()]
    assert len(held) == 4 * gemma.config.num_layers + 1
    for layer in gemma.weights.layers:
        assert layer.ple is not None
        for weight in (layer.ple.gate, layer.ple.projection):
            assert weight.astype(np.float16).tobytes() not in held


# --- the search finds what is there ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(gemma: LoadedModel, spy: Spy, uploaded: None) -> Run:
    return generate(gemma, spy, "plain", "grpc", tokens_of(33, PROMPT))


@pytest.mark.parametrize(
    "name", ["a row of the table", "a per-layer input", "a gated row", "a projected row"]
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_row_in_a_message_is_found(gemma: LoadedModel, shown: Run, name: str, dtype: type) -> None:
    # The first that is not zero: a gate may close.
    row = next(row for row in shown.rows[name] if np.abs(row).max() > 1e-3)
    planted = (b"x" * 5) + (8.0 * row).astype(dtype).tobytes() + b"yyy"
    leaky = replace(shown, recording=replace(shown.recording, received=[("message", planted)]))
    width = 8 * np.dtype(dtype).itemsize
    assert f"message: {name} as float{width}" in found(leaky, gemma)


def test_a_stored_row_is_found(gemma: LoadedModel, shown: Run) -> None:
    planted = b"x" + shown.int8[7].tobytes()
    leaky = replace(shown, recording=replace(shown.recording, received=[("slab", planted)]))
    assert "slab: a row of the table as int8" in found(leaky, gemma)


def test_an_offload_of_per_layer_inputs_is_found(gemma: LoadedModel, shown: Run) -> None:
    gated = np.stack(shown.rows["a gated row"][:PROMPT]).astype(np.float16)
    projected = (3.0 * np.stack(shown.rows["a projected row"][:PROMPT])).astype(np.float16)
    operands = [Operand("layers.0.ple", gated), Operand("layers.0.other", projected)]
    leaky = replace(shown, recording=Recording(operands=operands))
    sentences = found(leaky, gemma)
    assert "operand of layers.0.ple: as wide as per-layer inputs" in sentences
    assert "operand of layers.0.other: parallel to a projected row" in sentences
