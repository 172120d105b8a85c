"""Fusion groups in plans: who is in them, what they cost, and that all rules hold for each member."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fusion_node.slices import Dims, Exchange, exchange_width, split
from fusion_node.types import LayerRange, PeerId, group_id, members_of
from scheduler.cost_model import Workload, exchange_s_per_layer, route_cost, seconds_per_layer
from scheduler.groups import EXCHANGE_MESSAGE_S, MAX_SPLITS, MAX_WAYS, Formed, GroupLegs, SliceHolder, form_groups
from scheduler.planner import plan_patch, plan_route
from scheduler.plans import Avoid, Planned, Reason, Uncovered
from scheduler.rules import Rules
from scheduler.topology import Candidate, Legs, RouteStage
from tests.planning import TableLegs, node

DIMS = Dims(hidden=576, heads=9, kv_heads=3, head_dim=64, channels=1536)
WORK = Workload(num_positions=100, row_bytes=4 * 576)


def holder(
    name: str, index: int, weights: Sequence[int], start: int = 0, stop: int = 30, **more: object
) -> SliceHolder:
    return SliceHolder(node(name, start, stop, **more), index, tuple(weights))  # type: ignore[arg-type]


def formed(
    *holders: SliceHolder,
    legs: Legs | None = None,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    avoid: Avoid = Avoid(),  # noqa: B008 - frozen
    members: int | None = None,
    work: Workload = WORK,
    dims: Dims = DIMS,
) -> Formed:
    return form_groups(
        holders, legs or TableLegs(), dims=dims, workload=work, rules=rules, avoid=avoid, num_members=members
    )


def plan(
    found: Formed,
    *others: Candidate,
    legs: Legs | None = None,
    rules: Rules = Rules(),  # noqa: B008 - frozen
    avoid: Avoid = Avoid(),  # noqa: B008 - frozen
    layers: int = 30,
) -> Planned | Uncovered:
    return plan_route(
        [*others, *found.groups],
        GroupLegs(legs or TableLegs()),
        num_layers=layers,
        workload=WORK,
        rules=rules,
        avoid=avoid,
    )


def peers(found: Planned | Uncovered) -> list[tuple[tuple[str, ...], str]]:
    assert isinstance(found, Planned)
    return [(members_of(stage.peer), str(stage.layers)) for stage in found.route]


THREE = [holder(name, index, (1, 1, 1)) for index, name in enumerate("abc")]


def test_group_of_all_slices_serves_as_one_node_does() -> None:
    found = formed(*THREE)
    assert peers(plan(found)) == [(("a", "b", "c"), "0:30")]
    assert found.weights == {group_id([PeerId(name) for name in "abc"]): (1, 1, 1)}
    assert not found.missing


def test_missing_slice_is_told_with_its_layers_and_why() -> None:
    found = formed(THREE[0], holder("c", 2, (1, 1, 1), room=10))
    assert [(str(m.layers), m.index, m.weights, m.why) for m in found.missing] == [
        ("0:30", 1, (1, 1, 1), "held by nobody"),
        ("0:30", 2, (1, 1, 1), "held without room for the session"),
    ]
    denied = formed(*THREE, rules=Rules(deny_peers=frozenset({PeerId("b")})))
    assert [(m.index, m.why) for m in denied.missing] == [
        (1, "held by nobody whom your rules allow (1 × you deny this peer)")
    ]
    assert [(r.peer, r.reason, r.text) for r in denied.rejections] == [("b", Reason.RULE, "you deny this peer")]
    assert not found.groups
    assert not denied.groups


def test_members_option_takes_groups_of_that_size_and_no_others() -> None:
    holders = [*THREE, holder("x", 0, (1, 1)), holder("y", 1, (1, 1))]
    by_size = {n: {members_of(group.peer) for group in formed(*holders, members=n).groups} for n in (None, 2, 3, 4)}
    assert by_size[2] == {("x", "y")}
    assert by_size[3] == {("a", "b", "c")}
    assert by_size[4] == set()
    assert by_size[None] == by_size[2] | by_size[3]


def test_split_that_the_model_does_not_allow_forms_no_group_and_says_why() -> None:
    found = formed(*(holder(str(k), k, (1,) * 10) for k in range(10)))
    assert not found.groups
    assert found.rejections[0].text == "9 query heads cannot be split among 10 members: use fewer"


def test_group_is_as_slow_as_its_slowest_member_and_as_full_as_its_fullest() -> None:
    holders = [
        holder("a", 0, (1, 1), speed=0.001, queue_s=0.2, price=1.0, room=500),
        holder("b", 1, (1, 1), speed=0.003, queue_s=0.1, price=2.0, room=300, note="slower than it says"),
    ]
    [group] = formed(*holders).groups
    assert (group.speed.rows_1_s, group.queue_s, group.price, group.kv_free_positions) == (0.003, 0.2, 3.0, 300)
    assert "slower than it says" in group.note


@pytest.mark.parametrize("num_experts", [0, 8])
def test_exchanges_cost_the_longest_way_and_the_fullest_line_in_every_layer(num_experts: int) -> None:
    dims = replace(DIMS, num_experts=num_experts, experts_per_row=2 if num_experts else 0)
    legs = TableLegs(default_s=0.001, one_way_s={("a", "c"): 0.02}, rate_Bps={("b", "a"): 1e6, ("b", "c"): 2e6})
    [group] = formed(*THREE, legs=legs, dims=dims).groups
    bounds = split(dims, (1, 1, 1))
    kinds = [each for each in Exchange if num_experts or each is not Exchange.ROUTER]
    fixed_s = len(kinds) * (0.02 + 2 * 2 * EXCHANGE_MESSAGE_S)
    row_s = sum(
        4 * exchange_width(dims, bounds[0], each) / 1e6 + 4 * exchange_width(dims, bounds[2], each) / 2e6
        for each in kinds
    )
    assert exchange_s_per_layer(group, 1) == pytest.approx(fixed_s + row_s)
    assert exchange_s_per_layer(group, 256) == pytest.approx(fixed_s + 256 * row_s)
    assert seconds_per_layer(group, 1) == pytest.approx(0.001 + fixed_s + row_s)
    cost = route_cost([(group, RouteStage(group.peer, LayerRange(0, 30)))], GroupLegs(legs), WORK)
    assert cost.stages[0].exchange_s == pytest.approx(30 * (fixed_s + row_s))
    assert cost.stages[0].seconds == pytest.approx(30 * (0.001 + fixed_s + row_s))
    # While members wait for one another they compute for others.
    assert cost.stages[0].busy_s < cost.stages[0].exchange_s


@pytest.mark.parametrize("seed", range(12))
def test_chosen_group_is_the_best_of_all_ways(seed: int) -> None:
    rng = random.Random(seed)
    holders = [
        holder(f"n{k}{number}", k, (1, 1, 1), speed=rng.uniform(0.001, 0.01), queue_s=rng.uniform(0, 0.1))
        for k in range(3)
        for number in range(rng.randint(1, 4))
    ]
    names = [None, *(each.peer for each in holders)]
    legs = TableLegs(one_way_s={(a, b): rng.uniform(0.001, 0.1) for a in names for b in names})
    found = formed(*holders, legs=legs)
    by_index = [[each.peer for each in holders if each.index == k] for k in range(3)]
    costs = {}
    for ways in itertools.product(*by_index):
        members = [each for each in holders if each.peer in ways]
        [group] = formed(*members, legs=legs).groups
        costs[group.peer] = _loop_s(group, legs)
    best = min(costs, key=lambda peer: costs[peer])
    assert found.groups[0].peer == best
    assert peers(plan(found, legs=legs)) == [(members_of(best), "0:30")]
    # And whoever is lost has somebody in its place, if there is anybody.
    for k, names_of in enumerate(by_index):
        others = {members_of(group.peer)[k] for group in found.groups}
        assert len(others) == min(len(names_of), 3)


def _loop_s(group: Candidate, legs: Legs) -> float:
    way = GroupLegs(legs)
    return (
        way.leg(None, group.peer).one_way_s
        + way.leg(group.peer, None).one_way_s
        + group.queue_s
        + 30 * seconds_per_layer(group, 1)
    )


def test_among_many_ways_members_are_exchanged_until_none_is_better() -> None:
    rng = random.Random(5)
    holders = [holder(f"n{k}-{n}", k, (1, 1, 1), speed=rng.uniform(0.001, 0.02)) for k in range(3) for n in range(20)]
    assert MAX_WAYS < 20**3
    found = formed(*holders)
    fastest = [min((h for h in holders if h.index == k), key=lambda h: h.candidate.speed.rows_1_s) for k in range(3)]
    assert members_of(found.groups[0].peer) == tuple(each.peer for each in fastest)


def test_splits_that_nobody_can_complete_take_no_place_and_many_of_them_little_work() -> None:
    strange = [
        holder(f"s{number}", 0, (1, 2 + number % 900), start, 30) for start in range(20) for number in range(200)
    ]
    found = formed(*THREE, *strange)
    assert {members_of(group.peer) for group in found.groups} == {("a", "b", "c")}
    assert len({(each.layers, each.weights) for each in found.missing}) < MAX_SPLITS
    pairs = [
        holder(f"p{number}-{k}", k, (1, 2 + number), speed=0.01) for number in range(3 * MAX_SPLITS) for k in range(2)
    ]
    found = formed(*pairs, *THREE)
    assert len({found.weights[group.peer] for group in found.groups}) == MAX_SPLITS
    assert ("a", "b", "c") in {members_of(group.peer) for group in found.groups}, "it is faster than all of them"


def test_legs_to_groups_are_the_longest_to_a_member_one_by_one_and_in_bulk() -> None:
    rng = random.Random(3)
    names = [PeerId(name) for name in "abcdef"]
    legs = TableLegs(
        one_way_s={(a, b): rng.uniform(0.01, 0.1) for a in names for b in names},
        rate_Bps={(a, b): rng.uniform(1e5, 1e7) for a in names for b in names if rng.random() < 0.8},
    )
    legs.far("b", 0.7)
    way = GroupLegs(legs)
    ends = [group_id(names[:2]), group_id(names[2:5]), names[5], names[0]]
    assert way.leg(None, ends[0]).one_way_s == way.leg(ends[0], None).one_way_s == 0.7
    one_way_s, rate_Bps = way.bulk_legs(ends, ends)
    for i, j in itertools.permutations(range(4), 2):
        leg = way.leg(ends[i], ends[j])
        pairs = [(a, b) for a in members_of(ends[i]) for b in members_of(ends[j])]
        assert leg.one_way_s == one_way_s[i, j] == max(legs.leg(a, b).one_way_s for a, b in pairs)
        assert (np.inf if leg.rate_Bps is None else leg.rate_Bps) == rate_Bps[i, j]
    assert way.leg(names[0], names[1]) == legs.leg(names[0], names[1])


def test_hybrid_takes_whole_nodes_where_groups_are_slower_and_groups_where_nobody_else_is() -> None:
    half = [holder(name, k, (1, 1), 15, 30) for k, name in enumerate("xy")]
    whole = node("w", 0, 15)
    assert peers(plan(formed(*half), whole)) == [(("w",), "0:15"), (("x", "y"), "15:30")]
    assert peers(plan(formed(*half), whole, node("v", 15, 30))) == [(("w",), "0:15"), (("v",), "15:30")]
    # A fast group over short legs beats a slow node.
    fast = [holder(name, k, (1, 1), 15, 30, speed=0.001) for k, name in enumerate("xy")]
    near = TableLegs(default_s=1e-5)
    found = plan(formed(*fast, legs=near), whole, node("v", 15, 30, speed=0.1), legs=near)
    assert peers(found) == [(("w",), "0:15"), (("x", "y"), "15:30")]


def test_no_peer_is_in_two_stages_and_groups_may_have_different_sizes() -> None:
    two = [holder(name, k, (1, 1), 0, 15) for k, name in enumerate("ab")]
    three = [holder(name, k, (2, 1, 1), 15, 30) for k, name in enumerate("cde")]
    assert peers(plan(formed(*two, *three))) == [(("a", "b"), "0:15"), (("c", "d", "e"), "15:30")]
    # The same peer with slices of both: the only others are slow.
    twice = [holder("a", 0, (1, 1), 0, 15), holder("b", 1, (1, 1), 0, 15), holder("slow", 0, (1, 1), 0, 15, speed=0.05)]
    after = [holder("a", 0, (2, 1, 1), 15, 30), *three[1:]]
    found = plan(formed(*twice, *after))
    assert peers(found) == [(("slow", "b"), "0:15"), (("a", "d", "e"), "15:30")]
    none = plan(formed(*twice[:2], *after))
    assert isinstance(none, Uncovered)


def test_distinct_operators_hold_between_members_of_a_group_and_between_stages() -> None:
    rules = Rules(one_shard_per_operator=True)
    same = [holder("a", 0, (1, 1), operator="x"), holder("b", 1, (1, 1), operator="x")]
    found = formed(*same, rules=rules)
    assert not found.groups
    assert [m.why for m in found.missing] == [
        "held only beside holders of 1/2 that your rules exclude (distinct operators)"
    ]
    other = formed(*same, holder("c", 1, (1, 1), operator="y", speed=0.05), rules=rules)
    assert peers(plan(other, rules=rules)) == [(("a", "c"), "0:30")]
    first = [holder("a", 0, (1, 1), 0, 15, operator="x"), holder("b", 1, (1, 1), 0, 15, operator="y")]
    second = [holder("c", 0, (1, 1), 15, 30, operator="y"), holder("d", 1, (1, 1), 15, 30, operator="z")]
    both = formed(*first, *second, rules=rules)
    assert isinstance(plan(both, rules=rules), Uncovered)
    assert peers(plan(both)) == [(("a", "b"), "0:15"), (("c", "d"), "15:30")]
    spare = holder("e", 0, (1, 1), 15, 30, operator="w", speed=0.05)
    assert peers(plan(formed(*first, *second, spare, rules=rules), rules=rules)) == [
        (("a", "b"), "0:15"),
        (("e", "d"), "15:30"),
    ]
    # A node beside a group of the same operator.
    tail = node("n", 15, 30, operator="y"), node("m", 15, 30, operator="q", speed=0.05)
    assert peers(plan(formed(*first, rules=rules), *tail, rules=rules)) == [(("a", "b"), "0:15"), (("m",), "15:30")]


def test_avoided_peers_and_pairs_are_in_no_group_and_an_avoided_group_is_not_formed() -> None:
    holders = [*THREE, holder("d", 2, (1, 1, 1), speed=0.05)]
    assert peers(plan(formed(*holders, avoid=Avoid(frozenset({PeerId("c")}))))) == [(("a", "b", "d"), "0:30")]
    group = group_id([PeerId(name) for name in "abc"])
    assert peers(plan(formed(*holders, avoid=Avoid(frozenset({group}))))) == [(("a", "b", "d"), "0:30")]
    pair = Avoid(pairs=frozenset({(PeerId("c"), PeerId("a"))}))
    assert peers(plan(formed(*holders, avoid=pair))) == [(("a", "b", "d"), "0:30")]
    two = [holder(name, k, (1, 1), 0, 15) for k, name in enumerate("ab")]
    tail = node("n", 15, 30), node("m", 15, 30, speed=0.0011)
    between = Avoid(pairs=frozenset({(PeerId("b"), PeerId("n"))}))
    assert peers(plan(formed(*two), *tail, avoid=between)) == [(("a", "b"), "0:15"), (("m",), "15:30")]


def test_patch_of_a_lost_group_keeps_the_others_and_does_not_take_their_members() -> None:
    two = [holder(name, k, (1, 1), 0, 15) for k, name in enumerate("ab")]
    spare = holder("s", 1, (1, 1), 0, 15, speed=0.05)
    three = [holder(name, k, (1, 1, 1), 15, 30) for k, name in enumerate("cde")]
    everybody = [*two, spare, holder("c", 0, (1, 1), 0, 15), *three]
    lost = Avoid(frozenset({PeerId("b")}))
    found = formed(*everybody, avoid=lost)
    whole = plan(formed(*two, *three))
    assert isinstance(whole, Planned)
    patched = plan_patch(
        found.groups, GroupLegs(TableLegs()), whole.route, [0], num_layers=30, workload=WORK, known=found.groups
    )
    assert peers(patched) == [(("a", "s"), "0:15"), (("c", "d", "e"), "15:30")]


def test_alternate_of_a_group_is_another_group_that_may_have_its_survivors() -> None:
    found = plan(formed(*THREE, holder("d", 2, (1, 1, 1), speed=0.05)))
    assert isinstance(found, Planned)
    [alternate] = found.alternates
    assert alternate is not None
    assert [members_of(stage.peer) for stage in alternate.stages] == [("a", "b", "d")]


def test_group_serves_a_part_of_its_layers_beside_a_node() -> None:
    tail = node("n", 10, 30, speed=0.0001)
    slow = [holder(name, k, (1, 1), speed=0.01) for k, name in enumerate("ab")]
    assert peers(plan(formed(*slow), tail)) == [(("a", "b"), "0:10"), (("n",), "10:30")]


def test_members_may_hold_more_layers_than_their_group_serves() -> None:
    found = formed(holder("a", 0, (1, 1), 0, 30), holder("b", 1, (1, 1), 0, 15))
    assert {(members_of(g.peer), str(g.layers)) for g in found.groups} == {(("a", "b"), "0:15")}
    assert [(str(m.layers), m.index) for m in found.missing] == [("0:30", 1)]


def test_member_that_could_only_serve_beside_itself_is_not_told_of_as_a_way() -> None:
    found = formed(holder("a", 0, (1, 1)), holder("b", 1, (1, 1)), holder("c", 1, (1, 1), speed=0.01))
    planned = plan_route(found.groups, GroupLegs(TableLegs()), num_layers=30, workload=WORK, is_explained=True)
    assert isinstance(planned, Planned)
    [rejected] = planned.rejections
    assert rejected.peer == "a+c"
    assert len(rejected.via) == 2
    assert "but then" in rejected.text
