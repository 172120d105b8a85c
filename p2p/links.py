"""The links of one process: dialled once, shared by all sessions, watched, and closed for a reason.

Everything above the network uses this. There is one link per pair of peers; when both dial at once there may be two,
and each side then sends on one of them and keeps to it, so that what it sends stays in order. If a link is lost that
may have carried frames, the peer's other links go with it: frames may be missing, and whoever depends on them must
hear of it. ``on_closed`` says so, exactly once per connection with a peer.

Nobody dials a peer with which it has a link. So whoever dials again has lost what was before, and the old links end at
once: what is sent to it would otherwise go into a dead link until the heartbeat notices.

Sending never waits. Each link has a bounded queue, and a peer that lets it overflow does not read and is dropped: a
relay that waited for its slowest neighbour would stall everybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from fusion_node.errors import (
    FusionError,
    LocalProtocolError,
    PeerClosed,
    PeerError,
    PeerTimeout,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
    ResourceExhausted,
)
from fusion_node.types import PeerId
from fusion_node.wire import MAX_FRAME_BYTES, printable
from p2p.heartbeat_core import DEAD_AFTER_S, Heartbeat, Liveness
from p2p.identity import short
from p2p.messages import AnyMessage, Frame, Goodbye, Ping, Pong
from p2p.prefixes import ip_of
from p2p.seam import Gate, Link, LinkCounters, Listener, Network, OpenGate, PathKind

MAX_QUEUE_BYTES = 2 * MAX_FRAME_BYTES
"""Per link, beside what the kernel buffers. Room for one largest frame behind another."""

MAX_LINKS = 512
"""Per pool. A node of a large swarm talks to tens of peers at a time; 512 idle links are 30 MB."""

IDLE_AFTER_S = 60.0
"""Without anything but signs of life. In a full pool, the peer that is idle for longest makes way for another."""

MAX_UNFINISHED_BYTES = 16 * MAX_FRAME_BYTES
"""Per pool, of frames that have not come to their end: 512 MiB, where 512 links could hold 16 GiB. Sixteen peers that
send a largest frame at the same time are more than a node of a pipeline has in front of it."""

TICK_S = 0.5
"""How often timers are looked at: an eighth of what separates suspicion from death, and no measurable load."""

ABSENT_AFTER_S = 4 * TICK_S
"""A tick that comes later than this was not delayed by the peer but by our own process."""

GOODBYE_S = 1.0
"""How long a closing pool lets its links write out what is queued."""

CONNECT_TIMEOUT_S = 5.0

OnFrame = Callable[[PeerId, AnyMessage, memoryview], None]
OnClosed = Callable[[PeerId, FusionError], None]

_OURS = (Ping, Pong, Goodbye)
"""What the pool handles itself."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LinkView:
    """One link as it is now, for people.

    Attributes:
        remote_address: of the other end, or of what stands before it; never evidence of anything.
        round_trip_s: the best recent one; None before the first.
        since_s: for how long there is the link.
        heard_s: since anything came.
        queued_bytes: sent here, and not yet taken by the transport.
        num_resumed: how often it was lost and taken up again.
    """

    peer: PeerId
    path: PathKind
    remote_address: str
    round_trip_s: float | None
    since_s: float
    heard_s: float
    we_dialled: bool
    bytes_in: int
    bytes_out: int
    frames_in: int
    frames_out: int
    queued_bytes: int
    num_resumed: int = 0


@dataclass(slots=True, eq=False)
class _PooledLink:
    link: Link
    heartbeat: Heartbeat
    since: float
    seen_bytes_in: int = 0
    seen_bytes_out: int = 0
    reader: asyncio.Task[None] | None = None
    # Why the link ends, when we know better than the transport does.
    reason: FusionError | None = None
    pings: dict[int, asyncio.Future[float]] = field(default_factory=dict)
    address: str | None = None
    # Frames that the pool itself sends and handles, and the others when they were last looked at.
    num_own_frames: int = 0
    seen_frames: int = 0
    last_used: float = 0.0
    seen_frames_in: int = 0
    unfinished_since: float | None = None
    bounded_frames_in: int = 0


class LinkPool:
    """See the head of this file.

    Args:
        network: how to dial and to listen.
        identity_peer: the peer id that ``network`` proves.
        on_frame: called for every message but pings, pongs and goodbyes, in order per peer. It must not block. A
            FusionError that it raises closes the link for that reason, any other exception as a bug of ours.
        on_closed: called once when a peer is lost, and why; not after ``aclose``. Never called from within ``send``.
        gate: who may be dialled, and how much each may send. What it bans is dropped by ``drop_refused``.
        is_needed: whether something depends on the link with this peer, however idle it is, so that it has to be kept.
        clock: monotonic seconds. A test that hands in its own calls ``tick`` itself.
    """

    def __init__(
        self,
        network: Network,
        identity_peer: PeerId,
        *,
        on_frame: OnFrame,
        on_closed: OnClosed,
        gate: Gate | None = None,
        is_needed: Callable[[PeerId], bool] = lambda peer: False,
        clock: Callable[[], float] = time.monotonic,
        max_links: int = MAX_LINKS,
        max_queue_bytes: int = MAX_QUEUE_BYTES,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
    ) -> None:
        self._network = network
        self._identity_peer = identity_peer
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._gate = gate or OpenGate()
        self._is_needed = is_needed
        self._clock = clock
        self._max_links = max_links
        self._max_queue_bytes = max_queue_bytes
        self._max_unfinished_bytes = max_unfinished_bytes
        self._links: dict[PeerId, list[_PooledLink]] = {}
        self._num_links = 0
        self._dials: dict[tuple[PeerId, tuple[str, ...]], asyncio.Task[None]] = {}
        self._listeners: list[Listener] = []
        self._past = LinkCounters()
        self._refused: Counter[str] = Counter()
        self._ticker: asyncio.Task[None] | None = None
        self._last_tick = clock()
        self._closed = False

    async def listen(self, address: str) -> str:
        """Accepts links on ``host:port`` and returns the address really bound. May be called several times.

        Raises:
            AddressInUse, ConfigError: as Network.listen.
        """
        self._check_open()
        listener = await self._network.listen(address, self._accept)
        self._listeners.append(listener)
        return listener.address

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Makes sure that there is a link with ``peer``; tries every address, one after the other.

        Calls for one peer with the same addresses share a dial. Those with other addresses do not: somebody's wrong
        addresses must not be everybody's. The first that succeeds is the link of all.

        Raises:
            PeerUnreachable: nobody answers at any of the addresses.
            ProtocolVersionMismatch: the peer speaks another version.
            RemoteProtocolError: only others answer there.
            ResourceExhausted: this process has as many links as it may have.
        """
        self._check_open()
        if self.is_connected(peer):
            return
        refusal = self._gate.refuse_peer(peer, "")
        if refusal is not None:
            raise PeerUnreachable(peer, f"peer {short(peer)} is not dialled: {refusal}")
        key = (peer, tuple(addresses))
        dial = self._dials.get(key)
        if dial is None:
            dial = asyncio.get_running_loop().create_task(self._dial_each(*key, timeout_s))
            self._dials[key] = dial
            dial.add_done_callback(lambda done: self._dial_done(key, done))
        await asyncio.wait((dial,), timeout=timeout_s)  # which leaves the dial alone, whatever happens to this caller
        if self.is_connected(peer):
            return
        if not dial.done():
            raise PeerUnreachable(peer, f"peer {short(peer)} did not answer within {timeout_s:g} s")
        if dial.cancelled():
            raise PeerUnreachable(peer, f"the dial to peer {short(peer)} was given up: its link or this pool closed")
        dial.result()

    async def identify(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> PeerId:
        """Connects to whoever listens on ``address``, keeps the link and returns the proven identity.

        Raises: as ``connect``.
        """
        self._check_open()
        for peer, entries in self._links.items():
            if any(entry.address == address for entry in entries):
                return peer
        return (await self._dial(address, None, timeout_s)).peer

    def is_connected(self, peer: PeerId) -> bool:
        """Whether ``send`` would find a link."""
        return peer in self._links

    def send(self, peer: PeerId, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """Sends one frame, at once or as soon as those before it are written. Never waits.

        The payload may be changed as soon as this returns. When the peer reads too slowly for what it is sent, the
        link is closed and ``on_closed`` says PeerTimeout.

        Raises:
            PeerUnreachable: there is no link with this peer.
            LocalProtocolError: the frame is larger than a receiver would accept.
        """
        try:
            entry = self._links[peer][0]
        except KeyError as error:
            raise PeerUnreachable(peer, f"there is no link with peer {short(peer)}") from error
        self._post(entry, message, payload)

    async def round_trip(self, peer: PeerId) -> float:
        """Measures the round trip now; seconds.

        Raises:
            PeerUnreachable: there is no link with this peer.
            PeerClosed: the link closed meanwhile.
            PeerTimeout: no answer within DEAD_AFTER_S.
        """
        entry = self._entry(peer)
        ping = entry.heartbeat.ping(self._clock())
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        entry.pings[ping.number] = answer
        try:
            self._post_own(entry, ping)
            async with asyncio.timeout(DEAD_AFTER_S):
                return await answer
        except TimeoutError as error:
            raise PeerTimeout(peer, f"peer {short(peer)} did not answer a ping in {DEAD_AFTER_S:g} s") from error
        finally:
            entry.pings.pop(ping.number, None)

    def round_trip_s(self, peer: PeerId) -> float | None:
        """The best recent estimate of the round trip in seconds; None before the first measurement."""
        entries = self._links.get(peer)
        return entries[0].heartbeat.best_s() if entries else None

    def links(self) -> list[LinkView]:
        """All links, those of one peer together, the one that is sent on first."""
        now = self._clock()
        return [
            LinkView(
                peer=entry.link.peer,
                path=entry.link.path,
                remote_address=entry.link.remote_address,
                round_trip_s=entry.heartbeat.best_s(),
                since_s=now - entry.since,
                # Only a tick tells the heartbeat of bytes: nothing is older here than that.
                heard_s=now - entry.heartbeat.last_heard,
                we_dialled=entry.address is not None,
                bytes_in=entry.link.counters.bytes_in,
                bytes_out=entry.link.counters.bytes_out,
                frames_in=entry.link.counters.frames_in,
                frames_out=entry.link.counters.frames_out,
                queued_bytes=entry.link.queued_bytes,
            )
            for entries in self._links.values()
            for entry in entries
        ]

    @property
    def counters(self) -> Mapping[str, int]:
        """Frames and bytes in both directions since the start, links now, and refusals as ``refused_REASON``."""
        total = LinkCounters()
        for counters in [self._past, *(e.link.counters for entries in self._links.values() for e in entries)]:
            _add(total, counters)
        refused = Counter(self._refused)
        refused.update(self._network.refused)
        return {
            "frames_in": total.frames_in,
            "frames_out": total.frames_out,
            "bytes_in": total.bytes_in,
            "bytes_out": total.bytes_out,
            "links": self._num_links,
            "peers": len(self._links),
            **{f"refused_{reason}": count for reason, count in sorted(refused.items())},
        }

    async def aclose(self, reason: str = "") -> None:
        """Says goodbye to everybody, lets the queues run dry for GOODBYE_S, and closes. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        for dial in self._dials.values():
            dial.cancel()
        entries = [entry for entries in self._links.values() for entry in entries]
        await asyncio.gather(*(self._say_goodbye(entry, reason) for entry in entries))
        await asyncio.gather(*(entry.link.aclose() for entry in entries))
        await asyncio.gather(*(listener.aclose() for listener in self._listeners))
        await asyncio.gather(*(e.reader for e in entries if e.reader), return_exceptions=True)

    def tick(self) -> None:
        """Sends the pings that are due and closes the links of the dead. The pool calls this every TICK_S."""
        now = self._clock()
        absent_s = now - self._last_tick
        self._last_tick = now
        for entry in [entry for entries in self._links.values() for entry in entries]:
            if absent_s > ABSENT_AFTER_S:
                entry.heartbeat.handle_absence(absent_s, now)
            self._look(entry, now)
            ping = entry.heartbeat.handle_timer(now)
            if entry.heartbeat.liveness(now) is Liveness.DEAD:
                peer = entry.link.peer
                self._fail(entry, PeerTimeout(peer, f"peer {short(peer)} was silent for {DEAD_AFTER_S:g} s"))
            elif ping is not None:
                with contextlib.suppress(PeerError):
                    self._post_own(entry, ping)
        self._bound_unfinished()

    def drop_refused(self) -> None:
        """Ends the links with peers that the gate refuses by now."""
        for peer, entries in list(self._links.items()):
            refusals = [self._gate.refuse_peer(peer, _host_of(entry.link) or "") for entry in entries]
            if any(refusals):
                self._drop(
                    peer, PeerClosed(peer, f"peer {short(peer)} is refused here: {next(filter(None, refusals))}")
                )

    # Links come and go.

    async def _accept(self, link: Link) -> None:
        if self._closed:
            return
        self._replace(link.peer, accepted=True)
        if not self._make_room():
            self._refused["too-many-links"] += 1
            return
        await self._run(self._add(link, None))

    async def _dial(self, address: str, expect: PeerId | None, timeout_s: float) -> Link:
        if self._is_full() and self._longest_idle() is None:
            raise self._too_many_links()
        link = await self._network.dial(address, expect=expect, timeout_s=timeout_s)
        if self._closed:
            await link.aclose()
            self._check_open()
        self._replace(link.peer, accepted=False)
        if not self._make_room():  # only now: an address at which nobody answers costs no idle peer its link
            await link.aclose()
            raise self._too_many_links()
        entry = self._add(link, address)
        # In the same step, so that no two dials to one peer ever succeed.
        for key in [key for key in self._dials if key[0] == link.peer]:
            if self._dials[key] is not asyncio.current_task():
                self._dials.pop(key).cancel()
        entry.reader = asyncio.get_running_loop().create_task(self._run(entry))
        return link

    async def _dial_each(self, peer: PeerId, addresses: tuple[str, ...], timeout_s: float) -> None:
        failures: list[FusionError] = []
        deadline = asyncio.get_running_loop().time() + timeout_s
        for tried, address in enumerate(addresses):
            # An address that swallows everything must leave time for those behind it.
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                await self._dial(address, peer, max(left_s / (len(addresses) - tried), 0.05))
                return
            except PeerError as error:
                failures.append(error)
            if self.is_connected(peer):  # it has dialled us meanwhile
                return
        for kind in (ProtocolVersionMismatch, RemoteProtocolError):
            for failure in failures:
                if isinstance(failure, kind):
                    raise failure
        why = "; ".join(str(failure) for failure in failures) or "no address of it is known"
        raise PeerUnreachable(peer, f"peer {short(peer)} cannot be reached: {why}")

    def _dial_done(self, key: tuple[PeerId, tuple[str, ...]], dial: asyncio.Task[None]) -> None:
        if self._dials.get(key) is dial:
            del self._dials[key]
        if not dial.cancelled():
            dial.exception()  # whoever waited has it; nobody may have

    def _is_full(self) -> bool:
        return self._num_links >= self._max_links

    def _make_room(self) -> bool:
        """Whether there is room for one more link, if need be in place of the peer that is idle for longest."""
        if self._is_full():
            peer = self._longest_idle()
            if peer is None:
                return False
            self._drop(peer, PeerClosed(peer, f"peer {short(peer)} was idle, and its link is needed for another"))
        return True

    def _longest_idle(self) -> PeerId | None:
        now = self._clock()
        last_used: dict[PeerId, float] = {}
        for peer, entries in self._links.items():
            for entry in entries:
                self._look(entry, now)
            last_used[peer] = max(entry.last_used for entry in entries)
        idle = [peer for peer, used in last_used.items() if now - used >= IDLE_AFTER_S and not self._is_needed(peer)]
        return min(idle, key=last_used.__getitem__, default=None)

    def _too_many_links(self) -> ResourceExhausted:
        return ResourceExhausted(f"this process has {self._num_links} links, which is its limit")

    def _replace(self, peer: PeerId, *, accepted: bool) -> None:
        """Makes way for a new link with ``peer``, of which we may have one that it dialled and one that we did."""
        if any((entry.address is None) == accepted for entry in self._links.get(peer, ())):
            self._drop(peer, PeerClosed(peer, f"peer {short(peer)} connected again: its link before was lost"))

    def _drop(self, peer: PeerId, reason: FusionError) -> None:
        """Ends all links with ``peer`` and reports it now, not when their readers notice."""
        entries = list(self._links[peer])
        reason = next((entry.reason for entry in entries if entry.reason is not None), reason)
        for entry in entries:
            self._fail(entry, reason)
            self._remove(entry)
            _end_pings(entry, reason)
        self._on_closed(peer, reason)

    def _add(self, link: Link, address: str | None) -> _PooledLink:
        now = self._clock()
        heartbeat = Heartbeat(last_heard=now, last_sent=now, draw_number=partial(secrets.randbits, 32))
        entry = _PooledLink(link, heartbeat, now, address=address, last_used=now)
        self._links.setdefault(link.peer, []).append(entry)
        self._num_links += 1
        if self._ticker is None:
            self._last_tick = now
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())
        with contextlib.suppress(PeerError):
            self._post_own(entry, entry.heartbeat.ping(now))  # the first round trip is known from the start
        return entry

    async def _run(self, entry: _PooledLink) -> None:
        """Reads one link until it ends."""
        link = entry.link
        peer, on_frame = link.peer, self._on_frame

        def handle(frame: Frame) -> None:
            message, payload = frame
            try:
                if isinstance(message, _OURS):
                    self._dispatch(entry, message)
                else:
                    on_frame(peer, message, payload)
            except FusionError as error:
                self._fail(entry, error)
            except Exception as error:  # noqa: BLE001 - the per-stream handler: a bug costs one link, not the node
                # Without the exception's text, which may quote what the peer sent.
                _log.error("the handler of a frame failed", peer=peer, error=type(error).__name__)
                self._fail(entry, LocalProtocolError(f"the handler of a frame failed with {type(error).__name__}"))

        try:
            await link.serve(handle)
        except FusionError as error:
            reason = entry.reason or error
        finally:
            had_link = self._remove(entry)
        self._gate.report_failure(peer, _host_of(link), reason)
        try:
            if had_link:
                self._lost(entry, reason)
        finally:
            await link.aclose()

    def _dispatch(self, entry: _PooledLink, message: Ping | Pong | Goodbye) -> None:
        entry.num_own_frames += 1
        match message:
            case Ping():
                with contextlib.suppress(PeerError):
                    self._post_own(entry, Pong(message.number))
            case Pong():
                round_trip_s = entry.heartbeat.pong(message.number, self._clock())
                waiting = entry.pings.get(message.number)
                if round_trip_s is None:
                    self._refused["unexpected-pong"] += 1
                elif waiting is not None and not waiting.done():
                    waiting.set_result(round_trip_s)
            case Goodbye():
                peer = entry.link.peer
                raise PeerClosed(peer, f"peer {short(peer)} left: {printable(message.reason) or 'no reason given'}")

    def _remove(self, entry: _PooledLink) -> bool:
        """Forgets a link; False when that was done before."""
        peer = entry.link.peer
        entries = self._links.get(peer, [])
        if entry not in entries:
            return False
        entries.remove(entry)
        self._num_links -= 1
        _add(self._past, entry.link.counters)
        if not entries:
            del self._links[peer]
        return True

    def _lost(self, entry: _PooledLink, reason: FusionError) -> None:
        peer = entry.link.peer
        _end_pings(entry, reason)
        others = self._links.get(peer)
        if others:
            # Frames may have been lost with this link: the peer is gone as far as its sessions are concerned.
            for other in others:
                self._fail(other, reason)
        elif not self._closed:
            self._on_closed(peer, reason)

    def _fail(self, entry: _PooledLink, reason: FusionError) -> None:
        """Ends a link for a reason of ours; its reader does the rest."""
        if entry.reason is None:
            entry.reason = reason
            entry.link.abort()

    def _post(self, entry: _PooledLink, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        link = entry.link
        try:
            link.post(message, payload)
        except PeerClosed as error:
            raise PeerUnreachable(link.peer, str(entry.reason or error)) from error
        if link.queued_bytes > self._max_queue_bytes:
            self._fail(entry, PeerTimeout(link.peer, f"peer {short(link.peer)} does not read what it is sent"))

    def _post_own(self, entry: _PooledLink, message: Ping | Pong) -> None:
        self._post(entry, message)
        entry.num_own_frames += 1

    async def _say_goodbye(self, entry: _PooledLink, reason: str) -> None:
        with contextlib.suppress(FusionError, TimeoutError):
            entry.link.post(Goodbye(reason[:512]))
            async with asyncio.timeout(GOODBYE_S):
                await entry.link.drain()

    # Time.

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _look(self, entry: _PooledLink, now: float) -> None:
        """Tells the heartbeat what has moved since it was last told. Cheaper than a clock reading per frame."""
        counters = entry.link.counters
        if counters.bytes_in != entry.seen_bytes_in:
            num_bytes = counters.bytes_in - entry.seen_bytes_in
            entry.seen_bytes_in = counters.bytes_in
            entry.heartbeat.heard(now)
            self._bound_traffic(entry, num_bytes)
        if counters.bytes_out != entry.seen_bytes_out:
            entry.seen_bytes_out = counters.bytes_out
            entry.heartbeat.sent(now)
        num_frames = counters.frames_in + counters.frames_out - entry.num_own_frames
        if num_frames != entry.seen_frames:
            entry.seen_frames = num_frames
            entry.last_used = now
        if not entry.link.unfinished_bytes:
            entry.unfinished_since = None
        elif entry.unfinished_since is None or counters.frames_in != entry.seen_frames_in:
            entry.unfinished_since = now
        entry.seen_frames_in = counters.frames_in

    def _bound_traffic(self, entry: _PooledLink, num_bytes: int) -> None:
        """Ends the link with a peer that sends more than it may."""
        peer, num_frames = entry.link.peer, entry.link.counters.frames_in
        excess = self._gate.refuse_traffic(peer, num_frames - entry.bounded_frames_in, num_bytes)
        entry.bounded_frames_in = num_frames
        if excess is not None:
            self._fail(entry, RemoteProtocolError(peer, f"peer {short(peer)} sends more than it may: {excess}"))

    def _bound_unfinished(self) -> None:
        """Closes links until unfinished frames hold what they may, those first that take longest to finish theirs.

        Not a deadline, which a long frame on a thin line would miss also where there is memory for all; and not the
        largest frame first, which would be an honest one where many hold a little of theirs for ever.
        """
        unfinished = [
            (entry.unfinished_since, entry)
            for entries in self._links.values()
            for entry in entries
            if entry.unfinished_since is not None
        ]
        total_bytes = sum(entry.link.unfinished_bytes for _, entry in unfinished)
        for _, entry in sorted(unfinished, key=lambda pair: pair[0]):
            if total_bytes <= self._max_unfinished_bytes:
                return
            total_bytes -= entry.link.unfinished_bytes
            self._refused["unfinished-frame"] += 1
            peer = entry.link.peer
            self._fail(entry, PeerTimeout(peer, f"peer {short(peer)} did not finish a frame while memory was short"))

    def _entry(self, peer: PeerId) -> _PooledLink:
        entries = self._links.get(peer)
        if not entries:
            raise PeerUnreachable(peer, f"there is no link with peer {short(peer)}")
        return entries[0]

    def _check_open(self) -> None:
        if self._closed:
            raise LocalProtocolError("this pool of links is closed")


def _host_of(link: Link) -> str | None:
    """Where the peer itself is; None behind a relay, or when it is unknown."""
    if link.path not in (PathKind.DIRECT, PathKind.STREAM):
        return None
    host = link.remote_address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return None if ip_of(host) is None else host


def _add(total: LinkCounters, counters: LinkCounters) -> None:
    total.frames_in += counters.frames_in
    total.frames_out += counters.frames_out
    total.bytes_in += counters.bytes_in
    total.bytes_out += counters.bytes_out


def _end_pings(entry: _PooledLink, reason: FusionError) -> None:
    for answer in entry.pings.values():
        if not answer.done():
            answer.set_exception(PeerClosed(entry.link.peer, str(reason)))
