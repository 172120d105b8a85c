"""How much all links of a process together may send, and whose turn it is.

Guarantees: over any interval, at most rate times its length, one burst and one segment are admitted. Of those who wait,
one in a more urgent lane goes first, whichever link it is on; within a lane they take turns, a segment each, however
often they ask. A less urgent lane that waits has its turn after STARVED_AFTER_SEGMENTS others.

Assumes: whoever is admitted sends one segment and says with ``spent`` how long it was; what is not asked for (pings,
acknowledgements, handshakes) is told to ``spent`` as well, and paid back from what follows. The shell calls
``next_waiting`` when the timer is due, lets each that it returns ask again, and goes on until it returns None.

States: who waits, per lane; a balance of bytes, negative after a segment that was longer than what was there.

Timers: when the balance is positive again, while somebody waits. Seconds of the clock that is handed in.

Source: token bucket, RFC 2697 §3, with one rate and debt instead of a peak. Borrowing keeps segments whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from p2p.transfer_core import NUM_LANES

BURST_S = 0.05
"""What may be saved up while nobody sends: twenty times a second everybody has had a turn."""

MIN_BURST_BYTES = 4096
STARVED_AFTER_SEGMENTS = 16

MIN_UPLOAD_BPS = 1000.0
"""8 kbit/s. With less, pings and acknowledgements alone would be too much."""

TCP_BYTES, TCP_PAYLOAD_BYTES, WEBSOCKET_BYTES = 52, 1448, 8
"""Header of a packet over IPv4 with timestamps, what it carries on Ethernet, and a masked WebSocket header."""


def bytes_on_wire(segment_bytes: int) -> int:
    """About what a sealed segment of this length takes of an uplink."""
    return segment_bytes + WEBSOCKET_BYTES + TCP_BYTES * (1 + segment_bytes // TCP_PAYLOAD_BYTES)


class Upload:
    """See the head of this file.

    Args:
        rate_Bps: bytes per second, at least MIN_UPLOAD_BPS.
    """

    def __init__(self, rate_Bps: float, *, now: float) -> None:
        self.rate_Bps = max(rate_Bps, MIN_UPLOAD_BPS)
        self._burst_bytes = max(self.rate_Bps * BURST_S, MIN_BURST_BYTES)
        self._balance = self._burst_bytes
        self._at = now
        self._waiting: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(NUM_LANES)]
        self._passed_over = [0] * NUM_LANES
        self._called: Hashable | None = None

    def admits(self, who: Hashable, lane: int, now: float) -> bool:
        """Whether ``who`` may send a segment of this lane now. If not, it waits and is returned by ``next_waiting``."""
        self._earn(now)
        if who is self._called:
            self._called = None
            is_turn = True
        else:
            is_turn = not any(waiting.keys() - {who} for waiting in self._waiting[: lane + 1])
        is_admitted = is_turn and self._balance > 0
        # Whoever waits already keeps its place: one that asks again and again would never come to the front.
        for other, waiting in enumerate(self._waiting):
            if is_admitted or other != lane:
                waiting.pop(who, None)
        if not is_admitted:
            self._waiting[lane].setdefault(who)
        return is_admitted

    def spent(self, num_bytes: int, now: float) -> None:
        """So many bytes were sent, asked for or not."""
        self._earn(now)
        self._balance -= num_bytes

    def forget(self, who: Hashable) -> None:
        """``who`` does not wait any more."""
        for waiting in self._waiting:
            waiting.pop(who, None)

    def get_timer(self) -> float | None:
        """When ``next_waiting`` will return somebody; None while nobody waits."""
        if not any(self._waiting):
            return None
        # A byte more than nothing, so that rounding does not lead to a timer that is due and finds nothing.
        return self._at + max(0.0, 1.0 - self._balance) / self.rate_Bps

    def next_waiting(self, now: float) -> Hashable | None:
        """Whose turn it is, once; None while there is nothing to spend."""
        self._earn(now)
        self._called = None  # who was called last had nothing to send after all
        if self._balance <= 0:
            return None
        lanes = [lane for lane, waiting in enumerate(self._waiting) if waiting]
        if not lanes:
            return None
        starved = [lane for lane in lanes[1:] if self._passed_over[lane] >= STARVED_AFTER_SEGMENTS]
        chosen = starved[0] if starved else lanes[0]
        for lane in lanes:
            self._passed_over[lane] = 0 if lane == chosen else self._passed_over[lane] + 1
        self._called, _ = self._waiting[chosen].popitem(last=False)
        return self._called

    def _earn(self, now: float) -> None:
        if now > self._at:
            self._balance = min(self._burst_bytes, self._balance + (now - self._at) * self.rate_Bps)
            self._at = now
