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


def bulk_legs(
    legs: Legs, senders: Sequence[PeerId], receivers: Sequence[PeerId], needed: npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """As BulkLegs.bulk_legs, of any legs.

    Args:
        needed: [senders, receivers] of what pairs something has to be known; no way leads between the others.
    """
    if isinstance(legs, BulkLegs):
        one_way_s, rate_Bps = legs.bulk_legs(senders, receivers)
        return np.where(needed, one_way_s, np.inf), rate_Bps
    one_way_s = np.full(needed.shape, np.inf)
    rate_Bps = np.full(needed.shape, np.inf)
    for row, column in np.argwhere(needed).tolist():
        leg = legs.leg(senders[row], receivers[column])
        one_way_s[row, column] = leg.one_way_s
        if leg.rate_Bps is not None:
            rate_Bps[row, column] = leg.rate_Bps
    return one_way_s, rate_Bps
