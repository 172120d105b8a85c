"""What a node costs while nobody asks it anything: CPU and bytes, in a swarm of twelve, and simulated in a large one.

The twelve are processes with the control plane and the data plane of a node and nothing else (no torch): each enters
by the first one's address, announces a record every 20 s, measures its neighbours, and is left alone. Bandwidth is not
measured meanwhile: a node does that every six hours, with up to 4.5 MiB, which is 0.2 kB/s. CPU is what the kernel
counts per process. Bytes are those of the loopback interface, where each byte is sent once and received once; as root
the swarm gets a network namespace of its own, so that nobody else's are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks.report import Check

NUM_NODES = 12
MAX_CPU_PERCENT = 5.0
"""Of one core, per node. GossipSub alone may take 3 %."""

MAX_BPS = 4096.0
"""Per node, sent: what a slow uplink does not notice."""

SETTLE_S, SETTLE_QUICK_S = 60.0, 25.0
"""The first look-ups and publications of a newcomer are over by then; not quite all of them when quick."""


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """The twelve, in a process of its own that may have a namespace of its own."""
    has_own_network = os.geteuid() == 0 and shutil.which("unshare") is not None
    command = [
        sys.executable,
        "-m",
        "benchmarks.network.idle",
        "measure",
        *(map(str, (SETTLE_QUICK_S, 15.0) if quick else (SETTLE_S, 120.0))),
    ]
    if has_own_network:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    found["own_network"] = has_own_network
    checks = [
        Check("idle-cpu", f"idle in a swarm of {NUM_NODES}: CPU of a core, per node", found["cpu_percent"], "%",
              MAX_CPU_PERCENT, "<="),
    ]  # fmt: skip
    if has_own_network:
        checks.append(Check("idle-bytes", "the same: bytes sent per node", found["Bps"], "B/s", MAX_BPS, "<="))
    return checks, found


async def _measure(settle_s: float, duration_s: float) -> dict[str, Any]:
    nodes: list[asyncio.subprocess.Process] = []
    try:
        first = await _start(None)
        nodes.append(first[0])
        for number in range(1, NUM_NODES):
            nodes.append((await _start(first[1], number))[0])
        await asyncio.sleep(settle_s)
        processes = [psutil.Process(node.pid) for node in nodes]
        cpu_before, bytes_before = [_cpu_s(process) for process in processes], _bytes_sent()
        began = time.perf_counter()
        await asyncio.sleep(duration_s)
        lasted_s = time.perf_counter() - began
        each = [
            100 * (_cpu_s(process) - before) / lasted_s for process, before in zip(processes, cpu_before, strict=True)
        ]
        return {
            "cpu_percent": sum(each) / len(each),
            "cpu_percent_each": [round(value, 2) for value in each],
            "Bps": (_bytes_sent() - bytes_before) / lasted_s / len(nodes),
            "rss_mib": round(sum(process.memory_info().rss for process in processes) / len(processes) / 2**20),
            "seconds": round(lasted_s, 1),
        }
    finally:
        for node in nodes:
            node.kill()
            await node.wait()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _bytes_sent() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


async def _start(peer: str | None, number: int = 0) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.network.idle", "node", str(number), *([peer] if peer else []),
        stdout=subprocess.PIPE, stdin=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


async def _node(number: int, peer: str | None) -> None:
    import structlog

    from fusion_node.daemon.surveyor import Surveyor
    from fusion_node.types import LayerRange, ModelId
    from p2p.bandwidth import BandwidthMeter
    from p2p.discovery import Discovery, DiscoveryConfig
    from p2p.identity import Identity
    from p2p.links import LinkPool
    from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_record
    from p2p.websocket import WebSocketNetwork

    # Standard output is for the address that the parent waits for.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    us, model_id = Identity.generate(), ModelId("ab" * 32)
    config = DiscoveryConfig(listen=("127.0.0.1:0",), bootstrap=(peer,) if peer else (), mdns=False, serve=True)
    discovery = Discovery(us, config)
    pool = LinkPool(WebSocketNetwork(us), us.peer_id, on_frame=lambda *_: None, on_closed=lambda *_: None)
    await discovery.start()
    data_address = await pool.listen("127.0.0.1:0")
    layers = LayerRange(10 * (number % 3), 10 * (number % 3) + 10)
    surveyor = Surveyor(
        us.peer_id,
        pool,
        BandwidthMeter(pool),
        discovery.table,
        model_id=model_id,
        own=lambda: layers,
        is_idle=lambda: False,
        is_needed=lambda peer: False,
    )
    surveying = asyncio.create_task(surveyor.run())
    print(discovery.addresses[0], flush=True)
    sequence = 0
    while not surveying.done():
        sequence, now = sequence + 1, time.time()
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=us.peer_id,
            sequence=int(now * 1000) + sequence,
            issued_at=now,
            expires_at=now + 60.0,
            data_addresses=(data_address,),
            libp2p_addresses=tuple(discovery.addresses),
            device="none",
            memory_free_bytes=0,
            shards=(ShardRecord(model_id, "idle", layers.start, layers.stop, 30, "fp32", (0.001, 0.001, 0.001), 4096),),
            num_sessions=0,
            software="benchmark",
            round_trips=surveyor.round_trips(),
            coordinate=surveyor.coordinate(),
        )
        await discovery.announce(sign_record(record, us), [model_id])
        await asyncio.sleep(20.0)


if __name__ == "__main__":
    if sys.argv[1] == "node":
        asyncio.run(_node(int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
    else:
        print(json.dumps(asyncio.run(_measure(*map(float, sys.argv[2:4])))))
