"""Which layers nodes choose, and what a private swarm's scheduler gives them: scheduler.placement."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fusion_node.types import LayerRange, PeerId
from scheduler.leg_table import Floats
from scheduler.pipelines import _Budget, _fewest_stages, _largest_first, water_fill
from scheduler.placement import Move, Policy, Stay, choose_range, digest, kept_layers, place_all
from scheduler.swarm_rate import MAX_AT_ONCE, Host, SwarmRate, _Grid, holders_per_layer, windows
from scheduler.topology import Leg
from tests.core.placement_swarms import Plane, carried_out, host, moves, random_swarm, work

NEAR = Plane()
SEEDS = range(24)


def test_a_model_that_fits_on_one_node_is_not_split() -> None:
    others = [host("a", 12, (0, 6)), host("b", 12, (6, 12))]
    chosen = choose_range(host("own", 20), others, work(12), NEAR)
    assert isinstance(chosen, Move)
    assert chosen.layers == LayerRange(0, 12)
    placed = place_all([host("a", 12), host("b", 15)], work(12), NEAR)
    assert [d.layers for d in placed.decisions] == [LayerRange(0, 12)] * 2


@pytest.mark.parametrize("first_layers", [None, frozenset(range(0, 12, 3))])
def test_ways_around_a_host_are_the_same_reckoned_singly_and_in_arrays(first_layers: frozenset[int] | None) -> None:
    num_ways = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        hosts, plane = random_swarm(9, seed, capacities=(2, 8))
        rate = SwarmRate(hosts, work(12, first_layers=first_layers), plane)
        starts = [rng.randrange(0, 7) for _ in hosts]
        # Some end beyond the model, and some hold nothing.
        ranges = [LayerRange(at, at + rng.randint(1, 11)) if rng.random() < 0.8 else None for at in starts]
        among = rng.sample(range(1, 9), rng.randint(0, 8))
        singly = rate.ways_through(0, ranges, among)
        in_arrays = _Grid(rate, ranges, among, is_fine=True).ways_through(0)
        for one, other in zip(singly, in_arrays, strict=True):
            assert one.tolist() == other.tolist(), seed
            num_ways += int(np.isfinite(one).sum()) - 1  # the host's own way to the user, or from there
    assert num_ways > 2 * len(SEEDS), num_ways


@pytest.mark.parametrize("num_hosts", [9, 40, 70])
@pytest.mark.parametrize("first_layers", [None, frozenset(range(0, 12, 2))])
def test_several_ranges_of_one_host_are_worth_together_what_they_are_one_by_one(
    first_layers: frozenset[int] | None, num_hosts: int
) -> None:
    num_better = 0
    for seed in SEEDS[:6]:
        rng = random.Random(seed)
        hosts, plane = random_swarm(num_hosts, seed, capacities=(2, 8))
        task = work(12, first_layers=first_layers)
        rate = SwarmRate(hosts, task, plane)
        ranges = [rng.choice(windows(each.capacity_layers, task)) if rng.random() < 0.8 else None for each in hosts]
        index, options = rng.randrange(num_hosts), rng.sample(windows(6, task), 3)
        together = rate.worths(index, ranges, options)
        one_by_one = [rate.worth([w if i == index else r for i, r in enumerate(ranges)]) for w in options]
        assert together == one_by_one, seed
        num_better += len(set(one_by_one)) > 1
    assert num_better > 3


def test_a_joiner_takes_what_nobody_holds() -> None:
    others = [host("a", 5, (0, 5)), host("b", 2, (0, 2)), host("c", 4, (8, 12))]
    chosen = choose_range(host("own", 3), others, work(12), NEAR)
    assert chosen.layers == LayerRange(5, 8)
    assert "nobody else holds layers 5:8" in chosen.reason


def test_a_node_without_room_stays_as_it_is() -> None:
    assert choose_range(host("own", 0), [], work(12), NEAR) == Stay(PeerId("own"), None, "no layers fit")
    assert choose_range(host("own", -3), [], work(12), NEAR).layers is None


def test_ranges_begin_and_stop_where_the_model_lets_them() -> None:
    cuts = frozenset({0, 1, 2, 5, 9})
    chosen = choose_range(host("own", 6), [host("a", 5, (0, 5))], work(12, first_layers=cuts), NEAR)
    assert chosen.layers == LayerRange(5, 9)
    for seed in SEEDS:
        hosts, plane = random_swarm(6, seed, capacities=(3, 9))
        for decision in place_all(hosts, work(12, first_layers=cuts), plane).decisions:
            if decision.layers is not None:
                assert {decision.layers.start, decision.layers.stop} <= {*cuts, 12}


def test_the_near_node_is_joined_to_the_near_pipeline() -> None:
    """Both halves of a model are held twice, here and far away; a further node is worth most where the others are."""
    plane = Plane({PeerId("far-a"): (0.1, 0.0), PeerId("far-b"): (0.1, 0.0), PeerId("own"): (0.1, 0.001)})
    others = [
        host("near-a", 6, (0, 6)), host("near-b", 6, (6, 12)), host("far-a", 6, (0, 6), layer_s=0.01),
        host("far-b", 6, (6, 12)),
    ]  # fmt: skip
    assert choose_range(host("own", 6), others, work(12), plane).layers == LayerRange(0, 6)


def test_pipelines_do_not_cross_the_ocean() -> None:
    plane = Plane({PeerId(f"{name}{i}"): (x, 0.001 * i) for name, x in (("eu", -0.05), ("us", 0.05)) for i in range(2)})
    hosts = [host(name, 6) for name in ("eu0", "us0", "eu1", "us1")]
    placed = carried_out(hosts, place_all(hosts, work(12), plane).decisions)
    held = {h.peer: h.held for h in placed}
    assert held[PeerId("eu0")] != held[PeerId("eu1")]
    assert held[PeerId("us0")] != held[PeerId("us1")]


def test_slow_uplinks_are_avoided() -> None:
    """Rows weigh more than the way: a near node behind a thin uplink is worth less than one a little further away."""
    plane = Plane({PeerId("wide"): (0.01, 0.0)}, {PeerId("thin"): 20_000.0})
    hosts = [host("thin", 6, (0, 6)), host("wide", 6, (0, 6)), host("rest", 6, (6, 12))]
    pipelines, _ = SwarmRate(hosts, work(12), plane).pipelines([h.held for h in hosts])
    assert [hosts[i].peer for i, _ in pipelines[0].stages] == ["wide", "rest"]


def test_compute_counts_for_every_layer() -> None:
    hosts = [host("slow", 12, (0, 12), layer_s=0.004), host("fast", 12, (0, 12), layer_s=0.002)]
    pipelines, left = SwarmRate(hosts, work(12), NEAR).pipelines([h.held for h in hosts])
    assert [pipeline.loop_s for pipeline in pipelines] == pytest.approx(
        [12 * t + 0.003 + 2 * 8192 * 0 for t in (0.002, 0.004)]
    )
    assert left == []


def test_a_node_is_entered_at_any_layer_that_it_holds() -> None:
    hosts = [host("a", 8, (0, 8)), host("b", 8, (4, 12))]
    pipelines, _ = SwarmRate(hosts, work(12), NEAR).pipelines([h.held for h in hosts])
    (pipeline,) = pipelines
    assert [index for index, _ in pipeline.stages] == [0, 1]
    assert pipeline.stages[0][1].start == 0
    assert pipeline.stages[0][1].stop == pipeline.stages[1][1].start


def test_grouping_finds_the_fewest_stages() -> None:
    """The example of Parallax's own documentation: two pipelines of 70 layers need all six nodes."""
    groups = _fewest_stages((40, 40, 20, 20, 10, 10), 70, 2, _Budget())
    assert groups is not None
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(6))
    assert all(sum((40, 40, 20, 20, 10, 10)[i] for i in group) >= 70 for group in groups)
    assert _fewest_stages((40, 40, 20), 70, 1, _Budget()) == [[0, 1]]
    assert _fewest_stages((40, 20), 70, 1, _Budget()) is None
    assert _fewest_stages((40, 40, 20), 70, 1, _Budget(states=1)) is None


def test_largest_first_ends_with_the_smallest_that_completes() -> None:
    assert _largest_first((40, 30, 20, 10, 5), 60, 1) == [[0, 2]]
    assert _largest_first((40, 10), 60, 1) == []


@pytest.mark.parametrize("seed", range(20))
def test_water_filling_gives_layers_by_speed_up_to_capacity(seed: int) -> None:
    rng = random.Random(seed)
    capacities = [rng.randint(1, 30) for _ in range(rng.randint(1, 6))]
    seconds = [rng.choice((0.001, 0.003, 0.01)) for _ in capacities]
    num_layers = rng.randint(1, sum(capacities))
    amounts = water_fill(capacities, seconds, num_layers)
    assert sum(amounts) == num_layers
    assert all(0 <= n <= c for n, c in zip(amounts, capacities, strict=True))
    # Nobody who has room is done a whole layer of a faster one before the slowest is.
    slowest_s = max((n - 1) * s for n, s in zip(amounts, seconds, strict=True) if n)
    assert all(n == c or (n + 1) * s >= slowest_s for n, c, s in zip(amounts, capacities, seconds, strict=True))


def test_water_filling_of_a_fast_and_a_slow_node() -> None:
    assert water_fill((40, 40), (0.001, 0.003), 40) == [30, 10]
    assert water_fill((20, 40), (0.001, 0.003), 40) == [20, 20]


def test_placement_is_near_the_best_there_is() -> None:
    shares = []
    for seed in range(24):
        hosts, plane = random_swarm(4, seed, capacities=(2, 4))
        task = work(5)
        rate = SwarmRate(hosts, task, plane)
        options = [windows(h.capacity_layers, task) for h in hosts]
        best = max((rate.worth(c) for c in itertools.product(*options)), key=lambda w: (w.num_covered, w.tokens_per_s))
        placed = place_all(hosts, task, plane).after
        assert placed.num_covered == best.num_covered, seed
        shares.append(placed.tokens_per_s / best.tokens_per_s)
    assert statistics.median(shares) >= 0.95
    assert min(shares) >= 0.75


def test_nodes_that_join_one_by_one_cover_more_than_by_counting_holders() -> None:
    gains = []
    for seed in SEEDS:
        hosts, plane = random_swarm(8, seed, capacities=(3, 8))
        task = work(12)
        counted: list[Host] = []
        chosen: list[Host] = []
        for joiner in hosts:
            holders = holders_per_layer([h.held for h in counted], 12)
            held = min(windows(joiner.capacity_layers, task), key=lambda w: (sum(holders[w.start : w.stop]), w.start))
            counted.append(replace(joiner, held=held))
            chosen.append(replace(joiner, held=choose_range(joiner, chosen, task, plane).layers))
        rate = SwarmRate(hosts, task, plane)
        ours, theirs = (rate.worth([h.held for h in each]) for each in (chosen, counted))
        assert ours.num_covered >= theirs.num_covered, seed
        gains.append(ours.tokens_per_s / theirs.tokens_per_s)
    assert statistics.median(gains) >= 1.0


@pytest.mark.parametrize("seed", SEEDS)
def test_coverage_never_falls_when_all_decide_at_once(seed: int) -> None:
    rng = random.Random(seed)
    hosts, plane = random_swarm(7, seed, capacities=(2, 6))
    task, policy = work(12), Policy(min_gain=0.0, min_dwell_s=0.0)
    hosts = [replace(h, held=rng.choice(windows(h.capacity_layers, task)), is_ready=rng.random() < 0.8) for h in hosts]
    held = [h.held for h in hosts if h.is_ready]
    decided = [choose_range(h, hosts, task, plane, policy) for h in hosts]
    # Whoever was loading may never get there: only those that were ready are counted, before and after.
    after = [d.layers for d, h in zip(decided, hosts, strict=True) if h.is_ready]
    for before, now in zip(holders_per_layer(held, 12), holders_per_layer(after, 12), strict=True):
        assert now or not before


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_of_a_whole_swarm_take_no_last_holder_away(seed: int) -> None:
    """Whatever part of what was decided has been carried out, in whatever order."""
    rng = random.Random(seed)
    hosts, plane = random_swarm(7, seed, capacities=(2, 6))
    task = work(12)
    hosts = [replace(h, held=rng.choice([None, *windows(h.capacity_layers, task)])) for h in hosts]
    placed = place_all(hosts, task, plane, Policy(min_gain=0.0, min_dwell_s=0.0))
    done = [d if rng.random() < 0.5 else None for d in placed.decisions]
    after = [h.held if d is None else d.layers for h, d in zip(hosts, done, strict=True)]
    present = holders_per_layer([h.held for h in hosts], 12)
    for before, now in zip(present, holders_per_layer(after, 12), strict=True):
        assert now or not before
    assert placed.after.num_covered >= placed.before.num_covered
    assert {move.peer for move in placed.deferred} <= {d.peer for d in placed.decisions if isinstance(d, Stay)}


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_moves_for_less_than_the_gain(seed: int) -> None:
    rng = random.Random(seed)
    hosts, plane = random_swarm(6, seed, capacities=(3, 8))
    task, policy = work(12), Policy(min_gain=0.3, min_dwell_s=0.0)
    hosts = [replace(h, held=rng.choice(windows(h.capacity_layers, task))) for h in hosts]
    rate = SwarmRate(hosts, task, plane)
    before = rate.worth([h.held for h in hosts])
    for index, own in enumerate(hosts):
        decision = choose_range(own, hosts, task, plane, policy)
        if isinstance(decision, Move):
            after = rate.worth([decision.layers if i == index else h.held for i, h in enumerate(hosts)])
            assert (after.num_covered, after.tokens_per_s) >= (before.num_covered, 1.299 * before.tokens_per_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leave_makes_nobody_move_while_every_layer_is_held(seed: int) -> None:
    hosts, plane = random_swarm(6, seed, capacities=(4, 8), cities=(0.0,))
    task = work(12)
    placed = carried_out(hosts, place_all(hosts, task, plane).decisions)
    for gone in placed:
        left = [h for h in placed if h is not gone]
        counts = holders_per_layer([h.held for h in left], 12)
        rate = SwarmRate(left, task, plane)
        before = rate.worth([h.held for h in left])
        for move in moves([choose_range(h, left, task, plane) for h in left]):
            after = rate.worth([move.layers if h.peer == move.peer else h.held for h in left])
            assert not all(counts) or after.tokens_per_s >= 1.24 * before.tokens_per_s


def test_a_node_does_not_move_before_it_has_stayed() -> None:
    low = _below(PeerId("own"))
    others = [host(low, 6, (0, 6)), host("c", 6, (6, 12), layer_s=0.01)]
    own, policy = host("own", 6, (0, 6)), Policy(min_gain=0.1, min_dwell_s=60.0)
    early, late = (choose_range(replace(own, held_for_s=s), others, work(12), NEAR, policy) for s in (59.0, 61.0))
    assert early == Stay(own.peer, own.held, "it has held its layers for 59 s only")
    assert late.layers == LayerRange(6, 12)


def test_a_move_names_only_what_is_new() -> None:
    own = replace(host("own", 6, (0, 6)), load_Bps=1e6)
    chosen = choose_range(own, [replace(host("b", 3, (0, 3)), peer=_below(own.peer))], work(9), NEAR)
    assert isinstance(chosen, Move)
    assert (chosen.layers, chosen.load, chosen.drop) == (LayerRange(3, 9), (LayerRange(6, 9),), (LayerRange(0, 3),))
    assert (chosen.load_bytes, chosen.load_s) == (3_000_000, pytest.approx(3.0))


def _below(peer: PeerId) -> PeerId:
    """A peer whose digest is lower."""
    return next(p for i in range(1000) if digest(p := PeerId(f"peer-{i}")) < digest(peer))


def test_a_move_that_would_not_pay_back_is_not_made() -> None:
    """The same move, with weights that take a minute and with weights that take a month to load."""
    plane = Plane({PeerId("own"): (0.0, 0.0)})
    low = _below(PeerId("own"))
    others = [host(low, 6, (0, 6)), host("c", 6, (6, 12), layer_s=0.01)]
    own = host("own", 6, (0, 6))
    quick, slow = (
        choose_range(replace(own, load_Bps=Bps), others, work(12), plane, Policy(min_gain=0.1)) for Bps in (1e7, 2.0)
    )
    assert isinstance(quick, Move)
    assert isinstance(slow, Stay)
    assert "pay back" in slow.reason


def test_pinned_nodes_are_never_moved() -> None:
    pinned = replace(host("own", 6, (0, 6)), is_pinned=True)
    assert isinstance(choose_range(pinned, [host("a", 6, (0, 6))], work(12), NEAR), Stay)
    placed = place_all([pinned, host("a", 6, (0, 6))], work(12), NEAR)
    assert placed.decisions[0].layers == LayerRange(0, 6)
    assert placed.decisions[1].layers == LayerRange(6, 12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_liar_attracts_and_repels_nobody(seed: int) -> None:
    """What others do does not depend on how absurd a claim is, and hardly on whether there is one."""
    hosts, plane = random_swarm(6, seed, capacities=(4, 8))
    task = work(12)
    placed = carried_out(hosts, place_all(hosts, task, plane).decisions)
    joiner = host("joiner", 5)
    for claim in (1e-12, 0.0, -1.0, float("inf"), float("nan")):
        liar = replace(placed[0], seconds_per_layer=claim)
        modest = replace(placed[0], seconds_per_layer=1e-5 if claim == 1e-12 else 50.0)
        with_liar, with_modest = (
            choose_range(joiner, [first, *placed[1:]], task, plane).layers for first in (liar, modest)
        )
        if claim in (1e-12, float("inf")):
            assert with_liar == with_modest
        assert with_liar is not None


def test_layers_outside_the_model_are_not_held() -> None:
    others = [host("a", 6, (6, 40))]
    assert choose_range(host("own", 6), others, work(12), NEAR).layers in (LayerRange(0, 6), LayerRange(6, 12))
    assert place_all(others, work(12), NEAR).before.num_covered == 0


def test_the_keeper_is_the_ready_holder_with_the_lowest_digest() -> None:
    names = sorted((f"peer-{i}" for i in range(5)), key=lambda name: digest(PeerId(name)))
    low, middle, high = (host(name, 4, (0, 4)) for name in (names[0], names[2], names[4]))
    assert kept_layers(low, [middle, high], 12) == frozenset(range(4))
    assert kept_layers(high, [low, middle], 12) == frozenset()
    assert kept_layers(middle, [replace(low, is_ready=False), high], 12) == frozenset(range(4))
    assert kept_layers(replace(low, is_ready=False), [], 12) == frozenset()


_PLACE = """
from tests.core.placement_swarms import random_swarm, work
from scheduler.placement import place_all
hosts, plane = random_swarm(40, 7, capacities=(4, 20))
print(place_all(hosts, work(40), plane))
"""


def test_the_answer_is_the_same_in_every_process() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", _PLACE], check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(answers) == 1


def test_a_placed_swarm_is_left_alone() -> None:
    for seed in range(8):
        hosts, plane = random_swarm(12, seed, capacities=(4, 12))
        task = work(24)
        placed = carried_out(hosts, place_all(hosts, task, plane).decisions)
        assert moves(place_all(placed, task, plane).decisions) == []


def test_hundreds_of_nodes_are_placed_and_cover_everything() -> None:
    hosts, plane = random_swarm(300, 3, capacities=(4, 20))
    placed = place_all(hosts, work(80), plane)
    assert placed.after.num_covered == 80
    assert isinstance(choose_range(host("joiner", 10), carried_out(hosts, placed.decisions), work(80), plane), Move)


@dataclass
class BulkPlane(Plane):
    """The same legs, of all pairs of hosts in one call; asked one by one only for those of the users."""

    num_calls: int = 0

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        assert sender is None or receiver is None
        return super().leg(sender, receiver)

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        self.num_calls += 1
        legs = [[Plane.leg(self, a, b) for b in receivers] for a in senders]
        one_way_s, rates_Bps = (
            [[getattr(leg, name) or np.inf for leg in row] for row in legs] for name in ("one_way_s", "rate_Bps")
        )
        return np.array(one_way_s), np.array(rates_Bps)


@pytest.mark.parametrize("seed", range(6))
def test_legs_that_are_told_all_at_once_give_the_same_placement(seed: int) -> None:
    hosts, plane = random_swarm(20, seed, capacities=(4, 12))
    at_once = BulkPlane(plane.at, plane.up_Bps)
    placed = place_all(hosts, work(24), at_once)
    assert placed == place_all(hosts, work(24), plane)
    assert at_once.num_calls == 1
    others = carried_out(hosts, placed.decisions)
    joiner = host("joiner", 6)
    assert choose_range(joiner, others, work(24), at_once) == choose_range(joiner, others, work(24), plane)


def test_legs_of_very_many_hosts_are_asked_for_in_parts() -> None:
    hosts, plane = random_swarm(MAX_AT_ONCE + 1, 1, capacities=(24, 24))
    at_once = BulkPlane(plane.at, plane.up_Bps)
    rate = SwarmRate(hosts, work(24), at_once)
    assert at_once.num_calls == 0
    assert (rate.between_s([3, 4], [5, 3]) == SwarmRate(hosts, work(24), plane).between_s([3, 4], [5, 3])).all()
    rate.between_s([4, 3], [3, 5])
    assert at_once.num_calls == 1
