"""Addresses of the control plane: what to listen on, what to tell others, and where a peer can be dialled.

A peer's address is a multiaddr of one of two shapes: ``/ip4/…/tcp/PORT/p2p/PEER`` (or ip6, dns, dns4, dns6), or, for a
peer behind a relay, the relay's address and then ``/p2p-circuit/p2p/PEER``. It is parsed here, without libp2p, so that
a wrong one on the command line is refused at once and by name.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from fusion_node.errors import AddressInUse, ConfigError
from fusion_node.types import PeerId
from p2p.identity import public_key_of
from p2p.interfaces import dialable_hosts as dialable_hosts

MAX_ADDRESS_CHARACTERS = 256
"""The limit of AddressText in records; a DNS name has at most 253."""

_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
_DNS_NAME = re.compile(r"^(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?$")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where one peer can be dialled, and who must answer there.

    Attributes:
        kind, host, port: of the TCP connection: to the peer, or to the relay in front of it.
        via: the relay that carries to the peer and must prove itself at ``host:port``; None when the peer is there.
    """

    kind: str
    host: str
    port: int
    peer: PeerId
    via: PeerId | None = None

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Reads a multiaddr.

        Raises:
            ConfigError: when it is not of a shape that this program dials.
        """
        relay: str | None = None
        match text.strip().split("/") if len(text) <= MAX_ADDRESS_CHARACTERS else ():
            case ["", kind, host, "tcp", port, "p2p", peer] if kind in _KINDS:
                pass
            case ["", kind, host, "tcp", port, "p2p", relay, "p2p-circuit", "p2p", peer] if kind in _KINDS:
                pass
            case _:
                raise ConfigError(
                    f"{text[:160]!r} is not a peer address: write /ip4/HOST/tcp/PORT/p2p/PEER-ID, and behind a "
                    "relay /ip4/HOST/tcp/PORT/p2p/RELAY-ID/p2p-circuit/p2p/PEER-ID"
                )
        for peer_id in (peer,) if relay is None else (relay, peer):
            try:
                public_key_of(peer_id)
            except ValueError as error:
                raise ConfigError(f"{peer_id!r} in {text!r} is not the peer id of an Ed25519 key") from error
        via = None if relay is None else PeerId(relay)
        return cls.of(host, _parse_port(port, text, lowest=1), PeerId(peer), kind=kind, via=via)

    @classmethod
    def of(
        cls, host: str, port: int, peer: PeerId, *, kind: str | None = None, via: PeerId | None = None
    ) -> PeerAddress:
        """Builds an address from its parts; ``kind`` is read off the host when it is None.

        Raises:
            ConfigError: when the host does not fit the kind, or the peer would be its own relay.
        """
        ip = _as_ip(host)
        found = "dns" if ip is None else f"ip{ip.version}"
        kind = kind or found
        if (ip is None and not _DNS_NAME.match(host)) or kind.startswith("ip") != (ip is not None):
            raise ConfigError(f"{host!r} is not a {kind} host")
        if ip is not None and kind != found:
            raise ConfigError(f"{host!r} is not an {kind} address")
        if via == peer:
            raise ConfigError(f"{peer} cannot be its own relay")
        return cls(kind, host, port, peer, via)

    def __str__(self) -> str:
        relay = "" if self.via is None else f"/p2p/{self.via}/p2p-circuit"
        return f"/{self.kind}/{self.host}/tcp/{self.port}{relay}/p2p/{self.peer}"

    def __lt__(self, other: PeerAddress) -> bool:
        # Not the dataclass's own order, which cannot compare a relay with None. Direct addresses come first.
        return self._order() < other._order()

    def _order(self) -> tuple[str, str, str, int, str]:
        return self.via or "", self.kind, self.host, self.port, self.peer


def parse_listen(text: str) -> tuple[str, int]:
    """Reads ``HOST:PORT`` or ``[IPv6]:PORT``; the host is an IP address of this machine, or 0.0.0.0 for all.

    Raises:
        ConfigError: when it is anything else.
    """
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        host = "127.0.0.1"
    if not colon or _as_ip(host) is None:
        raise ConfigError(f"{text!r} is not a listen address: write HOST:PORT with an IP address, like 0.0.0.0:4600")
    return host, _parse_port(port, text, lowest=0)


def parse_announce(text: str) -> tuple[str, int]:
    """Reads ``HOST:PORT`` where others can dial; the host may be a name.

    Raises:
        ConfigError: when it is anything else, or an address that nobody can dial.
    """
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    ip = _as_ip(host)
    if not colon or (ip is None and not _DNS_NAME.match(host)) or (ip is not None and ip.is_unspecified):
        raise ConfigError(
            f"{text!r} is not an address that others can dial: write HOST:PORT, like node.example.org:4600"
        )
    return host, _parse_port(port, text, lowest=1)


def check_bindable(host: str, port: int) -> None:
    """Makes sure that nobody listens there yet.

    Needed because libp2p sets SO_REUSEPORT (trap 14 of docs/protocol-network.md): a second process of the same user
    would listen on the same port without any error, and the kernel would hand each of the two half of the connections.

    Raises:
        AddressInUse: somebody does.
        ConfigError: the address is not one of this machine, or needs rights that this process has not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As every server does: connections of the last run that are still closing shall not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"another program listens on {host}:{port}: choose another port with --listen, "
                    "or port 0 for any free one"
                ) from error
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can dial that host."""
    ip = _as_ip(host)
    return ip is not None and ip.is_loopback


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _parse_port(text: str, whole: str, *, lowest: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and lowest <= int(text) <= 65535):
        raise ConfigError(f"{text!r} in {whole!r} is not a port between {lowest} and 65535")
    return int(text)
