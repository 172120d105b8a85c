"""Our routes and placements against those of Petals' and Parallax's published algorithms, on the same seeded swarms.

Every system plans with what it would know: ours with round trips between nodes that network coordinates predict with an
error of 12 % at the median, Petals with some true ones and 150 ms for the rest, Parallax with all true ones. Each plan
is then priced by what it really costs, bytes included. A ratio of 2 means half the seconds, or twice the tokens.

Routing is compared on the placement of the rival, which its router can use; placement together with routing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report import Check
from benchmarks.scheduler import parallax, petals
from benchmarks.scheduler.swarms import KnownLegs, Swarm, volunteers
from fusion_node.types import LayerRange
from scheduler.cost_model import Workload
from scheduler.placement import Move, place_all
from scheduler.planner import plan_route
from scheduler.plans import Objective, Planned
from scheduler.swarm_rate import Host, Work
from scheduler.topology import RouteStage

NUM_SERVERS = (24, 80)
"""Of small swarms, which hold the model's 80 layers seven times over, and of larger ones with more to choose from."""

MAX_LENGTH = 2048
NUM_SAMPLED = 10
"""Routes of those that Petals draws by chance for throughput."""


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Some swarms, or many."""
    ratios: dict[str, list[float]] = defaultdict(list)
    unserved: dict[str, int] = defaultdict(int)
    seeds = dict(zip(NUM_SERVERS, (8, 3) if quick else (40, 20), strict=True))
    for num_servers, count in seeds.items():
        for seed in range(count):
            _compare(seed, num_servers, ratios, unserved)
    checks = [
        Check(f"rivals-{name.replace(' ', '-')}", f"ours / {name}", statistics.median(found), "x", 1.0, ">=")
        for name, found in ratios.items()
    ]
    summary = {
        name: {"median": statistics.median(found), "worst": min(found), "best": max(found), "swarms": len(found)}
        for name, found in ratios.items()
    }
    return checks, {"ratios": summary, "no route in": dict(unserved), "swarms of servers": seeds}


def _compare(seed: int, num_servers: int, ratios: dict[str, list[float]], unserved: dict[str, int]) -> None:
    bare = volunteers(seed, num_servers)
    workload = Workload(MAX_LENGTH, prompt_tokens=512, row_bytes=bare.model.row_bytes)
    if sum(server.capacity for server in bare.servers) < bare.model.num_layers:
        return

    ours = _placed_by_us(bare)
    own_s, own_rate = (
        _seconds(ours, [_planned(ours, Objective.LATENCY, workload)], workload),
        _rate(ours, [_planned(ours, Objective.THROUGHPUT, workload)], workload),
    )
    if own_s is None or own_rate is None:
        unserved["ours"] += 1

    swarm = _placed_by_petals(bare, seed, 3 if num_servers <= NUM_SERVERS[0] else 1)
    servers = _petals_servers(swarm, seed)
    client = {server.peer: swarm.round_trip_s(None, server.peer) for server in servers}
    fast = [petals.route_min_latency(servers, client, swarm.model.num_layers, MAX_LENGTH)]
    rng = random.Random(seed)
    wide = [petals.route_max_throughput(servers, swarm.model.num_layers, rng) for _ in range(NUM_SAMPLED)]
    _note(f"Petals, {num_servers}", swarm, workload, fast, wide, own_s, own_rate, ratios, unserved)

    nodes = [
        parallax.Node(s.peer, s.capacity, s.device.flops, s.device.seconds_per_layer(bare.model, 1))
        for s in bare.servers
    ]
    allocation = parallax.allocate(nodes, bare.model.num_layers)
    if allocation is None:
        unserved["Parallax"] += 1
        return
    held: list[LayerRange | None] = [None] * len(nodes)
    for index, layers in [*(stage for each in allocation.pipelines for stage in each), *allocation.spare]:
        held[index] = layers
    swarm = bare.placed(held)
    in_turn = parallax.route_in_turn(allocation, nodes, swarm.round_trip_s)
    shortest = [parallax.route_shortest(allocation, nodes, swarm.round_trip_s)]
    _note(f"Parallax in turn, {num_servers}", swarm, workload, in_turn, in_turn, own_s, own_rate, ratios, unserved)
    _note(f"Parallax shortest, {num_servers}", swarm, workload, shortest, shortest, own_s, own_rate, ratios, unserved)


def _note(
    name: str,
    swarm: Swarm,
    workload: Workload,
    fast: Sequence[tuple[RouteStage, ...] | None],
    wide: Sequence[tuple[RouteStage, ...] | None],
    own_s: float | None,
    own_rate: float | None,
    ratios: dict[str, list[float]],
    unserved: dict[str, int],
) -> None:
    their_s, their_rate = _seconds(swarm, fast, workload), _rate(swarm, wide, workload)
    if their_s is None or their_rate is None:
        unserved[name] += 1
        return
    our_s = _seconds(swarm, [_planned(swarm, Objective.LATENCY, workload)], workload)
    our_rate = _rate(swarm, [_planned(swarm, Objective.THROUGHPUT, workload)], workload)
    assert our_s is not None, "whoever covers the model for others covers it for us"
    assert our_rate is not None
    ratios[f"{name} routed, s/token"].append(their_s / our_s)
    ratios[f"{name} routed, tokens/s"].append(our_rate / their_rate)
    if own_s is not None and own_rate is not None:
        ratios[f"{name} placed and routed, s/token"].append(their_s / own_s)
        ratios[f"{name} placed and routed, tokens/s"].append(own_rate / their_rate)


def _planned(swarm: Swarm, objective: Objective, workload: Workload) -> tuple[RouteStage, ...] | None:
    planned = plan_route(
        swarm.candidates(),
        KnownLegs(swarm),
        num_layers=swarm.model.num_layers,
        workload=workload,
        objective=objective,
        is_explained=False,
    )
    return planned.route if isinstance(planned, Planned) else None


def _seconds(swarm: Swarm, routes: Iterable[tuple[RouteStage, ...] | None], workload: Workload) -> float | None:
    """Per token, on average over the routes that requests take in turn or by chance."""
    found = [swarm.cost(route, workload).seconds_per_token for route in routes if route is not None]
    return statistics.mean(found) if found else None


def _rate(swarm: Swarm, routes: Iterable[tuple[RouteStage, ...] | None], workload: Workload) -> float | None:
    found = [swarm.cost(route, workload).tokens_per_s for route in routes if route is not None]
    return statistics.mean(found) if found else None


def _placed_by_us(swarm: Swarm) -> Swarm:
    hosts = [Host(s.peer, s.capacity, s.device.seconds_per_layer(swarm.model, 1)) for s in swarm.servers]
    work = Work(swarm.model.num_layers, int(swarm.model.layer_bytes), swarm.model.row_bytes)
    placement = place_all(hosts, work, KnownLegs(swarm))
    moves = {d.peer: d.layers for d in (*placement.decisions, *placement.deferred) if isinstance(d, Move)}
    return swarm.placed([moves.get(server.peer) for server in swarm.servers])


def _throughput(swarm: Swarm, index: int) -> float:
    server = swarm.servers[index]
    forward_rps = 256 / server.device.seconds_per_layer(swarm.model, 256)
    line_Bps = min(server.place.line.up_Bps, server.place.line.down_Bps)
    return petals.announced_throughput(forward_rps, line_Bps / swarm.model.row_bytes, server.capacity)


def _placed_by_petals(swarm: Swarm, seed: int, num_checks: int) -> Swarm:
    rates = [_throughput(swarm, index) for index in range(len(swarm.servers))]
    capacities = [server.capacity for server in swarm.servers]
    rng = random.Random(seed)
    return swarm.placed(petals.place(capacities, rates, swarm.model.num_layers, rng, num_checks=num_checks))


def _petals_servers(swarm: Swarm, seed: int) -> list[petals.Server]:
    servers = [
        petals.Server(
            server.peer,
            server.held,
            _throughput(swarm, index),
            1 / server.device.seconds_per_layer(swarm.model, 1),
            cache_tokens_left=4 * MAX_LENGTH * server.capacity,
        )
        for index, server in enumerate(swarm.servers)
        if server.held is not None
    ]
    between = {
        (one.peer, other.peer): swarm.round_trip_s(one.peer, other.peer)
        for one in servers
        for other in servers
        if one is not other and not math.isnan(one.throughput)
    }
    return petals.pinged(servers, between, random.Random(seed))
