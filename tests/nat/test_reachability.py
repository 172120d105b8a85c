"""What a node finds out about its own place behind routers, and what it announces.

What is measured is printed; run with ``-s`` to see it.
"""

from __future__ import annotations

import time

import pytest

from tests.live.swarm_process import wait_until
from tests.nat.internet import Internet, Ports
from tests.nat.light_nodes import LightNode, Nursery

pytestmark = pytest.mark.live

PATIENCE_S = 60.0


def start_public(internet: Internet, nodes: Nursery, count: int) -> list[LightNode]:
    first = nodes.start("public-0", host=internet.host("public-0"))
    return [
        first,
        *(nodes.start(f"public-{n}", host=internet.host(f"public-{n}"), peers=[first]) for n in range(1, count)),
    ]


def hosts(node: LightNode) -> set[str]:
    """The hosts of the data plane that it announces."""
    return {address.rpartition(":")[0] for address in node.status["data_addresses"]}


@pytest.mark.parametrize(
    ("ports", "nat"), [(Ports.PRESERVED, "endpoint-independent"), (Ports.RANDOM, "endpoint-dependent")]
)
def test_node_behind_a_router_knows_it_and_what_kind_it_is(
    internet: Internet, nodes: Nursery, ports: Ports, nat: str
) -> None:
    public = start_public(internet, nodes, 2)
    node = nodes.start("home", host=internet.router("router", ports=ports).host("home"), peers=public, upnp=False)
    began = time.monotonic()
    wait_until(lambda: node.status["overall"] == "behind-nat", within_s=PATIENCE_S, what="it knows of its router")
    print(f"behind a router after {time.monotonic() - began:.1f} s")
    wait_until(lambda: node.status["nat"] == nat, within_s=PATIENCE_S, what=f"the router is {nat}")
    assert hosts(node) == set()


def test_port_that_is_forwarded_by_hand_makes_a_node_public(internet: Internet, nodes: Nursery) -> None:
    public = start_public(internet, nodes, 2)
    router = internet.router("router")
    home = router.host("home")
    router.forward(4700, home)
    router.forward(4701, home)
    node = nodes.start("home", host=home, peers=public, upnp=False)
    wait_until(lambda: hosts(node) == {router.address}, within_s=PATIENCE_S, what="it announces its router's address")
    wait_until(lambda: node.status["overall"] == "public", within_s=PATIENCE_S, what="the control plane is, too")


def test_neighbours_announce_the_address_that_only_they_can_dial(internet: Internet, nodes: Nursery) -> None:
    (public,) = start_public(internet, nodes, 1)
    router = internet.router("router")
    node = nodes.start("node", host=router.host("node"), peers=[public], upnp=False)
    neighbour = nodes.start("neighbour", host=router.host("neighbour"), peers=[public, node], upnp=False)
    assert node.host is not None
    own = node.host.address
    wait_until(lambda: hosts(node) == {own}, within_s=PATIENCE_S, what="its neighbour has dialled it")
    wait_until(
        lambda: node.status["overall"] == "behind-nat", within_s=PATIENCE_S, what="it needs a relay all the same"
    )
    wait_until(lambda: hosts(neighbour) != set(), within_s=PATIENCE_S, what="and the other way round")


def test_move_to_another_address_is_announced_within_seconds(internet: Internet, nodes: Nursery) -> None:
    public = start_public(internet, nodes, 3)
    node = nodes.start("node", host=internet.host("node"), peers=public)
    assert node.host is not None
    before = node.host.address
    wait_until(lambda: hosts(node) == {before}, within_s=PATIENCE_S, what="it announces its first address")
    node.host.move()
    began = time.monotonic()
    wait_until(lambda: before not in hosts(node), within_s=PATIENCE_S, what="the first one is withdrawn")
    print(f"withdrawn after {time.monotonic() - began:.1f} s")
    after = node.host.address
    wait_until(lambda: hosts(node) == {after}, within_s=PATIENCE_S, what="the second one is announced")
    print(f"announced after {time.monotonic() - began:.1f} s")
    told = public[0].ask("record", peer=node.peer)
    assert told is not None
    wait_until(
        lambda: public[0].ask("record", peer=node.peer)["data"] == [f"{after}:4701"],
        within_s=PATIENCE_S,
        what="others know it",
    )
