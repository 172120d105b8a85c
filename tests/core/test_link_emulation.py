"""Emulated lines under real links: in virtual time over the in-memory network, and over sockets."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from fusion_node.errors import FusionError
from fusion_node.types import PeerId
from p2p.conformance import (
    CHECKS,
    Check,
    End,
    check_abort_reaches_both,
    check_cancelled_dial,
    check_close_flushes,
    check_close_while_busy,
    check_full_transport_says_so,
    check_listener_close_ends_links,
    check_order,
    check_refused_segment_closes,
    tensor_frame,
)
from p2p.identity import Identity
from p2p.link_emulation import EmulatedLine
from p2p.link_emulation_core import LineShape
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.messages import AnyMessage
from p2p.seam import Link
from p2p.upload_core import bytes_on_wire
from p2p.virtual_time import VirtualTimeLoop
from p2p.websocket import WebSocketNetwork
from tests.core.test_network_conformance import MemoryBench, WebSocketBench

SHAPE = LineShape(rtt_ms=50.0)
T = TypeVar("T")


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


def virtual_line(shape: LineShape, seed: int = 0) -> EmulatedLine:
    return EmulatedLine(shape, chance=random.Random(seed), poll_s=0.0)


@dataclass
class Peer:
    """A pool of links on a host of its own."""

    world: MemoryWorld
    host: str
    shape: LineShape | None
    frames: list[tuple[float, AnyMessage]] = field(default_factory=list)
    closed: list[FusionError] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    def __post_init__(self) -> None:
        self.identity = Identity.generate()
        line = None if self.shape is None else virtual_line(self.shape)
        self.now = asyncio.get_running_loop().time
        self.pool = LinkPool(
            MemoryNetwork(self.world, self.identity, self.host, line=line),
            self.identity.peer_id,
            on_frame=self._on_frame,
            on_closed=lambda peer, error: self.closed.append(error),
            clock=self.now,
        )

    async def until_frames(self, count: int) -> None:
        while len(self.frames) < count:
            self.came.clear()
            await self.came.wait()

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        self.frames.append((self.now(), message))
        self.came.set()


@asynccontextmanager
async def peers(*shapes: LineShape | None) -> AsyncIterator[list[Peer]]:
    """One per shape; the first is connected to all others."""
    world = MemoryWorld()
    made = [Peer(world, f"host{number}", shape) for number, shape in enumerate(shapes)]
    for each in made:
        each.address = await each.pool.listen(f"{each.host}:0")
    for other in made[1:]:
        await made[0].pool.connect(other.identity.peer_id, [other.address])
    try:
        yield made
    finally:
        for each in made:
            await each.pool.aclose()


# in virtual time


def test_round_trip_is_the_emulated_one_to_the_microsecond() -> None:
    async def measure(shape: LineShape | None) -> float:
        async with peers(shape, shape) as (ours, theirs):
            return await ours.pool.round_trip(theirs.identity.peer_id)

    assert in_virtual_time(measure(LineShape(rtt_ms=50.0))) == pytest.approx(0.05, abs=1e-6)
    assert in_virtual_time(measure(LineShape(rtt_ms=0.0))) == pytest.approx(0.0, abs=1e-6)
    assert in_virtual_time(measure(None)) == pytest.approx(0.0, abs=1e-6)


def test_who_emulates_alone_delays_one_direction_only() -> None:
    async def measure() -> float:
        async with peers(SHAPE, None) as (ours, theirs):
            return await ours.pool.round_trip(theirs.identity.peer_id)

    assert in_virtual_time(measure()) == pytest.approx(0.025, abs=1e-6)


def test_planners_are_told_the_emulated_round_trip() -> None:
    async def measure() -> tuple[float | None, float | None]:
        async with peers(SHAPE, SHAPE) as (ours, theirs):
            await asyncio.sleep(20.0)  # ten heartbeats
            return (
                ours.pool.round_trip_s(theirs.identity.peer_id),
                theirs.pool.links()[0].round_trip_s,
            )

    assert in_virtual_time(measure()) == (pytest.approx(0.05, abs=1e-6), pytest.approx(0.05, abs=1e-6))


def test_jittered_round_trips_stay_within_twice_the_jitter_and_repeat_for_a_seed() -> None:
    async def measure() -> list[float]:
        async with peers(LineShape(50.0, 5.0), LineShape(50.0, 5.0)) as (ours, theirs):
            return [await ours.pool.round_trip(theirs.identity.peer_id) for _ in range(200)]

    took = in_virtual_time(measure())
    assert 0.04 - 1e-6 <= min(took) <= 0.043
    assert 0.057 <= max(took) <= 0.06 + 1e-6
    assert statistics.fmean(took) == pytest.approx(0.05, abs=0.001)
    assert in_virtual_time(measure()) == took


def test_long_frames_of_two_links_share_the_uplink() -> None:
    num_bytes = 2_048_000

    async def measure() -> list[float]:
        shape = LineShape(rtt_ms=50.0, rate_Mbps=16.0)
        async with peers(shape, shape, shape) as (ours, *others):
            began = ours.now()
            for other in others:
                ours.pool.send(other.identity.peer_id, *tensor_frame(1, 0, num_bytes))
            await asyncio.gather(*(other.until_frames(1) for other in others))
            return [other.frames[0][0] - began for other in others]

    took = in_virtual_time(measure())
    alone_s = num_bytes / 2e6
    assert max(took) >= 2 * alone_s + 0.025
    assert max(took) <= 1.08 * 2 * alone_s + 0.1  # headers of segments, WebSocket and TCP, and the first credit
    assert min(took) >= 1.5 * alone_s  # neither had the uplink for itself


def test_an_urgent_frame_overtakes_a_long_one_on_a_slow_line() -> None:
    async def measure() -> tuple[float, float]:
        shape = LineShape(rtt_ms=20.0, rate_Mbps=8.0)
        async with peers(shape, shape) as (ours, theirs):
            peer = theirs.identity.peer_id
            ours.pool.send(peer, *tensor_frame(1, 0, 4_096_000))
            await asyncio.sleep(2.0)  # so that the rate is known, and with it how little to hand out in advance
            began = ours.now()
            ours.pool.send(peer, *tensor_frame(2, 0, 4096))
            await theirs.until_frames(2)
            return theirs.frames[0][0] - began, theirs.frames[1][0] - began

    urgent_s, long_s = in_virtual_time(measure())
    # 64 KiB or more would lie ahead of it if as much were handed out as at first: 65 ms and more.
    assert urgent_s < 0.05
    assert long_s > 1.5


@asynccontextmanager
async def links(shape: LineShape) -> AsyncIterator[tuple[End, End]]:
    """The two ends of one link over the in-memory network."""
    world = MemoryWorld()
    networks = [MemoryNetwork(world, Identity.generate(), host, line=virtual_line(shape)) for host in ("a", "b")]
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def on_link(link: Link) -> None:
        accepted.set_result(link)
        await link.wait_closed()

    listener = await networks[1].listen("b:0", on_link)
    ours = await networks[0].dial(listener.address, expect=None, timeout_s=5.0)
    yield End(ours), End(await accepted)
    await ours.aclose()
    await listener.aclose()


def test_full_line_makes_the_sender_wait_and_tells_when_there_is_room() -> None:
    async def measure() -> tuple[int, float, int]:
        loop = asyncio.get_running_loop()
        async with links(LineShape(rtt_ms=50.0, rate_Mbps=8.0)) as (ours, theirs):
            num_written = 0
            while ours.link.is_writable:
                ours.link.write(bytes(10_000))
                num_written += 1
            began = loop.time()
            await ours.until(lambda: ours.link.is_writable)
            waited_s = loop.time() - began
            for _ in range(num_written):
                await theirs.receive()
            return num_written, waited_s, len(theirs.segments)

    num_written, waited_s, num_left = in_virtual_time(measure())
    assert num_written == 14  # 128 KiB, as a kernel would take
    assert num_left == 0
    assert waited_s == pytest.approx(8 * bytes_on_wire(10_016) / 1e6, abs=1e-6)  # until half of them have left


def test_close_comes_after_what_was_written_and_takes_no_longer_than_that() -> None:
    async def measure() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        async with links(SHAPE) as (ours, theirs):
            for _ in range(5):
                ours.link.write(bytes(10_000))
            began = loop.time()
            await ours.link.aclose()
            took_s = loop.time() - began
            await theirs.closed()
            return took_s, len(theirs.segments)

    assert in_virtual_time(measure()) == (pytest.approx(0.025, abs=1e-6), 5)


def test_close_does_not_wait_for_a_line_that_takes_too_long() -> None:
    async def measure() -> float:
        loop = asyncio.get_running_loop()
        async with links(LineShape(rtt_ms=50.0, rate_Mbps=0.1)) as (ours, _):
            for _ in range(5):
                ours.link.write(bytes(60_000))
            began = loop.time()
            await ours.link.aclose()
            return loop.time() - began

    assert in_virtual_time(measure()) == pytest.approx(1.0, abs=1e-3)


def test_cut_ends_both_sides_at_once_whatever_is_under_way() -> None:
    async def measure() -> float:
        loop = asyncio.get_running_loop()
        async with links(LineShape(rtt_ms=1000.0)) as (ours, theirs):
            ours.link.write(bytes(10_000))
            began = loop.time()
            ours.link.abort("for a reason")
            assert "for a reason" in str(await ours.closed())
            await theirs.closed()
            assert not theirs.segments
            return loop.time() - began

    assert in_virtual_time(measure()) == 0.0


@pytest.mark.parametrize("ending", ["cut", "closed"])
def test_link_that_has_ended_leaves_no_timer_behind(ending: str) -> None:
    times = []

    async def end_and_wait() -> None:
        async with links(LineShape(rtt_ms=1000.0, rate_Mbps=1.0)) as (ours, _):
            for _ in range(20):
                ours.link.write(bytes(10_000))
            if ending == "cut":
                ours.link.abort()
        times.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        # A timer would first be waited for.
        with pytest.raises(RuntimeError, match="there is no timer"):
            runner.run(end_and_wait())
        assert [runner.get_loop().time()] == times


async def test_network_without_a_line_has_nothing_in_its_way() -> None:
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    async def on_link(link: Link) -> None:
        accepted.set_result(link)
        await link.wait_closed()

    for line, kinds in ((None, {"_WebSocketChannel"}), (EmulatedLine(SHAPE), {"_SlowChannel"})):
        networks = [WebSocketNetwork(Identity.generate(), line=line) for _ in range(2)]
        listener = await networks[1].listen("127.0.0.1:0", on_link)
        ours = await networks[0].dial(listener.address, expect=None, timeout_s=20.0)
        theirs = await accepted
        assert {type(link._channel).__name__ for link in (ours, theirs)} == kinds  # type: ignore[attr-defined]
        await ours.aclose()
        await listener.aclose()
        accepted = asyncio.get_running_loop().create_future()


# the conformance suite


class EmulatedMemory(MemoryBench):
    def line(self) -> EmulatedLine:
        return virtual_line(LineShape(40.0, 10.0, 200.0), len(self.hosts))


class EmulatedWebSocket(WebSocketBench):
    def line(self) -> EmulatedLine:
        return EmulatedLine(LineShape(2.0, 0.5, 2000.0), chance=random.Random(0))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_emulated_memory_network_conforms(check: Check) -> None:
    async def run() -> None:
        await check(EmulatedMemory())

    in_virtual_time(run())


@pytest.mark.parametrize(
    "check",
    [
        check_order,
        check_full_transport_says_so,
        check_refused_segment_closes,
        check_close_while_busy,
        check_close_flushes,
        check_abort_reaches_both,
        check_cancelled_dial,
        check_listener_close_ends_links,
    ],
    ids=lambda check: check.__name__,
)
async def test_emulated_websocket_conforms(check: Check) -> None:
    await check(EmulatedWebSocket())
