"""How soon a node notices that another one is gone, whatever way it went."""

from __future__ import annotations

import signal
import time

import pytest

from tests.live.swarm_process import wait_until
from tests.nat.internet import Internet
from tests.nat.light_nodes import LightNode, Nursery, connect

pytestmark = pytest.mark.live

NOTICED_S = 12.0
"""A heartbeat's six seconds, and room for a machine that is busy. TCP alone would take a quarter of an hour."""


@pytest.fixture
def pair(internet: Internet, nodes: Nursery) -> tuple[LightNode, LightNode]:
    """Two hosts that see one another, with a link."""
    far = nodes.start("far", host=internet.host("far"))
    near = nodes.start("near", host=internet.host("near"), peers=[far])
    connect(near, far)
    return near, far


def noticed_after_s(node: LightNode) -> float:
    """Seconds from now until the node's link has been lost."""
    began = time.monotonic()
    wait_until(lambda: bool(node.status["lost"]), within_s=NOTICED_S, what=f"{node.name} has noticed")
    return time.monotonic() - began


def test_a_black_hole_is_noticed_within_seconds(pair: tuple[LightNode, LightNode]) -> None:
    near, far = pair
    assert far.host is not None
    with far.host.black_hole():
        print(f"\nblack hole noticed after {noticed_after_s(near):.1f} s")


def test_a_frozen_process_is_noticed_within_seconds(pair: tuple[LightNode, LightNode]) -> None:
    near, far = pair
    far.signal(signal.SIGSTOP)
    print(f"\nfrozen process noticed after {noticed_after_s(near):.1f} s")


def test_a_killed_process_is_noticed_at_once(pair: tuple[LightNode, LightNode]) -> None:
    near, far = pair
    far.kill()
    taken_s = noticed_after_s(near)
    print(f"\nkilled process noticed after {taken_s:.2f} s")
    assert taken_s < 3.0, "its kernel says so"
