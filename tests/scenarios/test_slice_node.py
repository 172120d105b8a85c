"""A node that holds a slice: what `join --slice` loads, what it says of itself, and what it does not do."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import cast

import pytest

from fusion_node.daemon.config import NodeConfig, check_slice
from fusion_node.daemon.life import NodeLife
from fusion_node.daemon.node import run_node
from fusion_node.daemon.serving_node import ServingNode, Shard, load_shard
from fusion_node.errors import ConfigError, InvalidLayers, ResourceExhausted
from fusion_node.slices import ModelSlice
from fusion_node.store import ModelStore
from fusion_node.types import LayerRange, PeerId
from p2p.discovery import Discovery
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.messages import Assign, Assigned
from p2p.records import ShardRecord
from tests.engine.tiny import tiny_model
from tests.scenarios.swarm import MemorySwarm
from tests.scenarios.test_moves import NodeDiscovery, NodeNetwork, Source, stored

__all__ = ["stored"]

UNEVEN = ModelSlice(1, (2, 1))
CONFIG = NodeConfig("tiny", device="cpu", slice=UNEVEN, kv_memory_bytes=1 << 20, back_off=False)


async def loaded(
    swarm: MemorySwarm, stored: Source, config: NodeConfig, life: NodeLife | None = None
) -> tuple[Identity, NodeDiscovery, Shard]:
    identity = Identity.generate()
    discovery = NodeDiscovery(identity, swarm)

    async def announce(loading: ShardRecord) -> None:
        raise AssertionError("a slice is not looked for, so that nobody has to hear of it before it is there")

    shard = await load_shard(
        config,
        stored,
        discovery,
        life or NodeLife(identity.peer_id, "tiny"),
        peer=identity.peer_id,
        announce=announce,
    )
    return identity, discovery, shard


async def test_a_node_loads_its_slice_alone_and_says_which(swarm: MemorySwarm, stored: Source) -> None:
    life = NodeLife(PeerId("peer"), "tiny")
    identity, discovery, shard = await loaded(swarm, stored, CONFIG, life)
    whole = await swarm.node(LayerRange(0, 7))
    assert shard.sliced is not None
    assert (shard.layers, shard.sliced.member, shard.capacity_layers) == (LayerRange(0, 7), UNEVEN, 0)
    assert 0.25 < shard.sliced.num_weight_bytes / whole.engine.num_weight_bytes < 0.45
    assert (life.state().slice, life.state().layers) == ("1/2:1", "0:7")
    await discovery.start()
    node = ServingNode(
        CONFIG,
        identity,
        shard,
        cast("Discovery", discovery),
        life,
        NodeNetwork(swarm.world, identity, "sliced"),
        gate=PeerGate(),
    )
    node.on_left = node.close_links
    swarm.at_end(discovery.aclose)
    swarm.at_end(node.leave)
    await node.listen("sliced", 0)
    (told,) = discovery.said[-1].shards
    assert (told.slice, told.start, told.stop, told.is_ready, told.capacity_layers) == ("1/2:1", 0, 7, True, 0)
    assert told.kv_free_tokens == (1 << 20) // (2 * 12 * 4 * 7) // 16 * 16  # one KV head of 12 values
    assert node.ready.slice == UNEVEN
    user = swarm.stranger()
    await user.pool.connect(identity.peer_id, [node.ready.data_addresses[0]])
    user.pool.send(identity.peer_id, Assign(3, b"an assignment"))
    refused = await user.get(Assigned)
    assert isinstance(refused, Assigned)
    assert (refused.number, "slice 1/2:1 stays" in refused.problem) == (3, True)


async def test_a_slice_of_named_layers_is_one_of_these(swarm: MemorySwarm, stored: Source) -> None:
    _, _, shard = await loaded(swarm, stored, dataclasses.replace(CONFIG, layers=LayerRange(2, 5)))
    assert shard.layers == LayerRange(2, 5)
    with pytest.raises(InvalidLayers):
        await loaded(swarm, stored, dataclasses.replace(CONFIG, layers=LayerRange(2, 8)))


async def test_a_slice_that_does_not_fit_is_refused_before_anything_is_read(swarm: MemorySwarm, stored: Source) -> None:
    read: list[set[int]] = []
    with stored.watched(read.append), pytest.raises(ResourceExhausted, match="slice 1/2:1, need"):
        await loaded(swarm, stored, dataclasses.replace(CONFIG, max_ram_bytes=1 << 20))
    assert read == []


async def test_more_members_than_heads_are_refused(swarm: MemorySwarm, stored: Source) -> None:
    with pytest.raises(ConfigError, match="4 query heads cannot be split among 5 members"):
        await loaded(swarm, stored, dataclasses.replace(CONFIG, slice=ModelSlice(0, (1,) * 5)))


@pytest.mark.parametrize(
    ("family", "num_members", "problem"),
    [
        ("phi3", 2, "a phi3 model cannot be served by a fusion group; these can: llama"),
        ("llama", 5, "4 query heads cannot be split among 5 members"),
    ],
)
async def test_a_slice_that_there_cannot_be_is_refused_before_the_node_is_anybody_in_the_swarm(
    tmp_path: Path, family: str, num_members: int, problem: str
) -> None:
    tiny_model(family).whole.save_pretrained(tmp_path / "tiny")  # type: ignore[operator]
    (tmp_path / "tiny" / "tokenizer.json").write_text('{"version": "1.0"}')
    home = tmp_path / "home"
    ModelStore(home).pull(str(tmp_path / "tiny"))
    identity = tmp_path / "identity.key"
    config = dataclasses.replace(
        CONFIG,
        slice=ModelSlice(0, (1,) * num_members),
        home=home,
        identity_path=identity,
        listen="127.0.0.1:0",
        mdns=False,
        upnp=False,
    )
    with pytest.raises(ConfigError, match=problem):
        await run_node(config, stop=asyncio.Event())
    assert not identity.exists()


def test_who_holds_a_slice_chooses_no_layers() -> None:
    check_slice(CONFIG)
    check_slice(NodeConfig("tiny", max_layers=3, scheduler=PeerId("peer")))
    for changes in ({"max_layers": 3}, {"scheduler": PeerId("peer")}):
        with pytest.raises(ConfigError, match="a slice stays where it is"):
            check_slice(dataclasses.replace(CONFIG, **changes))


def test_slice_of_one_is_refused_as_no_group_would_take_it() -> None:
    with pytest.raises(ConfigError, match=r"slice 0/1 is all of the layers.*leave --slice out"):
        check_slice(dataclasses.replace(CONFIG, slice=ModelSlice(0, (1,))))
