"""Which sessions a node serves: reservation before use, leases that expire, and who may send what.

Guarantees: the KV that a session reserves is there (fusion_node.engine.block_manager_core); a session is opened only by
the user who signed its plan, and only for layers that this node holds; steps are taken only from the peer that the plan
puts in front; an unused session is forgotten when its lease runs out.

Assumes: the caller has checked the plan's signature and dates (p2p.records.open_plan), and tells when a link is lost.

States of a session: open (leased), gone. Timers: the earliest lease, in seconds of the monotonic clock. Still ugly: a
session that uses some of the node's layers reserves its positions in all of them.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from fusion_node.engine.block_manager_core import BlockManager, NoRoom
from fusion_node.engine.session_log_core import SessionLog
from fusion_node.types import LayerRange, ModelId, MonotonicS, PeerId
from p2p.messages import SUCCESSOR_UNREACHABLE, OpenSession
from p2p.records import Plan

LEASE_S = 120.0
"""Between two steps of a session. A person who thinks between two questions opens a new session for the second."""

MAX_SESSIONS = 256
MAX_SESSIONS_PER_USER = 64
MAX_QUEUED_ROWS = 4096
"""Rows of one session that wait for the device. The user's side keeps a handful of steps in flight."""


class RefusalCode(enum.StrEnum):
    """Why a session is not opened, as the user's side sees it in SessionRefused.code."""

    BAD_PLAN = "bad-plan"
    NOT_YOURS = "not-yours"
    UNKNOWN_MODEL = "unknown-model"
    LAYERS_NOT_HELD = "layers-not-held"
    NUMERICS = "numerics"
    NO_MEMORY = "no-memory"
    TOO_MANY_SESSIONS = "too-many-sessions"
    DUPLICATE = "duplicate"
    DRAINING = "draining"
    PAUSED = "paused"
    SUCCESSOR_UNREACHABLE = SUCCESSOR_UNREACHABLE


@dataclass(frozen=True, slots=True)
class Refused:
    """The session is not opened; the reason is for people."""

    code: RefusalCode
    reason: str


@dataclass(slots=True)
class Session:
    """One admitted session.

    Attributes:
        log: its token tree on this stage.
        previous: who may send steps.
        next: who gets the results; the user after the last stage.
        num_queued_rows: rows that wait for the device.
    """

    key: bytes
    plan: Plan
    stage: int
    layers: LayerRange
    log: SessionLog
    lease_until: MonotonicS
    num_queued_rows: int = 0

    @property
    def user(self) -> PeerId:
        return PeerId(self.plan.user)

    @property
    def previous(self) -> PeerId:
        return PeerId(self.plan.stages[self.stage - 1].peer) if self.stage else self.user

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.plan.stages) - 1

    @property
    def next(self) -> PeerId:
        return self.user if self.is_last else PeerId(self.plan.stages[self.stage + 1].peer)


@dataclass(slots=True)
class Admission:
    """The sessions of one node.

    Attributes:
        blocks: the KV of all sessions together; a session's table has its id as key.
        draining: the node leaves; no session is opened any more.
        paused: why no session is opened for now, in words for its user; None while they are.
    """

    peer: PeerId
    model_id: ModelId
    layers: LayerRange
    numerics: str
    blocks: BlockManager
    refused: Counter[str] = field(default_factory=Counter)
    draining: bool = False
    paused: str | None = None
    _sessions: dict[bytes, Session] = field(default_factory=dict)

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

    def open(self, message: OpenSession, plan: Plan, *, source: PeerId, now: MonotonicS) -> Session | Refused:
        """Reserves KV for a plan, or says why not."""
        answer = self._reserve(message, plan, source)
        if isinstance(answer, Refused):
            self.refused[answer.code] += 1
            return answer
        session = Session(
            key=message.session,
            plan=plan,
            stage=message.stage,
            layers=answer,
            log=SessionLog(plan.max_positions),
            lease_until=MonotonicS(now + LEASE_S),
        )
        self._sessions[message.session] = session
        return session

    def get(self, key: bytes, *, epoch: int, source: PeerId) -> Session | None:
        """The session that a step from ``source`` belongs to; None when it is not theirs to send."""
        session = self._sessions.get(key)
        if session is None or session.plan.epoch != epoch or session.previous != source:
            return None
        return session

    def renew(self, session: Session, *, now: MonotonicS) -> None:
        """A step came: the lease starts again."""
        session.lease_until = MonotonicS(now + LEASE_S)

    def close(self, key: bytes, *, epoch: int, source: PeerId) -> Session | None:
        """The user ends a session. None when it is not theirs."""
        session = self._sessions.get(key)
        if session is None or session.user != source or session.plan.epoch != epoch:
            return None
        self.drop(session)
        return session

    def drop(self, session: Session) -> None:
        """Forgets a session; dropping it twice does nothing."""
        if self.holds(session):
            del self._sessions[session.key]
            self.blocks.close(session.key)

    def holds(self, session: Session) -> bool:
        """Whether this very session is open; its id may have been opened anew since."""
        return self._sessions.get(session.key) is session

    def touching(self, peer: PeerId) -> list[Session]:
        """Sessions that cannot go on without a link to ``peer``."""
        return [s for s in self._sessions.values() if peer in (s.user, s.previous, s.next)]

    def get_timer(self) -> MonotonicS | None:
        """When the next lease runs out."""
        return min((s.lease_until for s in self._sessions.values()), default=None)

    def handle_timer(self, *, now: MonotonicS) -> list[Session]:
        """Drops and returns the sessions whose lease has run out and that wait for nothing of ours."""
        expired = [s for s in self._sessions.values() if s.lease_until <= now and s.num_queued_rows == 0]
        for session in expired:
            self.drop(session)
        return expired

    def check_integrity(self) -> None:
        """Raises ValueError when an invariant is broken. For tests and diagnosis."""
        if self.blocks.num_open != len(self._sessions):
            raise ValueError(f"{self.blocks.num_open} block tables are open for {len(self._sessions)} sessions")
        self.blocks.check_integrity()

    def _reserve(self, message: OpenSession, plan: Plan, source: PeerId) -> LayerRange | Refused:
        if plan.user != source or plan.session != message.session or plan.epoch != message.epoch:
            return Refused(RefusalCode.NOT_YOURS, "the plan is for another session or signed by somebody else")
        if message.stage >= len(plan.stages) or plan.stages[message.stage].peer != self.peer:
            return Refused(RefusalCode.BAD_PLAN, "the plan does not name this node at that stage")
        if len({stage.peer for stage in plan.stages}) != len(plan.stages):
            return Refused(RefusalCode.BAD_PLAN, "the plan names a node twice")
        if plan.model_id != self.model_id:
            return Refused(RefusalCode.UNKNOWN_MODEL, "another model is served here")
        if plan.numerics != self.numerics:
            return Refused(RefusalCode.NUMERICS, f"the numerics here are {self.numerics}")
        place = plan.stages[message.stage]
        layers = LayerRange(place.start, place.stop)
        if layers.start < self.layers.start or layers.stop > self.layers.stop:
            return Refused(RefusalCode.LAYERS_NOT_HELD, f"layers {self.layers} are served here, not {layers}")
        if self.draining:
            return Refused(RefusalCode.DRAINING, "the node is shutting down")
        if self.paused is not None:
            return Refused(RefusalCode.PAUSED, self.paused)
        if message.session in self._sessions:
            return Refused(RefusalCode.DUPLICATE, "a session of that id is open")
        if len(self._sessions) >= MAX_SESSIONS or len(self.of_user(source)) >= MAX_SESSIONS_PER_USER:
            return Refused(RefusalCode.TOO_MANY_SESSIONS, "too many sessions are open; try again later")
        room = self.blocks.open(message.session, owner=source, max_slots=plan.max_positions)
        if isinstance(room, NoRoom):
            return Refused(
                RefusalCode.NO_MEMORY,
                f"KV for {plan.max_positions} positions does not fit: {room.missing_slots} positions are missing",
            )
        return layers

    def of_user(self, user: PeerId) -> list[Session]:
        """The sessions of one user."""
        return [s for s in self._sessions.values() if s.user == user]
