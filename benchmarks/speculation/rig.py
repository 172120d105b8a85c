"""Real node processes of the built-in model behind emulated links, a user per mode, and what is measured of them.

Every pair of processes, the user's and those of three nodes, has the same round trip (p2p.link_emulation): each delays
what it sends by half of it. Modes share one connection and nothing else, so that none learns from another's answers;
what a mode has learnt from its own earlier answers it keeps, as a program that goes on running does.

All processes share this machine's cores. While a tree is under way all stages compute at once, beside the drafter and
the LM head: on two cores they slow one another down, which machines of their own would not.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.speculation.measured import Answered, Asked
from fusion_node import ModelStore, SamplingParams, SwarmClient
from fusion_node.cli.local_swarm import LocalSwarm, split_evenly
from fusion_node.client.connection import SwarmConnection
from fusion_node.client.drafting import Candidate, SharedNoise
from fusion_node.client.speculation import AnswerDrafts, Drafts
from fusion_node.client.swarm import NO_DRAFT
from fusion_node.engine.drafts import Verified
from fusion_node.errors import NoRoute
from fusion_node.types import PeerId
from p2p.link_emulation_core import LineShape
from p2p.messages import AnyMessage, Step, StepResult

MODEL = "smollm2-135m"
NUM_STAGES = 3
WARM_UP = "Which day comes after Tuesday? Say it in one sentence."
WARM_UP_TOKENS = 8

REACHED_WITHIN_S = 90.0
"""For nodes to answer their first ping; on a machine that does much else they begin slowly."""

SURVEYED_WITHIN_S = 45.0
"""For nodes to have measured their round trips to one another; the plan is taken as it is then."""


class OtherLoad:
    """How many cores others use, this process and its children left out."""

    def __init__(self) -> None:
        self._since, self._ours, self._all = time.monotonic(), _own_cpu_s(), _whole_cpu_s()

    def cores(self) -> float:
        """On average since this object was made. Children that ended meanwhile count as others."""
        elapsed = time.monotonic() - self._since
        return max(0.0, (_whole_cpu_s() - self._all) - (_own_cpu_s() - self._ours)) / max(elapsed, 1e-3)


def _own_cpu_s() -> float:
    us = psutil.Process()
    seconds = 0.0
    for process in (us, *us.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return seconds


def _whole_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


@dataclass(slots=True)
class Noted:
    """What was seen of one answer beside its text.

    Attributes:
        asked: what drafters answered.
        drafts: paths of each batch that they were asked for, and the seconds until the answer was there.
        choices: seconds that choosing each token took.
        passes: per frame, rows that were sent and the seconds of a pass at each stage.
    """

    asked: list[Asked] = field(default_factory=list)
    drafts: list[tuple[int, float]] = field(default_factory=list)
    choices: list[float] = field(default_factory=list)
    passes: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)


class WatchedConnection(SwarmConnection):
    """Tells how long stages took for frames of how many rows."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.noted = Noted()
        self._rows: dict[tuple[bytes, int], int] = {}
        send = self.links.send

        def watched(peer: PeerId, message: AnyMessage, payload: Any = b"") -> None:
            if isinstance(message, Step):
                self._rows[message.session, message.sequence] = message.tensor.num_rows
            send(peer, message, payload)

        self.links.send = watched  # type: ignore[method-assign]

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if isinstance(message, StepResult):
            rows = self._rows.pop((message.session, message.sequence), None)
            if rows is not None:
                self.noted.passes.append((rows, tuple(each.compute_us / 1e6 for each in message.timings)))
        super()._on_frame(peer, message, payload)


class WatchedClient(SwarmClient):
    """Tells what its drafters say and how long they and the LM head take."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.noted = Noted()
        if self._drafts is not None:
            self._drafts = _WatchedDrafts(self._vocabulary, lambda: self.noted, remembers=self._prefixes is not None)
        observe = self._router.observe_user_step

        def observed(seconds: float) -> None:
            self.noted.choices.append(seconds)
            observe(seconds)

        self._router.observe_user_step = observed  # type: ignore[method-assign]


class _WatchedDrafts(Drafts):
    def __init__(self, vocabulary: int, noted: Callable[[], Noted], *, remembers: bool) -> None:
        super().__init__(vocabulary, remembers=remembers)
        self._noted = noted

    def begin(self, prompt: Sequence[int], noise: SharedNoise | None, num_positions: int) -> AnswerDrafts:
        answer = super().begin(prompt, noise, num_positions)
        return cast("AnswerDrafts", _WatchedAnswer(answer, self._noted()))


class _WatchedAnswer:
    def __init__(self, drafts: AnswerDrafts, noted: Noted) -> None:
        self._drafts = drafts
        self._noted = noted
        self._num_tokens = 0

    def extend(self, verified: Verified) -> None:
        self._num_tokens += len(verified.tokens)
        self._drafts.extend(verified)

    def propose(self, paths: Sequence[Sequence[int]], width: int) -> _WatchedProposed:
        # Submitted now: what is committed before it is awaited is not the text that the paths go on from.
        return _WatchedProposed(self._drafts.propose(paths, width), self._noted, self._num_tokens, paths)

    def close(self) -> None:
        self._drafts.close()


class _WatchedProposed:
    def __init__(
        self,
        proposed: Awaitable[list[list[Candidate]] | None],
        noted: Noted,
        num_tokens: int,
        paths: Sequence[Sequence[int]],
    ) -> None:
        self._proposed = proposed
        self._noted = noted
        self._num_tokens = num_tokens
        self._paths = [tuple(path) for path in paths]
        self._began = time.perf_counter()

    def __await__(self) -> Generator[Any, None, list[list[Candidate]] | None]:
        found = yield from self._proposed.__await__()
        self._noted.drafts.append((len(self._paths), time.perf_counter() - self._began))
        for path, candidates in zip(self._paths, found or (), strict=False):
            guessed = tuple((candidate.token, candidate.probability) for candidate in candidates)
            self._noted.asked.append(Asked(self._num_tokens, path, guessed))
        return found


class Swarm:
    """Three nodes, a user of each mode, and the plan of an answer.

    Attributes:
        plan: as ``fusion-node plan`` tells it to the user of plain decode.
        round_trips_ms: between the user and each node, the least that was measured.
        noted: by mode, of all answers together but warm-ups.
        num_prompt: by prompt, its tokens.
        prompt_ids: by prompt, what answers go on from.
    """

    def __init__(self, connection: WatchedConnection, clients: dict[str, WatchedClient]) -> None:
        self._connection = connection
        self._clients = clients
        self.plan: Any = None
        self.round_trips_ms: tuple[float, ...] = ()
        self.noted: dict[str, list[Noted]] = defaultdict(list)
        self.num_prompt: dict[int, int] = {}
        self.prompt_ids: dict[int, tuple[int, ...]] = {}

    async def warm_up(self) -> None:
        """Opens links and wakes up nodes; then waits for what the planner needs."""
        client = self._clients["plain"]
        length = len(await client.encode(WARM_UP))
        deadline = time.monotonic() + REACHED_WITHIN_S
        while True:
            try:
                await client.find_route(length + WARM_UP_TOKENS)
                break
            except NoRoute:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1.0)
        for each in self._clients.values():
            await each.generate(WARM_UP, SamplingParams(max_tokens=WARM_UP_TOKENS)).text()
        deadline = time.monotonic() + SURVEYED_WITHIN_S
        while True:
            self.plan = await client.plan(prompt_tokens=length, max_tokens=64)
            if self.plan.legs and all(leg.source in ("measured", "announced") for leg in self.plan.legs):
                return
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(1.0)

    async def answer(self, mode: str, number: int, prompt: str, max_tokens: int) -> Answered:
        """One prompt in one mode, greedily."""
        client = self._clients[mode]
        client.noted = self._connection.noted = noted = Noted()
        generation = client.generate(prompt, SamplingParams(max_tokens=max_tokens))
        await generation.text()
        self.noted[mode].append(noted)
        stats = generation.stats
        self.num_prompt[number] = stats.prompt_tokens
        if number not in self.prompt_ids:
            self.prompt_ids[number] = tuple(await client.encode(prompt))
        now_ms = [1000 * stage.round_trip_s for stage in stats.stages]
        self.round_trips_ms = tuple(map(min, self.round_trips_ms or now_ms, now_ms))
        told = stats.speculation
        return Answered(
            number,
            tuple(stats.token_ids),
            decode_s=stats.decode_s,
            first_token_s=stats.time_to_first_token_s or float("nan"),
            rows_per_token=told.rows_per_token if told is not None else 1.0,
            ended_in=told.mode if told is not None else "plain",
        )


@asynccontextmanager
async def swarm_of(
    round_trip_ms: float,
    modes: Sequence[str],
    *,
    draft: Path | None = None,
    remembers: bool = True,
    numerics: str = "fp32",
) -> AsyncIterator[Swarm]:
    """Starts three nodes of ten layers each, and a user per mode, who has been in no swarm before.

    Args:
        modes: of ``--speculate``, and "plain".
        draft: folder of a draft head, for the modes that guess; None: none, not even the one that is shipped.
        remembers: whether a mode's answers learn from its earlier ones.
        numerics: class of nodes and users.
    """
    store = ModelStore()
    stored = store.pull(MODEL)
    line = LineShape(rtt_ms=round_trip_ms) if round_trip_ms else None
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home = folder / "home"
        home.mkdir()
        (home / "models").symlink_to(store.home / "models")
        nodes = await stack.enter_async_context(
            LocalSwarm(MODEL, folder=folder, home=home, threads=1, numerics=numerics, line=line)
        )
        await nodes.start(split_evenly(stored.num_layers, NUM_STAGES))
        await nodes.wait_ready()
        connection = await stack.enter_async_context(
            WatchedConnection(nodes.nodes[0].addresses, mdns=False, emulated_line=line)
        )
        clients: dict[str, WatchedClient] = {}
        for mode in modes:
            speculates = mode != "plain"
            client = clients[mode] = await stack.enter_async_context(
                WatchedClient(
                    MODEL,
                    home=home,
                    mdns=False,
                    threads=1,
                    numerics=numerics,
                    prefix_cache=remembers,
                    connection=connection,
                    speculation=mode if speculates else "off",
                    draft_model=str(draft) if draft is not None and speculates else NO_DRAFT,
                )
            )
            await client.wait_loaded()  # one after the other: while heads are loaded, this process hardly answers
        swarm = Swarm(connection, clients)
        await swarm.warm_up()
        yield swarm
