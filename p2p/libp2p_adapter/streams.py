"""Long-lived streams that carry the messages of data-plane links, pumped to and from the event loop (p2p.stream_pipe).

On the stream every message has its length in front, 32 bits, little-endian: a stream that is reset looks like one that
was closed (trap 11), so nothing is made of what comes before an end inside one.

The library resets a stream whose window is full for five seconds (trap 4 of the measurements). Hence the reader here
always reads, into a bounded queue. Only when that is full does it stop: an honest peer has no more than its credit on
the way, which fits, so who fills it does not keep to the protocol and may be cut off.

Writing costs 1 ms whatever the size, so what has gathered is written at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.peer.id import ID

from fusion_node.errors import PeerClosed, PeerError, PeerTimeout, PeerUnreachable
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import IncomingStream, OpenedStream
from p2p.libp2p_adapter.connections import close_if_dead, close_quietly, path_of, remote_address, stream_on
from p2p.libp2p_adapter.dialing import GONE_S, Dialer
from p2p.libp2p_adapter.messages import translated
from p2p.noise_core import MAX_SEGMENT_BYTES
from p2p.stream_pipe import LENGTH_BYTES, StreamPipe

PROTOCOL = TProtocol("/fusion/data/2")

READ_BYTES = 256 * 1024
WRITE_BYTES = 256 * 1024
"""At a time. Four frames of yamux: a reader then has something to do while the next ones come."""

MAX_WAITING_BYTES = 4 << 20
"""Come in and not yet taken by the event loop. Above every credit window that p2p.transfer_core grants."""

MAX_STREAMS_PER_PEER = 4
"""One is in use, one may be its successor over a better path, and both sides may dial at once."""

MAX_STREAMS = 256

SILENT_S = 3.0
"""Of a link that is cut here, after which the connection below is looked at."""

CLOSE_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class _Died(PeerClosed):
    """The connection that was there had ended without a word."""


class Streams:
    """Opens streams, and accepts those of others once it is told to.

    Args:
        tasks: in which the pumps of opened streams run.
        on_stream: told of each accepted stream; see HostHooks.
    """

    def __init__(
        self, host: Any, dialer: Dialer, tasks: trio.Nursery, on_stream: Callable[[IncomingStream], None]
    ) -> None:
        self._host = host
        self._dialer = dialer
        self._tasks = tasks
        self._on_stream = on_stream
        self._num_streams_of: Counter[ID] = Counter()
        self._is_accepting = False

    def accept(self, accepting: bool) -> None:
        """Whether streams of others are accepted. Those that are open stay so."""
        if accepting and not self._is_accepting:
            self._host.set_stream_handler(PROTOCOL, self._serve)
        elif self._is_accepting and not accepting:
            self._host.remove_stream_handler(PROTOCOL)
        self._is_accepting = accepting

    async def open(self, peer: PeerId, address: PeerAddress | None, pipe: StreamPipe) -> OpenedStream:
        """See ControlNode.open_stream."""
        their_id = ID.from_base58(peer)
        try:
            connection, stream = await self._open(peer, their_id, address)
        except _Died:
            # Which nobody knew until something was sent on it; an address leads to another one.
            connection, stream = await self._open(peer, their_id, address)
        self._tasks.start_soon(self._pump, stream, pipe)
        return OpenedStream(path_of(connection), remote_address(connection))

    async def _open(self, peer: PeerId, their_id: ID, address: PeerAddress | None) -> tuple[Any, Any]:
        connection = None
        try:
            with translated(peer):
                connection = await self._dialer.connection_for(their_id, address)
                with self._dialer.waiting_for(connection):
                    return connection, await stream_on(self._host, connection, PROTOCOL)
        except PeerTimeout:
            if connection is not None:
                # Nothing comes through it any more: the next attempt is not to find it again.
                self._tasks.start_soon(close_quietly, connection)
            raise
        except (PeerClosed, PeerUnreachable) as error:
            if connection is None or address is None:
                raise
            await trio.sleep(GONE_S)
            if connection.is_closed:
                raise _Died(peer, str(error)) from error
            raise

    async def _serve(self, stream: Any) -> None:
        their_id = stream.muxed_conn.peer_id
        if self._num_streams_of[their_id] >= MAX_STREAMS_PER_PEER or self._num_streams_of.total() >= MAX_STREAMS:
            await stream.reset()
            return
        connection, pipe = stream.swarm_conn, StreamPipe()
        peer = PeerId(their_id.to_base58())
        self._num_streams_of[their_id] += 1
        try:
            self._on_stream(IncomingStream(peer, path_of(connection), remote_address(connection), pipe))
            await self._pump(stream, pipe)
        finally:
            self._num_streams_of[their_id] -= 1
            if not self._num_streams_of[their_id]:
                del self._num_streams_of[their_id]

    async def _pump(self, stream: Any, pipe: StreamPipe) -> None:
        if await _Pump(stream, pipe).run():
            self._tasks.start_soon(close_if_dead, self._host, stream.swarm_conn)


def _nobody() -> None: ...


class _Pump:
    """One stream and its pipe."""

    def __init__(self, stream: Any, pipe: StreamPipe) -> None:
        self._stream = stream
        self._pipe = pipe
        self._peer = stream.muxed_conn.peer_id.to_base58()
        self._has_work = trio.Event()
        self._has_room = trio.Event()
        self._last_read = trio.current_time()
        self._scope = trio.CancelScope()
        token = trio.lowlevel.current_trio_token()

        def wake_thread() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._wake, idempotent=True)

        pipe.wake_thread = wake_thread

    async def run(self) -> bool:
        """Until the stream ends, or the pipe's other side ends it. Raises nothing but Cancelled.

        Returns:
            Whether the connection below may be dead: the link was cut here after a silence.
        """
        pipe = self._pipe
        ended: PeerError = PeerClosed(self._peer, f"the connection with {self._peer} ended")
        try:
            with self._scope, translated(self._peer):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read_all)
                    await self._write_all()
                    nursery.cancel_scope.cancel()
        except PeerError as error:
            ended = error
        finally:
            pipe.ended = ended
            pipe.wake_thread = _nobody  # which would keep the connection, and its socket, from the collector
            pipe.wake_loop()
            deadline = trio.current_time() + CLOSE_TIMEOUT_S
            with trio.CancelScope(deadline=deadline, shield=True), suppress(PeerError), translated(self._peer):
                await (self._stream.reset() if pipe.aborting else self._stream.close())
        return self._scope.cancelled_caught and trio.current_time() - self._last_read > SILENT_S

    def _wake(self) -> None:
        self._has_work.set()
        self._has_room.set()
        if self._pipe.aborting:
            self._scope.cancel()

    async def _write_all(self) -> None:
        pipe = self._pipe
        while not pipe.aborting:
            batch, size = [], 0
            while pipe.outgoing and size < WRITE_BYTES:
                message = pipe.outgoing.popleft()
                batch.append(message)
                size += len(message)
            if batch:
                await self._stream.write(b"".join(batch))
                pipe.taken_bytes += size
                pipe.wake_loop()
            elif pipe.closing:
                return
            else:
                await self._has_work.wait()
                self._has_work = trio.Event()

    async def _read_all(self) -> None:
        pipe, buffer = self._pipe, bytearray()
        while True:
            buffer += await self._stream.read(READ_BYTES)
            self._last_read = trio.current_time()
            at = 0
            while len(buffer) - at >= LENGTH_BYTES:
                size = int.from_bytes(buffer[at : at + LENGTH_BYTES], "little")
                if not 0 < size <= MAX_SEGMENT_BYTES:
                    raise ParseError(f"a message of {size} bytes")
                stop = at + LENGTH_BYTES + size
                if stop > len(buffer):
                    break
                pipe.incoming.append(bytes(buffer[at + LENGTH_BYTES : stop]))
                pipe.come_bytes += size
                at = stop
            if at:
                del buffer[:at]
                pipe.wake_loop()
            while pipe.waiting_in_bytes > MAX_WAITING_BYTES:
                await self._has_room.wait()
                self._has_room = trio.Event()
