"""What is believed of a node's speed: what it claims within what is possible, until it was measured.

A node's own times are a claim too. What cannot be faked is how long a round took by the user's own clock: whatever of
it neither the way nor the nodes' own times explain is charged to the nodes that took part, beyond what is tolerated.
That is nobody's fault and yet takes its time: plans count it for every message, at the median of the last decode steps.

Guarantees: no claim, whatever it says, makes a node faster than ``fastest`` or slower than SLOWEST_S; after one
observed step it weighs no more than the measurement leaves to it, which is half after HALF_LIFE_S. What one node says
never changes what is believed of another that was measured alone, and whatever is told of a round (its last stage could
write others' times), all stages together are put down for no longer than it took. At most MAX_PEERS nodes are
remembered, and MAX_SAMPLES of each, all of them within SLOWEST_S, MAX_MESSAGE_S and MAX_SAMPLE_ROWS.

Assumes: ``now`` is monotonic seconds. The legs of an observed round are those of the caller, who has measured at least
its own; a tenth of a round and TOLERANCE_S per stage may be missing from them without anybody being charged.

States of a node: unmeasured, measured at one to three widths, half forgotten. No timers: age is reckoned when asked.

Source: the split of what is unexplained among the stages of a round is one step of Kaczmarz's method: over rounds with
different stages it converges on those that cause it. Whoever took part in many rounds without an excess is charged
less. Ugly: stages that always serve together share their excess, and so do those of the first round of all.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fusion_node.types import PeerId
from scheduler.topology import SPEED_ROWS, Speed

MEMORY_Bps, FLOPS = 1e13, 1e16
"""Beyond any device of today: an NVIDIA B200 reads 8 TB/s and does 4.5e15 dense operations in 8 bits a second."""

FASTEST = Speed(2e-6, 2e-6, 4e-6)
"""Of the smallest layers, a launched kernel alone takes that."""

SLOWEST_S = 60.0
"""Per layer. Nobody waits for that; it keeps sums finite."""

MAX_QUEUE_S = 60.0

MAX_MESSAGE_S = 60.0
"""Either way: what a message can have taken beyond what was expected. A stopped program waits for any time."""

MAX_SAMPLE_ROWS = 2**24
"""Of one step: more than any context has."""

HALF_LIFE_S, QUEUE_HALF_LIFE_S = 3600.0, 60.0
"""Of what was measured. Devices change with what else their owner does, queues with every user who comes."""

MAX_SAMPLES = 9
"""Per node and width, of which the median counts: one pause of anybody's does not make a node slow."""

TOLERANCE_S, TOLERANCE_SHARE = 0.002, 0.1
"""Per stage, and of the round: jitter and hand-over that no leg shows."""

RECENT_ROUNDS, MAX_ROUTES = 5, 256
"""Of the same stages, of whose excess the median counts: one pause among them is nobody's slowness, and a slowdown that
stays is known after three. Of as many routes is that remembered."""

RELIEF = 0.25
"""Of what a round took less than expected, which is taken off what its stages are charged."""

MAX_BETTER = 4.0
"""Times as fast as it claims, at most: a node has no reason to claim less than it does, but records are old."""

MAX_ROUNDS = 64
"""Decode steps, of which the median says what a message costs beyond what was expected: half of an answer or more."""

MAX_TRUST = 15
"""A stage that took part in so many rounds that were explained is charged a sixteenth of what a new one is."""

SHORTFALL = 1.5
"""Times what it claims, from which on people are told."""

MAX_DISCOUNT = 2.0
"""On the claim of a node that was not measured, however much those that were measured fell short."""

MIN_MEASURED = 8
"""Nodes, before the claims of others are discounted by what these fell short."""

MAX_PEERS = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """What a node says of one shard. Any numbers, also NaN: nothing is checked yet."""

    peer: PeerId
    seconds_per_layer: tuple[float, float, float]
    """For 1, 16 and 256 rows."""
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Belief:
    """What to plan with.

    Attributes:
        note: for people, when the node falls short of what it claims; else empty.
        is_measured: whether anything of it was observed.
    """

    speed: Speed
    queue_s: float
    note: str = ""
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class StageStep:
    """One stage's part in a round, by its own word (StageTiming)."""

    peer: PeerId
    num_layers: int
    compute_s: float
    queue_s: float


def fastest_speed(layer_bytes: float, layer_parameters: float) -> Speed:
    """What no device can beat for a layer of so many bytes and parameters, of which all are read and used."""
    one = max(FASTEST.rows_1_s, layer_bytes / MEMORY_Bps)
    wide = [max(one, 2 * layer_parameters * rows / FLOPS) for rows in SPEED_ROWS[1:]]
    return Speed(one, wide[0], max(wide[1], FASTEST.rows_256_s))


def clamp_speed(claimed: Sequence[float], fastest: Speed = FASTEST) -> Speed:
    """Seconds per layer for 1, 16 and 256 rows within what is possible; more rows never take less time.

    What is not a number, or negative, counts as SLOWEST_S: a claim that makes no sense attracts nobody.
    """
    floors = (fastest.rows_1_s, fastest.rows_16_s, fastest.rows_256_s)
    known = [_bounded(seconds, floor, SLOWEST_S) for seconds, floor in zip(claimed, floors, strict=True)]
    return Speed(known[0], max(known[:2]), max(known))


def _bounded(value: float, least: float, most: float) -> float:
    return min(max(value, least), most) if value >= 0.0 else most  # NaN compares as false


def _sample(num_rows: int, seconds_per_layer: float) -> tuple[int, float]:
    return min(num_rows, MAX_SAMPLE_ROWS), _bounded(seconds_per_layer, 0.0, SLOWEST_S)


def _message(seconds: float) -> float:
    return min(max(seconds, -MAX_MESSAGE_S), MAX_MESSAGE_S)


@dataclass(slots=True)
class _Measured:
    """Of one node: seconds per layer by width, and what it waited."""

    samples: tuple[deque[tuple[int, float]], ...] = field(
        default_factory=lambda: tuple(deque(maxlen=MAX_SAMPLES) for _ in SPEED_ROWS)
    )
    """Per width of SPEED_ROWS: rows, and seconds per layer."""
    measured_at: list[float] = field(default_factory=lambda: [-math.inf] * len(SPEED_ROWS))
    queues: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    queue_at: float = -math.inf
    excess_s: list[float] = field(default_factory=lambda: [0.0] * len(SPEED_ROWS))
    """Per width, per layer: what rounds took beyond what everybody said."""
    num_explained: int = 0
    """Rounds of late that took no longer than was said: MAX_TRUST at most, halved by one that did."""
    shortfall: float | None = None
    """Measured over claimed, when last asked for."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured of one node, to be kept for another process. What it waited is not: that is over in a minute.

    Attributes:
        samples: by width of SPEED_ROWS, rows and seconds per layer, as many as MAX_SAMPLES.
        ages_s: by width, since the last one; None where there is none.
        excess_s, num_explained: how it stands with what rounds took beyond what was said.
    """

    peer: PeerId
    samples: tuple[tuple[tuple[int, float], ...], ...]
    ages_s: tuple[float | None, ...]
    excess_s: tuple[float, ...]
    num_explained: int


class ClaimBook:
    """See the head of this file.

    Args:
        fastest: what no node can beat, see ``fastest_speed``.
    """

    def __init__(self, fastest: Speed = FASTEST) -> None:
        self._fastest = fastest
        self._nodes: dict[PeerId, _Measured] = {}
        self._excess: dict[tuple[tuple[PeerId, ...], int], deque[float]] = {}
        """Seconds of the last rounds by their stages and width."""
        self._messages: deque[float] = deque(maxlen=MAX_ROUNDS)
        """Seconds per message that were tolerated, round by round; below 0 where less was needed than expected."""
        self._messages_at = -math.inf

    def observe_step(
        self,
        peer: PeerId,
        num_layers: int,
        num_rows: int,
        compute_s: float,
        queue_s: float,
        excess_s: float,
        now: float,
    ) -> None:
        """One step that this node took part in.

        Args:
            num_rows: of the step, 1 or more.
            compute_s, queue_s: by its own word.
            excess_s: of what the user saw pass, what is put down to this node beyond that; 0 when all is explained.
        """
        if num_layers < 1 or num_rows < 1:
            return
        node = self._node(peer)
        width = _width_of(num_rows)
        spent_s = _bounded(compute_s, 0.0, SLOWEST_S * num_layers) + _bounded(excess_s, 0.0, SLOWEST_S * num_layers)
        node.samples[width].append(_sample(num_rows, spent_s / num_layers))
        node.measured_at[width] = now
        node.queues.append(_bounded(queue_s, 0.0, MAX_QUEUE_S))
        node.queue_at = now

    def observe_round(
        self, stages: Sequence[StageStep], num_rows: int, *, round_s: float, legs_s: float, now: float
    ) -> None:
        """One whole round: from the first byte that the user sent to the last that came back.

        Args:
            stages: all that took part, in order. What they say is scaled down to what the legs leave of the round.
            round_s: by the user's clock, that of its own computing left out.
            legs_s: expected for all legs, with their payloads and what a message costs its two ends.
        """
        if not stages or num_rows < 1 or not 0.0 <= round_s < math.inf:
            return
        width = _width_of(num_rows)
        stages = _within(stages, round_s, max(round_s - legs_s, 0.0))
        told_s = sum(each.compute_s + each.queue_s for each in stages)
        tolerance_s = TOLERANCE_S * len(stages) + TOLERANCE_SHARE * round_s
        rest_s = round_s - legs_s - told_s
        excess_s = rest_s - tolerance_s
        if width == 0 and math.isfinite(rest_s):  # a tenth of a prefill is no price of a decode step's messages
            self._messages.append(_message(min(rest_s, tolerance_s) / (len(stages) + 1)))
            self._messages_at = now
        usual_s = self._usual_excess(tuple(each.peer for each in stages), width, excess_s)
        for stage, share_s in zip(stages, self._split(stages, width, usual_s), strict=True):
            self.observe_step(stage.peer, stage.num_layers, num_rows, stage.compute_s, stage.queue_s, share_s, now)

    def observe_shared_round(
        self, stages: Sequence[StageStep], num_rows: int, *, unknown: Collection[PeerId], round_s: float, now: float
    ) -> None:
        """One whole round in which groups took part: the others' own words, and what was charged to them before.

        What nobody's word explains may be a group's, of which nobody knows what its legs take: nobody is charged for
        it, and nobody is cleared.

        Args:
            stages: all that took part, in order. What they say is scaled down to the round.
            unknown: those among them that are groups.
        """
        if not stages or num_rows < 1 or not 0.0 <= round_s < math.inf:
            return
        width = _width_of(num_rows)
        for stage in _within(stages, round_s, round_s):
            if stage.peer not in unknown:
                charged_s = self._node(stage.peer).excess_s[width] * stage.num_layers
                self.observe_step(
                    stage.peer, stage.num_layers, num_rows, stage.compute_s, stage.queue_s, charged_s, now
                )

    def message_excess_s(self, now: float) -> float:
        """What each message of a round took beyond the ``legs_s`` that it was observed with, by the median of the last
        rounds of up to four rows, as far as nobody was charged for it; forgotten as speeds are. Below 0 when legs took
        less.

        A user's own line and machine have their part in every round, and what lines do to small messages no probe of
        round trips tells: a row of some kilobytes waits for its last byte, a ping does not.
        """
        if not self._messages:
            return 0.0
        return statistics.median(self._messages) * _weight(now - self._messages_at, HALF_LIFE_S)

    def believed(self, claim: Claim, now: float) -> Belief:
        """What to plan with, from a claim and what was measured."""
        claimed = clamp_speed(claim.seconds_per_layer, self._fastest)
        queue_s = _bounded(claim.queue_s, 0.0, MAX_QUEUE_S)
        node = self._nodes.get(claim.peer)
        if node is None:
            factor = self._discount()
            return Belief(
                clamp_speed((claimed.rows_1_s * factor, claimed.rows_16_s * factor, claimed.rows_256_s * factor)),
                queue_s,
            )
        factors = self._factors(node, claimed)
        claims = (claimed.rows_1_s, claimed.rows_16_s, claimed.rows_256_s)
        nearest = [_nearest(factors, width) for width in range(len(SPEED_ROWS))]
        node.shortfall = max(factor for factor in factors if factor is not None)
        weights = [_weight(now - max(node.measured_at), HALF_LIFE_S)] * len(SPEED_ROWS)
        speeds = [
            seconds * (1.0 + weight * (factor - 1.0))
            for seconds, weight, factor in zip(claims, weights, nearest, strict=True)
        ]
        if node.queues:
            queue_weight = _weight(now - node.queue_at, QUEUE_HALF_LIFE_S)
            queue_s += queue_weight * (statistics.median(node.queues) - queue_s)
        return Belief(
            clamp_speed(speeds, self._fastest), queue_s, _note(claims, factors, self._is_short(node)), is_measured=True
        )

    def measurements(self, now: float) -> list[Measurements]:
        """Of every node, the one that was observed last comes last."""
        return [
            Measurements(
                peer,
                tuple(tuple(samples) for samples in node.samples),
                tuple(None if math.isinf(at) else max(now - at, 0.0) for at in node.measured_at),
                tuple(node.excess_s),
                node.num_explained,
            )
            for peer, node in self._nodes.items()
        ]

    def message_samples(self, now: float) -> tuple[list[float], float]:
        """Behind ``message_excess_s``, and how old the last of them is."""
        return list(self._messages), now - self._messages_at

    def restore(
        self, nodes: Iterable[Measurements], messages: Iterable[float] = (), messages_age_s: float = 0.0, *, now: float
    ) -> None:
        """What another process has measured, as ``measurements`` and ``message_samples`` gave it. Before anything else.

        All of it is bounded as if it had been observed here.
        """
        for each in nodes:
            node = self._node(each.peer)
            for width, samples in enumerate(each.samples[: len(SPEED_ROWS)]):
                bounded = [_sample(rows, seconds) for rows, seconds in samples if rows >= 1]
                node.samples[width].extend(bounded)
                age_s = each.ages_s[width]
                if bounded and age_s is not None:
                    node.measured_at[width] = now - max(age_s, 0.0)
                node.excess_s[width] = _bounded(each.excess_s[width], 0.0, SLOWEST_S)
            node.num_explained = min(max(each.num_explained, 0), MAX_TRUST)
            if not any(node.samples):
                self.forget(each.peer)
        self._messages.extend(_message(each) for each in messages if math.isfinite(each))
        if self._messages:
            self._messages_at = now - max(messages_age_s, 0.0)

    def forget(self, peer: PeerId) -> None:
        """Nothing is known of it any more."""
        self._nodes.pop(peer, None)

    def _is_short(self, node: _Measured) -> bool:
        return node.shortfall is not None and node.shortfall >= SHORTFALL

    def _node(self, peer: PeerId) -> _Measured:
        node = self._nodes.pop(peer, None) or _Measured()
        if len(self._nodes) >= MAX_PEERS:
            del self._nodes[next(iter(self._nodes))]
        self._nodes[peer] = node  # the one that was observed last comes last
        return node

    def _usual_excess(self, peers: tuple[PeerId, ...], width: int, excess_s: float) -> float:
        recent = self._excess.pop((peers, width), None) or deque(maxlen=RECENT_ROUNDS)
        if len(self._excess) >= MAX_ROUTES:
            del self._excess[next(iter(self._excess))]
        self._excess[peers, width] = recent
        recent.append(excess_s)
        return statistics.median(recent)

    def _split(self, stages: Sequence[StageStep], width: int, excess_s: float) -> list[float]:
        """Seconds that are charged to each stage, by what was charged to it before and how many layers it has."""
        nodes = [self._node(each.peer) for each in stages]
        expected_s = sum(node.excess_s[width] * each.num_layers for node, each in zip(nodes, stages, strict=True))
        weights = [each.num_layers / (1 + node.num_explained) for node, each in zip(nodes, stages, strict=True)]
        norm = sum(weight * each.num_layers for weight, each in zip(weights, stages, strict=True)) or 1.0
        # Slowly down: a stage that says too much of itself would else clear the others at once.
        error_s = (excess_s - expected_s) * (1.0 if excess_s > expected_s else RELIEF)
        shares = []
        for node, each, weight in zip(nodes, stages, weights, strict=True):
            node.excess_s[width] = _bounded(max(node.excess_s[width] + error_s * weight / norm, 0.0), 0.0, SLOWEST_S)
            node.num_explained = min(node.num_explained + 1, MAX_TRUST) if excess_s <= 0 else node.num_explained // 2
            shares.append(node.excess_s[width] * each.num_layers)
        return shares

    def _factors(self, node: _Measured, claimed: Speed) -> list[float | None]:
        """Measured over claimed per width; None where nothing was measured."""
        return [
            max(
                statistics.median(seconds / claimed.seconds_per_layer(rows) for rows, seconds in samples),
                1 / MAX_BETTER,
            )
            if samples
            else None
            for samples in node.samples
        ]

    def _discount(self) -> float:
        """By how much claims of nodes that were not measured are taken to be too good: as much as others' were."""
        shortfalls = [node.shortfall for node in self._nodes.values() if node.shortfall is not None]
        if len(shortfalls) < MIN_MEASURED:
            return 1.0
        return _bounded(statistics.median(shortfalls), 1.0, MAX_DISCOUNT)


def _within(stages: Sequence[StageStep], round_s: float, room_s: float) -> list[StageStep]:
    """What the stages say, each time no longer than the round and all of them no longer than what the legs leave."""
    bounded = [
        replace(each, compute_s=_bounded(each.compute_s, 0.0, round_s), queue_s=_bounded(each.queue_s, 0.0, round_s))
        for each in stages
    ]
    told_s = sum(each.compute_s + each.queue_s for each in bounded)
    if told_s <= room_s:
        return bounded
    share = room_s / told_s
    return [replace(each, compute_s=each.compute_s * share, queue_s=each.queue_s * share) for each in bounded]


def _width_of(num_rows: int) -> int:
    """Which of SPEED_ROWS stands for so many rows."""
    return 0 if num_rows <= 4 else 1 if num_rows <= 64 else 2


def _nearest(factors: Sequence[float | None], width: int) -> float:
    """Of this width, or the nearest that was measured; there, no better than claimed."""
    own = factors[width]
    if own is not None:
        return own
    near = min((abs(other - width), factor) for other, factor in enumerate(factors) if factor is not None)
    return max(1.0, near[1])


def _weight(age_s: float, half_life_s: float) -> float:
    return math.exp(-math.log(2.0) * max(age_s, 0.0) / half_life_s)


def _note(claims: Sequence[float], factors: Sequence[float | None], is_short: bool) -> str:
    if not is_short:
        return ""
    width = max((factor, width) for width, factor in enumerate(factors) if factor is not None)[1]
    factor = factors[width] or 1.0
    rows = "" if width == 0 else f" at {SPEED_ROWS[width]} rows"
    return f"announces {1000 * claims[width]:.3g} ms per layer{rows}, measured {1000 * claims[width] * factor:.3g} ms"
