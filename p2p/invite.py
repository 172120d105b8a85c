"""Invites: one short string that holds where a swarm can be entered, to paste into a chat.

    fusion1 || base58btc( msgpack [expires_at | nil, [[public key: bin(32), [[host, port], …]], …]] || checksum )

A host is an IP address or a DNS name; the checksum is the first 4 bytes of SHA-256 over what is
before it, with a domain. It finds typing errors, not forgery: an invite is as trustworthy as who sent it, and the peer
that answers must prove the key in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import base58
import msgspec

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId, UnixS
from fusion_node.wire import WireError, decode_bounded
from p2p.addresses import PeerAddress
from p2p.identity import peer_id_of, public_key_of

PREFIX = "fusion1"
MAX_INVITE_CHARACTERS = 1024
"""8 peers with 4 addresses each are about 700; base58 costs quadratic time, hence a bound before decoding."""

MAX_PEERS = 8
MAX_ADDRESSES_PER_PEER = 4
_CHECKSUM_BYTES = 4
_DOMAIN = b"fusion-node/invite/1:"

Host: TypeAlias = Annotated[str, msgspec.Meta(max_length=253)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Peer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    public_key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    addresses: Annotated[tuple[tuple[Host, Port], ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES_PER_PEER)]


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    expires_at: Annotated[int, msgspec.Meta(ge=0, le=2**40)] | None
    peers: Annotated[tuple[_Peer, ...], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]


@dataclass(frozen=True, slots=True)
class Invite:
    """Where a swarm can be entered, and until when that is meant to be tried."""

    addresses: tuple[PeerAddress, ...]
    expires_at: UnixS | None = None

    def encode(self) -> str:
        """The string. Of each peer the first four addresses are kept, and the first eight peers.

        Raises:
            ConfigError: when there is no address to invite to.
        """
        by_peer: dict[PeerId, list[PeerAddress]] = {}
        for address in self.addresses:
            by_peer.setdefault(address.peer, []).append(address)
        if not by_peer:
            raise ConfigError("an invite needs an address that others can dial: listen on one with --listen")
        peers = tuple(
            _Peer(public_key_of(peer), tuple((a.host, a.port) for a in addresses[:MAX_ADDRESSES_PER_PEER]))
            for peer, addresses in list(by_peer.items())[:MAX_PEERS]
        )
        expires_at = None if self.expires_at is None else int(self.expires_at)
        body = msgspec.msgpack.encode(_Body(expires_at, peers))
        text: str = base58.b58encode(body + _checksum(body)).decode()
        return PREFIX + text

    @classmethod
    def parse(cls, text: str, *, now: UnixS) -> Invite:
        """Reads an invite.

        Raises:
            ConfigError: when it is mistyped, cut off, too long, or has expired.
        """
        text = text.strip()
        if not text.startswith(PREFIX) or len(text) > MAX_INVITE_CHARACTERS:
            raise ConfigError(f"this is not an invite: one starts with {PREFIX} and is one line")
        try:
            raw = base58.b58decode(text.removeprefix(PREFIX))
        except ValueError as error:
            raise ConfigError("the invite has a character that no invite has: copy it again") from error
        body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
        if checksum != _checksum(body):
            raise ConfigError("the invite is mistyped or cut off: copy it again, the whole line")
        try:
            fields = decode_bounded(body, _Body, limit_bytes=MAX_INVITE_CHARACTERS)
            addresses = tuple(
                PeerAddress.of(host, port, peer_id_of(peer.public_key))
                for peer in fields.peers
                for host, port in peer.addresses
            )
        except (WireError, ConfigError) as error:
            raise ConfigError("the invite is of another program version, or broken: ask for a new one") from error
        if fields.expires_at is not None and fields.expires_at <= now:
            raise ConfigError("the invite has expired: ask for a new one")
        return cls(addresses, None if fields.expires_at is None else UnixS(float(fields.expires_at)))


def parse_bootstrap(texts: Sequence[str], *, now: UnixS) -> tuple[PeerAddress, ...]:
    """The peers behind ``--peer`` values, each a multiaddr or an invite, without duplicates and in order.

    Raises:
        ConfigError: when one of them is neither.
    """
    found: dict[PeerAddress, None] = {}
    for text in texts:
        if text.strip().startswith("/"):
            found[PeerAddress.parse(text)] = None
        elif text.strip().startswith(PREFIX):
            found.update(dict.fromkeys(Invite.parse(text, now=now).addresses))
        else:
            raise ConfigError(
                f"{text[:80]!r} is neither a peer address (/ip4/HOST/tcp/PORT/p2p/PEER-ID) nor an invite ({PREFIX}…)"
            )
    return tuple(found)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + body).digest()[:_CHECKSUM_BYTES]
