"""Nodes that die, freeze, are cut off, leave and lie in the middle of an answer: it goes on, token for token.

Six real processes hold every third of a real model twice. What an answer is without any of this, the same swarm says
first; so each test is an equality. How long an answer stood still is measured and told, and never asserted: this
machine may be busy. The slow test does every fault in every place twenty times and prints the table;
``python -m benchmarks.scheduler --only recovery`` does so with fewer.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from benchmarks.scheduler import recovery
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import FusionError
from fusion_node.store import StoredModel
from tests.live.chaos import (
    GREEDY,
    HANGS_S,
    NUM_TOKENS,
    PROMPT,
    SAMPLED,
    ChaosNode,
    ChaosSwarm,
    Fault,
    Place,
    Undisturbed,
    WatchedConnection,
    answer_of,
    chaos_swarm,
    first_replayed,
    nth_result,
    nth_sent,
    outcome_of,
    try_fault,
    user_of,
)
from tests.live.chaos_node import Garbage
from tests.live.swarm_process import MODEL
from tests.live.test_gateway_live import started

pytestmark = [pytest.mark.live, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def swarm(
    test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChaosSwarm]:
    """Each third of the layers twice, in a home of their own: what one test run bans, no other is to know of."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(test_home / "models")
    with chaos_swarm(home, tmp_path_factory.mktemp("nodes")) as swarm:
        swarm.start(*recovery.RANGES * 2)
        yield swarm


@pytest.fixture(scope="module")
def undisturbed() -> Undisturbed:
    return Undisturbed()


def kill(*victims: ChaosNode) -> None:
    for victim in victims:
        victim.signal(signal.SIGKILL)


def serving(swarm: ChaosSwarm, connection: WatchedConnection, stage: int) -> ChaosNode:
    """Who has this place in the newest plan."""
    return swarm.by_peer(connection.last_plan[stage])


def idle(swarm: ChaosSwarm, connection: WatchedConnection, stage: int) -> ChaosNode:
    """Who could have it."""
    ours = serving(swarm, connection, stage)
    return next(node for node in swarm.nodes if node.layers == ours.layers and node is not ours)


CASES = [
    (Fault.GARBAGE, Place.DECODE, 1, "greedy"),
    (Fault.FREEZE, Place.BETWEEN, 2, "greedy"),
    (Fault.LEAVE, Place.DECODE, 2, "greedy"),
    (Fault.KILL, Place.PREFILL, 0, "sampled"),
    (Fault.KILL, Place.DECODE, 1, "greedy"),
]


@pytest.mark.parametrize(("fault", "place", "stage", "how"), CASES, ids=str)
async def test_hurt_answer_equals_the_undisturbed_one(
    swarm: ChaosSwarm, undisturbed: Undisturbed, fault: Fault, place: Place, stage: int, how: str
) -> None:
    trial = await try_fault(swarm, undisturbed, fault, place, stage, GREEDY if how == "greedy" else SAMPLED)
    assert trial.outcome.tokens == trial.whole.tokens
    assert trial.outcome.text == trial.whole.text
    # Of a busy machine's other nodes some may be taken for dead as well.
    assert trial.causes
    assert trial.victim not in {each.peer for each in trial.outcome.stats.stages}
    print(f"{fault} in {place}, stage {stage}: stood still for {trial.stall_s:.2f} s, {trial.causes}")


async def test_answer_of_whose_layers_nobody_is_left_ends_with_a_named_error(
    swarm: ChaosSwarm, undisturbed: Undisturbed
) -> None:
    async with user_of(swarm) as (client, connection):
        whole, _ = await undisturbed.of(client, connection, GREEDY)
        connection.when(nth_result(5), lambda: kill(*(node for node in swarm.nodes if node.layers == "10:20")))
        generation = client.generate(PROMPT, GREEDY, raw=True)
        with pytest.raises(FusionError, match="10:20"):
            async with asyncio.timeout(3 * HANGS_S):
                await generation.text()
        delivered = generation.stats.token_ids
        assert delivered == whole.tokens[: len(delivered)]
        assert 0 < len(delivered) < NUM_TOKENS


# the rest takes longer


@pytest.mark.slow
async def test_two_stages_that_die_at_once_are_both_replaced(swarm: ChaosSwarm, undisturbed: Undisturbed) -> None:
    async with user_of(swarm) as (client, connection):
        whole, _ = await undisturbed.of(client, connection, GREEDY)
        connection.when(nth_result(5), lambda: kill(serving(swarm, connection, 0), serving(swarm, connection, 1)))
        assert (await answer_of(client, GREEDY)).tokens == whole.tokens
        assert not connection.errors


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", Garbage)
async def test_any_garbage_has_its_sender_replaced(
    swarm: ChaosSwarm, undisturbed: Undisturbed, kind: Garbage, stage: int
) -> None:
    async with user_of(swarm) as (client, connection):
        whole, num_chunks = await undisturbed.of(client, connection, GREEDY)
        liars: list[ChaosNode] = []

        def lie() -> None:
            liars.append(serving(swarm, connection, stage))
            liars[0].answers_with(kind, since=num_chunks + 4)

        connection.when(nth_sent(0), lie)
        outcome = await answer_of(client, GREEDY)
        assert outcome.tokens == whole.tokens
        assert liars[0].has_lied
        assert outcome.stats.repairs
        assert liars[0].peer not in {each.peer for each in outcome.stats.stages}
        print(f"{kind} from stage {stage}: {[(r.kind, r.cause, r.stage, r.stall_s) for r in outcome.stats.repairs]}")


@pytest.mark.slow
async def test_thawed_node_that_was_replaced_does_no_harm(swarm: ChaosSwarm, undisturbed: Undisturbed) -> None:
    params = SamplingParams(max_tokens=3 * NUM_TOKENS, ignore_eos=True)
    async with user_of(swarm) as (client, connection):
        whole = await answer_of(client, params)
        for stage in range(3):
            frozen: list[ChaosNode] = []

            def freeze(stage: int = stage, frozen: list[ChaosNode] = frozen) -> None:
                frozen.append(serving(swarm, connection, stage))
                frozen[0].signal(signal.SIGSTOP)

            connection.when(nth_result(5), freeze)
            # When the answer has gone on without it, it comes back, with the session's rows and plan as they were.
            connection.when(nth_result(30), lambda frozen=frozen: frozen[0].signal(signal.SIGCONT))  # type: ignore[misc]
            outcome = await answer_of(client, params)
            assert outcome.tokens == whole.tokens
            assert outcome.stats.repairs
            assert not connection.errors


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(1, 1), (0, 2), (2, 2), (1, 0)], ids=str)
async def test_two_kills_in_one_answer(swarm: ChaosSwarm, undisturbed: Undisturbed, stages: tuple[int, int]) -> None:
    first, second = stages
    async with user_of(swarm) as (client, connection):
        # A third node for whoever is killed twice.
        if first == second:
            await asyncio.to_thread(swarm.start, recovery.RANGES[first])
        whole, _ = await undisturbed.of(client, connection, GREEDY)
        connection.when(nth_result(4), lambda: kill(serving(swarm, connection, first)))
        connection.when(nth_result(12), lambda: kill(serving(swarm, connection, second)))
        outcome = await answer_of(client, GREEDY)
        assert outcome.tokens == whole.tokens
        assert outcome.stats.repairs
    swarm.shrink_to(recovery.RANGES * 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_replacement_that_dies_during_the_replay_is_replaced_too(
    swarm: ChaosSwarm, undisturbed: Undisturbed, stage: int
) -> None:
    async with user_of(swarm) as (client, connection):
        await asyncio.to_thread(swarm.start, recovery.RANGES[stage])
        whole, _ = await undisturbed.of(client, connection, GREEDY)
        connection.when(nth_result(5), lambda: kill(serving(swarm, connection, stage)))
        # The first entry of the replay is on its way to it, or comes from it.
        connection.when(first_replayed(), lambda: kill(serving(swarm, connection, stage)))
        outcome = await answer_of(client, GREEDY)
        assert outcome.tokens == whole.tokens
        assert not connection.errors
    swarm.shrink_to(recovery.RANGES * 2)


@pytest.mark.slow
async def test_alternate_that_died_before_is_not_waited_for(swarm: ChaosSwarm, undisturbed: Undisturbed) -> None:
    async with user_of(swarm) as (client, connection):
        await asyncio.to_thread(swarm.start, "10:20")
        whole, _ = await undisturbed.of(client, connection, GREEDY)
        connection.when(nth_result(3), lambda: kill(idle(swarm, connection, 1)))
        connection.when(nth_result(6), lambda: kill(serving(swarm, connection, 1)))
        assert (await answer_of(client, GREEDY)).tokens == whole.tokens
        assert not connection.errors
    swarm.shrink_to(recovery.RANGES * 2)


@pytest.mark.slow
async def test_answers_at_once_survive_a_kill(swarm: ChaosSwarm) -> None:
    prompts = [f"{PROMPT} Question {number}:" for number in range(4)]
    async with user_of(swarm) as (client, connection):
        whole = [(await answer_of(client, GREEDY, prompt)).tokens for prompt in prompts]
        connection.when(nth_result(17), lambda: kill(serving(swarm, connection, 1)))
        together = await asyncio.gather(*(answer_of(client, GREEDY, prompt) for prompt in prompts))
        assert [outcome.tokens for outcome in together] == whole


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_int8_answer_equals_the_undisturbed_int8_answer(
    swarm: ChaosSwarm, undisturbed: Undisturbed, stage: int
) -> None:
    async with user_of(swarm, wire="int8") as (client, connection):
        whole, _ = await undisturbed.of(client, connection, GREEDY, "int8")
        connection.when(nth_result(6), lambda: kill(serving(swarm, connection, stage)))
        assert (await answer_of(client, GREEDY)).tokens == whole.tokens


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_second_turn_of_a_chat_survives_a_kill_with_what_was_kept(swarm: ChaosSwarm, stage: int) -> None:
    async def talk(client: SwarmClient) -> tuple[list[int], list[int], int]:
        messages = [{"role": "user", "content": PROMPT + " Which ward is the first?"}]
        first = await outcome_of(client.chat(messages, GREEDY))
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = await outcome_of(client.chat(messages, GREEDY))
        return first.tokens, second.tokens, second.stats.cached_tokens

    async with user_of(swarm, prefix_cache=True) as (client, connection):
        first, second, num_cached = await talk(client)
        assert num_cached > 100
    async with user_of(swarm, prefix_cache=True) as (client, connection):
        connection.when(nth_result(NUM_TOKENS + 6), lambda: kill(serving(swarm, connection, stage)))
        assert (await talk(client))[:2] == (first, second)
        assert not connection.errors
    async with user_of(swarm, prefix_cache=True) as (client, connection):
        connection.when(nth_result(6), lambda: kill(serving(swarm, connection, stage)))
        assert (await talk(client))[:2] == (first, second)
        assert not connection.errors


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_gateway_streams_on_when_a_node_is_killed(swarm: ChaosSwarm, stage: int, tmp_path: Path) -> None:
    await asyncio.to_thread(swarm.restore)
    ask = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 40}
    peers = [argument for address in swarm.addresses for argument in ("--peer", address)]
    async with (
        started(swarm.home, tmp_path, "serve", MODEL, *peers, "--listen", "127.0.0.1:0") as gateway,
        openai.AsyncOpenAI(base_url=gateway.ready["url"], api_key="none", max_retries=0, timeout=90) as client,
    ):
        whole = await client.chat.completions.create(**ask)  # type: ignore[call-overload]
        plan = whole.usage.model_extra["fusion"]["plan"]
        victim = swarm.by_peer(plan[stage]["peer"])
        text = ""
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            **ask, stream=True, stream_options={"include_usage": True}
        )
        last, num_chunks = None, 0
        async for last in stream:
            num_chunks += 1
            if num_chunks == 5:
                kill(victim)
            text += last.choices[0].delta.content or "" if last.choices else ""
        assert text == whole.choices[0].message.content
        assert last is not None
        assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
async def test_every_fault_in_every_place_twenty_times(
    swarm: ChaosSwarm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = [(fault, place, index) for fault in Fault for index, place in enumerate(Place)]
    found = await recovery.trials(swarm, cases, 20, tmp_path_factory.mktemp("stalls") / "stalls.jsonl")
    rows = recovery.summary(found)
    recovery.print_summary(rows)
    assert [row for row in rows if row["equal"] != row["answers"]] == []
