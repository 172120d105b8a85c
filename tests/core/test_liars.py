"""Nodes whose records claim what is not so, against the planner: what they gain, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import pytest

from fusion_node.client.topology import SwarmTopology, candidates
from fusion_node.types import LayerRange, ModelId, PeerId
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION, CoordinateRecord, NodeRecord, RoundTrip, ShardRecord, digest_key_of
from scheduler.claims import ClaimBook, StageStep
from scheduler.cost_model import MESSAGE_OVERHEAD_S, Workload
from scheduler.planner import plan_route
from scheduler.plans import Planned
from scheduler.topology import RouteStage

MODEL = ModelId("ab" * 32)
NUM_LAYERS = 30
HONEST_S, LIAR_S = 0.003, 0.05
"""Per layer, really."""
ROUND_TRIP_S = 0.02
ROUNDS = 10
"""Of a request."""


def peer_of(number: int) -> PeerId:
    return Identity.from_seed(number.to_bytes(32, "big")).peer_id


def record(peer: PeerId, layers: LayerRange, *, seconds_per_layer: float = HONEST_S) -> NodeRecord:
    shard = ShardRecord(
        model_id=MODEL,
        model_name="m",
        start=layers.start,
        stop=layers.stop,
        num_layers=NUM_LAYERS,
        numerics="fp32",
        seconds_per_layer=(seconds_per_layer, 1.3 * seconds_per_layer, 8 * seconds_per_layer),
        kv_free_tokens=4096,
    )
    return NodeRecord(
        version=PROTOCOL_VERSION,
        peer=peer,
        sequence=1,
        issued_at=0.0,
        expires_at=60.0,
        data_addresses=(),
        libp2p_addresses=(),
        device="",
        memory_free_bytes=0,
        shards=(shard,),
        num_sessions=0,
        software="",
    )


@dataclass
class User:
    """Plans with records, and observes the rounds that its routes really take."""

    records: list[NodeRecord]
    really_s: Mapping[PeerId, float]
    book: ClaimBook = field(default_factory=ClaimBook)
    now: float = 0.0

    def plan(self) -> tuple[RouteStage, ...]:
        found = candidates(
            self.records, self.book, model_id=MODEL, num_layers=NUM_LAYERS, numerics="fp32", now=self.now
        )
        planned = plan_route(found, self.legs(), num_layers=NUM_LAYERS, workload=Workload(num_positions=100))
        assert isinstance(planned, Planned)
        return planned.route

    def legs(self) -> SwarmTopology:
        return SwarmTopology(self.records, round_trips_s={PeerId(record.peer): ROUND_TRIP_S for record in self.records})

    def serve(self, route: tuple[RouteStage, ...], liars: set[PeerId]) -> float:
        """One request; seconds of one of its rounds. Liars say that it took them no time at all."""
        legs_s = len(route) * ROUND_TRIP_S + (len(route) + 1) * MESSAGE_OVERHEAD_S
        spent_s = [len(stage.layers) * self.really_s[stage.peer] for stage in route]
        steps = [
            StageStep(stage.peer, len(stage.layers), 0.0 if stage.peer in liars else seconds, 0.0)
            for stage, seconds in zip(route, spent_s, strict=True)
        ]
        for _ in range(ROUNDS):
            self.book.observe_round(steps, 1, round_s=legs_s + sum(spent_s), legs_s=legs_s, now=self.now)
            self.now += 0.3
        return legs_s + sum(spent_s)


def swarm(*lies: NodeRecord) -> User:
    """Four honest holders of each third of the model, and the liars."""
    thirds = [LayerRange(0, 10), LayerRange(10, 20), LayerRange(20, 30)]
    honest = [record(peer_of(number), thirds[number % 3]) for number in range(12)]
    really_s = {PeerId(each.peer): HONEST_S for each in honest} | {PeerId(each.peer): LIAR_S for each in lies}
    return User([*honest, *lies], really_s)


def absurd(peer: PeerId, layers: LayerRange) -> NodeRecord:
    """A record with everything that could attract."""
    (shard,) = record(peer, layers).shards
    shard = msgspec.structs.replace(shard, seconds_per_layer=(0.0, 1e-12, 0.0), kv_free_tokens=2**53, queue_s=0.0)
    near = tuple(RoundTrip(digest_key_of(peer_of(number)).to_bytes(8, "little"), 0.0) for number in range(12))
    return msgspec.structs.replace(
        record(peer, layers),
        shards=(shard,),
        round_trips=near,
        coordinate=CoordinateRecord((0.0, 0.0, 0.0), 0.0, 0.0),
        up_Bps=2**53,
        down_Bps=2**53,
        memory_free_bytes=2**53,
    )


@pytest.mark.parametrize("layers", [LayerRange(0, 30), LayerRange(10, 20), LayerRange(5, 25)], ids=str)
def test_a_liar_serves_one_request_and_no_other(layers: LayerRange) -> None:
    liar = peer_of(100)
    user = swarm(absurd(liar, layers))
    best_s = swarm().serve(swarm().plan(), set())
    served = []
    for _ in range(8):
        route = user.plan()
        served.append((liar in {stage.peer for stage in route}, user.serve(route, {liar})))

    assert served[0][0], "its claim attracts, as long as nothing else is known"
    assert not any(is_there for is_there, _ in served[1:])
    assert max(seconds for _, seconds in served[1:]) == pytest.approx(best_s)


def test_each_of_many_liars_serves_one_request_at_most() -> None:
    liars = {peer_of(100 + number) for number in range(5)}
    user = swarm(*(absurd(peer, LayerRange(0, 30)) for peer in sorted(liars)))
    routes = []
    for _ in range(12):
        route = user.plan()
        user.serve(route, liars)
        routes.append({stage.peer for stage in route} & liars)

    assert all(not present for present in routes[5:])
    assert sorted(peer for present in routes for peer in present) == sorted(liars)


def test_a_record_that_repels_changes_nothing_for_the_others() -> None:
    repelling = record(peer_of(100), LayerRange(0, 30), seconds_per_layer=1e5)
    far = tuple(RoundTrip(digest_key_of(peer_of(number)).to_bytes(8, "little"), 1e5) for number in range(12))
    user = swarm(msgspec.structs.replace(repelling, round_trips=far, coordinate=CoordinateRecord((9.0,) * 3, 9.0, 0.0)))

    assert user.plan() == swarm().plan()


def test_layers_outside_the_model_attract_nobody() -> None:
    (shard,) = absurd(peer_of(100), LayerRange(0, 30)).shards
    beyond = msgspec.structs.replace(shard, start=0, stop=4096, num_layers=4096)
    user = swarm(msgspec.structs.replace(absurd(peer_of(100), LayerRange(0, 30)), shards=(beyond,)))

    assert user.plan() == swarm().plan()
