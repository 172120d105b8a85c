"""The record exchange, and discovery in one process over it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from fusion_node.errors import AddressInUse, LocalProtocolError, NoPeers
from fusion_node.types import ModelId, UnixS
from fusion_node.wire import WireError
from p2p.discovery import DiscoveryConfig, DiscoveryService
from p2p.identity import Identity
from p2p.memory_discovery import MemoryDiscovery, World
from p2p.record_exchange import (
    DIGEST_ENTRY_BYTES,
    MAX_ANSWER_BYTES,
    MAX_DIGEST_ENTRIES,
    MAX_RECORDS,
    ExchangeAnswer,
    ExchangeRequest,
    Received,
    RecordExchange,
)
from p2p.records import PROTOCOL_VERSION, NodeRecord, RecordTable, Refusal, ShardRecord, sign_record

MODEL, OTHER_MODEL = ModelId("ab" * 32), ModelId("cd" * 32)
SOURCE = Identity.from_seed(b"s" * 32).peer_id
BOOTSTRAP = f"/ip4/127.0.0.1/tcp/4600/p2p/{Identity.from_seed(b'z' * 32).peer_id}"


class Clock:
    def __init__(self) -> None:
        self.now = UnixS(1_800_000_000.0)

    def __call__(self) -> float:
        return self.now


def identity(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def record(
    number: int, now: UnixS, *, sequence: int = 1, models: tuple[ModelId, ...] = (MODEL,), software: str = "test"
) -> bytes:
    shards = tuple(ShardRecord(model, "tiny", 0, 10, 30, "f16r32", (0.001, 0.001, 0.001), 4096) for model in models)
    body = NodeRecord(
        PROTOCOL_VERSION, identity(number).peer_id, sequence, now, now + 60, (), (), "cpu", 0, shards, 0, software
    )
    return sign_record(body, identity(number))


async def started(world: World, clock: Clock, number: int, *bootstrap: str, port: int = 0) -> MemoryDiscovery:
    config = DiscoveryConfig((f"127.0.0.1:{port}",), bootstrap, mdns=False, serve=True)
    discovery = MemoryDiscovery(identity(number), config, world, clock=clock)
    await discovery.start()
    return discovery


def peers(records: list[NodeRecord]) -> set[str]:
    return {found.peer for found in records}


async def test_nodes_find_one_another_by_model() -> None:
    world, clock = World(), Clock()
    first: DiscoveryService = await started(world, clock, 1)
    second = await started(world, clock, 2, first.addresses[0])
    user = await started(world, clock, 3, first.invite)
    await first.announce(record(1, clock.now), [MODEL])
    await second.announce(record(2, clock.now, models=(OTHER_MODEL,)), [OTHER_MODEL])
    await user.wait_for_peer(1.0)
    assert user.num_peers == 2
    assert peers(await user.find(MODEL, timeout_s=1.0)) == {identity(1).peer_id}
    assert peers(await user.find(OTHER_MODEL, timeout_s=1.0)) == {identity(2).peer_id}
    assert peers(await user.find(None, timeout_s=1.0)) == {identity(1).peer_id, identity(2).peer_id}


async def test_withdrawn_node_is_not_found_even_by_who_knew_it() -> None:
    world, clock = World(), Clock()
    node, user = await started(world, clock, 1), await started(world, clock, 2, BOOTSTRAP)
    await node.announce(record(1, clock.now), [MODEL])
    assert await user.find(MODEL, timeout_s=1.0)
    await node.withdraw(record(1, clock.now, sequence=2, models=()))
    await node.aclose()
    assert await user.find(MODEL, timeout_s=1.0) == []
    assert await user.find(None, timeout_s=1.0) == []


async def test_killed_node_is_found_until_its_record_expires() -> None:
    world, clock = World(), Clock()
    node, user = await started(world, clock, 1), await started(world, clock, 2, BOOTSTRAP)
    await node.announce(record(1, clock.now), [MODEL])
    node.vanish()
    assert await user.find(MODEL, timeout_s=1.0)
    clock.now = UnixS(clock.now + 61)
    assert await user.find(MODEL, timeout_s=1.0) == []


async def test_peer_that_is_cut_off_knows_what_it_knew() -> None:
    world, clock = World(), Clock()
    node, user = await started(world, clock, 1), await started(world, clock, 2, BOOTSTRAP)
    world.partition(user._identity.peer_id)
    await node.announce(record(1, clock.now), [MODEL])
    assert await user.find(MODEL, timeout_s=1.0) == []
    assert user.num_peers == 0
    world.partition(user._identity.peer_id, cut_off=False)
    assert await user.find(MODEL, timeout_s=1.0)


async def test_waiting_for_a_peer_without_any_names_what_was_tried() -> None:
    world, clock = World(), Clock()
    alone = await started(world, clock, 1)
    with pytest.raises(NoPeers, match="--peer"):
        await alone.wait_for_peer(10.0)
    with pytest.raises(NoPeers, match=BOOTSTRAP):
        await (await started(World(), clock, 2, BOOTSTRAP)).wait_for_peer(0.0)


async def test_port_that_is_taken_is_refused() -> None:
    world, clock = World(), Clock()
    await started(world, clock, 1, port=4600)
    with pytest.raises(AddressInUse, match="4600"):
        await started(world, clock, 2, port=4600)


async def test_record_that_others_would_refuse_cannot_be_announced() -> None:
    clock = Clock()
    node = await started(World(), clock, 1)
    await node.announce(record(1, clock.now, sequence=5), [MODEL])
    for bad in (record(2, clock.now), record(1, UnixS(clock.now - 100), sequence=6), record(1, clock.now), b"nonsense"):
        with pytest.raises(LocalProtocolError):
            await node.announce(bad, [MODEL])


def exchange_with(*envelopes: bytes, now: UnixS, own: bytes | None = None) -> RecordExchange:
    exchange = RecordExchange(RecordTable(max_introduced=20_000), Random(7))
    for envelope in envelopes:
        assert isinstance(exchange.table.receive(envelope, now=now), NodeRecord)
    if own is not None:
        exchange.set_own(own, now=now)
    return exchange


def test_answer_has_the_own_record_first_then_the_model_then_tombstones() -> None:
    now = Clock().now
    exchange = exchange_with(
        record(2, UnixS(now - 20)),
        record(3, UnixS(now - 10)),
        record(4, UnixS(now - 5), models=()),
        record(5, now, models=(OTHER_MODEL,)),
        own=record(1, UnixS(now - 30), models=(OTHER_MODEL,)),
        now=now,
    )
    asker = RecordExchange(RecordTable(), Random(7))
    first = exchange.answer(asker.request(MODEL, limit=10, now=now), source=SOURCE, now=now)
    received = asker.receive(first, source=SOURCE, now=now).accepted
    assert [r.peer for r in received[:1] + received[3:]] == [identity(n).peer_id for n in (1, 4)]
    assert peers(received[1:3]) == {identity(2).peer_id, identity(3).peer_id}
    assert peers(asker.serving(MODEL, now=now)) == {identity(2).peer_id, identity(3).peer_id}
    newcomer = RecordExchange(RecordTable(), Random(7))
    limited = exchange.answer(newcomer.request(MODEL, limit=2, now=now), source=SOURCE, now=now)
    assert len(newcomer.receive(limited, source=SOURCE, now=now).accepted) == 2


def dated(number: int, issued_at: float, models: tuple[ModelId, ...], shards_each: int = 1) -> bytes:
    """A record of a flood: dated as far ahead as is allowed, and as long-lived."""
    shard = [ShardRecord(model, "tiny" * 24, 0, 10, 30, "f16r32" * 16, (0.001, 0.001, 0.001), 4096) for model in models]
    shards = tuple(shard * shards_each)
    peer = identity(number)
    return sign_record(
        NodeRecord(PROTOCOL_VERSION, peer.peer_id, 1, issued_at, issued_at + 120, (), (), "cpu", 0, shards, 0, "flood"),
        peer,
    )


def seen_through_a_flood(flood: Sequence[bytes]) -> int:
    """How many of 40 honest nodes a newcomer learns from one answer of a peer that knows the flood, too."""
    now = Clock().now
    honest = range(1, 41)
    exchange = exchange_with(*(record(n, UnixS(now - 20)) for n in honest), *flood, now=now)
    asker = RecordExchange(RecordTable(), Random(7))
    answer = exchange.answer(asker.request(MODEL, limit=MAX_RECORDS, now=now), source=SOURCE, now=now)
    asker.receive(answer, source=SOURCE, now=now)
    return len(peers(asker.serving(MODEL, now=now)) & {identity(n).peer_id for n in honest})


def test_flood_of_tombstones_hides_nobody() -> None:
    assert seen_through_a_flood([dated(n, Clock().now + 29, ()) for n in range(1000, 1400)]) == 40


def test_flood_of_records_dated_ahead_leaves_the_honest_their_chance() -> None:
    assert seen_through_a_flood([dated(n, Clock().now + 29, (MODEL,)) for n in range(1000, 1400)]) > 10


def test_flood_of_large_records_takes_no_room_from_small_ones() -> None:
    flood = [dated(n, Clock().now + 29, (MODEL,), shards_each=32) for n in range(1000, 1400)]
    assert len(flood[0]) > 8000
    assert seen_through_a_flood(flood) > 10


def test_newest_node_is_in_the_answer_of_who_knows_many() -> None:
    now = Clock().now
    exchange = exchange_with(*(record(n, UnixS(now - 20)) for n in range(1, 500)), record(500, now), now=now)
    asker = RecordExchange(RecordTable(), Random(7))
    received = asker.receive(
        exchange.answer(asker.request(MODEL, limit=MAX_RECORDS, now=now), source=SOURCE, now=now),
        source=SOURCE,
        now=now,
    ).accepted
    assert len(received) == MAX_RECORDS
    assert identity(500).peer_id in peers(received)


def test_share_of_tombstones_is_in_the_answer_of_who_knows_many() -> None:
    now = Clock().now
    left = [record(n, now, models=()) for n in range(1000, 1010)]
    exchange = exchange_with(*(record(n, now) for n in range(1, 500)), *left, now=now)
    asker = RecordExchange(RecordTable(), Random(7))
    received = asker.receive(
        exchange.answer(asker.request(MODEL, limit=MAX_RECORDS, now=now), source=SOURCE, now=now),
        source=SOURCE,
        now=now,
    ).accepted
    assert sum(not r.shards for r in received) == 10


def test_own_record_that_has_expired_is_not_pushed() -> None:
    now = Clock().now
    exchange = exchange_with(own=record(1, now), now=now)

    def pushed(now: UnixS) -> int:
        return len(msgspec.msgpack.decode(exchange.request(None, limit=0, now=now), type=ExchangeRequest).pushed)

    assert (pushed(now), pushed(UnixS(now + 61))) == (1, 0)


def test_answer_is_bounded_in_bytes() -> None:
    now = Clock().now
    models = tuple(ModelId(f"{n:064x}") for n in range(32))
    exchange = exchange_with(*(record(n, now, models=models) for n in range(1, MAX_RECORDS + 10)), now=now)
    answer = exchange.answer(
        RecordExchange(RecordTable(), Random(7)).request(None, limit=MAX_RECORDS, now=now), source=SOURCE, now=now
    )
    assert MAX_ANSWER_BYTES - 8192 < len(answer) <= MAX_ANSWER_BYTES


def test_pushed_records_are_taken_and_forged_ones_are_counted() -> None:
    now = Clock().now
    exchange = exchange_with(now=now)
    forged = bytearray(record(2, now))
    forged[-1] ^= 1
    request = msgspec.msgpack.encode(ExchangeRequest(2, (record(1, now), bytes(forged)), None, 0))
    answer = msgspec.msgpack.decode(exchange.answer(request, source=SOURCE, now=now), type=ExchangeAnswer)
    assert answer.records == ()
    assert peers(exchange.serving(None, now=now)) == {identity(1).peer_id}
    assert exchange.table.refused == {Refusal.WRONG_KEY: 1}


def pulled(asker: RecordExchange, answerer: RecordExchange, now: UnixS, *, limit: int = MAX_RECORDS) -> Received:
    answer = answerer.answer(asker.request(MODEL, limit=limit, now=now), source=SOURCE, now=now)
    return asker.receive(answer, source=SOURCE, now=now, limit=limit)


def test_answer_holds_only_what_is_missing_or_newer() -> None:
    now = Clock().now
    asker = exchange_with(*(record(n, now, sequence=5) for n in (1, 2, 3, 4)), now=now)
    answerer = exchange_with(
        record(1, now, sequence=5),
        record(2, now, sequence=4),
        record(3, now, sequence=6),
        record(4, now, sequence=6, models=()),
        record(5, now, sequence=1),
        own=record(6, now),
        now=now,
    )
    received = pulled(asker, answerer, now)
    assert [(r.peer, r.sequence) for r in received.accepted[:1]] == [(identity(6).peer_id, 1)]
    assert peers(received.accepted) == {identity(n).peer_id for n in (3, 4, 5, 6)}
    assert (received.num_known, received.num_shared, received.answered_at) == (5, 3, now)
    assert pulled(asker, answerer, now).accepted == []


def test_sequence_far_above_the_digests_32_bits_is_newer() -> None:
    now = Clock().now
    asker = exchange_with(record(1, now, sequence=2**40 - 1), now=now)
    answerer = exchange_with(record(1, now, sequence=2**40 + 1), now=now)
    assert [r.sequence for r in pulled(asker, answerer, now).accepted] == [2**40 + 1]


def test_tombstones_of_nodes_that_the_asker_believes_in_come_first() -> None:
    now = Clock().now
    asker = exchange_with(*(record(n, now) for n in range(1, 5)), now=now)
    left = [record(n, now, sequence=2, models=()) for n in range(1, 1000)]
    received = pulled(asker, exchange_with(*left, now=now), now)
    assert {identity(n).peer_id for n in range(1, 5)} <= peers(received.accepted)
    assert len(received.accepted) == MAX_RECORDS // 8


def test_table_above_the_digest_is_reconciled_part_by_part() -> None:
    now = Clock().now
    known = [record(n, now) for n in range(1, 2 * MAX_DIGEST_ENTRIES)]
    asker = exchange_with(*known, now=now)
    request = msgspec.msgpack.decode(asker.request(MODEL, limit=1, now=now), type=ExchangeRequest)
    assert request.digest is not None
    assert len(request.digest.entries) <= MAX_DIGEST_ENTRIES * DIGEST_ENTRY_BYTES
    answerer = exchange_with(*known, *(record(n, now) for n in range(5000, 5010)), now=now)
    received = [pulled(asker, answerer, now) for _ in range(20)]
    # Only what is missing came, and by now all of it: 20 parts, each of about half of the peers.
    assert sum(len(one.accepted) for one in received) == 10
    assert all(one.num_shared <= MAX_DIGEST_ENTRIES for one in received)


def test_answer_to_a_push_tells_nothing_but_the_time() -> None:
    now = Clock().now
    answerer = exchange_with(record(1, now), own=record(2, now), now=now)
    received = pulled(exchange_with(now=now), answerer, now, limit=0)
    assert (received.accepted, received.num_known, received.answered_at) == ([], 0, now)


def test_more_records_than_were_asked_for_are_refused() -> None:
    now = Clock().now
    asker, answerer = exchange_with(now=now), exchange_with(record(1, now), record(2, now), now=now)
    answer = answerer.answer(asker.request(MODEL, limit=2, now=now), source=SOURCE, now=now)
    with pytest.raises(WireError):
        asker.receive(answer, source=SOURCE, now=now, limit=1)


@pytest.mark.parametrize(
    "request_",
    [
        [1, [], None, 0],
        [2, [b"x"] * 5, None, 0],
        [2, [b"x" * 20_000], None, 0],
        [2, [], "not a model", 0],
        [2, [], None, MAX_RECORDS + 1],
        [2, [], None, -1],
        [2, "text", None, 0],
        [2, [], None, 9, [b"short", 2**32, b""]],
        [2, [], None, 9, [b"8 bytes.", 2**32 + 1, b""]],
        [2, [], None, 9, [b"8 bytes.", 2**32, b"no whole entry"]],
        [2, [], None, 9, [b"8 bytes.", 2**32, bytes(DIGEST_ENTRY_BYTES * (MAX_DIGEST_ENTRIES + 1))]],
        "text",
    ],
)
def test_malformed_request_is_refused(request_: object) -> None:
    with pytest.raises(WireError):
        exchange_with(now=Clock().now).answer(msgspec.msgpack.encode(request_), source=SOURCE, now=Clock().now)


def test_malformed_answer_is_refused() -> None:
    exchange = exchange_with(now=Clock().now)
    for answer in ([1, [], 0.0], [2, [b"x"] * (MAX_RECORDS + 1), 0.0], [2, [b"x" * 20_000], 0.0], [2, []], 7):
        with pytest.raises(WireError):
            exchange.receive(msgspec.msgpack.encode(answer), source=SOURCE, now=Clock().now)
    with pytest.raises(WireError):
        exchange.receive(b"\x00" * (MAX_ANSWER_BYTES + 1), source=SOURCE, now=Clock().now)
