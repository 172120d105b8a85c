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
    MAX_ANSWER_BYTES,
    MAX_RECORDS,
    ExchangeAnswer,
    ExchangeRequest,
    RecordExchange,
)
from p2p.records import NodeRecord, RecordTable, Refusal, ShardRecord, sign_record

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
    shards = tuple(ShardRecord(model, "tiny", 0, 10, 30, "f16r32", 0.001, 4096) for model in models)
    body = NodeRecord(1, identity(number).peer_id, sequence, now, now + 60, (), (), "cpu", 0, shards, 0, software)
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
    exchange = RecordExchange(RecordTable(), Random(7))
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
    received = asker.receive(
        exchange.answer(asker.request(MODEL, limit=10, now=now), source=SOURCE, now=now), source=SOURCE, now=now
    )
    assert [r.peer for r in received[:1] + received[3:]] == [identity(n).peer_id for n in (1, 4)]
    assert peers(received[1:3]) == {identity(2).peer_id, identity(3).peer_id}
    assert peers(asker.serving(MODEL, now=now)) == {identity(2).peer_id, identity(3).peer_id}
    limited = exchange.answer(asker.request(MODEL, limit=2, now=now), source=SOURCE, now=now)
    assert len(asker.receive(limited, source=SOURCE, now=now)) == 2


def dated(number: int, issued_at: float, models: tuple[ModelId, ...], shards_each: int = 1) -> bytes:
    """A record of a flood: dated as far ahead as is allowed, and as long-lived."""
    shard = [ShardRecord(model, "tiny" * 24, 0, 10, 30, "f16r32" * 16, 0.001, 4096) for model in models]
    shards = tuple(shard * shards_each)
    peer = identity(number)
    return sign_record(
        NodeRecord(1, peer.peer_id, 1, issued_at, issued_at + 120, (), (), "cpu", 0, shards, 0, "flood"), peer
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
    )
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
    )
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
    request = msgspec.msgpack.encode(ExchangeRequest(1, (record(1, now), bytes(forged)), None, 0))
    answer = msgspec.msgpack.decode(exchange.answer(request, source=SOURCE, now=now), type=ExchangeAnswer)
    assert answer.records == ()
    assert peers(exchange.serving(None, now=now)) == {identity(1).peer_id}
    assert exchange.table.refused == {Refusal.WRONG_KEY: 1}


@pytest.mark.parametrize(
    "request_",
    [
        [2, [], None, 0],
        [1, [b"x"] * 5, None, 0],
        [1, [b"x" * 20_000], None, 0],
        [1, [], "not a model", 0],
        [1, [], None, MAX_RECORDS + 1],
        [1, [], None, -1],
        [1, "text", None, 0],
        "text",
    ],
)
def test_malformed_request_is_refused(request_: object) -> None:
    with pytest.raises(WireError):
        exchange_with(now=Clock().now).answer(msgspec.msgpack.encode(request_), source=SOURCE, now=Clock().now)


def test_malformed_answer_is_refused() -> None:
    exchange = exchange_with(now=Clock().now)
    for answer in ([2, []], [1, [b"x"] * (MAX_RECORDS + 1)], [1, [b"x" * 20_000]], 7):
        with pytest.raises(WireError):
            exchange.receive(msgspec.msgpack.encode(answer), source=SOURCE, now=Clock().now)
    with pytest.raises(WireError):
        exchange.receive(b"\x00" * (MAX_ANSWER_BYTES + 1), source=SOURCE, now=Clock().now)
