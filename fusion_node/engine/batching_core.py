"""Which rows of which sessions run in the next forward: continuous batching of decodes, trees and chunked prefill.

Guarantees: rows of one session are issued in order and each is done exactly once; a forward holds rows of one group
only and never more than ``max_rows``; a prefill slows the steps of *other* users who decode steadily by no more than
MAX_SLOWDOWN, as far as the learned time of a forward is right; users (not sessions) share what is left evenly; work of
BATCH priority hardly shows to the others; everything that waits is reached within a bounded number of forwards.

Assumes: one caller; ``now`` never goes back; batches that are in flight together run in the order in which they were
issued (devices in a pipeline), and are reported done in that order; every session is cancelled when it ends. A batch
that failed may have run in part: rows may be issued anew with other bounds, what they wrote before is overwritten, and
only the last result of a row counts. KV of a step with ``moves_kv`` is moved by the caller, once, before the step's
first piece runs. KV of a cancelled session is kept until its batches in flight have landed.

States of a row: waiting, in flight, done. A session whose batch failed waits until its later rows that are in flight
are back; their results do not count. Timers, in seconds of the monotonic clock: deadlines of works that have not
begun, the turn of BATCH work while the device is left idle for others, when a step that others are patient for is late,
and the end of a hold for a step that is expected at once.

Source: chunked prefill with a token budget after Sarathi-Serve (arXiv 2403.02310); fairness over measured service after
the Virtual Token Counter (arXiv 2401.00588), with start-time fair queueing's virtual time. Still ugly: every decision
looks at every session that waits, some hundred at most; a step that just misses a forward waits for the decodes in it
as well as for the prefill; and the file is long, because every rule looks at the same few queues.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from fusion_node.engine.forward_time_core import ForwardTime
from fusion_node.errors import LocalProtocolError

MAX_ROWS = 512
"""Rows of one forward. Beyond it nothing is won: the linears of every device at hand are compute-bound well before."""

MAX_WAITING_ROWS = 16_384
"""Rows that wait for the device, all sessions together: 256 MiB at hidden size 8,192 in fp16. A session with nothing
else waiting may add a step of MAX_DECODE_ROWS beyond it, or else who fills the queue would end everybody's answers."""

MAX_USER_WAITING_SHARE = 0.5
"""Of MAX_WAITING_ROWS, for one user: somebody who fills the queue does not keep all others out."""

MAX_DECODE_ROWS = 64
"""A step of more rows is a prefill, whatever the device: the widest speculation tree that the design allows for."""

MAX_WIDTH_RATIO = 2
"""Of the rows of one user's small steps to those of the least demanding user: beyond it they take turns in what doubles
the time of a forward, or else several users together could pass a prefill off as decodes. Trees of like shape differ by
less."""

MAX_LEARNED_EXTRA_SHARE = 0.25
"""What the steps of a forward may cost beside its rows, in multiples of them, for its time to say something of rows."""

MIN_CHUNK_ROWS = 8
"""Rows of a prefill chunk at least, where so many wait: below it the fixed cost of a forward is most of it."""

MAX_SLOWDOWN = 2.0
"""A decode's time from token to token beside somebody else's prefill, in multiples of the time without. Required."""

MAX_BATCH_SLOWDOWN = 1.1
"""The same beside work of BATCH priority: within what people take for noise."""

PLANNED_SHARE = 0.9
"""Of what MAX_SLOWDOWN and MAX_BATCH_SLOWDOWN allow: forwards take some per cent more or less than was predicted."""

MAX_HOLD_SHARE = 0.1
"""Of a forward: how long the device may stay idle for a step that is expected at once, and that would otherwise miss
this forward and wait for all of it."""

HOLD_SLACK_S = 0.0005
"""How much later than expected such a step may come: the event loop's own turns."""

RECENT_S = 1.0
"""A user whose last step was done longer ago is not between two tokens. Longer than any round trip on earth."""

LATE_GAPS = 3.0
"""After so many of its usual gaps a step is late, and nobody is asked to be patient for it: otherwise who stops, or
pretends to go on, keeps the prefills of all others short for RECENT_S. Networks double a round trip now and then."""

LATE_SLACK_S = 0.010
"""The same for gaps of next to nothing: what a garbage collection or another process takes."""

MIN_STEADY_STEPS = 3
"""Steps in a row that were not late until a session's next one is waited for. Fewer, and two steps that come together
would earn what takes a decoder all of its steps; a new session must show them as well, since it costs nothing."""

MAX_SKIPPED_FORWARDS = 3
"""Forwards in a row that may leave the next prefill out; then it gets MIN_CHUNK_ROWS whatever it costs others."""

MAX_SKIPPED_BATCH_FORWARDS = 15
"""The same for work of BATCH priority: one forward in sixteen is its own."""

MAX_BATCH_WAIT_S = 1.0
"""The same in time, for when the others leave the device idle between their tokens."""

MAX_SERVICE_LEAD_S = 10.0
"""Device seconds by which a user can be ahead of the least served: a grudge is forgotten, so nobody starves."""

MAX_SERVICE_CREDIT_S = 2.0
"""Device seconds that a user who asks for little can be owed: about a large forward of a slow device, so that who sends
a step only when the last has ended loses nothing by it, and who was idle for an hour cannot keep all others waiting."""

MAX_IDLE_USERS = 1024
"""Users without a session whose service is remembered. Keys cost nothing, so memory must be bounded."""

GROW_AFTER = 16
"""Forwards in a row without a failure until the limit of rows doubles again after out-of-memory."""

MAX_GROW_AFTER = 1024
"""The same after repeated failures: each doubles the wait, so that a true limit costs one forward in a thousand."""

MAX_GROUPS = 64
"""Layer ranges whose forward time is remembered: the first, which is the node's own, and those that ran last. Others
use the average of all."""

_MIN_COMPACTED = 64
"""Deadlines that may be kept although nothing waits for them."""

_GAP_RISE = 0.25
"""Weight of a longer gap between two steps in its estimate. A shorter one counts at once: haste is never punished."""


class Priority(enum.IntEnum):
    """What a user asks for in the plan of a session."""

    INTERACTIVE = 0
    BATCH = 1


class Overload(enum.StrEnum):
    """Why a step is not taken. The user can go elsewhere."""

    NODE = "node-overloaded"
    """MAX_WAITING_ROWS wait already, and the step is no decode of a session that waits for nothing else."""
    USER = "user-overloaded"
    """The user's own share of them waits already."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One step of one session, as it came.

    Attributes:
        user: whose step it is; fairness is between users.
        num_rows: at least 1.
        group: only works of one group (the same layers) can share a forward. A session stays in its group.
        extra_rows: what the step costs beside its rows, as rows: KV that it moves. It comes with the first row, cannot
            be split, and counts wherever rows are a measure of time or memory.
        is_tree: a speculation, whose user waits for it to go on: protected from others' prefills also when it is too
            wide to go before others' decodes.
        moves_kv: the step moves its session's KV first, so nothing earlier of the session may be in flight with it.
        arrived: seconds.
        deadline: when it is pointless to begin, in seconds.
        payload: the caller's.
    """

    session: Hashable
    user: str
    num_rows: int
    group: Hashable
    priority: Priority = Priority.INTERACTIVE
    extra_rows: int = 0
    is_tree: bool = False
    moves_kv: bool = False
    arrived: float = 0.0
    deadline: float | None = None
    payload: Any = None

    @property
    def cost_rows(self) -> int:
        return self.num_rows + self.extra_rows


class Piece(NamedTuple):
    """Rows ``[start, stop)`` of a work."""

    work: Work
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One forward: pieces of one group; those of one session are in its order."""

    pieces: tuple[Piece, ...]
    group: Hashable

    @property
    def num_rows(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a node allows.

    Attributes:
        max_rows: of one forward.
        max_waiting_rows: of all sessions together, but for a small step of each.
    """

    max_rows: int = MAX_ROWS
    max_waiting_rows: int = MAX_WAITING_ROWS


@dataclass(frozen=True, slots=True)
class BatchingStatus:
    """What a node can say of its load.

    Attributes:
        max_rows: of a forward at present: less than the limit after out-of-memory.
        decode_wait_s: estimated time that a new decode step waits before its forward begins.
        drain_s: estimated time for everything that waits now.
    """

    num_waiting_rows: int
    num_waiting_sessions: int
    num_in_flight_batches: int
    max_rows: int
    decode_wait_s: float
    drain_s: float


@dataclass(slots=True, eq=False)
class _Entry:
    work: Work
    number: int
    """In the order in which all works came."""
    bulk_before_s: float
    """What the core had spent on prefill when the step came."""
    issued: int = 0
    """Rows in flight or done."""
    done: int = 0
    took_turns: bool = False
    """Steps of others went before it, because it is wide."""

    @property
    def extra_rows(self) -> int:
        """What it costs beside its rows that wait."""
        return 0 if self.issued else self.work.extra_rows


@dataclass(slots=True, eq=False)
class _User:
    """What a user received at one priority; the two do not count against each other."""

    name: str
    priority: Priority
    service_s: float
    """Device seconds received, as virtual time."""
    num_sessions: int = 0
    own_prefills: deque[tuple[float, float]] = field(default_factory=deque)
    """What its own prefills took of single forwards lately, as pairs of when to forget it and seconds; the longest
    first, then those that outlive it."""

    def note_prefill(self, seconds: float, *, until: float) -> None:
        while self.own_prefills and self.own_prefills[-1][1] <= seconds:
            self.own_prefills.pop()
        self.own_prefills.append((until, seconds))

    def tolerated_s(self, now: float) -> float:
        """What it does to itself others may do too: otherwise a decode beside a prefill of one's own would keep the
        prefills of all others short."""
        while self.own_prefills and self.own_prefills[0][0] < now:
            self.own_prefills.popleft()
        return self.own_prefills[0][1] if self.own_prefills else 0.0


@dataclass(slots=True, eq=False)
class _Session:
    key: Hashable
    user: _User
    priority: Priority
    group: Hashable
    entries: deque[_Entry] = field(default_factory=deque)
    """Works that are not done, in order."""
    num_waiting: int = 0
    """Rows."""
    num_extra: int = 0
    """What those cost beside, as rows."""
    flights: list[int] = field(default_factory=list)
    """Batches in flight that hold rows of it, in order."""
    stale: set[int] = field(default_factory=set)
    """Those of them that were issued after one that failed."""
    is_suspect: bool = False
    """A batch with rows of it failed for no known reason: it runs alone until one succeeds."""
    is_gone: bool = False
    ended_at: float | None = None
    """When its last step was done."""
    num_prefills: int = 0
    """Large steps in a row up to then."""
    decode_rows: int = 1
    """Rows of its last small step."""
    gap_s: float | None = None
    """From a step's end to the next one's arrival, rather too short than too long; None before the first."""
    num_in_time: int = 0
    """Steps in a row that were not late."""

    @property
    def cost_rows(self) -> int:
        """What waits, as rows."""
        return self.num_waiting + self.num_extra

    def late_at(self) -> float:
        """When its next step is late; infinity while one is in flight."""
        if self.flights or self.ended_at is None:
            return math.inf
        return self.ended_at + min(RECENT_S, LATE_GAPS * (self.gap_s or 0.0) + LATE_SLACK_S)

    def note_arrival(self, arrived: float) -> None:
        """A step comes while none waits."""
        if self.ended_at is None:
            return
        gap_s = max(0.0, arrived - self.ended_at)
        is_in_time = gap_s <= RECENT_S if self.gap_s is None else arrived <= self.late_at()
        self.num_in_time = self.num_in_time + 1 if is_in_time else 0
        gap_s = min(gap_s, RECENT_S)
        before_s = gap_s if self.gap_s is None else self.gap_s
        self.gap_s = min(gap_s, before_s + _GAP_RISE * (gap_s - before_s))

    def head(self) -> _Entry:
        """The first work with rows that wait."""
        first = self.entries[0]
        if first.issued < first.work.num_rows:
            return first
        return next(entry for entry in self.entries if entry.issued < entry.work.num_rows)

    def can_go_on(self) -> bool:
        """Whether its next rows may be issued while others of it are in flight."""
        if not self.flights:
            return True
        head = self.head()
        return not (self.stale or self.is_suspect or (head.work.moves_kv and head.issued == 0))


@dataclass(slots=True)
class _Part:
    session: _Session
    entry: _Entry
    start: int
    stop: int

    @property
    def extra_rows(self) -> int:
        return 0 if self.start else self.entry.work.extra_rows

    @property
    def cost_rows(self) -> int:
        return self.stop - self.start + self.extra_rows


@dataclass(slots=True)
class _Flight:
    number: int
    parts: list[_Part]
    cost_rows: int
    decode_cost_rows: int
    predicted_s: float
    issued_at: float


@dataclass(slots=True)
class _Patience:
    """How many seconds a forward may spend on others before it slows somebody's decode too much."""

    least_s: float = math.inf
    user: str | None = None
    next_least_s: float = math.inf
    """The least among all other users."""

    def add(self, user: str, seconds: float) -> None:
        if user == self.user:
            self.least_s = min(self.least_s, seconds)
        elif seconds < self.least_s:
            self.least_s, self.next_least_s, self.user = seconds, self.least_s, user
        else:
            self.next_least_s = min(self.next_least_s, seconds)

    def towards(self, user: str) -> float:
        """Nobody needs to be protected from themselves."""
        return self.next_least_s if user == self.user else self.least_s


@dataclass(slots=True)
class _Draft:
    """A batch in the making."""

    group: Hashable
    time: ForwardTime
    room: int
    """Rows that can still be added, with what they cost beside."""
    parts: list[_Part] = field(default_factory=list)
    sessions: set[_Session] = field(default_factory=set)
    cost_rows: int = 0
    decode_cost_rows: int = 0
    num_decode_parts: int = 0
    """They come first."""

    @property
    def seconds(self) -> float:
        return self.time.predict(self.cost_rows) if self.parts else 0.0

    @property
    def others_s(self) -> float:
        """Seconds that whoever decodes in this forward waits for the rows of others, or for all of it."""
        return self.seconds - (self.time.predict(self.decode_cost_rows) if self.num_decode_parts else 0.0)

    def rows_within(self, seconds: float) -> int:
        """Rows that can still be added when the forward may take so much longer than now; the room left out."""
        if seconds == math.inf:
            return MAX_WAITING_ROWS
        if not self.time.is_known:
            return MIN_CHUNK_ROWS
        left_s = seconds - (0.0 if self.parts else self.time.fixed_s)
        if left_s <= 0.0:
            return 0
        most = MAX_WAITING_ROWS
        return most if left_s >= self.time.row_s * most else int(left_s / self.time.row_s + 1e-6)

    def fill(self, session: _Session, max_rows: int, *, is_due: bool = False) -> int:
        """Takes the session's next rows, and returns what they cost, as rows.

        What a step costs beside its rows has to fit as well, unless it is due or the first of the forward: it cannot
        be split, so it would never fit.
        """
        left = min(max_rows, self.room)
        is_free = is_due or not self.parts
        taken = 0
        for entry in session.entries:
            work = entry.work
            if entry.issued == work.num_rows:
                continue
            if work.moves_kv and entry.issued == 0 and (taken or session.flights):
                break
            room = left if is_free else left - entry.extra_rows
            if room <= 0:
                break
            part = _Part(session, entry, entry.issued, min(work.num_rows, entry.issued + room))
            self.parts.append(part)
            left -= part.cost_rows
            taken += part.cost_rows
            is_free = False
        if taken:
            self.sessions.add(session)
        self.room = max(0, self.room - taken)
        self.cost_rows += taken
        return taken


class BatchingCore:
    """Decides every forward of a node's device, or of its devices in a pipeline.

    Attributes:
        max_rows: of a forward at present: less than the limit after out-of-memory.
    """

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.limits = limits or BatchLimits()
        self.max_rows = self.limits.max_rows
        self._sessions: dict[Hashable, _Session] = {}
        self._waiting: dict[Hashable, _Session] = {}
        self._suspects: dict[Hashable, _Session] = {}
        self._recent: dict[Hashable, _Session] = {}
        """By the time when their last step was done."""
        self._users: dict[tuple[str, Priority], _User] = {}
        self._idle_users: dict[tuple[str, Priority], _User] = {}
        self._rows_of: dict[str, int] = {}
        """Waiting rows by user, and of all."""
        self._num_waiting = 0
        self._num_sessions_waiting = dict.fromkeys(Priority, 0)
        self._virtual_s = dict.fromkeys(Priority, 0.0)
        """The least service among those who wait, at its highest."""
        self._flights: dict[Batch, _Flight] = {}
        self._num_issued = 0
        self._deadlines: list[tuple[float, int]] = []
        """A heap, with the numbers of works. It outlives them, so it holds none of them."""
        self._not_begun: dict[int, _Session] = {}
        """By number: the works with a deadline that matters still."""
        self._num_added = 0
        self._times: dict[Hashable, ForwardTime] = {}
        """The first that was learned, then by when they were used last."""
        self._overall = ForwardTime()
        self._bulk_s = 0.0
        """Seconds that all forwards together took longer than their decodes alone would have."""
        self._idle_since = 0.0
        """When the last batch in flight landed."""
        self._held_until: float | None = None
        self._num_skipped = 0
        self._num_skipped_batch = 0
        self._batch_served_at = -math.inf
        self._num_good = 0
        self._grow_after = GROW_AFTER
        self._rows_before_failures: int | None = None

    # what comes in

    def add(self, work: Work, *, now: float) -> Overload | None:
        """Queues a step behind its session's others. Returns why not when too much waits; nothing is kept then.

        Raises:
            LocalProtocolError: the work has no rows, or its session had other layers, user or priority before.
        """
        if work.num_rows < 1 or work.extra_rows < 0:
            raise LocalProtocolError("a step has at least one row")
        found = self._sessions.get(work.session)
        is_small = work.cost_rows <= MAX_DECODE_ROWS and (found is None or not found.num_waiting)
        if self._num_waiting + work.cost_rows > self.limits.max_waiting_rows and not is_small:
            return Overload.NODE
        if self._rows_of.get(work.user, 0) + work.cost_rows > self.limits.max_waiting_rows * MAX_USER_WAITING_SHARE:
            return Overload.USER
        session = found or self._open(work)
        if session.group != work.group or (session.user.name, session.priority) != (work.user, work.priority):
            raise LocalProtocolError("a session keeps its layers, its user and its priority")
        if not session.entries:
            session.note_arrival(work.arrived)
        if not session.num_waiting:
            least_s = self._virtual_s[session.priority] - MAX_SERVICE_CREDIT_S
            session.user.service_s = max(session.user.service_s, least_s)
        if work.priority is Priority.BATCH and not self._waits(Priority.BATCH):
            self._batch_served_at, self._num_skipped_batch = now, 0
        self._num_added += 1
        entry = _Entry(work, self._num_added, self._bulk_s)
        session.entries.append(entry)
        self._count(session, work.num_rows, work.extra_rows)
        if work.deadline is not None:
            self._not_begun[entry.number] = session
            heapq.heappush(self._deadlines, (work.deadline, entry.number))
            self._compact_deadlines()
        return None

    def learn(self, group: Hashable, num_rows: int, seconds: float) -> None:
        """Takes a forward that was measured elsewhere, as when a node warms up. ``done`` does so by itself."""
        time = self._times.get(group)
        if time is None:
            if len(self._times) >= MAX_GROUPS:
                del self._times[next(islice(self._times, 1, None))]
            time = self._times[group] = ForwardTime()
        elif group != next(iter(self._times)):
            self._times[group] = self._times.pop(group)
        time.learn(num_rows, seconds)
        self._overall.learn(num_rows, seconds)

    def done(self, batch: Batch, *, seconds: float, now: float) -> list[Work]:
        """A forward has ended. Returns the works whose last row is done with it, in order per session.

        Args:
            seconds: that the devices spent on it, waiting left out.

        Raises:
            LocalProtocolError: the batch is not in flight, or an earlier one with the same session is.
        """
        flight = self._land(batch)
        if any(part.session.flights[0] != flight.number for part in flight.parts):
            raise LocalProtocolError("batches are done in the order in which they were issued")
        if flight.cost_rows - batch.num_rows <= MAX_LEARNED_EXTRA_SHARE * batch.num_rows:
            self.learn(batch.group, batch.num_rows, seconds)
        time = self._time(batch.group)
        decodes_s = time.predict(flight.decode_cost_rows) if flight.decode_cost_rows else 0.0
        self._bulk_s += max(0.0, seconds - decodes_s)
        self._succeed()
        max_decode_rows = self._max_decode_rows(batch.group)
        finished: list[Work] = []
        for part in flight.parts:
            session, entry = part.session, part.entry
            self._charge(session.user, (seconds - flight.predicted_s) * part.cost_rows / flight.cost_rows)
            if session.is_gone or flight.number in session.stale:
                continue
            session.is_suspect = False
            self._suspects.pop(session.key, None)
            entry.done = part.stop
            if entry.done == entry.work.num_rows:
                session.entries.popleft()
                finished.append(entry.work)
                self._note_end(session, entry.work, max_decode_rows, now)
        self._clear(flight)
        self._idle_since = now
        return finished

    def failed(self, batch: Batch, *, out_of_memory: bool, now: float) -> list[Work]:
        """A forward has failed; its rows wait again, in front. Returns what is lost: all works of the lost sessions.

        Out of memory: forwards become smaller; the session of a single row that does not fit is lost. Otherwise the
        sessions of the batch run alone once, so that a step which breaks the device's program takes nobody else's
        with it, and the session of a batch of one is lost.

        Raises:
            LocalProtocolError: the batch is not in flight.
        """
        flight = self._land(batch)
        sessions = list(dict.fromkeys(part.session for part in flight.parts))
        for part in flight.parts:
            self._charge(part.session.user, -flight.predicted_s * part.cost_rows / flight.cost_rows)
        if out_of_memory and batch.num_rows > 1:
            self._shrink(batch.num_rows)
        elif out_of_memory and self._rows_before_failures is not None:
            # That nothing fitted beside it was this session's doing.
            self.max_rows, self._grow_after = self._rows_before_failures, GROW_AFTER
            self._rows_before_failures = None
        is_lost = batch.num_rows == 1 if out_of_memory else len(sessions) == 1
        lost: list[Work] = []
        for session in sessions:
            if session.is_gone or flight.number in session.stale:
                continue
            if is_lost:
                lost += self._drop(session)
                continue
            if not out_of_memory:
                session.is_suspect = True
                self._suspects[session.key] = session
            self._rewind(session, next(part for part in flight.parts if part.session is session), flight.number)
        self._clear(flight)
        self._idle_since = now
        return lost

    def cancel(self, session: Hashable) -> list[Work]:
        """Forgets a session. Returns its works that were not done; rows in flight finish, and count for nothing."""
        found = self._sessions.get(session)
        return self._drop(found) if found is not None else []

    def not_begun(self, session: Hashable) -> list[Work]:
        """The last works of a session, in order: those of which no row is in flight or done."""
        found = self._sessions.get(session)
        return [] if found is None else [entry.work for entry in found.entries if not entry.issued]

    def replace(self, old: Work, new: Work) -> None:
        """A work of which no row is in flight or done becomes another one of its session, with no more rows.

        Raises:
            LocalProtocolError: it has begun, or the other is larger or none of that session.
        """
        session = self._sessions.get(old.session)
        entry = None if session is None else next((e for e in session.entries if e.work is old), None)
        if session is None or entry is None or entry.issued:
            raise LocalProtocolError("only a work that has not begun can be replaced")
        is_alike = (new.session, new.user, new.group, new.priority, new.deadline) == (
            old.session,
            old.user,
            old.group,
            old.priority,
            old.deadline,
        )
        if not is_alike or not 1 <= new.num_rows <= old.num_rows or new.extra_rows < 0:
            raise LocalProtocolError("a work is replaced by a smaller one of its session")
        entry.work = new
        self._count(session, new.num_rows - old.num_rows, new.extra_rows - old.extra_rows)

    def get_timer(self) -> float | None:
        """When to call ``handle_timer`` and then, if a device is idle, ``next_batch``."""
        while self._deadlines and self._deadlines[0][1] not in self._not_begun:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._held_until is not None:
            times.append(self._held_until)
        if self._waits(Priority.BATCH) and not self._flights:
            times.append(self._batch_served_at + MAX_BATCH_WAIT_S)
        return min(times, default=None)

    def handle_timer(self, *, now: float) -> list[Work]:
        """Drops the sessions with a work that was to begin by now and has not. Returns all that they had left."""
        late: list[Work] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            session = self._not_begun.get(heapq.heappop(self._deadlines)[1])
            if session is not None:
                late += self._drop(session)
        return late

    # what runs next

    def next_batch(self, *, now: float) -> Batch | None:
        """The next forward, to be issued now; None when nothing is to be done before the timer or the next event."""
        self._held_until = None
        if not self._waiting:
            return None
        draft = self._draft_suspect() or self._draft(now)
        return self._issue(draft, now) if draft is not None and draft.parts else None

    def _draft_suspect(self) -> _Draft | None:
        for session in self._suspects.values():
            if session.num_waiting and session.can_go_on():
                draft = _Draft(session.group, self._time(session.group), self.max_rows)
                draft.fill(session, self.max_rows)
                return draft
        return None

    def _draft(self, now: float) -> _Draft | None:
        self._forget_idle(now)
        decodes, prefills, background = self._candidates()
        trees = [session for session in prefills if _is_tree(session.head().work)]
        first = decodes or prefills or background
        if not first:
            return None
        due = prefills[0] if prefills and self._num_skipped >= MAX_SKIPPED_FORWARDS else None
        # Alone it would make those wait who are between two tokens; so it rides with them unless they are too slow.
        is_batch_due = now >= self._batch_served_at + MAX_BATCH_WAIT_S or (
            first is not background and self._num_skipped_batch >= MAX_SKIPPED_BATCH_FORWARDS
        )
        due_batch = background[0] if background and is_batch_due else None
        draft = self._new_draft((due or due_batch or first[0]).group)
        if due is None and due_batch is None and decodes and prefills and self._num_skipped:
            # A prefill of other layers cannot share the decodes' forward: it comes between two if they can wait.
            alone = self._new_draft(prefills[0].group)
            patience, _ = self._patience(decodes + trees, alone, now)
            if alone.rows_within(patience.towards(prefills[0].user.name)) >= MIN_CHUNK_ROWS:
                draft = alone
        is_owed = due is not None or due_batch is not None
        room = draft.room - min(MIN_CHUNK_ROWS, draft.room) if is_owed else draft.room
        self._fill_decodes(draft, decodes, room, now)
        # A decode that waits for its turn is not made later by a prefill in this forward than those in it are.
        taken = [session for session in decodes if session.group != draft.group or session in draft.sessions]
        patience, batch_s = self._patience(taken + trees, draft, now)
        within_s = MAX_HOLD_SHARE * draft.time.predict(max(draft.cost_rows, 1))
        if not draft.parts and prefills and prefills[0].group == draft.group:
            # Where all that others can wait for is less than a chunk, their forward can carry more than one between.
            few = draft.rows_within(patience.towards(prefills[0].user.name)) < min(MIN_CHUNK_ROWS, self.max_rows)
            within_s = draft.time.predict(MIN_CHUNK_ROWS) if few else within_s
        if not is_owed:
            self._held_until = self._expected_by(now, within_s)
            if self._held_until is not None:
                return None
        self._fill_prefills(draft, prefills, patience, due)
        self._fill_background(draft, background, batch_s, due_batch)
        if draft.parts:
            self._count_skipped(draft, prefills, background, now)
        elif not self._flights:
            late_at = min((session.late_at() for session in self._between_steps(now)), default=math.inf)
            self._held_until = late_at if late_at < math.inf else None
        return draft

    def _new_draft(self, group: Hashable) -> _Draft:
        return _Draft(group, self._time(group), self.max_rows)

    def _candidates(self) -> tuple[list[_Session], list[_Session], list[_Session]]:
        """The sessions that may go on: small steps in order of arrival, then prefills and BATCH, least served first."""
        decodes: list[_Session] = []
        prefills: list[_Session] = []
        background: list[_Session] = []
        small_rows: dict[str, int] = {}
        max_rows_of: dict[Hashable, int] = {}
        for session in self._waiting.values():
            if session.flights and not session.can_go_on():
                continue
            if session.priority is Priority.BATCH:
                background.append(session)
                continue
            name, group = session.user.name, session.group
            if group not in max_rows_of:
                max_rows_of[group] = self._max_decode_rows(group)
            num_rows = small_rows.get(name, 0) + session.cost_rows
            if num_rows <= max_rows_of[group] and session.head().work.cost_rows <= max_rows_of[group]:
                small_rows[name] = num_rows
                decodes.append(session)
            else:
                prefills.append(session)
        prefills.sort(key=_service)
        background.sort(key=_service)
        return decodes, prefills, background

    def _max_decode_rows(self, group: Hashable) -> int:
        """Rows that cost others as much as a forward's fixed part: more of them at once are not a small step."""
        time = self._time(group)
        if time.fixed_s >= MAX_DECODE_ROWS * time.row_s:
            return MAX_DECODE_ROWS if time.is_known else MIN_CHUNK_ROWS
        return max(MIN_CHUNK_ROWS, int(time.fixed_s / time.row_s))

    @staticmethod
    def _is_small(session: _Session, max_rows: int) -> bool:
        return session.cost_rows <= max_rows and session.head().work.cost_rows <= max_rows

    def _patience(self, steps: list[_Session], draft: _Draft, now: float) -> tuple[_Patience, float]:
        """How much longer the draft may become for prefills, and for BATCH work: in seconds of ``others_s``."""
        patience = _Patience()
        batch_s = math.inf
        share, batch_share = PLANNED_SHARE * (MAX_SLOWDOWN - 1), PLANNED_SHARE * (MAX_BATCH_SLOWDOWN - 1)
        together_s = draft.seconds
        for session in steps:
            entry = session.head()
            usual_s = (session.gap_s or 0.0) + (
                together_s if session in draft.sessions else self._time(session.group).predict(session.cost_rows)
            )
            waited_s = min(now - entry.work.arrived, self._bulk_s - entry.bulk_before_s)
            if entry.took_turns:
                # That it waited for without any prefill, too.
                usual_s += now - entry.work.arrived - waited_s
            wait_s = share * usual_s - waited_s
            if session.user.own_prefills:
                wait_s = max(wait_s, session.user.tolerated_s(now))
            patience.add(session.user.name, wait_s)
            if batch_share * usual_s - waited_s < batch_s:
                batch_s = batch_share * usual_s - waited_s
        for session in self._between_steps(now):
            usual_s = (session.gap_s or 0.0) + self._time(session.group).predict(session.decode_rows)
            patience.add(session.user.name, max(share * usual_s, session.user.tolerated_s(now)))
            batch_s = min(batch_s, batch_share * usual_s)
        return patience, batch_s

    def _expected_by(self, now: float, within_s: float) -> float | None:
        """When all those have come who are expected so soon after the last forward's end; None for nobody."""
        last: float | None = None
        if self._flights:
            return None
        for session in self._between_steps(now):
            if session.ended_at is None or session.gap_s is None or session.ended_at < self._idle_since:
                continue
            late_s = 1.5 * session.gap_s + HOLD_SLACK_S
            if late_s <= within_s and session.ended_at + late_s > now:
                last = max(last or 0.0, session.ended_at + late_s)
        return last

    def _between_steps(self, now: float) -> Iterator[_Session]:
        """Those who decode steadily and whose next step has not come and is not late."""
        for session in self._recent.values():
            is_steady = session.num_in_time >= MIN_STEADY_STEPS and session.num_prefills <= 1
            if is_steady and not session.num_waiting and now < session.late_at():
                yield session

    def _fill_decodes(self, draft: _Draft, decodes: list[_Session], room: int, now: float) -> None:
        here = [session for session in decodes if session.group == draft.group]
        budget = self._wide_rows(draft.group)
        num_rows = sum(session.cost_rows for session in here)
        if num_rows > room:
            here.sort(key=_service)
        if num_rows > budget:
            narrow, wide = self._split_wide(here, now)
            wide.sort(key=_service)
            here = narrow
            for session in wide:
                if session.cost_rows <= budget:
                    budget -= session.cost_rows
                    here.append(session)
                else:
                    session.head().took_turns = True
        for session in here:
            if draft.cost_rows >= room:
                break
            draft.fill(session, room - draft.cost_rows)
        draft.decode_cost_rows, draft.num_decode_parts = draft.cost_rows, len(draft.parts)

    def _wide_rows(self, group: Hashable) -> int:
        """Rows of wide steps that a forward may hold, all users together: those that double its time."""
        time = self._time(group)
        if time.fixed_s >= MAX_ROWS * time.row_s:
            return MAX_ROWS if time.is_known else MIN_CHUNK_ROWS
        return max(self._max_decode_rows(group), int(time.fixed_s / time.row_s))

    def _split_wide(self, steps: list[_Session], now: float) -> tuple[list[_Session], list[_Session]]:
        """Those with which a user does not ask for much more than the least demanding, and those with which it does.

        The former go together whatever their number, since taking turns would make all of them slower.
        """
        expected = (session.decode_rows for session in self._between_steps(now))
        narrowest = min(chain((session.cost_rows for session in steps), expected))
        rows_of: dict[str, int] = {}
        narrow: list[_Session] = []
        wide: list[_Session] = []
        for session in steps:
            rows = rows_of.get(session.user.name, 0) + session.cost_rows
            if rows > MAX_WIDTH_RATIO * narrowest:
                wide.append(session)
            else:
                rows_of[session.user.name] = rows
                narrow.append(session)
        return narrow, wide

    def _fill_prefills(
        self, draft: _Draft, prefills: list[_Session], patience: _Patience, due: _Session | None
    ) -> None:
        for session in prefills:
            if not draft.room:
                break
            if session.group != draft.group:
                continue
            rows = draft.rows_within(patience.towards(session.user.name) - draft.others_s)
            if session is due or not draft.parts:
                rows = max(rows, MIN_CHUNK_ROWS)
            draft.fill(session, rows, is_due=session is due)

    def _fill_background(
        self, draft: _Draft, background: list[_Session], patience_s: float, due: _Session | None
    ) -> None:
        here = [session for session in background if session.group == draft.group]
        is_alone = not draft.parts
        if not is_alone:
            patience_s = min(patience_s, draft.others_s + (MAX_BATCH_SLOWDOWN - 1) * draft.seconds)
        elif patience_s == math.inf:
            # Nobody else: small steps first, in half of the room at most, so that prefills get the other half.
            for session in here:
                small = self._is_small(session, self._max_decode_rows(session.group))
                if small and draft.cost_rows + session.cost_rows <= self.max_rows // 2:
                    draft.fill(session, session.cost_rows)
        for session in here:
            if not draft.room:
                break
            if session in draft.sessions:
                continue
            rows = draft.rows_within(patience_s - draft.others_s)
            if session is due:
                rows = max(rows, MIN_CHUNK_ROWS)
            extra = 0 if session is due else session.head().extra_rows
            if rows >= extra + min(MIN_CHUNK_ROWS, session.num_waiting, draft.room) or draft.parts:
                draft.fill(session, rows, is_due=session is due)

    def _count_skipped(self, draft: _Draft, prefills: list[_Session], background: list[_Session], now: float) -> None:
        if prefills:
            self._num_skipped = 0 if prefills[0] in draft.sessions else self._num_skipped + 1
        if background and any(session in draft.sessions for session in background):
            self._num_skipped_batch, self._batch_served_at = 0, now
        elif background:
            self._num_skipped_batch += 1

    def _issue(self, draft: _Draft, now: float) -> Batch:
        self._num_issued += 1
        pieces = tuple(Piece(part.entry.work, part.start, part.stop) for part in draft.parts)
        batch = Batch(pieces, draft.group)
        flight = _Flight(
            self._num_issued, draft.parts, draft.cost_rows, draft.decode_cost_rows, draft.seconds, issued_at=now
        )
        self._flights[batch] = flight
        row_s = flight.predicted_s / flight.cost_rows
        for part in draft.parts:
            part.entry.issued = part.stop
            self._not_begun.pop(part.entry.number, None)
            self._count(part.session, part.start - part.stop, -part.extra_rows)
            self._charge(part.session.user, row_s * part.cost_rows)
            flights = part.session.flights
            if not flights or flights[-1] != flight.number:
                flights.append(flight.number)
        self._note_tolerance(draft, now)
        for priority in Priority:
            if self._waits(priority):
                least = min(s.user.service_s for s in self._waiting.values() if s.priority is priority)
                self._virtual_s[priority] = max(self._virtual_s[priority], least)
        return batch

    def _note_tolerance(self, draft: _Draft, now: float) -> None:
        num_rows: dict[_User, int] = {}
        for part in draft.parts[draft.num_decode_parts :]:
            if not _is_tree(part.entry.work):
                user = part.session.user
                num_rows[user] = num_rows.get(user, 0) + part.cost_rows
        for user, rows in num_rows.items():
            user.note_prefill(draft.time.row_s * rows, until=now + draft.seconds + RECENT_S)

    # what is known

    @property
    def num_users(self) -> int:
        """Users that are remembered, with sessions or without."""
        return len(self._users)

    def num_waiting_rows(self, session: Hashable) -> int:
        """Rows of a session that are not in flight yet, with what they cost beside."""
        found = self._sessions.get(session)
        return found.cost_rows if found is not None else 0

    def row_price_s(self, group: Hashable) -> float:
        """By how much one more row would delay those who wait now, and whoever brings it, together; 0: not known."""
        return self._time(group).row_s * (1 + len(self._waiting))

    def status(self, *, now: float) -> BatchingStatus:
        """The load, for the node's record and its counters."""
        flights = list(self._flights.values())
        in_flight_s = sum(flight.predicted_s for flight in flights)
        in_flight_s = max(0.0, in_flight_s - (now - flights[0].issued_at)) if flights else 0.0
        small = [s for s in self._waiting.values() if self._is_small(s, self._max_decode_rows(s.group))]
        num_full = sum(session.cost_rows for session in small) // self.max_rows
        num_forwards = math.ceil(self._num_waiting / self.max_rows)
        rows_s = sum(self._time(session.group).row_s * session.cost_rows for session in self._waiting.values())
        return BatchingStatus(
            num_waiting_rows=self._num_waiting,
            num_waiting_sessions=len(self._waiting),
            num_in_flight_batches=len(flights),
            max_rows=self.max_rows,
            decode_wait_s=in_flight_s + num_full * self._overall.predict(self.max_rows),
            drain_s=in_flight_s + rows_s + num_forwards * self._overall.fixed_s,
        )

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant is broken. For tests and diagnosis."""
        in_flight = Counter(
            (part.entry, row)
            for f in self._flights.values()
            for part in f.parts
            for row in range(part.start, part.stop)
            if not part.session.is_gone and f.number not in part.session.stale
        )
        if any(count > 1 for count in in_flight.values()):
            raise ValueError("a row is in flight twice")
        for session in self._sessions.values():
            waiting, extra = 0, 0
            for entry in session.entries:
                if waiting and entry.issued:
                    raise ValueError("a later row was issued before an earlier one")
                if not 0 <= entry.done <= entry.issued <= entry.work.num_rows or entry.done == entry.work.num_rows:
                    raise ValueError("the rows of a work do not add up")
                if any((entry, row) not in in_flight for row in range(entry.done, entry.issued)):
                    raise ValueError("a row is neither waiting nor in flight nor done")
                waiting += entry.work.num_rows - entry.issued
                extra += entry.extra_rows
            if waiting != session.num_waiting or bool(waiting) != (session.key in self._waiting):
                raise ValueError("the waiting rows of a session do not add up")
            if extra != session.num_extra:
                raise ValueError("what the waiting rows cost beside does not add up")
            if session.flights != sorted(session.flights) or not session.stale <= set(session.flights):
                raise ValueError("the batches of a session do not add up")
        rows_of: Counter[str] = Counter()
        for session in self._sessions.values():
            rows_of[session.user.name] += session.cost_rows
        if +rows_of != self._rows_of or rows_of.total() != self._num_waiting:
            raise ValueError("the waiting rows do not add up")
        if not 1 <= self.max_rows <= self.limits.max_rows:
            raise ValueError("the limit of rows is out of bounds")
        sessions_of = Counter((s.user.name, s.priority) for s in self._sessions.values())
        if any(user.num_sessions != sessions_of[key] for key, user in self._users.items()):
            raise ValueError("the sessions of a user do not add up")
        if any(
            self._sessions.get(s.key) is not s
            for held in (self._waiting, self._recent, self._suspects)
            for s in held.values()
        ):
            raise ValueError("a session that is gone is still held")
        numbers = {entry.number: s for s in self._sessions.values() for entry in s.entries if not entry.done}
        if any(numbers.get(number) is not session for number, session in self._not_begun.items()):
            raise ValueError("a deadline is kept for a work that has begun or is gone")

    # small things

    def _open(self, work: Work) -> _Session:
        key = (work.user, work.priority)
        user = self._users.get(key)
        if user is None:
            user = self._users[key] = _User(*key, self._virtual_s[work.priority])
        self._idle_users.pop(key, None)
        user.num_sessions += 1
        session = self._sessions[work.session] = _Session(work.session, user, work.priority, work.group)
        return session

    def _drop(self, session: _Session) -> list[Work]:
        """Forgets a session, and returns its works."""
        self._count(session, -session.num_waiting, -session.num_extra)
        session.is_gone = True
        del self._sessions[session.key]
        self._suspects.pop(session.key, None)
        self._recent.pop(session.key, None)
        user = session.user
        user.num_sessions -= 1
        if not user.num_sessions:
            self._idle_users[user.name, user.priority] = user
            if user.service_s <= self._virtual_s[user.priority]:
                self._forget_user(user)
            elif len(self._idle_users) > MAX_IDLE_USERS:
                self._forget_user(next(iter(self._idle_users.values())))
        works = [entry.work for entry in session.entries]
        for entry in session.entries:
            self._not_begun.pop(entry.number, None)
        # Batches in flight hold the session, which may have brought far more than what is in them.
        session.entries.clear()
        return works

    def _forget_user(self, user: _User) -> None:
        del self._idle_users[user.name, user.priority]
        del self._users[user.name, user.priority]

    def _forget_idle(self, now: float) -> None:
        """Forgets who is no longer between two steps."""
        while self._recent:
            session = next(iter(self._recent.values()))
            if session.ended_at is not None and session.ended_at >= now - RECENT_S:
                break
            del self._recent[session.key]

    def _note_end(self, session: _Session, work: Work, max_decode_rows: int, now: float) -> None:
        if work.cost_rows <= max_decode_rows or _is_tree(work):
            session.num_prefills, session.decode_rows = 0, work.cost_rows
        else:
            session.num_prefills += 1
        session.ended_at = now
        self._recent.pop(session.key, None)
        if work.priority is Priority.INTERACTIVE:
            self._recent[session.key] = session

    def _count(self, session: _Session, num_rows: int, num_extra: int) -> None:
        """So many more rows of a session wait, and cost so much beside."""
        session.num_waiting += num_rows
        session.num_extra += num_extra
        self._num_waiting += num_rows + num_extra
        name = session.user.name
        left = self._rows_of.get(name, 0) + num_rows + num_extra
        if left:
            self._rows_of[name] = left
        else:
            self._rows_of.pop(name, None)
        if not session.num_waiting:
            if self._waiting.pop(session.key, None) is not None:
                self._num_sessions_waiting[session.priority] -= 1
        elif session.key not in self._waiting:
            self._waiting[session.key] = session
            self._num_sessions_waiting[session.priority] += 1

    def _waits(self, priority: Priority) -> bool:
        return self._num_sessions_waiting[priority] > 0

    def _time(self, group: Hashable) -> ForwardTime:
        return self._times.get(group, self._overall)

    def _charge(self, user: _User, seconds: float) -> None:
        most = self._virtual_s[user.priority] + MAX_SERVICE_LEAD_S
        user.service_s = min(user.service_s + seconds, most)

    def _compact_deadlines(self) -> None:
        if len(self._deadlines) > 2 * len(self._not_begun) + _MIN_COMPACTED:
            self._deadlines = [each for each in self._deadlines if each[1] in self._not_begun]
            heapq.heapify(self._deadlines)

    def _land(self, batch: Batch) -> _Flight:
        flight = self._flights.pop(batch, None)
        if flight is None:
            raise LocalProtocolError("the batch is not in flight")
        return flight

    def _clear(self, flight: _Flight) -> None:
        for session in dict.fromkeys(part.session for part in flight.parts):
            session.flights.remove(flight.number)
            session.stale.discard(flight.number)

    def _rewind(self, session: _Session, first: _Part, number: int) -> None:
        """The session's rows from a part of a failed batch on wait again."""
        rows, extra = first.entry.issued - first.start, first.extra_rows
        first.entry.issued = first.start
        is_later = False
        for entry in session.entries:
            if is_later and entry.issued:
                rows += entry.issued
                extra += entry.work.extra_rows
                entry.issued = 0
            is_later = is_later or entry is first.entry
        session.stale.update(flight for flight in session.flights if flight > number)
        self._count(session, rows, extra)

    def _shrink(self, num_rows: int) -> None:
        if self._rows_before_failures is None:
            self._rows_before_failures = self.max_rows
        self.max_rows = max(1, min(self.max_rows, num_rows) // 2)
        self._num_good = 0
        self._grow_after = min(2 * self._grow_after, MAX_GROW_AFTER)

    def _succeed(self) -> None:
        self._rows_before_failures = None
        self._num_good += 1
        if self.max_rows < self.limits.max_rows and self._num_good >= self._grow_after:
            self.max_rows = min(2 * self.max_rows, self.limits.max_rows)
            self._num_good = 0
            if self.max_rows == self.limits.max_rows:
                self._grow_after = GROW_AFTER


def _is_tree(work: Work) -> bool:
    return work.is_tree and max(work.num_rows, work.extra_rows) <= MAX_DECODE_ROWS


def _service(session: _Session) -> float:
    return session.user.service_s
