"""The judge of which addresses can be dialled: peers that are honest, lie, are silent, few, or gone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from fusion_node.types import PeerId
from p2p.reachability_core import (
    CONFIRMED_FOR_S,
    MAX_ASKED,
    MAX_OBSERVED_HOSTS,
    NONCE_BYTES,
    NONCE_LIFE_S,
    NUM_NEEDED,
    QUIET_S,
    RECHECK_AFTER_S,
    RETRY_FIRST_S,
    UNSEEN_FOR_S,
    Ask,
    ReachabilityCore,
)
from p2p.reachability_verdict import (
    Address,
    AddressState,
    NatClass,
    Observation,
    Outcome,
    Overall,
    Plane,
    Source,
    classify_nat,
)

OWN = "198.18.0.7"
"""This machine, with an address of its own."""
PUBLIC = "8.8.4.4"
"""The router in front of it, where there is one."""
PORTS = {Plane.CONTROL: 4600, Plane.DATA: 4601}


def control(host: str = OWN) -> Address:
    return Address(Plane.CONTROL, host, 4600)


def data(host: str = OWN) -> Address:
    return Address(Plane.DATA, host, 4601)


@dataclass
class Peer:
    """One who is asked. ``sees`` is the host from which this node's connections come to it."""

    sees: str = OWN
    is_silent: bool = False
    says: Callable[[Address, bool], str] = lambda address, could: Outcome.DELIVERED if could else Outcome.UNREACHABLE
    delivers: Callable[[Address, bool], bool] = lambda address, could: could


@dataclass
class Node:
    """The core with its swarm: every request is answered within the same moment."""

    dialable: set[Address] = field(default_factory=lambda: {control(), data()})
    local_host: str = OWN
    seed: int = 1
    now: float = 1000.0
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    asked: list[Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.core = ReachabilityCore(lambda: self.chance.randbytes(NONCE_BYTES), self.chance)
        self.set_candidates({control(): Source.INTERFACE, data(): Source.INTERFACE})

    def set_candidates(self, candidates: dict[Address, Source]) -> None:
        self.core.set_candidates(candidates, PORTS, now=self.now)

    def meet(self, *peers: Peer) -> list[PeerId]:
        met = []
        for peer in peers:
            name = PeerId(f"peer-{len(self.peers)}")
            self.peers[name] = peer
            self.core.peer_met(name, f"100.{100 + len(self.peers)}.0.1", now=self.now)
            met.append(name)
        self.run()
        return met

    def leave(self, *names: PeerId) -> None:
        for name in names:
            del self.peers[name]
            self.core.peer_gone(name, now=self.now)
        self.run()

    def run(self) -> None:
        self.core.handle_timer(self.now)
        while asks := self.core.requests(self.now):
            for ask in asks:
                self.asked.append(ask)
                self.answer(ask)

    def answer(self, ask: Ask) -> None:
        peer = self.peers[ask.peer]
        if peer.is_silent:
            self.core.unanswered(ask.peer, now=self.now)
            return
        outcomes = []
        for address, nonce in ask.nonces:
            if address.host != peer.sees:
                outcomes.append(str(Outcome.OTHER_HOST))
                continue
            could = address in self.dialable
            if peer.delivers(address, could):
                self.core.reached(address.plane, nonce, self.local_host, now=self.now)
            outcomes.append(peer.says(address, could))
        seen = Observation(self.local_host, 50_000 + len(self.asked), peer.sees, 50_000 + len(self.asked))
        self.core.answered(ask.peer, outcomes, seen, now=self.now)

    def pass_time(self, seconds: float) -> None:
        """Jumps from timer to timer, as a shell does."""
        end = self.now + seconds
        while (timer := self.core.next_timer(self.now)) is not None and timer <= end:
            self.now = timer
            self.run()
        self.now = end
        self.run()

    def state(self, address: Address) -> AddressState | None:
        found = [v for v in self.core.verdict(self.now).addresses if (v.plane, v.host) == (address.plane, address.host)]
        return found[0].state if found else None

    @property
    def overall(self) -> Overall:
        return self.core.verdict(self.now).overall


def liar_of_success() -> Peer:
    return Peer(says=lambda address, could: Outcome.DELIVERED, delivers=lambda address, could: False)


def liar_of_failure() -> Peer:
    return Peer(says=lambda address, could: Outcome.UNREACHABLE, delivers=lambda address, could: False)


def test_three_peers_confirm_both_planes() -> None:
    node = Node()
    names = node.meet(Peer(), Peer(), Peer(), Peer())
    assert node.core.announced() == [control(), data()]
    assert node.overall is Overall.PUBLIC
    verdict = node.core.verdict(node.now).addresses[0]
    assert len(set(verdict.confirmed_by)) == NUM_NEEDED
    assert set(verdict.confirmed_by) <= set(names)
    assert verdict.checked_age_s == 0.0


def test_nothing_is_announced_while_nobody_was_there_to_ask() -> None:
    node = Node()
    assert node.core.announced() == []
    assert node.core.candidates(Plane.CONTROL) == [control()]
    assert node.core.candidates(Plane.DATA) == [data()]
    assert node.overall is Overall.UNKNOWN


def test_in_a_swarm_of_two_the_one_peer_is_enough_and_the_next_two_are_asked_too() -> None:
    node = Node()
    first = node.meet(Peer())
    assert node.core.announced() == [control(), data()]
    node.meet(Peer())
    node.meet(Peer())
    confirmed_by = node.core.verdict(node.now).addresses[0].confirmed_by
    assert len(confirmed_by) == 3
    assert confirmed_by[0] == first[0]
    num_asked = sum(len(ask.nonces) for ask in node.asked)
    node.meet(Peer())
    assert sum(len(ask.nonces) for ask in node.asked) == num_asked  # a fourth has nothing to add


@pytest.mark.parametrize("num_liars", [1, 2, 3, 7])
def test_success_that_is_only_claimed_confirms_nothing(num_liars: int) -> None:
    node = Node(dialable=set())
    node.meet(*(liar_of_success() for _ in range(num_liars)))
    node.pass_time(NONCE_LIFE_S)
    assert node.core.announced() == []
    assert node.state(control()) is (AddressState.FAILED if num_liars >= NUM_NEEDED else AddressState.UNCONFIRMED)


@pytest.mark.parametrize("num_liars", [1, 2])
def test_one_or_two_liars_of_failure_change_nothing_beside_an_honest_peer(num_liars: int) -> None:
    node = Node()
    node.meet(*(liar_of_failure() for _ in range(num_liars)))
    assert node.state(control()) is AddressState.UNCONFIRMED
    node.meet(Peer())
    assert node.core.announced() == [control(), data()]
    assert node.overall is Overall.PUBLIC


def test_three_liars_of_failure_are_found_out_by_those_who_are_asked_later() -> None:
    node = Node()
    liars = node.meet(liar_of_failure(), liar_of_failure(), liar_of_failure())
    assert node.state(control()) is AddressState.FAILED
    node.meet(Peer(), Peer(), Peer())
    node.leave(*liars)
    node.pass_time(RETRY_FIRST_S)
    assert node.core.announced() == [control(), data()]


def test_address_that_cannot_be_dialled_fails_and_is_tried_ever_less_often() -> None:
    node = Node(dialable=set())
    node.meet(Peer(), Peer(), Peer(), Peer())
    assert node.state(control()) is AddressState.FAILED
    assert node.overall is Overall.BEHIND_NAT
    before = len(node.asked)
    node.pass_time(3600.0)
    # 30 + 60 + 120 + 240 + 480 s, then every 600 s: about ten rounds of three peers.
    assert 15 <= len(node.asked) - before <= 40
    node.dialable.add(control())
    node.pass_time(600.0)
    assert node.core.announced() == [control()]


def test_people_are_told_of_some_address_even_when_all_have_failed() -> None:
    node = Node(dialable=set())
    node.set_candidates({control(): Source.INTERFACE, control("198.18.0.8"): Source.INTERFACE})
    node.meet(Peer(), Peer(), Peer())
    assert node.core.candidates(Plane.CONTROL) == [control("198.18.0.8")]  # from where nobody sees it, nobody has tried
    node.set_candidates({control(): Source.INTERFACE})
    assert node.state(control()) is AddressState.FAILED
    assert node.core.candidates(Plane.CONTROL) == [control()]


def test_nonce_counts_once_for_its_plane_at_its_address_and_in_time() -> None:
    node = Node()
    node.core.peer_met(PeerId("a"), "100.64.0.1", now=node.now)
    (ask,) = node.core.requests(node.now)
    nonces = dict(ask.nonces)
    assert not node.core.reached(Plane.DATA, nonces[control()], OWN, now=node.now)
    assert not node.core.reached(Plane.CONTROL, nonces[control()], OWN, now=node.now)  # it is spent
    assert not node.core.reached(Plane.DATA, bytes(NONCE_BYTES), OWN, now=node.now)
    assert node.core.reached(Plane.DATA, nonces[data()], OWN, now=node.now)
    assert not node.core.reached(Plane.DATA, nonces[data()], OWN, now=node.now)
    node.core.answered(PeerId("a"), [Outcome.DELIVERED, Outcome.DELIVERED], None, now=node.now)
    assert node.core.announced() == [data()]
    assert node.core.num_stray_nonces == 4


def test_late_nonce_does_not_count() -> None:
    node = Node()
    node.core.peer_met(PeerId("a"), "100.64.0.1", now=node.now)
    (ask,) = node.core.requests(node.now)
    assert not node.core.reached(Plane.CONTROL, ask.nonces[0][1], OWN, now=node.now + NONCE_LIFE_S)


def test_nonce_brought_to_another_address_of_this_machine_is_a_failure() -> None:
    node = Node(local_host="10.0.0.9")
    node.meet(Peer(), Peer(), Peer())
    assert node.state(control()) is AddressState.FAILED
    assert "another address" in node.core.verdict(node.now).addresses[0].why


def test_nonce_that_comes_after_the_word_of_failure_counts() -> None:
    node = Node()
    node.core.peer_met(PeerId("a"), "100.64.0.1", now=node.now)
    (ask,) = node.core.requests(node.now)
    seen = Observation(OWN, 50_000, OWN, 50_000)
    node.core.answered(PeerId("a"), [Outcome.UNREACHABLE] * 2, seen, now=node.now)
    assert node.core.announced() == []
    assert node.core.reached(Plane.CONTROL, ask.nonces[0][1], OWN, now=node.now + 1.0)
    assert node.core.announced() == [control()]


def test_behind_a_router_that_forwards_the_port_the_seen_address_is_confirmed() -> None:
    node = Node(dialable={control(PUBLIC), data(PUBLIC)}, local_host="192.168.1.5")
    node.set_candidates({control("192.168.1.5"): Source.INTERFACE, data("192.168.1.5"): Source.INTERFACE})
    node.meet(*(Peer(sees=PUBLIC) for _ in range(3)))
    assert node.core.announced() == [control(PUBLIC), data(PUBLIC)]
    assert node.state(control("192.168.1.5")) is AddressState.UNCONFIRMED
    assert node.overall is Overall.PUBLIC
    assert node.core.verdict(node.now).seen_hosts == (PUBLIC,)


def test_behind_a_router_that_does_not_a_neighbour_confirms_the_private_address_and_the_node_needs_a_relay() -> None:
    home = "192.168.1.5"
    node = Node(dialable={control(home), data(home)}, local_host=home)
    node.set_candidates({control(home): Source.INTERFACE, data(home): Source.INTERFACE})
    node.meet(Peer(sees=home))
    assert node.overall is Overall.PUBLIC  # whoever is there can dial it
    node.meet(Peer(sees=PUBLIC))
    assert node.core.announced() == [control(home), data(home)]
    assert node.overall is Overall.BEHIND_NAT


def test_private_addresses_are_announced_after_public_ones() -> None:
    home, own = "192.168.1.5", "8.8.8.8"
    node = Node(dialable={control(home), control(own)})
    node.set_candidates({control(home): Source.INTERFACE, control(own): Source.INTERFACE})
    node.local_host = home
    node.meet(Peer(sees=home))
    node.local_host = own
    node.meet(Peer(sees=own))
    assert node.core.announced() == [control(own), control(home)]


def test_silent_peers_do_not_keep_an_address_from_being_confirmed() -> None:
    node = Node()
    node.meet(Peer(is_silent=True), Peer(is_silent=True), Peer())
    assert node.core.announced() == [control(), data()]
    before = len(node.asked)
    node.pass_time(3600.0)
    silent = [ask for ask in node.asked[before:] if node.peers[ask.peer].is_silent]
    assert 0 < len(silent) <= 2 * 12  # 15 s, doubling up to 600 s


def test_busy_peer_is_asked_again_later() -> None:
    busy = Peer(says=lambda address, could: Outcome.BUSY, delivers=lambda address, could: False)
    node = Node()
    node.meet(busy)
    assert node.state(control()) is AddressState.UNCONFIRMED
    busy.says, busy.delivers = Peer().says, Peer().delivers
    node.pass_time(QUIET_S)
    assert node.core.announced() == [control(), data()]


def test_confirmation_is_renewed_before_it_ends_by_other_peers_where_there_are_some() -> None:
    node = Node()
    node.meet(*(Peer() for _ in range(6)))
    first = set(node.core.verdict(node.now).addresses[0].confirmed_by)
    node.pass_time(RECHECK_AFTER_S)
    verdict = node.core.verdict(node.now).addresses[0]
    assert verdict.state is AddressState.CONFIRMED
    assert verdict.age_s == RECHECK_AFTER_S
    assert verdict.checked_age_s == 0.0
    assert not first & set(verdict.confirmed_by)
    assert len(first) == NUM_NEEDED


def test_confirmation_ends_when_nobody_can_be_asked_again() -> None:
    node = Node()
    node.leave(*node.meet(Peer(), Peer(), Peer()))
    node.pass_time(CONFIRMED_FOR_S - 1.0)
    assert node.core.announced() == [control(), data()]
    node.pass_time(1.0)
    assert node.core.announced() == []
    node.meet(Peer())
    assert node.core.announced() == [control(), data()]


def test_address_that_fails_its_check_is_dropped() -> None:
    node = Node()
    node.meet(Peer())
    node.dialable.discard(data())
    node.pass_time(RECHECK_AFTER_S)
    assert node.core.announced() == [control()]


def test_change_of_network_replaces_the_addresses_at_once() -> None:
    node = Node()
    node.meet(Peer(), Peer(), Peer())
    other = "198.18.9.9"
    node.local_host, node.dialable = other, {control(other), data(other)}
    for peer in node.peers.values():
        peer.sees = other
    node.set_candidates({control(other): Source.INTERFACE, data(other): Source.INTERFACE})
    assert node.core.announced() == []
    node.core.network_changed(now=node.now)
    node.run()
    assert node.core.announced() == [control(other), data(other)]


def test_seen_address_that_nobody_sees_any_more_is_dropped() -> None:
    node = Node(dialable={control(PUBLIC), data(PUBLIC)}, local_host="192.168.1.5")
    node.meet(Peer(sees=PUBLIC))
    assert node.core.announced() == [control(PUBLIC), data(PUBLIC)]
    node.leave(*node.peers)
    node.dialable = {control("8.8.8.8"), data("8.8.8.8")}
    node.meet(Peer(sees="8.8.8.8"))
    node.pass_time(UNSEEN_FOR_S)
    assert node.core.announced() == [control("8.8.8.8"), data("8.8.8.8")]


def test_made_up_hosts_are_few_and_confirm_nothing() -> None:
    node = Node(dialable=set())
    node.meet(*(Peer(sees=f"9.9.9.{n}") for n in range(1, 40)), Peer(sees="127.0.0.1"), Peer(sees="224.0.0.1"))
    observed = [each for each in node.core.verdict(node.now).addresses if each.source is Source.OBSERVED]
    assert len(observed) <= 2 * MAX_OBSERVED_HOSTS
    assert node.core.announced() == []
    assert all(len(ask.nonces) <= MAX_ASKED for ask in node.asked)


def test_no_request_is_longer_than_a_peer_answers() -> None:
    node = Node(dialable=set())
    node.set_candidates({control(f"198.18.1.{n}"): Source.INTERFACE for n in range(1, 30)})
    node.meet(*(Peer(sees=f"198.18.1.{n}") for n in range(1, 6)))
    assert max(len(ask.nonces) for ask in node.asked) == MAX_ASKED


def test_what_the_operator_says_is_announced_and_checked_all_the_same() -> None:
    node = Node(dialable=set())
    named = Address(Plane.CONTROL, PUBLIC, 7000)
    node.set_candidates({named: Source.OPERATOR})
    assert node.core.announced() == [named]
    assert node.overall is Overall.PUBLIC
    node.meet(*(Peer(sees=PUBLIC) for _ in range(3)))
    assert node.core.announced() == [named]
    assert node.state(named) is AddressState.FAILED
    assert node.overall is Overall.BEHIND_NAT


def test_listener_on_loopback_needs_no_proof_and_asks_nobody() -> None:
    node = Node()
    node.set_candidates({control("127.0.0.1"): Source.LOOPBACK, data("127.0.0.1"): Source.LOOPBACK})
    node.meet(Peer(sees="127.0.0.1"))
    assert node.core.announced() == [control("127.0.0.1"), data("127.0.0.1")]
    assert node.overall is Overall.LOOPBACK_ONLY
    assert node.asked == []
    node.pass_time(2 * CONFIRMED_FOR_S)
    assert len(node.core.announced()) == 2


def test_user_without_listeners_asks_nobody() -> None:
    node = Node()
    node.core.set_candidates({}, {}, now=node.now)
    node.meet(Peer())
    assert node.asked == []


def test_peers_of_one_network_are_not_asked_when_there_are_others() -> None:
    node = Node()
    for n in range(30):
        node.core.peer_met(PeerId(f"sybil-{n}"), f"5.5.{n}.1", now=node.now)
    for n in range(2):
        node.core.peer_met(PeerId(f"other-{n}"), f"{80 + n}.1.1.1", now=node.now)
    asked = {ask.peer for ask in node.core.requests(node.now) if ask.nonces}
    assert {"other-0", "other-1"} <= asked
    assert len(asked) == NUM_NEEDED


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_of_peers_keeps_the_promises(seed: int) -> None:
    chance = random.Random(seed)
    makers = [Peer, Peer, liar_of_failure, liar_of_success, lambda: Peer(is_silent=True), lambda: Peer(sees="9.9.9.9")]
    dialable = {address for address in (control(), data()) if chance.random() < 0.5}
    node = Node(dialable=dialable, seed=seed)
    for _ in range(40):
        match chance.randrange(4):
            case 0 | 1:
                node.meet(chance.choice(makers)())
            case 2 if node.peers:
                node.leave(chance.choice(list(node.peers)))
            case _:
                node.pass_time(chance.uniform(0.0, 400.0))
        assert set(node.core.announced()) <= dialable
    node.leave(*node.peers)
    node.meet(Peer(), Peer(), Peer())
    node.pass_time(CONFIRMED_FOR_S + 1.0)
    assert set(node.core.announced()) == dialable


def seen(local: tuple[str, int], at: tuple[str, int], *, is_outgoing: bool = True) -> Observation:
    return Observation(*local, *at, is_outgoing)


HOME = "192.168.1.5"


@pytest.mark.parametrize(
    ("observations", "probes", "expected"),
    [
        ([], [], (NatClass.UNKNOWN, None)),
        ([seen((OWN, 50_000), (OWN, 50_000))], [], (NatClass.NONE, None)),
        # A new port each time: kept, so not chosen by where it goes.
        (
            [seen((HOME, 50_000), (PUBLIC, 50_000)), seen((HOME, 50_001), (PUBLIC, 50_001))],
            [],
            (NatClass.ENDPOINT_INDEPENDENT, True),
        ),
        # Changed: by the connection or by the destination, which only one port and two destinations can tell.
        ([seen((HOME, 50_000), (PUBLIC, 1_111)), seen((HOME, 50_001), (PUBLIC, 2_222))], [], (NatClass.UNKNOWN, False)),
        (
            [seen((HOME, 50_000), (PUBLIC, 1_111))],
            [seen((HOME, 4_600), (PUBLIC, 3_333)), seen((HOME, 4_600), (PUBLIC, 3_333))],
            (NatClass.ENDPOINT_INDEPENDENT, False),
        ),
        (
            [],
            [seen((HOME, 4_600), (PUBLIC, 3_333)), seen((HOME, 4_600), (PUBLIC, 4_444))],
            (NatClass.ENDPOINT_DEPENDENT, False),
        ),
        # One public host out of several, by destination.
        (
            [seen((HOME, 50_000), (PUBLIC, 50_000)), seen((HOME, 50_001), ("8.8.8.8", 50_001))],
            [],
            (NatClass.ENDPOINT_DEPENDENT, True),
        ),
        # A neighbour sees no translation, and a peer between two routers another one than the world.
        (
            [
                seen((HOME, 50_000), (HOME, 50_000)),
                seen((HOME, 50_001), ("10.0.0.2", 9_999)),
                seen((HOME, 50_002), (PUBLIC, 50_002)),
            ],
            [],
            (NatClass.ENDPOINT_INDEPENDENT, True),
        ),
        # One liar among four.
        (
            [
                *(seen((HOME, 50_000 + n), (PUBLIC, 50_000 + n)) for n in range(3)),
                seen((HOME, 50_009), ("9.9.9.9", 7)),
            ],
            [],
            (NatClass.ENDPOINT_INDEPENDENT, True),
        ),
        # Whoever dialled a forwarded port sees that port, which says nothing about connections from here.
        ([seen((HOME, 4_600), (PUBLIC, 4_600), is_outgoing=False)], [], (NatClass.UNKNOWN, None)),
    ],
)
def test_class_of_nat(
    observations: Sequence[Observation], probes: Sequence[Observation], expected: tuple[NatClass, bool | None]
) -> None:
    assert classify_nat(observations, probes) == expected
