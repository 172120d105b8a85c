"""Who serves an answer: finds the nodes of a model, measures them, plans a route, and remembers who failed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fusion_node.client.connection import MeasuredNode, SwarmConnection
from fusion_node.client.topology import SwarmTopology
from fusion_node.client.user_rules import UserRules
from fusion_node.engine.numerics import NUMERICS
from fusion_node.errors import NoRoute, PeerError
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from scheduler import topology
from scheduler.cost_model import Workload
from scheduler.planner import plan_route
from scheduler.plans import Objective, Uncovered

ROUTE_PATIENCE_S = 8.0
"""How long layers may stay uncovered before that is an error: nodes that start together announce one by one."""

ROUTE_RETRY_S = 0.5

NODES_FRESH_S = 10.0
"""How long an answer may be planned with nodes that were found for an earlier one, while all their links hold: half of
what a record is old on average. A node that is full by now refuses, and the next plan looks anew."""

AVOID_S = 30.0
"""How long a node that refused or could not be reached is left out of plans that can do without it."""


Placed: TypeAlias = tuple[MeasuredNode, LayerRange]
"""A node, and what it is to serve."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Nodes in order, and the layers that each of them is to serve."""

    stages: tuple[Placed, ...] = ()

    @property
    def places(self) -> tuple[tuple[PeerId, LayerRange], ...]:
        """Who serves what, for comparison with another route."""
        return tuple((node.peer, layers) for node, layers in self.stages)


class Router:
    """Routes over the nodes of one model, and what may take the place of a part of one.

    Args:
        numerics: the class that nodes must serve.
        first_layers: at which a stage may begin; None: at any.
        row_bytes: of one hidden state on the wire.
        objective, rules: of the user.
    """

    def __init__(
        self,
        connection: SwarmConnection,
        model: StoredModel,
        *,
        numerics: str,
        num_layers: int,
        first_layers: Collection[int] | None,
        row_bytes: int = 0,
        objective: Objective = Objective.LATENCY,
        rules: UserRules = UserRules(),  # noqa: B008 - frozen
    ) -> None:
        self._connection = connection
        self._model = model
        self._numerics = numerics
        self._num_layers = num_layers
        self._first_layers = first_layers
        self._row_bytes = row_bytes
        self._objective = objective
        self._rules = rules
        self._avoid: dict[PeerId, float] = {}
        self._nodes: list[MeasuredNode] = []
        self._nodes_until = 0.0

    def can_go_on(self, planned: Planned) -> bool:
        """Whether the nodes of an earlier answer are alive and have not refused lately."""
        now, links = time.monotonic(), self._connection.links
        return all(links.is_connected(peer) and self._avoid.get(peer, 0.0) < now for peer, _ in planned.places)

    def note_failure(self, error: PeerError) -> None:
        """The next plans do without that node if they can, and look around anew."""
        self._avoid[PeerId(error.peer)] = time.monotonic() + AVOID_S
        self._nodes_until = 0.0

    async def route(
        self,
        num_positions: int,
        *,
        num_prompt: int = 0,
        avoid_peers: Collection[PeerId] = (),
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
    ) -> Planned:
        """The nodes that would serve a session now.

        Args:
            num_positions: that the session reserves.
            num_prompt: how many of them are the prompt's; 0 when that is not known.
            avoid_peers: planned with only where there is no other way, as with those of note_failure.
            avoid_pairs: of peers that had better not hand rows to one another.

        Raises:
            NoPeers: nobody of the swarm can be reached.
            NoRoute: layers are covered by nobody, or by nobody with room, for longer than ROUTE_PATIENCE_S.
        """
        if time.monotonic() < self._nodes_until and all(
            self._connection.links.is_connected(n.peer) for n in self._nodes
        ):
            route = self._choose(self._nodes, num_positions, avoid_peers=avoid_peers)
            if isinstance(route, Planned):
                return route
        deadline = time.monotonic() + ROUTE_PATIENCE_S
        while True:
            records = await self._connection.find(self._model.model_id)
            nodes = await self._connection.measure(records)
            route = self._choose(nodes, num_positions, avoid_peers=avoid_peers)
            if isinstance(route, Planned):
                # Those that could not be reached are looked for anew next time: they are not part of what is known.
                self._nodes = [node for node in nodes if node.round_trip_s is not None]
                self._nodes_until = time.monotonic() + NODES_FRESH_S
                return route
            if time.monotonic() >= deadline:
                raise NoRoute(self._explain(route, nodes, num_positions))
            await asyncio.sleep(ROUTE_RETRY_S)

    async def patch(
        self,
        planned: Planned,
        lost: Collection[int],
        num_positions: int,
        *,
        avoid_peers: Collection[PeerId] = (),
        avoid_pairs: Collection[tuple[PeerId, PeerId]] = (),
    ) -> Planned | None:
        """The same route with other nodes in the place of some stages; all other stages keep peer and layers.

        Plans with the nodes that are known and connected, which takes milliseconds; only if these do not do, it looks
        around once. Patience is the caller's.

        Args:
            lost: places of the stages to replace. Neighbours among them are replaced together, by one or several nodes.
            num_positions: of the session.
            avoid_peers: not planned with, whoever else there is. Those of the lost stages need not be named.
            avoid_pairs: of peers that must not hand rows to one another, in either direction.

        Returns:
            None when the layers cannot be covered by others.

        Raises:
            NoPeers: nobody of the swarm can be reached.
        """
        avoid = {*avoid_peers, *(planned.places[index][0] for index in lost)}
        found = self._patch_among(self._nodes, planned, lost, num_positions, avoid, avoid_pairs)
        if found is None:
            records = await self._connection.find(self._model.model_id)
            nodes = await self._connection.measure([record for record in records if record.peer not in avoid])
            found = self._patch_among(nodes, planned, lost, num_positions, avoid, avoid_pairs)
        return found

    async def alternates(self, planned: Planned, num_positions: int) -> tuple[tuple[Placed, ...], ...]:
        """For each stage what would take its place if it were lost now, connected already; empty where nothing would.

        Does not look around: it plans with the nodes that were found last, and are found anew by route every
        NODES_FRESH_S. See ``refresh``.
        """
        found = []
        for index in range(len(planned.stages)):
            patched = self._patch_among(self._nodes, planned, [index], num_positions, {planned.places[index][0]}, ())
            kept = len(planned.stages) - 1
            found.append(() if patched is None else patched.stages[index : len(patched.stages) - kept + index])
        return tuple(found)

    async def refresh(self) -> None:
        """Looks around, and measures whom it finds, so that ``patch`` and ``alternates`` know the swarm as it is now.

        Raises:
            NoPeers: nobody of the swarm can be reached.
        """
        nodes = await self._connection.measure(await self._connection.find(self._model.model_id))
        self._nodes = [node for node in nodes if node.round_trip_s is not None]
        self._nodes_until = time.monotonic() + NODES_FRESH_S

    def _patch_among(
        self,
        nodes: Sequence[MeasuredNode],
        planned: Planned,
        lost: Collection[int],
        num_positions: int,
        avoid_peers: Collection[PeerId],
        avoid_pairs: Collection[tuple[PeerId, PeerId]],
    ) -> Planned | None:
        kept = {peer for index, (peer, _) in enumerate(planned.places) if index not in lost}
        pairs = {frozenset(pair) for pair in avoid_pairs}
        stages: list[Placed] = []
        for is_lost, run in itertools.groupby(range(len(planned.stages)), key=lambda index: index in lost):
            indices = list(run)
            if not is_lost:
                stages += planned.stages[indices[0] : indices[-1] + 1]
                continue
            gap = LayerRange(planned.stages[indices[0]][1].start, planned.stages[indices[-1]][1].stop)
            ends = {planned.places[i][0] for i in (indices[0] - 1, indices[-1] + 1) if 0 <= i < len(planned.stages)}
            used = {*kept, *(node.peer for node, _ in stages)}
            usable = [
                node
                for node in nodes
                if node.peer not in used
                and node.peer not in avoid_peers
                and not any(frozenset((node.peer, end)) in pairs for end in ends)
            ]
            found = self._choose(usable, num_positions, gap)
            if isinstance(found, Uncovered):
                return None
            stages += found.stages
        return Planned(tuple(stages))

    def _choose(
        self,
        nodes: Sequence[MeasuredNode],
        num_positions: int,
        gap: LayerRange | None = None,
        *,
        avoid_peers: Collection[PeerId] = (),
    ) -> Planned | Uncovered:
        """Rather with a node that failed a moment ago than not at all: it may have been our link that was at fault."""
        now = time.monotonic()
        trusted = [n for n in nodes if self._avoid.get(n.peer, 0.0) < now and n.peer not in avoid_peers]
        route = self._choose_among(trusted, num_positions, gap)
        return self._choose_among(nodes, num_positions, gap) if isinstance(route, Uncovered) else route

    def _choose_among(
        self, nodes: Sequence[MeasuredNode], num_positions: int, gap: LayerRange | None
    ) -> Planned | Uncovered:
        first, stop = (0, self._num_layers) if gap is None else (gap.start, gap.stop)
        rules = self._rules.resolve([node.peer for node in nodes])
        nodes = [node for node in nodes if rules.rejects(_tags(node)) is None]
        candidates = [
            topology.Candidate(
                peer=node.peer,
                layers=LayerRange(max(shard.start, first) - first, min(shard.stop, stop) - first),
                speed=topology.Speed(*shard.seconds_per_layer),
                kv_free_positions=shard.kv_free_tokens,
                queue_s=shard.queue_s,
            )
            for node in nodes
            for shard in node.record.shards
            if node.round_trip_s is not None
            and shard.model_id == self._model.model_id
            and shard.num_layers == self._num_layers
            and shard.numerics == self._numerics
            and shard.is_ready
            and max(shard.start, first) < min(shard.stop, stop)
        ]
        starts = self._first_layers
        planned = plan_route(
            candidates,
            SwarmTopology(
                [node.record for node in nodes],
                round_trips_s={node.peer: node.round_trip_s for node in nodes if node.round_trip_s is not None},
            ),
            num_layers=stop - first,
            workload=Workload(num_positions=num_positions, row_bytes=self._row_bytes),
            objective=self._objective,
            first_layers=None if starts is None else [layer - first for layer in starts if first <= layer < stop],
            is_explained=False,
        )
        if isinstance(planned, Uncovered):
            return planned
        by_peer = {node.peer: node for node in nodes}
        return Planned(
            tuple(
                (by_peer[stage.peer], LayerRange(stage.layers.start + first, stage.layers.stop + first))
                for stage in planned.route
            )
        )

    def _explain(self, gap: Uncovered, nodes: Sequence[MeasuredNode], num_positions: int) -> str:
        layers = ", ".join(str(r) for r in gap.layers)
        message = f"no usable node serves layers {layers} of {self._model.name} in {self._numerics}"
        if gap.without_room:
            ranges = ", ".join(str(r) for r in gap.without_room)
            message += f"; layers {ranges} are held without room for {num_positions} positions: ask for fewer tokens"
        others = sorted(
            # Records are other people's text: only what we know ourselves goes to a terminal as advice.
            {s.numerics for n in nodes for s in n.record.shards if s.model_id == self._model.model_id}
            & set(NUMERICS) - {self._numerics}
        )
        if others:
            message += f"; nodes serve it in {', '.join(others)}: try --numerics {others[0]}"
        unreachable = [node for node in nodes if node.round_trip_s is None]
        if unreachable:
            message += (
                f"; {len(unreachable)} known nodes cannot be reached, the first because: {unreachable[0].problem}"
            )
        if not gap.without_room and not others:
            message += (
                f": start a node with `fusion-node join {self._model.name} --layers {gap.layers[0]} --peer ADDRESS`"
            )
        return message


def _tags(node: MeasuredNode) -> topology.Candidate:
    """A node as far as rules look at it."""
    record = node.record
    return topology.Candidate(
        peer=node.peer,
        layers=LayerRange(0, 1),
        speed=topology.Speed(0.0, 0.0, 0.0),
        kv_free_positions=0,
        operator=record.operator,
        region=record.region,
        price=record.price,
    )
