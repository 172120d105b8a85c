"""Grants and releases: what counts, what a member demands, and what the user's side keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from fusion_node.audit_records import name_of
from fusion_node.client.grants_core import GRANT_TTL_S, MAX_GRANTS, GrantBook, GrantReport
from fusion_node.daemon.grants_core import MAX_ENDED, EndedGrants, HeldGrant, Over, problem_with, release_of, renews
from fusion_node.grants import Grant, Release, ReleaseReason
from fusion_node.slices import ModelSlice
from fusion_node.types import LayerRange, MonotonicS, PeerId, UnixS
from p2p.grants import MAX_GRANT_BYTES, MAX_GRANT_TTL_S, open_grant, open_release, sign_grant, sign_release
from p2p.identity import Identity
from p2p.messages import SessionReleased
from p2p.records import MAX_CLOCK_SKEW_S, PROTOCOL_VERSION, PlanMember, PlanStage, Refusal

USER, NODE, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
SESSION = bytes(range(16))
MODEL = "ab" * 32
NOW = UnixS(1_700_000_000.0)
GRANT = Grant(
    PROTOCOL_VERSION,
    b"g" * 16,
    USER.peer_id,
    NODE.peer_id,
    name_of(SESSION),
    MODEL,
    2,
    9,
    1,
    (2, 1, 1),
    NOW,
    NOW + 60.0,
)
PLACE = PlanStage(
    NODE.peer_id, 2, 9, (), members=tuple(PlanMember(each.peer_id, ()) for each in (NODE, OTHER)), weights=(1, 1)
)


def changed(**changes: object) -> Grant:
    return msgspec.structs.replace(GRANT, **changes)


def released(grant: Grant = GRANT, /, **changes: object) -> Release:
    over = Over(SESSION, 3, HeldGrant(grant, MonotonicS(0.0)), ReleaseReason.CLOSED, 17)
    return msgspec.structs.replace(release_of(over, issued_at=NOW), **changes)


# what is signed


def test_a_grant_and_a_release_come_back_as_they_were_signed() -> None:
    assert open_grant(sign_grant(GRANT, USER), now=NOW) == GRANT
    assert open_release(sign_release(released(), NODE), now=NOW) == released()
    assert released().is_of(GRANT)


@pytest.mark.parametrize(
    ("grant", "signer", "now", "refusal"),
    [
        (GRANT, NODE, NOW, Refusal.WRONG_KEY),
        (changed(user=NODE.peer_id), USER, NOW, Refusal.WRONG_KEY),
        (GRANT, USER, UnixS(NOW + 60.0), Refusal.EXPIRED),
        (GRANT, USER, UnixS(NOW - MAX_CLOCK_SKEW_S), GRANT),
        (GRANT, USER, UnixS(NOW - MAX_CLOCK_SKEW_S - 1.0), Refusal.FUTURE_DATED),
        (changed(expires_at=NOW + MAX_GRANT_TTL_S + 1.0), USER, NOW, Refusal.LIFETIME_TOO_LONG),
        (changed(start=9), USER, NOW, Refusal.MALFORMED),
        (changed(member=3), USER, NOW, Refusal.MALFORMED),
        (changed(weights=()), USER, NOW, Refusal.MALFORMED),
        (changed(session="ab"), USER, NOW, Refusal.MALFORMED),
        (changed(version=PROTOCOL_VERSION + 1), USER, NOW, Refusal.WRONG_VERSION),
    ],
)
def test_a_grant_counts_only_from_its_user_within_its_time(
    grant: Grant, signer: Identity, now: UnixS, refusal: Refusal | Grant
) -> None:
    assert open_grant(sign_grant(grant, signer), now=now) == refusal


def test_no_statement_is_taken_for_one_of_another_kind_or_with_other_bytes() -> None:
    envelope = sign_grant(GRANT, USER)
    assert open_release(envelope, now=NOW) is Refusal.MALFORMED
    signed = sign_release(released(user=NODE.peer_id), NODE)
    assert isinstance(open_grant(signed, now=NOW), Refusal)
    for place in range(len(envelope)):
        bent = bytearray(envelope)
        bent[place] ^= 1
        assert isinstance(open_grant(bytes(bent), now=NOW), Refusal), place
    assert open_grant(bytes(MAX_GRANT_BYTES + 1), now=NOW) is Refusal.OVERSIZED


def test_the_longest_grant_and_release_fit() -> None:
    grant = changed(weights=(1000,) * 16, start=4095, stop=4096)
    assert len(sign_grant(grant, USER)) <= MAX_GRANT_BYTES
    assert len(sign_release(released(grant, num_positions=2**32 - 1), NODE)) <= MAX_GRANT_BYTES


def test_a_release_of_times_to_come_does_not_count_and_an_old_one_does() -> None:
    signed = sign_release(released(), NODE)
    assert open_release(signed, now=UnixS(NOW - MAX_CLOCK_SKEW_S - 1.0)) is Refusal.FUTURE_DATED
    assert open_release(signed, now=UnixS(NOW + 1e6)) == released()
    assert open_release(sign_release(released(), OTHER), now=NOW) is Refusal.WRONG_KEY


# what a member demands


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"start": 0, "stop": 12}, None),
        ({"user": OTHER.peer_id}, "another user's"),
        ({"node": OTHER.peer_id}, "for another node"),
        ({"session": name_of(bytes(16))}, "for another session"),
        ({"model_id": "cd" * 32}, "for another model"),
        ({"start": 3}, "for layers 3:9, and not for 2:9"),
        ({"stop": 8}, "for layers 2:8, and not for 2:9"),
        ({"member": 0}, "for slice 0/2:1:1, and not for 1/2:1:1"),
        ({"weights": (1, 1, 1)}, "for slice 1/3, and not for 1/2:1:1"),
    ],
)
def test_a_grant_has_to_cover_all_that_is_to_be_held(changes: dict[str, object], problem: str | None) -> None:
    told = problem_with(
        changed(**changes),
        user=USER.peer_id,
        node=NODE.peer_id,
        session=SESSION,
        model_id=MODEL,
        layers=LayerRange(2, 9),
        slice_=ModelSlice(1, (2, 1, 1)),
    )
    assert told == problem if problem is None else problem in (told or "")


def test_only_the_same_grant_with_a_later_end_renews_one() -> None:
    assert renews(changed(issued_at=NOW + 5.0, expires_at=NOW + 90.0), GRANT)
    assert not renews(GRANT, GRANT)
    assert not renews(changed(expires_at=NOW + 90.0, stop=12), GRANT)
    assert not renews(changed(expires_at=NOW + 90.0, grant=b"h" * 16), GRANT)


def test_grants_that_have_ended_are_remembered_up_to_a_bound() -> None:
    ended = EndedGrants()
    for number in range(MAX_ENDED + 1):
        ended.add(changed(grant=number.to_bytes(16, "big")))
    assert changed(grant=bytes(16)) not in ended
    assert changed(grant=(1).to_bytes(16, "big")) in ended


# the user's side


class Users:
    """A book, and what it has told."""

    def __init__(self) -> None:
        ids = itertools.count(1)
        self.told: list[tuple[GrantReport, ...]] = []
        self.book = GrantBook(
            USER.peer_id,
            sign=lambda grant: sign_grant(grant, USER),
            open_release=lambda envelope, now: open_release(envelope, now=now),
            new_id=lambda: next(ids).to_bytes(16, "big"),
        )

    def issue(self, index: int = 0, epoch: int = 0, now: float = NOW, session: bytes = SESSION) -> Grant:
        signed = self.book.issue(
            PLACE, index, session=session, epoch=epoch, model_id=MODEL, now=UnixS(now), on_change=self.told.append
        )
        grant = open_grant(signed, now=UnixS(now))
        assert isinstance(grant, Grant)
        return grant

    def release(
        self,
        grant: Grant,
        /,
        *,
        signer: Identity = NODE,
        source: Identity = NODE,
        session: bytes = SESSION,
        **changes: object,
    ) -> GrantReport | None:
        signed = sign_release(released(grant, **changes), signer)
        return self.book.receive(source.peer_id, SessionReleased(session, 0, signed), now=NOW)


@pytest.fixture
def users() -> Users:
    return Users()


def test_a_book_grants_each_member_its_slice_and_no_more(users: Users) -> None:
    first, second = users.issue(0), users.issue(1)
    assert (first.node, first.layers, first.slice) == (NODE.peer_id, LayerRange(2, 9), ModelSlice(0, (1, 1)))
    assert (second.node, second.slice) == (OTHER.peer_id, ModelSlice(1, (1, 1)))
    assert (first.user, first.session, first.model_id) == (USER.peer_id, name_of(SESSION), MODEL)
    assert first.grant != second.grant
    assert [report.grant for report in users.told[-1]] == [first, second]


def test_a_release_counts_once_and_is_told(users: Users) -> None:
    grant = users.issue()
    users.book.ended(SESSION, NODE.peer_id)
    assert users.book.awaited() == [NODE.peer_id]
    report = users.release(grant)
    assert report is not None
    assert report.release == released(grant)
    assert users.book.awaited() == []
    assert users.told[-1] == (report,)
    again = users.release(grant, num_positions=99)
    assert again == report, "the first one counts"


@pytest.mark.parametrize(
    "release",
    [
        lambda users, grant: users.release(grant, signer=OTHER),
        lambda users, grant: users.release(grant, source=OTHER),
        lambda users, grant: users.release(grant, signer=OTHER, source=OTHER, node=OTHER.peer_id),
        lambda users, grant: users.release(grant, grant=b"?" * 16),
        lambda users, grant: users.release(grant, stop=8),
        lambda users, grant: users.release(grant, member=1),
        lambda users, grant: users.release(grant, session=bytes(16)),
        lambda users, grant: users.release(grant, issued_at=NOW + 1000.0),
    ],
    ids=["forged", "carried", "another's", "unknown", "layers", "slice", "session", "early"],
)
def test_a_release_that_is_not_the_members_word_on_all_of_it_does_not_count(
    users: Users, release: Callable[[Users, Grant], GrantReport | None]
) -> None:
    grant = users.issue()
    users.book.ended(SESSION, NODE.peer_id)
    assert release(users, grant) is None
    assert users.book.counters.total() == 1
    assert users.book.awaited() == [NODE.peer_id]


def test_a_member_that_goes_on_under_another_grant_is_asked_for_one_release(users: Users) -> None:
    first, second = users.issue(epoch=0), users.issue(epoch=1)
    assert users.book.awaited() == []
    users.book.ended(SESSION, NODE.peer_id)
    assert users.book.awaited() == [NODE.peer_id]
    assert users.release(second) is not None
    assert users.book.awaited() == []
    assert [report.grant for report in users.book.reports(SESSION)] == [second]
    assert users.release(first) is not None, "of what it began anew with the second"


def test_grants_are_renewed_at_half_of_their_time_and_not_after_their_end(users: Users) -> None:
    grant, over = users.issue(0), users.issue(1)
    users.book.ended(SESSION, OTHER.peer_id)
    assert users.book.renew_at == NOW + GRANT_TTL_S / 2
    assert users.book.renewals(UnixS(NOW + 10.0)) == []
    now = UnixS(NOW + GRANT_TTL_S / 2)
    [(peer, message)] = users.book.renewals(now)
    later = open_grant(message.grant, now=now)
    assert (peer, message.session) == (NODE.peer_id, SESSION)
    assert isinstance(later, Grant)
    assert renews(later, grant)
    assert later.expires_at == now + GRANT_TTL_S
    assert users.book.renewals(now) == []
    assert users.release(later) is not None
    assert over.grant != grant.grant


def test_revoking_ends_all_grants_of_a_peer_and_names_them(users: Users) -> None:
    first, kept = users.issue(session=SESSION), users.issue(session=bytes(16))
    other = users.issue(1)
    orders = users.book.revoke(NODE.peer_id)
    assert {(order.session, order.grant) for order in orders} == {(SESSION, first.grant), (bytes(16), kept.grant)}
    assert users.book.revoke(NODE.peer_id) == []
    assert [(report.peer, report.is_revoked) for report in users.book.reports(SESSION)] == [
        (NODE.peer_id, True),
        (OTHER.peer_id, False),
    ]
    assert other.grant not in {order.grant for order in orders}


def test_a_book_remembers_a_bounded_number_and_forgets_what_has_ended_first(users: Users) -> None:
    alive = users.issue(1)
    for number in range(MAX_GRANTS + 5):
        session = number.to_bytes(16, "big")
        users.book.issue(PLACE, 0, session=session, epoch=0, model_id=MODEL, now=NOW)
        if number < 10:
            users.book.ended(session, PeerId(NODE.peer_id))
    assert [report.grant for report in users.book.reports(SESSION)] == [alive]


def test_of_a_member_that_has_refused_nothing_is_asked(users: Users) -> None:
    refused, other = users.issue(0), users.issue(1)
    users.book.refused(SESSION, NODE.peer_id)
    assert [report.grant for report in users.told[-1]] == [other]
    users.book.ended(SESSION, NODE.peer_id)
    assert users.book.awaited() == []
    assert users.book.revoke(NODE.peer_id) == []
    assert users.release(refused) is None
    again = users.issue(0)
    assert [report.grant for report in users.book.reports(SESSION)] == [other, again]


def test_no_signature_is_checked_of_a_release_of_which_nothing_is_known() -> None:
    checked: list[bytes] = []

    def opened(envelope: bytes, now: UnixS) -> Release | Refusal:
        checked.append(envelope)
        return open_release(envelope, now=now)

    book = GrantBook(USER.peer_id, sign=lambda grant: b"", open_release=opened, new_id=lambda: b"g" * 16)
    book.issue(PLACE, 0, session=SESSION, epoch=0, model_id=MODEL, now=NOW)
    signed = sign_release(released(), NODE)
    for peer, session in ((OTHER.peer_id, SESSION), (NODE.peer_id, bytes(16))):
        assert book.receive(peer, SessionReleased(session, 0, signed), now=NOW) is None
    assert (checked, book.counters) == ([], {"releases_unknown": 2})
