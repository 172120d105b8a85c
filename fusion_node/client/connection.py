"""The user's connection to a swarm: discovery, links, measured nodes, and the messages of all sessions.

Shared by everything on the user's side, so it knows nothing of models or torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import structlog

import fusion_node
from fusion_node.client.topology import LOCATE_PASSES, choose_to_measure, coordinate_of
from fusion_node.client.undialled_core import Undialled
from fusion_node.errors import (
    ConfigError,
    FusionError,
    NoPeers,
    PeerError,
    PeerTimeout,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
)
from fusion_node.types import ModelId, MonotonicS, PeerId, UnixS, group_id
from p2p.audit_log import AuditLog
from p2p.bandwidth import BandwidthMeter
from p2p.compression import FEATURE, Compressor
from p2p.discovery import Discovery, DiscoveryConfig, DiscoveryService
from p2p.first_answers import first_answers
from p2p.gate import PeerGate
from p2p.identity import Identity, short
from p2p.invite import parse_bootstrap, swarm_key_of
from p2p.libp2p_network import Libp2pNetwork
from p2p.link_emulation import EmulatedLine
from p2p.link_emulation_core import LineShape
from p2p.links import LinkPool
from p2p.local_nodes import running
from p2p.messages import (
    AnyMessage,
    Assign,
    Assigned,
    BandwidthProbe,
    BandwidthReport,
    Replayed,
    SessionClosed,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionRefused,
    SessionReleased,
    StatusReply,
    StatusRequest,
    StepResult,
    StepTaps,
)
from p2p.paths import RoutedNetwork
from p2p.peer_book import path_of
from p2p.puzzle import PuzzleChecker, check_bits, default_bits
from p2p.records import NodeRecord, dialled_at
from p2p.seam import Network, PathKind
from p2p.swarm_key import SwarmKey, swarm_tag
from p2p.websocket import WebSocketNetwork
from scheduler.vivaldi import Coordinate, Vivaldi

FIND_TIMEOUT_S = 10.0
ENTER_TIMEOUT_S = 20.0
LAN_TIMEOUT_S = 6.0
"""Without an address, nodes on the local network answer in a second or two, or are not there."""
DIALLED_BACK_S = 2.0
"""How long a node may take to be dialled back by us and to say so: 0.3 s on one network, 1.2 s with eight programs
waiting for each core. It may also never be, and then this is lost now and then (fusion_node.client.undialled_core)."""

MEASURE_TIMEOUT_S = 6.0
ASSIGN_TIMEOUT_S = 15.0
"""A node looks at the swarm before it answers."""

MAX_MEASURED = 64
"""Nodes that one look at the swarm connects to. How far the others are, network coordinates predict."""

_CLOSED = "the connection to the swarm was closed here"

log = structlog.get_logger(__name__)

SessionHandler = Callable[[PeerId, AnyMessage, memoryview], None]
LostHandler = Callable[[PeerId | None, FusionError], None]
"""Called with the peer that is gone, or with None when the connection itself is closed."""


@dataclass(frozen=True, slots=True)
class MeasuredNode:
    """A node's own record and what we measured of it; or a fusion group of such nodes.

    Attributes:
        record: of a group, its first member's.
        round_trip_s: None when it could not be reached; of a group the longest.
        problem: why it could not be reached.
        members, weights: of a group, in the order of their slices.
    """

    record: NodeRecord
    round_trip_s: float | None
    problem: str = ""
    members: tuple[MeasuredNode, ...] = ()
    weights: tuple[int, ...] = ()

    @property
    def peer(self) -> PeerId:
        return group_id([each.peer for each in self.members]) if self.members else PeerId(self.record.peer)

    @classmethod
    def of_group(cls, members: Sequence[MeasuredNode], weights: Sequence[int]) -> MeasuredNode:
        """The group of these nodes."""
        trips_s = [each.round_trip_s for each in members if each.round_trip_s is not None]
        longest_s = max(trips_s) if len(trips_s) == len(members) else None
        return cls(members[0].record, longest_s, members=tuple(members), weights=tuple(weights))


def ways_in(peers: Sequence[str], *, mdns: bool, home: Path, swarm_key: SwarmKey | None = None) -> tuple[str, ...]:
    """The addresses given, or else those of the nodes of this swarm that run on this machine from the same home."""
    return tuple(peers) or (running(home / "run", swarm_tag(swarm_key)) if mdns else ())


def _hosts(peers: Sequence[str]) -> list[str]:
    """Where these peers are. Malformed ones are left out here, and told of when the swarm is entered."""
    try:
        return [address.host for address in parse_bootstrap(peers, now=UnixS(time.time()))]
    except ConfigError:
        return []


def _has_answered(task: asyncio.Task[MeasuredNode]) -> bool:
    return not task.cancelled() and task.exception() is None and task.result().round_trip_s is not None


def _answers(measuring: Mapping[asyncio.Task[MeasuredNode], NodeRecord]) -> list[MeasuredNode]:
    """What is known by now of each of those that are being measured.

    Raises:
        NoPeers: the connection was closed meanwhile.
    """
    if any(task.cancelled() for task in measuring):
        raise NoPeers(_CLOSED)
    return [
        task.result()
        if task.done()
        else MeasuredNode(record, None, f"node {short(PeerId(record.peer))} has not answered yet")
        for task, record in measuring.items()
    ]


class SwarmConnection:
    """One identity in the swarm, as a user.

    Args:
        peers: multiaddrs or invites to enter the swarm by.
        identity: None makes one that lives as long as the connection, so that two runs cannot be linked.
        mdns: whether to look for nodes on the local network.
        home: folder whose known peers (p2p.peer_book) are tried as well, and added to; None keeps none.
        swarm_key: of the private swarm to enter; an invite among ``peers`` may hold it instead.
        bans: file of those that are banned (p2p.bans); None bans nobody.
        puzzle_bits: what the identities of nodes must have paid; None is p2p.puzzle.default_bits.
        discovery, network: other implementations, for tests; they must prove ``identity``.
        emulated_line: how slow a line to pretend on this side, for demonstrations and measurements
            (p2p.link_emulation); None: none.
        dialled_back_s: see DIALLED_BACK_S.
        audit: file to record in what is sent to nodes and comes from them (p2p.audit_log); None records nothing.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        peers: Sequence[str] = (),
        *,
        identity: Identity | None = None,
        mdns: bool = True,
        home: Path | None = None,
        swarm_key: SwarmKey | None = None,
        bans: Path | None = None,
        puzzle_bits: int | None = None,
        discovery: DiscoveryService | None = None,
        network: Network | None = None,
        emulated_line: LineShape | None = None,
        dialled_back_s: float = DIALLED_BACK_S,
        audit: Path | None = None,
    ) -> None:
        self.identity = identity or Identity.generate()
        software = f"fusion-node {fusion_node.__version__}"
        self._audit = None if audit is None else AuditLog(audit, self.identity.peer_id, software=software)
        self._peers = tuple(peers)
        self._mdns = mdns
        key = swarm_key_of(self._peers, swarm_key, now=UnixS(time.time()))
        self._book = None if home is None else path_of(home, swarm_tag(key))
        config = DiscoveryConfig(listen=(), bootstrap=self._peers, mdns=mdns, serve=False, peer_book=self._book)
        self._gate = gate = PeerGate(bans)
        if puzzle_bits is None:
            puzzle_bits = default_bits(_hosts(self._peers), is_private=key is not None)
        price = PuzzleChecker(check_bits(puzzle_bits), is_exempt=gate.is_neighbour)
        self._discovery = discovery or Discovery(self.identity, config, swarm_key=key, gate=gate, price=price)
        psk = None if key is None else key.noise_psk
        if network is None:
            line = None if emulated_line is None else EmulatedLine(emulated_line)
            network = WebSocketNetwork(self.identity, psk=psk, gate=gate, line=line)
            if isinstance(self._discovery, Discovery):
                libp2p = Libp2pNetwork(self.identity, self._discovery, psk=psk, gate=gate, line=line)
                network = RoutedNetwork(network, libp2p)
        self.links = LinkPool(
            network,
            self.identity.peer_id,
            gate=gate,
            on_frame=self._on_frame,
            on_closed=self._on_closed,
            features=(FEATURE,),
            recorder=self._audit,
        )
        gate.on_change(self.links.drop_refused)
        if isinstance(self._discovery, Discovery):
            self._discovery.on_path.append(self._path_changed)
        self.bandwidth = BandwidthMeter(self.links)
        self.compressor = Compressor(rate_Bps=self.links.delivery_rate_Bps, features=self.links.features)
        self._sessions: dict[bytes, tuple[SessionHandler, LostHandler]] = {}
        self.on_released: list[Callable[[PeerId, SessionReleased], None]] = []
        """Are told of releases, which come when their session is over."""
        self._status: dict[int, tuple[PeerId, asyncio.Future[StatusReply]]] = {}
        self._assigning: dict[int, tuple[PeerId, asyncio.Future[str]]] = {}
        self._request_numbers = itertools.count(1)
        self._dialled_back_s = dialled_back_s
        self._vivaldi = Vivaldi(secrets.SystemRandom())
        self._is_located = False
        self._undialled = Undialled()
        self._measuring: set[asyncio.Task[MeasuredNode]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Begins to enter the swarm; returns before any peer has answered.

        Raises:
            NoPeers: there is no way in: no address given, no peer known, and no local network to look in.
            ConfigError: an address or invite is malformed.
        """
        if not self._peers and not self._mdns and not self._has_book:
            raise NoPeers("no way into a swarm: name a node with --peer ADDRESS or --peer INVITE")
        await self._discovery.start()

    async def aclose(self) -> None:
        """Leaves the swarm. What still waits for an answer ends with NoPeers."""
        error = NoPeers(_CLOSED)
        for _, on_lost in list(self._sessions.values()):
            on_lost(None, error)
        for _, future in list(self._status.values()):
            if not future.done():
                future.set_exception(error)
        for task in self._measuring:
            task.cancel()
        await asyncio.gather(*self._measuring, return_exceptions=True)
        await self.links.aclose("done")
        if self._audit is not None:
            self._audit.close()
        await self._discovery.aclose()

    async def find(self, model_id: ModelId | None, *, timeout_s: float = FIND_TIMEOUT_S) -> list[NodeRecord]:
        """Records of the nodes that serve a model, or of all nodes.

        Raises:
            NoPeers: no peer of the swarm can be reached.
        """
        self._gate.refresh()
        await self._discovery.wait_for_peer(ENTER_TIMEOUT_S if self._peers or self._has_book else LAN_TIMEOUT_S)
        records = await self._discovery.find(model_id, timeout_s=timeout_s)
        wanted = self._undialled.wanted(records, model_id, now=MonotonicS(time.monotonic()))
        if not wanted:
            return records
        # Nodes that had nobody to dial them back before this process came: it is doing so just now.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dialled_back_s):
                while self._without_address(wanted):  # noqa: ASYNC110 - pushed by peers
                    await asyncio.sleep(0.05)
        self._undialled.waited(wanted, self._without_address(wanted), now=MonotonicS(time.monotonic()))
        without = {record.peer for record in records if not dialled_at(record)}
        return [*(record for record in records if record.peer not in without), *self._live(without)]

    @property
    def coordinate(self) -> Coordinate | None:
        """Where this user is among the nodes; None until one that has a coordinate was measured."""
        return self._vivaldi.coordinate if self._is_located else None

    @property
    def _has_book(self) -> bool:
        return self._book is not None and self._book.exists()

    def _live(self, peers: Collection[str]) -> list[NodeRecord]:
        """The nodes among these that still serve, as they are known now."""
        live = self._discovery.table.live(now=UnixS(time.time()))
        return [each for each in live if each.peer in peers and each.shards]

    def _without_address(self, peers: Collection[str]) -> list[str]:
        return [each.peer for each in self._live(peers) if not dialled_at(each)]

    def known(self, model_id: ModelId) -> list[NodeRecord]:
        """Records of the nodes that serve a model, as far as they came by themselves or were found before."""
        live = self._discovery.table.live(now=UnixS(time.time()))
        return [record for record in live if any(shard.model_id == model_id for shard in record.shards)]

    async def measure(
        self,
        records: Sequence[NodeRecord],
        *,
        doubtful: Collection[PeerId] = (),
        on_late: Callable[[MeasuredNode], None] | None = None,
        first_s: float = MEASURE_TIMEOUT_S,
    ) -> list[MeasuredNode]:
        """Connects to nodes, all at once, and measures their round trips.

        Of more than MAX_MEASURED, those that seem nearest by their coordinates, and at least as many by chance: whoever
        could choose the order could hide everybody else behind MAX_MEASURED of its own.

        Args:
            doubtful: whose answers nobody waits for, if there are others.
            on_late: called with whoever answers when this has returned, which is then a while after the first have
                answered (p2p.first_answers). None waits for everybody.
            first_s: how long the first may take to answer, before this returns without any.

        Raises:
            NoPeers: the connection was closed meanwhile.
        """
        rng, measuring = secrets.SystemRandom(), dict[asyncio.Task[MeasuredNode], NodeRecord]()
        if len(records) > MAX_MEASURED and self.coordinate is None:
            # Who is near, we know only once we know where we are.
            first = rng.sample(records, MAX_MEASURED // 2)
            measuring = await self._measure_all(first, doubtful, on_late is not None, first_s)
            self._locate(_answers(measuring), rng)
            measured = {record.peer for record in first}
            records = [record for record in records if record.peer not in measured]
        chosen = choose_to_measure(records, self.coordinate, MAX_MEASURED - len(measuring), rng)
        measuring |= await self._measure_all(chosen, doubtful, on_late is not None, first_s)
        for task in measuring:
            if on_late is not None and not task.done():
                task.add_done_callback(partial(self._measured_late, on_late))
        nodes = _answers(measuring)
        self._locate(nodes, rng)
        return nodes

    async def _measure_all(
        self, records: Sequence[NodeRecord], doubtful: Collection[PeerId], leaves_late: bool, first_s: float
    ) -> dict[asyncio.Task[MeasuredNode], NodeRecord]:
        """All of these under way, or done: those that are late only if they may be left."""
        measuring = {asyncio.create_task(self._measure(record)): record for record in records}
        self._measuring |= measuring.keys()
        for task in measuring:
            task.add_done_callback(self._measured)
        waited_for = {task for task, record in measuring.items() if record.peer not in doubtful} or measuring.keys()
        try:
            if leaves_late:
                await first_answers(
                    waited_for,
                    timeout_s=first_s,
                    is_answer=_has_answered,
                )
            elif measuring:
                await asyncio.wait(measuring)
        except asyncio.CancelledError:
            for task in measuring:
                task.cancel()
            raise
        return measuring

    def _measured(self, task: asyncio.Task[MeasuredNode]) -> None:
        self._measuring.discard(task)
        if not task.cancelled():
            task.exception()  # whoever still waits has it; nobody may

    def _measured_late(self, on_late: Callable[[MeasuredNode], None], task: asyncio.Task[MeasuredNode]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            on_late(task.result())
        elif isinstance(error, FusionError):
            log.debug("a node was not measured", reason=str(error))
        else:
            context = {"message": "a node could not be measured", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)

    def _locate(self, nodes: Sequence[MeasuredNode], rng: Random) -> None:
        known = [
            (node.peer, coordinate, node.round_trip_s)
            for node in nodes
            if node.round_trip_s is not None and (coordinate := coordinate_of(node.record)) is not None
        ]
        # At first it is nowhere, and each of these has to move it more than once.
        for _ in range(1 if self._is_located else LOCATE_PASSES):
            for peer, theirs, round_trip_s in rng.sample(known, len(known)):
                self._vivaldi.observe(peer, theirs, round_trip_s)
                self._is_located = True

    async def status_of(self, node: MeasuredNode) -> dict[str, float]:
        """A connected node's counters, by its own word.

        Raises:
            PeerError: it is not connected, or does not answer.
        """
        number = next(self._request_numbers)
        future: asyncio.Future[StatusReply] = asyncio.get_running_loop().create_future()
        self._status[number] = (node.peer, future)
        try:
            self.links.send(node.peer, StatusRequest(number))
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                return (await future).counters
        except TimeoutError as error:
            raise PeerTimeout(node.peer, f"node {short(node.peer)} does not tell its status") from error
        finally:
            del self._status[number]

    async def assign(self, node: MeasuredNode, assignment: bytes) -> str:
        """Tells a connected node which layers to hold.

        Args:
            assignment: signed, see p2p.records.Assignment.

        Returns:
            Why it does not; empty when it does.

        Raises:
            PeerError: it is not connected, or does not answer.
        """
        number = next(self._request_numbers)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._assigning[number] = (node.peer, future)
        try:
            self.links.send(node.peer, Assign(number, assignment))
            async with asyncio.timeout(ASSIGN_TIMEOUT_S):
                return await future
        except TimeoutError as error:
            raise PeerTimeout(node.peer, f"node {short(node.peer)} does not answer an assignment") from error
        finally:
            del self._assigning[number]

    def register(self, session: bytes, on_message: SessionHandler, on_lost: LostHandler) -> None:
        """Messages of this session, and lost links, go to these from now on."""
        self._sessions[session] = (on_message, on_lost)

    def unregister(self, session: bytes) -> None:
        """Late messages of the session are dropped from now on."""
        self._sessions.pop(session, None)

    async def _measure(self, record: NodeRecord) -> MeasuredNode:
        peer = PeerId(record.peer)
        try:
            if not dialled_at(record) and not self.links.is_connected(peer):
                raise PeerUnreachable(peer, f"node {short(peer)} can be dialled by nobody, and no relay leads to it")
            await self.links.connect(peer, dialled_at(record), timeout_s=MEASURE_TIMEOUT_S)
            known_s = self.links.round_trip_s(peer)
            return MeasuredNode(record, known_s if known_s is not None else await self.links.round_trip(peer))
        except (PeerError, ResourceExhausted) as error:  # links that there are may do
            return MeasuredNode(record, None, str(error))

    def _path_changed(self, peer: PeerId, path: PathKind) -> None:
        """A hole was punched, so the link through a relay goes over to the direct connection."""
        if path is PathKind.STREAM:
            self.links.reconsider(peer, [f"/p2p/{peer}"])

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        match message:
            case (
                StepResult()
                | StepTaps()
                | SessionOpened()
                | SessionRefused()
                | SessionFailed()
                | SessionClosed()
                | SessionProgress()
                | SessionDraining()
                | Replayed()
            ):
                handlers = self._sessions.get(message.session)
                if handlers is not None:
                    handlers[0](peer, message, payload)
            case SessionReleased():
                for on_released in self.on_released:
                    on_released(peer, message)
            case StatusReply():
                asked, future = self._status.get(message.request, (None, None))
                if asked == peer and future is not None and not future.done():
                    future.set_result(message)
            case Assigned():
                told, answer = self._assigning.get(message.number, (None, None))
                if told == peer and answer is not None and not answer.done():
                    answer.set_result(message.problem)
            case BandwidthProbe() | BandwidthReport():
                self.bandwidth.receive(peer, message, len(payload))
            case _:
                raise RemoteProtocolError(peer, f"{short(peer)} sent {type(message).__name__} to a user")

    def _on_closed(self, peer: PeerId, error: FusionError) -> None:
        self.compressor.forget(peer)
        self.bandwidth.forget(peer)
        for _, on_lost in list(self._sessions.values()):
            on_lost(peer, error)
        for asked, future in list(self._status.values()):
            if asked == peer and not future.done():
                future.set_exception(error)
