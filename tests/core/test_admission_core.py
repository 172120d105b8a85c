"""Which sessions a node takes: never more KV than there is, and nobody's session for anybody else."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusion_node.daemon.admission_core import (
    LEASE_S,
    MAX_SESSIONS,
    MAX_SESSIONS_PER_USER,
    Admission,
    RefusalCode,
    Refused,
    Session,
)
from fusion_node.engine.block_manager_core import BlockManager
from fusion_node.engine.session_log_core import StepRows
from fusion_node.types import LayerRange, ModelId, MonotonicS, PeerId
from p2p.identity import Identity
from p2p.messages import RETAIN_S, OpenSession
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage

MODEL = ModelId("ab" * 32)
US, OTHER, NEXT = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))
USERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(10, 16)]
T0 = MonotonicS(1000.0)


def admission(num_blocks: int = 20, block_slots: int = 5, *, first_layers: frozenset[int] | None = None) -> Admission:
    """Room for 100 positions."""
    return Admission(
        peer=US,
        model_id=MODEL,
        layers=LayerRange(10, 20),
        numerics="fp32",
        blocks=BlockManager(num_blocks, block_slots=block_slots),
        first_layers=first_layers,
    )


def plan(
    user: PeerId = USERS[0],
    *,
    session: bytes = bytes(16),
    epoch: int = 0,
    positions: int = 10,
    layers: tuple[int, int] = (10, 20),
) -> Plan:
    now = time.time()
    return Plan(
        version=PROTOCOL_VERSION,
        user=user,
        session=session,
        epoch=epoch,
        model_id=MODEL,
        numerics="fp32",
        max_positions=positions,
        issued_at=now,
        expires_at=now + 60,
        stages=(
            PlanStage(OTHER, 0, layers[0], ()),
            PlanStage(US, *layers, ()),
            PlanStage(NEXT, layers[1], 30, ()),
        ),
    )


def open_(
    node: Admission,
    p: Plan,
    *,
    stage: int = 1,
    source: PeerId | None = None,
    now: float = T0,
    prefix: tuple[bytes, int] = (b"", 0),
) -> object:
    message = OpenSession(p.session, p.epoch, stage, b"", *prefix)
    return node.open(message, p, source=source or PeerId(p.user), now=MonotonicS(now))


def refusal(answer: object) -> RefusalCode:
    assert isinstance(answer, Refused)
    return answer.code


def test_session_reserves_the_positions_of_its_plan() -> None:
    node = admission()
    assert node.free_positions == node.max_positions == 100
    session = open_(node, plan(positions=40, layers=(12, 17)))
    assert isinstance(session, Session)
    assert node.blocks.reserved_slots == 40
    assert node.free_positions == 60
    node.drop(session)
    node.drop(session)
    assert node.free_positions == 100
    node.check_integrity()


def test_neighbours_of_a_session_follow_from_its_place_in_the_plan() -> None:
    session = open_(admission(), plan())
    assert isinstance(session, Session)
    assert (session.previous, session.next, session.is_last) == (OTHER, NEXT, False)
    alone = msgspec.structs.replace(plan(), stages=(PlanStage(US, 10, 20, ()),))
    session = open_(admission(), alone, stage=0)
    assert isinstance(session, Session)
    assert (session.previous, session.next, session.is_last) == (USERS[0], USERS[0], True)


def test_last_position_fits_and_one_more_does_not() -> None:
    node = admission()
    assert isinstance(open_(node, plan(positions=100)), Session)
    assert refusal(open_(node, plan(session=b"b" * 16, positions=1))) is RefusalCode.NO_MEMORY
    assert node.refused == {"no-memory": 1}
    assert refusal(open_(admission(), plan(positions=101))) is RefusalCode.NO_MEMORY


def test_session_begins_only_where_the_model_lets_it() -> None:
    node = admission(first_layers=frozenset({0, 11, 15, 25}))
    answer = open_(node, plan(layers=(12, 17)))
    assert answer == Refused(
        RefusalCode.LAYERS_NOT_HELD, "no session begins at layer 12 of this model: begin at 11 or 15"
    )
    assert isinstance(open_(node, plan(layers=(15, 17))), Session)


def test_unfit_openings_are_refused_each_with_its_code() -> None:
    replace = msgspec.structs.replace
    cases = [
        (open_(admission(), plan(), source=USERS[1]), RefusalCode.NOT_YOURS),
        (open_(admission(), plan(), stage=0), RefusalCode.BAD_PLAN),
        (open_(admission(), plan(), stage=99), RefusalCode.BAD_PLAN),
        (open_(admission(), replace(plan(), model_id="cd" * 32)), RefusalCode.UNKNOWN_MODEL),
        (open_(admission(), replace(plan(), numerics="bf16")), RefusalCode.NUMERICS),
        (open_(admission(), plan(layers=(9, 20))), RefusalCode.LAYERS_NOT_HELD),
        (open_(admission(), plan(layers=(10, 21))), RefusalCode.LAYERS_NOT_HELD),
    ]
    assert [refusal(answer) for answer, _ in cases] == [code for _, code in cases]
    node = admission()
    other = OpenSession(b"x" * 16, 0, 1, b"")
    assert refusal(node.open(other, plan(), source=USERS[0], now=T0)) is RefusalCode.NOT_YOURS
    late = OpenSession(bytes(16), 1, 1, b"")
    assert refusal(node.open(late, plan(), source=USERS[0], now=T0)) is RefusalCode.NOT_YOURS
    node.draining = True
    assert refusal(open_(node, plan())) is RefusalCode.DRAINING
    assert node.free_positions == 0


def test_paused_node_refuses_new_sessions_with_its_reason_and_keeps_those_that_run() -> None:
    node = admission()
    running = open_(node, plan())
    assert isinstance(running, Session)
    node.paused = "the node is paused by its operator"
    refused = open_(node, plan(session=b"b" * 16))
    assert refused == Refused(RefusalCode.PAUSED, "the node is paused by its operator")
    assert node.free_positions == 0
    assert node.get(bytes(16), epoch=0, source=OTHER) is running
    node.draining = True
    assert refusal(open_(node, plan(session=b"b" * 16))) is RefusalCode.DRAINING
    node.draining, node.paused = False, None
    assert isinstance(open_(node, plan(session=b"b" * 16)), Session)
    assert node.free_positions == node.max_positions - 20


def test_limits_hold_per_user_and_for_all() -> None:
    node = admission(num_blocks=1 << 20)
    for number in range(MAX_SESSIONS_PER_USER):
        assert isinstance(open_(node, plan(session=number.to_bytes(16, "big"))), Session)
    assert refusal(open_(node, plan(session=b"z" * 16))) is RefusalCode.TOO_MANY_SESSIONS
    for user in USERS[1:4]:
        for number in range(MAX_SESSIONS_PER_USER):
            key = user.encode()[-8:] + number.to_bytes(8, "big")
            assert isinstance(open_(node, plan(user, session=key)), Session)
    assert len(node.sessions) == MAX_SESSIONS
    assert refusal(open_(node, plan(USERS[4], session=b"z" * 16))) is RefusalCode.TOO_MANY_SESSIONS
    assert node.free_positions == 0


def test_steps_are_taken_from_the_stage_before_and_of_this_epoch_only() -> None:
    node = admission()
    session = open_(node, plan(epoch=2))
    key = bytes(16)
    assert node.get(key, epoch=2, source=OTHER) is session
    for epoch, source in ((2, USERS[0]), (2, NEXT), (2, USERS[1]), (1, OTHER), (3, OTHER)):
        assert node.get(key, epoch=epoch, source=source) is None
    assert node.get(b"q" * 16, epoch=2, source=OTHER) is None
    for epoch, source in ((2, OTHER), (2, USERS[1]), (1, USERS[0])):
        assert node.close(key, epoch=epoch, source=source, now=T0) is None
    assert node.close(key, epoch=2, source=USERS[0], now=T0) is session


def test_lease_ends_unless_a_step_renews_it() -> None:
    node = admission()
    a, b = open_(node, plan()), open_(node, plan(session=b"b" * 16))
    assert isinstance(a, Session)
    assert isinstance(b, Session)
    assert node.get_timer() == T0 + LEASE_S
    node.renew(a, now=MonotonicS(T0 + 50))
    assert node.handle_timer(now=MonotonicS(T0 + LEASE_S - 1)) == []
    assert node.handle_timer(now=MonotonicS(T0 + LEASE_S)) == [b]
    assert node.handle_timer(now=MonotonicS(T0 + LEASE_S + 50)) == [a]
    assert node.get_timer() is None
    assert node.free_positions == node.max_positions


def test_lease_does_not_end_while_rows_wait_for_the_device() -> None:
    node = admission()
    session = open_(node, plan())
    assert isinstance(session, Session)
    session.num_queued_rows = 256
    assert node.handle_timer(now=MonotonicS(T0 + 2 * LEASE_S)) == []
    session.num_queued_rows = 0
    assert node.handle_timer(now=MonotonicS(T0 + 2 * LEASE_S)) == [session]


def test_session_that_was_opened_anew_is_not_dropped_for_its_predecessor() -> None:
    node = admission()
    first = open_(node, plan())
    assert isinstance(first, Session)
    node.close(bytes(16), epoch=0, source=USERS[0], now=T0)
    second = open_(node, plan(epoch=1))
    assert isinstance(second, Session)
    node.drop(first)
    assert node.holds(second)
    assert not node.holds(first)
    node.check_integrity()


def test_lost_peer_touches_the_sessions_that_need_it() -> None:
    node = admission()
    session = open_(node, plan())
    other = open_(node, plan(USERS[1], session=b"b" * 16))
    assert node.touching(USERS[0]) == [session]
    assert node.touching(OTHER) == node.touching(NEXT) == [session, other]
    assert node.touching(USERS[2]) == []


# sessions that begin like another


A, B = b"a" * 16, b"b" * 16


def compute(node: Admission, session: Session, num_rows: int, *, lands: bool = True) -> None:
    """A step that commits all its rows, and what the shell does with it."""
    log = session.log
    first = 1 + log.num_slots
    step = log.apply(
        log.next_sequence, first_node=first, num_rows=num_rows, parent=first - 1, advance=first + num_rows - 1
    )
    assert isinstance(step, StepRows)
    node.blocks.extend(session.key, step.first_slot + num_rows, first_written=step.first_slot)
    if lands:
        session.num_computed = step.num_final


def source_of(node: Admission, num_rows: int = 23, *, user: PeerId = USERS[0], positions: int = 30) -> Session:
    """An open session A; KV blocks of the tests have five slots."""
    session = open_(node, plan(user, session=A, positions=positions))
    assert isinstance(session, Session)
    compute(node, session, num_rows)
    return session


def reused(node: Admission, prefix: tuple[bytes, int], p: Plan | None = None, *, now: float = T0) -> int:
    """How many positions session B begins with."""
    session = open_(node, p or plan(session=B, positions=30), prefix=prefix, now=now)
    assert isinstance(session, Session)
    assert session.reused_positions == session.num_computed == session.log.num_committed
    node.check_integrity()
    return session.reused_positions


@pytest.mark.parametrize("is_retained", [False, True])
@pytest.mark.parametrize(("asked", "given"), [(23, 20), (20, 20), (19, 15), (4, 0), (0, 0), (2**32 - 1, 20)])
def test_session_begins_with_whole_blocks_of_what_another_has_computed(
    asked: int, given: int, is_retained: bool
) -> None:
    node = admission()
    source_of(node)
    if is_retained:
        node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    assert reused(node, (A, asked)) == given


@pytest.mark.parametrize("is_retained", [False, True])
def test_rows_in_flight_are_not_shared(is_retained: bool) -> None:
    node = admission()
    session = source_of(node, 12)
    compute(node, session, 10, lands=False)
    if is_retained:
        node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    assert reused(node, (A, 22)) == 10


def test_uncommitted_nodes_are_not_shared() -> None:
    node = admission()
    session = source_of(node, 6)
    step = session.log.apply(1, first_node=7, num_rows=9, parent=6)
    assert isinstance(step, StepRows)
    node.blocks.extend(A, 15, first_written=6)
    session.num_computed = step.num_final
    assert reused(node, (A, 15)) == 5


def state_of(node: Admission) -> object:
    blocks = node.blocks
    return (
        [(s.key, s.user, s.reused_positions, s.lease_until) for s in node.sessions],
        (blocks.free_slots, blocks.reserved_slots, blocks.used_blocks, blocks.evictable_blocks, blocks.num_retained),
        node.get_timer(),
        dict(node.refused),
    )


@pytest.mark.parametrize("is_retained", [False, True])
def test_prefix_of_another_user_is_answered_and_changes_as_much_as_one_that_never_was(is_retained: bool) -> None:
    after = []
    for key in (A, b"never was".ljust(16)):
        node = admission()
        source_of(node)
        if is_retained:
            node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
        theirs = plan(USERS[1], session=B, positions=30)
        assert reused(node, (key, 20), theirs) == 0
        # Neither takes a close from somebody else what was kept.
        assert node.close(key, epoch=0, source=USERS[1], now=T0) is None
        after.append(state_of(node))
    assert after[0] == after[1]


def test_prefix_over_other_layers_shares_nothing() -> None:
    node = admission(num_blocks=40)
    source_of(node)
    assert reused(node, (A, 20), plan(session=B, positions=30, layers=(12, 20))) == 0
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    node.close(B, epoch=0, source=USERS[0], now=T0)
    assert reused(node, (A, 20), plan(session=B, positions=30, layers=(10, 19))) == 0


def test_closed_session_is_kept_only_when_its_user_asks_and_until_it_says_otherwise() -> None:
    node = admission()
    source_of(node)
    node.close(A, epoch=0, source=USERS[0], now=T0)
    assert reused(node, (A, 20)) == 0
    node.close(B, epoch=0, source=USERS[0], now=T0)
    source_of(node)
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    assert node.blocks.evictable_blocks == 4
    assert node.close(A, epoch=1, source=USERS[0], now=T0) is None  # of another epoch
    assert node.blocks.evictable_blocks == 4
    assert node.close(A, epoch=0, source=USERS[0], now=T0) is None
    assert node.blocks.used_blocks == 0
    assert node.get_timer() is None
    assert reused(node, (A, 20)) == 0


def test_session_that_fails_or_expires_is_not_kept() -> None:
    node = admission()
    node.drop(source_of(node))
    assert node.blocks.used_blocks == 0
    source_of(node)
    node.handle_timer(now=MonotonicS(T0 + LEASE_S))
    assert node.blocks.used_blocks == 0


def test_retained_session_ends_after_its_time_and_what_shares_it_goes_on() -> None:
    node = admission()
    source_of(node)
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    assert node.get_timer() == T0 + RETAIN_S
    assert reused(node, (A, 20), now=T0 + RETAIN_S - 1) == 20
    assert node.handle_timer(now=MonotonicS(T0 + RETAIN_S)) == []
    assert (node.blocks.num_retained, node.blocks.held_blocks) == (0, 4)
    node.check_integrity()
    assert node.get_timer() == T0 + RETAIN_S - 1 + LEASE_S


def test_retained_session_makes_room_for_new_ones_and_is_then_unknown() -> None:
    node = admission()
    source_of(node)
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    assert node.free_positions == 100
    other = open_(node, plan(USERS[1], session=b"c" * 16, positions=100))
    assert isinstance(other, Session)
    compute(node, other, 100)
    node.drop(other)
    assert reused(node, (A, 20)) == 0


def test_id_that_is_opened_anew_may_begin_with_what_it_left_behind() -> None:
    node = admission()
    source_of(node)
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    again = plan(session=A, epoch=1, positions=30)
    assert reused(node, (A, 10), again) == 10
    # Open now, it stands for itself, and what it leaves behind replaces what it left before.
    assert reused(node, (A, 20)) == 10
    node.close(A, epoch=1, source=USERS[0], now=T0, retain=True)
    node.check_integrity()
    node.close(B, epoch=0, source=USERS[0], now=T0)
    assert node.blocks.used_blocks == 2


def test_session_that_was_opened_anew_by_somebody_else_hides_nothing_of_ours() -> None:
    node = admission()
    source_of(node)
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    source_of(node, user=USERS[1])
    assert reused(node, (A, 20)) == 20


def test_session_over_nothing_computed_leaves_nothing_behind() -> None:
    node = admission()
    session = open_(node, plan(session=A))
    assert isinstance(session, Session)
    compute(node, session, 7, lands=False)
    node.close(A, epoch=0, source=USERS[0], now=T0, retain=True)
    assert node.blocks.used_blocks == 0
    node.check_integrity()


def test_session_that_declines_its_prefix_begins_empty_if_that_fits() -> None:
    node = admission(num_blocks=9)
    source_of(node, 20)
    assert reused(node, (A, 20), plan(session=B, positions=35)) == 20
    session = node.get(B, epoch=0, source=OTHER)
    assert session is not None
    assert session.log.declines_prefix(0, ())
    # Six blocks for A and seven for B are more than there are.
    assert not node.start_empty(session)
    assert not node.holds(session)
    node.check_integrity()
    assert reused(node, (A, 20), plan(session=B, positions=15)) == 15
    session = node.get(B, epoch=0, source=OTHER)
    assert session is not None
    assert node.start_empty(session)
    assert (session.reused_positions, session.num_computed, session.log.num_committed) == (0, 0, 0)
    assert node.blocks.reserved_slots == 45
    node.check_integrity()


def test_what_is_remembered_of_dropped_tables_is_bounded() -> None:
    node = admission()
    for number in range(200):
        key = number.to_bytes(16, "big")
        session = open_(node, plan(session=key, positions=5), now=T0)
        assert isinstance(session, Session)
        compute(node, session, 5)
        node.close(key, epoch=0, source=USERS[0], now=T0, retain=True)
    assert node.blocks.num_retained == 16
    assert len(node._retained) <= 33
    node.check_integrity()


class AdmissionMachine(RuleBasedStateMachine):
    """Users open, use, close, lose and forget sessions in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.node = admission(num_blocks=10)
        self.now = float(T0)

    @rule(
        user=st.sampled_from(USERS[:3]),
        key=st.integers(0, 5),
        epoch=st.integers(0, 1),
        positions=st.integers(1, 60),
        start=st.integers(8, 14),
        length=st.integers(1, 8),
        prefix=st.integers(0, 5),
        asked=st.integers(0, 70),
    )
    def open(
        self, user: PeerId, key: int, epoch: int, positions: int, start: int, length: int, prefix: int, asked: int
    ) -> None:
        p = plan(user, session=bytes([key]) * 16, epoch=epoch, positions=positions, layers=(start, start + length))
        free = self.node.free_positions
        answer = open_(self.node, p, now=self.now, prefix=(bytes([prefix]) * 16, asked))
        if isinstance(answer, Session):
            assert answer.reused_positions <= min(asked, positions)
            assert answer.reused_positions % self.node.blocks.block_slots == 0
        if isinstance(answer, Refused):
            assert self.node.refused[answer.code] > 0
            assert self.node.free_positions == free
        if positions <= free and isinstance(answer, Refused):
            assert answer.code is not RefusalCode.NO_MEMORY

    @rule(user=st.sampled_from(USERS[:3]), key=st.integers(0, 5), epoch=st.integers(0, 1), retain=st.booleans())
    def close(self, user: PeerId, key: int, epoch: int, retain: bool) -> None:
        session = self.node.close(bytes([key]) * 16, epoch=epoch, source=user, now=MonotonicS(self.now), retain=retain)
        assert session is None or session.user == user

    @rule(key=st.integers(0, 5), epoch=st.integers(0, 1), rows=st.integers(1, 20), lands=st.booleans())
    def step(self, key: int, epoch: int, rows: int, lands: bool) -> None:
        session = self.node.get(bytes([key]) * 16, epoch=epoch, source=OTHER)
        if session is not None:
            self.node.renew(session, now=MonotonicS(self.now))
            rows = min(rows, session.plan.max_positions - session.log.num_slots)
            if rows:
                compute(self.node, session, rows, lands=lands)

    @rule(key=st.integers(0, 5), epoch=st.integers(0, 1))
    def decline(self, key: int, epoch: int) -> None:
        session = self.node.get(bytes([key]) * 16, epoch=epoch, source=OTHER)
        if session is not None and session.log.declines_prefix(0, ()):
            assert self.node.start_empty(session) == self.node.holds(session)

    @rule(seconds=st.floats(0.0, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for session in self.node.handle_timer(now=MonotonicS(self.now)):
            assert session.lease_until <= self.now

    @rule(peer=st.sampled_from([*USERS[:3], OTHER]))
    def lose(self, peer: PeerId) -> None:
        for session in self.node.touching(peer):
            self.node.drop(session)
        assert self.node.touching(peer) == []

    @invariant()
    def never_more_than_there_is(self) -> None:
        self.node.check_integrity()
        assert self.node.blocks.reserved_slots <= 50
        assert 0 <= self.node.free_positions <= self.node.max_positions

    def teardown(self) -> None:
        self.node.handle_timer(now=MonotonicS(self.now + LEASE_S))
        self.node.handle_timer(now=MonotonicS(self.now + RETAIN_S))
        assert self.node.blocks.used_blocks == 0
        assert self.node.get_timer() is None
        assert self.node.sessions == []
        assert self.node.free_positions == self.node.max_positions


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(budget=st.integers(0, 100), positions=st.lists(st.integers(1, 200), max_size=20))
def test_reservations_fill_the_budget_and_never_exceed_it(budget: int, positions: list[int]) -> None:
    node = admission(num_blocks=budget, block_slots=1)
    for number, wanted in enumerate(positions):
        free = node.free_positions
        answer = open_(node, plan(session=number.to_bytes(16, "big"), positions=wanted))
        assert isinstance(answer, Session) == (wanted <= free)
        node.check_integrity()
