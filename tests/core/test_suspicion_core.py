"""Who holds up a group: members that wait for one another, and one of them that lies about it, or keeps things back."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_node.client.suspicion_core import MAX_CONTRADICTIONS, WAITED_MS, Contradictions, judge
from fusion_node.types import PeerId
from p2p.messages import Standing

A, B, C, D, E = PEERS = [PeerId(name) for name in "abcde"]
LONG = 10 * WAITED_MS


def at(num_sent: int, *missing: PeerId, node: int = 5, waited_ms: int = LONG, has_rows: bool = True) -> Standing:
    return Standing(node, num_sent, tuple(PEERS.index(peer) for peer in missing), waited_ms, has_rows)


def convicted(*contradictions: tuple[PeerId, ...]) -> frozenset[PeerId]:
    found = Contradictions()
    for peers in contradictions:
        found.add(frozenset(peers))
    return found.convicted


def test_member_that_waits_itself_is_not_the_one_that_holds_up_the_others() -> None:
    """C keeps back from A what it sends B: B is ahead and waits for A, which waits for C."""
    found = judge(PEERS[:3], {A: at(3, C), B: at(4, A), C: at(4, A)})
    assert (found.behind, found.contradictions, found.unknown) == ((), (frozenset((A, C)),), ())


def test_member_that_is_behind_and_waits_for_nobody_is_the_one() -> None:
    found = judge(PEERS[:3], {A: at(3, C), B: at(3, C), C: at(2)})
    assert (found.behind, found.contradictions) == ((C,), ())
    chain = judge(PEERS[:3], {A: at(3, B), B: at(2, C, node=5), C: at(0, node=5, has_rows=False)})
    assert (chain.behind, chain.contradictions) == ((C,), ())


@pytest.mark.parametrize("claim", [at(4), at(9, A), at(3, A), at(0, node=6, has_rows=False)], ids=str)
def test_member_that_sends_nobody_anything_and_says_that_it_has_contradicts_all(claim: Standing) -> None:
    found = judge(PEERS[:3], {A: at(3, C), B: at(3, C), C: claim})
    assert found.behind == ()
    assert convicted(*map(tuple, found.contradictions)) == {C}


def test_of_two_nobody_can_be_convicted() -> None:
    found = judge(PEERS[:2], {A: at(3, B), B: at(3, A)})
    assert found.contradictions == (frozenset((A, B)),)
    assert convicted(*map(tuple, found.contradictions)) == frozenset()


def test_who_has_not_said_how_far_it_is_is_told_apart() -> None:
    found = judge(PEERS[:3], {A: at(3, C), B: at(3, C)})
    assert (found.behind, found.contradictions, found.unknown) == ((), (), (C,))


def test_what_may_still_be_on_its_way_is_no_contradiction() -> None:
    assert judge(PEERS[:2], {A: at(3, B, waited_ms=WAITED_MS - 1), B: at(3)}) == judge(PEERS[:2], {})


@pytest.mark.parametrize("index", [0, 7])
def test_member_that_waits_for_itself_or_nobody_is_at_fault(index: int) -> None:
    assert judge(PEERS[:3], {A: Standing(5, 3, (index,), LONG), B: at(3)}).behind == (A,)


def test_only_who_is_in_all_of_its_contradictions_alone_is_convicted() -> None:
    assert convicted((A, B)) == frozenset()
    assert convicted((A, B), (A, B)) == frozenset()
    assert convicted((A, B), (A, C)) == {A}
    assert convicted((A, B, E), (A, D, E)) == frozenset()  # A or E
    assert convicted((A, B, E), (A, D, E), (A, C)) == {A}
    assert convicted((A, B), (A, C), (D, E)) == {A}
    assert convicted((A, B), (A, C), (D, B), (D, C)) in ({A, D}, {B, C})  # two of four lie


def test_contradictions_are_bounded() -> None:
    found = Contradictions()
    for number in range(2 * MAX_CONTRADICTIONS):
        found.add(frozenset((A, PeerId(f"peer{number}"))))
    assert len(found._found) == MAX_CONTRADICTIONS


LIES: st.SearchStrategy[Standing] = st.builds(
    Standing,
    st.integers(4, 6),
    st.integers(0, 5),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([0, LONG]),
    st.booleans(),
)


def stalled(num: int, withheld: frozenset[tuple[int, int]]) -> Callable[[int], Standing]:
    """Where honest members of a group come to a stop when some members keep back all from some others, from exchange 2
    on; the same unit for all, of six exchanges."""
    sent = [1] * num
    lacks: list[tuple[int, ...]] = [()] * num
    for _ in range(8 * num):
        for me in range(num):
            at_ = sent[me] - 1
            lacks[me] = tuple(
                x for x in range(num) if x != me and (sent[x] <= at_ or ((x, me) in withheld and at_ >= 2))
            )
            if sent[me] < 6 and not lacks[me]:
                sent[me] += 1
    return lambda me: Standing(5, sent[me], lacks[me], LONG)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 5), st.data())
def test_one_liar_never_makes_an_honest_member_look_guilty(num: int, data: st.DataObject) -> None:
    liar = data.draw(st.integers(0, num - 1))
    kept_from = data.draw(st.sets(st.sampled_from([m for m in range(num) if m != liar]), min_size=1))
    where = stalled(num, frozenset((liar, each) for each in kept_from))
    standings = {PEERS[m]: where(m) for m in range(num) if m != liar}
    claim = data.draw(st.one_of(st.none(), LIES))
    if claim is not None:
        standings[PEERS[liar]] = claim
    found = judge(PEERS[:num], standings)
    assert set(found.behind) <= {PEERS[liar]}
    assert set(found.unknown) <= {PEERS[liar]}
    assert all(PEERS[liar] in each for each in found.contradictions)
    assert convicted(*map(tuple, found.contradictions)) <= {PEERS[liar]}
    assert found.behind or found.unknown or found.contradictions, "somebody is to be suspected"
    if claim is not None and len(kept_from) == num - 1 > 1 and not found.behind and claim.place >= (5, 3):
        assert convicted(*map(tuple, found.contradictions)) == {PEERS[liar]}


def test_one_liar_over_many_groups_is_the_only_one_to_be_convicted() -> None:
    for liar, order in itertools.product(PEERS, itertools.permutations(range(4))):
        honest = [peer for peer in PEERS if peer != liar]
        found = Contradictions()
        for index in order:
            found.add(frozenset((liar, honest[index])))
            assert found.convicted <= {liar}
        assert found.convicted == {liar}
