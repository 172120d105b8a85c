"""Which path two nodes find to one another through their routers, and that what is said on it arrives once, in order.

What is measured is printed; run with ``-s`` to see it.
"""

from __future__ import annotations

import pytest

from tests.live.swarm_process import wait_until
from tests.nat.internet import Internet, OnUnsolicited, Ports
from tests.nat.light_nodes import KNOWN_S, LightNode, Nursery, connect, round_trip_ms, start_pair, wait_for_path

pytestmark = pytest.mark.live

STAYS_S = 12.0
"""Longer than all attempts to punch a hole take."""


def test_two_homes_with_random_ports_stay_on_the_relay_and_are_served(
    internet: Internet, nodes: Nursery, relay: LightNode
) -> None:
    routers = [internet.router(name, ports=Ports.RANDOM) for name in ("r1", "r2")]
    node, user = start_pair(nodes, *routers, [relay])
    said = user.ask("converse", peer=node.peer, seconds=STAYS_S)
    assert user.path_to(node) == "relayed"
    assert said["answered"] == said["sent"]
    assert said["in_order"]
    print(f"relayed round trip {round_trip_ms(user, node):.1f} ms, longest gap {said['longest_gap_s']:.2f} s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours", "on_unsolicited", "path"),
    [
        (Ports.PRESERVED, Ports.PRESERVED, OnUnsolicited.RESET, "relayed"),
        (Ports.RANDOM, Ports.PRESERVED, OnUnsolicited.DROP, "relayed"),
        (Ports.PRESERVED, Ports.RANDOM, OnUnsolicited.DROP, "relayed"),
    ],
)
def test_other_pairs_of_routers(
    internet: Internet,
    nodes: Nursery,
    relay: LightNode,
    theirs: Ports,
    ours: Ports,
    on_unsolicited: OnUnsolicited,
    path: str,
) -> None:
    routers = [
        internet.router(name, ports=ports, on_unsolicited=on_unsolicited)
        for name, ports in (("r1", theirs), ("r2", ours))
    ]
    node, user = start_pair(nodes, *routers, [relay])
    if path == "relayed":
        assert user.ask("converse", peer=node.peer, seconds=STAYS_S)["in_order"]
    print(f"{path} after {wait_for_path(user, node, path):.1f} s")


def test_a_public_user_is_connected_back_by_a_node_behind_any_nat(
    internet: Internet, nodes: Nursery, relay: LightNode
) -> None:
    """Whoever can be dialled itself needs no hole: the node behind the NAT dials it."""
    node = nodes.start("node", host=internet.router("r", ports=Ports.RANDOM).host("node"), peers=[relay])
    user = nodes.start("user", host=internet.host("user"), peers=[relay])
    connect(user, node)
    print(f"path {user.path_to(node)}, {wait_for_path(user, node, 'stream'):.1f} s until it is direct")


def test_a_router_with_upnp_makes_a_node_public(internet: Internet, nodes: Nursery) -> None:
    entrance = nodes.start("entrance", host=internet.host("entrance"))
    home = internet.router("r1")
    with home.upnp():
        node = nodes.start("node", host=home.host("node"), peers=[entrance])
        # One plane's port is found to be open before the other's, and who dials in between takes what there is.
        announced = f"{home.address}:4701"
        wait_until(
            lambda: announced in (entrance.ask("record", peer=node.peer) or {"data": []})["data"],
            within_s=KNOWN_S,
            what="the mapped port of the data plane is announced",
        )
        user = nodes.start("user", host=internet.router("r2").host("user"), peers=[entrance], serve=False)
        connect(user, node)
        assert user.ask("record", peer=node.peer)["data"] == [announced]
        assert user.path_to(node) == "direct"


def test_only_addresses_that_others_can_dial_are_announced(internet: Internet, nodes: Nursery) -> None:
    host = internet.host("node")
    host.add_bridge("docker0", "172.17.0.1/16")
    host.add_bridge("br-0123456789ab", "172.18.0.1/16")
    entrance = nodes.start("entrance", host=internet.host("entrance"))
    node = nodes.start("node", host=host, peers=[entrance])
    seen: set[str] = set()

    def is_public() -> bool:
        record = entrance.ask("record", peer=node.peer)
        seen.update([*record["data"], *record["libp2p"]] if record else [])
        return bool(record and record["data"] and record["libp2p"])

    wait_until(is_public, within_s=KNOWN_S, what="the node's addresses are confirmed")
    assert seen == {f"{host.address}:4701", f"/ip4/{host.address}/tcp/4700/p2p/{node.peer}"}
