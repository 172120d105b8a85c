"""Whom a node measures, and when: round trips to those that it may hand rows to, and to some by chance.

What it learns goes into the node's record: round trips, a network coordinate (scheduler.vivaldi), and how fast its line
is. Users plan with that where they have not measured themselves.

Guarantees: at most one peer is measured per timer, every EAGER_S until ENOUGH were and every CALM_S from then on; one
that could not be reached is left alone for BACK_OFF_S, doubling, and so is a host at which BAD_PLACE in a row were not.
Of neighbours, the NUM_NEAR that seem nearest are measured again and again; every third measurement goes to anybody by
chance, so that a swarm of any size costs the same and no claim of a coordinate can keep others from being measured.
Bandwidth is measured with PROBE_PEERS peers, PROBE_AFTER_S or more apart, neighbours first, then once in PROBE_AGAIN_S;
nobody is asked more often than that, and with whom it failed, only when there is nobody else.

Assumes: the shell reports every measurement that it was told to make, as done or failed, before the next timer or soon
after. ``now`` is monotonic seconds.

States: of a peer: seen, measured, unreachable until some time. Timers: the next measurement; the next probe.

Ugly: a neighbour is whoever holds the layers behind or before ours, be it a thousand nodes; which of them users choose
together with this node is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion_node.types import LayerRange, PeerId
from scheduler.vivaldi import Coordinate, Vivaldi

if TYPE_CHECKING:
    from random import Random

EAGER_S, CALM_S = 3.0, 20.0
"""Between two measurements. A connection that is made for one costs 5 ms of CPU and 3 kB on both sides together."""

ENOUGH = 16
"""Measurements after which a coordinate predicts about as well as it ever will in a settled swarm."""

FIRST_AFTER_S = 5.0
"""From the start: others must have heard of the node, and it of them."""

NUM_NEAR = 16
"""Neighbours that are measured again and again: twice what is announced."""

AGAIN_S = 240.0
"""Until a neighbour's round trip is measured again. Routes change within hours."""

FORGET_S = 1800.0
"""A round trip that is older is not announced any more."""

MAX_ANNOUNCED = 8
"""Of 20 bytes each in a record of 1 kB."""

CHANCE_EVERY = 3
"""So many measurements, of which one goes to anybody."""

BACK_OFF_S, MAX_BACK_OFF_S = 300.0, 7200.0

BAD_PLACE = 3
"""Failures in a row at one host, whoever was said to be there, after which it is left alone like an unreachable peer:
many identities that name a third party's address must not make a swarm dial it."""

FIRST_PROBE_S, LAST_FIRST_PROBE_S = 15.0, 60.0
"""From the start, by chance between the two: whoever plans before knows nothing of the line. Nodes that were started
together must not probe together: one that serves them answers to seven in a minute (p2p.bandwidth_core)."""

PROBE_AFTER_S, PROBE_AGAIN_S = 60.0, 6 * 3600.0
"""Between the first probes of bandwidth, and between those after. One takes up to 4.5 MiB."""

PROBE_RETRY_S = 600.0
"""At most, after one that failed while nothing is known of the line, and else PROBE_AGAIN_S: PROBE_AFTER_S after the
first, and twice as long after each further one. Most often the other node is busy, and the next one is asked; else our
own line is down, or everybody's."""

PROBE_PEERS = 3
"""Of whose measurements the middle one counts: a liar or a slow line among them does not."""

MAX_Bps = 1e11

UNKNOWN_S = 0.25
"""The distance of a peer that does not say where it is."""

MAX_PEERS = 4096
"""Of which something is remembered."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A node as its record shows it."""

    peer: PeerId
    is_neighbour: bool
    coordinate: Coordinate | None
    places: frozenset[str] = frozenset()
    """Hosts at which it says that it can be dialled."""


def is_neighbour(ours: LayerRange, theirs: LayerRange) -> bool:
    """Whether rows may go from one to the other: a range goes on where the other ends, or within it.

    A node can be entered at any layer that it holds, so ranges that overlap hand over as well.
    """
    first, second = (ours, theirs) if (ours.start, ours.stop) <= (theirs.start, theirs.stop) else (theirs, ours)
    return first.start < second.start <= first.stop < second.stop


@dataclass(slots=True)
class _Known:
    """What was measured of a peer."""

    round_trip_s: float | None = None
    at: float = float("-inf")
    num_failures: int = 0
    not_before: float = float("-inf")


@dataclass(slots=True)
class _Place:
    """A host at which nobody could be reached."""

    num_failures: int = 0
    not_before: float = float("-inf")


@dataclass(frozen=True, slots=True)
class _Rate:
    """How fast our line is by a measurement with a peer, and when that was."""

    peer: PeerId
    up_Bps: float
    down_Bps: float
    at: float


class SurveyorCore:
    """See the head of this file.

    Args:
        rng: a source of chance that peers cannot foretell.
    """

    def __init__(self, rng: Random, *, now: float) -> None:
        self._rng = rng
        self._vivaldi = Vivaldi(rng)
        self._seen: dict[PeerId, Seen] = {}
        self._known: dict[PeerId, _Known] = {}
        self._places: dict[str, _Place] = {}
        self._rates: deque[_Rate] = deque(maxlen=PROBE_PEERS)
        """The oldest is first."""
        self._num_measured = 0
        self._num_chosen = 0
        self._next_at = now + FIRST_AFTER_S
        self._probe_at = now + rng.uniform(FIRST_PROBE_S, LAST_FIRST_PROBE_S)
        self._probing: PeerId | None = None
        self._failed_with: list[PeerId] = []
        """Probes that failed, but for those with whom it succeeded since."""

    @property
    def coordinate(self) -> Coordinate:
        """Where this node is."""
        return self._vivaldi.coordinate

    @property
    def up_Bps(self) -> float | None:
        """How fast its line sends, by what those that received have timed; None before the first."""
        return self._middle([rate.up_Bps for rate in self._rates])

    @property
    def down_Bps(self) -> float | None:
        """How fast its line receives; None before the first."""
        return self._middle([rate.down_Bps for rate in self._rates])

    def announced(self, *, now: float) -> list[tuple[PeerId, float]]:
        """Round trips to neighbours for the record, in seconds, the nearest first."""
        fresh = [
            (known.round_trip_s, peer)
            for peer, known in self._known.items()
            if known.round_trip_s is not None
            and now - known.at <= FORGET_S
            and peer in self._seen
            and self._seen[peer].is_neighbour
        ]
        return [(peer, seconds) for seconds, peer in sorted(fresh)[:MAX_ANNOUNCED]]

    def saw(self, nodes: Iterable[Seen], *, now: float) -> None:
        """The nodes that there are now, this one left out."""
        self._seen = {each.peer: each for each in nodes}
        if len(self._known) > MAX_PEERS:
            kept = sorted(self._known.items(), key=lambda item: -max(item[1].at, item[1].not_before))
            self._known = dict(kept[: MAX_PEERS // 2])

    def get_timer(self) -> float:
        """When to call ``handle_timer``."""
        return self._next_at

    def handle_timer(self, *, now: float) -> PeerId | None:
        """Whom to measure now, if anybody. The next is due at ``get_timer``."""
        if now < self._next_at:
            return None
        self._next_at = now + (EAGER_S if self._num_measured < ENOUGH and self._has_new(now) else CALM_S)
        self._num_chosen += 1
        if self._num_chosen % CHANCE_EVERY:
            due = self._due_neighbours(now)
            if due:
                return due[0].peer
        others = [each.peer for each in self._seen.values() if self._may_be_measured(each.peer, now)]
        return self._rng.choice(others) if others else None

    def measured(self, peer: PeerId, round_trip_s: float, *, now: float) -> None:
        """A round trip was measured just now, on order or because there is a link anyway."""
        if not 0.0 <= round_trip_s < float("inf"):
            return
        known = self._known.setdefault(peer, _Known())
        known.round_trip_s, known.at = round_trip_s, now
        known.num_failures, known.not_before = 0, float("-inf")
        self._num_measured += 1
        seen = self._seen.get(peer)
        for place in seen.places if seen is not None else ():
            self._places.pop(place, None)
        if seen is not None and seen.coordinate is not None:
            self._vivaldi.observe(peer, seen.coordinate, round_trip_s)

    def unreachable(self, peer: PeerId, *, now: float) -> None:
        """It could not be measured."""
        known = self._known.setdefault(peer, _Known())
        known.not_before = now + min(BACK_OFF_S * 2.0**known.num_failures, MAX_BACK_OFF_S)
        known.num_failures = min(known.num_failures + 1, 16)
        for host in self._seen[peer].places if peer in self._seen else ():
            place = self._places.pop(host, None) or _Place()
            if len(self._places) >= MAX_PEERS:
                del self._places[next(iter(self._places))]
            self._places[host] = place
            place.num_failures = min(place.num_failures + 1, 16)
            if place.num_failures >= BAD_PLACE:
                place.not_before = now + min(BACK_OFF_S * 2.0 ** (place.num_failures - BAD_PLACE), MAX_BACK_OFF_S)

    def is_probe_due(self, *, now: float) -> bool:
        """Whether it is time to measure the bandwidth."""
        return now >= self._probe_at

    def to_probe(self, *, now: float, is_idle: bool) -> PeerId | None:
        """With whom to measure the bandwidth now; None when it is not time, or something more useful is going on.

        Whoever gets a peer reports ``probed`` or ``probe_failed``.
        """
        if not is_idle or not self.is_probe_due(now=now):
            return None
        places = self._reachable()
        rated = [rate.peer for rate in self._rates]
        old = [rate.peer for rate in self._rates if now - rate.at >= PROBE_AGAIN_S and rate.peer in places]
        waiting = [peer for peer in places if peer not in rated]
        willing = [peer for peer in waiting if peer not in self._failed_with]
        if not (waiting or old):
            return None
        self._probe_at = now + PROBE_RETRY_S
        neighbours = [peer for peer in willing if self._seen[peer].is_neighbour]
        self._probing = self._rng.choice((neighbours or willing or old[:1] or waiting)[:NUM_NEAR])
        return self._probing

    def probed(self, peer: PeerId, up_Bps: float, down_Bps: float, *, now: float) -> None:
        """Bandwidth was measured: to the peer, by its clock; from it, by ours."""
        if not (up_Bps > 0.0 and down_Bps > 0.0):
            self.probe_failed(now=now)
            return
        self._failed_with = [each for each in self._failed_with if each != peer] if self._rates else []
        self._rates = deque((each for each in self._rates if each.peer != peer), maxlen=PROBE_PEERS)
        self._rates.append(_Rate(peer, min(up_Bps, MAX_Bps), min(down_Bps, MAX_Bps), now))
        after_s = PROBE_AGAIN_S if len(self._rates) >= PROBE_PEERS else PROBE_AFTER_S
        self._probe_at = now + after_s * self._rng.uniform(1.0, 1.5)

    def probe_failed(self, *, now: float) -> None:
        """It could not be measured."""
        retry_s = min(PROBE_AFTER_S * 2.0 ** len(self._failed_with), PROBE_AGAIN_S if self._rates else PROBE_RETRY_S)
        self._probe_at = now + retry_s * self._rng.uniform(1.0, 1.5)
        if self._probing is not None:
            self._failed_with = [*self._failed_with, self._probing][-NUM_NEAR:]

    def _has_new(self, now: float) -> bool:
        return any(
            self._may_be_measured(peer, now) and (peer not in self._known or self._known[peer].round_trip_s is None)
            for peer in self._seen
        )

    def _may_be_measured(self, peer: PeerId, now: float) -> bool:
        known = self._known.get(peer)
        if known is not None and now < known.not_before:
            return False
        return all(host not in self._places or now >= self._places[host].not_before for host in self._seen[peer].places)

    def _due_neighbours(self, now: float) -> list[Seen]:
        """Of the neighbours that seem nearest, those that were not measured of late; who never was comes first."""
        near = sorted(
            (each for each in self._seen.values() if each.is_neighbour and self._may_be_measured(each.peer, now)),
            key=self._distance,
        )[:NUM_NEAR]
        known = {each.peer: self._known.get(each.peer, _Known()) for each in near}
        due = [each for each in near if now - known[each.peer].at >= AGAIN_S]
        # Who could not be reached comes last: at one host, a dead node would else stand before the living for ever.
        return sorted(due, key=lambda each: (known[each.peer].num_failures, known[each.peer].at))

    def _distance(self, seen: Seen) -> float:
        known = self._known.get(seen.peer)
        if known is not None and known.round_trip_s is not None:
            return known.round_trip_s
        if seen.coordinate is None or not seen.coordinate.is_sane:
            return UNKNOWN_S
        return self.coordinate.distance(seen.coordinate)

    def _reachable(self) -> list[PeerId]:
        """Those that were measured and are still there, the nearest first."""
        found = [
            (known.round_trip_s, peer)
            for peer, known in self._known.items()
            if known.round_trip_s is not None and known.num_failures == 0 and peer in self._seen
        ]
        return [peer for _, peer in sorted(found)]

    @staticmethod
    def _middle(rates: list[float]) -> float | None:
        """The larger one of two in the middle: a slow line at the other end is likelier than a lie about a fast one."""
        return sorted(rates)[len(rates) // 2] if rates else None
