"""A private swarm of real processes: it is entered with an invite, and a stranger gets nothing from it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusion_node.errors import NoPeers
from fusion_node.store import StoredModel
from p2p.invite import SECRET_PREFIX
from p2p.swarm_key import FILE_NAME, SwarmKey
from tests.live.swarm_process import MODEL, NodeProcess, run_cli, wait_until

pytestmark = pytest.mark.live

QUIET = ("--no-mdns", "--threads", "1")
FOUND_S = 30.0


@dataclass
class PrivateSwarm:
    """Two nodes with half of the layers each, in homes of their own, and how one was invited by the other."""

    first: NodeProcess
    second: NodeProcess
    first_home: Path
    second_home: Path
    user_home: Path
    invited: subprocess.CompletedProcess[str]

    @property
    def invite(self) -> str:
        return self.invited.stdout.strip()

    @property
    def key(self) -> SwarmKey:
        return SwarmKey.load(self.first_home / FILE_NAME)


def home_with(model_home: Path, home: Path) -> Path:
    """A home of its own with the same models."""
    home.mkdir()
    (home / "models").symlink_to(model_home / "models")
    return home


@pytest.fixture(scope="module")
def swarm(
    test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrivateSwarm]:
    folder = tmp_path_factory.mktemp("private")
    homes = [home_with(test_home, folder / name) for name in ("anna", "bert", "user")]
    nodes: list[NodeProcess] = []
    try:
        nodes.append(NodeProcess.start("0:15", folder=folder / "a", home=homes[0], options=("--private",)))
        first = nodes[0].wait_ready()
        invited = run_cli("invite", "--expires", "1h", home=homes[0])
        nodes.append(NodeProcess.start("15:30", folder=folder / "b", home=homes[1], peers=[invited.stdout.strip()]))
        second = nodes[1].wait_ready()
        yield PrivateSwarm(first, second, *homes, invited)
    finally:
        for node in nodes:
            node.end()


def test_invite_is_one_line_and_called_a_secret(swarm: PrivateSwarm) -> None:
    assert swarm.invited.returncode == 0, swarm.invited.stderr
    assert swarm.invited.stdout == swarm.invite + "\n"
    assert swarm.invite.startswith(SECRET_PREFIX)
    assert "holds the key of a private swarm" in swarm.invited.stderr
    assert stat.S_IMODE((swarm.first_home / FILE_NAME).stat().st_mode) == 0o600
    assert not (swarm.second_home / FILE_NAME).exists()


def test_who_has_the_invite_is_answered_by_both_nodes(swarm: PrivateSwarm) -> None:
    answer = run_cli(
        "generate", MODEL, "Hello", "--max-tokens", "4", "--json", "--peer", swarm.invite, *QUIET, home=swarm.user_home
    )
    assert answer.returncode == 0, answer.stderr
    stages = json.loads(answer.stdout)["stages"]
    assert [stage["peer"] for stage in stages] == [swarm.first.peer, swarm.second.peer]


def test_who_has_the_key_file_needs_no_invite(swarm: PrivateSwarm) -> None:
    key_file = str(swarm.first_home / FILE_NAME)
    seen = run_cli(
        "status", "--json", "--swarm-key", key_file, "--peer", swarm.second.addresses[0], "--no-mdns",
        home=swarm.user_home,
    )  # fmt: skip
    assert seen.returncode == 0, seen.stderr
    assert {node["peer"] for node in json.loads(seen.stdout)["nodes"]} == {swarm.first.peer, swarm.second.peer}


def test_operator_sees_who_is_connected(swarm: PrivateSwarm) -> None:
    # What the first node sends on to the second one goes over a link of the data plane, which stays.
    answer = run_cli(
        "generate", MODEL, "Hello", "--max-tokens", "2", "--peer", swarm.invite, *QUIET, home=swarm.user_home
    )
    assert answer.returncode == 0, answer.stderr

    def planes() -> set[str]:
        result = run_cli("peers", "--json", home=swarm.first_home)
        assert result.returncode == 0, result.stderr
        (reply,) = json.loads(result.stdout)
        assert reply["swarm"] == swarm.key.tag
        found = [peer for peer in reply["peers"] if peer["peer"] == swarm.second.peer]
        return {connection["plane"] for peer in found for connection in peer["connections"]}

    wait_until(lambda: planes() == {"control", "data"}, within_s=FOUND_S, what="the second node is connected")


def test_stranger_who_knows_an_address_learns_nothing(swarm: PrivateSwarm) -> None:
    def look(options: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        arguments = ("status", "--json", "--peer", swarm.first.addresses[0], "--no-mdns", *options)
        return run_cli(*arguments, home=swarm.user_home)

    with ThreadPoolExecutor() as pool:  # each gives up after 20 s
        found = list(pool.map(look, [(), ("--swarm-key", str(other_key(swarm)))]))
    for seen in found:
        assert seen.returncode == NoPeers.exit_code
        assert seen.stdout == ""
        assert "swarm" in seen.stderr


def other_key(swarm: PrivateSwarm) -> Path:
    path = swarm.user_home / "other.key"
    SwarmKey.load_or_create(path)
    return path


@pytest.mark.parametrize(
    "message",
    [
        b"\x13/multistream/1.0.0\n" * 5,
        b"GET /fusion HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        bytes(200),
    ],
    ids=["libp2p", "websocket", "zeros"],
)
def test_no_port_says_one_byte_to_a_stranger(swarm: PrivateSwarm, message: bytes) -> None:
    ports = [swarm.first.addresses[0].split("/")[4], swarm.first.data_address.rpartition(":")[2]]
    for port in map(int, ports):
        with socket.create_connection(("127.0.0.1", port), timeout=20.0) as stranger:
            stranger.sendall(message)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", f"port {port}"


def test_the_key_is_in_no_log(swarm: PrivateSwarm) -> None:
    secrets = [swarm.key.secret.hex(), swarm.key.noise_psk.hex(), swarm.key.pnet_psk.hex(), swarm.invite[30:60]]
    for node in (swarm.first, swarm.second):
        written = node.log + (node.folder / "stdout").read_text()
        assert swarm.key.tag in written
        assert not any(secret in written for secret in secrets)
        assert not re.search(SECRET_PREFIX, written)
