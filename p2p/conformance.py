"""What every Network must do: one suite, run over the WebSocket, libp2p streams and the in-memory twin alike.

After trio's ``check_two_way_stream``: a check gets a Bench, which makes networks that can reach one another, and
raises AssertionError when the implementation is wrong. A new transport is right when it passes CHECKS. The first half
of them looks at links alone, the second at two pools of connections above them.

Above 600 lines: it is a list of checks.
"""

# ruff: noqa: S101 - asserting is the job of this library

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from fusion_node.errors import (
    AddressInUse,
    ConfigError,
    FusionError,
    LocalProtocolError,
    PeerClosed,
    PeerError,
    PeerUnreachable,
    ProtocolVersionMismatch,
    RemoteProtocolError,
)
from fusion_node.types import PeerId
from fusion_node.wire import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, WireError
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.messages import AnyMessage, StatusRequest, StepResult, TensorMeta
from p2p.noise_core import MAX_SEGMENT_PLAIN_BYTES
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Link, Listener, Network

PATIENCE_S = 20.0
"""For what happens in milliseconds, on a machine that does much else."""

MAX_TAKEN_BYTES = 32 * 1024 * 1024
"""What a path to a reader who does not read may take in all before the transport says that it is full: the buffers of
two kernels, at most."""

E = TypeVar("E", bound=BaseException)


class Bench(Protocol):
    """What a check needs of an implementation."""

    def network(self, identity: Identity, *, version: int = PROTOCOL_VERSION) -> Network:
        """A network on a host of its own, or on this one."""
        ...

    def listen_address(self, network: Network) -> str:
        """Where that network can listen on any free port."""
        ...

    def dead_address(self) -> str:
        """Where nobody listens."""
        ...


Check = Callable[[Bench], Awaitable[None]]


class End:
    """Receives for one link and keeps what comes; what begins with ``refuse`` is refused."""

    def __init__(self, link: Link, *, refuse: bytes | None = None) -> None:
        self.link = link
        self.segments: deque[bytes] = deque()
        self.error: PeerError | None = None
        self.places = 0
        self._refuse = refuse
        self._changed = asyncio.Event()
        link.start(self)

    def segment_received(self, plain: bytes) -> None:
        if self._refuse is not None and plain.startswith(self._refuse):
            raise WireError("refused")
        self.segments.append(plain)
        self._changed.set()

    def place_for(self, size: int) -> memoryview | None:
        self.places += 1
        return None if self.places % 2 else memoryview(bytearray(size))  # every other segment goes to a place

    def segment_placed(self, place: memoryview) -> None:
        self.segment_received(bytes(place))

    def link_writable(self) -> None:
        self._changed.set()

    def link_closed(self, error: PeerError) -> None:
        assert self.error is None, "link_closed came twice"
        self.error = error
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def receive(self) -> bytes:
        """The next segment.

        Raises:
            PeerError: what the link ended with, and no segment before.
        """
        await self.until(lambda: bool(self.segments) or self.error is not None)
        if not self.segments:
            assert self.error is not None
            raise self.error
        return self.segments.popleft()

    async def closed(self) -> PeerError:
        await self.until(lambda: self.error is not None)
        assert self.error is not None
        return self.error

    async def send(self, plain: bytes) -> None:
        """Writes when there is room."""
        await self.until(lambda: self.link.is_writable or self.error is not None)
        self.link.write(plain)


@dataclass(slots=True)
class Pair:
    """Two ends of one link, with all that belongs to them."""

    us: Identity
    them: Identity
    our_network: Network
    their_network: Network
    listener: Listener
    ours: Link
    theirs: Link


@asynccontextmanager
async def connected_pair(bench: Bench) -> AsyncIterator[Pair]:
    """A link between two fresh identities, not yet started; everything is closed afterwards."""
    us, them = Identity.generate(), Identity.generate()
    our_network, their_network = bench.network(us), bench.network(them)
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    finished = asyncio.Event()

    async def keep(link: Link) -> None:
        if not accepted.done():
            accepted.set_result(link)
        await finished.wait()

    listener = await their_network.listen(bench.listen_address(their_network), keep)
    ours = await our_network.dial(listener.address, expect=them.peer_id, timeout_s=PATIENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            theirs = await accepted
        yield Pair(us, them, our_network, their_network, listener, ours, theirs)
    finally:
        finished.set()
        await ours.aclose()
        await listener.aclose()


async def _raises(kind: type[E], awaitable: Awaitable[object]) -> E:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await awaitable
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def check_order(bench: Bench) -> None:
    """Segments of all sizes arrive unchanged and in the order sent, in both directions at once."""
    sizes = [1, 4096, 65_000, MAX_SEGMENT_PLAIN_BYTES, 5, 30_000, 1, 8] * 20
    async with connected_pair(bench) as pair:
        ends = [End(pair.ours), End(pair.theirs)]
        sent = [[os.urandom(size) for size in sizes] for _ in ends]

        async def send_all(end: End, segments: list[bytes]) -> None:
            for segment in segments:
                await end.send(segment)

        async def receive_all(end: End, segments: list[bytes]) -> None:
            for segment in segments:
                assert await end.receive() == segment

        await asyncio.gather(
            send_all(ends[0], sent[0]),
            send_all(ends[1], sent[1]),
            receive_all(ends[0], sent[1]),
            receive_all(ends[1], sent[0]),
        )
        for end in ends:
            counters = end.link.counters
            assert counters.segments_in == counters.segments_out == len(sizes)
            assert counters.bytes_in == counters.bytes_out == sum(sizes) + 16 * len(sizes)


async def check_early_segments_wait(bench: Bench) -> None:
    """What comes before a link is started is not lost."""
    async with connected_pair(bench) as pair:
        ours = End(pair.ours)
        sent = [os.urandom(1000) for _ in range(20)]
        for segment in sent:
            await ours.send(segment)
        for _ in range(50):
            await asyncio.sleep(0)
        theirs = End(pair.theirs)
        assert [await theirs.receive() for _ in sent] == sent


async def check_full_transport_says_so(bench: Bench) -> None:
    """To a reader who does not read, a bounded amount can be written; when it reads again, there is room again."""
    async with connected_pair(bench) as pair:
        ours, segment, num_sent = End(pair.ours), bytes(MAX_SEGMENT_PLAIN_BYTES), 0
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        quiet = 0
        while quiet < 20:  # full for good, not only until the kernel has passed on what it had
            if ours.link.is_writable:
                quiet = 0
                ours.link.write(segment)
                num_sent += 1
                assert num_sent * len(segment) < MAX_TAKEN_BYTES
            else:
                quiet += 1
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005 if quiet else 0)
        theirs = End(pair.theirs)
        await ours.until(lambda: ours.link.is_writable)
        ours.link.write(b"last")
        for _ in range(num_sent):
            assert len(await theirs.receive()) == len(segment)
        assert await theirs.receive() == b"last"


async def check_refused_segment_closes(bench: Bench) -> None:
    """A receiver who refuses a segment ends the link; it is counted, and what was said before the end arrives."""
    async with connected_pair(bench) as pair:
        ours, theirs = End(pair.ours), End(pair.theirs, refuse=b"bad")
        ours.link.write(b"good")
        ours.link.write(b"bad")
        ours.link.write(b"never read")
        assert await theirs.receive() == b"good"
        assert isinstance(await theirs.closed(), RemoteProtocolError)
        assert pair.their_network.refused["malformed"] == 1
        assert isinstance(await ours.closed(), PeerClosed)
        assert not theirs.segments


async def check_identities_proven(bench: Bench) -> None:
    """Both sides know the other's peer id, and by which path."""
    async with connected_pair(bench) as pair:
        assert pair.ours.peer == pair.them.peer_id
        assert pair.theirs.peer == pair.us.peer_id
        assert pair.ours.path is pair.theirs.path is pair.our_network.path_of(pair.listener.address)
        link = await pair.our_network.dial(pair.listener.address, expect=pair.them.peer_id, timeout_s=PATIENCE_S)
        await link.aclose()


async def check_wrong_identity_refused(bench: Bench) -> None:
    """A dial that expects somebody else fails and is counted; the listener's accepted links never see it."""
    async with connected_pair(bench) as pair:
        stranger = Identity.generate().peer_id
        dial = pair.our_network.dial(pair.listener.address, expect=stranger, timeout_s=PATIENCE_S)
        assert not isinstance(await _raises(RemoteProtocolError, dial), ProtocolVersionMismatch)
        assert pair.our_network.refused["wrong-key"] == 1
        ours, theirs = End(pair.ours), End(pair.theirs)
        ours.link.write(b"hello")
        assert await theirs.receive() == b"hello"


async def check_version_mismatch(bench: Bench) -> None:
    """Both sides learn of another version, before any identity is shown."""
    older, newer = bench.network(Identity.generate()), bench.network(Identity.generate(), version=PROTOCOL_VERSION + 1)

    async def never(link: Link) -> None:
        raise AssertionError("a link between versions")

    for listening, dialling in ((older, newer), (newer, older)):
        listener = await listening.listen(bench.listen_address(listening), never)
        try:
            error = await _raises(
                ProtocolVersionMismatch, dialling.dial(listener.address, expect=None, timeout_s=PATIENCE_S)
            )
            for version in (PROTOCOL_VERSION, PROTOCOL_VERSION + 1):
                assert f"version {version}" in str(error)
        finally:
            await listener.aclose()
        assert listening.refused["wrong-version"] >= 1
        assert dialling.refused["wrong-version"] >= 1


async def check_close_while_busy(bench: Bench) -> None:
    """Closing either side, while both send, ends both and hangs nobody; afterwards writing does nothing."""
    for closes_ours in (True, False):
        async with connected_pair(bench) as pair:
            links = (pair.ours, pair.theirs) if closes_ours else (pair.theirs, pair.ours)
            closing, other = End(links[0]), End(links[1])
            for _ in range(20):
                for end in (closing, other):
                    end.link.write(bytes(60_000))
            async with asyncio.timeout(PATIENCE_S):
                await closing.link.aclose()
                await closing.link.aclose()
                assert isinstance(await other.closed(), PeerClosed)
                for end in (closing, other):
                    await end.link.wait_closed()
                    end.link.write(b"into the void")
                    assert not end.link.is_writable
            assert closing.error is None


async def check_close_flushes(bench: Bench) -> None:
    """What was written before an orderly close arrives."""
    async with connected_pair(bench) as pair:
        ours, theirs = End(pair.ours), End(pair.theirs)
        for number in range(10):
            ours.link.write(bytes([number]) * 10_000)
        await ours.link.aclose()
        await theirs.closed()
        assert [segment[0] for segment in theirs.segments] == list(range(10))


async def check_abort_reaches_both(bench: Bench) -> None:
    """A cut ends the link on both sides, here with its reason, and not in the call that cuts."""
    async with connected_pair(bench) as pair:
        ours, theirs = End(pair.ours), End(pair.theirs)
        ours.link.abort("for a reason")
        assert ours.error is None
        error = await ours.closed()
        assert isinstance(error, PeerClosed)
        assert "for a reason" in str(error)
        assert isinstance(await theirs.closed(), PeerClosed)


async def check_cancelled_dial(bench: Bench) -> None:
    """A dial can be cancelled at any point, and the next one works."""
    async with connected_pair(bench) as pair:
        for turns in range(8):
            dialling = asyncio.create_task(
                pair.our_network.dial(pair.listener.address, expect=None, timeout_s=PATIENCE_S)
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            dialling.cancel()
            outcome = await _outcome(dialling)
            if not isinstance(outcome, BaseException):
                await outcome.aclose()
        ours, theirs = End(pair.ours), End(pair.theirs)
        ours.link.write(b"hello")
        assert await theirs.receive() == b"hello"


async def check_dial_to_nobody(bench: Bench) -> None:
    """An address where nobody listens, and one that is no address, are unreachable peers."""
    network = bench.network(Identity.generate())
    for address in (bench.dead_address(), "no address", "host:notaport"):
        await _raises(PeerUnreachable, network.dial(address, expect=None, timeout_s=PATIENCE_S))


async def check_listen_errors(bench: Bench) -> None:
    """A port in use and an address that is not ours are told apart; a closed listener frees its port."""
    async with connected_pair(bench) as pair:

        async def ignore(link: Link) -> None:
            await link.wait_closed()

        taken = pair.listener.address
        await _raises(AddressInUse, pair.their_network.listen(taken, ignore))
        for address in ("198.51.100.7:0", "nonsense"):  # TEST-NET-2 belongs to nobody
            error = await _raises(ConfigError, pair.their_network.listen(address, ignore))
            assert not isinstance(error, AddressInUse)
        await pair.listener.aclose()
        again = await pair.their_network.listen(taken, ignore)
        assert again.address == taken
        await again.aclose()


async def check_listener_close_ends_links(bench: Bench) -> None:
    """Closing a listener closes the links that it accepted."""
    async with connected_pair(bench) as pair:
        ours = End(pair.ours)
        await pair.listener.aclose()
        assert isinstance(await ours.closed(), PeerClosed)
        await _raises(PeerUnreachable, pair.our_network.dial(pair.listener.address, expect=None, timeout_s=PATIENCE_S))


R = TypeVar("R")


async def _outcome(awaitable: Awaitable[R]) -> R | FusionError | asyncio.CancelledError:
    """The result, or what was raised: a cancelled task is an outcome here."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await awaitable
    except (FusionError, asyncio.CancelledError) as error:
        return error


# Two pools above the links.


@dataclass(eq=False)
class Node:
    """A pool, and what it has reported."""

    identity: Identity
    network: Network
    frames: list[tuple[AnyMessage, memoryview]] = field(default_factory=list)
    closed: list[FusionError] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    def __post_init__(self) -> None:
        self.pool = LinkPool(self.network, self.identity.peer_id, on_frame=self._on_frame, on_closed=self._on_closed)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    def sequences(self, session: bytes) -> list[int]:
        return [m.sequence for m, _ in self.frames if isinstance(m, StepResult) and m.session == session]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _on_frame(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        self.frames.append((message, payload))
        self.changed.set()

    def _on_closed(self, peer: PeerId, error: FusionError) -> None:
        self.closed.append(error)
        self.changed.set()


@asynccontextmanager
async def pools(bench: Bench) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes that listen; the first is connected to the second."""
    nodes = []
    for _ in range(2):
        identity = Identity.generate()
        node = Node(identity, bench.network(identity))
        node.address = await node.pool.listen(bench.listen_address(node.network))
        nodes.append(node)
    ours, theirs = nodes
    try:
        await ours.pool.connect(theirs.peer, [theirs.address], timeout_s=PATIENCE_S)
        yield ours, theirs
    finally:
        for node in nodes:
            await node.pool.aclose()


def tensor_frame(session: int, number: int, num_bytes: int) -> tuple[AnyMessage, bytes]:
    """A result with ``num_bytes`` of random payload; of more than 64 rows if it has more than a MiB."""
    num_rows = 1 if num_bytes <= 1 << 20 else 128
    assert num_bytes % (4 * num_rows) == 0
    tensor = TensorMeta("f32", num_rows, num_bytes // 4 // num_rows)
    return StepResult(bytes([session]) * 16, 0, number, tuple(range(num_rows)), tensor, ()), os.urandom(num_bytes)


def cut(node: Node, other: Node) -> None:
    """Cuts the present link, as when the network goes away and comes back."""
    end = node.pool._connections[other.peer].end
    if end is not None:
        end.link.abort("cut by the test")


async def check_frames(bench: Bench) -> None:
    """Frames of all sizes arrive unchanged, in order per session, in both directions at once."""
    sizes = [4, 4096, 65_500, 65_536, 70_000, 4, 1_048_576, 2_097_152, 8] * 4
    async with pools(bench) as nodes:
        sent = {
            node.peer: [tensor_frame(number % 3, number, size) for number, size in enumerate(sizes)] for node in nodes
        }
        for number in range(len(sizes)):
            for node, other in (nodes, nodes[::-1]):
                node.pool.send(other.peer, *sent[node.peer][number])
            await asyncio.sleep(0)
        for node, other in (nodes, nodes[::-1]):
            await node.until(lambda node=node: len(node.frames) == len(sizes))  # type: ignore[misc]
            for session in range(3):
                expected = [frame for n, frame in enumerate(sent[other.peer]) if n % 3 == session]
                got = [frame for frame in node.frames if frame[0].session == bytes([session]) * 16]  # type: ignore[union-attr]
                assert [(message, bytes(payload)) for message, payload in got] == expected
            assert node.closed == []


async def check_largest_frame(bench: Bench) -> None:
    """The largest permitted payload arrives, read-only, and outlives its link; a larger frame is refused here."""
    async with pools(bench) as (ours, theirs):
        message, payload = tensor_frame(1, 1, MAX_PAYLOAD_BYTES)
        ours.pool.send(theirs.peer, message, payload)
        try:
            ours.pool.send(theirs.peer, message, bytes(MAX_FRAME_BYTES))
        except LocalProtocolError:
            ours.pool.send(theirs.peer, StatusRequest(1))
        await theirs.until(lambda: len(theirs.frames) == 2)
        assert theirs.frames[0][0] == StatusRequest(1)
        received, kept = theirs.frames[1]
        assert received == message
        assert kept.readonly
    assert kept == payload


async def check_malformed_frame(bench: Bench) -> None:
    """A frame whose header contradicts its payload ends the connection on both sides and is counted."""
    async with pools(bench) as (ours, theirs):
        message, payload = tensor_frame(1, 1, 4096)
        ours.pool.send(theirs.peer, message, payload[:-1])
        await theirs.until(lambda: bool(theirs.closed))
        await ours.until(lambda: bool(ours.closed))
        assert isinstance(theirs.closed[0], RemoteProtocolError)
        assert isinstance(ours.closed[0], PeerClosed)
        assert theirs.pool.counters["refused_malformed"] == 1


async def check_lanes_interleave(bench: Bench) -> None:
    """What is urgent overtakes what is long, unless it belongs to the same session."""
    async with pools(bench) as (ours, theirs):
        ours.pool.send(theirs.peer, *tensor_frame(1, 0, 16 << 20))
        ours.pool.send(theirs.peer, *tensor_frame(1, 1, 4096))
        ours.pool.send(theirs.peer, *tensor_frame(2, 0, 4096))
        ours.pool.send(theirs.peer, StatusRequest(1))
        await theirs.until(lambda: len(theirs.frames) == 4)
        assert theirs.frames[0][0] == StatusRequest(1)
        sessions = [message.session[0] for message, _ in theirs.frames[1:] if isinstance(message, StepResult)]
        assert sessions == [2, 1, 1]
        assert theirs.sequences(bytes([1]) * 16) == [0, 1]


async def check_resume(bench: Bench) -> None:
    """A link that is cut in the middle of frames is made again, and nothing is lost or repeated."""
    async with pools(bench) as nodes:
        ours, theirs = nodes
        for number in range(24):
            for node, other in (nodes, nodes[::-1]):
                node.pool.send(other.peer, *tensor_frame(1, number, (4096, 1_048_576, 4_194_304)[number % 3]))
            if number % 6 == 2:
                received = theirs.pool._connections[ours.peer].transfer
                before = received.received_bytes
                for _ in range(200):
                    if received.received_bytes > before:
                        break
                    await asyncio.sleep(0.001)
                cut(*(nodes if number % 4 else nodes[::-1]))
        for node in nodes:
            await node.until(lambda node=node: len(node.frames) == 24)  # type: ignore[misc]
            assert node.sequences(bytes([1]) * 16) == list(range(24))
            assert node.closed == []
        assert ours.pool.counters["resumed"] >= 1


async def check_tie_break(bench: Bench) -> None:
    """When both dial at once, one link is left, the same for both, and nothing is lost."""
    for _ in range(4):
        nodes = []
        for _ in range(2):
            identity = Identity.generate()
            node = Node(identity, bench.network(identity))
            node.address = await node.pool.listen(bench.listen_address(node.network))
            nodes.append(node)
        ours, theirs = nodes
        try:
            await asyncio.gather(
                *(
                    node.pool.connect(other.peer, [other.address], timeout_s=PATIENCE_S)
                    for node, other in ((ours, theirs), (theirs, ours))
                )
            )
            for number in range(30):
                for node, other in ((ours, theirs), (theirs, ours)):
                    node.pool.send(other.peer, *tensor_frame(1, number, 100_000))
                await asyncio.sleep(0)
            for node in nodes:
                await node.until(lambda node=node: len(node.frames) == 30)  # type: ignore[misc]
                assert node.sequences(bytes([1]) * 16) == list(range(30))
                assert node.closed == []
            for _ in range(2000):
                if [len(node.pool._connections[o.peer].ends) for node, o in (nodes, nodes[::-1])] == [1, 1]:
                    break
                await asyncio.sleep(0.005)
            assert sorted(view.we_dialled for node in nodes for view in node.pool.links()) == [False, True]
        finally:
            for node in nodes:
                await node.pool.aclose()


async def check_goodbye(bench: Bench) -> None:
    """A pool that closes says why, after what it has sent."""
    async with pools(bench) as (ours, theirs):
        ours.pool.send(theirs.peer, *tensor_frame(1, 0, 2 << 20))
        await ours.pool.aclose("until tomorrow")
        await theirs.until(lambda: bool(theirs.closed))
        assert len(theirs.frames) == 1
        assert isinstance(theirs.closed[0], PeerClosed)
        assert "until tomorrow" in str(theirs.closed[0])
        assert ours.closed == []


CHECKS: tuple[Check, ...] = (
    check_order,
    check_early_segments_wait,
    check_full_transport_says_so,
    check_refused_segment_closes,
    check_identities_proven,
    check_wrong_identity_refused,
    check_version_mismatch,
    check_close_while_busy,
    check_close_flushes,
    check_abort_reaches_both,
    check_cancelled_dial,
    check_dial_to_nobody,
    check_listen_errors,
    check_listener_close_ends_links,
    check_frames,
    check_largest_frame,
    check_malformed_frame,
    check_lanes_interleave,
    check_resume,
    check_tie_break,
    check_goodbye,
)
