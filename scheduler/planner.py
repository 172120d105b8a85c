"""Chooses which nodes serve which layers: the route with the lowest expected seconds per decoded token.

Cost of a route: for every stage its round trip to the user, a fixed cost per hop, and its layers times its seconds per
layer. Round trips between nodes are not measured yet; half the sum of two nodes' round trips to the user bounds the leg
between them by the triangle inequality, and with that bound the legs of a loop user → stages → user add up to exactly
one round trip per stage. Few stages and near nodes win.

A node may be entered and left at any layer that it holds, unless the model has layers that cannot stand in front (they
use what a layer before them chose); a node then counts with what lies between those that can. Since the cost of a stage
is linear in its layers, an optimal route changes nodes only where some node's range starts or stops, so only those
boundaries are searched (Dijkstra). A node appears at most once in a route; where that rule binds, the result may be
slightly above the optimum.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fusion_node.types import LayerRange, PeerId

HOP_COST_S = 0.002
"""Seconds of framing and hand-over per stage on an idle machine; also breaks ties towards fewer stages."""

MIN_SECONDS_PER_LAYER = 1e-6
"""No claim of speed is believed below this: a claim of nothing must not attract everybody."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as the planner sees it.

    Attributes:
        layers: what it holds.
        round_trip_s: measured by the user.
        seconds_per_layer: announced, for one decoded token.
        kv_free_positions: announced room for a new session.
    """

    peer: PeerId
    layers: LayerRange
    round_trip_s: float
    seconds_per_layer: float
    kv_free_positions: int


@dataclass(frozen=True, slots=True)
class RouteStage:
    """One stage of a route."""

    peer: PeerId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Route:
    """Stages in order, covering every layer once, and the seconds that one decoded token is expected to take."""

    stages: tuple[RouteStage, ...]
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Uncovered:
    """No route: these layers are held by no node, or only by nodes without room.

    Attributes:
        layers: ranges that no usable node holds.
        without_room: ranges among them that a node holds which lacks KV memory for the session.
    """

    layers: tuple[LayerRange, ...]
    without_room: tuple[LayerRange, ...]


def plan_route(
    candidates: Iterable[Candidate],
    *,
    num_layers: int,
    num_positions: int,
    first_layers: Collection[int] | None = None,
) -> Route | Uncovered:
    """The cheapest route over ``[0, num_layers)`` for a session of ``num_positions`` KV positions.

    Args:
        first_layers: at which a stage may begin; None: at any.
    """
    known = _merge([c for c in candidates if c.layers.stop <= num_layers])
    if first_layers is not None:
        known = _cut(known, sorted({*first_layers, num_layers}))
    usable = [c for c in known if c.kv_free_positions >= num_positions]
    missing = uncovered_layers([c.layers for c in usable], num_layers)
    if missing:
        held = uncovered_layers([c.layers for c in known], num_layers)
        held_layers = {layer for r in held for layer in range(r.start, r.stop)}
        full = [layer for r in missing for layer in range(r.start, r.stop) if layer not in held_layers]
        return Uncovered(tuple(missing), tuple(as_ranges(full)))
    return _shortest(usable, num_layers) or Uncovered((LayerRange(0, num_layers),), ())


def uncovered_layers(ranges: Sequence[LayerRange], num_layers: int) -> list[LayerRange]:
    """The parts of ``[0, num_layers)`` that none of the ranges covers."""
    covered = {layer for r in ranges for layer in range(r.start, r.stop)}
    return as_ranges([layer for layer in range(num_layers) if layer not in covered])


def _shortest(candidates: Sequence[Candidate], num_layers: int) -> Route | None:
    boundaries = sorted({0, num_layers} | {b for c in candidates for b in (c.layers.start, c.layers.stop)})
    queue: list[tuple[float, int, int, tuple[RouteStage, ...]]] = [(0.0, 0, 0, ())]
    settled: set[int] = set()
    counter = 0  # breaks ties in insertion order, so that the same input gives the same route
    while queue:
        cost_s, _, layer, stages = heapq.heappop(queue)
        if layer == num_layers:
            return Route(stages, cost_s)
        if layer in settled:
            continue
        settled.add(layer)
        used = {stage.peer for stage in stages}
        for c in candidates:
            if not c.layers.start <= layer < c.layers.stop or c.peer in used:
                continue
            for stop in boundaries:
                if not layer < stop <= c.layers.stop:
                    continue
                part = LayerRange(layer, stop)
                per_layer_s = max(c.seconds_per_layer, MIN_SECONDS_PER_LAYER)
                step_s = HOP_COST_S + max(c.round_trip_s, 0.0) + len(part) * per_layer_s
                counter += 1
                heapq.heappush(queue, (cost_s + step_s, counter, stop, (*stages, RouteStage(c.peer, part))))
    # Every layer is held by somebody, but a node of two separate ranges could be needed for both.
    return None


def _merge(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One candidate per peer and stretch of layers: ranges of one peer that touch are one, as slow as the slower."""
    merged: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.peer, c.layers)):
        last = merged[-1] if merged else None
        if last is not None and last.peer == c.peer and c.layers.start <= last.layers.stop:
            merged[-1] = replace(
                last,
                layers=LayerRange(last.layers.start, max(last.layers.stop, c.layers.stop)),
                seconds_per_layer=max(last.seconds_per_layer, c.seconds_per_layer),
                kv_free_positions=min(last.kv_free_positions, c.kv_free_positions),
            )
        else:
            merged.append(c)
    return merged


def _cut(candidates: Iterable[Candidate], cuts: Sequence[int]) -> list[Candidate]:
    """The candidates with what they hold from the first of the cuts to the last."""
    kept = []
    for c in candidates:
        held = [cut for cut in cuts if c.layers.start <= cut <= c.layers.stop]
        if len(held) > 1:
            kept.append(replace(c, layers=LayerRange(held[0], held[-1])))
    return kept


def as_ranges(layers: Sequence[int]) -> list[LayerRange]:
    """Ascending layers as the fewest ranges."""
    ranges: list[LayerRange] = []
    for layer in layers:
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = LayerRange(ranges[-1].start, layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1))
    return ranges
