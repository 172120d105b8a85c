"""A plan as people and programs read it: each leg and stage with its time and where that is known from, and why.

The structs are the JSON of ``fusion-node plan --json``: names are stable, times are milliseconds. Texts of strangers
(operator, region, device, reasons that quote them) are printable and bounded. A peer of None is the user.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fusion_node.client.connection import MeasuredNode
from fusion_node.client.group_members import stage_candidate
from fusion_node.client.routing import Explained, Look, Planned
from fusion_node.client.topology import coordinate_of
from fusion_node.client.user_rules import UserRules
from fusion_node.slices import Dims, ModelSlice, split
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from fusion_node.wire import printable
from scheduler.cost_model import LegCost, compute_s_per_layer
from scheduler.ownership import WHOLE, Ownership
from scheduler.plans import Alternate, Objective, Topology
from scheduler.plans import Planned as PlannedRoute
from scheduler.topology import LegSource
from scheduler.vivaldi import Coordinate

MAX_TAG_CHARACTERS = 48
MAX_TEXT_CHARACTERS = 240
MAX_PROBLEM_CHARACTERS = 2000


class LegView(msgspec.Struct, frozen=True):
    """One leg of a step's loop.

    Attributes:
        ms: for a step: the way, the payload behind the first byte, and what the message costs both ends.
        source: where the way is known from (scheduler.topology.LegSource).
        error_ms: by which a predicted way is typically wrong; None for other sources.
    """

    sender: str | None
    receiver: str | None
    ms: float
    way_ms: float
    payload_ms: float
    overhead_ms: float
    source: str
    error_ms: float | None


class PlaceView(msgspec.Struct, frozen=True):
    """Layers ``[start, stop)`` of a node."""

    peer: str
    start: int
    stop: int


class AlternateView(msgspec.Struct, frozen=True):
    """What would take the place of a stage that is lost.

    Attributes:
        excess_ms: by how much the route would be worse, in what the objective counts.
    """

    stages: tuple[PlaceView, ...]
    excess_ms: float


class MemberView(msgspec.Struct, frozen=True):
    """A member of a group.

    Attributes:
        slice: which it holds, as ``0/3``.
        columns, heads, channels: ``[start, stop)`` of the hidden state's columns, the query heads and the MLP's
            channels (of every expert) that are its own.
        kv_heads: that its query heads read; one that others' read too is kept by each.
        round_trip_ms, compute_ms, queue_ms, is_measured, why, note, ownership: as in PlannedStageView, of its share.
    """

    peer: str
    operator: str
    region: str
    price: float
    device: str
    slice: str
    columns: tuple[int, int]
    heads: tuple[int, int]
    kv_heads: tuple[int, ...]
    channels: tuple[int, int]
    round_trip_ms: float
    compute_ms: float
    queue_ms: float
    is_measured: bool
    why: str
    note: str
    ownership: str = ""


class PlannedStageView(msgspec.Struct, frozen=True):
    """One stage.

    Attributes:
        peer: of a group, the ids of its members with ``+`` between them; what is said of one node beside, as operator
            and device, is its first member's.
        members: of a group; empty: it is one node.
        exchange_ms: of a step, for what members of a group exchange in all layers.
        round_trip_ms: between the user and the node, measured.
        compute_ms, queue_ms: of a step; what it waits before it is computed.
        is_measured: whether the speed was corrected by what rounds with the node took; else it is the node's word.
        why: it was chosen.
        note: how its measured speed falls short of what it announces; empty when it does not.
        alternate: None when nothing could take its place.
        ownership: which rule lets it hold its layers; empty where there are none on that, and of a group, whose members
            have theirs.
    """

    peer: str
    operator: str
    region: str
    price: float
    device: str
    start: int
    stop: int
    round_trip_ms: float
    compute_ms: float
    queue_ms: float
    is_measured: bool
    why: str
    note: str
    alternate: AlternateView | None
    members: tuple[MemberView, ...] = ()
    exchange_ms: float = 0.0
    ownership: str = ""


class RejectedView(msgspec.Struct, frozen=True):
    """A shard that does not serve.

    Attributes:
        reason: one of scheduler.plans.Reason.
        why: in words.
        excess_ms: how much worse the best route through it is at least, in what the objective counts; None unless that
            is the reason.
        note: as in PlannedStageView.
    """

    peer: str
    operator: str
    region: str
    price: float
    device: str
    start: int
    stop: int
    reason: str
    why: str
    excess_ms: float | None
    note: str


class PlanView(msgspec.Struct, frozen=True):
    """A route for one answer, or why there is none.

    Attributes:
        rules: of the user, in words.
        prompt_tokens, max_tokens: of the answer.
        num_found, num_measured: nodes that have announced shards of the model, and those whose round trip is known.
        coordinate_error: relative error of the user's own network coordinate; None when it has none.
        legs: one more than there are stages: the last one leads back to the user. Empty without a route.
        user_ms: the user's own part of a step: embedding, norm, head and sampling.
        ms_per_token: the sum of all legs, stages and the user's part.
        opening_ms, first_token_ms: until the session is open, and from then until the first token.
        full_tokens_per_s, bottleneck: of all sessions together when the route is full, and what limits them.
        is_optimal: whether the search proved that no route of these candidates is better; else ``gap_ms`` bounds by how
            much one could be, and ``num_unsearched`` candidates were left out.
        problem: why there is no route; empty when there is one.
        topology: what stages may be.
        masks: sums of groups are masked.
    """

    model: str
    model_id: str
    numerics: str
    num_layers: int
    objective: str
    rules: tuple[str, ...]
    prompt_tokens: int
    max_tokens: int
    num_found: int
    num_measured: int
    coordinate_error: float | None
    stages: tuple[PlannedStageView, ...] = ()
    legs: tuple[LegView, ...] = ()
    user_ms: float = 0.0
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    opening_ms: float | None = None
    first_token_ms: float | None = None
    full_tokens_per_s: float | None = None
    bottleneck: str = ""
    is_optimal: bool = True
    gap_ms: float = 0.0
    num_unsearched: int = 0
    rejected: tuple[RejectedView, ...] = ()
    problem: str = ""
    topology: str = "pipeline"
    masks: bool = False


def view_of(
    explained: Explained,
    *,
    model: StoredModel,
    numerics: str,
    num_layers: int,
    objective: Objective,
    rules: UserRules,
    prompt_tokens: int,
    max_tokens: int,
    topology: Topology = Topology.PIPELINE,
    dims: Dims | None = None,
    masks: bool = False,
) -> PlanView:
    """What led to a plan, and the plan, if there is one.

    Args:
        dims: sizes of the model's layers, where stages may be groups.
    """
    look = explained.look
    view = PlanView(
        model=model.name,
        model_id=model.model_id,
        numerics=numerics,
        num_layers=num_layers,
        objective=objective.value,
        rules=rules.in_words(),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        num_found=len(look.records),
        num_measured=len(look.reached),
        coordinate_error=None if look.coordinate is None else round(look.coordinate.error, 3),
        rejected=_rejected(explained),
        problem=printable(explained.problem, limit=MAX_PROBLEM_CHARACTERS),
        topology=topology.value,
        masks=masks,
    )
    if not isinstance(explained.found, Planned) or explained.found.plan is None:
        return view
    plan = explained.found.plan
    cost = plan.cost
    return msgspec.structs.replace(
        view,
        stages=_stages(plan, explained, explained.found, dims, rules.ownership),
        legs=_legs(cost.legs, look),
        user_ms=_ms(cost.user_step_s),
        ms_per_token=_ms(cost.seconds_per_token),
        tokens_per_s=round(1.0 / cost.seconds_per_token, 3),
        opening_ms=_ms(cost.opening_s),
        first_token_ms=_ms(cost.time_to_first_token_s),
        full_tokens_per_s=round(cost.tokens_per_s, 3),
        bottleneck=cost.bottleneck,
        is_optimal=plan.is_optimal,
        gap_ms=_ms(plan.gap_s),
        num_unsearched=plan.num_unsearched,
    )


def _stages(
    plan: PlannedRoute, explained: Explained, found: Planned, dims: Dims | None, ownership: Ownership
) -> tuple[PlannedStageView, ...]:
    notes = _notes(explained)
    views = []
    for index, cost in enumerate(plan.cost.stages):
        peer, layers = cost.stage.peer, cost.stage.layers
        node = found.stages[index][0]
        views.append(
            PlannedStageView(
                peer=peer,
                operator=_tag(node.record.operator),
                region=_tag(node.record.region),
                price=node.record.price,
                device=_tag(node.record.device),
                start=layers.start,
                stop=layers.stop,
                round_trip_ms=_ms(2 * explained.legs.leg(None, peer).one_way_s),
                compute_ms=_ms(cost.compute_s),
                queue_ms=_ms(cost.queue_s),
                is_measured=peer in explained.measured_speeds,
                why=_text(plan.reasons[index]) if index < len(plan.reasons) else "",
                note=notes.get(peer, ""),
                alternate=_alternate(plan.alternates[index]) if index < len(plan.alternates) else None,
                members=_members(node, layers, explained, dims, notes, ownership),
                exchange_ms=_ms(cost.exchange_s),
                ownership="" if node.members else _lets(ownership, node, layers, WHOLE),
            )
        )
    return tuple(views)


def _members(
    group: MeasuredNode,
    layers: LayerRange,
    explained: Explained,
    dims: Dims | None,
    notes: dict[PeerId, str],
    ownership: Ownership,
) -> tuple[MemberView, ...]:
    if not group.members or dims is None:
        return ()
    believed = {each.peer: each for each in explained.candidates}
    views = []
    for index, (node, bounds) in enumerate(zip(group.members, split(dims, group.weights), strict=True)):
        place, candidate, record = ModelSlice(index, group.weights), believed[node.peer], node.record
        num_layers = len(layers)
        views.append(
            MemberView(
                peer=node.peer,
                operator=_tag(record.operator),
                region=_tag(record.region),
                price=record.price,
                device=_tag(record.device),
                slice=str(place),
                columns=(bounds.columns.start, bounds.columns.stop),
                heads=(bounds.heads.start, bounds.heads.stop),
                kv_heads=tuple(dict.fromkeys(bounds.kv_heads)),
                channels=(bounds.channels.start, bounds.channels.stop),
                round_trip_ms=_ms(2 * explained.legs.leg(None, node.peer).one_way_s),
                compute_ms=_ms(num_layers * compute_s_per_layer(candidate, explained.workload.step_rows)),
                queue_ms=_ms(max(candidate.queue_s, 0.0)),
                is_measured=node.peer in explained.measured_speeds,
                why=_why_member(node.peer, place, layers, explained),
                note=notes.get(node.peer, ""),
                ownership=_lets(ownership, node, layers, place),
            )
        )
    return tuple(views)


def _lets(ownership: Ownership, node: MeasuredNode, layers: LayerRange, place: ModelSlice) -> str:
    """Which rules let a node hold what it is to serve."""
    if ownership.allows_all:
        return ""
    said = [part.why for part in ownership.parts(stage_candidate(node, layers, None), place)]
    return _text("; ".join(dict.fromkeys(said)))


def _why_member(peer: PeerId, place: ModelSlice, layers: LayerRange, explained: Explained) -> str:
    others = sum(
        (each.index, each.weights) == (place.index, place.weights)
        and each.peer != peer
        and each.layers.start <= layers.start
        and layers.stop <= each.layers.stop
        for each in explained.holders
    )
    if not others:
        return f"nobody else holds slice {place} of {layers}"
    return f"best together with the others, of {others + 1} that hold slice {place} of {layers}"


def _legs(legs: Sequence[LegCost], look: Look) -> tuple[LegView, ...]:
    return tuple(
        LegView(
            sender=leg.sender,
            receiver=leg.receiver,
            ms=_ms(leg.seconds),
            way_ms=_ms(leg.one_way_s),
            payload_ms=_ms(leg.payload_s),
            overhead_ms=_ms(leg.overhead_s),
            source=leg.source.value,
            error_ms=_error_ms(leg, look),
        )
        for leg in legs
    )


def _rejected(explained: Explained) -> tuple[RejectedView, ...]:
    notes, records = _notes(explained), explained.look.records
    return tuple(
        RejectedView(
            peer=each.peer,
            operator=_tag(record.operator),
            region=_tag(record.region),
            price=record.price,
            device=_tag(record.device),
            start=each.layers.start,
            stop=each.layers.stop,
            reason=each.reason.value,
            why=_text(each.text),
            excess_ms=None if each.excess_s is None else _ms(each.excess_s),
            note=notes.get(each.peer, ""),
        )
        for each in explained.rejections
        if (record := records.get(each.peer)) is not None
    )


def _error_ms(leg: LegCost, look: Look) -> float | None:
    """As far off as the two coordinates say of themselves that they typically are."""
    if leg.source is not LegSource.PREDICTED:
        return None
    ends = [_coordinate(leg.sender, look), _coordinate(leg.receiver, look)]
    errors = [end.error for end in ends if end is not None]
    return _ms(leg.one_way_s * max(errors, default=1.0))


def _coordinate(peer: PeerId | None, look: Look) -> Coordinate | None:
    if peer is None:
        return look.coordinate
    record = look.records.get(peer)
    return None if record is None else coordinate_of(record)


def _notes(explained: Explained) -> dict[PeerId, str]:
    return {each.peer: _text(each.note) for each in explained.candidates if each.note}


def _alternate(alternate: Alternate | None) -> AlternateView | None:
    if alternate is None:
        return None
    return AlternateView(tuple(_place(stage.peer, stage.layers) for stage in alternate.stages), _ms(alternate.excess_s))


def _place(peer: PeerId, layers: LayerRange) -> PlaceView:
    return PlaceView(peer, layers.start, layers.stop)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _tag(text: str) -> str:
    return printable(text, limit=MAX_TAG_CHARACTERS)


def _text(text: str) -> str:
    return printable(text, limit=MAX_TEXT_CHARACTERS)
