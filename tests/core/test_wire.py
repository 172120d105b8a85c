"""Frames: lengths, limits, and bytes from strangers."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.wire import (
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    SignedEnvelope,
    WireError,
    decode_bounded,
    encode_header,
    harmless,
    split_frame,
)


class Point(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    x: int
    y: int


@given(fields=st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9)), payload=st.binary(max_size=200))
def test_frame_is_split_where_it_was_joined(fields: tuple[int, int], payload: bytes) -> None:
    header, rest = split_frame(encode_header(Point(*fields)) + payload)
    assert decode_bounded(header, Point, limit_bytes=100) == Point(*fields)
    assert rest == payload


def test_split_frame_copies_nothing() -> None:
    frame = bytearray(encode_header(Point(1, 2)) + b"payload")
    _, payload = split_frame(frame)
    frame[-1:] = b"D"
    assert payload == b"payloaD"


def test_header_at_the_limit_is_accepted_and_one_above_refused() -> None:
    fitting = "x" * (MAX_HEADER_BYTES - 3)  # a msgpack str 16 or 32 has 3 or 5 bytes in front
    header, _ = split_frame(encode_header(fitting))
    assert len(header) == MAX_HEADER_BYTES
    with pytest.raises(WireError, match="limit"):
        encode_header("x" * MAX_HEADER_BYTES)
    with pytest.raises(WireError, match="header of"):
        split_frame(struct.pack("<I", MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 1))


def test_payload_at_the_limit_is_accepted_and_one_above_refused() -> None:
    frame = bytes(4) + bytes(MAX_PAYLOAD_BYTES)
    assert len(split_frame(frame)[1]) == MAX_PAYLOAD_BYTES
    with pytest.raises(WireError, match="payload of"):
        split_frame(frame + b"x")
    with pytest.raises(WireError):
        split_frame(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x00\x00\x00", struct.pack("<I", 1), struct.pack("<I", 5) + b"1234"])
def test_truncated_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        split_frame(frame)


@given(data=st.binary(max_size=300))
def test_random_bytes_split_or_are_refused(data: bytes) -> None:
    try:
        header, payload = split_frame(data)
    except WireError:
        return
    assert bytes(header) + bytes(payload) == data[4:]


@given(data=st.binary(max_size=300))
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    for kind in (Point, SignedEnvelope, list):
        with contextlib.suppress(WireError):
            decode_bounded(data, kind, limit_bytes=200)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode_bounded(b"\x91" * 50_000 + b"\x00", list, limit_bytes=10**6)


def test_size_is_checked_before_decoding() -> None:
    with pytest.raises(WireError, match="exceeds the limit of 10"):
        decode_bounded(b"\xc0" * 11, list, limit_bytes=10)


@given(text=st.text(st.characters(codec=None)))
def test_nothing_of_a_text_commands_a_terminal(text: str) -> None:
    shown = harmless(text)
    controls = {chr(c) for c in (*range(0x20), *range(0x7F, 0xA0))} - set("\n\t")
    assert not controls & set(shown)
    assert not any("\ud800" <= c <= "\udfff" for c in shown)
    assert harmless(shown) == shown


def test_what_a_terminal_only_shows_is_left_as_it_is() -> None:
    text = "Zürich,\t東京\nשלום 👩\u200d🔬 \u00a0é e\u0301"
    assert harmless(text) == text
    assert harmless("a\r\nb\x1b[2J\x9b31m\x07\x7f\u202e") == "a\nb?[2J?31m???"


def test_escape_sequence_in_two_pieces_is_as_harmless_as_in_one() -> None:
    assert harmless("\x1b") + harmless("]0;title\x07") == harmless("\x1b]0;title\x07") == "?]0;title?"
