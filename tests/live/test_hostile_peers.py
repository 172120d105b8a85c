"""Peers that take more than their share of a libp2p host, and a bystander that must not notice."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import multiaddr
import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.utils.varint import encode_uvarint, read_varint_prefixed_bytes_limited

from fusion_node.errors import PeerError
from p2p.addresses import PeerAddress
from p2p.control import RelayLimits
from p2p.identity import Identity
from p2p.libp2p_adapter.circuits import HOP
from p2p.libp2p_adapter.connections import stream_on
from p2p.libp2p_adapter.hardening import KAD_PROTOCOL
from p2p.libp2p_adapter.messages import closing, read_exactly, translated
from p2p.libp2p_adapter.multiaddrs import MAX_ADDRESSES_PER_PEER
from p2p.libp2p_adapter.muxing import MAX_BUFFERED_BYTES, MAX_INCOMING_STREAMS, WINDOW_BYTES
from p2p.libp2p_adapter.relay import MAX_REQUESTS_PER_PEER
from tests.libp2p_hosts import LoopbackHost

IDENTIFY_PUSH = TProtocol("/ipfs/id/push/1.0.0")

TEST = TProtocol("/fusion/test/1")
PATIENCE_S = 20.0

Start = Callable[..., Awaitable[LoopbackHost]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_host(**options: Any) -> LoopbackHost:
            host = LoopbackHost(**options)
            stack.push_async_callback(host.aclose)
            return await host.start()

        yield start_host


async def connect(one: LoopbackHost, other: LoopbackHost) -> None:
    await one.call(lambda node: node.connect(other.peer, [other.address]))


def fat_record(node: Any, num_addresses: int) -> bytes:
    addresses = [
        multiaddr.Multiaddr(f"/ip4/9.9.{number >> 8}.{number & 255}/tcp/4600") for number in range(num_addresses)
    ]
    record = create_signed_peer_record(node._host.get_id(), addresses, node._host.get_private_key())
    return bytes(record.marshal_envelope())


async def ask_dht(node: Any, other: LoopbackHost, request: Message) -> Message:
    with translated(other.peer):
        stream = await node._host.new_stream(ID.from_base58(other.peer), [KAD_PROTOCOL])
        async with closing(stream):
            data = request.SerializeToString()
            await stream.write(encode_uvarint(len(data)) + data)
            answer = Message()
            answer.ParseFromString(await read_varint_prefixed_bytes_limited(stream, 1 << 20))
            return answer


async def known_addresses(node: Any, other: LoopbackHost) -> int:
    held = node._host.get_peerstore().peer_data_map.get(ID.from_base58(other.peer))
    return 0 if held is None else len(held.addrs)


async def test_who_brings_fat_records_makes_nobodys_answers_larger(start: Start) -> None:
    node, bystander = await start(serve=True), await start(serve=True)
    await connect(bystander, node)
    liars = [await start(serve=True) for _ in range(2)]
    for liar in liars:
        await connect(liar, node)

        async def lie(host: Any) -> None:
            find = Message(type=Message.MessageType.FIND_NODE, key=host._host.get_id().to_bytes())
            find.senderRecord = fat_record(host, 500)
            await ask_dht(host, node, find)
            announce = Message(type=Message.MessageType.ADD_PROVIDER, key=b"key")
            provider = announce.providerPeers.add(id=host._host.get_id().to_bytes(), signedRecord=fat_record(host, 500))
            provider.addrs.extend(multiaddr.Multiaddr(f"/ip4/9.9.9.9/tcp/{port}").to_bytes() for port in range(1, 500))
            await ask_dht(host, node, announce)

        await liar.call(lie)
        assert await node.call(lambda host, liar=liar: known_addresses(host, liar)) <= MAX_ADDRESSES_PER_PEER  # type: ignore[misc]

    async def ask(host: Any) -> Message:
        return await ask_dht(host, node, Message(type=Message.MessageType.GET_PROVIDERS, key=b"key"))

    answer = await bystander.call(ask)
    named = [*answer.providerPeers, *answer.closerPeers]
    assert {each.id for each in answer.providerPeers} == {ID.from_base58(liar.peer).to_bytes() for liar in liars}
    assert {each.id for each in answer.closerPeers} >= {each.id for each in answer.providerPeers}
    assert not any(each.HasField("signedRecord") for each in named)
    assert all(len(each.addrs) <= MAX_ADDRESSES_PER_PEER for each in named)


async def test_nobody_is_told_anew_who_somebody_is(start: Start) -> None:
    node, liar = await start(), await start()
    await connect(liar, node)

    async def push(host: Any) -> None:
        message = Identify(signedPeerRecord=fat_record(host, 500)).SerializeToString()
        with translated(node.peer):
            stream = await host._host.new_stream(ID.from_base58(node.peer), [IDENTIFY_PUSH])
            await stream.write(encode_uvarint(len(message)) + message)

    with pytest.raises(PeerError):
        await liar.call(push)
    assert await node.call(lambda host: known_addresses(host, liar)) <= MAX_ADDRESSES_PER_PEER


async def test_who_somebody_is_is_still_answered(start: Start) -> None:
    node, asker = await start(), await start()
    await connect(asker, node)

    async def ask(host: Any) -> list[str]:
        await host._host._identify_peer(ID.from_base58(node.peer), reason="a test")
        return [str(address) for address in host._host.get_peerstore().addrs(ID.from_base58(node.peer))]

    assert any(address.startswith(f"/ip4/127.0.0.1/tcp/{node.address.port}") for address in await asker.call(ask))


async def test_nothing_is_remembered_of_who_has_disconnected(start: Start) -> None:
    node, visitor = await start(), await start()
    await connect(visitor, node)

    async def end(host: Any) -> list[int]:
        network = host._host.get_network()
        for connection in network.get_connections():
            await network.notify_disconnected(connection)
        connector = network.auto_connector
        caches = (connector._recent_disconnects, connector._last_connect_attempt, connector._failure_counts)
        return [len(cache) for cache in caches]

    assert await node.call(end) == await visitor.call(end) == [0, 0, 0]


def connection_with(node: Any, other: LoopbackHost) -> Any:
    return node._host.get_network().get_connections(ID.from_base58(other.peer))[0]


async def open_many(node: Any, other: LoopbackHost, num_streams: int) -> list[Any]:
    """Streams on which nothing is said. Who means to do harm does not keep to the library's own limit."""
    muxed = connection_with(node, other).muxed_conn
    muxed.stream_backlog_semaphore = trio.Semaphore(num_streams)
    return [await muxed.open_stream() for _ in range(num_streams)]


async def say_hello(node: Any, other: LoopbackHost) -> bytes:
    with trio.fail_after(PATIENCE_S):
        stream = await stream_on(node._host, connection_with(node, other), TEST)
        async with closing(stream):
            await stream.write(b"hello")
            return await read_exactly(stream, 5)


async def serve_hello(node: Any) -> None:
    async def echo(stream: Any) -> None:
        with translated("a peer"):
            async with closing(stream):
                await stream.write(await read_exactly(stream, 5))

    node._host.set_stream_handler(TEST, echo)


async def test_who_opens_streams_without_end_gets_a_share_and_then_resets(start: Start) -> None:
    node, bystander, flooder = await start(), await start(), await start()
    await node.call(serve_hello)
    await connect(bystander, node)
    await connect(flooder, node)

    async def num_open(host: Any) -> int:
        connection = connection_with(host, flooder)
        return max(len(connection.muxed_conn.streams), len(connection.get_streams()))

    async def flood(host: Any) -> int:
        streams = await open_many(host, node, 4 * MAX_INCOMING_STREAMS)
        with trio.fail_after(PATIENCE_S):
            while sum(stream.closed for stream in streams) < 3 * MAX_INCOMING_STREAMS:  # noqa: ASYNC110
                await trio.sleep(0.01)
        return sum(not stream.closed for stream in streams)

    # As many as there are, less what the library has open with it itself.
    assert MAX_INCOMING_STREAMS - 4 <= await flooder.call(flood) <= MAX_INCOMING_STREAMS
    assert await node.call(num_open) <= MAX_INCOMING_STREAMS + 4
    assert await bystander.call(lambda host: say_hello(host, node)) == b"hello"

    async def until_they_end(host: Any) -> None:
        with trio.fail_after(PATIENCE_S):
            while await num_open(host):  # noqa: ASYNC110  # of the library, which sets no event here
                await trio.sleep(0.05)

    await node.call(until_they_end)
    assert await flooder.call(lambda host: say_hello(host, node)) == b"hello"


async def test_who_fills_many_streams_loses_the_connection(start: Start) -> None:
    node, bystander, flooder = await start(), await start(), await start()

    async def ignore(host: Any) -> None:
        async def sleep(stream: Any) -> None:
            await trio.sleep_forever()

        await serve_hello(host)
        host._host.set_stream_handler(TProtocol("/fusion/test/silent"), sleep)

    await node.call(ignore)
    await connect(bystander, node)
    await connect(flooder, node)

    async def flood(host: Any) -> int:
        connection, num_bytes = connection_with(host, node), 0
        with trio.fail_after(PATIENCE_S):
            while not connection.is_closed:
                try:
                    stream = await stream_on(host._host, connection, TProtocol("/fusion/test/silent"))
                    await stream.write(bytes(250_000))
                    num_bytes += 250_000
                except Exception:  # the connection has ended, which the library says in many ways
                    break
            await connection.event_closed.wait()
        return num_bytes

    assert 0 < await flooder.call(flood) < 2 * MAX_BUFFERED_BYTES
    assert await bystander.call(lambda host: say_hello(host, node)) == b"hello"


async def test_bulk_on_more_streams_than_have_the_largest_window_goes_through(start: Start) -> None:
    node, sender = await start(), await start()
    size, num_streams = 2 * WINDOW_BYTES, 10

    async def serve(host: Any) -> None:
        async def swallow(stream: Any) -> None:
            async with closing(stream):
                await read_exactly(stream, size)
                await stream.write(b"!")

        host._host.set_stream_handler(TEST, swallow)

    async def send(host: Any) -> int:
        answers: list[bytes] = []

        async def one() -> None:
            stream = await stream_on(host._host, connection_with(host, node), TEST)
            async with closing(stream):
                await stream.write(bytes(size))
                answers.append(await read_exactly(stream, 1))

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(num_streams):
                    nursery.start_soon(one)
        return len(answers)

    await node.call(serve)
    await connect(sender, node)
    assert await sender.call(send) == num_streams


async def test_silent_streams_of_one_peer_do_not_close_a_relay(start: Start) -> None:
    relay, bystander, flooder = await start(relay=RelayLimits()), await start(), await start()
    await connect(flooder, relay)

    async def keep_silent(host: Any) -> int:
        streams = []
        for _ in range(3 * MAX_REQUESTS_PER_PEER):
            with suppress(PeerError), translated(relay.peer):  # it may be reset as soon as it has said what it is
                streams.append(await stream_on(host._host, connection_with(host, relay), HOP))
        with trio.fail_after(PATIENCE_S):
            while (  # noqa: ASYNC110  # of the library, which sets no event here
                num := sum(not stream.muxed_stream.closed for stream in streams)
            ) > MAX_REQUESTS_PER_PEER:
                await trio.sleep(0.01)
        return num

    assert await flooder.call(keep_silent) == MAX_REQUESTS_PER_PEER
    assert await bystander.call(lambda host: host.reserve(relay.address)) > 0


async def test_socket_of_a_dial_that_is_given_up_in_the_handshake_is_closed(start: Start) -> None:
    """Not left to the garbage collector, whose warning of it fails whichever test runs then."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        while await reader.read(4096):
            pass
        ended.set()
        writer.close()

    accepted, ended = asyncio.Event(), asyncio.Event()
    us, somebody = await start(), Identity.generate().peer_id
    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with server, asyncio.timeout(PATIENCE_S):
        address = PeerAddress.of("127.0.0.1", server.sockets[0].getsockname()[1], somebody)
        dial = asyncio.create_task(us.call(lambda node: node.connect(somebody, [address])))
        await accepted.wait()
        dial.cancel()
        with suppress(asyncio.CancelledError):
            await dial
        await ended.wait()
    gc.collect()
