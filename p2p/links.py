"""The connections of one process: dialled once, shared by all sessions, watched, and ended for a reason.

Everything above the network uses this. There is one connection per peer (p2p.connection), which outlives its links:
when one is lost to the network, another is made at once, by whoever knows an address, and what was under way is sent
again. Only if that fails is the peer lost, and ``on_closed`` says so, exactly once per connection.

Of two links of one connection both sides keep the same one: that of the higher epoch, which the dialling side counts;
when both have dialled at once, that of the smaller peer id. A better path (PathKind) is dialled beside the present one
and replaces it in the same way.

A peer is lost when it says goodbye or breaks the protocol; when it no longer knows the connection, because it was
restarted; when it hangs up and nobody listens at its addresses any more; and RESUME_S after its link, which a silent
one is DEAD_AFTER_S after the last sign of life. So it takes ten seconds at most, and milliseconds after a crash.

Sending never waits. Each connection has a bounded queue, and a peer that lets it overflow, or acknowledges less than
STALLED_BYTES in STALLED_AFTER_S while something waits, does not read and is dropped. All of them together keep at most
MAX_HELD_BYTES of what is not acknowledged; those go first that would take longest to take theirs.

Above 600 lines: a fifth are constants with their reasons, and links come, go and are bounded in one table. The bounds
that the ticker looks after would be the first to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from fusion_node.errors import (
    FusionError,
    LocalProtocolError,
    PeerClosed,
    PeerError,
    PeerTimeout,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
)
from fusion_node.types import PeerId
from fusion_node.wire import MAX_FRAME_BYTES, WireError
from p2p.connection import Connection, LinkEnd, OnFrame, Payload, Recorder
from p2p.dialling import DialFailed, dial_any
from p2p.heartbeat_core import DEAD_AFTER_S, Liveness
from p2p.identity import short
from p2p.link_messages import Goodbye, Hello
from p2p.messages import AnyMessage
from p2p.prefixes import ip_of
from p2p.seam import Gate, Link, LinkCounters, Listener, Network, OpenGate, PathKind
from p2p.upload_core import Upload

MAX_QUEUE_BYTES = 2 * MAX_FRAME_BYTES
"""Per connection, beside what was sent. Room for one largest frame behind another."""

MAX_HELD_BYTES = 16 * MAX_FRAME_BYTES
"""Per pool, of frames that wait or are not acknowledged: 512 MiB, where 512 queues could hold 32 GiB."""

MAX_LINKS = 512
"""Connections per pool. A node of a large swarm talks to tens of peers at a time; 512 idle ones are 30 MB."""

IDLE_AFTER_S = 60.0
"""Without anything but signs of life. In a full pool, the peer that is idle for longest makes way for another."""

MAX_UNFINISHED_BYTES = 16 * MAX_FRAME_BYTES
"""Per pool, of frames that have not come to their end: 512 MiB, where 512 connections could hold 30 GiB. From half of
it on, only the frame that is under way for longest gets credit beyond its window, and must make use of it."""

FRONT_S, FRONT_Bps = 3.0, 64 * 1024
"""What that frame must bring: a half of what an uplink of 1 Mbit/s carries, measured over so long. Those behind it wait
for it, and their senders only for STALLED_AFTER_S."""

BYTES_PER_SEGMENT, SEGMENTS_PER_S = 4096, 32.0
"""A peer may send a segment for every frame, for so many bytes, and so many a second beside: acknowledgements, pings.
What is more counts as messages, of which the gate permits thousands: the smallest chunk of an honest peer is 4 KiB, and
it acknowledges 32 KiB or more at a time."""

TICK_S = 0.5
"""How often timers are looked at: an eighth of what separates suspicion from death, and no measurable load."""

ABSENT_AFTER_S = 4 * TICK_S
"""A tick that comes later than this was not delayed by the peer but by our own process."""

RESUME_S = 4.0
"""From the loss of a link to that of its peer: time for dialling it again several times, over any address."""

HELLO_TIMEOUT_S = 5.0
"""From a link to the peer's Hello on it. One round trip; who takes longer is no use, or means no good."""

STALLED_AFTER_S, STALLED_BYTES = 20.0, 16 * 1024
"""So little acknowledged in so long, while something waits: 0.8 kB/s; the slowest lines that this is for carry 2."""

GOODBYE_S = 1.0
"""How long a closing pool lets its connections write out what is queued."""

CONNECT_TIMEOUT_S = 5.0

UPGRADE_FIRST_S, UPGRADE_LAST_S = 5.0, 300.0
"""Between attempts at a better path, doubling."""

OnClosed = Callable[[PeerId, FusionError], None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LinkView:
    """One connection that has a link now, for people and planners.

    Attributes:
        path, remote_address: of the link. The address is never evidence of anything.
        round_trip_s: the best recent one of the link; None before the first.
        delivery_rate_Bps: of the link; None until there was more to send than it took.
        since_s: for how long there is the connection.
        heard_s: since anything came.
        we_dialled: whether this side has dialled the link.
        bytes_in, bytes_out: of frames, on all links of the connection.
        queued_bytes: waiting for credit, for the line, or for what is more urgent.
        num_resumed: how often the connection went on over another link.
    """

    peer: PeerId
    path: PathKind
    remote_address: str
    round_trip_s: float | None
    delivery_rate_Bps: float | None
    since_s: float
    heard_s: float
    we_dialled: bool
    bytes_in: int
    bytes_out: int
    frames_in: int
    frames_out: int
    queued_bytes: int
    num_resumed: int = 0


class LinkPool:
    """See the head of this file.

    Args:
        network: how to dial and to listen.
        identity_peer: the peer id that ``network`` proves.
        on_frame: called for every message, in order per session. It must not block. A FusionError that it raises ends
            the connection for that reason, any other exception as a bug of ours.
        on_closed: called once when a peer is lost, and why; not after ``aclose``. Never called from within ``send``.
        is_needed: whether something depends on the connection with this peer, however idle it is, so that it is kept.
        gate: who may be dialled, and how much each may send. What it bans is dropped by ``drop_refused``. Listeners
            ask it themselves.
        clock: monotonic seconds. A test that hands in its own calls ``tick`` itself.
        max_upload_Bps: of all links together, with their headers; None for no limit.
        features: of the protocol, beyond its version, that this process can do with.
        recorder: who is told of every frame that is sent or comes; None: nobody.
    """

    def __init__(
        self,
        network: Network,
        identity_peer: PeerId,
        *,
        on_frame: OnFrame,
        on_closed: OnClosed,
        is_needed: Callable[[PeerId], bool] = lambda peer: False,
        gate: Gate | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_links: int = MAX_LINKS,
        max_queue_bytes: int = MAX_QUEUE_BYTES,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        max_upload_Bps: float | None = None,
        features: Sequence[str] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self._network = network
        self._identity_peer = identity_peer
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._is_needed = is_needed
        self._gate = gate or OpenGate()
        self._clock = clock
        self._max_links = max_links
        self._max_queue_bytes = max_queue_bytes
        self._max_unfinished_bytes = max_unfinished_bytes
        self._max_held_bytes = max_held_bytes
        self._features = tuple(features)
        self._recorder = recorder
        self._upload = None if max_upload_Bps is None else Upload(max_upload_Bps, now=clock())
        self._upload_timer: asyncio.TimerHandle | None = None
        self._connections: dict[PeerId, Connection] = {}
        self._strangers: set[LinkEnd] = set()
        self._dials: dict[tuple[PeerId, tuple[str, ...]], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listeners: list[Listener] = []
        self._past = LinkCounters()
        self._past_frames_in = 0
        self._past_frames_out = 0
        self._num_resumed = 0
        self._refused: Counter[str] = Counter()
        self._ticker: asyncio.Task[None] | None = None
        self._last_tick = clock()
        self._front: tuple[Connection, tuple[int, int], int, float] | None = None
        self._closed = False

    async def listen(self, address: str) -> str:
        """Accepts links on an address and returns the one really bound. May be called several times.

        Raises:
            AddressInUse, ConfigError: as Network.listen.
        """
        self._check_open()
        listener = await self._network.listen(address, self._accept)
        self._listeners.append(listener)
        return listener.address

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Makes sure that there is a connection with ``peer``; tries every address, those of better paths first.

        Calls for one peer with the same addresses share a dial. Those with other addresses do not: somebody's wrong
        addresses must not be everybody's. The first that succeeds is the connection of all. The addresses are
        remembered, for when its link is lost, behind those that have led to the peer.

        Raises:
            PeerUnreachable: nobody answers at any of the addresses, or the peer is refused by the gate.
            ProtocolVersionMismatch: the peer speaks another version.
            RemoteProtocolError: only others answer there.
            ResourceExhausted: this process has as many connections as it may have.
        """
        self._check_open()
        if self.is_connected(peer):
            self._connections[peer].remember(addresses)
            return
        key = (peer, tuple(addresses))
        dial = self._dials.get(key)
        if dial is None:
            dial = self._spawn(self._dial_peer(*key, timeout_s))
            self._dials[key] = dial
            dial.add_done_callback(lambda done: self._dial_done(key, done))
        deadline = asyncio.get_running_loop().time() + timeout_s
        await asyncio.wait((dial,), timeout=timeout_s)  # which leaves the dial alone, whatever happens to this caller
        connection = self._connections.get(peer)
        if dial.done() and connection is not None and not connection.is_established:
            # Another dial has led to a link, on which the peer has not answered yet.
            await asyncio.wait((connection.ready,), timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if self.is_connected(peer):
            self._connections[peer].remember(addresses)
            return
        if not dial.done():
            raise PeerUnreachable(peer, f"peer {short(peer)} did not answer within {timeout_s:g} s")
        if dial.cancelled():
            raise PeerUnreachable(peer, f"the dial to peer {short(peer)} was given up: its link or this pool closed")
        dial.result()
        raise PeerUnreachable(peer, f"the connection with peer {short(peer)} ended at once")

    async def identify(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> PeerId:
        """Connects to whoever listens on ``address``, keeps the connection and returns the proven identity.

        Raises: as ``connect``.
        """
        self._check_open()
        for peer, connection in self._connections.items():
            if connection.is_established and any(end.address == address for end in connection.ends):
                return peer
        self._check_room()
        async with _within(timeout_s, address):
            link = await self._network.dial(address, expect=None, timeout_s=timeout_s)
            connection = await self._begin(link, address)
            await asyncio.shield(connection.ready)
        return connection.peer

    def reconsider(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """A better path to a connected peer may exist now. It is tried beside the present one, and replaces it."""
        connection = self._connections.get(peer)
        if connection is not None:
            connection.remember(addresses)
            connection.upgrade_at = self._clock()
            connection.upgrade_after_s = UPGRADE_FIRST_S
            self._look_for_better(connection, connection.upgrade_at)

    def is_connected(self, peer: PeerId) -> bool:
        """Whether ``send`` takes frames for this peer, be it while its link is made again."""
        connection = self._connections.get(peer)
        return connection is not None and connection.is_established

    def send(self, peer: PeerId, message: AnyMessage, payload: Payload = b"") -> None:
        """Sends one frame, at once or as soon as credit, the line and more urgent frames permit. Never waits.

        The payload must not be changed afterwards. When the peer reads too slowly for what it is sent, the connection
        ends and ``on_closed`` says PeerTimeout.

        Raises:
            PeerUnreachable: there is no connection with this peer.
            LocalProtocolError: the frame is larger than a receiver would accept.
        """
        connection = self._connections.get(peer)
        if connection is None or not connection.is_established:
            raise PeerUnreachable(peer, f"there is no link with peer {short(peer)}")
        connection.send(message, payload)

    def drop(self, peer: PeerId, reason: str) -> None:
        """Ends the connection with this peer, if there is one; both sides are told why."""
        connection = self._connections.get(peer)
        if connection is not None:
            self.fail(connection, PeerClosed(peer, f"the connection with peer {short(peer)} was ended here: {reason}"))

    def drop_refused(self) -> None:
        """Ends the connections with peers that the gate refuses by now."""
        for peer, connection in list(self._connections.items()):
            hosts = [_host_of(end.link) or "" for end in connection.ends] or [""]
            refusal = next(filter(None, (self._gate.refuse_peer(peer, host) for host in hosts)), None)
            if refusal is not None:
                self.fail(connection, PeerClosed(peer, f"peer {short(peer)} is refused here: {refusal}"))

    async def round_trip(self, peer: PeerId) -> float:
        """Measures the round trip now; seconds.

        Raises:
            PeerUnreachable: there is no connection with this peer.
            PeerClosed: the connection ended meanwhile.
            PeerTimeout: no answer within DEAD_AFTER_S.
        """
        connection = self._connections.get(peer)
        if connection is None or not connection.is_established:
            raise PeerUnreachable(peer, f"there is no link with peer {short(peer)}")
        try:
            async with asyncio.timeout(DEAD_AFTER_S):
                return await connection.round_trip()
        except TimeoutError as error:
            raise PeerTimeout(peer, f"peer {short(peer)} did not answer a ping in {DEAD_AFTER_S:g} s") from error

    def round_trip_s(self, peer: PeerId) -> float | None:
        """The best recent estimate of the round trip on the present path, in seconds; None before the first."""
        connection = self._connections.get(peer)
        return connection.end.heartbeat.best_s() if connection is not None and connection.end is not None else None

    def delivery_rate_Bps(self, peer: PeerId) -> float | None:
        """How fast the present path to this peer delivers; None until there was more to send than it took."""
        connection = self._connections.get(peer)
        return connection.end.rate.rate_Bps if connection is not None and connection.end is not None else None

    def backlog_bytes(self, peer: PeerId) -> int:
        """Of frames that wait for the peer, or that it has not acknowledged."""
        connection = self._connections.get(peer)
        return connection.held_bytes if connection is not None else 0

    def backlog_s(self, peer: PeerId) -> float:
        """How long they take to get there at the present rate; 0 where nothing has had to wait yet."""
        rate_Bps = self.delivery_rate_Bps(peer)
        return self.backlog_bytes(peer) / rate_Bps if rate_Bps else 0.0

    @property
    def max_upload_Bps(self) -> float | None:
        """What all links together may send; None for no limit."""
        return None if self._upload is None else self._upload.rate_Bps

    def path(self, peer: PeerId) -> PathKind | None:
        """What the connection runs over now."""
        connection = self._connections.get(peer)
        return connection.end.link.path if connection is not None and connection.end is not None else None

    def features(self, peer: PeerId) -> frozenset[str]:
        """What the peer can do with beyond the version of the protocol."""
        connection = self._connections.get(peer)
        return connection.features if connection is not None else frozenset()

    def links(self) -> list[LinkView]:
        """All connections that have a link now."""
        now = self._clock()
        return [_view(each, each.end, now) for each in self._connections.values() if each.end is not None]

    @property
    def counters(self) -> Mapping[str, int]:
        """Frames and bytes in both directions since the start, links now, and refusals as ``refused_REASON``."""
        total = LinkCounters()
        connections = [each for each in self._connections.values() if each.is_established]
        for counters in [self._past, *(end.link.counters for each in self._connections.values() for end in each.ends)]:
            _add(total, counters)
        refused = Counter(self._refused)
        refused.update(self._network.refused)
        return {
            "frames_in": self._past_frames_in + sum(each.frames_in for each in self._connections.values()),
            "frames_out": self._past_frames_out + sum(each.frames_out for each in self._connections.values()),
            "bytes_in": total.bytes_in,
            "bytes_out": total.bytes_out,
            "links": sum(each.end is not None for each in connections),
            "peers": len(connections),
            "resumed": self._num_resumed + sum(each.num_resumed for each in self._connections.values()),
            **{f"refused_{reason}": count for reason, count in sorted(refused.items())},
        }

    async def aclose(self, reason: str = "") -> None:
        """Says goodbye to everybody, lets the queues run dry for GOODBYE_S, and closes. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        connections = list(self._connections.values())
        for dial in [*self._dials.values(), *(each.dial for each in connections if each.dial is not None)]:
            dial.cancel()
        await asyncio.gather(*(self._say_goodbye(connection, reason) for connection in connections))
        for connection in connections:
            self.fail(connection, LocalProtocolError("this pool of links is closed"))
        for end in list(self._strangers):
            end.link.abort()
        if self._upload_timer is not None:
            self._upload_timer.cancel()
        await asyncio.gather(*(listener.aclose() for listener in self._listeners))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tick(self) -> None:
        """Sends the pings and acknowledgements that are due, and gives up what is dead. Called every TICK_S."""
        now = self._clock()
        absent_s = now - self._last_tick
        self._last_tick = now
        if absent_s > ABSENT_AFTER_S:
            self._front = None
        for connection in list(self._connections.values()):
            self._guarded(self._tend, connection, absent_s, now)
        for end in list(self._strangers):
            if now - end.since > HELLO_TIMEOUT_S:
                self._refused["no-hello"] += 1
                end.link.abort("the peer did not say Hello")
        self._guarded(self._bound_unfinished)
        self._guarded(self._bound_held)

    # Owner: what happens on the links.

    def introduce(self, end: LinkEnd, hello: Hello) -> None:
        """See Owner.introduce."""
        if self._closed:
            return
        if end.connection is not None:
            self._introduce_dialled(end, end.connection, hello)
        elif end.address is None:
            self._strangers.discard(end)
            self._introduce_accepted(end, hello)

    def link_lost(self, end: LinkEnd, error: PeerError) -> None:
        """See Owner.link_lost."""
        connection = end.connection
        self._strangers.discard(end)
        if connection is None:
            return
        if isinstance(error, RemoteProtocolError):
            self.fail(connection, error)
            return
        was_in_use = connection.end is end
        self._remove_end(connection, end)
        if was_in_use:
            self._suspend(connection, error)
        elif not connection.is_established and not connection.ends:
            self.fail(connection, PeerUnreachable(connection.peer, str(error)))

    def fail(self, connection: Connection, error: FusionError) -> None:
        """See Owner.fail."""
        peer = connection.peer
        if not self._has(connection):
            return
        del self._connections[peer]
        host = next((_host_of(end.link) for end in connection.ends), None)
        self._guarded(self._gate.report_failure, peer, host, error)
        connection.over(error)
        if connection.dial is not None:
            connection.dial.cancel()
        self._past_frames_in += connection.frames_in
        self._past_frames_out += connection.frames_out
        self._num_resumed += connection.num_resumed
        for end in list(connection.ends):
            if not isinstance(error, PeerTimeout) and not self._closed:
                end.post(Goodbye(str(error)[:512]))
            self._remove_end(connection, end)
            if isinstance(error, PeerTimeout):
                end.link.abort(str(error))
            self._spawn(end.link.aclose())
        if connection.is_established and not self._closed:
            self._guarded(self._on_closed, peer, error)

    def wait_for_upload(self) -> None:
        """See Owner.wait_for_upload."""
        if self._upload_timer is None and self._upload is not None:
            due = self._upload.get_timer()
            if due is not None:
                delay_s = max(0.0, due - self._clock())
                self._upload_timer = asyncio.get_running_loop().call_later(delay_s, self._upload_due)

    def count(self, reason: str) -> None:
        """See Owner.count."""
        self._refused[reason] += 1

    # Links come and go.

    async def _accept(self, link: Link) -> None:
        if self._closed or link.peer == self._identity_peer:
            return
        self._start_ticker()
        end = LinkEnd(self, link, self._clock, address=None)
        self._strangers.add(end)
        link.start(end)
        try:
            await link.wait_closed()
        finally:
            self._strangers.discard(end)

    def _introduce_accepted(self, end: LinkEnd, hello: Hello) -> None:
        """Finds the connection that a peer's Hello is for, or begins one, and answers."""
        peer = end.link.peer
        end.rank = (hello.epoch, peer < self._identity_peer)
        known = self._connections.get(peer)
        if known is not None and known.their_token not in (b"", hello.token):
            self.fail(known, PeerClosed(peer, f"peer {short(peer)} connected again: its link before was lost"))
            known = None
        if hello.their_token and (known is None or known.token != hello.their_token):
            self._refuse_link(end, "this connection is not known here (any more): the program was restarted")
            return
        if known is None and not self._make_room():
            self._refused["too-many-links"] += 1
            self._refuse_link(end, "this program has as many links as it may have")
            return
        connection = known or self._new_connection(peer)
        connection.epoch = max(connection.epoch, hello.epoch)
        if connection.rank >= end.rank:
            self._spawn(end.link.aclose())  # of two links both sides keep the other one
            return
        self._attach(connection, end, hello)

    def _introduce_dialled(self, end: LinkEnd, connection: Connection, hello: Hello) -> None:
        peer = connection.peer
        if connection.their_token not in (b"", hello.token):
            self.fail(connection, PeerClosed(peer, f"peer {short(peer)} was restarted"))
        elif hello.their_token != connection.token or hello.epoch != end.rank[0]:
            raise WireError("a Hello that answers another one")
        elif connection.rank >= end.rank:
            self._remove_end(connection, end)
            self._spawn(end.link.aclose())
        else:
            self._attach(connection, end, hello)

    def _attach(self, connection: Connection, end: LinkEnd, hello: Hello) -> None:
        replaced = connection.attach(end, hello)
        if replaced is not None:
            if end.address is None:
                # Whoever has dialled the new link closes the old one, when it has our Hello: so it never has none.
                replaced.retire()
            else:
                self._remove_end(connection, replaced)
                self._spawn(replaced.link.aclose())
        for key in [key for key in self._dials if key[0] == connection.peer]:
            self._give_up_dial(key)
        if end.link.path.rank > PathKind.DIRECT.rank:
            connection.upgrade_after_s = UPGRADE_FIRST_S
            connection.upgrade_at = self._clock() + UPGRADE_FIRST_S

    def _refuse_link(self, end: LinkEnd, why: str) -> None:
        end.post(Goodbye(why))
        self._spawn(end.link.aclose())

    def _remove_end(self, connection: Connection, end: LinkEnd) -> None:
        if end in connection.ends:
            _add(self._past, end.link.counters)
        connection.lose_end(end)

    def _suspend(self, connection: Connection, error: FusionError) -> None:
        connection.suspend(error, self._clock())
        self._dial_again(connection, connection.addresses)

    def _new_connection(self, peer: PeerId) -> Connection:
        connection = Connection(
            peer,
            self,
            self._on_frame,
            self._clock,
            upload=self._upload,
            max_queue_bytes=self._max_queue_bytes,
            features=self._features,
            recorder=self._recorder,
        )
        self._connections[peer] = connection
        return connection

    # Dialling.

    async def _begin(self, link: Link, address: str) -> Connection:
        """Says Hello on a link that we have dialled, for the connection that there is or a new one.

        Raises:
            PeerUnreachable: the peer is refused by the gate, or is this process itself.
            ResourceExhausted: there is no room for another peer.
        """
        peer = link.peer
        refusal = "that is this program itself" if peer == self._identity_peer else self._gate.refuse_peer(peer, "")
        if self._closed or refusal is not None:
            await link.aclose()
            self._check_open()
            raise PeerUnreachable(peer, f"peer {short(peer)} is not connected to: {refusal}")
        connection = self._connections.get(peer)
        if connection is None:
            if not self._make_room():  # only now: an address at which nobody answers costs no idle peer its link
                await link.aclose()
                raise self._too_many_links()
            connection = self._new_connection(peer)
        connection.prove(address)
        self._start_ticker()
        end = LinkEnd(self, link, self._clock, address=address)
        connection.begin(end, self._identity_peer)
        link.start(end)
        # In the same step, so that no two dials to one peer go on.
        for key in [key for key in self._dials if key[0] == peer]:
            if self._dials[key] is not asyncio.current_task():
                self._give_up_dial(key)
        return connection

    async def _dial_peer(self, peer: PeerId, addresses: tuple[str, ...], timeout_s: float) -> None:
        refusal = self._gate.refuse_peer(peer, "")
        if refusal is not None:
            raise PeerUnreachable(peer, f"peer {short(peer)} is not connected to: {refusal}")
        self._check_room()
        try:
            async with _within(timeout_s, peer):
                link, address = await dial_any(self._network, peer, addresses, timeout_s=timeout_s)
                connection = await self._begin(link, address)
                await asyncio.shield(connection.ready)
        except DialFailed as error:
            raise error.most_telling() from None

    def _dial_done(self, key: tuple[PeerId, tuple[str, ...]], dial: asyncio.Task[None]) -> None:
        if self._dials.get(key) is dial:
            del self._dials[key]
        if not dial.cancelled():
            dial.exception()  # whoever waited has it; nobody may have

    def _give_up_dial(self, key: tuple[PeerId, tuple[str, ...]]) -> None:
        self._dials.pop(key).cancel()

    def _dial_again(self, connection: Connection, addresses: Sequence[str], worst_rank: int | None = None) -> None:
        """One more link for a connection: because it has none, or one whose path is worse than ``worst_rank``."""
        if connection.dial is None and addresses and not self._closed:
            connection.dial = self._spawn(self._redial(connection, tuple(addresses), worst_rank))

    async def _redial(self, connection: Connection, addresses: tuple[str, ...], worst_rank: int | None) -> None:
        peer, first = connection.peer, [address for address in addresses if address in connection.proven]
        try:
            link, address = await dial_any(self._network, peer, addresses, timeout_s=RESUME_S, first=first)
        except DialFailed as error:
            connection.dial = None
            is_refused = bool(first) and error.is_refused  # where it never was, its absence tells nothing
            if connection.end is None and is_refused and isinstance(connection.suspension, PeerClosed):
                why = f"{connection.suspension}, and nobody listens where it was"
                self.fail(connection, PeerClosed(connection.peer, why))
            return
        finally:
            connection.dial = None
        is_worse = worst_rank is not None and connection.end is not None and link.path.rank > worst_rank
        if is_worse or not self._has(connection):
            await link.aclose()
            return
        with contextlib.suppress(PeerUnreachable):
            await self._begin(link, address)

    def _look_for_better(self, connection: Connection, now: float) -> None:
        if connection.end is None or now < connection.upgrade_at:
            return
        present = connection.end.link.path.rank
        better = [address for address in connection.addresses if self._network.path_of(address).rank < present]
        if better:
            connection.upgrade_after_s = min(max(UPGRADE_FIRST_S, connection.upgrade_after_s * 2), UPGRADE_LAST_S)
            connection.upgrade_at = now + connection.upgrade_after_s
            self._dial_again(connection, better, present - 1)

    # Room.

    def _is_full(self) -> bool:
        return len(self._connections) >= self._max_links

    def _make_room(self) -> bool:
        """Whether there is room for one more peer, if need be in place of the one that is idle for longest."""
        if self._is_full():
            connection = self._longest_idle()
            if connection is None:
                return not self._is_full()  # the look may have ended one
            why = f"peer {short(connection.peer)} was idle, and its link is needed for another"
            self.fail(connection, PeerClosed(connection.peer, why))
        return True

    def _longest_idle(self) -> Connection | None:
        now = self._clock()
        for connection in list(self._connections.values()):  # a look may end it, and that others
            if self._has(connection):
                self._look(connection, now)
        idle = [
            each
            for each in self._connections.values()
            if now - each.last_used >= IDLE_AFTER_S and not self._is_needed(each.peer)
        ]
        return min(idle, key=lambda each: each.last_used, default=None)

    def _check_room(self) -> None:
        if self._is_full() and self._longest_idle() is None and self._is_full():  # the look may have ended one
            raise self._too_many_links()

    def _too_many_links(self) -> ResourceExhausted:
        return ResourceExhausted(f"this process has {len(self._connections)} links, which is its limit")

    # Time.

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._last_tick = self._clock()
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _guarded(self, call: Callable[..., object], *args: object) -> None:
        """Calls what also asks the pool's owner and the gate. A bug of theirs must not end what watches all peers."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - a bug above: timers and the end of other peers go on
            # Without the exception's text, which may quote what a peer sent.
            _log.error("what watches the links failed", where=getattr(call, "__name__", ""), error=type(error).__name__)

    def _has(self, connection: Connection) -> bool:
        return self._connections.get(connection.peer) is connection

    def _tend(self, connection: Connection, absent_s: float, now: float) -> None:
        """All timers of one connection, unless it has ended because another one has."""
        if not self._has(connection):
            return
        if absent_s > ABSENT_AFTER_S:
            self._excuse(connection, absent_s, now)
        self._look(connection, now)
        for end in list(connection.ends):
            if (end.is_retired or not end.is_introduced) and now - end.since > HELLO_TIMEOUT_S:
                end.link.abort("the peer did not say Hello, or was to close the link and did not")
        if not self._has(connection):
            return
        if connection.end is None:
            self._wait_for_link(connection, now)
        else:
            self._watch(connection, connection.end, now)

    def _watch(self, connection: Connection, end: LinkEnd, now: float) -> None:
        """A connection with a link: signs of life, acknowledgements, stalls."""
        ping = end.heartbeat.handle_timer(now)
        liveness = end.heartbeat.liveness(now)
        peer = connection.peer
        if liveness is Liveness.DEAD:
            error = PeerTimeout(peer, f"peer {short(peer)} was silent for {DEAD_AFTER_S:g} s")
            self._remove_end(connection, end)
            end.link.abort(str(error))
            self._suspend(connection, error)
            return
        if ping is not None:
            end.post(ping)
        if liveness is Liveness.SUSPECT:
            self._dial_again(connection, connection.addresses)  # before the old link is given up
        elif end.link.path.rank > PathKind.DIRECT.rank:
            self._look_for_better(connection, now)
        if connection.transfer.has_news():
            end.post_ack()
        if connection.is_stalled(now, STALLED_BYTES, STALLED_AFTER_S):
            self.fail(connection, PeerTimeout(peer, f"peer {short(peer)} does not read what it is sent"))

    def _wait_for_link(self, connection: Connection, now: float) -> None:
        if not connection.is_established:
            return
        if now - connection.suspended_at >= RESUME_S:
            peer = connection.peer
            self.fail(connection, connection.suspension or PeerClosed(peer, f"the link with {short(peer)} was lost"))
        else:
            self._dial_again(connection, connection.addresses)

    def _excuse(self, connection: Connection, absent_s: float, now: float) -> None:
        """We were not there: nobody could be heard meanwhile, nor could a link be made."""
        connection.suspended_at = min(connection.suspended_at + absent_s, now)
        connection.progress_at = min(connection.progress_at + absent_s, now)
        for end in connection.ends:
            end.since = min(end.since + absent_s, now)
            end.heartbeat.handle_absence(absent_s, now)

    def _look(self, connection: Connection, now: float) -> None:
        """Notes what has moved since the last look. Cheaper than a clock reading per frame."""
        end = connection.end
        if end is not None:
            counters = end.link.counters
            if counters.bytes_in != end.seen_bytes_in:
                end.seen_bytes_in = counters.bytes_in
                end.heartbeat.heard(now)
            if counters.bytes_out != end.seen_bytes_out:
                end.seen_bytes_out = counters.bytes_out
                end.heartbeat.sent(now)
        num_frames = connection.frames_in + connection.frames_out
        if num_frames != connection.seen_frames:
            connection.seen_frames = num_frames
            connection.last_used = now
        connection.look_at_unfinished(now)
        self._look_at_traffic(connection, now)

    def _look_at_traffic(self, connection: Connection, now: float) -> None:
        """Asks the gate. Segments that are more than frames, their length and the time explain count as messages."""
        segments_in, bytes_in = connection.sealed_in
        num_frames, num_bytes = connection.frames_in - connection.seen_frames_in, bytes_in - connection.seen_bytes_in
        free = num_frames + num_bytes // BYTES_PER_SEGMENT + int(SEGMENTS_PER_S * (now - connection.seen_at))
        num_extra = max(0, segments_in - connection.seen_segments_in - free)
        connection.seen_frames_in, connection.seen_bytes_in = connection.frames_in, bytes_in
        connection.seen_segments_in, connection.seen_at = segments_in, now
        if num_bytes:
            refusal = self._gate.refuse_traffic(connection.peer, num_frames + num_extra, num_bytes)
            if refusal is not None:
                why = f"peer {short(connection.peer)} sends more than it may: {refusal}"
                self.fail(connection, RemoteProtocolError(connection.peer, why))

    def _bound_unfinished(self) -> None:
        """Ends connections until unfinished frames hold what they may, those first that take longest to finish theirs.

        Not a deadline, which a long frame on a thin line would miss also where there is memory for all; and not the
        largest frame first, which would be an honest one where many hold a little of theirs for ever. Before it comes
        to that, only the one that goes first gets more credit, and goes also if it makes no use of it.
        """
        unfinished = sorted(
            (each for each in self._connections.values() if each.unfinished_since is not None),
            key=lambda each: each.unfinished_since or 0.0,
        )
        total_bytes = sum(each.transfer.unfinished_bytes for each in unfinished)
        is_short = total_bytes > self._max_unfinished_bytes // 2
        for number, connection in enumerate(unfinished):
            connection.transfer.is_restrained = is_short and number > 0
        self._watch_front(unfinished[0] if is_short else None)
        for connection in unfinished:
            if total_bytes <= self._max_unfinished_bytes:
                return
            total_bytes -= connection.transfer.unfinished_bytes
            self._fail_unfinished(connection)

    def _watch_front(self, connection: Connection | None) -> None:
        """Memory is short, and this connection has the frame that all others wait for; None: it is not."""
        longest = None if connection is None else connection.longest_unfinished()
        if connection is None or longest is None:
            self._front = None
            return
        key, num_bytes = longest
        now = self._clock()
        if self._front is None or self._front[:2] != (connection, key):
            self._front = connection, key, num_bytes, now
        elif (for_s := now - self._front[3]) >= FRONT_S:
            if num_bytes - self._front[2] < FRONT_Bps * for_s:
                self._fail_unfinished(connection)
            self._front = connection, key, num_bytes, now

    def _fail_unfinished(self, connection: Connection) -> None:
        if self._has(connection):
            self._refused["unfinished-frame"] += 1
            why = f"peer {short(connection.peer)} did not finish a frame while memory was short"
            self.fail(connection, PeerTimeout(connection.peer, why))

    def _bound_held(self) -> None:
        """Ends connections until all together keep what they may, first those that would take longest for theirs."""
        held_bytes = {connection: connection.held_bytes for connection in self._connections.values()}
        total_bytes = sum(held_bytes.values())
        if total_bytes <= self._max_held_bytes:
            return
        for connection in sorted(held_bytes, key=lambda each: held_bytes[each] / (each.pace_Bps + 1.0), reverse=True):
            if total_bytes <= self._max_held_bytes:
                return
            total_bytes -= held_bytes[connection]
            self._refused["held-frames"] += 1
            why = f"peer {short(connection.peer)} took what it is sent too slowly while memory was short"
            self.fail(connection, PeerTimeout(connection.peer, why))

    def _upload_due(self) -> None:
        self._upload_timer = None
        upload = self._upload
        if upload is not None:
            while isinstance(connection := upload.next_waiting(self._clock()), Connection):
                connection.pump()
            self.wait_for_upload()

    # The end.

    async def _say_goodbye(self, connection: Connection, reason: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                if connection.end is not None:
                    await connection.drain()
        for end in list(connection.ends):
            end.post(Goodbye(reason[:512]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("this pool of links is closed")


@contextlib.asynccontextmanager
async def _within(timeout_s: float, who: str) -> Any:
    """Turns the end of a time limit into PeerUnreachable."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise PeerUnreachable(who, f"{who} did not answer within {timeout_s:g} s") from error


def _host_of(link: Link) -> str | None:
    """Where the peer itself is; None behind a relay, or when it is unknown."""
    if link.path not in (PathKind.DIRECT, PathKind.STREAM):
        return None
    host = link.remote_address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return None if ip_of(host) is None else host


def _add(total: LinkCounters, counters: LinkCounters) -> None:
    total.segments_in += counters.segments_in
    total.segments_out += counters.segments_out
    total.bytes_in += counters.bytes_in
    total.bytes_out += counters.bytes_out


def _view(connection: Connection, end: LinkEnd, now: float) -> LinkView:
    return LinkView(
        peer=connection.peer,
        path=end.link.path,
        remote_address=end.link.remote_address,
        round_trip_s=end.heartbeat.best_s(),
        delivery_rate_Bps=end.rate.rate_Bps,
        since_s=now - connection.since,
        heard_s=now - end.heartbeat.last_heard,  # only a tick tells the heartbeat: nothing is older here than that
        we_dialled=end.address is not None,
        bytes_in=connection.transfer.received_bytes,
        bytes_out=connection.transfer.sent_bytes,
        frames_in=connection.frames_in,
        frames_out=connection.frames_out,
        queued_bytes=connection.transfer.queued_bytes,
        num_resumed=connection.num_resumed,
    )
