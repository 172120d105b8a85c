"""Carrying the connections of others: the relay's half of circuit relay v2, for nodes whose owner has agreed.

The library's relay keeps its circuits by the ids of their ends, so that the end of one kills another one to the same
peer; accepts a reservation in the name of anybody; and counts neither by host nor by source (trap 29). Its messages are
used, and nothing else.

What is carried is opaque. Reads and writes take turns, so at most one chunk and one window of yamux per direction wait
here; a peer that does not read has its circuit ended by the library's five seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import trio
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg

from fusion_node.errors import FusionError, PeerUnreachable
from p2p.control import RelayCounts, RelayLimits
from p2p.libp2p_adapter.circuits import HOP, STOP
from p2p.libp2p_adapter.connections import direct, relay_of, remote_address, stream_on
from p2p.libp2p_adapter.messages import closing, translated
from p2p.libp2p_adapter.slots import Slots
from p2p.seam import Gate

RESERVATION_S = 120.0
"""How long a reservation holds. Clients renew every 30 s, so this outlives two that are lost."""

REQUEST_TIMEOUT_S = 5.0
MAX_REQUESTS_AT_ONCE = 64
"""Streams that have not yet become a circuit."""

MAX_REQUESTS_PER_PEER = 4
MAX_LEADS_AT_ONCE = 3
"""Of the questions whether a peer wants to be reached; more wait. It answers MAX_STOPS_PER_PEER of p2p.circuits."""

CHUNK_BYTES = 64 * 1024


@dataclass(slots=True)
class _Reservation:
    host: str
    expires_at: float


@dataclass(slots=True, eq=False)
class _Circuit:
    ends: tuple[ID, ID]
    left_bytes: int
    is_ending: trio.CancelScope = field(default_factory=trio.CancelScope)


class Relay:
    """See the head of this file."""

    def __init__(self, host: Any, limits: RelayLimits, gate: Gate) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._limits = limits
        self._reservations: dict[ID, _Reservation] = {}
        self._circuits: set[_Circuit] = set()
        self._slots = Slots(gate, at_once=MAX_REQUESTS_AT_ONCE, per_peer=MAX_REQUESTS_PER_PEER)
        self._leading: WeakValueDictionary[ID, trio.CapacityLimiter] = WeakValueDictionary()
        self._carried_bytes = 0
        self._paced_until = 0.0
        host.set_stream_handler(HOP, self._serve)

    @property
    def counts(self) -> RelayCounts:
        self._forget_expired()
        return RelayCounts(len(self._reservations), len(self._circuits), self._carried_bytes)

    def leads_to(self, their_id: ID) -> bool:
        """Whether this peer has a reservation."""
        self._forget_expired()
        return their_id in self._reservations

    def disconnected(self, their_id: ID) -> None:
        """A connection with this peer is gone. Without one, nobody can be led to it."""
        if not direct(self._swarm.get_connections(their_id)):
            self._reservations.pop(their_id, None)

    async def _serve(self, stream: Any) -> None:
        their_id = stream.muxed_conn.peer_id
        # One stream's end must not be the host's.
        with suppress(FusionError), translated(their_id.to_base58()):
            async with closing(stream):
                with self._slots.slot_for(their_id) as is_granted:
                    if not is_granted:
                        await stream.reset()
                        return
                    circuit, target = await self._decide(stream)
                if circuit is not None:
                    await self._run(circuit, stream, target)

    async def _decide(self, stream: Any) -> tuple[_Circuit | None, Any]:
        """Answers the request; the circuit and the stream to its target, if that is what becomes of it."""
        their_id = stream.muxed_conn.peer_id
        with trio.fail_after(REQUEST_TIMEOUT_S):
            request = await read_delimited_msg(stream, HopMessage)
        if relay_of(stream.swarm_conn) is not None:  # a chain of relays would carry everything many times
            await _answer(stream, StatusCode.PERMISSION_DENIED)
        elif request.type == HopMessage.RESERVE:
            await self._reserve(stream, request)
        elif request.type == HopMessage.CONNECT:
            return await self._connect(stream, their_id, ID(request.peer.id))
        else:
            await _answer(stream, StatusCode.UNEXPECTED_MESSAGE)
        return None, None

    async def _reserve(self, stream: Any, request: HopMessage) -> None:
        their_id = stream.muxed_conn.peer_id
        if request.peer.id and request.peer.id != their_id.to_bytes():
            await _answer(stream, StatusCode.PERMISSION_DENIED)
            return
        self._forget_expired()
        host = remote_address(stream.swarm_conn).rpartition(":")[0]
        others = [held for peer, held in self._reservations.items() if peer != their_id]
        if (
            len(others) >= self._limits.max_reservations
            or sum(held.host == host for held in others) >= self._limits.max_reservations_per_host
        ):
            await _answer(stream, StatusCode.RESERVATION_REFUSED)
            return
        self._reservations[their_id] = _Reservation(host, trio.current_time() + RESERVATION_S)
        answer = HopMessage(type=HopMessage.STATUS, status=StatusCode.OK)
        answer.reservation.expire = int(time.time() + RESERVATION_S)
        self._tell_limits(answer)
        await write_delimited_msg(stream, answer)

    async def _connect(self, stream: Any, source: ID, target: ID) -> tuple[_Circuit | None, Any]:
        self._forget_expired()
        if target not in self._reservations:
            await _answer(stream, StatusCode.NO_RESERVATION)
            return None, None
        num_of = Counter(end for circuit in self._circuits for end in circuit.ends)
        most = self._limits.max_circuits_per_peer
        if len(self._circuits) >= self._limits.max_circuits or num_of[source] >= most or num_of[target] >= most:
            await _answer(stream, StatusCode.RESOURCE_LIMIT_EXCEEDED)
            return None, None
        circuit = _Circuit((source, target), self._limits.circuit_bytes)
        self._circuits.add(circuit)  # already now, so that many at once do not get past the limits
        onward: Any = None
        try:
            onward = await self._lead_to(target, source)
        finally:
            if onward is None:
                self._circuits.discard(circuit)
        if onward is None:
            await _answer(stream, StatusCode.CONNECTION_FAILED)
            return None, None
        return circuit, onward

    async def _lead_to(self, target: ID, source: ID) -> Any:
        """A stream on which the target has agreed to be reached; None when it does not, or does not answer."""
        onward: Any = None
        request = StopMessage(type=StopMessage.CONNECT)
        request.peer.id = source.to_bytes()
        self._tell_limits(request)
        try:
            leading = self._leading.setdefault(target, trio.CapacityLimiter(MAX_LEADS_AT_ONCE))
            with translated(target.to_base58()), trio.fail_after(REQUEST_TIMEOUT_S):
                async with leading:
                    connections = direct(self._swarm.get_connections(target))
                    if not connections:
                        raise PeerUnreachable(target.to_base58(), "it has gone")
                    onward = await stream_on(self._host, connections[0], STOP)
                    await write_delimited_msg(onward, request)
                    answer = await read_delimited_msg(onward, StopMessage)
                    if answer.status == StatusCode.OK:
                        return onward
        except FusionError:
            pass
        if onward is not None:
            await onward.reset()
        return None

    async def _run(self, circuit: _Circuit, stream: Any, onward: Any) -> None:
        """Carries in both directions until either side ends, or a limit is reached."""
        async with closing(onward):
            try:
                answer = HopMessage(type=HopMessage.STATUS, status=StatusCode.OK)
                self._tell_limits(answer)
                await write_delimited_msg(stream, answer)
                with circuit.is_ending, trio.move_on_after(self._limits.circuit_s):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._carry, circuit, stream, onward)
                        nursery.start_soon(self._carry, circuit, onward, stream)
            finally:
                self._circuits.discard(circuit)  # before its ends can know

    async def _carry(self, circuit: _Circuit, source: Any, sink: Any) -> None:
        with suppress(FusionError), translated("circuit"), suppress(StreamEOF):
            while True:
                data = await source.read(CHUNK_BYTES)
                circuit.left_bytes -= len(data)
                if circuit.left_bytes < 0:
                    break
                await self._pace(len(data))
                await sink.write(data)
                self._carried_bytes += len(data)
        circuit.is_ending.cancel()

    async def _pace(self, num_bytes: int) -> None:
        """Waits for its turn, when the owner has bounded what is carried: all circuits share that."""
        rate_Bps = self._limits.rate_Bps
        if rate_Bps is not None:
            now = trio.current_time()
            starts = max(now, self._paced_until)
            self._paced_until = starts + num_bytes / rate_Bps
            await trio.sleep_until(starts)

    def _tell_limits(self, message: Any) -> None:
        message.limit.duration = int(self._limits.circuit_s)
        message.limit.data = self._limits.circuit_bytes

    def _forget_expired(self) -> None:
        now = trio.current_time()
        for peer in [peer for peer, held in self._reservations.items() if held.expires_at < now]:
            del self._reservations[peer]


async def _answer(stream: Any, status: StatusCode) -> None:
    with trio.fail_after(REQUEST_TIMEOUT_S):
        await write_delimited_msg(stream, HopMessage(type=HopMessage.STATUS, status=status))
