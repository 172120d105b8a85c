"""The gate at the libp2p host: who is refused before anything is spent, or disconnected, or not dialled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest

from fusion_node.errors import PeerError, PeerUnreachable
from p2p.bans import Ban
from p2p.gate import PeerGate
from tests.libp2p_hosts import LoopbackHost

PATIENCE_S = 20.0

Start = Callable[[PeerGate], Awaitable[LoopbackHost]]


class CountingGate(PeerGate):
    """Also says when what it was told of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Counter[str] = Counter()

    def connected(self, host: str) -> None:
        super().connected(host)
        self.told["connected"] += 1

    def proven(self, host: str) -> None:
        super().proven(host)
        self.told["proven"] += 1

    def disconnected(self, host: str) -> None:
        super().disconnected(host)
        self.told["disconnected"] += 1


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_host(gate: PeerGate) -> LoopbackHost:
            host = LoopbackHost(gate=gate)
            stack.push_async_callback(host.aclose)
            return await host.start()

        yield start_host


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # of another thread, which sets no event here
            await asyncio.sleep(0.02)


async def connect(one: LoopbackHost, other: LoopbackHost) -> None:
    await one.call(lambda node: node.connect(other.peer, [other.address]))


async def is_refused(one: LoopbackHost, other: LoopbackHost) -> bool:
    try:
        await connect(one, other)
    except PeerUnreachable as error:
        return "not dialled: banned" in str(error)
    return False


async def test_slot_of_a_connection_is_given_back_when_it_ends(start: Start) -> None:
    gate = CountingGate()
    node, other = await start(gate), await start(PeerGate())
    for count in range(1, 5):
        await connect(other, node)
        await other.call(lambda host: host.disconnect(node.peer))
        await until(lambda count=count: gate.told["disconnected"] == count)  # type: ignore[misc]
    # A stranger who proves nothing gives its slots back as well.
    reader, writer = await asyncio.open_connection(node.address.host, node.address.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 8)  # as many as the first of them announces as a length
    await until(lambda: gate.told["disconnected"] == 5)
    assert gate.told == {"connected": 5, "proven": 5, "disconnected": 5}
    writer.close()
    await reader.read()


async def test_banned_host_is_refused_before_anything_is_spent(start: Start) -> None:
    gate = CountingGate()
    node, other = await start(gate), await start(PeerGate())
    await gate.change(ban=[Ban("127.0.0.1/32", 0.0, None)])
    with pytest.raises(PeerError):
        await connect(other, node)
    assert gate.told["connected"] == 0
    assert gate.refused["banned"] >= 1
    await gate.change(lift=["127.0.0.1/32"])
    await connect(other, node)


async def test_banned_peer_is_disconnected_and_not_dialled(start: Start) -> None:
    gate = CountingGate()
    node, other = await start(gate), await start(PeerGate())
    await connect(other, node)
    await gate.change(ban=[Ban(other.peer, 0.0, None)])
    await node.call(lambda host: host.drop_refused())
    await until(lambda: gate.told["disconnected"] == 1)
    async with asyncio.timeout(PATIENCE_S):
        # It connects once more, and that is over as soon as it has shown who it is. As long as it has not noticed the
        # end of the first connection, it takes that one for good.
        while gate.told["disconnected"] < 2:
            with suppress(PeerError):  # which may come before the dial has looked at what it has got
                await connect(other, node)
            await asyncio.sleep(0.02)
        # As long as the library has not tidied the closed connection up, it is found instead of being made anew.
        while not await is_refused(node, other):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.02)
