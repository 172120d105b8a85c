"""A Link over any Channel: the handshake, the sealing and the order of what is sent.

Everything that the transports have in common is here, so that the in-memory twin exercises the same code, with really
encrypted bytes, as the WebSocket. The cryptography is in p2p.noise_core.

A frame is sealed when it is posted, not when it is written: the payload is then free for its owner, and the cost is the
same. While the transport has room, a posted frame is written in the same call, without waking any task; and a received
one reaches its handler in the call in which the transport read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from fusion_node.errors import (
    LocalProtocolError,
    PeerClosed,
    PeerError,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p.identity import Identity, short
from p2p.messages import AnyMessage, Frame, decode_message, encode_message
from p2p.noise_core import Handshake, LinkKeys, LinkRefusal, LinkRefused, Opener, Sealer
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Channel, LinkCounters, PathKind

MAX_INBOX_BYTES = 256 * 1024
"""Payload bytes that wait for ``receive`` before the peer has to wait. Four segments."""

MAX_EARLY_MESSAGES = 4
"""Messages that may wait during the handshake, which has at most two per side."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """With what a network of this process introduces itself.

    Attributes:
        refused: where handshakes and segments that were not accepted are counted, by reason.
        psk: the key of a private swarm, without which nobody is answered.
        version: of the protocol; another than the default only in tests.
    """

    identity: Identity
    refused: Counter[str] = field(default_factory=Counter)
    psk: bytes | None = field(default=None, repr=False)
    version: int = PROTOCOL_VERSION


class SealedLink:
    """The Link of both transports. Construct it with ``initiate`` or ``respond``."""

    def __init__(self, channel: Channel, keys: LinkKeys, refused: Counter[str]) -> None:
        self.counters = LinkCounters()
        self.queued_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._peer = keys.peer
        self._seal = Sealer(keys.sending_key).seal
        self._opener = Opener(keys.receiving_key)
        self._open = self._opener.open
        self._write = channel.write
        self._handler: Callable[[Frame], None] | None = None
        self._inbox: deque[Frame] = deque()
        self._inbox_bytes = 0
        # Resolved when a frame has come or the link has closed.
        self._changed: asyncio.Future[None] | None = None
        self._refusal: RemoteProtocolError | None = None
        self._refused = refused
        self._outbox: deque[bytes] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._num_pumped = 0
        self._drained: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._closed: str | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def remote_address(self) -> str:
        return self._channel.remote_address

    @property
    def path(self) -> PathKind:
        return self._channel.path

    @property
    def unfinished_bytes(self) -> int:
        return 0 if self._closed is not None else self._opener.unfinished_bytes

    def post(self, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """See Link.post."""
        if self._closed is not None:
            raise self._closed_error()
        counters = self.counters
        try:
            for segment in self._seal(encode_message(message), payload):
                counters.bytes_out += len(segment)
                if self._pump is not None:
                    self._outbox.append(segment)
                    self.queued_bytes += len(segment)
                    continue
                if not self._write(segment):
                    self._room.clear()
                    self._pump = self._loop.create_task(self._pump_outbox())
        except (WireError, LinkRefused) as error:
            raise LocalProtocolError(f"a {type(message).__name__} cannot be sent: {error}") from error
        except PeerClosed as error:
            self.abort(str(error))
            raise self._closed_error() from error
        counters.frames_out += 1

    async def drain(self) -> None:
        """See Link.drain."""
        if self._closed is not None:
            raise self._closed_error()
        if self._pump is None:
            return
        done = self._loop.create_future()
        self._drained.append((self._num_pumped + len(self._outbox), done))
        await done

    async def send(self, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """See Link.send."""
        self.post(message, payload)
        if self._pump is not None:
            await self.drain()

    async def serve(self, handler: Callable[[Frame], None]) -> NoReturn:
        """See Link.serve."""
        self._handler = handler
        try:
            while self._inbox:
                handler(self._inbox.popleft())
            self._inbox_bytes = 0
            self._channel.resume_reading()
            while self._closed is None:
                self._changed = self._loop.create_future()
                await self._changed
        finally:
            self._handler = None
        raise self._ending()

    async def receive(self) -> Frame:
        """See Link.receive."""
        while not self._inbox:
            if self._closed is not None:
                raise self._ending()
            self._changed = self._loop.create_future()
            await self._changed
        frame = self._inbox.popleft()
        before, self._inbox_bytes = self._inbox_bytes, self._inbox_bytes - len(frame.payload)
        if self._inbox_bytes <= MAX_INBOX_BYTES < before:
            self._channel.resume_reading()
        return frame

    def message_received(self, data: bytes | memoryview) -> None:
        """See ChannelReceiver."""
        if self._closed is not None:
            return
        counters = self.counters
        counters.bytes_in += len(data)
        try:
            opened = self._open(data)
            if opened is None:
                return
            frame = decode_message(opened)
        except LinkRefused as error:
            self._refuse(error.reason, error)
            return
        except WireError as error:
            self._refuse(LinkRefusal.MALFORMED, error)
            return
        counters.frames_in += 1
        if self._handler is not None:
            self._handler(frame)
            return
        self._inbox.append(frame)
        self._inbox_bytes += len(frame.payload)
        if self._inbox_bytes > MAX_INBOX_BYTES:
            self._channel.pause_reading()
        self._wake()

    def channel_writable(self) -> None:
        """See ChannelReceiver."""
        self._room.set()

    def channel_closed(self, error: PeerError) -> None:
        """See ChannelReceiver."""
        if isinstance(error, RemoteProtocolError):
            self._refuse(LinkRefusal.MALFORMED, error)
        else:
            self._end(str(error))

    def abort(self, why: str = "the link was cut here") -> None:
        """See Link.abort."""
        if self._closed is None:
            self._inbox.clear()
            self._end(why)

    async def aclose(self) -> None:
        """See Link.aclose."""
        if self._closed is None:
            self._inbox.clear()
            self._mark_closed("the link was closed here")
        if self._closing is None:
            self._closing = self._loop.create_task(self._channel.aclose())
        await asyncio.shield(self._closing)

    async def _pump_outbox(self) -> None:
        """Writes what is queued as the transport makes room. Lives only while there is something queued."""
        try:
            while True:
                await self._room.wait()
                while self._drained and self._drained[0][0] <= self._num_pumped:
                    _, done = self._drained.popleft()
                    if not done.done():
                        done.set_result(None)
                if not self._outbox:
                    self._pump = None
                    return
                segment = self._outbox.popleft()
                self.queued_bytes -= len(segment)
                self._num_pumped += 1
                if not self._write(segment):
                    self._room.clear()
        except PeerClosed as error:
            self.abort(str(error))

    def _end(self, why: str) -> None:
        """Closes at once, without waiting for anything. What has been received can still be had."""
        if self._closed is None:
            self._mark_closed(why)
            self._channel.abort()
            self._closing = self._loop.create_task(self._channel.aclose())

    def _mark_closed(self, why: str) -> None:
        self._closed = why
        self._outbox.clear()
        self.queued_bytes = 0
        if self._pump is not None and self._pump is not asyncio.current_task():
            self._pump.cancel()
        while self._drained:
            _, done = self._drained.popleft()
            if not done.done():
                done.set_exception(self._closed_error())
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _ending(self) -> PeerError:
        """Why the link ended; what the peer did wrong is said once."""
        refusal, self._refusal = self._refusal, None
        return refusal or self._closed_error()

    def _closed_error(self) -> PeerClosed:
        return PeerClosed(self._peer, f"the link with peer {short(self._peer)} is closed: {self._closed}")

    def _refuse(self, reason: LinkRefusal, error: Exception) -> None:
        if self._closed is None:
            self._refused[str(reason)] += 1
            message = f"peer {short(self._peer)} broke the protocol ({reason}): {error}"
            self._refusal = RemoteProtocolError(self._peer, message)
            self._refusal.__cause__ = error
            self._end(message)


class _Mailbox:
    """Receives for the handshake, which is sequential and therefore asks for one message after the other."""

    def __init__(self, channel: Channel) -> None:
        self.messages: deque[bytes] = deque()
        self.error: PeerError | None = None
        self._channel = channel
        self._arrived = asyncio.Event()
        channel.set_receiver(self)

    def message_received(self, data: bytes | memoryview) -> None:
        self.messages.append(bytes(data))
        if len(self.messages) >= MAX_EARLY_MESSAGES:
            self._channel.pause_reading()
        self._arrived.set()

    def channel_writable(self) -> None:
        pass

    def channel_closed(self, error: PeerError) -> None:
        self.error = error
        self._arrived.set()

    async def get(self) -> bytes:
        while not self.messages:
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            await self._arrived.wait()
        return self.messages.popleft()

    def hand_over(self, link: SealedLink) -> None:
        """What came too early goes to the link, and all that follows."""
        for message in self.messages:
            link.message_received(message)
        self._channel.set_receiver(link)
        if self.error is not None:
            link.channel_closed(self.error)
        else:
            self._channel.resume_reading()


async def initiate(channel: Channel, credentials: Credentials, *, expect: PeerId | None) -> SealedLink:
    """The dialling side's handshake. The caller bounds its duration, and closes the channel when this raises.

    Raises:
        PeerUnreachable: the other side hung up.
        ProtocolVersionMismatch: it speaks another version.
        RemoteProtocolError: it is somebody else, or does not follow the protocol.
    """
    handshake = _handshake(credentials, initiator=True, expect=expect)
    mailbox = _Mailbox(channel)
    channel.write(handshake.start())
    return await _finish(channel, mailbox, handshake, credentials.refused, expect)


async def respond(channel: Channel, credentials: Credentials) -> SealedLink:
    """The accepting side's handshake; as ``initiate``."""
    handshake = _handshake(credentials, initiator=False, expect=None)
    return await _finish(channel, _Mailbox(channel), handshake, credentials.refused, None)


def _handshake(credentials: Credentials, *, initiator: bool, expect: PeerId | None) -> Handshake:
    return Handshake(
        credentials.identity,
        initiator=initiator,
        static_private=secrets.token_bytes(32),
        expect=expect,
        psk=credentials.psk,
        version=credentials.version,
    )


async def _finish(
    channel: Channel, mailbox: _Mailbox, handshake: Handshake, refused: Counter[str], expect: PeerId | None
) -> SealedLink:
    who = expect or channel.remote_address
    try:
        while handshake.keys is None:
            answer = handshake.receive(await mailbox.get())
            if answer:
                channel.write(answer)  # a channel always takes a message; three of them fill none
    except LinkRefused as error:
        refused[str(error.reason)] += 1
        if error.reply:
            with contextlib.suppress(PeerClosed):
                channel.write(error.reply)
        if error.reason is LinkRefusal.OTHER_SWARM:  # a mistake, not a breach of the protocol
            raise PeerUnreachable(who, f"peer at {channel.remote_address}: {error}") from error
        if error.reason is LinkRefusal.WRONG_VERSION:
            raise ProtocolVersionMismatch(who, f"peer at {channel.remote_address}: {error}") from error
        raise RemoteProtocolError(who, f"peer at {channel.remote_address}, {error.reason}: {error}") from error
    except RemoteProtocolError:
        refused[str(LinkRefusal.MALFORMED)] += 1
        raise
    except PeerClosed as error:
        hint = "" if handshake.was_answered else ": it belongs to another (private) swarm, or is overloaded"
        raise PeerUnreachable(who, f"{channel.remote_address} hung up during the handshake{hint}") from error
    link = SealedLink(channel, handshake.keys, refused)
    mailbox.hand_over(link)
    return link
