"""Three real processes serve a real model: what comes out is compared with the model in one process, by token."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import base58
import pytest
import pytest_asyncio
import torch

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import Generation, SwarmClient
from fusion_node.engine.reference import ReferenceModel
from fusion_node.errors import ConfigError, NoRoute, PeerError
from fusion_node.store import StoredModel
from tests.live.swarm_process import MODEL, Nodes

pytestmark = [pytest.mark.live, pytest.mark.asyncio(loop_scope="module")]

PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)
"""Greedy, and 64 tokens whatever comes, so that as many are compared."""

PROMPTS = {
    "english": "The lighthouse keeper had not spoken to anyone for eleven weeks when the marmalade boat arrived.",
    "code": "def quicksort(items: list[int]) -> list[int]:\n    if len(items) < 2:\n        return items\n    pivot =",
    "chinese": "人工智能的发展历史可以追溯到二十世纪五十年代，当时的科学家们",
    "one-token": "The",
    "thousand-tokens": " ".join(f"Entry {n}: the heron of ward {n * 7 % 90} saw a boat." for n in range(64)),
    "emoji": "Wetter heute: ☀️🌧️🌈 — naïve café, Ελληνικά, עברית 👩‍👩‍👧‍👦 und dann 🎉",
    "numbers": "3.14159, 2.71828, 1.41421, 1.61803, 0.57721, 299792458, 6.02214076e23,",
    "list": "Shopping list:\n" + "\n".join(f"{n}. {word}" for n, word in enumerate(("milk", "eggs", "rope") * 9, 1)),
}

ANOTHER_S = 20.0
"""How long somebody else who holds the layers is looked for, with a last look around; no answer ends before that."""

KILLED_S = 5.0 + ANOTHER_S
FROZEN_S = 12.0
LEFT_S = 10.0


@pytest.fixture(scope="module")
def reference(builtin_model: StoredModel) -> ReferenceModel:
    torch.set_num_threads(1)  # as the nodes, and because they share two cores with it
    return ReferenceModel(builtin_model.path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(test_home: Path, three_nodes: Nodes) -> AsyncIterator[SwarmClient]:
    async with SwarmClient(
        MODEL, peers=three_nodes.current[0].addresses, home=test_home, mdns=False, threads=1
    ) as swarm:
        yield swarm


async def tokens_of(generation: Generation) -> list[int]:
    await generation.text()
    return generation.stats.token_ids


# the answer


@pytest.mark.parametrize("name", PROMPTS)
async def test_answer_equals_the_model_in_one_process_token_for_token(
    client: SwarmClient, three_nodes: Nodes, reference: ReferenceModel, name: str
) -> None:
    generation = client.generate(PROMPTS[name], PARAMS, raw=True)
    tokens = await tokens_of(generation)
    ids = await client.encode(PROMPTS[name], raw=True)
    assert tokens == await asyncio.to_thread(reference.greedy, ids, 64, ignore_eos=True)
    assert len(tokens) == 64
    stats = generation.stats
    assert stats.prompt_tokens == len(ids)
    assert [(stage.peer, str(stage.layers)) for stage in stats.stages] == [
        (node.peer, node.layers) for node in three_nodes.current
    ]
    assert (len(ids) == 1) == (name == "one-token")
    assert (len(ids) > 1000) == (name == "thousand-tokens")


async def test_int8_on_the_wire_answers_and_leaves_exact_answers_alone(
    client: SwarmClient, test_home: Path, three_nodes: Nodes
) -> None:
    exact = await tokens_of(client.generate(PROMPTS["english"], PARAMS, raw=True))
    async with SwarmClient(
        MODEL, peers=three_nodes.current[0].addresses, home=test_home, mdns=False, threads=1, wire="int8"
    ) as lossy:
        generation = lossy.generate("What is the capital of France?", SamplingParams(max_tokens=64))
        assert await generation.text() == "The capital of France is Paris."
        assert len(generation.stats.stages) == 3
        rounded = await tokens_of(lossy.generate(PROMPTS["english"], PARAMS, raw=True))
    assert len(rounded) == 64
    assert await tokens_of(client.generate(PROMPTS["english"], PARAMS, raw=True)) == exact


async def test_an_unknown_encoding_for_the_wire_is_refused_at_once(test_home: Path) -> None:
    with pytest.raises(ConfigError, match="int8"):
        SwarmClient(MODEL, home=test_home, wire="int4")


async def test_chat_answer_ends_where_the_model_ends_it(client: SwarmClient) -> None:
    generation = client.generate("What is the capital of France?", SamplingParams(max_tokens=64))
    assert await generation.text() == "The capital of France is Paris."
    assert generation.stats.finish_reason == "stop"


async def test_sampling_is_a_function_of_the_seed(client: SwarmClient) -> None:
    def sample(seed: int) -> Generation:
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)
        return client.generate(PROMPTS["english"], params, raw=True)

    first, again, other = [await tokens_of(sample(seed)) for seed in (7, 7, 8)]
    assert first == again
    assert first != other


@pytest.mark.parametrize("num_sessions", [2, 4])
async def test_sessions_at_once_answer_what_each_answers_alone(client: SwarmClient, num_sessions: int) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [PROMPTS[name] for name in ("english", "code", "chinese", "numbers")][:num_sessions]
    alone = [await tokens_of(client.generate(prompt, params, raw=True)) for prompt in prompts]
    together = await asyncio.gather(*(tokens_of(client.generate(p, params, raw=True)) for p in prompts))
    assert together == alone


async def rows_computed(client: SwarmClient) -> list[float]:
    nodes = await client.connection.measure(await client.connection.find(client.model.model_id))
    return [(await client.connection.status_of(node))["rows"] for node in nodes]


async def test_second_question_of_a_chat_computes_only_what_is_new(
    test_home: Path, client: SwarmClient, three_nodes: Nodes
) -> None:
    short = SamplingParams(max_tokens=12, ignore_eos=True)
    talk = [{"role": "user", "content": PROMPTS["list"] + "\nWhat do I buy first?"}]
    first = client.chat(talk, short)
    talk += [{"role": "assistant", "content": await first.text()}, {"role": "user", "content": "And then?"}]
    before = await rows_computed(client)
    second = client.chat(talk, short)
    tokens = await tokens_of(second)
    stats = second.stats
    assert stats.cached_tokens >= first.stats.prompt_tokens // 16 * 16 > 100
    num_new = stats.prompt_tokens - stats.cached_tokens + 12 - 1
    assert await rows_computed(client) == [rows + num_new for rows in before]
    # Another identity, and one that keeps nothing, begin from nothing and answer the same.
    for prefix_cache in (True, False):
        async with SwarmClient(
            MODEL,
            peers=three_nodes.current[0].addresses,
            home=test_home,
            mdns=False,
            threads=1,
            prefix_cache=prefix_cache,
        ) as other:
            for _ in range(1 if prefix_cache else 2):
                fresh = other.chat(talk, short)
                assert await tokens_of(fresh) == tokens
                assert fresh.stats.cached_tokens == 0


async def test_answers_to_one_prompt_at_once_compute_it_once(client: SwarmClient) -> None:
    prompt = "Name five rivers and the seas they flow into, in alphabetical order. " * 8
    size = len(await client.encode(prompt))
    before = await rows_computed(client)
    answers = [
        client.generate(prompt, SamplingParams(max_tokens=4, temperature=1.0, seed=seed, ignore_eos=True))
        for seed in range(3)
    ]
    await asyncio.gather(*(answer.text() for answer in answers))
    cached = sorted(answer.stats.cached_tokens for answer in answers)
    assert cached[1] == cached[2] == (size - 1) // 16 * 16
    assert await rows_computed(client) == [rows + 3 * (size + 3) - sum(cached) for rows in before]


async def test_answer_that_is_left_early_frees_its_session(client: SwarmClient) -> None:
    generation = client.generate(PROMPTS["english"], SamplingParams(max_tokens=400, ignore_eos=True), raw=True)
    async for _ in generation:
        break
    await generation.aclose()
    await assert_idle(client)


async def test_nodes_keep_nothing_after_many_answers(client: SwarmClient) -> None:
    await asyncio.gather(*(tokens_of(client.generate("Hello", SamplingParams(max_tokens=2))) for _ in range(12)))
    counters = await assert_idle(client)
    # Both nodes of a size have room for as much as before the first session.
    assert all(c["kv_free_positions"] == c["kv_positions"] for c in counters)
    assert all(c["sessions_failed"] == 0 for c in counters)


async def assert_idle(client: SwarmClient) -> list[dict[str, float]]:
    """Every node says that no session is open, within a moment."""
    nodes = await client.connection.measure(await client.connection.find(client.model.model_id))
    assert len(nodes) == 3
    async with asyncio.timeout(5.0):
        while True:
            counters = [await client.connection.status_of(node) for node in nodes]
            if all(c["open_sessions"] == 0 for c in counters):
                return counters
            await asyncio.sleep(0.05)


async def test_logs_hold_nothing_of_prompts_answers_and_keys(client: SwarmClient, three_nodes: Nodes) -> None:
    secret = "The zanzibarquokka password is hunter-seventeen-walrus."
    generation = client.generate(secret, SamplingParams(max_tokens=12), raw=True)
    answer = await generation.text()
    ids = await client.encode(secret, raw=True)
    for node in three_nodes.current:
        log, seed = node.log, node.identity_seed
        assert "session opened" in log
        texts = ["zanzibar", "quokka", "walrus", "lighthouse", "marmalade", "quicksort", "heron", "人工智能", answer]
        for run in (ids[3:6], generation.stats.token_ids[:3]):
            texts += [", ".join(map(str, run)), " ".join(map(str, run)), ",".join(map(str, run))]
        for form in (
            seed.hex(),
            base64.b64encode(seed).decode()[:40],
            base58.b58encode(seed).decode(),
            repr(seed)[2:30],
        ):
            texts.append(form)
        texts.append(client.connection.identity.seed.hex())
        assert [text for text in texts if text and text in log] == []
        assert (node.folder / "stdout").read_bytes() == b""
        # What it does tell is one JSON object per line.
        assert all(line.startswith("{") for line in log.splitlines())


# nodes that go: each test begins with three living ones


@pytest_asyncio.fixture(loop_scope="module")
async def user(test_home: Path, three_nodes: Nodes) -> AsyncIterator[SwarmClient]:
    """A new client over three living nodes."""
    three_nodes.restore()
    async with SwarmClient(MODEL, peers=three_nodes.addresses, home=test_home, mdns=False, threads=1) as swarm:
        yield swarm


async def failure_of(user: SwarmClient, hurt: Callable[[], None], *, within_s: float) -> tuple[NoRoute, PeerError]:
    """The error that an answer ends with when a node is hurt after some tokens for which there is no other.

    And what it says was the cause.
    """
    generation = user.generate(PROMPTS["english"], SamplingParams(max_tokens=1500, ignore_eos=True), raw=True)
    hurt_at: float | None = None
    with pytest.raises(NoRoute) as error:
        async with asyncio.timeout(60.0):
            async for _ in generation:
                if hurt_at is None and generation.stats.completion_tokens >= 5:
                    hurt()
                    hurt_at = time.monotonic()
    assert hurt_at is not None
    assert time.monotonic() - hurt_at < within_s
    cause = error.value.__cause__
    assert isinstance(cause, PeerError)
    return error.value, cause


async def test_nodes_without_mdns_are_not_written_down_for_this_machine(three_nodes: Nodes, test_home: Path) -> None:
    assert [node.peer for node in three_nodes.current if (test_home / "run" / f"{node.peer}.json").exists()] == []


@pytest.mark.parametrize("index", [2, 1, 0])
async def test_killed_node_is_named_at_once_and_a_replacement_serves_the_next_answer(
    user: SwarmClient, three_nodes: Nodes, index: int
) -> None:
    short = SamplingParams(max_tokens=12, ignore_eos=True)
    before = await tokens_of(user.generate(PROMPTS["english"], short, raw=True))
    victim = three_nodes.current[index]
    error, cause = await failure_of(user, lambda: victim.signal(signal.SIGKILL), within_s=KILLED_S)
    assert victim.peer[-8:] in str(error)
    assert f"serves layers {victim.layers}" in str(error)
    assert cause.peer in {node.peer for node in three_nodes.current}
    victim.wait(5.0)
    three_nodes.restore()
    assert three_nodes.current[index].peer != victim.peer
    assert await tokens_of(user.generate(PROMPTS["english"], short, raw=True)) == before


async def test_node_told_to_stop_hands_its_session_over_and_is_forgotten_at_once(
    user: SwarmClient, three_nodes: Nodes, test_home: Path
) -> None:
    long = SamplingParams(max_tokens=48, ignore_eos=True)
    spare = three_nodes.add("10:20")
    await until_found(user, spare.peer)
    before = await tokens_of(user.generate(PROMPTS["english"], long, raw=True))
    generation, leaver, told_at = user.generate(PROMPTS["english"], long, raw=True), None, 0.0
    try:
        async with asyncio.timeout(60.0):
            async for _ in generation:
                if leaver is None and generation.stats.completion_tokens >= 5:
                    serving = generation.stats.stages[1].peer
                    (leaver,) = [node for node in (three_nodes.current[1], spare) if node.peer == serving]
                    leaver.signal(signal.SIGTERM)
                    told_at = time.monotonic()
        assert generation.stats.token_ids == before
        assert leaver is not None
        assert leaver.wait(LEFT_S) == 0  # when its session is gone, long before its grace is over
        assert time.monotonic() - told_at < 30.0
        assert leaver.events("left")
        assert "Traceback" not in leaver.log
        first = three_nodes.current[0].addresses
        async with SwarmClient(MODEL, peers=first, home=test_home, mdns=False, threads=1) as newcomer:
            assert leaver.peer not in {r.peer for r in await newcomer.connection.find(newcomer.model.model_id)}
    finally:
        spare.end()


async def test_frozen_node_ends_the_answer_with_an_error(user: SwarmClient, three_nodes: Nodes) -> None:
    victim = three_nodes.current[1]
    try:
        error, _ = await failure_of(user, lambda: victim.signal(signal.SIGSTOP), within_s=FROZEN_S + ANOTHER_S)
        assert victim.peer[-8:] in str(error)
    finally:
        victim.end()


async def test_node_found_frozen_when_an_answer_begins_is_left_out_of_a_second_plan(
    user: SwarmClient, three_nodes: Nodes
) -> None:
    short = SamplingParams(max_tokens=12, ignore_eos=True)
    spare = three_nodes.add("10:20")
    await until_found(user, spare.peer)
    generation = user.generate(PROMPTS["english"], short, raw=True)
    before = await tokens_of(generation)
    (victim,) = [n for n in (three_nodes.current[1], spare) if n.peer == generation.stats.stages[1].peer]
    victim.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(30.0):
            generation = user.generate(PROMPTS["english"], short, raw=True)
            assert await tokens_of(generation) == before
    finally:
        victim.end()
        spare.end()
    assert victim.peer not in {stage.peer for stage in generation.stats.stages}


async def test_only_node_of_its_layers_serves_again_as_soon_as_it_thaws(user: SwarmClient, three_nodes: Nodes) -> None:
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    before = await tokens_of(user.generate(PROMPTS["english"], short, raw=True))
    victim = three_nodes.current[1]
    victim.signal(signal.SIGSTOP)
    try:
        # Known to be alive a moment ago, so the session is opened with it, and that fails.
        asyncio.get_running_loop().call_later(FROZEN_S, victim.signal, signal.SIGCONT)
        async with asyncio.timeout(40.0):
            assert await tokens_of(user.generate(PROMPTS["english"], short, raw=True)) == before
    finally:
        victim.signal(signal.SIGCONT)


async def until_found(client: SwarmClient, peer: str) -> None:
    async with asyncio.timeout(20.0):
        while peer not in {r.peer for r in await client.connection.find(client.model.model_id)}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
