"""One session's log as a stage applies it: which rows to compute, at which position and KV slot, and what each may see.

Guarantees: entries are applied in order, each exactly once; the same log gives the same tree on every stage. Slots
``[0, num_committed)`` hold the committed prefix by position; live uncommitted nodes follow, in order of their ids,
without gaps. No more than ``max_positions`` slots are ever in use. What is skipped is never committed.

Assumes: one caller; frames of one link arrive in order (the link guarantees it); of a reused prefix the KV is there.

A replayed entry may stand for several (``covers``), or for none where it holds rows of a reused prefix. Nothing can be
skipped by that: it must be the next positions of a log that is *plain*, so that its position counts and not its
number; it stands for no more entries than it has rows; and for none only while no entry has been applied.

States of a node: unknown, live (registered, not committed), skipped (live by the log, and never computed here, because
its row has not come or its user has cancelled it; it has no slot, and neither it nor its children are seen), committed,
dead. Node 0 is the empty prefix, committed from the start; a session that reuses p positions begins with the nodes 1 to
p committed. ``ADVANCE(x)`` commits x and its ancestors; live nodes that do not descend from x die. A *cancel* of root x
says that only nodes that lead to x or descend from it can be committed: of those that come later, others are skipped.

A *fold* ends the tree: what lies along a given path is committed, all other live nodes die, and the log is plain from
then on, with an entry per position. KV that has to be moved for it is moved with the next entry.

No timers. Source: the token tree as a replicated log, docs/protocol-data-plane.md. Still ugly: a step's rows are
described by Python ints (ancestor sets as bit masks), which is fine up to some thousand rows per step.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    SKIPPED_ADVANCE = "skipped-advance"
    """ADVANCE names a node whose row did not come."""
    CANCELLED_ADVANCE = "cancelled-advance"
    """ADVANCE names a node that the user itself has cancelled."""
    BAD_LIVE = "bad-live"
    """A row has come of a node whose parent's did not."""
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
        live_rows: indices into the rows that have come, of those that are to be computed.
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
        committed: nodes that the step commits, at the last positions below ``num_final``.
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
    committed: tuple[int, ...] = ()

    @property
    def commits_all(self) -> bool:
        """Whether the step commits what is computed of it, and nothing else."""
        return self.committed == self.nodes


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The step was applied before; nothing to do."""


class _Node(NamedTuple):
    parent: int
    position: int


class _Skipped(NamedTuple):
    parent: int
    is_cancelled: bool
    """By the user, or below such a one; else its row did not come."""


@dataclass(frozen=True, slots=True)
class LogState:
    """All that a log knows at one moment, to be compared or gone back to."""

    next_sequence: int
    num_committed: int
    root: int
    last_node: int
    live: dict[int, _Node]
    skipped: dict[int, _Skipped]
    kept_root: int
    awaited_root: int
    deferred: KVMove | None
    num_dirty: int


_NO_LIVE: dict[int, _Node] = {}
_NO_SKIPPED: dict[int, _Skipped] = {}
_NOTHING: frozenset[int] = frozenset()


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
    is_untouched: bool = field(default=True, init=False)
    """Whether nothing was applied: only what is reused is there."""
    _num_reused: int = field(init=False)
    _root: int = field(init=False)
    _last_node: int = field(init=False)
    _live: dict[int, _Node] = field(default_factory=dict, init=False)
    """In order of ids; the slot of a live node is num_committed plus its rank."""
    _skipped: dict[int, _Skipped] = field(default_factory=dict, init=False)
    _kept_root: int = field(default=0, init=False)
    """The live node that everything to come leads to or descends from, by the user's word; 0 for none."""
    _awaited_root: int = field(default=0, init=False)
    """The highest of those that are not known yet; 0 for none."""
    _barren: frozenset[int] = field(default=_NOTHING, init=False)
    """All but the kept root and its descendants: the log's root, and live nodes. What hangs on them is skipped."""
    _deferred: KVMove | None = field(default=None, init=False)
    _num_dirty: int = field(default=0, init=False)
    """Slots that steps before a fold may still read and write."""

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

    def is_live(self, node: int) -> bool:
        """Whether a node can still be committed, and has a row here."""
        return node in self._live

    def state(self) -> LogState:
        """What it is now. Two stages that have applied the same log without cancels are in equal states."""
        return LogState(
            self.next_sequence,
            self.num_committed,
            self._root,
            self._last_node,
            dict(self._live) if self._live else _NO_LIVE,
            dict(self._skipped) if self._skipped else _NO_SKIPPED,
            self._kept_root,
            self._awaited_root,
            self._deferred,
            self._num_dirty,
        )

    def restore(self, state: LogState) -> None:
        """Goes back to an earlier state of this log, before entries of which nothing has been computed.

        These must be applied again, each with ``only`` what was to be computed of it before. Cancels remain.
        """
        kept, awaited = self._kept_root, self._awaited_root
        self._set(state)
        if kept in self._live:
            self._kept_root, self._awaited_root = kept, awaited
        elif kept > self._last_node:
            self._awaited_root = kept
        else:
            self._awaited_root = awaited
        self._note_barren()

    def _set(self, state: LogState) -> None:
        self.next_sequence, self.num_committed = state.next_sequence, state.num_committed
        self._root, self._last_node = state.root, state.last_node
        self._live, self._skipped = dict(state.live), dict(state.skipped)
        self._kept_root, self._awaited_root = state.kept_root, state.awaited_root
        self._deferred, self._num_dirty = state.deferred, state.num_dirty
        self._note_barren()

    def declines_prefix(self, parent: int, parents: Sequence[int]) -> bool:
        """Whether this would be the first entry of a session that reuses a prefix, and hangs on the empty one instead.

        The stages do not reuse the same then. The caller replaces this log by an empty one.
        """
        return self.is_untouched and self._num_reused > 0 and 0 in (parents or (parent,))

    def cancel(self, root: int) -> bool:
        """The user says that only nodes that lead to ``root`` or descend from it matter. Returns whether that is news.

        Nothing of what was applied is changed; see ``restore``. Of roots that are not known yet, the highest is
        remembered: later ones descend from earlier ones. One that contradicts an earlier one is ignored.
        """
        if root > self._last_node:
            is_news = root > self._awaited_root
            self._awaited_root = max(root, self._awaited_root)
            return is_news
        return self._keep(root)

    def _keep(self, root: int) -> bool:
        above = root
        while above in self._live and above != self._kept_root:
            above = self._live[above].parent
        if root not in self._live or root == self._kept_root or (self._kept_root and above != self._kept_root):
            return False
        self._kept_root = root
        self._note_barren()
        return True

    def fits(self, path_start: int, path: Sequence[int]) -> bool:
        """Whether the committed prefix is that of which ``path`` are the nodes from a position on.

        A plain log fits always: its ids are positions, and may be newer than the path.
        """
        index = self.num_committed - path_start - 1
        return self.is_plain or not path or index < 0 or (index < len(path) and path[index] == self._root)

    def fold(self, path_start: int, path: Sequence[int]) -> tuple[int, ...]:
        """Commits what is live along a path that fits, drops the rest, and makes the log plain.

        Afterwards the node of position p is p + 1 and the next sequence is the number of positions. KV of what is
        committed by this may lie elsewhere until the next entry moves it.

        Returns:
            The nodes that were committed, by their ids before.
        """
        run: list[int] = []
        above, num_slots = self._root, self.num_slots
        if not self.is_plain and path_start <= self.num_committed:
            for node in path[self.num_committed - path_start :]:
                if node not in self._live or self._live[node].parent != above:
                    break
                run.append(node)
                above = node
        rank_of = {node: rank for rank, node in enumerate(self._live)}
        sources = [self.num_committed + rank_of[node] for node in run]
        num_in_place = next((i for i, slot in enumerate(sources) if slot != self.num_committed + i), len(sources))
        if num_in_place < len(sources):
            self._deferred = KVMove(self.num_committed + num_in_place, tuple(sources[num_in_place:]))
        self._num_dirty = max(self._num_dirty, num_slots)
        self.num_committed += len(run)
        self._root = self._last_node = self.next_sequence = self.num_committed
        self._live, self._skipped = {}, {}
        self._kept_root, self._awaited_root, self._barren = 0, 0, _NOTHING
        return tuple(run)

    @property
    def num_in_place(self) -> int:
        """Committed positions whose KV lies in their slots, once what was applied is computed."""
        return self.num_committed if self._deferred is None else self._deferred.first_slot

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
        live: bytes = b"",
        only: Collection[int] | None = None,
    ) -> StepRows | Duplicate | StepFault:
        """Applies one entry: registers the nodes, then advances, then says what to compute.

        A fault leaves the log as it was.

        Args:
            num_rows: new nodes, those without a row included.
            covers: entries that this one stands for.
            live: a bit per node, the lowest of the first byte first: whether its row has come. Empty: all have.
            only: if given, other new nodes count as cancelled.
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
        bits = int.from_bytes(live, "little") if live else None
        fault = self._check(first_node, num_rows, parent, parents, advance, bits)
        if fault is not None:
            return fault
        is_less = only is not None and len(only) < num_rows
        may_skip = bool(self._skipped or live or self._barren or self._awaited_root or is_less)
        before = self.state() if may_skip else None
        move, num_before = self._deferred, max(self.num_slots, self._num_dirty)
        self._deferred, self._num_dirty = None, 0
        self._last_node = last
        self.next_sequence += covers
        if advance == last and not (self._live or may_skip or parents):
            self.is_untouched = False
            return self._append(first_node, num_rows, move, num_before)
        slots_before = {node: self.num_committed + rank for rank, node in enumerate(self._live)}
        for index in range(num_rows):
            above = parents[index] if parents else (parent if index == 0 else first_node + index - 1)
            node, has_row = first_node + index, bits is None or bool(bits >> index & 1)
            self._register(node, above, has_row=has_row, is_cancelled=only is not None and node not in only)
        if 0 < self._awaited_root <= last:
            self._come(first_node)
        if before is not None and advance in self._skipped:
            is_cancelled = self._skipped[advance].is_cancelled
            self._set(before)
            return StepFault.CANCELLED_ADVANCE if is_cancelled else StepFault.SKIPPED_ADVANCE
        self.is_untouched = False
        committed: tuple[int, ...] = ()
        committed_rows: dict[int, int] = {}
        if advance in self._live:
            # After a fold nothing that was there before is live, so that only one of the moves can be.
            moves, committed, committed_rows = self._advance(advance, slots_before, first_node)
            move = moves or move
        # An ADVANCE to a node that is committed or dead was overtaken by a later one: nothing to do.
        return self._rows(first_node, num_rows, committed, committed_rows, move, num_before, bits)

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant of this class is broken. For tests and diagnosis."""
        if self.num_slots > self.max_positions:
            raise ValueError("more slots in use than reserved")
        if list(self._live) != sorted(self._live):
            raise ValueError("live nodes out of order")
        for node, skipped in self._skipped.items():
            if node in self._live or not any(skipped.parent in n for n in ({self._root}, self._live, self._skipped)):
                raise ValueError(f"skipped node {node} is live, or hangs on a dead one")
        for node, entry in self._live.items():
            if entry.parent != self._root and entry.parent not in self._live:
                raise ValueError(f"live node {node} hangs on a dead one, or on one that is skipped")
            above = self.num_committed - 1 if entry.parent == self._root else self._live[entry.parent].position
            if entry.position != above + 1:
                raise ValueError(f"node {node} has position {entry.position} below {above}")

    def _check(
        self, first_node: int, num_nodes: int, parent: int, parents: Sequence[int], advance: int, bits: int | None
    ) -> StepFault | None:
        last = first_node + num_nodes - 1
        for above in parents or (parent,):
            is_known = above == self._root or above in self._live or above in self._skipped
            if not is_known and not first_node <= above <= last:
                return StepFault.UNKNOWN_PARENT
        if advance > last or self._last_node < advance < first_node:
            return StepFault.UNKNOWN_ADVANCE
        num_rows = num_nodes if bits is None else bits.bit_count()
        if (self._skipped or bits is not None) and self._has_orphan(first_node, num_nodes, parent, parents, bits):
            return StepFault.BAD_LIVE
        commits_all = not parents and advance == last and bits is None
        if not commits_all and len(self._live) + len(self._skipped) + num_nodes > MAX_LIVE_NODES:
            return StepFault.TOO_WIDE
        # Checked before anything is freed by the advance: a sender must never count on room it is about to make.
        if self.num_slots + num_rows > self.max_positions:
            return StepFault.OVERFLOW
        return None

    def _has_orphan(
        self, first_node: int, num_nodes: int, parent: int, parents: Sequence[int], bits: int | None
    ) -> bool:
        """Whether a row has come of a node whose parent's did not: who cancels a node cancels what hangs on it."""
        for index in range(num_nodes):
            if bits is not None and not bits >> index & 1:
                continue
            above = parents[index] if parents else (parent if index == 0 else first_node + index - 1)
            if above >= first_node:
                if bits is not None and not bits >> (above - first_node) & 1:
                    return True
            elif above in self._skipped and not self._skipped[above].is_cancelled:
                return True
        return False

    def _register(self, node: int, above: int, *, has_row: bool, is_cancelled: bool) -> None:
        skipped = self._skipped.get(above)
        if skipped is not None:
            self._skipped[node] = _Skipped(above, skipped.is_cancelled)
        elif not has_row:
            self._skipped[node] = _Skipped(above, False)
        elif is_cancelled or above in self._barren:
            self._skipped[node] = _Skipped(above, True)
        else:
            position = self.num_committed - 1 if above == self._root else self._live[above].position
            self._live[node] = _Node(above, position + 1)

    def _note_barren(self) -> None:
        """Finds out what new nodes hang on in vain; a kept root that is committed or dead has had its effect."""
        if self._kept_root not in self._live:
            self._kept_root, self._barren = 0, _NOTHING
            return
        descends = {self._kept_root}
        for node, entry in self._live.items():
            if entry.parent in descends:
                descends.add(node)
        self._barren = frozenset({self._root, *self._live} - descends)

    def _come(self, first_node: int) -> None:
        """The awaited root is there: new nodes that neither lead to it nor descend from it are skipped."""
        root, self._awaited_root = self._awaited_root, 0
        if not self._keep(root):
            return
        leads, node = set(), root
        while node in self._live:
            leads.add(node)
            node = self._live[node].parent
        for node in [n for n in self._live if n >= first_node and n in self._barren and n not in leads]:
            self._skipped[node] = _Skipped(self._live.pop(node).parent, True)
        self._note_barren()

    def _append(self, first_node: int, num_nodes: int, move: KVMove | None, num_before: int) -> StepRows:
        """What ``_rows`` says of a chain that commits itself where nothing else is live: every token's path."""
        nodes = tuple(range(first_node, first_node + num_nodes))
        first_slot = self.num_committed
        self.num_committed += num_nodes
        self._root = self._last_node
        return StepRows(
            live_rows=tuple(range(num_nodes)),
            nodes=nodes,
            positions=tuple(range(first_slot, first_slot + num_nodes)),
            first_slot=first_slot,
            is_chain=True,
            visible=(),
            num_committed=first_slot,
            move=move,
            reuses_slots=first_slot < num_before,
            num_final=self.num_committed,
            committed=nodes,
        )

    def _advance(
        self, target: int, slots_before: dict[int, int], first_node: int
    ) -> tuple[KVMove | None, tuple[int, ...], dict[int, int]]:
        """Commits the path to ``target``. Returns what KV to move, the path, and its new nodes with their positions."""
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
        if self._skipped:
            skipped: dict[int, _Skipped] = {}
            for node in sorted(self._skipped):
                if self._skipped[node].parent in descends or self._skipped[node].parent in skipped:
                    skipped[node] = self._skipped[node]
            self._skipped = skipped
        self.num_committed += len(path)
        self._root = target
        if self._kept_root:
            self._note_barren()
        moves = sources != tuple(range(first_slot, first_slot + len(sources)))
        return (KVMove(first_slot, sources) if moves else None), tuple(path[::-1]), committed_rows

    def _rows(
        self,
        first_node: int,
        num_nodes: int,
        committed: tuple[int, ...],
        committed_rows: dict[int, int],
        move: KVMove | None,
        num_before: int,
        bits: int | None,
    ) -> StepRows:
        live = [n for n in range(first_node, first_node + num_nodes) if n in self._live or n in committed_rows]
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
        came = [node - first_node for node in live]
        if bits is not None:
            came = [(bits & (1 << index) - 1).bit_count() for index in came]
        return StepRows(
            live_rows=tuple(came),
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
            committed=committed,
        )
