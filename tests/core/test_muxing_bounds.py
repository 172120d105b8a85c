"""How much all streams of one connection may hold together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE

from p2p.libp2p_adapter.muxing import MAX_BUFFERED_BYTES, MAX_WIDENED_BYTES, WINDOW_BYTES, BoundedYamux


def connection() -> Any:
    async def make() -> Any:
        return BoundedYamux(SimpleNamespace(is_initiator=True), "a peer")

    return trio.run(make)


def test_what_waits_on_all_streams_together_is_bounded() -> None:
    buffers = connection().stream_buffers
    part = bytes(DEFAULT_WINDOW_SIZE)
    num_full = MAX_BUFFERED_BYTES // len(part)
    for number in range(num_full):
        buffers[number] = bytearray()
        buffers[number].extend(part)
    buffers[num_full] = bytearray()
    with pytest.raises(trio.TooSlowError):
        buffers[num_full].extend(b"x")
    assert sum(map(len, buffers.values())) == MAX_BUFFERED_BYTES


def test_what_has_been_read_makes_room() -> None:
    buffers = connection().stream_buffers
    buffers[1] = bytearray()
    for _ in range(4 * MAX_BUFFERED_BYTES // WINDOW_BYTES):
        buffers[1].extend(bytes(WINDOW_BYTES))
        del buffers[1][:]
    buffers[1].extend(b"x")
    assert buffers[1] == b"x"


def test_windows_of_all_streams_together_are_bounded() -> None:
    conn = connection()
    streams = [SimpleNamespace(stream_id=number, recv_window=DEFAULT_WINDOW_SIZE) for number in range(30)]
    conn.streams = {stream.stream_id: stream for stream in streams}
    for stream in streams:
        stream.recv_window = conn.window_of(stream)
    assert [stream.recv_window for stream in streams[:4]] == [WINDOW_BYTES] * 4
    assert sum(stream.recv_window - DEFAULT_WINDOW_SIZE for stream in streams) <= MAX_WIDENED_BYTES
    assert all(stream.recv_window >= DEFAULT_WINDOW_SIZE for stream in streams)
    del conn.streams[0]
    assert conn.window_of(streams[29]) == WINDOW_BYTES
