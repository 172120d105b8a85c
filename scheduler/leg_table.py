"""All legs among the candidates of a plan at once, as arrays that a search can add up.

Assumes that half a million calls of Legs.leg would take longer than the search: legs that can answer for many pairs at
once should be BulkLegs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fusion_node.types import PeerId
from scheduler.topology import Legs

Floats = npt.NDArray[np.float64]


@runtime_checkable
class BulkLegs(Protocol):
    """Legs that answer for many pairs at once."""

    def bulk_legs(self, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """What Legs.leg says of each pair.

        Returns:
            Seconds one way, and B/s with infinity for None; both of shape [senders, receivers]. What they say of a peer
            and itself is not used.
        """
        ...


def bulk_legs(legs: Legs, senders: Sequence[PeerId], receivers: Sequence[PeerId]) -> tuple[Floats, Floats]:
    """As BulkLegs.bulk_legs, of any legs."""
    if isinstance(legs, BulkLegs):
        return legs.bulk_legs(senders, receivers)
    one_way_s = np.empty((len(senders), len(receivers)))
    rate_Bps = np.full((len(senders), len(receivers)), np.inf)
    for row, sender in enumerate(senders):
        for column, receiver in enumerate(receivers):
            leg = legs.leg(sender, receiver)
            one_way_s[row, column] = leg.one_way_s
            if leg.rate_Bps is not None:
                rate_Bps[row, column] = leg.rate_Bps
    return one_way_s, rate_Bps
