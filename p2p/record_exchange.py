"""Core of ``/fusion/records/2``: one request, one answer, both of signed records; what the asker has is left out.

A request pushes the records that the sender vouches for being new (usually its own), and asks for those of nodes that
serve a model, or of all nodes. It carries a *digest* of those that the asker has: the answer holds what is missing
there or newer here, the answerer's own record first, then others, bounded in number and bytes: all of them if they
fit, or else some of the newest and the rest by chance, because whoever signs many records also dates them, and could
have the whole answer if dates decided. A record without shards is a *tombstone*: its node has left. Who still holds the
record before must learn of it, so tombstones have a share of every answer; it is small and comes last, because they
cost a liar as little as any other record. Those of nodes that the asker believes to be there come before the others.

The digest is a list of (32 bits for the peer, low 32 bits of its sequence). The 32 bits are ``(key * salt) >> 32`` with
a hash of the peer id as key and an odd salt that is drawn for each request: multiply-shift hashing (Dietzfelbinger et
al., "A Reliable Randomized Algorithm for the Closest-Pair Problem", 1997), by which two given peers collide in one of
2^31 requests, whoever made their ids. Sequences are compared as serial numbers (RFC 1982). A table that is larger than
a digest asks for a part of all peers at a time: those whose 32 bits are below a bound. Every salt cuts another part.

Guarantees: everything received passes RecordTable, so nothing unsigned, expired or outdated is kept or passed on.
Assumes: what arrives was bounded by the transport to MAX_REQUEST_BYTES or MAX_ANSWER_BYTES. No I/O, no clock; the
source of chance is handed in, and one that strangers cannot foretell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import numpy as np

from fusion_node.types import ModelId, PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.record_columns import Flags, Indices, Numbers
from p2p.records import MAX_RECORD_BYTES, ModelText, NodeRecord, RecordTable, Refusal, Time, claim_of

if TYPE_CHECKING:
    from random import Random

PROTOCOL_ID = "/fusion/records/2"
EXCHANGE_VERSION = 2
MAX_PUSHED = 4
MAX_DIGEST_ENTRIES = 1024
DIGEST_ENTRY_BYTES = 8
MAX_REQUEST_BYTES = MAX_PUSHED * MAX_RECORD_BYTES + MAX_DIGEST_ENTRIES * DIGEST_ENTRY_BYTES + 1024
MAX_RECORDS = 256
MAX_ANSWER_BYTES = 512 * 1024
"""A record of one shard is about 600 bytes: 256 of them take 150 KiB."""

TOMBSTONE_SHARE = 1 / 8
"""Of the records of an answer: 32 departures within the minute for which the record before is still believed."""

NEWEST_SHARE = 1 / 4
"""Of the places that are left: the nodes that have just come are found soon, and a flood leaves three quarters."""

_OVERHEAD_BYTES = 64
"""Of the answer's own arrays, and 5 per record are counted with it."""

_ALL = 2**32

Envelope: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """What the asker has. ``below``: entries, and what is asked for, are of peers whose 32 bits are below it."""

    salt: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    below: Annotated[int, msgspec.Meta(ge=0, le=_ALL)]
    entries: Annotated[bytes, msgspec.Meta(max_length=MAX_DIGEST_ENTRIES * DIGEST_ENTRY_BYTES)]


class ExchangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """``model_id`` None asks for all nodes; ``limit`` 0 asks for none, and makes the exchange a push, a heartbeat."""

    version: int
    pushed: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_PUSHED)]
    model_id: ModelText | None
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORDS)]
    digest: Digest | None = None
    """None: the asker has nothing."""


class ExchangeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Signed records, the answerer's own first.

    Attributes:
        answered_at: the answerer's clock, by which nothing is dated: it tells the asker whether its own is wrong.
        num_known: live nodes that the answerer knows among those asked for, and
        num_shared: how many of them were in the digest. Together they let the asker estimate how many there are.
    """

    version: int
    records: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=MAX_RECORDS)]
    answered_at: Time
    num_known: Number = 0
    num_shared: Number = 0


@dataclass(frozen=True, slots=True)
class Received:
    """What an answer brought: the records that were taken, and what the answerer said beside them."""

    accepted: list[NodeRecord]
    answered_at: UnixS
    num_known: int
    num_shared: int


def serves(record: NodeRecord, model_id: ModelId | None) -> bool:
    """Whether the node holds a shard of the model, or of any model when it is None. False for a tombstone."""
    if model_id is None:
        return bool(record.shards)
    return any(shard.model_id == model_id for shard in record.shards)


def claims_of(answer: bytes) -> list[NodeRecord]:
    """What the records of an answer say, none of it verified; nothing when the answer cannot be read."""
    try:
        given = decode_bounded(answer, ExchangeAnswer, limit_bytes=MAX_ANSWER_BYTES)
    except WireError:
        return []
    return [claim for claim in map(claim_of, given.records) if claim is not None]


class RecordExchange:
    """One participant: its table, its own record, and its source of chance."""

    def __init__(self, table: RecordTable, chance: Random) -> None:
        self.table = table
        self._chance = chance
        self.own_envelope: bytes | None = None
        self._own_peer: str | None = None

    def set_own(self, envelope: bytes, *, now: UnixS) -> NodeRecord | Refusal:
        """Takes a new record of one's own; one that others would refuse is refused here too."""
        record = self.table.opened(envelope, now)
        if isinstance(record, NodeRecord):
            record = self.table.receive(envelope, now=now, introducer=PeerId(record.peer))
        if isinstance(record, NodeRecord):
            self.own_envelope, self._own_peer = envelope, record.peer
        return record

    def request(self, model_id: ModelId | None, *, limit: int, now: UnixS, push: bool = True) -> bytes:
        """Encodes a request. See ``counted_request``."""
        return self.counted_request(model_id, limit=limit, now=now, push=push)[0]

    def counted_request(
        self, model_id: ModelId | None, *, limit: int, now: UnixS, push: bool = True
    ) -> tuple[bytes, int]:
        """Encodes a request, and counts the nodes that are known of those it asks for (0 when it asks for none).

        Args:
            push: whether the own record, if it is live, goes along.
        """
        own = None if self._own_peer is None or not push else self.table.envelope_of(self._own_peer, now=now)
        pushed = () if own is None else (own,)
        digest, num_known = self._digest(model_id, now) if limit else (None, 0)
        return msgspec.msgpack.encode(ExchangeRequest(EXCHANGE_VERSION, pushed, model_id, limit, digest)), num_known

    def answer(self, request: bytes, *, source: PeerId, now: UnixS) -> bytes:
        """Takes what ``source`` pushed and encodes the answer.

        Raises:
            WireError: the request is malformed, oversized or of another version.
        """
        asked = decode_bounded(request, ExchangeRequest, limit_bytes=MAX_REQUEST_BYTES)
        _check_version(asked.version)
        their_view = _View.of(asked.digest)
        for envelope in asked.pushed:
            self.table.receive(envelope, now=now, introducer=source)
        model_id = None if asked.model_id is None else ModelId(asked.model_id)
        return msgspec.msgpack.encode(self._answer(model_id, asked.limit, their_view, now))

    def receive(self, answer: bytes, *, source: PeerId, now: UnixS, limit: int = MAX_RECORDS) -> Received:
        """Takes the records of an answer by ``source``.

        Args:
            limit: how many were asked for.

        Raises:
            WireError: the answer is malformed, oversized, of another version, or more than was asked for.
        """
        given = decode_bounded(answer, ExchangeAnswer, limit_bytes=MAX_ANSWER_BYTES)
        _check_version(given.version)
        if len(given.records) > limit:
            raise WireError(f"{len(given.records)} records in answer to a request for {limit}")
        received = [self.table.receive(envelope, now=now, introducer=source) for envelope in given.records]
        accepted = [record for record in received if isinstance(record, NodeRecord)]
        return Received(accepted, UnixS(given.answered_at), given.num_known, given.num_shared)

    def serving(self, model_id: ModelId | None, *, now: UnixS) -> list[NodeRecord]:
        """The live records of nodes that serve the model, by peer id."""
        return [record for record in self.table.live(now=now) if serves(record, model_id)]

    def _digest(self, model_id: ModelId | None, now: UnixS) -> tuple[Digest, int]:
        salt = self._chance.getrandbits(64) | 1
        rows, is_serving = self._rows(model_id, now)
        columns = self.table.columns
        bits, sequences = columns.bits(rows, salt), columns.sequences(rows)
        below = _ALL
        if len(bits) > MAX_DIGEST_ENTRIES:
            below = int(np.sort(bits)[MAX_DIGEST_ENTRIES])
            bits, sequences = bits[bits < below], sequences[bits < below]
        entries = np.column_stack((bits, sequences)).astype("<u4").tobytes()
        return Digest(salt.to_bytes(8, "little"), below, entries), int(is_serving.sum())

    def _answer(self, model_id: ModelId | None, limit: int, their_view: _View, now: UnixS) -> ExchangeAnswer:
        if not limit:
            return ExchangeAnswer(EXCHANGE_VERSION, (), now)
        rows, is_serving = self._rows(model_id, now)
        columns = self.table.columns
        is_asked, is_shared, is_wanted = their_view.compare(
            columns.bits(rows, their_view.salt), columns.sequences(rows)
        )
        # Rows are chosen before any record is touched: a table may hold 20,000, and an answer 256 at most.
        is_own = rows == columns.row_of(self._own_peer)
        is_wanted_of_others = is_wanted & is_asked & ~is_own
        is_gone = is_wanted_of_others & ~columns.serve(rows)
        own = self._envelopes(rows[is_wanted & is_own])
        room = limit - len(own)
        gone = self._some(rows[is_gone & is_shared], int(room * TOMBSTONE_SHARE))
        gone = np.append(gone, self._some(rows[is_gone & ~is_shared], int(room * TOMBSTONE_SHARE) - len(gone)))
        chosen = self._choose(rows[is_wanted_of_others & is_serving], room - len(gone), now)
        # What does not fit in is at the expense of those who take most room.
        fitting = _fit([*own, *sorted(self._envelopes(chosen), key=len), *self._envelopes(gone)])
        num_known, num_shared = int((is_serving & is_asked).sum()), int((is_serving & is_shared).sum())
        return ExchangeAnswer(EXCHANGE_VERSION, tuple(fitting), now, num_known, num_shared)

    def _rows(self, model_id: ModelId | None, now: UnixS) -> tuple[Indices, Flags]:
        """Rows of the live records of nodes that serve the model, of this node, and tombstones; and which of them
        serve it. Tombstones are told of in digests, too, so that they are not sent again."""
        columns = self.table.columns
        rows = columns.live(now)
        is_node = columns.serve(rows)
        if model_id is None:
            return rows, is_node
        is_serving = columns.serve_model(rows, model_id)
        kept = is_serving | ~is_node | (rows == columns.row_of(self._own_peer))
        return rows[kept], is_serving[kept]

    def _choose(self, rows: Indices, at_most: int, now: UnixS) -> Indices:
        """All of them if there is room, or else some of the newest and the rest by chance."""
        if len(rows) <= at_most:
            return rows
        num_newest = int(at_most * NEWEST_SHARE)
        # A date that is still to come is no newer than now.
        dates = np.minimum(self.table.columns.issued_at(rows), now)
        limit = np.partition(dates, len(dates) - num_newest)[len(dates) - num_newest] if num_newest else np.inf
        newest = np.flatnonzero(dates > limit)
        # Among equal dates, too, chance decides.
        newest = np.append(newest, self._some(np.flatnonzero(dates == limit), num_newest - len(newest)))
        rest = np.delete(rows, newest)
        return np.append(rows[newest], self._some(rest, at_most - num_newest))

    def _some(self, items: Indices, at_most: int) -> Indices:
        """So many of them, by chance."""
        return items[self._chance.sample(range(len(items)), min(at_most, len(items)))]

    def _envelopes(self, rows: Indices) -> list[bytes]:
        peers = self.table.columns.peers
        return [self.table.held_of(peers[row]).envelope for row in rows.tolist()]


def _fit(envelopes: Sequence[bytes]) -> list[bytes]:
    fitting: list[bytes] = []
    room_bytes = MAX_ANSWER_BYTES - _OVERHEAD_BYTES
    for envelope in envelopes:
        size = len(envelope) + 5
        if size <= room_bytes:
            room_bytes -= size
            fitting.append(envelope)
    return fitting


@dataclass(frozen=True, slots=True)
class _View:
    """A digest, as the answerer reads it: sequences by the 32 bits of their peer, in the order of these bits."""

    salt: int
    below: int
    bits: Numbers
    sequences: Numbers

    @classmethod
    def of(cls, digest: Digest | None) -> _View:
        """Raises WireError when the entries are not whole."""
        entries = b"" if digest is None else digest.entries
        if len(entries) % DIGEST_ENTRY_BYTES:
            raise WireError("the digest does not end with an entry")
        numbers = np.frombuffer(entries, "<u4").reshape(-1, 2).astype(np.uint32)
        numbers = numbers[np.argsort(numbers[:, 0], kind="stable")]
        salt = 1 if digest is None else int.from_bytes(digest.salt, "little")
        return cls(salt, _ALL if digest is None else digest.below, numbers[:, 0], numbers[:, 1])

    def compare(self, bits: Numbers, sequences: Numbers) -> tuple[Flags, Flags, Flags]:
        """Of records of ours: which are asked for, which of these peers are in the digest, and which are missing there
        or newer here. Serial number arithmetic: newer is what is less than half the circle ahead."""
        is_asked = bits.astype(np.uint64) < self.below
        if not len(self.bits):
            return is_asked, np.zeros(len(bits), bool), np.ones(len(bits), bool)
        places = np.minimum(np.searchsorted(self.bits, bits), len(self.bits) - 1)
        is_shared = (self.bits[places] == bits) & is_asked
        ahead = sequences - self.sequences[places]
        return is_asked, is_shared, ~is_shared | ((ahead > 0) & (ahead < _ALL // 2))


def _check_version(version: int) -> None:
    if version != EXCHANGE_VERSION:
        raise WireError(f"record exchange of version {version}, not {EXCHANGE_VERSION}")
