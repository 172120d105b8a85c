"""The heartbeat of one link, on a clock of its own."""

from __future__ import annotations

import itertools
from functools import partial
from random import Random

from p2p.heartbeat_core import (
    DEAD_AFTER_S,
    MAX_OUTSTANDING_PINGS,
    PING_AFTER_S,
    PROBE_EVERY_S,
    RECENT_ROUND_TRIPS,
    SUSPECT_AFTER_S,
    Heartbeat,
    Liveness,
)


def fresh(now: float = 0.0) -> Heartbeat:
    return Heartbeat(last_heard=now, last_sent=now, draw_number=partial(Random(1).getrandbits, 32))


def started() -> Heartbeat:
    heartbeat = fresh()
    heartbeat.pong(heartbeat.ping(0.0).number, 0.0)
    return heartbeat


def test_link_is_pinged_at_once() -> None:
    heartbeat = fresh(5.0)
    assert heartbeat.handle_timer(5.0) is not None


def test_idle_link_is_pinged_every_interval() -> None:
    heartbeat = started()
    pings = []
    for tenth in range(1, 101):
        now = tenth / 10
        ping = heartbeat.handle_timer(now)
        if ping is not None:
            pings.append(now)
            heartbeat.pong(ping.number, now + 0.05)
    assert len(pings) in (4, 5)
    assert all(b - a >= PING_AFTER_S for a, b in itertools.pairwise(pings))


def test_busy_link_is_probed_at_the_longer_interval() -> None:
    heartbeat = started()
    num_pings = 0
    for tenth in range(1, int(PROBE_EVERY_S * 20) + 1):
        now = tenth / 10
        heartbeat.heard(now)
        heartbeat.sent(now)
        num_pings += heartbeat.handle_timer(now) is not None
    assert num_pings == 2


def test_side_that_only_receives_still_sends_signs_of_life() -> None:
    heartbeat = started()
    num_pings = 0
    for tenth in range(1, 101):
        heartbeat.heard(tenth / 10)
        num_pings += heartbeat.handle_timer(tenth / 10) is not None
    assert num_pings >= 10 / PING_AFTER_S - 1


def test_silence_is_suspected_then_dead_for_good() -> None:
    heartbeat = started()
    heard = heartbeat.last_heard
    assert heartbeat.liveness(heard + SUSPECT_AFTER_S - 0.01) is Liveness.ALIVE
    assert heartbeat.liveness(heard + SUSPECT_AFTER_S) is Liveness.SUSPECT
    assert heartbeat.handle_timer(heard + DEAD_AFTER_S) is None
    heartbeat.heard(heard + DEAD_AFTER_S + 1)
    assert heartbeat.liveness(heard + DEAD_AFTER_S + 1) is Liveness.DEAD


def test_any_byte_is_a_sign_of_life() -> None:
    heartbeat = started()
    for second in range(1, 60):
        heartbeat.heard(float(second))
        heartbeat.handle_timer(float(second))
        assert heartbeat.liveness(second + 0.9) is Liveness.ALIVE


def test_our_own_absence_is_no_evidence() -> None:
    heartbeat = started()
    heartbeat.handle_absence(100.0, 100.0)
    assert heartbeat.liveness(100.0) is Liveness.ALIVE
    assert heartbeat.last_heard <= 100.0
    assert heartbeat.liveness(100.0 + DEAD_AFTER_S) is Liveness.DEAD


def test_round_trips_give_a_minimum() -> None:
    heartbeat = fresh()
    assert heartbeat.best_s() is None
    for n, round_trip_s in enumerate([0.5, 0.1, 0.3]):
        assert heartbeat.pong(heartbeat.ping(float(n)).number, n + round_trip_s) is not None
    assert abs((heartbeat.best_s() or 0) - 0.1) < 1e-9


def test_old_minimum_is_forgotten() -> None:
    heartbeat = fresh()
    for n in range(RECENT_ROUND_TRIPS + 1):
        heartbeat.pong(heartbeat.ping(float(n)).number, n + (0.01 if n == 0 else 0.2))
    assert (heartbeat.best_s() or 0) > 0.1


def test_pong_that_answers_nothing_is_ignored() -> None:
    heartbeat = fresh()
    number = heartbeat.ping(0.0).number
    assert heartbeat.pong(number, 1.0) == 1.0
    assert heartbeat.pong(number, 1.0) is None
    assert heartbeat.pong(77, 1.0) is None
    assert heartbeat.best_s() == 1.0


def test_pongs_sent_ahead_measure_nothing() -> None:
    heartbeat = fresh()
    numbers = [heartbeat.ping(float(n)).number for n in range(MAX_OUTSTANDING_PINGS)]
    guesses = {*range(1000), *(number + 1 for number in numbers)}
    assert [heartbeat.pong(guess, 20.0) for guess in guesses] == [None] * len(guesses)
    assert heartbeat.best_s() is None


def test_outstanding_pings_are_bounded() -> None:
    heartbeat = fresh()
    numbers = [heartbeat.ping(0.0).number for _ in range(MAX_OUTSTANDING_PINGS + 5)]
    assert heartbeat.pong(numbers[0], 1.0) is None
    assert heartbeat.pong(numbers[-1], 1.0) == 1.0
