"""What calls from outside the thread are made to, composed of what each module does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.abc import INotifee
from libp2p.peer.id import ID

from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import (
    ConnectionEnds,
    FoundPeer,
    HolePunching,
    HostConfig,
    HostHooks,
    OpenedStream,
    RelayCounts,
)
from p2p.libp2p_adapter.circuits import Circuits
from p2p.libp2p_adapter.connections import best_first, close_quietly, direct, path_of, refuses, relay_of
from p2p.libp2p_adapter.dialing import Dialer
from p2p.libp2p_adapter.gossip import PROTOCOL as GOSSIP_PROTOCOL
from p2p.libp2p_adapter.gossip import Gossip
from p2p.libp2p_adapter.hole_punching import HolePuncher
from p2p.libp2p_adapter.kademlia import Dht
from p2p.libp2p_adapter.messages import translated
from p2p.libp2p_adapter.multiaddrs import multiaddr_of, parts_of
from p2p.libp2p_adapter.reached import bring_nonce, ends_of_connection, probe
from p2p.libp2p_adapter.relay import Relay
from p2p.libp2p_adapter.requests import Requests
from p2p.libp2p_adapter.streams import PROTOCOL as DATA_PROTOCOL
from p2p.libp2p_adapter.streams import Streams
from p2p.reachability_verdict import Observation, Outcome
from p2p.seam import Gate, PathKind
from p2p.stream_pipe import StreamPipe

RELAYED_GRACE_S = 30.0
"""From a direct connection to the end of the relayed ones (libp2p specs, relay/DCUtR.md: a grace period)."""


class Libp2pNode:
    """The running host. See p2p.control.ControlNode; every method runs under trio."""

    def __init__(self, host: Any, dht: Any, config: HostConfig, hooks: HostHooks, tasks: trio.Nursery) -> None:
        self._host = host
        self._tasks = tasks
        self._relay = None if config.relay is None else Relay(host, config.relay, hooks.gate)
        self._holes = HolePuncher(host, tasks)
        self._circuits = Circuits(host, hooks.gate, on_relay_lost=hooks.on_relay_lost, on_circuit=self._holes.start)
        self._gate = hooks.gate
        self._dialer = Dialer(host, self._circuits, hooks.gate)
        self._dht = Dht(host, dht, hooks.sequence_of)
        self._requests = Requests(host, config.protocols, hooks.on_request, hooks.gate)
        self._streams = Streams(host, self._dialer, tasks, hooks.on_stream)
        self._streams.accept(config.accepts_streams)
        self.topic: Gossip | None = None

    def became_direct(self, their_id: ID) -> None:
        """Told when there is a direct connection with a peer besides relayed ones."""
        self._tasks.start_soon(self._retire_relayed, their_id)

    async def _retire_relayed(self, their_id: ID) -> None:
        """Closes relayed connections that a direct one has replaced, so that they take no relay's time."""
        while True:
            await trio.sleep(RELAYED_GRACE_S)
            connections = self._host.get_network().get_connections(their_id)
            relayed = [each for each in connections if relay_of(each) is not None]
            if not relayed or len(relayed) == len(connections):
                return
            for connection in relayed:
                # A link moves over when it finds time to.
                if not any(stream.get_protocol() == DATA_PROTOCOL for stream in connection.get_streams()):
                    await close_quietly(connection)

    def connection_gone(self, their_id: ID) -> None:
        """Told of every connection that has ended."""
        self._circuits.disconnected(their_id)
        if self._relay is not None:
            self._relay.disconnected(their_id)

    async def listening(self) -> list[tuple[str, int]]:
        return [(host, port) for _, host, port in map(parts_of, self._host.get_transport_addrs())]

    async def connect(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        with translated(peer):
            await self._dialer.dial_now(ID.from_base58(peer), [multiaddr_of(address) for address in addresses])

    async def disconnect(self, peer: PeerId, *, if_spare: bool = False) -> bool:
        their_id = ID.from_base58(peer)
        if if_spare and self._is_in_use(their_id):
            return False
        with translated(peer), trio.move_on_after(1.0):
            await self._host.disconnect(their_id)
        return not self._host.get_network().get_connections(their_id)

    def _is_in_use(self, their_id: ID) -> bool:
        streams = [
            stream
            for connection in self._host.get_network().get_connections(their_id)
            for stream in connection.get_streams()
            if stream.get_protocol() != GOSSIP_PROTOCOL  # one is open with everybody
        ]
        return bool(streams) or (self._relay is not None and self._relay.leads_to(their_id))

    async def drop_refused(self) -> None:
        refused = [each for each in self._host.get_network().get_connections() if refuses(self._gate, each)]
        async with trio.open_nursery() as nursery:
            for connection in refused:
                nursery.start_soon(close_quietly, connection)

    async def ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        ends = map(ends_of_connection, self._host.get_network().get_connections(ID.from_base58(peer)))
        return [each for each in ends if each is not None]

    async def bring_nonce(self, host: str, port: int, nonce: bytes) -> Outcome:
        return await bring_nonce(self._host.get_network(), host, port, nonce)

    async def probe(self, host: str, port: int, source: tuple[str, int]) -> Observation | None:
        return await probe(self._host.get_network(), host, port, source)

    async def open_stream(self, peer: PeerId, address: PeerAddress | None, pipe: StreamPipe) -> OpenedStream:
        return await self._streams.open(peer, address, pipe)

    async def accept_streams(self, accepting: bool) -> None:
        self._streams.accept(accepting)

    async def reserve(self, relay: PeerAddress) -> float:
        relay_id = ID.from_base58(relay.peer)
        with translated(relay.peer):
            await self._dialer.connection_for(relay_id, relay)
            return await self._circuits.reserve(relay_id)

    async def release(self, relay: PeerId) -> None:
        self._circuits.release(ID.from_base58(relay))

    async def round_trips(self) -> dict[PeerId, float]:
        # Yamux pings every 30 s, and for the first time after half a second.
        return {
            PeerId(each.muxed_conn.peer_id.to_base58()): each.muxed_conn.rtt()
            for each in direct(self._host.get_network().get_connections())
            if each.muxed_conn.rtt() > 0
        }

    async def relay_counts(self) -> RelayCounts | None:
        return None if self._relay is None else self._relay.counts

    async def hole_punching(self) -> dict[PeerId, HolePunching]:
        return dict(self._holes.results)

    async def request(self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int) -> bytes:
        return await self._requests.request(peer, protocol, request, limit_bytes=limit_bytes)

    async def join_dht(self, peer: PeerId) -> None:
        await self._dht.join(peer)

    async def put_value(self, key: str, value: bytes) -> None:
        await self._dht.put_value(key, value)

    async def get_value(self, key: str) -> bytes | None:
        return await self._dht.get_value(key)

    async def gossip(self, record: bytes) -> None:
        if self.topic is not None:
            with translated("the topic"):
                await self.topic.publish(record)

    async def provide(self, key: bytes) -> None:
        await self._dht.provide(key)

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        return await self._dht.find_providers(key)


class Connections(INotifee):  # type: ignore[misc]
    """Tells the owner of each peer's first connection and last disconnection, and over what the best one runs.

    Attributes:
        on_gone: called with the peer of every connection that has ended.
        on_direct: called with a peer to which there is a direct connection now besides relayed ones.
        on_refused: called with every connection that the gate refuses, of which nobody else is told.
    """

    def __init__(
        self,
        on_connection: Callable[[PeerId, bool], None],
        on_path: Callable[[PeerId, PathKind], None],
        gate: Gate,
    ) -> None:
        self._gate = gate
        self.on_refused: Callable[[Any], None] = lambda connection: None
        self._on_connection = on_connection
        self._on_path = on_path
        self._paths: dict[ID, PathKind] = {}
        self.on_gone: Callable[[ID], None] = lambda their_id: None
        self.on_direct: Callable[[ID], None] = lambda their_id: None

    async def connected(self, network: Any, conn: Any) -> None:
        their_id = conn.muxed_conn.peer_id
        if refuses(self._gate, conn):
            self.on_refused(conn)
            return
        self._on_connection(PeerId(their_id.to_base58()), True)
        self._look(their_id, network.get_connections(their_id))

    async def disconnected(self, network: Any, conn: Any) -> None:
        their_id = conn.muxed_conn.peer_id
        # Trap 13: when the other side closes first, it forgets the connection and leaves the socket open.
        await conn.muxed_conn.secured_conn.close()
        others = [other for other in network.get_connections(their_id) if other is not conn]
        self._look(their_id, others)
        if not others:
            self._on_connection(PeerId(their_id.to_base58()), False)
        self.on_gone(their_id)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...

    def _look(self, their_id: ID, connections: Sequence[Any]) -> None:
        before = self._paths.pop(their_id, None)
        usable = best_first(connections)
        if usable:
            self._paths[their_id] = now = path_of(usable[0])
            if before is not None and before is not now:
                self._on_path(PeerId(their_id.to_base58()), now)
                if now is PathKind.STREAM and len(usable) > 1:
                    self.on_direct(their_id)
