"""A swarm of twelve processes: real sockets, real libp2p, real discovery; nobody is told more than one address.

What is measured is printed; run with ``-s`` to see it. The bounds are for a busy machine with two cores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from tests.live.swarm_process import wait_until
from tests.nat.light_nodes import LightNode, Nursery

pytestmark = pytest.mark.live

NUM_NODES = 12
ALL_KNOWN_S = 60.0
LATE_JOINER_S = 5.0
NUM_KILLED = 4
TTL_S = 30.0
ANNOUNCE_INTERVAL_S = 10.0
"""Half of what nodes use, so that the test need not wait for a minute; what has to hold follows from these two."""

IDLE_S = 8.0
MAX_IDLE_CPU = 0.15
"""Of one core, per node that announces twice as often as nodes do; it takes a fifth of that."""

NUM_LOOKS = 3
"""At idle nodes. On a busy machine what a start has left to do goes on when all are known; who spins never rests."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("twelve")) as nursery:
        yield nursery


def _start(nodes: Nursery, name: str, peers: Sequence[LightNode]) -> LightNode:
    return nodes.start(name, peers=peers, listen="127.0.0.1:0", ttl_s=TTL_S, announce_interval_s=ANNOUNCE_INTERVAL_S)


def _wait_until_complete(nodes: Sequence[LightNode], expected: Sequence[LightNode], within_s: float) -> float:
    """Until each of the first knows exactly the second; the seconds that it took."""
    peers = {node.peer for node in expected}
    began = time.monotonic()
    for node in nodes:
        try:
            wait_until(
                lambda node=node: node.known_peers == peers,  # type: ignore[misc]
                within_s=max(within_s - (time.monotonic() - began), 0.0),
                what=f"{node.name} knows {len(peers)} nodes",
            )
        except AssertionError as error:
            known = node.known_peers
            names = {other.peer: other.name for other in nodes}
            missing = sorted(names.get(peer, peer) for peer in peers - known)
            extra = sorted(names.get(peer, peer) for peer in known - peers)
            raise AssertionError(f"{error}; missing {missing}, too many {extra}") from None
    return time.monotonic() - began


def _idle_cpu(nodes: Sequence[LightNode]) -> list[float]:
    """The part of a core that each has used while nothing happened. Waiting for the others' turns is none of it."""
    before_s, began = [node.cpu_s for node in nodes], time.monotonic()
    time.sleep(IDLE_S)  # this is what is measured
    taken_s = time.monotonic() - began
    return [(node.cpu_s - before) / taken_s for node, before in zip(nodes, before_s, strict=True)]


def test_a_swarm_of_twelve_processes_finds_itself_and_forgets_its_dead(nodes: Nursery) -> None:
    began = time.monotonic()
    swarm = [_start(nodes, "node0", [])]
    for index in range(1, NUM_NODES - 1):
        # A chain: each has heard of the one before it only.
        swarm.append(_start(nodes, f"node{index}", swarm[-1:]))
    started_s = time.monotonic() - began
    _wait_until_complete(swarm, swarm, ALL_KNOWN_S)
    print(
        f"\neleven nodes: started in {started_s:.1f} s, each knew all {time.monotonic() - began:.1f} s after the first"
    )

    late = _start(nodes, "late", swarm[5:6])
    took_s = _wait_until_complete([late], [*swarm, late], LATE_JOINER_S)
    swarm.append(late)
    print(f"a late joiner knew all of them after {took_s:.2f} s")
    print(f"and was known to all of them {_wait_until_complete(swarm, swarm, ALL_KNOWN_S):.2f} s after that")

    used = [1.0] * len(swarm)
    for _ in range(NUM_LOOKS):
        used = _idle_cpu(swarm)
        print(f"idle: {100 * sum(used) / len(used):.1f} % of a core per node, {100 * max(used):.1f} % at most")
        if max(used) < MAX_IDLE_CPU:
            break
    assert max(used) < MAX_IDLE_CPU

    dead, alive = swarm[2 : 2 + NUM_KILLED], swarm[:2] + swarm[2 + NUM_KILLED :]
    for node in dead:
        node.kill()
    took_s = _wait_until_complete(alive, alive, TTL_S + ANNOUNCE_INTERVAL_S)
    print(
        f"{NUM_KILLED} killed at once were forgotten by all after {took_s:.1f} s, with records that live {TTL_S:.0f} s"
    )
    found = set(alive[-1].ask("find"))
    assert found == {node.peer for node in alive}, "a look-up brings none of the dead back"
