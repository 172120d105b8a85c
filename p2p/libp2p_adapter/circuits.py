"""Being reached and dialling through relays: the client's half of circuit relay v2.

The library's transport for this prefers whatever circuit it has stored to the one that is asked for, dials the relay by
its first address only, spins when a refresh fails, and marks every connection that comes in as relayed by ourselves
(trap 32). Only its messages and its upgrade of a stream to a connection are used.

A relay is not trusted: inside the circuit is a Noise handshake with the peer itself, as on every connection. It sees
who talks with whom, when, and how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import trio
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamEOF, StreamError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg

from fusion_node.errors import FusionError, PeerUnreachable
from fusion_node.types import PeerId
from p2p.libp2p_adapter.connections import circuit_address, direct, mark_relayed, relay_of, stream_on
from p2p.libp2p_adapter.messages import closing, translated
from p2p.libp2p_adapter.slots import Slots
from p2p.seam import Gate

HOP = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP = TProtocol("/libp2p/circuit/relay/0.2.0/stop")

ASK_TIMEOUT_S = 5.0
"""For a relay's answer to a request for a reservation."""

CONNECT_TIMEOUT_S = 8.0
"""For a relay's answer to a request for a circuit: it asks the peer first, which it gives 5 s."""

STOP_TIMEOUT_S = 5.0

MAX_STOPS_AT_ONCE = 16
MAX_STOPS_PER_PEER = 4
"""Streams on which a relay has not yet said who wants to reach us."""

MAX_ASKED_AT_ONCE = 3
"""Of one relay, by us; more wait. It serves four, and frees their slots after its answers."""

UPGRADE_TIMEOUT_S = 4.0
"""For Noise and yamux through the circuit: four round trips. A relay may have agreed and carry nothing."""

READ_AHEAD_BYTES = 128 * 1024

MIN_TTL_S, MAX_TTL_S = 60.0, 3600.0
"""What is believed of a reservation's end, which the relay gives by its own clock."""


class Circuits:
    """See the head of this file.

    Args:
        on_relay_lost: told when a relay with a reservation of ours has gone.
        on_circuit: told of each relayed connection that somebody has opened to us.
    """

    def __init__(
        self, host: Any, gate: Gate, *, on_relay_lost: Callable[[PeerId], None], on_circuit: Callable[[Any], None]
    ) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._on_relay_lost = on_relay_lost
        self._on_circuit = on_circuit
        self._reserved: set[ID] = set()
        self._slots = Slots(gate, at_once=MAX_STOPS_AT_ONCE, per_peer=MAX_STOPS_PER_PEER)
        self._asking: WeakValueDictionary[ID, trio.CapacityLimiter] = WeakValueDictionary()
        host.set_stream_handler(STOP, self._serve_stop)

    async def reserve(self, relay: ID) -> float:
        """Asks a connected relay to accept connections for us, or to go on doing so.

        Returns:
            For how many seconds it will.

        Raises:
            PeerUnreachable: there is no direct connection with it, or it refuses.
        """
        answer = await self._ask(relay, HopMessage(type=HopMessage.RESERVE), ASK_TIMEOUT_S)
        self._reserved.add(relay)
        return min(max(answer.reservation.expire - time.time(), MIN_TTL_S), MAX_TTL_S)

    def release(self, relay: ID) -> None:
        """Accepts nothing more through this relay. It forgets the reservation when that ends."""
        self._reserved.discard(relay)

    def disconnected(self, their_id: ID) -> None:
        """A connection with this peer is gone."""
        if their_id in self._reserved and not direct(self._swarm.get_connections(their_id)):
            self._reserved.discard(their_id)
            self._on_relay_lost(PeerId(their_id.to_base58()))

    async def dial(self, relay: ID, their_id: ID) -> Any:
        """A new connection with a peer through a connected relay.

        Raises:
            PeerUnreachable: there is no direct connection with the relay, or it refuses, mostly because the peer has
                no reservation there.
            trio.TooSlowError: it agreed, and nothing came through it.
        """
        request = HopMessage(type=HopMessage.CONNECT)
        request.peer.id = their_id.to_bytes()
        async with self._asking_of(relay):
            stream = await self._open(relay)
            try:
                await self._exchange(relay, stream, request, CONNECT_TIMEOUT_S)
            except BaseException:
                await _reset(stream)
                raise
        try:
            raw = _raw(stream, relay, their_id, initiator=True)
            with trio.fail_after(UPGRADE_TIMEOUT_S):
                connection = await self._host.upgrade_outbound_connection(raw, their_id)
        except BaseException:
            await _reset(stream)
            raise
        mark_relayed(connection, relay)
        return connection

    async def _ask(self, relay: ID, request: HopMessage, timeout_s: float) -> HopMessage:
        async with self._asking_of(relay):
            stream = await self._open(relay)
            async with closing(stream):
                return await self._exchange(relay, stream, request, timeout_s)

    def _asking_of(self, relay: ID) -> trio.CapacityLimiter:
        return self._asking.setdefault(relay, trio.CapacityLimiter(MAX_ASKED_AT_ONCE))

    async def _open(self, relay: ID) -> Any:
        connections = direct(self._swarm.get_connections(relay))
        if not connections:
            raise PeerUnreachable(relay.to_base58(), f"there is no direct connection with relay {relay.to_base58()}")
        return await stream_on(self._host, connections[0], HOP)

    async def _exchange(self, relay: ID, stream: Any, request: HopMessage, timeout_s: float) -> HopMessage:
        with trio.fail_after(timeout_s):
            await write_delimited_msg(stream, request)
            answer: HopMessage = await read_delimited_msg(stream, HopMessage)
        if answer.status != StatusCode.OK:
            raise PeerUnreachable(relay.to_base58(), f"relay {relay.to_base58()} refuses: {_name(answer.status)}")
        return answer

    async def _serve_stop(self, stream: Any) -> None:
        """A relay says that somebody wants to reach us. Lasts as long as the connection that it brings."""
        relay = stream.muxed_conn.peer_id
        # One stream's end must not be the host's.
        with suppress(FusionError), translated(relay.to_base58()):
            async with closing(stream):
                with self._slots.slot_for(relay) as is_granted:
                    if not is_granted:
                        await stream.reset()
                        return
                    request = await self._read_stop(stream, relay)
                if request is not None:
                    await self._accept(stream, relay, request)

    async def _read_stop(self, stream: Any, relay: ID) -> StopMessage | None:
        """What the relay wants, once it has been told that it is welcome; None when it is not."""
        with trio.fail_after(STOP_TIMEOUT_S):
            request: StopMessage = await read_delimited_msg(stream, StopMessage)
            is_welcome = relay in self._reserved and relay_of(stream.swarm_conn) is None
            status = StatusCode.OK if is_welcome else StatusCode.PERMISSION_DENIED
            await write_delimited_msg(stream, StopMessage(type=StopMessage.STATUS, status=status))
        return request if is_welcome else None

    async def _accept(self, stream: Any, relay: ID, request: StopMessage) -> None:
        # Whom the relay names is of no importance: the handshake proves who it is.
        raw = _raw(stream, relay, ID(request.peer.id), initiator=False)
        muxed = await self._host.upgrade_inbound_connection(raw, raw.get_transport_addresses()[0])
        for connection in self._swarm.get_connections(muxed.peer_id):
            if connection.muxed_conn is muxed:
                mark_relayed(connection, relay)
                self._on_circuit(connection)
        await muxed.event_closed.wait()


class _CircuitStream(ReadWriteCloser):  # type: ignore[misc]
    """A stream that carries a connection. Reads ahead: every read below it costs as much as a message.

    Attributes:
        relay: who carries it; see relay_of.
    """

    def __init__(self, stream: Any, relay: ID) -> None:
        self.relay = relay
        self._stream = stream
        self._ahead = b""
        self._at = 0

    async def read(self, n: int | None = None) -> bytes:
        if self._at >= len(self._ahead):
            try:
                self._ahead, self._at = await self._stream.read(READ_AHEAD_BYTES), 0
            except StreamEOF:
                return b""
            except StreamError as error:
                raise ConnectionClosedError("the circuit was reset") from error
        stop = len(self._ahead) if n is None else self._at + n
        part = self._ahead[self._at : stop]
        self._at += len(part)
        return bytes(part)

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except StreamError as error:
            raise ConnectionClosedError("the circuit was reset") from error

    async def close(self) -> None:
        with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
            await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        address: tuple[str, int] | None = self._stream.get_remote_address()
        return address


async def _reset(stream: Any) -> None:
    with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
        await stream.reset()


def _raw(stream: Any, relay: ID, their_id: ID, *, initiator: bool) -> RawConnection:
    return RawConnection(
        _CircuitStream(stream, relay), initiator, ConnectionType.RELAYED, [circuit_address(relay, their_id)]
    )


def _name(status: int) -> str:
    try:
        return str(StatusCode(status).name).lower().replace("_", " ")
    except ValueError:
        return f"status {status}"
