"""Swarms to place layers on: hosts on a plane, where a leg is as long as the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fusion_node.types import LayerRange, PeerId
from scheduler.placement import Decision, Move
from scheduler.swarm_rate import Host, Work
from scheduler.topology import Leg, LegSource


@dataclass
class Plane:
    """Legs of hosts at places given in seconds; the users are in the middle.

    Attributes:
        up_Bps: uplinks; one that is not named is never the limit.
    """

    at: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    up_Bps: dict[PeerId, float] = field(default_factory=dict)

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        (a, b), (c, d) = (self.at.get(peer, (0.0, 0.0)) if peer else (0.0, 0.0) for peer in (sender, receiver))
        rate_Bps = self.up_Bps.get(sender) if sender else None
        return Leg(0.0005 + ((a - c) ** 2 + (b - d) ** 2) ** 0.5, LegSource.PREDICTED, rate_Bps)


def host(name: str, capacity: int, held: tuple[int, int] | None = None, *, layer_s: float = 0.002) -> Host:
    return Host(PeerId(name), capacity, layer_s, None if held is None else LayerRange(*held))


def work(num_layers: int, *, layer_bytes: int = 1_000_000, first_layers: frozenset[int] | None = None) -> Work:
    return Work(num_layers, layer_bytes, 8192, first_layers)


def random_swarm(
    num_hosts: int, seed: int, *, capacities: tuple[int, int], cities: Sequence[float] = (0.0, 0.03, 0.08)
) -> tuple[list[Host], Plane]:
    rng = random.Random(seed)
    peers = [PeerId(f"{seed}-{index}") for index in range(num_hosts)]
    plane = Plane(
        {peer: (rng.choice(cities) + rng.uniform(0, 0.004), rng.uniform(0, 0.004)) for peer in peers},
        {peer: rng.choice((1.25e6, 12.5e6)) for peer in peers},
    )
    hosts = [Host(peer, rng.randint(*capacities), rng.choice((0.001, 0.002, 0.005)), load_Bps=12.5e6) for peer in peers]
    return hosts, plane


def carried_out(hosts: Sequence[Host], decisions: Sequence[Decision]) -> list[Host]:
    """The hosts when all that was decided is done."""
    return [replace(h, held=d.layers) for h, d in zip(hosts, decisions, strict=True)]


def moves(decisions: Sequence[Decision]) -> list[Move]:
    return [decision for decision in decisions if isinstance(decision, Move)]
