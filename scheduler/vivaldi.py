"""Network coordinates: predict the round trip between two peers that have never measured one another.

Every peer holds a point and a height; the distance of two points plus both heights predicts the round trip. The point
stands for the place in the core of the internet, the height for the line between it and the peer's home, which every
path goes through. A peer that measures a round trip moves its own coordinate a little, as if a spring of that length
lay between it and the other.

Guarantees: whatever others say, a coordinate stays finite and within MAX_COORDINATE_S, and one sample moves it by
2 * MOVES * MAX_MOVE_S at most. What is far off most samples pulls less than those do, and a peer pulls no more for
being measured more often. So a tenth of liars, whatever their coordinates and delays, costs the others little: in a
swarm of 60 with a tenth of broken triangles, the median relative error is 0.12 to 0.14 after 200 measurements each, and
0.12 to 0.16 with liars of four kinds (tests/core/test_vivaldi.py).

Assumes: round trips are those of ``observe``'s caller, timed by itself: a peer can add to one, but not shorten it.

States: none but the coordinate; its error is 1 until something was measured. No timers.

Source: Dabek, Cox, Kaashoek, Morris: "Vivaldi: A Decentralized Network Coordinate System", SIGCOMM 2004: figure 3 with
the height vectors of section 5.4. The filter of samples is that of Ledlie, Gardner, Seltzer: "Network Coordinates in
the Wild", NSDI 2007, and so is the pull towards the origin, which keeps all coordinates together from drifting away.

Ugly: round trips break the triangle inequality, and no coordinates can show that. The error that is left is measured by
every peer for itself, and goes with its coordinate.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusion_node.types import PeerId

if TYPE_CHECKING:
    from random import Random

DIMENSIONS = 3
"""Two suffice for most of the internet, a third halves what is left (Dabek et al., section 5.3)."""

TUNING = 0.25
"""Both of the paper's constants: how far along a spring one sample moves, and how much it weighs in the error."""

MIN_HEIGHT_S = 1e-4
"""So that two peers at one point still push one another apart."""

MIN_ERROR, MAX_ERROR = 0.1, 1.5
"""Of a coordinate, relative. Who claims to be more certain than the lower is not believed: it would pull everybody."""

MAX_COORDINATE_S = 10.0
"""Each component and the height: a hundred times what the earth is wide."""

MAX_ROUND_TRIP_S, MIN_ROUND_TRIP_S = 5.0, 5e-5
"""A sample above is a peer that hangs, not a distance. One below, between two processes of a machine, is its noise."""

MAX_MOVE_S = 0.05
"""Along one spring, and towards the origin. The way across the world is taken in ten."""

GRAVITY_S = 1.0
"""The pull towards the origin is TUNING * (distance / GRAVITY_S)**2 of the distance: a quarter of a hundredth at 0.1 s,
where coordinates really are."""

RECENT_ROUND_TRIPS = 4
"""Of one peer, of which the smallest is the sample: what is added to it is queueing."""

RECENT_SAMPLES = 32
"""Whose typical misfit says what is far off."""

FAR_OFF = 2.0
"""Times the typical misfit. What is further off pulls less the further it is: of 2, 3 and 5 this is the best, with and
without liars (tests/core/test_vivaldi.py has the swarm)."""

MOVES = 4
"""Along the springs to peers that are drawn among all held, for every sample that is taken: measuring costs more than
reckoning, and a peer that is measured more often than others does not pull more than they."""

ENOUGH_SAMPLES = 8
"""Before anything is called far off."""

MAX_PEERS = 64
"""Whose round trips are held."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Where a peer is.

    Attributes:
        vector: DIMENSIONS seconds.
        height: seconds.
        error: typical |predicted - measured| / measured of its own predictions.
    """

    vector: tuple[float, ...] = (0.0,) * DIMENSIONS
    height: float = MIN_HEIGHT_S
    error: float = 1.0

    def distance(self, other: Coordinate) -> float:
        """The predicted round trip in seconds. Both must have the same number of dimensions (see ``is_sane``)."""
        return math.dist(self.vector, other.vector) + self.height + other.height

    @property
    def is_sane(self) -> bool:
        """Whether it can be reckoned with: finite, of our dimensions, within the bounds, with an error."""
        return (
            len(self.vector) == DIMENSIONS
            and all(abs(component) <= MAX_COORDINATE_S for component in self.vector)
            and 0.0 <= self.height <= MAX_COORDINATE_S
            and 0.0 <= self.error < math.inf
        )


@dataclass(slots=True)
class _Held:
    """What was measured of a peer."""

    coordinate: Coordinate
    round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ROUND_TRIPS))


class Vivaldi:
    """One peer's own coordinate: see the head of this file.

    Args:
        rng: draws the direction in which two peers at one point part, and along whose springs to move.
        coordinate: of an earlier run.
    """

    def __init__(self, rng: Random, coordinate: Coordinate | None = None) -> None:
        self.coordinate = coordinate if coordinate is not None and coordinate.is_sane else Coordinate()
        self._rng = rng
        self._held: dict[PeerId, _Held] = {}
        self._misfits: deque[float] = deque(maxlen=RECENT_SAMPLES)

    def observe(self, peer: PeerId, theirs: Coordinate, round_trip_s: float) -> bool:
        """Takes a round trip that was just measured to a peer that says it is at ``theirs``.

        Returns:
            Whether it was taken. Not if either is absurd.
        """
        if not theirs.is_sane or not 0.0 <= round_trip_s <= MAX_ROUND_TRIP_S:
            return False
        held = self._held.pop(peer, None)
        if held is None:
            held = _Held(theirs)
            if len(self._held) >= MAX_PEERS:
                del self._held[next(iter(self._held))]
        self._held[peer] = held  # the one that was measured last comes last
        held.coordinate = theirs
        held.round_trips_s.append(max(round_trip_s, MIN_ROUND_TRIP_S))
        for one in self._rng.choices(list(self._held.values()), k=MOVES):
            self._move(one.coordinate, min(one.round_trips_s))
        return True

    def _move(self, theirs: Coordinate, round_trip_s: float) -> None:
        ours = self.coordinate
        predicted_s = ours.distance(theirs)
        misfit_s = round_trip_s - predicted_s
        their_error = min(max(theirs.error, MIN_ERROR), MAX_ERROR)
        weight = ours.error / (ours.error + their_error)
        # What is far off most of what was seen may be a liar, and else a broken triangle: no help either.
        is_known = len(self._misfits) >= ENOUGH_SAMPLES
        edge = FAR_OFF * statistics.median(self._misfits) if is_known else MAX_ROUND_TRIP_S
        self._misfits.append(abs(misfit_s))
        relative = min(abs(misfit_s), edge) / round_trip_s
        error = ours.error + TUNING * weight * (min(relative, MAX_ERROR) - ours.error)
        force_s = misfit_s if abs(misfit_s) <= edge else edge * edge / misfit_s
        step_s = min(max(TUNING * weight * force_s, -MAX_MOVE_S), MAX_MOVE_S)
        direction, height_share = self._direction(ours, theirs)
        from_origin_s = math.hypot(*ours.vector)
        pull = min(TUNING * (from_origin_s / GRAVITY_S) ** 2, MAX_MOVE_S / max(from_origin_s, MAX_MOVE_S))
        vector = tuple(
            min(max((x + step_s * unit) * (1.0 - pull), -MAX_COORDINATE_S), MAX_COORDINATE_S)
            for x, unit in zip(ours.vector, direction, strict=True)
        )
        height = min(max(ours.height + step_s * height_share, MIN_HEIGHT_S), MAX_COORDINATE_S)
        self.coordinate = Coordinate(vector, height, min(max(error, MIN_ERROR), MAX_ERROR))

    def _direction(self, ours: Coordinate, theirs: Coordinate) -> tuple[tuple[float, ...], float]:
        """The way away from them: its share of every dimension, and of the height."""
        away = tuple(x - y for x, y in zip(ours.vector, theirs.vector, strict=True))
        if math.hypot(*away) < 1e-9:
            away = tuple(self._rng.gauss(0.0, MIN_HEIGHT_S) for _ in away)
        total = math.hypot(*away) + ours.height + theirs.height
        return tuple(x / total for x in away), (ours.height + theirs.height) / total
