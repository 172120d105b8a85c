"""When messages are delivered over an emulated line: p2p.link_emulation_core."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from fusion_node.errors import ConfigError
from p2p.link_emulation_core import WINDOW_BYTES, LineShape, OneWay, Uplink
from p2p.upload_core import bytes_on_wire

SHAPE = LineShape(rtt_ms=50.0, jitter_ms=5.0, rate_Mbps=100.0)


def one_way(shape: LineShape, *, seed: int = 0, uplink: Uplink | None = None, **options: int) -> OneWay:
    return OneWay(shape, uplink or Uplink(shape.rate_Bps), random.Random(seed), **options)


def deliveries(way: OneWay) -> list[tuple[float, bytes]]:
    """All that is under way, each at the moment that the timer names."""
    found = []
    while way:
        now = way.get_timer()
        assert now is not None
        message = way.take(now)
        if message is not None:
            found.append((now, message))
        way.is_full(now)
    return found


def trace(shape: LineShape, seed: int, num_messages: int, every_s: float) -> list[float]:
    """What each message takes, in seconds, of which one of 100 bytes is given every so often."""
    way = one_way(shape, seed=seed)
    given = [index * every_s for index in range(num_messages)]
    for now in given:
        way.put(bytes(100), now)
    return [at - now for now, (at, _) in zip(given, deliveries(way), strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_any_size_at_any_time_arrive_whole_in_order_and_never_early(seed: int) -> None:
    rng = random.Random(seed)
    rtt_ms = rng.choice([0.0, 20.0, 200.0])
    shape = LineShape(rtt_ms, rng.choice([0.0, rtt_ms / 2]), rng.choice([None, 1.0, 1000.0]))
    way, now, given = one_way(shape, seed=seed), 0.0, []
    for index in range(300):
        now += rng.choice([0.0, 0.0001, 0.05])
        message = index.to_bytes(2, "big") + bytes(rng.choice([1, 1000, 60_000]))
        given.append((now, message))
        way.put(message, now)
    arrived = deliveries(way)
    assert [message for _, message in arrived] == [message for _, message in given]
    assert all(a <= b for (a, _), (b, _) in itertools.pairwise(arrived))
    least_s = shape.rtt_ms / 2000 - shape.jitter_ms / 1000
    assert all(at >= put + least_s - 1e-9 for (put, _), (at, _) in zip(given, arrived, strict=True))


def test_spaced_messages_take_half_a_round_trip_in_the_mean_and_stay_within_the_jitter() -> None:
    shape = LineShape(rtt_ms=50.0, jitter_ms=5.0)
    took = trace(shape, seed=1, num_messages=4000, every_s=0.02)
    assert min(took) >= 0.020 - 1e-9
    assert max(took) <= 0.030 + 1e-9
    # The mean of 4,000 uniform draws over 10 ms: a standard deviation of 0.05 ms, and the seed is fixed.
    assert statistics.fmean(took) == pytest.approx(0.025, abs=0.0002)
    assert statistics.pstdev(took) == pytest.approx(0.010 / math.sqrt(12), rel=0.05)


def test_without_jitter_every_message_takes_exactly_half_a_round_trip() -> None:
    assert trace(LineShape(rtt_ms=50.0), 1, 100, 0.01) == pytest.approx([0.025] * 100, abs=1e-12)


def test_same_seed_gives_the_same_times_and_another_one_others() -> None:
    assert trace(SHAPE, 7, 200, 0.001) == trace(SHAPE, 7, 200, 0.001)
    assert trace(SHAPE, 7, 200, 0.001) != trace(SHAPE, 8, 200, 0.001)


def test_all_links_together_send_no_faster_than_the_rate() -> None:
    shape = LineShape(rtt_ms=50.0, rate_Mbps=8.0)
    uplink = Uplink(shape.rate_Bps)
    ways = [one_way(shape, uplink=uplink) for _ in range(3)]
    for index in range(60):
        ways[index % 3].put(bytes(10_000), 0.0)
    arrived = sorted(at for way in ways for at, _ in deliveries(way))
    each_s = bytes_on_wire(10_000) / 1e6
    assert arrived == pytest.approx([0.025 + (index + 1) * each_s for index in range(60)], abs=1e-9)


def test_what_was_sent_before_does_not_slow_down_what_comes_after_a_pause() -> None:
    shape = LineShape(rate_Mbps=8.0)
    way = one_way(shape)
    way.put(bytes(10_000), 0.0)
    way.put(bytes(10_000), 5.0)
    each_s = bytes_on_wire(10_000) / 1e6
    assert [at for at, _ in deliveries(way)] == pytest.approx([each_s, 5.0 + each_s], abs=1e-9)


def test_sender_waits_when_more_than_the_limit_waits_for_the_uplink_and_until_half_of_it_is_left() -> None:
    shape = LineShape(rtt_ms=50.0, rate_Mbps=8.0)
    way = one_way(shape)
    way.limit_unsent(30_000)
    for _ in range(3):
        way.put(bytes(10_000), 0.0)
        assert not way.is_full(0.0)
    way.put(bytes(10_000), 0.0)
    assert way.is_full(0.0)
    each_s, room_at = bytes_on_wire(10_000) / 1e6, []
    while way:
        now = way.get_timer()
        assert now is not None
        way.take(now)
        if not room_at and not way.is_full(now):
            room_at.append(now)
    # 15,000 bytes are left when three of the four messages have gone, before the first has arrived.
    assert room_at == pytest.approx([3 * each_s], abs=1e-9)


def test_sender_waits_when_the_window_is_full_though_the_uplink_is_not_limited() -> None:
    way = one_way(LineShape(rtt_ms=50.0))
    while not way.is_full(0.0):
        way.put(bytes(65_000), 0.0)
    assert way.get_timer() == pytest.approx(0.025)
    total = sum(len(message) for _, message in deliveries(way))
    assert WINDOW_BYTES < total <= WINDOW_BYTES + 65_000
    assert not way.is_full(0.025)


def test_nothing_is_due_while_the_transport_takes_no_more() -> None:
    way = one_way(LineShape(rtt_ms=50.0))
    way.put(b"one", 0.0)
    way.put(b"two", 0.0)
    assert way.take(0.025) == b"one"
    way.stall()
    assert way.take(1.0) is None
    assert way.get_timer() is None
    way.go_on()
    assert way.take(1.0) == b"two"


def test_cleared_line_delivers_nothing_and_needs_no_timer() -> None:
    way = one_way(LineShape(rtt_ms=50.0, rate_Mbps=1.0), window_bytes=1000)
    for _ in range(10):
        way.put(bytes(1000), 0.0)
    assert way.is_full(0.0)
    way.clear()
    assert not way
    assert way.get_timer() is None
    assert not way.is_full(0.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((-1.0, 0.0, None), "round trip of -1 ms"),
        ((math.nan, 0.0, None), "round trip of nan ms"),
        ((math.inf, 0.0, None), "round trip of inf ms"),
        ((5000.0, 0.0, None), "0 to 1000"),
        ((50.0, -1.0, None), "jitter of -1 ms"),
        ((50.0, math.nan, None), "jitter of nan ms"),
        ((50.0, 26.0, None), "which is 25 ms"),
        ((50.0, 0.0, 0.0), "rate of 0 Mbit/s"),
        ((50.0, 0.0, -5.0), "rate of -5 Mbit/s"),
        ((50.0, 0.0, math.nan), "rate of nan Mbit/s"),
        ((50.0, 0.0, math.inf), "rate of inf Mbit/s"),
    ],
)
def test_shape_that_makes_no_sense_is_refused(values: tuple[float, float, float | None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LineShape(*values)


def test_shape_is_told_in_words() -> None:
    assert str(SHAPE) == "50 ms round trip ± 5 ms each way, 100 Mbit/s up"
    assert str(LineShape(20.5)) == "20.5 ms round trip"
