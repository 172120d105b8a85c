"""libp2p hosts on loopback without discovery, for tests of what runs over them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.bridge import Bridge
from p2p.control import ControlNode, HostConfig, HostHooks, IncomingStream, RelayLimits
from p2p.identity import Identity
from p2p.libp2p_adapter import Libp2pRunner
from p2p.libp2p_network import Libp2pNetwork
from p2p.link_emulation import EmulatedLine
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Gate, OpenGate, PathKind
from p2p.swarm_key import SwarmKey

T = TypeVar("T")


def _no_sequence(key: str, value: bytes) -> int:
    raise ValueError("nothing is stored in these hosts")


async def _crash() -> None:
    raise RuntimeError("a task of the host has failed")


@dataclass(eq=False)
class LoopbackHost:
    """One host. ``listens`` False: it cannot be dialled, as behind a NAT. ``serve``: it answers in the DHT."""

    identity: Identity = field(default_factory=Identity.generate)
    listens: bool = True
    relay: RelayLimits | None = None
    version: int = PROTOCOL_VERSION
    gate: Gate = field(default_factory=OpenGate)
    swarm_key: SwarmKey | None = None
    serve: bool = False
    line: EmulatedLine | None = None

    def __post_init__(self) -> None:
        self.on_stream: Callable[[IncomingStream], None] | None = None
        self.on_down: list[Callable[[], None]] = []
        self.on_path: list[Callable[[PeerId, PathKind], None]] = []
        self.on_connection: list[Callable[[PeerId, bool], None]] = []
        self.on_relay_lost: list[Callable[[PeerId], None]] = []
        self.addresses: list[str] = []
        self.num_downs = 0
        self._revived = asyncio.Event()
        self.bridge: Bridge[ControlNode] = Bridge(
            self._make_runner, on_down=self._went_down, on_restart=self._revived.set
        )
        psk = None if self.swarm_key is None else self.swarm_key.noise_psk
        self.network = Libp2pNetwork(self.identity, self, psk=psk, version=self.version, line=self.line)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def address(self) -> PeerAddress:
        return PeerAddress.parse(self.addresses[0])

    async def start(self) -> LoopbackHost:
        if not self.bridge.is_up:
            self._loop = asyncio.get_running_loop()
            await self.bridge.start()
            await self._look_where_it_listens()
        return self

    async def die(self) -> None:
        """Ends the thread as a crash would: the bridge starts another one."""

        async def crash(node: Any) -> None:
            node._tasks.start_soon(_crash)

        await self.call(crash)

    async def revived(self) -> None:
        """Returns when the thread runs again after ``die``."""
        await self._revived.wait()
        self._revived.clear()
        await self._look_where_it_listens()

    async def _look_where_it_listens(self) -> None:
        listening = await self.call(lambda node: node.listening())
        self.addresses = [str(PeerAddress.of(host, port, self.peer)) for host, port in listening]

    async def call(self, command: Callable[[ControlNode], Awaitable[T]]) -> T:
        return await self.bridge.call(command)

    def protect(self, peer: PeerId, *, protected: bool = True) -> None:
        """No connection is given up here."""

    async def aclose(self) -> None:
        await self.bridge.aclose()

    def _make_runner(self) -> Libp2pRunner:
        config = HostConfig(
            seed=self.identity.seed,
            listen=(("127.0.0.1", 0),) if self.listens else (),
            serve=self.serve,
            protocols={},
            relay=self.relay,
            accepts_streams=self.on_stream is not None,
            swarm_key=self.swarm_key,
        )
        hooks = HostHooks(
            sequence_of=_no_sequence,
            on_request=lambda protocol, peer, request, answer: answer(None),
            on_connection=lambda peer, connected: self._post(self._tell_connection, peer, connected),
            on_stream=lambda stream: self._post(self._take_stream, stream),
            on_path=lambda peer, path: self._post(self._tell_path, peer, path),
            on_relay_lost=lambda peer: self._post(self._tell_relay_lost, peer),
            gate=self.gate,
        )
        return Libp2pRunner(config, hooks)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _take_stream(self, stream: IncomingStream) -> None:
        if self.on_stream is not None:
            self.on_stream(stream)

    def _tell_path(self, peer: PeerId, path: PathKind) -> None:
        for listener in self.on_path:
            listener(peer, path)

    def _tell_connection(self, peer: PeerId, connected: bool) -> None:
        for listener in self.on_connection:
            listener(peer, connected)

    def _tell_relay_lost(self, peer: PeerId) -> None:
        for listener in self.on_relay_lost:
            listener(peer)

    def _went_down(self) -> None:
        self.num_downs += 1
        for listener in self.on_down:
            listener()
