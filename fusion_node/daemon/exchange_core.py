"""What the members of fusion groups contribute to one another: which rows can go on, and where, and what must not come.

Rows of a step are cut into *units*, which pass the exchanges of all layers one after another. A unit goes on when the
contributions of all members to the exchange at which it is have come. There is no leader: every member takes whatever
is ready, so that sessions that came together stay together, and no member ever waits for one that waits for it.

Guarantees: a unit passes every exchange once, with one contribution of each member, handed out in the order of the
members whatever order they came in. Of one session, no unit overtakes another: it is at an exchange only when the one
before has passed it, so that the KV of the rows before is there; and a unit that moves KV begins when nothing before it
is under way. What one peer sends changes nothing but sessions in whose group it is, and there makes a fault that names
it, if it cannot be. What comes before its unit is bounded: MAX_BEGUN_ROWS of a member for a session, MAX_EARLY_BYTES of
a peer, MAX_ALL_EARLY_BYTES together. Nothing is kept of what is over. What is computed for a member whose link is full
waits, and nothing else waits for it.

Assumes: one caller; ``now`` never goes back; the units of a session are added in the order of its log, with ascending
nodes; every batch that ``next_batch`` hands out comes back with ``passed`` or ``again``, or its sessions are left. A
peer is at most one exchange ahead, since it cannot pass one without us.

States of a unit: waiting to begin, waiting at an exchange (for contributions, or for the unit before), ready, running,
done. Timers, for the first unit of a session, from when it became that at the earliest: LATE_S after it began to wait
at an exchange, QUEUE_S after it was added and does not begin; seconds of the monotonic clock, without those in which
this process itself stood still.

Source: docs/protocol-data-plane.md, "Groups". Still ugly: a unit that waits keeps its contributions as they came, also
when a whole prompt of many sessions waits for one slow member; and the file is above 600 lines, because all of it
decides about the same few fields of a unit.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from fusion_node.engine.batching_core import (
    MAX_DECODE_ROWS,
    MAX_USER_WAITING_SHARE,
    MAX_WAITING_ROWS,
    Overload,
)
from fusion_node.slices import VALUE_BYTES, Dims, Exchange, SliceBounds, contribution_bytes, exchanges
from fusion_node.types import LayerRange, MonotonicS, PeerId
from fusion_node.wire import MAX_PAYLOAD_BYTES
from p2p.identity import short
from p2p.messages import MAX_UNIT_ROWS, Partials, Standing

MAX_BEGUN_ROWS = 1024
"""Of one session, in units that have begun and are not done. As many as keep a line of 100 ms busy beside 256 rows that
take a slow device as long; and what each other member has to keep of it before the step comes."""

MAX_BEGUN_BYTES = 16 * 2**20
"""Of one session, as contributions to one member: a link for which 64 MiB wait is given up, with all sessions on it."""

MAX_EARLY_BYTES = 64 * 2**20
"""Of one peer, in contributions to what has not begun here."""

MAX_ALL_EARLY_BYTES = 256 * 2**20

MAX_PHASE_ROWS = 512
"""Of one batch, as of a forward through whole layers."""

MAX_SKIPPED_BATCHES = 15
"""In a row that may go before batch work that is ready."""

GROW_AFTER = 512
"""Batches in a row until twice as many rows are tried again: a few forwards."""

LATE_S = 20.0
"""So long one waits for a member that is connected. Its user waits for 30 s, and should hear who it is before."""

QUEUE_S = 20.0
"""A unit that has waited so long while nothing of its session is computed is not begun any more."""

MAX_NODE = 2**32 - 1
"""That a message can name."""

MAX_WAITED_MS = 2**32 - 1

BAD_PARTIALS = "bad-partials"
FLOODED = "flooded"
LATE_PARTIALS = "late-partials"
OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True)
class Fault:
    """A session cannot be computed on.

    Attributes:
        culprit: another member, or empty.
        is_kept: others may be at fault; else it is over here.
        standing: how far it was, where others were waited for.
    """

    session: Any
    code: str
    reason: str
    culprit: str = ""
    is_kept: bool = True
    standing: Standing | None = None


@dataclass(slots=True, eq=False)
class Unit:
    """Rows of one step of one session.

    Attributes:
        node: the first one; others call the unit so.
        num_rows: may be 0: it begins when nothing before it is under way, and is done.
        is_alone: it begins only when nothing before it is under way.
        is_batch: nobody waits for it.
        payload: the caller's.
        position: the exchange that it has to pass next, counted from the first one; -1 before it begins.
    """

    session: Any
    node: int
    num_rows: int
    is_alone: bool = False
    is_batch: bool = False
    payload: Any = None
    position: int = -1
    has_begun: bool = False
    is_running: bool = False
    since: float = 0.0
    before: Unit | None = field(default=None, repr=False)
    behind: Unit | None = field(default=None, repr=False)
    got: list[Any] = field(default_factory=list, repr=False)
    """Contributions to the exchange at which it is, by member."""
    ahead: list[Any] = field(default_factory=list, repr=False)
    """Those to the next one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Units that are computed together.

    Attributes:
        exchange: that they pass; None: they begin.
        received: per unit the contributions in the order of the members; None as ``exchange``.
    """

    layer: int
    exchange: Exchange | None
    layers: LayerRange
    units: tuple[Unit, ...]
    received: tuple[tuple[Any, ...], ...] | None

    @property
    def num_rows(self) -> int:
        return sum(unit.num_rows for unit in self.units)


@dataclass(frozen=True, slots=True)
class Form:
    """What contributions to this member look like.

    Attributes:
        row_bytes: of one row, for each exchange that this member gets; those of a layer, in order.
        max_unit_rows: of one unit.
        max_begun_rows: of one session under way here, or one unit; others may have MAX_BEGUN_ROWS.
    """

    row_bytes: Mapping[Exchange, int]
    max_unit_rows: int = MAX_UNIT_ROWS
    max_begun_rows: int = MAX_BEGUN_ROWS

    @classmethod
    def of(cls, dims: Dims, bounds: Sequence[SliceBounds], own: int, *, is_masked: bool = False) -> Form:
        """Of a session whose sums are masked or not."""
        return cls(
            {each: contribution_bytes(dims, bounds[own], each, is_masked=is_masked) for each in exchanges(dims)},
            unit_rows(dims, bounds, is_masked=is_masked),
            begun_rows(dims, bounds, is_masked=is_masked),
        )


@dataclass(slots=True, eq=False)
class _Group:
    """The group of one session under its present plan."""

    session: Any
    user: str
    alias: int
    members: tuple[PeerId, ...]
    own: int
    layers: LayerRange
    form: Form
    units: dict[int, Unit] = field(default_factory=dict)
    """Those that are not done, by node, in order."""
    last: Unit | None = None
    to_begin: Unit | None = None
    """The first that has not begun."""
    last_node: int = 0
    begun_rows: int = 0
    num_rows: int = 0
    early: dict[int, dict[int, Any]] = field(default_factory=dict)
    """Contributions to the first exchange, by node and member, of units that are not there yet."""
    early_rows: Counter[int] = field(default_factory=Counter)
    """By member, of those and of units that have not begun."""
    early_bytes: Counter[int] = field(default_factory=Counter)

    @property
    def others(self) -> list[PeerId]:
        return [peer for index, peer in enumerate(self.members) if index != self.own]


def unit_rows(dims: Dims, bounds: Sequence[SliceBounds], *, is_masked: bool = False) -> int:
    """Rows of a unit: as many as fit into a frame whatever is exchanged. The same for all members."""
    rows = MAX_UNIT_ROWS
    while rows > 1 and rows * _widest_bytes(dims, bounds, is_masked) > MAX_PAYLOAD_BYTES:
        rows //= 2
    return rows


def begun_rows(dims: Dims, bounds: Sequence[SliceBounds], *, is_masked: bool = False) -> int:
    """Rows of one session that a member has under way, or one unit: as many as no link is given up for."""
    return min(MAX_BEGUN_ROWS, MAX_BEGUN_BYTES // _widest_bytes(dims, bounds, is_masked))


def _widest_bytes(dims: Dims, bounds: Sequence[SliceBounds], is_masked: bool) -> int:
    each = (contribution_bytes(dims, owner, e, is_masked=is_masked) for owner in bounds for e in exchanges(dims))
    return max(each)


class Exchanges:
    """See the head of this file.

    Args:
        widths: values per row of each exchange that this member gets; those of a layer, in order.
        max_unit_rows, max_begun_rows: see Form; of sessions that say nothing else.
        max_phase_rows: of one batch, or one unit.
        max_waiting_rows: of all sessions together, but for a small step of each.

    Attributes:
        counters: of what was not heeded.
        members: with whom sessions that were entered are shared, and how many.
        max_rows: of one batch.
        num_rows: that are not done.
    """

    def __init__(
        self,
        widths: dict[Exchange, int],
        *,
        max_unit_rows: int = MAX_UNIT_ROWS,
        max_begun_rows: int = MAX_BEGUN_ROWS,
        max_phase_rows: int = MAX_PHASE_ROWS,
        max_waiting_rows: int = MAX_WAITING_ROWS,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.members: Counter[PeerId] = Counter()
        self.max_rows = max_phase_rows
        self.num_rows = 0
        self._max_phase_rows = max_phase_rows
        self._exchanges = tuple(widths)
        self._place_of = {exchange: place for place, exchange in enumerate(self._exchanges)}
        row_bytes = {exchange: VALUE_BYTES * width for exchange, width in widths.items()}
        self._form = Form(row_bytes, max_unit_rows, max_begun_rows)
        self._max_waiting_rows = max_waiting_rows
        self._groups: dict[Any, _Group] = {}
        self._by_alias: dict[int, _Group] = {}
        self._rows_of: Counter[str] = Counter()
        """By user."""
        self._early_bytes: Counter[PeerId] = Counter()
        self._ready: OrderedDict[Hashable, dict[Unit, None]] = OrderedDict()
        """By what they can be computed together with, what has been ready for longest first."""
        self._num_skipped = 0
        """Batches since batch work that was ready had its turn."""
        self._num_passed = 0
        """Batches since one was too large."""

    # sessions

    def enter(
        self,
        session: Any,
        *,
        user: str,
        alias: int,
        members: Sequence[PeerId],
        own: int,
        layers: LayerRange,
        form: Form | None = None,
    ) -> None:
        """Contributions to a session may come from now on. What there was of it under an earlier plan is over.

        Args:
            form: of contributions to it; None: that of float32.
        """
        self.leave(session)
        group = _Group(session, user, alias, tuple(members), own, layers, form or self._form)
        self._groups[session] = self._by_alias[alias] = group
        self.members.update(group.others)

    def leave(self, session: Any) -> None:
        """Nothing of a session is computed any more; what still comes for it changes nothing."""
        group = self._groups.pop(session, None)
        if group is None:
            return
        del self._by_alias[group.alias]
        self.members -= Counter(group.others)
        for unit in group.units.values():
            self._not_ready(unit)
        for member in list(group.early_bytes):
            self._release(group, member, group.early_rows[member], group.early_bytes[member])
        self._count_rows(group, -group.num_rows)

    def holds(self, session: Any) -> bool:
        """Whether a session has been entered and not left."""
        return session in self._groups

    # what comes

    def add(self, units: Sequence[Unit], *, now: MonotonicS) -> Overload | list[Fault]:
        """The units of one step of a session that was entered; behind all before them.

        Returns:
            Why they are not taken; or faults that what came before them shows only now.
        """
        group = self._groups[units[0].session]
        num_rows = sum(unit.num_rows for unit in units)
        is_small = num_rows <= MAX_DECODE_ROWS and not group.units
        if self.num_rows + num_rows > self._max_waiting_rows and not is_small:
            return Overload.NODE
        if self._rows_of[group.user] + num_rows > self._max_waiting_rows * MAX_USER_WAITING_SHARE:
            return Overload.USER
        faults: list[Fault] = []
        for unit in units:
            self._append(group, unit, now, faults)
        for node in [node for node in group.early if node < group.last_node]:
            culprit = group.members[next(iter(group.early[node]))]
            faults.append(_bad(group, culprit, "rows that are no unit of any step"))
            break
        return faults

    def receive(self, peer: PeerId, message: Partials, payload: bytes | bytearray | memoryview) -> list[Fault]:
        """Contributions of a peer. What is kept of the payload is copied."""
        view, start, faults = memoryview(payload), 0, list[Fault]()
        row_bytes = len(view) // message.num_rows
        faulty: set[int] = set()
        for entry in message.entries:
            stop = start + entry.num_rows * row_bytes
            group = self._by_alias.get(entry.session)
            if group is None:
                self.counters["partials_without_session"] += 1
            elif peer not in group.members or peer == group.members[group.own]:
                self.counters["partials_of_strangers"] += 1
            elif entry.session not in faulty:
                fault = self._take(
                    group, peer, (message.layer, message.exchange), entry.node, entry.num_rows, view[start:stop]
                )
                if fault is not None:
                    faulty.add(entry.session)
                    faults.append(fault)
            start = stop
        return faults

    # what is computed

    def next_batch(self, full: AbstractSet[PeerId] = frozenset()) -> Batch | None:
        """What has been ready for longest, and all that can be computed with it; None when nothing may be computed.

        Args:
            full: members for whom so much waits to be sent that nothing more is to be computed for them yet.
        """
        ready = self._not_for(full) if full else self._ready
        if not ready:
            return None
        key = next(iter(ready))
        urgent = next((k for k, units in ready.items() if any(not unit.is_batch for unit in units)), key)
        if urgent != key and self._num_skipped < MAX_SKIPPED_BATCHES:
            self._num_skipped += 1
            key = urgent
        else:
            self._num_skipped = 0
        chosen, num_rows = list[Unit](), 0
        for unit in ready[key]:
            if chosen and num_rows + unit.num_rows > self.max_rows:
                break
            chosen.append(unit)
            num_rows += unit.num_rows
        waiting = self._ready[key]
        for unit in chosen:
            del waiting[unit]
            unit.is_running = True
        if not waiting:
            del self._ready[key]
        first = chosen[0]
        received = None if first.position < 0 else tuple(tuple(unit.got) for unit in chosen)
        for unit in chosen:
            if not unit.has_begun:
                self._begins(self._groups[unit.session], unit)
        group = self._groups[first.session]
        layer, exchange = self._at(group, max(first.position, 0))
        return Batch(layer, None if received is None else exchange, group.layers, tuple(chosen), received)

    def _not_for(self, full: AbstractSet[PeerId]) -> dict[Hashable, list[Unit]]:
        """What is ready and has nothing for these."""
        held = {session for session, group in self._groups.items() if not full.isdisjoint(group.others)}
        going = {key: [unit for unit in units if unit.session not in held] for key, units in self._ready.items()}
        return {key: units for key, units in going.items() if units}

    def passed(self, batch: Batch, contributions: Sequence[Any], *, now: MonotonicS) -> list[Unit]:
        """A batch was computed.

        Args:
            contributions: per unit this member's own to the next exchange; not looked at for those that are done.

        Returns:
            Units that are done, those of one session in order.
        """
        self._num_passed += 1
        if self.max_rows < self._max_phase_rows and self._num_passed == GROW_AFTER:
            self.max_rows, self._num_passed = min(2 * self.max_rows, self._max_phase_rows), 0
        done = []
        for unit, own in zip(batch.units, contributions, strict=True):
            group = self._groups.get(unit.session)
            if group is None or group.units.get(unit.node) is not unit:
                continue  # its session has been left
            unit.is_running = False
            unit.position += 1
            unit.since = now
            unit.got, unit.ahead = unit.ahead, [None] * len(group.members)
            if unit.num_rows == 0 or unit.position == len(group.layers) * len(self._exchanges):
                self._done(group, unit, now)
                done.append(unit)
            else:
                unit.got[group.own] = own
                self._look_at(group, unit)
            if unit.behind is not None:
                self._look_at(group, unit.behind)
        return done

    def again(self, batch: Batch) -> bool:
        """A batch was too large to be computed, and is to be in smaller ones: its units are as they were.

        Returns:
            False, and nothing is changed, when it is but one unit.
        """
        if len(batch.units) == 1:
            return False
        self.max_rows = max(1, min(self.max_rows, batch.num_rows) // 2)
        self._num_passed = 0
        for unit in batch.units:
            group = self._groups.get(unit.session)
            if group is not None and group.units.get(unit.node) is unit:
                unit.is_running = False
                self._ready.setdefault(self._key(group, unit), {})[unit] = None
        return True

    # time

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        ends = [end for group in self._groups.values() if (end := _late_at(group)) is not None]
        return MonotonicS(min(ends)) if ends else None

    def handle_timer(self, *, now: MonotonicS) -> list[Fault]:
        """Sessions that have waited too long. May be called early without effect."""
        return [
            self._late(group, next(iter(group.units.values())), now)
            for group in self._groups.values()
            if (end := _late_at(group)) is not None and end <= now
        ]

    def stood_still(self, seconds: float, *, now: MonotonicS) -> None:
        """This process did not run in the seconds just past: they count against nobody, and nothing has waited then."""
        for group in self._groups.values():
            for unit in group.units.values():
                unit.since = min(unit.since + seconds, now)

    def standing(self, session: Any, *, now: MonotonicS, full: AbstractSet[PeerId] = frozenset()) -> Standing | None:
        """How far a session is, for its user, who compares that with what the other members say.

        Args:
            full: as of ``next_batch``: who takes nothing is waited for as well.

        Returns:
            None of a session that was not entered, or was left.
        """
        group = self._groups.get(session)
        if group is None:
            return None
        unit = next(iter(group.units.values()), None)
        if unit is None:
            return Standing(min(group.last_node + 1, MAX_NODE), 0, has_rows=False)
        missing: list[int] = []
        if unit.position >= 0 and not unit.is_running:
            missing = [member for member, part in enumerate(unit.got) if part is None]
        if not missing and not unit.is_running:
            missing = [member for member, peer in enumerate(group.members) if peer in full and member != group.own]
        waited_ms = int(1000 * max(0.0, now - unit.since))
        return Standing(unit.node, unit.position + 1, tuple(missing), min(waited_ms, MAX_WAITED_MS))

    # load

    @property
    def num_waiting_sessions(self) -> int:
        return sum(bool(group.units) for group in self._groups.values())

    @property
    def num_ready(self) -> int:
        """Batches, about, that could be computed now."""
        return len(self._ready)

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant is broken. For tests and diagnosis."""
        early = Counter[PeerId]()
        for group in self._groups.values():
            units = list(group.units.values())
            if [unit.node for unit in units] != sorted(group.units):
                raise ValueError("units out of order")
            begun = [unit for unit in units if unit.has_begun]
            if units[: len(begun)] != begun or next(iter(units[len(begun) :]), None) is not group.to_begin:
                raise ValueError("a unit has begun before one that goes before it")
            if any(a.position < b.position for a, b in itertools.pairwise(begun)):
                raise ValueError("a unit has overtaken the one before it")
            if group.begun_rows != sum(unit.num_rows for unit in begun):
                raise ValueError("another number of rows has begun than is counted")
            if group.num_rows != sum(unit.num_rows for unit in units):
                raise ValueError("another number of rows waits than is counted")
            if any(group.early_rows[member] > MAX_BEGUN_ROWS for member in range(len(group.members))):
                raise ValueError("a member has sent more rows ahead than it may")
            for member, num_bytes in group.early_bytes.items():
                early[group.members[member]] += num_bytes
        if +early != +self._early_bytes or self._early_bytes.total() > MAX_ALL_EARLY_BYTES:
            raise ValueError("another number of bytes came early than is counted, or too many")
        if self.num_rows != sum(group.num_rows for group in self._groups.values()) or +self._rows_of != +Counter(
            {
                user: sum(g.num_rows for g in self._groups.values() if g.user == user)
                for user in {g.user for g in self._groups.values()}
            }
        ):
            raise ValueError("another number of rows waits than is counted")
        for units_of_key in self._ready.values():
            if not units_of_key or any(unit.is_running for unit in units_of_key):
                raise ValueError("what is ready is running, or nothing is")

    # parts of it

    def _at(self, group: _Group, position: int) -> tuple[int, Exchange]:
        layer, place = divmod(position, len(self._exchanges))
        return group.layers.start + layer, self._exchanges[place]

    def _key(self, group: _Group, unit: Unit) -> Hashable:
        if unit.position < 0:
            return group.layers
        return self._at(group, unit.position)

    def _append(self, group: _Group, unit: Unit, now: MonotonicS, faults: list[Fault]) -> None:
        num_members = len(group.members)
        unit.got, unit.ahead, unit.since = [None] * num_members, [None] * num_members, now
        unit.before = group.last if group.units else None
        if unit.before is not None:
            unit.before.behind = unit
        group.units[unit.node] = group.last = unit
        group.last_node = unit.node + max(unit.num_rows, 1) - 1
        if group.to_begin is None:
            group.to_begin = unit
        self._count_rows(group, unit.num_rows)
        for member, (num_rows, contribution) in group.early.pop(unit.node, {}).items():
            if num_rows == unit.num_rows:
                unit.ahead[member] = contribution
            else:
                self._release(group, member, num_rows, len(contribution))
                faults.append(_bad(group, group.members[member], f"{num_rows} rows instead of {unit.num_rows}"))
        self._look_at(group, unit)

    def _take(
        self, group: _Group, peer: PeerId, place: tuple[int, int], node: int, num_rows: int, rows: memoryview
    ) -> Fault | None:
        """One contribution. Code and reason if it cannot be."""
        layer, exchange = place[0], Exchange(place[1])
        if layer not in range(group.layers.start, group.layers.stop) or exchange not in self._place_of:
            return _bad(group, peer, f"an exchange that there is not in layers {group.layers}")
        row_bytes = group.form.row_bytes[exchange]
        if len(rows) != num_rows * row_bytes:
            return _bad(group, peer, f"rows of another size than {row_bytes} bytes in {exchange.name}")
        position = (layer - group.layers.start) * len(self._exchanges) + self._place_of[exchange]
        member, unit = group.members.index(peer), group.units.get(node)
        if unit is None:
            if node <= group.last_node:
                return _bad(group, peer, "rows that are no unit, or are done")
            if position > 0 or num_rows > group.form.max_unit_rows:
                return _bad(group, peer, "rows of a unit that cannot be there yet")
            if member in group.early.get(node, {}):
                return _bad(group, peer, "the same rows twice")
            return self._keep_early(group, peer, node, num_rows, rows)
        if num_rows != unit.num_rows:
            return _bad(group, peer, f"{num_rows} rows instead of {unit.num_rows}")
        if position not in (unit.position, unit.position + 1):
            return _bad(group, peer, "an exchange that the rows have passed, or cannot be at")
        place_for = unit.got if position == unit.position else unit.ahead
        if place_for[member] is not None or (position == unit.position and unit.is_running):
            return _bad(group, peer, "the same rows twice")
        if not unit.has_begun:
            fault = self._count_early(group, peer, num_rows, len(rows))
            if fault is not None:
                return fault
        place_for[member] = bytearray(rows)
        self._look_at(group, unit)
        return None

    def _keep_early(self, group: _Group, peer: PeerId, node: int, num_rows: int, rows: memoryview) -> Fault | None:
        fault = self._count_early(group, peer, num_rows, len(rows))
        if fault is None:
            group.early.setdefault(node, {})[group.members.index(peer)] = (num_rows, bytearray(rows))
        return fault

    def _count_early(self, group: _Group, peer: PeerId, num_rows: int, num_bytes: int) -> Fault | None:
        """Takes room for what comes before its unit has begun."""
        member = group.members.index(peer)
        if group.early_rows[member] + num_rows > max(MAX_BEGUN_ROWS, group.form.max_unit_rows):
            return Fault(group.session, FLOODED, "rows of more units than a member may have begun", peer)
        if (
            self._early_bytes[peer] + num_bytes > MAX_EARLY_BYTES
            or self._early_bytes.total() + num_bytes > MAX_ALL_EARLY_BYTES
        ):
            return Fault(group.session, FLOODED, "too much of all sessions waits for steps that have not come")
        group.early_rows[member] += num_rows
        group.early_bytes[member] += num_bytes
        self._early_bytes[peer] += num_bytes
        return None

    def _release(self, group: _Group, member: int, num_rows: int, num_bytes: int) -> None:
        peer = group.members[member]
        group.early_rows[member] -= num_rows
        group.early_bytes[member] -= num_bytes
        self._early_bytes[peer] -= num_bytes
        if not group.early_bytes[member]:
            del group.early_rows[member], group.early_bytes[member]
        if not self._early_bytes[peer]:
            del self._early_bytes[peer]

    def _begins(self, group: _Group, unit: Unit) -> None:
        unit.has_begun = True
        group.to_begin = unit.behind
        group.begun_rows += unit.num_rows
        for member, contribution in enumerate(unit.ahead):
            if contribution is not None:
                self._release(group, member, unit.num_rows, len(contribution))

    def _done(self, group: _Group, unit: Unit, now: MonotonicS) -> None:
        del group.units[unit.node]
        group.begun_rows -= unit.num_rows
        self._count_rows(group, -unit.num_rows)
        if unit.behind is not None:
            unit.behind.before, unit.behind.since = None, now
        if group.to_begin is not None:
            self._look_at(group, group.to_begin)

    def _count_rows(self, group: _Group, num_rows: int) -> None:
        group.num_rows += num_rows
        self.num_rows += num_rows
        self._rows_of[group.user] += num_rows
        if not self._rows_of[group.user]:
            del self._rows_of[group.user]

    def _look_at(self, group: _Group, unit: Unit) -> None:
        """Puts a unit among those that are ready, if it is."""
        if not unit.is_running and self._is_ready(group, unit):
            self._ready.setdefault(self._key(group, unit), {})[unit] = None

    def _is_ready(self, group: _Group, unit: Unit) -> bool:
        before = unit.before
        if unit.position >= 0:
            return (before is None or before.position > unit.position) and _is_complete(unit)
        # Without rows it is done at once: what is behind it would not follow what is before it any more.
        if before is not None and (unit.is_alone or unit.num_rows == 0 or before.position < 0):
            return False
        fits = group.begun_rows + unit.num_rows <= group.form.max_begun_rows or not group.begun_rows
        return group.to_begin is unit and fits

    def _not_ready(self, unit: Unit) -> None:
        for key, units in list(self._ready.items()):
            if unit in units:
                del units[unit]
                if not units:
                    del self._ready[key]

    def _late(self, group: _Group, unit: Unit, now: MonotonicS) -> Fault:
        if not unit.has_begun:
            reason = "a step waited too long for this node"
            return Fault(group.session, OVERLOADED, reason, is_kept=False)
        missing = [peer for peer, part in zip(group.members, unit.got, strict=True) if part is None]
        who = f"{short(missing[0])} has" if len(missing) == 1 else f"{len(missing)} members have"
        layer, exchange = self._at(group, unit.position)
        reason = f"{who} not sent what they have of {exchange.name} in layer {layer} for {LATE_S:.0f} s"
        culprit = missing[0] if len(missing) == 1 else ""
        return Fault(group.session, LATE_PARTIALS, reason, culprit, standing=self.standing(group.session, now=now))


def _is_complete(unit: Unit) -> bool:
    # By identity: tensors compare themselves with None at length.
    return all(part is not None for part in unit.got)


def _late_at(group: _Group) -> float | None:
    """When its first unit has waited too long for others; None while it waits for nobody."""
    unit = next(iter(group.units.values()), None)
    if unit is None or unit.is_running:
        return None
    if unit.position < 0:
        return unit.since + QUEUE_S
    return None if _is_complete(unit) else unit.since + LATE_S


def _bad(group: _Group, culprit: str, reason: str) -> Fault:
    return Fault(group.session, BAD_PARTIALS, reason, culprit)
