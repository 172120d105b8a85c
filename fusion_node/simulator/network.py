"""The modelled Internet: how long a message takes from one host to another, and who cannot reach whom.

A message takes: its turn on the sender's uplink; half the round trip of the two regions, both last miles and jitter; a
retransmission for every loss; and never overtakes an earlier one of the same connection, as in TCP. Pairs of which one
end can be dialled talk directly; two behind NATs punch a hole if both NATs let them, else a relay in a third place
passes on what they say, at its own rate; a few pairs find no way at all.

Sources: round trips between regions: medians that the large clouds publish for their regions, to 5 ms. Last miles and
rates: the classes of FCC, "Measuring Broadband America", rounded: fibre alike both ways, cable and DSL with a tenth up.
Holes: Ford, Srisuresh, Kegel, "Peer-to-Peer Communication Across Network Address Translators", USENIX 2005: TCP
punching worked with 64 % of NATs. Shares of classes and of hosts per region are assumptions, in the tables below.

Left out: congestion inside the core of the network, and how TCP finds its rate: a transfer runs at the slower of the
two access lines. Downlinks serve transfers side by side without queueing; what is scarce at home is the way up.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

REGIONS = ("us-east", "us-west", "eu-west", "ap-east", "ap-south", "sa-east")
REGION_SHARES = (0.24, 0.16, 0.30, 0.16, 0.07, 0.07)
UTC_OFFSET_HOURS = (-5, -8, 1, 9, 5.5, -3)
"""For the daily rhythm of each."""

_ROUND_TRIP_MS = (
    # us-east us-west eu-west ap-east ap-south sa-east
    (8, 65, 75, 160, 190, 115),
    (65, 8, 135, 105, 225, 175),
    (75, 135, 12, 220, 120, 180),
    (160, 105, 220, 15, 125, 260),
    (190, 225, 120, 125, 15, 300),
    (115, 175, 180, 260, 300, 10),
)

SPREAD = 0.25
"""A region is not a point: its hosts lie up to this much nearer or farther than the table says, fixed per pair."""

JITTER_SHARE = 0.04
"""Of the way: the mean of an exponential addition to each message."""

RETRANSMIT_MIN_S = 0.2
"""Linux's least retransmission time-out."""

HOLE_SHARE = 0.64
UNREACHABLE_SHARE = 0.02
"""Of the pairs that need a relay: none that both reach has room."""

RELAY_RATE_BPS = 1.25e6
"""What a relay gives one pair: 10 Mbit/s."""

RELAY_DETOUR, RELAY_S = 1.3, 0.01
"""A relay near one end: a third of the way more, and one more last mile there and back."""

SETUP_ROUND_TRIPS = 4
"""Of a new connection: TCP, WebSocket, and the two of the Noise handshake."""

REFUSED_S = 10.0
"""Until a host that is silent is given up while dialling."""


class Nat(enum.Enum):
    """What stands before a host."""

    OPEN = "open"
    """It can be dialled: a public address, or a forwarded port."""
    CONE = "cone"
    """One public port for all peers: a hole can be punched, if the NAT does not spoil it."""
    SYMMETRIC = "symmetric"
    """A port per peer: no hole."""


@dataclass(frozen=True, slots=True)
class LineClass:
    """An access line."""

    name: str
    up_Bps: float
    down_Bps: float
    last_mile_s: float
    loss: float
    share: float


LINES = (
    LineClass("datacentre", 125e6, 125e6, 0.0005, 0.00002, 0.15),
    LineClass("fibre", 50e6, 60e6, 0.002, 0.0002, 0.35),
    LineClass("cable", 3e6, 30e6, 0.008, 0.001, 0.35),
    LineClass("dsl", 1.25e6, 10e6, 0.015, 0.002, 0.15),
)
NAT_SHARES = {Nat.OPEN: 0.4, Nat.CONE: 0.45, Nat.SYMMETRIC: 0.15}
"""Of home lines; hosts of data centres are open."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a host is in the network.

    Attributes:
        index: unlike any other's.
        part: of a partitioned network; those of different parts hear nothing of each other.
        up_free_at: when the uplink has sent what was given to it.
    """

    index: int
    region: int
    line: LineClass
    nat: Nat
    part: int = 0
    up_free_at: float = 0.0


class Way(enum.Enum):
    """How two hosts reach each other."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Path:
    """Between two places, in either direction.

    Attributes:
        one_way_s: without jitter.
        limit_Bps: of a relay; None when the two lines alone limit it.
    """

    way: Way
    one_way_s: float
    loss: float
    limit_Bps: float | None = None


_MASK = (1 << 64) - 1
_SALT = 0x9E3779B97F4A7C15 >> 8


class Network:
    """All paths of one seeded world. Keeps nothing per pair.

    Args:
        seed: of what belongs to pairs; ``chance`` draws what belongs to messages.
    """

    def __init__(self, seed: int, chance: random.Random) -> None:
        self._seed = (seed & 0xFFFFFFFF) << 24
        self._chance = chance
        self._num_places = 0

    def unit(self, salt: int, one: Place, two: Place) -> float:
        """A number in [0, 1) that belongs to a pair, the same in both directions; another one for each salt."""
        low, high = (one.index, two.index) if one.index < two.index else (two.index, one.index)
        value = (self._seed + salt * _SALT) ^ (high << 32 | low)
        # SplitMix64's finaliser (Steele, Lea, Flood, 2014); units_between does the same for many pairs.
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        return (value >> 32) / 2**32

    def units_between(self, salt: int, ones: Sequence[Place], twos: Sequence[Place]) -> Floats:
        """``unit`` of every pair, [ones, twos]."""
        one = np.array([place.index for place in ones], dtype=np.uint64)[:, None]
        two = np.array([place.index for place in twos], dtype=np.uint64)[None, :]
        pairs = np.maximum(one, two) << np.uint64(32) | np.minimum(one, two)
        value = pairs ^ np.uint64(self._seed + salt * _SALT)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return (value >> np.uint64(32)).astype(np.float64) / 2**32

    def paths_between(self, ones: Sequence[Place], twos: Sequence[Place]) -> tuple[Floats, Floats]:
        """``path`` of every pair: seconds one way, and the limit in B/s with infinity for None; both [ones, twos]."""
        trips = np.array(_ROUND_TRIP_MS, dtype=np.float64) / 2000
        base_s = trips[np.ix_([place.region for place in ones], [place.region for place in twos])]
        miles_s = np.add.outer([p.line.last_mile_s for p in ones], [p.line.last_mile_s for p in twos])
        one_way_s = base_s * (1 + SPREAD * (2 * self.units_between(1, ones, twos) - 1)) + miles_s
        is_open = np.logical_or.outer([p.nat is Nat.OPEN for p in ones], [p.nat is Nat.OPEN for p in twos])
        cones = np.logical_and.outer([p.nat is Nat.CONE for p in ones], [p.nat is Nat.CONE for p in twos])
        is_relayed = ~is_open & ~(cones & (self.units_between(2, ones, twos) < HOLE_SHARE))
        one_way_s = np.where(is_relayed, RELAY_DETOUR * one_way_s + RELAY_S, one_way_s)
        return one_way_s, np.where(is_relayed, RELAY_RATE_BPS, np.inf)

    def place(self, chance: random.Random, *, is_home: bool = False) -> Place:
        """A new host somewhere.

        Args:
            is_home: never in a data centre.
        """
        self._num_places += 1
        region = chance.choices(range(len(REGIONS)), REGION_SHARES)[0]
        lines = LINES[1:] if is_home else LINES
        line = chance.choices(lines, [each.share for each in lines])[0]
        nat = Nat.OPEN
        if line is not LINES[0]:
            nat = chance.choices(list(NAT_SHARES), list(NAT_SHARES.values()))[0]
        return Place(self._num_places - 1, region, line, nat)

    def path(self, one: Place, two: Place) -> Path:
        """Between two hosts, whatever their parts are."""
        if one is two:
            return Path(Way.DIRECT, 0.00005, 0.0)
        base_s = _ROUND_TRIP_MS[one.region][two.region] / 2000
        spread = 1 + SPREAD * (2 * self.unit(1, one, two) - 1)
        one_way_s = base_s * spread + one.line.last_mile_s + two.line.last_mile_s
        loss = one.line.loss + two.line.loss
        if one.nat is Nat.OPEN or two.nat is Nat.OPEN:
            return Path(Way.DIRECT, one_way_s, loss)
        can_punch = one.nat is Nat.CONE and two.nat is Nat.CONE
        if can_punch and self.unit(2, one, two) < HOLE_SHARE:
            return Path(Way.PUNCHED, one_way_s, loss)
        if self.unit(3, one, two) < UNREACHABLE_SHARE:
            return Path(Way.NONE, one_way_s, loss)
        return Path(Way.RELAYED, RELAY_DETOUR * one_way_s + RELAY_S, loss, RELAY_RATE_BPS)

    def can_talk(self, one: Place, two: Place) -> bool:
        """Whether a message would arrive now."""
        return one.part == two.part and self.path(one, two).way is not Way.NONE

    def delay(self, sender: Place, receiver: Place, path: Path, num_bytes: float, now: float) -> float:
        """Seconds until a message is there whole; takes its turn on the sender's uplink.

        Messages of a few hundred bytes pass by what is being sent: their turn comes between two packets of it.
        """
        rate_Bps = min(sender.line.up_Bps, receiver.line.down_Bps)
        if path.limit_Bps is not None:
            rate_Bps = min(rate_Bps, path.limit_Bps)
        wait_s = 0.0
        if num_bytes > 1500:
            free_at = sender.up_free_at
            wait_s = free_at - now if free_at > now else 0.0
            sender.up_free_at = now + wait_s + num_bytes / sender.line.up_Bps
        chance, way_s = self._chance, path.one_way_s
        delay_s = wait_s + num_bytes / rate_Bps + way_s
        if path.loss:
            delay_s += JITTER_SHARE * way_s * chance.expovariate(1.0)
            num_packets = 1 + num_bytes / 1400
            # Several losses of one message are repaired side by side; one after another only if the repair is lost.
            lost = 1 - (1 - path.loss) ** min(num_packets, 64.0)
            while chance.random() < lost:
                delay_s += max(RETRANSMIT_MIN_S, 2 * way_s) if num_packets < 4 else 2 * way_s
                lost = path.loss
        return delay_s
