"""Relays with real hosts on loopback: who cannot be dialled is reached through another, and goes on when that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg

import p2p.libp2p_adapter.node as node_module
from fusion_node.errors import FusionError, PeerError, PeerUnreachable
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import RelayCounts, RelayLimits
from p2p.libp2p_adapter.circuits import HOP
from p2p.libp2p_adapter.connections import stream_on
from p2p.libp2p_adapter.relay import Relay
from p2p.links import LinkPool
from p2p.messages import AnyMessage, StatusReply, StatusRequest
from p2p.records import PROTOCOL_VERSION, NodeRecord
from p2p.relays import Relays
from p2p.seam import Link, Listener, Network, OnLink, PathKind
from tests.libp2p_hosts import LoopbackHost

PATIENCE_S = 20.0
"""For what happens in milliseconds, on a machine that does much else."""


class SpyNetwork:
    """Remembers the links that were dialled and accepted."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.links: list[Link] = []
        self.path_of = network.path_of

    @property
    def refused(self) -> Mapping[str, int]:
        return self._network.refused

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        self.links.append(await self._network.dial(address, expect=expect, timeout_s=timeout_s))
        return self.links[-1]

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        async def remember(link: Link) -> None:
            self.links.append(link)
            await on_link(link)

        return await self._network.listen(address, remember)


class Peer:
    """A host with a pool that answers every StatusRequest."""

    def __init__(self, host: LoopbackHost) -> None:
        self.host = host
        self.network = SpyNetwork(host.network)
        self.lost: asyncio.Queue[FusionError] = asyncio.Queue()
        self.answers: asyncio.Queue[int] = asyncio.Queue()
        self.pool = LinkPool(self.network, host.peer, on_frame=self._on_frame, on_closed=self._on_closed)

    @property
    def id(self) -> PeerId:
        return self.host.peer

    async def ask(self, other: PeerId, number: int) -> None:
        self.pool.send(other, StatusRequest(number))
        async with asyncio.timeout(PATIENCE_S):
            assert await self.answers.get() == number

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        match message:
            case StatusRequest(request=number):
                self.pool.send(peer, StatusReply(number, b"", {}))
            case StatusReply(request=number):
                self.answers.put_nowait(number)

    def _on_closed(self, peer: PeerId, error: FusionError) -> None:
        self.lost.put_nowait(error)


Start = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts peers, and stops them all at the end."""
    async with AsyncExitStack() as stack:

        async def start_peer(*, listens: bool = False, relay: RelayLimits | None = None) -> Peer:
            host = LoopbackHost(listens=listens, relay=relay)
            await host.start()
            stack.push_async_callback(host.aclose)
            peer = Peer(host)
            stack.push_async_callback(peer.pool.aclose)
            await peer.pool.listen(f"/p2p/{host.peer}")
            return peer

        yield start_peer


def through(relay: Peer, target: Peer) -> str:
    address = relay.host.address
    return str(PeerAddress.of(address.host, address.port, target.id, via=relay.id))


async def reserve(target: Peer, relay: Peer) -> float:
    return await target.host.call(lambda node: node.reserve(relay.host.address))


async def test_a_peer_that_cannot_be_dialled_is_reached_through_a_relay(start: Start) -> None:
    relay, hidden, user = await start(listens=True, relay=RelayLimits()), await start(), await start()
    assert await reserve(hidden, relay) > 60
    await user.pool.connect(hidden.id, [through(relay, hidden)], timeout_s=PATIENCE_S)
    await user.ask(hidden.id, 1)
    assert [link.path for link in user.network.links + hidden.network.links] == [PathKind.RELAYED] * 2
    # The relay is not a party to it: it has no link, and what it counts is sealed.
    assert relay.network.links == []
    counts = await relay.host.call(lambda node: node.relay_counts())
    assert counts is not None
    assert counts.num_circuits == counts.num_reservations == 1
    assert counts.carried_bytes > 0


async def test_a_peer_without_reservation_and_a_node_that_is_no_relay_lead_nowhere(start: Start) -> None:
    relay, hidden, user = await start(listens=True, relay=RelayLimits()), await start(), await start()
    with pytest.raises(PeerUnreachable, match="no reservation"):
        await user.pool.connect(hidden.id, [through(relay, hidden)], timeout_s=PATIENCE_S)
    node = await start(listens=True)
    with pytest.raises(FusionError):
        await reserve(hidden, node)


async def test_a_node_that_has_dialled_is_reached_on_that_connection(start: Start) -> None:
    """Outbound-only nodes need no relay towards those whom they can dial themselves."""
    node, hidden = await start(listens=True), await start()
    await hidden.pool.connect(node.id, [str(node.host.address)], timeout_s=PATIENCE_S)
    await hidden.ask(node.id, 1)
    await node.ask(hidden.id, 2)  # on the link that it has dialled
    other = await node.host.network.dial(f"/p2p/{hidden.id}", expect=hidden.id, timeout_s=PATIENCE_S)
    assert other.path is PathKind.STREAM
    await other.aclose()


async def test_two_circuits_to_one_peer_end_separately(start: Start) -> None:
    relay, hidden = await start(listens=True, relay=RelayLimits()), await start()
    users = [await start() for _ in range(2)]
    await reserve(hidden, relay)
    for user in users:
        await user.pool.connect(hidden.id, [through(relay, hidden)], timeout_s=PATIENCE_S)
        await user.ask(hidden.id, 1)
    await users[0].host.aclose()
    async with asyncio.timeout(PATIENCE_S):
        await hidden.lost.get()
    assert (await _counts(relay)).num_circuits == 1
    await users[1].ask(hidden.id, 2)


async def test_a_reservation_in_the_name_of_another_is_refused(start: Start) -> None:
    relay, hidden, liar = await start(listens=True, relay=RelayLimits()), await start(), await start()

    async def lie(node: Any) -> int:
        their_id = ID.from_base58(relay.id)
        connection = await node._dialer.connection_for(their_id, relay.host.address)
        stream = await stream_on(node._host, connection, HOP)
        request = HopMessage(type=HopMessage.RESERVE)
        request.peer.id = ID.from_base58(hidden.id).to_bytes()
        await write_delimited_msg(stream, request)
        return int((await read_delimited_msg(stream, HopMessage)).status)

    assert await liar.host.call(lie) == StatusCode.PERMISSION_DENIED
    assert (await _counts(relay)).num_reservations == 0


async def test_a_relay_keeps_to_its_numbers(start: Start) -> None:
    limits = RelayLimits(max_reservations_per_host=2, max_circuits_per_peer=1)
    relay = await start(listens=True, relay=limits)
    hidden = [await start() for _ in range(3)]
    for peer in hidden[:2]:
        await reserve(peer, relay)
    with pytest.raises(PeerUnreachable, match="reservation refused"):
        await reserve(hidden[2], relay)
    await reserve(hidden[0], relay)  # a renewal is no further one
    users = [await start() for _ in range(2)]
    await users[0].pool.connect(hidden[0].id, [through(relay, hidden[0])], timeout_s=PATIENCE_S)
    with pytest.raises(PeerUnreachable, match="resource limit exceeded"):
        await users[1].pool.connect(hidden[0].id, [through(relay, hidden[0])], timeout_s=PATIENCE_S)


async def test_a_circuit_that_has_carried_its_bytes_ends_and_another_is_made(start: Start) -> None:
    relay = await start(listens=True, relay=RelayLimits(circuit_bytes=64 * 1024))
    hidden, user = await start(), await start()
    await reserve(hidden, relay)
    addresses = [through(relay, hidden)]
    number = 0
    async with asyncio.timeout(PATIENCE_S):
        while len({id(link) for link in user.network.links}) < 3:
            number += 1
            with contextlib.suppress(PeerError):
                await user.pool.connect(hidden.id, addresses, timeout_s=PATIENCE_S)
                user.pool.send(hidden.id, StatusRequest(number))
            await asyncio.sleep(0)


async def test_when_a_relay_dies_another_is_taken(start: Start) -> None:
    relays = [await start(listens=True, relay=RelayLimits()) for _ in range(3)]
    hidden, user = await start(), await start()
    changed = asyncio.Event()
    keeper = Relays(
        hidden.id, hidden.host, records=lambda: [record_of(relay) for relay in relays], on_change=changed.set
    )
    try:
        keeper._core.num_relays = 2
        keeper.want(True)
        async with asyncio.timeout(PATIENCE_S):
            while len(keeper.held) < 2:
                await changed.wait()
                changed.clear()
        await user.pool.connect(hidden.id, list(map(str, keeper.circuit_addresses())), timeout_s=PATIENCE_S)
        await user.ask(hidden.id, 1)
        first = next(relay for relay in relays if relay.id == keeper.circuit_addresses()[0].via)
        await first.host.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while first.id in keeper.held or len(keeper.held) < 2:
                await changed.wait()
                changed.clear()
        await user.pool.connect(hidden.id, list(map(str, keeper.circuit_addresses())), timeout_s=PATIENCE_S)
        await user.ask(hidden.id, 2)
    finally:
        await keeper.aclose()


async def test_a_relay_that_swallows_everything_is_left_for_another(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(node_module, "Relay", SwallowingRelay)
        hostile = await start(listens=True, relay=RelayLimits())
    honest = await start(listens=True, relay=RelayLimits())
    hidden, user = await start(), await start()
    for relay in (hostile, honest):
        await reserve(hidden, relay)
    addresses = [through(hostile, hidden), through(honest, hidden)]
    await user.pool.connect(hidden.id, addresses, timeout_s=PATIENCE_S)
    await user.ask(hidden.id, 1)
    SwallowingRelay.is_swallowing = True
    try:
        began = asyncio.get_running_loop().time()
        for number in range(2, 1000):
            with contextlib.suppress(PeerError, TimeoutError):
                await user.pool.connect(hidden.id, addresses)
                user.pool.send(hidden.id, StatusRequest(number))
                async with asyncio.timeout(1.0):
                    while await user.answers.get() != number:
                        pass
                break
        assert asyncio.get_running_loop().time() - began < 2 * PATIENCE_S
    finally:
        SwallowingRelay.is_swallowing = False
    assert len(user.network.links) >= 2


class SwallowingRelay(Relay):
    """Agrees to everything, and carries nothing while told so."""

    is_swallowing = False

    async def _carry(self, circuit: Any, source: Any, sink: Any) -> None:
        class Swallow:
            async def write(self, data: bytes) -> None:
                if not SwallowingRelay.is_swallowing:
                    await sink.write(data)

        await super()._carry(circuit, source, Swallow())


async def _counts(relay: Peer) -> RelayCounts:
    counts = await relay.host.call(lambda node: node.relay_counts())
    assert counts is not None
    return counts


def record_of(relay: Peer) -> NodeRecord:
    return NodeRecord(
        version=PROTOCOL_VERSION,
        peer=relay.id,
        sequence=1,
        issued_at=0.0,
        expires_at=60.0,
        data_addresses=(),
        libp2p_addresses=(str(relay.host.address),),
        device="",
        memory_free_bytes=0,
        shards=(),
        num_sessions=0,
        software="",
        is_relay=True,
    )
