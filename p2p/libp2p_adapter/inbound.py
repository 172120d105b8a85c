"""Connections and streams that come in: who may have how many, and that what they hold is given back.

The library keeps the slot of every connection that ever came in until the host stops, though it means to free it when
the connection ends: after MAX_CONNECTIONS of them, nobody could connect any more (trap 25). Of streams, one peer may
take all there are (trap 39).
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import multiaddr
import trio
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID

from fusion_node.errors import PeerError
from p2p.libp2p_adapter.messages import translated
from p2p.libp2p_adapter.muxing import MAX_INCOMING_STREAMS
from p2p.prefixes import ip_of
from p2p.seam import Gate

log = logging.getLogger(__name__)


class Inbound:
    """Takes the place of the library's handler of accepted connections.

    Args:
        max_connections: that have come in and are open.
    """

    def __init__(self, host: Any, gate: Gate, *, max_connections: int) -> None:
        self._swarm = host.get_network()
        self._gate = gate
        self._max_connections = max_connections
        self._num_open = 0
        self._swarm._handle_inbound_connection = self._handle

    async def _handle(self, stream: Any, listener: multiaddr.Multiaddr) -> None:
        address = stream.get_remote_address()
        # None when it is gone already, while it was waiting to be accepted.
        if address is None or self._num_open >= self._max_connections or self._gate.refuse_host(address[0]) is not None:
            await trio.aclose_forcefully(stream.stream)
            return
        host = str(ip_of(address[0]) or address[0])
        self._num_open += 1
        self._gate.connected(host)
        try:
            muxed = await self._upgrade(stream, listener, host)
            if muxed is not None:
                await muxed.event_closed.wait()
        finally:
            self._num_open -= 1
            self._gate.disconnected(host)
            # Also when the host ends in the middle of it: cancelled, the library closes streams before the socket.
            await trio.aclose_forcefully(stream.stream)

    async def _upgrade(self, stream: Any, listener: multiaddr.Multiaddr, host: str) -> Any:
        """Proves the identity; None when that fails."""
        try:
            with suppress(PeerError), translated(host):
                return await self._swarm.upgrade_inbound_raw_conn(RawConnection(stream, False), listener)
        finally:
            self._gate.proven(host)
        return None


class BoundedConnection(SwarmConn):  # type: ignore[misc]
    """Hands on a peer's streams, MAX_INCOMING_STREAMS over all its connections at once, and resets the others.

    Also counted are those that the peer has reset and whose handlers do not know it yet.
    """

    _num_handled_of: ClassVar[WeakKeyDictionary[Any, Counter[ID]]] = WeakKeyDictionary()
    """By swarm."""

    async def _handle_muxed_stream(self, muxed_stream: Any) -> None:
        their_id = self.muxed_conn.peer_id
        num_handled_of = self._num_handled_of.setdefault(self.swarm, Counter())
        if num_handled_of[their_id] >= MAX_INCOMING_STREAMS:
            with suppress(PeerError), translated(their_id.to_base58()):
                await muxed_stream.reset()
            return
        num_handled_of[their_id] += 1
        try:
            await super()._handle_muxed_stream(muxed_stream)
        finally:
            num_handled_of[their_id] -= 1
            if not num_handled_of[their_id]:
                del num_handled_of[their_id]
