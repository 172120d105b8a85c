"""What only a real socket shows: strangers, slow strangers, and other protocols on our port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from fusion_node.errors import ConfigError, FusionError, PeerUnreachable, RemoteProtocolError
from p2p.conformance import End
from p2p.dial_back import deliver_to_data_plane
from p2p.identity import Identity
from p2p.noise_core import MAX_SEGMENT_BYTES
from p2p.reachability_verdict import Outcome
from p2p.seam import Link, Listener
from p2p.websocket import NONCE_HEADER, PATH, WebSocketNetwork, join_address, path_for, split_address

PATIENCE_S = 20.0


async def echo(link: Link) -> None:
    end = End(link)
    with contextlib.suppress(FusionError):
        while True:
            await end.send(await end.receive())


@asynccontextmanager
async def listening(network: WebSocketNetwork) -> AsyncIterator[Listener]:
    listener = await network.listen("127.0.0.1:0", echo)
    try:
        yield listener
    finally:
        await listener.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a counter of the code under test
            await asyncio.sleep(0.005)


async def still_serves(address: str) -> None:
    link = await WebSocketNetwork(Identity.generate()).dial(address, expect=None, timeout_s=PATIENCE_S)
    end = End(link)
    end.link.write(b"hello")
    assert await end.receive() == b"hello"
    await link.aclose()


async def hung_up(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_stranger_who_says_nothing_is_hung_up_on_in_time() -> None:
    network = WebSocketNetwork(Identity.generate(), handshake_timeout_s=0.5)
    async with listening(network) as listener:
        reader, writer = await asyncio.open_connection(*split_address(listener.address))
        assert await hung_up(reader) == b""
        writer.close()
        assert network.refused == {"handshake-timeout": 1}
        await still_serves(listener.address)


async def test_error_of_a_dial_is_not_its_own_cause() -> None:
    stranger = Identity.generate().peer_id
    async with listening(WebSocketNetwork(Identity.generate())) as listener:
        with pytest.raises(RemoteProtocolError) as caught:
            await WebSocketNetwork(Identity.generate()).dial(listener.address, expect=stranger, timeout_s=PATIENCE_S)
    assert caught.value.__cause__ is not caught.value


@pytest.mark.parametrize("first", [b"", b"hello", b"GET /fusion HTTP/1.1\r\nHost: x\r\n"])
async def test_stranger_who_stops_half_way_is_hung_up_on_in_time(first: bytes) -> None:
    network = WebSocketNetwork(Identity.generate(), handshake_timeout_s=0.5)
    async with listening(network) as listener:
        reader, writer = await asyncio.open_connection(*split_address(listener.address))
        writer.write(first)
        await hung_up(reader)
        writer.close()
        await still_serves(listener.address)


async def test_stranger_who_upgrades_and_then_says_nothing_is_hung_up_on_in_time() -> None:
    network = WebSocketNetwork(Identity.generate(), handshake_timeout_s=0.5)
    async with (
        listening(network) as listener,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://{listener.address}{PATH}") as ws,
    ):
        async with asyncio.timeout(PATIENCE_S):
            assert (await ws.receive()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE)
        assert network.refused["handshake-timeout"] == 1


async def test_strangers_beyond_the_limit_are_refused_and_make_room_when_they_leave() -> None:
    network = WebSocketNetwork(Identity.generate(), max_unauthenticated=3)
    async with listening(network) as listener:
        strangers = [await asyncio.open_connection(*split_address(listener.address)) for _ in range(3)]
        reader, writer = await asyncio.open_connection(*split_address(listener.address))
        assert await hung_up(reader) == b""
        writer.close()
        assert network.refused == {"too-many-handshakes": 1}
        with pytest.raises(PeerUnreachable):
            await still_serves(listener.address)
        for _, stranger in strangers:
            stranger.close()
            await stranger.wait_closed()
        await until(lambda: not listener._unauthenticated)  # type: ignore[attr-defined]
        await still_serves(listener.address)


async def test_authenticated_links_do_not_count_as_strangers() -> None:
    network = WebSocketNetwork(Identity.generate(), max_unauthenticated=1)
    async with listening(network) as listener:
        links = []
        for _ in range(4):
            link = await WebSocketNetwork(Identity.generate()).dial(listener.address, expect=None, timeout_s=PATIENCE_S)
            end = End(link)
            link.write(b"hello")
            await end.receive()  # only now the listener is known to have finished the handshake
            links.append(link)
        for link in links:
            await link.aclose()


@pytest.mark.parametrize("psk", [None, bytes(32)])
async def test_nonce_is_taken_and_costs_no_link(psk: bytes | None) -> None:
    network = WebSocketNetwork(Identity.generate(), psk=psk, max_unauthenticated=1)
    taken: list[tuple[bytes, str]] = []
    network.on_nonce = lambda nonce, local_host: taken.append((nonce, local_host))
    async with listening(network) as listener:
        for number in range(3):
            host, port = split_address(listener.address)
            outcome = await deliver_to_data_plane(host, port, bytes([number] * 16), path=path_for(psk))
            assert outcome is Outcome.DELIVERED
            await until(lambda: not listener._unauthenticated)  # type: ignore[attr-defined]
        assert taken == [(bytes([number] * 16), "127.0.0.1") for number in range(3)]
        assert network.refused == {}


async def test_nonce_of_a_stranger_to_a_private_swarm_is_not_taken() -> None:
    network = WebSocketNetwork(Identity.generate(), psk=bytes(32))
    network.on_nonce = lambda nonce, local_host: pytest.fail("taken")
    async with listening(network) as listener:
        host, port = split_address(listener.address)
        assert await deliver_to_data_plane(host, port, bytes(16), path=PATH) is Outcome.BROKEN


@pytest.mark.parametrize("text", ["", "00", "zz" * 16, "00" * 17])
async def test_nonce_of_another_form_is_not_taken(text: str) -> None:
    network = WebSocketNetwork(Identity.generate())
    network.on_nonce = lambda nonce, local_host: pytest.fail("taken")
    async with (
        listening(network) as listener,
        aiohttp.ClientSession() as session,
        session.get(f"http://{listener.address}{PATH}", headers={NONCE_HEADER: text}) as answer,
    ):
        assert answer.status == 404


async def test_nonce_for_a_port_at_which_nobody_listens_is_told_apart_from_one_that_is_not_taken() -> None:
    async with listening(WebSocketNetwork(Identity.generate())) as listener:
        host, port = split_address(listener.address)
        assert await deliver_to_data_plane(host, port, bytes(16), path="/other") is Outcome.BROKEN
    assert await deliver_to_data_plane(host, port, bytes(16), path=PATH) is Outcome.UNREACHABLE


async def test_web_browser_gets_a_page_that_says_what_this_port_is() -> None:
    network = WebSocketNetwork(Identity.generate())
    async with listening(network) as listener, aiohttp.ClientSession() as session:
        for path in ("/", PATH):
            async with session.get(f"http://{listener.address}{path}") as answer:
                assert answer.status == 404
                assert "data plane" in await answer.text()
    assert network.refused == {"malformed": 2}


@pytest.mark.parametrize("oversized", [MAX_SEGMENT_BYTES + 1, 1 << 20])
async def test_oversized_message_ends_the_connection(oversized: int) -> None:
    network = WebSocketNetwork(Identity.generate())
    async with listening(network) as listener:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://{listener.address}{PATH}") as ws,
        ):
            await ws.send_bytes(bytes(oversized))
            async with asyncio.timeout(PATIENCE_S):
                assert (await ws.receive()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE)
        assert network.refused == {"malformed": 1}
        await still_serves(listener.address)


async def test_text_and_nonsense_end_the_connection() -> None:
    network = WebSocketNetwork(Identity.generate())
    async with listening(network) as listener, aiohttp.ClientSession() as session:
        for number, nonsense in enumerate(("text", b"", b"x", bytes(2000)), 1):
            async with session.ws_connect(f"http://{listener.address}{PATH}") as ws:
                await (ws.send_str(nonsense) if isinstance(nonsense, str) else ws.send_bytes(nonsense))
                async with asyncio.timeout(PATIENCE_S):
                    assert (await ws.receive()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE)
            await until(lambda expected=number: sum(network.refused.values()) == expected)
        await still_serves(listener.address)


async def test_dial_to_a_web_server_is_a_protocol_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(RemoteProtocolError, match="HTTP status 200"):
        await WebSocketNetwork(Identity.generate()).dial(f"127.0.0.1:{port}", expect=None, timeout_s=PATIENCE_S)
    server.close()


async def test_dial_to_a_socket_that_never_answers_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody reads
        address = join_address(*server.getsockname())
        with pytest.raises(PeerUnreachable, match="did not answer within"):
            await WebSocketNetwork(Identity.generate()).dial(address, expect=None, timeout_s=0.1)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("node.example:65535", ("node.example", 65535)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_address_is_read_and_written(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize("address", ["", ":1", "host", "host:", "host:-1", "host:65536", "host:1x", "host:²"])
def test_other_text_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address)
