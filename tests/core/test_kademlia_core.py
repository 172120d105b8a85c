"""Disjoint look-ups and diversity in routing tables: the rules. What they achieve: tests/sim/test_kademlia_sim.py."""

from __future__ import annotations

import random

import pytest

from p2p.identity import Identity
from p2p.kademlia_core import (
    MAX_PER_BUCKET,
    MAX_PER_TABLE,
    NUM_PATHS,
    REPLICATION,
    Contact,
    Lookup,
    diverse_first,
    may_enter,
    place_of,
    place_of_key,
    take_turns,
    to_displace,
)

TARGET = place_of_key(b"key")


def contact(distance: int, *networks: str) -> Contact:
    """A contact at this distance from the target, named by it."""
    return Contact(f"at {distance}", TARGET ^ distance, networks)


def distances(contacts: list[Contact]) -> list[int]:
    return [contact.place ^ TARGET for contact in contacts]


def test_place_of_a_peer_is_the_hash_of_its_bytes() -> None:
    peer = Identity.from_seed(bytes(32)).peer_id
    assert f"{place_of(peer):064x}" == "566b086a16b7d002b1b1f465d5f837985b1fbde5d760234fc435819fea030b39"
    assert place_of_key(b"") == 0xE3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855


def test_seeds_are_dealt_out_and_each_peer_is_asked_by_one_path() -> None:
    lookup = Lookup(TARGET, "us", [contact(distance) for distance in range(1, 31)], num_paths=3, width=4)
    asked: list[str] = []
    while asking := lookup.to_ask():
        assert len(asking) <= 3
        asked += [each.peer for each in asking]
        for each in asking:
            # All of them name the same peers, which nevertheless only one path may ask.
            lookup.answered(each.peer, [contact(distance) for distance in range(100, 110)])
    assert len(asked) == len(set(asked)) == lookup.num_queries == 12
    assert sorted(asked) == sorted(f"at {distance}" for distance in range(1, 13))
    assert lookup.is_done


def test_answer_of_one_path_does_not_reach_the_others() -> None:
    lookup = Lookup(TARGET, "us", [contact(1000), contact(1001)], num_paths=2, width=2)
    assert distances(lookup.to_ask()) == [1000, 1001]
    lookup.answered("at 1000", [contact(1), contact(2)])
    assert distances(lookup.to_ask()) == [1]
    lookup.answered("at 1001", [contact(2), contact(3)])
    # The liar's neighbours and the other path's: 2 is asked once, by whichever comes first.
    assert distances(lookup.to_ask()) == [2]
    lookup.answered("at 2", [])
    lookup.answered("at 1", [])
    assert distances(lookup.to_ask()) == [3]


def test_look_up_asks_neither_itself_nor_anybody_twice() -> None:
    lookup = Lookup(TARGET, "at 5", [contact(5), contact(9)], num_paths=1)
    assert distances(lookup.to_ask()) == [9]
    assert lookup.to_ask() == []
    assert not lookup.is_done
    lookup.answered("at 9", [contact(5), contact(9)])
    assert lookup.to_ask() == []
    assert lookup.is_done


def test_look_up_without_seeds_is_done_at_once() -> None:
    lookup = Lookup(TARGET, "us", [])
    assert lookup.to_ask() == []
    assert lookup.is_done
    assert lookup.closest() == []


def test_failed_peers_make_way_and_are_not_in_the_result() -> None:
    lookup = Lookup(TARGET, "us", [contact(distance) for distance in range(1, 11)], num_paths=1, width=3)
    while asking := lookup.to_ask():
        for each in asking:
            if (each.place ^ TARGET) % 2:
                lookup.failed(each.peer)
            else:
                lookup.answered(each.peer, [])
    assert distances(lookup.closest()) == [2, 4, 6]


def test_invented_neighbours_cannot_make_it_endless() -> None:
    lookup = Lookup(TARGET, "us", [contact(10**9)], num_paths=1, max_queries=50)
    distance = 10**8
    while asking := lookup.to_ask():
        for each in asking:
            lookup.answered(each.peer, [contact(distance - offset) for offset in range(100)])
            distance -= 100
    assert lookup.num_queries == 50
    assert lookup.is_done


def test_answer_holds_no_more_contacts_than_an_honest_one() -> None:
    lookup = Lookup(TARGET, "us", [contact(10**9)], num_paths=1, width=10_000, max_queries=10_000)
    lookup.to_ask()
    lookup.answered("at 1000000000", [contact(distance) for distance in range(1, 5000)])
    num_asked = 0
    while asking := lookup.to_ask():
        for each in asking:
            num_asked += 1
            lookup.failed(each.peer)
    assert num_asked == REPLICATION


def ask_all(lookup: Lookup) -> list[int]:
    """Lets everybody answer with nothing; the distances in the order in which they were asked."""
    asked: list[int] = []
    while asking := lookup.to_ask():
        for each in asking:
            asked.append(each.place ^ TARGET)
            lookup.answered(each.peer, [])
    return asked


def test_network_that_has_had_its_share_is_asked_last() -> None:
    near = [contact(distance, "8.8.0.0/16") for distance in range(1, 20)]
    far = [contact(distance, f"9.{distance}.0.0/16") for distance in range(1000, 1010)]
    lookup = Lookup(TARGET, "us", near + far, num_paths=1, width=4, per_network=2)
    assert ask_all(lookup) == [1, 2, 1000, 1001, 1002, 1003]


def test_swarm_in_one_network_is_asked_all_the_same() -> None:
    lookup = Lookup(TARGET, "us", [contact(distance, "8.8.0.0/16") for distance in range(1, 20)], per_network=2)
    assert sorted(ask_all(lookup)) == list(range(1, 20))
    assert distances(lookup.closest()) == list(range(1, 20))


def test_invented_peers_do_not_put_off_the_network_that_they_are_said_to_be_in() -> None:
    invented = [contact(distance, "8.8.0.0/16") for distance in range(1, 20)]
    honest = [contact(500, "8.8.0.0/16"), contact(1000, "9.9.0.0/16")]
    lookup = Lookup(TARGET, "us", invented + honest, num_paths=1, width=1, per_network=2)
    asked = []
    while asking := lookup.to_ask():
        for each in asking:
            asked.append(each.place ^ TARGET)
            lookup.answered(each.peer, []) if each in honest else lookup.failed(each.peer)
    assert asked == [*range(1, 20), 500]


def test_network_of_a_peer_is_that_of_where_it_answers() -> None:
    named = [contact(distance, "8.8.0.0/16") for distance in range(1, 5)]
    lookup = Lookup(TARGET, "us", [*named, contact(100, "9.9.0.0/16")], num_paths=1, width=4, per_network=2)
    asked = []
    while asking := lookup.to_ask():
        for each in asking:
            asked.append(each.place ^ TARGET)
            lookup.answered(each.peer, [], [f"10.{len(asked)}.0.0/16"])
    assert asked == [1, 2, 3, 4]


def test_result_prefers_networks_within_their_share() -> None:
    near = [contact(distance, "8.8.0.0/16") for distance in range(1, 20)]
    far = [contact(distance, f"9.{distance}.0.0/16") for distance in range(1000, 1010)]
    lookup = Lookup(TARGET, "us", near + far, num_paths=1, width=100, parallel=100, per_network=4)
    ask_all(lookup)
    assert distances(lookup.closest()) == [*range(1, 11), *range(1000, 1010)]
    assert distances(lookup.closest(14)) == [1, 2, 3, 4, *range(1000, 1010)]


def test_every_path_has_its_part_in_the_result() -> None:
    lookup = Lookup(TARGET, "us", [contact(10**6), contact(10**6 + 1)], num_paths=2, width=30)
    while asking := lookup.to_ask():
        for each in asking:
            is_liar = each.peer == "at 1000000"
            lookup.answered(each.peer, [contact(d) for d in (range(1, 21) if is_liar else range(1000, 1020))])
    assert distances(lookup.closest(8)) == [1, 2, 3, 4, 1000, 1001, 1002, 1003]


def test_local_addresses_have_no_network_and_no_share() -> None:
    contacts = [contact(distance) for distance in range(100)]
    assert diverse_first(contacts, per_network=1) == contacts


@pytest.mark.parametrize(
    ("networks", "in_bucket", "in_table", "expected"),
    [
        ((), [("a",)] * 20, [("a",)] * 200, True),
        (("a",), [("a",)] * (MAX_PER_BUCKET - 1), [("a",)] * (MAX_PER_TABLE - 1), True),
        (("a",), [("a",)] * MAX_PER_BUCKET, [("a",)] * MAX_PER_BUCKET, False),
        (("a",), [], [("a",)] * MAX_PER_TABLE, False),
        (("b", "a"), [("a", "c")] * MAX_PER_BUCKET, [], False),
        (("b",), [("a", "c")] * 20, [("a",)] * 200, True),
    ],
)
def test_who_may_enter_a_table(
    networks: tuple[str, ...], in_bucket: list[tuple[str]], in_table: list[tuple[str]], expected: bool
) -> None:
    assert may_enter(networks, in_bucket, in_table) == expected


def test_any_order_of_answers_and_failures_ends_it_and_keeps_paths_apart() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        everybody = [contact(chance.getrandbits(32), *chance.sample("abcdef", chance.randrange(3))) for _ in range(60)]
        lookup = Lookup(TARGET, "us", chance.sample(everybody, 8), parallel=chance.randrange(1, 4))
        waiting: list[Contact] = []
        asked: set[str] = set()
        while True:
            asking = lookup.to_ask()
            assert asked.isdisjoint(each.peer for each in asking), seed
            asked.update(each.peer for each in asking)
            waiting += asking
            if not waiting:
                break
            each = waiting.pop(chance.randrange(len(waiting)))
            if chance.random() < 0.3:
                lookup.failed(each.peer)
            else:
                lookup.answered(each.peer, chance.sample(everybody, chance.randrange(30)))
        assert lookup.is_done, seed
        assert lookup.num_queries == len(asked) <= 60, seed
        result = distances(lookup.closest())
        assert result == sorted(result), seed
        assert {each.peer for each in lookup.closest()} <= asked, seed


def test_more_paths_than_seeds_are_no_error() -> None:
    lookup = Lookup(TARGET, "us", [contact(1)], num_paths=NUM_PATHS)
    assert distances(lookup.to_ask()) == [1]
    lookup.answered("at 1", [contact(2)])
    assert distances(lookup.to_ask()) == [2]


def test_turns_are_taken() -> None:
    assert list(take_turns([[1, 2, 3], [], [4], [5, 6]])) == [1, 4, 5, 2, 6, 3]
    assert list(take_turns([])) == []


@pytest.mark.parametrize(
    ("held", "newcomer", "expected"),
    [
        ({"a": ("x",), "b": ("y",), "c": ("y",)}, ("z",), "b"),
        ({"a": ("x",), "b": ("y",), "c": ("y",)}, (), "b"),
        ({"a": ("x",), "b": ("y",), "c": ("y",)}, ("x",), "b"),
        ({"a": ("x",), "b": ("y",), "c": ("y",)}, ("y",), None),
        ({"a": ("x",), "b": ("y",)}, ("z",), None),
        ({"a": (), "b": ()}, ("z",), None),
        ({}, ("z",), None),
    ],
)
def test_largest_network_makes_way_in_a_full_list(
    held: dict[str, tuple[str, ...]], newcomer: tuple[str, ...], expected: str | None
) -> None:
    assert to_displace(held, newcomer) == expected
