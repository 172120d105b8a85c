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

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import msgspec

from fusion_node.types import ModelId, PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.records import MAX_RECORD_BYTES, ModelText, NodeRecord, RecordTable, Refusal, Time

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
_64_BITS = 2**64 - 1

T = TypeVar("T")

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
        record = self.table.opened(envelope, now)
        if isinstance(record, NodeRecord):
            record = self.table.receive(envelope, now=now, introducer=PeerId(record.peer))
        if isinstance(record, NodeRecord):
            self.own_envelope, self._own_peer = envelope, record.peer
        return record

    def request(self, model_id: ModelId | None, *, limit: int, now: UnixS, push: bool = True) -> bytes:
        """Encodes a request.

        Args:
            push: whether the own record, if it is live, goes along.
        """
        own = None if self._own_peer is None or not push else self.table.envelope_of(self._own_peer, now=now)
        pushed = () if own is None else (own,)
        digest = self._digest(model_id, now) if limit else None
        return msgspec.msgpack.encode(ExchangeRequest(EXCHANGE_VERSION, pushed, model_id, limit, digest))

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

    def _digest(self, model_id: ModelId | None, now: UnixS) -> Digest:
        salt = self._chance.getrandbits(64) | 1
        entries = [
            (((held.digest_key * salt) & _64_BITS) >> 32, held.record.sequence % _ALL)
            for held in self.table.held(now=now)
            # A tombstone is told, too, so that it is not sent again.
            if not held.record.shards or serves(held.record, model_id)
        ]
        below = _ALL
        if len(entries) > MAX_DIGEST_ENTRIES:
            entries.sort()
            below = entries[MAX_DIGEST_ENTRIES][0]
            entries = [entry for entry in entries if entry[0] < below]
        packed = struct.pack(f"<{2 * len(entries)}I", *(number for entry in entries for number in entry))
        return Digest(salt.to_bytes(8, "little"), below, packed)

    def _answer(self, model_id: ModelId | None, limit: int, their_view: _View, now: UnixS) -> ExchangeAnswer:
        own: bytes | None = None
        missing: list[tuple[float, bytes]] = []
        believed_gone: list[bytes] = []
        gone: list[bytes] = []
        num_known = num_shared = 0
        for held in self.table.held(now=now) if limit else ():
            record = held.record
            is_own, is_serving = record.peer == self._own_peer, serves(record, model_id)
            if not (is_own or is_serving or not record.shards):
                continue
            digested = ((held.digest_key * their_view.salt) & _64_BITS) >> 32
            their_sequence = their_view.sequences.get(digested)
            if digested < their_view.below:
                num_known += is_serving
                num_shared += is_serving and their_sequence is not None
            elif not is_own:
                continue
            # Serial number arithmetic: newer is what is less than half the circle ahead.
            if their_sequence is not None and not 0 < (record.sequence - their_sequence) % _ALL < _ALL // 2:
                continue
            if is_own:
                own = held.envelope
            elif is_serving:
                # A date that is still to come is no newer than now.
                missing.append((min(record.issued_at, now), held.envelope))
            else:
                (gone if their_sequence is None else believed_gone).append(held.envelope)
        room = limit - (own is not None)
        tombstones = self._some(believed_gone, int(room * TOMBSTONE_SHARE))
        tombstones += self._some(gone, int(room * TOMBSTONE_SHARE) - len(tombstones))
        chosen = self._choose(missing, room - len(tombstones))
        fitting = _fit([*(() if own is None else (own,)), *chosen, *tombstones])
        return ExchangeAnswer(EXCHANGE_VERSION, tuple(fitting), now, num_known, num_shared)

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


@dataclass(frozen=True, slots=True)
class _View:
    """A digest, as the answerer reads it: sequences by the 32 bits of their peer."""

    salt: int
    below: int
    sequences: dict[int, int]

    @classmethod
    def of(cls, digest: Digest | None) -> _View:
        """Raises WireError when the entries are not whole."""
        if digest is None:
            return cls(1, _ALL, {})
        num_entries, rest = divmod(len(digest.entries), DIGEST_ENTRY_BYTES)
        if rest:
            raise WireError("the digest does not end with an entry")
        numbers = struct.unpack(f"<{2 * num_entries}I", digest.entries)
        salt = int.from_bytes(digest.salt, "little")
        return cls(salt, digest.below, dict(zip(numbers[::2], numbers[1::2], strict=True)))


def _check_version(version: int) -> None:
    if version != EXCHANGE_VERSION:
        raise WireError(f"record exchange of version {version}, not {EXCHANGE_VERSION}")
