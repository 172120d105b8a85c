"""Sealed links over WebSocket (RFC 6455): the data plane on real networks.

One path, binary messages, no compression, no certificates: identity and secrecy come from the Noise handshake inside,
so that a link passes HTTP proxies without having to trust them. Every message is one handshake message or one sealed
segment, at most 68 KiB, which also bounds what a stranger can make us buffer.

aiohttp does HTTP up to the upgrade, on both sides; then a channel of ours takes over its transport, as the head of
p2p.websocket_core explains.

In a private swarm the path of the HTTP request is derived from the key, and a listener looks at the first line before
anything else does: whoever asks for another path, or sends something else, is hung up on without one byte. The path
goes over the line in the clear, so it keeps out who guesses, and leaves those who listen there to the handshake.

Before a connection has proven an identity it costs little and not for long: at most MAX_UNAUTHENTICATED of them exist,
each for at most HANDSHAKE_TIMEOUT_S, counted from the TCP accept, whatever it sends or does not send.

Above 600 lines: what keeps strangers from a listener is a third of it, and knows the listener's connections one by one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import aiohttp
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from yarl import URL

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    PeerClosed,
    PeerError,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p.delivery_rate_core import FIRST_UNSENT_BYTES
from p2p.identity import Identity
from p2p.link_emulation import EmulatedLine
from p2p.noise_core import MAX_SEGMENT_BYTES, LinkRefusal
from p2p.prefixes import host_key
from p2p.records import PROTOCOL_VERSION
from p2p.sealed import Credentials, SealedLink, initiate, respond
from p2p.seam import Channel, ChannelReceiver, Gate, Link, Listener, OnLink, OpenGate, PathKind
from p2p.websocket_core import BINARY, Decoder, Opcode, encode

PATH = "/fusion"

HANDSHAKE_TIMEOUT_S = 10.0
"""From the TCP accept to a proven identity. Two round trips and 5 ms of CPU; 10 s is a very bad satellite link."""

MAX_UNAUTHENTICATED = 64
"""Connections per listener without a proven identity. 64 of them can hold 64 x 136 KiB of buffers. When there are so
many, the oldest of the host that has most makes way for a newcomer, or else one that has taken PATIENCE_S already."""

PATIENCE_S = 2.0
"""Enough for two round trips of 300 ms with a slow machine at the end, when others are waiting."""

BACKLOG = 256
"""Connections that the kernel completes before they are accepted; in a full queue an honest newcomer waits a second.
As many are accepted in one turn of the event loop: 50 ms, when all of them are refused."""

NONCE_HEADER = "Fusion-Nonce"
"""Of a request that is no opening handshake: 32 hexadecimal digits, which a peer leaves here to show that this port can
be dialled (p2p.dial_back). Answered with 204 and the end of the connection."""

NONCE_BYTES = 16

CLOSE_TIMEOUT_S = 1.0
"""How long a closing side waits for the other's close frame. A frozen peer never answers."""

_PATH_DOMAIN = b"fusion-node/websocket-path/1:"

_TCP_OPTIONS = {("TCP_NOTSENT_LOWAT", "linux"): 25, ("TCP_NOTSENT_LOWAT", "darwin"): 0x201}
"""Numbers of options that Python's socket module does not name everywhere."""

_ACCEPT_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 §1.3."""

_CLOSE_NORMALLY = (1000).to_bytes(2, "big")

_log = structlog.get_logger(__name__)


class WebSocketNetwork:
    """Dials and listens with aiohttp, in the running event loop.

    Args:
        identity: proven to every peer.
        psk: the key of a private swarm.
        gate: who may connect.
        version: of the protocol; another than the default only in tests.
        handshake_timeout_s, max_unauthenticated: see the constants.
        line: what this process sends goes over it; None: nothing is emulated.

    Attributes:
        on_nonce: takes what strangers have left here, and the address of this machine at which they did.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        psk: bytes | None = None,
        gate: Gate | None = None,
        version: int = PROTOCOL_VERSION,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        line: EmulatedLine | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._credentials = Credentials(identity, self.refused, psk, version)
        self._gate = gate or OpenGate()
        self._handshake_timeout_s = handshake_timeout_s
        self._max_unauthenticated = max_unauthenticated
        self._line = line
        self.on_nonce: Callable[[bytes, str], None] = lambda nonce, local_host: None

    def path_of(self, address: str) -> PathKind:
        """See Network.path_of."""
        return PathKind.DIRECT

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        """See Network.dial."""
        who = expect or address
        try:
            host, port = split_address(address)
        except ConfigError as error:
            raise PeerUnreachable(who, str(error)) from error
        # A session per link: its connector holds nothing but this connection, and goes with it.
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with asyncio.timeout(timeout_s):
                channel: Channel = await _upgrade(session, host, port, address, path_for(self._credentials.psk))
                if self._line is not None:
                    channel = self._line.over(channel)
                try:
                    return await initiate(channel, self._credentials, expect=expect)
                except BaseException:
                    channel.abort()
                    await channel.aclose()
                    raise
        except BaseException as error:
            await session.close()
            translated = _translate_dial(error, who, address, timeout_s)
            if translated is error:
                raise
            raise translated from error

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """See Network.listen."""
        host, port = split_address(address)
        listener = _WebSocketListener(
            self._credentials,
            self._gate,
            on_link,
            lambda nonce, local_host: self.on_nonce(nonce, local_host),
            self._handshake_timeout_s,
            self._max_unauthenticated,
            self._line,
        )
        await listener.bind(host, port)
        return listener


class _Server(web.Server):
    """Tells the listener of connections as they come and go, before anybody has sent a byte."""

    listener: _WebSocketListener

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.listener.connection_made(handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.listener.connection_lost(handler)


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection without a proven identity; ``since`` is time of the event loop."""

    host: str
    since: float
    timer: asyncio.TimerHandle
    transport: asyncio.Transport


class _WebSocketListener:
    def __init__(
        self,
        credentials: Credentials,
        gate: Gate,
        on_link: OnLink,
        on_nonce: Callable[[bytes, str], None],
        handshake_timeout_s: float,
        max_unauthenticated: int,
        line: EmulatedLine | None,
    ) -> None:
        self._credentials = credentials
        self._refused = credentials.refused
        self._gate = gate
        self._on_link = on_link
        self._on_nonce = on_nonce
        self._handshake_timeout_s = handshake_timeout_s
        self._max_unauthenticated = max_unauthenticated
        self._line = line
        self._unauthenticated: dict[RequestHandler, _Stranger] = {}
        """The one that came first is first."""
        self._hosts: dict[RequestHandler, str] = {}
        self._links: set[SealedLink] = set()
        self._server = _Server(self._handle, access_log=None, lingering_time=0)
        self._server.listener = self
        self._socket_server: asyncio.Server | None = None
        self._address = ""

    @property
    def address(self) -> str:
        return self._address

    async def bind(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._socket_server = await loop.create_server(lambda: _Entrance(self), host, port, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"another program listens on {join_address(host, port)}: choose another port"
                ) from error
            raise ConfigError(f"cannot listen on {join_address(host, port)}: {_reason(error)}") from error
        bound = self._socket_server.sockets[0].getsockname()
        self._address = join_address(bound[0], bound[1])

    def refuses(self, transport: asyncio.Transport) -> bool:
        """Whether to hang up on a connection that has just been made; asked once."""
        host = _host_of(transport)
        refusal = self._gate.refuse_host(host)
        if refusal is None and len(self._unauthenticated) >= self._max_unauthenticated and not self._make_room(host):
            refusal = "too-many-handshakes"
        if refusal is None:
            return False
        self._refused[refusal] += 1
        return True

    def make_protocol(self) -> asyncio.Protocol:
        """What serves a connection that is not refused."""
        handler = self._server()
        if self._credentials.psk is None:
            return handler
        return _Doorkeeper(handler, f"GET {path_for(self._credentials.psk)} HTTP/1.1\r\n".encode(), self._refused)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        host = _host_of(transport)
        self._gate.connected(host)
        self._hosts[handler] = host
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._handshake_timeout_s, self._handshake_timed_out, handler, transport)
        self._unauthenticated[handler] = _Stranger(host_key(host), loop.time(), timer, transport)

    def connection_lost(self, handler: RequestHandler) -> None:
        self.authenticated(handler)
        host = self._hosts.pop(handler, None)
        if host is not None:
            self._gate.disconnected(host)

    def authenticated(self, handler: RequestHandler) -> None:
        """The connection has a proven identity, or is gone: it no longer counts as a stranger."""
        stranger = self._unauthenticated.pop(handler, None)
        if stranger is not None:
            stranger.timer.cancel()
            self._gate.proven(self._hosts[handler])

    async def aclose(self) -> None:
        if self._socket_server is None:
            return
        self._socket_server.close()
        self._socket_server = None
        for stranger in self._unauthenticated.values():
            stranger.timer.cancel()
        await asyncio.gather(*(link.aclose() for link in list(self._links)))
        await self._server.shutdown(CLOSE_TIMEOUT_S)

    def _make_room(self, host: str) -> bool:
        """Hangs up on one stranger for the sake of another, unless nobody has more of them or takes longer."""
        num_of = Counter(stranger.host for stranger in self._unauthenticated.values())
        largest, num_most = num_of.most_common(1)[0]
        is_greedy = num_most > num_of[host_key(host)] + 1
        late = asyncio.get_running_loop().time() - PATIENCE_S
        for handler, stranger in self._unauthenticated.items():
            if stranger.host == largest if is_greedy else stranger.since < late:
                self._refused["displaced-handshake"] += 1
                self.authenticated(handler)
                stranger.transport.abort()
                return True
        return False

    def _handshake_timed_out(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        self._refused[str(LinkRefusal.HANDSHAKE_TIMEOUT)] += 1
        self.authenticated(handler)
        transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse(compress=False)
        nonce = _nonce_of(request)
        if request.path == path_for(self._credentials.psk) and nonce is not None:
            self._on_nonce(nonce, str(request.get_extra_info("sockname", ("",))[0]))
            taken = web.Response(status=204)
            taken.force_close()
            return taken
        if request.path != path_for(self._credentials.psk) or not ws.can_prepare(request):
            self._refused[str(LinkRefusal.MALFORMED)] += 1
            return web.Response(status=404, text="This port speaks the fusion-node data plane.\n")
        await ws.prepare(request)
        if request.transport is None:
            return ws
        remote = request.transport.get_extra_info("peername")
        channel: Channel = _WebSocketChannel(
            request.transport, join_address(remote[0], remote[1]) if remote else "unknown", request.protocol
        )
        if self._line is not None:
            channel = self._line.over(channel)
        host = self._hosts.get(request.protocol, "")
        try:
            link = await respond(channel, self._credentials)
        except FusionError as error:
            self._gate.report_failure(None, host, error)
            # A version mismatch concerns the operator; the rest is what strangers do to any open port.
            log = _log.warning if isinstance(error, ProtocolVersionMismatch) else _log.debug
            log("handshake refused", remote=channel.remote_address, error=type(error).__name__, why=str(error))
            await channel.aclose()
            return ws
        self.authenticated(request.protocol)
        refusal = self._gate.refuse_peer(link.peer, host)
        if refusal is not None:
            self._refused[refusal] += 1
            await link.aclose()
            return ws
        self._links.add(link)
        try:
            await self._on_link(link)
        finally:
            self._links.discard(link)
            await link.aclose()
        return ws


class _Entrance(asyncio.Protocol):
    """Hangs up on who is refused before the HTTP server hears of it, which would start a task and log its failure."""

    def __init__(self, listener: _WebSocketListener) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = cast(asyncio.Transport, transport)  # of a TCP server
        if self._listener.refuses(tcp):
            tcp.abort()
            return
        protocol = self._listener.make_protocol()
        tcp.set_protocol(protocol)
        protocol.connection_made(tcp)


class _Doorkeeper(asyncio.Protocol):
    """Stands in front of the HTTP server until the first line has come, and shows it only to who knows that line.

    A line is judged when it is as long as it should be, and not character by character: whoever could see after which
    one the connection closes would find the path by trying.
    """

    def __init__(self, handler: RequestHandler, first_line: bytes, refused: Counter[str]) -> None:
        self._handler = handler
        self._first_line = first_line
        self._refused = refused
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of a TCP server
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None  # noqa: S101  # set above
        self._received += data
        if len(self._received) < len(self._first_line):
            return
        if not hmac.compare_digest(self._received[: len(self._first_line)], self._first_line):
            self._refused[str(LinkRefusal.OTHER_SWARM)] += 1
            self._transport.abort()
            return
        self._transport.set_protocol(self._handler)
        self._handler.data_received(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._handler.connection_lost(exc)


class _WebSocketChannel(asyncio.BufferedProtocol):
    """A Channel that has taken an upgraded connection over from aiohttp, as client or as server.

    Args:
        transport: of the connection; from now on this is its protocol.
        before: the protocol that it had. It still learns that the connection is lost, and cleans up.
        session, response: the client's, which end with the connection; None for the server.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        remote_address: str,
        before: asyncio.BaseProtocol,
        session: aiohttp.ClientSession | None = None,
        response: aiohttp.ClientResponse | None = None,
    ) -> None:
        self._response = response  # which would close the connection if it were collected
        self._transport = transport
        self._remote_address = remote_address
        self._before = before
        self._session = session
        self._is_client = session is not None
        self._decoder = Decoder(expect_masked=not self._is_client, max_message_bytes=MAX_SEGMENT_BYTES)
        self._receiver: ChannelReceiver | None = None
        self._is_full = False
        self._paused = False
        self._closed = False
        self._lost = asyncio.Event()
        # What asyncio holds is what the kernel has not taken: full as soon as there is anything.
        transport.set_write_buffer_limits(high=0)
        self._set_tcp_option("TCP_NODELAY", 1)
        self.limit_unsent(FIRST_UNSENT_BYTES)
        transport.set_protocol(self)

    # Channel

    @property
    def remote_address(self) -> str:
        return self._remote_address

    @property
    def path(self) -> PathKind:
        return PathKind.DIRECT

    def set_receiver(self, receiver: ChannelReceiver) -> None:
        self._receiver = receiver
        if self._closed:
            receiver.channel_closed(self._closed_error())

    def write(self, data: bytes) -> bool:
        if self._closed:
            raise self._closed_error()
        self._transport.write(encode(BINARY, data, masked=self._is_client))
        return not self._is_full

    def limit_unsent(self, num_bytes: int) -> None:
        """See LimitsUnsent. What the kernel takes beyond what it sends, where it has that option."""
        self._set_tcp_option("TCP_NOTSENT_LOWAT", num_bytes)

    def pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._deliver()
            if not self._paused:
                self._transport.resume_reading()

    def abort(self) -> None:
        self._transport.abort()

    async def aclose(self) -> None:
        if not self._closed:
            self._transport.write(encode(Opcode.CLOSE, _CLOSE_NORMALLY, masked=self._is_client))
            self._closed = True
            self._paused = False
            self._transport.resume_reading()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._lost.wait()
        self._transport.abort()
        await self._lost.wait()
        if self._response is not None:
            self._response.close()
        if self._session is not None:
            await self._session.close()

    # asyncio.BufferedProtocol

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._decoder.written(nbytes)
        self._deliver()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._receiver is not None and not self._closed:
            self._receiver.channel_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._closed_error())
        self._lost.set()
        self._before.connection_lost(exc)

    def _set_tcp_option(self, name: str, value: int) -> None:
        tcp = self._transport.get_extra_info("socket")
        option = getattr(socket, name, _TCP_OPTIONS.get((name, sys.platform)))
        if tcp is not None and option is not None:
            with contextlib.suppress(OSError):
                tcp.setsockopt(socket.IPPROTO_TCP, option, value)

    def _deliver(self) -> None:
        try:
            while not self._paused:
                message = self._decoder.next()
                if message is None:
                    return
                opcode, data = message
                if opcode is not BINARY:
                    self._control(opcode, data)
                elif not self._closed and self._receiver is not None:
                    self._receiver.message_received(data)
        except WireError as error:
            self._transport.abort()
            self._end(RemoteProtocolError(self._remote_address, str(error)))

    def _control(self, opcode: Opcode, data: memoryview) -> None:
        # A peer that pings and does not read the pongs gets no more of them.
        if opcode is Opcode.PING and not self._closed and not self._is_full:
            self._transport.write(encode(Opcode.PONG, data, masked=self._is_client))
        elif opcode is Opcode.CLOSE:
            if not self._closed:
                self._transport.write(encode(Opcode.CLOSE, data[:2], masked=self._is_client))
            self._transport.close()
            self._end(self._closed_error())

    def _end(self, error: PeerError) -> None:
        if not self._closed:
            self._closed = True
            if self._receiver is not None:
                self._receiver.channel_closed(error)

    def _closed_error(self) -> PeerClosed:
        return PeerClosed(self._remote_address, f"{self._remote_address} closed the connection")


async def _upgrade(session: aiohttp.ClientSession, host: str, port: int, address: str, path: str) -> _WebSocketChannel:
    """The client's side of the opening handshake (RFC 6455 §4.1)."""
    key = base64.b64encode(secrets.token_bytes(16)).decode()
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    response = await session.get(
        URL.build(scheme="http", host=host, port=port, path=path),
        headers=headers,
        allow_redirects=False,
        read_until_eof=False,
    )
    digest = hashlib.sha1(key.encode() + _ACCEPT_GUID, usedforsecurity=False).digest()
    accepted = response.headers.get("Sec-WebSocket-Accept") == base64.b64encode(digest).decode()
    connection = response.connection
    if response.status != 101 or not accepted or connection is None:
        response.close()
        if path != PATH and response.status == 404:
            raise PeerUnreachable(address, f"{address} is not in the private swarm of this key")
        raise RemoteProtocolError(address, f"{address} does not speak the data plane: HTTP status {response.status}")
    if connection.transport is None or connection.protocol is None:
        raise PeerUnreachable(address, f"{address} hung up during the handshake")
    return _WebSocketChannel(connection.transport, address, connection.protocol, session, response)


def _host_of(transport: asyncio.BaseTransport) -> str:
    remote = transport.get_extra_info("peername")
    return str(remote[0]) if remote else ""


def _nonce_of(request: web.BaseRequest) -> bytes | None:
    """What was left here; None for any other request, also one with a nonce of another length."""
    digits = request.headers.get(NONCE_HEADER, "")
    if len(digits) != 2 * NONCE_BYTES:
        return None
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None


def path_for(psk: bytes | None) -> str:
    """The path of the opening request; that of a private swarm only its members know."""
    if psk is None:
        return PATH
    return f"/{hashlib.blake2b(_PATH_DOMAIN, key=psk, digest_size=16).hexdigest()}"


def split_address(address: str) -> tuple[str, int]:
    """Reads ``host:port``, with the host of IPv6 in brackets.

    Raises:
        ConfigError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{address!r} is not an address: write HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _translate_dial(error: BaseException, who: str, address: str, timeout_s: float) -> BaseException:
    match error:
        case TimeoutError():
            return PeerUnreachable(who, f"{address} did not answer within {timeout_s:g} s")
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return PeerUnreachable(
                who, f"{address} hung up without an answer: it belongs to another (private) swarm, or is overloaded"
            )
        case aiohttp.ClientError() | OSError() | ValueError():
            is_refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
            return PeerUnreachable(who, f"cannot connect to {address}: {_reason(error)}", is_refused=is_refused)
        case _:
            return error


def _reason(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return reason or type(error).__name__
