"""The pool of links over the in-memory network, on a clock that the test turns."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from fusion_node.errors import (
    AddressInUse,
    FusionError,
    LocalProtocolError,
    PeerClosed,
    PeerTimeout,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
    ResourceExhausted,
)
from fusion_node.types import PeerId
from p2p.heartbeat_core import DEAD_AFTER_S, SUSPECT_AFTER_S
from p2p.identity import Identity
from p2p.link_messages import Ping, Pong
from p2p.links import FRONT_S, HELLO_TIMEOUT_S, IDLE_AFTER_S, RESUME_S, STALLED_AFTER_S, TICK_S, LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.messages import AnyMessage, CloseSession, StatusRequest, StepResult, TensorMeta
from p2p.paths import RoutedNetwork
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Network, OpenGate, PathKind
from p2p.transfer_core import LIMITS, Lane

PATIENCE_S = 20.0


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Node:
    """A pool with everything that it reports."""

    host: str
    identity: Identity
    network: Network
    pool: LinkPool
    frames: list[tuple[PeerId, AnyMessage, bytes]] = field(default_factory=list)
    closed: list[tuple[PeerId, FusionError]] = field(default_factory=list)
    address: str = ""
    relayed_address: str = ""

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id


@dataclass
class Swarm:
    world: MemoryWorld = field(default_factory=MemoryWorld)
    clock: Clock = field(default_factory=Clock)
    nodes: list[Node] = field(default_factory=list)

    async def node(
        self,
        *,
        version: int = PROTOCOL_VERSION,
        listen: bool = True,
        on_frame: Callable[[PeerId, AnyMessage, memoryview], None] | None = None,
        is_needed: Callable[[PeerId], bool] = lambda peer: False,
        identity: Identity | None = None,
        has_relay: bool = False,
        **settings: Any,
    ) -> Node:
        host, identity = f"host{len(self.nodes)}", identity or Identity.generate()
        relayed_host = f"/relay/p2p-circuit/{host}"
        network: Network = MemoryNetwork(self.world, identity, host, version=version)
        if has_relay:
            network = RoutedNetwork(network, MemoryNetwork(self.world, identity, relayed_host, version=version))

        def keep(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
            made.frames.append((peer, message, bytes(payload)))

        pool = LinkPool(
            network,
            identity.peer_id,
            on_frame=on_frame or keep,
            on_closed=lambda peer, error: made.closed.append((peer, error)),
            is_needed=is_needed,
            clock=self.clock,
            **settings,
        )
        made = Node(host, identity, network, pool)
        if listen:
            made.address = await pool.listen(f"{host}:0")
        if has_relay:
            made.relayed_address = await pool.listen(f"{relayed_host}:0")
            self.world.paths[made.relayed_address] = PathKind.RELAYED
        self.nodes.append(made)
        return made

    async def pair(self) -> tuple[Node, Node]:
        ours, theirs = await self.node(), await self.node()
        await ours.pool.connect(theirs.peer, [theirs.address])
        await until(lambda: theirs.pool.is_connected(ours.peer))
        await self.settle()
        return ours, theirs

    async def settle(self) -> None:
        """Lets everything that can happen at this time happen."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock.now += TICK_S
            for node in self.nodes:
                node.pool.tick()
            await self.settle()


class Doorman(OpenGate):
    """A gate that lets in whom and what the test wants."""

    def __init__(self) -> None:
        self.refused_peers: set[PeerId] = set()
        self.max_messages = 1000
        self.traffic: list[tuple[PeerId, int]] = []

    def refuse_peer(self, peer: PeerId, host: str) -> str | None:
        return "banned" if peer in self.refused_peers else None

    def refuse_traffic(self, peer: PeerId, num_messages: int, num_bytes: int) -> str | None:
        if num_messages:
            self.traffic.append((peer, num_messages))
        return "messages" if num_messages > self.max_messages else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - any of many events of the pools under test
            await asyncio.sleep(0)


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    yield made
    for node in made.nodes:
        await node.pool.aclose()


def result(number: int, payload: bytes) -> StepResult:
    return StepResult(bytes(16), 0, number, (1,), TensorMeta("f32", 1, len(payload) // 4), ())


async def test_frames_arrive_with_their_sender_and_payload(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    payload = os.urandom(200_000)
    ours.pool.send(theirs.peer, result(1, payload), payload)
    theirs.pool.send(ours.peer, StatusRequest(3))
    await until(lambda: len(theirs.frames) == 1 and len(ours.frames) == 1)
    assert theirs.frames == [(ours.peer, result(1, payload), payload)]
    assert ours.frames == [(theirs.peer, StatusRequest(3), b"")]


async def test_status_overtakes_a_long_result_and_the_close_of_its_session_does_not(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    payload = os.urandom(2_000_000)
    ours.pool.send(theirs.peer, result(1, payload), payload)
    ours.pool.send(theirs.peer, CloseSession(bytes(16), 0))
    ours.pool.send(theirs.peer, StatusRequest(2))
    await until(lambda: len(theirs.frames) == 3)
    assert [message for _, message, _ in theirs.frames] == [
        StatusRequest(2),
        result(1, payload),
        CloseSession(bytes(16), 0),
    ]


async def test_links_are_told_with_who_dialled_and_how_old_they_are(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    await swarm.advance(3.0)
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: len(theirs.frames) == 1)
    (our_view,), (their_view,) = ours.pool.links(), theirs.pool.links()
    assert (our_view.peer, our_view.we_dialled, our_view.remote_address) == (theirs.peer, True, theirs.address)
    assert (their_view.peer, their_view.we_dialled) == (ours.peer, False)
    assert our_view.path is PathKind.MEMORY
    assert our_view.since_s == their_view.since_s == 3.0
    assert 0.0 <= our_view.heard_s <= 3.0
    assert our_view.round_trip_s is not None
    assert (our_view.bytes_out, our_view.frames_out) == (their_view.bytes_in, their_view.frames_in)
    assert our_view.bytes_out > 0
    ours.pool.drop(theirs.peer, "enough")
    assert ours.pool.links() == []


async def test_connect_reuses_a_link_and_concurrent_connects_share_one_dial(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    await asyncio.gather(*(ours.pool.connect(theirs.peer, [theirs.address]) for _ in range(5)))
    await ours.pool.connect(theirs.peer, [])
    assert await ours.pool.identify(theirs.address) == theirs.peer
    await swarm.settle()
    assert ours.pool.counters["links"] == theirs.pool.counters["links"] == 1


async def test_connect_tries_every_address(swarm: Swarm) -> None:
    ours, other, theirs = [await swarm.node() for _ in range(3)]
    await ours.pool.connect(theirs.peer, ["nobody:1", "nonsense", other.address, theirs.address])
    assert ours.pool.is_connected(theirs.peer)
    assert not ours.pool.is_connected(other.peer)
    assert ours.pool.counters["refused_wrong-key"] == 1


async def test_connect_to_nobody_names_every_address(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    with pytest.raises(PeerUnreachable, match=r"nobody:1.*nobody:2") as caught:
        await ours.pool.connect(theirs.peer, ["nobody:1", "nobody:2"])
    assert caught.value.peer == theirs.peer
    with pytest.raises(PeerUnreachable, match="no address"):
        await ours.pool.connect(theirs.peer, [])


async def test_swallowed_address_leaves_time_for_the_next(swarm: Swarm) -> None:
    ours, swallowed, theirs = [await swarm.node() for _ in range(3)]
    swarm.world.black_hole(ours.host, swallowed.host)
    await ours.pool.connect(theirs.peer, [swallowed.address, theirs.address], timeout_s=0.2)
    with pytest.raises(PeerUnreachable):
        await ours.pool.connect(swallowed.peer, [swallowed.address], timeout_s=0.05)


async def test_somebody_else_and_another_version_are_told_apart(swarm: Swarm) -> None:
    ours, other, newer = await swarm.node(), await swarm.node(), await swarm.node(version=PROTOCOL_VERSION + 1)
    with pytest.raises(RemoteProtocolError) as caught:
        await ours.pool.connect(newer.peer, ["nobody:1", other.address])
    assert not isinstance(caught.value, ProtocolVersionMismatch)
    with pytest.raises(ProtocolVersionMismatch, match=rf"version {PROTOCOL_VERSION + 1}.*version {PROTOCOL_VERSION}"):
        await ours.pool.connect(newer.peer, [other.address, newer.address, "nobody:1"])
    with pytest.raises(ProtocolVersionMismatch):
        await newer.pool.identify(ours.address)


async def test_cancelled_connect_does_not_cancel_the_dial_of_others(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    first, second = (asyncio.create_task(ours.pool.connect(theirs.peer, [theirs.address])) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert ours.pool.is_connected(theirs.peer)


async def test_wrong_addresses_of_one_caller_do_not_delay_the_dial_of_another(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    swarm.world.black_hole(ours.host, "nowhere")
    misled = asyncio.create_task(ours.pool.connect(theirs.peer, ["nowhere:1"], timeout_s=PATIENCE_S))
    await swarm.settle()
    async with asyncio.timeout(PATIENCE_S / 2):
        await ours.pool.connect(theirs.peer, [theirs.address])
        await misled  # the link is his as well
    await swarm.settle()
    assert ours.pool.counters["links"] == theirs.pool.counters["links"] == 1


async def test_dials_to_several_addresses_of_one_peer_leave_one_link(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    other_address = await theirs.pool.listen(f"{theirs.host}:0")
    await asyncio.gather(*(ours.pool.connect(theirs.peer, [a]) for a in (theirs.address, other_address)))
    await swarm.settle()
    assert ours.pool.counters["links"] == theirs.pool.counters["links"] == 1
    assert ours.closed == theirs.closed == []


async def test_closing_the_pool_ends_a_dial_under_way(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    swarm.world.black_hole(ours.host, theirs.host)
    dialling = asyncio.create_task(ours.pool.connect(theirs.peer, [theirs.address], timeout_s=PATIENCE_S))
    await swarm.settle()
    await ours.pool.aclose()
    with pytest.raises(PeerUnreachable):
        await dialling


async def test_identify_proves_who_listens_and_keeps_the_link(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    assert await ours.pool.identify(theirs.address) == theirs.peer
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: theirs.frames == [(ours.peer, StatusRequest(1), b"")])


async def test_both_dial_at_once_and_one_link_is_kept_without_a_loss(swarm: Swarm) -> None:
    for _ in range(3):
        ours, theirs = await swarm.node(), await swarm.node()
        await asyncio.gather(
            ours.pool.connect(theirs.peer, [theirs.address]), theirs.pool.connect(ours.peer, [ours.address])
        )
        payload = bytes(100_000)
        for number in range(50):
            for sender, receiver in ((ours, theirs), (theirs, ours)):
                sender.pool.send(receiver.peer, result(number, payload), payload)
            await asyncio.sleep(0)
        await until(lambda: len(ours.frames) == len(theirs.frames) == 50)  # noqa: B023
        for node in (ours, theirs):
            assert [m.sequence for _, m, _ in node.frames if isinstance(m, StepResult)] == list(range(50))
        await swarm.settle()
        views = [view for node in (ours, theirs) for view in node.pool.links()]
        assert sorted(view.we_dialled for view in views) == [False, True]  # it is the same one
        for node, view in zip((ours, theirs), views, strict=True):
            assert node.pool.counters["links"] == 1
            assert len(node.pool._connections[view.peer].ends) == 1
        await ours.pool.aclose("done")
        await until(lambda: bool(theirs.closed))  # noqa: B023
        await swarm.settle()
        assert [peer for peer, _ in theirs.closed] == [ours.peer]
        assert ours.closed == []


async def test_pool_has_no_link_with_itself(swarm: Swarm) -> None:
    alone = await swarm.node()
    with pytest.raises(PeerUnreachable, match="itself"):
        await alone.pool.identify(alone.address)
    with pytest.raises(PeerUnreachable, match="itself"):
        await alone.pool.connect(alone.peer, [alone.address])
    assert alone.closed == []


async def test_send_without_link_is_unreachable(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    with pytest.raises(PeerUnreachable):
        await ours.pool.round_trip(theirs.peer)
    with pytest.raises(PeerUnreachable):
        ours.pool.send(theirs.peer, StatusRequest(1))
    assert ours.pool.round_trip_s(theirs.peer) is None
    assert not ours.pool.is_connected(theirs.peer)


async def test_frame_too_large_is_our_fault_and_costs_no_link(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    with pytest.raises(LocalProtocolError):
        ours.pool.send(theirs.peer, result(1, b"1234"), bytes(40 << 20))
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: len(theirs.frames) == 1)


async def test_peer_that_does_not_read_is_dropped(swarm: Swarm) -> None:
    ours = await swarm.node(max_queue_bytes=1 << 20)
    theirs = await swarm.node()
    peer = await ours.pool.identify(theirs.address)
    await swarm.settle()
    swarm.world.tamper(ours.host, theirs.host, lambda segment: ())  # what is sent is never acknowledged
    payload = bytes(1 << 18)
    num_sent = 0
    with pytest.raises(PeerUnreachable, match="does not read"):
        while num_sent < 100:
            ours.pool.send(peer, result(num_sent, payload), payload)
            num_sent += 1
            assert ours.closed == []  # never from within send
    assert num_sent * len(payload) <= LIMITS[Lane.PREFILL].window_bytes + (2 << 20)
    await until(lambda: bool(ours.closed))
    ((closed_peer, error),) = ours.closed
    assert closed_peer == peer
    assert isinstance(error, PeerTimeout)
    assert "does not read" in str(error)


async def test_peer_that_grants_nothing_while_something_waits_is_dropped_in_time(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await swarm.pair()
    monkeypatch.setattr(theirs.pool._connections[ours.peer].transfer, "_may_grant", lambda receiving: False)
    payload = bytes(LIMITS[Lane.PREFILL].window_bytes + 1000)
    ours.pool.send(theirs.peer, result(1, payload), payload)
    await swarm.advance(STALLED_AFTER_S - 2 * TICK_S)
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: [message for _, message, _ in theirs.frames] == [StatusRequest(1)])
    assert ours.closed == []
    await swarm.advance(STALLED_AFTER_S + 3 * TICK_S)  # the status was acknowledged
    ((_, error),) = ours.closed
    assert isinstance(error, PeerTimeout)
    assert "does not read" in str(error)


async def test_peer_that_acknowledges_next_to_nothing_is_dropped_in_time_over_whatever_links(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await swarm.pair()
    transfer = theirs.pool._connections[ours.peer].transfer
    monkeypatch.setattr(transfer, "_may_grant", lambda receiving: False)
    payload = bytes(1_000_000)
    for number in range(4):
        ours.pool.send(theirs.peer, result(number, payload), payload)
    await swarm.settle()
    await swarm.advance(2 * TICK_S)
    for number in range(4):
        await swarm.advance(STALLED_AFTER_S / 4 - TICK_S)
        assert ours.closed == []
        swarm.world.cut(ours.host, theirs.host)
        await until(lambda: ours.pool.counters["resumed"] == number + 1)  # noqa: B023
        transfer._in[Lane.DECODE].granted += 1  # and one more byte comes
    await swarm.advance(6 * TICK_S)
    ((_, error),) = ours.closed
    assert isinstance(error, PeerTimeout)


async def test_all_queues_together_are_bounded_and_the_slowest_goes_first(swarm: Swarm) -> None:
    ours = await swarm.node(max_held_bytes=6_000_000)
    fast, slow = await swarm.node(), await swarm.node()
    payload = bytes(1_000_000)
    for node in (fast, slow):
        await ours.pool.connect(node.peer, [node.address])
        await swarm.settle()
    swarm.world.tamper(slow.host, ours.host, lambda segment: ())  # it takes all and says nothing
    for number in range(20):
        ours.pool.send(fast.peer, result(number, payload), payload)
        await until(lambda: len(fast.frames) == number + 1)  # noqa: B023
    await swarm.settle()
    for number in range(4):
        ours.pool.send(slow.peer, result(number, payload), payload)
    await swarm.advance(TICK_S)
    assert ours.closed == []
    for node in (slow, fast):
        for number in range(4):
            ours.pool.send(node.peer, result(number, payload), payload)
        ours.pool.tick()
    ((peer, error),) = ours.closed
    assert peer == slow.peer
    assert isinstance(error, PeerTimeout)
    assert ours.pool.counters["refused_held-frames"] == 1


async def test_silent_peer_is_lost_when_it_is_dead_and_cannot_be_dialled_again(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    swarm.world.black_hole(ours.host, theirs.host)
    await swarm.advance(DEAD_AFTER_S + RESUME_S - TICK_S)
    assert ours.closed == theirs.closed == []
    assert ours.pool.is_connected(theirs.peer)
    await swarm.advance(2 * TICK_S)  # bytes are noticed at the tick after they came
    for node, other in ((ours, theirs), (theirs, ours)):
        ((peer, error),) = node.closed
        assert peer == other.peer
        assert isinstance(error, PeerTimeout)
        assert "silent" in str(error)
        assert not node.pool.is_connected(other.peer)


async def test_idle_peers_stay_connected(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    await swarm.advance(60.0)
    assert ours.closed == theirs.closed == []
    assert ours.pool.is_connected(theirs.peer)
    assert ours.pool.counters["frames_out"] < 70


async def test_our_own_absence_loses_no_peer(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    swarm.clock.now += 3600.0
    ours.pool.tick()
    theirs.pool.tick()
    await swarm.settle()
    assert ours.pool.is_connected(theirs.peer)
    await swarm.advance(10.0)
    assert ours.closed == theirs.closed == []


async def test_one_way_traffic_keeps_both_sides_alive(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    for _ in range(40):
        ours.pool.send(theirs.peer, StatusRequest(1))
        await swarm.advance(TICK_S)
    assert ours.closed == theirs.closed == []


async def test_round_trip_is_measured(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    assert ours.pool.round_trip_s(theirs.peer) == 0.0  # nothing takes time in this world
    assert await ours.pool.round_trip(theirs.peer) == 0.0


async def test_pong_that_answers_no_ping_is_counted_and_ignored(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    end = theirs.pool._connections[ours.peer].end
    assert end is not None
    for number in range(10):
        end.post(Pong(number))
    await swarm.settle()
    assert ours.pool.counters["refused_unexpected-pong"] == 10
    assert ours.pool.is_connected(theirs.peer)


async def test_first_round_trip_is_not_believed_alone(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(), await swarm.node()
    num_messages = 0

    def delay(message: bytes) -> tuple[bytes, ...]:
        nonlocal num_messages
        num_messages += 1
        swarm.clock.now += 0.5 if num_messages <= 4 else 0.0  # a handshake message, Hello, ping and pong
        return (message,)

    swarm.world.tamper(theirs.host, ours.host, delay)
    await ours.pool.connect(theirs.peer, [theirs.address])
    await swarm.settle()
    assert swarm.clock.now == 1002.0
    assert ours.pool.round_trip_s(theirs.peer) == 0.0


async def test_round_trip_goes_on_over_the_next_link_and_ends_with_the_connection(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    swarm.world.tamper(theirs.host, ours.host, lambda message: ())
    measuring = asyncio.create_task(ours.pool.round_trip(theirs.peer))
    await swarm.settle()
    assert not measuring.done()
    swarm.world.heal(theirs.host, ours.host)
    swarm.world.cut(ours.host, theirs.host)
    waiting = asyncio.create_task(ours.pool.round_trip(theirs.peer))  # while there is no link
    assert await measuring == await waiting == 0.0
    swarm.world.tamper(theirs.host, ours.host, lambda message: ())
    measuring = asyncio.create_task(ours.pool.round_trip(theirs.peer))
    await swarm.settle()
    ours.pool.drop(theirs.peer, "enough")
    with pytest.raises(PeerClosed, match="enough"):
        await measuring


async def test_cut_link_is_made_again_and_nobody_above_notices(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    for number in range(3):
        swarm.world.cut(ours.host, theirs.host)
        ours.pool.send(theirs.peer, StatusRequest(number))
        theirs.pool.send(ours.peer, StatusRequest(number))
        await until(lambda: len(theirs.frames) == len(ours.frames) == number + 1)  # noqa: B023
    await swarm.settle()
    assert ours.closed == theirs.closed == []
    (view,) = ours.pool.links()
    assert view.num_resumed == ours.pool.counters["resumed"] == 3
    assert ours.pool.counters["links"] == theirs.pool.counters["links"] == 1


async def test_link_that_is_cut_again_and_again_under_load_loses_and_repeats_nothing(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    draw = random.Random(1)
    sent: dict[str, list[tuple[int, int]]] = {"ours": [], "theirs": []}
    for number in range(60):
        for name, sender, receiver in (("ours", ours, theirs), ("theirs", theirs, ours)):
            size = draw.choice((4, 4096, 70_000, 1_500_000))
            sender.pool.send(receiver.peer, result(number, bytes(size)), bytes(size))
            sent[name].append((number, size))
        for _ in range(draw.randrange(30)):
            await asyncio.sleep(0)
        if number % 4 == 0:
            swarm.world.cut(ours.host, theirs.host)
    await until(lambda: len(ours.frames) == len(theirs.frames) == 60)
    for name, receiver in (("ours", theirs), ("theirs", ours)):
        got = [(message.sequence, len(data)) for _, message, data in receiver.frames if isinstance(message, StepResult)]
        assert got == sent[name]
    assert ours.closed == theirs.closed == []
    assert ours.pool.counters["resumed"] > 5


async def test_addresses_that_others_name_stand_behind_those_that_have_led_to_the_peer(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(has_relay=True), await swarm.node(has_relay=True)
    listener = swarm.world.listeners.pop(theirs.address)
    await ours.pool.connect(theirs.peer, [theirs.relayed_address])
    await swarm.settle()
    for number in range(4):
        await ours.pool.connect(theirs.peer, [f"nowhere{number}:{port}" for port in range(1, 17)])
    dialled: list[str] = []
    dial = ours.network.dial

    async def note(address: str, **settings: Any) -> Any:
        dialled.append(address)
        return await dial(address, **settings)

    ours.network.dial = note  # type: ignore[method-assign]
    swarm.world.cut(f"/relay/p2p-circuit/{ours.host}", f"/relay/p2p-circuit/{theirs.host}")
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: len(theirs.frames) == 1)
    assert dialled[0] == theirs.relayed_address  # though the others would be a better path
    assert ours.closed == theirs.closed == []
    swarm.world.listeners[theirs.address] = listener
    ours.pool.reconsider(theirs.peer, [theirs.address])
    await until(lambda: ours.pool.path(theirs.peer) is PathKind.MEMORY)
    assert len(ours.pool._connections[theirs.peer].addresses) <= 24


async def test_absence_from_where_a_peer_never_was_does_not_end_its_connection(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    await theirs.pool.connect(ours.peer, ["nowhere:1"])  # who was dialled knows no address of its own
    listener = swarm.world.listeners.pop(theirs.address)
    swarm.world.black_hole(ours.host, theirs.host)
    swarm.world.listeners[theirs.address] = listener
    for channel in list(swarm.world.channels):
        channel.abort()
    await swarm.advance(RESUME_S - TICK_S)
    assert theirs.closed == []


async def test_peer_that_is_killed_is_lost_at_once(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    del swarm.world.listeners[theirs.address]
    swarm.world.cut(ours.host, theirs.host)
    await until(lambda: bool(ours.closed))  # without any time having passed
    ((peer, error),) = ours.closed
    assert peer == theirs.peer
    assert isinstance(error, PeerClosed)
    assert "nobody listens" in str(error)
    assert theirs.closed == []
    await swarm.advance(RESUME_S + TICK_S)
    ((peer, error),) = theirs.closed  # who knows no address waits
    assert isinstance(error, PeerClosed)


async def test_peer_that_cannot_be_dialled_again_is_lost_in_time_and_can_come_back(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    listener = swarm.world.listeners.pop(theirs.address)
    swarm.world.black_hole(ours.host, theirs.host)
    swarm.world.listeners[theirs.address] = listener
    for channel in list(swarm.world.channels):
        channel.abort()
    await swarm.advance(RESUME_S - TICK_S)
    assert ours.closed == []
    await swarm.advance(2 * TICK_S)
    assert [type(error) for _, error in ours.closed] == [PeerClosed]
    swarm.world.heal(ours.host, theirs.host)
    await ours.pool.connect(theirs.peer, [theirs.address])
    ours.pool.send(theirs.peer, StatusRequest(9))
    await until(lambda: len(theirs.frames) == 1)
    assert len(ours.closed) == len(theirs.closed) == 1


async def test_restarted_peer_does_not_know_the_connection_and_is_lost_at_once(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: len(theirs.frames) == 1)
    again = await swarm.node(identity=theirs.identity, listen=False)
    swarm.world.listeners[theirs.address] = swarm.world.listeners[await again.pool.listen(f"{again.host}:0")]
    swarm.world.cut(ours.host, theirs.host)
    await until(lambda: bool(ours.closed))
    ((_, error),) = ours.closed
    assert isinstance(error, PeerClosed)
    assert "restarted" in str(error)
    await ours.pool.connect(theirs.peer, [theirs.address])
    ours.pool.send(theirs.peer, StatusRequest(2))
    await until(lambda: again.frames == [(ours.peer, StatusRequest(2), b"")])


async def test_peer_that_was_restarted_and_dials_has_lost_what_was_before(swarm: Swarm) -> None:
    num_closed_before: list[int] = []

    def answer(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        num_closed_before.append(len(theirs.closed))
        theirs.pool.send(peer, StatusRequest(2))

    ours, theirs = await swarm.node(), await swarm.node(on_frame=answer)
    await ours.pool.connect(theirs.peer, [theirs.address])
    await until(lambda: theirs.pool.is_connected(ours.peer))
    swarm.world.tamper(ours.host, theirs.host, lambda message: ())
    measuring = asyncio.create_task(theirs.pool.round_trip(ours.peer))
    await swarm.settle()
    again = await swarm.node(identity=ours.identity)
    await again.pool.connect(theirs.peer, [theirs.address])
    again.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: again.frames == [(theirs.peer, StatusRequest(2), b"")])
    assert num_closed_before == [1]
    ((peer, error),) = theirs.closed
    assert peer == ours.peer
    assert isinstance(error, PeerClosed)
    with pytest.raises(PeerClosed):
        await measuring
    assert theirs.pool.counters["links"] == 1


async def test_silent_path_is_replaced_by_another_before_it_is_given_up(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(has_relay=True), await swarm.node(has_relay=True)
    await ours.pool.connect(theirs.peer, [theirs.address, theirs.relayed_address])
    assert ours.pool.path(theirs.peer) is PathKind.MEMORY
    await swarm.settle()
    swarm.world.black_hole(ours.host, theirs.host)
    ours.pool.send(theirs.peer, StatusRequest(1))
    await swarm.advance(SUSPECT_AFTER_S + 2 * TICK_S)
    await until(lambda: len(theirs.frames) == 1)
    assert SUSPECT_AFTER_S + 2 * TICK_S < DEAD_AFTER_S
    assert ours.pool.path(theirs.peer) is theirs.pool.path(ours.peer) is PathKind.RELAYED
    assert ours.closed == theirs.closed == []


async def test_better_path_replaces_the_present_one_without_a_loss(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(has_relay=True), await swarm.node(has_relay=True)
    await ours.pool.connect(theirs.peer, [theirs.relayed_address])
    await swarm.settle()
    assert ours.pool.path(theirs.peer) is PathKind.RELAYED
    assert ours.pool.round_trip_s(theirs.peer) == 0.0
    payload = bytes(300_000)
    for number in range(20):
        ours.pool.send(theirs.peer, result(number, payload), payload)
        theirs.pool.send(ours.peer, result(number, payload), payload)
        await asyncio.sleep(0)
        if number == 5:
            ours.pool.reconsider(theirs.peer, [theirs.address])
            assert ours.pool.path(theirs.peer) is PathKind.RELAYED
    await until(lambda: len(theirs.frames) == len(ours.frames) == 20)
    for node in (ours, theirs):
        assert [m.sequence for _, m, _ in node.frames if isinstance(m, StepResult)] == list(range(20))
    await swarm.settle()
    for node in (ours, theirs):
        (view,) = node.pool.links()
        assert view.path is PathKind.MEMORY
        assert view.num_resumed == 1
        assert len(node.pool._connections[view.peer].ends) == 1
    assert ours.closed == theirs.closed == []


async def test_round_trip_of_a_new_path_is_its_own(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(has_relay=True), await swarm.node(has_relay=True)
    await ours.pool.connect(theirs.peer, [theirs.relayed_address])
    await swarm.settle()
    swarm.world.tamper(theirs.host, ours.host, lambda message: (message,) if len(message) > 60 else ())  # no pong
    ours.pool.reconsider(theirs.peer, [theirs.address])
    await until(lambda: ours.pool.path(theirs.peer) is PathKind.MEMORY)
    assert ours.pool.round_trip_s(theirs.peer) is None


async def test_better_path_is_tried_again_until_it_works_at_longer_and_longer_intervals(swarm: Swarm) -> None:
    ours, theirs = await swarm.node(has_relay=True), await swarm.node(has_relay=True)
    listener = swarm.world.listeners.pop(theirs.address)
    await ours.pool.connect(theirs.peer, [theirs.address, theirs.relayed_address])
    await swarm.settle()
    connection = ours.pool._connections[theirs.peer]
    attempts = [connection.upgrade_at]
    for _ in range(200):
        await swarm.advance(TICK_S)
        if connection.upgrade_at != attempts[-1]:
            attempts.append(connection.upgrade_at)
    gaps = [round(after - before) for before, after in itertools.pairwise(attempts)]
    assert gaps[:4] == [10, 20, 40, 80][: len(gaps[:4])]
    assert len(gaps) >= 3
    swarm.world.listeners[theirs.address] = listener
    await swarm.advance(attempts[-1] - swarm.clock.now + TICK_S)
    assert ours.pool.path(theirs.peer) is PathKind.MEMORY


async def test_link_without_a_hello_ends_in_time(swarm: Swarm) -> None:
    _, theirs = await swarm.pair()
    silent = MemoryNetwork(swarm.world, Identity.generate(), "silent")
    link = await silent.dial(theirs.address, expect=None, timeout_s=PATIENCE_S)
    await swarm.settle()
    await swarm.advance(HELLO_TIMEOUT_S + TICK_S)
    async with asyncio.timeout(PATIENCE_S):
        await link.wait_closed()
    assert theirs.pool.counters["refused_no-hello"] == 1
    assert theirs.pool.counters["peers"] == 1


async def test_gate_is_asked_before_a_dial_and_about_traffic(swarm: Swarm) -> None:
    theirs = await swarm.node()
    gate = Doorman()
    ours = await swarm.node(gate=gate)
    gate.refused_peers.add(theirs.peer)
    with pytest.raises(PeerUnreachable, match="banned"):
        await ours.pool.connect(theirs.peer, [theirs.address])
    with pytest.raises(PeerUnreachable, match="banned"):
        await ours.pool.identify(theirs.address)
    gate.refused_peers.clear()
    await ours.pool.connect(theirs.peer, [theirs.address])
    for number in range(3):
        theirs.pool.send(ours.peer, StatusRequest(number))
    await swarm.settle()
    await swarm.advance(TICK_S)
    assert gate.traffic == [(theirs.peer, 3)]
    gate.max_messages = 2
    for number in range(3):
        theirs.pool.send(ours.peer, StatusRequest(number))
    await swarm.settle()
    await swarm.advance(TICK_S)
    assert isinstance(ours.closed[0][1], RemoteProtocolError)
    assert isinstance(theirs.closed[0][1], PeerClosed)


@pytest.mark.parametrize("kind", ["pings", "acks", "bytes"])
async def test_segments_that_no_frame_explains_count_as_messages(swarm: Swarm, kind: str) -> None:
    gate = Doorman()
    theirs = await swarm.node(gate=gate)
    ours = await swarm.node()
    await ours.pool.connect(theirs.peer, [theirs.address])
    await swarm.settle()
    gate.max_messages = 500
    connection = ours.pool._connections[theirs.peer]
    end = connection.end
    assert end is not None
    payload = bytes(100_000)
    ours.pool.send(theirs.peer, result(1, payload), payload)  # honest, in several segments
    await swarm.settle()
    await swarm.advance(TICK_S)
    assert gate.traffic == [(ours.peer, 1)]
    if kind == "bytes":
        connection.transfer.queue(Lane.BULK, None, bytes(2000))
    for number in range(1000):
        if kind == "bytes":
            end.link.write(connection.transfer.next_segment(1) or b"")
        elif kind == "acks":
            end.post_ack()
        else:
            end.post(Ping(number))
    await until(lambda: theirs.pool._connections[ours.peer].sealed_in[0] > 1000)
    await swarm.advance(TICK_S)
    assert isinstance(theirs.closed[0][1], RemoteProtocolError)
    assert (theirs.pool.counters.get("refused_too-many-pings", 0) > 700) is (kind == "pings")


async def test_dropped_peer_hears_why(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    ours.pool.drop(theirs.peer, "banned")
    await until(lambda: bool(theirs.closed))
    assert "banned" in str(theirs.closed[0][1])
    assert "banned" in str(ours.closed[0][1])


async def test_uploads_keep_to_their_limit_and_urgent_frames_go_first(swarm: Swarm) -> None:
    ours = await swarm.node(max_upload_Bps=100_000.0)
    first, second = await swarm.node(), await swarm.node()
    for node in (first, second):
        await ours.pool.connect(node.peer, [node.address])
    await swarm.advance(TICK_S)
    started, began = ours.pool.counters["bytes_out"], swarm.clock.now
    payload = bytes(150_000)
    ours.pool.send(first.peer, result(1, payload), payload)
    ours.pool.send(second.peer, StatusRequest(1))
    urgent_at = None
    while not first.frames:
        swarm.clock.now += 0.01
        ours.pool._upload_due()
        await swarm.settle()
        spent = ours.pool.counters["bytes_out"] - started
        assert spent <= 100_000.0 * (swarm.clock.now - began) + 20_000
        if second.frames and urgent_at is None:
            urgent_at = swarm.clock.now
    assert urgent_at is not None
    assert urgent_at - began < 0.2
    assert 1.3 < swarm.clock.now - began < 1.8


@pytest.mark.parametrize(
    "change",
    [
        lambda message: (message, message),
        lambda message: (bytes([message[0] ^ 1]) + message[1:],),
        lambda message: (message[:-1],),
    ],
    ids=["replayed", "changed", "truncated"],
)
async def test_tampering_costs_that_link_only_and_is_counted(
    swarm: Swarm, change: Callable[[bytes], tuple[bytes, ...]]
) -> None:
    ours, theirs = await swarm.pair()
    third = await swarm.node()
    await third.pool.connect(theirs.peer, [theirs.address])
    swarm.world.tamper(ours.host, theirs.host, change)
    ours.pool.send(theirs.peer, StatusRequest(1))
    ours.pool.send(theirs.peer, StatusRequest(2))
    await until(lambda: bool(theirs.closed))
    ((peer, error),) = theirs.closed
    assert peer == ours.peer
    assert isinstance(error, RemoteProtocolError)
    assert theirs.pool.counters["refused_replayed-or-forged"] == 1
    third.pool.send(theirs.peer, StatusRequest(3))
    await until(lambda: (third.peer, StatusRequest(3), b"") in theirs.frames)


async def test_malformed_frame_costs_that_link_only_and_is_counted(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    ours.pool.send(theirs.peer, CloseSession(bytes(16), 0), b"a payload where none belongs")
    await until(lambda: bool(theirs.closed) and bool(ours.closed))
    assert isinstance(theirs.closed[0][1], RemoteProtocolError)
    assert isinstance(ours.closed[0][1], PeerClosed)
    assert theirs.pool.counters["refused_malformed"] == 1


async def test_failing_handler_costs_one_link_and_its_log_quotes_nothing(swarm: Swarm) -> None:
    def fail(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        raise ValueError("a secret prompt")

    theirs = await swarm.node(on_frame=fail)
    ours, third = await swarm.node(), await swarm.node()
    for node in (ours, third):
        await node.pool.connect(theirs.peer, [theirs.address])
    with capture_logs() as logs:
        ours.pool.send(theirs.peer, StatusRequest(1))
        await until(lambda: bool(theirs.closed))
    assert isinstance(theirs.closed[0][1], LocalProtocolError)
    assert [entry["error"] for entry in logs] == ["ValueError"]
    assert "secret" not in repr(logs) + str(theirs.closed)
    assert theirs.pool.is_connected(third.peer)


async def test_reason_that_a_handler_gives_is_the_reason_of_the_end(swarm: Swarm) -> None:
    def refuse(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        raise RemoteProtocolError(peer, "a step of a session that is not yours")

    theirs, ours = await swarm.node(on_frame=refuse), await swarm.node()
    await ours.pool.connect(theirs.peer, [theirs.address])
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: bool(theirs.closed))
    assert "not yours" in str(theirs.closed[0][1])


async def test_goodbye_carries_its_reason(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    ours.pool.send(theirs.peer, StatusRequest(1))
    await ours.pool.aclose("maintenance until noon")
    await ours.pool.aclose()
    await until(lambda: bool(theirs.closed))
    assert theirs.frames == [(ours.peer, StatusRequest(1), b"")]
    ((_, error),) = theirs.closed
    assert isinstance(error, PeerClosed)
    assert "maintenance until noon" in str(error)
    with pytest.raises(LocalProtocolError):
        await ours.pool.connect(theirs.peer, [theirs.address])


async def test_number_of_links_is_bounded(swarm: Swarm) -> None:
    small = await swarm.node(max_links=1)
    first, second = await swarm.node(), await swarm.node()
    await first.pool.connect(small.peer, [small.address])
    with pytest.raises(PeerUnreachable, match="as many links"):
        await second.pool.connect(small.peer, [small.address])
    assert small.pool.counters["refused_too-many-links"] == 1
    assert first.closed == second.closed == []
    with pytest.raises(ResourceExhausted):
        await small.pool.identify(second.address)


async def test_full_pool_gives_up_the_peer_that_has_only_pinged_for_longest(swarm: Swarm) -> None:
    small = await swarm.node(max_links=3)
    busy, idle, idle_since_later, newcomer, late = [await swarm.node() for _ in range(5)]
    for node in (busy, idle, idle_since_later):
        await node.pool.connect(small.peer, [small.address])
    idle_since_later.pool.send(small.peer, StatusRequest(1))
    await swarm.advance(IDLE_AFTER_S - 1.0)
    busy.pool.send(small.peer, StatusRequest(1))
    await swarm.advance(2.0)
    await newcomer.pool.connect(small.peer, [small.address])
    await until(lambda: bool(idle.closed))
    await swarm.settle()
    assert [peer for peer, _ in small.closed] == [idle.peer]
    assert isinstance(small.closed[0][1], PeerClosed)
    assert small.pool.is_connected(newcomer.peer)
    assert small.pool.counters["links"] == 3
    assert await small.pool.identify(late.address) == late.peer
    assert [peer for peer, _ in small.closed] == [idle.peer, idle_since_later.peer]
    with pytest.raises(ResourceExhausted):
        await small.pool.identify(idle.address)
    assert busy.closed == newcomer.closed == []


async def test_full_pool_that_drops_a_peer_while_it_looks_for_room_goes_on(swarm: Swarm) -> None:
    gate = Doorman()
    small = await swarm.node(max_links=3, gate=gate)
    loud, *others = [await swarm.node() for _ in range(4)]
    for node in (loud, *others[:2]):
        await node.pool.connect(small.peer, [small.address])
        await swarm.settle()
    gate.max_messages = 5
    for number in range(10):
        loud.pool.send(small.peer, StatusRequest(number))
    await swarm.settle()
    await small.pool.connect(others[2].peer, [others[2].address])
    assert [peer for peer, _ in small.closed] == [loud.peer]
    assert small.pool.counters["links"] == 3


async def test_bug_above_the_pool_does_not_end_what_watches_all_peers(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    other = await swarm.node()
    await ours.pool.connect(other.peer, [other.address])
    await swarm.settle()

    def fail_with(peer: PeerId, error: FusionError) -> None:
        raise RuntimeError("a secret")

    ours.pool._on_closed = fail_with
    for peer in (theirs, other):
        swarm.world.black_hole(ours.host, peer.host)
    with capture_logs() as logs:
        await swarm.advance(DEAD_AFTER_S + RESUME_S + 2 * TICK_S)
    assert ours.pool.counters["peers"] == 0
    failures = [log for log in logs if log["log_level"] == "error"]
    assert [log["error"] for log in failures] == ["RuntimeError"] * 2
    assert "secret" not in str(logs)


async def test_full_pool_keeps_idle_peers_that_are_needed(swarm: Swarm) -> None:
    small = await swarm.node(max_links=1, is_needed=lambda peer: True)
    idle, newcomer = await swarm.node(), await swarm.node()
    await idle.pool.connect(small.peer, [small.address])
    await swarm.advance(IDLE_AFTER_S * 2)
    with pytest.raises(PeerUnreachable, match="as many links"):
        await newcomer.pool.connect(small.peer, [small.address])
    assert small.pool.is_connected(idle.peer)
    assert small.pool.counters["refused_too-many-links"] == 1


async def test_longest_unfinished_frame_goes_when_all_of_them_hold_too_much(swarm: Swarm) -> None:
    theirs = await swarm.node(max_unfinished_bytes=1 << 20)
    first, second = await swarm.node(), await swarm.node()
    payload = bytes(900_000)
    for node in (first, second):
        await node.pool.connect(theirs.peer, [theirs.address])
        await swarm.settle()
        num_left = itertools.count(-11)
        swarm.world.tamper(node.host, theirs.host, lambda segment, left=num_left: (segment,) if next(left) < 0 else ())  # type: ignore[misc]
        before = theirs.pool.counters["bytes_in"]
        node.pool.send(theirs.peer, result(1, payload), payload)
        await until(lambda before=before: theirs.pool.counters["bytes_in"] > before + 700_000)  # type: ignore[misc]
        assert theirs.closed == []
        await swarm.advance(TICK_S)
    ((peer, error),) = theirs.closed
    assert peer == first.peer
    assert isinstance(error, PeerTimeout)
    assert theirs.pool.is_connected(second.peer)
    assert theirs.pool.counters["refused_unfinished-frame"] == 1


async def park(swarm: Swarm, node: Node, receiver: Node, num_bytes: int) -> None:
    """Sends so much of a frame and then no more of it, though other frames still come."""
    await node.pool.connect(receiver.peer, [receiver.address])
    await swarm.settle()
    transfer = node.pool._connections[receiver.peer].transfer
    next_segment, payload = transfer.next_segment, bytes(900_000)

    def hold_back(max_bytes: int) -> bytes | None:
        is_enough = transfer.next_lane() == Lane.DECODE and transfer.sent_bytes >= num_bytes
        return None if is_enough else next_segment(max_bytes)

    transfer.next_segment = hold_back  # type: ignore[method-assign, assignment]
    node.pool.send(receiver.peer, result(1, payload), payload)
    await swarm.settle()


async def test_other_frames_do_not_make_an_unfinished_one_look_younger(swarm: Swarm) -> None:
    theirs = await swarm.node(max_unfinished_bytes=1 << 20)
    hostile, honest = await swarm.node(), await swarm.node()
    await park(swarm, hostile, theirs, 600_000)
    await swarm.advance(TICK_S)
    await park(swarm, honest, theirs, 300_000)
    await swarm.advance(TICK_S)
    hostile.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: len(theirs.frames) == 1)
    await swarm.advance(TICK_S)
    late = await swarm.node()
    await park(swarm, late, theirs, 300_000)
    await swarm.advance(TICK_S)
    assert [peer for peer, _ in theirs.closed] == [hostile.peer]
    assert theirs.pool.is_connected(honest.peer)


async def test_frame_that_all_others_wait_for_must_make_progress(swarm: Swarm) -> None:
    theirs = await swarm.node(max_unfinished_bytes=1 << 20)
    alone, hostile = await swarm.node(), await swarm.node()
    await park(swarm, alone, theirs, 400_000)
    await swarm.advance(2 * FRONT_S)
    assert theirs.closed == []  # there is memory enough
    await park(swarm, hostile, theirs, 300_000)
    await swarm.advance(FRONT_S - TICK_S)
    assert theirs.closed == []
    await swarm.advance(3 * TICK_S)
    assert [peer for peer, _ in theirs.closed] == [alone.peer]
    assert theirs.pool.counters["refused_unfinished-frame"] == 1
    await swarm.advance(FRONT_S)
    assert theirs.pool.is_connected(hostile.peer)  # memory is not short any more


async def test_listening_twice_on_one_port_is_refused(swarm: Swarm) -> None:
    ours = await swarm.node()
    with pytest.raises(AddressInUse):
        await ours.pool.listen(ours.address)
    assert await ours.pool.listen(f"{ours.host}:0") != ours.address


async def test_counters_add_up_over_links_that_are_gone(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    before = dict(ours.pool.counters)
    ours.pool.send(theirs.peer, StatusRequest(1))
    await until(lambda: len(theirs.frames) == 1)
    swarm.world.cut(ours.host, theirs.host)
    await swarm.settle()
    ours.pool.drop(theirs.peer, "enough")
    await until(lambda: bool(ours.closed) and bool(theirs.closed))
    await swarm.settle()
    counters = ours.pool.counters
    assert counters["frames_out"] == before["frames_out"] + 1 == theirs.pool.counters["frames_in"]
    assert counters["bytes_out"] == theirs.pool.counters["bytes_in"]
    assert counters["links"] == counters["peers"] == 0


async def test_ping_of_a_peer_is_answered_and_never_shown(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    end = ours.pool._connections[theirs.peer].end
    assert end is not None
    end.post(Ping(4_000_000_000))
    await swarm.settle()
    assert theirs.frames == ours.frames == []
    assert ours.pool.counters["refused_unexpected-pong"] == 1


async def test_reason_of_a_goodbye_is_shown_without_its_control_characters(swarm: Swarm) -> None:
    ours, theirs = await swarm.pair()
    await theirs.pool.aclose("\x1b[2J\x1b]0;you are root now\x07" + "x" * 400)
    await until(lambda: bool(ours.closed))
    text = str(ours.closed[0][1])
    assert text.isprintable()
    assert "?[2J?]0;you are root now?x" in text
    assert len(text) < 400
