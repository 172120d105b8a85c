"""An internet per test, and one nursery of light nodes for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.nat.internet import Internet, why_not
from tests.nat.light_nodes import LightNode, Nursery


def _skip_for(reason: str) -> None:
    if reason and os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(f"these tests must run in CI as root: {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def _possible() -> None:
    _skip_for(why_not())


@pytest.fixture
def internet(_possible: None) -> Iterator[Internet]:
    """Nothing of it is left when the test ends, however it ends."""
    with Internet() as made:
        yield made


@pytest.fixture
def public_internet() -> Iterator[Internet]:
    """As ``internet``, for tests whose hosts have public addresses and no firewalls: it needs no ``iptables``."""
    _skip_for(why_not(("ip",)))
    with Internet() as made:
        yield made


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("nodes")) as nursery:
        yield nursery


@pytest.fixture
def nodes(_nursery: Nursery) -> Iterator[Nursery]:
    """Starts light nodes; they are gone when the test ends."""
    yield _nursery
    _nursery.end_nodes()


@pytest.fixture
def relay(internet: Internet, nodes: Nursery) -> LightNode:
    """A public node whose owner lets it relay."""
    return nodes.start("relay", host=internet.host("relay"), relay=True)
