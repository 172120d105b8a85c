"""Our routes against Petals' and Parallax's published algorithms while nodes come and go: whole answers, simulated.

The same seeds, hosts, lines, arrivals, departures and users; repair, leases and sessions are ours in all. What differs
is how a user chooses the nodes of a question, who takes the place of one that is lost, and for Parallax which layers
nodes have: its router needs ranges that abut.

Petals routes by what its servers announce of themselves, without bytes, queues or corrections, and knows no alternates
in advance; that the rows for a replacement come from the stage before, and not over the user's own uplink as in Petals,
is in its favour.

Parallax (phase 1 and the shortest path of phase 2, benchmarks.scheduler.parallax): the nodes of the beginning are tiled
into pipelines, who comes later takes the layers that are held least, and nobody moves: its scheduler does not either,
as long as there is any cover. In its favour: it knows all nodes, who has gone at once and not after a heartbeat's 30 s,
and all true round trips; and an answer that loses a node goes on, where Parallax loses it.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Check
from benchmarks.scheduler import parallax, petals
from fusion_node.client.answer_core import RepairKind
from fusion_node.simulator.node import Node
from fusion_node.simulator.placing import Placer
from fusion_node.simulator.planning import Chosen, Known, OwnScheduler, Scheduler, UserLegs
from fusion_node.simulator.report import percentiles, tokens_per_s
from fusion_node.simulator.settings import Settings
from fusion_node.simulator.world import World
from fusion_node.types import LayerRange, PeerId
from scheduler.cost_model import Workload
from scheduler.planner import uncovered_layers
from scheduler.topology import RouteStage

SETTINGS = Settings(
    nodes=150, users=30, hours=0.25, think_s=5.0, answer_tokens=400.0, tokens_per_event=64, stage_layers=4,
    mean_lifetime_s=3600.0, hangs_per_hour=0.2, resets_per_hour=0.2,
)  # fmt: skip
"""Nodes stay for an hour on average, so that some answers lose one; one in twenty lies."""

SEEDS, QUICK_SEEDS = 8, 2

PARALLAX_CANDIDATES = 4096
"""Its scheduler is one for all users, and knows all nodes."""

BUSY_S = 0.00005
"""What Parallax's router adds for a node that is all taken, and a part of it for one that is in part."""


class PetalsScheduler:
    """Routes of least latency by the reckoning of Petals; what is lost is routed again in the same way.

    Args:
        rng: which servers a server has pinged.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

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
        """See Scheduler. Of pairs Petals knows nothing."""
        taken = {stage.peer for stage in pinned}
        free = [each for each in known if each.node.peer not in taken]
        route = list(pinned)
        for gap in uncovered_layers([stage.layers for stage in pinned], world.model.num_layers):
            found = self._through(world, free, gap, work.num_positions)
            if found is None:
                return None
            route += found
            free = [each for each in free if each.node.peer not in {stage.peer for stage in found}]
        return Chosen(tuple(sorted(route, key=lambda stage: stage.layers.start)))

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
        """See Scheduler: there are none."""
        return ((),) * len(route)

    def _through(
        self, world: World, known: Sequence[Known], gap: LayerRange, num_positions: int
    ) -> tuple[RouteStage, ...] | None:
        """A chain over some layers."""
        servers, clients = [], {}
        for each in known:
            held = each.candidate.layers
            start, stop = max(held.start, gap.start), min(held.stop, gap.stop)
            if start < stop:
                servers.append(_server(world, each, LayerRange(start - gap.start, stop - gap.start)))
                clients[each.node.peer] = each.round_trip_s
        places = [world.host(server.peer).place for server in servers]
        one_way_s, _ = world.network.paths_between(places, places)
        trips = {
            (one.peer, other.peer): 2 * float(one_way_s[i, j])
            for i, one in enumerate(servers)
            for j, other in enumerate(servers)
            if i != j
        }
        pinged = petals.pinged(servers, trips, self._rng)
        found = petals.route_min_latency(pinged, clients, len(gap), num_positions)
        if found is None:
            return None
        return tuple(
            RouteStage(s.peer, LayerRange(s.layers.start + gap.start, s.layers.stop + gap.start)) for s in found
        )


def _server(world: World, known: Known, span: LayerRange) -> petals.Server:
    """As it announces itself: liars lie to Petals as well."""
    said, line = known.node.announced_speed, known.node.place.line
    network_rps = min(line.up_Bps, line.down_Bps) / world.model.row_bytes
    throughput = petals.announced_throughput(256 / said.rows_256_s, network_rps, len(known.candidate.layers))
    cache_tokens = known.candidate.kv_free_positions * len(known.candidate.layers)
    return petals.Server(known.node.peer, span, throughput, 1 / said.rows_1_s, cache_tokens)


class ParallaxScheduler:
    """The shortest path over ranges that abut; a stage is replaced by whoever has exactly its layers, or parts of them.

    All users' at once: what a user of Petals' or of ours believes of a node, its scheduler is told by that node.
    """

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
        """See Scheduler. Of pairs Parallax knows nothing; a node without room for the session takes none."""
        taken = {stage.peer for stage in pinned}
        free = [
            each.node
            for each in known
            if each.node.peer not in taken and each.candidate.kv_free_positions >= work.num_positions
        ]
        nodes = [_parallax_node(world, node) for node in free]
        route = list(pinned)
        for gap in uncovered_layers([stage.layers for stage in pinned], world.model.num_layers):
            within = [
                (index, node.layers)
                for index, node in enumerate(free)
                if gap.start <= node.layers.start and node.layers.stop <= gap.stop
            ]
            found = parallax.shortest(within, nodes, lambda a, b: _round_trip_s(world, a, b), gap)
            if found is None:
                return None
            route += found
        return Chosen(tuple(sorted(route, key=lambda stage: stage.layers.start)))

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
        """See Scheduler: there are none."""
        return ((),) * len(route)


class ParallaxPlacer:
    """Pipelines over the nodes of the beginning; who comes later takes what is held least."""

    def first(self, world: World, nodes: Sequence[Node]) -> Sequence[LayerRange]:
        """See Placer."""
        allocation = parallax.allocate([_parallax_node(world, node) for node in nodes], world.model.num_layers)
        if allocation is None:
            raise ValueError("these nodes do not hold the model")
        placed = dict([*(stage for pipeline in allocation.pipelines for stage in pipeline), *allocation.spare])
        return [placed[index] for index in range(len(nodes))]

    def newcomer(self, world: World, node: Node) -> LayerRange:
        """See Placer. Nodes that load count as well."""
        holders = [0] * world.model.num_layers
        for other in (*world.live, *(each for each in world.loading.values() if each.holds)):
            for layer in range(other.layers.start, other.layers.stop):
                holders[layer] += 1
        return parallax.lightest(holders, world.capacity_layers(node))


def _parallax_node(world: World, node: Node) -> parallax.Node:
    """As it tells its scheduler: liars lie to Parallax as well."""
    load = 1.0 - min(1.0, node.claimed_kv / node.kv_positions) if node.holds else 0.0
    return parallax.Node(
        node.peer,
        world.capacity_layers(node),
        node.device.flops * node.character.claim,
        node.claimed_speed.rows_1_s + BUSY_S * load,
    )


def _round_trip_s(world: World, one: PeerId, other: PeerId) -> float:
    return 2 * world.network.path(world.host(one).place, world.host(other).place).one_way_s


RIVALS = ("ours", "Petals", "Parallax")


def world_of(name: str, settings: Settings) -> World:
    """A world in which users choose as one of RIVALS does."""
    scheduler: Scheduler
    placer: Placer | None = None
    match name:
        case "ours":
            scheduler = OwnScheduler()
        case "Petals":
            scheduler = PetalsScheduler(random.Random(settings.seed))
        case "Parallax":
            scheduler, placer = ParallaxScheduler(), ParallaxPlacer()
            settings = dataclasses.replace(settings, candidates=PARALLAX_CANDIDATES)
        case _:
            raise ValueError(f"{name!r} is none of {', '.join(RIVALS)}")
    return World(settings, scheduler=scheduler, placer=placer)


def compare(seed: int, name: str) -> dict[str, Any]:
    """One world of one of RIVALS."""
    began = time.process_time()
    world = world_of(name, dataclasses.replace(SETTINGS, seed=seed))
    world.run()
    metrics = world.metrics
    return {
        "answered": sum(not each.error for each in metrics.requests),
        "failed": sum(bool(each.error) for each in metrics.requests),
        "wrong_tokens": metrics.wrong_tokens,
        "tokens": sum(each.tokens for each in metrics.requests),
        "tokens_per_s": tokens_per_s(metrics),
        "first_token_s": [each.first_s for each in metrics.requests if each.first_s is not None],
        "stalls_s": [stall.seconds for stall in metrics.stalls],
        "computed_anew": sum(stall.kind == RepairKind.PREFILLED for stall in metrics.stalls),
        "replayed_bytes": metrics.replayed_bytes,
        "joined": metrics.joined,
        "left": metrics.left,
        "cpu_s": round(time.process_time() - began, 1),
    }


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Some seeds, or more."""
    seeds = range(QUICK_SEEDS if quick else SEEDS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in RIVALS}
    for seed in seeds:  # interleaved, so that one that is broken off has compared what it has
        for name in RIVALS:
            found[name].append(compare(seed, name))
    told = {name: _together(worlds) for name, worlds in found.items()}
    by_seed = {
        name: [ours["tokens"] / max(1, theirs["tokens"]) for ours, theirs in zip(found["ours"], worlds, strict=True)]
        for name, worlds in found.items()
    }
    _print(told, by_seed)
    ours = told["ours"]
    checks = [Check("churn-wrong", "tokens lost, repeated or changed", ours["wrong_tokens"], "", 0, "==")]
    for name in RIVALS[1:]:
        key, theirs = f"churn-{name.lower()}", told[name]
        checks += [
            Check(f"{key}-tokens", f"tokens, ours / {name}", statistics.median(by_seed[name]), "x", 1.0, ">="),
            Check(f"{key}-rate", f"tokens/s of an answer, ours / {name}", _ratio(ours, theirs, "p50"), "x", 1.0, ">="),
            Check(f"{key}-rate-p5", f"tokens/s at p5, ours / {name}", _ratio(ours, theirs, "p5"), "x", 1.0, ">="),
        ]  # fmt: skip
    return checks, {"seeds": len(seeds), "schedulers": told, "tokens, ours / theirs, by seed": by_seed}


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], percentile: str) -> float:
    """0 where nothing was answered by the other: there is nothing to compare with."""
    rate = theirs["tokens_per_s"].get(percentile, 0.0)
    return float(ours["tokens_per_s"][percentile] / rate) if rate else 0.0


def _together(worlds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums, and percentiles over all answers of all worlds."""
    sums = (
        "answered",
        "failed",
        "wrong_tokens",
        "tokens",
        "computed_anew",
        "replayed_bytes",
        "joined",
        "left",
        "cpu_s",
    )
    together: dict[str, Any] = {name: round(sum(each[name] for each in worlds), 1) for name in sums}
    for name in ("tokens_per_s", "first_token_s", "stalls_s"):
        together[name] = percentiles([value for each in worlds for value in each[name]])
    stalls_s = [value for each in worlds for value in each["stalls_s"]]
    return together | {"num_stalls": len(stalls_s), "stood_still_s": round(sum(stalls_s), 1)}


def _print(told: dict[str, dict[str, Any]], by_seed: dict[str, list[float]]) -> None:
    table = Table(title="Whole answers while nodes come and go; the more tokens, the better")
    table.add_column("routes by")
    for name in told:
        table.add_column(name, justify="right")

    def row(what: str, text: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(what, *map(text, told.values()))

    row("answers", lambda each: f"{each['answered']:,.0f}")
    row("failed", lambda each: f"{each['failed']:.0f}")
    row("tokens", lambda each: f"{each['tokens']:,.0f}")
    ratios = (f"{statistics.median(by_seed[name]):.2f} x" for name in told)
    table.add_row("ours / theirs, median of seeds", *ratios)
    row("tokens/s, p5", lambda each: f"{each['tokens_per_s'].get('p5', 0.0):.2f}")
    row("tokens/s, median", lambda each: f"{each['tokens_per_s'].get('p50', 0.0):.2f}")
    row("tokens/s, p95", lambda each: f"{each['tokens_per_s'].get('p95', 0.0):.2f}")
    row("first token, median", lambda each: f"{each['first_token_s'].get('p50', 0.0):.1f} s")
    row("stalls", lambda each: f"{each['num_stalls']}")
    row("of them from the prompt on", lambda each: f"{each['computed_anew']:.0f}")
    row("stall, median", lambda each: f"{each['stalls_s'].get('p50', 0.0):.1f} s")
    row("stall, p95", lambda each: f"{each['stalls_s'].get('p95', 0.0):.1f} s")
    row("stood still", lambda each: f"{each['stood_still_s']:,.0f} s")
    row("replayed", lambda each: f"{each['replayed_bytes'] / 1e9:.1f} GB")
    Console().print(table)
