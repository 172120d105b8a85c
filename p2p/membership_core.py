"""Core of a peer's membership in a swarm: whom it is connected with, what it tells them, what it asks, whom it forgets.

Guarantees
* Entering never ends: peers named by the user are dialled again with growing pauses for as long as none is met, and the
  program runs meanwhile. Who has been met before (p2p.peer_book) is tried as well, several at once.
* Nobody is dropped for one missed answer, or for what others say: silence makes a peer *suspect*, a suspect is probed,
  and only who misses the probe too is disconnected. ``suspect`` (hearsay, or a lost data link) leads to a probe only.
* Who has said nothing yet is not counted on: it is no reason to seek fewer others, and dropped when it refuses.
* A node that dies is forgotten when its record expires (p2p.records), and not before; two parts of a swarm that were
  separated find each other again.
* What a peer costs is bounded: connections, dials at once, records per pull, and how often it pulls. See the regimes.

Assumes: the shell carries out every command and reports its end exactly once; ``now`` does not go back. The clock of
no peer is believed: those that answer tell theirs, and the median tells whether our own seems wrong, nothing else.

States of a connection: new (nothing heard yet), met (it has answered or asked), suspect. Of a way in: idle, dialling,
waiting for its next turn. Of the view, two regimes by the estimated number of nodes N (Lincoln-Petersen, from what
peers say they know and what of it we know): up to FULL_VIEW nodes everybody's record is kept fresh, so pulls ask for
all that is missing, the more often the more they bring; above that the view is a random sample, refreshed by small
pulls, plus the nodes of the own models; who looks for another model asks the DHT and pulls by model.

Timers: see the constants; seconds of one monotonic clock. ``now`` has Unix time beside it, for the dates in records.

Source: anti-entropy, Demers et al., "Epidemic Algorithms for Replicated Database Maintenance", 1987; suspicion before
ejection, Das et al., "SWIM", 2002, §4.2; docs/protocol-network.md. Ugly: records are pushed one hop and pulled from
there on, so a change takes some seconds to reach everybody (tests/sim); the estimate of N is too low when neighbours
share much of what they know.

Above 600 lines: connections, pulls and ways in share the table of connections; what could be cut out has been.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fusion_node.types import ModelId, MonotonicS, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.identity import short
from p2p.mesh_core import Candidate, choose, choose_to_drop, place_of
from p2p.peer_book import PeerBook
from p2p.publication_core import Publication, Publish
from p2p.record_exchange import MAX_DIGEST_ENTRIES, MAX_RECORDS, RecordExchange, serves
from p2p.records import NodeRecord, Refusal
from p2p.timers_core import Timers

if TYPE_CHECKING:
    from random import Random

HEARTBEAT_S = 20.0
"""Of silence, after which a peer is asked for a sign of life. A third of a record's life."""

PROBE_AFTER_S = 1.0
"""Between a missed answer and the probe. An answer is given EXCHANGE_TIMEOUT_S (p2p.discovery)."""

MAX_REFUSALS = 3
"""In a row. Who refuses is there and may be busy; who refuses so often is of no use, whatever the reason."""

MAX_ASKS_OF_ONE = 2
"""Announcements and questions of ours that one peer may owe an answer at once, heartbeats and look-ups by name aside.
Of announcements only the newest waits: who takes long to refuse must not make us pile up more and more."""

REDIAL_FIRST_S = 0.5
REDIAL_MAX_S = 15.0
"""While no peer is met. Twice as long after each failure, with a quarter by chance, so that a bootstrap that comes back
is not dialled by everybody at once."""

REDIAL_MAX_KNOWN_S = 60.0
"""While no peer is met, for peers that the user has not named: a line that comes back is not waited for longer."""

REDIAL_MAX_MET_S = 300.0
"""While others are met."""

MESH_PEERS = 12
"""Connections that a node seeks, so that an announcement reaches many directly. A random graph of this degree stays
connected when half of its nodes vanish."""

USER_PEERS = 3
"""Connections that a user seeks: never to rely on one."""

HIGH_PEERS = 40
LOW_PEERS = 32
"""Above HIGH_PEERS connections, those that others made are given up until LOW_PEERS are left; the others find another
node. The host allows 256."""

SETTLED_AFTER_S = 10.0
"""A connection younger than this is not given up: a newcomer has to learn whom else to turn to. Not longer, so that a
bootstrap has room for the next ones: with 30 s, 15 newcomers a second filled three of them."""

MAX_DIALS = 8
MESH_EVERY_S = 5.0
SHUFFLE_EVERY_S = 300.0
"""One connection of the mesh is replaced: who surrounds a peer slowly does not keep it for ever."""

REUNITE_EVERY_S = 30.0
"""One way in that is neither connected nor among the live nodes is dialled: it may be in another part of the swarm."""

BOOK_AFTER_S = 3.0
"""Known peers are tried when those named by the user have not answered by then; at once when none is named."""

BOOK_AT_ONCE = 4
MAX_NEAR = 32
"""Peers that the local network has told of and that are remembered for it."""

MAX_NEAR_ADDRESSES = 8
NEAR_FAILURES = 10
"""Failed dials in a row after which such a peer is forgotten, if others are met: it may have left."""

SAVE_EVERY_S = 60.0
LONELY_AFTER_S = 10.0
EXPIRE_EVERY_S = 5.0

FULL_VIEW = 512
"""Nodes up to which everybody knows everybody: 600 bytes each, renewed every 25 s, are 12 kB/s."""

FULL_VIEW_AGAIN = 3 / 4
"""Below this share of FULL_VIEW the view becomes a full one again: estimates waver."""

PULL_MIN_S = 2.0
PULL_MAX_S = 5.0
PULL_USER_S = 30.0
"""A user wants no more than a way back in; what it looks for it asks for."""

MANY_NEWS = 8
"""Records in one answer from which on the next pull comes sooner; with fewer it comes later."""

SAMPLE_RECORDS = 32
SAMPLE_EVERY_S = 10.0
"""Records per pull, and between pulls, in the large regime: 2 kB/s, and some 150 nodes in view."""

MODEL_VIEW = 256
"""Nodes of the own models up to which all of them are kept fresh in the large regime."""

PULLED_PEERS = 16
"""Connected peers that one look-up asks."""

FRESH_S = 30.0
"""A record younger than this is not asked for again, when the DHT names its node."""

DHT_JOINS = 3
"""Peers through which the DHT is entered: one alone could show a DHT of its own."""

MAX_OFFSETS = 64
CLOCK_WARN_S = 10.0
"""Of a third of MAX_CLOCK_SKEW_S (p2p.records), beyond which records are refused."""

MIN_OFFSETS = 3

GOSSIP_EVERY_S = 30.0
GOSSIP_COST_S = 0.016
GOSSIP_CPU_SHARE = 0.03
"""A message costs every node of a topic 16 ms of CPU (measured: 12 nodes, 600 bytes), so N nodes that each send one
every T cost each N * 16 ms / T. T grows with N, and above MAX_GOSSIP_S a message is older than what a pull brings."""

MAX_GOSSIP_S = 50.0


class Moment(NamedTuple):
    """Now, on both clocks."""

    s: MonotonicS
    unix_s: UnixS


@dataclass(frozen=True, slots=True)
class WayIn:
    """A peer named by the user, and its multiaddrs."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamedPeer:
    """What has become of a peer named by the user; ``problem`` is why the last dial failed, empty when none has."""

    peer: PeerId
    addresses: tuple[str, ...]
    is_connected: bool
    problem: str


@dataclass(frozen=True, slots=True)
class Connection:
    """One that is open.

    Attributes:
        age_s: since it was made.
        heard_s: since the peer was last heard on it; as old as the connection when it never was.
        is_suspect: it was silent when something was due, and is being asked.
        addresses: that were dialled; empty when it was the peer that dialled.
    """

    peer: PeerId
    age_s: float
    heard_s: float
    is_suspect: bool
    we_dialled: bool
    addresses: tuple[str, ...]


# What the shell is to do.


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect, and report with ``dialled``."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the connection; if it is only ``if_spare``, not when something else of this process runs over it."""

    peer: PeerId
    why: str
    if_spare: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the request to a connected peer, and report with ``answered`` or ``not_answered``.

    Attributes:
        is_sure: the peer has answered when it was last asked, or we have chosen it. Others must not keep these waiting.
    """

    token: int
    peer: PeerId
    request: bytes
    is_sure: bool = True


@dataclass(frozen=True, slots=True)
class JoinDht:
    """Take the peer into the DHT, and report with ``joined_dht``."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Gossip:
    """Publish the record on the topic."""

    envelope: bytes


@dataclass(frozen=True, slots=True)
class SaveBook:
    """Write the peer book."""


@dataclass(frozen=True, slots=True)
class Met:
    """For those who wait: the peer has answered or asked for the first time on the present connection."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the log."""

    is_warning: bool
    text: str


Command: TypeAlias = Dial | Disconnect | Ask | JoinDht | Publish | Gossip | SaveBook | Met | Notice


class Silence(enum.Enum):
    """Why there is no answer."""

    REFUSED = "refused"
    """The peer is there and did not take the request."""
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """It answered with something that no honest peer sends."""
    DOWN = "down"
    """Our own doing: the host has stopped, or the call was given up."""


class _Timer(enum.Enum):
    DIAL = enum.auto()
    BEAT = enum.auto()
    PROBE = enum.auto()
    BOOK = enum.auto()
    LONELY = enum.auto()
    MESH = enum.auto()
    PULL = enum.auto()
    REUNITE = enum.auto()
    SHUFFLE = enum.auto()
    SAVE = enum.auto()
    EXPIRE = enum.auto()


class _Purpose(enum.Enum):
    BEAT = "beat"
    PROBE = "probe"
    FIRST = "first"
    PULL = "pull"
    FIND = "find"
    PUSH = "push"


@dataclass(slots=True)
class _Asked:
    peer: PeerId
    purpose: _Purpose
    model_id: ModelId | None
    limit: int
    at: Moment
    own_envelope: bytes | None
    num_known: int
    """Nodes that we knew of those asked for."""


@dataclass(slots=True)
class _Connection:
    since_s: float
    heard_s: float
    has_met: bool = False
    is_suspect: bool = False
    we_dialled: bool = False
    addresses: tuple[str, ...] = ()
    """Those that were dialled."""
    told: bytes | None = None
    """The own record that it has."""
    num_asking: int = 0
    num_refused: int = 0
    """Since the last answer."""
    is_sure: bool = False
    """It has answered when it was last asked, or we have dialled it and not asked yet."""
    is_pushing: bool = False
    owes_push: bool = False
    """The own record has changed while no more could be asked."""


@dataclass(slots=True)
class _Contact:
    """Somebody whom we may dial, with what became of it. Named ones stay, and those of the local network for a while;
    others are forgotten when they have rested."""

    addresses: tuple[str, ...]
    near: tuple[str, ...] = ()
    """What the local network has told last."""
    is_named: bool = False
    is_dialling: bool = False
    num_failures: int = 0
    not_before_s: float = 0.0
    last_failure: str = ""

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.addresses, *self.near]))


@dataclass(slots=True)
class _Estimate:
    """How many nodes there are: the median of what the last answers suggest, None while there are too few."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def add(self, num_ours: int, num_theirs: int, num_shared: int) -> None:
        if num_ours >= 16 and num_theirs >= 16:
            # Chapman's form, which needs no overlap.
            self.samples.append((num_ours + 1) * (num_theirs + 1) / (num_shared + 1) - 1)

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if len(self.samples) >= 3 else None


class Membership:
    """See the head of this file.

    Args:
        own: the own peer id.
        serve: whether this is a node; a user has fewer connections, pulls rarely and pushes nothing.
        named: peers that the user has named.
        book: peers known from earlier; changed here, written by the shell.
        exchange: the record table and what is said of it.
        chance: a source that strangers cannot foretell.
        protected: peers whose connection is in use for something else and never given up here; the shell changes it.
        full_view: see FULL_VIEW; simulations of a large swarm's regime take a smaller one.
        gossip: whether records are published on a topic too.
    """

    def __init__(
        self,
        own: PeerId,
        *,
        serve: bool,
        named: Sequence[WayIn],
        book: PeerBook,
        exchange: RecordExchange,
        chance: Random,
        protected: Set[PeerId] = frozenset(),
        full_view: int = FULL_VIEW,
        gossip: bool = False,
    ) -> None:
        self.exchange = exchange
        self.book = book
        self.last_failure = ""
        """Of a dial, for people."""
        self._own = own
        self._serve = serve
        self._chance = chance
        self._protected = protected
        self._full_view = full_view
        self._gossip = gossip
        self._gossiped_at_s = float("-inf")
        self._contacts: dict[PeerId, _Contact] = {
            way.peer: _Contact(way.addresses, is_named=True) for way in named if way.peer != own
        }
        self._connections: dict[PeerId, _Connection] = {}
        self._heard_early: set[PeerId] = set()
        """Who asked before its connection was told of."""
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0
        self._timers: Timers[tuple[_Timer, PeerId | None]] = Timers()
        self._of_one = {
            _Timer.DIAL: self._on_dial_due,
            _Timer.BEAT: self._on_beat_due,
            _Timer.PROBE: self._on_probe_due,
        }
        self._of_all = {
            _Timer.BOOK: self._on_book_due,
            _Timer.LONELY: self._on_lonely_due,
            _Timer.MESH: self._on_mesh_due,
            _Timer.PULL: self._on_pull_due,
            _Timer.REUNITE: self._on_reunite_due,
            _Timer.SHUFFLE: self._on_shuffle_due,
            _Timer.SAVE: self._on_save_due,
            _Timer.EXPIRE: self._on_expire_due,
        }
        self._commands: list[Command] = []
        self._publication = Publication()
        self._is_publication_wanted = False
        self._models: tuple[ModelId, ...] = ()
        self._num_dht_joins = 0
        self._num_joining = 0
        self._is_lonely = False
        self._is_host_up = True
        self._estimate = _Estimate()
        self._estimates: dict[ModelId, _Estimate] = {}
        """Of the nodes of each model that is served here."""
        self._samples = False
        self._pull_every_s = PULL_MIN_S
        self._num_pulls = 0
        self._offsets: dict[PeerId, float] = {}
        self._is_clock_suspect = False

    # What others may know.

    @property
    def connected(self) -> list[PeerId]:
        return list(self._connections)

    def connections(self, now: Moment) -> list[Connection]:
        return [
            Connection(peer, now.s - c.since_s, now.s - c.heard_s, c.is_suspect, c.we_dialled, c.addresses)
            for peer, c in self._connections.items()
        ]

    @property
    def has_met(self) -> bool:
        """Whether a peer is connected that has answered or asked on its connection."""
        return any(connection.has_met for connection in self._connections.values())

    @property
    def ways_in(self) -> list[str]:
        """The addresses that are tried, those named by the user first."""
        named = [text for contact in self._contacts.values() if contact.is_named for text in contact.addresses]
        near = [text for contact in self._contacts.values() for text in contact.near]
        known = [text for entry in self.book.entries() for text in entry.addresses]
        return list(dict.fromkeys([*named, *near, *known]))

    @property
    def named(self) -> list[NamedPeer]:
        """The peers named by the user."""
        return [
            NamedPeer(peer, each.addresses, peer in self._connections, each.last_failure)
            for peer, each in self._contacts.items()
            if each.is_named
        ]

    @property
    def is_large(self) -> bool:
        """Whether the swarm is too large to know everybody."""
        return self._samples

    def num_nodes_estimated(self, now: Moment) -> int:
        """How many nodes the swarm seems to have. A guess: peers that lie may shift it."""
        known = sum(1 for held in self.exchange.table.held(now=now.unix_s) if held.record.shards)
        return max(known, round(self._estimate.value or 0.0)) if self._samples else known

    @property
    def clock_offset_s(self) -> float | None:
        """By how much the clocks of our peers are ahead of ours, in the middle; None while fewer than three have told
        theirs. No single peer's clock is believed."""
        return statistics.median(self._offsets.values()) if len(self._offsets) >= MIN_OFFSETS else None

    @property
    def num_clocks(self) -> int:
        """How many peers have told the time lately."""
        return len(self._offsets)

    # Being driven.

    def start(self, now: Moment) -> None:
        """Once, before anything else."""
        for number, (peer, contact) in enumerate(self._contacts.items()):
            # Some at once; the others only if those do not do.
            delay_s = 0.0 if number < BOOK_AT_ONCE else 1.0 + 0.5 * (number - BOOK_AT_ONCE)
            contact.not_before_s = now.s + delay_s
            self._timers.set((_Timer.DIAL, peer), now.s + delay_s)
        self._timers.set((_Timer.BOOK, None), now.s + (BOOK_AFTER_S if self._contacts else 0.0))
        self._timers.set((_Timer.LONELY, None), now.s + LONELY_AFTER_S)
        self._timers.set((_Timer.EXPIRE, None), now.s + EXPIRE_EVERY_S)
        for timer, every_s in (
            (_Timer.MESH, MESH_EVERY_S),
            (_Timer.PULL, PULL_MAX_S if self._serve else PULL_USER_S),
            (_Timer.REUNITE, REUNITE_EVERY_S),
            (_Timer.SHUFFLE, SHUFFLE_EVERY_S),
            (_Timer.SAVE, SAVE_EVERY_S),
        ):
            self._timers.set((timer, None), now.s + self._about(every_s))

    def get_timer(self) -> float | None:
        """When ``handle_timer`` is to be called."""
        return self._timers.next_s()

    def handle_timer(self, now: Moment) -> None:
        for timer, peer in self._timers.pop_due(now.s):
            if peer is None:
                self._of_all[timer](now)
            else:
                self._of_one[timer](peer, now)

    def commands(self) -> list[Command]:
        """What is to be done, once."""
        commands, self._commands = self._commands, []
        return commands

    # What has happened.

    def connection_opened(self, peer: PeerId, now: Moment) -> None:
        """The first connection with a peer, whoever has made it."""
        if peer in self._connections:
            return
        connection = self._connections[peer] = _Connection(now.s, now.s)
        if peer in self._heard_early:
            self._heard_early.discard(peer)
            self._hear(peer, connection, now)
        # A peer that says nothing by itself is asked soon while we know nobody.
        delay_s = HEARTBEAT_S if self.has_met else 1.0
        self._timers.set((_Timer.BEAT, peer), now.s + self._about(delay_s))

    def connection_closed(self, peer: PeerId, now: Moment) -> None:
        """The last connection with a peer has ended, whoever has ended it."""
        self._heard_early.discard(peer)
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._timers.clear((_Timer.BEAT, peer))
        self._timers.clear((_Timer.PROBE, peer))
        contact = self._contacts.get(peer)
        if contact is not None and contact.is_named:
            contact.not_before_s = now.s + self._about(REDIAL_FIRST_S)
            self._timers.set_earlier((_Timer.DIAL, peer), contact.not_before_s)
        if connection.has_met and not self.has_met:
            self._become_lonely(now)
        self._timers.set_earlier((_Timer.MESH, None), now.s + self._about(REDIAL_FIRST_S))

    def dialled(self, peer: PeerId, now: Moment, *, error: str | None = None, is_own_fault: bool = False) -> None:
        """The end of a Dial. ``is_own_fault`` when our own host was down, which says nothing about the peer."""
        contact = self._contacts.get(peer)
        connection = self._connections.get(peer)
        if contact is not None:
            contact.is_dialling = False
        if error is None and connection is None:
            # The host tells of a connection a moment after it has made it.
            self.connection_opened(peer, now)
            connection = self._connections[peer]
        if error is not None and is_own_fault:
            if contact is not None and contact.is_named:
                self._timers.set_earlier((_Timer.DIAL, peer), now.s + self._about(REDIAL_FIRST_S))
        elif error is not None:
            self._dial_failed(peer, contact, error, now)
        elif connection is not None:
            connection.we_dialled = connection.is_sure = True
            if contact is not None:
                contact.num_failures = 0
                connection.addresses = contact.ways
            self._ask(peer, None, MAX_RECORDS if not self._samples else SAMPLE_RECORDS, _Purpose.FIRST, now)

    def asked(self, peer: PeerId, request: bytes, now: Moment) -> bytes:
        """A peer's request; the answer to it.

        Raises:
            WireError: the request is malformed, and to be refused.
        """
        answer = self.exchange.answer(request, source=peer, now=now.unix_s)
        connection = self._connections.get(peer)
        if connection is not None:
            self._hear(peer, connection, now)
        elif len(self._heard_early) < MAX_OFFSETS:
            self._heard_early.add(peer)
        return answer

    def answered(self, token: int, answer: bytes, now: Moment) -> None:
        """The answer to an Ask."""
        asked = self._asked.pop(token, None)
        if asked is None:
            return
        try:
            received = self.exchange.receive(answer, source=asked.peer, now=now.unix_s, limit=asked.limit)
        except WireError as error:
            self._asked[token] = asked
            self.not_answered(token, Silence.BROKEN, f"malformed: {error}", now)
            return
        self._note_clock(asked, received.answered_at, now)
        connection = self._connections.get(asked.peer)
        if connection is not None:
            connection.num_refused, connection.is_sure = 0, True
            connection.told = asked.own_envelope or connection.told
            self._hear(asked.peer, connection, now)
            self._ended(asked, connection, now)
        if asked.limit and asked.num_known <= MAX_DIGEST_ENTRIES:
            estimate = self._estimate if asked.model_id is None else self._estimates.get(asked.model_id)
            if estimate is not None:
                estimate.add(asked.num_known, received.num_known, received.num_shared)
                self._choose_regime()
        if asked.purpose is _Purpose.PULL:
            self._adapt_pulls(len(received.accepted), now)
        if asked.purpose is _Purpose.FIRST and connection is not None and connection.we_dialled:
            self._remember(asked.peer, connection, now)
            self._join_dht(asked.peer)
            if len(received.accepted) >= MANY_NEWS:
                self._timers.set_earlier((_Timer.PULL, None), now.s + PULL_MIN_S)
        if received.accepted and self._num_wanted(now) > 0:
            self._timers.set_earlier((_Timer.MESH, None), now.s)

    def not_answered(self, token: int, silence: Silence, why: str, now: Moment) -> None:
        """An Ask that came to nothing."""
        asked = self._asked.pop(token, None)
        connection = None if asked is None else self._connections.get(asked.peer)
        if asked is None or connection is None:
            return
        connection.is_sure = connection.is_sure and silence is Silence.DOWN
        match silence:
            case Silence.REFUSED:
                self._refused(asked, connection, why, now)
            case Silence.BROKEN:
                self._drop(asked.peer, why)
            case Silence.TIMEOUT if connection.heard_s > asked.at.s or connection.since_s > asked.at.s:
                pass  # something else has been heard since
            case Silence.TIMEOUT if connection.is_suspect and asked.purpose is _Purpose.PROBE:
                self._drop(asked.peer, f"it has not answered twice: {why}")
            case Silence.TIMEOUT:
                self._suspect(asked.peer, connection, now)
            case Silence.DOWN:
                pass
        self._ended(asked, connection, now)

    def suspect(self, peer: PeerId, now: Moment) -> None:
        """Somebody says, or a lost data link suggests, that the peer is gone. It is asked itself."""
        if peer in self._connections:
            self._timers.set_earlier((_Timer.BEAT, peer), now.s)
            self._connections[peer].heard_s = min(self._connections[peer].heard_s, now.s - HEARTBEAT_S)

    def found(self, peer: PeerId, addresses: Sequence[str], now: Moment) -> None:
        """A peer that the local network tells of."""
        if peer == self._own:
            return
        contact = self._contacts.setdefault(peer, _Contact(()))
        contact.near = tuple(dict.fromkeys(addresses))[:MAX_NEAR_ADDRESSES]
        others = [each for each in self._contacts.values() if each.near and each is not contact]
        for other in others[: max(0, len(others) + 1 - MAX_NEAR)]:
            other.near = ()
        if self._num_wanted(now) > 0:
            self._dial(peer, contact, now)

    def joined_dht(self, now: Moment, *, is_done: bool) -> None:
        """The end of a JoinDht."""
        self._num_joining -= 1
        if is_done:
            self._num_dht_joins += 1
            self._publication.hurry()
            self._publish(now)

    def published(self, now: Moment, *, is_done: bool) -> None:
        """The end of a Publish; one that failed is repeated at the next announcement."""
        if not is_done:
            self._publication.forget()
            return
        self._publication.done()
        if self._is_publication_wanted:
            self._publish(now)

    def gossiped(self, forwarder: PeerId, envelope: bytes, now: Moment) -> None:
        """A record that came by gossip: who forwarded it has introduced it."""
        self.exchange.table.receive(envelope, now=now.unix_s, introducer=forwarder)

    def host_down(self) -> None:
        """All connections are gone, and nothing of what the DHT held here is left. Asks and dials end by themselves.

        Until ``host_resumed``, nobody is dialled.
        """
        self._is_host_up = False
        for peer in self._connections:
            self._timers.clear((_Timer.BEAT, peer))
            self._timers.clear((_Timer.PROBE, peer))
        self._connections.clear()
        self._heard_early.clear()
        self._publication.forget()
        self._num_dht_joins = self._num_joining = 0

    def host_resumed(self, now: Moment) -> None:
        """The host runs again; it may have told of new connections already."""
        self._is_host_up = True
        if not self.has_met:
            self._become_lonely(now)
        for peer, contact in self._contacts.items():
            if contact.is_named:
                contact.not_before_s = now.s
                self._timers.set_earlier((_Timer.DIAL, peer), now.s)
        self._timers.set_earlier((_Timer.MESH, None), now.s)

    # What the program wants.

    def announce(
        self, envelope: bytes, model_ids: Sequence[ModelId], now: Moment
    ) -> tuple[NodeRecord | Refusal, list[int]]:
        """Takes the own new record. Returns what became of it, and the tokens of the pushes that tell others."""
        record = self._set_own(envelope, now)
        if isinstance(record, Refusal):
            return record, []
        self._models = tuple(model_ids)
        self._estimates = {model_id: self._estimates.get(model_id, _Estimate()) for model_id in model_ids}
        self._publication.want(model_ids)
        self._publish(now)
        if self._gossip and now.s - self._gossiped_at_s >= self._gossip_every_s(now) <= MAX_GOSSIP_S and self.has_met:
            self._gossiped_at_s = now.s
            self._commands.append(Gossip(envelope))
        return record, self._push(now)

    def withdraw(self, envelope: bytes, now: Moment) -> tuple[NodeRecord | Refusal, list[int]]:
        """Takes a record without shards. As ``announce``."""
        record = self._set_own(envelope, now)
        if isinstance(record, Refusal):
            return record, []
        self._models = ()
        self._publication.withdraw()
        return record, self._push(now, is_last=True)

    def pull(self, model_id: ModelId | None, now: Moment) -> list[int]:
        """Asks connected peers for the nodes of a model, or for all. Returns the tokens of what was asked."""
        willing = [peer for peer, each in self._connections.items() if each.num_asking < MAX_ASKS_OF_ONE]
        nodes = [peer for peer in willing if self._is_node(peer, now)]
        others = [peer for peer in willing if peer not in set(nodes)]
        chosen = self._some(nodes, PULLED_PEERS)
        chosen += self._some(others, PULLED_PEERS - len(chosen))
        return [self._ask(peer, model_id, MAX_RECORDS, _Purpose.FIND, now) for peer in chosen]

    def ask(self, peer: PeerId, model_id: ModelId | None, now: Moment) -> int:
        """Asks one peer, which need not have been connected for long. Returns the token."""
        return self._ask(peer, model_id, MAX_RECORDS, _Purpose.FIND, now)

    def missing(self, providers: Iterable[PeerId], now: Moment) -> list[PeerId]:
        """Those of the providers that the DHT names whose record is not known, or no longer fresh."""
        fresh = {
            held.record.peer
            for held in self.exchange.table.held(now=now.unix_s)
            if now.unix_s - held.record.issued_at < FRESH_S
        }
        return [peer for peer in providers if peer not in fresh and peer != self._own]

    # Connections.

    def _hear(self, peer: PeerId, connection: _Connection, now: Moment) -> None:
        connection.heard_s, connection.is_suspect = now.s, False
        if connection.has_met:
            return
        connection.has_met = True
        self._commands.append(Met(peer))
        if self._is_lonely:
            self._is_lonely = False
            self._note(f"entered the swarm through peer {short(peer)}")
        if self._is_publication_wanted:
            self._publish(now)

    def _refused(self, asked: _Asked, connection: _Connection, why: str, now: Moment) -> None:
        """It has no room for the request just now, or never wants any. A connection that ends says so itself."""
        connection.num_refused += 1
        is_often = connection.num_refused >= MAX_REFUSALS
        if connection.has_met and not is_often:
            connection.heard_s, connection.is_suspect = now.s, False
        elif is_often and (not connection.has_met or (connection.is_suspect and asked.purpose is _Purpose.PROBE)):
            if asked.peer not in self._protected:
                # What else runs over the connection may be worth more than answers.
                self._drop(asked.peer, f"it has refused {connection.num_refused} times: {why}", if_spare=True)
        elif is_often:
            self._suspect(asked.peer, connection, now)

    def _suspect(self, peer: PeerId, connection: _Connection, now: Moment) -> None:
        connection.is_suspect = True
        self._timers.set_earlier((_Timer.PROBE, peer), now.s + PROBE_AFTER_S)

    def _drop(self, peer: PeerId, why: str, *, if_spare: bool = False) -> None:
        if not if_spare:
            self._timers.clear((_Timer.BEAT, peer))
        self._commands.append(Disconnect(peer, why, if_spare))

    def _on_beat_due(self, peer: PeerId, now: Moment) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        wanted = HEARTBEAT_S if connection.has_met else 0.0
        quiet_until_s = connection.heard_s + wanted
        if quiet_until_s > now.s + 0.001:
            self._timers.set((_Timer.BEAT, peer), quiet_until_s + self._about(1.0))
            return
        self._timers.set((_Timer.BEAT, peer), now.s + self._about(HEARTBEAT_S))
        if not connection.num_asking:
            # While nobody is met yet, whoever is connected may know the swarm.
            limit = MAX_RECORDS if not connection.has_met and not self.has_met else 0
            self._ask(peer, None, limit, _Purpose.BEAT, now)

    def _on_probe_due(self, peer: PeerId, now: Moment) -> None:
        connection = self._connections.get(peer)
        if connection is not None and connection.is_suspect:
            self._ask(peer, None, 0, _Purpose.PROBE, now)

    def _ask(self, peer: PeerId, model_id: ModelId | None, limit: int, purpose: _Purpose, now: Moment) -> int:
        connection = self._connections.get(peer)
        own = self.exchange.own_envelope
        is_told = connection is not None and connection.told is own
        request, num_known = self.exchange.counted_request(model_id, limit=limit, now=now.unix_s, push=not is_told)
        self._num_asked += 1
        self._asked[self._num_asked] = _Asked(peer, purpose, model_id, limit, now, own, num_known)
        if connection is not None:
            connection.num_asking += 1
            connection.is_pushing |= purpose is _Purpose.PUSH
        is_sure = connection is None or connection.is_sure
        self._commands.append(Ask(self._num_asked, peer, request, is_sure))
        return self._num_asked

    def _ended(self, asked: _Asked, connection: _Connection, now: Moment) -> None:
        """Of what was asked, whatever has come of it: there is room for what waits."""
        connection.num_asking -= 1
        connection.is_pushing &= asked.purpose is not _Purpose.PUSH
        is_due = connection.owes_push and not connection.is_pushing and not connection.is_suspect
        if is_due and self._connections.get(asked.peer) is connection:
            connection.owes_push = False
            if connection.told is not self.exchange.own_envelope:
                self._ask(asked.peer, None, 0, _Purpose.PUSH, now)

    def _become_lonely(self, now: Moment) -> None:
        self._note("no peer that answers is connected any more; trying those that are known")
        self._timers.set_earlier((_Timer.LONELY, None), now.s + LONELY_AFTER_S)
        for peer, contact in self._contacts.items():
            contact.num_failures = 0
            pause_s = self._about(REDIAL_FIRST_S) if contact.is_named else 0.0
            contact.not_before_s = min(contact.not_before_s, now.s + pause_s)
            if contact.is_named:
                self._timers.set_earlier((_Timer.DIAL, peer), contact.not_before_s)
        self._timers.set_earlier((_Timer.BOOK, None), now.s + self._about(REDIAL_FIRST_S))

    def _on_lonely_due(self, now: Moment) -> None:
        if self.has_met or self._is_lonely or not (self._contacts or self.book.num_peers):
            return
        self._is_lonely = True
        why = f": {self.last_failure}" if self.last_failure else ""
        self._note(f"no peer of the swarm answers yet, running alone and trying on{why}", is_warning=True)

    # Dialling.

    def _num_wanted(self, now: Moment) -> int:
        """Connections that are still sought, those being made counted in, and not those that have never said a word."""
        num_dialling = sum(contact.is_dialling for contact in self._contacts.values())
        num_useful = sum(
            each.has_met or (each.we_dialled and now.s - each.since_s < SETTLED_AFTER_S)
            for each in self._connections.values()
        )
        return (MESH_PEERS if self._serve else USER_PEERS) - num_useful - num_dialling

    def _dial(self, peer: PeerId, contact: _Contact, now: Moment) -> bool:
        num_dialling = sum(other.is_dialling for other in self._contacts.values())
        if contact.is_dialling or peer in self._connections or peer == self._own or num_dialling >= MAX_DIALS:
            return False
        if not self._is_host_up or not contact.ways:
            return False
        contact.is_dialling = True
        self._commands.append(Dial(peer, contact.ways))
        return True

    def _on_dial_due(self, peer: PeerId, now: Moment) -> None:
        contact = self._contacts.get(peer)
        if contact is None or not contact.is_named or contact.is_dialling or peer in self._connections:
            return
        is_wanted = self._num_wanted(now) > 0
        if is_wanted and contact.not_before_s <= now.s and self._dial(peer, contact, now):
            return
        pause_s = self._about(REDIAL_FIRST_S if is_wanted else REDIAL_MAX_S)
        self._timers.set((_Timer.DIAL, peer), max(contact.not_before_s, now.s + pause_s))

    def _dial_failed(self, peer: PeerId, contact: _Contact | None, error: str, now: Moment) -> None:
        self.last_failure = error
        if self.has_met:  # else it may be our own line that is down
            self.book.failed(peer, now=now.unix_s)
        if contact is None:
            return
        if contact.is_named and not contact.num_failures:
            self._note(f"bootstrap peer {short(peer)} does not answer, trying on: {error}", is_warning=True)
        contact.num_failures += 1
        contact.last_failure = error
        if contact.num_failures >= NEAR_FAILURES and self.has_met:
            contact.near = ()
        longest_s = REDIAL_MAX_S if contact.is_named else REDIAL_MAX_KNOWN_S
        longest_s = REDIAL_MAX_MET_S if self.has_met else longest_s
        pause_s = min(REDIAL_FIRST_S * 2.0 ** min(contact.num_failures, 12), longest_s)
        contact.not_before_s = now.s + self._about(pause_s)
        if contact.is_named:
            self._timers.set((_Timer.DIAL, peer), contact.not_before_s)
        if self._num_wanted(now) > MESH_PEERS // 2:
            # Not faster later: whoever signs records with addresses of others would make us knock there.
            self._timers.set_earlier((_Timer.MESH, None), now.s + self._about(REDIAL_FIRST_S))

    def _dial_near(self, at_most: int, now: Moment) -> int:
        """Those of the local network that do not rest. Returns how many."""
        near = [(peer, contact) for peer, contact in self._contacts.items() if contact.near]
        num = 0
        for peer, contact in near:
            if num < at_most and contact.not_before_s <= now.s:
                num += self._dial(peer, contact, now)
        return num

    def _on_book_due(self, now: Moment) -> None:
        """Known peers, several at once, while nobody answers, and those of the local network."""
        if self.has_met:
            return
        self._dial_near(BOOK_AT_ONCE, now)
        self._timers.set((_Timer.BOOK, None), now.s + self._about(MESH_EVERY_S))
        resting = {peer for peer, contact in self._contacts.items() if contact.not_before_s > now.s}
        busy = resting | set(self._connections) | {p for p, c in self._contacts.items() if c.is_dialling} | {self._own}
        for entry in self.book.choose(BOOK_AT_ONCE, self._chance, without=busy):
            peer = PeerId(entry.peer)
            self._dial(peer, self._contacts.setdefault(peer, _Contact(entry.addresses)), now)

    def _on_mesh_due(self, now: Moment) -> None:
        self._timers.set((_Timer.MESH, None), now.s + self._about(MESH_EVERY_S))
        self._forget_contacts(now)
        num_wanted = self._num_wanted(now)
        num_wanted -= self._dial_near(num_wanted, now)
        candidates = self._candidates(now) if num_wanted > 0 else []
        for candidate in choose(candidates, num_wanted, self._places(), self._chance):
            contact = self._contacts.setdefault(candidate.peer, _Contact(candidate.addresses))
            contact.addresses = candidate.addresses if not contact.is_named else contact.addresses
            self._dial(candidate.peer, contact, now)
        num_above = len(self._connections) - LOW_PEERS
        if len(self._connections) > HIGH_PEERS:
            spare = [peer for peer, connection in self._connections.items() if self._is_spare(peer, connection, now)]
            places = [(peer, self._place(peer)) for peer in spare if not self._connections[peer].we_dialled]
            useless = [peer for peer, _ in places if self._is_useless(self._connections[peer])]
            dropped = self._some(useless, num_above)
            places = [(peer, place) for peer, place in places if peer not in dropped]
            dropped += choose_to_drop(places, num_above - len(dropped), self._places(), self._chance)
            for peer in dropped:
                self._drop(peer, "there are more connections than are needed", if_spare=True)

    def _on_shuffle_due(self, now: Moment) -> None:
        self._timers.set((_Timer.SHUFFLE, None), now.s + self._about(SHUFFLE_EVERY_S))
        spare = [
            peer
            for peer, connection in self._connections.items()
            if connection.we_dialled and self._is_spare(peer, connection, now)
        ]
        if not self._serve or self._num_wanted(now) > 0 or not spare:
            return
        # The new one first: a peer that is surrounded by liars shall not lose an honest one for a dead address.
        for candidate in choose(self._candidates(now), 1, self._places(), self._chance):
            contact = self._contacts.setdefault(candidate.peer, _Contact(candidate.addresses))
            if self._dial(candidate.peer, contact, now):
                self._drop(self._chance.choice(spare), "another peer takes its place", if_spare=True)

    def _on_reunite_due(self, now: Moment) -> None:
        self._timers.set((_Timer.REUNITE, None), now.s + self._about(REUNITE_EVERY_S))
        if not self.has_met:
            self._timers.set_earlier((_Timer.BOOK, None), now.s)  # everybody is tried, as it should be already
            return
        known = {PeerId(e.peer): e.addresses for e in self.book.entries()}
        known.update({peer: each.addresses for peer, each in self._contacts.items() if each.is_named or each.near})
        lost = [
            peer
            for peer in known
            if peer not in self._connections
            and self.exchange.table.record_of(peer, now=now.unix_s) is None
            and (contact := self._contacts.get(peer, _Contact(()))).not_before_s <= now.s
            and not contact.is_dialling
        ]
        for peer in self._some(lost, 1):
            self._dial(peer, self._contacts.setdefault(peer, _Contact(known[peer])), now)

    def _candidates(self, now: Moment) -> list[Candidate]:
        found = []
        for held in self.exchange.table.held(now=now.unix_s):
            record, peer = held.record, PeerId(held.record.peer)
            if peer == self._own or peer in self._connections or not record.shards:
                continue
            contact = self._contacts.get(peer)
            if contact is not None and (contact.is_dialling or contact.not_before_s > now.s):
                continue
            addresses = _addresses_of(record)
            if addresses:
                found.append(Candidate(peer, addresses, any(serves(record, model_id) for model_id in self._models)))
        return found

    def _forget_contacts(self, now: Moment) -> None:
        """Those that are neither named nor resting nor in use: the table and the book know them."""
        for peer, contact in list(self._contacts.items()):
            is_kept = contact.is_named or bool(contact.near)
            if is_kept or contact.is_dialling or peer in self._connections or contact.not_before_s > now.s:
                continue
            if not contact.num_failures or now.s - contact.not_before_s > REDIAL_MAX_MET_S:
                del self._contacts[peer]

    def _is_spare(self, peer: PeerId, connection: _Connection, now: Moment) -> bool:
        return (
            peer not in self._protected
            and (not connection.num_asking or self._is_useless(connection))
            and now.s - connection.since_s >= SETTLED_AFTER_S
            and not (peer in self._contacts and self._contacts[peer].is_named)
        )

    @staticmethod
    def _is_useless(connection: _Connection) -> bool:
        """It has been asked and has not answered."""
        return not connection.is_sure and bool(connection.num_asking or connection.num_refused)

    def _place(self, peer: PeerId) -> str | None:
        connection = self._connections.get(peer)
        if connection is not None and connection.addresses:
            return place_of(connection.addresses)
        contact = self._contacts.get(peer)
        return None if contact is None else place_of(contact.ways)

    def _places(self) -> list[str | None]:
        dialling = [peer for peer, contact in self._contacts.items() if contact.is_dialling]
        return [self._place(peer) for peer in {*self._connections, *dialling}]

    def _remember(self, peer: PeerId, connection: _Connection, now: Moment) -> None:
        record = self.exchange.table.record_of(peer, now=now.unix_s)
        named = () if record is None else _addresses_of(record)
        self.book.met(peer, [*named, *connection.addresses], now=now.unix_s)

    def _on_save_due(self, now: Moment) -> None:
        self._timers.set((_Timer.SAVE, None), now.s + self._about(SAVE_EVERY_S))
        self.remember_all(now)
        if self.book.is_changed:
            self._commands.append(SaveBook())

    def remember_all(self, now: Moment) -> None:
        """Notes whom we are connected with now. Before the book is written at the end."""
        for peer, connection in self._connections.items():
            if connection.we_dialled and connection.has_met and not connection.is_suspect:
                self._remember(peer, connection, now)

    # Records.

    def _set_own(self, envelope: bytes, now: Moment) -> NodeRecord | Refusal:
        record = self.exchange.table.opened(envelope, now.unix_s)
        if isinstance(record, NodeRecord) and record.peer != self._own:
            return Refusal.WRONG_KEY
        return self.exchange.set_own(envelope, now=now.unix_s)

    def _push(self, now: Moment, *, is_last: bool = False) -> list[int]:
        """The own record goes to every connected peer, users among them: who waits for a node to become reachable hears
        of it at once. A peer that does not take it is the heartbeat's business; one that still owes an answer gets it
        when that has come, unless it is the last one."""
        tokens = []
        for peer, connection in self._connections.items():
            if connection.is_suspect:
                continue
            is_busy = connection.is_pushing or connection.num_asking >= MAX_ASKS_OF_ONE
            connection.owes_push = is_busy and not is_last
            if not connection.owes_push:
                tokens.append(self._ask(peer, None, 0, _Purpose.PUSH, now))
        return tokens

    def _is_node(self, peer: PeerId, now: Moment) -> bool:
        record = self.exchange.table.record_of(peer, now=now.unix_s)
        return record is not None and bool(record.shards)

    def _on_pull_due(self, now: Moment) -> None:
        every_s = self._pull_every_s if self._serve else PULL_USER_S
        self._timers.set((_Timer.PULL, None), now.s + self._about(every_s))
        willing = [peer for peer, c in self._connections.items() if c.has_met and not c.is_suspect and not c.num_asking]
        # Users know little. While it is not known who is one, everybody is asked.
        nodes = [peer for peer in willing if self._is_node(peer, now)] or willing
        for peer in self._some(nodes, 1):
            model_id, limit = self._what_to_pull(now)
            self._ask(peer, model_id, limit, _Purpose.PULL, now)

    def _what_to_pull(self, now: Moment) -> tuple[ModelId | None, int]:
        if not self._samples and self._serve:
            return None, MAX_RECORDS
        self._num_pulls += 1
        if not self._models or self._num_pulls % 2:
            return None, SAMPLE_RECORDS
        model_id = self._models[self._num_pulls // 2 % len(self._models)]
        num_nodes = self._estimates[model_id].value
        return model_id, MAX_RECORDS if num_nodes is not None and num_nodes <= MODEL_VIEW else SAMPLE_RECORDS

    def _adapt_pulls(self, num_news: int, now: Moment) -> None:
        if self._samples:
            self._pull_every_s = SAMPLE_EVERY_S
        elif num_news >= MANY_NEWS:
            self._pull_every_s = max(PULL_MIN_S, self._pull_every_s / 2)
            self._timers.set_earlier((_Timer.PULL, None), now.s + self._about(self._pull_every_s))
        else:
            self._pull_every_s = min(PULL_MAX_S, self._pull_every_s * 1.5)

    def _choose_regime(self) -> None:
        estimate = self._estimate.value
        if estimate is None:
            return
        if estimate > self._full_view and not self._samples:
            self._samples = True
            self._note(f"about {estimate:.0f} nodes: only some of them are kept in view")
        elif estimate < FULL_VIEW_AGAIN * self._full_view and self._samples:
            self._samples = False

    def _on_expire_due(self, now: Moment) -> None:
        self._timers.set((_Timer.EXPIRE, None), now.s + EXPIRE_EVERY_S)
        self.exchange.table.expire(now=now.unix_s)

    def _join_dht(self, peer: PeerId) -> None:
        if self._num_dht_joins + self._num_joining < DHT_JOINS:
            self._num_joining += 1
            self._commands.append(JoinDht(peer))

    def _publish(self, now: Moment) -> None:
        self._is_publication_wanted = True
        if not self.has_met or self.exchange.own_envelope is None:
            return
        publish = self._publication.next(now.s)
        if publish is not None:
            self._is_publication_wanted = False
            self._commands.append(publish)

    def _gossip_every_s(self, now: Moment) -> float:
        return max(GOSSIP_EVERY_S, self.num_nodes_estimated(now) * GOSSIP_COST_S / GOSSIP_CPU_SHARE)

    def _note_clock(self, asked: _Asked, answered_at: UnixS, now: Moment) -> None:
        """What the peer's clock showed in the middle of the exchange, as NTP reckons (RFC 5905, §8)."""
        self._offsets.pop(asked.peer, None)
        self._offsets[asked.peer] = answered_at - (asked.at.unix_s + now.unix_s) / 2
        if len(self._offsets) > MAX_OFFSETS:
            del self._offsets[next(iter(self._offsets))]
        offset_s = self.clock_offset_s
        is_suspect = offset_s is not None and abs(offset_s) > CLOCK_WARN_S
        if is_suspect and not self._is_clock_suspect:
            self._note(
                f"the clocks of {len(self._offsets)} peers differ from this machine's by {offset_s:+.0f} s in the "
                "middle: set the clock, or records will be refused",
                is_warning=True,
            )
        self._is_clock_suspect = is_suspect

    def _note(self, text: str, *, is_warning: bool = False) -> None:
        self._commands.append(Notice(is_warning, text))

    def _about(self, seconds: float) -> float:
        """A quarter more or less, so that peers that started together do not stay in step."""
        return seconds * self._chance.uniform(0.75, 1.25)

    def _some(self, peers: list[PeerId], at_most: int) -> list[PeerId]:
        return self._chance.sample(peers, max(0, min(at_most, len(peers))))


def _addresses_of(record: NodeRecord) -> tuple[str, ...]:
    """Its multiaddrs that lead to itself; what else stands in a record is not dialled."""
    return tuple(text for text in record.libp2p_addresses if text.endswith(f"/p2p/{record.peer}"))
