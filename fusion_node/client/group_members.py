"""Between groups and their members: the planner's groups as measured nodes, and why others are in none. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fusion_node.client.connection import MeasuredNode
from fusion_node.slices import Dims, ModelSlice, split
from fusion_node.types import LayerRange, PeerId, is_group, members_of
from scheduler.groups import Formed, SliceHolder
from scheduler.plans import Planned, Reason, Rejection, Uncovered
from scheduler.topology import Candidate, RouteStage, Speed


def with_members(
    route: Iterable[RouteStage], nodes: Mapping[PeerId, MeasuredNode], weights: Mapping[PeerId, Sequence[int]]
) -> tuple[tuple[MeasuredNode, LayerRange], ...]:
    """Who serves what: of a stage that is a group, the group of its nodes.

    Args:
        weights: of each group.
    """
    return tuple(
        (
            MeasuredNode.of_group([nodes[peer] for peer in members_of(stage.peer)], weights[stage.peer])
            if is_group(stage.peer)
            else nodes[stage.peer],
            stage.layers,
        )
        for stage in route
    )


def kept_candidates(
    stages: Iterable[tuple[MeasuredNode, LayerRange]], holders: Iterable[SliceHolder], dims: Dims | None
) -> list[Candidate]:
    """Groups that stay, as candidates whose members nobody else may have, and whose price counts.

    Args:
        holders: of slices, as they announce themselves now: perhaps not any more.
        dims: sizes of the model's layers.
    """
    known = {holder.peer: holder.candidate for holder in holders}
    found = []
    for group, layers in stages:
        if not group.members:
            continue
        stage = stage_candidate(group, layers, dims)
        members = tuple(replace(known.get(each.peer, each), layers=layers) for each in stage.members)
        found.append(replace(stage, members=members, price=sum(member.price for member in members)))
    return found


def stage_candidate(node: MeasuredNode, layers: LayerRange, dims: Dims | None) -> Candidate:
    """A stage of a route as the rules see it: whose it is, and which slices and columns its members hold.

    Args:
        dims: sizes of the model's layers.
    """
    nodes = tuple(
        Candidate(
            each.peer,
            layers,
            Speed(0.0, 0.0, 0.0),
            0,
            operator=each.record.operator,
            region=each.record.region,
            price=each.record.price,
        )
        for each in node.members or (node,)
    )
    if not node.members:
        return nodes[0]
    bounds = () if dims is None else split(dims, node.weights)
    return Candidate(
        node.peer,
        layers,
        Speed(0.0, 0.0, 0.0),
        0,
        members=nodes,
        weights=tuple(node.weights),
        columns=tuple((each.columns.start, each.columns.stop) for each in bounds),
    )


def rejections_of_members(
    answer: Planned | Uncovered, holders: Sequence[SliceHolder], formed: Formed
) -> list[Rejection]:
    """Why each candidate does not serve: of nodes that hold slices, instead of why each group of them does not."""
    serving = {peer for stage in answer.route for peer in members_of(stage.peer)} if isinstance(answer, Planned) else ()
    # Of each member the best of its groups.
    with_it: dict[PeerId, Rejection] = {}
    for each in sorted(answer.rejections, key=lambda each: (each.excess_s is None, each.excess_s or 0.0, each.peer)):
        for peer in members_of(each.peer) if is_group(each.peer) else ():
            with_it.setdefault(peer, each)
    found = [each for each in answer.rejections if not is_group(each.peer)] + list(formed.rejections)
    # Who is kept from a part of its layers has a reason for the others too.
    told = {each.peer for each in formed.rejections} - {
        holder.peer
        for holder in holders
        for each in formed.rejections
        if each.peer == holder.peer and each.layers != holder.layers
    }
    for holder in holders:
        if holder.peer not in told and holder.peer not in serving:
            told.add(holder.peer)
            found.append(_rejection(holder, with_it.get(holder.peer), formed))
    return sorted(found, key=lambda each: (each.peer, each.layers))


def _rejection(holder: SliceHolder, best: Rejection | None, formed: Formed) -> Rejection:
    if best is not None:
        return Rejection(holder.peer, holder.layers, best.reason, best.text, best.excess_s, best.via)
    for gap in formed.missing:
        if gap.weights == holder.weights and gap.layers == holder.layers:
            lacking = ModelSlice(gap.index, gap.weights)
            return Rejection(holder.peer, holder.layers, Reason.NO_WAY, f"slice {lacking} of its layers is {gap.why}")
    return Rejection(holder.peer, holder.layers, Reason.SLOWER, "others that hold its slice are nearer or faster")
