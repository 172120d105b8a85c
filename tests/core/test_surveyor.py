"""The surveyor between real link pools within one process: whom it connects to, for how long, and what it tells."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from fusion_node.daemon.surveyor import Surveyor
from fusion_node.daemon.surveyor_core import PROBE_AFTER_S, SurveyorCore
from fusion_node.errors import FusionError, RemoteProtocolError
from fusion_node.types import LayerRange, ModelId, PeerId, UnixS
from p2p.bandwidth import BandwidthMeter
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.messages import AnyMessage, BandwidthProbe, BandwidthReport
from p2p.records import PROTOCOL_VERSION, NodeRecord, RecordTable, ShardRecord, digest_key_of, sign_record

MODEL = ModelId("ab" * 32)
NOW = UnixS(1_700_000_000.0)


@dataclass
class Node:
    identity: Identity
    layers: LayerRange
    pool: LinkPool
    meter: BandwidthMeter
    address: str
    closed: list[PeerId] = field(default_factory=list)
    slice: str = ""

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    def record(self, *, address: str | None = None) -> bytes:
        shard = ShardRecord(
            model_id=MODEL,
            model_name="m",
            start=self.layers.start,
            stop=self.layers.stop,
            num_layers=30,
            numerics="fp32",
            seconds_per_layer=(0.01, 0.01, 0.1),
            kv_free_tokens=100,
            slice=self.slice,
        )
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=self.peer,
            sequence=1,
            issued_at=NOW,
            expires_at=NOW + 60,
            data_addresses=(address or self.address,),
            libp2p_addresses=(),
            device="cpu",
            memory_free_bytes=0,
            shards=(shard,),
            num_sessions=0,
            software="test",
        )
        return sign_record(record, self.identity)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Swarm:
    world: MemoryWorld = field(default_factory=MemoryWorld)
    nodes: list[Node] = field(default_factory=list)

    async def node(self, start: int, stop: int) -> Node:
        identity = Identity.generate()
        host = f"host{len(self.nodes)}"

        def on_frame(peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
            if not isinstance(message, BandwidthProbe | BandwidthReport):
                raise RemoteProtocolError(peer, "only probes are expected here")
            meter.receive(peer, message, len(payload))

        def on_closed(peer: PeerId, error: FusionError) -> None:
            made.closed.append(peer)

        pool = LinkPool(
            MemoryNetwork(self.world, identity, host), identity.peer_id, on_frame=on_frame, on_closed=on_closed
        )
        meter = BandwidthMeter(pool, is_busy=lambda: False)
        made = Node(identity, LayerRange(start, stop), pool, meter, await pool.listen(f"{host}:0"))
        self.nodes.append(made)
        return made


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    yield made
    await asyncio.gather(*(node.pool.aclose() for node in made.nodes))


def survey(
    node: Node,
    table: RecordTable,
    clock: Clock,
    *,
    needed: set[PeerId] | None = None,
    is_idle: bool = True,
    is_serving: Callable[[], bool] = lambda: True,
) -> Surveyor:
    return Surveyor(
        node.peer,
        node.pool,
        node.meter,
        table,
        model_id=MODEL,
        own=lambda: node.layers if is_serving() else None,
        is_member=bool(node.slice),
        is_idle=lambda: is_idle,
        is_needed=lambda peer: peer in (needed or set()),
        core=SurveyorCore(random.Random(1), now=clock.now),
        clock=clock,
        unix_clock=lambda: NOW,
    )


def table_of(*nodes: Node) -> RecordTable:
    table = RecordTable()
    for node in nodes:
        assert isinstance(table.receive(node.record(), now=NOW), NodeRecord)
    return table


async def run(surveyor: Surveyor, clock: Clock, *, until: float) -> None:
    while surveyor.core.get_timer() < until:
        clock.now = surveyor.core.get_timer()
        await surveyor.step()


async def test_neighbours_are_measured_and_their_connections_ended(swarm: Swarm) -> None:
    own, behind, alike = await swarm.node(0, 10), await swarm.node(10, 20), await swarm.node(0, 10)
    clock = Clock()
    surveyor = survey(own, table_of(own, behind, alike), clock, is_idle=False)
    await run(surveyor, clock, until=60.0)

    (announced,) = surveyor.round_trips()
    assert announced.peer_digest == digest_key_of(behind.peer).to_bytes(8, "little")
    assert 0.0 <= announced.seconds < 1.0
    assert own.pool.links() == []
    assert surveyor.coordinate().height > 0.0


async def test_whoever_holds_a_slice_measures_those_that_may_be_in_its_group(swarm: Swarm) -> None:
    own, other, whole, elsewhere = [await swarm.node(*layers) for layers in ((0, 10), (0, 10), (0, 10), (12, 20))]
    own.slice, other.slice, elsewhere.slice = "0/2", "1/2", "1/2"
    clock = Clock()
    surveyor = survey(own, table_of(own, other, whole, elsewhere), clock, is_idle=False)
    await run(surveyor, clock, until=60.0)
    (announced,) = surveyor.round_trips()
    assert announced.peer_digest == digest_key_of(other.peer).to_bytes(8, "little")
    # Nor is it worth the connection of a node that holds all of these layers.
    of_whole = survey(whole, table_of(own, other, whole, elsewhere), clock, is_idle=False)
    await run(of_whole, clock, until=120.0)
    assert of_whole.round_trips() == ()


async def test_a_node_that_serves_nothing_for_now_dials_nobody(swarm: Swarm) -> None:
    own, behind = await swarm.node(0, 10), await swarm.node(10, 20)
    clock, is_serving = Clock(), asyncio.Event()
    surveyor = survey(own, table_of(own, behind), clock, needed={behind.peer}, is_serving=is_serving.is_set)
    await run(surveyor, clock, until=120.0)  # what is dialled would stay
    assert not own.pool.is_connected(behind.peer)
    is_serving.set()
    await run(surveyor, clock, until=240.0)
    assert own.pool.is_connected(behind.peer)


async def test_a_connection_that_a_session_has_come_to_need_stays(swarm: Swarm) -> None:
    own, behind = await swarm.node(0, 10), await swarm.node(10, 20)
    clock = Clock()
    surveyor = survey(own, table_of(own, behind), clock, needed={behind.peer}, is_idle=False)
    await run(surveyor, clock, until=60.0)

    assert own.pool.is_connected(behind.peer)


async def test_a_connection_that_was_there_before_is_measured_for_nothing_and_stays(swarm: Swarm) -> None:
    own, behind = await swarm.node(0, 10), await swarm.node(10, 20)
    await own.pool.connect(behind.peer, [behind.address])
    await own.pool.round_trip(behind.peer)
    clock = Clock()
    surveyor = survey(own, table_of(own, behind), clock, is_idle=False)
    await run(surveyor, clock, until=10.0)

    assert len(surveyor.round_trips()) == 1
    assert own.pool.is_connected(behind.peer)
    assert own.pool.counters["frames_out"] == 0


async def test_a_node_that_is_gone_is_no_obstacle(swarm: Swarm) -> None:
    own, behind, gone = await swarm.node(0, 10), await swarm.node(10, 20), await swarm.node(10, 20)
    table = table_of(own, behind, gone)
    await gone.pool.aclose()
    clock = Clock()
    surveyor = survey(own, table, clock, is_idle=False)
    await run(surveyor, clock, until=60.0)

    assert len(surveyor.round_trips()) == 1


async def test_bandwidth_is_measured_while_idle_and_announced_within_the_operators_limit(swarm: Swarm) -> None:
    own, behind = await swarm.node(0, 10), await swarm.node(10, 20)
    clock = Clock()
    surveyor = survey(own, table_of(own, behind), clock)
    assert surveyor.rates_Bps(None) == (0, 0)
    assert surveyor.rates_Bps(5000.0) == (5000, 0)
    await run(surveyor, clock, until=3 * PROBE_AFTER_S)

    up_Bps, down_Bps = surveyor.rates_Bps(None)
    assert up_Bps > 0
    assert down_Bps > 0
    assert surveyor.rates_Bps(5000.0) == (5000, down_Bps)
