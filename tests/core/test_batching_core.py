"""Which rows run next: in order, none lost, nobody starved, nobody slowed by somebody else's prefill."""

from __future__ import annotations

import gc
import math
import tracemalloc
import weakref
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusion_node.engine.batching_core import (
    GROW_AFTER,
    LATE_GAPS,
    LATE_SLACK_S,
    MAX_BATCH_SLOWDOWN,
    MAX_BATCH_WAIT_S,
    MAX_DECODE_ROWS,
    MAX_GROUPS,
    MAX_IDLE_USERS,
    MAX_SERVICE_LEAD_S,
    MAX_SKIPPED_BATCH_FORWARDS,
    MAX_SKIPPED_FORWARDS,
    MAX_SLOWDOWN,
    MIN_CHUNK_ROWS,
    MIN_STEADY_STEPS,
    RECENT_S,
    Batch,
    BatchingCore,
    BatchLimits,
    Overload,
    Priority,
    Work,
)
from fusion_node.engine.forward_time_core import ForwardTime
from fusion_node.errors import LocalProtocolError

FIXED_S, ROW_S = 0.020, 0.001
"""A small device: twenty rows cost as much again as none."""

A, B = "layers 0:10", "layers 10:20"


def seconds_of(num_rows: int) -> float:
    return FIXED_S + ROW_S * num_rows


def core(*, max_rows: int = 512, max_waiting_rows: int = 16_384, groups: Iterable[str] = (A, B)) -> BatchingCore:
    """A core that knows its device."""
    batching = BatchingCore(BatchLimits(max_rows, max_waiting_rows))
    for group in groups:
        for num_rows in (1, 16, 256):
            batching.learn(group, num_rows, seconds_of(num_rows))
    return batching


def work(
    session: str,
    num_rows: int = 1,
    *,
    user: str | None = None,
    group: str = A,
    at: float = 0.0,
    priority: Priority = Priority.INTERACTIVE,
    extra: int = 0,
    moves_kv: bool = False,
    deadline: float | None = None,
) -> Work:
    """A step; the user of session ``u1`` is ``u`` unless told."""
    return Work(
        session=session,
        user=session.rstrip("0123456789") if user is None else user,
        num_rows=num_rows,
        group=group,
        priority=priority,
        extra_rows=extra,
        moves_kv=moves_kv,
        arrived=at,
        deadline=deadline,
    )


def add(batching: BatchingCore, *works: Work) -> None:
    for each in works:
        assert batching.add(each, now=each.arrived) is None


def batch_of(batching: BatchingCore, *, now: float = 0.0) -> Batch:
    batch = batching.next_batch(now=now)
    assert batch is not None
    return batch


def rows_of(batch: Batch, session: str) -> int:
    return sum(piece.stop - piece.start for piece in batch.pieces if piece.work.session == session)


def finish(batching: BatchingCore, batch: Batch, *, now: float = 0.0) -> list[Work]:
    return batching.done(batch, seconds=seconds_of(batch.num_rows), now=now)


def decode_once(batching: BatchingCore, session: str, *, now: float = 0.0) -> float:
    """One step of a session, alone; returns when it is done."""
    add(batching, work(session, at=now))
    batch = batch_of(batching, now=now)
    end = now + seconds_of(1)
    finish(batching, batch, now=end)
    return end


def decode_steadily(batching: BatchingCore, session: str, *, gap_s: float, now: float = 0.0) -> float:
    """As many steps as make a session one that is waited for; returns when the last is done."""
    now = decode_once(batching, session, now=now)
    for _ in range(MIN_STEADY_STEPS):
        now = decode_once(batching, session, now=now + gap_s)
    return now


# Order within a session.


def test_small_steps_of_one_session_share_a_forward_in_order() -> None:
    batching = core()
    steps = [work("a1", rows) for rows in (1, 3, 2)]
    add(batching, *steps)
    batch = batch_of(batching)
    assert [(piece.work, piece.start, piece.stop) for piece in batch.pieces] == [(w, 0, w.num_rows) for w in steps]
    assert finish(batching, batch) == steps


def test_step_that_moves_kv_waits_until_nothing_earlier_of_its_session_is_in_flight() -> None:
    batching = core()
    first, moves, after = work("a1"), work("a1", moves_kv=True), work("a1")
    add(batching, first, moves, after)
    one = batch_of(batching)
    assert [piece.work for piece in one.pieces] == [first]
    assert batching.next_batch(now=0.0) is None
    finish(batching, one)
    assert [piece.work for piece in batch_of(batching).pieces] == [moves, after]


def test_long_prefill_is_split_over_forwards_that_may_be_in_flight_together() -> None:
    batching = core(max_rows=100)
    prefill = work("a1", 250)
    add(batching, prefill)
    batches = [batch_of(batching) for _ in range(3)]
    assert [(b.pieces[0].start, b.pieces[0].stop) for b in batches] == [(0, 100), (100, 200), (200, 250)]
    assert batching.next_batch(now=0.0) is None
    assert [finish(batching, batch) for batch in batches] == [[], [], [prefill]]


def test_batches_done_out_of_order_are_our_own_fault() -> None:
    batching = core(max_rows=100)
    add(batching, work("a1", 200))
    first, second = batch_of(batching), batch_of(batching)
    with pytest.raises(LocalProtocolError, match="order"):
        finish(batching, second)
    finish(batching, first)
    with pytest.raises(LocalProtocolError, match="not in flight"):
        finish(batching, first)


@pytest.mark.parametrize(
    "second",
    [
        work("a1", group=B),
        work("a1", user="somebody else"),
        work("a1", priority=Priority.BATCH),
        work("a1", 0),
        work("a1", extra=-1),
    ],
    ids=["layers", "user", "priority", "no rows", "less than its rows"],
)
def test_step_that_cannot_be_of_its_session_is_our_own_fault(second: Work) -> None:
    batching = core()
    add(batching, work("a1"))
    with pytest.raises(LocalProtocolError):
        batching.add(second, now=0.0)
    batching.check_integrity()


def test_work_that_has_not_begun_may_become_smaller_in_its_place() -> None:
    batching = core(max_rows=8)
    first, second, third = work("a1", 8), work("a1", 6, extra=2), work("a1", 5, moves_kv=True)
    add(batching, first, second, third)
    assert batching.not_begun("a1") == [first, second, third]
    batch_of(batching)
    assert batching.not_begun("a1") == [second, third]
    smaller = work("a1", 2)
    batching.replace(second, smaller)
    batching.check_integrity()
    assert batching.num_waiting_rows("a1") == 7
    batch = batch_of(batching)
    assert [(piece.work, piece.stop) for piece in batch.pieces] == [(smaller, 2)]
    assert batching.not_begun("a2") == []


@pytest.mark.parametrize(
    "new",
    [
        work("a1", 5),
        work("a1", 0),
        work("a2", 2),
        work("a1", 2, group=B),
        work("a1", 2, user="b"),
        work("a1", 1, extra=-1),
    ],
)
def test_work_is_replaced_by_a_smaller_one_of_its_session_only(new: Work) -> None:
    batching = core()
    old = work("a1", 4)
    add(batching, old)
    with pytest.raises(LocalProtocolError, match="smaller one of its session"):
        batching.replace(old, new)
    batching.check_integrity()


def test_work_that_has_begun_is_not_replaced() -> None:
    batching = core()
    old = work("a1", 4)
    with pytest.raises(LocalProtocolError, match="not begun"):
        batching.replace(old, work("a1", 2))
    add(batching, old)
    batch_of(batching)
    with pytest.raises(LocalProtocolError, match="not begun"):
        batching.replace(old, work("a1", 2))


def test_price_of_a_row_is_what_it_costs_all_that_wait() -> None:
    batching = core()
    assert batching.row_price_s(A) == pytest.approx(ROW_S)
    add(batching, work("a1"), work("a1"), work("b1", 30))
    assert batching.row_price_s(A) == pytest.approx(3 * ROW_S)
    assert BatchingCore().row_price_s(A) == 0.0


# Decodes first, prefills in what others can wait for.


def test_decodes_of_all_users_go_first_and_a_prefill_fills_up_to_twice_their_time() -> None:
    batching = core()
    add(batching, work("p1", 8_000), *(work(f"{user}1") for user in "abc"))
    batch = batch_of(batching)
    assert [piece.work.session for piece in batch.pieces] == ["a1", "b1", "c1", "p1"]
    assert 1.7 * seconds_of(3) < seconds_of(batch.num_rows) <= MAX_SLOWDOWN * seconds_of(3)


def test_prefill_with_nobody_else_takes_the_whole_forward() -> None:
    batching = core()
    add(batching, work("p1", 8_000))
    assert batch_of(batching).num_rows == 512


def test_prefill_beside_decodes_of_its_own_user_takes_the_whole_forward() -> None:
    batching = core()
    add(batching, work("p1", 8_000), work("p2"))
    batch = batch_of(batching)
    assert batch.num_rows == 512
    assert batch.pieces[0].work.session == "p2"


def test_prefill_while_others_are_between_two_tokens_leaves_the_device_in_time() -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.05)
    add(batching, work("p1", 8_000, at=now + 0.01))
    between = batch_of(batching, now=now + 0.01)
    assert between.num_rows > MIN_CHUNK_ROWS
    assert seconds_of(between.num_rows) <= (MAX_SLOWDOWN - 1) * (0.05 + seconds_of(1))


@pytest.mark.parametrize("gap_s", [0.001, 0.1, 0.9])
def test_prefill_has_the_device_once_a_decoder_is_late(gap_s: float) -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=gap_s) + min(RECENT_S, LATE_GAPS * gap_s + LATE_SLACK_S) + 0.001
    add(batching, work("p1", 8_000, at=now))
    assert batch_of(batching, now=now).num_rows == 512


def test_decoder_that_was_late_is_protected_again_after_steady_steps_only() -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.001)
    now = decode_once(batching, "a1", now=now + 0.5)
    for _ in range(MIN_STEADY_STEPS):
        add(batching, work("p1", 512, at=now))
        batch = batch_of(batching, now=now)
        assert batch.num_rows == 512
        finish(batching, batch, now=now)
        now = decode_once(batching, "a1", now=now + 0.001)
    add(batching, work("p1", 512, at=now))
    assert batching.next_batch(now=now) is None


def test_device_is_held_no_longer_than_the_forward_that_would_run_instead() -> None:
    batching = core()
    decode_steadily(batching, "slow1", gap_s=0.2)
    now = decode_steadily(batching, "fast1", gap_s=0.001, now=0.9)
    add(batching, work("fast1", at=now + 0.001), work("slow1", at=now + 0.001))
    finish(batching, batch_of(batching, now=now + 0.001), now=now + 0.03)
    add(batching, work("p1", 8_000, at=now + 0.03))
    assert batching.next_batch(now=now + 0.03) is None
    held_until = batching.get_timer()
    assert held_until is not None
    assert held_until <= now + 0.03 + seconds_of(MIN_CHUNK_ROWS)
    assert rows_of(batch_of(batching, now=held_until), "p1") >= MIN_CHUNK_ROWS


def test_decode_that_waited_for_a_prefill_is_not_slowed_by_one_again() -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.015)
    add(batching, work("p1", 8_000, at=now + 0.005))
    between = batch_of(batching, now=now + 0.005)
    add(batching, work("a1", at=now + 0.006))
    now += 0.005 + seconds_of(between.num_rows)
    finish(batching, between, now=now)
    together = batch_of(batching, now=now)
    waited = now - 0.006
    assert rows_of(together, "a1") == 1
    assert waited > 0
    assert rows_of(together, "p1") < rows_of(between, "p1")


def test_prefill_is_never_left_out_of_more_than_a_few_forwards() -> None:
    batching = core(max_rows=8)
    add(batching, work("p1", 800), *(work(f"{user}1") for user in "abcdefghijklmnop"))
    got = []
    for _ in range(40):
        batch = batch_of(batching)
        got.append(rows_of(batch, "p1") > 0)
        finish(batching, batch)
        add(batching, *(work(str(piece.work.session)) for piece in batch.pieces if piece.work.session != "p1"))
    assert got == ([False] * MAX_SKIPPED_FORWARDS + [True]) * 10


def test_step_expected_at_once_is_waited_for_so_that_it_does_not_miss_the_forward() -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.001)
    add(batching, work("b1", at=now))
    assert batching.next_batch(now=now) is None
    held_until = batching.get_timer()
    assert held_until is not None
    assert now < held_until <= now + 0.1 * seconds_of(1)
    add(batching, work("a1", at=now + 0.001))
    assert batch_of(batching, now=now + 0.001).num_rows == 2


def test_step_that_was_expected_and_does_not_come_holds_nobody_up() -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.001)
    add(batching, work("b1", at=now))
    assert batching.next_batch(now=now) is None
    held_until = batching.get_timer()
    assert held_until is not None
    assert batching.handle_timer(now=held_until) == []
    assert batch_of(batching, now=held_until).num_rows == 1


def test_steps_that_cost_as_much_as_a_prefill_do_not_pass_for_decodes() -> None:
    batching = core()
    for _ in range(2):
        add(batching, work("p1", 60))
    add(batching, work("a1"))
    batch = batch_of(batching)
    assert batch.pieces[0].work.session == "a1"
    assert seconds_of(batch.num_rows) <= MAX_SLOWDOWN * seconds_of(1)


def test_many_sessions_of_one_user_do_not_pass_for_decodes_together() -> None:
    batching = core()
    add(batching, *(work(f"flood{n}") for n in range(64)), work("a1"))
    batch = batch_of(batching)
    assert rows_of(batch, "a1") == 1
    assert seconds_of(batch.num_rows) <= 4 * seconds_of(1)


def test_wide_steps_of_many_users_leave_a_decode_its_time() -> None:
    batching = core()
    add(batching, *(work(f"x{number}", 15, user=f"x{number}") for number in range(8)), work("a1"))
    seen: list[str] = []
    for _ in range(8):
        batch = batch_of(batching)
        assert rows_of(batch, "a1") == 1
        assert seconds_of(batch.num_rows) <= 2 * seconds_of(1)
        seen += [str(piece.work.session) for piece in batch.pieces if piece.work.session != "a1"]
        finish(batching, batch)
        add(batching, work("a1"))
    # Each in its turn.
    assert sorted(seen) == [f"x{number}" for number in range(8)]


def test_steps_of_like_width_share_a_forward_whatever_their_number() -> None:
    batching = core()
    add(batching, *(work(f"x{number}", 8 + number % 4, user=f"x{number}") for number in range(16)))
    assert len(batch_of(batching).pieces) == 16
    batching = core()
    add(batching, *(work(f"x{number}", user=f"x{number}") for number in range(200)))
    assert batch_of(batching).num_rows == 200


def test_prefill_goes_on_beside_wide_steps_that_have_to_wait() -> None:
    batching = core()
    add(batching, *(work(f"x{number}", 15, user=f"x{number}") for number in range(8)), work("p1", 8_000), work("a1"))
    now, rows = 0.0, []
    for _ in range(20):
        batch = batch_of(batching, now=now)
        rows.append(rows_of(batch, "p1"))
        now += seconds_of(batch.num_rows)
        for ended in finish(batching, batch, now=now):
            add(batching, Work(ended.session, ended.user, ended.num_rows, A, arrived=now))
    assert sum(rows) >= 20 * MIN_CHUNK_ROWS


def test_wide_tree_is_protected_from_a_prefill_as_a_decode_is() -> None:
    batching = core()
    tree = Work("a1", "a", 40, A, is_tree=True)
    add(batching, work("p1", 8_000))
    assert batching.add(tree, now=0.0) is None
    batch = batch_of(batching)
    assert seconds_of(batch.num_rows) <= MAX_SLOWDOWN * seconds_of(40)


def test_unknown_device_starts_with_small_chunks_beside_decodes_and_learns() -> None:
    batching = BatchingCore()
    add(batching, work("p1", 8_000), work("a1"))
    sizes = []
    now = 0.0
    for _ in range(12):
        batch = batch_of(batching, now=now)
        sizes.append(batch.num_rows)
        now += seconds_of(batch.num_rows)
        finish(batching, batch, now=now)
        add(batching, work("a1", at=now))
    assert sizes[0] <= 1 + MIN_CHUNK_ROWS
    assert 1.7 * seconds_of(1) < seconds_of(sizes[-1]) <= MAX_SLOWDOWN * seconds_of(1)


# What steps cost beside their rows.


def test_step_that_costs_much_beside_its_row_does_not_pass_for_a_decode() -> None:
    batching = core()
    add(batching, work("x1", extra=3_000), work("a1"), work("p1", 8_000))
    for _ in range(MAX_SKIPPED_FORWARDS):
        batch = batch_of(batching)
        assert rows_of(batch, "a1") == 1
        assert rows_of(batch, "p1") > MIN_CHUNK_ROWS
        assert seconds_of(batch.num_rows) <= MAX_SLOWDOWN * seconds_of(1)
        finish(batching, batch)
        add(batching, work("a1"))
    assert rows_of(batch_of(batching), "x1") == 1


def test_user_pays_for_what_its_steps_cost_beside_their_rows() -> None:
    batching = core(max_rows=64)
    add(batching, work("x1", extra=300), work("p1", 8_000))
    now, rows = 0.0, 0
    for _ in range(200):
        batch = batch_of(batching, now=now)
        rows += rows_of(batch, "p1")
        extra_s = 300 * ROW_S * (rows_of(batch, "x1") > 0)
        now += seconds_of(batch.num_rows) + extra_s
        for ended in batching.done(batch, seconds=seconds_of(batch.num_rows) + extra_s, now=now):
            add(batching, work("x1", extra=300, at=now) if ended.session == "x1" else work("p1", 8_000, at=now))
    assert rows * (ROW_S + FIXED_S / 64) >= 0.4 * now


def test_forward_that_moved_kv_says_nothing_of_what_a_row_costs() -> None:
    batching = core()
    for _ in range(20):
        add(batching, work("x1", extra=500))
        batching.done(batch_of(batching), seconds=1.0, now=0.0)
    batching.cancel("x1")
    add(batching, work("a1"), work("p1", 8_000))
    assert 1.7 * seconds_of(1) < seconds_of(batch_of(batching).num_rows) <= MAX_SLOWDOWN * seconds_of(1)


def test_what_steps_cost_beside_their_rows_counts_for_the_queue() -> None:
    batching = core(max_waiting_rows=100)
    assert batching.add(work("a1", extra=50), now=0.0) is Overload.USER
    add(batching, work("a1", extra=49))
    assert batching.num_waiting_rows("a1") == batching.status(now=0.0).num_waiting_rows == 50
    assert batching.add(work("b1", 1, extra=64), now=0.0) is Overload.NODE
    assert batching.status(now=0.0).drain_s == pytest.approx(seconds_of(50))
    finish(batching, batch_of(batching))
    assert batching.status(now=0.0).num_waiting_rows == 0


@pytest.mark.parametrize("priority", Priority)
def test_step_that_costs_more_beside_than_a_forward_holds_is_done(priority: Priority) -> None:
    batching = core(max_rows=4)
    large, after = work("a1", 6, extra=1_000, priority=priority), work("a1", extra=3, priority=priority)
    add(batching, large, after)
    batches = [batch_of(batching) for _ in range(3)]
    assert [(piece.start, piece.stop) for batch in batches for piece in batch.pieces] == [(0, 4), (4, 6), (0, 1)]
    assert [finish(batching, batch) for batch in batches] == [[], [large], [after]]


# Groups.


def test_works_of_different_layers_do_not_share_a_forward() -> None:
    batching = core()
    add(batching, work("a1"), work("b1", group=B), work("c1"))
    first, second = batch_of(batching), batch_of(batching)
    assert (first.group, [piece.work.session for piece in first.pieces]) == (A, ["a1", "c1"])
    assert (second.group, [piece.work.session for piece in second.pieces]) == (B, ["b1"])


def test_prefill_of_other_layers_comes_between_decodes() -> None:
    batching = core()
    add(batching, work("p1", 8_000, group=B))
    now = 0.0
    groups = []
    for _ in range(16):
        add(batching, work("a1", at=now))
        batch = batch_of(batching, now=now)
        groups.append(batch.group)
        now += seconds_of(batch.num_rows)
        finish(batching, batch, now=now)
        if batch.group == B:
            assert seconds_of(batch.num_rows) <= MAX_SLOWDOWN * seconds_of(1)
    assert groups.count(B) >= 16 // (MAX_SKIPPED_FORWARDS + 1)
    assert groups.count(A) >= 8


def test_strangers_layer_ranges_do_not_displace_what_a_node_learned_of_its_own() -> None:
    batching = core(groups=[A, B])
    add(batching, *(work(f"x{n}", group=f"range {n}") for n in range(2 * MAX_GROUPS)))
    for number in range(2 * MAX_GROUPS):
        batching.done(batch_of(batching), seconds=1.0, now=float(number))
        batching.learn(B, 1, seconds_of(1))
    prefill, step = Work("p1", "p", 8_000, A), Work("a1", "a", 1, A)
    add(batching, prefill, step, Work("q1", "q", 8_000, B), Work("b1", "b", 1, B))
    for batch in (batch_of(batching), batch_of(batching)):
        assert seconds_of(5) < seconds_of(batch.num_rows) <= MAX_SLOWDOWN * seconds_of(1)


# Fairness.


def shares(batching: BatchingCore, *, num_forwards: int) -> dict[str, float]:
    """Seconds of the device by user over so many forwards."""
    seconds: dict[str, float] = {}
    now = 0.0
    for _ in range(num_forwards):
        batch = batch_of(batching, now=now)
        for piece in batch.pieces:
            part = (piece.stop - piece.start) / batch.num_rows
            seconds[piece.work.user] = seconds.get(piece.work.user, 0.0) + part * seconds_of(batch.num_rows)
        now += seconds_of(batch.num_rows)
        for ended in finish(batching, batch, now=now):
            add(batching, work(str(ended.session), ended.num_rows, at=now, priority=ended.priority))
    return seconds


def test_user_with_many_sessions_gets_no_more_than_one_with_one() -> None:
    batching = core(max_rows=64)
    add(batching, work("a1", 200), *(work(f"flood{n}", 100) for n in range(64)))
    seconds = shares(batching, num_forwards=200)
    assert seconds["a"] == pytest.approx(seconds["flood"], rel=0.05)


def test_what_a_user_does_to_its_own_decodes_others_may_do_too() -> None:
    batching = core(max_rows=256)
    add(batching, work("x1", 8_000), work("x2"))
    batch = batch_of(batching)
    assert rows_of(batch, "x1") == 255
    now = seconds_of(256)
    finish(batching, batch, now=now)
    add(batching, work("x2", at=now), work("p1", 8_000, at=now))
    finish(batching, batch_of(batching, now=now), now=now)
    assert rows_of(batch_of(batching, now=now + 0.001), "p1") >= 200


def test_small_prefill_of_a_user_leaves_its_decodes_protected() -> None:
    batching = core(max_rows=256)
    add(batching, work("x1", 30), work("x2"))
    now = seconds_of(31)
    finish(batching, batch_of(batching), now=now)
    add(batching, work("x2", at=now), work("p1", 8_000, at=now))
    assert 1 + MIN_CHUNK_ROWS < batch_of(batching, now=now).num_rows <= 31


def test_new_user_starts_level_with_those_who_are_there() -> None:
    batching = core(max_rows=64)
    add(batching, work("a1", 200))
    shares(batching, num_forwards=50)
    add(batching, work("b1", 200))
    seconds = shares(batching, num_forwards=20)
    assert seconds["a"] == pytest.approx(seconds["b"], rel=0.15)


def test_user_far_ahead_catches_up_within_the_bound() -> None:
    batching = core(max_rows=64)
    # A hundred seconds of decodes, more than any other got, while b waits all the time.
    add(batching, work("b1", 8_000))
    now = 0.0
    while now < 10 * MAX_SERVICE_LEAD_S:
        add(batching, *(work(f"a{n}", at=now) for n in range(20)))
        batch = batch_of(batching, now=now)
        now += 50 * seconds_of(batch.num_rows)
        batching.done(batch, seconds=50 * seconds_of(batch.num_rows), now=now)
        if not batching.num_waiting_rows("b1"):
            add(batching, work("b1", 8_000, at=now))
    for number in range(20):
        batching.cancel(f"a{number}")
    add(batching, work("a99", 8_000, at=now))
    started = now
    while True:
        batch = batch_of(batching, now=now)
        if rows_of(batch, "a99"):
            break
        now += seconds_of(batch.num_rows)
        finish(batching, batch, now=now)
        if not batching.num_waiting_rows("b1"):
            add(batching, work("b1", 8_000, at=now))
    assert now - started <= MAX_SERVICE_LEAD_S + 50 * seconds_of(64)


def test_more_decodes_than_fit_go_by_service() -> None:
    batching = core(max_rows=8, groups=[A])
    add(batching, *(work(f"{user}1") for user in "abcdefghijklmnop"))
    first = batch_of(batching)
    finish(batching, first)
    add(batching, *(work(str(piece.work.session)) for piece in first.pieces))
    second = batch_of(batching)
    assert {piece.work.session for piece in first.pieces}.isdisjoint(piece.work.session for piece in second.pieces)


def test_memory_of_users_who_left_is_bounded() -> None:
    batching = core()
    for number in range(MAX_IDLE_USERS + 100):
        add(batching, work("x", 600, user=f"u{number}"), work("y", 1, user="other"))
        finish(batching, batch_of(batching))
        batching.cancel("x")
        batching.cancel("y")
        batching.check_integrity()
    assert batching.num_users <= MAX_IDLE_USERS + 1


# Priorities.


def test_batch_work_rides_with_decodes_only_as_far_as_nobody_notices() -> None:
    batching = core()
    add(batching, work("slow1", 8_000, priority=Priority.BATCH), *(work(f"{user}1") for user in "abcdefghij"))
    batch = batch_of(batching)
    assert rows_of(batch, "slow1") > 0
    assert seconds_of(batch.num_rows) <= MAX_BATCH_SLOWDOWN * seconds_of(10)


def test_batch_work_has_the_device_when_nobody_else_is_there() -> None:
    batching = core()
    add(batching, work("slow1", 8_000, priority=Priority.BATCH), work("slow2", 1, priority=Priority.BATCH))
    batch = batch_of(batching)
    assert batch.num_rows == 512
    assert rows_of(batch, "slow2") == 1


def test_batch_prefill_yields_to_interactive_work_between_its_pieces() -> None:
    batching = core()
    add(batching, work("slow1", 8_000, priority=Priority.BATCH))
    finish(batching, batch_of(batching), now=seconds_of(512))
    add(batching, work("a1", 8_000, at=seconds_of(512)))
    assert rows_of(batch_of(batching, now=seconds_of(512)), "a1") == 512


def test_batch_work_gets_one_forward_in_sixteen_at_least() -> None:
    batching = core()
    add(batching, work("slow1", 8_000, priority=Priority.BATCH), work("p1", 8_000))
    now = 0.0
    got = []
    for _ in range(3 * (MAX_SKIPPED_BATCH_FORWARDS + 1)):
        batch = batch_of(batching, now=now)
        got.append(rows_of(batch, "slow1"))
        finish(batching, batch, now=now)
        if not batching.num_waiting_rows("p1"):
            add(batching, work("p1", 8_000))
    assert sum(1 for rows in got if rows) == 3
    assert all(rows >= MIN_CHUNK_ROWS for rows in got if rows)


def test_batch_work_waits_while_somebody_is_between_two_tokens_but_not_for_ever() -> None:
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.01)
    add(batching, work("slow1", 8_000, at=now, priority=Priority.BATCH))
    timers = []
    while batching.next_batch(now=now) is None:
        timer = batching.get_timer()
        assert timer is not None
        assert timer > now
        now = timer
        timers.append(now)
    # As soon as the step is late.
    assert timers == [pytest.approx(seconds_of(1) * 4 + 3 * 0.01 + LATE_GAPS * 0.01 + LATE_SLACK_S)]
    batching = core()
    now = decode_steadily(batching, "a1", gap_s=0.9)
    add(batching, work("slow1", 8_000, at=now - 0.9, priority=Priority.BATCH))
    assert batching.get_timer() == pytest.approx(now - 0.9 + MAX_BATCH_WAIT_S)


# Failures.


def test_out_of_memory_halves_the_forwards_and_the_rows_come_again_first() -> None:
    batching = core(max_rows=64)
    prefill = work("a1", 64)
    add(batching, prefill)
    assert batching.failed(batch_of(batching), out_of_memory=True, now=0.0) == []
    assert batching.max_rows == 32
    again = batch_of(batching)
    assert (again.pieces[0].start, again.pieces[0].stop) == (0, 32)


def test_forwards_grow_again_after_enough_that_succeeded() -> None:
    batching = core(max_rows=64)
    add(batching, work("a1", 6_400))
    batching.failed(batch_of(batching), out_of_memory=True, now=0.0)
    for _ in range(2 * GROW_AFTER):
        assert batching.max_rows == 32
        finish(batching, batch_of(batching))
    assert batching.max_rows == 64


def test_one_row_that_does_not_fit_is_lost_and_others_keep_their_large_forwards() -> None:
    batching = core(max_rows=64)
    row, later = work("a1"), work("a1", 3)
    add(batching, row, later)
    lost: list[Work] = []
    for _ in range(10):
        lost = batching.failed(batch_of(batching), out_of_memory=True, now=0.0)
        if lost:
            break
    assert lost == [row, later]
    assert batching.max_rows == 64
    assert batching.next_batch(now=0.0) is None


def test_step_that_breaks_the_forward_takes_nobody_elses_with_it() -> None:
    batching = core()
    works = [work("a1"), work("bad1"), work("c1"), work("c1")]
    add(batching, *works)
    finished: list[Work] = []
    lost: list[Work] = []
    while (batch := batching.next_batch(now=0.0)) is not None:
        if rows_of(batch, "bad1"):
            lost += batching.failed(batch, out_of_memory=False, now=0.0)
        else:
            finished += finish(batching, batch)
    assert lost == [works[1]]
    assert finished == [works[0], *works[2:]]
    add(batching, work("a1"), work("c1"))
    assert len(batch_of(batching).pieces) == 2


def test_rows_behind_a_failed_forward_count_for_nothing_and_come_again() -> None:
    batching = core(max_rows=100)
    prefill = work("a1", 250)
    add(batching, prefill)
    first, second, third = (batch_of(batching) for _ in range(3))
    finish(batching, first)
    assert batching.failed(second, out_of_memory=True, now=0.0) == []
    assert batching.next_batch(now=0.0) is None
    assert finish(batching, third) == []
    pieces = []
    while (batch := batching.next_batch(now=0.0)) is not None:
        pieces += [(piece.start, piece.stop) for piece in batch.pieces]
        finished = finish(batching, batch)
    assert pieces == [(100, 150), (150, 200), (200, 250)]
    assert finished == [prefill]


# Ends.


def test_cancelled_session_leaves_nothing_and_its_rows_in_flight_count_for_nothing() -> None:
    batching = core(max_rows=100)
    prefill, step = work("a1", 150), work("a1")
    add(batching, prefill, step)
    batch = batch_of(batching)
    assert batching.cancel("a1") == [prefill, step]
    assert batching.cancel("a1") == []
    anew = work("a1", moves_kv=True)
    add(batching, anew)
    second = batch_of(batching)
    assert finish(batching, batch) == []
    assert finish(batching, second) == [anew]
    batching.check_integrity()


def test_work_that_has_not_begun_at_its_deadline_ends_its_session() -> None:
    batching = core()
    in_time, late, after = work("a1", deadline=1.0), work("b1", deadline=2.0), work("b1")
    add(batching, in_time, late, after)
    assert batching.get_timer() == 1.0
    begun = batching.next_batch(now=0.5)
    assert begun is not None
    assert batching.get_timer() is None
    add(batching, work("c1", 8_000, deadline=3.0))
    assert batching.get_timer() == 3.0
    assert batching.handle_timer(now=2.9) == []
    assert [each.session for each in batching.handle_timer(now=3.0)] == ["c1"]
    assert batching.handle_timer(now=9.0) == []
    assert finish(batching, begun, now=9.0) == [in_time, late, after]


def test_late_work_takes_what_follows_it_along() -> None:
    batching = core()
    late, after = work("b1", deadline=2.0), work("b1")
    add(batching, late, after)
    assert batching.handle_timer(now=2.0) == [late, after]
    assert batching.next_batch(now=2.0) is None


class Frame:
    """A payload that can be watched."""


def test_steps_that_are_over_leave_no_frame_behind() -> None:
    batching = core(max_rows=4)
    # A deadline that stays in front of all others, and a forward that stays in flight.
    add(batching, work("old1", group=B, priority=Priority.BATCH, deadline=1.0))
    frames: weakref.WeakSet[Frame] = weakref.WeakSet()

    def framed(session: str) -> None:
        frame = Frame()
        frames.add(frame)
        add(batching, Work(session, session, 4, A, deadline=20.0, payload=frame))

    framed("done")
    finish(batching, batch_of(batching))
    framed("cancelled")
    batching.cancel("cancelled")
    framed("in flight")
    framed("in flight")
    batch = batch_of(batching)
    assert batch.num_rows == 4
    batching.cancel("in flight")
    gc.collect()
    assert list(frames) == [batch.pieces[0].work.payload]


def test_memory_of_deadlines_is_bounded_by_the_steps_that_wait() -> None:
    batching = core()
    add(batching, work("old1", group=B, priority=Priority.BATCH, deadline=1.0))
    tracemalloc.start()
    try:
        for number in range(2_000):
            if number == 1_000:
                before, _ = tracemalloc.get_traced_memory()
            add(batching, work("x1", deadline=20.0))
            batching.cancel("x1")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    add(batching, work("x1", deadline=0.5))
    assert batching.get_timer() == 0.5
    assert [each.session for each in batching.handle_timer(now=1.0)] == ["x1", "old1"]


# Bounds.


def test_node_with_enough_to_do_says_so() -> None:
    batching = core(max_waiting_rows=100)
    add(batching, work("a1", 50), work("b1", 40))
    assert batching.add(work("c1", 200), now=0.0) is Overload.NODE
    add(batching, work("c1", 10))
    assert batching.add(work("c1"), now=0.0) is Overload.NODE
    assert batching.num_waiting_rows("c1") == 10
    batching.check_integrity()


def test_full_queue_ends_nobodys_decode() -> None:
    batching = core()
    add(batching, *(work(f"{user}{number}", 4_096) for user in "xy" for number in range(2)))
    add(batching, work("a1"), work("b1", MAX_DECODE_ROWS))
    assert batching.add(work("c1", MAX_DECODE_ROWS + 1), now=0.0) is Overload.NODE
    assert rows_of(batch_of(batching), "a1") == 1
    add(batching, work("a1"))


def test_small_steps_of_one_user_stay_within_its_share() -> None:
    batching = core(max_waiting_rows=100)
    add(batching, work("x1", 50), work("y1", 50))
    add(batching, *(work(f"a{number}") for number in range(50)))
    assert batching.add(work("a50"), now=0.0) is Overload.USER


def test_one_user_cannot_fill_the_queue() -> None:
    batching = core(max_waiting_rows=100)
    add(batching, work("a1", 50))
    assert batching.add(work("a2", 1), now=0.0) is Overload.USER
    assert batching.add(work("a3", 1, priority=Priority.BATCH), now=0.0) is Overload.USER
    add(batching, work("b1", 50))


def test_status_tells_how_long_a_decode_would_wait() -> None:
    batching = core()
    assert batching.status(now=0.0).decode_wait_s == 0.0
    add(batching, work("a1", 1_024))
    batch = batch_of(batching)
    status = batching.status(now=0.1)
    assert (status.num_waiting_rows, status.num_waiting_sessions, status.num_in_flight_batches) == (512, 1, 1)
    assert status.decode_wait_s == pytest.approx(seconds_of(512) - 0.1)
    assert status.drain_s == pytest.approx(2 * seconds_of(512) - 0.1)
    finish(batching, batch, now=seconds_of(512))
    assert batching.status(now=seconds_of(512)).decode_wait_s == 0.0


# The time of a forward.


def test_forward_time_is_learned_in_spite_of_outliers() -> None:
    time = ForwardTime()
    for number, num_rows in enumerate([1, 4, 16, 64, 1, 4, 16, 64, 1, 4, 16, 64]):
        time.learn(num_rows, seconds_of(num_rows) * (30 if number in (5, 7) else 1))
    assert time.fixed_s == pytest.approx(FIXED_S, rel=0.05)
    assert time.row_s == pytest.approx(ROW_S, rel=0.05)


def test_forward_time_of_one_size_is_put_down_to_the_rows() -> None:
    time = ForwardTime()
    assert not time.is_known
    time.learn(4, 0.04)
    assert (time.fixed_s, time.row_s) == (0.0, pytest.approx(0.01))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_forward_time_takes_nothing_that_no_clock_measures(seconds: float) -> None:
    time = ForwardTime()
    time.learn(4, seconds)
    assert not time.is_known


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-6, 100.0)), min_size=1, max_size=40))
def test_forward_time_never_falls_with_the_rows(samples: list[tuple[int, float]]) -> None:
    time = ForwardTime()
    for num_rows, seconds in samples:
        time.learn(num_rows, seconds)
    assert 0.0 <= time.predict(1) <= time.predict(2) <= time.predict(512) < math.inf


# Any schedule.


class AnySchedule(RuleBasedStateMachine):
    """Any users, any steps, batches in flight that succeed and fail: what must hold of the rows, holds."""

    def __init__(self) -> None:
        super().__init__()
        self.core = BatchingCore(BatchLimits(max_rows=40, max_waiting_rows=600))
        self.now = 0.0
        self.queued: dict[str, list[Work]] = {}
        """Works of each session that are not done, in order."""
        self.progress: dict[Work, int] = {}
        """Rows of a work that were done."""
        self.flights: list[Batch] = []

    def _forget(self, works: list[Work]) -> None:
        for session in {str(each.session) for each in works}:
            assert [w for w in works if w.session == session] == self.queued.pop(session)

    @rule(
        number=st.integers(0, 5),
        num_rows=st.sampled_from([1, 1, 1, 3, 8, 70, 150]),
        extra=st.sampled_from([0, 0, 0, 2, 100]),
        moves_kv=st.booleans(),
        patience=st.sampled_from([None, None, 0.5, 5.0]),
    )
    def arrive(self, number: int, num_rows: int, extra: int, moves_kv: bool, patience: float | None) -> None:
        each = Work(
            session=f"s{number}",
            user=f"u{number // 2}",
            num_rows=num_rows,
            group=number % 2,
            priority=Priority(number == 5),
            extra_rows=extra,
            moves_kv=moves_kv,
            arrived=self.now,
            deadline=None if patience is None else self.now + patience,
        )
        waiting = {key: sum(self.waiting(w) for w in works) for key, works in self.queued.items()}
        of_user = sum(rows for key, rows in waiting.items() if int(key[1:]) // 2 == number // 2)
        refused = self.core.add(each, now=self.now)
        cost = num_rows + extra
        is_small = cost <= MAX_DECODE_ROWS and not waiting.get(f"s{number}")
        if sum(waiting.values()) + cost > 600 and not is_small:
            assert refused is Overload.NODE
        elif of_user + cost > 300:
            assert refused is Overload.USER
        else:
            assert refused is None
            self.queued.setdefault(f"s{number}", []).append(each)
            self.progress[each] = 0

    def waiting(self, each: Work) -> int:
        """Rows neither done nor in flight, as far as they count, with what they cost beside."""
        issued = self.counted.get(each, 0)
        return each.num_rows - issued + (0 if issued else each.extra_rows)

    @property
    def counted(self) -> dict[Work, int]:
        found = dict(self.progress)
        for batch in self.flights:
            for piece in batch.pieces:
                if piece.start == found.get(piece.work):
                    found[piece.work] = piece.stop
        return found

    @rule()
    def issue(self) -> None:
        if len(self.flights) < 3:
            self._issue()

    def _issue(self) -> Batch | None:
        before = self.counted
        batch = self.core.next_batch(now=self.now)
        if batch is None:
            return None
        assert 0 < batch.num_rows <= self.core.max_rows
        assert {piece.work.group for piece in batch.pieces} == {batch.group}
        seen: set[object] = set()
        for piece in batch.pieces:
            session = str(piece.work.session)
            # In order, without gaps: everything earlier of the session is done, in flight, or in this batch.
            assert piece.start == before[piece.work] < piece.stop <= piece.work.num_rows
            earlier = self.queued[session][: self.queued[session].index(piece.work)]
            assert all(before[each] == each.num_rows for each in earlier)
            if piece.work.moves_kv and piece.start == 0:
                in_flight = {p.work for flight in self.flights for p in flight.pieces}
                assert session not in seen
                # Rows of an earlier session of the same name may still be in flight.
                assert in_flight.isdisjoint(self.queued[session])
            before[piece.work] = piece.stop
            seen.add(session)
        self.flights.append(batch)
        return batch

    @rule(slow=st.sampled_from([0.5, 1.0, 3.0]))
    def succeed(self, slow: float) -> None:
        if self.flights:
            self._finish(seconds_of(self.flights[0].num_rows) * slow)

    def _finish(self, seconds: float) -> None:
        batch = self.flights.pop(0)
        self.now += seconds
        expected = []
        for piece in batch.pieces:
            if piece.work in self.queued.get(str(piece.work.session), []) and self.progress[piece.work] == piece.start:
                earlier = self.queued[str(piece.work.session)][0]
                if earlier is piece.work:
                    self.progress[piece.work] = piece.stop
                    if piece.stop == piece.work.num_rows:
                        expected.append(self.queued[str(piece.work.session)].pop(0))
        assert self.core.done(batch, seconds=seconds, now=self.now) == expected
        self.queued = {key: works for key, works in self.queued.items() if works}

    @rule(which=st.integers(0, 2), out_of_memory=st.booleans())
    def fail(self, which: int, out_of_memory: bool) -> None:
        if which < len(self.flights):
            batch = self.flights.pop(which)
            lost = self.core.failed(batch, out_of_memory=out_of_memory, now=self.now)
            if len(batch.pieces) > 1 and out_of_memory:
                assert lost == []
            self._forget(lost)

    @rule(number=st.integers(0, 5))
    def cancel(self, number: int) -> None:
        assert self.core.cancel(f"s{number}") == self.queued.pop(f"s{number}", [])

    @rule(seconds=st.sampled_from([0.001, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._forget(self.core.handle_timer(now=self.now))

    @rule()
    def drain(self) -> None:
        """Without new work everything ends within a number of forwards that can be computed."""
        while self.flights:
            self._finish(seconds_of(self.flights[0].num_rows))
        rows = sum(each.num_rows for works in self.queued.values() for each in works)
        num_forwards = 0
        while self.queued:
            num_timers = 0
            while self.queued and self._issue() is None:
                timer = self.core.get_timer()
                assert timer is not None
                self.now = max(self.now, timer)
                self._forget(self.core.handle_timer(now=self.now))
                # One for each step that was expected and is late, one for each deadline, one for BATCH.
                num_timers += 1
                assert num_timers <= rows + 2 + 6
            if not self.queued:
                break
            num_forwards += 1
            assert num_forwards <= rows
            self._finish(seconds_of(self.flights[0].num_rows))

    @invariant()
    def adds_up(self) -> None:
        self.core.check_integrity()
        for session, works in self.queued.items():
            assert self.core.num_waiting_rows(session) <= sum(each.cost_rows for each in works)


TestAnySchedule = AnySchedule.TestCase
TestAnySchedule.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
