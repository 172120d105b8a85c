"""Our routes against those of Petals' published algorithm while nodes come and go: whole answers in the simulator.

The same seeds, hosts, lines, faults, placement and users; repair, leases and sessions are ours in both. What differs is
how a user chooses the nodes of a question, and who takes the place of one that is lost. Petals routes by what its
servers announce of themselves, without bytes, queues or corrections, and knows no alternates in advance; that the rows
for a replacement come from the stage before, and not over the user's own uplink as in Petals, is in its favour.

Parallax is compared without churn only (benchmarks.scheduler.rivals): what it does when a node leaves is to allocate
the layers of all nodes anew, for which nodes of this simulator would have to move while they serve.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Check
from benchmarks.scheduler import petals
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


def compare(seed: int, scheduler: Scheduler) -> dict[str, Any]:
    """One world with one scheduler."""
    settings = Settings(**{name: getattr(SETTINGS, name) for name in SETTINGS.__dataclass_fields__} | {"seed": seed})
    began = time.process_time()
    world = World(settings, scheduler=scheduler)
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
        "replayed_bytes": metrics.replayed_bytes,
        "cpu_s": round(time.process_time() - began, 1),
    }


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Some seeds, or more."""
    seeds = range(QUICK_SEEDS if quick else SEEDS)
    found = {
        "ours": [compare(seed, OwnScheduler()) for seed in seeds],
        "Petals": [compare(seed, PetalsScheduler(random.Random(seed))) for seed in seeds],
    }
    told = {name: _together(worlds) for name, worlds in found.items()}
    _print(told)
    ours, theirs = told["ours"], told["Petals"]
    by_seed = [a["tokens"] / b["tokens"] for a, b in zip(found["ours"], found["Petals"], strict=True)]
    checks = [
        Check("churn-wrong", "tokens lost, repeated or changed", ours["wrong_tokens"], "", 0, "=="),
        Check("churn-tokens", "tokens delivered, ours / Petals, of seeds", statistics.median(by_seed), "x", 1.0, ">="),
        Check("churn-rate", "tokens/s of an answer, ours / Petals", _ratio(ours, theirs, "p50"), "x", 1.0, ">="),
        Check("churn-rate-p5", "of the slowest 5 %, ours / Petals", _ratio(ours, theirs, "p5"), "x", 1.0, ">="),
    ]  # fmt: skip
    return checks, {"seeds": len(seeds), "schedulers": told, "tokens ours / Petals by seed": by_seed}


def _ratio(ours: dict[str, Any], theirs: dict[str, Any], percentile: str) -> float:
    return float(ours["tokens_per_s"][percentile] / theirs["tokens_per_s"][percentile])


def _together(worlds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums, and percentiles over all answers of all worlds."""
    together: dict[str, Any] = {
        name: round(sum(each[name] for each in worlds), 1)
        for name in ("answered", "failed", "wrong_tokens", "tokens", "replayed_bytes", "cpu_s")
    }
    for name in ("tokens_per_s", "first_token_s", "stalls_s"):
        together[name] = percentiles([value for each in worlds for value in each[name]])
    return together | {"num_stalls": sum(len(each["stalls_s"]) for each in worlds)}


def _print(told: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Routes while nodes come and go")
    for column in (
        "",
        "answers",
        "failed",
        "tokens",
        "tokens/s p5",
        "p50",
        "p95",
        "first token",
        "stalls",
        "p50",
        "p95",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, each in told.items():
        rates, stalls = each["tokens_per_s"], each["stalls_s"]
        table.add_row(
            name, f"{each['answered']:.0f}", f"{each['failed']:.0f}", f"{each['tokens']:,.0f}",
            *(f"{rates[p]:.2f}" for p in ("p5", "p50", "p95")), f"{each['first_token_s']['p50']:.1f} s",
            f"{each['num_stalls']}", *(f"{stalls.get(p, 0.0):.1f} s" for p in ("p50", "p95")),
        )  # fmt: skip
    Console().print(table)
