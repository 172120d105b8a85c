"""What the two ends of one link say to each other: it concerns the link, is never sent again, and needs no credit.

The messages of sessions are in p2p.messages; they travel in frames, which p2p.transfer_core carries over links that
come and go. ``docs/protocol-data-plane.md`` describes both for other implementations.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from fusion_node.wire import WireError

TOKEN_BYTES = 8
"""By chance: two connections of one pair of processes must not be taken for each other; nobody else can say Hello."""

MAX_LINK_MESSAGE_BYTES = 4096
"""A Hello with 32 features is 1,300 bytes."""

U32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Offset: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Token: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
PerLane: TypeAlias = Annotated[tuple[Offset, ...], msgspec.Meta(min_length=4, max_length=4)]
"""One number per lane, in the order of p2p.transfer_core.Lane."""


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all; the tag is the first element of the array."""


class Hello(LinkMessage, frozen=True, array_like=True, tag="hello"):
    """The first on every link, in each direction: which connection it is for, and from where on to send.

    Attributes:
        token: the sender's for this connection, drawn when its half of it began.
        their_token: the receiver's, or empty when it is not known yet.
        epoch: of the link; higher than that of every link of the connection that the dialling side has seen.
        received: per lane, what has arrived. The receiver of this sends what comes after it, on this link.
        granted: per lane, up to where may be sent.
        sending: in an answer, per lane from where on its sender sends on this link. That is what it was told has been
            received, unless more has been acknowledged since.
        features: names of what may be used beyond this version of the protocol.
    """

    token: Token
    their_token: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]
    epoch: U32
    received: PerLane
    granted: PerLane
    sending: Annotated[tuple[Offset, ...], msgspec.Meta(max_length=4)] = ()
    features: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=32)], ...], msgspec.Meta(max_length=32)] = ()


class Ack(LinkMessage, frozen=True, array_like=True, tag="ack"):
    """Per lane: what has arrived, which need not be kept any more, and up to where may be sent."""

    received: PerLane
    granted: PerLane


class Ping(LinkMessage, frozen=True, array_like=True, tag="ping"):
    """Asks for a Pong with the same number on the same link: a round trip and a sign of life."""

    number: U32


class Pong(LinkMessage, frozen=True, array_like=True, tag="pong"):
    """Answers a Ping."""

    number: U32


class Goodbye(LinkMessage, frozen=True, array_like=True, tag="bye"):
    """The sender ends the connection on purpose, or does not know it (any more). The link closes after this."""

    reason: Annotated[str, msgspec.Meta(max_length=512)]


AnyLinkMessage: TypeAlias = Hello | Ack | Ping | Pong | Goodbye

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(AnyLinkMessage).decode
LINK_MESSAGE = 0x20
"""The first byte of a segment that holds a link message; msgpack follows. Chunks of frames have smaller ones."""

_HEAD = bytes((LINK_MESSAGE,))


def encode_link_message(message: AnyLinkMessage) -> bytes:
    """The content of the segment that says this."""
    return _HEAD + _ENCODE(message)


def decode_link_message(plain: bytes) -> AnyLinkMessage:
    """Reads the content of a segment.

    Raises:
        WireError: it holds no link message, or a malformed one.
    """
    if len(plain) > MAX_LINK_MESSAGE_BYTES or plain[:1] != _HEAD:
        raise WireError(f"a segment of {len(plain)} bytes holds neither a chunk nor a link message")
    try:
        message: AnyLinkMessage = _DECODE(memoryview(plain)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"not a valid link message: {type(error).__name__}") from error
    return message
