"""When a process finds that it itself has not run."""

from __future__ import annotations

from fusion_node.daemon.standstill_core import LOOK_S, STANDSTILL_S, Standstill
from fusion_node.types import MonotonicS


def test_looks_in_time_tell_of_nothing() -> None:
    standstill = Standstill(now=MonotonicS(50.0))
    assert [standstill.look(now=MonotonicS(50.0 + LOOK_S * number)) for number in range(1, 9)] == [0.0] * 8
    assert standstill.look(now=MonotonicS(50.0 + 8 * LOOK_S + STANDSTILL_S)) == 0.0


def test_all_time_since_the_last_look_is_told_once_after_a_stop() -> None:
    standstill = Standstill(now=MonotonicS(50.0))
    assert standstill.look(now=MonotonicS(51.0)) == 0.0
    assert standstill.look(now=MonotonicS(90.0)) == 39.0
    assert standstill.look(now=MonotonicS(90.0)) == 0.0
    assert standstill.look(now=MonotonicS(91.0)) == 0.0
