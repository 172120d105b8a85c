"""How an answer's speculation went over time, and how often guesses were right by how far ahead they were made.

Guarantees: of an answer of any length no more than MAX_SAMPLES spans of time are kept, all equally long, each with what
happened in it; numbers only, and no token. Cheap enough to be told of every token: a few additions.

Assumes: one caller; ``now`` never goes back. No timers. Source: docs/speculation.md. Still ugly: a span that two modes
share counts as that of its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_node.types import MonotonicS

SPAN_S = 0.1
"""Of a sample of a short answer: one or two round trips on a continent."""

MAX_SAMPLES = 240
"""Twice as many as columns of a terminal are wide, and some kilobytes as JSON. Whenever there would be more, two become
one."""

MAX_DEPTH = 16
"""Deeper guesses count as this deep: of a thousand tokens a handful is guessed further ahead."""


@dataclass(slots=True)
class Sample:
    """A span of time in which a token came; spans without one are left out.

    Attributes:
        at_s: where it begins, in seconds since the first token.
        mode: at its end.
        num_tokens: committed.
        num_rows: sent.
        num_candidates: tokens for whose place there had been candidates.
        num_first: of them, those that had been the first.
        depths: sum over tokens of the depth of the tree below them.
        in_flight: rows on their way, the most.
        latency_s, price_s: L and the price of a row, as known at its end.
    """

    at_s: float
    mode: str
    num_tokens: int = 0
    num_rows: int = 0
    num_candidates: int = 0
    num_first: int = 0
    depths: int = 0
    in_flight: int = 0
    latency_s: float = 0.0
    price_s: float = 0.0

    def add(self, other: Sample) -> None:
        """That one follows."""
        self.mode = other.mode
        self.num_tokens += other.num_tokens
        self.num_rows += other.num_rows
        self.num_candidates += other.num_candidates
        self.num_first += other.num_first
        self.depths += other.depths
        self.in_flight = max(self.in_flight, other.in_flight)
        self.latency_s, self.price_s = other.latency_s, other.price_s


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts so far, and what is known at this moment."""

    mode: str
    num_tokens: int
    num_rows: int
    num_candidates: int
    num_first: int
    depths: int
    latency_s: float
    price_s: float


@dataclass(frozen=True, slots=True)
class DepthCount:
    """Of guesses that were made so many tokens ahead, where all tokens before were as guessed.

    Attributes:
        num_guessed: that were put to the test.
        num_right: whose first candidate was the token.
    """

    num_guessed: int
    num_right: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Of one answer.

    Attributes:
        span_s: how long each sample's span is.
        samples: in order.
    """

    span_s: float = SPAN_S
    samples: tuple[Sample, ...] = ()

    @property
    def length_s(self) -> float:
        """From the first token to the end of the last one's span."""
        return self.samples[-1].at_s + self.span_s if self.samples else 0.0

    def columns(self, most: int) -> tuple[float, list[Sample | None]]:
        """As one sample per column, at most so many and None where no token came; and the seconds of a column."""
        ratio = max(1, -(-round(self.length_s / self.span_s) // most))
        column_s = ratio * self.span_s
        found: list[Sample | None] = [None] * -(-round(self.length_s / self.span_s) // ratio)
        for sample in self.samples:
            index = round(sample.at_s / self.span_s) // ratio
            column = found[index]
            if column is None:
                column = found[index] = Sample(index * column_s, sample.mode)
            column.add(sample)
        return column_s, found


class TimelineRecorder:
    """Is told of every token."""

    def __init__(self) -> None:
        self._span_s = SPAN_S
        self._began_at: MonotonicS | None = None
        self._before = Totals("", 0, 0, 0, 0, 0, 0.0, 0.0)
        self._in_flight = 0
        """The most since the last token."""
        self._samples: dict[int, Sample] = {}
        """By the number of their span."""
        self._guessed = [0] * MAX_DEPTH
        self._right = [0] * MAX_DEPTH

    def guessed(self, depth: int, *, is_right: bool) -> None:
        """A token was chosen that had been guessed so far ahead, 1 being the next one."""
        index = min(max(depth, 1), MAX_DEPTH) - 1
        self._guessed[index] += 1
        self._right[index] += is_right

    def sent(self, in_flight: int) -> None:
        """So many rows are on their way now."""
        self._in_flight = max(self._in_flight, in_flight)

    def committed(self, totals: Totals, *, in_flight: int, now: MonotonicS) -> None:
        """One more token.

        Args:
            in_flight: rows that are on their way still.
        """
        if self._began_at is None:
            self._began_at = now
        since, before, self._before = now - self._began_at, self._before, totals
        # Every halving is followed by a look at the place anew: the very next span may still be too far away.
        while (index := int(since / self._span_s)) >= MAX_SAMPLES:
            self._halve()
        new = Sample(
            index * self._span_s,
            totals.mode,
            totals.num_tokens - before.num_tokens,
            totals.num_rows - before.num_rows,
            totals.num_candidates - before.num_candidates,
            totals.num_first - before.num_first,
            totals.depths - before.depths,
            max(self._in_flight, in_flight),
            totals.latency_s,
            totals.price_s,
        )
        self._in_flight = in_flight
        there = self._samples.get(index)
        if there is None:
            self._samples[index] = new
        else:
            there.add(new)

    def timeline(self) -> Timeline:
        """So far."""
        return Timeline(self._span_s, tuple(self._samples.values()))

    def by_depth(self) -> tuple[DepthCount, ...]:
        """From 1 to the deepest there was."""
        deepest = max((depth for depth, num in enumerate(self._guessed, start=1) if num), default=0)
        return tuple(map(DepthCount, self._guessed[:deepest], self._right[:deepest]))

    def _halve(self) -> None:
        self._span_s *= 2
        before, self._samples = self._samples, {}
        for index, sample in before.items():
            there = self._samples.get(index // 2)
            if there is None:
                sample.at_s = (index // 2) * self._span_s
                self._samples[index // 2] = sample
            else:
                there.add(sample)
