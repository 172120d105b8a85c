"""Fusion groups whose members are on hosts of their own, with a line between any two, and a user on one more.

Every process emulates its line (p2p.link_emulation), so that the round trip is between all of them, also where this
kernel has no way to delay packets. What a token cannot take less than follows from it: a step passes every layer of a
group in four exchanges, each of which is half a round trip at least.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_node.client.tokenizer import Tokenizer
from fusion_node.engine.reference import ReferenceModel
from fusion_node.store import StoredModel
from tests.live.swarm_process import MODEL, STOP_S, NodeProcess, run_cli, wait_until
from tests.nat.internet import Internet

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "The capital of France is"
EXCHANGES = 4
ANSWER_S = 300.0
KEPT = "frames"
"""What the second node keeps of what it is sent."""

SURVEYED_S = 120.0
"""For members to have told how far they are from one another."""


@dataclass
class Hosts:
    """Nodes, one on each host, and a user on another."""

    user: str
    """The namespace of the user's host."""
    home: Path
    folder: Path
    round_trip_ms: float
    nodes: list[NodeProcess]

    def ask(self, command: str, *arguments: str) -> Any:
        """What a command of the user's says in JSON."""
        done = run_cli(
            command, MODEL, *arguments, "--json", "--no-mdns", "--threads", "1", "--puzzle-bits", "0",
            "--emulate-rtt", str(self.round_trip_ms), "--peer", self.nodes[0].addresses[0],
            home=self.home,
            namespace=self.user,
            timeout_s=ANSWER_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    def answer(self, topology: str, num_tokens: int) -> dict[str, Any]:
        """Greedily, to a log of its own."""
        told: dict[str, Any] = self.ask(
            "generate", PROMPT, "--raw", "--topology", topology, "--max-tokens", str(num_tokens),
            "--audit", str(self.folder / "user.log"),
        )  # fmt: skip
        return told

    def audit(self) -> Any:
        """Of all logs, when all nodes have ended."""
        for node in self.nodes:
            node.signal(signal.SIGTERM)
        assert [node.wait(STOP_S) for node in self.nodes] == [0] * len(self.nodes)
        files = [str(log_of(node)) for node in self.nodes] + [str(self.folder / "user.log")]
        audited = run_cli("audit", *files, "--json", home=self.home)
        assert audited.returncode == 0, audited.stdout[:2000] + audited.stderr[-2000:]
        return json.loads(audited.stdout)

    def least_ms(self, num_layers: int) -> float:
        """Of a token, for what is on its way between members."""
        return num_layers * EXCHANGES * self.round_trip_ms / 2


@contextmanager
def hosts(
    internet: Internet, home: Path, folder: Path, shards: Sequence[tuple[str, str]], *, round_trip_ms: float
) -> Iterator[Hosts]:
    """Starts a node for each slice and layers, on a host of its own."""
    own_home = folder / "home"
    own_home.mkdir()
    (own_home / "models").symlink_to(home / "models")
    nodes: list[NodeProcess] = []
    with ExitStack() as stack:
        for number, (slice_, layers) in enumerate(shards):
            node_folder = folder / f"node{number}"
            node = NodeProcess.start(
                layers,
                folder=node_folder,
                home=own_home,
                peers=nodes[0].wait_ready().addresses[:1] if nodes else (),
                options=(
                    "--slice", slice_, "--listen", "0.0.0.0:4600", "--puzzle-bits", "0",
                    "--emulate-rtt", str(round_trip_ms), "--audit-log", str(node_folder / "audit.log"),
                    *(("--record-received", str(folder / KEPT)) if number == 1 else ()),
                ),
                namespace=internet.host(f"m{number}").namespace,
            )  # fmt: skip
            stack.callback(node.end)
            nodes.append(node)
        for node in nodes:
            node.wait_ready()
        yield Hosts(internet.host("user").namespace, own_home, folder, round_trip_ms, nodes)


def log_of(node: NodeProcess) -> Path:
    return node.folder / "audit.log"


def expected(model: StoredModel, num_tokens: int) -> list[int]:
    torch.set_num_threads(1)
    return ReferenceModel(model.path).greedy(Tokenizer(model.path).encode(PROMPT), num_tokens)


def sent_widths(node: NodeProcess, kind: str) -> dict[str, set[int]]:
    """By receiver: how wide the rows were that a node sent it in records of this kind."""
    peers: dict[int, str] = {}
    widths: dict[str, set[int]] = {}
    for line in log_of(node).read_text().splitlines():
        record = json.loads(line)
        if record["is"] == "peer":
            peers[record["number"]] = record["peer"]
        elif record["is"] == kind and "to" in record:
            widths.setdefault(peers[record["to"]], set()).add(record["width"])
    return widths


def test_three_hosts_with_a_third_of_every_layer_each_answer_a_user_on_a_fourth(
    public_internet: Internet, test_home: Path, builtin_model: StoredModel, tmp_path: Path
) -> None:
    num_tokens = 6
    shards = [(f"{index}/3", "") for index in range(3)]
    with hosts(public_internet, test_home, tmp_path, shards, round_trip_ms=4.0) as swarm:
        answer = swarm.answer("fusion", num_tokens)
        (session,) = swarm.audit()["sessions"]
    assert answer["token_ids"] == expected(builtin_model, num_tokens)
    assert 1000 / answer["tokens_per_s"] >= swarm.least_ms(builtin_model.num_layers)
    assert session["num_closed"] == session["num_steps"] >= num_tokens
    assert [node["largest_fraction"] for node in session["nodes"]] == pytest.approx([1 / 3] * 3)
    print(f"\n{swarm.round_trip_ms:g} ms: {answer['tokens_per_s']:.2f} tokens/s, {session['num_steps']} steps closed")

    # What one of them kept of it tells what was asked, and answered.
    told = tmp_path / "report.json"
    attacked = run_cli(
        "privacy-report", MODEL, "--received", str(tmp_path / KEPT), "--layers", "0,29", "--candidates", "16",
        "--positions", "3", "--json", str(told),
        home=swarm.home,
        timeout_s=ANSWER_S,
    )  # fmt: skip
    assert attacked.returncode == 0, attacked.stderr[-2000:]
    report = json.loads(told.read_bytes())
    tokenizer = Tokenizer(builtin_model.path)
    # The last token is sent to nobody.
    passed = [*tokenizer.encode(PROMPT), *answer["token_ids"][:-1]]
    assert [(each["prompt"], each["recovered"]) for each in report["prompts"]] == [(tokenizer.decode(passed),) * 2]
    assert (report["member"], report["columns"]) == (1, 192)
    hidden = [each for each in report["solved"] if each["state"].startswith("hidden") and "alone" not in each["sent"]]
    assert {each["layer"] for each in hidden} == {0, 29}
    assert max(each["error"] for each in hidden if not each["is_control"]) < 1e-2
    assert min(each["error"] for each in hidden if each["is_control"]) > 0.5


@pytest.mark.parametrize("round_trip_ms", [10.0, 50.0])
def test_group_of_two_hands_on_to_a_group_of_three_only_where_their_slices_overlap(
    public_internet: Internet, test_home: Path, builtin_model: StoredModel, tmp_path: Path, round_trip_ms: float
) -> None:
    num_tokens, num_layers = 8, builtin_model.num_layers
    shards = [("0/2", "0:15"), ("1/2", "0:15"), ("0/3", "15:30"), ("1/3", "15:30"), ("2/3", "15:30")]
    with hosts(public_internet, test_home, tmp_path, shards, round_trip_ms=round_trip_ms) as swarm:
        plan: dict[str, Any] = {}

        def is_planned() -> bool:
            nonlocal plan
            plan = swarm.ask("plan", "--topology", "hybrid", "--max-tokens", str(num_tokens))
            exchange_ms = sum(stage["exchange_ms"] for stage in plan["stages"])
            return exchange_ms >= swarm.least_ms(num_layers)

        wait_until(is_planned, within_s=SURVEYED_S, what="a plan knows how far members are from one another")
        answer = swarm.answer("hybrid", num_tokens)
        report = swarm.audit()
    print(
        f"\n{round_trip_ms:g} ms: planned {1000 / plan['ms_per_token']:.2f} tokens/s, "
        f"measured {answer['tokens_per_s']:.2f}"
    )
    assert answer["token_ids"] == expected(builtin_model, num_tokens)
    assert [stage["layers"] for stage in answer["stages"]] == ["0:15", "15:30"]
    assert 1000 / answer["tokens_per_s"] >= swarm.least_ms(num_layers)
    (session,) = report["sessions"]
    assert session["num_closed"] == session["num_steps"] >= num_tokens
    fraction = {node["peer"]: node["largest_fraction"] for node in session["nodes"]}
    first, second = swarm.nodes[:2], swarm.nodes[2:]
    assert [fraction[node.peer] for node in first] == [0.5] * 2
    assert [fraction[node.peer] for node in second] == pytest.approx([1 / 3] * 3)

    # Columns 0:288 and 288:576 there, 0:192, 192:384 and 384:576 here.
    a, b, c = (node.peer for node in second)
    assert [sent_widths(node, "step") for node in first] == [{a: {192}, b: {96}}, {b: {96}, c: {192}}]
    for group in (first, second):
        for node in group:
            assert set(sent_widths(node, "partials")) == {other.peer for other in group if other is not node}
