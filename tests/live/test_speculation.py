"""Speculation with real processes, real sockets and the real model: the same answers, with several tokens under way."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fusion_node.client.generation import GenerationStats
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from tests.live.swarm_process import Nodes, run_cli

pytestmark = pytest.mark.live

MODEL = "smollm2-135m"
PROMPT = "Say the numbers from one to twelve, and then say them once more."
OPTIONS = ("--max-tokens", "48", "--no-mdns", "--threads", "1", "--json")


def answer(home: Path, nodes: Nodes, *options: str) -> dict[str, Any]:
    peer = nodes.current[0].addresses[0]
    done = run_cli("generate", MODEL, PROMPT, "--peer", peer, *OPTIONS, *options, home=home)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--seed", "5")])
def test_a_tree_answers_as_plain_decode_does(test_home: Path, three_nodes: Nodes, sampling: tuple[str, ...]) -> None:
    # Over a line on which guesses pay beyond doubt: between processes that share two busy cores they may not.
    line = ("--emulate-rtt", "60")
    plain = answer(test_home, three_nodes, "--speculate", "off", *line, *sampling)
    tree = answer(test_home, three_nodes, "--speculate", "tree", *line, *sampling)
    assert tree["token_ids"] == plain["token_ids"]
    assert tree["text"] == plain["text"]
    assert plain["speculation"] is None
    assert tree["speculation"]["rows_per_token"] > 1.0


async def test_a_stage_killed_in_the_middle_changes_nothing(test_home: Path, three_nodes: Nodes) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    spare = three_nodes.add("10:20")
    peers = three_nodes.current[0].addresses

    async def run(speculation: str, *, kills: bool) -> tuple[GenerationStats, list[str]]:
        killed: list[str] = []
        async with SwarmClient(
            MODEL, peers=peers, home=test_home, mdns=False, threads=1, prefix_cache=False, speculation=speculation
        ) as swarm:
            generation = swarm.generate(PROMPT, params)
            async for _ in generation:
                if kills and not killed and generation.stats.completion_tokens >= 12:
                    used = {stage.peer for stage in generation.stats.stages}
                    node = next(n for n in (three_nodes.current[1], spare) if n.peer in used)
                    node.signal(signal.SIGKILL)
                    killed.append(node.peer)
            return generation.stats, killed

    plain, _ = await run("off", kills=False)
    stats, (victim,) = await run("tree", kills=True)
    assert stats.token_ids == plain.token_ids
    assert [repair.peer for repair in stats.repairs] == [victim]
    assert victim not in {stage.peer for stage in stats.stages}
