"""Group 1, *Engine*: the production loop in a virtual clock, with a drafter of known quality and stages like GPUs.

Nothing here is computed but time: not a claim about any model's drafts, but about what the loop makes of them. The
partners are what the best synchronous chain and tree and an ideal asynchronous chain reach with the same drafter, by
their formulas, and the event simulation that the design was made with, whose numbers stand here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.report import Check
from benchmarks.speculation.oracle import (
    OracleDrafter,
    OracleText,
    best_async_chain,
    best_sync_chain,
    best_sync_tree,
    tree_curve,
)
from benchmarks.speculation.ring import Costs, World
from scheduler.speculation import Ring, plain_rate

TARGETS = {
    (20, 0.7): {4: 45, 3: 58},
    (20, 0.8): {4: 65, 3: 80},
    (20, 0.9): {4: 105, 3: 135},
    (50, 0.7): {4: 28, 3: 35},
    (50, 0.8): {4: 40, 3: 50},
    (50, 0.9): {4: 70, 3: 88},
    (100, 0.7): {4: 18, 3: 21},
    (100, 0.8): {4: 26, 3: 32},
    (100, 0.9): {4: 44, 3: 56},
}
"""Tokens per second, by round trip in ms and acceptance, and then by stages."""

SIMULATED = {
    (20, 0.7): {4: 50.0, 3: 57.9},
    (20, 0.8): {4: 66.0, 3: 80.4},
    (20, 0.9): {4: 109.1, 3: 120.9},
    (50, 0.7): {4: 29.5, 3: 36.6},
    (50, 0.8): {4: 42.4, 3: 52.6},
    (50, 0.9): {4: 70.3, 3: 83.6},
    (100, 0.7): {4: 19.0, 3: 22.1},
    (100, 0.8): {4: 25.4, 3: 31.2},
    (100, 0.9): {4: 43.8, 3: 56.2},
}
"""What the event simulation of the design says: means of four runs, which differ by 4 %."""

NUM_USERS = 48
USERS_TARGET = 750
WARM_UP = 0.1
"""Of a text, which is left out: the first round trips find an empty ring."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One user of one ring, tokens per second."""

    round_trip_ms: int
    acceptance: float
    num_stages: int
    plain: float
    sync_chain: float
    async_chain: float
    sync_tree: float
    simulated: float
    target: float
    measured: float
    rows_per_token: float
    latency_ms: float


def ring_of(costs: Costs) -> Ring:
    """For the formulas."""
    return Ring(
        legs_s=(costs.num_stages + 1) * costs.round_trip_s / 2,
        fixed_s=(costs.fixed_s,) * costs.num_stages,
        row_s=(costs.row_s,) * costs.num_stages,
        wire_row_s=costs.wire_row_s,
        draft_s=costs.draft_s,
        user_s=costs.user_s,
    )


def one_user(costs: Costs, acceptance: float, num_tokens: int, seed: int = 0) -> tuple[float, float, float]:
    """Tokens per second, rows per token, and seconds from sending a frame to its return."""
    world = World(costs, seed=seed)
    text = OracleText(acceptance, num_tokens, seed)
    user = world.add(
        [1],
        drafter=OracleDrafter(acceptance, text, seed),
        choose=lambda position, row: 0,
        stop_position=num_tokens + 1,
        max_positions=num_tokens + 1024,
        stop_tokens=frozenset(),
    )
    num_warm = int(WARM_UP * num_tokens)
    world.clock.run(is_done=lambda: len(user.tokens) >= num_warm)
    since, before = world.clock.now, len(user.tokens)
    world.clock.run(is_done=lambda: user.finished_at is not None)
    stats = user.core.stats
    rate = (num_tokens - before) / (world.clock.now - since)
    return rate, stats.num_rows / stats.num_tokens, stats.latency_s


def many_users(costs: Costs, acceptance: float, num_users: int, seconds: float) -> dict[str, float]:
    """Of one ring, tokens per second of all together, after as long again as a warm-up."""
    world = World(costs, seed=1)
    for seed in range(num_users):
        world.add(
            [1],
            drafter=OracleDrafter(acceptance, OracleText(acceptance, 1000, seed), seed),
            choose=lambda position, row: 0,
            stop_position=1_000_000,
            max_positions=2_000_000,
            stop_tokens=frozenset(),
        )
    world.clock.run(until_s=seconds / 3)
    before = [len(user.tokens) for user in world.users]
    rows, passes = world.stages[0].num_rows, world.stages[0].num_passes
    world.clock.run(until_s=seconds)
    tokens = [len(user.tokens) - had for user, had in zip(world.users, before, strict=True)]
    span = seconds * 2 / 3
    return {
        "tokens_per_s": sum(tokens) / span,
        "jain_index": sum(tokens) ** 2 / (num_users * sum(each**2 for each in tokens)),
        "rows_per_token": (world.stages[0].num_rows - rows) / sum(tokens),
        "rows_per_pass": (world.stages[0].num_rows - rows) / (world.stages[0].num_passes - passes),
        "plain_per_s": num_users * plain_rate(ring_of(costs)),
    }


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    num_tokens = 300 if quick else 1200
    cells: list[Cell] = []
    for (round_trip_ms, acceptance), targets in TARGETS.items():
        curve = tree_curve(acceptance, trials=60 if quick else 200)
        for num_stages, target in targets.items():
            costs = Costs(num_stages, round_trip_ms / 1000)
            ring = ring_of(costs)
            measured, rows, latency_s = one_user(costs, acceptance, num_tokens)
            cells.append(
                Cell(
                    round_trip_ms,
                    acceptance,
                    num_stages,
                    plain_rate(ring),
                    best_sync_chain(acceptance, ring),
                    best_async_chain(acceptance, ring),
                    best_sync_tree(curve, ring),
                    SIMULATED[round_trip_ms, acceptance][num_stages],
                    target,
                    measured,
                    rows,
                    1000 * latency_s,
                )
            )
    users = many_users(Costs(5, 0.05, lost_cancels=0.0), 0.8, NUM_USERS, 1.5 if quick else 4.0)
    return checks(cells, users), {"cells": [asdict(cell) for cell in cells], "users": users}


def checks(cells: list[Cell], users: dict[str, float]) -> list[Check]:
    at_least = partial(Check, comparison=">=")
    found = [
        at_least(
            f"engine-rtt{cell.round_trip_ms}-a{cell.acceptance}-s{cell.num_stages}",
            f"engine: RTT {cell.round_trip_ms} ms, acceptance {cell.acceptance}, {cell.num_stages} stages",
            cell.measured,
            "tokens/s",
            cell.target,
        )
        for cell in cells
    ]
    at_80 = [cell for cell in cells if cell.acceptance == 0.8]
    over_tree = min(cell.measured / cell.sync_tree for cell in at_80)
    over_chain = min(cell.measured / cell.async_chain for cell in at_80)
    worst = max(abs(cell.measured / cell.simulated - 1.0) for cell in cells)
    found += [
        at_least("engine-sync-tree", "engine: over the best synchronous tree, a = .8, the least", over_tree, "x", 1.35),
        at_least(
            "engine-async-chain", "engine: over an ideal asynchronous chain, a = .8, the least", over_chain, "x", 1.35
        ),
        Check("engine-model", "engine: away from the simulation of the design, the furthest", worst, "", 0.15, "<="),
        at_least(
            "engine-users",
            f"engine: {NUM_USERS} users of one ring of 5, RTT 50 ms, in all",
            users["tokens_per_s"],
            "tokens/s",
            USERS_TARGET,
        ),
        at_least("engine-fairness", "engine: of them, Jain's index of fairness", users["jain_index"], "", 0.9),
    ]
    return found
