"""Captures come from the worker alone, and hold what the worker was sent."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evals.attacks import store
from evals.attacks.capture import (
    CaptureError,
    RecordingWorker,
    build_captures,
    capture,
    provenance,
    recording_worker,
    view,
    weight_places,
)
from evals.attacks.conditions import CONDITIONS, Condition
from evals.attacks.corpus import Corpus, corpus
from evals.attacks.model import Capture, Offload, PromptTruth, Truth
from evals.attacks.public import PublicModel
from evals.attacks.recording_worker import Recording
from evals.attacks.schemes import power_of_two_scales
from evals.attacks.store import Record, Recorded, StoreError
from tee_runner.models import LoadedModel, load_model, resolve_model
from tee_runner.protection.base import MaskOptions

RNG = np.random.default_rng(6)
# Half a unit in the last place of float16, relative.
HALF_ROUNDING = 2.0**-11


# --- what the worker writes ------------------------------------------------------------------------------


def record_session(directory: Path, wanted: frozenset[str] | None, results: bool) -> list[np.ndarray]:
    """Two passes over three weights, of which the middle one may be left out. Element types differ."""
    recording = Recording(directory, wanted, results)
    operands = []
    for step in range(2):
        for weight, dtype in enumerate((np.float16, np.uint32, np.float16)):
            operand = RNG.integers(0, 100, (3 + step, 5)).astype(dtype)
            operands.append(operand)
            record = recording.operand(weight, f"digest{weight}", operand)
            if record is not None:
                recording.result(record, operand[:, :2].astype(np.float32), 1000 + weight)
    assert not (directory / store.DONE).exists()
    recording.close()
    return operands


def test_a_recording_holds_what_came(tmp_path: Path) -> None:
    operands = record_session(tmp_path / "s", None, True)
    recorded = store.read_recording(tmp_path / "s")
    assert [r.record.step for r in recorded] == [0, 0, 0, 1, 1, 1]
    assert [r.record.weight for r in recorded] == ["digest0", "digest1", "digest2"] * 2
    for got, sent in zip(recorded, operands, strict=True):
        assert got.operand.dtype == sent.dtype
        assert np.array_equal(got.operand, sent)
        assert got.result is not None
        assert np.array_equal(got.result, sent[:, :2])
    arrived = [r.record.arrived_ns for r in recorded]
    assert arrived == sorted(arrived)
    assert [r.record.compute_ns for r in recorded] == [1000, 1001, 1002] * 2


def test_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    operands = record_session(tmp_path / "s", frozenset({"digest1"}), False)
    recorded = store.read_recording(tmp_path / "s")
    # Passes are told apart by all offloads, also by those that are not kept.
    assert [(r.record.weight, r.record.step) for r in recorded] == [("digest1", 0), ("digest1", 1)]
    assert [r.operand.tolist() for r in recorded] == [operands[1].tolist(), operands[4].tolist()]
    assert all(r.result is None for r in recorded)
    assert (tmp_path / "s" / store.OPERANDS).stat().st_size == operands[1].nbytes + operands[4].nbytes


def test_a_cut_recording_is_refused(tmp_path: Path) -> None:
    record_session(tmp_path / "s", None, False)
    operands = tmp_path / "s" / store.OPERANDS
    operands.write_bytes(operands.read_bytes()[:-1])
    with pytest.raises(StoreError, match="shorter"):
        store.read_recording(tmp_path / "s")


def recorded_offload(weight: str, step: int, arrived: int) -> Recorded:
    record = Record(
        weight=weight, step=step, shape=(1, 1), dtype="<f2", offset=0, result_shape=(0, 0), result_dtype="",
        result_offset=-1, arrived_ns=arrived, compute_ns=7,
    )  # fmt: skip
    return Recorded(record, np.full((1, 1), arrived, np.float16), None)


def test_captures_are_cut_at_passes() -> None:
    recorded = [recorded_offload(w, step, 10 * step + i) for step in range(3) for i, w in enumerate("ab")]
    captures = build_captures(recorded, {"a": (0, "qkv"), "b": (-1, "lm_head")}, [(0, 1), (4, 2)])
    assert [c.prompt for c in captures] == [0, 4]
    keys = [[(o.forward, o.layer, o.op, o.arrived_ns) for o in c.offloads] for c in captures]
    assert keys[0] == [(0, 0, "qkv", 0), (0, -1, "lm_head", 1)]
    # Times count from the capture's own first offload.
    assert keys[1] == [(0, 0, "qkv", 0), (0, -1, "lm_head", 1), (1, 0, "qkv", 10), (1, -1, "lm_head", 11)]
    with pytest.raises(CaptureError, match="3 passes"):
        build_captures(recorded, {"a": (0, "qkv"), "b": (0, "o")}, [(0, 2)])


# --- the store -------------------------------------------------------------------------------------------


def test_captures_and_truth_come_back(tmp_path: Path) -> None:
    operand = RNG.integers(0, 1 << 32, (4, 6), dtype=np.uint32)
    offloads = (
        Offload(forward=0, layer=2, op="down", operand=operand, arrived_ns=0, compute_ns=5),
        Offload(forward=1, layer=-1, op="lm_head", operand=(operand >> 20).astype(np.float16),
                result=np.ones((4, 2), np.float32), arrived_ns=9, compute_ns=6),
    )  # fmt: skip
    store.write_captures(tmp_path / "captures", [Capture(prompt=3, offloads=offloads)], {"seed": 1})
    (read,), record = store.read_captures(tmp_path / "captures")
    assert record == {"seed": 1}
    assert read.prompt == 3
    for got, expected in zip(read.offloads, offloads, strict=True):
        assert got.operand.dtype == expected.operand.dtype
        assert np.array_equal(got.operand, expected.operand)
        assert (got.result is None) == (expected.result is None)
        fields = ("forward", "layer", "op", "arrived_ns", "compute_ns")
        assert [getattr(got, f) for f in fields] == [getattr(expected, f) for f in fields]
    rows = {(0, 2, "down"): RNG.standard_normal((2, 6)).astype(np.float32)}
    truth = PromptTruth(prompt=3, text="a b", tokens=((1, 2), (3,)), prompt_lengths=(1, 1), rows=rows)
    store.write_truth(tmp_path / "truth", Truth(prompts=[truth]))
    (back,) = store.read_truth(tmp_path / "truth").prompts
    assert (back.prompt, back.text, back.tokens) == (3, "a b", ((1, 2), (3,)))
    assert back.prompt_lengths == (1, 1)
    assert np.array_equal(back.rows[0, 2, "down"], rows[0, 2, "down"])


def test_captures_and_truth_are_not_mixed(tmp_path: Path) -> None:
    store.write_captures(tmp_path, [])
    with pytest.raises(StoreError, match="not empty"):
        store.write_truth(tmp_path, Truth(prompts=[]))
    with pytest.raises(StoreError, match="truth"):
        store.read_truth(tmp_path)
    with pytest.raises(StoreError, match="holds no captures"):
        store.read_captures(tmp_path / "elsewhere")


def test_a_capture_is_built_without_the_runner() -> None:
    """What makes captures is given the worker's files, public places and counts, and nothing else."""
    assert list(inspect.signature(build_captures).parameters) == ["recorded", "places", "passes"]
    assert list(inspect.signature(store.read_recording).parameters) == ["session"]


# --- with the real model and a real worker ---------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def worker() -> Iterator[RecordingWorker]:
    with recording_worker() as started:
        yield started


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> Corpus:
    return corpus("short", 2, model.tokenizer, 11)


@pytest.fixture(scope="module")
def batches(model: LoadedModel) -> Corpus:
    return replace(corpus("decode", 1, model.tokenizer, 11).with_batch(2), steps=2)


def outside(rows: np.ndarray, operand: np.ndarray) -> np.ndarray:
    """What of each row, as a fraction of its norm, lies outside an operand's row space."""
    basis = np.linalg.qr(operand.astype(np.float64).T)[0]
    exact = rows.astype(np.float64)
    left: np.ndarray = np.linalg.norm(exact - exact @ basis @ basis.T, axis=1) / np.linalg.norm(exact, axis=1)
    return left


def rounding(rows: np.ndarray, shield_rows: int, energy: float) -> float:
    """Root mean square error that float16 leaves in an unmixed row, relative to the smallest row.

    A value is off by 2⁻¹² of itself at the most on average, independently, and an orthogonal mask
    spreads that evenly over the rows.
    """
    norms = np.linalg.norm(rows * power_of_two_scales(rows)[:, None], axis=1)
    total = (norms**2).sum() + shield_rows * (energy * norms.mean()) ** 2
    return float(2.0**-12 * np.sqrt(total / (len(rows) + shield_rows)) / norms.min())


@pytest.mark.model
@pytest.mark.e2e
class TestRealModel:
    def test_plain_operands_are_the_rows(
        self, model: LoadedModel, worker: RecordingWorker, prompts: Corpus
    ) -> None:
        captures, truth = capture(model, CONDITIONS["c0"], prompts, worker=worker, results=True)
        assert [c.prompt for c in captures] == [p.prompt for p in truth.prompts] == [0, 1]
        places = CONDITIONS["c0"].places(model.config.num_layers, "short")
        specs = {place: i for i, place in enumerate(weight_places(model.weights).values())}
        weights = list(model.weights.linears())
        for captured, secret, prompt in zip(captures, truth.prompts, prompts.prompts, strict=True):
            assert secret.text == prompt.text
            assert secret.tokens[0] == prompt.tokens
            assert [(o.forward, o.layer, o.op) for o in captured.offloads] == [(0, *p) for p in places]
            for offload in captured.offloads:
                rows = secret.rows[offload.forward, offload.layer, offload.op].astype(np.float64)
                assert len(rows) == (1 if offload.op == "lm_head" else len(prompt.tokens))
                scaled = rows * power_of_two_scales(rows)[:, None]
                # Below 2⁻¹⁴ float16 has a fixed step.
                bound = np.maximum(np.abs(scaled) * HALF_ROUNDING, 2.0**-25)
                assert (np.abs(offload.operand - scaled) <= bound).all()
                assert offload.result is not None
                weight = weights[specs[offload.layer, offload.op]].load().astype(np.float32)
                product = offload.operand.astype(np.float32) @ weight.T
                assert np.allclose(offload.result, product, rtol=1e-3, atol=1e-3 * np.abs(product).max())
            arrived = [o.arrived_ns for o in captured.offloads]
            assert arrived[0] == 0
            assert arrived == sorted(arrived)
            assert all(o.compute_ns > 0 for o in captured.offloads)

    def test_the_plaintext_is_the_public_model_s(
        self, model: LoadedModel, worker: RecordingWorker, prompts: Corpus
    ) -> None:
        """The truth belongs to its prompt: anyone who knows the prompt computes the same rows."""
        _, truth = capture(model, CONDITIONS["c0"], prompts, worker=worker)
        public = PublicModel(model.config, model.weights)
        expected = public.rows([p.tokens for p in prompts.prompts])
        for secret, rows in zip(truth.prompts, expected, strict=True):
            for (_, layer, op), noted in secret.rows.items():
                exact = rows[layer, op][-len(noted) :]
                # Operands are rounded to float16 on the way, layer by layer.
                assert np.linalg.norm(noted - exact) < 0.02 * np.linalg.norm(exact)

    @pytest.mark.parametrize("name", ["c2", "paper-14"])
    def test_masked_operands_span_the_rows(
        self, model: LoadedModel, worker: RecordingWorker, prompts: Corpus, name: str
    ) -> None:
        condition = CONDITIONS[name]
        captures, truth = capture(model, condition, prompts, worker=worker)
        places = condition.places(model.config.num_layers, "short")
        for captured, secret, other in zip(captures, truth.prompts, truth.prompts[::-1], strict=True):
            assert [(o.layer, o.op) for o in captured.offloads] == list(places)
            assert set(secret.rows) == {(o.forward, o.layer, o.op) for o in captured.offloads}
            for offload in captured.offloads:
                rows = secret.rows[offload.forward, offload.layer, offload.op]
                assert len(offload.operand) == condition.base.operand_rows([len(rows)])
                energy = float(condition.public_parameters()["shield_energy"])
                bound = 4.0 * rounding(rows, len(offload.operand) - len(rows), energy)
                assert outside(rows, offload.operand).max() < bound
                # The other prompt's rows do not lie in it, nor is any row there in clear.
                strange = other.rows[offload.forward, offload.layer, offload.op]
                assert np.median(outside(strange, offload.operand)) > 10 * bound
                units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
                mixed = offload.operand.astype(np.float64)
                mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
                assert np.abs(mixed @ units.T).max() < 0.98

    def test_layers_in_the_runner_are_not_on_the_wire(
        self, model: LoadedModel, worker: RecordingWorker, prompts: Corpus
    ) -> None:
        everything = list(weight_places(model.weights).values())
        captures, truth = capture(model, CONDITIONS["paper-14"], prompts, worker=worker, places=everything)
        for captured, secret in zip(captures, truth.prompts, strict=True):
            layers = {o.layer for o in captured.offloads}
            assert layers == set(range(2, model.config.num_layers - 1))
            assert {layer for _, layer, _ in secret.rows} == layers

    def test_two_sequences_decode_under_one_mask(
        self, model: LoadedModel, worker: RecordingWorker, batches: Corpus
    ) -> None:
        condition = Condition(
            name="shared", title="", scheme="gelo-haar", masks=MaskOptions(shared_decode=True)
        )
        (captured,), truth = capture(model, condition, batches, worker=worker)
        (secret,) = truth.prompts
        assert secret.prompt_lengths == tuple(len(batches.prompts[i].tokens) for i in batches.runs[0])
        for tokens, length in zip(secret.tokens, secret.prompt_lengths, strict=True):
            assert len(tokens) == length + 1 + batches.steps
        for offload in captured.offloads:
            rows = secret.rows[offload.forward, offload.layer, offload.op]
            if offload.forward:
                assert offload.operand.shape[0] == 2 + 8
                assert outside(rows, offload.operand).max() < 0.01
            elif offload.op != "lm_head":
                # A block per prompt, end to end.
                place = row = 0
                for n in secret.prompt_lengths:
                    block = offload.operand[place : place + n + 8]
                    assert outside(rows[row : row + n], block).max() < 0.01
                    row, place = row + n, place + n + 8
                assert place == len(offload.operand)
        assert {o.forward for o in captured.offloads} == {0, 1, 2}
        first = secret.rows[1, 0, "qkv"]
        dictionary = PublicModel(model.config, model.weights).dictionary
        generated = [t[n] for t, n in zip(secret.tokens, secret.prompt_lengths, strict=True)]
        assert np.allclose(first, dictionary[generated], rtol=1e-4, atol=1e-4)

    def test_a_rerun_gives_the_same_captures(
        self, model: LoadedModel, worker: RecordingWorker, prompts: Corpus
    ) -> None:
        twice = replace(prompts, runs=((0,), (0,)))
        (first, fresh), truth = capture(model, CONDITIONS["c2"], twice, worker=worker, seed=1)
        (again, _), _ = capture(model, CONDITIONS["c2"], twice, worker=worker, seed=1)
        (other, _), _ = capture(model, CONDITIONS["c2"], twice, worker=worker, seed=2)
        assert [p.prompt for p in truth.prompts] == [0, 0]
        for a, b, c, d in zip(*(x.offloads for x in (first, again, other, fresh)), strict=True):
            assert np.array_equal(a.operand, b.operand)
            assert not np.array_equal(a.operand, c.operand)
            # The same text again in one capture run has fresh masks.
            assert not np.array_equal(a.operand, d.operand)

    def test_nothing_of_the_runner_is_in_a_capture(
        self, model: LoadedModel, prompts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The captures are those that the worker's files alone give, to someone with the weights."""
        kept = tmp_path / "kept"
        remove = shutil.rmtree

        def keep_a_copy(path: Path) -> None:
            shutil.copytree(path, kept)
            remove(path)

        (tmp_path / "live").mkdir()
        with recording_worker(tmp_path / "live") as worker:
            monkeypatch.setattr("evals.attacks.capture.shutil.rmtree", keep_a_copy)
            captures, _ = capture(model, CONDITIONS["c2"], prompts, worker=worker)
        rebuilt = build_captures(
            store.read_recording(kept), weight_places(model.weights), [(i, 1) for i in range(2)]
        )
        for a, b in zip(captures, rebuilt, strict=True):
            assert len(a.offloads) == len(b.offloads) > 0
            for x, y in zip(a.offloads, b.offloads, strict=True):
                assert (x.forward, x.layer, x.op, x.arrived_ns) == (y.forward, y.layer, y.op, y.arrived_ns)
                assert x.operand.tobytes() == y.operand.tobytes()
        # And the files hold what the process that wrote them had: no text, no token ids.
        data = b"".join(file.read_bytes() for file in sorted(kept.iterdir()))
        for prompt in prompts.prompts:
            assert prompt.text.encode() not in data
            for dtype in (np.int32, np.int64):
                assert np.asarray(prompt.tokens, dtype).tobytes() not in data

    def test_the_record_says_how(self, model: LoadedModel, prompts: Corpus) -> None:
        record = json.loads(json.dumps(provenance(model, CONDITIONS["c5"], prompts, 3)))
        assert record["seed"] == 3
        assert record["corpus"]["seed"] == 11
        assert record["parameters"]["shared_decode"] == 1
        assert record["model"]["identity"] == model.identity.hex()
        assert {"python", "numpy", "gelo-llm"} <= set(record["versions"])
        public = PublicModel(model.config, model.weights)
        seen = view(CONDITIONS["c5"], prompts, [], public)
        assert (seen.condition, seen.scheme, seen.corpus) == ("c5", "gelo-hd3", "short")

    def test_weights_are_known_by_their_digest(self, model: LoadedModel) -> None:
        places = weight_places(model.weights)
        assert len(places) == 4 * model.config.num_layers + 1
        first = hashlib.sha256(np.ascontiguousarray(model.weights.layers[0].qkv.load()).tobytes()).hexdigest()
        assert places[first] == (0, "qkv")
