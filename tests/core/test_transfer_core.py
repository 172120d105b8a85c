"""Transfer over links that come and go: by a state machine, and case by case."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusion_node.wire import MAX_FRAME_BYTES, WireError
from p2p.transfer_core import (
    BEGIN,
    CONTINUE,
    LIMITS,
    MAX_CHUNK_BYTES,
    NUM_LANES,
    STARVED_AFTER_CHUNKS,
    Lane,
    LaneLimits,
    Position,
    Transfer,
)

SMALL = (LaneLimits(64, 60), LaneLimits(96, 200), LaneLimits(128, 400), LaneLimits(128, 400))
"""Everything happens at once: frames that exceed the window, and windows that are used up."""

Told = tuple[Sequence[int], Sequence[int]]
Hello = tuple[Sequence[int], Sequence[int], Sequence[int]]


def frame(number: int, size: int) -> bytes:
    return (number.to_bytes(4, "big") + random.Random(number).randbytes(size))[: max(4, size)]


def take(transfer: Transfer, position: Position, plain: bytes, *, in_place: bool) -> memoryview | None:
    """As a link does: decrypts in place if asked to and if there is a place."""
    place = transfer.place(position, len(plain)) if in_place else None
    if place is None:
        return transfer.receive(position, plain)
    place[:] = plain
    return transfer.placed(position, place)


@dataclass(eq=False)
class Link:
    """Two queues; a Hello is a tuple, a chunk is bytes. Of two links both sides keep the one of higher rank."""

    dialler: int
    rank: tuple[int, bool]
    queues: tuple[deque[bytes | Hello], deque[bytes | Hello]] = field(default_factory=lambda: (deque(), deque()))
    positions: list[Position | None] = field(default_factory=lambda: [None, None])


class Side:
    def __init__(self, limits: Sequence[LaneLimits]) -> None:
        self.transfer = Transfer(limits)
        self.link: Link | None = None  # that is sent on
        self.epoch = 0
        self.rank = (0, False)
        self.sent: dict[int, list[bytes]] = {}
        self.received: dict[int, list[bytes]] = {}
        self.num_sent = 0
        self.num_received = 0


class World:
    """Two sides, any number of links."""

    def __init__(self, limits: Sequence[LaneLimits] = SMALL) -> None:
        self.limits = limits
        self.sides = (Side(limits), Side(limits))
        self.links: list[Link] = []

    def send(self, who: int, lane: int, key: int, size: int) -> None:
        side = self.sides[who]
        data = frame(1000 * key + len(side.sent.get(key, ())), min(size, self.limits[lane].max_frame_bytes))
        split = len(data) // 3
        side.transfer.queue(lane, key, data[:split], data[split:])
        side.sent.setdefault(key, []).append(data)
        side.num_sent += 1

    def dial(self, who: int = 0) -> Link:
        self.sides[who].epoch += 1
        link = Link(who, (self.sides[who].epoch, who == 0))
        self.links.append(link)
        self._hello(who, link, ())
        return link

    def _hello(self, who: int, link: Link, sending: Sequence[int]) -> None:
        transfer = self.sides[who].transfer
        link.positions[who] = transfer.begin_link()
        link.queues[1 - who].append((*(transfer.ack() if sending else transfer.tell()), sending))

    def write(self, who: int, max_bytes: int) -> bool:
        side = self.sides[who]
        plain = None if side.link is None else side.transfer.next_segment(max_bytes)
        if plain is None or side.link is None:
            return False
        side.link.queues[1 - who].append(plain)
        return True

    def ack(self, who: int) -> None:
        """Told at once: acknowledgements are small, and later ones only say more."""
        if self.sides[who].link is not None and self.sides[who].link is self.sides[1 - who].link:
            self.sides[1 - who].transfer.acked(*self.sides[who].transfer.ack())

    def deliver(self, who: int, link: Link, *, in_place: bool = False) -> None:
        queue = link.queues[who]
        if not queue:
            return
        item = queue.popleft()
        side, position = self.sides[who], link.positions[who]
        if isinstance(item, tuple):
            side.epoch = max(side.epoch, link.rank[0])
            if side.rank > link.rank:
                self.cut(link)
                return
            side.rank = link.rank
            starts = side.transfer.resume(*item[:2])
            if position is None:  # who was dialled answers, and goes on here at once
                self._hello(who, link, starts)
            else:
                assert starts == item[0]
                side.transfer.expect(position, item[2])
            old, side.link = side.link, link
            if who == link.dialler and old is not None:
                self.cut(old)
            return
        assert position is not None
        done = take(side.transfer, position, item, in_place=in_place)
        if done is not None:
            data = bytes(done)
            key = int.from_bytes(data[:4], "big") // 1000
            side.received.setdefault(key, []).append(data)
            side.num_received += 1

    def cut(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)
        for side in self.sides:
            if side.link is link:
                side.link = None

    def settle(self) -> None:
        """Makes a last link and lets everything arrive on it."""
        self.sides[0].epoch = max(side.epoch for side in self.sides)
        link = self.dial()
        for side in self.sides:
            side.transfer.is_restrained = False
        busy = True
        while busy:
            busy = False
            for who in (0, 1):
                while link.queues[who]:
                    self.deliver(who, link)
                    busy = True
            for who in (0, 1):
                if self.sides[who].transfer.has_news():
                    self.ack(who)
                    busy = True
                while self.write(who, 1 + who * 40):
                    busy = True

    def check(self) -> None:
        for who in (0, 1):
            sender, receiver = self.sides[who], self.sides[1 - who]
            for key, frames in receiver.received.items():
                assert frames == sender.sent[key][: len(frames)]
            total = sum(limits.window_bytes for limits in self.limits)
            longest = sum(limits.max_frame_bytes + 4 for limits in self.limits)
            assert sender.transfer.retained_bytes <= total + longest
            assert receiver.transfer.unfinished_bytes <= longest

    def check_all_arrived(self) -> None:
        self.check()
        for who in (0, 1):
            assert self.sides[1 - who].received == self.sides[who].sent
            assert self.sides[who].transfer.queued_bytes == 0
            assert self.sides[who].transfer._last_of == {}
            assert self.sides[who].transfer.retained_bytes == 0


who = st.integers(0, 1)


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(who=who, lane=st.integers(0, NUM_LANES - 1), key=st.integers(1, 3), size=st.integers(4, 400))
    def send(self, who: int, lane: int, key: int, size: int) -> None:
        self.world.send(who, lane, key, size)

    @rule(who=who, times=st.integers(1, 8), max_bytes=st.integers(1, 80))
    def write(self, who: int, times: int, max_bytes: int) -> None:
        for _ in range(times):
            self.world.write(who, max_bytes)

    @precondition(lambda self: self.world.links)
    @rule(who=who, times=st.integers(1, 8), which=st.integers(0, 3), in_place=st.booleans())
    def deliver(self, who: int, times: int, which: int, in_place: bool) -> None:
        link = self.world.links[which % len(self.world.links)]
        for _ in range(times):
            self.world.deliver(who, link, in_place=in_place)

    @precondition(lambda self: len(self.world.links) < 3)
    @rule(who=who)
    def dial(self, who: int) -> None:
        self.world.dial(who)

    @precondition(lambda self: self.world.links)
    @rule(which=st.integers(0, 3))
    def cut(self, which: int) -> None:
        self.world.cut(self.world.links[which % len(self.world.links)])

    @rule(who=who)
    def ack(self, who: int) -> None:
        self.world.ack(who)

    @rule(who=who, restrained=st.booleans())
    def restrain(self, who: int, restrained: bool) -> None:
        self.world.sides[who].transfer.is_restrained = restrained

    @invariant()
    def in_order_and_once(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()
        self.world.check_all_arrived()


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(25))
def test_random_sessions_over_links_that_are_cut_at_any_time_lose_and_repeat_nothing(seed: int) -> None:
    draw = random.Random(seed)
    world = World()
    for _ in range(800):
        match draw.randrange(12):
            case 0 | 1 | 2:
                world.send(draw.randrange(2), draw.randrange(NUM_LANES), draw.randrange(1, 5), draw.randrange(4, 400))
            case 3 | 4 | 5:
                world.write(draw.randrange(2), draw.randrange(1, 100))
            case 6 | 7 | 8 | 9 if world.links:
                world.deliver(draw.randrange(2), draw.choice(world.links), in_place=draw.random() < 0.5)
            case 10:
                world.ack(draw.randrange(2))
            case 11 if draw.random() < 0.3 and world.links:
                world.cut(draw.choice(world.links))
            case 11 if len(world.links) < 3:
                world.dial(draw.randrange(2))
        world.check()
    world.settle()
    world.check_all_arrived()
    assert sum(side.num_received for side in world.sides) > 100


def connected(limits: Sequence[LaneLimits] = LIMITS) -> tuple[World, Link]:
    world = World(limits)
    link = world.dial()
    world.deliver(1, link)
    world.deliver(0, link)
    return world, link


def lanes_of(segments: Sequence[bytes]) -> list[int]:
    return [segment[0] & 0x0F for segment in segments]


def drain(transfer: Transfer, max_bytes: int = MAX_CHUNK_BYTES) -> list[bytes]:
    segments = []
    while (plain := transfer.next_segment(max_bytes)) is not None:
        segments.append(plain)
    return segments


def test_short_frame_is_one_segment_with_its_length_in_front() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    ours.queue(Lane.DECODE, b"k", b"head", b"payload")
    assert (segments := drain(ours)) == [b"\x01\x0b\x00\x00\x00headpayload"]
    assert link.positions[1] is not None
    assert theirs.receive(link.positions[1], segments[0]) == b"headpayload"


def test_payload_of_64_kib_is_one_segment_with_its_header() -> None:
    ours = connected()[0].sides[0].transfer
    ours.queue(Lane.DECODE, b"k", bytes(1000), bytes(64 * 1024))
    assert len(drain(ours)) == 1


def test_long_frame_is_chunked_and_comes_back_read_only() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    payload = random.Random(1).randbytes(300_000)
    ours.queue(Lane.PREFILL, b"k", b"head", payload)
    segments = drain(ours)
    assert [segment[0] for segment in segments] == [BEGIN | Lane.PREFILL] + [CONTINUE | Lane.PREFILL] * 4
    assert max(map(len, segments)) == MAX_CHUNK_BYTES + 5
    assert link.positions[1] is not None
    frames = [take(theirs, link.positions[1], segment, in_place=True) for segment in segments]
    assert frames[:-1] == [None] * 4
    assert frames[-1] == b"head" + payload
    assert frames[-1].readonly


def test_decode_waits_for_one_chunk_of_a_prefill() -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    ours.queue(Lane.PREFILL, b"long", b"head", bytes(2_000_000))
    first = ours.next_segment()
    assert first is not None
    ours.queue(Lane.DECODE, b"short", b"head", bytes(4096))
    ours.queue(Lane.CONTROL, None, b"status")
    assert lanes_of([first, *drain(ours)][:4]) == [Lane.PREFILL, Lane.CONTROL, Lane.DECODE, Lane.PREFILL]


def test_no_lane_starves() -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    for number in range(200):
        ours.queue(Lane.DECODE, None, b"%04d" % number)
    ours.queue(Lane.PREFILL, None, b"head", bytes(1000))
    ours.queue(Lane.BULK, None, b"head", bytes(1000))
    lanes = lanes_of(drain(ours, 100))
    assert lanes.index(Lane.PREFILL) == STARVED_AFTER_CHUNKS
    assert lanes.index(Lane.BULK) == STARVED_AFTER_CHUNKS + 1


def test_frame_follows_the_one_before_it_of_its_key() -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    ours.queue(Lane.PREFILL, b"k", b"head", bytes(200_000))
    ours.queue(Lane.DECODE, b"k", b"head")
    ours.queue(Lane.CONTROL, b"other", b"head")
    assert lanes_of(drain(ours)) == [Lane.CONTROL] + [Lane.PREFILL] * 4


def test_frame_that_is_less_urgent_waits_for_the_one_before_it_and_holds_up_no_more_urgent_one() -> None:
    world, link = connected(SMALL)
    ours, theirs = (side.transfer for side in world.sides)
    ours.queue(Lane.DECODE, b"k", b"head", bytes(150))  # more than is granted
    ours.queue(Lane.PREFILL, b"k", b"next")
    ours.queue(Lane.CONTROL, None, b"head")
    first = drain(ours)
    assert lanes_of(first) == [Lane.CONTROL, Lane.DECODE]
    assert link.positions[1] is not None
    for segment in first:
        theirs.receive(link.positions[1], segment)
    ours.acked(*theirs.ack())
    assert lanes_of(drain(ours)) == [Lane.DECODE, Lane.PREFILL]


def test_after_a_lost_link_lanes_of_one_key_are_sent_again_in_their_order() -> None:
    world, link = connected()
    ours = world.sides[0].transfer
    ours.queue(Lane.PREFILL, b"k", b"head", bytes(100_000))
    drain(ours)
    ours.queue(Lane.DECODE, b"k", b"next")
    ours.queue(Lane.DECODE, b"other", b"free")
    assert lanes_of(drain(ours)) == [Lane.DECODE, Lane.DECODE]
    world.cut(link)
    link = world.dial()
    world.deliver(1, link)
    world.deliver(0, link)
    assert lanes_of(drain(ours)) == [Lane.PREFILL, Lane.PREFILL, Lane.DECODE, Lane.DECODE]


def test_without_credit_only_that_lane_stops() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    theirs.is_restrained = True
    ours.queue(Lane.BULK, None, b"head", bytes(10_000_000))
    position = link.positions[1]
    assert position is not None
    sent = 0
    for _ in range(20):
        for segment in drain(ours):
            theirs.receive(position, segment)
            sent += len(segment)
        ours.acked(*theirs.ack())
    assert sent <= LIMITS[Lane.BULK].window_bytes + 1000
    assert ours.queued_bytes > 5_000_000
    ours.queue(Lane.PREFILL, None, b"head", bytes(1_000_000))
    assert set(lanes_of(drain(ours))) == {Lane.PREFILL}
    theirs.is_restrained = False
    assert theirs.has_news()
    ours.acked(*theirs.ack())
    assert ours.next_lane() == Lane.BULK


def test_while_memory_is_short_an_unfinished_frame_gets_no_more_credit_and_others_do() -> None:
    world, link = connected(SMALL)
    ours, theirs = (side.transfer for side in world.sides)
    theirs.is_restrained = True
    ours.queue(Lane.PREFILL, None, b"head", bytes(300))
    for _ in range(5):
        for segment in drain(ours):
            theirs.receive(link.positions[1], segment)  # type: ignore[arg-type]
        ours.acked(*theirs.ack())
        ours.queue(Lane.CONTROL, None, bytes(40))
    assert theirs.unfinished_bytes == SMALL[Lane.PREFILL].window_bytes - 4
    assert world.sides[0].transfer.queued_bytes == 4 + 304 - SMALL[Lane.PREFILL].window_bytes + 44
    theirs.is_restrained = False
    ours.acked(*theirs.ack())
    assert set(lanes_of(drain(ours))) == {Lane.CONTROL, Lane.PREFILL}


def test_acknowledgements_are_asked_for_by_the_quarter_of_a_window() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    num_acks = 0
    for _ in range(100):
        ours.queue(Lane.DECODE, None, b"head", bytes(4096))
        for segment in drain(ours):
            theirs.receive(link.positions[1], segment)  # type: ignore[arg-type]
        if theirs.wants_ack:
            num_acks += 1
            ours.acked(*theirs.ack())
    assert num_acks == 100 * 4104 // (LIMITS[Lane.DECODE].window_bytes // 4)
    assert theirs.has_news()
    ours.acked(*theirs.ack())
    assert not theirs.has_news()
    assert ours.retained_bytes == 0


@pytest.mark.parametrize("lane", list(Lane))
def test_frame_above_its_limit_is_neither_sent_nor_taken(lane: Lane) -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    limit = LIMITS[lane].max_frame_bytes
    assert limit <= MAX_FRAME_BYTES
    with pytest.raises(WireError, match="exceeds"):
        ours.queue(lane, None, bytes(limit), b"1")
    assert drain(ours) == []
    too_long = bytes((BEGIN | lane,)) + (limit + 1).to_bytes(4, "little") + b"1234"
    with pytest.raises(WireError, match="exceeds"):
        theirs.receive(link.positions[1], too_long)  # type: ignore[arg-type]


BEGUN = b"\x02\x64\x00\x00\x00" + bytes(10)  # 10 of 100 bytes, lane 2


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        ([b"\x04\x04\x00\x00\x001234"], "unknown"),
        ([b"\x0f"], "unknown"),
        ([b"\x14\x00"], "unknown"),
        ([b"\x30\x00"], "unknown"),
        ([b""], "unknown"),
        ([b"\x00"], "begins"),
        ([b"\x00\x04\x00\x00\x00"], "begins"),
        ([b"\x00\x04\x00\x00\x0012345"], "longer"),
        ([b"\x10\x00"], "goes on"),
        ([BEGUN, b"\x11\x00"], "goes on"),
        ([BEGUN, BEGUN], "begins"),
        ([BEGUN, b"\x12"], "goes on"),
        ([BEGUN, b"\x12" + bytes(91)], "goes on"),
    ],
)
def test_chunks_that_contradict_themselves_are_refused(segments: list[bytes], why: str) -> None:
    for in_place in (False, True):
        transfer = Transfer()
        position = transfer.begin_link()
        for segment in segments[:-1]:
            take(transfer, position, segment, in_place=in_place)
        with pytest.raises(WireError, match=why):
            take(transfer, position, segments[-1], in_place=in_place)


def test_more_than_was_granted_is_refused() -> None:
    for in_place in (False, True):
        transfer = Transfer(SMALL)
        position = transfer.begin_link()
        take(transfer, position, b"\x02\x90\x01\x00\x00" + bytes(100), in_place=in_place)
        take(transfer, position, b"\x12" + bytes(24), in_place=in_place)
        with pytest.raises(WireError, match="granted"):
            take(transfer, position, b"\x12\x00", in_place=in_place)


@pytest.mark.parametrize(
    "told", [((1, 0, 0, 0), (9, 9, 9, 9)), ((0, 0, 0, 12), (9, 9, 9, 9)), ((0, 0, 0), (9, 9, 9, 9))]
)
def test_acknowledgement_of_what_was_not_sent_is_refused(told: Told) -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    ours.queue(Lane.BULK, None, b"1234567")
    drain(ours)
    with pytest.raises((WireError, ValueError)):
        ours.acked(*told)


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("in_hello", [False, True])
def test_grant_of_more_than_a_window_is_refused_and_changes_nothing(lane: Lane, in_hello: bool) -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    ours.queue(lane, None, bytes(1000))
    drain(ours)
    received, granted = [0] * NUM_LANES, [each.window_bytes for each in LIMITS]
    received[lane], granted[lane] = 1004, 1004 + LIMITS[lane].window_bytes + 1
    take = ours.resume if in_hello else ours.acked
    before = ours.acked_bytes
    with pytest.raises(WireError, match="window"):
        take(received, granted)
    assert (ours.acked_bytes, ours.queued_bytes, ours.retained_bytes) == (before, 0, 1004)
    granted[lane] -= 1
    take(received, granted)
    assert ours.retained_bytes == 0


def test_peer_that_takes_everything_and_acknowledges_nothing_makes_us_keep_a_window_and_a_frame() -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    for _ in range(10_000):
        ours.queue(Lane.CONTROL, None, bytes(1000))
        drain(ours)
        with contextlib.suppress(WireError):
            ours.acked((0,) * NUM_LANES, (2**62,) * NUM_LANES)
    assert 0 < ours.retained_bytes <= LIMITS[Lane.CONTROL].window_bytes


def test_hello_on_a_link_that_comes_to_nothing_told_nothing() -> None:
    world, link = connected(SMALL)
    ours, theirs = (side.transfer for side in world.sides)
    ours.queue(Lane.PREFILL, None, b"head", bytes(300))
    theirs.is_restrained = True
    for segment in drain(ours):
        theirs.receive(link.positions[1], segment)  # type: ignore[arg-type]
    ours.acked(*theirs.ack())  # without credit, for the frame is not finished
    assert drain(ours) == []
    theirs.is_restrained = False
    world.cut(world.dial(1))
    assert theirs.has_news()
    ours.acked(*theirs.ack())
    assert not theirs.has_news()
    assert drain(ours)


def test_acknowledgement_on_a_link_that_the_peer_has_left_already_is_repeated_on_the_next() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    ours.queue(Lane.PREFILL, None, bytes(1000))
    (segment,) = drain(ours)
    following = world.dial(1)
    world.deliver(0, following)
    theirs.receive(link.positions[1], segment)  # type: ignore[arg-type]
    theirs.ack()  # which nobody reads, for the answer is on its way
    world.deliver(1, following)
    assert theirs.has_news()


def test_hello_that_cannot_be_in_its_last_lane_changes_no_other() -> None:
    world, _ = connected()
    ours = world.sides[0].transfer
    for lane in Lane:
        ours.queue(lane, None, bytes(1000))
    drain(ours)
    before = (ours.acked_bytes, ours.queued_bytes, ours.retained_bytes)
    for received in ((0, 0, 0, 1005), (1004, 1004, 1004, 2)):
        with pytest.raises(WireError):
            ours.resume(received, [each.window_bytes for each in LIMITS])
        assert (ours.acked_bytes, ours.queued_bytes, ours.retained_bytes) == before
        assert drain(ours) == []
    for received in ((1004, 0, 0, 1005), (2000, 0, 0, 0)):
        with pytest.raises(WireError):
            ours.acked(received, [each.window_bytes for each in LIMITS])
        assert (ours.acked_bytes, ours.queued_bytes, ours.retained_bytes) == before


def test_hello_that_is_older_than_an_acknowledgement_or_stands_within_a_length() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    earlier = theirs.tell()
    for _ in range(2):
        ours.queue(Lane.CONTROL, None, b"1234")
    for segment in drain(ours)[:1]:
        theirs.receive(link.positions[1], segment)  # type: ignore[arg-type]
    received, granted = theirs.ack()
    ours.acked(received, granted)
    assert ours.resume(*earlier) == (8, 0, 0, 0)  # said before it was acknowledged
    for wrong in (9, 12, 17):
        with pytest.raises(WireError):
            ours.resume((wrong, 0, 0, 0), granted)


def test_link_that_would_leave_something_out_is_refused() -> None:
    world, link = connected()
    ours, theirs = (side.transfer for side in world.sides)
    ours.queue(Lane.CONTROL, None, b"1234")
    first = theirs.begin_link()
    (segment,) = drain(ours)
    theirs.receive(link.positions[1], segment)  # type: ignore[arg-type]
    theirs.expect(first, (5, 0, 0, 0))
    for wrong in ((4, 0, 0, 0), (9, 0, 0, 0), (5, 0, 0, 1)):
        with pytest.raises(WireError):
            theirs.expect(first, wrong)


@given(st.lists(st.binary(max_size=40), max_size=10), st.booleans())
def test_any_segments_are_taken_or_refused(segments: list[bytes], in_place: bool) -> None:
    transfer = Transfer(SMALL)
    position = transfer.begin_link()
    for segment in segments:
        try:
            done = take(transfer, position, segment, in_place=in_place and len(segment) > 0)
        except WireError:
            break
        assert done is None or len(done) <= SMALL[segment[0] & 0x0F].max_frame_bytes
