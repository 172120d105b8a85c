"""What a new prompt may begin with: only what is computed, in whole blocks, and only as long as nodes keep it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion_node.client.prefix_cache_core import MIN_POSITIONS, PrefixCache, Remembered
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.messages import RETAIN_S

HERE = ((PeerId("a"), LayerRange(0, 4)), (PeerId("b"), LayerRange(4, 8)))
THERE = ((PeerId("c"), LayerRange(0, 8)),)
T0 = MonotonicS(1000.0)
STORY = list(range(100, 200))


def cache(max_sessions: int = 4) -> PrefixCache[Remembered]:
    return PrefixCache(max_sessions)


def running(ids: list[int], *, num_computed: int = 0, num_prompt: int | None = None) -> Remembered:
    return Remembered(
        ids=ids,
        num_prompt=len(ids) if num_prompt is None else num_prompt,
        session=bytes([sum(ids) % 256]) * 16,
        stages=HERE,
        num_computed=num_computed,
    )


def ended(prefixes: PrefixCache[Remembered], ids: list[int], *, now: float = T0) -> Remembered:
    entry = running(ids, num_computed=len(ids))
    prefixes.end(entry, now=MonotonicS(now))
    return entry


def test_next_question_begins_with_whole_blocks_of_the_conversation() -> None:
    prefixes = cache()
    entry = ended(prefixes, STORY[:50])
    assert prefixes.find([*STORY[:50], 1, 2, 3], now=T0) == (entry, 48)
    assert prefixes.find([*STORY[:40], 1, 2, 3], now=T0) == (entry, 32)
    assert prefixes.find([*STORY[:15], 1, 2, 3], now=T0) is None
    assert prefixes.find([], now=T0) is None


def test_last_position_of_a_prompt_is_left_to_compute() -> None:
    prefixes = cache()
    entry = ended(prefixes, STORY[:64])
    assert prefixes.find(STORY[:64], now=T0) == (entry, 48)
    assert prefixes.find(STORY[:65], now=T0) == (entry, 64)
    assert prefixes.find(STORY[:16], now=T0) is None


def test_of_a_running_session_only_what_is_computed_is_offered() -> None:
    prefixes = cache()
    entry = running(STORY[:60])
    prefixes.begin(entry)
    assert prefixes.find(STORY, now=T0) is None
    entry.num_computed = 40
    assert prefixes.find(STORY, now=T0) == (entry, 32)


def test_longest_beginning_wins_and_among_equals_the_last_used() -> None:
    prefixes = cache()
    first = ended(prefixes, [*STORY[:32], *range(20)])
    second = ended(prefixes, [*STORY[:32], *range(20, 40)])
    assert prefixes.find(STORY, now=T0) == (second, 32)
    assert prefixes.find([*STORY[:32], *range(30)], now=T0) == (first, 48)
    assert prefixes.find(STORY, now=T0) == (first, 32)


def test_session_is_forgotten_when_its_nodes_forget_it() -> None:
    prefixes = cache()
    entry = ended(prefixes, STORY)
    assert prefixes.find(STORY, now=MonotonicS(T0 + RETAIN_S - 1)) == (entry, 96)
    assert prefixes.find(STORY, now=MonotonicS(T0 + RETAIN_S)) is None
    assert prefixes.entries == ()


def test_running_session_is_not_forgotten_with_time() -> None:
    prefixes = cache()
    entry = running(STORY, num_computed=100)
    prefixes.begin(entry)
    assert prefixes.find(STORY, now=MonotonicS(T0 + 10 * RETAIN_S)) == (entry, 96)


def test_second_turn_makes_the_first_superfluous_where_it_has_all_of_it() -> None:
    prefixes = cache()
    first = ended(prefixes, STORY[:50])
    elsewhere = running(STORY[:90], num_computed=90)
    elsewhere.stages = THERE
    assert prefixes.end(elsewhere, now=T0) == []
    other = ended(prefixes, [1, *STORY[:40]])
    # Sixteen positions more of the first than of this one, which went another way.
    assert prefixes.end(running([*STORY[:40], *range(40)], num_computed=80), now=T0) == []
    assert prefixes.end(running(STORY[:70], num_computed=70), now=T0) == [first]
    assert other in prefixes.entries


def test_oldest_makes_way_and_only_what_nodes_keep_is_told() -> None:
    prefixes = cache(2)
    first = running([1] * 20)
    assert prefixes.begin(first) == []
    second = ended(prefixes, [2] * 20)
    assert prefixes.begin(running([3] * 20)) == []  # the first, which still runs
    assert prefixes.begin(running([4] * 20)) == [second]
    # It ends although it was forgotten: now its nodes keep it.
    first.num_computed = 20
    prefixes.end(first, now=T0)
    assert prefixes.find([1] * 20, now=T0) == (first, 16)


def test_answer_waits_for_one_that_computes_at_least_half_for_it() -> None:
    prefixes = cache()
    entry = running(STORY[:64])
    prefixes.begin(entry)
    assert prefixes.find_opening(STORY[:64]) is entry
    assert prefixes.find_opening([*STORY[:32], *range(50)]) is entry
    assert prefixes.find_opening([*STORY[:31], *range(50)]) is None
    entry.num_computed = 63
    assert prefixes.find_opening(STORY) is entry
    # All that it will have more than now is behind what this prompt begins with.
    assert prefixes.find_opening([*STORY[:32], *range(50)]) is None
    entry.num_computed = 64
    assert prefixes.find_opening(STORY) is None
    # Of several that wait for one, the next one to begin keeps none of the others waiting.
    second = running(STORY[:64])
    prefixes.begin(second)
    assert prefixes.find_opening([*STORY[:48], 1]) is None
    prefixes.forget(entry)
    assert prefixes.find_opening([*STORY[:48], 1]) is second
    prefixes.forget(second)
    prefixes.forget(second)
    short = running(STORY[:10])
    prefixes.begin(short)
    assert prefixes.find_opening(STORY[:10]) is None


@given(
    histories=st.lists(st.lists(st.integers(0, 1), max_size=80), max_size=8),
    computed=st.integers(0, 80),
    prompt=st.lists(st.integers(0, 1), max_size=80),
)
def test_found_prefix_is_the_longest_that_really_is_one(
    histories: list[list[int]], computed: int, prompt: list[int]
) -> None:
    prefixes = cache(16)
    for ids in histories:
        prefixes.begin(running(ids, num_computed=min(computed, len(ids))))

    def whole(ids: list[int]) -> int:
        usable = ids[: min(computed, len(ids))]
        return max(n for n in range(0, 96, MIN_POSITIONS) if n == 0 or (n < len(prompt) and usable[:n] == prompt[:n]))

    found = prefixes.find(prompt, now=T0)
    longest = max(map(whole, histories), default=0)
    assert (0 if found is None else found[1]) == longest
    if found is not None:
        entry, num_positions = found
        assert list(entry.ids[:num_positions]) == prompt[:num_positions]
        assert num_positions <= entry.num_computed
