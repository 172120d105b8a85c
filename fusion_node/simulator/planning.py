"""How a simulated user plans: with the product's planner, over what a client would know.

What it knows: of the nodes that it has measured, the true round trip at that time; between two nodes, what network
coordinates predict, which is off by COORDINATE_ERROR; of each node, what its record of some seconds ago says, within
what is possible (scheduler.claims).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion_node.client.answer_core import Place
from fusion_node.types import LayerRange, PeerId
from scheduler.claims import clamp_speed
from scheduler.planner import Candidate as OldCandidate
from scheduler.planner import Route, plan_route
from scheduler.topology import Candidate, Leg, LegSource, RouteStage

if TYPE_CHECKING:
    from fusion_node.simulator.node import Node
    from fusion_node.simulator.world import World

COORDINATE_ERROR = 0.12
"""Median relative error of Vivaldi coordinates with height (Dabek et al., "Vivaldi", SIGCOMM 2004, figure 8: 11 %)."""


@dataclass(frozen=True, slots=True)
class Known:
    """A node as a user knows it.

    Attributes:
        round_trip_s: measured.
        candidate: from its record.
    """

    node: Node
    round_trip_s: float
    candidate: Candidate


class UserLegs:
    """All legs as one user knows them (scheduler.topology.Legs)."""

    def __init__(self, world: World, user: PeerId, known: Sequence[Known]) -> None:
        self._world = world
        self._user = world.host(user)
        self._round_trips = {each.node.peer: each.round_trip_s for each in known}

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        if sender is None or receiver is None:
            peer = receiver if sender is None else sender
            if peer is None:
                return Leg(0.0, LegSource.MEASURED)
            round_trip_s = self._round_trips.get(peer)
            if round_trip_s is None:
                return Leg(0.15, LegSource.UNKNOWN)
            sending = self._user if sender is None else self._world.host(peer)
            return Leg(round_trip_s / 2, LegSource.MEASURED, sending.place.line.up_Bps)
        one, two = self._world.host(sender), self._world.host(receiver)
        path = self._world.network.path(one.place, two.place)
        error = self._world.network.unit(4, one.place, two.place)
        rate_Bps = min(one.place.line.up_Bps, two.place.line.down_Bps)
        if path.limit_Bps is not None:
            rate_Bps = min(rate_Bps, path.limit_Bps)
        # Uniform within twice the median.
        return Leg(path.one_way_s * (1 + COORDINATE_ERROR * (4 * error - 2)), LegSource.PREDICTED, rate_Bps)


def believed(node: Node) -> Candidate:
    """What a record of it says, within what is possible."""
    speed = clamp_speed(
        (node.announced_speed.rows_1_s, node.announced_speed.rows_16_s, node.announced_speed.rows_256_s)
    )
    return Candidate(node.peer, node.layers, speed, node.announced_kv, node.announced_queue_s)


def plan(
    world: World,
    legs: UserLegs,
    known: Sequence[Known],
    num_positions: int,
    num_prompt: int,
    avoid_pairs: Collection[tuple[PeerId, PeerId]],
) -> tuple[RouteStage, ...] | None:
    """The route that the product's planner chooses; None when there is none."""
    trips = {each.node.peer: each.round_trip_s for each in known}
    route = plan_route(
        [
            OldCandidate(c.peer, c.layers, trips[c.peer], c.speed.rows_1_s, c.kv_free_positions)
            for c in (each.candidate for each in known)
        ],
        num_layers=world.model.num_layers,
        num_positions=num_positions,
    )
    if not isinstance(route, Route):
        return None
    return tuple(RouteStage(stage.peer, stage.layers) for stage in route.stages)


def plan_patch(
    world: World,
    legs: UserLegs,
    route: Sequence[Place],
    lost: Collection[int],
    usable: Sequence[Known],
    num_positions: int,
    num_prompt: int,
    avoid_pairs: Collection[tuple[PeerId, PeerId]],
) -> tuple[RouteStage, ...] | None:
    """The same route with others in the place of the lost stages; None when there is none."""
    lost_set = set(lost)
    pairs = {frozenset(pair) for pair in avoid_pairs}
    stages: list[RouteStage] = []
    used: set[PeerId] = set()
    for is_lost, run in itertools.groupby(range(len(route)), key=lambda index: index in lost_set):
        indices = list(run)
        if not is_lost:
            stages += [RouteStage(route[i].peer, route[i].layers) for i in indices]
            continue
        gap = LayerRange(route[indices[0]].layers.start, route[indices[-1]].layers.stop)
        ends = {route[i].peer for i in (indices[0] - 1, indices[-1] + 1) if 0 <= i < len(route)}
        found = plan_route(
            [
                OldCandidate(
                    c.peer,
                    LayerRange(max(c.layers.start, gap.start) - gap.start, min(c.layers.stop, gap.stop) - gap.start),
                    each.round_trip_s,
                    c.speed.rows_1_s,
                    c.kv_free_positions,
                )
                for each in usable
                for c in (each.candidate,)
                if max(c.layers.start, gap.start) < min(c.layers.stop, gap.stop)
                and c.peer not in used
                and not any(frozenset((c.peer, end)) in pairs for end in ends)
            ],
            num_layers=len(gap),
            num_positions=num_positions,
        )
        if not isinstance(found, Route):
            return None
        shifted = [
            RouteStage(s.peer, LayerRange(s.layers.start + gap.start, s.layers.stop + gap.start)) for s in found.stages
        ]
        used |= {stage.peer for stage in shifted}
        stages += shifted
    return tuple(stages)
