"""Turn a stream of token ids into text as it comes, never splitting a character."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

_REPLACEMENT: Final = "\ufffd"

# Above this many undecided tokens, the window is cut (only ever happens in runs of broken UTF-8).
_LONG_WINDOW: Final = 32
_TAIL: Final = 4  # an incomplete character is at most three bytes, and every token holds at least one


class IncrementalDecoder:
    """Streaming detokeniser: all pieces returned, joined, equal the text of all ids decoded at once.

    ``decode`` maps ids to text. ``skipped`` ids (special tokens) leave no trace. ``byte_ids`` are
    tokens for single bytes in vocabularies with byte fall-back: a run of them is decoded as one, so
    it is held back until it ends.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        skipped: Collection[int] = (),
        byte_ids: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._byte_ids = byte_ids
        self._ids: list[int] = []  # the window: context already emitted in full, then the rest
        self._context = 0  # leading ids of the window that are context only
        self._emitted = 0  # characters of the window's text that were returned already

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        complete = not text.endswith(_REPLACEMENT)
        # Only the last replacement character can still turn into something else.
        stable = text if complete else text[:-1]
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if complete and piece:
            self._slide(len(self._ids))
        elif len(self._ids) - self._context > _LONG_WINDOW:
            self._cut(text)
        return piece

    def finish(self) -> str:
        """The held-back rest; an incomplete character becomes U+FFFD. The decoder is then empty."""
        text = self._decode(self._ids) if self._ids else ""
        rest = text[self._emitted :]
        self._ids, self._context, self._emitted = [], 0, 0
        return rest

    def _slide(self, end: int) -> None:
        """Keep only the ids from the old context's end to ``end`` as new context, and what follows."""
        self._ids = self._ids[self._context :]
        self._context = end - self._context
        self._emitted = len(self._decode(self._ids[: self._context]))

    def _cut(self, text: str) -> None:
        """Shorten a long undecided window at a place where its text falls apart cleanly."""
        end = len(self._ids) - _TAIL
        head, tail = self._decode(self._ids[:end]), self._decode(self._ids[end:])
        if head + tail != text or len(head) > self._emitted:
            return
        beyond = self._emitted - len(head)
        self._slide(end)
        self._emitted += beyond
