"""The limit of uploads, in simulated time."""

from __future__ import annotations

import random

import pytest

from p2p.transfer_core import Lane
from p2p.upload_core import BURST_S, MIN_BURST_BYTES, STARVED_AFTER_SEGMENTS, Upload, bytes_on_wire

RATE_BPS = 1_000_000.0
SEGMENT = 8000


def run(upload: Upload, demands: dict[str, tuple[int, int]], *, until: float) -> tuple[dict[str, float], int]:
    """Each link wants to send so many segments of a lane. When each was done, and how many bytes went out."""
    now, sent_bytes = 0.0, 0
    left = {who: count for who, (_, count) in demands.items()}
    done: dict[str, float] = {}

    def pump(who: str) -> None:
        nonlocal sent_bytes
        while left[who] and upload.admits(who, demands[who][0], now):
            left[who] -= 1
            sent_bytes += SEGMENT
            upload.spent(SEGMENT, now)
            if not left[who]:
                done[who] = now

    for who in demands:
        pump(who)
    while any(left.values()) and now < until:
        due = upload.get_timer()
        assert due is not None
        assert due >= now
        now = due
        while isinstance(who := upload.next_waiting(now), str):
            pump(who)
        assert sent_bytes <= RATE_BPS * now + RATE_BPS * BURST_S + SEGMENT
    return done, sent_bytes


def test_rate_is_kept_and_used_up() -> None:
    done, sent_bytes = run(Upload(RATE_BPS, now=0.0), {"a": (Lane.PREFILL, 1000)}, until=20.0)
    assert done["a"] == pytest.approx(1000 * SEGMENT / RATE_BPS, rel=0.02)
    assert sent_bytes == 1000 * SEGMENT


def test_decode_of_any_link_goes_before_prefill_of_any_link() -> None:
    demands = {f"prefill-{n}": (int(Lane.PREFILL), 200) for n in range(3)} | {"decode": (int(Lane.DECODE), 10)}
    done, _ = run(Upload(RATE_BPS, now=0.0), demands, until=20.0)
    assert done["decode"] < 12 * SEGMENT / RATE_BPS
    assert all(when > 3.0 for who, when in done.items() if who != "decode")


@pytest.mark.parametrize("lane", [Lane.DECODE, Lane.PREFILL])
def test_links_that_ask_again_while_they_wait_have_their_turns_all_the_same(lane: Lane) -> None:
    """As one does that queues another frame every 10 ms, beside those that only wait."""
    upload, now, ask_at = Upload(RATE_BPS / 10, now=0.0), 0.0, 0.0
    counts = dict.fromkeys("abc", 0)

    def pump(who: str) -> None:
        while upload.admits(who, lane, now):
            counts[who] += 1
            upload.spent(SEGMENT, now)

    for who in counts:
        pump(who)
    while now < 60.0:
        due = upload.get_timer()
        assert due is not None
        if ask_at <= due:
            now, ask_at = max(now, ask_at), ask_at + 0.010
            pump("a")
            continue
        now = max(now, due)
        while isinstance(who := upload.next_waiting(now), str):
            pump(who)
    assert max(counts.values()) - min(counts.values()) <= 2
    assert sum(counts.values()) == pytest.approx(60.0 * RATE_BPS / 10 / SEGMENT, rel=0.02)


def test_link_that_was_called_and_has_nothing_to_send_saves_up_no_turn() -> None:
    upload = Upload(RATE_BPS, now=0.0)
    upload.spent(int(RATE_BPS), 0.0)
    assert not upload.admits("a", Lane.DECODE, 0.0)
    assert [upload.next_waiting(2.0) for _ in range(2)] == ["a", None]
    upload.spent(int(RATE_BPS), 2.0)
    assert not upload.admits("b", Lane.DECODE, 2.0)
    assert not upload.admits("a", Lane.DECODE, 4.0)  # b waits for longer
    assert [upload.next_waiting(4.0) for _ in range(2)] == ["b", "a"]


def test_links_of_one_lane_take_turns() -> None:
    done, _ = run(Upload(RATE_BPS, now=0.0), {who: (int(Lane.PREFILL), 100) for who in "abc"}, until=20.0)
    assert max(done.values()) - min(done.values()) < 20 * SEGMENT / RATE_BPS  # the first has had the burst


def test_no_lane_starves() -> None:
    demands = {"decode": (int(Lane.DECODE), 1700), "bulk": (int(Lane.BULK), 50)}
    done, _ = run(Upload(RATE_BPS, now=0.0), demands, until=30.0)
    expected_s = 50 * (STARVED_AFTER_SEGMENTS + 1) * SEGMENT / RATE_BPS
    assert done["bulk"] == pytest.approx(expected_s, rel=0.1)


def test_what_is_not_asked_for_is_paid_back() -> None:
    upload = Upload(RATE_BPS, now=0.0)
    upload.spent(500_000, 0.0)
    assert not upload.admits("a", Lane.CONTROL, 0.0)
    due = upload.get_timer()
    assert due == pytest.approx(0.45, abs=0.01)
    assert upload.next_waiting(0.3) is None
    assert upload.next_waiting(due) == "a"
    assert upload.admits("a", Lane.CONTROL, due)


def test_who_is_gone_is_not_waited_for() -> None:
    upload = Upload(RATE_BPS, now=0.0)
    upload.spent(500_000, 0.0)
    assert not upload.admits("a", Lane.CONTROL, 0.0)
    assert not upload.admits("b", Lane.PREFILL, 0.0)
    upload.forget("a")
    assert upload.next_waiting(1.0) == "b"
    upload.forget("b")
    assert upload.get_timer() is None


def test_nothing_is_saved_up_beyond_a_burst() -> None:
    for rate_Bps, burst_bytes in ((RATE_BPS, RATE_BPS * BURST_S), (2000.0, MIN_BURST_BYTES)):
        upload, sent = Upload(rate_Bps, now=0.0), 0
        while upload.admits("a", Lane.BULK, 1000.0):
            upload.spent(100, 1000.0)
            sent += 100
        assert sent == pytest.approx(burst_bytes, abs=100)


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_keeps_to_the_rate(seed: int) -> None:
    draw = random.Random(seed)
    demands = {str(n): (draw.randrange(4), draw.randrange(1, 60)) for n in range(8)}
    done, sent_bytes = run(Upload(RATE_BPS, now=0.0), demands, until=60.0)
    assert set(done) == set(demands)
    assert max(done.values()) >= (sent_bytes - RATE_BPS * BURST_S - SEGMENT) / RATE_BPS


def test_headers_are_counted() -> None:
    assert bytes_on_wire(1000) == 1000 + 8 + 52
    assert 1.03 < bytes_on_wire(65_535) / 65_535 < 1.05
