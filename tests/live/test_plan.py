"""``fusion-node plan`` over real processes: what it says, and that an answer goes the way that it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusion_node.store import StoredModel
from tests.live.swarm_process import MODEL, Nodes, node_processes, run_cli

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def nodes(test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One node that holds everything, and two that hold a half each."""
    with node_processes(test_home, tmp_path_factory.mktemp("nodes")) as nodes:
        nodes.start("0:30", "0:15", "15:30", options=["--operator", "anna"])
        yield nodes


def asked(nodes: Nodes, home: Path, command: str, *arguments: str) -> Any:
    """The JSON of a command, as a user who enters by the second node."""
    address = nodes.current[1].addresses[0]
    done = run_cli(command, MODEL, *arguments, "--no-mdns", "--peer", address, "--threads", "1", "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_explains_itself_and_the_answer_takes_its_way(nodes: Nodes, test_home: Path) -> None:
    whole, first, second = nodes.current
    # Three processes on two cores measure different speeds, so the halves may be the faster route.
    alone = ("--max-stages", "1")
    plan = asked(nodes, test_home, "plan", "--dry-run", "--prompt-tokens", "20", "--max-tokens", "12", *alone)
    assert plan["num_found"] == plan["num_measured"] == 3
    assert [(stage["peer"], stage["start"], stage["stop"]) for stage in plan["stages"]] == [(whole.peer, 0, 30)]
    assert {each["peer"] for each in plan["rejected"]} == {first.peer, second.peer}
    assert plan["stages"][0]["alternate"] is None
    assert {leg["source"] for leg in plan["legs"]} == {"measured"}
    parts = sum(leg["ms"] for leg in plan["legs"]) + plan["stages"][0]["compute_ms"] + plan["user_ms"]
    assert plan["ms_per_token"] == pytest.approx(parts + plan["stages"][0]["queue_ms"], abs=0.05)
    answer = asked(nodes, test_home, "generate", "Name a river.", "--max-tokens", "12", *alone)
    assert [stage["peer"] for stage in answer["stages"]] == [whole.peer]


def test_rules_lead_plan_and_answer_around_a_node(nodes: Nodes, test_home: Path) -> None:
    whole, first, second = nodes.current
    deny = ("--deny", whole.peer[-8:])
    plan = asked(nodes, test_home, "plan", *deny)
    halves = [(first.peer, 0, 15), (second.peer, 15, 30)]
    assert [(stage["peer"], stage["start"], stage["stop"]) for stage in plan["stages"]] == halves
    (rejected,) = plan["rejected"]
    assert (rejected["peer"], rejected["reason"]) == (whole.peer, "rule")
    answer = asked(nodes, test_home, "generate", "Name a river.", "--max-tokens", "12", *deny)
    assert [stage["peer"] for stage in answer["stages"]] == [first.peer, second.peer]


def test_plan_for_people_fits_the_terminal_and_says_why_there_is_none(nodes: Nodes, test_home: Path) -> None:
    arguments = (MODEL, "--no-mdns", "--peer", nodes.current[1].addresses[0], "--threads", "1")
    told = run_cli("plan", *arguments, home=test_home)
    assert told.returncode == 0, told.stderr
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert all(f"…{node.peer[-8:]}" in told.stdout for node in nodes.current)
    assert "tokens/s" in told.stdout
    nobody = run_cli("plan", *arguments, "--deny", "operator:anna", home=test_home)
    assert nobody.returncode == 7
    assert "is left by your rules: 3 × you deny operator anna" in nobody.stderr
    assert "you deny operator anna" in nobody.stdout
