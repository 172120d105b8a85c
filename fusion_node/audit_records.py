"""Lines of an audit log: which tensors a process has sent and was sent, of which session, and under which plan.

A log is a file of JSON objects, one a line. It holds no value of any tensor, no text, no token id and no id of a
session: of rows there are their number, their width and a digest that is keyed with the session's id. Rows of the first
layer are those of a table that everybody has, so that a digest without a key would tell the tokens. Peers and
sessions are numbered in lines of their own, before they are first spoken of.

Source: docs/audit.md, "The log", is written for other implementations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec

VERSION = 1

PLAIN = "f32"
"""``dtype`` of contributions that are as they are."""

MASKED = "u64"
"""``dtype`` of contributions whose sums are masked."""

MAX_LINE_BYTES = 128 * 1024
"""That a reader takes. A plan has 48 KiB at most, and its line, which names peers and no addresses, hardly more."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
U32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Rows: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Layer: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=4096)]
StageIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=127)]
PeerText: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[0-9A-Za-z]+$")]
NameText: TypeAlias = Annotated[str, msgspec.Meta(max_length=96, pattern="^[ -~]*$")]
HexText: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024, pattern="^([0-9a-f]{2})*$")]
SessionText: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class Line(msgspec.Struct, frozen=True, tag_field="is", omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Base of all lines; ``is`` says which it is. What has its default is left out."""


class LogLine(Line, frozen=True, tag="log"):
    """A process begins to record. A file has several when it was started several times."""

    version: int
    peer: PeerText
    software: NameText
    started_at: Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
    """Unix time by this process' clock."""


class PeerLine(Line, frozen=True, tag="peer"):
    """``to`` and ``from`` of the lines that follow speak of this peer by number, from 1."""

    number: Number
    peer: PeerText


class SessionLine(Line, frozen=True, tag="session"):
    """``session`` of the lines that follow speaks of this one by number, from 1. ``name`` is name_of its id."""

    number: Number
    name: SessionText


class Event(Line, frozen=True):
    """Base of the lines about one frame, as it was handed to a connection or came from one.

    ``n`` counts a log's events from 1 without a gap; ``ms`` is since the log began. ``to`` is given of what this
    process has sent, ``from`` of what it was sent.
    """

    n: Number
    ms: Number
    to: Number = 0
    from_: Number = msgspec.field(default=0, name="from")
    session: Number = 0
    epoch: U32 = 0


class StageSeen(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Of a plan. One peer serves the layers whole; several, with as many weights, are the members of a group."""

    start: Layer
    stop: Layer
    peers: Annotated[tuple[PeerText, ...], msgspec.Meta(min_length=1, max_length=16)]
    weights: Annotated[tuple[Number, ...], msgspec.Meta(max_length=16)] = ()


class PlanSeen(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a signed plan says of who may be sent what."""

    user: PeerText
    model_id: NameText
    numerics: NameText
    stages: Annotated[tuple[StageSeen, ...], msgspec.Meta(min_length=1, max_length=128)]
    wire: NameText = ""
    masks: bool = False
    """Contributions are words of 64 bits, of which the receiver can read the sum alone."""


class OpenLine(Event, frozen=True, tag="open"):
    """An ``open``. ``digest`` is of the signed plan as it travelled; no plan: its bytes could not be read. ``grant`` is
    the signed grant (fusion_node.grants) as hexadecimal."""

    stage: StageIndex = 0
    member: StageIndex = 0
    resumes: bool = False
    folds: bool = False
    digest: HexText = ""
    plan: PlanSeen | None = None
    grant: HexText = ""


class GrantLine(Event, frozen=True, tag="grant"):
    """A ``grant``: the signed grant, with a later end than before."""

    grant: HexText = ""


class RevokeLine(Event, frozen=True, tag="revoke"):
    """A ``revoke``: the id of the grant."""

    grant: HexText = ""


class ReleaseLine(Event, frozen=True, tag="released"):
    """A ``released``: the signed release (fusion_node.grants)."""

    release: HexText = ""


class Tensor(Event, frozen=True):
    """Base of the lines about rows. ``bytes`` are those before compression, and so is what ``digest`` is of.

    An empty digest: the rows cannot be decompressed.
    """

    rows: Rows = 0
    width: Number = 0
    dtype: NameText = ""
    bytes: Number = 0
    digest: HexText = ""


class StepLine(Tensor, frozen=True, tag="step"):
    """A ``step``: ``nodes`` of the token tree from ``first`` on, those of which a row came as bits in ``live``.

    ``live`` is hexadecimal, as it travelled, and empty when all came. ``is_tree`` when the entry is no chain that
    commits all of itself.
    """

    sequence: U32 = 0
    first: U32 = 0
    nodes: Rows = 0
    live: HexText = ""
    wanted: Rows = 0
    covers: U32 = 1
    stop: StageIndex | None = None
    is_tree: bool = False


class ResultLine(Tensor, frozen=True, tag="result"):
    """A ``result``."""

    sequence: U32 = 0


class TapsLine(Tensor, frozen=True, tag="taps"):
    """Rows after ``layer`` layers, for a user's drafter."""

    sequence: U32 = 0
    layer: Layer = 0


class PartialsLine(Tensor, frozen=True, tag="partials"):
    """One entry of a ``p``: what the receiver's part of one linear's output gets from the sender's part of its input.

    ``session`` 0: its alias is that of no session that was opened here; ``alias`` tells it then.
    """

    layer: Layer = 0
    exchange: NameText = ""
    """Name of a fusion_node.slices.Exchange, in lower case."""
    node: U32 = 0
    alias: HexText = ""


class OrderLine(Event, frozen=True, tag="resend"):
    """A ``resend``: the receiver is to hand on the rows of ``rows`` positions from ``first`` on."""

    sequence: U32 = 0
    covers: U32 = 1
    first: U32 = 0
    rows: Rows = 0
    stop: StageIndex | None = None


class SaidLine(Event, frozen=True, tag="said"):
    """Any other message of a session, by its tag."""

    what: NameText = ""


class ProbeLine(Event, frozen=True, tag="probe"):
    """A frame that measures bandwidth; whether its payload was zeros."""

    bytes: Number = 0
    zeros: bool = True


class GoneLine(Event, frozen=True, tag="gone"):
    """The connection with ``to`` is over. What was under way on it is lost."""


class FullLine(Event, frozen=True, tag="full"):
    """The log is as long as it may be. What came after this is not in it."""


class EndLine(Event, frozen=True, tag="end"):
    """The process has ended in an orderly way, and nothing is missing."""


AnyEvent: TypeAlias = (
    OpenLine
    | GrantLine
    | RevokeLine
    | ReleaseLine
    | StepLine
    | ResultLine
    | TapsLine
    | PartialsLine
    | OrderLine
    | SaidLine
    | ProbeLine
    | GoneLine
    | FullLine
    | EndLine
)
AnyLine: TypeAlias = LogLine | PeerLine | SessionLine | AnyEvent
AnyTensor: TypeAlias = StepLine | ResultLine | TapsLine | PartialsLine

encode_line: Callable[[AnyLine], bytes] = msgspec.json.Encoder().encode
decode_line: Callable[[bytes], AnyLine] = msgspec.json.Decoder(AnyLine).decode
"""Raises msgspec.MsgspecError for what is no line."""


def name_of(session: bytes) -> str:
    """How logs call a session: everybody who knows its id can reckon it, and nobody else the other way."""
    return hashlib.blake2b(session, digest_size=8, person=b"fusion-audit").hexdigest()


def digest_of(rows: bytes | bytearray | memoryview, session: bytes) -> str:
    """Of the bytes of rows, keyed with the id of their session (16 bytes) or less."""
    return hashlib.blake2b(rows, digest_size=16, key=session).hexdigest()
