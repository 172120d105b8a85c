"""How good plans are: against exhaustive search on small swarms, and against the whole search where it is bounded.

A ratio of 1 is the optimum, and of 0.5 a plan of twice the cost. Rules about the whole route are what can make a search
end early, and very many candidates what makes it leave some out.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from typing import Any

from benchmarks.report import Check
from benchmarks.scheduler.swarms import TrueLegs, scattered, volunteers
from scheduler.cost_model import Workload
from scheduler.planner import plan_route
from scheduler.plans import Objective, Planned
from scheduler.rules import Rules
from tests.planning import exhaustive, random_swarm, value_of

RULES = {
    "no rules": Rules(),
    "a shard per operator": Rules(one_shard_per_operator=True),
    "at most 2 stages": Rules(max_stages=2),
    "a price": Rules(max_route_price=5.0),
}
MIN_MEDIAN, MIN_WORST = 0.95, 0.8
NUM_SEARCHED = 128
"""Of 600 candidates, in the comparison of a bounded search with the whole one."""


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Small swarms and large ones."""
    ratios: dict[str, list[float]] = defaultdict(list)
    missed = 0
    for seed in range(60 if quick else 400):
        rng = random.Random(seed)
        num_layers = rng.randrange(3, 7)
        nodes, legs = random_swarm(rng, rng.randrange(3, 7), num_layers)
        workload = Workload(100, prompt_tokens=700, row_bytes=1e4, step_rows=rng.choice([1, 8]))
        for objective in Objective:
            for name, rules in RULES.items():
                best = exhaustive(nodes, legs, num_layers, workload, objective, rules)
                planned = plan_route(
                    nodes, legs, num_layers=num_layers, workload=workload, objective=objective, rules=rules,
                    is_explained=False,
                )  # fmt: skip
                if best is None:
                    continue
                if isinstance(planned, Planned):
                    ratios[f"{objective}, {name}"].append(best / value_of(planned.cost, objective))
                else:
                    missed += 1
    every = [ratio for found in ratios.values() for ratio in found]
    bounded = [_bounded(seed) for seed in range(3 if quick else 12)]
    median, worst = statistics.median(every), _percentile(every, 0.01)
    checks = [
        Check("optimality-median", "small swarms, optimum / plan, median", median, "", MIN_MEDIAN, ">="),
        Check("optimality-worst", "small swarms, optimum / plan, worst 1 %", worst, "", MIN_WORST, ">="),
        Check("optimality-missed", "small swarms, plans missed", missed, "", 0, "=="),
        Check(
            "optimality-bounded",
            f"{NUM_SEARCHED} of 600 searched / all, median",
            statistics.median(bounded),
            "",
            MIN_MEDIAN,
            ">=",
        ),
    ]
    return checks, {
        "small": {name: {"median": statistics.median(found), "worst": min(found), "count": len(found)}
                  for name, found in ratios.items()},
        "bounded": bounded,
    }  # fmt: skip


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def _bounded(seed: int) -> float:
    """Seconds per token of the whole search, over those of the bounded one."""
    swarm = scattered(volunteers(seed, 600), seed)
    seconds = []
    for max_candidates in (600, NUM_SEARCHED):
        planned = plan_route(
            swarm.candidates(), TrueLegs(swarm), num_layers=swarm.model.num_layers, is_explained=False,
            workload=Workload(2048, row_bytes=swarm.model.row_bytes), max_candidates=max_candidates,
        )  # fmt: skip
        assert isinstance(planned, Planned), "600 nodes cover the model many times"
        seconds.append(planned.cost.seconds_per_token)
    return seconds[0] / seconds[1]
