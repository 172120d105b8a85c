"""The proxies that tests and benchmarks put in front of nodes: nothing is lost, changed or early that is not to be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.live.link_proxy import PIECE_BYTES, USER, LinkProxies

DELAY_S = 0.05
NODE = "node"


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    """The port of somebody who sends back what comes."""

    tasks = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        server.close()
        for _ in range(5):  # what was accepted last begins in a later turn of the loop
            await asyncio.sleep(0)
        await asyncio.gather(*(task for task in tasks if task is not None))


@pytest.fixture
def proxies(echo: int) -> Iterator[LinkProxies]:
    """Gone before whoever they lead to: they look whether it still listens."""
    with LinkProxies() as proxies:
        yield proxies


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def dial(proxies: LinkProxies, echo: int) -> tuple[Ends, int]:
    """A connection through the proxy of whoever listens at ``echo``, and the proxy's port."""
    port = await asyncio.to_thread(proxies.listen_for, NODE, "127.0.0.1", echo)
    return await asyncio.open_connection("127.0.0.1", port), port


async def test_bytes_through_a_shaped_line_are_the_same_and_not_early(proxies: LinkProxies, echo: int) -> None:
    rate_Bps = 4e6
    proxies.shape(USER, NODE, delay_s=DELAY_S)
    proxies.shape(NODE, USER, delay_s=DELAY_S)
    proxies.access(NODE, up_Bps=rate_Bps, down_Bps=None)
    (reader, writer), _ = await dial(proxies, echo)
    sent = os.urandom(600_000)
    began = time.monotonic()
    writer.write(sent)
    assert await reader.readexactly(len(sent)) == sent
    assert time.monotonic() - began >= 2 * DELAY_S + (len(sent) - PIECE_BYTES) / rate_Bps
    writer.close()
    assert await reader.read() == b""


async def test_held_bytes_come_when_they_are_released(proxies: LinkProxies, echo: int) -> None:
    (reader, writer), _ = await dial(proxies, echo)
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    proxies.hold(NODE, USER, num_bytes=10, then=lambda: loop.call_soon_threadsafe(held.set))
    writer.write(b"0123456789")
    await held.wait()
    assert proxies.line(USER, NODE).num_bytes == 10
    assert reader._buffer == b""  # type: ignore[attr-defined]
    proxies.release(NODE, USER)
    assert await reader.readexactly(10) == b"0123456789"
    writer.close()


async def test_reset_reaches_both_and_a_new_connection_may_be_made_unless_it_is_cut(
    proxies: LinkProxies, echo: int
) -> None:
    (reader, writer), port = await dial(proxies, echo)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    assert proxies.reset(USER, NODE) == 1
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    again, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"again")
    assert await again.readexactly(5) == b"again"
    assert proxies.cut(NODE, USER) == 1
    with pytest.raises(ConnectionResetError):
        await again.read()
    writer.close()
    with socket.socket() as refused, pytest.raises(ConnectionResetError):  # when it is made, or at its first byte
        refused.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(refused, ("127.0.0.1", port))
        await loop.sock_recv(refused, 1)
    proxies.mend()
    mended, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"mended")
    assert await mended.readexactly(6) == b"mended"
    writer.close()


async def test_one_bit_of_a_large_piece_is_turned_over_once(proxies: LinkProxies, echo: int) -> None:
    (reader, writer), _ = await dial(proxies, echo)
    proxies.spoil(NODE, USER, num_bytes=100)
    num_turned = []
    for size in (10, 100, 100):
        writer.write(bytes(size))
        num_turned.append(sum(byte.bit_count() for byte in await reader.readexactly(size)))
    assert num_turned == [0, 1, 0]
    writer.close()
