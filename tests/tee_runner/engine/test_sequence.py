"""Stop strings, lengths and events of one request, whatever the chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tee_runner.engine.sequence import Event, FinishEvent, GenerationRequest, Sequence, TokenEvent

EOS = 99
NO_EOS: frozenset[int] = frozenset()


class Chunks:
    """A text decoder that gives out one chunk per token and a rest at the end."""

    def __init__(self, chunks: list[str], rest: str = "") -> None:
        self._chunks = list(chunks)
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._chunks.pop(0)

    def finish(self) -> str:
        rest, self._rest = self._rest, ""
        return rest


def play(
    chunks: list[str], stop: tuple[str, ...] = (), rest: str = "", max_tokens: int | None = None
) -> tuple[str, FinishEvent, list[Event]]:
    """The text shown, the end, and all events of a sequence that is fed every chunk."""
    events: list[Event] = []
    request = GenerationRequest(prompt=(1, 2, 3), max_tokens=max_tokens or len(chunks), stop=stop)
    sequence = Sequence(request, Chunks(chunks, rest), events.append)
    for token in range(len(chunks)):
        if sequence.accept(token, NO_EOS):
            break
    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert all(isinstance(event, TokenEvent) for event in events[:-1])
    return "".join(event.text for event in events), end, events


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the stop string that is complete first (the longest of several), if any."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


SMALL = st.text("ab", max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=400, deadline=None)
@given(chunks=st.lists(SMALL, min_size=1, max_size=10), stops=STOPS, rest=SMALL)
@example(chunks=["abc", "d"], stops=("bc", "abcd"), rest="")
@example(chunks=["abcd"], stops=("bc", "abcd"), rest="")
@example(chunks=["a", "a", "b"], stops=("aab",), rest="")
@example(chunks=["aa", "ab"], stops=("aab",), rest="")
@example(chunks=["a"], stops=("ab",), rest="b")
def test_output_is_the_text_up_to_the_first_stop(
    chunks: list[str], stops: tuple[str, ...], rest: str
) -> None:
    shown, end, _ = play(chunks, stops, rest)
    expected, met = cut("".join(chunks) + rest, stops)
    assert shown == expected
    assert not any(stop in shown for stop in stops)
    if cut("".join(chunks), stops)[1]:
        assert end.reason == "stop"
    elif not met:
        assert end.reason == "length"


@settings(max_examples=100, deadline=None)
@given(text=st.text("abc", min_size=1, max_size=30), cuts=st.sets(st.integers(1, 29)), stops=STOPS)
def test_chunking_does_not_matter(text: str, cuts: set[int], stops: tuple[str, ...]) -> None:
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    assert play(chunks, stops)[0] == play([text], stops)[0] == play(list(text), stops)[0]


def test_only_what_may_become_a_stop_is_held_back() -> None:
    _, _, events = play(["Hello", " wor", "ld", "</", "b>", "</s", ">x"], ("</s>",))
    assert [event.text for event in events] == ["Hello", " wor", "ld", "", "</b>", "", "", ""]


def test_without_stops_nothing_is_held_back() -> None:
    _, end, events = play(["a", "", "b"], rest="!")
    assert [event.text for event in events] == ["a", "", "b", "!"]
    assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 3)


def test_end_of_sequence_flushes_and_is_not_shown() -> None:
    events: list[Event] = []
    request = GenerationRequest(prompt=(1,), max_tokens=9, stop=("xyz",))
    sequence = Sequence(request, Chunks(["ax"], "y"), events.append)
    assert not sequence.accept(5, frozenset({EOS}))
    assert sequence.pending == [5]
    assert sequence.accept(EOS, frozenset({EOS}))
    assert [event.text for event in events] == ["a", "xy"]
    assert events[-1] == FinishEvent(reason="stop", text="xy", prompt_tokens=1, completion_tokens=2)


def test_end_of_sequence_can_be_ignored() -> None:
    events: list[Event] = []
    request = GenerationRequest(prompt=(1,), max_tokens=2, ignore_eos=True)
    sequence = Sequence(request, Chunks(["a", "b"]), events.append)
    assert not sequence.accept(EOS, frozenset({EOS}))
    assert sequence.accept(EOS, frozenset({EOS}))
    assert [event.text for event in events] == ["a", "b", ""]
    assert isinstance(events[-1], FinishEvent)
    assert events[-1].reason == "length"


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_what_was_held_back_is_shown_unless_the_request_failed(reason: str) -> None:
    events: list[Event] = []
    request = GenerationRequest(prompt=(1,), max_tokens=9, stop=("xyz",))
    sequence = Sequence(request, Chunks(["ax"], "y"), events.append)
    sequence.accept(5, NO_EOS)
    sequence.finish(reason)  # type: ignore[arg-type]
    assert events[-1].text == ("xy" if reason == "cancelled" else "")


def test_a_receiver_that_fails_cancels_its_request_only() -> None:
    def sink(event: Event) -> None:
        raise RuntimeError("gone")

    sequence = Sequence(GenerationRequest(prompt=(1,), max_tokens=9), Chunks(["a", "b"]), sink)
    assert not sequence.accept(5, NO_EOS)
    assert sequence.cancelled.is_set()
    sequence.finish("cancelled")
