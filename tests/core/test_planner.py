"""The planner: what it chooses, what it says about it, and that neither breaks a rule."""

from __future__ import annotations

import random

import pytest

from fusion_node.types import LayerRange, PeerId
from scheduler.cost_model import Workload
from scheduler.planner import as_ranges, plan_patch, plan_route, uncovered_layers
from scheduler.plans import Avoid, Objective, Planned, Reason, Uncovered
from scheduler.rules import Rules
from scheduler.topology import Candidate, RouteStage
from tests.planning import TableLegs, exhaustive, keeps, node, random_swarm, value_of

WORK = Workload(num_positions=100)


def plan(
    *nodes: Candidate,
    legs: TableLegs | None = None,
    layers: int = 30,
    work: Workload = WORK,
    objective: Objective = Objective.LATENCY,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    **options: object,
) -> Planned | Uncovered:
    return plan_route(
        nodes,
        legs or TableLegs(),
        num_layers=layers,
        workload=work,
        objective=objective,
        rules=rules,
        **options,  # type: ignore[arg-type]
    )


def planned(*nodes: Candidate, **options: object) -> Planned:
    found = plan(*nodes, **options)  # type: ignore[arg-type]
    assert isinstance(found, Planned)
    return found


def stages(found: Planned) -> list[tuple[str, str]]:
    return [(stage.peer, str(stage.layers)) for stage in found.route]


def reason(found: Planned | Uncovered, peer: str) -> Reason:
    (rejection,) = (r for r in found.rejections if r.peer == peer)
    return rejection.reason


THIRDS = (node("a", 0, 10), node("b", 10, 20), node("c", 20, 30))


def test_three_thirds_make_a_route_in_order() -> None:
    assert stages(planned(*reversed(THIRDS))) == [("a", "0:10"), ("b", "10:20"), ("c", "20:30")]


def test_one_node_that_holds_everything_beats_three() -> None:
    assert stages(planned(*THIRDS, node("whole", 0, 30))) == [("whole", "0:30")]


def test_near_nodes_win_over_far_ones() -> None:
    legs = TableLegs().far("far", 0.5)
    assert stages(planned(node("far", 0, 30), node("a", 0, 15), node("b", 15, 30), legs=legs)) == [
        ("a", "0:15"),
        ("b", "15:30"),
    ]


def test_legs_between_nodes_decide_when_those_to_the_user_are_alike() -> None:
    legs = TableLegs(one_way_s={("a", "near"): 0.001, ("a", "far"): 0.08})
    assert stages(planned(node("a", 0, 15), node("far", 15, 30), node("near", 15, 30), legs=legs))[1][0] == "near"


def test_the_way_back_to_the_user_counts() -> None:
    legs = TableLegs(one_way_s={("far", None): 0.2})
    assert stages(planned(node("a", 0, 15), node("far", 15, 30), node("near", 15, 30), legs=legs))[1][0] == "near"


def test_a_slow_uplink_counts_with_the_bytes_that_have_to_pass_it() -> None:
    legs = TableLegs(rate_Bps={("slow", None): 1e5, ("fast", None): 1e8}, one_way_s={("fast", None): 0.05})
    nodes = (node("slow", 0, 30), node("fast", 0, 30))
    assert stages(planned(*nodes, legs=legs, work=Workload(100, row_bytes=100)))[0][0] == "slow"
    assert stages(planned(*nodes, legs=legs, work=Workload(100, row_bytes=16_384)))[0][0] == "fast"


def test_a_wide_step_prefers_the_node_that_is_fast_at_that_width() -> None:
    nodes = (node("narrow", 0, 30, speed=0.001, wide=0.02), node("wide", 0, 30, speed=0.002, wide=0.003))
    assert stages(planned(*nodes))[0][0] == "narrow"
    assert stages(planned(*nodes, work=Workload(100, step_rows=16)))[0][0] == "wide"


def test_a_queue_counts() -> None:
    assert stages(planned(node("a", 0, 30, queue_s=0.05), node("b", 0, 30, speed=0.002)))[0][0] == "b"


def test_overlapping_nodes_are_entered_inside_their_range() -> None:
    assert stages(planned(node("a", 0, 20, speed=0.001), node("b", 10, 30, speed=0.01))) == [
        ("a", "0:20"),
        ("b", "20:30"),
    ]


def test_a_slow_node_serves_only_what_others_do_not_hold() -> None:
    found = planned(node("slow", 0, 30, speed=0.05), node("fast", 10, 30, speed=0.001))
    assert stages(found) == [("slow", "0:10"), ("fast", "10:30")]


def test_nodes_change_only_where_the_model_lets_a_range_begin() -> None:
    nodes = (node("a", 0, 20, speed=0.001), node("b", 9, 30, speed=0.01))
    found = planned(*nodes, first_layers=frozenset({0, 12, 18, 24}))
    assert stages(found) == [("a", "0:18"), ("b", "18:30")]


def test_layers_that_no_node_holds_together_are_missing_where_a_range_cannot_begin_between_them() -> None:
    nodes = (node("a", 0, 14), node("b", 14, 30), node("c", 13, 16))
    gap = plan(*nodes, first_layers=frozenset({0, 12, 18, 24}))
    assert gap == Uncovered((LayerRange(12, 18),))
    assert reason(gap, "c") is Reason.OUTSIDE


def test_missing_layers_are_named() -> None:
    gap = plan(node("a", 0, 10), node("c", 22, 29))
    assert gap == Uncovered((LayerRange(10, 22), LayerRange(29, 30)))
    assert {reason(gap, "a"), reason(gap, "c")} == {Reason.NO_WAY}


def test_layers_held_only_without_room_are_named_apart() -> None:
    gap = plan(node("a", 0, 10), node("b", 10, 20, room=5), node("c", 20, 30))
    assert gap == Uncovered((LayerRange(10, 20),), without_room=(LayerRange(10, 20),))
    assert reason(gap, "b") is Reason.NO_ROOM


def test_layers_held_only_by_those_whom_the_user_rejects_are_named_apart() -> None:
    gap = plan(*THIRDS, node("d", 8, 14, room=5), rules=Rules(deny_peers=frozenset({PeerId("b")})))
    assert gap == Uncovered((LayerRange(10, 20),), (LayerRange(10, 14),), (LayerRange(14, 20),))
    assert reason(gap, "b") is Reason.RULE


def test_no_nodes_at_all_leaves_every_layer_uncovered() -> None:
    assert plan() == Uncovered((LayerRange(0, 30),))


def test_a_claim_of_infinite_speed_does_not_beat_a_shorter_round_trip() -> None:
    legs = TableLegs().far("liar", 0.1)
    assert (
        stages(planned(node("liar", 0, 30, speed=0.0), node("honest", 0, 30, speed=0.003), legs=legs))[0][0] == "honest"
    )


def test_a_range_beyond_the_model_attracts_nobody() -> None:
    found = planned(*THIRDS, node("liar", 0, 4000, speed=0.0))
    assert reason(found, "liar") is Reason.OUTSIDE


def test_ranges_of_one_peer_that_touch_are_one_and_separate_ones_make_no_wrong_route() -> None:
    found = planned(node("p", 0, 10), node("p", 10, 20), node("q", 20, 30))
    assert stages(found) == [("p", "0:20"), ("q", "20:30")]
    gap = plan(node("p", 0, 10), node("q", 10, 20), node("p", 20, 30))
    assert gap == Uncovered((LayerRange(0, 30),))
    assert isinstance(gap, Uncovered)
    assert gap.is_proven


def test_a_node_that_cannot_be_reached_is_told_so() -> None:
    legs = TableLegs().far("gone", float("inf"))
    assert reason(planned(*THIRDS, node("gone", 0, 30), legs=legs), "gone") is Reason.UNREACHABLE


def test_two_nodes_between_which_no_way_leads_do_not_follow_one_another() -> None:
    legs = TableLegs(one_way_s={("a", "b"): float("inf")})
    found = planned(*THIRDS, node("d", 10, 20, speed=0.0011), legs=legs)
    assert [peer for peer, _ in stages(found)] == ["a", "d", "c"]
    assert isinstance(plan(*THIRDS, legs=legs), Uncovered)


@pytest.mark.parametrize("pair", [("a", "b"), ("b", "a")])
def test_a_pair_to_avoid_does_not_hand_over_in_either_direction(pair: tuple[str, str]) -> None:
    avoid = Avoid(pairs=frozenset({(PeerId(pair[0]), PeerId(pair[1]))}))
    found = planned(*THIRDS, node("d", 10, 20, speed=0.0011), avoid=avoid)
    assert [peer for peer, _ in stages(found)] == ["a", "d", "c"]
    assert isinstance(plan(*THIRDS, avoid=avoid), Uncovered)


def test_a_peer_to_avoid_serves_nothing() -> None:
    found = planned(*THIRDS, node("d", 10, 20, speed=0.05), avoid=Avoid(peers=frozenset({PeerId("b")})))
    assert [peer for peer, _ in stages(found)] == ["a", "d", "c"]
    assert reason(found, "b") is Reason.AVOIDED


def test_no_operator_has_two_shards_when_the_user_says_so() -> None:
    nodes = (node("a", 0, 15, operator="x"), node("b", 15, 30, operator="x"), node("c", 15, 30, speed=0.01))
    assert [p for p, _ in stages(planned(*nodes))] == ["a", "b"]
    found = planned(*nodes, rules=Rules(one_shard_per_operator=True))
    assert [p for p, _ in stages(found)] == ["a", "c"]
    assert reason(found, "b") is Reason.RULE
    assert "operator" in next(r.text for r in found.rejections if r.peer == "b")


def test_nodes_that_name_no_operator_are_not_one_operator() -> None:
    assert len(planned(*THIRDS, rules=Rules(one_shard_per_operator=True)).route) == 3


def test_the_price_of_a_route_stays_within_what_the_user_pays() -> None:
    nodes = (node("dear", 0, 30, price=2.0), node("cheap", 0, 30, speed=0.01, price=0.5))
    assert stages(planned(*nodes, rules=Rules(max_route_price=60.0)))[0][0] == "dear"
    mixed = planned(*nodes, rules=Rules(max_route_price=30.0)).route
    assert {stage.peer: len(stage.layers) for stage in mixed} == {"cheap": 20, "dear": 10}
    assert stages(planned(*nodes, rules=Rules(max_route_price=15.0)))[0][0] == "cheap"
    assert isinstance(plan(*nodes, rules=Rules(max_route_price=14.0)), Uncovered)


def test_a_route_has_no_more_stages_than_the_user_allows() -> None:
    nodes = (*THIRDS, node("d", 0, 15, speed=0.01), node("e", 15, 30, speed=0.01))
    assert len(planned(*nodes).route) == 3
    assert len(planned(*nodes, rules=Rules(max_stages=2)).route) == 2
    assert isinstance(plan(*nodes, rules=Rules(max_stages=1)), Uncovered)


def test_throughput_spreads_layers_where_latency_keeps_them_together() -> None:
    nodes = (node("whole", 0, 30, wide=0.02), node("a", 0, 15, wide=0.01), node("b", 15, 30, wide=0.01))
    legs = TableLegs(default_s=0.001)
    assert len(planned(*nodes, legs=legs).route) == 1
    wide = planned(*nodes, legs=legs, objective=Objective.THROUGHPUT)
    assert len(wide.route) > 1
    assert wide.cost.tokens_per_s > planned(*nodes, legs=legs).cost.tokens_per_s


def test_the_first_token_of_a_long_prompt_wants_its_chunks_spread_over_stages() -> None:
    nodes = (node("whole", 0, 30), node("a", 0, 15), node("b", 15, 30))
    legs = TableLegs(default_s=0.03)
    for prompt_tokens, num_stages in ((10, 1), (20_000, 3)):
        work = Workload(100, prompt_tokens=prompt_tokens)
        assert len(planned(*nodes, legs=legs, work=work, objective=Objective.FIRST_TOKEN).route) == num_stages


def test_every_stage_says_why_it_was_chosen_and_what_would_replace_it() -> None:
    found = planned(*THIRDS, node("d", 10, 20, speed=0.003), node("e", 10, 15), node("f", 15, 20))
    assert found.alternates[0] is None
    assert found.alternates[1] is not None
    assert [(s.peer, str(s.layers)) for s in found.alternates[1].stages] == [("e", "10:15"), ("f", "15:20")]
    assert found.alternates[1].excess_s == pytest.approx(0.011)  # one more leg and message
    assert found.reasons[0] == "nobody else may serve 0:10"
    assert "e 10:15 → f 15:20, 11 ms per token slower" in found.reasons[1]
    assert [r.excess_s for r in found.rejections] == [
        pytest.approx(0.013),  # one layer, and a leg and a message for it
        pytest.approx(0.011),
        pytest.approx(0.011),
    ]
    assert all(any(stage.peer == r.peer for stage in r.via) for r in found.rejections)


def test_what_is_known_against_a_node_is_said_with_it() -> None:
    found = planned(*THIRDS, node("d", 10, 20, speed=0.01, note="three times slower than it claims"))
    assert "three times slower than it claims" in found.rejections[0].text


def test_a_patch_replaces_lost_stages_and_nothing_else() -> None:
    route = planned(*THIRDS).route
    others = (node("fast", 0, 30, speed=0.0001), node("d", 12, 20), node("e", 10, 12))
    patch = plan_patch([*THIRDS, *others], TableLegs(), route, {1}, num_layers=30, workload=WORK)
    assert isinstance(patch, Planned)
    assert stages(patch) == [("a", "0:10"), ("fast", "10:20"), ("c", "20:30")]
    several = plan_patch([*THIRDS, *others[1:]], TableLegs(), route, {1}, num_layers=30, workload=WORK)
    assert isinstance(several, Planned)
    assert stages(several) == [("a", "0:10"), ("e", "10:12"), ("d", "12:20"), ("c", "20:30")]


@pytest.mark.parametrize(("rows", "tokens", "chosen"), [(0, 1, "cpu"), (5000, 50, "gpu"), (5000, 100_000, "cpu")])
def test_a_patch_counts_what_the_replay_takes_over_the_tokens_that_follow(rows: int, tokens: int, chosen: str) -> None:
    """A node next door that takes five minutes for 5,000 rows, and one far away that takes five seconds."""
    route = planned(*THIRDS).route
    others = (node("cpu", 10, 20, speed=0.001, wide=0.1), node("gpu", 10, 20, speed=0.001, wide=0.0015))
    legs = TableLegs(one_way_s={("a", "gpu"): 0.05, ("gpu", "c"): 0.05})
    work = Workload(num_positions=100, replay_rows=rows, replay_tokens=tokens)
    patch = plan_patch([*THIRDS, *others], legs, route, {1}, num_layers=30, workload=work)
    assert isinstance(patch, Planned)
    assert stages(patch)[1] == (chosen, "10:20")
    alone = plan_route([*THIRDS[::2], *(c for c in others if c.peer == chosen)], legs, num_layers=30, workload=WORK)
    assert isinstance(alone, Planned)
    assert patch.cost.seconds_per_token == pytest.approx(alone.cost.seconds_per_token)


def test_a_patch_counts_the_way_of_the_rows_so_far() -> None:
    route = planned(*THIRDS).route
    others = (node("slow line", 10, 20, wide=0.0015), node("fast line", 10, 20, speed=0.0012, wide=0.0015))
    legs = TableLegs(rate_Bps={("a", "slow line"): 1e5})
    for rows, chosen in ((0, "slow line"), (1000, "fast line")):
        work = Workload(num_positions=100, row_bytes=10, replay_rows=rows, replay_tokens=10)
        patch = plan_patch([*THIRDS, *others], legs, route, {1}, num_layers=30, workload=work)
        assert isinstance(patch, Planned)
        assert stages(patch)[1] == (chosen, "10:20")


def test_a_patch_of_neighbours_may_put_one_node_in_the_place_of_both() -> None:
    route = planned(*THIRDS).route
    patch = plan_patch([*THIRDS, node("d", 5, 30)], TableLegs(), route, {1, 2}, num_layers=30, workload=WORK)
    assert isinstance(patch, Planned)
    assert stages(patch) == [("a", "0:10"), ("d", "10:30")]


def test_a_patch_of_stages_apart_keeps_what_stands_between() -> None:
    route = planned(*THIRDS).route
    nodes = [*THIRDS, node("d", 0, 30), node("e", 20, 30, speed=0.002)]
    patch = plan_patch(nodes, TableLegs(), route, {0, 2}, num_layers=30, workload=WORK)
    assert isinstance(patch, Planned)
    assert stages(patch) == [("d", "0:10"), ("b", "10:20"), ("e", "20:30")]


def test_stages_that_stay_are_asked_neither_for_room_nor_for_the_rules_and_need_no_record() -> None:
    route = planned(*THIRDS).route
    nodes = [node("a", 0, 10, room=0, region="us"), node("d", 0, 30)]  # of c nothing is known any more
    rules = Rules(deny_regions=frozenset({"us"}))
    patch = plan_patch(nodes, TableLegs(), route, {1}, num_layers=30, workload=WORK, rules=rules)
    assert isinstance(patch, Planned)
    assert stages(patch) == [("a", "0:10"), ("d", "10:20"), ("c", "20:30")]


def test_a_patch_that_nobody_can_serve_names_the_layers() -> None:
    route = planned(*THIRDS).route
    assert plan_patch(THIRDS, TableLegs(), route, {1}, num_layers=30, workload=WORK) == Uncovered((LayerRange(10, 20),))


def test_stages_that_stay_count_for_the_rules_on_the_whole_route() -> None:
    nodes = (node("a", 0, 15, operator="x"), node("b", 15, 30), node("c", 15, 30, operator="x"))
    route = planned(*nodes[:2]).route
    options = {"num_layers": 30, "workload": WORK, "rules": Rules(one_shard_per_operator=True)}
    assert isinstance(plan_patch(nodes, TableLegs(), route, {1}, **options), Uncovered)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", [Rules(one_shard_per_operator=True), Rules(max_route_price=15.5)])
def test_stages_that_stay_and_have_begun_to_move_still_count_for_the_rules(rules: Rules) -> None:
    moving, *others = (
        node("a", 0, 15, operator="x", price=1.0),
        node("b", 15, 30),
        node("c", 15, 30, operator="x", price=1.0),
        node("d", 15, 30, speed=0.005),
    )
    route = planned(moving, others[0]).route
    for candidates in (others, [node("a", 15, 20), *others]):  # it may announce what it is going to hold
        patch = plan_patch(
            candidates, TableLegs(), route, {1}, num_layers=30, workload=WORK, rules=rules, known=[moving]
        )
        assert isinstance(patch, Planned)
        assert stages(patch) == [("a", "0:15"), ("d", "15:30")]


WORKLOADS = (
    Workload(100),
    Workload(
        100, prompt_tokens=700, step_rows=8, tokens_per_step=2.5, row_bytes=1e4, returned_rows=1, user_step_s=0.003
    ),
    Workload(100, prompt_tokens=100, row_bytes=1e4, concurrency=4, user_prefill_s=0.01),
)

RULES = (
    Rules(),
    Rules(one_shard_per_operator=True),
    Rules(max_stages=2),
    Rules(max_route_price=5.0),
    Rules(one_shard_per_operator=True, max_stages=3, max_route_price=6.0, deny_regions=frozenset({"us"})),
)


@pytest.mark.parametrize("seed", range(40))
def test_small_swarms_are_planned_as_exhaustive_search_does(seed: int) -> None:
    rng = random.Random(seed)
    num_layers = rng.randrange(2, 7)
    nodes, legs = random_swarm(rng, rng.randrange(2, 6), num_layers)
    by_peer = {c.peer: c for c in nodes}
    for objective in Objective:
        rules, work = rng.choice(RULES), rng.choice(WORKLOADS)
        best = exhaustive(nodes, legs, num_layers, work, objective, rules)
        found = plan(*nodes, legs=legs, layers=num_layers, work=work, objective=objective, rules=rules)
        if best is None:
            assert isinstance(found, Uncovered)
            continue
        assert isinstance(found, Planned)
        route = [(by_peer[stage.peer], stage) for stage in found.route]
        assert keeps(rules, route)
        assert as_ranges([layer for s in found.route for layer in range(s.layers.start, s.layers.stop)]) == [
            LayerRange(0, num_layers)
        ]
        value = value_of(found.cost, objective)
        assert value >= best * (1 - 1e-9)
        assert best >= value - found.gap_s - 2e-8 * (1 + value)
        if found.is_optimal:
            assert value == pytest.approx(best, rel=1e-6, abs=2e-8)


@pytest.mark.parametrize("seed", range(20))
def test_alternates_are_the_best_that_exhaustive_search_finds_with_all_other_stages_kept(seed: int) -> None:
    rng = random.Random(1000 + seed)
    nodes, legs = random_swarm(rng, 5, 5)
    objective, work = rng.choice(list(Objective)), rng.choice(WORKLOADS)
    found = plan(*nodes, legs=legs, layers=5, work=work, objective=objective)
    if isinstance(found, Uncovered):
        return
    for place, alternate in enumerate(found.alternates):
        kept = [stage for index, stage in enumerate(found.route) if index != place]
        lost = found.route[place].peer

        def allows(
            route: list[tuple[Candidate, RouteStage]], kept: list[RouteStage] = kept, lost: PeerId = lost
        ) -> bool:
            stages = [stage for _, stage in route]
            return all(stage in stages for stage in kept) and all(stage.peer != lost for stage in stages)

        best = exhaustive(nodes, legs, 5, work, objective, Rules(), allows)  # type: ignore[arg-type]
        if best is None:
            assert alternate is None
        else:
            assert alternate is not None
            assert alternate.excess_s == pytest.approx(best - value_of(found.cost, objective), abs=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_every_candidate_serves_or_is_told_why_and_by_how_much_at_least(seed: int) -> None:
    rng = random.Random(2000 + seed)
    nodes, legs = random_swarm(rng, 6, 5)
    objective, work = rng.choice(list(Objective)), rng.choice(WORKLOADS)
    found = plan(*nodes, legs=legs, layers=5, work=work, objective=objective, rules=rng.choice(RULES))
    serving = {stage.peer for stage in found.route} if isinstance(found, Planned) else set()
    assert serving | {r.peer for r in found.rejections} == {c.peer for c in nodes}
    assert serving.isdisjoint(r.peer for r in found.rejections)
    assert all(r.text for r in found.rejections)
    for rejection in found.rejections if isinstance(found, Planned) else ():
        if rejection.excess_s is not None:

            def leads_through(route: list[tuple[Candidate, RouteStage]], peer: PeerId = rejection.peer) -> bool:
                return any(stage.peer == peer for _, stage in route)

            best = exhaustive(nodes, legs, 5, work, objective, Rules(), leads_through)  # type: ignore[arg-type]
            assert best is not None
            assert best - value_of(found.cost, objective) >= rejection.excess_s - 1e-7


@pytest.mark.parametrize("seed", [272, 365])
def test_the_only_route_within_a_price_is_found_however_much_slower_it_is(seed: int) -> None:
    # These were missed: for the first token of a long prompt, no rate of the price that was tried was high enough.
    rng = random.Random(seed)
    num_layers = rng.randrange(3, 7)
    nodes, legs = random_swarm(rng, rng.randrange(3, 7), num_layers)
    work = Workload(100, prompt_tokens=700, row_bytes=1e4, step_rows=rng.choice([1, 8]))
    rules = Rules(max_route_price=5.0)
    best = exhaustive(nodes, legs, num_layers, work, Objective.FIRST_TOKEN, rules)
    found = planned(*nodes, legs=legs, layers=num_layers, work=work, objective=Objective.FIRST_TOKEN, rules=rules)
    assert best is not None
    assert found.cost.time_to_first_token_s == pytest.approx(best, rel=0.2)


def test_that_no_route_is_cheap_enough_is_proven() -> None:
    dear = [node("d", 0, 30, price=1.0), node("e", 0, 30, price=2.0)]
    gap = plan(*dear, rules=Rules(max_route_price=29.0), objective=Objective.THROUGHPUT)
    assert isinstance(gap, Uncovered)
    assert gap.is_proven


def test_the_order_of_candidates_changes_nothing() -> None:
    rng = random.Random(5)
    nodes, legs = random_swarm(rng, 30, 12)
    first = plan(*nodes, legs=legs, layers=12)
    for _ in range(3):
        rng.shuffle(nodes)
        assert plan(*nodes, legs=legs, layers=12) == first


def test_of_very_many_candidates_the_nearest_and_fastest_are_searched_and_the_others_told() -> None:
    rng = random.Random(6)
    nodes, legs = random_swarm(rng, 60, 8)
    whole = planned(*nodes, legs=legs, layers=8)
    some = planned(*nodes, legs=legs, layers=8, max_candidates=20)
    assert whole.is_optimal
    assert not some.is_optimal
    assert some.num_unsearched == sum(r.reason is Reason.NOT_SEARCHED for r in some.rejections) == 40
    assert some.cost.seconds_per_token <= 1.5 * whole.cost.seconds_per_token


def test_a_search_that_is_bounded_is_within_a_twentieth_of_the_optimum_at_the_median() -> None:
    ratios = []
    for seed in range(10):
        rng = random.Random(3000 + seed)
        nodes, legs = random_swarm(rng, 40, 8, num_operators=12)
        rules = Rules(one_shard_per_operator=True, max_route_price=8.0)
        best = plan(*nodes, legs=legs, layers=8, rules=rules, is_explained=False)
        some = plan(*nodes, legs=legs, layers=8, rules=rules, is_explained=False, max_candidates=24)
        if isinstance(best, Planned):
            bound = best.cost.seconds_per_token - best.gap_s
            ratios.append(bound / some.cost.seconds_per_token if isinstance(some, Planned) else 0.0)
    assert len(ratios) >= 6
    assert sorted(ratios)[len(ratios) // 2] >= 0.95


def test_layers_are_counted_out_as_the_fewest_ranges() -> None:
    assert as_ranges([0, 1, 2, 5, 7, 8]) == [LayerRange(0, 3), LayerRange(5, 6), LayerRange(7, 9)]
    assert uncovered_layers([LayerRange(2, 4), LayerRange(3, 6)], 8) == [LayerRange(0, 2), LayerRange(6, 8)]
