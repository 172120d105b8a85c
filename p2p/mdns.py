"""Finding peers on the local network by multicast DNS (RFC 6762, RFC 6763), in the form of libp2p's mDNS specification.

Service type ``_p2p-fusion._udp.local.``, the specification's form for a private network; a random instance name; one
TXT attribute ``dnsaddr…=MULTIADDR`` per address. What is found is a hint to dial: the peer proves its key there.

The members of a swarm with a key (p2p.swarm_key) use a service type that is derived from it, and encrypt the
attributes. A stranger on the same network sees a service of unknown kind at an address and a port; that two such belong
together he sees too.

zeroconf's own asyncio interface is used instead of libp2p's mDNS, which blocks zeroconf's thread for up to 22 s per
answer, advertises 0.0.0.0, and keeps its subscribers in a global of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress, is_loopback
from p2p.swarm_key import SwarmKey

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

SERVICE_TYPE = "_p2p-fusion._udp.local."
MAX_ADDRESSES = 8
RESOLVE_TIMEOUT_MS = 3000
RETRY_S = 60.0
"""After multicast was found impossible: a machine may be started before its network is."""

log = logging.getLogger(__name__)


class Words(Protocol):
    """How what is advertised is named and written."""

    @property
    def service_type(self) -> str: ...

    def write(self, addresses: Sequence[PeerAddress]) -> dict[str, str | bytes]:
        """TXT attributes, each of at most 255 bytes with its key."""
        ...

    def read(self, properties: Mapping[bytes, bytes | None]) -> list[PeerAddress]:
        """The addresses among TXT attributes; whatever else stands there is left out."""
        ...


class PublicWords:
    """The form of libp2p's specification."""

    service_type = SERVICE_TYPE

    def write(self, addresses: Sequence[PeerAddress]) -> dict[str, str | bytes]:
        return {f"dnsaddr{number or ''}": str(address) for number, address in enumerate(addresses)}

    def read(self, properties: Mapping[bytes, bytes | None]) -> list[PeerAddress]:
        return _parsed(properties, b"dnsaddr", lambda value: value)


class PrivateWords:
    """Attributes ``a0``, ``a1``, … of 12 random bytes and the address, sealed with ChaCha20-Poly1305."""

    def __init__(self, key: SwarmKey) -> None:
        self.service_type = f"_p{key.lan_name}._udp.local."
        self._aead = ChaCha20Poly1305(key.lan_key)

    def write(self, addresses: Sequence[PeerAddress]) -> dict[str, str | bytes]:
        return {
            f"a{number}": self.seal(str(address).encode(), secrets.token_bytes(12))
            for number, address in enumerate(addresses)
        }

    def read(self, properties: Mapping[bytes, bytes | None]) -> list[PeerAddress]:
        return _parsed(properties, b"a", lambda value: self._aead.decrypt(value[:12], value[12:], None))

    def seal(self, text: bytes, nonce: bytes) -> bytes:
        return nonce + self._aead.encrypt(nonce, text, None)


def _parsed(
    properties: Mapping[bytes, bytes | None], prefix: bytes, opened: Callable[[bytes], bytes]
) -> list[PeerAddress]:
    found = []
    for key, value in list(properties.items())[: 2 * MAX_ADDRESSES]:
        if value is not None and key.startswith(prefix):
            with contextlib.suppress(ConfigError, ValueError, InvalidTag):
                found.append(PeerAddress.parse(opened(value).decode()))
    return found


class LanDiscovery:
    """Advertises this peer and reports others, until cancelled.

    Args:
        addresses: gives those of this peer as they are now; ``addresses_changed`` tells that they may be others.
        on_found: called in the event loop, more than once for one peer.
        swarm_key: of the swarm whose members are looked for; None for the public one.
    """

    def __init__(
        self,
        peer: PeerId,
        addresses: Callable[[], Sequence[PeerAddress]],
        on_found: Callable[[PeerId, Sequence[PeerAddress]], None],
        swarm_key: SwarmKey | None = None,
    ) -> None:
        self._peer = peer
        self._addresses = addresses
        self._on_found = on_found
        self._words: Words = PublicWords() if swarm_key is None else PrivateWords(swarm_key)
        self._resolving: set[asyncio.Task[None]] = set()
        self._advertised: list[PeerAddress] = []
        self._restart = asyncio.Event()

    def addresses_changed(self) -> None:
        """They may be others now, or the network is up again: with others, all is begun anew."""
        if self._lan_addresses() != self._advertised:
            self._restart.set()

    def _lan_addresses(self) -> list[PeerAddress]:
        """A name needs unicast DNS, loopback leads every other machine to itself, and who is here needs no relay."""
        found = [
            each
            for each in self._addresses()
            if each.kind in ("ip4", "ip6") and each.via is None and not is_loopback(each.host)
        ]
        return sorted(found[:MAX_ADDRESSES], key=str)

    async def run(self) -> None:
        """Runs until cancelled. Where multicast is impossible it logs that, once, and tries again every minute."""
        problem = ""
        while True:
            self._restart.clear()
            self._advertised = self._lan_addresses()
            try:
                await self._run_once()
                problem = ""
            except OSError as error:
                if str(error) != problem:
                    problem = str(error)
                    log.info("no peers from the local network: %s", problem)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._restart.wait()

    async def _run_once(self) -> None:
        """Until the addresses have changed: the sockets are bound to the interfaces that there are.

        Raises:
            OSError: multicast is impossible.
        """
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

        service_type, addresses = self._words.service_type, self._advertised
        name = f"{secrets.token_hex(16)}.{service_type}"

        def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change.name != "Removed":
                task = asyncio.ensure_future(self._resolve(zeroconf, name))
                self._resolving.add(task)
                task.add_done_callback(self._resolving.discard)

        zeroconf = AsyncZeroconf()
        try:
            if addresses:
                info = AsyncServiceInfo(
                    service_type,
                    name,
                    port=addresses[0].port,
                    properties=self._words.write(addresses),
                    server=f"{name.partition('.')[0]}.local.",
                    addresses=[ipaddress.ip_address(address.host).packed for address in addresses],
                )
                await zeroconf.async_register_service(info)
            browser = AsyncServiceBrowser(zeroconf.zeroconf, service_type, handlers=[changed])
            try:
                await self._restart.wait()
            finally:
                await browser.async_cancel()
        finally:
            for task in self._resolving:
                task.cancel()
            await zeroconf.async_close()

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(self._words.service_type, name)
        if not await info.async_request(zeroconf, RESOLVE_TIMEOUT_MS):
            return
        by_peer: dict[PeerId, list[PeerAddress]] = {}
        for address in self._words.read(info.properties):
            by_peer.setdefault(address.peer, []).append(address)
        for peer, addresses in by_peer.items():
            if peer != self._peer:
                self._on_found(peer, addresses)
