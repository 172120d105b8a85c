"""How a simulated user plans: with the product's planner if not told otherwise, over what a client would know.

What it knows: of the nodes that it has measured, the true round trip at that time; between two nodes, what network
coordinates predict, which is off by COORDINATE_ERROR; of each node, what its record of some seconds ago says, within
what is possible and corrected by what rounds with it took (scheduler.claims).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fusion_node.simulator.network import Floats
from fusion_node.types import PeerId
from scheduler.claims import Claim, ClaimBook, clamp_speed
from scheduler.cost_model import Workload
from scheduler.planner import plan_route
from scheduler.plans import Avoid, Planned
from scheduler.topology import Candidate, Leg, LegSource, RouteStage, Speed

if TYPE_CHECKING:
    from fusion_node.simulator.links import Host
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
    """All legs as one user knows them (scheduler.topology.Legs).

    Args:
        round_trips: measured by the user, in seconds.
    """

    def __init__(self, world: World, user: Host | None, round_trips: Mapping[PeerId, float]) -> None:
        self._world = world
        self._user = user
        self._round_trips = round_trips

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        if sender is None or receiver is None:
            peer = receiver if sender is None else sender
            if peer is None:
                return Leg(0.0, LegSource.MEASURED)
            round_trip_s = self._round_trips.get(peer)
            if round_trip_s is None:
                return Leg(0.15, LegSource.UNKNOWN)
            sending = self._user if sender is None and self._user is not None else self._world.host(peer)
            return Leg(round_trip_s / 2, LegSource.MEASURED, sending.place.line.up_Bps)
        one, two = self._world.host(sender), self._world.host(receiver)
        path = self._world.network.path(one.place, two.place)
        error = self._world.network.unit(4, one.place, two.place)
        rate_Bps = min(one.place.line.up_Bps, two.place.line.down_Bps)
        if path.limit_Bps is not None:
            rate_Bps = min(rate_Bps, path.limit_Bps)
        # Uniform within twice the median.
        return Leg(path.one_way_s * (1 + COORDINATE_ERROR * (4 * error - 2)), LegSource.PREDICTED, rate_Bps)

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """``leg`` of every pair of nodes (scheduler.leg_table.BulkLegs)."""
        network = self._world.network
        ones = [self._world.host(peer).place for peer in senders]
        twos = [self._world.host(peer).place for peer in receivers]
        one_way_s, limit_Bps = network.paths_between(ones, twos)
        errors = network.units_between(4, ones, twos)
        rate_Bps = np.minimum.outer([p.line.up_Bps for p in ones], [p.line.down_Bps for p in twos])
        return one_way_s * (1 + COORDINATE_ERROR * (4 * errors - 2)), np.minimum(rate_Bps, limit_Bps)


def believed_speed(node: Node) -> Speed:
    """What a record of it says, within what is possible."""
    said = node.announced_speed
    return clamp_speed((said.rows_1_s, said.rows_16_s, said.rows_256_s))


def believed(node: Node, claims: ClaimBook, now: float) -> Candidate:
    """A node as a candidate, by its record and by what a user has measured of it."""
    said = node.announced_speed
    claim = Claim(node.peer, (said.rows_1_s, said.rows_16_s, said.rows_256_s), node.announced_queue_s)
    belief = claims.believed(claim, now)
    return Candidate(node.peer, node.layers, belief.speed, node.announced_kv, belief.queue_s)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A route, and what a step over it is expected to take; None where that is not reckoned."""

    route: tuple[RouteStage, ...]
    seconds_per_step: float | None = None


class Scheduler(Protocol):
    """How users choose routes. The benchmarks put those of other systems in the place of the product's."""

    def plan(
        self,
        world: World,
        legs: UserLegs,
        known: Sequence[Known],
        work: Workload,
        *,
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
        pinned: Sequence[RouteStage] = (),
    ) -> Chosen | None:
        """A route; None when there is none.

        Args:
            pinned: stages that stay as they are, in order.
        """
        ...

    def alternates(
        self,
        world: World,
        legs: UserLegs,
        known: Sequence[Known],
        work: Workload,
        route: Sequence[RouteStage],
        *,
        avoid_pairs: Collection[tuple[PeerId, PeerId]],
    ) -> tuple[tuple[RouteStage, ...], ...]:
        """For each stage of a route what would take its place; empty where nothing would."""
        ...


class OwnScheduler:
    """The product's planner."""

    def plan(
        self,
        world: World,
        legs: UserLegs,
        known: Sequence[Known],
        work: Workload,
        *,
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
        pinned: Sequence[RouteStage] = (),
    ) -> Chosen | None:
        """See Scheduler."""
        planned = plan_route(
            [each.candidate for each in known],
            legs,
            num_layers=world.model.num_layers,
            workload=work,
            first_layers=world.first_layers,
            pinned=pinned,
            avoid=Avoid(pairs=frozenset(avoid_pairs)),
            is_explained=False,
        )
        return Chosen(planned.route, planned.cost.seconds_per_step) if isinstance(planned, Planned) else None

    def alternates(
        self,
        world: World,
        legs: UserLegs,
        known: Sequence[Known],
        work: Workload,
        route: Sequence[RouteStage],
        *,
        avoid_pairs: Collection[tuple[PeerId, PeerId]],
    ) -> tuple[tuple[RouteStage, ...], ...]:
        """See Scheduler."""
        planned = plan_route(
            [each.candidate for each in known],
            legs,
            num_layers=world.model.num_layers,
            workload=work,
            first_layers=world.first_layers,
            pinned=route,
            avoid=Avoid(pairs=frozenset(avoid_pairs)),
        )
        if not isinstance(planned, Planned):
            return ((),) * len(route)
        return tuple(() if each is None else each.stages for each in planned.alternates)
