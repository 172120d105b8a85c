"""When a node stops serving for its operator or for another program, and when it begins again."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fusion_node.daemon.manners_core import (
    BACK_OFF_GRACE_S,
    PAUSE_GRACE_S,
    Announce,
    BackOff,
    DeviceUsage,
    EndSessions,
    Manners,
    MannersEvent,
    PauseReason,
    ReleaseMemory,
    Standing,
    Thresholds,
    Withdraw,
)
from fusion_node.types import MonotonicS

T0 = 1000.0
GIB = 2**30
LIMITS = Thresholds()


def at(seconds: float) -> MonotonicS:
    return MonotonicS(T0 + seconds)


def switches(percents: Iterable[float], *, every_s: float = 2.0) -> list[tuple[float, bool]]:
    """When a series of samples makes BackOff change its mind, in seconds since the first sample."""
    core, found = BackOff(), []
    for index, percent in enumerate(percents):
        before = core.is_busy
        if core.observe(DeviceUsage(percent), now=at(index * every_s)) != before:
            found.append((index * every_s, core.is_busy))
    return found


# back-off: another program's share of the device's time


@pytest.mark.parametrize("percent", [0.0, 3.0, 10.0, 24.9])
def test_compositor_or_video_never_makes_the_node_back_off(percent: float) -> None:
    assert switches([percent] * 1000) == []


@pytest.mark.parametrize("percent", [25.0, 60.0, 100.0])
def test_game_makes_the_node_back_off_after_some_seconds_and_for_as_long_as_it_runs(percent: float) -> None:
    assert switches([percent] * 1000) == [(LIMITS.enter_s, True)]


def test_node_serves_again_a_minute_after_the_game_ended() -> None:
    assert switches([80.0] * 10 + [3.0] * 100) == [(8.0, True), (18.0 + LIMITS.leave_s, False)]


def test_short_bursts_of_a_desktop_do_not_make_the_node_back_off() -> None:
    # A window that opens: four seconds of load in every ten.
    assert switches(([90.0] * 2 + [2.0] * 3) * 100) == []


def test_one_quiet_sample_of_a_game_only_delays_the_back_off() -> None:
    assert switches([80.0, 80.0, 80.0, 0.0, 80.0, 80.0, 80.0]) == [(12.0, True)]


def test_loading_screens_of_a_game_do_not_let_the_node_serve() -> None:
    assert switches(([80.0] * 30 + [1.0] * 20) * 10) == [(8.0, True)]


def test_load_between_the_thresholds_counts_neither_way_for_long() -> None:
    # Scrolling at 15 % while backing off takes back calm time, but does not begin the minute anew.
    calm, scrolling = [2.0] * 10, [15.0] * 2
    series = [80.0] * 5 + (calm + scrolling) * 20
    assert [busy for _, busy in switches(series)] == [True, False]
    assert switches([80.0] * 5 + [15.0] * 1000) == [(8.0, True)]


def test_a_sample_after_sleep_counts_for_a_moment_only() -> None:
    core = BackOff()
    assert not core.observe(DeviceUsage(90.0), now=at(0))
    assert not core.observe(DeviceUsage(90.0), now=at(36_000))
    assert core.observe(DeviceUsage(90.0), now=at(36_004))


def test_a_clock_that_stands_still_decides_nothing() -> None:
    core = BackOff()
    assert not any(core.observe(DeviceUsage(100.0), now=at(0)) for _ in range(1000))


def test_first_sample_alone_decides_nothing() -> None:
    assert not BackOff(Thresholds(enter_s=1.0)).observe(DeviceUsage(100.0), now=at(0))


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_a_threshold_switches_at_most_once_a_minute(seed: int) -> None:
    rng = random.Random(seed)
    found = switches([max(0.0, rng.gauss(18.0, 15.0)) for _ in range(3000)])
    ends = [when for when, busy in found if not busy]
    begins = [when for when, busy in found if busy]
    assert all(end - begin >= LIMITS.leave_s for begin, end in zip(begins, ends, strict=False))


# back-off: another program's memory


def memory(others_gib: float, free_gib: float) -> DeviceUsage:
    return DeviceUsage(0.0, int(others_gib * GIB), int(free_gib * GIB), 24 * GIB)


def observe_all(core: BackOff, usages: Iterable[DeviceUsage], *, begin_s: float) -> list[bool]:
    return [core.observe(usage, now=at(begin_s + 2 * index)) for index, usage in enumerate(usages)]


def test_program_that_needs_the_last_memory_makes_the_node_back_off_until_it_gives_it_back() -> None:
    core = BackOff()
    assert not any(observe_all(core, [memory(1.0, 6.0)] * 10, begin_s=0))
    assert observe_all(core, [memory(6.5, 0.5)] * 10, begin_s=20)[-1]
    # The node has given its KV back, so much is free; the other program is still there.
    assert all(observe_all(core, [memory(6.5, 5.0)] * 100, begin_s=40))
    assert not observe_all(core, [memory(1.2, 10.0)] * 40, begin_s=240)[-1]


def test_memory_that_others_held_from_the_beginning_is_no_reason() -> None:
    # A desktop holds a tenth of the card, and the node's own KV fills the rest.
    assert not any(observe_all(BackOff(), [memory(3.0, 0.1)] * 100, begin_s=0))


def test_memory_that_others_take_while_much_is_free_is_no_reason() -> None:
    core = BackOff()
    observe_all(core, [memory(1.0, 20.0)], begin_s=0)
    assert not any(observe_all(core, [memory(8.0, 4.0)] * 100, begin_s=2))


def test_unknown_memory_is_no_reason() -> None:
    core = BackOff()
    usage = DeviceUsage(0.0, None, 0, 24 * GIB)
    assert not any(observe_all(core, [usage] * 100, begin_s=0))
    assert not any(observe_all(core, [DeviceUsage(0.0, 5, 0, 0)] * 100, begin_s=200))


# pause and resume


def events(core: Manners) -> list[MannersEvent]:
    found = []
    while (event := core.next_event()) is not None:
        found.append(event)
    return found


def test_node_serves_until_told_otherwise() -> None:
    core = Manners()
    core.update(now=at(0), num_sessions=3)
    assert (core.standing, core.reason, core.get_timer(), events(core)) == (Standing.SERVING, None, None, [])
    core.resume(now=at(1))
    core.set_busy(False, now=at(2))
    assert events(core) == []


def test_pause_withdraws_at_once_and_ends_sessions_after_the_grace_period() -> None:
    core = Manners()
    core.pause(now=at(0))
    core.update(now=at(0), num_sessions=2)
    assert events(core) == [Withdraw()]
    assert core.standing is Standing.STOPPING
    assert core.get_timer() == at(PAUSE_GRACE_S)
    core.update(now=at(PAUSE_GRACE_S - 0.1), num_sessions=1)
    assert events(core) == []
    core.update(now=at(PAUSE_GRACE_S), num_sessions=1)
    assert events(core) == [EndSessions(PauseReason.OPERATOR), ReleaseMemory()]
    assert core.standing is Standing.IDLE
    assert core.get_timer() is None
    core.update(now=at(PAUSE_GRACE_S + 1), num_sessions=0)
    assert events(core) == []


def test_pause_of_an_idle_node_releases_memory_at_once() -> None:
    core = Manners()
    core.pause(now=at(0))
    core.update(now=at(0), num_sessions=0)
    assert events(core) == [Withdraw(), ReleaseMemory()]
    core.resume(now=at(1))
    core.update(now=at(1), num_sessions=0)
    assert events(core) == [Announce()]
    assert core.standing is Standing.SERVING


def test_pause_at_once_leaves_no_grace_also_when_already_stopping() -> None:
    for earlier in (False, True):
        core = Manners()
        if earlier:
            core.pause(now=at(0))
            core.update(now=at(0), num_sessions=1)
        core.pause(now=at(1), at_once=True)
        core.update(now=at(1), num_sessions=1)
        assert events(core) == [Withdraw(), EndSessions(PauseReason.OPERATOR), ReleaseMemory()]


def test_resume_within_the_grace_period_keeps_the_sessions() -> None:
    core = Manners()
    core.pause(now=at(0))
    core.update(now=at(0), num_sessions=1)
    core.resume(now=at(5))
    core.update(now=at(PAUSE_GRACE_S + 5), num_sessions=1)
    assert events(core) == [Withdraw(), Announce()]


def test_pausing_twice_gives_nobody_more_time() -> None:
    core = Manners()
    core.pause(now=at(0))
    core.pause(now=at(30))
    assert core.get_timer() == at(PAUSE_GRACE_S)


def test_back_off_has_a_short_grace_and_ends_by_itself() -> None:
    core = Manners()
    core.set_busy(True, now=at(0))
    core.set_busy(True, now=at(2))
    assert core.reason is PauseReason.OTHER_PROGRAM
    core.update(now=at(BACK_OFF_GRACE_S), num_sessions=1)
    assert events(core) == [Withdraw(), EndSessions(PauseReason.OTHER_PROGRAM), ReleaseMemory()]
    core.set_busy(False, now=at(100))
    assert events(core) == [Announce()]
    assert core.reason is None


def test_back_off_shortens_the_grace_of_a_pause() -> None:
    core = Manners()
    core.pause(now=at(0))
    core.set_busy(True, now=at(10))
    assert core.get_timer() == at(10 + BACK_OFF_GRACE_S)
    assert core.reason is PauseReason.OPERATOR


def test_pause_outlasts_a_back_off_and_a_back_off_outlasts_a_resume() -> None:
    core = Manners()
    core.set_busy(True, now=at(0))
    core.pause(now=at(1))
    core.update(now=at(1), num_sessions=0)
    core.set_busy(False, now=at(2))
    assert core.reason is PauseReason.OPERATOR
    core.set_busy(True, now=at(3))
    core.resume(now=at(4))
    assert core.reason is PauseReason.OTHER_PROGRAM
    assert events(core) == [Withdraw(), ReleaseMemory()]
    core.set_busy(False, now=at(5))
    assert events(core) == [Announce()]


def test_every_reason_can_be_told_to_people() -> None:
    words = [reason.in_words for reason in PauseReason]
    assert len(set(words)) == len(PauseReason)
    assert "another program" in PauseReason.OTHER_PROGRAM.in_words


class MannersMachine(RuleBasedStateMachine):
    """An operator, another program and users, in any order; the shell's side is played by ``settle``."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Manners()
        self.now = T0
        self.num_sessions = 0
        self.is_announced = True

    def settle(self) -> None:
        self.core.update(now=MonotonicS(self.now), num_sessions=self.num_sessions)
        for event in events(self.core):
            match event:
                case Withdraw():
                    assert self.is_announced
                    self.is_announced = False
                case Announce():
                    assert not self.is_announced
                    self.is_announced = True
                case EndSessions():
                    assert self.num_sessions
                    self.num_sessions = 0
                case ReleaseMemory():
                    assert self.num_sessions == 0

    @rule(at_once=st.booleans())
    def pause(self, at_once: bool) -> None:
        self.core.pause(now=MonotonicS(self.now), at_once=at_once)
        self.settle()
        assert not (at_once and self.num_sessions)

    @rule()
    def resume(self) -> None:
        self.core.resume(now=MonotonicS(self.now))
        self.settle()

    @rule(is_busy=st.booleans())
    def busy(self, is_busy: bool) -> None:
        self.core.set_busy(is_busy, now=MonotonicS(self.now))
        self.settle()

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule()
    def open_session(self) -> None:
        if self.core.reason is None:
            self.num_sessions += 1

    @rule()
    def close_session(self) -> None:
        self.num_sessions = max(0, self.num_sessions - 1)
        self.settle()

    @invariant()
    def what_is_announced_is_served(self) -> None:
        assert self.is_announced == (self.core.reason is None) == (self.core.standing is Standing.SERVING)
        assert (self.core.get_timer() is not None) == (self.core.standing is Standing.STOPPING)
        if self.core.standing is Standing.IDLE:
            assert self.num_sessions == 0

    @invariant()
    def nobody_is_served_beyond_the_grace(self) -> None:
        timer = self.core.get_timer()
        assert timer is None or timer <= self.now + PAUSE_GRACE_S


TestMannersMachine = MannersMachine.TestCase
TestMannersMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
