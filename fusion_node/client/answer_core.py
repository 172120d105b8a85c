"""One answer's whole life: routes, sessions, rows to send, results to hand out, and the repair of what fails.

Guarantees: results come out once per position and in order, whatever fails, and never change; a position is computed
again only where what it led to was lost. An answer ends: with what its shell closes it with, or with one named error.
Nobody but the peer that an error names is avoided for it. Hearsay alone has nobody avoided by other answers, nor by
this one before it comes from or names the same peer twice, with different partners.

Assumes: a shell that does what the events say, in their order, before it sends ``messages_to_send``, and answers each
Wants… once. Positions are numbered from 0; the rows of any position can be made again from its token at any time.
With speculation, the shell takes its events whenever it has called either core, before anything else, and hands frames,
cancels and results on at once.

States: there is a session or not; a route may be asked for (``_asked``) or be connected to (``_next``) beside it. A
session that is BROKEN waits for one of these. Over: closed, or failed with an error, told once.
Timers: those of the session (fusion_node.client.session_core), looking for a route again, and choosing alternates
again, all in seconds of the monotonic clock.

Source: docs/protocol-data-plane.md, "Repair", and docs/design.md, "When something fails". Still ugly: a route is
replaced stage by stage or as a whole, never moved to a better one.

Above 600 lines, a third of them the words that core and shell have in common, which are read together.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusion_node.client import session_core
from fusion_node.client.session_core import (
    BacklogS,
    CannotResume,
    Fault,
    Fold,
    OpenLease,
    Prefix,
    RowsWanted,
    SessionCore,
    SessionState,
    StepDone,
    TreeRowsWanted,
    TreeStepDone,
)
from fusion_node.client.speculation_core import Frame, SpeculationCore
from fusion_node.client.taps_core import NodeTaps
from fusion_node.errors import FusionError, NoPeers, NoRoute, PeerError, PeerRefused, RemoteProtocolError
from fusion_node.types import LayerRange, MonotonicS, PeerId
from p2p.identity import short
from p2p.messages import AnyMessage, Step, StepTaps, TensorMeta
from p2p.records import Plan, PlanStage
from scheduler.repair_core import Attempt, Cause, Recovered, RepairPolicy, StepTimes

MIN_CHUNK_TOKENS = 32
MAX_CHUNK_TOKENS = 256
"""Prefill chunks travel behind one another, so several stages compute at once. Small ones fill the pipeline sooner,
large ones use the linears better; 256 rows of hidden size 8,192 in float32 are 8 MiB."""

CHUNKS_PER_STAGE = 2

ROUTE_PATIENCE_S = 8.0
"""How long layers may stay uncovered before that is an error: nodes that start together announce one by one."""

ROUTE_RETRY_S = 0.5
SOFT_RETRY_S, MAX_SOFT_RETRY_S = 2.0, 8.0
"""Until another node is looked for again, in place of one that is silent or about to leave, and that nobody can replace
now; twice as long each time, up to a quarter of the time for which a node serves on that is about to leave."""

ALTERNATES_EVERY_S = 10.0

__all__ = [
    "AnswerCore",
    "AnswerEvent",
    "Failed",
    "Opened",
    "PeerFailed",
    "Place",
    "Prefix",
    "RepairKind",
    "Repaired",
    "RouteKind",
    "RowsWanted",
    "SessionBegan",
    "SessionEnded",
    "StepDone",
    "TreeRowsWanted",
    "TreeStepDone",
    "WantsAlternates",
    "WantsConnection",
    "WantsRoute",
]

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


class RepairKind(enum.StrEnum):
    """How an answer went on."""

    PATCHED = "patched"
    """Other nodes took the place of stages, and got what those had been sent."""
    RESUMED = "resumed"
    """The same nodes went on, after a link between them was lost or one of them had paused."""
    PREFILLED = "prefilled"
    """A new session over a new route computed everything again."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """A repair is over: a result came out after it.

    Attributes:
        stage: the first place that was replaced, in the route before.
        peer: which was there.
        cause: what was wrong, one word: lost, silent, stuck, refused, garbage, pair, draining, revoked.
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
    | TreeRowsWanted
    | StepDone
    | TreeStepDone
    | Repaired
    | PeerFailed
    | Failed
)


@dataclass(frozen=True, slots=True)
class _Next:
    """A route that was chosen, and is being connected to."""

    kind: RouteKind
    places: tuple[Place, ...]
    prefix: Prefix | None = None
    expected_step_s: float | None = None
    expected_row_s: float | None = None


@dataclass(slots=True)
class _Repair:
    """What has happened since the last result."""

    kind: RepairKind
    stage: int
    peer: PeerId
    cause: str
    since: MonotonicS
    is_awaited: bool
    """Whether a result was awaited then."""
    replayed_positions: int = 0
    replayed_bytes: int = 0


class AnswerCore:
    """One answer.

    Args:
        num_prompt: positions of the prompt, at least 1.
        row_size, wire_dtype: of the rows that come back.
        make_plan: see MakePlan.
        new_session: draws the id of a session.
        open_lease: checks signed leases; None: they are not looked at.
        backlog_s: see BacklogS; a stage is not silent while our question waits behind our own rows.
        patience_s: how long a route is looked for before there being none is an error.
        speculation: grows the answer as a token tree: it is told here when it may send and when not, and what the
            stages have; ``append`` is not used then.
        taps: layers whose rows the speculation wants of some nodes.
        is_allowed: whether a route keeps the user's rules. Alternates are asked for one by one, and before.

    Attributes:
        places: of the present route.
        session: id of the present session; empty while there is none.
        epoch: of its plan.
        num_computed: positions that every stage has computed.
    """

    def __init__(
        self,
        *,
        num_prompt: int,
        row_size: int,
        wire_dtype: str,
        make_plan: MakePlan,
        new_session: Callable[[], bytes],
        open_lease: OpenLease | None = None,
        backlog_s: BacklogS = lambda peer: 0.0,
        patience_s: float = ROUTE_PATIENCE_S,
        speculation: SpeculationCore | None = None,
        taps: Sequence[int] = (),
        is_allowed: Callable[[Sequence[Place]], bool] = lambda places: True,
    ) -> None:
        self._taps = tuple(taps)
        self._is_allowed = is_allowed
        self.places: tuple[Place, ...] = ()
        self._num_prompt = self._num_positions = num_prompt
        self._row_size = row_size
        self._wire_dtype = wire_dtype
        self._make_plan = make_plan
        self._new_session = new_session
        self._open_lease = open_lease
        self._backlog_s = backlog_s
        self._patience_s = patience_s
        self._speculation = speculation
        self._policy = RepairPolicy()
        self._session: SessionCore | None = None
        self._has_log = False
        """The session is open, and what is to be computed has been appended to it."""
        self._num_sent = 0
        """Positions whose rows were sent in any session."""
        self._num_done = 0
        """Positions that were computed in any session."""
        self._num_out = 0
        """Positions up to the last whose row has come out."""
        self._row_of: Place | None = None
        """Who sent that row. It may be gone when the row turns out to be bad."""
        self._appended_at = MonotonicS(0.0)
        self._faults: dict[int, Fault] = {}
        self._doubted: set[int] = set()
        """Of the stages in ``_faults``, those that are replaced beside who is accused, where others are."""
        self._accused_at: dict[int, set[PeerId]] = {}
        """By the first layer of a place, who was accused there since the last result by somebody in doubt."""
        self._last_error: PeerError | None = None
        self._attempt_of: tuple[bytes, int] | None = None
        """Session and epoch whose failure was counted last."""
        self._asked: WantsRoute | None = None
        self._num_asked = 0
        self._patience_until: MonotonicS | None = None
        self._next: _Next | None = None
        self._connected: set[PeerId] = set()
        self._connecting: set[PeerId] = set()
        self._alternates: tuple[tuple[Place, ...], ...] = ()
        self._alternates_at: MonotonicS | None = None
        self._retry_at: MonotonicS | None = None
        self._soft_retry_s = SOFT_RETRY_S
        self._repair: _Repair | None = None
        self._is_over = False
        self._outbox: list[tuple[PeerId, AnyMessage]] = []
        self._events: deque[AnswerEvent] = deque()
        self._held_at: MonotonicS | None = None
        """When rows came out for the speculation. What the session says besides waits until they were taken."""

    @property
    def session(self) -> bytes:
        return b"" if self._session is None else self._session.plan.session

    @property
    def epoch(self) -> int:
        return 0 if self._session is None else self._session.plan.epoch

    @property
    def num_computed(self) -> int:
        return 0 if self._session is None else self._session.num_computed

    @property
    def next_places(self) -> tuple[Place, ...]:
        """Of a route that is being connected to."""
        return () if self._next is None else self._next.places

    @property
    def is_open(self) -> bool:
        """There is a session, and it is open on all of its stages: only such a one can be kept for another answer."""
        return self._session is not None and self._session.state is SessionState.READY

    def start(self, *, now: MonotonicS) -> None:
        """Asks for the first route."""
        self._ask_whole("a new answer", now)

    # what the shell answers

    def routed(
        self,
        number: int,
        places: tuple[Place, ...],
        *,
        now: MonotonicS,
        prefix: Prefix | None = None,
        expected_step_s: float | None = None,
        expected_prefill_s: float | None = None,
    ) -> None:
        """The route that was asked for: of a PATCH too, all of its stages.

        Args:
            prefix: an earlier session over the same places, with which a WHOLE route is to begin.
            expected_step_s: of a decode step over it, by the cost model.
            expected_prefill_s: of the prompt.
        """
        asked = self._asked
        if self._is_over or asked is None or asked.number != number:
            return
        self._asked = None
        expected_row_s = None if expected_prefill_s is None else expected_prefill_s / self._num_prompt
        self._choose(_Next(asked.kind, places, prefix, expected_step_s, expected_row_s), now)
        self._follow(now)

    def no_route(self, number: int, error: FusionError, *, now: MonotonicS) -> None:
        """There is none."""
        asked = self._asked
        if self._is_over or asked is None or asked.number != number:
            return
        self._asked = None
        if asked.kind is RouteKind.WHOLE:
            if self._patience_until is not None and now < self._patience_until:
                self._retry_at = MonotonicS(now + ROUTE_RETRY_S)
            else:
                self._fail(error)
        elif self._doubted:
            self._faults = {stage: fault for stage, fault in self._faults.items() if stage not in self._doubted}
            self._doubted.clear()
            self._look(now)
        elif self.is_open:
            self._retry_at = MonotonicS(now + self._soft_retry_s)
            self._soft_retry_s = min(2 * self._soft_retry_s, MAX_SOFT_RETRY_S)
        elif self._may_go_on_with_the_same():
            self._choose(_Next(RouteKind.PATCH, self.places), now)
        else:
            self._ask_whole(asked.reason, now)
        self._follow(now)

    def _may_go_on_with_the_same(self) -> bool:
        """Nobody else is there, but the nodes answer: two may find to each other again, and one that pauses goes on.

        Who computes nothing has that chance once, and only where it has computed something before: a replacement that
        is too slow for the replay would only be waited for longer.
        """
        is_proven = self._session is not None and self._session.is_proven
        good = (Cause.PAIR, Cause.STUCK) if is_proven else (Cause.PAIR,)
        return all(fault.cause in good for fault in self._faults.values())

    def connected(self, peer: PeerId, *, now: MonotonicS) -> None:
        """A link is there."""
        self._connected.add(peer)
        self._connecting.discard(peer)
        self._go_if_connected(now)
        self._follow(now)

    def unreachable(self, peer: PeerId, error: PeerError, *, now: MonotonicS) -> None:
        """There is no link."""
        self._connected.discard(peer)
        if self._is_over or peer not in self._connecting:
            return
        self._connecting.clear()
        self._next = None
        self._avoid(error, now)
        self._try_again(now)
        self._follow(now)

    def alternates(self, found: tuple[tuple[Place, ...], ...], *, now: MonotonicS) -> None:
        """Per stage of the present route its alternate, one or several nodes that are linked; empty where none is."""
        if len(found) == len(self.places):
            self._alternates = found
            self._connected.update(place.peer for places in found for place in places)

    # what comes from outside

    def receive(self, message: AnyMessage, *, source: PeerId, now: MonotonicS) -> None:
        """A message of one of its sessions."""
        session = self._session
        if session is not None and getattr(message, "session", None) == session.plan.session:
            session.receive(message, source=source, now=now)
            self._follow(now)

    def receive_taps(self, message: StepTaps, rows: Any, *, source: PeerId, now: MonotonicS) -> None:
        """Rows of a layer, of one of its sessions; ``taps_of`` has them then."""
        session = self._session
        if session is not None and message.session == session.plan.session:
            session.receive_taps(message, rows, source=source, now=now)
            self._follow(now)

    def taps_of(self, node: int) -> NodeTaps | None:
        """What comes of the layers of a node of the present session; None: nothing."""
        return None if self._session is None else self._session.taps.of(node)

    @property
    def are_taps_sent(self) -> bool:
        """The stages of the present session send what is asked for."""
        return self._session is not None and self._session.taps.are_sent

    def link_closed(self, peer: PeerId, error: FusionError, *, now: MonotonicS) -> None:
        """A link to a peer is gone, or what was to be sent to it cannot be.

        An error that is no PeerError is ours: the answer ends with it, and nobody is avoided, if it needs that link.

        Args:
            peer: empty: all links are gone.
        """
        if self._is_over:
            return
        self._connected.discard(peer)
        if not isinstance(error, PeerError):
            needed = {place.peer for place in (*self.places, *(() if self._next is None else self._next.places))}
            if not peer or peer in needed | self._connecting:
                self._fail(error)
            return
        if self._session is not None:
            self._session.link_closed(peer, error, now=now)
        if self._next is not None and peer not in self._connecting and any(p.peer == peer for p in self._next.places):
            self._connecting.add(peer)
            self.unreachable(peer, error, now=now)
        self._follow(now)

    def revoke(self, peer: PeerId, error: PeerError, *, now: MonotonicS) -> None:
        """The user has withdrawn what a node may hold: it goes on without it, as when it is lost.

        Args:
            error: what the answer ends with if nobody else can take its place.
        """
        if self._is_over:
            return
        self._connected.discard(peer)
        self._alternates = tuple(
            () if any(place.peer == peer for place in places) else places for places in self._alternates
        )
        if self._session is not None:
            self._session.revoke(peer, error, now=now)
        if self._next is not None and any(place.peer == peer for place in self._next.places):
            self._connecting.add(peer)
            self.unreachable(peer, error, now=now)
        self._follow(now)

    # rows and results

    def rows_ready(
        self, wanted: RowsWanted | TreeRowsWanted, tensor: TensorMeta, *, now: MonotonicS
    ) -> tuple[PeerId, Step] | None:
        """Where to send the rows, and the header before them; None when they are not wanted any more."""
        session = self._session
        if session is None or wanted.session != session.plan.session:
            return None
        sent = session.rows_ready(wanted, tensor, now=now)
        if sent is not None and isinstance(wanted, RowsWanted):
            self._num_sent = max(self._num_sent, wanted.first_position + wanted.num_positions)
        self._follow(now)
        return sent

    def append(self, num_positions: int = 1, *, now: MonotonicS) -> None:
        """The tokens of so many more positions are there: the row of the last is wanted next."""
        self._num_positions += num_positions
        self._appended_at = now
        if self._session is not None and self._has_log:
            self._session.append(num_positions, want_last=True, now=now)
            self._follow(now)

    def append_tree(self, frame: Frame, *, now: MonotonicS) -> None:
        """A frame of the speculation."""
        self._appended_at = now
        if self._session is not None and self._has_log:
            self._session.append_tree(frame, now=now)
            self._follow(now)

    def cancel(self, root: int, *, now: MonotonicS) -> None:
        """Nodes that neither lead to this committed one nor descend from it need not be computed any more."""
        if self._session is not None and self._has_log:
            self._session.cancel(root)
            self._follow(now)

    def tree_row_unfit(self, position: int, sender: PeerId, reason: str, *, now: MonotonicS) -> None:
        """The row cannot be used from which the token at this position was to be chosen; there will be another.

        Args:
            sender: the last stage when it came.
        """
        session, speculation = self._session, self._speculation
        if self._is_over or speculation is None:
            return
        speculation.row_unfit(position)
        error = RemoteProtocolError(sender, f"node {short(sender)} returned a bad row: {reason}")
        is_present = session is not None and self._has_log and self.places[-1].peer == sender
        if session is not None and self._has_log and not session.owes_row:
            # It was opened while a row was at hand, so that none is on its way.
            self._avoid(error, now)
            self._pause()
            self._ask_whole(str(error), now)
        elif session is not None and is_present and session.must_fold:
            session.tree_row_unfit(error, now=now)
        elif session is not None and is_present:
            session.result_unfit(error, now=now)
        else:
            self._avoid(error, now)
            if session is not None and self._has_log:
                must_fold = session.must_fold
                if session.tree_row_unfit_of_other() if must_fold else session.result_unfit_of_other(now=now):
                    self._choose(_Next(RouteKind.PATCH, self.places), now)
        self._follow(now)

    def result_unfit(self, reason: str, *, now: MonotonicS) -> None:
        """The row that came out last cannot be used (it is not finite, or does not decode): its sender's fault."""
        sender, session = self._row_of, self._session
        if self._is_over or sender is None:
            return
        error = RemoteProtocolError(sender.peer, f"node {short(sender.peer)} returned a bad row: {reason}")
        num_out, self._num_out = self._num_out, 0
        has_it = session is not None and self._has_log and session.num_computed == num_out == self._num_positions
        if session is None or not has_it:
            self._avoid(error, now)  # everything is being computed again anyway
        elif self.places[-1].peer == sender.peer:
            session.result_unfit(error, now=now)
        else:
            self._avoid(error, now)
            self._note_repair(Fault(len(self.places) - 1, Cause.GARBAGE, error), now, of=sender)
            if session.result_unfit_of_other(now=now):
                self._choose(_Next(RouteKind.PATCH, self.places), now)
        self._follow(now)

    def close(self, *, retain: bool, now: MonotonicS) -> None:
        """The answer is over for the user. Nothing is waited for.

        Args:
            retain: ask the stages to keep its KV for a later session with the same beginning.
        """
        if not self._is_over:
            if self._repair is not None:
                self._tell_repaired(now if self._repair.is_awaited else self._repair.since)
            self._end_session(retain=retain)
            self._is_over = True

    # time and what comes out

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        if self._is_over:
            return None
        due = [self._retry_at, self._alternates_at]
        if self._session is not None:
            due.append(self._session.get_timer())
        return min((at for at in due if at is not None), default=None)

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early: how late is not held against anybody."""
        if self._is_over:
            return
        if self._session is not None:
            self._session.handle_timer(now=now)
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            self._look(now)
        if self._alternates_at is not None and self._alternates_at <= now:
            self._want_alternates(now)
        self._follow(now)

    def messages_to_send(self) -> list[tuple[PeerId, AnyMessage]]:
        """Drained, in order, after the events."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def next_event(self) -> AnswerEvent | None:
        """Drained one by one, in order."""
        if not self._events and self._held_at is not None:
            now, self._held_at = self._held_at, None
            self._follow(now)
        return self._events.popleft() if self._events else None

    # routes

    def _ask(self, kind: RouteKind, lost: tuple[int, ...], reason: str, now: MonotonicS) -> None:
        self._retry_at = None
        self._next = None
        self._connecting.clear()
        self._num_asked += 1
        self._asked = WantsRoute(
            number=self._num_asked,
            kind=kind,
            lost=lost,
            avoid_peers=self._policy.avoid_peers(now=now),
            avoid_pairs=self._policy.avoid_pairs(now=now),
            wait=kind is RouteKind.WHOLE,
            reason=reason,
        )
        self._events.append(self._asked)

    def _ask_whole(self, reason: str, now: MonotonicS) -> None:
        if self._repair is not None:
            self._repair.kind = RepairKind.PREFILLED
        for fault in self._faults.values():
            if fault.cause is Cause.STUCK and self._has_log:
                self._avoid(fault.error, now)
        if self._patience_until is None:
            self._patience_until = MonotonicS(now + self._patience_s)
        self._ask(RouteKind.WHOLE, (), reason, now)

    def _choose(self, chosen: _Next, now: MonotonicS) -> None:
        if chosen.kind is RouteKind.PATCH and not self._fits(chosen.places):
            self._ask_whole("no part of the route can be replaced", now)
            return
        # An answer to an older question, or a look that was put off, is not to undo what is begun here.
        self._asked = self._retry_at = None
        self._next = chosen
        self._patience_until = None if chosen.kind is RouteKind.WHOLE else self._patience_until
        missing = [place for place in chosen.places if place.peer not in self._connected]
        self._connecting = {place.peer for place in missing}
        self._events.extend(WantsConnection(place) for place in missing)
        self._go_if_connected(now)

    def _fits(self, places: tuple[Place, ...]) -> bool:
        """Whether all stages that are not lost are there, and nobody twice."""
        kept = {(p.peer, p.layers) for i, p in enumerate(self.places) if i not in self._faults}
        named = [(place.peer, place.layers) for place in places]
        return kept <= set(named) and len({peer for peer, _ in named}) == len(named)

    def _go_if_connected(self, now: MonotonicS) -> None:
        chosen = self._next
        if chosen is None or self._connecting or self._is_over:
            return
        self._next = None
        if chosen.kind is RouteKind.WHOLE:
            self._begin_session(chosen, now)
        else:
            self._replace(chosen.places, now)

    # sessions

    def _begin_session(self, chosen: _Next, now: MonotonicS) -> None:
        if self._session is not None:
            self._end_session(retain=False)
        self._pause()
        key = self._new_session()
        plan, signed = self._make_plan(key, 0, tuple(place.stage for place in chosen.places))
        self.places = chosen.places
        self._faults.clear()
        self._doubted.clear()
        self._alternates = ()
        self._has_log = False
        self._session = SessionCore(
            plan,
            signed,
            row_size=self._row_size,
            wire_dtype=self._wire_dtype,
            prefix=chosen.prefix,
            round_trips_s=[place.round_trip_s for place in chosen.places],
            times=StepTimes(chosen.expected_step_s, chosen.expected_row_s),
            open_lease=self._open_lease,
            backlog_s=self._backlog_s,
            known_positions=self._num_sent,
            taps=self._taps,
        )
        self._events.append(SessionBegan(key, chosen.places))
        self._session.start(now=now)

    def _end_session(self, *, retain: bool) -> None:
        session, self._session = self._session, None
        self._alternates_at = None
        if session is not None:
            if self._repair is not None:
                self._repair.replayed_positions += session.replayed_positions
                self._repair.replayed_bytes += session.replayed_bytes
            session.close(retain=retain)
            self._outbox += session.messages_to_send()
            self._events.append(SessionEnded(session.plan.session))

    def _replace(self, places: tuple[Place, ...], now: MonotonicS) -> None:
        session = self._session
        if session is None:
            return
        is_resumed = [(p.peer, p.layers) for p in places] == [(p.peer, p.layers) for p in self.places]
        staying = {place.peer for place in places}
        for fault in self._faults.values():
            if fault.cause in (Cause.SILENT, Cause.STUCK) and fault.error.peer not in staying:
                self._avoid(fault.error, now)
            if self._repair is None:
                self._note_repair(fault, now)
        if self._repair is not None:
            self._repair.kind = RepairKind.RESUMED if is_resumed else RepairKind.PATCHED
        # Who is about to leave, and nobody could replace so far, still is.
        leaving = {self.places[s].peer: f for s, f in self._faults.items() if f.cause is Cause.DRAINING}
        self.places = places
        self._faults = {i: leaving[p.peer] for i, p in enumerate(places) if p.peer in leaving and p.peer in staying}
        self._doubted.clear()
        self._alternates = ()
        self._alternates_at = None
        plan, signed = self._make_plan(
            session.plan.session, session.plan.epoch + 1, tuple(place.stage for place in places)
        )
        self._pause()
        round_trips_s = [place.round_trip_s for place in places]
        session.replace(plan, signed, round_trips_s=round_trips_s, now=now, fold=self._fold(session))

    def _fold(self, session: SessionCore) -> Fold | None:
        if self._speculation is None or not session.must_fold:
            return None
        nodes = self._speculation.committed_ids(session.fold_from)
        is_root = session.fold_from + len(nodes) == self._speculation.num_positions
        return Fold(session.fold_from, nodes, is_root and self._speculation.is_row_awaited)

    def _hold(self, now: MonotonicS) -> None:
        """A fault that comes with rows is not to find a speculation that does not know of them."""
        self._held_at = None if self._speculation is None else now

    def _pause(self) -> None:
        """Nothing can be sent until a session is open again."""
        if self._speculation is not None:
            self._speculation.pause()

    def _follow(self, now: MonotonicS) -> None:
        """What the session has to say."""
        while (session := self._session) is not None and self._held_at is None:
            event = session.next_event()
            if event is None:
                break
            self._outbox += session.messages_to_send()
            match event:
                case session_core.Opened():
                    self._opened(session, event, now)
                case RowsWanted() | TreeRowsWanted():
                    self._events.append(event)
                case StepDone():
                    self._done(event, now)
                    self._hold(now)
                case TreeStepDone():
                    self._computed(event, now)
                    self._hold(now)
                case Fault():
                    self._found_fault(event, now)
                case Recovered(stage):
                    self._recovered(stage)
                case CannotResume(stage):
                    self._cannot_resume(stage, now)
        if self._session is not None:
            self._outbox += self._session.messages_to_send()

    def _opened(self, session: SessionCore, event: session_core.Opened, now: MonotonicS) -> None:
        self._policy.opened()
        self._patience_until = None
        self._events.append(Opened(session.plan.session, self.places, event.reused_positions, event.epoch))
        self._want_alternates(now)
        if not self._has_log:
            self._has_log = True
            speculation, is_awaited = self._speculation, True
            if speculation is not None:
                self._num_positions, is_awaited = speculation.num_positions, speculation.is_row_awaited
            size = -(-(self._num_positions - event.reused_positions) // (CHUNKS_PER_STAGE * len(self.places)))
            size = min(max(size, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
            for start in range(event.reused_positions, self._num_positions, size):
                stop = min(start + size, self._num_positions)
                session.append(stop - start, want_last=is_awaited and stop == self._num_positions, now=now)
        if self._speculation is not None:
            self._speculation.restart(session.num_positions, next_sequence=session.next_sequence, now=now)
        if self._faults:
            self._look(now)

    def _done(self, done: StepDone, now: MonotonicS) -> None:
        if done.num_computed <= self._num_out and self._speculation is None:
            done = dataclasses.replace(done, has_row=False)  # it is out already
        elif done.has_row:
            self._num_out, self._row_of = done.num_computed, self.places[-1]
        self._computed(done, now)

    def _computed(self, done: StepDone | TreeStepDone, now: MonotonicS) -> None:
        if self._session is not None and self._session.state is SessionState.READY:
            if done.num_computed > self._num_done:
                self._policy.progressed()
                self._accused_at.clear()
            if self._repair is not None and done.num_computed >= self._num_done:
                self._tell_repaired(now)
        self._num_done = max(self._num_done, done.num_computed)
        self._events.append(done)

    def _want_alternates(self, now: MonotonicS) -> None:
        self._alternates_at = MonotonicS(now + ALTERNATES_EVERY_S)
        self._events.append(WantsAlternates(self._policy.avoid_peers(now=now), self._policy.avoid_pairs(now=now)))

    # faults

    def _found_fault(self, fault: Fault, now: MonotonicS) -> None:
        self._faults[fault.stage] = fault
        if fault.cause is Cause.REVOKED:
            self._doubted.discard(fault.stage)
        self._soft_retry_s = SOFT_RETRY_S
        self._last_error = fault.error
        if fault.cause is Cause.PAIR and fault.accuser is not None:
            self._pair_failed(fault, fault.accuser, now)
        elif fault.cause is Cause.GARBAGE and fault.accuser is not None:
            # No proof: who comes before it can make it say that. So it is avoided by this answer only.
            self._policy.failed(PeerId(fault.error.peer), now=now)
            self._pair_failed(fault, fault.accuser, now)
        elif fault.cause not in (Cause.SILENT, Cause.STUCK):
            self._avoid(fault.error, now)
        if self.is_open:
            self._look(now)
            return
        self._pause()
        if fault.cause in (Cause.SILENT, Cause.STUCK) and not self._has_log:
            self._avoid(fault.error, now)
        self._note_repair(fault, now)
        self._try_again(now)

    def _cannot_resume(self, stage: int, now: MonotonicS) -> None:
        peer = self.places[stage].peer
        error = PeerRefused(peer, f"node {short(peer)} has not kept what it handed on")
        self._last_error = self._last_error or error
        self._pause()
        self._policy.has_dropped(peer, now=now)
        self._note_repair(Fault(stage, Cause.REFUSED, error), now)
        self._try_again(now, with_whole=str(error))

    def _pair_failed(self, fault: Fault, accuser: int, now: MonotonicS) -> None:
        """Who accuses one neighbour after the other is replaced as well: it may be that none of them was at fault."""
        peer = self.places[accuser].peer
        self._policy.pair_failed(peer, self.places[fault.stage].peer, now=now)
        if (fault.is_either or self._policy.is_doubted(peer)) and accuser not in self._faults:
            what = "does not reach the one behind it" if fault.is_either else "fails with one neighbour after the other"
            error = RemoteProtocolError(peer, f"node {short(peer)} {what}")
            self._faults[accuser] = dataclasses.replace(fault, stage=accuser, accuser=fault.stage, error=error)
            self._doubted.add(accuser)
        if fault.is_either:
            self._doubt_further_up(fault, accuser)

    def _doubt_further_up(self, fault: Fault, accuser: int) -> None:
        """What two stages fail with again, after others were there, may come from the stages before them."""
        place = self.places[fault.stage]
        holders = self._accused_at.setdefault(place.layers.start, set())
        holders.add(place.peer)
        first = min(fault.stage, accuser)
        for stage in range(max(0, first - len(holders) + 1), first):
            if stage not in self._faults:
                peer = self.places[stage].peer
                error = RemoteProtocolError(peer, f"node {short(peer)} may be why the nodes behind it fail")
                self._faults[stage] = dataclasses.replace(fault, stage=stage, accuser=fault.stage, error=error)
                self._doubted.add(stage)

    def _recovered(self, stage: int) -> None:
        self._faults.pop(stage, None)
        if not self._faults:
            self._asked = self._next = self._retry_at = None
            self._connecting.clear()

    def _note_repair(self, fault: Fault, now: MonotonicS, of: Place | None = None) -> None:
        """The first of several faults is what the stall is put down to.

        Args:
            of: whose fault it is, when that is not who has the place now.
        """
        if self._repair is None and self._has_log and self._session is not None:
            waiting_since = self._session.waiting_since
            self._repair = _Repair(
                RepairKind.PATCHED,
                fault.stage,
                (of or self.places[fault.stage]).peer,
                fault.cause.value,
                since=now if waiting_since is None else waiting_since,
                is_awaited=waiting_since is not None,
                replayed_positions=-self._session.replayed_positions,
                replayed_bytes=-self._session.replayed_bytes,
            )

    def _tell_repaired(self, now: MonotonicS) -> None:
        repair, self._repair = self._repair, None
        if repair is None:
            return
        if self._session is not None:
            repair.replayed_positions += self._session.replayed_positions
            repair.replayed_bytes += self._session.replayed_bytes
        since = repair.since if repair.is_awaited else max(repair.since, self._appended_at)
        self._events.append(
            Repaired(
                repair.kind,
                repair.stage,
                repair.peer,
                repair.cause,
                max(0.0, now - since),
                repair.replayed_positions,
                repair.replayed_bytes,
            )
        )

    def _try_again(self, now: MonotonicS, with_whole: str = "") -> None:
        """An attempt has failed: once, however many of its stages are lost before there is another.

        Args:
            with_whole: why part of a route will not do; empty: it may.
        """
        failed = (self.session, self.epoch)
        looking = self._asked or self._next
        if failed == self._attempt_of and looking is not None:
            if with_whole or looking.kind is RouteKind.WHOLE:
                self._ask_whole(with_whole or str(self._last_error), now)
            else:
                self._look(now)
            return
        self._attempt_of = failed
        attempt = self._policy.next_attempt()
        if attempt is Attempt.GIVE_UP:
            self._fail(self._last_error or FusionError("no node could be found that goes on with the answer"))
        elif with_whole or attempt is Attempt.PREFILL or not self._has_log:
            self._ask_whole(with_whole or str(self._last_error), now)
        else:
            self._look(now)

    def _look(self, now: MonotonicS) -> None:
        """For whom to go on with: somebody else in the place of who is lost, or another route."""
        session = self._session
        if session is not None and self._has_log and not self._faults and session.state is not SessionState.BROKEN:
            return  # it goes on as it is
        if self._session is None or not self._has_log or not self._faults:
            self._ask_whole(str(self._last_error or "a new answer"), now)
            return
        patched = self._with_alternates(now)
        if patched is not None:
            self._choose(_Next(RouteKind.PATCH, patched), now)
        else:
            reason = "; ".join(str(fault.error) for fault in self._faults.values())
            self._ask(RouteKind.PATCH, tuple(sorted(self._faults)), reason, now)

    def _with_alternates(self, now: MonotonicS) -> tuple[Place, ...] | None:
        """The route with the alternates that are there already; None where one is missing."""
        avoid, avoid_pairs = self._policy.avoid_peers(now=now), self._policy.avoid_pairs(now=now)
        places: list[Place] = []
        for index, place in enumerate(self.places):
            if index not in self._faults:
                places.append(place)
                continue
            found = self._alternates[index] if index < len(self._alternates) else ()
            if not found or any(p.peer in avoid or p.peer not in self._connected for p in found):
                return None
            places += found
        peers = [place.peer for place in places]
        pairs = {(min(a, b), max(a, b)) for a, b in itertools.pairwise(peers)}
        if pairs & avoid_pairs or not self._fits(tuple(places)) or not self._is_allowed(places):
            return None
        return tuple(places)

    def _avoid(self, error: PeerError, now: MonotonicS) -> None:
        self._last_error = error
        self._policy.failed(PeerId(error.peer), now=now)
        self._events.append(PeerFailed(error))

    def _fail(self, error: FusionError) -> None:
        if isinstance(error, NoRoute | NoPeers) and self._last_error is not None:
            # Why another route was needed is what its reader does not know.
            cause, error = self._last_error, type(error)(f"{self._last_error}; and {error}")
            error.__cause__ = cause
        self._end_session(retain=False)
        self._is_over = True
        self._asked = self._next = None
        self._events.append(Failed(error))
