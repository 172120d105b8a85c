"""Core of ``/fusion/records/1``: one request, one answer, both of signed records.

A request pushes the records that the sender vouches for being new (usually its own), and asks for those of nodes that
serve a model, or of all nodes. The answer holds the answerer's own record first, then others, bounded in number and
bytes: all of them if they fit, or else some of the newest and the rest by chance, because whoever signs many records
also dates them, and could have the whole answer if dates decided. A record without shards is a *tombstone*: its node
has left. Who still holds the record before must learn of it, so tombstones have a share of every answer; it is small
and comes last, because they cost a liar as little as any other record.

Guarantees: everything received passes RecordTable, so nothing unsigned, expired or outdated is kept or passed on.
Assumes: what arrives was bounded by the transport to MAX_REQUEST_BYTES or MAX_ANSWER_BYTES. No I/O, no clock; the
source of chance is handed in, and one that strangers cannot foretell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import msgspec

from fusion_node.types import ModelId, PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.records import MAX_RECORD_BYTES, ModelText, NodeRecord, RecordTable, Refusal, open_record

if TYPE_CHECKING:
    from random import Random

PROTOCOL_ID = "/fusion/records/1"
EXCHANGE_VERSION = 1
MAX_PUSHED = 4
MAX_REQUEST_BYTES = MAX_PUSHED * MAX_RECORD_BYTES + 1024
MAX_RECORDS = 256
MAX_ANSWER_BYTES = 512 * 1024
"""A record of one shard is about 600 bytes: 256 of them take 150 KiB."""

TOMBSTONE_SHARE = 1 / 8
"""Of the records of an answer: 32 departures within the minute for which the record before is still believed."""

NEWEST_SHARE = 1 / 4
"""Of the places that are left: the nodes that have just come are found soon, and a flood leaves three quarters."""

_OVERHEAD_BYTES = 64
"""Of the answer's own arrays, and 5 per record are counted with it."""

T = TypeVar("T")

Envelope: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]


class ExchangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """``model_id`` None asks for all nodes; ``limit`` 0 asks for none, and makes the exchange a heartbeat."""

    version: int
    pushed: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_PUSHED)]
    model_id: ModelText | None
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORDS)]


class ExchangeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Signed records, the answerer's own first."""

    version: int
    records: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_RECORDS)]


def serves(record: NodeRecord, model_id: ModelId | None) -> bool:
    """Whether the node holds a shard of the model, or of any model when it is None. False for a tombstone."""
    return any(model_id is None or shard.model_id == model_id for shard in record.shards)


class RecordExchange:
    """One participant: its table, its own record, and its source of chance."""

    def __init__(self, table: RecordTable, chance: Random) -> None:
        self.table = table
        self._chance = chance
        self.own_envelope: bytes | None = None
        self._own_peer: str | None = None

    def set_own(self, envelope: bytes, *, now: UnixS) -> NodeRecord | Refusal:
        """Takes a new record of one's own; one that others would refuse is refused here too."""
        record = open_record(envelope, now=now)
        if isinstance(record, NodeRecord):
            record = self.table.receive(envelope, now=now, introducer=PeerId(record.peer))
        if isinstance(record, NodeRecord):
            self.own_envelope, self._own_peer = envelope, record.peer
        return record

    def request(self, model_id: ModelId | None, *, limit: int, now: UnixS) -> bytes:
        """Encodes a request that pushes the own record, if it is still live."""
        own = None if self._own_peer is None else self.table.envelope_of(self._own_peer, now=now)
        pushed = () if own is None else (own,)
        return msgspec.msgpack.encode(ExchangeRequest(EXCHANGE_VERSION, pushed, model_id, limit))

    def answer(self, request: bytes, *, source: PeerId, now: UnixS) -> bytes:
        """Takes what ``source`` pushed and encodes the answer.

        Raises:
            WireError: the request is malformed, oversized or of another version.
        """
        asked = decode_bounded(request, ExchangeRequest, limit_bytes=MAX_REQUEST_BYTES)
        _check_version(asked.version)
        for envelope in asked.pushed:
            self.table.receive(envelope, now=now, introducer=source)
        wanted = self._wanted(None if asked.model_id is None else ModelId(asked.model_id), asked.limit, now)
        return msgspec.msgpack.encode(ExchangeAnswer(EXCHANGE_VERSION, tuple(wanted)))

    def receive(self, answer: bytes, *, source: PeerId, now: UnixS) -> list[NodeRecord]:
        """Takes the records of an answer by ``source``, and returns those that were accepted.

        Raises:
            WireError: the answer is malformed, oversized or of another version.
        """
        given = decode_bounded(answer, ExchangeAnswer, limit_bytes=MAX_ANSWER_BYTES)
        _check_version(given.version)
        received = [self.table.receive(envelope, now=now, introducer=source) for envelope in given.records]
        return [record for record in received if isinstance(record, NodeRecord)]

    def serving(self, model_id: ModelId | None, *, now: UnixS) -> list[NodeRecord]:
        """The live records of nodes that serve the model, by peer id."""
        return [record for record in self.table.live(now=now) if serves(record, model_id)]

    def _wanted(self, model_id: ModelId | None, limit: int, now: UnixS) -> list[bytes]:
        if limit == 0:
            return []
        own = None if self._own_peer is None else self.table.envelope_of(self._own_peer, now=now)
        serving: list[tuple[float, bytes]] = []
        tombstones: list[bytes] = []
        for record, envelope in self.table.signed(now=now):
            if record.peer == self._own_peer:
                continue
            if serves(record, model_id):
                # A date that is still to come is no newer than now.
                serving.append((min(record.issued_at, now), envelope))
            elif not record.shards:
                tombstones.append(envelope)
        room = limit - (own is not None)
        tombstones = self._some(tombstones, int(room * TOMBSTONE_SHARE))
        chosen = self._choose(serving, room - len(tombstones))
        return _fit([*(() if own is None else (own,)), *chosen, *tombstones])

    def _choose(self, dated: list[tuple[float, bytes]], at_most: int) -> list[bytes]:
        self._chance.shuffle(dated)  # among equal dates, too, chance decides
        dated.sort(key=lambda item: -item[0])
        num_newest = len(dated) if len(dated) <= at_most else int(at_most * NEWEST_SHARE)
        newest, rest = dated[:num_newest], dated[num_newest:]
        chosen = [envelope for _, envelope in newest + self._some(rest, at_most - num_newest)]
        # What does not fit in is at the expense of those who take most room.
        return sorted(chosen, key=len)

    def _some(self, items: list[T], at_most: int) -> list[T]:
        return self._chance.sample(items, min(at_most, len(items)))


def _fit(envelopes: Sequence[bytes]) -> list[bytes]:
    fitting: list[bytes] = []
    room_bytes = MAX_ANSWER_BYTES - _OVERHEAD_BYTES
    for envelope in envelopes:
        size = len(envelope) + 5
        if size <= room_bytes:
            room_bytes -= size
            fitting.append(envelope)
    return fitting


def _check_version(version: int) -> None:
    if version != EXCHANGE_VERSION:
        raise WireError(f"record exchange of version {version}, not {EXCHANGE_VERSION}")
