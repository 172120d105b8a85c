"""A real node whose operator bans a peer while it is connected, and which has paid for its identity."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusion_node.errors import FusionError, PeerError
from fusion_node.store import StoredModel
from fusion_node.types import PeerId, UnixS
from p2p.identity import Identity, public_key_of
from p2p.links import LinkPool
from p2p.messages import AnyMessage, StatusReply, StatusRequest
from p2p.puzzle import bits_of
from p2p.records import NodeRecord, open_record
from p2p.websocket import WebSocketNetwork
from tests.live.swarm_process import Nodes, node_processes, run_cli

pytestmark = pytest.mark.live

PATIENCE_S = 20.0
BITS = 5


@pytest.fixture
def nodes(test_home: Path, builtin_model: StoredModel, tmp_path: Path) -> Iterator[Nodes]:
    with node_processes(test_home, tmp_path) as nodes:
        # On every interface, because on loopback nothing has to be paid.
        nodes.start("29:30", options=["--listen", "0.0.0.0:0", "--no-upnp", "--puzzle-bits", str(BITS)])
        yield nodes


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # of another process
            await asyncio.sleep(0.02)


async def test_ban_by_the_operator_ends_links_at_once_until_it_is_lifted(nodes: Nodes, test_home: Path) -> None:
    node = nodes.current[0]
    peer, address = PeerId(node.peer), f"127.0.0.1:{node.data_address.rpartition(':')[2]}"
    us = Identity.generate()
    closed: list[FusionError] = []
    replies: list[StatusReply] = []

    def keep(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, StatusReply):
            replies.append(message)

    async def cli(*arguments: str) -> str:
        done = await asyncio.to_thread(run_cli, *arguments, home=test_home)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pool = LinkPool(WebSocketNetwork(us), us.peer_id, on_frame=keep, on_closed=lambda peer, error: closed.append(error))
    try:
        await pool.connect(peer, [address])
        pool.send(peer, StatusRequest(1))
        await until(lambda: bool(replies))
        record = open_record(replies[0].record, now=UnixS(time.time()))
        assert isinstance(record, NodeRecord)
        assert bits_of(public_key_of(peer), record.puzzle) >= BITS
        assert (node.folder / "identity.key.puzzle").read_bytes() == record.puzzle

        assert "for 10 min" in await cli("ban", us.peer_id, "--for", "10m", "--reason", "a test")
        await until(lambda: bool(closed))
        with contextlib.suppress(PeerError):  # it proves who it is, and is hung up on
            await pool.connect(peer, [address])
        await until(lambda: not pool.is_connected(peer))
        listed = json.loads(await cli("bans", "--json"))
        assert [(ban["target"], ban["reason"]) for ban in listed] == [(us.peer_id, "a test")]

        assert "lifted" in await cli("unban", us.peer_id)
        await pool.connect(peer, [address])
        assert await pool.round_trip(peer) > 0
    finally:
        await pool.aclose()
        await cli("unban", us.peer_id)
