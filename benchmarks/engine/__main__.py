"""``python -m benchmarks.engine``: which measurements there are, and how much of each."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Check, finish, parser, report

MODEL = "smollm2-135m"

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in simple words why the sky is blue.",
    "List five things to see in Rome, with one sentence about each.",
    "What is the difference between a process and a thread?",
)

POSITIONS = 3 * 8192
"""KV of all sequences of the measurements together. Memory is used only where something is written."""

MEASUREMENTS = ("decode", "together", "steps", "prefill", "latency", "third", "experts", "long", "breakdown", "wide")
FULL_ONLY = {"experts", "long"}


@dataclass(frozen=True)
class Amount:
    """How much of each measurement."""

    decode_rounds: int
    decode_tokens: int
    together_rounds: int
    step_rounds: int
    curve_rounds: int
    prefill_rounds: int
    latency_pairs: int
    latency_prefill: int
    latency_alone_s: float
    wide_rounds: int


QUICK = Amount(5, 24, 20, 20, 5, 3, 2, 1_024, 4.0, 20)
FULL = Amount(20, 24, 80, 80, 15, 11, 3, 4_096, 12.0, 100)


def run(
    quick: bool, *, device_name: str, threads: int | None, only: list[str], svg: Path | None
) -> tuple[list[Check], dict[str, Any]]:
    """All measurements, or those named."""
    import torch
    import transformers

    from benchmarks.engine import breakdown, latency, memory, speed, wide
    from benchmarks.engine.rig import Rig, Transformers, long_text
    from fusion_node.client.tokenizer import Tokenizer
    from fusion_node.engine.device import choose_device, describe_device
    from fusion_node.store import ModelStore

    device = choose_device(device_name)
    torch.set_num_threads(threads or min(2, os.cpu_count() or 1))
    amount = QUICK if quick else FULL
    model = ModelStore().pull(MODEL)
    tokenizer = Tokenizer(model.path)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    text = tokenizer.encode(long_text())
    rig = Rig.load(model, device=device, num_positions=POSITIONS)
    partner = Transformers(model.path, device=device)

    def where_time_goes() -> tuple[list[Check], dict[str, Any]]:
        found = breakdown.operators(rig, prompts[0])
        print(breakdown.as_text(found))
        if svg is not None:
            found["flame_graph"] = breakdown.flame_graph(rig, prompts[0], svg) or svg.name
        return [], found

    measurements: dict[str, Callable[[], tuple[list[Check], dict[str, Any]]]] = {
        "decode": lambda: speed.decode(
            rig, partner, prompts, rounds=amount.decode_rounds, num_tokens=amount.decode_tokens
        ),
        "together": lambda: speed.together(rig, text, rounds=amount.together_rounds),
        "steps": lambda: speed.steps(
            rig, text, rounds=amount.step_rounds, curve_rounds=amount.curve_rounds, curve=speed.CURVE_ROWS
        ),
        "prefill": lambda: speed.prefill(rig, partner, text, rounds=amount.prefill_rounds, num_tokens=1_024),
        "latency": lambda: latency.measure(
            rig, text, pairs=amount.latency_pairs, num_prefill=amount.latency_prefill, alone_s=amount.latency_alone_s
        ),
        "third": lambda: memory.third_of(model, device=device),
        "experts": lambda: memory.experts(model, device=device),
        "long": lambda: memory.long_context(model, partner, text, device=device),
        "breakdown": where_time_goes,
        "wide": lambda: wide.measure(device=device, rounds=amount.wide_rounds),
    }
    assert tuple(measurements) == MEASUREMENTS
    skipped = {name: "left to the full run" for name in FULL_ONLY if quick}
    if device.type != "cuda":
        skipped["wide"] = "layers as wide as a 7B model's are measured on a GPU: --device cuda"
    if device.type == "mps" or not Path("/proc/self/status").exists():
        skipped |= dict.fromkeys(("third", "experts", "long"), "this system does not tell of peak memory")
    checks: list[Check] = []
    data: dict[str, Any] = {
        "model": model.name,
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "skipped": {name: reason for name, reason in skipped.items() if name in (only or MEASUREMENTS)},
    }
    for name in only or MEASUREMENTS:
        if name not in skipped or (only and name in FULL_ONLY):
            data["skipped"].pop(name, None)
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            began = time.monotonic()
            more, found = measurements[name]()
            checks += more
            data[name] = {**found, "seconds": round(time.monotonic() - began, 1), "load_1min": _load()}
    return checks, data


def _load() -> float:
    """What else the machine does shows in its load: above the number of threads, figures are worth less."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def main() -> int:
    options = parser(
        "engine",
        description="The shard engine against transformers alone and against itself, on the built-in model. "
        "Quick: 2 to 3 minutes on 2 cores; full: about 10.",
    )
    options.add_argument("--device", default="cpu", help="cpu, cuda, cuda:0, mps or auto (default: cpu)")
    options.add_argument("--threads", type=int, help="torch's, for both sides (default: 2, or as many as there are)")
    options.add_argument("--only", nargs="+", default=[], choices=MEASUREMENTS, help="these measurements alone")
    arguments: argparse.Namespace = options.parse_args()
    measure = functools.partial(
        run,
        device_name=arguments.device,
        threads=arguments.threads,
        only=arguments.only,
        svg=arguments.json.with_suffix(".svg") if arguments.json is not None and not arguments.quick else None,
    )
    return finish(report("engine", quick=arguments.quick, run=measure), arguments)


if __name__ == "__main__":
    sys.exit(main())
