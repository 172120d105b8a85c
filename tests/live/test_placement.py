"""Real nodes that choose their layers at the same time, and one that goes over to others because it is told to."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fusion_node.store import StoredModel
from p2p.identity import Identity
from tests.live.swarm_process import MODEL, STOP_S, Nodes, node_processes, run_cli, wait_until

pytestmark = pytest.mark.live

AT_MOST_TEN = ("--max-layers", "10")


def asked(nodes: Nodes, home: Path, command: str, *arguments: str) -> Any:
    """The JSON of a command."""
    address = nodes.current[0].addresses[0]
    done = run_cli(command, MODEL, *arguments, "--no-mdns", "--peer", address, "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nodes_that_join_at_once_take_different_layers(
    test_home: Path, builtin_model: StoredModel, tmp_path: Path
) -> None:
    with node_processes(test_home, tmp_path) as nodes:
        nodes.start("0:10")
        joined = [nodes.begin("", options=AT_MOST_TEN) for _ in range(2)]
        held = sorted(str(node.wait_ready().ready["layers"]) for node in joined)
        assert held == ["10:20", "20:30"]


@pytest.mark.slow  # a minute and a half: a node has to serve for some time before it may be moved
def test_a_node_goes_over_to_layers_that_it_is_assigned_and_the_answer_stays_the_same(
    test_home: Path, builtin_model: StoredModel, tmp_path: Path
) -> None:
    key = tmp_path / "scheduler.key"
    scheduler = Identity.load_or_create(key).peer_id
    question = ("What do herons eat?", "--max-tokens", "8", "--temperature", "0", "--threads", "1")
    with node_processes(test_home, tmp_path) as nodes:
        # Alone, it takes the first layers, which the second node holds as well.
        nodes.start("", options=(*AT_MOST_TEN, "--scheduler", scheduler))
        (movable,) = nodes.current
        others = [nodes.begin(layers) for layers in ("0:10", "20:30", "10:20")]
        for node in others:
            node.wait_ready()
        middle = others[-1]
        before = asked(nodes, test_home, "generate", *question)
        middle.signal(signal.SIGTERM)
        middle.wait(STOP_S)
        assert movable.ready["layers"] == "0:10"
        placed = asked(nodes, test_home, "place", "--identity", str(key), "--apply")
        (moved,) = [node for node in placed["nodes"] if node["current"] != node["proposed"]]
        assert (moved["peer"], moved["proposed"], moved["outcome"]) == (movable.peer, "10:20", "accepted")
        wait_until(lambda: bool(movable.events("serves other layers")), within_s=30, what="it serves other layers")
        assert asked(nodes, test_home, "generate", *question)["text"] == before["text"]
