"""What an idle node sends in a swarm of ten thousand, simulated: the real membership core on an event heap."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.report import Check
from fusion_node.simulator.membership_world import idle_cost

NUM_HOSTS, NUM_HOSTS_QUICK = 10_000, 600
MAX_BPS = 4096.0
"""Per node, sent: what a slow uplink does not notice."""

MAX_MESSAGES_PER_S = 3.0
"""Requests and answers take 4 to 8 ms of CPU each over libp2p: 2.4 % of a core at most."""


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Less than a minute of CPU when quick, else about twenty minutes."""
    num_hosts = NUM_HOSTS_QUICK if quick else NUM_HOSTS
    began = time.process_time()
    cost = idle_cost(num_hosts)
    where = f"idle in a simulated swarm of {num_hosts:,}"
    checks = [
        Check("idle-large-bytes", f"{where}: bytes sent per node", cost.sent_Bps_mean, "B/s", MAX_BPS, "<="),
        Check("idle-large-messages", f"{where}: messages sent per node", cost.messages_per_s_mean, "1/s",
              MAX_MESSAGES_PER_S, "<="),
    ]  # fmt: skip
    return checks, asdict(cost) | {"cpu_s": round(time.process_time() - began, 1)}
