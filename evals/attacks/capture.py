"""Captures: a corpus run under a condition, against a worker that writes down what it is sent.

The worker is a process of its own on the same wire as in service. What an attacker gets,
:func:`build_captures`, is made of that process's files and of public facts; what is kept for scoring is
noted in the runner, and the two meet nowhere else.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from evals.attacks.conditions import Condition, Place
from evals.attacks.corpus import Corpus
from evals.attacks.model import HEAD_LAYER, OPS, Capture, Offload, Op, PromptTruth, Report, Truth, View
from evals.attacks.public import PublicModel
from evals.attacks.store import Recorded, read_recording
from evals.attacks.worker_process import CaptureError, RecordingWorker, recording_worker
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.decoder.weights import DecoderWeights
from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.models import LoadedModel
from tee_runner.protection.base import (
    HALF_BYTES,
    Float32,
    ForwardSession,
    Linear,
    MaskOptions,
    Protection,
    SchemeOptions,
)
from tee_runner.protection.plain import Plain
from tee_runner.protection.rng import SecretKey
from tee_runner.protection.schemes import SCHEMES
from tee_runner.worker.transport import Transport

__all__ = [
    "CaptureError",
    "RecordingWorker",
    "build_captures",
    "capture",
    "provenance",
    "recording_worker",
    "view",
    "weight_places",
]

_ATTACKED: Final = "under attack"

Key = tuple[int, int, Op]


def capture(
    model: LoadedModel,
    condition: Condition,
    corpus: Corpus,
    *,
    seed: int = 0,
    results: bool = False,
    places: Sequence[Place] | None = None,
    known: Mapping[str, Place] | None = None,
    worker: RecordingWorker | None = None,
    progress: Report = lambda fraction: None,
) -> tuple[list[Capture], Truth]:
    """Run ``corpus`` under ``condition``: what the worker saw, one capture per run, and the secrets.

    ``places`` are recorded (default: :meth:`Condition.places`), with ``results`` the products too.
    ``known``: :func:`weight_places` of the model with weights of float16, if it was made before.
    ``seed`` fixes the secrets of the scheme, so that a rerun gives the same captures. A ``worker`` that
    runs already saves its start and the upload of weights. ``progress`` takes the fraction done.

    Every prompt is prefilled in one pass, whatever its length. Without decode steps, a pass ends with
    the last place that is recorded. Results are not checked.

    Raises:
        CaptureError: the worker does not start, or saw something other than what was run.
        WorkerError: it failed.
    """
    if worker is None:
        with recording_worker() as started:
            return capture(
                model, condition, corpus, seed=seed, results=results, places=places, known=known,
                worker=started, progress=progress,
            )  # fmt: skip
    if condition.batches is not None:
        corpus = corpus.with_batch(*condition.batches)
    if places is None:
        places = condition.places(model.config.num_layers, corpus.name)
    if known is None or condition.base.operand_item_bytes != HALF_BYTES:
        known = weight_places(model.weights, condition.base)
    named = {digest: place for digest, place in known.items() if place in set(places)}
    observer = _Observer(wanted=frozenset(places), passes_end=not corpus.steps)
    key = hashlib.sha256(f"attacks/{condition.name}/{corpus.name}/{seed}".encode()).digest()
    scheme = condition.protection(lambda base: _observed(base, key, observer))
    runtime = _runtime(model, condition, corpus, scheme, worker)
    numbers = _numbers(corpus.runs)
    prompts = []
    try:
        if scheme.provision_rows:
            # What is made with the worker's help once per model is no secret and no part of a pass: a
            # second session finds it made.
            worker.record([], results=False)
            runtime.connect()
            runtime.disconnect()
        worker.record(list(named), results=results)
        before = set(worker.sessions())
        runtime.connect()
        for done, (number, run) in enumerate(zip(numbers, corpus.runs, strict=True)):
            observer.start()
            tokens = _run(runtime, [corpus.prompts[i].tokens for i in run], corpus.steps, observer)
            prompts.append(
                PromptTruth(
                    prompt=number,
                    text="\n".join(corpus.prompts[i].text for i in run),
                    tokens=tokens,
                    prompt_lengths=tuple(len(corpus.prompts[i].tokens) for i in run),
                    rows=observer.rows,
                )
            )
            progress((done + 1) / len(corpus.runs))
    finally:
        runtime.close()
    session, *more = set(worker.sessions()) - before
    if more:
        raise CaptureError("the worker lost its session on the way")
    passes = [(number, 1 + corpus.steps) for number in numbers]
    captures = build_captures(read_recording(session), named, passes)
    shutil.rmtree(session)
    _check_same(captures, prompts)
    return captures, Truth(prompts=prompts)


def build_captures(
    recorded: Sequence[Recorded], places: Mapping[str, Place], passes: Sequence[tuple[int, int]]
) -> list[Capture]:
    """Captures from what the worker wrote.

    ``places`` gives layer and op of the public weights by digest. ``passes`` gives, for each capture, the
    number of its prompt and of its forward passes.

    Raises:
        CaptureError: there are more or fewer passes in the recording.
    """
    total = sum(count for _, count in passes)
    steps = {r.record.step for r in recorded}
    if steps and steps != set(range(total)):
        raise CaptureError(f"the worker recorded {len(steps)} passes, {total} were run")
    by_step: dict[int, list[Recorded]] = {}
    for item in recorded:
        by_step.setdefault(item.record.step, []).append(item)
    captures = []
    step = 0
    for prompt, count in passes:
        own = [(forward, r) for forward in range(count) for r in by_step.get(step + forward, ())]
        begin = own[0][1].record.arrived_ns if own else 0
        offloads = tuple(
            Offload(
                forward=forward,
                layer=places[r.record.weight][0],
                op=places[r.record.weight][1],
                operand=r.operand,
                result=r.result,
                arrived_ns=r.record.arrived_ns - begin,
                compute_ns=r.record.compute_ns,
            )
            for forward, r in own
        )
        captures.append(Capture(prompt=prompt, offloads=offloads))
        step += count
    return captures


def weight_places(weights: DecoderWeights, scheme: type[Protection] = Plain) -> dict[str, Place]:
    """Layer and op of every public weight, by the SHA-256 (hexadecimal) under which the worker knows it.

    ``scheme`` says how the worker gets them: as float16, or as integers.
    """
    places: dict[str, Place] = {}
    for index, spec in enumerate(weights.linears()):
        values = np.ascontiguousarray(scheme.wire_weight(spec.load(), SchemeOptions()))
        place = _place(index, 4 * len(weights.layers))
        places[hashlib.sha256(values.view(np.uint8).data).hexdigest()] = place
    return places


def view(condition: Condition, corpus: Corpus, captures: Sequence[Capture], model: PublicModel) -> View:
    """What an attacker of ``condition`` has."""
    return View(
        condition=condition.name,
        scheme=condition.base.name,
        parameters=condition.public_parameters(),
        corpus=corpus.name,
        captures=captures,
        model=model,
    )


def provenance(model: LoadedModel, condition: Condition, corpus: Corpus, seed: int) -> dict[str, Any]:
    """Seeds and versions behind a capture, for :func:`evals.attacks.store.write_captures`."""
    return {
        "condition": condition.name,
        "scheme": condition.base.name,
        "parameters": condition.public_parameters(),
        "masks": asdict(condition.masks),
        "seed": seed,
        "corpus": {"name": corpus.name, "seed": corpus.seed, **corpus.settings, "runs": len(corpus.runs)},
        "model": {"name": model.directory.name, "identity": model.identity.hex()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("gelo-llm", "numpy", "numba", "scipy")},
        },
    }


# --- the runner ---------------------------------------------------------------------------------------------


class _PassOver(Exception):  # noqa: N818 - ends a pass early, not an error
    """Nothing behind this offload is recorded."""


@dataclass(slots=True)
class _Observer:
    """Notes plaintext rows of the offloads ``wanted``; with ``passes_end`` stops after the last one."""

    wanted: frozenset[Place]
    passes_end: bool
    forward: int = 0
    rows: dict[Key, Float32] = field(default_factory=dict)
    _left: set[Place] = field(default_factory=set)

    def start(self) -> None:
        """Another capture begins."""
        self.forward = -1
        self.rows = {}

    def start_pass(self) -> None:
        """A pass begins."""
        self.forward += 1
        self._left = set(self.wanted)

    def note(self, place: Place, rows: Float32) -> None:
        """An offload is about to be protected."""
        if place in self._left:
            self._left.discard(place)
            self.rows[self.forward, *place] = rows.copy()

    def finished(self) -> None:
        """An offload is done.

        Raises:
            _PassOver: it was the last one wanted.
        """
        if self.passes_end and not self._left:
            raise _PassOver


class _Observed(ForwardSession):
    def __init__(self, inner: ForwardSession, observer: _Observer, head: int) -> None:
        self._inner, self._observer, self._head = inner, observer, head

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        self._observer.note(_place(weight.weight_id, self._head), rows)
        self._inner.linear(weight, rows, counts, out)
        self._observer.finished()

    def wipe(self) -> None:
        self._inner.wipe()


def _place(index: int, head: int) -> Place:
    """Layer and op of weight ``index`` of a pass; ``head`` is the LM head's."""
    return (HEAD_LAYER, "lm_head") if index == head else (index // 4, OPS[index % 4])


def _observed(base: type[Protection], key: bytes, observer: _Observer) -> type[Protection]:
    """``base``, with a fixed key if it takes one, and its plaintext noted."""
    keyed = "key" in inspect.signature(base).parameters

    class Observed(base):  # type: ignore[misc, valid-type]
        def __init__(self, transport: Transport, *, masks: MaskOptions | None = None) -> None:
            options = {"key": SecretKey(key)} if keyed else {}
            super().__init__(transport, masks=masks, **options)

        def provision(self, weights: Sequence[Linear], *, probes: int = 0) -> None:
            super().provision(weights, probes=probes)
            self._observed_head = weights[-1].weight_id

        def forward_session(self) -> ForwardSession:
            return _Observed(super().forward_session(), observer, self._observed_head)

    return Observed


def _runtime(
    model: LoadedModel,
    condition: Condition,
    corpus: Corpus,
    scheme: type[Protection],
    worker: RecordingWorker,
) -> Runtime:
    lengths = [[len(corpus.prompts[i].tokens) for i in run] for run in corpus.runs]
    if not lengths:
        raise CaptureError(f"the corpus {corpus.name} has no runs for {condition.name}")
    SCHEMES[_ATTACKED] = scheme
    try:
        options = RuntimeOptions(
            worker=worker.address,
            protection=_ATTACKED,
            max_sequences=max(len(run) for run in lengths),
            max_len=max(max(run) for run in lengths) + corpus.steps,
            # As many data rows as the largest operand has rows at all.
            step_rows=max(scheme.operand_rows(run) for run in lengths),
            integrity_probes=0,
            masks=condition.masks,
        )
        return Runtime(model, options)
    finally:
        del SCHEMES[_ATTACKED]


def _run(
    runtime: Runtime, prompts: Sequence[Sequence[int]], steps: int, observer: _Observer
) -> tuple[tuple[int, ...], ...]:
    """Prefill ``prompts`` as one ragged batch, then decode greedily. Returns all tokens of each."""
    tokens = [list(prompt) for prompt in prompts]
    slots = [runtime.cache.take() for _ in prompts]
    try:
        pending = tokens
        for _ in range(1 + steps):
            observer.start_pass()
            batch = RaggedBatch(
                tokens=np.concatenate([np.asarray(t, dtype=np.int64) for t in pending]),
                slots=slots,
                counts=[len(t) for t in pending],
                sampled=[1] * len(pending),
            )
            try:
                logits: NDArray[np.float32] = runtime.forward(batch)
            except _PassOver:
                break
            pending = [[int(token)] for token in logits.argmax(axis=1)]
            tokens = [t + new for t, new in zip(tokens, pending, strict=True)]
    finally:
        for slot in slots:
            runtime.cache.release(slot)
    return tuple(tuple(t) for t in tokens)


def _numbers(runs: Sequence[tuple[int, ...]]) -> list[int]:
    """A number for each run, the same for runs of the same prompts."""
    known: dict[tuple[int, ...], int] = {}
    return [known.setdefault(run, len(known)) for run in runs]


def _check_same(captures: Sequence[Capture], prompts: Sequence[PromptTruth]) -> None:
    """Captures and truth are of the same offloads.

    Raises:
        CaptureError: the worker missed an offload, or saw one that was not run.
    """
    for captured, truth in zip(captures, prompts, strict=True):
        if [(o.forward, o.layer, o.op) for o in captured.offloads] != list(truth.rows):
            raise CaptureError("the worker recorded other offloads than those that were run")
