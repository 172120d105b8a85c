"""The DHT: records under their owners' keys, and provider records.

The library answers others, within our bounds. What is asked of others is asked here, one peer at a time, as
p2p.kademlia_core decides: over disjoint paths, and with nothing taken from a local cache (trap 8).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import libp2p.kad_dht.kad_dht as kad_dht
import multiaddr
import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStoreError
from libp2p.records.validator import NamespacedValidator, Validator
from libp2p.utils.varint import encode_uvarint, read_varint_prefixed_bytes_limited

from fusion_node.errors import ConfigError, PeerClosed, PeerError, RemoteProtocolError
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import SENDER, FoundPeer
from p2p.identity import public_key_of
from p2p.kademlia_core import (
    REPLICATION,
    Contact,
    Lookup,
    may_enter,
    place_of,
    place_of_key,
    take_turns,
    to_displace,
)
from p2p.libp2p_adapter.claims import PEER_ID_BYTES, short_addresses
from p2p.libp2p_adapter.hardening import (
    DHT_QUERY_TIMEOUT_S,
    KAD_PROTOCOL,
    MAX_DHT_MESSAGE_BYTES,
    MAX_PROVIDERS_PER_KEY,
    bound_providers,
)
from p2p.libp2p_adapter.messages import closing, translated
from p2p.libp2p_adapter.multiaddrs import MAX_ADDRESSES_PER_PEER, is_circuit, parts_of, peer_addresses
from p2p.libp2p_adapter.slots import Slots
from p2p.prefixes import diversity_key
from p2p.seam import Gate

NAMESPACE = "fusion"

MAX_FOUND_PROVIDERS = 256
"""Of one look-up. Those whom it names are then asked for their records, so liars must not be able to name thousands."""

MAX_QUERIES_AT_ONCE = 5
"""Of one look-up, which has ten paths. A connection that has to be made costs both ends 100 ms of CPU."""

LOOKUP_TIMEOUT_S = 12.0
"""Three silent peers, one after another, on one path."""

CONTACT_TTL_S = 60
"""How long the library remembers the addresses under which somebody has named a peer."""

MAX_STREAMS_AT_ONCE = 12
"""The library's own bound. Each may take some milliseconds."""

MAX_STREAMS_PER_PEER = 4
STREAM_TIMEOUT_S = 10.0
"""For one query and its answer. The library would keep one of its 12 slots for as long as a stream is silent."""

log = logging.getLogger(__name__)


def make_dht(host: Any, sequence_of: Callable[[str, bytes], int], gate: Gate, *, serve: bool) -> Any:
    """The library's service, with our validator and our bounds."""
    validator = NamespacedValidator({NAMESPACE: _RecordValidator(sequence_of)}, strict_validation=True)
    dht = kad_dht.KadDHT(
        host,
        kad_dht.DHTMode.SERVER if serve else kad_dht.DHTMode.CLIENT,
        validator=validator,
        validator_changed=True,
        strict_validation=True,
        max_peers_per_subnet=0,  # ours instead, below
    )
    bound_providers(dht.provider_store)
    _share_providers(host, dht.provider_store)
    _bound_table(host, dht.routing_table)
    if serve:
        host.set_stream_handler(KAD_PROTOCOL, _Served(dht, gate).serve)
    return dht


class Dht:
    """Calls to the running service; see ControlNode."""

    def __init__(self, host: Any, dht: Any, sequence_of: Callable[[str, bytes], int]) -> None:
        self._host = host
        self._dht = dht
        self._own = PeerId(host.get_id().to_base58())
        self._sequence_of = sequence_of
        # Also for what the library does by itself: refreshing its table, and republishing.
        dht.peer_routing.find_closest_peers_network = self._closest_ids

    async def join(self, peer: PeerId) -> None:
        with translated(peer):
            await self._dht.add_peer(ID.from_base58(peer))
            await self._look_up(self._host.get_id().to_bytes(), Message.MessageType.FIND_NODE)

    async def put_value(self, key: str, value: bytes) -> None:
        with translated("DHT"):
            self._dht.validator.validate(key, value)
            store = self._dht.value_store
            # Trap 20: it refuses to replace the copy of one's own earlier value when that has expired since.
            store.remove(key.encode())
            store.put(key.encode(), value)
            # By looking for the value: as a peer's id, this key would be too long for the library.
            closest, _ = await self._look_up(key.encode(), Message.MessageType.GET_VALUE)
            await self._each(closest, lambda their_id: store._store_at_peer(their_id, key.encode(), value))

    async def get_value(self, key: str) -> bytes | None:
        with translated("DHT"):
            _, answers = await self._look_up(key.encode(), Message.MessageType.GET_VALUE)
        held = self._dht.value_store.get(key.encode())
        values = [answer.record.value for answer in answers if answer.HasField("record")]
        values += [] if held is None else [held.value]
        sequences: dict[bytes, int] = {}
        for value in set(values):
            with suppress(ValueError):
                sequences[value] = self._sequence_of(key, value)
        # One honest answer is enough: each value proves itself, and the newest counts.
        return max(sequences, key=sequences.__getitem__, default=None)

    async def provide(self, key: bytes) -> None:
        with translated("DHT"):
            store = self._dht.provider_store
            store.add_provider(key, PeerInfo(self._host.get_id(), self._host.get_addrs()))
            closest, _ = await self._look_up(key, Message.MessageType.GET_PROVIDERS)
            await self._each(closest, lambda their_id: store._send_add_provider(their_id, key))

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        with translated("DHT"):
            _, answers = await self._look_up(key, Message.MessageType.GET_PROVIDERS)
        here = self._dht.provider_store.providers.get(key, {})
        named: list[Sequence[tuple[bytes, Iterable[bytes]]]] = [
            *[[(each.id, each.addrs) for each in answer.providerPeers[:MAX_PROVIDERS_PER_KEY]] for answer in answers],
            [
                (record.provider_info.peer_id.to_bytes(), [each.to_bytes() for each in record.provider_info.addrs])
                for record in here.values()
                if not record.is_expired()  # which the library drops only when it is asked
            ],
        ]
        return await found_in_turn(named)

    async def _closest_ids(self, key: bytes, count: int = REPLICATION) -> list[ID]:
        closest, _ = await self._look_up(key, Message.MessageType.FIND_NODE)
        return closest[:count]

    async def _look_up(self, key: bytes, kind: Any) -> tuple[list[ID], list[Message]]:
        """The closest peers that answer, and all answers."""
        target = place_of_key(key)
        ids = [*self._dht.routing_table.find_local_closest_peers(key, REPLICATION)]
        if len(ids) < REPLICATION:
            ids += [their_id for their_id in self._host.get_connected_peers() if their_id not in ids]
        seeds = [_contact(their_id, self._known_addresses(their_id)) for their_id in ids]
        addresses: dict[str, Sequence[multiaddr.Multiaddr]] = {}
        answers: list[Message] = []
        lookup = Lookup(target, self._own, [seed for seed in seeds if seed is not None])
        changed = trio.Event()
        at_once = trio.CapacityLimiter(MAX_QUERIES_AT_ONCE)

        async def ask(contact: Contact) -> None:
            nonlocal changed
            their_id = ID.from_base58(contact.peer)
            try:
                async with at_once:
                    answer = await self._query(their_id, key, kind, addresses.get(contact.peer, ()))
            except PeerError as error:
                log.debug("%s did not answer in a look-up: %s", contact.peer, error)
                if not isinstance(error, PeerClosed):  # who refuses, because it is busy, is there
                    self._dht.routing_table.remove_peer(their_id)
                lookup.failed(contact.peer)
            else:
                answers.append(answer)
                closer = []
                for named in answer.closerPeers[: 2 * REPLICATION]:
                    await trio.lowlevel.checkpoint()  # one that names many addresses takes a millisecond
                    found = _named(named)
                    if found is not None:
                        closer.append(found[0])
                        addresses.setdefault(found[0].peer, found[1])
                lookup.answered(contact.peer, closer, self._networks_of(their_id))
                await self._dht.routing_table.add_peer(PeerInfo(their_id, self._known_addresses(their_id)))
            changed.set()

        with trio.move_on_after(LOOKUP_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                while True:
                    changed = trio.Event()
                    for contact in lookup.to_ask():
                        nursery.start_soon(ask, contact)
                    if lookup.is_done:
                        break
                    await changed.wait()
        return [ID.from_base58(contact.peer) for contact in lookup.closest()], answers

    async def _query(self, their_id: ID, key: bytes, kind: Any, addresses: Sequence[multiaddr.Multiaddr]) -> Message:
        """One request of the library's protocol.

        Raises:
            PeerError: the peer cannot be reached, or its answer is late or malformed.
        """
        peer = their_id.to_base58()
        with translated(peer), trio.fail_after(DHT_QUERY_TIMEOUT_S):
            if addresses and not self._known_addresses(their_id):
                self._host.get_peerstore().add_addrs(their_id, list(addresses), CONTACT_TTL_S)
            stream = await self._host.new_stream(their_id, [KAD_PROTOCOL])
            async with closing(stream):
                request = Message(type=kind, key=key).SerializeToString()
                await stream.write(encode_uvarint(len(request)) + request)
                data = await read_varint_prefixed_bytes_limited(stream, MAX_DHT_MESSAGE_BYTES)
        answer = Message()
        try:
            answer.ParseFromString(data)
        except DecodeError as error:
            raise RemoteProtocolError(peer, f"{peer} answered a look-up with something malformed") from error
        if answer.type != kind:
            raise RemoteProtocolError(peer, f"{peer} answered a look-up with something else")
        return answer

    async def _each(self, peers: Sequence[ID], work: Callable[[ID], Any]) -> None:
        """Does something with each peer, some at a time, each within the time of a query; failures are theirs."""
        at_once = trio.CapacityLimiter(MAX_QUERIES_AT_ONCE)

        async def one(their_id: ID) -> None:
            async with at_once:
                with suppress(PeerError), translated(their_id.to_base58()), trio.move_on_after(DHT_QUERY_TIMEOUT_S):
                    await work(their_id)

        async with trio.open_nursery() as nursery:
            for their_id in peers:
                nursery.start_soon(one, their_id)

    def _known_addresses(self, their_id: ID) -> list[multiaddr.Multiaddr]:
        try:
            known = self._host.get_peerstore().addrs(their_id)
        except PeerStoreError:
            return []
        return [address for address in known if is_circuit(address) or "/tcp/" in str(address)][:MAX_ADDRESSES_PER_PEER]

    def _networks_of(self, their_id: ID) -> tuple[str, ...]:
        return _networks_of_connections(self._host, their_id)


async def found_in_turn(named: Sequence[Sequence[tuple[bytes, Iterable[bytes]]]]) -> list[FoundPeer]:
    """The providers that answers name, the first of each answer before the second of any, with their addresses.

    What has been read once is not read again: an address takes 0.1 ms, a liar names 1,600 of them, and the host's other
    tasks wait meanwhile.

    Args:
        named: by answer, a provider's id and its addresses, in the library's binary form.
    """
    addresses: dict[bytes, set[PeerAddress]] = {}
    read: set[tuple[bytes, bytes]] = set()
    for their_bytes, raw in take_turns(named):
        known = addresses.get(their_bytes)
        if known is None:
            if len(addresses) >= MAX_FOUND_PROVIDERS or _contact(ID(their_bytes), ()) is None:
                continue
            known = addresses.setdefault(their_bytes, set())
        for data in short_addresses(raw):
            if (their_bytes, data) in read or len(known) >= MAX_ADDRESSES_PER_PEER:
                continue
            read.add((their_bytes, data))
            await trio.lowlevel.checkpoint()
            with suppress(ValueError, multiaddr.exceptions.Error):
                known.update(peer_addresses(ID(their_bytes), [multiaddr.Multiaddr(data)]))
    return [
        FoundPeer(PeerId(ID(their_bytes).to_base58()), tuple(sorted(known)))
        for their_bytes, known in addresses.items()
        if known
    ]


class _Served:
    """The library's handler of DHT streams, with a share for each peer and an end for each stream."""

    def __init__(self, dht: Any, gate: Gate) -> None:
        self._dht = dht
        self._slots = Slots(gate, at_once=MAX_STREAMS_AT_ONCE, per_peer=MAX_STREAMS_PER_PEER)

    async def serve(self, stream: Any) -> None:
        their_id = stream.muxed_conn.peer_id
        with self._slots.slot_for(their_id) as is_granted:
            if not is_granted:
                await stream.reset()
                return
            sender = SENDER.set(PeerId(their_id.to_base58()))
            try:
                with trio.move_on_after(STREAM_TIMEOUT_S) as scope:
                    await self._dht.handle_stream(stream)
                if scope.cancelled_caught:
                    await stream.reset()
            finally:
                SENDER.reset(sender)


def _bound_table(host: Any, table: Any) -> None:
    """Who enters the library's routing table: those who are connected, and few of one network.

    The library also takes whoever is named in an answer, under whatever address, and counts networks by the addresses
    that a peer claims. Here they are counted by where the peer really is.
    """
    add_peer = table.add_peer

    async def add_diverse(peer: Any, **options: Any) -> bool:
        their_id = peer.peer_id if isinstance(peer, PeerInfo) else peer
        if table.peer_in_table(their_id):
            return bool(await add_peer(peer, **options))
        if not host.get_network().get_connections(their_id):
            return False
        bucket = table.find_bucket(their_id)
        in_table = {other: networks_of(other) for other in table.get_peer_ids()}
        in_bucket = [in_table[other] for other in bucket.peer_ids()]
        networks = _networks_of_connections(host, their_id)
        if not may_enter(networks, in_bucket, list(in_table.values())):
            return False
        is_added = bool(await add_peer(peer, **options))
        if is_added:
            entered[their_id] = networks
        return is_added

    # Where each was when it entered: it may be disconnected since.
    entered: dict[ID, tuple[str, ...]] = {}

    def networks_of(their_id: ID) -> tuple[str, ...]:
        if len(entered) > 2 * table.size() + 64:
            for gone in entered.keys() - set(table.get_peer_ids()):
                del entered[gone]
        return entered.get(their_id, ())

    table.add_peer = add_diverse


def _share_providers(host: Any, store: Any) -> None:
    """In a key's full list, the network that has most of it makes way: a flood from one displaces itself.

    The library would refuse all newcomers, so that whoever fills the list first keeps it.
    """
    add_provider = store.add_provider
    networks_of: dict[bytes, dict[str, tuple[str, ...]]] = {}

    def add_shared(key: bytes, provider: Any) -> None:
        held = store.providers.get(key, {})
        name = str(provider.peer_id)
        networks = _networks_of_connections(host, provider.peer_id)
        if len(held) >= MAX_PROVIDERS_PER_KEY and name not in held:
            known = networks_of.get(key, {})
            displaced = to_displace({other: known.get(other, ()) for other in held}, networks)
            if displaced is None:
                return
            del held[displaced]
        add_provider(key, provider)
        held = store.providers.get(key, {})
        if name in held:
            known = networks_of.setdefault(key, {})
            known[name] = networks
            if len(known) > 2 * MAX_PROVIDERS_PER_KEY:
                networks_of[key] = {other: known.get(other, ()) for other in held}
        if len(networks_of) > 2 * len(store.providers) + 64:
            for gone in networks_of.keys() - store.providers.keys():
                del networks_of[gone]

    store.add_provider = add_shared


def _networks_of_connections(host: Any, their_id: ID) -> tuple[str, ...]:
    """The networks that a connected peer is in, or the relays that it is reached through."""
    hosts = {
        str(address[0])
        for connection in host.get_network().get_connections(their_id)
        if (address := connection.muxed_conn.get_remote_address()) is not None
    }
    return _networks_of_hosts(hosts)


def _networks_of_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({key for host in hosts if (key := diversity_key(host)) is not None}))


def _contact(their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> Contact | None:
    """None when it is not the id of an Ed25519 key, as all of ours are."""
    if len(their_id.to_bytes()) != PEER_ID_BYTES:
        return None
    peer = their_id.to_base58()
    try:
        public_key_of(peer)
    except ValueError:
        return None
    hosts = [parts_of(address)[1] for address in addresses if not is_circuit(address)]
    return Contact(peer, place_of(peer), _networks_of_hosts(hosts))


def _named(named: Any) -> tuple[Contact, list[multiaddr.Multiaddr]] | None:
    """A peer that an answer names, with those of its addresses that could be dialled."""
    addresses: list[multiaddr.Multiaddr] = []
    for data in short_addresses(named.addrs):
        with suppress(ConfigError, ValueError, multiaddr.exceptions.Error):
            address = multiaddr.Multiaddr(data)
            if not is_circuit(address):
                parts_of(address)
            addresses.append(address)
    contact = _contact(ID(named.id), addresses)
    return None if contact is None else (contact, addresses)


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
