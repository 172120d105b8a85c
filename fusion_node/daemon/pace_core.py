"""How fast a node really is while it serves, and how long steps wait in it: what its record announces.

Guarantees: what is announced is finite and positive, moves from what the warm-up measured to what forwards took of
late, and back when the node has been idle for long; one forward among many that a pause of the program spoils hardly
moves it. A width that no forward had of late is as much slower than at the warm-up as the nearest one that some had.

Assumes: ``warm_up`` was measured on the idle device. Forwards are reported with the seconds that the devices spent on
them, everything included that slows them down: other programs, heat, long contexts. ``now`` is monotonic seconds.

States: fresh (the warm-up only), measured per width. No timers: age is reckoned when asked.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from fusion_node.engine.batching_core import MAX_LEARNED_EXTRA_SHARE, Batch, BatchingCore, Work
from fusion_node.types import LayerRange

SPEED_ROWS = (1, 16, 256)
"""As in p2p.records: what is announced for."""

MAX_SAMPLES = 32
"""Per width, of which the median counts."""

HALF_LIFE_S = 600.0
"""Of what was measured, without new forwards: what slowed them down may be over."""

QUEUE_HALF_LIFE_S = 30.0
"""Of a wait: announcements are 20 s apart, and users come and go within a minute."""

MAX_WAITS = 64

MAX_FACTOR = 1e4
"""Between a forward and the warm-up, either way: beyond it, a clock was wrong."""

SMALL_ROWS = 64
"""Steps above do not wait as a decode step does: they are prefill, which gives way."""


class Pace:
    """See the head of this file.

    Args:
        warm_up: seconds per layer of forwards of SPEED_ROWS rows.
    """

    def __init__(self, warm_up: Sequence[float]) -> None:
        self._warm_up = tuple(max(seconds, 1e-9) for seconds in warm_up)
        self._factors: list[deque[tuple[float, float]]] = [deque(maxlen=MAX_SAMPLES) for _ in SPEED_ROWS]
        """Per width: when, and how much slower than at the warm-up."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=MAX_WAITS)

    def forward_done(self, num_layers: int, num_rows: int, seconds: float, now: float) -> None:
        """A forward of so many rows through so many layers is done."""
        if num_layers < 1 or num_rows < 1 or not 0.0 < seconds < float("inf"):
            return
        factor = seconds / num_layers / self._at_warm_up(num_rows)
        width = 0 if num_rows <= 4 else 1 if num_rows <= SMALL_ROWS else 2
        self._factors[width].append((now, min(max(factor, 1 / MAX_FACTOR), MAX_FACTOR)))

    def step_began(self, num_rows: int, waited_s: float, now: float) -> None:
        """The first row of a step goes into a forward."""
        if num_rows <= SMALL_ROWS:
            self._waits.append((now, max(waited_s, 0.0)))

    def seconds_per_layer(self, now: float) -> tuple[float, float, float]:
        """Of a forward of 1, 16 and 256 rows."""
        known = [
            (width, statistics.median(factor for _, factor in samples), _weight(now - samples[-1][0], HALF_LIFE_S))
            for width, samples in enumerate(self._factors)
            if samples
        ]
        seconds = list(self._warm_up)
        for width, warm_up_s in enumerate(self._warm_up):
            if known:
                _, factor, weight = min(known, key=lambda each: abs(each[0] - width))
                seconds[width] = warm_up_s * (1.0 + weight * (factor - 1.0))
        one, some, many = seconds
        return one, max(one, some), max(one, some, many)

    def queue_s(self, now: float) -> float:
        """What a decode step waits before it is computed: the mean of late, and less the longer ago that was."""
        weights = [_weight(now - at, QUEUE_HALF_LIFE_S) for at, _ in self._waits]
        waited_s = sum(weight * waited for weight, (_, waited) in zip(weights, self._waits, strict=True))
        # One step that has not waited counts beside them, so that it fades when nobody comes any more.
        return waited_s / (sum(weights) + 1.0)

    def _at_warm_up(self, num_rows: int) -> float:
        """Seconds per layer, between those that were measured and in proportion above."""
        one, some, many = self._warm_up
        if num_rows <= 16:
            return one + (some - one) * (num_rows - 1) / 15
        if num_rows <= 256:
            return some + (many - some) * (num_rows - 16) / 240
        return many * num_rows / 256


class PacedBatching(BatchingCore):
    """A batching core whose forwards tell a Pace what they took, and whose steps tell it what they waited.

    The group of its works is the range of layers that they go through.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def next_batch(self, *, now: float) -> Batch | None:
        """As BatchingCore.next_batch."""
        batch = super().next_batch(now=now)
        for piece in batch.pieces if batch is not None else ():
            if piece.start == 0:
                self._pace.step_began(piece.work.num_rows, now - piece.work.arrived, now)
        return batch

    def done(self, batch: Batch, *, seconds: float, now: float) -> list[Work]:
        """As BatchingCore.done."""
        extra_rows = sum(piece.work.extra_rows for piece in batch.pieces if piece.start == 0)
        # What moves much of the KV beside its rows says nothing of how long rows take.
        if isinstance(batch.group, LayerRange) and extra_rows <= MAX_LEARNED_EXTRA_SHARE * batch.num_rows:
            self._pace.forward_done(len(batch.group), batch.num_rows, seconds, now)
        return super().done(batch, seconds=seconds, now=now)


def _weight(age_s: float, half_life_s: float) -> float:
    return math.exp(-math.log(2.0) * max(age_s, 0.0) / half_life_s)
