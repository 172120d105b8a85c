"""Chooses which nodes serve which layers, and says why.

What a route costs is told by scheduler.cost_model, and what the user's rules are by scheduler.rules. A node may be
entered and left at any layer that it holds, unless the model has layers that cannot stand in front (they use what a
layer before them chose). The search (scheduler.route_search, scheduler.route_limits) is exact for a rule about single
nodes; for rules about the whole route it is exact as long as its tries last, and otherwise says how much better a route
could be at most. Of very many candidates the nearest and the fastest holders of each layer are searched.

Guarantees: a route covers every layer once and keeps every rule, no peer is in it twice, and every candidate that is
not in it is told why. The same input gives the same answer, in whatever order the candidates come.

A fusion group is a candidate like any other (scheduler.groups). Groups that have a member in common exclude one
another, and rules hold for each member. Rules on who owns what (scheduler.ownership) cut candidates to the layers that
they may serve, and take away the legs between stages that may not be neighbours.

Above 600 lines: who may be searched, what is searched, and why each of the others does not serve come from one pass
over the candidates, and have to agree.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from fusion_node.types import LayerRange, PeerId, members_of
from scheduler.cost_model import (
    Workload,
    compute_s_per_layer,
    payload_s,
    replay_s_per_layer,
    route_cost,
    seconds_per_layer,
)
from scheduler.leg_table import Floats, bulk_legs
from scheduler.plans import Alternate, Avoid, Objective, Planned, Reason, Rejection, Uncovered
from scheduler.route_limits import Breach, Limits, Outcome, best_within
from scheduler.route_search import Bools, Budget, Costs, Goal, Space, Stretch, Through, through
from scheduler.rules import Rules
from scheduler.topology import Candidate, Leg, Legs, RouteStage, Speed

MAX_CANDIDATES = 512
"""That are searched: the legs among twice as many take four times as long to add up."""

BUDGET = 200_000_000
"""Additions for a route, and as many for its alternates together: about a fifth of a second each, and seldom needed."""

_TIE_S = 1e-9
"""Per stage: of routes that cost the same, the one with fewer stages."""

_ANY_RULES = Rules()
_NOBODY = Avoid()


def plan_route(
    candidates: Iterable[Candidate],
    legs: Legs,
    *,
    num_layers: int,
    workload: Workload,
    objective: Objective = Objective.LATENCY,
    rules: Rules = _ANY_RULES,
    first_layers: Collection[int] | None = None,
    pinned: Sequence[RouteStage] = (),
    known: Iterable[Candidate] = (),
    avoid: Avoid = _NOBODY,
    is_explained: bool = True,
    max_candidates: int = MAX_CANDIDATES,
) -> Planned | Uncovered:
    """The best route over ``[0, num_layers)``.

    Args:
        candidates: ranges of one peer that touch or overlap count as one range, as slow as the slower.
        first_layers: at which a stage may begin; None: at any.
        pinned: stages that the route has to have, as they are. They are asked neither for room nor whether the rules on
            single nodes allow them, and need not be among the candidates; the rules on whole routes count them.
        known: what was believed of pinned peers when they were chosen, where no candidate covers their stage any more:
            without it, nobody knows their operator and price.
        is_explained: False leaves out alternates, reasons and rejections, which take about as long as the route.
        max_candidates: that are searched.
    """
    ask = _Ask(legs, num_layers, workload, objective, rules, first_layers, tuple(pinned), avoid, max_candidates)
    sorted_out = _field(ask, candidates, known)
    gap = _gap(ask, sorted_out)
    if gap is not None:
        return gap if is_explained else replace(gap, rejections=())
    board = _Board(ask, sorted_out)
    outcome = board.search()
    if outcome.found is None:
        # Every layer is held by somebody, and yet no way leads through all of them that keeps the rules.
        return Uncovered(
            (LayerRange(0, num_layers),),
            rejections=board.rejections((), None) if is_explained else (),
            is_proven=outcome.is_proven and not sorted_out.unsearched,
        )
    stretches = outcome.found.stretches
    route = board.stages(stretches)
    alternates = board.alternates(stretches, outcome.found.value) if is_explained else ()
    return Planned(
        route=route,
        cost=route_cost(
            [(board.nodes[s.node], stage) for s, stage in zip(stretches, route, strict=True)], legs, workload
        ),
        alternates=alternates,
        reasons=board.reasons(stretches, alternates) if is_explained else (),
        rejections=board.rejections(stretches, outcome.found.value) if is_explained else (),
        is_optimal=outcome.is_proven and not sorted_out.unsearched,
        gap_s=0.0 if outcome.is_proven else max(outcome.found.value - outcome.bound, 0.0) * board.scale,
        num_unsearched=len(sorted_out.unsearched),
    )


def plan_patch(
    candidates: Iterable[Candidate],
    legs: Legs,
    route: Sequence[RouteStage],
    lost: Collection[int],
    *,
    num_layers: int,
    workload: Workload,
    objective: Objective = Objective.LATENCY,
    rules: Rules = _ANY_RULES,
    first_layers: Collection[int] | None = None,
    known: Iterable[Candidate] = (),
    avoid: Avoid = _NOBODY,
    is_explained: bool = False,
    max_candidates: int = MAX_CANDIDATES,
) -> Planned | Uncovered:
    """A route with other nodes in the place of some stages; all others keep peer and layers.

    Args:
        lost: places of the stages to replace, whose peers are avoided. Neighbours among them are replaced together, by
            one node or several.
        workload: its ``replay_rows`` count for those that come into the route, and not for those that stay.
        known: of the stages that stay, see plan_route.
    """
    return plan_route(
        candidates,
        legs,
        num_layers=num_layers,
        workload=workload,
        objective=objective,
        rules=rules,
        first_layers=first_layers,
        pinned=[stage for index, stage in enumerate(route) if index not in lost],
        known=known,
        avoid=Avoid(avoid.peers | {route[index].peer for index in lost}, avoid.pairs),
        is_explained=is_explained,
        max_candidates=max_candidates,
    )


def uncovered_layers(ranges: Iterable[LayerRange], num_layers: int) -> list[LayerRange]:
    """The parts of ``[0, num_layers)`` that none of the ranges covers."""
    covered = {layer for r in ranges for layer in range(r.start, r.stop)}
    return as_ranges([layer for layer in range(num_layers) if layer not in covered])


def as_ranges(layers: Sequence[int]) -> list[LayerRange]:
    """Ascending layers as the fewest ranges."""
    ranges: list[LayerRange] = []
    for layer in layers:
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = LayerRange(ranges[-1].start, layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1))
    return ranges


@dataclass(frozen=True, slots=True)
class _Ask:
    """What a route is planned for."""

    legs: Legs
    num_layers: int
    workload: Workload
    objective: Objective
    rules: Rules
    first_layers: Collection[int] | None
    pinned: tuple[RouteStage, ...]
    avoid: Avoid
    max_candidates: int
    _ways: dict[PeerId, tuple[Leg, Leg]] = field(default_factory=dict)

    def ways(self, peer: PeerId) -> tuple[Leg, Leg]:
        """From the user to a peer, and back."""
        found = self._ways.get(peer)
        if found is None:
            found = self._ways[peer] = (self.legs.leg(None, peer), self.legs.leg(peer, None))
        return found

    @property
    def cuts(self) -> list[int]:
        """Where a stage may begin or end."""
        if self.first_layers is None:
            return list(range(self.num_layers + 1))
        ends = {edge for stage in self.pinned for edge in (stage.layers.start, stage.layers.stop)}
        return sorted({0, *(c for c in self.first_layers if 0 <= c < self.num_layers), self.num_layers, *ends})

    @property
    def open_layers(self) -> set[int]:
        """That no pinned stage serves."""
        pinned = {layer for stage in self.pinned for layer in range(stage.layers.start, stage.layers.stop)}
        return set(range(self.num_layers)) - pinned


@dataclass(frozen=True, slots=True)
class _Field:
    """The candidates, sorted into those that may serve and those that may not.

    Attributes:
        usable: cut to what can be a stage. Pinned nodes are among them.
        without_room, against_rules: as they would be usable otherwise.
        rejections: of all that are not usable.
        unsearched: usable ones that were left out because there were too many.
    """

    usable: tuple[Candidate, ...]
    without_room: tuple[Candidate, ...]
    against_rules: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    unsearched: tuple[Candidate, ...]


def _field(ask: _Ask, candidates: Iterable[Candidate], known_before: Iterable[Candidate]) -> _Field:
    cuts, open_layers = ask.cuts, ask.open_layers
    pins = {stage.peer: stage for stage in ask.pinned}
    known = {candidate.peer: candidate for candidate in known_before}
    # Of groups that stay.
    taken = {node.peer for peer in pins.keys() & known.keys() for node in known[peer].members}
    usable: list[Candidate] = []
    without_room: list[Candidate] = []
    against_rules: list[Candidate] = []
    rejections: list[Rejection] = []

    def reject(candidate: Candidate, reason: Reason, text: str) -> None:
        rejections.append(Rejection(candidate.peer, candidate.layers, reason, text))

    for candidate in _merge(candidates):
        pin = pins.get(candidate.peer)
        if pin is not None:
            if candidate.layers.start <= pin.layers.start and pin.layers.stop <= candidate.layers.stop:
                known[candidate.peer] = candidate
            continue
        cut = _cut(candidate, cuts, ask.num_layers)
        if not taken.isdisjoint(candidate.peers):
            reject(candidate, Reason.NOT_NEEDED, "is a member of a stage that stays")
        elif cut is None:
            what = "no stage can begin there" if candidate.layers.stop <= ask.num_layers else "beyond the model"
            reject(candidate, Reason.OUTSIDE, f"holds {candidate.layers}: {what}")
        elif open_layers.isdisjoint(range(cut.layers.start, cut.layers.stop)):
            reject(candidate, Reason.NOT_NEEDED, "the stages that stay serve all that it holds")
        elif not ask.avoid.peers.isdisjoint(candidate.peers):
            reject(candidate, Reason.AVOIDED, "failed or refused lately")
        elif math.isinf(sum(leg.one_way_s for leg in ask.ways(candidate.peer))):
            reject(candidate, Reason.UNREACHABLE, "cannot be reached")
        elif (rule := ask.rules.rejects(candidate)) is not None:
            reject(candidate, Reason.RULE, rule)
            against_rules.append(cut)
        elif candidate.kv_free_positions < ask.workload.num_positions:
            room = candidate.kv_free_positions
            reject(candidate, Reason.NO_ROOM, f"has room for {room} of {ask.workload.num_positions} positions")
            owned, others = _owned(ask, cut, cuts)
            without_room += owned
            against_rules += [part for part, reason, _ in others if reason is Reason.RULE]
        else:
            owned, others = _owned(ask, cut, cuts)
            usable += owned
            against_rules += [part for part, reason, _ in others if reason is Reason.RULE]
            for part, reason, text in others:
                reject(part, reason, text)
    unsearched: list[Candidate] = []
    if len(usable) > ask.max_candidates:
        usable, unsearched = _most_promising(ask, usable)
        for candidate in unsearched:
            reject(candidate, Reason.NOT_SEARCHED, f"{ask.max_candidates} others are nearer or faster")
    for stage in ask.pinned:
        believed = known.get(stage.peer, Candidate(stage.peer, stage.layers, Speed(0.0, 0.0, 0.0), 0))
        usable.append(_over(believed, stage.layers))
    usable.sort(key=lambda c: (c.peer, c.layers))
    return _Field(tuple(usable), tuple(without_room), tuple(against_rules), tuple(rejections), tuple(unsearched))


def _owned(
    ask: _Ask, cut: Candidate, cuts: Sequence[int]
) -> tuple[list[Candidate], list[tuple[Candidate, Reason, str]]]:
    """The parts of a candidate that may be stages by the rules on who owns what, and the others, with the reason."""
    ownership = ask.rules.ownership
    if ownership.allows_all:
        return [cut], []
    owned: list[Candidate] = []
    others = [(_over(cut, part.layers), Reason.RULE, part.why) for part in ownership.parts(cut) if not part.is_allowed]
    for layers in ownership.allowed(cut):
        part = _over(cut, layers)
        found = _cut(part, cuts, ask.num_layers)
        if found is None:
            others.append((part, Reason.OUTSIDE, f"may serve {layers}: no stage can begin there"))
        else:
            owned.append(found)
    return owned, others


def _over(candidate: Candidate, layers: LayerRange) -> Candidate:
    """The same over other layers, a group with all of its members."""
    members = tuple(replace(member, layers=layers) for member in candidate.members)
    return replace(candidate, layers=layers, members=members)


def _gap(ask: _Ask, found: _Field) -> Uncovered | None:
    """The layers that no usable candidate holds, and why."""
    missing = uncovered_layers([c.layers for c in found.usable], ask.num_layers)
    if not missing:
        return None

    def among(held_by: Sequence[Candidate], but: Sequence[LayerRange] = ()) -> tuple[LayerRange, ...]:
        held = {layer for c in held_by for layer in range(c.layers.start, c.layers.stop)}
        held -= {layer for r in but for layer in range(r.start, r.stop)}
        return tuple(as_ranges([layer for r in missing for layer in range(r.start, r.stop) if layer in held]))

    without_room = among(found.without_room)
    needed = [
        Rejection(c.peer, c.layers, Reason.NO_WAY, "other layers are held by nobody that may serve them")
        for c in found.usable
        if c.peer not in {stage.peer for stage in ask.pinned}
    ]
    rejections = tuple(sorted([*found.rejections, *needed], key=lambda r: (r.peer, r.layers)))
    return Uncovered(tuple(missing), without_room, among(found.against_rules, without_room), rejections)


def _merge(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One candidate per peer and stretch of layers: ranges of one peer that touch are one, as slow as the slower."""
    merged: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.peer, c.layers, c.kv_free_positions, c.queue_s, c.speed.rows_1_s)):
        last = merged[-1] if merged else None
        if last is not None and (last.peer, last.weights) == (c.peer, c.weights) and c.layers.start <= last.layers.stop:
            merged[-1] = replace(
                _over(last, LayerRange(last.layers.start, max(last.layers.stop, c.layers.stop))),
                speed=Speed(
                    max(last.speed.rows_1_s, c.speed.rows_1_s),
                    max(last.speed.rows_16_s, c.speed.rows_16_s),
                    max(last.speed.rows_256_s, c.speed.rows_256_s),
                ),
                kv_free_positions=min(last.kv_free_positions, c.kv_free_positions),
                queue_s=max(last.queue_s, c.queue_s),
                price=max(last.price, c.price),
            )
        else:
            merged.append(c)
    return merged


def _cut(candidate: Candidate, cuts: Sequence[int], num_layers: int) -> Candidate | None:
    """The candidate with what it holds from the first of the cuts to the last; None when that is nothing."""
    if candidate.layers.stop > num_layers:
        return None
    first = bisect.bisect_left(cuts, candidate.layers.start)
    last = bisect.bisect_right(cuts, candidate.layers.stop) - 1
    if first >= last:
        return None
    layers = LayerRange(cuts[first], cuts[last])
    return candidate if layers == candidate.layers else _over(candidate, layers)


def _most_promising(ask: _Ask, usable: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are among the nearest, the fastest, the best of both, and where the user has a limit on the price the
    cheapest, of all holders of some layer."""
    workload = ask.workload
    way_s = np.array([sum(leg.one_way_s for leg in ask.ways(c.peer)) for c in usable])
    fixed_s = np.array([max(c.queue_s, 0.0) for c in usable])
    layer_s = np.array([seconds_per_layer(c, workload.step_rows) + replay_s_per_layer(c, workload) for c in usable])
    held = np.array([len(c.layers) for c in usable])
    holds = _holds(usable, ask.num_layers)
    ranks = np.full(len(usable), len(usable))
    scores = [way_s, fixed_s + layer_s * held.mean(), (way_s + fixed_s) / held + layer_s]
    if ask.rules.max_route_price is not None:
        scores.append(np.array([c.price for c in usable]))
    for score in scores:
        order = np.argsort(score, kind="stable")
        place = np.cumsum(holds[order], axis=0)  # of each holder of a layer among all holders of it, from 1
        best_place = np.where(holds[order], place, len(usable)).min(axis=1)
        ranks[order] = np.minimum(ranks[order], best_place)
    kept = set(np.argsort(ranks, kind="stable")[: ask.max_candidates].tolist())
    return (
        [c for index, c in enumerate(usable) if index in kept],
        [c for index, c in enumerate(usable) if index not in kept],
    )


def _holds(candidates: Sequence[Candidate], num_layers: int) -> Bools:
    layers = np.arange(num_layers)
    starts = np.array([c.layers.start for c in candidates])[:, None]
    stops = np.array([c.layers.stop for c in candidates])[:, None]
    return (starts <= layers) & (layers < stops)


class _Board:
    """The usable candidates as a search space, and what is to be said of them."""

    def __init__(self, ask: _Ask, found: _Field) -> None:
        self.nodes = found.usable
        self._ask, self._field = ask, found
        self._goal, self.scale = _goal(ask)
        self._barred = ask.rules.ownership.not_handing(self.nodes)
        self._space = _space(ask, self.nodes, self._barred)
        self._limits = _limits(ask.rules, self.nodes)
        self._shortest = through(self._space)
        self._floors = self._floor_values(self._shortest)

    def _floor_values(self, shortest: Through) -> Floats:
        if self._goal.is_sum:
            return shortest.cost + self._goal.base_seconds
        fastest = through(self._space, is_busy=True).cost
        pairs = zip(shortest.cost.tolist(), fastest.tolist(), strict=True)
        return np.array([self._goal.value(seconds, busy) for seconds, busy in pairs])

    def search(self) -> Outcome:
        return best_within(self._space, self._goal, self._limits, self._floors, Budget(BUDGET))

    def stages(self, stretches: Sequence[Stretch]) -> tuple[RouteStage, ...]:
        return tuple(RouteStage(self.nodes[s.node].peer, LayerRange(s.start, s.stop)) for s in stretches)

    def alternates(self, stretches: Sequence[Stretch], value: float) -> tuple[Alternate | None, ...]:
        return tuple(self._alternate(stretches, place, value) for place in range(len(stretches)))

    def _alternate(self, stretches: Sequence[Stretch], place: int, value: float) -> Alternate | None:
        """What replaces a stage, searched between the two that it stands between."""
        lost = stretches[place]
        before = stretches[place - 1].node if place > 0 else None
        after = stretches[place + 1].node if place + 1 < len(stretches) else None
        kept = [s for s in stretches if s is not lost]
        limits = self._limits
        holds = self._space.allowed[:, lost.start : lost.stop].any(axis=1)
        holds &= ~np.isin(limits.peers, limits.peers[[s.node for s in stretches]])
        if limits.operators is not None:
            holds &= ~np.isin(limits.operators, limits.operators[[s.node for s in kept]])
        if limits.tags is not None:
            holds &= ~(limits.tags & limits.tags[[s.node for s in kept]].any(axis=0)).any(axis=1)
        nodes = np.flatnonzero(holds)
        if not len(nodes) or (limits.max_stages is not None and len(kept) >= limits.max_stages):
            return None
        around = [_around(costs, nodes, before, after) for costs in (self._space.seconds, self._space.busy)]
        space = Space(
            around[0],
            around[1],
            np.ascontiguousarray(self._space.allowed[nodes, lost.start : lost.stop]),
            self._space.cuts[lost.start : lost.stop + 1],
        )
        base_seconds, base_busy = _rest(self._space, stretches, place)
        goal = replace(self._goal, base_seconds=base_seconds, base_busy=base_busy)
        limits = replace(
            limits.of(nodes),
            max_price=None if limits.max_price is None else limits.max_price - limits.price(kept),
            max_stages=None if limits.max_stages is None else limits.max_stages - len(kept),
        )
        floors = np.array([goal.value(seconds, 0.0) for seconds in through(space).cost.tolist()])
        found = best_within(space, goal, limits, floors, Budget(BUDGET // len(stretches))).found
        if found is None:
            return None
        stages = tuple(
            RouteStage(self.nodes[int(nodes[s.node])].peer, LayerRange(s.start + lost.start, s.stop + lost.start))
            for s in found.stretches
        )
        return Alternate(stages, (found.value - value) * self.scale)

    def reasons(self, stretches: Sequence[Stretch], alternates: Sequence[Alternate | None]) -> tuple[str, ...]:
        pinned = {stage.peer for stage in self._ask.pinned}
        return tuple(
            "stays as it is" if self.nodes[s.node].peer in pinned else self._reason(s, alternate)
            for s, alternate in zip(stretches, alternates, strict=True)
        )

    def _reason(self, stretch: Stretch, alternate: Alternate | None) -> str:
        node = self.nodes[stretch.node]
        layers = LayerRange(stretch.start, stretch.stop)
        if alternate is None:
            others = any(
                c.peer != node.peer and c.layers.start < layers.stop and layers.start < c.layers.stop
                for c in self.nodes
            )
            text = f"no others may serve {layers} in its place" if others else f"nobody else may serve {layers}"
        else:
            text = f"best for {layers}; next: {_route_text(alternate.stages)}, {self._worse(alternate.excess_s)}"
        return f"{text} ({node.note})" if node.note else text

    def _worse(self, excess_s: float) -> str:
        what = "until the first token" if self._ask.objective is Objective.FIRST_TOKEN else "per token"
        ms = excess_s * 1000
        if ms < 0.0005:
            return "just as good"
        return f"{ms:.3g} ms {what} slower" if ms < 1000 else f"{ms:,.0f} ms {what} slower"

    def rejections(self, stretches: Sequence[Stretch], value: float | None) -> tuple[Rejection, ...]:
        """Of all candidates that are not in a route; None: there is no route."""
        chosen = {s.node for s in stretches} | {
            index for index, c in enumerate(self.nodes) if c.peer in {stage.peer for stage in self._ask.pinned}
        }
        found = [self._rejection(index, value) for index in range(len(self.nodes)) if index not in chosen]
        return tuple(sorted([*self._field.rejections, *found], key=lambda r: (r.peer, r.layers)))

    def _rejection(self, index: int, value: float | None) -> Rejection:
        node = self.nodes[index]
        if math.isinf(self._floors[index]):
            reason, text = Reason.NO_WAY, "no complete route leads through it"
            if math.isfinite(self._free_floors[index]):
                reason, text = Reason.RULE, f"{text} that keeps your rules"
                text += f": {why}" if (why := self._why_barred(index)) else ""
            return Rejection(node.peer, node.layers, reason, text)
        way = self._shortest.route(index)
        via, breach = self.stages(way), self._limits.breach(way)
        if value is None:
            text = "no route through it keeps all rules" if breach is None else f"with it {_breach_text(breach)}"
            return Rejection(node.peer, node.layers, Reason.RULE, text, via=via)
        excess_s = (float(self._floors[index]) - value) * self.scale
        if excess_s < -_TIE_S * len(way) and breach is not None:
            text = f"{_route_text(via)} would be better, but then {_breach_text(breach)}"
            return Rejection(node.peer, node.layers, Reason.RULE, text, via=via)
        excess_s = max(excess_s, 0.0)
        note = f"; {node.note}" if node.note else ""
        # The floor is that of a route which need not keep the rules, and as such is told.
        but = "" if breach is None else f", but then {_breach_text(breach)}"
        return Rejection(
            node.peer,
            node.layers,
            Reason.SLOWER,
            f"{self._worse(excess_s)} at best: {_route_text(via)}{but}{note}",
            excess_s,
            via,
        )

    @cached_property
    def _free_floors(self) -> Floats:
        """As the floors, if everybody might hand on to everybody by the rules."""
        return self._shortest.cost if self._barred is None else through(_space(self._ask, self.nodes, None)).cost

    def _why_barred(self, index: int) -> str | None:
        """Which rule keeps a node from handing on to another, or to be handed to; None where it is not that node."""
        if self._barred is None:
            return None
        ownership, node = self._ask.rules.ownership, self.nodes[index]
        for other in np.flatnonzero(self._barred[index]).tolist():
            if other != index and (why := ownership.why_not_handing(node, self.nodes[other])) is not None:
                return why
        return None


def _goal(ask: _Ask) -> tuple[Goal, float]:
    """What the search makes small, and by what its value is multiplied to be in the unit of the objective.

    The user's own part of a step is a part of every route, and part of what a full route waits for.
    """
    workload = ask.workload
    match ask.objective:
        case Objective.LATENCY:
            return Goal(base_seconds=workload.user_step_s), 1 / workload.tokens_per_step
        case Objective.THROUGHPUT:
            goal = Goal(share=workload.concurrency, base_seconds=workload.user_step_s)
            return goal, 1 / workload.tokens_per_step
        case Objective.FIRST_TOKEN:
            if not workload.num_chunks:
                return Goal(base_seconds=workload.user_step_s), 1.0
            return Goal(weight=workload.num_chunks - 1, base_seconds=workload.user_prefill_s), 1.0


def _space(ask: _Ask, nodes: Sequence[Candidate], barred: Bools | None) -> Space:
    """
    Args:
        barred: which nodes may not hand on to one another [N, N]; None: all may.
    """
    workload = ask.workload
    is_prefill = ask.objective is Objective.FIRST_TOKEN and workload.num_chunks > 0
    sent_bytes = workload.chunk_rows * workload.row_bytes if is_prefill else workload.step_payload_bytes
    returned_bytes = workload.row_bytes if is_prefill else workload.returned_payload_bytes
    enter = [ask.ways(c.peer)[0] for c in nodes]
    leave = [ask.ways(c.peer)[1] for c in nodes]
    one_way_s, rate_Bps = _handing(ask, nodes, barred)
    hand_payload_s = sent_bytes / np.maximum(rate_Bps, 1.0)
    queue_s = np.array([max(c.queue_s, 0.0) for c in nodes])
    rows = workload.chunk_rows if is_prefill else float(workload.step_rows)
    layer_s = np.array([seconds_per_layer(c, rows) for c in nodes])
    pins = {stage.peer: stage.layers for stage in ask.pinned}
    is_new = np.array([c.peer not in pins for c in nodes])
    overhead_s = workload.message_overhead_s
    # The rows so far go to a node that is new, and through it, before the session goes on.
    replay_bytes = is_new * (workload.replay_rows * workload.row_bytes / workload.replay_steps)
    replay_layer_s = is_new * np.array([replay_s_per_layer(c, workload) for c in nodes])
    seconds = Costs(
        enter=_leg_seconds(enter, sent_bytes + replay_bytes, overhead_s),
        hand=np.ascontiguousarray(
            (one_way_s + hand_payload_s + replay_bytes / np.maximum(rate_Bps, 1.0) + overhead_s).T
        ),
        leave=_leg_seconds(leave, np.full(len(nodes), returned_bytes), overhead_s),
        fixed=queue_s + _TIE_S,
        layer=layer_s + replay_layer_s,
    )
    if is_prefill:
        busy_fixed, busy_layer = queue_s, layer_s
    else:
        wide = workload.concurrency * workload.step_rows
        busy_fixed = queue_s / workload.concurrency
        busy_layer = np.array([compute_s_per_layer(c, wide) for c in nodes]) / workload.concurrency
    busy = Costs(
        enter=np.array([payload_s(leg, sent_bytes) for leg in enter]),
        hand=np.ascontiguousarray(hand_payload_s.T),
        leave=np.zeros(len(nodes)) if is_prefill else np.array([payload_s(leg, returned_bytes) for leg in leave]),
        fixed=busy_fixed,
        layer=busy_layer,
    )
    allowed = _holds(nodes, ask.num_layers)
    for layers in pins.values():
        allowed[[index for index, c in enumerate(nodes) if c.peer not in pins], layers.start : layers.stop] = False
    cuts = np.zeros(ask.num_layers + 1, dtype=np.bool_)
    cuts[ask.cuts] = True
    return Space(seconds, busy, allowed, cuts)


def _handing(ask: _Ask, nodes: Sequence[Candidate], barred: Bools | None) -> tuple[Floats, Floats]:
    """Seconds one way and B/s from node to node [N, N]; infinite where rows cannot go."""
    starts = np.array([c.layers.start for c in nodes])
    stops = np.array([c.layers.stop for c in nodes])
    # From one to the other at a layer before which the one may end and the other begin.
    needed = np.maximum(starts[:, None] + 1, starts) <= np.minimum(stops[:, None], stops - 1)
    peers = [c.peer for c in nodes]
    numbers = np.unique(peers, return_inverse=True)[1]
    needed &= numbers[:, None] != numbers
    if barred is not None:
        needed &= ~barred
    if ask.avoid.pairs:
        at: dict[PeerId, list[int]] = {}
        for index, candidate in enumerate(nodes):
            for peer in candidate.peers:
                at.setdefault(peer, []).append(index)
        for one, other in ask.avoid.pairs:
            ones, others = at.get(one, []), at.get(other, [])
            needed[np.ix_(ones, others)] = False
            needed[np.ix_(others, ones)] = False
    return bulk_legs(ask.legs, peers, peers, needed)


def _leg_seconds(legs: Sequence[Leg], payload_bytes: Floats, overhead_s: float) -> Floats:
    payloads = zip(legs, payload_bytes.tolist(), strict=True)
    return np.array([leg.one_way_s + payload_s(leg, num_bytes) + overhead_s for leg, num_bytes in payloads])


def _limits(rules: Rules, nodes: Sequence[Candidate]) -> Limits:
    operators = None
    if rules.one_shard_per_operator:
        # Who names no operator is one of its own.
        tags = [f"operator {c.operator}" if c.operator else f"peer {c.peer}" for c in nodes]
        operators = np.unique(tags, return_inverse=True)[1].astype(np.int64)
    shared, num_peer_tags = _tags(rules, nodes)
    return Limits(
        peers=np.unique([c.peer for c in nodes], return_inverse=True)[1].astype(np.int64),
        operators=operators,
        prices=np.array([c.price for c in nodes], dtype=np.float64),
        max_price=rules.max_route_price,
        max_stages=rules.max_stages,
        tags=shared,
        num_peer_tags=num_peer_tags,
    )


def _tags(rules: Rules, nodes: Sequence[Candidate]) -> tuple[Bools | None, int]:
    """The peers of groups, and their operators where that matters, of all nodes that have them in common."""
    groups = [c for c in nodes if c.members]
    if not groups:
        return None, 0
    peers = sorted({member.peer for group in groups for member in group.members})
    operators: list[str] = []
    if rules.one_shard_per_operator:
        operators = sorted({m.operator for group in groups for m in group.members if m.operator})
    columns = {f"peer {peer}": index for index, peer in enumerate(peers)}
    columns |= {f"operator {name}": index for index, name in enumerate(operators, len(columns))}
    tags = np.zeros((len(nodes), len(columns)), dtype=np.bool_)
    for row, candidate in enumerate(nodes):
        for node in candidate.nodes:
            for tag in (f"peer {node.peer}", f"operator {node.operator}"):
                if tag in columns:
                    tags[row, columns[tag]] = True
    return tags, len(peers)


def _around(costs: Costs, nodes: np.ndarray, before: int | None, after: int | None) -> Costs:
    """The costs of some nodes between two others; None stands for the user."""
    inner = costs.of(nodes)
    return Costs(
        enter=inner.enter if before is None else costs.hand[nodes, before],
        hand=inner.hand,
        leave=inner.leave if after is None else costs.hand[after, nodes],
        fixed=inner.fixed,
        layer=inner.layer,
    )


def _rest(space: Space, stretches: Sequence[Stretch], place: int) -> tuple[float, float]:
    """The sum over a route without one stage and the legs to and from it, and the slowest of what is left."""
    sums, slowest = [], []
    for costs in (space.seconds, space.busy):
        parts = [
            float(costs.fixed[s.node] + (s.stop - s.start) * costs.layer[s.node])
            for index, s in enumerate(stretches)
            if index != place
        ]
        nodes = [s.node for s in stretches]
        legs = [
            float(costs.enter[nodes[0]]),
            *(float(costs.hand[nodes[i + 1], nodes[i]]) for i in range(len(nodes) - 1)),
            float(costs.leave[nodes[-1]]),
        ]
        parts += [leg for index, leg in enumerate(legs) if index not in (place, place + 1)]
        sums.append(sum(parts))
        slowest.append(max(parts, default=0.0))
    return sums[0], slowest[1]


def _breach_text(breach: Breach) -> str:
    match breach:
        case Breach.PEER_TWICE:
            return "a peer would have two stages"
        case Breach.OPERATOR_TWICE:
            return "an operator would have two stages"
        case Breach.TOO_DEAR:
            return "the route would cost more than you pay"
        case Breach.TOO_MANY_STAGES:
            return "there would be too many stages"


def _route_text(stages: Sequence[RouteStage]) -> str:
    """At most four of its stages."""
    shown = [f"{'+'.join(peer[-8:] for peer in members_of(stage.peer))} {stage.layers}" for stage in stages[:4]]
    return " → ".join([*shown, f"{len(stages) - 4} more"] if len(stages) > 4 else shown)
