"""The user's own rules in the user's own words: who may serve, and what a route may look like.

What a user writes names peers by a part of their id, as tables show it; the planner compares whole ids. So rules are
resolved (``UserRules.resolve``) each time that the nodes of a swarm are known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fusion_node.errors import ConfigError
from fusion_node.slices import MAX_MEMBERS, MIN_MASKED_MEMBERS
from fusion_node.types import PeerId
from fusion_node.wire import printable
from p2p.identity import short
from scheduler.ownership import NO_OWNERSHIP, Ownership
from scheduler.plans import Objective, Topology
from scheduler.rules import Rules

MAX_SELECTORS = 256
"""Of allow and deny each."""

MIN_PEER_CHARACTERS = 6
"""Of a peer id that is named by its beginning or end. An id begins with eight that all have in common."""

MAX_TAG_CHARACTERS = 96
"""Of an operator's or a region's name: records hold no more."""

MAX_STAGES = 128
"""A plan holds no more (p2p.records)."""

_COMMON_BEGINNING = "12D3KooW"
"""Of all ids of Ed25519 keys (libp2p peer id specification: an identity multihash of the key's protobuf)."""

_PEER = re.compile(r"[1-9A-HJ-NP-Za-km-z]{1,52}")


@dataclass(frozen=True, slots=True)
class UserRules:
    """Who may serve an answer, and what its route may look like. Whoever is excluded is never sent anything.

    A selector is a peer id, or its beginning or end; ``operator:NAME``; or ``region:NAME``, which includes the parts of
    that region: ``region:eu`` is also ``eu-west``. What a node says of its operator, region and price, nobody checks.

    Attributes:
        allow: when not empty, only these. Of each kind (peers, operators, regions) one must fit: ``operator:anna``
            together with ``region:eu`` allows Anna's nodes in Europe.
        deny: never these, whatever is allowed.
        distinct_operators: no operator has two stages. A node that names none counts as its own.
        max_price: that a node may ask; None: any.
        max_stages: of a route; None: any number.
        revoked: never these, whatever is allowed: SwarmClient.revoke adds to them.
        ownership: who may hold which slices of which layers, and who may not stand beside whom.

    Raises:
        ConfigError: when made of what makes no sense.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    distinct_operators: bool = False
    max_price: float | None = None
    max_stages: int | None = None
    revoked: frozenset[PeerId] = frozenset()
    ownership: Ownership = NO_OWNERSHIP

    def __post_init__(self) -> None:
        for name, selectors in (("allow", self.allow), ("deny", self.deny)):
            if len(selectors) > MAX_SELECTORS:
                raise ConfigError(
                    f"{name} names {len(selectors)} peers, operators and regions; {MAX_SELECTORS} at most"
                )
            for selector in selectors:
                _split(selector)
        if self.max_price is not None and not (math.isfinite(self.max_price) and self.max_price >= 0):
            raise ConfigError(f"a maximum price of {self.max_price} makes no sense: name a number that is not negative")
        if self.max_stages is not None and not 1 <= self.max_stages <= MAX_STAGES:
            raise ConfigError(f"a route of at most {self.max_stages} stages makes no sense: name 1 to {MAX_STAGES}")

    def resolve(self, known: Collection[PeerId]) -> Rules:
        """As the planner takes them.

        Args:
            known: ids of all nodes among which is planned.
        """
        allow, deny = _sorted_out(self.allow), _sorted_out(self.deny)
        allowed = _named(allow["peer"], known)
        if allow["peer"] and not allowed:
            # Nobody who is named is there. An empty set would allow everybody.
            allowed = frozenset(PeerId(part) for part in allow["peer"])
        return Rules(
            allow_peers=allowed,
            deny_peers=_named(deny["peer"], known),
            allow_operators=frozenset(allow["operator"]),
            deny_operators=frozenset(deny["operator"]),
            allow_regions=frozenset(allow["region"]),
            deny_regions=frozenset(deny["region"]),
            one_shard_per_operator=self.distinct_operators,
            max_price=self.max_price,
            max_stages=self.max_stages,
            revoked_peers=self.revoked,
            ownership=self.ownership,
        )

    def in_words(self) -> tuple[str, ...]:
        """Each rule in a few words, for people; empty when there is none."""
        words = [f"allow {printable(selector)}" for selector in self.allow]
        words += [f"deny {printable(selector)}" for selector in self.deny]
        if self.distinct_operators:
            words.append("distinct operators")
        if self.max_price is not None:
            words.append(f"price at most {self.max_price:g}")
        if self.max_stages is not None:
            words.append(f"at most {self.max_stages} stage{'s' if self.max_stages > 1 else ''}")
        words += [f"{short(peer)} is revoked" for peer in sorted(self.revoked)]
        words += map(printable, self.ownership.in_words())
        return tuple(words)


def objective_of(name: str) -> Objective:
    """Reads ``latency``, ``throughput`` or ``first-token``.

    Raises:
        ConfigError: it is none of these.
    """
    try:
        return Objective(name)
    except ValueError as error:
        known = ", ".join(Objective)
        raise ConfigError(f"unknown objective {printable(name, limit=40)!r}: {known}") from error


def topology_of(name: str) -> Topology:
    """Reads ``pipeline``, ``fusion`` or ``hybrid``.

    Raises:
        ConfigError: it is none of these.
    """
    try:
        return Topology(name)
    except ValueError as error:
        raise ConfigError(f"unknown topology {printable(name, limit=40)!r}: {', '.join(Topology)}") from error


def check_members(members: int | None, topology: Topology) -> None:
    """Raises ConfigError for a number of members that no group has, or where there are no groups."""
    if members is None:
        return
    if topology is Topology.PIPELINE:
        raise ConfigError("members are those of fusion groups: add --topology fusion, or hybrid")
    if not 2 <= members <= MAX_MEMBERS:
        raise ConfigError(f"groups of {members} members make no sense: name 2 to {MAX_MEMBERS}")


def check_masked_sums(masked_sums: bool, topology: Topology, members: int | None) -> None:
    """Raises ConfigError where sums are to be masked and there is nobody to hide behind."""
    if not masked_sums:
        return
    if topology is not Topology.FUSION:
        raise ConfigError(
            f"masked sums are those of fusion groups, and in a {topology} nodes see whole states: add --topology fusion"
        )
    if members is not None and members < MIN_MASKED_MEMBERS:
        raise ConfigError(
            f"of a group of {members} each is sent what the other one contributes, masked or not: masked sums need "
            f"--members {MIN_MASKED_MEMBERS} or more"
        )


def _split(selector: str) -> tuple[str, str]:
    """The kind (``peer``, ``operator`` or ``region``) and what is named.

    Raises:
        ConfigError: it is no selector.
    """
    kind, colon, name = selector.strip().partition(":")
    if colon:
        name = name.strip()
        if kind not in ("operator", "region"):
            raise ConfigError(
                f"{printable(selector, limit=80)!r} names nobody: write a peer id, operator:NAME or region:NAME"
            )
        if not 1 <= len(name) <= MAX_TAG_CHARACTERS:
            raise ConfigError(f"{kind}: needs a name of 1 to {MAX_TAG_CHARACTERS} characters behind it")
        return kind, name
    part = kind.strip("….")
    if not _PEER.fullmatch(part):
        raise ConfigError(
            f"{printable(selector, limit=80)!r} is no part of a peer id: write one, operator:NAME or region:NAME"
        )
    beginning = len(_COMMON_BEGINNING) if part.startswith(_COMMON_BEGINNING) else 0
    if _COMMON_BEGINNING.startswith(part) or len(part) - beginning < MIN_PEER_CHARACTERS:
        raise ConfigError(
            f"{printable(selector)!r} is too short for a peer: write {MIN_PEER_CHARACTERS} characters of its end, or "
            f"as many behind {_COMMON_BEGINNING}"
        )
    return "peer", part


def _sorted_out(selectors: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"peer": [], "operator": [], "region": []}
    for selector in selectors:
        kind, name = _split(selector)
        found[kind].append(name)
    return found


def _named(parts: Iterable[str], known: Collection[PeerId]) -> frozenset[PeerId]:
    return frozenset(peer for part in parts for peer in known if peer.startswith(part) or peer.endswith(part))
