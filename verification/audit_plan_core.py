"""What a plan lets everybody be sent: who may hand what to whom, and how wide it is.

Guarantees: everything is derived from a plan and the sizes of its model, as the parties themselves derive it
(fusion_node.slices), and nothing from what a sender says of a tensor.

Assumes: the plan is sound, as nodes check it (p2p.records): stages without a gap, a weight for each member.

States: none. Timers: none.

Source: docs/protocol-data-plane.md, "Groups".

Ugly: a peer that stands in two stages next to one another, which no user plans, is taken for the first of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fusion_node.audit_records import PlanSeen, StageSeen
from fusion_node.errors import ConfigError
from fusion_node.slices import (
    Dims,
    Exchange,
    SliceBounds,
    exchange_width,
    exchanges,
    has_squares,
    masked_width,
    overlap,
    split,
)

EXCHANGE_NAMES = {exchange.name.lower(): exchange for exchange in Exchange}


@dataclass(frozen=True, slots=True)
class Stage:
    """Who serves which layers.

    Attributes:
        columns: that each of ``peers`` holds of the hidden state.
        bounds: what else each member of a group holds; empty for a single node, which holds all.
    """

    index: int
    start: int
    stop: int
    peers: tuple[str, ...]
    columns: tuple[range, ...]
    bounds: tuple[SliceBounds, ...] = ()

    @property
    def is_group(self) -> bool:
        return len(self.peers) > 1

    def columns_of(self, peer: str) -> range:
        return self.columns[self.peers.index(peer)]


@dataclass(frozen=True, slots=True)
class Way:
    """A tensor of a step that one peer may send another.

    Attributes:
        boundary: how many stages the rows have passed.
        columns: of the hidden state, that the receiver is sent.
    """

    boundary: int
    sender: str
    receiver: str
    columns: range


@dataclass(slots=True)
class RoutePlan:
    """One epoch of a session.

    Raises:
        ConfigError: it is no plan that nodes obey, or not of this model.

    Attributes:
        ways_into: of the rows of a step, by boundary; that behind the last stage are the results to the user.
        exchanges: of a layer of a group.
    """

    epoch: int
    seen: PlanSeen
    dims: Dims
    stages: tuple[Stage, ...] = field(init=False)
    ways_into: tuple[tuple[Way, ...], ...] = field(init=False)
    exchanges: tuple[Exchange, ...] = field(init=False)
    _ways: dict[tuple[str, str], list[Way]] = field(init=False)
    _stages_of: dict[tuple[str, ...], Stage | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        ends = [each.start for each in self.seen.stages[1:]] + [self.seen.stages[-1].stop]
        if any(not each.start < each.stop == end for each, end in zip(self.seen.stages, ends, strict=True)):
            raise ConfigError("its stages are not one behind the other")
        self.exchanges = exchanges(self.dims)
        self.stages = tuple(_stage(index, each, self.dims) for index, each in enumerate(self.seen.stages))
        self.ways_into = tuple(tuple(self._into(boundary)) for boundary in range(len(self.stages) + 1))
        self._ways = {}
        for way in (way for ways in self.ways_into[:-1] for way in ways):
            self._ways.setdefault((way.sender, way.receiver), []).append(way)

    @property
    def user(self) -> str:
        return self.seen.user

    @property
    def num_layers(self) -> int:
        return self.stages[-1].stop

    def way_of_step(self, sender: str, receiver: str, width: int) -> Way | None:
        """Which part of which state this is; of several that it could be, that of the right width."""
        ways = self._ways.get((sender, receiver), [])
        return next((way for way in ways if len(way.columns) == width), ways[0] if ways else None)

    def stage_of(self, *peers: str) -> Stage | None:
        """The first in which all of them are."""
        if peers not in self._stages_of:  # asked for every frame
            found = (stage for stage in self.stages if all(peer in stage.peers for peer in peers))
            self._stages_of[peers] = next(found, None)
        return self._stages_of[peers]

    def serves(self, peer: str) -> bool:
        return self.stage_of(peer) is not None

    def own_columns(self, peer: str, layer: int) -> range:
        """Of the hidden state after so many layers, by the plan; empty for who has no part in it."""
        for stage in self.stages:
            if stage.start <= layer <= stage.stop and peer in stage.peers:
                return stage.columns_of(peer)
        return range(0)

    def width_of(self, stage: Stage, exchange: Exchange, receiver: str) -> int:
        """Values of a row that every other member sends this one."""
        owner = stage.bounds[stage.peers.index(receiver)]
        return (masked_width if self.seen.masks else exchange_width)(self.dims, owner, exchange)

    def equations_of(self, stage: Stage, exchange: Exchange, receiver: str) -> int:
        """What a row tells ``receiver`` of the linear's input: as many sums of products of it."""
        width = exchange_width(self.dims, stage.bounds[stage.peers.index(receiver)], exchange)
        return width - has_squares(self.dims, exchange)

    def inputs_of(self, stage: Stage, exchange: Exchange, sender: str) -> int:
        """How many values of the linear's input a contribution of ``sender`` is made of, for each row."""
        bounds = stage.bounds[stage.peers.index(sender)]
        match exchange:
            case Exchange.O:
                return len(bounds.heads) * self.dims.head_dim
            case Exchange.DOWN:
                return len(bounds.channels)
            case _:
                return len(bounds.columns)

    def inputs_of_others(self, stage: Stage, exchange: Exchange, receiver: str) -> int:
        """The same of all that others contribute to ``receiver`` together."""
        return sum(self.inputs_of(stage, exchange, peer) for peer in stage.peers if peer != receiver)

    def _into(self, boundary: int) -> Iterable[Way]:
        whole = range(self.dims.hidden)
        before = [(self.user, whole)]
        after = [(self.user, whole)]
        if boundary > 0:
            stage = self.stages[boundary - 1]
            before = list(zip(stage.peers, stage.columns, strict=True))
        if boundary < len(self.stages):
            stage = self.stages[boundary]
            after = list(zip(stage.peers, stage.columns, strict=True))
        for sender, has in before:
            for receiver, takes in after:
                shared = overlap(has, takes)
                if shared:
                    yield Way(boundary, sender, receiver, shared)


def _stage(index: int, seen: StageSeen, dims: Dims) -> Stage:
    if len(seen.peers) == 1:
        return Stage(index, seen.start, seen.stop, seen.peers, (range(dims.hidden),))
    if len(seen.weights) != len(seen.peers) or len(set(seen.peers)) != len(seen.peers):
        raise ConfigError("a group has one weight for each member, and each once")
    bounds = split(dims, seen.weights)
    return Stage(index, seen.start, seen.stop, seen.peers, tuple(each.columns for each in bounds), bounds)
