"""Signed statements with an expiry: what a node says of itself, and the plan that a user opens a session with.

Guarantees: a statement is accepted only from the key that it names, within its lifetime, with a sequence number above
the last one seen, and below a size limit. No claim in it is believed beyond that: the numbers are bounded, and what can
be measured is measured by whoever uses it.

Assumes: clocks of honest peers differ by less than MAX_CLOCK_SKEW_S.

Why the caps: a record that its author may date freely can silence that author for years, because a later honest one
never looks newer. Hence an expiry of at most MAX_RECORD_TTL_S and no dates in the future.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from fusion_node.types import PeerId, UnixS
from fusion_node.wire import SignedEnvelope, WireError, decode_bounded
from p2p.identity import Identity, is_signed_by

PROTOCOL_VERSION = 1
"""Of records, plans and data-plane frames together. Raised when an old program could misread a new one."""

MAX_RECORD_BYTES = 16 * 1024
MAX_PLAN_BYTES = 48 * 1024
MAX_RECORD_TTL_S = 120.0
MAX_PLAN_TTL_S = 24 * 3600.0
MAX_CLOCK_SKEW_S = 30.0

_RECORD_DOMAIN = b"fusion-node/record/1:"
_PLAN_DOMAIN = b"fusion-node/plan/1:"

B = TypeVar("B", bound=msgspec.Struct)

PeerText: TypeAlias = Annotated[str, msgspec.Meta(min_length=52, max_length=52)]
AddressText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=96)]
ModelText: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
LayerIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=4096)]
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


class ShardRecord(msgspec.Struct, frozen=True, array_like=True):
    """One shard that a node serves: layers ``[start, stop)`` of a model."""

    model_id: ModelText
    model_name: ShortText
    start: LayerIndex
    stop: LayerIndex
    num_layers: LayerIndex
    numerics: ShortText
    seconds_per_layer: Seconds
    """Measured at start-up for one decoded token."""
    kv_free_tokens: Count
    """Positions that a new session could still reserve."""


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


class PlanStage(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a plan: who serves which layers, and where it can be dialled."""

    peer: PeerText
    start: LayerIndex
    stop: LayerIndex
    data_addresses: Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=8)]


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


def sign_record(record: NodeRecord, identity: Identity) -> bytes:
    """The record as a signed envelope, ready for the wire."""
    return _sign(record, _RECORD_DOMAIN, identity)


def sign_plan(plan: Plan, identity: Identity) -> bytes:
    """The plan as a signed envelope, ready for the wire."""
    return _sign(plan, _PLAN_DOMAIN, identity)


def open_record(envelope: bytes, *, now: UnixS) -> NodeRecord | Refusal:
    """Checks size, form, signature and dates of a node record. The sequence is checked by RecordTable."""
    record = _open(envelope, NodeRecord, _RECORD_DOMAIN, MAX_RECORD_BYTES, lambda r: r.peer)
    if isinstance(record, Refusal):
        return record
    if any(not shard.start < shard.stop <= shard.num_layers for shard in record.shards):
        return Refusal.MALFORMED
    return _check_dates(record.issued_at, record.expires_at, now, MAX_RECORD_TTL_S) or record


def open_plan(envelope: bytes, *, now: UnixS) -> Plan | Refusal:
    """Checks size, form, signature, dates and contiguity of a plan."""
    plan = _open(envelope, Plan, _PLAN_DOMAIN, MAX_PLAN_BYTES, lambda p: p.user)
    if isinstance(plan, Refusal):
        return plan
    if any(not stage.start < stage.stop for stage in plan.stages):
        return Refusal.MALFORMED
    if any(a.stop != b.start for a, b in itertools.pairwise(plan.stages)):
        return Refusal.MALFORMED
    return _check_dates(plan.issued_at, plan.expires_at, now, MAX_PLAN_TTL_S) or plan


@dataclass(slots=True)
class RecordTable:
    """The newest valid record of every peer, and how many were refused and why.

    States: a peer is present from its first valid record until that record expires or is withdrawn.
    """

    max_records: int = 20_000
    refused: dict[Refusal, int] = field(default_factory=dict)
    _records: dict[str, tuple[NodeRecord, bytes]] = field(default_factory=dict)

    def receive(self, envelope: bytes, *, now: UnixS) -> NodeRecord | Refusal:
        """Takes a record from anywhere. An identical copy of the record held is accepted without effect."""
        record = open_record(envelope, now=now)
        if isinstance(record, NodeRecord):
            held = self._records.get(record.peer)
            if held is not None and held[1] == envelope:
                return record
            if held is not None and record.sequence <= held[0].sequence:
                record = Refusal.REPLAYED
        if isinstance(record, Refusal):
            self.refused[record] = self.refused.get(record, 0) + 1
            return record
        if record.peer not in self._records and len(self._records) >= self.max_records:
            self.expire(now=now)
            if len(self._records) >= self.max_records:
                # The one that expires first is worth least; a flood thus displaces itself.
                del self._records[min(self._records, key=lambda p: self._records[p][0].expires_at)]
        self._records[record.peer] = (record, envelope)
        return record

    def expire(self, *, now: UnixS) -> list[PeerId]:
        """Drops what has expired and returns whose it was."""
        gone = [PeerId(peer) for peer, (record, _) in self._records.items() if record.expires_at <= now]
        for peer in gone:
            del self._records[peer]
        return gone

    def live(self, *, now: UnixS) -> list[NodeRecord]:
        """Records that have not expired, by peer id."""
        return [r for _, (r, _) in sorted(self._records.items()) if r.expires_at > now]

    def signed(self, *, now: UnixS) -> Iterator[tuple[NodeRecord, bytes]]:
        """Live records with their signed forms, in no order."""
        return ((record, envelope) for record, envelope in self._records.values() if record.expires_at > now)

    def envelope_of(self, peer: str, *, now: UnixS) -> bytes | None:
        """The signed form of a live record, for passing on."""
        held = self._records.get(peer)
        return held[1] if held is not None and held[0].expires_at > now else None


def _sign(body: NodeRecord | Plan, domain: bytes, identity: Identity) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode(SignedEnvelope(body=encoded, signature=identity.sign(domain, encoded)))


def _open(
    envelope: bytes, kind: type[B], domain: bytes, limit_bytes: int, signer_of: Callable[[B], str]
) -> B | Refusal:
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


def _check_dates(issued_at: float, expires_at: float, now: UnixS, max_ttl_s: float) -> Refusal | None:
    if issued_at > now + MAX_CLOCK_SKEW_S:
        return Refusal.FUTURE_DATED
    if expires_at - issued_at > max_ttl_s:
        return Refusal.LIFETIME_TOO_LONG
    if expires_at <= now or expires_at <= issued_at:
        return Refusal.EXPIRED
    return None
