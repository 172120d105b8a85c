"""The user's side of a session with a token tree: what an answer may lack, and how it goes on after a fault."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from fusion_node.client.sent_tree_core import SentTree
from fusion_node.client.session_core import (
    Fault,
    Fold,
    Opened,
    RowsWanted,
    SessionCore,
    SessionState,
    StepDone,
    TreeRowsWanted,
    TreeStepDone,
)
from fusion_node.client.speculation_core import Frame
from fusion_node.errors import LocalProtocolError, PeerClosed
from fusion_node.types import PeerId
from p2p.messages import Cancel, OpenSession, Resend, SessionOpened, StageTiming, Step, StepResult, TensorMeta
from scheduler.repair_core import Cause
from tests.core.test_session_core import (
    EPOCH,
    KEY,
    PEERS,
    STRANGER,
    T0,
    at,
    events,
    opened,
    plan_of,
    result,
    send,
    sent,
)

NUM_PROMPT = 3


def rows(num_rows: int) -> TensorMeta:
    return TensorMeta("f32", num_rows, 8)


def frame(
    sequence: int, first_node: int, parents: tuple[int, ...], positions: tuple[int, ...], advance: int = 0
) -> Frame:
    nodes = tuple(range(first_node, first_node + len(parents)))
    return Frame(sequence, first_node, tuple(7 * n for n in nodes), parents, positions, advance, nodes)


FIRST = frame(1, 4, (3,), (3,), advance=4)
"""The first token."""
SECOND = frame(2, 5, (4, 4, 5, 6), (4, 4, 5, 5))
"""Two guesses of what follows, and one more below each."""


def speculating() -> SessionCore:
    """The prompt is computed, and its row is there."""
    session = opened()
    send(session, rows(NUM_PROMPT))
    session.receive(result(0, NUM_PROMPT), source=PEERS[2], now=T0)
    assert isinstance(events(session)[-1], StepDone)
    return session


def grow(session: SessionCore, *frames: Frame) -> list[Step]:
    steps = []
    for each in frames:
        session.append_tree(each, now=T0)
        (wanted,) = events(session)
        assert wanted == TreeRowsWanted(KEY, session.plan.epoch, each)
        ready = session.rows_ready(wanted, rows(len(each.tokens)), now=T0)
        assert ready is not None
        assert ready[0] == session.plan.stages[0].peer
        steps.append(ready[1])
    return steps


def answer(sequence: int, *nodes: int, epoch: int = EPOCH, tensor: TensorMeta | None = None) -> StepResult:
    tensor = rows(len(nodes)) if tensor is None else tensor
    return StepResult(KEY, epoch, sequence, nodes, tensor, (StageTiming(1, 2, 3),) * 3)


def test_a_frame_becomes_a_step_with_its_parents() -> None:
    first, second = grow(speculating(), FIRST, SECOND)
    assert (first.first_node, first.parent, first.parents, first.advance, first.want) == (4, 3, (), 4, (4,))
    assert (second.sequence, second.first_node, second.parents, second.advance) == (2, 5, (4, 4, 5, 6), 0)
    assert second.want == (5, 6, 7, 8)


def test_frames_do_not_wait_for_one_another() -> None:
    session = speculating()
    frames = [frame(1 + i, 4 + i, (3 + i,), (3 + i,)) for i in range(40)]
    assert len(grow(session, *frames)) == 40


def test_rows_come_out_with_their_nodes_and_prices() -> None:
    session = speculating()
    grow(session, FIRST, SECOND)
    session.receive(answer(1, 4), source=PEERS[2], now=at(0.1))
    session.receive(answer(2, 5, 6, 7, 8), source=PEERS[2], now=at(0.2))
    first, second = events(session)
    assert isinstance(first, TreeStepDone)
    assert isinstance(second, TreeStepDone)
    assert first.num_computed == 4
    assert second.rows == ((5, 0), (6, 1), (7, 2), (8, 3))
    assert second.timings[0].price_us == 3
    assert second.round_trip_s == pytest.approx(0.2)
    assert (first.num_under_way, second.num_under_way) == (1, 0)


def test_a_row_that_lives_may_not_be_missing() -> None:
    session = speculating()
    grow(session, FIRST, SECOND)
    session.receive(answer(1, 4), source=PEERS[2], now=T0)
    events(session)
    session.receive(answer(2, 5, 6, 7), source=PEERS[2], now=T0)
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause, fault.accuser) == (2, Cause.GARBAGE, 1)


def test_rows_that_a_cancel_has_killed_may_be_missing_and_others_not() -> None:
    def after_cancel(*nodes: int) -> object:
        session = speculating()
        grow(session, FIRST, SECOND)
        session.receive(answer(1, 4), source=PEERS[2], now=T0)
        events(session)
        session.cancel(6)
        sent_messages = session.messages_to_send()
        assert sent_messages == [(peer, Cancel(KEY, EPOCH, 6)) for peer in PEERS]
        session.receive(answer(2, *nodes), source=PEERS[2], now=T0)
        return events(session)[0]

    assert isinstance(after_cancel(6, 8), TreeStepDone)
    assert isinstance(after_cancel(5, 6, 7, 8), TreeStepDone), "the cancel has come too late"
    assert isinstance(after_cancel(5, 6, 8), TreeStepDone)
    assert isinstance(after_cancel(5, 7), Fault)
    assert isinstance(after_cancel(6), Fault)


def test_rows_that_an_entry_has_killed_may_be_missing() -> None:
    session = speculating()
    grow(session, FIRST, SECOND, frame(3, 9, (8,), (6,), advance=6))
    for each in (answer(1, 4), answer(2, 6, 8), answer(3, 9)):
        session.receive(each, source=PEERS[2], now=T0)
    assert all(isinstance(event, TreeStepDone) for event in events(session))
    assert session.num_computed == 5


@pytest.mark.parametrize(
    "wrong",
    [
        answer(2, 6, 5, 7, 8),
        answer(2, 5, 5, 6, 7, 8),
        answer(2, 5, 6, 7, 8, 9),
        answer(2, 5, 6, 7, 8, tensor=rows(3)),
        answer(2, 5, 6, 7, 8, tensor=TensorMeta("f16", 4, 8)),
        answer(3, 5, 6, 7, 8),
    ],
)
def test_everything_else_is_garbage_of_the_last_stage(wrong: StepResult) -> None:
    session = speculating()
    grow(session, FIRST, SECOND)
    session.receive(answer(1, 4), source=PEERS[2], now=T0)
    events(session)
    session.receive(wrong, source=PEERS[2], now=T0)
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (2, Cause.GARBAGE)
    assert session.state is SessionState.BROKEN


def test_a_frame_that_does_not_follow_is_our_error() -> None:
    session = speculating()
    for wrong in (
        dataclasses.replace(FIRST, sequence=2),
        dataclasses.replace(FIRST, first_node=5),
        dataclasses.replace(FIRST, parents=(2,)),
    ):
        with pytest.raises(LocalProtocolError):
            session.append_tree(wrong, now=T0)


def test_a_session_with_a_tree_takes_no_chain() -> None:
    session = speculating()
    grow(session, FIRST)
    with pytest.raises(LocalProtocolError):
        session.append(1, want_last=True, now=T0)


# after a fault


def broken(*answers: StepResult) -> SessionCore:
    """The middle stage is lost while the tree grows."""
    session = speculating()
    grow(session, FIRST, SECOND)
    for each in answers:
        session.receive(each, source=PEERS[2], now=T0)
    session.link_closed(PEERS[1], PeerClosed(PEERS[1], "gone"), now=T0)
    events(session)
    session.messages_to_send()
    return session


def resume(session: SessionCore, fold: Fold, epoch: int = EPOCH + 1, middle: PeerId = STRANGER) -> list[OpenSession]:
    session.replace(
        plan_of([PEERS[0], middle, PEERS[2]], epoch), b"signed", round_trips_s=[0.0] * 3, now=at(1), fold=fold
    )
    return [message for _, message in session.messages_to_send() if isinstance(message, OpenSession)]


def open_again(session: SessionCore, positions: tuple[int, int, int], epoch: int = EPOCH + 1) -> None:
    for stage, (place, num) in enumerate(zip(session.plan.stages, positions, strict=True)):
        has = SessionOpened(KEY, epoch, stage, 120.0, next_sequence=num, num_positions=num, retained_positions=num)
        session.receive(has, source=PeerId(place.peer), now=at(1.1))


def test_stages_fold_along_what_is_committed() -> None:
    session = broken(answer(1, 4))
    assert session.must_fold
    assert session.fold_from == 3
    openings = resume(session, Fold(3, (4, 6), is_awaited=True))
    assert len(openings) == 3
    assert all(each.resumes and each.folds for each in openings)
    assert {(each.path_start, each.path, each.path_epoch) for each in openings} == {(3, (4, 6), EPOCH)}


def test_a_folded_log_has_an_entry_per_position_and_is_brought_up_to_date() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4, 6), is_awaited=True))
    open_again(session, (5, 0, 5))
    assert events(session) == [Opened(0, EPOCH + 1)]
    assert (session.num_positions, session.next_sequence) == (5, 5)
    (order,) = [message for _, message in session.messages_to_send() if isinstance(message, Resend)]
    assert (order.sequence, order.covers, order.first_position, order.num_positions) == (0, 5, 0, 5)
    assert (order.want_last, order.stop_stage) == (False, 1), "the last stage has it, and its answer is under way"


def test_the_row_of_the_last_committed_position_counts_from_before_the_fold() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4, 6), is_awaited=True))
    open_again(session, (5, 0, 5))
    events(session)
    session.receive(answer(2, 5, 6, 7, 8), source=PEERS[2], now=at(1.2))
    (done,) = events(session)
    assert isinstance(done, TreeStepDone)
    assert done.rows == ((5, 1),), "node 6 is the one of position 4 now"
    assert done.num_computed == 5
    session.receive(answer(2, 5, 6, 7, 8), source=PEERS[2], now=at(1.2))
    assert events(session) == []


def test_before_the_fold_is_done_the_row_has_its_old_name() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4, 6), is_awaited=True))
    session.receive(answer(2, 5, 6, 7, 8), source=PEERS[2], now=at(1.05))
    (done,) = events(session)
    assert isinstance(done, TreeStepDone)
    assert done.rows == ((6, 1),)
    open_again(session, (5, 0, 5))
    assert events(session) == [Opened(0, EPOCH + 1)]


def test_a_row_that_is_ordered_anew_does_not_count_from_before() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4, 6), is_awaited=True))
    open_again(session, (5, 0, 4))
    assert isinstance(events(session)[0], Opened)
    session.receive(answer(2, 5, 6, 7, 8), source=PEERS[2], now=at(1.2))
    assert events(session) == []
    orders = [message for _, message in session.messages_to_send() if isinstance(message, Resend)]
    assert [(order.stop_stage, order.want_last) for order in orders] == [(1, False), (None, True)]


def test_a_row_is_known_by_all_its_names_over_several_folds() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4, 6), is_awaited=True))
    open_again(session, (5, 0, 5))
    session.link_closed(STRANGER, PeerClosed(STRANGER, "gone"), now=at(1.2))
    resume(session, Fold(4, (5,), is_awaited=True), EPOCH + 2, PEERS[1])
    open_again(session, (5, 0, 5), EPOCH + 2)
    events(session)
    session.receive(answer(2, 5, 6, 7, 8), source=PEERS[2], now=at(1.3))
    (done,) = events(session)
    assert isinstance(done, TreeStepDone)
    assert done.rows == ((5, 1),)


def test_a_stage_that_has_more_than_was_committed_is_accused() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4,), is_awaited=False))
    open_again(session, (5, 0, 4))
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (0, Cause.GARBAGE)


def test_the_tree_goes_on_behind_what_is_replayed() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4,), is_awaited=False))
    open_again(session, (4, 4, 4))
    assert events(session) == [Opened(0, EPOCH + 1)]
    (step,) = grow(session, frame(4, 5, (4, 4), (4, 4)))
    assert (step.epoch, step.sequence, step.parents) == (EPOCH + 1, 4, (4, 4))
    session.receive(answer(4, 5, 6, epoch=EPOCH + 1), source=PEERS[2], now=at(1.2))
    (done,) = events(session)
    assert isinstance(done, TreeStepDone)
    assert done.rows == ((5, 0), (6, 1))


def test_frames_wait_while_a_stage_behind_them_is_brought_up() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4,), is_awaited=False))
    open_again(session, (4, 0, 4))
    events(session)
    session.append_tree(frame(4, 5, (4,), (4,)), now=at(1.2))
    assert events(session) == []


def test_a_lost_first_stage_is_sent_the_tokens_by_position() -> None:
    session = speculating()
    grow(session, FIRST, SECOND)
    session.receive(answer(1, 4), source=PEERS[2], now=T0)
    session.link_closed(PEERS[0], PeerClosed(PEERS[0], "gone"), now=T0)
    events(session)
    session.replace(
        plan_of([STRANGER, PEERS[1], PEERS[2]], EPOCH + 1),
        b"signed",
        round_trips_s=[0.0] * 3,
        now=at(1),
        fold=Fold(3, (4,), is_awaited=False),
    )
    open_again(session, (0, 4, 4))
    _, wanted = events(session)
    assert isinstance(wanted, RowsWanted)
    assert (wanted.first_position, wanted.num_positions, wanted.covers, wanted.stop_stage) == (0, 4, 4, 0)
    assert wanted.is_replay
    assert sent(session, wanted, rows(4)).advance == 4


def test_frames_of_a_session_that_is_not_open_are_dropped() -> None:
    session = broken(answer(1, 4))
    session.append_tree(frame(3, 9, (8,), (6,)), now=T0)
    session.cancel(6)
    assert events(session) == []
    assert session.messages_to_send() == []


def test_cancels_survive_the_wire() -> None:
    cancel = Cancel(KEY, EPOCH, 6)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cancel), type=Cancel) == cancel


def test_what_is_dead_is_dead_for_good() -> None:
    tree = SentTree(3, 1)
    tree.add(FIRST)
    tree.add(SECOND)
    tree.keep(5)
    with pytest.raises(LocalProtocolError):
        tree.add(frame(3, 9, (6,), (5,)))
    assert tree.is_answer(1, (4,))
    tree.answered()
    assert tree.is_answer(2, (5, 7))
    assert not tree.is_answer(2, (5, 8))


def test_a_result_of_the_new_plan_before_the_fold_is_done_is_a_fault_of_the_last_stage() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4, 6), is_awaited=True))
    session.receive(answer(4, 5, epoch=EPOCH + 1), source=PEERS[2], now=at(1.05))
    (fault,) = events(session)
    assert isinstance(fault, Fault)
    assert (fault.stage, fault.cause) == (2, Cause.GARBAGE)


def test_a_result_of_a_tree_proves_the_plan() -> None:
    session = broken(answer(1, 4))
    resume(session, Fold(3, (4,), is_awaited=False))
    open_again(session, (4, 4, 4))
    events(session)
    assert not session.is_proven
    grow(session, frame(4, 5, (4,), (4,)))
    session.receive(answer(4, 5, epoch=EPOCH + 1), source=PEERS[2], now=at(1.2))
    assert isinstance(events(session)[0], TreeStepDone)
    assert session.is_proven
