"""fusion-node: serve a part of a large open-weight model, and use a swarm of such parts as one model.

The public names are those in ``__all__``; they are loaded when first used, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_node.client.sampling import SamplingParams
    from fusion_node.client.swarm import Generation, GenerationStats, RepairReport, StageReport, SwarmClient
    from fusion_node.client.sync import SyncGeneration, SyncSwarmClient
    from fusion_node.client.user_rules import UserRules
    from fusion_node.errors import FusionError
    from fusion_node.store import ModelStore

__version__ = "0.1.0"

_HOMES = {
    "FusionError": "fusion_node.errors",
    "Generation": "fusion_node.client.swarm",
    "GenerationStats": "fusion_node.client.swarm",
    "ModelStore": "fusion_node.store",
    "RepairReport": "fusion_node.client.swarm",
    "SamplingParams": "fusion_node.client.sampling",
    "StageReport": "fusion_node.client.swarm",
    "SwarmClient": "fusion_node.client.swarm",
    "SyncGeneration": "fusion_node.client.sync",
    "SyncSwarmClient": "fusion_node.client.sync",
    "UserRules": "fusion_node.client.user_rules",
}

__all__ = [
    "FusionError",
    "Generation",
    "GenerationStats",
    "ModelStore",
    "RepairReport",
    "SamplingParams",
    "StageReport",
    "SwarmClient",
    "SyncGeneration",
    "SyncSwarmClient",
    "UserRules",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
