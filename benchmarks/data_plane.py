"""Echo over the data plane against a bare aiohttp WebSocket, and against a libp2p stream for the record.

Every contender is a pair of processes on this machine, a server that echoes and a client that measures, all alive
through the whole run and idle while another is measured. Rounds are interleaved; the value of a check is the median
over the rounds of the ratio of medians.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.report import Check, main
from p2p.messages import StepResult, TensorMeta

SIZES = {"4 KiB": 4096, "1 MiB": 1 << 20}
CONTENDERS = ("pool", "websocket", "libp2p")
MAX_RATIO = 1.5
"""The price of identity, secrecy and integrity that we allow ourselves, in units of the bare WebSocket."""

Echo = Callable[[bytes], Awaitable[None]]


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Measures all contenders; see the head of this file."""
    rounds = 7 if quick else 25
    echoes = {"4 KiB": 150 if quick else 400, "1 MiB": 15 if quick else 40}
    seconds: dict[str, dict[str, list[float]]] = {size: {name: [] for name in CONTENDERS} for size in SIZES}
    cpu: dict[str, dict[str, list[float]]] = {size: {name: [] for name in CONTENDERS} for size in SIZES}
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(_Pair(name)) for name in CONTENDERS}
        for name, pair in pairs.items():
            # The large one first: it ends the mapping and unmapping of every receive buffer by the allocator, which
            # costs a fresh process 30 us per message and would flatter whoever is compared with it.
            pair.measure(1 << 20, 3)
            pair.measure(4096, 5 if name == "libp2p" else 200)
        for number in range(rounds):
            order = CONTENDERS if number % 2 else CONTENDERS[::-1]
            for size, num_bytes in SIZES.items():
                for name in order:
                    count = echoes[size] if name != "libp2p" else max(3, echoes[size] // 10)
                    median_s, cpu_s = pairs[name].measure(num_bytes, count)
                    seconds[size][name].append(median_s)
                    cpu[size][name].append(cpu_s)
    checks = [
        Check(
            id=f"pool-echo-{num_bytes}",
            what=f"{size} echo, link pool / bare WebSocket",
            value=statistics.median(
                ours / bare for ours, bare in zip(seconds[size]["pool"], seconds[size]["websocket"], strict=True)
            ),
            unit="x",
            target=MAX_RATIO,
            comparison="<=",
        )
        for size, num_bytes in SIZES.items()
    ]
    data = {
        size: {
            name: {
                "median_ms": round(statistics.median(seconds[size][name]) * 1e3, 4),
                "cpu_ms_both_sides": round(statistics.median(cpu[size][name]) * 1e3, 4),
                "round_medians_ms": [round(value * 1e3, 4) for value in seconds[size][name]],
            }
            for name in CONTENDERS
        }
        for size in SIZES
    }
    for size, by_name in data.items():
        print("   ".join([f"{size}:"] + [f"{name} {entry['median_ms']:.3f} ms" for name, entry in by_name.items()]))
    return checks, data


class _Pair:
    """Server and client process of one contender."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> _Pair:
        self._server = self._start("serve", self._name)
        self._client = self._start("client", self._name, self._line(self._server))
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.communicate()

    def measure(self, num_bytes: int, count: int) -> tuple[float, float]:
        """Median seconds of an echo, and CPU seconds of both processes per echo."""
        before = self._cpu_s()
        assert self._client.stdin is not None
        self._client.stdin.write(f"{num_bytes} {count}\n")
        self._client.stdin.flush()
        times = json.loads(self._line(self._client))
        return statistics.median(times), (self._cpu_s() - before) / count

    def _cpu_s(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in (self._server, self._client)]
        return sum(t.user + t.system for t in times)

    @staticmethod
    def _start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.data_plane", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError("a benchmark process ended early")
        return line


# What runs in the child processes.


async def _commands(echo: Echo) -> None:
    """Reads ``BYTES COUNT`` lines and answers each with the list of echo times."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        num_bytes, count = map(int, line.split())
        payload, times = os.urandom(num_bytes), []
        for _ in range(count):
            started = time.perf_counter()
            await echo(payload)
            times.append(time.perf_counter() - started)
        print(json.dumps(times), flush=True)


def _message(payload: bytes) -> StepResult:
    return StepResult(bytes(16), 0, 0, (1,), TensorMeta("f32", 1, len(payload) // 4), ())


async def _serve_pool() -> None:
    from p2p.identity import Identity
    from p2p.links import LinkPool
    from p2p.websocket import WebSocketNetwork

    us = Identity.generate()
    pool = LinkPool(
        WebSocketNetwork(us),
        us.peer_id,
        on_frame=lambda peer, message, payload: pool.send(peer, message, payload),
        on_closed=lambda peer, error: None,
    )
    print(await pool.listen("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()


async def _client_pool(address: str) -> None:
    from p2p.identity import Identity
    from p2p.links import LinkPool
    from p2p.websocket import WebSocketNetwork

    us = Identity.generate()
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[None] = loop.create_future()
    pool = LinkPool(
        WebSocketNetwork(us),
        us.peer_id,
        on_frame=lambda peer, message, payload: answered.set_result(None),
        on_closed=lambda peer, error: None,
    )
    peer = await pool.identify(address)

    async def echo(payload: bytes) -> None:
        nonlocal answered
        answered = loop.create_future()
        pool.send(peer, _message(payload), payload)
        await answered

    await _commands(echo)


async def _serve_websocket() -> None:
    from aiohttp import web

    async def echo(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(compress=False, max_msg_size=1 << 26)
        await ws.prepare(request)
        async for message in ws:
            await ws.send_bytes(message.data)
        return ws

    app = web.Application()
    app.router.add_get("/echo", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


async def _client_websocket(address: str) -> None:
    import aiohttp

    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"ws://{address}/echo", max_msg_size=1 << 26) as ws,
    ):

        async def echo(payload: bytes) -> None:
            await ws.send_bytes(payload)
            await ws.receive()

        await _commands(echo)


def _libp2p_host() -> Any:
    from libp2p import generate_new_ed25519_identity, new_host
    from libp2p.crypto.x25519 import create_new_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.network.config import ConnectionConfig
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
    from libp2p.security.noise.transport import Transport as Noise
    from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from multiaddr import Multiaddr

    keys, listen = generate_new_ed25519_identity(), [Multiaddr("/ip4/127.0.0.1/tcp/0")]
    host = new_host(
        key_pair=keys,
        listen_addrs=listen,
        sec_opt={TProtocol(NOISE_ID): Noise(keys, noise_privkey=create_new_key_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
        connection_config=ConnectionConfig(min_connections=0, low_watermark=0),
    )
    return host, listen


async def _read_exactly(stream: Any, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        data += await stream.read(num_bytes - len(data))
    return bytes(data)


_ECHO = "/fusion/benchmark-echo/1"


async def _serve_libp2p() -> None:
    import trio

    host, listen = _libp2p_host()

    async def echo(stream: Any) -> None:
        while True:
            length = await _read_exactly(stream, 4)
            await stream.write(length + await _read_exactly(stream, int.from_bytes(length, "big")))

    host.set_stream_handler(_ECHO, echo)
    async with host.run(listen):
        print(host.get_addrs()[0], flush=True)
        await trio.sleep_forever()


async def _client_libp2p(address: str) -> None:
    import trio
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    host, listen = _libp2p_host()
    async with host.run(listen):
        info = info_from_p2p_addr(Multiaddr(address))
        await host.connect(info)
        stream = await host.new_stream(info.peer_id, [_ECHO])
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            num_bytes, count = map(int, line.split())
            payload, times = os.urandom(num_bytes), []
            for _ in range(count):
                started = time.perf_counter()
                await stream.write(num_bytes.to_bytes(4, "big") + payload)
                await _read_exactly(stream, 4 + num_bytes)
                times.append(time.perf_counter() - started)
            print(json.dumps(times), flush=True)


def _child(role: str, name: str, *address: str) -> None:
    function = globals()[f"_{role}_{name}"]
    if name == "libp2p":
        import logging

        import trio

        logging.getLogger("libp2p").setLevel("CRITICAL")
        trio.run(function, *address)
    else:
        asyncio.run(function(*address))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("serve", "client"):
        _child(*sys.argv[1:])
    else:
        sys.exit(
            main(
                "data_plane",
                run,
                description="Echo of 4 KiB and 1 MiB between two processes: our pool of links, a bare "
                "aiohttp WebSocket and a libp2p stream. The full run takes about two minutes.",
            )
        )
