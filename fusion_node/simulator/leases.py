"""A book of what nodes have promised users, kept beside the cores, to see whether any promise is broken.

A lease promises KV for so many positions until some time. It ends early when its user closes the session or is gone.
Whatever else ends it before its time, or is promised beyond what the node has, is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fusion_node.types import MonotonicS, PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.records import MAX_LEASE_BYTES, Lease, Refusal


@dataclass(frozen=True, slots=True)
class _Promise:
    user: PeerId
    num_positions: int
    until: MonotonicS


class LeaseBook:
    """All promises of one node.

    Args:
        num_positions: of KV that it has.
        block_slots: in steps of which it is given away.

    Attributes:
        overlaps: times that more was promised than there is.
        broken: promises that ended before their time.
    """

    def __init__(self, num_positions: int, *, block_slots: int) -> None:
        self._num_positions = num_positions
        self._block_slots = block_slots
        self._promises: dict[bytes, _Promise] = {}
        self.overlaps = 0
        self.broken = 0

    def promised(self, lease: Lease, until: MonotonicS, *, now: MonotonicS) -> None:
        """A lease was signed."""
        blocks = -(-lease.num_positions // self._block_slots)
        self._promises = {key: each for key, each in self._promises.items() if each.until > now}
        self._promises[lease.session] = _Promise(PeerId(lease.user), blocks * self._block_slots, until)
        if sum(each.num_positions for each in self._promises.values()) > self._num_positions:
            self.overlaps += 1

    def closed(self, session: bytes, user: PeerId) -> None:
        """That user has closed the session."""
        promise = self._promises.get(session)
        if promise is not None and promise.user == user:
            del self._promises[session]

    def user_gone(self, user: PeerId) -> None:
        """Nothing has to be kept for that user any more."""
        self._promises = {key: each for key, each in self._promises.items() if each.user != user}

    def forgotten(self, session: bytes, *, now: MonotonicS) -> None:
        """The node keeps nothing of the session any more."""
        promise = self._promises.pop(session, None)
        if promise is not None and promise.until > now + 1e-6:
            self.broken += 1


def encode_lease(lease: Lease) -> bytes:
    """As it travels here: nothing is signed."""
    return msgspec.msgpack.encode(lease)


def open_lease(envelope: bytes, *, now: UnixS) -> Lease | Refusal:
    """The lease in an envelope."""
    try:
        lease = decode_bounded(envelope, Lease, limit_bytes=MAX_LEASE_BYTES)
    except WireError:
        return Refusal.MALFORMED
    return Refusal.EXPIRED if lease.expires_at <= now else lease
