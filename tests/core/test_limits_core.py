"""Limits per peer, host and subnet: what each may have, and that nobody's excess is another's loss."""

from __future__ import annotations

import random

import pytest

from p2p.limits_core import LOCAL_FACTOR, Buckets, Counts, Excess, Limits, Rate, Shares
from p2p.prefixes import diversity_key, host_key, ip_of, is_loopback, subnet_key


@pytest.mark.parametrize(
    ("host", "own", "subnet", "diversity"),
    [
        ("8.8.4.4", "8.8.4.4", "8.8.4.0/24", "8.8.0.0/16"),
        ("::ffff:8.8.4.4", "8.8.4.4", "8.8.4.0/24", "8.8.0.0/16"),
        ("2a00:1450:4001:81::5", "2a00:1450:4001:81::/64", "2a00:1450:4001::/48", "2a00:1450:4001::/48"),
        ("127.0.0.1", "127.0.0.1", None, None),
        ("192.168.1.7", "192.168.1.7", None, None),
        ("100.64.3.2", "100.64.3.2", None, None),
        ("fd00::7", "fd00::7", None, None),
        ("fe80::1%eth0", "fe80::1", None, None),
        ("node.example.org", "node.example.org", None, None),
    ],
)
def test_prefixes_of_a_host(host: str, own: str, subnet: str | None, diversity: str | None) -> None:
    assert (host_key(host), subnet_key(host), diversity_key(host)) == (own, subnet, diversity)


def test_loopback_is_known_by_every_spelling() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "8.8.8.8", "example.org")))
    assert ip_of("example.org") is None


def test_bucket_gives_its_burst_and_then_its_rate() -> None:
    buckets = Buckets[str](Rate(per_s=2.0, burst=4.0))
    assert [buckets.take("a", 1, now=0.0) for _ in range(5)] == [True] * 4 + [False]
    assert buckets.take("b", 4, now=0.0)
    assert not buckets.take("a", 1, now=0.4)
    assert buckets.take("a", 1, now=0.5)
    assert not buckets.take("a", 5, now=1000.0)
    assert buckets.take("a", 4, now=1000.0)


def test_bucket_that_is_overdrawn_is_empty_and_not_in_debt() -> None:
    buckets = Buckets[str](Rate(per_s=1.0, burst=10.0))
    assert not buckets.overdraw("a", 1e9, now=0.0)
    assert buckets.overdraw("a", 10, now=10.0)


def test_buckets_forget_the_least_recently_used() -> None:
    buckets = Buckets[int](Rate(per_s=0.0, burst=1.0), max_keys=100)
    assert buckets.take(-1, 1, now=0.0)
    for key in range(10_000):
        buckets.take(key, 1, now=0.0)
        assert not buckets.take(-1, 1, now=0.0)  # whoever keeps asking is not forgotten
    assert len(buckets) == 100


def test_counts_hold_what_is_open_and_nothing_else() -> None:
    chance = random.Random(5)
    counts = Counts[int](at_most=3)
    open_: list[int] = []
    for _ in range(5000):
        if open_ and chance.random() < 0.5:
            key = open_.pop(chance.randrange(len(open_)))
            counts.closed(key)
        else:
            key = chance.randrange(20)
            assert counts.has_room(key) == (open_.count(key) < 3)
            if counts.has_room(key):
                counts.opened(key)
                open_.append(key)
        assert counts.of(key) == open_.count(key)
    assert len(counts) == len(set(open_))


def test_handshakes_of_one_host_leave_room_for_others() -> None:
    limits = Limits()
    refused = []
    for _ in range(100):
        excess = limits.connecting("8.8.4.4", now=0.0)
        if excess is None:
            limits.connected("8.8.4.4")
        else:
            refused.append(excess)
    assert set(refused) == {Excess.HANDSHAKES}
    assert len(refused) == 100 - Shares().handshakes_per_host
    assert limits.connecting("9.9.9.9", now=0.0) is None
    limits.proven("8.8.4.4")
    assert limits.connecting("8.8.4.4", now=0.0) is None


def test_subnet_has_a_share_of_its_own() -> None:
    limits = Limits()
    admitted = 0
    for last in range(1, 255):
        host = f"203.1.4.{last}"
        if limits.connecting(host, now=0.0) is None:
            limits.connected(host)
            limits.proven(host)
            admitted += 1
    assert admitted == Shares().connections_per_subnet
    assert limits.connecting("203.1.5.1", now=0.0) is None


def test_lan_is_not_taken_for_one_tenant() -> None:
    limits = Limits()
    for last in range(1, 255):
        host = f"192.168.1.{last}"
        assert limits.connecting(host, now=0.0) is None
        limits.connected(host)


def test_local_host_may_have_more_open() -> None:
    limits = Limits()
    admitted = 0
    while limits.connecting("127.0.0.1", now=0.0) is None:
        limits.connected("127.0.0.1")
        admitted += 1
    assert admitted == LOCAL_FACTOR * Shares().handshakes_per_host


def test_connecting_too_often_is_refused_until_time_has_passed() -> None:
    shares = Shares(connecting_per_host=Rate(per_s=1.0, burst=5.0))
    limits = Limits(shares)
    assert [limits.connecting("8.8.4.4", now=0.0) for _ in range(6)] == [None] * 5 + [Excess.CONNECTION_RATE]
    assert limits.connecting("8.8.4.4", now=1.0) is None


def test_what_is_refused_to_a_host_costs_its_subnet_nothing() -> None:
    shares = Shares(connecting_per_host=Rate(0.0, 2.0), connecting_per_subnet=Rate(0.0, 4.0))
    limits = Limits(shares)
    for _ in range(50):
        limits.connecting("8.8.4.4", now=0.0)
    assert limits.connecting("8.8.4.5", now=0.0) is None


def test_peer_has_its_share_of_streams_requests_and_bytes() -> None:
    shares = Shares(streams_per_peer=2, requests_per_peer=Rate(1.0, 3.0), request_bytes_per_peer=Rate(1.0, 100.0))
    limits = Limits(shares)
    assert [limits.stream_opened("a", now=0.0) for _ in range(3)] == [None, None, Excess.STREAMS]
    limits.stream_closed("a")
    assert [limits.stream_opened("a", now=0.0)] == [None]
    limits.stream_closed("a")
    assert limits.stream_opened("a", now=0.0) is Excess.MESSAGES
    assert limits.requested("a", 100, now=0.0) is None
    assert limits.requested("a", 1, now=0.0) is Excess.BYTES
    assert limits.requested("b", 100, now=0.0) is None


def test_traffic_above_the_rate_is_noticed() -> None:
    shares = Shares(messages_per_peer=Rate(10.0, 100.0), bytes_per_peer=Rate(1000.0, 1000.0))
    limits = Limits(shares)
    assert limits.received("a", 100, 1000, now=0.0) is None
    assert limits.received("a", 11, 0, now=1.0) is Excess.MESSAGES
    assert limits.received("a", 0, 1001, now=2.0) is Excess.BYTES


def test_memory_is_bounded_when_attackers_choose_the_keys() -> None:
    limits = Limits(max_keys=500)
    chance = random.Random(7)
    for _ in range(20_000):
        host = ".".join(str(chance.randrange(1, 255)) for _ in range(4))
        limits.connecting(host, now=0.0)
        limits.stream_opened(host, now=0.0)
        limits.stream_closed(host)
        limits.requested(host, 10, now=0.0)
        limits.received(host, 1, 1, now=0.0)
    assert limits.num_keys <= 6 * 500
