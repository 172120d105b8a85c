"""Answers over real servers, links and engine, of which some are lost on the way: not a token is different.

What the cores decide is tested with many more faults in tests/core/test_answer_core.py; here the shells are: the links
that notice, the rows that are made and sent, the nodes that compute.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from fusion_node.client.answer import AnswerShell, EncodedRows, Found
from fusion_node.client.answer_core import (
    AnswerCore,
    AnswerEvent,
    Opened,
    PeerFailed,
    Place,
    Prefix,
    Repaired,
    RepairKind,
    RouteKind,
    SessionBegan,
    StepDone,
    WantsAlternates,
    WantsRoute,
)
from fusion_node.client.connection import SwarmConnection
from fusion_node.client.speculation_core import SpeculationCore
from fusion_node.engine.tensor_codec import decode_rows
from fusion_node.errors import LocalProtocolError, NoRoute, PeerError
from fusion_node.types import LayerRange, PeerId, UnixS
from p2p.compression import Packed
from p2p.messages import SESSION_BYTES, TensorMeta
from p2p.records import Plan, PlanStage, open_lease, sign_plan
from p2p.tensor_wire import decompress
from scheduler.ownership import OwnershipBreach
from tests.scenarios.swarm import MemorySwarm, Node, until

PROMPT = tuple(7 + 13 * n % 120 for n in range(90))
NUM_TOKENS = 10
RANGES = ((0, 3), (3, 5), (5, 7))


def rows_of(tensor: TensorMeta, payload: memoryview) -> torch.Tensor:
    """What a frame holds."""
    return decode_rows(tensor, decompress(payload, tensor) if tensor.codec else payload)


@dataclass
class Answering:
    """A user with one answer, and a router that knows the nodes of the test."""

    swarm: MemorySwarm
    connection: SwarmConnection
    prompt: Sequence[int] = PROMPT
    prefix: Prefix | None = None
    hidden: set[PeerId] = field(default_factory=set)
    """Whom the router does not know."""
    on_token: Callable[[int], None] = lambda count: None
    on_event: Callable[[AnswerEvent], None] = lambda event: None
    retain: bool = False
    ranges: Sequence[tuple[int, int]] = RANGES
    events: list[AnswerEvent] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def repairs(self) -> list[Repaired]:
        return [event for event in self.events if isinstance(event, Repaired)]

    @property
    def num_sessions(self) -> int:
        return sum(isinstance(event, SessionBegan) for event in self.events)

    @property
    def avoided(self) -> list[str]:
        return [event.error.peer for event in self.events if isinstance(event, PeerFailed)]

    async def run(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        shell = AnswerShell(
            self.connection, self.core(128), self, embed=self.embed, on_compute=self.on_compute, on_event=self.note
        )
        shell.retain = self.retain
        async with asyncio.timeout(60.0), shell:
            while len(self.tokens) < num_tokens:
                logits = self.swarm.boundary.logits(rows_of(*await shell.next_row()))[0]
                position = len(self.ids)
                self.tokens.append(int(logits.argmax()))
                self.on_token(len(self.tokens))
                await self.next_is_wanted()
                if len(self.tokens) < num_tokens:
                    shell.append(position, self.swarm.rows(self.tokens[-1:]))
        return self.tokens

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    def core(
        self, max_positions: int, speculation: SpeculationCore | None = None, taps: Sequence[int] = ()
    ) -> AnswerCore:
        engine = self.swarm.nodes[0].engine

        def plan_of(session: bytes, epoch: int, stages: tuple[PlanStage, ...]) -> tuple[Plan, bytes]:
            peer = self.connection.identity.peer_id
            changes = {"session": session, "epoch": epoch, "stages": stages, "max_positions": max_positions}
            plan = self.swarm.plan(peer, self.swarm.nodes[:1], **changes)
            return plan, sign_plan(plan, self.connection.identity)

        return AnswerCore(
            num_prompt=len(self.prompt),
            row_size=engine.hidden_size,
            wire_dtype=engine.wire_dtype,
            make_plan=plan_of,
            new_session=partial(secrets.token_bytes, SESSION_BYTES),
            open_lease=lambda envelope: open_lease(envelope, now=UnixS(time.time())),
            patience_s=1.0,
            speculation=speculation,
            taps=taps,
        )

    async def embed(self, start: int, stop: int) -> EncodedRows:
        return self.swarm.rows(self.ids[start:stop])

    async def on_compute(self, work: Callable[[], Packed]) -> Packed:
        return work()

    def note(self, event: AnswerEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    async def next_is_wanted(self) -> None:
        """Awaited when a token has come and the next is not asked for."""

    # as a router

    async def find(self, wants: WantsRoute, present: tuple[Place, ...]) -> Found:
        if wants.kind is RouteKind.PATCH:
            patched = self._patched(wants.lost, present, wants.avoid_peers)
            if patched is None:
                raise NoRoute("nobody else")
            return Found(patched)
        deadline = time.monotonic() + (0.5 if wants.wait else 0.0)
        while True:
            for avoided in (wants.avoid_peers, frozenset[PeerId]()):
                places = [self._place(LayerRange(*layers), avoided) for layers in self.ranges]
                if None not in places:
                    return Found(tuple(p for p in places if p is not None), self.prefix)
            if time.monotonic() > deadline:
                raise NoRoute("nobody")
            await asyncio.sleep(0.05)

    async def alternates(self, wants: WantsAlternates, present: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
        found = []
        for index in range(len(present)):
            patched = self._patched((index,), present, wants.avoid_peers)
            found.append(() if patched is None else patched[index : index + 1])
        return tuple(found)

    def is_revoked(self, peer: PeerId) -> bool:
        return False

    def breaches(self, places: Sequence[Place]) -> tuple[OwnershipBreach, ...]:
        return ()

    def _patched(
        self, lost: Sequence[int], present: tuple[Place, ...], avoided: frozenset[PeerId]
    ) -> tuple[Place, ...] | None:
        places = list(present)
        for index in lost:
            place = self._place(present[index].layers, avoided | {each.peer for each in present})
            if place is None:
                return None
            places[index] = place
        return tuple(places)

    def _place(self, layers: LayerRange, avoided: frozenset[PeerId]) -> Place | None:
        for node in self.swarm.nodes:
            if node.engine.layers == layers and node.peer not in avoided | self.hidden:
                return Place(PlanStage(node.peer, layers.start, layers.stop, (node.address,)), 0.001)
        return None


async def answering(swarm: MemorySwarm, **changes: object) -> Answering:
    user = await swarm.user()
    await swarm.measured(user)
    return Answering(swarm, user, **changes)  # type: ignore[arg-type]


async def nodes_of(swarm: MemorySwarm, times: int = 2) -> list[Node]:
    """Each range of layers so many times; the first of them serve."""
    return [await swarm.node(LayerRange(*layers)) for _ in range(times) for layers in RANGES]


async def undisturbed(swarm: MemorySwarm, prompt: Sequence[int] = PROMPT, num_tokens: int = NUM_TOKENS) -> list[int]:
    user = await answering(swarm, prompt=prompt)
    return await user.run(num_tokens)


def freeze(swarm: MemorySwarm, node: Node) -> None:
    """Nothing comes from it any more, and its links stay, as with SIGSTOP."""
    for other in {channel.host for channel in swarm.world.channels}:
        swarm.world.black_hole(node.host, other)


class Doing:
    """What has to be awaited, begun in a call."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def kill(self, node: Node) -> None:
        self.tasks.append(asyncio.create_task(node.pool.aclose("killed")))

    def leave(self, node: Node) -> None:
        self.tasks.append(asyncio.create_task(node.server.drain(timeout_s=5.0, grace_s=30.0)))

    def befall(self, node: Node, fault: str, swarm: MemorySwarm) -> None:
        match fault:
            case "kill":
                self.kill(node)
            case "freeze":
                freeze(swarm, node)
            case "leave":
                self.leave(node)


def once(condition: Callable[[object], bool], work: Callable[[], None]) -> Callable[[object], None]:
    """Calls it at the first that matches."""
    is_done = itertools.count()

    def check(what: object) -> None:
        if condition(what) and next(is_done) == 0:
            work()

    return check


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("fault", ["kill", "freeze", "leave"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
async def test_lost_stage_is_replaced_and_the_tokens_stay_the_same(
    swarm: MemorySwarm, when: str, fault: str, stage: int
) -> None:
    nodes = await nodes_of(swarm)
    expected = await undisturbed(swarm)
    user, doing = await answering(swarm), Doing()

    def strike() -> None:
        doing.befall(nodes[stage], fault, swarm)

    if when == "prefill":
        user.on_event = once(lambda event: isinstance(event, StepDone), strike)
    else:
        user.on_token = once(lambda count: count == 4, strike)
    assert await user.run() == expected
    assert user.num_sessions == 1
    (repair,) = user.repairs
    assert (repair.kind, repair.stage, repair.peer) == (RepairKind.PATCHED, stage, nodes[stage].peer)
    assert user.avoided == [nodes[stage].peer]
    await asyncio.gather(*doing.tasks)


async def test_two_stages_are_lost_at_once_and_a_third_while_they_are_replaced(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm, 3)
    expected = await undisturbed(swarm)
    user, doing = await answering(swarm), Doing()

    def strike() -> None:
        doing.kill(nodes[0])
        doing.kill(nodes[1])

    user.on_token = once(lambda count: count == 4, strike)
    user.on_event = once(lambda event: isinstance(event, Opened) and event.epoch > 0, lambda: doing.kill(nodes[2]))
    assert await user.run() == expected
    assert user.num_sessions == 1
    await asyncio.gather(*doing.tasks)


async def test_stage_that_gives_the_session_up_is_replaced(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    expected = await undisturbed(swarm)
    user = await answering(swarm)
    user.on_token = once(lambda count: count == 4, lambda: nodes[1].server.end_all("internal", "an error in the node"))
    assert await user.run() == expected
    assert user.avoided == [nodes[1].peer]
    assert user.repairs[0].cause == "refused"
    await until(lambda: not any(node.num_sessions for node in nodes))


async def test_reset_link_to_the_user_is_made_again_and_nobody_is_replaced(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    expected = await undisturbed(swarm)
    user = await answering(swarm)

    def strike() -> None:
        for host in {channel.host for channel in swarm.world.channels} - {node.host for node in nodes}:
            swarm.world.cut(host, nodes[1].host)
            swarm.world.cut(host, nodes[2].host)

    user.on_token = once(lambda count: count == 4, strike)
    assert await user.run() == expected
    assert user.repairs == []


async def test_answer_that_began_with_a_kept_prefix_is_repaired(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    first = await answering(swarm)
    first.retain = True
    await first.run(4)
    session = next(event.session for event in first.events if isinstance(event, Opened))
    prompt = [*PROMPT, *first.tokens[:3], 99, 3]
    expected = await undisturbed(swarm, prompt)
    doing = Doing()
    user = Answering(swarm, first.connection, prompt, Prefix(session, 80))
    user.on_token = once(lambda count: count == 4, lambda: doing.kill(nodes[2]))
    assert await user.run() == expected
    opened = [event for event in user.events if isinstance(event, Opened)]
    assert opened[0].reused_positions == 80
    assert user.num_sessions == 1
    await asyncio.gather(*doing.tasks)


async def test_stage_before_that_retains_nothing_has_everything_computed_again(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    expected = await undisturbed(swarm)
    nodes[0].server.outputs.max_bytes = 0
    user, doing = await answering(swarm), Doing()
    user.on_token = once(lambda count: count == 4, lambda: doing.kill(nodes[1]))
    assert await user.run() == expected
    assert user.num_sessions == 2
    assert user.repairs[0].kind is RepairKind.PREFILLED
    await asyncio.gather(*doing.tasks)


async def test_nobody_left_is_a_named_error_in_time(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm, 1)
    user, doing = await answering(swarm), Doing()

    def strike() -> None:
        user.hidden.add(nodes[1].peer)
        doing.kill(nodes[1])

    user.on_token = once(lambda count: count == 4, strike)
    with pytest.raises(NoRoute) as caught:
        await user.run()
    assert isinstance(caught.value.__cause__, PeerError)
    assert len(user.tokens) == 4
    await asyncio.gather(*doing.tasks)


async def test_error_of_ours_comes_out_as_it_is_and_nobody_is_avoided(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    user = await answering(swarm)

    def strike() -> None:
        raise LocalProtocolError("a bug here")

    user.on_token = once(lambda count: count == 4, strike)
    with pytest.raises(LocalProtocolError, match="a bug here"):
        await user.run()
    assert user.avoided == []
    await until(lambda: not any(node.num_sessions for node in nodes))


async def test_rows_that_cannot_be_made_end_the_answer_as_what_they_are(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    user = await answering(swarm)
    user.prompt = [10**9]  # no such token
    with pytest.raises(IndexError):
        await user.run()
    assert user.avoided == []
    await until(lambda: not any(node.num_sessions for node in nodes))


async def test_what_was_under_way_is_cancelled_when_the_user_leaves(swarm: MemorySwarm) -> None:
    nodes = await nodes_of(swarm)
    user, reached = await answering(swarm), asyncio.Event()
    user.on_token = once(lambda count: count == 2, reached.set)
    task = asyncio.create_task(user.run(100))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(node.num_sessions for node in nodes))
