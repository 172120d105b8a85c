"""What a user knows of a swarm, from records and own measurements: who may serve, and how far everybody is apart.

Pure: records and measurements in, values of scheduler.topology out. What a record says is bounded here, and of what two
nodes say of the leg between them the larger counts. What one node says can only change legs that end at it, but for its
part in the median that stands for lines of which nothing is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, ModelId, PeerId
from p2p.records import NodeRecord, ShardRecord, digest_key_of
from scheduler.claims import Claim, ClaimBook
from scheduler.groups import SliceHolder
from scheduler.leg_table import Floats
from scheduler.topology import Candidate, Leg, LegSource
from scheduler.vivaldi import DIMENSIONS, Coordinate, Vivaldi

if TYPE_CHECKING:
    from random import Random

UNKNOWN_ROUND_TRIP_S = 0.25
"""As between continents: a node of which nothing is known must not look nearer than one that was measured."""

MIN_ROUND_TRIP_S, MAX_ROUND_TRIP_S = 5e-5, 5.0

MIN_RATE_Bps, MAX_RATE_Bps = 1e3, 1e11

MIN_KNOWN_RATES = 3
"""Nodes that say how fast their lines are, before others' count as the median of them; until then, as without limit.
Else whoever hides a slow line, or has measured nothing yet, would be preferred to all that tell."""

HOME_UP_Bps, HOME_DOWN_Bps = 625e3, 6.25e6
"""Of a slow home line (5 and 50 Mbit/s): no line of which nothing is known counts as slower, whatever others say."""

MAX_KV_POSITIONS = 2**24
"""What a plan may ask for: a claim of more changes nothing."""

MAX_USEFUL_ERROR = 0.7
"""Relative error of a coordinate, above which it predicts nothing."""

DETOUR = 2.0
"""By so much a leg may break the triangle with the user's own round trips to its ends: real paths do, by less."""

NOISE_S = 0.005
"""In the user's own round trips: what a busy machine adds. Less of a difference between two says nothing."""

LOCATE_PASSES = 8
"""Over all measured nodes, until the user's own coordinate stands still."""


def coordinate_of(record: NodeRecord) -> Coordinate | None:
    """Where a node says that it is; None when it does not, or when it makes no sense."""
    said = record.coordinate
    if said is None:
        return None
    coordinate = Coordinate(tuple(said.vector), said.height, said.error)
    return coordinate if coordinate.is_sane else None


def locate(records: Iterable[NodeRecord], round_trips_s: Mapping[PeerId, float], rng: Random) -> Coordinate | None:
    """The user's own coordinate from the round trips that it measured; None when nobody measured has one."""
    known = [
        (PeerId(record.peer), coordinate, round_trips_s[PeerId(record.peer)])
        for record in records
        if PeerId(record.peer) in round_trips_s and (coordinate := coordinate_of(record)) is not None
    ]
    if not known:
        return None
    ours = Vivaldi(rng)
    for _ in range(LOCATE_PASSES):
        for peer, theirs, round_trip_s in rng.sample(known, len(known)):
            ours.observe(peer, theirs, round_trip_s)
    return ours.coordinate


class SwarmTopology:
    """All legs of a swarm (scheduler.topology.Legs), best source first.

    Args:
        records: of the nodes; those of others have legs of which nothing is known.
        round_trips_s: measured by the user.
        rates_Bps: to and from a node, measured by the user where it did.
        own: the user's coordinate, see ``locate``.
        up_Bps, down_Bps: of the user's own line, if known.
    """

    def __init__(
        self,
        records: Iterable[NodeRecord],
        *,
        round_trips_s: Mapping[PeerId, float],
        rates_Bps: Mapping[PeerId, tuple[float | None, float | None]] | None = None,
        own: Coordinate | None = None,
        up_Bps: float | None = None,
        down_Bps: float | None = None,
    ) -> None:
        self._records = {PeerId(record.peer): record for record in records}
        self._own_s = {peer: _round_trip(seconds) for peer, seconds in round_trips_s.items()}
        self._rates_Bps = rates_Bps or {}
        self._own = own if own is not None and own.error <= MAX_USEFUL_ERROR else None
        self._up_Bps, self._down_Bps = up_Bps, down_Bps
        self._usual_up_Bps = _usual((record.up_Bps for record in self._records.values()), HOME_UP_Bps)
        self._usual_down_Bps = _usual((record.down_Bps for record in self._records.values()), HOME_DOWN_Bps)
        self._coordinates = {
            peer: coordinate
            for peer, record in self._records.items()
            if (coordinate := coordinate_of(record)) is not None and coordinate.error <= MAX_USEFUL_ERROR
        }
        self._announced: dict[PeerId, dict[int, float]] = {}
        self._legs: dict[tuple[PeerId | None, PeerId | None], Leg] = {}

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        """From one peer to another; None is the user. Never fails."""
        key = (sender, receiver)
        leg = self._legs.get(key)
        if leg is None:
            seconds, source = self._round_trip(sender, receiver)
            leg = self._legs[key] = Leg(seconds / 2, source, self._rate(sender, receiver))
        return leg

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """As ``leg`` for all pairs: seconds one way, and B/s with infinity for None (scheduler.leg_table.BulkLegs).

        Shapes: both [senders, receivers].
        """
        first_s = np.array([self._own_s.get(peer, math.nan) for peer in senders])[:, None]
        second_s = np.array([self._own_s.get(peer, math.nan) for peer in receivers])[None, :]
        sum_s, least_s = first_s + second_s, (np.abs(first_s - second_s) - NOISE_S) / DETOUR
        said_s = self._said(senders, receivers)
        said_s = np.where(np.isnan(said_s), self._predicted(senders, receivers), said_s)
        # Comparisons with NaN are false: where the user has measured neither or one of both, nothing is bounded.
        with np.errstate(invalid="ignore"):
            said_s = np.where(said_s < least_s, least_s, said_s)
            said_s = np.where(said_s > DETOUR * sum_s, DETOUR * sum_s, said_s)
        said_s = np.clip(said_s, MIN_ROUND_TRIP_S, MAX_ROUND_TRIP_S)
        bound_s = np.where(np.isnan(sum_s), UNKNOWN_ROUND_TRIP_S, sum_s / 2)
        one_way_s = np.where(np.isnan(said_s), bound_s, said_s) / 2
        one_way_s[np.array(senders)[:, None] == np.array(receivers)[None, :]] = 0.0
        up_Bps = np.array([self._up(peer) for peer in senders])
        down_Bps = np.array([self._down(peer) for peer in receivers])
        return one_way_s, np.minimum(up_Bps[:, None], down_Bps[None, :])

    def _said(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> Floats:
        """What both announce of the round trip between them; NaN where neither does."""
        said = np.full((len(senders), len(receivers)), math.nan)
        rows = {digest_key_of(peer): index for index, peer in enumerate(senders)}
        columns = {digest_key_of(peer): index for index, peer in enumerate(receivers)}
        for row, peer in enumerate(senders):
            for digest, seconds in self._said_by(peer).items():
                if digest in columns:
                    said[row, columns[digest]] = seconds
        for column, peer in enumerate(receivers):
            for digest, seconds in self._said_by(peer).items():
                if digest in rows:
                    said[rows[digest], column] = np.fmax(said[rows[digest], column], seconds)
        return said

    def _predicted(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> Floats:
        """By coordinates; NaN where one of both has none."""
        nowhere = Coordinate((math.nan,) * DIMENSIONS)
        ours = [self._coordinates.get(peer, nowhere) for peer in senders]
        theirs = [self._coordinates.get(peer, nowhere) for peer in receivers]
        away = np.array([c.vector for c in ours])[:, None, :] - np.array([c.vector for c in theirs])[None, :, :]
        heights = np.array([c.height for c in ours])[:, None] + np.array([c.height for c in theirs])[None, :]
        return np.sqrt((away**2).sum(axis=2)) + heights  # type: ignore[no-any-return]

    def _round_trip(self, one: PeerId | None, other: PeerId | None) -> tuple[float, LegSource]:
        if one == other:
            return 0.0, LegSource.MEASURED
        if one is None or other is None:
            return self._own_leg(one if one is not None else other)
        first, second = self._announced_s(one, other), self._announced_s(other, one)
        if first is not None or second is not None:
            return self._within_reach(one, other, max(first or 0.0, second or 0.0)), LegSource.ANNOUNCED
        ours, theirs = self._coordinates.get(one), self._coordinates.get(other)
        if ours is not None and theirs is not None:
            return self._within_reach(one, other, ours.distance(theirs)), LegSource.PREDICTED
        known = self._own_s.get(one), self._own_s.get(other)
        if known[0] is not None and known[1] is not None:
            return (known[0] + known[1]) / 2, LegSource.BOUND
        return UNKNOWN_ROUND_TRIP_S, LegSource.UNKNOWN

    def _own_leg(self, peer: PeerId | None) -> tuple[float, LegSource]:
        measured = None if peer is None else self._own_s.get(peer)
        if measured is not None:
            return measured, LegSource.MEASURED
        theirs = None if peer is None else self._coordinates.get(peer)
        if theirs is not None and self._own is not None:
            return _round_trip(self._own.distance(theirs)), LegSource.PREDICTED
        return UNKNOWN_ROUND_TRIP_S, LegSource.UNKNOWN

    def _announced_s(self, one: PeerId, other: PeerId) -> float | None:
        return self._said_by(one).get(digest_key_of(other))

    def _said_by(self, peer: PeerId) -> dict[int, float]:
        """Round trips that a node announces, by digest_key_of the other one."""
        said = self._announced.get(peer)
        if said is None:
            record = self._records.get(peer)
            said = self._announced[peer] = {
                int.from_bytes(each.peer_digest, "little"): _round_trip(each.seconds)
                for each in (() if record is None else record.round_trips)
            }
        return said

    def _within_reach(self, one: PeerId, other: PeerId, seconds: float) -> float:
        """Between what the user's own round trips to both allow, with slack: two friends cannot claim to be at one
        place when they are not, nor anybody to be at the end of the world."""
        first, second = self._own_s.get(one), self._own_s.get(other)
        if first is None or second is None:
            return _round_trip(seconds)
        least_s = (abs(first - second) - NOISE_S) / DETOUR
        return _round_trip(min(max(seconds, least_s), DETOUR * (first + second)))

    def _rate(self, sender: PeerId | None, receiver: PeerId | None) -> float | None:
        measured_Bps = None
        if sender is None and receiver is not None:
            measured_Bps = self._rates_Bps.get(receiver, (None, None))[0]
        elif receiver is None and sender is not None:
            measured_Bps = self._rates_Bps.get(sender, (None, None))[1]
        is_measured = bool(measured_Bps)
        rate_Bps = min(_rate_of(measured_Bps), self._up(sender, is_measured), self._down(receiver, is_measured))
        return None if math.isinf(rate_Bps) else rate_Bps

    def _up(self, peer: PeerId | None, is_measured: bool = False) -> float:
        """Infinite where nothing is known, and nothing to be assumed as the leg itself was measured."""
        if peer is None:
            return _rate_of(self._up_Bps)
        record = self._records.get(peer)
        return _rate_of(None if record is None else record.up_Bps, math.inf if is_measured else self._usual_up_Bps)

    def _down(self, peer: PeerId | None, is_measured: bool = False) -> float:
        """As ``_up``."""
        if peer is None:
            return _rate_of(self._down_Bps)
        record = self._records.get(peer)
        return _rate_of(None if record is None else record.down_Bps, math.inf if is_measured else self._usual_down_Bps)


def _rate_of(announced_Bps: float | None, unknown_Bps: float = math.inf) -> float:
    """Within bounds; the second when it is not known, as 0 says in a record."""
    return min(max(announced_Bps, MIN_RATE_Bps), MAX_RATE_Bps) if announced_Bps else unknown_Bps


def _usual(announced_Bps: Iterable[float], least_Bps: float) -> float:
    """The median of those that are known; infinite when too few are."""
    known = [_rate_of(each) for each in announced_Bps if each]
    return max(statistics.median_low(known), least_Bps) if len(known) >= MIN_KNOWN_RATES else math.inf


def _round_trip(seconds: float) -> float:
    return min(max(seconds, MIN_ROUND_TRIP_S), MAX_ROUND_TRIP_S)


def candidates(
    records: Iterable[NodeRecord],
    claims: ClaimBook,
    *,
    model_id: ModelId,
    num_layers: int,
    numerics: str,
    now: float,
) -> list[Candidate]:
    """Who may serve a stage alone, with what is believed of its speed.

    Args:
        num_layers: of the model, as the user knows it.
        now: monotonic seconds, of the claims.
    """
    return [
        _candidate(record, shard, claims, now)
        for record in records
        for shard in record.shards
        if shard.model_id == model_id and not shard.slice and not _why_unusable(shard, num_layers, numerics)
    ]


def slice_holders(
    records: Iterable[NodeRecord],
    claims: ClaimBook,
    *,
    model_id: ModelId,
    num_layers: int,
    numerics: str,
    now: float,
) -> list[SliceHolder]:
    """Who may be a member of a group that serves a stage, and of which slice. Arguments are those of ``candidates``."""
    found = []
    for record in records:
        for shard in record.shards:
            if shard.model_id == model_id and shard.slice and not _why_unusable(shard, num_layers, numerics):
                place = ModelSlice.parse(shard.slice)
                found.append(SliceHolder(_candidate(record, shard, claims, now), place.index, place.weights))
    return found


def unusable(
    records: Iterable[NodeRecord], *, model_id: ModelId, num_layers: int, numerics: str
) -> list[tuple[PeerId, str]]:
    """Which shards of the model are no candidates, and why, for people."""
    return [
        (PeerId(record.peer), why)
        for record in records
        for shard in record.shards
        if shard.model_id == model_id and (why := _why_unusable(shard, num_layers, numerics))
    ]


def _why_unusable(shard: ShardRecord, num_layers: int, numerics: str) -> str:
    if shard.num_layers != num_layers or shard.stop > num_layers:
        return f"announces layers {shard.start}:{shard.stop} of {shard.num_layers}, but the model has {num_layers}"
    if not shard.is_ready:
        return "is still loading its layers"
    if shard.numerics != numerics:
        return "serves another numerics class"
    return ""


def _candidate(record: NodeRecord, shard: ShardRecord, claims: ClaimBook, now: float) -> Candidate:
    peer = PeerId(record.peer)
    belief = claims.believed(Claim(peer, shard.seconds_per_layer, shard.queue_s), now)
    return Candidate(
        peer=peer,
        layers=LayerRange(shard.start, shard.stop),
        speed=belief.speed,
        kv_free_positions=min(shard.kv_free_tokens, MAX_KV_POSITIONS),
        queue_s=belief.queue_s,
        numerics=shard.numerics,
        operator=record.operator,
        region=record.region,
        price=record.price,
        note=belief.note,
    )


def choose_to_measure(
    records: Sequence[NodeRecord], own: Coordinate | None, limit: int, rng: Random
) -> list[NodeRecord]:
    """Whose round trip the user should measure: all when few, else those that seem nearest, and some by chance.

    A coordinate is a claim: whoever seems near is measured, and so is a half that nobody's claim has chosen.

    Args:
        own: the user's coordinate; None chooses all by chance.
        limit: how many at most.
    """
    if len(records) <= limit:
        return list(records)
    order = rng.sample(list(records), len(records))  # by chance among equals, and for the rest
    if own is None:
        return order[:limit]
    place = {record.peer: coordinate_of(record) for record in order}
    near = sorted(
        (record for record in order if place[record.peer] is not None),
        key=lambda record: own.distance(place[record.peer] or Coordinate()),
    )[: limit - limit // 2]
    chosen = {record.peer for record in near}
    return near + [record for record in order if record.peer not in chosen][: limit - len(near)]
