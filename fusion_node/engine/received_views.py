"""What a member of a fusion group has of real answers: the frames that its node kept, and what it made of them.

The frames (p2p.received_frames) are all that a session left with the node. What the member computed of them is computed
once more, by its slice of the weights: its rows from the user go through its layers, and in the place of the network
stand the contributions that came. Of chunks and tokens that came one after the other the rows are the same as of one
step, up to rounding, since rows meet nowhere but in attention.

Read are sessions without masked sums whose group begins at layer 0, as far as their log is a chain: without token trees
and reused prefixes, and no further than a row of which a contribution is missing.

Shapes: T tokens, d own columns, W values per row of a contribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fusion_node.engine.node_views import MAX_TOKENS, Floats, MemberView, chain_of, floats_of
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.stage import StepInput
from fusion_node.engine.tensor_codec import decode_rows
from fusion_node.engine.weights import TensorSource
from fusion_node.errors import ConfigError
from fusion_node.slices import Exchange, ModelSlice
from fusion_node.types import LayerRange, PeerId
from fusion_node.wire import WireError
from p2p.messages import OpenSession, Partials, Step, alias_of, encode_message
from p2p.received_frames import ReceivedFrame, read_frames
from p2p.records import Plan, plan_claim_of
from p2p.tensor_wire import RowsNotFinite

MAX_SESSIONS = 8
"""Of a file, the first ones: each takes seconds."""

_Place = tuple[int, Exchange, int]
"""Layer, exchange and index of the sender."""


@dataclass(frozen=True, slots=True)
class ReceivedSession:
    """What came of one session, under one plan.

    Attributes:
        model_id, numerics: of the plan.
        columns_Td: the member's columns of the rows that the user sent.
        received: contributions of the others ``[T, W]``, as came.
        num_bytes: of the frames that it was taken from.
    """

    model_id: str
    numerics: str
    layers: LayerRange
    member: ModelSlice
    columns_Td: Floats
    received: Mapping[_Place, Floats]
    num_bytes: int


@dataclass(slots=True)
class _Reading:
    """A session of one epoch while its frames are read."""

    plan: Plan
    stage: int
    member: int
    columns: list[Floats] = field(default_factory=list)
    position_of: dict[int, int] = field(default_factory=dict)
    """By node."""
    last_node: int = 0
    is_chain: bool = True
    received: dict[_Place, dict[int, Floats]] = field(default_factory=dict)
    """Rows by position."""
    num_bytes: int = 0

    @property
    def peers(self) -> list[str]:
        return [member.peer for member in self.plan.stages[self.stage].members]


def read_sessions(path: Path) -> list[ReceivedSession]:
    """Sessions of a file of ``join --record-received`` that can be read; see the head of this file.

    Raises:
        ConfigError: the file is none, or has no such session: why not.
    """
    peer, frames = read_frames(path)
    return sessions_of(peer, list(frames), name=str(path))


def sessions_of(peer: PeerId, frames: Iterable[ReceivedFrame], *, name: str) -> list[ReceivedSession]:
    """The same of frames that one node was sent."""
    kept = list(frames)
    reading: dict[tuple[bytes, int], _Reading] = {}
    for frame in kept:
        if isinstance(frame.message, OpenSession):
            _open(reading, peer, frame.message)
    if reading and all(each.plan.masks for each in reading.values()):
        raise ConfigError(
            f"{name} has only sessions with masked sums, whose contributions are not read: record an answer of a user "
            "who asks without --masked-sums"
        )
    reading = {key: each for key, each in reading.items() if not each.plan.masks}
    if not reading:
        raise ConfigError(
            f"{name} has no session of a fusion group that begins at layer 0: record a member of such a group"
        )
    aliases = {alias_of(*key): each for key, each in reading.items()}
    for frame in kept:
        if isinstance(frame.message, Step):
            _take_step(reading.get((frame.message.session, frame.message.epoch)), frame.message, frame.payload)
    for frame in kept:
        if isinstance(frame.message, Partials):
            _take_partials(aliases, frame.sender, frame.message, frame.payload)
    found = [session for each in reading.values() if (session := _whole(each)) is not None]
    if not found:
        raise ConfigError(f"{name} has no row of a chain of which all contributions have come: record a whole answer")
    return found[:MAX_SESSIONS]


def watch_received(source: TensorSource, session: ReceivedSession) -> MemberView:
    """What the member has afterwards, of which it computes its part once more.

    Raises:
        ConfigError: the contributions are not those of this model and slice.
        StoreCorrupted, ResourceExhausted: see SlicedStage.load.
    """
    stage = SlicedStage.load(
        source,
        session.layers,
        session.member,
        numerics=numerics_class(session.numerics),
        device=torch.device("cpu"),
    )
    own, num_tokens = session.member.index, len(session.columns_Td)
    pool = stage.new_pool(num_tokens)
    contributed: dict[tuple[int, Exchange], Floats] = {}
    columns: dict[int, Floats] = {}
    middle: dict[int, Floats] = {}
    if session.columns_Td.shape[1] != len(stage.own.columns):
        raise ConfigError(f"rows of {session.columns_Td.shape[1]} columns came, and the slice has others")
    (step,) = stage.begin([StepInput(chain_of(num_tokens), torch.from_numpy(session.columns_Td), (range(num_tokens),))])
    sent = stage.phase([step], None, pool)
    while sent is not None:
        layer, exchange = step.position
        states = {Exchange.QKV: columns, Exchange.DOWN: middle}.get(exchange)
        if states is not None:
            states[layer] = floats_of(step.rows_TD)
        contributed[layer, exchange] = floats_of(sent[0][own])
        parts = [
            sent[0][k] if k == own else _contribution(session, layer, exchange, k, stage.width(exchange, own))
            for k in range(session.member.num_members)
        ]
        sent = stage.phase([step], [parts], pool)
    keys, values = {}, {}
    for layer in range(session.layers.start, session.layers.stop):
        pair = pool.read(layer - session.layers.start, slice(0, num_tokens), torch.float32)
        keys[layer], values[layer] = map(floats_of, pair)
    return MemberView(
        session.member,
        stage.bounds,
        session.received,
        contributed,
        columns,
        middle,
        keys,
        values,
        session.num_bytes,
    )


def _open(reading: dict[tuple[bytes, int], _Reading], peer: PeerId, message: OpenSession) -> None:
    plan = plan_claim_of(message.plan)
    if plan is None or message.stage >= len(plan.stages) or message.prefix_positions:
        return
    stage = plan.stages[message.stage]
    if stage.start or message.member >= len(stage.members) or len(stage.weights) != len(stage.members):
        return
    if stage.members[message.member].peer == peer:
        reading.setdefault((message.session, message.epoch), _Reading(plan, message.stage, message.member))


def _take_step(session: _Reading | None, message: Step, payload: memoryview) -> None:
    if session is None or not session.is_chain:
        return
    if message.parents or message.num_nodes or message.parent != session.last_node:
        session.is_chain = False  # what follows hangs on nodes of a tree
        return
    if not message.tensor.num_rows:
        return
    try:
        rows_Td = decode_rows(message.tensor, payload)
    except (WireError, RowsNotFinite):
        session.is_chain = False
        return
    for node in range(message.first_node, message.first_node + message.tensor.num_rows):
        session.position_of[node] = len(session.position_of)
    session.last_node = message.first_node + message.tensor.num_rows - 1
    session.columns.append(floats_of(rows_Td))
    session.num_bytes += len(encode_message(message)) + len(payload)


def _take_partials(aliases: Mapping[int, _Reading], sender: PeerId, message: Partials, payload: memoryview) -> None:
    if message.exchange not in {each.value for each in Exchange} or len(payload) % (4 * message.num_rows):
        return
    values_TW = np.frombuffer(payload, dtype="<f4").reshape(message.num_rows, -1)
    first = 0
    for entry in message.entries:
        session = aliases.get(entry.session)
        if session is not None and sender in session.peers:
            place = message.layer, Exchange(message.exchange), session.peers.index(sender)
            rows = session.received.setdefault(place, {})
            for row in range(entry.num_rows):
                position = session.position_of.get(entry.node + row)
                if position is not None and position < MAX_TOKENS:
                    rows[position] = values_TW[first + row]
            session.num_bytes += 4 * entry.num_rows * values_TW.shape[1]
        first += entry.num_rows


def _whole(session: _Reading) -> ReceivedSession | None:
    """As far as nothing is missing."""
    stage = session.plan.stages[session.stage]
    if not session.columns or not session.received:
        return None
    columns_Td = np.concatenate(session.columns)[:MAX_TOKENS]
    others = [k for k in range(len(stage.members)) if k != session.member]
    kinds = {exchange for _, exchange, _ in session.received}
    places = [(layer, e, k) for layer in range(stage.start, stage.stop) for e in kinds for k in others]
    num_tokens = len(columns_Td)
    for place in places:
        rows = session.received.get(place, {})
        num_tokens = next((row for row in range(num_tokens) if row not in rows), num_tokens)
    if not num_tokens:
        return None
    try:
        received = {place: np.stack([session.received[place][row] for row in range(num_tokens)]) for place in places}
    except ValueError:  # rows of several widths
        return None
    return ReceivedSession(
        session.plan.model_id,
        session.plan.numerics,
        LayerRange(stage.start, stage.stop),
        ModelSlice(session.member, tuple(stage.weights)),
        columns_Td[:num_tokens],
        received,
        session.num_bytes,
    )


def _contribution(session: ReceivedSession, layer: int, exchange: Exchange, k: int, width: int) -> torch.Tensor:
    values_TW = session.received.get((layer, exchange, k))
    if values_TW is None or values_TW.shape[1] != width:
        raise ConfigError(
            f"contributions of member {k} to layer {layer} are not {width} values a row: "
            "the session was of another model"
        )
    return torch.from_numpy(values_TW)


__all__ = ["MAX_SESSIONS", "ReceivedSession", "read_sessions", "sessions_of", "watch_received"]
