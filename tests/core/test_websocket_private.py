"""The data plane of a private swarm seen from outside: what comes back to those who do not have its key."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fusion_node.errors import PeerUnreachable
from p2p.identity import Identity
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.seam import Link, Network
from p2p.swarm_key import SwarmKey
from p2p.websocket import PATH, WebSocketNetwork, path_for, split_address

PSK, OTHER_PSK = SwarmKey(bytes(range(32))).noise_psk, SwarmKey(bytes(32)).noise_psk
PATIENCE_S = 20.0


async def greet(link: Link) -> None:
    """A link is all that is tested: it ends when this returns."""


async def assert_serves(network: Network, address: str) -> None:
    link = await network.dial(address, expect=None, timeout_s=PATIENCE_S)
    await link.aclose()


async def answer_to(address: str, message: bytes) -> bytes:
    """What comes back until the connection ends."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(message)
    answer = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


async def test_members_have_a_link() -> None:
    listener = await WebSocketNetwork(Identity.generate(), psk=PSK).listen("127.0.0.1:0", greet)
    await assert_serves(WebSocketNetwork(Identity.generate(), psk=PSK), listener.address)
    await listener.aclose()


@pytest.mark.parametrize("psk", [None, OTHER_PSK], ids=["no key", "another key"])
async def test_a_dialer_from_elsewhere_is_told_what_may_be_wrong(psk: bytes | None) -> None:
    network = WebSocketNetwork(Identity.generate(), psk=PSK)
    listener = await network.listen("127.0.0.1:0", greet)
    with pytest.raises(PeerUnreachable, match=r"belongs to another \(private\) swarm"):
        await WebSocketNetwork(Identity.generate(), psk=psk).dial(listener.address, expect=None, timeout_s=PATIENCE_S)
    assert set(network.refused) == {"other-swarm"}  # aiohttp tries a second time
    await listener.aclose()


async def test_a_member_that_dials_a_public_node_is_told_so() -> None:
    listener = await WebSocketNetwork(Identity.generate()).listen("127.0.0.1:0", greet)
    with pytest.raises(PeerUnreachable, match="is not in the private swarm of this key"):
        await WebSocketNetwork(Identity.generate(), psk=PSK).dial(listener.address, expect=None, timeout_s=PATIENCE_S)
    await listener.aclose()


UPGRADE = (
    "GET {} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.mark.parametrize(
    "message",
    [
        UPGRADE.format(PATH).encode(),
        UPGRADE.format(path_for(OTHER_PSK)).encode(),
        UPGRADE.format(path_for(PSK)).replace("GET", "PUT").encode(),
        b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: somebody who looks around\r\n\r\n",
        b"no HTTP at all" * 10,
        bytes(200),
    ],
)
async def test_a_stranger_gets_not_one_byte(message: bytes) -> None:
    network = WebSocketNetwork(Identity.generate(), psk=PSK)
    listener = await network.listen("127.0.0.1:0", greet)
    assert await answer_to(listener.address, message) == b""
    assert network.refused == {"other-swarm": 1}
    await assert_serves(WebSocketNetwork(Identity.generate(), psk=PSK), listener.address)
    await listener.aclose()


async def test_a_short_first_line_is_not_judged_before_it_is_whole() -> None:
    """Or the moment at which the connection ends would tell how many characters of the path were right."""
    network = WebSocketNetwork(Identity.generate(), psk=PSK, handshake_timeout_s=0.05)
    listener = await network.listen("127.0.0.1:0", greet)
    right, wrong = f"GET {path_for(PSK)}".encode(), f"GET {path_for(OTHER_PSK)}".encode()
    for message in (right, wrong):
        assert await answer_to(listener.address, message) == b""
    assert network.refused == {"handshake-timeout": 2}
    await listener.aclose()


async def test_who_has_seen_the_path_gets_no_further_than_http() -> None:
    """The path goes over the line in the clear: the key in the handshake is what counts."""
    network = WebSocketNetwork(Identity.generate(), psk=PSK, handshake_timeout_s=0.1)
    listener = await network.listen("127.0.0.1:0", greet)
    answer = await answer_to(listener.address, UPGRADE.format(path_for(PSK)).encode())
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert answer.endswith(b"\r\n\r\n")
    await listener.aclose()


async def test_the_first_line_may_come_in_pieces() -> None:
    listener = await WebSocketNetwork(Identity.generate(), psk=PSK).listen("127.0.0.1:0", greet)
    reader, writer = await asyncio.open_connection(*split_address(listener.address))
    for piece in UPGRADE.format(path_for(PSK)).encode().partition(b"/1.1"):
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 101 ")
    writer.close()
    await writer.wait_closed()
    await listener.aclose()


@pytest.mark.parametrize(
    ("ours", "theirs", "complaint"),
    [
        (None, PSK, r"hung up during the handshake: it belongs to another \(private\) swarm"),
        (OTHER_PSK, PSK, r"hung up during the handshake: it belongs to another \(private\) swarm"),
        (PSK, None, "it is in the public swarm, and this program in a private one"),
    ],
    ids=["no key", "another key", "public"],
)
async def test_without_http_in_front_the_handshake_itself_refuses(
    ours: bytes | None, theirs: bytes | None, complaint: str
) -> None:
    world = MemoryWorld()
    network = MemoryNetwork(world, Identity.generate(), psk=theirs)
    listener = await network.listen("localhost:1", greet)
    with pytest.raises(PeerUnreachable, match=complaint):
        await MemoryNetwork(world, Identity.generate(), psk=ours).dial(
            listener.address, expect=None, timeout_s=PATIENCE_S
        )
    assert network.refused == {"other-swarm": 1}
    await listener.aclose()
