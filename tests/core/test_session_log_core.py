"""The session log against a plain model of a token tree: every row must see exactly its ancestors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.engine.session_log_core import MAX_LIVE_NODES, Duplicate, KVMove, SessionLog, StepFault, StepRows


def chain(log: SessionLog, sequence: int, first: int, rows: int, parent: int, advance: int = 0) -> StepRows:
    step = log.apply(sequence, first_node=first, num_rows=rows, parent=parent, advance=advance)
    assert isinstance(step, StepRows)
    log.check_integrity()
    return step


def test_prefill_then_decode_is_a_chain_without_moves() -> None:
    log = SessionLog(max_positions=16)
    step = chain(log, 0, 1, 5, 0, advance=5)
    assert (step.positions, step.first_slot, step.is_chain, step.move) == ((0, 1, 2, 3, 4), 0, True, None)
    assert log.num_committed == 5
    step = chain(log, 1, 6, 1, 5, advance=6)
    assert (step.positions, step.first_slot, step.num_committed) == ((5,), 5, 5)


def test_apply_twice_changes_nothing() -> None:
    log = SessionLog(max_positions=16)
    chain(log, 0, 1, 3, 0)
    assert log.apply(0, first_node=1, num_rows=3, parent=0) == Duplicate()
    assert log.num_slots == 3


def test_faults_leave_the_log_as_it_was() -> None:
    log = SessionLog(max_positions=4)
    chain(log, 0, 1, 2, 0, advance=1)
    assert log.apply(2, first_node=9, num_rows=1, parent=2) is StepFault.GAP
    assert log.apply(1, first_node=2, num_rows=1, parent=1) is StepFault.STALE_NODE
    assert log.apply(1, first_node=9, num_rows=1, parent=7) is StepFault.UNKNOWN_PARENT
    assert log.apply(1, first_node=9, num_rows=1, parent=2, advance=8) is StepFault.UNKNOWN_ADVANCE
    assert log.apply(1, first_node=9, num_rows=1, parent=2, advance=10) is StepFault.UNKNOWN_ADVANCE
    assert log.apply(1, first_node=9, num_rows=3, parent=2) is StepFault.OVERFLOW
    assert chain(log, 1, 9, 2, 2).positions == (2, 3)


def test_tree_that_is_never_advanced_stays_bounded() -> None:
    log = SessionLog(max_positions=1_000_000)
    chain(log, 0, 1, 4096, 0, advance=4096)  # a prefill that commits all of itself may be as wide as the wire allows
    for sequence in (1, 2):
        chain(log, sequence, 4097 + (sequence - 1) * 512, 512, 4096 + (sequence - 1) * 512)
    assert log.num_slots == 4096 + MAX_LIVE_NODES
    last = 4096 + MAX_LIVE_NODES
    assert log.apply(3, first_node=last + 1, num_rows=1, parent=last) is StepFault.TOO_WIDE
    assert log.apply(3, first_node=last + 1, num_rows=1, parent=last, advance=last) is StepFault.TOO_WIDE
    assert isinstance(log.apply(3, first_node=last + 1, num_rows=1, parent=last, advance=last + 1), StepRows)
    wide = tuple(range(last + 1, last + 1 + MAX_LIVE_NODES + 1))
    first = last + 2
    assert log.apply(4, first_node=first, num_rows=len(wide), parent=0, parents=wide, advance=0) is StepFault.TOO_WIDE


def test_advance_to_one_branch_moves_its_kv_and_frees_the_other() -> None:
    log = SessionLog(max_positions=16)
    chain(log, 0, 1, 2, 0, advance=2)
    step = log.apply(1, first_node=3, num_rows=4, parent=2, parents=(2, 2, 3, 4))
    assert isinstance(step, StepRows)
    assert step.positions == (2, 2, 3, 3)
    assert step.visible == (0b0001, 0b0010, 0b0101, 0b1010)
    step = chain(log, 2, 7, 1, 6, advance=6)
    assert step.move == KVMove(first_slot=2, sources=(3, 5))
    assert (step.first_slot, step.positions, log.num_committed) == (4, (4,), 4)


def test_rows_on_dead_branches_are_not_computed() -> None:
    log = SessionLog(max_positions=16)
    chain(log, 0, 1, 1, 0, advance=1)
    log.apply(1, first_node=2, num_rows=2, parent=1, parents=(1, 1))
    step = log.apply(2, first_node=4, num_rows=3, parent=0, parents=(2, 3, 4), advance=2)
    assert isinstance(step, StepRows)
    assert step.live_rows == (0, 2)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_logs_show_every_row_exactly_its_ancestors(data: st.DataObject) -> None:
    log = SessionLog(max_positions=400)
    parent_of: dict[int, int] = {}
    root, next_node = 0, 1
    slots: dict[int, int] = {}  # slot -> node whose KV stands there

    def ancestors(node: int) -> list[int]:
        path = []
        while node:
            path.append(node)
            node = parent_of[node]
        return path[::-1]

    for sequence in range(data.draw(st.integers(1, 12))):
        alive = [n for n in parent_of if root in (*ancestors(n), 0)] if root else list(parent_of)
        rows = data.draw(st.integers(1, 5))
        parents = []
        for i in range(rows):
            options = [n for n in alive if n != root] + [root] + list(range(next_node, next_node + i))
            parents.append(data.draw(st.sampled_from(options)))
            parent_of[next_node + i] = parents[-1]
        alive += range(next_node, next_node + rows)
        advance = data.draw(st.sampled_from([0, *[n for n in alive if n != root]]))
        step = log.apply(
            sequence, first_node=next_node, num_rows=rows, parent=parents[0], parents=tuple(parents), advance=advance
        )
        assert isinstance(step, StepRows)
        log.check_integrity()
        if advance:
            root = advance
        if step.move is not None:
            moved = {step.move.first_slot + i: slots[s] for i, s in enumerate(step.move.sources)}
            slots = {s: n for s, n in slots.items() if s < step.move.first_slot} | moved
        for i, node in enumerate(step.nodes):
            slots[step.first_slot + i] = node
        slots = {s: n for s, n in slots.items() if s < log.num_slots}
        for i, node in enumerate(step.nodes):
            seen = list(range(step.num_committed))
            if step.is_chain:
                seen = list(range(step.first_slot + i + 1))
            else:
                seen += [step.num_committed + b for b in range(log.num_slots) if step.visible[i] >> b & 1]
            assert [slots[s] for s in seen] == ancestors(node)
            assert step.positions[i] == len(ancestors(node)) - 1
        next_node += rows


def test_step_that_takes_the_slots_of_dead_nodes_says_so() -> None:
    """Computed in one go with the step before, it would overwrite KV that rows of that step still read."""
    log = SessionLog(20)
    tree = log.apply(0, first_node=1, num_rows=3, parent=0, parents=(0, 1, 1))
    assert isinstance(tree, StepRows)
    assert not tree.reuses_slots
    # 1 → 2 is kept, in its place; 3 dies, and its slot is the new node's.
    after = log.apply(1, first_node=4, num_rows=1, parent=2, advance=2)
    assert isinstance(after, StepRows)
    assert after.move is None
    assert after.first_slot == 2
    assert after.reuses_slots
    chain = log.apply(2, first_node=5, num_rows=2, parent=4, advance=4)
    assert isinstance(chain, StepRows)
    assert not chain.reuses_slots


def test_reused_prefix_is_committed_and_the_first_entry_hangs_on_it() -> None:
    log = SessionLog(40, 16)
    assert not log.declines_prefix(16, ())
    step = chain(log, 0, 17, 3, 16, advance=19)
    assert (step.positions, step.first_slot, step.num_committed, step.num_final) == ((16, 17, 18), 16, 16, 19)
    assert (step.is_chain, step.move, step.reuses_slots) == (True, None, False)


def test_tree_on_a_reused_prefix_sees_it() -> None:
    log = SessionLog(40, 16)
    step = log.apply(0, first_node=20, num_rows=3, parent=0, parents=(16, 16, 20))
    assert isinstance(step, StepRows)
    assert (step.positions, step.visible, step.num_committed) == ((16, 16, 17), (0b001, 0b010, 0b101), 16)
    assert step.num_final == 16


def test_first_entry_that_hangs_elsewhere_on_a_reused_prefix_is_a_fault() -> None:
    log = SessionLog(40, 16)
    for first, parent in ((17, 15), (17, 1), (18, 17), (17, 0)):
        assert log.apply(0, first_node=first, num_rows=1, parent=parent) is StepFault.UNKNOWN_PARENT
    assert log.apply(0, first_node=17, num_rows=2, parent=0, parents=(16, 15)) is StepFault.UNKNOWN_PARENT
    for first in (1, 16):
        assert log.apply(0, first_node=first, num_rows=1, parent=0) is StepFault.STALE_NODE
    assert log.apply(0, first_node=17, num_rows=25, parent=16) is StepFault.OVERFLOW
    assert log.num_slots == 16


def test_prefix_is_declined_by_a_first_entry_that_hangs_on_the_empty_one() -> None:
    log = SessionLog(40, 16)
    assert log.declines_prefix(0, ())
    assert log.declines_prefix(7, (0, 1))
    assert not log.declines_prefix(0, (16, 17))
    assert not log.declines_prefix(3, ())
    chain(log, 0, 17, 1, 16)
    assert not log.declines_prefix(0, ())
    assert not SessionLog(40).declines_prefix(0, ())


def test_slots_become_final_when_they_are_committed() -> None:
    log = SessionLog(40)
    assert chain(log, 0, 1, 3, 0).num_final == 0
    assert chain(log, 1, 4, 2, 3, advance=2).num_final == 2
    assert chain(log, 2, 6, 1, 5, advance=6).num_final == 6


# entries that stand for several


def replay(log: SessionLog, sequence: int, first: int, rows: int, covers: int) -> StepRows | Duplicate | StepFault:
    answer = log.apply(
        sequence, first_node=first, num_rows=rows, parent=first - 1, advance=first + rows - 1, covers=covers
    )
    log.check_integrity()
    return answer


def test_entry_that_covers_several_is_as_good_as_those() -> None:
    one, many = SessionLog(40), SessionLog(40)
    for sequence, (first, rows) in enumerate(((1, 5), (6, 1), (7, 2))):
        chain(many, sequence, first, rows, first - 1, advance=first + rows - 1)
    assert isinstance(replay(one, 0, 1, 8, 3), StepRows)
    assert (one.next_sequence, one.num_committed, one.last_node) == (3, 8, 8)
    assert (many.next_sequence, many.num_committed, many.last_node) == (3, 8, 8)
    assert chain(one, 3, 9, 1, 8, advance=9) == chain(many, 3, 9, 1, 8, advance=9)


def test_entry_that_covers_none_is_a_prefix_and_comes_first() -> None:
    log = SessionLog(40)
    assert isinstance(replay(log, 0, 1, 16, 0), StepRows)
    assert replay(log, 0, 1, 16, 0) == Duplicate()
    assert isinstance(replay(log, 0, 17, 4, 0), StepRows)
    assert (log.next_sequence, log.num_committed) == (0, 20)
    assert not log.declines_prefix(0, ())
    assert isinstance(replay(log, 0, 21, 2, 2), StepRows)
    assert replay(log, 2, 23, 1, 0) is StepFault.BAD_REPLAY
    assert replay(log, 0, 23, 1, 0) == Duplicate()


def test_reused_prefix_may_be_continued_by_rows_of_the_rest() -> None:
    log = SessionLog(40, 16)
    assert isinstance(replay(log, 0, 17, 4, 0), StepRows)
    assert not log.declines_prefix(0, ())
    assert isinstance(replay(log, 0, 21, 3, 3), StepRows)
    assert (log.next_sequence, log.num_committed) == (3, 23)


def test_nothing_is_skipped_by_what_an_entry_says_that_it_covers() -> None:
    log = SessionLog(40)
    chain(log, 0, 1, 4, 0, advance=4)
    cases = {
        "more entries than rows": {"covers": 3},
        "more entries than there are numbers": {"covers": 2**32 - 1},
        "a gap of positions": {"first_node": 6, "parent": 4, "advance": 7},
        "on an earlier node": {"parent": 3},
        "not committed": {"advance": 0},
        "half committed": {"advance": 5},
        "a tree": {"parents": (4, 5)},
        "none, after an entry": {"covers": 0},
    }
    for what, changes in cases.items():
        fields = {"first_node": 5, "num_rows": 2, "parent": 4, "advance": 6, "covers": 2} | changes
        fault = log.apply(1, **fields)  # type: ignore[arg-type]
        assert isinstance(fault, StepFault), what
        assert (log.next_sequence, log.num_slots) == (1, 4), what
    assert replay(log, 2, 5, 2, 2) is StepFault.GAP
    assert replay(log, 0, 1, 4, 1) == Duplicate()
    assert replay(log, 0, 1, 6, 2) is StepFault.BAD_REPLAY  # half of it was applied
    assert isinstance(replay(log, 1, 5, 2, 2), StepRows)


def test_log_with_a_tree_or_a_gap_is_not_plain_and_takes_single_entries_only() -> None:
    tree, gap = SessionLog(40), SessionLog(40)
    tree.apply(0, first_node=1, num_rows=2, parent=0, parents=(0, 0))
    chain(gap, 0, 2, 1, 0, advance=2)
    for log, parent in ((tree, 1), (gap, 2)):
        assert not log.is_plain
        first = parent + 2
        answer = log.apply(1, first_node=first, num_rows=2, parent=parent, advance=first + 1, covers=2)
        assert answer is StepFault.BAD_REPLAY
    chain(tree, 1, 3, 1, 1, advance=3)
    assert not tree.is_plain  # node 2 is dead: the nodes of the positions are 1 and 3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_way_to_replay_a_plain_log_gives_the_same_log(data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, 6))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    original, again = SessionLog(200, prefix), SessionLog(200)
    first = prefix + 1
    for sequence, rows in enumerate(sizes):
        chain(original, sequence, first, rows, first - 1, advance=first + rows - 1)
        first += rows
    position, sequence = 0, 0
    while position < prefix:
        rows = data.draw(st.integers(1, prefix - position))
        assert isinstance(replay(again, 0, position + 1, rows, 0), StepRows)
        position += rows
    computed = list(range(prefix))
    while sequence < len(sizes):
        covers = data.draw(st.integers(1, len(sizes) - sequence))
        rows = sum(sizes[sequence : sequence + covers])
        step = replay(again, sequence, position + 1, rows, covers)
        assert isinstance(step, StepRows)
        assert step.is_chain
        computed += step.positions
        if data.draw(st.booleans()):
            assert replay(again, sequence, position + 1, rows, covers) == Duplicate()
        position, sequence = position + rows, sequence + covers
    assert computed == list(range(position))
    assert again.is_plain
    assert (again.next_sequence, again.num_committed) == (original.next_sequence, original.num_committed)


# nodes that are never computed


def step_of(log: SessionLog, first: int, *parents: int, advance: int = 0, live: str = "") -> StepRows:
    """Applies a tree whose bits, the first node's first, say which rows have come."""
    bits = int(live[::-1] or "0", 2).to_bytes(-(-len(live) // 8), "little")
    step = log.apply(
        log.next_sequence,
        first_node=first,
        num_rows=len(parents),
        parent=0,
        parents=parents,
        advance=advance,
        live=bits,
    )
    assert isinstance(step, StepRows), step
    log.check_integrity()
    return step


def test_nodes_whose_rows_have_not_come_are_named_and_take_no_slot() -> None:
    log = SessionLog(40)
    chain(log, 0, 1, 2, 0, advance=2)
    step = step_of(log, 3, 2, 2, 3, 4, 5, live="10101")
    assert (step.nodes, step.live_rows, step.positions, step.first_slot) == ((3, 5, 7), (0, 1, 2), (2, 3, 4), 2)
    assert log.num_slots == 5
    assert log.last_node == 7
    below = step_of(log, 8, 4, 7, live="01")
    assert (below.nodes, below.live_rows) == ((9,), (0,))
    after = step_of(log, 10, 9, advance=5)
    assert after.committed == (3, 5)
    assert not log.state().skipped


def test_nodes_below_a_skipped_one_are_not_dead_before_the_log_says_so() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0, 1, live="101")
    step_of(log, 4, 2, live="0")
    assert set(log.state().skipped) == {2, 4}
    step_of(log, 5, 1, advance=1)
    assert not log.state().skipped
    assert log.apply(3, first_node=6, num_rows=1, parent=4) is StepFault.UNKNOWN_PARENT


def test_step_without_a_row_advances_all_the_same() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0, 2)
    step = step_of(log, 4, 1, 1, advance=3, live="00")
    assert (step.nodes, step.committed, step.move) == ((), (2, 3), KVMove(0, (1, 2)))
    assert step_of(log, 6, 3).first_slot == 2


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"parents": (2,), "live": b"\1"}, StepFault.BAD_LIVE),
        ({"parents": (2,)}, StepFault.BAD_LIVE),
        ({"parents": (1, 4), "live": b"\2"}, StepFault.BAD_LIVE),
        ({"parents": (1,), "advance": 2}, StepFault.SKIPPED_ADVANCE),
        ({"parents": (1,), "advance": 4, "live": b"\0"}, StepFault.SKIPPED_ADVANCE),
        ({"parents": (2,), "advance": 4, "live": b"\0"}, StepFault.SKIPPED_ADVANCE),
    ],
)
def test_sender_that_contradicts_itself_about_rows_is_told(changes: dict[str, object], fault: StepFault) -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0, 1, live="101")
    before = log.state()
    parents = changes["parents"]
    assert isinstance(parents, tuple)
    answer = log.apply(1, first_node=4, num_rows=len(parents), parent=0, **changes)  # type: ignore[arg-type]
    assert answer is fault
    assert log.state() == before
    assert not log.is_untouched


# cancels


def test_what_has_nothing_to_do_with_the_kept_root_is_skipped_from_then_on() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0, 2)
    assert log.cancel(2)
    assert not log.cancel(2)
    step = step_of(log, 4, 1, 0, 3, 2, 4)
    assert (step.nodes, step.live_rows) == ((6, 7), (2, 3))
    assert log.apply(2, first_node=9, num_rows=1, parent=6, advance=4) is StepFault.CANCELLED_ADVANCE
    assert step_of(log, 9, 6, advance=2).nodes == (9,)


def test_root_that_is_not_known_yet_is_remembered_until_it_comes() -> None:
    log = SessionLog(40)
    assert log.cancel(5)
    assert step_of(log, 1, 0, 0).nodes == (1, 2)
    step = step_of(log, 3, 1, 2, 4, 3)
    assert step.nodes == (4, 5)
    assert step_of(log, 7, 1, 4, 5).nodes == (9,)


def test_cancel_of_what_is_committed_or_dead_or_contradicts_another_says_nothing() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0, 1, 2)
    assert log.cancel(3)
    assert not log.cancel(4)
    assert not log.cancel(1)
    step_of(log, 5, 3, advance=1)
    for root in (1, 2, 4):
        assert not log.cancel(root)
    assert step_of(log, 6, 3, 1).nodes == (6,)


def test_steps_that_wait_lose_rows_when_they_are_derived_anew() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0)
    before = log.state()
    first = step_of(log, 3, 1, 2, 3, 4)
    second = step_of(log, 7, 6, 5)
    assert (first.nodes, second.nodes, second.first_slot) == ((3, 4, 5, 6), (7, 8), 6)
    assert log.cancel(5)
    log.restore(before)
    again = [
        log.apply(sequence, first_node=node, num_rows=len(parents), parent=0, parents=parents, only=step.nodes)
        for sequence, node, parents, step in ((1, 3, (1, 2, 3, 4), first), (2, 7, (6, 5), second))
    ]
    assert [step.nodes for step in again if isinstance(step, StepRows)] == [(3, 5), (8,)]
    assert log.num_slots == 5


# folds


def test_fold_commits_what_is_live_along_a_path_and_drops_the_rest() -> None:
    log = SessionLog(40)
    chain(log, 0, 1, 2, 0, advance=2)
    step_of(log, 3, 2, 2, 4, 3, 6)  # 2 - 4 - 5 and 2 - 3 - 6 - 7
    assert log.fits(1, (2, 4, 5, 9))
    assert log.fold(1, (2, 4, 5, 9)) == (4, 5)
    assert log.is_plain
    assert (log.next_sequence, log.num_committed, log.last_node, log.num_in_place) == (4, 4, 4, 2)
    step = chain(log, 4, 5, 2, 4, advance=6)
    assert (step.move, step.first_slot, step.positions, step.reuses_slots) == (KVMove(2, (3, 4)), 4, (4, 5), True)
    assert not chain(log, 5, 7, 1, 6, advance=7).reuses_slots


def test_fold_of_what_lies_in_its_place_moves_nothing_but_takes_slots_again() -> None:
    log = SessionLog(40)
    chain(log, 0, 1, 2, 0, advance=2)
    step_of(log, 3, 2, 3, 4, 3)
    assert log.fold(0, (1, 2, 3, 4)) == (3, 4)
    assert log.num_in_place == 4
    step = chain(log, 4, 5, 1, 4, advance=5)
    assert (step.move, step.first_slot, step.reuses_slots) == (None, 4, True)


def test_path_that_is_of_no_use_commits_nothing() -> None:
    for path_start, path in ((0, ()), (3, (6, 7)), (0, (1, 2)), (0, (1, 2, 9)), (2, (4,))):
        log = SessionLog(40)
        chain(log, 0, 1, 2, 0, advance=2)
        step_of(log, 3, 2, 3)
        assert log.fits(path_start, path)
        assert log.fold(path_start, path) == ()
        assert (log.is_plain, log.num_committed, log.next_sequence) == (True, 2, 2)


def test_path_of_another_prefix_does_not_fit_but_for_a_plain_log() -> None:
    log = SessionLog(40)
    chain(log, 0, 1, 2, 0, advance=2)
    assert log.fits(0, (7, 8))
    step_of(log, 3, 2, 2)
    for path_start, path in ((0, (7, 8)), (1, (3, 4)), (0, (1,))):
        assert not log.fits(path_start, path)


def test_second_fold_keeps_what_the_first_has_to_move() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0)
    assert log.fold(0, (2,)) == (2,)
    assert log.fold(0, (2,)) == ()
    assert chain(log, 1, 2, 1, 1, advance=2).move == KVMove(0, (1,))


def test_fold_forgets_what_was_skipped_and_cancelled() -> None:
    log = SessionLog(40)
    step_of(log, 1, 0, 0, live="10")
    log.cancel(1)
    log.cancel(9)
    log.fold(0, ())
    assert step_of(log, 1, 0, 0, 2).nodes == (1, 2, 3)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_log_comes_to_the_same_state_when_it_is_applied_again(data: st.DataObject) -> None:
    """Also with every entry twice, and when the last ones are derived anew; and slots hold what the log says."""
    log, again = SessionLog(300), SessionLog(300)
    parent_of: dict[int, int] = {}
    root, node = 0, 1
    slots: dict[int, int] = {}

    def descends(n: int) -> bool:
        while n > root:
            n = parent_of[n]
        return n == root

    for _ in range(data.draw(st.integers(1, 14))):
        alive = [n for n in parent_of if n > root and descends(n)]
        if data.draw(st.integers(0, 9)) == 0:
            path, n = [], data.draw(st.sampled_from([root, *alive]))
            while n:
                path.append(n)
                n = parent_of[n]
            before = log.state()
            assert log.fold(0, path[::-1]) == again.fold(0, path[::-1])
            if before.live:
                num = len(path)
                assert log.num_committed == num
                names = dict(enumerate(path[::-1], start=1))
                slots = {slot: n for slot, n in slots.items() if slot < log.num_slots or log.state().deferred}
                parent_of = {n + 1: n for n in range(num)}
                renamed = {old: new for new, old in names.items()}
                slots = {slot: renamed.get(n, 0) for slot, n in slots.items()}
                root, node = num, num + 1
            else:
                num = log.num_committed
                slots = {slot: slot + 1 for slot in range(num)} if not log.state().deferred else slots
                parent_of, root, node = {n + 1: n for n in range(num)}, num, num + 1
            continue
        rows = data.draw(st.integers(1, 5))
        parents = [data.draw(st.sampled_from([root, *alive, *range(node, node + i)])) for i in range(rows)]
        parent_of.update(enumerate(parents, node))
        advance = data.draw(st.sampled_from([0, 0, *alive, *range(node, node + rows)]))
        entry = {"first_node": node, "num_rows": rows, "parent": 0, "parents": tuple(parents), "advance": advance}
        sequence = log.next_sequence
        before = log.state()
        step = log.apply(sequence, **entry)  # type: ignore[arg-type]
        assert isinstance(step, StepRows)
        after = log.state()
        assert log.apply(sequence, **entry) == Duplicate()  # type: ignore[arg-type]
        log.restore(before)
        assert log.apply(sequence, **entry) == step  # type: ignore[arg-type]
        assert log.state() == after
        assert again.apply(sequence, **entry) == step  # type: ignore[arg-type]
        assert again.state() == after
        node += rows
        root = advance or root
        if step.move is not None:
            moved = {step.move.first_slot + i: slots[s] for i, s in enumerate(step.move.sources)}
            slots |= moved
        slots = {slot: n for slot, n in slots.items() if slot < step.first_slot}
        slots |= {step.first_slot + i: n for i, n in enumerate(step.nodes)}
        committed, n = [], root
        while n:
            committed.append(n)
            n = parent_of[n]
        assert [slots[slot] for slot in range(log.num_committed)] == committed[::-1]
        assert [slots[slot] for slot in range(log.num_committed, log.num_slots)] == list(after.live)
