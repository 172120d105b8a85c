"""p2p.relay_core: which relays, when they are renewed, and what takes the place of one that is gone."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from fusion_node.types import MonotonicS, PeerId
from p2p.addresses import PeerAddress
from p2p.identity import Identity
from p2p.relay_core import (
    GIVE_UP_AFTER_S,
    NUM_RELAYS,
    RENEW_S,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    Candidate,
    Command,
    RelayCore,
    Release,
    Reserve,
)

OWN = Identity.generate().peer_id
PEERS = [Identity.generate().peer_id for _ in range(8)]


def candidate(number: int, *hosts: str, round_trip_s: float | None = None) -> Candidate:
    peer = PEERS[number]
    addresses = tuple(PeerAddress.of(host, 4600, peer) for host in hosts or (f"45.{number + 1}.0.1",))
    return Candidate(peer, addresses, round_trip_s)


class Shell:
    """Carries commands out at once: ``answers`` says who agrees."""

    def __init__(self, seed: int = 0) -> None:
        self.core = RelayCore(OWN, random.Random(seed))
        self.refusing: set[PeerId] = set()
        self.now = MonotonicS(100.0)
        self.asked: list[PeerId] = []
        self.released: list[PeerId] = []

    def do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Reserve(relay, addresses):
                    self.asked.append(relay)
                    if relay in self.refusing:
                        self.do(self.core.refused(relay, self.now))
                    else:
                        self.do(self.core.reserved(relay, addresses[0], 120.0, self.now))
                case Release(relay):
                    self.released.append(relay)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_timer()) is not None and due <= end:
            assert due >= self.now, "a timer that is due was not handled"
            self.now = due
            self.do(self.core.handle_timer(self.now))
        self.now = MonotonicS(end)

    def start(self, *candidates: Candidate) -> None:
        self.do(self.core.offer(candidates, self.now))
        self.do(self.core.want(True, self.now))


def test_none_is_asked_before_relays_are_wanted() -> None:
    shell = Shell()
    shell.do(shell.core.offer([candidate(0), candidate(1)], shell.now))
    assert shell.asked == []
    assert shell.core.addresses == []


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_in_different_subnets_are_taken(seed: int) -> None:
    shell = Shell(seed)
    shell.start(
        candidate(0, "45.1.0.1", round_trip_s=0.010),
        candidate(1, "45.1.0.2", round_trip_s=0.001),
        candidate(2, "45.1.0.3", round_trip_s=0.010),
        candidate(3, round_trip_s=0.100),
        candidate(4, round_trip_s=0.900),
        candidate(5),
    )
    # The nearest of the first subnet, then those of others by their round trip.
    assert shell.core.held == [PEERS[1], PEERS[3], PEERS[5]]


def test_one_subnet_is_better_than_too_few_relays() -> None:
    shell = Shell()
    shell.start(candidate(0, "45.1.0.1"), candidate(1, "45.1.0.2"))
    assert sorted(shell.core.held) == sorted(PEERS[:2])


def test_addresses_lead_through_the_relay_to_this_node() -> None:
    shell = Shell()
    shell.start(candidate(0, "45.1.0.1", "10.0.0.1", "10.0.0.2"))
    assert [str(address) for address in shell.core.addresses] == [
        f"/ip4/45.1.0.1/tcp/4600/p2p/{PEERS[0]}/p2p-circuit/p2p/{OWN}",
        f"/ip4/10.0.0.1/tcp/4600/p2p/{PEERS[0]}/p2p-circuit/p2p/{OWN}",
    ]


def test_the_address_that_worked_comes_first() -> None:
    shell = Shell()
    both = candidate(0, "45.1.0.1", "45.2.0.1")
    shell.core.offer([both], shell.now)
    shell.core.want(True, shell.now)
    shell.core.reserved(PEERS[0], both.addresses[1], 120.0, shell.now)
    assert [address.host for address in shell.core.addresses] == ["45.2.0.1", "45.1.0.1"]


def test_reservations_are_renewed_long_before_they_end() -> None:
    shell = Shell()
    shell.start(candidate(0))
    shell.advance(10 * RENEW_S + 1)
    assert shell.asked == [PEERS[0]] * 11
    assert shell.core.held == [PEERS[0]]


def test_a_lost_relay_is_replaced_in_the_same_call_and_asked_again_later() -> None:
    shell = Shell()
    shell.start(*map(candidate, range(NUM_RELAYS + 1)))
    gone = shell.core.held[0]
    shell.refusing.add(gone)
    shell.do(shell.core.lost(gone, shell.now))
    assert len(shell.core.held) == NUM_RELAYS
    assert gone not in shell.core.held
    assert all(address.via != gone for address in shell.core.addresses)


def test_a_relay_that_fails_to_renew_is_given_up_at_once() -> None:
    shell = Shell()
    shell.start(candidate(0))
    shell.refusing.add(PEERS[0])
    shell.advance(RENEW_S)
    assert shell.core.held == []
    assert shell.core.addresses == []


def test_a_lost_relay_without_replacement_is_asked_again_at_once_and_then_soon() -> None:
    """The way to it may have changed, as when a router gets another address."""
    shell = Shell()
    shell.start(candidate(0))
    shell.advance(RETRY_FIRST_S)
    shell.do(shell.core.lost(PEERS[0], shell.now))
    assert shell.core.held == [PEERS[0]]
    shell.refusing.add(PEERS[0])
    shell.advance(RETRY_FIRST_S)
    shell.do(shell.core.lost(PEERS[0], shell.now))
    assert shell.core.held == []
    shell.refusing.clear()
    shell.advance(RETRY_FIRST_S)
    assert shell.core.held == [PEERS[0]]


def test_a_relay_that_is_lost_whenever_it_has_agreed_is_not_asked_without_pause() -> None:
    shell = Shell()
    shell.start(candidate(0))
    for _ in range(20):
        shell.do(shell.core.lost(PEERS[0], shell.now))
    assert len(shell.asked) == 1


def test_a_relay_that_was_lost_is_asked_after_others() -> None:
    for seed in range(10):
        shell = Shell(seed)
        shell.start(*map(candidate, range(NUM_RELAYS + 2)))
        shell.advance(RETRY_FIRST_S)
        gone = shell.core.held[0]
        shell.do(shell.core.lost(gone, shell.now))
        assert shell.asked[-1] != gone


def test_a_relay_that_rests_is_asked_at_once_when_there_is_a_connection_with_it_again() -> None:
    shell = Shell()
    shell.refusing.add(PEERS[0])
    shell.start(candidate(0))
    shell.advance(RETRY_MAX_S)
    num_asked = len(shell.asked)
    shell.refusing.clear()
    shell.do(shell.core.connected(PEERS[1], shell.now))
    assert len(shell.asked) == num_asked
    shell.do(shell.core.connected(PEERS[0], shell.now))
    assert shell.core.held == [PEERS[0]]
    shell.do(shell.core.connected(PEERS[0], shell.now))
    assert len(shell.asked) == num_asked + 1


def test_pauses_between_refusals_grow_and_stay_bounded() -> None:
    shell = Shell()
    shell.refusing.add(PEERS[0])
    shell.start(candidate(0))
    shell.advance(3600)
    # 5 + 10 + ... + 160 s are six pauses, then one in five minutes.
    assert 10 <= len(shell.asked) <= 7 + 3600 / RETRY_MAX_S
    shell.refusing.clear()
    shell.advance(RETRY_MAX_S)
    assert shell.core.held == [PEERS[0]]


def test_lost_while_a_renewal_is_under_way_counts_once() -> None:
    shell = Shell()
    shell.start(candidate(0))
    later = MonotonicS(shell.now + RENEW_S)
    assert len(shell.core.handle_timer(later)) == 1
    assert shell.core.lost(PEERS[0], later) == []
    shell.core.refused(PEERS[0], later)
    assert shell.core.num_lost == 1


def test_relays_are_kept_for_a_while_when_they_are_not_wanted_any_more() -> None:
    shell = Shell()
    shell.start(candidate(0))
    shell.do(shell.core.want(False, shell.now))
    shell.advance(GIVE_UP_AFTER_S / 2)
    assert shell.core.held == [PEERS[0]]
    shell.do(shell.core.want(True, shell.now))
    shell.advance(2 * GIVE_UP_AFTER_S)
    assert shell.core.held == [PEERS[0]]
    shell.do(shell.core.want(False, shell.now))
    shell.advance(GIVE_UP_AFTER_S + RENEW_S)
    assert shell.core.held == []
    assert shell.released == [PEERS[0]]


def test_a_relay_that_is_held_outlives_its_record() -> None:
    shell = Shell()
    shell.start(candidate(0))
    shell.do(shell.core.offer([candidate(1)], shell.now))
    assert shell.core.held == [PEERS[0], PEERS[1]]


def test_a_host_that_is_started_anew_asks_again() -> None:
    shell = Shell()
    shell.start(candidate(0))
    shell.core.host_down()
    shell.do(shell.core.offer([candidate(0), candidate(1)], shell.now))
    shell.do(shell.core.want(True, shell.now))
    shell.advance(10 * RENEW_S)
    assert shell.asked == [PEERS[0]], "there is no host to ask with"
    assert shell.core.addresses == []
    assert shell.core.next_timer() is None
    shell.do(shell.core.host_up(shell.now))
    assert sorted(shell.core.held) == sorted(PEERS[:2])


def test_we_are_not_our_own_relay() -> None:
    shell = Shell()
    shell.start(Candidate(OWN, (PeerAddress.of("45.1.0.1", 4600, OWN),)))
    assert shell.asked == []
