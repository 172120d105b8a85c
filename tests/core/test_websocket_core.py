"""WebSocket framing: RFC 6455's own examples, every way of cutting a stream, and bytes from strangers."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.wire import WireError
from p2p.websocket_core import Decoder, Opcode, encode

LIMIT = 65_535


def decode(
    stream: bytes, *, masked: bool = False, limit: int = LIMIT, reads: list[int] | None = None
) -> list[tuple[Opcode, bytes]]:
    """All messages of a stream that is read in pieces of the sizes given, over and over."""
    decoder, out, at, turn = Decoder(expect_masked=masked, max_message_bytes=limit), [], 0, 0
    while at < len(stream):
        buffer = decoder.get_buffer()
        size = min(len(buffer), len(stream) - at, reads[turn % len(reads)] if reads else len(buffer))
        buffer[:size] = stream[at : at + size]
        at, turn = at + size, turn + 1
        decoder.written(size)
        while (message := decoder.next()) is not None:
            out.append((message[0], bytes(message[1])))
    return out


def masked(first: int, data: bytes, key: bytes) -> bytes:
    assert len(data) < 126
    return bytes([first, 0x80 | len(data)]) + key + bytes(b ^ key[i % 4] for i, b in enumerate(data))


def test_examples_of_the_specification() -> None:
    """RFC 6455 §5.7, with binary for text."""
    assert encode(Opcode.BINARY, b"Hello", masked=False) == bytes.fromhex("820548656c6c6f")
    assert decode(bytes.fromhex("828537fa213d7f9f4d5158"), masked=True) == [(Opcode.BINARY, b"Hello")]
    assert decode(bytes.fromhex("020348656c80026c6f")) == [(Opcode.BINARY, b"Hello")]
    assert decode(bytes.fromhex("890548656c6c6f")) == [(Opcode.PING, b"Hello")]
    assert encode(Opcode.BINARY, bytes(256), masked=False)[:4] == bytes.fromhex("827e0100")
    assert encode(Opcode.BINARY, bytes(65_536), masked=False)[:10] == bytes.fromhex("827f0000000000010000")


@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 4, 125, 126, 127, 4096, LIMIT - 1, LIMIT]), min_size=1, max_size=5),
    reads=st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
    is_client=st.booleans(),
)
def test_messages_come_back_however_the_stream_is_cut(sizes: list[int], reads: list[int], is_client: bool) -> None:
    messages = [os.urandom(size) for size in sizes]
    stream = b"".join(encode(Opcode.BINARY, message, masked=is_client) for message in messages)
    if max(reads) < 50:
        reads = [*reads, 10_000]
    assert decode(stream, masked=is_client, reads=reads) == [(Opcode.BINARY, message) for message in messages]


@given(data=st.lists(st.binary(max_size=125), min_size=1, max_size=6), key=st.binary(min_size=4, max_size=4))
def test_every_mask_is_taken_off(data: list[bytes], key: bytes) -> None:
    stream = b"".join(masked(0x82, item, key) for item in data)
    assert decode(stream, masked=True, reads=[7]) == [(Opcode.BINARY, item) for item in data]


def test_control_frames_may_come_between_fragments() -> None:
    stream = b"\x02\x02ab" + b"\x89\x01p" + b"\x00\x02cd" + b"\x80\x00" + b"\x88\x02\x03\xe8"
    assert decode(stream) == [(Opcode.PING, b"p"), (Opcode.BINARY, b"abcd"), (Opcode.CLOSE, b"\x03\xe8")]


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"\x82\x81\x00\x00\x00\x00a", id="masked towards a client"),
        pytest.param(b"\x81\x01a", id="text"),
        pytest.param(b"\xc2\x01a", id="compressed"),
        pytest.param(b"\x83\x00", id="unknown opcode"),
        pytest.param(b"\x09\x00", id="fragmented ping"),
        pytest.param(b"\x89\x7e\x00\x7e" + bytes(126), id="long ping"),
        pytest.param(b"\x80\x00", id="continuation of nothing"),
        pytest.param(b"\x02\x01a\x82\x01b", id="new message within fragments"),
        pytest.param(b"\x82\x7f\x00\x00\x00\x00\x00\x01\x00\x00", id="64 KiB"),
        pytest.param(b"\x82\x7f" + b"\xff" * 8, id="2^64 - 1 bytes"),
        pytest.param((b"\x02\x7e\xff\xff" + bytes(LIMIT)) + b"\x00\x01a", id="too long in fragments"),
    ],
)
def test_what_the_specification_or_we_forbid_is_refused(stream: bytes) -> None:
    with pytest.raises(WireError):
        decode(stream)


def test_unmasked_frame_towards_a_server_is_refused() -> None:
    with pytest.raises(WireError, match="masked"):
        decode(b"\x82\x01a", masked=True)


def test_oversized_message_is_refused_at_its_head() -> None:
    decoder = Decoder(expect_masked=False, max_message_bytes=10)
    decoder.get_buffer()[:2] = b"\x82\x0b"
    decoder.written(2)
    with pytest.raises(WireError, match="exceeds 10"):
        decoder.next()


@given(stream=st.binary(max_size=400), is_server=st.booleans(), reads=st.lists(st.integers(1, 50), min_size=1))
def test_random_bytes_decode_or_are_refused(stream: bytes, is_server: bool, reads: list[int]) -> None:
    with contextlib.suppress(WireError):
        for opcode, data in decode(stream, masked=is_server, limit=100, reads=reads):
            assert len(data) <= (100 if opcode is Opcode.BINARY else 125)


@given(stream=st.binary(max_size=300))
def test_there_is_always_room_to_read_more(stream: bytes) -> None:
    decoder = Decoder(expect_masked=False, max_message_bytes=20)
    with contextlib.suppress(WireError):
        for byte in stream:
            buffer = decoder.get_buffer()
            assert len(buffer) > 0
            buffer[0] = byte
            decoder.written(1)
            while decoder.next() is not None:
                pass
