"""Which columns go from whom to whom along a plan of nodes and groups."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

from fusion_node.daemon.parts_core import Part, Parts, cut, header_of, parts_of, slowest, to_dial
from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from p2p.messages import StageTiming, Step, TensorMeta
from p2p.records import Plan, PlanMember, PlanStage
from tests.core.serving_world import PEERS, plan_of

HIDDEN = 48


def plan_with(*groups: tuple[int, ...]) -> Plan:
    """A plan whose stages have these weights; those of one weight are single nodes."""
    peers, stages = iter(PEERS[1:]), []
    for number, weights in enumerate(groups):
        places = [next(peers) for _ in weights]
        members = tuple(PlanMember(peer, (f"{peer[-4:]}:1",)) for peer in places)
        if len(weights) == 1:
            stages.append(PlanStage(places[0], number, number + 1, members[0].data_addresses))
        else:
            stages.append(PlanStage(places[0], number, number + 1, (), members=members, weights=weights))
    return plan_of(PEERS[0], [], stages=tuple(stages))


def all_parts(plan: Plan) -> dict[PeerId, Parts]:
    return {
        PeerId(place.peer): parts_of(plan, stage, member, HIDDEN)
        for stage, each in enumerate(plan.stages)
        for member, place in enumerate(each.places)
    }


def test_between_nodes_of_whole_layers_all_columns_go_from_one_to_the_next() -> None:
    plan = plan_with((1,), (1,))
    first, second = (PeerId(stage.peer) for stage in plan.stages)
    whole = range(HIDDEN)
    assert all_parts(plan) == {
        first: Parts(whole, (Part(PEERS[0], whole),), (Part(second, whole),)),
        second: Parts(whole, (Part(first, whole),), (Part(PEERS[0], whole),)),
    }


@pytest.mark.parametrize(
    "groups", [((1, 1, 1),), ((1, 1), (1, 2, 3)), ((1,), (1, 1), (1,)), ((2, 1), (1, 1), (1,), (3, 1, 1, 1))]
)
def test_what_one_sends_another_expects_and_each_gets_its_columns_once(groups: tuple[tuple[int, ...], ...]) -> None:
    plan = plan_with(*groups)
    parts = all_parts(plan)
    for peer, own in parts.items():
        assert [column for part in own.sources for column in part.columns] == list(own.own)
        sent = sorted(column for part in own.targets for column in part.columns)
        assert sent == list(own.own)
        for target in own.targets:
            if target.peer != PEERS[0]:
                assert parts[target.peer].width_from(peer) == len(target.columns)
            assert own.goes_to(target.peer)
        assert own.width == len(own.own)
        assert own.width_from(PEERS[30]) == 0
        assert not own.goes_to(PEERS[30])
    for before, behind in itertools.pairwise(plan.stages):
        talking = {(PeerId(a.peer), PeerId(b.peer)) for a in before.places for b in behind.places}
        assert sum(parts[a].goes_to(b) for a, b in talking) <= len(before.places) + len(behind.places) - 1


def test_members_dial_one_another_and_those_behind_that_share_columns_with_them() -> None:
    plan = plan_with((1, 1), (1, 1, 1, 1))
    parts = all_parts(plan)
    (a, b), behind = ([PeerId(place.peer) for place in stage.places] for stage in plan.stages)
    dialled = {
        peer: [place.peer for place in to_dial(plan, stage, parts[peer])]
        for stage, each in enumerate(plan.stages)
        for peer in map(PeerId, (place.peer for place in each.places))
    }
    assert dialled[a] == [b, behind[0], behind[1]]
    assert dialled[b] == [a, behind[2], behind[3]]
    assert dialled[behind[1]] == [behind[0], behind[2], behind[3]]
    assert parts[a].others == (b,)


def test_more_members_than_columns_are_refused() -> None:
    plan = plan_with((1, 1, 1))
    with pytest.raises(ConfigError, match="cannot be split"):
        parts_of(plan, 0, 0, 2)


@pytest.mark.parametrize("dtype", ["<f4", "<f2"])
def test_columns_of_encoded_rows_are_cut(dtype: str) -> None:
    values = np.arange(60, dtype=dtype).reshape(5, 12)
    own = range(24, 36)
    payload = memoryview(values.tobytes())
    assert cut(payload, 5, own, own) is payload
    part = cut(payload, 5, own, range(26, 31))
    assert np.array_equal(np.frombuffer(part, dtype=dtype).reshape(5, 5), values[:, 2:7])
    assert len(cut(memoryview(b""), 0, own, range(24, 25))) == 0


def step(**changes: object) -> Step:
    fields = {
        "session": bytes(16),
        "epoch": 3,
        "sequence": 4,
        "first_node": 9,
        "parent": 8,
        "parents": (),
        "advance": 9,
        "want": (9,),
        "tensor": TensorMeta("f32", 1, 8),
        "timings": (StageTiming(1, 2),),
    }
    return Step(**(fields | changes))  # type: ignore[arg-type]


def test_parts_of_one_step_differ_in_columns_compression_and_times_only() -> None:
    same = step(tensor=TensorMeta("f32", 1, 24, "zs1"), timings=(StageTiming(5, 5),))
    assert header_of(same) == header_of(step())
    others: dict[str, object] = {
        "session": bytes([1] * 16),
        "epoch": 4,
        "sequence": 5,
        "first_node": 10,
        "parent": 7,
        "parents": (8,),
        "advance": 0,
        "want": (),
        "tensor": TensorMeta("f16", 1, 8),
        "timings": (),
        "covers": 2,
        "stop_stage": 1,
        "num_nodes": 1,
        "live": b"\x01",
        "tap": b"\x01",
    }
    assert set(others) == set(Step.__struct_fields__)
    for name, value in others.items():
        assert header_of(step(**{name: value})) != header_of(step()), name
    assert header_of(step(tensor=TensorMeta("f32", 2, 8))) != header_of(step())


def test_a_stage_is_as_slow_as_its_slowest_member() -> None:
    rng = Random(3)
    told = [tuple(StageTiming(*(rng.randrange(9) for _ in range(3))) for _ in range(2)) for _ in range(3)]
    for stage, timing in enumerate(slowest(told)):
        for name in ("queue_us", "compute_us", "price_us"):
            assert getattr(timing, name) == max(getattr(each[stage], name) for each in told)
    assert slowest([(), ()]) == ()
