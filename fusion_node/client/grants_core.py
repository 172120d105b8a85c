"""What this user has granted to whom, and what came back of it: grants, their renewal, their end, and releases.

Guarantees: every grant is for one member of one group in one session, and has an id of its own; it is renewed while its
session goes on, and never after it has ended here. A release counts if the member has signed it, for all that was
granted to it. At most MAX_GRANTS are remembered; those that have ended are forgotten first.

Assumes: one caller; ``now`` is Unix time, since what is signed is read by others' clocks. ``sign`` and ``new_id`` are
the caller's, so that neither key nor chance is here.

States of a grant: in force; ended (the session was closed there, or goes on under another grant); revoked; released.
Timers: ``renew_at``, when one that is in force has half of its time left.

Source: docs/protocol-data-plane.md, "Grants". Still ugly: a member that is lost never says anything, so that its grant
counts as in force until it is forgotten or runs out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from fusion_node.audit_records import name_of
from fusion_node.grants import Grant, Release
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, PeerId, UnixS
from p2p.messages import RenewGrant, RevokeGrant, SessionReleased
from p2p.records import PROTOCOL_VERSION, PlanStage, Refusal

GRANT_TTL_S = 1800.0
"""Twice what passes until it is renewed, and that is more than a member keeps a session that is over (RETAIN_S)."""

MAX_GRANTS = 4096
"""That are remembered: sixteen members, of the sixteen sessions that may be kept and sixteen under way, eight times."""


@dataclass(frozen=True, slots=True)
class GrantReport:
    """A grant, and what became of it.

    Attributes:
        is_ended: nothing may be held under it any more, as far as this user is concerned.
        release: what the member has signed about that; None: nothing, or nothing that counts.
    """

    grant: Grant
    is_ended: bool = False
    is_revoked: bool = False
    release: Release | None = None

    @property
    def peer(self) -> PeerId:
        return PeerId(self.grant.node)

    @property
    def layers(self) -> LayerRange:
        return self.grant.layers

    @property
    def slice(self) -> ModelSlice:
        return self.grant.slice


@dataclass(slots=True, eq=False)
class _Issued:
    session: bytes
    epoch: int
    report: GrantReport
    on_change: Callable[[tuple[GrantReport, ...]], None]


class GrantBook:
    """The grants of one user.

    Args:
        user: whose they are.
        sign: gives the signed form of a grant.
        open_release: checks size, form, signature and dates of a release.
        new_id: draws an id.

    Attributes:
        counters: of releases that do not count.
        renew_at: when ``renewals`` has something; None: there is no grant in force.
    """

    def __init__(
        self,
        user: PeerId,
        *,
        sign: Callable[[Grant], bytes],
        open_release: Callable[[bytes, UnixS], Release | Refusal],
        new_id: Callable[[], bytes],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.renew_at: UnixS | None = None
        self._user = user
        self._sign = sign
        self._open_release = open_release
        self._new_id = new_id
        self._issued: OrderedDict[bytes, _Issued] = OrderedDict()
        self._of_session: dict[bytes, list[_Issued]] = {}

    def issue(
        self,
        place: PlanStage,
        index: int,
        *,
        session: bytes,
        epoch: int,
        model_id: str,
        now: UnixS,
        on_change: Callable[[tuple[GrantReport, ...]], None] = lambda reports: None,
    ) -> bytes:
        """A grant for a member of a group, signed, to be sent with its ``open``. One that it has ends with it.

        Args:
            on_change: is told of all grants of this session whenever one of them changes.
        """
        grant = Grant(
            version=PROTOCOL_VERSION,
            grant=self._new_id(),
            user=self._user,
            node=place.members[index].peer,
            session=name_of(session),
            model_id=model_id,
            start=place.start,
            stop=place.stop,
            member=index,
            weights=place.weights,
            issued_at=now,
            expires_at=now + GRANT_TTL_S,
        )
        for each in self._of(session, PeerId(grant.node)):
            each.report = replace(each.report, is_ended=True)
        issued = self._issued[grant.grant] = _Issued(session, epoch, GrantReport(grant), on_change)
        self._of_session.setdefault(session, []).append(issued)
        self._make_room()
        self._note_renewal(grant)
        self._tell(issued)
        return self._sign(grant)

    def ended(self, session: bytes, peer: PeerId) -> None:
        """The session was closed on that member, and it was not asked to keep anything."""
        for each in self._of(session, peer):
            each.report = replace(each.report, is_ended=True)
            self._tell(each)

    def refused(self, session: bytes, peer: PeerId) -> None:
        """That member has not opened the session: nothing was ever held under its grant."""
        for each in self._of(session, peer):
            del self._issued[each.report.grant.grant]
            self._forget(each)
            self._tell(each)

    def renewals(self, now: UnixS) -> list[tuple[PeerId, RenewGrant]]:
        """Grants that have half of their time left, with a later end, and to whom they are to be sent."""
        if self.renew_at is None or now < self.renew_at:
            return []
        found, self.renew_at = [], None
        for each in self._issued.values():
            grant = each.report.grant
            if each.report.is_ended or grant.expires_at <= now:
                continue
            if grant.expires_at - now <= GRANT_TTL_S / 2:
                grant = _later(grant, now)
                each.report = replace(each.report, grant=grant)
                found.append((PeerId(grant.node), RenewGrant(each.session, each.epoch, self._sign(grant))))
            self._note_renewal(grant)
        return found

    def revoke(self, peer: PeerId) -> list[RevokeGrant]:
        """All grants of that peer end now: what is to be sent to it."""
        found = []
        for grant, each in self._issued.items():
            if each.report.peer == peer and each.report.release is None and not each.report.is_revoked:
                each.report = replace(each.report, is_ended=True, is_revoked=True)
                found.append(RevokeGrant(each.session, each.epoch, grant))
                self._tell(each)
        return found

    def receive(self, peer: PeerId, message: SessionReleased, *, now: UnixS) -> GrantReport | None:
        """A release has come. None if it is none that counts."""
        if all(each.report.peer != peer for each in self._of_session.get(message.session, ())):
            self.counters["releases_unknown"] += 1  # whoever is connected can send any number: no signature is checked
            return None
        release = self._open_release(message.release, now)
        if isinstance(release, Refusal):
            self.counters[f"releases_{release.value}"] += 1
            return None
        issued = self._issued.get(release.grant)
        if issued is None or release.node != peer or issued.session != message.session:
            self.counters["releases_unknown"] += 1
            return None
        if not release.is_of(issued.report.grant):
            self.counters["releases_unfit"] += 1
            return None
        if issued.report.release is None:
            issued.report = replace(issued.report, is_ended=True, release=release)
            self._tell(issued)
        return issued.report

    def awaited(self) -> list[PeerId]:
        """Members that are to say that they have deleted what they held, and have not."""
        reports = (report for session in self._of_session for report in self.reports(session))
        return [each.peer for each in reports if each.is_ended and each.release is None]

    def reports(self, session: bytes) -> tuple[GrantReport, ...]:
        """Of one session, in the order in which they were granted; of a member that had several, the last one."""
        # One that a member went on from under another grant is not released: what it held is held under that.
        last = {each.report.peer: each.report for each in self._of_session.get(session, ())}
        return tuple(last.values())

    def _of(self, session: bytes, peer: PeerId) -> list[_Issued]:
        return [
            each for each in self._of_session.get(session, ()) if each.report.peer == peer and not each.report.is_ended
        ]

    def _tell(self, issued: _Issued) -> None:
        issued.on_change(self.reports(issued.session))

    def _note_renewal(self, grant: Grant) -> None:
        due = UnixS(grant.expires_at - GRANT_TTL_S / 2)
        self.renew_at = due if self.renew_at is None else min(self.renew_at, due)

    def _make_room(self) -> None:
        while len(self._issued) > MAX_GRANTS:
            ended = (key for key, each in self._issued.items() if each.report.is_ended)
            self._forget(self._issued.pop(next(ended, next(iter(self._issued)))))

    def _forget(self, gone: _Issued) -> None:
        of_session = self._of_session[gone.session]
        of_session.remove(gone)
        if not of_session:
            del self._of_session[gone.session]


def _later(grant: Grant, now: UnixS) -> Grant:
    return msgspec.structs.replace(grant, issued_at=now, expires_at=now + GRANT_TTL_S)
