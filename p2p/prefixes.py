"""IP prefixes: whose neighbour an address is, and which addresses say nothing about that.

Counts of peers per subnet make it dear to be many: somebody who rents a /24 has one neighbourhood, not 256. They would
lock out people who share one network without choosing to, so addresses that are not globally routable (loopback,
private, carrier-grade NAT, link-local) have no subnet here and stand each for itself. Pure functions.
"""

from __future__ import annotations

import functools
import ipaddress
from typing import TypeAlias

Ip: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

HOST_BITS_V6 = 64
"""RFC 6177: an end site gets a /64 at least, and its machines choose addresses in it as they like."""

SUBNET_BITS = {4: 24, 6: 48}
"""The smallest networks that are announced between providers (BGP filters of most), so what one tenant has at least."""

DIVERSITY_BITS = {4: 16, 6: 48}
"""For who is in a routing table (go-libp2p-kbucket's peerdiversity, Bitcoin's addrman): about one hosting company."""


def ip_of(host: str) -> Ip | None:
    """The address that a host is written as; None for a name. IPv4 mapped into IPv6 is the IPv4 address."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, whatever it is written as."""
    ip = ip_of(host)
    return host == "localhost" if ip is None else ip.is_loopback


@functools.lru_cache(maxsize=4096)
def host_key(host: str) -> str:
    """One end site: an IPv4 address, a /64 of IPv6, or the name as it is; local addresses each for itself."""
    ip = ip_of(host)
    if ip is None or ip.version == 4 or not ip.is_global:
        return str(ip or host[:255])
    return str(ipaddress.ip_network((ip, HOST_BITS_V6), strict=False))


@functools.lru_cache(maxsize=4096)
def subnet_key(host: str) -> str | None:
    """The /24 of IPv4 or /48 of IPv6 that a host is in; None for a name and for what is not globally routable."""
    return _network_of(host, SUBNET_BITS)


@functools.lru_cache(maxsize=4096)
def diversity_key(host: str) -> str | None:
    """The /16 of IPv4 or /48 of IPv6 that a host is in; None for a name and for what is not globally routable."""
    return _network_of(host, DIVERSITY_BITS)


def _network_of(host: str, bits: dict[int, int]) -> str | None:
    ip = ip_of(host)
    if ip is None or not ip.is_global:
        return None
    return str(ipaddress.ip_network((ip, bits[ip.version]), strict=False))
