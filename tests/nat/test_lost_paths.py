"""How soon a node gives another one up that is gone, whatever way it went."""

from __future__ import annotations

import signal
import time

import pytest

from tests.live.swarm_process import wait_until
from tests.nat.internet import Internet
from tests.nat.light_nodes import LightNode, Nursery, connect

pytestmark = pytest.mark.live

GIVEN_UP_S = 16.0
"""A heartbeat's six seconds, the four that a connection waits for another link, and room for a machine that is busy."""


@pytest.fixture
def pair(internet: Internet, nodes: Nursery) -> tuple[LightNode, LightNode]:
    """Two hosts that see one another, with a link."""
    far = nodes.start("far", host=internet.host("far"))
    near = nodes.start("near", host=internet.host("near"), peers=[far])
    connect(near, far)
    return near, far


def given_up_after_s(node: LightNode) -> float:
    """Seconds from now until the node's connection has been given up."""
    began = time.monotonic()
    wait_until(lambda: bool(node.status["lost"]), within_s=GIVEN_UP_S, what=f"{node.name} has given up")
    return time.monotonic() - began


def test_a_frozen_process_is_given_up_within_seconds(pair: tuple[LightNode, LightNode]) -> None:
    near, far = pair
    far.signal(signal.SIGSTOP)
    print(f"\nfrozen process given up after {given_up_after_s(near):.1f} s")


def test_a_killed_process_is_given_up_at_once(pair: tuple[LightNode, LightNode]) -> None:
    near, far = pair
    far.kill()
    print(f"\nkilled process given up after {given_up_after_s(near):.2f} s")
    ((_, _, why),) = near.status["lost"]
    assert why.startswith("PeerClosed: "), "its kernel says so, before anybody misses an answer to a heartbeat"
