"""What a scheduler knows of a swarm: who holds which layers, how fast, and how far everybody is from everybody.

Plain values, made by the composition root from records and measurements, and read by the planner, the placement and
the repair of routes. Whatever a node claims has been clamped before it is here (scheduler.claims).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from fusion_node.types import LayerRange, PeerId

SPEED_ROWS = (1, 16, 256)
"""Rows of the forwards that a Speed gives: a decoded token, a speculation tree, a chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that one layer takes for a forward of 1, 16 and 256 rows."""

    rows_1_s: float
    rows_16_s: float
    rows_256_s: float

    def seconds_per_layer(self, num_rows: float) -> float:
        """For a forward of so many rows: linear between the three, and in proportion above the last."""
        if num_rows <= 1:
            return self.rows_1_s
        if num_rows <= 16:
            return self.rows_1_s + (self.rows_16_s - self.rows_1_s) * (num_rows - 1) / 15
        if num_rows <= 256:
            return self.rows_16_s + (self.rows_256_s - self.rows_16_s) * (num_rows - 16) / 240
        return self.rows_256_s * num_rows / 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may serve a stage. A node with two ranges of a model that do not touch is two of these.

    Attributes:
        layers: what it holds.
        speed: believed, that is clamped and, where there are measurements, corrected by them.
        kv_free_positions: announced room for a new session.
        queue_s: what a decode step waits there before it is computed.
        numerics: class that it serves; empty when all candidates have the same.
        operator, region, price: tags that its operator chose, for rules.
        note: for people, why it ranks below what it claims; empty when it does not.
        members: of a fusion group (scheduler.groups), as each of them is believed; empty: it is one node.
        exchange: what the members' exchanges add to each layer, beside what they compute; None: nothing.
        weights: by which the members of a group share its layers (fusion_node.slices), in their order.
        columns: ``[start, stop)`` of the hidden state that each of them holds.
    """

    peer: PeerId
    layers: LayerRange
    speed: Speed
    kv_free_positions: int
    queue_s: float = 0.0
    numerics: str = ""
    operator: str = ""
    region: str = ""
    price: float = 0.0
    note: str = ""
    members: tuple[Candidate, ...] = ()
    exchange: Speed | None = None
    weights: tuple[int, ...] = ()
    columns: tuple[tuple[int, int], ...] = ()

    @property
    def nodes(self) -> tuple[Candidate, ...]:
        """Those that compute: the members, or itself."""
        return self.members or (self,)

    @property
    def peers(self) -> frozenset[PeerId]:
        """All ids that stand for it or a part of it."""
        return frozenset((self.peer, *(member.peer for member in self.members)))


class LegSource(enum.StrEnum):
    """Where the round trip of a leg comes from, best first."""

    MEASURED = "measured"
    """By the user."""
    ANNOUNCED = "announced"
    """By one of its ends, or by both: the larger of the two."""
    PREDICTED = "predicted"
    """By network coordinates (scheduler.vivaldi)."""
    BOUND = "bound"
    """Half the sum of both ends' round trips to the user, which the triangle inequality allows."""
    UNKNOWN = "unknown"
    """Nothing is known: a round trip as between continents."""


@dataclass(frozen=True, slots=True)
class Leg:
    """The way of rows from one peer to another.

    Attributes:
        one_way_s: half the round trip.
        rate_Bps: that payload moves at; None where it does not limit anything, or nothing is known.
    """

    one_way_s: float
    source: LegSource
    rate_Bps: float | None = None

    def seconds(self, payload_bytes: float) -> float:
        """Until a payload is there whole."""
        return self.one_way_s + (0.0 if self.rate_Bps is None else payload_bytes / self.rate_Bps)


class Legs(Protocol):
    """All legs of a swarm. None stands for the user."""

    def leg(self, sender: PeerId | None, receiver: PeerId | None) -> Leg:
        """From one peer to another. Never fails: see LegSource.UNKNOWN."""
        ...


@dataclass(frozen=True, slots=True)
class RouteStage:
    """One stage of a route."""

    peer: PeerId
    layers: LayerRange
