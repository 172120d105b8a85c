"""The rows that a node has handed on, kept so that they can be handed on again when the next stage is replaced.

Guarantees: what is kept of a session is every committed row from position 0 on without a gap, or nothing; beside them,
the rows of nodes that may still be committed. No more than ``max_bytes`` are kept of all sessions together, a payload
that several share counting once. The payload of a step that commits all of itself is held as it was sent, without a
copy; rows of a tree are copied, one by one, for few of them stay.

Assumes: one caller; payloads do not change once appended, and have ``row_bytes`` for each of their rows. Nodes are
committed in the order of their positions, before or after their rows come; names of nodes are never used twice.

States of a session's rows: kept, dropped (until it is opened anew), unknown. States of a node: held (its row is there),
wished for (it is committed, and its row or one before it is not there yet), at a position, unknown. When the bound is
passed, whole sessions are dropped, the one first that has neither handed on nor repeated a row for longest: half of a
session's rows would bring nobody back. No timers.

Still ugly: one who opens many sessions can make the rows of others go, who then have to compute them anew when a node
dies just then; and a payload of which a session shares the first rows only is held whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CHUNK_OVERHEAD_BYTES = 512
"""What Python spends on a payload beside its bytes."""


class Part(NamedTuple):
    """Rows ``[start, stop)`` of a payload."""

    payload: Any
    start: int
    stop: int


Join = Callable[[Sequence[Part], int], Any]
"""Makes one payload of the rows of several, given the bytes of a row."""


def join_bytes(parts: Sequence[Part], row_bytes: int) -> Any:
    """The rows of bytes-like payloads; without a copy where they are those of one."""
    views = [memoryview(part.payload)[part.start * row_bytes : part.stop * row_bytes] for part in parts]
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


@dataclass(slots=True, eq=False)
class _Chunk:
    """One payload. In ``num_holders`` sessions."""

    payload: Any
    num_bytes: int
    num_holders: int = 1


@dataclass(slots=True)
class _Rows:
    """What is kept of one session.

    Attributes:
        firsts: the position at which each chunk begins, so that it can be searched.
        chunks: those payloads; of one that is shared, rows beyond the next one's first position are not ours.
        wishes: positions and names of committed nodes, in order; a row before the first of them, or its own, is not
            there yet.
        held: rows by the names of their nodes.
    """

    row_bytes: int
    num_positions: int = 0
    firsts: list[int] = field(default_factory=list)
    chunks: list[_Chunk] = field(default_factory=list)
    wishes: deque[tuple[int, int]] = field(default_factory=deque)
    held: dict[int, Any] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """What one held row counts for."""
        return self.row_bytes + CHUNK_OVERHEAD_BYTES


class OutputLog:
    """The retained rows of one node.

    Args:
        max_bytes: of all sessions together; with 0 nothing is kept.
        join: makes one payload of several; a simulation, whose payloads are no bytes, hands in its own.

    Attributes:
        num_bytes: kept now.
        num_dropped: sessions whose rows were given up for want of room.
    """

    def __init__(self, *, max_bytes: int, join: Join = join_bytes) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_dropped = 0
        self._join = join
        self._rows: OrderedDict[Hashable, _Rows] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, key: Hashable, *, row_bytes: int, prefix: Hashable = None, num_positions: int = 0) -> None:
        """Begins to keep the rows of a session, in the place of what was kept under this key.

        Args:
            prefix: another session of the same encoding, with whose first ``num_positions`` this one begins. If these
                are not all kept, nothing is kept of the new session.
        """
        shared = self._rows.get(prefix) if num_positions else None
        if num_positions and (shared is None or shared.num_positions < num_positions or shared.row_bytes != row_bytes):
            self.drop(key)
            return
        rows = _Rows(row_bytes)
        if shared is not None:
            count = bisect_right(shared.firsts, num_positions - 1)
            rows = _Rows(row_bytes, num_positions, shared.firsts[:count], shared.chunks[:count])
            for chunk in rows.chunks:
                chunk.num_holders += 1
            self._rows.move_to_end(prefix)
        self.drop(key)  # last, for a session may begin like the one that had its key before
        if self.max_bytes:
            self._rows[key] = rows

    def append(self, key: Hashable, first_position: int, num_rows: int, payload: Sized) -> None:
        """Keeps the rows of a step, all of them committed. What does not follow is the end of what is kept."""
        rows = self._rows.get(key)
        if rows is None:
            return
        if first_position != rows.num_positions:
            self.drop(key)
            return
        self._add(rows, payload, num_rows)
        self._settle(rows)
        self._rows.move_to_end(key)
        self._make_room()

    def commit(self, key: Hashable, first_position: int, names: Iterable[int]) -> None:
        """These nodes have the positions from there on, whether their rows, or those before them, have come or not."""
        rows = self._rows.get(key)
        if rows is not None:
            rows.wishes.extend(enumerate(names, first_position))
            self._settle(rows)
            self._make_room()

    def hold(self, key: Hashable, names: Sequence[int], payload: Any, *, is_live: Callable[[int], bool]) -> None:
        """The rows of a step have been computed: those of nodes that are or may be committed are kept.

        Args:
            names: of the payload's rows.
            is_live: whether a node may still be committed.
        """
        rows = self._rows.get(key)
        if rows is None:
            return
        wanted = {name for _, name in rows.wishes}
        for index, name in enumerate(names):
            if name in wanted or is_live(name):
                row = self._join([Part(payload, index, index + 1)], rows.row_bytes)
                # A view of it would hold the whole payload.
                rows.held[name] = bytes(row) if isinstance(row, memoryview) else row
                self.num_bytes += rows.held_bytes
        self._settle(rows)
        self._rows.move_to_end(key)
        self._make_room()

    def prune(self, key: Hashable, *, is_live: Callable[[int], bool]) -> None:
        """Gives up the rows of nodes that are neither committed nor live any more."""
        rows = self._rows.get(key)
        if rows is not None and rows.held:
            wanted = {name for _, name in rows.wishes}
            for name in [each for each in rows.held if not (each in wanted or is_live(each))]:
                del rows.held[name]
                self.num_bytes -= rows.held_bytes

    def is_kept(self, key: Hashable) -> bool:
        """Whether the rows of a session are kept from its beginning on."""
        return key in self._rows

    def num_positions(self, key: Hashable) -> int:
        """Whose rows are kept, from 0 on."""
        rows = self._rows.get(key)
        return 0 if rows is None else rows.num_positions

    def rows(self, key: Hashable, first_position: int, num_rows: int) -> Any:
        """Those rows as one payload. They must be kept."""
        rows, parts = self._rows[key], []
        stop = first_position + num_rows
        if not 0 <= first_position < stop <= rows.num_positions:
            raise ValueError(f"rows of positions {first_position} to {stop} of {rows.num_positions} are not kept")
        self._rows.move_to_end(key)
        index = bisect_right(rows.firsts, first_position) - 1
        position = first_position
        while position < stop:
            first = rows.firsts[index]
            end = rows.firsts[index + 1] if index + 1 < len(rows.firsts) else rows.num_positions
            taken = min(stop, end)
            parts.append(Part(rows.chunks[index].payload, position - first, taken - first))
            position, index = taken, index + 1
        return self._join(parts, rows.row_bytes)

    def drop(self, key: Hashable) -> None:
        """Keeps nothing of a session any more."""
        rows = self._rows.pop(key, None)
        if rows is None:
            return
        self.num_bytes -= len(rows.held) * rows.held_bytes
        for chunk in rows.chunks:
            chunk.num_holders -= 1
            if chunk.num_holders == 0:
                self.num_bytes -= chunk.num_bytes

    def keep_only(self, is_wanted: Callable[[Any], bool]) -> None:
        """Drops the sessions whose key is not wanted."""
        for key in [key for key in self._rows if not is_wanted(key)]:
            self.drop(key)

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant is broken. For tests and diagnosis."""
        holders: dict[int, tuple[_Chunk, int]] = {}
        for rows in self._rows.values():
            if rows.firsts != sorted(set(rows.firsts)) or (rows.firsts[:1] or [0]) != [0]:
                raise ValueError("chunks out of order, or not from the beginning on")
            if rows.wishes and rows.wishes[0][0] == rows.num_positions and rows.wishes[0][1] in rows.held:
                raise ValueError("a row is there, and has not got its position")
            for chunk in rows.chunks:
                holders[id(chunk)] = (chunk, holders.get(id(chunk), (chunk, 0))[1] + 1)
        if any(chunk.num_holders != count for chunk, count in holders.values()):
            raise ValueError("a chunk is held by another number of sessions than it says")
        num_held = sum(len(rows.held) * rows.held_bytes for rows in self._rows.values())
        if self.num_bytes != num_held + _total(chunk for chunk, _ in holders.values()):
            raise ValueError("another number of bytes is kept than is counted")
        if self.num_bytes > self.max_bytes:
            raise ValueError("more is kept than is allowed")

    def _add(self, rows: _Rows, payload: Any, num_rows: int) -> None:
        chunk = _Chunk(payload, num_rows * rows.row_bytes + CHUNK_OVERHEAD_BYTES)
        rows.firsts.append(rows.num_positions)
        rows.chunks.append(chunk)
        rows.num_positions += num_rows
        self.num_bytes += chunk.num_bytes

    def _settle(self, rows: _Rows) -> None:
        """Gives committed nodes whose rows are there their positions."""
        parts: list[Part] = []
        while rows.wishes:
            position, name = rows.wishes[0]
            if name not in rows.held or position != rows.num_positions + len(parts):
                break
            rows.wishes.popleft()
            parts.append(Part(rows.held.pop(name), 0, 1))
        if parts:
            self.num_bytes -= len(parts) * rows.held_bytes
            self._add(rows, self._join(parts, rows.row_bytes) if len(parts) > 1 else parts[0].payload, len(parts))

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes:
            self.num_dropped += 1
            self.drop(next(iter(self._rows)))


def _total(chunks: Iterable[_Chunk]) -> int:
    return sum(chunk.num_bytes for chunk in chunks)
