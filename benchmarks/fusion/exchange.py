"""The exchanges of a layer: over the links of nodes, and the same ReduceScatters by torch.distributed with gloo.

All contenders are processes of their own on this machine, a member each, alive through the whole run and idle while
others are measured. Rounds are interleaved; the value of a check is the median over the rounds of the ratio of times,
gloo's over ours. The time of a round is that of its slowest member.

gloo has reduce_scatter for tensors on a CPU, which is what the checks are about. Beside it stands what one would write
by hand: all_to_all_single, which moves as few bytes as ours does, and sums in the order of members. gloo neither
encrypts, nor knows who it talks to, nor looks at values. With three members or more ours is there twice, with masked
sums and without.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.fusion.sizes import least_bytes, widths
from benchmarks.report import Check
from fusion_node.slices import MIN_MASKED_MEMBERS, Dims

DIMS = Dims(hidden=576, heads=9, kv_heads=3, head_dim=64, channels=1536)
"""Of the built-in model; benchmarks.fusion.wire reads them from it."""

GROUPS = (2, 3, 4)
QUICK_GROUPS = (2, 3)
ROWS = (1, 16, 64)
OURS, MASKED, GLOO, BY_HAND = "ours", "ours-masked", "gloo", "gloo-all-to-all"
LAYERS = {1: 30, 16: 20, 64: 10}
"""By rows, of one round; a third of it among four members, of whom gloo's take a tenth of a second for each."""

MAX_MASKED_RATIO = 3.0
"""Twice the bytes to seal and open, and the streams."""

NUM_ROUNDS, NUM_QUICK_ROUNDS = 11, 5


@dataclass(slots=True)
class Times:
    """Seconds per layer, and CPU seconds of all members per layer, by round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def contenders(size: int) -> tuple[str, ...]:
    """Who is measured; of two members none has masked sums."""
    return (OURS, MASKED, GLOO, BY_HAND) if size >= MIN_MASKED_MEMBERS else (OURS, GLOO, BY_HAND)


def median_ratio(others: Sequence[float], ours: Sequence[float]) -> float:
    """The median over rounds of how many times as long the others took."""
    return statistics.median(other / mine for other, mine in zip(others, ours, strict=True))


class Team:
    """The processes of one contender. Use ``with``."""

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        self._size = size
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Team:
        text = "/".join(",".join(map(str, by_owner)) for by_owner in widths(DIMS, (1,) * self._size))
        port = str(_free_port())
        for rank in range(self._size):
            arguments = [self._kind, str(rank), str(self._size), text, port]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.fusion.workers", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        said = [self._read(process) for process in self._processes]
        for process in self._processes:
            self._write(process, json.dumps(said))
        for process in self._processes:
            self._read(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def measure(self, rows: int, layers: int, times: Times) -> None:
        """One round."""
        before = self._cpu_s()
        for process in self._processes:
            self._write(process, f"{rows} {layers}")
        told = [self._read(process) for process in self._processes]
        if not all(each["is_right"] for each in told):
            raise RuntimeError(f"{self._kind}: a sum is wrong")
        times.cpu.append((self._cpu_s() - before) / (layers + 1))
        times.seconds.append(max(each["seconds"] for each in told) / layers)

    def _cpu_s(self) -> float:
        times = [psutil.Process(process.pid).cpu_times() for process in self._processes]
        return sum(each.user + each.system for each in times)

    def _read(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of {self._kind} ended early")
        return json.loads(line)

    @staticmethod
    def _write(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(size: int, num_rounds: int) -> list[dict[str, Any]]:
    """All widths of one size of groups, all contenders in turn."""
    names = contenders(size)
    times = {rows: {name: Times() for name in names} for rows in ROWS}
    with ExitStack() as stack:
        teams = {name: stack.enter_context(Team(name, size)) for name in names}
        for rows in reversed(ROWS):  # large ones first: they end the allocator's mapping of every buffer anew
            for team in teams.values():
                team.measure(rows, 3, Times())
        for number in range(num_rounds):
            for rows in ROWS:
                for name in names if number % 2 else names[::-1]:
                    teams[name].measure(rows, LAYERS[rows] // (3 if size > 3 else 1), times[rows][name])
    return [_told(size, rows, times[rows]) for rows in ROWS]


def _told(size: int, rows: int, times: dict[str, Times]) -> dict[str, Any]:
    ours = times[OURS].seconds
    return {
        "members": size,
        "rows": rows,
        "least_bytes_per_layer": least_bytes(DIMS, (1,) * size, rows),
        "ratios": {name: median_ratio(times[name].seconds, ours) for name in times if name != OURS},
        "ms_per_layer": {name: round(1e3 * statistics.median(each.seconds), 4) for name, each in times.items()},
        "cpu_ms_per_layer": {name: round(1e3 * statistics.mean(each.cpu), 4) for name, each in times.items()},
        "rounds_ms": {name: [round(1e3 * each, 4) for each in told.seconds] for name, told in times.items()},
    }


def in_words(told: dict[str, Any]) -> str:
    """One line."""
    times = ", ".join(
        f"{name} {told['ms_per_layer'][name]:.3f} ms ({told['cpu_ms_per_layer'][name]:.3f} of CPU)"
        for name in told["ms_per_layer"]
    )
    ratios = ", ".join(f"{name} takes {ratio:.2f} x" for name, ratio in told["ratios"].items())
    return f"{told['members']} members, {told['rows']} rows, a layer: {times}; {ratios}"


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """All cells; in a quick run with fewer rounds and without the largest groups."""
    cells, checks = [], []
    for size in QUICK_GROUPS if quick else GROUPS:
        for told in measure(size, NUM_QUICK_ROUNDS if quick else NUM_ROUNDS):
            cells.append(told)
            print(in_words(told), file=sys.stderr, flush=True)
            what = f"{size} members, {told['rows']} rows"
            checks.append(
                Check(
                    f"gloo-{size}-{told['rows']}",
                    f"a layer's exchanges, gloo's reduce_scatter / ours, {what}",
                    told["ratios"][GLOO],
                    "x",
                    1.0,
                    ">=",
                )
            )
            if MASKED in told["ratios"]:
                checks.append(
                    Check(
                        f"masked-{size}-{told['rows']}",
                        f"a layer's exchanges, masked / plain, {what}",
                        told["ratios"][MASKED],
                        "x",
                        MAX_MASKED_RATIO,
                        "<=",
                    )
                )
    return checks, {"cells": cells}
