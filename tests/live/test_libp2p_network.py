"""Links over libp2p streams: the conformance suite of p2p.conformance, and what only this network has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID

from fusion_node.errors import PeerClosed
from fusion_node.types import PeerId
from p2p.conformance import CHECKS, Check
from p2p.identity import Identity
from p2p.libp2p_adapter.messages import read_exactly, translated
from p2p.libp2p_adapter.streams import PROTOCOL
from p2p.link_emulation import EmulatedLine
from p2p.link_emulation_core import LineShape
from p2p.links import LinkPool
from p2p.messages import AnyMessage, StatusRequest
from p2p.noise_core import MAX_SEGMENT_BYTES
from p2p.paths import RoutedNetwork
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Link, Listener, Network, OnLink, PathKind
from p2p.websocket import WebSocketNetwork
from tests.libp2p_hosts import LoopbackHost

PATIENCE_S = 20.0
"""For what happens in milliseconds, on a machine that does much else."""


class _LateNetwork:
    """A network whose host starts when it is first used, because a Bench makes networks without waiting."""

    def __init__(self, host: LoopbackHost) -> None:
        self._host = host
        self.refused = host.network.refused
        self.path_of = host.network.path_of

    async def dial(self, address: str, *, expect: object, timeout_s: float) -> Link:
        host = await self._host.start()
        return await host.network.dial(address, expect=expect, timeout_s=timeout_s)  # type: ignore[arg-type]

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        return await (await self._host.start()).network.listen(address, on_link)


class StreamBench:
    def __init__(self) -> None:
        self.hosts: dict[int, LoopbackHost] = {}

    def network(self, identity: Identity, *, version: int = PROTOCOL_VERSION) -> Network:
        host = LoopbackHost(identity, version=version)
        network = _LateNetwork(host)
        self.hosts[id(network)] = host
        return network

    def listen_address(self, network: Network) -> str:
        return f"/p2p/{self.hosts[id(network)].peer}"

    def dead_address(self) -> str:
        return f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"


@pytest.fixture
async def bench() -> AsyncIterator[StreamBench]:
    bench = StreamBench()
    yield bench
    for host in bench.hosts.values():
        await host.aclose()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_network_conforms(bench: StreamBench, check: Check) -> None:
    await check(bench)


@pytest.mark.parametrize("who_dies", ["dialling", "listening"])
async def test_a_thread_that_dies_ends_its_links_and_accepts_them_again_when_it_is_back(who_dies: str) -> None:
    listening, dialling = await LoopbackHost().start(), await LoopbackHost(listens=False).start()
    dying = dialling if who_dies == "dialling" else listening
    accepted: list[Link] = []

    async def keep(link: Link) -> None:
        accepted.append(link)
        await asyncio.Event().wait()

    async def dial() -> None:
        await dialling.network.dial(str(listening.address), expect=listening.peer, timeout_s=PATIENCE_S)

    listener = await listening.network.listen(f"/p2p/{listening.peer}", keep)
    try:
        await dial()
        ends = [channel for host in (listening, dialling) for channel in host.network._channels]
        assert len(ends) == 2
        await dying.die()
        async with asyncio.timeout(PATIENCE_S):
            for end in ends:
                await end._over
                with pytest.raises(PeerClosed):
                    end.write(b"x")
            await dying.revived()
            await dial()
    finally:
        await listener.aclose()
        for host in (listening, dialling):
            await host.aclose()


async def test_streams_too_go_over_an_emulated_line_and_close_after_what_was_written() -> None:
    us, them = (LoopbackHost(line=EmulatedLine(LineShape(rtt_ms=40.0, rate_Mbps=100.0))) for _ in range(2))
    arrived: asyncio.Queue[AnyMessage] = asyncio.Queue()
    pools = [
        LinkPool(
            (await host.start()).network,
            host.peer,
            on_frame=lambda peer, message, payload: arrived.put_nowait(message),
            on_closed=lambda peer, error: None,
        )
        for host in (us, them)
    ]
    ours, theirs = pools
    try:
        await theirs.listen(f"/p2p/{them.peer}")
        await ours.connect(them.peer, [str(them.address)], timeout_s=PATIENCE_S)
        assert ours.path(them.peer) is PathKind.STREAM
        assert await ours.round_trip(them.peer) >= 0.04
        ours.send(them.peer, StatusRequest(1))
        await ours.aclose()
        async with asyncio.timeout(PATIENCE_S):
            assert await arrived.get() == StatusRequest(1)
    finally:
        for pool in pools:
            await pool.aclose()
        for host in (us, them):
            await host.aclose()


@pytest.mark.parametrize("size", [0, MAX_SEGMENT_BYTES + 1, 2**32 - 1])
async def test_a_length_that_no_segment_has_ends_the_stream(size: int) -> None:
    listening, dialling = await LoopbackHost().start(), await LoopbackHost(listens=False).start()

    async def keep(link: Link) -> None:
        await link.wait_closed()

    async def announce(node: Any) -> None:
        with translated(listening.peer), trio.fail_after(PATIENCE_S / 4):  # before the handshake takes too long
            stream = await node._host.new_stream(ID.from_base58(listening.peer), [PROTOCOL])
            await stream.write(size.to_bytes(4, "little"))
            await read_exactly(stream, 1)

    listener = await listening.network.listen(f"/p2p/{listening.peer}", keep)
    try:
        await dialling.network.dial(str(listening.address), expect=listening.peer, timeout_s=PATIENCE_S)
        with pytest.raises(PeerClosed):
            await dialling.call(announce)
    finally:
        await listener.aclose()
        for host in (listening, dialling):
            await host.aclose()


@pytest.mark.parametrize("path", [PathKind.DIRECT, PathKind.STREAM])
async def test_a_conversation_goes_on_while_the_thread_dies(path: PathKind) -> None:
    us, them = await LoopbackHost(listens=False).start(), await LoopbackHost().start()
    arrived: list[int] = []
    everything = asyncio.Event()

    def on_frame(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        assert isinstance(message, StatusRequest)
        arrived.append(message.request)
        if len(arrived) == 60:
            everything.set()

    def pool_of(host: LoopbackHost) -> LinkPool:
        network = RoutedNetwork(WebSocketNetwork(host.identity), host.network)
        return LinkPool(network, host.peer, on_frame=on_frame, on_closed=lambda peer, error: None)

    ours, theirs = pool_of(us), pool_of(them)
    try:
        direct = await theirs.listen("127.0.0.1:0")
        await theirs.listen(f"/p2p/{them.peer}")
        await ours.connect(them.peer, [direct if path is PathKind.DIRECT else str(them.address)])
        assert ours.path(them.peer) is path
        await ours.connect(them.peer, [direct])  # remembered, in case it is needed
        for number in range(60):
            if number == 20:
                await us.die()
            ours.send(them.peer, StatusRequest(number))
        async with asyncio.timeout(PATIENCE_S):
            await everything.wait()
        assert arrived == list(range(60))
        assert ours.path(them.peer) is PathKind.DIRECT
        assert ours.counters["resumed"] == (0 if path is PathKind.DIRECT else 1)
    finally:
        for pool in (ours, theirs):
            await pool.aclose()
        for host in (us, them):
            await host.aclose()
