"""Continuous batching: every step runs all decoding sequences and as much prompt as fits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime
from tee_runner.engine.sequence import Event, GenerationRequest, Sequence
from tee_runner.errors import CapacityError, GeloError, InvalidRequestError
from tee_runner.hardening import where

log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.5


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; gauges of now. Nothing about any one request."""

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0


class Scheduler:
    """Owns a runtime and the thread that drives it."""

    def __init__(self, runtime: Runtime, *, queue_limit: int = 64) -> None:
        self.runtime = runtime
        self.stats = EngineStats()
        self._queue_limit = queue_limit
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._change = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="gelo-engine", daemon=True)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """Finish every request with reason ``cancelled`` and end the thread."""
        with self._change:
            self._stopping = True
            self._change.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: GenerationRequest, sink: Callable[[Event], None]) -> Sequence:
        """Queue a request; its events go to ``sink`` from the engine's thread.

        Raises:
            InvalidRequestError: it cannot be served as it stands.
            CapacityError: the queue is full.
        """
        self._check(request)
        decoder = self.runtime.model.tokenizer.incremental_decoder()
        sequence = Sequence(request, decoder, sink)
        with self._change:
            if self._stopping:
                raise CapacityError("The service is shutting down.")
            if len(self._waiting) >= self._queue_limit:
                raise CapacityError("The queue is full.", remedy="Try again in a while.")
            self._waiting.append(sequence)
            self.stats.requests += 1
            self.stats.waiting = len(self._waiting)
            self._change.notify()
        return sequence

    def _check(self, request: GenerationRequest) -> None:
        limit = self.runtime.max_len
        prompt = len(request.prompt)
        if prompt == 0:
            raise InvalidRequestError("The prompt is empty.")
        # Here, where it concerns one request, and not in a pass, where it would fail all.
        if min(request.prompt) < 0 or max(request.prompt) >= self.runtime.model.config.vocab_size:
            raise InvalidRequestError("The prompt holds a token that the model does not know.")
        if request.max_tokens < 1:
            raise InvalidRequestError("max_tokens must be at least 1.")
        if prompt + request.max_tokens > limit:
            raise InvalidRequestError(
                f"The prompt's {prompt} tokens and max_tokens {request.max_tokens} exceed the context "
                f"of {limit}.",
                remedy="Shorten the prompt, or ask for fewer tokens.",
            )

    def _loop(self) -> None:
        while True:
            with self._change:
                while not self._stopping and not self._waiting and not self._running:
                    if not self.runtime.idle():
                        self._change.wait(_IDLE_POLL_S)
                if self._stopping:
                    break
            try:
                self._admit()
                if self._running:
                    self._step()
            except Exception as error:
                # The thread must live on: without it every later request would hang.
                log.error("the engine failed: %s", where(error))
                self._fail(GeloError("The step failed inside the runner.", remedy="See its log."))
        for sequence in [*self._running, *self._waiting]:
            self._end(sequence)
            sequence.finish("cancelled")

    def _admit(self) -> None:
        for sequence in [s for s in self._running if s.cancelled.is_set()]:
            self._retire(sequence)
            sequence.finish("cancelled")
        with self._change:
            for sequence in [s for s in self._waiting if s.cancelled.is_set()]:
                self._waiting.remove(sequence)
                sequence.finish("cancelled")
            while self._waiting and self.runtime.cache.free_slots:
                sequence = self._waiting.popleft()
                sequence.slot = self.runtime.cache.take()
                self._running.append(sequence)
            self.stats.waiting = len(self._waiting)
            self.stats.running = len(self._running)

    def _step(self) -> None:
        chosen = self._choose()
        batch = RaggedBatch(
            tokens=np.concatenate([np.asarray(s.pending[:count], dtype=np.int64) for s, count in chosen]),
            slots=[s.slot for s, _ in chosen if s.slot is not None],
            counts=[count for _, count in chosen],
            sampled=[int(count == len(s.pending)) for s, count in chosen],
        )
        started = time.perf_counter()
        try:
            logits = self.runtime.forward(batch)
        except GeloError as error:
            self._fail(error)
            return
        except Exception as error:
            log.error("a forward pass failed: %s", where(error))
            self._fail(GeloError("The forward pass failed inside the runner.", remedy="See its log."))
            return
        self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - started
        row = 0
        for sequence, count in chosen:
            if count < len(sequence.pending):
                del sequence.pending[:count]
                continue
            if sequence.generated == 0:
                self.stats.prompt_tokens += len(sequence.request.prompt)
            begin = time.perf_counter_ns()
            token = sequence.sampler.sample(logits[row])
            self.runtime.profile.add("sampling", time.perf_counter_ns() - begin)
            row += 1
            self.stats.generated_tokens += 1
            try:
                finished = sequence.accept(token, self.runtime.model.eos_ids)
            except Exception as error:
                log.error("a token could not be turned into text: %s", where(error))
                self.stats.failures += 1
                self._retire(sequence)
                failure = GeloError("The answer's text could not be decoded.", remedy="See the runner's log.")
                sequence.finish("error", error=failure)
                continue
            if finished:
                self._retire(sequence)

    def _choose(self) -> list[tuple[Sequence, int]]:
        """Sequences of this step with their row counts: all that decode, then prompts in order."""
        runtime = self.runtime
        decoding = [s for s in self._running if len(s.pending) == 1]
        prompts = [s for s in self._running if len(s.pending) > 1]
        chosen = [(s, 1) for s in decoding]
        room = runtime.options.step_rows
        for sequence in prompts:
            count = min(len(sequence.pending), room)
            counts = [c for _, c in chosen]
            while count > 1 and runtime.operand_rows([*counts, count]) > runtime.max_operand_rows:
                count //= 2
            if count < 1 or runtime.operand_rows([*counts, count]) > runtime.max_operand_rows:
                break
            chosen.append((sequence, count))
            room -= count
        return chosen

    def _fail(self, error: GeloError) -> None:
        log.error("requests failed: %s (%s)", error.code, type(error).__name__)
        for sequence in list(self._running):
            self.stats.failures += 1
            self._retire(sequence)
            sequence.finish("error", error=error)

    def _retire(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.stats.running = len(self._running)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self.runtime.cache.release(sequence.slot)
            sequence.slot = None
