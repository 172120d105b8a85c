"""Tokens to text as they come: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"


class TextStream:
    """Turns tokens into text pieces.

    Guarantees: the pieces joined are the decoding of all tokens, cut before the first stop string. Text that could be
    the beginning of a stop string is held back until it is clear that it is not.

    Decoding is repeated over a short window only (from the last position where the text was whole), because decoders
    merge and space tokens depending on their neighbours.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._window_start = 0
        self._window_end = 0
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Takes one token; returns the text that is now certain, often empty."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window_start : self._window_end])
        after = self._decode(self._tokens[self._window_start :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            # An unfinished character, or a token that shows only with its successor.
            return ""
        self._window_start, self._window_end = self._window_end, len(self._tokens)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """What is still held back at the end of the answer."""
        if self.stopped_by is not None:
            return ""
        before = self._decode(self._tokens[self._window_start : self._window_end])
        rest = self._decode(self._tokens[self._window_start :])[len(before) :]
        # Nothing can follow, so what only might have become a stop string is text; after a stop, nothing is held.
        piece = self._release(rest) + self._held
        self._held = ""
        return piece

    def _release(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        self._held += text
        found = [(self._held.find(s), s) for s in self._stop if s in self._held]
        if found:
            at, self.stopped_by = min(found)
            piece, self._held = self._held[:at], ""
            return piece
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
