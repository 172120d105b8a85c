"""Who is planned with, and who takes whose place: the router over links in memory, with nodes that claim things."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from fusion_node.cli.plan import WIDTH, in_words
from fusion_node.client.connection import MAX_MEASURED, MeasuredNode, SwarmConnection
from fusion_node.client.plan_view import PlanView, view_of
from fusion_node.client.routing import SHARED_LOOK_S, Planned, Router
from fusion_node.client.user_rules import UserRules
from fusion_node.errors import NoPeers, NoRoute, PeerUnreachable
from fusion_node.store import StoredModel
from fusion_node.types import ModelId, PeerId
from p2p.discovery import DiscoveryConfig
from p2p.first_answers import GRACE_S
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.memory_discovery import MemoryDiscovery, World
from p2p.records import PROTOCOL_VERSION, CoordinateRecord, NodeRecord, ShardRecord, sign_record
from p2p.seam import Link
from p2p.virtual_time import VirtualTimeLoop
from scheduler.plans import Objective, Reason

MODEL = ModelId("ab" * 32)
NUM_LAYERS = 12
PATIENCE_S = 20.0


@dataclass
class Model:
    """As much of a StoredModel as a router looks at."""

    name: str = "tiny"
    model_id: ModelId = MODEL


class Node:
    """A peer that accepts links, and announces what a test wants."""

    def __init__(self, links: MemoryWorld, world: World, number: int) -> None:
        self.identity = Identity.from_seed(number.to_bytes(32, "big"))
        self.host = f"host{number}"
        self.pool = LinkPool(
            MemoryNetwork(links, self.identity, self.host),
            self.peer,
            on_frame=lambda peer, message, payload: None,
            on_closed=lambda peer, error: None,
        )
        config = DiscoveryConfig(("127.0.0.1:0",), (), mdns=False, serve=True)
        self.discovery = MemoryDiscovery(self.identity, config, world, clock=time.time)
        self.address = ""
        self.num_dialled = 0

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def start(self, record: NodeRecord) -> None:
        self.address = await self.pool.listen(f"{self.host}:0")
        await self.discovery.start()
        await self.announce(record)

    async def announce(self, record: NodeRecord) -> None:
        record = msgspec.structs.replace(record, peer=self.peer, data_addresses=(self.address,))
        await self.discovery.announce(sign_record(record, self.identity), [MODEL])

    @property
    def links(self) -> list[PeerId]:
        return [link.peer for link in self.pool.links()]


def record(*shards: ShardRecord, **fields: object) -> NodeRecord:
    now = time.time()
    made = NodeRecord(
        version=PROTOCOL_VERSION,
        peer="",
        sequence=1,
        issued_at=now,
        expires_at=now + 60.0,
        data_addresses=(),
        libp2p_addresses=(),
        device="cpu",
        memory_free_bytes=0,
        shards=shards,
        num_sessions=0,
        software="test",
    )
    return msgspec.structs.replace(made, **fields)


def shard(start: int, stop: int, ms: float = 5.0, **fields: object) -> ShardRecord:
    """Layers that take so many milliseconds each."""
    seconds = (ms / 1e3, ms / 1e3, ms / 1e3)
    made = ShardRecord(MODEL, "tiny", start, stop, NUM_LAYERS, "f16r32", seconds, 4096)
    return msgspec.structs.replace(made, **fields)


class UserNetwork(MemoryNetwork):
    """A user's, which is kept waiting where a test says so.

    Attributes:
        held: addresses at which nobody answers before the event is set.
        given_up: those that were dialled in vain for as long as that was to take.
        seconds_to: how long the dial of an address takes.
    """

    def __init__(self, world: MemoryWorld, identity: Identity) -> None:
        super().__init__(world, identity, "user")
        self.held: dict[str, asyncio.Event] = {}
        self.given_up: list[str] = []
        self.seconds_to: Callable[[str], float] = lambda address: 0.0

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        try:
            if address in self.held:
                await self.held[address].wait()
            if (seconds := self.seconds_to(address)) > 0.0:
                await asyncio.sleep(seconds)
            return await super().dial(address, expect=expect, timeout_s=timeout_s)
        except asyncio.CancelledError:
            self.given_up.append(address)
            raise


class Swarm:
    """Nodes, and one user."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.world, self.network = World(), MemoryWorld()
        self.nodes: list[Node] = []
        self._stack = stack
        self.connection: SwarmConnection
        self.user: UserNetwork

    async def node(self, *shards: ShardRecord, **fields: object) -> Node:
        node = Node(self.network, self.world, len(self.nodes) + 1)
        await node.start(record(*shards, **fields))
        self._stack.push_async_callback(node.pool.aclose)
        self._stack.push_async_callback(node.discovery.aclose)
        self.nodes.append(node)
        return node

    async def router(
        self,
        *,
        rules: UserRules | None = None,
        objective: Objective = Objective.LATENCY,
        claims_path: Path | None = None,
    ) -> Router:
        identity = Identity.generate()
        entry = tuple(self.nodes[0].discovery.addresses)
        discovery = MemoryDiscovery(
            identity, DiscoveryConfig((), entry, mdns=False, serve=False), self.world, clock=time.time
        )
        self.user = UserNetwork(self.network, identity)
        self.connection = SwarmConnection(entry, identity=identity, discovery=discovery, network=self.user)
        await self._stack.enter_async_context(self.connection)
        return Router(
            self.connection,
            cast(StoredModel, Model()),
            numerics="f16r32",
            num_layers=NUM_LAYERS,
            first_layers=None,
            row_bytes=1152,
            objective=objective,
            rules=rules or UserRules(),
            claims_path=claims_path,
        )


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    async with AsyncExitStack() as stack:
        yield Swarm(stack)


def in_virtual_time(test: Callable[[Swarm], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            await test(Swarm(stack))

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def places(planned: Planned) -> list[tuple[PeerId, str]]:
    return [(peer, str(layers)) for peer, layers in planned.places]


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
    )


async def test_the_faster_of_two_that_hold_the_same_serves_and_the_other_is_its_alternate(swarm: Swarm) -> None:
    first, slow, fast = (
        await swarm.node(shard(0, 6)),
        await swarm.node(shard(6, 12, 9.0)),
        await swarm.node(shard(6, 12, 5.0)),
    )
    router = await swarm.router()
    planned = await router.route(64)
    assert places(planned) == [(first.peer, "0:6"), (fast.peer, "6:12")]
    assert planned.expected_step_s == pytest.approx(0.060, abs=0.02)
    alternates = await router.alternates(planned, 64)
    assert [[(node.peer, str(layers)) for node, layers in each] for each in alternates] == [[], [(slow.peer, "6:12")]]


async def test_layers_that_are_being_loaded_are_not_planned_with_and_are_told_of(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12, is_ready=False))
    router = await swarm.router()
    with pytest.raises(NoRoute, match=r"no usable node serves layers 0:12.*1 nodes are still loading it"):
        await router.route(64, wait=False)
    (rejected,) = (await view(router)).rejected
    assert "loading" in rejected.why


@pytest.mark.parametrize(
    "absurd",
    [
        shard(0, 12, 0.0),
        shard(0, 12, 1e-12, kv_free_tokens=2**53),
        shard(0, 12, 1e8),
        shard(0, 4000, 0.0, num_layers=4000),
        shard(0, 4, 0.0, num_layers=4),
    ],
    ids=["no time at all", "next to no time", "a day per layer", "more layers than there are", "fewer layers"],
)
async def test_absurd_claim_leaves_the_other_nodes_where_they_were(swarm: Swarm, absurd: ShardRecord) -> None:
    honest = await swarm.node(shard(0, 12, 2.0))
    liar = await swarm.node(absurd, price=1e9, up_Bps=2**53, coordinate=CoordinateRecord((1e3, -1e3, 1e3), 1e5, 0.0))
    router = await swarm.router(rules=UserRules(deny=(liar.peer,)))
    alone = await router.route(64)
    among = await (await swarm.router()).route(64)
    assert places(alone) == [(honest.peer, "0:12")]
    assert alone.expected_step_s == pytest.approx(0.026, abs=0.01)
    # It may be taken at its word until it was measured, but what it says of itself changes nothing about the other.
    assert places(among) in ([(honest.peer, "0:12")], [(liar.peer, "0:12")])


async def test_a_node_that_took_longer_than_it_says_loses_its_place_and_the_plan_says_so(swarm: Swarm) -> None:
    honest, liar = await swarm.node(shard(0, 12, 2.0)), await swarm.node(shard(0, 12, 0.1))
    router = await swarm.router()
    planned = await router.route(64)
    assert places(planned) == [(liar.peer, "0:12")]
    for _ in range(8):
        router.observe_round(planned.places, [(0.0012, 0.0)], num_rows=1, round_s=0.090)
    assert places(await router.route(64)) == [(honest.peer, "0:12")]
    (rejected,) = (await view(router)).rejected
    assert rejected.peer == liar.peer
    assert "announces 0.1 ms per layer" in rejected.note


async def test_another_process_plans_with_what_this_one_has_measured(swarm: Swarm, tmp_path: Path) -> None:
    honest, liar = await swarm.node(shard(0, 12, 2.0)), await swarm.node(shard(0, 12, 0.1))
    path = tmp_path / "claims" / "tiny.json"
    first = await swarm.router(claims_path=path)
    planned = await first.route(64)
    first.save()
    assert not path.exists()  # nothing was measured yet
    for _ in range(8):
        first.observe_round(planned.places, [(0.0012, 0.0)], num_rows=1, round_s=0.090)
    first.save(not_within_s=60.0)
    assert not path.exists()  # a moment ago
    first.save()
    assert places(await (await swarm.router()).route(64)) == [(liar.peer, "0:12")]
    second = await swarm.router(claims_path=path)
    assert places(await second.route(64)) == [(honest.peer, "0:12")]
    (rejected,) = (await view(second)).rejected
    assert "announces 0.1 ms per layer" in rejected.note


async def test_what_messages_took_beyond_what_was_expected_is_part_of_the_next_plan(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12, 2.0))
    router = await swarm.router()
    planned = await router.route(64)
    before_s = planned.expected_step_s
    assert before_s is not None
    for _ in range(5):
        router.observe_round(planned.places, [(0.024, 0.0)], num_rows=1, round_s=before_s + 0.003)
    after_s = (await router.route(64)).expected_step_s
    assert after_s == pytest.approx(before_s + 0.003, abs=1e-3)  # round trips are measured anew meanwhile


async def test_the_users_own_part_of_a_plan_is_what_it_took_of_late(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12, 2.0))
    router = await swarm.router()
    router.user_step_s = 0.004
    assert (await view(router)).user_ms == pytest.approx(4.0)
    for seconds in (0.009, 0.010, 5.0):  # a pause
        router.observe_user_step(seconds)
    assert (await view(router)).user_ms == pytest.approx(10.0)


async def test_whom_the_rules_deny_is_not_even_dialled_and_the_error_says_which_rule(swarm: Swarm) -> None:
    await swarm.node(shard(0, 6))
    denied = await swarm.node(shard(6, 12), region="us-east")
    router = await swarm.router(rules=UserRules(deny=("region:us",)))
    with pytest.raises(NoRoute, match=r"no node for layers 6:12 of tiny is left by your rules: 1 × .*region us"):
        await router.route(64, wait=False)
    assert denied.links == []
    (rejected,) = [each for each in (await view(router)).rejected if each.peer == denied.peer]
    assert rejected.reason == Reason.RULE


async def test_rule_about_the_whole_route_is_named_when_nothing_keeps_it(swarm: Swarm) -> None:
    await swarm.node(shard(0, 6), operator="anna")
    await swarm.node(shard(6, 12), operator="anna")
    assert len((await (await swarm.router()).route(64)).stages) == 2
    for rules, named in (
        (UserRules(distinct_operators=True), "distinct operators"),
        (UserRules(max_stages=1), "1 stage"),
    ):
        router = await swarm.router(rules=rules)
        with pytest.raises(NoRoute, match=rf"tiny.*{named}"):
            await router.route(64, wait=False)


async def test_rules_lead_the_route_around_a_node(swarm: Swarm) -> None:
    whole = await swarm.node(shard(0, 12, 1.0), operator="big")
    first, second = await swarm.node(shard(0, 6)), await swarm.node(shard(6, 12))
    assert places(await (await swarm.router()).route(64)) == [(whole.peer, "0:12")]
    router = await swarm.router(rules=UserRules(deny=(whole.peer[-8:],)))
    assert places(await router.route(64)) == [(first.peer, "0:6"), (second.peer, "6:12")]


async def test_node_that_failed_a_moment_ago_is_avoided_but_better_than_none(swarm: Swarm) -> None:
    fast, slow = await swarm.node(shard(0, 12, 1.0)), await swarm.node(shard(0, 12, 9.0))
    router = await swarm.router()
    assert places(await router.route(64)) == [(fast.peer, "0:12")]
    router.note_failure(PeerUnreachable(fast.peer, "gone"))
    assert places(await router.route(64)) == [(slow.peer, "0:12")]
    assert places(await router.route(64, avoid_peers=[slow.peer])) == [(fast.peer, "0:12")]


async def test_of_those_that_failed_two_that_cannot_hand_over_to_one_another_come_last(swarm: Swarm) -> None:
    first, second = await swarm.node(shard(0, 6, 1.0)), await swarm.node(shard(6, 12))
    slow = await swarm.node(shard(0, 6, 900.0))
    router = await swarm.router()
    avoided = [first.peer, second.peer, slow.peer]
    found = await router.route(64, avoid_peers=avoided, avoid_pairs=[(first.peer, second.peer)])
    assert places(found) == [(first.peer, "0:5"), (slow.peer, "5:6"), (second.peer, "6:12")]
    pairs = [(first.peer, second.peer), (slow.peer, second.peer)]
    assert places(await router.route(64, avoid_pairs=pairs)) == [(first.peer, "0:6"), (second.peer, "6:12")]


async def test_patch_replaces_the_lost_stage_alone_with_one_node_or_several(swarm: Swarm) -> None:
    first = await swarm.node(shard(0, 4))
    middle = await swarm.node(shard(4, 8))
    last = await swarm.node(shard(8, 12))
    left, right = await swarm.node(shard(3, 6, 30.0)), await swarm.node(shard(6, 9, 30.0))
    router = await swarm.router()
    planned = await router.route(64)
    assert places(planned) == [(first.peer, "0:4"), (middle.peer, "4:8"), (last.peer, "8:12")]
    patched = await router.patch(planned, [1], 64)
    assert patched is not None
    assert places(patched) == [
        (first.peer, "0:4"),
        (left.peer, "4:6"),
        (right.peer, "6:8"),
        (last.peer, "8:12"),
    ]
    assert await router.patch(planned, [0], 64) is None
    assert await router.patch(planned, [1], 64, avoid_peers=[left.peer]) is None
    assert await router.patch(planned, [1], 64, avoid_pairs=[(last.peer, right.peer)]) is None


async def test_patch_and_alternates_of_a_long_session_avoid_who_is_slow_at_many_rows(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12, 1.0))
    slow_at_many = await swarm.node(shard(0, 12, seconds_per_layer=(0.002, 0.01, 1.0)))
    other = await swarm.node(shard(0, 12, 3.0))
    router = await swarm.router()
    planned = await router.route(4096)
    for rows, expected in ((0, slow_at_many), (2000, other)):
        patched = await router.patch(planned, [0], 4096, num_rows=rows, num_generated=100)
        assert patched is not None
        assert places(patched) == [(expected.peer, "0:12")]
        ((alternate,),) = await router.alternates(planned, 4096, num_rows=rows, num_generated=100)
        assert alternate[0].peer == expected.peer


async def test_patch_finds_a_node_that_came_after_the_last_look(swarm: Swarm) -> None:
    lost = await swarm.node(shard(0, 12))
    router = await swarm.router()
    planned = await router.route(64)
    newcomer = await swarm.node(shard(0, 12))
    assert await router.alternates(planned, 64) == ((),)
    patched = await router.patch(planned, [0], 64)
    assert patched is not None
    assert places(patched) == [(newcomer.peer, "0:12")]
    assert lost.peer not in {peer for peer, _ in patched.places}


def test_route_is_not_kept_waiting_by_a_node_that_does_not_answer_and_that_is_planned_with_when_it_does() -> None:
    async def test(swarm: Swarm) -> None:
        there, late = await swarm.node(shard(0, 12, 9.0)), await swarm.node(shard(0, 12))
        router = await swarm.router()
        swarm.user.held[late.address] = asyncio.Event()
        planned = await router.route(64)
        assert places(planned) == [(there.peer, "0:12")]
        assert not swarm.user.given_up, "it was waited for as long as a dial may take"
        assert await router.alternates(planned, 64) == ((),)
        swarm.user.held[late.address].set()
        await asyncio.sleep(1.0)
        assert await router.alternates(planned, 64) != ((),)
        assert places(await router.route(64)) == [(late.peer, "0:12")]

    in_virtual_time(test)


async def test_who_can_only_be_reached_slowly_is_waited_for_where_nobody_else_serves(swarm: Swarm) -> None:
    slow, other = await swarm.node(shard(0, 6)), await swarm.node(shard(6, 12))
    router = await swarm.router()
    swarm.user.held[slow.address] = asyncio.Event()
    search = asyncio.create_task(router.route(64))
    while swarm.connection.links.round_trip_s(other.peer) is None:  # noqa: ASYNC110 - of a dial that nobody tells of
        await asyncio.sleep(0)
    swarm.user.held[slow.address].set()
    async with asyncio.timeout(PATIENCE_S):
        assert places(await search) == [(slow.peer, "0:6"), (other.peer, "6:12")]


def test_one_that_answers_at_once_does_not_keep_out_who_is_a_continent_away() -> None:
    async def test(swarm: Swarm) -> None:
        near, far = await swarm.node(shard(0, 12, 500.0)), await swarm.node(shard(0, 12))
        router = await swarm.router()
        # TCP, the upgrade, the handshake, Hello and the first ping, at 300 ms each.
        swarm.user.seconds_to = {near.address: 0.0, far.address: 5 * 0.3}.__getitem__
        assert places(await router.route(64)) == [(far.peer, "0:12")]

    in_virtual_time(test)


def test_look_does_not_wait_again_for_one_that_did_not_answer_to_its_end() -> None:
    async def test(swarm: Swarm) -> None:
        there, frozen = await swarm.node(shard(0, 12)), await swarm.node(shard(0, 12))
        router = await swarm.router()
        swarm.user.held[frozen.address] = asyncio.Event()
        loop = asyncio.get_running_loop()
        await router.route(64)
        await asyncio.sleep(PATIENCE_S)
        router.note_failure(PeerUnreachable(PeerId("somebody else"), ""))
        began = loop.time()
        await router.route(64)
        assert loop.time() - began < 0.1
        swarm.user.held[frozen.address].set()
        await asyncio.sleep(PATIENCE_S)
        planned = await router.route(64, avoid_peers=[there.peer])
        assert places(planned) == [(frozen.peer, "0:12")]

    in_virtual_time(test)


def test_among_many_nodes_who_answers_while_others_are_measured_counts_as_measured() -> None:
    async def test(swarm: Swarm) -> None:
        for _ in range(MAX_MEASURED + 6):
            await swarm.node(shard(0, 12))
        await swarm.router()
        dialled: list[str] = []

        def seconds_to(address: str) -> float:
            dialled.append(address)
            return {2: 1.5 * GRACE_S, MAX_MEASURED // 2 + 2: 3 * GRACE_S}.get(len(dialled), 0.0)

        swarm.user.seconds_to = seconds_to
        found: dict[PeerId, MeasuredNode] = {}
        records = await swarm.connection.find(MODEL)
        nodes = await swarm.connection.measure(records, on_late=lambda node: found.update({node.peer: node}))
        found.update({node.peer: node for node in nodes})
        late = next(node for node in swarm.nodes if node.address == dialled[1])
        assert found[late.peer].round_trip_s is not None

    in_virtual_time(test)


async def test_fault_of_ours_is_not_swallowed_when_nobody_waits_for_the_measurement_any_more(swarm: Swarm) -> None:
    there, late = await swarm.node(shard(0, 12)), await swarm.node(shard(0, 12))
    await swarm.router()
    loop, held, told = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda loop, context: told.set())
    connect = swarm.connection.links.connect

    async def connect_or_fail(peer: PeerId, addresses: Sequence[str], *, timeout_s: float) -> None:
        if peer == late.peer:
            await held.wait()
            raise RuntimeError("ours")
        await connect(peer, addresses, timeout_s=timeout_s)

    swarm.connection.links.connect = connect_or_fail  # type: ignore[method-assign]
    records = await swarm.connection.find(MODEL)
    nodes = await swarm.connection.measure(records, doubtful=[late.peer], on_late=lambda node: None)
    assert {node.peer for node in nodes if node.round_trip_s is not None} == {there.peer}
    held.set()
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()


async def test_where_there_is_no_room_for_more_links_a_route_leads_over_those_that_there_are(swarm: Swarm) -> None:
    for _ in range(3):
        await swarm.node(shard(0, 12))
    router = await swarm.router()
    swarm.connection.links._max_links = 1
    (place,) = (await router.route(64)).places
    assert swarm.connection.links.is_connected(place[0])


async def test_search_for_a_route_ends_when_the_connection_is_closed(swarm: Swarm) -> None:
    await swarm.node(shard(0, 6))
    slow = await swarm.node(shard(6, 12))
    router = await swarm.router()
    dialled = asyncio.Event()
    swarm.user.held[slow.address] = asyncio.Event()
    swarm.user.seconds_to = lambda address: float(dialled.set() or 0.0)
    search = asyncio.create_task(router.route(64))
    await dialled.wait()
    await swarm.connection.aclose()
    with pytest.raises(NoPeers):
        await search


async def test_answers_that_lack_alternates_share_their_looks(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12))
    router = await swarm.router()
    find, num_finds = swarm.connection.find, 0

    async def counted(*arguments: Any, **named: Any) -> list[NodeRecord]:
        nonlocal num_finds
        num_finds += 1
        await asyncio.sleep(0)
        return await find(*arguments, **named)

    swarm.connection.find = counted  # type: ignore[method-assign]
    await router.route(64)
    await asyncio.gather(*(router.refresh() for _ in range(20)))
    assert num_finds == 1, "the route was looked for a moment ago"
    router._looked_at -= SHARED_LOOK_S
    await asyncio.gather(*(router.refresh() for _ in range(20)))
    assert num_finds == 2


async def test_patch_is_made_with_a_node_that_has_told_of_itself_without_another_look(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12))
    router = await swarm.router()
    planned = await router.route(64)
    newcomer = await swarm.node(shard(0, 12))
    swarm.connection.find = never  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(PATIENCE_S):
        patched = await router.patch(planned, [0], 64)
    assert patched is not None
    assert places(patched) == [(newcomer.peer, "0:12")]


async def test_who_told_of_itself_after_the_last_look_is_an_alternate(swarm: Swarm) -> None:
    await swarm.node(shard(0, 12))
    router = await swarm.router()
    planned = await router.route(64)
    newcomer = await swarm.node(shard(0, 12))
    swarm.connection.find = never  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(PATIENCE_S):
        await router.take_news()
    assert [node.peer for found in await router.alternates(planned, 64) for node, _ in found] == [newcomer.peer]


async def test_who_was_out_of_reach_at_the_last_look_and_tells_of_itself_again_is_an_alternate(
    swarm: Swarm,
) -> None:
    await swarm.node(shard(0, 12))
    back = await swarm.node(shard(0, 12, 9.0))
    router = await swarm.router()
    address, back.address = back.address, f"{back.host}:1"
    await back.announce(record(shard(0, 12, 9.0), sequence=2))
    planned = await router.route(64)
    assert await router.alternates(planned, 64) == ((),)
    back.address = address
    await back.announce(record(shard(0, 12, 9.0), sequence=3))
    await router.take_news()
    assert [node.peer for found in await router.alternates(planned, 64) for node, _ in found] == [back.peer]


async def never(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def test_whom_one_answer_avoids_the_others_may_have(swarm: Swarm) -> None:
    lost, other = await swarm.node(shard(0, 12)), await swarm.node(shard(0, 12, 9.0))
    router = await swarm.router()
    planned = await router.route(64)
    assert places(planned) == [(lost.peer, "0:12")]
    assert await router.patch(planned, [0], 64, avoid_peers=[other.peer]) is None
    assert [node.peer for found in await router.alternates(planned, 64) for node, _ in found] == [other.peer]
    assert places(await router.route(64)) == [(lost.peer, "0:12")]


async def test_patch_keeps_operators_apart_though_a_stage_that_stays_begins_to_move(swarm: Swarm) -> None:
    mover = await swarm.node(shard(0, 6), operator="anna")
    lost = await swarm.node(shard(6, 12), operator="bob")
    await swarm.node(shard(6, 12, 1.0), operator="anna")
    other = await swarm.node(shard(6, 12, 9.0), operator="carol")
    router = await swarm.router(rules=UserRules(distinct_operators=True))
    planned = await router.route(64)
    assert [place[0] for place in planned.places] == [mover.peer, lost.peer]
    moving = record(shard(0, 6, is_ready=False), operator="anna", sequence=2)
    await mover.announce(moving)
    await router.refresh()
    patched = await router.patch(planned, [1], 64)
    assert patched is not None
    assert places(patched) == [(mover.peer, "0:6"), (other.peer, "6:12")]


async def test_of_a_large_swarm_a_part_is_measured_and_no_route_leads_over_the_rest_unmeasured(swarm: Swarm) -> None:
    away = CoordinateRecord((0.001, 0.0, 0.0), 0.0001, 0.1)
    for number in range(MAX_MEASURED + 6):
        await swarm.node(shard(0, 12, 5.0 + number % 7), coordinate=away)
    router = await swarm.router()
    planned = await router.route(64)
    (stage,) = planned.stages
    assert stage[0].round_trip_s is not None
    told = await view(router)
    assert told.num_found == MAX_MEASURED + 6
    assert MAX_MEASURED <= told.num_measured < told.num_found
    assert told.coordinate_error is not None


async def test_who_was_chosen_unmeasured_and_does_not_answer_is_left_like_any_other(swarm: Swarm) -> None:
    slow, fast = await swarm.node(shard(0, 12, 5000.0)), await swarm.node(shard(0, 12, 1.0))
    router = await swarm.router()
    measure, may_leave = swarm.connection.measure, dict[PeerId, bool]()

    async def watched(
        records: Sequence[NodeRecord], *, on_late: Callable[[MeasuredNode], None] | None = None, **named: Any
    ) -> list[MeasuredNode]:
        if len(records) > 1:  # as in a swarm that is too large to be measured
            return await measure([each for each in records if each.peer == slow.peer], on_late=on_late, **named)
        may_leave[PeerId(records[0].peer)] = on_late is not None
        return [MeasuredNode(records[0], None, "it has not answered yet")]

    swarm.connection.measure = watched  # type: ignore[method-assign]
    assert places(await router.route(64)) == [(slow.peer, "0:12")]
    assert may_leave == {fast.peer: True}


async def test_plan_is_readable_in_eighty_columns_and_hides_no_control_character(swarm: Swarm) -> None:
    await swarm.node(shard(0, 6), operator="anna\x1b[31m", region="eu\u202ewest", device="gpu\x07" + "x" * 80)
    await swarm.node(shard(6, 12, 9.0, queue_s=0.004), price=0.25)
    await swarm.node(shard(6, 12))
    await swarm.node(shard(0, 12, numerics="fp32\x1b"))
    await swarm.node(shard(4, 5))
    told = await view(await swarm.router())
    text = "\n".join(in_words(told))
    assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "tokens/s" in text
    assert "not chosen:" in text
    assert {stage.stop for stage in told.stages} == {6, 12}
    assert len(told.legs) == 3
    assert told.ms_per_token == pytest.approx(
        sum(leg.ms for leg in told.legs)
        + sum(stage.compute_ms + stage.queue_ms for stage in told.stages)
        + told.user_ms,
        abs=0.01,
    )
    assert {each.reason for each in told.rejected} == {"slower", "outside"}
    assert msgspec.json.decode(msgspec.json.encode(told), type=PlanView) == told
