"""A node with an allow-list seen from outside: who is not on it proves an identity, and then gets nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fusion_node.errors import FusionError, NoPeers, PeerError
from fusion_node.types import ModelId, UnixS
from p2p.addresses import PeerAddress
from p2p.allow_list import NOT_ALLOWED, AllowList
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.record_exchange import PROTOCOL_ID
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_record
from p2p.seam import Link
from p2p.websocket import WebSocketNetwork

pytestmark = pytest.mark.live

MODEL = ModelId("ab" * 32)
PATIENCE_S = 20.0

NODE, MEMBER, STRANGER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))

Start = Callable[..., Awaitable[Discovery]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "allowed"
    path.write_text(f"{MEMBER.peer_id}\n")
    return path


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_discovery(identity: Identity, *peers: str, gate: PeerGate | None = None) -> Discovery:
            listen = ("127.0.0.1:0",) if identity is NODE else ()
            config = DiscoveryConfig(listen, peers, mdns=False, serve=identity is NODE)
            discovery = Discovery(identity, config, gate=gate)
            await discovery.start()
            stack.push_async_callback(discovery.aclose)
            if identity is NODE:
                await discovery.announce(own_record(discovery), [MODEL])
            return discovery

        yield start_discovery


def own_record(discovery: Discovery) -> bytes:
    now = UnixS(time.time())
    record = NodeRecord(
        version=PROTOCOL_VERSION,
        peer=NODE.peer_id,
        sequence=1,
        issued_at=now,
        expires_at=UnixS(now + 60.0),
        data_addresses=("127.0.0.1:1",),
        libp2p_addresses=tuple(discovery.addresses),
        device="cpu",
        memory_free_bytes=1,
        shards=(ShardRecord(MODEL, "tiny", 0, 10, 30, "fp32", (0.001, 0.001, 0.001), 4096),),
        num_sessions=0,
        software="test",
    )
    return sign_record(record, NODE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # of another thread, which sets no event here
            await asyncio.sleep(0.02)


async def test_who_is_on_the_list_finds_the_node_and_who_is_not_gets_no_record(start: Start, path: Path) -> None:
    gate = PeerGate(allow_list=AllowList(path))
    node = await start(NODE, gate=gate)
    member = await start(MEMBER, node.addresses[0])
    await member.wait_for_peer(PATIENCE_S)
    assert [record.peer for record in await member.find(MODEL, timeout_s=5.0)] == [NODE.peer_id]

    stranger = await start(STRANGER, node.addresses[0])
    with pytest.raises(NoPeers):
        await stranger.wait_for_peer(1.0)
    assert stranger.table.live(now=UnixS(time.time())) == []
    assert await stranger.find(MODEL, timeout_s=0.5) == []
    assert gate.refused[NOT_ALLOWED] >= 1
    assert node.connected == [MEMBER.peer_id]


async def test_a_request_of_a_stranger_is_not_answered_in_the_moment_before_it_is_cut_off(
    start: Start, path: Path
) -> None:
    node = await start(NODE, gate=PeerGate(allow_list=AllowList(path)))
    stranger = await start(STRANGER)
    address = PeerAddress.parse(node.addresses[0])
    for _ in range(3):
        with pytest.raises(FusionError):
            await stranger.connect(NODE.peer_id, [address])
            await stranger.request(NODE.peer_id, PROTOCOL_ID, b"", limit_bytes=100_000)
        with pytest.raises(FusionError):
            await stranger.connect(NODE.peer_id, [address])
            await stranger.call(lambda host: host.find_providers(b"\x12\x20" + bytes(32)))
            await stranger.request(NODE.peer_id, PROTOCOL_ID, b"", limit_bytes=100_000)
    assert stranger.table.live(now=UnixS(time.time())) == []


async def test_who_is_struck_off_the_list_is_disconnected_and_who_is_added_gets_in(start: Start, path: Path) -> None:
    gate = PeerGate(allow_list=AllowList(path))
    node = await start(NODE, gate=gate)
    member = await start(MEMBER, node.addresses[0])
    await member.wait_for_peer(PATIENCE_S)
    path.write_text(f"{STRANGER.peer_id}  # in place of the other\n")  # noqa: ASYNC240
    gate.refresh()
    await until(lambda: MEMBER.peer_id not in node.connected)
    stranger = await start(STRANGER, node.addresses[0])
    await stranger.wait_for_peer(PATIENCE_S)


async def test_a_link_of_a_stranger_ends_before_anything_is_said_on_it(path: Path) -> None:
    links: list[Link] = []

    async def on_link(link: Link) -> None:
        links.append(link)

    gate = PeerGate(allow_list=AllowList(path))
    network = WebSocketNetwork(NODE, gate=gate)
    listener = await network.listen("127.0.0.1:0", on_link)
    # The handshake is over for the one who dials when its last message is sent: what it gets then is the end.
    with contextlib.suppress(PeerError):
        link = await WebSocketNetwork(STRANGER).dial(listener.address, expect=NODE.peer_id, timeout_s=PATIENCE_S)
        await link.aclose()
    await until(lambda: network.refused[NOT_ALLOWED] == 1)
    assert links == []
    link = await WebSocketNetwork(MEMBER).dial(listener.address, expect=NODE.peer_id, timeout_s=PATIENCE_S)
    await until(lambda: bool(links))
    assert links[0].peer == MEMBER.peer_id
    await link.aclose()
    await listener.aclose()
