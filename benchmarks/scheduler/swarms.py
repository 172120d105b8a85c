"""Seeded swarms to plan in: devices and lines of volunteers as in the simulator, and the true cost of a route.

The truth is scheduler.cost_model over the modelled Internet: heterogeneous devices, regions up to 300 ms apart, home
lines whose way up is a tenth of the way down, and relays between those that cannot be dialled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_node.simulator.devices import DEVICES, MODELS, DeviceProfile, ModelShape
from fusion_node.simulator.network import Network, Place
from fusion_node.types import LayerRange, PeerId
from scheduler.cost_model import RouteCost, Workload, route_cost
from scheduler.leg_table import Floats
from scheduler.topology import Candidate, Leg, LegSource, RouteStage

PREDICTION_ERROR = 0.12
"""Median relative error of network coordinates (Dabek et al., Vivaldi, SIGCOMM 2004, figure 8: 11 %)."""

KV_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class Server:
    """A node, and what it really is.

    Attributes:
        capacity: layers of the model that fit on it.
        held: None before layers are placed.
    """

    peer: PeerId
    device: DeviceProfile
    place: Place
    capacity: int
    held: LayerRange | None = None


class Swarm:
    """Servers and one user of a model.

    Args:
        servers: in the order in which they joined.
    """

    def __init__(self, model: ModelShape, network: Network, user: Place, servers: Sequence[Server]) -> None:
        self.model, self.network, self.user, self.servers = model, network, user, tuple(servers)
        self._by_peer = {server.peer: server for server in servers}

    def placed(self, ranges: Sequence[LayerRange | None]) -> Swarm:
        """The same servers with other layers."""
        servers = [replace(server, held=held) for server, held in zip(self.servers, ranges, strict=True)]
        return Swarm(self.model, self.network, self.user, servers)

    def candidates(self) -> list[Candidate]:
        """The servers that hold something, with their true speed."""
        return [
            Candidate(s.peer, s.held, s.device.speed(self.model), KV_POSITIONS)
            for s in self.servers
            if s.held is not None
        ]

    def cost(self, route: Sequence[RouteStage], workload: Workload) -> RouteCost:
        """What a route really costs."""
        by_peer = {c.peer: c for c in self.candidates()}
        return route_cost([(by_peer[stage.peer], stage) for stage in route], TrueLegs(self), workload)

    def place_of(self, peer: PeerId | None) -> Place:
        """None stands for the user."""
        return self.user if peer is None else self._by_peer[peer].place

    def round_trip_s(self, one: PeerId | None, other: PeerId | None) -> float:
        """The true one."""
        return 2 * self.network.path(self.place_of(one), self.place_of(other)).one_way_s


class TrueLegs:
    """All legs as they are (scheduler.topology.Legs)."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        one, two = self._swarm.place_of(sender), self._swarm.place_of(receiver)
        path = self._swarm.network.path(one, two)
        rates = [one.line.up_Bps, two.line.down_Bps, *([] if path.limit_Bps is None else [path.limit_Bps])]
        return Leg(path.one_way_s, LegSource.MEASURED, min(rates))

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """See scheduler.leg_table.BulkLegs."""
        ones = [self._swarm.place_of(peer) for peer in senders]
        twos = [self._swarm.place_of(peer) for peer in receivers]
        one_way_s, limit_Bps = self._swarm.network.paths_between(ones, twos)
        lines_Bps = np.minimum.outer([p.line.up_Bps for p in ones], [p.line.down_Bps for p in twos])
        return one_way_s, np.minimum(limit_Bps, lines_Bps)


class KnownLegs(TrueLegs):
    """Legs as a user knows them: its own are measured, those between nodes are predicted by coordinates, with error."""

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        leg = super().leg(sender, receiver)
        if sender is None or receiver is None:
            return leg
        unit = self._swarm.network.unit(4, self._swarm.place_of(sender), self._swarm.place_of(receiver))
        return Leg(leg.one_way_s * _spoilt(unit), LegSource.PREDICTED, leg.rate_Bps)

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        one_way_s, rate_Bps = super().bulk_legs(senders, receivers)
        places = [self._swarm.place_of(p) for p in senders], [self._swarm.place_of(p) for p in receivers]
        units = self._swarm.network.units_between(4, *places)
        return one_way_s * (1 + PREDICTION_ERROR * (4 * units - 2)), rate_Bps


def _spoilt(unit: float) -> float:
    """Uniform within twice the median error."""
    return 1 + PREDICTION_ERROR * (4 * unit - 2)


def volunteers(seed: int, num_servers: int, model_name: str = "llama-70b") -> Swarm:
    """Servers as they volunteer, without layers yet, and a user at home."""
    rng = random.Random(seed)
    model, network = MODELS[model_name], Network(seed, random.Random(seed + 1))
    user = network.place(rng, is_home=True)
    servers = []
    for index in range(num_servers):
        device = rng.choices(DEVICES, [d.share for d in DEVICES])[0]
        place = network.place(rng)
        servers.append(Server(PeerId(f"node{index:05}"), device, place, device.num_layers(model)))
    return Swarm(model, network, user, servers)


def scattered(swarm: Swarm, seed: int) -> Swarm:
    """Every server with as many layers as fit: the first ones side by side until all are held, the others anywhere."""
    rng = random.Random(seed)
    ranges: list[LayerRange | None] = []
    held = 0
    for server in swarm.servers:
        last_start = swarm.model.num_layers - server.capacity
        start = min(held, last_start) if held < swarm.model.num_layers else rng.randrange(last_start + 1)
        ranges.append(LayerRange(start, start + server.capacity))
        held = max(held, start + server.capacity) if start <= held else held
    return swarm.placed(ranges)
