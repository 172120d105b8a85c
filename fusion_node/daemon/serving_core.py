"""What a node decides about the sessions that it serves; nothing is computed, sent or waited for here.

Guarantees: a step is computed only once, in the order of its session's log, and only when it comes from the peer that
the plan in force puts in front. What a session handed on is kept, as far as the bound allows, until it is over, so that
it can be handed on again. A neighbour that is lost, or that errs, ends no session: its KV is kept for KEPT_S, for a
plan of a higher epoch to adopt it. A fault of this node is told as such and as nobody else's. A query is answered in
the call in which it comes. What strangers can make this node keep or send is bounded: MAX_QUEUED_ROWS of a session wait
for the device, MAX_RESENDS orders wait, MAX_DIALS next stages are dialled at once and MAX_DIALS_OF_USER for a user, a
position is sent again once per epoch, and RESEND_TIMES over all of them, and only while MAX_BACKLOG_BYTES at most wait
for the next stage. Nobody can have a step derived anew more than NARROWED_PER_STEP times as often as they send one, nor
save up more than MAX_NARROW_CREDIT of that; nor have MAX_NARROWED_NODES gone through at once, or remembered for it.

A log is a token tree; rows of it are retained as they are committed. When it is folded, ids of its nodes and sequences
begin anew, which is what *generation* counts: what was applied before is computed and retained as of before.

Assumes: one caller; ``now`` never goes back. The shell carries out the commands in their order; for every Connect it
calls ``successor_connected`` or ``successor_unreachable``, for every Take ``take_step`` or ``rows_unfit``, for every
SendRows ``rows_left``, and for every ServedStep that it got ``step_computed`` or ``end``; both in order within a
session, and never for one that it was told to forget. It may leave a Narrow alone: what is computed in vain does no
harm. Payloads are anything with a length; only the output log's
``join`` looks into them.

States of a session: see admission_core. Timers: those of admission_core, RETRY_S while orders wait for the link to
the next stage, EARLY_S while entries wait for those that they follow, and PARTS_S while they wait for columns; seconds
of the monotonic clock.

Source: docs/protocol-data-plane.md, "Repair". Still ugly: a step that was under way to this node when a new plan was
adopted is dropped, and handed over again though its rows were here; rows of a tree that a fold has dropped are computed
if they waited for the device; and the file is long, because all of it decides about the same few fields of a session.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from fusion_node.daemon.admission_core import (
    MAX_QUEUED_ROWS,
    Admission,
    Fold,
    Grace,
    JoiningEntry,
    RefusalCode,
    Refused,
    Session,
    SessionState,
)
from fusion_node.daemon.grants_core import EndedGrants, HeldGrant, Over, renews
from fusion_node.daemon.output_log_core import OutputLog
from fusion_node.daemon.parts_core import Joined, JoinedPart, cut, header_of, parts_of, slowest, to_dial
from fusion_node.daemon.taps_core import MAX_TAP_BACKLOG_BYTES, Tap, tap_of
from fusion_node.engine.session_log_core import Duplicate, LogState, StepFault, StepRows
from fusion_node.errors import ConfigError
from fusion_node.grants import Grant
from fusion_node.types import MonotonicS, PeerId
from fusion_node.wire import MAX_PAYLOAD_BYTES
from p2p.identity import short
from p2p.messages import (
    DRAINING,
    NOT_RETAINED,
    PEER_LOST,
    UNKNOWN_SESSION,
    AnyMessage,
    Cancel,
    CloseSession,
    OpenSession,
    RenewGrant,
    Replayed,
    Resend,
    RevokeGrant,
    SessionClosed,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    SessionReleased,
    StageTiming,
    Standing,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    row_bytes,
)
from p2p.records import Plan, PlanMember, PlanStage, Refusal, dialled_at

Payload: TypeAlias = Any
"""Rows as they travel: bytes here, anything with a length in a simulation."""

MAX_RESENDS = 64
"""Orders of one session that wait. A user keeps a handful in flight per stage."""

MAX_EARLY_ROWS = 1024
"""Of one session, in entries that come before those that they follow: four chunks of a prompt."""

MAX_EARLY_ROWS_OF_USER = 2048
"""Of all sessions of one user."""

MAX_ALL_EARLY_ROWS = 8192
"""Of all sessions together. Nothing computes them as long as what they follow does not come."""

MAX_ALL_EARLY_BYTES = 64 * 2**20
"""The same in bytes, as they will be when they are decoded."""

EARLY_S = 20.0
"""So long they wait while nothing comes that they follow. A chunk of a prompt takes a slow stage seconds."""

PARTS_S = 20.0
"""So long an entry waits for the columns of others once the first have come: members are an exchange apart at most."""

MAX_ALL_JOINING_BYTES = 128 * 2**20
"""Of entries that have come from some of those before the stage and not from others, of all sessions together. A prompt
of 4,096 rows has 64 MiB of columns at hidden size 8,192 in a group of two."""

MAX_JOINING_BYTES_OF_USER = MAX_ALL_JOINING_BYTES // 2
"""The same of all sessions of one user: room for that prompt, and as much is left to others."""

MAX_BACKLOG_BYTES = 8 * 2**20
"""That may wait for the next stage before rows are sent again: an order costs its sender nothing, and a peer for which
64 MiB wait is dropped, with the sessions of everybody."""

RESEND_TIMES = 8
"""As often a session has all that it retains handed on again at once, over all epochs: as often as a user repairs
an answer that gets no further. What somebody computes once is not to be sent for ever to whom they name."""

RESEND_AGAIN_S = 600.0
"""And then once more in this time."""

RETRY_S = 0.05
"""Between two looks at such a backlog: 8 MiB take 0.07 s on a line of a gigabit."""

LEASE_REUSE_S = 10.0
"""So old may a signed lease be that is told again: a query costs no signature then."""

MAX_DIALS_OF_USER = 8
"""To next stages, at once; what is more waits its turn. One to a stage that is connected ends at once, and to a host
that does not answer after seconds."""

MAX_DIALS = 64
"""Of all users together: a node is not to be made to knock at many doors."""

MAX_NARROWED_STEPS = 64
"""That one cancel looks at: the last ones that wait. Users have some hundred rows under way, several to a step."""

MAX_NARROWED_NODES = 4096
"""Live and skipped ones in the logs before those steps, together: some 40 bytes and 1 us each, where a frame of a few
bytes names a thousand. Thirty steps of a user with a hundred nodes in flight."""

NARROWED_PER_STEP = 4
"""Times that a step of a session may be derived anew for its cancels, on average: as much as deriving it first costs,
and a cancel costs its user nothing."""

MAX_NARROW_CREDIT = 256
"""Of those that are saved up, for a user that has cancelled nothing for long: steps that were cheap to derive are not
to pay for others that are not."""

LEASE_EXPIRED = "lease-expired"

GRANT_EXPIRED = "grant-expired"


@dataclass(frozen=True, slots=True)
class Send:
    """A message without rows."""

    peer: PeerId
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class SendRows:
    """A message with rows, which may be compressed on the way out; those of one session go in order.

    When it is sent, ``rows_left``; when it cannot be, ``send_failed`` as well.
    """

    session: Session
    peer: PeerId
    message: Step | StepResult | StepTaps
    payload: Payload
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Connect:
    """Make sure of a link to the next stage, or to a member of this or the next one; then ``successor_connected`` or
    ``successor_unreachable``."""

    session: Session
    epoch: int
    place: PlanStage | PlanMember

    @property
    def peer(self) -> PeerId:
        return PeerId(self.place.peer)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it can be dialled, best first; empty when nobody can."""
        return dialled_at(self.place)


@dataclass(frozen=True, slots=True)
class Take:
    """A step has come whose header is in order: decode its rows, then ``take_step`` or ``rows_unfit``.

    Where several peers have sent it, the payload is a Joined of what each of them sent.
    """

    session: Session
    message: Step
    payload: Payload


@dataclass(frozen=True, slots=True)
class Forget:
    """The session is over: nothing of it is to be computed or sent any more."""

    session: Session


@dataclass(frozen=True, slots=True)
class Narrow:
    """Rows of steps that wait for the device need not be computed: see ``narrow``."""

    session: Session


@dataclass(frozen=True, slots=True)
class EnterGroup:
    """From now on other members may send what they contribute to a session, under its present plan."""

    session: Session


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """What waits for contributions of other members will never get them."""

    session: Session


Command: TypeAlias = Send | SendRows | Connect | Take | Forget | Narrow | EnterGroup | LeaveGroup


@dataclass(frozen=True, slots=True, eq=False)
class ServedStep:
    """A step to compute, then to hand to ``step_computed``.

    Attributes:
        rows: what to compute; ``rows.live_rows`` are indices into the rows that came.
        encoding: of what goes out.
        returned: nodes whose rows go back to the user; None when all that is computed goes to the next stage.
        out: where those are among the live rows; None as ``returned``.
        stops: it is not handed on.
        generation: of the session's log.
        is_appended: its rows are retained as they are; else each as its node is committed.
        tap: rows of layers that its user is sent beside; None: none.
    """

    session: Session
    message: Step
    rows: StepRows
    encoding: str
    returned: tuple[int, ...] | None
    out: tuple[int, ...] | None
    stops: bool
    generation: int
    is_appended: bool
    tap: Tap | None = None


class Serving:
    """The sessions of one node.

    Args:
        outputs: what was handed on; with a bound of 0 bytes nothing can be repeated.
        row_size: hidden size of the model.
        wire_dtype: plain encoding of the node's numerics.
        open_plan: checks a signed plan.
        sign_lease: gives the signed lease of a session for so many seconds; empty where nobody checks it.
        open_grant: checks a signed grant, and says how many seconds it has left; None: none is demanded, as in
            simulations.
        sign_release: signs what is said at the end of a grant; None: nothing is.
        wait_s: what a step has to wait for the device now, estimated.
        backlog_bytes: that wait to be sent to a peer, or for its acknowledgement.
        backlog_s: how long they take to get there, estimated.
        standing: how far this member of a group is with a session; None of one that it computes alone.

    Attributes:
        counters: for status replies.
        retry_at: when orders that wait for a link are looked at again; part of ``get_timer``.
    """

    def __init__(
        self,
        admission: Admission,
        outputs: OutputLog,
        *,
        row_size: int,
        wire_dtype: str,
        open_plan: Callable[[bytes], Plan | Refusal],
        sign_lease: Callable[[Session, float], bytes] = lambda session, lease_s: b"",
        open_grant: Callable[[bytes], tuple[Grant, float] | Refusal] | None = None,
        sign_release: Callable[[Over], bytes] | None = None,
        wait_s: Callable[[], float] = lambda: 0.0,
        backlog_bytes: Callable[[PeerId], int] = lambda peer: 0,
        backlog_s: Callable[[PeerId], float] = lambda peer: 0.0,
        standing: Callable[[Session], Standing | None] = lambda session: None,
    ) -> None:
        self.admission = admission
        self.outputs = outputs
        self.counters: Counter[str] = Counter()
        self._row_size = row_size
        self._wire_dtype = wire_dtype
        self._open_plan = open_plan
        self._sign_lease = sign_lease
        self._open_grant = open_grant
        self._sign_release = sign_release
        self._ended = EndedGrants()
        self._wait_s = wait_s
        self._backlog_bytes = backlog_bytes
        self._backlog_s = backlog_s
        self._standing = standing
        self._commands: deque[Command] = deque()
        self._unsent: dict[Session, Counter[PeerId]] = {}
        """Bytes of rows that are handed on again, and of taps, that have not left yet: the backlog of no link knows of
        them."""
        self._waiting_for_link: dict[Session, None] = {}
        """With orders that wait until less is under way to the next stage."""
        self.retry_at: MonotonicS | None = None
        self._with_early: dict[Session, None] = {}
        """With entries that came before those that they follow."""
        self._with_joining: dict[Session, None] = {}
        """With entries that have not come from everybody before the stage."""
        self._dials: dict[tuple[Session, int, PeerId], None] = {}
        """Under way, by session, epoch and who is dialled."""
        self._dials_of: Counter[PeerId] = Counter()
        self._to_dial: dict[tuple[Session, PeerId], Connect] = {}
        """What waits for one of them to end."""

    # what comes from outside

    def receive(self, peer: PeerId, message: AnyMessage, payload: Payload, *, now: MonotonicS) -> bool:
        """Takes a message. False when it is none that concerns a session on a node."""
        match message:
            case Step():
                self._receive_step(peer, message, payload, now)
            case OpenSession():
                self._open(peer, message, now)
            case CloseSession():
                self._close(peer, message, now)
            case RevokeGrant():
                self._revoke(peer, message)
            case RenewGrant():
                self._renew_grant(peer, message, now)
            case SessionQuery():
                self._answer(peer, message, now)
            case Resend():
                self._resend(peer, message, now)
            case Cancel():
                self._cancel(peer, message)
            case _:
                return False
        return True

    def peer_lost(self, peer: PeerId, reason: str, *, now: MonotonicS) -> None:
        """A link is gone for good. Sessions of that user end; those of whose stages it is one are kept."""
        for session in self.admission.sessions:
            if session.state is SessionState.KEPT and peer in session.parts.others:
                self._commands.append(LeaveGroup(session))
        for session in self.admission.touching(peer):
            if peer == session.user:
                self.end(session, PEER_LOST, reason, culprit=peer)
            elif peer in session.parts.others:
                self.member_at_fault(session, PEER_LOST, reason, culprit=peer, now=now)
            else:
                self._keep(session, PEER_LOST, reason, culprit=peer, now=now)

    def member_at_fault(
        self,
        session: Session,
        code: str,
        reason: str,
        *,
        culprit: str,
        now: MonotonicS,
        standing: Standing | None = None,
    ) -> None:
        """Another member of the group is gone, or has sent what it must not: the session cannot be computed on.

        Args:
            standing: how far it was, where the others were waited for.
        """
        if self.admission.holds(session):
            self._keep(session, code, reason, culprit=culprit, now=now, standing=standing)
            self._commands.append(LeaveGroup(session))

    def rows_left(self, command: SendRows) -> None:
        """The rows of that command are with the link to that peer now, or will not be sent."""
        unsent = self._unsent.get(command.session)
        if unsent is not None and (command.is_repeated or isinstance(command.message, StepTaps)):
            unsent[command.peer] -= command.message.tensor.num_bytes
            if not any(unsent.values()):
                del self._unsent[command.session]

    def unsent_bytes(self, peer: PeerId) -> int:
        """Of rows that are handed on to a peer again, or that a user is sent beside, and that its link has not got."""
        return sum(unsent[peer] for unsent in self._unsent.values())

    def send_failed(self, session: Session, peer: PeerId, reason: str, *, now: MonotonicS) -> None:
        """Rows could not be sent because that peer cannot be reached."""
        if self.admission.holds(session) and (peer == session.user or session.parts.goes_to(peer)):
            self._blame(session, PEER_LOST, reason, culprit=peer, now=now)

    def successor_connected(self, session: Session, epoch: int, *, now: MonotonicS, peer: PeerId | None = None) -> None:
        """There is a link to that peer of that epoch's plan; if none is named, to the next stage."""
        peer = session.next if peer is None else peer
        self._dialled(session, epoch, peer)
        if self._is_opening(session, epoch):
            session.awaited.discard(peer)
            if not session.awaited:
                self._confirm(session, now)

    def successor_unreachable(
        self, session: Session, epoch: int, *, now: MonotonicS, peer: PeerId | None = None
    ) -> None:
        """There is no link to that peer: a new session is given back, an adopted one kept."""
        peer = session.next if peer is None else peer
        self._dialled(session, epoch, peer)
        if not self._is_opening(session, epoch):
            return
        is_member = peer in session.parts.others
        code = RefusalCode.MEMBER_UNREACHABLE if is_member else RefusalCode.SUCCESSOR_UNREACHABLE
        who = f"the {'member' if is_member else 'next stage'} {short(peer)}"
        # Not why: whoever writes the plan chooses the addresses, and would have us explore our network for them.
        reason = f"{who} cannot be reached from here"
        if not any(dialled_at(p) for p in to_dial(session.plan, session.stage, session.parts) if p.peer == peer):
            reason = f"{who} can be dialled by nobody, and no relay leads to it"
        self.admission.refused[code] += 1
        self._refuse(session.user, session.key, epoch, session.stage, Refused(code, reason), culprit=peer)
        if session.log.is_untouched:
            self._forget(session)
        else:
            self._clear_coming(session)
            self._stop_dialling(session)
            self.admission.keep(session, now=now)

    def take_step(self, session: Session, message: Step, *, now: MonotonicS) -> ServedStep | None:
        """The rows of a Take are there and fit to compute with; None when there is nothing to compute after all."""
        _leaves_queue(session, message)  # until the log says that they are to be computed
        if not self._takes(session, message.epoch):
            self.counters["steps_without_session"] += 1
            return None
        log, is_first = session.log, session.log.is_untouched
        if log.declines_prefix(message.parent, message.parents):
            if not self.admission.start_empty(session):
                self._over(session, "no-memory", "KV does not fit without the prefix that was reused", "")
                return None
            log = session.log
            self._open_outputs(session)
        before, rows = log.state(), _apply(session, message)
        match rows:
            case Duplicate():
                self.counters["steps_duplicate"] += 1
                return None
            case StepFault():
                reason = f"the step does not follow the log: {rows.value}"
                # Whoever hands on a step cannot know what the user has cancelled here.
                culprit = session.user if rows is StepFault.CANCELLED_ADVANCE else session.previous
                self._blame(session, rows.value, reason, culprit=culprit, now=now)
                return None
        if is_first:
            self.counters["positions_reused"] += session.reused_positions
        self.admission.renew(session, now=now)
        session.num_queued_rows += message.node_count
        session.num_unfinished += 1
        session.narrow_credit = min(session.narrow_credit + NARROWED_PER_STEP, MAX_NARROW_CREDIT)
        _remember(session, before)
        stops = message.stop_stage == session.stage
        returned, out = _going_out(session, message, rows)
        if rows.committed and not session.is_last:
            self._note_committed(session, rows)
        return ServedStep(
            session,
            message,
            rows,
            self.encoding(session),
            returned,
            out,
            stops,
            session.generation,
            rows.commits_all,
            tap_of(session.taps, message, rows),
        )

    def narrow(self, session: Session, waiting: Sequence[ServedStep]) -> list[ServedStep]:
        """Derives steps anew of which nothing has been computed or moved, and whose rows may have been cancelled.

        Args:
            waiting: the last steps of the session, in order, without a gap.

        Returns:
            Steps to put in the place of the last ones of ``waiting``, as many as there are.
        """
        num = min(len(session.befores), len(waiting))
        if not self.admission.holds(session) or not num or num > session.narrow_credit:
            return []
        waiting, last = waiting[-num:], waiting[-1]
        if (last.generation, last.message.sequence + last.message.covers) != (
            session.generation,
            session.log.next_sequence,
        ):
            return []
        session.num_narrowed += num
        session.narrow_credit -= num
        befores = [session.befores.pop() for _ in waiting]
        session.log.restore(befores[-1])
        narrowed = []
        for step in waiting:
            before, rows = session.log.state(), _apply(session, step.message, only=frozenset(step.rows.nodes))
            if not isinstance(rows, StepRows):
                # A kept root descends from all that was committed, so that no cancel can be the reason.
                self.end(session, "internal", "an error inside the node")
                return []
            self.counters["rows_taken_back"] += len(step.rows.live_rows) - len(rows.live_rows)
            returned, out = _going_out(session, step.message, rows)
            tap = None if step.tap is None else tap_of(step.tap.layers, step.message, rows)
            narrowed.append(replace(step, rows=rows, returned=returned, out=out, tap=tap))
            session.befores.append(before)
        return narrowed

    def rows_unfit(
        self, session: Session, message: Step, reason: str, *, now: MonotonicS, peer: PeerId | None = None
    ) -> None:
        """The rows of a Take are none that may come: before the step has any part in a forward.

        Args:
            peer: who has sent them, where several have.
        """
        _leaves_queue(session, message)
        if self._takes(session, message.epoch):
            self._blame(session, "bad-rows", reason, culprit=peer or session.previous, now=now)

    def step_computed(
        self,
        step: ServedStep,
        payload: Payload,
        timing: StageTiming,
        *,
        now: MonotonicS,
        taps: Sequence[tuple[int, Payload]] = (),
    ) -> None:
        """All rows of a step are computed, and ``payload`` holds those that go out.

        Args:
            taps: rows that its user is sent beside, by layer; one that could not be had is left out.
        """
        session, message = step.session, step.message
        _leaves_queue(session, message)
        if not self.admission.holds(session):
            return
        self._note_computed(step)
        # Also now: a step of many rows on a slow device takes longer than a lease lasts.
        self.admission.renew(session, now=now)
        self.counters["steps"] += 1
        self.counters["rows"] += len(step.rows.live_rows)
        if len(step.rows.live_rows) < message.tensor.num_rows:
            self.counters["rows_skipped"] += message.tensor.num_rows - len(step.rows.live_rows)
        timings = (*message.timings, timing)
        is_in_force = self._takes(session, message.epoch)
        if step.returned is not None:
            if not step.stops:
                # Also under an old epoch: to its user it is worth as much.
                tensor = TensorMeta(step.encoding, len(step.returned), self._width(session))
                result = StepResult(session.key, message.epoch, message.sequence, step.returned, tensor, timings)
                self._commands.append(SendRows(session, session.user, result, payload))
        else:
            self._retain(step, payload)
            if is_in_force and not step.stops:
                self._hand_on(session, self._handed_on(step, timings), payload)
        if step.tap is not None and is_in_force:
            self._send_taps(step, step.tap, taps)
        if step.stops and is_in_force:
            done = Replayed(session.key, message.epoch, session.stage, session.num_done, session.num_computed)
            self._commands.append(Send(session.user, done))
        if session.resends:
            self._serve_resends(session, now)

    def _send_taps(self, step: ServedStep, tap: Tap, taps: Sequence[tuple[int, Payload]]) -> None:
        """Behind what the step is for. Nobody waits for them."""
        session, message = step.session, step.message
        nodes = tuple(step.rows.nodes[row] for row in tap.rows)
        tensor = TensorMeta(step.encoding, len(nodes), self._row_size)
        if self._backlog_bytes(session.user) + self.unsent_bytes(session.user) > MAX_TAP_BACKLOG_BYTES:
            self.counters["taps_left_out"] += len(taps) * len(nodes)
            return
        self.counters["taps"] += len(taps) * len(nodes)
        for layer, rows in taps:
            beside = StepTaps(session.key, message.epoch, message.sequence, layer, nodes, tensor)
            self._unsent.setdefault(session, Counter())[session.user] += tensor.num_bytes
            self._commands.append(SendRows(session, session.user, beside, rows))

    def _note_computed(self, step: ServedStep) -> None:
        """How far the session is: in entries of its log, and in positions whose KV is in its place."""
        session, message = step.session, step.message
        session.num_unfinished -= 1
        while len(session.befores) > session.num_unfinished:
            session.befores.popleft()
        session.num_computed = max(session.num_computed, step.rows.num_final)
        if step.generation == session.generation:
            session.num_done = message.sequence + message.covers
        elif session.fold is not None:
            session.fold.num_steps -= 1
            self._finish_fold(session)

    def _finish_fold(self, session: Session) -> None:
        """What came before the fold is computed, if it is."""
        if session.fold is not None and session.fold.num_steps == 0:
            session.num_computed = max(session.num_computed, session.fold.num_in_place)
            session.num_done, session.fold = session.fold.num_positions, None

    def _handed_on(self, step: ServedStep, timings: tuple[StageTiming, ...]) -> Step:
        """The message with what has been computed of its rows."""
        message, nodes = step.message, step.rows.nodes
        tensor = TensorMeta(step.encoding, len(nodes), self._width(step.session))
        if len(nodes) == message.tensor.num_rows:
            return msgspec.structs.replace(message, tensor=tensor, timings=timings)
        live = sum(1 << (node - message.first_node) for node in nodes)
        num_nodes = message.node_count
        return msgspec.structs.replace(
            message,
            tensor=tensor,
            timings=timings,
            num_nodes=num_nodes,
            live=live.to_bytes(-(-num_nodes // 8), "little"),
        )

    def _hand_on(self, session: Session, message: Step, payload: Payload, *, is_repeated: bool = False) -> None:
        """Sends each of those behind the columns that it holds.

        Args:
            payload: all columns of this stage.
        """
        own, num_rows = session.parts.own, message.tensor.num_rows
        for target in session.parts.targets:
            tensor = TensorMeta(message.tensor.dtype, num_rows, len(target.columns))
            step = msgspec.structs.replace(message, tensor=tensor)
            rows = cut(payload, num_rows, own, target.columns)
            if is_repeated:
                self._unsent.setdefault(session, Counter())[target.peer] += tensor.num_bytes
            self._commands.append(SendRows(session, target.peer, step, rows, is_repeated))

    def end(self, session: Session, code: str, reason: str, *, culprit: str = "") -> None:
        """The session is over here, for a reason of this node's if there is no culprit. Once."""
        if self.admission.holds(session):
            self._over(session, code, reason, culprit)

    def end_all(self, code: str, reason: str) -> None:
        """Ends every session; its user is told why."""
        for session in self.admission.sessions:
            self.end(session, code, reason)

    def end_kept(self) -> None:
        """Nothing is kept of sessions that are over any more."""
        self.admission.end_kept()
        self.outputs.keep_only(lambda key: self.admission.knows(*key))

    # leaving

    def drain(
        self,
        *,
        now: MonotonicS,
        grace_s: float,
        reason: str,
        code: str = DRAINING,
        sessions: Iterable[Session] | None = None,
        may_stay: bool = False,
    ) -> None:
        """Asks users to take their sessions elsewhere. They are served as before for ``grace_s``, then end.

        Whether new ones are opened meanwhile is the admission's to say.

        Args:
            sessions: these only; all if not given.
            may_stay: ``stay`` takes it back, unless the session is drained for good as well.
        """
        until = MonotonicS(now + grace_s)
        for session in self.admission.sessions if sessions is None else sessions:
            before = session.grace
            if not self.admission.holds(session):
                continue
            if before is not None and before.until <= until:
                session.grace = replace(before, may_stay=before.may_stay and may_stay)
                continue
            session.grace = Grace(until, code, reason, may_stay and (before is None or before.may_stay))
            session.lease_envelope = None
            message = SessionDraining(session.key, session.plan.epoch, session.stage, grace_s, reason[:500])
            self._commands.append(Send(session.user, message))

    def stay(self) -> None:
        """Those that are still there need not go after all, but those that were drained for good."""
        for session in self.admission.sessions:
            if session.grace is not None and session.grace.may_stay:
                session.grace = session.lease_envelope = None

    # time and commands

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        early = (each.early_until for each in self._with_early)
        timers = [self.admission.get_timer(), self.retry_at, *early, *map(_parts_until, self._with_joining)]
        return min((timer for timer in timers if timer is not None), default=None)

    def handle_timer(self, *, now: MonotonicS) -> None:
        """Ends what has run out. May be called late, and early without effect."""
        for session in self.admission.handle_timer(now=now):
            code, reason = LEASE_EXPIRED, "nothing was heard of the session"
            if session.grace is not None and session.grace.until <= now:
                code, reason = session.grace.code, session.grace.reason
            elif session.grant is not None and session.grant.until <= now:
                code, reason = GRANT_EXPIRED, "the grant of what is held here has run out"
            self._over(session, code, reason, "")
        for session in [each for each in self._with_early if each.early_until is not None and each.early_until <= now]:
            self._keep(session, "gap", "what the rows follow that have come does not come", culprit="", now=now)
        for session in [each for each in self._with_joining if _parts_until(each) <= now]:
            entry = next(iter(session.joining.values()))
            if not _are_alike(entry):
                self._blame_parts(session, entry, now)
                continue
            missing = [part.peer for part in session.parts.sources if part.peer not in entry.parts]
            who = f"{short(missing[0])} has" if len(missing) == 1 else f"{len(missing)} members have"
            reason = f"{who} not sent their columns of a step for {PARTS_S:.0f} s"
            culprit = missing[0] if len(missing) == 1 else ""
            self._keep(session, "late-parts", reason, culprit=culprit, now=now)
        if self.retry_at is not None and self.retry_at <= now:
            waiting, self._waiting_for_link, self.retry_at = self._waiting_for_link, {}, None
            for session in waiting:
                self._serve_resends(session, now)
        if len(self.outputs) > len(self.admission.sessions):
            # Of retained sessions whose KV is gone.
            self.outputs.keep_only(lambda key: self.admission.knows(*key))

    def stood_still(self, seconds: float, *, now: MonotonicS) -> None:
        """This process did not run in the seconds just past: they count against nobody before the stage."""
        for session in self._with_early:
            if session.early_until is not None:
                session.early_until = MonotonicS(min(session.early_until + seconds, now + EARLY_S))
        for session in self._with_joining:
            for entry in session.joining.values():
                entry.since = MonotonicS(min(entry.since + seconds, now))

    def next_command(self) -> Command | None:
        """Drained one by one, in order."""
        while self.admission.over:
            self._tell_released(self.admission.over.popleft())
        return self._commands.popleft() if self._commands else None

    # opening and closing

    def _open(self, peer: PeerId, message: OpenSession, now: MonotonicS) -> None:
        """Admits a session in the call that brought the message, so that a close that follows finds it."""
        plan = self._open_plan(message.plan)
        if isinstance(plan, Refusal):
            self.admission.refused[f"plan-{plan.value}"] += 1
            hint = ": compare the clocks of both machines" if plan in (Refusal.EXPIRED, Refusal.FUTURE_DATED) else ""
            refused = Refused(RefusalCode.BAD_PLAN, f"the plan is {plan.value}{hint}")
            self._refuse(peer, message.session, message.epoch, message.stage, refused)
            return
        problem = _problem_with_groups(plan, self._row_size)
        if problem is not None:
            refused = Refused(RefusalCode.BAD_PLAN, problem)
            self._refuse(peer, message.session, message.epoch, message.stage, refused)
            return
        before = self.admission.held(message.session, user=peer)
        session = self.admission.open(message, plan, source=peer, now=now, grant=self._grant_of(message, now))
        if before is not None and not self.admission.holds(before):
            self._forget(before)
        if isinstance(session, Refused):
            self._refuse(peer, message.session, message.epoch, message.stage, session)
            return
        session.is_resumed = message.resumes
        session.parts = parts_of(plan, session.stage, session.member, self._row_size)
        if session is before:
            self.counters["sessions_adopted"] += 1
            self._clear_coming(session)
            self._waiting_for_link.pop(session, None)
            self._stop_dialling(session)
            if message.folds:
                self._fold(session, message)
            if session.is_last:
                self.outputs.drop(_output_key(session))
        else:
            self.counters["sessions"] += 1
            self._open_outputs(session, prefix=message.prefix)
        session.next_taken, session.last_taken = session.log.next_sequence, session.log.last_node
        if session.is_group:
            self._commands.append(EnterGroup(session))
        places = to_dial(plan, session.stage, session.parts)
        session.awaited = {PeerId(place.peer) for place in places}
        if not places:
            self._confirm(session, now)
        for place in places:
            self._to_dial[session, PeerId(place.peer)] = Connect(session, session.plan.epoch, place)
        self._dial()

    def _fold(self, session: Session, message: OpenSession) -> None:
        """The session's tree becomes a plain log, along the path that its user has committed."""
        first_position = session.log.num_committed
        committed = session.log.fold(message.path_start, message.path)
        key, generation = _output_key(session), session.generation
        session.generation += 1
        session.numbered_at = session.plan.epoch
        session.befores.clear()
        self.outputs.commit(key, first_position, [_name(generation, node) for node in committed])
        self.outputs.prune(key, is_live=_is_nothing)
        # Of a session that is folded again before anything new has come, what is unfinished is of the first time.
        log = session.log
        session.fold = Fold(session.num_unfinished, log.num_committed, log.num_in_place)
        session.num_done = session.num_computed
        self._finish_fold(session)
        self.counters["sessions_folded"] += 1

    def _dial(self) -> None:
        """Dials for those that wait, the earliest first, as many as may be dialled at once."""
        for (session, peer), command in list(self._to_dial.items()):
            if len(self._dials) >= MAX_DIALS:
                return
            if self._dials_of[session.user] < MAX_DIALS_OF_USER:
                del self._to_dial[session, peer]
                self._dials[session, command.epoch, peer] = None
                self._dials_of[session.user] += 1
                self._commands.append(command)

    def _stop_dialling(self, session: Session) -> None:
        """Those that wait their turn are not dialled for it any more."""
        for key in [key for key in self._to_dial if key[0] is session]:
            del self._to_dial[key]

    def _dialled(self, session: Session, epoch: int, peer: PeerId) -> None:
        if (session, epoch, peer) in self._dials:
            del self._dials[session, epoch, peer]
            self._dials_of[session.user] -= 1
            if not self._dials_of[session.user]:
                del self._dials_of[session.user]
            self._dial()

    def _open_outputs(self, session: Session, prefix: bytes = b"") -> None:
        """Begins to retain; the last stage hands nothing on."""
        size = row_bytes(self.encoding(session), self._width(session))
        if session.is_last or size is None:
            self.outputs.drop(_output_key(session))
            return
        self.outputs.open(
            _output_key(session),
            row_bytes=size,
            prefix=(session.user, prefix),
            num_positions=session.reused_positions,
        )

    def _confirm(self, session: Session, now: MonotonicS) -> None:
        is_resumed = not session.log.is_untouched
        session.state = SessionState.OPEN
        lease_s, lease = self._lease(session, now)
        is_kept = self.outputs.is_kept(_output_key(session))
        self._commands.append(
            Send(
                session.user,
                SessionOpened(
                    session.key,
                    session.plan.epoch,
                    session.stage,
                    lease_s,
                    0 if is_resumed else session.reused_positions,
                    lease,
                    session.log.next_sequence,
                    # What is being computed just now will be there when it is asked for.
                    session.log.num_committed if is_kept and session.log.is_plain else 0,
                    session.log.num_committed,
                    session.taps,
                ),
            )
        )
        self._serve_resends(session, now)

    def _close(self, peer: PeerId, message: CloseSession, now: MonotonicS) -> None:
        session = self.admission.close(
            message.session, epoch=message.epoch, source=peer, now=now, retain=message.retain
        )
        if session is not None:
            self._forget(session)
            self._commands.append(Send(peer, SessionClosed(message.session, message.epoch)))
        elif not self.admission.knows(peer, message.session):
            self.outputs.drop((peer, message.session))

    # grants

    def _grant_of(self, message: OpenSession, now: MonotonicS) -> HeldGrant | Refused | None:
        """The grant that comes with a session, or why it is none; None where none is demanded."""
        if self._open_grant is None or self.admission.slice is None:
            return None
        if not message.grant:
            return Refused(RefusalCode.NOT_GRANTED, "a slice is held under its user's grant, and none came")
        opened = self._open_grant(message.grant)
        if isinstance(opened, Refusal):
            is_late = opened in (Refusal.EXPIRED, Refusal.FUTURE_DATED)
            hint = ": compare the clocks of both machines" if is_late else ""
            return Refused(RefusalCode.NOT_GRANTED, f"the grant is {opened.value}{hint}")
        grant, left_s = opened
        if grant in self._ended:
            return Refused(RefusalCode.NOT_GRANTED, "the grant has ended here already")
        return HeldGrant(grant, MonotonicS(now + left_s))

    def _renew_grant(self, peer: PeerId, message: RenewGrant, now: MonotonicS) -> None:
        session = self.admission.held(message.session, user=peer)
        if session is None or session.grant is None or self._open_grant is None:
            self.counters["grants_unfit"] += 1
            return
        opened = self._open_grant(message.grant)
        if isinstance(opened, Refusal) or not renews(opened[0], session.grant.grant):
            self.counters["grants_unfit"] += 1
            return
        session.grant, session.lease_envelope = HeldGrant(opened[0], MonotonicS(now + opened[1])), None

    def _revoke(self, peer: PeerId, message: RevokeGrant) -> None:
        """Of what is not held, or under another grant, nothing is said."""
        session = self.admission.revoke(message.session, grant=message.grant, source=peer)
        if session is not None:
            self.counters["sessions_revoked"] += 1
            self._forget(session)
        elif not self.admission.knows(peer, message.session):
            self.outputs.drop((peer, message.session))

    def _tell_released(self, over: Over) -> None:
        """Nothing is held under a grant any more, unless a session goes on under it."""
        grant = over.held.grant
        user = PeerId(grant.user)
        if not self.admission.knows(user, over.session):
            self.outputs.drop((user, over.session))
        if self.admission.is_in_force(grant) or grant in self._ended:
            return
        self._ended.add(grant)
        self.counters["grants_released"] += 1
        if self._sign_release is not None:
            message = SessionReleased(over.session, over.epoch, self._sign_release(over))
            self._commands.append(Send(user, message))

    def _refuse(self, peer: PeerId, key: bytes, epoch: int, stage: int, refused: Refused, *, culprit: str = "") -> None:
        self.counters["sessions_refused"] += 1
        message = SessionRefused(key, epoch, stage, refused.code.value, refused.reason, culprit)
        self._commands.append(Send(peer, message))

    def _is_opening(self, session: Session, epoch: int) -> bool:
        """Whether this very session still waits for the next stage of that plan."""
        return self._takes(session, epoch) and session.state is SessionState.OPENING

    def _takes(self, session: Session, epoch: int) -> bool:
        """Whether this very session goes on under that plan."""
        return self.admission.holds(session) and session.plan.epoch == epoch and session.state is not SessionState.KEPT

    # queries and leases

    def _answer(self, peer: PeerId, message: SessionQuery, now: MonotonicS) -> None:
        session = self.admission.held(message.session, user=peer)
        if session is None:
            # The same for what is open and somebody else's.
            reason = "no such session is open here"
            failed = SessionFailed(message.session, message.epoch, message.stage, UNKNOWN_SESSION, reason, "")
            self._commands.append(Send(peer, failed))
            return
        self.admission.asked(session, now=now)
        # A new session is given back when its successor cannot be reached: nothing is promised before that is known.
        is_promised = session.state is not SessionState.OPENING or not session.log.is_untouched
        lease_s, lease = self._lease(session, now) if is_promised else (0.0, b"")
        progress = SessionProgress(
            session.key,
            session.plan.epoch,
            session.stage,
            session.log.next_sequence,
            session.num_done,
            lease_s,
            min(max(self._wait_s(), 0.0), 1e6),
            lease,
            self._standing(session) if session.is_group else None,
            self._handing_on_s(session),
        )
        self._commands.append(Send(peer, progress))

    def _handing_on_s(self, session: Session) -> float:
        """How long what was sent to those behind still takes to get there; the user knows its own line."""
        targets = () if session.is_last else session.parts.targets
        return min(max((self._backlog_s(part.peer) for part in targets), default=0.0), 1e6)

    def _lease(self, session: Session, now: MonotonicS) -> tuple[float, bytes]:
        """For how many seconds the KV is promised, and that promise, signed a little earlier perhaps."""
        lease_s = max(0.0, session.promised_until - now)
        if session.lease_envelope is not None:
            envelope, until = session.lease_envelope
            if until <= session.promised_until < until + LEASE_REUSE_S:
                return lease_s, envelope
        envelope = self._sign_lease(session, lease_s) if lease_s else b""
        session.lease_envelope = (envelope, session.promised_until)
        return lease_s, envelope

    # steps

    def encoding(self, session: Session) -> str:
        """Of the rows that come and go in a session."""
        return session.plan.wire or self._wire_dtype

    def _width(self, session: Session) -> int:
        """Columns of the rows that are computed here."""
        return session.parts.width if session.is_group else self._row_size

    def _receive_step(self, peer: PeerId, message: Step, payload: Payload, now: MonotonicS) -> None:
        session = self.admission.get(message.session, epoch=message.epoch, source=peer)
        if session is None or session.state is SessionState.KEPT:
            # Steps in flight when a session ends or changes its plan are no fault, and a stranger learns nothing from
            # silence.
            self.counters["steps_without_session"] += 1
            return
        problem = self._problem_with(session, message, peer)
        if problem is not None:
            self._blame(session, *problem, culprit=peer, now=now)
        elif len(session.parts.sources) == 1:
            self._receive_entry(session, peer, message, payload, now)
        else:
            self._join(session, peer, message, payload, now)

    def _join(self, session: Session, peer: PeerId, message: Step, payload: Payload, now: MonotonicS) -> None:
        """One of those before the stage has sent its columns of an entry: it goes on when all have."""
        place, num_rows = (message.sequence, message.first_node), message.node_count
        entry = session.joining.get(place)
        if message.sequence + message.covers <= session.next_taken and message.covers:
            self.counters["steps_duplicate"] += 1
            return
        if entry is None:
            if session.num_joining_rows + session.num_queued_rows + num_rows > MAX_QUEUED_ROWS:
                reason = f"more than {MAX_QUEUED_ROWS} rows wait for the rest of their columns, or for the device"
                self._blame(session, "flooded", reason, culprit=peer, now=now)
                return
            entry = session.joining[place] = JoiningEntry(message, now)
            session.num_joining_rows += num_rows
            self._with_joining[session] = None
        if peer in entry.parts:
            self.counters["steps_duplicate"] += 1
            return
        entry.headers[peer] = header_of(message)
        entry.parts[peer] = JoinedPart(peer, message.tensor, payload)
        session.num_joining_bytes += len(payload)
        entry.timings.append(message.timings)
        if len(entry.parts) < len(session.parts.sources):
            self._bound_joining(session, now)
            return
        if not _are_alike(entry):
            self._blame_parts(session, entry, now)
            return
        del session.joining[place]
        session.num_joining_rows -= num_rows
        session.num_joining_bytes -= sum(len(part.payload) for part in entry.parts.values())
        if not session.joining:
            del self._with_joining[session]
        joined = Joined(tuple(entry.parts[source.peer] for source in session.parts.sources))
        whole = msgspec.structs.replace(
            message,
            tensor=TensorMeta(message.tensor.dtype, message.tensor.num_rows, session.parts.width),
            timings=slowest(entry.timings),
        )
        self._receive_entry(session, peer, whole, joined, now)

    def _bound_joining(self, session: Session, now: MonotonicS) -> None:
        """What waits for the rest of its columns may be so much, of one user and of all."""
        waiting = [(each.user == session.user, each.num_joining_bytes) for each in self._with_joining]
        is_much = sum(num_bytes for is_own, num_bytes in waiting if is_own) > MAX_JOINING_BYTES_OF_USER
        if is_much or sum(num_bytes for _, num_bytes in waiting) > MAX_ALL_JOINING_BYTES:
            # Others fill the room, or it is the user who sends so much.
            whose = "your" if is_much else "all"
            reason = f"too many rows of {whose} sessions wait for the rest of their columns"
            self._blame(session, "flooded", reason, culprit="", now=now)

    def _blame_parts(self, session: Session, entry: JoiningEntry, now: MonotonicS) -> None:
        """Parts of one entry differ. Who is alone against several that agree has erred; of others nobody can know."""
        headers = entry.headers
        odd = [
            peer
            for peer, header in headers.items()
            if len(headers) > 2 and _are_equal([other for each, other in headers.items() if each != peer])
        ]
        if len(odd) == 1:
            reason = "columns of a step that is another one than all others have sent"
            self._blame(session, "bad-parts", reason, culprit=odd[0], now=now)
        else:
            reason = "parts of one step that differ, and nobody can know whose is right"
            self._keep(session, "bad-parts", reason, culprit="", now=now, suspects=tuple(headers))

    def _receive_entry(self, session: Session, peer: PeerId, message: Step, payload: Payload, now: MonotonicS) -> None:
        num_rows, waiting = message.node_count, session.num_queued_rows
        if waiting + num_rows > MAX_QUEUED_ROWS:
            # Not the stage before is at fault for what came under an earlier plan, perhaps from another.
            culprit = peer if waiting - session.num_queued_before + num_rows > MAX_QUEUED_ROWS else ""
            reason = f"more than {MAX_QUEUED_ROWS} rows wait for the device"
            self._blame(session, "flooded", reason, culprit=culprit, now=now)
        elif message.sequence + message.covers <= session.next_taken and message.covers:
            self.counters["steps_duplicate"] += 1  # before its rows cost anything
        elif session.is_resumed and _is_early(session, message):
            self._wait_for_earlier(session, message, payload, now)
        else:
            self._take(session, message, payload)
            for place in sorted(session.early):
                if not _is_early(session, session.early[place][0]):
                    self._take(session, *session.early.pop(place))
            if session.early:
                session.early_until = MonotonicS(now + EARLY_S)
            else:
                self._clear_early(session)

    def _take(self, session: Session, message: Step, payload: Payload) -> None:
        session.num_queued_rows += message.node_count
        session.next_taken = max(session.next_taken, message.sequence + message.covers)
        session.last_taken = max(session.last_taken, message.first_node + message.node_count - 1)
        self._commands.append(Take(session, message, payload))

    def _wait_for_earlier(self, session: Session, message: Step, payload: Payload, now: MonotonicS) -> None:
        """In a repair the entries of a session come from several peers, and the order of what they send is chance."""
        place, num_rows = (message.sequence, message.first_node), message.node_count
        if place in session.early:
            self.counters["steps_duplicate"] += 1
        elif session.num_early_rows + num_rows > MAX_EARLY_ROWS:
            reason = "too many rows wait for those that they follow"
            self._blame(session, "flooded", reason, culprit=session.previous, now=now)
        elif not self._has_room_for(session, message):
            # The stage before has sent what it may: others fill the room, or the user does with other sessions.
            reason = "too many rows of all sessions wait for those that they follow"
            self._blame(session, "flooded", reason, culprit="", now=now)
        else:
            self._with_early[session] = None
            session.early[place] = (message, payload)
            if session.early_until is None:
                session.early_until = MonotonicS(now + EARLY_S)

    def _has_room_for(self, session: Session, message: Step) -> bool:
        """Whether more rows can wait for those that they follow."""
        own = sum(each.num_early_rows for each in self._with_early if each.user == session.user)
        return (
            own + message.node_count <= MAX_EARLY_ROWS_OF_USER
            and sum(each.num_early_rows for each in self._with_early) + message.node_count <= MAX_ALL_EARLY_ROWS
            and sum(each.num_early_bytes for each in self._with_early) + message.tensor.num_bytes <= MAX_ALL_EARLY_BYTES
        )

    def _clear_coming(self, session: Session) -> None:
        """What has come and cannot be taken yet is given up."""
        self._clear_early(session)
        self._with_joining.pop(session, None)
        session.clear_joining()

    def _clear_early(self, session: Session) -> None:
        self._with_early.pop(session, None)
        session.early.clear()
        session.early_until = None

    def _problem_with(self, session: Session, message: Step, peer: PeerId) -> tuple[str, str] | None:
        """Code and reason of what is wrong with a header, as far as the log need not be asked."""
        dtype, width = self.encoding(session), session.parts.width_from(peer)
        if message.tensor.row_size != width or message.tensor.dtype != dtype:
            return "bad-shape", f"rows must be {dtype} of {width}"
        if len(message.timings) != session.stage:
            # Every stage adds one. A list that is full already would make the next stage refuse ours as malformed, and
            # close a link on which other users depend.
            return "bad-timings", "a step has one timing per stage behind it"
        if message.stop_stage is not None and not session.stage <= message.stop_stage < len(session.plan.stages):
            return "bad-stop", "a step ends at no stage that is still before it"
        return None

    def _cancel(self, peer: PeerId, message: Cancel) -> None:
        session = self.admission.held(message.session, user=peer)
        if session is None or not self._takes(session, message.epoch):
            self.counters["cancels_late"] += 1
        elif session.is_group:
            # It comes to each member at another time, and all have to compute the same rows.
            self.counters["cancels_unheeded"] += 1
        elif session.log.cancel(message.root) and message.root <= session.log.last_node and session.befores:
            # A root that has not come is about nothing that has.
            self._commands.append(Narrow(session))

    def _note_committed(self, session: Session, rows: StepRows) -> None:
        """Nodes got their positions, of which some rows may be here and others still be computed; others have died."""
        key, generation, log = _output_key(session), session.generation, session.log
        if not rows.commits_all:
            first_position = rows.num_final - len(rows.committed)
            self.outputs.commit(key, first_position, [_name(generation, node) for node in rows.committed])
        self.outputs.prune(key, is_live=lambda name: name >> 32 == generation and log.is_live(name & 0xFFFFFFFF))

    def _retain(self, step: ServedStep, payload: Payload) -> None:
        session, nodes = step.session, step.rows.nodes
        key = _output_key(session)
        if step.is_appended:
            if nodes:
                self.outputs.append(key, step.rows.num_final - len(nodes), len(nodes), payload)
            return
        # The log runs ahead of the device: what has died by now is not kept.
        is_current, log = step.generation == session.generation, session.log
        self.outputs.hold(
            key,
            [_name(step.generation, node) for node in nodes],
            payload,
            is_live=lambda name: is_current and log.is_live(name & 0xFFFFFFFF),
        )

    # repeating

    def _resend(self, peer: PeerId, message: Resend, now: MonotonicS) -> None:
        session = self.admission.held(message.session, user=peer)
        if session is None or not self._takes(session, message.epoch):
            self.counters["steps_without_session"] += 1
            return
        end = message.first_position + message.num_positions
        ends_here = session.is_last or (
            message.stop_stage is not None and not session.stage < message.stop_stage < len(session.plan.stages)
        )
        covers_nonsense = message.covers > message.num_positions or (message.covers == 0 and message.sequence > 0)
        num_bytes = message.num_positions * (row_bytes(self.encoding(session), self._width(session)) or 0)
        if ends_here or covers_nonsense or end > session.plan.max_positions or num_bytes > MAX_PAYLOAD_BYTES:
            self.end(session, "bad-resend", "an order that no stage of this plan can follow", culprit=peer)
        elif message.first_position < session.resent_positions:
            self.end(session, "bad-resend", "positions that were handed on again in this epoch", culprit=peer)
        elif len(session.resends) >= MAX_RESENDS:
            self.end(session, "flooded", f"more than {MAX_RESENDS} orders wait", culprit=peer)
        else:
            session.resent_positions = end
            session.resends.append(message)
            self._serve_resends(session, now)

    def _serve_resends(self, session: Session, now: MonotonicS) -> None:
        """Hands rows on again, as far as they are there and the next stage can take them."""
        key = _output_key(session)
        while session.resends and session.state is SessionState.OPEN and self.admission.holds(session):
            order = session.resends[0]
            if not self.outputs.is_kept(key):
                self._keep(session, NOT_RETAINED, "the rows to send again are gone", culprit="", now=now)
                return
            if order.first_position + order.num_positions > self.outputs.num_positions(key):
                return  # they are being computed, or will be
            if max(map(self._backlog, (target.peer for target in session.parts.targets))) > MAX_BACKLOG_BYTES:
                self._waiting_for_link[session] = None
                if self.retry_at is None:
                    self.retry_at = MonotonicS(now + RETRY_S)
                return
            if not self._may_hand_on_again(session, order.num_positions, now):
                self._keep(session, NOT_RETAINED, "the rows were sent again too often", culprit="", now=now)
                return
            session.resends.popleft()
            self._hand_on_again(session, order)

    def _backlog(self, peer: PeerId) -> int:
        return self._backlog_bytes(peer) + self.unsent_bytes(peer)

    def _may_hand_on_again(self, session: Session, num_rows: int, now: MonotonicS) -> bool:
        """Whether its user has not had that too often; counts it."""
        retained = self.outputs.num_positions(_output_key(session))
        forgiven = retained * (now - session.resent_at) / RESEND_AGAIN_S
        session.resent_rows, session.resent_at = max(0.0, session.resent_rows - forgiven), now
        if session.resent_rows + num_rows > RESEND_TIMES * retained:
            return False
        session.resent_rows += num_rows
        return True

    def _hand_on_again(self, session: Session, order: Resend) -> None:
        first, last = order.first_position + 1, order.first_position + order.num_positions
        self.counters["rows_resent"] += order.num_positions
        step = Step(
            session=session.key,
            epoch=order.epoch,
            sequence=order.sequence,
            first_node=first,
            parent=order.first_position,
            parents=(),
            advance=last,
            want=(last,) if order.want_last else (),
            tensor=TensorMeta(self.encoding(session), order.num_positions, self._width(session)),
            timings=(StageTiming(0, 0),) * (session.stage + 1),
            covers=order.covers,
            stop_stage=order.stop_stage,
        )
        rows = self.outputs.rows(_output_key(session), order.first_position, order.num_positions)
        self._hand_on(session, step, rows, is_repeated=True)

    # ends

    def _blame(self, session: Session, code: str, reason: str, *, culprit: str, now: MonotonicS) -> None:
        """A peer has erred or is gone, or nobody has: the session is kept, unless its user is the one."""
        if culprit == session.user:
            self.end(session, code, reason, culprit=culprit)
        else:
            self._keep(session, code, reason, culprit=culprit, now=now)

    def _keep(
        self,
        session: Session,
        code: str,
        reason: str,
        *,
        culprit: str,
        now: MonotonicS,
        standing: Standing | None = None,
        suspects: tuple[PeerId, ...] = (),
    ) -> None:
        """The session cannot go on under this plan; what is being computed is finished, and kept."""
        if self.admission.holds(session) and session.state is not SessionState.KEPT:
            self.counters["sessions_kept"] += 1
            self._clear_coming(session)
            self._stop_dialling(session)
            self.admission.keep(session, now=now)
            self._tell_failed(session, code, reason, culprit, is_kept=True, standing=standing, suspects=suspects)

    def _over(self, session: Session, code: str, reason: str, culprit: str) -> None:
        self.counters["sessions_failed"] += 1
        self._tell_failed(session, code, reason, culprit, is_kept=False)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        """Nothing of it is left here but what it retains for sessions that begin like it."""
        self.admission.drop(session)
        session.resends.clear()
        self._clear_coming(session)
        self._waiting_for_link.pop(session, None)
        self._stop_dialling(session)
        self._unsent.pop(session, None)
        if not self.admission.knows(session.user, session.key):
            self.outputs.drop(_output_key(session))
        self._commands.append(Forget(session))

    def _tell_failed(
        self,
        session: Session,
        code: str,
        reason: str,
        culprit: str,
        *,
        is_kept: bool,
        standing: Standing | None = None,
        suspects: tuple[PeerId, ...] = (),
    ) -> None:
        epoch, stage = session.plan.epoch, session.stage
        message = SessionFailed(session.key, epoch, stage, code, reason[:500], culprit, is_kept, standing, suspects)
        self._commands.append(Send(session.user, message))


def _apply(session: Session, message: Step, *, only: frozenset[int] | None = None) -> StepRows | Duplicate | StepFault:
    return session.log.apply(
        message.sequence,
        first_node=message.first_node,
        num_rows=message.node_count,
        parent=message.parent,
        parents=message.parents,
        advance=message.advance,
        covers=message.covers,
        live=message.live,
        only=only,
    )


def _problem_with_groups(plan: Plan, row_size: int) -> str | None:
    """Why some stage of a plan cannot be split so."""
    try:
        for stage in range(len(plan.stages)):
            parts_of(plan, stage, 0, row_size)
    except ConfigError as error:
        return str(error)
    return None


def _going_out(
    session: Session, message: Step, rows: StepRows
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Nodes whose rows go back to the user and where those are; None where the rows go to the next stage."""
    if not session.is_last:
        return None, None
    row_of = {node: row for row, node in enumerate(rows.nodes)}
    returned = tuple(node for node in message.want if node in row_of)
    return returned, tuple(row_of[node] for node in returned)


def _remember(session: Session, before: LogState) -> None:
    """That the log can be taken back to before a step, as far as that is bounded; the latest steps count."""
    befores = session.befores
    befores.append(before)
    while len(befores) > MAX_NARROWED_STEPS or sum(map(_num_nodes, befores)) > MAX_NARROWED_NODES:
        befores.popleft()


def _num_nodes(state: LogState) -> int:
    return len(state.live) + len(state.skipped)


def _name(generation: int, node: int) -> int:
    """Of a node for the output log: ids of nodes come again after a fold."""
    return generation << 32 | node


def _is_nothing(name: int) -> bool:
    return False


def _leaves_queue(session: Session, message: Step) -> None:
    session.num_queued_rows -= message.node_count
    if message.epoch < session.plan.epoch:
        session.num_queued_before -= message.node_count


def _are_alike(entry: JoiningEntry) -> bool:
    """Whether what has come of it is of one and the same step."""
    return _are_equal(list(entry.headers.values()))


def _are_equal(headers: Sequence[tuple[object, ...]]) -> bool:
    return all(header == headers[0] for header in headers)


def _parts_until(session: Session) -> MonotonicS:
    """When the oldest entry that has not come from everybody has to be whole."""
    return MonotonicS(next(iter(session.joining.values())).since + PARTS_S)


def _is_early(session: Session, message: Step) -> bool:
    """Whether entries are missing that this one follows, or the prefix on which it hangs."""
    return message.sequence > session.next_taken or (not message.parents and message.parent > session.last_taken)


def _output_key(session: Session) -> tuple[PeerId, bytes]:
    return session.user, session.key
