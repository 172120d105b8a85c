"""Look-ups over real libp2p hosts, some of which answer with inventions and nonsense."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.bridge import Bridge
from p2p.control import ControlNode, HostConfig, HostHooks
from p2p.identity import Identity, peer_id_of
from p2p.libp2p_adapter import Libp2pRunner

PATIENCE_S = 40.0

VALUE = b"7 the value"


def sequence_of(key: str, value: bytes) -> int:
    """The number in front, if the value is one of this test."""
    number, _, text = value.partition(b" ")
    if text != b"the value":
        raise ValueError("not a value of this test")
    return int(number)


@dataclass(eq=False)
class Host:
    identity: Identity = field(default_factory=Identity.generate)
    addresses: list[PeerAddress] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = HostConfig(seed=self.identity.seed, listen=(("127.0.0.1", 0),), serve=True, protocols={})
        hooks = HostHooks(sequence_of, lambda *_: None, lambda *_: None)
        self.bridge: Bridge[ControlNode] = Bridge(lambda: Libp2pRunner(config, hooks))

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def start(self, others: Sequence[Host]) -> None:
        await self.bridge.start()
        self.addresses = [
            PeerAddress.of(host, port, self.peer)
            for host, port in await self.bridge.call(lambda node: node.listening())
        ]
        for other in others:
            await self.bridge.call(partial(join, other=other))

    async def lie(self, answer: Callable[[], bytes]) -> None:
        """From now on it answers every query with what this makes."""
        await self.bridge.call(partial(replace_answers, answer=answer))


async def join(node: ControlNode, other: Host) -> None:
    await node.connect(other.peer, other.addresses)
    await node.join_dht(other.peer)


async def replace_answers(node: Any, answer: Callable[[], bytes]) -> None:
    async def handle_stream(stream: Any) -> None:
        await stream.read(4096)
        await stream.write(answer())
        await stream.close()

    node._dht._dht.handle_stream = handle_stream


def framed(message: bytes) -> bytes:
    """With its length in front, as a varint."""
    length, head = len(message), bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length]) + message


def invented() -> bytes:
    """Twenty neighbours with identities and addresses that do not exist, and one address that is none."""
    import base58
    import multiaddr
    from libp2p.kad_dht.pb.kademlia_pb2 import Message

    answer = Message(type=Message.MessageType.GET_VALUE)
    answer.record.value = b"999 a lie"
    for port in range(1, 21):
        named = answer.closerPeers.add()
        named.id = base58.b58decode(peer_id_of(secrets.token_bytes(32)))
        named.addrs.append(multiaddr.Multiaddr(f"/ip4/127.0.0.1/tcp/{port}").to_bytes())
        named.addrs.append(b"\xff\x00nonsense")
    return framed(answer.SerializeToString())


def oversized_names() -> bytes:
    from libp2p.kad_dht.pb.kademlia_pb2 import Message

    answer = Message(type=Message.MessageType.GET_VALUE)
    answer.closerPeers.add().id = bytes(100_000)
    answer.closerPeers.add().id = b""
    return framed(answer.SerializeToString())


def nonsense() -> bytes:
    return framed(secrets.token_bytes(300))


def endless() -> bytes:
    return b"\xff\xff\xff\xff\x0f" + bytes(1000)


Start = Callable[[int], Awaitable[list[Host]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_hosts(count: int) -> list[Host]:
            hosts: list[Host] = []
            for _ in range(count):
                host = Host()
                stack.push_async_callback(host.bridge.aclose)
                await host.start(hosts)
                hosts.append(host)
            return hosts

        yield start_hosts


async def test_value_is_found_although_others_answer_with_inventions_and_nonsense(start: Start) -> None:
    hosts = await start(8)
    owner, reader, *others = hosts
    await owner.bridge.call(lambda node: node.put_value("/fusion/key", VALUE))
    for liar, answer in zip(others[:4], (invented, oversized_names, nonsense, endless), strict=True):
        await liar.lie(answer)
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.bridge.call(lambda node: node.get_value("/fusion/key")) == VALUE
        await owner.bridge.call(lambda node: node.put_value("/fusion/key", b"8 the value"))
        assert await reader.bridge.call(lambda node: node.get_value("/fusion/key")) == b"8 the value"
    print(f"two look-ups and a put among four liars of eight: {time.monotonic() - began:.1f} s")


async def test_providers_are_found_although_others_invent_them(start: Start) -> None:
    owner, reader, *others = await start(6)
    key = bytes([0x12, 0x20]) + bytes(32)

    def invented_providers() -> bytes:
        import base58
        import multiaddr
        from libp2p.kad_dht.pb.kademlia_pb2 import Message

        answer = Message(type=Message.MessageType.GET_PROVIDERS)
        for _ in range(1000):
            named = answer.providerPeers.add()
            named.id = base58.b58decode(peer_id_of(secrets.token_bytes(32)))
            named.addrs.append(multiaddr.Multiaddr("/ip4/192.0.2.1/tcp/9").to_bytes())
        return framed(answer.SerializeToString())

    await owner.bridge.call(lambda node: node.provide(key))
    for liar in others[:2]:
        await liar.lie(invented_providers)
    async with asyncio.timeout(PATIENCE_S):
        found = await reader.bridge.call(lambda node: node.find_providers(key))
    assert owner.peer in {each.peer for each in found[:8]}
    assert len(found) <= 256
