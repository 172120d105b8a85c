"""Yamux as this program uses it: bounded memory per stream, and fewer bytes and calls per message (traps 33 to 35).

The library lets every stream's window grow to 16 MiB, takes what a peer sends beyond it all the same, and answers every
read with a window update. Here a stream that carries bulk gets one window of WINDOW_BYTES, renewed by halves, and one
that does not gets none beyond the 256 KiB that the protocol begins with.

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
        self.target_recv_window = WINDOW_BYTES
        grant = WINDOW_BYTES - left
        self.recv_window += grant
        await self.send_window_update(grant)


class _Buffer(bytearray):
    """Of one stream. The library counts a window that is overdrawn, and does nothing about it."""

    def extend(self, data: Any) -> None:
        if len(self) + len(data) > WINDOW_BYTES + DEFAULT_WINDOW_SIZE:
            raise ConnectionClosedError("the peer sends more than its window")
        super().extend(data)


class _Buffers(dict[int, bytearray]):
    def __setitem__(self, stream_id: int, buffer: bytearray) -> None:
        super().__setitem__(stream_id, _Buffer(buffer))


class BoundedYamux(Yamux):  # type: ignore[misc]
    """See the head of this file."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.stream_buffers: dict[int, bytearray] = _Buffers()

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
