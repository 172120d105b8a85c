"""`fusion-node doctor` beside a real node: the node is asked, and tells what it knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_node.store import StoredModel
from tests.live.swarm_process import NodeProcess, run_cli
from tests.nat.light_nodes import LightNode, Nursery

pytestmark = pytest.mark.live


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[LightNode]:
    """A node on loopback that bandwidth can be measured with."""
    with Nursery(tmp_path) as nursery:
        yield nursery.start("neighbour", listen="127.0.0.1:0")


@pytest.fixture
def home(builtin_model: StoredModel, test_home: Path, tmp_path: Path) -> Path:
    """A home with the models of the test home, in which no other node runs."""
    made = tmp_path / "home"
    made.mkdir()
    (made / "models").symlink_to(test_home / "models")
    return made


def test_a_running_node_is_asked_and_examined(home: Path, neighbour: LightNode, tmp_path: Path) -> None:
    node = NodeProcess.start("0:4", folder=tmp_path / "node", home=home, peers=neighbour.addresses)
    try:
        node.wait_ready()
        done = run_cli("doctor", "--json", "--no-mdns", home=home)
    finally:
        node.end()
    (examined,) = json.loads(done.stdout)
    report = examined["report"]
    levels = {(finding["check"], finding["level"]) for finding in examined["findings"]}
    print(f"\n{levels}")
    assert report["peer"] == node.peer
    assert report["is_node"]
    assert report["bandwidth"][0]["peer"] == neighbour.peer
    assert {("bootstrap", "ok"), ("listening", "warning"), ("bandwidth", "ok"), ("peers", "ok")} <= levels
    assert done.returncode == 0, "warnings are no failure"
