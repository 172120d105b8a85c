"""Simulated time: events in order, and one digest over all that has happened.

Guarantees: events happen in the order of their times, those of one time in the order in which they were put there, so
that equal seeds give equal runs; the digest is the same for equal runs, whatever PYTHONHASHSEED is.

Assumes: whoever puts events there iterates over nothing whose order depends on hashes (sets of strings).
"""

from __future__ import annotations

import hashlib
import heapq
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

_FLUSH_BYTES = 1 << 16
_PACK = struct.Struct("<dI").pack


class EventHeap:
    """The clock of a simulated world, in seconds from its beginning.

    Attributes:
        now: never goes back.
        num_events: that have happened.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._number = 0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._trace = bytearray()
        self._labels: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._events)

    def after(self, delay_s: float, happen: Callable[..., object], *arguments: Any) -> None:
        """Lets something happen after a delay, which is not negative."""
        self._number = number = self._number + 1
        heapq.heappush(self._events, (self.now + delay_s, number, happen, arguments))

    def at(self, when_s: float, happen: Callable[..., object], *arguments: Any) -> None:
        """Lets something happen at a time, or now when that has passed."""
        self._number = number = self._number + 1
        heapq.heappush(self._events, (max(when_s, self.now), number, happen, arguments))

    def run(self, until_s: float) -> None:
        """Lets time pass until then."""
        events, pop, pack, trace = self._events, heapq.heappop, _PACK, self._trace
        while events and events[0][0] <= until_s:
            self.now, _, happen, arguments = pop(events)
            self.num_events += 1
            trace += pack(self.now, self._label(happen))
            happen(*arguments)
            if len(trace) > _FLUSH_BYTES:
                self._flush()
        self.now = max(self.now, until_s)

    def run_until(self, condition: Callable[[], bool], *, limit_s: float, step_s: float = 0.25) -> float:
        """Lets time pass until the condition holds, and returns how long that took; infinity when it never did."""
        began = self.now
        while not condition():
            if self.now - began >= limit_s:
                return math.inf
            self.run(self.now + step_s)
        return self.now - began

    def note(self, text: str) -> None:
        """Adds to the digest what an event was about, beyond its time and kind."""
        self._trace += text.encode()

    def digest(self) -> str:
        """Of all that has happened so far, 32 hexadecimal digits."""
        self._flush()
        return self._hash.hexdigest()

    def _label(self, happen: Callable[..., object]) -> int:
        name = getattr(happen, "__qualname__", type(happen).__name__)
        label = self._labels.get(name)
        if label is None:
            label = self._labels[name] = zlib.crc32(name.encode())
        return label

    def _flush(self) -> None:
        self._hash.update(self._trace)
        self._trace.clear()
