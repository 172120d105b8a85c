"""Whether everybody who was sent a part of a state in a group had its user's grant for it, and who has released.

Guarantees: a member counts as granted only by a statement that the user of its plan has signed, for this node, session
and model, for layers and a slice that hold what the plan gives it, which was in force when it was opened and, with its
renewals, until the last part was sent; and the user sent it none after having revoked it.

Assumes: ``Statements`` check size, form and signature. Times are those of the log that a frame was recorded in, and
honest clocks differ by less than SKEW_S.

States: none. Timers: none.

Source: docs/protocol-data-plane.md, "Grants".

Ugly: what another member sends after a revocation that it has not heard of is not told apart from what it sends before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fusion_node.audit_records import GrantLine, OpenLine, PartialsLine, ReleaseLine, RevokeLine, StepLine
from fusion_node.grants import Grant, Release
from fusion_node.slices import ModelSlice
from verification.audit_frames_core import Frame, Record, short, told
from verification.audit_plan_core import RoutePlan, Stage
from verification.audit_report import Kind

SKEW_S = 30.0
"""As nodes allow one another."""

Problem: TypeAlias = tuple[Kind, str, list[Record]]


@dataclass(frozen=True, slots=True)
class Statements:
    """Checks signed statements.

    Attributes:
        grant: of the bytes and a Unix time at which it is to be in force; a text says why it does not count.
        release: of the bytes.
    """

    grant: Callable[[bytes, float], Grant | str]
    release: Callable[[bytes], Release | str]


@dataclass(slots=True)
class _Sent:
    """What a member was sent in one epoch."""

    last: Frame
    count: int = 1


@dataclass(slots=True)
class GrantJudge:
    """The grants and releases of one session.

    Attributes:
        released: why, of each member that has released the last grant that it was given.
    """

    statements: Statements
    session: str
    released: dict[str, str] = field(default_factory=dict)
    _opens: list[Frame] = field(default_factory=list)
    _renewals: list[Frame] = field(default_factory=list)
    _revocations: list[Frame] = field(default_factory=list)
    _releases: list[Frame] = field(default_factory=list)
    _sent: dict[tuple[int, str], _Sent] = field(default_factory=dict)
    _steps_of_user: dict[str, list[Frame]] = field(default_factory=dict)

    def note(self, frame: Frame) -> None:
        """A frame of the session."""
        match frame.what:
            case OpenLine():
                self._opens.append(frame)
            case GrantLine():
                self._renewals.append(frame)
            case RevokeLine():
                self._revocations.append(frame)
            case ReleaseLine():
                self._releases.append(frame)
            case StepLine() | PartialsLine():
                sent = self._sent.get((frame.what.epoch, frame.receiver))
                if sent is None:
                    self._sent[frame.what.epoch, frame.receiver] = _Sent(frame)
                else:
                    sent.count += 1
                    if frame.at > sent.last.at:
                        sent.last = frame
                if isinstance(frame.what, StepLine):
                    self._steps_of_user.setdefault(frame.receiver, []).append(frame)
            case _:
                pass

    def problems(self, plans: Iterable[RoutePlan]) -> Iterable[Problem]:
        """All that is wrong. ``released`` is there afterwards."""
        plans = list(plans)
        granted: dict[str, Grant] = {}
        for plan in plans:
            for stage in (stage for stage in plan.stages if stage.is_group):
                for index, peer in enumerate(stage.peers):
                    yield from self._member(plan, stage, index, peer, granted)
        for plan in plans[-1:]:
            yield from self._after_revocations(plan.user)
            yield from self._check_releases(plan.user, granted)

    def _member(
        self, plan: RoutePlan, stage: Stage, index: int, peer: str, granted: dict[str, Grant]
    ) -> Iterable[Problem]:
        opens = [f for f in self._opens if (f.sender, f.receiver, f.what.epoch) == (plan.user, peer, plan.epoch)]
        good, problems = list[Grant](), list[str]()
        for frame in opens:
            grant = self._checked(frame, plan, stage, index, peer)
            if isinstance(grant, str):
                problems.append(grant)
            else:
                good.append(grant)
                granted[peer] = grant
        sent = self._sent.get((plan.epoch, peer))
        if sent is None:
            return
        what = f"{short(peer)} was sent {sent.count} parts of states in epoch {plan.epoch}"
        frames = [*(record for frame in opens for record in frame.records), *sent.last.records]
        if not good:
            why = problems[0] if problems else "and no open to it is in any log"
            yield Kind.NOT_GRANTED, f"{what}: {why}", frames
            return
        ids = {grant.grant for grant in good}
        renewed = [self._checked(frame, plan, stage, index, peer) for frame in self._renewals if frame.receiver == peer]
        good += [each for each in renewed if isinstance(each, Grant) and each.grant in ids]
        until = max(grant.expires_at for grant in good)
        if sent.last.at > until + SKEW_S:
            late = sent.last.at - until
            yield Kind.NOT_GRANTED, f"{what}, the last one {late:.0f} s after its grant ran out", frames

    def _checked(self, frame: Frame, plan: RoutePlan, stage: Stage, index: int, peer: str) -> Grant | str:
        """The grant that a frame carries, or why it is none for this."""
        what = frame.what
        text = what.grant if isinstance(what, OpenLine | GrantLine) else ""
        if not text:
            return "its open has no grant"
        grant = self.statements.grant(bytes.fromhex(text), frame.at)
        if isinstance(grant, str):
            return f"its grant is {grant}"
        own = ModelSlice(index, plan.seen.stages[stage.index].weights)
        fits = (
            (grant.user == plan.user, "another user's"),
            (grant.node == peer, "another node's"),
            (grant.session == self.session, "for another session"),
            (grant.model_id == plan.seen.model_id, "for another model"),
            (grant.start <= stage.start and stage.stop <= grant.stop, f"for layers {grant.start}:{grant.stop}"),
            (grant.slice == own, f"for slice {grant.slice}"),
        )
        return next((f"its grant is {why}" for is_so, why in fits if not is_so), grant)

    def _after_revocations(self, user: str) -> Iterable[Problem]:
        for revocation in self._revocations:
            if revocation.sender != user or revocation.sent is None:
                continue
            run, number = revocation.sent
            for frame in self._steps_of_user.get(revocation.receiver, ()):
                is_later = frame.sent is not None and frame.sent[0] == run and frame.sent[1] > number
                if frame.sender == user and is_later and not self._is_granted_anew(frame, revocation):
                    text = f"{told(frame)} was sent after what its receiver held had been revoked"
                    yield Kind.NOT_GRANTED, text, [*frame.records, *revocation.records]

    def _is_granted_anew(self, frame: Frame, revocation: Frame) -> bool:
        """Whether its user has opened the session there again in between, under another grant."""
        return any(
            each.sent is not None and revocation.sent is not None and frame.sent is not None
            and (each.sender, each.receiver) == (revocation.sender, revocation.receiver)
            and each.sent[0] == revocation.sent[0]
            and revocation.sent[1] < each.sent[1] < frame.sent[1]
            for each in self._opens
        )  # fmt: skip

    def _check_releases(self, user: str, granted: dict[str, Grant]) -> Iterable[Problem]:
        known = self._all_granted()
        for frame in self._releases:
            what = frame.what
            release = self.statements.release(bytes.fromhex(what.release if isinstance(what, ReleaseLine) else ""))
            if isinstance(release, str):
                yield Kind.BAD_RELEASE, f"{told(frame)} is {release}", frame.records
            elif release.node != frame.sender or frame.receiver != user:
                yield Kind.BAD_RELEASE, f"{told(frame)} is another node's, or not for its user", frame.records
            elif not any(release.is_of(grant) for grant in known):
                yield Kind.BAD_RELEASE, f"{told(frame)} is not of what was granted there", frame.records
            elif frame.sender in granted and release.grant == granted[frame.sender].grant:
                self.released[frame.sender] = release.why

    def _all_granted(self) -> Sequence[Grant]:
        """Also of members that were sent nothing, or whose grant was not good enough."""
        found = []
        for frame in self._opens:
            if isinstance(frame.what, OpenLine) and frame.what.grant:
                grant = self.statements.grant(bytes.fromhex(frame.what.grant), frame.at)
                if isinstance(grant, Grant) and grant.node == frame.receiver:
                    found.append(grant)
        return found
