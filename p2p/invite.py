"""Invites: one short string that holds where a swarm can be entered, and the key of a private one, to paste in a chat.

    fusion1         || base58btc( body || checksum )
    fusion-secret1  || the same, with the key of a private swarm in it

The body is msgpack ``[expires_at | nil, key: bin(32) | nil, [[public key: bin(32), [address, …]], …]]``. An address is
``[ip, port]``, ``[nil, port, DNS name]``, or one of the two with the public key of the relay in the fourth place; an IP
address is bin of 4 or 16 bytes. The checksum is the first 4 bytes of SHA-256 over a domain and the body. It finds
typing errors, not forgery: an invite is as trustworthy as who sent it, and the peer that answers must prove the key in
it.

The expiry says until when an invite is meant to be used, and programs keep to it. It takes nothing back: whoever has
read a swarm key has it.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import base58
import msgspec

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.addresses import PeerAddress
from p2p.identity import peer_id_of, public_key_of
from p2p.swarm_key import KEY_BYTES, SwarmKey, swarm_tag

PREFIX = "fusion1"
SECRET_PREFIX = "fusion-secret1"  # noqa: S105  # it marks a secret
"""So that people, and programs that look for secrets, see what it is."""

MAX_INVITE_CHARACTERS = 1024
"""8 peers with 4 addresses each are about 700; base58 costs quadratic time, hence a bound before decoding."""

MAX_PEERS = 8
MAX_ADDRESSES_PER_PEER = 4
_CHECKSUM_BYTES = 4
_DOMAIN = b"fusion-node/invite/1:"
_MAX_SHOWN = 16
"""Characters of a text that is no invite and no address, in an error: the rest may be most of an invite with a key."""

PublicKey: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
IpBytes: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=4, max_length=16)]
Host: TypeAlias = Annotated[str, msgspec.Meta(max_length=253)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    ip: IpBytes | None
    port: Port
    name: Host | None = None
    relay: PublicKey | None = None

    @classmethod
    def of(cls, address: PeerAddress) -> _Address:
        relay = None if address.via is None else public_key_of(address.via)
        if address.kind.startswith("ip"):
            return cls(ipaddress.ip_address(address.host).packed, address.port, None, relay)
        return cls(None, address.port, address.host, relay)

    def address(self, peer: PeerId) -> PeerAddress:
        """Raises ConfigError or ValueError when it is none."""
        match self.ip, self.name:
            case bytes() as ip, None:
                host = str(ipaddress.ip_address(ip))
            case None, str() as host:
                pass
            case _:
                raise ConfigError("an address is either an IP address or a name")
        via = None if self.relay is None else peer_id_of(self.relay)
        return PeerAddress.of(host, self.port, peer, via=via)


class _Peer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    public_key: PublicKey
    addresses: Annotated[tuple[_Address, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES_PER_PEER)]


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=2**40)] | None
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)] | None
    peers: Annotated[tuple[_Peer, ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]


@dataclass(frozen=True, slots=True)
class Invite:
    """Where a swarm can be entered, and until when that is meant to be tried.

    Attributes:
        swarm_key: of a private swarm; then the string is a secret. None for the public swarm, or when who is invited
            has the key already.
    """

    addresses: tuple[PeerAddress, ...]
    expires_at: UnixS | None = None
    swarm_key: SwarmKey | None = field(default=None, repr=False)

    def encode(self) -> str:
        """The string. Of each peer the first four addresses are kept, and the first eight peers, while there is room.

        Raises:
            ConfigError: when there is no address to invite to.
        """
        by_peer: dict[PeerId, list[PeerAddress]] = {}
        for address in self.addresses:
            by_peer.setdefault(address.peer, []).append(address)
        if not by_peer:
            raise ConfigError("an invite needs an address that others can dial: listen on one with --listen")
        chosen = [address for peer in list(by_peer)[:MAX_PEERS] for address in by_peer[peer][:MAX_ADDRESSES_PER_PEER]]
        text = self._encode(chosen)
        while len(text) > MAX_INVITE_CHARACTERS:
            chosen.pop()
            text = self._encode(chosen)
        return text

    def _encode(self, addresses: Sequence[PeerAddress]) -> str:
        by_peer: dict[PeerId, list[_Address]] = {}
        for address in addresses:
            by_peer.setdefault(address.peer, []).append(_Address.of(address))
        peers = tuple(_Peer(public_key_of(peer), tuple(found)) for peer, found in by_peer.items())
        expires_at = None if self.expires_at is None else int(self.expires_at)
        key = self.swarm_key
        body = msgspec.msgpack.encode(_Body(expires_at, None if key is None else key.secret, peers))
        text: str = base58.b58encode(body + _checksum(body)).decode()
        return (PREFIX if key is None else SECRET_PREFIX) + text

    @classmethod
    def parse(cls, text: str, *, now: UnixS) -> Invite:
        """Reads an invite.

        Raises:
            ConfigError: when it is mistyped, cut off, too long, or has expired.
        """
        text = text.strip()
        prefix = _prefix_of(text)
        if prefix is None or len(text) > MAX_INVITE_CHARACTERS:
            raise ConfigError(f"this is not an invite: one starts with {PREFIX} or {SECRET_PREFIX} and is one line")
        try:
            raw = base58.b58decode(text.removeprefix(prefix))
        except ValueError as error:
            # Not the library's error, which quotes the character: the fewer characters of a secret, the better.
            raise ConfigError("the invite has a character that no invite has: copy it again") from error
        body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
        if checksum != _checksum(body):
            raise ConfigError("the invite is mistyped or cut off: copy it again, the whole line")
        try:
            fields = decode_bounded(body, _Body, limit_bytes=MAX_INVITE_CHARACTERS)
            addresses = tuple(
                found.address(peer_id_of(peer.public_key)) for peer in fields.peers for found in peer.addresses
            )
        except (WireError, ConfigError, ValueError) as error:
            raise ConfigError("the invite is of another program version, or broken: ask for a new one") from error
        if fields.expires_at is not None and fields.expires_at <= now:
            raise ConfigError("the invite has expired: ask for a new one")
        return cls(
            addresses,
            None if fields.expires_at is None else UnixS(float(fields.expires_at)),
            None if fields.key is None else SwarmKey(fields.key),
        )


def parse_bootstrap(texts: Sequence[str], *, now: UnixS) -> tuple[PeerAddress, ...]:
    """The peers behind ``--peer`` values, each a multiaddr or an invite, without duplicates and in order.

    Raises:
        ConfigError: when one of them is neither.
    """
    found: dict[PeerAddress, None] = {}
    for text in texts:
        if text.strip().startswith("/"):
            found[PeerAddress.parse(text)] = None
        elif _prefix_of(text.strip()) is not None:
            found.update(dict.fromkeys(Invite.parse(text, now=now).addresses))
        else:
            shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
            raise ConfigError(
                f"{shown!r} is neither a peer address (/ip4/HOST/tcp/PORT/p2p/PEER-ID) nor an invite ({PREFIX}…)"
            )
    return tuple(found)


def swarm_key_of(texts: Sequence[str], given: SwarmKey | None, *, now: UnixS) -> SwarmKey | None:
    """The key to use with these ``--peer`` values: the one that was given, or the one that is in an invite among them.

    Raises:
        ConfigError: an invite cannot be read, or two different keys are meant.
    """
    keys = [] if given is None else [given]
    for text in texts:
        if _prefix_of(text.strip()) is not None:
            invite = Invite.parse(text, now=now)
            keys += [] if invite.swarm_key is None else [invite.swarm_key]
    if any(key != keys[0] for key in keys):
        tags = ", ".join(dict.fromkeys(swarm_tag(key) for key in keys))
        raise ConfigError(f"the keys of different private swarms are given ({tags}): a process is in one of them")
    return keys[0] if keys else None


def _prefix_of(text: str) -> str | None:
    return next((prefix for prefix in (PREFIX, SECRET_PREFIX) if text.startswith(prefix)), None)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + body).digest()[:_CHECKSUM_BYTES]
