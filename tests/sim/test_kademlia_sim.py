"""Five hundred hosts with the cores of p2p.kademlia_core, many of them liars: how often a stored value is found.

A value is stored at the closest peers that a look-up of its owner finds, and counts as found when any honest peer that
holds it is asked. Liars store nothing. They invent neighbours of the key without end, which answer likewise, or name
only one another. Seeds are fixed, so the numbers are the same each time; the bounds leave room for other changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest

from p2p.kademlia_core import MAX_PER_TABLE, NUM_PATHS, PATH_WIDTH, REPLICATION, Contact, Lookup, may_enter

NUM_HOSTS = 500
NUM_KNOWN = 150
"""Of them that each host has heard of: enough for a second hop to be needed."""

ONE_PATH = {"num_paths": 1, "width": REPLICATION, "parallel": 3}
"""Plain Kademlia, with the usual concurrency."""

DISJOINT = {"num_paths": NUM_PATHS, "width": PATH_WIDTH}

Lie = Callable[["Swarm", int], list[Contact]]


def buckets_of(own: Contact, others: list[Contact], *, is_diverse: bool = True) -> list[Contact]:
    """The routing table of a host that meets the others in this order."""
    buckets: dict[int, list[Contact]] = {}
    table: list[Contact] = []
    for other in others:
        bucket = buckets.setdefault((own.place ^ other.place).bit_length(), [])
        has_room = len(bucket) < REPLICATION and other.peer != own.peer
        if has_room and (
            not is_diverse or may_enter(other.networks, [c.networks for c in bucket], [c.networks for c in table])
        ):
            bucket.append(other)
            table.append(other)
    return table


@dataclass
class Swarm:
    """Hosts with their tables, of which some lie."""

    chance: random.Random
    liars: set[str] = field(default_factory=set)
    hosts: dict[str, Contact] = field(default_factory=dict)
    tables: dict[str, list[Contact]] = field(default_factory=dict)
    stored: dict[int, set[str]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, seed: int, *, share_of_liars: float) -> Swarm:
        swarm = cls(random.Random(seed))
        for _ in range(NUM_HOSTS):
            swarm.add(swarm.chance.getrandbits(256), swarm.network(), is_liar=swarm.chance.random() < share_of_liars)
        swarm.meet()
        return swarm

    def network(self) -> str:
        return f"{self.chance.randrange(1, 224)}.{self.chance.randrange(256)}.0.0/16"

    def add(self, place: int, network: str, *, is_liar: bool) -> Contact:
        host = Contact(f"host {next(self.numbers)}", place, (network,))
        self.hosts[host.peer] = host
        if is_liar:
            self.liars.add(host.peer)
        return host

    def meet(self, *, is_diverse: bool = True) -> None:
        """Every honest host meets some of the others."""
        everybody = list(self.hosts.values())
        for host in everybody:
            if host.peer not in self.liars:
                known = self.chance.sample(everybody, NUM_KNOWN)
                self.tables[host.peer] = buckets_of(host, known, is_diverse=is_diverse)

    def closest_known(self, peer: str, target: int) -> list[Contact]:
        return sorted(self.tables[peer], key=lambda contact: contact.place ^ target)[:REPLICATION]

    def look_up(self, peer: str, target: int, lie: Lie, options: dict[str, int]) -> tuple[Lookup, list[str]]:
        """Runs a look-up to its end; also the peers that were asked."""
        lookup = Lookup(target, peer, self.closest_known(peer, target), **options)
        asked: list[str] = []
        while asking := lookup.to_ask():
            self.chance.shuffle(asking)
            for contact in asking:
                asked.append(contact.peer)
                if contact.peer in self.tables:
                    lookup.answered(contact.peer, self.closest_known(contact.peer, target))
                else:
                    lookup.answered(contact.peer, lie(self, target))
        return lookup, asked

    def put(self, peer: str, target: int, lie: Lie, options: dict[str, int]) -> None:
        lookup, _ = self.look_up(peer, target, lie, options)
        self.stored[target] = {contact.peer for contact in lookup.closest() if contact.peer in self.tables}

    def finds(self, peer: str, target: int, lie: Lie, options: dict[str, int]) -> bool:
        _, asked = self.look_up(peer, target, lie, options)
        return not self.stored[target].isdisjoint(asked)

    def success_rate(self, lie: Lie, options: dict[str, int], *, num_values: int = 60) -> float:
        """Of values that an honest host put and another looks up, how many are found."""
        honest = sorted(self.tables)
        num_found = 0
        for _ in range(num_values):
            target = self.chance.getrandbits(256)
            owner, reader = self.chance.sample(honest, 2)
            self.put(owner, target, lie, options)
            num_found += self.finds(reader, target, lie, options)
        return num_found / num_values


def invent(swarm: Swarm, target: int) -> list[Contact]:
    """Neighbours of the key that do not exist; the liars' machines answer for them."""
    networks = [swarm.hosts[liar].networks for liar in sorted(swarm.liars)]
    return [
        Contact(
            f"invented {next(swarm.numbers)}", target ^ swarm.chance.getrandbits(200), swarm.chance.choice(networks)
        )
        for _ in range(REPLICATION)
    ]


def name_one_another(swarm: Swarm, target: int) -> list[Contact]:
    liars = [swarm.hosts[liar] for liar in sorted(swarm.liars)]
    return sorted(liars, key=lambda contact: contact.place ^ target)[:REPLICATION]


def test_honest_swarm_finds_everything_with_few_queries() -> None:
    swarm = Swarm.of(1, share_of_liars=0.0)
    assert swarm.success_rate(invent, DISJOINT, num_values=40) == 1.0
    lookup, _ = swarm.look_up("host 0", swarm.chance.getrandbits(256), invent, DISJOINT)
    assert lookup.num_queries <= 40
    assert len(lookup.closest()) == REPLICATION


@pytest.mark.parametrize("share", [0.2, 0.3])
@pytest.mark.parametrize("seed", [1, 2])
def test_disjoint_paths_find_what_one_path_loses_to_liars(share: float, seed: int) -> None:
    swarm = Swarm.of(seed, share_of_liars=share)
    one, disjoint = swarm.success_rate(invent, ONE_PATH, num_values=20), swarm.success_rate(invent, DISJOINT)
    print(f"{share:.0%} liars, seed {seed}: one path {one:.0%}, {NUM_PATHS} paths {disjoint:.0%}")
    assert disjoint >= 0.95
    assert one <= 0.2


def test_liars_who_name_only_one_another_hide_nothing() -> None:
    assert Swarm.of(3, share_of_liars=0.3).success_rate(name_one_another, DISJOINT, num_values=40) == 1.0


def surrounded(seed: int, *, networks: int, is_diverse: bool = True) -> tuple[Swarm, int]:
    """A swarm in which sixty liars from few networks stand closer to a key than anybody else."""
    swarm = Swarm.of(seed, share_of_liars=0.0)
    target = swarm.chance.getrandbits(256)
    rented = [swarm.network() for _ in range(networks)]
    for index in range(60):
        swarm.add(target ^ swarm.chance.getrandbits(220), rented[index % networks], is_liar=True)
    swarm.meet(is_diverse=is_diverse)
    return swarm, target


@pytest.mark.parametrize("networks", [1, 2, 4])
def test_key_surrounded_from_few_networks_is_still_stored_and_found(networks: int) -> None:
    swarm, target = surrounded(5, networks=networks)
    readers = sorted(swarm.tables)[:30]
    swarm.put("host 40", target, name_one_another, DISJOINT)
    assert len(swarm.stored[target]) >= 4
    assert all(swarm.finds(reader, target, name_one_another, DISJOINT) for reader in readers)


def test_without_diversity_the_same_liars_hide_the_key() -> None:
    swarm, target = surrounded(5, networks=1, is_diverse=False)
    blind = {**DISJOINT, "per_network": NUM_HOSTS}
    swarm.put("host 40", target, name_one_another, blind)
    assert sum(swarm.finds(reader, target, name_one_another, blind) for reader in sorted(swarm.tables)[:30]) <= 10


def test_flood_from_one_network_gets_its_share_of_a_table_and_no_more() -> None:
    swarm = Swarm.of(7, share_of_liars=0.0)
    own = swarm.hosts["host 0"]
    honest = [host for host in swarm.hosts.values() if host is not own]
    flood = [
        Contact(f"sybil {index}", own.place ^ swarm.chance.getrandbits(256), ("8.8.0.0/16",)) for index in range(5000)
    ]
    # The worst order: they are all there first.
    flooded = buckets_of(own, [*flood, *honest])
    undefended = buckets_of(own, [*flood, *honest], is_diverse=False)

    def num_honest(table: list[Contact]) -> int:
        return sum(contact.peer in swarm.hosts for contact in table)

    assert len(flooded) - num_honest(flooded) <= MAX_PER_TABLE
    assert num_honest(flooded) >= 0.8 * len(buckets_of(own, honest))
    assert num_honest(undefended) < num_honest(flooded) / 2
