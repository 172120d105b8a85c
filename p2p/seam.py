"""The seam between protocol and network: all that the rest of the program knows of sockets.

The implementations (p2p.websocket, libp2p streams, and the in-memory twin p2p.memory) pass the same conformance suite
(p2p.conformance). A Link is sealed and mutually authenticated before anybody sees it. All consist of a Channel, which
carries opaque messages, and of p2p.sealed on top: a new transport implements Channel and Network and calls ``initiate``
and ``respond`` of p2p.sealed. p2p.paths puts several networks together, by the form of the address.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from fusion_node.errors import PeerError
from fusion_node.types import PeerId
from p2p.messages import AnyMessage, Frame


class PathKind(enum.Enum):
    """What a link runs over. ``rank`` orders them: a path of lower rank replaces one of higher rank."""

    DIRECT = "direct"
    """A WebSocket of our own."""
    STREAM = "stream"
    """A libp2p stream to the peer itself, dialled or through a hole in a NAT. Costs six times the CPU."""
    RELAYED = "relayed"
    """A libp2p stream through a third peer's uplink."""
    MEMORY = "memory"
    """Within one process."""

    @property
    def rank(self) -> int:
        return {PathKind.MEMORY: 0, PathKind.DIRECT: 0, PathKind.STREAM: 1, PathKind.RELAYED: 2}[self]


class Gate(Protocol):
    """Who may connect. A reason is a few words for a counter; None lets in. ``host`` is a numeric IP address or empty.

    A listener asks ``refuse_host`` before it spends anything on a connection. If that lets in, it calls ``connected``,
    then exactly once ``proven`` (the identity is known, or the connection ended before), then ``disconnected``.
    """

    def refuse_host(self, host: str) -> str | None: ...

    def refuse_peer(self, peer: PeerId, host: str) -> str | None:
        """Asked once the identity is proven, at the address where it is; and before a dial, with an empty host."""
        ...

    def refuse_dial(self, peer: PeerId, host: str) -> str | None:
        """Asked before a peer is dialled where it is said to be."""
        ...

    def connected(self, host: str) -> None: ...

    def proven(self, host: str) -> None: ...

    def disconnected(self, host: str) -> None: ...

    def report_failure(self, peer: PeerId | None, host: str | None, failure: BaseException) -> None:
        """A handshake or a link ended for this reason, which may be a breach of the protocol."""
        ...

    def refuse_stream(self, peer: PeerId) -> str | None:
        """A peer asks for something on the control plane. Unless it is refused, ``stream_closed`` follows."""
        ...

    def stream_closed(self, peer: PeerId) -> None: ...

    def refuse_request(self, peer: PeerId, num_bytes: int) -> str | None:
        """A request of so many bytes has arrived."""
        ...

    def refuse_traffic(self, peer: PeerId, num_messages: int, num_bytes: int) -> str | None:
        """A peer has sent so much on the data plane since this was last asked."""
        ...


class OpenGate:
    """Lets everybody in."""

    def refuse_host(self, host: str) -> str | None:
        return None

    def refuse_peer(self, peer: PeerId, host: str) -> str | None:
        return None

    def refuse_dial(self, peer: PeerId, host: str) -> str | None:
        return None

    def connected(self, host: str) -> None:
        pass

    def proven(self, host: str) -> None:
        pass

    def disconnected(self, host: str) -> None:
        pass

    def report_failure(self, peer: PeerId | None, host: str | None, failure: BaseException) -> None:
        pass

    def refuse_stream(self, peer: PeerId) -> str | None:
        return None

    def stream_closed(self, peer: PeerId) -> None:
        pass

    def refuse_request(self, peer: PeerId, num_bytes: int) -> str | None:
        return None

    def refuse_traffic(self, peer: PeerId, num_messages: int, num_bytes: int) -> str | None:
        return None


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
        """``host:port`` or the multiaddr of the other end, for people; never evidence of anything."""
        ...

    @property
    def path(self) -> PathKind: ...

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
    """Who a Channel reports to. Called by the transport, in the event loop, so it neither waits nor raises."""

    def message_received(self, data: bytes | memoryview) -> None:
        """One message. A view is valid only until this returns."""
        ...

    def channel_writable(self) -> None:
        """After a ``write`` that returned False: there is room again."""
        ...

    def channel_closed(self, error: PeerError) -> None:
        """The last call: PeerClosed, or RemoteProtocolError when something came that is no message of agreed size."""
        ...


class Channel(Protocol):
    """Carries messages with their boundaries, in order, unsealed and unauthenticated: what a transport implements.

    A message has 1 to 65,535 bytes. All calls are made in the event loop.
    """

    @property
    def remote_address(self) -> str: ...

    @property
    def path(self) -> PathKind: ...

    def set_receiver(self, receiver: ChannelReceiver) -> None:
        """From now on ``receiver`` is called, first with what came before; if it has ended already, with that."""
        ...

    def write(self, data: bytes) -> bool:
        """Takes one message. False: taken, but write no more before ``channel_writable``.

        A channel buffers little beyond what the path carries at once (a segment or two): what it has taken can not be
        overtaken by anything more urgent.

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

    def path_of(self, address: str) -> PathKind:
        """What a link over this address would run over, as far as the address tells."""
        ...

    async def dial(self, address: str, *, expect: PeerId | None, timeout_s: float) -> Link:
        """Connects to an address and proves both identities.

        Args:
            expect: the peer that must answer; None accepts any and lets the caller read Link.peer.

        Raises:
            PeerUnreachable: nobody answers there in time. ``is_refused`` says that certainly nobody listens there.
            ProtocolVersionMismatch: the peer speaks another version.
            RemoteProtocolError: another identity answers, or the handshake is malformed.
        """
        ...

    async def listen(self, address: str, on_link: OnLink) -> Listener:
        """Accepts links on an address; port 0 takes any free one.

        Raises:
            AddressInUse: the port is taken.
            ConfigError: the address is not one of this machine or not an address.
        """
        ...
