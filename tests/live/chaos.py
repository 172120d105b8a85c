"""What tests of repair need: nodes behind proxies, a user whose frames are watched, faults, and the moments for them.

A moment is never a time: it is a frame that the user's side sends or takes (WatchedConnection), or so many bytes of a
step that are on their way between two stages and held there (LinkProxies.hold).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import signal
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_node.client.connection import SwarmConnection
from fusion_node.client.generation import Generation, GenerationStats
from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import SwarmClient
from fusion_node.errors import NoPeers
from fusion_node.types import PeerId
from p2p.messages import AnyMessage, OpenSession, Resend, Step, StepResult
from tests.live.chaos_node import Garbage, become_chaotic
from tests.live.link_proxy import USER, LinkProxies, free_port_pair
from tests.live.swarm_process import MODEL, NodeProcess, fork_of, join_arguments

HOST = "127.0.0.1"

STEP_BYTES = 2048
"""More than pings and acknowledgements on a link, and less than a row of the built-in model (576 values of 4 bytes, or
with int8 two such steps)."""

HANGS_S = 20.0
"""For no fault is there anything to wait for so long. Not a claim about speed."""


class Fault(enum.StrEnum):
    """What befalls a node, or the links of one."""

    KILL = "kill"
    """SIGKILL: its kernel closes its connections."""
    FREEZE = "freeze"
    """SIGSTOP: its connections stay, and nothing comes."""
    RESET = "reset"
    """TCP RST on the links between it and the stage before, and the user; new ones may be made at once."""
    CUT = "cut"
    """The same, and no new ones are let through."""
    GARBAGE = "garbage"
    """It hands on no numbers, of the right shape."""
    LEAVE = "leave"
    """SIGTERM: its operator stops it."""


class Place(enum.StrEnum):
    """In what a stage is when it befalls it."""

    PREFILL = "prefill"
    """Some chunks of the prompt are sent, and none has come back."""
    DECODE = "decode"
    """A token has just been chosen."""
    BETWEEN = "between"
    """A row of a decode step is on its way to the stage, and not there."""


@dataclass
class ChaosNode:
    """A node process, its proxy, and its orders."""

    name: str
    process: NodeProcess
    orders: Path
    is_leaving: bool = False

    @property
    def peer(self) -> PeerId:
        return PeerId(self.process.peer)

    @property
    def layers(self) -> str:
        return self.process.layers

    def signal(self, number: signal.Signals) -> None:
        self.is_leaving |= number is signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            self.process.signal(number)

    def answers_with(self, kind: Garbage | None, *, since: int = 0) -> None:
        """Garbage from the entry ``since`` of every session on; None: honest rows again."""
        if kind is None:
            self.orders.unlink(missing_ok=True)
        else:
            new = self.orders.with_suffix(".new")
            new.write_text(f"{kind.value} {since}")
            new.replace(self.orders)

    @property
    def has_lied(self) -> bool:
        return bool(self.process.events("garbage"))


class ChaosSwarm:
    """Nodes of the built-in model, each behind its proxy."""

    def __init__(self, home: Path, folder: Path, proxies: LinkProxies) -> None:
        self.proxies = proxies
        self.nodes: list[ChaosNode] = []
        self.home = home
        self._folder = folder
        self._num_started = 0
        self._all: list[ChaosNode] = []

    def start(self, *ranges: str, options: Sequence[str] = ()) -> None:
        """Adds a node for each, all at once."""
        new = []
        for layers in ranges:
            new.append(self._start(layers, options))
            if not self.nodes:
                new[0].process.wait_ready()
                self.nodes.append(new[0])
        for node in new:
            node.process.wait_ready()
            if node not in self.nodes:
                self.nodes.append(node)

    def restore(self) -> None:
        """As many honest nodes as there were, none of them hurt, and every link whole."""
        self.proxies.mend()
        for node in self.nodes:
            node.answers_with(None)
            node.signal(signal.SIGCONT)
        for node in self.nodes:
            # Whoever was lied to has banned it; and who leaves is still there for some seconds, but not to be found.
            if node.has_lied or node.is_leaving:
                node.process.end()
        gone = [node for node in self.nodes if not node.process.is_running]
        self.nodes = [node for node in self.nodes if node.process.is_running]
        self.start(*(node.layers for node in gone))

    def shrink_to(self, ranges: Sequence[str]) -> None:
        """Ends what is more than these, and starts what is missing."""
        wanted = list(ranges)
        for node in [node for node in self.nodes if node.process.is_running]:
            if node.layers in wanted:
                wanted.remove(node.layers)
            else:
                node.process.end()
        self.nodes = [node for node in self.nodes if node.process.is_running]
        self.start(*wanted)

    def by_peer(self, peer: str) -> ChaosNode:
        return next(node for node in self.nodes if node.peer == peer)

    def name_of(self, peer: str) -> str:
        """For the proxies."""
        return self.by_peer(peer).name

    @property
    def addresses(self) -> list[str]:
        return [address for node in self.nodes for address in node.process.addresses]

    def end(self) -> None:
        for node in self._all:
            node.process.end()

    def _start(self, layers: str, options: Sequence[str]) -> ChaosNode:
        name = f"node{self._num_started}"
        self._num_started += 1
        folder = self._folder / name
        folder.mkdir(parents=True)
        orders = folder / "orders"
        port = free_port_pair(HOST)
        front = self.proxies.listen_for(name, HOST, port)
        announced = [f"{HOST}:{front}"]
        arguments = join_arguments(
            layers,
            folder=folder,
            peers=self.nodes[0].process.addresses[:1] if self.nodes else (),
            options=(
                "--listen", f"{HOST}:{port}", "--announce", announced[0], "--no-upnp", *options,
            ),
        )  # fmt: skip
        before = functools.partial(become_chaotic, orders, announced)
        process = NodeProcess(layers, folder, fork_of(arguments, home=self.home, folder=folder, before=before))
        self.proxies.is_process(name, process.process.pid)
        node = ChaosNode(name, process, orders)
        self._all.append(node)
        return node


@contextmanager
def chaos_swarm(home: Path, folder: Path) -> Iterator[ChaosSwarm]:
    """A swarm without nodes yet; they are gone when the block is left."""
    with LinkProxies() as proxies:
        swarm = ChaosSwarm(home, folder, proxies)
        try:
            yield swarm
        finally:
            swarm.end()


class WatchedConnection(SwarmConnection):
    """The user's connection, which tells of what it sends and takes before it has any effect here.

    Attributes:
        plans: per session and epoch whom it was opened with, in order of stages.
        last_plan: the newest of them.
        num_steps: that were sent, replays included.
        errors: of what was to be done at a moment.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watches: list[tuple[Callable[[PeerId, AnyMessage, bool], bool], Callable[[], None]]] = []
        self.plans: dict[tuple[bytes, int], dict[int, PeerId]] = {}
        self.last_plan: dict[int, PeerId] = {}
        self.num_steps = 0
        self.errors: list[BaseException] = []
        send = self.links.send

        def watched(peer: PeerId, message: AnyMessage, payload: Any = b"") -> None:
            send(peer, message, payload)
            if isinstance(message, OpenSession):
                self.last_plan = self.plans.setdefault((message.session, message.epoch), {})
                self.last_plan[message.stage] = peer
            self.num_steps += isinstance(message, Step)
            self._tell(peer, message, True)

        self.links.send = watched  # type: ignore[method-assign]

    def when(self, condition: Callable[[PeerId, AnyMessage, bool], bool], do: Callable[[], None]) -> None:
        """Calls ``do`` once, behind the sending of the first frame, or before the taking, that the condition holds of.

        Args:
            condition: of the other side, the message, and whether it is sent.
        """
        self._watches.append((condition, do))

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        self._tell(peer, message, False)
        super()._on_frame(peer, message, payload)

    def _tell(self, peer: PeerId, message: AnyMessage, is_sent: bool) -> None:
        for watch in list(self._watches):
            condition, do = watch
            if condition(peer, message, is_sent):
                self._watches.remove(watch)
                try:
                    do()
                except BaseException as error:  # a fault of the test must not look like one of the connection
                    self.errors.append(error)


def nth_sent(number: int) -> Callable[[PeerId, AnyMessage, bool], bool]:
    """The user has sent its entry of the log with this sequence, in whichever session comes first."""
    return lambda peer, message, is_sent: is_sent and isinstance(message, Step) and message.sequence == number


def nth_result(number: int) -> Callable[[PeerId, AnyMessage, bool], bool]:
    """So many rows have come back since this was asked for, the last of them not yet taken: one for each token."""
    seen = 0

    def condition(peer: PeerId, message: AnyMessage, is_sent: bool) -> bool:
        nonlocal seen
        seen += not is_sent and isinstance(message, StepResult) and bool(message.nodes)
        return seen == number

    return condition


def first_replayed() -> Callable[[PeerId, AnyMessage, bool], bool]:
    """In a plan that replaces another, rows are sent again: the user has sent some, or has had a stage do so."""
    return lambda peer, message, is_sent: is_sent and isinstance(message, Step | Resend) and message.epoch > 0


class TimedIds(list[int]):
    """Token ids, and when each was delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, token: int) -> None:
        self.times.append(time.monotonic())
        super().append(token)


@dataclass
class Outcome:
    """What an answer came to.

    Attributes:
        began: when it was asked for, and times of its tokens, in monotonic seconds.
    """

    tokens: list[int]
    text: str
    stats: GenerationStats
    began: float
    times: list[float] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.began


async def outcome_of(generation: Generation) -> Outcome:
    """The whole answer. Fails when what was delivered is changed afterwards, or is not what is told at the end."""
    began = time.monotonic()
    delivered = generation.stats.token_ids = TimedIds()
    pieces = []
    snapshot: list[int] = []
    async for piece in generation:
        pieces.append(piece)
        now = list(generation.stats.token_ids)
        assert now[: len(snapshot)] == snapshot, "a token that was delivered has changed"
        snapshot = now
    stats = generation.stats
    assert stats.token_ids[: len(snapshot)] == snapshot
    assert len(stats.token_ids) == stats.completion_tokens
    return Outcome(list(stats.token_ids), "".join(pieces), stats, began, delivered.times)


@dataclass
class Hurt:
    """One fault, done at its moment.

    Attributes:
        victim: known when it is done.
        at: when.
    """

    swarm: ChaosSwarm
    connection: WatchedConnection
    fault: Fault
    place: Place
    stage: int
    victim: ChaosNode | None = None
    at: float | None = None

    def arm(self, *, num_chunks: int, token: int = 6) -> None:
        """Does it to the answer that is asked for next.

        Args:
            num_chunks: of its prompt, which is computed in so many entries of the log.
            token: the one that has just come, for the other places.
        """
        if self.fault is Fault.GARBAGE and self.place is not Place.BETWEEN:
            # From this entry on; which node it is, is known once the session is opened.
            since = 1 if self.place is Place.PREFILL else num_chunks + token
            self.connection.when(
                lambda peer, message, is_sent: is_sent and isinstance(message, Step),
                lambda: self._lie(since),
            )
            self.connection.when(nth_sent(since), self._note_time)
            return
        match self.place:
            case Place.PREFILL:
                self.connection.when(nth_sent(min(1, num_chunks - 1)), self._now)
            case Place.DECODE:
                self.connection.when(nth_result(token), self._now)
            case Place.BETWEEN:
                self.connection.when(nth_result(token), self._hold)

    def _peer_of(self, stage: int) -> PeerId | None:
        return self.connection.last_plan.get(stage)

    def _find(self) -> ChaosNode:
        peer = self._peer_of(self.stage)
        assert peer is not None
        self.victim = self.swarm.by_peer(peer)
        return self.victim

    def _before(self) -> str:
        """Who sends to the victim."""
        peer = self._peer_of(self.stage - 1) if self.stage else None
        return USER if peer is None else self.swarm.name_of(peer)

    def _lie(self, since: int) -> None:
        self._find().answers_with(Garbage.NAN, since=since)

    def _note_time(self) -> None:
        """The entry that will be answered with garbage is on its way."""
        self.at = time.monotonic()

    def _hold(self) -> None:
        victim, before = self._find(), self._before()
        proxies = self.swarm.proxies
        if self.fault is Fault.GARBAGE:
            proxies.spoil(before, victim.name, num_bytes=STEP_BYTES)
            self.at = time.monotonic()
            return
        proxies.hold(before, victim.name, num_bytes=STEP_BYTES, then=self._while_held)

    def _while_held(self) -> None:
        """In the thread of the proxies."""
        # What is held goes on afterwards, if there is still a connection for it to go on.
        threading.Thread(target=self._do_and_release, daemon=True).start()

    def _do_and_release(self) -> None:
        assert self.victim is not None
        before = self._before()
        self._do(self.victim, before)
        self.swarm.proxies.release(before, self.victim.name)

    def _now(self) -> None:
        self._do(self._find(), self._before())

    def _do(self, victim: ChaosNode, before: str) -> None:
        self.at = time.monotonic()
        match self.fault:
            case Fault.KILL:
                victim.signal(signal.SIGKILL)
            case Fault.FREEZE:
                victim.signal(signal.SIGSTOP)
            case Fault.LEAVE:
                victim.signal(signal.SIGTERM)
            case Fault.RESET:
                for other in {before, USER}:
                    self.swarm.proxies.reset(other, victim.name)
            case Fault.CUT:
                for other in [USER, *(node.name for node in self.swarm.nodes if node is not victim)]:
                    self.swarm.proxies.cut(other, victim.name)
            case Fault.GARBAGE:
                raise AssertionError("not at a moment, but from an entry on")


# one user, one answer, one fault

PROMPT = " ".join(f"Entry {n}: the heron of ward {n * 7 % 90} saw a boat." for n in range(14))
"""Some 200 tokens, so that each of three stages has several chunks of it to compute."""

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, top_p=0.95, seed=11)


@asynccontextmanager
async def user_of(
    swarm: ChaosSwarm, *, wire: str | None = None, prefix_cache: bool = False
) -> AsyncIterator[tuple[SwarmClient, WatchedConnection]]:
    """Somebody new, who knows all nodes, which are as many and as honest as at first."""
    await asyncio.to_thread(swarm.restore)
    connection = WatchedConnection(swarm.addresses, mdns=False)
    async with (
        connection,
        SwarmClient(
            MODEL, home=swarm.home, mdns=False, threads=1, wire=wire, prefix_cache=prefix_cache, connection=connection
        ) as client,
    ):
        await client.wait_loaded()
        await until_all_known(client, swarm)
        yield client, connection


async def until_all_known(client: SwarmClient, swarm: ChaosSwarm) -> None:
    """Returns when every node of the swarm is found."""
    peers = {node.peer for node in swarm.nodes}
    async with asyncio.timeout(90.0):
        while True:
            with contextlib.suppress(NoPeers):  # yet: a busy machine takes its time, and the client tries on
                if peers <= {each.peer for each in await client.connection.find(client.model.model_id)}:
                    return
            await asyncio.sleep(0.1)


async def answer_of(client: SwarmClient, params: SamplingParams, prompt: str = PROMPT) -> Outcome:
    """A whole answer."""
    async with asyncio.timeout(3 * HANGS_S):
        return await outcome_of(client.generate(prompt, params, raw=True))


@dataclass
class Undisturbed:
    """What is answered when nothing happens; asked for when it is first needed."""

    _known: dict[tuple[bool, str | None], tuple[Outcome, int]] = field(default_factory=dict)

    async def of(
        self, client: SwarmClient, connection: WatchedConnection, params: SamplingParams, wire: str | None = None
    ) -> tuple[Outcome, int]:
        """The answer, and in how many chunks its prompt was computed."""
        key = (params is GREEDY, wire)
        if key not in self._known:
            before = connection.num_steps
            outcome = await answer_of(client, params)
            assert len(outcome.tokens) == NUM_TOKENS
            self._known[key] = outcome, connection.num_steps - before - (NUM_TOKENS - 1)
        return self._known[key]


@dataclass(frozen=True)
class Trial:
    """An answer to which a fault happened.

    Attributes:
        stall_s: from the fault to the next token, or between two tokens after it, whichever is longer; less what it
            takes undisturbed.
        resumed_s: of it, what the client reports, finding out and replay included; 0 when nothing had to be repaired.
    """

    whole: Outcome
    outcome: Outcome
    victim: PeerId
    stall_s: float
    resumed_s: float

    @property
    def is_equal(self) -> bool:
        return self.outcome.tokens == self.whole.tokens and self.outcome.text == self.whole.text

    @property
    def causes(self) -> list[str]:
        return [f"{each.kind}/{each.cause}@{each.stage}" for each in self.outcome.stats.repairs]


async def try_fault(
    swarm: ChaosSwarm, undisturbed: Undisturbed, fault: Fault, place: Place, stage: int, params: SamplingParams = GREEDY
) -> Trial:
    """One answer of a new user, to which one fault happens."""
    async with user_of(swarm) as (client, connection):
        whole, num_chunks = await undisturbed.of(client, connection, params)
        hurt = Hurt(swarm, connection, fault, place, stage)
        hurt.arm(num_chunks=num_chunks)
        outcome = await answer_of(client, params)
        assert not connection.errors, connection.errors
        assert hurt.at is not None, "the moment never came"
        assert hurt.victim is not None
        repair_s = sum(repair.stall_s for repair in outcome.stats.repairs)
        return Trial(whole, outcome, hurt.victim.peer, _stall_s(outcome, hurt.at, whole), repair_s)


def _stall_s(outcome: Outcome, hurt_at: float, whole: Outcome) -> float:
    if hurt_at < outcome.times[0]:
        return max(0.0, outcome.first_token_s - whole.first_token_s)
    after = [at for at in outcome.times if at > hurt_at]
    usual = statistics.median(b - a for a, b in zip(whole.times, whole.times[1:], strict=False))
    return max(0.0, max(b - a for a, b in zip([hurt_at, *after], after, strict=False)) - usual)
