"""Fusion groups as the user's session sees them: each is one peer, and what its members say becomes what it says.

A stage may be a group of nodes that hold slices of the same layers (docs/protocol-data-plane.md, "Groups"). SessionCore
and AnswerCore know nothing of that: to them a group is a node whose id is ``group_id`` of its members. This core stands
between them and the links: what goes to a group goes to its members, rows cut by columns; and what members say comes
out as one message of the group when all of them have said the same, or as its failure when one of them does not.

Guarantees: whatever the order in which members' messages come, the session is told the same. Of a member that lies,
differs from the others, breaks off or is lost, the group fails, and ``at_fault`` names the member; of one that keeps
silent nothing is told, so that the session's own timers run, and ``at_fault`` names it when they have. A member that
waits for others too long is asked about nobody: all are asked how far they are, and fusion_node.client.suspicion_core
says from that who holds them up, or of whom nobody can know. Nothing that was not asked for is kept, but MAX_UNASKED
results where steps come from other nodes, which may have asked.

Assumes: ``begin`` is called with every plan before its messages are handed to ``outgoing``; who sent a message is
proven; what one member sends comes in order. Payloads are plain encodings of numbers (the plan's ``wire`` is empty).

States of a group: opening (answers to ``open`` are gathered; once again where members have different parts of the
session, which then begins empty), open, failed (until the next plan only more guilt is noted). Timer: INQUIRY_S from
when a member has waited too long, in which the others say how far they are; seconds of the monotonic clock.

Source: docs/protocol-data-plane.md, "Groups". Still ugly: of a group in which all answer and nothing moves, and none
says how far it is, whoever has computed less is taken for who holds up the others; then other groups are tried, at last
without those that were in several which failed like that.

Above 600 lines: opening, questions, results and guilt of a group are about the same members at the same time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from fusion_node.client.suspicion_core import Contradictions, judge
from fusion_node.errors import LocalProtocolError, PeerError
from fusion_node.mask_keys import mask_keys
from fusion_node.slices import split_columns
from fusion_node.types import MonotonicS, PeerId, is_group, members_of
from fusion_node.wire import WireError, printable
from p2p.identity import short
from p2p.messages import (
    DTYPE_BYTES,
    MEMBER_UNREACHABLE,
    NOT_RETAINED,
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
    Standing,
    Step,
    StepResult,
    StepTaps,
    TensorMeta,
)
from p2p.records import Lease, Plan, PlanStage, Refusal

MAX_UNASKED = 4
"""Results of one group that wait for the parts of other members, where the user itself has sent no such step."""

MAX_EXPECTED = 4096
"""Entries of the log whose result is awaited: more than nodes of a tree may be neither committed nor dead (1,024)."""

MAX_QUESTIONS = 64
"""That are not answered yet. Silence has long had its consequences by then."""

MAX_KNOWN = 256
"""Groups and blame that are remembered: an answer is repaired some times, and alternates are looked for as long."""

INQUIRY_S = 2.0
"""So long the members of a group of which one has waited too long have to say how far they are: several round trips."""

SILENT_S = 0.4
"""A question that has not been answered for so long speaks against who did not. After MIN_PROBE_S (0.5 s, of
scheduler.repair_core) a stage counts as silent; timers of a busy machine differ by less than the rest."""

LATE_PARTIALS = "late-partials"
"""Code with which a member says that it has waited for others too long."""

OF_NOBODY = frozenset({LATE_PARTIALS, "late-parts", "overflow", "flooded"})
"""Codes with which a member that is not at fault says that it knows of nobody who is."""

MAX_PARTNERS = 2
"""Of its group that a member accuses, before it is doubted itself; as scheduler.repair_core has it for stages. And
groups that a member was in when they failed, nobody knew because of whom."""

OpenLease: TypeAlias = "Callable[[bytes], Lease | Refusal]"
Decompress: TypeAlias = "Callable[[memoryview, TensorMeta], memoryview]"
"""Raises WireError for what is no compressed tensor of that form."""

IssueGrant: TypeAlias = "Callable[[PlanStage, int, OpenSession], bytes]"
"""From a group's stage, a member's place in it and the ``open`` that it is about to be sent to its signed grant."""

Rows: TypeAlias = "tuple[TensorMeta, memoryview]"
E = TypeVar("E", bound=PeerError)


@dataclass(frozen=True, slots=True)
class Said:
    """What is to be handed to the session as coming from ``source``.

    Attributes:
        payload: of a result: whole rows.
    """

    source: PeerId
    message: AnyMessage
    payload: memoryview = field(default_factory=lambda: memoryview(b""), repr=False)


@dataclass(slots=True)
class _Part:
    """A member's part of a result."""

    message: StepResult
    payload: memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Question:
    """Attributes:
    is_ours: the session has not asked.
    """

    asked_at: MonotonicS
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class _Inquiry:
    """Why a group goes on no more, which its session is told when all members have said how far they are, or at
    ``until``."""

    message: SessionFailed
    until: MonotonicS


@dataclass(slots=True)
class _Member:
    """What is known of one member under the present plan.

    Attributes:
        columns: of the hidden state that it holds.
        questions: those that it has not answered yet.
        answers: to questions of the session that others have not answered yet.
        last_result: epoch and sequence of the last that it sent.
        standing: how far it was when it last said so.
        is_heard: it has said so since the inquiry into its group began.
    """

    peer: PeerId
    columns: range
    opened: SessionOpened | None = None
    questions: deque[_Question] = field(default_factory=lambda: deque(maxlen=MAX_QUESTIONS))
    answers: deque[SessionProgress] = field(default_factory=deque)
    replayed: Replayed | None = None
    last_result: tuple[int, int] = (-1, -1)
    num_done: int = -1
    standing: Standing | None = None
    is_heard: bool = False


class _Group:
    """One group under the present plan."""

    def __init__(self, place: PlanStage, stage: int, columns: Sequence[range]) -> None:
        self.peer = PeerId(place.peer)
        self.place = place
        self.stage = stage
        self.members = [_Member(PeerId(m.peer), c) for m, c in zip(place.members, columns, strict=True)]
        self.open: OpenSession | None = None
        self.is_anew = False
        """Members that had different parts of the session were told to begin anew."""
        self.is_open = False
        self.has_failed = False
        self.num_replayed = -1
        self.parts: dict[tuple[int, int], dict[int, _Part]] = {}
        """Of results, by epoch and sequence, by member."""
        self.guilty: dict[PeerId, None] = {}
        self.leaving: dict[PeerId, None] = {}
        self.suspects: dict[PeerId, None] = {}
        """Of a fault between two stages, who has accused the other, or was accused."""
        self.inquiry: _Inquiry | None = None
        self.accusations: dict[frozenset[PeerId], None] = {}
        """Who waits for whom, by the word of members that do not say how far they are."""
        self.is_unsure = False
        """Of those that ``at_fault`` has named last, nobody knows who it is."""

    def index(self, peer: PeerId) -> int:
        return next(k for k, member in enumerate(self.members) if member.peer == peer)


class Groups:
    """The groups of one answer.

    Args:
        hidden_size: of whole rows.
        wire_dtype: encoding of rows.
        decompress: see Decompress.
        open_lease: see SessionCore; None: leases are not looked at.
        grant: see IssueGrant; None: members are sent none.
        on_closed: is told of every session that a member is told to close and not to keep.
        on_refused: is told of every session that a member has not opened at all.
        mask_secret: of this answer, from which keys of masks are derived where a plan has masks.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        wire_dtype: str,
        decompress: Decompress,
        open_lease: OpenLease | None = None,
        grant: IssueGrant | None = None,
        on_closed: Callable[[bytes, PeerId], None] = lambda session, member: None,
        on_refused: Callable[[bytes, PeerId], None] = lambda session, member: None,
        mask_secret: bytes = b"",
    ) -> None:
        self._mask_secret = mask_secret
        self._hidden_size = hidden_size
        self._wire_dtype = wire_dtype
        self._decompress = decompress
        self._open_lease = open_lease
        self._grant = grant
        self._on_closed = on_closed
        self._on_refused = on_refused
        self._plan: Plan | None = None
        self._by_id: dict[PeerId, _Group] = {}
        self._of_member: dict[PeerId, _Group] = {}
        self._expected: dict[tuple[int, int], tuple[int, ...]] = {}
        """Nodes whose rows the last stage is to return, by epoch and sequence of the step."""
        self._known: OrderedDict[PeerId, None] = OrderedDict()
        """Groups that were ever named to this core, the latest last."""
        self._remembered: OrderedDict[PeerId, frozenset[PeerId]] = OrderedDict()
        """Who was at fault in groups of earlier plans."""
        self._partners: dict[PeerId, set[PeerId]] = {}
        """By member, whom of its groups it has accused, in the whole answer."""
        self._unsure: dict[PeerId, set[PeerId]] = {}
        """By member, its groups that have failed without anybody having been found guilty for sure."""
        self._contradictions = Contradictions()
        """Of the whole answer."""
        self._num_openings = 0
        """Of groups in the whole answer: masks have new keys with each."""
        self._asking: list[tuple[PeerId, AnyMessage]] = []

    @property
    def are_masked(self) -> bool:
        """Plans of this answer have masks."""
        return bool(self._mask_secret)

    @property
    def are_used(self) -> bool:
        """The present plan has a group: then all messages have to pass through here."""
        return bool(self._by_id)

    def begin(self, plan: Plan) -> None:
        """Another plan is in force.

        Args:
            plan: whose groups have ids of groups for ``peer``.
        """
        before, last, self._plan = self._by_id, self._plan, plan
        goes_on = last is not None and last.session == plan.session
        if last is None or not goes_on or last.stages[-1].peer != plan.stages[-1].peer:
            self._expected.clear()
        for each in before.values():
            if each.guilty:
                self._remember(each.peer, frozenset(each.guilty))
        self._by_id, self._of_member = {}, {}
        for stage, place in enumerate(plan.stages):
            if not place.members:
                continue
            group = _Group(place, stage, split_columns(self._hidden_size, place.weights))
            old = before.get(group.peer)
            if old is not None and goes_on:
                # What it had computed it still sends, under the epoch of the step.
                group.parts = old.parts
                for member, was in zip(group.members, old.members, strict=True):
                    member.last_result = was.last_result
            self._remembered.pop(group.peer, None)
            self._by_id[group.peer] = group
            self._of_member.update((member.peer, group) for member in group.members)
            self.know(group.peer)

    def know(self, peer: PeerId) -> None:
        """A node or group that may come into the plan: ``groups_of`` finds it by its members from now on."""
        if is_group(peer):
            self._known[peer] = None
            self._known.move_to_end(peer)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def groups_of(self, member: PeerId) -> list[PeerId]:
        """The groups that a peer is a member of, as far as they are known."""
        return [peer for peer in self._known if member in members_of(peer)]

    # what goes out

    def outgoing(self, peer: PeerId, message: AnyMessage, *, now: MonotonicS) -> list[tuple[PeerId, AnyMessage]]:
        """To whom a message for a node or a group really goes. For rows see ``steps``."""
        if isinstance(message, Cancel) and self.are_used:
            return []  # members compute the same rows, whatever comes sooner to one than to the other
        if isinstance(message, Resend):
            self._expect(message)
        if not is_group(peer):
            return [(peer, message)]
        group = self._by_id.get(peer)
        if group is not None and isinstance(message, OpenSession):
            group.open = message
            return self._opening(group, message)
        if group is not None and isinstance(message, SessionQuery):
            for member in group.members:
                member.questions.append(_Question(now))
        if isinstance(message, CloseSession) and not message.retain:
            for member_id in members_of(peer):
                self._on_closed(message.session, member_id)
        return [
            (member, self._to_member(group, message, index) if isinstance(message, OpenSession) else message)
            for index, member in enumerate(members_of(peer))
        ]

    def _opening(self, group: _Group, message: OpenSession) -> list[tuple[PeerId, AnyMessage]]:
        """An ``open`` for each member of a group that has not answered one, with new keys where there are masks."""
        openings = {
            index: self._to_member(group, message, index)
            for index, member in enumerate(group.members)
            if member.opened is None
        }
        if self._present.masks:
            openings = {
                index: msgspec.structs.replace(
                    opening,
                    mask_keys=mask_keys(
                        self._mask_secret,
                        session=message.session,
                        epoch=message.epoch,
                        opening=self._num_openings,
                        stage=group.stage,
                        num_members=len(group.members),
                        member=index,
                    ),
                )
                for index, opening in openings.items()
            }
            self._num_openings += 1
        return [(group.members[index].peer, opening) for index, opening in openings.items()]

    def cut(self, peer: PeerId, tensor: TensorMeta, payload: memoryview) -> list[Rows]:
        """Rows for a node or a group, as parts for each of its members; on any thread.

        Args:
            tensor: of whole rows, not compressed.
        """
        group = self._by_id.get(peer)
        if group is None:
            return [(tensor, payload)]
        return cut_columns(tensor, payload, [member.columns for member in group.members])

    def steps(self, peer: PeerId, step: Step, parts: Sequence[Rows]) -> list[tuple[PeerId, Step, memoryview]]:
        """To whom a step goes, with what.

        Args:
            parts: as ``cut`` makes them, each compressed or not.
        """
        self._expect(step)
        return [
            (member, msgspec.structs.replace(step, tensor=tensor), payload)
            for member, (tensor, payload) in zip(members_of(peer), parts, strict=True)
        ]

    # what comes in

    def receive(self, source: PeerId, message: AnyMessage, payload: memoryview, *, now: MonotonicS) -> list[Said]:
        """What the session is to be told when this has come. Mostly nothing or one thing."""
        group, plan = self._of_member.get(source), self._plan
        if group is None or plan is None:
            return [Said(source, self._with_culprit(message, source), payload)]
        epoch = getattr(message, "epoch", None)
        if getattr(message, "session", None) != plan.session or epoch is None or epoch > plan.epoch:
            return []
        index = group.index(source)
        if group.has_failed:
            if isinstance(message, SessionFailed) and epoch == plan.epoch:
                if _is_late(message):
                    self._note_standing(group, index, message)
                elif not _is_of_nobody(message):
                    self._note_failure(group, source, PeerId(message.culprit))
            return []
        match message:
            case StepResult():
                return self._receive_result(group, index, message, payload)
            case SessionProgress():
                # One of an earlier plan answers a question of that plan, and none of those that are open.
                return self._receive_progress(group, index, message) if epoch == plan.epoch else []
            case SessionDraining() if epoch == plan.epoch:
                group.leaving[source] = None
                reason = self._reason(source, message.reason)
                return [Said(group.peer, msgspec.structs.replace(message, reason=reason))]
            case SessionClosed() | StepTaps():
                return []
            case _ if epoch != plan.epoch:
                return []
            case SessionOpened():
                return self._receive_opened(group, index, message, now)
            case Replayed():
                return self._receive_replayed(group, index, message)
            case SessionRefused() | SessionFailed() if message.stage != group.stage:
                return self._fail(group, index, f"speaks for another stage in its {type(message).__name__}")
            case SessionRefused():
                return self._receive_refused(group, source, message)
            case SessionFailed() if _is_late(message):
                return self._receive_late(group, index, message, now)
            case SessionFailed():
                return self._receive_failed(group, index, message)
            case _:
                return []

    def get_timer(self) -> MonotonicS | None:
        """When handle_timer is due."""
        return min((each.inquiry.until for each in self._by_id.values() if each.inquiry is not None), default=None)

    def handle_timer(self, *, now: MonotonicS) -> list[Said]:
        """What the session is to be told now. May be called early without effect."""
        return [
            said
            for group in self._by_id.values()
            if group.inquiry is not None and group.inquiry.until <= now
            for said in self._concluded(group)
        ]

    def outbox(self) -> list[tuple[PeerId, AnyMessage]]:
        """What this core itself has to say to members, drained."""
        found, self._asking = self._asking, []
        for group in self._by_id.values():
            if group.is_anew and not (group.is_open or group.guilty) and group.open is not None:
                opening, group.open = group.open, None
                close = CloseSession(session=opening.session, epoch=opening.epoch)
                for peer, message in self._opening(group, opening):
                    found += [(peer, close), (peer, message)]
        return found

    def lost(self, member: PeerId) -> None:
        """The link to a peer is gone. The session is told by whoever calls, of each of ``groups_of``."""
        group = self._of_member.get(member)
        if group is not None:
            group.guilty[member] = None
        for partners in self._partners.values():
            partners.discard(member)  # who said so was right

    # who is at fault

    def at_fault(self, peer: PeerId, *, now: MonotonicS) -> frozenset[PeerId]:
        """Whom to avoid for a fault of this peer: of a group the members that are known to be its cause, or else the
        group as a whole."""
        if not is_group(peer):
            return frozenset((peer,))
        group = self._by_id.get(peer)
        found = self._remembered.get(peer, frozenset())
        if group is not None:
            found |= self._blamed(group, now)
            found |= self._doubted(group, now)
        if not found:
            return frozenset((peer,))
        self._remember(peer, found)
        return found

    def named(self, error: E, *, now: MonotonicS) -> list[PeerError]:
        """An error about a group as errors about its members that are at fault; any other as it is."""
        culprits = self.at_fault(PeerId(error.peer), now=now)
        if culprits == {error.peer}:
            return [error]
        group = self._by_id.get(PeerId(error.peer))
        is_unsure = len(culprits) > 1 and group is not None and group.is_unsure
        return [_about(error, culprit, culprits if is_unsure else ()) for culprit in sorted(culprits)]

    @property
    def convicted(self) -> frozenset[PeerId]:
        """Who has contradicted so many different members, in the whole answer, that it must be the one at fault."""
        return self._contradictions.convicted

    # inside

    def _to_member(self, group: _Group | None, message: OpenSession, index: int) -> OpenSession:
        """With a grant of its own each time: one that has ended there does not open anything."""
        grant = b"" if group is None or self._grant is None else self._grant(group.place, index, message)
        return msgspec.structs.replace(message, member=index, taps=(), grant=grant)

    def _remember(self, peer: PeerId, culprits: frozenset[PeerId]) -> None:
        self._remembered[peer] = culprits
        if len(self._remembered) > MAX_KNOWN:
            self._remembered.popitem(last=False)

    def _expect(self, message: Step | Resend) -> None:
        """The last stage is going to answer it with these rows."""
        plan = self._plan
        if plan is None or message.stop_stage is not None or PeerId(plan.stages[-1].peer) not in self._by_id:
            return
        if isinstance(message, Step):
            want = message.want
        else:
            want = (message.first_position + message.num_positions,) if message.want_last else ()
        self._expected[message.epoch, message.sequence] = want
        while len(self._expected) > MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]

    def _with_culprit(self, message: AnyMessage, source: PeerId) -> AnyMessage:
        """A failure whose culprit is a member of a group is a fault of that group, to the session."""
        if not isinstance(message, SessionFailed):
            return message
        accused = self._accused(message)
        if accused is None:
            return msgspec.structs.replace(message, suspects=())
        if message.culprit:
            self._suspect(source, PeerId(message.culprit))
        else:
            suspects = frozenset(map(PeerId, message.suspects))
            self._suspect(source, *sorted(suspects))
            self._contradictions.add(suspects | {source})
        return msgspec.structs.replace(message, culprit=accused.peer, suspects=())

    def _accused(self, message: SessionFailed) -> _Group | None:
        """The group whose member is the culprit, or whose members are those of whom one is."""
        named = [message.culprit] if message.culprit else list(message.suspects)
        groups = {self._of_member.get(PeerId(each)) for each in named}
        return groups.pop() if len(groups) == 1 else None

    def _reason(self, member: PeerId, reason: str) -> str:
        return f"member {short(member)}: {printable(reason)}"[:512]

    def _receive_refused(self, group: _Group, source: PeerId, message: SessionRefused) -> list[Said]:
        has_opened = group.members[group.index(source)].opened is not None
        if message.code not in (SUCCESSOR_UNREACHABLE, MEMBER_UNREACHABLE) and not has_opened:
            self._on_refused(message.session, source)
        if message.code == SUCCESSOR_UNREACHABLE and group.stage + 1 < len(self._present.stages):
            self._suspect(source, PeerId(message.culprit))  # one of the two, and the session finds out
        else:
            self._note_failure(group, source, PeerId(message.culprit))
            group.has_failed = True
        return [Said(group.peer, msgspec.structs.replace(message, reason=self._reason(source, message.reason)))]

    def _suspect(self, *peers: PeerId) -> None:
        for peer in peers:
            if peer in self._of_member:
                self._of_member[peer].suspects[peer] = None

    def _fail(self, group: _Group, index: int, text: str, code: str = "bad-member") -> list[Said]:
        """A member has made its group useless for the session."""
        member = group.members[index]
        group.guilty[member.peer] = None
        group.has_failed = True
        group.parts.clear()
        plan = self._present
        reason = f"member {short(member.peer)} {text}"[:512]
        return [Said(group.peer, SessionFailed(plan.session, plan.epoch, group.stage, code, reason, ""))]

    @property
    def _present(self) -> Plan:
        if self._plan is None:
            raise LocalProtocolError("there is no plan yet")
        return self._plan

    def _receive_opened(self, group: _Group, index: int, message: SessionOpened, now: MonotonicS) -> list[Said]:
        member = group.members[index]
        if group.is_open or member.opened is not None:
            return []
        if message.stage != group.stage:
            return self._fail(group, index, "speaks for another stage in its SessionOpened")
        if not self._is_lease_good(group, index, message.lease, message.lease_s):
            return self._fail(group, index, "has signed another lease than was asked for")
        if message.taps:
            return self._fail(group, index, "promises rows of layers that it was not asked for")
        if message.reused_positions > (0 if group.open is None else group.open.prefix_positions):
            return self._fail(group, index, "reuses more than it was asked for")
        if group.is_anew and (message.next_sequence or message.num_positions):
            return self._fail(group, index, "says that it has something of a session that it began anew")
        member.opened = message
        opened = [each.opened for each in group.members if each.opened is not None]
        if len(opened) < len(group.members):
            return []
        have = {(each.next_sequence, each.num_positions) for each in opened}
        is_resumed = group.open is not None and group.open.resumes
        if len(have) > 1 and is_resumed and not group.is_anew:
            group.is_anew = True
            for each in group.members:
                # With masks all of them: keys of pairs are new for both.
                has_something = each.opened is not None and (each.opened.next_sequence or each.opened.num_positions)
                if has_something or self._present.masks:
                    each.opened = None
            return []
        group.is_open = True
        # Members that go on have sent all results of what they had, and those that begin anew never will.
        self._forget_before(group, message.epoch)
        is_alike = len(have) == 1
        reused = {each.reused_positions for each in opened}
        merged = msgspec.structs.replace(
            opened[0],
            lease_s=min(each.lease_s for each in opened),
            lease=b"",
            reused_positions=min(reused) if len(reused) == 1 else 0,
            next_sequence=opened[0].next_sequence if is_alike else 0,
            num_positions=opened[0].num_positions if is_alike else 0,
            retained_positions=min(each.retained_positions for each in opened) if is_alike else 0,
            taps=(),
        )
        return [Said(group.peer, merged)]

    def _forget_before(self, group: _Group, epoch: int) -> None:
        for key in [key for key in group.parts if key[0] < epoch]:
            del group.parts[key]
        if group.stage == len(self._present.stages) - 1:
            for key in [key for key in self._expected if key[0] < epoch]:
                del self._expected[key]

    def _is_lease_good(self, group: _Group, index: int, envelope: bytes, lease_s: float) -> bool:
        """As SessionCore has it, which cannot tell members apart."""
        if self._open_lease is None or (not envelope and not lease_s):
            return True
        plan, lease = self._present, self._open_lease(envelope)
        return (
            isinstance(lease, Lease)
            and (lease.node, lease.user, lease.session) == (group.members[index].peer, plan.user, plan.session)
            and (lease.epoch, lease.start, lease.stop) == (plan.epoch, group.place.start, group.place.stop)
            and lease.num_positions >= plan.max_positions
        )

    def _receive_progress(self, group: _Group, index: int, message: SessionProgress) -> list[Said]:
        member = group.members[index]
        if not member.questions:
            return []  # nobody has asked
        question = member.questions.popleft()
        if message.stage != group.stage:
            return self._fail(group, index, "speaks for another stage in its SessionProgress")
        if message.num_done > message.next_sequence:
            return self._fail(group, index, "says that it has computed what has not come to it")
        if not self._is_lease_good(group, index, message.lease, message.lease_s):
            return self._fail(group, index, "has signed another lease than was asked for")
        member.num_done = message.num_done
        self._note_standing(group, index, message)
        if question.is_ours:
            return self._heard(group, index)
        member.answers.append(message)
        if not all(each.answers for each in group.members):
            return []
        said = [each.answers.popleft() for each in group.members]
        merged = msgspec.structs.replace(
            said[0],
            standing=None,
            next_sequence=min(each.next_sequence for each in said),
            num_done=min(each.num_done for each in said),
            lease_s=min(each.lease_s for each in said),
            wait_s=max(each.wait_s for each in said),
            backlog_s=max(each.backlog_s for each in said),
            lease=b"",
        )
        return [Said(group.peer, merged)]

    def _receive_replayed(self, group: _Group, index: int, message: Replayed) -> list[Said]:
        if message.stage != group.stage:
            return self._fail(group, index, "speaks for another stage in its Replayed")
        group.members[index].replayed = message
        said = [each.replayed for each in group.members if each.replayed is not None]
        if len(said) < len(group.members):
            return []
        least = min(said, key=lambda each: (each.num_positions, each.next_sequence))
        if least.num_positions <= group.num_replayed:
            return []
        group.num_replayed = least.num_positions
        return [Said(group.peer, least)]

    def _receive_failed(self, group: _Group, index: int, message: SessionFailed) -> list[Said]:
        member = group.members[index]
        message = msgspec.structs.replace(message, reason=self._reason(member.peer, message.reason))
        if message.code == NOT_RETAINED and message.is_kept:
            return [Said(group.peer, msgspec.structs.replace(message, culprit="", suspects=(), standing=None))]
        accused = self._accused(message)
        is_neighbour = message.culprit in {stage.peer for stage in self._present.stages}
        if (accused is not None and accused is not group) or is_neighbour:
            # One of the two stages is at fault, and the session finds out which.
            self._suspect(member.peer)
            return [Said(group.peer, self._with_culprit(message, member.peer))]
        if not _is_of_nobody(message):
            self._note_failure(group, member.peer, PeerId(message.culprit))
        group.has_failed = True
        group.parts.clear()
        return [Said(group.peer, msgspec.structs.replace(message, culprit="", is_kept=False))]

    def _receive_late(self, group: _Group, index: int, message: SessionFailed, now: MonotonicS) -> list[Said]:
        """A member has waited for others too long. They may wait as well: all are asked how far they are."""
        self._note_standing(group, index, message)
        if group.inquiry is None:
            reason = self._reason(group.members[index].peer, message.reason)
            failed = msgspec.structs.replace(message, culprit="", is_kept=False, reason=reason, standing=None)
            group.inquiry = _Inquiry(failed, MonotonicS(now + INQUIRY_S))
            query = SessionQuery(session=message.session, epoch=message.epoch, stage=message.stage)
            for each in group.members:
                each.is_heard = False
                if each is not group.members[index]:
                    each.questions.append(_Question(now, is_ours=True))
                    self._asking.append((each.peer, query))
        return self._heard(group, index)

    def _note_standing(self, group: _Group, index: int, message: SessionProgress | SessionFailed) -> None:
        member = group.members[index]
        if message.standing is not None:
            member.standing = message.standing
        elif isinstance(message, SessionFailed) and self._of_member.get(PeerId(message.culprit)) is group:
            group.accusations[frozenset((member.peer, PeerId(message.culprit)))] = None

    def _heard(self, group: _Group, index: int) -> list[Said]:
        group.members[index].is_heard = True
        return self._concluded(group) if all(each.is_heard for each in group.members) else []

    def _concluded(self, group: _Group) -> list[Said]:
        """The session is told that the group has failed: who is at fault is as clear as it will be."""
        inquiry, group.inquiry = group.inquiry, None
        if inquiry is None or group.has_failed:
            return []
        group.has_failed = True
        group.parts.clear()
        return [Said(group.peer, inquiry.message)]

    def _note_failure(self, group: _Group, member: PeerId, culprit: PeerId) -> None:
        """Who of the group is at fault when a member says that it cannot go on, because of somebody perhaps."""
        if self._of_member.get(culprit) is not group or culprit == member:
            if not group.guilty:
                group.guilty[member] = None
            return
        if member in group.guilty:
            return  # the word of who is accused itself does not count
        group.guilty[culprit] = None
        partners = self._partners.setdefault(member, set())
        partners.add(culprit)
        if len(partners) >= MAX_PARTNERS:
            group.guilty[member] = None
        while len(self._partners) > MAX_KNOWN:
            del self._partners[next(iter(self._partners))]

    def _receive_result(self, group: _Group, index: int, message: StepResult, payload: memoryview) -> list[Said]:
        plan, member = self._present, group.members[index]
        if group.stage != len(plan.stages) - 1:
            return self._fail(group, index, "sent a StepResult, which is not its to send")
        key = (message.epoch, message.sequence)
        want = self._expected.get(key)
        if want is None and message.epoch < plan.epoch:
            return []  # of what was given up
        if key <= member.last_result:
            return self._fail(group, index, "answered the same step twice")
        if want is None and key not in group.parts:
            # The stage before may have made it up: then all members have it, and the session judges.
            unasked = sum(each not in self._expected for each in group.parts)
            if group.stage == 0 or unasked >= MAX_UNASKED:
                return self._fail(group, index, "answered a step that is not due")
        asked = message.nodes if want is None else want
        have = set(message.nodes)
        if tuple(node for node in asked if node in have) != message.nodes:
            return self._fail(group, index, "returned other rows than it was asked for")
        if message.tensor.uncompressed != TensorMeta(self._wire_dtype, len(message.nodes), len(member.columns)):
            return self._fail(group, index, "returned rows of another form than it was asked for")
        try:
            rows = payload if not message.tensor.codec else self._decompress(payload, message.tensor)
        except WireError as error:
            return self._fail(group, index, f"returned bad rows: {error}")
        if not _are_finite(self._wire_dtype, rows):
            return self._fail(group, index, "returned rows that are not finite")
        member.last_result = key
        parts = group.parts.setdefault(key, {})
        parts[index] = _Part(message, rows)
        if len(parts) < len(group.members):
            return []
        del group.parts[key]
        self._expected.pop(key, None)
        return self._joined(group, [parts[k] for k in range(len(group.members))])

    def _joined(self, group: _Group, parts: Sequence[_Part]) -> list[Said]:
        votes = Counter(part.message.nodes for part in parts)
        (nodes, num), odd = votes.most_common(1)[0], len(votes) - 1
        if odd and (num < 2 or num < len(parts) - 1):
            return self._contradict_one_another(group)
        for index, part in enumerate(parts):
            if part.message.nodes != nodes:
                return self._fail(group, index, "returned other rows than all members beside it")
        timings = zip(*(part.message.timings for part in parts), strict=False)
        message = msgspec.structs.replace(
            parts[0].message,
            tensor=TensorMeta(self._wire_dtype, len(nodes), sum(len(each.columns) for each in group.members)),
            timings=tuple(
                StageTiming(
                    max(each.queue_us for each in stage),
                    max(each.compute_us for each in stage),
                    max(each.price_us for each in stage),
                )
                for stage in timings
            ),
        )
        tables = [(part.payload, len(each.columns)) for part, each in zip(parts, group.members, strict=True)]
        payload = join_columns(self._wire_dtype, len(nodes), tables)
        return [Said(group.peer, message, payload)]

    def _contradict_one_another(self, group: _Group) -> list[Said]:
        """Members have returned different rows, and nobody can know whose are right."""
        group.accusations[frozenset(each.peer for each in group.members)] = None
        group.has_failed = True
        group.parts.clear()
        plan, reason = self._present, "the members have returned different rows, and nobody can know whose are right"
        return [Said(group.peer, SessionFailed(plan.session, plan.epoch, group.stage, "bad-member", reason, ""))]

    def _blamed(self, group: _Group, now: MonotonicS) -> frozenset[PeerId]:
        """The strongest that there is against any of them, and who leaves."""
        group.is_unsure = False
        against: Iterable[PeerId] = group.guilty or self._silent(group, now)
        if not against:
            against, group.is_unsure = self._holding_up(group)
        against = against or self._behind(group)
        if not against:
            convicted = sorted(self.convicted & group.suspects.keys())
            group.is_unsure = len(group.suspects) > 1 and not convicted
            against = convicted or group.suspects
        return frozenset([*against, *group.leaving])

    def _silent(self, group: _Group, now: MonotonicS) -> list[PeerId]:
        return _peers(e for e in group.members if e.questions and now - e.questions[0].asked_at >= SILENT_S)

    def _holding_up(self, group: _Group) -> tuple[Sequence[PeerId], bool]:
        """Who holds up the others, by what all of them say; and whether only one of these does, nobody knows which."""
        standings = {each.peer: each.standing for each in group.members if each.standing is not None}
        judged = judge([each.peer for each in group.members], standings)
        contradictions = (*judged.contradictions, *group.accusations)
        for peers in contradictions:
            self._contradictions.add(peers)
        convicted = sorted(frozenset().union(*contradictions) & self.convicted)
        if convicted or judged.behind or not contradictions:
            return convicted or judged.behind or judged.unknown, False
        return sorted(frozenset().union(*contradictions)), True

    def _doubted(self, group: _Group, now: MonotonicS) -> frozenset[PeerId]:
        """Who has been in other groups that failed before, and nobody knew for sure because of whom either."""
        is_known = group.guilty or group.leaving or group.suspects or self._silent(group, now)
        if is_known or self._holding_up(group)[0]:
            return frozenset()
        for each in group.members:
            self._unsure.setdefault(each.peer, set()).add(group.peer)
        while len(self._unsure) > MAX_KNOWN:
            del self._unsure[next(iter(self._unsure))]
        return frozenset(e.peer for e in group.members if len(self._unsure.get(e.peer, ())) >= MAX_PARTNERS)

    def _behind(self, group: _Group) -> list[PeerId]:
        """Who has not done what others of its group have."""
        if not group.is_open:
            late = [each for each in group.members if each.opened is None]
            return _peers(late) if len(late) < len(group.members) else []
        if group.parts:
            there = group.parts[min(group.parts)]
            return _peers(each for k, each in enumerate(group.members) if k not in there)
        least = min(each.num_done for each in group.members)
        behind = [each for each in group.members if each.num_done == least]
        return _peers(behind) if len(behind) < len(group.members) else []


def cut_columns(tensor: TensorMeta, payload: memoryview, columns: Sequence[range]) -> list[Rows]:
    """Plain rows as one tensor per interval of columns."""
    size = DTYPE_BYTES[tensor.dtype]
    table = np.frombuffer(payload, dtype=np.uint8).reshape(tensor.num_rows, tensor.row_size * size)
    return [
        (
            TensorMeta(tensor.dtype, tensor.num_rows, len(each)),
            np.ascontiguousarray(table[:, each.start * size : each.stop * size]).reshape(-1).data,
        )
        for each in columns
    ]


def join_columns(dtype: str, num_rows: int, parts: Sequence[tuple[memoryview, int]]) -> memoryview:
    """The same back again: each part with the number of its columns, in order."""
    size = DTYPE_BYTES[dtype]
    tables = [np.frombuffer(part, dtype=np.uint8).reshape(num_rows, width * size) for part, width in parts]
    return np.concatenate(tables, axis=1).reshape(-1).data


def _are_finite(dtype: str, rows: memoryview) -> bool:
    if dtype == "bf16":
        values = (np.frombuffer(rows, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        return bool(np.isfinite(values).all())
    return bool(np.isfinite(np.frombuffer(rows, dtype="<f4" if dtype == "f32" else "<f2")).all())


def _is_of_nobody(message: SessionFailed) -> bool:
    """Whether a member cannot go on for a reason that is not its own, and knows nobody's: sums that overflowed because
    of what somebody has contributed, or several members who may all wait for one."""
    return message.is_kept and not message.culprit and message.code in OF_NOBODY


def _is_late(message: SessionFailed) -> bool:
    """Whether a member only says that it has waited for others too long."""
    return message.is_kept and message.code == LATE_PARTIALS


def _about(error: PeerError, member: PeerId, suspects: Iterable[PeerId] = ()) -> PeerError:
    """The error as one about a member; perhaps it is another one of these."""
    text = str(error).replace(short(error.peer), short(member))
    others = " or ".join(short(each) for each in sorted(suspects) if each != member)
    return type(error)(member, f"{text} (or node {others}: nobody can know which)" if others else text)


def _peers(members: Iterable[_Member]) -> list[PeerId]:
    return [member.peer for member in members]
