"""What is kept of the rows that were handed on: all of a session's or nothing, bounded, and shared without a copy."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.daemon.output_log_core import CHUNK_OVERHEAD_BYTES, OutputLog, Part

ROW_BYTES = 8


def payload(first: int, num_rows: int) -> memoryview:
    """Rows that say at which position they are."""
    return memoryview(b"".join((first + i).to_bytes(ROW_BYTES, "little") for i in range(num_rows)))


def log(max_bytes: int = 1 << 20) -> OutputLog:
    return OutputLog(max_bytes=max_bytes)


def fill(outputs: OutputLog, key: str, *sizes: int, first: int = 0) -> None:
    for size in sizes:
        outputs.append(key, first, size, payload(first, size))
        first += size
    outputs.check_integrity()


def test_rows_come_back_wherever_they_are_cut() -> None:
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    fill(outputs, "a", 5, 1, 1, 3)
    for first in range(10):
        for num_rows in range(1, 11 - first):
            assert outputs.rows("a", first, num_rows) == payload(first, num_rows)
    for first, num_rows in ((0, 11), (10, 1), (3, 0), (-1, 2)):
        with pytest.raises(ValueError, match="are not kept"):
            outputs.rows("a", first, num_rows)


def test_rows_of_one_step_are_repeated_without_a_copy() -> None:
    outputs, kept = log(), payload(0, 4)
    outputs.open("a", row_bytes=ROW_BYTES)
    outputs.append("a", 0, 4, kept)
    assert outputs.rows("a", 1, 2).obj is kept.obj


def test_rows_that_do_not_follow_are_the_end_of_what_is_kept() -> None:
    for first in (0, 4, 6):
        outputs = log()
        outputs.open("a", row_bytes=ROW_BYTES)
        fill(outputs, "a", 5)
        outputs.append("a", first, 1, payload(first, 1))
        assert not outputs.is_kept("a")
        assert outputs.num_bytes == 0
        outputs.append("a", 0, 1, payload(0, 1))  # only `open` begins anew
        assert outputs.num_positions("a") == 0


def test_session_that_begins_like_another_shares_its_payloads_and_outlives_it() -> None:
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    fill(outputs, "a", 5, 4)
    before = outputs.num_bytes
    outputs.open("b", row_bytes=ROW_BYTES, prefix="a", num_positions=7)
    assert (outputs.num_bytes, outputs.num_positions("b")) == (before, 7)
    fill(outputs, "b", 2, first=7)
    outputs.drop("a")
    assert outputs.rows("b", 4, 5) == payload(4, 5)
    outputs.drop("b")
    outputs.check_integrity()
    assert outputs.num_bytes == 0


def test_session_may_begin_like_the_one_whose_key_it_takes() -> None:
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    fill(outputs, "a", 6)
    outputs.open("a", row_bytes=ROW_BYTES, prefix="a", num_positions=4)
    fill(outputs, "a", 1, first=4)
    assert outputs.rows("a", 0, 5) == payload(0, 5)


@pytest.mark.parametrize("case", ["unknown", "too short", "in another encoding"])
def test_nothing_is_kept_of_a_session_whose_prefix_is_not(case: str) -> None:
    outputs = log()
    if case != "unknown":
        outputs.open("a", row_bytes=4 if case == "in another encoding" else ROW_BYTES)
        outputs.append("a", 0, 3, payload(0, 3))
    outputs.open("b", row_bytes=ROW_BYTES, prefix="a", num_positions=4 if case == "too short" else 3)
    assert not outputs.is_kept("b")


def test_longest_unused_session_goes_first_and_whole() -> None:
    room = 3 * (CHUNK_OVERHEAD_BYTES + 10 * ROW_BYTES)
    outputs = log(room)
    for key in "abc":
        outputs.open(key, row_bytes=ROW_BYTES)
        fill(outputs, key, 10)
    outputs.rows("a", 0, 1)
    fill(outputs, "c", 1, first=10)
    assert [outputs.is_kept(key) for key in "abc"] == [True, False, True]
    assert outputs.num_dropped == 1
    fill(outputs, "b", 1, first=10)  # of what is dropped nothing is kept any more
    assert outputs.num_bytes == 2 * (CHUNK_OVERHEAD_BYTES + 10 * ROW_BYTES) + CHUNK_OVERHEAD_BYTES + ROW_BYTES


def test_session_that_is_larger_than_the_bound_keeps_nothing_and_takes_all_others_with_it_at_most_once() -> None:
    outputs = log(CHUNK_OVERHEAD_BYTES + 10 * ROW_BYTES)
    outputs.open("a", row_bytes=ROW_BYTES)
    fill(outputs, "a", 11)
    assert (outputs.num_bytes, outputs.num_dropped, len(outputs)) == (0, 1, 0)


def test_without_memory_nothing_is_kept() -> None:
    outputs = log(0)
    outputs.open("a", row_bytes=ROW_BYTES)
    fill(outputs, "a", 3)
    assert (outputs.is_kept("a"), outputs.num_bytes, outputs.num_dropped) == (False, 0, 0)


def test_payloads_of_a_simulation_need_not_be_bytes() -> None:
    seen: list[Part] = []

    def join(parts: list[Part], row_bytes: int) -> str:
        seen.extend(parts)
        return "joined"

    outputs = OutputLog(max_bytes=1 << 20, join=join)  # type: ignore[arg-type]
    outputs.open("a", row_bytes=ROW_BYTES)
    outputs.append("a", 0, 4, "abcd")
    outputs.append("a", 4, 2, "ef")
    assert outputs.rows("a", 3, 2) == "joined"
    assert seen == [Part("abcd", 3, 4), Part("ef", 0, 1)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6000))
def test_what_is_kept_is_right_and_bounded_whatever_comes(seed: int, max_bytes: int) -> None:
    """Against a plain model: what a session ought to have, if it has anything."""
    rng, outputs = random.Random(seed), log(max_bytes)
    lengths: dict[str, int] = {}
    for _ in range(60):
        key, other = rng.choice("abcd"), rng.choice("abcd")
        match rng.randrange(5):
            case 0:
                shared = rng.randrange(0, 1 + outputs.num_positions(other))
                outputs.open(key, row_bytes=ROW_BYTES, prefix=other, num_positions=shared)
                lengths[key] = shared
            case 1:
                outputs.drop(key)
            case 2:
                outputs.keep_only(lambda each, key=key: each != key)
            case _:
                size = rng.randrange(1, 9)
                first = lengths.get(key, 0) + rng.choice((0, 0, 0, 0, 0, 1))
                outputs.append(key, first, size, payload(first, size))
                lengths[key] = lengths.get(key, 0) + size
        outputs.check_integrity()
        for each in "abcd":
            length = outputs.num_positions(each)
            assert length in (0, lengths.get(each, 0))
            if length:
                first = rng.randrange(length)
                num_rows = rng.randrange(1, length - first + 1)
                assert outputs.rows(each, first, num_rows) == payload(first, num_rows)


# rows of trees


def rows_of(*positions: int) -> memoryview:
    """Rows that are each told from the others by a position."""
    return memoryview(b"".join(bytes(payload(position, 1)) for position in positions))


def test_rows_of_nodes_get_their_positions_whether_they_come_before_they_are_committed_or_after() -> None:
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    outputs.append("a", 0, 2, payload(0, 2))
    outputs.hold("a", (7, 8, 9), rows_of(2, 90, 3), is_live=lambda name: True)
    outputs.commit("a", 2, (7, 9, 12))
    assert outputs.num_positions("a") == 4
    outputs.commit("a", 5, (13,))
    outputs.hold("a", (13, 14), rows_of(5, 91), is_live=lambda name: name == 14)
    assert outputs.num_positions("a") == 4
    outputs.hold("a", (12,), rows_of(4), is_live=lambda name: False)
    assert outputs.rows("a", 0, 6) == payload(0, 6)
    outputs.check_integrity()


def test_payload_between_committed_nodes_keeps_its_place() -> None:
    """The log runs ahead: nodes are committed while a step before them is still computed."""
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    outputs.hold("a", (5,), rows_of(2), is_live=lambda name: True)
    outputs.commit("a", 2, (5,))
    outputs.append("a", 0, 2, payload(0, 2))
    assert outputs.rows("a", 0, 3) == payload(0, 3)


def test_dead_nodes_are_given_up_and_no_row_holds_its_payload() -> None:
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    source = bytearray(rows_of(0, 90, 91))
    outputs.hold("a", (1, 2, 3), memoryview(source), is_live=lambda name: name != 3)
    outputs.commit("a", 0, (1,))
    before = outputs.num_bytes
    outputs.prune("a", is_live=lambda name: False)
    assert outputs.num_bytes == before - ROW_BYTES - CHUNK_OVERHEAD_BYTES
    source.extend(b"may grow")  # a view of it would forbid that
    assert outputs.rows("a", 0, 1) == payload(0, 1)
    outputs.check_integrity()


def test_held_rows_count_and_go_with_their_session() -> None:
    outputs = log(3 * (ROW_BYTES + CHUNK_OVERHEAD_BYTES))
    for key in "ab":
        outputs.open(key, row_bytes=ROW_BYTES)
    outputs.hold("a", (1, 2), rows_of(0, 1), is_live=lambda name: True)
    outputs.hold("b", (1,), rows_of(0), is_live=lambda name: True)
    assert outputs.is_kept("a")
    outputs.hold("b", (2,), rows_of(1), is_live=lambda name: True)
    assert (outputs.is_kept("a"), outputs.is_kept("b")) == (False, True)
    outputs.drop("b")
    assert outputs.num_bytes == 0
    outputs.hold("b", (3,), rows_of(1), is_live=lambda name: True)
    outputs.commit("b", 0, (3,))
    assert (outputs.num_positions("b"), outputs.num_bytes) == (0, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_committed_rows_are_kept_in_their_order_however_commits_and_rows_come(data: st.DataObject) -> None:
    outputs = log()
    outputs.open("a", row_bytes=ROW_BYTES)
    num = data.draw(st.integers(1, 12))
    live = set(range(100, 100 + num))
    commits, arrivals = list(range(num)), data.draw(st.permutations(range(num)))
    while commits or arrivals:
        if commits and (not arrivals or data.draw(st.booleans())):
            count = data.draw(st.integers(1, len(commits)))
            outputs.commit("a", commits[0], [100 + p for p in commits[:count]])
            del commits[:count]
        elif arrivals:
            count = data.draw(st.integers(1, len(arrivals)))
            names = [100 + p for p in arrivals[:count]]
            outputs.hold("a", names, rows_of(*arrivals[:count]), is_live=live.__contains__)
            del arrivals[:count]
        outputs.check_integrity()
    assert outputs.rows("a", 0, num) == payload(0, num)
    assert outputs.num_positions("a") == num
