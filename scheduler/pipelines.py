"""Pipelines from nodes that hold nothing yet, in Parallax's two phases.

Phase one groups nodes: within clusters of nodes that are near one another, and then of what is left of all of them, a
dynamic program finds for every possible number of pipelines the grouping with the fewest stages, and the number whose
loops give the most tokens per second is taken. Phase two fills the pipelines: every node gets layers in proportion to
its measured speed as far as they fit on it (water-filling), in the order whose loop is shortest; what room is left
then takes the neighbours' layers as well, since a node can be entered and left at any layer that it holds.

Source: Parallax, arXiv 2509.26182, and its src/scheduling/layer_allocation.py. Different here: the network is in the
objective, compute counts per layer, the user's legs count, and no room is reserved for an embedding or a head, which
stay with the user.

Effort: the dynamic program stops at MAX_STATES states of all its runs together, and where it does, or above
MAX_EXACT_NODES nodes, the largest nodes are taken first and the smallest that completes a pipeline last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fusion_node.types import LayerRange
from scheduler.swarm_rate import Range, SwarmRate, Work, windows

MAX_EXACT_NODES = 30
MAX_STATES = 12_000
"""About 0.2 s."""

MAX_EXACT_ORDER = 6
"""Stages of which all orders are tried, which are 720. Above, the nearest neighbour first, then exchanges of legs."""

NEAR_S = (None, 0.05, 0.015)
"""Legs within a cluster, in seconds with the payload: all together; of a continent; of a metropolitan area."""

Group = tuple[int, ...]


def proposals(rate: SwarmRate, movable: Sequence[int], fixed: Sequence[Range]) -> Iterator[list[Range]]:
    """Placements of the movable hosts from scratch, one per way to cluster them that makes a difference."""
    budget = _Budget()
    seen: list[list[Group]] = []
    for near_s in NEAR_S:
        clusters = _clusters(rate, movable, near_s)
        if clusters in seen:
            continue
        seen.append(clusters)
        yield _place(rate, clusters, fixed, budget)


@dataclass(slots=True)
class _Budget:
    """What the dynamic program may still try."""

    states: int = MAX_STATES


def _place(rate: SwarmRate, clusters: Sequence[Group], fixed: Sequence[Range], budget: _Budget) -> list[Range]:
    groups: list[_Filled] = []
    left: list[int] = []
    for cluster in clusters:
        chosen, rest = _best_grouping(rate, cluster, budget)
        groups += chosen
        left += rest
    if len(clusters) > 1:
        across, left = _best_grouping(rate, tuple(left), budget)
        groups += across
    ranges = list(fixed)
    for group in groups:
        for index, layers in group.stages:
            ranges[index] = layers
    _place_alternates(rate, left, ranges)
    return ranges


def _place_alternates(rate: SwarmRate, left: Sequence[int], ranges: list[Range]) -> None:
    """What makes no pipeline goes where fewest others are."""
    alternates: list[Range] = []
    for index in sorted(left, key=lambda i: (-rate.hosts[i].capacity_layers, rate.hosts[i].peer)):
        options = windows(rate.hosts[index].capacity_layers, rate.work)
        if options:
            best = max(options, key=lambda w: (rate.alternates_rate([*alternates, w]), -w.start))
            alternates.append(best)
            ranges[index] = best


# clusters


def _clusters(rate: SwarmRate, movable: Sequence[int], near_s: float | None) -> list[Group]:
    """Nodes with whoever of them came first and is near; the largest first in line, so that it leads."""
    order = sorted(movable, key=lambda i: (-rate.hosts[i].capacity_layers, rate.hosts[i].peer))
    if near_s is None:
        return [tuple(order)] if order else []
    clusters: list[list[int]] = []
    for index in order:
        leaders = [cluster[0] for cluster in clusters]
        if leaders:
            ways = np.maximum(rate.between_s([index], leaders)[0], rate.between_s(leaders, [index])[:, 0])
            nearest = int(np.argmin(ways))
            if ways[nearest] <= near_s:
                clusters[nearest].append(index)
                continue
        clusters.append([index])
    return [tuple(cluster) for cluster in clusters]


# phase one


def _best_grouping(rate: SwarmRate, nodes: Group, budget: _Budget) -> tuple[list[_Filled], list[int]]:
    """Pipelines of some of the nodes, with the most tokens per second; and the others."""
    num_layers = rate.work.num_layers
    usable = [i for i in nodes if rate.hosts[i].capacity_layers > 0]
    usable.sort(key=lambda i: (-_capacity(rate, i), float(rate.layer_s[i]), rate.hosts[i].peer))
    capacities = [_capacity(rate, i) for i in usable]
    most = sum(capacities) // num_layers
    best: tuple[float, list[_Filled], set[int]] = (0.0, [], set())
    is_exact = len(usable) <= MAX_EXACT_NODES
    for num_pipelines in range(1, most + 1) if is_exact else (most,):
        members = _fewest_stages(capacities, num_layers, num_pipelines, budget) if is_exact else None
        if members is None:
            members = _largest_first(capacities, num_layers, num_pipelines)
        groups = [tuple(usable[m] for m in group) for group in members]
        filled = [each for group in groups if (each := _fill(rate, group)) is not None]
        total = sum(rate.work.tokens_per_loop / each.loop_s for each in filled)
        if total > best[0] * (1 + 1e-9):
            best = (total, filled, {index for each in filled for index, _ in each.stages})
    return best[1], [index for index in nodes if index not in best[2]]


def _capacity(rate: SwarmRate, index: int) -> int:
    return min(rate.hosts[index].capacity_layers, rate.work.num_layers)


def _fewest_stages(
    capacities: Sequence[int], num_layers: int, num_pipelines: int, budget: _Budget
) -> list[list[int]] | None:
    """Parallax's program over (node, what open pipelines lack, how many are finished).

    Returns:
        Members of each pipeline as indices of ``capacities``, which descend; None when there are not so many pipelines
        in them, or the budget is used up.
    """
    suffix = [0, *itertools.accumulate(reversed(capacities))][::-1]
    known: dict[tuple[int, tuple[int, ...], int], tuple[float, int]] = {}
    inf = float("inf")

    def solve(node: int, lacking: tuple[int, ...], finished: int) -> float:
        if finished == num_pipelines and not lacking:
            return 0.0
        new = num_pipelines - finished - len(lacking)
        if node == len(capacities) or new < 0 or suffix[node] < sum(lacking) + new * num_layers:
            return inf
        key = (node, lacking, finished)
        if key in known:
            return known[key][0]
        budget.states -= 1
        if budget.states < 0:
            return inf
        # -1: the node is left out. Else the open pipeline of that index, or a new one.
        best = (solve(node + 1, lacking, finished), -1)
        tried = set()
        for index, lack in enumerate((*lacking, num_layers) if new else lacking):
            if lack in tried:
                continue
            tried.add(lack)
            rest = lacking[:index] + lacking[index + 1 :]
            lack -= capacities[node]
            cost = 1 + (
                solve(node + 1, tuple(sorted((*rest, lack))), finished)
                if lack > 0
                else solve(node + 1, rest, finished + 1)
            )
            if cost < best[0]:
                best = (cost, index)
        known[key] = best
        return best[0]

    if solve(0, (), 0) == inf or budget.states < 0:
        return None
    groups: list[list[int]] = []
    open_groups: list[tuple[int, list[int]]] = []
    finished = 0
    for node, capacity in enumerate(capacities):
        if finished == num_pipelines:
            break
        lacking = tuple(lack for lack, _ in open_groups)
        _, choice = known[(node, lacking, finished)]
        if choice == -1:
            continue
        lack, group = open_groups.pop(choice) if choice < len(open_groups) else (num_layers, [])
        group.append(node)
        if lack > capacity:
            open_groups.append((lack - capacity, group))
            open_groups.sort(key=lambda each: each[0])
        else:
            groups.append(group)
            finished += 1
    return groups


def _largest_first(capacities: Sequence[int], num_layers: int, num_pipelines: int) -> list[list[int]]:
    """Pipelines from the largest nodes; the last of each is the smallest that completes it. Capacities descend."""
    left = list(range(len(capacities)))
    groups: list[list[int]] = []
    while len(groups) < num_pipelines and left:
        group, lack = [], num_layers
        while lack > 0 and left:
            completing = [position for position, node in enumerate(left) if capacities[node] >= lack]
            node = left.pop(completing[-1] if completing else 0)
            group.append(node)
            lack -= capacities[node]
        if lack > 0:
            break
        groups.append(group)
    return groups


# phase two


@dataclass(frozen=True, slots=True)
class _Filled:
    """A pipeline with its layers.

    Attributes:
        stages: what each host holds.
        loop_s: when each computes just its share; what it holds beyond that can only make it faster.
    """

    stages: tuple[tuple[int, LayerRange], ...]
    loop_s: float


def _fill(rate: SwarmRate, group: Group) -> _Filled | None:
    """What each node of a pipeline holds; None when the cuts of the model leave no way to do it."""
    members = tuple(sorted(group, key=lambda i: (_start(rate.hosts[i].held), rate.hosts[i].peer)))
    legs = _Legs(rate, members)
    order = _order(legs, len(members))
    indices = [members[i] for i in order]
    capacities = [_capacity(rate, i) for i in indices]
    amounts = water_fill(capacities, [float(rate.layer_s[i]) for i in indices], rate.work.num_layers)
    bounds = _bounds(amounts, capacities, rate.work)
    if bounds is None:
        return None
    stages, loop_s = [], legs.seconds(order)
    for index, capacity, (start, stop) in zip(indices, capacities, itertools.pairwise(bounds), strict=True):
        if start < stop:
            stages.append((index, _widened(LayerRange(start, stop), capacity, rate.work)))
            loop_s += float(rate.layer_s[index]) * (stop - start)
    return _Filled(tuple(stages), loop_s)


def water_fill(capacities: Sequence[int], seconds_per_layer: Sequence[float], num_layers: int) -> list[int]:
    """Layers per node so that all take as long as one another, but for those that are full before.

    Args:
        capacities: together at least ``num_layers``.
    """
    speeds = [1.0 / seconds for seconds in seconds_per_layer]
    low, high = 0.0, max(c / s for c, s in zip(capacities, speeds, strict=True)) + 1.0
    for _ in range(60):
        level = (low + high) / 2
        if sum(min(c, level * s) for c, s in zip(capacities, speeds, strict=True)) < num_layers:
            low = level
        else:
            high = level
    exact = [min(float(c), high * s) for c, s in zip(capacities, speeds, strict=True)]
    amounts = [min(int(each + 1e-9), c) for each, c in zip(exact, capacities, strict=True)]
    by_rest = sorted(range(len(amounts)), key=lambda i: (amounts[i] - exact[i], i))
    missing = num_layers - sum(amounts)
    while missing > 0:
        for index in by_rest:
            if missing and amounts[index] < capacities[index]:
                amounts[index] += 1
                missing -= 1
    return amounts


def _bounds(amounts: Sequence[int], capacities: Sequence[int], work: Work) -> list[int] | None:
    """Where the stages begin and stop, at cuts of the model and within capacities; as near to the amounts as that."""
    if work.first_layers is None:
        return [0, *itertools.accumulate(amounts)]
    # Best ways to have come to each cut with so many nodes: the sum of distances to the wished bound.
    wished = list(itertools.accumulate(amounts))
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for position, (wish, capacity) in enumerate(zip(wished, capacities, strict=True)):
        reached: dict[int, tuple[float, list[int]]] = {}
        for cut in work.cuts:
            if position == len(amounts) - 1 and cut != work.num_layers:
                continue
            ways = [(cost, bounds) for start, (cost, bounds) in best.items() if 0 <= cut - start <= capacity]
            if ways:
                cost, bounds = min(ways)
                reached[cut] = (cost + abs(cut - wish), [*bounds, cut])
        best = reached
    return best[work.num_layers][1] if work.num_layers in best else None


def _widened(layers: LayerRange, capacity: int, work: Work) -> LayerRange:
    """With as many of the layers around it as there is room for, on both sides alike."""
    around = [w for w in windows(capacity, work) if w.start <= layers.start and layers.stop <= w.stop]
    middle = layers.start + layers.stop
    return min(around, key=lambda w: (-len(w), abs(w.start + w.stop - middle), w.start), default=layers)


def _order(legs: _Legs, num_stages: int) -> Group:
    """The order whose legs take the least time, the user's included; that of what they hold now, if it is as good."""
    indices = tuple(range(num_stages))
    if num_stages <= MAX_EXACT_ORDER:
        best = min(itertools.permutations(indices), key=legs.seconds)
    else:
        best = _exchange(legs, _nearest_first(legs, indices))
    return indices if legs.seconds(indices) <= legs.seconds(best) * 1.02 else best


def _start(held: Range) -> int:
    return 1_000_000 if held is None else held.start


@dataclass(slots=True)
class _Legs:
    """Legs of a group as plain lists: orders are tried by the thousand."""

    rate: SwarmRate
    members: Group
    first: list[float] = field(init=False)
    last: list[float] = field(init=False)
    between: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.first = [float(self.rate.from_user_s[i]) for i in self.members]
        self.last = [float(self.rate.to_user_s[i]) for i in self.members]
        self.between = self.rate.between_s(self.members, self.members).tolist()

    def seconds(self, order: Sequence[int]) -> float:
        between = self.between
        return self.first[order[0]] + sum(between[a][b] for a, b in itertools.pairwise(order)) + self.last[order[-1]]


def _nearest_first(legs: _Legs, indices: Group) -> Group:
    left = set(indices)
    order = [min(left, key=lambda i: (legs.first[i], i))]
    left.remove(order[0])
    while left:
        here = order[-1]
        order.append(min(left, key=lambda i: (legs.between[here][i], i)))
        left.remove(order[-1])
    return tuple(order)


def _exchange(legs: _Legs, order: Group) -> Group:
    """2-opt until nothing helps, ten rounds at most."""
    best, best_s = order, legs.seconds(order)
    for _ in range(10):
        before_s = best_s
        for i, j in itertools.combinations(range(len(order) + 1), 2):
            tried = best[:i] + best[i:j][::-1] + best[j:]
            tried_s = legs.seconds(tried)
            if tried_s < best_s - 1e-12:
                best, best_s = tried, tried_s
        if best_s == before_s:
            break
    return best
