"""The user's side of one session: what to send to which stage, what may come back, and who cannot go on.

Guarantees: a result is accepted only from the last stage of the plan, for an entry that was sent and not yet answered,
in order, with exactly the rows that were asked for. Every other message of a stage is a fault of that stage; what
others send changes nothing. After a stage was replaced (``replace``), every stage is brought up to the log, and
results of entries that the last one had applied before still count. A session always comes to something: who is
silent, stuck or gone is found out in the time that scheduler.repair_core says.

Assumes: payloads travel beside this core; the shell sends the rows that RowsWanted asks for, in the order of these
events, and keeps the payload of a StepResult until the event for it comes out. Who sees to a Fault calls ``replace``
with a plan of the next epoch, or closes the session.

A session may go over to a token tree: its entries are those of fusion_node.client.speculation_core then, and after a
fault all stages make a plain log of what is committed, with an entry per position, which is brought up to date as that
of any session. What was on its way in the tree is lost by that, but for the row of the last committed position.

States: OPENING (waiting for every stage of an epoch), READY, BROKEN (a stage cannot go on under this plan: nothing is
sent, and results that still come count), CLOSED.
Timers: of scheduler.repair_core.Watch and scheduler.progress_core, the opening deadline, and the renewal of leases, in
seconds of the monotonic clock.

Source: docs/protocol-data-plane.md, "The session log" and "Repair". Still ugly: of a tree that was broken off, rows
that come later are dropped and computed again.

Above 600 lines: opening, steps and faults of a session change the same few things.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fusion_node.client.sent_tree_core import SentTree
from fusion_node.client.speculation_core import Frame
from fusion_node.client.taps_core import SessionTaps
from fusion_node.errors import (
    LocalProtocolError,
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
    NOT_RETAINED,
    PEER_LOST,
    SUCCESSOR_UNREACHABLE,
    AnyMessage,
    Cancel,
    CloseSession,
    OpenSession,
    Replayed,
    Resend,
    SessionClosed,
    SessionDraining,
    SessionFailed,
    SessionOpened,
    SessionProgress,
    SessionQuery,
    SessionRefused,
    StageTiming,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
    row_bytes,
)
from p2p.records import Lease, Plan, Refusal
from scheduler.progress_core import Progress, Questions
from scheduler.repair_core import (
    MAX_BACKLOG_S,
    Cause,
    LogEntry,
    NotRetained,
    Order,
    Orders,
    Recovered,
    StageHas,
    StepTimes,
    Verdict,
    Watch,
    replay_orders,
    rows_per_order,
)

OPEN_DEADLINE_S = 15.0
"""A stage may have to dial its successor first: two handshakes over slow links, and a retry."""

OPEN_PATIENCE_S = 1.0
"""After which stages that have not opened are asked whether they are there."""

IN_FLIGHT_PER_STAGE = 2
MAX_IN_FLIGHT = 12
"""Entries on their way. Two per stage keep all of them busy; 12 of 256 rows are less than a stage lets wait (4,096)."""

MIN_RENEWAL_S = 1.0
"""Between two renewals, however short a lease a stage grants: it must not make this program ask without a pause."""

LOG_FAULTS = frozenset(("stale-node", "unknown-parent", "unknown-advance", "bad-replay", "too-wide"))
"""SessionFailed.code of a stage whose log is another than the user's: it was sent something else before."""

IDLE_RENEW_S = 600.0
"""So long leases are renewed while nobody asks for the next position: a reader may be slow, but not for ever."""


class SessionState(enum.Enum):
    OPENING = "opening"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Opened:
    """Every stage has reserved its KV, or has adopted the plan of a higher epoch.

    Attributes:
        reused_positions: with which the session begins on every stage.
    """

    reused_positions: int = 0
    epoch: int = 0


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
class TreeRowsWanted:
    """The rows of this frame's tokens are to be sent to the first stage: as RowsWanted, and in one order with these."""

    session: bytes
    epoch: int
    frame: Frame

    @property
    def sequence(self) -> int:
        return self.frame.sequence

    @property
    def first_position(self) -> int:
        return self.frame.positions[0]


@dataclass(frozen=True, slots=True)
class StepDone:
    """Positions were computed by every stage.

    Attributes:
        num_computed: so many positions are, from the first.
        has_row: the row of the last of them came back; it is the payload of the message that was received last.
        round_trip_s: None when a stage was replaced meanwhile.
        num_under_way: entries that were under way when it came, itself not counted.
    """

    sequence: int
    num_computed: int
    has_row: bool
    round_trip_s: float | None
    timings: tuple[StageTiming, ...]
    num_under_way: int = 0


@dataclass(frozen=True, slots=True)
class TreeStepDone:
    """Rows of a tree came back: in the payload of the message that was received last.

    Attributes:
        num_computed: positions that every stage has computed and committed.
        rows: nodes and where in the payload their rows are.
        round_trip_s: None of what a plan before the present one asked for.
        num_sent: rows of the frame.
        num_under_way: entries that were under way when it came, itself not counted.
    """

    sequence: int
    num_computed: int
    rows: tuple[tuple[int, int], ...]
    round_trip_s: float | None
    timings: tuple[StageTiming, ...]
    num_sent: int = 0
    num_under_way: int = 0


@dataclass(frozen=True, slots=True)
class Fold:
    """What a session with a tree goes on with under another plan.

    Attributes:
        first_position: of ``nodes``; see SessionCore.fold_from.
        nodes: committed ones that were sent, by position; the last of all.
        is_awaited: the row of the last one has not come.
    """

    first_position: int
    nodes: tuple[int, ...]
    is_awaited: bool

    @property
    def num_positions(self) -> int:
        return self.first_position + len(self.nodes)


@dataclass(frozen=True, slots=True)
class Fault:
    """A stage is to be replaced.

    Attributes:
        accuser: of a fault of the link between two stages, the other one; of GARBAGE, who may have been its cause.
        is_either: the other one may as well be at fault.
    """

    stage: int
    cause: Cause
    error: PeerError
    accuser: int | None = None
    is_either: bool = False


@dataclass(frozen=True, slots=True)
class CannotResume:
    """A stage does not retain what another lacks: everything has to be computed again in another session."""

    stage: int


SessionEvent: TypeAlias = (
    "Opened | RowsWanted | TreeRowsWanted | StepDone | TreeStepDone | Fault | Recovered | CannotResume"
)
SessionMessage = (
    SessionOpened
    | SessionRefused
    | SessionFailed
    | SessionClosed
    | SessionProgress
    | SessionDraining
    | Replayed
    | StepResult
)
"""What a stage may say to the user of a session."""

OpenLease: TypeAlias = "Callable[[bytes], Lease | Refusal]"
"""Checks size, form, signature and dates of a lease."""


BacklogS: TypeAlias = "Callable[[PeerId], float]"
"""How long what was handed to the link of a peer takes until it is there, estimated, in seconds."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Positions of an earlier session over the same stages, with which a new one would like to begin."""

    session: bytes
    num_positions: int


class SessionCore:
    """One session over the stages of ``plan``.

    Args:
        plan: decoded form of ``signed_plan``.
        row_size: hidden size that results must have.
        wire_dtype: encoding that results must have.
        prefix: to ask the stages for.
        round_trips_s: of the user to each stage, as far as it is known.
        times: how long steps take; of an earlier session perhaps.
        open_lease: None: leases are not looked at.
        backlog_s: added to the time that a stage has to answer.
        known_positions: that were sent in an earlier session of the same answer.
        taps: layers whose rows are wanted of some nodes beside; see ``taps``.

    Attributes:
        taps: what has come of them. A stage that sends none is none the worse for it.
        reused_positions: with which the session begins: those of the prefix when every stage has the same number of
            them, else 0.
        replayed_positions: computed again in later epochs, once per stage that did.
        replayed_bytes: of rows that this user sent again, before compression.
        is_proven: a result has come under this plan.
    """

    def __init__(
        self,
        plan: Plan,
        signed_plan: bytes,
        *,
        row_size: int,
        wire_dtype: str,
        prefix: Prefix | None = None,
        round_trips_s: Sequence[float] | None = None,
        times: StepTimes | None = None,
        open_lease: OpenLease | None = None,
        backlog_s: BacklogS = lambda peer: 0.0,
        known_positions: int = 0,
        taps: Sequence[int] = (),
    ) -> None:
        self._backlog_s = backlog_s
        self.taps = SessionTaps(taps, TensorMeta(wire_dtype, 1, row_size))
        self.state = SessionState.OPENING
        self.reused_positions = 0
        self.replayed_positions = 0
        self.replayed_bytes = 0
        self._prefix = prefix or Prefix(b"", 0)
        self._row_size = row_size
        self._wire_dtype = wire_dtype
        self._times = times or StepTimes()
        self._open_lease = open_lease
        self._known_positions = known_positions
        self._log: list[LogEntry] = []
        """Up to where the tree begins, if there is one."""
        self._tree: SentTree | None = None
        self._fold: Fold | None = None
        self._opened_epoch = 0
        """Of the plan that all stages had answered last; see OpenSession.path_epoch."""
        """What the session is going on with, or has gone on with."""
        self._is_renamed = False
        """All stages have folded: nodes have the names that they have now."""
        self._named_at = 0
        """The epoch since which they have those that they had before."""
        self._awaited_as: dict[int, int] = {}
        """What the node was called, by the first epoch of each name, whose row was awaited before a fold and still
        is."""
        self._num_sent = 0
        """Entries that were ever sent."""
        self._num_results = 0
        self._sent_at: dict[int, tuple[MonotonicS, int]] = {}
        """When an entry was sent last, and in which epoch."""
        self._outbox: list[tuple[PeerId, AnyMessage]] = []
        self._events: deque[SessionEvent] = deque()
        self._was_open = False
        self._last_result_at: MonotonicS | None = None
        self._anew: set[PeerId] = set()
        """Who has to begin the session anew under the next plan."""
        self._peers: list[PeerId] = []
        self._begin(plan, signed_plan, round_trips_s or [0.0] * len(plan.stages))

    def _begin(self, plan: Plan, signed_plan: bytes, round_trips_s: Sequence[float]) -> None:
        """What is anew in every epoch."""
        self.plan = plan
        self._signed_plan = signed_plan
        self.taps.begin(plan)
        before = set(self._peers)
        self._peers = [PeerId(stage.peer) for stage in plan.stages]
        self._is_new = [peer not in before for peer in self._peers]
        self._has: list[StageHas | None] = [None] * len(self._peers)
        self._odd: set[int] = set()
        """Stages that have opened with something else than what they were sent."""
        self._offers: set[int] = set()
        self._open_deadline: MonotonicS | None = None
        self._watch = Watch(round_trips_s, lambda stage: self._backlog_s(self._peers[stage]))
        self._progress = Progress(len(self._peers), self._patience_s, lambda: self._backlog_s(self._peers[0]))
        self._questions = Questions(len(self._peers), self._report_patience_s)
        self.is_proven = False
        self._orders = Orders([])
        self._asked: deque[RowsWanted | TreeRowsWanted] = deque()
        self._faults: dict[int, Cause] = {}
        self._accusations: dict[tuple[int, int], PeerError] = {}
        self._doubtful: set[tuple[int, int]] = set()
        """Of the accusations, those that speak as much against the accuser, who has to begin anew in any case."""
        self._lease_s: float | None = None
        self._renewed_at = MonotonicS(0.0)

    @property
    def num_computed(self) -> int:
        """Positions that every stage has computed, reused ones included."""
        if self._tree is not None and self._num_results > len(self._log):
            return self._tree.num_answered_positions
        return self._log[self._num_results - 1].stop if self._num_results else self.reused_positions

    @property
    def num_positions(self) -> int:
        """Where the next entry begins; with a tree, how many are committed by the log."""
        if self._tree is not None:
            return self._tree.num_positions
        return self._log[-1].stop if self._log else self.reused_positions

    @property
    def next_sequence(self) -> int:
        """Of the next entry."""
        return len(self._log) if self._tree is None else self._tree.next_sequence

    @property
    def must_fold(self) -> bool:
        """Whether ``replace`` needs a Fold: there is a tree, or was one."""
        return self._tree is not None or self._fold is not None

    @property
    def owes_row(self) -> bool:
        """Whether the last row that the user has had can be had of it: it was asked for, or a Fold can ask for it."""
        return self.must_fold or not self._log or self._log[-1].want_last

    @property
    def fold_from(self) -> int:
        """From which position on a Fold has to name the committed nodes.

        Whoever has anything of the tree has applied an entry behind the plain part of the log, and what was answered.
        One position more, so that stages can compare what they have committed last.
        """
        stop = 0 if self._tree is None else self._tree.num_answered_positions
        return max(0, max(stop, self._log[-1].stop if self._log else 0) - 1)

    @property
    def waiting_since(self) -> MonotonicS | None:
        """When the oldest entry was sent whose result is awaited."""
        sent = self._sent_at.get(self._num_results)
        return None if sent is None else sent[0]

    def start(self, *, now: MonotonicS) -> None:
        """Asks every stage to reserve."""
        self._open(now, resumes=False)

    def replace(
        self,
        plan: Plan,
        signed_plan: bytes,
        *,
        round_trips_s: Sequence[float],
        now: MonotonicS,
        fold: Fold | None = None,
    ) -> None:
        """Goes on under a plan of a higher epoch, whose stages keep what they have, where they are the same.

        Args:
            fold: if it ``must_fold``. From Opened on, the log is one with an entry per position.
        """
        if fold is not None:
            self._begin_fold(fold, now)
        staying = {stage.peer for stage in plan.stages} - self._anew
        self._anew.clear()
        close = CloseSession(session=self.plan.session, epoch=self.plan.epoch)
        self._outbox.extend((peer, close) for peer in self._peers if peer not in staying)
        self.state = SessionState.OPENING
        self._begin(plan, signed_plan, round_trips_s)
        self._open(now, resumes=True)

    def _begin_fold(self, fold: Fold, now: MonotonicS) -> None:
        """The log is what every stage will have when it has folded; what is missing then is replayed."""
        since, num = self.waiting_since, fold.num_positions
        if num != len(self._log) or self._num_results == num:
            self._awaited_as.clear()  # another row
        if fold.is_awaited:
            self._awaited_as[self._named_at] = fold.nodes[-1]
        else:
            self._awaited_as.clear()
        self._tree, self._fold, self._is_renamed = None, fold, False
        self._log = [LogEntry(p, p, 1, fold.is_awaited and p == num - 1) for p in range(num)]
        self._num_sent, self._num_results = num, num - fold.is_awaited
        self._sent_at = {num - 1: (now if since is None else since, -1)} if fold.is_awaited else {}

    def append_tree(self, frame: Frame, *, now: MonotonicS) -> None:
        """One more entry, of a tree. Without effect while the session is not open: it is grown anew after a repair.

        Raises:
            LocalProtocolError: it does not follow those before it.
        """
        if self.state is not SessionState.READY:
            return
        if self._tree is None:
            self._tree = SentTree(self.num_positions, len(self._log))
        self._tree.add(frame)
        last, num_rows = len(self._peers) - 1, len(frame.tokens)
        order = Order(None, last, frame.sequence, 1, frame.positions[0], num_rows, False, None, is_paced=True)
        self._orders.add(order)
        self._send_orders(now)

    def cancel(self, root: int) -> None:
        """Nodes that neither lead to this committed one nor descend from it need not be computed any more."""
        if self.state is not SessionState.READY or self._tree is None:
            return
        self._tree.keep(root)
        message = Cancel(self.plan.session, self.plan.epoch, root)
        self._outbox.extend((peer, message) for peer in self._peers)

    def append(self, num_positions: int, *, want_last: bool, now: MonotonicS) -> None:
        """One more entry of the log. Its rows are asked for when the stages can take them.

        Args:
            want_last: whether the hidden row of the last position comes back; else the answer has no rows.
        """
        if self.must_fold:
            raise LocalProtocolError("a session with a tree goes on with its tree")
        entry = LogEntry(len(self._log), self.num_positions, num_positions, want_last)
        self._log.append(entry)
        if entry.first_position < self._known_positions:
            self.replayed_positions += num_positions * len(self._peers)
        if self.state is SessionState.READY:
            last = len(self._peers) - 1
            self._orders.add(Order(None, last, entry.sequence, 1, entry.first_position, num_positions, want_last, None))
            self._send_orders(now)

    def rows_ready(
        self, wanted: RowsWanted | TreeRowsWanted, tensor: TensorMeta, *, now: MonotonicS
    ) -> tuple[PeerId, Step] | None:
        """Where to send the rows, and the header before them; None when they are not wanted any more."""
        if self.state is not SessionState.READY or not self._asked or self._asked[0] != wanted:
            return None
        self._asked.popleft()
        if isinstance(wanted, TreeRowsWanted):
            self._sent_at[wanted.sequence] = (now, self.plan.epoch)
            self._num_sent = max(self._num_sent, wanted.sequence + 1)
            self._expect(now)
            return self._peers[0], self._tree_step(wanted.frame, tensor)
        last = wanted.first_position + wanted.num_positions
        # Of a prompt, only what the first token is guessed beyond: the others would be as much to send as the prompt.
        tapped = (last,) if wanted.want_last and wanted.stop_stage is None else ()
        step = Step(
            session=self.plan.session,
            epoch=self.plan.epoch,
            sequence=wanted.sequence,
            first_node=wanted.first_position + 1,
            parent=wanted.first_position,
            parents=(),
            advance=last,
            want=(last,) if wanted.want_last else (),
            tensor=tensor,
            timings=(),
            covers=wanted.covers,
            stop_stage=wanted.stop_stage,
            tap=self.taps.ask(wanted.sequence, wanted.first_position + 1, wanted.num_positions, tapped),
        )
        if wanted.is_replay:
            self.replayed_bytes += tensor.num_bytes
        if wanted.stop_stage is None:
            self._sent_at[wanted.sequence] = (now, self.plan.epoch)
        self._num_sent = max(self._num_sent, wanted.sequence + wanted.covers)
        self._expect(now)
        return self._peers[0], step

    def _tree_step(self, frame: Frame, tensor: TensorMeta) -> Step:
        is_chain = frame.parents[1:] == tuple(range(frame.first_node, frame.first_node + len(frame.parents) - 1))
        return Step(
            session=self.plan.session,
            epoch=self.plan.epoch,
            sequence=frame.sequence,
            first_node=frame.first_node,
            parent=frame.parents[0],
            parents=() if is_chain else frame.parents,
            advance=frame.advance,
            want=frame.want,
            tensor=tensor,
            timings=(),
            tap=self.taps.ask(frame.sequence, frame.first_node, len(frame.tokens), frame.tap),
        )

    def result_unfit(self, error: PeerError, *, now: MonotonicS) -> None:
        """The row that came last cannot be used: its entry is awaited again, from another last stage."""
        if self.state is not SessionState.CLOSED and self._num_results:
            self._num_results -= 1
            self._fault(len(self._peers) - 1, Cause.GARBAGE, error)
            self._follow_watch(now)

    def tree_row_unfit(self, error: PeerError, *, now: MonotonicS) -> None:
        """A row of the tree cannot be used: the next Fold will say that it is awaited."""
        if self.state is not SessionState.CLOSED:
            self._fault(len(self._peers) - 1, Cause.GARBAGE, error)
            self._follow_watch(now)

    def tree_row_unfit_of_other(self) -> bool:
        """The same, where who sent it is the last stage no more.

        Returns:
            Whether another plan is needed for it, of the same stages: a stage computes an entry only once.
        """
        self._anew.add(self._peers[-1])
        if self.state is SessionState.BROKEN:
            return False
        self._break()
        return True

    def result_unfit_of_other(self, *, now: MonotonicS) -> bool:
        """The row that came last cannot be used, and who sent it is the last stage no more: it is awaited again.

        Returns:
            Whether another plan is needed for it, of the same stages: a stage computes an entry only once.
        """
        self._num_results -= 1
        last = len(self._peers) - 1
        has = self._has[last]
        has_entry = not self._is_new[last] if has is None else has.next_sequence > self._num_results
        if self.state is SessionState.OPENING and not has_entry:
            return False
        self._anew.add(self._peers[last])
        if self.state is not SessionState.BROKEN:
            self._break()
            return True
        return False

    def close(self, *, retain: bool = False) -> None:
        """Ends the session on every stage. Nothing is waited for.

        Args:
            retain: ask the stages to keep its KV for a later session with the same beginning.
        """
        if self.state is SessionState.CLOSED:
            return
        retain = retain and self.state is SessionState.READY
        self.state = SessionState.CLOSED
        message = CloseSession(session=self.plan.session, epoch=self.plan.epoch, retain=retain)
        self._outbox.extend((peer, message) for peer in self._peers)
        self._asked.clear()

    # what comes from outside

    def receive(self, message: AnyMessage, *, source: PeerId, now: MonotonicS) -> None:
        """Takes a message of this session.

        Ignored are messages after the end, from peers that are no stage of the plan, and of other epochs, but for
        results and signs of life: who overhears a session's id must not be able to end the session.
        """
        if self.state is SessionState.CLOSED or source not in self._peers:
            return
        if not isinstance(message, SessionMessage) or message.epoch > self.plan.epoch:
            return
        stage = self._peers.index(source)
        if self._is_over(stage):
            return
        is_present = message.epoch == self.plan.epoch
        if isinstance(message, SessionProgress) and is_present:
            self._receive_progress(message, stage, self._questions.reported(stage, now=now), now)
        else:
            self._watch.heard(stage, now=now)
        match message:
            case StepResult():
                self._receive_result(message, stage, now)
            case SessionDraining():
                reason = f"node {short(source)} leaves: {printable(message.reason)}"
                self._fault(stage, Cause.DRAINING, PeerRefused(source, reason))
            case SessionClosed() | SessionProgress():
                pass
            case _ if not is_present:
                pass
            case _ if message.stage != stage:
                self._fault_garbage(stage, f"speaks for another stage in its {type(message).__name__}")
            case SessionOpened():
                self._receive_opened(message, stage, now)
            case Replayed():
                self._receive_replayed(message, stage, now)
            case SessionRefused():
                self._receive_refused(message, stage, now)
            case SessionFailed():
                self._receive_failed(message, stage, now)
        self._follow_watch(now)

    def receive_taps(self, message: StepTaps, rows: Any, *, source: PeerId, now: MonotonicS) -> None:
        """Takes rows of a layer. Ignored are those of earlier plans, and what is ignored of other messages."""
        if self.state is SessionState.CLOSED or source not in self._peers or message.epoch != self.plan.epoch:
            return
        stage = self._peers.index(source)
        if self._is_over(stage):
            return
        self._watch.heard(stage, now=now)
        problem = self.taps.receive(message, rows, stage)
        if problem is not None:
            self._fault_garbage(stage, problem)
        self._follow_watch(now)

    def link_closed(self, source: PeerId, error: PeerError, *, now: MonotonicS) -> None:
        """A link to a stage is gone; so is its KV."""
        if source in self._peers and self.state is not SessionState.CLOSED:
            self._fault(self._peers.index(source), Cause.LOST, error)
            self._follow_watch(now)

    def revoke(self, source: PeerId, error: PeerError, *, now: MonotonicS) -> None:
        """The user has withdrawn what a stage may hold: nothing more goes there, and nothing from there counts."""
        if source in self._peers and self.state is not SessionState.CLOSED:
            self._fault(self._peers.index(source), Cause.REVOKED, error)
            self._follow_watch(now)

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        if self.state is SessionState.CLOSED:
            return None
        due = [self._watch.get_timer(), self._renewal_due()]
        if self.state is SessionState.READY:
            due += [self._progress.get_timer(), self._questions.get_timer()]
        if self.state is SessionState.OPENING:
            due.append(self._open_deadline)
        return min((at for at in due if at is not None), default=None)

    def handle_timer(self, *, now: MonotonicS) -> None:
        """May be called late, never early."""
        if self.state is SessionState.CLOSED:
            return
        renewal = self._renewal_due()
        if renewal is not None and renewal <= now:
            self._renewed_at = now
            self._watch.ask_all(now=now)
        if self.state is SessionState.READY:
            if self._progress.handle_timer(now=now):
                self._watch.ask_all(now=now)
            self._questions.handle_timer(now=now)
        self._watch.handle_timer(now=now)
        self._follow_watch(now)
        if self.state is SessionState.OPENING and self._open_deadline is not None and self._open_deadline <= now:
            stage = next(s for s, has in enumerate(self._has) if has is None and s not in self._odd)
            peer = self._peers[stage]
            error = PeerTimeout(peer, f"node {short(peer)} did not open the session within {OPEN_DEADLINE_S:.0f} s")
            self._fault(stage, Cause.STUCK, error)

    def messages_to_send(self) -> list[tuple[PeerId, AnyMessage]]:
        """Drained, in order."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def next_event(self) -> SessionEvent | None:
        """Drained one by one, in order."""
        return self._events.popleft() if self._events else None

    # opening

    def _open(self, now: MonotonicS, *, resumes: bool) -> None:
        self._open_deadline = MonotonicS(now + OPEN_DEADLINE_S)
        prefix = Prefix(b"", 0) if resumes else self._prefix
        fold = self._fold if resumes else None
        for index, peer in enumerate(self._peers):
            message = OpenSession(
                session=self.plan.session,
                epoch=self.plan.epoch,
                stage=index,
                plan=self._signed_plan,
                prefix=prefix.session,
                prefix_positions=prefix.num_positions,
                resumes=resumes,
                folds=fold is not None,
                path_start=0 if fold is None else fold.first_position,
                path=() if fold is None else fold.nodes,
                path_epoch=0 if fold is None else self._opened_epoch,
                taps=self.taps.of_stage(index),
            )
            self._outbox.append((peer, message))
        self._expect(now)

    def _receive_opened(self, message: SessionOpened, stage: int, now: MonotonicS) -> None:
        if self.state is not SessionState.OPENING or self._has[stage] is not None or stage in self._odd:
            return
        if not self._is_lease_good(message, stage):
            self._fault_garbage(stage, "has signed another lease than was asked for")
            return
        if not self.taps.opened(stage, message.taps):
            self._fault_garbage(stage, "promises rows of layers that it was not asked for")
            return
        has = self._check_opened(message)
        if has is None and self._is_from_nobody(stage):
            self._accuse_of_excess(stage, now)
            return
        if has is None:
            self._odd.add(stage)
        else:
            self._has[stage] = has
            self._offers.add(message.reused_positions)
        self._lease_s = message.lease_s if self._lease_s is None else min(self._lease_s, message.lease_s)
        self._renewed_at = now
        all_have = [each for each in self._has if each is not None]
        if len(all_have) == len(self._has):
            self._all_opened(all_have, now)
        elif len(all_have) + len(self._odd) == len(self._has):
            self._accuse_of_excess(min(self._odd), now)

    def _check_opened(self, message: SessionOpened) -> StageHas | None:
        if message.next_sequence > self._num_sent:
            return None
        if not self._was_open:
            return StageHas() if message.reused_positions <= self._prefix.num_positions else None
        if message.next_sequence:
            positions = self._log[message.next_sequence - 1].stop
            if message.num_positions != positions:
                return None
        else:
            # What a stage had to offer, and the others had not, does not count.
            positions = message.num_positions if message.num_positions <= self._prefix_positions else 0
        return StageHas(message.next_sequence, positions, min(message.retained_positions, positions))

    def _all_opened(self, stages: list[StageHas], now: MonotonicS) -> None:
        self.state = SessionState.READY
        self._open_deadline = None
        self._opened_epoch = self.plan.epoch
        orders: list[Order] | NotRetained
        if self._was_open:
            orders = replay_orders(
                self._log,
                stages,
                num_results=self._num_results,
                prefix_positions=self._prefix_positions,
                chunk_rows=rows_per_order(row_bytes(self._wire_dtype, self._row_size) or 1),
            )
        else:
            self._was_open = True
            # Stages that begin at different positions cannot pass rows on; those that offer some begin at 0 as well.
            self.reused_positions = min(self._offers) if len(self._offers) == 1 else 0
            orders = []
        if self._fold is not None:
            self._is_renamed, self._named_at = True, self.plan.epoch
        if isinstance(orders, NotRetained):
            self.state = SessionState.BROKEN
            self._events.append(CannotResume(orders.stage))
            return
        for order in orders:
            if order.covers == 0 or order.sequence < self._num_sent:
                self.replayed_positions += order.num_positions * (order.last - order.first + 1)
        self._orders = Orders(orders, user_in_flight=min(IN_FLIGHT_PER_STAGE * len(self._peers), MAX_IN_FLIGHT))
        self._events.append(Opened(self.reused_positions, self.plan.epoch))
        self._send_orders(now)

    @property
    def _prefix_positions(self) -> int:
        """Those that belong to no entry of the log."""
        return self.reused_positions if self._fold is None else 0

    # steps

    def _send_orders(self, now: MonotonicS) -> None:
        for order in self._orders.next_ready():
            if self._tree is not None and order.sequence >= len(self._log):
                of_tree = TreeRowsWanted(self.plan.session, self.plan.epoch, self._tree.frame(order.sequence))
                self._asked.append(of_tree)
                self._events.append(of_tree)
            elif order.source is None:
                wanted = RowsWanted(
                    session=self.plan.session,
                    epoch=self.plan.epoch,
                    sequence=order.sequence,
                    covers=order.covers,
                    first_position=order.first_position,
                    num_positions=order.num_positions,
                    want_last=order.want_last,
                    stop_stage=order.stop_stage,
                    is_replay=order.covers == 0
                    or order.sequence < self._num_sent
                    or order.first_position < self._known_positions,
                )
                self._asked.append(wanted)
                self._events.append(wanted)
            else:
                message = Resend(
                    session=self.plan.session,
                    epoch=self.plan.epoch,
                    sequence=order.sequence,
                    covers=order.covers,
                    first_position=order.first_position,
                    num_positions=order.num_positions,
                    want_last=order.want_last,
                    stop_stage=order.stop_stage,
                )
                self._outbox.append((self._peers[order.source], message))
        self._expect(now)

    def _receive_result(self, message: StepResult, stage: int, now: MonotonicS) -> None:
        if stage != len(self._peers) - 1:
            self._fault_garbage(stage, "sent a StepResult, which is not its to send")
            return
        if message.epoch < self.plan.epoch and self._fold is not None:
            self._receive_late(message, stage, now)
            return
        is_due = message.sequence == self._num_results < self._num_sent
        if message.epoch < self.plan.epoch:
            has = self._has[stage]
            if not is_due or (has is not None and has.next_sequence <= message.sequence):
                return  # it is being computed again, or was
        elif not is_due or (self._fold is not None and not self._is_renamed):
            # Before all stages have opened none is told to compute what a fold has left.
            self._fault_answer(stage, "answered a step that is not due")
            return
        if message.sequence >= len(self._log):
            self._receive_tree_result(message, stage, now)
            return
        entry = self._log[message.sequence]
        want = (entry.stop,) if entry.want_last else ()
        expected = TensorMeta(self._wire_dtype, len(want), self._row_size)
        if message.nodes != want:
            self._fault_answer(stage, "returned other rows than it was asked for")
            return
        if message.tensor.uncompressed != expected:
            self._fault_garbage(stage, "returned rows of another form than it was asked for")
            return
        self._num_results += 1
        sent_at, epoch = self._sent_at.pop(message.sequence, (now, -1))
        round_trip_s = now - sent_at if epoch == message.epoch == self.plan.epoch else None
        if round_trip_s is not None:
            self._times.note(entry.num_positions, round_trip_s)
        self._orders.answered(message.sequence)
        if message.epoch == self.plan.epoch:
            self.is_proven = True
            self._times.came_back()
            self._watch.all_applied(self._num_results)
        self._renewed_at = self._last_result_at = now
        done = StepDone(
            message.sequence,
            self.num_computed,
            entry.want_last,
            round_trip_s,
            message.timings,
            len(self._orders.in_flight),
        )
        self._events.append(done)
        self._moved(now)

    def _receive_tree_result(self, message: StepResult, stage: int, now: MonotonicS) -> None:
        """Of the present epoch, and due."""
        tree = self._tree
        if tree is None or not tree.is_answer(message.sequence, message.nodes):
            self._fault_answer(stage, "returned other rows than it was asked for")
            return
        if message.tensor.uncompressed != TensorMeta(self._wire_dtype, len(message.nodes), self._row_size):
            self._fault_garbage(stage, "returned rows of another form than it was asked for")
            return
        num_rows = len(tree.frame(message.sequence).tokens)
        tree.answered()
        self._num_results += 1
        sent_at, _ = self._sent_at.pop(message.sequence)
        self._times.note(num_rows, now - sent_at)
        self._orders.answered(message.sequence)
        self.is_proven = True
        self._watch.all_applied(self._num_results)
        self._renewed_at = self._last_result_at = now
        rows = tuple((node, index) for index, node in enumerate(message.nodes))
        self._events.append(
            TreeStepDone(
                message.sequence,
                self.num_computed,
                rows,
                now - sent_at,
                message.timings,
                num_rows,
                len(self._orders.in_flight),
            )
        )
        self._moved(now)

    def _receive_late(self, message: StepResult, stage: int, now: MonotonicS) -> None:
        """Of a plan before the last fold: it counts if it has the row of the last committed position, and nobody was
        told to compute that again."""
        since = max((epoch for epoch in self._awaited_as if epoch <= message.epoch), default=None)
        node = None if since is None else self._awaited_as[since]
        has, num = self._has[stage], len(self._log)
        if node not in message.nodes or self._num_results == num or (has is not None and has.next_sequence < num):
            return
        if message.tensor.uncompressed != TensorMeta(self._wire_dtype, len(message.nodes), self._row_size):
            self._fault_garbage(stage, "returned rows of another form than it was asked for")
            return
        self._awaited_as.clear()
        self._num_results = num
        self._sent_at.pop(num - 1, None)
        self._renewed_at = self._last_result_at = now
        name = num if self._is_renamed or self._fold is None else self._fold.nodes[-1]
        rows = ((name, message.nodes.index(node)),)
        self._events.append(TreeStepDone(num - 1, self.num_computed, rows, None, message.timings))
        self._moved(now)

    def _receive_replayed(self, message: Replayed, stage: int, now: MonotonicS) -> None:
        if message.num_positions > self.num_positions or message.next_sequence > self._num_sent:
            self._accuse_of_excess(stage, now)
            return
        is_ordered = message.next_sequence <= max(self._orders.stops_before(stage), self._num_results)
        if self.state is SessionState.READY and not is_ordered:
            self._stopped(stage, now)
        elif self._orders.acknowledged(stage, message.num_positions):
            self._moved(now)

    def _stopped(self, stage: int, now: MonotonicS) -> None:
        """An entry ended here that was to go on: by the header that came, or by one that the stage has made up."""
        self._anew.update(self._peers[stage:])
        if stage == 0:
            self._fault_garbage(stage, "stops at what it was to hand on")
            return
        source, culprit = self._peers[stage], self._peers[stage - 1]
        self._doubtful.add((stage, stage - 1))
        text = f"node {short(culprit)} has a step stop at node {short(source)}, going by what that says"
        self._accuse(stage, stage - 1, RemoteProtocolError(culprit, text), now)

    def _moved(self, now: MonotonicS) -> None:
        if self.state is SessionState.READY:
            self._send_orders(now)

    # who cannot go on

    def _receive_progress(
        self, message: SessionProgress, stage: int, asked_at: MonotonicS | None, now: MonotonicS
    ) -> None:
        if message.num_done > message.next_sequence:
            self._fault_garbage(stage, "says that it has computed what has not come to it")
            return
        if message.next_sequence > self._num_sent:
            self._accuse_of_excess(stage, now)
            self._watch.heard(stage, now=now)
            return
        moved = message.next_sequence, message.num_done, message.wait_s
        self._watch.progressed(stage, *moved, now=now, backlog_s=message.backlog_s)
        if asked_at is not None:
            self._progress.reported(stage, *moved, asked_at=asked_at, backlog_s=message.backlog_s)
        if not self._is_lease_good(message, stage):
            self._fault_garbage(stage, "has signed another lease than was asked for")

    def _receive_refused(self, message: SessionRefused, stage: int, now: MonotonicS) -> None:
        """Who is to be left out of the next plan: mostly who refuses, but not for a neighbour that it cannot reach."""
        source, reason = self._peers[stage], printable(message.reason)
        if message.code == SUCCESSOR_UNREACHABLE and stage + 1 < len(self._peers):
            successor = self._peers[stage + 1]
            text = f"node {short(source)} cannot reach node {short(successor)}: {reason}"
            self._accuse(stage, stage + 1, PeerUnreachable(successor, text), now)
        else:
            self._fault(stage, Cause.REFUSED, PeerRefused(source, f"node {short(source)} refuses: {reason}"))

    def _receive_failed(self, message: SessionFailed, stage: int, now: MonotonicS) -> None:
        """A stage may name a neighbour as the cause; it may lie, so both names are in the error.

        That rows are gone is believed of whom they were asked: everything is computed again for it.
        """
        source, reason = self._peers[stage], printable(message.reason)
        is_source = any(order.source == stage for order in self._orders.in_flight)
        if message.code == NOT_RETAINED and message.is_kept and is_source:
            if self.state is not SessionState.BROKEN:  # else it is being seen to already
                self.state = SessionState.BROKEN
                self._events.append(CannotResume(stage))
        elif message.culprit in self._peers and message.culprit != source:
            accused = self._peers.index(PeerId(message.culprit))
            culprit = self._peers[accused]
            error: PeerError
            if message.code == PEER_LOST:
                error = PeerClosed(culprit, f"node {short(culprit)} is gone, says node {short(source)}: {reason}")
            else:
                text = f"node {short(culprit)} erred, says node {short(source)}: {reason}"
                error = RemoteProtocolError(culprit, text)
            if message.code in LOG_FAULTS and accused == stage - 1:
                self._anew.update(self._peers[stage:])
                self._doubtful.add((stage, accused))
            self._accuse(stage, accused, error, now)
        elif self.state is SessionState.BROKEN and not message.culprit and self._is_accuser(stage):
            pass  # a place that it could not open it has given back, and says so when it is asked
        else:
            error = PeerRefused(source, f"node {short(source)} ended the session: {reason}")
            self._fault(stage, Cause.REFUSED, error)

    def _is_accuser(self, stage: int) -> bool:
        return any(accuser == stage for accuser, _ in self._accusations)

    def _accuse(self, accuser: int, accused: int, error: PeerError, now: MonotonicS) -> None:
        """Nothing goes on between the two; who of them is at fault shows when both are asked."""
        self._accusations[accuser, accused] = error
        self._break()
        self._watch.accuse(accuser, accused, now=now)

    def _accuse_of_excess(self, stage: int, now: MonotonicS) -> None:
        """A stage has more than this user has sent: the one before it has made it up, unless that has it as well.

        What comes behind has it too, perhaps, and begins anew.
        """
        self._anew.update(self._peers[stage:])
        if self._is_from_nobody(stage):
            self._fault_garbage(stage, "says that it has what it was never sent, or reuses more than it was asked for")
            return
        source, culprit = self._peers[stage], self._peers[stage - 1]
        self._watch.withdraw(stage + 1, stage)
        self._doubtful.add((stage, stage - 1))
        text = f"node {short(culprit)} hands on what it was not sent, going by what node {short(source)} has"
        self._accuse(stage, stage - 1, RemoteProtocolError(culprit, text), now)

    def _is_from_nobody(self, stage: int) -> bool:
        """Nobody who is there now can have sent a stage what it has: whoever did can be asked no more."""
        return stage == 0 or (self.state is SessionState.OPENING and self._is_new[stage - 1])

    def _break(self) -> None:
        self.state = SessionState.BROKEN
        self._asked.clear()
        self._watch.expect_nothing()

    def _fault_garbage(self, stage: int, text: str) -> None:
        peer = self._peers[stage]
        self._fault(stage, Cause.GARBAGE, RemoteProtocolError(peer, f"node {short(peer)} {text}"))

    def _fault_answer(self, stage: int, text: str) -> None:
        """The last stage answers what this user has not asked: of itself, or because the one before it has asked."""
        peer = self._peers[stage]
        error = RemoteProtocolError(peer, f"node {short(peer)} {text}")
        self._fault(stage, Cause.GARBAGE, error, stage - 1 if stage else None)

    def _fault(
        self, stage: int, cause: Cause, error: PeerError, accuser: int | None = None, *, is_either: bool = False
    ) -> None:
        """Told once per stage, and once more when one that might have gone on cannot, or must not."""
        before = self._faults.get(stage)
        is_withdrawn = cause is Cause.REVOKED and before is not Cause.REVOKED
        if before is not None and (cause.is_soft or not before.is_soft) and not is_withdrawn:
            return
        self._faults[stage] = cause
        if not cause.is_soft:
            self._watch.gone(stage)
            self._break()
        self._events.append(Fault(stage, cause, error, accuser, is_either))

    def _is_over(self, stage: int) -> bool:
        cause = self._faults.get(stage)
        return cause is not None and not cause.is_soft and cause is not Cause.PAIR

    def _follow_watch(self, now: MonotonicS) -> None:
        for found in self._watch.found():
            if isinstance(found, Recovered):
                self._questions.excused(found.stage, now=now)
                # Where nothing goes on anyway, something else is wrong as well, which may have been put down to it.
                if self._faults.get(found.stage) is Cause.SILENT and self.state is not SessionState.BROKEN:
                    del self._faults[found.stage]
                    self._events.append(found)
            elif found.cause is Cause.SILENT:
                self._fault(found.stage, Cause.SILENT, self._timeout_error(found.stage, "does not answer"))
            elif found.accuser is not None and (found.accuser, found.stage) in self._accusations:
                pair = (found.accuser, found.stage)
                error, is_either = self._accusations[pair], pair in self._doubtful
                self._fault(found.stage, Cause.PAIR, error, found.accuser, is_either=is_either)
            elif self.state is SessionState.READY:
                self._fault_stuck(found)
        if self.state is SessionState.READY:
            self._progress.under_way(self._sent_orders(), now=now)
            verdict = self._progress.verdict()
            mute = self._without_report(self._questions.mute())
            if mute is not None and self._sent_orders():
                self._fault_stuck(Verdict(mute, Cause.STUCK))
            elif verdict is not None:
                self._fault_stuck(verdict)
        for stage in self._watch.to_ask():
            message = SessionQuery(session=self.plan.session, epoch=self.plan.epoch, stage=stage)
            self._questions.asked(stage, now=now)
            self._outbox.append((self._peers[stage], message))

    def _fault_stuck(self, verdict: Verdict) -> None:
        """Who does not report goes first: what others are judged by includes its word."""
        late = self._without_report(self._questions.late())
        if late is not None:
            verdict = Verdict(late, Cause.STUCK)
        self._times.gave_up()
        text = "computes nothing" if verdict.cause is Cause.STUCK else "is not reached by the node before it"
        error = self._timeout_error(verdict.stage, text)
        self._fault(verdict.stage, verdict.cause, error, verdict.accuser, is_either=verdict.accuser is not None)

    def _without_report(self, stages: Sequence[int]) -> int | None:
        """The first of them that is not known to be silent: who answers nothing at all may be waited for."""
        return next((stage for stage in stages if stage not in self._faults), None)

    def _report_patience_s(self, stage: int) -> float:
        backlog_s = min(max(0.0, self._backlog_s(self._peers[stage])), MAX_BACKLOG_S)
        return self._patience_s(1) + backlog_s

    def _patience_s(self, num_rows: int) -> float:
        return self._times.patience_s(num_rows, is_proven=self.is_proven)

    def _sent_orders(self) -> list[Order]:
        """Those in flight that do not wait for rows of this user's own."""
        wanted = {(each.sequence, each.first_position) for each in self._asked}
        return [
            order
            for order in self._orders.in_flight
            if order.source is not None or (order.sequence, order.first_position) not in wanted
        ]

    def _timeout_error(self, stage: int, text: str) -> PeerTimeout:
        peer = self._peers[stage]
        return PeerTimeout(peer, f"node {short(peer)} {text}")

    def _expect(self, now: MonotonicS) -> None:
        """Something has moved, or is awaited from now on."""
        if self.state is SessionState.OPENING:
            self._watch.expect(OPEN_PATIENCE_S, now=now)
        elif self.state is SessionState.READY:
            under_way = self._orders.in_flight
            if len(under_way) > len(self._asked) or self._num_results < self._num_sent:
                rows = max((order.num_positions for order in under_way), default=1)
                self._watch.expect(self._times.timeout_s(rows), now=now, patience_s=self._patience_s(rows))
                self._progress.under_way(self._sent_orders(), now=now)
            else:
                self._watch.expect_nothing()

    # leases

    def _is_lease_good(self, message: SessionOpened | SessionProgress, stage: int) -> bool:
        if self._open_lease is None or (not message.lease and not message.lease_s):
            return True  # nothing is promised any more
        place = self.plan.stages[stage]
        if place.members:
            return True  # fusion_node.client.groups_core has looked at each member's
        lease = self._open_lease(message.lease)
        return (
            isinstance(lease, Lease)
            and (lease.node, lease.user, lease.session) == (place.peer, self.plan.user, self.plan.session)
            and (lease.epoch, lease.start, lease.stop) == (self.plan.epoch, place.start, place.stop)
            and lease.num_positions >= self.plan.max_positions
        )

    def _renewal_due(self) -> MonotonicS | None:
        """Steps renew leases; while none are sent, asking does."""
        if self._lease_s is None or not self._lease_s:
            return None
        since = self._renewed_at if self._last_result_at is None else self._last_result_at
        if self.state is SessionState.READY and self._renewed_at - since > IDLE_RENEW_S:
            return None
        return MonotonicS(self._renewed_at + max(self._lease_s / 2, MIN_RENEWAL_S))
