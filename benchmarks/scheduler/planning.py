"""How long a plan takes, with its explanation, over 80 layers; and a patch of one lost stage.

Of each size several swarms, each planned for all objectives and with a rule about the whole route. The value of a check
is the median over the swarms of the slowest of these.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks.report import Check
from benchmarks.scheduler.swarms import KnownLegs, scattered, volunteers
from scheduler.cost_model import Workload
from scheduler.planner import plan_patch, plan_route
from scheduler.plans import Objective, Planned
from scheduler.rules import Rules

SIZES = {50: 1.0, 500: 1.0, 5000: 3.0}
"""Candidates, and the seconds that a plan may take."""

MAX_PATCH_S = 0.5
"""The stall that a repair may make by planning: a quarter of what it may take in all."""

ASKED = {
    "latency": (Objective.LATENCY, Rules()),
    "throughput": (Objective.THROUGHPUT, Rules()),
    "first token": (Objective.FIRST_TOKEN, Rules()),
    "at most 3 stages": (Objective.LATENCY, Rules(max_stages=3)),
}


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """All sizes."""
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for size, target_s in SIZES.items():
        found = [_measure(size, seed) for seed in range(3 if quick else 15)]
        slowest = [max(each[what]["plan_s"] for what in ASKED) for each in found]
        patches = [each["latency"]["patch_s"] for each in found if each["latency"]["patch_s"] is not None]
        checks.append(
            Check(
                f"planning-{size}", f"plan of {size} nodes x 80 layers", statistics.median(slowest), "s", target_s, "<="
            )
        )
        if patches:
            patch_s = statistics.median(patches)
            checks.append(Check(f"patch-{size}", f"patch among {size} nodes", patch_s, "s", MAX_PATCH_S, "<="))
        data[str(size)] = found
    return checks, data


def _measure(size: int, seed: int) -> dict[str, dict[str, Any]]:
    swarm = scattered(volunteers(seed, size), seed)
    candidates, legs = swarm.candidates(), KnownLegs(swarm)
    workload = Workload(2048, prompt_tokens=1024, row_bytes=swarm.model.row_bytes)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for what, (objective, rules) in ASKED.items():
        began = time.perf_counter()
        planned = plan_route(candidates, legs, num_layers=80, workload=workload, objective=objective, rules=rules)
        found[what]["plan_s"] = time.perf_counter() - began
        found[what]["patch_s"] = None
        if isinstance(planned, Planned):
            found[what]["num_stages"] = len(planned.route)
            found[what]["gap"] = planned.gap_s
            began = time.perf_counter()
            plan_patch(candidates, legs, planned.route, [0], num_layers=80, workload=workload, objective=objective)
            found[what]["patch_s"] = time.perf_counter() - began
    return dict(found)
