"""Who is in the swarm, and what do they serve: the asyncio shell of the control plane.

What is done when, and with whom, is decided in p2p.membership_core; here its commands are carried out over the libp2p
thread (p2p.bridge), and what comes of them is reported back. Look-ups are driven here, since somebody waits for them:
they ask connected peers, and the DHT for those who are not connected.

Nothing is believed that is not signed by whom it speaks of, in time, and newer than what was there (p2p.records).

Above 600 lines: a third are the contract (DiscoveryService) and what other parts of a process may do with its host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
from fusion_node.types import ModelId, MonotonicS, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.addresses import PeerAddress, check_bindable, is_loopback, parse_announce, parse_listen
from p2p.bridge import Bridge, Runner
from p2p.control import (
    SENDER,
    Answer,
    ControlNode,
    ControlPlaneDown,
    HostConfig,
    HostHooks,
    IncomingStream,
    RelayLimits,
)
from p2p.first_answers import first_answers
from p2p.gate import PeerGate
from p2p.identity import Identity, short
from p2p.invite import Invite, parse_bootstrap
from p2p.mdns import LanDiscovery
from p2p.membership_core import (
    Ask,
    Connection,
    Dial,
    Disconnect,
    Gossip,
    JoinDht,
    Membership,
    Met,
    Moment,
    NamedPeer,
    Notice,
    SaveBook,
    Silence,
    WayIn,
)
from p2p.peer_book import KnownPeer, PeerBook, load, save
from p2p.publication_core import Publish
from p2p.puzzle import PuzzleChecker
from p2p.reachability import Reachability
from p2p.reachability_verdict import Plane
from p2p.record_exchange import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, PROTOCOL_ID, RecordExchange, claims_of
from p2p.records import NodeRecord, RecordTable, Refusal, open_record
from p2p.seam import PathKind
from p2p.swarm_key import SwarmKey
from p2p.upnp import PortMapper
from p2p.websocket import path_for

EXCHANGE_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 9.0
"""For the answer of a further protocol: less than the asker's connection waits (REQUEST_TIMEOUT_S of the adapter)."""

LOOKUP_TIMEOUT_S = 15.0
LOOKUP_GRACE_S = 1.0
"""How much longer ``find`` waits for the DHT when a connected peer has answered. The look-up goes on; the next ``find``
has its results."""

WITHDRAW_TIMEOUT_S = 1.5
MAX_PARALLEL = 8
MAX_ASKS = 16
"""At once, to all peers that answer: each takes some milliseconds of the libp2p thread."""

MAX_DOUBTFUL_ASKS = 8
"""At once, beside those, to peers that have not answered when they were last asked, or never yet."""

MAX_NAMED = 8
"""Addresses that an error names."""

MAX_ANNOUNCED = 8
"""Of the control plane, as many as a record holds; at most half of them are left to relays."""

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
        peer_book: the file of known peers; None keeps them for as long as the process lives.
        gossip: whether records are published on a topic, beside pushes and pulls. Off: see docs/protocol-network.md.
        upnp: whether to ask the router to forward the ports; without effect when listening on loopback.
    """

    listen: tuple[str, ...]
    bootstrap: tuple[str, ...] = field(repr=False)  # an invite may be a secret
    mdns: bool
    serve: bool
    announce: tuple[str, ...] = ()
    peer_book: Path | None = None
    gossip: bool = False
    upnp: bool = False


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
        """Multiaddrs under which this process can be dialled, as far as it knows, with ``/p2p/PEER-ID``: for people."""
        ...

    @property
    def announced_addresses(self) -> list[str]:
        """Those that peers have dialled, that the operator has named, or that lead through a relay: for the record."""
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
        relay: what this process carries for others; None carries nothing.
        gate: who may connect and ask; what it bans is disconnected at once.
        price: what the identities behind records must have paid; None demands nothing.
        is_loopback: of a host; another than the default only in tests, which have nothing but loopback.

    Attributes:
        reachability: which of the addresses can be dialled.
        on_peer_met: each is called in the event loop when a peer has answered or asked for the first time on the
            present connection; from then on ``request`` reaches it.
        on_connection: each is called in the event loop with a peer, and whether it is connected now or not any more.
        extra_addresses: each gives further addresses under which this process can be dialled, as those at a relay.
        on_stream: called in the event loop with every stream for the data plane that a peer opens; None while nobody
            wants them.
        on_path: each is called in the event loop with a peer with which the best connection is now over another path.
        on_relay_lost: each is called in the event loop with a relay that has gone, at which this process had a
            reservation.
        on_down: each is called in the event loop when the thread of the host has ended, with all that ran over it.
    """

    def __init__(
        self,
        identity: Identity,
        config: DiscoveryConfig,
        *,
        protocols: Sequence[RequestProtocol] = (),
        swarm_key: SwarmKey | None = None,
        relay: RelayLimits | None = None,
        gate: PeerGate | None = None,
        price: PuzzleChecker | None = None,
        is_loopback: Callable[[str], bool] = is_loopback,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._protocols = {protocol.id: protocol for protocol in protocols}
        self._swarm_key = swarm_key
        self._relay = relay
        self._gate = gate or PeerGate()
        self._gate.on_change(lambda: self._post(self._drop_refused))
        self._price = price or PuzzleChecker(0)
        self.on_peer_met: list[Callable[[PeerId], None]] = []
        self.on_connection: list[Callable[[PeerId, bool], None]] = []
        self.extra_addresses: list[Callable[[], Sequence[PeerAddress]]] = []
        self.on_stream: Callable[[IncomingStream], None] | None = None
        self.on_path: list[Callable[[PeerId, PathKind], None]] = []
        self.on_relay_lost: list[Callable[[PeerId], None]] = []
        self.on_down: list[Callable[[], None]] = []
        self._identity = identity
        self._config = config
        self._clock = clock
        self._chance = secrets.SystemRandom()
        self.table = RecordTable(price=self._price)
        self._exchange = RecordExchange(self.table, self._chance)
        self._bridge: Bridge[ControlNode] = Bridge(self._make_runner, on_down=self._host_down, on_restart=self._resume)
        self._listen: tuple[tuple[str, int], ...] = ()
        self._protected: set[PeerId] = set()
        self._core = self._make_core((), PeerBook())
        self._met = asyncio.Event()
        """Set while a peer is connected that has answered or asked something."""
        self._lan: LanDiscovery | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asks = asyncio.Semaphore(MAX_ASKS)
        self._doubtful_asks = asyncio.Semaphore(MAX_DOUBTFUL_ASKS)
        self._checking = asyncio.Semaphore(1)
        """So that puzzles take one core at most."""
        self._waiting_for: dict[int, asyncio.Future[bool]] = {}
        """By token of what was asked: whether there was an answer."""
        self._doubtful: set[int] = set()
        """Tokens of what was asked of those who have not answered when they were last asked, or never yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._lookups: dict[ModelId | None, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.reachability = self._make_reachability(is_loopback)

    @property
    def addresses(self) -> list[str]:
        extra = [address for provider in self.extra_addresses for address in provider()]
        announced = self._own_addresses(self.reachability.announced(Plane.CONTROL))
        best_known = self._own_addresses(self.reachability.best_known(Plane.CONTROL))
        # A relay's circuit is better than a guess, and an invite has room for few.
        return [str(address) for address in dict.fromkeys([*announced, *extra, *best_known])]

    @property
    def local_addresses(self) -> list[str]:
        """Where this process may be dialled from its own machine and networks, confirmed or not."""
        return [str(address) for address in self._own_addresses(self.reachability.possible(Plane.CONTROL))]

    @property
    def announced_addresses(self) -> list[str]:
        extra = [str(address) for provider in self.extra_addresses for address in provider()]
        extra = extra[: MAX_ANNOUNCED // 2]
        direct = self._own_addresses(self.reachability.announced(Plane.CONTROL)[: MAX_ANNOUNCED - len(extra)])
        return [*map(str, direct), *extra]

    @property
    def invite(self) -> str:
        return Invite(tuple(map(PeerAddress.parse, self.addresses))).encode()

    @property
    def listening(self) -> tuple[tuple[str, int], ...]:
        """Host and port of the control plane's sockets, as bound; empty when it only dials."""
        return self._listen

    @property
    def num_peers(self) -> int:
        return len(self._core.connected)

    @property
    def connected(self) -> list[PeerId]:
        """Peers that are connected, whoever has made the connection."""
        return self._core.connected

    @property
    def connections(self) -> list[Connection]:
        """What is known of the connections with them."""
        return self._core.connections(self._moment())

    @property
    def known_peers(self) -> list[KnownPeer]:
        """Those that this process, or another one of this home, has dialled with success."""
        return self._core.book.entries()

    @property
    def clock_offset_s(self) -> float | None:
        """By how much our peers' clocks are ahead of ours, in the middle; None while fewer than three are known."""
        return self._core.clock_offset_s

    @property
    def num_clocks(self) -> int:
        """How many peers have told the time lately."""
        return self._core.num_clocks

    @property
    def named_peers(self) -> list[NamedPeer]:
        """The peers that this process was told to enter the swarm by."""
        return self._core.named

    @property
    def num_nodes_estimated(self) -> int:
        """Nodes of the swarm: those known, or in a large swarm, where only some are, an estimate."""
        return self._core.num_nodes_estimated(self._moment())

    def suspect(self, peer: PeerId) -> None:
        """Something suggests that a connected peer is gone: it is asked, and dropped only if it stays silent."""
        self._core.suspect(peer, self._moment())
        self._pump()

    def protect(self, peer: PeerId, *, protected: bool = True) -> None:
        """Keeps the connection with a peer, as one that relays for us, from being given up when there are too many."""
        (self._protected.add if protected else self._protected.discard)(peer)

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
        self.reachability.operator_says([parse_announce(text) for text in self._config.announce])
        named: dict[PeerId, list[str]] = {}
        for address in parse_bootstrap(self._config.bootstrap, now=self._now()):
            named.setdefault(address.peer, []).append(str(address))
        for host, port in listen:
            check_bindable(host, port)
        self._loop = asyncio.get_running_loop()
        self._listen = listen
        book = PeerBook() if self._config.peer_book is None else load(self._config.peer_book, now=self._now())
        self._core = self._make_core([WayIn(peer, tuple(texts)) for peer, texts in named.items()], book)
        await self._bridge.start()
        # With the ports that were really bound, so that a restart listens where others know us.
        self._listen = tuple(await self._bridge.call(lambda node: node.listening()))
        self.reachability.bound(Plane.CONTROL, self._listen)
        self._spawn(self.reachability.run())
        self._core.start(self._moment())
        self._pump()
        if self._config.mdns and not (self._listen and all(is_loopback(host) for host, _ in self._listen)):
            self._lan = LanDiscovery(self._identity.peer_id, self._own_on_lan, self._found_on_lan, self._swarm_key)
            self.reachability.on_change.append(self._lan.addresses_changed)
            self._spawn(self._lan.run())

    async def wait_for_peer(self, timeout_s: float) -> None:
        tried = self._core.ways_in
        if not self._met.is_set() and not tried and self._lan is None:
            raise NoPeers("there is no peer to try: give the address or the invite of a node with --peer")
        try:
            async with asyncio.timeout(timeout_s):
                await self._met.wait()
        except TimeoutError:
            more = [f"{len(tried) - MAX_NAMED} more"] if len(tried) > MAX_NAMED else []
            where = ", ".join([*tried[:MAX_NAMED], *more, *(["the local network"] if self._lan is not None else [])])
            raise NoPeers(
                f"no peer answered within {timeout_s:.0f} s (tried {where}"
                f"{'; ' + self._core.last_failure if self._core.last_failure else ''}): "
                f"{'check that the node runs and that its address can be reached from here' if tried else _NAME_ONE}"
            ) from None

    async def announce(self, envelope: bytes, model_ids: Sequence[ModelId]) -> None:
        record, pushes = self._core.announce(envelope, model_ids, self._moment())
        if isinstance(record, Refusal):
            raise LocalProtocolError(f"the record to announce would be refused by others: {record}")
        self._pump()
        await self._wait_for(pushes, EXCHANGE_TIMEOUT_S)

    async def withdraw(self, envelope: bytes) -> None:
        record, pushes = self._core.withdraw(envelope, self._moment())
        if isinstance(record, Refusal):
            raise LocalProtocolError(f"the record to announce would be refused by others: {record}")
        self._pump()
        with contextlib.suppress(TimeoutError, FusionError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await asyncio.gather(self._wait_for(pushes, WITHDRAW_TIMEOUT_S), self._put_own())

    async def find(self, model_id: ModelId | None, *, timeout_s: float) -> list[NodeRecord]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not self.num_peers and (self._core.ways_in or self._lan is not None) and not self._others():
            # Without this, a user who asks right after `start` gets the answer of an empty swarm.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._met.wait()
        lookup = self._lookup(model_id)
        tokens = self._core.pull(model_id, self._moment())
        self._pump()
        waiting = {token: self._waiting_for[token] for token in tokens if token in self._waiting_for}
        asked: set[asyncio.Future[bool]] = set(waiting.values())
        sure = {each for token, each in waiting.items() if token not in self._doubtful} or asked
        wait_for = partial(
            first_answers,
            timeout_s=min(deadline - loop.time(), LOOKUP_GRACE_S + EXCHANGE_TIMEOUT_S * bool(asked)),
            is_answer=lambda each: each in asked and each.result(),
        )
        both: set[asyncio.Future[Any]] = {*sure, lookup}
        await asyncio.gather(wait_for(sure), wait_for(both, grace_s=LOOKUP_GRACE_S))
        pending: set[asyncio.Future[Any]] = {each for each in both | asked if not each.done()}
        while pending and (left_s := deadline - loop.time()) > 0.0:
            if self._exchange.serving(model_id, now=self._now()):
                break
            _, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if lookup.done() and not lookup.cancelled() and isinstance(lookup.exception(), ControlPlaneDown):
            raise ControlPlaneDown("the libp2p thread has stopped; it is being started again")
        return self._exchange.serving(model_id, now=self._now())

    async def aclose(self) -> None:
        if not self._closed:
            self._core.remember_all(self._moment())
            await self._save_book()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
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
        if isinstance(record, NodeRecord):
            record = self._price(record, SENDER.get(), self._now()) or record
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
        if self._loop is None:  # before the start, when there is nothing to be told of
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    # Their other halves, in the event loop.

    def _count_refusal(self, refusal: Refusal) -> None:
        self.table.refused[refusal] = self.table.refused.get(refusal, 0) + 1

    def _answer(self, peer: PeerId, request: bytes, answer: Answer) -> None:
        try:
            reply = self._core.asked(peer, request, self._moment())
        except WireError as error:
            log.info("peer %s sent a malformed request: %s", short(peer), error)
            self._gate.report(peer, None, f"malformed request: {error}")
            answer(None)
        else:
            answer(reply)
            self._pump()

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
            self._core.connection_opened(peer, self._moment())
        else:
            self._core.connection_closed(peer, self._moment())
        self._pump()

    def _host_down(self) -> None:
        """When the thread goes down, and not when it is back: by then it may have told of new connections."""
        self._core.host_down()
        _tell(self.on_down)
        self._pump()

    def _resume(self) -> None:
        log.warning("the libp2p thread runs again")
        self._core.host_resumed(self._moment())
        self._pump()

    def _own_on_lan(self) -> list[PeerAddress]:
        return list(map(PeerAddress.parse, self.local_addresses))

    def _found_on_lan(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        self._core.found(peer, [str(address) for address in addresses], self._moment())
        self._pump()

    def _others(self) -> list[NodeRecord]:
        """The live nodes that are known, without this one."""
        return [r for r in self._exchange.serving(None, now=self._now()) if r.peer != self._identity.peer_id]

    # Carrying out what the core decides.

    def _make_core(self, named: Sequence[WayIn], book: PeerBook) -> Membership:
        return Membership(
            self._identity.peer_id,
            serve=self._config.serve,
            named=named,
            book=book,
            exchange=self._exchange,
            chance=self._chance,
            protected=self._protected,
            gossip=self._config.gossip,
        )

    def _pump(self) -> None:
        """After each call of the core: its commands are begun, and its timer is set."""
        if self._closed:
            return
        for command in self._core.commands():
            match command:
                case Ask():
                    assert self._loop is not None  # noqa: S101  # nothing is asked before the start
                    self._waiting_for[command.token] = self._loop.create_future()
                    if not command.is_sure:
                        self._doubtful.add(command.token)
                    self._spawn(self._ask(command))
                case Dial():
                    self._spawn(self._dial(command))
                case Disconnect():
                    self._spawn(self._disconnect(command))
                case JoinDht():
                    self._spawn(self._join_dht(command))
                case Publish():
                    self._spawn(self._publish(command))
                case SaveBook():
                    self._spawn(self._save_book())
                case Met():
                    for listener in self.on_peer_met:
                        listener(command.peer)
                case Notice():
                    log.log(logging.WARNING if command.is_warning else logging.INFO, "%s", command.text)
                case Gossip():
                    self._spawn(self._publish_on_topic(command))
        (self._met.set if self._core.has_met else self._met.clear)()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self._core.get_timer()
        if at_s is not None and self._loop is not None:
            self._timer = self._loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._core.handle_timer(self._moment())
        self._pump()

    async def _ask(self, ask: Ask) -> None:
        silence, why = Silence.DOWN, "given up"
        answer: bytes | None = None
        try:
            # The wait for a slot is ours, and no silence of the peer's.
            async with self._asks if ask.is_sure else self._doubtful_asks, asyncio.timeout(EXCHANGE_TIMEOUT_S):
                answer = await self._bridge.call(
                    lambda node: node.request(ask.peer, PROTOCOL_ID, ask.request, limit_bytes=MAX_ANSWER_BYTES)
                )
            await self._check_puzzles(answer, ask.peer)
        except TimeoutError:
            silence, why = Silence.TIMEOUT, f"no answer within {EXCHANGE_TIMEOUT_S:.0f} s"
        except PeerClosed as error:
            silence, why = Silence.REFUSED, str(error)
        except RemoteProtocolError as error:
            silence, why = Silence.BROKEN, str(error)
            self._gate.report_failure(ask.peer, None, error)
        except PeerError as error:
            silence, why = Silence.TIMEOUT, str(error)
        except ControlPlaneDown as error:
            why = str(error)
        finally:
            if answer is not None:
                self._core.answered(ask.token, answer, self._moment())
            else:
                log.debug("peer %s gave no answer: %s", short(ask.peer), why)
                self._core.not_answered(ask.token, silence, why, self._moment())
            self._doubtful.discard(ask.token)
            waiting = self._waiting_for.pop(ask.token)
            if not waiting.done():
                waiting.set_result(answer is not None)
            self._pump()

    async def _check_puzzles(self, answer: bytes, source: PeerId) -> None:
        """Those that the core will ask for, in a thread: an answer with 256 new nodes takes 0.2 s of one, in which the
        event loop has tensors to pass on."""
        if self._price.bits > 0:
            async with self._checking:
                await asyncio.to_thread(lambda: self._price.check_ahead(claims_of(answer), source, self._now()))

    async def _wait_for(self, tokens: Iterable[int], timeout_s: float) -> None:
        """Returns when all of these have been answered or not, or the time is up."""
        waiting = [self._waiting_for[token] for token in tokens if token in self._waiting_for]
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, timeout_s))

    async def _dial(self, dial: Dial) -> None:
        error: str | None = "given up"
        is_own_fault = False
        try:
            addresses = _parsed(dial.addresses, dial.peer)
            await self._bridge.call(lambda node: node.connect(dial.peer, addresses))
            error = None
        except FusionError as failure:
            error, is_own_fault = str(failure), isinstance(failure, ControlPlaneDown)
        finally:
            self._core.dialled(dial.peer, self._moment(), error=error, is_own_fault=is_own_fault)
            self._pump()

    async def _disconnect(self, command: Disconnect) -> None:
        is_gone = False
        with contextlib.suppress(FusionError):
            is_gone = await self._bridge.call(lambda node: node.disconnect(command.peer, if_spare=command.if_spare))
        if is_gone:
            log.info("peer %s is disconnected: %s", short(command.peer), command.why)
            # The host tells of it too, unless there was nothing left to disconnect.
            self._core.connection_closed(command.peer, self._moment())
            self._pump()

    async def _join_dht(self, command: JoinDht) -> None:
        is_done = False
        try:
            await self._bridge.call(lambda node: node.join_dht(command.peer))
            is_done = True
        except FusionError as error:
            log.debug("the DHT was not entered through peer %s: %s", short(command.peer), error)
        finally:
            self._core.joined_dht(self._moment(), is_done=is_done)
            self._pump()

    async def _publish(self, publish: Publish) -> None:
        is_done = False
        try:
            if publish.put:
                await self._put_own()
            for model_id in publish.provide:
                key = provider_key(model_id)
                await self._bridge.call(lambda node, key=key: node.provide(key))  # type: ignore[misc]
            is_done = True
        except FusionError as error:
            log.info("the record could not be stored in the DHT, trying at the next announcement: %s", error)
        finally:
            self._core.published(self._moment(), is_done=is_done)
            self._pump()

    async def _publish_on_topic(self, command: Gossip) -> None:
        try:
            await self._bridge.call(lambda node: node.gossip(command.envelope))
        except FusionError as error:
            log.debug("the record was not published on the topic: %s", error)

    def _on_gossip(self, forwarder: PeerId, record: bytes) -> bool:
        """In the host's thread: what is not valid is not passed on."""
        if isinstance(open_record(record, now=self._now()), Refusal):
            return False
        self._post(self._take_gossip, forwarder, record)
        return True

    def _take_gossip(self, forwarder: PeerId, record: bytes) -> None:
        self._core.gossiped(forwarder, record, self._moment())
        self._pump()

    async def _save_book(self) -> None:
        book, path = self._core.book, self._config.peer_book
        if path is not None and book.is_changed:
            book.is_changed = False
            await asyncio.to_thread(save, book.copy(), path, now=self._now())

    async def _put_own(self) -> None:
        envelope = self._exchange.own_envelope
        if envelope is not None:
            key = record_key(self._identity.peer_id)
            await self._bridge.call(lambda node: node.put_value(key, envelope))

    # Finding.

    def _lookup(self, model_id: ModelId | None) -> asyncio.Task[None]:
        """The look-up under way, or a new one: two at once would each spoil the other's cache handling."""
        under_way = self._lookups.get(model_id)
        if under_way is None or under_way.done():
            under_way = self._spawn(self._look_up(model_id))
            under_way.add_done_callback(_looked_up)
            self._lookups[model_id] = under_way
        return under_way

    async def _look_up(self, model_id: ModelId | None) -> None:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                key = provider_key(model_id)
                providers = await self._bridge.call(lambda node: node.find_providers(key))
                missing = set(self._core.missing((found.peer for found in providers), self._moment()))
                wanted = [found for found in providers if found.peer in missing]
                await _each(wanted, lambda found: self._fetch(found.peer, found.addresses, model_id))
        except (TimeoutError, PeerError) as error:
            log.debug("a look-up in the DHT ended early: %s", error)

    async def _fetch(self, peer: PeerId, addresses: Sequence[PeerAddress], model_id: ModelId | None) -> None:
        """A node's record from itself, or else from the DHT."""
        with contextlib.suppress(PeerError):
            await self._bridge.call(lambda node: node.connect(peer, addresses))
            token = self._core.ask(peer, model_id, self._moment())
            self._pump()
            await self._wait_for([token], LOOKUP_TIMEOUT_S)
        if self._core.missing([peer], self._moment()):
            value = await self._bridge.call(lambda node: node.get_value(record_key(peer)))
            if value is not None:
                self.table.receive(value, now=self._now())

    # Shared.

    def _make_runner(self) -> Runner[ControlNode]:
        from p2p.libp2p_adapter import Libp2pRunner  # here, in the thread: it takes more than a second

        config = HostConfig(
            seed=self._identity.seed,
            listen=self._listen,
            serve=self._config.serve,
            protocols={PROTOCOL_ID: MAX_REQUEST_BYTES}
            | {protocol.id: protocol.max_request_bytes for protocol in self._protocols.values()},
            swarm_key=self._swarm_key,
            relay=self._relay,
            accepts_streams=self.on_stream is not None,
            gossip=self._config.gossip,
        )
        hooks = HostHooks(
            self._sequence_of,
            self._on_request,
            self._on_connection,
            on_stream=lambda stream: self._post(self._take_stream, stream),
            on_path=lambda peer, path: self._post(_tell, self.on_path, peer, path),
            on_gossip=self._on_gossip,
            on_relay_lost=lambda relay: self._post(_tell, self.on_relay_lost, relay),
            on_reached=lambda nonce, at: self._post(self.reachability.reached, Plane.CONTROL, nonce, at),
            gate=self._gate,
        )
        return Libp2pRunner(config, hooks)

    def _drop_refused(self) -> None:
        if not self._closed:
            self._spawn(self._drop())

    async def _drop(self) -> None:
        with contextlib.suppress(FusionError):
            await self._bridge.call(lambda node: node.drop_refused())

    def _take_stream(self, stream: IncomingStream) -> None:
        if self.on_stream is not None:
            self.on_stream(stream)

    def _make_reachability(self, is_loopback: Callable[[str], bool]) -> Reachability:
        reachability = Reachability(
            self,
            data_path=path_for(None if self._swarm_key is None else self._swarm_key.noise_psk),
            mapper=PortMapper() if self._config.upnp else None,
            is_loopback=is_loopback,
        )
        self.add_protocol(
            RequestProtocol(reachability.protocol_id, reachability.max_request_bytes, reachability.dial_back.answer)
        )
        self.on_peer_met.append(reachability.peer_met)
        self.on_connection.append(lambda peer, connected: None if connected else reachability.peer_gone(peer))
        self.on_path.append(lambda peer, path: reachability.path_found(peer))
        self.on_down.append(reachability.peers_gone)
        return reachability

    def _own_addresses(self, direct: Sequence[tuple[str, int]]) -> list[PeerAddress]:
        return [PeerAddress.of(host, port, self._identity.peer_id) for host, port in direct]

    def _now(self) -> UnixS:
        return UnixS(self._clock())

    def _moment(self) -> Moment:
        return Moment(MonotonicS(asyncio.get_running_loop().time()), self._now())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _looked_up(lookup: asyncio.Task[None]) -> None:
    """Whoever still waits learns that the host is down; if nobody does, only faults of ours are told of."""
    error = None if lookup.cancelled() else lookup.exception()
    if isinstance(error, FusionError):
        log.debug("a look-up in the DHT ended early: %s", error)
    elif error is not None:
        context = {"message": "a look-up in the DHT failed", "exception": error, "task": lookup}
        lookup.get_loop().call_exception_handler(context)


def _tell(listeners: Sequence[Callable[..., None]], *arguments: object) -> None:
    for listener in listeners:
        listener(*arguments)


def record_key(peer: PeerId) -> str:
    """The DHT key of a node's record."""
    return f"/fusion/{peer}"


def provider_key(model_id: ModelId | None) -> bytes:
    """The DHT key under which the nodes of a model, or all nodes, are providers: a SHA2-256 multihash."""
    text = b"nodes" if model_id is None else b"model/" + model_id.encode()
    return _SHA2_256_MULTIHASH + hashlib.sha256(_PROVIDER_DOMAIN + text).digest()


def _parsed(texts: Iterable[str], peer: PeerId) -> list[PeerAddress]:
    """Those of the addresses that can be dialled and lead to the peer."""
    found = []
    for text in texts:
        with contextlib.suppress(ConfigError):
            address = PeerAddress.parse(text)
            if address.peer == peer:
                found.append(address)
    return found


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
