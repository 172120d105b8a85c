"""The user's own rules: who may serve a stage at all, and what a route as a whole may not do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion_node.slices import ModelSlice
from fusion_node.types import PeerId
from scheduler.ownership import NO_OWNERSHIP, WHOLE, Ownership
from scheduler.topology import Candidate


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user demands. Tags are what nodes say of themselves; nobody checks a region or an operator.

    Attributes:
        allow_peers, allow_operators, allow_regions: where one is not empty, only those.
        deny_peers, deny_operators, deny_regions: never those. A region includes its parts: ``eu`` includes ``eu-west``.
        trusted_peers: whom the user trusts; used by trusted_only.
        trusted_only: plan with those alone.
        numerics: class that nodes must serve; empty: any. Candidates that do not say serve the one that was asked for.
        one_shard_per_operator: no operator has two stages. A node without the tag counts as an operator of its own.
        max_price: that a node may ask for a million positions in one layer; None: any.
        max_route_price: that all stages together may ask for a million positions; None: any.
        max_stages: of a route; None: any number.
        revoked_peers: never those: the user has withdrawn what they held.
        ownership: who may hold which slices of which layers, and who may not stand beside whom.
    """

    allow_peers: frozenset[PeerId] = frozenset()
    deny_peers: frozenset[PeerId] = frozenset()
    allow_operators: frozenset[str] = frozenset()
    deny_operators: frozenset[str] = frozenset()
    allow_regions: frozenset[str] = frozenset()
    deny_regions: frozenset[str] = frozenset()
    trusted_peers: frozenset[PeerId] = frozenset()
    trusted_only: bool = False
    numerics: str = ""
    one_shard_per_operator: bool = False
    max_price: float | None = None
    max_route_price: float | None = None
    max_stages: int | None = None
    revoked_peers: frozenset[PeerId] = frozenset()
    ownership: Ownership = NO_OWNERSHIP

    def rejects(self, candidate: Candidate, place: ModelSlice = WHOLE) -> str | None:
        """Why a candidate may serve no stage, for people; None when it may, be it with some of its layers alone (see
        Ownership.allowed). A group may when each member may.

        Args:
            place: the slice that a node holds.
        """
        why = next((why for node in candidate.nodes if (why := self._rejects_node(node))), None)
        return why if why is not None or self.ownership.allows_all else self.ownership.rejects(candidate, place)

    def _rejects_node(self, candidate: Candidate) -> str | None:
        if candidate.peer in self.revoked_peers:
            return "you have revoked this peer"
        if candidate.peer in self.deny_peers:
            return "you deny this peer"
        if self.allow_peers and candidate.peer not in self.allow_peers:
            return "not among the peers that you allow"
        if self.trusted_only and candidate.peer not in self.trusted_peers:
            return "not among the peers that you trust"
        if self.numerics and candidate.numerics and candidate.numerics != self.numerics:
            return f"serves {candidate.numerics}, not {self.numerics}"
        return self._rejects_operator(candidate.operator) or self._rejects_region(candidate) or self._dear(candidate)

    def _rejects_operator(self, operator: str) -> str | None:
        if operator and operator in self.deny_operators:
            return f"you deny operator {operator}"
        if self.allow_operators and operator not in self.allow_operators:
            return "not of an operator that you allow"
        return None

    def _rejects_region(self, candidate: Candidate) -> str | None:
        region = candidate.region
        if denied := _within(region, self.deny_regions):
            return f"you deny region {denied}"
        if self.allow_regions and not _within(region, self.allow_regions):
            return "not in a region that you allow" if region else "does not say in which region it is"
        return None

    def _dear(self, candidate: Candidate) -> str | None:
        if self.max_price is not None and candidate.price > self.max_price:
            return f"asks {candidate.price:g}, more than {self.max_price:g}"
        return None


def _within(region: str, regions: Iterable[str]) -> str | None:
    """The region among these that one is, or is a part of."""
    own = region.casefold()
    for other in sorted(regions):
        if own and other and (own == other.casefold() or own.startswith(other.casefold() + "-")):
            return other
    return None
