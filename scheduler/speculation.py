"""What speculation is worth: expected speeds, calibrated confidence, and the mode that pays.

Three parts that know nothing of one another:

* The closed forms: the ring latency L of a frame, and from it the expected tokens per second of plain decode, of
  chains and of trees (``Ring``, ``plain_rate``, ``chain_rate``, ``async_chain_rate``, ``tree_rate``, ``least_worth``).
* ``Calibration`` turns a drafter's own confidence into how often it was right, by counts per source and confidence.
* ``ModePolicy`` chooses between plain decode, synchronous chains and the asynchronous tree by what each has brought.

Guarantees: a mode that turns out slower than plain decode is left when it is MAX_TRIAL_LOSS_TOKENS behind, and tried
again only when all such losses are MAX_LOSS_SHARE of what was committed; a calibrated probability is in (0, 1), and is
the drafter's own as long as nothing was counted.

Assumes: rounds of one session; ``now`` never goes back. No timers. Source: docs/speculation.md; chains after Leviathan,
Kalman & Matias (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318), the rule by which a node is worth its price after
Dinkelbach's renewal-reward argument. Still ugly: acceptance is taken as the same at every depth.
"""

from __future__ import annotations

import enum
import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_node.types import MonotonicS

LEAST_PROBABILITY = 1e-3
"""Below which a node is worth nothing, however cheap: a hundred such in flight would add a tenth of a token."""

MAX_CHAIN = 32
"""Tokens of a synchronous chain: at an acceptance of .95 the best one is shorter on every ring on earth."""

NUM_BINS = 16
"""Of confidence, evenly spaced in its logarithm of odds between 1 and 99 per cent."""

_BIN_EDGES = tuple(1.0 / (1.0 + 99.0 ** (1.0 - 2.0 * edge / NUM_BINS)) for edge in range(1, NUM_BINS))

PRIOR_WEIGHT = 8.0
"""Candidates for which a drafter's own word counts in every bin."""

MAX_COUNT = 512.0
"""Candidates remembered per bin; then all counts are halved, so that a new topic shows."""

MAX_LOSS_SHARE = 0.015
"""Of the tokens so far: what trials of modes that turned out slower than plain decode may have cost when the next one
begins. Half of what is promised, 3 %."""

MIN_STEP_S = 1e-6
"""A step that took less was not measured: two events at the same reading of a clock."""

MIN_SPELL_TOKENS = 8
MIN_SPELL_ROUND_TRIPS = 3.0
"""A mode is judged by no less."""

SPELL_TOKENS = 32
"""Tokens over which the rate of a mode is averaged: it halves what is older."""

MIN_BACK_OFF_TOKENS = 64
"""Until a mode that did not pay is tried again, at least."""

MAX_TRIAL_LOSS_TOKENS = 3.0
"""Behind plain decode, where a trial ends early."""

MIN_GAIN = 0.98
"""Of plain decode's speed: a mode that brings more is kept to, since measurements differ by as much."""

MIN_EXPECTED_GAIN = 1.25
"""By a formula, from which on chains are tried although another mode is well."""

PLAIN_CHECK_BELOW = 1.3
PLAIN_CHECK_EVERY_TOKENS = 256
PLAIN_CHECK_TOKENS = 4
"""Where speculation brings less than this many times plain decode, as it was last measured, plain decode is measured
again so often: it may have become faster."""


# closed forms


@dataclass(frozen=True, slots=True)
class Ring:
    """What a frame costs on its way from the user through all stages and back.

    Attributes:
        legs_s: seconds of all one-way legs.
        fixed_s, row_s: per stage, of a forward and of each row in it.
        wire_row_s: of a row on one leg.
        draft_s: of one forward of the drafter.
        user_s: what the user's side takes with what comes back.
    """

    legs_s: float
    fixed_s: tuple[float, ...]
    row_s: tuple[float, ...]
    wire_row_s: float = 0.0
    draft_s: float = 0.0
    user_s: float = 0.0

    def latency_s(self, num_rows: int) -> float:
        """L: from sending a frame of so many rows until its rows are of use."""
        wire = (len(self.fixed_s) + 1) * self.wire_row_s
        return self.legs_s + sum(self.fixed_s) + num_rows * (sum(self.row_s) + wire) + self.user_s

    def pass_s(self, num_rows: int) -> float:
        """Of the slowest stage."""
        passes = (fixed + row * num_rows for fixed, row in zip(self.fixed_s, self.row_s, strict=True))
        return max(*passes, num_rows * self.wire_row_s)

    @property
    def price_s(self) -> float:
        """By how much one more row delays a frame."""
        return sum(self.row_s) + (len(self.fixed_s) + 1) * self.wire_row_s


def plain_rate(ring: Ring) -> float:
    """Tokens per second without speculation."""
    return 1.0 / ring.latency_s(1)


def chain_rate(acceptance: float, ring: Ring, length: int) -> float:
    """Tokens per second of synchronous chains of ``length`` drafted tokens."""
    tokens = _geometric(acceptance, length + 1)
    return tokens / (length * ring.draft_s + ring.latency_s(length + 1))


def best_chain_length(acceptance: float, ring: Ring) -> int:
    """Which length makes synchronous chains fastest: 0 where none is faster than plain decode."""
    return max(range(MAX_CHAIN + 1), key=lambda length: chain_rate(acceptance, ring, length))


def chain_length_estimate(acceptance: float, ring: Ring) -> float:
    """The same in closed form: ``ln(1 + λ L / h) / λ - 1`` with λ = -ln a, h what one more token costs."""
    if acceptance <= 0.0:
        return 0.0
    decay = -math.log(min(acceptance, 1.0 - 1e-9))
    per_token = max(ring.draft_s + ring.price_s, 1e-9)
    return max(0.0, math.log1p(decay * ring.latency_s(1) / per_token) / decay - 1.0)


def async_chain_rate(acceptance: float, ring: Ring, frame_rows: int) -> float:
    """Tokens per second of chains that are sent on in frames of ``frame_rows`` while earlier ones are on their way.

    Renewal at each miss: a run of 1 / (1 - a) tokens takes L, and the pace for each token but its last.
    """
    miss = max(1e-9, 1.0 - acceptance)
    pace = max(ring.draft_s, ring.pass_s(frame_rows) / frame_rows, ring.wire_row_s)
    latency = ring.latency_s(frame_rows) + (frame_rows - 1) / 2 * pace
    return 1.0 / miss / (latency + acceptance / miss * pace)


def async_chain_limit(acceptance: float, ring: Ring) -> float:
    """What no chain exceeds, however it is sent: one L for every miss."""
    return 1.0 / (max(1e-9, 1.0 - acceptance) * ring.latency_s(1))


def tree_depth(ranks: Sequence[float], num_nodes: int) -> float:
    """Tokens of a tree of the ``num_nodes`` most probable nodes that turn out right, on average.

    Args:
        ranks: how often a drafter's first, second, … candidate is right, the same at every node. Where a drafter knows
            which positions are hard, a tree is worth more than this.
    """
    found, total, number = [(-p, i) for i, p in enumerate(ranks)], 0.0, len(ranks)
    heapq.heapify(found)
    for _ in range(num_nodes):
        if not found:
            break
        probability = -heapq.heappop(found)[0]
        total += probability
        for p in ranks:
            number += 1
            heapq.heappush(found, (-probability * p, number))
    return total


def tree_rate(ranks: Sequence[float], ring: Ring, frame_rows: int) -> float:
    """Tokens per second that no asynchronous tree exceeds which sends ``frame_rows`` per pass of the slowest stage."""
    latency = ring.latency_s(frame_rows)
    in_flight = max(1, round(frame_rows * latency / ring.pass_s(frame_rows)))
    return (1.0 + tree_depth(ranks, in_flight)) / latency


def least_worth(rate: float, price_s: float) -> float:
    """The probability from which on a node is worth its row: below, the delay it causes costs more tokens than it
    brings.

    Args:
        rate: tokens per second that are committed now.
        price_s: what one more row costs everybody, seconds.
    """
    return min(1.0, max(LEAST_PROBABILITY, rate * price_s))


def _geometric(ratio: float, terms: int) -> float:
    return float(terms) if ratio >= 1.0 else (1.0 - ratio**terms) / (1.0 - ratio)


# calibration


@dataclass(slots=True)
class _Bin:
    right: float = 0.0
    count: float = 0.0


class Calibration:
    """How often candidates were right, by their source and its own confidence in them.

    Satisfies fusion_node.client.drafting.Calibration. One may serve many answers.
    """

    def __init__(self) -> None:
        self._bins: dict[str, list[_Bin]] = {}

    def probability(self, source: str, confidence: float) -> float:
        """How often candidates of this source and confidence were chosen, in (0, 1)."""
        confidence = _clamped(confidence)
        bins = self._bins.get(source)
        if bins is None:
            return confidence
        counted = bins[bisect_right(_BIN_EDGES, confidence)]
        return _clamped((counted.right + PRIOR_WEIGHT * confidence) / (counted.count + PRIOR_WEIGHT))

    def record(self, source: str, confidence: float, is_chosen: bool) -> None:
        """One more candidate was verified: the text went on to where it hung, and then with it or otherwise."""
        counted = self._bins.setdefault(source, [_Bin() for _ in range(NUM_BINS)])[
            bisect_right(_BIN_EDGES, _clamped(confidence))
        ]
        counted.right += is_chosen
        counted.count += 1.0
        if counted.count > MAX_COUNT:
            counted.right /= 2
            counted.count /= 2


def _clamped(confidence: float) -> float:
    # Comparisons instead of min and max: this is called for every candidate of every path.
    return confidence if 0.001 <= confidence <= 0.999 else 0.999 if confidence > 0.999 else 0.001


# modes


class Mode(enum.StrEnum):
    """How a session goes on."""

    PLAIN = "plain"
    """One row, and then its answer is waited for."""
    CHAIN = "chain"
    """A few drafted tokens in one frame, and then the answer is waited for."""
    TREE = "tree"
    """Frames of the most probable nodes, one behind another, without waiting."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do until further notice.

    Attributes:
        chain_length: drafted tokens of a frame; of CHAIN.
    """

    mode: Mode
    chain_length: int = 0


@dataclass(slots=True)
class _Measured:
    """A mode's tokens and the seconds that they took; what is older weighs less."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 0.5 ** (tokens / SPELL_TOKENS)
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0.0 else None


class ModePolicy:
    """Which mode a session is in. One may serve many answers over one route, one after another.

    Begins with the tree, since its first frame is a plain step and tells how long one takes.

    Attributes:
        mode: the present one.
        acceptance: how often a drafter's first candidate was right, lately.
        plain_s: seconds of a plain step; None while unknown.
        num_tokens: committed so far.
        lost_tokens: that plain decode would have brought in the time that slower modes took.
    """

    def __init__(self, modes: Sequence[Mode] = tuple(Mode)) -> None:
        self._modes = frozenset(modes) | {Mode.PLAIN}
        self.mode = next(m for m in (Mode.TREE, Mode.CHAIN, Mode.PLAIN) if m in self._modes)
        self.acceptance = 0.5
        self.plain_s: float | None = None
        self.num_tokens = 0
        self.lost_tokens = 0.0
        self._measured: dict[Mode, _Measured] = {mode: _Measured() for mode in Mode}
        self._chain_cost: tuple[float, float] | None = None
        self._since: MonotonicS | None = None
        self._switched_at: MonotonicS | None = None
        self._spell_tokens = 0
        self._tokens_since_switch = 0
        self._plain_checked_at = 0
        self._num_guesses = 0
        self._tried_at: dict[Mode, int] = {}

    def rate(self, mode: Mode) -> float | None:
        """Tokens per second that a mode has brought; None before it was measured."""
        if mode is Mode.PLAIN and self.plain_s is not None:
            return 1.0 / self.plain_s
        return self._measured[mode].rate

    def plain_step(self, seconds: float) -> None:
        """A row that met no other of this session would have come back after so long."""
        seconds = max(seconds, MIN_STEP_S)
        self.plain_s = seconds if self.plain_s is None else 0.75 * self.plain_s + 0.25 * seconds

    def chain_cost(self, *, draft_s: float, price_s: float) -> None:
        """What one more token of a chain costs: a forward of the drafter, and a row on every stage."""
        self._chain_cost = (draft_s, price_s)

    def drafted(self, *, is_right: bool) -> None:
        """A token was committed for whose place there had been candidates: whether it was the first of them."""
        self._num_guesses += 1
        self.acceptance += (is_right - self.acceptance) / min(SPELL_TOKENS, self._num_guesses + 2)

    def committed(self, *, now: MonotonicS) -> None:
        """One more token was."""
        self.num_tokens += 1
        self._spell_tokens += 1
        self._tokens_since_switch += 1
        if self._since is None:
            self._switched_at = self._since = now
            self._spell_tokens = self._tokens_since_switch = 0

    def paused(self) -> None:
        """What goes by until the next token says nothing of any mode."""
        self._since = self._switched_at = None

    def decide(self, *, now: MonotonicS) -> Decision:
        """The mode from now on. To be asked whenever tokens were committed."""
        step_s = self.plain_s
        if self._since is not None and self._switched_at is not None and step_s is not None and len(self._modes) > 1:
            if self._is_warming_up(now, step_s):
                self._since, self._spell_tokens = now, 0
            if self._is_lossy(now, step_s):
                self.lost_tokens += self._loss(now, step_s)
                self._end_spell(now, step_s)
                self._switch(self._best(step_s), now)
            elif self._is_spell_over(now, step_s):
                self._end_spell(now, step_s)
                self._switch(self._best(step_s), now)
        return Decision(self.mode, self._chain_length(step_s) if self.mode is Mode.CHAIN else 0)

    def _is_warming_up(self, now: MonotonicS, step_s: float) -> bool:
        """What comes out within a round trip of a change was sent before it."""
        return self._switched_at is not None and now - self._switched_at < step_s

    def _loss(self, now: MonotonicS, step_s: float) -> float:
        """Tokens that plain decode would have brought beyond those that came since the mode was changed to."""
        since = self._switched_at if self._switched_at is not None else now
        return (now - since) / step_s - self._tokens_since_switch

    def _is_lossy(self, now: MonotonicS, step_s: float) -> bool:
        return self.mode is not Mode.PLAIN and self._loss(now, step_s) > MAX_TRIAL_LOSS_TOKENS

    def _is_spell_over(self, now: MonotonicS, step_s: float) -> bool:
        if self._since is None:
            return False
        if self.mode is Mode.PLAIN:
            return self._spell_tokens >= PLAIN_CHECK_TOKENS
        return self._spell_tokens >= MIN_SPELL_TOKENS and now - self._since >= MIN_SPELL_ROUND_TRIPS * step_s

    def _end_spell(self, now: MonotonicS, step_s: float) -> None:
        tokens, since = self._spell_tokens, self._since
        if since is None or now <= since:
            return
        if self.mode is Mode.PLAIN:
            if tokens:
                self.plain_step((now - since) / tokens)
        else:
            self._measured[self.mode].add(tokens, now - since)
        self._since, self._spell_tokens = now, 0

    def _switch(self, mode: Mode, now: MonotonicS) -> None:
        if mode is self.mode:
            return
        if self.mode is not Mode.PLAIN:
            self._tried_at[self.mode] = self.num_tokens
        if mode is Mode.PLAIN:
            self._plain_checked_at = self.num_tokens
        elif self._is_worse_than_plain(mode):
            self._measured[mode] = _Measured()  # a fresh trial; what it was worth long ago says nothing
        self.mode = mode
        self._switched_at = self._since = now
        self._spell_tokens = self._tokens_since_switch = 0

    def _best(self, step_s: float) -> Mode:
        plain = 1.0 / step_s
        rates = {Mode.PLAIN: plain if self.mode is Mode.PLAIN else MIN_GAIN * plain}
        for mode in self._modes - {Mode.PLAIN}:
            measured = self._measured[mode].rate
            if measured is not None and not self._is_worse_than_plain(mode):
                rates[mode] = measured
        best = max((Mode.TREE, Mode.CHAIN, Mode.PLAIN), key=lambda mode: rates.get(mode, -1.0))
        trials = [mode for mode in (Mode.TREE, Mode.CHAIN) if self._is_worth_a_trial(mode, rates[best], step_s)]
        if trials:
            return min(trials, key=lambda mode: self._tried_at.get(mode, -1))
        is_due = self.num_tokens - self._plain_checked_at >= PLAIN_CHECK_EVERY_TOKENS
        if best is self.mode and best is not Mode.PLAIN and is_due and rates[best] < PLAIN_CHECK_BELOW * plain:
            return Mode.PLAIN
        return best

    def _is_worth_a_trial(self, mode: Mode, best_rate: float, step_s: float) -> bool:
        if mode not in self._modes or mode is self.mode:
            return False
        if self._measured[mode].rate is not None and not self._is_worse_than_plain(mode):
            return False
        if mode is Mode.CHAIN and self._expected_chain_rate(step_s) < MIN_EXPECTED_GAIN * best_rate:
            return False
        if mode not in self._tried_at:
            return True
        is_paid = self.lost_tokens + MAX_TRIAL_LOSS_TOKENS <= MAX_LOSS_SHARE * self.num_tokens
        return is_paid and self.num_tokens - self._tried_at[mode] >= MIN_BACK_OFF_TOKENS

    def _is_worse_than_plain(self, mode: Mode) -> bool:
        measured, step_s = self._measured[mode].rate, self.plain_s
        least = MIN_GAIN if mode is self.mode else 1.0
        return measured is not None and step_s is not None and measured * step_s < least

    def _chain_ring(self, step_s: float) -> Ring:
        draft_s, price_s = self._chain_cost or (step_s, step_s)
        return Ring(max(0.0, step_s - price_s), (0.0,), (price_s,), 0.0, draft_s)

    def _expected_chain_rate(self, step_s: float) -> float:
        ring = self._chain_ring(step_s)
        return chain_rate(self.acceptance, ring, best_chain_length(self.acceptance, ring))

    def _chain_length(self, step_s: float | None) -> int:
        if step_s is None:
            return 1
        return max(1, best_chain_length(self.acceptance, self._chain_ring(step_s)))
