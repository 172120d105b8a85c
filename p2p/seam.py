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
from typing import Protocol, TypeAlias, runtime_checkable

from fusion_node.errors import PeerError
from fusion_node.types import PeerId


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
    """What one link has carried: bytes of sealed segments as they arrive and as they are handed to the transport."""

    segments_in: int = 0
    segments_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class LinkReceiver(Protocol):
    """Who a Link reports to. Called by the transport, in the event loop, so it does not wait."""

    def segment_received(self, plain: bytes) -> None:
        """What the next segment holds.

        Raises:
            WireError: the peer does not follow the protocol; the link ends for that reason.
        """
        ...

    def place_for(self, size: int) -> memoryview | None:
        """Where the next segment, which holds ``size`` bytes, may be decrypted to; None: ``segment_received``."""
        ...

    def segment_placed(self, place: memoryview) -> None:
        """As ``segment_received``, but it is where ``place_for`` said."""
        ...

    def link_writable(self) -> None:
        """``is_writable`` has become true again."""
        ...

    def link_closed(self, error: PeerError) -> None:
        """The last call. PeerClosed, or RemoteProtocolError when the peer broke the protocol. Not after ``aclose``."""
        ...


class Link(Protocol):
    """A sealed, ordered, two-way connection with a peer whose identity is proven. It carries segments.

    A segment holds 1 to 65,519 bytes and arrives unchanged, in its place, or the link ends.
    """

    @property
    def peer(self) -> PeerId: ...

    @property
    def path(self) -> PathKind: ...

    @property
    def remote_address(self) -> str:
        """``host:port`` or the multiaddr of the other end, for people; never evidence of anything."""
        ...

    @property
    def counters(self) -> LinkCounters: ...

    @property
    def is_writable(self) -> bool:
        """Whether the transport has room. When not, ``write`` takes more all the same; it is better to wait."""
        ...

    def start(self, receiver: LinkReceiver) -> None:
        """Calls ``receiver`` from now on, first with what has arrived; if the link has ended already, with that."""
        ...

    def write(self, plain: bytes) -> None:
        """Seals and sends one segment. On a link that has ended it does nothing."""
        ...

    def limit_unsent(self, num_bytes: int) -> None:
        """Asks the transport to take no more than this ahead of what the path carries; it may not be able to."""
        ...

    async def wait_closed(self) -> None:
        """Returns when the link has ended, whoever ended it."""
        ...

    def abort(self, why: str = ...) -> None:
        """Cuts the link at once; ``link_closed`` follows soon, with PeerClosed and ``why``."""
        ...

    async def aclose(self) -> None:
        """Closes the link, after what was written. Safe to call twice."""
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

    A message has 1 to MAX_SEGMENT_BYTES (p2p.noise_core). All calls are made in the event loop.
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


@runtime_checkable
class LimitsUnsent(Protocol):
    """A Channel that can keep what it takes ahead of the path small."""

    def limit_unsent(self, num_bytes: int) -> None:
        """Takes no more than about this much before ``write`` returns False."""
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
"""Called in a task of its own per accepted link, before it is started; the link is closed when it returns."""


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
