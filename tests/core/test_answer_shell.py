"""The shell around an answer: whatever goes wrong, whoever waits for a row is told, and what was kept is known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fusion_node.client.answer import AnswerShell, EncodedRows, Found
from fusion_node.client.answer_core import AnswerCore, AnswerEvent, Place, StepDone, WantsAlternates, WantsRoute
from fusion_node.client.drafting import Candidate
from fusion_node.client.speculation_core import SpeculationCore
from fusion_node.client.speculative_answer import MAX_UNREAD, Chosen, ReturnedRow, SpeculativeShell
from fusion_node.engine.drafts import Verified
from fusion_node.errors import FusionError, LocalProtocolError, NoRoute, PeerClosed
from fusion_node.types import MonotonicS, PeerId
from p2p.compression import Packed
from p2p.identity import Identity
from p2p.messages import (
    AnyMessage,
    CloseSession,
    OpenSession,
    SessionOpened,
    StageTiming,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import PROTOCOL_VERSION, Plan, PlanStage
from scheduler.ownership import OwnershipBreach
from scheduler.speculation import Mode, ModePolicy

NODE, OTHER = (Identity.from_seed(seed * 32).peer_id for seed in (b"n", b"o"))
PLACE = Place(PlanStage(NODE, 0, 2, ("there",)))
ROWS = (TensorMeta("f32", 1, 2), memoryview(b"12345678"))


class Core(AnswerCore):
    """With faults where a test wants them."""

    fails_in: str = ""

    def receive(self, message: AnyMessage, *, source: PeerId, now: MonotonicS) -> None:
        self._fail_in("message")
        super().receive(message, source=source, now=now)

    def link_closed(self, peer: PeerId, error: FusionError, *, now: MonotonicS) -> None:
        self._fail_in("lost link")
        super().link_closed(peer, error, now=now)

    def get_timer(self) -> MonotonicS | None:
        return MonotonicS(0.0) if self.fails_in == "timer" and not self._is_over else super().get_timer()

    def handle_timer(self, *, now: MonotonicS) -> None:
        self._fail_in("timer")
        super().handle_timer(now=now)

    def next_event(self) -> AnswerEvent | None:
        event = super().next_event()
        if isinstance(event, StepDone):
            self._fail_in("event")
        return event

    def _fail_in(self, where: str) -> None:
        if self.fails_in == where:
            raise KeyError(where)


@dataclass
class OneNode:
    """A connection to one node, which is the whole route, and a router that knows it."""

    is_there: bool = True
    sent: list[AnyMessage] = field(default_factory=list)
    has_sent: asyncio.Event = field(default_factory=asyncio.Event)
    on_message: Callable[[PeerId, AnyMessage, memoryview], None] = field(init=False)
    on_lost: Callable[[PeerId | None, FusionError], None] = field(init=False)
    session: bytes = b""

    @property
    def links(self) -> OneNode:
        return self

    @property
    def compressor(self) -> OneNode:
        return self

    def choose(self, peer: PeerId, *rows: object) -> None:
        return None

    def is_connected(self, peer: PeerId) -> bool:
        return True

    def register(self, session: bytes, on_message: Any, on_lost: Any) -> None:
        self.session, self.on_message, self.on_lost = session, on_message, on_lost

    def unregister(self, session: bytes) -> None:
        self.session = b""

    def send(self, peer: PeerId, message: AnyMessage, payload: object = b"") -> None:
        self.sent.append(message)
        self.has_sent.set()
        match message:
            case OpenSession():
                opened = SessionOpened(message.session, message.epoch, message.stage, 120.0)
                asyncio.get_running_loop().call_soon(self.on_message, NODE, opened, memoryview(b""))

    def answer(self) -> None:
        step = next(each for each in reversed(self.sent) if isinstance(each, Step))
        result = StepResult(step.session, step.epoch, step.sequence, step.want, ROWS[0], (StageTiming(1, 1),))
        self.on_message(NODE, result, ROWS[1])

    async def until_sent(self, kind: type[AnyMessage], count: int = 1) -> None:
        async with asyncio.timeout(10.0):
            while sum(isinstance(each, kind) for each in self.sent) < count:
                self.has_sent.clear()
                await self.has_sent.wait()

    async def find(self, wants: WantsRoute, present: tuple[Place, ...]) -> Found:
        if not self.is_there:
            raise NoRoute("nobody is there")
        return Found((PLACE,))

    async def alternates(self, wants: WantsAlternates, present: tuple[Place, ...]) -> tuple[tuple[Place, ...], ...]:
        return ((),)

    def is_revoked(self, peer: PeerId) -> bool:
        return False

    def breaches(self, places: Sequence[Place]) -> tuple[OwnershipBreach, ...]:
        return ()


def shell_with(node: OneNode) -> tuple[AnswerShell, Core]:
    def plan_of(session: bytes, epoch: int, stages: tuple[PlanStage, ...]) -> tuple[Plan, bytes]:
        user = Identity.from_seed(b"u" * 32).peer_id
        return Plan(PROTOCOL_VERSION, user, session, epoch, "ab" * 32, "fp32", 16, 0.0, 1.0, stages), b""

    async def embed(start: int, stop: int) -> EncodedRows:
        return ROWS

    async def on_compute(work: Callable[[], Packed]) -> Packed:
        return work()

    core = Core(
        num_prompt=1,
        row_size=2,
        wire_dtype="f32",
        make_plan=plan_of,
        new_session=lambda: b"s" * 16,
        patience_s=0.0,
    )
    shell = AnswerShell(node, core, node, embed=embed, on_compute=on_compute, on_event=lambda event: None)  # type: ignore[arg-type]
    return shell, core


class Guesses:
    """Drafts 7 for everything, and chooses what it is told to."""

    def __init__(self) -> None:
        self.chosen: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_asked = asyncio.Event()

    async def choose(self, position: int, row: ReturnedRow, ahead: Sequence[ReturnedRow]) -> Chosen:
        self.is_asked.set()
        return Chosen(Verified([await self.chosen]))

    def extend(self, verified: Verified) -> None:
        pass

    async def propose(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]] | None:
        return [[Candidate(7, 0.9, "x")] for _ in paths]


def speculating_with(node: OneNode, mode: Mode = Mode.TREE, stop_position: int = 9) -> tuple[SpeculativeShell, Guesses]:
    plain, _ = shell_with(node)
    speculation = SpeculationCore(
        last_token=1,
        num_prompt=1,
        stop_position=stop_position,
        stop_tokens=frozenset(),
        max_positions=stop_position + 7,
        next_sequence=0,
        policy=ModePolicy((mode,)),
    )
    core, guesses = (
        Core(
            num_prompt=1,
            row_size=2,
            wire_dtype="f32",
            make_plan=plain.core._make_plan,
            new_session=lambda: b"s" * 16,
            patience_s=0.0,
            speculation=speculation,
        ),
        Guesses(),
    )
    shell = SpeculativeShell(
        node,
        core,
        node,
        embed=plain._embed,
        on_compute=plain._on_compute,
        on_event=lambda event: None,
        speculation=speculation,
        chooser=guesses,
        drafting=guesses,
        embed_tokens=lambda tokens: (TensorMeta("f32", len(tokens), 2), memoryview(b"12345678" * len(tokens))),
        on_commit=lambda token: None,
    )
    return shell, guesses


@pytest.mark.parametrize("fault", ["choice", "no route"])
async def test_speculation_of_an_answer_that_has_ended_stands_still_though_nobody_has_left_it(fault: str) -> None:
    node = OneNode()
    shell, guesses = speculating_with(node)
    async with asyncio.timeout(10.0), shell:
        await node.until_sent(Step)
        node.answer()
        await guesses.is_asked.wait()
        if fault == "choice":
            guesses.chosen.set_exception(KeyError("a bug"))
        else:
            node.is_there = False
            node.on_lost(NODE, PeerClosed(NODE, "gone"))
        with pytest.raises(KeyError if fault == "choice" else NoRoute):
            await shell.next_token()
        assert shell.speculation.is_over
        if fault == "no route":
            guesses.chosen.set_result(7)
            await asyncio.gather(*shell._tasks, return_exceptions=True)
        assert shell.speculation.get_timer() is None
        assert shell.speculation.stats.num_tokens == 0


@pytest.mark.parametrize("where", ["timer", "message", "lost link", "event"])
async def test_fault_of_our_own_ends_the_answer_with_it_and_nobody_else(where: str) -> None:
    node = OneNode()
    shell, core = shell_with(node)
    async with asyncio.timeout(10.0), shell:
        await node.until_sent(Step)
        core.fails_in = where
        if where == "timer":
            shell.append(1, ROWS)  # which has the timer set anew
        elif where == "lost link":
            node.on_lost(NODE, PeerClosed(NODE, "gone"))  # must not raise: the link pool has done nothing wrong
        else:
            node.answer()
        with pytest.raises(KeyError, match=where):
            await shell.next_row()
        assert isinstance(node.sent[-1], CloseSession)
    assert not node.session


async def test_foreign_link_that_ends_with_an_error_of_ours_concerns_nobody_else() -> None:
    node = OneNode()
    shell, _ = shell_with(node)
    async with asyncio.timeout(10.0), shell:
        await node.until_sent(Step)
        node.on_lost(OTHER, LocalProtocolError("a frame that must not be sent"))
        node.answer()
        await shell.next_row()
        node.on_lost(NODE, LocalProtocolError("a frame that must not be sent"))
        with pytest.raises(LocalProtocolError):
            await shell.next_row()


async def test_reader_who_is_slow_holds_the_speculation_up() -> None:
    node = OneNode()
    shell, guesses = speculating_with(node, Mode.PLAIN, 2 * MAX_UNREAD)
    guesses.chosen.set_result(7)
    async with asyncio.timeout(10.0), shell:
        for count in range(MAX_UNREAD + 1):
            await node.until_sent(Step, count + 1)
            node.answer()
        for _ in range(50):
            await asyncio.sleep(0)
        assert sum(isinstance(each, Step) for each in node.sent) == MAX_UNREAD + 1
        assert await shell.next_token() == 7
        await node.until_sent(Step, MAX_UNREAD + 2)


async def test_session_is_kept_only_when_it_was_whole_at_the_end() -> None:
    for is_whole in (True, False):
        node = OneNode()
        shell, _ = shell_with(node)
        shell.retain = True
        async with asyncio.timeout(10.0), shell:
            await node.until_sent(Step)
            node.answer()
            await shell.next_row()
            if not is_whole:
                node.is_there = False
                node.on_lost(NODE, PeerClosed(NODE, "gone"))
        assert shell.is_kept is is_whole
        closed = [each for each in node.sent if isinstance(each, CloseSession)]
        assert all(each.retain is is_whole for each in closed)


async def test_session_of_an_answer_that_ended_with_an_error_is_not_kept() -> None:
    node = OneNode()
    shell, _ = shell_with(node)
    shell.retain = True
    with pytest.raises(NoRoute):
        async with asyncio.timeout(10.0), shell:
            await node.until_sent(Step)
            node.is_there = False
            node.on_lost(NODE, PeerClosed(NODE, "gone"))
            await shell.next_row()
    assert not shell.is_kept


async def test_what_was_registered_is_taken_back_though_the_core_fails_at_the_end() -> None:
    node = OneNode()
    shell, core = shell_with(node)
    with pytest.raises(KeyError):
        async with asyncio.timeout(10.0), shell:
            await node.until_sent(Step)

            def close(*, retain: bool, now: MonotonicS) -> None:
                raise KeyError("close")

            core.close = close  # type: ignore[method-assign]
    assert not node.session
