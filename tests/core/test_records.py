"""Signed records and plans: who may say what, for how long, and how a table of them holds against liars."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.types import UnixS
from fusion_node.wire import SignedEnvelope
from p2p.grants import open_grant, open_release, sign_grant, sign_release
from p2p.identity import Identity
from p2p.records import (
    MAX_CLOCK_SKEW_S,
    MAX_PLAN_BYTES,
    MAX_RECORD_BYTES,
    PROTOCOL_VERSION,
    CoordinateRecord,
    NodeRecord,
    Plan,
    RecordTable,
    Refusal,
    RoundTrip,
    dialled_at,
    open_assignment,
    open_plan,
    open_record,
    sign_assignment,
    sign_plan,
    sign_record,
)
from tests.vectors.make_data_plane import (
    ASSIGNMENT,
    GRANT,
    GROUP_PLAN,
    INITIATOR,
    NOW,
    PLAN,
    RECORD,
    RELEASE,
    RESPONDER,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "data_plane.json").read_text())
MEMBERS = GROUP_PLAN.stages[0].members
YEAR_S = 365 * 24 * 3600.0


def record(**changes: Any) -> bytes:
    return sign_record(msgspec.structs.replace(RECORD, **changes), INITIATOR)


def group_plan(**changes: Any) -> bytes:
    """With another first stage."""
    return plan(stages=(msgspec.structs.replace(GROUP_PLAN.stages[0], **changes),))


def plan(**changes: Any) -> bytes:
    return sign_plan(msgspec.structs.replace(PLAN, **changes), RESPONDER)


def later(seconds: float) -> UnixS:
    return UnixS(NOW + seconds)


def _assignment(**changes: Any) -> bytes:
    return sign_assignment(msgspec.structs.replace(ASSIGNMENT, **changes), RESPONDER)


def test_record_and_plan_match_the_vectors() -> None:
    for name, signed, opened, value in (
        ("record", sign_record(RECORD, INITIATOR), open_record, RECORD),
        ("plan", sign_plan(PLAN, RESPONDER), open_plan, PLAN),
        ("group_plan", sign_plan(GROUP_PLAN, RESPONDER), open_plan, GROUP_PLAN),
        ("assignment", sign_assignment(ASSIGNMENT, RESPONDER), open_assignment, ASSIGNMENT),
        ("grant", sign_grant(GRANT, RESPONDER), open_grant, GRANT),
        ("release", sign_release(RELEASE, INITIATOR), open_release, RELEASE),
    ):
        vector = VECTORS[name]
        assert signed.hex() == vector["envelope"]
        assert opened(bytes.fromhex(vector["envelope"]), now=UnixS(vector["opened_at"])) == value


@pytest.mark.parametrize("change", ["older", "newer"])
def test_record_with_fewer_or_more_fields_of_a_shard_is_read(change: str) -> None:
    body: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(RECORD))
    (shard,) = body[NodeRecord.__struct_fields__.index("shards")]
    if change == "older":  # a program from before the quantisation was told
        assert [shard.pop() for _ in range(5)] == ["", 0, True, 0.0, ""]
    else:
        shard.append("what a later version adds")
    encoded = msgspec.msgpack.encode(body)
    signature = INITIATOR.sign(b"fusion-node/record/1:", encoded)
    envelope = msgspec.msgpack.encode(SignedEnvelope(body=encoded, signature=signature))
    assert open_record(envelope, now=later(1)) == RECORD


def test_record_tells_the_quantization_of_a_shard() -> None:
    shard = msgspec.structs.replace(RECORD.shards[0], quantization="bitsandbytes nf4")
    opened = open_record(record(shards=(shard,)), now=later(1))
    assert isinstance(opened, NodeRecord)
    assert opened.shards[0].quantization == "bitsandbytes nf4"
    too_long = msgspec.structs.replace(shard, quantization="x" * 97)
    assert open_record(record(shards=(too_long,)), now=later(1)) is Refusal.MALFORMED


def test_record_tells_the_slice_of_a_shard() -> None:
    shard = msgspec.structs.replace(RECORD.shards[0], slice="0/2:1:1")
    opened = open_record(record(shards=(shard,)), now=later(1))
    assert isinstance(opened, NodeRecord)
    assert opened.shards[0].slice == "0/2:1:1"


def _sliced(text: str) -> bytes:
    return record(shards=(msgspec.structs.replace(RECORD.shards[0], slice=text),))


REFUSED_RECORDS = [
    *((_sliced(text), Refusal.MALFORMED) for text in ("0", "3/3", "0/17", "0/0:1", "0/1:1001", "-1/2", "0/2 of 3")),
    (sign_record(RECORD, RESPONDER), Refusal.WRONG_KEY),
    (record(expires_at=NOW + 0.5), Refusal.EXPIRED),
    (record(expires_at=NOW - 5), Refusal.EXPIRED),
    (record(issued_at=NOW + MAX_CLOCK_SKEW_S + 2, expires_at=NOW + 60), Refusal.FUTURE_DATED),
    (record(expires_at=NOW + 10 * YEAR_S), Refusal.LIFETIME_TOO_LONG),
    (record(issued_at=NOW + 10 * YEAR_S, expires_at=NOW + 10 * YEAR_S + 60), Refusal.FUTURE_DATED),
    (record(version=PROTOCOL_VERSION + 1), Refusal.WRONG_VERSION),
    (record(software="x" * MAX_RECORD_BYTES), Refusal.OVERSIZED),
    (record(software="x" * 97), Refusal.MALFORMED),
    (record(shards=RECORD.shards * 33), Refusal.MALFORMED),
    (record(shards=(msgspec.structs.replace(RECORD.shards[0], start=10),)), Refusal.MALFORMED),
    (record(shards=(msgspec.structs.replace(RECORD.shards[0], stop=31),)), Refusal.MALFORMED),
    (record(peer="x" * 52), Refusal.WRONG_KEY),
    (record(expires_at=float("nan")), Refusal.MALFORMED),
    (record(issued_at=float("nan")), Refusal.MALFORMED),
    (record(expires_at=float("inf")), Refusal.MALFORMED),
    (b"", Refusal.MALFORMED),
    (b"\x92\xc4\x00\xc4\x00", Refusal.MALFORMED),
]


@pytest.mark.parametrize(("envelope", "why"), REFUSED_RECORDS)
def test_record_that_breaks_a_rule_is_refused_and_counted(envelope: bytes, why: Refusal) -> None:
    table = RecordTable()
    assert table.receive(envelope, now=later(1)) is why
    assert table.refused == {why: 1}
    assert table.live(now=later(1)) == []


MEASURED = {
    "round_trips": tuple(RoundTrip(bytes([number] * 8), 0.0123456) for number in range(8)),
    "coordinate": CoordinateRecord((0.012345, -0.023456, 0.034567), 0.004321, 0.123),
    "up_Bps": 1_234_567,
    "down_Bps": 12_345_678,
    "region": "eu-west",
    "price": 0.25,
}


def test_what_a_node_has_measured_is_told_in_a_record_of_about_a_kilobyte() -> None:
    public = {
        "data_addresses": ("198.51.100.23:4601", "[2001:db8:0:1:2:3:4:5]:4601"),
        "libp2p_addresses": ("/ip4/198.51.100.23/tcp/4600", "/ip6/2001:db8:0:1:2:3:4:5/tcp/4600"),
        "operator": "some volunteer",
    }
    envelope = record(**public, **MEASURED)

    opened = open_record(envelope, now=later(1))
    assert isinstance(opened, NodeRecord)
    assert {name: getattr(opened, name) for name in MEASURED} == MEASURED
    assert len(envelope) < 1024


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), -1.0, 1e12])
@pytest.mark.parametrize("where", ["speed", "queue", "round trip", "vector", "height", "error", "price"])
def test_a_number_that_is_none_or_beyond_its_bounds_makes_a_record_malformed(number: float, where: str) -> None:
    shard = RECORD.shards[0]
    changes: dict[str, Any] = {
        "speed": {"shards": (msgspec.structs.replace(shard, seconds_per_layer=(0.1, number, 0.1)),)},
        "queue": {"shards": (msgspec.structs.replace(shard, queue_s=number),)},
        "round trip": {"round_trips": (RoundTrip(b"12345678", number),)},
        "vector": {"coordinate": CoordinateRecord((0.0, 1e4 * number, 0.0), 0.0, 0.1)},
        "height": {"coordinate": CoordinateRecord((0.0, 0.0, 0.0), number, 0.1)},
        "error": {"coordinate": CoordinateRecord((0.0, 0.0, 0.0), 0.0, number)},
        "price": {"price": number},
    }
    assert open_record(record(**changes[where]), now=later(1)) is Refusal.MALFORMED


@pytest.mark.parametrize(
    "changes",
    [
        {"round_trips": (RoundTrip(b"1234567", 0.1),)},
        {"round_trips": (RoundTrip(b"12345678", 0.1),) * 17},
        {"coordinate": CoordinateRecord((0.0,) * 5, 0.0, 0.1)},
        {"up_Bps": -1},
        {"down_Bps": 2**53 + 1},
        {"region": "x" * 97},
    ],
)
def test_a_measured_field_of_the_wrong_shape_makes_a_record_malformed(changes: dict[str, Any]) -> None:
    assert open_record(record(**changes), now=later(1)) is Refusal.MALFORMED


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        (sign_plan(PLAN, INITIATOR), Refusal.WRONG_KEY),
        (plan(expires_at=NOW + 0.5), Refusal.EXPIRED),
        (plan(issued_at=NOW + 60, expires_at=NOW + 120), Refusal.FUTURE_DATED),
        (plan(expires_at=NOW + 25 * 3600), Refusal.LIFETIME_TOO_LONG),
        (plan(version=0), Refusal.WRONG_VERSION),
        (plan(stages=()), Refusal.MALFORMED),
        (plan(stages=PLAN.stages[::-1]), Refusal.MALFORMED),
        (plan(session=b"short"), Refusal.MALFORMED),
        (plan(max_positions=0), Refusal.MALFORMED),
        (group_plan(weights=()), Refusal.MALFORMED),
        (group_plan(weights=(1,)), Refusal.MALFORMED),
        (group_plan(weights=(1, 1, 1)), Refusal.MALFORMED),
        (group_plan(weights=(1, 0)), Refusal.MALFORMED),
        (group_plan(weights=(1, 1001)), Refusal.MALFORMED),
        (group_plan(members=()), Refusal.MALFORMED),
        (group_plan(members=MEMBERS[:1] * 2), Refusal.MALFORMED),
        (group_plan(members=MEMBERS[::-1]), Refusal.MALFORMED),  # the stage is named after its first one
        (group_plan(members=MEMBERS[:1] * 17, weights=(1,) * 17), Refusal.MALFORMED),
        (plan(numerics="x" * MAX_PLAN_BYTES), Refusal.OVERSIZED),
    ],
)
def test_plan_that_breaks_a_rule_is_refused(envelope: bytes, why: Refusal) -> None:
    assert open_plan(envelope, now=later(1)) is why


@pytest.mark.parametrize(
    ("envelope", "why"),
    [
        (sign_assignment(ASSIGNMENT, INITIATOR), Refusal.WRONG_KEY),
        (sign_plan(PLAN, RESPONDER), Refusal.MALFORMED),
        (_assignment(start=20), Refusal.MALFORMED),
        (_assignment(expires_at=NOW + 601.0), Refusal.LIFETIME_TOO_LONG),
        (_assignment(expires_at=NOW + 0.5), Refusal.EXPIRED),
        (_assignment(version=1), Refusal.WRONG_VERSION),
        (b"x" * 1025, Refusal.OVERSIZED),
    ],
)
def test_assignment_that_breaks_a_rule_is_refused(envelope: bytes, why: Refusal) -> None:
    assert open_assignment(envelope, now=later(1)) is why


def test_plan_says_whether_it_has_masks_and_without_them_is_what_it_was_before_there_were_any() -> None:
    for masks, last in ((False, PLAN.wire), (True, True)):
        envelope = sign_plan(msgspec.structs.replace(GROUP_PLAN, masks=masks), RESPONDER)
        body = msgspec.msgpack.decode(msgspec.msgpack.decode(envelope)[0])
        assert (len(body), body[-1]) == (12 + masks, last)
        opened = open_plan(envelope, now=later(1))
        assert opened == msgspec.structs.replace(GROUP_PLAN, masks=masks)


def test_places_of_a_stage_are_its_members_or_its_one_node() -> None:
    alone, group = PLAN.stages[0], GROUP_PLAN.stages[0]
    assert (alone.is_group, group.is_group) == (False, True)
    (place,) = alone.places
    assert (place.peer, dialled_at(place)) == (alone.peer, dialled_at(alone))
    assert group.places == MEMBERS
    assert dialled_at(MEMBERS[1]) == ("192.0.2.2:4001", "/ip4/192.0.2.2/tcp/4002", f"/p2p/{RESPONDER.peer_id}")
    opened = open_plan(group_plan(members=MEMBERS[:1], weights=(7,)), now=later(1))
    assert isinstance(opened, Plan)


def test_a_record_cannot_be_shown_as_a_plan_nor_a_plan_as_a_record() -> None:
    body = msgspec.msgpack.encode(PLAN)
    as_record = msgspec.msgpack.encode(SignedEnvelope(body, RESPONDER.sign(b"fusion-node/record/1:", body)))
    assert open_plan(as_record, now=later(1)) is Refusal.WRONG_KEY
    assert isinstance(open_record(sign_plan(PLAN, RESPONDER), now=later(1)), Refusal)


def test_replayed_record_is_refused_and_an_identical_copy_changes_nothing() -> None:
    table = RecordTable()
    older, newer = record(sequence=7), record(sequence=8)
    assert isinstance(table.receive(newer, now=later(1)), NodeRecord)
    assert isinstance(table.receive(newer, now=later(1)), NodeRecord)
    assert table.receive(older, now=later(1)) is Refusal.REPLAYED
    assert table.receive(record(sequence=8, num_sessions=9), now=later(1)) is Refusal.REPLAYED
    assert table.refused == {Refusal.REPLAYED: 2}
    assert [r.sequence for r in table.live(now=later(1))] == [8]
    assert table.envelope_of(INITIATOR.peer_id, now=later(1)) == newer


def test_no_write_can_silence_a_peer_for_longer_than_a_lifetime() -> None:
    """What unsigned records with free expiry allow: one write that outranks the victim for ten years."""
    table = RecordTable()
    assert (
        table.receive(record(sequence=2**53, expires_at=NOW + 10 * YEAR_S), now=later(1)) is Refusal.LIFETIME_TOO_LONG
    )
    assert isinstance(table.receive(record(sequence=1), now=later(1)), NodeRecord)
    assert isinstance(table.receive(record(sequence=2**53), now=later(1)), NodeRecord)
    table.expire(now=later(200))
    honest = record(sequence=2, issued_at=NOW + 200, expires_at=NOW + 260)
    assert isinstance(table.receive(honest, now=later(201)), NodeRecord)


def test_expired_record_is_neither_live_nor_passed_on() -> None:
    table = RecordTable()
    table.receive(record(), now=later(1))
    assert table.live(now=later(91)) == []
    assert table.envelope_of(INITIATOR.peer_id, now=later(91)) is None
    assert table.expire(now=later(91)) == [INITIATOR.peer_id]
    assert table.expire(now=later(91)) == []


def peer(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def of(number: int, *, sequence: int = 1, issued_s: float = 0.0, ttl_s: float = 60.0) -> bytes:
    """The record of one of many peers."""
    body = msgspec.structs.replace(
        RECORD,
        peer=peer(number).peer_id,
        sequence=sequence,
        issued_at=NOW + issued_s,
        expires_at=NOW + issued_s + ttl_s,
    )
    return sign_record(body, peer(number))


def give(table: RecordTable, numbers: Iterable[int], introducer: int | None, **changes: Any) -> list[Refusal]:
    """Brings records of these peers, and returns why some were refused."""
    by = None if introducer is None else peer(introducer).peer_id
    answers = [table.receive(of(n, **changes), now=later(1), introducer=by) for n in numbers]
    return [answer for answer in answers if isinstance(answer, Refusal)]


def held(table: RecordTable, numbers: Iterable[int]) -> list[int]:
    """Which of these the table holds."""
    live = {r.peer for r in table.live(now=later(1))}
    return [n for n in numbers if peer(n).peer_id in live]


def test_one_peer_introduces_no_more_than_its_quota() -> None:
    table = RecordTable(max_records=100, max_introduced=10)
    assert give(table, range(1, 13), 90) == [Refusal.CROWDED] * 2
    assert table.refused == {Refusal.CROWDED: 2}
    assert held(table, range(1, 13)) == list(range(1, 11))
    assert give(table, range(20, 30), 91) == []
    assert give(table, [90], 90) == []
    # What has expired leaves room again.
    assert isinstance(table.receive(of(50, issued_s=100), now=later(100), introducer=peer(90).peer_id), NodeRecord)


def test_flood_into_a_full_table_displaces_itself_whatever_its_dates() -> None:
    table = RecordTable(max_records=100, max_introduced=60)
    assert give(table, range(1, 21), 90) == []
    assert give(table, range(200, 260), 91, issued_s=25, ttl_s=120.0) == []
    refused = give(table, range(300, 360), 92, issued_s=25, ttl_s=120.0)
    assert set(refused) == {Refusal.CROWDED}
    assert held(table, range(1, 21)) == list(range(1, 21))
    # Who introduces few is heard even now.
    assert give(table, range(21, 26), 93) == []
    assert held(table, range(1, 26)) == list(range(1, 26))
    assert len(table.live(now=later(1))) == 100


def test_own_word_is_never_displaced_by_who_is_introduced() -> None:
    table = RecordTable(max_records=10, max_introduced=10)
    for n in range(1, 6):
        assert give(table, [n], n) == []
    assert give(table, range(20, 25), 90) == []
    assert set(give(table, range(30, 60), 91, ttl_s=120.0)) == {Refusal.CROWDED}
    assert held(table, range(1, 6)) == list(range(1, 6))
    for n in range(6, 11):
        assert give(table, [n], n) == []
    assert held(table, range(1, 60)) == list(range(1, 11))
    assert give(table, range(30, 60), 91) == [Refusal.CROWDED] * 30


def test_who_was_introduced_and_speaks_for_itself_stands_on_its_own_word() -> None:
    table = RecordTable(max_records=4, max_introduced=4)
    assert give(table, [1, 2, 3, 4], 90) == []
    assert give(table, [4], 4) == []
    assert give(table, [3], 3, sequence=2) == []
    # What others tell of it later does not change that.
    assert give(table, [3], 90, sequence=3) == []
    assert give(table, [5], 5) == []
    assert give(table, [6], 6) == []
    assert held(table, range(1, 7)) == [3, 4, 5, 6]


def test_table_full_of_own_words_forgets_the_one_that_was_silent_longest() -> None:
    table = RecordTable(max_records=3)
    for n in (1, 2, 3):
        assert give(table, [n], n) == []
    assert give(table, [1], 1) == []  # a heartbeat repeats the same record
    assert give(table, [2], 90, sequence=2) == []  # news of it, but not by it
    assert give(table, [4], 4) == []
    assert held(table, range(1, 5)) == [1, 3, 4]


def test_identical_copy_is_known_without_looking_at_its_signature() -> None:
    table = RecordTable()
    envelope = of(1)
    given = table.receive(envelope, now=later(1))
    assert table.receive(bytes(bytearray(envelope)), now=later(2)) is given
    # But not once it has expired.
    assert table.receive(envelope, now=later(61)) is Refusal.EXPIRED


def test_books_of_the_table_agree_with_what_it_holds() -> None:
    """Whatever comes in whatever order: the indices neither leak nor go astray."""
    chance = Random(11)
    table = RecordTable(max_records=12, max_introduced=6)
    for step in range(3000):
        now = later(step / 10)
        number = chance.randrange(40)
        by = chance.choice([None, number, *range(36, 40)])
        envelope = of(number, sequence=step // 20, issued_s=step // 20 * 2, ttl_s=chance.choice([5, 20, 60]))
        table.receive(envelope, now=now, introducer=None if by is None else peer(by).peer_id)
        books = table._introduced
        introduced = [p for peers in books._peers_of.values() for p in peers]
        assert sorted([*introduced, *table._own_words]) == sorted(table._held)
        assert len(table._held) <= 12
        assert table._peer_of == {h.envelope: p for p, h in table._held.items()}
        assert books.largest == max((len(peers) for peers in books._peers_of.values()), default=0) <= 6
        assert len(table._deadlines) <= 2 * 12 + 66
    table.expire(now=later(1000))
    assert (table._held, table._peer_of, table._own_words, table._introduced._of_size) == ({}, {}, {}, {})


def test_full_table_drops_the_expired_before_the_living() -> None:
    table = RecordTable(max_records=2)
    table.receive(record(), now=later(1))
    for n in (1, 2):
        identity = Identity.from_seed(bytes([n]) * 32)
        body = msgspec.structs.replace(RECORD, peer=identity.peer_id, issued_at=NOW + 90, expires_at=NOW + 150)
        table.receive(sign_record(body, identity), now=later(100))
    assert len(table.live(now=later(100))) == 2


@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert isinstance(open_record(data, now=later(1)), Refusal)
    assert isinstance(open_plan(data, now=later(1)), Refusal)


@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 4),
)
def test_mutated_envelopes_are_refused(changes: list[tuple[int, int]], cut: int) -> None:
    for envelope, opened in ((record(), open_record), (plan(), open_plan)):
        mutated = bytearray(envelope)
        for place, difference in changes:
            mutated[place % len(mutated)] ^= difference
        data = bytes(mutated[: len(mutated) - cut])
        if data != envelope:
            assert isinstance(opened(data, now=later(1)), Refusal)


@given(
    kind=st.sampled_from([NodeRecord, Plan]),
    which=st.integers(0, 12),
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=60) | st.binary(),
        lambda inner: st.lists(inner, max_size=3),
    ),
)
def test_any_value_in_any_field_with_a_valid_signature_is_handled(kind: Any, which: int, value: object) -> None:
    """A peer signs nonsense about itself: the answer is a value, never an exception."""
    base, identity, domain, opened = (
        (RECORD, INITIATOR, b"fusion-node/record/1:", open_record)
        if kind is NodeRecord
        else (PLAN, RESPONDER, b"fusion-node/plan/1:", open_plan)
    )
    fields = msgspec.to_builtins(base, builtin_types=(bytes,))
    fields[which % len(fields)] = value
    body = msgspec.msgpack.encode(fields)
    envelope = msgspec.msgpack.encode(SignedEnvelope(body, identity.sign(domain, body)))
    assert isinstance(opened(envelope, now=later(1)), Refusal | NodeRecord | Plan)


def test_a_node_behind_a_relay_is_also_dialled_over_whichever_connection_there_is() -> None:
    behind = msgspec.structs.replace(RECORD, data_addresses=(), libp2p_addresses=("/circuit",))
    assert dialled_at(behind) == ("/circuit", f"/p2p/{behind.peer}")
    assert dialled_at(msgspec.structs.replace(behind, libp2p_addresses=())) == (), "which would be no address at all"
