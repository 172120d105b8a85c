"""What the simulator takes of this computer, with users who are nearly always answered, and what faults cost them.

Memory is the peak of the whole process so far, so that the smaller world comes first.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.report import Check
from fusion_node.simulator.report import document
from fusion_node.simulator.settings import Settings
from fusion_node.simulator.world import World

MAX_MEMORY_MIB = 4096
MIN_STALLS = 20
"""Of one kind of fault, below which a percentile says little."""


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """1,000 nodes, and 10,000 in the full run."""
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for nodes, hours in ((1000, 0.1),) if quick else ((1000, 0.5), (10_000, 1.0)):
        settings = Settings(
            nodes=nodes, users=200, hours=hours, seed=1, think_s=5.0, answer_tokens=1000.0, tokens_per_event=256,
            stage_layers=4,
        )  # fmt: skip
        began = time.process_time()
        world = World(settings)
        world.run()
        report = document(world, seconds=time.process_time() - began)
        data[str(nodes)] = report
        cost, found = report["cost"], report["data"]
        active, memory_mib = found["coverage"]["users_served_at_once_mean"], cost["peak_memory_bytes"] / 2**20
        wrong = sum(not check["ok"] for check in report["checks"])
        checks += [
            Check(f"simulation-{nodes}-wrong", f"{nodes} simulated nodes, broken promises", wrong, "", 0, "=="),
            Check(f"simulation-{nodes}-active", f"{nodes} nodes, users answered at once of 200", active, "", 150, ">="),
            Check(f"simulation-{nodes}-events", f"{nodes} nodes, events/s", cost["events_per_s"], "/s", 1000, ">="),
            Check(f"simulation-{nodes}-memory", f"{nodes} nodes, memory", memory_mib, "MiB", MAX_MEMORY_MIB, "<="),
        ]
        data[f"stalls among {nodes}"] = {
            fault: {"count": each["count"], "median_s": each["p50"], "p95_s": each["p95"]}
            for fault, each in found["stalls"]["by_fault"].items()
            if each["count"] >= MIN_STALLS
        }
    return checks, data
