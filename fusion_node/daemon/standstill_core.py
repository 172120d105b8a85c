"""When this process itself has stood still, so that it blames nobody for that time.

A process that was stopped, or swapped out, finds when it goes on that everything it waits for is late. It is what came
meanwhile that has not been read.

Guarantees: ``look`` tells all of the time since the last look when that was more than STANDSTILL_S ago, and nothing
otherwise. No second is told twice.

Assumes: one caller, that looks every LOOK_S while anything is waited for; ``now`` never goes back.

States: none but the last look. No timers. Seconds of the monotonic clock. Source: docs/protocol-data-plane.md,
"Groups". Still ugly: what is shorter, or a loop that is always late by a little less, counts against others.
"""

from __future__ import annotations

from fusion_node.types import MonotonicS

LOOK_S = 1.0
"""Between two looks of a process that runs."""

STANDSTILL_S = 2.0
"""After so long without a look it did not run. A loop that is busy is late by a fraction of a second."""


class Standstill:
    """See the head of this file."""

    def __init__(self, *, now: MonotonicS) -> None:
        self._looked_at = now

    def look(self, *, now: MonotonicS) -> float:
        """Seconds just past in which nobody could be late; 0 if this process has run."""
        passed_s, self._looked_at = now - self._looked_at, now
        return passed_s if passed_s > STANDSTILL_S else 0.0
