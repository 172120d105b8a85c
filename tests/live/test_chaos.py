"""Nodes whose links are cut in the middle of an answer: it goes on, token for token.

Six real processes hold every layer of a real model twice. What an answer is without any of this, the same swarm says
first; so each test is an equality. How long an answer stood still is measured and told, and never asserted: this
machine may be busy.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.store import StoredModel
from tests.live.chaos import (
    HANGS_S,
    ChaosSwarm,
    Fault,
    Hurt,
    Outcome,
    Place,
    WatchedConnection,
    chaos_swarm,
    outcome_of,
)
from tests.live.swarm_process import MODEL

pytestmark = [pytest.mark.live, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = " ".join(f"Entry {n}: the heron of ward {n * 7 % 90} saw a boat." for n in range(14))
"""Some 200 tokens, so that each of three stages has several chunks of it to compute."""

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def swarm(
    test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ChaosSwarm]:
    """Each third of the layers twice, in a home of their own: what one test run bans, no other is to know of."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(test_home / "models")
    with chaos_swarm(home, tmp_path_factory.mktemp("nodes")) as swarm:
        swarm.start(*["0:10", "10:20", "20:30"] * 2)
        yield swarm


@asynccontextmanager
async def user_of(
    swarm: ChaosSwarm, *, wire: str | None = None, prefix_cache: bool = False
) -> AsyncIterator[SwarmClient]:
    """Somebody new, who knows all nodes that are whole."""
    swarm.restore()
    connection = WatchedConnection(swarm.addresses, mdns=False)
    async with (
        connection,
        SwarmClient(
            MODEL, home=swarm.home, mdns=False, threads=1, wire=wire, prefix_cache=prefix_cache, connection=connection
        ) as client,
    ):
        await until_all_known(client, swarm)
        yield client


async def until_all_known(client: SwarmClient, swarm: ChaosSwarm) -> None:
    peers = {node.peer for node in swarm.nodes}
    async with asyncio.timeout(30.0):
        while not peers <= {each.peer for each in await client.connection.find(client.model.model_id)}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, str | None], tuple[Outcome, int]]:
    """What was answered without any fault, and in how many chunks the prompt was computed; filled as it is needed."""
    return {}


async def answer_of(client: SwarmClient, params: SamplingParams, prompt: str = PROMPT) -> Outcome:
    async with asyncio.timeout(3 * HANGS_S):
        return await outcome_of(client.generate(prompt, params, raw=True))


async def expected(
    client: SwarmClient,
    params: SamplingParams,
    known: dict[tuple[str, str | None], tuple[Outcome, int]],
    wire: str | None = None,
) -> tuple[Outcome, int]:
    key = ("greedy" if params is GREEDY else "sampled", wire)
    if key not in known:
        connection = watched(client)
        before = connection.num_steps
        outcome = await answer_of(client, params)
        assert len(outcome.tokens) == NUM_TOKENS
        known[key] = outcome, connection.num_steps - before - (NUM_TOKENS - 1)
    return known[key]


def watched(client: SwarmClient) -> WatchedConnection:
    assert isinstance(client.connection, WatchedConnection)
    return client.connection


async def hurt_answer(client: SwarmClient, hurt: Hurt, params: SamplingParams, num_chunks: int) -> Outcome:
    """An answer to which the fault happened."""
    hurt.arm(num_chunks=num_chunks)
    outcome = await answer_of(client, params)
    assert not hurt.connection.errors, hurt.connection.errors
    assert hurt.at is not None, "the moment never came"
    return outcome


CASES = [
    (Fault.RESET, Place.BETWEEN, 1, "greedy"),
    (Fault.RESET, Place.PREFILL, 0, "sampled"),
]


@pytest.mark.parametrize(("fault", "place", "stage", "how"), CASES, ids=lambda each: str(each))
async def test_hurt_answer_equals_the_undisturbed_one(
    swarm: ChaosSwarm,
    undisturbed: dict[tuple[str, str | None], tuple[Outcome, int]],
    fault: Fault,
    place: Place,
    stage: int,
    how: str,
) -> None:
    params = GREEDY if how == "greedy" else SAMPLED
    async with user_of(swarm) as client:
        whole, num_chunks = await expected(client, params, undisturbed)
        hurt = Hurt(swarm, watched(client), fault, place, stage)
        outcome = await hurt_answer(client, hurt, params, num_chunks)
        assert outcome.tokens == whole.tokens
        assert outcome.text == whole.text
        print(f"{fault} in {place}, stage {stage}: {stall_of(outcome, hurt, whole):.2f} s")


def stall_of(outcome: Outcome, hurt: Hurt, whole: Outcome) -> float:
    """From the fault to the next token, less what a token takes."""
    assert hurt.at is not None
    after = [at for at in outcome.times if at > hurt.at]
    usual = statistics.median(b - a for a, b in zip(whole.times, whole.times[1:], strict=False))
    return max(0.0, max(b - a for a, b in zip([hurt.at, *after], after, strict=False)) - usual)
