"""Where the routes of an answer come from: with room for guesses where there is some, else without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from fusion_node.client.answer_core import ALTERNATES_EVERY_S, RouteKind, WantsAlternates, WantsRoute
from fusion_node.client.answer_routes import Answer, AnswerRoutes, Work
from fusion_node.client.connection import MeasuredNode
from fusion_node.client.generation import GenerationStats
from fusion_node.client.routing import Placed, Planned
from fusion_node.client.sampling import SamplingParams
from fusion_node.errors import NoRoute
from fusion_node.types import LayerRange, PeerId
from p2p.records import PROTOCOL_VERSION, NodeRecord
from scheduler.ownership import OwnershipBreach

WHOLE = WantsRoute(1, RouteKind.WHOLE, (), frozenset(), frozenset(), wait=True, reason="a new answer")
NUM_POSITIONS, NUM_RESERVED = 40, 80


@dataclass
class Swarm:
    """A router of a swarm with so much room; nodes are awaited until ``on_wait`` has returned."""

    room: int = NUM_RESERVED
    on_wait: Callable[[Swarm], None] = lambda swarm: None
    asked: list[tuple[int, bool]] = field(default_factory=list)
    found: tuple[tuple[Placed, ...], ...] = ()
    """The alternates."""
    stages: tuple[Placed, ...] = ()
    """The route."""
    num_looks: int = 0
    num_news: int = 0

    async def route(
        self,
        num_positions: int,
        *,
        num_prompt: int,
        avoid_peers: Collection[PeerId],
        avoid_pairs: Collection[tuple[PeerId, PeerId]],
        wait: bool,
    ) -> Planned:
        self.asked.append((num_positions, wait))
        if num_positions > self.room and wait:
            self.on_wait(self)
        if num_positions > self.room:
            raise NoRoute("no node has room")
        return Planned(self.stages)

    def is_revoked(self, peer: PeerId) -> bool:
        return False

    def breaches(self, planned: Planned) -> tuple[OwnershipBreach, ...]:
        return ()

    async def refresh(self) -> None:
        self.num_looks += 1

    async def take_news(self) -> bool:
        self.num_news += 1
        return False

    async def alternates(self, *_: object, **__: object) -> tuple[tuple[Placed, ...], ...]:
        return self.found


def _record(peer: str) -> NodeRecord:
    now = time.time()
    return NodeRecord(PROTOCOL_VERSION, peer, 1, now, now + 60.0, (f"{peer}:1",), (), "cpu", 0, (), 0, "test")


def routes_of(
    swarm: Swarm, num_reserved: int = NUM_RESERVED, clock: Callable[[], float] = time.monotonic
) -> AnswerRoutes:
    work = Work(Answer(ids=[1, 2], all_ids=[1, 2], num_prompt=2), SamplingParams(), GenerationStats())
    return AnswerRoutes(swarm, None, work, NUM_POSITIONS, num_reserved=num_reserved, clock=clock)  # type: ignore[arg-type]


async def test_room_for_guesses_is_reserved_where_there_is_some() -> None:
    swarm = Swarm(NUM_RESERVED)
    routes = routes_of(swarm)
    await routes.find(WHOLE, ())
    assert routes.num_reserved == NUM_RESERVED
    assert len(swarm.asked) == 1


async def test_answer_for_whose_guesses_nobody_has_room_reserves_what_it_needs() -> None:
    swarm = Swarm(NUM_RESERVED - 1)
    routes = routes_of(swarm)
    await routes.find(WHOLE, ())
    assert routes.num_reserved == NUM_POSITIONS


async def test_nodes_that_are_awaited_need_no_room_for_guesses() -> None:
    def come(swarm: Swarm) -> None:
        swarm.room = NUM_POSITIONS

    swarm = Swarm(0, come)
    routes = routes_of(swarm)
    await routes.find(WHOLE, ())
    assert routes.num_reserved == NUM_POSITIONS
    swarm.room = NUM_RESERVED
    await routes.find(WHOLE, ())
    assert routes.num_reserved == NUM_RESERVED, "another session asks for it again"


@pytest.mark.parametrize("num_reserved", [NUM_POSITIONS, NUM_RESERVED])
async def test_without_room_for_the_answer_itself_there_is_no_route_and_it_was_awaited_once(num_reserved: int) -> None:
    swarm = Swarm(NUM_POSITIONS - 1)
    with pytest.raises(NoRoute):
        await routes_of(swarm, num_reserved).find(WHOLE, ())
    assert [wait for _, wait in swarm.asked].count(True) == 1
    assert len(swarm.asked) == (1 if num_reserved == NUM_POSITIONS else 2)


ALTERNATES = WantsAlternates(frozenset(), frozenset())
ROUTE = tuple(
    (MeasuredNode(_record(peer), 0.001), LayerRange(start, stop)) for peer, start, stop in (("a", 0, 12), ("b", 12, 30))
)


async def test_when_a_stage_has_no_alternate_the_swarm_is_looked_at_as_soon_as_they_are_asked_for_again() -> None:
    spare = ((MeasuredNode(_record("spare"), 0.001), LayerRange(0, 12)),)
    swarm = Swarm(found=(spare, ()), stages=ROUTE)
    routes = routes_of(swarm)
    present = (await routes.find(WHOLE, ())).places
    assert [len(places) for places in await routes.alternates(ALTERNATES, present)] == [1, 0]
    assert (swarm.num_looks, swarm.num_news) == (0, 1), "the route was looked for a moment ago"
    await routes.alternates(ALTERNATES, present)
    assert (swarm.num_looks, swarm.num_news) == (1, 1)
    swarm.found = (spare, spare)
    await routes.alternates(ALTERNATES, present)
    await routes.alternates(ALTERNATES, present)
    assert (swarm.num_looks, swarm.num_news) == (1, 3)


async def test_for_an_alternate_that_there_never_is_the_swarm_is_looked_at_less_and_less() -> None:
    swarm, now = Swarm(found=((), ()), stages=ROUTE), [1000.0]
    routes = routes_of(swarm, clock=lambda: now[0])
    present = (await routes.find(WHOLE, ())).places
    looked_at: list[int] = []
    for number in range(360):
        num_before = swarm.num_looks
        await routes.alternates(ALTERNATES, present)
        if swarm.num_looks > num_before:
            looked_at.append(number)
        now[0] += ALTERNATES_EVERY_S
    assert looked_at[:5] == [1, 2, 4, 8, 16]
    assert len(looked_at) <= 16, "of an hour, in which there were 360"
    assert swarm.num_news + swarm.num_looks == 360, "who tells of itself is taken at once"
    # Once there was one, the next that is missing is looked for as the first.
    spare = ((MeasuredNode(_record("spare"), 0.001), LayerRange(0, 12)),)
    swarm.found = (spare, spare)
    await routes.alternates(ALTERNATES, present)
    swarm.found, num_before = ((), spare), swarm.num_looks
    for _ in range(3):
        now[0] += ALTERNATES_EVERY_S
        await routes.alternates(ALTERNATES, present)
    assert swarm.num_looks - num_before >= 2
