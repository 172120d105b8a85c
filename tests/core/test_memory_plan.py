"""What a node takes of the memory, with and without its operator's bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.cli.options import parse_size_or_none
from fusion_node.daemon.memory_plan import (
    KV_SHARE,
    MAX_RETAIN_BYTES,
    WEIGHTS_SHARE,
    WORKING_BYTES,
    Bound,
    MemoryPlan,
    place_layers,
    retain_budget,
)
from fusion_node.errors import ConfigError, ResourceExhausted
from fusion_node.types import LayerRange

MIB = 2**20
WORKING_MIB = WORKING_BYTES // MIB


def bound(max_mib: int, used_mib: int = 400) -> Bound:
    return Bound("--max-ram", max_mib * MIB, used_mib * MIB)


def test_without_a_bound_weights_and_kv_take_their_shares_of_what_is_free() -> None:
    plan = MemoryPlan(free_bytes=1000 * MIB)
    assert plan.num_layers(10 * MIB) == int(100 * WEIGHTS_SHARE)
    assert plan.kv_budget(least_kv_bytes=MIB) == int(1000 * MIB * KV_SHARE)
    assert MemoryPlan(1000 * MIB, kv_bytes=7 * MIB).kv_budget(least_kv_bytes=MIB) == 7 * MIB
    plan.check_layers("0:30", weights_bytes=10**15, least_kv_bytes=0)  # loading it will tell


def test_bound_counts_what_the_process_holds_and_needs_to_compute_in() -> None:
    assert bound(400 + WORKING_MIB + 100).room_bytes == 100 * MIB
    assert bound(400 + WORKING_MIB).room_bytes == 0
    assert bound(100).room_bytes == 0


def test_layers_and_kv_share_what_a_bound_leaves() -> None:
    plan = MemoryPlan(100_000 * MIB, bound=bound(400 + WORKING_MIB + 100))
    assert plan.num_layers(10 * MIB) == 7
    named = MemoryPlan(100_000 * MIB, kv_bytes=40 * MIB, bound=bound(400 + WORKING_MIB + 100))
    assert named.num_layers(10 * MIB) == 6


def test_bound_above_what_is_free_changes_nothing() -> None:
    free = 1000 * MIB
    assert MemoryPlan(free, bound=bound(10**6)).num_layers(MIB) == MemoryPlan(free).num_layers(MIB)
    assert MemoryPlan(free, bound=bound(10**6)).kv_budget(least_kv_bytes=1) == MemoryPlan(free).kv_budget(
        least_kv_bytes=1
    )


def test_kv_that_is_more_than_the_bound_leaves_no_layer() -> None:
    plan = MemoryPlan(10**12, kv_bytes=10**11, bound=bound(2000))
    assert plan.num_layers(MIB) == 0
    assert "--max-ram 2000 MiB leaves" in plan.why_no_layer("m", MIB)
    assert "memory that is free" in MemoryPlan(MIB).why_no_layer("m", 10 * MIB)


def test_named_layers_that_do_not_fit_are_refused_with_numbers() -> None:
    plan = MemoryPlan(10**12, bound=bound(900))
    plan.check_layers("0:10", weights_bytes=300 * MIB, least_kv_bytes=20 * MIB)
    with pytest.raises(ResourceExhausted) as error:
        plan.check_layers("0:30", weights_bytes=512 * MIB, least_kv_bytes=12 * MIB)
    assert str(error.value) == (
        f"layers 0:30 need 512 MiB and KV at least 12 MiB; --max-ram 900 MiB leaves {500 - WORKING_MIB} MiB, because "
        f"the program itself takes 400 MiB and computing {WORKING_MIB} MiB: "
        "serve fewer with --layers, or raise --max-ram"
    )
    with pytest.raises(ResourceExhausted, match="and KV 300 MiB;"):
        MemoryPlan(10**12, kv_bytes=300 * MIB, bound=bound(900)).check_layers(
            "0:9", weights_bytes=100 * MIB, least_kv_bytes=MIB
        )


def test_kv_takes_what_the_weights_left_of_the_bound_and_no_less_than_a_session() -> None:
    loaded = bound(900, used_mib=700)
    left = loaded.room_bytes
    assert MemoryPlan(10**12, bound=loaded).kv_budget(least_kv_bytes=left) == left
    assert MemoryPlan(10**12, kv_bytes=5 * MIB, bound=loaded).kv_budget(least_kv_bytes=MIB) == 5 * MIB
    with pytest.raises(ResourceExhausted, match="raise --max-ram"):
        MemoryPlan(10**12, bound=loaded).kv_budget(least_kv_bytes=left + 1)


@given(
    free=st.integers(0, 2**40),
    kv=st.none() | st.integers(1, 2**38),
    max_bytes=st.integers(1, 2**40),
    used=st.integers(0, 2**34),
    layer=st.integers(1, 2**32),
)
def test_what_is_planned_stays_within_the_bound(
    free: int, kv: int | None, max_bytes: int, used: int, layer: int
) -> None:
    plan = MemoryPlan(free, kv, Bound("--max-vram", max_bytes, used))
    weights = plan.num_layers(layer) * layer
    if weights == 0:
        return
    assert used + weights <= max_bytes - WORKING_BYTES
    assert weights <= free
    after = MemoryPlan(free - weights, kv, Bound("--max-vram", max_bytes, used + weights))
    assert used + weights + after.kv_budget(least_kv_bytes=0) <= max_bytes - WORKING_BYTES
    if kv is not None:
        assert after.kv_budget(least_kv_bytes=0) == kv


@given(
    start=st.integers(0, 20),
    length=st.integers(1, 80),
    capacities=st.lists(st.integers(0, 50), min_size=1, max_size=8),
)
def test_layers_are_placed_in_order_and_in_proportion_to_what_each_device_holds(
    start: int, length: int, capacities: list[int]
) -> None:
    layers = LayerRange(start, start + length)
    places = place_layers(layers, capacities)
    assert places == place_layers(layers, capacities, first_layers=frozenset(range(start + length)))
    assert len(places) == len(capacities)
    placed = [index for place in places if place is not None for index in range(place.start, place.stop)]
    assert placed == list(range(layers.start, layers.stop))
    total = sum(capacities)
    for place, capacity in zip(places, capacities, strict=True):
        share = length * capacity / total if total else 0.0
        assert total == 0 or abs((0 if place is None else len(place)) - share) <= 1.0
        # What fits in all fits on each.
        assert total < length or place is None or len(place) <= capacity


def test_rows_that_were_handed_on_get_a_sixteenth_of_what_is_free_within_the_bounds() -> None:
    assert retain_budget(8 * 2**30) == 2**29
    assert retain_budget(64 * 2**30) == MAX_RETAIN_BYTES
    assert retain_budget(0) == 0
    room = 160 * MIB
    assert retain_budget(8 * 2**30, Bound("--max-ram", WORKING_BYTES + 300 * MIB + room, 300 * MIB)) == 10 * MIB
    assert retain_budget(8 * 2**30, Bound("--max-ram", 100 * MIB, 300 * MIB)) == 0


def test_operator_may_have_no_row_kept() -> None:
    assert parse_size_or_none(" 0 ") == 0
    assert parse_size_or_none("500MiB") == 500 * MIB
    for text in ("", "-1", "0MiB", "00"):
        with pytest.raises(ConfigError):
            parse_size_or_none(text)


def test_kv_leaves_room_for_rows_that_are_retained_within_a_bound() -> None:
    plan = MemoryPlan(8000 * MIB, kv_bytes=500 * MIB, bound=bound(400 + WORKING_MIB + 160), retain_bytes=10 * MIB)
    assert plan.kv_budget(least_kv_bytes=MIB) == 150 * MIB
    assert plan.kv_budget(least_kv_bytes=155 * MIB) == 155 * MIB
    free = MemoryPlan(8000 * MIB, kv_bytes=500 * MIB, retain_bytes=10 * MIB)
    assert free.kv_budget(least_kv_bytes=MIB) == 500 * MIB
