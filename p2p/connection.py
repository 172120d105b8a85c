"""One peer's connection: a transfer core, and the links that it runs over, one after the other.

A Connection is what sessions see: it lives until the peer says goodbye, breaks the protocol, or stays away. A LinkEnd
is our end of one link and belongs to a connection once the peer has said Hello. Who makes links, and when to give up,
the pool decides (p2p.links); here is what happens on them.

The short way: a frame that is sent while nothing waits is sealed and written in the call that sends it, and one that
arrives reaches its handler in the call that read it. No task and no future is made for a frame.

Above 600 lines: sending, receiving and changing links share the one state that makes a resumption exact.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import structlog

from fusion_node.errors import FusionError, LocalProtocolError, PeerClosed, PeerError, PeerTimeout, PeerUnreachable
from fusion_node.types import PeerId
from fusion_node.wire import WireError, printable
from p2p.delivery_rate_core import DeliveryRate
from p2p.heartbeat_core import Heartbeat
from p2p.identity import short
from p2p.link_messages import (
    LINK_MESSAGE,
    TOKEN_BYTES,
    Ack,
    AnyLinkMessage,
    Goodbye,
    Hello,
    Ping,
    Pong,
    decode_link_message,
    encode_link_message,
)
from p2p.messages import (
    AnyMessage,
    BandwidthProbe,
    Partials,
    Step,
    StepResult,
    StepTaps,
    decode_message,
    encode_message,
)
from p2p.noise_core import TAG_BYTES
from p2p.seam import Link
from p2p.transfer_core import MAX_DECODE_PAYLOAD_BYTES, NUM_LANES, Lane, Position, Transfer
from p2p.upload_core import Upload, bytes_on_wire

MAX_DECODE_ROWS = 64
"""Rows of a step that still counts as decoding: a speculation tree has fewer, a prefill chunk more."""

MAX_PROVEN_ADDRESSES = 8
"""That are remembered of one peer because they have led to it."""

MAX_UNPROVEN_ADDRESSES = 16
"""That are remembered of one peer because somebody, perhaps a stranger, has said so."""

MAX_UNPROVEN_PER_CALL = 8
"""So that nobody displaces all that others have said."""

PINGS_PER_S, PINGS_AT_ONCE = 20.0, 200
"""That are answered on a link. Signs of life need one in two seconds; the rest is for measurements."""

OnFrame = Callable[[PeerId, AnyMessage, memoryview], None]
Payload = bytes | bytearray | memoryview

_log = structlog.get_logger(__name__)


def route(message: AnyMessage, payload: Payload) -> tuple[int, bytes | None]:
    """The lane that a message belongs to, and what it must stay in order with.

    Rows that nobody waits for stand before no result and no step, and none follows them into their lane.
    """
    if isinstance(message, _WITH_ROWS):
        if len(payload) <= MAX_DECODE_PAYLOAD_BYTES and message.tensor.num_rows <= MAX_DECODE_ROWS:
            return _DECODE, message.session
        return _PREFILL, message.session
    if isinstance(message, Partials):
        # They say for themselves what they belong to, so that they may come in any order.
        is_small = len(payload) <= MAX_DECODE_PAYLOAD_BYTES and message.num_rows <= MAX_DECODE_ROWS
        return _DECODE if is_small else _PREFILL, None
    if isinstance(message, StepTaps):
        return _PREFILL, None
    if isinstance(message, BandwidthProbe):
        return _BULK, None
    return _CONTROL, getattr(message, "session", None)


_WITH_ROWS = (Step, StepResult)
_CONTROL, _DECODE, _PREFILL, _BULK = map(int, Lane)  # reading a member from its class is slow in Python 3.11


class Owner(Protocol):
    """What links and connections need of the pool that they are in."""

    def introduce(self, end: LinkEnd, hello: Hello) -> None:
        """The peer has said Hello on a link.

        Raises:
            WireError: it does not fit.
        """
        ...

    def link_lost(self, end: LinkEnd, error: PeerError) -> None:
        """A link has ended that we did not end ourselves."""
        ...

    def fail(self, connection: Connection, error: FusionError) -> None:
        """The connection is over, for good. Repeated calls change nothing."""
        ...

    def wait_for_upload(self) -> None:
        """Somebody waits to be admitted by the limit of uploads."""
        ...

    def count(self, reason: str) -> None:
        """Something was refused."""
        ...


class Recorder(Protocol):
    """Who is told of all frames, see p2p.audit_log: called in the event loop, so it neither waits nor raises."""

    def sent(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """A frame is taken to be sent. The payload is not changed afterwards."""
        ...

    def received(self, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """A frame has come, and is about to be handed to whoever handles it."""
        ...

    def gone(self, peer: PeerId) -> None:
        """The connection with a peer is over."""
        ...


class LinkEnd:
    """Our end of one link, which reports to it.

    Attributes:
        connection: None until the peer has said Hello, on a link that it dialled; and when the link is not ours to
            care for any more.
        address: under which we dialled; None when the peer did.
        rank: orders the links of a connection: of two, both sides keep the higher one.
        since: of its being made, or retired.
        is_introduced: whether the peer has said Hello.
        is_retired: another one is sent on, but the peer may still send on this one until it closes it.
    """

    def __init__(self, owner: Owner, link: Link, clock: Callable[[], float], *, address: str | None) -> None:
        now = clock()
        self.link = link
        self.address = address
        self.since = now
        self.connection: Connection | None = None
        self.rank = (0, False)
        self.heartbeat = Heartbeat(last_heard=now, last_sent=now, draw_number=partial(secrets.randbits, 32))
        self.seen_bytes_in = 0
        self.seen_bytes_out = 0
        self.is_introduced = False
        self.is_retired = False
        self.rate = DeliveryRate()
        self.chunk_bytes = self.rate.chunk_bytes(None)
        self._clock = clock
        self._owner = owner
        self._position = Position([])
        self._owed: dict[type[AnyLinkMessage], AnyLinkMessage] = {}
        self._owes_ack = False
        self._pings_paid_until = 0.0

    def say_hello(self, connection: Connection, epoch: int, sending: tuple[int, ...]) -> None:
        """Our Hello, the first segment of ours. ``sending`` is empty unless it is an answer."""
        transfer = connection.transfer
        self._position = transfer.begin_link()
        # Whether the link that we dialled comes to anything, only the answer shows.
        received, granted = transfer.ack() if sending else transfer.tell()
        tokens = connection.token, connection.their_token
        self.post(Hello(*tokens, epoch, received, granted, sending, connection.features_offered))

    def expect(self, connection: Connection, hello: Hello) -> None:
        """The peer has answered our Hello.

        Raises:
            WireError: it does not begin where it should.
        """
        connection.transfer.expect(self._position, hello.sending)

    def post(self, message: AnyLinkMessage) -> None:
        """Sends a link message ahead of everything. When the transport is full, the last of each kind is kept."""
        link = self.link
        if link.is_writable:
            self._write(encode_link_message(message))
        else:
            self._owed[type(message)] = message

    def post_ack(self) -> None:
        """Acknowledges what has arrived, now or as soon as the transport has room."""
        connection = self.connection
        if connection is None or connection.end is not self:  # the peer would not read it
            self._owes_ack = False
            return
        self._owes_ack = not self.link.is_writable
        if not self._owes_ack:
            self._write(encode_link_message(Ack(*connection.transfer.ack())))
        else:
            connection.transfer.wants_ack = False

    def retire(self) -> None:
        """Another link is sent on now."""
        self.is_retired = True
        self.since = self._clock()

    def detach(self) -> None:
        """What still happens on the link is not our concern any more."""
        self.connection = None

    # LinkReceiver

    def segment_received(self, plain: bytes) -> None:
        """See LinkReceiver."""
        if plain[0] >= LINK_MESSAGE:
            self._take(decode_link_message(plain))
            return
        connection = self.connection
        if not self.is_introduced:
            raise WireError("a link begins with a Hello")
        if connection is None:
            return
        transfer = connection.transfer
        frame = transfer.receive(self._position, plain)
        if frame is not None:
            connection.deliver(frame)
        if transfer.wants_ack:
            connection.send_ack()

    def place_for(self, size: int) -> memoryview | None:
        """See LinkReceiver."""
        connection = self.connection
        return (
            connection.transfer.place(self._position, size) if connection is not None and self.is_introduced else None
        )

    def segment_placed(self, place: memoryview) -> None:
        """See LinkReceiver."""
        connection = self.connection
        assert connection is not None  # noqa: S101 - who was asked for a place has one
        transfer = connection.transfer
        # What is no chunk at all is read by ``segment_received``.
        if place[0] >= LINK_MESSAGE:
            plain = bytes(place)
            transfer.unplace(self._position, place)
            self.segment_received(plain)
            return
        frame = transfer.placed(self._position, place)
        if frame is not None:
            connection.deliver(frame)
        if transfer.wants_ack:
            connection.send_ack()

    def link_writable(self) -> None:
        """See LinkReceiver."""
        while self._owed and self.link.is_writable:
            _, message = self._owed.popitem()
            self._write(encode_link_message(message))
        if self._owes_ack and self.link.is_writable:
            self.post_ack()
        if self.connection is not None and self.connection.end is self:
            self.connection.pump()

    def link_closed(self, error: PeerError) -> None:
        """See LinkReceiver."""
        self._owner.link_lost(self, error)

    def _write(self, plain: bytes) -> None:
        self.link.write(plain)
        if self.connection is not None:
            self.connection.spent(len(plain))

    def _take(self, message: AnyLinkMessage) -> None:
        connection = self.connection
        match message:
            case Hello():
                if self.is_introduced:
                    raise WireError("a second Hello")
                self.is_introduced = True
                self._owner.introduce(self, message)
            case Goodbye():
                if connection is not None:
                    why = printable(message.reason) or "no reason given"
                    self._owner.fail(
                        connection, PeerClosed(self.link.peer, f"peer {short(self.link.peer)} left: {why}")
                    )
            case _ if not self.is_introduced:
                raise WireError("a link begins with a Hello")
            case _ if connection is None:
                pass
            case Ack():
                if connection.end is self:
                    connection.acked(message)
            case Ping():
                self._answer(message)
            case Pong():
                self._pong(connection, message.number)

    def _answer(self, ping: Ping) -> None:
        now = self._clock()
        paid_until = max(self._pings_paid_until, now)
        if paid_until - now > PINGS_AT_ONCE / PINGS_PER_S:
            self._owner.count("too-many-pings")
            return
        self._pings_paid_until = paid_until + 1 / PINGS_PER_S
        self.post(Pong(ping.number))

    def _pong(self, connection: Connection, number: int) -> None:
        is_first = self.heartbeat.best_s() is None
        round_trip_s = self.heartbeat.pong(number, self._clock())
        if round_trip_s is None:
            self._owner.count("unexpected-pong")
            return
        best_s = self.heartbeat.best_s()
        if best_s is not None:
            self.rate.round_trip(best_s)
            connection.tune()
        connection.ponged(number, round_trip_s)
        if is_first:  # it had to wait for all that a new link makes both sides do
            self.post(self.heartbeat.ping(self._clock()))


class Connection:
    """See the head of this file.

    Attributes:
        end: of the link that is sent on; None while there is none.
        ends: of all its links, also those on which the peer has not said Hello.
        epoch: of the newest link that either side has spoken of.
        rank: the highest of a link that was sent on. Lower ones come too late, also when there is no other.
        proven: addresses that have led to the peer, the newest first.
        error: why it is over.
        suspended_at, suspension: since when and why there is no link.
        ready: done when the first link has brought the peer's Hello.
    """

    def __init__(
        self,
        peer: PeerId,
        owner: Owner,
        on_frame: OnFrame,
        clock: Callable[[], float],
        *,
        upload: Upload | None,
        max_queue_bytes: int,
        features: tuple[str, ...],
        recorder: Recorder | None = None,
    ) -> None:
        now = clock()
        self.peer = peer
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.their_token = b""
        self.transfer = Transfer()
        self.end: LinkEnd | None = None
        self.ends: list[LinkEnd] = []
        self.epoch = 0
        self.rank = (0, False)
        self.proven: list[str] = []
        self._unproven: list[str] = []
        self.features_offered = features
        self.features: frozenset[str] = frozenset()
        self.error: FusionError | None = None
        self.suspended_at = now
        self.suspension: FusionError | None = None
        self.dial: asyncio.Task[None] | None = None
        self.upgrade_at = now
        self.upgrade_after_s = 0.0
        self.is_established = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.since = now
        self.frames_in = 0
        self.frames_out = 0
        self.num_resumed = 0
        # What the pool has seen when it looked last.
        self.last_used = now
        self.seen_frames = 0
        self.seen_frames_in = 0
        self.seen_bytes_in = 0
        self.seen_segments_in = 0
        self.seen_at = now
        self.seen_progress = 0
        self.progress_at = now
        self.pace_Bps = 0.0
        self._unfinished: dict[tuple[int, int], float] = {}
        self._owner = owner
        self._on_frame = on_frame
        self._clock = clock
        self._upload = upload
        self._recorder = recorder
        self._max_queue_bytes = max_queue_bytes
        self._pings: dict[int, asyncio.Future[float]] = {}
        self._drained: asyncio.Future[None] | None = None
        self._past_bytes_in = 0
        self._past_segments_in = 0

    @property
    def sealed_in(self) -> tuple[int, int]:
        """Segments and their bytes that have come on all links, also what holds nothing new."""
        counters = [end.link.counters for end in self.ends]
        num_segments = self._past_segments_in + sum(each.segments_in for each in counters)
        return num_segments, self._past_bytes_in + sum(each.bytes_in for each in counters)

    @property
    def held_bytes(self) -> int:
        """Of frames that wait, or that the peer has not acknowledged."""
        return self.transfer.queued_bytes + self.transfer.sent_bytes - self.transfer.acked_bytes

    def is_stalled(self, now: float, num_bytes: int, within_s: float) -> bool:
        """Whether something has waited for so long while the peer did not acknowledge so many bytes."""
        acked = self.transfer.acked_bytes
        gained, for_s = acked - self.seen_progress, now - self.progress_at
        if gained >= num_bytes or not self.transfer.queued_bytes:
            self.seen_progress, self.progress_at = acked, now
            if for_s > 0:
                self.pace_Bps = gained / for_s
            return False
        if for_s > 0:
            self.pace_Bps = min(self.pace_Bps, gained / for_s)
        return for_s >= within_s

    def look_at_unfinished(self, now: float) -> None:
        """Notes since when each frame is under way: its own beginning counts, whatever else comes meanwhile."""
        self._unfinished = {key: self._unfinished.get(key, now) for key in self.transfer.unfinished()}

    @property
    def unfinished_since(self) -> float | None:
        """Since when the frame is under way that is so for longest; None when there is none."""
        return min(self._unfinished.values(), default=None)

    def longest_unfinished(self) -> tuple[tuple[int, int], int] | None:
        """Which frame that is, and what has come of it."""
        bytes_of = self.transfer.unfinished()
        key = min((key for key in self._unfinished if key in bytes_of), key=self._unfinished.__getitem__, default=None)
        return None if key is None else (key, bytes_of[key])

    @property
    def addresses(self) -> list[str]:
        """To dial when the link is lost, or when they are better than it: those first that have led to the peer."""
        return [*self.proven, *self._unproven]

    def remember(self, addresses: Iterable[str]) -> None:
        """Somebody says that the peer is there: the first few of them displace the oldest of the kind.

        They are dialled too, but behind those that have led to the peer, and say nothing about it if they do not. They
        may come from a plan, and its author must not break a connection that others use as well.
        """
        said = [each for each in dict.fromkeys(addresses) if each not in self.proven][:MAX_UNPROVEN_PER_CALL]
        self._unproven = list(dict.fromkeys([*said, *self._unproven]))[:MAX_UNPROVEN_ADDRESSES]

    def prove(self, address: str) -> None:
        """This address has led to the peer."""
        self.proven = list(dict.fromkeys([address, *self.proven]))[:MAX_PROVEN_ADDRESSES]
        self._unproven = [each for each in self._unproven if each not in self.proven]

    def send(self, message: AnyMessage, payload: Payload) -> None:
        """Takes one frame; writes at once what can be written.

        Raises:
            PeerUnreachable: the connection is over.
            LocalProtocolError: the frame is larger than a receiver accepts.
        """
        if self.error is not None:
            raise PeerUnreachable(self.peer, str(self.error))
        lane, key = route(message, payload)
        end = self.end
        try:
            head = encode_message(message)
            if self._recorder is not None:
                self._recorder.sent(self.peer, message, payload)
            if end is not None and end.link.is_writable and self._upload is None:
                plain = self.transfer.pass_on(lane, key, head, payload, end.chunk_bytes)
                if plain is not None:
                    end.link.write(plain)
                    self.frames_out += 1
                    return
            self.transfer.queue(lane, key, head, payload)
        except WireError as error:
            raise LocalProtocolError(f"a {type(message).__name__} cannot be sent: {error}") from error
        self.frames_out += 1
        self.pump()
        if self.transfer.queued_bytes > self._max_queue_bytes:
            self.error = PeerTimeout(self.peer, f"peer {short(self.peer)} does not read what it is sent")
            # Not in this call: the sender is in the middle of something.
            asyncio.get_running_loop().call_soon(self._owner.fail, self, self.error)

    def pump(self) -> None:
        """Writes what may be written now."""
        end = self.end
        if end is None:
            return
        link, transfer, limited = end.link, self.transfer, self._upload is not None
        while link.is_writable:
            if limited and not self._is_admitted():
                return
            plain = transfer.next_segment(end.chunk_bytes)
            if plain is None:
                if end.rate.is_blocked:
                    end.rate.idle()
                if self._drained is not None:
                    self._check_drained()
                return
            link.write(plain)
            if limited:
                self.spent(len(plain))
        if transfer.queued_bytes:
            end.rate.blocked()

    def deliver(self, frame: memoryview) -> None:
        """A frame has arrived.

        Raises:
            WireError: it is malformed.
        """
        if self.error is not None:
            return
        message, payload = decode_message(frame)
        self.frames_in += 1
        if self._recorder is not None:
            self._recorder.received(self.peer, message, payload)
        try:
            self._on_frame(self.peer, message, payload)
        except FusionError as error:
            self._owner.fail(self, error)
        except Exception as error:  # noqa: BLE001 - the handler of a peer's frames: a bug costs one peer, not the node
            # Without the exception's text, which may quote what the peer sent.
            _log.error("the handler of a frame failed", peer=self.peer, error=type(error).__name__)
            self._owner.fail(self, LocalProtocolError(f"the handler of a frame failed with {type(error).__name__}"))

    def send_ack(self) -> None:
        """Tells the peer what has arrived, on the present link; Hello tells it on the next one."""
        if self.end is not None:
            self.end.post_ack()
        else:
            self.transfer.wants_ack = False

    def acked(self, message: Ack) -> None:
        """The peer has told what has arrived.

        Raises:
            WireError: it cannot be so.
        """
        self.transfer.acked(message.received, message.granted)
        end = self.end
        if end is not None and end.rate.is_blocked and end.rate.delivered(self.transfer.acked_bytes, self._clock()):
            self.tune()
            end.link.limit_unsent(end.rate.unsent_bytes())
        self.pump()

    def tune(self) -> None:
        """Adapts the size of chunks to what is known of the link."""
        if self.end is not None:
            self.end.chunk_bytes = self.end.rate.chunk_bytes(None if self._upload is None else self._upload.rate_Bps)

    def spent(self, num_bytes: int) -> None:
        """So many bytes of content were sealed and written."""
        if self._upload is not None:
            self._upload.spent(bytes_on_wire(num_bytes + TAG_BYTES), self._clock())

    # links

    def begin(self, end: LinkEnd, ours: PeerId) -> None:
        """We, whose peer id is ``ours``, have dialled a link for this connection: says Hello on it."""
        self.epoch += 1
        end.rank = (self.epoch, ours < self.peer)
        end.connection = self
        self.ends.append(end)
        end.say_hello(self, self.epoch, ())

    def attach(self, end: LinkEnd, hello: Hello) -> LinkEnd | None:
        """Goes on over this link, on which the peer has said Hello. Returns the one that it replaces.

        Raises:
            WireError: what the peer says cannot be.
        """
        replaced, now = self.end, self._clock()
        if end.address is None:
            # Before its Hello is believed: when that cannot be, the connection ends with the link, for the breach.
            end.connection = self
            self.ends.append(end)
        starts = self.transfer.resume(hello.received, hello.granted)
        self.their_token = hello.token
        if end.address is None:
            end.say_hello(self, hello.epoch, starts)
        elif len(hello.sending) == NUM_LANES and starts == hello.received:
            end.expect(self, hello)
        else:
            raise WireError("an answer that does not say from where on")
        self.features = frozenset(hello.features)
        self.epoch = max(self.epoch, hello.epoch)
        self.end, self.rank = end, end.rank
        self.suspension = None
        if replaced is None:  # not for every link: who makes a new one now and then would never be stalled
            self.progress_at = min(self.progress_at + (now - self.suspended_at), now)
        self.num_resumed += self.is_established
        self.is_established = True
        if not self.ready.done():
            self.ready.set_result(None)
        self.tune()
        end.post(end.heartbeat.ping(now))  # the first round trip is known from the start
        self._ping_again(end, now)
        self.pump()
        return replaced

    def lose_end(self, end: LinkEnd) -> None:
        """This link is not one of ours any more."""
        if end in self.ends:
            self.ends.remove(end)
            self._past_segments_in += end.link.counters.segments_in
            self._past_bytes_in += end.link.counters.bytes_in
        if self.end is end:
            self.end = None
        end.detach()

    def suspend(self, reason: FusionError, now: float) -> None:
        """There is no link to send on any more."""
        self.suspended_at = now
        self.suspension = reason

    # round trips

    async def round_trip(self) -> float:
        """Measures the round trip on the present link, or on the next if it is lost meanwhile; seconds.

        Raises:
            PeerClosed: the connection ended meanwhile.
        """
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        end = self.end
        if end is None:
            # Any number that no ping has; ``attach`` replaces it.
            self._pings[-1 - len(self._pings)] = answer
        else:
            ping = end.heartbeat.ping(self._clock())
            self._pings[ping.number] = answer
            end.post(ping)
        try:
            return await answer
        finally:
            self._pings = {number: waiting for number, waiting in self._pings.items() if waiting is not answer}

    def ponged(self, number: int, round_trip_s: float) -> None:
        """A ping was answered."""
        waiting = self._pings.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(round_trip_s)

    def _ping_again(self, end: LinkEnd, now: float) -> None:
        waiting, self._pings = self._pings, {}
        for answer in waiting.values():
            ping = end.heartbeat.ping(now)
            self._pings[ping.number] = answer
            end.post(ping)

    # the end

    def over(self, error: FusionError) -> None:
        """Whoever waits for something of this connection hears why it does not come."""
        self.error = error
        if self._recorder is not None:
            self._recorder.gone(self.peer)
        if self._upload is not None:
            self._upload.forget(self)
        for answer in self._pings.values():
            if not answer.done():
                answer.set_exception(PeerClosed(self.peer, str(error)))
        if not self.ready.done():
            self.ready.set_exception(
                error if isinstance(error, PeerUnreachable) else PeerUnreachable(self.peer, str(error))
            )
            self.ready.exception()  # nobody may be waiting
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def drain(self) -> None:
        """Returns when everything has been handed to the transport, or the connection is over."""
        if self.error is None and self.transfer.queued_bytes:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def _check_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self.transfer.queued_bytes:
            self._drained.set_result(None)

    def _is_admitted(self) -> bool:
        lane = self.transfer.next_lane()
        if lane is None:
            if self._drained is not None:
                self._check_drained()
            return False
        assert self._upload is not None  # noqa: S101 - the caller has looked
        if self._upload.admits(self, lane, self._clock()):
            return True
        self._owner.wait_for_upload()
        return False
