"""Who may own which part of a model's states: the user's rules on slices, layers, and who stands beside whom.

A rule on holding speaks of nodes one by one: which slices (``0/3``; whole rows are slice ``0/1``) of which layers. A
rule on pairs speaks of a set of nodes: no two of them in one group (*together*), or no two of them with columns that
touch or overlap, next to one another in a group or where one stage hands on to the next (*adjacent*).

Guarantees: a part of a node's layers is either allowed or not, and is told by which rule. Who is named by a rule on
what may be held holds that and nothing else; what may never be held is held by nobody, whatever else is allowed; only
who is named by none of the former falls under the default. Slices count by the parts that they are: ``1/2:1`` is
``2/3``. What may be held is exactly these parts; who may never hold a part may not hold a larger one that contains it.

Assumes: a group's candidate says which slices its members hold and which columns these are. Of what it does not say,
the most is assumed: a member is taken to hold all columns.

Source: docs/fusion.md, "Who may own what". An operator is what a node says of itself; a peer id is proven.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, PeerId
from scheduler.route_search import Bools
from scheduler.topology import Candidate

WHOLE = ModelSlice(0, (1,))
"""What a node holds that serves its layers alone: whole rows."""

MAX_NAMED = 3
"""Peers, operators, slices or layer ranges of a rule that are told of it."""

_ALL_COLUMNS = (0, 2**62)


@dataclass(frozen=True, slots=True)
class Who:
    """Whom a rule names: who is one of these peers, or says that it is of one of these operators."""

    peers: frozenset[PeerId] = frozenset()
    operators: frozenset[str] = frozenset()
    is_anybody: bool = False

    def names(self, node: Candidate) -> bool:
        """Whether a node is one of them."""
        return self.is_anybody or node.peer in self.peers or bool(node.operator and node.operator in self.operators)

    def __str__(self) -> str:
        if self.is_anybody:
            return "anybody"
        return _some(
            [f"operator:{name}" for name in sorted(self.operators)] + [f"…{p[-8:]}" for p in sorted(self.peers)]
        )


@dataclass(frozen=True, slots=True)
class HoldRule:
    """A part of the model that some may hold, or may never hold.

    Attributes:
        slices: None: any, whole rows included.
        layers: empty: all.
        where: it is written, for people.
    """

    who: Who
    slices: frozenset[ModelSlice] | None = None
    layers: tuple[LayerRange, ...] = ()
    where: str = "ownership"

    def lets(self, place: ModelSlice, layers: LayerRange) -> bool:
        """Whether one of these parts is a slice, of layers that are half inside no rule."""
        return self._speaks_of(layers) and (self.slices is None or _part(place) in map(_part, self.slices))

    def forbids(self, place: ModelSlice, layers: LayerRange) -> bool:
        """Whether a slice contains one of these parts, of layers that are half inside no rule."""
        start, stop = _part(place)
        held = None if self.slices is None else map(_part, self.slices)
        return self._speaks_of(layers) and (held is None or any(start <= a and b <= stop for a, b in held))

    def _speaks_of(self, layers: LayerRange) -> bool:
        return not self.layers or any(r.start <= layers.start and layers.stop <= r.stop for r in self.layers)

    @property
    def what(self) -> str:
        """For people."""
        slices = "any slice" if self.slices is None else _some([_slice(each) for each in sorted(self.slices)])
        return f"{slices} of layers {_some(list(map(str, self.layers)))}" if self.layers else slices


@dataclass(frozen=True, slots=True)
class PairRule:
    """Nodes of which no two may stand beside one another.

    Attributes:
        where: it is written, for people.
    """

    who: Who
    where: str = "ownership"


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a node or group of which the same is said.

    Attributes:
        why: which rule says so, for people.
    """

    layers: LayerRange
    is_allowed: bool
    why: str


@dataclass(frozen=True, slots=True)
class OwnershipBreach:
    """Why a stage of a route may not be where it is.

    Attributes:
        peer: who has to go for the rule to be kept: of two that may not stand beside one another, the later.
    """

    stage: int
    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Ownership:
    """All rules.

    Attributes:
        is_default_allow: of nodes that no rule of ``may_hold`` names.
        name: of the file that they come from, for people; empty: they come from none.
        where_default: it is written, for people.
    """

    is_default_allow: bool = True
    may_hold: tuple[HoldRule, ...] = ()
    never_hold: tuple[HoldRule, ...] = ()
    never_together: tuple[PairRule, ...] = ()
    never_adjacent: tuple[PairRule, ...] = ()
    name: str = ""
    where_default: str = "ownership"

    @property
    def allows_all(self) -> bool:
        """Whether nobody is kept from anything."""
        rules = (*self.may_hold, *self.never_hold, *self.never_together, *self.never_adjacent)
        return self.is_default_allow and not rules

    # of one candidate

    def parts(self, candidate: Candidate, place: ModelSlice = WHOLE) -> tuple[Part, ...]:
        """What is said of a candidate's layers, in order and without a gap.

        Args:
            place: the slice that it holds. A group's members hold theirs, by its weights.
        """
        if not candidate.members:
            return self._parts_of_node(candidate, place)
        layers = candidate.layers
        if len(candidate.weights) != len(candidate.members):
            return (Part(layers, self.allows_all, "ownership: nobody knows which slices its members hold"),)
        if (beside := self._pair_within(candidate)) is not None:
            return (Part(layers, False, beside[2]),)
        of_members = [
            self._parts_of_node(member, ModelSlice(index, candidate.weights))
            for index, member in enumerate(candidate.members)
        ]
        edges = sorted(
            {edge for parts in of_members for part in parts for edge in (part.layers.start, part.layers.stop)}
        )
        edges = sorted({layers.start, layers.stop, *(e for e in edges if layers.start < e < layers.stop)})
        found = []
        for start, stop in itertools.pairwise(edges):
            said = [
                next((p for p in parts if p.layers.start <= start and stop <= p.layers.stop), None)
                for parts in of_members
            ]
            # A member that does not hold these layers cannot serve them, whatever is allowed.
            refused = next((p for p in said if p is None or not p.is_allowed), said[0])
            why = "ownership: a member does not hold these layers" if refused is None else refused.why
            found.append(Part(LayerRange(start, stop), all(p is not None and p.is_allowed for p in said), why))
        return _joined(found)

    def allowed(self, candidate: Candidate, place: ModelSlice = WHOLE) -> tuple[LayerRange, ...]:
        """The layers of a candidate that it may serve, as the fewest ranges."""
        ranges: list[LayerRange] = []
        for part in self.parts(candidate, place):
            if not part.is_allowed:
                continue
            if ranges and ranges[-1].stop == part.layers.start:
                ranges[-1] = LayerRange(ranges[-1].start, part.layers.stop)
            else:
                ranges.append(part.layers)
        return tuple(ranges)

    def rejects(self, candidate: Candidate, place: ModelSlice = WHOLE) -> str | None:
        """Why a candidate may serve none of its layers, for people; None when it may serve some."""
        parts = self.parts(candidate, place)
        if any(part.is_allowed for part in parts):
            return None
        return "; ".join(list(dict.fromkeys(part.why for part in parts))[:MAX_NAMED])

    def _parts_of_node(self, node: Candidate, place: ModelSlice) -> tuple[Part, ...]:
        layers = node.layers
        never = [rule for rule in self.never_hold if rule.who.names(node)]
        may = [rule for rule in self.may_hold if rule.who.names(node)]
        edges = {edge for rule in (*never, *may) for r in rule.layers for edge in (r.start, r.stop)}
        inner = sorted(edge for edge in edges if layers.start < edge < layers.stop)
        ends = [layers.start, *inner, layers.stop]
        return _joined(
            Part(part, *self._said(part, place, never, may))
            for part in itertools.starmap(LayerRange, itertools.pairwise(ends))
        )

    def _said(
        self, layers: LayerRange, place: ModelSlice, never: Sequence[HoldRule], may: Sequence[HoldRule]
    ) -> tuple[bool, str]:
        """Of layers that each of these rules, which name the node, covers whole or not at all."""
        for rule in never:
            if rule.forbids(place, layers):
                return False, f"{rule.where}: {rule.who} may never hold {rule.what}"
        for rule in may:
            if rule.lets(place, layers):
                return True, f"{rule.where}: {rule.who} may hold {rule.what}"
        if may:
            which = _some([f"{rule.where.removeprefix('ownership ')}: {rule.what}" for rule in may])
            return False, f"ownership: it may hold other parts alone ({which}), not {_slice(place)} of these layers"
        if self.is_default_allow:
            return True, f"{self.where_default}: no rule names it, and the default is to allow"
        return False, f"{self.where_default}: no rule says that it may hold anything, and the default is to deny"

    # of pairs

    def are_apart(self, one: Candidate, other: Candidate, *, num_between: int) -> str | None:
        """Why two nodes may not be members of one group; None when they may.

        Args:
            num_between: members whose slices lie between theirs.
        """
        rules = [(rule, "in one group") for rule in self.never_together]
        if num_between == 0:
            rules += [(rule, "with adjacent slices") for rule in self.never_adjacent]
        for rule, how in rules:
            if rule.who.names(one) and rule.who.names(other):
                return f"{rule.where}: no two of {rule.who} {how}"
        return None

    @property
    def has_pairs(self) -> bool:
        """Whether it matters who is in a group with whom, or hands on to whom."""
        return bool(self.never_together or self.never_adjacent)

    def kinds(self, node: Candidate) -> tuple[bool, ...]:
        """Which rules on pairs name a node: nodes of which the same is true are alike in them."""
        return tuple(rule.who.names(node) for rule in (*self.never_together, *self.never_adjacent))

    def not_handing(self, nodes: Sequence[Candidate]) -> Bools | None:
        """Which candidates may not hand on to one another, in either direction [N, N]; None: all may."""
        if not self.never_adjacent:
            return None
        barred: Bools = np.zeros((len(nodes), len(nodes)), dtype=np.bool_)
        for rule in self.never_adjacent:
            held = [(index, *columns) for index, node in enumerate(nodes) for _, columns in _columns_of(rule.who, node)]
            if not held:
                continue
            at, starts, stops = np.array(held, dtype=np.int64).T
            rows, columns = np.nonzero((starts[:, None] <= stops) & (starts <= stops[:, None]))
            barred[at[rows], at[columns]] = True
        return barred

    def why_not_handing(self, one: Candidate, other: Candidate) -> str | None:
        """Which rule keeps two stages from handing on to one another; None: none does."""
        found = self._pair_between(one, other)
        return None if found is None else found[1]

    # of a route

    def breaches(self, stages: Sequence[Candidate]) -> tuple[OwnershipBreach, ...]:
        """Who is where the rules do not allow it, in the order of the stages; empty: the route keeps them.

        Args:
            stages: candidates with the layers that they serve.
        """
        if self.allows_all:
            return ()
        found: dict[tuple[int, PeerId], OwnershipBreach] = {}

        def note(stage: int, peer: PeerId, why: str) -> None:
            found.setdefault((stage, peer), OwnershipBreach(stage, peer, why))

        for index, stage in enumerate(stages):
            if stage.members and len(stage.weights) != len(stage.members):
                note(index, stage.members[-1].peer, "ownership: nobody knows which slices its members hold")
                continue
            for k, node in enumerate(stage.nodes):
                place = ModelSlice(k, stage.weights) if stage.members else WHOLE
                for part in self._parts_of_node(node, place):
                    if not part.is_allowed:
                        note(index, node.peer, part.why)
            if stage.members and (pair := self._pair_within(stage)) is not None:
                note(index, stage.members[pair[1]].peer, pair[2])
            if index and (beside := self._pair_between(stages[index - 1], stage)) is not None:
                note(index, beside[0], beside[1])
        return tuple(found.values())

    def _pair_within(self, group: Candidate) -> tuple[int, int, str] | None:
        """The first two members that may not be in it."""
        if not self.has_pairs:
            return None
        for one, other in itertools.combinations(range(len(group.members)), 2):
            why = self.are_apart(group.members[one], group.members[other], num_between=other - one - 1)
            if why is not None:
                return one, other, why
        return None

    def _pair_between(self, before: Candidate, after: Candidate) -> tuple[PeerId, str] | None:
        """Who of the later stage may not be sent columns by one of the earlier stage."""
        for rule in self.never_adjacent:
            for _, (start, stop) in _columns_of(rule.who, before):
                for peer, (other_start, other_stop) in _columns_of(rule.who, after):
                    if start <= other_stop and other_start <= stop:
                        return peer, f"{rule.where}: no two of {rule.who} with columns that touch, from stage to stage"
        return None

    def in_words(self) -> tuple[str, ...]:
        """In a few words, for people; empty when nobody is kept from anything."""
        if self.allows_all:
            return ()
        counts = [
            f"{len(rules)} {what}"
            for what, rules in (
                ("may_hold", self.may_hold),
                ("never_hold", self.never_hold),
                ("never_together", self.never_together),
                ("never_adjacent", self.never_adjacent),
            )
            if rules
        ]
        default = f"default {'allow' if self.is_default_allow else 'deny'}"
        return (f"ownership {self.name}".rstrip() + f": {', '.join([default, *counts])}",)


@lru_cache(maxsize=4096)
def _part(place: ModelSlice) -> tuple[Fraction, Fraction]:
    """Where a slice begins and ends in the whole, whatever it is called."""
    total, before = sum(place.weights), sum(place.weights[: place.index])
    return Fraction(before, total), Fraction(before + place.weights[place.index], total)


def _columns_of(who: Who, candidate: Candidate) -> list[tuple[PeerId, tuple[int, int]]]:
    """Columns that those of a candidate's nodes hold whom a rule names."""
    if not candidate.members:
        return [(candidate.peer, _ALL_COLUMNS)] if who.names(candidate) else []
    columns = candidate.columns
    if len(columns) != len(candidate.members):
        columns = (_ALL_COLUMNS,) * len(candidate.members)
    return [(node.peer, held) for node, held in zip(candidate.members, columns, strict=True) if who.names(node)]


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and (last.is_allowed, last.why) == (part.is_allowed, part.why):
            joined[-1] = Part(LayerRange(last.layers.start, part.layers.stop), part.is_allowed, part.why)
        else:
            joined.append(part)
    return tuple(joined)


def _slice(place: ModelSlice) -> str:
    return "whole rows (0/1)" if place.num_members == 1 else f"slice {place}"


def _some(words: Sequence[str]) -> str:
    shown = ", ".join(words[:MAX_NAMED])
    return f"{shown} and {len(words) - MAX_NAMED} more" if len(words) > MAX_NAMED else shown


NO_OWNERSHIP = Ownership()
"""Nobody is kept from anything."""
