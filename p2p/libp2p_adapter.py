"""The only file that imports libp2p, trio and multiaddr: a hardened host, its DHT, and the thread's event loop.

py-libp2p 0.8.1 as it comes accepts plaintext connections under anybody's name, answers from stale caches, and can be
made to allocate a gigabyte before authentication. What is changed here, and why, is listed in
docs/protocol-network.md, one entry per change; the entries are named in the comments (trap 1 …).

Import it late: it takes more than a second. Above 600 lines, because it is the one file that may name the library.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import libp2p.kad_dht.common as kad_common
import libp2p.kad_dht.kad_dht as kad_dht
import libp2p.kad_dht.peer_routing as kad_peer_routing
import libp2p.kad_dht.provider_store as kad_provider_store
import libp2p.kad_dht.value_store as kad_value_store
import libp2p.protocol_muxer.multiselect_communicator as multiselect_communicator
import multiaddr
import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IncompleteReadError, MessageTooLarge
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamEOF, StreamError
from libp2p.peer.id import ID
from libp2p.rcmgr import ResourceManager
from libp2p.rcmgr.manager import ResourceLimits
from libp2p.records.validator import NamespacedValidator, Validator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    PeerClosed,
    PeerTimeout,
    PeerUnreachable,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress, dialable_hosts
from p2p.control import FoundPeer, HostConfig, HostHooks

KAD_PROTOCOL = TProtocol("/fusion/kad/1.0.0")
NAMESPACE = "fusion"

DIAL_TIMEOUT_S = 5.0
"""TCP, Noise and yamux take four round trips: 1.2 s over the longest path on Earth, and a margin for a busy node."""

DIAL_STAGGER_S = 0.25
"""Between starting to dial one address and the next (RFC 8305 "Happy Eyeballs", §5: Connection Attempt Delay)."""

UNREACHABLE_S = 10.0
"""How long a look-up skips a peer that did not answer (trap 10). The library's 60 s hide a peer that is back."""

REQUEST_TIMEOUT_S = 10.0
MAX_MULTISTREAM_BYTES = 64 * 1024
MAX_CONNECTIONS = 256
MAX_STREAMS = 1024
MAX_REQUESTS_AT_ONCE = 32
MAX_REQUESTS_PER_PEER = 4
"""Of the slots: eight peers that ask slowly fill them, and not one alone."""

MAX_ASKED_AT_ONCE = 2
"""Requests of ours to one peer; more wait. Half of what it grants, because its slots are freed after its answer."""

READ_REQUEST_TIMEOUT_S = 3.0
"""For 65 KiB at most, and usually 1: two round trips and a margin. A stream without a request keeps a slot so long."""

MAX_DHT_MESSAGE_BYTES = 256 * 1024
"""20 peers with signed records of 1 KiB and a value of 16 KiB fit five times."""

MAX_DHT_VALUES = 4096
"""Times 16 KiB: at most 64 MiB."""

MAX_DHT_PROVIDER_KEYS = 4096
MAX_PROVIDERS_PER_KEY = 200
"""Trap 9: the library keeps 20, and thus the DHT would never name the 21st node of a model."""

PROVIDER_TTL_S = 600
"""Trap 9: the library's 48 hours make every look-up dial the dead of two days. Nodes provide every 120 s."""

DHT_QUERY_TIMEOUT_S = 4


log = logging.getLogger(__name__)

# Trap 12: it prints every peer's failure through the root handler when no logging is configured. After the import,
# because some of its modules set their own level.
if "LIBP2P_DEBUG" not in os.environ:
    for _name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "libp2p"]:
        logging.getLogger(_name).setLevel(logging.CRITICAL)


async def _read_delim(reader: Any) -> bytes:
    """Back-port of the bound in 0.8.2 (GHSA-hmjq-g7pp-rw3x): trap 2."""
    try:
        frame = bytes(await read_varint_prefixed_bytes_limited(reader, MAX_MULTISTREAM_BYTES))
    except (MessageTooLarge, ValueError) as error:
        raise ParseError(str(error)) from error
    if not frame.endswith(b"\n"):
        raise ParseError("multistream frame without its end")
    try:
        frame.decode()
    except UnicodeDecodeError as error:
        raise ParseError("multistream frame is not UTF-8") from error
    return frame[:-1]


def _rebind(name: str, value: object, *modules: ModuleType) -> None:
    """Changes a constant in every module that has imported it. A name that is gone is our error, at import."""
    for module in modules:
        if not hasattr(module, name):
            raise ImportError(f"{module.__name__} has no {name}: this libp2p is not the one that was hardened")
        setattr(module, name, value)


multiselect_communicator.read_delim = _read_delim
_rebind(
    "PROTOCOL_ID", KAD_PROTOCOL, kad_common, kad_dht, kad_peer_routing, kad_provider_store, kad_value_store
)  # trap 7: its protocol_prefix argument does nothing
_rebind("MAX_DHT_MESSAGE_SIZE", MAX_DHT_MESSAGE_BYTES, kad_dht, kad_peer_routing, kad_provider_store, kad_value_store)
_rebind("QUERY_TIMEOUT", DHT_QUERY_TIMEOUT_S, kad_dht, kad_peer_routing, kad_provider_store)
_rebind("MAX_VALUE_STORE_SIZE", MAX_DHT_VALUES, kad_value_store)
_rebind("BUCKET_SIZE", MAX_PROVIDERS_PER_KEY, kad_provider_store)
_rebind("PROVIDER_RECORD_EXPIRATION_INTERVAL", PROVIDER_TTL_S, kad_provider_store)


class Libp2pRunner:
    """Runs one host under trio until stopped. See p2p.bridge.Runner."""

    def __init__(self, config: HostConfig, hooks: HostHooks) -> None:
        self._config = config
        self._hooks = hooks
        self._token: trio.lowlevel.TrioToken | None = None
        self._calls: trio.Nursery | None = None
        self._stop = trio.Event()
        self._node: Libp2pNode | None = None

    @property
    def node(self) -> Libp2pNode:
        if self._node is None:
            raise RuntimeError("the host is not running")
        return self._node

    def run(self, on_ready: Callable[[], None]) -> None:
        trio.run(self._main, on_ready)

    def stop(self) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._stop.set)
            except trio.RunFinishedError:
                return

    def submit(
        self, call: Callable[[], Awaitable[Any]], on_done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        if self._token is None or self._calls is None:
            raise RuntimeError("the host is not running")
        token, calls, scope = self._token, self._calls, trio.CancelScope()

        async def body() -> None:
            with scope:
                try:
                    result = await call()
                except Exception as error:  # noqa: BLE001  # it is the caller's, on the other side of the bridge
                    on_done(None, error)
                except BaseException as error:
                    on_done(None, error)
                    raise
                else:
                    on_done(result, None)

        def cancel() -> None:
            try:
                token.run_sync_soon(scope.cancel)
            except trio.RunFinishedError:
                return

        token.run_sync_soon(lambda: calls.start_soon(body))
        return cancel

    async def _main(self, on_ready: Callable[[], None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with _running_node(self._config, self._hooks) as self._node, trio.open_nursery() as self._calls:
            on_ready()
            await self._stop.wait()
            self._calls.cancel_scope.cancel()


class Libp2pNode:
    """The running host. See p2p.control.ControlNode; every method runs under trio."""

    def __init__(self, host: Any, dht: Any, config: HostConfig, hooks: HostHooks) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._dht = dht
        self._config = config
        self._hooks = hooks
        self._token = trio.lowlevel.current_trio_token()
        self._num_requests_of: Counter[ID] = Counter()
        self._asking: WeakValueDictionary[ID, trio.CapacityLimiter] = WeakValueDictionary()
        self._dialing: dict[ID, trio.Event] = {}
        self._unreachable_until: dict[ID, float] = {}
        self._protocol = TProtocol(config.request_protocol)
        self._swarm.dial_peer = self._dial_known_peer  # traps 5, 10
        host.set_stream_handler(self._protocol, self._serve_request)

    async def listening(self) -> list[tuple[str, int]]:
        return [(host, port) for _, host, port in map(_parts_of, self._host.get_transport_addrs())]

    async def connect(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        their_id = ID.from_base58(peer)
        self._unreachable_until.pop(their_id, None)
        with _translated(peer):
            await self._dial(their_id, [_multiaddr_of(address) for address in addresses])

    async def disconnect(self, peer: PeerId) -> None:
        with _translated(peer), trio.move_on_after(1.0):
            await self._host.disconnect(ID.from_base58(peer))

    async def request(self, peer: PeerId, request: bytes, *, limit_bytes: int) -> bytes:
        their_id = ID.from_base58(peer)
        asking = self._asking.setdefault(their_id, trio.CapacityLimiter(MAX_ASKED_AT_ONCE))
        with _translated(peer), trio.fail_after(REQUEST_TIMEOUT_S):
            async with asking:
                stream = await self._host.new_stream(their_id, [self._protocol])
                async with _closing(stream):
                    await _write_message(stream, request)
                    return await _read_message(stream, limit_bytes)

    async def join_dht(self, peer: PeerId) -> None:
        with _translated(peer):
            await self._dht.add_peer(ID.from_base58(peer))
            await self._dht.peer_routing.find_closest_peers_network(self._host.get_id().to_bytes())

    async def put_value(self, key: str, value: bytes) -> None:
        with _translated("DHT"):
            # The library refuses to replace the copy of one's own earlier value when that has expired since.
            self._dht.value_store.remove(key.encode())
            await self._dht.put_value(key, value)

    async def get_value(self, key: str) -> bytes | None:
        store = self._dht.value_store
        held = store.store.pop(key.encode(), None)  # trap 8: it would be the answer, unchecked and however old
        value: bytes | None = None
        try:
            with _translated("DHT"):
                value = await self._dht.get_value(key)
        finally:
            # What others have stored here stays stored, unless the look-up has brought a newer one.
            if held is not None and not self._is_newer(key, value, held[0].value):
                store.store[key.encode()] = held
        return value

    async def provide(self, key: bytes) -> None:
        with _translated("DHT"):
            await self._dht.provider_store.provide(key)

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        store = self._dht.provider_store
        held = store.providers.pop(key, {})  # trap 8, as in get_value
        try:
            with _translated("DHT"):
                # Its count is of answers with all their repetitions: ask for many.
                found = await store.find_providers(key, count=10 * MAX_PROVIDERS_PER_KEY)
        finally:
            new = store.providers.pop(key, {})
            store.providers[key] = dict(list({**held, **new}.items())[:MAX_PROVIDERS_PER_KEY])
        infos = [*found, *(record.provider_info for record in held.values())]
        peers: dict[str, set[PeerAddress]] = {}
        for info in infos:
            peers.setdefault(info.peer_id.to_base58(), set()).update(_peer_addresses(info.peer_id, info.addrs))
        return [FoundPeer(PeerId(peer), tuple(sorted(addresses))) for peer, addresses in peers.items() if addresses]

    def _is_newer(self, key: str, value: bytes | None, than: bytes) -> bool:
        if value is None:
            return False
        try:
            return self._hooks.sequence_of(key, value) >= self._hooks.sequence_of(key, than)
        except ValueError:  # the one that was held has expired
            return True

    async def _dial_known_peer(self, their_id: ID) -> list[Any]:
        """Replaces Swarm.dial_peer, through which the DHT dials whom it has heard of."""
        if trio.current_time() < self._unreachable_until.get(their_id, 0.0):
            raise SwarmException("did not answer a moment ago")
        await self._dial(their_id, self._host.get_peerstore().addrs(their_id))
        return list(self._swarm.get_connections(their_id))

    async def _dial(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> None:
        """Dials every address (the library only the first), each a moment after the one before; the first wins."""
        if their_id == self._host.get_id():
            raise SwarmException("this is the own peer id")
        while not self._swarm.get_connections(their_id):
            under_way = self._dialing.get(their_id)
            if under_way is None:
                break
            await under_way.wait()
        if self._swarm.get_connections(their_id):
            return
        self._dialing[their_id] = over = trio.Event()
        try:
            await self._dial_staggered(their_id, addresses)
        finally:
            del self._dialing[their_id]
            over.set()
        if not self._swarm.get_connections(their_id):
            if len(self._unreachable_until) > 10_000:
                self._unreachable_until.clear()
            self._unreachable_until[their_id] = trio.current_time() + UNREACHABLE_S
            raise SwarmException(f"none of its {len(addresses)} addresses answers")
        self._unreachable_until.pop(their_id, None)
        self._host.get_peerstore().add_addrs(their_id, list(addresses), 3600)

    async def _dial_staggered(self, their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> None:
        with trio.move_on_after(DIAL_TIMEOUT_S + DIAL_STAGGER_S * len(addresses)):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()

                    async def attempt(address: multiaddr.Multiaddr = address, failed: trio.Event = failed) -> None:
                        try:
                            with trio.fail_after(DIAL_TIMEOUT_S):
                                await self._swarm.dial_addr(address, their_id)
                        except Exception as error:  # noqa: BLE001  # the library raises whatever its parts raise
                            log.debug("dialling %s failed: %r", address, error)
                            failed.set()
                        else:
                            nursery.cancel_scope.cancel()

                    nursery.start_soon(attempt)
                    with trio.move_on_after(DIAL_STAGGER_S):
                        await failed.wait()

    async def _serve_request(self, stream: Any) -> None:
        """Handler of the request streams: hands the request to the owner and writes its answer."""
        try:
            with self._slot_for(stream) as is_granted, trio.move_on_after(REQUEST_TIMEOUT_S):
                if is_granted:
                    await self._answer_request(stream)
                else:
                    await stream.reset()
        except Exception as error:  # noqa: BLE001  # one stream's end must not be the host's
            log.debug("a request stream failed: %r", error)

    @contextmanager
    def _slot_for(self, stream: Any) -> Iterator[bool]:
        """One of the slots for requests, unless all are taken or the peer has its share."""
        their_id = stream.muxed_conn.peer_id
        num_theirs, num_all = self._num_requests_of[their_id], self._num_requests_of.total()
        if num_theirs >= MAX_REQUESTS_PER_PEER or num_all >= MAX_REQUESTS_AT_ONCE:
            yield False
            return
        self._num_requests_of[their_id] += 1
        try:
            yield True
        finally:
            self._num_requests_of[their_id] -= 1
            if not self._num_requests_of[their_id]:
                del self._num_requests_of[their_id]

    async def _answer_request(self, stream: Any) -> None:
        async with _closing(stream):
            with trio.fail_after(READ_REQUEST_TIMEOUT_S):
                request = await _read_message(stream, self._config.max_request_bytes)
            answer = await self._ask_owner(PeerId(stream.muxed_conn.peer_id.to_base58()), request)
            if answer is not None:
                await _write_message(stream, answer)

    async def _ask_owner(self, peer: PeerId, request: bytes) -> bytes | None:
        answered = trio.Event()
        answers: list[bytes | None] = []

        def take() -> None:
            answered.set()

        def answer(value: bytes | None) -> None:
            answers.append(value)
            try:
                self._token.run_sync_soon(take)
            except trio.RunFinishedError:
                return

        self._hooks.on_request(peer, request, answer)
        await answered.wait()
        return answers[0]


class _Connections(INotifee):  # type: ignore[misc]
    """Tells the owner of each peer's first connection and last disconnection."""

    def __init__(self, on_connection: Callable[[PeerId, bool], None]) -> None:
        self._on_connection = on_connection

    async def connected(self, network: Any, conn: Any) -> None:
        self._on_connection(PeerId(conn.muxed_conn.peer_id.to_base58()), True)

    async def disconnected(self, network: Any, conn: Any) -> None:
        their_id = conn.muxed_conn.peer_id
        # Trap 13: when the other side closes first, it forgets the connection and leaves the socket open.
        await conn.muxed_conn.secured_conn.close()
        if not [other for other in network.get_connections(their_id) if other is not conn]:
            self._on_connection(PeerId(their_id.to_base58()), False)

    async def opened_stream(self, network: Any, stream: Any) -> None: ...

    async def closed_stream(self, network: Any, stream: Any) -> None: ...

    async def listen(self, network: Any, multiaddr: Any) -> None: ...

    async def listen_close(self, network: Any, multiaddr: Any) -> None: ...


class _RecordValidator(Validator):  # type: ignore[misc]
    """Storers and readers of the DHT both check: the value is a signed record, of the peer that the key names."""

    def __init__(self, sequence_of: Callable[[str, bytes], int]) -> None:
        self._sequence_of = sequence_of

    def validate(self, key: str, value: bytes) -> None:
        self._sequence_of(key, value)

    def select(self, key: str, values: list[bytes]) -> int:
        def rank(value: bytes) -> int:
            try:
                return self._sequence_of(key, value)
            except ValueError:
                return -1

        # The first of equals, which the library lets stand for "keep the old one".
        return max(range(len(values)), key=lambda index: (rank(values[index]), -index))


@asynccontextmanager
async def _running_node(config: HostConfig, hooks: HostHooks) -> AsyncIterator[Libp2pNode]:
    listen = [multiaddr.Multiaddr(_tcp(host, port)) for host, port in config.listen]
    host = _make_host(config, listen)
    host.get_network().register_notifee(_Connections(hooks.on_connection))
    async with host.run(listen):
        if len(host.get_network().listeners) != len(listen):  # it only logs what it could not bind
            raise AddressInUse("an address to listen on was taken by another program just now: try again")
        validator = NamespacedValidator({NAMESPACE: _RecordValidator(hooks.sequence_of)}, strict_validation=True)
        dht = kad_dht.KadDHT(
            host,
            kad_dht.DHTMode.SERVER if config.serve else kad_dht.DHTMode.CLIENT,
            validator=validator,
            validator_changed=True,
            strict_validation=True,
        )
        _bound_providers(dht.provider_store)
        async with background_trio_service(dht):
            try:
                yield Libp2pNode(host, dht, config, hooks)
            finally:
                # It leaves connections to the garbage collector, and the peers in doubt.
                with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
                    async with trio.open_nursery() as nursery:
                        for their_id in host.get_connected_peers():
                            nursery.start_soon(host.disconnect, their_id)


def _make_host(config: HostConfig, listen: list[multiaddr.Multiaddr]) -> Any:
    key_pair = create_new_key_pair(config.seed)
    # Trap 15: rate limits per peer share one bucket for all who are not authenticated yet, so that one flooder would
    # lock everybody out; the memory limits count this process's tensors. Counts of connections and streams remain.
    resources = ResourceManager(
        limits=ResourceLimits(max_connections=2 * MAX_CONNECTIONS, max_streams=MAX_STREAMS),
        enable_metrics=False,
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
        enable_rate_limiting=False,
    )
    host = new_host(
        key_pair=key_pair,
        listen_addrs=listen or None,
        # Trap 1: without this, plaintext and secio are on offer and anybody can be anybody. Trap 3: no QUIC.
        sec_opt={TProtocol(NOISE_ID): NoiseTransport(key_pair, noise_privkey=create_new_x25519_key_pair().private_key)},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
        enable_quic=False,
        resource_manager=resources,
        connection_config=ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections=MAX_CONNECTIONS,
            dial_timeout=DIAL_TIMEOUT_S,
        ),
        addrs_factory=_advertised,
        # What peers claim to see us under is hearsay, and a liar would change what we advertise.
        disable_identify_address_discovery=True,  # trap 16
    )
    swarm = host.get_network()
    # A dial is repeated by who needs it, not three times at once inside a look-up.
    swarm.retry_config = RetryConfig(max_retries=0)
    # Trap 4: it dials everybody that it has heard of until half of high_watermark is reached, whatever the other marks.
    swarm.auto_connector.maybe_connect = _do_nothing
    return host


async def _do_nothing() -> None: ...


def _bound_providers(store: Any) -> None:
    """Trap 9: anybody may announce any number of keys; the library keeps them all."""
    add_provider = store.add_provider

    def add_bounded(key: bytes, provider: Any) -> None:
        if key in store.providers or len(store.providers) < MAX_DHT_PROVIDER_KEYS:
            add_provider(key, provider)

    store.add_provider = add_bounded


def _advertised(candidates: list[multiaddr.Multiaddr]) -> list[multiaddr.Multiaddr]:
    """Trap 6: 0.0.0.0 would be advertised as it stands."""
    return [
        multiaddr.Multiaddr(_tcp(own, port))
        for _, host, port in map(_parts_of, candidates)
        for own in dialable_hosts(host)
    ]


@asynccontextmanager
async def _closing(stream: Any) -> AsyncIterator[None]:
    """Closes a stream at the end, resets it on failure; neither may hang or hide the failure."""
    try:
        yield
    except BaseException:
        with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
            await stream.reset()
        raise
    with trio.CancelScope(deadline=trio.current_time() + 0.5, shield=True):
        await stream.close()


async def _write_message(stream: Any, message: bytes) -> None:
    await stream.write(len(message).to_bytes(4, "little") + message)


async def _read_message(stream: Any, limit_bytes: int) -> bytes:
    """Reads one message with its length in front: a reset looks like a clean end to the library (trap 11)."""
    length = int.from_bytes(await _read_exactly(stream, 4), "little")
    if length > limit_bytes:
        raise MessageTooLarge(f"a message of {length} bytes exceeds the limit of {limit_bytes}")
    return await _read_exactly(stream, length)


async def _read_exactly(stream: Any, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = await stream.read(size - len(received))
        if not part:
            raise StreamEOF("stream ended inside a message")
        received += part
    return bytes(received)


class _translated:
    """Turns the library's errors into ours. It raises whatever its parts raise, groups included."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        match error:
            case None | FusionError():
                return
            case trio.TooSlowError():
                raise PeerTimeout(self._peer, f"{self._peer} did not answer in time") from error
            case MessageTooLarge() | ParseError():
                raise RemoteProtocolError(self._peer, f"{self._peer} sent something malformed or oversized") from error
            case StreamError() | IncompleteReadError() | trio.BrokenResourceError() | trio.ClosedResourceError():
                raise PeerClosed(self._peer, f"{self._peer} closed the stream") from error
            case Exception():
                # The innermost cause says more than the library's wrapping.
                raise PeerUnreachable(self._peer, f"cannot reach {self._peer}: {error}") from error


def _multiaddr_of(address: PeerAddress) -> multiaddr.Multiaddr:
    return multiaddr.Multiaddr(f"/{address.kind}/{address.host}/tcp/{address.port}")


def _tcp(host: str, port: int) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def _parts_of(address: multiaddr.Multiaddr) -> tuple[str, str, int]:
    """Kind, host and port of a TCP address.

    Raises:
        ConfigError: when it is another kind of address.
    """
    parts = str(address).split("/")
    if len(parts) < 5 or parts[3] != "tcp":
        raise ConfigError(f"{address} is not a TCP address")
    return parts[1], parts[2], int(parts[4])


def _peer_addresses(their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> list[PeerAddress]:
    """Those of the addresses that we could dial; what strangers store in the DHT may be anything."""
    found = []
    for address in addresses[:8]:
        try:
            kind, host, port = _parts_of(address)
            found.append(PeerAddress.parse(f"/{kind}/{host}/tcp/{port}/p2p/{their_id.to_base58()}"))
        except (ConfigError, ValueError):
            continue
    return found
