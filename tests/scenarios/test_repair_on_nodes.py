"""Nodes that die, are cut off or leave in the middle of an answer, and a user who goes on by hand-written messages.

The measure: the rows that come back are those of an undisturbed run, bit for bit as long as every entry is computed by
itself. In other company, as in replays that are merged, rows are summed in another order.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch

from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.tensor_codec import decode_rows
from fusion_node.types import LayerRange, UnixS
from p2p.messages import (
    INT8,
    AnyMessage,
    CloseSession,
    OpenSession,
    Replayed,
    Resend,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    StageTiming,
    Step,
    StepResult,
)
from p2p.records import Lease, Plan, open_lease, sign_plan
from tests.core.serving_world import Order, orders_of
from tests.scenarios.swarm import CPU, MemorySwarm, Node, Raw, step, until

PROMPT = [5, 17, 80, 9, 33, 121, 64, 2, 99, 14, 71]
CHUNKS = (4, 4, 3)
NUM_TOKENS = 6
RANGES = ((0, 3), (3, 5), (5, 7))


@pytest.fixture
async def swarm(swarm: MemorySwarm) -> AsyncIterator[MemorySwarm]:
    yield swarm
    for node in swarm.nodes:
        node.admission.check_integrity()
        node.server.outputs.check_integrity()


@dataclass
class ByHand:
    """A user that decodes greedily, and repairs its session with nothing but messages."""

    swarm: MemorySwarm
    nodes: list[Node]
    wire: str = ""
    max_merged_rows: int = 1
    epoch: int = 0
    ids: list[int] = field(default_factory=lambda: list(PROMPT))
    entries: list[tuple[int, int]] = field(default_factory=list)
    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[SessionFailed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.raw: Raw = self.swarm.stranger()
        self.plan: Plan = self.swarm.plan(self.raw.peer, self.nodes, wire=self.wire)
        self.num_taken = 0
        self.orders: list[Order] = []

    @property
    def dtype(self) -> str:
        return self.wire or "f32"

    def take(self) -> None:
        """What has come since the last look."""
        for _, message, payload in self.raw.frames[self.num_taken :]:
            if isinstance(message, StepResult):
                self.results.setdefault(message.sequence, payload)
            elif isinstance(message, SessionFailed):
                self.failures.append(message)
        self.num_taken = len(self.raw.frames)

    def heard(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """Of the present epoch."""
        return [m for _, m, _ in self.raw.frames if isinstance(m, kind) and getattr(m, "epoch", 0) == self.epoch]

    async def open(self, *, resumes: bool = False) -> list[SessionOpened]:
        for stage, node in enumerate(self.nodes):
            await self.raw.pool.connect(node.peer, [node.address])
            signed = sign_plan(self.plan, self.raw.identity)
            self.raw.pool.send(node.peer, OpenSession(self.plan.session, self.epoch, stage, signed, resumes=resumes))
        await until(lambda: len(self.heard(SessionOpened)) == len(self.nodes))
        opened = sorted(self.heard(SessionOpened), key=lambda m: m.stage)  # type: ignore[union-attr, return-value]
        for node, told in zip(self.nodes, opened, strict=True):
            assert isinstance(told, SessionOpened)
            self.check_lease(node, told.lease)
        return opened  # type: ignore[return-value]

    def check_lease(self, node: Node, envelope: bytes) -> None:
        lease = open_lease(envelope, now=UnixS(time.time()))
        assert isinstance(lease, Lease)
        assert (lease.node, lease.user, lease.session) == (node.peer, self.raw.peer, self.plan.session)
        assert (lease.epoch, lease.num_positions) == (self.epoch, self.plan.max_positions)
        assert (lease.start, lease.stop) == (node.engine.layers.start, node.engine.layers.stop)

    def send(self, sequence: int, first: int, num_rows: int, **changes: object) -> None:
        tensor, payload = self.swarm.rows(self.ids[first : first + num_rows], self.dtype)
        made = step(self.plan, tensor, sequence, first_node=first + 1, **changes)
        self.raw.pool.send(self.nodes[0].peer, made, payload)

    def send_next(self, num_rows: int) -> None:
        first = sum(n for _, n in self.entries)
        self.entries.append((first, num_rows))
        self.send(len(self.entries) - 1, first, num_rows)

    async def read(self) -> None:
        """The prompt, chunk by chunk."""
        for num_rows in CHUNKS:
            self.send_next(num_rows)
            await self.result(len(self.entries) - 1)

    async def result(self, sequence: int) -> bytes:
        def has_come() -> bool:
            self.take()
            return sequence in self.results

        await until(has_come)
        return self.results[sequence]

    async def decode_one(self) -> None:
        """The token that follows the last row, and the row that follows the token."""
        row = await self.result(len(self.entries) - 1)
        tensor, _ = self.swarm.rows([0], self.dtype)
        self.ids.append(int(self.swarm.boundary.logits(decode_rows(tensor, memoryview(row)))[0].argmax()))
        self.send_next(1)

    async def replace(self, stage: int, node: Node) -> None:
        """Another node in the place of one."""
        old = self.nodes[stage]
        self.epoch += 1
        self.nodes = [*self.nodes[:stage], node, *self.nodes[stage + 1 :]]
        if self.raw.pool.is_connected(old.peer):
            self.raw.pool.send(old.peer, CloseSession(self.plan.session, self.epoch))
        stages = self.swarm.plan(self.raw.peer, self.nodes).stages
        self.plan = msgspec.structs.replace(self.plan, epoch=self.epoch, stages=stages)
        opened = await self.open(resumes=True)
        self.take()
        self.orders = []
        lacks = [told.next_sequence for told in opened]
        for order in orders_of(self.entries, lacks, self.results, max_merged_rows=self.max_merged_rows):
            if order.begin:
                assert opened[order.begin - 1].retained_positions >= order.first_position + order.num_rows
            self.order(order)
            if self.max_merged_rows == 1:
                await self.replayed(order)
        await until(lambda: all(self.has_come(order) for order in self.orders))

    def order(self, order: Order) -> None:
        self.orders.append(order)
        stop = None if order.is_wanted else order.end
        first, num_rows = order.first_position, order.num_rows
        if order.begin == 0:
            want = {} if order.is_wanted else {"want": ()}
            self.send(order.sequence, first, num_rows, covers=order.covers, stop_stage=stop, **want)
            return
        resend = Resend(
            self.plan.session, self.epoch, order.sequence, order.covers, first, num_rows, order.is_wanted, stop
        )
        self.raw.pool.send(self.nodes[order.begin - 1].peer, resend)

    def has_come(self, order: Order) -> bool:
        self.take()
        if order.is_wanted:
            return order.sequence in self.results
        end = order.sequence + order.covers
        told = [m for m in self.heard(Replayed) if isinstance(m, Replayed)]
        return any((m.stage, m.next_sequence) == (order.end, end) for m in told)

    async def replayed(self, order: Order) -> None:
        await until(lambda: self.has_come(order))


async def undisturbed(swarm: MemorySwarm, wire: str = "") -> ByHand:
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES], wire)
    await user.open()
    await user.read()
    for _ in range(NUM_TOKENS):
        await user.decode_one()
    await user.result(len(user.entries) - 1)
    return user


async def finish(user: ByHand) -> None:
    while len(user.entries) < len(CHUNKS):
        user.send_next(CHUNKS[len(user.entries)])
    while len(user.entries) < len(CHUNKS) + NUM_TOKENS:
        await user.decode_one()
    await user.result(len(user.entries) - 1)


def assert_same(ours: ByHand, theirs: ByHand, *, bits: bool) -> None:
    assert ours.ids == theirs.ids
    assert ours.results.keys() == theirs.results.keys()
    for sequence, row in ours.results.items():
        if bits:
            assert row == theirs.results[sequence], f"entry {sequence}"
        else:
            a, b = (np.frombuffer(each, dtype=np.float32) for each in (row, theirs.results[sequence]))
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), f"entry {sequence}"


async def die(node: Node, others: Sequence[Node], user: ByHand) -> None:
    """Its links end, all at once."""
    await node.pool.aclose("killed")
    await until(lambda: all(not each.pool.is_connected(node.peer) for each in others if each is not node))
    await until(lambda: not user.raw.pool.is_connected(node.peer))


@pytest.mark.parametrize("wire", ["", INT8])
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_stage_that_dies_while_tokens_are_decoded_is_replaced_and_no_bit_changes(
    swarm: MemorySwarm, stage: int, wire: str
) -> None:
    alone = await undisturbed(swarm, wire)
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES], wire)
    await user.open()
    await user.read()
    for _ in range(3):
        await user.decode_one()
    victim = user.nodes[stage]
    await die(victim, user.nodes, user)
    await user.replace(stage, await swarm.node(LayerRange(*RANGES[stage])))
    await finish(user)
    assert_same(user, alone, bits=True)
    assert {(f.code, f.culprit, f.is_kept) for f in user.failures} <= {("peer-lost", victim.peer, True)}
    assert [node.server.counters["sessions_adopted"] for node in user.nodes] == [int(i != stage) for i in range(3)]


@pytest.mark.parametrize("num_done", [0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_stage_that_dies_while_the_prompt_is_read_is_replaced(
    swarm: MemorySwarm, stage: int, num_done: int
) -> None:
    """Chunks that are under way together share forwards as they meet."""
    alone = await undisturbed(swarm)
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES])
    await user.open()
    for num_rows in CHUNKS:
        user.send_next(num_rows)
    await until(lambda: user.nodes[stage].server.counters["steps"] >= num_done)
    await die(user.nodes[stage], user.nodes, user)
    await user.replace(stage, await swarm.node(LayerRange(*RANGES[stage])))
    await finish(user)
    assert_same(user, alone, bits=False)


async def test_two_nodes_take_the_place_of_one_and_entries_are_replayed_together(swarm: MemorySwarm) -> None:
    alone = await undisturbed(swarm)
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES], max_merged_rows=256)
    await user.open()
    await user.read()
    for _ in range(3):
        await user.decode_one()
    await user.result(len(user.entries) - 1)
    await die(user.nodes[0], user.nodes, user)
    first, second = await swarm.node(LayerRange(0, 1)), await swarm.node(LayerRange(1, 3))
    user.nodes = [first, *user.nodes]
    await user.replace(1, second)
    assert [node.server.counters["steps"] for node in (first, second)] == [1, 1]
    assert user.nodes[2].server.counters["steps"] == len(user.entries)
    await finish(user)
    assert_same(user, alone, bits=False)


async def test_every_stage_dies_one_after_the_other_also_the_replacements(swarm: MemorySwarm) -> None:
    alone = await undisturbed(swarm)
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES])
    await user.open()
    await user.read()
    for stage in (1, 0, 1, 2, 2, 0):
        await user.decode_one()
        await die(user.nodes[stage], user.nodes, user)
        await user.replace(stage, await swarm.node(LayerRange(*RANGES[stage])))
    await finish(user)
    assert user.epoch == 6
    assert_same(user, alone, bits=True)


async def test_node_that_leaves_serves_until_its_user_has_gone_elsewhere(swarm: MemorySwarm) -> None:
    alone = await undisturbed(swarm)
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES])
    await user.open()
    await user.read()
    leaver = user.nodes[1]
    leaving = asyncio.create_task(leaver.server.drain(timeout_s=5.0, grace_s=60.0))
    await until(lambda: bool(user.heard(SessionDraining)))
    await user.decode_one()
    await user.decode_one()
    assert not leaving.done()
    await user.replace(1, await swarm.node(LayerRange(*RANGES[1])))
    await asyncio.wait_for(leaving, 20.0)  # at once, not after its grace
    await finish(user)
    assert_same(user, alone, bits=True)
    assert not user.failures


async def test_leaver_whose_user_stays_ends_the_session_when_its_grace_or_its_patience_is_over(
    swarm: MemorySwarm,
) -> None:
    for hurry in (None, asyncio.Event()):
        user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES])
        await user.open()
        grace_s = 0.05 if hurry is None else 3600.0
        leaving = asyncio.create_task(user.nodes[2].server.drain(timeout_s=5.0, grace_s=grace_s, hurry=hurry))
        await until(lambda user=user: bool(user.heard(SessionDraining)))
        if hurry is not None:
            hurry.set()
        await asyncio.wait_for(leaving, 20.0)
        await until(lambda user=user: bool(user.heard(SessionFailed)))
        (failed,) = user.heard(SessionFailed)
        assert isinstance(failed, SessionFailed)
        assert (failed.code, failed.culprit, failed.is_kept) == ("draining", "", False)


class HeldStage(Stage):
    """Its forwards wait."""

    began = threading.Event()
    goes_on = threading.Event()

    def forward(self, steps: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        self.began.set()
        self.goes_on.wait(20)
        return super().forward(steps, pool)

    def part(self, layers: LayerRange) -> Stage:
        return self


async def test_query_is_answered_while_a_forward_runs(swarm: MemorySwarm) -> None:
    held = HeldStage.load(swarm.model, LayerRange(3, 5), numerics=numerics_class("fp32"), device=CPU)
    nodes = [await swarm.node(LayerRange(*each)) for each in RANGES]
    nodes[1] = await swarm.node(LayerRange(3, 5), stage=held)
    user = ByHand(swarm, nodes)
    await user.open()
    user.send_next(4)
    try:
        await until(HeldStage.began.is_set)
        user.raw.pool.send(user.nodes[1].peer, SessionQuery(user.plan.session, 0, 1))
        await until(lambda: bool(user.heard(SessionProgress)))
        (progress,) = user.heard(SessionProgress)
        assert isinstance(progress, SessionProgress)
        assert (progress.stage, progress.next_sequence, progress.num_done) == (1, 1, 0)
        user.check_lease(user.nodes[1], progress.lease)
        user.take()
        assert 0 not in user.results
    finally:
        HeldStage.goes_on.set()
    await user.result(0)


async def test_rows_that_are_spoiled_on_the_way_leave_the_session_to_be_repaired(swarm: MemorySwarm) -> None:
    """The stage before sends what no stage may: its successor blames it, and goes on behind another one."""
    alone = await undisturbed(swarm)
    user = ByHand(swarm, [await swarm.node(LayerRange(*each)) for each in RANGES])
    await user.open()
    await user.read()
    await user.decode_one()
    await user.result(len(user.entries) - 1)
    spoiler = user.nodes[1]
    tensor, payload = swarm.rows([7])
    spoiled = bytearray(payload)
    spoiled[:4] = np.float32(np.nan).tobytes()
    first = sum(n for _, n in user.entries) + 1
    timings = (StageTiming(0, 0), StageTiming(0, 0))
    bad: Step = step(user.plan, tensor, len(user.entries), first_node=first, timings=timings)
    spoiler.pool.send(user.nodes[2].peer, bad, bytes(spoiled))
    await until(lambda: bool(user.heard(SessionFailed)))
    (failed,) = user.heard(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.stage, failed.code, failed.culprit, failed.is_kept) == (2, "bad-rows", spoiler.peer, True)
    await user.replace(1, await swarm.node(LayerRange(*RANGES[1])))
    await finish(user)
    assert_same(user, alone, bits=True)


async def test_user_who_abuses_repair_ends_its_own_session_and_nobody_elses(swarm: MemorySwarm) -> None:
    nodes = [await swarm.node(LayerRange(*each)) for each in RANGES]
    bystander = ByHand(swarm, nodes)
    await bystander.open()
    await bystander.read()
    codes = []
    for attack in ("orders", "covers", "early", "plans"):
        user = ByHand(swarm, nodes)
        await user.open()
        await user.read()
        user.epoch, num_positions = 1, sum(CHUNKS)
        user.plan = msgspec.structs.replace(user.plan, epoch=1)
        await user.open(resumes=True)
        tensor, payload = swarm.rows([7])
        match attack:
            case "orders":
                for _ in range(300):
                    order = Resend(user.plan.session, 1, 0, 1, 0, num_positions, False, 2)
                    user.raw.pool.send(nodes[0].peer, order)
            case "covers":
                claim = step(user.plan, tensor, 3, first_node=num_positions + 1, want=(), covers=9, stop_stage=0)
                user.raw.pool.send(nodes[0].peer, claim, payload)
            case "early":
                for sequence in range(4, 1200):
                    user.raw.pool.send(
                        nodes[0].peer, step(user.plan, tensor, sequence, first_node=40 + sequence), payload
                    )
            case "plans":
                for epoch in range(2, 40):
                    signed = sign_plan(msgspec.structs.replace(user.plan, epoch=epoch), user.raw.identity)
                    user.raw.pool.send(nodes[0].peer, OpenSession(user.plan.session, epoch, 0, signed, resumes=True))
        kind = SessionRefused if attack == "plans" else SessionFailed
        told = await user.raw.get(kind)
        assert isinstance(told, SessionRefused | SessionFailed)
        codes.append(told.code)
        await user.raw.pool.aclose()
    assert codes == ["bad-resend", "bad-replay", "flooded", "too-often"]
    await until(lambda: all(node.num_sessions == 1 for node in nodes))
    for _ in range(NUM_TOKENS):
        await bystander.decode_one()
    await bystander.result(len(bystander.entries) - 1)
    assert_same(bystander, await undisturbed(swarm), bits=True)
    assert not bystander.failures
