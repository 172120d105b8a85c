"""What peers claim about addresses and protocols: cut to size before the library takes it (traps 36 to 38).

The library takes any number of addresses from a signed record, compares each with all the others, and passes record and
addresses on to whoever asks its DHT: one message froze its thread for a minute, and four identities made a node's
answers too large for everybody. Nothing here needs those records: whom this program dials, it has checked itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import multiaddr
from google.protobuf.message import DecodeError
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.io.exceptions import MessageTooLarge
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.utils.varint import read_length_prefixed_protobuf, read_varint_prefixed_bytes_limited

from p2p.libp2p_adapter.multiaddrs import MAX_ADDRESS_BYTES, MAX_ADDRESSES_PER_PEER

PEER_ID_BYTES = 38
"""Of an Ed25519 key. Longer ones are not even read: base58 takes quadratic time."""

MAX_DHT_REQUEST_BYTES = 32 * 1024
"""A value of 16 KiB, twice. Answers are larger, and have a bound of their own."""

MAX_DHT_KEY_BYTES = 128
MAX_IDENTIFY_BYTES = 16 * 1024
MAX_PROTOCOLS_PER_PEER = 64


def short_addresses(raw: Iterable[bytes]) -> list[bytes]:
    """The first few of what may be addresses, without those that are longer than any of ours."""
    return list(islice((each for each in raw if len(each) <= MAX_ADDRESS_BYTES), MAX_ADDRESSES_PER_PEER))


def bounded_info(info: PeerInfo) -> PeerInfo:
    """The same peer with a few of its addresses."""
    return PeerInfo(info.peer_id, _bounded(info.addrs))


def bound_peerstore(store: Any) -> None:
    """Of each peer the last few addresses are kept, whoever adds them, and no signed records."""
    add_addrs = store.add_addrs

    def add_bounded(their_id: ID, addresses: Iterable[multiaddr.Multiaddr], ttl: int = 0) -> None:
        added = _bounded(addresses)
        data = store.peer_data_map.get(their_id)
        if data is not None:
            others = [each for each in data.addrs if each not in added]
            data.addrs = others[max(0, len(others) + len(added) - MAX_ADDRESSES_PER_PEER) :]
        add_addrs(their_id, added, ttl)

    store.add_addrs = add_bounded
    store.consume_peer_record = lambda envelope, ttl: True


def ignore_signed_record(message: Any, host: Any, their_id: ID | None = None) -> bool:
    """In the place of what reads the signed record in a message of the DHT; True is that it was not wrong."""
    return True


async def update_from_identify(store: Any, their_id: ID, message: Any) -> None:
    """What a peer says of itself when it is asked who it is."""
    message.ClearField("signedPeerRecord")
    _keep_short_addresses(message.listen_addrs)
    del message.protocols[MAX_PROTOCOLS_PER_PEER:]
    await update_peerstore_from_identify(store, their_id, message)


async def read_identify(stream: Any, use_varint_format: bool = True) -> bytes:
    return bytes(await read_length_prefixed_protobuf(stream, use_varint_format, MAX_IDENTIFY_BYTES))


async def read_dht_request(stream: Any, limit_bytes: int) -> bytes:
    """One request to our DHT, as `bounded_request` leaves it."""
    return bounded_request(await read_varint_prefixed_bytes_limited(stream, min(limit_bytes, MAX_DHT_REQUEST_BYTES)))


def bounded_request(data: bytes) -> bytes:
    """A request to our DHT without what we do not want to read in it.

    Raises:
        MessageTooLarge: its key, or the id of a peer in it, is longer than any.
    """
    request = Message()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return data  # the library says so, too
    if len(request.key) > MAX_DHT_KEY_BYTES:
        raise MessageTooLarge("a key in the DHT that is too long")
    request.ClearField("senderRecord")
    request.ClearField("closerPeers")
    del request.providerPeers[1:]  # who announces itself is one
    for provider in request.providerPeers:
        if len(provider.id) > PEER_ID_BYTES:
            raise MessageTooLarge("a peer id that is too long")
        provider.ClearField("signedRecord")
        _keep_short_addresses(provider.addrs)
    return bytes(request.SerializeToString())


def _bounded(addresses: Iterable[multiaddr.Multiaddr]) -> list[multiaddr.Multiaddr]:
    short = (each for each in addresses if len(each.to_bytes()) <= MAX_ADDRESS_BYTES)
    return list(islice(short, MAX_ADDRESSES_PER_PEER))


def _keep_short_addresses(field: Any) -> None:
    """Of a repeated field of a message."""
    short = short_addresses(field)
    del field[:]
    field.extend(short)
