"""Who sends a stage which columns of its rows, and who gets which columns of what it makes of them.

Guarantees: a member of a group is sent its own columns and no others, whatever stands before it; and it hands on what
it has to exactly those that hold the same columns. Between two nodes of whole layers these are all columns.

Assumes: the plan was checked, and the groups in it can be split so (``parts_of`` says if not).

No states, no timers. Source: docs/protocol-data-plane.md, "Groups".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_node.slices import overlap, split_columns
from fusion_node.types import PeerId
from p2p.messages import StageTiming, Step, TensorMeta
from p2p.records import Plan, PlanMember, PlanStage


@dataclass(frozen=True, slots=True)
class Part:
    """Columns that go from or to one peer, counted in the whole row."""

    peer: PeerId
    columns: range


@dataclass(frozen=True, slots=True)
class Parts:
    """A stage's place, or a member's, among those before and behind it.

    Attributes:
        own: columns that are held here.
        sources: who sends which of them, in the order of the columns, without a gap.
        targets: who gets which of them.
        others: the other members of the group; empty for a stage of one node.
    """

    own: range = range(0)
    sources: tuple[Part, ...] = ()
    targets: tuple[Part, ...] = ()
    others: tuple[PeerId, ...] = ()

    @property
    def width(self) -> int:
        """Columns that are held here."""
        return len(self.own)

    def width_from(self, peer: PeerId) -> int:
        """Columns that a peer sends; 0 if it sends none."""
        return next((len(part.columns) for part in self.sources if part.peer == peer), 0)

    def goes_to(self, peer: PeerId) -> bool:
        """Whether rows go to that peer."""
        return any(part.peer == peer for part in self.targets)


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """What one peer has sent of an entry's rows."""

    peer: PeerId
    tensor: TensorMeta
    payload: Any


@dataclass(frozen=True, slots=True)
class Joined:
    """The rows of one entry, as they have come from several peers: side by side, in this order."""

    parts: tuple[JoinedPart, ...]

    def __len__(self) -> int:
        return sum(len(part.payload) for part in self.parts)


def parts_of(plan: Plan, stage: int, member: int, row_size: int) -> Parts:
    """The place of one member, or of the one node, of a stage.

    Args:
        row_size: columns of a whole row.

    Raises:
        ConfigError: a group among the three stages cannot share so many columns.
    """
    own_stage, user = plan.stages[stage], PeerId(plan.user)
    own = _columns(own_stage, row_size)[member]
    before = plan.stages[stage - 1] if stage else None
    behind = plan.stages[stage + 1] if stage + 1 < len(plan.stages) else None
    return Parts(
        own,
        _shared(before, own, row_size) if before is not None else (Part(user, own),),
        _shared(behind, own, row_size) if behind is not None else (Part(user, own),),
        tuple(PeerId(each.peer) for index, each in enumerate(own_stage.members) if index != member),
    )


def to_dial(plan: Plan, stage: int, parts: Parts) -> tuple[PlanMember, ...]:
    """To whom a stage needs links before it can serve: those behind it, and the other members of its group."""
    places = [*plan.stages[stage].members, *(plan.stages[stage + 1].places if stage + 1 < len(plan.stages) else ())]
    return tuple(place for place in places if place.peer in parts.others or parts.goes_to(PeerId(place.peer)))


def cut(payload: Any, num_rows: int, own: range, columns: range) -> Any:
    """Some columns of encoded rows of which ``own`` are there; without a copy where they are all.

    Args:
        payload: bytes-like, row after row, with as many bytes for every value.
    """
    if columns == own or not num_rows:
        return payload
    rows = np.frombuffer(payload, dtype=np.uint8).reshape(num_rows, -1)
    value_bytes = rows.shape[1] // len(own)
    start, stop = (value_bytes * (column - own.start) for column in (columns.start, columns.stop))
    return memoryview(rows[:, start:stop].tobytes())


def header_of(message: Step) -> tuple[object, ...]:
    """What has to be equal in all parts of an entry: everything but the columns, and what the members spent."""
    return (
        message.session,
        message.epoch,
        message.sequence,
        message.first_node,
        message.parent,
        message.parents,
        message.advance,
        message.want,
        message.tensor.dtype,
        message.tensor.num_rows,
        len(message.timings),
        message.covers,
        message.stop_stage,
        message.num_nodes,
        message.live,
        message.tap,
    )


def slowest(timings: Sequence[tuple[StageTiming, ...]]) -> tuple[StageTiming, ...]:
    """What a step took on its way, of which several peers tell: each stage is as slow as its slowest member."""
    return tuple(
        StageTiming(*(max(getattr(each, name) for each in of_stage) for name in StageTiming.__struct_fields__))
        for of_stage in zip(*timings, strict=True)
    )


def _shared(stage: PlanStage, own: range, row_size: int) -> tuple[Part, ...]:
    """With whom of a stage columns are shared, and which."""
    shared = [
        Part(PeerId(place.peer), overlap(own, columns))
        for place, columns in zip(stage.places, _columns(stage, row_size), strict=True)
    ]
    return tuple(part for part in shared if part.columns)


def _columns(stage: PlanStage, row_size: int) -> tuple[range, ...]:
    return _split(row_size, stage.weights) if stage.is_group else (range(row_size),)


@functools.lru_cache(256)
def _split(row_size: int, weights: tuple[int, ...]) -> tuple[range, ...]:
    return split_columns(row_size, weights)
