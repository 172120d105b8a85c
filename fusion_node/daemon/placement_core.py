"""When a node takes which layers: intents instead of herding, looking again before layers are dropped, assignments.

Guarantees: of nodes that choose at the same time over the same view, no two that see each other's intent begin to load
the same layers without one of them having reckoned with the other: whoever has the higher digest chooses again, and who
has the lower one waits until the other has had the time to; if it stays, it has begun to load, and the lower one gives
way instead. A node that serves goes over to other layers only while somebody else who is ready holds what it drops. An
assignment counts once, from the one peer that the operator has named, within its dates.

Assumes: an intent that was announced is seen by the others within the wait; where one was seen too late by a node that
has chosen meanwhile, the other sees that node's, and gives way; where neither sees the other's, layers are held twice
for as long as it takes to reconsider. Whoever is asked for the others tells of all nodes of the model, of a moving one
what it will hold, with ``is_ready`` False.

States of a choice: first look, waiting (an intent is announced), settled. Timers, all in seconds: INTENT_WAIT_S and up
to INTENT_SPREAD_S more before each further look, by the digest, so that those who go first look first; between two
looks of a node that serves RECONSIDER_S, a half more or less by chance, or MISSING_S while layers are held by nobody.
Still ugly: an intent cannot be told from the beginning of a load, so that a node whose load takes hours holds its place
for as long as its record is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusion_node.types import LayerRange, PeerId, UnixS
from p2p.records import Assignment, Refusal, open_assignment
from scheduler.placement import Decision, Move, Policy, choose_range, digest, kept_layers
from scheduler.swarm_rate import Host, Work, holders_per_layer
from scheduler.topology import Legs

if TYPE_CHECKING:
    from random import Random

INTENT_WAIT_S = 1.5
"""An announcement reaches the peers that are connected in a round trip, and all others with the next look."""

INTENT_SPREAD_S = 1.5

MAX_LOOKS = 16
"""Of one choice. With so many who want the same, some hold it twice for a while."""

SECOND_LOOK = 2
"""The only one in which who is ready already may be in the way: a small model is loaded, and served, within a wait."""

RECONSIDER_S = 900.0
MISSING_S = 45.0


@dataclass(frozen=True, slots=True)
class Intend:
    """Announce this, and look again in so many seconds."""

    move: Move
    wait_s: float


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing is to be waited for: carry it out."""

    decision: Decision


@dataclass(slots=True)
class Choice:
    """One choice of a node that joins, or of one that reconsiders.

    Attributes:
        own: with what it holds now.
    """

    own: Host
    work: Work
    policy: Policy = field(default_factory=Policy)
    _intent: Move | None = None
    _reckoned_with: dict[PeerId, LayerRange] = field(default_factory=dict)
    """Ranges that others held, were loading or meant to load, when this node chose."""
    _patient_with: dict[PeerId, LayerRange] = field(default_factory=dict)
    """Intents in the way of this node's, seen at its last look, of others who should give way."""
    _num_looks: int = 0

    def look(self, others: Sequence[Host], legs: Legs) -> Intend | Settled:
        """At the swarm as it is now: first, and after every wait.

        Args:
            others: all nodes of the model.
        """
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS and self._intent is not None:
            return Settled(self._intent)
        counted = [host for host in others if self._counts(host)]
        known = {host.peer for host in counted}
        in_the_way = {h.peer: h.held for h in others if h.held is not None and self._is_in_the_way(h)}
        if self._intent is not None and known.isdisjoint(in_the_way):
            self._patient_with = in_the_way
            return Intend(self._intent, INTENT_WAIT_S + INTENT_SPREAD_S) if in_the_way else Settled(self._intent)
        self._patient_with = {}
        decision = choose_range(self.own, counted, self.work, legs, self.policy)
        before, self._intent = self._intent, decision if isinstance(decision, Move) else None
        self._reckoned_with = {h.peer: h.held for h in counted if h.held is not None}
        if self._intent is None or (before is not None and before.layers == self._intent.layers):
            return Settled(decision)
        return Intend(self._intent, INTENT_WAIT_S + INTENT_SPREAD_S * digest(self.own.peer) / 2**64)

    def _counts(self, host: Host) -> bool:
        """Whether this node has to reckon with another: not with one that meant to at the same time, and gives way."""
        if host.is_ready or self._num_looks == 1 or digest(host.peer) < digest(self.own.peer):
            return True
        return host.held in (self._reckoned_with.get(host.peer), self._patient_with.get(host.peer))

    def _is_in_the_way(self, host: Host) -> bool:
        """Whether another took up layers of this node's intent since this node chose it.

        One that is ready already is so in the second look alone: of a large swarm every look sees others.
        """
        ours = None if self._intent is None else self._intent.layers
        if ours is None or host.held is None or self._reckoned_with.get(host.peer) == host.held:
            return False
        return _overlap(ours, host.held) and (not host.is_ready or self._num_looks == SECOND_LOOK)


def next_look_s(rng: Random, *, are_missing: bool) -> float:
    """Until a node that serves looks at the swarm again."""
    return (MISSING_S if are_missing else RECONSIDER_S) * rng.uniform(0.5, 1.5)


def may_drop(own: Host, move: Move, others: Sequence[Host], work: Work, *, is_assigned: bool = False) -> bool:
    """Whether the layers of a move may be dropped now, when those that it takes are there.

    Args:
        is_assigned: by a scheduler, which sees to it that not all move at once.
    """
    if is_assigned:
        counts = holders_per_layer([host.held for host in others if host.is_ready], work.num_layers)
        return all(counts[layer] for part in move.drop for layer in range(part.start, part.stop))
    kept = kept_layers(own, others, work.num_layers)
    return not any(part.start <= layer < part.stop for part in move.drop for layer in kept)


@dataclass(slots=True)
class AssignmentDesk:
    """Which assignments a node obeys.

    Attributes:
        scheduler: the only one whose; None: nobody's.
        last_sequence: of those that counted. Forgotten with the process; the dates of an assignment are minutes apart.
    """

    own: PeerId
    scheduler: PeerId | None
    model_id: str
    work: Work
    last_sequence: int = 0

    def receive(
        self,
        envelope: bytes,
        *,
        source: PeerId,
        own: Host,
        others: Sequence[Host],
        now: UnixS,
        paused: str | None = None,
    ) -> LayerRange | str:
        """The layers to go over to, or why not, for people.

        Args:
            source: who has sent it.
            own: with what it holds and what fits; ``is_pinned`` when its operator has chosen the layers.
            paused: why the node serves nobody for now.
        """
        if self.scheduler is None:
            return "this node takes no assignments: its operator names a scheduler with --scheduler"
        if source != self.scheduler:
            return "this node takes assignments from another scheduler"
        assignment = open_assignment(envelope, now=now)
        if isinstance(assignment, Refusal):
            return f"the assignment is {assignment.value}"
        problem = self._problem(assignment, own, others, paused)
        if problem is not None:
            return problem
        self.last_sequence = assignment.sequence
        return LayerRange(assignment.start, assignment.stop)

    def _problem(self, assignment: Assignment, own: Host, others: Sequence[Host], paused: str | None) -> str | None:
        if assignment.scheduler != self.scheduler or assignment.node != self.own:
            return "the assignment is for another node, or by another scheduler"
        if assignment.sequence <= self.last_sequence:
            return "the assignment is older than one that was obeyed"
        if assignment.model_id != self.model_id:
            return "another model is served here"
        if paused is not None:
            return f"the node serves nobody now: {paused}"
        if own.is_pinned:
            return "the operator of this node has chosen its layers with --layers"
        if assignment.stop > self.work.num_layers:
            return f"the model has {self.work.num_layers} layers"
        layers, cuts = LayerRange(assignment.start, assignment.stop), self.work.cuts
        if not {layers.start, layers.stop} <= set(cuts):
            return f"no range of this model begins or stops where {layers} does"
        if len(layers) > own.capacity_layers:
            return f"{own.capacity_layers} layers fit here, not {len(layers)}"
        if own.held is not None and own.is_ready:
            move = Move(own.peer, layers, (), tuple(own.held.without(layers)), 0, 0.0, "")
            if not may_drop(own, move, others, self.work, is_assigned=True):
                return f"nobody else serves some of the layers {own.held} that are served here"
        return None


def _overlap(a: LayerRange, b: LayerRange) -> bool:
    return a.start < b.stop and b.start < a.stop
