"""How much one peer, one host and one subnet may ask of this process: token buckets, and counts of what is open.

Guarantees: nobody gets more than its rate and burst of a thing, and nobody has more of a thing open at once than its
share, whoever else is there; what is refused to one takes nothing from others. Memory is bounded: buckets are at most
``max_keys`` per kind, though attackers choose the keys, and counts are as many as there are open things, which the
caller bounds.

Assumes: ``now`` never goes back, and what was opened is closed exactly once. Whoever has more than ``max_keys``
addresses gets fresh buckets for the oldest of them; the counts of the whole process, which are the caller's, hold then.

States: a bucket is full when it is not there, so a bucket that is forgotten is at worst a burst that is given twice.
Counts exist while they are above zero. Timers: none; buckets fill by the time that has passed. Source: token bucket as
in RFC 2697 §3. Ugly: a subnet's bucket is taken from before its host's is looked at, so a refused host still costs
its neighbours a little.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2p.prefixes import host_key, subnet_key

K = TypeVar("K", bound=Hashable)

LOCAL_FACTOR = 4
"""So many times more may be open from an address that is not globally routable: a container's proxy hands on everybody
under its own address, and on one's own machine many processes share one."""


class Excess(enum.StrEnum):
    """Which limit was reached: the reason that is counted and logged."""

    CONNECTIONS = "too-many-connections"
    CONNECTION_RATE = "connects-too-often"
    HANDSHAKES = "too-many-handshakes-of-one-host"
    STREAMS = "too-many-streams"
    MESSAGES = "too-many-messages"
    BYTES = "too-many-bytes"


@dataclass(frozen=True, slots=True)
class Rate:
    """So much per second, and so much at once."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True)
class Shares:
    """What one of them may have. Why these numbers: see the fields.

    Attributes:
        connections_per_host: open at once. A household or an office behind one address has some tens of links.
        connections_per_subnet: the same of a /24 or /48: an eighth of what a pool holds.
        handshakes_per_host: connections without a proven identity, of the 64 that a listener has.
        handshakes_per_subnet: a quarter of them.
        connecting_per_host, connecting_per_subnet: new connections; one costs 5 ms of CPU until its identity is proven.
        streams_per_peer: of one peer that are answered at once: requests, look-ups in the DHT, what is asked of a
            relay, handshakes of links. Four of each kind.
        requests_per_peer: on the control plane. An honest peer asks a few times a minute, but in a small swarm each of
            its look-ups asks everybody.
        request_bytes_per_peer: 28 requests of the largest size at once, and then three a second.
        messages_per_peer: frames on the data plane. A stage that takes part in 100 generations at 30 tokens per second
            gets 3,000.
        bytes_per_peer: on the data plane: two links of 10 Gbit/s. TCP's flow control keeps what is not read with the
            sender, so this bounds work and not memory.
    """

    connections_per_host: int = 64
    connections_per_subnet: int = 64
    handshakes_per_host: int = 8
    handshakes_per_subnet: int = 16
    connecting_per_host: Rate = Rate(per_s=8.0, burst=256.0)
    connecting_per_subnet: Rate = Rate(per_s=32.0, burst=512.0)
    streams_per_peer: int = 16
    requests_per_peer: Rate = Rate(per_s=20.0, burst=200.0)
    request_bytes_per_peer: Rate = Rate(per_s=256 * 1024.0, burst=2 * 1024 * 1024.0)
    messages_per_peer: Rate = Rate(per_s=10_000.0, burst=50_000.0)
    bytes_per_peer: Rate = Rate(per_s=2.5e9, burst=5e9)


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class Buckets(Generic[K]):
    """One token bucket per key, the least recently used forgotten first.

    Args:
        rate: of each.
        max_keys: about 200 bytes each.
    """

    def __init__(self, rate: Rate, *, max_keys: int = 10_000) -> None:
        self._rate = rate
        self._max_keys = max_keys
        self._buckets: OrderedDict[K, _Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: K, amount: float, *, now: float) -> bool:
        """Takes so many tokens, or none and returns False when there are fewer."""
        bucket = self._at(key, now)
        if bucket.tokens < amount:
            return False
        bucket.tokens -= amount
        return True

    def overdraw(self, key: K, amount: float, *, now: float) -> bool:
        """Takes so many tokens for what has happened already; False when there were fewer, which leaves none."""
        bucket = self._at(key, now)
        is_covered = bucket.tokens >= amount
        bucket.tokens = max(0.0, bucket.tokens - amount)
        return is_covered

    def _at(self, key: K, now: float) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._max_keys:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = _Bucket(self._rate.burst, now)
            return bucket
        self._buckets.move_to_end(key)
        gained = max(0.0, now - bucket.filled_at) * self._rate.per_s
        bucket.tokens = min(self._rate.burst, bucket.tokens + gained)
        bucket.filled_at = max(bucket.filled_at, now)
        return bucket


class Counts(Generic[K]):
    """How many things each key has open, and that none has more than ``at_most``."""

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._open: dict[K, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def of(self, key: K) -> int:
        return self._open.get(key, 0)

    def has_room(self, key: K, *, factor: int = 1) -> bool:
        return self.of(key) < self._at_most * factor

    def opened(self, key: K) -> None:
        self._open[key] = self.of(key) + 1

    def closed(self, key: K) -> None:
        left = self.of(key) - 1
        if left > 0:
            self._open[key] = left
        else:
            self._open.pop(key, None)


class Limits:
    """All limits of one process, by host, subnet and peer."""

    def __init__(self, shares: Shares | None = None, *, max_keys: int = 10_000) -> None:
        shares = shares or Shares()
        self._connections_of_host = Counts[str](shares.connections_per_host)
        self._connections_of_subnet = Counts[str](shares.connections_per_subnet)
        self._handshakes_of_host = Counts[str](shares.handshakes_per_host)
        self._handshakes_of_subnet = Counts[str](shares.handshakes_per_subnet)
        self._connecting_hosts = Buckets[str](shares.connecting_per_host, max_keys=max_keys)
        self._connecting_subnets = Buckets[str](shares.connecting_per_subnet, max_keys=max_keys)
        self._streams = Counts[str](shares.streams_per_peer)
        self._requests = Buckets[str](shares.requests_per_peer, max_keys=max_keys)
        self._request_bytes = Buckets[str](shares.request_bytes_per_peer, max_keys=max_keys)
        self._messages = Buckets[str](shares.messages_per_peer, max_keys=max_keys)
        self._bytes = Buckets[str](shares.bytes_per_peer, max_keys=max_keys)

    @property
    def num_keys(self) -> int:
        """Entries of all tables together: what an attacker can make grow, and only so far."""
        return sum(map(len, vars(self).values()))

    # connections, by host and subnet

    def connecting(self, host: str, *, now: float) -> Excess | None:
        """Somebody connects: counts the attempt, and says why it is to be refused, if it is."""
        ours, subnet = host_key(host), subnet_key(host)
        factor = LOCAL_FACTOR if subnet is None else 1
        # The host's first: what is refused to one takes nothing from its neighbours.
        if not self._connecting_hosts.take(ours, 1, now=now):
            return Excess.CONNECTION_RATE
        if not self._connections_of_host.has_room(ours, factor=factor):
            return Excess.CONNECTIONS
        if not self._handshakes_of_host.has_room(ours, factor=factor):
            return Excess.HANDSHAKES
        if subnet is None:
            return None
        if not self._connections_of_subnet.has_room(subnet):
            return Excess.CONNECTIONS
        if not self._handshakes_of_subnet.has_room(subnet):
            return Excess.HANDSHAKES
        return None if self._connecting_subnets.take(subnet, 1, now=now) else Excess.CONNECTION_RATE

    def connected(self, host: str) -> None:
        """A connection was accepted; its identity is not proven yet."""
        _opened(host, self._connections_of_host, self._connections_of_subnet)
        _opened(host, self._handshakes_of_host, self._handshakes_of_subnet)

    def proven(self, host: str) -> None:
        """A connection that was accepted has proven its identity, or has ended without."""
        _closed(host, self._handshakes_of_host, self._handshakes_of_subnet)

    def disconnected(self, host: str) -> None:
        """A connection that was accepted has ended. ``proven`` was called before."""
        _closed(host, self._connections_of_host, self._connections_of_subnet)

    # work, by peer

    def stream_opened(self, peer: str, *, now: float) -> Excess | None:
        """A peer opens a request stream: counts it unless it is refused."""
        if not self._streams.has_room(peer):
            return Excess.STREAMS
        if not self._requests.take(peer, 1, now=now):
            return Excess.MESSAGES
        self._streams.opened(peer)
        return None

    def stream_closed(self, peer: str) -> None:
        self._streams.closed(peer)

    def requested(self, peer: str, num_bytes: int, *, now: float) -> Excess | None:
        """A request of so many bytes has come."""
        return None if self._request_bytes.overdraw(peer, num_bytes, now=now) else Excess.BYTES

    def received(self, peer: str, num_messages: int, num_bytes: int, *, now: float) -> Excess | None:
        """A peer has sent so many frames and bytes on the data plane since it was last looked at."""
        if not self._messages.overdraw(peer, num_messages, now=now):
            return Excess.MESSAGES
        return None if self._bytes.overdraw(peer, num_bytes, now=now) else Excess.BYTES


def _opened(host: str, hosts: Counts[str], subnets: Counts[str]) -> None:
    hosts.opened(host_key(host))
    subnet = subnet_key(host)
    if subnet is not None:
        subnets.opened(subnet)


def _closed(host: str, hosts: Counts[str], subnets: Counts[str]) -> None:
    hosts.closed(host_key(host))
    subnet = subnet_key(host)
    if subnet is not None:
        subnets.closed(subnet)
