"""A Link over any Channel: the handshake, and the sealing of what is sent.

Everything that the transports have in common is here, so that the in-memory twin exercises the same code, with really
encrypted bytes, as the WebSocket. The cryptography is in p2p.noise_core; what the segments hold, in p2p.connection.

A segment is handed to the transport in the call that writes it, and reaches its receiver in the call in which the
transport read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fusion_node.errors import (
    PeerClosed,
    PeerError,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from fusion_node.wire import WireError
from p2p.identity import Identity, short
from p2p.noise_core import TAG_BYTES, Handshake, LinkKeys, LinkRefusal, LinkRefused, Opener, Sealer
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Channel, LimitsUnsent, LinkCounters, LinkReceiver, PathKind

MAX_EARLY_MESSAGES = 4
"""Messages that may wait during the handshake, which has at most two per side, and until ``start``."""

PLACED_ABOVE_BYTES = 4096
"""Segments beyond this may be decrypted to where their frame is put together; below, a copy is cheaper than asking."""


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
    """The Link of every transport. Construct it with ``initiate`` or ``respond``."""

    def __init__(self, channel: Channel, keys: LinkKeys, refused: Counter[str], early: Iterable[bytes]) -> None:
        self.counters = LinkCounters()
        self.is_writable = True
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._peer = keys.peer
        self._seal = Sealer(keys.sending_key).seal
        self._opener = Opener(keys.receiving_key)
        self._open = self._opener.open
        self._write = channel.write
        self._refused = refused
        self._early = deque(early)
        self._receiver: LinkReceiver | None = None
        self._ended = asyncio.Event()
        self._error: PeerError | None = None
        self._is_closed = False
        self._why: str | None = None  # it was cut here
        self._closing: asyncio.Task[None] | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def path(self) -> PathKind:
        return self._channel.path

    @property
    def remote_address(self) -> str:
        return self._channel.remote_address

    def start(self, receiver: LinkReceiver) -> None:
        """See Link.start."""
        self._receiver = receiver
        while self._early and not self._is_closed:
            self._receive(self._early.popleft(), receiver)
        if self._error is not None:
            receiver.link_closed(self._error)
        elif not self._is_closed:
            self._channel.resume_reading()

    def write(self, plain: bytes) -> None:
        """See Link.write."""
        if self._is_closed:
            return
        try:
            sealed = self._seal(plain)
            self.is_writable = self._write(sealed)
        except (PeerClosed, LinkRefused) as error:
            self._is_closed, self.is_writable = True, False
            # Not in this call: whoever writes is in the middle of something.
            self._loop.call_soon(self._end, self._closed_error(str(error)))
            return
        counters = self.counters
        counters.segments_out += 1
        counters.bytes_out += len(sealed)

    def limit_unsent(self, num_bytes: int) -> None:
        """See Link.limit_unsent."""
        if isinstance(self._channel, LimitsUnsent):
            self._channel.limit_unsent(num_bytes)

    async def wait_closed(self) -> None:
        """See Link.wait_closed."""
        await self._ended.wait()

    def abort(self, why: str = "the link was cut here") -> None:
        """See Link.abort."""
        if not self._is_closed:
            self._is_closed, self.is_writable, self._why = True, False, why
            self._channel.abort()
            self._loop.call_soon(self._end, self._closed_error(why))

    async def aclose(self) -> None:
        """See Link.aclose."""
        self._is_closed, self.is_writable = True, False
        self._receiver = None
        self._ended.set()
        if self._closing is None:
            self._closing = self._loop.create_task(self._channel.aclose())
        await asyncio.shield(self._closing)

    # ChannelReceiver

    def message_received(self, data: bytes | memoryview) -> None:
        """See ChannelReceiver."""
        receiver = self._receiver
        if receiver is not None:
            if not self._is_closed:
                self._receive(data, receiver)
        elif not self._is_closed:
            self._early.append(bytes(data))
            if len(self._early) >= MAX_EARLY_MESSAGES:
                self._channel.pause_reading()

    def channel_writable(self) -> None:
        """See ChannelReceiver."""
        if not self._is_closed:
            self.is_writable = True
            if self._receiver is not None:
                self._receiver.link_writable()

    def channel_closed(self, error: PeerError) -> None:
        """See ChannelReceiver."""
        if isinstance(error, RemoteProtocolError):
            self._refuse(LinkRefusal.MALFORMED, error)
        else:
            self._end(self._closed_error(self._why or str(error)))

    def _receive(self, data: bytes | memoryview, receiver: LinkReceiver) -> None:
        size, counters = len(data), self.counters
        counters.segments_in += 1
        counters.bytes_in += size
        try:
            if size <= TAG_BYTES:
                raise WireError("an empty segment")
            if size > PLACED_ABOVE_BYTES:
                place = receiver.place_for(size - TAG_BYTES)
                if place is not None:
                    self._opener.open_into(data, place)
                    receiver.segment_placed(place)
                    return
            receiver.segment_received(self._open(data))
        except LinkRefused as error:
            self._refuse(error.reason, error)
        except WireError as error:
            self._refuse(LinkRefusal.MALFORMED, error)

    def _refuse(self, reason: LinkRefusal, error: Exception) -> None:
        if self._error is None:
            self._refused[str(reason)] += 1
            message = f"peer {short(self._peer)} broke the protocol ({reason}): {error}"
            refusal = RemoteProtocolError(self._peer, message)
            refusal.__cause__ = error
            self._end(refusal)

    def _end(self, error: PeerError) -> None:
        """Closes without waiting for anything, and says so once."""
        if self._error is not None:
            return
        self._error = error
        if self._receiver is not None:
            self._receiver.link_closed(error)  # who may still say why, if the peer is to blame
        self._is_closed, self.is_writable = True, False
        self._ended.set()
        if not isinstance(error, RemoteProtocolError):
            self._channel.abort()
        if self._closing is None:
            self._closing = self._loop.create_task(self._channel.aclose())

    def _closed_error(self, why: str) -> PeerClosed:
        return PeerClosed(self._peer, f"the link with peer {short(self._peer)} is closed: {why}")


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
    link = SealedLink(channel, handshake.keys, refused, mailbox.messages)
    channel.set_receiver(link)
    if mailbox.error is not None:
        link.channel_closed(mailbox.error)
    return link
