"""A pool of links and its gate: who is not dialled, who is dropped, and what happens to who sends too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from fusion_node.errors import FusionError, PeerClosed, PeerUnreachable, RemoteProtocolError
from fusion_node.types import PeerId
from p2p.bans import BREACHES_OF_A_PEER, Ban
from p2p.connection import LinkEnd
from p2p.gate import BANNED, PeerGate
from p2p.identity import Identity
from p2p.limits_core import Limits, Rate, Shares
from p2p.link_messages import Hello, encode_link_message
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.messages import StatusRequest
from p2p.transfer_core import NUM_LANES

PATIENCE_S = 10.0


@dataclass
class Node:
    peer: PeerId
    pool: LinkPool
    gate: PeerGate
    address: str = ""
    closed: list[FusionError] = field(default_factory=list)
    num_frames: int = 0


Start = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Nodes on hosts of one memory world; time stands still, and ``tick`` is the tests'."""
    world, count = MemoryWorld(), 0
    async with AsyncExitStack() as stack:

        async def start_node(limits: Limits | None = None) -> Node:
            nonlocal count
            count += 1
            host, identity = f"host{count}", Identity.generate()
            gate = PeerGate(limits=limits, clock=lambda: 0.0)

            def note(peer: PeerId, message: object, payload: memoryview) -> None:
                made.num_frames += 1

            pool = LinkPool(
                MemoryNetwork(world, identity, host, gate=gate),
                identity.peer_id,
                on_frame=note,
                on_closed=lambda peer, error: made.closed.append(error),
                gate=gate,
                clock=lambda: 0.0,
            )
            stack.push_async_callback(pool.aclose)
            made = Node(identity.peer_id, pool, gate)
            made.address = await pool.listen(f"{host}:0")
            return made

        yield start_node


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - any of many events of the pools under test
            await asyncio.sleep(0)


async def test_banned_peer_is_neither_dialled_nor_let_in(start: Start) -> None:
    ours, theirs = await start(), await start()
    await ours.gate.change(ban=[Ban(theirs.peer, 0.0, None)])
    with pytest.raises(PeerUnreachable, match=BANNED):
        await ours.pool.connect(theirs.peer, [theirs.address])
    with pytest.raises(PeerUnreachable):
        await theirs.pool.connect(ours.peer, [ours.address])
    assert not ours.pool.is_connected(theirs.peer)
    await ours.gate.change(lift=[theirs.peer])
    await ours.pool.connect(theirs.peer, [theirs.address])


async def test_ban_ends_the_link_with_its_peer_and_no_other(start: Start) -> None:
    ours, theirs, bystander = await start(), await start(), await start()
    ours.gate.on_change(ours.pool.drop_refused)
    for other in (theirs, bystander):
        await other.pool.connect(ours.peer, [ours.address])
    await until(lambda: ours.pool.is_connected(theirs.peer) and ours.pool.is_connected(bystander.peer))
    await ours.gate.change(ban=[Ban(theirs.peer, 0.0, None)])
    assert not ours.pool.is_connected(theirs.peer)
    assert [type(error) for error in ours.closed] == [PeerClosed]
    await until(lambda: bool(theirs.closed))
    bystander.pool.send(ours.peer, StatusRequest(1))
    await until(lambda: ours.num_frames == 1)
    assert not bystander.closed


async def test_peer_that_sends_more_than_it_may_is_dropped_and_banned_when_it_does_so_again(start: Start) -> None:
    ours = await start(Limits(Shares(messages_per_peer=Rate(per_s=0.0, burst=100.0))))
    theirs, bystander = await start(), await start()
    await bystander.pool.connect(ours.peer, [ours.address])
    for index in range(BREACHES_OF_A_PEER):
        assert ours.gate.refuse_peer(theirs.peer, "") is None
        await theirs.pool.connect(ours.peer, [ours.address])
        before = ours.num_frames
        for number in range(200):
            theirs.pool.send(ours.peer, StatusRequest(number))
        await until(lambda before=before: ours.num_frames == before + 200)  # type: ignore[misc]
        ours.pool.tick()
        await until(lambda index=index: len(ours.closed) == index + 1)  # type: ignore[misc]
        await until(lambda index=index: len(theirs.closed) == index + 1)  # type: ignore[misc]
    assert {type(error) for error in ours.closed} == {RemoteProtocolError}
    assert ours.gate.refuse_peer(theirs.peer, "") == BANNED
    assert ours.pool.is_connected(bystander.peer)


async def test_hello_on_a_link_that_is_lost_before_its_answer_is_followed_by_an_acknowledgement(start: Start) -> None:
    ours, theirs = await start(), await start()
    await theirs.pool.connect(ours.peer, [ours.address])
    await until(lambda: ours.pool.is_connected(theirs.peer))
    for number in range(20):
        ours.pool.send(theirs.peer, StatusRequest(number))
    await until(lambda: theirs.num_frames == 20)
    sending = ours.pool._connections[theirs.peer].transfer
    assert sending.retained_bytes > 0
    network = theirs.pool._network
    link = await network.dial(ours.address, expect=ours.peer, timeout_s=PATIENCE_S)
    await theirs.pool._begin(link, ours.address)
    link.abort("the path is gone")
    await until(lambda: len(theirs.pool._connections[ours.peer].ends) == 1)
    theirs.pool.tick()
    await until(lambda: sending.retained_bytes == 0)
    assert not theirs.closed


@pytest.mark.parametrize("is_known", [True, False])
async def test_hello_that_cannot_be_ends_the_connection_and_is_a_breach(start: Start, is_known: bool) -> None:
    ours, theirs = await start(), await start()
    for index in range(BREACHES_OF_A_PEER):
        assert ours.gate.refuse_peer(theirs.peer, "") is None
        tokens = b"12345678", b""
        if is_known:
            await theirs.pool.connect(ours.peer, [ours.address])
            await until(lambda: ours.pool.is_connected(theirs.peer))
            connection = theirs.pool._connections[ours.peer]
            tokens = connection.token, connection.their_token
        link = await theirs.pool._network.dial(ours.address, expect=ours.peer, timeout_s=PATIENCE_S)
        link.start(LinkEnd(theirs.pool, link, lambda: 0.0, address=ours.address))
        link.write(encode_link_message(Hello(*tokens, 7, (0, 0, 0, 1), (1000,) * NUM_LANES)))
        await link.wait_closed()
        assert theirs.peer not in ours.pool._connections
        if is_known:
            await until(lambda index=index: len(ours.closed) == len(theirs.closed) == index + 1)  # type: ignore[misc]
    assert {type(error) for error in ours.closed} == ({RemoteProtocolError} if is_known else set())
    assert ours.gate.refuse_peer(theirs.peer, "") == BANNED


async def test_both_sides_rank_a_link_alike_whoever_has_the_smaller_peer_id(start: Start) -> None:
    smaller, larger = sorted([await start(), await start()], key=lambda node: node.peer)
    for dialler, other in ((smaller, larger), (larger, smaller)):
        await dialler.pool.connect(other.peer, [other.address])
        await until(lambda: smaller.pool.is_connected(larger.peer) and larger.pool.is_connected(smaller.peer))
        ranks = [a.pool._connections[b.peer].rank for a, b in ((smaller, larger), (larger, smaller))]
        assert ranks == [(1, dialler is smaller)] * 2
        dialler.pool.drop(other.peer, "once more")
        await until(lambda: not smaller.pool.is_connected(larger.peer) and not larger.pool.is_connected(smaller.peer))
