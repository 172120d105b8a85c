"""What a simulation measures while it runs; fusion_node.simulator.report makes tables and JSON of it."""

from __future__ import annotations

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
        false_ejections: nodes that were replaced though they lived and could be reached.
    """

    requests: list[Answered] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    replayed_bytes: float = 0.0
    prefilled_bytes: float = 0.0
    false_ejections: int = 0
    bytes_sent: float = 0.0
    wrong_tokens: int = 0
    lease_overlaps: int = 0
    broken_leases: int = 0
    joined: int = 0
    left: int = 0
