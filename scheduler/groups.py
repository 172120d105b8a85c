"""Fusion groups that can be formed of nodes that hold slices: each is a candidate for a stage, as one node is.

A group needs one holder of each slice of a split (its weights) over the same layers. Which holders of the same slice
are best together is searched: all ways where they are few, else one member after the other is exchanged for a better
one until none is (coordinate descent). Beside the best group its neighbours come out, that differ in one member:
whoever is lost or rejected later has somebody to take its place.

What a group costs: the leg to it is the longest to a member; its layers take what they take on the slowest member; and
in every layer come the exchanges (fusion_node.slices), each of the longest way between two members, of what every
member sends to all others at the rates of its legs, and of what messages cost.

Guarantees: every group keeps the user's rules in each of its members, has no peer twice, no two peers that are not to
talk to one another or, by the user's rules, not to stand beside one another, and, where the user wants that, no two of
one operator. The same input gives the same groups. What is searched is bounded.

Assumes: members compute at the same time, so a layer waits for the slowest. Source: docs/design.md, "Groups". Still
ugly: the exchanges of several sessions share messages, which the cost of a full route does not know.

Above 600 lines: who may be a member, which of them are best together, and why nobody is for a slice come from one pass
over the holders, and have to agree.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fusion_node.errors import ConfigError
from fusion_node.slices import MIN_MASKED_MEMBERS, Dims, Exchange, ModelSlice, contribution_bytes, exchanges, split
from fusion_node.types import LayerRange, PeerId, group_id, is_group, members_of
from scheduler.cost_model import Workload, compute_s_per_layer, seconds_per_layer
from scheduler.leg_table import BulkLegs, Floats
from scheduler.plans import Avoid, Planned, Reason, Rejection, Uncovered
from scheduler.rules import Rules
from scheduler.topology import SPEED_ROWS, Candidate, Leg, Legs, Speed

MAX_SPLITS = 64
"""Layer ranges and splits of which groups are formed."""

MAX_PER_SLICE = 8
"""Holders of one slice that are considered, the best by themselves."""

MAX_WAYS = 256
"""Ways to choose members, up to which all are looked at."""

MAX_ROUNDS = 4
"""In which every member is exchanged for a better one, when there are more ways."""

MAX_EXCHANGED = 2
"""Groups that come out beside the best for each of its members, with another in its place."""

MAX_PLACED = 5000
"""Members that are tried in a search for any way that keeps the rules."""

_SHARED_S = 1e9
"""What a slice counts for where it is a part of what is held: such ranges come after what is held as it is."""

MAX_EDGES = 16
"""First and last layers of holders of one split that are combined to ranges which all slices are held of."""

EXCHANGE_MESSAGE_S = 0.0003
"""What a small message takes of a member's processor, to send or to receive it: cipher, framing and event loop
(docs/design.md, "Network": 0.3 ms per side for 4 KB)."""


@dataclass(frozen=True, slots=True)
class SliceHolder:
    """A node that holds a slice.

    Attributes:
        candidate: as of a node; its layers are those of which it holds the slice, its speed that of its slice.
        index, weights: which slice.
    """

    candidate: Candidate
    index: int
    weights: tuple[int, ...]

    @property
    def peer(self) -> PeerId:
        return self.candidate.peer

    @property
    def layers(self) -> LayerRange:
        return self.candidate.layers

    @property
    def place(self) -> ModelSlice:
        return ModelSlice(self.index, self.weights)


@dataclass(frozen=True, slots=True)
class MissingSlice:
    """Why no group is formed for some layers: nobody may hold this slice of them.

    Attributes:
        why: for people: ``held by nobody``.
    """

    layers: LayerRange
    index: int
    weights: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Formed:
    """What comes of the nodes that hold slices.

    Attributes:
        groups: candidates, best first for each layer range and split.
        weights: of each group, by its id.
        rejections: holders that may be in no group, or in none for a part of their layers.
        missing: of layer ranges and splits of which no group could be formed.
        num_left_out: groups that keep the rules as well and are none of these: see ``form_groups``.
    """

    groups: tuple[Candidate, ...] = ()
    weights: dict[PeerId, tuple[int, ...]] = field(default_factory=dict)
    rejections: tuple[Rejection, ...] = ()
    missing: tuple[MissingSlice, ...] = ()
    num_left_out: int = 0


def form_groups(
    holders: Iterable[SliceHolder],
    legs: Legs,
    *,
    dims: Dims,
    workload: Workload,
    rules: Rules,
    avoid: Avoid,
    num_members: int | None = None,
    is_thorough: bool = False,
    is_masked: bool = False,
) -> Formed:
    """All groups that are worth planning with.

    Args:
        legs: between nodes.
        num_members: of each group, at least 2; None: any number above that.
        is_thorough: with all ways to choose the members that are looked at, up to MAX_WAYS: of use where no route leads
            over the best ones, because their members are needed elsewhere, or may not stand beside one another.
        is_masked: their sums are masked, which takes at least MIN_MASKED_MEMBERS, and more bytes.
    """
    table = _Table(legs, dims, workload, rules, avoid, is_masked=is_masked)
    usable: list[SliceHolder] = []
    rejected: list[tuple[SliceHolder, Rejection]] = []
    for holder in sorted(holders, key=lambda each: (each.peer, each.layers, each.weights, each.index)):
        rejection = _why_not(holder, table, num_members)
        if rejection is not None:
            rejected.append((holder, rejection))
            continue
        for part in (rules.ownership.parts(holder.candidate, holder.place)) if not rules.ownership.allows_all else ():
            if not part.is_allowed:
                refused = Rejection(holder.peer, part.layers, Reason.RULE, part.why)
                rejected.append((holder, refused))
        if rules.ownership.allows_all:
            usable.append(holder)
        else:
            usable += [_over(holder, each) for each in rules.ownership.allowed(holder.candidate, holder.place)]
    groups: dict[tuple[PeerId, LayerRange], Candidate] = {}
    num_left_out = 0
    weights_of: dict[PeerId, tuple[int, ...]] = {}
    missing: list[MissingSlice] = []
    turned_away: dict[tuple[tuple[int, ...], int], list[tuple[SliceHolder, Rejection]]] = {}
    for each in rejected:
        turned_away.setdefault((each[0].weights, each[0].index), []).append(each)
    of_slice: dict[tuple[tuple[int, ...], int], list[SliceHolder]] = {}
    for holder in usable:
        of_slice.setdefault((holder.weights, holder.index), []).append(holder)
    for layers, weights in _splits(usable, [holder for holder, _ in rejected], table, num_members):
        by_index = [
            [each for each in of_slice.get((weights, k), ()) if _holds(each, layers)] for k in range(len(weights))
        ]
        gaps = [k for k, found in enumerate(by_index) if not found]
        if gaps:
            missing += [
                MissingSlice(layers, k, weights, _why_missing(layers, turned_away.get((weights, k), ()))) for k in gaps
            ]
            continue
        found = _Choice(by_index, layers, weights, table)
        best = found.groups(is_thorough)
        num_left_out += found.num_left_out
        if not best:
            missing.append(MissingSlice(layers, *found.why_none()))
        for candidate in best:
            # An id stands for one group: the same peers with another split are another one.
            if weights_of.setdefault(candidate.peer, weights) == weights:
                groups.setdefault((candidate.peer, layers), candidate)
            else:
                num_left_out += 1
    rejections = tuple(rejection for _, rejection in rejected)
    return Formed(tuple(groups.values()), weights_of, rejections, tuple(missing), num_left_out)


def plan_with(
    form: Callable[[bool], Formed], plan: Callable[[Formed], Planned | Uncovered]
) -> tuple[Planned | Uncovered, Formed]:
    """A plan with the groups that are worth it, and where they do not do, with all that were looked at.

    Args:
        form: see ``form_groups``; takes whether to be thorough.
    """
    formed = form(False)
    answer = plan(formed)
    if isinstance(answer, Uncovered) and formed.num_left_out:
        formed_again = form(True)
        again = plan(formed_again)
        if isinstance(again, Planned):
            return again, formed_again
    return answer, formed


def _over(holder: SliceHolder, layers: LayerRange) -> SliceHolder:
    return holder if layers == holder.layers else replace(holder, candidate=replace(holder.candidate, layers=layers))


def _splits(
    usable: Iterable[SliceHolder], others: Iterable[SliceHolder], table: _Table, num_members: int | None
) -> list[tuple[LayerRange, tuple[int, ...]]]:
    """Layers and how they are split, the most promising by what each slice costs on the best of its holders.

    Anybody can announce slices of splits that nobody else has: those without a holder for each slice come last.
    """
    best: dict[tuple[LayerRange, tuple[int, ...]], list[float]] = {}
    for holder in others:
        if table.wants(holder.weights, num_members) and not table.problem(holder.weights):
            best.setdefault((holder.layers, holder.weights), [math.inf] * len(holder.weights))
    for holder in usable:
        costs = best.setdefault((holder.layers, holder.weights), [math.inf] * len(holder.weights))
        costs[holder.index] = min(costs[holder.index], _alone(holder, table)[0])
    for key in _shared_ranges(usable):
        best.setdefault(key, [_SHARED_S] * len(key[1]))
    order = sorted(best, key=lambda key: (sum(map(math.isinf, best[key])), max(best[key]), key))
    return sorted(order[:MAX_SPLITS])


def _shared_ranges(usable: Iterable[SliceHolder]) -> list[tuple[LayerRange, tuple[int, ...]]]:
    """Ranges that all slices of a split are held of, and none of them alone: where one holder's layers begin and
    another's end."""
    of_split: dict[tuple[int, ...], dict[int, set[LayerRange]]] = {}
    for holder in usable:
        of_split.setdefault(holder.weights, {}).setdefault(holder.index, set()).add(holder.layers)
    found = []
    for weights, held in of_split.items():
        if len(held) < len(weights):
            continue
        ranges = {layers for each in held.values() for layers in each}
        starts = sorted({layers.start for layers in ranges})[:MAX_EDGES]
        stops = sorted({layers.stop for layers in ranges}, reverse=True)[:MAX_EDGES]
        found += [
            (shared, weights)
            for shared in (LayerRange(start, stop) for start in starts for stop in stops if start < stop)
            if shared not in ranges
            and all(any(r.start <= shared.start and shared.stop <= r.stop for r in each) for each in held.values())
        ]
    return found


class GroupLegs:
    """Legs of a swarm in which groups are as far away as their farthest member.

    Args:
        legs: between nodes.
    """

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._known: dict[tuple[PeerId | None, PeerId | None], Leg] = {}

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        """From one peer to another; None is the user. Never fails."""
        if not (sender is not None and is_group(sender)) and not (receiver is not None and is_group(receiver)):
            return self._legs.leg(sender, receiver)
        leg = self._known.get((sender, receiver))
        if leg is None:
            legs = [self._legs.leg(one, other) for one in _ends(sender) for other in _ends(receiver)]
            longest = max(legs, key=lambda each: each.one_way_s)
            rates = [each.rate_Bps for each in legs if each.rate_Bps is not None]
            rate_Bps = min(rates) * _shares(sender, receiver) if rates else None
            leg = self._known[sender, receiver] = Leg(longest.one_way_s, longest.source, rate_Bps)
        return leg

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """See scheduler.leg_table.BulkLegs."""
        ones, others = _members(senders), _members(receivers)
        one_way_s, rate_Bps = self._between(ones, others)
        at_one = {peer: index for index, peer in enumerate(ones)}
        at_other = {peer: index for index, peer in enumerate(others)}
        one_way_s = _worst(one_way_s, senders, at_one, np.maximum)
        one_way_s = _worst(one_way_s.T, receivers, at_other, np.maximum).T
        rate_Bps = _worst(rate_Bps, senders, at_one, np.minimum)
        rate_Bps = _worst(rate_Bps.T, receivers, at_other, np.minimum).T
        shares = np.array([len(members_of(peer)) for peer in senders])
        return np.ascontiguousarray(one_way_s), np.ascontiguousarray(rate_Bps * shares[:, None])

    def _between(self, ones: Sequence[PeerId], others: Sequence[PeerId]) -> tuple[Floats, Floats]:
        if isinstance(self._legs, BulkLegs):
            return self._legs.bulk_legs(ones, others)
        legs = [[self._legs.leg(one, other) for other in others] for one in ones]
        return (
            np.array([[leg.one_way_s for leg in row] for row in legs]),
            np.array([[math.inf if leg.rate_Bps is None else leg.rate_Bps for leg in row] for row in legs]),
        )


def _ends(peer: PeerId | None) -> Sequence[PeerId | None]:
    return (None,) if peer is None else members_of(peer)


def _shares(sender: PeerId | None, receiver: PeerId | None) -> int:
    """Into how many parts rows go over lines of their own: from each member of a group to another stage. What reaches
    the user, or leaves it, goes over one line."""
    return 1 if sender is None or receiver is None else len(members_of(sender))


def _members(peers: Sequence[PeerId]) -> list[PeerId]:
    return list(dict.fromkeys(member for peer in peers for member in members_of(peer)))


def _worst(table: Floats, peers: Sequence[PeerId], at: dict[PeerId, int], of: np.ufunc) -> Floats:
    """Rows of peers from rows of their members."""
    return np.array([of.reduce(table[[at[member] for member in members_of(peer)]], axis=0) for peer in peers])


class _Table:
    """What is asked of groups, and what is reckoned once."""

    def __init__(
        self, legs: Legs, dims: Dims, workload: Workload, rules: Rules, avoid: Avoid, *, is_masked: bool
    ) -> None:
        self._is_masked = is_masked
        self.legs, self.workload, self.rules, self.avoid = legs, workload, rules, avoid
        self._dims = dims
        self._widths: dict[tuple[int, ...], Floats | str] = {}
        self._columns: dict[tuple[int, ...], tuple[tuple[int, int], ...]] = {}
        self._pairs = avoid.pairs | {(other, one) for one, other in avoid.pairs}

    def problem(self, weights: tuple[int, ...]) -> str:
        """Why the model's layers cannot be shared like that; empty: they can."""
        found = self._widths_of(weights)
        return found if isinstance(found, str) else ""

    def widths(self, weights: tuple[int, ...]) -> Floats:
        """Bytes of a row that each member is sent by each other [exchanges, members]."""
        found = self._widths_of(weights)
        if isinstance(found, str):
            raise ConfigError(found)
        return found

    def columns(self, weights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Of the hidden state, that each member holds."""
        self.widths(weights)
        return self._columns[weights]

    def _widths_of(self, weights: tuple[int, ...]) -> Floats | str:
        known = self._widths.get(weights)
        if known is None:
            try:
                bounds = split(self._dims, weights)
            except ConfigError as error:
                known = str(error)
            else:
                self._columns[weights] = tuple((each.columns.start, each.columns.stop) for each in bounds)
                known = np.array(
                    [
                        [contribution_bytes(self._dims, owner, each, is_masked=self._is_masked) for owner in bounds]
                        for each in self.exchanges
                    ],
                    dtype=np.float64,
                )
            self._widths[weights] = known
        return known

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return exchanges(self._dims)

    def why_apart(self, one: SliceHolder, other: SliceHolder) -> str | None:
        """Why two may not be members of one group, for people; None when they may."""
        if one.peer == other.peer:
            return "one node would hold two slices"
        if (one.peer, other.peer) in self._pairs:
            return "two nodes that do not reach one another"
        operator = one.candidate.operator
        if self.rules.one_shard_per_operator and operator and operator == other.candidate.operator:
            return "distinct operators"
        if not self.rules.ownership.has_pairs:
            return None
        between = abs(one.index - other.index) - 1
        return self.rules.ownership.are_apart(one.candidate, other.candidate, num_between=between)

    def kind(self, holder: SliceHolder) -> tuple[object, ...]:
        """Holders of one slice of which this is the same are alike to all rules on who is in a group with whom."""
        operator = holder.candidate.operator if self.rules.one_shard_per_operator else ""
        return operator, *self.rules.ownership.kinds(holder.candidate)

    def wants(self, weights: tuple[int, ...], num_members: int | None) -> bool:
        """Whether a group of so many is looked for."""
        if num_members is not None and len(weights) != num_members:
            return False
        return len(weights) >= (MIN_MASKED_MEMBERS if self._is_masked else 2)

    def exchange(self, members: Sequence[SliceHolder], weights: tuple[int, ...]) -> Speed:
        """What the exchanges of a layer take, for 1, 16 and 256 rows."""
        num, peers = len(members), [each.peer for each in members]
        ways = [(one, other) for one in range(num) for other in range(num) if one != other]
        legs = {(one, other): self.legs.leg(peers[one], peers[other]) for one, other in ways}
        longest_s = max(leg.one_way_s for leg in legs.values())
        fixed_s = longest_s + 2 * (num - 1) * EXCHANGE_MESSAGE_S
        # Each member sends to all others over its line; an exchange is over when the last has.
        row_s = 0.0
        for sizes in self.widths(weights).tolist():
            row_s += max(
                sum(
                    0.0 if (rate := legs[one, other].rate_Bps) is None else sizes[other] / max(rate, 1.0)
                    for other in range(num)
                    if other != one
                )
                for one in range(num)
            )
        first, second, third = (len(self.exchanges) * fixed_s + rows * row_s for rows in SPEED_ROWS)
        return Speed(first, second, third)


def _holds(holder: SliceHolder, layers: LayerRange) -> bool:
    return holder.layers.start <= layers.start and layers.stop <= holder.layers.stop


def _why_not(holder: SliceHolder, table: _Table, num_members: int | None) -> Rejection | None:
    candidate = holder.candidate

    def reject(reason: Reason, text: str) -> Rejection:
        return Rejection(candidate.peer, candidate.layers, reason, text)

    if not table.wants(holder.weights, num_members):
        return reject(Reason.OUTSIDE, f"holds a slice of one of {len(holder.weights)}, which you do not want")
    if problem := table.problem(holder.weights):
        return reject(Reason.OUTSIDE, problem)
    if candidate.peer in table.avoid.peers:
        return reject(Reason.AVOIDED, "failed or refused lately")
    if math.isinf(table.legs.leg(None, candidate.peer).one_way_s + table.legs.leg(candidate.peer, None).one_way_s):
        return reject(Reason.UNREACHABLE, "cannot be reached")
    if (rule := table.rules.rejects(candidate, holder.place)) is not None:
        return reject(Reason.RULE, rule)
    if candidate.kv_free_positions < table.workload.num_positions:
        room = candidate.kv_free_positions
        return reject(Reason.NO_ROOM, f"has room for {room} of {table.workload.num_positions} positions")
    return None


HELD_BY_NOBODY = "held by nobody"
HELD_BY_NOBODY_ALLOWED = "held by nobody whom your rules allow"
_WHY_MISSING = {
    Reason.NO_ROOM: "held without room for the session",
    Reason.RULE: HELD_BY_NOBODY_ALLOWED,
    Reason.AVOIDED: "held by nobody who has not failed lately",
    Reason.UNREACHABLE: "held by nobody who can be reached",
}

MAX_TOLD = 3
"""Of the rules that leave nobody for a slice."""


def _why_missing(layers: LayerRange, turned_away: Iterable[tuple[SliceHolder, Rejection]]) -> str:
    """
    Args:
        turned_away: holders of the slice.
    """
    about = [each for holder, each in turned_away if _holds(holder, layers) and _touches(each.layers, layers)]
    reasons = {rejection.reason for rejection in about}
    why = next((why for reason, why in _WHY_MISSING.items() if reason in reasons), HELD_BY_NOBODY)
    if why != HELD_BY_NOBODY_ALLOWED:
        return why
    told = Counter(each.text for each in about if each.reason is Reason.RULE).most_common(MAX_TOLD)
    return f"{why} ({', '.join(f'{count} × {text}' for text, count in told)})"


def _touches(one: LayerRange, other: LayerRange) -> bool:
    """Whether two ranges have a layer in common."""
    return one.start < other.stop and other.start < one.stop


class _Choice:
    """Who of the holders of each slice of some layers are a group.

    Args:
        by_index: holders of each slice.
    """

    def __init__(
        self,
        by_index: Sequence[Sequence[SliceHolder]],
        layers: LayerRange,
        weights: tuple[int, ...],
        table: _Table,
    ) -> None:
        self._layers, self._weights, self._table = layers, weights, table
        self._chosen_from = [self._best_of(holders) for holders in by_index]
        self._known: dict[tuple[PeerId, ...], tuple[float, Candidate] | None] = {}
        self.num_left_out = 0

    def groups(self, is_thorough: bool) -> list[Candidate]:
        """The best, then those that differ from it in one member, or all, by what they cost; none where no way keeps
        the rules."""
        best = self._search()
        if best is None:
            return []
        found = [self._form(best)]
        for k in range(len(best)):
            others = [
                self._form([*best[:k], other, *best[k + 1 :]]) for other in self._chosen_from[k] if other is not best[k]
            ]
            found += sorted((each for each in others if each is not None), key=_by_value)[:MAX_EXCHANGED]
        kept = {each[1].peer: each for each in found if each is not None}
        everybody = {each[1].peer: each for each in self._known.values() if each is not None}
        if is_thorough:
            kept = dict(sorted(everybody.items(), key=lambda each: _by_value(each[1]))[:MAX_WAYS])
        self.num_left_out = len(everybody.keys() - kept.keys())
        return [candidate for _, candidate in sorted(kept.values(), key=_by_value)]

    def why_none(self) -> tuple[int, tuple[int, ...], str]:
        """Where no way keeps the rules: of two slices one, with the rule that most often parts their holders."""
        why: Counter[tuple[int, str]] = Counter()
        slices: dict[tuple[int, str], set[int]] = {}
        for one, other in itertools.combinations(itertools.chain.from_iterable(self._chosen_from), 2):
            if one.index != other.index and (text := self._table.why_apart(one, other)) is not None:
                for index in (one.index, other.index):
                    why[index, text] += 1
                    slices.setdefault((index, text), set()).update((one.index, other.index))
        if not why:
            return 0, self._weights, "held only together with others that your rules exclude"
        (index, text), _ = max(why.items(), key=lambda each: (each[1], -each[0][0], each[0][1]))
        others = ", ".join(f"{ModelSlice(each, self._weights)}" for each in sorted(slices[index, text] - {index}))
        return index, self._weights, f"held only beside holders of {others} that your rules exclude ({text})"

    def _best_of(self, holders: Sequence[SliceHolder]) -> list[SliceHolder]:
        """Those that cost least by themselves; of those that rules on pairs tell apart, each kind has its turn."""
        turns: dict[tuple[object, ...], int] = {}
        ranked = []
        for holder in sorted(holders, key=lambda each: _alone(each, self._table)):
            kind = self._table.kind(holder)
            turns[kind] = turns.get(kind, -1) + 1
            ranked.append((turns[kind], holder))
        kept = [holder for _, holder in sorted(ranked, key=lambda each: each[0])[:MAX_PER_SLICE]]
        return sorted(kept, key=lambda each: _alone(each, self._table))

    def _form(self, members: Sequence[SliceHolder]) -> tuple[float, Candidate] | None:
        key = tuple(each.peer for each in members)
        if key not in self._known:
            self._known[key] = _form(members, self._layers, self._weights, self._table)
        return self._known[key]

    def _search(self) -> list[SliceHolder] | None:
        if math.prod(map(len, self._chosen_from)) <= MAX_WAYS:
            all_ways = [
                (found[0], list(members))
                for members in itertools.product(*self._chosen_from)
                if (found := self._form(members))
            ]
            return min(all_ways, key=lambda way: way[0])[1] if all_ways else None
        best = self._any_way()
        if best is None:
            return None
        for _ in range(MAX_ROUNDS):
            before = list(best)
            for k, holders in enumerate(self._chosen_from):
                ways = [[*best[:k], other, *best[k + 1 :]] for other in holders]
                best = min(ways, key=lambda way: math.inf if (each := self._form(way)) is None else each[0])
            if best == before:
                break
        return best

    def _any_way(self) -> list[SliceHolder] | None:
        """The first way that keeps the rules, found by trying member after member and going back where nobody fits."""
        chosen: list[SliceHolder] = []
        left = [iter(self._chosen_from[0])]
        num_placed = 0
        while left and num_placed < MAX_PLACED:
            holder = next(left[-1], None)
            num_placed += 1
            if holder is None:
                left.pop()
                if chosen:
                    chosen.pop()
                continue
            if any(self._table.why_apart(each, holder) for each in chosen):
                continue
            if len(chosen) + 1 < len(self._chosen_from):
                chosen.append(holder)
                left.append(iter(self._chosen_from[len(chosen)]))
            elif self._form([*chosen, holder]) is not None:
                return [*chosen, holder]
        return None


def _by_value(found: tuple[float, Candidate]) -> tuple[float, PeerId]:
    return found[0], found[1].peer


def _alone(holder: SliceHolder, table: _Table) -> tuple[float, PeerId]:
    """What a holder costs by itself."""
    candidate, legs = holder.candidate, table.legs
    way_s = legs.leg(None, candidate.peer).one_way_s + legs.leg(candidate.peer, None).one_way_s
    compute_s = len(candidate.layers) * compute_s_per_layer(candidate, table.workload.step_rows)
    return way_s + max(candidate.queue_s, 0.0) + compute_s, candidate.peer


def _form(
    members: Sequence[SliceHolder], layers: LayerRange, weights: tuple[int, ...], table: _Table
) -> tuple[float, Candidate] | None:
    """A group, and the seconds of a step by which it is compared; None where these may be none."""
    nodes = tuple(each.candidate for each in members)
    peers = [node.peer for node in nodes]
    if group_id(peers) in table.avoid.peers:
        return None
    if any(table.why_apart(one, other) for one, other in itertools.combinations(members, 2)):
        return None
    group = Candidate(
        peer=group_id(peers),
        layers=layers,
        speed=Speed(
            max(node.speed.rows_1_s for node in nodes),
            max(node.speed.rows_16_s for node in nodes),
            max(node.speed.rows_256_s for node in nodes),
        ),
        kv_free_positions=min(node.kv_free_positions for node in nodes),
        queue_s=max(node.queue_s for node in nodes),
        numerics=nodes[0].numerics,
        price=sum(node.price for node in nodes),
        note="; ".join(f"{node.peer[-8:]} {node.note}" for node in nodes if node.note),
        members=tuple(replace(node, layers=layers) for node in nodes),
        exchange=table.exchange(members, weights),
        weights=weights,
        columns=table.columns(weights),
    )
    way_s = max(table.legs.leg(None, peer).one_way_s for peer in peers)
    way_s += max(table.legs.leg(peer, None).one_way_s for peer in peers)
    layers_s = len(layers) * seconds_per_layer(group, table.workload.step_rows)
    return way_s + max(group.queue_s, 0.0) + layers_s, group


__all__ = [
    "EXCHANGE_MESSAGE_S",
    "HELD_BY_NOBODY",
    "HELD_BY_NOBODY_ALLOWED",
    "Formed",
    "GroupLegs",
    "MissingSlice",
    "SliceHolder",
    "form_groups",
    "plan_with",
]
