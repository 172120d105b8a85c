"""Between this program's addresses and the library's."""

from __future__ import annotations

from collections.abc import Sequence

import multiaddr
from libp2p.peer.id import ID

from fusion_node.errors import ConfigError
from p2p.addresses import PeerAddress

MAX_ADDRESSES_PER_PEER = 8

MAX_ADDRESS_BYTES = 128
"""In the library's binary form. An IPv6 address of a relay, and through it to the peer, takes 104; 200 providers with
eight addresses of this size fit into one answer of the DHT."""


def multiaddr_of(address: PeerAddress) -> multiaddr.Multiaddr:
    """As the library dials it: without the peer's id, which is given beside it; through a relay, as it is."""
    text = str(address)
    return multiaddr.Multiaddr(text if address.via is not None else text.rpartition("/p2p/")[0])


def is_circuit(address: multiaddr.Multiaddr) -> bool:
    """Whether it leads through a relay."""
    return "/p2p-circuit" in str(address)


def tcp(host: str, port: int) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def parts_of(address: multiaddr.Multiaddr) -> tuple[str, str, int]:
    """Kind, host and port of a TCP address.

    Raises:
        ConfigError: when it is another kind of address.
    """
    parts = str(address).split("/")
    if len(parts) < 5 or parts[3] != "tcp":
        raise ConfigError(f"{address} is not a TCP address")
    return parts[1], parts[2], int(parts[4])


def peer_addresses(their_id: ID, addresses: Sequence[multiaddr.Multiaddr]) -> list[PeerAddress]:
    """Those of the addresses that we could dial; what strangers store in the DHT may be anything."""
    found = []
    for address in addresses[:MAX_ADDRESSES_PER_PEER]:
        try:
            if is_circuit(address):
                relay = str(address).partition("/p2p-circuit")[0]
                found.append(PeerAddress.parse(f"{relay}/p2p-circuit/p2p/{their_id.to_base58()}"))
                continue
            kind, host, port = parts_of(address)
            found.append(PeerAddress.parse(f"/{kind}/{host}/tcp/{port}/p2p/{their_id.to_base58()}"))
        except (ConfigError, ValueError):
            continue
    return found
