"""The models of Petals' and Parallax's algorithms that the benchmarks compare with: what is known of the originals."""

from __future__ import annotations

import dataclasses
import random

import pytest

from benchmarks.scheduler import parallax, petals
from benchmarks.scheduler.churn import RIVALS, world_of
from fusion_node.simulator.settings import Settings
from fusion_node.types import LayerRange, PeerId
from scheduler.topology import RouteStage


def test_petals_servers_that_see_one_another_take_the_blocks_that_others_lack() -> None:
    spans: list[tuple[LayerRange, float]] = []
    for _ in range(5):
        spans.append((petals.join(spans, 40, 10), 1.0))
    assert [span.start for span, _ in spans] == [0, 10, 20, 30, 0]


def test_petals_servers_that_do_not_see_one_another_all_take_the_first_blocks() -> None:
    assert {petals.join([], 40, 10).start for _ in range(5)} == {0}


def test_a_petals_server_stays_where_it_alone_holds_a_block() -> None:
    spans = [(LayerRange(0, 10), 1.0), (LayerRange(10, 20), 1.0), (LayerRange(10, 20), 1.0)]
    assert not petals.should_move(spans, 0, 20, random.Random(1))


def test_a_petals_server_moves_when_all_gain_a_third_by_it() -> None:
    spans = [(LayerRange(0, 10), 1.0), (LayerRange(10, 20), 1.0), (LayerRange(10, 20), 1.0), (LayerRange(10, 20), 1.0)]
    assert petals.should_move(spans, 3, 20, random.Random(1))
    assert not petals.should_move(spans[:3], 2, 20, random.Random(1))


def server(name: str, start: int, stop: int, rps: float = 100.0, cache: int = 10**6, **pings: float) -> petals.Server:
    named = {PeerId(peer): rtt for peer, rtt in pings.items()}
    return petals.Server(PeerId(name), LayerRange(start, stop), 1.0, rps, cache, named)


def test_a_petals_client_enters_a_server_anywhere_and_leaves_it_at_the_end_of_its_span() -> None:
    servers = [server("a", 0, 6, b=0.01), server("b", 2, 10)]
    route = petals.route_min_latency(servers, {PeerId("a"): 0.01, PeerId("b"): 0.01}, 10, 100)
    assert route == (RouteStage(PeerId("a"), LayerRange(0, 6)), RouteStage(PeerId("b"), LayerRange(6, 10)))
    assert petals.route_min_latency(servers[:1], {}, 10, 100) is None


def test_a_petals_client_takes_a_ping_that_it_does_not_know_for_150_ms_and_avoids_full_caches() -> None:
    servers = [server("a", 0, 5, near=0.1), server("near", 5, 10), server("new", 5, 10)]
    client = {PeerId(name): 0.1 for name in ("a", "near", "new")}
    route = petals.route_min_latency(servers, client, 10, 100)
    assert route is not None
    assert route[1].peer == "near"
    servers[1] = server("near", 5, 10, cache=2 * 100 * 5 - 1)
    route = petals.route_min_latency(servers, client, 10, 100)
    assert route is not None
    assert route[1].peer == "new"


def test_petals_samples_servers_in_proportion_to_their_spans() -> None:
    servers = [server("long", 0, 9), server("short", 0, 1), server("rest", 0, 10)]
    rng = random.Random(1)
    firsts = [route[0].peer for _ in range(2000) if (route := petals.route_max_throughput(servers, 10, rng))]
    assert firsts.count(PeerId("short")) / 2000 == pytest.approx(1 / 20, abs=0.02)
    assert firsts.count(PeerId("long")) / 2000 == pytest.approx(9 / 20, abs=0.05)


def nodes(*capacities: int, layer_s: float = 0.01) -> list[parallax.Node]:
    return [parallax.Node(PeerId(f"n{i}"), capacity, 1.0, layer_s) for i, capacity in enumerate(capacities)]


def test_parallax_tiles_the_example_of_its_own_documentation() -> None:
    allocation = parallax.allocate(nodes(40, 40, 20, 20, 10, 10), 70)
    assert allocation is not None
    assert len(allocation.pipelines) == 2
    assert sum(len(pipeline) for pipeline in allocation.pipelines) == 6
    assert allocation.spare == ()
    for pipeline in allocation.pipelines:
        assert [layers.start for _, layers in pipeline] == [0, *(layers.stop for _, layers in pipeline[:-1])]
        assert pipeline[-1][1].stop == 70


def test_parallax_fills_pipelines_like_water_within_what_fits() -> None:
    strong, weak = parallax.Node(PeerId("s"), 8, 3.0, 0.01), parallax.Node(PeerId("w"), 10, 1.0, 0.01)
    allocation = parallax.allocate([strong, weak], 12)
    assert allocation is not None
    assert allocation.pipelines == (((1, LayerRange(0, 4)), (0, LayerRange(4, 12))),)


def test_parallax_needs_room_for_the_whole_model() -> None:
    assert parallax.allocate(nodes(4, 5), 10) is None


@pytest.mark.parametrize("count", [6, 40])
def test_parallax_allocates_no_node_more_than_fits(count: int) -> None:
    rng = random.Random(count)
    some = nodes(*(rng.randrange(3, 20) for _ in range(count)))
    allocation = parallax.allocate(some, 20)
    assert allocation is not None
    held = [stage for pipeline in allocation.pipelines for stage in pipeline] + list(allocation.spare)
    assert len({index for index, _ in held}) == len(held)
    assert all(len(layers) <= some[index].capacity for index, layers in held)


def test_parallax_routes_over_ranges_that_abut_and_weighs_a_node_by_one_layer() -> None:
    some = [*nodes(10, 10, 10), parallax.Node(PeerId("slow"), 20, 1.0, 0.025)]
    allocation = parallax.Allocation(
        pipelines=(((0, LayerRange(0, 10)), (1, LayerRange(10, 20))),),
        spare=((2, LayerRange(9, 19)), (3, LayerRange(0, 20))),
    )
    by_rtt = parallax.route_shortest(allocation, some, lambda one, other: 0.01)
    assert by_rtt == (RouteStage(PeerId("slow"), LayerRange(0, 20)),)  # 25 ms a layer, for 20 layers, counted once
    in_turn = parallax.route_in_turn(allocation, some, lambda one, other: 0.01)
    assert [[stage.peer for stage in route] for route in in_turn] == [["slow"], ["n0", "n1"]]


def test_parallax_fills_a_gap_only_with_ranges_that_abut_within_it() -> None:
    some = nodes(10, 10, 10, 10)
    placed = [(0, LayerRange(4, 8)), (1, LayerRange(8, 12)), (2, LayerRange(3, 12)), (3, LayerRange(4, 10))]

    def route(*left_out: int) -> tuple[RouteStage, ...] | None:
        kept = [stage for stage in placed if stage[0] not in left_out]
        return parallax.shortest(kept, some, lambda one, other: 0.01, LayerRange(4, 12))

    assert route() == (RouteStage(PeerId("n0"), LayerRange(4, 8)), RouteStage(PeerId("n1"), LayerRange(8, 12)))
    assert route(0) is None
    assert route(1) is None


def test_parallax_has_a_node_that_joins_later_take_what_is_held_least() -> None:
    assert parallax.lightest([2, 2, 1, 0, 1, 2], 3) == LayerRange(2, 5)
    assert parallax.lightest([1, 1, 1, 1], 2) == LayerRange(0, 2)


SMALL = Settings(
    nodes=30, users=1, hours=0.02, model="llama-8b", think_s=0.1, answer_tokens=150.0, membership="modelled"
)


@pytest.mark.parametrize("name", RIVALS)
def test_simulated_users_are_answered_over_the_routes_of_each_also_when_a_node_of_them_dies(name: str) -> None:
    world = world_of(name, SMALL)
    world.heap.run(10.0)
    (request, *_) = [user.request for user in world.users.values() if user.request is not None]
    places = request.core.places
    if name == "Parallax":
        assert all(place.layers == world.nodes[place.peer].layers for place in places), "nobody is entered in between"
    world.kill(world.nodes[places[0].peer])
    world.run()
    metrics = world.metrics
    assert any(not each.error for each in metrics.requests)
    assert metrics.wrong_tokens == 0
    assert [stall.kind for stall in metrics.stalls if stall.fault == "kill"]


def test_all_worlds_of_a_seed_have_the_same_hosts_for_as_long_whoever_chooses_their_layers_and_routes() -> None:
    settings = dataclasses.replace(SMALL, hours=0.1, mean_lifetime_s=900.0, garbage_share=0.5, users=2)

    def hosts(name: str) -> list[tuple[object, ...]]:
        world = world_of(name, settings)
        world.run()
        return sorted(
            (node.index, node.place.region, node.place.line, node.device.name, node.character, node.stays_s)
            for node in world.nodes.values()
            if node.index <= 40
        )

    assert hosts("ours") == hosts("Petals") == hosts("Parallax")
