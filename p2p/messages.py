"""The messages of the data plane: what one node says to another inside a sealed link.

Each is the header of a frame (fusion_node.wire); Step, StepResult, StepTaps and Partials are followed by a tensor as
payload.
The page ``docs/protocol-data-plane.md`` describes them for other implementations.

A session is one FIFO log that every stage applies in order. An entry (Step) first names new nodes of the session's
token tree with their parents, then may advance the root: the node and its ancestors become committed, and every node
that is neither its ancestor nor its descendant is dead and frees its KV. Applying an entry twice changes nothing. Plain
decode is the same log with a chain of one node per entry. Node 0 is the empty prefix, so a node's position is the
number of its ancestors less one, and no position travels.

Above 600 lines: all of them are one union, which is decoded at once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import struct
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from fusion_node.slices import MASK_KEY_BYTES, MAX_MEMBERS, MIN_MASKED_MEMBERS
from fusion_node.wire import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    WireError,
    encode_header,
    without_last,
)

MAX_NODES_PER_STEP = 4096

MAX_TAPS = 8
"""Layers whose rows one session may ask for. Published heads take three, of which the last is often returned anyway."""

MAX_TAPPED_NODES = 64
"""Of one step: who asks for rows beside the answer asks for what is probably on the path."""

MAX_UNIT_ROWS = 256
"""Of one entry of Partials: a step with more rows is passed through a group in pieces of so many."""

MAX_PARTIALS = 1024
"""Entries of one message: all sessions that a node serves, with some steps each."""

FUSION_FEATURE = "fusion"
"""In the ``hello`` of a node that knows plans with groups, and Partials."""

MASKS_FEATURE = "masked-sums"
"""In the ``hello`` of a node that knows plans whose sums are masked."""

DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
"""Lossless encodings: IEEE 754 and bfloat16, little-endian, row-major, no padding."""

INT8 = "i8b32"
"""The lossy encoding, see p2p.tensor_wire: used where the signed plan says so."""

INT8_BLOCK = 32
"""Values of a row that share a scale of two bytes. Measured on the built-in model in four hops: the mean divergence of
the next token's distribution is 0.0026 nats with 32, 0.0039 with 64, and a row is 3 % longer."""

ZSTD = "zs1"
"""Byte planes in one Zstandard frame, see p2p.tensor_wire."""

MAX_EXPANSION = 64
"""Of a compressed payload: nobody is made to hold rows that cost their sender next to nothing. Rows of hidden state
become at most three times as large again."""

SESSION_BYTES = 16
SessionBytes: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=SESSION_BYTES, max_length=SESSION_BYTES)]
U32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
NodeIds: TypeAlias = Annotated[tuple[U32, ...], msgspec.Meta(max_length=MAX_NODES_PER_STEP)]
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
Code: TypeAlias = Annotated[str, msgspec.Meta(max_length=32)]
StageIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=127)]
MemberIndex: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMBERS - 1)]
MaskKeys: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MASK_KEY_BYTES * (MAX_MEMBERS - 1))]
LeaseBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=1024)]
GrantBytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=512)]
TapLayer: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]
TapLayers: TypeAlias = Annotated[tuple[TapLayer, ...], msgspec.Meta(max_length=MAX_TAPS)]


def row_bytes(dtype: str, row_size: int) -> int | None:
    """Bytes of one encoded row; None for an unknown encoding."""
    if dtype == INT8:
        return row_size + 2 * -(-row_size // INT8_BLOCK)
    element_bytes = DTYPE_BYTES.get(dtype)
    return None if element_bytes is None else element_bytes * row_size


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """Shape and encoding of the payload: ``[num_rows, row_size]``.

    ``codec`` is empty for rows as they are, or ZSTD.
    """

    dtype: Annotated[str, msgspec.Meta(max_length=8)]
    num_rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES_PER_STEP)]
    row_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    codec: Annotated[str, msgspec.Meta(max_length=8)] = ""

    @property
    def num_bytes(self) -> int:
        """Of the rows before compression. The encoding must be a known one."""
        size = row_bytes(self.dtype, self.row_size)
        if size is None:
            raise ValueError("unknown tensor encoding")
        return size * self.num_rows

    @property
    def uncompressed(self) -> TensorMeta:
        """The same without compression, for comparison with the rows that are expected."""
        return TensorMeta(self.dtype, self.num_rows, self.row_size) if self.codec else self


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """What one stage spent on a step, by its own clock: a hint for people and planners, not evidence."""

    queue_us: U32
    compute_us: U32
    price_us: U32 = 0
    """What one more row in the next step would cost whoever waits here now, as microseconds of the device; or what it
    takes on the way out, where that is more. 0: next to nothing, or not known."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag is the class name, the first element of the array."""


class StatusRequest(Message, frozen=True, array_like=True, tag="status?"):
    """Asks a node for its present record and counters."""

    request: U32


class StatusReply(Message, frozen=True, array_like=True, tag="status"):
    """A node's own signed record, and counters that are information, not evidence."""

    request: U32
    record: Annotated[bytes, msgspec.Meta(max_length=16 * 1024)]
    counters: Annotated[dict[Annotated[str, msgspec.Meta(max_length=64)], float], msgspec.Meta(max_length=128)]


MAX_PROBE_PAYLOAD_BYTES = 64 * 1024
"""Of one of the frames whose arrival is timed."""


class BandwidthProbe(Message, frozen=True, array_like=True, tag="probe"):
    """A frame of a measurement of bandwidth, with a payload that means nothing.

    User to node: ``count`` frames of one ``number``, ``index`` from 0; the last one is answered by a BandwidthReport.
    With ``reply_bytes`` it is one frame without a payload, and the node sends frames of that number back, which have
    about so many bytes together and are timed by the user. What a node does not want to do is answered by a report.
    """

    number: U32
    index: U32
    count: U32
    reply_bytes: U32 = 0


class BandwidthReport(Message, frozen=True, array_like=True, tag="probed"):
    """Node to user: so many payload bytes came in so many seconds after the first frame; or ``problem``, why not."""

    number: U32
    num_bytes: U32
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    problem: Annotated[str, msgspec.Meta(max_length=128)] = ""


class OpenSession(Message, frozen=True, array_like=True, tag="open"):
    """User to every stage: reserve KV for this plan. ``stage`` is the receiver's place in it.

    ``prefix`` is empty or the id of another session of the same user on this node, open or retained, with whose first
    ``prefix_positions`` positions this one begins: a wish to share their KV.
    """

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    plan: Annotated[bytes, msgspec.Meta(max_length=48 * 1024)]
    prefix: Annotated[bytes, msgspec.Meta(max_length=SESSION_BYTES)] = b""
    prefix_positions: U32 = 0
    resumes: bool = False
    """The plan is of a higher epoch of a session that some of its stages hold: those adopt it and keep their KV, and
    for the others the session is a new and empty one."""
    folds: bool = False
    """With ``resumes``: whoever adopts makes a plain log of the token tree that it has, with an entry per position."""
    path_start: U32 = 0
    path: NodeIds = ()
    """With ``folds``: the user's committed nodes at the positions from ``path_start`` on, by their ids before."""
    path_epoch: U32 = 0
    """With ``folds``: when all stages had last answered, and those ids were in force. Each fold begins them anew."""
    taps: TapLayers = ()
    """Layers of this stage whose rows the user may ask for with Step.tap, in ascending order: n is the row after n
    layers of the model, so that a stage with the layers [start, stop) has those of start + 1 to stop."""
    member: MemberIndex = 0
    """The receiver's place in its stage; 0 where that is one node."""
    grant: GrantBytes = b""
    """Of what a member of a group is to hold, signed by the user, see fusion_node.grants; empty for a single node."""
    mask_keys: MaskKeys = b""
    """That it shares with each other member of its group, in their order, MASK_KEY_BYTES each; empty, and left out on
    the wire, where the plan has no masks."""

    def __repr__(self) -> str:
        """Without the keys, whoever prints it."""
        place = f"stage={self.stage}, member={self.member}"
        return f"OpenSession(session={self.session.hex()}, epoch={self.epoch}, {place})"


class SessionOpened(Message, frozen=True, array_like=True, tag="opened"):
    """Stage to user: reserved, and connected to the next stage. The lease is renewed by every step.

    ``reused_positions`` says how many positions are there already: at most as many as were asked for, and 0 whatever
    the reason. The first step hangs on the node of that number; when it hangs on 0, the session begins empty.
    """

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    lease_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    reused_positions: U32 = 0
    lease: LeaseBytes = b""
    """Signed by the node, see p2p.records.Lease: what it has reserved, for whom and until when."""
    next_sequence: U32 = 0
    """Of the log: entries below it were applied here, in this epoch or an earlier one."""
    retained_positions: U32 = 0
    """The rows of positions below this, as they were or will be handed to the next stage, can be sent again."""
    num_positions: U32 = 0
    """Committed here, reused ones included: where the next entry of a chain hangs."""
    taps: TapLayers = ()
    """Of the layers that were asked for, those whose rows will be sent; none by a program that knows of no taps."""


class Resend(Message, frozen=True, array_like=True, tag="resend"):
    """User to a stage: hand rows that it retains to its next stage, as this entry of the log.

    The entry appends positions ``[first_position, first_position + num_positions)`` to a chain, and stands for
    ``covers`` entries from ``sequence`` on: for none where the positions are those of a reused prefix. ``want_last``
    asks the last stage for the row of the last position; ``stop_stage`` is passed on, see Step. Not both.

    Orders of one epoch go up: no position is handed on twice in it. One for positions that are not computed yet waits
    for them, and those behind it wait for it.
    """

    session: SessionBytes
    epoch: U32
    sequence: U32
    covers: U32
    first_position: U32
    num_positions: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES_PER_STEP)]
    want_last: bool
    stop_stage: StageIndex | None = None


class Replayed(Message, frozen=True, array_like=True, tag="replayed"):
    """Stage to user: an entry that was to stop at this stage has been computed, and with it all entries below
    ``next_sequence``, which together are ``num_positions`` positions."""

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    next_sequence: U32
    num_positions: U32


class SessionQuery(Message, frozen=True, array_like=True, tag="session?"):
    """User to a stage: renew the lease, and tell how far the session is. Answered at once, whatever is computed.

    The answer is a SessionProgress; or, when no session of that user has this id here, a SessionFailed of this epoch
    and stage with the code UNKNOWN_SESSION.
    """

    session: SessionBytes
    epoch: U32
    stage: StageIndex


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """How far a member of a group is with the first rows that it has not computed, by its own word.

    ``node`` is the first one of the unit, and ``num_sent`` the number of exchanges, from the first one of the stage's
    first layer, to which it has sent what it contributes. ``missing`` are the members for whom it has waited
    ``waited_ms``; nobody, while it computes. Without ``has_rows`` nothing is there to be computed, and ``node`` is the
    one with which the next unit would begin.
    """

    node: U32
    num_sent: Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
    missing: Annotated[tuple[MemberIndex, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    waited_ms: U32 = 0
    has_rows: bool = True

    @property
    def place(self) -> tuple[int, int]:
        """To be compared with those of other members: who is behind has the lesser one."""
        return self.node, self.num_sent


class SessionProgress(Message, frozen=True, array_like=True, tag="progress"):
    """Stage to user: entries below ``next_sequence`` have come, and those below ``num_done`` were computed; the lease
    ends in ``lease_s``. ``wait_s`` is what a step has to wait for the device by this node's estimate, and ``backlog_s``
    how long what it has sent to the next stage still takes to get there.

    ``epoch`` is the one that the stage is in, whichever was asked for. ``standing`` is of a member of a group.
    """

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    next_sequence: U32
    num_done: U32
    lease_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    lease: LeaseBytes = b""
    standing: Standing | None = None
    backlog_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0


class SessionDraining(Message, frozen=True, array_like=True, tag="drain"):
    """Stage to user: this node leaves in ``grace_s``. Until then it serves the session as before; go elsewhere."""

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    grace_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
    reason: Reason


PEER_LOST = "peer-lost"
"""SessionFailed.code when the link to the culprit is gone."""

UNKNOWN_SESSION = "unknown-session"
"""SessionFailed.code that answers a query for what is not open here."""

NOT_RETAINED = "not-retained"
"""SessionFailed.code when rows that are to be sent again are gone. The KV is kept."""

DRAINING = "draining"
"""SessionFailed.code when the grace of SessionDraining is over; SessionRefused.code of a node that leaves."""

KEPT_S = 30.0
"""How long a stage that says ``is_kept`` waits to be resumed. A user that lives notices within ten seconds, and has
then several attempts at finding another node."""

SUCCESSOR_UNREACHABLE = "successor-unreachable"
"""SessionRefused.code when the stage itself is well, but cannot reach the next one."""


MEMBER_UNREACHABLE = "member-unreachable"
"""SessionRefused.code when the stage itself is well, but cannot reach another member of its group."""


class SessionRefused(Message, frozen=True, array_like=True, tag="refused"):
    """Stage to user: not reserved, and why. ``culprit`` is a peer id when another peer is the cause."""

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    code: Code
    reason: Reason
    culprit: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Step(Message, frozen=True, array_like=True, tag="step"):
    """User to stage 1, and each stage to the next: one entry of the session's log with the rows to compute.

    ``sequence`` counts from 0 and goes on in later epochs. The new nodes are ``first_node`` and those after it,
    one per row. ``parents`` is empty for a chain that hangs on ``parent``, else has one entry per node. ``advance`` 0
    means: no advance. ``want`` lists the nodes whose rows the last stage returns to the user.

    Where rows are missing, ``num_nodes`` says how many nodes there are, and ``live`` has a bit per node, the lowest of
    the first byte first, that is set for those whose row has come. The others are named and never computed.

    In a replay, one entry may stand for ``covers`` entries of a chain, 0 for rows of a reused prefix; and one that is
    to end at ``stop_stage`` is computed there, told to the user (Replayed), and neither handed on nor answered with
    rows: ``want`` is empty then.
    """

    session: SessionBytes
    epoch: U32
    sequence: U32
    first_node: U32
    parent: U32
    parents: NodeIds
    advance: U32
    want: NodeIds
    tensor: TensorMeta
    timings: Annotated[tuple[StageTiming, ...], msgspec.Meta(max_length=128)]
    covers: U32 = 1
    stop_stage: StageIndex | None = None
    num_nodes: Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES_PER_STEP)] = 0
    """0: as many as rows, and ``live`` is empty."""
    live: Annotated[bytes, msgspec.Meta(max_length=MAX_NODES_PER_STEP // 8)] = b""
    tap: Annotated[bytes, msgspec.Meta(max_length=MAX_NODES_PER_STEP // 8)] = b""
    """Empty: none. Else a bit per node, as in ``live``: of which each stage sends the user what StepTaps says."""

    @property
    def node_count(self) -> int:
        """New nodes, with or without a row."""
        return self.num_nodes or self.tensor.num_rows


class StepResult(Message, frozen=True, array_like=True, tag="result"):
    """Last stage to user: hidden rows of the wanted nodes, before the final norm."""

    session: SessionBytes
    epoch: U32
    sequence: U32
    nodes: NodeIds
    tensor: TensorMeta
    timings: Annotated[tuple[StageTiming, ...], msgspec.Meta(max_length=128)]


class StepTaps(Message, frozen=True, array_like=True, tag="taps"):
    """Stage to user: rows after ``layer`` layers, of nodes of one step that the user has asked for (Step.tap).

    Straight to the user, and to nobody else. A hint for drafting: it may be left out, and nobody waits for it.
    """

    session: SessionBytes
    epoch: U32
    sequence: U32
    layer: TapLayer
    nodes: Annotated[tuple[U32, ...], msgspec.Meta(min_length=1, max_length=MAX_TAPPED_NODES)]
    tensor: TensorMeta


class PartialsEntry(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one session in Partials: those of the ``num_rows`` live nodes from ``node`` on of one step.

    ``session`` is alias_of its id and epoch.
    """

    session: U32
    node: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]
    num_rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_UNIT_ROWS)]


class Partials(Message, frozen=True, array_like=True, tag="p"):
    """Member to member: what the receiver's part of one linear's output gets from the sender's part of its input.

    The payload are the rows of all entries in their order, each of as many values as the receiver's part has, in
    ``f32``; of sessions whose sums are masked as words of 64 bits. ``exchange`` says of which linear of ``layer``
    (fusion_node.slices.Exchange). The tag is one letter because four or five of these go to every other member in every
    layer.
    """

    layer: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    exchange: Annotated[int, msgspec.Meta(ge=0, le=4)]
    entries: Annotated[tuple[PartialsEntry, ...], msgspec.Meta(min_length=1, max_length=MAX_PARTIALS)]

    @property
    def num_rows(self) -> int:
        """Of all entries."""
        return sum(entry.num_rows for entry in self.entries)


@functools.lru_cache(maxsize=4096)
def alias_of(session: bytes, epoch: int) -> int:
    """Four bytes for a session under one plan, which everybody in it can reckon.

    A node takes no session whose alias is that of another one; users cannot choose it, but can choose another id.
    """
    return int.from_bytes(hashlib.blake2b(session + epoch.to_bytes(4, "little"), digest_size=4).digest(), "little")


class Cancel(Message, frozen=True, array_like=True, tag="cancel"):
    """User to every stage: nodes that neither lead to ``root`` nor descend from it will never be committed.

    Their rows need not be computed. A hint, which may overtake steps, be lost and be repeated; what it says must be
    true for as long as the epoch lasts, also of nodes that come later.
    """

    session: SessionBytes
    epoch: U32
    root: Annotated[int, msgspec.Meta(ge=1, le=2**32 - 1)]


class SessionFailed(Message, frozen=True, array_like=True, tag="failed"):
    """Stage to user: this session cannot go on here. ``culprit`` is a peer id when another peer is the cause.

    With ``is_kept`` its KV is kept for some time, for a plan of a higher epoch to resume it; else it is over here.
    ``standing`` is of a member of a group that has waited for others. Of ``suspects``, peer ids, one at least is the
    cause, and the stage cannot know which.
    """

    session: SessionBytes
    epoch: U32
    stage: StageIndex
    code: Code
    reason: Reason
    culprit: Annotated[str, msgspec.Meta(max_length=64)]
    is_kept: bool = False
    standing: Standing | None = None
    suspects: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ] = ()


RETAIN_S = 600.0
"""The longest that a node keeps the KV of a closed session whose user may come back. A person reads a long answer and
writes the next question in less, and memory that lies idle for longer is better free."""


class CloseSession(Message, frozen=True, array_like=True, tag="close"):
    """User to every stage: the session is over.

    Its KV is freed, or with ``retain`` kept for sessions of the same user that begin alike, for RETAIN_S at most and
    until the room is needed. A second close without ``retain`` frees what was kept.
    """

    session: SessionBytes
    epoch: U32
    retain: bool = False


class SessionClosed(Message, frozen=True, array_like=True, tag="closed"):
    """Stage to user: closed."""

    session: SessionBytes
    epoch: U32


class RenewGrant(Message, frozen=True, array_like=True, tag="grant"):
    """User to a member of a group: the grant that it has, with a later end. Not answered."""

    session: SessionBytes
    epoch: U32
    grant: GrantBytes


class RevokeGrant(Message, frozen=True, array_like=True, tag="revoke"):
    """User to a member of a group: delete what is held under this grant, be the session open, kept or retained.

    Answered by SessionReleased if anything is.
    """

    session: SessionBytes
    epoch: U32
    grant: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class SessionReleased(Message, frozen=True, array_like=True, tag="released"):
    """A member of a group to its user: what was held under a grant is deleted. Once for each grant."""

    session: SessionBytes
    epoch: U32
    release: Annotated[bytes, msgspec.Meta(max_length=512)]
    """Signed by the member, see fusion_node.grants.Release."""


class Assign(Message, frozen=True, array_like=True, tag="assign"):
    """Scheduler to a node: hold these layers from now on. Answered at once by Assigned with the same ``number``."""

    number: U32
    assignment: Annotated[bytes, msgspec.Meta(max_length=1024)]
    """Signed by the scheduler, see p2p.records.Assignment."""


class Assigned(Message, frozen=True, array_like=True, tag="assigned"):
    """Node to a scheduler: it loads what it lacks and goes over to it; or ``problem``, why it does not."""

    number: U32
    problem: Reason = ""


AnyMessage: TypeAlias = (
    StatusRequest
    | StatusReply
    | BandwidthProbe
    | BandwidthReport
    | OpenSession
    | SessionOpened
    | SessionRefused
    | SessionQuery
    | SessionProgress
    | SessionDraining
    | Resend
    | Replayed
    | Step
    | StepResult
    | StepTaps
    | Partials
    | Cancel
    | SessionFailed
    | CloseSession
    | SessionClosed
    | RenewGrant
    | RevokeGrant
    | SessionReleased
    | Assign
    | Assigned
)

_DECODE = msgspec.msgpack.Decoder(AnyMessage).decode
_HEADER_BYTES_OF = struct.Struct("<I").unpack_from
_WITH_TENSOR = (Step, StepResult, StepTaps)
_new_tuple = tuple.__new__


class Frame(NamedTuple):
    """One received message with its payload, a read-only view that stays valid as long as it is referenced."""

    message: AnyMessage
    payload: memoryview


def encode_message(message: AnyMessage) -> bytes:
    """The frame up to the payload; the payload follows as it is.

    Raises:
        WireError: the header is longer than a receiver would accept.
    """
    if type(message) is OpenSession and not message.mask_keys:
        return encode_header(without_last(message))
    return encode_header(message)


def decode_message(frame: bytes | bytearray | memoryview) -> Frame:
    """Reads one frame. The payload is a view into ``frame``, not a copy.

    This is fusion_node.wire.split_frame and the decoding in one: it runs for every frame, and calls cost.

    Raises:
        WireError: for anything malformed, oversized or inconsistent between header and payload.
    """
    view = frame if isinstance(frame, memoryview) else memoryview(frame)
    try:
        end = 4 + _HEADER_BYTES_OF(view)[0]
        payload = view[end:]
        if end > 4 + MAX_HEADER_BYTES or end > len(view) or len(payload) > MAX_PAYLOAD_BYTES:
            raise WireError(f"frame of {len(view)} bytes with a header of {end - 4} breaks a limit")
        message: AnyMessage = _DECODE(view[4:end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, struct.error) as error:
        raise WireError(f"not a valid message: {type(error).__name__}") from error
    if isinstance(message, _WITH_TENSOR):
        _check_tensor(message, payload)
    elif isinstance(message, Partials):
        _check_partials(message, payload)
    elif isinstance(message, BandwidthProbe):
        if len(payload) > MAX_PROBE_PAYLOAD_BYTES:
            raise WireError("a probe with a payload that is too large")
    elif payload:
        raise WireError("a payload where none belongs")
    elif isinstance(message, StatusReply) and not all(map(math.isfinite, message.counters.values())):
        raise WireError("a counter is not finite")
    elif isinstance(message, Resend):
        _check_resend(message)
    elif isinstance(message, OpenSession):
        _check_open(message)
    return _new_tuple(Frame, (message, payload))  # half the price of Frame(message, payload)


def _check_partials(message: Partials, payload: memoryview) -> None:
    num_rows = message.num_rows
    if not payload or len(payload) % (DTYPE_BYTES["f32"] * num_rows):
        raise WireError(f"a payload of {len(payload)} bytes cannot be {num_rows} rows of one width")
    if len({(entry.session, entry.node) for entry in message.entries}) != len(message.entries):
        raise WireError("the same rows come twice in one message")


def _check_open(message: OpenSession) -> None:
    if len(message.prefix) not in (0, SESSION_BYTES):
        raise WireError("a prefix that is not the id of a session")
    if message.folds and not message.resumes:
        raise WireError("only a session that is resumed has a tree to fold")
    if (message.path or message.path_start or message.path_epoch) and not message.folds:
        raise WireError("a path that nothing is folded along")
    if any(node >= after for node, after in itertools.pairwise(message.path)) or message.path[:1] == (0,):
        raise WireError("the nodes of a path are not in ascending order")
    if any(layer >= after for layer, after in itertools.pairwise(message.taps)):
        raise WireError("layers whose rows are asked for are not in ascending order")
    if message.mask_keys:
        num_others, rest = divmod(len(message.mask_keys), MASK_KEY_BYTES)
        if rest or num_others < MIN_MASKED_MEMBERS - 1 or message.member > num_others:
            raise WireError("keys of masks for no group")


def _check_resend(message: Resend) -> None:
    if message.covers != 1 and message.stop_stage is None:
        raise WireError("only a chain that is replayed up to a stage stands for several entries")
    if message.want_last and message.stop_stage is not None:
        raise WireError("an entry that ends at a stage returns no rows")
    if message.first_position + message.num_positions > 2**32 - 1:
        raise WireError("positions out of range")


def _check_tensor(message: Step | StepResult | StepTaps, payload: memoryview) -> None:
    tensor = message.tensor
    num_rows, size = tensor.num_rows, row_bytes(tensor.dtype, tensor.row_size)
    if size is None:
        raise WireError("unknown tensor encoding")
    if not tensor.codec:
        if size * num_rows != len(payload):
            raise WireError(f"payload has {len(payload)} bytes where the header announces {size * num_rows}")
    elif tensor.codec != ZSTD:
        raise WireError("unknown compression")
    elif not len(payload) < size * num_rows <= min(MAX_PAYLOAD_BYTES, MAX_EXPANSION * len(payload)):
        raise WireError(f"{len(payload)} compressed bytes cannot stand for {size * num_rows}")
    if not isinstance(message, Step):
        if len(message.nodes) != num_rows:
            raise WireError("a result needs one row per node")
        if isinstance(message, StepTaps) and any(a >= b for a, b in itertools.pairwise(message.nodes)):
            raise WireError("the nodes of rows of a layer are not in ascending order")
        return
    first, parents = message.first_node, message.parents
    if message.covers != 1 and (parents or message.stop_stage is None):
        raise WireError("only a chain that is replayed up to a stage stands for several entries")
    if message.want and message.stop_stage is not None:
        raise WireError("an entry that ends at a stage returns no rows")
    num_nodes = message.num_nodes or num_rows
    if message.num_nodes or message.live:
        _check_live(message)
    if message.tap:
        _check_tap(message)
    if num_nodes == 0:
        raise WireError("a step without nodes")
    last = first + num_nodes - 1
    if first == 0 or last > 2**32 - 1:
        raise WireError("node ids out of range")
    if parents:
        if len(parents) != num_nodes:
            raise WireError("a tree needs one parent per node")
        if any(parent >= node for node, parent in enumerate(parents, first)):
            raise WireError("a node hangs on itself or on a later node")
    elif message.parent >= first:
        raise WireError("a node hangs on itself or on a later node")
    if message.want and not (first <= min(message.want) and max(message.want) <= last):
        raise WireError("a wanted row is not in the step")
    if any(node >= after for node, after in itertools.pairwise(message.want)):
        # Asked for twice, a row would make the answer larger than the question, and larger than a frame.
        raise WireError("wanted rows are not in ascending order")


def _check_tap(message: Step) -> None:
    """The bits are those of nodes of this step, and not too many."""
    bits = int.from_bytes(message.tap, "little")
    if message.covers != 1 or message.stop_stage is not None:
        raise WireError("a replayed entry is asked for rows of layers")
    if len(message.tap) != -(-message.node_count // 8) or bits >> message.node_count:
        raise WireError("not one bit per node says whose rows of layers are wanted")
    if not 1 <= bits.bit_count() <= MAX_TAPPED_NODES:
        raise WireError("rows of layers are wanted of no node, or of too many")


def _check_live(message: Step) -> None:
    """Rows are there for exactly the nodes whose bit is set."""
    num_nodes, live = message.num_nodes, message.live
    if message.covers != 1 or message.stop_stage is not None:
        raise WireError("a replayed entry lacks rows")
    if len(live) != -(-num_nodes // 8) or not num_nodes:
        raise WireError("rows are missing, and not one bit per node says which")
    bits = int.from_bytes(live, "little")
    if bits >> num_nodes or bits.bit_count() != message.tensor.num_rows:
        raise WireError("another number of rows has come than bits are set")


__all__ = [
    "DRAINING",
    "DTYPE_BYTES",
    "FUSION_FEATURE",
    "INT8",
    "INT8_BLOCK",
    "KEPT_S",
    "MASKS_FEATURE",
    "MAX_EXPANSION",
    "MAX_HEADER_BYTES",
    "MAX_NODES_PER_STEP",
    "MAX_PARTIALS",
    "MAX_PAYLOAD_BYTES",
    "MAX_PROBE_PAYLOAD_BYTES",
    "MAX_TAPPED_NODES",
    "MAX_TAPS",
    "MAX_UNIT_ROWS",
    "MEMBER_UNREACHABLE",
    "NOT_RETAINED",
    "PEER_LOST",
    "RETAIN_S",
    "SUCCESSOR_UNREACHABLE",
    "UNKNOWN_SESSION",
    "ZSTD",
    "AnyMessage",
    "Assign",
    "Assigned",
    "BandwidthProbe",
    "BandwidthReport",
    "Cancel",
    "CloseSession",
    "Frame",
    "OpenSession",
    "Partials",
    "PartialsEntry",
    "RenewGrant",
    "Replayed",
    "Resend",
    "RevokeGrant",
    "SessionClosed",
    "SessionDraining",
    "SessionFailed",
    "SessionOpened",
    "SessionProgress",
    "SessionQuery",
    "SessionRefused",
    "SessionReleased",
    "StageTiming",
    "StatusReply",
    "StatusRequest",
    "Step",
    "StepResult",
    "StepTaps",
    "TensorMeta",
    "alias_of",
    "decode_message",
    "encode_message",
    "row_bytes",
]
