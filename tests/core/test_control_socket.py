"""The control socket of a node on this machine: who can use it, what it says, and what a dead node leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from fusion_node.cli.control import in_words, matching
from fusion_node.daemon.control import (
    MAX_PATH_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    NodeState,
    PauseRequest,
    Phase,
    Reply,
    ask_invites,
    ask_network,
    ask_nodes,
    ask_peers,
    control_socket,
    known_peers,
)
from fusion_node.daemon.network_report import NetworkReport
from fusion_node.daemon.swarm_report import InviteReply, InviteRequest, PeersReply, PeerView
from fusion_node.errors import ConfigError
from p2p.identity import Identity

PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3)]


@pytest.fixture
def run() -> Iterator[Path]:
    """A folder whose path is short enough for sockets, unlike those of tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def report(peer: str, *, software: str = "test") -> NetworkReport:
    return NetworkReport(
        peer=peer,
        software=software,
        protocol_version=2,
        is_node=True,
        listen=("127.0.0.1:1",),
        data_listen=(),
        bootstrap=(),
        num_peers=0,
        num_nodes=1,
        has_swarm_key=False,
    )


class Node:
    """A node that notes what it is told."""

    def __init__(self, peer: str, phase: Phase = Phase.READY) -> None:
        self.peer = peer
        self.phase = phase
        self.orders: list[str] = []
        self.model = "tiny"

    def state(self) -> NodeState:
        return NodeState(self.peer, 1, self.model, self.phase, num_sessions=2, ends_in_s=7.0)

    def pause(self, *, at_once: bool) -> None:
        self.orders.append("pause at once" if at_once else "pause")
        self.phase = Phase.PAUSED

    def resume(self) -> None:
        self.orders.append("resume")
        self.phase = Phase.READY

    async def network(self, *, measure: bool) -> NetworkReport | None:
        self.orders.append("measure" if measure else "network")
        return None if self.phase is Phase.STARTING else report(self.peer)

    def invite(self, request: InviteRequest) -> InviteReply | None:
        self.orders.append(f"invite {request}")
        return None if self.phase is Phase.STARTING else InviteReply(self.peer, "public", "fusion1abc")

    async def peers(self) -> PeersReply | None:
        return None if self.phase is Phase.STARTING else PeersReply(self.peer, "public", (PeerView("somebody"),))


async def test_commands_reach_the_nodes_that_are_named_and_tell_what_changed(run: Path) -> None:
    a, b = Node(PEERS[0]), Node(PEERS[1])
    async with control_socket(run, a.peer, a), control_socket(run, b.peer, b):
        assert known_peers(run) == sorted(PEERS[:2])
        (answer,) = await ask_nodes(run, [a.peer], "pause", PauseRequest(at_once=True))
        assert answer.reply == Reply(a.state(), Phase.READY)
        assert answer.reply.state.phase is Phase.PAUSED
        await ask_nodes(run, [a.peer], "pause", PauseRequest())
        both = await ask_nodes(run, known_peers(run), "state")
        assert {x.peer: x.reply.state.phase for x in both if x.reply} == {a.peer: Phase.PAUSED, b.peer: Phase.READY}
        await ask_nodes(run, PEERS[:2], "resume")
    assert a.orders == ["pause at once", "pause", "resume"]
    assert b.orders == ["resume"]


async def test_socket_is_for_its_user_only_and_gone_afterwards(run: Path) -> None:
    folder = run / "folder"
    folder.mkdir(mode=0o755)
    async with control_socket(folder, PEERS[0], Node(PEERS[0])):
        (path,) = folder.iterdir()
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


async def test_socket_of_a_killed_node_is_ignored_and_removed(run: Path) -> None:
    dead = run / f"{PEERS[0]}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    node = Node(PEERS[1])
    async with control_socket(run, node.peer, node):
        (answer,) = await ask_nodes(run, known_peers(run), "state")
        assert answer.peer == node.peer
    assert not dead.exists()


async def test_node_replaces_the_socket_that_its_killed_self_left(run: Path) -> None:
    for suffix in (".sock", ".tmp"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(run / f"{PEERS[0]}{suffix}"))
    node = Node(PEERS[0])
    async with control_socket(run, node.peer, node):
        assert [a.reply is not None for a in await ask_nodes(run, [node.peer], "state")] == [True]
    assert known_peers(run) == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """As systems have them for this; pytest's own are too long, the more so for one of several workers."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def test_path_that_is_too_long_for_a_socket_leads_to_a_short_one(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = short_folder
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    folder = tmp_path / ("long" * 20)
    node = Node(PEERS[0])
    async with control_socket(folder, node.peer, node):
        (link,) = folder.iterdir()
        assert link.is_symlink()
        assert len(bytes(link.readlink())) <= MAX_PATH_BYTES < len(bytes(link))
        assert link.readlink().parent.parent == runtime
        (answer,) = await ask_nodes(folder, known_peers(folder), "pause", PauseRequest())
        assert answer.reply is not None
    assert list(folder.iterdir()) == []
    assert [path for path in runtime.rglob("*") if not path.is_dir()] == []
    # What a killed node leaves is a link to nothing, or to a socket that nobody answers.
    link.symlink_to(runtime / "gone.sock")
    assert await ask_nodes(folder, known_peers(folder), "state") == []
    assert list(folder.iterdir()) == []


async def test_folder_of_somebody_else_is_not_used_and_the_node_runs_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / ("long" * 25)
    (tmp_path / f"fusion-node-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    ran = False
    async with control_socket(folder, PEERS[0], Node(PEERS[0])):
        ran = True
    assert ran
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "file").write_text("")
    async with control_socket(tmp_path / "file", PEERS[0], Node(PEERS[0])):
        pass


async def test_what_is_no_command_is_refused_and_the_node_goes_on(run: Path) -> None:
    node = Node(PEERS[0])
    async with control_socket(run, node.peer, node):
        path = str(run / f"{node.peer}.sock")
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
            for method, route, data, status in (
                ("GET", "/pause", None, 405),
                ("POST", "/nothing", None, 404),
                ("POST", "/pause", b"{", 400),
                ("POST", "/pause", b'{"at_once": 3}', 400),
                ("POST", "/pause", b" " * (MAX_REQUEST_BYTES + 1), 413),
            ):
                async with session.request(method, f"http://node{route}", data=data) as response:
                    assert response.status == status, (method, route)
            assert node.orders == []
            async with session.post("http://node/pause", data=b'{"at_once": false, "later": 1}') as response:
                assert json.loads(await response.read())["state"]["phase"] == "paused"
    assert node.orders == ["pause"]


async def serve_bytes(path: Path, answer: bytes | None) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is not None:
            writer.write(answer)
        writer.close()

    return await asyncio.start_unix_server(handle, str(path))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", id="other version"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (4 * MAX_REPLY_BYTES), id="endless"),
        pytest.param(b"HTTP/1.1 500 No\r\n\r\n", id="failed"),
        pytest.param(b"nonsense\r\n\r\n", id="no HTTP"),
        pytest.param(None, id="hangs up"),
    ],
)
async def test_node_that_answers_badly_is_told_of_and_keeps_nobody_else_from_answering(
    run: Path, answer: bytes | None
) -> None:
    good = Node(PEERS[1])
    bad = await serve_bytes(run / f"{PEERS[0]}.sock", answer)
    async with bad, control_socket(run, good.peer, good):
        told = {a.peer: a for a in await ask_nodes(run, PEERS[:2], "state")}
    assert told[good.peer].reply is not None
    assert told[PEERS[0]].reply is None
    assert told[PEERS[0]].problem


# names and words


def test_node_is_named_by_the_beginning_or_the_end_of_its_peer_id() -> None:
    for part in (PEERS[0], PEERS[0][-8:], f"…{PEERS[0][-8:]}", PEERS[0][:20]):
        assert matching(PEERS, part) == [PEERS[0]]
    assert matching(PEERS, "nobody") == []
    assert matching(PEERS, "…") == []
    with pytest.raises(ConfigError, match="may be any of"):
        matching(PEERS, "12D3Koo")


@pytest.mark.parametrize(
    ("command", "before", "after", "num_sessions", "words"),
    [
        ("pause", Phase.READY, Phase.PAUSED, 0, "paused"),
        ("pause", Phase.READY, Phase.PAUSED, 1, "paused; 1 session may go on for 7 s"),
        ("pause", Phase.BACKING_OFF, Phase.PAUSED, 2, "paused; 2 sessions may go on for 7 s"),
        ("pause", Phase.PAUSED, Phase.PAUSED, 0, "was paused already"),
        ("pause", Phase.LOADING, Phase.LOADING, 0, "is loading, and will not serve until it is resumed"),
        ("pause", Phase.LEAVING, Phase.LEAVING, 0, "is leaving"),
        ("resume", Phase.PAUSED, Phase.READY, 0, "serves again"),
        ("resume", Phase.READY, Phase.READY, 0, "was not paused"),
        ("resume", Phase.PAUSED, Phase.BACKING_OFF, 0, "will serve when no other program uses the device"),
        ("resume", Phase.WARMING_UP, Phase.WARMING_UP, 0, "is warming up, and will serve when it is ready"),
    ],
)
def test_what_a_command_changed_is_told_in_words(
    command: str, before: Phase, after: Phase, num_sessions: int, words: str
) -> None:
    state = NodeState(PEERS[0], 1, "tiny", after, num_sessions=num_sessions, ends_in_s=7.0 if num_sessions else None)
    assert in_words(command, Reply(state, before)) == words


async def test_a_node_tells_of_the_network_when_it_is_in_it(run: Path) -> None:
    ready, starting = Node(PEERS[0]), Node(PEERS[1], Phase.STARTING)
    async with control_socket(run, ready.peer, ready), control_socket(run, starting.peer, starting):
        answers = await ask_network(run, [ready.peer, starting.peer, PEERS[2]], measure=False)
        assert [answer.reply for answer in answers] == [report(ready.peer), None]
        assert answers[1].problem == "it is still starting"
        await ask_network(run, [ready.peer], measure=True)
    assert ready.orders == ["network", "measure"]


async def test_invites_and_peers_are_told_once_there_are_any(run: Path) -> None:
    node = Node(PEERS[0])
    async with control_socket(run, node.peer, node):
        (invite,) = await ask_invites(run, [node.peer], InviteRequest(60.0, with_key=False))
        (peers,) = await ask_peers(run, [node.peer])
        node.phase = Phase.STARTING
        starting = [await ask_peers(run, [node.peer]), await ask_invites(run, [node.peer], InviteRequest())]
    assert invite.reply == InviteReply(node.peer, "public", "fusion1abc")
    assert peers.reply == PeersReply(node.peer, "public", (PeerView("somebody"),))
    assert node.orders[0] == f"invite {InviteRequest(60.0, with_key=False)}"
    assert [answer.problem for (answer,) in starting] == ["it is still starting"] * 2
