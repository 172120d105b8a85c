"""The child processes of the link measurement: ways to carry messages between two processes, all with one interface.

    python -m benchmarks.network.contenders serve NAME           prints the address
    python -m benchmarks.network.contenders client NAME ADDRESS  reads commands, answers each with one line of JSON

A message whose first byte is ECHO comes back as it is. Those with ONE_WAY are counted, and answered with one short
message per ACK_BYTES; the client has at most WINDOW_BYTES on the way that are not answered yet. That is the same for
all, so that none of them is measured against its own buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

ECHO, ONE_WAY = 0, 1
ACK_BYTES = 1 << 20
WINDOW_BYTES = 8 << 20
ACK = bytes([ECHO]) + bytes(7)

Data = bytes | memoryview
Send = Callable[[bytes], Awaitable[None] | None]
"""Takes a message; an awaitable means that the sender has to wait before the next one."""

OnMessage = Callable[[Data], None]
"""Of a client. Called with each message."""

Connect = Callable[[str, OnMessage], Awaitable[Send]]
Serve = Callable[[], Awaitable[str]]


class Server:
    """What a server does with one connection's messages."""

    def __init__(self) -> None:
        self._unanswered_bytes = 0

    def answer(self, data: Data) -> bytes | None:
        """The message to send back, if any."""
        if data[0] == ECHO:
            return bytes(data)
        self._unanswered_bytes += len(data)
        if self._unanswered_bytes < ACK_BYTES:
            return None
        self._unanswered_bytes -= ACK_BYTES
        return ACK


# The pool of links: what the program itself uses.


def _message(data: bytes) -> Any:
    from p2p.messages import StepResult, TensorMeta

    return StepResult(bytes(16), 0, 0, (1,), TensorMeta("f32", 1, len(data) // 4), ())


async def serve_pool() -> str:
    from p2p.identity import Identity
    from p2p.links import LinkPool
    from p2p.websocket import WebSocketNetwork

    us, server = Identity.generate(), Server()

    def on_frame(peer: Any, message: Any, payload: memoryview) -> None:
        answer = server.answer(payload)
        if answer is not None:
            pool.send(peer, _message(answer), answer)

    pool = LinkPool(WebSocketNetwork(us), us.peer_id, on_frame=on_frame, on_closed=lambda peer, error: None)
    return await pool.listen("127.0.0.1:0")


async def connect_pool(address: str, on_message: OnMessage) -> Send:
    from p2p.identity import Identity
    from p2p.links import LinkPool
    from p2p.websocket import WebSocketNetwork

    us = Identity.generate()
    pool = LinkPool(
        WebSocketNetwork(us),
        us.peer_id,
        on_frame=lambda peer, message, payload: on_message(payload),
        on_closed=lambda peer, error: None,
    )
    peer = await pool.identify(address)
    return lambda data: pool.send(peer, _message(data), data)


# aiohttp's WebSocket as it is, and with the cipher of our links on top.


class _Plain:
    def seal(self, data: bytes) -> bytes:
        return data

    def open(self, data: bytes) -> bytes:
        return data


class _ChaCha:
    def __init__(self, *, is_client: bool) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        ours, theirs = (b"c", b"s") if is_client else (b"s", b"c")
        self._out, self._in = ChaCha20Poly1305(ours * 32), ChaCha20Poly1305(theirs * 32)
        self._num_out = self._num_in = 0

    def seal(self, data: bytes) -> bytes:
        self._num_out += 1
        return self._out.encrypt(self._num_out.to_bytes(12, "little"), data, None)

    def open(self, data: bytes) -> bytes:
        self._num_in += 1
        return self._in.decrypt(self._num_in.to_bytes(12, "little"), data, None)


async def _serve_websocket(make_cipher: Callable[[], Any]) -> str:
    from aiohttp import web

    async def handle(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(compress=False, max_msg_size=1 << 26)
        await ws.prepare(request)
        server, cipher = Server(), make_cipher()
        async for message in ws:
            answer = server.answer(cipher.open(message.data))
            if answer is not None:
                await ws.send_bytes(cipher.seal(answer))
        return ws

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"127.0.0.1:{runner.addresses[0][1]}"


async def _connect_websocket(address: str, on_message: OnMessage, cipher: Any) -> Send:
    import aiohttp

    session = aiohttp.ClientSession()
    ws = await session.ws_connect(f"ws://{address}/", max_msg_size=1 << 26)

    async def read() -> None:
        async for message in ws:
            on_message(cipher.open(message.data))

    _keep(read())
    return lambda data: ws.send_bytes(cipher.seal(data))


async def serve_websocket() -> str:
    return await _serve_websocket(_Plain)


async def connect_websocket(address: str, on_message: OnMessage) -> Send:
    return await _connect_websocket(address, on_message, _Plain())


async def serve_websocket_chacha() -> str:
    return await _serve_websocket(lambda: _ChaCha(is_client=False))


async def connect_websocket_chacha(address: str, on_message: OnMessage) -> Send:
    return await _connect_websocket(address, on_message, _ChaCha(is_client=True))


# A plain socket of asyncio: a length and the bytes.

_LENGTH = struct.Struct("<I")


async def _read_socket(reader: asyncio.StreamReader, on_message: OnMessage) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            (size,) = _LENGTH.unpack(await reader.readexactly(4))
            on_message(await reader.readexactly(size))


def _socket_sender(writer: asyncio.StreamWriter) -> Send:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(data: bytes) -> None:
        writer.write(_LENGTH.pack(len(data)))
        writer.write(data)
        await writer.drain()

    return send


async def serve_socket() -> str:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, send = Server(), _socket_sender(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(4))
                answer = server.answer(await reader.readexactly(size))
                if answer is not None:
                    waiting = send(answer)
                    assert waiting is not None
                    await waiting

    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=4 << 20)
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def connect_socket(address: str, on_message: OnMessage) -> Send:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4 << 20)
    _keep(_read_socket(reader, on_message))
    return _socket_sender(writer)


CONTENDERS: dict[str, tuple[Serve, Connect]] = {
    "pool": (serve_pool, connect_pool),
    "websocket": (serve_websocket, connect_websocket),
    "websocket+chacha20": (serve_websocket_chacha, connect_websocket_chacha),
    "socket": (serve_socket, connect_socket),
}

_kept: set[asyncio.Task[None]] = set()


def _keep(work: Any) -> None:
    _kept.add(asyncio.ensure_future(work))


class Client:
    """Measures one contender."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self._num_acks = 0
        self.send: Send

    def on_message(self, data: Data) -> None:
        self._num_acks += 1
        if not self._answered.done():
            self._answered.set_result(None)

    async def echo(self, num_bytes: int, count: int) -> list[float]:
        """Seconds of each echo."""
        data, times = bytes([ECHO]) + os.urandom(num_bytes - 1), []
        for _ in range(count):
            started = time.perf_counter()
            await self._ask(data)
            times.append(time.perf_counter() - started)
        return times

    async def one_way(self, num_bytes: int, count: int) -> list[float]:
        """Seconds until all messages have arrived, as a list of one."""
        data, sent_bytes = bytes([ONE_WAY]) + os.urandom(num_bytes - 1), 0
        self._num_acks = 0
        started = time.perf_counter()
        for _ in range(count):
            waiting = self.send(data)
            if waiting is not None:
                await waiting
            sent_bytes += num_bytes
            while sent_bytes - self._num_acks * ACK_BYTES > WINDOW_BYTES:
                await self._next_answer()
        while self._num_acks < count * num_bytes // ACK_BYTES:
            await self._next_answer()
        return [time.perf_counter() - started]

    async def _ask(self, data: bytes) -> None:
        self._answered = self._loop.create_future()
        waiting = self.send(data)
        if waiting is not None:
            await waiting
        await self._answered

    async def _next_answer(self) -> None:
        self._answered = self._loop.create_future()
        await self._answered


async def _serve(name: str) -> None:
    print(await CONTENDERS[name][0](), flush=True)
    await asyncio.Event().wait()


async def _client(name: str, address: str) -> None:
    client = Client()
    client.send = await CONTENDERS[name][1](address, client.on_message)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, num_bytes, count = line.split()
        measure = client.echo if what == "echo" else client.one_way
        print(json.dumps(await measure(int(num_bytes), int(count))), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[2]) if sys.argv[1] == "serve" else _client(*sys.argv[2:]))
