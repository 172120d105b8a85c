"""What a route is expected to cost: seconds per token, seconds until the first one, and tokens per second when full.

A step's way is a loop: user → stage 1 → … → stage n → user. Its seconds are those of every leg (half a round trip, the
payload at the leg's rate, and what a message costs its two ends), of every stage (what waits there, and the layers that
it really runs, at the width of the step), and of the user's own part (embedding, LM head, sampling, drafting). Divided
by the tokens that a step is expected to commit, they are the seconds per token.

A prompt goes in chunks that follow one another through the stages, as jobs go through the machines of a flow shop. With
``m`` equal chunks the last one is through after one chunk's time on every stage and leg, and ``m - 1`` times that on
the slowest of them.

Who takes the place of another in a session that is under way computes its rows again first, while the answer stands
still. To be compared with what a step costs, that is spread over the steps that are still expected. It is no part of
what a route is said to cost afterwards.

When ``concurrency`` sessions share a route, its slowest stage or leg limits all of them: each forward then serves the
steps of all, and a leg carries their payloads one after another. A long way limits them too: each session has one step
under way at a time.

What is still ugly: a layer is taken to cost the same whatever length of context it attends to, and rows of the prompt's
last chunk are spread over all chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_node.types import PeerId
from scheduler.topology import Candidate, Leg, Legs, LegSource, RouteStage

MESSAGE_OVERHEAD_S = 0.001
"""Seconds that a message costs beside its way and its bytes: framing and cipher, both ends' event loops, and the way to
the device's thread and back. Measured with real nodes on loopback, two idle cores: of a token over three stages, 2.3 to
5.0 ms are neither computed nor waited for nor the user's part, for four messages, 4.5 at the median. An
echo of 4 KiB over bare links takes 0.23 ms for two (benchmarks/data_plane.py): the rest is the handling of a step. What
it is before a user has measured any round (Workload.message_overhead_s)."""

MIN_SECONDS_PER_LAYER = 1e-6
"""No claim of speed is believed below this: a claim of nothing must not attract everybody."""

MIN_TOKENS_LEFT = 64
"""That an answer is expected to go on for, or as long again as it is already, but never beyond its end: most end long
before the limit that was asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a route is wanted for.

    Attributes:
        num_positions: KV positions that every stage reserves.
        prompt_tokens: rows to prefill; 0 when there are none.
        step_rows: rows of one decode step: 1, or the nodes of a speculation tree.
        tokens_per_step: that a step commits on average: 1, or more with the acceptance expected of speculation.
        row_bytes: of one hidden state on the wire, encoded.
        returned_rows: that come back per step; None: as many as were sent.
        prefill_chunk_rows: at most so many rows of the prompt travel together.
        user_step_s: the user's own part of a step.
        user_prefill_s: the user's own part of the prefill, embedding and the first token's head together.
        concurrency: sessions whose steps share forwards when the route is full.
        message_overhead_s: seconds that a message costs beside its way and its bytes.
        replay_rows: that a node which comes into a route has to compute before it can go on: the session so far.
        replay_tokens: that are expected still, over which a replay is spread.
    """

    num_positions: int
    prompt_tokens: int = 0
    step_rows: int = 1
    tokens_per_step: float = 1.0
    row_bytes: float = 0.0
    returned_rows: int | None = None
    prefill_chunk_rows: int = 256
    user_step_s: float = 0.0
    user_prefill_s: float = 0.0
    concurrency: int = 16
    message_overhead_s: float = MESSAGE_OVERHEAD_S
    replay_rows: int = 0
    replay_tokens: float = 1.0

    def __post_init__(self) -> None:
        if self.replay_rows < 0 or self.replay_tokens <= 0:
            raise ValueError("what is computed again is spread over tokens that follow")
        if self.tokens_per_step <= 0 or min(self.step_rows, self.prefill_chunk_rows, self.concurrency) < 1:
            raise ValueError("a step has rows and commits tokens, and a chunk and a full route are not empty")

    def for_patch(self, num_rows: int, num_generated: int) -> Workload:
        """Of a part of a route, for a session under way.

        Args:
            num_rows: positions so far, of prompt and answer.
            num_generated: tokens of the answer so far.
        """
        left = min(max(num_generated, MIN_TOKENS_LEFT), max(self.num_positions - num_rows, 1))
        return replace(self, prompt_tokens=0, replay_rows=num_rows, replay_tokens=left)

    @property
    def step_payload_bytes(self) -> float:
        """On every leg but the last."""
        return self.step_rows * self.row_bytes

    @property
    def returned_payload_bytes(self) -> float:
        """On the last leg."""
        return (self.step_rows if self.returned_rows is None else self.returned_rows) * self.row_bytes

    @property
    def num_chunks(self) -> int:
        """In which the prompt goes; 0 without a prompt."""
        return math.ceil(self.prompt_tokens / self.prefill_chunk_rows)

    @property
    def replay_steps(self) -> float:
        """Over which a replay is spread."""
        return max(self.replay_tokens / self.tokens_per_step, 1.0)

    @property
    def chunk_rows(self) -> float:
        """Of each chunk, when they are equal."""
        return self.prompt_tokens / self.num_chunks if self.num_chunks else 0.0


@dataclass(frozen=True, slots=True)
class LegCost:
    """One leg of a step's loop. None stands for the user.

    Attributes:
        source: where the round trip is known from.
        one_way_s: of the first byte.
        payload_s: until the last byte follows.
        overhead_s: of the message, at both ends.
        chunk_payload_s: as payload_s, of a chunk of the prompt; of its one row that is returned on the last leg.
    """

    sender: PeerId | None
    receiver: PeerId | None
    source: LegSource
    one_way_s: float
    payload_s: float
    overhead_s: float
    chunk_payload_s: float

    @property
    def seconds(self) -> float:
        """For a step."""
        return self.one_way_s + self.payload_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage of a step's loop.

    Attributes:
        queue_s: that a step waits before it is computed.
        compute_s: of a step, for all layers of the stage.
        chunk_compute_s: of a chunk of the prompt, with the exchanges of a group.
        busy_s: of the device per step, when the route is full.
        exchange_s: of a step, for what the members of a group exchange in all layers; 0 for one node.
    """

    stage: RouteStage
    queue_s: float
    compute_s: float
    chunk_compute_s: float
    busy_s: float
    exchange_s: float = 0.0

    @property
    def seconds(self) -> float:
        """For a step."""
        return self.queue_s + self.compute_s + self.exchange_s


@dataclass(frozen=True, slots=True)
class RouteCost:
    """What a route is expected to cost, in parts that add up to it.

    Attributes:
        legs: one more than there are stages: legs[k] leads to stage k, and the last one to the user.
        user_step_s: the user's own part of a step.
        tokens_per_step: that a step commits on average.
        concurrency: sessions that share the route when it is full.
        opening_s: until all stages have answered that the session is open, before anything is sent.
        time_to_first_token_s: from the open session until the first token is chosen; with the prompt's chunks in flight
            together. Without a prompt, that of one step.
    """

    legs: tuple[LegCost, ...]
    stages: tuple[StageCost, ...]
    user_step_s: float
    tokens_per_step: float
    concurrency: int
    opening_s: float
    time_to_first_token_s: float

    @property
    def seconds_per_step(self) -> float:
        """The sum of all legs, all stages and the user's part."""
        return sum(leg.seconds for leg in self.legs) + sum(s.seconds for s in self.stages) + self.user_step_s

    @property
    def seconds_per_token(self) -> float:
        """Of one session, on average."""
        return self.seconds_per_step / self.tokens_per_step

    @property
    def bottleneck_s(self) -> float:
        """Seconds per step of the slowest stage or leg, when the route is full."""
        return max([leg.payload_s for leg in self.legs] + [stage.busy_s for stage in self.stages])

    @property
    def tokens_per_s(self) -> float:
        """Of ``concurrency`` sessions together: what the slowest stage or leg lets through, and no more than as many
        sessions as there are can ask for."""
        return self.tokens_per_step / max(self.bottleneck_s, self.seconds_per_step / self.concurrency)

    @property
    def bottleneck(self) -> str:
        """What limits tokens_per_s, for people: ``stage 2``, ``leg to stage 1``, ``round trip``."""
        slowest = self.bottleneck_s
        if slowest < self.seconds_per_step / self.concurrency:
            return "round trip"
        for number, stage in enumerate(self.stages, 1):
            if stage.busy_s == slowest:
                return f"stage {number}"
        number = next(number for number, leg in enumerate(self.legs, 1) if leg.payload_s == slowest)
        return f"leg to stage {number}" if number <= len(self.stages) else "leg to the user"


def seconds_per_layer(candidate: Candidate, num_rows: float) -> float:
    """Of a forward of so many rows on a candidate, bounded from below; with the exchanges of a group."""
    return compute_s_per_layer(candidate, num_rows) + exchange_s_per_layer(candidate, num_rows)


def compute_s_per_layer(candidate: Candidate, num_rows: float) -> float:
    """For which the device is busy; of a group, that of the slowest member."""
    return max(candidate.speed.seconds_per_layer(num_rows), MIN_SECONDS_PER_LAYER)


def exchange_s_per_layer(candidate: Candidate, num_rows: float) -> float:
    """In which the members of a group wait for one another, and compute for others."""
    return 0.0 if candidate.exchange is None else candidate.exchange.seconds_per_layer(num_rows)


def replay_s_per_layer(candidate: Candidate, workload: Workload) -> float:
    """What each layer takes for the rows of the session so far, spread over the steps that follow."""
    if not workload.replay_rows:
        return 0.0
    return seconds_per_layer(candidate, workload.replay_rows) / workload.replay_steps


def busy_s(queue_s: float, compute_s: float, workload: Workload) -> float:
    """Of a device per step, when a forward that takes ``compute_s`` serves the steps of a full route."""
    return (queue_s + compute_s) / workload.concurrency


def route_cost(stages: Sequence[tuple[Candidate, RouteStage]], legs: Legs, workload: Workload) -> RouteCost:
    """The cost of one route.

    Args:
        stages: who serves which layers, in order, with what is believed of each.
    """
    peers = [stage.peer for _, stage in stages]
    ways = list(zip([None, *peers], [*peers, None], strict=True))
    leg_costs = [
        _leg_cost(
            legs.leg(sender, receiver),
            sender,
            receiver,
            workload.step_payload_bytes if receiver is not None else workload.returned_payload_bytes,
            (workload.chunk_rows if receiver is not None else 1.0) * workload.row_bytes,
            workload.message_overhead_s,
        )
        for sender, receiver in ways
    ]
    stage_costs = [_stage_cost(candidate, stage, workload) for candidate, stage in stages]
    return RouteCost(
        legs=tuple(leg_costs),
        stages=tuple(stage_costs),
        user_step_s=workload.user_step_s,
        tokens_per_step=workload.tokens_per_step,
        concurrency=workload.concurrency,
        opening_s=max(
            (
                legs.leg(None, peer).one_way_s + legs.leg(peer, None).one_way_s + 2 * workload.message_overhead_s
                for peer in peers
            ),
            default=0.0,
        ),
        time_to_first_token_s=_first_token_s(leg_costs, stage_costs, workload),
    )


def _leg_cost(
    leg: Leg,
    sender: PeerId | None,
    receiver: PeerId | None,
    payload_bytes: float,
    chunk_bytes: float,
    overhead_s: float,
) -> LegCost:
    return LegCost(
        sender=sender,
        receiver=receiver,
        source=leg.source,
        one_way_s=leg.one_way_s,
        payload_s=payload_s(leg, payload_bytes),
        overhead_s=overhead_s,
        chunk_payload_s=payload_s(leg, chunk_bytes),
    )


def payload_s(leg: Leg, payload_bytes: float) -> float:
    """From the first byte to the last, at the leg's rate; at 1 B/s where a rate of nothing is known."""
    return 0.0 if leg.rate_Bps is None else payload_bytes / max(leg.rate_Bps, 1.0)


def _stage_cost(candidate: Candidate, stage: RouteStage, workload: Workload) -> StageCost:
    num_layers, queue_s = len(stage.layers), max(candidate.queue_s, 0.0)
    full_s = num_layers * compute_s_per_layer(candidate, workload.concurrency * workload.step_rows)
    return StageCost(
        stage=stage,
        queue_s=queue_s,
        compute_s=num_layers * compute_s_per_layer(candidate, workload.step_rows),
        chunk_compute_s=num_layers * seconds_per_layer(candidate, workload.chunk_rows),
        busy_s=busy_s(queue_s, full_s, workload),
        exchange_s=num_layers * exchange_s_per_layer(candidate, workload.step_rows),
    )


def _first_token_s(legs: Sequence[LegCost], stages: Sequence[StageCost], workload: Workload) -> float:
    if not workload.num_chunks:
        return sum(leg.seconds for leg in legs) + sum(stage.seconds for stage in stages) + workload.user_step_s
    # Only what is occupied by a chunk holds up the next one: a link while it sends, a device while it computes.
    occupied_s = [leg.chunk_payload_s for leg in legs[:-1]] + [s.queue_s + s.chunk_compute_s for s in stages]
    under_way_s = sum(leg.one_way_s + leg.overhead_s for leg in legs) + legs[-1].chunk_payload_s
    return workload.user_prefill_s + under_way_s + sum(occupied_s) + (workload.num_chunks - 1) * max(occupied_s)
