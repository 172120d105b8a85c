"""What is changed in yamux, between two real hosts on loopback (traps 33 and 35 of docs/protocol-network.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE

from fusion_node.errors import PeerError
from p2p.libp2p_adapter.connections import close_if_dead, stream_on
from p2p.libp2p_adapter.messages import read_exactly, translated
from p2p.libp2p_adapter.muxing import WINDOW_BYTES
from tests.libp2p_hosts import LoopbackHost

PROTOCOL = TProtocol("/fusion/test/1")
PATIENCE_S = 20.0


@pytest.fixture
async def hosts() -> AsyncIterator[list[LoopbackHost]]:
    hosts = [await LoopbackHost().start() for _ in range(2)]
    yield hosts
    for host in hosts:
        await host.aclose()


async def connection_with(node: Any, other: LoopbackHost) -> Any:
    return await node._dialer.connection_for(ID.from_base58(other.peer), other.address)


async def ignore_stream(stream: Any) -> None:
    await trio.sleep_forever()


def unread(node: Any) -> int:
    """Bytes that have come and that nobody has read, on all streams of all connections."""
    connections = node._host.get_network().get_connections()
    return sum(len(buffer) for each in connections for buffer in each.muxed_conn.stream_buffers.values())


async def test_a_peer_that_nobody_reads_stops_at_its_window(hosts: list[LoopbackHost]) -> None:
    reader, writer = hosts
    peak = 0

    async def ignore(node: Any) -> None:
        node._host.set_stream_handler(PROTOCOL, ignore_stream)

    async def flood(node: Any) -> None:
        stream = await stream_on(node._host, await connection_with(node, reader), PROTOCOL)
        with trio.move_on_after(1.0):
            await stream.write(bytes(8 * WINDOW_BYTES))

    async def measure(node: Any) -> int:
        return unread(node)

    await reader.call(ignore)
    await writer.call(flood)
    peak = await reader.call(measure)
    assert 0 < peak <= DEFAULT_WINDOW_SIZE


async def test_what_is_sent_beyond_the_window_is_not_kept(hosts: list[LoopbackHost]) -> None:
    reader, writer = hosts

    async def ignore(node: Any) -> None:
        node._host.set_stream_handler(PROTOCOL, ignore_stream)

    async def cheat(node: Any) -> None:
        stream = await stream_on(node._host, await connection_with(node, reader), PROTOCOL)
        stream.muxed_stream.send_window = 1 << 30
        await stream.write(bytes(8 * WINDOW_BYTES))

    async def measure(node: Any) -> int:
        return unread(node)

    await reader.call(ignore)
    await writer.call(cheat)
    assert await reader.call(measure) <= WINDOW_BYTES + DEFAULT_WINDOW_SIZE


async def test_bulk_goes_through_in_full(hosts: list[LoopbackHost]) -> None:
    reader, writer = hosts
    size = 5 * WINDOW_BYTES + 12_345

    async def serve(node: Any) -> None:
        async def swallow(stream: Any) -> None:
            await read_exactly(stream, size)
            await stream.write(b"!")

        node._host.set_stream_handler(PROTOCOL, swallow)

    async def send(node: Any) -> bytes:
        stream = await stream_on(node._host, await connection_with(node, reader), PROTOCOL)
        with trio.fail_after(PATIENCE_S):
            await stream.write(bytes(size))
            return await read_exactly(stream, 1)

    await reader.call(serve)
    assert await writer.call(send) == b"!"


async def test_a_cancelled_write_does_not_end_the_connection(hosts: list[LoopbackHost]) -> None:
    """The library encrypts a frame, and may then be cancelled before it is sent: the other end cannot decrypt more."""
    reader, writer = hosts

    async def serve(node: Any) -> None:
        async def echo(stream: Any) -> None:
            try:
                while True:
                    await stream.write(await stream.read(1 << 16))
            except StreamError:
                return

        node._host.set_stream_handler(PROTOCOL, echo)

    async def try_out(node: Any) -> bytes:
        connection = await connection_with(node, reader)
        for steps in range(40):
            stream = await stream_on(node._host, connection, PROTOCOL)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, bytes(100_000))
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await stream.reset()
        stream = await stream_on(node._host, connection, PROTOCOL)
        await stream.write(b"still here")
        return await read_exactly(stream, 10)

    await reader.call(serve)
    assert await writer.call(try_out) == b"still here"


async def test_a_connection_that_answers_is_not_taken_for_dead(hosts: list[LoopbackHost]) -> None:
    reader, writer = hosts

    async def look(node: Any) -> bool:
        connection = await connection_with(node, reader)
        await close_if_dead(node._host, connection)
        return bool(connection.is_closed)

    assert not await writer.call(look)


async def test_a_connection_through_which_nothing_comes_is_closed(hosts: list[LoopbackHost]) -> None:
    reader, writer = hosts

    async def look(node: Any) -> bool:
        connection = await connection_with(node, reader)

        async def swallow(data: bytes) -> None: ...

        connection.muxed_conn.secured_conn.write = swallow
        await close_if_dead(node._host, connection)
        return bool(connection.is_closed)

    assert await writer.call(look)


async def test_nobody_there_is_an_error_of_ours(hosts: list[LoopbackHost]) -> None:
    _, writer = hosts
    stranger = LoopbackHost()

    async def look(node: Any) -> None:
        with translated(stranger.peer):
            await node._dialer.connection_for(ID.from_base58(stranger.peer), None)

    with pytest.raises(PeerError, match="no connection"):
        await writer.call(look)
