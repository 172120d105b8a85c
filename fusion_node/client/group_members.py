"""Between groups and their members: the planner's groups as measured nodes, and why others are in none. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fusion_node.client.connection import MeasuredNode
from fusion_node.slices import ModelSlice
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
    stages: Iterable[tuple[MeasuredNode, LayerRange]], holders: Iterable[SliceHolder]
) -> list[Candidate]:
    """Groups that stay, as candidates whose members nobody else may have, and whose price counts.

    Args:
        holders: of slices, as they announce themselves now: perhaps not any more.
    """
    known = {holder.peer: holder.candidate for holder in holders}
    unknown = Speed(0.0, 0.0, 0.0)
    found = []
    for group, layers in stages:
        members = tuple(
            replace(known[peer], layers=layers) if peer in known else Candidate(peer, layers, unknown, 0)
            for peer in members_of(group.peer)
        )
        if group.members:
            price = sum(member.price for member in members)
            found.append(Candidate(group.peer, layers, unknown, 0, price=price, members=members))
    return found


def rejections_of_members(
    answer: Planned | Uncovered, holders: Iterable[SliceHolder], formed: Formed
) -> list[Rejection]:
    """Why each candidate does not serve: of nodes that hold slices, instead of why each group of them does not."""
    serving = {peer for stage in answer.route for peer in members_of(stage.peer)} if isinstance(answer, Planned) else ()
    # Of each member the best of its groups.
    with_it: dict[PeerId, Rejection] = {}
    for each in sorted(answer.rejections, key=lambda each: (each.excess_s is None, each.excess_s or 0.0, each.peer)):
        for peer in members_of(each.peer) if is_group(each.peer) else ():
            with_it.setdefault(peer, each)
    found = [each for each in answer.rejections if not is_group(each.peer)] + list(formed.rejections)
    told = {each.peer for each in formed.rejections}
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
