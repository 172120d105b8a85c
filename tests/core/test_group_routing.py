"""Fusion groups as a user finds them: who is in a route, who takes a lost member's place, and what is told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import cast

import msgspec
import pytest

from fusion_node.cli.pictures import slices
from fusion_node.cli.plan import WIDTH, in_words
from fusion_node.client.answer_core import WantsAlternates
from fusion_node.client.answer_routes import Answer, AnswerRoutes, Work
from fusion_node.client.generation import GenerationStats
from fusion_node.client.hosts import hosts_of
from fusion_node.client.overview import NodeView, ShardView, _models, _splits
from fusion_node.client.ownership_file import parse_ownership
from fusion_node.client.plan_view import PlanView, view_of
from fusion_node.client.routing import Router
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.user_rules import UserRules, check_members, topology_of
from fusion_node.errors import ConfigError, NoRoute, PeerTimeout
from fusion_node.slices import Dims
from fusion_node.store import StoredModel
from fusion_node.types import PeerId, group_id, members_of
from scheduler.plans import Topology
from tests.core.test_routing import MODEL, NUM_LAYERS, Model, Node, Swarm, places, shard

DIMS = Dims(hidden=48, heads=6, kv_heads=3, head_dim=8, channels=96)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


async def router_for(
    swarm: Swarm, topology: Topology = Topology.FUSION, *, members: int | None = None, rules: UserRules | None = None
) -> Router:
    made = await swarm.router(rules=rules)
    made.topology, made.num_members, made.dims = topology, members, DIMS
    return made


async def group(swarm: Swarm, *slices: str, start: int = 0, stop: int = 12, ms: float = 2.0) -> list[Node]:
    return [await swarm.node(shard(start, stop, ms, slice=each)) for each in slices]


def ids(nodes: list[Node]) -> PeerId:
    return group_id([node.peer for node in nodes])


async def view(router: Router) -> PlanView:
    return view_of(
        await router.explain(320, num_prompt=64, wait=False),
        model=cast(StoredModel, Model()),
        numerics="f16r32",
        num_layers=NUM_LAYERS,
        objective=router.objective,
        rules=router.rules,
        prompt_tokens=64,
        max_tokens=256,
        topology=router.topology,
        dims=router.dims,
    )


def text_of(view: PlanView) -> str:
    lines = list(in_words(view))
    assert max(map(len, lines)) <= WIDTH
    return " ".join(" ".join(lines).split())


async def test_group_of_all_slices_is_a_route_with_the_addresses_and_weights_of_its_members(swarm: Swarm) -> None:
    nodes = await group(swarm, "0/2:1:1", "1/2:1:1", "2/2:1:1")
    router = await router_for(swarm)
    planned = await router.route(64)
    assert places(planned) == [(ids(nodes), "0:12")]
    assert planned.expected_step_s is not None
    routes = answer_routes(router)
    [place] = routes._places(planned)
    assert place.peer == ids(nodes)
    assert [(each.peer, each.data_addresses) for each in place.stage.members] == [
        (node.peer, (node.address,)) for node in nodes
    ]
    assert place.stage.weights == (2, 1, 1)
    assert router.can_go_on(planned)
    router.note_failure(PeerTimeout(nodes[1].peer, "silent"))
    assert not router.can_go_on(planned)


def answer_routes(router: Router) -> AnswerRoutes:
    work = Work(Answer(ids=[1], all_ids=[1], num_prompt=1), SamplingParams(), GenerationStats())
    return AnswerRoutes(router, None, work, 64)


async def test_pipeline_does_not_see_slices_and_says_what_they_are_for(swarm: Swarm) -> None:
    await group(swarm, "0/2", "1/2")
    router = await router_for(swarm, Topology.PIPELINE)
    router.dims = None
    with pytest.raises(NoRoute, match=r"serves layers 0:12 .*hold slices of it.*--topology fusion.*; or start a node"):
        await router.route(64, wait=False)
    whole = await swarm.node(shard(0, 12, 50.0))
    router.note_failure(PeerTimeout("nobody", ""))
    assert places(await router.route(64)) == [(whole.peer, "0:12")]
    assert {each.why for each in (await view(router)).rejected} == {
        f"holds slice {k}/2 of its layers: only a fusion group serves them" for k in range(2)
    }


async def test_slices_are_no_part_of_placement(swarm: Swarm) -> None:
    await group(swarm, "0/2", "1/2", stop=6)
    whole = await swarm.node(shard(6, 12))
    await swarm.router()
    hosts = hosts_of(await swarm.connection.find(MODEL), MODEL, "f16r32", NUM_LAYERS)
    assert [host.peer for host in hosts] == [whole.peer]


def shown(start: int, stop: int, slice_: str = "", *, round_trip_ms: float | None = 1.0) -> NodeView:
    held = ShardView("tiny", MODEL, start, stop, NUM_LAYERS, "f16r32", 1.0, 64, slice=slice_)
    return NodeView("peer", "", "cpu", "test", (), 0.0, round_trip_ms, 0, 0, (held,), {}, "")


def test_slices_are_no_part_of_coverage_and_are_shown_beside_it() -> None:
    nodes = [shown(6, 12), shown(0, 6, "0/2"), shown(0, 6, "1/2"), shown(0, 6, "0/2:1"), shown(0, 6, "0/2:1")]
    nodes.append(shown(0, 6, "1/2:1", round_trip_ms=None))  # a ghost
    [model] = _models(nodes)
    assert model.holders_per_layer == (0,) * 6 + (1,) * 6
    even, uneven = _splits(nodes)
    assert (even.start, even.stop, even.slices, even.holders_per_slice) == (0, 6, ("0/2", "1/2"), (1, 1))
    assert slices(even).plain == "tiny f16r32  0:6 in slices  all 2 held 1×"
    assert (uneven.slices, uneven.holders_per_slice) == (("0/2:1", "1/2:1"), (2, 0))
    assert slices(uneven).plain.endswith("1/2:1 held by nobody")


async def test_error_names_the_slice_that_nobody_holds_and_how_to_serve_it(swarm: Swarm) -> None:
    await group(swarm, "0/3", "2/3")
    router = await router_for(swarm)
    with pytest.raises(NoRoute) as told:
        await router.route(64, wait=False)
    text = str(told.value)
    assert "no fusion group is complete for layers 0:12 of tiny in f16r32" in text
    assert "slice 1/3 of layers 0:12 is held by nobody" in text
    assert text.endswith("start a node with `fusion-node join tiny --slice 1/3 --layers 0:12 --peer ADDRESS`")
    shown = await view(router)
    assert {each.why for each in shown.rejected} == {"slice 1/3 of its layers is held by nobody"}
    hybrid = await router_for(swarm, Topology.HYBRID)
    with pytest.raises(NoRoute, match=r"slice 1/3 of layers 0:12 is held by nobody"):
        await hybrid.route(64, wait=False)


async def test_error_tells_of_wrong_sizes_and_rules(swarm: Swarm) -> None:
    nodes = await group(swarm, "0/2", "1/2")
    three = await router_for(swarm, members=3)
    with pytest.raises(NoRoute, match=r"no fusion group of 3 .*slices for groups of 2: start .*--slice 0/3 --layers"):
        await three.route(64, wait=False)
    denied = await router_for(swarm, rules=UserRules(deny=(nodes[1].peer,)))
    with pytest.raises(
        NoRoute, match=r"slice 1/2 of layers 0:12 is held by nobody whom your rules allow \(1 × you deny this peer\)$"
    ):
        await denied.route(64, wait=False)
    assert not swarm.connection.links.is_connected(nodes[1].peer), "whom rules reject is not even dialled"
    await group(swarm, "1/3", start=6)
    few = await router_for(swarm, rules=UserRules(deny=(nodes[1].peer,)))
    with pytest.raises(NoRoute) as told:
        await few.route(64, wait=False)
    assert "start a node" not in str(told.value), "of slice 0/3 of the last layers, which would not do"
    nobody = await router_for(swarm)
    with pytest.raises(NoRoute, match=r"slices 0/2 and 1/2 of layers 0:12 are held without room"):
        await nobody.route(5000, wait=False)


async def test_only_whole_nodes_serve_no_fusion_and_say_so(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12))
    router = await router_for(swarm)
    with pytest.raises(NoRoute, match=r"nobody holds a slice of it: start a node with .*--slice 0/2 --layers 0:12"):
        await router.route(64, wait=False)
    assert [each.why for each in (await view(router)).rejected] == ["holds whole layers: you want fusion groups alone"]


async def test_hybrid_of_a_node_and_two_groups(swarm: Swarm) -> None:
    first = await swarm.node(shard(0, 4))
    second = await group(swarm, "0/2", "1/2", start=4, stop=8)
    third = await group(swarm, "0/3", "1/3", "2/3", start=8, stop=12)
    router = await router_for(swarm, Topology.HYBRID)
    planned = await router.route(64)
    assert places(planned) == [(first.peer, "0:4"), (ids(second), "4:8"), (ids(third), "8:12")]
    # A step that was shared tells nothing of any member, and of a whole node what that says.
    router.observe_round(planned.places, [(0.1, 0.0)] * 3, num_rows=1, round_s=0.5)
    assert set((await router.explain(64, wait=False)).measured_speeds) == {first.peer}


async def test_lost_member_is_replaced_by_a_spare_and_the_others_stay(swarm: Swarm) -> None:
    head = await group(swarm, "0/2", "1/2", stop=6)
    tail = await group(swarm, "0/3", "1/3", "2/3", start=6, stop=12)
    spare = (await group(swarm, "1/2", stop=6, ms=9.0))[0]
    router = await router_for(swarm)
    planned = await router.route(64)
    assert places(planned) == [(ids(head), "0:6"), (ids(tail), "6:12")]
    alternates = await router.alternates(planned, 64)
    assert [[node.peer for node, _ in each] for each in alternates] == [[group_id([head[0].peer, spare.peer])], []]
    patched = await router.patch(planned, [0], 64, avoid_peers={head[1].peer})
    assert patched is not None
    assert places(patched) == [(group_id([head[0].peer, spare.peer]), "0:6"), (ids(tail), "6:12")]
    assert await router.patch(planned, [1], 64, avoid_peers={tail[1].peer}) is None
    # A group that failed and nobody knows why: another one.
    other = await router.patch(planned, [0], 64)
    assert other is not None
    assert places(other)[0][0] == group_id([head[0].peer, spare.peer])


async def test_answer_keeps_no_alternates_of_groups_because_any_member_may_fail(swarm: Swarm) -> None:
    head = await group(swarm, "0/2", "1/2", stop=6)
    await group(swarm, "1/2", stop=6, ms=9.0)
    tail = [await swarm.node(shard(6, 12)), await swarm.node(shard(6, 12, 9.0))]
    routes = answer_routes(await router_for(swarm, Topology.HYBRID))
    present = routes._places(await routes._router.route(64))
    assert [place.peer for place in present] == [ids(head), tail[0].peer]
    found = await routes.alternates(WantsAlternates(frozenset(), frozenset()), present)
    assert [[place.peer for place in each] for each in found] == [[], [tail[1].peer]]
    assert not routes._lacking


async def test_plan_shows_what_each_member_holds_and_why_it_serves(swarm: Swarm) -> None:
    nodes = await group(swarm, "0/2:1:1", "1/2:1:1", "2/2:1:1")
    spare = (await group(swarm, "2/2:1:1", ms=30.0))[0]
    router = await router_for(swarm)
    shown = await view(router)
    [stage] = shown.stages
    assert [member.peer for member in stage.members] == [node.peer for node in nodes]
    first, second, third = stage.members
    assert (first.slice, first.columns, first.heads, first.kv_heads, first.channels) == (
        "0/2:1:1", (0, 24), (0, 2), (0,), (0, 48)
    )  # fmt: skip
    assert (second.columns, second.heads, second.kv_heads) == ((24, 40), (2, 4), (1,))
    assert first.why == "nobody else holds slice 0/2:1:1 of 0:12"
    assert third.why == "best together with the others, of 2 that hold slice 2/2:1:1 of 0:12"
    assert first.compute_ms == stage.compute_ms == 24.0
    assert stage.exchange_ms > 0
    [rejected] = shown.rejected
    assert rejected.peer == spare.peer
    assert rejected.reason == "slower"
    assert stage.alternate is not None
    assert members_of(PeerId(stage.alternate.stages[0].peer))[2] == spare.peer
    text = text_of(shown)
    assert "you → group 1" in text
    assert "1. group of 3, layers 0:12" in text
    assert "columns 0:24; heads 0:2, which read KV head 0; channels 0:48" in text
    assert "its members exchange partial sums" in text
    assert msgspec.json.decode(msgspec.json.encode(shown), type=PlanView) == shown


async def test_plan_names_the_rule_that_lets_each_member_hold_its_slice_and_that_rejects_others(swarm: Swarm) -> None:
    near = await group(swarm, "0/2", "1/2")
    far = await group(swarm, "0/2", "1/2", ms=30.0)
    whole = await swarm.node(shard(0, 12))
    mine = "\n".join(f'[[may_hold]]\nwho = "{node.peer}"\nslices = "{k}/2"' for k, node in enumerate(far))
    ownership = parse_ownership(f'default = "deny"\n{mine}', name="own.toml")
    router = await router_for(swarm, Topology.HYBRID, rules=UserRules(ownership=ownership))
    planned = await router.route(64)
    assert places(planned) == [(ids(far), "0:12")]
    assert not router.breaches(planned)
    linked = swarm.connection.links.is_connected
    assert not any(linked(node.peer) for node in (*near, whole)), "whom rules reject is not even dialled"
    shown = await view(router)
    assert shown.rules == ("ownership own.toml: default deny, 2 may_hold",)
    assert [member.ownership for member in shown.stages[0].members] == [
        f"ownership line {line}: …{node.peer[-8:]} may hold slice {k}/2"
        for k, (line, node) in enumerate(zip((2, 5), far, strict=True))
    ]
    nobody = "ownership line 1: no rule says that it may hold anything, and the default is to deny"
    assert {each.peer: each.why for each in shown.rejected} == {node.peer: nobody for node in (*near, whole)}
    text = text_of(shown)
    assert f"allowed by ownership line 2: …{far[0].peer[-8:]} may hold slice 0/2" in text
    # Other rules from now on: the route is one no more.
    router.own(parse_ownership('default = "deny"'))
    assert [breach.peer for breach in router.breaches(planned)] == [node.peer for node in far]
    assert not router.can_go_on(planned)
    with pytest.raises(NoRoute, match=r"left by your rules: .* × ownership line 1: no rule says"):
        await router.route(64, wait=False)


async def test_replacement_in_a_group_keeps_the_rules_with_those_that_stay(swarm: Swarm) -> None:
    head = await group(swarm, "0/2", "1/2", stop=6)
    tail = await group(swarm, "0/2", "1/2", start=6)
    near, far = await group(swarm, "0/2", "0/2", start=6, ms=9.0)
    apart = f'default = "allow"\n[[never_adjacent]]\nwho = ["{head[0].peer}", "{near.peer}"]'
    router = await router_for(swarm, rules=UserRules(ownership=parse_ownership(apart)))
    planned = await router.route(64)
    assert places(planned) == [(ids(head), "0:6"), (ids(tail), "6:12")]
    patched = await router.patch(planned, [1], 64, avoid_peers={tail[0].peer})
    assert patched is not None
    assert places(patched)[1] == (group_id([far.peer, tail[1].peer]), "6:12")


async def test_all_missing_slices_of_a_split_are_told_and_those_first_that_lack_least(swarm: Swarm) -> None:
    await group(swarm, "0/6")
    await group(swarm, "0/3", "1/3", start=6)
    router = await router_for(swarm)
    with pytest.raises(NoRoute) as told:
        await router.route(64, wait=False)
    first = "slice 2/3 of layers 6:12 is held by nobody"
    assert f"{first}; slices 1/6, 2/6, 3/6, 4/6 and 5/6 of layers 0:12 are held by nobody" in str(told.value)


@pytest.mark.parametrize(
    ("members", "topology", "complaint"),
    [
        (1, "fusion", "2 to 16"),
        (17, "hybrid", "2 to 16"),
        (3, "pipeline", "add --topology fusion"),
        (None, "ring", "unknown"),
    ],
)
def test_members_and_topologies_that_make_no_sense_are_refused(
    members: int | None, topology: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_members(members, topology_of(topology))


def test_members_are_any_number_unless_told() -> None:
    for topology in Topology:
        check_members(None, topology)
    check_members(3, Topology.HYBRID)
