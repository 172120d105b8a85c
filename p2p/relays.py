"""The relays of this process: kept by p2p.relay_core, asked over the libp2p host, and told to whoever announces them.

Only a process that others have to reach uses it. Whether relays are wanted is somebody else's judgement
(p2p.reachability_core): ``want``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import structlog

from fusion_node.errors import FusionError
from fusion_node.types import MonotonicS, PeerId
from p2p.addresses import PeerAddress
from p2p.control import ControlNode, ControlPlaneDown
from p2p.identity import short
from p2p.records import NodeRecord
from p2p.relay_core import Candidate, Command, RelayCore, Release, Reserve

LOOK_INTERVAL_S = 5.0
"""How often the records are looked through for nodes that relay; more often only when one of ours is lost."""

RESERVE_TIMEOUT_S = 8.0
"""For a relay's answer, at one of its addresses, including the dial."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class RelayHost(Protocol):
    """What this needs of the owner of the libp2p host; p2p.discovery.Discovery is one."""

    on_relay_lost: list[Callable[[PeerId], None]]
    on_connection: list[Callable[[PeerId, bool], None]]
    on_down: list[Callable[[], None]]

    async def call(self, command: Callable[[ControlNode], Awaitable[T]]) -> T: ...

    def protect(self, peer: PeerId, *, protected: bool = True) -> None: ...


class Relays:
    """See the head of this file.

    Args:
        own: this process's peer id.
        records: gives the live records of all nodes that are known.
        on_change: called when ``circuit_addresses`` has changed.
    """

    def __init__(
        self,
        own: PeerId,
        host: RelayHost,
        *,
        records: Callable[[], Sequence[NodeRecord]],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._records = records
        self._round_trips: dict[PeerId, float] = {}
        self._on_change = on_change
        self._core = RelayCore(own, random.SystemRandom())
        self._told: list[PeerAddress] = []
        self._protected: set[PeerId] = set()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._closed = False
        host.on_relay_lost.append(self._lost)
        host.on_connection.append(self._connected)
        host.on_down.append(self._down)

    @property
    def held(self) -> list[PeerId]:
        """The relays through which this process can be reached now."""
        return self._core.held

    @property
    def num_candidates(self) -> int:
        """Nodes known to relay, at the last look."""
        return len(self._candidates())

    def circuit_addresses(self) -> list[PeerAddress]:
        """Where this process can be reached through them: what a node announces."""
        return self._core.addresses

    def want(self, wanted: bool) -> None:
        """Whether this process needs relays: nobody can dial it. Until this is called, it has none."""
        self._do(self._core.want(wanted, self._now()))
        self._wake.set()
        if wanted and self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stops asking. Relays notice when the host closes its connections."""
        self._closed = True
        tasks = [*self._tasks, *([self._running] if self._running is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            with contextlib.suppress(FusionError):
                self._round_trips = await self._host.call(lambda node: node.round_trips())
                self._do(self._core.host_up(self._now()))
            self._do(self._core.offer(self._candidates(), self._now()))
            due = self._core.next_timer()
            pause_s = LOOK_INTERVAL_S if due is None else min(max(due - self._now(), 0.05), LOOK_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(PeerId(record.peer), addresses, self._round_trips.get(PeerId(record.peer)))
            for record in self._records()
            if record.is_relay and (addresses := _direct_addresses(record))
        ]

    def _do(self, commands: Sequence[Command]) -> None:
        if self._closed:
            return
        for command in commands:
            task = asyncio.get_running_loop().create_task(self._carry_out(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        held = set(self._core.held)
        for relay in held ^ self._protected:
            self._host.protect(relay, protected=relay in held)
        self._protected = held
        addresses = self._core.addresses
        if addresses != self._told:
            self._told = addresses
            _log.info("reachable through relays", relays=[short(relay) for relay in self._core.held])
            self._on_change()

    async def _carry_out(self, command: Command) -> None:
        match command:
            case Reserve(relay, addresses):
                for address in addresses:
                    try:
                        duration_s = await self._reserve(address)
                    except ControlPlaneDown:  # which _down tells of
                        return
                    if duration_s is not None:
                        self._do(self._core.reserved(relay, address, duration_s, self._now()))
                        self._wake.set()
                        return
                self._do(self._core.refused(relay, self._now()))
                self._wake.set()
            case Release(relay):
                with contextlib.suppress(FusionError):
                    await self._host.call(lambda node: node.release(relay))

    async def _reserve(self, address: PeerAddress) -> float | None:
        try:
            async with asyncio.timeout(RESERVE_TIMEOUT_S):
                return await self._host.call(lambda node: node.reserve(address))
        except ControlPlaneDown:
            raise
        except (FusionError, TimeoutError) as error:
            _log.debug("no reservation", relay=str(address), error=type(error).__name__, why=str(error))
            return None

    def _lost(self, relay: PeerId) -> None:
        _log.info("a relay is gone", relay=short(relay))
        self._do(self._core.lost(relay, self._now()))
        self._wake.set()

    def _connected(self, peer: PeerId, is_connected: bool) -> None:
        """A relay with which there is a connection again shall not wait for the next look: somebody may be waiting who
        comes through it. And whoever is connected shows that the host runs again."""
        if is_connected and self._running is not None:
            commands = self._core.connected(peer, self._now())
            self._do(commands)
            if commands or not self._core.is_host_up:
                self._wake.set()

    def _down(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._core.host_down()
        self._do([])

    def _now(self) -> MonotonicS:
        return MonotonicS(asyncio.get_running_loop().time())


def _direct_addresses(record: NodeRecord) -> tuple[PeerAddress, ...]:
    """Where the node itself listens, as far as its record says it in a form that we dial."""
    found = []
    for text in record.libp2p_addresses:
        with contextlib.suppress(FusionError):
            address = PeerAddress.parse(text)
            if address.via is None and address.peer == record.peer:
                found.append(address)
    return tuple(found)
