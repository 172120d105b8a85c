"""An event loop whose clock jumps: to the next timer, as soon as there is nothing else to do.

Whatever waits only for timers of its loop takes no time then, and takes the same time in every run: a day of heartbeats
over the in-memory network (p2p.memory) with an emulated line (p2p.link_emulation) passes in a moment. Not for what
waits for threads or processes, which do not get their turn between two timers.

Source: the autojump clock of trio.testing.MockClock.
"""

from __future__ import annotations

import asyncio
import math
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the head of this file. Begins at 0 seconds; ``asyncio.Runner(loop_factory=VirtualTimeLoop)``."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the loop was made, by its own clock."""
        return self._jumping.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nobody will ever do anything: there is no timer and nothing to be read")
        if not ready and timeout is not None and timeout > 0:
            # One more than enough, so that a sum that was rounded is never before the timer.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return ready
