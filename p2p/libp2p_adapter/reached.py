"""Nonces on fresh connections: brought to a listener, and taken by one, before any identity is shown.

A dial-back has to prove that a *new* TCP connection reaches the listener; the library's connect returns the connection
that there is already. So the nonce takes the place of the security protocol: the dialling side selects
``/fusion/reached/1`` by multistream, sends 16 bytes, and gets back one length byte and ``host:port`` of its own end as
it is seen there, which makes the exchange a small STUN (RFC 8489) over TCP as well.

The listener's half is registered as a security transport that always raises, so no connection comes of it, neither for
whoever selects it nor on the way out, where Noise is offered first and this one refuses. In a private swarm all of it
runs inside the protection by the swarm's key. What a stranger can do with it is to be told its own address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import libp2p.network.swarm as libp2p_swarm
import trio
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.exceptions import HandshakeFailure
from libp2p.transport.tcp.tcp import _set_reuse_flags

from p2p.control import ConnectionEnds
from p2p.reachability_verdict import Observation, Outcome

REACHED_PROTOCOL = TProtocol("/fusion/reached/1")
NONCE_BYTES = 16
READ_TIMEOUT_S = 3.0
"""For 16 bytes that follow at once."""

BRING_TIMEOUT_S = 3.0
"""TCP, two negotiations and the answer: four round trips."""

PROBE_NONCE = bytes(NONCE_BYTES)
"""Nobody waits for it: whoever sends it wants to know its own address only."""

log = logging.getLogger(__name__)


class ReachedTransport(ISecureTransport):  # type: ignore[misc]
    """Takes nonces from whoever connects, and never makes a connection."""

    def __init__(self, on_reached: Callable[[bytes, str], None]) -> None:
        self._on_reached = on_reached

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        with suppress(BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            with trio.move_on_after(READ_TIMEOUT_S):
                await self._take(conn)
        # Of the kind for which the library tidies up: the socket and the slot are given back.
        raise HandshakeFailure("a nonce was brought, and nothing more was wanted")

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        raise HandshakeFailure("the peer wants no secure connection")

    async def _take(self, conn: Any) -> None:
        ends = ends_of_stream(conn.stream, is_outgoing=False)
        if ends is None:  # through a relay, which proves nothing about this machine's addresses
            return
        nonce = await _read_exactly(conn, NONCE_BYTES)
        self._on_reached(nonce, ends.local_host)
        seen = f"{ends.remote_host}:{ends.remote_port}".encode()
        await conn.write(bytes([len(seen)]) + seen)


def take_nonces(host: Any, on_reached: Callable[[bytes, str], None]) -> None:
    """Registers the listener's half, after Noise: a dialling side offers the protocols in their order."""
    security = host.get_network().upgrader.security_multistream
    security.add_transport(REACHED_PROTOCOL, ReachedTransport(on_reached))


async def bring_nonce(swarm: Any, host: str, port: int, nonce: bytes) -> Outcome:
    """Brings a nonce to a listener on a fresh connection."""
    try:
        with trio.fail_after(BRING_TIMEOUT_S):
            stream = await trio.open_tcp_stream(host, port)
    except (OSError, trio.TooSlowError):
        return Outcome.UNREACHABLE
    return Outcome.BROKEN if await _converse(swarm, stream, nonce) is None else Outcome.DELIVERED


async def probe(swarm: Any, host: str, port: int, source: tuple[str, int]) -> Observation | None:
    """How a listener sees a connection from the port ``source``, as hole punching makes them. None when it fails."""
    family = trio.socket.AF_INET6 if ":" in host else trio.socket.AF_INET
    sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
    try:
        _set_reuse_flags(sock)
        with trio.fail_after(BRING_TIMEOUT_S):
            await sock.bind(source)
            await sock.connect((host, port))
    except (OSError, trio.TooSlowError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    local_host, local_port = sock.getsockname()[:2]
    seen = await _converse(swarm, trio.SocketStream(sock), PROBE_NONCE)
    return None if seen is None else Observation(local_host, local_port, *seen)


async def _converse(swarm: Any, stream: trio.SocketStream, nonce: bytes) -> tuple[str, int] | None:
    """The dialling half; returns where the other side sees this one, None when it does not take part."""
    connection = RawConnection(TrioTCPStream(stream), True)
    if swarm.psk is not None:
        connection = libp2p_swarm.new_protected_conn(connection, swarm.psk)
    try:
        with suppress(BaseLibp2pError, OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError):
            with trio.move_on_after(BRING_TIMEOUT_S):
                client, communicator = MultiselectClient(), MultiselectCommunicator(connection)
                await client.handshake(communicator)
                await client.try_select(communicator, REACHED_PROTOCOL)
                await connection.write(nonce)
                length = (await _read_exactly(connection, 1))[0]
                host, _, port = (await _read_exactly(connection, length)).decode("ascii").rpartition(":")
                return host, int(port)
        return None
    finally:
        await trio.aclose_forcefully(stream)


def ends_of_stream(stream: Any, *, is_outgoing: bool) -> ConnectionEnds | None:
    """Both ends of a TCP stream of the library; None for another kind, or when it is closed."""
    if not isinstance(stream, TrioTCPStream):
        return None
    try:
        local, remote = stream.stream.socket.getsockname(), stream.stream.socket.getpeername()
    except OSError:
        return None
    return ConnectionEnds(_plain(local[0]), local[1], _plain(remote[0]), remote[1], is_outgoing)


def ends_of_connection(connection: Any) -> ConnectionEnds | None:
    """Both ends of a connection with a peer; None when it goes through a relay, or is closed."""
    secured = connection.muxed_conn.secured_conn
    # Noise reads and writes through two layers above the raw connection; whatever is not built so is no TCP.
    packets = getattr(getattr(secured, "conn", None), "read_writer", None)
    raw = getattr(packets, "read_write_closer", None)
    return ends_of_stream(getattr(raw, "stream", None), is_outgoing=secured.is_initiator)


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


async def _read_exactly(connection: Any, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = await connection.read(size - len(received))
        if not part:
            raise trio.BrokenResourceError("the connection ended inside a message")
        received += part
    return bytes(received)
