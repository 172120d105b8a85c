"""Why there is no route, in one sentence that says what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fusion_node.client.connection import MeasuredNode
from fusion_node.client.user_rules import UserRules
from fusion_node.engine.numerics import NUMERICS
from fusion_node.slices import MIN_MASKED_MEMBERS, ModelSlice
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from fusion_node.wire import printable
from p2p.records import NodeRecord, ShardRecord
from scheduler.groups import HELD_BY_NOBODY, MissingSlice
from scheduler.planner import uncovered_layers
from scheduler.plans import Reason, Rejection, Topology, Uncovered
from scheduler.topology import Candidate

MAX_TOLD = 5
"""Of the rules that leave nobody, and of the splits that lack slices."""

MAX_TEXT = 200
"""Characters of one of them."""


def why_no_route(
    gap: Uncovered,
    rejections: Sequence[Rejection],
    candidates: Sequence[Candidate],
    records: Sequence[NodeRecord],
    unreachable: Sequence[MeasuredNode],
    *,
    model: StoredModel,
    num_layers: int,
    numerics: str,
    room: int,
    rules: UserRules,
    topology: Topology = Topology.PIPELINE,
    num_members: int | None = None,
    is_masked: bool = False,
    missing: Sequence[MissingSlice] = (),
) -> str:
    """For the message of NoRoute.

    Args:
        candidates: among which was planned.
        records: of all nodes that were found.
        room: positions of the session.
        topology, num_members, is_masked: what stages may be.
        missing: slices without which there is no group.
    """
    name, parts = model.name, list[str]()
    told_rules = ", ".join(rules.in_words())
    shards = [shard for record in records for shard in record.shards if shard.model_id == model.model_id]
    if topology is Topology.FUSION:
        return _why_no_group(
            gap,
            rejections,
            missing,
            shards,
            unreachable,
            name=name,
            numerics=numerics,
            num_members=num_members,
            is_masked=is_masked,
        )
    if gap.against_rules:
        ranges = ", ".join(map(str, gap.against_rules))
        parts.append(f"no node for layers {ranges} of {name} is left by your rules: {_denied(gap, rejections)}")
    elif _are_held(candidates, records, rules, num_layers, room):
        why = f"no route keeps your rules ({told_rules})" if told_rules else "one of them would be needed twice"
        why += f": {told}" if (told := _told(rejections)) else ""
        parts.append(f"nodes serve all layers of {name} in {numerics}, but {why}")
    else:
        ranges = ", ".join(map(str, gap.layers))
        parts.append(f"no usable node serves layers {ranges} of {name} in {numerics}")
    if gap.without_room:
        ranges = ", ".join(map(str, gap.without_room))
        parts.append(f"layers {ranges} are held without room for {room} positions: ask for fewer tokens")
    if topology is Topology.HYBRID:
        parts += _missing(missing)
    elif any(shard.slice and shard.numerics == numerics for shard in shards):
        parts.append("nodes hold slices of it, which only groups serve: try --topology fusion, or hybrid")
    # Records are other people's text: only what we know ourselves goes to a terminal as advice.
    others = sorted({shard.numerics for shard in shards} & set(NUMERICS) - {numerics})
    if others:
        parts.append(f"nodes serve it in {', '.join(others)}: try --numerics {others[0]}")
    if loading := sum(not shard.is_ready for shard in shards):
        parts.append(f"{loading} nodes are still loading it: try again soon")
    if unreachable:
        parts.append(f"{len(unreachable)} known nodes cannot be reached, the first because: {unreachable[0].problem}")
    message = "; ".join(parts)
    if gap.layers and not (gap.without_room or others or told_rules):
        leads = "; or " if any(shard.slice for shard in shards) else ": "
        message += f"{leads}start a node with `fusion-node join {name} --layers {gap.layers[0]} --peer ADDRESS`"
    return message


def _are_held(
    candidates: Sequence[Candidate], records: Sequence[NodeRecord], rules: UserRules, num_layers: int, room: int
) -> bool:
    """Whether nodes that may serve, and have room, hold all layers."""
    resolved = rules.resolve([PeerId(record.peer) for record in records])
    usable = [c for c in candidates if c.kv_free_positions >= room and resolved.rejects(c) is None]
    return not uncovered_layers([each for c in usable for each in resolved.ownership.allowed(c)], num_layers)


def _denied(gap: Uncovered, rejections: Iterable[Rejection]) -> str:
    """Which rules leave nobody, and to how many nodes each of them applies."""
    missing = {layer for layers in gap.against_rules for layer in range(layers.start, layers.stop)}
    return _told(each for each in rejections if not missing.isdisjoint(range(each.layers.start, each.layers.stop)))


def _told(rejections: Iterable[Rejection]) -> str:
    """Which rules reject how many nodes."""
    why = Counter(each.text for each in rejections if each.reason is Reason.RULE)
    return ", ".join(f"{count} × {printable(text, limit=MAX_TEXT)}" for text, count in why.most_common(MAX_TOLD))


def _why_no_group(
    gap: Uncovered,
    rejections: Sequence[Rejection],
    missing: Sequence[MissingSlice],
    shards: Sequence[ShardRecord],
    unreachable: Sequence[MeasuredNode],
    *,
    name: str,
    numerics: str,
    num_members: int | None,
    is_masked: bool,
) -> str:
    """Where all stages are to be groups."""
    least = MIN_MASKED_MEMBERS if is_masked else 2
    size = f" of {num_members}" if num_members is not None else f" of {least} or more, as masked sums need it,"
    size = size if is_masked or num_members is not None else ""
    ranges = ", ".join(map(str, gap.layers))
    parts = [f"no fusion group{size} is complete for layers {ranges} of {name} in {numerics}"]
    parts += _missing(missing)
    sizes = {ModelSlice.parse(s.slice).num_members for s in shards if s.slice and s.numerics == numerics}
    is_wanted = {size for size in sizes if (size >= least if num_members is None else size == num_members)}
    if sizes and not is_wanted:
        parts.append(f"nodes hold slices for groups of {', '.join(map(str, sorted(sizes)))}")
    elif not missing and sizes:
        parts.append("there are groups, but not for all layers, or none that keeps your rules")
    elif not missing:
        parts.append("nobody holds a slice of it" if shards else "nobody holds any of its layers")
    if told := _told(each for each in rejections if not any(each.text in gap.why for gap in missing)):
        parts.append(f"rules that leave no other way: {told}")
    if unreachable:
        parts.append(f"{len(unreachable)} known nodes cannot be reached, the first because: {unreachable[0].problem}")
    # One more group of a few layers does not help where the others are missing for another reason.
    longest = max((len(each.layers) for each in missing), default=0)
    absent = next((each for each in missing if len(each.layers) == longest and each.why == HELD_BY_NOBODY), None)
    any_group = ModelSlice(0, (1,) * (num_members or least))
    lacking = any_group if absent is None else ModelSlice(absent.index, absent.weights)
    layers = absent.layers if absent is not None else gap.layers[0]
    if absent is None and missing:
        return "; ".join(parts)
    join = f"fusion-node join {name} --slice {lacking} --layers {layers} --peer ADDRESS"
    return f"{'; '.join(parts)}: start a node with `{join}`"


def _missing(missing: Sequence[MissingSlice]) -> list[str]:
    """Each slice that groups lack, those of one split that lack for the same reason in one go. First the splits that
    lack least: a node more is enough for them."""
    of_split: dict[tuple[LayerRange, tuple[int, ...]], list[MissingSlice]] = {}
    for each in missing:
        of_split.setdefault((each.layers, each.weights), []).append(each)
    told: list[tuple[str, int]] = []
    for (layers, weights), gaps in sorted(of_split.items(), key=lambda each: (len(each[1]), -len(each[0][0]), each[0])):
        by_why: dict[str, list[int]] = {}
        for gap in gaps:
            by_why.setdefault(gap.why, []).append(gap.index)
        for why, indices in by_why.items():
            *most, last = [str(ModelSlice(index, weights)) for index in indices]
            which = (
                f"slices {', '.join(most)} and {last} of layers {layers} are"
                if most
                else f"slice {last} of layers {layers} is"
            )
            told.append((f"{which} {printable(why, limit=4 * MAX_TEXT)}", len(indices)))
    rest = sum(count for _, count in told[MAX_TOLD:])
    others = [f"{rest} slices of other layers or splits are missing too"] if rest else []
    return [text for text, _ in told[:MAX_TOLD]] + others
