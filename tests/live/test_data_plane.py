"""The data plane between real processes: one that freezes, and one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fusion_node.errors import FusionError, PeerClosed, PeerTimeout
from fusion_node.types import PeerId
from p2p.heartbeat_core import DEAD_AFTER_S
from p2p.identity import Identity
from p2p.links import RESUME_S, LinkPool
from p2p.messages import StepResult, TensorMeta
from p2p.websocket import WebSocketNetwork

pytestmark = pytest.mark.live

ECHO = """
import asyncio
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.websocket import WebSocketNetwork

async def main():
    us = Identity.generate()
    pool = LinkPool(WebSocketNetwork(us), us.peer_id,
                    on_frame=lambda peer, message, payload: pool.send(peer, message, payload),
                    on_closed=lambda peer, error: None)
    print(await pool.listen("127.0.0.1:0"), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.communicate()


async def test_frozen_process_is_noticed_within_twelve_seconds_also_while_it_is_sent_to(
    other_process: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = other_process
    lost: asyncio.Future[tuple[PeerId, FusionError]] = asyncio.get_running_loop().create_future()
    echoed = asyncio.Event()
    us = Identity.generate()
    pool = LinkPool(
        WebSocketNetwork(us),
        us.peer_id,
        on_frame=lambda peer, message, payload: echoed.set(),
        on_closed=lambda peer, error: lost.set_result((peer, error)),
    )
    peer = await pool.identify(address)
    payload = bytes(1 << 20)
    message = StepResult(bytes(16), 0, 0, (1,), TensorMeta("f32", 1, len(payload) // 4), ())
    pool.send(peer, message, payload)
    async with asyncio.timeout(20):
        await echoed.wait()
    assert await pool.round_trip(peer) < 1.0

    os.kill(process.pid, signal.SIGSTOP)
    frozen = time.monotonic()
    try:
        for _ in range(4):  # more than the kernel buffers: the queue here fills
            pool.send(peer, message, payload)
        async with asyncio.timeout(20):
            lost_peer, error = await lost
        noticed_s = time.monotonic() - frozen
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert lost_peer == peer
    assert isinstance(error, PeerTimeout)
    assert DEAD_AFTER_S + RESUME_S - 0.5 <= noticed_s <= 12.0
    assert not pool.is_connected(peer)
    await pool.aclose()


async def test_killed_process_is_noticed_at_once(other_process: tuple[subprocess.Popen[str], str]) -> None:
    process, address = other_process
    lost: asyncio.Future[tuple[PeerId, FusionError]] = asyncio.get_running_loop().create_future()
    us = Identity.generate()
    pool = LinkPool(
        WebSocketNetwork(us),
        us.peer_id,
        on_frame=lambda peer, message, payload: None,
        on_closed=lambda peer, error: lost.set_result((peer, error)),
    )
    peer = await pool.identify(address)
    killed = time.monotonic()
    process.kill()
    async with asyncio.timeout(20):
        lost_peer, error = await lost
    assert time.monotonic() - killed < 2.0
    assert lost_peer == peer
    assert isinstance(error, PeerClosed)
    await pool.aclose()
