"""Names for the things that every package passes around: ids, the two clocks, layer ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from fusion_node.errors import InvalidLayers

PeerId = NewType("PeerId", str)
"""libp2p peer id of an Ed25519 key in base58btc, for example ``12D3KooW…``; the public key can be read out of it."""

_BETWEEN_MEMBERS = "+"
"""In no peer id: base58 has only letters and digits."""

ModelId = NewType("ModelId", str)
"""Root hash of the weight manifest, 64 lower-case hexadecimal digits."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes chosen by the user's side."""

MonotonicS = NewType("MonotonicS", float)
"""Seconds of a local monotonic clock. Never leaves the process."""

UnixS = NewType("UnixS", float)
"""Seconds since 1970 in UTC. Only in signed records and plans; never used to measure a duration."""


def group_id(members: Sequence[PeerId]) -> PeerId:
    """What stands for a fusion group where a peer is named: the ids of its members, in the order of their slices."""
    return PeerId(_BETWEEN_MEMBERS.join(members))


def members_of(peer: PeerId) -> tuple[PeerId, ...]:
    """The members of a group, or the peer itself."""
    return tuple(map(PeerId, peer.split(_BETWEEN_MEMBERS)))


def is_group(peer: PeerId) -> bool:
    """Whether the id stands for a fusion group."""
    return _BETWEEN_MEMBERS in peer


_RANGE = re.compile(r"^(\d{1,5}):(\d{1,5})$")


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Decoder layers ``[start, stop)``.

    Raises:
        InvalidLayers: when the range is empty or negative.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidLayers(f"layers {self.start}:{self.stop} is not a range: START must be below STOP")

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Reads ``START:STOP``, for example ``0:10`` for the first ten layers."""
        match = _RANGE.match(text.strip())
        if match is None:
            raise InvalidLayers(f"layers {text!r} is not a range: write START:STOP, for example 0:10")
        return cls(int(match[1]), int(match[2]))

    def check_within(self, num_layers: int) -> None:
        """Raises InvalidLayers when the range reaches beyond a model of ``num_layers`` layers."""
        if self.stop > num_layers:
            raise InvalidLayers(
                f"layers {self} lies outside the model, which has {num_layers} layers: "
                f"use a range within 0:{num_layers}"
            )

    def without(self, other: LayerRange | None) -> list[LayerRange]:
        """The parts of this range that lie outside another one, in order."""
        if other is None or other.stop <= self.start or self.stop <= other.start:
            return [self]
        parts = [(self.start, other.start), (other.stop, self.stop)]
        return [LayerRange(start, stop) for start, stop in parts if start < stop]

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"
