"""Pausing as it is carried out: what the node is told, in which order, and what its operator sees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fusion_node.daemon.control import Phase
from fusion_node.daemon.device_usage import DeviceWatch, WatchFailed
from fusion_node.daemon.life import NodeLife, RowRate
from fusion_node.daemon.manners_core import PAUSE_GRACE_S, DeviceUsage, PauseReason


@dataclass
class Node:
    """A node that notes what it is told."""

    num_sessions: int = 0
    busy_s: float = 0.0
    num_rows: int = 0
    kv_bytes: tuple[int, int] = (1, 2)
    device_memory_bytes: int | None = None
    refusal: str | None = None
    told: list[str] = field(default_factory=list)
    swarm_is_slow: bool = False
    num_steps_on_their_way: int = 0
    handed_over: list[tuple[PauseReason, float]] = field(default_factory=list)

    def hand_over(self, reason: PauseReason, grace_s: float) -> None:
        self.handed_over.append((reason, grace_s))

    def stay(self) -> None:
        self.handed_over.clear()

    def refuse(self, reason: str | None) -> None:
        self.refusal = reason

    def end_sessions(self, reason: PauseReason) -> None:
        self.told.append(f"end {self.num_sessions}")
        self.num_sessions = 0

    def release_memory(self) -> bool:
        if self.num_steps_on_their_way:
            self.num_steps_on_their_way -= 1
            return False
        self.told.append("release")
        return True

    async def publish(self) -> None:
        self.told.append("announce" if self.refusal is None else "withdraw")
        if self.swarm_is_slow:
            await asyncio.Event().wait()


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(node: Node, watch: DeviceWatch | None = None) -> AsyncIterator[tuple[NodeLife, Clock]]:
    clock = Clock()
    life = NodeLife("12D3KooWpeer", "tiny", clock=clock)
    life.loading("0:3", "cpu")
    life.loaded(1.0)
    life.manners.attach(node)
    life.ready(node)
    task = asyncio.create_task(life.manners.run(watch, sample_s=0.0))
    try:
        yield life, clock
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - tasks of the shell under test
            await asyncio.sleep(0)


async def test_sessions_are_refused_when_pause_returns_and_taken_when_resume_does() -> None:
    node = Node()
    async with running(node) as (life, _):
        life.pause(at_once=False)
        assert node.refusal == "the node is paused by its operator"
        assert life.state().phase is Phase.PAUSED
        await until(lambda: node.told == ["release", "withdraw"])
        life.resume()
        assert node.refusal is None
        assert life.state().phase is Phase.READY
        await until(lambda: node.told == ["release", "withdraw", "announce"])


async def test_sessions_go_on_until_the_grace_ends() -> None:
    node = Node(num_sessions=2)
    async with running(node) as (life, clock):
        life.pause(at_once=False)
        clock.now += PAUSE_GRACE_S - 1
        assert life.state().ends_in_s == 1.0
        assert node.handed_over == [(PauseReason.OPERATOR, PAUSE_GRACE_S)]
        await until(lambda: node.told == ["withdraw"])
        clock.now += 1
        await until(lambda: node.told == ["withdraw", "end 2", "release"])
        assert life.state().ends_in_s is None


async def test_sessions_are_handed_over_by_a_node_that_pauses_and_may_stay_when_it_resumes() -> None:
    node = Node(num_sessions=2)
    async with running(node) as (life, _):
        life.pause(at_once=False)
        assert node.handed_over == [(PauseReason.OPERATOR, PAUSE_GRACE_S)]
        life.resume()
        assert node.handed_over == []
        life.pause(at_once=True)
        assert node.handed_over == []  # no time is left for it
        assert node.told == ["end 2", "release"]


async def test_memory_is_released_when_the_last_session_ends_by_itself() -> None:
    node = Node(num_sessions=1)
    async with running(node) as (life, _):
        life.pause(at_once=False)
        await until(lambda: node.told == ["withdraw"])
        node.num_sessions = 0
        await until(lambda: node.told == ["withdraw", "release"])


async def test_memory_is_asked_for_again_when_something_still_computes_on_it() -> None:
    node = Node(num_sessions=1, num_steps_on_their_way=2)
    async with running(node) as (life, _):
        life.pause(at_once=True)
        await until(lambda: node.told == ["end 1", "withdraw", "release"])
        assert node.num_steps_on_their_way == 0


async def test_memory_is_not_released_under_a_node_that_serves_again() -> None:
    node = Node(num_sessions=1, num_steps_on_their_way=1)
    async with running(node) as (life, _):
        life.pause(at_once=True)
        life.resume()
        life.resume()
        await until(lambda: "announce" in node.told)
        assert "release" not in node.told


async def test_slow_swarm_does_not_keep_sessions_from_ending_at_once() -> None:
    node = Node(num_sessions=3, swarm_is_slow=True)
    async with running(node) as (life, _):
        life.pause(at_once=False)
        await until(lambda: node.told == ["withdraw"])
        life.pause(at_once=True)
        assert node.told == ["withdraw", "end 3", "release"]


async def test_node_that_is_paused_while_it_loads_never_serves_before_it_is_resumed() -> None:
    clock = Clock()
    life = NodeLife("12D3KooWpeer", "tiny", clock=clock)
    assert life.state().phase is Phase.STARTING
    life.loading("0:10", "cpu")
    life.loaded(0.37)
    life.pause(at_once=False)
    state = life.state()
    assert (state.phase, state.loaded_percent, state.layers, state.num_sessions) == (Phase.LOADING, 37, "0:10", 0)
    life.warming_up()
    assert (life.state().phase, life.state().loaded_percent) == (Phase.WARMING_UP, 100)
    node = Node()
    life.manners.attach(node)
    assert node.refusal is not None
    life.ready(node)
    assert life.state().phase is Phase.PAUSED
    life.leaving()
    assert life.state().phase is Phase.LEAVING


class PlayedWatch:
    """Samples that the test names; afterwards it fails."""

    def __init__(self, clock: Callable[[], Clock], percents: Iterator[float]) -> None:
        self._clock = clock
        self._percents = percents

    def sample(self, *, now: float, own_busy_s: float) -> DeviceUsage:
        self._clock().now += 2.0
        for percent in self._percents:
            return DeviceUsage(percent)
        raise WatchFailed("the driver is gone")


async def test_node_backs_off_while_another_program_computes_and_serves_again_by_itself() -> None:
    node, clocks = Node(), list[Clock]()
    watch = PlayedWatch(lambda: clocks[0], iter([80.0] * 10 + [2.0] * 1000))
    async with running(node, watch) as (life, clock):
        clocks.append(clock)
        await until(lambda: node.refusal is not None)
        assert node.refusal == "backing off: another program uses the device"
        assert life.state().phase is Phase.BACKING_OFF
        await until(lambda: node.told == ["release", "withdraw", "announce"])
        assert life.state().phase is Phase.READY


async def test_node_serves_again_when_the_watch_fails_while_it_backs_off() -> None:
    node, clocks = Node(), list[Clock]()
    watch = PlayedWatch(lambda: clocks[0], iter([80.0] * 10))
    async with running(node, watch) as (life, clock):
        clocks.append(clock)
        await until(lambda: "announce" in node.told)
        assert life.state().phase is Phase.READY


# rows per second


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = RowRate(window_s=10.0)
    assert rate.rows_per_s == 0.0
    for second in range(100):
        rate.note(5 * second, now=float(second))
    assert rate.rows_per_s == 5.0
    for second in range(100, 120):
        rate.note(495, now=float(second))
    assert rate.rows_per_s == 0.0


def test_rate_of_one_moment_is_none() -> None:
    rate = RowRate()
    rate.note(3, now=1.0)
    rate.note(4, now=1.0)
    assert rate.rows_per_s == 0.0
