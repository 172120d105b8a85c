"""What has to be handed on again, how long is waited, and who is found to be at fault."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.types import MonotonicS, PeerId
from scheduler.repair_core import (
    AVOID_S,
    BACKLOG_MARGIN,
    CHUNK_BYTES,
    CHUNK_ROWS,
    FIRST_TIMEOUT_PER_ROW_S,
    FIRST_TIMEOUT_S,
    MAX_AVOID_S,
    MAX_BACKLOG_S,
    MAX_OPEN_ATTEMPTS,
    MAX_PATCHES,
    MAX_REPAIRS,
    MAX_STUCK_S,
    MAX_TIMEOUT_S,
    MEASURED_STUCK_S,
    MIN_PROBE_S,
    MIN_TIMEOUT_S,
    ORDERS_IN_FLIGHT,
    STUCK_S,
    Attempt,
    Cause,
    LogEntry,
    NotRetained,
    Order,
    Orders,
    Recovered,
    RepairPolicy,
    StageHas,
    StepTimes,
    Verdict,
    Watch,
    replay_orders,
    rows_per_order,
)

T0 = MonotonicS(1000.0)
A, B, C = (PeerId(name) for name in "abc")


def at(seconds: float) -> MonotonicS:
    return MonotonicS(T0 + seconds)


# replays


def log_of(*sizes: int, prefix: int = 0) -> list[LogEntry]:
    """A log of a prompt in chunks, whose last one wants its row, or of single positions that all do."""
    entries, first = [], prefix
    for sequence, size in enumerate(sizes):
        entries.append(LogEntry(sequence, first, size, size == 1 or sequence == len(sizes) - 1))
        first += size
    return entries


def has(entries: list[LogEntry], num_entries: int, *, prefix: int = 0, is_last: bool = False) -> StageHas:
    positions = entries[num_entries - 1].stop if num_entries else prefix
    return StageHas(num_entries, positions, 0 if is_last else positions)


@dataclass
class ToyStage:
    """Applies what comes, in order, or fails the test."""

    has: StageHas
    applied: list[range] = field(default_factory=list)

    def apply(self, order: Order) -> None:
        assert order.first_position == self.has.num_positions, "a gap, or positions a second time"
        if order.covers:
            assert order.sequence == self.has.next_sequence
        self.applied.append(range(order.first_position, order.stop))
        self.has = StageHas(self.has.next_sequence + order.covers, order.stop, order.stop)


class ToySwarm:
    """Stages, the queues between them, and a user, of which one does something at a time, by chance."""

    def __init__(self, stages: list[StageHas], orders: list[Order], rng: random.Random) -> None:
        self.stages = [ToyStage(each) for each in stages]
        self.orders = Orders(orders)
        self.rng = rng
        self.rows: list[deque[Order]] = [deque() for _ in stages]
        """On their way to each stage."""
        self.asked: list[deque[Order]] = [deque() for _ in stages]
        """Resends on their way to each stage."""
        self.told: list[deque[Order]] = [deque() for _ in stages]
        """What each stage has said to the user, and it has not read."""
        self.results: list[int] = []
        self.num_in_flight = 0

    def run(self) -> None:
        self.send()
        while True:
            choices = [(kind, i) for kind in ("rows", "asked", "told") for i, q in enumerate(getattr(self, kind)) if q]
            if not choices:
                return
            kind, index = self.rng.choice(choices)
            getattr(self, f"take_{kind}")(index)

    def send(self) -> None:
        for order in self.orders.next_ready():
            if order.source is None:
                self.rows[0].append(order)
            else:
                self.asked[order.source].append(order)
        by_source: dict[int | None, int] = {}
        for order in self.orders.in_flight:
            by_source[order.source] = by_source.get(order.source, 0) + 1
        assert max(by_source.values(), default=0) <= ORDERS_IN_FLIGHT

    def take_rows(self, index: int) -> None:
        order = self.rows[index].popleft()
        self.stages[index].apply(order)
        if order.stop_stage == index or index == len(self.stages) - 1:
            self.told[index].append(order)
        else:
            self.rows[index + 1].append(order)

    def take_asked(self, index: int) -> None:
        order = self.asked[index].popleft()
        assert order.stop <= self.stages[index].has.retained_positions
        self.rows[index + 1].append(order)

    def take_told(self, index: int) -> None:
        order = self.told[index].popleft()
        if order.stop_stage is None:
            self.results.append(order.sequence)
            self.orders.answered(order.sequence)
        else:
            self.orders.acknowledged(index, order.stop)
        self.send()


@settings(max_examples=400, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_replays_bring_every_stage_up_to_the_log_and_the_user_its_results(data: st.DataObject, seed: int) -> None:
    """Any stages fresh, behind, or with a part of a prefix."""
    num_stages = data.draw(st.integers(1, 5))
    prefix = data.draw(st.sampled_from([0, 0, 16, 304, 600]))
    entries = log_of(*data.draw(st.lists(st.sampled_from([1, 1, 1, 5, 32, 256]), max_size=12)), prefix=prefix)
    num_results = data.draw(st.integers(0, len(entries)))
    stages = []
    for _ in range(num_stages):
        num_entries = data.draw(st.integers(0, len(entries)))
        part = data.draw(st.sampled_from([0, prefix // 3, prefix])) if num_entries == 0 else prefix
        stages.append(StageHas(0, part, part) if num_entries == 0 else has(entries, num_entries, prefix=prefix))
    before = list(stages)
    chunk_rows = data.draw(st.sampled_from([1, 40, 256]))
    orders = replay_orders(entries, stages, num_results=num_results, prefix_positions=prefix, chunk_rows=chunk_rows)
    if isinstance(orders, NotRetained):
        # Only when a stage before another has less than that other lacks, which has it from nobody then.
        assert any(has.num_positions > orders.position for has in stages) or stages[orders.stage].retained_positions
        return
    toy = ToySwarm(stages, orders, random.Random(seed))
    toy.run()
    assert toy.orders.is_over
    total = entries[-1].stop if entries else prefix
    for old, stage in zip(before, toy.stages, strict=True):
        assert stage.has.next_sequence == len(entries)
        assert sum(map(len, stage.applied)) == total - old.num_positions  # nothing twice
    # Results that the last stage has made before are on their way, or here.
    already = before[-1].next_sequence
    assert toy.results == [e.sequence for e in entries if e.sequence >= max(num_results, already)]
    assert all(order.num_positions <= max(chunk_rows, 256) for order in orders)


def test_one_fresh_stage_gets_the_history_from_the_one_before_and_only_the_missing_row_goes_to_the_user() -> None:
    entries = log_of(10, 1, 1, 1)
    stages = [has(entries, 4), StageHas(), has(entries, 3, is_last=True)]
    assert replay_orders(entries, stages, num_results=3) == [
        Order(0, 1, 0, 3, 0, 12, False, 1),
        Order(0, 2, 3, 1, 12, 1, True, None),
    ]


def test_fresh_last_stage_computes_what_the_user_has_without_an_answer() -> None:
    entries = log_of(10, 1, 1)
    stages = [has(entries, 3), StageHas()]
    assert replay_orders(entries, stages, num_results=3) == [Order(0, 1, 0, 3, 0, 12, False, 1)]


def test_fresh_first_stage_gets_rows_from_the_user_and_keeps_the_others_out_of_it() -> None:
    entries = log_of(256, 100, 1)
    stages = [StageHas(), has(entries, 3)]
    assert replay_orders(entries, stages, num_results=3) == [
        Order(None, 0, 0, 1, 0, 256, False, 0),
        Order(None, 0, 1, 2, 256, 101, False, 0),
    ]


def test_two_fresh_stages_apart_have_orders_of_their_own() -> None:
    entries = log_of(4)
    stages = [StageHas(), has(entries, 1), StageHas(), has(entries, 1)]
    assert replay_orders(entries, stages, num_results=1) == [
        Order(None, 0, 0, 1, 0, 4, False, 0),
        Order(1, 2, 0, 1, 0, 4, False, 2),
    ]


def test_prefix_that_belongs_to_no_entry_is_handed_on_as_such() -> None:
    entries = log_of(3, prefix=300)
    stages = [has(entries, 1, prefix=300), StageHas()]
    assert replay_orders(entries, stages, num_results=0, prefix_positions=300) == [
        Order(0, 1, 0, 0, 0, 256, False, 1),
        Order(0, 1, 0, 0, 256, 44, False, 1),
        Order(0, 1, 0, 1, 300, 3, True, None),
    ]


def test_source_that_has_dropped_its_rows_is_named() -> None:
    entries = log_of(10, 1)
    stages = [StageHas(2, 11, retained_positions=0), StageHas()]
    assert replay_orders(entries, stages, num_results=2) == NotRetained(0, 0)


def test_order_that_needs_what_another_source_brings_waits_for_it() -> None:
    """Stage 1 lacks two entries; the first is retained by stage 0, the second has to come from the user."""
    entries = log_of(1, 1)
    orders = replay_orders(entries, [has(entries, 1), StageHas(0, 0)], num_results=0)
    assert not isinstance(orders, NotRetained)
    sending = Orders(orders)
    assert sending.next_ready() == [Order(0, 1, 0, 1, 0, 1, True, None)]
    assert sending.next_ready() == []
    sending.answered(0)
    assert sending.next_ready() == [Order(None, 1, 1, 1, 1, 1, True, None)]
    assert not sending.is_over
    sending.answered(1)
    assert sending.is_over


def test_no_more_orders_of_one_source_are_on_their_way_than_allowed() -> None:
    entries = log_of(*[256] * 9)
    stages = [has(entries, 9), StageHas()]
    orders = replay_orders(entries, stages, num_results=9)
    assert not isinstance(orders, NotRetained)
    sending = Orders(orders)
    assert len(sending.next_ready()) == ORDERS_IN_FLIGHT
    assert sending.acknowledged(1, 512)
    assert not sending.acknowledged(1, 512)
    assert not sending.acknowledged(0, 1000)
    assert [order.first_position for order in sending.next_ready()] == [1024, 1280]


# how long


def test_timeout_follows_what_steps_take_and_never_falls_below_its_floor() -> None:
    times = StepTimes()
    assert times.timeout_s(1) == FIRST_TIMEOUT_S
    assert times.timeout_s(256) > 5 * FIRST_TIMEOUT_S
    for _ in range(50):
        times.note(1, 0.01)
    assert times.timeout_s(1) == MIN_TIMEOUT_S
    for _ in range(50):
        times.note(1, 0.4)
    assert 0.4 < times.timeout_s(1) < 2.0
    times.note(1, 100.0)
    assert times.timeout_s(1) == MAX_TIMEOUT_S


def test_slow_route_has_more_time_from_the_beginning_when_the_cost_model_says_so() -> None:
    assert StepTimes(expected_s=1.0).timeout_s(1) == 4.0


def test_patience_is_of_what_was_measured_and_longer_for_stages_that_were_not() -> None:
    times = StepTimes()
    assert times.patience_s(1, is_proven=True) == STUCK_S
    for _ in range(50):
        times.note(1, 0.1)
    assert times.patience_s(1, is_proven=True) == MEASURED_STUCK_S
    assert times.patience_s(1, is_proven=False) == STUCK_S
    for _ in range(50):
        times.note(1, 2.0)
    assert 4 * 2.0 < times.patience_s(1, is_proven=True) < 4 * 4.0
    assert times.patience_s(256, is_proven=True) > 4 * 256 * FIRST_TIMEOUT_PER_ROW_S
    for _ in range(50):
        times.note(256, 256 * 0.001)
    assert times.patience_s(256, is_proven=True) == MEASURED_STUCK_S
    assert times.patience_s(256, is_proven=False) > 4 * 256 * FIRST_TIMEOUT_PER_ROW_S


def test_patience_for_a_prompt_on_slow_nodes_is_what_the_cost_model_says() -> None:
    times = StepTimes(expected_row_s=0.15)
    assert times.patience_s(256, is_proven=False) > 4 * 256 * 0.15
    assert times.timeout_s(256) == MAX_TIMEOUT_S
    assert StepTimes(expected_row_s=10.0).patience_s(256, is_proven=False) == MAX_STUCK_S


def test_patience_does_not_follow_a_stage_that_takes_almost_all_of_it() -> None:
    times = StepTimes(0.1)
    for _ in range(8):
        times.note(1, 0.1)
    for _ in range(50):
        times.note(1, 0.95 * times.patience_s(1, is_proven=True))
    assert times.patience_s(1, is_proven=True) == STUCK_S


def test_patience_after_a_pause_of_our_own_is_as_for_stages_of_which_nothing_is_known() -> None:
    times = StepTimes(0.1)
    for _ in range(8):
        times.note(1, 0.1)
    times.note(1, 60.0)
    assert times.patience_s(1, is_proven=True) == STUCK_S
    # A route that has been slow from the beginning has the time that it needs.
    slow = StepTimes(0.1)
    for _ in range(8):
        slow.note(1, 5.0)
    assert slow.patience_s(1, is_proven=True) >= 4 * 5.0
    slow.note(1, 60.0)
    assert slow.patience_s(1, is_proven=True) == 16 * 5.0


def test_patience_that_was_not_enough_is_doubled_until_a_step_comes_back() -> None:
    times = StepTimes()
    times.gave_up()
    times.gave_up()
    assert times.patience_s(1, is_proven=False) == 4 * STUCK_S
    times.note(1, 0.1)
    assert times.patience_s(1, is_proven=False) == STUCK_S
    for _ in range(5):
        times.gave_up()
    assert times.patience_s(1, is_proven=False) == 4 * STUCK_S
    times.came_back()  # over stages that were replaced meanwhile, so that its time says nothing
    assert times.patience_s(1, is_proven=False) == STUCK_S


# who


def judged(watch: Watch, now: MonotonicS) -> list[Verdict | Recovered]:
    watch.handle_timer(now=now)
    return watch.found()


def test_stage_that_does_not_answer_is_silent_and_the_others_are_not() -> None:
    watch = Watch([0.01, 0.01, 0.01])
    watch.expect(0.5, now=T0)
    assert watch.get_timer() == at(0.5)
    assert judged(watch, at(0.5)) == []
    assert watch.to_ask() == [0, 1, 2]
    watch.progressed(0, 5, 5, 0.0, now=at(0.52))
    watch.heard(2, now=at(0.52))
    assert watch.get_timer() == at(0.5 + MIN_PROBE_S)
    assert judged(watch, at(0.5 + MIN_PROBE_S)) == [Verdict(1, Cause.SILENT)]
    watch.heard(1, now=at(3.0))
    assert watch.found() == [Recovered(1)]


def test_far_stage_has_more_time() -> None:
    watch = Watch([0.4])
    watch.expect(0.5, now=T0)
    watch.handle_timer(now=at(0.5))
    due = watch.get_timer()
    assert due is not None
    assert due >= at(0.5 + 1.6)


def test_stage_is_not_silent_while_our_question_waits_behind_our_own_rows() -> None:
    """As on a home line: a prompt of 600 rows of 16 KiB takes 8 s to send, and what follows on that link comes after.

    The simulator found three healthy stages replaced in a row for it.
    """
    watch = Watch([0.05, 0.05], lambda stage: 8.0 if stage == 0 else 0.0)
    watch.expect(0.5, now=T0)
    watch.handle_timer(now=at(0.5))
    assert sorted(watch.to_ask()) == [0, 1]
    watch.progressed(1, 0, 0, 0.0, now=at(0.6))
    assert watch.get_timer() == at(0.5 + 8.0 + MIN_PROBE_S)
    assert judged(watch, at(0.5 + 8.0 + MIN_PROBE_S)) == [Verdict(0, Cause.SILENT)]


def test_own_absence_is_held_against_nobody() -> None:
    watch = Watch([0.01])
    watch.expect(0.5, now=T0)
    watch.handle_timer(now=at(0.5))
    assert watch.to_ask() == [0]
    assert judged(watch, at(10.0)) == []  # we were asleep, and so was what we would have read
    watch.progressed(0, 1, 1, 0.0, now=at(10.1))
    assert judged(watch, at(10.5)) == []
    # A second silence that is not ours counts.
    watch.expect(0.5, now=at(11.0))
    watch.handle_timer(now=at(11.5))
    assert judged(watch, at(12.0)) == [Verdict(0, Cause.SILENT)]


@pytest.mark.parametrize("late_s", [0.15, 2.0])
def test_program_that_is_always_late_finds_who_is_dead_and_nobody_else(late_s: float) -> None:
    watch = Watch([0.01, 0.01])
    watch.expect(1.0, now=T0)
    while (due := watch.get_timer()) is not None and due < at(60.0):
        now = MonotonicS(due + late_s)
        watch.handle_timer(now=now)
        if found := watch.found():
            assert found == [Verdict(1, Cause.SILENT)]
            return
        if 0 in watch.to_ask():
            watch.progressed(0, 1, 1, 0.0, now=now)
    raise AssertionError("nobody was found")


def test_expectation_that_was_met_asks_nobody() -> None:
    watch = Watch([0.01])
    watch.expect(0.5, now=T0)
    watch.expect_nothing()
    assert watch.get_timer() is None
    assert judged(watch, at(100.0)) == []


def test_accusation_is_a_reason_to_ask_both_and_their_link_is_blamed_when_both_answer() -> None:
    watch = Watch([0.01, 0.01, 0.01])
    watch.accuse(0, 1, now=T0)
    assert watch.to_ask() == [0, 1]
    watch.heard(0, now=at(0.01))
    assert watch.found() == []
    watch.heard(1, now=at(0.01))
    assert watch.found() == [Verdict(1, Cause.PAIR, accuser=0)]


@pytest.mark.parametrize(("answers", "silent"), [(0, 1), (1, 0)])
def test_of_two_that_accuse_the_one_that_is_silent_is_at_fault(answers: int, silent: int) -> None:
    watch = Watch([0.01, 0.01])
    watch.accuse(0, 1, now=T0)
    watch.heard(answers, now=at(0.01))
    assert judged(watch, at(MIN_PROBE_S)) == [Verdict(silent, Cause.SILENT)]


def test_accusation_of_whom_is_known_to_be_gone_adds_nothing() -> None:
    watch = Watch([0.01, 0.01])
    watch.accuse(0, 1, now=T0)
    watch.gone(1)
    watch.accuse(1, 0, now=T0)
    watch.heard(0, now=at(0.01))
    assert judged(watch, at(5.0)) == []


def rounds(
    watch: Watch, progress: Callable[[int], tuple[int, int, float]], *, backlog_s: float = 0.0
) -> tuple[float, list[Verdict | Recovered]]:
    """Every stage answers at once how far it is, until somebody is found, after so many seconds.

    Args:
        backlog_s: that the first one says.
    """
    while (due := watch.get_timer()) is not None and due < at(60.0):
        watch.handle_timer(now=due)
        for stage in watch.to_ask():
            watch.progressed(stage, *progress(stage), now=due, backlog_s=0.0 if stage else backlog_s)
        if found := watch.found():
            return due - T0, found
    raise AssertionError("nobody was found")


def test_stage_that_answers_and_never_computes_is_stuck() -> None:
    watch = Watch([0.01] * 3)
    watch.expect(0.5, now=T0)
    assert rounds(watch, [(5, 5, 0.0), (5, 4, 0.0), (4, 4, 0.0)].__getitem__)[1] == [Verdict(1, Cause.STUCK)]


def test_entry_that_is_lost_between_two_stages_is_their_links_fault() -> None:
    watch = Watch([0.01] * 3)
    watch.expect(0.5, now=T0)
    assert rounds(watch, [(5, 5, 0.0), (5, 5, 0.0), (4, 4, 0.0)].__getitem__)[1] == [Verdict(2, Cause.PAIR, 1)]


def test_result_that_never_comes_is_the_last_stages_fault() -> None:
    watch = Watch([0.01] * 2)
    watch.expect(0.5, now=T0)
    assert rounds(watch, [(5, 5, 0.0), (5, 5, 0.0)].__getitem__)[1] == [Verdict(1, Cause.STUCK)]


def test_numbers_that_go_up_and_down_are_no_progress() -> None:
    watch = Watch([0.01] * 2)
    watch.expect(0.5, now=T0)
    flips = itertools.cycle((4, 5))
    assert rounds(watch, lambda stage: (5, next(flips) if stage else 5, 0.0))[1] == [Verdict(1, Cause.STUCK)]


def test_what_a_result_has_shown_is_no_progress_when_a_stage_tells_it_bit_by_bit() -> None:
    watch = Watch([0.01] * 2)
    watch.expect(0.5, now=T0)
    watch.all_applied(1000)
    told = itertools.count(1)
    assert rounds(watch, lambda stage: ((num := next(told)), num, 0.0))[1]


def test_stage_that_says_how_long_steps_wait_is_believed_so_long() -> None:
    watch = Watch([0.01])
    watch.expect(0.5, now=T0)
    seconds, found = rounds(watch, [(5, 4, 15.0)].__getitem__)
    assert found == [Verdict(0, Cause.STUCK)]
    assert STUCK_S + 15.0 <= seconds <= STUCK_S + 15.0 + MAX_TIMEOUT_S + 0.5


@pytest.mark.parametrize("backlog_s", [1.0, 12.0, 1e6])
def test_pair_whose_first_says_that_rows_are_on_the_line_is_believed_for_a_while(backlog_s: float) -> None:
    """However often it says so."""
    watch = Watch([0.01] * 2)
    watch.expect(0.5, now=T0)
    seconds, found = rounds(watch, [(5, 5, 0.0), (4, 4, 0.0)].__getitem__, backlog_s=backlog_s)
    assert found == [Verdict(1, Cause.PAIR, 0)]
    assert STUCK_S + min(BACKLOG_MARGIN * backlog_s, MAX_BACKLOG_S) / 2 <= seconds
    assert seconds <= STUCK_S + MAX_BACKLOG_S + MAX_TIMEOUT_S + 0.5


@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("expect"), st.floats(0.5, 8.0)),
            st.tuples(st.just("rest"), st.none()),
            st.tuples(st.just("accuse"), st.tuples(st.integers(0, 2), st.integers(0, 2))),
            st.tuples(st.just("wait"), st.floats(0.0, 20.0)),
        ),
        max_size=20,
    )
)
def test_stages_that_always_answer_are_never_silent(actions: list[tuple[str, object]]) -> None:
    watch = Watch([0.01] * 3)
    now = float(T0)

    def answer() -> None:
        for stage in watch.to_ask():
            watch.progressed(stage, 1, 1, 0.0, now=MonotonicS(now))

    for action, value in actions:
        match action, value:
            case "expect", float(seconds):
                watch.expect(seconds, now=MonotonicS(now))
            case "rest", _:
                watch.expect_nothing()
            case "accuse", (int(one), int(other)) if one != other:
                watch.accuse(one, other, now=MonotonicS(now))
            case "wait", float(seconds):
                end = now + seconds
                while (due := watch.get_timer()) is not None and due <= end:
                    now = max(now, due)
                    watch.handle_timer(now=MonotonicS(now))
                    answer()
                now = end
        answer()
        assert not any(isinstance(f, Verdict) and f.cause is Cause.SILENT for f in watch.found())


# what then


def test_who_failed_is_avoided_for_a_while_and_twice_as_long_the_second_time() -> None:
    policy = RepairPolicy()
    policy.failed(A, now=T0)
    policy.pair_failed(C, B, now=T0)
    assert policy.avoid_peers(now=at(AVOID_S - 1)) == {A}
    assert policy.avoid_pairs(now=at(AVOID_S - 1)) == {(B, C)}
    assert policy.avoid_peers(now=at(AVOID_S)) == frozenset()
    policy.failed(A, now=at(AVOID_S))
    assert policy.avoid_peers(now=at(3 * AVOID_S - 1)) == {A}
    for _ in range(20):
        policy.failed(A, now=T0)
    assert policy.avoid_peers(now=at(MAX_AVOID_S)) == frozenset()


def test_who_has_not_kept_its_rows_is_avoided_the_second_time() -> None:
    policy = RepairPolicy()
    policy.has_dropped(A, now=T0)
    assert policy.avoid_peers(now=T0) == frozenset()
    policy.has_dropped(B, now=T0)
    policy.progressed()
    policy.has_dropped(A, now=T0)
    assert policy.avoid_peers(now=at(AVOID_S - 1)) == {A}


def test_who_fails_with_two_partners_is_avoided_for_the_rest_of_the_answer() -> None:
    policy = RepairPolicy()
    bad, one, other = (PeerId(name) for name in ("bad", "one", "other"))
    policy.pair_failed(one, bad, now=at(0.0))
    policy.pair_failed(bad, one, now=at(1.0))
    assert policy.avoid_peers(now=at(1.0)) == frozenset()
    assert not policy.is_doubted(bad)
    policy.pair_failed(bad, other, now=at(2.0))
    assert policy.is_doubted(bad)
    assert policy.avoid_peers(now=at(1e6)) == {bad}
    assert policy.avoid_pairs(now=at(1e6)) == frozenset()


def test_attempts_are_bounded_and_begin_anew_with_every_result() -> None:
    policy = RepairPolicy()
    opening = [policy.next_attempt() for _ in range(MAX_OPEN_ATTEMPTS)]
    assert opening == [Attempt.PATCH] * (MAX_OPEN_ATTEMPTS - 1) + [Attempt.GIVE_UP]
    policy.opened()
    attempts = [policy.next_attempt() for _ in range(MAX_REPAIRS + 1)]
    assert attempts == [Attempt.PATCH] * MAX_PATCHES + [Attempt.PREFILL] * (MAX_REPAIRS - MAX_PATCHES) + [
        Attempt.GIVE_UP
    ]
    policy.progressed()
    policy.opened()
    assert policy.next_attempt() is Attempt.PATCH


@pytest.mark.parametrize(
    ("row_bytes", "num_rows"), [(1, CHUNK_ROWS), (16384, CHUNK_ROWS), (32768, CHUNK_ROWS // 2), (CHUNK_BYTES + 1, 1)]
)
def test_orders_are_as_long_as_a_frame_takes_well(row_bytes: int, num_rows: int) -> None:
    assert rows_per_order(row_bytes) == num_rows
