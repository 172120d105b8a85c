"""Many named times of one core, and which is next. Nothing here waits: the shell does.

Setting a time again replaces it. O(log n) each. Source: a binary heap with lazy deletion (Python's ``heapq`` notes).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Timers(Generic[K]):
    """Times by key, in seconds of whatever clock the owner uses."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._num_set = 0
        """Breaks ties in the order of setting: keys need not be comparable, and runs repeat exactly."""

    def set(self, key: K, at_s: float) -> None:
        self._due[key] = at_s
        self._num_set += 1
        heapq.heappush(self._heap, (at_s, self._num_set, key))
        if len(self._heap) > 4 * len(self._due) + 64:
            self._heap = [(at, number, key) for at, number, key in self._heap if self._due.get(key) == at]
            heapq.heapify(self._heap)

    def set_earlier(self, key: K, at_s: float) -> None:
        """Sets a time unless an earlier one is set."""
        if at_s < self._due.get(key, float("inf")):
            self.set(key, at_s)

    def clear(self, key: K) -> None:
        self._due.pop(key, None)

    def next_s(self) -> float | None:
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> Iterator[K]:
        """What is due, earliest first, what is set meanwhile included; each is cleared as it comes out."""
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._due[key]
            yield key
