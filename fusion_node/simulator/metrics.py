"""What a simulation measures while it runs; fusion_node.simulator.report makes tables and JSON of it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that ended.

    Attributes:
        lasted_s: until its end, whatever that was.
        wanted, tokens: that the user asked for, and got.
        first_s: until the first token; None when none came.
        decode_s: from the first to the last token.
        error: name of the error's class; empty when the answer is whole.
    """

    began_s: float
    lasted_s: float
    wanted: int
    tokens: int
    first_s: float | None
    decode_s: float
    error: str
    is_wrong: bool


@dataclass(frozen=True, slots=True)
class Stall:
    """A repair, as the user felt it.

    Attributes:
        fault: what had befallen the node that was replaced; ``none`` when it was well.
    """

    at_s: float
    seconds: float
    fault: str
    cause: str
    kind: str


class Standing(enum.StrEnum):
    """What there was against a node when an answer went on without it: as the world knows, and no user does."""

    GONE = "gone"
    """It was killed, or has lost power."""
    LEAVING = "leaving"
    """It was told to stop, and says so."""
    HANG = "hang"
    """It is stopped, or was a moment ago."""
    RESET = "reset"
    """All its links were reset a moment ago. It lives: whoever loses a link cannot know."""
    GARBAGE = "garbage"
    """It has sent rows a moment ago that are none."""
    PARTITION = "partition"
    """Its part of the network is cut off from the user's, or was a moment ago."""
    REFUSED = "refused"
    """It has said itself that it does not go on."""
    LIES = "lies"
    """It is not as fast or large as it claims."""
    BESIDE = "beside"
    """Nothing; there was something of the above against a neighbour of it in the route."""
    WELL = "well"
    """Nothing."""

    @property
    def lives(self) -> bool:
        """The node is there, and means to stay."""
        return self not in (Standing.GONE, Standing.LEAVING)

    @property
    def is_wrong(self) -> bool:
        """Nothing is the matter with the node itself."""
        return self in (Standing.BESIDE, Standing.WELL)


@dataclass(frozen=True, slots=True)
class Ejection:
    """A node that was in an answer's route before a repair, and is not after it.

    Attributes:
        error: what was said against it; empty where only another was named.
        beside: what there was against the others of the old route.
    """

    at_s: float
    peer: str
    standing: Standing
    error: str
    beside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the swarm at one time.

    Attributes:
        covered: share of the layers that at least one node serves that lives and is not stopped.
    """

    at_s: float
    live: int
    covered: float
    active: int


@dataclass(slots=True)
class Metrics:
    """Everything that is counted.

    Attributes:
        replayed_bytes: rows that were handed on or computed again by a repair, in the model's own bytes.
        prefilled_bytes: of them, in new sessions.
        lease_overlaps, broken_leases: see fusion_node.simulator.leases.
        false_ejections: repairs that were told to be for a node which nothing had befallen.
        answered_s: for which answers were under way, of all users together.
    """

    requests: list[Answered] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    replayed_bytes: float = 0.0
    prefilled_bytes: float = 0.0
    ejections: list[Ejection] = field(default_factory=list)
    false_ejections: int = 0
    bytes_sent: float = 0.0
    wrong_tokens: int = 0
    lease_overlaps: int = 0
    broken_leases: int = 0
    joined: int = 0
    left: int = 0

    @property
    def answered_s(self) -> float:
        return sum(each.lasted_s for each in self.requests)

    @property
    def num_wrong(self) -> int:
        """Nodes that were replaced with which nothing was the matter, also those that were suspected along with a
        neighbour that was at fault."""
        return sum(each.standing.is_wrong for each in self.ejections)
