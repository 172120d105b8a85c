"""What a node does with orders to go over to other layers: daemon.mover, with a node and a swarm that are given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from fusion_node.client.topology import SwarmTopology
from fusion_node.daemon.mover import Lookout, Mover, View
from fusion_node.daemon.placement_core import AssignmentDesk
from fusion_node.errors import ResourceExhausted
from fusion_node.types import LayerRange
from p2p.messages import Assign, Assigned
from p2p.records import sign_assignment
from scheduler.swarm_rate import Host, Work
from tests.core.placement_swarms import host, work
from tests.vectors.make_data_plane import ASSIGNMENT, INITIATOR, NOW, RESPONDER

WORK = work(30)


class FakeLookout(Lookout):
    """Sees these hosts."""

    def __init__(self, hosts: list[Host]) -> None:
        self.work: Work = WORK
        self.last_seen = hosts

    async def look(self) -> View:
        return View(self.last_seen, SwarmTopology((), round_trips_s={}))


@dataclass
class FakeNode:
    """Takes any layers, once it may drop what it has.

    Attributes:
        loads: set when the layers have been read; until then a move is under way.
    """

    own: Host = field(default_factory=lambda: Host(INITIATOR.peer_id, 10, 0.002, LayerRange(0, 10)))
    is_between: bool = False
    paused: str | None = None
    error: Exception | None = None
    intents: list[LayerRange | None] = field(default_factory=list)
    told: asyncio.Queue[LayerRange | None] = field(default_factory=asyncio.Queue)
    loads: asyncio.Event = field(default_factory=asyncio.Event)
    begins: asyncio.Event = field(default_factory=asyncio.Event)

    def as_host(self) -> Host:
        return self.own

    async def intend(self, layers: LayerRange | None) -> None:
        self.intents.append(layers)
        self.told.put_nowait(layers)

    async def go_over(self, layers: LayerRange, may_drop: Callable[[], Awaitable[bool]]) -> bool:
        self.begins.set()
        await self.loads.wait()
        if self.error is not None:
            raise self.error
        if not await may_drop():
            return False
        self.own = replace(self.own, held=layers)
        return True


def mover(node: FakeNode, hosts: list[Host]) -> Mover:
    desk = AssignmentDesk(INITIATOR.peer_id, RESPONDER.peer_id, "ab" * 32, WORK)
    return Mover(node, FakeLookout(hosts), desk, may_reconsider=False, unix_clock=lambda: NOW + 1)


def order(sequence: int, start: int, stop: int) -> Assign:
    assignment = msgspec.structs.replace(ASSIGNMENT, sequence=sequence, start=start, stop=stop)
    return Assign(sequence, sign_assignment(assignment, RESPONDER))


async def test_a_later_order_to_stay_takes_back_one_that_was_not_begun() -> None:
    node = FakeNode()
    moving = mover(node, [host("other", 10, (0, 10))])
    assert await moving.take(RESPONDER.peer_id, order(3, 10, 20)) == Assigned(3)
    assert await moving.take(RESPONDER.peer_id, order(4, 0, 10)) == Assigned(4)
    node.loads.set()
    running = asyncio.create_task(moving.run())
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()
    assert node.own.held == LayerRange(0, 10)
    assert node.intents == []


async def test_a_paused_node_says_that_it_is_paused() -> None:
    node = FakeNode(own=Host(INITIATOR.peer_id, 10, 0.002, LayerRange(0, 10), is_pinned=True), paused="paused by hand")
    answer = await mover(node, [host("other", 10, (0, 10))]).take(RESPONDER.peer_id, order(1, 10, 20))
    assert answer.problem == "the node serves nobody now: paused by hand"


async def test_an_order_to_go_back_is_carried_out_after_the_one_that_is_under_way() -> None:
    node = FakeNode()
    moving = mover(node, [host("other", 10, (0, 10)), host("third", 10, (10, 20))])
    running = asyncio.create_task(moving.run())
    assert await moving.take(RESPONDER.peer_id, order(3, 10, 20)) == Assigned(3)
    await node.begins.wait()
    assert await moving.take(RESPONDER.peer_id, order(4, 0, 10)) == Assigned(4)
    node.loads.set()
    async with asyncio.timeout(5):
        assert [await node.told.get() for _ in range(4)] == [LayerRange(10, 20), None, LayerRange(0, 10), None]
    running.cancel()
    assert node.own.held == LayerRange(0, 10)


async def test_a_node_that_cannot_load_stays_and_takes_its_intent_back() -> None:
    node = FakeNode(error=ResourceExhausted("no room"))
    node.loads.set()
    moving = mover(node, [host("other", 10, (0, 10))])
    running = asyncio.create_task(moving.run())
    assert await moving.take(RESPONDER.peer_id, order(3, 10, 20)) == Assigned(3)
    async with asyncio.timeout(5):
        assert [await node.told.get() for _ in range(2)] == [LayerRange(10, 20), None]
    assert not running.done()
    running.cancel()
    assert node.own.held == LayerRange(0, 10)


async def test_a_node_that_holds_nothing_any_more_and_cannot_load_ends() -> None:
    node = FakeNode(error=ResourceExhausted("no room"), is_between=True)
    node.loads.set()
    moving = mover(node, [host("other", 10, (0, 10))])
    running = asyncio.create_task(moving.run())
    await moving.take(RESPONDER.peer_id, order(3, 10, 20))
    with pytest.raises(ResourceExhausted, match="no room"):
        await running
