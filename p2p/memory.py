"""The in-memory twin of the WebSocket: the same sealed links, over queues instead of sockets.

A MemoryWorld holds the hosts of one test or simulation. Every host gets a MemoryNetwork, listens on ``host:port`` and
dials others. Bytes really are encrypted; nothing takes any time, unless a host's line is emulated (p2p.link_emulation),
which passes in no time on p2p.virtual_time. Faults are put in from outside: ``cut`` ends connections, ``black_hole``
swallows what is sent without telling anybody, ``tamper`` rewrites messages on the way.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    PeerClosed,
    PeerError,
    PeerUnreachable,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from p2p.identity import Identity
from p2p.link_emulation import EmulatedLine
from p2p.noise_core import MAX_SEGMENT_BYTES, LinkRefusal
from p2p.records import PROTOCOL_VERSION
from p2p.sealed import Credentials, SealedLink, initiate, respond
from p2p.seam import Channel, ChannelReceiver, Gate, Link, Listener, OnLink, OpenGate, PathKind

HIGH_WATER_BYTES = 64 * 1024
"""As much as an asyncio transport buffers before it asks the writer to wait."""

HANDSHAKE_TIMEOUT_S = 10.0
"""As in p2p.websocket."""

FIRST_FREE_PORT = 40_000

Tamper = Callable[[bytes], Iterable[bytes]]
"""Gets one message and returns what arrives instead: none, one changed, or several."""


@dataclass(slots=True)
class MemoryWorld:
    """All hosts, who listens where, and which paths are broken."""

    listeners: dict[str, _MemoryListener] = field(default_factory=dict)
    channels: set[_MemoryChannel] = field(default_factory=set)
    black_holes: set[tuple[str, str]] = field(default_factory=set)
    tampers: dict[tuple[str, str], Tamper] = field(default_factory=dict)
    paths: dict[str, PathKind] = field(default_factory=dict)
    """What an address counts as, if not as MEMORY."""
    next_port: int = FIRST_FREE_PORT

    def cut(self, host: str, other: str) -> None:
        """Ends every connection between the two hosts, as when a process is killed: both ends learn of it."""
        for channel in list(self.channels):
            if {channel.host, channel.remote_host} == {host, other}:
                channel.abort()

    def black_hole(self, host: str, other: str) -> None:
        """From now on nothing that either host sends reaches the other, and nobody is told."""
        self.black_holes |= {(host, other), (other, host)}

    def heal(self, host: str, other: str) -> None:
        """Ends a black hole and a tamper. What was swallowed stays lost."""
        for path in ((host, other), (other, host)):
            self.black_holes.discard(path)
            self.tampers.pop(path, None)

    def tamper(self, sender: str, receiver: str, change: Tamper) -> None:
        """From now on ``change`` decides what arrives of that which ``sender`` sends to ``receiver``."""
        self.tampers[sender, receiver] = change


class MemoryNetwork:
    """One host of a MemoryWorld."""

    def __init__(
        self,
        world: MemoryWorld,
        identity: Identity,
        host: str = "localhost",
        *,
        psk: bytes | None = None,
        gate: Gate | None = None,
        version: int = PROTOCOL_VERSION,
        line: EmulatedLine | None = None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._world = world
        self._credentials = Credentials(identity, self.refused, psk, version)
        self._gate = gate or OpenGate()
        self._host = host
        self._line = line

    def path_of(self, address: str) -> PathKind:
        """See Network.path_of."""
        return self._world.paths.get(address, PathKind.MEMORY)

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        """See Network.dial."""
        listener = self._world.listeners.get(address)
        remote_host = address.rpartition(":")[0]
        end, there = _channel_pair(self._world, self._host, remote_host, address)
        here = _over(self._line, end)
        try:
            async with asyncio.timeout(timeout_s):
                if (self._host, remote_host) in self._world.black_holes:
                    await asyncio.Event().wait()
                if listener is None:
                    raise PeerUnreachable(expect or address, f"nobody listens on {address}", is_refused=True)
                listener.accept(there)
                return await initiate(here, self._credentials, expect=expect)
        except TimeoutError as error:
            here.abort()
            raise PeerUnreachable(expect or address, f"{address} did not answer within {timeout_s:g} s") from error
        except BaseException:
            here.abort()
            raise

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """See Network.listen."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{address!r} is not an address: write HOST:PORT")
        if host != self._host:
            raise ConfigError(f"{host!r} is not an address of this machine")
        if port == "0":
            port = str(self._world.next_port)
            self._world.next_port += 1
        bound = f"{host}:{port}"
        if bound in self._world.listeners:
            raise AddressInUse(f"another program listens on {bound}")
        listener = _MemoryListener(self._world, bound, self._credentials, self._gate, on_link, self._line)
        self._world.listeners[bound] = listener
        return listener


class _MemoryListener:
    def __init__(
        self,
        world: MemoryWorld,
        address: str,
        credentials: Credentials,
        gate: Gate,
        on_link: OnLink,
        line: EmulatedLine | None,
    ) -> None:
        self._world = world
        self._address = address
        self._credentials = credentials
        self._refused = credentials.refused
        self._gate = gate
        self._on_link = on_link
        self._line = line
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: set[SealedLink] = set()

    @property
    def address(self) -> str:
        return self._address

    def accept(self, channel: _MemoryChannel) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        self._world.listeners.pop(self._address, None)
        for link in list(self._links):
            await link.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, channel: _MemoryChannel) -> None:
        host, gate = channel.remote_host, self._gate
        refusal = gate.refuse_host(host)
        if refusal is not None:
            self._refused[refusal] += 1
            return channel.abort()
        gate.connected(host)
        try:
            link = await self._prove(_over(self._line, channel), host)
            gate.proven(host)
            if link is not None:
                await self._keep(link)
        finally:
            gate.disconnected(host)

    async def _prove(self, channel: Channel, host: str) -> SealedLink | None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                link = await respond(channel, self._credentials)
        except TimeoutError:
            self._refused[str(LinkRefusal.HANDSHAKE_TIMEOUT)] += 1
            channel.abort()
            return None
        except FusionError as error:
            self._gate.report_failure(None, host, error)
            await channel.aclose()
            return None
        refusal = self._gate.refuse_peer(link.peer, host)
        if refusal is None:
            return link
        self._refused[refusal] += 1
        await link.aclose()
        return None

    async def _keep(self, link: SealedLink) -> None:
        self._links.add(link)
        try:
            await self._on_link(link)
        finally:
            self._links.discard(link)
            await link.aclose()


class _MemoryChannel:
    """One end of a connection. ``_inbox`` holds what has arrived and is not yet delivered."""

    def __init__(self, world: MemoryWorld, host: str, remote_host: str, remote_address: str, path: PathKind) -> None:
        self.host = host
        self.remote_host = remote_host
        self.remote_address = remote_address
        self.other: _MemoryChannel = self
        self._path = path
        self._world = world
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._is_full = False
        self._receiver: ChannelReceiver | None = None
        self._paused = False
        self._closed = False
        self._reported = False
        world.channels.add(self)

    def set_receiver(self, receiver: ChannelReceiver) -> None:
        self._receiver = receiver
        self._deliver_soon()

    @property
    def path(self) -> PathKind:
        return self._path

    def write(self, data: bytes) -> bool:
        if self._closed:
            raise PeerClosed(self.remote_address, f"the connection with {self.remote_address} is closed")
        path = (self.host, self.remote_host)
        if path in self._world.black_holes:
            return True
        change = self._world.tampers.get(path)
        for message in (data,) if change is None else change(data):
            self.other._arrive(bytes(message))
        return not self.other._is_full

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._deliver_soon()

    def abort(self) -> None:
        self._inbox.clear()
        self._end()
        if (self.host, self.remote_host) not in self._world.black_holes:
            self.other._end()

    async def aclose(self) -> None:
        self.abort()

    def _arrive(self, message: bytes) -> None:
        self._inbox.append(message)
        self._inbox_bytes += len(message)
        if self._inbox_bytes > HIGH_WATER_BYTES:
            self._is_full = True
        self._deliver_soon()

    def _deliver_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._inbox and not self._paused and self._receiver is not None:
            message = self._inbox.popleft()
            self._inbox_bytes -= len(message)
            if len(message) > MAX_SEGMENT_BYTES:
                self._report(RemoteProtocolError(self.remote_address, f"a message of {len(message)} bytes"))
                self.abort()
                return
            self._receiver.message_received(message)
        if self._is_full and self._inbox_bytes <= HIGH_WATER_BYTES:
            self._is_full = False
            self.other._room_again()
        if self._closed and not self._inbox:
            self._report(PeerClosed(self.remote_address, f"{self.remote_address} closed the connection"))

    def _report(self, error: PeerError) -> None:
        if self._receiver is not None and not self._reported:
            self._reported = True
            self._receiver.channel_closed(error)

    def _room_again(self) -> None:
        if self._receiver is not None and not self._closed:
            self._receiver.channel_writable()

    def _end(self) -> None:
        self._closed = True
        self._world.channels.discard(self)
        self._deliver_soon()


def _over(line: EmulatedLine | None, channel: _MemoryChannel) -> Channel:
    return channel if line is None else line.over(channel)


def _channel_pair(
    world: MemoryWorld, host: str, remote_host: str, address: str
) -> tuple[_MemoryChannel, _MemoryChannel]:
    path = world.paths.get(address, PathKind.MEMORY)
    here = _MemoryChannel(world, host, remote_host, address, path)
    there = _MemoryChannel(world, remote_host, host, f"{host}:0", path)
    here.other, there.other = there, here
    return here, there
