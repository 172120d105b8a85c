"""Which of a node's addresses others can dial, told by others dialling them.

Own addresses are *candidates* until a peer has brought a nonce to them on a fresh connection (p2p.dial_back). The core
chooses whom to ask about what, draws the nonces, and judges what comes of it.

Guarantees: an address is CONFIRMED only while nonces have arrived on it, each handed to one peer for this one address,
valid NONCE_LIFE_S and once: no peer can confirm an address by saying so. It takes arrivals through NUM_NEEDED distinct
peers, or through all that could be asked where these are fewer; then those who come later are asked too, until it is
so many. An address is FAILED only when at least as many distinct peers failed, and more than succeeded. What is done
for one peer is bounded: one request at a time, MAX_ASKED addresses in it, ASK_EVERY_S apart.

Assumes: the shell hands on every nonce that arrives, with the local address at which it did; ``chance`` and
``draw_nonce`` cannot be foretold by strangers. A peer dials only hosts from which it sees this node, so each is asked
about those only, once it has told which that is. That word is a hint: it makes a candidate, never an address.

States of an address: UNCONFIRMED, CHECKING (the first round runs), CONFIRMED, FAILED. A CONFIRMED one that is checked
again stays so meanwhile, unless the check fails. An address of the operator is announced whatever is found.

Timers, in seconds of one monotonic clock that is handed in: the constants below. ``next_timer`` says when
``handle_timer`` and ``requests`` have something to do.

Source: AutoNAT v2 of the libp2p specification, without its price for dialling other hosts, which nobody does here; the
NAT classes are those of RFC 4787 §4.1, with its two kinds of dependence taken as one.

What is still ugly: a peer that knows a second way to this node can bring a nonce for an address behind which nobody is.
For the addresses of interfaces the local end of the connection shows it, for those of a router nothing does; it takes
NUM_NEEDED such peers, or a swarm that has no other, and costs those who dial a failed attempt. And a host with several
addresses gets only those confirmed from which its peers happen to see it.

Above 600 lines: choosing, judging and what observations make of it change the same rounds; the words of verdicts are in
p2p.reachability_verdict.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusion_node.types import PeerId
from p2p import prefixes
from p2p.prefixes import diversity_key, host_key, ip_of
from p2p.reachability_verdict import (
    Address,
    AddressState,
    AddressVerdict,
    NatClass,
    Observation,
    Outcome,
    Overall,
    Plane,
    Source,
    Verdict,
    classify_nat,
    is_public,
)

if TYPE_CHECKING:
    from random import Random

NUM_NEEDED = 3
"""Distinct peers for a verdict. Two liars among strangers are soon found; three cost them three connections, kept."""

MAX_ASKED_PER_ROUND = 6
"""Peers that have answered about one address, when they do not agree: twice NUM_NEEDED."""

MAX_ASKED = 8
"""Addresses in one request, and the most that a peer has to answer."""

ASKS_PER_WINDOW = 6
ASK_WINDOW_S = 60.0
"""Requests to one peer: one when it is met, one for the address that it tells, and as much again for the data plane,
which is bound later, and for a router's mapping. Less than peers grant (p2p.dial_back)."""

NONCE_BYTES = 16
NONCE_LIFE_S = 12.0
"""Longer than a peer may take for its answer (DIAL_BACK_TIMEOUT_S), and short enough that nobody collects them."""

GRACE_S = 1.0
"""How long a nonce may come after the word that it was brought: the two take different ways into this process."""

RECHECK_AFTER_S = 480.0
CONFIRMED_FOR_S = 600.0
"""A lease of a home router or a mobile network changes in hours. Checking is due two minutes before it is missed."""

RETRY_FIRST_S = 30.0
RETRY_MAX_S = 600.0
"""After a failure, doubling: an operator who has just opened a port sees it soon."""

QUIET_S = 15.0
QUIET_MAX_S = 600.0
"""For a peer that did not answer or was busy, doubling as long as it does not answer: an old version never does."""

UNSEEN_FOR_S = 60.0
"""How long an address that peers saw is kept when all of them see another."""

MAX_OBSERVED_HOSTS = 4
"""Hosts that peers say they see us from: a provider's NAT may have several, a liar has any number."""


_PREFERENCE = (Source.OPERATOR, Source.INTERFACE, Source.UPNP, Source.OBSERVED, Source.LOOPBACK)


_FAILURES = (Outcome.UNREACHABLE, Outcome.BROKEN)


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this peer to bring these nonces. Empty when it is to say only where it sees this node."""

    peer: PeerId
    nonces: tuple[tuple[Address, bytes], ...]


@dataclass(slots=True)
class _Round:
    """One check of one address."""

    asked: set[PeerId] = field(default_factory=set)
    arrived: dict[PeerId, float] = field(default_factory=dict)
    failed: dict[PeerId, str] = field(default_factory=dict)
    judged: tuple[int, int] = (0, 0)
    """How many had arrived and failed at the last verdict."""
    is_over: bool = False


@dataclass(slots=True)
class _Subject:
    """One candidate."""

    address: Address
    source: Source
    since: float
    state: AddressState = AddressState.UNCONFIRMED
    round: _Round = field(default_factory=_Round)
    due_at: float | None = None
    retry_s: float = RETRY_FIRST_S
    confirmed_by: tuple[PeerId, ...] = ()
    confirmed_at: float | None = None
    failed: dict[PeerId, str] = field(default_factory=dict)
    """Of the last round that came to an end, or of this one."""
    unseen_since: float | None = None

    def become(self, state: AddressState, now: float) -> None:
        if state is not self.state:
            self.state, self.since = state, now


@dataclass(slots=True)
class _Peer:
    """One who can be asked."""

    host: str
    observation: Observation | None = None
    was_asked: bool = False
    under_way: tuple[bytes, ...] | None = None
    """The nonces of a request that is not yet answered."""
    asked_at: deque[float] = field(default_factory=lambda: deque(maxlen=ASKS_PER_WINDOW))
    quiet_until: float = float("-inf")
    quiet_s: float = QUIET_S

    def free_at(self) -> float:
        full = len(self.asked_at) == ASKS_PER_WINDOW
        return max(self.quiet_until, self.asked_at[0] + ASK_WINDOW_S if full else self.quiet_until)


@dataclass(slots=True)
class _Pending:
    """A nonce that has been handed out."""

    address: Address
    peer: PeerId
    expires: float
    outcome: Outcome | None = None


class ReachabilityCore:
    """See the head of this file.

    Args:
        draw_nonce: gives NONCE_BYTES that nobody can foretell.
        chance: chooses among peers.
        is_loopback: of a host; another than the default only in tests, which have nothing but loopback.
    """

    def __init__(
        self,
        draw_nonce: Callable[[], bytes],
        chance: Random,
        *,
        is_loopback: Callable[[str], bool] = prefixes.is_loopback,
    ) -> None:
        self._draw_nonce = draw_nonce
        self._chance = chance
        self._is_loopback = is_loopback
        self._subjects: dict[Address, _Subject] = {}
        self._ports: dict[Plane, int] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._pending: dict[bytes, _Pending] = {}
        self._probes: dict[PeerId, Observation] = {}
        self.num_stray_nonces = 0
        """That were never drawn, too late, brought twice or to the wrong listener."""

    # What the shell tells.

    def set_candidates(self, candidates: Mapping[Address, Source], ports: Mapping[Plane, int], *, now: float) -> None:
        """Replaces all candidates but the observed ones, which are made here, with these ports."""
        self._ports = dict(ports)
        for address, subject in list(self._subjects.items()):
            is_observed = subject.source is Source.OBSERVED
            if address not in candidates if not is_observed else address.port != self._ports.get(address.plane):
                self._forget(address)
        for address, source in candidates.items():
            known = self._subjects.get(address)
            if known is None:
                known = self._subjects[address] = _Subject(address, source, now)
                if source is Source.LOOPBACK:
                    known.state, known.round.is_over = AddressState.CONFIRMED, True
            known.source = source
        self._follow_observations(now)

    def peer_met(self, peer: PeerId, host: str, *, now: float) -> None:
        """The peer answers requests. ``host`` is its own, as seen from here; empty when it is not known."""
        if peer not in self._peers:
            self._peers[peer] = _Peer(host)

    def peer_gone(self, peer: PeerId, *, now: float) -> None:
        """It is not connected any more. What it has brought stays valid."""
        gone = self._peers.pop(peer, None)
        self._probes.pop(peer, None)
        if gone is not None and gone.under_way is not None:
            self._postpone(gone.under_way, peer)
        self._judge_all(now)

    def network_changed(self, *, now: float) -> None:
        """This machine's addresses are others than before: nothing is believed longer than its re-check takes."""
        self._probes.clear()
        for known in self._peers.values():
            known.observation, known.was_asked = None, False
        for address, subject in list(self._subjects.items()):
            if subject.source is Source.OBSERVED:
                self._forget(address)
            elif subject.source is not Source.LOOPBACK:
                subject.retry_s = RETRY_FIRST_S
                self._begin_round(subject)

    def answered(self, peer: PeerId, outcomes: Sequence[str], observation: Observation | None, *, now: float) -> None:
        """The peer's answer to the Ask that is under way: one outcome per address, in order, and where it sees us."""
        known = self._peers.get(peer)
        if known is None or known.under_way is None:
            return
        nonces, known.under_way = known.under_way, None
        known.quiet_s = QUIET_S
        if observation is not None and ip_of(observation.seen_host) is not None:
            known.observation = observation
        # A peer that leaves some out has not done what it was asked.
        told = [*outcomes, *[Outcome.BUSY] * len(nonces)]
        for nonce, outcome in zip(nonces, told, strict=False):
            self._take_outcome(nonce, outcome, known, now)
        self._follow_observations(now)
        self._judge_all(now)

    def unanswered(self, peer: PeerId, *, now: float) -> None:
        """The request failed: no answer in time, refused, or malformed."""
        known = self._peers.get(peer)
        if known is None or known.under_way is None:
            return
        nonces, known.under_way = known.under_way, None
        known.quiet_until = now + known.quiet_s
        known.quiet_s = min(2 * known.quiet_s, QUIET_MAX_S)
        self._postpone(nonces, peer)
        self._judge_all(now)

    def reached(self, plane: Plane, nonce: bytes, local_host: str, *, now: float) -> bool:
        """A nonce was brought to a listener, at this address of the machine. Whether it counts."""
        pending = self._pending.pop(nonce, None)
        subject = None if pending is None else self._subjects.get(pending.address)
        if pending is None or subject is None or now >= pending.expires or pending.address.plane is not plane:
            self.num_stray_nonces += 1
            return False
        asked = subject.round
        asked.asked.add(pending.peer)
        if subject.source is Source.INTERFACE and ip_of(local_host) != ip_of(pending.address.host):
            asked.failed[pending.peer] = "brought the nonce to another address"
            self._judge(subject, now)
            return False
        asked.failed.pop(pending.peer, None)
        asked.arrived[pending.peer] = now
        self._judge(subject, now)
        return True

    def probed(self, peer: PeerId, observation: Observation) -> None:
        """What a peer sees of a connection that was made from the listener's port, for the class of NAT only."""
        self._probes[peer] = observation

    # What the shell does.

    def requests(self, now: float) -> list[Ask]:
        """Whom to ask now. Every Ask must come to ``answered`` or ``unanswered``, or its peer be ``peer_gone``."""
        if not self._ports or self._is_loopback_only():
            return []
        wanted: dict[PeerId, list[Address]] = {
            peer: [] for peer, known in self._peers.items() if not known.was_asked and self._is_free(known, now)
        }
        for subject in self._by_preference():
            if subject.due_at is not None and now >= subject.due_at and subject.source is not Source.LOOPBACK:
                self._begin_round(subject)
            if not subject.round.is_over:
                for peer in self._choose(subject, wanted, now):
                    wanted.setdefault(peer, []).append(subject.address)
        return [self._ask(peer, addresses, now) for peer, addresses in wanted.items()]

    def handle_timer(self, now: float) -> None:
        """Lets pass what has had its time. Call ``requests`` afterwards."""
        for nonce, pending in list(self._pending.items()):
            if now >= pending.expires:
                del self._pending[nonce]
                subject = self._subjects.get(pending.address)
                if subject is not None and pending.outcome is Outcome.DELIVERED:
                    subject.round.failed[pending.peer] = "says that it brought the nonce, which never came"
        for subject in list(self._subjects.values()):
            if subject.source is Source.LOOPBACK:
                continue
            expires = None if subject.confirmed_at is None else subject.confirmed_at + CONFIRMED_FOR_S
            if subject.state is AddressState.CONFIRMED and expires is not None and now >= expires:
                subject.become(AddressState.UNCONFIRMED, now)
        self._follow_observations(now)
        self._judge_all(now)

    def next_timer(self, now: float) -> float | None:
        """When ``handle_timer`` and ``requests`` are due next; None when only an event can change anything."""
        times: list[float] = [pending.expires for pending in self._pending.values()]
        for subject in self._subjects.values():
            if subject.due_at is not None:
                times.append(subject.due_at)
            if subject.confirmed_at is not None and subject.state is AddressState.CONFIRMED:
                times.append(subject.confirmed_at + CONFIRMED_FOR_S)
            if subject.unseen_since is not None:
                times.append(subject.unseen_since + UNSEEN_FOR_S)
        times += [known.free_at() for known in self._peers.values()]
        return min((time for time in times if time > now), default=None)

    # What others ask.

    def announced(self) -> list[Address]:
        """What the swarm is told, best first: what is confirmed, and what the operator says."""
        return [each.address for each in self._by_preference() if _is_announced(each)]

    def candidates(self, plane: Plane) -> list[Address]:
        """What might be dialled, best first: what has not failed, or else whatever there is. For people."""
        found = [each for each in self._by_preference() if each.address.plane is plane]
        hopeful = [each for each in found if each.state is not AddressState.FAILED]
        return [each.address for each in hopeful or found]

    def verdict(self, now: float) -> Verdict:
        """All that is known."""
        nat, is_port_preserving = self._nat()
        return Verdict(
            overall=self._overall(),
            nat=nat,
            is_port_preserving=is_port_preserving,
            num_answering=sum(known.observation is not None for known in self._peers.values()),
            seen_hosts=tuple(host for host, _ in self._seen_hosts().most_common()),
            addresses=tuple(_verdict_of(subject, now) for subject in self._by_preference()),
        )

    # Choosing.

    def _ask(self, peer: PeerId, addresses: Sequence[Address], now: float) -> Ask:
        known = self._peers[peer]
        nonces = tuple((address, self._draw_nonce()) for address in addresses)
        for address, nonce in nonces:
            self._pending[nonce] = _Pending(address, peer, now + NONCE_LIFE_S)
            subject = self._subjects[address]
            subject.round.asked.add(peer)
            if subject.state is AddressState.UNCONFIRMED:
                subject.become(AddressState.CHECKING, now)
        known.under_way, known.was_asked = tuple(nonce for _, nonce in nonces), True
        known.asked_at.append(now)
        return Ask(peer, nonces)

    def _choose(self, subject: _Subject, wanted: Mapping[PeerId, Sequence[Address]], now: float) -> list[PeerId]:
        """Further peers for a round: of other networks than those before, others than last time, by chance."""
        asked = subject.round
        num_settled = len(asked.arrived) + len(asked.failed)
        num_pending = self._num_pending(subject)
        room = min(NUM_NEEDED - len(asked.arrived), MAX_ASKED_PER_ROUND - num_settled) - num_pending
        pool = [
            peer
            for peer, known in self._peers.items()
            if self._may_ask(peer, known, subject)
            and self._is_free(known, now)
            and len(wanted.get(peer, ())) < MAX_ASKED
        ]
        self._chance.shuffle(pool)
        used = {_network(self._peers[peer].host) for peer in asked.asked if peer in self._peers}
        chosen: list[PeerId] = []
        while pool and len(chosen) < room:
            best = min(pool, key=lambda peer: (_network(self._peers[peer].host) in used, peer in subject.confirmed_by))
            pool.remove(best)
            used.add(_network(self._peers[best].host))
            chosen.append(best)
        return chosen

    def _may_ask(self, peer: PeerId, known: _Peer, subject: _Subject) -> bool:
        """Whether the peer would dial that address, and has not been asked in this round."""
        if peer in subject.round.asked:
            return False
        if known.observation is None:
            return True
        seen, host = ip_of(known.observation.seen_host), ip_of(subject.address.host)
        if host is None or seen == host:  # a name may lead there
            return True
        return subject.source is Source.INTERFACE and self._is_loopback(known.observation.seen_host)

    def _is_free(self, known: _Peer, now: float) -> bool:
        return known.under_way is None and now >= known.free_at()

    def _num_pending(self, subject: _Subject) -> int:
        return sum(
            pending.address == subject.address and pending.outcome in (None, Outcome.DELIVERED)
            for pending in self._pending.values()
        )

    def _begin_round(self, subject: _Subject) -> None:
        subject.round, subject.due_at = _Round(), None

    # Judging.

    def _take_outcome(self, nonce: bytes, outcome: str, known: _Peer, now: float) -> None:
        pending = self._pending.get(nonce)
        subject = None if pending is None else self._subjects.get(pending.address)
        if pending is None or subject is None:
            return  # it has arrived, or concerns nobody any more
        if outcome == Outcome.DELIVERED:
            pending.outcome = Outcome.DELIVERED
            pending.expires = min(pending.expires, now + GRACE_S)
        elif outcome in _FAILURES:
            # The nonce stays valid: what arrives counts more than what is said.
            pending.outcome = Outcome(outcome)
            subject.round.failed[pending.peer] = f"says {outcome}"
        else:
            del self._pending[nonce]
            if outcome != Outcome.OTHER_HOST:
                known.quiet_until = now + QUIET_S
                subject.round.asked.discard(pending.peer)

    def _postpone(self, nonces: Iterable[bytes], peer: PeerId) -> None:
        for nonce in nonces:
            pending = self._pending.pop(nonce, None)
            subject = None if pending is None else self._subjects.get(pending.address)
            if subject is not None:
                subject.round.asked.discard(peer)

    def _judge_all(self, now: float) -> None:
        for subject in self._subjects.values():
            self._judge(subject, now)

    def _judge(self, subject: _Subject, now: float) -> None:
        asked = subject.round
        num_arrived, num_failed = len(asked.arrived), len(asked.failed)
        if num_failed:
            subject.failed = dict(asked.failed)
        is_enough = num_arrived >= NUM_NEEDED or (num_failed >= NUM_NEEDED and not num_arrived)
        if asked.is_over or (not is_enough and (self._num_pending(subject) or self._could_ask(subject, now))):
            return
        if (num_arrived, num_failed) == asked.judged:
            if subject.state is AddressState.CHECKING and asked.judged == (0, 0):
                subject.become(AddressState.UNCONFIRMED, now)  # who was asked has not answered
            return
        asked.judged = num_arrived, num_failed
        # Proofs count more than words, unless there are many words.
        if num_arrived and (num_arrived >= num_failed or num_failed < NUM_NEEDED):
            self._confirm(subject, now)
        else:
            self._end_in_failure(subject, now)
        # One or two may lie, and may be mistaken: the round goes on with whoever comes.
        asked.is_over = is_enough or num_arrived + num_failed >= MAX_ASKED_PER_ROUND

    def _could_ask(self, subject: _Subject, now: float) -> bool:
        """Whether more peers can be heard in this round, now or when their present request is over."""
        if len(subject.round.arrived) + len(subject.round.failed) >= MAX_ASKED_PER_ROUND:
            return False
        return any(
            self._may_ask(peer, known, subject) and (known.under_way is not None or self._is_free(known, now))
            for peer, known in self._peers.items()
        )

    def _confirm(self, subject: _Subject, now: float) -> None:
        arrived = subject.round.arrived
        subject.become(AddressState.CONFIRMED, now)
        subject.confirmed_by = tuple(sorted(arrived, key=lambda peer: arrived[peer]))
        subject.confirmed_at, subject.failed = max(arrived.values()), dict(subject.round.failed)
        subject.due_at, subject.retry_s = subject.confirmed_at + RECHECK_AFTER_S, RETRY_FIRST_S

    def _end_in_failure(self, subject: _Subject, now: float) -> None:
        is_certain = len(subject.round.failed) >= NUM_NEEDED
        subject.become(AddressState.FAILED if is_certain else AddressState.UNCONFIRMED, now)
        subject.due_at = now + subject.retry_s
        subject.retry_s = min(2 * subject.retry_s, RETRY_MAX_S)

    # Observed hosts.

    def _seen_hosts(self) -> Counter[str]:
        return Counter(
            str(ip_of(known.observation.seen_host))
            for known in self._peers.values()
            if known.observation is not None and self._could_be_ours(known.observation.seen_host)
        )

    def _could_be_ours(self, host: str) -> bool:
        ip = ip_of(host)
        return ip is not None and not (
            ip.is_unspecified or ip.is_multicast or ip.is_link_local or self._is_loopback(host)
        )

    def _follow_observations(self, now: float) -> None:
        """Makes candidates of the hosts that most peers name, and drops those that nobody names any more."""
        if self._is_loopback_only():
            return
        seen = self._seen_hosts()
        leading = {host for host, _ in seen.most_common(MAX_OBSERVED_HOSTS)}
        for address, subject in list(self._subjects.items()):
            if subject.source is not Source.OBSERVED:
                continue
            if not seen or address.host in seen:
                subject.unseen_since = None
            elif subject.unseen_since is None:
                subject.unseen_since = now
            is_crowded_out = address.host not in leading and subject.state is not AddressState.CONFIRMED
            is_unseen = subject.unseen_since is not None and now - subject.unseen_since >= UNSEEN_FOR_S
            if (seen and is_crowded_out) or is_unseen:
                self._forget(address)
        for host in sorted(leading):
            for plane, port in self._ports.items():
                address = Address(plane, host, port)
                if address not in self._subjects:
                    self._subjects[address] = _Subject(address, Source.OBSERVED, now)

    def _forget(self, address: Address) -> None:
        del self._subjects[address]
        for nonce in [nonce for nonce, pending in self._pending.items() if pending.address == address]:
            del self._pending[nonce]

    # Verdicts.

    def _by_preference(self) -> list[_Subject]:
        def key(subject: _Subject) -> tuple[bool, int, Address]:
            ip = ip_of(subject.address.host)
            is_private = ip is not None and not ip.is_global
            return is_private, _PREFERENCE.index(subject.source), subject.address

        return sorted(self._subjects.values(), key=key)

    def _overall(self) -> Overall:
        if self._is_loopback_only():
            return Overall.LOOPBACK_ONLY
        control = [each for each in self._subjects.values() if each.address.plane is Plane.CONTROL]
        dialable = {each.address.host for each in control if _is_believed(each)}
        seen = set(self._seen_hosts())
        if any(is_public(host) for host in dialable) or (dialable and seen <= dialable):
            return Overall.PUBLIC
        if any(each.address.host in seen - dialable and each.failed for each in control):
            return Overall.BEHIND_NAT
        return Overall.UNKNOWN

    def _is_loopback_only(self) -> bool:
        sources = {each.source for each in self._subjects.values()}
        return Source.LOOPBACK in sources and Source.OPERATOR not in sources

    def _nat(self) -> tuple[NatClass, bool | None]:
        observations = [known.observation for known in self._peers.values() if known.observation is not None]
        outside = [each for each in observations if not self._is_loopback(each.seen_host)]
        return classify_nat(outside, [each for each in self._probes.values() if not self._is_loopback(each.seen_host)])


def _network(host: str) -> str:
    return diversity_key(host) or host_key(host)


def _is_believed(subject: _Subject) -> bool:
    by_word = subject.source is Source.OPERATOR and not subject.failed
    return subject.state is AddressState.CONFIRMED or by_word


def _is_announced(subject: _Subject) -> bool:
    return subject.source is Source.OPERATOR or subject.state is AddressState.CONFIRMED


def _verdict_of(subject: _Subject, now: float) -> AddressVerdict:
    return AddressVerdict(
        plane=subject.address.plane,
        host=subject.address.host,
        port=subject.address.port,
        source=subject.source,
        state=subject.state,
        is_announced=_is_announced(subject),
        confirmed_by=subject.confirmed_by,
        failed_by=tuple(subject.failed),
        age_s=now - subject.since,
        checked_age_s=None if subject.confirmed_at is None else now - subject.confirmed_at,
        why=_why(subject),
    )


def _why(subject: _Subject) -> str:
    failed = ", ".join(sorted(set(subject.failed.values())))
    match subject.state:
        case AddressState.CONFIRMED if subject.source is Source.LOOPBACK:
            return "only this machine listens and can dial"
        case AddressState.CONFIRMED:
            return f"{len(subject.confirmed_by)} peers have dialled it"
        case AddressState.CHECKING:
            return "peers are asked to dial it"
        case AddressState.FAILED:
            return f"{len(subject.failed)} peers could not dial it: {failed}"
        case _ if subject.failed:
            return f"could not be dialled by the {len(subject.failed)} who could be asked: {failed}"
        case _ if subject.confirmed_at is not None:
            return "nobody could be asked for too long"
        case _:
            return "nobody who would dial it could be asked yet"
