"""The state of a swarm as a user sees it: who is there, what they hold, which layers are covered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from fusion_node.client.connection import MeasuredNode, SwarmConnection
from fusion_node.errors import PeerError
from fusion_node.slices import ModelSlice
from fusion_node.types import ModelId


class ShardView(msgspec.Struct, frozen=True):
    """One shard of one node, by its own word.

    Attributes:
        ms_per_layer: for a forward of one row.
        ms_per_layer_of_rows: for forwards of 1, 16 and 256 rows.
        queue_ms: what a decode step waits before it is computed.
        is_ready: False while the node still loads these layers, and serves nobody.
        slice: which part of these layers the node holds, as ``0/3``; empty: all of them.
    """

    model: str
    model_id: str
    start: int
    stop: int
    num_layers: int
    numerics: str
    ms_per_layer: float
    kv_free_positions: int
    quantization: str = ""
    ms_per_layer_of_rows: tuple[float, float, float] = (0.0, 0.0, 0.0)
    queue_ms: float = 0.0
    is_ready: bool = True
    slice: str = ""


class NodeView(msgspec.Struct, frozen=True):
    """One node: its own record, and what we measured.

    Attributes:
        record_age_s, record_left_s: since the node said what stands here, and until that is no longer believed.
        round_trip_ms: measured now; None when it does not answer.
        problem: why it could not be reached or asked.
        path: over what it was reached, as p2p.seam.PathKind names it; empty when it was not.
        operator, region, price: what its operator says; nobody checks it.
        up_Bps, down_Bps: of its line, as the node says; 0 when it did not measure.
    """

    peer: str
    operator: str
    device: str
    software: str
    addresses: tuple[str, ...]
    record_age_s: float
    round_trip_ms: float | None
    num_sessions: int
    memory_free_bytes: int
    shards: tuple[ShardView, ...]
    counters: dict[str, float]
    problem: str
    record_left_s: float = 0.0
    path: str = ""
    region: str = ""
    price: float = 0.0
    up_Bps: int = 0
    down_Bps: int = 0

    @property
    def is_ghost(self) -> bool:
        """Whether its record is all that there is of it: it is listed until that expires, and does not answer."""
        return self.round_trip_ms is None


class ModelView(msgspec.Struct, frozen=True):
    """One model in one numerics class: how many reachable nodes serve each layer, per layer; whole layers only."""

    model: str
    model_id: str
    numerics: str
    num_layers: int
    holders_per_layer: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        return all(self.holders_per_layer)


class SplitView(msgspec.Struct, frozen=True):
    """Layers that nodes hold slices of, split in one way: how many reachable nodes hold each slice.

    Attributes:
        slices: all of them, as ``0/3``, those that nobody holds among them.
    """

    model: str
    model_id: str
    numerics: str
    start: int
    stop: int
    slices: tuple[str, ...]
    holders_per_slice: tuple[int, ...]


class Overview(msgspec.Struct, frozen=True):
    """The swarm at one moment."""

    nodes: tuple[NodeView, ...]
    models: tuple[ModelView, ...]
    splits: tuple[SplitView, ...] = ()


async def look_around(connection: SwarmConnection, model_id: ModelId | None = None) -> Overview:
    """Finds nodes, measures them and asks each for its counters.

    Raises:
        NoPeers: no peer of the swarm can be reached.
    """
    records = await connection.find(model_id)
    nodes = await connection.measure(records)
    views = await asyncio.gather(*(_view(connection, node) for node in sorted(nodes, key=_by_layers)))
    return Overview(tuple(views), tuple(_models(views)), tuple(_splits(views)))


async def _view(connection: SwarmConnection, node: MeasuredNode) -> NodeView:
    record, problem, counters, now = node.record, node.problem, dict[str, float](), time.time()
    if node.round_trip_s is not None:
        try:
            counters = await connection.status_of(node)
        except PeerError as error:
            problem = str(error)
    return NodeView(
        peer=record.peer,
        operator=record.operator,
        device=record.device,
        software=record.software,
        addresses=record.data_addresses,
        record_age_s=round(max(now - record.issued_at, 0.0), 1),
        record_left_s=round(max(record.expires_at - now, 0.0), 1),
        round_trip_ms=None if node.round_trip_s is None else round(node.round_trip_s * 1000, 2),
        num_sessions=record.num_sessions,
        memory_free_bytes=record.memory_free_bytes,
        shards=tuple(
            ShardView(
                model=s.model_name,
                model_id=s.model_id,
                start=s.start,
                stop=s.stop,
                num_layers=s.num_layers,
                numerics=s.numerics,
                ms_per_layer=round(s.seconds_per_layer[0] * 1000, 3),
                kv_free_positions=s.kv_free_tokens,
                quantization=s.quantization,
                ms_per_layer_of_rows=_milliseconds(s.seconds_per_layer),
                queue_ms=round(s.queue_s * 1000, 2),
                is_ready=s.is_ready,
                slice=s.slice,
            )
            for s in record.shards
        ),
        counters=counters,
        problem=problem,
        region=record.region,
        price=record.price,
        up_Bps=record.up_Bps,
        down_Bps=record.down_Bps,
        path=next((link.path.value for link in connection.links.links() if link.peer == node.peer), ""),
    )


def _milliseconds(seconds: tuple[float, float, float]) -> tuple[float, float, float]:
    first, second, third = (round(each * 1000, 3) for each in seconds)
    return first, second, third


def _models(nodes: Sequence[NodeView]) -> list[ModelView]:
    """Coverage counts only nodes that answer and have loaded: a listed ghost covers nothing."""
    holders: dict[tuple[str, str, int], list[int]] = {}
    names: dict[str, str] = {}
    for node in nodes:
        for shard in node.shards:
            if shard.slice:
                continue
            # Who claims another number of layers speaks of another model, whatever id it claims.
            key = (shard.model_id, shard.numerics, shard.num_layers)
            layers = holders.setdefault(key, [0] * shard.num_layers)
            names.setdefault(shard.model_id, shard.model)
            if node.round_trip_ms is not None and shard.is_ready:
                for layer in range(shard.start, shard.stop):
                    layers[layer] += 1
    return [
        ModelView(names[model_id], model_id, numerics, num_layers, tuple(layers))
        for (model_id, numerics, num_layers), layers in sorted(holders.items())
    ]


def _splits(nodes: Sequence[NodeView]) -> list[SplitView]:
    """As ``_models``, of slices. A record with a slice that is none was refused before (p2p.records)."""
    holders: dict[tuple[str, str, int, int, tuple[int, ...]], list[int]] = {}
    names: dict[str, str] = {}
    for node in nodes:
        for shard in node.shards:
            if not shard.slice:
                continue
            place = ModelSlice.parse(shard.slice)
            key = (shard.model_id, shard.numerics, shard.start, shard.stop, place.weights)
            counts = holders.setdefault(key, [0] * place.num_members)
            names.setdefault(shard.model_id, shard.model)
            counts[place.index] += node.round_trip_ms is not None and shard.is_ready
    return [
        SplitView(
            names[model_id],
            model_id,
            numerics,
            start,
            stop,
            tuple(str(ModelSlice(index, weights)) for index in range(len(weights))),
            tuple(counts),
        )
        for (model_id, numerics, start, stop, weights), counts in sorted(holders.items())
    ]


def _by_layers(node: MeasuredNode) -> tuple[str, int, str]:
    shards = node.record.shards
    return (shards[0].model_id, shards[0].start, node.record.peer) if shards else ("~", 0, node.record.peer)
