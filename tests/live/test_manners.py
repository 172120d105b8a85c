"""A node as a guest on its operator's machine: paused, resumed, bounded in memory, and killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from fusion_node.client.connection import MeasuredNode
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.daemon.control import NodeState, PauseRequest, Phase, ask_nodes, known_peers
from fusion_node.errors import FusionError
from fusion_node.store import StoredModel
from tests.live.swarm_process import MODEL, NodeProcess, run_cli

pytestmark = [pytest.mark.live, pytest.mark.asyncio(loop_scope="module")]

MAX_RAM_MIB = 1050
"""The program takes 410 MiB, its working memory 128 MiB, and the weights 405 MiB."""

PROMPT = "The lighthouse keeper had not spoken to anyone for eleven weeks when the marmalade boat arrived. " * 12


@pytest.fixture(scope="module")
def home(test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the models of the test store and no nodes but ours. Its path is too long for a socket."""
    home = tmp_path_factory.mktemp("home") / ("long" * 10)
    home.mkdir()
    (home / "models").symlink_to(test_home / "models")
    return home


@pytest.fixture(scope="module")
def node(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("node")
    options = ["--max-ram", f"{MAX_RAM_MIB}MiB"]
    # Fresh: its memory and the steps of its start are what is looked at.
    node = NodeProcess.start("0:30", folder=folder, home=home, options=options, fresh=True)
    try:
        yield node
    finally:
        node.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(home: Path, node: NodeProcess) -> AsyncIterator[SwarmClient]:
    node.wait_ready()
    async with SwarmClient(MODEL, peers=node.addresses, home=home, mdns=False, threads=1) as swarm:
        yield swarm


async def answer(client: SwarmClient, prompt: str = "Hello", max_tokens: int = 4) -> str:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return await client.generate(prompt, params, raw=True).text()


async def command(home: Path, name: str, *, at_once: bool = False) -> NodeState:
    (told,) = await ask_nodes(home / "run", known_peers(home / "run"), name, PauseRequest(at_once=at_once))
    assert told.reply is not None, told.problem
    return told.reply.state


async def test_node_tells_how_far_it_is_until_it_is_ready(home: Path, node: NodeProcess) -> None:
    seen: list[tuple[Phase, int]] = []
    async with asyncio.timeout(90.0):
        while not seen or seen[-1][0] is not Phase.READY:
            assert node.is_running, node.log
            if known_peers(home / "run"):
                state = await command(home, "state")
                seen.append((state.phase, state.loaded_percent or 0))
            await asyncio.sleep(0.02)
    phases = [phase for phase, _ in seen]
    assert phases == sorted(phases, key=list(Phase).index)
    assert phases[0] is Phase.STARTING
    assert {Phase.LOADING, Phase.WARMING_UP} & set(phases)
    assert [percent for _, percent in seen] == sorted(percent for _, percent in seen)
    assert seen[-1][1] == 100


async def test_memory_of_a_node_that_serves_stays_below_its_bound(
    client: SwarmClient, home: Path, node: NodeProcess
) -> None:
    # Each begins differently, so that none takes over another's KV.
    await asyncio.gather(*(answer(client, f"{number} {PROMPT}", 16) for number in range(3)))
    process = psutil.Process(node.process.pid)
    state = await command(home, "state")
    assert state.memory_bytes == pytest.approx(process.memory_info().rss, rel=0.05)
    highest = highest_memory_bytes(process.pid)
    assert process.memory_info().rss <= highest <= MAX_RAM_MIB * 2**20
    assert node.events("more memory is used than allowed") == []
    assert state.num_rows > 3 * 200
    assert 0 < state.kv_budget_bytes <= (MAX_RAM_MIB - 410 - 405) * 2**20


async def test_paused_node_is_no_part_of_the_swarm_until_it_is_resumed(
    client: SwarmClient, home: Path, node: NodeProcess
) -> None:
    before = await answer(client)
    paused = await asyncio.to_thread(run_cli, "pause", home=home)
    assert (paused.returncode, paused.stdout) == (0, f"…{node.peer[-8:]} paused\n")
    generate = ("generate", MODEL, "Hello", "--no-mdns", "--peer", node.addresses[0])
    join = ("join", MODEL, "--layers", "0:30", "--max-ram", "600", "--no-mdns", "--identity", str(home / "other.key"))
    refused, too_large, shown = await asyncio.gather(
        *(asyncio.to_thread(run_cli, *line, home=home) for line in (generate, join, ("status", "--local")))
    )
    assert shown.returncode == 0
    assert "paused" in shown.stdout
    assert refused.returncode == 7
    assert "no usable node serves layers 0:30" in refused.stderr
    assert too_large.returncode == 9
    assert "layers 0:30 need 405 MiB and KV at least 11 MiB; --max-ram 600 MiB leaves" in too_large.stderr
    assert (await command(home, "state")).phase is Phase.PAUSED
    resumed = await asyncio.to_thread(run_cli, "resume", node.peer[-6:], home=home)
    assert (resumed.returncode, resumed.stdout) == (0, f"…{node.peer[-8:]} serves again\n")
    assert await answer(client) == before


async def test_user_who_knows_the_node_is_refused_with_its_reason(client: SwarmClient, home: Path) -> None:
    await answer(client)
    nodes = await client.connection.measure(await client.connection.find(client.model.model_id))
    await command(home, "pause")
    asking = asyncio.create_task(answer(client))
    async with asyncio.timeout(20.0):
        (status,) = await counters_when(client, nodes, "refused.paused")
    assert status["refused.paused"] == 1
    assert status["kv_free_positions"] == 0
    # Who waits for a route has it as soon as the node serves again.
    await command(home, "resume")
    assert await asking


async def test_pause_now_ends_a_running_answer_with_the_reason(client: SwarmClient, home: Path) -> None:
    params = SamplingParams(max_tokens=600, ignore_eos=True)
    with pytest.raises(FusionError, match="paused by its operator"):  # and nobody else serves its layers
        async with asyncio.timeout(60.0):
            generation = client.generate("Once upon a time", params, raw=True)
            async for _ in generation:
                if generation.stats.completion_tokens == 3:
                    assert (await command(home, "pause")).num_sessions == 1
                if generation.stats.completion_tokens == 6:
                    assert (await command(home, "pause", at_once=True)).num_sessions == 0
    assert (await command(home, "resume")).phase is Phase.READY
    assert await answer(client)


async def test_killed_node_is_not_taken_for_one_that_runs(client: SwarmClient, home: Path, node: NodeProcess) -> None:
    assert known_peers(home / "run") == [node.peer]
    node.signal(signal.SIGKILL)
    node.wait(10.0)
    paused = await asyncio.to_thread(run_cli, "pause", home=home)
    assert paused.returncode == 13
    assert "no node of this home runs on this machine" in paused.stderr
    assert known_peers(home / "run") == []


def highest_memory_bytes(pid: int) -> int:
    """The most that was ever resident (proc_pid_status(5))."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


async def counters_when(client: SwarmClient, nodes: list[MeasuredNode], name: str) -> list[dict[str, float]]:
    """The counters of these nodes, once all have one of that name."""
    while True:
        counters = [await client.connection.status_of(node) for node in nodes]
        if counters and all(name in each for each in counters):
            return counters
        await asyncio.sleep(0.05)
