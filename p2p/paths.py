"""Several networks as one: which of them dials or listens, the form of the address decides.

An address that begins with a slash is a multiaddr and belongs to the network for libp2p streams; any other is
``host:port`` and belongs to the WebSocket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fusion_node.errors import ConfigError, PeerUnreachable
from fusion_node.types import PeerId
from p2p.seam import Link, Listener, Network, OnLink, PathKind

_RELAY = "/p2p-circuit"


class RoutedNetwork:
    """See the head of this file.

    Args:
        websocket: for ``host:port``.
        libp2p: for multiaddrs; None while there is no libp2p host, and then they are unreachable.
    """

    def __init__(self, websocket: Network, libp2p: Network | None = None) -> None:
        self._websocket = websocket
        self._libp2p = libp2p

    @property
    def refused(self) -> Mapping[str, int]:
        """See Network.refused; of both together."""
        total = Counter(self._websocket.refused)
        if self._libp2p is not None:
            total.update(self._libp2p.refused)
        return total

    def path_of(self, address: str) -> PathKind:
        """See Network.path_of."""
        return path_of_multiaddr(address) if is_multiaddr(address) else self._websocket.path_of(address)

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        """See Network.dial."""
        if not is_multiaddr(address):
            return await self._websocket.dial(address, expect=expect, timeout_s=timeout_s)
        if self._libp2p is None:
            raise PeerUnreachable(expect or address, f"{address} needs libp2p, which does not run here")
        return await self._libp2p.dial(address, expect=expect, timeout_s=timeout_s)

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """See Network.listen."""
        if not is_multiaddr(address):
            return await self._websocket.listen(address, on_link)
        if self._libp2p is None:
            raise ConfigError(f"{address!r} needs libp2p, which does not run here")
        return await self._libp2p.listen(address, on_link)


def is_multiaddr(address: str) -> bool:
    """Whether this address is for libp2p."""
    return address.startswith("/")


def path_of_multiaddr(address: str) -> PathKind:
    """What a libp2p stream to this multiaddr runs over."""
    return PathKind.RELAYED if _RELAY in address else PathKind.STREAM


def best_first(network: Network, addresses: Iterable[str]) -> list[str]:
    """The addresses without repetition, those of better paths before others, otherwise in their order."""
    return sorted(dict.fromkeys(addresses), key=lambda address: network.path_of(address).rank)
