"""Signed statements with an expiry: what a node says of itself, and the plan that a user opens a session with.

Guarantees: a statement is accepted only from the key that it names, within its lifetime, with a sequence number above
the last one seen, and below a size limit. No claim in it is believed beyond that: the numbers are bounded, and what can
be measured is measured by whoever uses it.

Assumes: clocks of honest peers differ by less than MAX_CLOCK_SKEW_S.

Why the caps: a record that its author may date freely can silence that author for years, because a later honest one
never looks newer. Hence an expiry of at most MAX_RECORD_TTL_S, and dates at most MAX_CLOCK_SKEW_S ahead. What is
still gained by such a date must be worth nothing: neither RecordTable nor p2p.record_exchange prefers it.

Above 600 lines: four kinds of statement, whose fields, bounds and checks stand side by side because they are alike.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from fusion_node.errors import ConfigError
from fusion_node.slices import MAX_MEMBERS, MAX_WEIGHT, ModelSlice
from fusion_node.types import PeerId, UnixS
from fusion_node.wire import SignedEnvelope, WireError, decode_bounded, without_last
from p2p.identity import Identity, is_signed_by
from p2p.record_columns import RecordColumns

PROTOCOL_VERSION = 3
"""Of records, plans and data-plane frames together. Raised when an old program could misread a new one."""

MAX_RECORD_BYTES = 16 * 1024
MAX_PLAN_BYTES = 48 * 1024
MAX_RECORD_TTL_S = 120.0
MAX_PLAN_TTL_S = 24 * 3600.0
MAX_LEASE_BYTES = 1024
MAX_LEASE_TTL_S = 3600.0
MAX_ASSIGNMENT_BYTES = 1024
MAX_ASSIGNMENT_TTL_S = 600.0
MAX_CLOCK_SKEW_S = 30.0

_RECORD_DOMAIN = b"fusion-node/record/1:"
_PLAN_DOMAIN = b"fusion-node/plan/1:"
_LEASE_DOMAIN = b"fusion-node/lease/1:"
_ASSIGNMENT_DOMAIN = b"fusion-node/assignment/1:"

B = TypeVar("B", bound=msgspec.Struct)

PeerText: TypeAlias = Annotated[str, msgspec.Meta(min_length=52, max_length=52)]
AddressText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=96)]
ModelText: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
LayerIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Weight: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e5)]
Time: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]


class Refusal(enum.StrEnum):
    """Why a statement was not accepted. Each is counted, none is an exception."""

    OVERSIZED = "oversized"
    MALFORMED = "malformed"
    WRONG_VERSION = "wrong-version"
    WRONG_KEY = "wrong-key"
    EXPIRED = "expired"
    FUTURE_DATED = "future-dated"
    LIFETIME_TOO_LONG = "lifetime-too-long"
    REPLAYED = "replayed"
    CROWDED = "crowded"
    """The table is full, or the one who brought it has brought too many."""
    TOO_CHEAP = "too-cheap"
    """The identity has not solved the puzzle that is demanded here."""
    UNCHECKED = "unchecked"
    """So many puzzles were to be checked that this one has to wait for its record to come again."""


SPEED_ROWS = (1, 16, 256)
"""Rows of the forwards whose time a node announces: a decoded token, a speculation tree, a chunk of a prompt."""


class ShardRecord(msgspec.Struct, frozen=True, array_like=True):
    """One shard that a node serves: layers ``[start, stop)`` of a model."""

    model_id: ModelText
    model_name: ShortText
    start: LayerIndex
    stop: LayerIndex
    num_layers: LayerIndex
    numerics: ShortText
    seconds_per_layer: tuple[Seconds, Seconds, Seconds]
    """Of a forward of 1, 16 and 256 rows, measured at start-up and again while serving."""
    kv_free_tokens: Count
    """Positions that a new session could still reserve."""
    quantization: ShortText = ""
    """Of the stored weights, for people: the model id decides. Empty when they are plain."""
    queue_s: Seconds = 0.0
    """What a decode step waits for the device before it is computed, lately."""
    is_ready: bool = True
    """False while the layers are being loaded: others need not load them too, and no session is opened yet."""
    capacity_layers: LayerIndex = 0
    """So many layers of the model fit on the node, which may go over to others; 0: its operator has chosen these."""
    slice: ShortText = ""
    """Which part of these layers, as fusion_node.slices.ModelSlice reads it; empty: all of them."""


class RoundTrip(msgspec.Struct, frozen=True, array_like=True):
    """What a node has measured to a peer that it may have to hand rows to."""

    peer_digest: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """digest_key_of the peer, little-endian."""
    seconds: Seconds


class CoordinateRecord(msgspec.Struct, frozen=True, array_like=True):
    """Where a node is in the space of round trips: scheduler.vivaldi. All in seconds, the error relative."""

    vector: Annotated[tuple[Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)], ...], msgspec.Meta(max_length=4)]
    height: Seconds
    error: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)]


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a node says of itself."""

    version: int
    peer: PeerText
    sequence: Count
    issued_at: Time
    expires_at: Time
    data_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)]
    """Where the data plane listens, ``host:port``."""
    libp2p_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)]
    device: ShortText
    memory_free_bytes: Count
    shards: Annotated[tuple[ShardRecord, ...], msgspec.Meta(max_length=32)]
    num_sessions: Count
    software: ShortText
    operator: ShortText = ""
    puzzle: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """Solution of the puzzle that makes identities cost something, where a swarm asks for one."""
    is_relay: bool = False
    """Whether it passes on the connections of nodes that cannot be dialled."""
    round_trips: Annotated[tuple[RoundTrip, ...], msgspec.Meta(max_length=16)] = ()
    coordinate: CoordinateRecord | None = None
    up_Bps: Count = 0
    """Timed by those that received it; 0 when it was not measured."""
    down_Bps: Count = 0
    region: ShortText = ""
    """Where the operator says that it stands, as ``eu-west`` or ``de``. Nobody checks it."""
    price: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """What the operator asks for a million positions in one layer, in a unit of its swarm's. A tag for users' rules:
    nothing is paid here."""


class PlanMember(msgspec.Struct, frozen=True, array_like=True):
    """One member of a group, and where it can be dialled: its place in the list is that of its slice."""

    peer: PeerText
    data_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)]
    libp2p_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)] = ()


class PlanStage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a plan: who serves which layers, and where it can be dialled.

    With ``members`` it is a group of which each holds a slice; ``peer`` is then the first of them.
    """

    peer: PeerText
    start: LayerIndex
    stop: LayerIndex
    data_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)]
    libp2p_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)] = ()
    """Multiaddrs, tried after the others: for a node that can only be reached through a relay or a hole in a NAT."""
    members: Annotated[tuple[PlanMember, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    weights: Annotated[tuple[Weight, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """By which the members share the layers, one for each: fusion_node.slices.split."""

    @property
    def is_group(self) -> bool:
        return bool(self.members)

    @property
    def places(self) -> tuple[PlanMember, ...]:
        """Who serves it: its members, or the one node."""
        return self.members or (PlanMember(self.peer, self.data_addresses, self.libp2p_addresses),)


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """What a node has reserved for a session: KV for so many positions in these layers, for nobody else."""

    version: int
    node: PeerText
    user: PeerText
    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    epoch: Count
    start: LayerIndex
    stop: LayerIndex
    num_positions: Count
    issued_at: Time
    expires_at: Time


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler of a swarm would have a node hold. A node obeys one that its operator has named, nobody else.

    ``sequence`` rises with every one for the same node, so that none counts twice.
    """

    version: int
    scheduler: PeerText
    node: PeerText
    sequence: Count
    model_id: ModelText
    start: LayerIndex
    stop: LayerIndex
    issued_at: Time
    expires_at: Time


def dialled_at(place: NodeRecord | PlanStage | PlanMember) -> tuple[str, ...]:
    """Where a node can be dialled for the data plane, best first: it is what LinkPool.connect takes.

    The last one stands for whichever libp2p connection there is by then: once it is a direct one, through a hole in a
    NAT, a link that began at a relay finds it there.
    """
    existing = (f"/p2p/{place.peer}",) if place.libp2p_addresses else ()
    return (*place.data_addresses, *place.libp2p_addresses, *existing)


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """Who serves a session, in order. Signed by the user; every stage gets the whole plan, so that it knows from whom
    steps may come and to whom they go."""

    version: int
    user: PeerText
    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    epoch: Count
    model_id: ModelText
    numerics: ShortText
    max_positions: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    """KV positions that every stage reserves."""
    issued_at: Time
    expires_at: Time
    stages: Annotated[tuple[PlanStage, ...], msgspec.Meta(min_length=1, max_length=128)]
    priority: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    """0: somebody waits for the answer. 1: batch work, which takes what the others leave."""
    wire: ShortText = ""
    """How tensors are encoded between its stages; empty for the plain encoding of the numerics class."""
    masks: bool = False
    """Members of its groups send their contributions masked, so that each learns only sums: docs, "Masked sums"."""


@functools.lru_cache(maxsize=32_768)
def digest_key_of(peer: str) -> int:
    """64 bits of a hash: nobody can choose a key so that its peer is taken for another one."""
    return int.from_bytes(hashlib.blake2b(peer.encode(), digest_size=8).digest(), "little")


def sign_record(record: NodeRecord, identity: Identity) -> bytes:
    """The record as a signed envelope, ready for the wire."""
    return sign_statement(record, _RECORD_DOMAIN, identity)


def sign_plan(plan: Plan, identity: Identity) -> bytes:
    """The plan as a signed envelope, ready for the wire. ``masks`` is left out where there are none."""
    return sign_statement(plan if plan.masks else without_last(plan), _PLAN_DOMAIN, identity)


def sign_lease(lease: Lease, identity: Identity) -> bytes:
    """The lease as a signed envelope, ready for the wire."""
    return sign_statement(lease, _LEASE_DOMAIN, identity)


def sign_assignment(assignment: Assignment, identity: Identity) -> bytes:
    """The assignment as a signed envelope, ready for the wire."""
    return sign_statement(assignment, _ASSIGNMENT_DOMAIN, identity)


def open_record(envelope: bytes, *, now: UnixS) -> NodeRecord | Refusal:
    """Checks size, form, signature and dates of a node record. The sequence is checked by RecordTable."""
    record = open_statement(envelope, NodeRecord, _RECORD_DOMAIN, MAX_RECORD_BYTES, lambda r: r.peer)
    if isinstance(record, Refusal):
        return record
    if any(not shard.start < shard.stop <= shard.num_layers for shard in record.shards):
        return Refusal.MALFORMED
    if not all(_is_slice(shard.slice) for shard in record.shards if shard.slice):
        return Refusal.MALFORMED
    return check_dates(record.issued_at, record.expires_at, now, MAX_RECORD_TTL_S) or record


def _is_slice(text: str) -> bool:
    try:
        ModelSlice.parse(text)
    except ConfigError:
        return False
    return True


def claim_of(envelope: bytes) -> NodeRecord | None:
    """What an envelope says, its signature and dates unchecked; None when it cannot be read."""
    try:
        outer = decode_bounded(envelope, SignedEnvelope, limit_bytes=MAX_RECORD_BYTES)
        return decode_bounded(outer.body, NodeRecord, limit_bytes=MAX_RECORD_BYTES)
    except WireError:
        return None


def plan_claim_of(envelope: bytes) -> Plan | None:
    """What an envelope says, its signature and dates unchecked; None when it cannot be read."""
    try:
        outer = decode_bounded(envelope, SignedEnvelope, limit_bytes=MAX_PLAN_BYTES)
        return decode_bounded(outer.body, Plan, limit_bytes=MAX_PLAN_BYTES)
    except WireError:
        return None


def open_plan(envelope: bytes, *, now: UnixS) -> Plan | Refusal:
    """Checks size, form, signature, dates and contiguity of a plan."""
    plan = open_statement(envelope, Plan, _PLAN_DOMAIN, MAX_PLAN_BYTES, lambda p: p.user)
    if isinstance(plan, Refusal):
        return plan
    if any(not stage.start < stage.stop for stage in plan.stages):
        return Refusal.MALFORMED
    if any(a.stop != b.start for a, b in itertools.pairwise(plan.stages)):
        return Refusal.MALFORMED
    if not all(map(_is_sound, plan.stages)):
        return Refusal.MALFORMED
    return check_dates(plan.issued_at, plan.expires_at, now, MAX_PLAN_TTL_S) or plan


def _is_sound(stage: PlanStage) -> bool:
    """Whether a group is one, and a single node none."""
    peers = [member.peer for member in stage.members]
    return len(stage.weights) == len(peers) == len(set(peers)) and peers[:1] in ([], [stage.peer])


def open_lease(envelope: bytes, *, now: UnixS) -> Lease | Refusal:
    """Checks size, form, signature and dates of a lease."""
    lease = open_statement(envelope, Lease, _LEASE_DOMAIN, MAX_LEASE_BYTES, lambda each: each.node)
    if isinstance(lease, Refusal):
        return lease
    if not lease.start < lease.stop:
        return Refusal.MALFORMED
    return check_dates(lease.issued_at, lease.expires_at, now, MAX_LEASE_TTL_S) or lease


def open_assignment(envelope: bytes, *, now: UnixS) -> Assignment | Refusal:
    """Checks size, form, signature and dates of an assignment."""
    assignment = open_statement(
        envelope, Assignment, _ASSIGNMENT_DOMAIN, MAX_ASSIGNMENT_BYTES, lambda each: each.scheduler
    )
    if isinstance(assignment, Refusal):
        return assignment
    if not assignment.start < assignment.stop:
        return Refusal.MALFORMED
    return check_dates(assignment.issued_at, assignment.expires_at, now, MAX_ASSIGNMENT_TTL_S) or assignment


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A record in a RecordTable.

    Attributes:
        record, envelope: the record, and its signed form for passing on.
        introducer: who brought the first record of this peer; None when nobody in particular did.
        is_own_word: whether the peer itself has brought one.
    """

    record: NodeRecord
    envelope: bytes
    introducer: PeerId | None
    is_own_word: bool


class _Introduced:
    """Who introduced whom, and who introduced most. Every operation is O(1)."""

    def __init__(self) -> None:
        self._peers_of: dict[PeerId | None, dict[str, None]] = {}
        self._of_size: dict[int, dict[PeerId | None, None]] = {}
        self.largest = 0

    def num_of(self, introducer: PeerId | None) -> int:
        return len(self._peers_of.get(introducer, ()))

    def add(self, introducer: PeerId | None, peer: str) -> None:
        peers = self._peers_of.setdefault(introducer, {})
        peers[peer] = None
        self._resize(introducer, len(peers) - 1, len(peers))

    def remove(self, introducer: PeerId | None, peer: str) -> None:
        peers = self._peers_of[introducer]
        del peers[peer]
        self._resize(introducer, len(peers) + 1, len(peers))

    def last_of_the_largest(self) -> str:
        """The peer that was introduced last by whoever introduced most."""
        introducer = next(iter(self._of_size[self.largest]))
        return next(reversed(self._peers_of[introducer]))

    def _resize(self, introducer: PeerId | None, before: int, after: int) -> None:
        if before:
            del self._of_size[before][introducer]
            if not self._of_size[before]:
                del self._of_size[before]
        if after:
            self._of_size.setdefault(after, {})[introducer] = None
        else:
            del self._peers_of[introducer]
        # Sizes change by one, so that nothing but the neighbour can have become the largest.
        if after > self.largest or self.largest not in self._of_size:
            self.largest = after


class RecordTable:
    """The newest valid record of every peer, and how many were refused and why.

    States: a peer is present from its first valid record until that record expires or is displaced. Those that have
    brought a record themselves, over a connection that proves their key, stand on their *own word*; the others were
    introduced, and count against the quota of whoever introduced them first.

    In a full table the word of a newcomer itself displaces one who was introduced, or if there is none the one that has
    been silent longest. One who is introduced displaces only the last of whoever introduced most, and only if its own
    introducer has brought fewer. A flood thus displaces itself, and the dates in it count for nothing.

    Everything but ``live`` and ``signed`` takes O(log n) per record.

    Args:
        max_records: about 1 KiB each.
        max_introduced: by one peer. One answer brings at most 256; several bring the nodes of a large swarm.
        price: why a record is refused although it is good, given who introduced it; asked before it is taken.
        opener: checks an envelope; simulations of ten thousand hosts hand in one that checks each signature once.
    """

    def __init__(
        self,
        *,
        max_records: int = 20_000,
        max_introduced: int = 1024,
        price: Callable[[NodeRecord, PeerId | None, UnixS], Refusal | None] = lambda record, introducer, now: None,
        opener: Callable[[bytes, UnixS], NodeRecord | Refusal] | None = None,
    ) -> None:
        self.opened = opener or (lambda envelope, now: open_record(envelope, now=now))
        self._max_records = max_records
        self._max_introduced = max_introduced
        self._price = price
        self.refused: dict[Refusal, int] = {}
        self._held: dict[str, HeldRecord] = {}
        self.columns = RecordColumns()
        """Of the same records; those that have expired among them until ``expire``."""
        self._peer_of: dict[bytes, str] = {}
        """By envelope, so that a copy is known before its signature is looked at."""
        self._own_words: dict[str, None] = {}
        """The one that has been silent longest comes first."""
        self._introduced = _Introduced()
        self._deadlines: list[tuple[float, str]] = []
        """A heap of expiries, those of records that are gone among them."""

    def receive(self, envelope: bytes, *, now: UnixS, introducer: PeerId | None = None) -> NodeRecord | Refusal:
        """Takes a record. An identical copy of the record held is accepted without effect.

        Args:
            envelope: as it came.
            now: Unix time.
            introducer: the authenticated peer that brought it, which may be the one it speaks of; None when nobody in
                particular did, as for a value in the DHT.
        """
        copied = self._peer_of.get(envelope)
        if copied is not None and self._held[copied].record.expires_at > now:
            if introducer == copied:
                self._note_own_word(copied)
            return self._held[copied].record
        record = self.opened(envelope, now)
        if isinstance(record, NodeRecord):
            record = self._price(record, introducer, now) or self._take(record, envelope, introducer, now)
        if isinstance(record, Refusal):
            self.refused[record] = self.refused.get(record, 0) + 1
        return record

    def expire(self, *, now: UnixS) -> list[PeerId]:
        """Drops what has expired and returns whose it was."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, peer = heapq.heappop(self._deadlines)
            held = self._held.get(peer)
            if held is not None and held.record.expires_at <= now:
                self._drop(peer)
                gone.append(PeerId(peer))
        return gone

    def live(self, *, now: UnixS) -> list[NodeRecord]:
        """Records that have not expired, by peer id."""
        return [held.record for _, held in sorted(self._held.items()) if held.record.expires_at > now]

    def held(self, *, now: UnixS) -> Iterator[HeldRecord]:
        """Live records, in no order."""
        return (held for held in self._held.values() if held.record.expires_at > now)

    def held_of(self, peer: str) -> HeldRecord:
        """The record of a peer that is held, even if it has expired."""
        return self._held[peer]

    def record_of(self, peer: str, *, now: UnixS) -> NodeRecord | None:
        """The live record of a peer."""
        held = self._held.get(peer)
        return held.record if held is not None and held.record.expires_at > now else None

    def envelope_of(self, peer: str, *, now: UnixS) -> bytes | None:
        """The signed form of a live record, for passing on."""
        held = self._held.get(peer)
        return held.envelope if held is not None and held.record.expires_at > now else None

    def _take(self, record: NodeRecord, envelope: bytes, introducer: PeerId | None, now: UnixS) -> NodeRecord | Refusal:
        held = self._held.get(record.peer)
        is_own_word = introducer == record.peer
        if held is None:
            if not self._has_room(introducer, is_own_word=is_own_word):
                self.expire(now=now)
            if not self._has_room(introducer, is_own_word=is_own_word):
                displaced = self._to_displace(introducer, is_own_word=is_own_word)
                if displaced is None:
                    return Refusal.CROWDED
                self._drop(displaced)
            self._hold(HeldRecord(record, envelope, introducer, is_own_word))
            return record
        if record.sequence <= held.record.sequence:
            return Refusal.REPLAYED
        # In the place of the older one: who brings the news first must not be able to make it their own.
        del self._peer_of[held.envelope]
        self._held[record.peer] = HeldRecord(record, envelope, held.introducer, held.is_own_word)
        self._index(record, envelope)
        if is_own_word:
            self._note_own_word(record.peer)
        return record

    def _has_room(self, introducer: PeerId | None, *, is_own_word: bool) -> bool:
        is_within_quota = is_own_word or self._introduced.num_of(introducer) < self._max_introduced
        return is_within_quota and len(self._held) < self._max_records

    def _to_displace(self, introducer: PeerId | None, *, is_own_word: bool) -> str | None:
        if is_own_word:
            return self._introduced.last_of_the_largest() if self._introduced.largest else next(iter(self._own_words))
        is_behind = self._introduced.num_of(introducer) + 1 < self._introduced.largest
        return self._introduced.last_of_the_largest() if is_behind else None

    def _note_own_word(self, peer: str) -> None:
        held = self._held[peer]
        if not held.is_own_word:
            self._introduced.remove(held.introducer, peer)
            self._held[peer] = HeldRecord(held.record, held.envelope, held.introducer, True)
        self._own_words.pop(peer, None)
        self._own_words[peer] = None

    def _hold(self, held: HeldRecord) -> None:
        peer = held.record.peer
        self._held[peer] = held
        self._index(held.record, held.envelope)
        if held.is_own_word:
            self._own_words[peer] = None
        else:
            self._introduced.add(held.introducer, peer)

    def _index(self, record: NodeRecord, envelope: bytes) -> None:
        self.columns.put(
            record.peer,
            digest_key_of(record.peer),
            record.sequence,
            record.issued_at,
            record.expires_at,
            {shard.model_id for shard in record.shards},
        )
        self._peer_of[envelope] = record.peer
        if len(self._deadlines) > 2 * len(self._held) + 64:
            self._deadlines = [(held.record.expires_at, peer) for peer, held in self._held.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (record.expires_at, record.peer))

    def _drop(self, peer: str) -> None:
        held = self._held.pop(peer)
        self.columns.remove(peer)
        del self._peer_of[held.envelope]
        if held.is_own_word:
            del self._own_words[peer]
        else:
            self._introduced.remove(held.introducer, peer)


def sign_statement(body: msgspec.Struct | tuple[object, ...], domain: bytes, identity: Identity) -> bytes:
    """A statement as a signed envelope. Its first field is its version, and the domain is that of its kind alone."""
    encoded = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode(SignedEnvelope(body=encoded, signature=identity.sign(domain, encoded)))


def open_statement(
    envelope: bytes, kind: type[B], domain: bytes, limit_bytes: int, signer_of: Callable[[B], str]
) -> B | Refusal:
    """Checks size, form, version and signature of a statement; its dates are its caller's to check."""
    if len(envelope) > limit_bytes:
        return Refusal.OVERSIZED
    try:
        outer = decode_bounded(envelope, SignedEnvelope, limit_bytes=limit_bytes)
        # The version is read before the rest, so that a peer from another time is told apart from a broken one.
        version = _version_of(outer.body, limit_bytes)
        if version != PROTOCOL_VERSION:
            return Refusal.WRONG_VERSION
        body = decode_bounded(outer.body, kind, limit_bytes=limit_bytes)
    except WireError:
        return Refusal.MALFORMED
    if not is_signed_by(signer_of(body), domain, outer.body, outer.signature):
        return Refusal.WRONG_KEY
    return body


def _version_of(body: bytes, limit_bytes: int) -> int:
    fields = decode_bounded(body, list, limit_bytes=limit_bytes)
    if not fields or not isinstance(fields[0], int):
        raise WireError("no version in front")
    return fields[0]


def check_dates(issued_at: float, expires_at: float, now: UnixS, max_ttl_s: float) -> Refusal | None:
    """Why a statement of these dates does not count now; None if it does."""
    if issued_at > now + MAX_CLOCK_SKEW_S:
        return Refusal.FUTURE_DATED
    if expires_at - issued_at > max_ttl_s:
        return Refusal.LIFETIME_TOO_LONG
    if expires_at <= now or expires_at <= issued_at:
        return Refusal.EXPIRED
    return None
