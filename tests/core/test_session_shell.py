"""The shell around a session and its connection: what is outstanding, who is told, and in which order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from fusion_node.client.connection import SwarmConnection
from fusion_node.client.session_core import SessionCore
from fusion_node.errors import FusionError, NoPeers, PeerClosed
from fusion_node.types import PeerId
from p2p.discovery import DiscoveryConfig
from p2p.identity import Identity
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.memory_discovery import MemoryDiscovery, World
from p2p.messages import AnyMessage, OpenSession, SessionOpened, StageTiming, Step, StepResult, TensorMeta
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage
from tests.scenarios.session import Session

NODE = Identity.from_seed(b"n" * 32).peer_id
ROW = TensorMeta("f32", 1, 2)
NO_ROWS = TensorMeta("f32", 0, 2)


class OneNode:
    """A connection to a node that opens at once; answers come when the test says so."""

    def __init__(self) -> None:
        self.links = self
        self.steps: list[Step] = []
        self.on_message: Callable[[PeerId, AnyMessage, memoryview], None]
        self.on_lost: Callable[[PeerId | None, FusionError], None]

    def register(self, session: bytes, on_message: Any, on_lost: Any) -> None:
        self.on_message, self.on_lost = on_message, on_lost

    def unregister(self, session: bytes) -> None:
        pass

    def send(self, peer: PeerId, message: AnyMessage, payload: object = b"") -> None:
        match message:
            case OpenSession():
                opened = SessionOpened(message.session, message.epoch, message.stage, 120.0)
                asyncio.get_running_loop().call_soon(self.on_message, NODE, opened, memoryview(b""))
            case Step():
                self.steps.append(message)

    def answer(self, step: Step) -> None:
        tensor, payload = (ROW, b"12345678") if step.want else (NO_ROWS, b"")
        result = StepResult(step.session, step.epoch, step.sequence, step.want, tensor, (StageTiming(1, 1),))
        self.on_message(NODE, result, memoryview(payload))


def session_with(node: OneNode) -> Session:
    now = time.time()
    plan = Plan(
        version=PROTOCOL_VERSION,
        user=Identity.from_seed(b"u" * 32).peer_id,
        session=b"s" * 16,
        epoch=0,
        model_id="ab" * 32,
        numerics="fp32",
        max_positions=16,
        issued_at=now,
        expires_at=now + 60,
        stages=(PlanStage(NODE, 0, 2, ()),),
    )
    return Session(node, SessionCore(plan, b"", row_size=2, wire_dtype="f32"))  # type: ignore[arg-type]


async def test_answers_that_arrived_but_were_not_taken_are_outstanding() -> None:
    node = OneNode()
    async with session_with(node) as session:
        session.send(ROW, memoryview(b"12345678"), want_last=False)
        session.send(ROW, memoryview(b"12345678"), want_last=True)
        for step in node.steps:
            node.answer(step)
        assert session.num_outstanding == 2
        done, tensor, _ = await session.next_done()
        assert (done.sequence, tensor, session.num_outstanding) == (0, NO_ROWS, 1)
        done, tensor, payload = await session.next_done()
        assert (done.sequence, tensor, bytes(payload), session.num_outstanding) == (1, ROW, b"12345678", 0)


async def test_send_after_the_end_tells_what_ended_the_session() -> None:
    node = OneNode()
    async with session_with(node) as session:
        node.on_lost(NODE, PeerClosed(NODE, "the node was killed"))
        with pytest.raises(PeerClosed, match="was killed"):
            session.send(ROW, memoryview(b"12345678"), want_last=True)


async def test_closing_the_connection_ends_what_waits_for_an_answer() -> None:
    identity = Identity.generate()
    discovery = MemoryDiscovery(identity, DiscoveryConfig((), (), True, False), World(), clock=time.time)
    network = MemoryNetwork(MemoryWorld(), identity, "user")
    connection = SwarmConnection(identity=identity, discovery=discovery, network=network)
    await connection.start()
    told: list[tuple[PeerId | None, FusionError]] = []
    connection.register(b"s" * 16, lambda *_: None, lambda peer, error: told.append((peer, error)))
    await connection.aclose()
    ((peer, error),) = told
    assert peer is None
    assert isinstance(error, NoPeers)
    node = OneNode()
    async with session_with(node) as session:
        session.send(ROW, memoryview(b"12345678"), want_last=True)
        node.on_lost(None, error)
        with pytest.raises(NoPeers):
            await session.next_done()
