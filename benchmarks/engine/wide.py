"""Layers of the width of a 7B model in bfloat16, against the time that reading their weights takes.

A decode step reads every weight once, so that time is what no engine can go below. Seeded random weights do: the time
does not depend on them. A few layers stand for all, which are alike.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine.rig import Session, interleaved, median_ms, median_ratio, synchronize
from benchmarks.report import Check
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.errors import LocalProtocolError
from fusion_node.types import LayerRange

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
NUM_LAYERS = 4
CONTEXT = 1024
COPY_BYTES = 2**30

MAX_OVER_BANDWIDTH = 2.0
"""Our own aim: half of the memory bandwidth. Kernels reach nine tenths of it; what is left is launching them."""


class RandomSource:
    """Random weights of a configuration, in place of a stored model: fusion_node.engine.weights.TensorSource."""

    path = Path("/nonexistent")
    name = "random weights"

    def __init__(self, config: Mapping[str, Any], *, seed: int = 0) -> None:
        self.config = dict(config)
        self._seed = seed

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        settings = dict(self.config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def read_file(self, name: str) -> bytes:
        raise LocalProtocolError(f"{self.name} have no file {name}")

    def open_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        generator = torch.Generator().manual_seed(self._seed)
        for name in names:
            shape = self._shapes[name]
            tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5, generator=generator)
            yield name, "BF16", shape, tensor.view(torch.uint8).numpy().reshape(-1).data


def measure(
    *,
    device: torch.device,
    rounds: int,
    config: Mapping[str, Any] = LLAMA_7B,
    num_layers: int = NUM_LAYERS,
    context: int = CONTEXT,
    copy_bytes: int = COPY_BYTES,
) -> tuple[list[Check], dict[str, Any]]:
    """Steps of 1, 16 and 64 rows of a sequence behind a context, for all layers of the model by what these few take."""
    layers = LayerRange(0, num_layers)
    stage = Stage.load(RandomSource(config), layers, numerics=numerics_class("bf16"), device=device)
    engine = ShardEngine([stage], kv_budget_bytes=3 * (context + 80) * stage.kv_bytes_per_position)

    def step_of(num_rows: int) -> Any:
        session = Session(num_rows, context + num_rows)
        engine.blocks.open(num_rows, owner="user", max_slots=context + num_rows)

        def forward(step: Any, rows_TD: torch.Tensor) -> None:
            engine.run(engine.plan(layers, [(num_rows, step, 0, len(rows_TD), True)]), [rows_TD])
            synchronize(device)

        forward(session.step(context), torch.randn(context, engine.hidden_size).bfloat16())
        step, rows_TD = session.step(num_rows), torch.randn(num_rows, engine.hidden_size).bfloat16()
        return lambda: forward(step, rows_TD)

    seconds = interleaved({str(rows): step_of(rows) for rows in (1, 16, 64)}, rounds)
    bandwidth = _copy_Bps(device, copy_bytes)
    limit_s = stage.num_weight_bytes / bandwidth
    scale = config["num_hidden_layers"] / num_layers
    over = statistics.median(seconds["1"]) / limit_s
    step_16 = median_ratio(seconds["16"], seconds["1"])
    checks = [
        Check("wide-decode", "7B in bf16: decode step / reading the weights once", over, "x", MAX_OVER_BANDWIDTH, "<="),
        Check("wide-step-16", "7B in bf16: forward of 16 rows / of 1", step_16, "x", 1.8, "<="),
    ]
    data = {
        "config": json.loads(json.dumps(dict(config))),
        "num_layers_measured": num_layers,
        "context": context,
        "copy_GBps": round(bandwidth / 1e9, 1),
        "weight_bytes_per_layer": stage.num_weight_bytes // num_layers,
        "ms_per_step_of_all_layers": {rows: round(scale * median_ms(values), 3) for rows, values in seconds.items()},
        "limit_ms": round(scale * limit_s * 1e3, 3),
    }
    return checks, data


def _copy_Bps(device: torch.device, num_bytes: int) -> float:
    """Bytes that are read and written per second when a large tensor is copied, at the best of some tries."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * num_bytes / best_s
