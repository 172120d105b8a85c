"""The seam between protocol and network: all that the rest of the program knows of sockets.

Two implementations, the WebSocket (p2p.websocket) and the in-memory twin (p2p.memory), pass the same conformance suite
(p2p.conformance). A Link is sealed and mutually authenticated before anybody sees it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fusion_node.types import PeerId
from p2p.messages import AnyMessage


@dataclass(frozen=True, slots=True)
class Frame:
    """One received message with its payload, a read-only view that stays valid as long as it is referenced."""

    message: AnyMessage
    payload: memoryview


class Link(Protocol):
    """A sealed, ordered, two-way connection with a peer whose identity is proven."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def remote_address(self) -> str:
        """``host:port`` of the other end, for people; never evidence of anything."""
        ...

    async def send(self, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """Sends one frame; returns when the transport has taken it.

        Raises:
            PeerClosed: the link is closed, by either side.
            LocalProtocolError: the frame is larger than a receiver would accept.
        """
        ...

    async def receive(self) -> Frame:
        """The next frame. One caller at a time.

        Raises:
            PeerClosed: the link is closed, by either side.
            RemoteProtocolError: the peer sent something malformed; the link is closed.
        """
        ...

    async def aclose(self) -> None:
        """Closes the link. Safe to call twice, and while another task sends or receives."""
        ...


class Listener(Protocol):
    """Accepts links until closed."""

    @property
    def address(self) -> str:
        """``host:port`` with the port really bound."""
        ...

    async def aclose(self) -> None:
        """Stops accepting and closes the links that it accepted."""
        ...


OnLink: TypeAlias = Callable[[Link], Awaitable[None]]
"""Called in a task of its own per accepted link; the link is closed when it returns."""


class Network(Protocol):
    """Dials and listens under one identity."""

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        """Connects to ``host:port`` and proves both identities.

        Args:
            expect: the peer that must answer; None accepts any and lets the caller read Link.peer.

        Raises:
            PeerUnreachable: nobody answers there in time.
            ProtocolVersionMismatch: the peer speaks another version.
            RemoteProtocolError: another identity answers, or the handshake is malformed.
        """
        ...

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """Accepts links on ``host:port``; port 0 takes any free one.

        Raises:
            AddressInUse: the port is taken.
            ConfigError: the address is not one of this machine or not an address.
        """
        ...
