"""How fast a link delivers, as far as its own traffic shows, and what follows from that for the size of chunks.

Guarantees: a sample is taken only over a time in which there was more to send than the path took, so that a quiet
sender is not taken for a slow path. Until such a time has come there is no rate.

Assumes: the shell says when the transport takes no more (``blocked``), when there is nothing more to send (``idle``),
and what the peer has acknowledged in all (``delivered``). Acknowledgements come at least twice a second.

States: no rate yet; a rate. Measuring while blocked.

Timers: none. Seconds of the clock that is handed in.

Source: delivery rate as in BBR (draft-cheng-iccrg-delivery-rate-estimation), with its rule for application-limited
phases, over whole acknowledgements instead of packets, because TCP's are not visible here.

Ugly: acknowledgements that are read at once, after this program had no turn, look like a path that is too fast.
"""

from __future__ import annotations

from collections import deque

from p2p.transfer_core import MAX_CHUNK_BYTES

SHORTEST_S = 0.02
ENOUGH_BYTES, CLOCK_S = 128 * 1024, 0.0005
"""So much is a sample in a shorter time as well, as which no less than CLOCK_S is taken."""

RECENT_SAMPLES = 8
"""Of which the largest counts: a program that had no turn for a while looks like a slow path, and the other way round
nothing looks faster than it is. A path that has become slower is known for that after four seconds."""

CHUNK_S = 0.008
"""What an urgent frame may have to wait for a chunk that is under way."""

MIN_CHUNK_BYTES = 4096
"""Below, the headers of segment, WebSocket and TCP would take more than 2 %."""

FIRST_CHUNK_BYTES = 16 * 1024
"""While the rate is unknown: 130 ms at 1 Mbit/s, and 5 % dearer than the largest on a fast path."""

NEAR_S = 0.005
"""A round trip below this is a local network, where the largest chunk takes less than CHUNK_S."""

UNSENT_S = 0.01
MIN_UNSENT_BYTES, FIRST_UNSENT_BYTES, MAX_UNSENT_BYTES = 16 * 1024, 128 * 1024, 1024 * 1024
"""What the transport may hold ahead of what it sends: enough to be busy until the event loop comes round again."""


class DeliveryRate:
    """See the head of this file."""

    def __init__(self) -> None:
        self.rate_Bps: float | None = None
        self.is_blocked = False
        self._is_near = False
        self._recent_Bps: deque[float] = deque(maxlen=RECENT_SAMPLES)
        self._since: tuple[float, int] | None = None

    def blocked(self) -> None:
        """The transport takes no more for now."""
        self.is_blocked = True

    def idle(self) -> None:
        """There is nothing more to send, or no credit."""
        self.is_blocked = False
        self._since = None

    def delivered(self, total_bytes: int, now: float) -> bool:
        """The peer has acknowledged so much in all. Whether the rate has changed."""
        if not self.is_blocked:
            return False
        if self._since is None:
            self._since = (now, total_bytes)
            return False
        began, before = self._since
        if total_bytes <= before or (now - began < SHORTEST_S and total_bytes - before < ENOUGH_BYTES):
            return False
        sample = (total_bytes - before) / max(now - began, CLOCK_S)
        self._since = (now, total_bytes)
        self._recent_Bps.append(sample)
        self.rate_Bps = max(self._recent_Bps)
        return True

    def round_trip(self, seconds: float) -> None:
        """A round trip was measured."""
        self._is_near = seconds < NEAR_S

    def chunk_bytes(self, limit_Bps: float | None) -> int:
        """How much of a frame to put into one segment; ``limit_Bps`` is what this program may send at most."""
        rates = [rate for rate in (self.rate_Bps, limit_Bps) if rate is not None]
        if rates:
            return int(min(max(CHUNK_S * min(rates), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES))
        return MAX_CHUNK_BYTES if self._is_near else FIRST_CHUNK_BYTES

    def unsent_bytes(self) -> int:
        """How much the transport should hold at most."""
        if self.rate_Bps is None:
            return FIRST_UNSENT_BYTES
        return int(min(max(UNSENT_S * self.rate_Bps, MIN_UNSENT_BYTES), MAX_UNSENT_BYTES))
