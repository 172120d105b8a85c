"""Framing and bounded decoding, shared by every protocol of the swarm.

A *frame* is what one message looks like inside a sealed link:

    header length   u32, little-endian
    header          msgpack, at most MAX_HEADER_BYTES
    payload         raw tensor bytes, at most MAX_PAYLOAD_BYTES, may be empty

A *signed envelope* is how a statement travels that third parties can check:

    msgpack array [body: bin, signature: bin(64)], the signature being Ed25519 over ``domain || body``

The domain separates the kinds of statement, so that a signature under one can never be shown as another.
Nothing here does I/O. Every function that reads bytes checks the size first, and raises WireError for whatever is
malformed; the caller, who knows which peer sent it, turns that into RemoteProtocolError.
"""

from __future__ import annotations

import re
import struct
from typing import TypeVar

import msgspec

MAX_HEADER_BYTES = 64 * 1024
"""A 4,096-node tree with parents is 20 KiB; 64 KiB is three times the largest honest header."""

MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
"""256 rows of hidden size 32,768 in float32. Senders split longer prefills into chunks."""

MAX_FRAME_BYTES = 4 + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES

_LENGTH = struct.Struct("<I")
_ENCODE = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class WireError(ValueError):
    """Bytes that do not follow the wire format. The message never repeats the bytes."""


def encode_header(header: object) -> bytes:
    """Encodes a message header, with its length in front.

    Raises:
        WireError: when the header is longer than a receiver would accept.
    """
    body = _ENCODE(header)
    if len(body) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(body)} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(body)) + body


def without_last(struct: msgspec.Struct) -> tuple[object, ...]:
    """What is encoded of an array-like struct whose last field has its default, as before there was that field."""
    tag, values = struct.__struct_config__.tag, msgspec.structs.astuple(struct)[:-1]
    return values if tag is None else (tag, *values)


def split_frame(frame: bytes | bytearray | memoryview) -> tuple[memoryview, memoryview]:
    """Splits a frame into header and payload without copying either.

    Raises:
        WireError: when a length is missing, exceeds its limit, or runs past the end.
    """
    view = memoryview(frame)
    size = len(view)
    if size < 4:
        raise WireError("frame is shorter than its length field")
    (header_bytes,) = _LENGTH.unpack_from(view)
    end = 4 + header_bytes
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError(f"header of {header_bytes} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    if end > size:
        raise WireError("header runs past the end of the frame")
    if size - end > MAX_PAYLOAD_BYTES:
        raise WireError(f"payload of {size - end} bytes exceeds the limit of {MAX_PAYLOAD_BYTES}")
    return view[4:end], view[end:]


def decode_bounded(data: bytes | bytearray | memoryview, kind: type[T], *, limit_bytes: int) -> T:
    """Decodes msgpack of at most ``limit_bytes`` into ``kind``, a msgspec type.

    Raises:
        WireError: when it is too long, is not msgpack, or does not fit the type and its constraints.
    """
    if len(data) > limit_bytes:
        raise WireError(f"message of {len(data)} bytes exceeds the limit of {limit_bytes}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        # The foreign message may quote a value; its class says enough.
        raise WireError(f"not a valid {getattr(kind, '__name__', 'message')}: {type(error).__name__}") from error


def printable(text: str, *, limit: int = 300) -> str:
    """Text of a peer, fit for a terminal and a log: control characters are replaced, length is bounded."""
    return "".join(c if c.isprintable() else "?" for c in text[:limit])


_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff]")
"""Characters that a terminal obeys instead of showing them: C0 but tab and newline, DEL, C1, overrides of the writing
direction; and lone surrogates, as which some encodings pass on bytes."""


def harmless(text: str) -> str:
    """An answer, or a piece of one, fit for a terminal: what would command it becomes "?", and all else stays.

    Each character is judged for itself, so that a sequence that comes in several pieces is harmless too. Carriage
    returns are left out: with a newline they end a line, and without one they overwrite it.
    """
    return _COMMANDS.sub("?", text.replace("\r", ""))


class SignedEnvelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A statement and the signature over it. Whose signature it is, the body says."""

    body: bytes
    signature: bytes
