"""Splits of layers among the members of a group."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.errors import ConfigError
from fusion_node.slices import (
    MAX_MEMBERS,
    Dims,
    Exchange,
    ModelSlice,
    SliceBounds,
    exchange_width,
    exchanges,
    overlap,
    split,
    split_columns,
)

BUILT_IN = Dims(hidden=576, heads=9, kv_heads=3, head_dim=64, channels=1536)
QWEN = Dims(hidden=1536, heads=12, kv_heads=2, head_dim=128, channels=8960)


@st.composite
def dims_and_weights(draw: st.DrawFn) -> tuple[Dims, tuple[int, ...]]:
    kv_heads, per_kv = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dims = Dims(
        hidden=draw(st.integers(16, 600)),
        heads=kv_heads * per_kv,
        kv_heads=kv_heads,
        head_dim=8,
        channels=draw(st.integers(16, 999)),
        shared_channels=draw(st.sampled_from([0, 16, 123])),
    )
    most = min(MAX_MEMBERS, dims.heads)
    return dims, tuple(draw(st.lists(st.integers(1, 1000), min_size=1, max_size=most)))


def covers(intervals: list[range], size: int) -> bool:
    joined = [i for interval in intervals for i in interval]
    return joined == list(range(size)) and all(intervals)


@given(dims_and_weights())
def test_every_part_of_a_layer_is_held_once(case: tuple[Dims, tuple[int, ...]]) -> None:
    dims, weights = case
    bounds = split(dims, weights)
    assert len(bounds) == len(weights)
    assert split_columns(dims.hidden, weights) == tuple(each.columns for each in bounds)
    assert covers([b.columns for b in bounds], dims.hidden)
    assert covers([b.heads for b in bounds], dims.heads)
    assert covers([b.channels for b in bounds], dims.channels)
    if dims.shared_channels:
        assert covers([b.shared_channels for b in bounds], dims.shared_channels)


@given(dims_and_weights())
def test_each_query_head_finds_its_kv_head_with_its_owner(case: tuple[Dims, tuple[int, ...]]) -> None:
    dims, weights = case
    per_kv = dims.heads // dims.kv_heads
    for held in split(dims, weights):
        assert len(held.heads) == held.heads_per_kv * len(held.kv_heads)
        for local, head in enumerate(held.heads):
            assert held.kv_heads[local // held.heads_per_kv] == head // per_kv
        if len(weights) <= dims.kv_heads:
            assert held.heads_per_kv == per_kv, "whole KV heads, none of them held twice"


@given(st.integers(1, MAX_MEMBERS), st.integers(50, 1000))
def test_intervals_follow_the_weights(num_members: int, heaviest: int) -> None:
    dims = Dims(hidden=8 * 4096, heads=64, kv_heads=64, head_dim=8, channels=8)
    weights = (heaviest, *[50] * (num_members - 1))
    if num_members > 1:
        dims = Dims(hidden=8 * 4096, heads=64, kv_heads=64, head_dim=8, channels=8 * 4096)
    for held, weight in zip(split(dims, weights), weights, strict=True):
        assert abs(len(held.columns) - 8 * 4096 * weight / sum(weights)) <= 8


def test_the_built_in_model_among_two_three_and_four() -> None:
    assert [b.heads for b in split(BUILT_IN, (1, 1))] == [range(6), range(6, 9)]
    assert [b.kv_heads for b in split(BUILT_IN, (1, 1, 1))] == [(0,), (1,), (2,)]
    four = split(BUILT_IN, (1, 1, 1, 1))
    assert [len(b.heads) for b in four] == [2, 3, 2, 2]
    # Heads 2 to 4 read KV heads 0, 1 and 1: their owner keeps one for each.
    assert [b.kv_heads for b in four] == [(0,), (0, 1, 1), (1, 2), (2,)]
    assert [len(b.columns) for b in split(BUILT_IN, (2, 1))] == [384, 192]


def test_a_member_with_little_still_gets_one_of_everything() -> None:
    heavy, light = split(QWEN, (1000, 1))
    assert light == SliceBounds(range(1528, 1536), range(6, 12), (1,), range(8952, 8960), range(0))
    assert heavy.kv_heads == (0,)


@pytest.mark.parametrize(
    ("num_members", "what"),
    [
        (13, "12 query heads cannot be split among 13 members"),
        (17, "there can be 1 to 16"),
        (0, "there can be 1 to 16"),
    ],
)
def test_too_many_members_are_refused(num_members: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        split(QWEN, (1,) * num_members)


@pytest.mark.parametrize("text", ["0/3", "2/3", "1/2:1:1", "0/1", "15/16"])
def test_slices_are_written_as_they_are_read(text: str) -> None:
    assert str(ModelSlice.parse(text)) == text


def test_equal_weights_are_a_number() -> None:
    assert ModelSlice.parse("1/5:5") == ModelSlice(1, (5, 5))
    assert str(ModelSlice(1, (5, 5))) == "1/2"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("3/3", "no slice 3 of 3"),
        ("0/0", "there can be 1 to 16"),
        ("0/17", "16 members at most"),
        ("0/1:0", "within 1 and 1000"),
        ("0/1:1001", "within 1 and 1000"),
        ("a/b", "write K/N"),
        ("-1/2", "write K/N"),
        ("", "write K/N"),
        ("0/" + ":".join("1" * 17), "there can be 1 to 16"),
        ("٠/٣", "write K/N"),
    ],
)
def test_what_is_no_slice_is_told(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        ModelSlice.parse(text)


@given(*[st.tuples(st.integers(0, 20), st.integers(0, 20))] * 2)
def test_overlap_is_what_is_in_both(a: tuple[int, int], b: tuple[int, int]) -> None:
    one, other = range(a[0], a[0] + a[1]), range(b[0], b[0] + b[1])
    assert set(overlap(one, other)) == set(one) & set(other)


def test_columns_of_two_splits_meet_in_every_column_once() -> None:
    ours, theirs = split(BUILT_IN, (2, 1)), split(BUILT_IN, (1, 1, 1))
    met = [overlap(a.columns, b.columns) for a, b in itertools.product(ours, theirs)]
    assert sorted(c for interval in met for c in interval) == list(range(576))


@given(dims_and_weights())
def test_all_outputs_of_a_linear_map_are_sent_once_but_kv_heads_that_several_read(
    case: tuple[Dims, tuple[int, ...]],
) -> None:
    dims, weights = case
    bounds = split(dims, weights)
    sums = {e: sum(exchange_width(dims, owner, e) for owner in bounds) for e in exchanges(dims)}
    n, shared = len(bounds), sum(len(set(b.kv_heads)) for b in bounds) - dims.kv_heads
    assert sums == {
        Exchange.QKV: (dims.heads + 2 * dims.kv_heads + 2 * shared) * dims.head_dim + n,
        Exchange.O: dims.hidden,
        Exchange.GATE_UP: 2 * dims.channels + n,
        Exchange.DOWN: dims.hidden,
    }
    assert 0 <= shared < n


def test_experts_are_scored_by_everybody_and_sent_for_those_chosen() -> None:
    dims = Dims(hidden=64, heads=4, kv_heads=2, head_dim=16, channels=32, num_experts=8, experts_per_row=2)
    owner = split(dims, (1, 1))[0]
    assert [e.name for e in exchanges(dims)] == ["QKV", "O", "ROUTER", "GATE_UP", "DOWN"]
    assert exchange_width(dims, owner, Exchange.ROUTER) == 8 + 1
    assert exchange_width(dims, owner, Exchange.GATE_UP) == 2 * 2 * 16
