"""Nodes that choose at the same time do not choose the same, and obey the scheduler that was named: placement_core."""

from __future__ import annotations

import heapq
import random
import statistics
from dataclasses import replace

import msgspec
import pytest

from fusion_node.daemon.placement_core import (
    INTENT_SPREAD_S,
    INTENT_WAIT_S,
    AssignmentDesk,
    Choice,
    Intend,
    Settled,
    may_drop,
    next_look_s,
)
from fusion_node.types import LayerRange, PeerId, UnixS
from p2p.records import sign_assignment
from scheduler.placement import Move, Policy, digest
from scheduler.swarm_rate import Host, SwarmRate, holders_per_layer
from tests.core.placement_swarms import Plane, host, random_swarm, work
from tests.vectors.make_data_plane import ASSIGNMENT, INITIATOR, NOW, RESPONDER


def join_together(
    joiners: list[Host], num_layers: int, plane: Plane, *, delay_s: float, rng: random.Random, slow_s: float = 0.0
) -> list[Host]:
    """All begin to look within a tenth of a second; what one announces, the others see after the delay.

    Args:
        slow_s: that the look of one takes at most, from what it sees to what it tells: some machines are busy.
    """
    told: dict[PeerId, list[tuple[float, LayerRange]]] = {joiner.peer: [] for joiner in joiners}
    settled: dict[PeerId, LayerRange] = {}
    choices = {joiner.peer: Choice(joiner, work(num_layers)) for joiner in joiners}
    by_peer = {joiner.peer: joiner for joiner in joiners}
    takes_s = {joiner.peer: rng.uniform(0, slow_s) for joiner in joiners}
    events = [(rng.uniform(0, 0.1), joiner.peer) for joiner in joiners]
    heapq.heapify(events)
    while events:
        now, peer = heapq.heappop(events)
        view = []
        for other, said in told.items():
            seen = [layers for at, layers in said if at + delay_s <= now]
            if other != peer and seen:
                view.append(replace(by_peer[other], held=seen[-1], is_ready=False))
        match choices[peer].look(view, plane):
            case Intend(move, wait_s):
                told[peer].append((now + takes_s[peer], move.layers))
                heapq.heappush(events, (now + takes_s[peer] + wait_s, peer))
            case Settled(decision):
                assert decision.layers is not None
                settled[peer] = decision.layers
                told[peer].append((now + takes_s[peer], decision.layers))
    return [replace(joiner, held=settled[joiner.peer]) for joiner in joiners]


@pytest.mark.parametrize("num_joiners", [5, 10, 20])
@pytest.mark.parametrize("seed", range(6))
def test_joiners_on_one_view_spread_over_all_layers(num_joiners: int, seed: int) -> None:
    """Together they could hold every layer one and a half times; one by one they do, and all at once as well."""
    rng = random.Random(seed)
    num_layers = 20
    size = -(-3 * num_layers // (2 * num_joiners))
    joiners = [host(f"{seed}-{index}", size) for index in range(num_joiners)]
    placed = join_together(joiners, num_layers, Plane(), delay_s=0.5, rng=rng)
    counts = holders_per_layer([h.held for h in placed], num_layers)
    one_by_one: list[Host] = []
    for joiner in joiners:
        result = Choice(joiner, work(num_layers)).look(one_by_one, Plane())
        decision = result.move if isinstance(result, Intend) else result.decision
        one_by_one.append(replace(joiner, held=decision.layers))
    alone = holders_per_layer([h.held for h in one_by_one], num_layers)
    assert sum(map(bool, counts)) >= sum(map(bool, alone)) - 1
    assert max(counts) <= max(alone) + 1


def test_joining_at_once_is_worth_about_as_much_as_one_by_one() -> None:
    shares = []
    for seed in range(8):
        joiners, plane = random_swarm(8, seed, capacities=(4, 8))
        placed = join_together(joiners, 12, plane, delay_s=0.3, rng=random.Random(seed))
        one_by_one: list[Host] = []
        for joiner in joiners:
            result = Choice(joiner, work(12)).look(one_by_one, plane)
            decision = result.move if isinstance(result, Intend) else result.decision
            one_by_one.append(replace(joiner, held=decision.layers))
        rate = SwarmRate(joiners, work(12), plane)
        together, alone = (rate.worth([h.held for h in each]) for each in (placed, one_by_one))
        assert together.num_covered == 12, seed
        shares.append(together.tokens_per_s / alone.tokens_per_s)
    assert statistics.median(shares) >= 0.7


def test_without_looking_again_all_joiners_would_take_the_same() -> None:
    joiners = [host(f"joiner-{index}", 5) for index in range(5)]
    first = [Choice(joiner, work(20)).look([], Plane()) for joiner in joiners]
    assert all(isinstance(each, Intend) for each in first)
    assert len({each.move.layers for each in first if isinstance(each, Intend)}) == 1


def test_the_lowest_digest_keeps_its_choice_and_the_other_chooses_again() -> None:
    low, high = sorted((host("a", 5), host("b", 5)), key=lambda h: digest(h.peer))
    choices = {h.peer: Choice(h, work(10)) for h in (low, high)}
    intents = {h.peer: choices[h.peer].look([], Plane()) for h in (low, high)}
    seen = {}
    for h in (low, high):
        intent = intents[h.peer]
        assert isinstance(intent, Intend)
        assert INTENT_WAIT_S <= intent.wait_s <= INTENT_WAIT_S + INTENT_SPREAD_S
        seen[h.peer] = replace(h, held=intent.move.layers, is_ready=False)
    keeps = choices[low.peer].look([seen[high.peer]], Plane())
    assert isinstance(keeps, Intend)
    assert keeps.move.layers == LayerRange(0, 5)
    # So long that the other one has looked.
    assert keeps.wait_s >= INTENT_WAIT_S + INTENT_SPREAD_S
    again = choices[high.peer].look([seen[low.peer]], Plane())
    assert isinstance(again, Intend)
    assert again.move.layers == LayerRange(5, 10)
    assert isinstance(choices[high.peer].look([seen[low.peer]], Plane()), Settled)
    seen[high.peer] = replace(high, held=again.move.layers, is_ready=False)
    kept = choices[low.peer].look([seen[high.peer]], Plane())
    assert isinstance(kept, Settled)
    assert kept.decision.layers == LayerRange(0, 5)


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_intent_that_was_seen_too_late_by_one_who_loads_gives_way_itself(is_ready: bool) -> None:
    """The other one has a higher digest, but has looked before this one's announcement reached it."""
    low, high = sorted((host("a", 5), host("b", 5)), key=lambda h: digest(h.peer))
    choices = {h.peer: Choice(h, work(10)) for h in (low, high)}
    for h in (low, high):
        assert isinstance(choices[h.peer].look([], Plane()), Intend)
    settled = choices[high.peer].look([], Plane())
    assert isinstance(settled, Settled)
    taken = replace(high, held=settled.decision.layers, is_ready=is_ready)
    if not is_ready:
        # It might still give way: it has not had its time.
        waits = choices[low.peer].look([taken], Plane())
        assert isinstance(waits, Intend)
        assert waits.move.layers == LayerRange(0, 5)
    again = choices[low.peer].look([taken], Plane())
    assert isinstance(again, Intend)
    assert again.move.layers == LayerRange(5, 10)
    assert isinstance(choices[low.peer].look([taken], Plane()), Settled)


@pytest.mark.parametrize("slow_s", [1.0, 3.0, 6.0])
def test_joiners_on_machines_of_unlike_speed_take_different_layers(slow_s: float) -> None:
    for seed in range(200):
        joiners = [host(f"{seed}-{index}", 5) for index in range(2 + seed % 3)]
        placed = join_together(joiners, 5 * len(joiners), Plane(), delay_s=0.3, rng=random.Random(seed), slow_s=slow_s)
        held = sorted(str(h.held) for h in placed)
        assert len(set(held)) == len(joiners), (seed, held)


def test_whoever_was_there_first_is_reckoned_with_whatever_its_digest() -> None:
    low, high = sorted((host("a", 5), host("b", 5)), key=lambda h: digest(h.peer))
    loading = replace(high, held=LayerRange(0, 5), is_ready=False)
    choice = Choice(low, work(10))
    first = choice.look([loading], Plane())
    assert isinstance(first, Intend)
    assert first.move.layers == LayerRange(5, 10)
    assert isinstance(choice.look([loading], Plane()), Settled)


def test_a_node_that_serves_and_stays_announces_nothing() -> None:
    own = host("own", 10, (0, 10))
    settled = Choice(own, work(10)).look([], Plane())
    assert isinstance(settled, Settled)
    assert settled.decision.layers == LayerRange(0, 10)


def test_layers_are_dropped_only_when_somebody_else_is_ready() -> None:
    names = sorted(("a", "b"), key=lambda name: digest(PeerId(name)))
    own, low = host(names[1], 5, (0, 5)), host(names[0], 5, (0, 5))
    move = Move(own.peer, LayerRange(5, 10), (LayerRange(5, 10),), (LayerRange(0, 5),), 0, 0.0, "")
    assert may_drop(own, move, [low], work(10))
    assert not may_drop(own, move, [replace(low, is_ready=False)], work(10))
    assert not may_drop(own, move, [], work(10))
    # The one with the lower digest is relied on by the other, unless a scheduler sees to it.
    reverse = replace(move, peer=low.peer)
    assert not may_drop(low, reverse, [own], work(10))
    assert may_drop(low, reverse, [own], work(10), is_assigned=True)


def test_a_node_looks_sooner_while_layers_are_missing() -> None:
    rng = random.Random(1)
    assert max(next_look_s(rng, are_missing=True) for _ in range(100)) < 70
    assert min(next_look_s(rng, are_missing=False) for _ in range(100)) > 400


# assignments


OWN = Host(INITIATOR.peer_id, 10, 0.002, LayerRange(0, 10))
OTHER = host("other", 10, (0, 10))


def desk(scheduler: PeerId | None = RESPONDER.peer_id) -> AssignmentDesk:
    return AssignmentDesk(INITIATOR.peer_id, scheduler, "ab" * 32, work(30))


def signed(**changes: object) -> bytes:
    return sign_assignment(msgspec.structs.replace(ASSIGNMENT, **changes), RESPONDER)


def received(
    envelope: bytes, *, at: AssignmentDesk | None = None, own: Host = OWN, source: PeerId = RESPONDER.peer_id
) -> LayerRange | str:
    return (at or desk()).receive(envelope, source=source, own=own, others=[OTHER], now=UnixS(NOW + 1))


def test_an_assignment_of_the_named_scheduler_is_obeyed_once() -> None:
    place = desk()
    assert received(signed(), at=place) == LayerRange(10, 20)
    assert received(signed(), at=place) == "the assignment is older than one that was obeyed"
    assert received(signed(sequence=2), at=place) == "the assignment is older than one that was obeyed"
    assert received(signed(sequence=4), at=place) == LayerRange(10, 20)


@pytest.mark.parametrize(
    ("envelope", "own", "source", "why"),
    [
        (signed(), OWN, INITIATOR.peer_id, "another scheduler"),
        (sign_assignment(msgspec.structs.replace(ASSIGNMENT, scheduler=INITIATOR.peer_id), INITIATOR), OWN,
         RESPONDER.peer_id, "another scheduler"),
        (sign_assignment(ASSIGNMENT, INITIATOR), OWN, RESPONDER.peer_id, "wrong-key"),
        (signed(node=RESPONDER.peer_id), OWN, RESPONDER.peer_id, "another node"),
        (signed(model_id="cd" * 32), OWN, RESPONDER.peer_id, "another model"),
        (signed(start=25, stop=35), OWN, RESPONDER.peer_id, "has 30 layers"),
        (signed(start=5, stop=20), OWN, RESPONDER.peer_id, "10 layers fit here, not 15"),
        (signed(expires_at=NOW + 0.5), OWN, RESPONDER.peer_id, "expired"),
        (signed(), replace(OWN, is_pinned=True), RESPONDER.peer_id, "--layers"),
        (signed(), replace(OWN, held=LayerRange(5, 15)), RESPONDER.peer_id, "") ,
        (signed(), replace(OWN, held=LayerRange(8, 18)), RESPONDER.peer_id, ""),
        (signed(start=20, stop=30), replace(OWN, held=LayerRange(5, 15)), RESPONDER.peer_id, "nobody else serves"),
        (b"\x00" * 40, OWN, RESPONDER.peer_id, "malformed"),
    ],
)  # fmt: skip
def test_any_other_assignment_is_refused_with_the_reason(envelope: bytes, own: Host, source: PeerId, why: str) -> None:
    answer = received(envelope, own=own, source=source)
    assert answer == LayerRange(10, 20) if not why else isinstance(answer, str) and why in answer
    place = desk()
    received(envelope, at=place, own=own, source=source)
    assert place.last_sequence == (0 if why else 3)


def test_a_node_without_a_scheduler_takes_no_assignments() -> None:
    answer = received(signed(), at=desk(None))
    assert isinstance(answer, str)
    assert "--scheduler" in answer


def test_an_assignment_where_no_range_may_begin_is_refused() -> None:
    task = work(30, first_layers=frozenset({0, 8, 16, 24}))
    place = AssignmentDesk(INITIATOR.peer_id, RESPONDER.peer_id, "ab" * 32, task)
    assert "no range of this model" in str(received(signed(), at=place))
    assert received(signed(start=8, stop=16), at=place) == LayerRange(8, 16)


def test_policy_is_handed_to_the_choice() -> None:
    names = sorted(("a", "b"), key=lambda name: digest(PeerId(name)))
    own = replace(host(names[1], 6, (0, 6)), held_for_s=5.0)
    others = [host(names[0], 6, (0, 6)), host("c", 6, (6, 12), layer_s=0.01)]
    stay = Choice(own, work(12), Policy(min_gain=0.1)).look(others, Plane())
    assert isinstance(stay, Settled)
    assert stay.decision.layers == own.held
    eager = Choice(own, work(12), Policy(min_gain=0.1, min_dwell_s=0.0)).look(others, Plane())
    assert isinstance(eager, Intend)
