"""Making a relayed connection direct through the NATs of both ends: DCUtR, with TCP simultaneous open (RFC 9293 §3.5).

Whoever was reached through a relay asks the other for its addresses over that connection, tells its own, and gives the
signal; then both dial one another at the same moment. The SYN of each opens its own NAT for that of the other. This
works when both NATs give a port the same outside port whomever it talks to, as most home routers do.

The library's version (trap 30) needs a listener, and dials from its port: when only one of the two SYNs gets through to
it, both ends wait for the other's handshake. It learns our outside address from a mechanism that is off here (trap 16),
looks every two seconds for something to do, one peer after the other, and dials as many addresses as a peer names. Here
a port is bound for the one attempt, the relay tells how it looks from outside, and nothing listens on it, so that a
user's machine has no open port at any time; a dial that is refused is repeated, because behind a router that answers
with a reset the SYNs cross only when both are on their way at once.

Source: libp2p specs, relay/DCUtR.md.
"""

from __future__ import annotations

import ipaddress
import random
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import multiaddr
import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.network import swarm as libp2p_swarm
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.relay.circuit_v2.utils import write_delimited_msg
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from fusion_node.errors import FusionError
from fusion_node.types import PeerId
from p2p.addresses import dialable_hosts
from p2p.control import HolePunching
from p2p.libp2p_adapter.connections import direct, relay_of, stream_on
from p2p.libp2p_adapter.messages import closing, translated
from p2p.libp2p_adapter.multiaddrs import parts_of, tcp
from p2p.libp2p_adapter.muxing import BufferedTCPStream
from p2p.libp2p_adapter.reached import ends_of_connection, probe
from p2p.limits_core import Buckets, Rate

PROTOCOL = TProtocol("/libp2p/dcutr")

MAX_MESSAGE_BYTES = 4096
MAX_ADDRESSES = 4
"""Of the other's that are looked at: IPv4 and IPv6, outside and on the local network, of which one is dialled."""

TRY_DELAYS_S = (0.0, 2.0, 6.0)
"""Before each attempt; three are the specification's number. A NAT forgets a failed one in some seconds."""

DIAL_S = 4.0
"""For both SYNs to meet, and the handshakes. Linux sends a SYN again after 1 s and after 3 s."""

REDIAL_S = 0.1
MAX_REDIALS = 9
"""Of an address that refuses, in one attempt: for a second the SYNs may cross. It may belong to a third party, and
somebody who wants its ports scanned gets no more than that."""

EXCHANGE_TIMEOUT_S = 5.0

ATTEMPTS_OF_A_PEER = Rate(per_s=9 / 3600, burst=9.0)
"""Three connections through a relay, with three attempts each, and as many in every hour."""

TURN_S = 15.0
"""For one attempt: the exchange, both dials, and a relay that is slow to tell how it sees us."""

MAX_AT_ONCE = 8
"""Two sockets each."""

MAX_TRYING = 64
"""Peers with whom a hole is being punched, most of them between two attempts."""

ANSWER_WAIT_S = 4.0
"""For a turn to answer in. Who gives the signal does not wait longer than EXCHANGE_TIMEOUT_S."""

OWN_WAIT_S = TURN_S * MAX_TRYING / MAX_AT_ONCE
"""For a turn to give the signal in, which come in the order asked for: so long at most, if all before us stall. With
less, some who stall would have every turn whenever somebody else looks."""

MAX_REMEMBERED = 1024

FIRST_UNPRIVILEGED_PORT = 1024
"""Nobody is to make us knock at the system services of a third party."""


class HolePuncher:
    """See the head of this file.

    Args:
        tasks: in which attempts run.

    Attributes:
        trying: with whom a hole is being punched, or soon will be again.
        results: how it went with whom.
    """

    def __init__(self, host: Any, tasks: trio.Nursery) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._tasks = tasks
        self._limiter = trio.CapacityLimiter(MAX_AT_ONCE)
        self._attempts = Buckets[ID](ATTEMPTS_OF_A_PEER)
        self.trying: set[ID] = set()
        self.results: dict[PeerId, HolePunching] = {}
        host.set_stream_handler(PROTOCOL, self._serve)

    def start(self, connection: Any) -> None:
        """Tries to make this connection direct, which a peer has opened to us through a relay."""
        their_id = connection.muxed_conn.peer_id
        if self._may_try(their_id):
            self.trying.add(their_id)
            self._tasks.start_soon(self._try, connection, their_id)

    def _may_try(self, their_id: ID) -> bool:
        return their_id not in self.trying and len(self.trying) < MAX_TRYING

    async def _try(self, connection: Any, their_id: ID) -> None:
        try:
            for delay_s in TRY_DELAYS_S:
                await trio.sleep(delay_s * random.uniform(0.8, 1.2))  # noqa: S311  # not for secrecy
                if connection.is_closed or self._is_direct(their_id):
                    return
                if not self._attempts.take(their_id, 1, now=trio.current_time()):
                    return
                async with self._turn(OWN_WAIT_S) as has_turn:
                    if has_turn:
                        with suppress(FusionError), translated(their_id.to_base58()):
                            await self._initiate(connection, their_id)
                if has_turn and self._note(their_id):
                    return
        finally:
            self.trying.discard(their_id)

    @asynccontextmanager
    async def _turn(self, wait_s: float) -> AsyncIterator[bool]:
        """Waits so long for one of MAX_AT_ONCE turns, says whether there is one, and ends it after TURN_S."""
        with trio.move_on_after(wait_s) as waiting:
            await self._limiter.acquire()
        if waiting.cancelled_caught:
            yield False
            return
        try:
            with trio.move_on_after(TURN_S):
                yield True
        finally:
            self._limiter.release()

    async def _initiate(self, connection: Any, their_id: ID) -> None:
        with _bound_ports() as ports:
            ours = await self._own_addresses(connection, ports)
            stream = await stream_on(self._host, connection, PROTOCOL)
            async with closing(stream):
                with trio.fail_after(EXCHANGE_TIMEOUT_S):
                    began = trio.current_time()
                    await write_delimited_msg(stream, _connect_message(ours))
                    theirs = await _read(stream, HolePunch.CONNECT)
                    round_trip_s = trio.current_time() - began
                    await write_delimited_msg(stream, HolePunch(type=HolePunch.SYNC))
                await trio.sleep(round_trip_s / 2)
                await self._dial(their_id, _targets(theirs, ours), ports, as_responder=True)

    async def _serve(self, stream: Any) -> None:
        their_id = stream.muxed_conn.peer_id
        # One stream's end must not be the host's.
        with suppress(FusionError), translated(their_id.to_base58()):
            async with closing(stream):
                if relay_of(stream.swarm_conn) is None or not self._may_try(their_id):
                    return
                if not self._attempts.take(their_id, 1, now=trio.current_time()):
                    return
                self.trying.add(their_id)
                try:
                    async with self._turn(ANSWER_WAIT_S) as has_turn:
                        if has_turn:
                            await self._respond(stream, their_id)
                    if has_turn:
                        self._note(their_id)
                finally:
                    self.trying.discard(their_id)

    async def _respond(self, stream: Any, their_id: ID) -> None:
        with _bound_ports() as ports:
            with trio.fail_after(EXCHANGE_TIMEOUT_S):
                theirs = await _read(stream, HolePunch.CONNECT)
                ours = await self._own_addresses(stream.swarm_conn, ports)
                await write_delimited_msg(stream, _connect_message(ours))
                await _read(stream, HolePunch.SYNC)
            await self._dial(their_id, _targets(theirs, ours), ports, as_responder=False)

    async def _own_addresses(self, connection: Any, ports: Mapping[int, int]) -> list[tuple[str, int]]:
        """Where the bound ports can be dialled, if at all, outside addresses first.

        The relay tells how it sees a connection from the bound port, which is what the other's NAT will see too, unless
        ours chooses a port by whom it talks to.
        """
        found: list[tuple[str, int]] = []
        relay = relay_of(connection)
        for between in direct(self._swarm.get_connections(relay)):
            ends = ends_of_connection(between)
            if ends is not None and ends.is_outgoing:
                version = ipaddress.ip_address(ends.remote_host).version
                source = ("::" if version == 6 else "0.0.0.0", ports[version])  # noqa: S104
                seen = await probe(self._swarm, ends.remote_host, ends.remote_port, source)
                if seen is not None:
                    found += [(seen.seen_host, seen.seen_port), (seen.local_host, ports[version])]
                    break
        if 6 in ports:  # without a NAT in front of it
            found += [(host, ports[6]) for host in dialable_hosts("::") if ipaddress.ip_address(host).is_global]
        return list(dict.fromkeys(found))[:MAX_ADDRESSES]

    async def _dial(
        self, their_id: ID, targets: list[tuple[str, int]], ports: Mapping[int, int], *, as_responder: bool
    ) -> None:
        with trio.move_on_after(DIAL_S):
            async with trio.open_nursery() as nursery:
                for host, port in targets:

                    async def attempt(host: str = host, port: int = port) -> None:
                        with suppress(FusionError), translated(their_id.to_base58()):
                            sock = await _connect(host, port, ports[ipaddress.ip_address(host).version])
                            if sock is not None:
                                await self._upgrade(sock, their_id, as_responder=as_responder)
                                nursery.cancel_scope.cancel()

                    nursery.start_soon(attempt)

    async def _upgrade(self, sock: trio.socket.SocketType, their_id: ID, *, as_responder: bool) -> None:
        """Who gave the signal answers the handshake: both have dialled, and somebody has to begin."""
        try:
            raw = RawConnection(BufferedTCPStream(trio.SocketStream(sock)), not as_responder)
            if as_responder:
                muxed = await self._swarm.upgrade_inbound_raw_conn(raw, multiaddr.Multiaddr("/ip4/0.0.0.0/tcp/0"))
                if muxed.peer_id != their_id:
                    await muxed.close()
                return
            if self._swarm.psk is not None:
                raw = libp2p_swarm.new_protected_conn(raw, self._swarm.psk)
            await self._swarm.upgrade_outbound_raw_conn(raw, their_id)
        except BaseException:
            # Cancelled, when another attempt has succeeded, the library leaves it open.
            sock.close()
            raise

    def _is_direct(self, their_id: ID) -> bool:
        return bool(direct(self._swarm.get_connections(their_id)))

    def _note(self, their_id: ID) -> bool:
        """Remembers how it went; whether it is done."""
        peer = PeerId(their_id.to_base58())
        before = self.results.pop(peer, HolePunching(0, False))
        self.results[peer] = HolePunching(before.num_tried + 1, self._is_direct(their_id))
        while len(self.results) > MAX_REMEMBERED:
            del self.results[next(iter(self.results))]
        return self.results[peer].is_direct


@contextmanager
def _bound_ports() -> Iterator[dict[int, int]]:
    """A free port for each IP version that there is, on which nothing listens: so that it can be told beforehand."""
    sockets: list[socket.socket] = []
    ports: dict[int, int] = {}
    try:
        for version, any_host in ((4, "0.0.0.0"), (6, "::")):  # noqa: S104  # bound, and never listened on
            with suppress(OSError):
                sockets.append(_reusable(version))
                sockets[-1].bind((any_host, 0))
                ports[version] = sockets[-1].getsockname()[1]
        yield ports
    finally:
        for sock in sockets:
            sock.close()


def _reusable(version: int) -> socket.socket:
    """A TCP socket that may share its port with others of ours, and that leaves IPv4 to those of version 4."""
    sock = socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if version == 6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


async def _connect(host: str, port: int, local_port: int) -> trio.socket.SocketType | None:
    """Dials from the given port, MAX_REDIALS times again when it is refused. None when that does not help."""
    version = ipaddress.ip_address(host).version
    for _ in range(MAX_REDIALS + 1):
        sock = trio.socket.from_stdlib_socket(_reusable(version))
        try:
            await sock.bind(("::" if version == 6 else "0.0.0.0", local_port))  # noqa: S104
            await sock.connect((host, port))
        except (ConnectionRefusedError, ConnectionResetError):
            sock.close()
            await trio.sleep(REDIAL_S * random.uniform(0.5, 1.5))  # noqa: S311  # not for secrecy
        except OSError:
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    return None


async def _read(stream: Any, kind: int) -> HolePunch:
    message = HolePunch()
    message.ParseFromString(await read_varint_prefixed_bytes_limited(stream, MAX_MESSAGE_BYTES))
    if message.type != kind:
        raise ParseError("another message of a hole punch was due")
    return message


def _connect_message(ours: list[tuple[str, int]]) -> HolePunch:
    addresses = [multiaddr.Multiaddr(tcp(host, port)).to_bytes() for host, port in ours]
    return HolePunch(type=HolePunch.CONNECT, ObsAddrs=addresses)


def _targets(theirs: HolePunch, ours: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Which of the addresses that a peer names are dialled.

    One of a local network only when both seem to be in the same one: they share an outside address, or neither has
    one. Who learns ours can claim it, so that even then it is one address, a few times an hour.
    """
    named = [parts_of(multiaddr.Multiaddr(bytes(address))) for address in theirs.ObsAddrs[:MAX_ADDRESSES]]
    found = [
        (ipaddress.ip_address(host), port)
        for kind, host, port in named
        if kind in ("ip4", "ip6") and port >= FIRST_UNPRIVILEGED_PORT
    ]
    our_outside = {ip for ip in (ipaddress.ip_address(host) for host, _ in ours) if ip.is_global}
    their_outside = {host for host, _ in found if host.is_global}
    is_near = bool(our_outside & their_outside) or not (our_outside or their_outside)
    local = [
        (host, port)
        for host, port in found
        if not (host.is_global or host.is_loopback or host.is_multicast or host.is_unspecified or host.is_link_local)
    ]
    outside = [(host, port) for host, port in found if host.is_global and not host.is_multicast]
    return [(str(host), port) for host, port in [*outside, *(local[:1] if is_near else ())]]
