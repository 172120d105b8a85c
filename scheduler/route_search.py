"""Exact search for routes whose cost is a sum over legs and stages, their slowest one, or both.

A route changes nodes at cuts. ``arrive[n, s]`` is the least cost of having handed the rows to node n that stands before
layer s, and ``finish[n, b]`` that of node n having run all layers up to b, whatever it began with:

    arrive[n, s] = min over m of finish[m, s] + leg from m to n         (arrive[n, 0] = leg from the user)
    finish[n, b] = min over s of arrive[n, s] + what n needs for [s, b)

Both are taken over all nodes at once, so that L layers and N nodes cost L·N² additions in numpy. With the maximum in
the place of the sum it is the search for the route whose slowest part is fastest. Run on the mirrored problem, from the
end, it says for every node what the best route through it costs.

Guarantees: the answer is optimal for what the masks allow, and the same for the same input. A node may appear twice in
a route, when other nodes serve layers between: whoever calls has to forbid one of the two and search again. Or the
search is told which nodes exclude one another: then each partial route remembers whom it must not go to any more. That
keeps the rule and is no longer exact, since of two partial routes to the same place only the cheaper one is kept.

Shapes: N nodes, L layers. Costs are in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scheduler.leg_table import Floats

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]

MAX_PROBES, MIN_PROBES = 80, 3
"""Limits that ``best`` tries, however few the nodes and however little the budget."""

LAYER_OVERHEAD = 100_000
"""Additions that would take as long as a layer of a search does beside its additions."""

NARROW = 0.05
"""Relative width of an interval of limits below which ``best`` walks through it route by route."""

_ROUNDING = 1e-9
"""Relative: what the same sum may differ by when it is added up in another order."""


class Budget:
    """How much may be added up; a billion additions are about a second. What is under way is not broken off."""

    def __init__(self, additions: int) -> None:
        self.left = additions

    def spend(self, additions: int) -> None:
        """What a search takes, before it is made."""
        self.left -= additions


@dataclass(frozen=True, slots=True)
class Costs:
    """What legs and stages cost.

    Attributes:
        enter: of the leg from the user to each node [N].
        hand: of the leg to node [N] from node [N]; infinity where rows cannot go that way.
        leave: of the leg from each node to the user [N].
        fixed: of a stage on each node, whatever its layers [N].
        layer: of a layer on each node [N].
    """

    enter: Floats
    hand: Floats
    leave: Floats
    fixed: Floats
    layer: Floats

    def of(self, nodes: Ints) -> Costs:
        """Of some of the nodes."""
        return Costs(
            self.enter[nodes],
            np.ascontiguousarray(self.hand[np.ix_(nodes, nodes)]),
            self.leave[nodes],
            self.fixed[nodes],
            self.layer[nodes],
        )

    def mirrored(self) -> Costs:
        """Of the same legs taken backwards."""
        return Costs(self.leave, np.ascontiguousarray(self.hand.T), self.enter, self.fixed, self.layer)


@dataclass(frozen=True, slots=True)
class Space:
    """What is searched.

    Attributes:
        seconds: what adds up along a route.
        busy: what the slowest stage or leg of a route is measured by.
        allowed: whether a node may run a layer [N, L].
        cuts: whether a stage may begin before a layer [L + 1]; the first and the last are true.
    """

    seconds: Costs
    busy: Costs
    allowed: Bools
    cuts: Bools

    @property
    def num_nodes(self) -> int:
        return int(self.allowed.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.allowed.shape[1])

    @property
    def work(self) -> int:
        """Additions of one search, and what it takes beside them."""
        return self.num_layers * (self.num_nodes**2 + LAYER_OVERHEAD)

    def of(self, nodes: Ints) -> Space:
        """With some of the nodes only."""
        return Space(self.seconds.of(nodes), self.busy.of(nodes), self.allowed[nodes], self.cuts)

    def allowing(self, allowed: Bools) -> Space:
        """With another mask."""
        return Space(self.seconds, self.busy, allowed, self.cuts)

    def mirrored(self) -> Space:
        """From the end to the beginning."""
        return Space(
            self.seconds.mirrored(),
            self.busy.mirrored(),
            np.ascontiguousarray(self.allowed[:, ::-1]),
            np.ascontiguousarray(self.cuts[::-1]),
        )


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """A node's stage: it runs layers [start, stop)."""

    start: int
    stop: int
    node: int


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be small: ``max(seconds / share, busy)`` when there is a share, else ``seconds + weight * busy``.

    Attributes:
        base_seconds, base_busy: of the parts of a route that are settled and not in the space.
    """

    weight: float = 0.0
    share: float | None = None
    base_seconds: float = 0.0
    base_busy: float = 0.0

    @property
    def is_sum(self) -> bool:
        """Whether the slowest part does not matter."""
        return self.share is None and self.weight == 0.0

    def value(self, seconds: float, busy: float) -> float:
        """Of a route. Never falls when one of the two rises."""
        seconds, busy = seconds + self.base_seconds, max(busy, self.base_busy)
        if self.share is not None:
            return max(seconds / self.share, busy)
        return seconds + self.weight * busy if self.weight else seconds


@dataclass(frozen=True, slots=True)
class Found:
    """A route.

    Attributes:
        seconds: sum over its legs and stages.
        busy: of its slowest leg or stage.
        value: what was to be small.
        bound: no route of the space has a lower value; equal to it when the search was complete.
    """

    stretches: tuple[Stretch, ...]
    seconds: float
    busy: float
    value: float
    bound: float


def best(
    space: Space,
    goal: Goal,
    *,
    max_stages: int | None = None,
    budget: Budget | None = None,
    hint: Found | None = None,
    exclusive: Bools | None = None,
) -> Found | None:
    """The route of the lowest value, and of the lowest sum among equals; None when there is no route.

    Where the slowest part matters, routes are searched under limits of what it may take. Let S be the lowest sum under
    the limit ``high``: a route whose slowest part lies in (low, high] has at least the value of S and ``low``.
    Intervals are split until none of them promises more than what was found, or until the budget is spent.

    Args:
        budget: None: as much as it takes.
        hint: a route of the space that is known already.
        exclusive: which nodes may not be in one route [N, N]; what is found then is a good route, and need not be the
            best one, so that its bound says nothing.
    """
    budget = budget or Budget(2**62)
    work = space.work * (max_stages or 1)
    budget.spend(work)
    winner = cheapest(space, max_stages=max_stages, exclusive=exclusive)
    if winner is None or goal.is_sum:
        return None if winner is None else _valued(winner, goal, _value(goal, winner))
    budget.spend(work)
    least = fastest_bottleneck(space, max_stages=max_stages)
    intervals = [(goal.value(winner.seconds, least), least, winner.busy, winner.seconds)]
    if hint is not None and (_value(goal, hint), hint.seconds) < (_value(goal, winner), winner.seconds):
        winner = hint
    num_probes = 0
    while intervals and num_probes < MAX_PROBES and (budget.left > 0 or num_probes < MIN_PROBES):
        bound, low, high, seconds = heapq.heappop(intervals)
        if bound >= _value(goal, winner) * (1 - _ROUNDING) or high <= low * (1 + _ROUNDING):
            continue
        num_probes += 1
        budget.spend(work)
        is_narrow = high - low < NARROW * high
        limit = high * (1 - _ROUNDING) if is_narrow else (low + high) / 2
        found = cheapest(space, limit=limit, max_stages=max_stages, exclusive=exclusive)
        if not is_narrow:
            heapq.heappush(intervals, (goal.value(seconds, limit), limit, high, seconds))
        if found is not None:
            if (_value(goal, found), found.seconds) < (_value(goal, winner), winner.seconds):
                winner = found
            heapq.heappush(intervals, (goal.value(found.seconds, low), low, found.busy, found.seconds))
    value = _value(goal, winner)
    open_bounds = [bound for bound, low, high, _ in intervals if high > low * (1 + _ROUNDING)]
    bound = min([value, *open_bounds])
    return _valued(winner, goal, value if bound >= value * (1 - _ROUNDING) else bound)


def cheapest(
    space: Space, *, limit: float = math.inf, max_stages: int | None = None, exclusive: Bools | None = None
) -> Found | None:
    """The route of the lowest sum among those without a part that is busy for longer than ``limit``."""
    costs = _LimitedSum(space, limit) if math.isfinite(limit) else _Sum(space)
    tables = _tables(space, costs, max_stages, exclusive)
    ends = np.array([table.ends for table in tables])
    round_, node = np.unravel_index(int(ends.argmin()), ends.shape)
    if math.isinf(ends[round_, node]):
        return None
    stretches = _trace(tables, int(round_), int(node), space.num_layers)
    return _found(space, stretches)


def fastest_bottleneck(space: Space, *, max_stages: int | None = None) -> float:
    """How fast the slowest part of a route can be; infinity when there is no route."""
    return float(min(table.ends.min(initial=math.inf) for table in _tables(space, _Max(space), max_stages)))


@dataclass(frozen=True, slots=True)
class Through:
    """What the best route through each node costs.

    Attributes:
        cost: sum, or slowest part, as was asked for [N]; infinity where no route leads through a node.
    """

    cost: Floats
    _at: Ints
    _forward: _Table
    _backward: _Table

    def route(self, node: int) -> tuple[Stretch, ...]:
        """That route; not to be asked where there is none. Other nodes may appear twice."""
        num_layers = self._forward.arrive.shape[1]
        start = int(self._at[node])
        before: tuple[Stretch, ...] = ()
        if start > 0:
            before = _trace([self._forward], 0, int(self._forward.before[node, start]), start)
        mirrored = _trace([self._backward], 0, node, num_layers - start)
        after = [Stretch(num_layers - s.stop, num_layers - s.start, s.node) for s in reversed(mirrored)]
        return (*before, *after)


def through(space: Space, *, is_busy: bool = False) -> Through:
    """The best route through each node by its sum, or by its slowest part."""
    other = space.mirrored()
    forward = _tables(space, _Max(space) if is_busy else _Sum(space), None)[0]
    backward = _tables(other, _Max(other) if is_busy else _Sum(other), None)[0]
    rest = backward.finish[:, :0:-1]  # of the stage that begins before layer s, and all after it
    both = np.maximum(forward.arrive, rest) if is_busy else forward.arrive + rest
    return Through(both.min(axis=1, initial=math.inf), both.argmin(axis=1), forward, backward)


def measure(space: Space, stretches: Sequence[Stretch]) -> tuple[float, float]:
    """The sum over a route's legs and stages, and its slowest one."""
    nodes = [s.node for s in stretches]
    parts = [
        [float(costs.enter[nodes[0]]), float(costs.leave[nodes[-1]])]
        + [float(costs.hand[after, before]) for before, after in itertools.pairwise(nodes)]
        + [float(costs.fixed[s.node] + (s.stop - s.start) * costs.layer[s.node]) for s in stretches]
        for costs in (space.seconds, space.busy)
    ]
    return sum(parts[0]), max(parts[1])


def _found(space: Space, stretches: tuple[Stretch, ...]) -> Found:
    seconds, busy = measure(space, stretches)
    return Found(stretches, seconds, busy, math.nan, math.nan)


def _value(goal: Goal, found: Found) -> float:
    return goal.value(found.seconds, found.busy)


def _valued(found: Found, goal: Goal, bound: float) -> Found:
    return replace(found, value=_value(goal, found), bound=bound)


class _Table:
    """See the head of the file.

    Attributes:
        arrive: [N, L].
        finish: [N, L + 1].
        before: the node that hands over in ``arrive`` [N, L].
        start: the layer that the stage begins with in ``finish`` [N, L + 1].
        ends: of a route that ends on the node [N].
        running, began: as finish and start, of the last layer that was done [N].
        used: nodes that the routes of ``arrive`` may not go to any more [L, N, N]; None where that does not matter.
    """

    def __init__(self, num_nodes: int, num_layers: int, is_exclusive: bool) -> None:
        self.arrive = np.full((num_nodes, num_layers), math.inf)
        self.finish = np.full((num_nodes, num_layers + 1), math.inf)
        self.before = np.zeros((num_nodes, num_layers), dtype=np.int64)
        self.start = np.zeros((num_nodes, num_layers + 1), dtype=np.int64)
        self.ends = np.full(num_nodes, math.inf)
        self.running = np.full(num_nodes, math.inf)
        self.began = np.zeros(num_nodes, dtype=np.int64)
        self.used = np.zeros((num_layers, num_nodes, num_nodes), dtype=np.bool_) if is_exclusive else None


class _Sum:
    """Adds up seconds."""

    def __init__(self, space: Space) -> None:
        costs = space.seconds
        self.enter, self._hand, self._leave = costs.enter, costs.hand, costs.leave
        self._fixed, self._layer, self._barred, self._cuts = costs.fixed, costs.layer, ~space.allowed, space.cuts
        self._sums = np.empty_like(self._hand)

    def end(self, table: _Table) -> None:
        table.ends[:] = table.finish[:, -1] + self._leave

    def handed(self, finish: Floats, receivers: Ints, senders: Ints) -> Floats:
        if len(receivers) == len(senders) == len(self.enter):
            return np.add(self._hand, finish, out=self._sums)
        return self._hand[receivers[:, None], senders] + finish[senders]

    def run(self, table: _Table, stop: int, is_cut: bool) -> None:
        if stop == 1 or self._cuts[stop - 1]:  # elsewhere nothing has arrived
            fresh = table.arrive[:, stop - 1] + self._fixed
            # Of equals the stage that began earlier, so that a route has no more stages than it needs.
            is_better = fresh < table.running
            np.copyto(table.running, fresh, where=is_better)
            np.copyto(table.began, stop - 1, where=is_better)
        table.running += self._layer
        table.running[self._barred[:, stop - 1]] = math.inf
        if is_cut:
            table.finish[:, stop] = table.running
            table.start[:, stop] = table.began


class _LimitedSum(_Sum):
    """Adds up seconds, and leaves out what is busy for longer than a limit."""

    def __init__(self, space: Space, limit: float) -> None:
        super().__init__(space)
        costs, busy = space.seconds, space.busy
        self.enter = np.where(busy.enter > limit, math.inf, self.enter)
        self._leave = np.where(busy.leave > limit, math.inf, self._leave)
        self._hand = np.where(busy.hand > limit, math.inf, self._hand)
        self._earliest = _earliest(space, limit)
        # All that begins before a stop and runs up to it, less what all of that have in common.
        self._offset = costs.fixed[:, None] - np.arange(space.num_layers) * costs.layer[:, None]

    def run(self, table: _Table, stop: int, is_cut: bool) -> None:
        if is_cut:
            ran = table.arrive[:, :stop] + self._offset[:, :stop]
            _choose_start(table, ran, self._earliest, stop)
            table.finish[:, stop] += stop * self._layer


class _Max(_Sum):
    """Takes the slowest part."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        # A way that nothing can take is none, however little it would be busy.
        self.enter = np.where(np.isinf(space.seconds.enter), math.inf, space.busy.enter)
        self._leave = np.where(np.isinf(space.seconds.leave), math.inf, space.busy.leave)
        self._hand = np.where(np.isinf(space.seconds.hand), math.inf, space.busy.hand)
        self._earliest = _earliest(space, math.inf)
        num_layers = np.arange(space.num_layers, 0, -1)
        self._alone = space.busy.fixed[:, None] + num_layers * space.busy.layer[:, None]

    def end(self, table: _Table) -> None:
        table.ends[:] = np.maximum(table.finish[:, -1], self._leave)

    def handed(self, finish: Floats, receivers: Ints, senders: Ints) -> Floats:
        if len(receivers) == len(senders) == len(self.enter):
            return np.maximum(self._hand, finish, out=self._sums)
        return np.maximum(self._hand[receivers[:, None], senders], finish[senders])

    def run(self, table: _Table, stop: int, is_cut: bool) -> None:
        if is_cut:
            _choose_start(table, np.maximum(table.arrive[:, :stop], self._alone[:, -stop:]), self._earliest, stop)


def _choose_start(table: _Table, ran: Floats, earliest: Ints, stop: int) -> None:
    ran[np.arange(stop) < earliest[:, stop, None]] = math.inf
    which = ran.argmin(axis=1)
    table.start[:, stop] = which
    table.finish[:, stop] = ran[np.arange(len(which)), which]


def _earliest(space: Space, limit: float) -> Ints:
    """The first layer with which a stage may begin that ends at a cut [N, L + 1]; the cut itself where none may."""
    num_nodes, num_layers = space.allowed.shape
    earliest = np.zeros((num_nodes, num_layers + 1), dtype=np.int64)
    for stop in range(1, num_layers + 1):
        earliest[:, stop] = np.where(space.allowed[:, stop - 1], earliest[:, stop - 1], stop)
    if math.isfinite(limit):
        room = limit * (1 + _ROUNDING) - space.busy.fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(space.busy.layer > 0, np.floor(room / space.busy.layer), np.where(room >= 0, num_layers, 0))
        most = np.clip(most, 0, num_layers).astype(np.int64)
        earliest = np.maximum(earliest, np.arange(num_layers + 1) - most[:, None])
    return earliest


def _tables(space: Space, costs: _Sum, max_stages: int | None, exclusive: Bools | None = None) -> list[_Table]:
    """One table of routes of any number of stages, or one for each number up to ``max_stages``."""
    num_nodes, num_layers = space.num_nodes, space.num_layers
    tables: list[_Table] = []
    for number in range(1 if max_stages is None else max(min(max_stages, num_layers), 1)):
        table = _Table(num_nodes, num_layers, exclusive is not None)
        # With any number of stages a table hands over to itself: of a layer, all that it needs is done before.
        handing = table if max_stages is None else tables[-1] if tables else None
        if number == 0:
            table.arrive[:, 0] = costs.enter
        for stop in range(1, num_layers + 1):
            is_cut = stop == num_layers or bool(space.cuts[stop])
            costs.run(table, stop, is_cut)
            if is_cut and stop < num_layers and handing is not None:
                _arrive(table, handing, costs, space, stop, exclusive)
        costs.end(table)
        tables.append(table)
    return tables


def _arrive(table: _Table, handing: _Table, costs: _Sum, space: Space, start: int, exclusive: Bools | None) -> None:
    senders = np.isfinite(handing.finish[:, start]).nonzero()[0]
    receivers = space.allowed[:, start].nonzero()[0]
    if not len(senders) or not len(receivers):
        return
    handed = costs.handed(handing.finish[:, start], receivers, senders)
    used: Bools | None = None
    if table.used is not None and handing.used is not None and exclusive is not None:
        used = handing.used[handing.start[senders, start], senders] | exclusive[senders]
        handed[used[:, receivers].T] = math.inf
    which = handed.argmin(axis=1)
    table.arrive[receivers, start] = handed[np.arange(len(receivers)), which]
    table.before[receivers, start] = senders[which]
    if table.used is not None and used is not None:
        table.used[start, receivers] = used[which]


def _trace(tables: Sequence[_Table], last: int, node: int, stop: int) -> tuple[Stretch, ...]:
    stretches: list[Stretch] = []
    while True:
        table = tables[last]
        start = int(table.start[node, stop])
        stretches.append(Stretch(start, stop, node))
        if start == 0:
            return tuple(reversed(stretches))
        node, stop = int(table.before[node, start]), start
        last = max(last - 1, 0)
