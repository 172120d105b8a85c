"""What a node announces of its speed and its queue: from the warm-up to what forwards really take, and back."""

from __future__ import annotations

import math

import pytest

from fusion_node.daemon.pace_core import HALF_LIFE_S, QUEUE_HALF_LIFE_S, SMALL_ROWS, Pace, PacedBatching
from fusion_node.engine.batching_core import Work
from fusion_node.types import LayerRange

WARM_UP = (0.003, 0.004, 0.02)


def test_before_anything_was_served_the_warm_up_is_announced() -> None:
    pace = Pace(WARM_UP)

    assert pace.seconds_per_layer(now=1e6) == WARM_UP
    assert pace.queue_s(now=1e6) == 0.0


def test_what_slows_forwards_down_is_announced_and_fades_when_the_node_is_idle() -> None:
    pace = Pace(WARM_UP)
    for step in range(20):
        pace.forward_done(10, 1, 0.06, now=float(step))

    assert pace.seconds_per_layer(now=19.0) == pytest.approx((0.006, 0.008, 0.04))
    assert pace.seconds_per_layer(now=19.0 + HALF_LIFE_S) == pytest.approx((0.0045, 0.006, 0.03))
    assert pace.seconds_per_layer(now=19.0 + 20 * HALF_LIFE_S) == pytest.approx(WARM_UP, rel=1e-4)


def test_each_width_is_measured_for_itself() -> None:
    pace = Pace(WARM_UP)
    pace.forward_done(10, 1, 0.03, now=0.0)
    pace.forward_done(10, 16, 0.08, now=0.0)
    pace.forward_done(10, 512, 1.2, now=0.0)

    assert pace.seconds_per_layer(now=0.0) == pytest.approx((0.003, 0.008, 0.06))


def test_a_pause_of_the_program_does_not_make_the_node_slow() -> None:
    pace = Pace(WARM_UP)
    for seconds in (0.03, 0.03, 8.0, 0.03, 0.03):
        pace.forward_done(10, 1, seconds, now=0.0)

    assert pace.seconds_per_layer(now=0.0) == pytest.approx(WARM_UP)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_what_no_clock_can_have_measured_is_left_out(seconds: float) -> None:
    pace = Pace(WARM_UP)
    pace.forward_done(10, 1, seconds, now=0.0)
    pace.forward_done(0, 1, 1.0, now=0.0)

    assert pace.seconds_per_layer(now=0.0) == WARM_UP


def test_more_rows_never_take_less_by_the_announcement() -> None:
    pace = Pace(WARM_UP)
    pace.forward_done(10, 1, 10.0, now=0.0)
    pace.forward_done(10, 16, 0.04, now=0.0)
    pace.forward_done(10, 256, 0.2, now=0.0)

    one, some, many = pace.seconds_per_layer(now=0.0)
    assert one <= some <= many


def test_the_wait_of_late_decode_steps_is_announced_and_fades() -> None:
    pace = Pace(WARM_UP)
    for step in range(50):
        pace.step_began(1, 0.2, now=0.1 * step)
        pace.step_began(SMALL_ROWS + 1, 9.0, now=0.1 * step)

    assert pace.queue_s(now=5.0) == pytest.approx(0.2, rel=0.05)
    assert pace.queue_s(now=5.0 + 10 * QUEUE_HALF_LIFE_S) < 0.02


def test_a_batching_core_tells_what_steps_waited_and_what_forwards_took() -> None:
    pace = Pace(WARM_UP)
    batching = PacedBatching(pace)
    group = LayerRange(10, 20)
    assert batching.add(Work("a", "alice", 1, group, arrived=100.0), now=100.0) is None
    assert batching.add(Work("b", "bob", 1, group, arrived=100.1), now=100.1) is None
    batch = batching.next_batch(now=100.5)
    assert batch is not None
    assert batch.num_rows == 2
    done = batching.done(batch, seconds=0.093, now=100.6)

    assert {work.session for work in done} == {"a", "b"}
    assert pace.queue_s(now=100.5) == pytest.approx((0.5 + 0.4) / 3)
    at_two_rows = 0.003 + 0.001 / 15
    assert pace.seconds_per_layer(now=100.6)[0] == pytest.approx(0.003 * 0.0093 / at_two_rows)
