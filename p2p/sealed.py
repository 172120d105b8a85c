"""A Link over any Channel: the handshake, the sealing and the order of what is sent.

Everything that the transports have in common is here, so that the in-memory twin exercises the same code, with really
encrypted bytes, as the WebSocket. The cryptography is in p2p.noise_core.

A frame is sealed when it is posted, not when it is written: the payload is then free for its owner, and the cost is the
same. While the transport has room, a posted frame is written in the same call, without waking any task.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Awaitable

from fusion_node.errors import (
    LocalProtocolError,
    PeerClosed,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p.identity import Identity, short
from p2p.messages import AnyMessage, Frame, decode_message, encode_message
from p2p.noise_core import Handshake, LinkKeys, LinkRefusal, LinkRefused, Opener, Sealer
from p2p.seam import Channel, LinkCounters


class SealedLink:
    """The Link of both transports. Construct it with ``initiate`` or ``respond``."""

    def __init__(self, channel: Channel, keys: LinkKeys, refused: Counter[str]) -> None:
        self.counters = LinkCounters()
        self.queued_bytes = 0
        self._channel = channel
        self._peer = keys.peer
        self._seal = Sealer(keys.sending_key).seal
        self._open = Opener(keys.receiving_key).open
        self._read = channel.read
        self._write = channel.write
        self._refused = refused
        self._outbox: deque[bytes] = deque()
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
                waiting = self._write(segment)
                if waiting is not None:
                    self._pump = asyncio.get_running_loop().create_task(self._pump_outbox(waiting))
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
        done = asyncio.get_running_loop().create_future()
        self._drained.append((self._num_pumped + len(self._outbox), done))
        await done

    async def send(self, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """See Link.send."""
        self.post(message, payload)
        if self._pump is not None:
            await self.drain()

    async def receive(self) -> Frame:
        """See Link.receive."""
        counters = self.counters
        try:
            while self._closed is None:
                segment = await self._read()
                counters.bytes_in += len(segment)
                opened = self._open(segment)
                if opened is not None:
                    frame = decode_message(opened)
                    counters.frames_in += 1
                    return frame
        except LinkRefused as error:
            raise self._refuse(error.reason, str(error)) from error
        except WireError as error:
            raise self._refuse(LinkRefusal.MALFORMED, str(error)) from error
        except RemoteProtocolError as error:
            raise self._refuse(LinkRefusal.MALFORMED, str(error)) from error
        except PeerClosed as error:
            self.abort(str(error))
            raise self._closed_error() from error
        raise self._closed_error()

    def abort(self, why: str = "the link was cut here") -> None:
        """Closes at once, without waiting for anything."""
        if self._closed is None:
            self._mark_closed(why)
            self._channel.abort()
            self._closing = asyncio.get_running_loop().create_task(self._channel.aclose())

    async def aclose(self) -> None:
        """See Link.aclose."""
        if self._closing is None:
            self._mark_closed("the link was closed here")
            self._closing = asyncio.get_running_loop().create_task(self._channel.aclose())
        await asyncio.shield(self._closing)

    async def _pump_outbox(self, waiting: Awaitable[None] | None) -> None:
        """Writes what is queued as the transport makes room. Lives only while there is something queued."""
        try:
            while True:
                if waiting is not None:
                    await waiting
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
                waiting = self._write(segment)
        except PeerClosed as error:
            self.abort(str(error))

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

    def _closed_error(self) -> PeerClosed:
        return PeerClosed(self._peer, f"the link with peer {short(self._peer)} is closed: {self._closed}")

    def _refuse(self, reason: LinkRefusal, message: str) -> RemoteProtocolError:
        self._refused[str(reason)] += 1
        error = RemoteProtocolError(self._peer, f"peer {short(self._peer)} broke the protocol ({reason}): {message}")
        self.abort(str(error))
        return error


async def initiate(
    channel: Channel, identity: Identity, refused: Counter[str], *, expect: PeerId | None, version: int
) -> SealedLink:
    """The dialling side's handshake. The caller bounds its duration, and closes the channel when this raises.

    Raises:
        PeerUnreachable: the other side hung up.
        ProtocolVersionMismatch: it speaks another version.
        RemoteProtocolError: it is somebody else, or does not follow the protocol.
    """
    handshake = Handshake(
        identity, initiator=True, static_private=secrets.token_bytes(32), expect=expect, version=version
    )
    await _write(channel, handshake.start())
    return await _finish(channel, handshake, refused, expect)


async def respond(channel: Channel, identity: Identity, refused: Counter[str], *, version: int) -> SealedLink:
    """The accepting side's handshake; as ``initiate``."""
    handshake = Handshake(identity, initiator=False, static_private=secrets.token_bytes(32), version=version)
    return await _finish(channel, handshake, refused, None)


async def _finish(channel: Channel, handshake: Handshake, refused: Counter[str], expect: PeerId | None) -> SealedLink:
    who = expect or channel.remote_address
    try:
        while handshake.keys is None:
            answer = handshake.receive(await channel.read())
            if answer:
                await _write(channel, answer)
    except LinkRefused as error:
        refused[str(error.reason)] += 1
        if error.reply:
            with contextlib.suppress(PeerClosed):
                await _write(channel, error.reply)
        if error.reason is LinkRefusal.WRONG_VERSION:
            raise ProtocolVersionMismatch(who, f"peer at {channel.remote_address}: {error}") from error
        raise RemoteProtocolError(who, f"peer at {channel.remote_address}, {error.reason}: {error}") from error
    except RemoteProtocolError:
        refused[str(LinkRefusal.MALFORMED)] += 1
        raise
    except PeerClosed as error:
        raise PeerUnreachable(who, f"{channel.remote_address} hung up during the handshake") from error
    return SealedLink(channel, handshake.keys, refused)


async def _write(channel: Channel, data: bytes) -> None:
    waiting = channel.write(data)
    if waiting is not None:
        await waiting
