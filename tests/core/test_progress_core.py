"""Who owes an order is found in its patience, and nobody who moves on is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.types import MonotonicS
from scheduler.progress_core import Progress, Questions
from scheduler.repair_core import BACKLOG_MARGIN, MAX_BACKLOG_S, MAX_CLAIMED_WAIT_S, Cause, Order, Verdict

T0 = MonotonicS(1000.0)
PATIENCE_S = 3.0


def at(seconds: float) -> MonotonicS:
    return MonotonicS(T0 + seconds)


def step(sequence: int, num_rows: int = 1, last: int = 2) -> Order:
    """As the user sends it."""
    return Order(None, last, sequence, 1, 10 * sequence, num_rows, True, None)


def progress() -> Progress:
    return Progress(3, lambda num_rows: PATIENCE_S * num_rows)


def tell(watched: Progress, numbers: list[tuple[int, int]], seconds: float, wait_s: float = 0.0) -> None:
    for stage, (come, done) in enumerate(numbers):
        watched.reported(stage, come, done, wait_s, asked_at=at(seconds))


def found(numbers: list[tuple[int, int]], *orders: Order, wait_s: float = 0.0) -> tuple[float, Verdict]:
    """What is found, and after how many seconds, when everybody always says the same."""
    watched = progress()
    watched.under_way(orders, now=T0)
    tell(watched, numbers, 0.5, wait_s)
    watched.under_way(orders, now=at(0.5))
    assert watched.verdict() is None
    due = watched.get_timer()
    assert due is not None
    assert not watched.handle_timer(now=at(0.6))
    assert watched.handle_timer(now=due)
    assert watched.verdict() is None
    tell(watched, numbers, due - T0, wait_s)
    watched.under_way(orders, now=due)
    verdict = watched.verdict()
    assert verdict is not None
    return due - T0, verdict


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ([(5, 4), (4, 4), (4, 4)], Verdict(0, Cause.STUCK)),
        ([(5, 5), (4, 4), (4, 4)], Verdict(1, Cause.PAIR, 0)),
        ([(5, 5), (5, 4), (4, 4)], Verdict(1, Cause.STUCK)),
        ([(5, 5), (5, 5), (4, 4)], Verdict(2, Cause.PAIR, 1)),
        ([(5, 5), (5, 5), (5, 4)], Verdict(2, Cause.STUCK)),
        ([(5, 5), (5, 5), (5, 5)], Verdict(2, Cause.STUCK)),
    ],
)
def test_order_that_stays_where_it_is_is_owed_by_who_has_it(numbers: list[tuple[int, int]], verdict: Verdict) -> None:
    assert found(numbers, step(4)) == (0.5 + PATIENCE_S, verdict)


def test_first_stage_that_says_that_nothing_has_come_owes_it() -> None:
    """Its place is the same before it has said so, so that its time has run since the order was sent."""
    assert found([(4, 4)] * 3, step(4)) == (PATIENCE_S, Verdict(0, Cause.STUCK))


def test_what_a_stage_has_to_wait_for_its_device_is_added() -> None:
    numbers = [(5, 5), (5, 4), (4, 4)]
    assert found(numbers, step(4), wait_s=7.0)[0] == 0.5 + PATIENCE_S + 7.0
    assert found(numbers, step(4), wait_s=1e6)[0] == 0.5 + PATIENCE_S + MAX_CLAIMED_WAIT_S
    assert found([(5, 5), (5, 5), (4, 4)], step(4), wait_s=7.0)[0] == 0.5 + PATIENCE_S


def test_rows_have_the_time_that_their_number_needs() -> None:
    assert found([(5, 4), (4, 4), (4, 4)], step(4, num_rows=20))[0] == 0.5 + 20 * PATIENCE_S


def test_own_rows_on_their_way_are_not_held_against_the_first_stage() -> None:
    watched = Progress(1, lambda num_rows: PATIENCE_S, lambda: 8.0)
    watched.under_way([step(0, last=0)], now=T0)
    assert watched.get_timer() == at(PATIENCE_S + 8.0)


def on_the_line(backlog_s: float) -> float:
    """When the pair between which the rows are is found, if their sender says so whenever it is asked."""
    watched, orders, now = progress(), [step(4)], 0.5
    watched.under_way(orders, now=T0)
    while watched.verdict() is None:
        for stage, (come, done) in enumerate([(5, 5), (4, 4), (4, 4)]):
            watched.reported(stage, come, done, 0.0, asked_at=at(now), backlog_s=0.0 if stage else backlog_s)
        watched.under_way(orders, now=at(now))
        due = watched.get_timer()
        if due is not None:
            now = max(now, due - T0)
            assert watched.handle_timer(now=at(now))
    assert watched.verdict() == Verdict(1, Cause.PAIR, 0)
    return now


def test_rows_that_are_on_a_line_are_held_against_nobody_for_some_time() -> None:
    assert on_the_line(0.0) == 0.5 + PATIENCE_S
    # It says so again and again, and nothing comes: that is of what it has sent since.
    assert on_the_line(0.1) == 0.5 + PATIENCE_S
    assert on_the_line(8.0) == 0.5 + BACKLOG_MARGIN * 8.0
    assert on_the_line(1e6) == pytest.approx(0.5 + PATIENCE_S + MAX_BACKLOG_S)


def test_stage_that_computes_one_chunk_after_the_other_owes_nothing() -> None:
    """Eight chunks, of which each takes a little less than there is patience for: 22 s on the first stage alone."""
    watched = progress()
    now, chunks = 0.0, [step(sequence) for sequence in range(8)]
    for num_done in range(8):
        behind = [max(0, num_done - stages) for stages in range(3)]
        under_way = chunks[behind[2] :]
        for _ in range(4):
            now += 0.7
            tell(watched, [(8, behind[0]), (behind[0], behind[1]), (behind[1], behind[2])], now)
            watched.under_way(under_way, now=at(now))
            watched.handle_timer(now=at(now))
            assert watched.verdict() is None


def test_no_report_that_was_asked_for_before_the_time_was_over_counts() -> None:
    watched = progress()
    watched.under_way([step(4)], now=T0)
    tell(watched, [(5, 5), (5, 4), (4, 4)], 0.5)
    watched.under_way([step(4)], now=at(0.5))
    tell(watched, [(5, 5), (5, 4), (4, 4)], 3.4)
    assert watched.handle_timer(now=at(60.0))  # this program has slept
    assert watched.verdict() is None
    assert watched.get_timer() is None
    # An answer that has waited to be read, to a question from before: it is asked once more.
    tell(watched, [(5, 5), (5, 4), (4, 4)], 3.45)
    assert watched.verdict() is None
    assert watched.get_timer() == at(0.5 + PATIENCE_S)
    assert watched.handle_timer(now=at(60.0))
    tell(watched, [(5, 5), (5, 5), (5, 5)], 60.0)
    watched.under_way([step(4)], now=at(60.0))
    assert watched.verdict() is None


def test_replay_is_owed_along_its_own_way() -> None:
    """Stage 1 is new; stage 0 hands rows on to it, and stage 2 has them already."""
    replay = Order(0, 1, 0, 4, 0, 10, False, 1)
    patience_s = 10 * PATIENCE_S
    assert found([(4, 4), (0, 0), (4, 4)], replay) == (0.5 + patience_s, Verdict(1, Cause.PAIR, 0))
    assert found([(4, 4), (4, 0), (4, 4)], replay) == (0.5 + patience_s, Verdict(1, Cause.STUCK))
    assert found([(4, 4), (4, 4), (4, 4)], replay) == (0.5 + patience_s, Verdict(1, Cause.STUCK))
    # What stage 0 had been given before is still being computed there.
    assert found([(4, 3), (0, 0), (4, 4)], replay) == (0.5 + patience_s, Verdict(0, Cause.STUCK))


def test_rows_of_a_prefix_and_of_orders_that_wait_for_others_are_owed_by_nobody() -> None:
    watched = progress()
    prefix, waits = Order(0, 1, 0, 0, 0, 10, False, 1), Order(1, 2, 7, 1, 70, 1, True, None)
    watched.under_way([prefix, waits], now=T0)
    assert watched.get_timer() is None


@given(
    reports=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 4), st.floats(0, 1e6))),
    pause_s=st.floats(0.1, 2.9),
)
def test_lies_put_a_verdict_off_for_a_bounded_time(reports: list[tuple[int, int, int, float]], pause_s: float) -> None:
    """Whatever the stages say, and then go on to say: four orders are owed by somebody within their patience each."""
    watched = progress()
    orders = [step(sequence) for sequence in range(4)]
    now = 0.0
    watched.under_way(orders, now=T0)
    last = dict.fromkeys(range(3), (0, 0, 0.0))
    waiting = list(reports)
    most_s = (len(orders) * 3 * 2 + 1) * (PATIENCE_S + MAX_CLAIMED_WAIT_S + 3 * pause_s)
    while now <= most_s + pause_s * len(reports):
        now += pause_s
        if waiting:
            stage, come, done, wait_s = waiting.pop(0)
            last[stage] = (max(come, done), done, wait_s)
        for stage, (come, done, wait_s) in last.items():
            watched.reported(stage, come, done, wait_s, asked_at=at(now))
        watched.under_way(orders, now=at(now))
        watched.handle_timer(now=at(now))
        if watched.verdict() is not None:
            return
    raise AssertionError("nobody was found")


def questions() -> Questions:
    return Questions(2, lambda stage: PATIENCE_S)


def test_stage_that_answers_no_question_is_mute_after_its_patience() -> None:
    asked = questions()
    for seconds in (0.5, 2.5):
        for stage in range(2):
            asked.asked(stage, now=at(seconds))
    assert asked.reported(1, now=at(2.6)) == at(0.5)
    assert asked.get_timer() == at(0.5 + PATIENCE_S / 2)
    asked.handle_timer(now=at(2.0))
    assert asked.late() == [0]
    assert asked.mute() == []
    asked.handle_timer(now=at(3.4))
    assert asked.mute() == []
    asked.handle_timer(now=at(3.5))
    assert asked.mute() == [0]
    assert asked.get_timer() is None


def test_stage_that_was_asked_once_is_not_mute() -> None:
    """One question may be on its way for long, behind rows."""
    asked = questions()
    asked.asked(0, now=T0)
    assert asked.get_timer() is None
    asked.handle_timer(now=at(1000.0))
    assert asked.late() == asked.mute() == []


def test_no_pause_of_our_own_makes_a_stage_mute() -> None:
    asked = questions()
    for seconds in (0.5, 2.5):
        asked.asked(0, now=at(seconds))
    for num_pauses in range(3):
        asked.handle_timer(now=at(1000.0 * (num_pauses + 1)))
        assert asked.mute() == []
        asked.reported(0, now=at(1000.0 * (num_pauses + 1) + 0.1))
        asked.asked(0, now=at(1000.0 * (num_pauses + 1) + 0.2))


def test_stage_that_comes_back_has_all_of_its_time_again() -> None:
    asked = questions()
    for seconds in (0.0, 1.0):
        asked.asked(0, now=at(seconds))
    asked.handle_timer(now=at(2.0))
    asked.excused(0, now=at(3.0))
    assert asked.late() == []
    assert asked.get_timer() == at(3.0 + PATIENCE_S / 2)
