"""Finding peers on the local network by multicast DNS (RFC 6762, RFC 6763), in the form of libp2p's mDNS specification.

Service type ``_p2p-fusion._udp.local.``, the specification's form for a private network; a random instance name; one
TXT attribute ``dnsaddr…=MULTIADDR`` per address. What is found is a hint to dial: the peer proves its key there.

zeroconf's own asyncio interface is used instead of libp2p's mDNS, which blocks zeroconf's thread for up to 22 s per
answer, advertises 0.0.0.0, and keeps its subscribers in a global of the process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fusion_node.errors import ConfigError
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress, is_loopback

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

SERVICE_TYPE = "_p2p-fusion._udp.local."
MAX_ADDRESSES = 8
RESOLVE_TIMEOUT_MS = 3000

log = logging.getLogger(__name__)


class LanDiscovery:
    """Advertises this peer and reports others, until cancelled.

    Args:
        on_found: called in the event loop, more than once for one peer.
    """

    def __init__(
        self,
        peer: PeerId,
        addresses: Sequence[PeerAddress],
        on_found: Callable[[PeerId, Sequence[PeerAddress]], None],
    ) -> None:
        self._peer = peer
        # A name needs unicast DNS, and loopback leads every other machine to itself.
        self._addresses = [a for a in addresses if a.kind in ("ip4", "ip6") and not is_loopback(a.host)][:MAX_ADDRESSES]
        self._on_found = on_found
        self._resolving: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until cancelled. Where multicast is impossible it logs that and returns."""
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

        name = f"{secrets.token_hex(16)}.{SERVICE_TYPE}"

        def changed(zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change.name != "Removed":
                task = asyncio.ensure_future(self._resolve(zeroconf, name))
                self._resolving.add(task)
                task.add_done_callback(self._resolving.discard)

        try:
            zeroconf = AsyncZeroconf()
        except OSError as error:
            log.info("no peers from the local network: %s", error)
            return
        try:
            if self._addresses:
                info = AsyncServiceInfo(
                    SERVICE_TYPE,
                    name,
                    port=self._addresses[0].port,
                    properties={f"dnsaddr{i or ''}": str(address) for i, address in enumerate(self._addresses)},
                    server=f"{name.partition('.')[0]}.local.",
                    addresses=[ipaddress.ip_address(address.host).packed for address in self._addresses],
                )
                await zeroconf.async_register_service(info)
            browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[changed])
            try:
                await asyncio.Event().wait()
            finally:
                await browser.async_cancel()
        except OSError as error:
            log.info("no peers from the local network: %s", error)
        finally:
            for task in self._resolving:
                task.cancel()
            await zeroconf.async_close()

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(zeroconf, RESOLVE_TIMEOUT_MS):
            return
        by_peer: dict[PeerId, list[PeerAddress]] = {}
        for key, value in list(info.properties.items())[: 2 * MAX_ADDRESSES]:
            if not key.startswith(b"dnsaddr") or value is None:
                continue
            try:
                address = PeerAddress.parse(value.decode())
            except (ConfigError, UnicodeDecodeError):
                continue
            by_peer.setdefault(address.peer, []).append(address)
        for peer, addresses in by_peer.items():
            if peer != self._peer:
                self._on_found(peer, addresses)
