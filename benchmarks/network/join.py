"""From the start of ``fusion-node join`` until the node has served its first step, on loopback.

The user is there before the node, as a gateway would be, and asks as soon as it hears of it. The node holds the whole
built-in model, so that its first step is an answer's first token.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Check
from fusion_node import ModelStore, SamplingParams, SwarmClient
from fusion_node.cli.local_swarm import LocalSwarm
from fusion_node.errors import NoPeers, NoRoute
from fusion_node.types import LayerRange

MODEL = "smollm2-135m"
TARGET_S = 15.0
"""Most of it is importing torch and transformers, and loading; what the network adds is the last figure of the data."""


async def _join() -> dict[str, float]:
    model = ModelStore().pull(MODEL)
    with tempfile.TemporaryDirectory() as folder:
        async with LocalSwarm(model.name, folder=Path(folder), home=None, threads=1, numerics="fp32") as local:
            began = time.perf_counter()
            await local.start([LayerRange(0, model.num_layers)])
            listening_s = time.perf_counter() - began
            ready = asyncio.ensure_future(_ready_s(local, began))
            async with SwarmClient(model.name, peers=local.nodes[0].addresses, threads=1, mdns=False) as swarm:
                while True:
                    try:
                        await swarm.generate("Say hello.", SamplingParams(max_tokens=1)).text()
                        break
                    except (NoRoute, NoPeers):
                        await asyncio.sleep(0.1)
                served_s = time.perf_counter() - began
            ready_s = await ready
    return {
        "listening_s": listening_s,
        "ready_s": ready_s,
        "first_step_s": served_s,
        "after_ready_s": served_s - ready_s,
    }


async def _ready_s(local: LocalSwarm, began: float) -> float:
    await local.wait_ready()
    return time.perf_counter() - began


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Several starts."""
    starts = [asyncio.run(_join()) for _ in range(1 if quick else 3)]
    median = statistics.median(start["first_step_s"] for start in starts)
    told = [{name: round(value, 2) for name, value in start.items()} for start in starts]
    return [Check("join", "from join to the first served step", median, "s", TARGET_S, "<=")], {"starts": told}
