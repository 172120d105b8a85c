"""Discovery over real sockets on loopback: several libp2p hosts, each with its own thread, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusion_node.errors import AddressInUse, ConfigError, NoPeers, PeerError
from fusion_node.types import ModelId, PeerId, UnixS
from fusion_node.wire import WireError
from p2p.addresses import dialable_hosts, is_loopback
from p2p.control import ControlNode, ControlPlaneDown
from p2p.discovery import Discovery, DiscoveryConfig, RequestProtocol, provider_key, record_key
from p2p.identity import Identity, short
from p2p.libp2p_adapter.node import Libp2pNode
from p2p.libp2p_adapter.requests import MAX_REQUESTS_AT_ONCE, REQUEST_TIMEOUT_S
from p2p.peer_book import path_of
from p2p.record_exchange import MAX_ANSWER_BYTES, PROTOCOL_ID, ExchangeRequest
from p2p.records import PROTOCOL_VERSION, NodeRecord, Refusal, ShardRecord, sign_record
from p2p.swarm_key import SwarmKey

pytestmark = pytest.mark.live

MODEL = ModelId("ab" * 32)
PULL = msgspec.msgpack.encode(ExchangeRequest(2, (), None, 256))
LIMIT_S = 20.0
"""Generous: the machine may be busy. Nothing waits this long when all is well."""


class Peer:
    """A discovery with its identity, and what a daemon would do with it."""

    def __init__(self, discovery: Discovery, identity: Identity) -> None:
        self.discovery = discovery
        self.identity = identity
        self.sequence = 0

    @property
    def id(self) -> PeerId:
        return self.identity.peer_id

    def record(
        self,
        *,
        shards: bool = True,
        issued_at: float | None = None,
        ttl_s: float = 60.0,
        signer: Identity | None = None,
    ) -> bytes:
        self.sequence += 1
        issued_at = time.time() if issued_at is None else issued_at
        shard = ShardRecord(MODEL, "tiny", 0, 10, 30, "f16r32", (0.001, 0.001, 0.001), 4096)
        record = NodeRecord(
            version=PROTOCOL_VERSION,
            peer=self.id,
            sequence=self.sequence,
            issued_at=issued_at,
            expires_at=issued_at + ttl_s,
            data_addresses=("127.0.0.1:4700",),
            libp2p_addresses=tuple(self.discovery.addresses),
            device="cpu",
            memory_free_bytes=1 << 30,
            shards=(shard,) if shards else (),
            num_sessions=0,
            software="test",
        )
        return sign_record(record, signer or self.identity)

    async def announce(self) -> None:
        await self.discovery.announce(self.record(), [MODEL])

    async def found(self, model_id: ModelId | None = MODEL) -> set[str]:
        return {record.peer for record in await self.discovery.find(model_id, timeout_s=5.0)}


Start = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_peer(
            *bootstrap: str,
            serve: bool = True,
            announced: bool | None = None,
            kind: type[Discovery] = Discovery,
            gossip: bool = False,
            **options: Any,
        ) -> Peer:
            identity = Identity.generate()
            listen = ("127.0.0.1:0",) if serve else ()
            config = DiscoveryConfig(listen, bootstrap, mdns=False, serve=serve, gossip=gossip)
            discovery = kind(identity, config, **options)
            await discovery.start()
            stack.push_async_callback(discovery.aclose)
            peer = Peer(discovery, identity)
            if serve if announced is None else announced:
                await peer.announce()
            return peer

        yield start_peer


@asynccontextmanager
async def _within(limit_s: float = LIMIT_S) -> AsyncIterator[None]:
    async with asyncio.timeout(limit_s):
        yield


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Polls a condition of the outside world until it holds, or fails the test."""
    async with _within():
        while not await condition():  # noqa: ASYNC110  # of the outside world: nothing here could set an event
            await asyncio.sleep(0.05)


async def _until_found(peer: Peer, expected: Sequence[Peer], model_id: ModelId | None = MODEL) -> None:
    async def is_found() -> bool:
        return await peer.found(model_id) == {other.id for other in expected}

    await _until(is_found)


async def test_nodes_in_a_chain_find_one_another(start: Start) -> None:
    first = await start()
    second = await start(first.discovery.invite)
    third = await start(second.discovery.addresses[0])
    nodes = [first, second, third]
    for node in nodes:
        await _until_found(node, nodes)
        await _until_found(node, nodes, None)


async def test_user_knowing_one_address_finds_all_with_the_first_call(start: Start) -> None:
    first = await start()
    nodes = [first, *[await start(first.discovery.addresses[0]) for _ in range(2)]]
    for node in nodes:
        await _until_found(node, nodes)
    user = await start(nodes[2].discovery.addresses[0], serve=False)
    assert await user.found() == {node.id for node in nodes}
    await user.discovery.wait_for_peer(0.1)
    assert user.discovery.num_peers >= 1
    assert await user.found(ModelId("cd" * 32)) == set()


async def test_late_joiner_is_found(start: Start) -> None:
    first = await start()
    second = await start(first.discovery.addresses[0])
    user = await start(first.discovery.addresses[0], serve=False)
    await _until_found(user, [first, second])
    late = await start(second.discovery.addresses[0])
    await _until_found(user, [first, second, late])


async def test_node_is_found_through_the_dht_alone(start: Start) -> None:
    first = await start()
    node = await start(first.discovery.addresses[0])
    user = await start(first.discovery.addresses[0], serve=False)
    await user.discovery.wait_for_peer(LIMIT_S)

    async def is_provider() -> bool:
        found = await user.discovery._bridge.call(lambda host: host.find_providers(provider_key(MODEL)))
        return node.id in {peer.peer for peer in found}

    await _until(is_provider)
    value = await user.discovery._bridge.call(lambda host: host.get_value(record_key(node.id)))
    assert value == node.discovery._exchange.own_envelope


async def test_newer_record_replaces_the_older_one_in_the_dht(start: Start) -> None:
    first = await start()
    node = await start(first.discovery.addresses[0])
    user = await start(first.discovery.addresses[0], serve=False)
    await user.discovery.wait_for_peer(LIMIT_S)

    async def stored() -> bytes | None:
        return await user.discovery._bridge.call(lambda host: host.get_value(record_key(node.id)))

    async def is_stored() -> bool:
        return await stored() == node.discovery._exchange.own_envelope

    await _until(is_stored)
    old = await stored()
    await node.announce()
    await node.discovery._put_own()
    # The reader holds the old one in its cache by now, and must not answer from there.
    assert await stored() == node.discovery._exchange.own_envelope != old


class _Forger(Discovery):
    """Believes every value, so that its own library does not keep it from storing one."""

    def _sequence_of(self, key: str, value: bytes) -> int:
        return 10**12


async def test_record_under_another_peers_key_is_refused_by_storers_and_readers(start: Start) -> None:
    storer = await start()
    victim = await start(storer.discovery.addresses[0])
    forger = await start(storer.discovery.addresses[0], announced=False, kind=_Forger)
    await forger.discovery.wait_for_peer(LIMIT_S)

    async def is_stored() -> bool:
        value = await storer.discovery._bridge.call(lambda host: host.get_value(record_key(victim.id)))
        return value == victim.discovery._exchange.own_envelope

    await _until(is_stored)
    honest = victim.discovery._exchange.own_envelope
    for envelope in (forger.record(), victim.record(signer=forger.identity)):
        before = storer.discovery.table.refused.get(Refusal.WRONG_KEY, 0)
        await forger.discovery._bridge.call(lambda host, e=envelope: host.put_value(record_key(victim.id), e))
        await asyncio.sleep(0)
        assert storer.discovery.table.refused.get(Refusal.WRONG_KEY, 0) > before
    # The forger answers with its forgery when it is asked, and the reader does not take it.
    user = await start(storer.discovery.addresses[0], forger.discovery.addresses[0], serve=False)
    await user.discovery.wait_for_peer(LIMIT_S)
    assert await user.discovery._bridge.call(lambda host: host.get_value(record_key(victim.id))) == honest


async def test_record_with_forbidden_dates_is_refused_and_counted(start: Start) -> None:
    node = await start()
    liar = await start(node.discovery.addresses[0], announced=False)
    await liar.discovery.wait_for_peer(LIMIT_S)
    now = time.time()
    ten_years_s = 10 * 365 * 86400.0
    lies = {
        Refusal.LIFETIME_TOO_LONG: liar.record(ttl_s=ten_years_s),
        Refusal.EXPIRED: liar.record(issued_at=now - 600),
        Refusal.FUTURE_DATED: liar.record(issued_at=now + ten_years_s),
        Refusal.WRONG_KEY: Peer(liar.discovery, Identity.generate()).record(signer=liar.identity),
    }
    for refusal, envelope in lies.items():
        request = msgspec.msgpack.encode(ExchangeRequest(2, (envelope,), None, 0))
        await liar.discovery._bridge.call(
            lambda host, r=request: host.request(node.id, PROTOCOL_ID, r, limit_bytes=MAX_ANSWER_BYTES)
        )
        assert node.discovery.table.refused == {refusal: 1}
        node.discovery.table.refused.clear()
    # And one that is in order still passes: the lies have silenced nobody.
    await liar.announce()
    await _until_found(node, [node, liar])


async def test_malformed_request_is_refused_without_harm(start: Start) -> None:
    node = await start()
    other = await start(node.discovery.addresses[0])
    await other.discovery.wait_for_peer(LIMIT_S)
    for request in (b"", b"\xff" * 100, msgspec.msgpack.encode([2, [b"x" * 20_000], None, 0]), b"\x00" * 200_000):
        with pytest.raises(PeerError):
            await other.discovery._bridge.call(
                lambda host, r=request: host.request(node.id, PROTOCOL_ID, r, limit_bytes=1000)
            )
    await _until_found(other, [node, other])


async def test_peer_with_idle_request_streams_locks_nobody_out(start: Start) -> None:
    node = await start()
    idler = await start(node.discovery.addresses[0], serve=False)
    honest = await start(node.discovery.addresses[0])
    for peer in (idler, honest):
        await peer.discovery.wait_for_peer(LIMIT_S)
    opened = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def idle(host: ControlNode) -> float:
        """Opens as many streams as there are slots; returns how long the node waits for a request on one of them."""
        import trio
        from libp2p.peer.id import ID

        assert isinstance(host, Libp2pNode)
        their_id = ID.from_base58(node.id)
        first = await host._host.new_stream(their_id, [PROTOCOL_ID])
        for _ in range(MAX_REQUESTS_AT_ONCE):
            with contextlib.suppress(Exception):  # those above its share are reset
                await host._host.new_stream(their_id, [PROTOCOL_ID])
        loop.call_soon_threadsafe(opened.set)
        began = trio.current_time()
        with contextlib.suppress(Exception):
            await first.read(1)
        return float(trio.current_time() - began)

    idling = asyncio.create_task(idler.discovery._bridge.call(idle))
    async with _within():
        await opened.wait()
    await honest.discovery.request(node.id, PROTOCOL_ID, PULL, limit_bytes=MAX_ANSWER_BYTES)
    async with _within():
        assert await idling < REQUEST_TIMEOUT_S / 2


async def test_connection_that_carries_something_is_not_given_up(start: Start) -> None:
    node = await start()
    other = await start(node.discovery.addresses[0])
    await _until_found(other, [node, other])

    async def open_stream(host: ControlNode) -> object:
        from p2p.libp2p_adapter.dialing import ID

        assert isinstance(host, Libp2pNode)
        return await host._host.new_stream(ID.from_base58(node.id), [PROTOCOL_ID])

    await other.discovery.call(open_stream)
    assert not await node.discovery.call(lambda host: host.disconnect(other.id, if_spare=True))
    assert node.discovery.connected == [other.id]

    async def is_given_up() -> bool:  # the stream stays silent, and is reset after three seconds
        return await node.discovery.call(lambda host: host.disconnect(other.id, if_spare=True))

    await _until(is_given_up)


async def test_many_requests_at_once_from_one_peer_are_all_answered(start: Start) -> None:
    node = await start()
    other = await start(node.discovery.addresses[0])
    await other.discovery.wait_for_peer(LIMIT_S)
    async with _within(), asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(other.discovery.request(node.id, PROTOCOL_ID, PULL, limit_bytes=MAX_ANSWER_BYTES))


async def test_further_protocol_is_answered_and_refused_by_its_owner(start: Start) -> None:
    async def answer(peer: PeerId, request: bytes) -> bytes | None:
        if request == b"wrong":
            raise WireError("not like this")
        return None if request == b"no" else peer.encode() + request

    node = await start(protocols=(RequestProtocol("/fusion/test/1", 100, answer),))
    other = await start(node.discovery.addresses[0])
    await other.discovery.wait_for_peer(LIMIT_S)
    assert node.discovery.num_peers == 1
    reply = await other.discovery.request(node.id, "/fusion/test/1", b"ping", limit_bytes=100)
    assert reply == other.id.encode() + b"ping"
    for refused in (b"no", b"wrong", bytes(101)):
        with pytest.raises(PeerError):
            await other.discovery.request(node.id, "/fusion/test/1", refused, limit_bytes=100)


async def test_only_who_has_the_swarm_key_is_met(start: Start) -> None:
    node = await start(swarm_key=SwarmKey(b"k" * 32))
    member = await start(node.discovery.addresses[0], swarm_key=SwarmKey(b"k" * 32), serve=False)
    await member.discovery.wait_for_peer(LIMIT_S)
    for key in (None, SwarmKey(b"x" * 32)):
        stranger = await start(node.discovery.addresses[0], swarm_key=key, serve=False)
        with pytest.raises(NoPeers):
            await stranger.discovery.wait_for_peer(1.0)
    assert node.discovery.num_peers == 1


async def test_withdrawn_node_is_gone_at_once_for_those_who_ask(start: Start) -> None:
    first = await start()
    leaving = await start(first.discovery.addresses[0])
    user = await start(first.discovery.addresses[0], serve=False)
    await _until_found(user, [first, leaving])
    began = time.monotonic()
    await leaving.discovery.withdraw(leaving.record(shards=False))
    assert time.monotonic() - began < 2.0
    assert await user.found() == {first.id}
    assert await first.found() == {first.id}
    newcomer = await start(first.discovery.addresses[0], serve=False)
    assert await newcomer.found() == {first.id}


async def test_dead_node_is_forgotten_when_its_record_expires(start: Start) -> None:
    first = await start()
    dying = await start(first.discovery.addresses[0], announced=False)
    await dying.discovery.announce(dying.record(ttl_s=3.0), [MODEL])
    await _until_found(first, [first, dying])
    await dying.discovery.aclose()
    await _until_found(first, [first])


async def test_bootstrap_that_is_down_is_tried_until_it_appears(start: Start) -> None:
    identity = Identity.generate()
    port = _free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
    user = await start(address, serve=False)
    with pytest.raises(NoPeers, match=address):
        await user.discovery.wait_for_peer(0.5)
    late = Discovery(identity, DiscoveryConfig((f"127.0.0.1:{port}",), (), mdns=False, serve=True))
    await late.start()
    try:
        await user.discovery.wait_for_peer(LIMIT_S)
    finally:
        await late.aclose()


async def test_node_starts_while_all_its_bootstraps_are_down_and_says_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    dead = [f"/ip4/127.0.0.1/tcp/{_free_port()}/p2p/{Identity.generate().peer_id}" for _ in range(2)]
    with caplog.at_level(logging.WARNING, logger="p2p.discovery"):
        node = await start(*dead)
        assert await node.found() == {node.id}

        async def is_told() -> bool:
            return all(short(address.rpartition("/")[2]) in caplog.text for address in dead)

        await _until(is_told)
    # Others enter by it all the same.
    user = await start(node.discovery.addresses[0], serve=False)
    assert await user.found() == {node.id}


async def test_pull_brings_only_what_is_missing(start: Start) -> None:
    first = await start()
    second = await start(first.discovery.addresses[0])
    await _until_found(second, [first, second])
    request = second.discovery._exchange.request(None, limit=256, now=UnixS(time.time()))
    answer = await second.discovery.request(first.id, PROTOCOL_ID, request, limit_bytes=MAX_ANSWER_BYTES)
    assert len(answer) < 100
    nothing = await second.discovery.request(first.id, PROTOCOL_ID, PULL, limit_bytes=MAX_ANSWER_BYTES)
    assert len(nothing) > 500


@pytest.mark.skipif(all(map(is_loopback, dialable_hosts("0.0.0.0"))), reason="no network but loopback")  # noqa: S104
async def test_who_has_been_in_the_swarm_finds_back_without_an_address(tmp_path: Path) -> None:
    book = path_of(tmp_path, "public")
    node = Discovery(Identity.generate(), DiscoveryConfig(("0.0.0.0:0",), (), mdns=False, serve=True))
    await node.start()
    port = (await node._bridge.call(lambda host: host.listening()))[0][1]
    address = f"/ip4/{dialable_hosts('0.0.0.0')[0]}/tcp/{port}/p2p/{node._identity.peer_id}"  # noqa: S104
    try:
        for named in ((address,), ()):
            user = Discovery(Identity.generate(), DiscoveryConfig((), named, mdns=False, serve=False, peer_book=book))
            await user.start()
            await user.wait_for_peer(LIMIT_S)
            await user.aclose()
        assert address in book.read_text()
        assert stat.S_IMODE(book.stat().st_mode) == 0o600
    finally:
        await node.aclose()


async def test_record_published_on_the_topic_reaches_the_others_and_a_forged_one_nobody(start: Start) -> None:
    first = await start(gossip=True)
    nodes = [first, *[await start(first.discovery.addresses[0], gossip=True) for _ in range(2)]]
    for node in nodes:
        await _until_found(node, nodes)
    speaker, hearers = nodes[1], (nodes[0], nodes[2])
    stranger = Peer(speaker.discovery, Identity.generate())
    forged = stranger.record(signer=speaker.identity)

    async def is_heard() -> bool:
        # Again and again: a mesh takes some heartbeats to form.
        for record in (forged, speaker.record()):
            await speaker.discovery.call(lambda host, r=record: host.gossip(r))
        known = [hearer.discovery.table.record_of(speaker.id, now=UnixS(time.time())) for hearer in hearers]
        return all(record is not None and record.sequence > 1 for record in known)

    await _until(is_heard)
    assert all(hearer.discovery.table.record_of(stranger.id, now=UnixS(time.time())) is None for hearer in hearers)


async def test_peer_with_another_key_at_the_address_is_not_met(start: Start) -> None:
    node = await start()
    claimed = node.discovery.addresses[0].replace(node.id, Identity.generate().peer_id)
    user = await start(claimed, serve=False)
    with pytest.raises(NoPeers):
        await user.discovery.wait_for_peer(2.0)
    assert user.discovery.num_peers == 0


async def test_libp2p_thread_that_dies_fails_calls_and_comes_back(start: Start) -> None:
    node = await start()
    other = await start(node.discovery.addresses[0])
    await _until_found(other, [node, other])
    bridge, addresses = other.discovery._bridge, other.discovery.addresses

    async def crash() -> None:
        runner = bridge._runner
        assert runner is not None
        runner._calls.start_soon(_raise)  # type: ignore[attr-defined]

    async def never(_: object) -> None:
        import trio

        await trio.sleep_forever()

    pending = asyncio.create_task(bridge.call(never))
    await bridge.call(lambda _: crash())
    async with _within():
        with pytest.raises(ControlPlaneDown):
            await pending

    async def is_back() -> bool:
        return bridge.num_restarts == 1 and bridge.is_up

    await _until(is_back)
    assert other.discovery.addresses == addresses
    await other.announce()
    await _until_found(other, [node, other])
    # It listens where it was known, too.
    user = await start(addresses[0], serve=False)
    await user.discovery.wait_for_peer(LIMIT_S)


async def _raise() -> None:
    raise RuntimeError("a task of the library has died")


async def test_cancelled_call_is_cancelled_in_the_thread(start: Start) -> None:
    node = await start()
    seen: list[str] = []

    async def wait(_: object) -> None:
        import trio

        seen.append("began")
        try:
            await trio.sleep_forever()
        finally:
            seen.append("ended")

    call = asyncio.create_task(node.discovery._bridge.call(wait))

    async def has_begun() -> bool:
        return bool(seen)

    async def has_ended() -> bool:
        return seen == ["began", "ended"]

    await _until(has_begun)
    call.cancel()
    await _until(has_ended)


@pytest.mark.skipif(all(map(is_loopback, dialable_hosts("0.0.0.0"))), reason="no network but loopback")  # noqa: S104
@pytest.mark.parametrize("key", [None, SwarmKey(b"k" * 32)], ids=["public", "private"])
async def test_peers_on_one_network_find_one_another_by_mdns(key: SwarmKey | None) -> None:
    node = Discovery(Identity.generate(), DiscoveryConfig(("0.0.0.0:0",), (), mdns=True, serve=True), swarm_key=key)
    user = Discovery(Identity.generate(), DiscoveryConfig((), (), mdns=True, serve=False), swarm_key=key)
    await node.start()
    try:
        assert await _advertises_only_what_others_can_dial(node)
        await user.start()
        await user.wait_for_peer(LIMIT_S)

        async def is_met() -> bool:
            return node._identity.peer_id in user.connected

        await _until(is_met)
    finally:
        await user.aclose()
        await node.aclose()


async def _advertises_only_what_others_can_dial(node: Discovery) -> bool:
    async def advertised(host: ControlNode) -> list[str]:
        return [str(address) for address in host._host.get_addrs()]  # type: ignore[attr-defined]

    told = [*node.addresses, *await node._bridge.call(advertised)]
    return bool(told) and not any("/127.0.0.1/" in text or "/0.0.0.0/" in text for text in told)


async def test_port_in_use_is_named(start: Start) -> None:
    node = await start()
    port = node.discovery.addresses[0].split("/")[4]
    config = DiscoveryConfig((f"127.0.0.1:{port}",), (), mdns=False, serve=True)
    with pytest.raises(AddressInUse, match=port):
        await Discovery(Identity.generate(), config).start()


@pytest.mark.parametrize(
    "config",
    [
        DiscoveryConfig(("127.0.0.1",), (), mdns=False, serve=True),
        DiscoveryConfig(("192.0.2.1:0",), (), mdns=False, serve=True),
        DiscoveryConfig(("127.0.0.1:0",), ("127.0.0.1:4600",), mdns=False, serve=True),
        DiscoveryConfig(("127.0.0.1:0",), ("/ip4/127.0.0.1/tcp/1/p2p/12D3",), mdns=False, serve=True),
    ],
)
async def test_malformed_configuration_is_refused(config: DiscoveryConfig) -> None:
    with pytest.raises(ConfigError):
        await Discovery(Identity.generate(), config).start()


async def test_user_without_any_peer_to_try_is_told_so(start: Start) -> None:
    user = await start(serve=False)
    with pytest.raises(NoPeers, match="--peer"):
        await user.discovery.wait_for_peer(10.0)


@pytest.mark.parametrize("security", ["plaintext", "secio", "tls"])
async def test_host_with_anything_but_noise_does_not_get_in(start: Start, security: str) -> None:
    node = await start()
    address, peer = node.discovery.addresses[0].rsplit("/p2p/", 1)
    assert not await asyncio.to_thread(_is_admitted, address, peer, security)
    assert node.discovery.num_peers == 0


def _is_admitted(address: str, peer: str, security: str) -> bool:
    """Dials with py-libp2p as it comes, but with one security protocol. Plaintext accepts anybody as anybody."""
    import libp2p
    import libp2p.security.secio.transport as secio
    import multiaddr
    import trio
    from libp2p.custom_types import TProtocol
    from libp2p.peer.id import ID
    from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
    from libp2p.security.tls.transport import PROTOCOL_ID as TLS_ID
    from libp2p.security.tls.transport import TLSTransport

    key_pair = libp2p.generate_new_ed25519_identity()
    transports = {
        "plaintext": (PLAINTEXT_PROTOCOL_ID, InsecureTransport),
        "secio": (secio.ID, secio.Transport),
        "tls": (TLS_ID, TLSTransport),
    }
    protocol, transport = transports[security]

    async def main() -> bool:
        host = libp2p.new_host(key_pair=key_pair, sec_opt={TProtocol(protocol): transport(key_pair)})
        async with host.run([]):
            try:
                with trio.fail_after(5.0):
                    await host.get_network().dial_addr(multiaddr.Multiaddr(address), ID.from_base58(peer))
            except Exception:
                return False
            return True

    return trio.run(main)


async def test_gigantic_frame_before_authentication_is_cut_off(start: Start) -> None:
    node = await start()
    port = int(node.discovery.addresses[0].split("/")[4])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x80\x80\x80\x80\x04" + b"x" * 1024)  # varint of 2**30
    async with _within(5.0):  # well before the handshake's own time limit of 10 s
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read()) < 1024
    writer.close()
    other = await start(node.discovery.addresses[0])
    await _until_found(other, [node, other])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
