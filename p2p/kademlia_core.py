"""Kademlia that a crowd of liars cannot bend at will: who enters a routing table, and look-ups over disjoint paths.

Guarantees: of one network (p2p.prefixes.diversity_key) a bucket and a table hold no more than a share. A look-up
follows ``num_paths`` paths that share no peer, each fed only by the answers of its own peers, so whoever answers with
lies bends one path and no other. Every path has its part in the result: invented neighbours of the key on one do not
push out what the others found. A network of which MAX_OF_NETWORK peers have answered comes last from then on.

Assumes: whoever speaks for a peer has proven its identity, and what is looked up proves itself (signed values), so that
one honest path is enough. Distances are XOR between SHA-256 digests, as in libp2p's Kademlia specification.

States of a path: it has candidates to ask, waits for answers, or is done when the ``width`` best candidates that no
other path has asked have answered. A look-up is done when all its paths are, or after ``max_queries``. No timers: the
shell bounds each query, and reports one that took too long with ``failed``.

Source: Maymounkov & Mazières, "Kademlia" (2002), §2.3; Baumgart & Mies, "S/Kademlia" (2007), §4.3 (disjoint paths);
go-libp2p-kbucket's peerdiversity for the shares. Still ugly: identities are cheap, so one liar on a path can surround
the key with invented neighbours, and the path is lost; only more paths and more IP networks help, and both cost.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import base58

K = TypeVar("K")
T = TypeVar("T")

NUM_PATHS = 10
"""d of S/Kademlia, with paths that are narrow instead of few. Of 500 peers of which 30 % invent neighbours of the key,
and which know 150 others each, one path (20 closest, 3 at a time) finds no value that was put the same way; 3 paths of
width 8 find 9 %, 6 of 4 find 69 %, 8 of 3 76 %, and 10 of 2 98 %. Among honest peers they ask 20, 25, 27, 29 and 29."""

REPLICATION = 20
"""k of libp2p's specification: on how many peers a value is stored, and how many contacts an answer may hold."""

PATH_WIDTH = 2
"""Closest peers that each path asks before it ends; all paths together ask REPLICATION."""

MAX_QUERIES = 60
"""Of one look-up. An honest one takes about 30; liars can invent closer peers without end."""

MAX_PER_BUCKET = 4
"""Peers of one network in one bucket of 20."""

MAX_PER_TABLE = 16
"""Peers of one network in the whole table. Small enough that ten such networks do not fill it, and large enough for a
young swarm whose nodes all rent from one company: its records travel between connected peers anyway."""

MAX_OF_NETWORK = 4
"""Peers of one network that a look-up asks, and stores with, before it prefers others: a fifth of REPLICATION."""


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer that somebody has named.

    Attributes:
        peer: peer id.
        place: ``place_of(peer)``.
        networks: of its addresses, by ``diversity_key``; those that have none are left out.
    """

    peer: str
    place: int
    networks: tuple[str, ...] = ()


def place_of(peer: str) -> int:
    """Where a peer stands: SHA-256 of the peer id's bytes, as a number."""
    return place_of_key(base58.b58decode(peer))


def place_of_key(key: bytes) -> int:
    """Where a key stands."""
    return int.from_bytes(hashlib.sha256(key).digest(), "big")


def may_enter(
    networks: Iterable[str], in_bucket: Sequence[Collection[str]], in_table: Sequence[Collection[str]]
) -> bool:
    """Whether a routing table may take one more peer.

    Args:
        networks: of the newcomer. One that has none (a LAN, this machine) is never refused.
        in_bucket, in_table: the networks of each peer in its bucket, and in the whole table.
    """
    return all(
        sum(network in others for others in in_bucket) < MAX_PER_BUCKET
        and sum(network in others for others in in_table) < MAX_PER_TABLE
        for network in networks
    )


def diverse_first(contacts: Iterable[Contact], *, per_network: int) -> list[Contact]:
    """The contacts in their order, but those last whose network has its share already."""
    taken: Counter[str] = Counter()
    within: list[Contact] = []
    above: list[Contact] = []
    for contact in contacts:
        is_within = all(taken[network] < per_network for network in contact.networks)
        (within if is_within else above).append(contact)
        taken.update(contact.networks)
    return within + above


def take_turns(lists: Sequence[Sequence[T]]) -> Iterator[T]:
    """The first of each list, then the second of each: who has much to say does not speak before the others."""
    for turn in range(max(map(len, lists), default=0)):
        for items in lists:
            if turn < len(items):
                yield items[turn]


def to_displace(networks_of: Mapping[K, Collection[str]], newcomer: Collection[str]) -> K | None:
    """Who makes way for a newcomer in a full list: the first of the network that has most; None if the newcomer does.

    Args:
        networks_of: of everybody in the list, the one that has been there longest first.
    """
    sizes = Counter(network for networks in networks_of.values() for network in networks)
    largest, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    theirs = max((sizes[network] + 1 for network in newcomer), default=1)
    if size < theirs or size <= 1:
        return None
    return next(member for member, networks in networks_of.items() if largest in networks)


@dataclass(slots=True)
class _Path:
    known: dict[str, Contact] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    answered: dict[str, Contact] = field(default_factory=dict)


class Lookup:
    """One iterative look-up of a place.

    Args:
        target: ``place_of_key`` of what is looked up.
        own: the own peer id, which is never asked.
        seeds: contacts to begin with, usually the closest of the own routing table. They are dealt out to the paths.
        parallel: queries of one path at a time. More get past silent peers sooner, and past liars more seldom.
    """

    def __init__(
        self,
        target: int,
        own: str,
        seeds: Iterable[Contact],
        *,
        num_paths: int = NUM_PATHS,
        width: int = PATH_WIDTH,
        parallel: int = 1,
        max_queries: int = MAX_QUERIES,
        per_network: int = MAX_OF_NETWORK,
    ) -> None:
        self._target = target
        self._own = own
        self._width = width
        self._parallel = parallel
        self._queries_left = max_queries
        self._per_network = per_network
        self._paths = [_Path() for _ in range(num_paths)]
        self._path_of: dict[str, _Path] = {}
        """Of every peer that was asked: no other path asks it."""
        self._failed: set[str] = set()
        self._num_answered: Counter[str] = Counter()
        """By network. Those that failed do not count: who invents peers could else put off a network not its own."""
        for index, contact in enumerate(sorted(seeds, key=self._distance)):
            self._learn(self._paths[index % num_paths], [contact])

    @property
    def is_done(self) -> bool:
        """Whether nothing is waited for, after ``to_ask`` had nothing more."""
        return not any(path.waiting for path in self._paths)

    @property
    def num_queries(self) -> int:
        """Peers that were asked."""
        return len(self._path_of)

    def to_ask(self) -> list[Contact]:
        """The peers to ask now. Each is to be followed by ``answered`` or ``failed``; call this again after that."""
        asking = []
        for path in self._paths:
            for contact in self._wanted(path)[: max(0, self._parallel - len(path.waiting))]:
                if self._queries_left > 0 and contact.peer not in self._path_of:
                    self._queries_left -= 1
                    self._path_of[contact.peer] = path
                    path.waiting.add(contact.peer)
                    asking.append(contact)
        return asking

    def answered(self, peer: str, closer: Sequence[Contact], networks: Sequence[str] | None = None) -> None:
        """A peer has answered with these contacts.

        Args:
            networks: of the address at which it answered; None when only those that it was named with are known.
        """
        path = self._path_of[peer]
        path.waiting.discard(peer)
        contact = path.known[peer]
        if networks is not None:
            contact = path.known[peer] = replace(contact, networks=tuple(networks))
        path.answered[peer] = contact
        self._num_answered.update(contact.networks)
        self._learn(path, sorted(closer, key=self._distance)[:REPLICATION])

    def failed(self, peer: str) -> None:
        """A peer was not reached, or has not answered in time, or with something malformed."""
        self._path_of[peer].waiting.discard(peer)
        self._failed.add(peer)

    def closest(self, at_most: int = REPLICATION) -> list[Contact]:
        """Of those that have answered, the closest of each path in turn, networks with their share taken last."""
        ranked = [
            (rank, self._distance(contact), contact)
            for path in self._paths
            for rank, contact in enumerate(sorted(path.answered.values(), key=self._distance))
        ]
        in_turn = (contact for _, _, contact in sorted(ranked, key=lambda item: item[:2]))
        return sorted(diverse_first(in_turn, per_network=self._per_network)[:at_most], key=self._distance)

    def _wanted(self, path: _Path) -> list[Contact]:
        """Candidates of the path that are to be asked, the best first."""
        usable = [
            contact
            for contact in path.known.values()
            if contact.peer not in self._failed and self._path_of.get(contact.peer, path) is path
        ]
        best = sorted(usable, key=lambda contact: (self._is_above_share(contact), self._distance(contact)))
        return [contact for contact in best[: self._width] if contact.peer not in self._path_of]

    def _is_above_share(self, contact: Contact) -> bool:
        return any(self._num_answered[network] >= self._per_network for network in contact.networks)

    def _learn(self, path: _Path, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            if contact.peer != self._own:
                path.known.setdefault(contact.peer, contact)

    def _distance(self, contact: Contact) -> int:
        return contact.place ^ self._target
