"""Answers of the record exchange out of a large table: what they cost, and how they are chosen."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from fusion_node.types import ModelId, PeerId, UnixS
from p2p.record_exchange import (
    EXCHANGE_VERSION,
    MAX_RECORDS,
    NEWEST_SHARE,
    TOMBSTONE_SHARE,
    ExchangeAnswer,
    ExchangeRequest,
    RecordExchange,
)
from p2p.records import PROTOCOL_VERSION, HeldRecord, NodeRecord, RecordTable, Refusal, ShardRecord

NOW = UnixS(1_800_000_000.0)
MODEL = ModelId("ab" * 32)
OTHER = ModelId("cd" * 32)
SHARD = ShardRecord(MODEL, "tiny", 0, 10, 30, "f16r32", (0.001, 0.001, 0.001), 4096)
ASKER = PeerId("asker")


class Counting(RecordTable):
    """Counts the records that are looked at. Envelopes are not signed here."""

    def __init__(self) -> None:
        super().__init__(max_introduced=10**6, opener=self._open)
        self.num_touched = 0

    def held_of(self, peer: str) -> HeldRecord:
        self.num_touched += 1
        return super().held_of(peer)

    def add(self, number: int, *models: ModelId, age_s: float = 1.0, is_gone: bool = False, sequence: int = 1) -> bytes:
        shards = tuple(msgspec.structs.replace(SHARD, model_id=model) for model in models or (MODEL,))
        peer, shards = f"12D3KooW{number:044d}", () if is_gone else shards
        record = NodeRecord(
            PROTOCOL_VERSION, peer, sequence, NOW - age_s, NOW + 60, (), (), "cpu", 0, shards, 0, f"{age_s}"
        )  # fmt: skip
        envelope = msgspec.msgpack.encode(record)
        assert self.receive(envelope, now=NOW) == record
        return envelope

    @staticmethod
    def _open(envelope: bytes, now: UnixS) -> NodeRecord | Refusal:
        return msgspec.msgpack.decode(envelope, type=NodeRecord)


def answer(table: RecordTable, model_id: ModelId | None = None, *, seed: int = 1) -> list[NodeRecord]:
    request = msgspec.msgpack.encode(ExchangeRequest(EXCHANGE_VERSION, (), model_id, MAX_RECORDS))
    reply = RecordExchange(table, Random(seed)).answer(request, source=ASKER, now=NOW)
    given = msgspec.msgpack.decode(reply, type=ExchangeAnswer).records
    return [msgspec.msgpack.decode(envelope, type=NodeRecord) for envelope in given]


@pytest.mark.parametrize("model_id", [None, MODEL])
def test_no_more_records_are_touched_than_are_sent(model_id: ModelId | None) -> None:
    table = Counting()
    for number in range(3000):
        table.add(number, *((MODEL, OTHER) if number % 2 else ()), is_gone=number % 3 == 0)
    given = answer(table, model_id)
    assert len(given) == MAX_RECORDS
    assert table.num_touched == MAX_RECORDS
    assert sum(not record.shards for record in given) == int(MAX_RECORDS * TOMBSTONE_SHARE)


def test_some_are_the_newest_and_the_rest_are_there_by_chance() -> None:
    table = Counting()
    for number in range(3000):
        table.add(number, age_s=1.0 + number)
    num_newest = int(MAX_RECORDS * NEWEST_SHARE)
    answers = [answer(table, seed=seed) for seed in (1, 2)]
    for given in answers:
        ages = sorted(NOW - record.issued_at for record in given)
        assert ages[:num_newest] == [1.0 + number for number in range(num_newest)]
        assert sum(age > 1500 for age in ages) > MAX_RECORDS / 4
    peers = [{record.peer for record in given} for given in answers]
    assert len(peers[0] & peers[1]) < MAX_RECORDS / 2


def test_a_date_that_is_still_to_come_is_no_newer_than_now() -> None:
    table = Counting()
    for number in range(2000):
        table.add(number, age_s=-20.0 if number < 200 else 0.0)
    ahead = sum(record.issued_at > NOW for record in answer(table))
    assert ahead < MAX_RECORDS / 4  # a tenth, by chance; all places of the newest would be a quarter


def test_whatever_fits_is_sent_whole() -> None:
    table = Counting()
    sent = {table.add(number) for number in range(100)}
    assert {msgspec.msgpack.encode(record) for record in answer(table)} == sent


def test_who_serves_several_models_is_found_by_each_until_it_does_not() -> None:
    table = Counting()
    for number in range(20):
        table.add(number, MODEL, OTHER)
    for number in range(20, 30):
        table.add(number, OTHER)
    table.add(3, MODEL, sequence=2)
    table.add(4, OTHER, sequence=2)
    table.add(5, is_gone=True, sequence=2)
    table.columns.remove(f"12D3KooW{0:044d}")  # the last row takes its place

    def found(model_id: ModelId) -> set[int]:
        return {int(record.peer[8:]) for record in answer(table, model_id) if record.shards}

    assert found(MODEL) == set(range(1, 20)) - {4, 5}
    assert found(OTHER) == set(range(1, 30)) - {3, 5}
    for number in range(1, 30):
        table.columns.remove(f"12D3KooW{number:044d}")
    assert not table.columns._peers_of
    assert not table.columns._several_of
