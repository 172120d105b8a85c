"""What two peers send each other, over links that come and go: lanes, credit, acknowledgement and resumption.

Each direction has four lanes. A lane is a stream of bytes that outlives its links: frames one after the other, each
with its length in front. It travels in chunks, a chunk per sealed segment, and every frame begins a chunk. Chunks of
different lanes take turns by priority, so that a decode step waits for one chunk of a prefill and not for all of it.
Where a chunk belongs in its lane is not said: on a link, a lane goes on without gap from where the Hellos said.

Guarantees: every frame that was queued is delivered once, whole, as long as links are made again; frames of one key in
the order queued. A sender keeps at most what the receiver has granted and not acknowledged, a window and a frame per
lane, beside what waits in its queue, which the shell bounds. A receiver holds at most one unfinished frame per lane, of
the lane's limit.

Why order by key holds across lanes: a frame follows the one before it of its key into a less urgent lane if that one
is not sent yet; else it may begin only when that one has been sent on the present link. A link delivers in order, and a
new link begins every lane where the receiver has got to. So both arrive in order, over any links.

Assumes: the links deliver segments unchanged and in order, or end (p2p.noise_core). The shell sends what
``next_segment`` returns in that order on the link that ``resume`` was called for last, and calls ``ack`` when
``wants_ack``, and ACK_AFTER_S after anything has arrived. A payload is not changed after ``queue``.

States: offsets per lane. Sending: acknowledged ≤ sent on this link ≤ queued, and granted. Receiving: received, granted.

Timers: none of its own; the shell's ACK_AFTER_S.

Source: streams, offsets and credit as in QUIC (RFC 9000 §2-4), without packets: TCP below repairs losses already, so
only what a lost link takes with it is sent again. Silly windows are avoided as by RFC 1122 §4.2.3.3: more is granted
only when a quarter of the window is used up.

Ugly: after a change of links the old one may still deliver. Its chunks are taken as well, and what both bring is
dropped by offset. Only frames of one key are ordered, so that a status may overtake a step.
"""

from __future__ import annotations

import enum
import itertools
import struct
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fusion_node.wire import MAX_FRAME_BYTES, MAX_HEADER_BYTES, WireError
from p2p.noise_core import MAX_SEGMENT_PLAIN_BYTES

ACK_AFTER_S = 0.5
"""What has arrived is acknowledged after this at the latest. Echoes of 4 KiB so cost two small segments a second."""

STARVED_AFTER_CHUNKS = 16
"""So often may others go before a lane that has something to send. It then has a seventeenth of the line."""


class Lane(enum.IntEnum):
    """By urgency."""

    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    BULK = 3


NUM_LANES = len(Lane)


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Both sides must have the same.

    Attributes:
        window_bytes: what a receiver grants beyond what has arrived.
        max_frame_bytes: the longest frame.
    """

    window_bytes: int
    max_frame_bytes: int


MAX_DECODE_PAYLOAD_BYTES = 1024 * 1024
"""64 rows of hidden size 8,192 in fp16: a speculation tree."""

LIMITS = (
    LaneLimits(256 * 1024, 4 + MAX_HEADER_BYTES),
    LaneLimits(2 * 1024 * 1024, 4 + MAX_HEADER_BYTES + MAX_DECODE_PAYLOAD_BYTES),
    # Three quarters of it per round trip are 30 MB/s at 100 ms, more than the uplinks that this is for.
    LaneLimits(4 * 1024 * 1024, MAX_FRAME_BYTES),
    LaneLimits(4 * 1024 * 1024, MAX_FRAME_BYTES),
)

BEGIN, CONTINUE = 0x00, 0x10
"""The first byte of a segment with a chunk, plus its lane: whether the chunk begins a frame or goes on with it."""

_BEGIN_HEAD = struct.Struct("<BI")
_LENGTH_OF = struct.Struct("<xI").unpack_from
_LENGTH_BYTES = 4
_BEGIN_BYTES = 1 + _LENGTH_BYTES
_CONTINUE_HEADS = tuple(bytes((CONTINUE | lane,)) for lane in range(NUM_LANES))
_END_OF_CHUNKS = CONTINUE | NUM_LANES

_pack_begin = _BEGIN_HEAD.pack
_new_tuple = tuple.__new__  # of a NamedTuple: half the price of calling it

MAX_CHUNK_BYTES = MAX_SEGMENT_PLAIN_BYTES - _BEGIN_BYTES
"""Of a frame, in one segment."""


class _Outgoing(NamedTuple):
    """A frame that is not known to have arrived. ``start`` and ``stop`` are its offsets in the stream of its lane.

    ``after``: the lane, and the offset up to which that one must have been sent before this may begin.
    """

    start: int
    stop: int
    head: bytes
    payload: bytes | bytearray | memoryview
    key: Hashable | None
    lane: int
    after: tuple[int, int] | None


class _SendingLane:
    __slots__ = ("acked", "granted", "highest", "passed_over", "queued", "retained", "sent", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Outgoing] = deque()  # the first may be sent in part
        self.retained: deque[_Outgoing] = deque()  # sent on this link, not acknowledged
        self.queued = 0
        self.sent = 0
        self.highest = 0  # sent on any link
        self.acked = 0
        self.granted = 0
        self.passed_over = 0


class _ReceivingLane:
    __slots__ = (
        "ack_at",
        "filled",
        "frame",
        "granted",
        "max_frame_bytes",
        "received",
        "told",
        "told_granted",
        "window_bytes",
    )

    def __init__(self, limits: LaneLimits) -> None:
        self.window_bytes = limits.window_bytes
        self.max_frame_bytes = limits.max_frame_bytes
        self.received = 0
        self.granted = limits.window_bytes
        self.told = 0
        self.told_granted = limits.window_bytes
        self.ack_at = limits.window_bytes >> 2
        self.frame: memoryview | None = None
        self.filled = 0


class Position:
    """How far one link has brought each lane. Made by ``begin_link``."""

    __slots__ = ("at", "lane", "saved")

    def __init__(self, at: list[int]) -> None:
        self.at = at
        self.lane = 0  # of the last chunk that did not end its frame
        self.saved = 0


class Transfer:
    """See the head of this file.

    Args:
        limits: per lane.
    """

    def __init__(self, limits: Sequence[LaneLimits] = LIMITS) -> None:
        self.queued_bytes = 0
        """What has not been sent on this link."""
        self.wants_ack = False
        self.is_restrained = False
        """Set by the shell while memory is short: unfinished frames get no further credit."""
        self._limits = limits
        self._out = [_SendingLane() for _ in limits]
        self._in = [_ReceivingLane(each) for each in limits]
        self._last_of: dict[Hashable, _Outgoing] = {}

    # sending

    def queue(
        self, lane: int, key: Hashable | None, head: bytes, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Takes a frame, whose bytes are ``head`` and then ``payload``.

        Args:
            lane: where it belongs; it may have to go into a less urgent one, behind another of its key.
            key: frames of one key stay in order; None for those that follow nothing.

        Raises:
            WireError: it is longer than its lane permits.
        """
        size = len(head) + len(payload)
        if size > self._limits[lane].max_frame_bytes:
            raise WireError(f"frame of {size} bytes exceeds {self._limits[lane].max_frame_bytes}")
        after = None
        if key is not None:
            before = self._last_of.get(key)
            if before is not None and before.lane != lane:
                if before.lane > lane and self._out[before.lane].sent < before.stop:
                    lane = before.lane
                else:
                    after = (before.lane, before.stop)
        sending = self._out[lane]
        start = sending.queued
        stop = sending.queued = start + _LENGTH_BYTES + size
        outgoing = _new_tuple(_Outgoing, (start, stop, head, payload, key, lane, after))
        if key is not None:
            self._last_of[key] = outgoing
        sending.waiting.append(outgoing)
        self.queued_bytes += stop - start

    def pass_on(
        self, lane: int, key: Hashable | None, head: bytes, payload: bytes | bytearray | memoryview, max_bytes: int
    ) -> bytes | None:
        """``queue`` and ``next_segment`` in one, for a frame that can go at once and whole; else None.

        Most frames can, and this is half the price.
        """
        size, sending = len(head) + len(payload), self._out[lane]
        start = sending.queued
        stop = start + _LENGTH_BYTES + size
        if self.queued_bytes or size > max_bytes or stop > sending.granted:
            return None
        after = None
        if key is not None:
            before = self._last_of.get(key)
            if before is not None and before.lane != lane:
                after = (before.lane, before.stop)
        outgoing = _new_tuple(_Outgoing, (start, stop, head, payload, key, lane, after))
        if key is not None:
            self._last_of[key] = outgoing
        sending.retained.append(outgoing)
        sending.queued = sending.sent = stop
        if stop > sending.highest:
            sending.highest = stop
        return b"".join((_pack_begin(lane, size), head, payload))

    def next_lane(self) -> int | None:
        """Of the segment that ``next_segment`` would return; None when nothing can be sent."""
        chosen = None
        for lane, sending in enumerate(self._out):
            if sending.waiting and self._may_send(sending):
                if chosen is None:
                    chosen = lane
                elif sending.passed_over >= STARVED_AFTER_CHUNKS:
                    return lane
        return chosen

    def next_segment(self, max_bytes: int = MAX_CHUNK_BYTES) -> bytes | None:
        """The content of the segment to send now, with at most ``max_bytes`` of a frame; None when there is none."""
        lane = self.next_lane()
        if lane is None:
            return None
        sending = self._out[lane]
        sending.passed_over = 0
        for other in self._out:
            if other is not sending and other.waiting:
                other.passed_over += 1
        outgoing, sent = sending.waiting[0], sending.sent
        done = sent - outgoing.start
        if done:
            size = min(max_bytes, outgoing.stop - sent, sending.granted - sent)
            start, prefix = done - _LENGTH_BYTES, _CONTINUE_HEADS[lane]
            sending.sent = sent + size
        else:
            total = outgoing.stop - sent - _LENGTH_BYTES
            size = min(max_bytes, total, sending.granted - sent - _LENGTH_BYTES)
            start, prefix = 0, _pack_begin(lane, total)
            sending.sent = sent + size + _LENGTH_BYTES
        self.queued_bytes -= sending.sent - sent
        if sending.sent > sending.highest:
            sending.highest = sending.sent
        head, payload = outgoing.head, outgoing.payload
        if sending.sent == outgoing.stop:
            sending.retained.append(sending.waiting.popleft())
            if not done:
                return b"".join((prefix, head, payload))
        split, stop = len(head), start + size
        if start < split:
            return b"".join((prefix, head[start:stop], memoryview(payload)[: max(0, stop - split)]))
        return b"".join((prefix, memoryview(payload)[start - split : stop - split]))

    def acked(self, received: Sequence[int], granted: Sequence[int]) -> None:
        """The peer has told what it has received and grants.

        Raises:
            WireError: it cannot be so. Nothing is changed then.
        """
        self._check_told(received, granted)
        for sending, offset, limit in zip(self._out, received, granted, strict=True):
            sending.granted = max(sending.granted, limit)
            sending.acked = max(sending.acked, offset)
            # A frame that an older link has brought is retained only when this one has brought it as well: the
            # receiver counts what comes on each.
            retained = sending.retained
            while retained and retained[0].stop <= sending.acked:
                self._forget(retained.popleft())

    def resume(self, received: Sequence[int], granted: Sequence[int]) -> tuple[int, ...]:
        """A new link is the one to send on, and the peer's Hello on it said this. Sends again what is missing.

        Returns per lane from where on: that which the peer said, unless it has acknowledged more since, on another
        link. Who answers a Hello says so in its own; who gets the answer cannot have to, because no acknowledgement
        is sent on an older link after the answer.

        Raises:
            WireError: it cannot be so. Nothing is changed then.
        """
        self._check_told(received, granted)
        starts = [max(offset, sending.acked) for sending, offset in zip(self._out, received, strict=True)]
        for sending, offset in zip(self._out, starts, strict=True):
            frames = itertools.chain(sending.retained, sending.waiting)
            first = next((each for each in frames if each.stop > offset), None)
            if first is not None and first.start < offset <= first.start + _LENGTH_BYTES:
                raise WireError("a frame was received up to within its length")
        for sending, offset, limit in zip(self._out, starts, granted, strict=True):
            retained, waiting = sending.retained, sending.waiting
            while retained and retained[0].stop <= offset:
                self._forget(retained.popleft())
            while retained:
                waiting.appendleft(retained.pop())
            while waiting and waiting[0].stop <= offset:
                self._forget(waiting.popleft())
            sending.sent = sending.acked = offset
            sending.granted = max(sending.granted, limit)
        self.queued_bytes = sum(sending.queued - sending.sent for sending in self._out)
        return tuple(sending.sent for sending in self._out)

    @property
    def acked_bytes(self) -> int:
        """What the peer has acknowledged, of all lanes."""
        return sum(sending.acked for sending in self._out)

    @property
    def sent_bytes(self) -> int:
        """What has been sent, of all lanes, without what was sent again."""
        return sum(sending.highest for sending in self._out)

    @property
    def retained_bytes(self) -> int:
        """What was sent on this link and is kept until it is acknowledged."""
        return sum(outgoing.stop - outgoing.start for sending in self._out for outgoing in sending.retained)

    def _may_send(self, sending: _SendingLane) -> bool:
        outgoing = sending.waiting[0]
        if sending.sent != outgoing.start:
            return sending.sent < sending.granted
        if sending.sent + _LENGTH_BYTES >= sending.granted:
            return False
        after = outgoing.after
        return after is None or self._out[after[0]].sent >= after[1]

    def _check_told(self, received: Sequence[int], granted: Sequence[int]) -> None:
        lanes = zip(self._out, self._limits, received, granted, strict=True)
        for sending, limits, offset, limit in lanes:
            if offset > sending.highest:
                raise WireError("more is said to have been received than was sent")
            # What is sent is kept until it is acknowledged: who could grant without end could make us keep without end.
            if limit > offset + limits.window_bytes:
                raise WireError("more is granted than a window beyond what was received")

    def _forget(self, outgoing: _Outgoing) -> None:
        if outgoing.key is not None and self._last_of.get(outgoing.key) is outgoing:
            del self._last_of[outgoing.key]

    # receiving

    def begin_link(self) -> Position:
        """For a new link: from where on the peer is going to send on it, which our Hello tells it."""
        return Position([receiving.received for receiving in self._in])

    def expect(self, position: Position, starts: Sequence[int]) -> None:
        """The peer's answer to our Hello said from where on it sends on this link.

        Raises:
            WireError: something would be left out.
        """
        for receiving, said, start in zip(self._in, position.at, starts, strict=True):
            if not said <= start <= receiving.received:
                raise WireError("a link does not begin where the last one ended")
        position.at[:] = starts
        # The peer has left the older link when it answered: what we acknowledged there since then, it has not read.
        for receiving in self._in:
            receiving.told, receiving.told_granted = 0, receiving.window_bytes

    def receive(self, position: Position, plain: bytes) -> memoryview | None:
        """Takes the content of a segment with a chunk; returns the frame that it completes, read-only.

        Raises:
            WireError: the peer does not follow the protocol.
        """
        kind = plain[0] if plain else _END_OF_CHUNKS
        if kind < NUM_LANES:
            receiving, size = self._in[kind], len(plain) - _BEGIN_BYTES
            received = receiving.received
            # A frame that is whole, as most are.
            if position.at[kind] == received and receiving.frame is None and size > 0 and size == _LENGTH_OF(plain)[0]:
                received += _LENGTH_BYTES + size
                if received <= receiving.granted and size <= receiving.max_frame_bytes:
                    position.at[kind] = receiving.received = received
                    if received >= receiving.ack_at:
                        self.wants_ack = True
                    return memoryview(plain)[_BEGIN_BYTES:]
        lane = kind & 0x0F
        if lane >= NUM_LANES or kind >= _END_OF_CHUNKS:
            raise WireError("a segment of an unknown kind")
        receiving, at = self._in[lane], position.at[lane]
        if at != receiving.received:
            return self._receive_again(position, kind, lane, plain)
        if kind & CONTINUE:
            return self._go_on(position, receiving, lane, memoryview(plain)[1:])
        return self._begin(position, receiving, lane, plain)

    def place(self, position: Position, size: int) -> memoryview | None:
        """Where a segment with ``size`` bytes may be decrypted to, in the hope that it goes on with the last frame.

        Call ``placed`` or ``unplace`` with it afterwards, or ``receive`` with the content if None is returned.
        """
        lane = position.lane
        receiving = self._in[lane]
        frame, filled = receiving.frame, receiving.filled
        if frame is None or position.at[lane] != receiving.received or filled + size - 1 > len(frame):
            return None
        # One byte before: the first byte of the content is not the frame's. ``placed`` puts back what was there.
        position.saved = frame[filled - 1]
        return frame[filled - 1 : filled - 1 + size]

    def placed(self, position: Position, view: memoryview) -> memoryview | None:
        """A segment was decrypted to where ``place`` said. As ``receive``."""
        lane, size = position.lane, len(view) - 1
        receiving = self._in[lane]
        if view[0] == CONTINUE | lane and size > 0 and receiving.received + size <= receiving.granted:
            view[0] = position.saved
            return self._advance(position, receiving, lane, size)
        plain = bytes(view)
        view[0] = position.saved
        return self.receive(position, plain)

    def unplace(self, position: Position, view: memoryview) -> None:
        """What was decrypted to there is no chunk; the frame is as before."""
        view[0] = position.saved

    def tell(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What to tell the peer in a Hello that may come to nothing: received and granted, per lane.

        The peer may use the credit, but is not taken to know of it, nor of what has arrived.
        """
        for receiving in self._in:
            if self._may_grant(receiving):
                receiving.granted = receiving.received + receiving.window_bytes
        return tuple(r.received for r in self._in), tuple(r.granted for r in self._in)

    def ack(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What to tell the peer now, on the link that is sent on: received and granted, per lane."""
        told = self.tell()
        self.wants_ack = False
        for receiving in self._in:
            receiving.told, receiving.told_granted = receiving.received, receiving.granted
            receiving.ack_at = receiving.received + (receiving.window_bytes >> 2)
        return told

    def has_news(self) -> bool:
        """Whether ``ack`` would tell anything that the peer is not known to know."""
        return any(
            receiving.received != receiving.told
            or receiving.granted != receiving.told_granted
            or (self._may_grant(receiving) and receiving.granted != receiving.received + receiving.window_bytes)
            for receiving in self._in
        )

    @property
    def unfinished_bytes(self) -> int:
        """What has come of frames that are not complete."""
        return sum(receiving.filled for receiving in self._in if receiving.frame is not None)

    def unfinished(self) -> dict[tuple[int, int], int]:
        """The frames that are not complete, by lane and where they begin in it: what has come of each."""
        return {
            (lane, receiving.received - receiving.filled): receiving.filled
            for lane, receiving in enumerate(self._in)
            if receiving.frame is not None
        }

    @property
    def received_bytes(self) -> int:
        """What has arrived, of all lanes."""
        return sum(receiving.received for receiving in self._in)

    def _may_grant(self, receiving: _ReceivingLane) -> bool:
        return not (self.is_restrained and receiving.frame is not None)

    def _begin(self, position: Position, receiving: _ReceivingLane, lane: int, plain: bytes) -> memoryview | None:
        size = len(plain) - _BEGIN_BYTES
        if size < 1 or receiving.frame is not None:
            raise WireError("a frame begins where none can")
        (total,) = _LENGTH_OF(plain)
        if total > receiving.max_frame_bytes:
            raise WireError(f"frame of {total} bytes exceeds {receiving.max_frame_bytes}")
        received = receiving.received + _LENGTH_BYTES + size
        if size > total or received > receiving.granted:
            raise WireError("a chunk is longer than its frame, or than what was granted")
        position.at[lane] = receiving.received = received
        if received >= receiving.ack_at:
            self.wants_ack = True
        if size == total:
            return memoryview(plain)[_BEGIN_BYTES:]
        # Pages of a fresh bytearray are not resident before they are written: an announced length costs nothing.
        frame = memoryview(bytearray(total))
        frame[:size] = memoryview(plain)[_BEGIN_BYTES:]
        receiving.frame, receiving.filled = frame, size
        position.lane = lane
        return None

    def _go_on(self, position: Position, receiving: _ReceivingLane, lane: int, data: memoryview) -> memoryview | None:
        frame, size = receiving.frame, len(data)
        if frame is None or not 0 < size <= len(frame) - receiving.filled:
            raise WireError("a chunk goes on where its frame does not")
        if receiving.received + size > receiving.granted:
            raise WireError("a chunk is longer than what was granted")
        frame[receiving.filled : receiving.filled + size] = data
        position.lane = lane
        return self._advance(position, receiving, lane, size)

    def _advance(self, position: Position, receiving: _ReceivingLane, lane: int, size: int) -> memoryview | None:
        received = receiving.received + size
        position.at[lane] = receiving.received = received
        receiving.filled += size
        if received >= receiving.ack_at:
            self.wants_ack = True
        frame = receiving.frame
        if frame is None or receiving.filled < len(frame):
            return None
        receiving.frame = None
        return frame.toreadonly()

    def _receive_again(self, position: Position, kind: int, lane: int, plain: bytes) -> memoryview | None:
        """A chunk of which another link has brought some or all."""
        receiving, at = self._in[lane], position.at[lane]
        data = memoryview(plain)[1:]  # of the lane's stream: the length of a frame belongs to it
        if len(data) < (1 if kind & CONTINUE else _BEGIN_BYTES):
            raise WireError("an empty chunk")
        stop = at + len(data)
        if stop <= receiving.received:
            position.at[lane] = stop
            return None
        position.at[lane] = receiving.received
        return self._go_on(position, receiving, lane, data[receiving.received - at :])
