"""Echo and one-way transfer over our links, a WebSocket with and without a cipher, and a plain socket.

Every contender is a pair of processes, alive through the whole run and idle while another is measured. Rounds are
interleaved, and a check is the median over the rounds of the ratio within each round: the machine may get slower from
one minute to the next, and does so for all of them. CPU is that of both processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.network.contenders import ACK_BYTES, CONTENDERS
from benchmarks.report import Check

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
MAX_CPU_RATIO = 1.3
PARTNER = "websocket+chacha20"


class Pair:
    """Server and client process of one contender."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> Pair:
        self._server = self._start("serve", self._name)
        self._client = self._start("client", self._name, self._line(self._server))
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._client, self._server):
            process.kill()
            process.communicate()

    def measure(self, what: str, num_bytes: int, count: int) -> tuple[float, float]:
        """Seconds of one message (median for echoes, mean for one-way), and CPU seconds of both processes for it."""
        before = self._cpu_s()
        assert self._client.stdin is not None
        self._client.stdin.write(f"{what} {num_bytes} {count}\n")
        self._client.stdin.flush()
        times = json.loads(self._line(self._client))
        seconds = statistics.median(times) if what == "echo" else times[0] / count
        return seconds, (self._cpu_s() - before) / count

    def _cpu_s(self) -> float:
        return sum(_cpu_s(process.pid) for process in (self._server, self._client))

    @staticmethod
    def _start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.network.contenders", *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError("a benchmark process ended early")
        return line


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """All contenders; see the head of this file."""
    rounds = 5 if quick else 15
    # Where CPU time is counted in ticks of 10 ms, each measurement has to last for many of them.
    bytes_each = (24 if quick else 64) << 20
    measured: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        pairs = {name: stack.enter_context(Pair(name)) for name in CONTENDERS}
        for pair in pairs.values():
            # The large one first: it ends the mapping and unmapping of every receive buffer by the allocator.
            pair.measure("echo", 1 << 20, 3)
            pair.measure("echo", 4096, 200)
        for number in range(rounds):
            order = list(CONTENDERS) if number % 2 else list(CONTENDERS)[::-1]
            for size, num_bytes in SIZES.items():
                for name in order:
                    num_echoes = min(max(bytes_each // 4 // num_bytes, 12), 400)
                    measured["echo", size, name].append(pairs[name].measure("echo", num_bytes, num_echoes))
                    num_one_way = max(bytes_each, 2 * ACK_BYTES) // num_bytes
                    if size == "4 KiB":
                        num_one_way //= 4
                    measured["one-way", size, name].append(pairs[name].measure("one-way", num_bytes, num_one_way))
    return _checks(measured), _data(measured)


def _cpu_s(pid: int) -> float:
    if sys.platform == "linux":
        # Its CPU-time clock, in nanoseconds, by the number that clock_getcpuclockid(3) gives.
        return time.clock_gettime((~pid << 3) | 2)
    times = psutil.Process(pid).cpu_times()  # in ticks of 10 ms
    return times.user + times.system


def _checks(measured: dict[tuple[str, str, str], list[tuple[float, float]]]) -> list[Check]:
    def ratio(what: str, size: str, which: int, partner: str) -> float:
        ours, theirs = measured[what, size, "pool"], measured[what, size, partner]
        return statistics.median(our[which] / their[which] for our, their in zip(ours, theirs, strict=True))

    checks = []
    for size, num_bytes in SIZES.items():
        if num_bytes >= 64 << 10:
            checks += [
                Check(
                    id=f"{what}-cpu-{num_bytes}",
                    what=f"{size} {what}: CPU, link pool / WebSocket + ChaCha20",
                    value=ratio(what, size, 1, PARTNER),
                    unit="x",
                    target=MAX_CPU_RATIO,
                    comparison="<=",
                )
                for what in ("echo", "one-way")
            ]
        checks.append(
            Check(
                id=f"echo-{num_bytes}",
                what=f"{size} echo: time, link pool / bare WebSocket",
                value=ratio("echo", size, 0, "websocket"),
                unit="x",
                target=1.5,
                comparison="<=",
            )
        )
    return checks


def _data(measured: dict[tuple[str, str, str], list[tuple[float, float]]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for (what, size, name), values in measured.items():
        seconds, cpu_s = (statistics.median(value[which] for value in values) for which in (0, 1))
        data.setdefault(f"{what} {size}", {})[name] = {
            "ms": round(seconds * 1e3, 4),
            "cpu_ms": round(cpu_s * 1e3, 4),
            "MBps": round(SIZES[size] / seconds / 1e6, 1),
        }
    for title, by_name in data.items():
        told = [
            f"{name} {e['ms']:.3f} ms, CPU {e['cpu_ms']:.3f} ms, {e['MBps']:.0f} MB/s" for name, e in by_name.items()
        ]
        print(f"{title}:  " + "  |  ".join(told))
    return data
