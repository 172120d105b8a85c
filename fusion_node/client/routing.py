"""Who serves an answer: finds the nodes of a model, measures them, plans a route, and remembers who failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusion_node.client.connection import MeasuredNode, SwarmConnection
from fusion_node.engine.numerics import NUMERICS
from fusion_node.errors import NoRoute, PeerError
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, PeerId
from scheduler.planner import Candidate, Route, Uncovered, plan_route

ROUTE_PATIENCE_S = 8.0
"""How long layers may stay uncovered before that is an error: nodes that start together announce one by one."""

ROUTE_RETRY_S = 0.5

NODES_FRESH_S = 10.0
"""How long an answer may be planned with nodes that were found for an earlier one, while all their links hold: half of
what a record is old on average. A node that is full by now refuses, and the next plan looks anew."""

AVOID_S = 30.0
"""How long a node that refused or could not be reached is left out of plans that can do without it."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Nodes in order, and the layers that each of them is to serve."""

    stages: tuple[tuple[MeasuredNode, LayerRange], ...] = ()

    @property
    def places(self) -> tuple[tuple[PeerId, LayerRange], ...]:
        """Who serves what, for comparison with another route."""
        return tuple((node.peer, layers) for node, layers in self.stages)


class Router:
    """Routes over the nodes of one model.

    Args:
        numerics: the class that nodes must serve.
        first_layers: at which a stage may begin; None: at any.
    """

    def __init__(
        self,
        connection: SwarmConnection,
        model: StoredModel,
        *,
        numerics: str,
        num_layers: int,
        first_layers: Collection[int] | None,
    ) -> None:
        self._connection = connection
        self._model = model
        self._numerics = numerics
        self._num_layers = num_layers
        self._first_layers = first_layers
        self._avoid: dict[PeerId, float] = {}
        self._nodes: list[MeasuredNode] = []
        self._nodes_until = 0.0

    def can_go_on(self, routed: Routed) -> bool:
        """Whether the nodes of an earlier answer are alive and have not refused lately."""
        now, links = time.monotonic(), self._connection.links
        return all(links.is_connected(peer) and self._avoid.get(peer, 0.0) < now for peer, _ in routed.places)

    def note_failure(self, error: PeerError) -> None:
        """The next plans do without that node if they can, and look around anew."""
        self._avoid[PeerId(error.peer)] = time.monotonic() + AVOID_S
        self._nodes_until = 0.0

    async def route(self, num_positions: int) -> Routed:
        """The nodes that would serve a session now.

        Raises:
            NoPeers: nobody of the swarm can be reached.
            NoRoute: layers are covered by nobody, or by nobody with room, for longer than ROUTE_PATIENCE_S.
        """
        if time.monotonic() < self._nodes_until and all(
            self._connection.links.is_connected(n.peer) for n in self._nodes
        ):
            route = self._choose(self._nodes, num_positions)
            if isinstance(route, Routed):
                return route
        deadline = time.monotonic() + ROUTE_PATIENCE_S
        while True:
            records = await self._connection.find(self._model.model_id)
            nodes = await self._connection.measure(records)
            route = self._choose(nodes, num_positions)
            if isinstance(route, Routed):
                # Those that could not be reached are looked for anew next time: they are not part of what is known.
                self._nodes = [node for node in nodes if node.round_trip_s is not None]
                self._nodes_until = time.monotonic() + NODES_FRESH_S
                return route
            if time.monotonic() >= deadline:
                raise NoRoute(self._explain(route, nodes, num_positions))
            await asyncio.sleep(ROUTE_RETRY_S)

    def _choose(self, nodes: Sequence[MeasuredNode], num_positions: int) -> Routed | Uncovered:
        """Rather with a node that failed a moment ago than not at all: it may have been our link that was at fault."""
        now = time.monotonic()
        trusted = [node for node in nodes if self._avoid.get(node.peer, 0.0) < now]
        route = self._choose_among(trusted, num_positions)
        return self._choose_among(nodes, num_positions) if isinstance(route, Uncovered) else route

    def _choose_among(self, nodes: Sequence[MeasuredNode], num_positions: int) -> Routed | Uncovered:
        candidates = [
            Candidate(
                peer=node.peer,
                layers=LayerRange(shard.start, shard.stop),
                round_trip_s=node.round_trip_s,
                seconds_per_layer=shard.seconds_per_layer[0],
                kv_free_positions=shard.kv_free_tokens,
            )
            for node in nodes
            for shard in node.record.shards
            if node.round_trip_s is not None
            and shard.model_id == self._model.model_id
            and shard.numerics == self._numerics
        ]
        route = plan_route(
            candidates,
            num_layers=self._num_layers,
            num_positions=num_positions,
            first_layers=self._first_layers,
        )
        if not isinstance(route, Route):
            return route
        by_peer = {node.peer: node for node in nodes}
        return Routed(tuple((by_peer[stage.peer], stage.layers) for stage in route.stages))

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
