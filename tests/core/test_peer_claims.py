"""What the adapter cuts from what peers claim, before the library reads or keeps it."""

from __future__ import annotations

from types import SimpleNamespace

import multiaddr
import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host import basic_host
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.exceptions import MessageTooLarge
from libp2p.kad_dht import kad_dht, provider_store
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, create_signed_peer_record

from p2p.libp2p_adapter.claims import MAX_PROTOCOLS_PER_PEER, bound_peerstore, bounded_request
from p2p.libp2p_adapter.hardening import MAX_DHT_MESSAGE_BYTES, MAX_PROVIDERS_PER_KEY, bound_providers
from p2p.libp2p_adapter.multiaddrs import MAX_ADDRESS_BYTES, MAX_ADDRESSES_PER_PEER

KEYS = create_new_key_pair(b"1" * 32)
PEER = ID.from_pubkey(KEYS.public_key)
MANY = [multiaddr.Multiaddr(f"/ip4/9.9.{number >> 8}.{number & 255}/tcp/4600") for number in range(1000)]
ENVELOPE = create_signed_peer_record(PEER, MANY, KEYS.private_key)
LONG = multiaddr.Multiaddr(f"/dns/{'a' * 60}.{'a' * 60}.org/tcp/4600")


def peerstore() -> PeerStore:
    store = PeerStore()
    bound_peerstore(store)
    return store


def test_no_more_than_the_last_few_addresses_of_a_peer_are_kept() -> None:
    store = peerstore()
    store.add_addrs(PEER, MANY[:5], 60)
    store.add_addrs(PEER, [*MANY[3:6], LONG], 60)
    assert store.addrs(PEER) == MANY[:6]
    store.add_addrs(PEER, MANY[10:14], 60)
    assert store.addrs(PEER) == [*MANY[2:6], *MANY[10:14]]
    store.add_addrs(PEER, MANY, 60)
    assert store.addrs(PEER) == MANY[:MAX_ADDRESSES_PER_PEER]
    for each in MANY[20:30]:
        store.add_addr(PEER, each, 60)
    assert store.addrs(PEER) == MANY[22:30]


def test_signed_record_is_not_kept() -> None:
    store = peerstore()
    assert store.consume_peer_record(ENVELOPE, 60)
    assert store.get_peer_record(PEER) is None
    assert not store.has_peer(PEER)


def test_answer_to_who_are_you_is_cut_to_size() -> None:
    store = peerstore()
    message = Identify(signedPeerRecord=ENVELOPE.marshal_envelope())
    message.listen_addrs.extend(each.to_bytes() for each in [LONG, *MANY])
    message.protocols.extend(f"/protocol/{number}" for number in range(1000))
    trio.run(basic_host.update_peerstore_from_identify, store, PEER, message)
    assert store.addrs(PEER) == MANY[:MAX_ADDRESSES_PER_PEER]
    assert len(store.get_protocols(PEER)) == MAX_PROTOCOLS_PER_PEER
    assert store.get_peer_record(PEER) is None


def test_signed_record_in_a_message_of_the_dht_is_not_read() -> None:
    store = peerstore()
    message = Message(senderRecord=ENVELOPE.marshal_envelope())
    assert kad_dht.maybe_consume_signed_record(message, None, PEER)
    assert provider_store.maybe_consume_signed_record(message, None, PEER)
    assert not store.has_peer(PEER)


def test_request_to_the_dht_loses_what_is_not_wanted() -> None:
    request = Message(type=Message.MessageType.ADD_PROVIDER, key=b"key", senderRecord=ENVELOPE.marshal_envelope())
    for _ in range(3):
        provider = request.providerPeers.add(id=PEER.to_bytes(), signedRecord=b"x" * 5000)
        provider.addrs.extend(each.to_bytes() for each in [LONG, *MANY])
        request.closerPeers.add(id=PEER.to_bytes())
    left = Message()
    left.ParseFromString(bounded_request(request.SerializeToString()))
    assert (left.type, left.key) == (request.type, request.key)
    assert not left.HasField("senderRecord")
    assert not left.closerPeers
    (provider,) = left.providerPeers
    assert provider.id == PEER.to_bytes()
    assert not provider.HasField("signedRecord")
    assert list(provider.addrs) == [each.to_bytes() for each in MANY[:MAX_ADDRESSES_PER_PEER]]


def test_value_that_is_put_arrives_unchanged() -> None:
    request = Message(type=Message.MessageType.PUT_VALUE, key=b"key")
    request.record.key, request.record.value = b"key", bytes(range(256)) * 64
    assert bounded_request(request.SerializeToString()) == request.SerializeToString()


def test_ids_and_keys_that_would_take_long_to_read_are_refused() -> None:
    too_long = Message(type=Message.MessageType.FIND_NODE, key=bytes(129))
    with pytest.raises(MessageTooLarge):
        bounded_request(too_long.SerializeToString())
    stranger = Message(type=Message.MessageType.ADD_PROVIDER, key=b"key")
    stranger.providerPeers.add(id=bytes(30_000))
    with pytest.raises(MessageTooLarge):
        bounded_request(stranger.SerializeToString())


def test_nonsense_is_left_to_the_library() -> None:
    assert bounded_request(b"\xff" * 100) == b"\xff" * 100


def test_the_longest_list_of_providers_fits_into_an_answer() -> None:
    store = provider_store.ProviderStore(SimpleNamespace(get_id=lambda: PEER))
    bound_providers(store)
    fat = [multiaddr.Multiaddr(f"/dns/{'a' * 60}.{number:061}/tcp/4600") for number in range(20)]
    assert MAX_ADDRESS_BYTES - 2 <= len(fat[0].to_bytes()) <= MAX_ADDRESS_BYTES
    store.add_provider(b"key", PeerInfo(PEER, fat))
    (held,) = store.get_providers(b"key")
    answer = Message(type=Message.MessageType.GET_PROVIDERS, key=bytes(34))
    for _ in range(MAX_PROVIDERS_PER_KEY):
        provider = answer.providerPeers.add(id=PEER.to_bytes(), connection=1)
        provider.addrs.extend(each.to_bytes() for each in held.addrs)
    for _ in range(21):
        closer = answer.closerPeers.add(id=PEER.to_bytes(), connection=1)
        closer.addrs.extend(each.to_bytes() for each in held.addrs)
    assert len(held.addrs) == MAX_ADDRESSES_PER_PEER
    assert len(answer.SerializeToString()) < MAX_DHT_MESSAGE_BYTES - 4096
