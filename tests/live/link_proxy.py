"""A userland network between processes of one machine: TCP proxies in front of nodes, which delay, limit, hold and cut.

Every node announces its proxy (``--announce``) and nothing else (tests.live.chaos_node), so whoever dials it comes
through here. Who that is, the owner of the connection's local port tells: a process that was
named with ``is_process``, or else the user. So each direction between two of them is a Line of its own.

When a node does not listen any more, its proxy does not either, so that it is missed here as it would be without.

What it emulates: one-way delays, rates of a line, and uplinks and downlinks that a process's lines share, first come
first served. A piece of PIECE_BYTES leaves when the uplink is free, and is there when it has passed all of it. What it
does not: losses, jitter, the window of TCP on a long path, and the round trip of a TCP handshake (a connection is
accepted here at once, and its first byte is as late as any).

It runs in a thread of its own, so that a busy event loop of whoever uses it delays nothing. All methods may be called
from any other thread; they return when done.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import psutil

USER = "user"
"""Whoever is no named process."""

PIECE_BYTES = 4096
"""A line is taken by so much at a time; at 100 Mbit/s for 0.3 ms."""

MAX_QUEUE_BYTES = 256 * 1024
"""On a line; beyond that the sender's TCP has to wait, as in front of a slow router."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER for a close that sends RST."""

T = TypeVar("T")


@dataclass(slots=True)
class Pipe:
    """Something that bytes go through one after the other: free again at ``free_at``."""

    rate_Bps: float | None = None
    free_at: float = 0.0

    def take(self, num_bytes: int, at: float) -> float:
        """When so many bytes are through that come at ``at``."""
        if self.rate_Bps is None:
            return at
        self.free_at = max(at, self.free_at) + num_bytes / self.rate_Bps
        return self.free_at


@dataclass(slots=True)
class Line:
    """One direction between two processes, for all their connections.

    Attributes:
        held: bytes that came since ``hold``; None while it is not held.
        wanted: how many of them to wait for.
        spoils_at: one bit of the next piece of at least so many bytes is turned over; None: nothing is changed.
    """

    delay_s: float = 0.0
    pipe: Pipe = field(default_factory=Pipe)
    held: int | None = None
    wanted: int = 0
    spoils_at: int | None = None
    is_held: threading.Event = field(default_factory=threading.Event)
    on_held: Callable[[], None] | None = None
    num_bytes: int = 0


class LinkProxies:
    """See the head of this file. Use ``with``."""

    def __init__(self) -> None:
        # select(2) has microseconds where epoll_wait(2) rounds up to the next millisecond.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="link-proxies", daemon=True)
        self._names: dict[int, str] = {}
        self._uplinks: dict[str, Pipe] = {}
        self._downlinks: dict[str, Pipe] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        self._connections: set[_Connection] = set()
        self._cut: set[frozenset[str]] = set()
        self._servers: list[asyncio.Server] = []
        self._servers_of: dict[tuple[str, int], asyncio.Server] = {}
        self.num_accepted = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen_for(self, name: str, host: str, port: int) -> int:
        """Accepts for the node that listens at ``port`` (control plane) and the next one (data plane) of ``host``.

        Returns the port here; the data plane's is the next one.
        """
        ours = free_port_pair("127.0.0.1")
        for offset in (0, 1):
            self._run(self._listen(name, host, port + offset, ours + offset))
        return ours

    def is_process(self, name: str, pid: int) -> None:
        """What this process dials comes from ``name``."""
        self._call(lambda: self._names.__setitem__(pid, name))

    def shape(self, sender: str, receiver: str, *, delay_s: float | None = None, rate_Bps: float | None = None) -> None:
        """From now on, this direction takes so long, and lets so much through. None leaves it as it is."""

        def do() -> None:
            line = self.line(sender, receiver)
            line.delay_s = line.delay_s if delay_s is None else delay_s
            line.pipe.rate_Bps = line.pipe.rate_Bps if rate_Bps is None else rate_Bps

        self._call(do)

    def access(self, name: str, *, up_Bps: float | None, down_Bps: float | None) -> None:
        """What all lines from, and to, ``name`` share; None for no limit."""

        def do() -> None:
            self._uplinks.setdefault(name, Pipe()).rate_Bps = up_Bps
            self._downlinks.setdefault(name, Pipe()).rate_Bps = down_Bps

        self._call(do)

    def hold(self, sender: str, receiver: str, *, num_bytes: int, then: Callable[[], None] | None = None) -> None:
        """Lets nothing through in this direction any more, until ``release``.

        Args:
            num_bytes: when so many bytes have come, ``is_held`` of the line is set.
            then: called once at that moment, in this thread.
        """

        def do() -> None:
            line = self.line(sender, receiver)
            line.held, line.wanted, line.on_held = 0, num_bytes, then
            line.is_held.clear()

        self._call(do)

    def release(self, sender: str, receiver: str) -> None:
        """What was held goes on."""

        def do() -> None:
            self.line(sender, receiver).held = None
            for connection in self._connections:
                for flow in connection.flows:
                    flow.go_on()

        self._call(do)

    def spoil(self, sender: str, receiver: str, *, num_bytes: int) -> None:
        """Turns over one bit of the next piece of at least so many bytes, as a router with bad memory does."""
        self._call(lambda: setattr(self.line(sender, receiver), "spoils_at", num_bytes))

    def reset(self, one: str, other: str) -> int:
        """Resets all connections between two (TCP RST, to both), and returns how many. New ones may be made."""
        return self._call(lambda: self._reset(frozenset((one, other))))

    def cut(self, one: str, other: str) -> int:
        """As ``reset``, and new connections are reset as soon as they are made, until ``mend``."""

        def do() -> int:
            self._cut.add(frozenset((one, other)))
            return self._reset(frozenset((one, other)))

        return self._call(do)

    def mend(self) -> None:
        """Nothing is cut or held any more."""

        def do() -> None:
            self._cut.clear()
            for line in self._lines.values():
                line.held, line.on_held = None, None
            for connection in self._connections:
                for flow in connection.flows:
                    flow.go_on()

        self._call(do)

    def line(self, sender: str, receiver: str) -> Line:
        """The direction, made if there was none. To be read only, unless in this thread."""
        return self._lines.setdefault((sender, receiver), Line())

    # in the thread

    def uplink(self, name: str) -> Pipe:
        return self._uplinks.setdefault(name, Pipe())

    def downlink(self, name: str) -> Pipe:
        return self._downlinks.setdefault(name, Pipe())

    async def _listen(self, name: str, host: str, port: int, ours: int) -> None:
        server = await self._loop.create_server(lambda: _Accepted(self, name, host, port), "127.0.0.1", ours)
        self._servers.append(server)
        self._servers_of[host, port] = server

    async def check(self, host: str, port: int) -> None:
        """Stops listening for a node that has stopped itself."""
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:  # refused, or reset by a listener that is just closing
            server = self._servers_of.pop((host, port), None)
            if server is not None:
                server.close()
        else:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def accepted(self, dialled: str, side: _Accepted) -> None:
        """Somebody has dialled a node."""
        self.num_accepted += 1
        peer = side.transport.get_extra_info("peername")
        if peer is None:  # gone already
            _abort(side.transport)
            return
        sender = self._owner(peer[1])
        if frozenset((sender, dialled)) in self._cut:
            _abort(side.transport)
            return
        connection = _Connection(self, sender, dialled, side)
        self._connections.add(connection)
        connection.task = self._loop.create_task(connection.dial(side.host, side.port))

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _owner(self, port: int) -> str:
        for pid, name in list(self._names.items()):
            with contextlib.suppress(psutil.Error):
                if any(each.laddr and each.laddr.port == port for each in psutil.Process(pid).net_connections("tcp")):
                    return name
        return USER

    def _reset(self, between: frozenset[str]) -> int:
        found = [each for each in self._connections if frozenset((each.sender, each.dialled)) == between]
        for each in found:
            each.abort()
        return len(found)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        own = asyncio.current_task()
        under_way = [task for task in asyncio.all_tasks() if task is not own]  # also of connections that are over
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*under_way, return_exceptions=True)
        for _ in range(3):  # transports close their sockets in a later turn of the loop
            await asyncio.sleep(0)

    def _call(self, do: Callable[[], T]) -> T:
        async def run() -> T:
            return do()

        return self._run(run())

    def _run(self, work) -> T:  # type: ignore[no-untyped-def]
        if threading.current_thread() is self._thread:
            raise RuntimeError("not from the proxies' own thread")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20.0)


class _Flow:
    """One direction of one connection."""

    def __init__(self, proxies: LinkProxies, sender: str, receiver: str, source: _Side) -> None:
        self._line = proxies.line(sender, receiver)
        self._up, self._down = proxies.uplink(sender), proxies.downlink(receiver)
        self._loop = asyncio.get_running_loop()
        self._source = source
        self.sink: asyncio.Transport | None = None
        self._queue: deque[tuple[float, bytes]] = deque()
        self._waiting: deque[bytes] = deque()
        """Held, or before there is a sink."""
        self._num_queued = 0
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False
        self._is_paused = False

    def take(self, data: bytes) -> None:
        """The sender has sent this."""
        line = self._line
        line.num_bytes += len(data)
        if line.spoils_at is not None and len(data) >= line.spoils_at:
            line.spoils_at = None
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if line.held is not None:
            line.held += len(data)
            if line.held >= line.wanted and not line.is_held.is_set():
                line.is_held.set()
                if line.on_held is not None:
                    line.on_held()
        self._num_queued += len(data)
        self._waiting.append(data)
        self.go_on()
        if self._num_queued > MAX_QUEUE_BYTES and not self._is_paused:
            self._is_paused = True
            self._source.transport.pause_reading()

    def end(self) -> None:
        """The sender sends no more."""
        self._has_ended = True
        self.go_on()

    def go_on(self) -> None:
        """What may go, goes."""
        if self.sink is None or self._line.held is not None:
            return
        now = self._loop.time()
        while self._waiting:
            data = self._waiting.popleft()
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                left = self._line.pipe.take(len(piece), self._up.take(len(piece), now))
                self._queue.append((self._down.take(len(piece), left + self._line.delay_s), piece))
        self._deliver()

    def _deliver(self) -> None:
        self._timer = None if self._timer is None else self._timer.cancel()
        if self.sink is None or self.sink.is_closing():
            return
        now = self._loop.time()
        while self._queue and self._queue[0][0] <= now:
            piece = self._queue.popleft()[1]
            self._num_queued -= len(piece)
            self.sink.write(piece)
        if self._queue:
            self._timer = self._loop.call_at(self._queue[0][0], self._deliver)
        elif self._has_ended and not self._waiting:
            self.sink.close()
        if self._is_paused and self._num_queued <= MAX_QUEUE_BYTES // 2 and not self._source.transport.is_closing():
            self._is_paused = False
            self._source.transport.resume_reading()


class _Side(asyncio.Protocol):
    """One of the two TCP connections that a connection through here consists of."""

    transport: asyncio.Transport
    flow: _Flow | None = None
    connection: _Connection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        with contextlib.suppress(OSError):  # gone already
            socket_of(transport).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.flow is not None:
            self.flow.take(data)

    def eof_received(self) -> bool:
        if self.connection is not None:
            self.connection.ended(self)
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection is not None:
            self.connection.lost(self, exc)


class _Accepted(_Side):
    def __init__(self, proxies: LinkProxies, name: str, host: str, port: int) -> None:
        self._proxies = proxies
        self.name, self.host, self.port = name, host, port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxies.accepted(self.name, self)


class _Connection:
    """Who has dialled, the node, and a flow in each direction."""

    def __init__(self, proxies: LinkProxies, sender: str, dialled: str, accepted: _Accepted) -> None:
        self.sender, self.dialled = sender, dialled
        self._proxies = proxies
        self._near: _Accepted = accepted
        self._far = _Side()
        self._near.connection = self._far.connection = self
        self._near.flow = _Flow(proxies, sender, dialled, self._near)
        self._far.flow = _Flow(proxies, dialled, sender, self._far)
        self._far.flow.sink = accepted.transport
        self._is_aborted = False
        self.task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def flows(self) -> list[_Flow]:
        return [side.flow for side in (self._near, self._far) if side.flow is not None]

    async def dial(self, host: str, port: int) -> None:
        """Connects to the node. A dialler finds out that nobody listens there by a reset."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._far, host, port)
        except OSError:
            await self._proxies.check(host, port)
            self.abort()
            return
        if self._is_aborted or self._near.transport.is_closing():
            self.abort()
            return
        assert self._near.flow is not None
        self._near.flow.sink = self._far.transport
        self._near.flow.go_on()

    def ended(self, side: _Side) -> None:
        """One of the two sends no more. Of a node it is known before its end is passed on whether it still listens."""
        self._after_check(side, lambda: side.flow is not None and side.flow.end())

    def lost(self, side: _Side, error: Exception | None) -> None:
        """A reset goes on at once; an end was passed on by the flow, behind what was sent before it."""
        self._after_check(side, lambda: self._lost(side, error))

    def _after_check(self, side: _Side, do: Callable[[], object]) -> None:
        if side is not self._far or self._is_aborted:
            do()
            return

        async def check() -> None:
            await self._proxies.check(self._near.host, self._near.port)
            do()

        self._tasks.append(asyncio.get_running_loop().create_task(check()))

    def _lost(self, side: _Side, error: Exception | None) -> None:
        other = self._far if side is self._near else self._near
        transport = getattr(other, "transport", None)
        if error is not None and transport is not None:
            _abort(transport)
        elif side.flow is not None:
            side.flow.end()
        if all(getattr(each, "transport", None) is None or each.transport.is_closing() for each in (side, other)):
            self._proxies.forget(self)

    def abort(self) -> None:
        """RST to both."""
        self._is_aborted = True  # a dial that is under way comes back here: cancelled, it would leave its socket open
        for side in (self._near, self._far):
            transport = getattr(side, "transport", None)
            if transport is not None:
                _abort(transport)
        self._proxies.forget(self)


def _abort(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        with contextlib.suppress(OSError):
            socket_of(transport).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


def socket_of(transport: asyncio.Transport) -> socket.socket:
    """The socket under a transport."""
    found: socket.socket = transport.get_extra_info("socket")
    return found


_PORTS = iter(random.sample(range(20_000, 32_000, 2), 6_000))
"""Each once, and below those that systems hand out by themselves (from 32768 on Linux, 49152 on macOS): between this
look and the start of a node, some seconds later, nobody else gets one for a connection of its own."""


def free_port_pair(host: str) -> int:
    """A port such that it and the next one are free now."""
    for port in _PORTS:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(2)]
            if all(_is_free(probe, host, port + index) for index, probe in enumerate(probes)):
                return port
    raise RuntimeError("no two free ports next to one another")


def _is_free(probe: socket.socket, host: str, port: int) -> bool:
    try:
        probe.bind((host, port))
    except OSError:
        return False
    return True
