"""Which sessions a node serves: reservation before use, leases that expire, and who may send what.

Guarantees: the KV that a session reserves is there (fusion_node.engine.block_manager_core); a session is opened only by
the user who signed its plan, and only for layers that this node holds; steps are taken only from the peer that the plan
puts in front; an unused session is forgotten when its lease runs out. A session may begin with the KV of an earlier one
of the same user and the same layers, as far as that is committed and computed; to everybody else, and for other layers,
that KV is as if it did not exist.

Assumes: the caller has checked the plan's signature and dates (p2p.records.open_plan), and tells when a link is lost.

A plan of a higher epoch of an open session is *adopted* when it has the same layers, positions and encoding here, and
the path along which it folds, if it does, fits: the KV and the log stay, and everything else follows the new plan.
Otherwise the session is opened anew, empty.

States of a session: opening (leased; the next stage is being dialled), open, kept (it cannot go on as it is, and waits
for a plan to adopt), retained (over, its beginning kept until the room is needed), gone. Timers: the earliest lease,
KEPT_S after a session was kept, the end of a grace, and RETAIN_S after the earliest close with ``retain``, in seconds
of the monotonic clock. Still ugly: a session that uses some of the node's layers reserves its positions in all of them;
and what a retained session leaves behind here is noticed late when the block manager has dropped its blocks.

Above 600 lines: opening, adopting and leases change one state, a session with what it waits for and what it reserves.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from fusion_node.daemon.grants_core import HeldGrant, Over, problem_with
from fusion_node.daemon.parts_core import JoinedPart, Parts
from fusion_node.daemon.taps_core import problem_with_taps
from fusion_node.engine.block_manager_core import BlockManager, NoRoom
from fusion_node.engine.session_log_core import LogState, SessionLog
from fusion_node.grants import Grant, ReleaseReason
from fusion_node.slices import MASK_KEY_BYTES, MIN_MASKED_MEMBERS, ModelSlice
from fusion_node.types import LayerRange, ModelId, MonotonicS, PeerId
from p2p.messages import (
    DRAINING,
    INT8,
    KEPT_S,
    MEMBER_UNREACHABLE,
    RETAIN_S,
    SUCCESSOR_UNREACHABLE,
    OpenSession,
    Resend,
    StageTiming,
    Step,
    alias_of,
)
from p2p.records import PROTOCOL_VERSION, Lease, Plan, PlanStage

LEASE_S = 120.0
"""Between two steps of a session. A person who thinks between two questions opens a new session for the second."""

ASKED_S = 600.0
"""So long after its last step, or plan, a session is renewed by questions. More than an answer waits for coverage."""

MAX_SESSIONS = 256
MAX_SESSIONS_PER_USER = 64
MAX_QUEUED_ROWS = 4096
"""Rows of one session that wait for the device. The user's side keeps a handful of steps in flight."""


RESUMES_AT_ONCE = 8
"""Plans of higher epochs that a session adopts in a row, or is replaced for, and then one every RESUME_INTERVAL_S. More
than a user that finds a stage dead needs; each costs a look at a signature, and perhaps a dial."""

RESUME_INTERVAL_S = 1.0


class RefusalCode(enum.StrEnum):
    """Why a session is not opened, as the user's side sees it in SessionRefused.code."""

    BAD_PLAN = "bad-plan"
    BAD_TAPS = "bad-taps"
    NOT_YOURS = "not-yours"
    UNKNOWN_MODEL = "unknown-model"
    LAYERS_NOT_HELD = "layers-not-held"
    SLICE_NOT_HELD = "slice-not-held"
    NOT_GRANTED = "not-granted"
    NUMERICS = "numerics"
    NO_MEMORY = "no-memory"
    TOO_MANY_SESSIONS = "too-many-sessions"
    DUPLICATE = "duplicate"
    TOO_OFTEN = "too-often"
    DRAINING = DRAINING
    PAUSED = "paused"
    SUCCESSOR_UNREACHABLE = SUCCESSOR_UNREACHABLE
    MEMBER_UNREACHABLE = MEMBER_UNREACHABLE


@dataclass(frozen=True, slots=True)
class Refused:
    """The session is not opened; the reason is for people."""

    code: RefusalCode
    reason: str


class SessionState(enum.StrEnum):
    """How far a session is on this stage."""

    OPENING = "opening"
    """The next stage is being dialled."""
    OPEN = "open"
    KEPT = "kept"
    """It takes no steps, and waits for a plan of a higher epoch."""


@dataclass(frozen=True, slots=True)
class Grace:
    """What a session still has on a node that leaves, and what its user is told when it is over.

    Attributes:
        may_stay: it is taken back if the node goes on serving.
    """

    until: MonotonicS
    code: str
    reason: str
    may_stay: bool = False


@dataclass(slots=True)
class Fold:
    """A tree has become a plain log, of which some steps are not computed yet.

    Attributes:
        num_steps: those.
        num_positions: committed by the fold or before.
        num_in_place: of them, those whose KV does not have to be moved.
    """

    num_steps: int
    num_positions: int
    num_in_place: int


@dataclass(slots=True)
class JoiningEntry:
    """An entry of the log of which some of those before the stage have sent their columns.

    Attributes:
        first: whose header all others have to equal.
        parts: what has come, by who sent it.
        timings: of each of them.
        since: when the first of it came.
    """

    first: Step
    since: MonotonicS
    parts: dict[PeerId, JoinedPart] = field(default_factory=dict)
    headers: dict[PeerId, tuple[object, ...]] = field(default_factory=dict)
    timings: list[tuple[StageTiming, ...]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Session:
    """One admitted session.

    Attributes:
        plan, stage, member: of the present epoch; ``member`` is the place in the stage's group, 0 if it is none.
        parts: who sends what of its rows, and who gets what.
        awaited: those to whom links are not there yet, while it is opening.
        joining: entries that have not come from everybody before the stage, by sequence and first node, as they came.
        num_joining_rows, num_joining_bytes: of those, and of what has come of them.
        log: its token tree on this stage.
        previous: who may send steps.
        next: who gets the results; the user after the last stage.
        used_at: when the last step came or was computed, or the last plan came.
        reused_positions: of another session, with which this one begins.
        num_queued_rows: rows that wait for the device.
        num_queued_before: those of them that came under earlier plans.
        num_computed: committed positions whose KV has been computed and is written no more.
        num_done: entries that were computed, as the sequence of the next one.
        num_unfinished: steps that the log has applied and that are not computed yet.
        numbered_at: the epoch in which ids of its nodes began.
        generation: how often its tree was folded: ids of nodes and sequences are of one generation.
        fold: what of the generation before is still being computed; None when nothing is.
        befores: the log before each of the last steps that it has applied and that are not computed, as far as it can
            be taken back.
        num_narrowed: times that a step was derived anew for a cancel.
        narrow_credit: as often that may be now.
        kept_until: set while the state is KEPT.
        grace: set while the node leaves.
        resends: orders to hand rows on again, in order.
        resent_positions: handed on again in this epoch are none from here on.
        resent_rows, resent_at: handed on again in all epochs, less what has been forgiven until then.
        is_resumed: several peers may bring entries of the log at once, and one may come before those that it follows.
        next_taken, last_taken: the sequence that follows the entries whose rows were taken, and their last node.
        early: entries that have come before those that they follow, by sequence and first node.
        early_until: when something of what they follow has to have come; None while there are none.
        resumable_from: when one plan of a higher epoch may be adopted; those before it are RESUMES_AT_ONCE.
        lease_envelope: what the user was last given, signed, and when it ends.
        taps: layers whose rows its user may ask for, of the present epoch.
        grant: under which it holds what it has, of the present epoch; None where none is demanded.
        mask_keys: that it shares with each other member of its group, of the present epoch; see OpenSession.
    """

    key: bytes
    plan: Plan
    stage: int
    layers: LayerRange
    log: SessionLog
    lease_until: MonotonicS
    used_at: MonotonicS
    reused_positions: int = 0
    num_queued_rows: int = 0
    num_queued_before: int = 0
    num_computed: int = 0
    num_done: int = 0
    num_unfinished: int = 0
    numbered_at: int = 0
    generation: int = 0
    fold: Fold | None = None
    befores: deque[LogState] = field(default_factory=deque, repr=False)
    num_narrowed: int = 0
    narrow_credit: int = 0
    state: SessionState = SessionState.OPENING
    kept_until: MonotonicS | None = None
    grace: Grace | None = None
    resends: deque[Resend] = field(default_factory=deque)
    resent_positions: int = 0
    resent_rows: float = 0.0
    resent_at: float = 0.0
    is_resumed: bool = False
    next_taken: int = 0
    last_taken: int = 0
    early: dict[tuple[int, int], tuple[Step, Any]] = field(default_factory=dict)
    early_until: MonotonicS | None = None
    resumable_from: float = 0.0
    lease_envelope: tuple[bytes, MonotonicS] | None = None
    taps: tuple[int, ...] = ()
    member: int = 0
    parts: Parts = field(default_factory=Parts)
    awaited: set[PeerId] = field(default_factory=set)
    joining: dict[tuple[int, int], JoiningEntry] = field(default_factory=dict)
    num_joining_rows: int = 0
    num_joining_bytes: int = 0
    grant: HeldGrant | None = None
    mask_keys: bytes = field(default=b"", repr=False)

    @property
    def user(self) -> PeerId:
        return PeerId(self.plan.user)

    @property
    def is_group(self) -> bool:
        """Whether this node is a member of a group in it."""
        return self.plan.stages[self.stage].is_group

    @property
    def alias(self) -> int:
        """What it is called between the members of its group, under this plan."""
        return alias_of(self.key, self.plan.epoch)

    @property
    def previous(self) -> PeerId:
        """Who sends steps: the first of them, if it is a group."""
        return PeerId(self.plan.stages[self.stage - 1].peer) if self.stage else self.user

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.plan.stages) - 1

    @property
    def next(self) -> PeerId:
        """Who gets what is made of them: the first one, if it is a group."""
        return self.user if self.is_last else PeerId(self.plan.stages[self.stage + 1].peer)

    def may_send(self, peer: PeerId) -> bool:
        """Whether steps may come from that peer: of a group before it, from those that hold the same columns."""
        if self.stage and self.plan.stages[self.stage - 1].is_group:
            return self.parts.width_from(peer) > 0
        return peer == self.previous

    def needs(self, peer: PeerId) -> bool:
        """Whether it cannot go on without a link to that peer, unless it is kept: those with whom it shares columns,
        and the other members of its group."""
        is_target = self.parts.goes_to(peer) if self._is_before_group else peer == self.next
        return is_target or peer in self.parts.others or self.may_send(peer)

    @property
    def _is_before_group(self) -> bool:
        return not self.is_last and self.plan.stages[self.stage + 1].is_group

    def clear_joining(self) -> None:
        """What has not come from everybody is given up."""
        self.joining.clear()
        self.num_joining_rows = self.num_joining_bytes = 0

    @property
    def num_early_rows(self) -> int:
        return sum(step.node_count for step, _ in self.early.values())

    @property
    def num_early_bytes(self) -> int:
        return sum(step.tensor.num_bytes for step, _ in self.early.values())

    @property
    def promised_until(self) -> MonotonicS:
        """Until when the KV is there, whatever else happens, unless the user goes."""
        until = self.lease_until if self.kept_until is None else self.kept_until
        return until if self._latest is None else min(until, self._latest)

    @property
    def _latest(self) -> MonotonicS | None:
        """When it ends whatever it does: with its grant, or with the grace; None: there is no such time."""
        ends = [each.until for each in (self.grace, self.grant) if each is not None]
        return min(ends, default=None)

    @property
    def ends_at(self) -> MonotonicS | None:
        """When it ends if nothing is heard; None while its lease cannot run out, because rows wait for the device."""
        if self.num_queued_rows == 0 or self.kept_until is not None:
            return self.promised_until
        return self._latest

    def folds_along(self, message: OpenSession) -> bool:
        """Whether the path of a plan of a higher epoch is of its own numbering, and leads on from what is committed."""
        if message.path and not self.log.is_plain and not self.numbered_at <= message.path_epoch <= self.plan.epoch:
            return False
        return self.log.fits(message.path_start, message.path)

    def lease(self, node: PeerId, *, issued_at: float, lease_s: float) -> Lease:
        """What the node promises the user, to be signed.

        Args:
            issued_at: Unix seconds.
        """
        return Lease(
            version=PROTOCOL_VERSION,
            node=node,
            user=self.plan.user,
            session=self.key,
            epoch=self.plan.epoch,
            start=self.layers.start,
            stop=self.layers.stop,
            num_positions=self.plan.max_positions,
            issued_at=issued_at,
            expires_at=issued_at + lease_s,
        )


@dataclass(frozen=True, slots=True)
class _Retained:
    """What is remembered of a retained session beside its blocks."""

    epoch: int
    layers: LayerRange
    wire: str
    until: MonotonicS
    num_positions: int = 0
    grant: HeldGrant | None = None


@dataclass(slots=True)
class Admission:
    """The sessions of one node.

    Attributes:
        blocks: the KV of all sessions together; a session's table has its id as key.
        first_layers: of the model, at which a session may begin; None: at all of them.
        slice: of these layers, that is held here; None: all of them.
        draining: the node leaves, or goes over to other layers; no session is opened any more.
        draining_reason: why, in words for users.
        paused: why no session is opened for now, in words for its user; None while they are.
        over: grants under which nothing is held any more, until somebody takes them from there.
    """

    peer: PeerId
    model_id: ModelId
    layers: LayerRange
    numerics: str
    blocks: BlockManager
    first_layers: frozenset[int] | None = None
    slice: ModelSlice | None = None
    refused: Counter[str] = field(default_factory=Counter)
    draining: bool = False
    draining_reason: str = "the node is shutting down"
    paused: str | None = None
    over: deque[Over] = field(default_factory=deque)
    _sessions: dict[bytes, Session] = field(default_factory=dict)
    _retained: dict[tuple[PeerId, bytes], _Retained] = field(default_factory=dict)
    """In the order in which they end. The block manager may have dropped the blocks of any."""

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    @property
    def max_positions(self) -> int:
        """Positions that one session could reserve if there were no other."""
        return self.blocks.num_blocks * self.blocks.block_slots

    @property
    def free_positions(self) -> int:
        """Positions that one more session could reserve."""
        if self.draining or self.paused is not None or len(self._sessions) >= MAX_SESSIONS:
            return 0
        return self.blocks.free_slots

    def open(
        self,
        message: OpenSession,
        plan: Plan,
        *,
        source: PeerId,
        now: MonotonicS,
        grant: HeldGrant | Refused | None = None,
    ) -> Session | Refused:
        """Reserves KV for a plan, or says why not.

        With ``resumes``, a session of the same user under that id and a lower epoch is adopted: the same Session comes
        back. If it cannot be, it is dropped, and one that is empty takes its place.

        Args:
            grant: that came with it, or why none is accepted; None: none is demanded.
        """
        layers = self._check(message, plan, source)
        if isinstance(layers, Refused):
            return self._count(layers)
        held_grant = self._check_grant(grant, message, source, layers)
        if isinstance(held_grant, Refused):
            return self._count(held_grant)
        held, resumable_from = self._sessions.get(message.session), 0.0
        is_resumed = message.resumes and held is not None and held.user == source and message.epoch > held.plan.epoch
        if held is not None and is_resumed:
            resumable_from = max(held.resumable_from, now) + RESUME_INTERVAL_S
            if held.resumable_from > now + (RESUMES_AT_ONCE - 1) * RESUME_INTERVAL_S:
                return self._count(Refused(RefusalCode.TOO_OFTEN, "too many plans for one session; wait a moment"))
            is_alike = (held.layers, held.plan.wire, held.plan.max_positions) == (layers, plan.wire, plan.max_positions)
            is_alike = is_alike and _is_same_group(held, plan.stages[message.stage])
            # Whose committed prefix is another than its user's is of no use to it.
            if is_alike and (not message.folds or held.folds_along(message)):
                self._adopt(held, plan, message, now)
                held.grant = held_grant
                held.resumable_from = resumable_from
                return held
        crowded = self._check_room(message, source, is_resumed=is_resumed)
        if crowded is not None:
            return self._count(crowded)
        if held is not None:
            self.drop(held)
        reused = self._reserve(message, plan, source, layers)
        if isinstance(reused, Refused):
            return self._count(reused)
        session = Session(
            key=message.session,
            plan=plan,
            stage=message.stage,
            layers=layers,
            log=SessionLog(plan.max_positions, reused),
            lease_until=MonotonicS(now + LEASE_S),
            used_at=now,
            reused_positions=reused,
            num_computed=reused,
            resumable_from=resumable_from,
            numbered_at=plan.epoch,
            taps=message.taps,
            member=message.member,
            grant=held_grant,
            mask_keys=message.mask_keys,
        )
        if message.folds:
            session.log.next_sequence = session.num_done = reused  # an entry per position
        self._sessions[message.session] = session
        return session

    def _check_grant(
        self, grant: HeldGrant | Refused | None, message: OpenSession, source: PeerId, layers: LayerRange
    ) -> HeldGrant | Refused | None:
        """What the session is held under; for whole layers nothing is demanded."""
        if self.slice is None or not isinstance(grant, HeldGrant):
            return None if self.slice is None else grant
        problem = problem_with(
            grant.grant,
            user=source,
            node=self.peer,
            session=message.session,
            model_id=self.model_id,
            layers=layers,
            slice_=self.slice,
        )
        return grant if problem is None else Refused(RefusalCode.NOT_GRANTED, f"the grant does not do: {problem}")

    def is_in_force(self, grant: Grant) -> bool:
        """Whether anything is held under it, or under what it was before it was renewed. Ids are the user's choice."""
        held = [*(s.grant for s in self._sessions.values()), *(kept.grant for kept in self._retained.values())]
        return any(h is not None and (h.grant.user, h.grant.grant) == (grant.user, grant.grant) for h in held)

    def revoke(self, key: bytes, *, grant: bytes, source: PeerId) -> Session | None:
        """Drops what is held under a grant of that user; the session, where it was open."""
        kept = self._retained.get((source, key))
        if kept is not None and kept.grant is not None and kept.grant.grant.grant == grant:
            self._release(source, key, ReleaseReason.REVOKED)
        session = self.held(key, user=source)
        if session is None or session.grant is None or session.grant.grant.grant != grant:
            return None
        self._end(session, retain_until=None, why=ReleaseReason.REVOKED)
        return session

    def get(self, key: bytes, *, epoch: int, source: PeerId) -> Session | None:
        """The session that a step from ``source`` belongs to; None when it is not theirs to send."""
        session = self._sessions.get(key)
        if session is None or session.plan.epoch != epoch or not session.may_send(source):
            return None
        return session

    def held(self, key: bytes, *, user: PeerId) -> Session | None:
        """The session of that user under this id."""
        session = self._sessions.get(key)
        return session if session is not None and session.user == user else None

    def renew(self, session: Session, *, now: MonotonicS) -> None:
        """The session is used: the lease starts again. Of no effect on what a kept session has left."""
        session.used_at = now
        session.lease_until = MonotonicS(now + LEASE_S)

    def asked(self, session: Session, *, now: MonotonicS) -> None:
        """Its user asks for it, which costs nothing: a lease is renewed for ASKED_S, or while rows wait."""
        until = now if session.num_queued_rows else min(now, session.used_at + ASKED_S - LEASE_S)
        session.lease_until = MonotonicS(max(session.lease_until, until + LEASE_S))

    def keep(self, session: Session, *, now: MonotonicS) -> None:
        """The session cannot go on as it is: its KV waits for a plan of a higher epoch.

        For KEPT_S, and as long as a lease that was signed says.
        """
        session.state = SessionState.KEPT
        signed_until = now if session.lease_envelope is None else session.lease_envelope[1]
        session.kept_until = MonotonicS(max(now + KEPT_S, signed_until))
        session.resends.clear()
        session.clear_joining()

    def start_empty(self, session: Session) -> bool:
        """Before its first step: the session begins with nothing instead of with a prefix.

        Returns:
            False when its reservation does not fit without the shared blocks; it is dropped then.
        """
        self.blocks.close(session.key)
        room = self.blocks.open(session.key, owner=session.user, max_slots=session.plan.max_positions)
        if isinstance(room, NoRoom):
            del self._sessions[session.key]
            self._note_over(session, ReleaseReason.ENDED)
            return False
        session.log = SessionLog(session.plan.max_positions)
        session.reused_positions = session.num_computed = 0
        return True

    def close(self, key: bytes, *, epoch: int, source: PeerId, now: MonotonicS, retain: bool = False) -> Session | None:
        """The user ends a session of this epoch or an earlier one. None when it is not theirs, or not open.

        Args:
            retain: what it has committed and computed is kept for RETAIN_S, or until the room is needed. Otherwise
                what was kept under this id and epoch is freed.
        """
        session = self._sessions.get(key)
        if session is not None and (session.user != source or session.plan.epoch > epoch):
            session = None
        if session is not None:
            until = MonotonicS(now + RETAIN_S) if retain else None
            self._end(session, retain_until=until, why=ReleaseReason.CLOSED)
        if not retain:
            kept = self._retained.get((source, key))
            if kept is not None and kept.epoch == epoch:
                self._release(source, key, ReleaseReason.CLOSED)
        return session

    def end_kept(self) -> None:
        """Frees all that was retained."""
        for user, key in list(self._retained):
            self._release(user, key, ReleaseReason.ENDED)

    def drop(self, session: Session, why: ReleaseReason = ReleaseReason.ENDED) -> None:
        """Forgets a session; dropping it twice does nothing."""
        if self.holds(session):
            self._end(session, retain_until=None, why=why)

    def holds(self, session: Session) -> bool:
        """Whether this very session is open; its id may have been opened anew since."""
        return self._sessions.get(session.key) is session

    def touching(self, peer: PeerId) -> list[Session]:
        """Sessions that cannot go on without a link to ``peer``: a kept one needs its user only."""
        return [
            s for s in self._sessions.values() if peer == s.user or (s.state is not SessionState.KEPT and s.needs(peer))
        ]

    def knows(self, user: PeerId, key: bytes) -> bool:
        """Whether a session of that user under this id is open or retained."""
        return self.held(key, user=user) is not None or (
            (user, key) in self._retained and self.blocks.is_retained(key, owner=user)
        )

    def get_timer(self) -> MonotonicS | None:
        """When the next session ends, or something retained does."""
        first_retained = [kept.until for kept in itertools.islice(self._retained.values(), 1)]
        ends = [end for s in self._sessions.values() if (end := s.ends_at) is not None]
        return min([*first_retained, *ends], default=None)

    def handle_timer(self, *, now: MonotonicS) -> list[Session]:
        """Drops and returns the sessions whose time is over: of a lease, of being kept, or of the grace.

        A lease does not run out while rows wait for the device. What was retained for long enough is freed.
        """
        for (user, key), kept in [(place, kept) for place, kept in self._retained.items() if kept.until <= now]:
            self._release(user, key, _why_ended(kept.grant, now))
        expired = [s for s in self._sessions.values() if (end := s.ends_at) is not None and end <= now]
        for session in expired:
            self.drop(session, _why_ended(session.grant, now))
        return expired

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant is broken. For tests and diagnosis."""
        if self.blocks.num_open != len(self._sessions):
            raise ValueError(f"{self.blocks.num_open} block tables are open for {len(self._sessions)} sessions")
        if sum(self.blocks.is_retained(key, owner=user) for user, key in self._retained) != self.blocks.num_retained:
            raise ValueError("the block manager retains a table that nothing here will end")
        if sorted(kept.until for kept in self._retained.values()) != [kept.until for kept in self._retained.values()]:
            raise ValueError("retained sessions out of order")
        for session in self._sessions.values():
            if not session.reused_positions <= session.num_computed <= session.log.num_committed:
                raise ValueError("more is taken for computed than is committed, or less than was reused")
        self.blocks.check_integrity()

    def _check(self, message: OpenSession, plan: Plan, source: PeerId) -> LayerRange | Refused:
        if plan.user != source or plan.session != message.session or plan.epoch != message.epoch:
            return Refused(RefusalCode.NOT_YOURS, "the plan is for another session or signed by somebody else")
        places = plan.stages[message.stage].places if message.stage < len(plan.stages) else ()
        if message.member >= len(places) or places[message.member].peer != self.peer:
            return Refused(RefusalCode.BAD_PLAN, "the plan does not name this node at that stage")
        peers = [place.peer for stage in plan.stages for place in stage.places]
        if len(set(peers)) != len(peers):
            return Refused(RefusalCode.BAD_PLAN, "the plan names a node twice")
        if plan.model_id != self.model_id:
            return Refused(RefusalCode.UNKNOWN_MODEL, "another model is served here")
        if plan.numerics != self.numerics:
            return Refused(RefusalCode.NUMERICS, f"the numerics here are {self.numerics}")
        if plan.wire not in ("", INT8):
            return Refused(RefusalCode.BAD_PLAN, "rows in an encoding that is not known here")
        place = plan.stages[message.stage]
        of_group = self._problem_with_group(message, plan, place)
        if of_group is not None:
            return of_group
        layers = LayerRange(place.start, place.stop)
        if layers.start < self.layers.start or layers.stop > self.layers.stop:
            return Refused(RefusalCode.LAYERS_NOT_HELD, f"layers {self.layers} are served here, not {layers}")
        if self.first_layers is not None and layers.start not in self.first_layers:
            nearest = (
                max((layer for layer in self.first_layers if layer < layers.start), default=None),
                min((layer for layer in self.first_layers if layer > layers.start), default=None),
            )
            advice = " or ".join(str(layer) for layer in nearest if layer is not None)
            reason = f"no session begins at layer {layers.start} of this model: begin at {advice}"
            return Refused(RefusalCode.LAYERS_NOT_HELD, reason)
        problem = problem_with_taps(message.taps, layers)
        return layers if problem is None else Refused(RefusalCode.BAD_TAPS, problem)

    def _problem_with_group(self, message: OpenSession, plan: Plan, place: PlanStage) -> Refused | None:
        """Why the stage, as the plan has it, is not one of which this node can be a part."""
        asked = ModelSlice(message.member, place.weights) if place.is_group else None
        if asked != self.slice:
            held = "whole layers are" if self.slice is None else f"slice {self.slice} is"
            wanted = "whole layers" if asked is None else f"slice {asked}"
            return Refused(RefusalCode.SLICE_NOT_HELD, f"{held} held here, not {wanted}")
        if plan.masks and any(len(stage.members) < MIN_MASKED_MEMBERS for stage in plan.stages):
            reason = f"sums are masked in groups of {MIN_MASKED_MEMBERS} or more, and in nothing else"
            return Refused(RefusalCode.BAD_PLAN, reason)
        if len(message.mask_keys) != (MASK_KEY_BYTES * (len(place.members) - 1) if plan.masks else 0):
            return Refused(RefusalCode.BAD_PLAN, "not one key of masks for each other member of the group")
        if plan.wire and any(stage.is_group for stage in plan.stages):
            return Refused(RefusalCode.BAD_PLAN, "rows of groups have the plain encoding")
        if place.is_group and message.taps:
            return Refused(RefusalCode.BAD_TAPS, "a member of a group has no rows of its own to show")
        alias = alias_of(message.session, message.epoch)
        if place.is_group and any(s.alias == alias and s.key != message.session for s in self._sessions.values()):
            return Refused(RefusalCode.DUPLICATE, "a session of that name is open: choose another id")
        return None

    def _check_room(self, message: OpenSession, source: PeerId, *, is_resumed: bool) -> Refused | None:
        """Why no session is opened anew now."""
        if self.draining:
            return Refused(RefusalCode.DRAINING, self.draining_reason)
        if self.paused is not None:
            return Refused(RefusalCode.PAUSED, self.paused)
        if is_resumed:
            return None  # it takes the place of one
        if message.session in self._sessions:
            return Refused(RefusalCode.DUPLICATE, "a session of that id is open")
        if len(self._sessions) >= MAX_SESSIONS or len(self.of_user(source)) >= MAX_SESSIONS_PER_USER:
            return Refused(RefusalCode.TOO_MANY_SESSIONS, "too many sessions are open; try again later")
        return None

    def _adopt(self, session: Session, plan: Plan, message: OpenSession, now: MonotonicS) -> None:
        session.plan, session.stage, session.taps = plan, message.stage, message.taps
        session.member, session.mask_keys = message.member, message.mask_keys
        session.num_queued_before = session.num_queued_rows
        session.state, session.kept_until = SessionState.OPENING, None
        session.resends.clear()
        session.clear_joining()
        session.resent_positions = 0
        session.lease_envelope = None
        self.renew(session, now=now)

    def _reserve(self, message: OpenSession, plan: Plan, source: PeerId, layers: LayerRange) -> int | Refused:
        """How many positions are there already."""
        num_shared = min(message.prefix_positions, self._num_sharable(message.prefix, source, layers, plan.wire))
        prefix = (message.prefix, num_shared) if num_shared else None
        room = self.blocks.open(message.session, owner=source, max_slots=plan.max_positions, prefix=prefix)
        if isinstance(room, NoRoom):
            return Refused(
                RefusalCode.NO_MEMORY,
                f"KV for {plan.max_positions} positions does not fit: {room.missing_slots} positions are missing",
            )
        return room

    def _num_sharable(self, key: bytes, user: PeerId, layers: LayerRange, wire: str) -> int:
        """How many positions of that session another one of this user over these layers may begin with.

        Rows that came in another encoding have left other KV: an answer that was to be exact would not be.
        """
        source = self._sessions.get(key)
        if source is not None and source.user == user:
            return source.num_computed if (source.layers, source.plan.wire) == (layers, wire) else 0
        kept = self._retained.get((user, key))
        # The block manager knows how long the table is, and whether it is still there.
        return self.max_positions if kept is not None and (kept.layers, kept.wire) == (layers, wire) else 0

    def _count(self, refused: Refused) -> Refused:
        self.refused[refused.code] += 1
        return refused

    def _end(self, session: Session, *, retain_until: MonotonicS | None, why: ReleaseReason) -> None:
        del self._sessions[session.key]
        if retain_until is None:
            self.blocks.close(session.key)
            self._note_over(session, why)
            return
        self._release(session.user, session.key, why)  # of an earlier epoch
        self.blocks.truncate(session.key, session.num_computed)
        self.blocks.close(session.key, retain=True)
        if len(self._retained) > 2 * self.blocks.num_retained:
            for user, key in list(self._retained):
                if not self.blocks.is_retained(key, owner=user):
                    self._release(user, key, ReleaseReason.ENDED)
        if not self.blocks.is_retained(session.key, owner=session.user):
            self._note_over(session, why)
            return
        until = retain_until if session.grant is None else min(retain_until, session.grant.until)
        self._retained[session.user, session.key] = _Retained(
            session.plan.epoch, session.layers, session.plan.wire, until, session.num_computed, session.grant
        )
        if until < retain_until:
            self._retained = dict(sorted(self._retained.items(), key=lambda each: each[1].until))

    def _release(self, user: PeerId, key: bytes, why: ReleaseReason) -> None:
        kept = self._retained.pop((user, key), None)
        self.blocks.release(key, owner=user)
        if kept is not None and kept.grant is not None:
            self.over.append(Over(key, kept.epoch, kept.grant, why, kept.num_positions))

    def _note_over(self, session: Session, why: ReleaseReason) -> None:
        if session.grant is not None:
            committed = session.log.num_committed
            self.over.append(Over(session.key, session.plan.epoch, session.grant, why, committed))

    def of_user(self, user: PeerId) -> list[Session]:
        """The sessions of one user."""
        return [s for s in self._sessions.values() if s.user == user]


def _why_ended(grant: HeldGrant | None, now: MonotonicS) -> ReleaseReason:
    """Of what has run out."""
    return ReleaseReason.EXPIRED if grant is not None and grant.until <= now else ReleaseReason.ENDED


def _is_same_group(held: Session, stage: PlanStage) -> bool:
    """Whether what a session has here goes on in that stage.

    Of a group nothing may be under way: what one member is about to compute, another may never have been sent.
    """
    if not (held.is_group or stage.is_group):
        return True
    before = held.plan.stages[held.stage]
    peers = [[member.peer for member in each.members] for each in (before, stage)]
    return peers[0] == peers[1] and before.weights == stage.weights and held.num_unfinished == 0
