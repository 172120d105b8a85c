"""The planner against exhaustive search, and what it says when layers are missing."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.types import LayerRange, PeerId
from scheduler.planner import HOP_COST_S, Candidate, Route, Uncovered, plan_route


def node(name: str, start: int, stop: int, rtt: float = 0.01, speed: float = 0.003, room: int = 1000) -> Candidate:
    return Candidate(PeerId(name), LayerRange(start, stop), rtt, speed, room)


def plan(*nodes: Candidate, layers: int = 30, positions: int = 100) -> Route | Uncovered:
    return plan_route(nodes, num_layers=layers, num_positions=positions)


def test_three_thirds_make_a_route_in_order() -> None:
    route = plan(node("c", 20, 30), node("a", 0, 10), node("b", 10, 20))
    assert isinstance(route, Route)
    assert [(s.peer, str(s.layers)) for s in route.stages] == [("a", "0:10"), ("b", "10:20"), ("c", "20:30")]


def test_one_node_that_holds_everything_beats_three() -> None:
    route = plan(node("a", 0, 10), node("b", 10, 20), node("c", 20, 30), node("whole", 0, 30))
    assert isinstance(route, Route)
    assert [s.peer for s in route.stages] == ["whole"]


def test_near_nodes_win_over_far_ones() -> None:
    route = plan(node("far", 0, 30, rtt=0.9), node("a", 0, 15, rtt=0.01), node("b", 15, 30, rtt=0.01))
    assert isinstance(route, Route)
    assert [s.peer for s in route.stages] == ["a", "b"]


def test_overlapping_nodes_are_entered_inside_their_range() -> None:
    route = plan(node("a", 0, 20, speed=0.001), node("b", 10, 30, speed=0.01))
    assert isinstance(route, Route)
    assert [str(s.layers) for s in route.stages] == ["0:20", "20:30"]


def test_nodes_change_only_where_the_model_lets_a_range_begin() -> None:
    nodes = (node("a", 0, 20, speed=0.001), node("b", 9, 30, speed=0.01))
    route = plan_route(nodes, num_layers=30, num_positions=100, first_layers=frozenset({0, 12, 18, 24}))
    assert isinstance(route, Route)
    assert [(s.peer, str(s.layers)) for s in route.stages] == [("a", "0:18"), ("b", "18:30")]


def test_layers_that_no_node_holds_together_are_missing_where_a_range_cannot_begin_between_them() -> None:
    nodes = (node("a", 0, 14), node("b", 14, 30), node("c", 13, 16))
    gap = plan_route(nodes, num_layers=30, num_positions=100, first_layers=frozenset({0, 12, 18, 24}))
    assert gap == Uncovered((LayerRange(12, 18),), ())


def test_missing_layers_are_named() -> None:
    gap = plan(node("a", 0, 10), node("c", 22, 29))
    assert gap == Uncovered((LayerRange(10, 22), LayerRange(29, 30)), ())


def test_layers_held_only_without_room_are_named_apart() -> None:
    gap = plan(node("a", 0, 10), node("b", 10, 20, room=5), node("c", 20, 30))
    assert gap == Uncovered((LayerRange(10, 20),), (LayerRange(10, 20),))


def test_no_nodes_at_all_leaves_every_layer_uncovered() -> None:
    assert plan() == Uncovered((LayerRange(0, 30),), ())


def test_a_claim_of_infinite_speed_does_not_beat_a_shorter_round_trip() -> None:
    route = plan(node("liar", 0, 30, rtt=0.2, speed=0.0), node("honest", 0, 30, rtt=0.01, speed=0.003))
    assert isinstance(route, Route)
    assert route.stages[0].peer == "honest"


def brute_force(nodes: list[Candidate], num_layers: int) -> float | None:
    best: float | None = None
    for size in range(1, len(nodes) + 1):
        for order in itertools.permutations(nodes, size):
            for cuts in itertools.combinations(range(1, num_layers), size - 1):
                edges = [0, *cuts, num_layers]
                parts = list(itertools.pairwise(edges))
                fits = all(n.layers.start <= a and b <= n.layers.stop for n, (a, b) in zip(order, parts, strict=True))
                if fits:
                    legs = [HOP_COST_S + n.round_trip_s + (b - a) * n.seconds_per_layer
                            for n, (a, b) in zip(order, parts, strict=True)]  # fmt: skip
                    best = min(best, sum(legs)) if best is not None else sum(legs)
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 7), st.floats(0, 0.1), st.floats(1e-5, 0.02)),
        min_size=1,
        max_size=4,
    )
)
def test_random_small_cases_are_near_the_exhaustive_optimum(specs: list[tuple[int, int, float, float]]) -> None:
    nodes = [
        node(f"n{i}", start, min(start + size, 7), rtt, speed)
        for i, (start, size, rtt, speed) in enumerate(specs)
        if start < min(start + size, 7)
    ]
    best = brute_force(nodes, 7)
    route = plan(*nodes, layers=7)
    if best is None:
        assert isinstance(route, Uncovered)
    else:
        assert isinstance(route, Route)
        assert [s.layers.start for s in route.stages] == [0, *[s.layers.stop for s in route.stages][:-1]]
        assert len({s.peer for s in route.stages}) == len(route.stages)
        assert best - 1e-9 <= route.seconds_per_token <= best * 1.25 + 1e-9


def test_ranges_of_one_peer_that_touch_are_one_and_separate_ones_make_no_wrong_route() -> None:
    route = plan(node("p", 0, 10), node("p", 10, 20), node("q", 20, 30))
    assert isinstance(route, Route)
    assert [(s.peer, str(s.layers)) for s in route.stages] == [("p", "0:20"), ("q", "20:30")]
    assert isinstance(plan(node("p", 0, 10), node("q", 10, 20), node("p", 20, 30)), Uncovered)
