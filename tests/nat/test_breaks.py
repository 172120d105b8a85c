"""What happens to a conversation when the path below it breaks, or becomes better: nothing, but for a pause."""

from __future__ import annotations

import time

import pytest

from tests.live.swarm_process import wait_until
from tests.nat.internet import Internet, Ports
from tests.nat.light_nodes import LightNode, NodeError, Nursery, connect, round_trip_ms, start_pair, wait_for_path

pytestmark = pytest.mark.live

RESUMED_S = 30.0
NOTICED_S = 9.0
"""A heartbeat's six seconds, and room for a machine that is busy. TCP alone would take a quarter of an hour."""


def num_resumed(user: LightNode, node: LightNode) -> int:
    """How often their connection has gone on over another link."""
    link = user.link(node)
    assert link is not None, user.status["lost"]
    return int(link["num_resumed"])


def wait_until_resumed(user: LightNode, node: LightNode, *, before: int) -> None:
    """Until the connection goes on over another link than ``before``, or is lost."""

    def is_over() -> bool:
        link = user.link(node)
        return bool(user.status["lost"]) or (link is not None and link["num_resumed"] > before)

    wait_until(is_over, within_s=RESUMED_S, what="the connection has resumed, or is lost")


def test_two_homes_with_port_preserving_nats_end_with_a_direct_path(
    internet: Internet, nodes: Nursery, relay: LightNode
) -> None:
    node, user = start_pair(nodes, internet.router("r1"), internet.router("r2"), [relay])
    user.ask("keep_conversing", peer=node.peer)
    direct_s = wait_for_path(user, node, "stream")
    said = user.ask("end_conversation")
    print(f"direct {direct_s:.1f} s later, round trip {round_trip_ms(user, node):.1f} ms")
    assert not said["lost"]
    assert said["answered"] == said["sent"]
    assert said["in_order"]


def test_a_relay_that_dies_is_replaced_and_the_conversation_goes_on(internet: Internet, nodes: Nursery) -> None:
    relays = [nodes.start("relay0", host=internet.host("relay0"), relay=True)]
    relays.append(nodes.start("relay1", host=internet.host("relay1"), relay=True, peers=relays[:1]))
    routers = [internet.router(name, ports=Ports.RANDOM) for name in ("r1", "r2")]
    node, user = start_pair(nodes, *routers, relays)
    link = user.link(node)
    assert link is not None
    assert link["path"] == "relayed"
    used = next(relay for relay in relays if relay.host and relay.host.address in link["remote_address"])
    before = num_resumed(user, node)
    user.ask("keep_conversing", peer=node.peer)
    used.kill()
    wait_until_resumed(user, node, before=before)
    said = user.ask("end_conversation")
    print(f"longest gap when the relay was killed: {said['longest_gap_s']:.1f} s")
    assert said["answered"] == said["sent"]
    assert said["in_order"]
    assert not user.status["lost"]


def test_the_address_of_one_end_may_change_in_the_middle(internet: Internet, nodes: Nursery, relay: LightNode) -> None:
    """As when a line is connected anew: inside the home nothing changes, and nobody is told."""
    ours = internet.router("r1")
    node, user = start_pair(nodes, internet.router("r2"), ours, [relay])
    wait_for_path(user, node, "stream")
    before = num_resumed(user, node)
    user.ask("keep_conversing", peer=node.peer)
    ours.move()
    wait_until_resumed(user, node, before=before)
    said = user.ask("end_conversation")
    print(f"longest gap when one address changed: {said['longest_gap_s']:.1f} s, path {user.path_to(node)}")
    assert not said["lost"]
    assert said["answered"] == said["sent"]
    assert said["in_order"]


def test_after_both_addresses_have_changed_the_next_answer_comes(
    internet: Internet, nodes: Nursery, relay: LightNode
) -> None:
    """The relay's reservation is lost, too, so this may take longer than a connection waits for a new link."""
    ours, theirs = internet.router("r1"), internet.router("r2")
    node, user = start_pair(nodes, theirs, ours, [relay])
    wait_for_path(user, node, "stream")
    before = num_resumed(user, node)
    user.ask("keep_conversing", peer=node.peer)
    began = time.monotonic()
    ours.move()
    theirs.move()
    wait_until_resumed(user, node, before=before)
    said = user.ask("end_conversation")
    print(f"both addresses changed: {said['lost'] or 'resumed'}, longest gap {said['longest_gap_s']:.1f} s")
    assert said["lost"] or said["answered"] == said["sent"]

    def answers() -> bool:
        try:
            user.ask("record", peer=node.peer)
            user.ask("connect", peer=node.peer)
        except NodeError:
            return False
        return bool(user.ask("converse", peer=node.peer, seconds=0.2)["answered"])

    wait_until(answers, within_s=2 * RESUMED_S, what="the next answer comes")
    print(f"the next answer came {time.monotonic() - began:.1f} s after the change")


def test_a_black_hole_is_noticed_within_seconds_and_costs_nothing_but_time(internet: Internet, nodes: Nursery) -> None:
    node = nodes.start("node", host=internet.host("node"))
    user = nodes.start("user", host=internet.host("user"), peers=[node])
    connect(user, node)
    assert node.host is not None
    user.ask("keep_conversing", peer=node.peer)
    with node.host.black_hole():
        began = time.monotonic()
        wait_until(lambda: user.path_to(node) is None, within_s=NOTICED_S, what="the black hole is noticed")
        noticed_s = time.monotonic() - began
        assert not user.status["lost"], "the connection waits for another link"
    said = user.ask("end_conversation")
    print(f"black hole noticed after {noticed_s:.1f} s; longest gap {said['longest_gap_s']:.1f} s")
    assert not said["lost"]
    assert said["answered"] == said["sent"]
    assert said["in_order"]
