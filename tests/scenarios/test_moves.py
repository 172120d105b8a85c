"""A node goes over to other layers: the real serving node, with a tiny model, over the in-memory network.

Whoever decides on a move is tested in tests/core/test_mover.py; here is what the move does to weights, sessions, and
what the node says of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from fusion_node.client.answer_core import Place, RepairKind
from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.life import NodeLife
from fusion_node.daemon.memory_plan import WEIGHTS_SHARE, place_layers
from fusion_node.daemon.serving_node import ServingNode, Shard
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.stage import Stage
from fusion_node.errors import ResourceExhausted, StoreCorrupted
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange, PeerId
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.memory import MemoryNetwork
from p2p.memory_discovery import MemoryDiscovery
from p2p.messages import Assign, Assigned, OpenSession, SessionRefused
from p2p.reachability_verdict import Plane
from p2p.records import PROTOCOL_VERSION, Assignment, NodeRecord, PlanStage, open_record, sign_assignment, sign_plan
from p2p.seam import Listener, OnLink
from tests.engine.tiny import TinyModel
from tests.scenarios.swarm import CPU, MODEL, MemorySwarm, Raw, until
from tests.scenarios.test_answer_repair import RANGES, Answering

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def stored(model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The same weights as a node finds them in its store."""
    folder = tmp_path_factory.mktemp("moves")
    model.whole.save_pretrained(folder / "tiny")  # type: ignore[operator]
    (folder / "tiny" / "tokenizer.json").write_text('{"version": "1.0"}')
    found = ModelStore(folder / "home").pull(str(folder / "tiny"))
    return Source(found.path, "tiny", MODEL, found.manifest)


@dataclass(frozen=True)
class Source(StoredModel):
    """Tells of what is read.

    Attributes:
        on_read: called with the layers of the tensors that are about to be read; may raise.
    """

    on_read: list[Callable[[set[int]], None]] = field(default_factory=list, compare=False)

    @contextlib.contextmanager
    def watched(self, told: Callable[[set[int]], None]) -> Iterator[None]:
        self.on_read.append(told)
        try:
            yield
        finally:
            self.on_read.remove(told)

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        wanted = list(names)
        layers = {int(name.split(".layers.")[1].split(".")[0]) for name in wanted if ".layers." in name}
        for told in self.on_read:
            told(layers)
        return super().open_tensors(wanted)


class Reach:
    """Everything that is bound can be dialled."""

    def __init__(self) -> None:
        self.on_change: list[Callable[[], None]] = []
        self._bound: dict[Plane, list[tuple[str, int]]] = {}

    def bound(self, plane: Plane, sockets: Sequence[tuple[str, int]]) -> None:
        self._bound[plane] = list(sockets)

    async def settled(self, plane: Plane, *, timeout_s: float) -> bool:
        return True

    def announced(self, plane: Plane) -> list[tuple[str, int]]:
        return self._bound.get(plane, [])

    def best_known(self, plane: Plane) -> list[tuple[str, int]]:
        return self.announced(plane)


class NodeDiscovery(MemoryDiscovery):
    """As a serving node uses it.

    Attributes:
        said: all that the node has told of itself.
    """

    def __init__(self, identity: Identity, swarm: MemorySwarm) -> None:
        config = DiscoveryConfig(("127.0.0.1:0",), (), True, True)
        super().__init__(identity, config, swarm.discoveries, clock=time.time)
        self.reachability = Reach()
        self.on_path: list[object] = []
        self.said: list[NodeRecord] = []

    async def announce(self, envelope: bytes, model_ids: Sequence[str]) -> None:
        record = open_record(envelope, now=self._now())
        assert isinstance(record, NodeRecord)
        self.said.append(record)
        await super().announce(envelope, model_ids)  # type: ignore[arg-type]


class NodeNetwork(MemoryNetwork):
    """Takes links through libp2p as well, of which none come."""

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        return NoListener() if address.startswith("/p2p/") else await super().listen(address, on_link)


class NoListener:
    address = ""

    async def aclose(self) -> None:
        pass


@dataclass
class Memory:
    """Of every device, free to be allocated."""

    free_bytes: int = 1 << 30

    def __call__(self, device: torch.device) -> int:
        return self.free_bytes


@dataclass
class Moving:
    """A serving node that may go over to other layers."""

    node: ServingNode
    identity: Identity
    discovery: NodeDiscovery
    memory: Memory
    modules: dict[int, weakref.ref[torch.nn.Module]]
    """Of the layers that it was started with."""

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def layers(self) -> LayerRange:
        return self.node.ready.layers

    @property
    def address(self) -> str:
        return self.node.ready.data_addresses[0]

    @property
    def layers_held(self) -> set[int]:
        """Of those that it was started with, whose weights are in memory, whatever refers to them."""
        return {layer for layer, module in self.modules.items() if module() is not None}

    @property
    def shard_ranges(self) -> list[tuple[LayerRange, bool]]:
        """What it last told the swarm that it holds, and whether that is ready."""
        return [(LayerRange(s.start, s.stop), s.is_ready) for s in self.discovery.said[-1].shards]

    async def go_over(self, start: int, stop: int, *, before_drop: Callable[[], None] = lambda: None) -> bool:
        async def may_drop() -> bool:
            before_drop()
            return True

        try:
            await self.node.intend(LayerRange(start, stop))
            return await self.node.go_over(LayerRange(start, stop), may_drop)
        finally:
            await self.node.intend(None)


async def moving_node(
    swarm: MemorySwarm,
    stored: Source,
    layers: LayerRange,
    *,
    device: str = "cpu",
    scheduler: PeerId | None = None,
    kv_memory_bytes: int | None = 1 << 22,
) -> Moving:
    host, identity = f"moving{len(swarm.discoveries.peers)}", Identity.generate()
    discovery, memory = NodeDiscovery(identity, swarm), Memory()
    await discovery.start()
    config = NodeConfig(
        "tiny", device=device, scheduler=scheduler, kv_memory_bytes=kv_memory_bytes, back_off=False, drain_grace_s=60.0
    )
    places = place_layers(layers, [1 for _ in device.split(",")])
    numerics = numerics_class("fp32")
    stages = [Stage.load(stored, place, numerics=numerics, device=CPU) for place in places if place is not None]
    shard = Shard(stored, tuple(stages), ((1, 1e-3), (16, 1e-3), (64, 2e-3)), 1 << 22, capacity_layers=4)
    gate = PeerGate()
    node = ServingNode(
        config,
        identity,
        shard,
        cast("Discovery", discovery),
        NodeLife(identity.peer_id, "tiny"),
        NodeNetwork(swarm.world, identity, host),
        gate=gate,
        free_bytes=memory,
    )
    node.on_left = node.close_links
    swarm.at_end(discovery.aclose)
    swarm.at_end(node.leave)
    await node.listen(host, 0)
    modules = {
        layer: weakref.ref(stage._model.get_submodule(f"layers.{layer}"))
        for stage in stages
        for layer in range(stage.layers.start, stage.layers.stop)
    }
    return Moving(node, identity, discovery, memory, modules)


@dataclass
class Answers(Answering):
    """An answer over the moving node for as long as it has the layers, and over the others otherwise."""

    moving: Moving | None = None
    after_token: Callable[[int], Awaitable[None]] | None = None
    """Awaited when a token has come and the next is not asked for."""

    async def next_is_wanted(self) -> None:
        if self.after_token is not None:
            await self.after_token(len(self.tokens))

    def _place(self, layers: LayerRange, avoided: frozenset[PeerId]) -> Place | None:
        node = self.moving
        if node is not None and node.layers == layers and node.peer not in avoided:
            return Place(PlanStage(node.peer, layers.start, layers.stop, (node.address,)), 0.001)
        return super()._place(layers, avoided)


async def answers(swarm: MemorySwarm, moving: Moving | None = None, **changes: object) -> Answers:
    user = await swarm.user()
    await swarm.measured(user)
    return Answers(swarm, user, moving=moving, **changes)  # type: ignore[arg-type]


async def assert_serves(
    swarm: MemorySwarm, moving: Moving, expected: list[int], ranges: Sequence[tuple[int, int]] = RANGES
) -> None:
    """Its layers are one of these ranges, and give the same tokens as the others'."""
    user = await answers(swarm, moving, ranges=ranges)
    steps_before = moving.node.num_rows
    assert await user.run() == expected
    assert moving.node.num_rows > steps_before
    assert user.avoided == []


async def others(swarm: MemorySwarm, ranges: Sequence[tuple[int, int]] = RANGES) -> list[int]:
    """Holders of all layers, and what they answer."""
    for layers in ranges:
        await swarm.node(LayerRange(*layers))
    return await (await answers(swarm, ranges=ranges)).run()


async def test_node_that_fails_when_it_has_stopped_serving_serves_what_it_did(
    swarm: MemorySwarm, stored: Source
) -> None:
    expected = await others(swarm)
    moving = await moving_node(swarm, stored, LayerRange(3, 5), kv_memory_bytes=None)

    def another_program_takes_all() -> None:
        moving.memory.free_bytes = 1 << 10

    with pytest.raises(ResourceExhausted):
        await moving.go_over(5, 7, before_drop=another_program_takes_all)
    assert not moving.node.is_between
    assert moving.layers == LayerRange(3, 5)
    assert moving.shard_ranges == [(LayerRange(3, 5), True)]
    await assert_serves(swarm, moving, expected)


async def test_assigned_node_hands_its_sessions_over_and_serves_other_layers(
    swarm: MemorySwarm, stored: Source
) -> None:
    expected = await others(swarm)
    scheduler = swarm.stranger()
    moving = await moving_node(swarm, stored, LayerRange(3, 5), scheduler=scheduler.peer)
    await scheduler.pool.connect(moving.peer, [moving.address])
    serving = asyncio.create_task(moving.node.serve(asyncio.Event()))
    user = await answers(swarm, moving)

    async def move(num_tokens: int) -> None:
        if num_tokens == 4:
            assert moving.node.num_sessions == 1
            scheduler.pool.send(moving.peer, assign(scheduler, moving.peer, LayerRange(5, 7)))
            await until(lambda: moving.layers == LayerRange(5, 7))

    user.after_token = move
    assert await user.run() == expected
    assert user.num_sessions == 1
    (repair,) = user.repairs
    assert (repair.kind, repair.stage, repair.peer) == (RepairKind.PATCHED, 1, moving.peer)
    assert await scheduler.get(Assigned) == Assigned(1)
    await until(lambda: moving.shard_ranges == [(LayerRange(5, 7), True)])
    assert not any(is_held_nowhere(record) for record in moving.discovery.said)
    assert moving.node.num_sessions == 0
    await assert_serves(swarm, moving, expected)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def assign(scheduler: Raw, node: PeerId, layers: LayerRange) -> Assign:
    now = time.time()
    assignment = Assignment(
        PROTOCOL_VERSION, scheduler.peer, node, 1, MODEL, layers.start, layers.stop, now, now + 60.0
    )
    return Assign(1, sign_assignment(assignment, scheduler.identity))


def is_held_nowhere(record: NodeRecord) -> bool:
    """Whether it told of a move for which nothing could be kept."""
    return not record.shards


async def test_old_layers_are_freed_when_others_are_served(swarm: MemorySwarm, stored: Source) -> None:
    expected = await others(swarm)
    moving = await moving_node(swarm, stored, LayerRange(3, 5))
    await assert_serves(swarm, moving, expected)
    assert await moving.go_over(5, 7)
    assert moving.layers_held == set()
    await assert_serves(swarm, moving, expected)


@pytest.mark.parametrize("stop", [2, 4])
async def test_where_both_do_not_fit_old_layers_are_gone_before_others_are_read(
    swarm: MemorySwarm, stored: Source, stop: int
) -> None:
    expected = await others(swarm)
    moving = await moving_node(swarm, stored, LayerRange(0, stop))
    kept = {3} if stop == 4 else set[int]()
    moving.memory.free_bytes = 0
    reads: list[set[int]] = []

    def check(layers: set[int]) -> None:
        reads.append(layers)
        assert moving.node.is_between
        assert moving.shard_ranges == [(LayerRange(0, stop), False), (LayerRange(3, 5), False)]
        assert moving.layers_held == kept | ({0} if not kept else set())

    with stored.watched(check):
        assert await moving.go_over(3, 5)
    assert set().union(*reads) == {3, 4} - kept
    assert not moving.node.is_between
    assert moving.shard_ranges == [(LayerRange(3, 5), True)]
    await assert_serves(swarm, moving, expected)


async def test_node_between_tells_of_no_layers_and_takes_no_session(swarm: MemorySwarm, stored: Source) -> None:
    moving = await moving_node(swarm, stored, LayerRange(0, 3))
    moving.memory.free_bytes = 0
    goes_on = threading.Event()
    has_begun = threading.Event()

    def wait(layers: set[int]) -> None:
        has_begun.set()
        goes_on.wait(20)

    with stored.watched(wait):
        going = asyncio.create_task(moving.go_over(5, 7))
        try:
            await until(has_begun.is_set)
            await moving.node.publish()
            assert moving.shard_ranges == [(LayerRange(5, 7), False)]
            user = swarm.stranger()
            await user.pool.connect(moving.peer, [moving.address])
            stages = (PlanStage(moving.peer, 0, 1, (moving.address,)),)
            plan = swarm.plan(user.peer, [await swarm.node(LayerRange(0, 1))], stages=stages)
            user.pool.send(moving.peer, OpenSession(plan.session, 0, 0, sign_plan(plan, user.identity)))
            refused = await user.get(SessionRefused)
            assert isinstance(refused, SessionRefused)
            assert refused.code == "draining"
            assert refused.reason == "the node goes over to other layers"
        finally:
            goes_on.set()
        assert await going


async def test_node_whose_other_layers_are_damaged_stays_if_both_fit_and_ends_otherwise(
    swarm: MemorySwarm, stored: Source
) -> None:
    expected = await others(swarm)
    moving = await moving_node(swarm, stored, LayerRange(3, 5))

    def damaged(layers: set[int]) -> None:
        raise StoreCorrupted("damaged")

    with stored.watched(damaged):
        with pytest.raises(StoreCorrupted):
            await moving.go_over(5, 7)
        assert not moving.node.is_between
        await assert_serves(swarm, moving, expected)
        moving.memory.free_bytes = 0
        with pytest.raises(StoreCorrupted):
            await moving.go_over(5, 7)
        assert moving.node.is_between
        assert moving.shard_ranges == []


@dataclass(frozen=True)
class TwoDevices:
    """A move to the layers 1:5, of which either device is to have two.

    Attributes:
        start: of the four layers that were held before.
        room: for how many layers more there is on each device.
        read: layers that are missing on their device.
        held: of those that were held before, the ones in memory meanwhile.
    """

    start: int
    room: int
    fits_beside: bool
    read: set[int]
    held: set[int]


@pytest.mark.parametrize(
    "case",
    [
        TwoDevices(0, 2, fits_beside=True, read={2, 4}, held={0, 1, 2, 3}),
        TwoDevices(0, 0, fits_beside=False, read={2, 4}, held={1, 3}),
        # What one device has is missing on the other: two layers each, though the node lacks but two.
        TwoDevices(3, 1, fits_beside=False, read={1, 2, 3, 4}, held={3}),
    ],
)
async def test_every_device_has_room_for_what_it_lacks_or_drops_the_rest_before(
    swarm: MemorySwarm, stored: Source, case: TwoDevices
) -> None:
    ranges = ((0, 1), (1, 5), (5, 7))
    expected = await others(swarm, ranges)
    moving = await moving_node(swarm, stored, LayerRange(case.start, case.start + 4), device="cpu,cpu")
    first = [tensor for tensor in stored.manifest.tensors if ".layers.0." in tensor.name]
    layer_bytes = 4 * sum(tensor.num_elements for tensor in first)
    moving.memory.free_bytes = int(2 * (case.room + 0.5) * layer_bytes / WEIGHTS_SHARE)
    reads: list[set[int]] = []

    def check(layers: set[int]) -> None:
        reads.append(layers)
        assert moving.node.is_between is not case.fits_beside
        assert moving.layers_held == case.held

    with stored.watched(check):
        assert await moving.go_over(1, 5)
    assert set().union(*reads) == case.read
    assert not moving.node.is_between
    assert moving.shard_ranges == [(LayerRange(1, 5), True)]
    await assert_serves(swarm, moving, expected, ranges)
