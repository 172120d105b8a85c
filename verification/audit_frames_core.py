"""Puts together what the two ends of every frame say of it: the records of all parties as one set of frames.

Guarantees: a frame is taken for the same on both sides only if all that its records say of it is equal, its digest left
aside; so a record that was changed in anything is one that the other side does not have. Every record is used once.

Assumes: runs as verification.audit_file reads them. A party's records are its own word.

States: none. Timers: none.

Source: accountability by comparing both ends' logs, as in PeerReview (Haeberlen, Kouznetsov, Druschel, SOSP 2007, §4),
without its signatures and commitments: see docs/audit.md.

Ugly: messages without a tensor are told apart by their order alone, which serves to date the loss of a link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fusion_node.audit_records import (
    GoneLine,
    GrantLine,
    OpenLine,
    OrderLine,
    PartialsLine,
    PlanSeen,
    ProbeLine,
    ReleaseLine,
    ResultLine,
    RevokeLine,
    SaidLine,
    StepLine,
    TapsLine,
)
from verification.audit_file import Run

Record: TypeAlias = tuple[int, int]
"""Which run, and the number of the event in it."""

Statement: TypeAlias = GrantLine | RevokeLine | ReleaseLine
What: TypeAlias = StepLine | ResultLine | TapsLine | PartialsLine | OpenLine | OrderLine | SaidLine | Statement


@dataclass(slots=True)
class Frame:
    """One frame, as far as anybody has recorded it.

    Attributes:
        what: one side's record of it.
        sent, received: where each side has it.
        repeats: further records of the very same frame by a side that has it already.
        differs: the two sides have different digests.
        at: Unix time, by the clock of who has recorded it.
    """

    sender: str
    receiver: str
    what: What
    sent: Record | None = None
    received: Record | None = None
    repeats: list[Record] = field(default_factory=list)
    differs: bool = False
    at: float = 0.0

    @property
    def records(self) -> list[Record]:
        return [record for record in (self.sent, self.received, *self.repeats) if record is not None]


@dataclass(slots=True)
class SessionFrames:
    """All frames of one session.

    Attributes:
        conversations: what one peer says that it has sent another, in order, but for partials and taps, which have
            none; None stands for the end of their connection.
        plans: by epoch, each with the frames in which it travelled.
    """

    name: str
    frames: dict[tuple[object, ...], Frame] = field(default_factory=dict)
    conversations: dict[tuple[str, str], list[Frame | None]] = field(default_factory=dict)
    plans: dict[int, dict[str, tuple[PlanSeen | None, list[Frame]]]] = field(default_factory=dict)

    def users(self) -> set[str]:
        """Whose session it is, by all plans that were recorded."""
        return {seen.user for by_digest in self.plans.values() for seen, _ in by_digest.values() if seen is not None}


@dataclass(slots=True)
class Collected:
    """All that was recorded.

    Attributes:
        nameless: frames of sessions that were never opened where they were recorded.
        odd_probes: records of probes that hold anything.
    """

    sessions: dict[str, SessionFrames] = field(default_factory=dict)
    nameless: list[Frame] = field(default_factory=list)
    odd_probes: list[Record] = field(default_factory=list)


class Columns:
    """A set of columns, and for those that should not be there the frames that brought them."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._intervals: list[tuple[int, int]] = []

    def add(self, columns: range) -> None:
        if not columns or (columns.start, columns.stop) in self._intervals:
            return
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self._intervals, (columns.start, columns.stop)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            else:
                merged.append((start, stop))
        self._intervals = merged

    def without(self, other: range) -> list[tuple[int, int]]:
        parts = []
        for start, stop in self._intervals:
            parts += [(start, min(stop, other.start)), (max(start, other.stop), stop)] if other else [(start, stop)]
        return [(start, stop) for start, stop in parts if start < stop]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self._intervals)


def collect(runs: Sequence[Run]) -> Collected:
    """The frames of all sessions."""
    found = Collected()
    said: Counter[tuple[object, ...]] = Counter()
    for index, run in enumerate(runs):
        for event in run.events:
            if isinstance(event, GoneLine):
                _part(found.sessions.values(), run.peer, run.peers.get(event.to, ""))
            elif isinstance(event, ProbeLine):
                if not event.zeros:
                    found.odd_probes.append((index, event.n))
            elif isinstance(event, What):
                _add(found, run, (index, event.n), event, said)
        for session in found.sessions.values():
            for (sender, _), conversation in session.conversations.items():
                if sender == run.peer:
                    conversation.append(None)
    for session in found.sessions.values():
        for frame in session.frames.values():
            if isinstance(frame.what, OpenLine):
                by_digest = session.plans.setdefault(frame.what.epoch, {})
                by_digest.setdefault(frame.what.digest, (frame.what.plan, []))[1].append(frame)
    return found


def _add(found: Collected, run: Run, record: Record, event: What, said: Counter[tuple[object, ...]]) -> None:
    is_sent = bool(event.to)
    other = run.peers[event.to or event.from_]
    sender, receiver = (run.peer, other) if is_sent else (other, run.peer)
    if not event.session:
        found.nameless.append(Frame(sender, receiver, event, *((record, None) if is_sent else (None, record))))
        return
    name = run.sessions[event.session]
    session = found.sessions.get(name)
    if session is None:
        session = found.sessions[name] = SessionFrames(name)
    key = (sender, receiver, *_identity(event))
    if isinstance(event, SaidLine):
        # The same thing may be said twice: the first said is the first heard.
        said[(name, is_sent, key)] += 1
        key = (*key, said[(name, is_sent, key)])
    frame = session.frames.get(key)
    if frame is None:
        frame = session.frames[key] = Frame(sender, receiver, event, at=run.started_at + event.ms / 1000.0)
    elif (frame.sent if is_sent else frame.received) is not None:
        frame.repeats.append(record)
        return
    elif getattr(event, "digest", "") != getattr(frame.what, "digest", ""):
        frame.differs = True
    if is_sent:
        frame.sent = record
        if not isinstance(event, PartialsLine | TapsLine):
            session.conversations.setdefault((sender, receiver), []).append(frame)
    else:
        frame.received = record


def _identity(event: What) -> tuple[object, ...]:
    """All that makes it this frame, but for its rows."""
    match event:
        case PartialsLine():
            shape = (event.rows, event.width, event.dtype, event.bytes)
            return ("p", event.epoch, event.layer, event.exchange, event.node, *shape)
        case StepLine():
            shape = (event.rows, event.width, event.dtype, event.bytes)
            what = (event.sequence, event.first, event.nodes, event.live, event.wanted, event.covers, event.stop)
            return ("step", event.epoch, *what, event.is_tree, *shape)
        case ResultLine():
            return ("result", event.epoch, event.sequence, event.rows, event.width, event.dtype, event.bytes)
        case TapsLine():
            shape = (event.rows, event.width, event.dtype, event.bytes)
            return ("taps", event.epoch, event.sequence, event.layer, *shape)
        case OpenLine():
            where = (event.stage, event.member, event.resumes, event.folds)
            return ("open", event.epoch, *where, event.digest, event.plan, event.grant)
        case OrderLine():
            return ("resend", event.epoch, event.sequence, event.covers, event.first, event.rows, event.stop)
        case SaidLine():
            return ("said", event.epoch, event.what)
        case GrantLine() | RevokeLine():
            return (type(event).__name__, event.epoch, event.grant)
        case ReleaseLine():
            return ("released", event.epoch, event.release)


def _part(sessions: Iterable[SessionFrames], peer: str, other: str) -> None:
    for session in sessions:
        conversation = session.conversations.get((peer, other))
        if conversation is not None:
            conversation.append(None)


def lost_in_the_middle(conversation: Sequence[Frame | None]) -> list[Frame]:
    """What was not received although something that was sent later on the same connection was."""
    found: list[Frame] = []
    waiting: list[Frame] = []
    for frame in conversation:
        if frame is None:
            waiting = []
        elif frame.received is None:
            waiting.append(frame)
        else:
            found += waiting
            waiting = []
    return found


def told(frame: Frame) -> str:
    """A frame in words."""
    what = frame.what
    match what:
        case StepLine():
            name = f"step {what.sequence} ({what.rows} × {what.width})"
        case ResultLine():
            name = f"result {what.sequence} ({what.rows} × {what.width})"
        case TapsLine():
            name = f"taps of step {what.sequence} after layer {what.layer}"
        case PartialsLine():
            name = f"contribution to {what.exchange[:16]} of layer {what.layer} ({what.rows} × {what.width})"
        case OpenLine():
            name = "open"
        case OrderLine():
            name = f"order to hand on step {what.sequence}"
        case SaidLine():
            name = what.what
        case GrantLine():
            name = "renewal of a grant"
        case RevokeLine():
            name = "revocation"
        case ReleaseLine():
            name = "release"
    return f"{name} of epoch {what.epoch} from {short(frame.sender)} to {short(frame.receiver)}"


def short(peer: str) -> str:
    """The end of a peer id, as people read them."""
    return f"…{peer[-8:]}"
