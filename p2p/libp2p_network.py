"""Sealed links over libp2p streams: the data plane where no WebSocket leads, through relays and holes in NATs.

The stream runs over whichever connection the control plane's host has with the peer, or makes one. Inside it is the
same handshake as in a WebSocket, so that identity and secrecy do not rest on what is below: a relay, and the library,
see sealed segments.

Addresses are the multiaddrs of p2p.addresses, and ``/p2p/PEER``, which stands for whichever connection there is. A
direct connection is taken wherever there is one, whatever the address says. One listens on an address with the own peer
id: the library's host listens, and this network only accepts the streams or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import structlog

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    PeerClosed,
    PeerError,
    PeerUnreachable,
    ProtocolVersionMismatch,
)
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import ControlNode, ControlPlaneDown, IncomingStream
from p2p.identity import Identity, public_key_of, short
from p2p.link_emulation import EmulatedLine
from p2p.noise_core import LinkRefusal
from p2p.records import PROTOCOL_VERSION
from p2p.sealed import Credentials, SealedLink, initiate, respond
from p2p.seam import Channel, ChannelReceiver, Gate, Link, Listener, OnLink, OpenGate, PathKind
from p2p.stream_pipe import LENGTH_BYTES, StreamPipe

HIGH_WATER_BYTES = 128 * 1024
"""Two segments wait here at most, and as many again are in the library's hands: what comes after them may be more
urgent."""

MAX_GIVEN_AT_ONCE_BYTES = 256 * 1024
"""To the receiver in one turn of the event loop; opening so much takes half a millisecond."""

HANDSHAKE_TIMEOUT_S = 10.0
"""As in p2p.websocket. Strangers were authenticated by libp2p already, so no more bounds are needed than its own."""

CLOSE_TIMEOUT_S = 1.5
"""How long a closing side waits for the thread, which gives the peer a second."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class StreamHost(Protocol):
    """What this network needs of the owner of the libp2p host; p2p.discovery.Discovery is one."""

    on_stream: Callable[[IncomingStream], None] | None
    """Called in the event loop with every stream that another peer opens; None while nobody wants them."""
    on_down: list[Callable[[], None]]
    """Each is called in the event loop when the host's thread has ended."""

    @property
    def addresses(self) -> list[str]: ...

    async def call(self, command: Callable[[ControlNode], Awaitable[T]]) -> T: ...


class Libp2pNetwork:
    """A Network (p2p.seam) over a libp2p host that somebody else runs.

    Args:
        identity: that of the host, too.
        host: may be started later.
        psk, gate, version, line: as those of WebSocketNetwork.
    """

    def __init__(
        self,
        identity: Identity,
        host: StreamHost,
        *,
        psk: bytes | None = None,
        gate: Gate | None = None,
        version: int = PROTOCOL_VERSION,
        line: EmulatedLine | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._peer = identity.peer_id
        self._line = line
        self._host = host
        self._credentials = Credentials(identity, self.refused, psk, version)
        self._gate = gate or OpenGate()
        self._channels: set[_StreamChannel] = set()
        self._listener: _StreamListener | None = None
        host.on_down.append(self._went_down)

    def path_of(self, address: str) -> PathKind:
        """See Network.path_of."""
        return PathKind.RELAYED if "/p2p-circuit/" in address else PathKind.STREAM

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        """See Network.dial. The peer that the address names is expected when ``expect`` is None."""
        try:
            peer, via = _read(address)
        except ConfigError as error:
            raise PeerUnreachable(expect or address, str(error)) from error
        pipe = StreamPipe()
        stream = _StreamChannel(pipe, address, self._channels)
        channel = self.over_line(stream)
        try:
            async with asyncio.timeout(timeout_s):
                opened = await self._host.call(lambda node: node.open_stream(peer, via, pipe))
                stream.opened(opened.path, opened.remote_address)
                return await initiate(channel, self._credentials, expect=expect or peer)
        except BaseException as error:
            channel.abort()
            match error:
                case TimeoutError():
                    raise PeerUnreachable(peer, f"{address} did not answer within {timeout_s:g} s") from error
                case ControlPlaneDown() | PeerClosed():
                    raise PeerUnreachable(peer, f"cannot reach {short(peer)} over libp2p: {error}") from error
            raise

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """See Network.listen. There is one listener at most."""
        own = [*self._host.addresses, f"/p2p/{self._peer}"]
        if address not in own:
            raise ConfigError(f"{address!r} is no libp2p address of this process, which are {', '.join(own)}")
        if self._listener is not None:
            raise AddressInUse("streams are accepted already")
        listener = _StreamListener(self, own[0], on_link)
        self._listener = listener
        self._host.on_stream = listener.accept
        await self._host.call(lambda node: node.accept_streams(True))
        return listener

    def over_line(self, stream: _StreamChannel) -> Channel:
        """The channel that a link runs over."""
        return stream if self._line is None else self._line.over(stream)

    def _went_down(self) -> None:
        """The thread has ended: no stream of it lives, whether or not it could still say so."""
        for channel in list(self._channels):
            channel.thread_ended()


class _StreamListener:
    def __init__(self, network: Libp2pNetwork, address: str, on_link: OnLink) -> None:
        self._network = network
        self._address = address
        self._on_link = on_link
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: set[SealedLink] = set()

    @property
    def address(self) -> str:
        return self._address

    def accept(self, stream: IncomingStream) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        network = self._network
        if network._listener is not self:
            return
        network._listener = None
        network._host.on_stream = None
        with contextlib.suppress(ControlPlaneDown):
            await network._host.call(lambda node: node.accept_streams(False))
        await asyncio.gather(*(link.aclose() for link in list(self._links)))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, stream: IncomingStream) -> None:
        network = self._network
        refused, gate = network.refused, network._gate
        opened = _StreamChannel(stream.pipe, stream.remote_address, network._channels)
        opened.opened(stream.path, stream.remote_address)
        channel = network.over_line(opened)
        # Behind a relay many share the host; and the connection below has been let in by whoever guards the library's.
        host = "" if stream.path is PathKind.RELAYED else stream.remote_address.rpartition(":")[0]
        refusal = gate.refuse_stream(stream.peer)
        if refusal is not None:
            refused[refusal] += 1
            return channel.abort()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                link = await respond(channel, network._credentials)
        except TimeoutError:
            refused[str(LinkRefusal.HANDSHAKE_TIMEOUT)] += 1
            return channel.abort()
        except FusionError as error:
            gate.report_failure(stream.peer, host, error)
            log = _log.warning if isinstance(error, ProtocolVersionMismatch) else _log.debug
            log("handshake refused", remote=channel.remote_address, error=type(error).__name__, why=str(error))
            return await channel.aclose()
        except BaseException:
            channel.abort()
            raise
        finally:
            gate.stream_closed(stream.peer)
        refusal = gate.refuse_peer(link.peer, host)
        if refusal is not None:
            refused[refusal] += 1
            return await link.aclose()
        self._links.add(link)
        try:
            await self._on_link(link)
        finally:
            self._links.discard(link)
            await link.aclose()


class _StreamChannel:
    """A Channel over a pipe whose other end a stream of the library is at, or will be.

    Args:
        known: where the channel is as long as it is open.
    """

    def __init__(self, pipe: StreamPipe, remote_address: str, known: set[_StreamChannel]) -> None:
        self._pipe = pipe
        self._remote_address = remote_address
        self._path = PathKind.STREAM
        self._known = known
        self._loop = asyncio.get_running_loop()
        self._receiver: ChannelReceiver | None = None
        self._paused = False
        self._is_full = False
        self._is_scheduled = False
        self._closed = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        known.add(self)
        pipe.wake_loop = self._wake_from_thread

    def opened(self, path: PathKind, remote_address: str) -> None:
        """The stream is there."""
        self._path = path
        self._remote_address = remote_address
        self._schedule()  # what came before anybody was told

    def thread_ended(self) -> None:
        """The host's thread is no more."""
        if self._pipe.ended is None:
            self._pipe.ended = PeerClosed(self._remote_address, "the libp2p part of this program stopped")
        self._pipe.wake_thread = _nobody  # which would keep its sockets from the collector
        self._schedule()

    # Channel

    @property
    def remote_address(self) -> str:
        return self._remote_address

    @property
    def path(self) -> PathKind:
        return self._path

    def set_receiver(self, receiver: ChannelReceiver) -> None:
        self._receiver = receiver
        if self._closed:
            receiver.channel_closed(self._closed_error())
        else:
            self._schedule()

    def write(self, data: bytes) -> bool:
        pipe = self._pipe
        if self._closed or pipe.aborting:
            raise self._closed_error()
        pipe.outgoing.append(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        pipe.put_bytes += LENGTH_BYTES + len(data)
        pipe.wake_thread()
        self._is_full = pipe.waiting_out_bytes > HIGH_WATER_BYTES
        return not self._is_full

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._schedule()

    def abort(self) -> None:
        self._pipe.aborting = True
        self._pipe.wake_thread()
        self._loop.call_soon(self._end, self._closed_error())

    async def aclose(self) -> None:
        pipe = self._pipe
        pipe.closing = True
        pipe.wake_thread()
        self._closed = True  # and whoever closes need not be told
        if pipe.ended is None and not pipe.aborting:
            await asyncio.wait((self._over,), timeout=CLOSE_TIMEOUT_S)
        if pipe.ended is None:
            pipe.aborting = True
            pipe.wake_thread()
        self._known.discard(self)

    # From the thread.

    def _wake_from_thread(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._deliver)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        # First, so that whatever the thread adds from now on wakes us again.
        self._is_scheduled = False
        pipe, receiver = self._pipe, self._receiver
        before, given = pipe.waiting_in_bytes, 0
        is_cut = self._closed or pipe.aborting
        while pipe.incoming and not is_cut and not self._paused and receiver is not None:
            message = pipe.incoming.popleft()
            given += len(message)
            pipe.given_bytes += len(message)
            receiver.message_received(message)
            receiver, is_cut = self._receiver, self._closed or pipe.aborting
            if given > MAX_GIVEN_AT_ONCE_BYTES:
                self._schedule()
                break
        if before > MAX_GIVEN_AT_ONCE_BYTES:
            pipe.wake_thread()  # it may wait for room
        if self._is_full and pipe.waiting_out_bytes <= HIGH_WATER_BYTES // 2:
            self._is_full = False
            if receiver is not None and not self._closed:
                receiver.channel_writable()
        if pipe.ended is not None:
            if not self._over.done():
                self._over.set_result(None)
            if not pipe.incoming or self._closed:
                self._end(pipe.ended)
                self._known.discard(self)

    def _end(self, error: PeerError) -> None:
        if not self._closed:
            self._closed = True
            if self._receiver is not None:
                self._receiver.channel_closed(error)

    def _closed_error(self) -> PeerClosed:
        return PeerClosed(self._remote_address, f"{self._remote_address} closed the connection")


def _nobody() -> None: ...


def _read(address: str) -> tuple[PeerId, PeerAddress | None]:
    """The peer, and how to get there; None for whichever connection there is."""
    match address.split("/"):
        case ["", "p2p", peer]:
            try:
                public_key_of(peer)
            except ValueError as error:
                raise ConfigError(f"{peer!r} is not the peer id of an Ed25519 key") from error
            return PeerId(peer), None
    found = PeerAddress.parse(address)
    return found.peer, found
