"""Discovery without a network: processes of one test share a World, and find each other in it.

Same guarantees as p2p.discovery, through the same record table and exchange core; what differs is that a peer answers
at once, and that a test can cut one off (World.partition) or kill it without a word (MemoryDiscovery.vanish).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fusion_node.errors import AddressInUse, ConfigError, LocalProtocolError, NoPeers
from fusion_node.types import ModelId, PeerId, UnixS
from p2p.addresses import PeerAddress, parse_listen
from p2p.discovery import DiscoveryConfig
from p2p.identity import Identity
from p2p.invite import Invite, parse_bootstrap
from p2p.record_exchange import MAX_RECORDS, RecordExchange
from p2p.records import NodeRecord, RecordTable, Refusal, open_record


@dataclass(slots=True)
class World:
    """The machines of one test and who of them can reach whom."""

    peers: dict[PeerId, MemoryDiscovery] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _cut_off: set[PeerId] = field(default_factory=set)
    _next_port: int = 40_000

    def partition(self, peer: PeerId, *, cut_off: bool = True) -> None:
        """Cuts a peer off from all others, or lets it back."""
        (self._cut_off.add if cut_off else self._cut_off.discard)(peer)

    def reachable_from(self, peer: PeerId) -> list[MemoryDiscovery]:
        """The peers that a peer is connected with."""
        if peer in self._cut_off:
            return []
        return [other for id_, other in self.peers.items() if id_ != peer and id_ not in self._cut_off]

    def free_port(self) -> int:
        """A port that nobody in this world listens on."""
        self._next_port += 1
        return self._next_port


class MemoryDiscovery:
    """DiscoveryService in one process. Bootstrap addresses are checked, and any of them leads into the whole world."""

    def __init__(
        self, identity: Identity, config: DiscoveryConfig, world: World, *, clock: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._config = config
        self._world = world
        self._clock = clock
        self.table = RecordTable()
        self._exchange = RecordExchange(self.table, random.Random(identity.peer_id))  # noqa: S311 - repeatable, in tests
        self._listen: list[tuple[str, int]] = []

    @property
    def addresses(self) -> list[str]:
        return [str(PeerAddress.of(host, port, self._identity.peer_id)) for host, port in self._listen]

    @property
    def announced_addresses(self) -> list[str]:
        return self.addresses

    @property
    def invite(self) -> str:
        return Invite(tuple(PeerAddress.parse(address) for address in self.addresses)).encode()

    @property
    def num_peers(self) -> int:
        return len(self._world.reachable_from(self._identity.peer_id)) if self._is_running else 0

    @property
    def _is_running(self) -> bool:
        return self._world.peers.get(self._identity.peer_id) is self

    async def start(self) -> None:
        parse_bootstrap(self._config.bootstrap, now=self._now())
        taken = {port for peer in self._world.peers.values() for _, port in peer._listen}
        for host, port in map(parse_listen, self._config.listen):
            if port in taken:
                raise AddressInUse(f"another program listens on {host}:{port}: choose another port with --listen")
            self._listen.append((host, port or self._world.free_port()))
        self._world.peers[self._identity.peer_id] = self
        async with self._world.changed:
            self._world.changed.notify_all()

    async def wait_for_peer(self, timeout_s: float) -> None:
        if not self._config.bootstrap and not self._config.mdns:
            raise NoPeers("there is no peer to try: give the address or the invite of a node with --peer")
        try:
            async with asyncio.timeout(timeout_s), self._world.changed:
                await self._world.changed.wait_for(lambda: self.num_peers > 0)
        except TimeoutError:
            tried = ", ".join(self._config.bootstrap) or "the local network"
            raise NoPeers(f"no peer answered within {timeout_s:.0f} s (tried {tried})") from None

    async def announce(self, envelope: bytes, model_ids: Sequence[ModelId]) -> None:
        record = open_record(envelope, now=self._now())
        if isinstance(record, Refusal) or record.peer != self._identity.peer_id:
            raise LocalProtocolError(f"the record to announce would be refused by others: {record}")
        accepted = self._exchange.set_own(envelope, now=self._now())
        if isinstance(accepted, Refusal):
            raise LocalProtocolError(f"the record to announce would be refused by others: {accepted}")
        for other in self._reachable():
            self._exchange_with(other, None, limit=0)

    async def withdraw(self, envelope: bytes) -> None:
        await self.announce(envelope, ())

    async def find(self, model_id: ModelId | None, *, timeout_s: float) -> list[NodeRecord]:
        for other in self._reachable():
            self._exchange_with(other, model_id, limit=MAX_RECORDS)
        return self._exchange.serving(model_id, now=self._now())

    async def aclose(self) -> None:
        self.vanish()

    def vanish(self) -> None:
        """Leaves the world without a word, as a killed process does."""
        if self._is_running:
            del self._world.peers[self._identity.peer_id]

    def _reachable(self) -> list[MemoryDiscovery]:
        if not self._is_running:
            raise ConfigError("this discovery is not running")
        return self._world.reachable_from(self._identity.peer_id)

    def _exchange_with(self, other: MemoryDiscovery, model_id: ModelId | None, *, limit: int) -> None:
        request = self._exchange.request(model_id, limit=limit, now=self._now())
        our_id, their_id = self._identity.peer_id, other._identity.peer_id
        answer = other._exchange.answer(request, source=our_id, now=other._now())
        self._exchange.receive(answer, source=their_id, now=self._now())

    def _now(self) -> UnixS:
        return UnixS(self._clock())
