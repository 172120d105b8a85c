"""Where the time of decoding goes: operators by torch's profiler, and a flame graph by py-spy."""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.rig import Rig

NUM_TOKENS = 32
FLAME_S = 10

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_KINDS = {
    "linears": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "mkldnn::_linear_pointwise"),
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention"),
}


def operators(rig: Rig, ids: Sequence[int], *, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Self times of the operators per token, and what is left: Python, and the way from it to the operators.

    The rest is taken from a run without the profiler, which makes Python look slower than it is.
    """
    plain_s = _decode(rig, ids, num_tokens)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if rig.device.type == "cuda" else [])
    profiler = profile(activities=activities)
    profiled_s = _decode(rig, ids, num_tokens, during=profiler)
    events = profiler.key_averages()
    device_us = sum(event.self_device_time_total for event in events)
    by_kind = dict.fromkeys((*_KINDS, "other operators"), 0.0)
    for event in events:
        kind = next((k for k, names in _KINDS.items() if any(n in event.key for n in names)), "other operators")
        by_kind[kind] += event.self_cpu_time_total / 1e3 / num_tokens
    plain_ms = plain_s * 1e3
    by_kind["outside of operators"] = max(0.0, plain_ms - sum(by_kind.values()))
    top = sorted(events, key=lambda event: -event.self_cpu_time_total)[:15]
    return {
        "ms_per_token": round(plain_ms, 3),
        "ms_per_token_profiled": round(profiled_s * 1e3, 3),
        "device_ms_per_token": round(device_us / 1e3 / num_tokens, 3),
        "share": {kind: round(ms / plain_ms, 3) for kind, ms in by_kind.items()},
        "top": [
            {
                "operator": event.key,
                "calls_per_token": round(event.count / num_tokens, 1),
                "self_ms_per_token": round(event.self_cpu_time_total / 1e3 / num_tokens, 3),
            }
            for event in top
        ],
    }


def flame_graph(rig: Rig, ids: Sequence[int], path: Path) -> str:
    """Samples this process while it decodes, native frames included, and writes an SVG. Returns why not, or ""."""
    sampler = shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if sampler is None:
        return "py-spy is not installed: pip install 'fusion-node[bench]'"
    if sys.platform == "linux":
        # Where the system lets processes look only into their children: the sampler is our child, and not our parent.
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)
    command = [sampler, "record", "--native", "--rate", "200", "--duration", str(FLAME_S)]
    command += ["--function", "--pid", str(os.getpid()), "--output", str(path)]
    sampling = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while sampling.poll() is None:
        _decode(rig, ids, 128)
    return sampling.stderr.read().strip() if sampling.returncode and sampling.stderr else ""


def _decode(
    rig: Rig, ids: Sequence[int], num_tokens: int, *, during: AbstractContextManager[Any] | None = None
) -> float:
    """Median seconds per token; the prompt is computed before, outside of ``during``."""
    session, token = rig.begin(ids, len(ids) + num_tokens)
    seconds = []
    with during or nullcontext():
        for _ in range(num_tokens):
            began = time.perf_counter()
            (token,) = rig.decode([session], [token])
            seconds.append(time.perf_counter() - began)
    rig.close(session)
    return statistics.median(seconds)


def as_text(found: dict[str, Any]) -> str:
    """A small table for people."""
    lines = [f"decoding, {found['ms_per_token']} ms per token: " + _shares(found["share"])]
    for entry in found["top"]:
        lines.append(f"  {entry['self_ms_per_token']:>9.3f} ms {entry['calls_per_token']:>7.1f}  {entry['operator']}")
    return "\n".join(lines)


def _shares(share: dict[str, float]) -> str:
    return ", ".join(f"{kind} {100 * part:.0f} %" for kind, part in share.items())
