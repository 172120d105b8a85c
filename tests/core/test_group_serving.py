"""What a member of a group decides about its sessions: whose columns it joins, to whom they go, what it adopts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from fusion_node.daemon.admission_core import MAX_QUEUED_ROWS, Admission, Session, SessionState
from fusion_node.daemon.output_log_core import OutputLog
from fusion_node.daemon.parts_core import Joined
from fusion_node.daemon.serving_core import (
    MAX_ALL_JOINING_BYTES,
    MAX_JOINING_BYTES_OF_USER,
    PARTS_S,
    Connect,
    EnterGroup,
    Forget,
    LeaveGroup,
    Send,
    SendRows,
    ServedStep,
    Serving,
    Take,
)
from fusion_node.engine.block_manager_core import BlockManager
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.messages import (
    AnyMessage,
    CloseSession,
    OpenSession,
    Resend,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    StageTiming,
    Step,
    TensorMeta,
    alias_of,
)
from p2p.records import Plan, PlanMember, PlanStage
from tests.core.serving_world import KEY, MODEL, PEERS, plan_of

HIDDEN = 48
USER = PEERS[30]
FRONT, OWN, BACK = PEERS[0:2], PEERS[2:5], PEERS[5:7]
"""Groups of two, three and two, with columns 0, 24 and 0, 16, 32 and on. The node under test is the second of OWN."""
US = OWN[1]
NOW = MonotonicS(100.0)


def stage(start: int, peers: Sequence[PeerId], weights: tuple[int, ...] | None = None) -> PlanStage:
    members = tuple(PlanMember(peer, (f"{peer[-4:]}:1",)) for peer in peers)
    return PlanStage(peers[0], start, start + 1, (), members=members, weights=weights or (1,) * len(peers))


STAGES = (stage(0, FRONT), stage(1, OWN), stage(2, BACK))


@dataclass
class Member:
    """The serving core of the second of three members, and what it has asked its shell to do."""

    hidden: int = HIDDEN
    commands: list[object] = field(default_factory=list)
    told: list[AnyMessage] = field(default_factory=list)
    rows: list[tuple[PeerId, Step, bytes]] = field(default_factory=list)
    steps: list[ServedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plans: dict[bytes, Plan] = {}
        blocks = BlockManager(64, block_slots=16)
        slice_ = ModelSlice(1, (1, 1, 1))
        self.admission = Admission(US, MODEL, LayerRange(0, 3), "fp32", blocks, slice=slice_)
        self.outputs = OutputLog(max_bytes=1 << 20)
        self.core = Serving(
            self.admission, self.outputs, row_size=self.hidden, wire_dtype="f32", open_plan=self.plans.__getitem__
        )

    def open(self, *, epoch: int = 0, key: bytes = KEY, connects: bool = True, **changes: object) -> Plan:
        fields: dict[str, object] = {"stages": STAGES, "session": key, "max_positions": 500}
        resumes, user = bool(changes.pop("resumes", False)), PeerId(str(changes.pop("user", USER)))
        plan = plan_of(user, [], epoch, **(fields | changes))
        envelope = repr((key, epoch, plan.stages)).encode()
        self.plans[envelope] = plan
        self.receive(user, OpenSession(key, epoch, 1, envelope, resumes=resumes, member=1))
        for dial in [each for each in self.commands if isinstance(each, Connect)] if connects else ():
            self.core.successor_connected(dial.session, dial.epoch, now=NOW, peer=dial.peer)
        self.carry_out()
        return plan

    def receive(self, peer: PeerId, message: AnyMessage, payload: object = b"") -> None:
        assert self.core.receive(peer, message, payload, now=NOW)
        self.carry_out()

    def part(self, plan: Plan, peer: PeerId, number: int, *, num_rows: int = 1, **changes: object) -> None:
        """One of those before sends its eight columns of an entry of as many positions as the others have."""
        first = number * num_rows
        fields: dict[str, object] = {
            "session": plan.session,
            "epoch": plan.epoch,
            "sequence": number,
            "first_node": first + 1,
            "parent": first,
            "parents": (),
            "advance": first + num_rows,
            "want": (),
            "tensor": TensorMeta("f32", num_rows, 8),
            "timings": (StageTiming(1, 2),),
        }
        payload = changes.pop("payload", bytes([[*FRONT, *PEERS[12:15]].index(peer) + 1]) * 32 * num_rows)
        self.receive(peer, Step(**(fields | changes)), payload)  # type: ignore[arg-type]

    def compute(self, index: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """The oldest step is computed: each value says where it is, own columns being 16 to 32."""
        step = self.steps.pop(index)
        rows = np.array(
            [[100 * position + column for column in range(16, 32)] for position in step.rows.positions], np.float32
        )
        self.core.step_computed(step, memoryview(rows.tobytes()), StageTiming(3, 4), now=NOW)
        self.carry_out()
        return rows

    def carry_out(self) -> None:
        while (command := self.core.next_command()) is not None:
            match command:
                case Send(message=message):
                    self.told.append(message)
                case SendRows(peer=peer, message=Step() as message, payload=payload):
                    self.rows.append((peer, message, bytes(payload)))
                    self.core.rows_left(command)
                case Take(session=session, message=message):
                    self.commands.append(command)
                    step = self.core.take_step(session, message, now=NOW)
                    if step is not None:
                        self.steps.append(step)
                case _:
                    self.commands.append(command)
        self.admission.check_integrity()

    def take(self, kind: type) -> list[object]:
        found = [each for each in self.commands if isinstance(each, kind)]
        self.commands = [each for each in self.commands if not isinstance(each, kind)]
        return found

    def only(self, kind: type[AnyMessage]) -> AnyMessage:
        (message,) = [each for each in self.told if isinstance(each, kind)]
        self.told.remove(message)
        return message

    def failure(self) -> tuple[str, str, bool]:
        message = self.only(SessionFailed)
        assert isinstance(message, SessionFailed)
        return message.code, message.culprit, message.is_kept

    @property
    def session(self) -> Session:
        (session,) = self.admission.sessions
        return session


def test_member_opens_when_it_has_links_to_the_others_and_to_those_behind_that_share_its_columns() -> None:
    member = Member()
    member.open(connects=False)
    dials = member.take(Connect)
    assert {dial.peer for dial in dials if isinstance(dial, Connect)} == {OWN[0], OWN[2], *BACK}
    for number, dial in enumerate(dials):
        assert isinstance(dial, Connect)
        assert len(member.told) == 0
        assert member.session.state is SessionState.OPENING, number
        member.core.successor_connected(dial.session, dial.epoch, now=NOW, peer=dial.peer)
        member.carry_out()
    assert isinstance(member.only(SessionOpened), SessionOpened)
    assert len(member.take(EnterGroup)) == 1


@pytest.mark.parametrize(("peer", "code"), [(OWN[0], "member-unreachable"), (BACK[1], "successor-unreachable")])
def test_member_that_reaches_somebody_not_refuses_and_says_whom(peer: PeerId, code: str) -> None:
    member = Member()
    member.open(connects=False)
    session = member.session
    member.core.successor_unreachable(session, 0, now=NOW, peer=peer)
    member.carry_out()
    refused = member.only(SessionRefused)
    assert isinstance(refused, SessionRefused)
    assert (refused.code, refused.culprit) == (code, peer)
    assert member.admission.sessions == []
    member.core.successor_connected(session, 0, now=NOW, peer=OWN[2])  # which changes nothing any more
    member.carry_out()
    assert member.told == []


ORDERS = [
    order
    for order in itertools.permutations([(peer, entry) for peer in FRONT for entry in (0, 1)])
    if all(order.index((peer, 0)) < order.index((peer, 1)) for peer in FRONT)
]
"""What comes of one peer is in order."""


@pytest.mark.parametrize("order", ORDERS)
def test_entries_go_on_in_order_when_all_parts_are_there(order: Sequence[tuple[PeerId, int]]) -> None:
    member = Member()
    plan = member.open()
    for number, (peer, entry) in enumerate(order):
        member.part(plan, peer, entry, timings=(StageTiming(number, 9 - number),))
        num_whole = sum({(p, e) for p, e in order[: number + 1]} >= {(f, entry) for f in FRONT} for entry in (0, 1))
        assert len(member.steps) == num_whole
    for entry, take in enumerate(member.take(Take)):
        assert isinstance(take, Take)
        assert isinstance(take.payload, Joined)
        assert [part.peer for part in take.payload.parts] == FRONT
        assert [bytes(part.payload) for part in take.payload.parts] == [b"\1" * 32, b"\2" * 32]
        assert (take.message.sequence, take.message.tensor) == (entry, TensorMeta("f32", 1, 16))
        numbers = [order.index((peer, entry)) for peer in FRONT]
        assert take.message.timings == (StageTiming(max(numbers), 9 - min(numbers)),)


def test_part_that_comes_twice_or_after_its_entry_changes_nothing() -> None:
    member = Member()
    plan = member.open()
    member.part(plan, FRONT[0], 0)
    member.part(plan, FRONT[0], 0)
    member.part(plan, FRONT[1], 0)
    member.part(plan, FRONT[1], 0)
    assert member.core.counters["steps_duplicate"] == 2
    assert len(member.steps) == 1
    assert member.session.joining == {}


def test_part_of_another_width_or_peer_is_not_taken() -> None:
    member = Member()
    plan = member.open()
    member.part(plan, FRONT[0], 0, epoch=1)
    assert member.core.counters["steps_without_session"] == 1
    member.receive(OWN[0], Step(KEY, 0, 0, 1, 0, (), 1, (), TensorMeta("f32", 1, 16), (StageTiming(1, 1),)))
    assert member.core.counters["steps_without_session"] == 2
    member.part(plan, FRONT[1], 0, tensor=TensorMeta("f32", 1, 16))
    assert member.failure() == ("bad-shape", FRONT[1], True)


def test_of_two_parts_that_differ_nobody_is_accused_and_both_are_named() -> None:
    for order in (FRONT, FRONT[::-1]):
        member = Member()
        plan = member.open()
        member.part(plan, order[0], 0)
        member.part(plan, order[1], 0, want=(1,))
        failed = member.only(SessionFailed)
        assert isinstance(failed, SessionFailed)
        assert (failed.code, failed.culprit, failed.is_kept) == ("bad-parts", "", True)
        assert failed.suspects == tuple(order)
        assert member.session.num_joining_rows == member.session.num_joining_bytes == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("is_whole", [True, False])
def test_part_that_differs_from_two_that_agree_is_the_fault_of_who_sent_it(
    order: tuple[int, ...], is_whole: bool
) -> None:
    """Of 72 columns the second of three holds 24, which three of the five before it share."""
    member = Member(hidden=72)
    plan = member.open(stages=(stage(0, [*FRONT, *PEERS[12:15]], (3, 1, 1, 1, 3)), *STAGES[1:]))
    sources = member.session.parts.sources
    assert len(sources) == 3
    for index in order if is_whole else order[:2]:
        part = sources[index]
        tensor = TensorMeta("f32", 1, len(part.columns))
        changes = {"want": (1,)} if index == 1 else {}
        member.part(plan, part.peer, 0, tensor=tensor, payload=bytes(4 * len(part.columns)), **changes)
    if not is_whole:
        assert not [each for each in member.told if isinstance(each, SessionFailed)]
        member.core.handle_timer(now=MonotonicS(NOW + PARTS_S))
        member.carry_out()
    failed = member.only(SessionFailed)
    assert isinstance(failed, SessionFailed)
    if is_whole:
        assert (failed.code, failed.culprit, failed.suspects) == ("bad-parts", sources[1].peer, ())
    elif 1 in order[:2]:
        assert (failed.code, failed.culprit) == ("bad-parts", "")
        assert failed.suspects == tuple(sources[index].peer for index in order[:2])
    else:
        assert (failed.code, failed.culprit, failed.suspects) == ("late-parts", sources[1].peer, ())


def test_of_groups_beside_only_those_that_share_columns_are_needed_and_may_send() -> None:
    front, back = [*FRONT, *PEERS[12:15]], PEERS[15:18]
    member = Member(hidden=72)
    plan = member.open(stages=(stage(0, front, (3, 1, 1, 1, 3)), STAGES[1], stage(2, back, (1, 2, 6))))
    assert [part.peer for part in member.session.parts.sources] == front[1:4]
    assert [part.peer for part in member.session.parts.targets] == back[2:]
    for peer in (front[0], front[4], *back[:2]):
        assert not member.session.needs(peer)
        member.core.peer_lost(peer, "gone", now=NOW)
    member.part(plan, front[0], 0, tensor=TensorMeta("f32", 1, 24), payload=bytes(96))
    assert member.core.counters["steps_without_session"] == 1
    assert not [each for each in member.told if isinstance(each, SessionFailed)]
    assert all(member.session.needs(peer) for peer in (*front[1:4], back[2], OWN[0], OWN[2]))
    member.core.peer_lost(back[2], "gone", now=NOW)
    member.carry_out()
    assert member.failure() == ("peer-lost", back[2], True)


def test_parts_that_wait_for_others_are_bounded_by_rows_of_a_session() -> None:
    member = Member()
    plan = member.open()
    for number in range(MAX_QUEUED_ROWS // 256):
        member.part(plan, FRONT[0], number, num_rows=256)
    member.part(plan, FRONT[0], MAX_QUEUED_ROWS // 256, num_rows=256)
    assert member.failure() == ("flooded", FRONT[0], True)
    assert member.session.joining == {}


def test_parts_that_wait_for_others_are_bounded_by_bytes_of_all_sessions() -> None:
    member = Member()
    half = memoryview(bytes(MAX_ALL_JOINING_BYTES // 2))
    plans = [
        member.open(key=bytes([number]) * 16, max_positions=16, user=user)
        for number, user in enumerate([USER, PEERS[20], PEERS[21]])
    ]
    for plan in plans[:2]:
        member.part(plan, FRONT[0], 0, payload=half)
    member.told.clear()
    member.part(plans[2], FRONT[0], 0, payload=half[:1])
    assert member.failure() == ("flooded", "", True)
    member.receive(USER, CloseSession(plans[0].session, 0))
    member.part(plans[1], FRONT[1], 0)
    assert len(member.steps) == 1


def test_one_user_leaves_room_to_others_for_parts_that_wait() -> None:
    member = Member()
    share = memoryview(bytes(MAX_JOINING_BYTES_OF_USER))
    plans = [
        member.open(key=bytes([number]) * 16, max_positions=16, user=PEERS[30 + number // 2]) for number in range(3)
    ]
    member.part(plans[0], FRONT[0], 0, payload=share)
    member.told.clear()
    member.part(plans[1], FRONT[0], 0, payload=share[:1])
    failed = member.only(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.code, failed.culprit) == (plans[1].session, "flooded", "")
    assert "your sessions" in failed.reason
    member.part(plans[2], FRONT[0], 0, payload=share)
    assert not [each for each in member.told if isinstance(each, SessionFailed)]


def test_a_member_before_that_does_not_send_its_columns_is_named_after_some_time() -> None:
    member = Member()
    plan = member.open()
    member.part(plan, FRONT[1], 0)
    assert member.core.get_timer() == NOW + PARTS_S
    member.part(plan, FRONT[0], 0)
    assert member.session.num_joining_rows == member.session.num_joining_bytes == 0
    member.part(plan, FRONT[1], 1)
    member.core.handle_timer(now=MonotonicS(NOW + PARTS_S - 0.1))
    member.carry_out()
    assert member.session.state is SessionState.OPEN
    member.core.handle_timer(now=MonotonicS(NOW + PARTS_S))
    member.carry_out()
    assert member.failure() == ("late-parts", FRONT[0], True)
    assert member.session.num_joining_rows == member.session.num_joining_bytes == 0


def test_while_this_process_itself_stood_still_no_member_before_is_late() -> None:
    member = Member()
    plan = member.open()
    member.part(plan, FRONT[1], 0)
    woken = MonotonicS(NOW + 5.0 + 60.0)
    member.core.stood_still(60.0, now=woken)
    member.core.handle_timer(now=woken)
    member.carry_out()
    assert member.session.state is SessionState.OPEN
    assert member.core.get_timer() == NOW + 60.0 + PARTS_S
    member.core.handle_timer(now=MonotonicS(NOW + 60.0 + PARTS_S))
    member.carry_out()
    assert member.failure() == ("late-parts", FRONT[0], True)


def test_what_is_computed_goes_to_those_behind_as_far_as_they_hold_the_same_columns_and_so_again() -> None:
    member = Member()
    plan = member.open()
    for peer in FRONT:
        member.part(plan, peer, 0, num_rows=3)
    rows = member.compute()
    (first, second) = member.rows
    for (peer, message, payload), columns in ((first, slice(0, 8)), (second, slice(8, 16))):
        assert peer == BACK[0 if columns.start == 0 else 1]
        assert message.tensor == TensorMeta("f32", 3, 8)
        assert message.timings == (StageTiming(1, 2), StageTiming(3, 4))
        assert np.array_equal(np.frombuffer(payload, np.float32).reshape(3, 8), rows[:, columns])
    member.rows.clear()
    member.open(epoch=1, resumes=True)
    member.receive(USER, Resend(KEY, 1, 0, 1, 1, 2, False, 2))
    for (peer, message, payload), columns in zip(member.rows, (slice(0, 8), slice(8, 16)), strict=True):
        assert peer in BACK
        assert (message.sequence, message.first_node, message.tensor) == (0, 2, TensorMeta("f32", 2, 8))
        assert np.array_equal(np.frombuffer(payload, np.float32).reshape(2, 8), rows[1:, columns])
    assert member.core.unsent_bytes(BACK[0]) == 0


def test_a_group_that_is_the_same_and_at_rest_is_adopted_and_another_begins_anew() -> None:
    for what, kept in (("same", True), ("unfinished", False), ("another member", False), ("other neighbours", True)):
        member = Member()
        plan = member.open()
        for peer in FRONT:
            member.part(plan, peer, 0)
        if what != "unfinished":
            member.compute()
        member.told.clear()
        stages = {
            "another member": (STAGES[0], stage(1, [OWN[0], US, PEERS[20]]), STAGES[2]),
            "other neighbours": (stage(0, [FRONT[0], PEERS[20]]), STAGES[1], stage(2, [PEERS[21]], (1,))),
        }.get(what, STAGES)
        member.take(Connect)
        member.open(epoch=1, resumes=True, stages=stages)
        told = member.only(SessionOpened)
        assert isinstance(told, SessionOpened)
        assert (told.next_sequence, told.num_positions) == ((1, 1) if kept else (0, 0)), what
        assert len(member.take(Forget)) == (not kept)
        assert len(member.take(EnterGroup)) == 2
        assert member.session.alias == alias_of(KEY, 1)


def test_losing_a_member_ends_what_is_under_way_and_losing_a_neighbour_does_not() -> None:
    for peer, leaves in ((OWN[0], 1), (BACK[0], 0), (FRONT[1], 0)):
        member = Member()
        member.open()
        member.core.peer_lost(peer, "gone", now=NOW)
        member.carry_out()
        assert member.failure() == ("peer-lost", peer, True)
        assert len(member.take(LeaveGroup)) == leaves
    member = Member()
    member.open()
    member.core.peer_lost(BACK[0], "gone", now=NOW)
    member.core.peer_lost(OWN[2], "gone", now=NOW)  # it is kept already, and still computes
    member.carry_out()
    assert member.failure() == ("peer-lost", BACK[0], True)
    assert len(member.take(LeaveGroup)) == 1


def test_sessions_of_one_alias_are_not_open_together() -> None:
    seen: dict[int, bytes] = {}
    for number in itertools.count():
        key = number.to_bytes(16, "little")
        alias = alias_of(key, 0)
        if alias in seen:
            break
        seen[alias] = key
    member = Member()
    member.open(key=seen[alias], max_positions=16)
    member.told.clear()
    member.open(key=key, max_positions=16)
    refused = member.only(SessionRefused)
    assert isinstance(refused, SessionRefused)
    assert (refused.session, refused.code) == (key, "duplicate")
    member.open(key=key, epoch=1, max_positions=16)
    assert isinstance(member.only(SessionOpened), SessionOpened)
