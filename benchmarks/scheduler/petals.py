"""Petals' published algorithms: which blocks a server takes, when it moves, and how a client routes. Pure.

Re-implemented from the description of petals 2.x (server/block_selection.py, client/routing/sequence_manager.py,
server/throughput.py), in its own terms: a block is a layer, a span is what a server holds.

Faithful in what it does not do: no bytes on the legs, no queue, a fixed 18 ms per leg, servers that know the round
trips to ten others, and 150 ms for the rest. More than faithful in one thing: the client knows its round trip to all.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusion_node.types import LayerRange, PeerId
from scheduler.topology import RouteStage

OVERHEAD_S = 0.018
"""Per leg, in the client's cost."""

UNKNOWN_RTT_S = 0.15
MAX_RTT_S = 5.0
NO_CACHE_PENALTY_S = 10.0
BALANCE_QUALITY = 0.75
NUM_PINGED = 10
"""Next servers whose round trip a server announces."""

_EPS = 1e-3


@dataclass(frozen=True, slots=True)
class Server:
    """As it announces itself.

    Attributes:
        throughput: rows per second through its span, or through its network, whichever is less.
        inference_rps: blocks per second for a single token.
        cache_tokens_left: summed over blocks.
        next_pings: round trips to servers of the block after its span.
    """

    peer: PeerId
    span: LayerRange
    throughput: float
    inference_rps: float
    cache_tokens_left: int
    next_pings: Mapping[PeerId, float] = field(default_factory=dict)


def announced_throughput(forward_rps: float, network_rps: float, num_blocks: int) -> float:
    """Of a server with so many blocks: a request uses half of them on average.

    Args:
        forward_rps: rows per second through one block, in large batches.
        network_rps: rows per second through its line.
    """
    return min(forward_rps / ((num_blocks + 1) / 2), network_rps)


def best_start(throughputs: Sequence[float], num_blocks: int) -> int:
    """The window whose worst block is worst, then whose second worst is, and so on; the first of equals."""
    worst = [min(throughputs[start : start + num_blocks]) for start in range(len(throughputs) - num_blocks + 1)]
    starts = [start for start, throughput in enumerate(worst) if throughput == min(worst)]
    return min(starts, key=lambda start: (sorted(throughputs[start : start + num_blocks]), start))


def join(spans: Sequence[tuple[LayerRange, float]], num_layers: int, num_blocks: int) -> LayerRange:
    """What a server that comes takes, given the spans and throughputs of those that are there."""
    start = best_start(_per_block(spans, num_layers), num_blocks)
    return LayerRange(start, start + num_blocks)


def should_move(spans: Sequence[tuple[LayerRange, float]], own: int, num_layers: int, rng: random.Random) -> bool:
    """Whether a server moves: when all would gain a third by it, if all others then moved to where they are best.

    Args:
        spans: of all servers with their throughputs.
        own: which of them decides.
    """
    ranges, rates = [span for span, _ in spans], [rate for _, rate in spans]
    blocks = _per_block(spans, num_layers)
    before = min(blocks)

    def lift(index: int, factor: float) -> None:
        for block in range(ranges[index].start, ranges[index].stop):
            blocks[block] -= rates[index] * factor

    def settle(index: int) -> bool:
        """Moves a server to its best blocks; says whether these are others."""
        lift(index, 1 + _EPS)
        start = best_start(blocks, len(ranges[index]))
        lift(index, -_EPS)
        is_new = start != ranges[index].start
        ranges[index] = LayerRange(start, start + len(ranges[index]))
        lift(index, -1)
        return is_new

    lift(own, 1 + _EPS)
    if before > _EPS and min(blocks) <= 0:
        return False  # nobody would hold some block
    lift(own, -(1 + _EPS))
    if not settle(own):
        return False
    has_moved = True
    while has_moved:
        has_moved = False
        for index in rng.sample(range(len(ranges)), len(ranges)):
            has_moved |= settle(index)
    after = min(blocks)
    if after < before or after < _EPS:
        return False
    return before / after < BALANCE_QUALITY - _EPS


def place(
    blocks_of: Sequence[int], throughputs: Sequence[float], num_layers: int, rng: random.Random, *, num_checks: int = 3
) -> list[LayerRange]:
    """All servers join one after another, each with a fresh view, and then look for better blocks some times each."""
    spans: list[tuple[LayerRange, float]] = []
    for num_blocks, throughput in zip(blocks_of, throughputs, strict=True):
        spans.append((join(spans, num_layers, num_blocks), throughput))
    for _ in range(num_checks):
        for own in rng.sample(range(len(spans)), len(spans)):
            if should_move(spans, own, num_layers, rng):
                others = [span for index, span in enumerate(spans) if index != own]
                spans[own] = (join(others, num_layers, len(spans[own][0])), spans[own][1])
    return [span for span, _ in spans]


def pinged(servers: Sequence[Server], rtt_s: Mapping[tuple[PeerId, PeerId], float], rng: random.Random) -> list[Server]:
    """The servers with the round trips that each of them announces, to some of those that hold the block after its
    span."""
    announced = []
    for server in servers:
        following = [s.peer for s in servers if s.span.start <= server.span.stop < s.span.stop and s is not server]
        known = rng.sample(following, min(NUM_PINGED, len(following)))
        pings = {peer: rtt_s[server.peer, peer] for peer in known}
        announced.append(
            Server(server.peer, server.span, server.throughput, server.inference_rps, server.cache_tokens_left, pings)
        )
    return announced


def route_min_latency(
    servers: Sequence[Server], client_rtt_s: Mapping[PeerId, float], num_layers: int, max_length: int
) -> tuple[RouteStage, ...] | None:
    """Dijkstra over (server, block). A server is left only where its span ends, and entered anywhere in its span."""
    queue: list[tuple[float, int, int, int]] = []
    counter = itertools.count()
    came_from: dict[tuple[int, int], tuple[int, int] | None] = {}
    done: set[tuple[int, int]] = set()
    cost_of: dict[tuple[int, int], float] = {}

    def leg_s(rtt_s: float | None, server: Server) -> float:
        seconds = min(UNKNOWN_RTT_S if rtt_s is None else rtt_s, MAX_RTT_S) / 2 + OVERHEAD_S
        is_full = 2 * max_length * len(server.span) > server.cache_tokens_left
        return seconds + (NO_CACHE_PENALTY_S if is_full else 0.0)

    def push(cost: float, node: tuple[int, int], before: tuple[int, int] | None) -> None:
        if node not in done and cost < cost_of.get(node, float("inf")):
            cost_of[node], came_from[node] = cost, before
            heapq.heappush(queue, (cost, next(counter), *node))

    end = (-1, num_layers)
    for index, server in enumerate(servers):
        if server.span.start == 0:
            push(leg_s(client_rtt_s.get(server.peer), server), (index, 0), None)
    while queue:
        cost, _, index, block = heapq.heappop(queue)
        node = (index, block)
        if node in done:
            continue
        done.add(node)
        if node == end:
            return _stages(servers, came_from, node)
        server = servers[index]
        if block < server.span.stop:
            push(cost + 1 / server.inference_rps, (index, block + 1), node)
        elif block == num_layers:
            back = client_rtt_s.get(server.peer)
            push(cost + min(UNKNOWN_RTT_S if back is None else back, MAX_RTT_S) / 2, end, node)
        else:
            for other, following in enumerate(servers):
                if other != index and following.span.start <= block < following.span.stop:
                    push(cost + leg_s(server.next_pings.get(following.peer), following), (other, block), node)
    return None


def route_max_throughput(
    servers: Sequence[Server], num_layers: int, rng: random.Random
) -> tuple[RouteStage, ...] | None:
    """Of the servers that hold the next block, one by chance, in proportion to the length of its span."""
    stages: list[RouteStage] = []
    block = 0
    while block < num_layers:
        holders = [s for s in servers if s.span.start <= block < s.span.stop]
        if not holders:
            return None
        chosen = rng.choices(holders, [len(s.span) for s in holders])[0]
        stages.append(RouteStage(chosen.peer, LayerRange(block, chosen.span.stop)))
        block = chosen.span.stop
    return tuple(stages)


def _per_block(spans: Sequence[tuple[LayerRange, float]], num_layers: int) -> list[float]:
    blocks = [0.0] * num_layers
    for span, throughput in spans:
        for block in range(span.start, span.stop):
            blocks[block] += throughput
    return blocks


def _stages(
    servers: Sequence[Server],
    came_from: Mapping[tuple[int, int], tuple[int, int] | None],
    end: tuple[int, int],
) -> tuple[RouteStage, ...]:
    nodes: list[tuple[int, int]] = []
    node = came_from[end]
    while node is not None:
        nodes.append(node)
        node = came_from[node]
    stages = []
    for index, visits in itertools.groupby(reversed(nodes), key=lambda node: node[0]):
        blocks = [block for _, block in visits]
        stages.append(RouteStage(servers[index].peer, LayerRange(blocks[0], blocks[-1])))
    return tuple(stages)
