"""Parallax's published algorithms: which layers nodes take, and how requests are routed. Pure.

Re-implemented from the description of its scheduler (src/scheduling/{layer_allocation,request_routing}.py): phase 1
tiles pipelines over nodes by a dynamic program and splits the layers inside each by water-filling; phase 2 routes over
nodes whose ranges abut. Kept as upstream has them: phase 1 does not know of the network, phase 2 adds a node's time per
layer once per node, and leaves out the ways from and to the user.

What upstream takes off the first and last node for embedding and LM head is left out: the user keeps both here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion_node.types import LayerRange, PeerId
from scheduler.topology import RouteStage

MAX_EXACT_NODES = 28
"""For which the dynamic program ends within seconds; more are allocated greedily."""

_Residuals = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """As its scheduler sees it.

    Attributes:
        capacity: layers that fit.
        power: what layers are shared out by (TFLOPS, or bandwidth).
        layer_s: measured seconds per layer.
    """

    peer: PeerId
    capacity: int
    power: float
    layer_s: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who holds what.

    Attributes:
        pipelines: of indices of nodes with their layers, in order.
        spare: nodes in no pipeline, with the layers that they took besides.
    """

    pipelines: tuple[tuple[tuple[int, LayerRange], ...], ...]
    spare: tuple[tuple[int, LayerRange], ...]


def allocate(nodes: Sequence[Node], num_layers: int) -> Allocation | None:
    """Phase 1; None when all nodes together do not hold the model."""
    order = sorted(range(len(nodes)), key=lambda i: (-nodes[i].capacity, i))
    capacities = [nodes[i].capacity for i in order]
    tile = _tile if len(nodes) <= MAX_EXACT_NODES else _tile_greedily
    groups = tile(capacities, num_layers)
    if not groups:
        return None
    pipelines = [_fill([order[place] for place in group], nodes, num_layers) for group in groups]
    used = {index for pipeline in pipelines for index, _ in pipeline}
    return Allocation(tuple(pipelines), tuple(_spare(nodes, used, pipelines, num_layers)))


def _tile(capacities: Sequence[int], num_layers: int) -> list[list[int]]:
    """The number of pipelines k that makes ``k² / stages`` largest, with the fewest stages for it."""
    best: tuple[float, list[list[int]]] = (0.0, [])
    for target in range(1, min(len(capacities), sum(capacities) // num_layers) + 1):
        stages, actions = _fewest_stages(capacities, num_layers, target)
        if math.isfinite(stages) and target**2 / stages > best[0]:
            best = (target**2 / stages, _grouped(actions, capacities, num_layers))
    return best[1]


def _fewest_stages(capacities: Sequence[int], num_layers: int, target: int) -> tuple[float, list[int | None]]:
    """Stages of ``target`` pipelines, and for each node what it does: None skips, -1 begins a pipeline, and another
    number goes on with the open pipeline that lacks so many layers."""
    num_nodes = len(capacities)
    suffix = [sum(capacities[i:]) for i in range(num_nodes + 1)]

    @functools.cache
    def least(i: int, lacking: _Residuals, finished: int) -> tuple[float, int | None]:
        if finished == target and not lacking:
            return 0.0, None
        unopened = target - finished - len(lacking)
        if (
            i == num_nodes
            or unopened < 0
            or suffix[i] < sum(lacking) + unopened * num_layers
            or finished + len(lacking) + num_nodes - i < target
        ):
            return math.inf, None
        capacity = capacities[i]
        best: tuple[float, int | None] = (least(i + 1, lacking, finished)[0], None)
        for lack in sorted(set(lacking)):
            best = min(best, (1 + least(i + 1, *_go_on(lacking, finished, lack, capacity))[0], lack), key=_first)
        if unopened > 0:
            state = _go_on((*lacking, num_layers), finished, num_layers, capacity)
            best = min(best, (1 + least(i + 1, *state)[0], -1), key=_first)
        return best

    stages, actions = least(0, (), 0)[0], []
    state: tuple[_Residuals, int] = ((), 0)
    for i in range(num_nodes):
        action = least(i, *state)[1] if math.isfinite(stages) else None
        actions.append(action)
        if action is not None:
            lacking, finished = state
            lack = num_layers if action == -1 else action
            state = _go_on((*lacking, num_layers) if action == -1 else lacking, finished, lack, capacities[i])
    return stages, actions


def _first(choice: tuple[float, int | None]) -> float:
    return choice[0]


def _go_on(lacking: _Residuals, finished: int, lack: int, capacity: int) -> tuple[_Residuals, int]:
    """After a node has been put to a pipeline that lacks so many layers."""
    rest = list(lacking)
    rest.remove(lack)
    if lack <= capacity:
        return tuple(sorted(rest)), finished + 1
    return tuple(sorted([*rest, lack - capacity])), finished


def _grouped(actions: Sequence[int | None], capacities: Sequence[int], num_layers: int) -> list[list[int]]:
    still_open: list[tuple[int, list[int]]] = []
    groups: list[list[int]] = []
    for node, action in enumerate(actions):
        if action is None:
            continue
        if action == -1:
            lack, group = num_layers, []
        else:
            lack, group = still_open.pop(next(i for i, (lack, _) in enumerate(still_open) if lack == action))
        group.append(node)
        if lack <= capacities[node]:
            groups.append(group)
        else:
            still_open.append((lack - capacities[node], group))
    return groups


def _tile_greedily(capacities: Sequence[int], num_layers: int) -> list[list[int]]:
    """The biggest node first, and the smallest that ends a pipeline, as long as the rest can still make one."""
    left = list(range(len(capacities)))
    groups: list[list[int]] = []
    while sum(capacities[i] for i in left) >= num_layers:
        group: list[int] = []
        lack = num_layers
        while lack > 0 and left:
            ending = [i for i in left if capacities[i] >= lack]
            chosen = ending[-1] if ending else left[0]
            left.remove(chosen)
            group.append(chosen)
            lack -= capacities[chosen]
        if lack <= 0:
            groups.append(group)
    return groups


def _fill(group: Sequence[int], nodes: Sequence[Node], num_layers: int) -> tuple[tuple[int, LayerRange], ...]:
    """Water-filling: shares in proportion to power, up to what fits, as contiguous ranges in order of capacity."""
    low, high = 0.0, num_layers / min(nodes[i].power for i in group)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(min(nodes[i].capacity, middle * nodes[i].power) for i in group) < num_layers:
            low = middle
        else:
            high = middle
    shares = [min(nodes[i].capacity, high * nodes[i].power) for i in group]
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(group)), key=lambda place: counts[place] - shares[place])
    while sum(counts) < num_layers:
        for place in order:
            if sum(counts) < num_layers and counts[place] < nodes[group[place]].capacity:
                counts[place] += 1
    while sum(counts) > num_layers:
        counts[counts.index(max(counts))] -= 1
    stages = []
    start = 0
    for index, count in zip(group, counts, strict=True):
        if count:
            stages.append((index, LayerRange(start, start + count)))
            start += count
    return tuple(stages)


def _spare(
    nodes: Sequence[Node],
    used: set[int],
    pipelines: Sequence[Sequence[tuple[int, LayerRange]]],
    num_layers: int,
) -> list[tuple[int, LayerRange]]:
    """What is left over takes the layers that are held least."""
    holders = [0] * num_layers
    for pipeline in pipelines:
        for _, layers in pipeline:
            for layer in range(layers.start, layers.stop):
                holders[layer] += 1
    taken = []
    for index, node in enumerate(nodes):
        size = min(node.capacity, num_layers)
        if index in used or size == 0:
            continue
        layers = lightest(holders, size)
        taken.append((index, layers))
        for layer in range(layers.start, layers.stop):
            holders[layer] += 1
    return taken


def lightest(holders: Sequence[int], size: int) -> LayerRange:
    """What a node takes that joins later: the layers that are held least, the first of equals.

    Args:
        holders: nodes that hold each layer.
        size: layers that fit on it.
    """
    start = min(range(len(holders) - size + 1), key=lambda start: (sum(holders[start : start + size]), start))
    return LayerRange(start, start + size)


def route_in_turn(
    allocation: Allocation, nodes: Sequence[Node], rtt_s: Callable[[PeerId, PeerId], float]
) -> list[tuple[RouteStage, ...]]:
    """The default router: pipelines without a node in common, the best of each first node; requests take turns."""
    placed = [*(stage for pipeline in allocation.pipelines for stage in pipeline), *allocation.spare]
    by_start: dict[int, list[tuple[int, LayerRange]]] = {}
    for index, layers in placed:
        by_start.setdefault(layers.start, []).append((index, layers))
    num_layers = max(layers.stop for _, layers in placed)
    found: list[tuple[float, tuple[tuple[int, LayerRange], ...]]] = []

    def extend(done: tuple[tuple[int, LayerRange], ...], cost: float) -> None:
        layer = done[-1][1].stop if done else 0
        if layer == num_layers:
            found.append((cost, done))
            return
        for index, layers in by_start.get(layer, ()):
            leg_s = rtt_s(nodes[done[-1][0]].peer, nodes[index].peer) if done else 0.0
            extend((*done, (index, layers)), cost + leg_s + nodes[index].layer_s)

    extend((), 0.0)
    used: set[int] = set()
    chosen = []
    for _, stages in sorted(found, key=lambda each: (each[0], each[1])):
        if used.isdisjoint(index for index, _ in stages):
            used |= {index for index, _ in stages}
            chosen.append(tuple(RouteStage(nodes[index].peer, layers) for index, layers in stages))
    return chosen


def route_shortest(
    allocation: Allocation, nodes: Sequence[Node], rtt_s: Callable[[PeerId, PeerId], float]
) -> tuple[RouteStage, ...] | None:
    """The other router: the shortest path over ranges that abut."""
    placed = [*(stage for pipeline in allocation.pipelines for stage in pipeline), *allocation.spare]
    num_layers = max(layers.stop for _, layers in placed)
    return shortest(placed, nodes, rtt_s, LayerRange(0, num_layers))


def shortest(
    placed: Sequence[tuple[int, LayerRange]],
    nodes: Sequence[Node],
    rtt_s: Callable[[PeerId, PeerId], float],
    span: LayerRange,
) -> tuple[RouteStage, ...] | None:
    """The shortest path from the first to the last layer of a span, over nodes whose ranges abut; None: there is none.

    Args:
        placed: indices of nodes with the layers that they hold.
    """
    placed = sorted(placed, key=lambda stage: (stage[1].start, stage[1].stop, stage[0]))
    costs: list[float] = []
    before: list[int | None] = []
    ending: dict[int, list[int]] = {}
    """Places in ``placed`` that can be reached, by the layer at which they stop."""
    for place, (index, layers) in enumerate(placed):
        best: tuple[float, int | None] = (0.0 if layers.start == span.start else math.inf, None)
        for earlier in ending.get(layers.start, ()):
            cost = costs[earlier] + rtt_s(nodes[placed[earlier][0]].peer, nodes[index].peer)
            best = min(best, (cost, earlier), key=_first)
        costs.append(best[0] + nodes[index].layer_s)
        before.append(best[1])
        if math.isfinite(costs[-1]):
            ending.setdefault(layers.stop, []).append(place)
    ends = ending.get(span.stop, [])
    if not ends:
        return None
    last: int | None = min(ends, key=lambda place: costs[place])
    stages: list[RouteStage] = []
    while last is not None:
        index, layers = placed[last]
        stages.append(RouteStage(nodes[index].peer, layers))
        last = before[last]
    return tuple(reversed(stages))
