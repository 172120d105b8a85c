"""The user's side of one session: what to send to which stage, what may come back, and when to give up.

Guarantees: a result is accepted only from the last stage of the plan, for a step that was sent and not yet answered, in
order, with exactly the rows that were asked for. Every other message of a stage ends the session with an error that
names the peer; what others send changes nothing. A session always ends: every wait has a deadline.

Assumes: payloads travel beside this core; the shell sends the rows that belong to a Step and keeps the payload of a
StepResult until the event for it comes out.

States: OPENING (waiting for every stage), READY, CLOSED (the user closed it), FAILED (an error, told once).
Timers: the opening deadline and the deadline of the oldest unanswered step, both in seconds of the monotonic clock;
they guard against a peer that is alive and idle; a dead or frozen one is noticed earlier by the link's heartbeat.

Source: docs/protocol-data-plane.md, "Session". Ugly: chains only; trees come with speculation.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from fusion_node.errors import (
    FusionError,
    PeerClosed,
    PeerError,
    PeerRefused,
    PeerTimeout,
    PeerUnreachable,
    RemoteProtocolError,
)
from fusion_node.types import MonotonicS, PeerId
from fusion_node.wire import printable
from p2p.identity import short
from p2p.messages import (
    PEER_LOST,
    SUCCESSOR_UNREACHABLE,
    AnyMessage,
    CloseSession,
    OpenSession,
    SessionClosed,
    SessionFailed,
    SessionOpened,
    SessionRefused,
    StageTiming,
    Step,
    StepResult,
    TensorMeta,
)
from p2p.records import Plan

OPEN_DEADLINE_S = 15.0
"""A stage may have to dial its successor first: two handshakes over slow links, and a retry."""

STEP_DEADLINE_S = 30.0
"""For a step of a few rows: a loaded CPU node takes up to a second for one; only a stuck one takes this long."""

STEP_DEADLINE_PER_ROW_S = 0.5
"""More rows are more work: a chunk of 256 on a slow CPU with a large model."""


class SessionState(enum.Enum):
    OPENING = "opening"
    READY = "ready"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Opened:
    """Every stage has reserved its KV.

    Attributes:
        reused_positions: with which the session begins on every stage.
    """

    reused_positions: int = 0


@dataclass(frozen=True, slots=True)
class StepDone:
    """The rows of one step came back."""

    sequence: int
    round_trip_s: float
    timings: tuple[StageTiming, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The session is over."""

    error: FusionError


SessionEvent = Opened | StepDone | Failed
SessionMessage = SessionOpened | SessionRefused | SessionFailed | SessionClosed | StepResult
"""What a stage may say to the user of a session."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Positions of an earlier session over the same stages, with which a new one would like to begin."""

    session: bytes
    num_positions: int


@dataclass(slots=True)
class _Pending:
    step: Step
    sent_at: MonotonicS
    deadline: MonotonicS


class SessionCore:
    """One session over the stages of ``plan``.

    Args:
        plan: decoded form of ``signed_plan``.
        row_size: hidden size that results must have.
        wire_dtype: encoding that results must have.
        prefix: to ask the stages for.

    Attributes:
        reused_positions: with which the session begins: those of the prefix when every stage has the same number of
            them, else 0.
        num_computed: positions that every stage has computed, reused ones included.
    """

    def __init__(
        self, plan: Plan, signed_plan: bytes, *, row_size: int, wire_dtype: str, prefix: Prefix | None = None
    ) -> None:
        self.plan = plan
        self.state = SessionState.OPENING
        self.reused_positions = 0
        self.num_computed = 0
        self._prefix = prefix or Prefix(b"", 0)
        self._signed_plan = signed_plan
        self._row_size = row_size
        self._wire_dtype = wire_dtype
        self._peers = [PeerId(stage.peer) for stage in plan.stages]
        self._to_open = set(range(len(self._peers)))
        self._offers: set[int] = set()
        self._open_deadline: MonotonicS | None = None
        self._pending: deque[_Pending] = deque()
        self._next_sequence = 0
        self._last_node = 0
        self._outbox: list[tuple[PeerId, AnyMessage]] = []
        self._events: deque[SessionEvent] = deque()

    def start(self, *, now: MonotonicS) -> None:
        """Asks every stage to reserve."""
        self._open_deadline = MonotonicS(now + OPEN_DEADLINE_S)
        for index, peer in enumerate(self._peers):
            message = OpenSession(
                session=self.plan.session,
                epoch=self.plan.epoch,
                stage=index,
                plan=self._signed_plan,
                prefix=self._prefix.session,
                prefix_positions=self._prefix.num_positions,
            )
            self._outbox.append((peer, message))

    def next_step(self, tensor: TensorMeta, *, want_last: bool, now: MonotonicS) -> Step:
        """The header of a step that appends ``tensor.num_rows`` positions; the shell sends it with the rows.

        Args:
            want_last: whether the hidden row of the last position comes back; else the answer has no rows.
        """
        first = self._last_node + 1
        last = self._last_node + tensor.num_rows
        step = Step(
            session=self.plan.session,
            epoch=self.plan.epoch,
            sequence=self._next_sequence,
            first_node=first,
            parent=self._last_node,
            parents=(),
            advance=last,
            want=(last,) if want_last else (),
            tensor=tensor,
            timings=(),
        )
        deadline = MonotonicS(now + STEP_DEADLINE_S + STEP_DEADLINE_PER_ROW_S * tensor.num_rows)
        self._pending.append(_Pending(step, now, deadline))
        self._next_sequence += 1
        self._last_node = last
        return step

    def close(self, *, retain: bool = False) -> None:
        """Ends the session on every stage. Nothing is waited for.

        Args:
            retain: ask the stages to keep its KV for a later session with the same beginning.
        """
        if self.state in (SessionState.CLOSED, SessionState.FAILED):
            return
        self.state = SessionState.CLOSED
        self._release(retain=retain)

    # what comes from outside

    def receive(self, message: AnyMessage, *, source: PeerId, now: MonotonicS) -> None:
        """Takes a message of this session.

        Ignored are messages of other epochs, after the end, and from peers that are no stage of the plan: who overhears
        a session's id must not be able to end the session.
        """
        if self.state in (SessionState.CLOSED, SessionState.FAILED) or source not in self._peers:
            return
        if not isinstance(message, SessionMessage) or message.epoch != self.plan.epoch:
            return
        match message:
            case SessionOpened() if self._is_from_stage(message.stage, source):
                self._receive_opened(message, source)
            case SessionRefused() if self._is_from_stage(message.stage, source):
                self._fail(self._translate_refusal(message, source))
            case SessionFailed() if self._is_from_stage(message.stage, source):
                self._fail(self._translate(message, source))
            case StepResult() if source == self._peers[-1]:
                self._receive_result(message, source, now)
            case SessionClosed():
                pass
            case _:
                kind = type(message).__name__
                self._fail(RemoteProtocolError(source, f"node {short(source)} sent {kind}, which is not its to send"))

    def link_closed(self, source: PeerId, error: FusionError) -> None:
        """A link to a stage is gone; so is its KV."""
        if source in self._peers and self.state in (SessionState.OPENING, SessionState.READY):
            self._fail(error)

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        if self.state is SessionState.OPENING:
            return self._open_deadline
        if self.state is SessionState.READY and self._pending:
            return self._pending[0].deadline
        return None

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early."""
        due = self.get_timer()
        if due is None or now < due:
            return
        if self.state is SessionState.OPENING:
            peer = self._peers[min(self._to_open)]
            self._fail(PeerTimeout(peer, f"node {short(peer)} did not open the session within {OPEN_DEADLINE_S:.0f} s"))
        else:
            waited_s = now - self._pending[0].sent_at
            peer = self._peers[-1]
            names = " → ".join(short(p) for p in self._peers)
            self._fail(PeerTimeout(peer, f"no result within {waited_s:.0f} s from the nodes {names}"))

    def messages_to_send(self) -> list[tuple[PeerId, AnyMessage]]:
        """Drained, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def next_event(self) -> SessionEvent | None:
        """Drained one by one, in order."""
        return self._events.popleft() if self._events else None

    # inside

    def _receive_opened(self, message: SessionOpened, source: PeerId) -> None:
        if message.reused_positions > self._prefix.num_positions:
            self._fail(RemoteProtocolError(source, f"node {short(source)} reuses more positions than it was asked for"))
            return
        if message.stage not in self._to_open:
            return
        self._to_open.discard(message.stage)
        self._offers.add(message.reused_positions)
        if not self._to_open:
            self.state = SessionState.READY
            self._open_deadline = None
            # Stages that begin at different positions cannot pass rows on; those that offer some begin at 0 as well.
            self.reused_positions = min(self._offers) if len(self._offers) == 1 else 0
            self._last_node = self.num_computed = self.reused_positions
            self._events.append(Opened(self.reused_positions))

    def _receive_result(self, message: StepResult, source: PeerId, now: MonotonicS) -> None:
        if not self._pending or message.sequence != self._pending[0].step.sequence:
            self._fail(RemoteProtocolError(source, f"node {short(source)} answered a step that is not due"))
            return
        pending = self._pending.popleft()
        expected = TensorMeta(self._wire_dtype, len(pending.step.want), self._row_size)
        if message.nodes != pending.step.want or message.tensor.uncompressed != expected:
            self._fail(RemoteProtocolError(source, f"node {short(source)} returned other rows than it was asked for"))
            return
        self.num_computed = pending.step.first_node + pending.step.tensor.num_rows - 1
        self._events.append(StepDone(message.sequence, now - pending.sent_at, message.timings))

    def _is_from_stage(self, stage: int, source: PeerId) -> bool:
        return stage < len(self._peers) and self._peers[stage] == source

    def _translate_refusal(self, message: SessionRefused, source: PeerId) -> PeerError:
        """Who is to be left out of the next plan: mostly who refuses, but not for a neighbour that it cannot reach."""
        reason = printable(message.reason)
        if message.code == SUCCESSOR_UNREACHABLE and message.stage + 1 < len(self._peers):
            successor = self._peers[message.stage + 1]
            return PeerUnreachable(successor, f"node {short(source)} cannot reach node {short(successor)}: {reason}")
        return PeerRefused(source, f"node {short(source)} refuses: {reason}")

    def _translate(self, message: SessionFailed, source: PeerId) -> FusionError:
        """A stage may name a neighbour as the cause; it may lie, so both names are in the error."""
        reason = printable(message.reason)
        if message.culprit in self._peers and message.culprit != source:
            culprit = short(message.culprit)
            if message.code == PEER_LOST:
                return PeerClosed(message.culprit, f"node {culprit} is gone, says node {short(source)}: {reason}")
            return RemoteProtocolError(message.culprit, f"node {culprit} erred, says node {short(source)}: {reason}")
        return PeerRefused(source, f"node {short(source)} ended the session: {reason}")

    def _fail(self, error: FusionError) -> None:
        self.state = SessionState.FAILED
        self._events.append(Failed(error))
        self._release(retain=False)

    def _release(self, *, retain: bool) -> None:
        message = CloseSession(session=self.plan.session, epoch=self.plan.epoch, retain=retain)
        self._outbox.extend((peer, message) for peer in self._peers)
        self._pending.clear()
