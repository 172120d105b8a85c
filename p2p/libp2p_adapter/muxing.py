"""Yamux as this program uses it: bounded memory per stream and connection, fewer bytes and calls (traps 33 to 35, 39).

The library lets every stream's window grow to 16 MiB, takes what a peer sends beyond it all the same, and answers every
read with a window update. Here a stream that carries bulk gets one window of WINDOW_BYTES, renewed by halves, and one
that does not gets none beyond the 256 KiB that the protocol begins with. All streams of a connection together have
bounds of their own, because a peer can open as many as it likes, and fill those that nobody reads.

Importing this module changes the library, as p2p.libp2p_adapter.hardening does.
"""

from __future__ import annotations

from typing import Any

import libp2p.io.trio as io_trio
import libp2p.stream_muxer.muxer_multistream as muxer_multistream
import libp2p.stream_muxer.yamux.yamux as yamux
import libp2p.transport.tcp.tcp as tcp
import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, Yamux, YamuxStream

from p2p.libp2p_adapter.rebinding import rebind

WINDOW_BYTES = 1 << 20
"""What a peer may send before somebody reads. A round trip of 100 ms then still carries 10 MB/s, and 64 streams of a
hostile peer hold 64 MiB, where the library's would hold 1 GiB."""

MAX_INCOMING_STREAMS = 64
"""Of one connection. A relay with all of one peer's 16 circuits, in both directions, has 40, and half as many again of
requests, look-ups and data."""

MAX_WIDENED_BYTES = 3 << 20
"""By which the windows of all streams of a connection together may exceed the first 256 KiB: four that carry bulk at
once have the largest window."""

MAX_BUFFERED_BYTES = 8 << 20
"""Of one connection, come in and not read. These four windows, and those of 16 circuits whose far ends are slow."""

MAX_FRAME_BYTES = 65_519
"""With its header: what one Noise message holds (65,535 less its tag). A full frame of the library's takes two."""

WRITE_TIMEOUT_S = 20.0
"""For one frame to find room in the kernel's buffer. 64 KiB in that time are 26 kbit/s."""

READ_AHEAD_BYTES = 128 * 1024
"""Of a TCP connection at a time; the library asks the kernel twice per Noise message, for its length and for it."""


class BoundedStream(YamuxStream):  # type: ignore[misc]
    """See the head of this file."""

    target_recv_window: int

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        buffered = len(self.conn.stream_buffers.get(self.stream_id, b""))
        left = self.recv_window + buffered
        if left > self.target_recv_window // 2:
            return
        self.target_recv_window = self.conn.window_of(self)
        grant = self.target_recv_window - left
        if grant >= self.target_recv_window // 2:
            self.recv_window += grant
            await self.send_window_update(grant)


class _Buffer(bytearray):
    """Of one stream. The library counts a window that is overdrawn, and does nothing about it."""

    buffers: _Buffers

    def extend(self, data: Any) -> None:
        if len(self) + len(data) > WINDOW_BYTES + DEFAULT_WINDOW_SIZE:
            raise ConnectionClosedError("the peer sends more than its window")
        self.buffers.come(len(data))
        super().extend(data)


class _Buffers(dict[int, bytearray]):
    """Of all streams of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self._at_most_bytes = 0
        """What is in them if nothing has been read since it was last counted."""

    def __setitem__(self, stream_id: int, buffer: bytearray) -> None:
        bounded = _Buffer(buffer)
        bounded.buffers = self
        super().__setitem__(stream_id, bounded)

    def come(self, num_bytes: int) -> None:
        self._at_most_bytes += num_bytes
        if self._at_most_bytes > MAX_BUFFERED_BYTES:
            self._at_most_bytes = num_bytes + sum(map(len, self.values()))
            if self._at_most_bytes > MAX_BUFFERED_BYTES:
                # The one error in which the library closes the connection, from wherever in its reader it comes.
                raise trio.TooSlowError("the peer sends more on all its streams than is read")


class _Arrivals:
    """Takes the place of the channel to which the library's reader hands the streams that a peer opens.

    That one holds ten. With nobody to take them, the reader would wait, and with somebody there is no end to them.
    """

    def __init__(self, conn: BoundedYamux, channel: trio.MemorySendChannel[YamuxStream]) -> None:
        self._conn = conn
        self._channel = channel

    async def send(self, stream: YamuxStream) -> None:
        num_open = sum(not each.is_initiator for each in self._conn.streams.values())
        if num_open > MAX_INCOMING_STREAMS:
            await stream.reset()
        else:
            await self._channel.send(stream)

    def close(self) -> None:
        self._channel.close()


class BoundedYamux(Yamux):  # type: ignore[misc]
    """See the head of this file."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.stream_buffers: dict[int, bytearray] = _Buffers()
        channel: trio.MemorySendChannel[YamuxStream] = self.new_stream_send_channel
        self.new_stream_send_channel: Any = _Arrivals(self, channel)

    def window_of(self, stream: BoundedStream) -> int:
        """How much a peer may send on a stream before more is read, as things are on the others."""
        widened = sum(
            max(0, each.recv_window + len(self.stream_buffers.get(each.stream_id, b"")) - DEFAULT_WINDOW_SIZE)
            for each in self.streams.values()
            if each is not stream
        )
        left = max(0, MAX_WIDENED_BYTES - widened)
        return int(DEFAULT_WINDOW_SIZE + min(left, WINDOW_BYTES - DEFAULT_WINDOW_SIZE))

    def _finalize_stream_locked(self, stream: YamuxStream, *, fully_closed: bool) -> None:
        # Nobody reads what came before a reset. The library keeps it, and the stream, for another minute.
        if fully_closed and stream.reset_received:
            self.stream_buffers.pop(stream.stream_id, None)
        super()._finalize_stream_locked(stream, fully_closed=fully_closed)

    async def _write_frame(self, data: bytes) -> None:
        async with self._write_lock:
            # A frame that is cancelled between its encryption and the socket leaves a gap in the cipher's sequence, and
            # ends the connection for everybody (trap 35).
            with trio.CancelScope(deadline=trio.current_time() + WRITE_TIMEOUT_S, shield=True) as scope:
                await self.secured_conn.write(data)
            if scope.cancelled_caught:
                await self.secured_conn.close()
                raise ConnectionClosedError("the peer took nothing for too long")
        await trio.lowlevel.checkpoint()


class BufferedTCPStream(io_trio.TrioTCPStream):  # type: ignore[misc]
    """Reads ahead."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._ahead = b""
        self._at = 0

    async def read(self, n: int | None = None) -> bytes:
        if self._at < len(self._ahead):
            stop = len(self._ahead) if n is None else self._at + n
            part = self._ahead[self._at : stop]
            self._at += len(part)
            return part
        if n is None or n >= READ_AHEAD_BYTES:
            return bytes(await super().read(n))
        self._ahead, self._at = bytes(await super().read(READ_AHEAD_BYTES)), 0
        return self._ahead and await self.read(n)


rebind("Yamux", BoundedYamux, muxer_multistream)  # it makes its own, whatever class a host is given
rebind("YamuxStream", BoundedStream, yamux)
rebind("MAX_WINDOW_SIZE", WINDOW_BYTES, yamux)  # also the largest frame that is accepted
rebind("MAX_MESSAGE_SIZE", MAX_FRAME_BYTES, yamux)
rebind("TrioTCPStream", BufferedTCPStream, tcp)
