"""Streaming an answer from a verified service."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from gelo_cli.console import CliError

_TIMEOUT = httpx.Timeout(600.0, connect=20.0)
_EVENT_PREFIX = "data: "


@dataclass(slots=True)
class Timing:
    """Arrival times of one answer, in seconds since the request was sent."""

    started: float = field(default_factory=time.perf_counter)
    tokens: list[float] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.tokens[0] if self.tokens else float("nan")

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first, seconds."""
        if len(self.tokens) < 2:
            return float("nan")
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


def stream(client: httpx.Client, body: dict[str, Any], timing: Timing) -> Iterator[str]:
    """The pieces of the answer as they come.

    Raises:
        CliError: the service refused or failed; its own words.
    """
    timing.started = time.perf_counter()
    with client.stream("POST", "/generate", json={**body, "stream": True}, timeout=_TIMEOUT) as response:
        if response.status_code != 200:
            response.read()
            raise _refusal(response.text)
        for line in response.iter_lines():
            if not line.startswith(_EVENT_PREFIX):
                continue
            event = json.loads(line.removeprefix(_EVENT_PREFIX))
            if event["type"] == "error":
                raise _refusal(json.dumps(event))
            if event["type"] == "done":
                timing.done = event
            else:
                timing.tokens.append(time.perf_counter() - timing.started)
            yield event["text"]
    if not timing.done:
        raise CliError("The service ended the stream before the answer was complete.")


def _refusal(text: str) -> CliError:
    try:
        error = json.loads(text)["error"]
        return CliError(str(error["message"]), remedy=str(error.get("remedy", "")))
    except (ValueError, KeyError, TypeError):
        return CliError("The service answered with an error that cannot be read.")
