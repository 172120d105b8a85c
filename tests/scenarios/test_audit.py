"""What the logs of real servers, links and engine show: answers of pipelines, also repaired and speculative ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusion_node.cli.audit import STATEMENTS
from fusion_node.client.answer_core import Opened, Prefix
from fusion_node.engine.boundary import Boundary
from fusion_node.slices import Dims
from p2p.messages import Step, StepTaps, TensorMeta
from scheduler.speculation import Mode
from tests.engine.tiny import TinyModel
from tests.scenarios.group_user import GroupUser
from tests.scenarios.swarm import MemorySwarm, memory_swarm, until
from tests.scenarios.test_answer_repair import PROMPT, Answering, Doing, answering, nodes_of, once
from tests.scenarios.test_fusion_group import LAYOUTS, plain_and_tree, stages_of
from tests.scenarios.test_speculative_answer import GREEDY, Guessing, Speculating, plain
from verification.audit_core import audit, models_in
from verification.audit_file import read_runs
from verification.audit_report import Kind, Report, Status

DIMS = Dims(hidden=48, heads=4, kv_heads=2, head_dim=12, channels=96)


@pytest.fixture
def recorded(model: TinyModel, boundary: Boundary, tmp_path: Path) -> Callable[..., Awaitable[Report]]:
    """Plays something in a swarm in which everybody keeps a log, ends all processes, and judges the logs."""

    async def play(work: Callable[[MemorySwarm], Awaitable[None]]) -> Report:
        async with _swarm(model, boundary, tmp_path) as swarm:
            await work(swarm)
        return judged(tmp_path, DIMS)

    return play


def judged(folder: Path, dims: Dims) -> Report:
    runs = []
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            runs += read_runs(path.name, file)
    return audit(runs, dict.fromkeys(models_in(runs), dims), statements=STATEMENTS)


@asynccontextmanager
async def _swarm(model: TinyModel, boundary: Boundary, folder: Path) -> AsyncIterator[MemorySwarm]:
    async with memory_swarm(model, boundary) as swarm:
        swarm.audit_folder = folder
        yield swarm


def check_pipeline(report: Report) -> None:
    """Everything is in order but for what a pipeline is: nodes are sent whole states."""
    assert set(report.counts) == {Kind.WHOLE}, report.findings
    assert report.unended == ()
    for session in report.sessions:
        assert session.num_closed == session.num_steps > 0
        assert {node.largest_fraction for node in session.nodes if node.num_states} == {1.0}


async def test_a_pipeline_is_sent_whole_states_and_every_step_closes(
    recorded: Callable[..., Awaitable[Report]],
) -> None:
    async def work(swarm: MemorySwarm) -> None:
        nodes = await swarm.pipeline()
        await swarm.answer(await swarm.user(), nodes, list(PROMPT[:20]))

    report = await recorded(work)
    check_pipeline(report)
    (session,) = report.sessions
    # The prompt, and all tokens but the last.
    assert (session.num_closed, session.num_given_up, session.num_abandoned, session.num_replays) == (8, 0, 0, 0)
    assert [node.num_states for node in session.nodes] == [8, 8, 8]
    assert [node.num_partials for node in session.nodes] == [0, 0, 0]


@pytest.mark.parametrize(("fault", "stage"), [("kill", 0), ("kill", 2), ("freeze", 1), ("leave", 1)])
async def test_an_answer_whose_stage_is_replaced_closes_by_replay(
    recorded: Callable[..., Awaitable[Report]], fault: str, stage: int
) -> None:
    async def work(swarm: MemorySwarm) -> None:
        nodes = await nodes_of(swarm)
        user, doing = await answering(swarm), Doing()
        user.on_token = once(lambda count: count == 4, lambda: doing.befall(nodes[stage], fault, swarm))
        await user.run()
        await asyncio.gather(*doing.tasks)

    report = await recorded(work)
    check_pipeline(report)
    (session,) = report.sessions
    assert len(session.epochs) > 1
    assert session.num_replays > 0 or stage == 2


async def test_an_answer_that_begins_with_a_kept_prefix_closes(recorded: Callable[..., Awaitable[Report]]) -> None:
    async def work(swarm: MemorySwarm) -> None:
        nodes = await nodes_of(swarm)
        first = await answering(swarm)
        first.retain = True
        await first.run(4)
        session = next(event.session for event in first.events if isinstance(event, Opened))
        doing = Doing()
        user = Answering(swarm, first.connection, [*PROMPT, *first.tokens[:3], 99, 3], Prefix(session, 80))
        user.on_token = once(lambda count: count == 4, lambda: doing.kill(nodes[2]))
        await user.run()
        await asyncio.gather(*doing.tasks)

    report = await recorded(work)
    check_pipeline(report)
    assert len(report.sessions) == 2


@pytest.mark.parametrize("fault", [None, "kill"])
async def test_a_speculative_answer_closes_but_for_what_its_user_did_not_wait_for(
    recorded: Callable[..., Awaitable[Report]], fault: str | None
) -> None:
    async def work(swarm: MemorySwarm) -> None:
        nodes = await nodes_of(swarm)
        text, connection = await plain(swarm, GREEDY), (await swarm.user())
        await swarm.measured(connection)
        guesses = Guessing(text, 0.7, random.Random(7))
        user, doing = Speculating(swarm, connection, guesses=guesses, modes=(Mode.TREE,)), Doing()
        if fault is not None:
            user.on_token = once(lambda count: count == 8, lambda: doing.befall(nodes[1], fault, swarm))
        assert await user.run() == text
        await asyncio.gather(*doing.tasks)

    report = await recorded(work)
    check_pipeline(report)
    assert len(report.sessions) == 2
    for session in report.sessions:
        assert {step.status for step in session.steps} <= {Status.CLOSED, Status.ABANDONED, Status.GIVEN_UP}
    # Of both users' answers, plain and guessed, the latter's steps have more rows than one.
    assert sum(step.num_rows > 1 for session in report.sessions for step in session.steps) > 5


@pytest.mark.parametrize("name", ["three, uneven", "group, then node", "groups of two and three"])
async def test_groups_close_and_no_member_is_sent_more_than_its_slice(
    recorded: Callable[..., Awaitable[Report]], name: str
) -> None:
    async def work(swarm: MemorySwarm) -> None:
        user = GroupUser.of(swarm, await stages_of(swarm, LAYOUTS[name]))
        await user.open()
        await plain_and_tree(user)
        user.close()
        await until(lambda: not any(node.num_sessions for node in swarm.nodes))

    report = await recorded(work)
    num_alone = sum(len(weights) == 1 for _, weights in LAYOUTS[name])
    assert report.counts == ({Kind.WHOLE: num_alone} if num_alone else {}), report.findings
    (session,) = report.sessions
    assert session.num_closed == session.num_steps == 6
    for node in session.nodes:
        assert node.largest_fraction == node.own_fraction
        assert node.num_partials == 6 * 4 * len(range(node.places[0].start, node.places[0].stop)) * (
            node.places[0].num_members - 1
        )


async def test_members_that_gather_a_state_beside_the_plan_are_found(
    recorded: Callable[..., Awaitable[Report]],
) -> None:
    async def work(swarm: MemorySwarm) -> None:
        stages = await stages_of(swarm, LAYOUTS["three, uneven"])
        user = GroupUser.of(swarm, stages)
        await user.open()
        await user.step(user.embed([5, 17, 99]))
        members = stages[0]
        for sender, width in zip(members, (24, 8, 16), strict=True):
            for receiver in members:
                if receiver is not sender:
                    step = Step(user.plan.session, 0, 0, 1, 0, (), 1, (), TensorMeta("f32", 1, width), ())
                    sender.pool.send(receiver.peer, step, bytes(4 * width))
        user.close()
        await until(lambda: not any(node.num_sessions for node in swarm.nodes))

    report = await recorded(work)
    assert report.counts == {Kind.PATH: 6, Kind.WHOLE: 3}
    assert [node.largest_fraction for node in report.sessions[0].nodes] == [1.0, 1.0, 1.0]
    assert report.sessions[0].num_closed == 1


async def test_a_node_that_sends_another_one_rows_beside_the_plan_is_found(
    recorded: Callable[..., Awaitable[Report]],
) -> None:
    async def work(swarm: MemorySwarm) -> None:
        nodes = await swarm.pipeline()
        connection = await swarm.user()
        async with await swarm.session(connection, nodes) as session:
            await swarm.decode(session, list(PROMPT[:20]))
            rows, payload = TensorMeta("f32", 1, 48), bytes(4 * 48)
            await nodes[2].pool.connect(nodes[0].peer, [nodes[0].address])
            # Back to the first, which is no way of the plan; and inner rows to a node, which only its user may be sent.
            nodes[2].pool.send(nodes[0].peer, Step(session.key, 0, 3, 24, 23, (), 24, (24,), rows, ()), payload)
            nodes[2].pool.send(nodes[0].peer, StepTaps(session.key, 0, 3, 6, (24,), rows), payload)
            await swarm.decode(session, [5])

    report = await recorded(work)
    assert report.counts[Kind.PATH] == 2
    assert not report.passed
