"""Strangers, clumsy users and dying neighbours against real servers in one process.

The measure of every test is twofold: the offender is refused with a code and counted, and the answer of somebody else
who is served at the same time stays what it is alone, bit for bit.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np
import pytest
import torch

from fusion_node.daemon.admission_core import LEASE_S, MAX_QUEUED_ROWS, MAX_SESSIONS_PER_USER
from fusion_node.engine.block_manager_core import SlotMove
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.errors import PeerClosed, PeerError, PeerRefused, RemoteProtocolError, ResourceExhausted
from fusion_node.types import LayerRange
from p2p.identity import Identity
from p2p.messages import (
    MAX_NODES_PER_STEP,
    AnyMessage,
    Cancel,
    CloseSession,
    OpenSession,
    SessionClosed,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    StageTiming,
    StatusReply,
    StatusRequest,
    StepResult,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage, sign_plan
from tests.engine.tiny import TinyModel
from tests.scenarios.swarm import CPU, MemorySwarm, Node, step, until

PROMPT = [5, 17, 80, 9, 33, 121, 64]
FP32 = numerics_class("fp32")


@pytest.fixture
async def nodes(swarm: MemorySwarm) -> AsyncIterator[list[Node]]:
    made = await swarm.pipeline()
    yield made
    for node in made:
        node.admission.check_integrity()


def reference(model: TinyModel, prompt: Sequence[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            ids.append(int(model.whole(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# what must work


async def test_answer_over_three_nodes_equals_the_whole_model(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    assert (await swarm.answer(user, nodes, PROMPT)).tokens == reference(swarm.model, PROMPT)
    await until(lambda: not any(node.num_sessions for node in nodes))
    for peer, measured in (await swarm.measured(user)).items():
        counters = await user.status_of(measured)
        assert counters["open_sessions"] == 0, peer
        assert counters["steps"] == 8
        assert counters["rows"] == len(PROMPT) + 7


async def test_sessions_at_once_share_forwards_and_equal_each_alone(swarm: MemorySwarm, nodes: list[Node]) -> None:
    users = [await swarm.user() for _ in range(4)]
    prompts = [[3 + i, *PROMPT[i:]] for i in range(4)]
    alone = [await swarm.answer(u, nodes, p) for u, p in zip(users, prompts, strict=True)]
    forwards = nodes[0].server.counters["forwards"]
    together = await asyncio.gather(*(swarm.answer(u, nodes, p) for u, p in zip(users, prompts, strict=True)))
    assert nodes[0].server.counters["forwards"] - forwards < forwards
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.tokens == theirs.tokens
        # Not the same bits: a product of four rows is summed in another order than one of one row.
        a, b = (np.frombuffer(b"".join(answer.rows), dtype=np.float32) for answer in (ours, theirs))
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


async def test_node_entered_and_left_at_inner_layers_serves_just_these(swarm: MemorySwarm, nodes: list[Node]) -> None:
    whole = await swarm.node(LayerRange(0, 7))
    user = await swarm.user()
    stages = tuple(
        PlanStage(n.peer, a, b, (n.address,)) for n, a, b in ((nodes[0], 0, 2), (whole, 2, 6), (nodes[2], 6, 7))
    )
    async with await swarm.session(user, [nodes[0], whole, nodes[2]], stages=stages) as session:
        assert (await swarm.decode(session, PROMPT)).tokens == reference(swarm.model, PROMPT)


async def test_one_session_id_in_a_new_epoch_starts_from_nothing(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    first = await swarm.session(user, nodes)
    key = first._core.plan.session
    async with first as session:
        before = await swarm.decode(session, PROMPT)
    async with await swarm.session(user, nodes, session=key, epoch=1) as session:
        assert await swarm.decode(session, PROMPT) == before


# who may open what


class Bystander:
    """Somebody else's answer, before, while and after a stranger does something."""

    def __init__(self, swarm: MemorySwarm, nodes: list[Node]) -> None:
        self.swarm, self.nodes = swarm, nodes

    async def start(self) -> None:
        self.user = await self.swarm.user()
        self.alone = await self.swarm.answer(self.user, self.nodes, PROMPT)
        self.session = await self.swarm.session(self.user, self.nodes)
        await self.session.__aenter__()
        await until(lambda: all(node.num_sessions == 1 for node in self.nodes))

    async def check(self) -> None:
        assert await self.swarm.decode(self.session, PROMPT) == self.alone
        await self.session.__aexit__()
        own = self.user.identity.peer_id
        await until(lambda: not any(node.admission.of_user(own) for node in self.nodes))

    @property
    def plan(self) -> Plan:
        return self.session._core.plan


@pytest.fixture
async def bystander(swarm: MemorySwarm, nodes: list[Node]) -> AsyncIterator[Bystander]:
    made = Bystander(swarm, nodes)
    await made.start()
    yield made
    await made.check()


def _expired(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, issued_at=time.time() - 100, expires_at=time.time() - 1)


def _future(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, issued_at=time.time() + 3600, expires_at=time.time() + 3700)


def _endless(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, expires_at=time.time() + 1e7)


def _other_model(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, model_id="cd" * 32)


def _other_numerics(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, numerics="bf16")


def _huge(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, max_positions=2**24)


def _other_layers(plan: Plan) -> Plan:
    stages = tuple(msgspec.structs.replace(s, start=s.start + 1, stop=s.stop + 1) for s in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def _gap(plan: Plan) -> Plan:
    first, second, third = plan.stages
    return msgspec.structs.replace(plan, stages=(first, msgspec.structs.replace(second, start=4), third))


def _without_us(plan: Plan) -> Plan:
    other = msgspec.structs.replace(plan.stages[0], peer=Identity.generate().peer_id)
    return msgspec.structs.replace(plan, stages=(other, *plan.stages[1:]))


def _twice(plan: Plan) -> Plan:
    first, second, _ = plan.stages
    return msgspec.structs.replace(plan, stages=(first, second, msgspec.structs.replace(first, start=5, stop=7)))


def _other_version(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, version=PROTOCOL_VERSION + 1)


@pytest.mark.parametrize(
    ("change", "code", "counted"),
    [
        (_expired, "bad-plan", "plan-expired"),
        (_future, "bad-plan", "plan-future-dated"),
        (_endless, "bad-plan", "plan-lifetime-too-long"),
        (_gap, "bad-plan", "plan-malformed"),
        (_other_version, "bad-plan", "plan-wrong-version"),
        (_without_us, "bad-plan", "bad-plan"),
        (_twice, "bad-plan", "bad-plan"),
        (_other_model, "unknown-model", "unknown-model"),
        (_other_numerics, "numerics", "numerics"),
        (_other_layers, "layers-not-held", "layers-not-held"),
        (_huge, "no-memory", "no-memory"),
    ],
)
async def test_unfit_plan_is_refused_with_its_code_and_counted(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander, change: object, code: str, counted: str
) -> None:
    stranger = swarm.stranger()
    plan = change(swarm.plan(stranger.peer, nodes))  # type: ignore[operator]
    await stranger.open(plan, nodes[:1])
    refused = await stranger.get(SessionRefused)
    assert isinstance(refused, SessionRefused)
    assert (refused.session, refused.code) == (plan.session, code)
    assert nodes[0].admission.refused == {counted: 1}
    assert nodes[0].num_sessions == 1


async def test_plan_signed_by_somebody_else_is_refused(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    stranger, other = swarm.stranger(), Identity.generate()
    plan = swarm.plan(stranger.peer, nodes)
    await stranger.open(plan, nodes[:1], signed=sign_plan(plan, other))
    assert isinstance(refused := await stranger.get(SessionRefused), SessionRefused)
    assert refused.code == "bad-plan"
    # A plan that its user did sign, replayed by somebody who overheard it.
    stolen = bystander.plan
    await stranger.open(stolen, nodes[:1], signed=sign_plan(stolen, bystander.user.identity))
    assert isinstance(refused := await stranger.get(SessionRefused), SessionRefused)
    assert refused.code == "not-yours"
    assert nodes[0].admission.refused == {"plan-wrong-key": 1, "not-yours": 1}


async def test_session_id_that_is_open_is_refused_and_the_open_one_goes_on(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    stranger = swarm.stranger()
    plan = swarm.plan(stranger.peer, nodes, session=bystander.plan.session)
    await stranger.open(plan, nodes[:1])
    assert isinstance(refused := await stranger.get(SessionRefused), SessionRefused)
    assert refused.code == "duplicate"


async def test_one_user_opens_no_more_than_the_limit(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    stranger = swarm.stranger()
    last = nodes[2]
    place = (PlanStage(last.peer, 5, 7, (last.address,)),)
    for _ in range(MAX_SESSIONS_PER_USER + 1):
        await stranger.open(swarm.plan(stranger.peer, [last], stages=place, max_positions=1), [last])
    assert isinstance(refused := await stranger.get(SessionRefused), SessionRefused)
    assert refused.code == "too-many-sessions"
    await stranger.pool.aclose()
    await until(lambda: last.num_sessions == 1)


async def test_successor_that_cannot_be_reached_is_told_and_nothing_stays_reserved(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    stranger = swarm.stranger()
    nowhere = PlanStage(Identity.generate().peer_id, 3, 7, ("10.0.0.5:22",))
    plan = swarm.plan(stranger.peer, nodes[:1], stages=(PlanStage(nodes[0].peer, 0, 3, ()), nowhere))
    await stranger.open(plan, nodes[:1])
    assert isinstance(refused := await stranger.get(SessionRefused), SessionRefused)
    assert refused.code == "successor-unreachable"
    # Whoever writes the plan chooses the addresses: what is told of them would make the node a port scanner.
    assert "10.0.0.5" not in refused.reason
    assert "listens" not in refused.reason
    assert nodes[0].num_sessions == 1


async def test_node_without_links_to_spare_refuses_and_reserves_nothing(swarm: MemorySwarm) -> None:
    last = await swarm.node(LayerRange(3, 7))
    first = await swarm.node(LayerRange(0, 3), max_links=1)
    stranger = swarm.stranger()
    await stranger.open(swarm.plan(stranger.peer, [first, last]), [first])
    assert isinstance(refused := await stranger.get(SessionRefused), SessionRefused)
    assert refused.code == "successor-unreachable"
    assert first.num_sessions == 0


async def test_node_that_is_leaving_refuses(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    session = await swarm.session(user, nodes)
    await nodes[1].server.drain(timeout_s=1.0)
    with pytest.raises(PeerRefused, match="shutting down") as error:
        await session.__aenter__()
    assert error.value.peer == nodes[1].peer
    await until(lambda: not any(node.num_sessions for node in nodes))


# who may send what


async def test_steps_closes_and_results_of_strangers_are_dropped_silently(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    stranger = swarm.stranger()
    for node in nodes:
        await stranger.pool.connect(node.peer, [node.address])
        tensor, payload = swarm.rows([7])
        stranger.pool.send(node.peer, step(bystander.plan, tensor), payload)
        stranger.pool.send(node.peer, CloseSession(bystander.plan.session, bystander.plan.epoch))
        stranger.pool.send(node.peer, StatusRequest(1))
        assert isinstance(await stranger.get(StatusReply), StatusReply)
        assert node.server.counters["steps_without_session"] == 1
    assert not stranger.frames


async def test_step_from_the_user_to_a_later_stage_is_dropped(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    tensor, payload = swarm.rows([7])
    bystander.user.links.send(nodes[1].peer, step(bystander.plan, tensor), payload)
    await until(lambda: nodes[1].server.counters["steps_without_session"] == 1)


async def test_step_of_another_epoch_is_dropped(swarm: MemorySwarm, nodes: list[Node], bystander: Bystander) -> None:
    tensor, payload = swarm.rows([7])
    bystander.user.links.send(nodes[0].peer, step(bystander.plan, tensor, epoch=1), payload)
    await until(lambda: nodes[0].server.counters["steps_without_session"] == 1)


@pytest.mark.parametrize(
    ("message", "counted"),
    [(SessionClosed(bytes(16), 0), 1), (SessionFailed(bytes(16), 0, 0, "x", "", ""), 1), (StatusReply(1, b"", {}), 1)],
)
async def test_message_that_is_not_for_nodes_closes_the_link(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander, message: AnyMessage, counted: int
) -> None:
    stranger = swarm.stranger()
    await stranger.pool.connect(nodes[0].peer, [nodes[0].address])
    stranger.pool.send(nodes[0].peer, message)
    await until(lambda: bool(stranger.lost))
    assert nodes[0].server.counters["unexpected_frames"] == counted


ROWS_2 = (TensorMeta("f32", 2, 48), bytes(2 * 48 * 4))


@pytest.mark.parametrize(
    ("tensor", "payload", "changes", "code"),
    [
        (*ROWS_2, {"sequence": 1}, "gap"),
        (*ROWS_2, {"first_node": 5}, "unknown-parent"),
        (*ROWS_2, {"first_node": 5, "parent": 3}, "unknown-parent"),
        (TensorMeta("f32", 65, 48), bytes(65 * 48 * 4), {}, "overflow"),
        (*ROWS_2, {"advance": 9}, "unknown-advance"),
        (TensorMeta("f32", 2, 48), b"\0\0\xc0\x7f" * 96, {}, "bad-rows"),
        (TensorMeta("f32", 2, 48), b"\0\0\x80\x7f" * 96, {}, "bad-rows"),
        (TensorMeta("f32", 2, 47), bytes(2 * 47 * 4), {}, "bad-shape"),
        (TensorMeta("f16", 2, 48), bytes(2 * 48 * 2), {}, "bad-shape"),
        (TensorMeta("bf16", 2, 48), bytes(2 * 48 * 2), {}, "bad-shape"),
        (*ROWS_2, {"timings": (StageTiming(1, 1),)}, "bad-timings"),
        (*ROWS_2, {"timings": (StageTiming(1, 1),) * 128}, "bad-timings"),
    ],
)
async def test_bad_step_ends_only_its_own_session_with_a_code(
    swarm: MemorySwarm,
    nodes: list[Node],
    bystander: Bystander,
    tensor: TensorMeta,
    payload: bytes,
    changes: dict[str, object],
    code: str,
) -> None:
    stranger, plan = await swarm.with_session(nodes)
    stranger.pool.send(nodes[0].peer, step(plan, tensor, **changes), payload)
    failed = await stranger.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.code, failed.culprit) == (plan.session, code, stranger.peer)
    assert nodes[0].num_sessions == 1
    assert nodes[0].server.counters["sessions_failed"] == 1
    assert all(node.pool.is_connected(after.peer) for node, after in itertools.pairwise(nodes))


class OverflowingStage(Stage):
    """Finite rows in, infinite ones out, as in half precision."""

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        return [rows * torch.inf for rows in super().forward(batch, pool)]


async def test_rows_that_overflow_inside_a_stage_are_not_passed_on(swarm: MemorySwarm) -> None:
    stage = OverflowingStage.load(swarm.model, LayerRange(0, 3), numerics=FP32, device=CPU)
    nodes = [await swarm.node(LayerRange(0, 3), stage=stage), await swarm.node(LayerRange(3, 7))]
    stranger, plan = await swarm.with_session(nodes)
    tensor, payload = swarm.rows(PROMPT)
    stranger.pool.send(nodes[0].peer, step(plan, tensor), payload)
    message = await stranger.get(SessionFailed)
    assert isinstance(message, SessionFailed)
    assert (message.stage, message.code, message.culprit) == (0, "overflow", "")


async def test_same_step_twice_is_applied_once(swarm: MemorySwarm, nodes: list[Node], bystander: Bystander) -> None:
    stranger, plan = await swarm.with_session(nodes)
    tensor, payload = swarm.rows(PROMPT)
    for _ in range(3):
        stranger.pool.send(nodes[0].peer, step(plan, tensor), payload)
    await stranger.get(StepResult)
    stranger.pool.send(nodes[0].peer, step(plan, tensor), b"\xff" * len(payload))  # NaN, if anybody looked
    stranger.pool.send(nodes[0].peer, CloseSession(plan.session, plan.epoch))
    await stranger.get(SessionClosed)
    assert nodes[0].server.counters["steps_duplicate"] == 3
    assert not stranger.frames
    await stranger.pool.aclose()


async def test_repeated_wanted_rows_are_malformed(swarm: MemorySwarm, nodes: list[Node], bystander: Bystander) -> None:
    """One row asked for 4,096 times would make the last stage send more than a frame holds, 4,096 times what it got."""
    stranger = swarm.stranger()
    plan = swarm.plan(stranger.peer, nodes)
    await stranger.open(plan, nodes[:1])
    tensor, payload = swarm.rows(PROMPT)
    stranger.pool.send(nodes[0].peer, step(plan, tensor, want=(1,) * MAX_NODES_PER_STEP), payload)
    await until(lambda: bool(stranger.lost))
    await until(lambda: nodes[0].num_sessions == 1)
    assert nodes[0].pool.counters["refused_malformed"] == 1


async def test_more_rows_than_may_wait_end_the_session(
    swarm: MemorySwarm, nodes: list[Node], bystander: Bystander
) -> None:
    stranger = swarm.stranger()
    plan = swarm.plan(stranger.peer, nodes, max_positions=2 * MAX_QUEUED_ROWS)
    nodes[0].admission.blocks.resize(10_000)
    await stranger.open(plan, nodes[:1])
    await until(lambda: nodes[0].num_sessions == 2)
    rows = MAX_QUEUED_ROWS // 4
    for sequence in range(8):
        tensor = TensorMeta("f32", rows, 48)
        stranger.pool.send(
            nodes[0].peer, step(plan, tensor, sequence, first_node=1 + sequence * rows), bytes(rows * 48 * 4)
        )
    failed = await stranger.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert failed.code == "flooded"


class SlowStage(Stage):
    """Counts its steps, and lets a test decide when each may begin."""

    def hold(self) -> None:
        self.gate = threading.Event()
        self.num_forward = 0

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        self.num_forward += 1
        assert self.gate.wait(20)
        return super().forward(batch, pool)

    def part(self, layers: LayerRange) -> Stage:
        assert layers == self.layers
        return self


async def held_node(swarm: MemorySwarm) -> tuple[Node, SlowStage]:
    stage = SlowStage.load(swarm.model, LayerRange(0, 7), numerics=FP32, device=CPU)
    assert isinstance(stage, SlowStage)
    stage.hold()
    return await swarm.node(LayerRange(0, 7), stage=stage), stage


async def test_queued_steps_of_a_closed_session_are_not_computed(swarm: MemorySwarm) -> None:
    node, stage = await held_node(swarm)
    stranger, plan = await swarm.with_session([node])
    for sequence in range(6):
        tensor, payload = swarm.rows([7])
        stranger.pool.send(node.peer, step(plan, tensor, sequence, first_node=1 + sequence), payload)
    await until(lambda: stage.num_forward == 1)
    stranger.pool.send(node.peer, CloseSession(plan.session, plan.epoch))
    await stranger.get(SessionClosed)
    stage.gate.set()
    user = await swarm.user()
    assert (await swarm.answer(user, [node], PROMPT)).tokens == reference(swarm.model, PROMPT)
    assert stage.num_forward == 1 + 8


@pytest.mark.parametrize("cancels", [True, False])
async def test_rows_that_are_cancelled_while_they_wait_are_not_computed_and_others_are_as_ever(
    swarm: MemorySwarm, cancels: bool
) -> None:
    node, stage = await held_node(swarm)
    stranger, plan = await swarm.with_session([node])
    paths = {1: (5,), 2: (5, 6), 3: (5, 7), 4: (5, 6, 8), 5: (5, 7, 9), 6: (5, 6, 8, 10), 7: (5, 7, 9, 11)}
    steps = (((1,), (0,), 1), ((2, 3, 4, 5), (1, 1, 2, 3), 0), ((6, 7), (4, 5), 3))
    for sequence, (nodes, parents, advance) in enumerate(steps):
        tensor, payload = swarm.rows([paths[each][-1] for each in nodes])
        message = step(
            plan, tensor, sequence, first_node=nodes[0], parents=parents, advance=0 if cancels else advance, want=nodes
        )
        stranger.pool.send(node.peer, message, payload)
        await until(lambda: stage.num_forward == 1)
    await until(lambda: node.server.status().num_waiting_rows == (6 if cancels else 5))
    if cancels:
        stranger.pool.send(node.peer, Cancel(plan.session, plan.epoch, 3))
        await until(lambda: node.server.counters["rows_taken_back"] == 3)
    stage.gate.set()
    await until(lambda: sum(isinstance(message, StepResult) for _, message, _ in stranger.frames) == 3)
    for (_, result, rows), wanted in zip(stranger.frames, ((1,), (3, 5), (7,)), strict=False):
        assert isinstance(result, StepResult)
        if cancels:
            assert result.nodes == wanted
        table = np.frombuffer(rows, np.float32).reshape(len(result.nodes), -1)
        for each, row in zip(result.nodes, table, strict=True):
            logits = swarm.boundary.logits(torch.from_numpy(row.copy())[None])[0]
            expected = swarm.model.whole(input_ids=torch.tensor([paths[each]])).logits[0, -1]  # type: ignore[operator]
            assert np.abs(logits - expected.detach().numpy()).max() < 1e-4


@pytest.mark.parametrize("is_closed", [True, False])
async def test_result_of_a_session_that_ended_is_not_taken_for_its_successor(
    swarm: MemorySwarm, is_closed: bool
) -> None:
    """The same id is opened again, as after a failure, while a step of the first opening is still on the device."""
    node, stage = await held_node(swarm)
    stranger, plan = await swarm.with_session([node])
    bad = TensorMeta("f32", 1, 48)
    stranger.pool.send(node.peer, step(plan, *swarm.rows([9])[:1]), swarm.rows([9])[1])
    await until(lambda: stage.num_forward == 1)
    if is_closed:
        stranger.pool.send(node.peer, CloseSession(plan.session, plan.epoch))
        await stranger.get(SessionClosed)
    else:
        stranger.pool.send(node.peer, step(plan, bad, 1, first_node=2), b"\0\0\xc0\x7f" * 48)
        await stranger.get(SessionFailed)
    again = msgspec.structs.replace(plan, epoch=1)
    await stranger.open(again, [node])
    await stranger.get(SessionOpened)
    tensor, payload = swarm.rows(PROMPT)
    stranger.pool.send(node.peer, step(again, tensor), payload)
    stage.gate.set()
    result = await stranger.get(StepResult)
    assert isinstance(result, StepResult)
    assert (result.epoch, result.sequence) == (1, 0)
    assert not [m for _, m, _ in stranger.frames if isinstance(m, (StepResult, SessionFailed))]


class BrokenStage(Stage):
    """A bug of ours: raises what checks of a peer's bytes raise, too."""

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        raise ValueError("a bug in the engine")


async def test_bug_in_the_engine_is_not_blamed_on_a_peer(swarm: MemorySwarm) -> None:
    stage = BrokenStage.load(swarm.model, LayerRange(0, 7), numerics=FP32, device=CPU)
    node = await swarm.node(LayerRange(0, 7), stage=stage)
    user = await swarm.user()
    with pytest.raises(PeerRefused, match="inside the node") as error:
        await swarm.answer(user, [node], PROMPT)
    assert error.value.peer == node.peer
    assert node.num_sessions == 0


class FullStage(Stage):
    """A device that has room for so many rows of one forward, and no more."""

    max_rows = 0

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        if sum(len(item.rows_TD) for item in batch) > self.max_rows:
            raise ResourceExhausted("no memory left for this step")
        return super().forward(batch, pool)


async def test_node_with_several_devices_passes_forwards_from_one_to_the_next(swarm: MemorySwarm) -> None:
    node = await swarm.node(LayerRange(0, 7), cuts=(1, 5))
    users = [await swarm.user() for _ in range(4)]
    prompts = [[3 + i, *PROMPT[i:]] for i in range(4)]
    answers = await asyncio.gather(*(swarm.answer(u, [node], p) for u, p in zip(users, prompts, strict=True)))
    assert [a.tokens for a in answers] == [reference(swarm.model, p) for p in prompts]
    pair = [await swarm.node(LayerRange(0, 4), cuts=(2,)), await swarm.node(LayerRange(4, 7), cuts=(6,))]
    answer = await swarm.answer(users[0], pair, prompts[0])
    assert answer.tokens == answers[0].tokens


async def test_kv_memory_is_given_back_only_when_no_session_is_open(swarm: MemorySwarm) -> None:
    node = await swarm.node(LayerRange(0, 7))
    user = await swarm.user()
    async with await swarm.session(user, [node]):
        assert not node.server.release_kv()
    await until(lambda: node.num_sessions == 0)
    await until(node.server.release_kv)
    assert (await swarm.answer(user, [node], PROMPT)).tokens == reference(swarm.model, PROMPT)


@pytest.mark.parametrize(
    ("payload", "changes"),
    [
        (b"\0\0\xc0\x7f" * 96, {}),
        (b"\0\0\x80\xff" * 96, {}),
        (bytes(2 * 48 * 4), {"sequence": 1}),
        (bytes(2 * 48 * 4), {"first_node": 5, "parent": 3}),
        (bytes(2 * 48 * 4), {"timings": (StageTiming(1, 1),)}),
    ],
)
async def test_bad_step_that_waits_beside_a_good_one_changes_no_bit_of_it(
    swarm: MemorySwarm, payload: bytes, changes: dict[str, object]
) -> None:
    rows = []
    for has_enemy in (False, True):
        node, stage = await held_node(swarm)
        first, good, bad = (swarm.stranger() for _ in range(3))
        plans = [swarm.plan(stranger.peer, [node]) for stranger in (first, good, bad)]
        for stranger, plan in zip((first, good, bad), plans, strict=True):
            await stranger.open(plan, [node])
            await stranger.get(SessionOpened)
        tensor, data = swarm.rows([7])
        first.pool.send(node.peer, step(plans[0], tensor), data)
        await until(lambda stage=stage: stage.num_forward == 1)
        if has_enemy:
            bad.pool.send(node.peer, step(plans[2], TensorMeta("f32", 2, 48), **changes), payload)
            await bad.get(SessionFailed)
        tensor, data = swarm.rows(PROMPT)
        good.pool.send(node.peer, step(plans[1], tensor, want=tuple(range(1, 8))), data)
        await until(lambda node=node: node.server.status().num_waiting_rows == len(PROMPT))
        stage.gate.set()
        await until(lambda good=good: any(isinstance(m, StepResult) for _, m, _ in good.frames))
        rows.append(next(data for _, m, data in good.frames if isinstance(m, StepResult)))
    assert rows[0] == rows[1]


@pytest.mark.parametrize("priority", [0, 1])
async def test_work_that_its_plan_calls_batch_work_waits_for_what_others_leave(
    swarm: MemorySwarm, priority: int
) -> None:
    node, stage = await held_node(swarm)
    first, background, waiting = (swarm.stranger() for _ in range(3))
    plans = [
        swarm.plan(first.peer, [node]),
        swarm.plan(background.peer, [node], priority=priority),
        swarm.plan(waiting.peer, [node]),
    ]
    for stranger, plan in zip((first, background, waiting), plans, strict=True):
        await stranger.open(plan, [node])
        await stranger.get(SessionOpened)
    tensor, data = swarm.rows([7])
    first.pool.send(node.peer, step(plans[0], tensor), data)
    await until(lambda: stage.num_forward == 1)
    tensor, data = swarm.rows([5 + n for n in range(60)])
    for number, stranger in enumerate((background, waiting), 1):
        stranger.pool.send(node.peer, step(plans[number], tensor), data)
        await until(lambda: node.server.status().num_waiting_rows == 60 * number)  # noqa: B023
    stage.gate.set()
    came: list[int] = []

    def all_came() -> bool:
        for number, stranger in enumerate((background, waiting), 1):
            if number not in came and any(isinstance(m, StepResult) for _, m, _ in stranger.frames):
                came.append(number)
        return len(came) == 2

    await until(all_came)
    assert came == ([1, 2] if priority == 0 else [2, 1])


class FailsOnce(Stage):
    """The second of two devices: waits to be told, and fails the first time."""

    def arm(self) -> None:
        self.gate = threading.Event()
        self.num_forward = 0

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        self.num_forward += 1
        assert self.gate.wait(20)
        if self.num_forward == 1:
            raise ResourceExhausted("no memory left for this step")
        return super().forward(batch, pool)

    def part(self, layers: LayerRange) -> Stage:
        assert layers == self.layers
        return self


async def two_devices(swarm: MemorySwarm) -> tuple[Node, FailsOnce]:
    last = FailsOnce.load(swarm.model, LayerRange(3, 7), numerics=FP32, device=CPU)
    assert isinstance(last, FailsOnce)
    last.arm()
    first = Stage.load(swarm.model, LayerRange(0, 3), numerics=FP32, device=CPU)
    return await swarm.node(LayerRange(0, 7), stages=[first, last]), last


async def test_rows_behind_a_forward_that_failed_on_a_later_device_are_computed_again(swarm: MemorySwarm) -> None:
    node, last = await two_devices(swarm)
    stranger, plan = await swarm.with_session([node])
    # A row that does not fit alone would end the session, so the forward that fails has two.
    for sequence, tokens in enumerate([PROMPT[:2], *([token] for token in PROMPT[2:])]):
        first = 1 if sequence == 0 else sequence + 2
        stranger.pool.send(
            node.peer, step(plan, swarm.rows(tokens)[0], sequence, first_node=first), swarm.rows(tokens)[1]
        )
        if sequence == 0:
            await until(lambda: last.num_forward == 1)
    # The first step is on the second device; some are behind it there, and the others wait.
    await until(lambda: node.server.status().num_in_flight_batches == 2)
    await until(lambda: node.admission.sessions[0].num_queued_rows == len(PROMPT))
    last.gate.set()
    await until(lambda: sum(isinstance(m, StepResult) for _, m, _ in stranger.frames) == len(PROMPT) - 1)
    rows = [np.frombuffer(data, dtype=np.float32) for _, m, data in stranger.frames if isinstance(m, StepResult)]
    logits = swarm.boundary.logits(torch.from_numpy(np.stack(rows)))
    with torch.inference_mode():
        whole = swarm.model.whole(input_ids=torch.tensor([PROMPT])).logits[0, 1:].numpy()  # type: ignore[operator]
    assert np.abs(logits - whole).max() <= 1e-5 * np.abs(whole).max()
    assert not [m for _, m, _ in stranger.frames if isinstance(m, SessionFailed)]
    assert node.server.counters["forwards_out_of_memory"] == 1


async def test_forwards_do_not_pile_up_before_a_slower_device(swarm: MemorySwarm) -> None:
    node, last = await two_devices(swarm)
    last.num_forward = 1  # so that none fails
    strangers = [swarm.stranger() for _ in range(5)]
    for number, stranger in enumerate(strangers):
        plan = swarm.plan(stranger.peer, [node])
        await stranger.open(plan, [node])
        await stranger.get(SessionOpened)
        tensor, payload = swarm.rows([7 + number])
        stranger.pool.send(node.peer, step(plan, tensor), payload)
        await until(lambda: node.server.status().num_in_flight_batches == min(2, number + 1))  # noqa: B023
    await until(lambda: node.server.status().num_waiting_rows == 3)
    assert node.server.status().num_in_flight_batches == 2
    strangers[0].pool.send(node.peer, StatusRequest(1))
    reply = await strangers[0].get(StatusReply)
    assert isinstance(reply, StatusReply)
    assert reply.counters["waiting_rows"] == 3
    last.gate.set()
    for stranger in strangers:
        await stranger.get(StepResult)


async def test_node_that_drains_finishes_a_forward_on_all_its_devices(swarm: MemorySwarm) -> None:
    node, last = await two_devices(swarm)
    last.num_forward = 1
    stranger, plan = await swarm.with_session([node])
    stranger.pool.send(node.peer, step(plan, swarm.rows(PROMPT)[0]), swarm.rows(PROMPT)[1])
    await until(lambda: node.server.status().num_in_flight_batches == 1)
    draining = asyncio.ensure_future(node.server.drain(timeout_s=20.0))
    last.gate.set()
    await draining
    assert isinstance(await stranger.get(StepResult), StepResult)
    assert isinstance(await stranger.get(SessionFailed), SessionFailed)


async def test_device_that_runs_out_of_memory_takes_smaller_forwards(swarm: MemorySwarm) -> None:
    stage = FullStage.load(swarm.model, LayerRange(0, 7), numerics=FP32, device=CPU)
    assert isinstance(stage, FullStage)
    node = await swarm.node(LayerRange(0, 7), stage=stage)
    stage.max_rows = 3
    user = await swarm.user()
    prompt = [5 + n % 100 for n in range(40)]
    assert (await swarm.answer(user, [node], prompt)).tokens == reference(swarm.model, prompt)
    assert node.server.counters["forwards_out_of_memory"] >= 3


class StuckPool(KVPool):
    """A device that has room for the forward, and none to move KV."""

    def move(self, move: SlotMove) -> None:
        raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("cuts", [(), (3,)])
async def test_session_whose_kv_could_not_be_moved_ends_and_others_go_on(
    swarm: MemorySwarm, cuts: tuple[int, ...]
) -> None:
    """Computed again it would read what the move should have put there: no answer is better than a wrong one."""
    node = await swarm.node(LayerRange(0, 7), cuts=cuts)
    node.engine._pool(len(cuts)).__class__ = StuckPool
    stranger, plan = await swarm.with_session([node])
    tree, payload = swarm.rows([5, 6, 7])
    stranger.pool.send(node.peer, step(plan, tree, first_node=1, parents=(0, 0, 1), advance=0, want=(1,)), payload)
    await stranger.get(StepResult)
    tensor, payload = swarm.rows([8])
    stranger.pool.send(node.peer, step(plan, tensor, 1, first_node=4, parent=2, advance=2, want=(4,)), payload)
    failed = await stranger.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert failed.code == "no-memory"
    user = await swarm.user()
    assert (await swarm.answer(user, [node], PROMPT)).tokens == reference(swarm.model, PROMPT)


async def test_device_without_memory_for_one_row_ends_the_session_and_serves_on(swarm: MemorySwarm) -> None:
    stage = FullStage.load(swarm.model, LayerRange(0, 7), numerics=FP32, device=CPU)
    assert isinstance(stage, FullStage)
    node = await swarm.node(LayerRange(0, 7), stage=stage)
    user = await swarm.user()
    with pytest.raises(PeerRefused, match="no memory left"):
        await swarm.answer(user, [node], PROMPT)
    assert node.num_sessions == 0
    stage.max_rows = 64
    assert (await swarm.answer(user, [node], PROMPT)).tokens == reference(swarm.model, PROMPT)


# peers that go


async def test_lost_neighbour_is_named_to_the_user_and_frees_the_session(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    async with await swarm.session(user, nodes) as session:
        swarm.world.listeners.pop(nodes[2].address)  # or the link would be made again
        swarm.world.cut(nodes[1].host, nodes[2].host)
        tensor, payload = swarm.rows(PROMPT)
        session.send(tensor, payload, want_last=True)
        with pytest.raises(PeerClosed, match="is gone, says node") as error:
            await session.next_done()
        assert error.value.peer in (nodes[1].peer, nodes[2].peer)
    await until(lambda: not any(node.num_sessions for node in nodes))


async def test_lost_user_frees_the_session_everywhere(swarm: MemorySwarm, nodes: list[Node]) -> None:
    stranger, _ = await swarm.with_session(nodes)
    for node in nodes:
        swarm.world.cut(stranger.host, node.host)
        swarm.world.black_hole(stranger.host, node.host)
    await until(lambda: not any(node.num_sessions for node in nodes))


async def test_draining_node_tells_its_users_at_once(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    async with await swarm.session(user, nodes) as session:
        await nodes[1].server.drain(timeout_s=1.0)
        with pytest.raises(PeerError, match="shutting down") as error:
            await session.next_done()
        assert error.value.peer == nodes[1].peer
    await until(lambda: not any(node.num_sessions for node in nodes))


async def test_unused_session_is_forgotten_when_its_lease_runs_out(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    async with await swarm.session(user, nodes) as session:
        nodes[0].clock.now += LEASE_S + 1
        nodes[0].server.expire()
        assert nodes[0].num_sessions == 0
        with pytest.raises(PeerRefused, match="nothing was heard"):
            await session.next_done()
    await until(lambda: not any(node.num_sessions for node in nodes))


# what nodes may do to a user


async def test_stranger_who_knows_the_session_id_cannot_end_or_answer_it(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    alone = await swarm.answer(user, nodes, PROMPT)
    stranger = swarm.stranger()
    address = await stranger.pool.listen(f"{stranger.host}:0")
    await user.links.connect(stranger.peer, [address])
    await until(lambda: stranger.pool.is_connected(user.identity.peer_id))
    async with await swarm.session(user, nodes) as session:
        plan = session._core.plan
        sequence = 0

        def between() -> None:
            nonlocal sequence
            for message, payload in (
                (StepResult(plan.session, 0, sequence, (1,), TensorMeta("f32", 1, 48), ()), bytes(192)),
                (StepResult(plan.session, 0, sequence + 1, (1,), TensorMeta("f32", 1, 48), ()), bytes(192)),
                (SessionFailed(plan.session, 0, 0, "x", "x", ""), b""),
                (SessionRefused(plan.session, 0, 0, "x", "x"), b""),
                (SessionOpened(plan.session, 0, 0, 1.0), b""),
            ):
                stranger.pool.send(user.identity.peer_id, message, payload)
            sequence += 1

        assert await swarm.decode(session, PROMPT, between=between) == alone


async def test_result_from_a_stage_that_is_not_the_last_ends_the_session(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    async with await swarm.session(user, nodes) as session:
        key = session._core.plan.session
        result = StepResult(key, 0, 0, (1,), TensorMeta("f32", 1, 48), ())
        nodes[0].pool.send(user.identity.peer_id, result, bytes(192))
        with pytest.raises(RemoteProtocolError, match="not its to send") as error:
            await session.next_done()
        assert error.value.peer == nodes[0].peer


async def test_messages_of_another_epoch_are_ignored(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    async with await swarm.session(user, nodes, epoch=3) as session:
        key = session._core.plan.session
        nodes[2].pool.send(user.identity.peer_id, StepResult(key, 2, 0, (1,), TensorMeta("f32", 1, 48), ()), bytes(192))
        nodes[1].pool.send(user.identity.peer_id, SessionFailed(key, 2, 1, "draining", "late", ""))
        nodes[1].pool.send(user.identity.peer_id, SessionRefused(key, 2, 1, "no-memory", "late"))
        assert (await swarm.decode(session, PROMPT)).tokens == reference(swarm.model, PROMPT)


async def test_status_is_answered_while_the_device_is_busy(swarm: MemorySwarm) -> None:
    node, stage = await held_node(swarm)
    user = await swarm.user()
    async with await swarm.session(user, [node]) as session:
        tensor, payload = swarm.rows(PROMPT)
        session.send(tensor, payload, want_last=True)
        await until(lambda: stage.num_forward == 1)
        (measured,) = (await swarm.measured(user)).values()
        counters = await user.status_of(measured)
        assert counters["open_sessions"] == 1
        assert counters["link.peers"] == 1
        stage.gate.set()
        await session.next_done()


async def test_close_that_follows_an_open_in_the_same_read_frees_the_session(
    swarm: MemorySwarm, nodes: list[Node]
) -> None:
    user = swarm.stranger()
    plan = swarm.plan(user.peer, nodes)
    for index, node in enumerate(nodes):
        node.server.on_frame(
            user.peer, OpenSession(plan.session, plan.epoch, index, sign_plan(plan, user.identity)), memoryview(b"")
        )
        node.server.on_frame(user.peer, CloseSession(plan.session, plan.epoch), memoryview(b""))
        assert node.num_sessions == 0
