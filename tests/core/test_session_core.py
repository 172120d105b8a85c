"""The user's side of a session: whatever comes, in whatever order, it ends, once, and says who was at fault."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.client.session_core import (
    OPEN_DEADLINE_S,
    STEP_DEADLINE_PER_ROW_S,
    STEP_DEADLINE_S,
    Failed,
    Opened,
    Prefix,
    SessionCore,
    SessionEvent,
    SessionState,
    StepDone,
)
from fusion_node.errors import PeerClosed, PeerError, PeerRefused, PeerTimeout, PeerUnreachable, RemoteProtocolError
from fusion_node.types import MonotonicS, PeerId
from p2p.identity import Identity
from p2p.messages import (
    SUCCESSOR_UNREACHABLE,
    AnyMessage,
    CloseSession,
    OpenSession,
    SessionClosed,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    StageTiming,
    StatusRequest,
    StepResult,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage

KEY = bytes(range(16))
EPOCH = 3
PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(3)]
STRANGER = Identity.from_seed(b"s" * 32).peer_id
ROW = TensorMeta("f32", 1, 8)
T0 = MonotonicS(1000.0)


def core(prefix: Prefix | None = None) -> SessionCore:
    now = time.time()
    plan = Plan(
        version=PROTOCOL_VERSION,
        user=Identity.from_seed(b"u" * 32).peer_id,
        session=KEY,
        epoch=EPOCH,
        model_id="ab" * 32,
        numerics="fp32",
        max_positions=64,
        issued_at=now,
        expires_at=now + 60,
        stages=tuple(PlanStage(peer, 2 * i, 2 * i + 2, ()) for i, peer in enumerate(PEERS)),
    )
    return SessionCore(plan, b"signed", row_size=8, wire_dtype="f32", prefix=prefix)


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
    assert events(session) == [Opened()]
    session.messages_to_send()
    return session


def result(sequence: int, node: int, tensor: TensorMeta = ROW, epoch: int = EPOCH) -> StepResult:
    return StepResult(KEY, epoch, sequence, (node,), tensor, (StageTiming(1, 2),) * 3)


def error_of(session: SessionCore) -> PeerError:
    (event,) = events(session)
    assert isinstance(event, Failed)
    assert isinstance(event.error, PeerError)
    assert session.state is SessionState.FAILED
    assert session.get_timer() is None
    assert session.messages_to_send() == [(peer, CloseSession(KEY, EPOCH)) for peer in PEERS]
    return event.error


def test_start_asks_every_stage_for_its_place() -> None:
    session = core()
    session.start(now=T0)
    assert session.messages_to_send() == [(p, OpenSession(KEY, EPOCH, i, b"signed")) for i, p in enumerate(PEERS)]
    assert session.get_timer() == T0 + OPEN_DEADLINE_S


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
    assert events(session) == [Opened()]


def test_stage_that_answers_for_another_ends_the_session() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    session.receive(SessionOpened(KEY, EPOCH, 2, 120.0), source=PEERS[1], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[1])


def test_steps_are_one_chain_that_advances_with_every_step() -> None:
    session = opened()
    first = session.next_step(TensorMeta("f32", 5, 8), want_last=False, now=T0)
    second = session.next_step(ROW, want_last=True, now=T0)
    assert (first.sequence, first.first_node, first.parent, first.advance, first.want) == (0, 1, 0, 5, ())
    assert (second.sequence, second.first_node, second.parent, second.advance, second.want) == (1, 6, 5, 6, (6,))
    session.receive(StepResult(KEY, EPOCH, 0, (), TensorMeta("f32", 0, 8), ()), source=PEERS[2], now=MonotonicS(T0 + 1))
    session.receive(result(1, 6), source=PEERS[2], now=MonotonicS(T0 + 2))
    done = events(session)
    assert [(e.sequence, e.round_trip_s) for e in done if isinstance(e, StepDone)] == [(0, 1.0), (1, 2.0)]
    assert session.get_timer() is None


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
    session.next_step(ROW, want_last=True, now=T0)
    session.receive(message, source=PEERS[2], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[2])


def test_second_answer_to_one_step_ends_the_session() -> None:
    session = opened()
    session.next_step(ROW, want_last=True, now=T0)
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert error_of(session).peer == PEERS[2]


@pytest.mark.parametrize("stage", [0, 1])
def test_result_from_a_stage_that_is_not_the_last_is_its_fault(stage: int) -> None:
    session = opened()
    session.next_step(ROW, want_last=True, now=T0)
    session.receive(result(0, 1), source=PEERS[stage], now=T0)
    error = error_of(session)
    assert (type(error), error.peer) == (RemoteProtocolError, PEERS[stage])


@pytest.mark.parametrize(
    ("message", "source"),
    [
        (result(0, 1), STRANGER),
        (SessionFailed(KEY, EPOCH, 0, "x", "x", ""), STRANGER),
        (SessionRefused(KEY, EPOCH, 0, "x", "x"), STRANGER),
        (SessionFailed(KEY, EPOCH - 1, 0, "x", "x", ""), PEERS[0]),
        (SessionRefused(KEY, EPOCH - 1, 0, "x", "x"), PEERS[0]),
        (result(0, 1, epoch=EPOCH + 1), PEERS[2]),
        (SessionClosed(KEY, EPOCH), PEERS[0]),
        (StatusRequest(1), PEERS[0]),
    ],
)
def test_what_strangers_and_other_epochs_say_changes_nothing(message: AnyMessage, source: PeerId) -> None:
    session = opened()
    session.next_step(ROW, want_last=True, now=T0)
    session.receive(message, source=source, now=T0)
    session.link_closed(STRANGER, PeerClosed(STRANGER, "gone"))
    assert events(session) == []
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    assert isinstance(events(session)[0], StepDone)


def test_failure_names_the_culprit_only_when_it_is_another_stage() -> None:
    for culprit, kind, blamed in (
        (PEERS[2], PeerClosed, PEERS[2]),
        (PEERS[1], PeerRefused, PEERS[1]),
        (STRANGER, PeerRefused, PEERS[1]),
        ("", PeerRefused, PEERS[1]),
    ):
        session = opened()
        session.receive(SessionFailed(KEY, EPOCH, 1, "peer-lost", "\x1b[2Jgone", culprit), source=PEERS[1], now=T0)
        error = error_of(session)
        assert (type(error), error.peer) == (kind, blamed)
        assert str(error).isprintable()
        assert PEERS[1][-8:] in str(error)  # whoever says so is named, too: it may lie


def test_lost_link_to_a_stage_ends_the_session_with_that_error() -> None:
    session = opened()
    gone = PeerClosed(PEERS[1], "gone")
    session.link_closed(PEERS[1], gone)
    assert error_of(session) is gone


def test_stage_that_does_not_open_is_named_when_the_time_is_up() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    session.receive(SessionOpened(KEY, EPOCH, 0, 120.0), source=PEERS[0], now=T0)
    session.handle_timer(now=MonotonicS(T0 + OPEN_DEADLINE_S - 0.1))
    assert events(session) == []
    session.handle_timer(now=MonotonicS(T0 + OPEN_DEADLINE_S))
    error = error_of(session)
    assert (type(error), error.peer) == (PeerTimeout, PEERS[1])


def test_unanswered_step_ends_the_session_later_the_more_rows_it_has() -> None:
    session = opened()
    session.next_step(TensorMeta("f32", 100, 8), want_last=True, now=T0)
    due = T0 + STEP_DEADLINE_S + 100 * STEP_DEADLINE_PER_ROW_S
    assert session.get_timer() == due
    session.handle_timer(now=MonotonicS(due))
    error = error_of(session)
    assert isinstance(error, PeerTimeout)
    assert all(peer[-8:] in str(error) for peer in PEERS)


def test_closing_twice_tells_every_stage_once() -> None:
    session = opened()
    session.close()
    session.close()
    assert session.messages_to_send() == [(peer, CloseSession(KEY, EPOCH)) for peer in PEERS]
    session.receive(result(0, 1), source=PEERS[2], now=T0)
    session.link_closed(PEERS[0], PeerClosed(PEERS[0], "gone"))
    assert events(session) == []


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
def test_every_sequence_of_events_ends_with_one_error_at_most(actions: list[tuple], cooperative: bool) -> None:  # type: ignore[type-arg]
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
                session.link_closed(who, PeerClosed(who, "gone"))
            case "step" if session.state is SessionState.READY:
                session.next_step(ROW, want_last=True, now=MonotonicS(now))
            case "tick":
                now += what
                session.handle_timer(now=MonotonicS(now))
            case "close":
                session.close()
        told += events(session)
    # Whoever is still waited for is given up at its deadline, one after the other.
    for _ in range(40):
        due = session.get_timer()
        if due is None:
            break
        assert due <= now + STEP_DEADLINE_S + STEP_DEADLINE_PER_ROW_S
        now = max(now, due)
        session.handle_timer(now=MonotonicS(now))
        told += events(session)
    assert session.get_timer() is None
    assert session.get_timer() is None or session.state is not SessionState.READY
    assert [type(event) for event in told].count(Failed) <= 1
    assert not any(isinstance(event, Failed) for event in told[:-1])
    if session.state in (SessionState.FAILED, SessionState.CLOSED):
        closes = [message for _, message in session.messages_to_send() if isinstance(message, CloseSession)]
        assert len(closes) == len(PEERS)
    sequences = [event.sequence for event in told if isinstance(event, StepDone)]
    assert sequences == list(range(len(sequences)))


def test_a_stage_that_cannot_reach_the_next_one_is_not_itself_blamed() -> None:
    session = core()
    session.start(now=T0)
    session.messages_to_send()
    refused = SessionRefused(KEY, EPOCH, 0, SUCCESSOR_UNREACHABLE, "it does not answer")
    session.receive(refused, source=PEERS[0], now=T0)
    error = error_of(session)
    assert isinstance(error, PeerUnreachable)
    assert error.peer == PEERS[1]


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
    assert events(session) == [Opened(32)]
    assert (session.reused_positions, session.num_computed) == (32, 32)
    step = session.next_step(TensorMeta("f32", 3, 8), want_last=True, now=T0)
    assert (step.sequence, step.first_node, step.parent, step.advance, step.want) == (0, 33, 32, 35, (35,))
    assert session.num_computed == 32
    session.receive(result(0, 35), source=PEERS[2], now=T0)
    assert session.num_computed == 35


@pytest.mark.parametrize("offers", [(32, 32, 16), (48, 0, 48), (0, 0, 16), (0, 0, 0)])
def test_stages_that_have_not_the_same_begin_at_nothing(offers: tuple[int, int, int]) -> None:
    session = opened_with(*offers)
    assert events(session) == [Opened(0)]
    step = session.next_step(ROW, want_last=True, now=T0)
    assert (step.first_node, step.parent) == (1, 0)


def test_stage_that_says_twice_what_it_has_is_heard_once() -> None:
    session = core(EARLIER)
    session.start(now=T0)
    for offer in (32, 16):
        session.receive(SessionOpened(KEY, EPOCH, 0, 120.0, offer), source=PEERS[0], now=T0)
    for stage in (1, 2):
        session.receive(SessionOpened(KEY, EPOCH, stage, 120.0, 32), source=PEERS[stage], now=T0)
    session.receive(SessionOpened(KEY, EPOCH, 1, 120.0, 16), source=PEERS[1], now=T0)
    assert events(session) == [Opened(32)]
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
    session.link_closed(PEERS[1], PeerClosed(PEERS[1], "gone"))
    session.close(retain=True)
    error_of(session)
