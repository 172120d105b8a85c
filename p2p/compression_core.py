"""Whether compressing a tensor pays on a link, and at which level: decided from what was measured, per kind of tensor.

Guarantees: a tensor is compressed only where, by the measurements so far, the seconds that its link saves exceed those
that both ends spend on it. Trials take at most MAX_TRIAL_SHARE of the time, and where there is no saying how
fast a link is, nothing is tried and nothing compressed. Tensors below MIN_BYTES are left alone.

Assumes: the peer decompresses about as fast as this machine does. A link that is busy with other traffic delivers less
of ours, and its rate says so. ``now`` never goes back.

States: a link is off or on for a kind of tensor, a kind being an encoding and a power of two of its size: one decoded
row costs other seconds per byte than a prefill chunk, and has another ratio. What a kind costs is a property of this
machine and its model, so it is shared by all links; it is the median of the last RECENT measurements, since on a busy
machine single ones are off by any factor.

Timers: none of its own. When the next trial of a kind is due (TRY_AGAIN_S after the last one) is seen when a tensor of
that kind is sent.

Source: the usual balance of CPU against bandwidth, as in adaptive online compression (Jeannot, Knutsson and Björkman,
HPDC 2002), which however looks at queues; a rate that the receiver has timed says the same without waiting for one.

Ugly: compressing one chunk while the one before is on the wire costs no time, and is counted as if it did.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fusion_node.types import PeerId

if TYPE_CHECKING:
    from random import Random

LEVELS = (1, 3)
"""Of Zstandard. Below 1 nothing of hidden state is left to gain, above 3 it gains less than it costs on any link."""

MIN_BYTES = 512
"""A call costs some 10 µs whatever its size: not below what a home uplink sends in that time ten times over."""

MIN_SAVED_SHARE = 0.02
"""Less is not worth being wrong about."""

SWITCH_ON_GAIN = 1.3
"""How much more than it costs compression must save before it begins; it ends when it saves less than it costs."""

MAX_TRIAL_SHARE = 0.01
"""Of the time, for trials of all kinds together."""

TRY_AGAIN_S = 10.0
"""Between trials of one kind once there are SETTLED_TRIALS of it, give or take a half: a trial of 64 KiB takes 1 ms."""

SETTLED_TRIALS = 3
RECENT = 5


class Kind(NamedTuple):
    """Tensors that are alike in what compressing them costs and gains."""

    dtype: str
    size_class: int
    """Binary logarithm of the number of bytes, rounded down."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One compression, and its undoing where that was measured too."""

    raw_bytes: int
    stored_bytes: int
    compress_s: float
    decompress_s: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do with a tensor.

    Attributes:
        level: to compress it at; None: send it as it is.
        is_trial_due: compress some of it at each of LEVELS, time that, and tell ``note_trial``.
    """

    kind: Kind
    level: int | None
    is_trial_due: bool


@dataclass(slots=True)
class _Cost:
    """Of one kind at one level, per byte."""

    stored_share: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    compress_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    decompress_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    # Medians of these. They are looked at for every tensor, and change with every measurement.
    saved_share: float = 0.0
    spent_s: float = 0.0

    def add(self, measured: Measured) -> None:
        self.stored_share.append(measured.stored_bytes / measured.raw_bytes)
        self.compress_s.append(measured.compress_s / measured.raw_bytes)
        if measured.decompress_s is not None:
            self.decompress_s.append(measured.decompress_s / measured.raw_bytes)
        self.saved_share = 1.0 - statistics.median(self.stored_share)
        self.spent_s = statistics.median(self.compress_s) + statistics.median(self.decompress_s)


_NOTHING: frozenset[Kind] = frozenset()


@dataclass(slots=True)
class _KindState:
    costs: dict[int, _Cost] = field(default_factory=dict)
    num_trials: int = 0
    next_trial_at: float = float("-inf")


class CompressionCore:
    """The choices of one process. See the head of this file.

    Args:
        random: spreads the trials of kinds that began together.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kinds: dict[Kind, _KindState] = {}
        self._on: dict[PeerId, set[Kind]] = {}
        self._trials_at = float("-inf")
        """When the share of time that trials may take allows for the next one."""

    def choose(self, peer: PeerId, dtype: str, num_bytes: int, *, rate_Bps: float | None, now: float) -> Choice:
        """What to do with a tensor that goes to ``peer``.

        Args:
            dtype, num_bytes: its encoding, and its size before compression.
            rate_Bps: what the link delivers; None when that is not known.
            now: monotonic seconds.
        """
        kind = Kind(dtype, num_bytes.bit_length() - 1)
        if rate_Bps is None or rate_Bps <= 0 or num_bytes < MIN_BYTES:
            return Choice(kind, None, False)
        state = self._kinds.setdefault(kind, _KindState())
        is_trial_due = now >= self._trials_at and now >= state.next_trial_at
        return Choice(kind, self._level(peer, kind, state, rate_Bps), is_trial_due)

    def is_on(self, peer: PeerId) -> bool:
        """Whether some kind of tensor is compressed on this link."""
        return bool(self._on.get(peer))

    def note_trial(self, kind: Kind, measured: Mapping[int, Measured], *, now: float) -> None:
        """Takes what a trial measured at each level, the time for decompression included."""
        state = self._kinds.setdefault(kind, _KindState())
        spent_s = 0.0
        for level, result in measured.items():
            state.costs.setdefault(level, _Cost()).add(result)
            spent_s += result.compress_s + (result.decompress_s or 0.0)
        state.num_trials += 1
        self._trials_at = now + spent_s / MAX_TRIAL_SHARE
        if state.num_trials >= SETTLED_TRIALS:
            state.next_trial_at = now + TRY_AGAIN_S * self._random.uniform(0.5, 1.5)

    def note_compressed(self, kind: Kind, level: int, measured: Measured) -> None:
        """Takes what compressing a tensor for sending has cost and gained."""
        self._kinds[kind].costs[level].add(measured)

    def forget(self, peer: PeerId) -> None:
        """The link is gone: the next one with this peer begins without compression."""
        self._on.pop(peer, None)

    def _level(self, peer: PeerId, kind: Kind, state: _KindState, rate_Bps: float) -> int | None:
        on = self._on.get(peer, _NOTHING)
        threshold = 1.0 if kind in on else SWITCH_ON_GAIN
        best: tuple[float, int] | None = None
        for level, cost in state.costs.items():
            wire_s = cost.saved_share / rate_Bps
            net_s = wire_s - cost.spent_s
            if cost.saved_share >= MIN_SAVED_SHARE and wire_s > threshold * cost.spent_s:
                best = max(best or (net_s, level), (net_s, level))
        if best is None:
            if kind in on:
                self._on[peer].discard(kind)
            return None
        self._on.setdefault(peer, set()).add(kind)
        return best[1]


__all__ = ["LEVELS", "MIN_BYTES", "Choice", "CompressionCore", "Kind", "Measured"]
