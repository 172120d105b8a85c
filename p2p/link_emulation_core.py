"""When a message is delivered over a line that is slower than the real one: for demonstrations, benchmarks and tests.

Guarantees: a message is delivered half a round trip, give or take the jitter, after its last byte has left the uplink,
never before an earlier message of the same direction, and never sooner than half a round trip less the jitter after it
was given. All links of a process share one uplink, first come first served, so that together they send no faster than
its rate. The same shape, random numbers and calls give the same times.

Assumes: each process delays what it sends, so that both directions of a pair are delayed. The shell puts messages in,
takes out what is due, says when the real transport takes no more (``stall``) and again when it does, and calls when the
timer is due. One OneWay per link and direction; one Uplink per process.

States: of a direction: full or not, stalled or not. Full is a line on which more waits for the uplink than the sender
wished (``limit_unsent``, as TCP_NOTSENT_LOWAT), or more is on its way than WINDOW_BYTES; it has room again at the half.

Timers: the next delivery, unless stalled; the next departure, while full. Seconds of the clock that is handed in.

Source: delay, jitter and rate as of tc-netem(8), whose jitter is uniform too; order is kept as by netem over TCP.

How others in this repository differ: tests/live/link_proxy.py stands between processes, so it can cut, hold and spoil
as well, but needs a port per node and counts the bytes of TCP, not of frames; fusion_node/simulator/network.py models
whole regions, losses and NATs for events on a heap, and carries nothing. The header bytes are those of
p2p.upload_core.

Ugly, or left out: losses, and what TCP does about them; a downlink of its own; slow start. What a link that was cut had
not sent still takes its time on the uplink (some 190 kB, 1.6 s at 1 Mbit/s), where a kernel would drop it. Jitter that
keeps the order makes a stream of short intervals later than half a round trip in the mean: each waits for the slowest
before it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from fusion_node.errors import ConfigError
from p2p.delivery_rate_core import FIRST_UNSENT_BYTES
from p2p.upload_core import bytes_on_wire

MAX_RTT_MS = 1000.0
"""Beyond what a geostationary satellite takes (600 ms). A connection is made in four round trips and 5 seconds."""

MIN_RATE_MBPS, MAX_RATE_MBPS = 0.1, 100_000.0
"""The slowest at which signs of life do not fill the line, and more than memory is copied at."""

WINDOW_BYTES = 4 * 1024 * 1024
"""On its way on one link in one direction: what Linux lets a TCP connection have unacknowledged (tcp_wmem)."""


class Chance(Protocol):
    """What is needed of ``random.Random``."""

    def uniform(self, a: float, b: float, /) -> float: ...


@dataclass(frozen=True, slots=True)
class LineShape:
    """How slow a line is.

    Attributes:
        rtt_ms: added to a round trip: one half by each side that emulates.
        jitter_ms: by how much a message's way in one direction is longer or shorter, at most; uniform.
        rate_Mbps: megabits (10^6) per second that the process sends in all, with headers; None for no limit.

    Raises:
        ConfigError: a value is not a number, or out of range.
    """

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    rate_Mbps: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.rtt_ms <= MAX_RTT_MS:
            raise ConfigError(f"an emulated round trip of {self.rtt_ms:g} ms: it must be 0 to {MAX_RTT_MS:g}")
        if not 0.0 <= self.jitter_ms <= self.rtt_ms / 2:
            raise ConfigError(
                f"an emulated jitter of {self.jitter_ms:g} ms: it must be 0 to half of the round trip, "
                f"which is {self.rtt_ms / 2:g} ms"
            )
        if self.rate_Mbps is not None and not MIN_RATE_MBPS <= self.rate_Mbps <= MAX_RATE_MBPS:
            raise ConfigError(
                f"an emulated rate of {self.rate_Mbps:g} Mbit/s: it must be {MIN_RATE_MBPS:g} to {MAX_RATE_MBPS:g}"
            )

    def __str__(self) -> str:
        jitter = f" ± {self.jitter_ms:g} ms each way" if self.jitter_ms else ""
        rate = "" if self.rate_Mbps is None else f", {self.rate_Mbps:g} Mbit/s up"
        return f"{self.rtt_ms:g} ms round trip{jitter}{rate}"

    @property
    def rate_Bps(self) -> float | None:
        return None if self.rate_Mbps is None else self.rate_Mbps * 1e6 / 8


class Uplink:
    """What all links of a process send through, one message after the other.

    Args:
        rate_Bps: bytes per second; None for no limit.
    """

    def __init__(self, rate_Bps: float | None) -> None:
        self._rate_Bps = rate_Bps
        self._free_at = -math.inf

    def take(self, num_bytes: int, now: float) -> float:
        """When the last of these bytes will have left, which are given now."""
        if self._rate_Bps is None:
            return now
        self._free_at = max(now, self._free_at) + num_bytes / self._rate_Bps
        return self._free_at


class OneWay:
    """One direction of one link; see the head of this file."""

    def __init__(self, shape: LineShape, uplink: Uplink, chance: Chance, *, window_bytes: int = WINDOW_BYTES) -> None:
        self._delay_s = shape.rtt_ms / 2000
        self._jitter_s = shape.jitter_ms / 1000
        self._uplink = uplink
        self._chance = chance
        self._window_bytes = window_bytes
        self._limit_bytes = FIRST_UNSENT_BYTES
        self._leaving: deque[tuple[float, int]] = deque()
        """When each leaves that has not, and how long it is."""
        self._unsent_bytes = 0
        self._under_way: deque[tuple[float, bytes]] = deque()
        """When each is due, in order."""
        self._under_way_bytes = 0
        self._last_due = -math.inf
        self._is_full = False
        self._is_stalled = False

    def __bool__(self) -> bool:
        """Whether anything is still to be delivered."""
        return bool(self._under_way)

    def put(self, message: bytes, now: float) -> None:
        """Takes one message, also when full."""
        size = len(message)
        leaves_at = self._uplink.take(bytes_on_wire(size), now)
        delay_s = self._delay_s
        if self._jitter_s:
            delay_s += self._chance.uniform(-self._jitter_s, self._jitter_s)
        self._last_due = max(self._last_due, leaves_at + delay_s)
        self._under_way.append((self._last_due, message))
        self._under_way_bytes += size
        if leaves_at > now:
            self._leaving.append((leaves_at, size))
            self._unsent_bytes += size
        self._is_full |= self._unsent_bytes > self._limit_bytes or self._under_way_bytes > self._window_bytes

    def take(self, now: float) -> bytes | None:
        """The next message if it is due by now."""
        if self._is_stalled or not self._under_way or self._under_way[0][0] > now:
            return None
        _, message = self._under_way.popleft()
        self._under_way_bytes -= len(message)
        return message

    def is_full(self, now: float) -> bool:
        """Whether the sender should wait; see the states."""
        while self._leaving and self._leaving[0][0] <= now:
            self._unsent_bytes -= self._leaving.popleft()[1]
        if self._unsent_bytes <= self._limit_bytes // 2 and self._under_way_bytes <= self._window_bytes // 2:
            self._is_full = False
        return self._is_full

    def limit_unsent(self, num_bytes: int) -> None:
        """Is full, from now on, when more than this waits for the uplink."""
        self._limit_bytes = num_bytes

    def stall(self) -> None:
        """The transport takes no more: nothing is due."""
        self._is_stalled = True

    def go_on(self) -> None:
        """The transport has room again."""
        self._is_stalled = False

    def clear(self) -> None:
        """Nothing of what is under way is delivered."""
        self._under_way.clear()
        self._leaving.clear()
        self._under_way_bytes = self._unsent_bytes = 0

    def get_timer(self) -> float | None:
        """When something is due next; None: only after another call."""
        times = []
        if self._under_way and not self._is_stalled:
            times.append(self._under_way[0][0])
        if self._is_full and self._leaving:
            times.append(self._leaving[0][0])
        return min(times, default=None)
