"""Peak memory: of loading a shard, and of a long context. Each in a process of its own, which this file also is.

What counts is the growth over a process that has imported torch, transformers and the model's class, and has run a
model of a few kilobytes: kernels and their work space are the same for every shard. On a GPU it is the growth of what
torch has allocated there.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.engine.node import Node
from benchmarks.engine.rig import Rig, Transformers, gaps, median_ms
from benchmarks.engine.wide import RandomSource
from benchmarks.report import Check, peak_bytes
from fusion_node.client.tokenizer import Tokenizer
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.shard_engine import ShardEngine
from fusion_node.engine.stage import Stage
from fusion_node.engine.weights import TensorSource
from fusion_node.store import ModelStore, StoredModel
from fusion_node.types import LayerRange

MAX_GROWTH = 1.15
MAX_LONG_GROWTH = 1.1

LONG_POSITIONS = 8_000
"""Of the 8,192 of the built-in model."""

LONG_TOKENS = 16

PROMPT_PART = 1_024
"""Rows of one step of a long prompt: what a user sends is the user's memory, and no more of it is here at once."""

EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
"""Stored in bfloat16 and served in float32, a layer has 28 MB: nothing of it can be mapped, all of it is converted."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}


def third_of(model: StoredModel, *, device: torch.device) -> tuple[list[Check], dict[str, Any]]:
    """Layers 10 to 19 of the built-in model."""
    found = _in_process("shard", str(model.path), str(device), 10, 20)
    return [_growth_check("memory-third", "peak memory of loading a third / its bytes", found, MAX_GROWTH)], found


def experts(builtin: StoredModel, *, device: torch.device) -> tuple[list[Check], dict[str, Any]]:
    """A third of a model with experts, seeded random weights in bfloat16, stored one expert at a time as on a hub."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "random-experts"
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**EXPERTS), dtype=torch.bfloat16).save_pretrained(source)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (source / name).write_bytes(builtin.read_file(name))
        model = ModelStore(Path(folder) / "store").pull(str(source))
        found = _in_process("shard", str(model.path), str(device), 4, 8)
    what = "the same for experts in bf16, served in fp32"
    return [_growth_check("memory-experts", what, found, MAX_GROWTH)], found


def long_context(
    model: StoredModel, partner: Transformers, ids: Sequence[int], *, device: torch.device
) -> tuple[list[Check], dict[str, Any]]:
    """A prompt of 8,000, then decoding, against ``generate`` on the same."""
    prompt = list(ids[:LONG_POSITIONS])
    found = _in_process("long", str(model.path), str(device), LONG_POSITIONS, LONG_TOKENS)
    began = time.perf_counter()
    tokens, times = partner.greedy(prompt, LONG_TOKENS)
    found["transformers_ms_per_token"] = median_ms(gaps(times))
    found["transformers_first_token_s"] = round(times[0] - began, 2)
    num_equal = sum(ours == theirs for ours, theirs in zip(found["tokens"], tokens, strict=True))
    what = f"tokens at {LONG_POSITIONS:,} of 8,192 positions, equal to transformers'"
    return [
        Check("long-equal", what, num_equal / LONG_TOKENS, "", 1.0, "=="),
        _growth_check("long-memory", "memory that they take / their KV", found, MAX_LONG_GROWTH),
    ], found


def _growth_check(name: str, what: str, found: dict[str, Any], target: float) -> Check:
    return Check(name, what, found["growth_bytes"] / found["own_bytes"], "x", target, "<=")


def _in_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.engine.memory", str(torch.get_num_threads()), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# What runs in the processes.


class _Growth:
    """Growth of memory from here on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before_bytes = self._now_bytes()

    @property
    def peak_bytes(self) -> int:
        """At the highest. Where the system does not tell of the past, at present."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        return max(peak_bytes(psutil.Process().pid), self._now_bytes()) - self._before_bytes

    @property
    def now_bytes(self) -> int:
        return self._now_bytes() - self._before_bytes

    def _now_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)


def _shard(path: str, device_name: str, start: str, stop: str) -> dict[str, Any]:
    device, layers = torch.device(device_name), LayerRange(int(start), int(stop))
    model = StoredModel.open(Path(path))
    _touch(RandomSource({**model.config, **TINY}), LayerRange(0, 1), device)
    growth = _Growth(device)
    own_bytes = _touch(model, layers, device)
    return {"own_bytes": own_bytes, "growth_bytes": growth.peak_bytes, "growth_at_end_bytes": growth.now_bytes}


def _touch(source: TensorSource, layers: LayerRange, device: torch.device) -> int:
    """Loads layers and computes with them, so that every byte was needed once. Returns their size, and that of the KV.

    What was loaded is let go of only when the process ends.
    """
    stage = Stage.load(source, layers, numerics=numerics_class("fp32"), device=device)
    engine = ShardEngine([stage], kv_budget_bytes=64 * stage.kv_bytes_per_position)
    engine.blocks.open(0, owner="user", max_slots=64)
    step = SessionLog(64).apply(0, first_node=1, num_rows=64, parent=0)
    assert isinstance(step, StepRows), step
    rows_TD = torch.randn((64, engine.hidden_size), generator=torch.Generator().manual_seed(1))
    engine.run(engine.plan(layers, [(0, step, 0, 64, True)]), [rows_TD])[0]
    _KEPT.append(engine)
    return engine.num_weight_bytes + 64 * engine.kv_bytes_per_position


_KEPT: list[ShardEngine] = []


def _long(path: str, device_name: str, positions: str, num_tokens: str) -> dict[str, Any]:
    from benchmarks.engine.rig import long_text

    num_positions, device, model = int(positions), torch.device(device_name), StoredModel.open(Path(path))
    ids = Tokenizer(model.path).encode(long_text())[:num_positions]
    capacity = num_positions + int(num_tokens)
    rig = Rig.load(model, device=device, num_positions=capacity + 16)
    _greedy(rig, ids[:PROMPT_PART], 2)
    pool_bytes = (capacity + 16) * rig.engine.kv_bytes_per_position
    growth = _Growth(device)
    tokens, first_s, decode_s = _greedy(rig, ids, int(num_tokens))
    # On a GPU the pool was there before.
    grown_bytes = growth.peak_bytes + (pool_bytes if device.type == "cuda" else 0)
    return {
        "own_bytes": pool_bytes if device.type == "cuda" else capacity * rig.engine.kv_bytes_per_position,
        "growth_bytes": grown_bytes,
        "tokens": tokens,
        "first_token_s": round(first_s, 2),
        "ms_per_token": median_ms(decode_s),
    }


def _greedy(rig: Rig, ids: Sequence[int], num_tokens: int) -> tuple[list[int], float, list[float]]:
    """The prompt in the chunks of a node, then greedy decoding: tokens, seconds to the first, and of each after it."""
    node, began = Node(rig), time.perf_counter()
    session = rig.open(len(ids) + num_tokens)
    for first in range(0, len(ids), PROMPT_PART):
        part = ids[first : first + PROMPT_PART]
        hidden_TD = node.answer(session, "user", session.step(len(part)), rig.boundary.embed(part))
    tokens, times = [int(rig.boundary.logits(hidden_TD[-1:])[0].argmax())], [time.perf_counter()]
    while len(tokens) < num_tokens:
        tokens += rig.decode([session], tokens[-1:])
        times.append(time.perf_counter())
    rig.close(session)
    return tokens, times[0] - began, gaps(times)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"shard": _shard, "long": _long}[sys.argv[2]](*sys.argv[3:])))
