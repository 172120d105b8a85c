"""Routes that keep rules about the route as a whole: no peer twice, one stage per operator, a price for all stages.

What cannot be said of one leg or stage alone, the search of scheduler.route_search does not know. So its answer, which
no allowed route can beat, is taken apart where it breaks a rule: into cases that forbid a node a layer or give it to
that node alone, of which every allowed route is in one. The most promising case is searched next (branch and bound;
Land and Doig, 1960). A price is put into the search too, as seconds per unit of it, at the rate that gives the highest
lower bound (Lagrange multiplier).

Before that, a route is sought that keeps the rules and need not be the best: whatever promises no more is left alone.

Guarantees: what is answered keeps all rules. The work is bounded, and the answer says below what no route can be.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.leg_table import Floats
from scheduler.route_search import Bools, Budget, Costs, Found, Goal, Ints, Space, Stretch, best, cheapest, measure

SIZES = (64, 256)
"""Nodes that are searched first, and then: those through which the shortest routes lead. A search for a sum goes on
with all of them where that can change anything; the others stop there, since each of their tries is many searches."""

MAX_TRIES = 160
"""Searches for one route."""

MAX_RATES = 16
"""Of the price, that are tried."""

_ROUNDING = 1e-9


class Breach(enum.Enum):
    """Of a rule about a route as a whole."""

    PEER_TWICE = enum.auto()
    OPERATOR_TWICE = enum.auto()
    TOO_DEAR = enum.auto()
    TOO_MANY_STAGES = enum.auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """The rules, of N nodes.

    Attributes:
        peers: nodes with the same number are one peer [N].
        operators: nodes with the same number have one operator [N]; None where that does not matter.
        tags: where nodes are groups of several: nodes that have a tag in common exclude one another [N, M]. The first
            ``num_peer_tags`` are peers, the others operators; None where no node is a group.
        prices: per layer [N].
        max_price: of all layers together; None: any.
        max_stages: None: any number.
    """

    peers: Ints
    operators: Ints | None
    prices: Floats
    max_price: float | None
    max_stages: int | None
    tags: Bools | None = None
    num_peer_tags: int = 0

    def of(self, nodes: Ints) -> Limits:
        """For some of the nodes."""
        return replace(
            self,
            peers=self.peers[nodes],
            operators=None if self.operators is None else self.operators[nodes],
            prices=self.prices[nodes],
            tags=None if self.tags is None else self.tags[nodes],
        )

    def breach(self, stretches: Sequence[Stretch]) -> Breach | None:
        """The first rule that a route breaks."""
        nodes = [s.node for s in stretches]
        if _first_repeated(self.peers, nodes):
            return Breach.PEER_TWICE
        if self.operators is not None and _first_repeated(self.operators, nodes):
            return Breach.OPERATOR_TWICE
        if self.tags is not None and (shared := _first_shared(self.tags, nodes)):
            return Breach.PEER_TWICE if shared[2] < self.num_peer_tags else Breach.OPERATOR_TWICE
        if self.max_price is not None and self.price(stretches) > self.max_price * (1 + _ROUNDING):
            return Breach.TOO_DEAR
        if self.max_stages is not None and len(stretches) > self.max_stages:
            return Breach.TOO_MANY_STAGES
        return None

    @property
    def exclusive(self) -> Bools:
        """Which nodes may not be in one route [N, N]: those of one peer, and of one operator where that matters."""
        same: Bools = self.peers[:, None] == self.peers
        if self.operators is not None:
            same |= self.operators[:, None] == self.operators
        if self.tags is not None:
            same |= (self.tags.astype(np.int32) @ self.tags.T.astype(np.int32)) > 0
        return same

    def price(self, stretches: Sequence[Stretch]) -> float:
        """Of all layers together."""
        return float(sum((s.stop - s.start) * self.prices[s.node] for s in stretches))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a search.

    Attributes:
        found: None when there is no route, or when none was found.
        bound: no route has a lower value; infinite when it is proven that there is none.
    """

    found: Found | None
    bound: float

    @property
    def is_proven(self) -> bool:
        """That no route is better."""
        return math.isinf(self.bound) if self.found is None else self.bound >= self.found.value * (1 - _ROUNDING)


def best_within(space: Space, goal: Goal, limits: Limits, floors: Floats, budget: Budget) -> Outcome:
    """The best route that keeps all rules, of the most promising nodes, and of more of them until it is proven.

    Args:
        floors: what every route through a node costs at least [N].
    """
    order = np.argsort(floors, kind="stable")
    order = order[np.isfinite(floors[order])]
    sizes = sorted({min(size, len(order)) for size in SIZES} | ({len(order)} if goal.is_sum else set()))
    outcome = Outcome(None, math.inf)
    for size in sizes if len(order) else ():
        nodes = np.sort(order[:size])
        hint = None if outcome.found is None else _numbered(outcome.found, np.searchsorted(nodes, range(len(floors))))
        outcome = _within_all(space.of(nodes), goal, limits.of(nodes), floors[nodes], budget, hint)
        rest = float(floors[order[size]]) if size < len(order) else math.inf
        if outcome.found is not None:
            outcome = Outcome(_numbered(outcome.found, nodes), min(outcome.bound, rest))
            if outcome.is_proven or outcome.bound < rest:
                break
        elif math.isinf(outcome.bound):
            outcome = Outcome(None, rest)
    return outcome


def _within_all(
    space: Space, goal: Goal, limits: Limits, floors: Floats, budget: Budget, hint: Found | None
) -> Outcome:
    if limits.max_stages is not None:
        # Rarely does the rule bind, and searching by the number of stages takes as many times as long.
        found = best(space, goal, budget=budget, hint=hint)
        if found is None:
            return Outcome(None, math.inf)
        if limits.breach(found.stretches) is None:
            return Outcome(found, found.bound)
    return _Branching(space, goal, limits, floors, budget, hint).run()


class _Branching:
    def __init__(
        self, space: Space, goal: Goal, limits: Limits, floors: Floats, budget: Budget, hint: Found | None
    ) -> None:
        self._space, self._goal, self._limits, self._floors = space, goal, limits, floors
        self._priced, self._credit = space, 0.0
        self._budget, self._tries = budget, MAX_TRIES
        self._winner: Found | None = None
        self._is_affordable = True
        self._counter = itertools.count()
        self._least_open = math.inf
        if hint is not None:
            self._consider(hint)

    def run(self) -> Outcome:
        first = self._relaxed(self._space.allowed)
        if first is None:
            return Outcome(self._winner, math.inf if self._winner is None else self._winner.value)
        if self._limits.breach(first.stretches) is not None:
            self._seek(first)
            if not self._is_affordable:
                return Outcome(None, math.inf)
            first = self._relaxed(self._space.allowed) or first
        heap: list[tuple[float, int, Bools, Found]] = []
        self._file(heap, self._space.allowed, first)
        while heap and self._may_try:
            bound, _, allowed, found = heapq.heappop(heap)
            if self._is_beaten(bound):
                heap = []
                break
            self._descend(heap, self._without_hopeless(allowed), found)
        value = math.inf if self._winner is None else self._winner.value
        return Outcome(self._winner, min([value, self._least_open, *(bound for bound, *_ in heap)]))

    @property
    def _may_try(self) -> bool:
        return self._tries > 0 and self._budget.left > 0

    def _descend(self, heap: list[tuple[float, int, Bools, Found]], allowed: Bools, found: Found) -> None:
        """Takes a route apart. While no route keeps all rules, its best case is taken apart at once."""
        while True:
            cases: list[tuple[float, int, Bools, Found]] = []
            for case in self._cases(allowed, found):
                self._tries -= 1
                relaxed = self._relaxed(case)
                if relaxed is not None:
                    self._file(cases, case, relaxed)
            cases.sort()
            if self._winner is None and cases and self._may_try:
                _, _, allowed, found = cases.pop(0)
                for case_ in cases:
                    heapq.heappush(heap, case_)
                continue
            for case_ in cases:
                heapq.heappush(heap, case_)
            return

    def _file(self, cases: list[tuple[float, int, Bools, Found]], allowed: Bools, found: Found) -> None:
        """Keeps a case if a better route may be in it, and its route if that one is."""
        if self._limits.breach(found.stretches) is None:
            self._consider(found)
            if found.bound >= found.value * (1 - _ROUNDING):
                return
            if self._credit == 0.0:
                # The search itself ended early; taking this apart would not make it end later.
                self._least_open = min(self._least_open, found.bound)
                return
        if not self._is_beaten(found.bound):
            cases.append((found.bound, next(self._counter), allowed, found))

    def _consider(self, found: Found) -> None:
        if self._winner is None or (found.value, found.seconds) < (self._winner.value, self._winner.seconds):
            self._winner = found

    def _is_beaten(self, bound: float) -> bool:
        return self._winner is not None and bound >= self._winner.value * (1 - _ROUNDING)

    def _without_hopeless(self, allowed: Bools) -> Bools:
        if self._winner is None:
            return allowed
        return allowed & (self._floors <= self._winner.value * (1 + _ROUNDING))[:, None]

    def _relaxed(self, allowed: Bools) -> Found | None:
        """The best route by what the search knows; its bound, and what it really costs."""
        found = best(
            self._priced.allowing(allowed),
            self._goal,
            max_stages=self._limits.max_stages,
            budget=self._budget,
        )
        if found is None:
            return None
        return self._really(found, found.bound - self._credit)

    def _really(self, found: Found, bound: float) -> Found:
        """The same route without what its price was taken for."""
        seconds, busy = measure(self._space, found.stretches)
        return replace(found, seconds=seconds, busy=busy, value=self._goal.value(seconds, busy), bound=bound)

    def _seek(self, first: Found) -> None:
        """Finds some route that keeps all rules, and the rate of the price at which the search bounds routes best."""
        if self._limits.max_price is None:
            self._try_rate(0.0)
            return
        if not self._afford(self._limits.max_price):
            return
        low, high = 0.0, first.seconds / max(self._limits.price(first.stretches), 1e-30)
        best_rate, best_bound = 0.0, first.bound
        dear, cheap = first, None
        for _ in range(MAX_RATES):
            rate = high if cheap is None else (low + high) / 2
            found = self._try_rate(rate)
            if found is None or not self._may_try:
                break
            if found.bound > best_bound and self._goal.is_sum:
                best_rate, best_bound = rate, found.bound
            if self._limits.price(found.stretches) <= self._limits.max_price:
                cheap, high = found, rate
            elif cheap is not None:
                dear, low = found, rate
            else:
                dear, low, high = found, high, high * 8
        if cheap is not None:
            self._cross(dear, cheap)
            self._cross(cheap, dear)
        self._set_rate(best_rate)

    def _afford(self, max_price: float) -> bool:
        """Whether any route may be cheap enough; the cheapest one is kept if it keeps all other rules too."""
        real = self._space.seconds
        seconds = Costs(
            enter=_free(real.enter),
            hand=_free(real.hand),
            leave=_free(real.leave),
            fixed=np.full_like(real.fixed, _ROUNDING),
            layer=self._limits.prices,
        )
        space = Space(seconds, self._space.busy, self._space.allowed, self._space.cuts)
        max_stages = self._limits.max_stages
        kept = cheapest(space, max_stages=max_stages, exclusive=self._limits.exclusive)
        if kept is not None and self._limits.breach(kept.stretches) is None:
            self._consider(self._really(kept, -math.inf))
        least = cheapest(space, max_stages=max_stages)
        self._is_affordable = least is not None and self._limits.price(least.stretches) <= max_price * (1 + _ROUNDING)
        return self._is_affordable

    def _cross(self, one: Found, other: Found) -> None:
        """Takes one route up to some layer and another one from there on.

        At no rate does the search mix what is dear and good with what is cheap and bad, if a layer of each costs what
        it costs wherever it is: one of the two is better for all.
        """
        for cut in np.flatnonzero(self._space.cuts[1:-1]) + 1:
            before = [replace(s, stop=min(s.stop, int(cut))) for s in one.stretches if s.start < cut]
            after = [replace(s, start=max(s.start, int(cut))) for s in other.stretches if s.stop > cut]
            if before[-1].node == after[0].node:
                after[0] = replace(after[0], start=before.pop().start)
            stretches = (*before, *after)
            if self._limits.breach(stretches) is None:
                seconds, busy = measure(self._space, stretches)
                if math.isfinite(seconds):
                    self._consider(Found(stretches, seconds, busy, self._goal.value(seconds, busy), -math.inf))

    def _try_rate(self, rate: float) -> Found | None:
        """The best route by what the search knows at a rate. Keeps a route on which nobody is who excludes another."""
        self._set_rate(rate)
        kept = best(
            self._priced,
            self._goal,
            max_stages=self._limits.max_stages,
            budget=self._budget,
            exclusive=self._limits.exclusive,
        )
        if kept is not None and self._limits.breach(kept.stretches) is None:
            self._consider(self._really(kept, -math.inf))
        return self._relaxed(self._space.allowed)

    def _set_rate(self, rate: float) -> None:
        self._credit = rate * (self._limits.max_price or 0.0) if self._goal.is_sum else 0.0
        seconds = self._space.seconds
        layer = seconds.layer + rate * self._limits.prices
        priced = Costs(seconds.enter, seconds.hand, seconds.leave, seconds.fixed, layer)
        self._priced = Space(priced, self._space.busy, self._space.allowed, self._space.cuts)

    def _cases(self, allowed: Bools, found: Found) -> Iterator[Bools]:
        """Masks of which each forbids the route, and of which every route that keeps all rules satisfies one."""
        limits, stretches = self._limits, found.stretches
        nodes = [s.node for s in stretches]
        groups = [limits.peers] if limits.operators is None else [limits.peers, limits.operators]
        for group in groups:
            repeated = _first_repeated(group, nodes)
            if repeated:
                first, second = stretches[repeated[0]], stretches[repeated[1]]
                yield from (
                    _same_node(allowed, first, second)
                    if first.node == second.node
                    else _one_of_group(
                        allowed,
                        group == group[first.node],
                        max(first, second, key=lambda s: (s.stop - s.start, -s.start)).node,
                    )
                )
                return
        shared = None if limits.tags is None else _first_shared(limits.tags, nodes)
        if limits.tags is not None and shared is not None:
            first, second, tag = stretches[shared[0]], stretches[shared[1]], shared[2]
            node = max(first, second, key=lambda s: (s.stop - s.start, -s.start)).node
            yield from _one_of_group(allowed, limits.tags[:, tag], node)
            return
        dearest = max(stretches, key=lambda s: ((s.stop - s.start) * limits.prices[s.node], -s.start))
        for stretch in (dearest, *stretches):
            for layer in range(stretch.start, stretch.stop):
                if allowed[:, layer].sum() > 1:
                    yield _without(allowed, stretch.node, layer)
                    yield _only(allowed, stretch.node, layer, layer + 1)
                    return


def _same_node(allowed: Bools, first: Stretch, second: Stretch) -> Iterator[Bools]:
    """A node's stage is in one piece: without the first layer, or without the last, or with all between."""
    yield _without(allowed, first.node, first.start)
    yield _without(allowed, first.node, second.stop - 1)
    if allowed[first.node, first.start : second.stop].all():
        yield _only(allowed, first.node, first.start, second.stop)


def _one_of_group(allowed: Bools, group: Bools, node: int) -> Iterator[Bools]:
    """Of these nodes, which exclude one another, this one serves and no other, or not this one."""
    others = allowed.copy()
    others[group & (np.arange(len(group)) != node)] = False
    yield others
    without = allowed.copy()
    without[node] = False
    yield without


def _without(allowed: Bools, node: int, layer: int) -> Bools:
    case = allowed.copy()
    case[node, layer] = False
    return case


def _only(allowed: Bools, node: int, start: int, stop: int) -> Bools:
    case = allowed.copy()
    case[:, start:stop] = False
    case[node, start:stop] = True
    return case


def _free(legs: Floats) -> Floats:
    """The same ways at no cost."""
    return np.where(np.isinf(legs), math.inf, 0.0)


def _numbered(found: Found, numbers: Ints) -> Found:
    """The same route with other numbers for its nodes."""
    return replace(found, stretches=tuple(replace(s, node=int(numbers[s.node])) for s in found.stretches))


def _first_repeated(group: Ints, nodes: Sequence[int]) -> tuple[int, int] | None:
    """The first two places of a route with nodes of one group."""
    seen: dict[int, int] = {}
    for place, node in enumerate(nodes):
        number = int(group[node])
        if number in seen:
            return seen[number], place
        seen[number] = place
    return None


def _first_shared(tags: Bools, nodes: Sequence[int]) -> tuple[int, int, int] | None:
    """The first two places of a route whose nodes have a tag in common, and the tag."""
    for second, node in enumerate(nodes):
        for first in range(second):
            common = np.flatnonzero(tags[nodes[first]] & tags[node])
            if len(common):
                return first, second, int(common[0])
    return None
