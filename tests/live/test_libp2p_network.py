"""Links over libp2p streams: the conformance suite of p2p.conformance, and what only this network has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fusion_node.errors import PeerClosed
from p2p.conformance import CHECKS, Check
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Link, Listener, Network, OnLink
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
