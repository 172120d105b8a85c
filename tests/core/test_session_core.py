"""The user's side of a session: whatever comes, in whatever order, it says once who is at fault, and takes no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.client.session_core import (
    OPEN_DEADLINE_S,
    OPEN_PATIENCE_S,
    CannotResume,
    Fault,
    Opened,
    Prefix,
    RowsWanted,
    SessionCore,
    SessionEvent,
    SessionState,
    StepDone,
)
from fusion_node.errors import PeerClosed, PeerError, PeerRefused, PeerTimeout, PeerUnreachable, RemoteProtocolError
from fusion_node.types import MonotonicS, PeerId
from p2p.identity import Identity
from p2p.messages import (
    NOT_RETAINED,
    SUCCESSOR_UNREACHABLE,
    UNKNOWN_SESSION,
    AnyMessage,
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
    StatusRequest,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Lease, Plan, PlanStage, Refusal
from scheduler.repair_core import MIN_PROBE_S, MIN_TIMEOUT_S, STUCK_S, Cause, Recovered

KEY = bytes(range(16))
EPOCH = 3
USER = Identity.from_seed(b"u" * 32).peer_id
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(3)]
STRANGER = Identity.from_seed(b"s" * 32).peer_id
ROW = TensorMeta("f32", 1, 8)
T0 = MonotonicS(1000.0)


def plan_of(peers: Sequence[PeerId] = PEERS, epoch: int = EPOCH) -> Plan:
    now = time.time()
    return Plan(
        version=PROTOCOL_VERSION,
        user=USER,
        session=KEY,
        epoch=epoch,
        model_id="ab" * 32,
        numerics="fp32",
        max_positions=64,
        issued_at=now,
        expires_at=now + 60,
        stages=tuple(PlanStage(peer, 2 * i, 2 * i + 2, ()) for i, peer in enumerate(peers)),
    )


def core(prefix: Prefix | None = None, **changes: Any) -> SessionCore:
    return SessionCore(plan_of(), b"signed", row_size=8, wire_dtype="f32", prefix=prefix, **changes)


def at(seconds: float) -> MonotonicS:
    return MonotonicS(T0 + seconds)


def events(session: SessionCore) -> list[SessionEvent]:
    found = []
    while (event := session.next_event()) is not None:
        found.append(event)
    return found


def opened() -> SessionCore:
    session = core()
    session.start(now=T0)
    for stage, peer in enumerate(PEERS):
        session.receive(SessionOpened(KEY, EPOCH, stage, 120.0), source=peer, now=T0)
    assert events(session) == [Opened(0, EPOCH)]
    session.messages_to_send()
    return session


def result(sequence: int, node: int, tensor: TensorMeta = ROW, epoch: int = EPOCH) -> StepResult:
    return StepResult(KEY, epoch, sequence, (node,), tensor, (StageTiming(1, 2),) * 3)


def send(session: SessionCore, tensor: TensorMeta = ROW, *, want_last: bool = True, now: MonotonicS = T0) -> Step:
    """One more entry, whose rows are there at once."""
    session.append(tensor.num_rows, want_last=want_last, now=now)
    wanted = events(session)[-1]
    assert isinstance(wanted, RowsWanted)
    return sent(session, wanted, tensor, now=now)


def sent(session: SessionCore, wanted: RowsWanted, tensor: TensorMeta = ROW, *, now: MonotonicS = T0) -> Step:
    ready = session.rows_ready(wanted, tensor, now=now)
    assert ready is not None
    assert ready[0] == session.plan.stages[0].peer
    return ready[1]


def fault_of(session: SessionCore) -> Fault:
    """The one that was found, because of which nothing goes on."""
    (event,) = events(session)
    assert isinstance(event, Fault)
    assert session.state is SessionState.BROKEN
    assert isinstance(event.error, PeerError)
    return event


def error_of(session: SessionCore) -> PeerError:
    return fault_of(session).error


def found_when_both_are_there(session: SessionCore, accuser: int, accused: int) -> Fault:
    """Who accuses and who is accused are asked, and both answer."""
    assert events(session) == []
    assert session.state is SessionState.BROKEN
    queries = [(peer, m) for peer, m in session.messages_to_send() if isinstance(m, SessionQuery)]
    asked = sorted(queries, key=lambda query: query[1].stage)
    stages = sorted((accuser, accused))
    assert asked == [(PEERS[stage], SessionQuery(KEY, EPOCH, stage)) for stage in stages]
    for stage in stages:
        session.receive(SessionProgress(KEY, EPOCH, stage, 0, 0, 120.0, 0.0), source=PEERS[stage], now=T0)
    return fault_of(session)


def test_start_asks_every_stage_for_its_place() -> None:
    session = core()
    session.start(now=T0)
    assert session.messages_to_send() == [(p, OpenSession(KEY, EPOCH, i, b"signed")) for i, p in enumerate(PEERS)]
    assert session.get_timer() == T0 + OPEN_PATIENCE_S


def test_session_is_open_only_when_every_stage_has_said_so_itself() -> None:
    session = core()
    session.start(now=T0)
    for _ in range(2):
        session.receive(SessionOpened(KEY, EPOCH, 0, 120.0), source=PEERS[0], now=T0)
    session.receive(SessionOpened(KEY, EPOCH - 1, 1, 120.0), source=PEERS[1], now=T0)
    session.receive(SessionOpened(KEY, EPOCH, 2, 120.0), source=STRANGER, now=T0)
    session.receive(SessionOpened(KEY, EPOCH, 1, 120.0), source=PEERS[1], now=T0)
    assert events(session) == []
    session.receive(SessionOpened(KEY, EPOCH, 2, 120.0), source=PEERS[2], now=T0)
    assert events(session) == [Opened(0, EPOCH)]


def test_stage_that_answers_for_another_ends_the_session() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    session.receive(SessionOpened(KEY, EPOCH, 2, 120.0), source=PEERS[1], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[1])


def test_steps_are_one_chain_that_advances_with_every_step() -> None:
    session = opened()
    first = send(session, TensorMeta("f32", 5, 8), want_last=False)
    second = send(session)
    assert (first.sequence, first.first_node, first.parent, first.advance, first.want) == (0, 1, 0, 5, ())
    assert (second.sequence, second.first_node, second.parent, second.advance, second.want) == (1, 6, 5, 6, (6,))
    session.receive(StepResult(KEY, EPOCH, 0, (), TensorMeta("f32", 0, 8), ()), source=PEERS[2], now=at(1))
    session.receive(result(1, 6), source=PEERS[2], now=at(2))
    done = [event for event in events(session) if isinstance(event, StepDone)]
    assert [(e.sequence, e.num_computed, e.has_row, e.round_trip_s) for e in done] == [
        (0, 5, False, 1.0),
        (1, 6, True, 2.0),
    ]
    assert session.get_timer() == at(2 + 60)  # nothing is awaited; leases of 120 s are to be renewed


def test_no_more_entries_are_under_way_than_keep_the_stages_busy() -> None:
    session = opened()
    for _ in range(9):
        session.append(1, want_last=False, now=T0)
    wanted = events(session)
    assert [w.sequence for w in wanted if isinstance(w, RowsWanted)] == list(range(6))
    assert isinstance(wanted[0], RowsWanted)
    sent(session, wanted[0])
    session.receive(StepResult(KEY, EPOCH, 0, (), TensorMeta("f32", 0, 8), ()), source=PEERS[2], now=T0)
    (_, more) = events(session)
    assert isinstance(more, RowsWanted)
    assert more.sequence == 6


@pytest.mark.parametrize(
    "message",
    [
        result(1, 2),  # not due
        result(0, 2),  # another node
        result(0, 1, TensorMeta("f16", 1, 8)),
        result(0, 1, TensorMeta("f32", 1, 9)),
        result(0, 1, TensorMeta("f32", 0, 8)),
        StepResult(KEY, EPOCH, 0, (), TensorMeta("f32", 0, 8), ()),
        StepResult(KEY, EPOCH, 0, (1, 1), TensorMeta("f32", 2, 8), ()),
    ],
)
def test_result_that_was_not_asked_for_is_the_last_stages_fault(message: StepResult) -> None:
    session = opened()
    send(session)
    session.receive(message, source=PEERS[2], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[2])


def test_second_answer_to_one_step_is_a_fault() -> None:
    session = opened()
    send(session)
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert error_of(session).peer == PEERS[2]


@pytest.mark.parametrize("stage", [0, 1])
def test_result_from_a_stage_that_is_not_the_last_is_its_fault(stage: int) -> None:
    session = opened()
    send(session)
    session.receive(result(0, 1), source=PEERS[stage], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[stage])


@pytest.mark.parametrize(
    ("message", "source"),
    [
        (result(0, 1), STRANGER),
        (SessionFailed(KEY, EPOCH, 0, "x", "x", ""), STRANGER),
        (SessionRefused(KEY, EPOCH, 0, "x", "x"), STRANGER),
        (SessionDraining(KEY, EPOCH, 0, 30.0, "x"), STRANGER),
        (SessionProgress(KEY, EPOCH, 0, 9, 9, 1.0, 1.0), STRANGER),
        (Replayed(KEY, EPOCH - 1, 0, 1, 1), PEERS[0]),
        (SessionFailed(KEY, EPOCH - 1, 0, "x", "x", ""), PEERS[0]),
        (SessionRefused(KEY, EPOCH - 1, 0, "x", "x"), PEERS[0]),
        (result(0, 1, epoch=EPOCH + 1), PEERS[2]),
        (SessionClosed(KEY, EPOCH), PEERS[0]),
        (StatusRequest(1), PEERS[0]),
    ],
)
def test_what_strangers_and_other_epochs_say_changes_nothing(message: AnyMessage, source: PeerId) -> None:
    session = opened()
    send(session)
    session.receive(message, source=source, now=T0)
    session.link_closed(STRANGER, PeerClosed(STRANGER, "gone"), now=T0)
    assert events(session) == []
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)


def test_stage_that_accuses_no_other_stage_is_itself_at_fault() -> None:
    for culprit in (PEERS[1], STRANGER, USER, ""):
        session = opened()
        session.receive(SessionFailed(KEY, EPOCH, 1, "overloaded", "\x1b[2Jno", culprit), source=PEERS[1], now=T0)
        fault = fault_of(session)
        assert (fault.stage, fault.cause, type(fault.error), fault.error.peer) == (
            1,
            Cause.REFUSED,
            PeerRefused,
            PEERS[1],
        )
        assert str(fault.error).isprintable()


@pytest.mark.parametrize(("code", "kind"), [("peer-lost", PeerClosed), ("bad-rows", RemoteProtocolError)])
def test_of_two_stages_that_are_both_there_the_link_is_at_fault(code: str, kind: type[PeerError]) -> None:
    session = opened()
    session.receive(SessionFailed(KEY, EPOCH, 1, code, "\x1b[2Jgone", PEERS[2], True), source=PEERS[1], now=T0)
    fault = found_when_both_are_there(session, 1, 2)
    assert (fault.stage, fault.cause, fault.accuser) == (2, Cause.PAIR, 1)
    assert (type(fault.error), fault.error.peer) == (kind, PEERS[2])
    assert str(fault.error).isprintable()
    assert PEERS[1][-8:] in str(fault.error)  # whoever says so is named, too: it may lie


def test_stage_that_has_closed_what_it_could_not_open_is_not_at_fault_for_saying_so() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    refused = SessionRefused(KEY, EPOCH, 1, SUCCESSOR_UNREACHABLE, "no way")
    session.receive(refused, source=PEERS[1], now=T0)
    session.receive(SessionFailed(KEY, EPOCH, 1, UNKNOWN_SESSION, "no such session", ""), source=PEERS[1], now=T0)
    assert events(session) == []
    session.receive(SessionProgress(KEY, EPOCH, 2, 0, 0, 120.0, 0.0), source=PEERS[2], now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause, fault.accuser) == (2, Cause.PAIR, 1)


def test_accused_stage_that_is_gone_is_at_fault_at_once() -> None:
    session = opened()
    session.receive(SessionFailed(KEY, EPOCH, 1, "peer-lost", "gone", PEERS[2], True), source=PEERS[1], now=T0)
    gone = PeerClosed(PEERS[2], "gone")
    session.link_closed(PEERS[2], gone, now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause, fault.error) == (2, Cause.LOST, gone)


def test_accused_stage_that_is_silent_is_at_fault_after_a_while() -> None:
    session = opened()
    session.receive(SessionFailed(KEY, EPOCH, 1, "peer-lost", "gone", PEERS[2], True), source=PEERS[1], now=T0)
    session.receive(SessionProgress(KEY, EPOCH, 1, 0, 0, 120.0, 0.0), source=PEERS[1], now=T0)
    session.handle_timer(now=at(MIN_PROBE_S))
    fault = fault_of(session)
    assert (fault.stage, fault.cause) == (2, Cause.SILENT)
    # Nothing goes on, so that its coming back does not settle what it was accused of.
    session.receive(SessionProgress(KEY, EPOCH, 2, 0, 0, 120.0, 0.0), source=PEERS[2], now=at(1))
    assert events(session) == []


def test_lost_link_to_a_stage_is_told_as_it_is() -> None:
    session = opened()
    gone = PeerClosed(PEERS[1], "gone")
    session.link_closed(PEERS[1], gone, now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause, fault.error) == (1, Cause.LOST, gone)


def test_stage_that_does_not_open_and_does_not_answer_is_silent() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    for stage in (0, 2):
        session.receive(SessionOpened(KEY, EPOCH, stage, 120.0), source=PEERS[stage], now=T0)
    session.handle_timer(now=at(OPEN_PATIENCE_S))
    assert [m for _, m in session.messages_to_send()] == [SessionQuery(KEY, EPOCH, stage) for stage in range(3)]
    for stage in (0, 2):
        session.receive(SessionProgress(KEY, EPOCH, stage, 0, 0, 1.0, 0.0), source=PEERS[stage], now=at(1.1))
    session.handle_timer(now=at(OPEN_PATIENCE_S + MIN_PROBE_S))
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause, type(fault.error)) == (1, Cause.SILENT, PeerTimeout)


def test_stage_that_answers_and_does_not_open_is_named_when_the_time_is_up() -> None:
    session = core()
    session.start(now=T0)
    session.receive(SessionOpened(KEY, EPOCH, 0, 120.0), source=PEERS[0], now=T0)
    found: list[SessionEvent] = []
    while not found:
        due = session.get_timer()
        assert due is not None
        session.handle_timer(now=due)
        for peer, message in session.messages_to_send():
            if isinstance(message, SessionQuery):
                progress = SessionProgress(KEY, EPOCH, message.stage, 0, 0, 1.0, 0.0)
                session.receive(progress, source=peer, now=due)
        found = events(session)
    (fault,) = found
    assert isinstance(fault, Fault)
    assert due == at(OPEN_DEADLINE_S)
    assert (fault.stage, fault.cause, type(fault.error)) == (1, Cause.STUCK, PeerTimeout)


def silent_after_a_step() -> SessionCore:
    """Of three stages the second does not answer."""
    session = opened()
    send(session)
    due = session.get_timer()
    assert due is not None
    assert T0 + MIN_TIMEOUT_S <= due <= T0 + 2.0
    session.handle_timer(now=due)
    for stage in (0, 2):
        session.receive(SessionProgress(KEY, EPOCH, stage, 1, 1, 120.0, 0.0), source=PEERS[stage], now=due)
    session.handle_timer(now=MonotonicS(due + MIN_PROBE_S))
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (1, Cause.SILENT)
    assert session.state is SessionState.READY
    return session


def test_stage_that_was_silent_may_come_back() -> None:
    session = silent_after_a_step()
    session.receive(SessionProgress(KEY, EPOCH, 1, 1, 1, 120.0, 0.0), source=PEERS[1], now=at(4))
    assert events(session) == [Recovered(1)]
    session.receive(result(0, 1), source=PEERS[2], now=at(4))
    assert isinstance(events(session)[0], StepDone)


def test_step_that_makes_no_progress_is_put_down_to_the_stage_that_has_it() -> None:
    session = opened()
    send(session)
    found: list[SessionEvent] = []
    now = T0
    while not found:
        due = session.get_timer()
        assert due is not None
        now = due
        session.handle_timer(now=now)
        for peer, message in session.messages_to_send():
            if isinstance(message, SessionQuery):
                done = 1 if message.stage == 0 else 0
                progress = SessionProgress(KEY, EPOCH, message.stage, int(message.stage < 2), done, 120.0, 0.0)
                session.receive(progress, source=peer, now=now)
        found = events(session)
    (fault,) = found
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (1, Cause.STUCK)
    assert now - T0 >= STUCK_S


@pytest.mark.parametrize("progress", [(1, 2), (2, 0), (2, 2), (0, 1)])
def test_progress_beyond_what_was_sent_is_a_fault(progress: tuple[int, int]) -> None:
    session = opened()
    send(session)
    session.receive(SessionProgress(KEY, EPOCH, 0, *progress, 120.0, 0.0), source=PEERS[0], now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause) == (0, Cause.GARBAGE)


def test_acknowledgement_of_nothing_is_no_progress() -> None:
    session = opened()
    send(session)
    due = session.get_timer()
    session.receive(Replayed(KEY, EPOCH, 2, 0, 0), source=PEERS[2], now=at(0.1))
    assert events(session) == []
    assert session.get_timer() == due


def test_step_that_stops_where_nobody_has_ordered_it_to_speaks_against_two_stages() -> None:
    session = opened()
    send(session)
    session.receive(Replayed(KEY, EPOCH, 2, 1, 1), source=PEERS[2], now=T0)
    fault = found_when_both_are_there(session, 2, 1)
    assert (fault.stage, fault.cause, fault.accuser, fault.is_either) == (1, Cause.PAIR, 2, True)
    session = opened()
    send(session)
    session.receive(Replayed(KEY, EPOCH, 0, 1, 1), source=PEERS[0], now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause) == (0, Cause.GARBAGE)


def test_stage_that_is_about_to_leave_serves_on() -> None:
    session = opened()
    send(session)
    session.receive(SessionDraining(KEY, EPOCH, 1, 30.0, "told to"), source=PEERS[1], now=T0)
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (1, Cause.DRAINING)
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)


def test_leases_are_renewed_while_no_step_is_sent_but_not_for_ever() -> None:
    session = opened()
    send(session)
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    events(session)
    asked = []
    while (due := session.get_timer()) is not None:
        assert due < T0 + 1000
        session.handle_timer(now=due)
        for peer, message in session.messages_to_send():
            if isinstance(message, SessionQuery):
                asked.append(due - T0)
                progress = SessionProgress(KEY, EPOCH, message.stage, 1, 1, 120.0, 0.0)
                session.receive(progress, source=peer, now=due)
    assert sorted(set(asked)) == [60.0 * n for n in range(1, 12)]


LEASE = Lease(PROTOCOL_VERSION, PEERS[0], Identity.from_seed(b"u" * 32).peer_id, KEY, EPOCH, 0, 2, 64, 0.0, 1.0)


@pytest.mark.parametrize(
    ("lease", "is_good"),
    [
        (LEASE, True),
        (msgspec.structs.replace(LEASE, num_positions=65), True),
        (msgspec.structs.replace(LEASE, num_positions=63), False),
        (msgspec.structs.replace(LEASE, node=PEERS[1]), False),
        (msgspec.structs.replace(LEASE, user=STRANGER), False),
        (msgspec.structs.replace(LEASE, session=b"o" * 16), False),
        (msgspec.structs.replace(LEASE, epoch=EPOCH - 1), False),
        (msgspec.structs.replace(LEASE, stop=1), False),
        (Refusal.EXPIRED, False),
    ],
)
def test_lease_that_is_not_what_was_asked_for_is_the_stages_fault(lease: Lease | Refusal, is_good: bool) -> None:
    session = core(open_lease=lambda envelope: lease)
    session.start(now=T0)
    session.receive(SessionOpened(KEY, EPOCH, 0, 120.0, lease=b"x"), source=PEERS[0], now=T0)
    if is_good:
        assert events(session) == []
    else:
        assert isinstance(error_of(session), RemoteProtocolError)


def test_closing_twice_tells_every_stage_once() -> None:
    session = opened()
    session.close()
    session.close()
    assert session.messages_to_send() == [(peer, CloseSession(KEY, EPOCH)) for peer in PEERS]
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    session.link_closed(PEERS[0], PeerClosed(PEERS[0], "gone"), now=T0)
    assert events(session) == []
    assert session.get_timer() is None


SENDERS = st.sampled_from([*PEERS, STRANGER])
EPOCHS = st.sampled_from([EPOCH, EPOCH, EPOCH, EPOCH - 1])
MESSAGES = st.one_of(
    st.builds(SessionOpened, st.just(KEY), EPOCHS, st.integers(0, 4), st.just(1.0)),
    st.builds(SessionRefused, st.just(KEY), EPOCHS, st.integers(0, 4), st.just("x"), st.text(max_size=5)),
    st.builds(
        SessionFailed,
        st.just(KEY),
        EPOCHS,
        st.integers(0, 4),
        st.just("x"),
        st.text(max_size=5),
        st.sampled_from([*PEERS, ""]),
    ),
    st.builds(SessionClosed, st.just(KEY), EPOCHS),
    st.builds(result, st.integers(0, 3), st.integers(1, 4), st.just(ROW), EPOCHS),
)
ACTIONS = st.one_of(
    st.tuples(st.just("receive"), MESSAGES, SENDERS),
    st.tuples(st.just("lost"), st.none(), SENDERS),
    st.tuples(st.just("step"), st.none(), st.none()),
    st.tuples(st.just("tick"), st.floats(0.0, 40.0), st.none()),
    st.tuples(st.just("close"), st.none(), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=30), cooperative=st.booleans())
def test_every_sequence_of_events_comes_to_something(actions: list[tuple], cooperative: bool) -> None:  # type: ignore[type-arg]
    session = opened() if cooperative else core()
    now = float(T0)
    told: list[SessionEvent] = []
    if not cooperative:
        session.start(now=T0)
    for action, what, who in actions:
        match action:
            case "receive":
                session.receive(what, source=who, now=MonotonicS(now))
            case "lost":
                session.link_closed(who, PeerClosed(who, "gone"), now=MonotonicS(now))
            case "step" if session.state is SessionState.READY:
                session.append(1, want_last=True, now=MonotonicS(now))
            case "tick":
                now += what
                session.handle_timer(now=MonotonicS(now))
            case "close":
                session.close()
        new = events(session)
        for event in new:
            if isinstance(event, RowsWanted):
                session.rows_ready(event, ROW, now=MonotonicS(now))
        told += new
    is_waiting = session.state is SessionState.OPENING or (
        session.state is SessionState.READY and any(isinstance(e, RowsWanted) for e in told)
    )
    # Nobody says anything from here on: whoever is waited for is found to be silent.
    for _ in range(40):
        due = session.get_timer()
        if due is None or any(isinstance(event, Fault) for event in told):
            break
        assert due <= now + 60
        now = max(now, due)
        session.handle_timer(now=MonotonicS(now))
        told += events(session)
    results = [event.sequence for event in told if isinstance(event, StepDone)]
    assert results == list(range(len(results)))
    if is_waiting and len(results) < sum(isinstance(e, RowsWanted) for e in told):
        assert any(isinstance(event, Fault) for event in told)
    if session.state is SessionState.CLOSED:
        closes = [message for _, message in session.messages_to_send() if isinstance(message, CloseSession)]
        assert len(closes) == len(PEERS)
    hard = [event.stage for event in told if isinstance(event, Fault) and not event.cause.is_soft]
    assert len(hard) == len(set(hard))


def test_a_stage_that_cannot_reach_the_next_one_is_not_itself_blamed() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    refused = SessionRefused(KEY, EPOCH, 0, SUCCESSOR_UNREACHABLE, "it does not answer")
    session.receive(refused, source=PEERS[0], now=T0)
    fault = found_when_both_are_there(session, 0, 1)
    assert isinstance(fault.error, PeerUnreachable)
    assert fault.error.peer == PEERS[1]


# sessions that begin like another

EARLIER = Prefix(b"e" * 16, 48)


def opened_with(*offers: int) -> SessionCore:
    session = core(EARLIER)
    session.start(now=T0)
    for stage, (peer, offer) in enumerate(zip(PEERS, offers, strict=True)):
        session.receive(SessionOpened(KEY, EPOCH, stage, 120.0, offer), source=peer, now=T0)
    return session


def test_every_stage_is_asked_for_the_prefix() -> None:
    session = core(EARLIER)
    session.start(now=T0)
    asked = [message for _, message in session.messages_to_send()]
    assert asked == [OpenSession(KEY, EPOCH, i, b"signed", b"e" * 16, 48) for i in range(3)]


def test_prefix_that_all_stages_have_is_where_the_first_step_begins() -> None:
    session = opened_with(32, 32, 32)
    assert events(session) == [Opened(32, EPOCH)]
    assert (session.reused_positions, session.num_computed) == (32, 32)
    step = send(session, TensorMeta("f32", 3, 8))
    assert (step.sequence, step.first_node, step.parent, step.advance, step.want) == (0, 33, 32, 35, (35,))
    assert session.num_computed == 32
    session.receive(result(0, 35), source=PEERS[2], now=T0)
    assert session.num_computed == 35


@pytest.mark.parametrize("offers", [(32, 32, 16), (48, 0, 48), (0, 0, 16), (0, 0, 0)])
def test_stages_that_have_not_the_same_begin_at_nothing(offers: tuple[int, int, int]) -> None:
    session = opened_with(*offers)
    assert events(session) == [Opened(0, EPOCH)]
    step = send(session)
    assert (step.first_node, step.parent) == (1, 0)


def test_stage_that_says_twice_what_it_has_is_heard_once() -> None:
    session = core(EARLIER)
    session.start(now=T0)
    for offer in (32, 16):
        session.receive(SessionOpened(KEY, EPOCH, 0, 120.0, offer), source=PEERS[0], now=T0)
    for stage in (1, 2):
        session.receive(SessionOpened(KEY, EPOCH, stage, 120.0, 32), source=PEERS[stage], now=T0)
    session.receive(SessionOpened(KEY, EPOCH, 1, 120.0, 16), source=PEERS[1], now=T0)
    assert events(session) == [Opened(32, EPOCH)]
    assert session.reused_positions == 32


@pytest.mark.parametrize(("prefix", "offer"), [(None, 1), (EARLIER, 49), (EARLIER, 2**32 - 1)])
def test_stage_that_has_more_than_it_was_asked_for_ends_the_session(prefix: Prefix | None, offer: int) -> None:
    session = core(prefix)
    session.start(now=T0)
    session.messages_to_send()
    session.receive(SessionOpened(KEY, EPOCH, 1, 120.0, offer), source=PEERS[1], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[1])


def test_only_a_session_that_did_not_fail_is_kept() -> None:
    session = opened()
    session.close(retain=True)
    assert session.messages_to_send() == [(peer, CloseSession(KEY, EPOCH, retain=True)) for peer in PEERS]
    session = opened()
    session.link_closed(PEERS[1], PeerClosed(PEERS[1], "gone"), now=T0)
    error_of(session)
    session.close(retain=True)
    assert session.messages_to_send() == [(peer, CloseSession(KEY, EPOCH)) for peer in PEERS]


# repair: plans of higher epochs

NEW = Identity.from_seed(b"n" * 32).peer_id


def has(stage: int, next_sequence: int, num_positions: int, retained: int, epoch: int = EPOCH + 1) -> SessionOpened:
    return SessionOpened(
        KEY, epoch, stage, 120.0, next_sequence=next_sequence, retained_positions=retained, num_positions=num_positions
    )


def decoding() -> SessionCore:
    """A prompt of five and two tokens are computed, and a third is on its way."""
    session = opened()
    send(session, TensorMeta("f32", 5, 8))
    session.receive(result(0, 5), source=PEERS[2], now=T0)
    for node in (6, 7):
        send(session)
        session.receive(result(node - 5, node), source=PEERS[2], now=T0)
    events(session)
    send(session)
    session.messages_to_send()
    return session


def replaced(stage: int) -> SessionCore:
    """Another node in the place of one that is lost; the plan of the next epoch was sent."""
    session = decoding()
    session.link_closed(PEERS[stage], PeerClosed(PEERS[stage], "gone"), now=T0)
    fault_of(session)
    peers = [NEW if index == stage else peer for index, peer in enumerate(PEERS)]
    session.replace(plan_of(peers, EPOCH + 1), b"next", round_trips_s=[0.01] * 3, now=T0)
    assert session.messages_to_send() == [
        (PEERS[stage], CloseSession(KEY, EPOCH)),
        *((peer, OpenSession(KEY, EPOCH + 1, i, b"next", resumes=True)) for i, peer in enumerate(peers)),
    ]
    return session


def test_replaced_stage_gets_its_history_from_the_one_before_and_the_missing_row_comes_to_the_user() -> None:
    session = replaced(1)
    session.receive(has(0, 4, 8, 8), source=PEERS[0], now=T0)
    session.receive(has(1, 0, 0, 0), source=NEW, now=T0)
    session.receive(has(2, 3, 7, 0), source=PEERS[2], now=T0)
    assert events(session) == [Opened(0, EPOCH + 1)]
    assert session.messages_to_send() == [
        (PEERS[0], Resend(KEY, EPOCH + 1, 0, 3, 0, 7, False, 1)),
        (PEERS[0], Resend(KEY, EPOCH + 1, 3, 1, 7, 1, True)),
    ]
    assert session.replayed_positions == 7 + 2
    session.receive(Replayed(KEY, EPOCH + 1, 1, 3, 7), source=NEW, now=T0)
    session.receive(result(3, 8, epoch=EPOCH + 1), source=PEERS[2], now=T0)
    (done,) = events(session)
    assert isinstance(done, StepDone)
    assert (done.sequence, done.num_computed) == (3, 8)
    assert send(session).epoch == EPOCH + 1


def test_replaced_first_stage_gets_its_rows_from_the_user() -> None:
    session = replaced(0)
    session.receive(has(0, 0, 0, 0), source=NEW, now=T0)
    session.receive(has(1, 4, 8, 8), source=PEERS[1], now=T0)
    session.receive(has(2, 4, 8, 0), source=PEERS[2], now=T0)
    _, wanted = events(session)
    assert wanted == RowsWanted(KEY, EPOCH + 1, 0, 4, 0, 8, False, 0, True)
    assert isinstance(wanted, RowsWanted)
    step = sent(session, wanted, TensorMeta("f32", 8, 8))
    assert (step.covers, step.stop_stage, step.want, step.parent, step.advance) == (4, 0, (), 0, 8)
    assert session.replayed_bytes == 8 * 8 * 4
    # The result that the last stage was computing counts, and new rows wait for nothing but their turn.
    session.receive(result(3, 8), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)


def test_result_of_the_old_plan_counts_while_the_new_one_is_being_opened() -> None:
    session = replaced(1)
    session.receive(result(3, 8), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)
    session.receive(has(0, 4, 8, 8), source=PEERS[0], now=T0)
    session.receive(has(1, 0, 0, 0), source=NEW, now=T0)
    session.receive(has(2, 4, 8, 0), source=PEERS[2], now=T0)
    events(session)
    assert session.messages_to_send() == [(PEERS[0], Resend(KEY, EPOCH + 1, 0, 4, 0, 8, False, 1))]


def test_result_of_the_old_plan_that_is_being_computed_again_is_no_fault_and_does_not_count() -> None:
    session = replaced(2)
    session.receive(has(0, 4, 8, 8), source=PEERS[0], now=T0)
    session.receive(has(1, 4, 8, 8), source=PEERS[1], now=T0)
    session.receive(has(2, 0, 0, 0), source=NEW, now=T0)
    events(session)
    session.receive(result(3, 8), source=PEERS[2], now=T0)
    session.receive(result(3, 8), source=NEW, now=T0)
    assert events(session) == []


def test_rows_that_were_asked_for_under_the_old_plan_are_not_sent() -> None:
    session = opened()
    session.append(5, want_last=True, now=T0)
    (wanted,) = events(session)
    assert isinstance(wanted, RowsWanted)
    session.link_closed(PEERS[1], PeerClosed(PEERS[1], "gone"), now=T0)
    assert session.rows_ready(wanted, TensorMeta("f32", 5, 8), now=T0) is None
    session.replace(plan_of([PEERS[0], NEW, PEERS[2]], EPOCH + 1), b"next", round_trips_s=[0.0] * 3, now=T0)
    assert session.rows_ready(wanted, TensorMeta("f32", 5, 8), now=T0) is None


@pytest.mark.parametrize("claim", [has(2, 5, 9, 0), has(2, 4, 7, 0), has(2, 1, 0, 0)])
def test_stage_that_has_what_it_was_never_sent_is_at_fault(claim: SessionOpened) -> None:
    session = replaced(1)
    session.receive(claim, source=PEERS[2], now=T0)
    assert isinstance(error_of(session), RemoteProtocolError)


@pytest.mark.parametrize("claims", [(5, 9), (4, 9), (4, 7)])
def test_first_stage_that_has_more_than_was_sent_is_in_doubt_together_with_the_one_before_it(
    claims: tuple[int, int],
) -> None:
    """Stage 1 has it, and so has stage 2: stage 0 has made it up, or stage 1 has. Both they and stage 2 begin anew."""
    session = replaced(0)
    odd, peers = (claims[0], claims[1]), session.plan.stages
    session.receive(has(2, *odd, 0), source=PEERS[2], now=T0)
    session.receive(has(1, *odd, 0), source=PEERS[1], now=T0)
    fault = fault_of(session)  # who sent it to stage 1 is gone
    assert (fault.stage, fault.cause) == (1, Cause.GARBAGE)
    session.replace(plan_of([peers[0].peer, STRANGER, PEERS[2]], EPOCH + 2), b"more", round_trips_s=[0.0] * 3, now=T0)
    closed = [(peer, message) for peer, message in session.messages_to_send() if isinstance(message, CloseSession)]
    assert closed == [(PEERS[1], CloseSession(KEY, EPOCH + 1)), (PEERS[2], CloseSession(KEY, EPOCH + 1))]


def test_of_those_that_have_more_than_was_sent_the_first_is_in_doubt_whoever_answers_first() -> None:
    session = replaced(2)
    session.replace(plan_of([*PEERS[:2], NEW], EPOCH + 2), b"again", round_trips_s=[0.0] * 3, now=T0)
    session.messages_to_send()
    session.receive(has(2, 5, 9, 0, EPOCH + 2), source=NEW, now=T0)
    session.receive(has(1, 5, 9, 9, EPOCH + 2), source=PEERS[1], now=T0)
    assert events(session) == []
    session.receive(has(0, 4, 8, 8, EPOCH + 2), source=PEERS[0], now=T0)
    assert session.state is SessionState.BROKEN
    assert {peer for peer, m in session.messages_to_send() if isinstance(m, SessionQuery)} == set(PEERS[:2])
    for stage in (0, 1):
        progress = SessionProgress(KEY, EPOCH + 2, stage, 4 + stage, 4 + stage, 120.0, 0.0)
        session.receive(progress, source=PEERS[stage], now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause, fault.accuser, fault.is_either) == (0, Cause.PAIR, 1, True)
    session.replace(plan_of([STRANGER, *PEERS[1:]], EPOCH + 3), b"more", round_trips_s=[0.0] * 3, now=T0)
    closed = [peer for peer, message in session.messages_to_send() if isinstance(message, CloseSession)]
    assert sorted(closed) == sorted([PEERS[0], PEERS[1], NEW])


def test_new_stage_is_not_in_doubt_for_what_was_sent_before_it_came() -> None:
    session = replaced(1)
    session.receive(SessionProgress(KEY, EPOCH + 1, 2, 5, 5, 120.0, 0.0), source=PEERS[2], now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause) == (2, Cause.GARBAGE)


def test_excess_is_put_down_to_where_it_begins() -> None:
    """Stage 2 tells of it first; stage 1 has it too, and stage 0 has not."""
    session = opened()
    send(session)
    session.receive(SessionProgress(KEY, EPOCH, 2, 2, 2, 120.0, 0.0), source=PEERS[2], now=T0)
    assert events(session) == []
    session.receive(SessionProgress(KEY, EPOCH, 1, 2, 2, 120.0, 0.0), source=PEERS[1], now=T0)
    assert events(session) == []
    session.receive(SessionProgress(KEY, EPOCH, 0, 1, 1, 120.0, 0.0), source=PEERS[0], now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause, fault.accuser, fault.is_either) == (0, Cause.PAIR, 1, True)


def test_stage_that_retains_nothing_cannot_be_a_source() -> None:
    session = replaced(1)
    session.receive(has(0, 4, 8, 0), source=PEERS[0], now=T0)
    session.receive(has(1, 0, 0, 0), source=NEW, now=T0)
    session.receive(has(2, 4, 8, 0), source=PEERS[2], now=T0)
    assert events(session) == [CannotResume(0)]


def test_stage_that_has_dropped_rows_since_cannot_be_a_source_either() -> None:
    session = replaced(1)
    session.receive(has(0, 4, 8, 8), source=PEERS[0], now=T0)
    session.receive(has(1, 0, 0, 0), source=NEW, now=T0)
    session.receive(has(2, 3, 7, 0), source=PEERS[2], now=T0)
    events(session)
    session.receive(SessionFailed(KEY, EPOCH + 1, 0, NOT_RETAINED, "gone", "", True), source=PEERS[0], now=T0)
    assert events(session) == [CannotResume(0)]


def test_stage_that_has_dropped_rows_that_nobody_asked_for_has_ended_the_session() -> None:
    session = replaced(1)
    session.receive(has(0, 4, 8, 8), source=PEERS[0], now=T0)
    session.receive(has(1, 0, 0, 0), source=NEW, now=T0)
    session.receive(has(2, 3, 7, 0), source=PEERS[2], now=T0)
    events(session)
    session.receive(SessionFailed(KEY, EPOCH + 1, 1, NOT_RETAINED, "gone", "", True), source=NEW, now=T0)
    fault = fault_of(session)
    assert (fault.stage, fault.cause, fault.error.peer) == (1, Cause.REFUSED, NEW)


def test_row_that_cannot_be_used_is_awaited_again_from_another() -> None:
    session = decoding()
    session.receive(result(3, 8), source=PEERS[2], now=T0)
    events(session)
    session.result_unfit(RemoteProtocolError(PEERS[2], "not finite"), now=T0)
    assert fault_of(session).stage == 2
    session.replace(plan_of([*PEERS[:2], NEW], EPOCH + 1), b"next", round_trips_s=[0.0] * 3, now=T0)
    for stage in (0, 1):
        session.receive(has(stage, 4, 8, 8), source=PEERS[stage], now=T0)
    session.receive(has(2, 0, 0, 0), source=NEW, now=T0)
    events(session)
    orders = [message for _, message in session.messages_to_send() if isinstance(message, Resend)]
    assert orders[-1] == Resend(KEY, EPOCH + 1, 3, 1, 7, 1, True)
