"""``fusion-node ban``, ``unban`` and ``bans``: through the nodes that run, or on the file when none does."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fusion_node.cli.ban import table
from fusion_node.cli.main import app
from fusion_node.daemon.control import control_socket
from fusion_node.daemon.life import NodeLife
from fusion_node.daemon.swarm_report import PeersReply, PeerView
from p2p import bans as ban_file
from p2p.bans import Ban
from p2p.gate import BANNED, PeerGate
from p2p.identity import Identity

NODE, PEER, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (11, 12, 13))


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short enough for sockets, unlike those of tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run(home: Path, *arguments: str, expect: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments, "--home", str(home)], env={"COLUMNS": "200"})
    if expect == 0:
        assert result.exit_code == 0, (result.output, result.exception)
    else:
        assert getattr(result.exception, "exit_code", None) == expect, (result.output, result.exception)
    return f"{result.output}{result.exception or ''}"


def banned(home: Path) -> list[str]:
    return [each["target"] for each in json.loads(run(home, "bans", "--json"))]


class Life(NodeLife):
    """A node that knows one peer."""

    async def peers(self) -> PeersReply:
        return PeersReply(NODE, "public", (PeerView(PEER),))


@contextmanager
def node(home: Path, gate: PeerGate) -> Iterator[None]:
    """The control socket of a node of this home, in a thread with an event loop."""
    life = Life(NODE, "model")
    life.guarded_by(gate)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with control_socket(home / "run", NODE, life):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_without_a_node_the_file_is_changed(home: Path) -> None:
    assert "nobody is banned" in run(home, "ban")
    assert "for 1 h" in run(home, "ban", "203.0.113.9/24", "--for", "1h", "--reason", "rude\x1b[31m")
    assert "until it is lifted" in run(home, "ban", PEER)
    assert set(banned(home)) == {"203.0.113.0/24", PEER}
    shown = run(home, "ban")
    assert shown == run(home, "bans")
    assert "rude?[31m" in shown
    assert "for ever" in shown
    assert "lifted" in run(home, "unban", PEER[-8:])
    assert "is not banned" in run(home, "unban", OTHER)
    assert banned(home) == ["203.0.113.0/24"]


def test_node_that_runs_is_told_and_writes_the_file(home: Path) -> None:
    gate = PeerGate(home / ban_file.FILE_NAME)
    heard: list[Ban] = []
    gate.on_ban(heard.append)
    with node(home, gate):
        run(home, "ban", PEER[:20], "--for", "10m")  # which the node knows
        assert [ban.target for ban in heard] == [PEER]
        assert gate.refuse_peer(PEER, "") == BANNED
        assert banned(home) == [PEER]
        assert [ban.target for ban in ban_file.load(home / ban_file.FILE_NAME)] == [PEER]
        assert "lifted" in run(home, "unban", PEER)
        assert gate.refuse_peer(PEER, "") is None
        assert banned(home) == []
        assert "10.0.0.0/8" in run(home, "ban", "10.1.2.3/8", "--json")


def test_what_is_wrong_is_said(home: Path) -> None:
    assert "write a whole peer id" in run(home, "ban", "nobody", expect=2)
    assert "most of the Internet" in run(home, "ban", "0.0.0.0/0", expect=2)
    assert "not a duration" in run(home, "ban", "10.0.0.1", "--for", "soon", expect=2)
    assert "name whom to ban" in run(home, "ban", "--for", "1h", expect=2)
    assert "write a whole peer id" in run(home, "unban", "nobody", expect=2)


def test_table_says_who_banned_and_how_long_still() -> None:
    listed = (
        Ban(PEER, 0.0, 3600.0 * 48, "x"),
        Ban("10.0.0.0/8", 0.0, 300.0, "y\x07", is_automatic=True),
        Ban("11.0.0.0/8", 0.0, 55.0),
        Ban("12.0.0.0/8", 0.0, 3595.0),
        Ban("13.0.0.0/8", 0.0, 5000.0),
    )
    console = Console(width=150, file=io.StringIO(), record=True)
    console.print(table(listed, now=0.0))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[1:] == [
        [PEER, "2", "d", "you", "x"],
        ["10.0.0.0/8", "5", "min", "the", "node", "y?"],
        ["11.0.0.0/8", "55", "s", "you"],
        ["12.0.0.0/8", "1", "h", "you"],
        ["13.0.0.0/8", "83", "min", "you"],
    ]
