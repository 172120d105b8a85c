"""The nodes of a model as placement sees them: records in, scheduler.swarm_rate.Host out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fusion_node.engine.architectures import first_layers, load_config
from fusion_node.engine.numerics import numerics_class
from fusion_node.store import StoredModel
from fusion_node.types import LayerRange, ModelId, PeerId
from p2p.messages import row_bytes
from p2p.records import NodeRecord, ShardRecord
from scheduler.swarm_rate import Host, Work


def work_of(model: StoredModel, numerics: str) -> Work:
    """What there is to place of a model."""
    config: dict[str, Any] = model.config.get("text_config", model.config)
    hidden_size = int(config.get("hidden_size", 0))
    layer_bytes = sum(tensor.num_bytes for tensor in model.manifest.tensors if ".layers.0." in tensor.name)
    return Work(
        num_layers=model.num_layers,
        layer_bytes=layer_bytes,
        row_bytes=row_bytes(numerics_class(numerics).wire_dtype, hidden_size) or 4 * hidden_size,
        first_layers=first_layers(load_config(model)),
    )


def hosts_of(records: Iterable[NodeRecord], model_id: ModelId, numerics: str, num_layers: int) -> list[Host]:
    """Every node that holds whole layers of the model, or loads some.

    A node that goes over to other layers counts with those that it will hold, and as not ready: nobody may rely on it
    for what it still serves.
    """
    hosts = []
    for record in records:
        shards = [
            shard
            for shard in record.shards
            if (shard.model_id, shard.numerics, shard.num_layers) == (model_id, numerics, num_layers)
            and not shard.slice
        ]
        if shards:
            hosts.append(_host(record, shards[-1]))  # what it is about to hold comes last
    return hosts


def _host(record: NodeRecord, shard: ShardRecord) -> Host:
    held = LayerRange(shard.start, shard.stop)
    return Host(
        peer=PeerId(record.peer),
        capacity_layers=shard.capacity_layers or len(held),
        seconds_per_layer=shard.seconds_per_layer[0] or math.nan,
        held=held,
        load_Bps=float(record.down_Bps) or None,
        is_ready=shard.is_ready,
        is_pinned=not shard.capacity_layers,
    )
