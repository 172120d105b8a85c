"""What a member holds under a grant, and what is left of it when the grant is over."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from fusion_node.audit_records import name_of
from fusion_node.daemon.grants_core import Over, release_of
from fusion_node.daemon.serving_core import Connect, Serving
from fusion_node.grants import Grant, ReleaseReason
from fusion_node.types import MonotonicS, PeerId
from p2p.messages import CloseSession, OpenSession, RevokeGrant, SessionReleased
from p2p.records import PROTOCOL_VERSION, Plan
from tests.core.serving_world import KEY, MODEL, PEERS, plan_of
from tests.core.test_group_serving import FRONT, HIDDEN, NOW, STAGES, US, USER, Member, stage

STRANGER = PEERS[31]
LAST = (stage(0, FRONT), stage(1, (PEERS[2], US, PEERS[4])))
"""The same group behind which there is nobody, so that it hands nothing on."""


@dataclass
class Granted(Member):
    """A member that demands grants, and says at their end what it has released."""

    grants: dict[bytes, Grant] = field(default_factory=dict)
    released: list[Over] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()

        def sign(over: Over) -> bytes:
            self.released.append(over)
            return msgspec.msgpack.encode(release_of(over, issued_at=0.0))

        self.core = Serving(
            self.admission,
            self.outputs,
            row_size=HIDDEN,
            wire_dtype="f32",
            open_plan=self.plans.__getitem__,
            open_grant=lambda envelope: (self.grants[envelope], self.grants[envelope].expires_at - NOW),
            sign_release=sign,
        )

    def grant(self, number: int = 1, *, user: PeerId = USER, key: bytes = KEY, left_s: float = 1000.0) -> Grant:
        grant = Grant(
            PROTOCOL_VERSION, bytes([number]) * 16, user, US, name_of(key), MODEL, 1, 2, 1, (1, 1, 1), NOW, NOW + left_s
        )
        self.grants[repr(grant).encode()] = grant
        return grant

    def open_under(self, grant: Grant, *, key: bytes = KEY, epoch: int = 0, **changes: object) -> Plan:
        fields: dict[str, object] = {"stages": STAGES, "session": key, "max_positions": 64}
        user = PeerId(grant.user)
        plan = plan_of(user, [], epoch, **(fields | changes))
        envelope = repr((user, key, epoch, plan.stages)).encode()
        self.plans[envelope] = plan
        self.receive(user, OpenSession(key, epoch, 1, envelope, member=1, grant=repr(grant).encode()))
        for dial in self.take(Connect):
            assert isinstance(dial, Connect)
            self.core.successor_connected(dial.session, dial.epoch, now=NOW, peer=dial.peer)
        self.carry_out()
        return plan

    def say(self, plan: Plan) -> None:
        """An entry comes, is computed and handed on."""
        for peer in FRONT:
            self.part(plan, peer, 0, num_rows=40)
        self.admission.blocks.extend(plan.session, 40, first_written=0)
        self.compute()

    def at(self, later_s: float) -> None:
        self.core.handle_timer(now=MonotonicS(NOW + later_s))
        self.carry_out()

    @property
    def reasons(self) -> list[ReleaseReason]:
        return [over.why for over in self.released]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda member: member.receive(USER, CloseSession(KEY, 0)), ReleaseReason.CLOSED),
        (lambda member: member.at(61.0), ReleaseReason.EXPIRED),
        (lambda member: member.receive(USER, RevokeGrant(KEY, 0, bytes([1]) * 16)), ReleaseReason.REVOKED),
    ],
    ids=["closed", "expired", "revoked"],
)
def test_no_row_that_was_handed_on_is_left_when_what_was_kept_is_released(end: object, why: ReleaseReason) -> None:
    member = Granted()
    plan = member.open_under(member.grant(left_s=60.0))
    member.say(plan)
    member.receive(USER, CloseSession(KEY, 0, retain=True))
    assert member.outputs.num_bytes > 0, "it is kept with the session"
    assert member.released == []
    for number in (2, 3):  # others go on, and hand nothing on
        key = bytes([number]) * 16
        member.open_under(member.grant(number, key=key, left_s=900.0), key=key, stages=LAST)
    end(member)  # type: ignore[operator]
    assert member.reasons == [why]
    assert member.admission.blocks.num_retained == 0
    assert member.outputs.num_bytes == 0


def test_a_revocation_ends_what_is_kept_and_what_is_open_under_one_grant() -> None:
    member = Granted()
    grant = member.grant()
    member.say(member.open_under(grant))
    member.receive(USER, CloseSession(KEY, 0, retain=True))
    member.open_under(grant, epoch=1)
    assert (member.admission.blocks.num_open, member.admission.blocks.num_retained) == (1, 1)
    member.receive(USER, RevokeGrant(KEY, 1, grant.grant))
    assert (member.admission.blocks.num_open, member.admission.blocks.num_retained) == (0, 0)
    assert member.reasons == [ReleaseReason.REVOKED]
    assert member.outputs.num_bytes == 0


def test_another_user_who_takes_the_id_of_a_grant_changes_nothing_about_it() -> None:
    member, key = Granted(), bytes([9]) * 16
    theirs = member.grant(user=STRANGER, key=key)
    member.open_under(theirs, key=key)
    ours = member.grant()
    member.open_under(ours)
    member.receive(USER, CloseSession(KEY, 0))
    assert [over.held.grant.user for over in member.released] == [USER], "though the stranger's is in force"
    member.receive(STRANGER, CloseSession(key, 0))
    again = member.grant(2)
    other_key = bytes([8]) * 16
    member.open_under(member.grant(2, user=STRANGER, key=other_key), key=other_key)
    member.receive(STRANGER, CloseSession(other_key, 0))
    member.open_under(again, epoch=1)
    assert member.admission.held(KEY, user=USER) is not None, "the stranger has ended none but its own"
    member.receive(USER, CloseSession(KEY, 1))
    assert [over.held.grant.user for over in member.released] == [USER, STRANGER, STRANGER, USER]
    assert len([each for each in member.told if isinstance(each, SessionReleased)]) == 4


def test_what_is_kept_is_released_when_the_node_leaves() -> None:
    member = Granted()
    member.say(member.open_under(member.grant()))
    member.receive(USER, CloseSession(KEY, 0, retain=True))
    assert member.released == []
    member.core.end_kept()
    member.carry_out()
    assert member.reasons == [ReleaseReason.ENDED]
    assert (member.admission.blocks.num_retained, member.outputs.num_bytes) == (0, 0)
