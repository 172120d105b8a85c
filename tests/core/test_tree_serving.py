"""Token trees on serving cores: every row is that of its path, whatever is cancelled, folded, lost or repeated."""

from __future__ import annotations

import gc
import random

import pytest

from fusion_node.daemon.serving_core import (
    MAX_NARROW_CREDIT,
    MAX_NARROWED_NODES,
    MAX_NARROWED_STEPS,
    NARROWED_PER_STEP,
)
from fusion_node.engine.session_log_core import LogState, SessionLog
from p2p.messages import (
    Cancel,
    CloseSession,
    OpenSession,
    Replayed,
    Resend,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import Plan
from tests.core.serving_world import KEY, ROW_SIZE, Node, entry, open_, plan_of
from tests.core.test_serving_core import OTHER, USER, failure, feed, only, opened, rows_of, session_of, three
from tests.core.tree_world import TreeWorld, run_tree

RANGES = {
    1: ((0, 7),),
    2: ((0, 3), (3, 7)),
    3: ((0, 3), (3, 5), (5, 7)),
    5: ((0, 1), (1, 3), (3, 4), (4, 6), (6, 7)),
}


def check(seed: int, *, may_cancel: bool) -> TreeWorld:
    ranges = RANGES[(1, 2, 3, 3, 5)[seed % 5]]
    world = run_tree(TreeWorld(random.Random(seed), ranges, may_cancel=may_cancel))
    try:
        world.check()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error
    return world


@pytest.mark.parametrize("part", range(2))
def test_every_row_is_that_of_its_path_whatever_is_cancelled_and_replaced(part: int) -> None:
    worlds = [check(seed, may_cancel=True) for seed in range(25 * part, 25 * part + 25)]
    assert sum(world.num_folded for world in worlds) > 15
    counters = [node.core.counters for world in worlds for node in world.nodes]
    assert sum(each["rows_skipped"] for each in counters) > 50
    assert sum(each["rows_taken_back"] for each in counters) > 0


def test_stages_that_have_applied_the_same_entries_hold_the_same_tree() -> None:
    for seed in range(1000, 1025):
        check(seed, may_cancel=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_row_is_that_of_its_path_in_two_thousand_runs(part: int) -> None:
    for seed in range(2000 + 100 * part, 2100 + 100 * part):
        check(seed, may_cancel=seed % 4 != 0)


# single cases


def tree(plan: Plan, sequence: int, first: int, *parents: int, **changes: object) -> Step:
    """Nodes and all their rows."""
    fields: dict[str, object] = {"parents": parents, "advance": 0, "want": (), "first_node": first}
    return entry(plan, sequence, 0, len(parents), **(fields | changes))


def fold(node: Node, nodes: list[Node], epoch: int, path_start: int, *path: int, path_epoch: int = 0) -> Plan:
    """The session is resumed with a fold, the next stage is there, and nothing has been said yet."""
    plan = plan_of(USER, nodes, epoch)
    stage = nodes.index(node)
    envelope = f"fold {epoch}".encode()
    node.plans[envelope] = plan
    node.receive(
        USER,
        OpenSession(
            KEY,
            epoch,
            stage,
            envelope,
            resumes=True,
            folds=True,
            path_start=path_start,
            path=path,
            path_epoch=path_epoch,
        ),
    )
    if node.connecting:
        node.connected()
    return plan


def told(node: Node) -> SessionOpened:
    message = only(node.told(SessionOpened))
    assert isinstance(message, SessionOpened)
    return message


def sent(node: Node) -> list[tuple[Step, tuple[int, ...]]]:
    """Takes the steps that were handed on."""
    found = [(message, rows) for _, message, rows in node.sent if isinstance(message, Step)]
    node.told(Step)
    return found


def test_rows_of_dead_nodes_stay_at_home_and_their_names_travel() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 2))
    feed(nodes[0], plan, tree(plan, 1, 3, 2, 2, 3))
    feed(nodes[0], plan, tree(plan, 2, 6, 4, 3, 5, 3, advance=3, want=(6, 7, 8)))
    _, (whole, _), (step, rows) = sent(nodes[0])
    assert (whole.num_nodes, whole.live) == (0, b"")
    assert (step.num_nodes, step.live, step.tensor.num_rows, len(rows)) == (4, b"\x0e", 3, 3)
    assert step.parents == (4, 3, 5, 3)
    dead = tree(plan, 3, 10, 7, 7, advance=9)
    feed(nodes[0], plan, dead)
    ((step, rows),) = sent(nodes[0])
    assert (step.num_nodes, step.live, rows) == (2, b"\0", ())


def test_last_stage_computes_and_returns_nothing_for_nodes_whose_rows_did_not_come() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[2], plan, entry(plan, 0, 0, 2, want=()))
    nodes[2].sent.clear()
    half = tree(plan, 1, 3, 2, 2, 4, want=(3, 4, 5), tensor=TensorMeta("f32", 2, ROW_SIZE), num_nodes=3, live=b"\x06")
    feed(nodes[2], plan, half)
    ((_, result, rows),) = nodes[2].sent
    assert isinstance(result, StepResult)
    assert (result.nodes, len(rows)) == ((4, 5), 2)
    nothing = tree(plan, 2, 6, 3, want=(6,), tensor=TensorMeta("f32", 0, ROW_SIZE), num_nodes=1, live=b"\0", advance=5)
    nodes[2].sent.clear()
    feed(nodes[2], plan, nothing)
    ((_, result, rows),) = nodes[2].sent
    assert isinstance(result, StepResult)
    assert (result.nodes, rows, session_of(nodes[2]).log.num_committed) == ((), (), 4)


@pytest.mark.parametrize("stage", [0, 1])
def test_advance_to_a_node_without_a_row_is_the_fault_of_who_sends_it(stage: int) -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[stage], plan, entry(plan, 0, 0, 2))
    feed(nodes[stage], plan, tree(plan, 1, 3, 2, 2, tensor=TensorMeta("f32", 1, ROW_SIZE), num_nodes=2, live=b"\1"))
    feed(nodes[stage], plan, tree(plan, 2, 5, 3, advance=4))
    failed = failure(nodes[stage])
    assert (failed.code, failed.is_kept) == ("skipped-advance", stage == 1)
    assert failed.culprit == (USER if stage == 0 else nodes[0].peer)


# cancels


def test_cancel_takes_rows_from_steps_that_wait_and_from_those_to_come() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 2))
    feed(nodes[0], plan, tree(plan, 1, 3, 2, 2))  # computed
    feed(nodes[0], plan, tree(plan, 2, 5, 3, 4, 6), computes=False)
    nodes[0].receive(USER, Cancel(KEY, 0, 4))
    feed(nodes[0], plan, tree(plan, 3, 8, 5, 6, advance=6), computes=False)
    assert [step.rows.nodes for step in nodes[0].waiting] == [(6, 7), (9,)]
    while nodes[0].waiting:
        nodes[0].compute()
    assert [(step.live, len(rows)) for step, rows in sent(nodes[0])][2:] == [(b"\6", 2), (b"\2", 1)]
    counters = nodes[0].core.counters
    assert (counters["rows_taken_back"], counters["rows_skipped"]) == (1, 2)


def test_cancel_of_a_stranger_or_of_another_epoch_does_nothing() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, tree(plan, 0, 1, 0, 0), computes=False)
    for peer, epoch in ((OTHER, 0), (nodes[1].peer, 0), (USER, 1)):
        nodes[0].receive(peer, Cancel(KEY, epoch, 1))
    nodes[0].receive(USER, Cancel(bytes(16), 0, 1))
    assert nodes[0].core.counters["cancels_late"] == 4
    feed(nodes[0], plan, tree(plan, 1, 3, 2), computes=False)
    assert [step.rows.nodes for step in nodes[0].waiting] == [(1, 2), (3,)]


def test_user_that_commits_what_it_has_cancelled_loses_its_session() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[1], plan, tree(plan, 0, 1, 0, 0))
    nodes[1].receive(USER, Cancel(KEY, 0, 1))
    feed(nodes[1], plan, tree(plan, 1, 3, 2, advance=3))
    failed = failure(nodes[1])
    assert (failed.code, failed.culprit, failed.is_kept) == ("cancelled-advance", USER, False)


def test_cancels_cost_no_more_than_the_steps_that_they_are_about() -> None:
    nodes = three()
    plan = opened(nodes, max_positions=240)
    num_nodes = 40
    for index in range(num_nodes):
        feed(nodes[0], plan, tree(plan, index, index + 1, index), computes=False)
    for root in range(1, num_nodes + 1):
        nodes[0].receive(USER, Cancel(KEY, 0, root))
    session = session_of(nodes[0])
    assert num_nodes < session.num_narrowed <= MAX_NARROWED_STEPS + NARROWED_PER_STEP * num_nodes
    while nodes[0].waiting:
        nodes[0].compute()
    assert session.log.state() == _chain_of(num_nodes).state()


def test_cancels_are_not_paid_for_by_steps_of_long_ago() -> None:
    nodes = three()
    plan = opened(nodes, max_positions=240)
    for index in range(100):
        feed(nodes[0], plan, entry(plan, index, index, 1))
    for index in range(100, 140):
        feed(nodes[0], plan, tree(plan, index, index + 1, index), computes=False)
    for root in range(101, 141):
        nodes[0].receive(USER, Cancel(KEY, 0, root))
    assert 0 < session_of(nodes[0]).num_narrowed <= MAX_NARROW_CREDIT


def test_cancel_of_what_has_not_come_has_nothing_derived_anew() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, tree(plan, 0, 1, 0, 0), computes=False)
    for root in range(3, 40):
        nodes[0].receive(USER, Cancel(KEY, 0, root))
    assert session_of(nodes[0]).num_narrowed == 0
    nodes[0].receive(USER, Cancel(KEY, 0, 2))
    assert session_of(nodes[0]).num_narrowed == 1


def test_what_is_remembered_of_waiting_steps_is_bounded() -> None:
    """A thousand nodes whose rows did not come cost their sender a hundred bytes."""
    nodes = three()
    plan = opened(nodes, max_positions=240)
    gc.collect()
    others = set(map(id, _states()))
    feed(
        nodes[0],
        plan,
        entry(plan, 0, 0, 0, num_nodes=900, live=bytes(113), advance=0, want=()),
        computes=False,
    )
    for index in range(1, 60):
        feed(nodes[0], plan, tree(plan, index, 900 + index, 0), computes=False)
    remembered = [state for state in _states() if id(state) not in others]
    assert 0 < sum(len(state.live) + len(state.skipped) for state in remembered) <= MAX_NARROWED_NODES
    nodes[0].receive(USER, Cancel(KEY, 0, 957))
    assert [len(step.rows.nodes) for step in nodes[0].waiting] == [0, *[1] * 57, 0, 0]


def _states() -> list[LogState]:
    # isinstance would ask objects of other libraries for their class, and some of those warn.
    return [each for each in gc.get_objects() if type(each) is LogState]


def _chain_of(num_nodes: int) -> SessionLog:
    log = SessionLog(240)
    for index in range(num_nodes):
        log.apply(index, first_node=index + 1, num_rows=1, parent=0, parents=(index,))
    log.cancel(num_nodes)
    return log


# folds


def test_folding_stage_says_that_it_has_an_entry_per_position() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    feed(nodes[0], plan, tree(plan, 1, 4, 3, 3, 5, 6), computes=False)
    sent(nodes[0])
    later = fold(nodes[0], nodes, 1, 2, 3, 5, 6, 20)
    opened_now = told(nodes[0])
    assert (opened_now.next_sequence, opened_now.num_positions, opened_now.retained_positions) == (5, 5, 5)
    nodes[0].receive(USER, SessionQuery(KEY, 1, 0))
    progress = only(nodes[0].told(SessionProgress))
    assert isinstance(progress, SessionProgress)
    assert (progress.next_sequence, progress.num_done) == (5, 3)
    # An order for what is still computed waits for it.
    nodes[0].receive(USER, Resend(KEY, 1, 0, 5, 0, 5, False, 2))
    assert not sent(nodes[0])
    nodes[0].compute()
    ((step, rows),) = sent(nodes[0])
    assert (step.sequence, step.covers, step.first_node, step.advance, len(rows)) == (0, 5, 1, 5, 5)
    assert session_of(nodes[0]).num_done == 5
    assert session_of(nodes[0]).num_computed == 3  # 5 and 6 have to be moved by one slot
    feed(nodes[0], later, entry(later, 5, 5, 1))
    assert session_of(nodes[0]).num_computed == 6
    assert nodes[0].outputs.num_positions((USER, KEY)) == 6


def test_session_that_is_closed_before_the_move_keeps_what_is_in_its_place() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[2], plan, entry(plan, 0, 0, 8, want=()))
    feed(nodes[2], plan, tree(plan, 1, 9, 8, 9, 10, 11, 12, 13, 14, 15))
    fold(nodes[2], nodes, 1, 0, *range(1, 17))
    assert session_of(nodes[2]).num_computed == 16  # a chain lies where it is to be
    other = three()
    plan = opened(other)
    feed(other[2], plan, entry(plan, 0, 0, 8, want=()))
    feed(other[2], plan, tree(plan, 1, 9, 8, 8, 10, 11, 12, 13, 14, 15, 16))
    fold(other[2], other, 1, 0, *range(1, 9), *range(10, 18))
    for nodes_, kept in ((nodes, 16), (other, 8)):
        nodes_[2].receive(USER, CloseSession(KEY, 1, retain=True))
        nodes_[2].sent.clear()
        again = plan_of(USER, nodes_, session=bytes(16))
        open_(nodes_[2], again, prefix=KEY, asked=16)
        assert told(nodes_[2]).reused_positions == kept


def test_session_whose_prefix_is_not_on_the_path_is_opened_anew() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    feed(nodes[0], plan, tree(plan, 1, 4, 3, 3))
    before = session_of(nodes[0])
    fold(nodes[0], nodes, 1, 0, 1, 2, 7, 8)
    opened_now = told(nodes[0])
    assert (opened_now.next_sequence, opened_now.num_positions, opened_now.retained_positions) == (0, 0, 0)
    assert not nodes[0].admission.holds(before)


@pytest.mark.parametrize(("path_epoch", "is_adopted"), [(0, False), (1, True), (2, False)])
def test_path_of_another_numbering_is_not_gone_along(path_epoch: int, is_adopted: bool) -> None:
    """The session's ids are those of epoch 1, and would fit."""
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    feed(nodes[0], plan, tree(plan, 1, 4, 3, 3))
    later = fold(nodes[0], nodes, 1, 0, 1, 2, 3, 5)
    feed(nodes[0], later, tree(later, 4, 5, 4, 4))
    nodes[0].sent.clear()
    before = session_of(nodes[0])
    fold(nodes[0], nodes, 3, 0, 1, 2, 3, 4, 6, path_epoch=path_epoch)
    assert told(nodes[0]).num_positions == (5 if is_adopted else 0)
    assert nodes[0].admission.holds(before) == is_adopted


def test_plain_session_folds_whatever_the_path_and_goes_on() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, entry(plan, 0, 0, 3))
    feed(nodes[0], plan, entry(plan, 1, 3, 2))
    fold(nodes[0], nodes, 1, 3, 70, 71)
    assert told(nodes[0]).next_sequence == 5
    later = fold(nodes[0], nodes, 2, 3, 70, 71)
    assert told(nodes[0]).retained_positions == 5
    feed(nodes[0], later, entry(later, 5, 5, 1, stop_stage=0, want=()))
    done = only(nodes[0].told(Replayed))
    assert isinstance(done, Replayed)
    assert (done.next_sequence, done.num_positions) == (6, 6)


def test_new_stage_with_a_reused_prefix_counts_an_entry_per_position() -> None:
    nodes = three()
    earlier = opened(nodes)
    feed(nodes[0], earlier, entry(earlier, 0, 0, 8))
    nodes[0].receive(USER, CloseSession(KEY, 0, retain=True))
    nodes[0].sent.clear()
    key = bytes(range(16, 32))
    plan = plan_of(USER, nodes, 3, session=key)
    nodes[0].plans[b"new"] = plan
    nodes[0].receive(USER, OpenSession(key, 3, 0, b"new", KEY, 8, resumes=True, folds=True))
    nodes[0].connected()
    opened_now = told(nodes[0])
    assert (opened_now.next_sequence, opened_now.reused_positions, opened_now.num_positions) == (8, 8, 8)
    nodes[0].receive(USER, entry(plan, 8, 8, 2, covers=2, stop_stage=0, want=()), rows_of(8, 2))
    nodes[0].compute()
    done = only(nodes[0].told(Replayed))
    assert isinstance(done, Replayed)
    assert (done.next_sequence, done.num_positions) == (10, 10)


def test_steps_of_a_tree_that_was_folded_twice_are_counted_once() -> None:
    nodes = three()
    plan = opened(nodes)
    feed(nodes[0], plan, tree(plan, 0, 1, 0, 0), computes=False)
    feed(nodes[0], plan, tree(plan, 1, 3, 2, 2), computes=False)
    fold(nodes[0], nodes, 1, 0, 2, 4)
    fold(nodes[0], nodes, 2, 0, 2, 4)
    session = session_of(nodes[0])
    assert session.fold is not None
    assert session.fold.num_steps == 2
    nodes[0].compute()
    assert (session.num_done, session.num_unfinished) == (0, 1)
    nodes[0].compute()
    assert (session.num_done, session.num_unfinished, session.fold) == (2, 0, None)
    assert nodes[0].outputs.num_positions((USER, KEY)) == 2
