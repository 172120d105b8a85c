"""Who is in the swarm, and what do they serve: the asyncio side of the control plane.

Records travel in two ways. Connected peers exchange them directly (p2p.record_exchange): a newcomer pulls and pushes on
its first connection, and every HEARTBEAT_S after that. The DHT answers *who*: provider records under keys derived from
the model id, and each node's signed record under the node's own key, for those who are not connected to it.

Nothing is believed that is not signed by whom it speaks of, in time, and newer than what was there (p2p.records). A
node that dies is forgotten when its record expires.

Above 600 lines: a third are the contract (DiscoveryService) and its constants; entering, publishing and finding share
the connections and the table.

Timers: see the constants. All are in seconds of the event loop's clock; ``clock`` is Unix time and dates records only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fusion_node.errors import (
    ConfigError,
    FusionError,
    LocalProtocolError,
    NoPeers,
    PeerClosed,
    PeerError,
    PeerTimeout,
    RemoteProtocolError,
)
from fusion_node.types import ModelId, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.addresses import PeerAddress, check_bindable, dialable_hosts, is_loopback, parse_announce, parse_listen
from p2p.bridge import Bridge, Runner
from p2p.control import Answer, ControlNode, ControlPlaneDown, HostConfig, HostHooks
from p2p.identity import Identity, short
from p2p.invite import Invite, parse_bootstrap
from p2p.mdns import LanDiscovery
from p2p.record_exchange import MAX_ANSWER_BYTES, MAX_RECORDS, MAX_REQUEST_BYTES, PROTOCOL_ID, RecordExchange
from p2p.records import NodeRecord, RecordTable, Refusal, open_record
from p2p.swarm_key import SwarmKey

HEARTBEAT_S = 20.0
"""A third of a record's life: two may be lost. A peer that does not answer one is disconnected, because the library
never notices a path that silently drops packets."""

EXCHANGE_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 9.0
"""For the answer of a further protocol: less than the asker's connection waits (REQUEST_TIMEOUT_S of the adapter)."""

REDIAL_FIRST_S = 0.5
REDIAL_MAX_S = 15.0
PUT_INTERVAL_S = 25.0
"""Storing a record in the DHT costs a look-up; one that lives 60 s is never missing."""

PROVIDE_INTERVAL_S = 120.0
"""Storers keep provider records for 600 s."""

EARLY_PUBLISHES = 3
"""As many times a newcomer publishes at every announcement, because its first look-ups knew few peers."""

LOOKUP_TIMEOUT_S = 15.0
LOOKUP_GRACE_S = 1.0
"""How much longer ``find`` waits for the DHT when connected peers have answered. The look-up goes on; the next ``find``
has its results."""

WITHDRAW_TIMEOUT_S = 1.5
MAX_PARALLEL = 8
MESH_PEERS = 16
"""Connections that a node seeks among those it hears of, so that announcements reach many directly."""

PULLED_PEERS = 16
"""Connected peers that one ``find`` asks."""

FRESH_S = 30.0
"""A record younger than this is not asked for again, when the DHT names its node."""

_NAME_ONE = "name a node of the swarm with --peer ADDRESS or --peer INVITE"
_PROVIDER_DOMAIN = b"fusion-node/provider/1:"
_SHA2_256_MULTIHASH = bytes([0x12, 0x20])

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiscoveryConfig:
    """How to take part.

    Attributes:
        listen: ``HOST:PORT`` for the control plane; port 0 takes any free one; empty only dials.
        bootstrap: multiaddrs or invites of peers to enter the swarm by.
        mdns: whether to find peers on the local network; without effect when listening on loopback only.
        announce: ``HOST:PORT`` under which the listener can also be dialled, as behind a router that forwards a port.
        serve: whether to store and answer for others in the DHT: nodes do, users do not.
    """

    listen: tuple[str, ...]
    bootstrap: tuple[str, ...]
    mdns: bool
    serve: bool
    announce: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestProtocol:
    """A protocol of one request and one answer that is served beside the record exchange.

    Attributes:
        id: as ``/fusion/NAME/1``.
        max_request_bytes: of the request; a longer one never reaches ``answer``.
        answer: called in the event loop with who asks and what. None refuses, and so do WireError and FusionError. It
            is given ANSWER_TIMEOUT_S.
    """

    id: str
    max_request_bytes: int
    answer: Callable[[PeerId, bytes], Awaitable[bytes | None]]


class DiscoveryService(Protocol):
    """What the rest of the program needs of discovery: Discovery over libp2p, MemoryDiscovery in tests."""

    @property
    def addresses(self) -> list[str]:
        """Multiaddrs under which this process can be dialled, with ``/p2p/PEER-ID``."""
        ...

    @property
    def invite(self) -> str:
        """The addresses as one short string. ConfigError when nothing listens."""
        ...

    @property
    def table(self) -> RecordTable:
        """Every record known, with counts of those refused."""
        ...

    @property
    def num_peers(self) -> int:
        """Peers that are connected."""
        ...

    async def start(self) -> None:
        """Returns when listening; entering the swarm goes on in the background.

        Raises:
            ConfigError: a listen or bootstrap address is malformed, or an invite has expired.
            AddressInUse: the port is taken.
        """
        ...

    async def wait_for_peer(self, timeout_s: float) -> None:
        """Returns when a peer of the swarm is connected and has answered; at once while there is one.

        Raises:
            NoPeers: none did in time, or there is none to try; the message lists the addresses tried.
        """
        ...

    async def announce(self, envelope: bytes, model_ids: Sequence[ModelId]) -> None:
        """Publishes the own signed record, and that it serves these models. Called again before it expires.

        Raises:
            LocalProtocolError: others would refuse the record.
        """
        ...

    async def withdraw(self, envelope: bytes) -> None:
        """Publishes a record without shards, newer than the last one. Best effort, in less than two seconds."""
        ...

    async def find(self, model_id: ModelId | None, *, timeout_s: float) -> list[NodeRecord]:
        """The live records of nodes that serve the model, or of all nodes when it is None. Empty when there are none.

        Raises:
            ControlPlaneDown: the libp2p thread has stopped; it is being started again.
        """
        ...

    async def aclose(self) -> None:
        """Stops everything. Safe to call twice. Does not withdraw."""
        ...


class Discovery:
    """DiscoveryService over libp2p, and the one libp2p host of a process, which others of its parts use too.

    Args:
        protocols: further requests that are answered here; see also ``add_protocol``.
        swarm_key: what every member of a private swarm has; None for the public swarm.

    Attributes:
        on_peer_met: each is called in the event loop when a peer has answered or asked for the first time on the
            present connection; from then on ``request`` reaches it.
        on_connection: each is called in the event loop with a peer, and whether it is connected now or not any more.
        extra_addresses: each gives further addresses under which this process can be dialled, as those at a relay.
        is_announced: which of the addresses that the listeners have are told to others: those that can be dialled.
    """

    def __init__(
        self,
        identity: Identity,
        config: DiscoveryConfig,
        *,
        protocols: Sequence[RequestProtocol] = (),
        swarm_key: SwarmKey | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._protocols = {protocol.id: protocol for protocol in protocols}
        self._swarm_key = swarm_key
        self.on_peer_met: list[Callable[[PeerId], None]] = []
        self.on_connection: list[Callable[[PeerId, bool], None]] = []
        self.extra_addresses: list[Callable[[], Sequence[PeerAddress]]] = []
        self.is_announced: Callable[[PeerAddress], bool] = lambda address: True
        self._identity = identity
        self._config = config
        self._clock = clock
        self.table = RecordTable()
        self._exchange = RecordExchange(self.table, secrets.SystemRandom())
        self._bridge: Bridge[ControlNode] = Bridge(
            self._make_runner, on_down=self._forget_connections, on_restart=self._resume
        )
        self._listen: tuple[tuple[str, int], ...] = ()
        self._bootstrap: dict[PeerId, list[PeerAddress]] = {}
        self._connected: set[PeerId] = set()
        self._answering: set[PeerId] = set()
        """Who has answered or asked something on the present connection."""
        self._met = asyncio.Event()
        """Set while one of those is connected."""
        self._last_dial_failure = ""
        self._lan: LanDiscovery | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lookups: dict[ModelId | None, asyncio.Task[None]] = {}
        self._publication = _Publication()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._announce: tuple[tuple[str, int], ...] = ()

    @property
    def addresses(self) -> list[str]:
        return [str(address) for address in self._own_addresses()]

    @property
    def invite(self) -> str:
        return Invite(tuple(self._own_addresses())).encode()

    @property
    def num_peers(self) -> int:
        return len(self._connected)

    def add_protocol(self, protocol: RequestProtocol) -> None:
        """Before ``start``."""
        self._protocols[protocol.id] = protocol

    async def request(
        self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int, timeout_s: float = EXCHANGE_TIMEOUT_S
    ) -> bytes:
        """Asks a connected peer for one answer of at most ``limit_bytes``.

        Raises:
            PeerError: it did not answer in time, refused, or is not connected.
            ControlPlaneDown: the libp2p thread has stopped; it is being started again.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._bridge.call(
                    lambda node: node.request(peer, protocol, request, limit_bytes=limit_bytes)
                )
        except TimeoutError as error:
            raise PeerTimeout(peer, f"peer {short(peer)} did not answer within {timeout_s:.0f} s") from error

    async def call(self, command: Callable[[ControlNode], Awaitable[T]]) -> T:
        """Runs a command of the libp2p host in its thread.

        Raises:
            ControlPlaneDown: the libp2p thread has stopped; it is being started again.
            PeerError: as the command says.
        """
        return await self._bridge.call(command)

    async def connect(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        """Connects to a peer, unless it is connected, without exchanging records with it.

        Raises:
            PeerError: none of the addresses leads to it.
            ControlPlaneDown: the libp2p thread has stopped; it is being started again.
        """
        await self._bridge.call(lambda node: node.connect(peer, addresses))

    async def start(self) -> None:
        listen = tuple(parse_listen(text) for text in self._config.listen)
        self._announce = tuple(parse_announce(text) for text in self._config.announce)
        for address in parse_bootstrap(self._config.bootstrap, now=self._now()):
            if address.peer != self._identity.peer_id:
                self._bootstrap.setdefault(address.peer, []).append(address)
        for host, port in listen:
            check_bindable(host, port)
        self._loop = asyncio.get_running_loop()
        self._listen = listen
        await self._bridge.start()
        # With the ports that were really bound, so that a restart listens where others know us.
        self._listen = tuple(await self._bridge.call(lambda node: node.listening()))
        for peer, addresses in self._bootstrap.items():
            self._spawn(self._keep_connected(peer, addresses))
        self._spawn(self._beat())
        self._spawn(self._publish_when_wanted())
        if self._config.mdns and not (self._listen and all(is_loopback(host) for host, _ in self._listen)):
            self._lan = LanDiscovery(self._identity.peer_id, self._own_addresses(), self._found_on_lan, self._swarm_key)
            self._spawn(self._lan.run())

    async def wait_for_peer(self, timeout_s: float) -> None:
        if not self._met.is_set() and not self._bootstrap and self._lan is None:
            raise NoPeers("there is no peer to try: give the address or the invite of a node with --peer")
        try:
            async with asyncio.timeout(timeout_s):
                await self._met.wait()
        except TimeoutError:
            tried = [str(address) for addresses in self._bootstrap.values() for address in addresses]
            where = ", ".join([*tried, *(["the local network"] if self._lan is not None else [])])
            raise NoPeers(
                f"no peer answered within {timeout_s:.0f} s (tried {where}"
                f"{'; ' + self._last_dial_failure if self._last_dial_failure else ''}): "
                f"{'check that the node runs and that its address can be reached from here' if tried else _NAME_ONE}"
            ) from None

    async def announce(self, envelope: bytes, model_ids: Sequence[ModelId]) -> None:
        self._set_own(envelope)
        self._publication.want(model_ids)
        await self._push(EXCHANGE_TIMEOUT_S)

    async def withdraw(self, envelope: bytes) -> None:
        self._set_own(envelope)
        self._publication.withdraw()
        with contextlib.suppress(TimeoutError, FusionError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await asyncio.gather(self._push(WITHDRAW_TIMEOUT_S), self._put_own())

    async def find(self, model_id: ModelId | None, *, timeout_s: float) -> list[NodeRecord]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not self._connected and (self._bootstrap or self._lan is not None) and not self._others():
            # Without this, a user who asks right after `start` gets the answer of an empty swarm.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._met.wait()
        lookup = self._lookup(model_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._pull(model_id)
        found = self._exchange.serving(model_id, now=self._now())
        patience_s = min(LOOKUP_GRACE_S, deadline - loop.time()) if found else deadline - loop.time()
        await asyncio.wait({lookup}, timeout=max(0.0, patience_s))
        if lookup.done() and not lookup.cancelled() and isinstance(lookup.exception(), ControlPlaneDown):
            raise ControlPlaneDown("the libp2p thread has stopped; it is being started again")
        return self._exchange.serving(model_id, now=self._now())

    async def aclose(self) -> None:
        self._closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._bridge.aclose()

    # Being asked: these three are called in the host's thread.

    def _sequence_of(self, key: str, value: bytes) -> int:
        """The DHT's validator: the record must be valid, and its signer the one whom the key names."""
        record = open_record(value, now=self._now())
        if isinstance(record, NodeRecord) and key != record_key(PeerId(record.peer)):
            record = Refusal.WRONG_KEY
        if isinstance(record, Refusal):
            self._post(self._count_refusal, record)
            raise ValueError(record)
        return record.sequence

    def _on_request(self, protocol: str, peer: PeerId, request: bytes, answer: Answer) -> None:
        if protocol == PROTOCOL_ID:
            self._post(self._answer, peer, request, answer)
        else:
            self._post(self._answer_other, self._protocols[protocol], peer, request, answer)

    def _on_connection(self, peer: PeerId, connected: bool) -> None:
        self._post(self._note_connection, peer, connected)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None  # noqa: S101  # set before the thread starts
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    # Their other halves, in the event loop.

    def _count_refusal(self, refusal: Refusal) -> None:
        self.table.refused[refusal] = self.table.refused.get(refusal, 0) + 1

    def _answer(self, peer: PeerId, request: bytes, answer: Answer) -> None:
        try:
            reply = self._exchange.answer(request, source=peer, now=self._now())
        except WireError as error:
            log.info("peer %s sent a malformed request: %s", short(peer), error)
            answer(None)
        else:
            answer(reply)
            self._note_answer(peer)

    def _answer_other(self, protocol: RequestProtocol, peer: PeerId, request: bytes, answer: Answer) -> None:
        async def respond() -> None:
            reply: bytes | None = None
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    reply = await protocol.answer(peer, request)
            except (WireError, FusionError, TimeoutError) as error:
                log.info("a request of peer %s over %s is refused: %s", short(peer), protocol.id, error)
            finally:
                answer(reply)

        self._spawn(respond())

    def _note_connection(self, peer: PeerId, connected: bool) -> None:
        for listener in self.on_connection:
            listener(peer, connected)
        if connected:
            self._connected.add(peer)
        else:
            self._connected.discard(peer)
            self._answering.discard(peer)
        self._note_met()
        if not self._connected and not self._closed:
            log.info("no peer is connected any more; trying those that are known")
            self._spawn(self._quietly(self._widen))

    def _note_answer(self, peer: PeerId) -> None:
        is_new = peer not in self._answering
        self._answering.add(peer)
        self._note_met()
        if is_new:
            for listener in self.on_peer_met:
                listener(peer)

    def _note_met(self) -> None:
        # Both: an answer may be told of just before its connection is, or just after that has ended.
        (self._met.clear if self._answering.isdisjoint(self._connected) else self._met.set)()

    def _forget_connections(self) -> None:
        """When the thread goes down, and not when it is back: by then it may have told of new ones."""
        self._connected.clear()
        self._answering.clear()
        self._met.clear()

    def _others(self) -> list[NodeRecord]:
        """The live nodes that are known, without this one."""
        return [r for r in self._exchange.serving(None, now=self._now()) if r.peer != self._identity.peer_id]

    # Entering the swarm, and staying in it.

    async def _keep_connected(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        delay_s = REDIAL_FIRST_S
        while True:
            if peer not in self._connected:
                try:
                    await self._meet(peer, addresses)
                except FusionError as error:
                    if delay_s == REDIAL_FIRST_S:
                        log.warning("bootstrap peer %s does not answer, trying on: %s", short(peer), error)
                    self._last_dial_failure = str(error)
                    delay_s = min(2 * delay_s, REDIAL_MAX_S)
                else:
                    delay_s = REDIAL_FIRST_S
                    log.info("connected to bootstrap peer %s", short(peer))
            await asyncio.sleep(delay_s)

    def _found_on_lan(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        if peer != self._identity.peer_id and peer not in self._connected:
            self._spawn(self._quietly(lambda: self._meet(peer, addresses)))

    async def _meet(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        """First contact: connect, tell, learn, and take the peer into the DHT."""
        await self._bridge.call(lambda node: node.connect(peer, addresses))
        await self._exchange_with(peer, None, limit=MAX_RECORDS)
        self._spawn(self._quietly(lambda: self._settle_in(peer)))

    async def _settle_in(self, peer: PeerId) -> None:
        await self._bridge.call(lambda node: node.join_dht(peer))
        self._publication.hurry()
        if self._config.serve:
            await self._widen()

    async def _widen(self) -> None:
        """Connects to some of the nodes that are known but not connected."""
        known = [record for record in self._others() if record.peer not in self._connected]
        wanted = _some(known, MESH_PEERS - len(self._connected))

        async def meet(record: NodeRecord) -> None:
            peer, addresses = PeerId(record.peer), _addresses_of(record)
            await self._bridge.call(lambda node: node.connect(peer, addresses))
            await self._exchange_with(peer, None, limit=MAX_RECORDS)

        await _each(wanted, meet)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.table.expire(now=self._now())
            with contextlib.suppress(ControlPlaneDown):
                await self._beat_once()
                if self._config.serve or not self._connected:
                    await self._widen()

    async def _beat_once(self) -> None:
        """The own record goes to every connected peer, and who does not answer is disconnected."""

        async def beat(peer: PeerId) -> None:
            try:
                await self._exchange_with(peer, None, limit=0)
            except PeerClosed as error:
                # It has no room for the request just now. Who refuses is there; a connection that ends says so itself.
                log.debug("peer %s refused a heartbeat: %s", short(peer), error)
            except PeerError as error:
                log.info("peer %s is disconnected: %s", short(peer), error)
                await self._bridge.call(lambda node: node.disconnect(peer))

        await _each(list(self._connected), beat)

    def _resume(self) -> None:
        """After the thread died and came back: nothing of what it had stored in the DHT is known to be left."""
        self._publication.forget()
        log.warning("the libp2p thread runs again")
        if self._config.serve or not self._connected:
            self._spawn(self._quietly(self._widen))

    # Publishing.

    def _set_own(self, envelope: bytes) -> None:
        record = open_record(envelope, now=self._now())
        if isinstance(record, Refusal) or record.peer != self._identity.peer_id:
            raise LocalProtocolError(f"the record to announce would be refused by others: {record}")
        accepted = self._exchange.set_own(envelope, now=self._now())
        if isinstance(accepted, Refusal):
            raise LocalProtocolError(f"the record to announce would be refused by others: {accepted}")

    async def _push(self, timeout_s: float) -> None:
        """Sends the own record to every connected peer. A peer that does not take it is the heartbeat's business."""

        async def push(peer: PeerId) -> None:
            await self._exchange_with(peer, None, limit=0)

        with contextlib.suppress(TimeoutError, ControlPlaneDown):
            async with asyncio.timeout(timeout_s):
                await _each(list(self._connected), push)

    async def _publish_when_wanted(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._publication.wanted.wait()
            self._publication.wanted.clear()
            if not self._connected or self._exchange.own_envelope is None:
                continue
            try:
                if self._publication.is_put_due(loop.time()):
                    await self._put_own()
                for model_id in self._publication.to_provide(loop.time()):
                    key = provider_key(model_id)
                    await self._bridge.call(lambda node, key=key: node.provide(key))  # type: ignore[misc]
            except FusionError as error:
                log.info("the record could not be stored in the DHT, trying at the next announcement: %s", error)
                self._publication.forget()

    async def _put_own(self) -> None:
        envelope = self._exchange.own_envelope
        if envelope is not None:
            key = record_key(self._identity.peer_id)
            await self._bridge.call(lambda node: node.put_value(key, envelope))

    # Finding.

    async def _pull(self, model_id: ModelId | None) -> None:
        async def pull(peer: PeerId) -> None:
            await self._exchange_with(peer, model_id, limit=MAX_RECORDS)

        await _each(_some(self._connected, PULLED_PEERS), pull, at_once=PULLED_PEERS)

    def _lookup(self, model_id: ModelId | None) -> asyncio.Task[None]:
        """The look-up under way, or a new one: two at once would each spoil the other's cache handling."""
        under_way = self._lookups.get(model_id)
        if under_way is None or under_way.done():
            under_way = self._spawn(self._look_up(model_id))
            self._lookups[model_id] = under_way
        return under_way

    async def _look_up(self, model_id: ModelId | None) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                key = provider_key(model_id)
                providers = await self._bridge.call(lambda node: node.find_providers(key))
                now = self._now()
                fresh = {r.peer for r in self.table.live(now=now) if now - r.issued_at < FRESH_S}
                missing = [found for found in providers if found.peer not in fresh | {self._identity.peer_id}]
                await _each(missing, lambda found: self._fetch(found.peer, found.addresses, model_id))
        except (TimeoutError, PeerError) as error:
            log.debug("a look-up in the DHT ended early: %s", error)

    async def _fetch(self, peer: PeerId, addresses: Sequence[PeerAddress], model_id: ModelId | None) -> None:
        """A node's record from itself, or else from the DHT."""
        try:
            await self._bridge.call(lambda node: node.connect(peer, addresses))
            await self._exchange_with(peer, model_id, limit=MAX_RECORDS)
        except PeerError:
            value = await self._bridge.call(lambda node: node.get_value(record_key(peer)))
            if value is not None:
                self.table.receive(value, now=self._now())

    # Shared.

    async def _exchange_with(self, peer: PeerId, model_id: ModelId | None, *, limit: int) -> None:
        request = self._exchange.request(model_id, limit=limit, now=self._now())
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                answer = await self._bridge.call(
                    lambda node: node.request(peer, PROTOCOL_ID, request, limit_bytes=MAX_ANSWER_BYTES)
                )
            self._exchange.receive(answer, source=peer, now=self._now())
            self._note_answer(peer)
        except TimeoutError as error:
            raise PeerTimeout(peer, f"peer {short(peer)} did not answer within {EXCHANGE_TIMEOUT_S:.0f} s") from error
        except WireError as error:
            raise RemoteProtocolError(peer, f"peer {short(peer)} answered with something malformed: {error}") from error

    def _make_runner(self) -> Runner[ControlNode]:
        from p2p.libp2p_adapter import Libp2pRunner  # here, in the thread: it takes more than a second

        config = HostConfig(
            seed=self._identity.seed,
            listen=self._listen,
            serve=self._config.serve,
            protocols={PROTOCOL_ID: MAX_REQUEST_BYTES}
            | {protocol.id: protocol.max_request_bytes for protocol in self._protocols.values()},
            swarm_key=self._swarm_key,
        )
        return Libp2pRunner(config, HostHooks(self._sequence_of, self._on_request, self._on_connection))

    def _own_addresses(self) -> list[PeerAddress]:
        listening = [
            PeerAddress.of(own, port, self._identity.peer_id)
            for host, port in self._listen
            for own in dialable_hosts(host)
        ]
        announced = [PeerAddress.of(host, port, self._identity.peer_id) for host, port in self._announce]
        extra = [address for provider in self.extra_addresses for address in provider()]
        # What the operator says comes unasked: from here it cannot be checked.
        return [address for address in listening if self.is_announced(address)] + announced + extra

    def _now(self) -> UnixS:
        return UnixS(self._clock())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except FusionError as error:
            log.debug("in the background: %s", error)


class _Publication:
    """What the DHT should hold of us, and when it is due again."""

    def __init__(self) -> None:
        self.wanted = asyncio.Event()
        self._model_ids: tuple[ModelId, ...] = ()
        self._put_at: float | None = None
        self._provided_at: dict[ModelId | None, float] = {}
        self._early_left = EARLY_PUBLISHES
        self._is_withdrawn = True

    def want(self, model_ids: Sequence[ModelId]) -> None:
        self._model_ids = tuple(model_ids)
        self._is_withdrawn = False
        self.wanted.set()

    def withdraw(self) -> None:
        self._is_withdrawn = True
        self._model_ids = ()

    def hurry(self) -> None:
        """A new part of the swarm has been reached: publish there too."""
        self._early_left = max(self._early_left, 1)
        self.wanted.set()

    def forget(self) -> None:
        """What was published is lost."""
        self._put_at = None
        self._provided_at.clear()
        self._early_left = EARLY_PUBLISHES

    def is_put_due(self, now_s: float) -> bool:
        due = self._put_at is None or self._early_left > 0 or now_s - self._put_at >= PUT_INTERVAL_S
        if due:
            self._put_at = now_s
        return due and not self._is_withdrawn

    def to_provide(self, now_s: float) -> list[ModelId | None]:
        if self._is_withdrawn:
            return []
        is_early = self._early_left > 0
        self._early_left = max(0, self._early_left - 1)
        # None stands for "a node of any model".
        due = [
            model_id
            for model_id in (None, *self._model_ids)
            if is_early or now_s - self._provided_at.get(model_id, float("-inf")) >= PROVIDE_INTERVAL_S
        ]
        self._provided_at.update(dict.fromkeys(due, now_s))
        return due


def record_key(peer: PeerId) -> str:
    """The DHT key of a node's record."""
    return f"/fusion/{peer}"


def provider_key(model_id: ModelId | None) -> bytes:
    """The DHT key under which the nodes of a model, or all nodes, are providers: a SHA2-256 multihash."""
    text = b"nodes" if model_id is None else b"model/" + model_id.encode()
    return _SHA2_256_MULTIHASH + hashlib.sha256(_PROVIDER_DOMAIN + text).digest()


def _addresses_of(record: NodeRecord) -> list[PeerAddress]:
    found = []
    for text in record.libp2p_addresses:
        with contextlib.suppress(ConfigError):
            address = PeerAddress.parse(text)
            if address.peer == record.peer:
                found.append(address)
    return found


def _some(items: Iterable[T], at_most: int) -> list[T]:
    """Up to so many of them, by chance, so that no peer is everybody's choice."""
    pool = list(items)
    return secrets.SystemRandom().sample(pool, max(0, min(at_most, len(pool))))


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int = MAX_PARALLEL) -> None:
    """Does the work for each, some at a time. One peer's failure is not the others'.

    Raises:
        ControlPlaneDown: the libp2p thread has stopped.
    """
    slots = asyncio.Semaphore(at_once)

    async def guarded(item: T) -> None:
        async with slots:
            try:
                await work(item)
            except PeerError as error:
                log.debug("a peer failed: %s", error)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(guarded(item))
    except* ControlPlaneDown as errors:
        raise errors.exceptions[0] from None
