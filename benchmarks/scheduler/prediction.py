"""What the planner says a token takes, against what it takes, over emulated links.

Real node processes on this machine serve the built-in model behind TCP proxies (tests.live.link_proxy), which give
every direction between two of them a delay, and everybody an uplink and a downlink. A user who has just come plans an
answer, as ``fusion-node plan`` does, and then decodes one over that plan. The error is of the milliseconds per token.

Each topology has new nodes, which measure one another first: what is predicted is to come from measurements, of which
nobody has told the planner that they are emulated. In a full run, that includes how fast lines are, which nodes measure
a minute or two after they have begun; in a quick one nobody waits for that, and plans know no payload times. Each
topology has a user who has never been in a swarm. After three answers another process of that user plans again, with
what the first one has kept. All processes share this machine's cores, and a token visits one of
them after the other, so that each computes alone.

What the nodes compute is told apart: on a machine that does other things meanwhile, it is what no plan foresees.

The proxies' own delivery is a fraction of a millisecond late on an idle machine; round trips are measured through them,
so the planner knows of it as it would of a slow router.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.report import Check
from fusion_node import ModelStore, SamplingParams, SwarmClient
from tests.live.chaos import ChaosSwarm, TimedIds, WatchedConnection, chaos_swarm
from tests.live.link_proxy import USER

MODEL = "smollm2-135m"
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
NUM_TOKENS = 24
NUM_ANSWERS = 3
MAX_MEDIAN_ERROR = 0.15

SURVEYED_WITHIN_S = 60.0
"""For nodes to have measured their round trips. They take one peer at a time, and a few seconds for the first ones."""

RATES_WITHIN_S = 200.0
"""For nodes to have measured their lines, which they begin within a minute after their start, unless used."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Who is where.

    Attributes:
        stages: layers of the nodes, in order.
        round_trips_ms: by two of "user" and numbers of nodes; ``default_ms`` where nothing is said.
        access_Mbps: up and down of everybody by name; no limit where nothing is said.
    """

    name: str
    stages: tuple[str, ...]
    default_ms: float
    round_trips_ms: dict[tuple[str, str], float] = field(default_factory=dict)
    access_Mbps: dict[str, tuple[float, float]] = field(default_factory=dict)

    def round_trip_ms(self, one: str, other: str) -> float:
        """Between two."""
        return self.round_trips_ms.get((one, other), self.round_trips_ms.get((other, one), self.default_ms))


WHOLE, HALVES, THIRDS = ("0:30",), ("0:15", "15:30"), ("0:10", "10:20", "20:30")
HOME = (5.0, 50.0)
"""Up and down of a slow home line, in Mbit/s."""
FIBRE = (100.0, 100.0)
CABLE = (20.0, 100.0)


def _all(rates: tuple[float, float], num_nodes: int) -> dict[str, tuple[float, float]]:
    return dict.fromkeys((USER, *(f"{number}" for number in range(num_nodes))), rates)


TOPOLOGIES = (
    Topology("one node, same city", WHOLE, 5.0, access_Mbps=_all(FIBRE, 1)),
    Topology(
        "three nodes across a country, home lines", THIRDS, 30.0, {("user", "1"): 45.0, ("1", "2"): 20.0},
        access_Mbps=_all(HOME, 3),
    ),
    Topology(
        "two continents", HALVES, 15.0, {("0", "1"): 110.0, ("user", "1"): 120.0}, access_Mbps=_all(CABLE, 2)
    ),
    Topology("one node, other continent", WHOLE, 150.0, access_Mbps=_all(CABLE, 1)),
    Topology("two nodes of one region", HALVES, 12.0, access_Mbps=_all(CABLE, 2)),
    Topology("three nodes of one city, fibre", THIRDS, 5.0, access_Mbps=_all(FIBRE, 3)),
    Topology(
        "three nodes, one of them slow to send", THIRDS, 20.0, access_Mbps={**_all(FIBRE, 3), "1": (5.0, 20.0)}
    ),
    Topology(
        "three continents", THIRDS, 100.0, {("user", "0"): 20.0, ("0", "1"): 90.0, ("1", "2"): 150.0,
        ("user", "2"): 130.0}, access_Mbps=_all(HOME, 3),
    ),
)  # fmt: skip
NUM_QUICK = 3


def emulate(swarm: ChaosSwarm, topology: Topology, names: Sequence[str]) -> None:
    """Shapes all lines between everybody. ``names``: of the nodes for the proxies, in order of stages."""
    known = {USER: USER, **{name: f"{number}" for number, name in enumerate(names)}}
    for one, other in combinations(known, 2):
        one_way_s = topology.round_trip_ms(known[one], known[other]) / 2000
        swarm.proxies.shape(one, other, delay_s=one_way_s)
        swarm.proxies.shape(other, one, delay_s=one_way_s)
    for name, role in known.items():
        up, down = topology.access_Mbps.get(role, (None, None))
        swarm.proxies.access(name, up_Bps=_Bps(up), down_Bps=_Bps(down))


def _Bps(megabits: float | None) -> float | None:
    return None if megabits is None else megabits * 1e6 / 8


async def measure(topology: Topology, models: Path, *, is_quick: bool) -> dict[str, Any]:
    """Plans and decodes over one topology."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = folder / "home"
        home.mkdir()
        (home / "models").symlink_to(models)
        swarm = stack.enter_context(chaos_swarm(home, folder))
        emulate(swarm, topology, [f"node{number}" for number in range(len(topology.stages))])
        for layers in topology.stages:
            # One after the other: elsewhere, no node measures its speed while others of this machine begin.
            await asyncio.to_thread(swarm.start, layers)
        connection = await stack.enter_async_context(WatchedConnection(swarm.addresses, mdns=False))
        async with _client(home, connection) as client:
            length = len(await client.encode(PROMPT))
            if not is_quick and len(topology.stages) > 1 and topology.access_Mbps:
                await _until_rates_are_known(client, len(topology.stages))
            plan = await _plan_once_surveyed(client, length)
            answers = [await _decode(client) for _ in range(NUM_ANSWERS)]
        async with _client(home, connection) as client:
            after = await client.plan(prompt_tokens=length, max_tokens=NUM_TOKENS)
        measured_ms = statistics.median(answer["ms_per_token"] for answer in answers)
        computed_ms = 1000 * statistics.median(sum(answer["stages_s"]) for answer in answers)
        way_ms = sum(leg.ms for leg in plan.legs) + plan.user_ms
        return {
            "name": topology.name,
            "measured_ms": measured_ms,
            "predicted_ms": plan.ms_per_token,
            "error": _error(plan.ms_per_token, measured_ms),
            "way_error": _error(way_ms, measured_ms - computed_ms),
            "error_afterwards": _error(after.ms_per_token, measured_ms),
            "legs_ms": [(leg.source, round(leg.ms, 2)) for leg in plan.legs],
            "legs_afterwards_ms": [(leg.source, round(leg.ms, 2)) for leg in after.legs],
            "compute_ms": [round(stage.compute_ms + stage.queue_ms, 2) for stage in plan.stages],
            "compute_afterwards_ms": [round(stage.compute_ms + stage.queue_ms, 2) for stage in after.stages],
            "computed_ms": [round(1000 * each, 2) for each in answers[-1]["stages_s"]],
            "user_ms": round(plan.user_ms, 2),
            "user_afterwards_ms": round(after.user_ms, 2),
            "answers": answers,
        }


@asynccontextmanager
async def _client(home: Path, connection: WatchedConnection) -> AsyncIterator[SwarmClient]:
    async with SwarmClient(
        MODEL, home=home, mdns=False, threads=1, prefix_cache=False, connection=connection
    ) as client:
        await client.wait_loaded()
        yield client


async def _until_rates_are_known(client: SwarmClient, num_nodes: int) -> None:
    """Or until it takes too long: then the plan is made without."""
    deadline = time.monotonic() + RATES_WITHIN_S
    while time.monotonic() < deadline:
        records = await client.connection.find(client.model.model_id)
        if sum(record.up_Bps > 0 and record.down_Bps > 0 for record in records) >= num_nodes:
            return
        await asyncio.sleep(1.0)


async def _plan_once_surveyed(client: SwarmClient, prompt_tokens: int) -> Any:
    """The plan, once the nodes have told what they measured of one another; or as it is when they do not."""
    deadline = time.monotonic() + SURVEYED_WITHIN_S
    while True:
        plan = await client.plan(prompt_tokens=prompt_tokens, max_tokens=NUM_TOKENS)
        if plan.legs and all(leg.source in ("measured", "announced") for leg in plan.legs):
            return plan
        if time.monotonic() > deadline:
            return plan
        await asyncio.sleep(1.0)


async def _decode(client: SwarmClient) -> dict[str, Any]:
    generation = client.generate(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    times = generation.stats.token_ids = TimedIds()
    before: dict[str, tuple[float, int]] = {}
    async for _ in generation:
        # What the prompt took is not to count.
        before = before or {each.peer: (each.compute_s + each.queue_s, each.steps) for each in generation.stats.stages}
    gaps = [1000 * (b - a) for a, b in zip(times.times, times.times[1:], strict=False)]
    return {
        "ms_per_token": statistics.median(gaps),
        "mean_ms_per_token": statistics.mean(gaps),
        "first_token_s": generation.stats.time_to_first_token_s,
        "stages_s": [
            (each.compute_s + each.queue_s - before[each.peer][0]) / max(1, each.steps - before[each.peer][1])
            for each in generation.stats.stages
        ],
    }


def _error(predicted_ms: float | None, measured_ms: float) -> float:
    return float("nan") if predicted_ms is None else abs(predicted_ms - measured_ms) / max(measured_ms, 1e-3)


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """The quick ones, or all."""
    found = []
    store = ModelStore()
    store.pull(MODEL)
    for topology in TOPOLOGIES[:NUM_QUICK] if quick else TOPOLOGIES:
        found.append(asyncio.run(measure(topology, store.home / "models", is_quick=quick)))
        print(in_words(found[-1]), flush=True)
    errors = {
        "prediction": ("predicted against measured ms per token, median error", "error"),
        "prediction-way": ("the same without what nodes compute", "way_error"),
        "prediction-afterwards": (
            "the same as at first, planned by another process after three answers",
            "error_afterwards",
        ),
    }
    checks = [
        Check(name, what, statistics.median(each[key] for each in found), "", MAX_MEDIAN_ERROR, "<=")
        for name, (what, key) in errors.items()
    ]
    return checks, {"topologies": found}


def in_words(found: dict[str, Any]) -> str:
    """One line."""
    predicted = "no plan" if found["predicted_ms"] is None else f"predicted {found['predicted_ms']:.1f} ms"
    errors = f"error {100 * found['error']:.1f} %, without what nodes compute {100 * found['way_error']:.1f} %"
    afterwards = f"afterwards {100 * found['error_afterwards']:.1f} %"
    return f"{found['name']}: {predicted}, measured {found['measured_ms']:.1f} ms, {errors}, {afterwards}"
