"""The relays' shell over a host that is not there: what it makes of a host that ends and of connections that return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from fusion_node.types import PeerId
from p2p import relay_core
from p2p.addresses import PeerAddress
from p2p.control import ControlPlaneDown
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION, NodeRecord
from p2p.relays import Relays

OWN, RELAY = (Identity.from_seed(seed * 32).peer_id for seed in (b"o", b"r"))
ADDRESS = PeerAddress.of("45.1.0.1", 4600, RELAY)
PATIENCE_S = 10.0


class FakeNode:
    def __init__(self, host: FakeHost) -> None:
        self._host = host

    async def round_trips(self) -> dict[PeerId, float]:
        return {}

    async def reserve(self, address: PeerAddress) -> float:
        self._host.num_asked += 1
        return 120.0


class FakeHost:
    """What Relays needs of discovery."""

    def __init__(self) -> None:
        self.on_relay_lost: list[Callable[[PeerId], None]] = []
        self.on_down: list[Callable[[], None]] = []
        self.on_connection: list[Callable[[PeerId, bool], None]] = []
        self.is_up = True
        self.num_asked = 0

    async def call(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        if not self.is_up:
            raise ControlPlaneDown("it is being started again")
        return await command(FakeNode(self))

    def protect(self, peer: PeerId, *, protected: bool = True) -> None: ...

    def die(self) -> None:
        self.is_up = False
        for listener in self.on_down:
            listener()

    def connect(self) -> None:
        for listener in self.on_connection:
            listener(RELAY, True)


def record() -> NodeRecord:
    return NodeRecord(PROTOCOL_VERSION, RELAY, 1, 0.0, 60.0, (), (str(ADDRESS),), "", 0, (), 0, "", is_relay=True)


@pytest.fixture
async def host() -> FakeHost:
    return FakeHost()


@pytest.fixture
async def changed() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def relays(host: FakeHost, changed: asyncio.Event) -> AsyncIterator[Relays]:
    relays = Relays(OWN, host, records=lambda: [record()], on_change=changed.set)
    relays.want(True)
    await until(changed)
    assert relays.held == [RELAY]
    yield relays
    await relays.aclose()


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await event.wait()
    event.clear()


async def test_what_our_own_host_does_not_carry_out_is_no_failure_of_the_relay(
    host: FakeHost, changed: asyncio.Event, relays: Relays
) -> None:
    host.die()
    await until(changed)
    assert relays.circuit_addresses() == []
    host.is_up = True
    host.connect()
    await until(changed)
    assert relays.held == [RELAY]
    assert host.num_asked == 2


async def test_a_relay_is_asked_at_once_when_there_is_a_connection_with_it_again(
    host: FakeHost, changed: asyncio.Event, relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_core, "RETRY_FIRST_S", 3600.0)
    for listener in host.on_relay_lost:
        listener(RELAY)
    await until(changed)
    assert relays.held == []
    host.connect()
    await until(changed)
    assert relays.held == [RELAY]
    assert host.num_asked == 2
