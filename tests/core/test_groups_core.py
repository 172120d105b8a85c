"""A fusion group is one peer to its user's session: the same events as of one node, and faults that name the member."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.client.groups_core import (
    INQUIRY_S,
    MAX_QUESTIONS,
    MAX_UNASKED,
    Groups,
    cut_columns,
    join_columns,
)
from fusion_node.client.session_core import Fault, Opened, RowsWanted, SessionCore, SessionEvent, StepDone
from fusion_node.errors import PeerClosed, PeerTimeout, RemoteProtocolError
from fusion_node.slices import Dims, split
from fusion_node.types import MonotonicS, PeerId, group_id, members_of
from p2p.identity import Identity, short
from p2p.messages import (
    MEMBER_UNREACHABLE,
    NOT_RETAINED,
    PEER_LOST,
    SUCCESSOR_UNREACHABLE,
    AnyMessage,
    Cancel,
    CloseSession,
    OpenSession,
    Replayed,
    Resend,
    SessionClosed,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    StageTiming,
    Standing,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Lease, Plan, PlanMember, PlanStage, Refusal
from p2p.tensor_wire import compress, decompress
from scheduler.repair_core import Cause

DIMS = Dims(hidden=48, heads=3, kv_heads=3, head_dim=16, channels=48)
WEIGHTS = (2, 1, 1)
COLUMNS = [bounds.columns for bounds in split(DIMS, WEIGHTS)]
KEY = bytes(range(16))
USER = Identity.from_seed(b"u" * 32).peer_id
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(8)]
GROUP = group_id(PEERS[:3])
OTHER = group_id(PEERS[3:6])
NODE = PEERS[6]
NOW = MonotonicS(0.0)
NOTHING = memoryview(b"")


def stage_of(peer: PeerId, start: int, stop: int) -> PlanStage:
    if peer == NODE:
        return PlanStage(peer, start, stop, ())
    members = tuple(PlanMember(each, ()) for each in members_of(peer))
    return PlanStage(peer, start, stop, (), (), members, WEIGHTS)


def plain_rows(payload: memoryview, tensor: TensorMeta) -> memoryview:
    return decompress(payload, tensor).data


def plan_of(*peers: PeerId, epoch: int = 0) -> Plan:
    stages = tuple(stage_of(peer, index * 3, index * 3 + 3) for index, peer in enumerate(peers))
    return Plan(PROTOCOL_VERSION, USER, KEY, epoch, "ab" * 32, "fp32", 64, 0.0, 60.0, stages)


def row_of(position: int, num_rows: int = 1) -> memoryview:
    """Whole rows that are told apart."""
    values = np.arange(DIMS.hidden * num_rows, dtype="<f4") + 1000 * position
    return values.view(np.uint8).data


def lease_of(envelope: bytes) -> Lease | Refusal:
    return msgspec.msgpack.decode(envelope, type=Lease)


def signed(member: PeerId, place: PlanStage, epoch: int, **changes: Any) -> bytes:
    lease = Lease(PROTOCOL_VERSION, member, USER, KEY, epoch, place.start, place.stop, 64, 0.0, 60.0)
    return msgspec.msgpack.encode(msgspec.structs.replace(lease, **changes))


@dataclass
class Member:
    """An honest member, or one node: answers what it is sent, in order."""

    peer: PeerId
    index: int
    out: deque[tuple[AnyMessage, memoryview]] = field(default_factory=deque)
    next_sequence: int = 0

    def take(self, message: AnyMessage, payload: memoryview, place: PlanStage, stage: int) -> None:
        is_member = bool(place.members)
        match message:
            case OpenSession():
                assert message.member == self.index
                assert not (is_member and message.taps)
                lease = signed(self.peer, place, message.epoch)
                self.out.append((SessionOpened(KEY, message.epoch, stage, 30.0 + self.index, 0, lease), NOTHING))
            case SessionQuery():
                progress = SessionProgress(
                    KEY,
                    message.epoch,
                    stage,
                    self.next_sequence,
                    self.next_sequence,
                    30.0,
                    0.1 * self.index,
                    signed(self.peer, place, message.epoch),
                )
                self.out.append((progress, NOTHING))
            case Step():
                self.next_sequence = message.sequence + 1
                width = len(COLUMNS[self.index]) if is_member else DIMS.hidden
                assert message.tensor.uncompressed == TensorMeta("f32", message.tensor.num_rows, width)
                whole = row_of(message.sequence, len(message.want))
                tensor = TensorMeta("f32", len(message.want), DIMS.hidden)
                rows = cut_columns(tensor, whole, COLUMNS)[self.index] if is_member else (tensor, whole)
                timing = (StageTiming(self.index, 7, 3 - self.index),)
                self.out.append(
                    (StepResult(KEY, message.epoch, message.sequence, message.want, rows[0], timing), rows[1])
                )
            case _:
                pass


Turn = Callable[[list[Member]], Member]


class World:
    """A session over one group, or one node in its place, and who answers when."""

    def __init__(self, peer: PeerId = GROUP) -> None:
        self.plan = plan_of(peer)
        self.peer = peer
        self.groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows, open_lease=lease_of)
        self.groups.begin(self.plan)
        self.core = SessionCore(
            self.plan,
            b"signed",
            row_size=DIMS.hidden,
            wire_dtype="f32",
            round_trips_s=[0.01],
            open_lease=lease_of,
            taps=(2,),
        )
        self.members = {each: Member(each, index) for index, each in enumerate(members_of(peer))}
        self.events: list[SessionEvent] = []
        self.rows: list[bytes] = []
        self.now = NOW
        self.change: Callable[[Member, AnyMessage, memoryview], list[tuple[AnyMessage, memoryview]]] = (
            lambda member, message, payload: [(message, payload)]
        )

    def flush(self) -> None:
        while True:
            while (event := self.core.next_event()) is not None:
                self.events.append(event)
                if isinstance(event, RowsWanted):
                    self.send_rows(event)
            messages = self.core.messages_to_send()
            for peer, message in messages:
                for member, each in self.groups.outgoing(peer, message, now=self.now):
                    self.members[member].take(each, NOTHING, self.plan.stages[0], 0)
            if not messages:
                return

    def send_rows(self, wanted: RowsWanted) -> None:
        tensor = TensorMeta("f32", wanted.num_positions, DIMS.hidden)
        sent = self.core.rows_ready(wanted, tensor, now=self.now)
        assert sent is not None
        peer, step = sent
        payload = row_of(wanted.first_position, wanted.num_positions)
        for member, each, part in self.groups.steps(peer, step, self.groups.cut(peer, tensor, payload)):
            self.members[member].take(each, part, self.plan.stages[0], 0)

    def say(self, member: Member, message: AnyMessage, payload: memoryview = NOTHING) -> None:
        for said in self.groups.receive(member.peer, message, payload, now=self.now):
            self.core.receive(said.message, source=said.source, now=self.now)
            if isinstance(said.message, StepResult):
                self.rows.append(bytes(said.payload))
        self.flush()

    def talk(self, turn: Turn) -> None:
        """Whoever's turn it is says the next thing, until nobody has anything to say."""
        self.flush()
        while ready := [each for each in self.members.values() if each.out]:
            member = turn(ready)
            for message, payload in self.change(member, *member.out.popleft()):
                self.say(member, message, payload)

    def answer(self, turn: Turn, num_steps: int = 3) -> None:
        """A prompt of three positions, single tokens behind it, and questions between."""
        self.core.start(now=self.now)
        self.talk(turn)
        for number in range(num_steps):
            if not any(isinstance(event, Opened) for event in self.events):
                return
            self.core.append(3 if not number else 1, want_last=True, now=self.now)
            self.core._watch.ask_all(now=self.now)
            self.core._follow_watch(self.now)
            self.talk(turn)

    @property
    def faults(self) -> list[Fault]:
        return [event for event in self.events if isinstance(event, Fault)]

    def at_fault(self) -> frozenset[PeerId]:
        return self.groups.at_fault(self.peer, now=self.now)


def first(ready: list[Member]) -> Member:
    return ready[0]


def last(ready: list[Member]) -> Member:
    return ready[-1]


def plain(events: list[SessionEvent]) -> list[Any]:
    """All of them but the timings, which are of several."""
    return [(e.sequence, e.num_computed, e.has_row) if isinstance(e, StepDone) else e for e in events]


def test_group_whose_members_agree_is_a_node_to_its_session_in_whatever_order_they_speak() -> None:
    node = World(NODE)
    node.members = {NODE: Member(NODE, 0)}
    node.answer(first)
    assert [type(event).__name__ for event in node.events].count("StepDone") == 3

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        world = World()
        world.answer(lambda ready: data.draw(st.sampled_from(ready)))
        assert plain(world.events) == plain(node.events)
        assert world.rows == node.rows == [bytes(row_of(n)) for n in range(3)]
        assert world.at_fault() == {GROUP}, "nobody in particular"

    check()


def test_timings_of_a_group_are_those_of_its_slowest_members() -> None:
    world = World()
    world.answer(first, 1)
    done = [event for event in world.events if isinstance(event, StepDone)]
    assert done[0].timings == (StageTiming(2, 7, 3),)


def _result(**changes: Any) -> Callable[[AnyMessage, memoryview], list[tuple[AnyMessage, memoryview]]]:
    def change(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
        if not isinstance(message, StepResult):
            return [(message, payload)]
        return [(msgspec.structs.replace(message, **changes), payload)]

    return change


def _opened(**changes: Any) -> Callable[[AnyMessage, memoryview], list[tuple[AnyMessage, memoryview]]]:
    def change(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
        if not isinstance(message, SessionOpened):
            return [(message, payload)]
        return [(msgspec.structs.replace(message, **changes), payload)]

    return change


def _progress(**changes: Any) -> Callable[[AnyMessage, memoryview], list[tuple[AnyMessage, memoryview]]]:
    def change(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
        if not isinstance(message, SessionProgress):
            return [(message, payload)]
        return [(msgspec.structs.replace(message, **changes), payload)]

    return change


def _infinite(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
    if not isinstance(message, StepResult):
        return [(message, payload)]
    rows = np.frombuffer(payload, dtype="<f4").copy()
    rows[-1] = np.inf
    return [(message, rows.view(np.uint8).data)]


def _badly_compressed(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
    if not isinstance(message, StepResult):
        return [(message, payload)]
    return [(msgspec.structs.replace(message, tensor=msgspec.structs.replace(message.tensor, codec="zs1")), payload)]


def _twice(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
    return [(message, payload)] * (2 if isinstance(message, StepResult) else 1)


def _made_up(message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
    if not isinstance(message, StepResult):
        return [(message, payload)]
    return [(msgspec.structs.replace(message, sequence=message.sequence + 7), payload)]


LIES = {
    "another-width": _result(tensor=TensorMeta("f32", 1, 1)),
    "another-encoding": _result(tensor=TensorMeta("f16", 1, 24)),
    "no-rows": _result(nodes=()),
    "other-nodes": _result(nodes=(77,)),
    "infinite": _infinite,
    "badly-compressed": _badly_compressed,
    "twice": _twice,
    "made-up": _made_up,
    "foreign-lease": _opened(lease=signed(PEERS[7], stage_of(GROUP, 0, 3), 0)),
    "lease-of-another-session": _opened(lease=signed(PEERS[0], stage_of(GROUP, 0, 3), 0, session=b"x" * 16)),
    "lease-for-less": _opened(lease=signed(PEERS[1], stage_of(GROUP, 0, 3), 0, num_positions=3)),
    "taps": _opened(taps=(2,)),
    "another-stage": _opened(stage=1),
    "reuses-too-much": _opened(reused_positions=16),
    "done-before-it-came": _progress(num_done=9),
    "progress-of-another-stage": _progress(stage=4),
    "progress-with-a-foreign-lease": _progress(lease=signed(PEERS[7], stage_of(GROUP, 0, 3), 0)),
}


@pytest.mark.parametrize("liar", range(3))
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
@pytest.mark.parametrize("turn", [first, last], ids=["first", "last"])
def test_member_that_lies_fails_its_group_and_is_named(
    lie: Callable[[AnyMessage, memoryview], list[tuple[AnyMessage, memoryview]]], liar: int, turn: Turn
) -> None:
    world = World()
    world.change = lambda member, message, payload: (
        lie(message, payload) if member.index == liar else [(message, payload)]
    )
    world.answer(turn)
    assert [fault.cause for fault in world.faults] == [Cause.REFUSED]
    assert world.at_fault() == {PEERS[liar]}
    assert short(PEERS[liar]) in str(world.faults[0].error)
    assert [error.peer for error in world.groups.named(world.faults[0].error, now=NOW)] == [PEERS[liar]]


def test_compressed_rows_of_members_are_joined() -> None:
    world = World()

    def change(member: Member, message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
        if not isinstance(message, StepResult):
            return [(message, payload)]
        stored = memoryview(compress(payload, "f32", level=1))
        return [(msgspec.structs.replace(message, tensor=msgspec.structs.replace(message.tensor, codec="zs1")), stored)]

    world.change = change
    world.answer(first)
    assert not world.faults
    assert world.rows == [bytes(row_of(n)) for n in range(3)]


def test_member_that_returns_less_than_those_beside_it_is_named_though_each_may_be_right_alone() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(NODE, GROUP))
    step = Step(KEY, 0, 0, 1, 0, (), 2, (1, 2), TensorMeta("f32", 2, DIMS.hidden), ())
    groups.steps(NODE, step, [(step.tensor, NOTHING)])
    for index, nodes in enumerate([(1, 2), (1, 2), (2,)]):
        tensor = TensorMeta("f32", len(nodes), len(COLUMNS[index]))
        rows = memoryview(bytes(tensor.num_bytes))
        said = groups.receive(PEERS[index], StepResult(KEY, 0, 0, nodes, tensor, ()), rows, now=NOW)
    assert [type(each.message) for each in said] == [SessionFailed]
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[2]}


@pytest.mark.parametrize("silent", range(3))
@pytest.mark.parametrize("after", [0, 1, 2])
def test_member_that_falls_silent_is_the_one_that_is_named(silent: int, after: int) -> None:
    world = World()
    counts = [0, 0, 0]

    def change(member: Member, message: AnyMessage, payload: memoryview) -> list[tuple[AnyMessage, memoryview]]:
        counts[member.index] += 1
        return [] if member.index == silent and counts[silent] > after else [(message, payload)]

    world.change = change
    world.answer(first)
    while not world.faults:
        due = world.core.get_timer()
        assert due is not None
        world.now = due
        world.core.handle_timer(now=due)
        world.talk(first)
    assert world.now < 10.0
    assert world.at_fault() == {PEERS[silent]}
    assert {error.peer for error in world.groups.named(world.faults[0].error, now=world.now)} == {PEERS[silent]}


def test_lost_member_is_named_and_stays_named_when_another_group_has_taken_over() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    groups.lost(PEERS[1])
    error = PeerClosed(GROUP, f"node {short(GROUP)} is gone")
    assert groups.groups_of(PEERS[1]) == [GROUP]
    assert [(e.peer, type(e)) for e in groups.named(error, now=NOW)] == [(PEERS[1], PeerClosed)]
    successor = group_id([PEERS[0], PEERS[7], PEERS[2]])
    groups.begin(plan_of(successor, epoch=1))
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[1]}
    assert groups.at_fault(successor, now=NOW) == {successor}
    assert groups.groups_of(PEERS[0]) == [GROUP, successor]


def test_errors_of_nodes_and_of_groups_without_a_culprit_stay_as_they_are() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    for peer in (GROUP, NODE):
        error = PeerTimeout(peer, "computes nothing")
        assert groups.named(error, now=NOW) == [error]


def failed(culprit: str = "", code: str = PEER_LOST, epoch: int = 0, stage: int = 0) -> SessionFailed:
    return SessionFailed(KEY, epoch, stage, code, "because", culprit, True)


def test_member_that_is_accused_by_another_is_the_fault_of_its_group_and_its_own_word_does_not_count() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    said = groups.receive(PEERS[0], failed(PEERS[2]), NOTHING, now=NOW)
    message = said[0].message
    assert isinstance(message, SessionFailed)
    assert (said[0].source, message.culprit, message.is_kept) == (GROUP, "", False)
    assert groups.receive(PEERS[2], failed(PEERS[0]), NOTHING, now=NOW) == []
    assert groups.receive(PEERS[1], failed(PEERS[2]), NOTHING, now=NOW) == []
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[2]}


@pytest.mark.parametrize("code", ["late-parts", "overflow", "flooded"])
def test_member_that_goes_on_no_more_and_knows_nobody_is_not_blamed_before_who_is_accused(code: str) -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    assert len(groups.receive(PEERS[0], failed(code=code), NOTHING, now=NOW)) == 1
    assert groups.at_fault(GROUP, now=NOW) == {GROUP}
    assert groups.receive(PEERS[1], failed(PEERS[2], code=code), NOTHING, now=NOW) == []
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[2]}


LONG_MS = 20_000


def at(num_sent: int, *missing: int, node: int = 7) -> Standing:
    return Standing(node, num_sent, missing, LONG_MS)


def late(standing: Standing | None, culprit: str = "", epoch: int = 0) -> SessionFailed:
    return SessionFailed(KEY, epoch, 0, "late-partials", "waited", culprit, True, standing)


def told(standing: Standing | None, epoch: int = 0) -> SessionProgress:
    return SessionProgress(KEY, epoch, 0, 4, 3, 9.0, 0.0, standing=standing)


def open_group(groups: Groups, group: PeerId = GROUP, epoch: int = 0) -> None:
    groups.begin(plan_of(group, epoch=epoch))
    groups.outgoing(group, OpenSession(KEY, epoch, 0, b""), now=NOW)
    for peer in members_of(group):
        groups.receive(peer, SessionOpened(KEY, epoch, 0, 30.0), NOTHING, now=NOW)


def test_member_that_waits_for_one_that_waits_itself_accuses_nobody_and_all_are_asked_how_far_they_are() -> None:
    """The third keeps back from the first what it sends the second, which is ahead then and waits for the first."""
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    assert groups.receive(PEERS[1], late(at(4, 0), PEERS[0]), NOTHING, now=NOW) == []
    query = SessionQuery(KEY, 0, 0)
    assert groups.outbox() == [(PEERS[0], query), (PEERS[2], query)]
    assert groups.receive(PEERS[2], late(at(4, 0), PEERS[0]), NOTHING, now=NOW) == []
    assert groups.outbox() == []
    [said] = groups.receive(PEERS[0], told(at(3, 2)), NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert (said.source, said.message.culprit, said.message.is_kept) == (GROUP, "", False)
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0], PEERS[2]}, "it is one of these, and not the second"
    texts = [str(error) for error in groups.named(PeerTimeout(GROUP, f"node {short(GROUP)} is late"), now=NOW)]
    assert texts == [
        f"node {short(a)} is late (or node {short(b)}: nobody can know which)"
        for a, b in sorted([(PEERS[0], PEERS[2]), (PEERS[2], PEERS[0])])
    ]
    assert groups.convicted == frozenset()


def test_member_that_is_slow_by_its_own_word_is_named_and_the_others_are_not() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    groups.receive(PEERS[1], late(at(4, 0), PEERS[0]), NOTHING, now=NOW)
    groups.receive(PEERS[0], told(at(3, 2)), NOTHING, now=NOW)
    assert len(groups.receive(PEERS[2], told(at(2)), NOTHING, now=NOW)) == 1
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[2]}


def test_member_that_contradicts_all_others_is_convicted_and_stays_so() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    groups.receive(PEERS[2], late(at(9, 0), PEERS[0]), NOTHING, now=NOW)  # who accuses first
    groups.receive(PEERS[0], told(at(3, 2)), NOTHING, now=NOW)
    groups.receive(PEERS[1], told(at(3, 2)), NOTHING, now=NOW)
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[2]}
    groups.begin(plan_of(OTHER, epoch=1))
    assert groups.convicted == {PEERS[2]}


def test_one_of_two_that_contradict_one_another_is_convicted_when_it_does_so_with_another_one_too() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    for epoch, other in enumerate([PEERS[0], PEERS[6]]):
        group = group_id([other, PEERS[2], PEERS[7 - epoch * 4]])
        open_group(groups, group, epoch)
        groups.receive(other, late(at(3, 1), PEERS[2], epoch), NOTHING, now=NOW)
        groups.receive(PEERS[2], told(at(4, 0), epoch), NOTHING, now=NOW)
        groups.receive(members_of(group)[2], told(at(4, 0), epoch), NOTHING, now=NOW)
        assert groups.at_fault(group, now=NOW) == ({other, PEERS[2]} if epoch == 0 else {PEERS[2]})
    assert groups.convicted == {PEERS[2]}


def test_group_fails_some_time_after_a_member_was_late_though_others_do_not_say_how_far_they_are() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    assert groups.get_timer() is None
    groups.receive(PEERS[0], late(at(3, 2), PEERS[2]), NOTHING, now=NOW)
    groups.receive(PEERS[1], told(at(3, 2)), NOTHING, now=NOW)
    due = groups.get_timer()
    assert due == NOW + INQUIRY_S
    assert groups.handle_timer(now=MonotonicS(due - 0.1)) == []
    [said] = groups.handle_timer(now=due)
    assert isinstance(said.message, SessionFailed)
    assert groups.handle_timer(now=due) == [] == groups.receive(PEERS[2], told(at(3)), NOTHING, now=due)
    assert groups.get_timer() is None
    assert groups.at_fault(GROUP, now=due) == {PEERS[2]}, "it has not answered"


def test_members_that_do_not_say_how_far_they_are_are_believed_no_more_than_those_whom_they_accuse() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    groups.receive(PEERS[0], late(None, PEERS[2]), NOTHING, now=NOW)
    groups.receive(PEERS[1], told(None), NOTHING, now=NOW)
    assert len(groups.receive(PEERS[2], told(None), NOTHING, now=NOW)) == 1
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0], PEERS[2]}


def test_question_that_the_session_did_not_ask_answers_none_of_its_own() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    groups.receive(PEERS[0], late(at(3, 2), PEERS[2]), NOTHING, now=NOW)
    groups.outgoing(GROUP, SessionQuery(KEY, 0, 0), now=NOW)
    said = [s for peer in PEERS[:2] for s in groups.receive(peer, told(at(3, 2)), NOTHING, now=NOW)]
    assert said == [], "the second has answered the inquiry alone"
    said = groups.receive(PEERS[1], told(at(3, 2)), NOTHING, now=NOW)
    assert said == []
    said = [s for _ in range(2) for s in groups.receive(PEERS[2], told(at(3)), NOTHING, now=NOW)]
    assert [type(each.message) for each in said] == [SessionFailed]


def test_member_that_waits_is_not_the_one_that_is_behind_where_the_session_itself_sees_nothing_move() -> None:
    """The user's own patience ends before that of the members."""
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    groups.outgoing(GROUP, SessionQuery(KEY, 0, 0), now=NOW)
    for peer, standing, num_done in zip(PEERS, (at(3, 2), at(4, 0), at(4, 0)), (3, 4, 4), strict=False):
        progress = SessionProgress(KEY, 0, 0, 4, num_done, 9.0, 0.0, standing=standing)
        groups.receive(peer, progress, NOTHING, now=NOW)
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0], PEERS[2]}


def test_rows_of_a_group_are_on_the_way_for_as_long_as_those_of_its_slowest_line() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    open_group(groups)
    groups.outgoing(GROUP, SessionQuery(KEY, 0, 0), now=NOW)
    said = []
    for peer, backlog_s in zip(PEERS, (0.0, 7.5, 1.0), strict=False):
        said += groups.receive(peer, SessionProgress(KEY, 0, 0, 4, 4, 9.0, 0.0, backlog_s=backlog_s), NOTHING, now=NOW)
    (merged,) = [each.message for each in said]
    assert isinstance(merged, SessionProgress)
    assert merged.backlog_s == 7.5


def test_answer_of_an_earlier_plan_uses_up_no_question() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    groups.outgoing(GROUP, SessionQuery(KEY, 0, 0), now=NOW)
    groups.begin(plan_of(GROUP, epoch=1))
    groups.outgoing(GROUP, SessionQuery(KEY, 1, 0), now=NOW)
    said = []
    for epoch in (0, 1):
        for peer in PEERS[:3]:
            progress = SessionProgress(KEY, epoch, 0, 1 + epoch, 1, 9.0, 0.0)
            said += groups.receive(peer, progress, NOTHING, now=NOW)
    assert [(s.message.epoch, s.message.next_sequence) for s in said if isinstance(s.message, SessionProgress)] == [
        (1, 2)
    ]


def test_member_that_accuses_one_after_the_other_is_doubted_itself() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    groups.receive(PEERS[0], failed(PEERS[2]), NOTHING, now=NOW)
    successor = group_id([PEERS[0], PEERS[1], PEERS[7]])
    groups.begin(plan_of(successor, epoch=1))
    groups.receive(PEERS[0], failed(PEERS[7], epoch=1), NOTHING, now=NOW)
    assert groups.at_fault(successor, now=NOW) == {PEERS[7], PEERS[0]}


def test_accuser_of_those_who_are_really_gone_is_not_doubted() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    groups.receive(PEERS[0], failed(PEERS[2]), NOTHING, now=NOW)
    groups.lost(PEERS[2])
    successor = group_id([PEERS[0], PEERS[1], PEERS[7]])
    groups.begin(plan_of(successor, epoch=1))
    groups.receive(PEERS[0], failed(PEERS[7], epoch=1), NOTHING, now=NOW)
    assert groups.at_fault(successor, now=NOW) == {PEERS[7]}


def test_member_of_several_groups_that_failed_and_nobody_knows_why_is_doubted() -> None:
    """It lets others wait for it, and they are those that seem to be behind."""
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    members = [*PEERS[:3]]
    for epoch, spare in enumerate([PEERS[6], PEERS[7]]):
        group = group_id(members)
        groups.begin(plan_of(group, epoch=epoch))
        groups.outgoing(group, OpenSession(KEY, epoch, 0, b""), now=NOW)
        for peer in members:
            groups.receive(peer, SessionOpened(KEY, epoch, 0, 30.0), NOTHING, now=NOW)
        groups.outgoing(group, SessionQuery(KEY, epoch, 0), now=NOW)
        for peer, num_done in zip(members, (4, 3, 4), strict=True):
            groups.receive(peer, SessionProgress(KEY, epoch, 0, 4, num_done, 9.0, 0.0), NOTHING, now=NOW)
        if epoch == 0:
            assert groups.at_fault(group, now=NOW) == groups.at_fault(group, now=NOW) == {members[1]}
            members[1] = spare
    assert groups.at_fault(group, now=NOW) == {*members}


def test_culprit_of_another_group_becomes_that_group_and_is_named_when_it_is_found_at_fault() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(OTHER, GROUP, NODE))
    [said] = groups.receive(PEERS[1], failed(PEERS[4], "bad-parts", stage=1), NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert (said.source, said.message.culprit, said.message.is_kept) == (GROUP, OTHER, True)
    assert groups.at_fault(OTHER, now=NOW) == {PEERS[4]}
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[1]}
    [said] = groups.receive(NODE, failed(PEERS[2], "bad-parts", stage=2), NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert (said.source, said.message.culprit) == (NODE, GROUP)
    [said] = groups.receive(PEERS[1], failed(NODE, stage=1), NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert (said.source, said.message.culprit) == (GROUP, NODE)


def contradicted(*suspects: PeerId, stage: int = 1, epoch: int = 0) -> SessionFailed:
    return SessionFailed(KEY, epoch, stage, "bad-parts", "they differ", "", True, None, suspects)


@pytest.mark.parametrize("behind", [NODE, OTHER])
def test_of_members_whose_parts_contradict_one_another_all_are_suspected_and_none_convicted(behind: PeerId) -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP, behind))
    source = members_of(behind)[0]
    [said] = groups.receive(source, contradicted(PEERS[0], PEERS[1]), NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert (said.source, said.message.culprit, said.message.suspects) == (behind, GROUP, ())
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0], PEERS[1]}
    errors = groups.named(RemoteProtocolError(GROUP, f"node {short(GROUP)} erred"), now=NOW)
    assert all("nobody can know which" in str(error) for error in errors)
    assert groups.convicted == frozenset()


def test_of_those_whose_parts_contradict_one_another_the_one_that_is_always_in_it_is_convicted() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    for epoch, (other, accuser) in enumerate([(PEERS[0], PEERS[6]), (PEERS[5], PEERS[7])]):
        front = group_id([other, PEERS[1], PEERS[2]])
        behind = group_id([accuser, PEERS[3], PEERS[4]])
        groups.begin(plan_of(front, behind, epoch=epoch))
        groups.receive(accuser, contradicted(other, PEERS[1], epoch=epoch), NOTHING, now=NOW)
        assert groups.at_fault(front, now=NOW) == ({other, PEERS[1]} if epoch == 0 else {PEERS[1]})
    assert groups.convicted == {PEERS[1]}


def test_one_that_says_of_others_that_they_contradict_one_another_convicts_nobody_by_it() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    for epoch, spare in enumerate([PEERS[0], PEERS[5]]):
        groups.begin(plan_of(group_id([spare, PEERS[1], PEERS[2]]), NODE, epoch=epoch))
        groups.receive(NODE, contradicted(spare, PEERS[1 + epoch], epoch=epoch), NOTHING, now=NOW)
    assert groups.convicted <= {NODE}
    groups.receive(NODE, contradicted(PEERS[5], PeerId("stranger"), epoch=1), NOTHING, now=NOW)
    assert groups.convicted <= {NODE}


def test_of_two_members_that_return_different_rows_nobody_can_know_who_is_right() -> None:
    pair = group_id(PEERS[:2])
    plan = plan_of(NODE, pair)
    stages = (plan.stages[0], msgspec.structs.replace(plan.stages[1], weights=(2, 1)))
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(msgspec.structs.replace(plan, stages=stages))
    step = Step(KEY, 0, 0, 1, 0, (), 2, (1, 2), TensorMeta("f32", 2, DIMS.hidden), ())
    groups.steps(NODE, step, [(step.tensor, NOTHING)])
    said = []
    for index, nodes in enumerate([(1, 2), (2,)]):
        tensor = TensorMeta("f32", len(nodes), len(groups._by_id[pair].members[index].columns))
        rows = memoryview(bytes(tensor.num_bytes))
        said = groups.receive(PEERS[index], StepResult(KEY, 0, 0, nodes, tensor, ()), rows, now=NOW)
    assert [type(each.message) for each in said] == [SessionFailed]
    assert groups.at_fault(pair, now=NOW) == set(PEERS[:2])


@pytest.mark.parametrize("message", [failed(), failed("stranger"), failed(code=NOT_RETAINED), failed(PEERS[1])])
def test_failure_of_a_member_without_a_neighbour_as_culprit_is_its_own(message: SessionFailed) -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    [said] = groups.receive(PEERS[1], message, NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert (said.source, said.message.culprit) == (GROUP, "")
    is_kept = message.code == NOT_RETAINED
    assert groups.at_fault(GROUP, now=NOW) == ({GROUP} if is_kept else {PEERS[1]})


def test_member_that_refuses_or_leaves_is_named() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    [said] = groups.receive(PEERS[1], SessionDraining(KEY, 0, 0, 20.0, "shutting down"), NOTHING, now=NOW)
    assert isinstance(said.message, SessionDraining)
    assert said.source == GROUP
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[1]}
    [said] = groups.receive(PEERS[2], SessionRefused(KEY, 0, 0, "no-memory", "full"), NOTHING, now=NOW)
    assert isinstance(said.message, SessionRefused)
    assert short(PEERS[2]) in said.message.reason
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[1], PEERS[2]}


def test_member_that_another_cannot_reach_is_named() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP, OTHER))
    refused = SessionRefused(KEY, 0, 0, MEMBER_UNREACHABLE, "cannot dial it", PEERS[2])
    [said] = groups.receive(PEERS[0], refused, NOTHING, now=NOW)
    assert isinstance(said.message, SessionRefused)
    assert said.source == GROUP
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[2]}
    groups.begin(plan_of(GROUP, OTHER, epoch=1))
    refused = SessionRefused(KEY, 1, 0, SUCCESSOR_UNREACHABLE, "cannot dial it", PEERS[4])
    [said] = groups.receive(PEERS[0], refused, NOTHING, now=NOW)
    assert isinstance(said.message, SessionRefused)
    assert (said.source, said.message.code) == (GROUP, SUCCESSOR_UNREACHABLE)
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0]}
    assert groups.at_fault(OTHER, now=NOW) == {PEERS[4]}


def opened(next_sequence: int, num_positions: int, epoch: int = 1) -> SessionOpened:
    return SessionOpened(
        KEY, epoch, 0, 30.0, next_sequence=next_sequence, num_positions=num_positions, retained_positions=num_positions
    )


def opening(groups: Groups, epoch: int, *, resumes: bool) -> list[tuple[PeerId, AnyMessage]]:
    message = OpenSession(KEY, epoch, 0, b"signed", resumes=resumes, taps=(1,))
    return groups.outgoing(GROUP, message, now=NOW)


def test_members_with_different_parts_of_the_session_begin_anew_and_the_group_has_nothing() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP, epoch=1))
    opening(groups, 1, resumes=True)
    for peer, num in zip(PEERS[:3], (5, 0, 6), strict=True):
        assert groups.receive(peer, opened(num, num), NOTHING, now=NOW) == []
    sent = groups.outbox()
    assert [(peer, type(message)) for peer, message in sent] == [
        (PEERS[0], CloseSession),
        (PEERS[0], OpenSession),
        (PEERS[2], CloseSession),
        (PEERS[2], OpenSession),
    ]
    assert [message.member for _, message in sent if isinstance(message, OpenSession)] == [0, 2]
    assert groups.outbox() == []
    assert groups.receive(PEERS[0], SessionClosed(KEY, 1), NOTHING, now=NOW) == []
    assert groups.receive(PEERS[2], opened(0, 0), NOTHING, now=NOW) == []
    [said] = groups.receive(PEERS[0], opened(0, 0), NOTHING, now=NOW)
    assert isinstance(said.message, SessionOpened)
    assert (said.source, said.message.next_sequence, said.message.retained_positions) == (GROUP, 0, 0)


def keys_in(messages: list[tuple[PeerId, AnyMessage]]) -> list[bytes]:
    return [message.mask_keys for _, message in messages if isinstance(message, OpenSession)]


def test_members_of_a_masked_group_share_a_key_for_each_pair_and_have_others_with_every_opening() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows, mask_secret=bytes(32))
    seen = set[bytes]()
    for epoch in (0, 0, 1):
        groups.begin(msgspec.structs.replace(plan_of(GROUP, epoch=epoch), masks=True))
        openings = [keys_in(opening(groups, epoch, resumes=bool(epoch)))]
        if epoch:
            # One that has nothing begins anew as well: the keys that it shares with the others are new.
            for peer, num in zip(PEERS[:3], (5, 0, 6), strict=True):
                assert groups.receive(peer, opened(num, num), NOTHING, now=NOW) == []
            sent = groups.outbox()
            assert [peer for peer, message in sent if isinstance(message, CloseSession)] == list(PEERS[:3])
            openings.append(keys_in(sent))
        for first, second, third in openings:
            assert (first[:32], first[32:], second[32:]) == (second[:32], third[:32], third[32:])
            seen |= {first[:32], first[32:], second[32:]}
    assert len(seen) == 12


def test_plain_group_is_sent_no_keys() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    assert keys_in(opening(groups, 0, resumes=False)) == [b""] * 3


def test_group_of_which_a_member_is_lost_or_revoked_does_not_begin_anew() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP, epoch=1))
    opening(groups, 1, resumes=True)
    groups.receive(PEERS[0], opened(5, 5), NOTHING, now=NOW)
    groups.lost(PEERS[0])
    for peer in PEERS[1:3]:
        groups.receive(peer, opened(0, 0), NOTHING, now=NOW)
    assert groups.outbox() == []


def test_member_that_refuses_what_it_has_opened_is_not_taken_to_have_held_nothing() -> None:
    refused: list[PeerId] = []
    groups = Groups(
        DIMS.hidden,
        wire_dtype="f32",
        decompress=plain_rows,
        on_refused=lambda session, member: refused.append(member),
    )
    groups.begin(plan_of(GROUP, epoch=1))
    opening(groups, 1, resumes=False)
    groups.receive(PEERS[0], opened(0, 0), NOTHING, now=NOW)
    groups.receive(PEERS[0], SessionRefused(KEY, 1, 0, "no-memory", "full"), NOTHING, now=NOW)
    assert refused == []
    groups.begin(plan_of(GROUP, epoch=2))
    opening(groups, 2, resumes=False)
    groups.receive(PEERS[1], SessionRefused(KEY, 2, 0, "no-memory", "full"), NOTHING, now=NOW)
    assert refused == [PEERS[1]]


def test_member_that_has_something_of_what_it_was_to_begin_anew_is_at_fault() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP, epoch=1))
    opening(groups, 1, resumes=True)
    for peer, num in zip(PEERS[:3], (5, 0, 0), strict=True):
        groups.receive(peer, opened(num, num), NOTHING, now=NOW)
    groups.outbox()
    [said] = groups.receive(PEERS[0], opened(5, 5), NOTHING, now=NOW)
    assert isinstance(said.message, SessionFailed)
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0]}


def test_members_that_have_the_same_go_on_with_the_least_that_they_promise() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP, epoch=1))
    sent = opening(groups, 1, resumes=True)
    assert [(p, m.member, m.taps) for p, m in sent if isinstance(m, OpenSession)] == [
        (peer, index, ()) for index, peer in enumerate(PEERS[:3])
    ]
    for peer in PEERS[:2]:
        assert groups.receive(peer, opened(5, 9), NOTHING, now=NOW) == []
    less = msgspec.structs.replace(opened(5, 9), retained_positions=4, lease_s=2.0)
    [said] = groups.receive(PEERS[2], less, NOTHING, now=NOW)
    assert said.message == less
    assert groups.outbox() == []


def test_first_session_whose_members_reuse_different_beginnings_begins_empty() -> None:
    for reused, expected in (((16, 16, 16), 16), ((16, 32, 16), 0)):
        groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
        groups.begin(plan_of(GROUP))
        groups.outgoing(GROUP, OpenSession(KEY, 0, 0, b"", prefix=b"p" * 16, prefix_positions=32), now=NOW)
        for peer, positions in zip(PEERS[:3], reused, strict=True):
            message = SessionOpened(KEY, 0, 0, 30.0, positions, num_positions=positions)
            said = groups.receive(peer, message, NOTHING, now=NOW)
        assert isinstance(said[0].message, SessionOpened)
        assert said[0].message.reused_positions == expected


def test_result_of_an_earlier_plan_counts_only_for_who_goes_on() -> None:
    for successor, is_counted in ((GROUP, True), (group_id([*PEERS[:2], PEERS[7]]), False)):
        groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
        groups.begin(plan_of(GROUP))
        step = Step(KEY, 0, 0, 1, 0, (), 1, (1,), TensorMeta("f32", 1, DIMS.hidden), ())
        parts = groups.cut(GROUP, step.tensor, row_of(0))
        groups.steps(GROUP, step, parts)
        results = [StepResult(KEY, 0, 0, (1,), tensor, ()) for tensor, _ in parts]
        groups.receive(PEERS[0], results[0], parts[0][1], now=NOW)
        groups.begin(plan_of(successor, epoch=1))
        said = [s for k in (1, 2) for s in groups.receive(PEERS[k], results[k], parts[k][1], now=NOW)]
        assert [bytes(each.payload) for each in said if each.source == successor] == [bytes(row_of(0))] * is_counted


def test_nothing_that_members_send_unasked_is_kept() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(NODE, GROUP))
    tensor = TensorMeta("f32", 1, len(COLUMNS[0]))
    row = memoryview(bytes(tensor.num_bytes))
    said = []
    for sequence in range(MAX_UNASKED + 1):
        said = groups.receive(PEERS[0], StepResult(KEY, 0, sequence, (1,), tensor, ()), row, now=NOW)
    assert [type(each.message) for each in said] == [SessionFailed]
    assert groups.at_fault(GROUP, now=NOW) == {PEERS[0]}
    groups.begin(plan_of(NODE, GROUP, epoch=1))
    for _ in range(3):
        assert groups.receive(PEERS[0], SessionProgress(KEY, 1, 1, 0, 0, 9.0, 0.0), NOTHING, now=NOW) == []
        taps = StepTaps(KEY, 1, 0, 4, (1,), tensor)
        assert groups.receive(PEERS[0], taps, row, now=NOW) == []
    for _ in range(3 * MAX_QUESTIONS):
        groups.outgoing(GROUP, SessionQuery(KEY, 1, 1), now=NOW)
        groups.receive(PEERS[0], SessionProgress(KEY, 1, 1, 0, 0, 9.0, 0.0), NOTHING, now=NOW)
    held = groups._by_id[GROUP].members
    assert len(held[1].questions) == MAX_QUESTIONS
    for number in range(1000):
        groups.know(group_id([PEERS[0], PeerId(f"peer{number}")]))
    assert len(groups.groups_of(PEERS[0])) <= 256


def test_messages_of_other_sessions_and_later_plans_change_nothing() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    for message in (failed(epoch=1), msgspec.structs.replace(failed(), session=b"y" * 16)):
        assert groups.receive(PEERS[0], message, NOTHING, now=NOW) == []
    assert groups.at_fault(GROUP, now=NOW) == {GROUP}


def test_cancels_are_not_sent_where_a_stage_is_a_group_and_orders_are_to_all_members() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(NODE, GROUP))
    assert groups.outgoing(NODE, Cancel(KEY, 0, 1), now=NOW) == groups.outgoing(GROUP, Cancel(KEY, 0, 1), now=NOW) == []
    order = Resend(KEY, 0, 0, 1, 0, 1, True)
    assert groups.outgoing(GROUP, order, now=NOW) == [(peer, order) for peer in PEERS[:3]]
    groups.begin(plan_of(NODE))
    assert groups.outgoing(NODE, Cancel(KEY, 0, 1), now=NOW) == [(NODE, Cancel(KEY, 0, 1))]
    assert not groups.are_used
    close = CloseSession(KEY, 0)
    assert groups.outgoing(GROUP, close, now=NOW) == [(peer, close) for peer in PEERS[:3]]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from(["f32", "f16"]))
def test_rows_that_were_cut_by_columns_are_joined_to_the_byte(num_rows: int, weights: list[int], dtype: str) -> None:
    columns = [bounds.columns for bounds in split(Dims(40, 8, 8, 4, 64), weights)]
    size = {"f32": 4, "f16": 2}[dtype]
    payload = memoryview(np.random.default_rng(num_rows).bytes(num_rows * 40 * size))
    parts = cut_columns(TensorMeta(dtype, num_rows, 40), payload, columns)
    assert [(t.num_rows, t.row_size) for t, _ in parts] == [(num_rows, len(each)) for each in columns]
    assert all(len(rows) == tensor.num_bytes for tensor, rows in parts)
    assert bytes(join_columns(dtype, num_rows, [(rows, t.row_size) for t, rows in parts])) == bytes(payload)


def test_bad_row_is_named_by_whom_the_session_blames() -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    groups.begin(plan_of(GROUP))
    error = RemoteProtocolError(GROUP, f"node {short(GROUP)} returned a bad row")
    groups.receive(PEERS[2], failed(), NOTHING, now=MonotonicS(time.monotonic()))
    [named] = groups.named(error, now=NOW)
    assert (named.peer, str(named)) == (PEERS[2], f"node {short(PEERS[2])} returned a bad row")


SMALL = st.integers(0, 3)


def anything() -> st.SearchStrategy[tuple[AnyMessage, memoryview]]:
    """What a member may send: of this session or not, of any epoch, sense or nonsense, but well-formed."""
    session = st.sampled_from([KEY, b"z" * 16])
    code = st.sampled_from(
        [PEER_LOST, NOT_RETAINED, "internal", "late-partials", MEMBER_UNREACHABLE, SUCCESSOR_UNREACHABLE]
    )
    missing = st.lists(st.integers(0, 15), max_size=3).map(tuple)
    standing = st.none() | st.builds(Standing, SMALL, SMALL, missing, st.sampled_from([0, LONG_MS]), st.booleans())
    culprit = st.sampled_from(["", *PEERS, USER])
    width = st.sampled_from([len(COLUMNS[0]), len(COLUMNS[1]), 5])
    nodes = st.sampled_from([(), (1,), (2,), (1, 2)])
    without_rows = st.one_of(
        st.builds(SessionOpened, session, SMALL, SMALL, st.just(9.0), SMALL, next_sequence=SMALL, num_positions=SMALL),
        st.builds(SessionRefused, session, SMALL, SMALL, code, st.just("why"), culprit),
        st.builds(SessionFailed, session, SMALL, SMALL, code, st.just("why"), culprit, st.booleans(), standing),
        st.builds(
            SessionProgress, session, SMALL, SMALL, SMALL, SMALL, st.just(9.0), st.just(0.0), st.just(b""), standing
        ),
        st.builds(SessionDraining, session, SMALL, SMALL, st.just(9.0), st.just("why")),
        st.builds(Replayed, session, SMALL, SMALL, SMALL, SMALL),
        st.builds(SessionClosed, session, SMALL),
    ).map(lambda message: (message, NOTHING))

    def with_rows(key: bytes, epoch: int, sequence: int, nodes: tuple[int, ...], width: int) -> Any:
        tensor = TensorMeta("f32", len(nodes), width)
        return StepResult(key, epoch, sequence, nodes, tensor, ()), memoryview(bytes(tensor.num_bytes))

    return st.one_of(without_rows, st.builds(with_rows, session, SMALL, st.integers(0, 9), nodes, width))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PEERS[:7]), anything(), SMALL, st.booleans()), max_size=40),
    st.sampled_from([(GROUP,), (NODE, GROUP), (GROUP, OTHER)]),
)
def test_whatever_comes_is_bounded_and_fails_a_group_once(
    events: list[tuple[PeerId, tuple[AnyMessage, memoryview], int, bool]], peers: tuple[PeerId, ...]
) -> None:
    groups = Groups(DIMS.hidden, wire_dtype="f32", decompress=plain_rows)
    epoch, num_asked = 0, 0
    failed: set[tuple[PeerId, int]] = set()
    groups.begin(plan_of(*peers))
    for source, (message, payload), number, is_ours in events:
        if is_ours and number == 3:
            epoch += 1
            groups.begin(plan_of(*peers, epoch=epoch))
            for index, peer in enumerate(peers):
                groups.outgoing(peer, OpenSession(KEY, epoch, index, b"", resumes=True), now=NOW)
        elif is_ours and number == 2:
            for index, peer in enumerate(peers):
                groups.outgoing(peer, SessionQuery(KEY, epoch, index), now=NOW)
        elif is_ours:
            num_asked += 1
            tensor = TensorMeta("f32", 1, DIMS.hidden)
            step = Step(KEY, epoch, number, 1, 0, (), 2, (1, 2), TensorMeta("f32", 2, DIMS.hidden), ())
            groups.steps(peers[0], step, [(tensor, NOTHING)] * len(members_of(peers[0])))
        said = groups.receive(source, message, payload, now=NOW)
        assert len(said) <= 1
        for each in said:
            assert each.source in (*peers, *PEERS)
            if each.source in peers and each.source != NODE:
                assert (each.source, epoch) not in failed, "it has failed already"
                if isinstance(each.message, SessionFailed):
                    assert each.message.culprit in ("", *peers)
                    is_over = not each.message.culprit and not each.message.is_kept
                    failed |= {(each.source, epoch)} if is_over else set()
        for group in groups._by_id.values():
            # Of each entry that was asked for one part of each member, and few that nobody asked for.
            assert len(group.parts) <= num_asked + MAX_UNASKED
            assert all(len(member.answers) <= MAX_QUESTIONS for member in group.members)
        groups.outbox()
        for each in groups.handle_timer(now=NOW) if number == 1 else ():
            failed.add((each.source, epoch))
        for peer in peers:
            assert groups.at_fault(peer, now=NOW) <= {peer, *members_of(peer)}
