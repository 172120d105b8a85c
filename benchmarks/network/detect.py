"""How soon a lost peer is noticed: a killed process, a frozen one, and a path that swallows everything.

The peer is a process of its own. The black hole is a relay of TCP bytes in this process that stops relaying without
closing anything, which is what a dead router or a cut cable looks like from both ends. What is measured is the time
until ``on_closed`` of the pool is called, with something being sent to the peer all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.report import Check
from fusion_node.errors import FusionError, PeerError
from fusion_node.types import PeerId
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.messages import StatusRequest
from p2p.websocket import WebSocketNetwork

TARGETS_S = {"killed": 1.0, "frozen": 11.0, "black-holed": 11.0}
"""A killed process closes its sockets. For the others silence is all there is: suspicion after 4 s, and then the time
in which another way to the peer is looked for."""

SEND_EVERY_S = 0.2
MAX_WAIT_S = 40.0


class BlackHole:
    """Relays TCP until it is told to swallow: then it reads, accepts, and passes nothing on."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.swallows = False

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, their_writer), (their_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not self.swallows:
                    sink.write(data)
                    await sink.drain()
        if not self.swallows:
            sink.close()


async def notice_s(what: str) -> float:
    """Seconds from the event until the pool gives the peer up."""
    command = [sys.executable, "-m", "benchmarks.network.contenders", "serve", "pool"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    lost: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_closed(peer: PeerId, error: FusionError) -> None:
        if not lost.done():
            lost.set_result(time.perf_counter())

    us = Identity.generate()
    pool = LinkPool(WebSocketNetwork(us), us.peer_id, on_frame=lambda *_: None, on_closed=on_closed)
    hole = BlackHole(address)
    try:
        peer = await pool.identify(await hole.start() if what == "black-holed" else address)
        await pool.round_trip(peer)
        began = time.perf_counter()
        match what:
            case "killed":
                process.kill()
            case "frozen":
                process.send_signal(signal.SIGSTOP)
            case _:
                hole.swallows = True
        while not lost.done() and time.perf_counter() - began < MAX_WAIT_S:
            with contextlib.suppress(PeerError):
                pool.send(peer, StatusRequest(1))
            await asyncio.wait((lost,), timeout=SEND_EVERY_S)
        return lost.result() - began if lost.done() else float("nan")
    finally:
        await pool.aclose()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await hole.aclose()


async def _all_at_once() -> dict[str, float]:
    """They take next to no CPU, so that each may as well wait while the others do."""
    return dict(zip(TARGETS_S, await asyncio.gather(*map(notice_s, TARGETS_S)), strict=True))


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Each event several times."""
    repeats = 1 if quick else 5
    rounds = [asyncio.run(_all_at_once()) for _ in range(repeats)]
    seconds = {what: [found[what] for found in rounds] for what in TARGETS_S}
    checks = [
        Check(f"notice-{what}", f"a {what} peer is given up", statistics.median(values), "s", TARGETS_S[what], "<=")
        for what, values in seconds.items()
    ]
    return checks, {"notice_s": {what: [round(value, 3) for value in values] for what, values in seconds.items()}}
