"""Which layers a node takes, and where they are cut between its devices."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fusion_node.daemon.memory_plan import place_layers
from fusion_node.types import LayerRange
from scheduler.placement import choose_range
from tests.core.placement_swarms import Plane, host, work

GROUPS = frozenset({0, 1, 2, 5, 9})
"""Where ranges of a model of twelve layers may begin."""


def choose_layers(
    held: list[LayerRange], *, capacity_layers: int, first_layers: frozenset[int] | None = None
) -> LayerRange | None:
    """Of a newcomer to nodes that hold these."""
    others = [host(f"other-{index}", 12, (layers.start, layers.stop)) for index, layers in enumerate(held)]
    return choose_range(host("own", capacity_layers), others, work(12, first_layers=first_layers), Plane()).layers


def test_node_takes_the_layers_that_the_swarm_holds_least() -> None:
    held = [LayerRange(0, 5), LayerRange(0, 2), LayerRange(8, 12)]
    assert choose_layers(held, capacity_layers=3) == LayerRange(5, 8)
    assert choose_layers(held, capacity_layers=20) == LayerRange(0, 12)
    assert choose_layers(held, capacity_layers=0) is None


def test_chosen_layers_begin_and_end_where_the_model_lets_a_range_begin() -> None:
    held = [LayerRange(0, 5), LayerRange(0, 2), LayerRange(9, 12)]
    assert choose_layers(held, capacity_layers=6, first_layers=GROUPS) == LayerRange(5, 9)
    assert choose_layers([], capacity_layers=6, first_layers=GROUPS) == LayerRange(0, 5)
    assert choose_layers([LayerRange(0, 9)], capacity_layers=3, first_layers=GROUPS) == LayerRange(9, 12)
    assert choose_layers([], capacity_layers=2, first_layers=frozenset({0, 4, 8})) is None


@given(
    size=st.integers(1, 12),
    starts=st.frozensets(st.integers(1, 11)),
    held=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), max_size=6),
)
def test_any_choice_is_within_what_fits(size: int, starts: frozenset[int], held: list[tuple[int, int]]) -> None:
    ranges = [LayerRange(start, start + length) for start, length in held]
    first_layers = starts | {0}
    chosen = choose_layers(ranges, capacity_layers=size, first_layers=first_layers)
    ends = sorted({*first_layers, 12})
    if chosen is None:
        assert min(b - a for a, b in itertools.pairwise(ends)) > size
        return
    assert chosen.start in ends
    assert chosen.stop in ends
    assert len(chosen) <= size


def test_devices_are_cut_where_a_range_may_begin() -> None:
    layers = LayerRange(1, 12)
    assert place_layers(layers, [10, 10], first_layers=GROUPS) == [LayerRange(1, 5), LayerRange(5, 12)]
    assert place_layers(layers, [10, 1, 10], first_layers=GROUPS) == [LayerRange(1, 5), None, LayerRange(5, 12)]
    assert place_layers(LayerRange(5, 9), [10, 10], first_layers=GROUPS) == [None, LayerRange(5, 9)]
