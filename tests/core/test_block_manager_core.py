"""The block manager against a model of what every slot holds, on a device that only copies, moves and writes."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fusion_node.engine.block_manager_core import (
    BLOCK_SLOTS,
    MAX_DROPPED_FOR_A_RUN,
    BlockCopy,
    BlockManager,
    NoRoom,
    SlotMove,
)
from fusion_node.errors import LocalProtocolError


def opened(manager: BlockManager, key: str, max_slots: int, *, owner: str = "ann", num_slots: int = 0) -> str:
    """A new table that shares nothing and has ``num_slots`` slots."""
    assert manager.open(key, owner=owner, max_slots=max_slots) == 0
    assert manager.extend(key, num_slots, first_written=0) == ()
    manager.check_integrity()
    return key


# --- one operation at a time


def test_open_reserves_whole_blocks_and_close_gives_them_back() -> None:
    manager = BlockManager(4)
    opened(manager, "x", 33)
    assert (manager.free_slots, manager.reserved_slots, manager.used_blocks) == (16, 48, 0)
    manager.close("x")
    assert (manager.free_slots, manager.reserved_slots, manager.num_open) == (64, 0, 0)


def test_open_beyond_the_pool_says_what_is_missing_and_changes_nothing() -> None:
    manager = BlockManager(4)
    opened(manager, "x", 33)
    assert manager.open("y", owner="ben", max_slots=40) == NoRoom(32)
    assert (manager.free_slots, manager.num_open) == (16, 1)
    assert manager.open("y", owner="ben", max_slots=16) == 0


def test_extend_allocates_only_what_is_written() -> None:
    manager = BlockManager(8)
    opened(manager, "x", 128, num_slots=16)
    assert manager.used_blocks == 1
    assert manager.extend("x", 17, first_written=16) == ()
    assert (manager.used_blocks, manager.reserved_slots) == (2, 128)
    assert manager.runs("x", 17) == (range(17),)
    assert manager.slots("x", 15, 17) == [15, 16]


def test_runs_merges_neighbours_and_begins_where_it_is_told() -> None:
    manager = BlockManager(6)
    opened(manager, "x", 16, num_slots=16)
    opened(manager, "y", 16, num_slots=16)
    opened(manager, "z", 16, num_slots=16)
    manager.close("y")
    opened(manager, "w", 64, num_slots=64)
    assert manager.runs("w", 50) == (range(48, 96), range(16, 18))
    assert manager.runs("w", 48) == (range(48, 96),)
    assert manager.runs("w", 64, first=40) == (range(88, 96), range(16, 32))
    assert manager.runs("w", 64, first=48) == (range(16, 32),)
    assert manager.runs("w", 0) == ()
    assert manager.slots("w", 47, 49) == [95, 16]


def test_move_names_physical_slots_and_leaves_out_what_stays() -> None:
    manager = BlockManager(8)
    opened(manager, "x", 16, num_slots=16)
    opened(manager, "y", 64, num_slots=40)
    assert manager.move("y", 20, [20, 25, 33]) == ((), SlotMove((16 + 25, 16 + 33), (16 + 21, 16 + 22)))


def test_truncate_frees_whole_blocks_and_keeps_the_reservation() -> None:
    manager = BlockManager(4)
    opened(manager, "x", 64, num_slots=64)
    manager.truncate("x", 17)
    manager.check_integrity()
    assert (manager.used_blocks, manager.free_slots) == (2, 0)
    assert manager.extend("x", 64, first_written=17) == ()
    assert manager.runs("x", 64) == (range(64),)


def test_fork_of_whole_blocks_shares_them_and_costs_only_the_rest() -> None:
    manager = BlockManager(4)
    opened(manager, "x", 32, num_slots=32)
    assert manager.fork("x", "y", num_slots=32, max_slots=64) == 32
    manager.check_integrity()
    assert (manager.used_blocks, manager.free_slots) == (2, 0)
    assert manager.extend("y", 64, first_written=32) == ()
    assert manager.runs("y", 64) == (range(64),)


def test_fork_in_the_middle_of_a_block_costs_one_block_more() -> None:
    manager = BlockManager(3)
    opened(manager, "x", 32, num_slots=20)
    assert manager.fork("x", "y", num_slots=20, max_slots=33) == NoRoom(16)
    assert manager.free_slots == 16
    assert manager.fork("x", "y", num_slots=20, max_slots=32) == 20
    assert manager.free_slots == 0


def test_first_writer_of_a_forked_block_copies_and_the_last_does_not() -> None:
    manager = BlockManager(3)
    opened(manager, "x", 32, num_slots=20)
    manager.fork("x", "y", num_slots=20, max_slots=32)
    (made,) = manager.extend("y", 21, first_written=20)
    assert made == BlockCopy(1, 2)
    manager.check_integrity()
    assert manager.extend("x", 21, first_written=20) == ()
    assert manager.runs("x", 21) == (range(21),)
    assert manager.runs("y", 21) == (range(16), range(32, 37))


def test_move_into_a_forked_block_copies_it_first_and_reads_the_copy() -> None:
    manager = BlockManager(4)
    opened(manager, "x", 32, num_slots=20)
    manager.fork("x", "y", num_slots=18, max_slots=32)
    copies, move = manager.move("x", 18, [19])
    assert copies == (BlockCopy(1, 2),)
    assert move == SlotMove((2 * 16 + 3,), (2 * 16 + 2,))


def test_closing_one_holder_of_a_forked_block_leaves_it_to_the_other() -> None:
    manager = BlockManager(3)
    opened(manager, "x", 32, num_slots=20)
    manager.fork("x", "y", num_slots=20, max_slots=32)
    manager.close("x")
    manager.check_integrity()
    assert manager.free_slots == 16
    assert manager.extend("y", 32, first_written=20) == ()


def test_reader_of_a_block_that_another_may_write_makes_that_one_copy() -> None:
    manager = BlockManager(4)
    opened(manager, "x", 32, num_slots=32)
    manager.fork("x", "y", num_slots=8, max_slots=16)
    manager.close("x", retain=True)
    # "y" alone would have taken the first block from the retained table; now "z" reads it.
    assert manager.open("z", owner="ann", max_slots=64, prefix=("x", 32)) == NoRoom(16)
    assert manager.open("z", owner="ann", max_slots=48, prefix=("x", 32)) == 32
    manager.check_integrity()
    assert manager.free_slots == 0
    (made,) = manager.extend("y", 16, first_written=8)
    assert made.source == 0


def test_retained_prefix_is_reused_in_whole_blocks_and_grown_in_place() -> None:
    manager = BlockManager(8)
    opened(manager, "x", 64, num_slots=40)
    manager.close("x", retain=True)
    assert (manager.num_retained, manager.evictable_blocks, manager.free_slots) == (1, 2, 128)
    assert manager.open("y", owner="ann", max_slots=64, prefix=("x", 40)) == 32
    assert (manager.evictable_blocks, manager.free_slots) == (0, 64)
    manager.extend("y", 64, first_written=32)
    manager.check_integrity()
    assert manager.runs("y", 64) == (range(64),)
    assert manager.open("z", owner="ann", max_slots=64, prefix=("x", 31)) == 16


def test_open_table_is_a_prefix_too_and_then_cannot_be_rewritten() -> None:
    manager = BlockManager(8)
    opened(manager, "x", 64, num_slots=40)
    assert manager.open("y", owner="ann", max_slots=64, prefix=("x", 40)) == 32
    assert manager.free_slots == 128 - 64 - 32
    with pytest.raises(LocalProtocolError, match="shared"):
        manager.extend("x", 40, first_written=31)
    with pytest.raises(LocalProtocolError, match="shared"):
        manager.truncate("y", 31)
    assert manager.extend("x", 40, first_written=32) == ()


@pytest.mark.parametrize("retain", [True, False])
def test_prefix_of_another_owner_is_as_good_as_none(retain: bool) -> None:
    manager = BlockManager(8)
    opened(manager, "x", 64, num_slots=64)
    if retain:
        manager.close("x", retain=True)
    unknown = copy.deepcopy(manager)
    for max_slots in (200, 64):
        answers = [
            manager.open("y", owner="ben", max_slots=max_slots, prefix=("x", 64)),
            unknown.open("y", owner="ben", max_slots=max_slots, prefix=("none", 64)),
        ]
        assert answers[0] == answers[1]
        assert seen(manager) == seen(unknown)


def test_retained_tables_make_room_for_new_ones_oldest_first() -> None:
    manager = BlockManager(6)
    for key in "xyz":
        opened(manager, key, 32, num_slots=32)
    for key in "xyz":
        manager.close(key, retain=True)
    # Used again, "x" is the youngest.
    assert manager.open("w", owner="ann", max_slots=32, prefix=("x", 32)) == 32
    manager.close("w")
    opened(manager, "v", 48, owner="ben", num_slots=48)
    assert manager.num_retained == 1
    assert manager.open("w", owner="ann", max_slots=32, prefix=("x", 32)) == 32


def test_retained_tables_of_one_owner_are_limited() -> None:
    manager = BlockManager(64, max_retained_per_owner=2)
    for key in "xyz":
        manager.close(opened(manager, key, 16, num_slots=16), retain=True)
        manager.check_integrity()
    assert manager.num_retained == 2
    assert manager.open("w", owner="ann", max_slots=16, prefix=("x", 16)) == 0
    assert manager.open("v", owner="ann", max_slots=16, prefix=("y", 16)) == 16


def test_retained_tables_make_way_for_one_piece_but_for_their_share() -> None:
    manager = BlockManager(32)
    for key in "abcd":
        opened(manager, key, 64, num_slots=64)
        opened(manager, key + "'", 64, num_slots=64)
    for key in "abcd":
        manager.close(key, retain=True)
    assert manager.open("x", owner="ben", max_slots=128) == 0
    manager.extend("x", 128, first_written=0)
    manager.check_integrity()
    # No eight blocks lie together, whoever is evicted: three go for the sake of it, the last one has an eighth.
    assert (len(manager.runs("x", 128)), manager.num_retained) == (2, 1)


def full_of_retained_tables(num_blocks: int, blocks_each: int, *, seed: int = 0) -> BlockManager:
    """Every block is retained, by tables of many users that ended in another order than they began."""
    manager = BlockManager(num_blocks, max_retained=num_blocks)
    keys = list(range(num_blocks // blocks_each))
    for key in keys:
        opened_slots = blocks_each * BLOCK_SLOTS
        assert manager.open(key, owner=f"user {key // 16}", max_slots=opened_slots) == 0
        manager.extend(key, opened_slots, first_written=0)
    random.Random(seed).shuffle(keys)
    for key in keys:
        manager.close(key, retain=True)
    return manager


@pytest.mark.parametrize(("num_blocks", "blocks_each"), [(4000, 2), (8000, 4), (16000, 16)])
def test_room_for_one_run_is_made_within_a_bound(num_blocks: int, blocks_each: int) -> None:
    manager = full_of_retained_tables(num_blocks, blocks_each)
    num_before, looked_before = manager.num_retained, manager.num_looked_at
    assert manager.open("x", owner="xi", max_slots=512 * BLOCK_SLOTS) == 0
    manager.extend("x", 1, first_written=0)
    num_evicted = num_before - manager.num_retained
    num_dropped = num_evicted * blocks_each
    assert num_dropped > 512
    # One of them for there to be a block at all.
    assert num_dropped <= blocks_each + MAX_DROPPED_FOR_A_RUN
    # Every block dropped, the one place that each table left, and the free extents (no more than these) in the end.
    assert manager.num_looked_at - looked_before <= num_dropped + 3 * num_evicted


def test_bounded_eviction_splits_a_table_rather_than_to_go_on() -> None:
    manager = full_of_retained_tables(8000, 4)
    assert manager.open("x", owner="xi", max_slots=7000 * BLOCK_SLOTS) == 0
    for num_slots in (1, 7000 * BLOCK_SLOTS):
        manager.extend("x", num_slots, first_written=0)
        manager.check_integrity()
    assert len(manager.runs("x", 7000 * BLOCK_SLOTS)) > 1


def test_retained_tables_of_all_owners_together_are_limited() -> None:
    manager = BlockManager(64, max_retained=3)
    for key in "abcde":
        manager.close(opened(manager, key, 16, owner=key, num_slots=16), retain=True)
        manager.check_integrity()
    assert [manager.is_retained(key, owner=key) for key in "abcde"] == [False, False, True, True, True]
    # Used again, "c" is the youngest.
    manager.open("f", owner="c", max_slots=32, prefix=("c", 16))
    manager.close(opened(manager, "g", 16, owner="g", num_slots=16), retain=True)
    assert [manager.is_retained(key, owner=key) for key in "cdeg"] == [True, False, True, True]


def test_retained_content_yields_to_a_writer_without_a_copy() -> None:
    manager = BlockManager(5)
    opened(manager, "x", 32, num_slots=32)
    manager.fork("x", "y", num_slots=20, max_slots=64)
    manager.close("x", retain=True)
    assert manager.extend("y", 64, first_written=20) == ()
    manager.check_integrity()
    assert (manager.num_retained, manager.evictable_blocks) == (1, 0)
    manager.close("y")
    assert manager.open("z", owner="ann", max_slots=64, prefix=("x", 32)) == 16


def test_evict_says_how_many_blocks_it_freed() -> None:
    manager = BlockManager(16)
    for key in "xy":
        manager.close(opened(manager, key, 48, num_slots=48), retain=True)
    opened(manager, "z", 16, num_slots=16)
    assert manager.evict(1) == 3
    assert manager.evict(100) == 3
    assert manager.evict(1) == 0


def test_resize_moves_blocks_in_front_of_the_new_end() -> None:
    manager = BlockManager(10)
    opened(manager, "x", 64, num_slots=64)
    opened(manager, "y", 48, num_slots=33)
    manager.close("x")
    copies = manager.resize(3)
    manager.check_integrity()
    assert copies == (BlockCopy(4, 0), BlockCopy(5, 1), BlockCopy(6, 2))
    assert (manager.num_blocks, manager.free_slots) == (3, 0)
    assert manager.runs("y", 33) == (range(33),)


def test_resize_stops_at_what_is_reserved_and_drops_what_is_retained() -> None:
    manager = BlockManager(10)
    manager.close(opened(manager, "x", 64, num_slots=64), retain=True)
    opened(manager, "y", 48, num_slots=1)
    manager.resize(0)
    manager.check_integrity()
    assert (manager.num_blocks, manager.free_slots, manager.num_retained) == (3, 0, 0)
    assert manager.resize(20) == ()
    assert manager.free_slots == 17 * BLOCK_SLOTS
    assert manager.extend("y", 48, first_written=1) == ()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda m: m.open("x", owner="ann", max_slots=16),
        lambda m: m.open("y", owner="ann", max_slots=0),
        lambda m: m.extend("y", 1, first_written=0),
        lambda m: m.extend("x", 33, first_written=20),
        lambda m: m.extend("x", 30, first_written=21),
        lambda m: m.extend("x", 19, first_written=20),
        lambda m: m.extend("x", 19, first_written=-1),
        lambda m: m.move("y", 0, [0]),
        lambda m: m.move("x", 19, [0, 1]),
        lambda m: m.move("x", 0, [20]),
        lambda m: m.move("x", 0, [-1]),
        lambda m: m.move("x", -1, [0]),
        lambda m: m.truncate("y", 0),
        lambda m: m.truncate("x", -1),
        lambda m: m.fork("y", "z", num_slots=0, max_slots=1),
        lambda m: m.fork("x", "x", num_slots=0, max_slots=1),
        lambda m: m.fork("x", "z", num_slots=21, max_slots=32),
        lambda m: m.fork("x", "z", num_slots=20, max_slots=19),
        lambda m: m.close("y"),
        lambda m: m.runs("y", 0),
        lambda m: m.runs("x", 33),
        lambda m: m.slots("x", 2, 1),
        lambda m: BlockManager(-1),
    ],
)
def test_misuse_is_our_own_fault_and_changes_nothing(misuse: Callable[[BlockManager], object]) -> None:
    manager = BlockManager(4)
    opened(manager, "x", 32, num_slots=20)
    before = seen(manager)
    with pytest.raises(LocalProtocolError):
        misuse(manager)
    manager.check_integrity()
    assert seen(manager) == before
    assert manager.extend("x", 21, first_written=20) == ()


# --- where blocks lie


def test_sessions_that_grow_in_turns_stay_single_runs() -> None:
    manager = BlockManager(40 * 25)
    keys = [f"s{index}" for index in range(32)]
    for key in keys:
        opened(manager, key, 25 * BLOCK_SLOTS)
    for first in range(0, 25 * BLOCK_SLOTS, 5):
        for key in keys:
            manager.extend(key, first + 5, first_written=first)
    manager.check_integrity()
    assert {len(manager.runs(key, 25 * BLOCK_SLOTS)) for key in keys} == {1}


def test_most_tables_are_single_runs_after_much_coming_and_going() -> None:
    rng = random.Random(7)
    manager = BlockManager(4096)
    ends: dict[int, int] = {}
    lengths: dict[int, int] = {}
    num_runs = []
    for key in range(600):
        while manager.reserved_slots > manager.num_blocks * BLOCK_SLOTS // 2:
            gone = rng.choice(list(ends))
            num_runs.append(len(manager.runs(gone, lengths.pop(gone))))
            del ends[gone]
            manager.close(gone, retain=rng.random() < 0.5)
        ends[key] = rng.choice([200, 1000, 3000])
        lengths[key] = 0
        assert manager.open(key, owner=str(key % 5), max_slots=ends[key]) == 0
        for _ in range(40):
            grown = rng.choice(list(ends))
            length = min(ends[grown], lengths[grown] + rng.choice([1, 5, 16, 64, 256]))
            manager.extend(grown, length, first_written=lengths[grown])
            lengths[grown] = length
    manager.check_integrity()
    assert len(num_runs) > 500
    assert sum(runs <= 1 for runs in num_runs) > 0.9 * len(num_runs)


def test_eviction_that_frees_the_block_behind_lets_the_run_go_on() -> None:
    manager = BlockManager(8)
    opened(manager, "y", 16, num_slots=16)
    manager.close(opened(manager, "x", 64, num_slots=64), retain=True)
    assert manager.open("z", owner="ann", max_slots=80, prefix=("y", 16)) == 16
    # Three blocks are free where four are wanted in the end: "x", which lies right behind, makes way.
    manager.extend("z", 17, first_written=16)
    manager.check_integrity()
    assert manager.runs("z", 17) == (range(17),)


# --- any schedule

SIZE = 4
OWNERS = ("ann", "ben")
KEYS = range(8)


def seen(manager: BlockManager) -> tuple[int, ...]:
    """What a manager shows of itself."""
    return (
        manager.num_blocks,
        manager.free_slots,
        manager.reserved_slots,
        manager.used_blocks,
        manager.held_blocks,
        manager.evictable_blocks,
        manager.num_open,
        manager.num_retained,
    )


class Model:
    """What every table must hold, and a device that only copies, moves and writes. Each write is a token of its own."""

    def __init__(self, num_blocks: int, per_owner: int) -> None:
        self.manager = BlockManager(
            num_blocks, block_slots=SIZE, max_retained_per_owner=per_owner, max_retained=2 * per_owner - 1
        )
        self.seen: Counter[str] = Counter()
        self.tokens = itertools.count()
        self.device: dict[int, int] = {}
        self.content: dict[int, list[int]] = {}
        self.owner: dict[int, str] = {}
        self.max_slots: dict[int, int] = {}
        self.floor: dict[int, int] = {}
        self.retained: dict[tuple[str, int], list[int]] = {}
        """What was retained last; it may have been evicted since."""

    def open(self, rng: random.Random) -> None:
        self.try_open(rng, rng.choice(OWNERS), rng.randint(1, 6 * SIZE), None)

    def open_with_prefix(self, rng: random.Random) -> None:
        known = [(owner, key, len(self.content[key])) for key, owner in self.owner.items()]
        known += [(owner, key, len(content)) for (owner, key), content in self.retained.items()]
        if not known:
            return
        owner, source, length = rng.choice(known)
        if rng.random() < 0.15:
            owner = OWNERS[1 - OWNERS.index(owner)]
        length = max(0, length - rng.choice([0, 0, 1, SIZE]))
        self.try_open(rng, owner, max(1, length + rng.randint(-1, 3 * SIZE)), (source, length))

    def try_open(self, rng: random.Random, owner: str, max_slots: int, prefix: tuple[int, int] | None) -> None:
        key = self.new_key(rng)
        if key is None:
            return
        source: list[int] = []
        is_open = prefix is not None and self.owner.get(prefix[0]) == owner
        if prefix is not None:
            source = self.content[prefix[0]] if is_open else self.retained.get((owner, prefix[0]), [])
            source = source[: min(prefix[1], max_slots, len(source)) // SIZE * SIZE]
        num_slots = -(-max_slots // SIZE) * SIZE
        fits = num_slots <= self.manager.free_slots
        without = copy.deepcopy(self.manager) if prefix is not None and rng.random() < 0.2 else None
        before, missing = seen(self.manager), num_slots - self.manager.free_slots
        answer = self.manager.open(key, owner=owner, max_slots=max_slots, prefix=prefix)
        if isinstance(answer, NoRoom):
            assert not fits, "a prefix or retained tables made a table not fit"
            assert answer.missing_slots <= missing
            assert prefix is not None or answer.missing_slots == missing
            assert seen(self.manager) == before
            return
        assert answer <= len(source)
        assert answer % SIZE == 0
        if is_open and prefix is not None:
            assert answer == len(source)
            self.floor[prefix[0]] = max(self.floor[prefix[0]], answer)
        elif answer:
            self.seen["reused"] += 1
        if answer == 0:
            assert fits
            if without is not None:
                assert without.open(key, owner=owner, max_slots=max_slots) == 0
                assert seen(self.manager) == seen(without)
        self.add(key, owner, max_slots, source[:answer])

    def fork(self, rng: random.Random) -> None:
        new_key = self.new_key(rng)
        if new_key is None or not self.content:
            return
        key = self.pick(rng)
        length = len(self.content[key])
        num_slots = rng.choice([length, rng.randint(0, length)])
        max_slots = max(1, num_slots + rng.randint(0, 2 * SIZE))
        blocks = -(-max_slots // SIZE) - num_slots // SIZE
        missing = blocks * SIZE - self.manager.free_slots
        answer = self.manager.fork(key, new_key, num_slots=num_slots, max_slots=max_slots)
        assert answer == (NoRoom(missing) if missing > 0 else num_slots)
        if not isinstance(answer, NoRoom):
            self.floor[key] = max(self.floor[key], num_slots)
            self.add(new_key, self.owner[key], max_slots, self.content[key][:num_slots])

    def batch(self, rng: random.Random) -> None:
        """Several tables move and extend, in any order; the device then does all copies, all moves, all writes."""
        reserved = self.manager.reserved_slots
        copies: list[BlockCopy] = []
        moves: list[SlotMove] = []
        writes: list[tuple[int, int]] = []
        moved: dict[int, int] = {}
        extended: set[int] = set()
        for key in rng.choices(list(self.content), k=rng.randint(1, 6)) if self.content else ():
            content, floor = self.content[key], self.floor[key]
            if key in extended:
                continue
            if key not in moved and len(content) > floor and rng.random() < 0.5:
                first = moved[key] = rng.randrange(floor, len(content))
                sources = rng.choices(range(len(content)), k=rng.randint(0, len(content) - first))
                made, move = self.manager.move(key, first, sources)
                copies += made
                moves.append(move)
                content[first : first + len(sources)] = [content[s] for s in sources]
            else:
                extended.add(key)
                lowest, most = max(floor, moved.get(key, 0)), self.max_slots[key]
                first = rng.choice([lowest, len(content), rng.randint(lowest, len(content))])
                num_slots = rng.choice([most, rng.randint(first, most), first])
                made = self.manager.extend(key, num_slots, first_written=first)
                copies += made
                del content[first:]
                for slot in self.manager.slots(key, first, num_slots):
                    content.append(next(self.tokens))
                    writes.append((slot, content[-1]))
            self.seen["copied"] += len(made)
        self.copy_blocks(copies)
        for move in moves:
            values = [self.device[slot] for slot in move.sources]
            self.device.update(zip(move.targets, values, strict=True))
        self.device.update(writes)
        assert len({slot for slot, _ in writes}) == len(writes)
        assert self.manager.reserved_slots == reserved

    def truncate(self, rng: random.Random) -> None:
        if not self.content:
            return
        key = self.pick(rng)
        reserved = self.manager.reserved_slots
        num_slots = rng.randint(self.floor[key], len(self.content[key]) + 2)
        self.manager.truncate(key, num_slots)
        del self.content[key][num_slots:]
        assert self.manager.reserved_slots == reserved

    def close(self, rng: random.Random) -> None:
        if not self.content:
            return
        key, retain = self.pick(rng), rng.random() < 0.7
        self.manager.close(key, retain=retain)
        content, owner = self.content.pop(key), self.owner.pop(key)
        if retain and len(content) >= SIZE:
            self.retained[owner, key] = content[: len(content) // SIZE * SIZE]

    def evict(self, rng: random.Random) -> None:
        num_blocks, reserved = rng.randint(0, 4), self.manager.reserved_slots
        expected = min(num_blocks, self.manager.evictable_blocks)
        assert self.manager.evict(num_blocks) >= expected
        assert self.manager.reserved_slots == reserved

    def resize(self, rng: random.Random) -> None:
        reserved = self.manager.reserved_slots
        num_blocks = max(0, rng.choice([self.manager.num_blocks, 16]) + rng.randint(-8, 8))
        copies = self.manager.resize(num_blocks)
        assert self.manager.num_blocks == max(num_blocks, reserved // SIZE)
        assert self.manager.reserved_slots == reserved
        assert {each.source for each in copies}.isdisjoint(each.target for each in copies)
        self.copy_blocks(copies)
        end = self.manager.num_blocks * SIZE
        self.device = {slot: value for slot, value in self.device.items() if slot < end}
        self.seen["relocated"] += len(copies)

    def use_all(self, rng: random.Random) -> None:
        """Everybody can use all that was reserved, in any order, and nothing is reserved that nobody can use."""
        manager = copy.deepcopy(self.manager)
        for key in rng.sample(list(self.content), k=len(self.content)):
            manager.extend(key, self.max_slots[key], first_written=self.floor[key])
        manager.check_integrity()
        if all(self.max_slots[key] > self.floor[key] for key in self.content):
            assert manager.held_blocks * SIZE == self.manager.reserved_slots

    def check(self) -> None:
        self.manager.check_integrity()
        for key, content in self.content.items():
            slots = self.manager.slots(key, 0, len(content))
            assert [self.device[slot] for slot in slots] == content
            runs = self.manager.runs(key, len(content))
            assert [slot for run in runs for slot in run] == slots
            assert all(a.stop != b.start for a, b in itertools.pairwise(runs))

    def pick(self, rng: random.Random) -> int:
        return rng.choice(list(self.content))

    def new_key(self, rng: random.Random) -> int | None:
        unused = [key for key in KEYS if key not in self.content]
        return rng.choice(unused) if unused else None

    def add(self, key: int, owner: str, max_slots: int, content: list[int]) -> None:
        self.content[key] = content
        self.owner[key] = owner
        self.max_slots[key] = max_slots
        self.floor[key] = len(content)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for each in copies:
            for offset in range(SIZE):
                value = self.device.get(each.source * SIZE + offset)
                if value is not None:
                    self.device[each.target * SIZE + offset] = value


# The choices within a rule come from one seed: a schedule costs a tenth of what it does when hypothesis draws them all.
RANDOM = st.randoms(use_true_random=True)


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(8, 24), per_owner=st.integers(1, 4))
    def make(self, num_blocks: int, per_owner: int) -> None:
        self.model = Model(num_blocks, per_owner)

    @rule(rng=RANDOM)
    def open(self, rng: random.Random) -> None:
        self.model.open(rng)

    @rule(rng=RANDOM)
    def open_with_prefix(self, rng: random.Random) -> None:
        self.model.open_with_prefix(rng)

    @rule(rng=RANDOM)
    def fork(self, rng: random.Random) -> None:
        self.model.fork(rng)

    @rule(rng=RANDOM)
    def batch(self, rng: random.Random) -> None:
        self.model.batch(rng)

    @rule(rng=RANDOM)
    def truncate(self, rng: random.Random) -> None:
        self.model.truncate(rng)

    @rule(rng=RANDOM)
    def close(self, rng: random.Random) -> None:
        self.model.close(rng)

    @rule(rng=RANDOM)
    def evict(self, rng: random.Random) -> None:
        self.model.evict(rng)

    @rule(rng=RANDOM)
    def resize(self, rng: random.Random) -> None:
        self.model.resize(rng)

    @rule(rng=RANDOM)
    def use_all(self, rng: random.Random) -> None:
        self.model.use_all(rng)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def long_schedule(seed: int) -> Counter[str]:
    """A schedule longer than hypothesis makes them, so that the pool is full and shared most of the time."""
    rng = random.Random(seed)
    model = Model(rng.randint(8, 24), rng.randint(1, 4))
    rules = [model.open, model.open_with_prefix, model.fork, model.truncate, model.evict, model.resize, model.use_all]
    weights = [6, 6, 4, 2, 1, 1, 1]
    rules += [model.batch, model.close]
    weights += [12, 6]
    for chosen in rng.choices(rules, weights, k=300):
        chosen(rng)
        model.check()
    return model.seen


FAILED_ONCE = (61, 95, 129, 231, 239, 326, 369)
"""A run was split in two that an eviction had allowed to go on."""


def test_long_schedules_copy_reuse_and_relocate() -> None:
    counted = sum((long_schedule(seed) for seed in (*range(12), *FAILED_ONCE)), Counter())
    assert min(counted[what] for what in ("copied", "reused", "relocated")) > 20
