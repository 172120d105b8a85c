"""The demonstration as a user runs it: real processes, the real model, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fusion_node.cli.local_swarm import LocalSwarm, split_evenly
from fusion_node.errors import NodeFailed
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange
from tests.live.swarm_process import run_cli

pytestmark = pytest.mark.live

COMMAND = [str(Path(sys.executable).with_name("fusion-node")), "demo"]
"""As it is installed. The nodes that a demonstration starts are fresh processes in all of these tests."""


def test_demo_answers_through_three_nodes_with_the_tokens_of_transformers(
    builtin_model: StoredModel, test_home: Path
) -> None:
    done = subprocess.run(
        [*COMMAND, "--check", "--json", "--max-tokens", "24"],
        env={**os.environ, "FUSION_HOME": str(test_home)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "Paris" in result["text"]
    assert result["check"]["equal"] is True
    assert [stage["layers"] for stage in result["stages"]] == ["0:10", "10:20", "20:30"]
    assert len({stage["peer"] for stage in result["stages"]}) == 3
    assert result["time_to_first_token_s"] > 0
    assert all(not psutil.pid_exists(node["pid"]) for node in result["nodes"])


def test_demo_prints_what_a_person_wants_to_see(builtin_model: StoredModel, test_home: Path) -> None:
    line = ("demo", "--nodes", "2", "--max-tokens", "8", "--prompt", "Say [bold]hello[/].")
    done = run_cli(*line, home=test_home, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    assert "You: Say [bold]hello[/]." in done.stdout
    assert "all layers covered 1×" in done.stdout
    assert "tokens/s" in done.stdout
    assert "layers 15:30" in done.stdout


def test_demo_over_an_emulated_line_compares_two_equal_answers_at_its_round_trip(
    builtin_model: StoredModel, test_home: Path
) -> None:
    line = ("--rtt", "60", "--rate", "100", "--speculate", "tree")
    done = run_cli("demo", "--nodes", "2", "--max-tokens", "12", *line, "--json", home=test_home, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["line"] == {"rtt_ms": 60.0, "jitter_ms": 0.0, "rate_Mbps": 100.0}
    assert result["equal"] is True
    assert result["token_ids"] == result["speculative"]["token_ids"]
    assert result["speculation"] is None
    assert result["speculative"]["speculation"]["rows_per_token"] >= 1.0
    for answer in (result, result["speculative"]):
        # What the planner was told; the machine can only add to it.
        assert all(stage["round_trip_s"] >= 0.06 for stage in answer["stages"])
    # User, two nodes and back: three ways of half a round trip for each token.
    assert result["tokens_per_s"] <= 1 / 0.09


def test_demo_of_a_fusion_group_answers_alike_and_shows_that_nobody_was_sent_more_than_its_slice(
    builtin_model: StoredModel, test_home: Path
) -> None:
    line = ("--topology", "fusion", "--nodes", "2", "--max-tokens", "6", "--check", "--json")
    done = run_cli("demo", *line, home=test_home, timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["check"]["equal"] is True
    assert [node["slice"] for node in result["nodes"]] == ["0/2", "1/2"]
    assert result["audit"]["passed"] is True
    (session,) = result["audit"]["sessions"]
    assert session["num_closed"] == session["num_steps"] >= 6
    assert {node["largest_fraction"] for node in session["nodes"]} == {0.5}
    assert "audit passed" in done.stderr


@pytest.mark.parametrize(("nodes", "reason"), [("1", "two members at least"), ("10", "9 query heads")])
def test_demo_refuses_groups_that_cannot_be(
    nodes: str, reason: str, builtin_model: StoredModel, test_home: Path
) -> None:
    done = run_cli("demo", "--topology", "fusion", "--nodes", nodes, home=test_home)
    assert done.returncode == 2
    assert reason in " ".join(done.stderr.split())


def test_demo_refuses_more_nodes_than_layers_before_it_starts_any(builtin_model: StoredModel, test_home: Path) -> None:
    done = run_cli("demo", "--nodes", "99", home=test_home)
    assert done.returncode == 2
    assert done.stdout == ""


async def test_local_swarm_tells_why_a_node_failed_and_leaves_none_behind(
    builtin_model: StoredModel, test_home: Path, tmp_path: Path
) -> None:
    swarm = LocalSwarm(builtin_model.name, folder=tmp_path, home=test_home, threads=1, numerics="fp32")
    async with swarm:
        with pytest.raises(NodeFailed, match="lies outside the model"):
            await swarm.start([LayerRange(20, 31)])
    async with LocalSwarm(builtin_model.name, folder=tmp_path, home=test_home, threads=1, numerics="fp32") as swarm:
        await swarm.start(split_evenly(30, 2))
    assert all(node.process.returncode is not None for node in swarm.nodes)
    await asyncio.gather(*(node.process.wait() for node in swarm.nodes))


def test_a_demo_that_is_killed_leaves_no_node_behind(builtin_model: StoredModel, test_home: Path) -> None:
    env = {**os.environ, "FUSION_HOME": str(test_home)}
    process = subprocess.Popen(COMMAND, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    demo = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(nodes := demo.children()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(nodes) == 3
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(nodes, timeout=30)
    assert alive == []
