"""Whom without an address a user waits for, and how often at most."""

from __future__ import annotations

from fusion_node.client.undialled_core import FIRST_PAUSE_S, MAX_PAUSE_S, Undialled
from fusion_node.types import ModelId, MonotonicS
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord

MODEL, OTHER = ModelId("ab" * 32), ModelId("cd" * 32)
NONE: frozenset[str] = frozenset()


def node(peer: str, start: int, stop: int, *, address: str = "", model: ModelId = MODEL, part: str = "") -> NodeRecord:
    shard = ShardRecord(model, "tiny", start, stop, 30, "f16r32", (0.001, 0.001, 0.001), 4096, slice=part)
    addresses = (address,) if address else ()
    return NodeRecord(PROTOCOL_VERSION, peer, 1, 0.0, 60.0, addresses, (), "cpu", 0, (shard,), 0, "test")


def at(seconds: float) -> MonotonicS:
    return MonotonicS(seconds)


def test_only_who_serves_what_nobody_with_an_address_serves_is_waited_for() -> None:
    records = [
        node("a", 0, 6, address="a:1"),
        node("b", 5, 12, address="b:1"),
        node("within", 2, 11),
        node("beyond", 10, 20),
        node("other", 0, 30, model=OTHER),
        node("sliced", 2, 11, part="0/2"),
    ]
    assert Undialled().wanted(records, MODEL, now=at(0)) == {"beyond", "sliced"}
    assert Undialled().wanted(records, None, now=at(0)) == {"beyond", "sliced", "other"}


def test_who_was_waited_for_in_vain_is_waited_for_no_more_while_its_record_lives() -> None:
    waits, now = Undialled(), at(0)
    wanted = waits.wanted([node("x", 0, 6)], MODEL, now=now)
    assert wanted == {"x"}
    waits.waited(wanted, wanted, now=now)
    now = at(2 * MAX_PAUSE_S)
    assert waits.wanted([node("x", 0, 6)], MODEL, now=now) == NONE
    assert waits.wanted([], MODEL, now=now) == NONE
    assert waits.wanted([node("x", 0, 6)], MODEL, now=now) == {"x"}, "it is not remembered for ever"


def test_a_thousand_identities_an_hour_cost_seven_waits() -> None:
    waits, num_waits = Undialled(), 0
    for number in range(1000):
        now = at(3.6 * number)
        wanted = waits.wanted([node(f"x{number}", number % 30, 30)], MODEL, now=now)
        num_waits += bool(wanted)
        if wanted:
            waits.waited(wanted, wanted, now=now)
    assert num_waits == 7


def test_after_a_wait_that_brought_an_address_the_pause_is_short_again() -> None:
    waits, now = Undialled(), at(0)
    for number in range(4):
        wanted = waits.wanted([node(f"x{number}", 0, 6)], MODEL, now=now)
        assert wanted
        waits.waited(wanted, wanted, now=now)
        now = at(now + 2**number * FIRST_PAUSE_S)
    wanted = waits.wanted([node("y", 0, 6)], MODEL, now=now)
    waits.waited(wanted, NONE, now=now)
    later = at(now + 16 * FIRST_PAUSE_S)
    wanted = waits.wanted([node("z", 0, 6)], MODEL, now=later)
    waits.waited(wanted, NONE, now=later)
    assert waits.wanted([node("u", 0, 6)], MODEL, now=at(later + FIRST_PAUSE_S - 1)) == NONE
    assert waits.wanted([node("u", 0, 6)], MODEL, now=at(later + FIRST_PAUSE_S)) == {"u"}
