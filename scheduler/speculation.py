"""What speculation is worth: expected speeds, calibrated confidence, and the mode that pays.

Three parts that know nothing of one another:

* The closed forms: the ring latency L of a frame, and from it the expected tokens per second of plain decode, of
  chains and of trees (``Ring``, ``plain_rate``, ``chain_rate``, ``async_chain_rate``, ``tree_rate``, ``least_worth``).
* ``Calibration`` turns a drafter's own confidence into how often it was right, by counts per source and confidence.
* ``ModePolicy`` chooses between plain decode, synchronous chains and the asynchronous tree: by what guesses that were
  not sent would have brought whether to try a mode, and by what it then brings whether to keep to it.

Guarantees: what modes that turn out slower than plain decode cost is bounded by an allowance of tokens: it begins with
FIRST_ALLOWANCE_TOKENS, grows by ALLOWANCE_SHARE of what is committed up to MAX_ALLOWANCE_TOKENS, and a mode is left
when it is used up; a calibrated probability is in (0, 1), and is the drafter's own as long as nothing was counted.

Assumes: rounds of one session; ``now`` never goes back; a plain step takes as long as when it was last measured. No
timers. Source: docs/speculation.md; chains after Leviathan, Kalman & Matias (arXiv 2211.17192) and Chen et al. (arXiv
2302.01318), the rule by which a node is worth its price after Dinkelbach's renewal-reward argument. Still ugly: what is
expected of a tree is a formula with an error of a fifth, which trust in a mode then takes out.

Above 600 lines, a quarter of them bounds with their reasons; each of the three parts is short.
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

MAX_ROWS = 1 << 10
"""Of a frame: no limit."""

MAX_CHAIN = 32
"""Tokens of a synchronous chain: at an acceptance of .95 the best one is shorter on every ring on earth."""

NUM_BINS = 16
"""Of confidence, evenly spaced in its logarithm of odds between 1 and 99 per cent."""

_BIN_EDGES = tuple(1.0 / (1.0 + 99.0 ** (1.0 - 2.0 * edge / NUM_BINS)) for edge in range(1, NUM_BINS))

PRIOR_WEIGHT = 8.0
"""Candidates for which a drafter's own word counts in every bin."""

MAX_COUNT = 512.0
"""Candidates remembered per bin; then all counts are halved, so that a new topic shows."""

FIRST_ALLOWANCE_TOKENS = 1.25
ALLOWANCE_SHARE = 0.015
MAX_ALLOWANCE_TOKENS = 4.0
"""What modes slower than plain decode may cost, in tokens that it would have brought: at first, more of it per token
committed, and at most. A mode that is left has frames under way, for a token more: 3 % and two tokens is what is
promised."""

MIN_ALLOWANCE_TOKENS = 0.5
"""For a trial: with less, it would be over before it says anything."""

RUN_TOKENS = 6
RUN_PROBABILITY = 0.5
MIN_RUN_ALLOWANCE_TOKENS = 0.0
RUN_LOSS_TOKENS = 0.25
"""With less still, down to this, where so many first guesses in a row were right, none of them less probable: a text
is being copied. Such a trial may lose no more, and begins with as few rows. Without it an answer whose first guesses
were poor would wait for 70 tokens although all that is guessed comes."""

GAIN_SHARE = 0.5
"""Of what a mode has gained, that is allowed to be lost by others, up to the most there is."""

MAX_DRAWDOWN_TOKENS = 1.5
DRAWDOWN_SHARE = 0.05
"""Behind the best that a mode has been since it was begun, where it is left: so much, and so much of what it had gained
by then, since a mode that pays has runs of bad luck too."""

MIN_STEP_S = 1e-6
"""A step that took less was not measured: two events at the same reading of a clock."""

MAX_STEP_LOSS_TOKENS = 24.0
MAX_PAYING_LOSS_TOKENS = 4.0
STALL_GROWTH = 4.0
"""That a mode may have cost within one step, and one that has paid so far: what takes longer is a node that was busy or
a wire that was down, and says nothing of modes. So many times as much where it happens again before a mode has paid:
then it was the mode."""

MAX_STEP_GROWTH = 2.0
NUM_SETTLING_STEPS = 8
"""Of a plain step over those before it, for the same reason: where all have become ten times slower, twenty of them say
so. After one that was slower nothing is tried for so many more, until it is mostly forgotten."""

NUM_FIRST_STEPS = 2
"""Of plain decode, of which the faster one counts: with nothing else known, a step that was
slow by chance would have every other mode seem to pay, for as long as it is kept to."""

MAX_STEP_RATIO = 1.5
"""Of a plain step as it is known to the time of a frame with more rows, from which on the frame is believed: it cannot
have taken less, but for noise and prices."""

MIN_SPELL_TOKENS = 8
MIN_SPELL_ROUND_TRIPS = 3.0
"""A mode is compared with another by no less."""

SPELL_TOKENS = 32
"""Tokens over which the rate of a mode, and what guesses are worth, are averaged."""

RECENT_TOKENS = 4
"""The same where a text turns into one that is guessed well. Only by how probable the guesses are: to have been right
four times is luck more often."""

PRIOR_TOKENS = 4
PRIOR_FIRST, PRIOR_ANY, PRIOR_WORTH = 0.4, 0.6, 4.0
"""What guesses are taken to be worth before any was verified, and as how many tokens that counts: the first of a place
right, any of them, and how many are worth their row."""

MIN_GAIN = 0.98
"""Of plain decode's speed: a mode that brings more is kept to, since measurements differ by as much."""

MIN_EXPECTED_GAIN = 1.08
"""Of plain decode's speed, from which on a mode is tried."""

MIN_TREE_GAIN = 1.1
"""Of what a chain is expected to bring, from which on a tree is tried instead: it is less certain."""

MAX_PASS_SHARE = 0.2
WAITING_TREE_GAIN = 0.9
"""Where the slowest stage takes no more of a step, most of it is waiting, and there no chain is as fast as a tree."""

MIN_CHANGE_GAIN = 1.25
"""Of what a mode brings, from which on the other is tried in its place."""

MAX_TREE_FOR_CHAIN = 1.5
"""A tree that brings more is not left for a chain: where it does, none has been seen that is faster."""

ROUND_SHARE = 0.33
"""Of what may still be lost, that a round without any luck may cost: a mode that pays has several of them in a row."""

CHAIN_MARGIN = 1.5
"""Of a row's price that a node of a chain must be worth: a row costs the user's side something as well."""

TREE_ROWS = 16.0
"""Of a frame, at most, for what is expected of a tree."""

PLAIN_WEIGHT = 0.125
"""Of one step in the mean of plain steps."""

TRUST_WEIGHT = 0.5
MIN_TRUST, MAX_TRUST = 0.3, 1.3
TRUST_TOKENS = 512.0
"""By how much a mode missed what was expected of it counts for what is expected of it next, within these bounds, and is
forgotten over so many tokens: costs change that no formula knows of."""

SHADOW_SHARE = 0.02
"""Of a plain step that drafting may take in plain decode, only to know what it would be worth: by the clock, of which
computing is the smaller part where drafters need no model, and while the stages compute."""

PLAIN_CHECK_BELOW = 1.3
PLAIN_CHECK_EVERY_TOKENS = 256
PLAIN_CHECK_TOKENS = 4
RARE_CHECK_TOKENS = 512
"""Where speculation brings less than this many times plain decode, as it was last measured, plain decode is measured
again so often: it may have become faster. Where it brings more, after so many tokens for each time that it brings,
which costs one token of a hundred."""

FIRST_CHECK_TOKENS = 16
MIN_PLAIN_STEPS = 6
"""The first time is sooner, where it is known from fewer steps."""


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


def _geometric(ratio: float, terms: float) -> float:
    return terms if ratio >= 1.0 else (1.0 - ratio**terms) / (1.0 - ratio)


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
        least: probability from which on a drafted node of a chain is worth its row; of CHAIN.
        least_to_draft: probability of its tip from which on a chain waits to be drafted further; of CHAIN.
        max_rows: on their way at a time that may be wrong.
        shadow_s: seconds per token that drafting may take that nothing comes of but knowledge; None: there is to be
            none. Of PLAIN.
    """

    mode: Mode
    least: float = 1.0
    least_to_draft: float = 1.0
    max_rows: int = MAX_ROWS
    shadow_s: float | None = None


@dataclass(frozen=True, slots=True)
class Guess:
    """What was guessed for a place whose token is known now.

    Attributes:
        is_first, is_found: the token was the first candidate, or that or any that was worth a row.
        probability: of the first candidate; 0: there was none.
        num_worth: candidates that were worth a row.
    """

    is_first: bool
    is_found: bool
    probability: float
    num_worth: int


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the parts of a step take, in seconds.

    Attributes:
        price_s: of one more row on all stages and the wire.
        pass_s: of the slowest stage, for one row.
        choose_s: of choosing a token on the user's side.
        draft_s: of a forward of the drafters.
    """

    price_s: float
    pass_s: float = 0.0
    choose_s: float = 0.0
    draft_s: float = 0.0


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


class _Worth:
    """What the guesses of some drafters have been worth: running means per token."""

    __slots__ = ("any", "first", "hit", "num", "recent", "recent_sent", "run", "sent", "worth")

    def __init__(self) -> None:
        self.num = 0
        self.first, self.any, self.worth = PRIOR_FIRST, PRIOR_ANY, PRIOR_WORTH
        self.hit, self.sent = PRIOR_FIRST, 1.0
        """A first candidate that would have been worth its row as a node of a chain: and right, and at all."""
        self.recent = self.recent_sent = 0.0
        """How probable such candidates are, and how many there are, lately."""
        self.run = 0
        """First candidates no less probable than RUN_PROBABILITY that were right, since one was wrong."""

    def add(self, guess: Guess, least: float) -> None:
        self.num += 1
        weight = 1.0 / min(SPELL_TOKENS, self.num + PRIOR_TOKENS)
        is_sent = guess.probability >= least
        self.first += weight * (guess.is_first - self.first)
        self.any += weight * (guess.is_found - self.any)
        self.worth += weight * (guess.num_worth - self.worth)
        self.hit += weight * ((is_sent and guess.is_first) - self.hit)
        self.sent += weight * (is_sent - self.sent)
        self.recent += (guess.probability * is_sent - self.recent) / RECENT_TOKENS
        self.recent_sent += (is_sent - self.recent_sent) / RECENT_TOKENS
        if not guess.is_first:
            self.run = 0
        elif guess.probability >= RUN_PROBABILITY:
            self.run += 1


@dataclass(slots=True)
class _Trial:
    """Of the present mode, since it was begun, in tokens beyond those of plain decode.

    Attributes:
        may_lose: whatever the allowance is.
        gain, best: now, and when it was at its best.
    """

    since: MonotonicS
    may_lose: float = MIN_ALLOWANCE_TOKENS
    gain: float = 0.0
    best: float = 0.0
    num_tokens: int = 0


class ModePolicy:
    """Which mode a session is in. One may serve many answers over one route, one after another.

    Where there is a choice, begins with a plain step, which tells how long one takes and what a row costs; a tree's
    first frame would be no other.

    Attributes:
        mode: the present one.
        acceptance: how often a drafter's first candidate was right, lately.
        plain_s: seconds of a plain step; None while unknown.
        num_tokens: committed so far.
    """

    def __init__(self, modes: Sequence[Mode] = tuple(Mode)) -> None:
        self._modes = frozenset(modes) | {Mode.PLAIN}
        first = (m for m in (Mode.TREE, Mode.CHAIN) if m in self._modes)
        self.mode = Mode.PLAIN if Mode.PLAIN in modes else next(first, Mode.PLAIN)
        self.plain_s: float | None = None
        self.num_tokens = 0
        self._costs: StepCosts | None = None
        self._num_plain = 0
        self._allowance = FIRST_ALLOWANCE_TOKENS
        """Tokens that may be lost now by a mode that is slower than plain decode."""
        self._measured: dict[Mode, _Measured] = {mode: _Measured() for mode in Mode}
        self._trust: dict[Mode, float] = {Mode.CHAIN: 1.0, Mode.TREE: 1.0}
        self._worth = _Worth()
        self._since: MonotonicS | None = None
        self._new_tokens = 0
        """Since then."""
        self._trial = _Trial(MonotonicS(0.0))
        self._before: Mode | None = None
        """What paid until the present mode was tried in its place."""
        self._is_settling = False
        """What is committed next was delayed by frames of the mode before."""
        self._plain_checked_at = 0
        self._max_step_loss = MAX_STEP_LOSS_TOKENS
        self._try_from = 0
        """Plain steps before which nothing is tried."""
        self._check: tuple[Mode, int] | None = None
        """Plain decode is only being measured: what to go on with, and when."""

    @property
    def acceptance(self) -> float:
        return self._worth.first

    def rate(self, mode: Mode) -> float | None:
        """Tokens per second that a mode has brought; None before it was measured."""
        if mode is Mode.PLAIN and self.plain_s is not None:
            return 1.0 / self.plain_s
        return self._measured[mode].rate

    def plain_step(self, seconds: float) -> None:
        """A row that met no other of this session would have come back after so long, and its token been chosen."""
        seconds = max(seconds, MIN_STEP_S)
        self._num_plain += 1
        if self.plain_s is None:
            self.plain_s = seconds
        elif self._num_plain <= NUM_FIRST_STEPS:
            self.plain_s = min(self.plain_s, seconds)
        else:
            most_s = MAX_STEP_GROWTH * self.plain_s
            if seconds > most_s:
                seconds, self._try_from = most_s, self._num_plain + NUM_SETTLING_STEPS
            self.plain_s += max(PLAIN_WEIGHT, 1.0 / self._num_plain) * (seconds - self.plain_s)

    def step_at_most(self, seconds: float) -> None:
        """A frame that was no plain step took so long until its token was chosen, its other rows not counted."""
        if self.plain_s is None:
            return
        if self._num_plain < NUM_FIRST_STEPS:
            self.plain_s = min(self.plain_s, max(seconds, MIN_STEP_S))
        elif MAX_STEP_RATIO * seconds < self.plain_s:
            self.plain_step(seconds)

    def costs_are(self, costs: StepCosts) -> None:
        """As last measured."""
        self._costs = costs

    def guessed(self, guess: Guess) -> None:
        """A token was committed for whose place candidates had been asked for."""
        self._worth.add(guess, self._least(CHAIN_MARGIN))

    def committed(self, *, now: MonotonicS) -> None:
        """One more token was."""
        self.num_tokens += 1
        self._allowance = min(MAX_ALLOWANCE_TOKENS, self._allowance + ALLOWANCE_SHARE)
        for mode, trust in self._trust.items():
            self._trust[mode] = trust + (1.0 - trust) / TRUST_TOKENS
        if self._since is None:
            self._since = now
        else:
            self._new_tokens += 1

    def paused(self) -> None:
        """What goes by until the next token says nothing of any mode."""
        self._since = None
        self._new_tokens = 0

    def decide(self, *, now: MonotonicS) -> Decision:
        """The mode from now on. To be asked whenever tokens were committed."""
        if self._since is not None and self._new_tokens and len(self._modes) > 1:
            self._account(now)
            if self.plain_s is not None:
                self._choose(self.plain_s, now)
        return self._decision()

    def expected(self, mode: Mode) -> float:
        """What a mode would bring now, as a multiple of plain decode."""
        if mode is Mode.PLAIN or self.plain_s is None or self._costs is None:
            return 1.0
        expected = self._expected_chain if mode is Mode.CHAIN else self._expected_tree
        return expected(self._costs, self.plain_s)

    def _decision(self) -> Decision:
        match self.mode:
            case Mode.CHAIN:
                return Decision(self.mode, self._least(CHAIN_MARGIN), self._least_to_draft(), self._max_rows())
            case Mode.TREE:
                return Decision(self.mode, max_rows=self._max_rows())
            case Mode.PLAIN if len(self._modes) > 1:
                return Decision(self.mode, shadow_s=SHADOW_SHARE * (self.plain_s or 0.0))
        return Decision(self.mode)

    # what modes have brought

    def _account(self, now: MonotonicS) -> None:
        since, tokens = self._since, self._new_tokens
        if since is None or now <= since:
            return
        seconds = now - since
        self._since, self._new_tokens = now, 0
        if self.mode is not Mode.PLAIN:
            if self.plain_s is not None:
                seconds = self._without_stall(tokens, seconds, self.plain_s)
            self._measured[self.mode].add(tokens, seconds)
            if self.plain_s is not None:
                trial = self._trial
                trial.num_tokens += tokens
                trial.gain += tokens - seconds / self.plain_s
                trial.best = max(trial.best, trial.gain)
        elif self._is_settling:
            self._is_settling = False
            if self.plain_s is not None:
                self._charge(min(MAX_PAYING_LOSS_TOKENS, seconds / self.plain_s - tokens))
        else:
            self.plain_step(seconds / tokens)

    def _without_stall(self, tokens: int, seconds: float, step_s: float) -> float:
        if self._trial.gain >= MIN_SPELL_TOKENS * (1.0 - 1.0 / MIN_EXPECTED_GAIN):
            return min(seconds, (tokens + MAX_PAYING_LOSS_TOKENS) * step_s)
        most_s = (tokens + self._max_step_loss) * step_s
        if seconds > most_s:
            self._max_step_loss *= STALL_GROWTH
        return min(seconds, most_s)

    def _charge(self, tokens: float) -> None:
        self._allowance -= max(0.0, tokens)

    def _choose(self, step_s: float, now: MonotonicS) -> None:
        if self.mode is Mode.PLAIN:
            if self._check is not None:
                mode, until = self._check
                if self.num_tokens < until:
                    return
                self._check = None
                self._begin(mode, now)
                return
            best = self._most_promising()
            if best is not Mode.PLAIN:
                self._begin(best, now)
            return
        trial = self._trial
        is_judged = trial.num_tokens >= MIN_SPELL_TOKENS and now - trial.since >= MIN_SPELL_ROUND_TRIPS * step_s
        rate = self._measured[self.mode].rate
        gain = 1.0 if rate is None else rate * step_s
        next_loss = max(0.0, -trial.gain / max(1, trial.num_tokens))
        if self._left() < next_loss or (trial.num_tokens >= SPELL_TOKENS and gain < MIN_GAIN):
            self._leave(now)
        elif is_judged:
            self._learn_trust(gain)
            if gain >= MIN_EXPECTED_GAIN:
                self._max_step_loss = MAX_STEP_LOSS_TOKENS
            other = Mode.CHAIN if self.mode is Mode.TREE else Mode.TREE
            every = RARE_CHECK_TOKENS * gain
            if gain < PLAIN_CHECK_BELOW:
                is_first = self._num_plain < MIN_PLAIN_STEPS
                every = FIRST_CHECK_TOKENS if is_first else PLAIN_CHECK_EVERY_TOKENS
            is_due = self.num_tokens - self._plain_checked_at >= every
            is_open = self._may_try(other) and (other is Mode.TREE or gain < MAX_TREE_FOR_CHAIN)
            if is_open and self._believed(other) >= MIN_CHANGE_GAIN * gain:
                before = self.mode
                self._begin(other, now)
                self._before = before
            elif is_due:
                self._check = (self.mode, self.num_tokens + 1 + PLAIN_CHECK_TOKENS)
                self._begin(Mode.PLAIN, now)

    def _most_promising(self) -> Mode:
        if self._num_plain < self._try_from or not (self._may_try(Mode.CHAIN) or self._may_try(Mode.TREE)):
            return Mode.PLAIN
        chain = self._believed(Mode.CHAIN) if Mode.CHAIN in self._modes else 0.0
        tree = self._believed(Mode.TREE) if Mode.TREE in self._modes else 0.0
        is_waiting = self._costs is not None and self._costs.pass_s < MAX_PASS_SHARE * (self.plain_s or 0.0)
        if tree >= MIN_EXPECTED_GAIN and tree >= (WAITING_TREE_GAIN if is_waiting else MIN_TREE_GAIN) * chain:
            return Mode.TREE
        if chain >= MIN_EXPECTED_GAIN:
            return Mode.CHAIN
        return Mode.PLAIN

    def _left(self) -> float:
        """Tokens that the present mode may lose from now on."""
        trial = self._trial
        limit = min(MAX_DRAWDOWN_TOKENS, max(trial.may_lose, self._allowance)) + DRAWDOWN_SHARE * trial.best
        return limit - (trial.best - trial.gain)

    def _max_rows(self) -> int:
        step_s, costs = self.plain_s, self._costs
        if step_s is None or costs is None or len(self._modes) < 2:
            return MAX_ROWS
        # What was gained is not to be lost again, but a part of it may be risked.
        at_risk = ROUND_SHARE * (self._left() + max(0.0, self._trial.gain))
        return max(1, min(MAX_ROWS, int(at_risk * step_s / max(costs.price_s, MIN_STEP_S))))

    def _may_try(self, mode: Mode) -> bool:
        is_copying = self._worth.run >= RUN_TOKENS and self._allowance >= MIN_RUN_ALLOWANCE_TOKENS
        return mode in self._modes and (self._allowance >= MIN_ALLOWANCE_TOKENS or is_copying)

    def _believed(self, mode: Mode) -> float:
        return self.expected(mode) * self._trust[mode]

    def _leave(self, now: MonotonicS) -> None:
        """The present mode does not pay."""
        trial = self._trial
        if self.plain_s is not None:
            took = max(trial.num_tokens - trial.gain, MIN_STEP_S)
            self._learn_trust(min(trial.num_tokens / took, (self._measured[self.mode].rate or math.inf) * self.plain_s))
        self._begin(Mode.PLAIN if self._before is None else self._before, now)

    def _learn_trust(self, gain: float) -> None:
        expected = max(1e-3, self.expected(self.mode))
        trust = self._trust[self.mode]
        trust += TRUST_WEIGHT * (gain / expected - trust)
        self._trust[self.mode] = min(MAX_TRUST, max(MIN_TRUST, trust))

    def _begin(self, mode: Mode, now: MonotonicS) -> None:
        self._is_settling = mode is Mode.PLAIN
        gain = self._trial.gain
        self._allowance = min(MAX_ALLOWANCE_TOKENS, self._allowance + GAIN_SHARE * max(0.0, gain))
        self._charge(-gain)
        if mode is Mode.PLAIN:
            self._plain_checked_at = self.num_tokens
        else:
            self._measured[mode] = _Measured()
        self.mode = mode
        self._before = None
        self._trial = _Trial(now, RUN_LOSS_TOKENS if self._allowance < MIN_ALLOWANCE_TOKENS else MIN_ALLOWANCE_TOKENS)
        self._worth.run = 0

    # what they would bring

    def _net_s(self) -> float:
        """Of a plain step, what a token saves that comes with the one before."""
        step_s, costs = self.plain_s, self._costs
        if step_s is None:
            return 0.0
        return step_s - min(costs.choose_s if costs else 0.0, 0.9 * step_s)

    def _least(self, margin: float) -> float:
        net_s, costs = self._net_s(), self._costs
        if costs is None or net_s <= 0.0:
            return LEAST_PROBABILITY if self.plain_s is None else 1.0
        return min(1.0, max(LEAST_PROBABILITY, margin * costs.price_s / net_s))

    def _least_to_draft(self) -> float:
        net_s, costs = self._net_s(), self._costs
        if costs is None or net_s <= 0.0:
            return 1.0 if self.plain_s is None else math.inf
        return (costs.draft_s + costs.price_s) / (net_s * max(0.05, self.acceptance))

    def _expected_chain(self, costs: StepCosts, step_s: float) -> float:
        """As many tokens of a chain as are worth their rows and were drafted while the last one was on its way."""
        worth, draft_s = self._worth, costs.draft_s
        net, price = self._net_s() / step_s, costs.price_s / step_s
        least = math.log(self._least(CHAIN_MARGIN))
        most = min(MAX_CHAIN, 1.0 + step_s / max(draft_s, MIN_STEP_S))

        def gain(hit: float, sent: float) -> float:
            right = min(0.99, hit / max(hit, sent, 1e-3))
            length = min(most, least / math.log(max(right, 1e-3)))
            tokens, rows = _geometric(hit, length + 1.0), _geometric(sent, length + 1.0) - 1.0
            waits = min(draft_s / step_s, hit * net) * (1.0 - hit)
            return tokens / (1.0 + rows * price + (tokens - 1.0) * (1.0 - net) + waits)

        return max(gain(worth.hit, worth.sent), gain(worth.recent, worth.recent_sent))

    def _expected_tree(self, costs: StepCosts, step_s: float) -> float:
        """Renewal at each miss, as with chains, where a tree misses half as often as the first of many candidates and
        half as often as all: that fits what docs/speculation.md measures to a tenth. What is known waits for half a
        pass of what was guessed."""

        worth = self._worth

        def gain(first: float, found: float, num_worth: float) -> float:
            hit = min(0.98, (first + found) / 2)
            run = 1.0 / (1.0 - hit)
            rows = min(TREE_ROWS, max(1.0, num_worth / max(0.05, 1.0 - first)))
            latency = step_s + costs.pass_s / 2 + (rows - 1.0) * costs.price_s
            pace = max(costs.draft_s, costs.choose_s, costs.price_s)
            return run * step_s / (latency + (run - 1.0) * pace)

        now = gain(worth.first, worth.any, worth.worth)
        return max(now, gain(worth.recent, max(worth.any, worth.recent), 1.0)) if worth.recent > worth.first else now
