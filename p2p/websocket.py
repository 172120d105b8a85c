"""Sealed links over WebSocket (RFC 6455): the data plane on real networks.

One path, binary messages, no compression, no certificates: identity and secrecy come from the Noise handshake inside,
so that a link passes HTTP proxies without having to trust them. Every message is one handshake message or one sealed
segment, at most 64 KiB, which also bounds what a stranger can make us buffer.

Before a connection has proven an identity it costs little and not for long: at most MAX_UNAUTHENTICATED of them exist,
each for at most HANDSHAKE_TIMEOUT_S, counted from the TCP accept, whatever it sends or does not send.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

import aiohttp
import structlog
from aiohttp import WSMsgType, web
from aiohttp.web_protocol import RequestHandler
from yarl import URL

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    PeerClosed,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from p2p.identity import Identity
from p2p.noise_core import MAX_SEGMENT_BYTES, LinkRefusal
from p2p.records import PROTOCOL_VERSION
from p2p.sealed import SealedLink, initiate, respond
from p2p.seam import Link, Listener, OnLink

PATH = "/fusion"

HANDSHAKE_TIMEOUT_S = 10.0
"""From the TCP accept to a proven identity. Two round trips and 5 ms of CPU; 10 s is a very bad satellite link."""

MAX_UNAUTHENTICATED = 64
"""Connections per listener without a proven identity. 64 of them can hold 64 x 128 KiB of buffers."""

CLOSE_TIMEOUT_S = 1.0
"""How long a closing side waits for the other's close frame. A frozen peer never answers."""

_MAX_MESSAGE_BYTES = MAX_SEGMENT_BYTES + 1
"""aiohttp refuses a message that is as long as its limit."""

_log = structlog.get_logger(__name__)


class WebSocketNetwork:
    """Dials and listens with aiohttp, in the running event loop.

    Args:
        identity: proven to every peer.
        version: of the protocol; another than the default only in tests.
        handshake_timeout_s, max_unauthenticated: see the constants.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        version: int = PROTOCOL_VERSION,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._identity = identity
        self._version = version
        self._handshake_timeout_s = handshake_timeout_s
        self._max_unauthenticated = max_unauthenticated

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
                ws = await session.ws_connect(
                    URL.build(scheme="ws", host=host, port=port, path=PATH),
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                    max_msg_size=_MAX_MESSAGE_BYTES,
                )
                channel = _WebSocketChannel(ws, address, session)
                try:
                    return await initiate(channel, self._identity, self.refused, expect=expect, version=self._version)
                except BaseException:
                    channel.abort()
                    await channel.aclose()
                    raise
        except BaseException as error:
            await session.close()
            raise _translate_dial(error, who, address, timeout_s) from error

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """See Network.listen."""
        host, port = split_address(address)
        listener = _WebSocketListener(
            self._identity, self.refused, self._version, on_link, self._handshake_timeout_s, self._max_unauthenticated
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
        self.listener.authenticated(handler)


class _WebSocketListener:
    def __init__(
        self,
        identity: Identity,
        refused: Counter[str],
        version: int,
        on_link: OnLink,
        handshake_timeout_s: float,
        max_unauthenticated: int,
    ) -> None:
        self._identity = identity
        self._refused = refused
        self._version = version
        self._on_link = on_link
        self._handshake_timeout_s = handshake_timeout_s
        self._max_unauthenticated = max_unauthenticated
        self._unauthenticated: dict[RequestHandler, asyncio.TimerHandle] = {}
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
            self._socket_server = await loop.create_server(self._server, host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"another program listens on {join_address(host, port)}: choose another port"
                ) from error
            raise ConfigError(f"cannot listen on {join_address(host, port)}: {_reason(error)}") from error
        bound = self._socket_server.sockets[0].getsockname()
        self._address = join_address(bound[0], bound[1])

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        if len(self._unauthenticated) >= self._max_unauthenticated:
            self._refused["too-many-handshakes"] += 1
            transport.abort()
            return
        self._unauthenticated[handler] = asyncio.get_running_loop().call_later(
            self._handshake_timeout_s, self._handshake_timed_out, handler, transport
        )

    def authenticated(self, handler: RequestHandler) -> None:
        """The connection has a proven identity, or is gone: it no longer counts as a stranger."""
        timer = self._unauthenticated.pop(handler, None)
        if timer is not None:
            timer.cancel()

    async def aclose(self) -> None:
        if self._socket_server is None:
            return
        self._socket_server.close()
        self._socket_server = None
        for timer in self._unauthenticated.values():
            timer.cancel()
        await asyncio.gather(*(link.aclose() for link in list(self._links)))
        await self._server.shutdown(CLOSE_TIMEOUT_S)

    def _handshake_timed_out(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        self._unauthenticated.pop(handler, None)
        self._refused[str(LinkRefusal.HANDSHAKE_TIMEOUT)] += 1
        transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        ws = web.WebSocketResponse(timeout=CLOSE_TIMEOUT_S, compress=False, max_msg_size=_MAX_MESSAGE_BYTES)
        if request.path != PATH or not ws.can_prepare(request):
            self._refused[str(LinkRefusal.MALFORMED)] += 1
            return web.Response(status=404, text="This port speaks the fusion-node data plane.\n")
        await ws.prepare(request)
        remote = request.transport.get_extra_info("peername") if request.transport is not None else None
        channel = _WebSocketChannel(ws, join_address(remote[0], remote[1]) if remote else "unknown")
        try:
            link = await respond(channel, self._identity, self._refused, version=self._version)
        except FusionError as error:
            # A version mismatch concerns the operator; the rest is what strangers do to any open port.
            log = _log.warning if isinstance(error, ProtocolVersionMismatch) else _log.debug
            log("handshake refused", remote=channel.remote_address, error=type(error).__name__, why=str(error))
            await channel.aclose()
            return ws
        self.authenticated(request.protocol)
        self._links.add(link)
        try:
            await self._on_link(link)
        finally:
            self._links.discard(link)
            await link.aclose()
        return ws


class _WebSocketChannel:
    """A Channel over either end of an aiohttp WebSocket."""

    def __init__(
        self,
        ws: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        remote_address: str,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._ws = ws
        self._remote_address = remote_address
        self._session = session
        self._socket: Any = ws.get_extra_info("socket")
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def remote_address(self) -> str:
        return self._remote_address

    def write(self, data: bytes) -> Awaitable[None] | None:
        # Without compression aiohttp hands the bytes to the transport before it first suspends, and suspends only to
        # wait for room. One step of its coroutine is therefore a write without a task; the rest is the waiting.
        sending = self._ws.send_bytes(data)
        try:
            waiting_for = sending.send(None)
        except StopIteration:
            return None
        except (aiohttp.ClientError, OSError) as error:
            raise self._closed() from error
        return _RestOfWrite(sending, waiting_for, self)

    async def read(self) -> bytes:
        message = await self._ws.receive()
        if message.type is WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if message.type is WSMsgType.TEXT:
            raise RemoteProtocolError(self._remote_address, "a text message where only binary ones belong")
        if message.type is WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
            raise RemoteProtocolError(self._remote_address, f"WebSocket error {message.data.code}") from message.data
        raise self._closed()

    def abort(self) -> None:
        if self._socket is not None:
            # The transport itself is not public on the client's side; it sees this as a hang-up.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def aclose(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
                await self._ws.close()
        self.abort()
        if self._session is not None:
            await self._session.close()

    def _closed(self) -> PeerClosed:
        return PeerClosed(self._remote_address, f"{self._remote_address} closed the connection")


class _RestOfWrite:
    """Awaits what is left of a coroutine whose first step was taken by hand."""

    def __init__(self, sending: Coroutine[Any, Any, None], waiting_for: object, channel: _WebSocketChannel) -> None:
        self._sending = sending
        self._waiting_for = waiting_for
        self._channel = channel

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            waiting_for = self._waiting_for
            while True:
                try:
                    sent = yield waiting_for
                except BaseException as error:  # noqa: BLE001 - handed on to where it belongs
                    waiting_for = self._sending.throw(error)
                else:
                    waiting_for = self._sending.send(sent)
        except StopIteration:
            return
        except (aiohttp.ClientError, OSError) as error:
            raise self._channel._closed() from error


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
        case aiohttp.WSServerHandshakeError():
            return RemoteProtocolError(who, f"{address} does not speak the data plane: HTTP status {error.status}")
        case aiohttp.ClientError() | OSError() | ValueError():
            return PeerUnreachable(who, f"cannot connect to {address}: {_reason(error)}")
        case _:
            return error


def _reason(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return reason or type(error).__name__
