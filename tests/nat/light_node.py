"""The process of a light node: the network half of a node as the daemon builds it, told what to do over a socket.

Its server is the simplest that there is: whoever sends a status request gets an answer with the same number. That is
enough to see whether messages arrive, once and in order, whatever happens to the path between two nodes.

Started as ``python -m tests.nat.light_node FD`` it is the nursery of tests/nat/light_nodes.py: it imports everything,
and is forked for each node. Nothing that is imported here may start a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import p2p.libp2p_adapter  # noqa: F401  # the expensive import
from fusion_node.cli.logs import LogFormat, configure_logs
from fusion_node.errors import FusionError
from fusion_node.types import ModelId, PeerId, UnixS
from p2p.addresses import parse_listen
from p2p.bandwidth import BandwidthMeter
from p2p.control import RelayLimits
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.identity import Identity
from p2p.libp2p_network import Libp2pNetwork
from p2p.links import LinkPool
from p2p.messages import AnyMessage, BandwidthProbe, BandwidthReport, StatusReply, StatusRequest
from p2p.paths import RoutedNetwork
from p2p.reachability_verdict import Overall, Plane
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, dialled_at, sign_record
from p2p.relays import Relays
from p2p.seam import PathKind
from p2p.websocket import WebSocketNetwork, join_address
from tests.nat.internet import join_namespace

MODEL = ModelId("ab" * 32)
RECORD_TTL_S = 60.0
ANNOUNCE_INTERVAL_S = 20.0
ASK_EVERY_S = 0.05
PATIENCE_S = 30.0
"""For answers that may have to wait until a broken path is mended."""

DATA_PORT = 4701

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one node.

    Attributes:
        bootstrap: addresses to enter the swarm by.
        listen: control plane; the data plane takes the next port.
        serve: False for a user, who listens nowhere and announces nothing.
        relay: whether it carries the connections of others.
        upnp: whether it asks its router for the ports.
    """

    bootstrap: list[str] = field(default_factory=list)
    listen: str = "0.0.0.0:4700"
    serve: bool = True
    relay: bool = False
    upnp: bool = True
    ttl_s: float = RECORD_TTL_S
    announce_interval_s: float = ANNOUNCE_INTERVAL_S


class Node:
    """A node without a model."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.identity = Identity.generate()
        config = DiscoveryConfig(
            (options.listen,) if options.serve else (),
            tuple(options.bootstrap),
            mdns=False,
            serve=options.serve,
            upnp=options.upnp and options.serve,
        )
        self.discovery = Discovery(self.identity, config, relay=RelayLimits() if options.relay else None)
        self._websocket = WebSocketNetwork(self.identity)
        network = RoutedNetwork(self._websocket, Libp2pNetwork(self.identity, self.discovery))
        self.pool = LinkPool(network, self.identity.peer_id, on_frame=self._on_frame, on_closed=self._on_closed)
        self.bandwidth = BandwidthMeter(self.pool, is_busy=lambda: False)
        self.relays = Relays(self.identity.peer_id, self.discovery, records=self._live, on_change=self._announce_soon)
        self.discovery.extra_addresses.append(self.relays.circuit_addresses)
        self.discovery.on_path.append(self._path_changed)
        self.discovery.reachability.on_change.append(self._reachability_changed)
        self.lost: list[tuple[float, str, str]] = []
        self._sequence = int(time.time() * 1000)
        self._answered: dict[int, float] = {}
        self._num_asked = self._num_lost = 0
        self._began = 0.0
        self._conversing: asyncio.Task[None] | None = None
        self._new_answer = asyncio.Event()
        self._wish_to_announce = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, Any]:
        await self.discovery.start()
        if self.options.serve:
            host, port = parse_listen(self.options.listen)
            reachability = self.discovery.reachability
            self._websocket.on_nonce = lambda nonce, at: reachability.reached(Plane.DATA, nonce, at)
            bound = await self.pool.listen(join_address(host, port + 1 if port else 0))
            reachability.bound(Plane.DATA, [(host, int(bound.rpartition(":")[2]))])
            await self.pool.listen(f"/p2p/{self.identity.peer_id}")
            self._announcing = asyncio.create_task(self._announce())
        return {"peer": self.identity.peer_id, "addresses": self.discovery.addresses}

    def _reachability_changed(self) -> None:
        if self.options.serve:
            self.relays.want(self.discovery.reachability.verdict().overall is Overall.BEHIND_NAT)
            self._announce_soon()

    def _path_changed(self, peer: PeerId, path: PathKind) -> None:
        self.pool.reconsider(peer, (f"/p2p/{peer}",))

    def _announce_soon(self) -> None:
        self._wish_to_announce.set()

    async def _announce(self) -> None:
        while True:
            self._wish_to_announce.clear()
            await self.discovery.announce(self.record(), [MODEL])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.announce_interval_s):
                    await self._wish_to_announce.wait()

    def record(self) -> bytes:
        self._sequence += 1
        now = time.time()
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=self.identity.peer_id,
            sequence=self._sequence,
            issued_at=now,
            expires_at=now + self.options.ttl_s,
            data_addresses=self.data_addresses[:8],
            libp2p_addresses=tuple(self.discovery.announced_addresses[:8]),
            device="none",
            memory_free_bytes=0,
            shards=(ShardRecord(MODEL, "none", 0, 1, 1, "fp32", (0.001, 0.001, 0.001), 4096),),
            num_sessions=0,
            software="light node",
            is_relay=self.options.relay,
        )
        return sign_record(record, self.identity)

    @property
    def data_addresses(self) -> tuple[str, ...]:
        announced = self.discovery.reachability.announced(Plane.DATA)
        return tuple(join_address(host, port) for host, port in announced)

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        match message:
            case StatusRequest():
                self.pool.send(peer, StatusReply(message.request, b"", {}))
            case BandwidthProbe() | BandwidthReport():
                self.bandwidth.receive(peer, message, len(payload))
            case StatusReply():
                self._answered[message.request] = time.monotonic()
                self._new_answer.set()

    def _on_closed(self, peer: PeerId, error: FusionError) -> None:
        self.lost.append((time.monotonic(), peer, f"{type(error).__name__}: {error}"))
        self._new_answer.set()

    # what a test can ask

    async def do_status(self) -> dict[str, Any]:
        return {
            "addresses": self.discovery.addresses,
            "data_addresses": list(self.data_addresses),
            "links": self._links(),
            "relays": self.relays.held,
            "overall": self.discovery.reachability.verdict().overall,
            "nat": self.discovery.reachability.verdict().nat,
            "lost": self.lost,
        }

    async def do_known(self) -> list[str]:
        return [record.peer for record in self._live()]

    async def do_record(self, peer: str) -> dict[str, Any] | None:
        """What it knows of another one; a user asks the swarm first, since nobody tells users anything unasked."""
        if not self.options.serve:
            await self.discovery.find(MODEL, timeout_s=5.0)
        record = self._record_of(peer)
        return None if record is None else {
            "data": list(record.data_addresses), "libp2p": list(record.libp2p_addresses),
        }  # fmt: skip

    async def do_find(self) -> list[str]:
        return [record.peer for record in await self.discovery.find(MODEL, timeout_s=10.0)]

    async def do_connect(self, peer: str, timeout_s: float = 15.0) -> None:
        record = self._record_of(peer)
        addresses = () if record is None else dialled_at(record)
        await self.pool.connect(PeerId(peer), addresses, timeout_s=timeout_s)

    async def do_round_trip(self, peer: str, count: int = 1) -> float:
        """The median of so many."""
        taken = sorted([await self.pool.round_trip(PeerId(peer)) for _ in range(count)])
        return taken[len(taken) // 2]

    async def do_converse(self, peer: str, seconds: float) -> dict[str, Any]:
        """Sends numbered requests for so long. Returns as do_end_conversation."""
        await self.do_keep_conversing(peer)
        await asyncio.sleep(seconds)
        return await self.do_end_conversation()

    async def do_keep_conversing(self, peer: str) -> None:
        """Sends numbered requests until do_end_conversation; returns when one has been answered."""
        self._answered.clear()
        self._num_asked, self._num_lost, self._began = 0, len(self.lost), time.monotonic()
        self._conversing = asyncio.create_task(self._ask_on(PeerId(peer)))
        await self._until_answered(1)

    async def do_end_conversation(self) -> dict[str, Any]:
        """Sends nothing more, and waits for the answers to all requests, or until the connection is lost.

        Returns: how many were sent and answered, whether in order, the longest time between two answers, and why the
            connection was lost, if it was.
        """
        assert self._conversing is not None
        self._conversing.cancel()
        await self._until_answered(self._num_asked)
        numbers, times = list(self._answered), [self._began, *self._answered.values()]
        return {
            "sent": self._num_asked,
            "answered": len(numbers),
            "in_order": numbers == sorted(numbers),
            "longest_gap_s": max((late - early for early, late in itertools.pairwise(times)), default=0.0),
            "lost": [why for _, _, why in self.lost[self._num_lost :]],
        }

    async def _ask_on(self, peer: PeerId) -> None:
        while len(self.lost) == self._num_lost:
            self.pool.send(peer, StatusRequest(self._num_asked))
            self._num_asked += 1
            await asyncio.sleep(ASK_EVERY_S)

    async def _until_answered(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self._answered) < count and len(self.lost) == self._num_lost:
                self._new_answer.clear()
                await self._new_answer.wait()

    def _links(self) -> list[dict[str, Any]]:
        return [
            {
                "peer": link.peer,
                "path": link.path.value,
                "remote_address": link.remote_address,
                "num_resumed": link.num_resumed,
            }
            for link in self.pool.links()
        ]

    def _live(self) -> list[NodeRecord]:
        return list(self.discovery.table.live(now=UnixS(time.time())))

    def _record_of(self, peer: str) -> NodeRecord | None:
        return next((record for record in self._live() if record.peer == peer), None)


async def serve_orders(options: Options, orders: socket.socket) -> None:
    """Starts a node, tells of it, and does what it is told, one thing at a time, until the other side hangs up."""
    reader, writer = await asyncio.open_unix_connection(sock=orders)
    node = Node(options)
    await _answer(writer, node.start)
    while line := await reader.readline():
        order = json.loads(line)
        work: Callable[..., Awaitable[Any]] = getattr(node, f"do_{order.pop('do')}")
        await _answer(writer, lambda work=work, order=order: work(**order))  # type: ignore[misc]


async def _answer(writer: asyncio.StreamWriter, work: Callable[[], Awaitable[Any]]) -> None:
    try:
        answer: dict[str, Any] = {"result": await work()}
    except (FusionError, TimeoutError) as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()


def _nurse(requests: socket.socket) -> None:
    """Forks a node per request, for as long as the test run lives."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for nodes
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    requests.send(b"ready")
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 16, 2)
        if not request:
            return
        pid = os.fork()
        if not pid:
            requests.close()
            _be_node(json.loads(request), *files)
        for descriptor in files:
            os.close(descriptor)
        requests.send(str(pid).encode())


def _be_node(request: dict[str, Any], orders: int, log: int) -> None:
    """In the child; does not return."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["namespace"]:
            join_namespace(request["namespace"])
        configure_logs(LogFormat.JSON, verbose=True)
        asyncio.run(serve_orders(Options(**request["options"]), socket.socket(fileno=orders)))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _nurse(socket.socket(fileno=int(sys.argv[1])))
