"""Whom a user knows of: the records that have reached it.

``RealViews`` runs the membership core on every host (fusion_node.simulator.membership_world). ``ModelledViews`` says
the same by what was measured there: a newcomer is seen after some seconds, one that is gone until its last record
expires, and everybody in between is. A user of a swarm beyond the full view knows a random sample.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Protocol

from fusion_node.simulator.membership_world import ANNOUNCE_S, SHARD, TTL_S, MembershipWorld
from fusion_node.types import PeerId
from p2p.membership_core import FULL_VIEW

if TYPE_CHECKING:
    from fusion_node.simulator.links import Host
    from fusion_node.simulator.node import Node
    from fusion_node.simulator.user import User
    from fusion_node.simulator.world import World

SEEN_AFTER_S = (12.3, 21.9, 30.7, 44.6)
"""Quartiles and maximum of the time until a user knows of a newcomer, measured by ``measured_lateness``: ten users and
ten newcomers among 100 hosts. Users are not pushed to; they ask now and then."""


class Views(Protocol):
    """Whom users know of."""

    def joined(self, node: Node) -> None:
        """A node has come."""
        ...

    def left(self, node: Node, *, silently: bool) -> None:
        """A node is gone."""
        ...

    def user_joined(self, user: User) -> None:
        """A user has come."""
        ...

    def known_to(self, user: User, at_most: int, chance: random.Random) -> list[Node]:
        """Nodes whose records a user has, in an order by chance."""
        ...


class ModelledViews:
    """By measured delays. Costs nothing but a place in a list per node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(f"{world.settings.seed}/views")
        self._nodes: list[Node] = []
        self._place: dict[PeerId, int] = {}

    def joined(self, node: Node) -> None:
        self._place[node.peer] = len(self._nodes)
        self._nodes.append(node)

    def left(self, node: Node, *, silently: bool) -> None:
        # Its last record was signed up to an announcement's interval before.
        late_s = TTL_S - self._chance.uniform(0.0, ANNOUNCE_S)
        if node.is_draining:
            late_s = self._chance.uniform(0.5, 3.0)  # it has withdrawn its record
        node.seen_until = self._world.heap.now + late_s
        self._world.heap.after(late_s, self._forget, node)

    def user_joined(self, user: User) -> None:
        pass

    def known_to(self, user: User, at_most: int, chance: random.Random) -> list[Node]:
        nodes, now = self._nodes, self._world.heap.now
        # Somewhat more, for those that are not seen (yet).
        drawn = chance.sample(nodes, min(len(nodes), at_most + 16))
        return [node for node in drawn if self._sees(user, node, now)][:at_most]

    def _sees(self, user: User, node: Node, now: float) -> bool:
        if node.place.part != user.place.part:
            # What was said before the network parted is known until it expires.
            return now - self._world.parted_at < TTL_S - ANNOUNCE_S / 2
        if now - self._world.healed_at < SEEN_AFTER_S[-1] and self._world.network.unit(5, user.place, node.place) > 0.5:
            return node.joined_at < self._world.parted_at
        if node.joined_at == 0.0:
            return True
        unit = self._world.network.unit(6, user.place, node.place)
        quartile = min(3, int(4 * unit))
        least = SEEN_AFTER_S[quartile - 1] if quartile else 0.0
        after_s = least + (SEEN_AFTER_S[quartile] - least) * (4 * unit - quartile)
        return now - node.joined_at >= after_s

    def _forget(self, node: Node) -> None:
        place = self._place.pop(node.peer, None)
        if place is None:
            return
        last = self._nodes.pop()
        if last is not node:
            self._nodes[place] = last
            self._place[last.peer] = place


class RealViews:
    """By the membership core on every host, over the same network and the same clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(f"{world.settings.seed}/views")
        self._membership = MembershipWorld(world.settings.seed, heap=world.heap, network=world.network)

    def joined(self, node: Node) -> None:
        self._add(node, is_node=True)

    def left(self, node: Node, *, silently: bool) -> None:
        self._membership.kill(self._membership.hosts[node.peer], silently=silently)

    def user_joined(self, user: User) -> None:
        self._add(user, is_node=False)

    def known_to(self, user: User, at_most: int, chance: random.Random) -> list[Node]:
        seen = sorted(self._membership.view(self._membership.hosts[user.peer]))
        nodes = [node for peer in seen if (node := self._world.nodes.get(peer)) is not None]
        chance.shuffle(nodes)
        return nodes[:at_most]

    def _add(self, host: Host, *, is_node: bool) -> None:
        up = [each for each in self._membership.hosts.values() if each.is_up and each.shards]
        named = self._chance.sample(up, min(3, len(up)))
        self._membership.add(named=named, shards=(SHARD,) if is_node else (), peer=host.peer, place=host.place)


def measured_lateness(seed: int, *, num_hosts: int, num_newcomers: int) -> list[float]:
    """Seconds until users know of a newcomer, in a swarm of the real cores: the source of SEEN_AFTER_S."""
    world = MembershipWorld(seed)
    first = [world.add()]
    for _ in range(num_hosts - 1):
        world.run(0.1)
        world.add(named=first)
    users = [world.add(named=first, shards=()) for _ in range(10)]
    world.run(60.0)
    late: list[float] = []
    for _ in range(num_newcomers):
        node = world.add(named=world.chance.sample([host for host in world.up() if host.shards], 3))
        began, waiting = world.now, list(users)
        while waiting and world.now - began < 90.0:
            world.run(0.1)
            late += [world.now - began for user in waiting if world.knows(user, node)]
            waiting = [user for user in waiting if not world.knows(user, node)]
        late += [math.inf] * len(waiting)
    return sorted(late)


__all__ = ["FULL_VIEW", "SEEN_AFTER_S", "ModelledViews", "RealViews", "Views", "measured_lateness"]
