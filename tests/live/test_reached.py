"""Nonces at the control plane's listener: what arrives, and that nothing else comes of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import psutil
import pytest

from fusion_node.errors import PeerError
from p2p.addresses import PeerAddress
from p2p.bridge import Bridge
from p2p.control import ControlNode, HostConfig, HostHooks
from p2p.identity import Identity
from p2p.libp2p_adapter import Libp2pRunner
from p2p.reachability_verdict import Outcome
from p2p.swarm_key import SwarmKey

pytestmark = pytest.mark.live

NONCE = bytes(range(16))
LIMIT_S = 20.0


class Host:
    """One libp2p host, and what was brought to it."""

    def __init__(self, *, listen: bool = True, swarm_key: SwarmKey | None = None, host: str = "127.0.0.1") -> None:
        self.host = host
        self.identity = Identity.generate()
        self.reached: list[tuple[bytes, str]] = []
        self.connections: list[bool] = []
        config = HostConfig(
            self.identity.seed, ((host, 0),) if listen else (), serve=False, protocols={}, swarm_key=swarm_key
        )
        hooks = HostHooks(
            sequence_of=lambda key, value: 0,
            on_request=lambda protocol, peer, request, answer: answer(None),
            on_connection=lambda peer, is_open: self.connections.append(is_open),
            on_reached=lambda nonce, local_host: self.reached.append((nonce, local_host)),
        )
        self.bridge: Bridge[ControlNode] = Bridge(lambda: Libp2pRunner(config, hooks))

    async def port(self) -> int:
        return (await self.bridge.call(lambda node: node.listening()))[0][1]

    async def bring(self, port: int, nonce: bytes = NONCE) -> Outcome:
        return await self.bridge.call(lambda node: node.bring_nonce("127.0.0.1", port, nonce))

    async def connect(self, other: Host) -> None:
        address = PeerAddress.of(other.host, await other.port(), other.identity.peer_id)
        await self.bridge.call(lambda node: node.connect(other.identity.peer_id, [address]))


@asynccontextmanager
async def running(*hosts: Host) -> AsyncIterator[Sequence[Host]]:
    try:
        for host in hosts:
            await host.bridge.start()
        async with asyncio.timeout(LIMIT_S):
            yield hosts
    finally:
        for host in hosts:
            await host.bridge.aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # of another thread
        await asyncio.sleep(0.01)


def num_sockets(port: int) -> int:
    """Of this process, with the listener's port at this end, but for the listener itself."""
    found = psutil.Process().net_connections("tcp")
    return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)


async def test_nonce_arrives_and_no_connection_comes_of_it() -> None:
    async with running(Host(), Host(listen=False)) as (node, user):
        port = await node.port()
        assert await user.bring(port) is Outcome.DELIVERED
        assert node.reached == [(NONCE, "127.0.0.1")]
        assert node.connections == user.connections == []
        await until(lambda: num_sockets(port) == 0)


async def test_fresh_connection_is_made_beside_the_one_that_there_is() -> None:
    async with running(Host(), Host()) as (node, user):
        await user.connect(node)
        (ours,) = await user.bridge.call(lambda host: host.ends_of(node.identity.peer_id))
        await until(lambda: node.connections == [True])
        (theirs,) = await node.bridge.call(lambda host: host.ends_of(user.identity.peer_id))
        assert (ours.local_port, ours.remote_port) == (theirs.remote_port, theirs.local_port)
        assert ours.local_port != await user.port()  # it does not dial from its listener's port
        assert (ours.is_outgoing, theirs.is_outgoing) == (True, False)
        assert await user.bring(await node.port()) is Outcome.DELIVERED
        assert node.reached == [(NONCE, "127.0.0.1")]
        assert node.connections == [True]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6_is_as_good_as_ipv4() -> None:
    async with running(Host(host="::1"), Host(listen=False)) as (node, user):
        await user.connect(node)
        await until(lambda: node.connections == [True])
        (theirs,) = await node.bridge.call(lambda host: host.ends_of(user.identity.peer_id))
        assert (theirs.local_host, theirs.remote_host) == ("::1", "::1")
        port = await node.port()
        assert await user.bridge.call(lambda host: host.bring_nonce("::1", port, NONCE)) is Outcome.DELIVERED
        assert node.reached == [(NONCE, "::1")]


async def test_hundreds_of_them_leave_room_for_connections() -> None:
    """More than MAX_CONNECTIONS: neither the slots of the library nor the sockets may be lost with each."""
    async with running(Host(), Host(listen=False)) as (node, user):
        port = await node.port()
        for _ in range(30):
            outcomes = await asyncio.gather(*(user.bring(port, os.urandom(16)) for _ in range(20)))
            assert set(outcomes) == {Outcome.DELIVERED}
        assert len(set(node.reached)) == 600
        await user.connect(node)
        await until(lambda: num_sockets(port) == 1)


async def test_probe_from_the_listeners_port_is_told_that_port() -> None:
    async with running(Host(), Host()) as (node, other):
        ours, theirs = await node.port(), await other.port()
        seen = await node.bridge.call(lambda host: host.probe("127.0.0.1", theirs, ("127.0.0.1", ours)))
        assert seen is not None
        assert (seen.local_port, seen.seen_host, seen.seen_port) == (ours, "127.0.0.1", ours)


async def test_private_swarm_takes_nonces_from_its_members_only() -> None:
    key = SwarmKey.generate()
    async with running(Host(swarm_key=key), Host(swarm_key=key), Host()) as (node, member, stranger):
        port = await node.port()
        assert await member.bring(port) is Outcome.DELIVERED
        assert await stranger.bring(port, bytes(16)) is Outcome.BROKEN
        assert node.reached == [(NONCE, "127.0.0.1")]


async def test_who_is_there_and_speaks_something_else_is_broken_and_nobody_is_unreachable() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server, running(Host(listen=False)) as (user,):
        assert await user.bring(server.sockets[0].getsockname()[1]) is Outcome.BROKEN
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            assert await user.bring(free.getsockname()[1]) is Outcome.UNREACHABLE


async def test_peer_that_offers_nothing_but_this_is_not_connected() -> None:
    """The pseudo protocol is on a dialler's list too, after Noise: it must never do for an identity."""

    async def offer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def line(text: str) -> bytes:
            return bytes([len(text) + 1]) + text.encode() + b"\n"

        writer.write(line("/multistream/1.0.0"))
        while size := await reader.read(1):
            wanted = (await reader.readexactly(size[0])).decode().strip()
            if wanted != "/multistream/1.0.0":
                is_offered = wanted == "/fusion/reached/1"
                chosen.append(wanted)
                writer.write(line(wanted if is_offered else "na"))
            await writer.drain()
        writer.close()

    chosen: list[str] = []
    server = await asyncio.start_server(offer, "127.0.0.1", 0)
    async with server, running(Host(listen=False)) as (user,):
        somebody = Identity.generate().peer_id
        address = PeerAddress.of("127.0.0.1", server.sockets[0].getsockname()[1], somebody)
        with pytest.raises(PeerError):
            await user.bridge.call(lambda node: node.connect(somebody, [address]))
        assert chosen[-1] == "/fusion/reached/1"
        assert user.connections == []
