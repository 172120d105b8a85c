"""Who holds which layers: one node chooses for itself, or a private swarm's scheduler for all of its nodes.

After Parallax (scheduler/pipelines.py has its two phases), but with the network in the objective, and sticky: whoever
holds layers keeps them unless others give the swarm ``min_gain`` more, or layers would be missing; and only the layers
that it does not hold are loaded. What a placement is worth is told by scheduler.swarm_rate.

Guarantees:
  * No decision takes a layer's last holder away, not even when all nodes decide at once over the same view: of those
    that can serve a layer now, the one with the lowest digest (keeper) does not drop it.
  * A node that goes makes no other one move while every layer is still held, unless that one's own move gains
    ``min_gain`` by itself.
  * A claim of speed counts only within a range around the median of all claims.
  * The same arguments give the same answer in every process.
Assumes: both sides of a decision see about the same hosts. A view that is behind is caught by looking again before
layers are dropped: see fusion_node.daemon.placement_core.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from fusion_node.types import LayerRange, PeerId
from scheduler.pipelines import proposals
from scheduler.planner import as_ranges
from scheduler.swarm_rate import Host, SwarmRate, Work, Worth, holders_per_layer, windows
from scheduler.topology import Legs

DEFAULT_LOAD_BPS = 12.5e6
"""100 Mbit/s: what weights come in at where nobody has measured it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When a move is worth its trouble.

    Attributes:
        min_gain: in tokens per second of the whole swarm, relative. Petals' paper moved at 0.2, its code at 0.25.
        payback_s: within which a move has to give back the tokens that its loading may cost.
        min_dwell_s: that layers are held at least, unless some are missing.
    """

    min_gain: float = 0.25
    payback_s: float = 3600.0
    min_dwell_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Move:
    """Other layers for one node.

    Attributes:
        layers: all that it is to hold.
        load, drop: what it does not hold yet, and what it holds now and is not to hold any more.
        load_bytes, load_s: of ``load``, by the receiver's own bandwidth.
        reason: for people.
    """

    peer: PeerId
    layers: LayerRange
    load: tuple[LayerRange, ...]
    drop: tuple[LayerRange, ...]
    load_bytes: int
    load_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Stay:
    """A node keeps what it has, even if that is nothing; the reason is for people."""

    peer: PeerId
    layers: LayerRange | None
    reason: str


Decision = Move | Stay


@dataclass(frozen=True, slots=True)
class Placement:
    """Of all nodes of a swarm, in the order of the hosts.

    Attributes:
        deferred: moves that wait until others serve the layers that they drop; those nodes stay until then.
        before, after: what the swarm is worth now, and when everything is carried out.
    """

    decisions: tuple[Decision, ...]
    deferred: tuple[Move, ...]
    before: Worth
    after: Worth

    @property
    def load_bytes(self) -> int:
        """Of all moves together."""
        return sum(d.load_bytes for d in self.decisions if isinstance(d, Move))


MAX_CONSIDERED = 96
"""Other nodes whose legs count when one node chooses; of more, the nearest. All of them count for coverage."""

MAX_TRIED = 3
"""Windows whose worth is computed in full, of those that look best."""

MAX_PIPELINES_TRIED = 8
"""In which one node is tried in the place of others."""

NUM_WEIGHED = 900
"""A whole swarm of so many nodes is placed with one move of a single node weighed; of a tenth of them, with ten."""


def choose_range(own: Host, others: Sequence[Host], work: Work, legs: Legs, policy: Policy | None = None) -> Decision:
    """What one node should hold: one that joins, or one that looks whether other layers need it more.

    Args:
        others: all other nodes of the model, also those that are loading (``is_ready`` False): they count for the
            coverage to come, but nobody may rely on them to drop a layer.
    """
    policy = policy or Policy()
    own, others = _within(own, work), [_within(host, work) for host in others if host.peer != own.peer]
    counts = holders_per_layer([host.held for host in others], work.num_layers)
    kept = kept_layers(own, others, work.num_layers)
    rate = SwarmRate([own, *_nearest(own, others, legs)], work, legs)
    return _decide(rate, 0, [host.held for host in rate.hosts], counts, kept, policy)


def place_all(hosts: Sequence[Host], work: Work, legs: Legs, policy: Policy | None = None) -> Placement:
    """What all nodes of a swarm should hold, given what they hold now.

    Of the better of two ways: as few moves as possible, each worth ``min_gain`` by itself; or pipelines from scratch,
    if those are worth ``min_gain`` more than the first. Moves that would take a layer's last holder away are deferred.
    """
    policy = policy or Policy()
    hosts = [_within(host, work) for host in hosts]
    rate = SwarmRate(hosts, work, legs)
    current = [host.held for host in hosts]
    before = rate.worth(current)
    chosen = _few_moves(rate, current, policy)
    after = rate.worth(chosen)
    movable = [i for i, host in enumerate(hosts) if not host.is_pinned]
    fixed = [host.held if host.is_pinned else None for host in hosts]
    for proposed in proposals(rate, movable, fixed):
        settled = [layers if layers is not None else held for layers, held in zip(proposed, current, strict=True)]
        worth = rate.worth(settled)
        if _is_worth_it(rate, current, settled, before, worth, policy, than=after):
            chosen, after = settled, worth
    after = _polish(rate, current, chosen, after)
    decisions, deferred = _in_turn(rate, current, chosen, before, after)
    return Placement(decisions, deferred, before, after)


def kept_layers(own: Host, others: Iterable[Host], num_layers: int) -> frozenset[int]:
    """Layers that ``own`` must not drop: nobody else who can serve them now has a lower digest."""
    if own.held is None or not own.is_ready:
        return frozenset()
    elsewhere = [
        host.held for host in others if host.is_ready and host.held is not None and digest(host.peer) < digest(own.peer)
    ]
    counts = holders_per_layer(elsewhere, num_layers)
    return frozenset(layer for layer in range(own.held.start, own.held.stop) if not counts[layer])


def digest(peer: PeerId) -> int:
    """Orders peers in a way that nobody can choose: the same as p2p.records.digest_key_of."""
    return int.from_bytes(hashlib.blake2b(peer.encode(), digest_size=8).digest(), "little")


# one node


def _decide(
    rate: SwarmRate,
    index: int,
    ranges: Sequence[LayerRange | None],
    counts: Sequence[int],
    kept: frozenset[int],
    policy: Policy,
) -> Decision:
    """Args:
    counts: per layer, how many others hold it, also those that are not in ``rate``.
    """
    own, held = rate.hosts[index], ranges[index]
    if own.is_pinned:
        return Stay(own.peer, held, "its operator has chosen its layers")
    options = [w for w in windows(own.capacity_layers, rate.work) if all(w.start <= k < w.stop for k in kept)]
    if not options:
        fits = "nothing else may be held beside layers that it is needed for" if kept else "no layers fit"
        return Stay(own.peer, held, fits)
    missing = {layer for layer, count in enumerate(counts) if not count}
    best, after = _best_window(rate, index, ranges, options, missing)
    if held is None:
        return _move(own, held, best, rate.work, _why(best, missing, None, after))
    if best == held:
        return Stay(own.peer, held, "nothing else is worth more")
    if _num_in(missing, best) > _num_in(missing, held):
        return _move(own, held, best, rate.work, _why(best, missing - set(_layers(held)), None, after))
    if own.held_for_s < policy.min_dwell_s:
        return Stay(own.peer, held, f"it has held its layers for {own.held_for_s:.0f} s only")
    before = rate.worth(ranges)
    move = _move(own, held, best, rate.work, _why(best, set(), before, after))
    gain = after.tokens_per_s - before.tokens_per_s
    without = rate.worth([None if i == index else each for i, each in enumerate(ranges)])
    given = max(before.tokens_per_s - without.tokens_per_s, 0.0)
    if gain < policy.min_gain * before.tokens_per_s or gain <= 0:
        return Stay(own.peer, held, f"layers {best} would gain {_percent(gain, before)}, less than a move is worth")
    if gain * policy.payback_s < given * move.load_s:
        return Stay(own.peer, held, f"layers {best} take {move.load_s:.0f} s to load, which would not pay back")
    return move


def _best_window(
    rate: SwarmRate,
    index: int,
    ranges: Sequence[LayerRange | None],
    options: Sequence[LayerRange],
    missing: Collection[int],
) -> tuple[LayerRange, Worth]:
    """What covers most of what is missing; of several, what makes the swarm worth most."""
    most = max(_num_in(missing, w) for w in options)
    options = [w for w in options if _num_in(missing, w) == most]
    others = [None if i == index else layers for i, layers in enumerate(ranges)]
    looks = _looks(rate, index, others, options) if len(options) > MAX_TRIED else dict.fromkeys(options, 0.0)
    held = ranges[index]
    ranked = sorted(options, key=lambda w: (-looks[w], _num_to_load(held, w), w.start))[:MAX_TRIED]
    tried = list(zip(rate.worths(index, others, ranked), ranked, strict=True))
    best = max(tried, key=lambda each: (each[0].tokens_per_s, -_num_to_load(held, each[1]), -each[1].start))
    return best[1], best[0]


def _looks(
    rate: SwarmRate, index: int, others: Sequence[LayerRange | None], options: Sequence[LayerRange]
) -> dict[LayerRange, float]:
    """About the tokens per second that each window would add: in a new pipeline with those that are in none, in an
    existing one instead of a part of it, or as an alternate."""
    pipelines, left = rate.pipelines(others)
    counts = holders_per_layer([others[i] for i in left], rate.work.num_layers)
    beside = rate.alternates_rate_of(counts)
    looks = {w: rate.alternates_rate_of(_with_one_more(counts, w)) - beside for w in options}
    tokens, layer_s = rate.work.tokens_per_loop, float(rate.layer_s[index])
    ways = [(rate.ways_through(index, others, left), 0.0)]
    ways += [
        (rate.ways_through(index, others, [i for i, _ in pipeline.stages]), tokens / pipeline.loop_s)
        for pipeline in pipelines[:MAX_PIPELINES_TRIED]
    ]
    for way, present in ways:
        before_s, after_s = way[0].tolist(), way[1].tolist()
        for w in options:
            loop_s = before_s[w.start] + layer_s * len(w) + after_s[w.stop]
            looks[w] = max(looks[w], tokens / loop_s - present)
    return looks


# all nodes


def _few_moves(rate: SwarmRate, current: Sequence[LayerRange | None], policy: Policy) -> list[LayerRange | None]:
    """What nodes hold, with those that hold nothing put to work, and then single moves for as long as one pays."""
    ranges = list(current)
    order = sorted(range(len(ranges)), key=lambda i: (-rate.hosts[i].capacity_layers, rate.hosts[i].peer))
    num_steps = min(2 * len(ranges), NUM_WEIGHED // max(len(ranges), 1))
    for index in [i for i in order if ranges[i] is None]:
        if num_steps > 0:
            num_steps -= 1
            _step(rate, index, ranges, policy)
        else:
            _fill_up(rate, index, ranges)
    by_digest = sorted(range(len(ranges)), key=lambda i: digest(rate.hosts[i].peer), reverse=True)
    while num_steps > 0:
        moved = False
        for index in by_digest[:num_steps]:
            num_steps -= 1
            moved |= current[index] == ranges[index] and _step(rate, index, ranges, policy)
        if not moved:
            break
    return ranges


def _polish(
    rate: SwarmRate, current: Sequence[LayerRange | None], chosen: list[LayerRange | None], now: Worth
) -> Worth:
    """Changes, in place, what nodes are to get that hold nothing yet, while that is worth more: it costs nothing."""
    free = [i for i, layers in enumerate(current) if layers is None and chosen[i] is not None]
    num_steps = min(3 * len(free), NUM_WEIGHED // max(len(chosen), 1))
    for index in itertools.islice(itertools.cycle(free), num_steps):
        others = [each for i, each in enumerate(chosen) if i != index]
        missing = {i for i, n in enumerate(holders_per_layer(others, rate.work.num_layers)) if not n}
        options = windows(rate.hosts[index].capacity_layers, rate.work)
        best, worth = _best_window(rate, index, chosen, options, missing)
        if (worth.num_covered, worth.tokens_per_s) > (now.num_covered, now.tokens_per_s * (1 + 1e-9)):
            chosen[index], now = best, worth
    return now


def _step(rate: SwarmRate, index: int, ranges: list[LayerRange | None], policy: Policy) -> bool:
    others = [each for i, each in enumerate(ranges) if i != index]
    counts = holders_per_layer(others, rate.work.num_layers)
    held = ranges[index]
    # Whoever is placed here stays until others have its layers: moves are carried out in turn.
    kept = frozenset(layer for layer in (() if held is None else _layers(held)) if not counts[layer])
    decision = _decide(rate, index, ranges, counts, kept, policy)
    if not isinstance(decision, Move):
        return False
    ranges[index] = decision.layers
    return True


def _fill_up(rate: SwarmRate, index: int, ranges: list[LayerRange | None]) -> None:
    options = windows(rate.hosts[index].capacity_layers, rate.work)
    if options and not rate.hosts[index].is_pinned:
        counts = holders_per_layer(ranges, rate.work.num_layers)
        ranges[index] = min(options, key=lambda w: (sum(counts[w.start : w.stop]) / len(w), -len(w), w.start))


def _is_worth_it(
    rate: SwarmRate,
    current: Sequence[LayerRange | None],
    proposed: Sequence[LayerRange | None],
    before: Worth,
    worth: Worth,
    policy: Policy,
    *,
    than: Worth,
) -> bool:
    """Whether a placement from scratch beats the one that ``than`` is the worth of."""
    if worth.num_covered != than.num_covered:
        return worth.num_covered > than.num_covered
    moved = [
        _move(host, held, layers, rate.work, "")
        for host, held, layers in zip(rate.hosts, current, proposed, strict=True)
        if held is not None and layers is not None and layers != held
    ]
    gain = worth.tokens_per_s - than.tokens_per_s
    if not moved:
        return gain > 0
    if any(host.held_for_s < policy.min_dwell_s for host in rate.hosts if host.peer in {m.peer for m in moved}):
        return False
    given = before.tokens_per_s * sum(move.load_s for move in moved) / len(rate.hosts)
    return gain >= policy.min_gain * than.tokens_per_s and gain * policy.payback_s >= given


def _in_turn(
    rate: SwarmRate,
    current: Sequence[LayerRange | None],
    chosen: Sequence[LayerRange | None],
    before: Worth,
    after: Worth,
) -> tuple[tuple[Decision, ...], tuple[Move, ...]]:
    """What can be done at once, and what has to wait until those who are to hold its layers do."""
    num_layers = rate.work.num_layers
    lasting = [
        held if held is None or layers is None else _common(held, layers)
        for host, held, layers in zip(rate.hosts, current, chosen, strict=True)
        if host.is_ready
    ]
    counts = holders_per_layer(lasting, num_layers)
    missing = {layer for layer, n in enumerate(holders_per_layer(current, num_layers)) if not n}
    decisions: list[Decision] = []
    deferred: list[Move] = []
    for host, held, layers in sorted(zip(rate.hosts, current, chosen, strict=True), key=lambda e: -digest(e[0].peer)):
        if layers is None or layers == held:
            decisions.append(Stay(host.peer, held, _why_stay(host, rate.work)))
            continue
        move = _move(host, held, layers, rate.work, _why(layers, missing - _set(held), before, after))
        alone = [layer for part in move.drop for layer in _layers(part) if not counts[layer]] if host.is_ready else []
        if not alone:
            decisions.append(move)
            continue
        deferred.append(move)
        decisions.append(Stay(host.peer, held, f"moves to {layers} once others serve what it holds"))
        for layer in alone:
            counts[layer] += 1
    by_peer = {decision.peer: decision for decision in decisions}
    return tuple(by_peer[host.peer] for host in rate.hosts), tuple(deferred)


# small things


def _within(host: Host, work: Work) -> Host:
    """A host whose claims can be computed with: layers outside the model are not held, no room is no room."""
    held = host.held if host.held is not None and host.held.stop <= work.num_layers else None
    if held is host.held and host.capacity_layers >= 0:
        return host
    return replace(host, held=held, capacity_layers=max(0, host.capacity_layers))


def _with_one_more(counts: Sequence[int], layers: LayerRange) -> list[int]:
    """Holders per layer, and one more of some layers."""
    return [*counts[: layers.start], *(n + 1 for n in counts[layers.start : layers.stop]), *counts[layers.stop :]]


def _nearest(own: Host, others: Sequence[Host], legs: Legs) -> list[Host]:
    holding = [host for host in others if host.held is not None]
    if len(holding) <= MAX_CONSIDERED:
        return holding
    near = sorted(holding, key=lambda host: (legs.leg(own.peer, host.peer).one_way_s, host.peer))
    return sorted(near[:MAX_CONSIDERED], key=lambda host: host.peer)


def _move(own: Host, held: LayerRange | None, layers: LayerRange, work: Work, reason: str) -> Move:
    load = as_ranges(sorted(_set(layers) - _set(held)))
    drop = as_ranges(sorted(_set(held) - _set(layers)))
    load_bytes = work.layer_bytes * sum(map(len, load))
    rate_Bps = own.load_Bps if own.load_Bps and own.load_Bps > 0 else DEFAULT_LOAD_BPS
    return Move(own.peer, layers, tuple(load), tuple(drop), load_bytes, load_bytes / rate_Bps, reason)


def _why(layers: LayerRange, missing: Collection[int], before: Worth | None, after: Worth) -> str:
    needed = as_ranges(sorted(set(missing) & _set(layers)))
    if needed:
        return f"nobody else holds layers {', '.join(map(str, needed))}"
    if before is None:
        return f"the swarm gives {after.tokens_per_s:.3g} tokens/s with it"
    return f"the swarm gives {after.tokens_per_s:.3g} tokens/s instead of {before.tokens_per_s:.3g}"


def _why_stay(host: Host, work: Work) -> str:
    if host.is_pinned:
        return "its operator has chosen its layers"
    if not windows(host.capacity_layers, work):
        return "no layers fit"
    return "nothing else is worth a move"


def _percent(gain: float, before: Worth) -> str:
    return f"{100 * gain / before.tokens_per_s:.0f} %" if before.tokens_per_s > 0 else "nothing"


def _num_to_load(held: LayerRange | None, layers: LayerRange) -> int:
    common = None if held is None else _common(held, layers)
    return len(layers) - (0 if common is None else len(common))


def _num_in(missing: Collection[int], layers: LayerRange) -> int:
    return sum(layers.start <= layer < layers.stop for layer in missing)


def _layers(layers: LayerRange) -> range:
    return range(layers.start, layers.stop)


def _set(layers: LayerRange | None) -> set[int]:
    return set() if layers is None else set(_layers(layers))


def _common(a: LayerRange, b: LayerRange) -> LayerRange | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return LayerRange(start, stop) if start < stop else None
