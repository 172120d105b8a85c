"""What a forked ``fusion-node`` finds imported (tests.live.forks): its server imports this module, and nobody else."""

from __future__ import annotations

import gc
import importlib
import warnings

warnings.simplefilter("default")  # before others add theirs, as PYTHONWARNINGS=default would

for name in (
    "fusion_node.cli.main",
    "fusion_node.client.swarm",
    "fusion_node.daemon.node",
    "fusion_node.daemon.serving_node",
    "fusion_node.gateway.server",
    "p2p.libp2p_adapter",
    "transformers.models.llama.modeling_llama",
    "tests.live.chaos_node",
):
    importlib.import_module(name)

# A process that is forked need not look through a million objects that stay, nor copy their pages by doing so.
gc.collect()
gc.freeze()
