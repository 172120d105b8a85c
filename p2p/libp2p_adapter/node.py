"""What calls from outside the thread are made to, composed of what each module does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.abc import INotifee
from libp2p.peer.id import ID

from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import ConnectionEnds, FoundPeer, HostConfig, HostHooks
from p2p.libp2p_adapter.dialing import Dialer
from p2p.libp2p_adapter.kademlia import Dht
from p2p.libp2p_adapter.messages import translated
from p2p.libp2p_adapter.multiaddrs import multiaddr_of, parts_of
from p2p.libp2p_adapter.reached import bring_nonce, ends_of_connection, probe
from p2p.libp2p_adapter.requests import Requests
from p2p.reachability_verdict import Observation, Outcome


class Libp2pNode:
    """The running host. See p2p.control.ControlNode; every method runs under trio."""

    def __init__(self, host: Any, dht: Any, config: HostConfig, hooks: HostHooks) -> None:
        self._host = host
        self._dialer = Dialer(host)
        self._dht = Dht(host, dht, hooks.sequence_of)
        self._requests = Requests(host, config.protocols, hooks.on_request)

    async def listening(self) -> list[tuple[str, int]]:
        return [(host, port) for _, host, port in map(parts_of, self._host.get_transport_addrs())]

    async def connect(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        with translated(peer):
            await self._dialer.dial_now(ID.from_base58(peer), [multiaddr_of(address) for address in addresses])

    async def disconnect(self, peer: PeerId) -> None:
        with translated(peer), trio.move_on_after(1.0):
            await self._host.disconnect(ID.from_base58(peer))

    async def ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        ends = map(ends_of_connection, self._host.get_network().get_connections(ID.from_base58(peer)))
        return [each for each in ends if each is not None]

    async def bring_nonce(self, host: str, port: int, nonce: bytes) -> Outcome:
        return await bring_nonce(self._host.get_network(), host, port, nonce)

    async def probe(self, host: str, port: int, source: tuple[str, int]) -> Observation | None:
        return await probe(self._host.get_network(), host, port, source)

    async def request(self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int) -> bytes:
        return await self._requests.request(peer, protocol, request, limit_bytes=limit_bytes)

    async def join_dht(self, peer: PeerId) -> None:
        await self._dht.join(peer)

    async def put_value(self, key: str, value: bytes) -> None:
        await self._dht.put_value(key, value)

    async def get_value(self, key: str) -> bytes | None:
        return await self._dht.get_value(key)

    async def provide(self, key: bytes) -> None:
        await self._dht.provide(key)

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        return await self._dht.find_providers(key)


class Connections(INotifee):  # type: ignore[misc]
    """Tells the owner of each peer's first connection and last disconnection."""

    def __init__(self, on_connection: Callable[[PeerId, bool], None]) -> None:
        self._on_connection = on_connection

    async def connected(self, network: Any, conn: Any) -> None:
        self._on_connection(PeerId(conn.muxed_conn.peer_id.to_base58()), True)

    async def disconnected(self, network: Any, conn: Any) -> None:
        their_id = conn.muxed_conn.peer_id
        # Trap 13: when the other side closes first, it forgets the connection and leaves the socket open.
        await conn.muxed_conn.secured_conn.close()
        if not [other for other in network.get_connections(their_id) if other is not conn]:
            self._on_connection(PeerId(their_id.to_base58()), False)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...
