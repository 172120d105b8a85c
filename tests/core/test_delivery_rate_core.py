"""The delivery rate of a link, from acknowledgements in simulated time."""

from __future__ import annotations

import pytest

from p2p.delivery_rate_core import (
    FIRST_CHUNK_BYTES,
    FIRST_UNSENT_BYTES,
    MIN_CHUNK_BYTES,
    MIN_UNSENT_BYTES,
    RECENT_SAMPLES,
    DeliveryRate,
)
from p2p.transfer_core import MAX_CHUNK_BYTES


def deliver(rate: DeliveryRate, rate_Bps: float, *, start: tuple[float, int], num_acks: int) -> tuple[float, int]:
    """Acknowledgements every half second."""
    now, total = start
    for _ in range(num_acks):
        rate.delivered(total, now)
        now, total = now + 0.5, total + round(rate_Bps * 0.5)
    return now, total


@pytest.mark.parametrize("rate_Bps", [10_000.0, 125_000.0, 1_250_000.0, 100_000_000.0])
def test_rate_of_a_busy_link_is_measured_and_sets_the_size_of_chunks(rate_Bps: float) -> None:
    rate = DeliveryRate()
    assert rate.chunk_bytes(None) == FIRST_CHUNK_BYTES
    assert rate.unsent_bytes() == FIRST_UNSENT_BYTES
    rate.blocked()
    deliver(rate, rate_Bps, start=(10.0, 5000), num_acks=3)
    assert rate.rate_Bps == pytest.approx(rate_Bps, rel=0.01)
    chunk_bytes = rate.chunk_bytes(None)
    assert MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES
    assert chunk_bytes == MIN_CHUNK_BYTES or chunk_bytes <= 0.01 * rate_Bps
    assert rate.unsent_bytes() >= MIN_UNSENT_BYTES


def test_quiet_sender_is_not_taken_for_a_slow_path() -> None:
    rate = DeliveryRate()
    deliver(rate, 1000.0, start=(10.0, 0), num_acks=10)
    assert rate.rate_Bps is None
    rate.blocked()
    start = deliver(rate, 1_000_000.0, start=(20.0, 0), num_acks=3)
    rate.idle()
    deliver(rate, 1000.0, start=start, num_acks=2 * RECENT_SAMPLES)
    assert rate.rate_Bps == pytest.approx(1_000_000.0)


def test_pause_of_this_program_does_not_slow_the_path_but_a_slower_path_is_noticed() -> None:
    rate = DeliveryRate()
    rate.blocked()
    now, total = deliver(rate, 1_000_000.0, start=(0.0, 0), num_acks=3)
    now, total = deliver(rate, 10_000.0, start=(now, total), num_acks=2)
    assert rate.rate_Bps == pytest.approx(1_000_000.0)
    deliver(rate, 10_000.0, start=(now, total), num_acks=RECENT_SAMPLES + 1)
    assert rate.rate_Bps == pytest.approx(10_000.0)


def test_fast_path_is_measured_between_two_acknowledgements() -> None:
    rate = DeliveryRate()
    rate.blocked()
    rate.delivered(0, 1.0)
    assert rate.delivered(256 * 1024, 1.001)
    assert rate.rate_Bps == pytest.approx(256 * 1024 / 0.001, rel=0.01)


def test_near_peer_gets_the_largest_chunks_at_once_and_a_limit_makes_them_smaller() -> None:
    rate = DeliveryRate()
    rate.round_trip(0.001)
    assert rate.chunk_bytes(None) == MAX_CHUNK_BYTES
    assert rate.chunk_bytes(1_000_000.0) == 8000
    rate.round_trip(0.05)
    assert rate.chunk_bytes(None) == FIRST_CHUNK_BYTES
