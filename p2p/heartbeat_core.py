"""Whether the other end of a link is alive, and how far away it is.

Guarantees: a peer that sends anything at all, be it one segment of a long frame, is never called dead; a peer from
which nothing comes is called dead DEAD_AFTER_S after the last sign of life, at most one call of ``handle_timer`` later.

Assumes: both sides run this, so each sends something at least every PING_AFTER_S. The shell calls ``handle_timer``
several times within PING_AFTER_S, and reports its own absence (suspension, a blocked event loop) with
``handle_absence``: what could not be read is no evidence against the peer. ``draw_number`` gives 32 bits
that the peer cannot foretell: it could else send a pong ahead of its ping, and appear to be nearer than it is.

States: alive; suspect, from SUSPECT_AFTER_S of silence on; dead, for good.

Timers: the next ping, suspicion, death. All times are seconds of one monotonic clock, handed in.

Why pings also while busy: a peer that only receives (a long prefill on a thin line) would otherwise be silent for as
long as its own pong is stuck behind what we send.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p.link_messages import Ping

PING_AFTER_S = 2.0
"""Of silence in either direction. A third of DEAD_AFTER_S, so that one lost scheduling slot does not kill a link."""

PROBE_EVERY_S = 10.0
"""On a busy link too, for a fresh round trip. 60 bytes every 10 s."""

SUSPECT_AFTER_S = 4.0
"""Two pings unanswered: a reason to prepare for the peer's absence, not yet to act on it."""

DEAD_AFTER_S = 6.0
"""Three pings unanswered. TCP alone notices a black hole after minutes (measured: not within 70 s)."""

MAX_OUTSTANDING_PINGS = 16
"""Pings whose pong is still awaited; the oldest are forgotten."""

RECENT_ROUND_TRIPS = 8
"""Samples of which the smallest is the best estimate: what is added to it is queueing, on either side."""


class Liveness(enum.Enum):
    """What silence says about the peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True)
class Heartbeat:
    """One link's heartbeat. ``last_heard`` and ``last_sent`` start at the moment the link was made."""

    last_heard: float
    last_sent: float
    draw_number: Callable[[], int]
    _recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ROUND_TRIPS))
    _outstanding: dict[int, float] = field(default_factory=dict)
    _last_ping: float | None = None
    _dead: bool = False

    def heard(self, now: float) -> None:
        """Bytes came from the peer."""
        self.last_heard = max(self.last_heard, now)

    def sent(self, now: float) -> None:
        """Bytes went to the peer."""
        self.last_sent = max(self.last_sent, now)

    def ping(self, now: float) -> Ping:
        """A ping to send now."""
        number = self.draw_number()
        while number in self._outstanding:
            number = self.draw_number()
        self._outstanding[number] = now
        if len(self._outstanding) > MAX_OUTSTANDING_PINGS:
            del self._outstanding[next(iter(self._outstanding))]
        self._last_ping = now
        self.sent(now)
        return Ping(number)

    def pong(self, number: int, now: float) -> float | None:
        """The round trip in seconds that this pong completes; None when it answers no ping of ours."""
        self.heard(now)
        sent_at = self._outstanding.pop(number, None)
        if sent_at is None:
            return None
        round_trip_s = max(0.0, now - sent_at)
        self._recent_s.append(round_trip_s)
        return round_trip_s

    def best_s(self) -> float | None:
        """The smallest of the recent round trips."""
        return min(self._recent_s, default=None)

    def liveness(self, now: float) -> Liveness:
        """What the silence up to ``now`` means."""
        silence_s = now - self.last_heard
        if self._dead or silence_s >= DEAD_AFTER_S:
            return Liveness.DEAD
        return Liveness.SUSPECT if silence_s >= SUSPECT_AFTER_S else Liveness.ALIVE

    def handle_timer(self, now: float) -> Ping | None:
        """The ping that is due, if any. Look at ``liveness`` afterwards."""
        if self.liveness(now) is Liveness.DEAD:
            self._dead = True
            return None
        return self.ping(now) if now >= self._next_ping() else None

    def handle_absence(self, absent_s: float, now: float) -> None:
        """This program did not run for so long: nobody could be heard meanwhile."""
        self.last_heard = min(self.last_heard + absent_s, now)

    def _next_ping(self) -> float:
        if self._last_ping is None:
            return self.last_sent
        quiet_since = min(self.last_heard, self.last_sent)
        # One ping per silence and interval: the last one is not repeated before it had the time to be answered.
        return min(max(quiet_since, self._last_ping) + PING_AFTER_S, self._last_ping + PROBE_EVERY_S)
