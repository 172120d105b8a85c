"""Core of ``/fusion/records/1``: one request, one answer, both of signed records.

A request pushes the records that the sender vouches for being new (usually its own), and asks for those of nodes that
serve a model, or of all nodes. The answer holds the answerer's own record first, then the newest others, bounded in
number and bytes. A record without shards is a *tombstone*: its node has left. Tombstones are part of every answer until
they expire, because who still holds the record before must learn of them.

Guarantees: everything received passes RecordTable, so nothing unsigned, expired or outdated is kept or passed on.
Assumes: what arrives was bounded by the transport to MAX_REQUEST_BYTES or MAX_ANSWER_BYTES. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from fusion_node.types import ModelId, PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.records import MAX_RECORD_BYTES, ModelText, NodeRecord, RecordTable, Refusal

PROTOCOL_ID = "/fusion/records/1"
EXCHANGE_VERSION = 1
MAX_PUSHED = 4
MAX_REQUEST_BYTES = MAX_PUSHED * MAX_RECORD_BYTES + 1024
MAX_RECORDS = 256
MAX_ANSWER_BYTES = 512 * 1024
"""A record of one shard is about 600 bytes: 256 of them take 150 KiB."""

_OVERHEAD_BYTES = 64
"""Of the answer's own arrays, and 5 per record are counted with it."""

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
    """One participant: its table, and its own record."""

    def __init__(self, table: RecordTable) -> None:
        self.table = table
        self.own_envelope: bytes | None = None
        self._own_peer: str | None = None

    def set_own(self, envelope: bytes, *, now: UnixS) -> NodeRecord | Refusal:
        """Takes a new record of one's own; one that others would refuse is refused here too."""
        record = self.table.receive(envelope, now=now)
        if isinstance(record, NodeRecord):
            self.own_envelope, self._own_peer = envelope, record.peer
        return record

    def request(self, model_id: ModelId | None, *, limit: int, now: UnixS) -> bytes:
        """Encodes a request that pushes the own record, if it is still live."""
        own = None if self._own_peer is None else self.table.envelope_of(self._own_peer, now=now)
        pushed = () if own is None else (own,)
        return msgspec.msgpack.encode(ExchangeRequest(EXCHANGE_VERSION, pushed, model_id, limit))

    def answer(self, request: bytes, *, now: UnixS) -> bytes:
        """Takes what was pushed and encodes the answer.

        Raises:
            WireError: the request is malformed, oversized or of another version.
        """
        asked = decode_bounded(request, ExchangeRequest, limit_bytes=MAX_REQUEST_BYTES)
        _check_version(asked.version)
        for envelope in asked.pushed:
            self.table.receive(envelope, now=now)
        wanted = self._wanted(None if asked.model_id is None else ModelId(asked.model_id), asked.limit, now)
        return msgspec.msgpack.encode(ExchangeAnswer(EXCHANGE_VERSION, tuple(wanted)))

    def receive(self, answer: bytes, *, now: UnixS) -> list[NodeRecord]:
        """Takes the records of an answer, and returns those that were accepted.

        Raises:
            WireError: the answer is malformed, oversized or of another version.
        """
        given = decode_bounded(answer, ExchangeAnswer, limit_bytes=MAX_ANSWER_BYTES)
        _check_version(given.version)
        received = [self.table.receive(envelope, now=now) for envelope in given.records]
        return [record for record in received if isinstance(record, NodeRecord)]

    def serving(self, model_id: ModelId | None, *, now: UnixS) -> list[NodeRecord]:
        """The live records of nodes that serve the model, by peer id."""
        return [record for record in self.table.live(now=now) if serves(record, model_id)]

    def _wanted(self, model_id: ModelId | None, limit: int, now: UnixS) -> list[bytes]:
        wanted = [
            r for r in self.table.live(now=now) if not r.shards or serves(r, model_id) or r.peer == self._own_peer
        ]
        wanted.sort(key=lambda r: (r.peer != self._own_peer, -r.issued_at))
        return _fit([self.table.envelope_of(PeerId(r.peer), now=now) for r in wanted[:limit]])


def _fit(envelopes: Sequence[bytes | None]) -> list[bytes]:
    fitting: list[bytes] = []
    room_bytes = MAX_ANSWER_BYTES - _OVERHEAD_BYTES
    for envelope in envelopes:
        if envelope is None:
            continue
        room_bytes -= len(envelope) + 5
        if room_bytes < 0:
            break
        fitting.append(envelope)
    return fitting


def _check_version(version: int) -> None:
    if version != EXCHANGE_VERSION:
        raise WireError(f"record exchange of version {version}, not {EXCHANGE_VERSION}")
