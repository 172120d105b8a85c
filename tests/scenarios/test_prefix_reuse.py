"""A session that begins like an earlier one of its user: its nodes compute only what is new, and nobody else gains.

The measure: the answer is the one that a session from nothing gives, and the nodes' counters say what was computed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from fusion_node.client.answer_routes import Answer as RunningAnswer
from fusion_node.client.connection import SwarmConnection
from fusion_node.client.prefix_cache_core import PrefixCache
from fusion_node.client.session_core import Prefix, SessionCore
from fusion_node.client.swarm import SwarmClient
from fusion_node.types import LayerRange
from p2p.messages import RETAIN_S, CloseSession, OpenSession, SessionFailed, SessionOpened, StepResult
from p2p.records import sign_plan
from tests.engine.tiny import TinyModel, tiny_model
from tests.scenarios.session import Session
from tests.scenarios.swarm import Answer, MemorySwarm, Node, step, until

FIRST = [7 + 13 * n % 120 for n in range(37)]
NUM_ANSWER = 8
FAMILIES = ("llama", "mistral", "deepseek_v3", "glm_moe_dsa")
"""Keys and values; those of a sliding window; latents; latents with an index."""


@pytest.fixture(scope="module", params=FAMILIES[:1])
def model(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_model(request.param)


@pytest.fixture
async def nodes(swarm: MemorySwarm) -> AsyncIterator[list[Node]]:
    made = [await swarm.node(LayerRange(a, b)) for a, b in ((0, 2), (2, 5), (5, 7))]
    yield made
    for node in made:
        node.admission.check_integrity()


async def session_of(
    swarm: MemorySwarm, user: SwarmConnection, nodes: Sequence[Node], prefix: Prefix | None = None, **changes: object
) -> Session:
    """A session that asks for a prefix; not open yet."""
    await swarm.measured(user)
    plan = swarm.plan(user.identity.peer_id, nodes, max_positions=128, **changes)
    engine = nodes[0].engine
    core = SessionCore(
        plan,
        sign_plan(plan, user.identity),
        row_size=engine.hidden_size,
        wire_dtype=engine.wire_dtype,
        prefix=prefix,
    )
    return Session(user, core)


async def first_turn(
    swarm: MemorySwarm, user: SwarmConnection, nodes: Sequence[Node], *, retain: bool = True
) -> tuple[bytes, list[int]]:
    """The id of a session that is over, and the tokens of its positions."""
    session = await session_of(swarm, user, nodes)
    async with session:
        answer = await swarm.decode(session, FIRST)
        session.retain = retain
    await until(lambda: not any(node.num_sessions for node in nodes))
    # The last token was never sent.
    return session.key, FIRST + answer.tokens[:-1]


async def turn(
    swarm: MemorySwarm,
    user: SwarmConnection,
    nodes: Sequence[Node],
    ids: Sequence[int],
    prefix: Prefix | None = None,
) -> tuple[int, Answer]:
    """How many positions were there, and the answer."""
    async with await session_of(swarm, user, nodes, prefix) as session:
        return session.reused_positions, await swarm.decode(session, list(ids[session.reused_positions :]))


def rows_of(nodes: Sequence[Node]) -> list[int]:
    return [node.server.counters["rows"] for node in nodes]


def assert_same(ours: Answer, theirs: Answer) -> None:
    assert ours.tokens == theirs.tokens
    a, b = (np.frombuffer(b"".join(answer.rows), dtype=np.float32) for answer in (ours, theirs))
    # Not the same bits: rows that are computed in other company are summed in another order.
    assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
async def test_second_turn_computes_only_what_is_new_and_answers_the_same(
    swarm: MemorySwarm, nodes: list[Node]
) -> None:
    user = await swarm.user()
    key, history = await first_turn(swarm, user, nodes)
    question = [*history, 99, 3, 41, 77]
    before = rows_of(nodes)
    reused, answer = await turn(swarm, user, nodes, question, Prefix(key, len(history)))
    assert reused == len(history) // 16 * 16 == 32
    num_new = len(question) - reused + NUM_ANSWER - 1
    assert rows_of(nodes) == [rows + num_new for rows in before]
    assert [node.server.counters["positions_reused"] for node in nodes] == [reused] * 3
    fresh = await turn(swarm, await swarm.user(), nodes, question)
    assert fresh[0] == 0
    assert_same(answer, fresh[1])


async def test_answers_of_one_prompt_share_what_the_first_of_them_has_computed(
    swarm: MemorySwarm, nodes: list[Node]
) -> None:
    user = await swarm.user()
    _, alone = await turn(swarm, await swarm.user(), nodes, FIRST)
    async with await session_of(swarm, user, nodes) as session:
        await swarm.decode(session, FIRST)
        before, used = rows_of(nodes), nodes[0].admission.blocks.used_blocks
        together = await asyncio.gather(
            *(turn(swarm, user, nodes, FIRST, Prefix(session.key, len(FIRST) - 1)) for _ in range(3))
        )
        assert rows_of(nodes) == [rows + 3 * (len(FIRST) - 32 + NUM_ANSWER - 1) for rows in before]
        assert nodes[0].admission.blocks.used_blocks == used
    for reused, answer in together:
        assert reused == 32
        assert_same(answer, alone)


async def test_source_goes_on_while_others_begin_like_it(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    _, alone = await turn(swarm, await swarm.user(), nodes, [*FIRST, 5])
    async with await session_of(swarm, user, nodes) as session:
        session.send(*swarm.rows(FIRST), want_last=False)
        await session.next_done()
        reused, _ = await turn(swarm, user, nodes, [*FIRST[:33], 8, 9], Prefix(session.key, 32))
        assert reused == 32
        assert_same(await swarm.decode(session, [5]), alone)


async def test_rows_in_flight_are_not_begun_with(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    _, alone = await turn(swarm, await swarm.user(), nodes, FIRST)
    async with await session_of(swarm, user, nodes) as session:
        session.send(*swarm.rows(FIRST), want_last=False)
        # Whatever each node has computed by the time it is asked, the answer is the same.
        _, answer = await turn(swarm, user, nodes, FIRST, Prefix(session.key, len(FIRST) - 1))
        assert_same(answer, alone)
        await session.next_done()


async def test_source_that_closes_while_another_begins_like_it_takes_nothing_away(
    swarm: MemorySwarm, nodes: list[Node]
) -> None:
    user = await swarm.user()
    for retain in (False, True):
        source = await session_of(swarm, user, nodes)
        async with source:
            await swarm.decode(source, FIRST)
            _, alone = await turn(swarm, await swarm.user(), nodes, [*FIRST[:32], 4, 5])
            second = await session_of(swarm, user, nodes, Prefix(source.key, 32))
            await second.__aenter__()
            source.retain = retain
        await until(lambda: all(node.num_sessions == 1 for node in nodes))
        assert second.reused_positions == 32
        # What nobody holds is free, and written by somebody else.
        for node in nodes:
            node.admission.blocks.evict(node.admission.blocks.num_blocks)
        async with await session_of(swarm, await swarm.user(), nodes) as noise:
            await swarm.decode(noise, [*reversed(FIRST)])
            assert_same(await swarm.decode(second, [4, 5]), alone)
        await second.__aexit__()
        await until(lambda: not any(node.num_sessions for node in nodes))


async def test_users_with_the_same_prompt_share_nothing(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user, other = await swarm.user(), await swarm.user()
    key, history = await first_turn(swarm, user, nodes)
    blocks = [node.admission.blocks for node in nodes]
    used, before = [each.used_blocks for each in blocks], rows_of(nodes)
    # Even who overhears the session's id begins with nothing.
    reused, answer = await turn(swarm, other, nodes, history, Prefix(key, len(history)))
    assert reused == 0
    assert rows_of(nodes) == [rows + len(history) + NUM_ANSWER - 1 for rows in before]
    await until(lambda: not any(node.num_sessions for node in nodes))
    assert [each.used_blocks for each in blocks] == used
    # And takes nothing from whom it belongs to.
    for node in nodes:
        other.links.send(node.peer, CloseSession(key, 0))
    reused, ours = await turn(swarm, user, nodes, history, Prefix(key, len(history)))
    assert reused == 32
    assert_same(ours, answer)


async def test_stage_that_has_dropped_the_prefix_makes_all_begin_at_nothing(
    swarm: MemorySwarm, nodes: list[Node]
) -> None:
    user = await swarm.user()
    key, history = await first_turn(swarm, user, nodes)
    nodes[1].admission.blocks.evict(100)
    before = rows_of(nodes)
    reused, answer = await turn(swarm, user, nodes, history, Prefix(key, len(history)))
    assert reused == 0
    assert rows_of(nodes) == [rows + len(history) + NUM_ANSWER - 1 for rows in before]
    assert [node.server.counters["positions_reused"] for node in nodes] == [0] * 3
    _, alone = await turn(swarm, await swarm.user(), nodes, history)
    assert_same(answer, alone)


async def test_prefix_is_gone_when_it_was_not_to_be_kept_or_for_too_long(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    key, history = await first_turn(swarm, user, nodes, retain=False)
    assert (await turn(swarm, user, nodes, history, Prefix(key, 32)))[0] == 0
    key, history = await first_turn(swarm, user, nodes)
    for node in nodes:
        node.clock.now += RETAIN_S - 1
        node.server.expire()
    assert (await turn(swarm, user, nodes, history, Prefix(key, 32)))[0] == 32
    for node in nodes:
        node.clock.now += 1
        node.server.expire()
    assert (await turn(swarm, user, nodes, history, Prefix(key, 32)))[0] == 0
    await until(lambda: not any(node.num_sessions for node in nodes))
    assert [node.admission.blocks.used_blocks for node in nodes] == [0] * 3


async def test_second_close_frees_what_the_first_one_kept(swarm: MemorySwarm, nodes: list[Node]) -> None:
    user = await swarm.user()
    key, _ = await first_turn(swarm, user, nodes)
    assert all(node.admission.blocks.used_blocks for node in nodes)
    for node in nodes:
        user.links.send(node.peer, CloseSession(key, 0))
    await until(lambda: not any(node.admission.blocks.used_blocks for node in nodes))


@pytest.mark.parametrize("parent", [1, 16, 31, 33])
async def test_first_step_that_hangs_neither_on_the_prefix_nor_on_nothing_ends_the_session(
    swarm: MemorySwarm, parent: int
) -> None:
    node = await swarm.node(LayerRange(0, 7))
    stranger = swarm.stranger()
    await stranger.pool.connect(node.peer, [node.address])
    source = swarm.plan(stranger.peer, [node], max_positions=128)
    tensor, payload = swarm.rows(FIRST)
    await stranger.open(source, [node])
    stranger.pool.send(node.peer, step(source, tensor), payload)
    await stranger.get(StepResult)
    stranger.frames.clear()
    plan = swarm.plan(stranger.peer, [node], max_positions=128)
    stranger.pool.send(
        node.peer, OpenSession(plan.session, 0, 0, sign_plan(plan, stranger.identity), source.session, 37)
    )
    opened = await stranger.get(SessionOpened)
    assert isinstance(opened, SessionOpened)
    assert opened.reused_positions == 32
    tensor, payload = swarm.rows([5])
    stranger.pool.send(node.peer, step(plan, tensor, first_node=40, parent=parent, advance=0, want=()), payload)
    failed = await stranger.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.code) == (plan.session, "unknown-parent")
    # The source is as it was.
    stranger.pool.send(node.peer, step(source, tensor, 1, first_node=38), payload)
    assert isinstance(result := await stranger.get(StepResult), StepResult)
    assert result.nodes == (38,)
    node.admission.check_integrity()


async def test_prefix_that_is_declined_where_nothing_else_fits_ends_the_session(swarm: MemorySwarm) -> None:
    node = await swarm.node(LayerRange(0, 7))
    stranger = swarm.stranger()
    await stranger.pool.connect(node.peer, [node.address])
    most = node.admission.max_positions
    source = swarm.plan(stranger.peer, [node], max_positions=most // 2)
    tensor, payload = swarm.rows(FIRST)
    await stranger.open(source, [node])
    stranger.pool.send(node.peer, step(source, tensor), payload)
    await stranger.get(StepResult)
    plan = swarm.plan(stranger.peer, [node], max_positions=most - most // 2 + 32)
    stranger.pool.send(
        node.peer, OpenSession(plan.session, 0, 0, sign_plan(plan, stranger.identity), source.session, 32)
    )
    await until(lambda: node.num_sessions == 2)
    stranger.pool.send(node.peer, step(plan, tensor), payload)
    failed = await stranger.get(SessionFailed)
    assert isinstance(failed, SessionFailed)
    assert (failed.session, failed.code) == (plan.session, "no-memory")
    assert node.num_sessions == 1
    node.admission.check_integrity()


async def test_answer_that_is_computed_anew_does_not_hold_up_those_that_begin_like_it() -> None:
    ids = list(range(64))
    first = RunningAnswer(ids=ids, all_ids=ids, num_prompt=64)
    prefixes: PrefixCache[RunningAnswer] = PrefixCache()
    prefixes.begin(first)
    first.session = bytes(16)
    first.prefilled.set()  # its first token is out
    first.num_computed = 0  # and a new session over another route begins
    client = SimpleNamespace(_prefixes=prefixes, _remembered=lambda *_: contextlib.nullcontext())
    async with AsyncExitStack() as stack:
        second = await SwarmClient._begin(client, stack, list(range(64)))  # type: ignore[arg-type]
    assert second is not first
