"""Attacks on a node over real sockets, with a bystander that must not notice; and the table of all attacks in the docs.

Attackers have addresses of their own, 127.0.0.2 and up, and the bystander is at 127.0.0.1. What is limited by host is
thus tried as on the Internet; bans are not, because nobody on this machine is banned by itself.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import select
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from fusion_node.errors import FusionError, PeerClosed, PeerTimeout, PeerUnreachable
from fusion_node.types import ModelId, PeerId
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.gate import PeerGate
from p2p.identity import Identity, public_key_of
from p2p.limits_core import LOCAL_FACTOR, Limits, Shares
from p2p.links import LinkPool
from p2p.messages import AnyMessage, StepResult, TensorMeta
from p2p.puzzle import PuzzleChecker, solve
from p2p.records import PROTOCOL_VERSION, NodeRecord, Refusal, ShardRecord, sign_record
from p2p.sealed import SealedLink
from p2p.seam import Link
from p2p.websocket import WebSocketNetwork, path_for, split_address

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
MODEL = ModelId("ab" * 32)


@dataclass
class Node:
    """A pool of links that listens on loopback, behind a gate."""

    identity: Identity = field(default_factory=Identity.generate)
    limits: Limits = field(default_factory=Limits)
    closed: dict[PeerId, FusionError] = field(default_factory=dict)
    address: str = ""

    def __post_init__(self) -> None:
        self.gate = PeerGate(limits=self.limits)
        self.network = WebSocketNetwork(self.identity, gate=self.gate)
        self.pool = LinkPool(
            self.network,
            self.identity.peer_id,
            on_frame=self._ignore,
            on_closed=self.closed.__setitem__,
            gate=self.gate,
        )

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def listen(self) -> None:
        self.address = await self.pool.listen("127.0.0.1:0")

    def _ignore(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None: ...


Start = Callable[[], Awaitable[Node]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_node() -> Node:
            node = Node()
            await node.listen()
            stack.push_async_callback(node.pool.aclose)
            return node

        yield start_node


@asynccontextmanager
async def unharmed(bystander: Node, node: Node) -> AsyncIterator[None]:
    """The bystander has a link with the node, gets answers on it all the time, and keeps it."""
    await bystander.pool.connect(node.peer, [node.address])
    over, num_answers = asyncio.Event(), 0

    async def keep_asking() -> None:
        nonlocal num_answers
        while not over.is_set():
            await bystander.pool.round_trip(node.peer)
            num_answers += 1
            await asyncio.sleep(0.02)  # which leaves the attackers the time that they need to be many

    asking = asyncio.create_task(keep_asking())
    try:
        yield
    finally:
        over.set()
        async with asyncio.timeout(PATIENCE_S):
            await asking  # raises when one was not answered in time, or the link was lost
    assert num_answers > 0
    assert not bystander.closed
    assert node.pool.is_connected(bystander.peer)


async def newcomer_is_served(start: Start, node: Node) -> None:
    newcomer = await start()
    await newcomer.pool.connect(node.peer, [node.address], timeout_s=PATIENCE_S)
    assert await newcomer.pool.round_trip(node.peer) > 0


def connect_from(host: str, address: str) -> socket.socket:
    """A connection whose other end sees ``host``."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, 0))
    made.settimeout(PATIENCE_S)
    made.connect(split_address(address))
    return made


def flood(hosts: list[str], address: str, *, count: int, at_once: int) -> None:
    """Opens so many connections, one after another, and keeps those that are not hung up on, the last ``at_once``."""
    held: deque[socket.socket] = deque()
    for number in range(count):
        with contextlib.suppress(OSError):  # hung up on before it was open
            held.append(connect_from(hosts[number % len(hosts)], address))
        if number % 64 == 0:
            # Not faster than the listener accepts: the kernel would let each wait a second then.
            gone, _, _ = select.select(held, [], [], 0.01)
            for each in gone:
                each.close()
                held.remove(each)
        while len(held) > at_once:
            held.popleft().close()
    for each in held:
        each.close()


async def test_ten_thousand_connections_from_few_hosts(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    node, bystander = await start(), await start()
    hosts = [f"127.0.0.{last}" for last in range(2, 6)]
    num_refused = 0
    async with unharmed(bystander, node):
        await asyncio.to_thread(flood, hosts, node.address, count=10_000, at_once=300)
        await newcomer_is_served(start, node)
        num_refused = sum(node.network.refused.values())
    # Each host may have its burst, and no more; the rest is hung up on before anything is made for it.
    assert num_refused >= 10_000 - len(hosts) * (Shares().connecting_per_host.burst + 300)
    assert node.limits.num_keys < 50
    assert not caplog.records  # a log that grows by a line for each would be another attack


@contextlib.contextmanager
def slow_strangers(address: str) -> Iterator[None]:
    """More strangers than a node bears at once, from three hosts, each stopping at another point of the handshake."""
    begin = f"GET {path_for(None)} HTTP/1.1\r\n".encode()
    upgrade = (
        begin + b"Host: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    masked_head = bytes([0x82, 0xFE, 0x03, 0xFF, 1, 2, 3, 4])  # of a message of 1,023 bytes, which does not follow
    words = [b"", begin[:3], begin, upgrade, upgrade + masked_head, upgrade + masked_head + bytes(100)]
    held = []
    for number in range(3 * LOCAL_FACTOR * Shares().handshakes_per_host):
        made = connect_from(f"127.0.0.{10 + number % 3}", address)
        with contextlib.suppress(OSError):
            made.sendall(words[number % len(words)])
        held.append(made)
    try:
        yield
    finally:
        for made in held:
            made.close()


async def test_slow_strangers_do_not_keep_newcomers_out(start: Start) -> None:
    node, bystander = await start(), await start()
    async with unharmed(bystander, node):
        strangers = slow_strangers(node.address)
        await asyncio.to_thread(strangers.__enter__)
        began = time.monotonic()
        try:
            for _ in range(5):
                await newcomer_is_served(start, node)
        finally:
            await asyncio.to_thread(strangers.__exit__, None, None, None)
    assert node.network.refused["displaced-handshake"] > 0
    assert time.monotonic() - began < PATIENCE_S


class DeafNetwork(WebSocketNetwork):
    """Its links can be made to take nothing more from the wire."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity)
        self.dialled: list[SealedLink] = []

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        link = await super().dial(address, expect=expect, timeout_s=timeout_s)
        assert isinstance(link, SealedLink)
        self.dialled.append(link)
        return link

    def stop_reading(self) -> None:
        for link in self.dialled:
            link._channel.pause_reading()


async def test_peer_that_never_reads_stalls_itself_only(start: Start) -> None:
    node, bystander = await start(), await start()
    deaf = Node()
    deaf.network = DeafNetwork(deaf.identity)
    deaf.pool = LinkPool(deaf.network, deaf.peer, on_frame=deaf._ignore, on_closed=deaf.closed.__setitem__)
    payload = bytes(4 * 1024 * 1024)
    message = StepResult(bytes(16), 0, 1, (1,), TensorMeta("f32", 1, len(payload) // 4), ())
    async with unharmed(bystander, node), asyncio.timeout(PATIENCE_S):
        await deaf.pool.connect(node.peer, [node.address])
        while not node.pool.is_connected(deaf.peer):  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0)
        deaf.network.stop_reading()
        # As much as it is owed: what it does not take is kept for it up to a limit, and then it is dropped.
        for _ in range(200):
            try:
                node.pool.send(deaf.peer, message, payload)
            except PeerUnreachable:
                break
            await asyncio.sleep(0)
        else:
            pytest.fail("800 MB were taken for a peer that reads nothing")
        while deaf.peer not in node.closed:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)
    assert isinstance(node.closed[deaf.peer], PeerTimeout | PeerClosed)
    await deaf.pool.aclose()


# Discovery.


def record_of(identity: Identity, puzzle: bytes = b"") -> bytes:
    now = time.time()
    shard = ShardRecord(MODEL, "test", 0, 4, 4, "fp32", (0.01, 0.01, 0.01), 100)
    record = NodeRecord(
        version=PROTOCOL_VERSION,
        peer=identity.peer_id,
        sequence=int(now * 1000),
        issued_at=now,
        expires_at=now + 60,
        data_addresses=("127.0.0.1:4700",),
        libp2p_addresses=(),
        device="cpu",
        memory_free_bytes=1 << 30,
        shards=(shard,),
        num_sessions=0,
        software="test",
        puzzle=puzzle,
    )
    return sign_record(record, identity)


async def test_identities_that_have_not_paid_fill_no_table() -> None:
    bits = 4
    async with AsyncExitStack() as stack:

        async def enter(*bootstrap: str, demands: bool = True) -> tuple[Discovery, Identity]:
            identity = Identity.generate()
            price = PuzzleChecker(bits if demands else 0, own=identity.peer_id)
            config = DiscoveryConfig(("127.0.0.1:0",), bootstrap, mdns=False, serve=True)
            discovery = Discovery(identity, config, price=price)
            await discovery.start()
            stack.push_async_callback(discovery.aclose)
            return discovery, identity

        node, _ = await enter()
        paid, paying = await enter(node.addresses[0])
        cheap, cheapskate = await enter(node.addresses[0], demands=False)
        solution = solve(public_key_of(paying.peer_id), bits, first=0)
        assert solution is not None
        await paid.wait_for_peer(PATIENCE_S)
        await cheap.wait_for_peer(PATIENCE_S)
        await paid.announce(record_of(paying, solution), [MODEL])
        await cheap.announce(record_of(cheapskate), [MODEL])
        async with asyncio.timeout(PATIENCE_S):
            while not (node.table.refused.get(Refusal.TOO_CHEAP) and await node.find(MODEL, timeout_s=1.0)):
                await cheap.announce(record_of(cheapskate), [MODEL])
        assert {record.peer for record in await node.find(MODEL, timeout_s=1.0)} == {paying.peer_id}


# What the docs promise.


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_attack_in_the_docs_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "protocol-network.md").read_text(encoding="utf-8")
    section = re.search(r"^## Attacks and answers$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = [
        row for row in section[1].splitlines() if row.startswith("| ") and not row.startswith(("| attack", "| ---"))
    ]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`((?:core|live|sim|scenarios|nat)/test_\w+\.py)::(\w+)`", row.split("|")[3])
        assert named, f"no test is named for: {row}"
        for path, test in named:
            assert test in names_in(f"tests/{path}"), f"{path} has no {test}"
