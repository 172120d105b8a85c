"""Which peers a node connects to, and which connections it gives up.

Guarantees: the choice is by chance among those known, so that no peer is everybody's; at most MAX_PER_PLACE chosen
peers are in one /16 of IPv4 or /48 of IPv6 (Heilman et al., "Eclipse Attacks on Bitcoin's Peer-to-Peer Network", 2015,
§7), unless fewer than half of what is wanted could be had so: a swarm in one data centre must not fall apart. Addresses
that are not globally routable, and names, say nothing about places and count as different ones.

Assumes: the source of chance is one that strangers cannot foretell. Pure functions; no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusion_node.types import PeerId
from p2p.peer_book import host_of
from p2p.prefixes import diversity_key

if TYPE_CHECKING:
    from random import Random

MAX_PER_PLACE = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could be dialled.

    Attributes:
        addresses: multiaddrs, never empty.
        is_preferred: whether it serves what this node serves; half of the choice is for those.
    """

    peer: PeerId
    addresses: tuple[str, ...]
    is_preferred: bool = False


def place_of(addresses: Sequence[str]) -> str | None:
    """The /16 or /48 of the first address that is in one; None when none is."""
    return next((place for place in map(diversity_key, map(host_of, addresses)) if place is not None), None)


def choose(candidates: Iterable[Candidate], num: int, taken: Iterable[str | None], chance: Random) -> list[Candidate]:
    """Up to ``num`` of the candidates.

    Args:
        taken: the places of the peers that are connected or being dialled already.
    """
    if num <= 0:
        return []
    pool = list(candidates)
    chance.shuffle(pool)
    preferred = [candidate for candidate in pool if candidate.is_preferred][: num // 2]
    chosen_first = set(preferred)
    pool = [*preferred, *(candidate for candidate in pool if candidate not in chosen_first)]
    crowd = Counter(place for place in taken if place is not None)
    num_taken = crowd.total()
    chosen: list[Candidate] = []
    crowded: list[Candidate] = []
    for candidate in pool:
        if len(chosen) == num:
            return chosen
        place = place_of(candidate.addresses)
        if place is not None and crowd[place] >= MAX_PER_PLACE:
            crowded.append(candidate)
            continue
        if place is not None:
            crowd[place] += 1
        chosen.append(candidate)
    short = num // 2 - len(chosen) - num_taken
    return chosen + crowded[: max(0, short)]


def choose_to_drop(
    connected: Iterable[tuple[PeerId, str | None]], num: int, taken: Iterable[str | None], chance: Random
) -> list[PeerId]:
    """Up to ``num`` of the connections that may be given up: those in the most crowded places, then by chance.

    Args:
        connected: those that may be given up, with their places.
        taken: the places of all.
    """
    pool = list(connected)
    chance.shuffle(pool)
    crowd = Counter(place for place in taken if place is not None)
    pool.sort(key=lambda item: -crowd[item[1]] if item[1] is not None else 0)
    return [peer for peer, _ in pool[:num]]
