"""What the adapter bounds in the library's DHT: its routing table, its lists of providers, its streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import multiaddr
import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.kad_dht.routing_table import RoutingTable
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from fusion_node.types import PeerId
from p2p.control import SENDER, FoundPeer
from p2p.kademlia_core import MAX_PER_TABLE
from p2p.libp2p_adapter import kademlia
from p2p.libp2p_adapter.hardening import MAX_PROVIDERS_PER_KEY
from p2p.seam import OpenGate


def peer_id(number: int) -> ID:
    return ID.from_pubkey(create_new_key_pair(number.to_bytes(32, "big")).public_key)


class Host:
    """As much of the library's host as the bounds look at: who is connected, from where."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.hosts: dict[Any, str] = {}

    def get_id(self) -> Any:
        return self.own

    def get_network(self) -> Host:
        return self

    def get_peerstore(self) -> Host:
        return self

    def get_protocols(self, _: Any) -> list[str]:
        return []

    def get_connections(self, peer: Any) -> list[Any]:
        if peer not in self.hosts:
            return []
        muxed = SimpleNamespace(get_remote_address=lambda: (self.hosts[peer], 4001))
        return [SimpleNamespace(muxed_conn=muxed)]


def claimed(number: int) -> PeerInfo:
    """Whoever it is, wherever it is: it claims an address in a network of its own."""
    address = multiaddr.Multiaddr(f"/ip4/{10 + number % 200}.{number // 200}.1.1/tcp/4001")
    return PeerInfo(peer_id(number), [address])


def test_flood_from_one_network_leaves_the_routing_table_to_others() -> None:
    async def work() -> None:
        host = Host(peer_id(0))
        table = RoutingTable(host.own, host, max_peers_per_subnet=0)
        kademlia._bound_table(host, table)
        for number in range(1, 200):
            info = claimed(number)
            host.hosts[info.peer_id] = f"8.8.{number % 256}.{number % 250}"
            await table.add_peer(info)
        assert 0 < table.size() <= MAX_PER_TABLE
        for number in range(200, 210):
            info = claimed(number)
            host.hosts[info.peer_id] = f"9.{number}.1.1"
            assert await table.add_peer(info)

    trio.run(work)


def test_only_who_is_connected_enters_the_routing_table() -> None:
    async def work() -> None:
        host = Host(peer_id(0))
        table = RoutingTable(host.own, host, max_peers_per_subnet=0)
        kademlia._bound_table(host, table)
        info = claimed(1)
        assert not await table.add_peer(info)
        host.hosts[info.peer_id] = "8.8.8.8"
        assert await table.add_peer(info)
        del host.hosts[info.peer_id]
        assert await table.add_peer(info)  # seen again, and it stays
        assert table.size() == 1

    trio.run(work)


def test_neighbours_on_a_lan_all_enter_the_routing_table() -> None:
    async def work() -> None:
        host = Host(peer_id(0))
        table = RoutingTable(host.own, host, max_peers_per_subnet=0)
        kademlia._bound_table(host, table)
        for number in range(1, 60):
            info = claimed(number)
            host.hosts[info.peer_id] = f"192.168.1.{number}"
            assert await table.add_peer(info)

    trio.run(work)


def test_flood_of_providers_from_one_network_displaces_itself() -> None:
    host = Host(peer_id(0))
    host.get_addrs = list  # type: ignore[attr-defined]
    store = ProviderStore(host)
    kademlia._share_providers(host, store)
    key = b"key"

    def add(number: int, address: str) -> str:
        info = claimed(number)
        host.hosts[info.peer_id] = address
        store.add_provider(key, info)
        return str(info.peer_id)

    early = add(1, "9.1.1.1")
    for number in range(2, 2 + MAX_PROVIDERS_PER_KEY + 50):
        add(number, f"8.8.{number % 256}.1")
    late = [add(number, f"9.{number - 900}.1.1") for number in range(1000, 1040)]
    held = store.providers[key]
    assert len(held) == MAX_PROVIDERS_PER_KEY
    assert early in held
    assert all(each in held for each in late)


def test_providers_are_read_in_turn_and_once_while_others_do_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = num_turns = 0
    address = multiaddr.Multiaddr

    def count(data: bytes) -> Any:
        nonlocal num_read
        num_read += 1
        return address(data)

    def named(numbers: range) -> list[tuple[bytes, list[bytes]]]:
        return [
            (
                peer_id(number).to_bytes(),
                [address(f"/ip4/9.9.{number % 250}.1/tcp/{port}").to_bytes() for port in range(1, 9)],
            )
            for number in numbers
        ]

    honest, liar, other_liar = named(range(1, 6)), named(range(1000, 1200)), named(range(2000, 2200))
    nonsense = [(b"x" * 38, [b"y"]), (peer_id(9).to_bytes(), [b"", b"y" * 100, b"z" * 1000])]

    async def work() -> list[FoundPeer]:
        async def others() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            found = await kademlia.found_in_turn([liar, other_liar, liar, nonsense, honest, honest])
            nursery.cancel_scope.cancel()
        return found

    monkeypatch.setattr(kademlia.multiaddr, "Multiaddr", count)
    found = {each.peer: each.addresses for each in trio.run(work)}
    assert len(found) == kademlia.MAX_FOUND_PROVIDERS - 1  # and the one without an address
    assert all(len(found[PeerId(peer_id(number).to_base58())]) == 8 for number in range(1, 6))
    assert num_read <= 8 * kademlia.MAX_FOUND_PROVIDERS
    assert num_turns >= num_read - 2  # which of the two is first in a turn is up to chance


class Stream:
    def __init__(self, peer: Any) -> None:
        self.muxed_conn = SimpleNamespace(peer_id=peer)
        self.is_reset = False

    async def reset(self) -> None:
        self.is_reset = True


def test_silent_streams_of_one_peer_neither_last_nor_lock_others_out() -> None:
    num_served = 0

    class Dht:
        async def handle_stream(self, stream: Stream) -> None:
            nonlocal num_served
            num_served += 1
            await trio.sleep_forever()

    async def work() -> None:
        served = kademlia._Served(Dht(), OpenGate())
        streams = [Stream(peer_id(1)) for _ in range(20)] + [Stream(peer_id(2))]
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(served.serve, stream)
        assert num_served == kademlia.MAX_STREAMS_PER_PEER + 1
        assert all(stream.is_reset for stream in streams)
        again = Stream(peer_id(1))
        await served.serve(again)
        assert num_served == kademlia.MAX_STREAMS_PER_PEER + 2

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_validator_learns_who_brings_a_value() -> None:
    senders: list[PeerId | None] = []

    class Dht:
        async def handle_stream(self, stream: Stream) -> None:
            senders.append(SENDER.get())

    async def work() -> None:
        served = kademlia._Served(Dht(), OpenGate())
        for number in (1, 2):
            await served.serve(Stream(peer_id(number)))
        assert SENDER.get() is None

    trio.run(work)
    assert senders == [PeerId(peer_id(number).to_base58()) for number in (1, 2)]
