"""What the planner is asked for and what it answers, as plain values.

``scheduler.planner.plan_route`` and ``plan_patch`` answer with Planned or Uncovered. Both say of every candidate that
they were given whether it serves, and why not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from fusion_node.types import LayerRange, PeerId
from scheduler.cost_model import RouteCost
from scheduler.topology import RouteStage


class Objective(enum.StrEnum):
    """What of a route is to be small."""

    LATENCY = "latency"
    """Seconds per token of one session."""
    THROUGHPUT = "throughput"
    """Seconds per token of all sessions together when the route is full; among equals, seconds per token of one."""
    FIRST_TOKEN = "first-token"  # noqa: S105 - a token of text
    """Seconds until the first token."""


class Topology(enum.StrEnum):
    """What stages of a route may be."""

    PIPELINE = "pipeline"
    """One node each."""
    FUSION = "fusion"
    """Fusion groups each, of at least two nodes: no node is ever sent a whole hidden state."""
    HYBRID = "hybrid"
    """Either, as is better."""


@dataclass(frozen=True, slots=True)
class Avoid:
    """Who is not to be planned with, for reasons that pass: failures, suspicion. There is no way around these here; who
    would rather have an avoided node than none plans again without.

    Attributes:
        peers: that serve nothing.
        pairs: of peers that do not hand rows to one another, in either direction.
    """

    peers: frozenset[PeerId] = frozenset()
    pairs: frozenset[tuple[PeerId, PeerId]] = frozenset()


class Reason(enum.StrEnum):
    """Why a candidate does not serve, coarsely."""

    RULE = "rule"
    """The user's rules reject it, or what they say of the route as a whole leaves no place for it."""
    NO_ROOM = "no-room"
    """Too little KV is free there."""
    AVOIDED = "avoided"
    """It failed lately."""
    UNREACHABLE = "unreachable"
    """There is no way from the user to it or back."""
    NO_WAY = "no-way"
    """No complete route leads through it, or none on which it is not needed twice."""
    OUTSIDE = "outside"
    """Nothing that it holds can be a stage: layers outside the model, or with which no stage may begin."""
    NOT_NEEDED = "not-needed"
    """All layers that it holds are served by stages that stay as they are."""
    SLOWER = "slower"
    """The best route through it is worse than the chosen one."""
    NOT_SEARCHED = "not-searched"
    """There were more candidates than a search takes, and for its layers others promised more."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why one candidate does not serve.

    Attributes:
        layers: what the candidate holds, as it was given.
        text: one clause for people, without the peer's name.
        excess_s: how much worse the best route through it is, at least: seconds per token, per token of all sessions
            together, or until the first token, as the objective has it; None unless that is the reason.
        via: the shortest way through it; empty unless that is the reason.
    """

    peer: PeerId
    layers: LayerRange
    reason: Reason
    text: str
    excess_s: float | None = None
    via: tuple[RouteStage, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternate:
    """What would take the place of a stage if it were lost while all others stay.

    Attributes:
        stages: one node or several, over the layers of the stage that they replace.
        excess_s: how much worse the route would be, as Rejection.excess_s.
    """

    stages: tuple[RouteStage, ...]
    excess_s: float


@dataclass(frozen=True, slots=True)
class Planned:
    """A route.

    Attributes:
        route: stages in order, covering every layer once.
        cost: of the whole route.
        alternates: for each stage; None where nothing could replace it.
        reasons: for each stage why it was chosen, one clause for people.
        rejections: every candidate that does not serve, ordered by peer and layers.
        is_optimal: whether the search proved that no route is better. False when there were more candidates than it
            takes, or when a rule about the whole route needed more tries than it makes.
        gap_s: by how much a better route of the candidates that were searched could undercut this one at most; in the
            unit of the objective. 0 when is_optimal.
        num_unsearched: candidates that were left out because there were too many.
    """

    route: tuple[RouteStage, ...]
    cost: RouteCost
    alternates: tuple[Alternate | None, ...] = ()
    reasons: tuple[str, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    is_optimal: bool = True
    gap_s: float = 0.0
    num_unsearched: int = 0


@dataclass(frozen=True, slots=True)
class Uncovered:
    """No route.

    Attributes:
        layers: ranges that no usable node holds; all of them when every layer is held and yet no route is allowed.
        without_room: ranges among them that a node holds which is allowed and lacks KV memory for the session.
        against_rules: ranges among them that only nodes hold which the rules reject.
        rejections: as in Planned. Two of these are equal whatever it says.
        is_proven: False when the search for a route that keeps all rules ended before it had tried everything.
    """

    layers: tuple[LayerRange, ...]
    without_room: tuple[LayerRange, ...] = ()
    against_rules: tuple[LayerRange, ...] = ()
    rejections: tuple[Rejection, ...] = field(default=(), compare=False)
    is_proven: bool = field(default=True, compare=False)
