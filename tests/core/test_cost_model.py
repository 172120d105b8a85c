"""What a route is expected to cost: by hand, and in parts that add up to it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from fusion_node.types import LayerRange
from scheduler.cost_model import MESSAGE_OVERHEAD_S, MIN_SECONDS_PER_LAYER, RouteCost, Workload, route_cost
from scheduler.topology import Candidate, LegSource, RouteStage
from tests.planning import TableLegs, all_routes, node, random_swarm


def cost_of(nodes: Sequence[Candidate], legs: TableLegs, work: Workload) -> RouteCost:
    """Of the nodes in order, each with all that it holds."""
    return route_cost([(c, RouteStage(c.peer, c.layers)) for c in nodes], legs, work)


AB = (node("a", 0, 10, speed=0.001, wide=0.002, queue_s=0.004), node("b", 10, 30, speed=0.002, wide=0.003))
LEGS = TableLegs(
    one_way_s={(None, "a"): 0.01, ("a", "b"): 0.02, ("b", None): 0.03, (None, "b"): 0.04, ("a", None): 0.05},
    rate_Bps={(None, "a"): 1e6, ("a", "b"): 1e5, ("b", None): 2e6},
)


def test_a_step_takes_every_leg_every_queue_every_layer_and_the_users_part() -> None:
    cost = cost_of(AB, LEGS, Workload(100, row_bytes=1000, user_step_s=0.005))
    legs = 0.01 + 0.02 + 0.03 + 1000 / 1e6 + 1000 / 1e5 + 1000 / 2e6 + 3 * MESSAGE_OVERHEAD_S
    assert cost.seconds_per_step == pytest.approx(legs + 0.004 + 10 * 0.001 + 20 * 0.002 + 0.005)
    assert [leg.source for leg in cost.legs] == [LegSource.MEASURED] * 3
    assert [(leg.sender, leg.receiver) for leg in cost.legs] == [(None, "a"), ("a", "b"), ("b", None)]


def test_a_tree_costs_its_rows_on_every_leg_but_commits_several_tokens() -> None:
    work = Workload(100, row_bytes=1000, step_rows=16, tokens_per_step=3.0, returned_rows=4)
    cost = cost_of(AB, LEGS, work)
    assert [leg.payload_s for leg in cost.legs] == pytest.approx([16_000 / 1e6, 16_000 / 1e5, 4_000 / 2e6])
    assert [stage.compute_s for stage in cost.stages] == pytest.approx([10 * 0.002, 20 * 0.003])
    assert cost.seconds_per_token == pytest.approx(cost.seconds_per_step / 3)


def test_the_session_is_open_when_the_farthest_stage_has_answered() -> None:
    assert cost_of(AB, LEGS, Workload(100)).opening_s == pytest.approx(0.04 + 0.03 + 2 * MESSAGE_OVERHEAD_S)


def test_without_a_prompt_the_first_token_takes_a_step() -> None:
    cost = cost_of(AB, LEGS, Workload(100, row_bytes=1000, user_step_s=0.005))
    assert cost.time_to_first_token_s == pytest.approx(cost.seconds_per_step)


def flow_shop_s(times_s: Sequence[float], num_jobs: int) -> float:
    """When the last of equal jobs leaves the last machine, each of which does one at a time, in order."""
    done = [0.0] * len(times_s)
    for _ in range(num_jobs):
        before = 0.0
        for machine, time_s in enumerate(times_s):
            before = done[machine] = max(before, done[machine]) + time_s
    return done[-1]


@pytest.mark.parametrize("prompt_tokens", [1, 256, 257, 2000])
def test_chunks_of_a_prompt_follow_one_another_as_jobs_through_a_flow_shop(prompt_tokens: int) -> None:
    work = Workload(100, prompt_tokens=prompt_tokens, row_bytes=1000, user_prefill_s=0.02)
    cost = cost_of(AB, LEGS, work)
    rows = work.chunk_rows
    per_layer = [c.speed.seconds_per_layer(rows) for c in AB]
    machines = [rows * 1000 / 1e6, 0.004 + 10 * per_layer[0], rows * 1000 / 1e5, 20 * per_layer[1]]
    on_the_way = 0.01 + 0.02 + 0.03 + 3 * MESSAGE_OVERHEAD_S + 1000 / 2e6
    assert cost.time_to_first_token_s == pytest.approx(0.02 + on_the_way + flow_shop_s(machines, work.num_chunks))


def test_a_full_route_gives_what_its_slowest_stage_lets_through() -> None:
    cost = cost_of(AB, TableLegs(default_s=0.0001), Workload(100, concurrency=64, tokens_per_step=2.0))
    per_layer_s = 0.003 + (0.003 * 16 - 0.003) * (64 - 16) / 240
    assert cost.bottleneck == "stage 2"
    assert cost.tokens_per_s == pytest.approx(2.0 * 64 / (20 * per_layer_s))


def test_a_full_route_gives_no_more_than_its_slowest_leg_carries() -> None:
    cost = cost_of(AB, LEGS, Workload(100, row_bytes=10_000, concurrency=64))
    assert cost.bottleneck == "leg to stage 2"
    assert cost.tokens_per_s == pytest.approx(1e5 / 10_000)


def test_few_sessions_on_a_long_way_do_not_fill_a_route() -> None:
    cost = cost_of(AB, LEGS, Workload(100, concurrency=2))
    assert cost.bottleneck == "round trip"
    assert cost.tokens_per_s == pytest.approx(2 / cost.seconds_per_step)


def test_a_claim_of_no_time_at_all_is_not_believed() -> None:
    cost = cost_of([node("liar", 0, 30, speed=0.0)], LEGS, Workload(100))
    assert cost.stages[0].compute_s == pytest.approx(30 * MIN_SECONDS_PER_LAYER)


def test_a_leg_on_which_nothing_moves_is_slow_and_not_an_error() -> None:
    legs = TableLegs(rate_Bps={(None, "a"): 0.0})
    assert cost_of([node("a", 0, 30)], legs, Workload(100, row_bytes=1000)).legs[0].payload_s == 1000


@pytest.mark.parametrize(
    "wrong", [{"tokens_per_step": 0.0}, {"step_rows": 0}, {"concurrency": 0}, {"prefill_chunk_rows": 0}]
)
def test_a_workload_without_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a step has rows"):
        Workload(100, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_of_a_cost_add_up_to_it(seed: int) -> None:
    rng = random.Random(seed)
    nodes, legs = random_swarm(rng, 5, 5)
    work = Workload(100, prompt_tokens=300, row_bytes=1e4, tokens_per_step=2.0, user_step_s=0.002)
    for route in itertools.islice(all_routes(nodes, 5), 50):
        cost = route_cost(route, legs, work)
        parts = [leg.one_way_s + leg.payload_s + leg.overhead_s for leg in cost.legs]
        parts += [stage.queue_s + stage.compute_s for stage in cost.stages]
        assert cost.seconds_per_token * 2.0 == pytest.approx(sum(parts) + 0.002)
        assert len(cost.legs) == len(cost.stages) + 1 == len(route) + 1
        assert [stage.stage.layers for stage in cost.stages] == [stage.layers for _, stage in route]
        assert sum(len(stage.stage.layers) for stage in cost.stages) == len(LayerRange(0, 5))
