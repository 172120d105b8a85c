"""The seam between protocol and network: all that the rest of the program knows of sockets.

Two implementations, the WebSocket (p2p.websocket) and the in-memory twin (p2p.memory), pass the same conformance suite
(p2p.conformance). A Link is sealed and mutually authenticated before anybody sees it. Both consist of a Channel, which
carries opaque messages, and of p2p.sealed on top.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from fusion_node.errors import PeerError
from fusion_node.types import PeerId
from p2p.messages import AnyMessage, Frame


@dataclass(slots=True)
class LinkCounters:
    """What one link has carried: bytes on the wire as they arrive and as they are posted, and whole frames."""

    frames_in: int = 0
    frames_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Link(Protocol):
    """A sealed, ordered, two-way connection with a peer whose identity is proven."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def counters(self) -> LinkCounters: ...

    @property
    def queued_bytes(self) -> int:
        """What has been posted and the transport has not yet taken."""
        ...

    @property
    def unfinished_bytes(self) -> int:
        """What is held of a frame that the peer has not yet sent to its end."""
        ...

    @property
    def remote_address(self) -> str:
        """``host:port`` of the other end, for people; never evidence of anything."""
        ...

    def post(self, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """Seals one frame and writes it at once if the transport has room, else queues it. Never waits.

        The payload may be changed as soon as this returns. The caller bounds the queue by looking at ``queued_bytes``.

        Raises:
            PeerClosed: the link is closed, by either side.
            LocalProtocolError: the frame is larger than a receiver would accept.
        """
        ...

    async def drain(self) -> None:
        """Returns when the transport has taken all that was posted before.

        Raises:
            PeerClosed: the link is closed, by either side.
        """
        ...

    async def send(self, message: AnyMessage, payload: bytes | bytearray | memoryview = b"") -> None:
        """``post`` and ``drain``. A frame whose sender is cancelled is sent whole or not at all.

        Raises:
            PeerClosed: the link is closed, by either side.
            LocalProtocolError: the frame is larger than a receiver would accept.
        """
        ...

    async def serve(self, handler: Callable[[Frame], None]) -> NoReturn:
        """Calls ``handler`` with every frame, in order, from the transport itself; instead of ``receive``.

        What the handler raises ends the link and is raised here. So is what ends the link otherwise, as by ``receive``.
        """
        ...

    async def receive(self) -> Frame:
        """The next frame. One caller at a time. A reader who does not come back makes the peer wait.

        Raises:
            PeerClosed: the link is closed, by either side.
            RemoteProtocolError: the peer sent something malformed; the link is closed.
        """
        ...

    def abort(self, why: str = ...) -> None:
        """Cuts the link at once, dropping what is queued; whoever reads gets PeerClosed with ``why``."""
        ...

    async def aclose(self) -> None:
        """Closes the link. Safe to call twice, and while another task sends or receives."""
        ...


class ChannelReceiver(Protocol):
    """Who a Channel reports to. Called by the transport, so it neither waits nor raises."""

    def message_received(self, data: bytes | memoryview) -> None:
        """One message. A view is valid only until this returns."""
        ...

    def channel_closed(self, error: PeerError) -> None:
        """The last call: PeerClosed, or RemoteProtocolError when something came that is no message of agreed size."""
        ...


class Channel(Protocol):
    """Carries messages with their boundaries, in order, unsealed and unauthenticated: what a transport implements."""

    @property
    def remote_address(self) -> str: ...

    def set_receiver(self, receiver: ChannelReceiver) -> None:
        """From now on ``receiver`` is called, first with what came before; if it has ended already, with that."""
        ...

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Hands one message over, at once. An awaitable means: taken, but await this before the next one.

        Raises:
            PeerClosed: the channel is closed.
        """
        ...

    def pause_reading(self) -> None:
        """No more messages until ``resume_reading``; the peer will have to wait."""
        ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        """Cuts the channel at once; ``channel_closed`` follows soon."""
        ...

    async def aclose(self) -> None:
        """Closes in an orderly way within about a second, and releases what the channel holds."""
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

    @property
    def refused(self) -> Mapping[str, int]:
        """How many handshakes, connections and frames were not accepted, by reason."""
        ...

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
