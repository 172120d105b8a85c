"""Whom a node measures, how often, and what becomes of it in its record."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from fusion_node.daemon.surveyor_core import (
    AGAIN_S,
    BACK_OFF_S,
    BAD_PLACE,
    CALM_S,
    EAGER_S,
    FIRST_PROBE_S,
    FORGET_S,
    LAST_FIRST_PROBE_S,
    MAX_ANNOUNCED,
    MAX_PEERS,
    NUM_NEAR,
    PROBE_AFTER_S,
    PROBE_AGAIN_S,
    PROBE_PEERS,
    PROBE_RETRY_S,
    MAX_Bps,
    Seen,
    SurveyorCore,
    is_neighbour,
)
from fusion_node.types import LayerRange, PeerId
from scheduler.vivaldi import Coordinate

OURS = LayerRange(10, 20)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ((20, 30), True),
        ((15, 25), True),
        ((0, 10), True),
        ((0, 15), True),
        ((21, 30), False),
        ((0, 9), False),
        ((10, 20), False),
        ((12, 18), False),
        ((0, 30), False),
        ((10, 30), False),
        ((0, 20), False),
    ],
)
def test_a_neighbour_is_who_goes_on_where_the_other_ends(theirs: tuple[int, int], expected: bool) -> None:
    assert is_neighbour(OURS, LayerRange(*theirs)) is expected
    assert is_neighbour(LayerRange(*theirs), OURS) is expected


def seen(name: str, *, is_neighbour: bool = True, at_s: float | None = None) -> Seen:
    coordinate = None if at_s is None else Coordinate((at_s, 0.0, 0.0), error=0.2)
    return Seen(PeerId(name), is_neighbour, coordinate)


def survey(
    core: SurveyorCore, *, until: float, measure: Callable[[PeerId, float], float | None]
) -> list[tuple[float, PeerId]]:
    """Runs the core's timers; ``measure`` gives a round trip, or None when the peer cannot be reached."""
    orders = []
    while (now := core.get_timer()) < until:
        peer = core.handle_timer(now=now)
        if peer is not None:
            orders.append((now, peer))
            round_trip_s = measure(peer, now)
            if round_trip_s is None:
                core.unreachable(peer, now=now)
            else:
                core.measured(peer, round_trip_s, now=now)
    return orders


def test_neighbours_are_measured_soon_then_now_and_then() -> None:
    core = SurveyorCore(random.Random(1), now=0.0)
    core.saw([seen(f"n{number}") for number in range(4)] + [seen("other", is_neighbour=False)], now=0.0)
    orders = survey(core, until=1200.0, measure=lambda peer, now: 0.02)

    assert {peer for _, peer in orders[:8]} >= {f"n{number}" for number in range(4)}
    assert orders[7][0] < 10 * EAGER_S
    assert "other" in {peer for _, peer in orders}
    # From then on, one in CALM_S at most, whoever it is.
    calm = [at for at, _ in orders if at > 300.0]
    assert len(calm) <= 900.0 / CALM_S + 1


def test_of_a_large_swarm_the_nearest_neighbours_are_measured_again_and_anybody_by_chance() -> None:
    core = SurveyorCore(random.Random(2), now=0.0)
    near = [seen(f"near{number}", at_s=0.001 * number) for number in range(NUM_NEAR)]
    far = [seen(f"far{number}", at_s=0.2) for number in range(500)]
    core.saw([*near, *far], now=0.0)
    orders = survey(core, until=3600.0, measure=lambda peer, now: 0.01 if peer.startswith("near") else 0.3)
    times = Counter(peer for _, peer in orders)

    assert len(orders) <= 3600.0 / CALM_S + 600 / EAGER_S
    assert all(times[each.peer] >= 3 for each in near)
    # Nobody's coordinate keeps others from ever being measured.
    assert sum(peer.startswith("far") for _, peer in orders) > len(orders) / 4


def test_who_cannot_be_reached_is_left_alone_for_longer_and_longer() -> None:
    core = SurveyorCore(random.Random(3), now=0.0)
    core.saw([seen("dead")], now=0.0)
    orders = [at for at, _ in survey(core, until=5000.0, measure=lambda peer, now: None)]

    gaps = [later - earlier for earlier, later in itertools.pairwise(orders)]
    assert len(orders) == 5
    assert gaps[0] >= BACK_OFF_S
    assert all(later >= earlier for earlier, later in itertools.pairwise(gaps))


def test_a_host_at_which_nobody_answers_is_left_alone_whoever_is_said_to_be_there() -> None:
    core = SurveyorCore(random.Random(31), now=0.0)
    victim, home = frozenset({"192.0.2.1"}), frozenset({"192.0.2.2"})
    liars = [Seen(PeerId(f"liar{number}"), True, None, victim) for number in range(500)]
    core.saw([*liars, *(Seen(PeerId(f"n{number}"), True, None, home) for number in range(5))], now=0.0)
    orders = survey(core, until=3600.0, measure=lambda peer, now: None if peer.startswith("liar") else 0.01)

    num_dials = sum(peer.startswith("liar") for _, peer in orders)
    assert BAD_PLACE <= num_dials <= BAD_PLACE + 5
    assert {peer for _, peer in orders if not peer.startswith("liar")} == {f"n{number}" for number in range(5)}


def test_a_host_at_which_some_answer_is_not_given_up() -> None:
    core = SurveyorCore(random.Random(32), now=0.0)
    home = frozenset({"127.0.0.1"})
    core.saw([Seen(PeerId(f"{name}{number}"), True, None, home) for name in "ab" for number in range(4)], now=0.0)
    orders = survey(core, until=3600.0, measure=lambda peer, now: None if peer.startswith("a") else 0.01)

    assert {peer for _, peer in orders} == {f"{name}{number}" for name in "ab" for number in range(4)}


def test_round_trips_to_the_nearest_neighbours_are_announced_until_they_are_old() -> None:
    core = SurveyorCore(random.Random(4), now=0.0)
    core.saw([*(seen(f"n{number}") for number in range(12)), seen("other", is_neighbour=False)], now=0.0)
    for number in range(12):
        core.measured(PeerId(f"n{number}"), 0.001 * (12 - number), now=10.0)
    core.measured(PeerId("other"), 0.0001, now=10.0)

    announced = core.announced(now=10.0)
    assert len(announced) == MAX_ANNOUNCED
    assert announced[0] == ("n11", pytest.approx(0.001))
    assert "other" not in dict(announced)
    core.saw([seen("n10")], now=20.0)
    assert [peer for peer, _ in core.announced(now=20.0)] == ["n10"]
    assert core.announced(now=11.0 + FORGET_S) == []


@pytest.mark.parametrize("round_trip_s", [math.nan, math.inf, -1.0])
def test_a_round_trip_that_no_clock_can_have_measured_is_left_out(round_trip_s: float) -> None:
    core = SurveyorCore(random.Random(5), now=0.0)
    core.saw([seen("n", at_s=0.1)], now=0.0)
    core.measured(PeerId("n"), round_trip_s, now=0.0)

    assert core.announced(now=0.0) == []
    assert core.coordinate == Coordinate()


def test_measurements_move_the_own_coordinate() -> None:
    core = SurveyorCore(random.Random(6), now=0.0)
    places = {"a": (0.0, 0.0, 0.0), "b": (0.08, 0.0, 0.0), "c": (0.0, 0.08, 0.0), "d": (0.08, 0.08, 0.0)}
    core.saw([Seen(PeerId(name), False, Coordinate(place, error=0.1)) for name, place in places.items()], now=0.0)
    survey(core, until=1000.0, measure=lambda peer, now: 0.06)

    assert core.coordinate.error < 0.3
    for place in places.values():
        assert core.coordinate.distance(Coordinate(place)) == pytest.approx(0.06, rel=0.3)


def test_bandwidth_is_measured_with_a_few_peers_and_then_rarely() -> None:
    core = SurveyorCore(random.Random(7), now=0.0)
    core.saw([seen(f"n{number}") for number in range(6)], now=0.0)
    assert core.to_probe(now=1e4, is_idle=True) is None, "nobody was reached yet"
    for number in range(6):
        core.measured(PeerId(f"n{number}"), 0.02, now=0.0)
    probed = []
    for now in range(0, 12 * 3600, 10):
        peer = core.to_probe(now=float(now), is_idle=True)
        if peer is not None:
            probed.append((now, peer))
            core.probed(peer, 1e6 * (1 + len(probed)), 5e6, now=float(now))

    assert len({peer for _, peer in probed[:PROBE_PEERS]}) == PROBE_PEERS
    assert FIRST_PROBE_S <= probed[0][0] <= LAST_FIRST_PROBE_S + 10
    assert all(later - earlier >= PROBE_AFTER_S for (earlier, _), (later, _) in itertools.pairwise(probed))
    assert len(probed) <= PROBE_PEERS + 12 * 3600 / PROBE_AGAIN_S
    assert core.down_Bps == 5e6


def test_nodes_that_start_together_do_not_probe_together() -> None:
    first = []
    for seed in range(200):
        core = SurveyorCore(random.Random(seed), now=0.0)
        core.saw([seen("n")], now=0.0)
        core.measured(PeerId("n"), 0.02, now=0.0)
        first.append(next(now for now in range(1000) if core.to_probe(now=float(now), is_idle=True) is not None))

    assert min(first) >= FIRST_PROBE_S
    assert max(first) <= LAST_FIRST_PROBE_S
    assert max(Counter(now // 10 for now in first).values()) <= 0.4 * len(first)


def test_nothing_is_probed_while_somebody_needs_the_line() -> None:
    core = SurveyorCore(random.Random(8), now=0.0)
    core.saw([seen("n")], now=0.0)
    core.measured(PeerId("n"), 0.02, now=0.0)

    assert core.to_probe(now=1000.0, is_idle=False) is None
    assert core.to_probe(now=1000.0, is_idle=True) == "n"


def reached(*peers: str) -> SurveyorCore:
    core = SurveyorCore(random.Random(9), now=0.0)
    core.saw([seen(peer) for peer in peers], now=0.0)
    for peer in peers:
        core.measured(PeerId(peer), 0.02, now=0.0)
    return core


def test_a_probe_that_failed_is_made_again_after_a_minute_and_ever_more_rarely() -> None:
    core, now, waits = reached("n"), 1000.0, []
    for _ in range(8):
        assert core.to_probe(now=now, is_idle=True) == "n"
        core.probe_failed(now=now)
        failed_at = now
        while not core.is_probe_due(now=now):
            now += 5.0
        waits.append(now - failed_at)

    assert PROBE_AFTER_S <= waits[0] <= 1.5 * PROBE_AFTER_S + 5.0
    assert waits[-1] >= PROBE_RETRY_S
    assert max(waits) <= 1.5 * PROBE_RETRY_S + 5.0


def test_with_whom_a_probe_failed_comes_after_the_others() -> None:
    core, now = reached("a", "b", "c"), 1000.0
    tried = []
    for _ in range(3):
        peer = core.to_probe(now=now, is_idle=True)
        assert peer is not None
        tried.append(peer)
        core.probe_failed(now=now)
        now += 2 * PROBE_RETRY_S

    assert sorted(tried) == ["a", "b", "c"]
    assert core.to_probe(now=now, is_idle=True) is not None, "when all have failed, any of them"


def test_after_a_probe_that_succeeded_one_that_fails_is_made_again_soon() -> None:
    core, now = reached("a", "b"), 1000.0
    for _ in range(6):
        core.to_probe(now=now, is_idle=True)
        core.probe_failed(now=now)
        now += 2 * PROBE_RETRY_S
    peer = core.to_probe(now=now, is_idle=True)
    assert peer is not None
    core.probed(peer, 1e6, 1e6, now=now)
    now += 2 * PROBE_AFTER_S
    assert core.to_probe(now=now, is_idle=True) is not None
    core.probe_failed(now=now)

    assert core.to_probe(now=now + 1.5 * PROBE_AFTER_S, is_idle=True) is not None


def probes_of_a_day(core: SurveyorCore, rates_Bps: Callable[[PeerId], float | None]) -> list[PeerId]:
    """With whom the bandwidth was measured, at the rates that are given for each; None: it fails."""
    asked = []
    for now in range(0, 24 * 3600, 10):
        peer = core.to_probe(now=float(now), is_idle=True)
        if peer is None:
            continue
        asked.append(peer)
        rate_Bps = rates_Bps(peer)
        if rate_Bps is None:
            core.probe_failed(now=float(now))
        else:
            core.probed(peer, rate_Bps, rate_Bps, now=float(now))
    return asked


@pytest.mark.parametrize("others", [("a",), ("a", "b"), ("a", "b", "c")])
def test_one_with_whom_it_always_fails_has_the_others_not_measured_again_and_again(others: tuple[str, ...]) -> None:
    core = reached("bad", *others)
    asked = Counter(probes_of_a_day(core, lambda peer: None if peer == "bad" else 1e6))

    assert sum(asked.values()) <= 24, asked
    assert min(asked[PeerId(peer)] for peer in others) >= 1
    assert core.up_Bps == 1e6


def test_beside_a_single_neighbour_the_line_is_measured_with_others_and_then_rarely() -> None:
    core = reached("neighbour")
    core.saw([seen("neighbour"), seen("x", is_neighbour=False), seen("y", is_neighbour=False)], now=0.0)
    core.measured(PeerId("x"), 0.01, now=0.0)
    core.measured(PeerId("y"), 0.01, now=0.0)
    asked = probes_of_a_day(core, lambda peer: 1e6)

    assert asked[0] == "neighbour"
    assert set(asked[:PROBE_PEERS]) == {"neighbour", "x", "y"}
    assert len(asked) <= PROBE_PEERS + 24 * 3600 / PROBE_AGAIN_S


def test_when_the_only_neighbour_fails_the_line_is_measured_with_others() -> None:
    core = reached("neighbour")
    core.saw([seen("neighbour"), seen("x", is_neighbour=False)], now=0.0)
    core.measured(PeerId("x"), 0.01, now=0.0)
    probes_of_a_day(core, lambda peer: None if peer == "neighbour" else 1e6)

    assert core.up_Bps == 1e6


@pytest.mark.parametrize("rate_Bps", [0.0, -1.0, math.nan])
def test_a_rate_that_no_line_has_is_a_failure(rate_Bps: float) -> None:
    core = reached("liar", "a")
    asked = Counter(probes_of_a_day(core, lambda peer: rate_Bps if peer == "liar" else 1e6))

    assert core.up_Bps == 1e6
    assert asked[PeerId("liar")] <= 24


def test_one_liar_among_those_that_timed_our_line_does_not_count() -> None:
    core = SurveyorCore(random.Random(10), now=0.0)
    assert core.up_Bps is None
    core.probed(PeerId("a"), 1e6, 4e6, now=0.0)
    core.probed(PeerId("liar"), 1e300, math.nan, now=0.0)
    core.probed(PeerId("liar"), 1e300, 1.0, now=0.0)
    assert core.up_Bps == MAX_Bps
    core.probed(PeerId("b"), 1.2e6, 5e6, now=0.0)

    assert core.up_Bps == 1.2e6
    assert core.down_Bps == 4e6
    core.probed(PeerId("b"), 1.3e6, 5e6, now=0.0)
    assert core.up_Bps == 1.3e6, "of a peer, the newest counts"


def test_what_is_remembered_of_a_flood_of_identities_is_bounded() -> None:
    core = SurveyorCore(random.Random(11), now=0.0)
    for number in range(2 * MAX_PEERS):
        core.measured(PeerId(str(number)), 0.01, now=float(number))
    core.saw([seen(str(2 * MAX_PEERS - 1))], now=1e4)

    assert core.announced(now=2.0 * MAX_PEERS) == [(str(2 * MAX_PEERS - 1), 0.01)]
    assert len(core._known) <= MAX_PEERS


def test_the_same_seed_measures_the_same_peers() -> None:
    def orders() -> list[tuple[float, PeerId]]:
        core = SurveyorCore(random.Random(12), now=0.0)
        core.saw([seen(f"n{number}", is_neighbour=number % 2 == 0) for number in range(30)], now=0.0)
        return survey(core, until=3 * AGAIN_S, measure=lambda peer, now: 0.01)

    assert orders() == orders()
