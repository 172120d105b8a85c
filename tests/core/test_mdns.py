"""mDNS: what is advertised and read, and how it goes on when the network changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2p import mdns
from p2p.addresses import PeerAddress
from p2p.identity import Identity
from p2p.mdns import MAX_ADDRESSES, LanDiscovery, PrivateWords, PublicWords
from p2p.swarm_key import SwarmKey

PEER = Identity.from_seed(bytes(32)).peer_id
KEY = SwarmKey(bytes(range(32)))
ADDRESSES = [PeerAddress.of(host, 4600, PEER) for host in ("192.0.2.7", "2001:db8:1111:2222:3333:4444:5555:6666")]


def on_the_wire(properties: dict[str, str | bytes]) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() if isinstance(value, str) else value for key, value in properties.items()}


def test_what_is_advertised_is_read_back() -> None:
    for words in (PublicWords(), PrivateWords(KEY)):
        written = on_the_wire(words.write(ADDRESSES))
        assert words.read(written) == ADDRESSES
        assert all(len(key) + 1 + len(value or b"") <= 255 for key, value in written.items())


def test_a_private_swarm_cannot_be_told_from_other_services_nor_read() -> None:
    words = PrivateWords(KEY)
    first, again = words.write(ADDRESSES), words.write(ADDRESSES)
    shown = repr((words.service_type, first)).lower()
    assert not any(word in shown for word in ("fusion", "p2p", PEER.lower(), "192.0.2.7"))
    assert first != again
    name = words.service_type.partition(".")[0].removeprefix("_")
    assert len(name) <= 15  # RFC 6335 §5.1
    assert name.isalnum()
    assert any(c.isalpha() for c in name)


def test_swarms_do_not_see_one_another() -> None:
    other = PrivateWords(SwarmKey(bytes(32)))
    assert len({words.service_type for words in (other, PrivateWords(KEY), PublicWords())}) == 3
    sealed = on_the_wire(PrivateWords(KEY).write(ADDRESSES))
    assert other.read(sealed) == []
    assert PublicWords().read(sealed) == []


def test_whatever_else_stands_there_is_left_out() -> None:
    words = PrivateWords(KEY)
    sealed = on_the_wire(words.write(ADDRESSES[:1]))
    junk: dict[bytes, bytes | None] = {b"a5": None, b"a6": b"", b"a7": b"x" * 40, b"b": b"y"}
    assert words.read(junk | sealed) == ADDRESSES[:1]
    assert PublicWords().read({b"dnsaddr": b"\xff\xfe", b"dnsaddr1": b"/ip4/nowhere", b"dnsaddr2": None}) == []
    many: dict[bytes, bytes | None] = {b"dnsaddr%d" % n: str(ADDRESSES[0]).encode() for n in range(100)}
    assert len(PublicWords().read(many)) == 2 * MAX_ADDRESSES


class FakeNetwork:
    """In the place of zeroconf: what is advertised, and how often it was impossible."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_down = False
        self.num_tries = 0
        self.advertised: list[str] = []
        self.is_browsing = False
        self.stepped = asyncio.Event()
        for name, fake in (
            ("AsyncZeroconf", self._zeroconf),
            ("AsyncServiceBrowser", lambda *arguments, handlers: _Browser(self)),
            ("AsyncServiceInfo", lambda *arguments, properties, **named: properties),
        ):
            monkeypatch.setattr(f"zeroconf.asyncio.{name}", fake)

    def _zeroconf(self) -> _Zeroconf:
        self.num_tries += 1
        self.stepped.set()
        if self.is_down:
            raise OSError(19, "No such device")
        return _Zeroconf(self)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                await self.stepped.wait()
                self.stepped.clear()


class _Zeroconf:
    def __init__(self, network: FakeNetwork) -> None:
        self.zeroconf = None
        self._network = network

    async def async_register_service(self, properties: dict[str, Any]) -> None:
        self._network.advertised = list(properties.values())

    async def async_close(self) -> None:
        self._network.advertised = []


class _Browser:
    def __init__(self, network: FakeNetwork) -> None:
        self._network = network
        network.is_browsing = True
        network.stepped.set()

    async def async_cancel(self) -> None:
        self._network.is_browsing = False


async def test_addresses_that_change_are_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FakeNetwork(monkeypatch)
    addresses = ADDRESSES[:1]
    lan = LanDiscovery(PEER, lambda: addresses, lambda peer, found: None)
    running = asyncio.create_task(lan.run())
    try:
        await network.until(lambda: network.is_browsing)
        assert network.advertised == [str(ADDRESSES[0])]
        addresses = [*ADDRESSES[:1], PeerAddress.of("127.0.0.1", 4600, PEER)]
        lan.addresses_changed()
        await asyncio.sleep(0)
        assert network.num_tries == 1, "nothing has changed that anybody is told"
        addresses = ADDRESSES[1:]
        lan.addresses_changed()
        await network.until(lambda: network.is_browsing and network.num_tries == 2)
        assert network.advertised == [str(ADDRESSES[1])]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not network.is_browsing
    assert not network.advertised


@pytest.mark.parametrize("is_told", [True, False])
async def test_network_that_comes_up_late_is_used(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    monkeypatch.setattr(mdns, "RETRY_S", 3600.0 if is_told else 0.0)
    network = FakeNetwork(monkeypatch)
    network.is_down = True
    addresses: list[PeerAddress] = []
    lan = LanDiscovery(PEER, lambda: addresses, lambda peer, found: None)
    running = asyncio.create_task(lan.run())
    try:
        await network.until(lambda: network.num_tries > 0)
        network.is_down = False
        addresses = ADDRESSES[:1]
        if is_told:
            lan.addresses_changed()
        await network.until(lambda: network.is_browsing)
        assert network.advertised == [str(ADDRESSES[0])]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
