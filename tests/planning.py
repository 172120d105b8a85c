"""Small swarms for tests of planning: legs out of tables, and exhaustive search over all routes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fusion_node.types import LayerRange, PeerId
from scheduler.cost_model import RouteCost, Workload, route_cost
from scheduler.plans import Objective
from scheduler.rules import Rules
from scheduler.topology import Candidate, Leg, Legs, LegSource, RouteStage, Speed


@dataclass
class TableLegs:
    """Legs of which each is as long as it is said here, and otherwise by default; None stands for the user."""

    default_s: float = 0.01
    one_way_s: dict[tuple[str | None, str | None], float] = field(default_factory=dict)
    rate_Bps: dict[tuple[str | None, str | None], float] = field(default_factory=dict)

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        pair = (sender, receiver)
        return Leg(self.one_way_s.get(pair, self.default_s), LegSource.MEASURED, self.rate_Bps.get(pair))

    def far(self, peer: str, one_way_s: float) -> TableLegs:
        """With a peer that is far from the user."""
        self.one_way_s[None, peer] = self.one_way_s[peer, None] = one_way_s
        return self


def node(
    name: str,
    start: int,
    stop: int,
    *,
    speed: float = 0.001,
    wide: float | None = None,
    room: int = 10_000,
    queue_s: float = 0.0,
    operator: str = "",
    region: str = "",
    price: float = 0.0,
    numerics: str = "",
    note: str = "",
) -> Candidate:
    """A candidate; ``speed`` is of one row, ``wide`` of 16 and a sixteenth of that of 256."""
    wide = speed if wide is None else wide
    return Candidate(
        peer=PeerId(name),
        layers=LayerRange(start, stop),
        speed=Speed(speed, wide, wide * 16),
        kv_free_positions=room,
        queue_s=queue_s,
        numerics=numerics,
        operator=operator,
        region=region,
        price=price,
        note=note,
    )


def all_routes(nodes: Sequence[Candidate], num_layers: int) -> Iterator[list[tuple[Candidate, RouteStage]]]:
    """Every route of distinct candidates that covers all layers."""

    def extend(done: list[tuple[Candidate, RouteStage]], layer: int) -> Iterator[list[tuple[Candidate, RouteStage]]]:
        if layer == num_layers:
            yield list(done)
            return
        for c in nodes:
            if c.layers.start <= layer < c.layers.stop and c.peer not in {stage.peer for _, stage in done}:
                for stop in range(layer + 1, c.layers.stop + 1):
                    done.append((c, RouteStage(c.peer, LayerRange(layer, stop))))
                    yield from extend(done, stop)
                    done.pop()

    yield from extend([], 0)


def value_of(cost: RouteCost, objective: Objective) -> float:
    """What an objective makes small."""
    match objective:
        case Objective.LATENCY:
            return cost.seconds_per_token
        case Objective.THROUGHPUT:
            return 1 / cost.tokens_per_s
        case Objective.FIRST_TOKEN:
            return cost.time_to_first_token_s


def keeps(rules: Rules, route: Sequence[tuple[Candidate, RouteStage]]) -> bool:
    """Whether a route keeps all rules: said anew here, so that a test does not ask the code that it tests."""
    operators = [c.operator for c, _ in route if c.operator]
    price = sum(c.price * len(stage.layers) for c, stage in route)
    return (
        all(rules.rejects(c) is None for c, _ in route)
        and (not rules.one_shard_per_operator or len(operators) == len(set(operators)))
        and (rules.max_route_price is None or price <= rules.max_route_price + 1e-9)
        and (rules.max_stages is None or len(route) <= rules.max_stages)
    )


def exhaustive(
    nodes: Sequence[Candidate],
    legs: Legs,
    num_layers: int,
    workload: Workload,
    objective: Objective,
    rules: Rules,
    allows: Callable[[Sequence[tuple[Candidate, RouteStage]]], bool] = lambda route: True,
) -> float | None:
    """The lowest value of all routes that keep all rules; None when there is none."""
    usable = [c for c in nodes if c.kv_free_positions >= workload.num_positions]
    values = [
        value_of(route_cost(route, legs, workload), objective)
        for route in all_routes(usable, num_layers)
        if keeps(rules, route) and allows(route)
    ]
    return min(values, default=None)


def random_swarm(
    rng: random.Random, num_nodes: int, num_layers: int, *, num_operators: int = 3
) -> tuple[list[Candidate], TableLegs]:
    """Nodes of all speeds, and legs that keep to no triangle."""
    nodes = []
    for index in range(num_nodes):
        start = rng.randrange(num_layers)
        stop = rng.randrange(start + 1, num_layers + 1)
        speed = 10 ** rng.uniform(-4, -2)
        nodes.append(
            node(
                f"n{index}",
                start,
                stop,
                speed=speed,
                wide=speed * rng.uniform(1, 8),
                queue_s=rng.choice([0.0, 0.0, 0.01]),
                operator=rng.choice(["", *(f"op{i}" for i in range(num_operators))]),
                region=rng.choice(["eu", "eu-west", "us"]),
                price=rng.choice([0.0, 1.0, 3.0]),
            )
        )
    names: list[str | None] = [None, *(n.peer for n in nodes)]
    legs = TableLegs()
    for pair in itertools.permutations(names, 2):
        legs.one_way_s[pair] = 10 ** rng.uniform(-3, -1)
        if rng.random() < 0.7:
            legs.rate_Bps[pair] = 10 ** rng.uniform(5, 8)
    return nodes, legs
