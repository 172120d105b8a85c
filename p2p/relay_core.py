"""Which relays a node that cannot be dialled lets itself be reached through. Pure.

Guarantees
* While relays are wanted and enough candidates answer, NUM_RELAYS reservations are held, in different subnets as far as
  the candidates are in different ones, and through low round trips before high ones.
* A reservation is renewed every RENEW_S, long before it ends. One that is lost, or whose renewal fails, is no longer
  told of at once, and another relay is asked in the same call.
* A relay that refused or failed is left alone for a time that doubles from RETRY_FIRST_S to RETRY_MAX_S, so that a full
  or dead one costs little; a relay is asked by one request at a time, and at most NUM_RELAYS are asked at once.
* One with which there is a connection again is asked at once; so is one that was lost, after others and not twice in
  RETRY_FIRST_S: it may be the way to it that has changed, as when a router gets another address.
* While the own host is down, nobody is asked, and nothing counts against a relay.
* When relays are not wanted any more, all are released after GIVE_UP_AFTER_S: a verdict that wavers costs nothing.

Assumes: the shell carries out every command and reports its end once, with ``reserved``, ``refused`` or ``lost``;
``now`` does not go back. What a record says of being a relay is a claim; that its relay addresses are confirmed is the
record's business (p2p.reachability_core).

States of a relay: candidate, asked, held (with the time to renew), resting. Timers: see the constants, seconds.

Source: libp2p specs, relay/circuit-v2.md (reservations); libp2p AutoRelay keeps 2 relays and, as here, rather keeps
what works than what would be better. Ugly: a better relay that comes later is taken only when one of those held fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from fusion_node.types import MonotonicS, PeerId
from p2p.prefixes import subnet_key

if TYPE_CHECKING:
    from random import Random

    from p2p.addresses import PeerAddress

NUM_RELAYS = 3
"""Two may fail within a renewal. Each costs a connection and 60 bytes/s at most."""

RENEW_S = 30.0
"""A quarter of what our relays grant. It is also how soon a relay that silently drops everything is noticed."""

RETRY_FIRST_S = 5.0
RETRY_MAX_S = 300.0

GIVE_UP_AFTER_S = 120.0
"""Sessions that run through a relay have time to go on directly."""

MAX_ADDRESSES_PER_RELAY = 2

UNKNOWN_ROUND_TRIP_S = 0.3
"""What a candidate counts as that nobody has measured: after those that are near, before those that are far."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that offers to relay.

    Attributes:
        addresses: where it listens for libp2p, best first; without those through other relays.
        round_trip_s: None when unknown.
    """

    peer: PeerId
    addresses: tuple[PeerAddress, ...]
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask this relay, at one address after the other, for a reservation or to renew it."""

    relay: PeerId
    addresses: tuple[PeerAddress, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Accept nothing more through this relay."""

    relay: PeerId


Command: TypeAlias = Reserve | Release


@dataclass(slots=True)
class _Relay:
    candidate: Candidate
    is_asked: bool = False
    renew_at: MonotonicS | None = None
    """None while it is not held."""
    rests_until: MonotonicS | None = None
    num_failures: int = 0
    held_since: MonotonicS | None = None
    """Since it agreed last, without the renewals; None when it has refused since then."""
    was_lost: bool = False
    """It agreed last, and is not held any more."""

    @property
    def is_held(self) -> bool:
        return self.renew_at is not None

    @property
    def is_free(self) -> bool:
        return not self.is_held and not self.is_asked


@dataclass(slots=True)
class RelayCore:
    """See the head of this file.

    Args:
        own: the peer that wants to be reached.
        random: breaks ties, so that not everybody chooses the same relay.
    """

    own: PeerId
    random: Random
    num_relays: int = NUM_RELAYS
    num_lost: int = 0
    _relays: dict[PeerId, _Relay] = field(default_factory=dict)
    _is_wanted: bool = False
    _is_host_up: bool = True
    _unwanted_since: MonotonicS | None = None

    @property
    def held(self) -> list[PeerId]:
        """The relays at which there is a reservation."""
        return [peer for peer, relay in self._relays.items() if relay.is_held]

    @property
    def is_host_up(self) -> bool:
        """Whether there is a host to ask with, as far as is known."""
        return self._is_host_up

    @property
    def addresses(self) -> list[PeerAddress]:
        """Where this node can be reached through them."""
        return [
            dataclasses.replace(address, peer=self.own, via=peer)
            for peer, relay in self._relays.items()
            if relay.is_held
            for address in relay.candidate.addresses[:MAX_ADDRESSES_PER_RELAY]
        ]

    def want(self, wanted: bool, now: MonotonicS) -> list[Command]:
        """Whether this node needs relays: it cannot be dialled."""
        self._is_wanted = wanted
        self._unwanted_since = None if wanted else self._unwanted_since or now
        return self.handle_timer(now)

    def offer(self, candidates: Iterable[Candidate], now: MonotonicS) -> list[Command]:
        """All nodes that are known to relay now. What is held or asked stays so, also when it is not among them."""
        offered = {each.peer: each for each in candidates if each.peer != self.own and each.addresses}
        for peer, relay in list(self._relays.items()):
            if peer in offered:
                if not relay.is_held:  # the addresses of one that is held work
                    relay.candidate = offered[peer]
            elif relay.is_free:
                del self._relays[peer]
        for peer, candidate in offered.items():
            if peer not in self._relays:
                self._relays[peer] = _Relay(candidate)
        return self.handle_timer(now)

    def reserved(self, peer: PeerId, address: PeerAddress, duration_s: float, now: MonotonicS) -> list[Command]:
        """The relay has agreed, at this address, for so many seconds."""
        relay = self._relays.get(peer)
        if relay is None:
            return [Release(peer)]
        relay.is_asked = relay.was_lost = False
        relay.num_failures = 0
        if not relay.is_held:
            relay.held_since = now
        relay.renew_at = MonotonicS(now + min(RENEW_S, duration_s / 2))
        others = [each for each in relay.candidate.addresses if each != address]
        relay.candidate = dataclasses.replace(relay.candidate, addresses=(address, *others))
        return self.handle_timer(now)

    def refused(self, peer: PeerId, now: MonotonicS) -> list[Command]:
        """It has not, or could not be asked."""
        return self._failed(peer, now)

    def lost(self, peer: PeerId, now: MonotonicS) -> list[Command]:
        """The connection with a relay is gone, and the reservation with it. It may be asked right now."""
        relay = self._relays.get(peer)
        if relay is None or not relay.is_held:
            return []
        self.num_lost += 1
        relay.renew_at, relay.was_lost = None, True
        if relay.is_asked:
            return []
        if relay.held_since is not None and now - relay.held_since < RETRY_FIRST_S:
            return self._failed(peer, now)
        relay.rests_until = None
        return self.handle_timer(now)

    def connected(self, peer: PeerId, now: MonotonicS) -> list[Command]:
        """There is a new connection with a peer."""
        relay = self._relays.get(peer)
        if relay is None or not relay.is_free:
            return []
        relay.rests_until = None
        return self.handle_timer(now)

    def host_down(self) -> None:
        """Nothing is held any more, no request will be answered, and until ``host_up`` nothing can be asked."""
        self._is_host_up = False
        for relay in self._relays.values():
            relay.renew_at, relay.is_asked = None, False

    def host_up(self, now: MonotonicS) -> list[Command]:
        """The host runs, as it did or again."""
        self._is_host_up = True
        return self.handle_timer(now)

    def next_timer(self) -> MonotonicS | None:
        """When ``handle_timer`` has something to do at the latest."""
        if not self._is_host_up:
            return None
        times = [relay.renew_at for relay in self._relays.values() if relay.renew_at is not None and not relay.is_asked]
        if self._is_wanted and len(self.held) < self.num_relays:
            times += [relay.rests_until for relay in self._relays.values() if relay.rests_until and relay.is_free]
        if self._unwanted_since is not None and self.held:
            times.append(MonotonicS(self._unwanted_since + GIVE_UP_AFTER_S))
        return min(times, default=None)

    def handle_timer(self, now: MonotonicS) -> list[Command]:
        """Renews what is due, and asks for what is missing."""
        if not self._is_host_up:
            return []
        if self._unwanted_since is not None and now - self._unwanted_since >= GIVE_UP_AFTER_S:
            released = self.held
            for peer in released:
                self._relays[peer].renew_at = None
            return [Release(peer) for peer in released]
        commands: list[Command] = []
        for relay in self._relays.values():
            if relay.renew_at is not None and relay.renew_at <= now and not relay.is_asked:
                commands.append(self._ask(relay))
        if self._is_wanted:
            under_way = [relay for relay in self._relays.values() if relay.is_held or relay.is_asked]
            for _ in range(self.num_relays - len(under_way)):
                chosen = self._choose([relay.candidate for relay in under_way], now)
                if chosen is None:
                    break
                commands.append(self._ask(chosen))
                under_way.append(chosen)
        return commands

    def _choose(self, beside: Sequence[Candidate], now: MonotonicS) -> _Relay | None:
        taken = {subnet for each in beside for subnet in _subnets(each)}
        free = [
            relay
            for relay in self._relays.values()
            if relay.is_free and (relay.rests_until is None or relay.rests_until <= now)
        ]
        self.random.shuffle(free)
        return min(free, key=lambda relay: (relay.was_lost, *_rank(relay.candidate, taken)), default=None)

    def _ask(self, relay: _Relay) -> Reserve:
        relay.is_asked = True
        return Reserve(relay.candidate.peer, relay.candidate.addresses)

    def _failed(self, peer: PeerId, now: MonotonicS) -> list[Command]:
        relay = self._relays.get(peer)
        if relay is None:
            return []
        if relay.is_held:
            self.num_lost += 1
        relay.is_asked, relay.renew_at, relay.held_since = False, None, None
        relay.rests_until = MonotonicS(now + min(RETRY_FIRST_S * 2**relay.num_failures, RETRY_MAX_S))
        relay.num_failures += 1
        return self.handle_timer(now)


def _subnets(candidate: Candidate) -> set[str]:
    return {subnet for address in candidate.addresses if (subnet := subnet_key(address.host)) is not None}


def _rank(candidate: Candidate, taken: set[str]) -> tuple[bool, int]:
    """Another subnet first; then the round trip, by powers of two, because it is not worth more precision."""
    round_trip_s = UNKNOWN_ROUND_TRIP_S if candidate.round_trip_s is None else candidate.round_trip_s
    return bool(_subnets(candidate) & taken), max(int(1000 * round_trip_s), 1).bit_length()
