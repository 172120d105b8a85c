"""One answer's whole life: routes, sessions, rows to send, results to hand out, and the repair of what fails.

Guarantees: results come out once per position and in order, whatever fails, and never change; a position is computed
again only where what it led to was lost. An answer ends: with what its shell closes it with, or with one named error.
Nobody but the peer that an error names is avoided for it, and hearsay alone has nobody avoided.

Assumes: a shell that does what the events say, in their order, before it sends ``messages_to_send``, and answers each
Wants… once. Positions are numbered from 0; the rows of any position can be made again from its token at any time.

States: ROUTING (a whole route is asked for), CONNECTING, OPENING, RUNNING, REPAIRING (a stage is lost; part of a route
is asked for, or its session is being resumed), CLOSED, FAILED.
Timers: those of the session (fusion_node.client.session_core), looking for a route again, and choosing alternates
again, all in seconds of the monotonic clock.

Source: docs/protocol-data-plane.md, "Repair", and docs/design.md, "When something fails".
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fusion_node.client.session_core import Prefix
from fusion_node.errors import FusionError, PeerError
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.messages import AnyMessage, StageTiming, Step, TensorMeta
from p2p.records import Plan, PlanStage

MakePlan: TypeAlias = "Callable[[bytes, int, tuple[PlanStage, ...]], tuple[Plan, bytes]]"
"""From a session's id, an epoch and the stages to the plan and its signed form."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node, what it is to serve, and how far it is from the user."""

    stage: PlanStage
    round_trip_s: float = 0.0

    @property
    def peer(self) -> PeerId:
        return PeerId(self.stage.peer)

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.stage.start, self.stage.stop)


class RouteKind(enum.Enum):
    """What of a route is asked for."""

    WHOLE = "whole"
    PATCH = "patch"
    """The present route with other nodes in the place of some stages; all others keep peer and layers."""


# what the core asks of its shell, and tells it


@dataclass(frozen=True, slots=True)
class WantsRoute:
    """Answered by ``routed`` or ``no_route`` with this number. Only the last one asked for matters.

    Attributes:
        lost: of a PATCH, places in the present route that are to be replaced; none of their nodes may come back.
        avoid_peers, avoid_pairs: in a PATCH not to be planned with; in a WHOLE route rather not.
        wait: whether to wait for nodes that may still come, as long as such a search takes; else what is known now.
        reason: for people.
    """

    number: int
    kind: RouteKind
    lost: tuple[int, ...]
    avoid_peers: frozenset[PeerId]
    avoid_pairs: frozenset[tuple[PeerId, PeerId]]
    wait: bool
    reason: str


@dataclass(frozen=True, slots=True)
class WantsConnection:
    """A link to this node is to be made, or is there already: answered by ``connected`` or ``unreachable``."""

    place: Place


@dataclass(frozen=True, slots=True)
class WantsAlternates:
    """For each stage of the present route, what would take its place now, linked: answered by ``alternates``.

    There is no hurry, and no answer is needed.
    """

    avoid_peers: frozenset[PeerId]
    avoid_pairs: frozenset[tuple[PeerId, PeerId]]


@dataclass(frozen=True, slots=True)
class SessionBegan:
    """Messages with this id are to be handed to ``receive`` from now on."""

    session: bytes
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Messages with this id are not wanted any more, once what is to be sent has been sent."""

    session: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """A session is open over these stages, for the first time or (after a repair) again.

    Attributes:
        reused_positions: with which the session begins: only those behind them are asked for.
    """

    session: bytes
    places: tuple[Place, ...]
    reused_positions: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """The rows of these positions are to be sent to the first stage: answered by ``rows_ready``, in this order.

    Attributes:
        session, epoch: for which they are.
        sequence: of the log entry.
        covers: entries that it stands for.
        want_last: whether the row of the last position is to come back.
        stop_stage: where the entry ends; None: it comes back to the user.
        is_replay: they were sent before, in this session or an earlier one.
    """

    session: bytes
    epoch: int
    sequence: int
    covers: int
    first_position: int
    num_positions: int
    want_last: bool
    stop_stage: int | None
    is_replay: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """Positions were computed by every stage.

    Attributes:
        num_computed: so many positions are, from the first.
        has_row: the row of the last of them came back, and is wanted: choose a token and say ``append``, or
            ``result_unfit``, or ``close``.
    """

    sequence: int
    num_computed: int
    has_row: bool
    round_trip_s: float
    timings: tuple[StageTiming, ...]


class RepairKind(enum.StrEnum):
    """How an answer went on."""

    PATCHED = "patched"
    """Other nodes took the place of stages, and got what those had been sent."""
    RESUMED = "resumed"
    """The same nodes went on, after a link between them was lost."""
    PREFILLED = "prefilled"
    """A new session over a new route computed everything again."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """A repair is over: a result came out after it.

    Attributes:
        stage: the first place that was replaced, in the route before.
        peer: which was there.
        cause: what was wrong, one word: lost, silent, stuck, refused, garbage, pair, draining.
        stall_s: how long nothing came out that was waited for, finding out included.
        replayed_positions: rows that were computed again, summed over stages.
        replayed_bytes: of them, what this user sent.
    """

    kind: RepairKind
    stage: int
    peer: PeerId
    cause: str
    stall_s: float
    replayed_positions: int
    replayed_bytes: int


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Other answers had better do without the peer that this error names, for a while."""

    error: PeerError


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer is over."""

    error: FusionError


AnswerEvent: TypeAlias = (
    WantsRoute
    | WantsConnection
    | WantsAlternates
    | SessionBegan
    | SessionEnded
    | Opened
    | RowsWanted
    | StepDone
    | Repaired
    | PeerFailed
    | Failed
)


class AnswerCore:
    """One answer.

    Args:
        num_prompt: positions of the prompt, at least 1.
        row_size, wire_dtype: of the rows that come back.
        make_plan: see MakePlan.
        new_session: draws the id of a session.
    """

    def __init__(
        self,
        *,
        num_prompt: int,
        row_size: int,
        wire_dtype: str,
        make_plan: MakePlan,
        new_session: Callable[[], bytes],
    ) -> None:
        raise NotImplementedError

    def start(self, *, now: MonotonicS) -> None:
        """Asks for the first route."""
        raise NotImplementedError

    def routed(self, number: int, places: tuple[Place, ...], *, now: MonotonicS, prefix: Prefix | None = None) -> None:
        """The route that was asked for: of a PATCH too, all of its stages.

        Args:
            prefix: an earlier session over the same places, with which a WHOLE route is to begin.
        """
        raise NotImplementedError

    def no_route(self, number: int, error: FusionError, *, now: MonotonicS) -> None:
        """There is none."""
        raise NotImplementedError

    def connected(self, peer: PeerId, *, now: MonotonicS) -> None:
        """A link is there."""
        raise NotImplementedError

    def unreachable(self, peer: PeerId, error: PeerError, *, now: MonotonicS) -> None:
        """There is no link."""
        raise NotImplementedError

    def alternates(self, found: tuple[tuple[Place, ...], ...], *, now: MonotonicS) -> None:
        """Per stage of the present route its alternate, one or several nodes that are linked; empty where none is."""
        raise NotImplementedError

    def receive(self, message: AnyMessage, *, source: PeerId, now: MonotonicS) -> None:
        """A message of one of its sessions."""
        raise NotImplementedError

    def link_closed(self, peer: PeerId, error: FusionError, *, now: MonotonicS) -> None:
        """A link to a peer is gone, or what was to be sent to it cannot be."""
        raise NotImplementedError

    def rows_ready(self, wanted: RowsWanted, tensor: TensorMeta, *, now: MonotonicS) -> tuple[PeerId, Step] | None:
        """Where to send the rows, and the header before them; None when they are not wanted any more."""
        raise NotImplementedError

    def append(self, *, now: MonotonicS) -> None:
        """The token of one more position was chosen: its row is wanted next."""
        raise NotImplementedError

    def result_unfit(self, reason: str, *, now: MonotonicS) -> None:
        """The row that came out last cannot be used (it is not finite, or does not decode): its sender's fault."""
        raise NotImplementedError

    def close(self, *, retain: bool, now: MonotonicS) -> None:
        """The answer is over for the user. Nothing is waited for.

        Args:
            retain: ask the stages to keep its KV for a later session with the same beginning.
        """
        raise NotImplementedError

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        raise NotImplementedError

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early: how late is not held against anybody."""
        raise NotImplementedError

    def messages_to_send(self) -> list[tuple[PeerId, AnyMessage]]:
        """Drained, in order, after the events."""
        raise NotImplementedError

    def next_event(self) -> AnswerEvent | None:
        """Drained one by one, in order."""
        raise NotImplementedError
