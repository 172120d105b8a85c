"""Three node processes on loopback against the whole model in one transformers process; start-up and memory of a node.

Speed: rounds are interleaved, and each compares the swarm with the reference at the number of threads that served the
reference better in that round: as many as this machine has cores, or as many as the nodes have together. Every node
has one thread. The user's side (embedding, head, sampling) is in the measuring process and counts towards the swarm.

Memory: peak resident memory of a node that holds a third of the layers, after prompts of 512 tokens and decoding,
against that of the reference process after the same. The interpreter with torch, transformers and libp2p is most of a
small model's node, so a second, larger model (seeded random weights, the same architecture) shows how the share
changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks import data_plane
from benchmarks.report import Check, main, peak_bytes
from fusion_node import ModelStore, SamplingParams, SwarmClient
from fusion_node.cli.local_swarm import LocalSwarm, split_evenly
from fusion_node.store import StoredModel

MODEL = "smollm2-135m"
NUM_NODES = 3
DECODE_TOKENS = 48
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
LONG_PROMPT_TOKENS = 512
LARGER = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class Reference:
    """transformers with the whole model in a process of its own."""

    def __init__(self, path: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.skeleton", "--reference", str(path), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask({"ids": [1, 2, 3], "num_tokens": 2})

    def measure(self, ids: Sequence[int], num_tokens: int) -> tuple[float, list[int]]:
        """Seconds and tokens of one greedy generation."""
        answer = self._ask({"ids": list(ids), "num_tokens": num_tokens})
        return answer["seconds"], answer["tokens"]

    @property
    def peak_bytes(self) -> int:
        return peak_bytes(self._process.pid)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the reference process has no pipes")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def serve_reference(path: str, threads: str) -> None:
    """The reference process: one JSON request a line."""
    import torch

    from fusion_node.engine.reference import ReferenceModel

    torch.set_num_threads(int(threads))
    model = ReferenceModel(Path(path))
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = model.greedy(request["ids"], request["num_tokens"], ignore_eos=True)
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), flush=True)


async def measure_swarm(stack: AsyncExitStack, model: StoredModel) -> tuple[LocalSwarm, SwarmClient, dict[str, float]]:
    """Starts the nodes and a client; returns them with how long each part took."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    local = LocalSwarm(model.name, folder=Path(folder), home=None, threads=1, numerics="fp32")
    await stack.enter_async_context(local)
    began = time.perf_counter()
    await local.start(split_evenly(model.num_layers, NUM_NODES))
    await local.wait_ready()
    ready_s = time.perf_counter() - began
    swarm = await stack.enter_async_context(
        # Every answer is to be computed whole, also when its prompt was asked before.
        SwarmClient(model.name, peers=local.nodes[0].addresses, threads=1, mdns=False, prefix_cache=False)
    )
    await swarm.find_route(64)
    return local, swarm, {"three_nodes_ready_s": ready_s, "and_found_by_a_user_s": time.perf_counter() - began}


async def node_start_s(model: StoredModel) -> float:
    """Seconds from starting one node process until it serves."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalSwarm(model.name, folder=Path(folder), home=None, threads=1, numerics="fp32") as local:
            began = time.perf_counter()
            await local.start([split_evenly(model.num_layers, NUM_NODES)[0]])
            await local.wait_ready()
            return time.perf_counter() - began


async def answer(swarm: SwarmClient, prompt: str, num_tokens: int) -> Any:
    """One greedy answer of exactly ``num_tokens``; returns its statistics."""
    generation = swarm.generate(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    await generation.text()
    return generation.stats


async def long_prompt(swarm: SwarmClient) -> str:
    """A question that has LONG_PROMPT_TOKENS tokens with the chat template, or a few less."""
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 60
    while len(await swarm.encode(text)) > LONG_PROMPT_TOKENS:
        text = text[:-4]
    return text


async def measure(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Everything but the data plane."""
    rounds = 3 if quick else 9
    cores = os.cpu_count() or 1
    model = ModelStore().pull(MODEL)
    starts = [await node_start_s(model) for _ in range(1 if quick else 3)]
    threads = sorted({cores, NUM_NODES})
    decode_ratios, first_ratios, raw = [], [], []
    async with AsyncExitStack() as stack:
        local, swarm, start = await measure_swarm(stack, model)
        references = {n: await asyncio.to_thread(Reference, model.path, n) for n in threads}
        for reference in references.values():
            stack.callback(reference.close)
        text = await long_prompt(swarm)
        short_ids, long_ids = await swarm.encode(PROMPT), await swarm.encode(text)
        await answer(swarm, PROMPT, 8)
        equal = True
        for _ in range(rounds):
            best_rate, best_first, tokens = 0.0, float("inf"), list[int]()
            for reference in references.values():
                # In a thread: the links of this process have to be answered meanwhile, or the nodes take us for dead.
                first_s, _ = await asyncio.to_thread(reference.measure, short_ids, 1)
                whole_s, tokens = await asyncio.to_thread(reference.measure, short_ids, DECODE_TOKENS + 1)
                best_rate = max(best_rate, DECODE_TOKENS / (whole_s - first_s))
                best_first = min(best_first, (await asyncio.to_thread(reference.measure, long_ids, 1))[0])
            stats = await answer(swarm, PROMPT, DECODE_TOKENS + 1)
            equal = equal and stats.token_ids == tokens
            first = (await answer(swarm, text, 1)).time_to_first_token_s
            decode_ratios.append((stats.tokens_per_s or 0.0) / best_rate)
            first_ratios.append((first or float("inf")) / best_first)
            raw.append(
                {
                    "reference_tokens_per_s": best_rate,
                    "swarm_tokens_per_s": stats.tokens_per_s,
                    "reference_first_s": best_first,
                    "swarm_first_s": first,
                    "stages_ms_per_step": [1000 * s.compute_s / s.steps for s in stats.stages],
                }
            )
        nodes = [peak_bytes(node.process.pid) for node in local.nodes]
        whole = min(reference.peak_bytes for reference in references.values())
    memory = {"smollm2-135m": _memory(nodes, whole), "bare_node": await bare_node_bytes()}
    checks = [
        Check("tokens-equal", "greedy tokens equal transformers'", float(equal), "", 1.0, "=="),
        Check("decode", "decode tokens/s, 3 nodes / transformers", statistics.median(decode_ratios), "x", 0.8, ">="),
        Check(
            "first-token", "time to first token of 512, 3 nodes / transformers",
            statistics.median(first_ratios), "x", 1.3, "<=",
        ),
        Check("memory", "peak memory of a third / whole model", max(nodes) / whole, "x", 0.5, "<="),
    ]  # fmt: skip
    if not quick:
        memory["larger"] = await measure_larger()
        ratio = max(memory["larger"]["nodes_bytes"]) / memory["larger"]["whole_bytes"]
        checks.append(Check("memory-larger", "the same for a model of 1.3 GB", ratio, "x", 0.5, "<="))
    data = {
        "node_start_s": starts,
        "swarm_start": start,
        "threads_of_reference": threads,
        "rounds": raw,
        "memory": memory,
    }
    return checks, data


async def measure_larger() -> dict[str, Any]:
    """Peak memory for a model of 1.3 GB with seeded random weights."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = ModelStore()
        builtin = store.find(MODEL)
        await asyncio.to_thread(make_larger, folder / "larger-llama", builtin)
        model = await asyncio.to_thread(store.pull, str(folder / "larger-llama"))
        stack.callback(store.remove, model.name)
        local, swarm, _ = await measure_swarm(stack, model)
        text = await long_prompt(swarm)
        await answer(swarm, text, 16)
        nodes = [peak_bytes(node.process.pid) for node in local.nodes]
        ids = await swarm.encode(text)
        reference = await asyncio.to_thread(Reference, model.path, os.cpu_count() or 1)
        stack.callback(reference.close)
        await asyncio.to_thread(reference.measure, ids, 16)
        return _memory(nodes, reference.peak_bytes)


def make_larger(folder: Path, builtin: StoredModel) -> None:
    """Writes config, tokenizer of the built-in model, and seeded weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**LARGER)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(builtin.read_file(name))


async def bare_node_bytes() -> int:
    """Peak memory of a process that has imported what a node imports, and does nothing."""
    code = (
        "import fusion_node.daemon.node, p2p.libp2p_adapter, transformers.models.llama.modeling_llama\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    return int(out) * 1024 if process.returncode == 0 else 0


def _memory(nodes: list[int], whole: int) -> dict[str, Any]:
    return {"nodes_bytes": nodes, "whole_bytes": whole}


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """The swarm, then the data plane."""
    checks, data = asyncio.run(measure(quick))
    link_checks, link_data = data_plane.run(quick)
    return [*checks, *link_checks], {**data, "data_plane": link_data}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--reference"]:
        serve_reference(*sys.argv[2:])
    else:
        description = "Three nodes against one process. Quick: about 2 minutes on 2 cores; full: about 8."
        sys.exit(main("skeleton", run, description=description))
