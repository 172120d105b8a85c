"""How a simulated newcomer chooses its layers: by the product's choice, over what its records would tell it.

Between two nodes it knows what network coordinates predict, as users do (fusion_node.simulator.planning); of users it
knows nothing. Nodes that load count as in the product: for the coverage to come, and as what others intend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from fusion_node.client.topology import UNKNOWN_ROUND_TRIP_S
from fusion_node.simulator.network import Floats
from fusion_node.simulator.planning import UserLegs, believed_speed
from fusion_node.types import LayerRange, PeerId
from scheduler.swarm_rate import Host
from scheduler.topology import Leg, LegSource

if TYPE_CHECKING:
    from fusion_node.simulator.node import Node
    from fusion_node.simulator.world import World


class Placer(Protocol):
    """Who gives nodes their layers, where they do not choose for themselves: the benchmarks have another system's."""

    def first(self, world: World, nodes: Sequence[Node]) -> Sequence[LayerRange]:
        """Of those that are there when the world begins, in order."""
        ...

    def newcomer(self, world: World, node: Node) -> LayerRange:
        """Of one that comes."""
        ...


class NodeLegs:
    """All legs as a node knows them (scheduler.topology.Legs)."""

    def __init__(self, world: World) -> None:
        self._between = UserLegs(world, None, {})

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        if sender is None or receiver is None:
            return Leg(UNKNOWN_ROUND_TRIP_S / 2, LegSource.UNKNOWN)
        return self._between.leg(sender, receiver)

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """``leg`` of every pair of nodes (scheduler.leg_table.BulkLegs)."""
        return self._between.bulk_legs(senders, receivers)


def host_of(node: Node, capacity_layers: int) -> Host:
    """A node as its record tells of it; one that is neither serving nor loading holds nothing."""
    return Host(
        peer=node.peer,
        capacity_layers=capacity_layers,
        seconds_per_layer=believed_speed(node).rows_1_s,
        held=node.layers if node.holds else None,
        load_Bps=node.place.line.down_Bps,
        is_ready=node.is_serving,
    )
