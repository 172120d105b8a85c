"""What a user makes of records, without a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from fusion_node.client.connection import SwarmConnection
from fusion_node.client.undialled_core import FIRST_PAUSE_S
from fusion_node.types import ModelId
from p2p.discovery import DiscoveryConfig
from p2p.identity import Identity
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.memory_discovery import MemoryDiscovery, World
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_record

MODEL = ModelId("ab" * 32)


class Node:
    """A node that announces what a test wants."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.identity = Identity.generate()
        config = DiscoveryConfig(("127.0.0.1:0",), (), mdns=False, serve=True)
        self.discovery = MemoryDiscovery(self.identity, config, world, clock=time.time)
        self.sequence = 0

    async def announce(self, *data_addresses: str, layers: tuple[int, int] = (0, 10)) -> None:
        self.sequence += 1
        now = time.time()
        shard = ShardRecord(MODEL, "tiny", *layers, 30, "f16r32", (0.001, 0.001, 0.001), 4096)
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=self.identity.peer_id,
            sequence=self.sequence,
            issued_at=now,
            expires_at=now + 60.0,
            data_addresses=data_addresses,
            libp2p_addresses=(),
            device="cpu",
            memory_free_bytes=0,
            shards=(shard,),
            num_sessions=0,
            software="test",
        )
        await self.discovery.announce(sign_record(record, self.identity), [MODEL])


@pytest.fixture
async def swarm() -> AsyncIterator[tuple[Node, SwarmConnection]]:
    world = World()
    node = Node(world)
    await node.discovery.start()
    identity = Identity.generate()
    entry = tuple(node.discovery.addresses)
    discovery = MemoryDiscovery(identity, DiscoveryConfig((), entry, mdns=False, serve=False), world, clock=time.time)
    network = MemoryNetwork(MemoryWorld(), identity, "user")
    async with SwarmConnection(entry, identity=identity, discovery=discovery, network=network) as user:
        yield node, user
    await node.discovery.aclose()


async def test_node_that_is_dialled_back_just_now_is_found_with_its_address(
    swarm: tuple[Node, SwarmConnection],
) -> None:
    node, user = swarm
    await node.announce()
    finding = asyncio.create_task(user.find(MODEL))
    while not user._discovery.table.live(now=time.time()):  # type: ignore[arg-type]  # noqa: ASYNC110  # a task's doing
        await asyncio.sleep(0)
    assert not finding.done()
    await node.announce("10.0.0.1:4601")
    (found,) = await finding
    assert found.data_addresses == ("10.0.0.1:4601",)


async def test_node_that_is_never_dialled_back_delays_a_user_once(swarm: tuple[Node, SwarmConnection]) -> None:
    node, user = swarm
    await node.announce()
    user._dialled_back_s = 0.01
    (found,) = await user.find(MODEL)
    assert found.data_addresses == ()
    user._dialled_back_s = 3600.0
    async with asyncio.timeout(20.0):
        assert len(await user.find(MODEL)) == 1


async def _beside(node: Node) -> Node:
    """One more node of the same swarm."""
    other = Node(node.world)
    await other.discovery.start()
    return other


async def test_identity_without_addresses_delays_nobody_where_others_serve_its_layers(
    swarm: tuple[Node, SwarmConnection],
) -> None:
    node, user = swarm
    await node.announce("10.0.0.1:4601")
    other = await _beside(node)
    await other.announce(layers=(2, 9))
    user._dialled_back_s = 3600.0
    async with asyncio.timeout(20.0):
        assert {record.peer for record in await user.find(MODEL)} == {node.identity.peer_id, other.identity.peer_id}
    await other.discovery.aclose()


async def test_identities_without_addresses_that_come_one_after_another_delay_a_user_once(
    swarm: tuple[Node, SwarmConnection],
) -> None:
    node, user = swarm
    await node.announce("10.0.0.1:4601")
    others = [await _beside(node) for _ in range(3)]
    user._dialled_back_s = 0.01
    for number, other in enumerate(others):
        await other.announce(layers=(10 + number, 30))
        async with asyncio.timeout(FIRST_PAUSE_S / 2):
            assert len(await user.find(MODEL)) == 2 + number
        user._dialled_back_s = 3600.0
    for other in others:
        await other.discovery.aclose()
