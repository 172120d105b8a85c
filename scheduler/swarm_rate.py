"""What a placement of layers is worth: the tokens per second that a swarm gives, layers being where they are.

A swarm is worth the sum over its pipelines of tokens per loop by seconds per loop, where a loop is every leg with its
payload, the first and the one back to the user included, and for every stage its layers times its seconds per layer.
Pipelines are found as users would find them: the fastest loop over all nodes, entered and left at any layer that they
hold, then the fastest over the nodes that are left, and so on. What is left when no loop can be closed counts for a
little: it is what a broken stage is replaced with, and the beginning of the next pipeline.

Two things are not here. Tokenizer, embedding, final norm and LM head stay with the user, so that all layers cost the
same and neither end of a pipeline needs room for more. And a round trip that nobody knows has no value of its own
here: whoever implements Legs gives it one (LegSource.UNKNOWN), the same for every purpose.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion_node.types import LayerRange, PeerId
from scheduler.leg_table import BulkLegs, Floats, bulk_legs
from scheduler.topology import Legs

HOP_S = 0.002
"""Seconds of framing and hand-over per stage on an idle machine."""

MAX_ROUTES = 64
"""Pipelines that are counted. More of them are worth more, but no decision turns on the 65th."""

MAX_TOGETHER = 64
"""Hosts between which every leg is looked at."""

MAX_ONE_BY_ONE = 8
"""Hosts, as those of one pipeline, around which ways are reckoned number by number: arrays of one or two cost more."""

MAX_AT_ONCE = 1024
"""Hosts whose legs are asked for in one call, where legs can: 8 MiB. A call costs more than what it tells."""

NUM_LEADERS = 8
"""Of more hosts than that, those to whom the others are compared to tell who is near whom."""

ALTERNATES_WORTH = 0.25
"""Of the rate of a node-filling pipeline: what a complete second set of layers is worth that closes no loop."""

BELIEVED_RATIO = 8.0
"""A node counts as at most so many times faster, or slower, than the median: between an M-series laptop and a 4090
there is less per layer of the same numerics. A claim beyond it must neither attract nor repel anybody."""

Range = LayerRange | None
Indices = npt.NDArray[np.int_]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be placed, and how it is used.

    Attributes:
        layer_bytes: to load for one layer.
        row_bytes: of one position between two stages.
        first_layers: of the model, at which a range may begin; None: at all of them.
        rows_per_loop: in a step; 1 for plain decoding, as many as a tree has for speculation.
        tokens_per_loop: committed by a step.
    """

    num_layers: int
    layer_bytes: int
    row_bytes: int
    first_layers: frozenset[int] | None = None
    rows_per_loop: float = 1.0
    tokens_per_loop: float = 1.0

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers at which a range may begin or stop."""
        return tuple(range(self.num_layers + 1)) if self.first_layers is None else self._few_cuts(self.first_layers)

    def _few_cuts(self, first_layers: frozenset[int]) -> tuple[int, ...]:
        return tuple(sorted({*(c for c in first_layers if 0 <= c < self.num_layers), self.num_layers}))


@dataclass(frozen=True, slots=True)
class Host:
    """A node that may hold layers.

    Attributes:
        capacity_layers: that fit on it.
        seconds_per_layer: believed, for a step of the work's width; NaN while nobody knows.
        held: what it holds, or what it is loading; None: nothing.
        load_Bps: that it gets weights at; None: unknown.
        is_ready: whether ``held`` can be used now; False while it is being loaded.
        is_pinned: its operator has named the layers: it is never moved.
        held_for_s: since it last took other layers.
    """

    peer: PeerId
    capacity_layers: int
    seconds_per_layer: float
    held: LayerRange | None = None
    load_Bps: float | None = None
    is_ready: bool = True
    is_pinned: bool = False
    held_for_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A loop over every layer.

    Attributes:
        stages: index of the host, and the layers that it computes.
        loop_s: from the user through all of them and back.
    """

    stages: tuple[tuple[int, LayerRange], ...]
    loop_s: float


@dataclass(frozen=True, slots=True)
class Worth:
    """Of a placement; compared in this order.

    Attributes:
        num_covered: layers that somebody holds.
        tokens_per_s: of all pipelines and what is left over.
    """

    num_covered: int
    tokens_per_s: float


class SwarmRate:
    """Hosts with all that lies between them. Every method is a pure function of the ranges that it is given.

    Args:
        hosts: their order is that of all indices and ranges.
        legs: None in it stands for the users.
    """

    def __init__(self, hosts: Sequence[Host], work: Work, legs: Legs) -> None:
        self.hosts = tuple(hosts)
        self.work = work
        self._legs = legs
        self._payload_bytes = work.row_bytes * work.rows_per_loop
        self.layer_s = believed_speeds([host.seconds_per_layer for host in hosts])
        self.from_user_s = np.array([self._leg_s(None, host.peer) + HOP_S for host in hosts])
        self.to_user_s = np.array([self._leg_s(host.peer, None) for host in hosts])
        # NaN: not asked yet. A swarm of hundreds never needs most of its legs.
        self._between_s = np.full((len(hosts), len(hosts)), np.nan)
        np.fill_diagonal(self._between_s, 0.0)
        if isinstance(legs, BulkLegs) and len(hosts) <= MAX_AT_ONCE:
            self.between_s(range(len(hosts)), range(len(hosts)))
        median_s = float(np.median(self.layer_s)) if hosts else 1.0
        reach_s = float(np.median(self.from_user_s + self.to_user_s)) if hosts else 0.0
        self.reference = work.tokens_per_loop / (work.num_layers * median_s + reach_s)
        """Tokens per second of one median node that holds everything: the scale of what closes no loop."""

    def between_s(self, senders: Sequence[int] | Indices, receivers: Sequence[int] | Indices) -> Floats:
        """Seconds from each sender to each receiver, with the payload and the hand-over; 0 to itself."""
        pairs = (np.asarray(senders, dtype=int)[:, None], np.asarray(receivers, dtype=int))
        block: Floats = self._between_s[pairs]
        is_unknown = np.isnan(block)
        if is_unknown.any():
            ones, others = ([self.hosts[index].peer for index in indices] for indices in (senders, receivers))
            one_way_s, rate_Bps = bulk_legs(self._legs, ones, others, is_unknown)
            block = np.where(is_unknown, one_way_s + self._payload_bytes / rate_Bps + HOP_S, block)
            self._between_s[pairs] = block
        return block

    def worth(self, ranges: Sequence[Range]) -> Worth:
        """Of a placement."""
        return self._worth_of(ranges, *self.pipelines(ranges))

    def worths(self, index: int, ranges: Sequence[Range], options: Sequence[LayerRange]) -> list[Worth]:
        """Of the placements in which one host holds each of some ranges, which begin and stop at cuts, in its place."""
        placements = [[layers if i == index else each for i, each in enumerate(ranges)] for layers in options]
        if not placements:
            return []
        left = [i for i, layers in enumerate(placements[0]) if layers is not None]
        # Where every layer is a cut, stretches differ from option to option, and so would the last bits of sums.
        if len(left) > MAX_TOGETHER or self.work.first_layers is None:
            return [self.worth(each) for each in placements]
        grid = _Grid(self, ranges, left, varied=index, options=options)
        return [
            self._worth_of(each, _sorted(found), sorted(grid.left[number]))
            for number, (each, found) in enumerate(zip(placements, grid.pipelines(MAX_ROUTES), strict=True))
        ]

    def _worth_of(self, ranges: Sequence[Range], pipelines: Iterable[Pipeline], left: Iterable[int]) -> Worth:
        rate = sum(self.work.tokens_per_loop / pipeline.loop_s for pipeline in pipelines)
        rate += self.alternates_rate([ranges[index] for index in left])
        return Worth(sum(bool(n) for n in holders_per_layer(ranges, self.work.num_layers)), rate)

    def alternates_rate(self, ranges: Iterable[Range]) -> float:
        """What ranges in no pipeline are worth: for every layer half as much for each further holder."""
        return self.alternates_rate_of(holders_per_layer(ranges, self.work.num_layers))

    def alternates_rate_of(self, counts: Sequence[int]) -> float:
        """``alternates_rate`` of ranges, by how many of them have each layer."""
        share = sum(map(_share_of, counts)) / self.work.num_layers
        return ALTERNATES_WORTH * share * self.reference

    def pipelines(self, ranges: Sequence[Range]) -> tuple[list[Pipeline], list[int]]:
        """Node-disjoint loops, the fastest of those that are left first; and the hosts in none that hold something.

        Of more than MAX_TOGETHER hosts, parts are looked at one by one, of hosts that are near one another where it can
        be, and then what is left of all parts: not quite the same loops, but for the price of a few small swarms.
        """
        left = [index for index, layers in enumerate(ranges) if layers is not None]
        found: list[Pipeline] = []
        for _ in range(2):
            parts = self._parts(left)
            left = []
            for part in parts:
                grid = _Grid(self, ranges, part)
                found += grid.pipelines(MAX_ROUTES - len(found))[0]
                left += grid.left[0]
            if len(parts) == 1:
                break
        return _sorted(found), sorted(left)

    def fastest(self, ranges: Sequence[Range], among: Sequence[int]) -> Pipeline | None:
        """The fastest loop over some of the hosts; None when they do not hold every layer."""
        found = _Grid(self, ranges, among).pipelines(1)[0]
        return found[0] if found else None

    def ways_through(self, own: int, ranges: Sequence[Range], among: Sequence[int]) -> tuple[Floats, Floats]:
        """Around one host that would do a part of a loop, with others for the rest.

        Returns:
            Per layer boundary 0 to ``num_layers`` the seconds until rows that have passed all layers before it are with
            ``own``; and from there through all layers after it and back to the user. Infinite where nobody can.
        """
        if len(among) <= MAX_ONE_BY_ONE:
            return _ways_through_few(self, own, ranges, among)
        return _Grid(self, ranges, among, is_fine=True).ways_through(own)

    def _parts(self, indices: Sequence[int]) -> list[list[int]]:
        if len(indices) <= MAX_TOGETHER:
            return [list(indices)]
        by_hash = sorted(indices, key=lambda i: zlib.crc32(self.hosts[i].peer.encode()))
        leaders = by_hash[:NUM_LEADERS]
        nearest = np.argmin(self.between_s(by_hash, leaders), axis=1)
        ordered = [by_hash[row] for row in np.argsort(nearest, kind="stable")]
        return [ordered[start : start + MAX_TOGETHER] for start in range(0, len(ordered), MAX_TOGETHER)]

    def _leg_s(self, sender: PeerId | None, receiver: PeerId | None) -> float:
        return self._legs.leg(sender, receiver).seconds(self._payload_bytes)


class _Grid:
    """Hosts by stretches of layers over which nothing changes: nobody's range begins or ends within one.

    Seconds are linear in layers, so that a fastest loop changes hosts only between two of them. In each stretch only
    hosts that have its layers are looked at. Where one host may hold one of several ranges, the loops of all these
    cases are found together: for arrays this small, numpy takes little longer for three cases than for one.

    Args:
        is_fine: a stretch ends at every layer at which a range may begin.
        varied, options: this one host, of ``among``, holds one of these instead of what it has in ``ranges``; they
            begin and stop where stretches do. None: there is one case, that of ``ranges``.

    Attributes:
        left: of each case, the hosts that hold something and are in no loop yet.
    """

    def __init__(
        self,
        rate: SwarmRate,
        ranges: Sequence[Range],
        among: Sequence[int],
        *,
        is_fine: bool = False,
        varied: int | None = None,
        options: Sequence[LayerRange] = (),
    ) -> None:
        self._rate = rate
        self._num_layers = num_layers = rate.work.num_layers
        present = [index for index in among if ranges[index] is not None or index == varied]
        self._hosts = hosts = np.array(present, dtype=int)
        fixed = [None if index == varied else ranges[index] for index in present]
        edges = {0, num_layers, *(min(e, num_layers) for r in fixed if r is not None for e in (r.start, r.stop))}
        if is_fine or rate.work.first_layers is not None:
            edges |= set(rate.work.cuts)
        self.edges = sorted(edges)
        may_change = set(rate.work.cuts)
        self._may_change = [edge in may_change for edge in self.edges]
        self._positions = {index: position for position, index in enumerate(present)}
        self._stretches = [self._stretches_of(layers) for layers in fixed]
        self._varied = varied
        self._varied_stretches = [self._stretches_of(layers) for layers in options]
        num_cases = len(options) or 1
        self.left = [list(present) for _ in range(num_cases)]
        num_stretches = len(self.edges) - 1
        has = np.zeros((num_cases, num_stretches, len(present)), dtype=bool)
        for position, stretches in enumerate(self._stretches):
            has[:, stretches.start : stretches.stop, position] = True
        for case, stretches in enumerate(self._varied_stretches):
            has[case, stretches.start : stretches.stop, self._positions[self._own()]] = True
        self._num_left: list[list[int]] = has.sum(axis=2).tolist()
        layer_s, between_s = rate.layer_s[hosts], rate.between_s(hosts, hosts)
        # Per stretch: who has it in any case, as positions in ``hosts``, and what it takes them in each.
        has_any: npt.NDArray[np.bool_] = np.logical_or.reduce(has, axis=0)
        self._columns = [row.nonzero()[0] for row in has_any]
        self._places = has_any.cumsum(axis=1) - 1
        self._seconds: list[Floats] = []
        for stretch, columns in enumerate(self._columns):
            seconds = layer_s[columns] * (self.edges[stretch + 1] - self.edges[stretch])
            self._seconds.append(np.where(has[:, stretch, columns], seconds, np.inf))
        # Per edge between two stretches: to those who have the one from those who have the other.
        self._ways_s = [
            between_s[before, after[:, None]]
            if self._may_change[edge]
            else np.where(before == after[:, None], 0.0, np.inf)
            for edge, (before, after) in enumerate(itertools.pairwise(self._columns), start=1)
        ]
        self._first_s = rate.from_user_s[hosts[self._columns[0]]]
        self._last_s = rate.to_user_s[hosts[self._columns[-1]]]

    def pipelines(self, at_most: int) -> list[list[Pipeline]]:
        """Of each case: the fastest loop, then the fastest over the hosts that are left, and so on."""
        found: list[list[Pipeline]] = [[] for _ in self.left]
        open_cases = list(range(len(found))) if at_most > 0 else []
        while open_cases := [case for case in open_cases if all(self._num_left[case])]:
            arrivals, totals = self._arrive()
            for case in list(open_cases):
                pipeline = self._fastest(case, arrivals, totals[case])
                if pipeline is None:
                    open_cases.remove(case)
                    continue
                found[case].append(pipeline)
                self._remove(case, [index for index, _ in pipeline.stages])
                if len(found[case]) == at_most:
                    open_cases.remove(case)
        return found

    def ways_through(self, own: int) -> tuple[Floats, Floats]:
        before, after = np.full(self._num_layers + 1, np.inf), np.full(self._num_layers + 1, np.inf)
        before[0], after[-1] = self._rate.from_user_s[own], self._rate.to_user_s[own]
        if not len(self._hosts):
            return before, after
        to_own = self._rate.between_s(self._hosts, [own])[:, 0]
        from_own = self._rate.between_s([own], self._hosts)[0]
        inner = range(1, len(self.edges) - 1)
        seconds_of = [seconds[0] for seconds in self._seconds]
        least = np.minimum.reduce
        arrival = self._first_s + seconds_of[0]
        for edge in inner:
            if self._may_change[edge]:
                before[self.edges[edge]] = least(arrival + to_own[self._columns[edge - 1]], initial=np.inf)
            arrival = least(arrival + self._ways_s[edge - 1], axis=1, initial=np.inf) + seconds_of[edge]
        rest = self._last_s + seconds_of[-1]
        for edge in reversed(inner):
            if self._may_change[edge]:
                after[self.edges[edge]] = least(from_own[self._columns[edge]] + rest, initial=np.inf)
            rest = least(self._ways_s[edge - 1] + rest[:, None], axis=0, initial=np.inf) + seconds_of[edge - 1]
        return before, after

    def _own(self) -> int:
        if self._varied is None:
            raise ValueError("options of no host")
        return self._varied

    def _stretches_of(self, layers: Range) -> range:
        if layers is None:
            return range(0)
        stop = min(layers.stop, self._num_layers)
        return range(bisect.bisect_left(self.edges, layers.start), bisect.bisect_left(self.edges, stop))

    def _arrive(self) -> tuple[list[Floats], Floats]:
        """Seconds until each stretch is computed by each of those who have it; and until the rows are with the user."""
        arrival = self._first_s + self._seconds[0]
        arrivals = [arrival]
        for ways_s, seconds in zip(self._ways_s, self._seconds[1:], strict=True):
            arrival = np.minimum.reduce(arrival[:, None, :] + ways_s, axis=2) + seconds
            arrivals.append(arrival)
        return arrivals, arrival + self._last_s

    def _fastest(self, case: int, arrivals: Sequence[Floats], total: Floats) -> Pipeline | None:
        at = int(total.argmin())
        loop_s = float(total[at])
        if loop_s == math.inf:
            return None
        path = [at]
        for arrival, ways_s in zip(reversed(arrivals[:-1]), reversed(self._ways_s), strict=True):
            at = int((arrival[case] + ways_s[at]).argmin())
            path.append(at)
        stages: list[tuple[int, LayerRange]] = []
        for column, columns, (start, stop) in zip(
            reversed(path), self._columns, itertools.pairwise(self.edges), strict=True
        ):
            index = int(self._hosts[columns[column]])
            if stages and stages[-1][0] == index:
                start = stages.pop()[1].start
            stages.append((index, LayerRange(start, stop)))
        return Pipeline(tuple(stages), loop_s)

    def _remove(self, case: int, indices: Sequence[int]) -> None:
        """They hold nothing any more."""
        gone, num_left = set(indices), self._num_left[case]
        for index in indices:
            position = self._positions[index]
            for stretch in self._varied_stretches[case] if index == self._varied else self._stretches[position]:
                self._seconds[stretch][case, self._places[stretch, position]] = np.inf
                num_left[stretch] -= 1
        self.left[case] = [index for index in self.left[case] if index not in gone]


def _sorted(found: Iterable[Pipeline]) -> list[Pipeline]:
    return sorted(found, key=lambda pipeline: pipeline.loop_s)


def _ways_through_few(
    rate: SwarmRate, own: int, ranges: Sequence[Range], among: Sequence[int]
) -> tuple[Floats, Floats]:
    """As _Grid.ways_through, down to the last bit."""
    num_layers = rate.work.num_layers
    before, after = [math.inf] * (num_layers + 1), [math.inf] * (num_layers + 1)
    before[0], after[-1] = float(rate.from_user_s[own]), float(rate.to_user_s[own])
    hosts = [index for index in among if ranges[index] is not None]
    if not hosts:
        return np.array(before), np.array(after)
    held = [layers for index in hosts if (layers := ranges[index]) is not None]
    cuts = set(rate.work.cuts)
    ends = {min(end, num_layers) for layers in held for end in (layers.start, layers.stop)}
    edges = sorted({0, num_layers} | cuts | ends)
    columns = [
        [at for at, layers in enumerate(held) if layers.start <= start and layers.stop >= stop]
        for start, stop in itertools.pairwise(edges)
    ]
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    ways_s = rate.between_s([*hosts, own], [*hosts, own]).tolist()
    to_own, from_own = [row[-1] for row in ways_s], ways_s[-1]
    layer_s: list[float] = rate.layer_s[hosts].tolist()
    from_users_s = [(at, float(rate.from_user_s[hosts[at]])) for at in columns[0]]
    arrival = [(at, from_user_s + layer_s[at] * sizes[0]) for at, from_user_s in from_users_s]
    for edge in range(1, len(edges) - 1):
        if edges[edge] in cuts:
            before[edges[edge]] = min([s + to_own[at] for at, s in arrival], default=math.inf)
            reached = [(to, min([s + ways_s[at][to] for at, s in arrival], default=math.inf)) for to in columns[edge]]
        else:
            stays = dict(arrival)
            reached = [(to, stays.get(to, math.inf)) for to in columns[edge]]
        arrival = [(to, s + layer_s[to] * sizes[edge]) for to, s in reached]
    rest = [(at, float(rate.to_user_s[hosts[at]]) + layer_s[at] * sizes[-1]) for at in columns[-1]]
    for edge in reversed(range(1, len(edges) - 1)):
        if edges[edge] in cuts:
            after[edges[edge]] = min([from_own[at] + s for at, s in rest], default=math.inf)
            left = [(at, min([ways_s[at][to] + s for to, s in rest], default=math.inf)) for at in columns[edge - 1]]
        else:
            stays = dict(rest)
            left = [(at, stays.get(at, math.inf)) for at in columns[edge - 1]]
        rest = [(at, s + layer_s[at] * sizes[edge - 1]) for at, s in left]
    return np.array(before), np.array(after)


def believed_speeds(seconds_per_layer: Sequence[float]) -> Floats:
    """Claims, none of them further than BELIEVED_RATIO from the median; NaN, which claims nothing, is the median."""
    claims = np.asarray(seconds_per_layer, dtype=float)
    if not len(claims):
        return claims
    sane = [float(claim) for claim in claims if np.isfinite(claim) and claim > 0]
    median = statistics.median(sane) if sane else 1.0
    low, high = median / BELIEVED_RATIO, median * BELIEVED_RATIO
    believed: Floats = np.clip(np.nan_to_num(claims, nan=median, posinf=high, neginf=low), low, high)
    return believed


@functools.lru_cache(maxsize=4096)
def _share_of(count: int) -> float:
    return 1.0 - 0.5**count


def holders_per_layer(ranges: Iterable[Range], num_layers: int) -> list[int]:
    """How many of the ranges have each layer."""
    changes = [0] * (num_layers + 1)
    for layers in ranges:
        if layers is not None and layers.start < num_layers:
            changes[layers.start] += 1
            changes[min(layers.stop, num_layers)] -= 1
    return list(itertools.accumulate(changes[:-1]))


@functools.lru_cache(maxsize=1024)
def windows(capacity_layers: int, work: Work) -> tuple[LayerRange, ...]:
    """The longest ranges that fit on a node, one for each layer at which one may begin."""
    found = []
    cuts = work.cuts
    size = min(capacity_layers, work.num_layers)
    for start in cuts[:-1]:
        stop = cuts[bisect.bisect_right(cuts, start + size) - 1]
        # Where cuts are everywhere, a window that the end of the model shortens is worse than the one before it.
        if stop > start and (work.first_layers is not None or stop - start == size):
            found.append(LayerRange(start, stop))
    return tuple(found)
