"""Real node processes of the built-in model behind emulated links: a pipeline and a fusion group of as many nodes.

Both are in one swarm, so that what is measured of one and of the other is measured in turns, of nodes that have been up
for as long. Every pair of processes, the user's included, has the same round trip (p2p.link_emulation). All share this
machine's cores: a pipeline's nodes compute one after another and a group's at once, so that a group of more members
than there are cores waits for cores that machines of its own would have.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fusion_node import ModelStore, SamplingParams, SwarmClient
from fusion_node.cli.local_swarm import LocalSwarm, split_evenly
from fusion_node.client.connection import SwarmConnection
from fusion_node.errors import NoRoute
from fusion_node.types import LayerRange, PeerId
from p2p.link_emulation_core import LineShape
from p2p.messages import AnyMessage, Step, StepResult
from p2p.records import digest_key_of

MODEL = "smollm2-135m"
PIPELINE, FUSION = "pipeline", "fusion"
TOPOLOGIES = (PIPELINE, FUSION)

REACHED_WITHIN_S = 90.0
"""For nodes to answer their first ping; on a machine that does much else they begin slowly."""

SURVEYED_WITHIN_S = 60.0
"""For nodes to have measured their round trips to one another; the plan is taken as it is then."""

WORDS = ("one", "two", "three", "four", "five", "six", "seven")
WARM_UP = "Which day comes after Tuesday? Say it in one sentence."


@dataclass(slots=True)
class Answered:
    """One answer.

    Attributes:
        rows_s: from the first step of the prompt until the last result of what was asked for.
        decode_s: of the tokens after the first.
        cpu_s: of the nodes of the topology, for the whole answer.
        user_cpu_s: of this process.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    rows_s: float
    decode_s: float
    cpu_s: float
    user_cpu_s: float

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.decode_s / (len(self.tokens) - 1)


class WatchedConnection(SwarmConnection):
    """Tells when the first step of an answer was sent, and when the last result came."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.sent_at = self.came_at = 0.0
        send = self.links.send

        def watched(peer: PeerId, message: AnyMessage, payload: Any = b"") -> None:
            if isinstance(message, Step) and not self.sent_at:
                self.sent_at = time.perf_counter()
            send(peer, message, payload)

        self.links.send = watched  # type: ignore[method-assign]

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, StepResult):
            self.came_at = time.perf_counter()
        super()._on_frame(peer, message, payload)


class Swarm:
    """As many nodes of each topology, and a user of each.

    Attributes:
        plans: by topology, as ``fusion-node plan`` tells it before the first answer that is measured.
    """

    def __init__(
        self, connection: WatchedConnection, clients: dict[str, SwarmClient], nodes: LocalSwarm, num_nodes: int
    ) -> None:
        self._connection = connection
        self._clients = clients
        pids = [node.process.pid for node in nodes.nodes]
        self._processes = {
            PIPELINE: [psutil.Process(pid) for pid in pids[:num_nodes]],
            FUSION: [psutil.Process(pid) for pid in pids[num_nodes:]],
        }
        self._members = [node.peer for node in nodes.nodes[num_nodes:]]
        self.plans: dict[str, Any] = {}

    async def warm_up(self, max_tokens: int) -> None:
        """Opens links and wakes nodes up; then waits for what the planner needs."""
        for client in self._clients.values():
            length = len(await client.encode(WARM_UP))
            deadline = time.monotonic() + REACHED_WITHIN_S
            while True:
                plan = await client.plan(prompt_tokens=length, max_tokens=max_tokens)
                if plan.stages:
                    break
                if time.monotonic() > deadline:
                    raise NoRoute(plan.problem)
                await asyncio.sleep(1.0)
        deadline = time.monotonic() + SURVEYED_WITHIN_S
        while not await self._is_surveyed() and time.monotonic() < deadline:  # noqa: ASYNC110 - others announce it
            await asyncio.sleep(1.0)
        for topology, client in self._clients.items():
            await client.generate(WARM_UP, SamplingParams(max_tokens=2)).text()
            self.plans[topology] = await client.plan(prompt_tokens=length, max_tokens=max_tokens)

    async def _is_surveyed(self) -> bool:
        """Whether every member has told how far every other one is."""
        client = self._clients[FUSION]
        records = await client.connection.find(client.model.model_id)
        told = {record.peer: {trip.peer_digest for trip in record.round_trips} for record in records}
        wanted = {peer: digest_key_of(peer).to_bytes(8, "little") for peer in self._members}
        return all(
            wanted[other] in told.get(one, ()) or wanted[one] in told.get(other, ())
            for one in self._members
            for other in self._members
            if one != other
        )

    async def prompt_of(self, num_tokens: int) -> str:
        """Text of exactly so many tokens."""
        client = self._clients[PIPELINE]
        for number in range(1, 2 * num_tokens):
            prompt = " ".join(WORDS[index % len(WORDS)] for index in range(number))
            if len(await client.encode(prompt, raw=True)) == num_tokens:
                return prompt
        raise RuntimeError(f"no text of {num_tokens} tokens")

    async def answer(self, topology: str, prompt: str, max_tokens: int) -> Answered:
        """Exactly ``max_tokens`` tokens, greedily, behind the prompt as it is."""
        connection = self._connection
        connection.sent_at = 0.0
        cpu_s, user_cpu_s = self._cpu_s(topology), time.process_time()
        generation = self._clients[topology].generate(
            prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), raw=True
        )
        await generation.text()
        stats = generation.stats
        return Answered(
            tuple(stats.token_ids),
            stats.prompt_tokens,
            rows_s=connection.came_at - connection.sent_at,
            decode_s=stats.decode_s,
            cpu_s=self._cpu_s(topology) - cpu_s,
            user_cpu_s=time.process_time() - user_cpu_s,
        )

    def _cpu_s(self, topology: str) -> float:
        times = [process.cpu_times() for process in self._processes[topology]]
        return sum(each.user + each.system for each in times)


@asynccontextmanager
async def swarm_of(round_trip_ms: float, num_nodes: int, max_tokens: int) -> AsyncIterator[Swarm]:
    """Starts the nodes and the users, who have been in no swarm before."""
    store = ModelStore()
    stored = store.pull(MODEL)
    line = LineShape(rtt_ms=round_trip_ms) if round_trip_ms else None
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = folder / "home"
        home.mkdir()
        (home / "models").symlink_to(store.home / "models")
        nodes = await stack.enter_async_context(
            LocalSwarm(MODEL, folder=folder, home=home, threads=1, numerics="fp32", line=line)
        )
        whole = LayerRange(0, stored.num_layers)
        await nodes.start(
            [*split_evenly(stored.num_layers, num_nodes), *[whole] * num_nodes],
            slices=[f"{index}/{num_nodes}" for index in range(num_nodes)],
            is_in_turn=True,  # elsewhere, no node measures its speed while others of this machine begin
        )
        await nodes.wait_ready()
        connection = await stack.enter_async_context(
            WatchedConnection(nodes.nodes[0].addresses, mdns=False, emulated_line=line)
        )
        clients: dict[str, SwarmClient] = {}
        for topology in TOPOLOGIES:
            client = clients[topology] = await stack.enter_async_context(
                SwarmClient(
                    MODEL,
                    home=home,
                    mdns=False,
                    threads=1,
                    prefix_cache=False,
                    connection=connection,
                    topology=topology,
                    members=num_nodes if topology == FUSION else None,
                )
            )
            await client.wait_loaded()  # one after the other: while heads are loaded, this process hardly answers
        swarm = Swarm(connection, clients, nodes, num_nodes)
        await swarm.warm_up(max_tokens)
        yield swarm
