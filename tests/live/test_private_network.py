"""The control plane of a private swarm seen from outside: what comes back to those who do not have its key."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from fusion_node.errors import PeerUnreachable
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.bridge import Bridge
from p2p.control import Answer, ControlNode, HostConfig, HostHooks, RelayLimits
from p2p.identity import Identity
from p2p.libp2p_adapter import Libp2pRunner
from p2p.libp2p_adapter.dialing import DIAL_TIMEOUT_S
from p2p.libp2p_adapter.private_network import HELLO_BYTES
from p2p.seam import Link, PathKind
from p2p.swarm_key import SwarmKey
from tests.libp2p_hosts import LoopbackHost

pytestmark = pytest.mark.live

KEY = SwarmKey(bytes(range(32)))
ECHO = "/fusion/test-echo/1"
LIMIT_S = 20.0


class Host:
    """A libp2p host that echoes requests, and who has connected to it."""

    def __init__(self, key: SwarmKey | None) -> None:
        self.identity = Identity.generate()
        self.connected: list[PeerId] = []
        config = HostConfig(
            seed=self.identity.seed,
            listen=(("127.0.0.1", 0),),
            serve=False,
            protocols={ECHO: 100},
            swarm_key=key,
        )
        hooks = HostHooks(lambda key, value: 0, self._echo, self._note)
        self.bridge: Bridge[ControlNode] = Bridge(lambda: Libp2pRunner(config, hooks))

    async def port(self) -> int:
        return (await self.bridge.call(lambda node: node.listening()))[0][1]

    async def connect(self, to: Host, port: int) -> None:
        peer, address = to.identity.peer_id, PeerAddress.of("127.0.0.1", port, to.identity.peer_id)
        await self.bridge.call(lambda node: node.connect(peer, [address]))

    async def ask(self, whom: Host, request: bytes) -> bytes:
        peer = whom.identity.peer_id
        return await self.bridge.call(lambda node: node.request(peer, ECHO, request, limit_bytes=100))

    def _echo(self, protocol: str, peer: PeerId, request: bytes, answer: Answer) -> None:
        answer(request)

    def _note(self, peer: PeerId, is_connected: bool) -> None:
        if is_connected:
            self.connected.append(peer)


Start = Callable[[SwarmKey | None], Awaitable[Host]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_host(key: SwarmKey | None) -> Host:
            host = Host(key)
            await host.bridge.start()
            stack.push_async_callback(host.bridge.aclose)
            return host

        yield start_host


class Tap:
    """Stands in front of a port and keeps what went either way. The first ``num_single`` bytes each go alone."""

    def __init__(self, port: int, num_single: int = 0) -> None:
        self.sent, self.came_back = bytearray(), bytearray()
        self._port, self._num_single = port, num_single
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(
            self._pump(reader, their_writer, self.sent),
            self._pump(their_reader, writer, self.came_back),
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 if len(kept) < self._num_single else 65_536):
                kept += data
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()


async def test_members_connect_and_talk(start: Start) -> None:
    node, member = await start(KEY), await start(KEY)
    await member.connect(node, await node.port())
    assert await member.ask(node, b"hello") == b"hello"
    assert await node.ask(member, b"and back") == b"and back"


async def test_first_bytes_in_small_pieces_are_understood(start: Start) -> None:
    node, member = await start(KEY), await start(KEY)
    async with Tap(await node.port(), num_single=HELLO_BYTES) as port:
        await member.connect(node, port)
        assert await member.ask(node, b"hello") == b"hello"


async def test_nothing_on_the_wire_between_members_says_what_it_is(start: Start) -> None:
    node, member = await start(KEY), await start(KEY)
    tap = Tap(await node.port())
    async with tap as port:
        await member.connect(node, port)
        await member.ask(node, b"hello")
    for direction in (tap.sent, tap.came_back):
        assert len(direction) > 500
        assert not any(word in direction for word in (b"multistream", b"noise", b"yamux", b"fusion"))


@pytest.mark.parametrize("key", [None, SwarmKey(bytes(32))], ids=["no key", "another key"])
async def test_a_stranger_is_refused_at_once_and_gets_not_one_byte(start: Start, key: SwarmKey | None) -> None:
    node, stranger = await start(KEY), await start(key)
    tap = Tap(await node.port())
    loop = asyncio.get_running_loop()
    async with tap as port:
        began = loop.time()
        with pytest.raises(PeerUnreachable, match=r"hangs up: it belongs to (a private|another) swarm"):
            await stranger.connect(node, port)
        # It is hung up on: it need not wait for its own timeout.
        assert loop.time() - began < DIAL_TIMEOUT_S
    assert tap.sent
    assert tap.came_back == b""
    assert node.connected == []


async def test_a_member_that_dials_a_public_node_is_told(start: Start) -> None:
    node, member = await start(None), await start(KEY)
    with pytest.raises(PeerUnreachable, match="hangs up: it belongs to another swarm than this key's"):
        await member.connect(node, await node.port())
    assert node.connected == []


async def test_nobody_at_an_address_is_not_taken_for_another_swarm(start: Start) -> None:
    node, member = await start(KEY), await start(KEY)
    port = await node.port()
    await node.bridge.aclose()
    with pytest.raises(PeerUnreachable, match=r"none of its 1 addresses answers$"):
        await member.connect(node, port)


@pytest.mark.parametrize(
    "message",
    [b"\x13/multistream/1.0.0\n", b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" + bytes(HELLO_BYTES), bytes(HELLO_BYTES)],
    ids=["libp2p", "http", "zeros"],
)
async def test_a_raw_connection_is_closed_without_an_answer(start: Start, message: bytes) -> None:
    node = await start(KEY)
    reader, writer = await asyncio.open_connection("127.0.0.1", await node.port())
    writer.write(message)
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(LIMIT_S):
            answer = await reader.read()
    assert answer == b""
    writer.close()
    # And the host lives on.
    member = await start(KEY)
    await member.connect(node, await node.port())
    assert await member.ask(node, b"hello") == b"hello"


async def test_a_silent_connection_hears_nothing(start: Start) -> None:
    node, member = await start(KEY), await start(KEY)
    reader, writer = await asyncio.open_connection("127.0.0.1", await node.port())
    silent = asyncio.ensure_future(reader.read(1))
    # By the time that a whole conversation has gone by, a listener that speaks first would have spoken.
    await member.connect(node, await node.port())
    assert await member.ask(node, b"hello") == b"hello"
    assert not silent.done()
    silent.cancel()
    writer.close()


async def test_a_recorded_proof_opens_nothing(start: Start) -> None:
    node, member = await start(KEY), await start(KEY)
    tap = Tap(await node.port())
    async with tap as port:
        await member.connect(node, port)
        await member.ask(node, b"hello")
    reader, writer = await asyncio.open_connection("127.0.0.1", await node.port())
    writer.write(tap.sent)
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(LIMIT_S):
            answer = await reader.read()
        # Random to whoever has not the key, and other than what the first one got; Noise then ends it.
        assert answer[:HELLO_BYTES] != tap.came_back[:HELLO_BYTES]
        assert b"multistream" not in answer
    writer.close()
    assert node.connected == [member.identity.peer_id]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the stranger leaves its socket open
@pytest.mark.parametrize("psk", [None, KEY.secret.hex()], ids=["public", "raw key"])
def test_a_libp2p_host_of_somebody_elses_making_does_not_get_in(psk: str | None) -> None:
    """Also if it has the key itself: that one is used nowhere, only what is derived from it."""
    node = Host(KEY)

    async def dial(port: int) -> None:
        from libp2p import new_host
        from libp2p.peer.id import ID
        from multiaddr import Multiaddr

        options: dict[str, Any] = {} if psk is None else {"psk": psk}
        stranger = new_host(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")], **options)
        async with stranger.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
            address, their_id = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}"), ID.from_base58(node.identity.peer_id)
            with trio.move_on_after(LIMIT_S), contextlib.suppress(Exception):
                await stranger.get_network().dial_addr(address, their_id)
            assert not stranger.get_connected_peers()

    async def run() -> None:
        await node.bridge.start()
        try:
            port = await node.port()
            await asyncio.to_thread(trio.run, dial, port)
            assert node.connected == []
        finally:
            await node.bridge.aclose()

    asyncio.run(run())
    gc.collect()


async def test_members_reach_one_another_through_a_member_that_relays() -> None:
    """Both halves of a circuit run over private connections; the library alone would wrap one of its ends once more."""
    async with AsyncExitStack() as stack:

        async def start_member(*, listens: bool = False, relay: RelayLimits | None = None) -> LoopbackHost:
            host = LoopbackHost(listens=listens, relay=relay, swarm_key=KEY)
            stack.push_async_callback(host.aclose)
            return await host.start()

        met = asyncio.Event()

        async def on_link(link: Link) -> None:
            met.set()

        relay = await start_member(listens=True, relay=RelayLimits())
        hidden, user = await start_member(), await start_member()
        listener = await hidden.network.listen(f"/p2p/{hidden.peer}", on_link)
        stack.push_async_callback(listener.aclose)
        await hidden.call(lambda node: node.reserve(relay.address))
        address = PeerAddress.of(relay.address.host, relay.address.port, hidden.peer, via=relay.peer)
        link = await user.network.dial(str(address), expect=hidden.peer, timeout_s=LIMIT_S)
        assert (link.peer, link.path) == (hidden.peer, PathKind.RELAYED)
        async with asyncio.timeout(LIMIT_S):
            await met.wait()
        await link.aclose()
