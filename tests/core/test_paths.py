"""Several networks as one, chosen by the form of the address."""

from __future__ import annotations

import asyncio

import pytest

from fusion_node.errors import ConfigError, PeerUnreachable
from p2p.identity import Identity
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.paths import RoutedNetwork, best_first, is_multiaddr, path_of_multiaddr
from p2p.seam import Link, PathKind

RELAYED = "/ip4/192.0.2.1/tcp/4001/p2p/RELAY/p2p-circuit/p2p/PEER"
STREAM = "/ip4/192.0.2.1/tcp/4001/p2p/PEER"
DIRECT = "192.0.2.1:4002"


async def ignore(link: Link) -> None:
    await asyncio.Event().wait()


def test_form_of_an_address_tells_its_path() -> None:
    assert [is_multiaddr(address) for address in (DIRECT, "[::1]:1", STREAM, RELAYED)] == [False, False, True, True]
    assert path_of_multiaddr(STREAM) is PathKind.STREAM
    assert path_of_multiaddr(RELAYED) is PathKind.RELAYED


def test_better_paths_come_first_and_otherwise_the_order_is_kept() -> None:
    network = RoutedNetwork(MemoryNetwork(MemoryWorld(), Identity.generate()))
    addresses = [RELAYED, "b:1", STREAM, "a:1", RELAYED, "b:1"]
    assert best_first(network, addresses) == ["b:1", "a:1", STREAM, RELAYED]


async def test_each_form_goes_to_its_network_and_refusals_add_up() -> None:
    us, them = Identity.generate(), Identity.generate()
    first, second = MemoryNetwork(MemoryWorld(), us, "here"), MemoryNetwork(MemoryWorld(), us, "/here")
    network = RoutedNetwork(first, second)
    for address in ("here:0", "/here:0"):
        listener = await network.listen(address, ignore)
        link = await network.dial(listener.address, expect=us.peer_id, timeout_s=5.0)
        assert link.peer == us.peer_id
        await link.aclose()
        with pytest.raises(PeerUnreachable):
            await network.dial(listener.address + "1", expect=them.peer_id, timeout_s=5.0)
        await listener.aclose()
    first.refused["malformed"] += 1
    second.refused["malformed"] += 2
    assert network.refused["malformed"] == 3


async def test_multiaddr_without_libp2p_is_unreachable() -> None:
    network = RoutedNetwork(MemoryNetwork(MemoryWorld(), Identity.generate()))
    with pytest.raises(PeerUnreachable, match="libp2p"):
        await network.dial(STREAM, expect=None, timeout_s=5.0)
    with pytest.raises(ConfigError, match="libp2p"):
        await network.listen("/ip4/127.0.0.1/tcp/0", ignore)
