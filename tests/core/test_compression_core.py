"""When compression is chosen, in simulated time: no clock is read and nothing is compressed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.types import PeerId
from p2p.compression_core import (
    LEVELS,
    MAX_TRIAL_SHARE,
    MIN_BYTES,
    TRY_AGAIN_S,
    Choice,
    CompressionCore,
    Measured,
)

PEER, OTHER = PeerId("peer"), PeerId("other")
MBIT = 125_000.0
LOOPBACK, GIGABIT, UPLINK = 1e9, 1000 * MBIT, 10 * MBIT


@dataclass
class Machine:
    """What compressing costs here, and what becomes of the data, per level."""

    stored_share: dict[int, float] = field(default_factory=lambda: {1: 0.85, 3: 0.85})
    spent_s_per_byte: dict[int, float] = field(default_factory=lambda: {1: 2e-9, 3: 4e-9})
    noise: float = 0.0


@dataclass
class Sender:
    """Sends frames over one link and keeps the books."""

    machine: Machine = field(default_factory=Machine)
    seed: int = 1
    now: float = 1000.0
    trial_s: float = 0.0
    taken_s: float = 0.0
    """On the wire and at both ends, without trials."""
    num_trials: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.core = CompressionCore(Random(self.seed))

    def measure(self, num_bytes: int, level: int) -> Measured:
        spent_s = num_bytes * self.machine.spent_s_per_byte[level]
        spent_s *= 1 + self.random.expovariate(1 / self.machine.noise) if self.machine.noise else 1
        return Measured(num_bytes, round(num_bytes * self.machine.stored_share[level]), 0.7 * spent_s, 0.3 * spent_s)

    def send(self, num_bytes: int, rate_Bps: float | None, *, every_s: float = 0.05, peer: PeerId = PEER) -> Choice:
        choice = self.core.choose(peer, "f32", num_bytes, rate_Bps=rate_Bps, now=self.now)
        if choice.is_trial_due:
            measured = {level: self.measure(num_bytes, level) for level in LEVELS}
            self.num_trials += 1
            self.trial_s += sum(m.compress_s + (m.decompress_s or 0) for m in measured.values())
            self.core.note_trial(choice.kind, measured, now=self.now)
        stored = num_bytes
        if choice.level is not None:
            result = self.measure(num_bytes, choice.level)
            self.core.note_compressed(choice.kind, choice.level, result)
            stored = result.stored_bytes
            self.taken_s += num_bytes * self.machine.spent_s_per_byte[choice.level]
        if rate_Bps is not None:
            self.taken_s += stored / rate_Bps
        self.now += every_s
        return choice

    def levels(self, num_frames: int, num_bytes: int, rate_Bps: float | None, **more: float) -> Iterator[int | None]:
        for _ in range(num_frames):
            yield self.send(num_bytes, rate_Bps, **more).level  # type: ignore[arg-type]


@pytest.mark.parametrize("num_bytes", [2304, 294_912, 4 << 20])
@pytest.mark.parametrize("rate_Bps", [LOOPBACK, GIGABIT])
def test_on_a_fast_link_it_stays_off_and_costs_next_to_nothing(num_bytes: int, rate_Bps: float) -> None:
    machine = Machine(spent_s_per_byte={1: 8e-9, 3: 9e-9})
    sender = Sender(machine)
    assert set(sender.levels(20_000, num_bytes, rate_Bps)) == {None}
    elapsed_s = 20_000 * 0.05
    assert sender.num_trials >= 5
    assert sender.trial_s <= MAX_TRIAL_SHARE * elapsed_s
    assert sender.num_trials <= elapsed_s / (0.5 * TRY_AGAIN_S) + 5


@pytest.mark.parametrize("num_bytes", [2304, 294_912])
def test_on_a_slow_link_it_is_on_from_the_second_frame(num_bytes: int) -> None:
    sender = Sender()
    levels = list(sender.levels(2000, num_bytes, UPLINK))
    assert levels[0] is None
    assert set(levels[1:]) == {1}
    plain_s = 2000 * num_bytes / UPLINK
    assert sender.taken_s < 0.88 * plain_s


def test_what_does_not_shrink_is_never_compressed_however_slow_the_link() -> None:
    for share in (1.0, 1.02, 0.99):
        sender = Sender(Machine(stored_share=dict.fromkeys(LEVELS, share)))
        assert set(sender.levels(3000, 65_536, 0.1 * MBIT)) == {None}


def test_it_follows_a_link_that_changes() -> None:
    sender = Sender()
    assert set(list(sender.levels(100, 65_536, UPLINK))[1:]) == {1}
    assert set(sender.levels(100, 65_536, GIGABIT)) == {None}
    assert not sender.core.is_on(PEER)
    assert set(sender.levels(100, 65_536, UPLINK)) == {1}
    assert sender.core.is_on(PEER)


def test_it_follows_data_that_changes() -> None:
    sender = Sender()
    list(sender.levels(100, 65_536, UPLINK))
    sender.machine.stored_share = dict.fromkeys(LEVELS, 1.0)
    # The other level has to be disproved as well.
    assert set(list(sender.levels(100, 65_536, UPLINK))[8:]) == {None}
    sender.machine.stored_share = dict.fromkeys(LEVELS, 0.7)
    # A trial every ten seconds or so, and the median of five has to turn.
    assert list(sender.levels(1500, 65_536, UPLINK))[-1] == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_rate_that_wavers_around_the_break_even_does_not_make_it_flap(seed: int) -> None:
    sender = Sender(seed=seed)
    break_even_Bps = 0.15 / 2e-9
    levels = [sender.send(65_536, break_even_Bps * sender.random.uniform(0.9, 1.1)).level for _ in range(2000)]
    assert set(levels) == {None}
    list(sender.levels(20, 65_536, break_even_Bps / 2))
    levels = [sender.send(65_536, break_even_Bps * sender.random.uniform(0.78, 0.98)).level for _ in range(2000)]
    assert set(levels) == {1}


def test_single_measurements_that_are_far_off_change_nothing() -> None:
    sender = Sender(Machine(noise=0.2))
    list(sender.levels(50, 65_536, UPLINK))
    for _ in range(20):
        choice = sender.send(65_536, UPLINK)
        assert choice.level == 1
        if sender.random.random() < 0.2:  # the process was not running for 100 ms
            sender.core.note_compressed(choice.kind, 1, Measured(65_536, 55_000, 0.1))
            list(sender.levels(4, 65_536, UPLINK))


def test_the_level_is_the_one_that_takes_the_least_time() -> None:
    machine = Machine(stored_share={1: 0.9, 3: 0.8}, spent_s_per_byte={1: 2e-9, 3: 20e-9})
    assert list(Sender(machine).levels(50, 65_536, 1 * MBIT))[-1] == 3
    assert list(Sender(machine).levels(50, 65_536, 100 * MBIT))[-1] == 1
    assert list(Sender(machine).levels(50, 65_536, 1000 * MBIT))[-1] is None


def test_nothing_is_tried_while_the_rate_is_unknown_or_the_tensor_tiny() -> None:
    sender = Sender()
    assert set(sender.levels(100, 65_536, None)) == {None}
    assert set(sender.levels(100, MIN_BYTES - 1, 0.1 * MBIT)) == {None}
    assert sender.num_trials == 0


def test_links_share_what_they_measured_and_choose_for_themselves() -> None:
    sender = Sender()
    list(sender.levels(10, 65_536, UPLINK))
    num_trials = sender.num_trials
    assert sender.send(65_536, UPLINK, peer=OTHER).level == 1
    assert sender.num_trials == num_trials
    assert sender.send(65_536, LOOPBACK, peer=OTHER).level is None
    assert sender.send(65_536, UPLINK).level == 1
    sender.core.forget(PEER)
    assert not sender.core.is_on(PEER)


def test_sizes_are_kinds_of_their_own() -> None:
    sender = Sender()
    list(sender.levels(10, 65_536, UPLINK))
    small = sender.send(2304, UPLINK)
    assert small.level is None
    assert small.is_trial_due
    assert small.kind != sender.send(65_536, UPLINK).kind


def test_trials_of_many_kinds_together_keep_within_their_share() -> None:
    sender = Sender(Machine(spent_s_per_byte={1: 1e-7, 3: 1e-7}))  # a slow machine: 0.2 s per trial of a megabyte
    began = sender.now
    for index in range(40_000):
        sender.send(600 << index % 12, GIGABIT, every_s=0.005)
    assert sender.num_trials > 12
    assert sender.trial_s <= MAX_TRIAL_SHARE * (sender.now - began) + 0.5  # the last one is paid for afterwards


@given(
    rate=st.floats(1e4, 1e9),
    share=st.floats(0.3, 1.05),
    extra=st.floats(0, 0.1),
    spent=st.floats(1e-10, 1e-7),
    noise=st.sampled_from([0.0, 0.3]),
    num_bytes=st.integers(MIN_BYTES, 1 << 20),
    seed=st.integers(0, 99),
)
def test_it_is_never_much_slower_than_the_best_fixed_choice(
    rate: float, share: float, extra: float, spent: float, noise: float, num_bytes: int, seed: int
) -> None:
    machine = Machine({1: share, 3: share - extra}, {1: spent, 3: 3 * spent}, noise)
    sender = Sender(machine, seed)
    num_frames = 300
    list(sender.levels(num_frames, num_bytes, rate))
    per_byte = [1 / rate, *(machine.stored_share[level] / rate + machine.spent_s_per_byte[level] for level in LEVELS)]
    best_s = num_frames * num_bytes * min(per_byte)
    # The first frame goes plain. What compression must save beyond its cost before it begins is bounded by that cost,
    # of which noise has a part.
    allowance = 1.0 + (0.31 + 2 * noise) * spent * 3 / min(per_byte) + 0.025
    assert sender.taken_s <= best_s * allowance + 3 * num_bytes / rate
