"""Slots for the streams of one kind that are served at once, of which every peer has a share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from libp2p.peer.id import ID

from fusion_node.types import PeerId
from p2p.seam import Gate


class Slots:
    """See the head of this file.

    Args:
        at_once: slots, for all peers together.
        per_peer: of these.
        gate: is asked about every stream that finds a slot.
    """

    def __init__(self, gate: Gate, *, at_once: int, per_peer: int) -> None:
        self._gate = gate
        self._at_once = at_once
        self._per_peer = per_peer
        self._num_of: Counter[ID] = Counter()

    @contextmanager
    def slot_for(self, their_id: ID) -> Iterator[bool]:
        """One of the slots, for as long as the context lasts. False: there is none, or the peer is refused."""
        peer = PeerId(their_id.to_base58())
        is_full = self._num_of.total() >= self._at_once or self._num_of[their_id] >= self._per_peer
        if is_full or self._gate.refuse_stream(peer) is not None:
            yield False
            return
        self._num_of[their_id] += 1
        try:
            yield True
        finally:
            self._gate.stream_closed(peer)
            self._num_of[their_id] -= 1
            if not self._num_of[their_id]:
                del self._num_of[their_id]
