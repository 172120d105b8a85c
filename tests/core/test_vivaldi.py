"""Network coordinates: how well they predict a swarm with broken triangles, and what liars can do to them."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from fusion_node.types import PeerId
from scheduler.vivaldi import MAX_MOVE_S, MOVES, Coordinate, Vivaldi

# West and east of North America, Europe, East Asia, India, South America, Australia: where round trips put them.
SITES = ((0.0, 0.0), (0.06, 0.01), (0.14, 0.03), (-0.06, 0.1), (0.2, 0.11), (0.09, -0.08), (-0.05, 0.2))

Lie = Callable[[random.Random, Coordinate], tuple[Coordinate, float]]
"""Of the victim's coordinate: the liar's own one, and by how much it delays its answer."""


def latencies(rng: random.Random, num_hosts: int) -> list[list[float]]:
    """Round trips between hosts at SITES: the way, the lines of both, and one detour in twenty."""
    sites = [rng.choice(SITES) for _ in range(num_hosts)]
    places = [(x + rng.gauss(0, 0.006), y + rng.gauss(0, 0.006)) for x, y in sites]
    lines_s = [rng.lognormvariate(math.log(0.004), 0.8) for _ in range(num_hosts)]
    table = [[0.0] * num_hosts for _ in range(num_hosts)]
    for one, other in itertools.combinations(range(num_hosts), 2):
        way_s = math.dist(places[one], places[other]) * rng.lognormvariate(0, 0.15)
        if rng.random() < 0.05:
            way_s *= rng.uniform(1.5, 3.0)
        table[one][other] = table[other][one] = way_s + lines_s[one] + lines_s[other]
    return table


@dataclass(frozen=True)
class Swarm:
    table: list[list[float]]
    nodes: Sequence[Vivaldi]
    honest: Sequence[int]

    def errors(self) -> list[float]:
        """Relative, of all pairs of honest nodes."""
        return [
            abs(self.nodes[one].coordinate.distance(self.nodes[other].coordinate) / self.table[one][other] - 1)
            for one, other in itertools.combinations(self.honest, 2)
        ]


def settle(
    seed: int, *, num_hosts: int = 60, num_samples: int = 200, num_liars: int = 0, lie: Lie | None = None
) -> Swarm:
    """Every honest node measures so many others, by chance."""
    rng = random.Random(seed)
    table = latencies(rng, num_hosts)
    nodes = [Vivaldi(random.Random(rng.random())) for _ in range(num_hosts)]
    liars = set(rng.sample(range(num_hosts), num_liars))
    honest = [node for node in range(num_hosts) if node not in liars]
    for _ in range(num_samples):
        for node in honest:
            other = rng.choice([each for each in range(num_hosts) if each != node])
            theirs, delay_s = nodes[other].coordinate, rng.expovariate(10 / table[node][other])
            if other in liars and lie is not None:
                theirs, delay_s = lie(rng, nodes[node].coordinate)
            nodes[node].observe(PeerId(str(other)), theirs, table[node][other] + delay_s)
    return Swarm(table, nodes, honest)


undisturbed = functools.cache(settle)


def num_broken_triangles(table: list[list[float]], rng: random.Random) -> float:
    hosts = range(len(table))
    drawn = [rng.sample(hosts, 3) for _ in range(3000)]
    return sum(table[a][b] > table[a][c] + table[c][b] for a, b, c in drawn) / len(drawn)


@pytest.mark.parametrize("seed", range(3))
def test_coordinates_of_a_swarm_with_broken_triangles_predict_most_round_trips(seed: int) -> None:
    swarm = undisturbed(seed)
    errors = swarm.errors()
    told = statistics.median(node.coordinate.error for node in swarm.nodes)

    assert num_broken_triangles(swarm.table, random.Random(seed)) > 0.05
    assert statistics.median(errors) < 0.2
    # What a node tells of its own error is about as much as it really is.
    assert statistics.median(errors) / 2 < told < 3 * statistics.median(errors)


def zero(rng: random.Random, victim: Coordinate) -> tuple[Coordinate, float]:
    return Coordinate(error=0.0), rng.uniform(0.0, 0.5)


def end_of_the_world(rng: random.Random, victim: Coordinate) -> tuple[Coordinate, float]:
    return Coordinate((10.0, 10.0, -10.0), 10.0, 0.0), 0.0


def anywhere(rng: random.Random, victim: Coordinate) -> tuple[Coordinate, float]:
    return Coordinate((rng.uniform(-1, 1), rng.uniform(-1, 1), rng.uniform(-1, 1)), rng.random(), 0.0), 0.0


def push_outward(rng: random.Random, victim: Coordinate) -> tuple[Coordinate, float]:
    return Coordinate(tuple(5 * x for x in victim.vector), 0.0, 0.0), 0.3


@pytest.mark.parametrize("lie", [zero, end_of_the_world, anywhere, push_outward])
def test_a_tenth_of_liars_costs_the_others_little(lie: Lie) -> None:
    without = statistics.median(undisturbed(1).errors())
    with_liars = statistics.median(settle(1, num_liars=6, lie=lie).errors())

    assert with_liars < 0.25
    assert with_liars < without + 0.1


def test_a_small_swarm_finds_its_coordinates_soon() -> None:
    errors = [statistics.median(settle(seed, num_hosts=8, num_samples=40).errors()) for seed in range(4)]

    assert statistics.median(errors) < 0.15


def test_a_newcomer_needs_twenty_samples_in_a_swarm_that_has_settled() -> None:
    swarm = undisturbed(2)
    rng = random.Random(3)
    missed = []
    for host in range(10):
        newcomer = Vivaldi(random.Random(host))
        for other in rng.sample([each for each in swarm.honest if each != host], 20):
            newcomer.observe(PeerId(str(other)), swarm.nodes[other].coordinate, swarm.table[host][other])
        missed += [
            abs(newcomer.coordinate.distance(swarm.nodes[other].coordinate) / swarm.table[host][other] - 1)
            for other in swarm.honest
            if other != host
        ]

    assert statistics.median(missed) < 0.3


@pytest.mark.parametrize(
    "theirs",
    [
        Coordinate((math.nan, 0.0, 0.0)),
        Coordinate((math.inf, 0.0, 0.0)),
        Coordinate((0.0, 0.0, 1e6)),
        Coordinate((0.0, 0.0)),
        Coordinate((0.0, 0.0, 0.0, 0.0)),
        Coordinate(()),
        Coordinate(height=-1.0),
        Coordinate(height=math.nan),
        Coordinate(height=1e6),
        Coordinate(error=math.nan),
        Coordinate(error=-1.0),
        Coordinate(error=math.inf),
    ],
)
def test_a_coordinate_that_makes_no_sense_is_refused(theirs: Coordinate) -> None:
    node = Vivaldi(random.Random(0))

    assert not theirs.is_sane
    assert not node.observe(PeerId("liar"), theirs, 0.1)
    assert node.coordinate == Coordinate()


@pytest.mark.parametrize("round_trip_s", [math.nan, math.inf, -math.inf, -1.0, 1e6])
def test_a_round_trip_that_no_clock_can_have_measured_is_refused(round_trip_s: float) -> None:
    node = Vivaldi(random.Random(0))

    assert not node.observe(PeerId("peer"), Coordinate((0.1, 0.0, 0.0)), round_trip_s)
    assert node.coordinate == Coordinate()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_a_coordinate_stays_finite_and_moves_by_little(seed: int) -> None:
    rng = random.Random(seed)
    node = Vivaldi(random.Random(seed))
    extremes = [-10.0, -1e-9, 0.0, 1e-9, 10.0]
    for _ in range(300):
        before = node.coordinate
        theirs = Coordinate(
            tuple(rng.choice(extremes) for _ in range(3)), rng.choice([0.0, 1e-9, 10.0]), rng.choice([0.0, 1e300])
        )
        node.observe(PeerId(str(rng.randrange(5))), theirs, rng.choice([0.0, 1e-9, 0.1, 5.0]))
        after = node.coordinate
        assert after.is_sane
        assert math.dist(before.vector, after.vector) <= 2 * MOVES * MAX_MOVE_S + 1e-9
        assert abs(before.height - after.height) <= MOVES * MAX_MOVE_S + 1e-9


def test_a_peer_that_is_measured_all_the_time_pulls_no_more_than_the_others() -> None:
    """Nine peers are where they say. The tenth claims to be where nobody is, and is measured nine times as often."""
    places = [Coordinate((0.05 * math.cos(each), 0.05 * math.sin(each), 0.0), error=0.1) for each in range(9)]
    node = Vivaldi(random.Random(0))
    for _ in range(60):
        for number, place in enumerate(places):
            node.observe(PeerId(str(number)), place, place.height + math.hypot(*place.vector) + 0.001)
            node.observe(PeerId("liar"), Coordinate((0.5, 0.5, 0.5), error=0.0), 0.001)

    predicted = [node.coordinate.distance(place) for place in places]
    assert statistics.median(abs(each - 0.0511) for each in predicted) < 0.01


def test_two_peers_at_one_point_part() -> None:
    one, other = Vivaldi(random.Random(1)), Vivaldi(random.Random(2))
    for _ in range(50):
        one.observe(PeerId("other"), other.coordinate, 0.08)
        other.observe(PeerId("one"), one.coordinate, 0.08)

    assert one.coordinate.distance(other.coordinate) == pytest.approx(0.08, rel=0.1)


def test_the_same_seed_gives_the_same_coordinates() -> None:
    first, second = settle(5, num_hosts=10, num_samples=20), settle(5, num_hosts=10, num_samples=20)

    assert [node.coordinate for node in first.nodes] == [node.coordinate for node in second.nodes]
