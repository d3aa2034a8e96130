"""One request while it is being served."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tee_runner.engine.sampling import Sampler, SamplingParams
from tee_runner.errors import GeloError
from tee_runner.hardening import where

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "error"]


class TextDecoder(Protocol):
    """Turns token ids into text as they come."""

    def push(self, token_id: int) -> str:
        """The text that has become certain."""

    def finish(self) -> str:
        """What was held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token. ``text`` may be empty while a character or stop string is incomplete."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent:
    """The end. ``text`` is what was held back; ``error`` is set for reason ``error``."""

    reason: FinishReason
    text: str
    prompt_tokens: int
    completion_tokens: int
    error: GeloError | None = None


Event = TokenEvent | FinishEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """``prompt`` holds token ids; ``stop`` strings end the answer and are not part of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Sequence:
    """State of a request in the scheduler. Events go to ``sink`` from the engine's thread."""

    def __init__(
        self, request: GenerationRequest, decoder: TextDecoder, sink: Callable[[Event], None]
    ) -> None:
        self.request = request
        self.sampler = Sampler(request.sampling)
        self.slot: int | None = None
        self.pending: list[int] = list(request.prompt)
        self.generated = 0
        self.cancelled = threading.Event()
        self._decoder = decoder
        self._sink = sink
        self._held = ""

    def cancel(self) -> None:
        """Stop at the next step. Any thread may call this."""
        self.cancelled.set()

    def accept(self, token: int, eos_ids: frozenset[int]) -> bool:
        """Take a sampled token; returns whether the sequence is finished (and was told so)."""
        self.generated += 1
        if token in eos_ids and not self.request.ignore_eos:
            self.finish("stop")
            return True
        text, stopped = self._release(self._decoder.push(token))
        self._emit(TokenEvent(token_id=token, text=text))
        if stopped:
            self._held = ""
            self.finish("stop", flush=False)
            return True
        if self.generated >= self.request.max_tokens:
            self.finish("length")
            return True
        self.pending = [token]
        return False

    def finish(self, reason: FinishReason, *, flush: bool = True, error: GeloError | None = None) -> None:
        """Report the end."""
        text = ""
        if flush and reason != "error":
            text, stopped = self._release(self._decoder.finish())
            if stopped and reason == "length":
                reason = "stop"
            text += "" if stopped else self._held
        self._emit(
            FinishEvent(
                reason=reason,
                text=text,
                prompt_tokens=len(self.request.prompt),
                completion_tokens=self.generated,
                error=error,
            )
        )

    def _emit(self, event: Event) -> None:
        """Hand over an event. A receiver that fails loses its request, not the engine."""
        try:
            self._sink(event)
        except Exception as error:
            log.error("a receiver failed: %s", where(error))
            self.cancel()

    def _release(self, text: str) -> tuple[str, bool]:
        """Add text; returns what can be shown, and whether a stop string was met."""
        text = self._held + text
        # The stop string that is complete first, whatever the chunks; the longest of several.
        stops = [(place + len(stop), place) for stop in self.request.stop if (place := text.find(stop)) >= 0]
        if stops:
            return text[: min(stops)[1]], True
        keep = max((_overlap(text, stop) for stop in self.request.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
