"""Legs, candidates and whom to measure, from records that may say anything and from what the user measured."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from fusion_node.client.topology import (
    DETOUR,
    MAX_KV_POSITIONS,
    NOISE_S,
    UNKNOWN_ROUND_TRIP_S,
    HOME_DOWN_Bps,
    HOME_UP_Bps,
    SwarmTopology,
    candidates,
    choose_to_measure,
    coordinate_of,
    locate,
    unusable,
)
from fusion_node.types import LayerRange, ModelId, PeerId
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION, CoordinateRecord, NodeRecord, RoundTrip, ShardRecord, digest_key_of
from scheduler.claims import ClaimBook
from scheduler.leg_table import BulkLegs
from scheduler.topology import Leg, LegSource, Speed

MODEL = ModelId("ab" * 32)
PEERS = [PeerId(Identity.from_seed(bytes([number]) * 32).peer_id) for number in range(1, 5)]
A, B, C, D = PEERS


def record(peer: PeerId, *, to: dict[PeerId, float] | None = None, **fields: Any) -> NodeRecord:
    round_trips = tuple(
        RoundTrip(digest_key_of(other).to_bytes(8, "little"), seconds) for other, seconds in (to or {}).items()
    )
    fields = {"shards": (shard(),), **fields}
    return NodeRecord(
        version=PROTOCOL_VERSION,
        peer=peer,
        sequence=1,
        issued_at=0.0,
        expires_at=60.0,
        data_addresses=(),
        libp2p_addresses=(),
        device="cpu",
        memory_free_bytes=0,
        num_sessions=0,
        software="test",
        round_trips=round_trips,
        **fields,
    )


def shard(start: int = 0, stop: int = 10, **fields: Any) -> ShardRecord:
    known: dict[str, Any] = {
        "model_id": MODEL,
        "model_name": "m",
        "num_layers": 30,
        "numerics": "f16r32",
        "seconds_per_layer": (0.003, 0.004, 0.02),
        "kv_free_tokens": 1000,
    }
    return ShardRecord(start=start, stop=stop, **{**known, **fields})


def at(x: float, y: float = 0.0, error: float = 0.1) -> CoordinateRecord:
    return CoordinateRecord((x, y, 0.0), 0.001, error)


def topology(*records: NodeRecord, measured: dict[PeerId, float] | None = None, **rest: Any) -> SwarmTopology:
    return SwarmTopology(records, round_trips_s=measured or {}, **rest)


def test_a_leg_of_the_user_is_half_the_measured_round_trip() -> None:
    legs = topology(record(A), measured={A: 0.08})

    assert legs.leg(None, A) == legs.leg(A, None) == Leg(0.04, LegSource.MEASURED)


def test_of_what_both_ends_announce_the_larger_counts() -> None:
    legs = topology(record(A, to={B: 0.03}), record(B, to={A: 0.05}), record(C, to={A: 0.02}))

    assert legs.leg(A, B) == legs.leg(B, A) == Leg(0.025, LegSource.ANNOUNCED)
    assert legs.leg(A, C) == Leg(0.01, LegSource.ANNOUNCED)


def test_coordinates_predict_what_nobody_measured() -> None:
    legs = topology(record(A, coordinate=at(0.0)), record(B, coordinate=at(0.06)), record(C))

    assert legs.leg(A, B).source is LegSource.PREDICTED
    assert legs.leg(A, B).one_way_s == pytest.approx((0.06 + 0.002) / 2)
    assert legs.leg(A, C) == Leg(UNKNOWN_ROUND_TRIP_S / 2, LegSource.UNKNOWN)


def test_a_coordinate_that_says_itself_that_it_is_no_good_predicts_nothing() -> None:
    legs = topology(
        record(A, coordinate=at(0.0, error=1.2)), record(B, coordinate=at(0.06)), measured={A: 0.02, B: 0.04}
    )

    assert legs.leg(A, B) == Leg(pytest.approx(0.015), LegSource.BOUND)


def test_two_friends_cannot_claim_to_be_at_one_place() -> None:
    """They are 20 ms and 200 ms from the user: whatever they say, rows need time between them."""
    legs = topology(
        record(A, to={B: 0.0}, coordinate=at(0.0)),
        record(B, to={A: 0.0}, coordinate=at(0.0)),
        measured={A: 0.02, B: 0.2},
    )
    predicted = topology(record(A, coordinate=at(0.0)), record(B, coordinate=at(0.0)), measured={A: 0.02, B: 0.2})

    for leg in (legs.leg(A, B), predicted.leg(A, B)):
        assert leg.one_way_s == pytest.approx((0.18 - NOISE_S) / DETOUR / 2)


def test_nobody_can_put_another_node_out_of_reach() -> None:
    honest = [record(A, to={B: 0.03}, coordinate=at(0.0)), record(B, to={A: 0.03}, coordinate=at(0.03))]
    liar = record(C, to={A: 1e5, B: 1e5}, coordinate=at(9.0))
    measured = {A: 0.02, B: 0.02, C: 0.02}

    assert topology(*honest, liar, measured=measured).leg(A, B) == topology(*honest, measured=measured).leg(A, B)
    assert topology(*honest, liar, measured=measured).leg(A, C).one_way_s <= DETOUR * 0.04 / 2


def test_a_leg_to_a_node_of_which_nothing_is_known_never_fails() -> None:
    legs = topology()

    assert legs.leg(None, A) == legs.leg(A, None) == legs.leg(A, B) == Leg(UNKNOWN_ROUND_TRIP_S / 2, LegSource.UNKNOWN)
    assert legs.leg(A, A).one_way_s == legs.leg(None, None).one_way_s == 0.0


def test_payload_moves_at_the_slowest_known_of_both_lines() -> None:
    nodes = [record(A, up_Bps=1_000_000, down_Bps=9_000_000), record(B, up_Bps=0, down_Bps=400_000)]
    legs = topology(*nodes, measured={A: 0.02}, rates_Bps={A: (300_000.0, None)}, up_Bps=700_000.0)

    assert legs.leg(A, B).rate_Bps == 400_000
    assert legs.leg(B, A).rate_Bps == 9_000_000
    assert legs.leg(B, None).rate_Bps is None
    assert legs.leg(None, A).rate_Bps == 300_000
    assert legs.leg(None, B).rate_Bps == 400_000
    assert legs.leg(A, None).rate_Bps == 1_000_000


def test_a_line_of_which_nothing_is_known_counts_as_the_median_of_those_that_are() -> None:
    rates = [(2_000_000, 20_000_000), (3_000_000, 30_000_000), (2**53, 2**53)]
    known = [record(peer, up_Bps=up, down_Bps=down) for peer, (up, down) in zip("cde", rates, strict=True)]
    legs = topology(*known, record(A), measured={A: 0.02}, up_Bps=50_000_000.0)

    assert legs.leg(A, None).rate_Bps == 3_000_000
    assert legs.leg(A, PeerId("e")).rate_Bps == 3_000_000
    assert legs.leg(PeerId("e"), A).rate_Bps == legs.leg(None, A).rate_Bps == 30_000_000
    assert legs.leg(PeerId("e"), B).rate_Bps == 30_000_000, "there is no record of it"
    assert legs.leg(PeerId("e"), None).rate_Bps == 1e11, "the user's own line is no node's"
    assert topology(*known[:2], record(A)).leg(A, None).rate_Bps is None, "two say nothing of others"


def test_what_the_user_has_measured_counts_rather_than_what_others_lines_are_like() -> None:
    known = [record(PeerId(name), up_Bps=2_000_000, down_Bps=10_000_000) for name in "cde"]
    legs = topology(*known, record(A), rates_Bps={A: (40_000_000.0, 9_000_000.0)})

    assert legs.leg(None, A).rate_Bps == 40_000_000
    assert legs.leg(A, None).rate_Bps == 9_000_000


def test_liars_can_make_lines_of_which_nothing_is_known_no_slower_than_slow_home_lines() -> None:
    liars = [record(PeerId(f"liar-{number}"), up_Bps=1, down_Bps=1) for number in range(50)]
    legs = topology(record(A), record(B), *liars)

    assert legs.leg(A, None).rate_Bps == HOME_UP_Bps
    assert legs.leg(None, A).rate_Bps == HOME_DOWN_Bps
    assert legs.leg(A, B).rate_Bps == HOME_UP_Bps


@pytest.mark.parametrize("seed", range(4))
def test_all_legs_at_once_are_those_that_are_asked_for_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    peers = [PeerId(f"node-{number}") for number in range(20)]
    nodes = [
        record(
            peer,
            to={other: rng.choice([0.0, 1e5, 0.01, 0.2]) for other in rng.sample(peers, 4)},
            coordinate=rng.choice([None, at(rng.uniform(-0.1, 0.1)), at(0.05), at(0.0, error=5.0)]),
            up_Bps=rng.choice([0, 1, 1_000_000, 2**53]),
            down_Bps=rng.choice([0, 1_000_000]),
        )
        for peer in peers[:18]
    ]
    legs = topology(*nodes, measured={peer: rng.uniform(0.001, 0.3) for peer in peers[:12]})
    assert isinstance(legs, BulkLegs)
    senders, receivers = rng.sample(peers, 15), rng.sample(peers, 12)
    one_way_s, rate_Bps = legs.bulk_legs(senders, receivers)

    seen = set()
    for row, sender in enumerate(senders):
        for column, receiver in enumerate(receivers):
            leg = legs.leg(sender, receiver)
            seen.add(leg.source)
            assert one_way_s[row, column] == pytest.approx(leg.one_way_s)
            assert rate_Bps[row, column] == (math.inf if leg.rate_Bps is None else leg.rate_Bps)
    assert seen == set(LegSource)


def test_an_absurd_rate_is_bounded() -> None:
    legs = topology(record(A, up_Bps=1), record(B, up_Bps=2**53))

    assert legs.leg(A, None).rate_Bps == 1e3
    assert legs.leg(B, None).rate_Bps == 1e11


def test_the_user_is_located_by_the_round_trips_that_it_measured() -> None:
    """Four nodes at the corners of a square of 80 ms; the user in its middle, behind a line of 5 ms."""
    corners = [at(0.0), at(0.08), at(0.0, 0.08), at(0.08, 0.08)]
    records = [record(peer, coordinate=corner) for peer, corner in zip(PEERS, corners, strict=True)]
    measured = dict.fromkeys(PEERS[:3], 0.0566 + 0.006)
    own = locate(records, measured, random.Random(1))

    assert own is not None
    fourth = coordinate_of(records[3])
    assert fourth is not None
    legs = topology(*records, measured=measured, own=own)
    assert legs.leg(None, D).source is LegSource.PREDICTED
    assert legs.leg(None, D).one_way_s == pytest.approx(0.0313, rel=0.35)


def test_a_user_that_measured_nobody_with_a_coordinate_has_none() -> None:
    assert locate([record(A)], {A: 0.01}, random.Random(1)) is None
    assert locate([record(A, coordinate=at(0.0))], {}, random.Random(1)) is None


@pytest.mark.parametrize(
    "said",
    [
        CoordinateRecord((), 0.0, 0.1),
        CoordinateRecord((1.0,), 0.0, 0.1),
        CoordinateRecord((1e3, 0.0, 0.0), 0.0, 0.1),
        CoordinateRecord((0.0, 0.0, 0.0), 1e5, 0.1),
    ],
)
def test_a_coordinate_of_another_shape_or_out_of_this_world_is_none(said: CoordinateRecord) -> None:
    assert coordinate_of(record(A, coordinate=said)) is None


def test_a_candidate_carries_what_its_record_says_within_bounds() -> None:
    node = record(A, shards=(shard(queue_s=0.5, kv_free_tokens=2**53),), operator="acme", region="eu-west", price=2.5)
    (found,) = candidates([node], ClaimBook(), model_id=MODEL, num_layers=30, numerics="f16r32", now=0.0)

    assert found.layers == LayerRange(0, 10)
    assert found.speed == Speed(0.003, 0.004, 0.02)
    assert found.kv_free_positions == MAX_KV_POSITIONS
    assert (found.queue_s, found.operator, found.region, found.price) == (0.5, "acme", "eu-west", 2.5)


def test_shards_outside_the_model_of_other_numerics_or_not_loaded_yet_are_no_candidates() -> None:
    nodes = [
        record(A, shards=(shard(0, 100, num_layers=100), shard(20, 30))),
        record(B, shards=(shard(numerics="bf16"),)),
        record(C, shards=(shard(is_ready=False),)),
        record(D, shards=(shard(model_id="cd" * 32),)),
    ]
    found = candidates(nodes, ClaimBook(), model_id=MODEL, num_layers=30, numerics="f16r32", now=0.0)
    problems = dict(unusable(nodes, model_id=MODEL, num_layers=30, numerics="f16r32"))

    assert [(each.peer, each.layers) for each in found] == [(A, LayerRange(20, 30))]
    assert problems == {
        A: "announces layers 0:100 of 100, but the model has 30",
        B: "serves another numerics class",
        C: "is still loading its layers",
    }


def many(num_near: int, num_far: int) -> list[NodeRecord]:
    return [record(PeerId(f"near-{number}"), coordinate=at(0.001 * number)) for number in range(num_near)] + [
        record(PeerId(f"far-{number}"), coordinate=at(0.5)) for number in range(num_far)
    ]


def test_when_they_are_few_all_are_measured() -> None:
    nodes = many(3, 3)

    assert choose_to_measure(nodes, None, 6, random.Random(0)) == nodes


def test_of_many_the_nearest_are_measured_and_some_by_chance() -> None:
    nodes = many(4, 60)
    own = coordinate_of(record(A, coordinate=at(0.0)))
    chosen = [choose_to_measure(nodes, own, 8, random.Random(seed)) for seed in range(30)]

    for each in chosen:
        assert len(each) == len({one.peer for one in each}) == 8
        assert {one.peer for one in nodes[:4]} <= {one.peer for one in each}
    # Whoever could choose the place of all others would else hide them.
    assert len({one.peer for each in chosen for one in each}) > 50


def test_without_a_place_of_ones_own_chance_decides_on_all() -> None:
    nodes = many(4, 60)
    chosen = {one.peer for seed in range(30) for one in choose_to_measure(nodes, None, 8, random.Random(seed))}

    assert len(chosen) > 50
