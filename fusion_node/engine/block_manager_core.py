"""Where the KV of every session lies: blocks of slots, reserved before use, shared within one owner, kept contiguous.

Guarantees:

- What an open table reserved is there when it needs it: ``extend`` and ``move`` never fail for want of room. Retained
  tables never stand in the way of that, nor of a new table.
- A slot that two tables can read is changed by neither: a table writes only from its ``floor`` on, and a block that
  holds slots of its own beside shared ones is copied first, or taken from the retained tables that still hold it.
- Blocks are shared within one owner only. A prefix of somebody else is answered exactly as one that never existed:
  sharing between users would let one find out by timing what another has sent.
- A step that needs no new block, or whose next block is free, costs O(1). A new run costs at most two looks at every
  free extent, MAX_DROPPED_FOR_A_RUN blocks of retained tables, and those that must go for there to be room at all.

Assumes: one caller. Slots that are shared are final: the source of a fork or of a prefix writes nothing below it any
more (in a session's log: it is not above ``num_committed``).

What a batch does to the device, in this order: all block copies in the order in which they were returned, then all slot
moves, then the writes of new rows. Within one batch a table moves first and extends second, from the move's
``first_slot`` or above. ``truncate``, ``close`` and ``resize`` come before or after the calls for one batch, never
between them: they would free a block that a move has yet to read.

Accounting. An open table promises itself ``max_blocks - len(blocks)`` blocks. A block with k open holders, of whom w
may still write into it, promises ``min(w, k - 1)`` copies: each writer copies, but the last holder need not. A copy
takes one block and one promise; a holder that closes takes promises away and never adds one. Held blocks and promises
together never exceed the pool. Only a fork in the middle of a block makes w positive: it costs one block more.

States of a table: open, retained (read-only, may vanish at any time), gone. No timers.

Source: paged attention (Kwon et al. 2023), with whole-sequence reservations instead of preemption. Still ugly: a
retained table is dropped as a whole though its front might live on, and whether it is still there tells its owner a
little about how busy the others are, as every cache of bounded size does; who comes under many names can make the
others' retained tables go, at the price of computing as many of its own. The file is long because the calls share one
accounting, and because a third of it is docstrings and checks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fusion_node.errors import LocalProtocolError

BLOCK_SLOTS = 16
"""As in vLLM: a sequence wastes 8 slots on average, and the tables of long sequences stay short."""

MAX_RETAINED_PER_OWNER = 16
"""Conversations of one user whose beginning is kept for the next question."""

MAX_RETAINED = 1024
"""Of all users together. Names cost nothing, so the limit per user bounds nothing, and every retained table is a piece
more between which the free blocks lie. 64 users with all their conversations; beyond, the least recently used go."""

MAX_DROPPED_FOR_A_RUN = 4096
"""Blocks of retained tables that may be dropped, on the event loop, only so that a table lies in one run: 2 to 8 ms, by
their number. A table for which that is not enough begins in a shorter run, and is laid with the next."""

UNDISTURBED_SHARE = 0.125
"""Of the pool: what retained tables hold beyond it, the oldest give up as soon as an open table would lie in pieces.
Simulated with half (three quarters) of the pool reserved and every table retained: 7 % (7 %) of the tables end as one
run without this rule, 99 % (95 %) with it, and retained blocks fill 25 % (14 %) of the pool instead of 63 % (47 %)."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The whole physical block ``target`` takes the content of ``source``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Physical slot ``targets[i]`` takes the content of ``sources[i]``; all are read before any is written."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The reservation does not fit. Nothing has changed."""

    missing_slots: int


@dataclass(slots=True, eq=False)
class _Table:
    """One open table.

    Attributes:
        num_slots: slots in use.
        floor: first slot that this table may write; those below may be shared.
        guard: index of a block that has slots on both sides of the floor and may be held by others too.
        private_from: first slot whose block is certainly ours alone.
        capacity: slots of the blocks we hold.
        runs: (logical slot, physical slot) where each contiguous run begins.
    """

    key: Hashable
    owner: str
    max_slots: int
    max_blocks: int
    num_slots: int = 0
    floor: int = 0
    guard: int | None = None
    private_from: int = 0
    capacity: int = 0
    blocks: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def growth(self) -> int:
        """Blocks that it may still add at its end."""
        return self.max_blocks - len(self.blocks)


@dataclass(slots=True, eq=False)
class _Retained:
    key: Hashable
    owner: str
    blocks: list[int]
    """All of them full."""


class _FreeExtents:
    """The free blocks as maximal ranges, found by either end."""

    def __init__(self) -> None:
        self.stop_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.num_blocks = 0

    def add(self, start: int, stop: int) -> int:
        """Frees ``[start, stop)``. Returns where the extent begins of which that is a part now."""
        if start == stop:
            return start
        self.num_blocks += stop - start
        left = self.start_of.pop(start, None)
        if left is not None:
            start = left
        right = self.stop_of.pop(stop, None)
        if right is not None:
            stop = right
        self.stop_of[start] = stop
        self.start_of[stop] = start
        return start

    def take(self, extent: int, start: int, count: int) -> None:
        """Takes ``count`` blocks from ``start`` on out of the extent that begins at ``extent``."""
        stop = self.stop_of.pop(extent)
        del self.start_of[stop]
        self.num_blocks -= stop - extent
        self.add(extent, start)
        self.add(start + count, stop)


class BlockManager:
    """The block tables of one KV pool.

    Args:
        num_blocks: physical blocks of the pool.
        block_slots: slots of a block; physical slot = block * block_slots + offset.

    Attributes:
        num_looked_at: free extents, and blocks of retained tables, that finding places for runs has taken so far.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_slots: int = BLOCK_SLOTS,
        max_retained_per_owner: int = MAX_RETAINED_PER_OWNER,
        max_retained: int = MAX_RETAINED,
    ) -> None:
        if num_blocks < 0 or block_slots < 1:
            raise LocalProtocolError(f"no pool has {num_blocks} blocks of {block_slots} slots")
        self.num_blocks = num_blocks
        self.block_slots = block_slots
        self.num_looked_at = 0
        self._max_retained_per_owner = max_retained_per_owner
        self._max_retained = max_retained
        self._tables: dict[Hashable, _Table] = {}
        self._retained: dict[tuple[str, Hashable], _Retained] = {}
        """Least recently retained or reused first."""
        self._retained_of: dict[str, dict[Hashable, _Retained]] = {}
        """The same tables by owner, in the same order."""
        self._holders: dict[int, int] = {}
        """Block -> open tables that hold it."""
        self._keepers: dict[int, int] = {}
        """Block -> retained tables that hold it."""
        self._writers: dict[int, int] = {}
        """Block -> open tables that guard it; only blocks that a fork cut in two."""
        self._promised = 0
        self._tails: dict[int, _Table] = {}
        """Last block of a table -> the table that will want the blocks behind it."""
        self._free = _FreeExtents()
        self._free.add(0, num_blocks)

    @property
    def free_slots(self) -> int:
        """What a new table could reserve, in whole blocks."""
        return self._num_available * self.block_slots

    @property
    def reserved_slots(self) -> int:
        """What the open tables hold or may still ask for; shared blocks once."""
        return (len(self._holders) + self._promised) * self.block_slots

    @property
    def used_blocks(self) -> int:
        """Blocks that an open or a retained table holds."""
        return self.num_blocks - self._free.num_blocks

    @property
    def held_blocks(self) -> int:
        """Blocks that open tables hold."""
        return len(self._holders)

    @property
    def evictable_blocks(self) -> int:
        """Blocks that only retained tables hold."""
        return self.num_blocks - self._free.num_blocks - len(self._holders)

    @property
    def num_open(self) -> int:
        """Open tables."""
        return len(self._tables)

    @property
    def num_retained(self) -> int:
        """Retained tables."""
        return len(self._retained)

    def open(
        self, key: Hashable, *, owner: str, max_slots: int, prefix: tuple[Hashable, int] | None = None
    ) -> int | NoRoom:
        """Reserves room for a new table.

        Args:
            prefix: the key of an open or retained table of the same owner, and how many of its first slots to share.
                They must be final, see the head of this file. The key of anything else is no error and shares nothing.

        Returns:
            How many slots are shared, a multiple of ``block_slots``; or what is missing.

        Raises:
            LocalProtocolError: the key is open, or no slot is asked for.
        """
        self._check_new(key, max_slots)
        table = _Table(key, owner, max_slots, -(-max_slots // self.block_slots))
        blocks: list[int] = []
        source: _Table | None = None
        if prefix is not None:
            source = self._tables.get(prefix[0])
            if source is not None and source.owner != owner:
                source = None
            retained = self._retained.get((owner, prefix[0])) if source is None else None
            # A block is shared whole or not at all: up to 15 rows computed again cost less than a copy per open, and
            # the table goes on right behind the shared blocks instead of in a copy elsewhere.
            wanted = max(0, min(prefix[1], max_slots))
            if source is not None:
                blocks = source.blocks[: min(wanted, source.num_slots) // self.block_slots]
            elif retained is not None:
                blocks = retained.blocks[: wanted // self.block_slots]
        # Who reads a retained block that a fork may still write makes that fork copy it.
        copies = 0 if source is not None else sum(self._holders.get(b) == self._writers.get(b, 0) for b in blocks)
        missing = self._missing(table, blocks, copies=copies)
        if missing is not None:
            return missing
        num_shared = len(blocks) * self.block_slots
        if blocks and source is not None:
            self._raise_floor(source, num_shared)
        elif blocks and prefix is not None:
            self._touch(owner, prefix[0])
        self._add(table, blocks, num_shared)
        return num_shared

    def fork(self, key: Hashable, new_key: Hashable, *, num_slots: int, max_slots: int) -> int | NoRoom:
        """Opens a table of the same owner that begins with all of the first ``num_slots`` slots of another.

        Both may write only from ``num_slots`` on afterwards. A block that lies on both sides of ``num_slots`` is shared
        too, and copied by whoever writes into it first: one block more is reserved for that.

        Returns:
            ``num_slots``; or what is missing.

        Raises:
            LocalProtocolError: unknown key, new key open, or more slots than the source has or the fork may have.
        """
        source = self._table(key)
        self._check_new(new_key, max_slots)
        if not 0 <= num_slots <= min(source.num_slots, max_slots):
            raise LocalProtocolError(f"cannot fork {num_slots} of {source.num_slots} slots into {max_slots}")
        table = _Table(new_key, source.owner, max_slots, -(-max_slots // self.block_slots))
        blocks = source.blocks[: -(-num_slots // self.block_slots)]
        missing = self._missing(table, blocks, copies=1 if num_slots % self.block_slots else 0)
        if missing is not None:
            return missing
        self._raise_floor(source, num_slots)
        self._add(table, blocks, num_slots)
        return num_slots

    def extend(self, key: Hashable, num_slots: int, *, first_written: int) -> tuple[BlockCopy, ...]:
        """The table has ``num_slots`` slots afterwards, of which those from ``first_written`` on may be written.

        It may have had more before; their blocks stay until ``truncate``.

        Raises:
            LocalProtocolError: unknown key, more than was reserved, slots that are shared, or a gap.
        """
        table = self._tables.get(key)
        if table is None:
            raise LocalProtocolError("no such block table is open")
        if not first_written <= table.num_slots or not first_written <= num_slots:
            raise LocalProtocolError(f"slots {table.num_slots} to {first_written} would hold nothing")
        if first_written >= table.private_from and num_slots <= table.capacity and num_slots <= table.max_slots:
            table.num_slots = num_slots
            return ()
        if num_slots > table.max_slots:
            raise LocalProtocolError(f"slot {num_slots} is beyond the {table.max_slots} that were reserved")
        copies = self._make_private(table, first_written, num_slots)
        self._grow(table, -(-num_slots // self.block_slots) - len(table.blocks))
        table.num_slots = num_slots
        return copies

    def move(self, key: Hashable, first_slot: int, sources: Sequence[int]) -> tuple[tuple[BlockCopy, ...], SlotMove]:
        """Slot ``first_slot + i`` takes the content of slot ``sources[i]``, as a KVMove says. No slot is added.

        Raises:
            LocalProtocolError: unknown key, slots that are shared, or slots that the table does not have.
        """
        table = self._table(key)
        stop = first_slot + len(sources)
        if stop > table.num_slots or (sources and not 0 <= min(sources) <= max(sources) < table.num_slots):
            raise LocalProtocolError(f"a move within {table.num_slots} slots leaves them")
        copies = self._make_private(table, first_slot, stop)
        size, blocks = self.block_slots, table.blocks
        pairs = [(s, t) for t, s in enumerate(sources, start=first_slot) if s != t]
        return copies, SlotMove(
            tuple([blocks[s // size] * size + s % size for s, _ in pairs]),
            tuple([blocks[t // size] * size + t % size for _, t in pairs]),
        )

    def truncate(self, key: Hashable, num_slots: int) -> None:
        """Forgets the slots from ``num_slots`` on and frees the blocks that hold nothing else. The reservation stays.

        Raises:
            LocalProtocolError: unknown key, or slots that are shared.
        """
        table = self._table(key)
        if num_slots < table.floor:
            raise LocalProtocolError(f"the first {table.floor} slots are shared and cannot be cut to {num_slots}")
        num_blocks = -(-num_slots // self.block_slots)
        # Everything behind the floor's block is ours alone, so each of these blocks is free now.
        cut = table.blocks[num_blocks:]
        if cut:
            self._untail(table)
            del table.blocks[num_blocks:]
            table.capacity = num_blocks * self.block_slots
            while table.runs and table.runs[-1][0] >= table.capacity:
                table.runs.pop()
            if table.blocks:
                self._tails.setdefault(table.blocks[-1], table)
            self._promised += len(cut)
            for block in cut:
                del self._holders[block]
            self._release(cut)
        table.num_slots = min(table.num_slots, num_slots)

    def close(self, key: Hashable, *, retain: bool = False) -> None:
        """Ends a table and its reservation.

        Args:
            retain: its full blocks stay as a prefix for the same owner's next tables until the room is needed. All its
                slots must be final: truncate to those that are, first.

        Raises:
            LocalProtocolError: unknown key.
        """
        table = self._table(key)
        kept = table.blocks[: table.num_slots // self.block_slots] if retain else []
        for block in kept:
            self._keepers[block] = self._keepers.get(block, 0) + 1
        self._untail(table)
        self._set_guard(table, None)
        self._promised -= table.growth
        self._drop_holder(table.blocks)
        del self._tables[key]
        if kept:
            self._retain(_Retained(key, table.owner, kept))

    def is_retained(self, key: Hashable, *, owner: str) -> bool:
        """Whether a retained table of that key and owner is still there."""
        return (owner, key) in self._retained

    def release(self, key: Hashable, *, owner: str) -> None:
        """Drops a retained table; does nothing when it is not there any more."""
        retained = self._retained.get((owner, key))
        if retained is not None:
            self._unretain(retained)

    def runs(self, key: Hashable, num_slots: int, *, first: int = 0) -> tuple[range, ...]:
        """Physical slots of the logical slots ``[first, num_slots)`` in logical order; neighbours are merged.

        Raises:
            LocalProtocolError: unknown key, or slots that have no block yet.
        """
        table = self._tables.get(key)
        if table is None or not 0 <= first <= num_slots <= table.capacity:
            raise LocalProtocolError(f"no open block table has slots {first} to {num_slots}")
        if first == num_slots:
            return ()
        runs = table.runs
        if len(runs) == 1:
            start = runs[0][1]
            return (range(start + first, start + num_slots),)
        result = []
        for index in range(bisect_right(runs, first, key=_logical) - 1, len(runs)):
            logical, physical = runs[index]
            if logical >= num_slots:
                break
            stop = runs[index + 1][0] if index + 1 < len(runs) else num_slots
            shift = physical - logical
            result.append(range(max(first, logical) + shift, min(stop, num_slots) + shift))
        return tuple(result)

    def slots(self, key: Hashable, first: int, stop: int) -> list[int]:
        """Physical slots of the logical slots ``[first, stop)``, one by one. Raises as ``runs`` does."""
        return [slot for run in self.runs(key, stop, first=first) for slot in run]

    def evict(self, num_blocks: int) -> int:
        """Drops retained tables, the least recently used first, until ``num_blocks`` are free that were not.

        Returns:
            How many were freed; fewer when no more are evictable.
        """
        before = self._free.num_blocks
        victims = self._victims()
        while self._free.num_blocks - before < num_blocks and self.evictable_blocks:
            self._unretain(next(victims))
        return self._free.num_blocks - before

    def resize(self, num_blocks: int) -> tuple[BlockCopy, ...]:
        """Raises or lowers ``num_blocks``, never below what is reserved: read the attribute for what it has become.

        Retained tables go first. What lies behind the new end moves in front of it, so that the end of the pool's
        memory can be given back once the copies are done.
        """
        old = self.num_blocks
        new = max(num_blocks, len(self._holders) + self._promised)
        if new >= old:
            self._free.add(old, new)
            self.num_blocks = new
            return ()
        self.evict(self.used_blocks - new)
        for start, stop in list(self._free.stop_of.items()):
            if stop > new:
                self._free.take(start, max(start, new), stop - max(start, new))
        moved: dict[int, int] = {}
        for blocks in self._block_lists():
            behind = [block for block in blocks if block >= new and block not in moved]
            target = -1
            for index, block in enumerate(behind):
                extent = target = target + 1
                if index == 0 or target not in self._free.stop_of:
                    extent, target, _ = self._find(len(behind) - index, self._free.stop_of.items())
                self._free.take(extent, target, 1)
                moved[block] = target
        self.num_blocks = new
        if moved:
            self._relocate(moved)
        return tuple([BlockCopy(source, target) for source, target in moved.items()])

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant is broken. For tests and diagnosis; O(blocks in use)."""
        self._check_free()
        self._check_tables()
        self._check_retained()
        self._check_counts()

    # --- reservations and sharing

    @property
    def _num_available(self) -> int:
        return self.num_blocks - len(self._holders) - self._promised

    def _table(self, key: Hashable) -> _Table:
        table = self._tables.get(key)
        if table is None:
            raise LocalProtocolError("no such block table is open")
        return table

    def _check_new(self, key: Hashable, max_slots: int) -> None:
        if key in self._tables:
            raise LocalProtocolError("a block table of that key is open")
        if max_slots < 1:
            raise LocalProtocolError(f"a block table of {max_slots} slots holds nothing")

    def _missing(self, table: _Table, shared: Sequence[int], *, copies: int) -> NoRoom | None:
        # A shared block that no open table held so far was evictable, so it counts as new. A guard that an open source
        # loses by this changes no promise: all holders of its block are writers as long as the source is one.
        num_new = sum(block not in self._holders for block in shared)
        missing = table.max_blocks - len(shared) + num_new + copies - self._num_available
        return NoRoom(missing * self.block_slots) if missing > 0 else None

    def _add(self, table: _Table, blocks: list[int], num_shared: int) -> None:
        for block in blocks:
            self._count(block, holders=1)
        table.blocks = blocks
        table.num_slots = table.floor = num_shared
        self._set_guard(table, num_shared // self.block_slots if num_shared % self.block_slots else None)
        self._promised += table.growth
        self._tables[table.key] = table
        self._refresh(table)

    def _raise_floor(self, table: _Table, num_slots: int) -> None:
        """Others share the first ``num_slots`` slots of this table from now on."""
        table.floor = max(table.floor, num_slots)
        index, beyond = divmod(num_slots, self.block_slots)
        if beyond and table.floor // self.block_slots == index:
            self._set_guard(table, index)
        elif table.floor == num_slots:
            self._set_guard(table, None)

    def _set_guard(self, table: _Table, guard: int | None) -> None:
        if guard != table.guard:
            if table.guard is not None:
                self._count(table.blocks[table.guard], writers=-1)
            if guard is not None:
                self._count(table.blocks[guard], writers=1)
        table.guard = guard
        table.private_from = table.floor if guard is None else (guard + 1) * self.block_slots

    def _count(self, block: int, *, holders: int = 0, writers: int = 0) -> None:
        """Changes who holds and who may write a block, and with it how many copies it promises."""
        k, w = self._holders.get(block, 0), self._writers.get(block, 0)
        before = min(w, max(0, k - 1))
        k, w = k + holders, w + writers
        self._promised += min(w, max(0, k - 1)) - before
        _store(self._holders, block, k)
        _store(self._writers, block, w)

    def _make_private(self, table: _Table, first: int, stop: int) -> tuple[BlockCopy, ...]:
        """Makes the slots ``[first, stop)`` ours alone, as far as they have blocks."""
        if first < table.floor:
            raise LocalProtocolError(f"slot {first} is shared: this table may write from {table.floor} on")
        if table.guard is None or first >= table.private_from or first == stop:
            return ()
        guard, block = table.guard, table.blocks[table.guard]
        if self._holders[block] == 1:
            # No other open table: what retained ones keep of it yields, so that this costs neither room nor a copy.
            self._set_guard(table, None)
            if block in self._keepers:
                self._forget_block(table.owner, guard, block)
            return ()
        is_last = guard == len(table.blocks) - 1
        self._untail(table)
        self._set_guard(table, None)
        self._count(block, holders=-1)
        extent, copy = self._place(1 + table.growth if is_last else 1)
        self._free.take(extent, copy, 1)
        self._holders[copy] = 1
        table.blocks[guard] = copy
        self._refresh(table)
        return (BlockCopy(block, copy),)

    def _forget_block(self, owner: str, index: int, block: int) -> None:
        """Cuts the owner's retained tables before a block that is about to be written."""
        for retained in list(self._retained_of[owner].values()):
            if index < len(retained.blocks) and retained.blocks[index] == block:
                cut = retained.blocks[index:]
                del retained.blocks[index:]
                if not retained.blocks:
                    self._unlist(retained)
                self._drop_keeper(cut)

    def _drop_holder(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._writers:
                self._count(block, holders=-1)
            else:
                _store(self._holders, block, self._holders[block] - 1)
        self._release(blocks)

    def _drop_keeper(self, blocks: Sequence[int]) -> list[int]:
        """Returns where the free extents begin that have grown by this."""
        for block in blocks:
            _store(self._keepers, block, self._keepers[block] - 1)
        return self._release(blocks)

    # --- retained tables

    def _retain(self, retained: _Retained) -> None:
        ours = self._retained_of.setdefault(retained.owner, {})
        old = ours.get(retained.key)
        if old is not None:
            self._unretain(old)
            ours = self._retained_of.setdefault(retained.owner, {})
        ours[retained.key] = retained
        self._retained[retained.owner, retained.key] = retained
        if len(ours) > self._max_retained_per_owner:
            self._unretain(next(iter(ours.values())))
        elif len(self._retained) > self._max_retained:
            self._unretain(next(iter(self._retained.values())))

    def _touch(self, owner: str, key: Hashable) -> None:
        self._retained[owner, key] = self._retained.pop((owner, key))
        ours = self._retained_of[owner]
        ours[key] = ours.pop(key)

    def _victims(self) -> Iterator[_Retained]:
        """The retained tables that hold an evictable block, the oldest first; each is to be dropped when it is taken.

        Raises:
            LocalProtocolError: there is none any more.
        """
        for retained in list(self._retained.values()):
            # Who holds a block holds all before it, so the last one tells whether any is held by retained tables only.
            if retained.blocks[-1] not in self._holders:
                yield retained
        raise LocalProtocolError("blocks are promised that are not there")

    def _unretain(self, retained: _Retained) -> list[int]:
        """Returns where the free extents begin that have grown by this."""
        self._unlist(retained)
        return self._drop_keeper(retained.blocks)

    def _unlist(self, retained: _Retained) -> None:
        del self._retained[retained.owner, retained.key]
        ours = self._retained_of[retained.owner]
        del ours[retained.key]
        if not ours:
            del self._retained_of[retained.owner]

    # --- placement

    def _grow(self, table: _Table, count: int) -> None:
        """Adds blocks at the end: behind the last one if that is free, else where all that may still come fits."""
        if count <= 0:
            return
        victims = self._victims()
        while self._free.num_blocks < count:
            self._unretain(next(victims))
        self._untail(table)
        size, blocks = self.block_slots, table.blocks
        while count:
            behind = blocks[-1] + 1 if blocks else -1
            extent = start = behind
            if behind not in self._free.stop_of:
                extent, start = self._place(table.growth)
            # An eviction may just have freed the block behind.
            if start != behind or not blocks:
                table.runs.append((len(blocks) * size, start * size))
            taken = min(count, self._free.stop_of[extent] - start)
            self._free.take(extent, start, taken)
            blocks.extend(range(start, start + taken))
            for block in range(start, start + taken):
                self._holders[block] = 1
            self._promised -= taken
            count -= taken
        table.capacity = len(blocks) * size
        self._tails[blocks[-1]] = table

    def _place(self, wanted: int) -> tuple[int, int]:
        """Where a run of up to ``wanted`` blocks begins: the free extent, and the block in it.

        Retained tables make room: as many as it takes to have a block at all, and to have a whole run as long as they
        hold more than their share and little enough has been dropped for it.
        """
        extent, start, fits = self._find(wanted, self._free.stop_of.items())
        if fits:
            return extent, start
        must, num_dropped = start < 0, 0
        victims = self._victims()
        while must or (
            num_dropped < MAX_DROPPED_FOR_A_RUN and self.evictable_blocks > UNDISTURBED_SHARE * self.num_blocks
        ):
            victim = next(victims)
            num_dropped += len(victim.blocks)
            # What did not fit before fits only where something was freed now.
            stop_of = self._free.stop_of
            grown = [(first, stop_of[first]) for first in self._unretain(victim) if first in stop_of]
            extent, start, fits = self._find(wanted, grown)
            if fits:
                break
            must = must and not grown
        self.num_looked_at += num_dropped
        return (extent, start) if fits else self._find(wanted, self._free.stop_of.items())[:2]

    def _find(self, wanted: int, extents: Collection[tuple[int, int]]) -> tuple[int, int, bool]:
        """The smallest of the extents that has ``wanted`` blocks behind what the table in front of it may still add.

        If there is none, the place with the most room behind it, half of the extent being left to the table in front.
        """
        self.num_looked_at += len(extents)
        best = widest = (-1, -1)
        best_room = widest_room = 0
        tails = self._tails
        for start, stop in extents:
            neighbour = tails.get(start - 1)
            claim = 0 if neighbour is None else neighbour.growth
            room = stop - start - claim
            if room >= wanted:
                if best_room == 0 or room < best_room:
                    best, best_room = (start, start + claim), room
            elif best_room == 0:
                at = start + min(claim, (stop - start) // 2)
                if stop - at > widest_room:
                    widest, widest_room = (start, at), stop - at
        return (*best, True) if best_room else (*widest, False)

    def _untail(self, table: _Table) -> None:
        if table.blocks and self._tails.get(table.blocks[-1]) is table:
            del self._tails[table.blocks[-1]]

    def _refresh(self, table: _Table) -> None:
        """Derives anew what follows from the table's blocks. O(blocks): not for growing."""
        table.capacity = len(table.blocks) * self.block_slots
        table.runs = self._runs_of(table.blocks)
        if table.blocks:
            self._tails.setdefault(table.blocks[-1], table)

    def _runs_of(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        size = self.block_slots
        return [
            (index * size, block * size)
            for index, block in enumerate(blocks)
            if index == 0 or block != blocks[index - 1] + 1
        ]

    def _release(self, blocks: Sequence[int]) -> list[int]:
        """Frees those of the blocks that nobody holds any more.

        Returns:
            Where the free extents begin that have grown; some may have become part of another since.
        """
        holders, keepers = self._holders, self._keepers
        start = stop = 0
        grown: list[int] = []
        for block in blocks:
            if block in holders or block in keepers:
                continue
            if block != stop:
                if start != stop:
                    grown.append(self._free.add(start, stop))
                start = block
            stop = block + 1
        if start != stop:
            grown.append(self._free.add(start, stop))
        return grown

    def _block_lists(self) -> Iterator[list[int]]:
        for table in self._tables.values():
            yield table.blocks
        for retained in self._retained.values():
            yield retained.blocks

    def _relocate(self, moved: dict[int, int]) -> None:
        for counts in (self._holders, self._keepers, self._writers):
            for source, target in moved.items():
                if source in counts:
                    counts[target] = counts.pop(source)
        for retained in self._retained.values():
            retained.blocks = [moved.get(block, block) for block in retained.blocks]
        self._tails.clear()
        for table in self._tables.values():
            table.blocks = [moved.get(block, block) for block in table.blocks]
            self._refresh(table)

    # --- integrity

    def _check_free(self) -> None:
        free = self._free
        if free.start_of != {stop: start for start, stop in free.stop_of.items()}:
            raise ValueError("the two views of the free extents differ")
        end = -1
        for start, stop in sorted(free.stop_of.items()):
            if not end < start < stop <= self.num_blocks:
                raise ValueError(f"free extent [{start}, {stop}) overlaps or touches another, or leaves the pool")
            end = stop
            if any(block in self._holders or block in self._keepers for block in range(start, stop)):
                raise ValueError(f"a block of the free extent [{start}, {stop}) is in use")
        if free.num_blocks != sum(stop - start for start, stop in free.stop_of.items()):
            raise ValueError("the free blocks do not add up")
        used = self._holders.keys() | self._keepers.keys()
        if len(used) + free.num_blocks != self.num_blocks:
            raise ValueError("a block is neither free nor used")
        if used and not 0 <= min(used) <= max(used) < self.num_blocks:
            raise ValueError("a block in use lies outside the pool")

    def _check_tables(self) -> None:
        size = self.block_slots
        for table in self._tables.values():
            blocks = table.blocks
            if len(set(blocks)) != len(blocks):
                raise ValueError("a table holds a block twice")
            if not table.floor <= table.num_slots <= min(table.capacity, table.max_slots):
                raise ValueError("a table has more slots than it may, or fewer than it shares")
            if table.capacity != len(blocks) * size or len(blocks) > table.max_blocks:
                raise ValueError("a table holds more blocks than it reserved")
            if table.runs != self._runs_of(blocks):
                raise ValueError("the runs of a table are not those of its blocks")
            first_private, private_from = table.floor // size, table.floor
            if table.guard is not None:
                first_private, private_from = table.guard + 1, (table.guard + 1) * size
                if table.guard != table.floor // size or not table.floor % size:
                    raise ValueError("a table guards a block that its floor does not cut")
            if table.private_from != private_from:
                raise ValueError("a table is wrong about which slots are its own")
            for block in blocks[first_private:]:
                if self._holders[block] != 1 or block in self._keepers:
                    raise ValueError(f"block {block} can be written by one table and read by another")
        for block, tail in self._tails.items():
            if self._tables.get(tail.key) is not tail or tail.blocks[-1] != block:
                raise ValueError(f"block {block} is not the last one of that table")

    def _check_retained(self) -> None:
        by_owner: dict[str, list[Hashable]] = {}
        for (owner, key), retained in self._retained.items():
            by_owner.setdefault(owner, []).append(key)
            if (retained.owner, retained.key) != (owner, key) or not retained.blocks:
                raise ValueError("a retained table is empty or listed under another name")
        if {owner: list(ours) for owner, ours in self._retained_of.items()} != by_owner:
            raise ValueError("the two views of the retained tables differ")
        if any(len(keys) > self._max_retained_per_owner for keys in by_owner.values()):
            raise ValueError("an owner has too many retained tables")
        if len(self._retained) > self._max_retained:
            raise ValueError("there are too many retained tables")

    def _check_counts(self) -> None:
        owners: dict[int, str] = {}
        places: dict[int, int] = {}
        tables = self._tables.values()
        named = [(table.owner, table.blocks) for table in tables]
        named += [(retained.owner, retained.blocks) for retained in self._retained.values()]
        for owner, blocks in named:
            for index, block in enumerate(blocks):
                if owners.setdefault(block, owner) != owner:
                    raise ValueError(f"block {block} is shared between owners")
                if places.setdefault(block, index) != index:
                    raise ValueError(f"block {block} is shared at two places")
        if self._holders != _tally(table.blocks for table in tables):
            raise ValueError("the open holders of the blocks do not add up")
        if self._keepers != _tally(retained.blocks for retained in self._retained.values()):
            raise ValueError("the retained holders of the blocks do not add up")
        if self._writers != _tally([t.blocks[t.guard]] for t in tables if t.guard is not None):
            raise ValueError("the writers of the blocks do not add up")
        copies = sum(min(writers, self._holders[block] - 1) for block, writers in self._writers.items())
        if self._promised != copies + sum(table.growth for table in tables):
            raise ValueError("the promises do not add up")
        if self._num_available < 0:
            raise ValueError("more is reserved than there is")


def _logical(run: tuple[int, int]) -> int:
    return run[0]


def _store(counts: dict[int, int], block: int, count: int) -> None:
    if count:
        counts[block] = count
    else:
        counts.pop(block, None)


def _tally(blocks: Iterable[Iterable[int]]) -> dict[int, int]:
    return dict(Counter(block for some in blocks for block in some))
