"""What is told of an answer: its text as it comes, and how it came about."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from fusion_node.client.grants_core import GrantReport
from fusion_node.client.speculation import SpeculationReport
from fusion_node.types import LayerRange, PeerId


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one node did for an answer; times by its own clock."""

    peer: PeerId
    layers: LayerRange
    device: str
    round_trip_s: float
    steps: int
    compute_s: float
    queue_s: float


@dataclass(frozen=True, slots=True)
class RepairReport:
    """A node could not go on, and the answer did.

    Attributes:
        kind: ``patched`` (others took its place), ``resumed`` (the same nodes went on), ``prefilled`` (everything was
            computed again over another route).
        stage: its place in the route, from 0.
        peer: which node it was.
        cause: ``lost``, ``silent``, ``stuck``, ``refused``, ``garbage``, ``pair`` (it and the node before it could not
            reach each other), ``draining`` (it was about to leave) or ``revoked`` (by SwarmClient.revoke).
        stall_s: how long nothing came out that was waited for, finding out included.
        replayed_positions: that were computed again, once for each node that did.
        replayed_bytes: of them, what this user sent.
    """

    kind: str
    stage: int
    peer: PeerId
    cause: str
    stall_s: float
    replayed_positions: int
    replayed_bytes: int


@dataclass(slots=True)
class GenerationStats:
    """How an answer came about.

    Attributes:
        prompt_tokens, completion_tokens: counts; the end-of-sequence token is not counted.
        cached_tokens: tokens of the prompt whose KV the nodes had from an earlier answer.
        time_to_first_token_s: from the call to the first token, opening the session included.
        finish_reason: ``stop`` (end of sequence or stop string), ``length``; None while running or after an error.
        seed: of the sampling noise.
        stages: the nodes of the route at its end, each with the steps that it took part in.
        repairs: in order.
        grants: what each member of a group was allowed to hold, and what it has signed when that was over; of one that
            had several in this answer, the last. Releases come when the answer is over: see SwarmClient.wait_released.
        speculation: None where nothing was guessed, or the answer is not over.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    time_to_first_token_s: float | None = None
    decode_s: float = 0.0
    finish_reason: str | None = None
    seed: int = 0
    token_ids: list[int] = field(default_factory=list, repr=False)
    stages: tuple[StageReport, ...] = ()
    repairs: tuple[RepairReport, ...] = ()
    grants: tuple[GrantReport, ...] = ()
    speculation: SpeculationReport | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first; None for fewer than two."""
        if self.completion_tokens < 2 or self.decode_s <= 0:
            return None
        return (self.completion_tokens - 1) / self.decode_s

    @property
    def replayed_positions(self) -> int:
        """Of all repairs."""
        return sum(repair.replayed_positions for repair in self.repairs)


class Generation:
    """An answer on its way: iterate for its text. ``stats`` fills while you do."""

    def __init__(self, pieces: AsyncGenerator[str, None], stats: GenerationStats) -> None:
        self._pieces = pieces
        self.stats = stats

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def text(self) -> str:
        """The whole answer."""
        return "".join([piece async for piece in self._pieces])

    async def aclose(self) -> None:
        """Stops the answer and frees its session. Needed only when the iteration is left early."""
        await self._pieces.aclose()
