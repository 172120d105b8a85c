"""What a connection of the library is: direct or through a relay, and which is best."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import multiaddr
import trio
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from fusion_node.errors import PeerError, PeerTimeout
from fusion_node.types import PeerId
from p2p.libp2p_adapter.messages import translated
from p2p.seam import Gate, PathKind

NEGOTIATE_TIMEOUT_S = 4.0
"""Two round trips through a relay, on a busy machine. The library's own limit is 5 s."""

_CIRCUIT = "/p2p-circuit"

_NO_PROTOCOL = TProtocol("/fusion/alive/1")
"""Nobody speaks it, and whoever is there says so."""


def circuit_address(relay: ID, their_id: ID) -> multiaddr.Multiaddr:
    """How a connection through a relay is marked for the library."""
    return multiaddr.Multiaddr(f"/p2p/{relay.to_base58()}{_CIRCUIT}/p2p/{their_id.to_base58()}")


def mark_relayed(connection: Any, relay: ID) -> None:
    """So that the library prefers direct ones to it; it marks those that come in as relayed by ourselves, if at all."""
    marks = [circuit_address(relay, connection.muxed_conn.peer_id)]
    connection.set_transport_info(marks, ConnectionType.RELAYED)


def relay_of(connection: Any) -> ID | None:
    """The relay that carries it; None for a direct one."""
    # What it is built of, because the library's marks come late and may be wrong.
    packets = getattr(getattr(connection.muxed_conn.secured_conn, "conn", None), "read_writer", None)
    raw = getattr(packets, "read_write_closer", None)
    return getattr(getattr(raw, "stream", None), "relay", None)


def path_of(connection: Any) -> PathKind:
    return PathKind.STREAM if relay_of(connection) is None else PathKind.RELAYED


def best_first(connections: Iterable[Any]) -> list[Any]:
    """Direct ones, then those through relays; the newest of each first, because an older one may have died."""
    usable = [connection for connection in reversed(list(connections)) if not connection.is_closed]
    return sorted(usable, key=lambda connection: relay_of(connection) is not None)


def direct(connections: Iterable[Any]) -> list[Any]:
    return [connection for connection in best_first(connections) if relay_of(connection) is None]


def remote_address(connection: Any) -> str:
    """``host:port`` of the other end, or of the relay before it."""
    found = connection.muxed_conn.get_remote_address()
    if found is None:
        return "unknown"
    host, port = found[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refuses(gate: Gate, connection: Any) -> bool:
    """Whether a gate refuses the peer of a connection, at the address that it is really at."""
    remote = connection.muxed_conn.get_remote_address() if relay_of(connection) is None else None
    peer = PeerId(connection.muxed_conn.peer_id.to_base58())
    return gate.refuse_peer(peer, "" if remote is None else str(remote[0])) is not None


async def stream_on(host: Any, connection: Any, protocol: TProtocol) -> Any:
    """A stream on this very connection; the host's own method would choose one.

    Raises:
        trio.TooSlowError: nothing comes through the connection.
    """
    stream = await connection.new_stream()
    try:
        with trio.fail_after(NEGOTIATE_TIMEOUT_S):
            chosen = await host.multiselect_client.select_one_of([protocol], MultiselectCommunicator(stream))
    except BaseException:
        with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
            await stream.reset()
        raise
    stream.set_protocol(chosen)
    return stream


async def close_quietly(connection: Any) -> None:
    """Closes it, also when it is dead: then its last words would wait for ever, so the socket is closed under them."""
    peer = connection.muxed_conn.peer_id.to_base58()
    with suppress(PeerError), translated(peer):
        with trio.move_on_after(1.0):
            await connection.close()
    with suppress(PeerError), translated(peer), trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
        await connection.muxed_conn.secured_conn.close()


async def close_if_dead(host: Any, connection: Any) -> None:
    """Closes a connection through which nothing comes any more, so that the next link is not put on it."""
    peer = connection.muxed_conn.peer_id.to_base58()
    try:
        with translated(peer):
            await stream_on(host, connection, _NO_PROTOCOL)
    except PeerTimeout:
        await close_quietly(connection)
    except PeerError:
        return
