"""What is changed in libp2p itself: constants, bounds and defaults. Importing this module changes the library."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

import libp2p.host.basic_host as basic_host
import libp2p.kad_dht.common as kad_common
import libp2p.kad_dht.kad_dht as kad_dht
import libp2p.kad_dht.peer_routing as kad_peer_routing
import libp2p.kad_dht.provider_store as kad_provider_store
import libp2p.kad_dht.value_store as kad_value_store
import libp2p.network.connection.swarm_connection as swarm_connection
import libp2p.network.swarm as libp2p_swarm
import libp2p.protocol_muxer.multiselect_communicator as multiselect_communicator
import multiaddr
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.host.ping import ID as PING
from libp2p.identity.identify_push.identify_push import ID_PUSH as IDENTIFY_PUSH
from libp2p.io.exceptions import MessageTooLarge
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.rcmgr import ResourceManager
from libp2p.rcmgr.manager import ResourceLimits
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2p.addresses import dialable_hosts
from p2p.control import HostConfig
from p2p.libp2p_adapter.claims import (
    bound_peerstore,
    bounded_info,
    ignore_signed_record,
    read_dht_request,
    read_identify,
    update_from_identify,
)
from p2p.libp2p_adapter.dialing import DIAL_TIMEOUT_S
from p2p.libp2p_adapter.inbound import BoundedConnection
from p2p.libp2p_adapter.multiaddrs import parts_of, tcp
from p2p.libp2p_adapter.muxing import BoundedYamux
from p2p.libp2p_adapter.private_network import protected
from p2p.libp2p_adapter.rebinding import rebind

KAD_PROTOCOL = TProtocol("/fusion/kad/1.0.0")
MAX_MULTISTREAM_BYTES = 64 * 1024
MAX_CONNECTIONS = 256
MAX_STREAMS = 4096
"""In both directions, and as many as the 64 connections of one host can take."""

NEGOTIATE_TIMEOUT_S = 3.0
"""For a stream that comes in to say which protocol it speaks. Two round trips through a relay, and a margin."""

MAX_DHT_MESSAGE_BYTES = 256 * 1024
"""200 providers and 20 peers with eight addresses of the longest kind each take 239,000."""

MAX_DHT_VALUES = 4096
"""Times 16 KiB: at most 64 MiB."""

MAX_DHT_PROVIDER_KEYS = 4096
MAX_PROVIDERS_PER_KEY = 200
"""Trap 9: the library keeps 20, and thus the DHT would never name the 21st node of a model."""

PROVIDER_TTL_S = 600
"""Trap 9: the library's 48 hours make every look-up dial the dead of two days. Nodes provide every 120 s."""

DHT_QUERY_TIMEOUT_S = 4

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


def _remote_address(stream: TrioTCPStream) -> tuple[str, int] | None:
    """Trap 31: the library takes the four parts of an IPv6 address for none, and nobody is told who is there."""
    if stream._cached_remote_address is None:
        with suppress(AttributeError, OSError):  # it is closed
            host, port = stream.stream.socket.getpeername()[:2]
            stream._cached_remote_address = host.partition("%")[0], port
    known: tuple[str, int] | None = stream._cached_remote_address
    return known


multiselect_communicator.read_delim = _read_delim
TrioTCPStream.get_remote_address = _remote_address
rebind(
    "PROTOCOL_ID", KAD_PROTOCOL, kad_common, kad_dht, kad_peer_routing, kad_provider_store, kad_value_store
)  # trap 7: its protocol_prefix argument does nothing
rebind("MAX_DHT_MESSAGE_SIZE", MAX_DHT_MESSAGE_BYTES, kad_dht, kad_peer_routing, kad_provider_store, kad_value_store)
rebind("QUERY_TIMEOUT", DHT_QUERY_TIMEOUT_S, kad_dht, kad_peer_routing, kad_provider_store)
rebind("MAX_VALUE_STORE_SIZE", MAX_DHT_VALUES, kad_value_store)
rebind("BUCKET_SIZE", MAX_PROVIDERS_PER_KEY, kad_provider_store)
rebind("PROVIDER_RECORD_EXPIRATION_INTERVAL", PROVIDER_TTL_S, kad_provider_store)
rebind(  # traps 36 to 38
    "maybe_consume_signed_record",
    ignore_signed_record,
    kad_dht,
    kad_peer_routing,
    kad_provider_store,
    kad_value_store,
)
rebind("read_varint_prefixed_bytes_limited", read_dht_request, kad_dht)
rebind("read_length_prefixed_protobuf", read_identify, basic_host)
rebind("update_peerstore_from_identify", update_from_identify, basic_host)
rebind("SwarmConn", BoundedConnection, swarm_connection)  # trap 39
rebind("new_protected_conn", protected, libp2p_swarm)  # traps 21 to 24


def make_host(config: HostConfig, listen: list[multiaddr.Multiaddr]) -> Any:
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
        muxer_opt={TProtocol(YAMUX_ID): BoundedYamux},
        enable_quic=False,
        psk=None if config.swarm_key is None else config.swarm_key.pnet_psk.hex(),
        resource_manager=resources,
        connection_config=ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            max_connections=MAX_CONNECTIONS,
            dial_timeout=DIAL_TIMEOUT_S,
            inbound_stream_protocol_negotiation_timeout=NEGOTIATE_TIMEOUT_S,
        ),
        addrs_factory=_advertised,
        # What peers claim to see us under is hearsay, and a liar would change what we advertise.
        disable_identify_address_discovery=True,  # trap 16
    )
    # Trap 36: nobody has to tell us anew who it is, and yamux has pings of its own.
    host.remove_stream_handler(IDENTIFY_PUSH)
    host.remove_stream_handler(PING)
    host._push_identify_to_all_peers = _do_nothing
    bound_peerstore(host.get_peerstore())
    swarm = host.get_network()
    # A dial is repeated by who needs it, not three times at once inside a look-up.
    swarm.retry_config = RetryConfig(max_retries=0)
    # Trap 4: it dials everybody that it has heard of until half of high_watermark is reached, whatever the other marks.
    swarm.auto_connector.maybe_connect = _do_nothing
    # Which is also what forgets the peers that this remembers, one for every identity that has ever disconnected.
    swarm.auto_connector.record_disconnect = lambda their_id: None
    return host


async def _do_nothing() -> None: ...


def bound_providers(store: Any) -> None:
    """Trap 9: anybody may announce any number of keys and addresses; the library keeps them all."""
    add_provider = store.add_provider

    def add_bounded(key: bytes, provider: Any) -> None:
        if key in store.providers or len(store.providers) < MAX_DHT_PROVIDER_KEYS:
            add_provider(key, bounded_info(provider))

    store.add_provider = add_bounded


def _advertised(candidates: list[multiaddr.Multiaddr]) -> list[multiaddr.Multiaddr]:
    """Trap 6: 0.0.0.0 would be advertised as it stands."""
    return [
        multiaddr.Multiaddr(tcp(own, port))
        for _, host, port in map(parts_of, candidates)
        for own in dialable_hosts(host)
    ]
