"""What the exchange must carry at least, and what more there is: pure arithmetic.

Lower bound: each member sends each other member exactly what contributes to that one's part of each linear's output,
in float32, and the sum of squares of its columns where a norm needs it. Less would not do for these splits and this
arithmetic; compression is left out, since the contributions of random-looking sums do not compress. Where sums are
masked it is the same in words of 64 bits, of which a sum of squares takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_node.slices import Dims, contribution_bytes, exchange_width, exchanges, split

BEGIN_BYTES = 5
"""The kind of a segment and the length of the frame that begins in it."""

TAG_BYTES = 16
"""Of the cipher, per segment."""

MASK_BYTES = 4


def widths(dims: Dims, weights: Sequence[int]) -> list[list[int]]:
    """Values of a row, by exchange of a layer and by the member that gets them from each other one."""
    bounds = split(dims, weights)
    return [[exchange_width(dims, owner, exchange) for owner in bounds] for exchange in exchanges(dims)]


def least_bytes(dims: Dims, weights: Sequence[int], num_rows: int, *, is_masked: bool = False) -> int:
    """Of one layer, between all members together; of masked sums what their ring takes."""
    row_bytes = sum(
        contribution_bytes(dims, owner, exchange, is_masked=is_masked)
        for owner in split(dims, weights)
        for exchange in exchanges(dims)
    )
    return num_rows * row_bytes * (len(weights) - 1)


def least_messages(dims: Dims, weights: Sequence[int]) -> int:
    """Of one layer: one to each other member in each exchange."""
    return len(weights) * (len(weights) - 1) * len(exchanges(dims))


def websocket_bytes(segment_bytes: int, *, masked: bool) -> int:
    """What RFC 6455 puts in front of a segment."""
    head = 2 if segment_bytes < 126 else 4 if segment_bytes < 65_536 else 10
    return head + MASK_BYTES * masked


@dataclass(frozen=True, slots=True)
class Carried:
    """What the links between members carried.

    Attributes:
        num_layers: that the rows have passed, one step after another counted anew.
        sealed_bytes: of all segments.
        payload_bytes, header_bytes: of the contributions, and of the headers before them with their lengths.
        num_messages: with contributions.
        other_bytes: payloads and headers of other messages.
        num_others: other messages.
        least_bytes: the lower bound.
    """

    num_layers: int
    sealed_bytes: int
    payload_bytes: int
    header_bytes: int
    num_messages: int
    other_bytes: int
    num_others: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        return self.sealed_bytes / self.least_bytes

    def parts(self) -> dict[str, float]:
        """Bytes of one layer, of all members together, by what they are for."""
        num_frames = self.num_messages + self.num_others
        framing = num_frames * (BEGIN_BYTES + TAG_BYTES)
        named = {
            "contributions": self.payload_bytes,
            "headers": self.header_bytes,
            "lengths and tags": framing,
            "other messages": self.other_bytes,
        }
        named["acknowledgements, pings and further segments"] = self.sealed_bytes - sum(named.values())
        return {name: num_bytes / self.num_layers for name, num_bytes in named.items()}
