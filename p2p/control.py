"""The seam below discovery: what the asyncio side knows of the libp2p host, in plain types.

Everything that is named here can be imported without importing libp2p, which costs 1.3 s and 88 MB. The host runs in
another thread (p2p.bridge), and the methods of ControlNode run there; the hooks are called there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fusion_node.errors import FusionError
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.reachability_verdict import Observation, Outcome
from p2p.seam import Gate, OpenGate, PathKind
from p2p.stream_pipe import StreamPipe
from p2p.swarm_key import SwarmKey


class ControlPlaneDown(FusionError):
    """The libp2p part of this program has stopped. It is started again by itself; try again in some seconds."""

    retryable = True


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay carries for others. The defaults are for a machine at home that is mostly on.

    A circuit that reaches a limit ends; its peers make another one, and their links go on where they were.
    """

    rate_Bps: float | None = None
    """All circuits together; None leaves it to the line."""
    circuit_bytes: int = 16 << 30
    """In both directions. A token of a large model takes 16 KiB per direction: half a million tokens."""
    circuit_s: float = 24 * 3600.0
    """A conversation of a day. It only bounds what is forgotten: an idle circuit costs a ping per half minute."""
    max_circuits: int = 64
    """Each may hold two windows of 1 MiB while its ends read slowly."""
    max_circuits_per_peer: int = 16
    """Of either end: a node that sixteen users reach through one relay should have others too."""
    max_reservations: int = 128
    """Each keeps a connection open, 60 KB."""
    max_reservations_per_host: int = 8
    """Nodes behind one address: a household, and not somebody with many keys."""


@dataclass(frozen=True, slots=True)
class RelayCounts:
    """What a relay does now, and has carried."""

    num_reservations: int
    num_circuits: int
    carried_bytes: int


@dataclass(frozen=True, slots=True)
class HolePunching:
    """How making the relayed connection with one peer direct has gone."""

    num_tried: int
    is_direct: bool


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """Over what an opened stream runs."""

    path: PathKind
    remote_address: str


@dataclass(frozen=True, slots=True)
class IncomingStream:
    """A stream that a peer, whom the library has authenticated, has opened for the data plane."""

    peer: PeerId
    path: PathKind
    remote_address: str
    pipe: StreamPipe


@dataclass(frozen=True, slots=True)
class HostConfig:
    """What a libp2p host is made from."""

    seed: bytes = field(repr=False)
    listen: tuple[tuple[str, int], ...]
    """IP address and port; empty for a host that only dials."""
    serve: bool
    """Whether to store and answer for others in the DHT."""
    protocols: Mapping[str, int]
    """Ids of the one-request-one-answer protocols that are answered, with the largest request of each in bytes."""
    swarm_key: SwarmKey | None = field(default=None, repr=False)
    """Who does not have it gets no connection. None for the public swarm."""
    relay: RelayLimits | None = None
    """What is carried for others; None carries nothing."""
    accepts_streams: bool = False
    """Whether streams for the data plane are accepted from the start; see ControlNode.accept_streams."""
    gossip: bool = False
    """Whether records are passed on by GossipSub; see ControlNode.gossip."""


SENDER: ContextVar[PeerId | None] = ContextVar("SENDER", default=None)
"""In the host's thread: who brings the value that HostHooks.sequence_of is asked of; None when nobody in particular
does. Not an argument, because the library calls its validator without one."""

Answer: TypeAlias = Callable[[bytes | None], None]
"""Takes the answer to a request, or None to refuse it. Thread-safe, never raises."""


@dataclass(frozen=True, slots=True)
class HostHooks:
    """What the host asks of its owner. Each is called in the host's thread and must return at once."""

    sequence_of: Callable[[str, bytes], int]
    """DHT key and value to the value's sequence number; ValueError when the value may not stand under the key."""
    on_request: Callable[[str, PeerId, bytes, Answer], None]
    """Protocol id, who asks, and what."""
    on_connection: Callable[[PeerId, bool], None]
    """A peer's first connection has opened (True), or its last one has closed (False)."""
    on_reached: Callable[[bytes, str], None] = lambda nonce, local_host: None
    """Somebody has brought 16 bytes to the listener, at this address of the machine. Nothing is known of who."""
    on_stream: Callable[[IncomingStream], None] = lambda stream: None
    """A peer has opened a stream for the data plane."""
    on_path: Callable[[PeerId, PathKind], None] = lambda peer, path: None
    """The best connection with a peer is now of this kind, and was of another one."""
    gate: Gate = field(default_factory=OpenGate)
    """Who may connect and ask. Asked in the host's thread."""
    on_gossip: Callable[[PeerId, bytes], bool] = lambda forwarder, record: False
    """A peer has forwarded a record; whether it is taken, and may be passed on."""
    on_relay_lost: Callable[[PeerId], None] = lambda peer: None
    """A relay at which this host has a reservation has gone."""


@dataclass(frozen=True, slots=True)
class ConnectionEnds:
    """Both ends of a direct TCP connection with a peer, as this machine sees them. IPv4 addresses are written as such.

    Attributes:
        is_outgoing: this side has dialled, so that ``remote`` is where the peer listens.
    """

    local_host: str
    local_port: int
    remote_host: str
    remote_port: int
    is_outgoing: bool


@dataclass(frozen=True, slots=True)
class FoundPeer:
    """A peer that the DHT names, with the addresses that it names. Nothing here is proven."""

    peer: PeerId
    addresses: tuple[PeerAddress, ...]


class ControlNode(Protocol):
    """The running host. Every method is awaited in the host's thread, through Bridge.call.

    Raises, each of them: PeerUnreachable, PeerClosed, PeerTimeout or RemoteProtocolError for what a peer did.
    """

    async def listening(self) -> list[tuple[str, int]]:
        """The sockets that are bound, with the ports that were taken for port 0."""
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[PeerAddress]) -> None:
        """Connects, trying every address. Returns at once when connected already."""
        ...

    async def disconnect(self, peer: PeerId, *, if_spare: bool = False) -> bool:
        """Ends all connections with a peer. With ``if_spare`` only when nothing runs over them: no open stream, and no
        reservation of a peer that this host relays for. Returns whether there is no connection any more."""
        ...

    async def drop_refused(self) -> None:
        """Closes the connections with peers that the gate refuses by now."""
        ...

    async def ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        """The direct connections with a peer; empty when there are none, or only relayed ones."""
        ...

    async def bring_nonce(self, host: str, port: int, nonce: bytes) -> Outcome:
        """Leaves 16 bytes at the control plane's listener there, on a fresh connection; never raises for a peer."""
        ...

    async def probe(self, host: str, port: int, source: tuple[str, int]) -> Observation | None:
        """How the listener there sees a connection that comes from this host and port; None when it fails."""
        ...

    async def request(self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int) -> bytes:
        """Sends one request to a connected peer, and returns its answer of at most ``limit_bytes``."""
        ...

    async def open_stream(self, peer: PeerId, address: PeerAddress | None, pipe: StreamPipe) -> OpenedStream:
        """Opens a stream for the data plane over the best connection that the address stands for, and pumps it.

        Args:
            address: None for whichever connection there is.
        """
        ...

    async def accept_streams(self, accepting: bool) -> None:
        """Whether streams for the data plane are accepted from others from now on."""
        ...

    async def reserve(self, relay: PeerAddress) -> float:
        """Has the relay accept connections for this host, or go on doing so. Returns for how many seconds it will."""
        ...

    async def release(self, relay: PeerId) -> None:
        """Accepts nothing more through that relay."""
        ...

    async def round_trips(self) -> dict[PeerId, float]:
        """Of the peers with a direct connection, in seconds, as far as they have been measured."""
        ...

    async def relay_counts(self) -> RelayCounts | None:
        """None when this host is no relay."""
        ...

    async def hole_punching(self) -> dict[PeerId, HolePunching]:
        """How it went with each peer with which it was tried lately."""
        ...

    async def join_dht(self, peer: PeerId) -> None:
        """Takes the peer into the routing table and looks up the own id, which makes both known to each other."""
        ...

    async def put_value(self, key: str, value: bytes) -> None: ...

    async def get_value(self, key: str) -> bytes | None:
        """The newest valid value that the network holds; never a copy from an earlier look-up."""
        ...

    async def gossip(self, record: bytes) -> None:
        """Publishes a record on the topic; of no effect when HostConfig.gossip is off."""
        ...

    async def provide(self, key: bytes) -> None: ...

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        """Who the network says provides the key; never the answer of an earlier look-up."""
        ...
