"""How an answer survives its stages: who is at fault, what is done about it, and what has to be computed again.

Four parts that know nothing of one another, all plain values, in one file of above 600 lines because each is only
understood beside the others:

* ``replay_orders`` says which rows have to be handed on by whom, so that after a stage was replaced every stage has
  applied every entry of the session's log, in order and exactly once, and the user has every result. ``Orders`` sends
  them, and whatever follows, a few at a time.
* ``StepTimes`` says how long a step may take before somebody is asked about it: TCP's retransmission timeout, which is
  the smoothed time and four deviations (RFC 6298), never below MIN_TIMEOUT_S.
* ``Watch`` turns silence and accusations into verdicts. Silence is a reason to ask every stage; who does not answer is
  silent. A stage's word about another is a reason to ask both; if both answer, their link is at fault. A stage that
  answers is alive, and is given up only when nothing has moved for long beyond what it says that steps must wait.
  scheduler.progress_core finds sooner who it is that has a step for too long.
* ``RepairPolicy`` counts attempts and says whom to avoid: a peer or a pair of peers is avoided for AVOID_S, twice as
  long each time that it fails again while it is remembered. Who fails with different partners, be it as accused or as
  accuser, is avoided for the rest of the answer: one of a pair is at fault, and it is in all of them.

Guarantees: a verdict rests on something that this user has seen itself. Time in which this program did not run (its
timers come late) is held against nobody. Attempts without progress in between are bounded.

Assumes: entries are chains that commit themselves, so an entry is a range of positions; stages are numbered in the
order of the plan; each takes the orders that it is given in the order in which they were given.

Timers: of Watch, in seconds of the monotonic clock. Source: docs/protocol-data-plane.md, "Repair". Still ugly: a stage
that answers and computes nothing while it claims a long queue is believed for MAX_CLAIMED_WAIT_S.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fusion_node.types import MonotonicS, PeerId

CHUNK_ROWS = 256
"""Rows of an order: as of a chunk of a prompt, so that other sessions' steps get their turn in between."""

CHUNK_BYTES = 4 * 2**20
"""Of an order, where 256 rows are more: a frame holds 32 MiB, and a line of 100 Mbit/s takes a third of a second."""

ORDERS_IN_FLIGHT = 4
"""Per source. Two keep a stage busy; with four a link of 100 ms still does at 50 ms per chunk."""

MIN_TIMEOUT_S = 0.5
"""Below, a busy machine's own pauses look like silence. Asking costs a message per stage."""

FIRST_TIMEOUT_S = 1.0
FIRST_TIMEOUT_PER_ROW_S = 0.02
"""Before anything was measured: as RFC 6298 has it, and for a prompt what a slow CPU takes for a row."""

MAX_TIMEOUT_S = 8.0
MAX_BACK_OFF = 4
"""Doublings, of a timeout that has passed while every stage answered."""

MIN_PROBE_S = 0.5
PROBE_ROUND_TRIPS = 4
"""A stage is silent when it has not answered within so many of its round trips."""

MAX_BACKLOG_S = 30.0
"""Of our own sending, which a question has to wait for. A prompt of 4,096 rows of 16 KiB takes as long on 18 Mbit/s."""

BACKLOG_MARGIN = 1.5
"""Rows that are on a line may take so many times as long as their sender says: others' come between them."""

STUCK_S = 10.0
"""As long as a connection between two nodes can be lost before both of them know (docs/protocol-data-plane.md)."""

MEASURED_STUCK_S = 3.0
"""The same once steps of the session were measured: several times what a busy machine pauses for."""

STUCK_TIMES = 4
"""So often what a step takes at most on its whole way may pass at one place."""

BEST_STUCK_TIMES = 16
"""Of the shortest that steps of the session took on the average, at most: what they take now is in the hands of who is
judged by it, and a pause of this program looks like a slow step."""

MAX_GIVEN_UP = 4
"""Times that the patience is doubled to, by steps that were given up. Who is at fault is more likely there still, than
that all of these nodes are slower than was thought."""

MAX_STUCK_S = 240.0
"""However slow a route has been: 256 rows at a second each."""

MAX_CLAIMED_WAIT_S = 20.0
"""Of a queue by a node's own word: after that it gives a step up itself."""

LATE_S = 0.1
"""A timer that comes later says that this program did not run. An event loop under load is late by 10 to 50 ms."""

MAX_POSTPONED = 3
"""Times in a row. What has come by then was read: a program that is always late has to judge at some time."""

AVOID_S = 30.0
MAX_AVOID_S = 240.0
MAX_PARTNERS = 2
"""With which a peer fails before it is doubted. A well one that is next to two bad ones is doubted as well: that costs
its replacement, and one more try of a bad one costs a repair."""

MAX_REPAIRS = 8
"""Without a result in between."""
MAX_PATCHES = 4
"""Of them, before everything is computed again elsewhere: what fails so often fails for a reason that nobody sees."""
MAX_OPEN_ATTEMPTS = 5
"""Routes tried for an answer that has nothing yet. The only node of its layers that freezes and thaws costs three: for
its silence, for its link, and for the new link that ends the session on its neighbours."""


# what has to be computed again


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of a session's log: positions that are appended."""

    sequence: int
    first_position: int
    num_positions: int
    want_last: bool

    @property
    def stop(self) -> int:
        return self.first_position + self.num_positions


@dataclass(frozen=True, slots=True)
class StageHas:
    """What a stage has of a session, by its own word.

    Attributes:
        next_sequence: entries below it were applied.
        num_positions: that are committed, those of a reused prefix included.
        retained_positions: below this, rows can be handed on again.
    """

    next_sequence: int = 0
    num_positions: int = 0
    retained_positions: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """Rows of ``[first_position, stop)`` are to go from ``source`` through all stages up to ``last``.

    Attributes:
        source: the stage that hands them on; None: the user makes them.
        covers: entries from ``sequence`` on that it stands for; 0 for positions of a reused prefix.
        stop_stage: ``last`` when it ends there; None: the last stage answers the user.
        is_paced: whoever made it bounds how many are on their way.
    """

    source: int | None
    last: int
    sequence: int
    covers: int
    first_position: int
    num_positions: int
    want_last: bool
    stop_stage: int | None
    is_paced: bool = False

    @property
    def first(self) -> int:
        """The first stage that computes it."""
        return 0 if self.source is None else self.source + 1

    @property
    def stop(self) -> int:
        return self.first_position + self.num_positions


@dataclass(frozen=True, slots=True)
class NotRetained:
    """No orders: the stage has not the rows of this position any more."""

    stage: int
    position: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """What cannot be divided: an entry, or some positions of a prefix, and who lacks it."""

    sequence: int
    covers: int
    first_position: int
    num_positions: int
    want_last: bool
    lacking: tuple[int, ...]
    user_lacks: bool


def rows_per_order(row_bytes: int) -> int:
    """``chunk_rows`` for rows of so many bytes."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))


def replay_orders(
    entries: Sequence[LogEntry],
    stages: Sequence[StageHas],
    *,
    num_results: int,
    prefix_positions: int = 0,
    chunk_rows: int = CHUNK_ROWS,
) -> list[Order] | NotRetained:
    """What has to be handed on so that every stage has every entry, and the user every result.

    Args:
        entries: the whole log, from sequence 0 on; what was never sent as well.
        stages: of the present plan, in order.
        num_results: results that the user has, the first ones.
        prefix_positions: that come before the first entry and belong to none.
        chunk_rows: of one order; an entry that is longer is not divided.

    Returns:
        Orders by position; those for the same positions have no stage in common.
    """
    pieces = _prefix_pieces(stages, prefix_positions, chunk_rows)
    pieces += [
        _Piece(
            entry.sequence,
            1,
            entry.first_position,
            entry.num_positions,
            entry.want_last,
            tuple(index for index, has in enumerate(stages) if has.next_sequence <= entry.sequence),
            entry.sequence >= num_results,
        )
        for entry in entries
    ]
    orders: list[Order] = []
    growing: dict[tuple[int | None, int], int] = {}
    """Where in ``orders`` the order is that the next piece of the same run may be added to."""
    for piece in pieces:
        runs = _runs(piece.lacking)
        keys = {(first - 1 if first else None, last) for first, last in runs}
        growing = {key: at for key, at in growing.items() if key in keys}
        for first, last in runs:
            source = first - 1 if first else None
            if source is not None and stages[source].retained_positions < piece.first_position + piece.num_positions:
                return NotRetained(source, max(stages[source].retained_positions, piece.first_position))
            answers = last == len(stages) - 1 and piece.user_lacks and piece.covers == 1
            at = growing.get((source, last))
            if at is not None and not answers and _can_grow(orders[at], piece, chunk_rows):
                orders[at] = _grown(orders[at], piece)
                continue
            order = Order(
                source=source,
                last=last,
                sequence=piece.sequence,
                covers=piece.covers,
                first_position=piece.first_position,
                num_positions=piece.num_positions,
                want_last=answers and piece.want_last,
                stop_stage=None if answers else last,
            )
            growing.pop((source, last), None)
            if not answers:
                growing[source, last] = len(orders)
            orders.append(order)
    return orders


def _prefix_pieces(stages: Sequence[StageHas], prefix_positions: int, chunk_rows: int) -> list[_Piece]:
    """A replay that was broken off has left some stages with a part of the prefix, in chunks of whatever size."""
    cuts = {0, prefix_positions, *range(0, prefix_positions, chunk_rows)}
    cuts |= {has.num_positions for has in stages if has.num_positions < prefix_positions}
    ordered = sorted(cuts)
    pieces = []
    for start, stop in itertools.pairwise(ordered):
        lacking = tuple(index for index, has in enumerate(stages) if has.num_positions <= start)
        pieces.append(_Piece(0, 0, start, stop - start, False, lacking, False))
    return pieces


def _runs(stages: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending stages as first and last of the longest stretches without a gap."""
    runs: list[tuple[int, int]] = []
    for stage in stages:
        if runs and runs[-1][1] == stage - 1:
            runs[-1] = (runs[-1][0], stage)
        else:
            runs.append((stage, stage))
    return runs


def _can_grow(order: Order, piece: _Piece, chunk_rows: int) -> bool:
    is_alike = (order.covers == 0) == (piece.covers == 0)
    return is_alike and order.stop == piece.first_position and order.num_positions + piece.num_positions <= chunk_rows


def _grown(order: Order, piece: _Piece) -> Order:
    return Order(
        source=order.source,
        last=order.last,
        sequence=order.sequence,
        covers=order.covers + piece.covers,
        first_position=order.first_position,
        num_positions=order.num_positions + piece.num_positions,
        want_last=False,
        stop_stage=order.stop_stage,
    )


class Orders:
    """The orders of one epoch, sent a few at a time.

    Guarantees: orders of one source are sent in order. A stage that gets rows from two sources one after the other, as
    it does where some of them had to be retained and some not, has those of the first before the second may send.

    Args:
        user_in_flight: orders of the user that may be on their way.
    """

    def __init__(self, orders: Sequence[Order], *, user_in_flight: int = ORDERS_IN_FLIGHT) -> None:
        self._user_in_flight = user_in_flight
        self._waiting: list[Order] = list(orders)
        self._sent: list[Order] = []
        self._stops: dict[int, int] = {}
        """For each stage the end of the last order that was sent and stops there."""

    @property
    def in_flight(self) -> tuple[Order, ...]:
        """Sent and not over."""
        return tuple(self._sent)

    @property
    def is_over(self) -> bool:
        """Nothing waits and nothing is on its way."""
        return not self._waiting and not self._sent

    def add(self, order: Order) -> None:
        """One more, behind all others."""
        self._waiting.append(order)

    def next_ready(self) -> list[Order]:
        """Those that are to be sent now, in order."""
        ready: list[Order] = []
        held: list[Order] = []
        for order in self._waiting:
            if self._may_go(order, held):
                self._sent.append(order)
                ready.append(order)
                if order.stop_stage is not None:
                    self._stops[order.stop_stage] = order.sequence + order.covers
            else:
                held.append(order)
        self._waiting = held
        return ready

    def acknowledged(self, stage: int, num_positions: int) -> bool:
        """A stage at which orders end has so many positions. Whether an order is over by that."""
        num_before = len(self._sent)
        self._sent = [o for o in self._sent if o.stop_stage != stage or o.stop > num_positions]
        return len(self._sent) < num_before

    def stops_before(self, stage: int) -> int:
        """Entries from this on were not ordered to stop at the stage."""
        return self._stops.get(stage, 0)

    def answered(self, sequence: int) -> None:
        """The result of an entry is there."""
        self._sent = [o for o in self._sent if o.stop_stage is not None or o.sequence != sequence]

    def _may_go(self, order: Order, held: Sequence[Order]) -> bool:
        for earlier in held:
            if earlier.source == order.source or _meet(earlier, order):
                return False
        for earlier in self._sent:
            if earlier.source != order.source and _meet(earlier, order):
                return False
        if order.is_paced:
            return True
        limit = self._user_in_flight if order.source is None else ORDERS_IN_FLIGHT
        return sum(sent.source == order.source for sent in self._sent) < limit


def _meet(one: Order, other: Order) -> bool:
    """Whether a stage computes both."""
    return one.first <= other.last and other.first <= one.last


# how long a step may take


@dataclass(slots=True)
class _Estimate:
    """Smoothed value and mean deviation, RFC 6298 section 2."""

    smoothed: float | None = None
    deviation: float = 0.0

    def note(self, value: float) -> float:
        if self.smoothed is None:
            self.smoothed, self.deviation = value, value / 2
        else:
            self.deviation += (abs(value - self.smoothed) - self.deviation) / 4
            self.smoothed += (value - self.smoothed) / 8
        return self.smoothed

    @property
    def bound(self) -> float | None:
        return None if self.smoothed is None else self.smoothed + 4 * self.deviation


_FEW_ROWS = 16
"""A forward of so many rows takes about as long as one of a single row."""


class StepTimes:
    """How long steps of a session take, from sending to their result.

    Args:
        expected_s: of a decode step, by the cost model; None when it has no opinion.
        expected_row_s: of each row of a chunk of the prompt.
    """

    def __init__(self, expected_s: float | None = None, expected_row_s: float | None = None) -> None:
        self._few = _Estimate()
        self._many = _Estimate()
        """Seconds per row."""
        self._best_s: float | None = None
        """The least that the smoothed time of a few rows has been."""
        self._expected_s = expected_s
        self._expected_row_s = expected_row_s
        self._patience = 1
        """Doubled each time that it was not enough, up to MAX_GIVEN_UP, until a step comes back."""

    @property
    def decode_s(self) -> float | None:
        """Of a step of few rows, smoothed."""
        return self._few.smoothed

    def note(self, num_rows: int, seconds: float) -> None:
        """A step came back."""
        self.came_back()
        if num_rows <= _FEW_ROWS:
            self._best_s = min(self._few.note(seconds), self._best_s or math.inf)
        else:
            self._many.note(seconds / num_rows)

    def timeout_s(self, num_rows: int) -> float:
        """For a step of so many rows."""
        return min(max(self._bound_s(num_rows), MIN_TIMEOUT_S), MAX_TIMEOUT_S)

    def patience_s(self, num_rows: int, *, is_proven: bool) -> float:
        """How long a step of so many rows may be at one place, whoever it is at saying that it is alive.

        Args:
            is_proven: the stages are those whose steps were measured. Others may be as slow as is thought of the
                slowest.
        """
        bound_s = self._bound_s(num_rows)
        is_measured = (self._few if num_rows <= _FEW_ROWS else self._many).bound is not None
        if not is_proven:
            bound_s = max(bound_s, self._unmeasured_s(num_rows))
        least_s = MEASURED_STUCK_S if is_measured and is_proven else STUCK_S
        seconds = max(STUCK_TIMES * bound_s, least_s)
        if is_proven and num_rows <= _FEW_ROWS and self._best_s is not None:
            seconds = min(seconds, max(STUCK_S, BEST_STUCK_TIMES * self._best_s))
        return min(seconds * self._patience, MAX_STUCK_S)

    def gave_up(self) -> None:
        """A stage was replaced because a step was too long at it: if that was wrong, the next one has more time."""
        self._patience = min(2 * self._patience, MAX_GIVEN_UP)

    def came_back(self) -> None:
        """A step was not too long, however long it was."""
        self._patience = 1

    def _bound_s(self, num_rows: int) -> float:
        few_s, per_row_s = self._few.bound, self._many.bound
        if num_rows > _FEW_ROWS and per_row_s is not None:
            return num_rows * per_row_s
        return self._unmeasured_s(num_rows) if num_rows > _FEW_ROWS or few_s is None else few_s

    def _unmeasured_s(self, num_rows: int) -> float:
        few_s = self._few.bound
        if few_s is None:
            few_s = max(FIRST_TIMEOUT_S, 4 * (self._expected_s or 0.0))
        if num_rows <= _FEW_ROWS:
            return few_s
        row_s = FIRST_TIMEOUT_PER_ROW_S if self._expected_row_s is None else self._expected_row_s
        return few_s + num_rows * row_s


# who is at fault


class Cause(enum.StrEnum):
    """Why a stage cannot go on."""

    LOST = "lost"
    """Our link to it is gone."""
    SILENT = "silent"
    """It does not answer. It may come back, so what it sends meanwhile counts."""
    STUCK = "stuck"
    """It answers, and computes nothing."""
    REFUSED = "refused"
    """It says so."""
    GARBAGE = "garbage"
    """It said something that breaks the protocol, or sent rows that cannot be used."""
    PAIR = "pair"
    """It and the stage before it are well, and cannot hand rows over."""
    DRAINING = "draining"
    """It is about to leave, and serves until then."""
    REVOKED = "revoked"
    """The user has withdrawn what it may hold."""

    @property
    def is_soft(self) -> bool:
        """The session goes on for now."""
        return self in (Cause.SILENT, Cause.DRAINING)


@dataclass(frozen=True, slots=True)
class Verdict:
    """This stage is to be replaced.

    Attributes:
        accuser: of a PAIR, the stage that cannot reach it, or that it cannot reach.
    """

    stage: int
    cause: Cause
    accuser: int | None = None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A stage that was silent has answered."""

    stage: int


class Watch:
    """Whom to ask, and what to make of the answers. One per epoch of a session.

    Args:
        round_trips_s: of the user to each stage; 0 where it is not known.
        backlog_s: how long what was sent to a stage before takes to get there: a question comes after it.
    """

    def __init__(self, round_trips_s: Sequence[float], backlog_s: Callable[[int], float] = lambda stage: 0.0) -> None:
        self._backlog_s = backlog_s
        self._round_trips = [_Estimate() for _ in round_trips_s]
        for estimate, seconds in zip(self._round_trips, round_trips_s, strict=True):
            if seconds > 0:
                estimate.note(seconds)
        self._timeout_s: float | None = None
        """Of what is awaited; None: nothing is."""
        self._patience_s = STUCK_S
        self._due = MonotonicS(0.0)
        """When everybody is asked."""
        self._moved_at = MonotonicS(0.0)
        self._num_rounds = 0
        self._is_round = False
        """Everybody was asked, and some have time left."""
        self._asked: dict[int, MonotonicS] = {}
        self._judged: dict[int, MonotonicS] = {}
        """When those who were asked must have answered."""
        self._silent: set[int] = set()
        self._gone: set[int] = set()
        self._accusations: list[tuple[int, int]] = []
        self._progress: dict[int, tuple[int, int]] = {}
        self._claimed_wait_s = 0.0
        self._num_postponed = 0
        self._to_ask: list[int] = []
        self._found: list[Verdict | Recovered] = []

    def expect(self, timeout_s: float, *, now: MonotonicS, patience_s: float = STUCK_S) -> None:
        """Something is awaited, and something has moved just now, or the waiting begins.

        Args:
            timeout_s: until everybody is asked.
            patience_s: until nothing moves any more; at least STUCK_S.
        """
        self._timeout_s = timeout_s
        self._patience_s = max(patience_s, STUCK_S)
        self._due = MonotonicS(now + timeout_s)
        self._moved_at = now
        self._num_rounds = 0

    def expect_nothing(self) -> None:
        """Silence is right."""
        self._timeout_s = None

    def accuse(self, accuser: int, accused: int, *, now: MonotonicS) -> None:
        """A stage says that another is gone, or sends what cannot be used."""
        if (accuser, accused) in self._accusations or {accuser, accused} & (self._silent | self._gone):
            return
        self._accusations.append((accuser, accused))
        for stage in (accuser, accused):
            self._ask(stage, now)

    def withdraw(self, accuser: int, accused: int) -> None:
        """An accusation has turned out to be another's fault."""
        self._accusations = [pair for pair in self._accusations if pair != (accuser, accused)]

    def ask_all(self, *, now: MonotonicS) -> None:
        """Without suspicion: to have leases renewed."""
        for stage in range(len(self._round_trips)):
            self._ask(stage, now)

    def heard(self, stage: int, *, now: MonotonicS) -> None:
        """Anything came from it."""
        self._judged.pop(stage, None)
        if stage in self._silent:
            self._silent.discard(stage)
            self._found.append(Recovered(stage))
        if self._asked.pop(stage, None) is None:
            return
        for accuser, accused in list(self._accusations):
            if (accuser, accused) in self._accusations and not {accuser, accused} & self._asked.keys():
                # Where both accuse each other, who spoke first is believed: one of the two is enough to replace.
                self._accusations = [pair for pair in self._accusations if set(pair) != {accuser, accused}]
                self._found.append(Verdict(accused, Cause.PAIR, accuser))
        self._end_round(now)

    def all_applied(self, num_entries: int) -> None:
        """The result of so many entries is there: that a stage has come so far is no news any more."""
        for stage in range(len(self._round_trips)):
            self._grows(stage, num_entries, num_entries)

    def progressed(
        self, stage: int, next_sequence: int, num_done: int, wait_s: float, *, now: MonotonicS, backlog_s: float = 0.0
    ) -> None:
        """It has answered how far it is. Only what has grown has moved: a number that goes up and down is no work.

        Args:
            backlog_s: see SessionProgress: what is on its line moves.
        """
        asked_at = self._asked.get(stage)
        if asked_at is not None:
            self._round_trips[stage].note(max(0.0, now - asked_at))
        if self._grows(stage, next_sequence, num_done):
            self._moved_at = now
        if next_sequence > num_done:
            self._claimed_wait_s = max(self._claimed_wait_s, min(wait_s, MAX_CLAIMED_WAIT_S))
        if backlog_s > 0:
            arrives_s = now - self._moved_at + BACKLOG_MARGIN * backlog_s
            self._claimed_wait_s = max(self._claimed_wait_s, min(arrives_s - self._patience_s, MAX_BACKLOG_S))
        self.heard(stage, now=now)

    def gone(self, stage: int) -> None:
        """It is known to be at fault: what it says and what is said of it does not matter any more."""
        self._gone.add(stage)
        self._asked.pop(stage, None)
        self._judged.pop(stage, None)
        self._silent.discard(stage)
        self._accusations = [pair for pair in self._accusations if stage not in pair]

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        due = list(self._judged.values())
        if self._timeout_s is not None and not self._is_round:
            due.append(self._due)
        return min(due, default=None)

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early: how late is added to everybody's time, MAX_POSTPONED times in a row."""
        due = self.get_timer()
        if due is None or now < due:
            return
        if now - due > LATE_S and self._num_postponed < MAX_POSTPONED:
            # What has come meanwhile is read before anybody is judged.
            self._num_postponed += 1
            self._postpone(now - due + min(now - due, MIN_PROBE_S))
            return
        self._num_postponed = 0
        for stage in sorted(stage for stage, at in self._judged.items() if at <= now):
            del self._judged[stage]
            self._asked.pop(stage, None)
            self._accusations = [pair for pair in self._accusations if stage not in pair]
            if stage not in self._silent:
                self._silent.add(stage)
                self._found.append(Verdict(stage, Cause.SILENT))
        self._end_round(now)
        if self._timeout_s is not None and not self._is_round and self._due <= now:
            self._is_round = True
            self._claimed_wait_s = 0.0
            self.ask_all(now=now)
            self._end_round(now)

    def to_ask(self) -> list[int]:
        """Stages to send a SessionQuery to. Drained."""
        asked, self._to_ask = self._to_ask, []
        return asked

    def found(self) -> list[Verdict | Recovered]:
        """Drained, in order."""
        found, self._found = self._found, []
        return found

    # inside

    def _grows(self, stage: int, next_sequence: int, num_done: int) -> bool:
        before = self._progress.get(stage, (0, 0))
        after = (max(before[0], next_sequence), max(before[1], num_done))
        self._progress[stage] = after
        return after != before

    def _ask(self, stage: int, now: MonotonicS) -> None:
        if stage in self._asked or stage in self._gone:
            return
        self._asked[stage] = now
        round_trip = self._round_trips[stage]
        patience_s = max(MIN_PROBE_S, PROBE_ROUND_TRIPS * (round_trip.smoothed or 0.0), round_trip.bound or 0.0)
        backlog_s = min(max(0.0, self._backlog_s(stage)), MAX_BACKLOG_S)
        self._judged[stage] = MonotonicS(now + min(patience_s, MAX_TIMEOUT_S) + backlog_s)
        self._to_ask.append(stage)

    def _end_round(self, now: MonotonicS) -> None:
        """Everybody has answered, or is silent: the next round comes later, or one that does not move is found."""
        if not self._is_round or self._judged:
            return
        self._is_round = False
        self._num_rounds += 1
        if self._timeout_s is None:
            return
        back_off = 2 ** min(self._num_rounds, MAX_BACK_OFF)
        self._due = MonotonicS(now + min(self._timeout_s * back_off, MAX_TIMEOUT_S))
        if now - self._moved_at >= self._patience_s + self._claimed_wait_s and not self._silent:
            self._moved_at = now
            self._found.append(self._stuck())

    def _stuck(self) -> Verdict:
        """The first stage that has something to compute and does not; or else the first that does not get it."""
        stages = range(len(self._round_trips))
        progress = [self._progress.get(stage, (0, 0)) for stage in stages]
        for stage, (next_sequence, num_done) in enumerate(progress):
            if next_sequence > num_done:
                return Verdict(stage, Cause.STUCK)
        least = min(next_sequence for next_sequence, _ in progress)
        stage = next(s for s in stages if progress[s][0] == least)
        if stage > 0:
            return Verdict(stage, Cause.PAIR, stage - 1)
        # All have the same, and have done it: what is missing is the answer of the last one, or our own sending.
        return Verdict(stages[-1], Cause.STUCK)

    def _postpone(self, seconds: float) -> None:
        self._judged = {stage: MonotonicS(at + seconds) for stage, at in self._judged.items()}
        self._asked = {stage: MonotonicS(at + seconds) for stage, at in self._asked.items()}
        self._due = MonotonicS(self._due + seconds)
        self._moved_at = MonotonicS(self._moved_at + seconds)


# what is done about it


class Attempt(enum.Enum):
    """What to try next."""

    PATCH = "patch"
    PREFILL = "prefill"
    GIVE_UP = "give up"


@dataclass(slots=True)
class _Avoided:
    until: MonotonicS
    seconds: float


@dataclass(slots=True)
class RepairPolicy:
    """Attempts of one answer, and whom it avoids."""

    _peers: dict[PeerId, _Avoided] = field(default_factory=dict)
    _pairs: dict[tuple[PeerId, PeerId], _Avoided] = field(default_factory=dict)
    _partners: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    """With whom each peer could not hand rows over, in the whole answer."""
    _num_attempts: int = 0
    _was_open: bool = False
    _have_dropped: set[PeerId] = field(default_factory=set)

    def failed(self, peer: PeerId, *, now: MonotonicS) -> None:
        """It is avoided for some time."""
        _avoid(self._peers, peer, now)

    def pair_failed(self, one: PeerId, other: PeerId, *, now: MonotonicS) -> None:
        """They are avoided as neighbours for some time."""
        _avoid(self._pairs, (min(one, other), max(one, other)), now)
        self._partners.setdefault(one, set()).add(other)
        self._partners.setdefault(other, set()).add(one)

    def is_doubted(self, peer: PeerId) -> bool:
        """It has failed with so many different partners that more likely it is at fault than all of them."""
        return len(self._partners.get(peer, ())) >= MAX_PARTNERS

    def has_dropped(self, peer: PeerId, *, now: MonotonicS) -> None:
        """It has not kept what it handed on. Once may be for want of room; who does it again is avoided."""
        if peer in self._have_dropped:
            self.failed(peer, now=now)
        self._have_dropped.add(peer)

    def avoid_peers(self, *, now: MonotonicS) -> frozenset[PeerId]:
        """Those to be avoided now: some of them for a while, and the doubted for the rest of the answer."""
        failed = frozenset(peer for peer, avoided in self._peers.items() if now < avoided.until)
        return failed | {peer for peer in self._partners if self.is_doubted(peer)}

    def avoid_pairs(self, *, now: MonotonicS) -> frozenset[tuple[PeerId, PeerId]]:
        """Neighbours to be avoided now, the smaller id first."""
        return frozenset(pair for pair, avoided in self._pairs.items() if now < avoided.until)

    def opened(self) -> None:
        """A session is open for the first time: from now on there is something to lose."""
        if not self._was_open:
            self._was_open = True
            self._num_attempts = 0

    def progressed(self) -> None:
        """A result came out: attempts are counted from 0 again."""
        self._num_attempts = 0

    def next_attempt(self) -> Attempt:
        """Something failed."""
        self._num_attempts += 1
        if self._num_attempts > (MAX_REPAIRS if self._was_open else MAX_OPEN_ATTEMPTS - 1):
            return Attempt.GIVE_UP
        return Attempt.PATCH if self._num_attempts <= MAX_PATCHES else Attempt.PREFILL


K = TypeVar("K")


def _avoid(avoided: dict[K, _Avoided], key: K, now: MonotonicS) -> None:
    known = avoided.get(key)
    seconds = AVOID_S if known is None else min(2 * known.seconds, MAX_AVOID_S)
    avoided[key] = _Avoided(MonotonicS(now + seconds), seconds)
