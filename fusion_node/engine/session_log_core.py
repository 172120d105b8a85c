"""One session's log as a stage applies it: which rows to compute, at which position and KV slot, and what each may see.

Guarantees: entries are applied in order, each exactly once; the same log gives the same tree on every stage. Slots
``[0, num_committed)`` hold the committed prefix by position; live uncommitted nodes follow, in order of their ids,
without gaps. No more than ``max_positions`` slots are ever in use.

Assumes: one caller; frames of one link arrive in order (the link guarantees it); of a reused prefix the KV is there.

A replayed entry may stand for several (``covers``), or for none where it holds rows of a reused prefix. Nothing can be
skipped by that: it must be the next positions of a log that is *plain*, so that its position counts and not its
number; it stands for no more entries than it has rows; and for none only while no entry has been applied.

States of a node: unknown, live (registered, not committed), committed, dead. Node 0 is the empty prefix, committed from
the start; a session that reuses p positions begins with the nodes 1 to p committed. ``ADVANCE(x)`` commits x and its
ancestors; live nodes that do not descend from x die.

No timers. Source: the token tree as a replicated log, docs/protocol-data-plane.md. Still ugly: a step's rows are
described by Python ints (ancestor sets as bit masks), which is fine up to some thousand rows per step.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LIVE_NODES = 1024
"""Nodes that are neither committed nor dead, after any step but a chain that commits all of itself. Every entry looks
at all of them, on the event loop: some 1 ms for so many. Sixteen trees of 64 nodes in flight."""


class StepFault(enum.StrEnum):
    """Why a step cannot be applied. The session is over on this stage then."""

    GAP = "gap"
    """A sequence number was skipped."""
    BAD_REPLAY = "bad-replay"
    """An entry that stands for another number of entries than one, and is not what such an entry must be."""
    STALE_NODE = "stale-node"
    """A node id is not above all earlier ones."""
    UNKNOWN_PARENT = "unknown-parent"
    """A node hangs on a node that is not live and is not the root."""
    UNKNOWN_ADVANCE = "unknown-advance"
    """ADVANCE names a node that was not registered yet."""
    OVERFLOW = "overflow"
    """More positions than were reserved."""
    TOO_WIDE = "too-wide"
    """More uncommitted nodes than MAX_LIVE_NODES."""


@dataclass(frozen=True, slots=True)
class KVMove:
    """Before the rows are computed: slot ``first_slot + i`` takes the content of slot ``sources[i]``."""

    first_slot: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepRows:
    """What to compute for one step.

    Attributes:
        live_rows: indices into the step's rows that are not dead.
        nodes: node id per live row.
        positions: position per live row, for rotary embedding.
        first_slot: KV slot of the first live row; the others follow without gaps.
        is_chain: every row sees all slots up to its own, so a causal mask is exact.
        visible: unless is_chain, per live row a bit mask of the slots from ``num_committed`` on that it sees.
        num_committed: slots in front that every row sees.
        move: KV to move first, if any.
        live_positions: unless is_chain, the positions of the slots from ``num_committed`` on.
        reuses_slots: slots of earlier steps are moved or taken again, so nothing earlier may be computed with it.
        num_final: once the rows are computed, the slots below this hold the committed prefix and are written no more.
    """

    live_rows: tuple[int, ...]
    nodes: tuple[int, ...]
    positions: tuple[int, ...]
    first_slot: int
    is_chain: bool
    visible: tuple[int, ...]
    num_committed: int
    move: KVMove | None
    live_positions: tuple[int, ...] = ()
    reuses_slots: bool = False
    num_final: int = 0


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The step was applied before; nothing to do."""


@dataclass(slots=True)
class _Node:
    parent: int
    position: int


@dataclass(slots=True)
class SessionLog:
    """The token tree of one session on one stage.

    Args:
        max_positions: KV slots reserved, committed and live together.
        num_committed: positions of a reused prefix, which are there before the first entry.
    """

    max_positions: int
    num_committed: int = 0
    next_sequence: int = field(default=0, init=False)
    _num_reused: int = field(init=False)
    _root: int = field(init=False)
    _last_node: int = field(init=False)
    _live: dict[int, _Node] = field(default_factory=dict, init=False)
    """In order of ids; the slot of a live node is num_committed plus its rank."""

    def __post_init__(self) -> None:
        self._root = self._last_node = self._num_reused = self.num_committed

    @property
    def num_slots(self) -> int:
        """Slots in use."""
        return self.num_committed + len(self._live)

    @property
    def last_node(self) -> int:
        """The highest id that was given out."""
        return self._last_node

    @property
    def is_plain(self) -> bool:
        """Whether the log is a chain all of which is committed, with the node of position p being p + 1.

        Ids only go up, so that there is no room for a gap or a dead node when the last is as high as there are
        committed ones.
        """
        return not self._live and self._last_node == self.num_committed

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was applied: only what is reused is there."""
        return self.next_sequence == 0 and self._last_node == self._num_reused

    def declines_prefix(self, parent: int, parents: Sequence[int]) -> bool:
        """Whether this would be the first entry of a session that reuses a prefix, and hangs on the empty one instead.

        The stages do not reuse the same then. The caller replaces this log by an empty one.
        """
        return self.is_untouched and self._num_reused > 0 and 0 in (parents or (parent,))

    def apply(
        self,
        sequence: int,
        *,
        first_node: int,
        num_rows: int,
        parent: int,
        parents: Sequence[int] = (),
        advance: int = 0,
        covers: int = 1,
    ) -> StepRows | Duplicate | StepFault:
        """Applies one entry: registers the nodes, then advances, then says what to compute.

        A fault leaves the log as it was.

        Args:
            covers: entries that this one stands for.
        """
        if sequence > self.next_sequence:
            return StepFault.GAP
        if sequence < self.next_sequence:
            return Duplicate() if sequence + covers <= self.next_sequence else StepFault.BAD_REPLAY
        if covers == 0 and self.is_plain and first_node + num_rows - 1 <= self.num_committed:
            return Duplicate()
        if first_node <= self._last_node:
            return StepFault.STALE_NODE
        last = first_node + num_rows - 1
        if covers != 1:
            is_next = self.is_plain and not parents and parent == self.num_committed == first_node - 1
            if not (is_next and advance == last and covers <= num_rows and (covers or self.next_sequence == 0)):
                return StepFault.BAD_REPLAY
        fault = self._check(first_node, num_rows, parent, parents, advance)
        if fault is not None:
            return fault
        before, num_before = list(self._live), self.num_slots
        slots_before = {node: self.num_committed + rank for rank, node in enumerate(before)}
        for index in range(num_rows):
            above = parents[index] if parents else (parent if index == 0 else first_node + index - 1)
            position = self.num_committed - 1 if above == self._root else self._live[above].position
            self._live[first_node + index] = _Node(above, position + 1)
        self._last_node = last
        self.next_sequence += covers
        move: KVMove | None = None
        committed_rows: dict[int, int] = {}
        if advance in self._live:
            move, committed_rows = self._advance(advance, slots_before, first_node)
        # An ADVANCE to a node that is committed or dead was overtaken by a later one: nothing to do.
        return self._rows(first_node, num_rows, committed_rows, move, num_before)

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant of this class is broken. For tests and diagnosis."""
        if self.num_slots > self.max_positions:
            raise ValueError("more slots in use than reserved")
        if list(self._live) != sorted(self._live):
            raise ValueError("live nodes out of order")
        for node, entry in self._live.items():
            if entry.parent != self._root and entry.parent not in self._live:
                raise ValueError(f"live node {node} hangs on a dead one")
            above = self.num_committed - 1 if entry.parent == self._root else self._live[entry.parent].position
            if entry.position != above + 1:
                raise ValueError(f"node {node} has position {entry.position} below {above}")

    def _check(
        self, first_node: int, num_rows: int, parent: int, parents: Sequence[int], advance: int
    ) -> StepFault | None:
        last = first_node + num_rows - 1
        for above in parents or (parent,):
            if above != self._root and above not in self._live and not first_node <= above <= last:
                return StepFault.UNKNOWN_PARENT
        if advance > last or self._last_node < advance < first_node:
            return StepFault.UNKNOWN_ADVANCE
        commits_all = not parents and advance == last
        if not commits_all and len(self._live) + num_rows > MAX_LIVE_NODES:
            return StepFault.TOO_WIDE
        # Checked before anything is freed by the advance: a sender must never count on room it is about to make.
        if self.num_slots + num_rows > self.max_positions:
            return StepFault.OVERFLOW
        return None

    def _advance(
        self, target: int, slots_before: dict[int, int], first_node: int
    ) -> tuple[KVMove | None, dict[int, int]]:
        """Commits the path to ``target``. Returns what KV to move, and the path's new nodes with their positions."""
        path = []
        node = target
        while node != self._root:
            path.append(node)
            node = self._live[node].parent
        on_path = set(path)
        descends = {target}
        for node, entry in self._live.items():
            if entry.parent in descends:
                descends.add(node)
        # Ancestors have smaller ids than the target and descendants larger ones, so `kept` begins with the path.
        kept = [node for node in self._live if node in on_path or node in descends]
        sources = tuple(slots_before[node] for node in kept if node < first_node)
        first_slot = self.num_committed
        committed_rows = {node: self._live[node].position for node in kept if node in on_path and node >= first_node}
        self._live = {node: self._live[node] for node in kept if node not in on_path}
        self.num_committed += len(path)
        self._root = target
        moves = sources != tuple(range(first_slot, first_slot + len(sources)))
        return (KVMove(first_slot, sources) if moves else None), committed_rows

    def _rows(
        self, first_node: int, num_rows: int, committed_rows: dict[int, int], move: KVMove | None, num_before: int
    ) -> StepRows:
        live = [n for n in range(first_node, first_node + num_rows) if n in self._live or n in committed_rows]
        positions = [committed_rows[n] if n in committed_rows else self._live[n].position for n in live]
        parents = [entry.parent for entry in self._live.values()]
        chain = parents == [self._root, *self._live][:-1] if parents else True
        visible: list[int] = []
        if not chain:
            masks: dict[int, int] = {}
            for rank, (node, entry) in enumerate(self._live.items(), start=len(committed_rows)):
                above = (1 << len(committed_rows)) - 1 if entry.parent == self._root else masks[entry.parent]
                masks[node] = above | 1 << rank
            # Rows that this very step committed are causal among themselves.
            visible = [masks[n] if n in masks else (2 << index) - 1 for index, n in enumerate(live)]
        return StepRows(
            live_rows=tuple(node - first_node for node in live),
            nodes=tuple(live),
            positions=tuple(positions),
            first_slot=self.num_slots - len(live),
            is_chain=chain,
            visible=tuple(visible),
            num_committed=self.num_committed - len(committed_rows),
            move=move,
            live_positions=()
            if chain
            else (*committed_rows.values(), *(entry.position for entry in self._live.values())),
            reuses_slots=self.num_slots - len(live) < num_before,
            num_final=self.num_committed,
        )
