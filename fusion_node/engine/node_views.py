"""What one node has of a prompt: the frames that it was sent, as they were encoded, and what it made of them.

A group, or stages one after the other, compute the prompt in this process as nodes do. What a node is sent is encoded
into frames and decoded again on its side, and a recorder there keeps the frames; of all other nodes' memory an attack
(fusion_node.privacy) sees nothing. Beside it stands the truth, against which attacks are measured.

Shapes: T tokens, D hidden size, d own columns, W values per row of a contribution, K own KV heads, H head dim.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fusion_node.engine.fusion_group import FusionGroup, Sent
from fusion_node.engine.masked_sums import FRACTION_BITS, MaskedSums, Words
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.sliced_stage import FusedStep
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.tensor_codec import decode_rows, encode_rows
from fusion_node.errors import LocalProtocolError
from fusion_node.mask_keys import SECRET_BYTES, mask_keys
from fusion_node.slices import MIN_MASKED_MEMBERS, Exchange, ModelSlice, SliceBounds
from p2p.messages import MAX_UNIT_ROWS, Partials, PartialsEntry, Step, alias_of, decode_message, encode_message

Floats = npt.NDArray[np.float32]

MAX_TOKENS = MAX_UNIT_ROWS
"""Of a prompt: they are sent as one step, of which each exchange is then one message."""

USER = None
"""The sender of what did not come from a member."""


Frames = list[tuple[int | None, bytes]]
"""What came to one node, with the index of the member that sent it, or USER."""


@dataclass(frozen=True, slots=True)
class MemberView:
    """What a member of a fusion group has of a prompt.

    Attributes:
        bounds: of all members.
        received: contributions of the others ``[T, W]``, by layer, exchange and sender, as decoded from frames.
        contributed: its own, to what it owns itself.
        columns_Td: its columns of the hidden state before each layer; those of the first came from the user.
        middle_Td: of the state between attention and MLP.
        keys_KTH, values_KTH: of its heads, by layer.
        num_bytes: of all frames that came.
        masked: what would have come in the place of ``received`` with masked sums, read as if there were no masks.
        others_summed: the sum of all that, less what is its own; both empty in a group that is too small for masks.
    """

    member: ModelSlice
    bounds: tuple[SliceBounds, ...]
    received: Mapping[tuple[int, Exchange, int], Floats]
    contributed: Mapping[tuple[int, Exchange], Floats]
    columns_Td: Mapping[int, Floats]
    middle_Td: Mapping[int, Floats]
    keys_KTH: Mapping[int, Floats]
    values_KTH: Mapping[int, Floats]
    num_bytes: int
    masked: Mapping[tuple[int, Exchange, int], Floats] = field(default_factory=dict)
    others_summed: Mapping[tuple[int, Exchange], Floats] = field(default_factory=dict)

    @property
    def own(self) -> SliceBounds:
        return self.bounds[self.member.index]

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(k for k in range(self.member.num_members) if k != self.member.index)

    def summed(self, layer: int, exchange: Exchange) -> Floats:
        """The contributions of all members."""
        total: Floats | None = None
        for k in range(self.member.num_members):
            is_own = k == self.member.index
            part = self.contributed[layer, exchange] if is_own else self.received[layer, exchange, k]
            total = part if total is None else total + part
        if total is None:
            raise LocalProtocolError("a group without members")
        return total


class _Masks:
    """Masks the contributions of a group, and keeps what one member is sent then."""

    def __init__(self, group: FusionGroup, index: int) -> None:
        self.received: dict[tuple[int, Exchange, int], Floats] = {}
        self.summed: dict[tuple[int, Exchange], Floats] = {}
        first, num = group.members[0], len(group.members)
        secret = secrets.token_bytes(SECRET_BYTES)
        self._index = index
        self._members = [
            MaskedSums(
                first.dims,
                first.bounds,
                member,
                keys=mask_keys(secret, session=bytes(16), epoch=0, opening=0, stage=0, num_members=num, member=member),
                epoch=0,
            )
            for member in range(num)
        ]
        self._parts: list[torch.Tensor] = []
        """Of one sender, by owner."""
        self._came: list[Words] = []
        """To the one member, by sender."""

    def on_sent(self, sent: Sent) -> None:
        self._parts.append(sent.values_TW)
        if len(self._parts) < len(self._members):
            return
        place, sender = (sent.layer, sent.exchange), self._members[sent.sender]
        words = sender.contributions(self._parts, node=1, layer=sent.layer, exchange=sent.exchange)[self._index]
        own_TW, self._parts = self._parts[self._index], []
        self._came.append(words)
        if sent.sender != self._index:
            read_TW = words[:, : own_TW.shape[1]] * 2.0**-FRACTION_BITS
            self.received[(*place, sent.sender)] = read_TW.astype(np.float32)
        if len(self._came) == len(self._members):
            total_TW = self._members[self._index].total(self._came, len(words), sent.exchange)
            self.summed[place], self._came = floats_of(total_TW), []


@dataclass(frozen=True, slots=True)
class GroupTruth:
    """Hidden states, whole, by layer: before it, and between its attention and its MLP."""

    before_TD: dict[int, Floats]
    middle_TD: dict[int, Floats]


@dataclass(frozen=True, slots=True)
class StageView:
    """What a node of whole layers was sent of a prompt: the hidden state before its first layer.

    Attributes:
        rows_TD: as decoded from the frame.
    """

    layer: int
    rows_TD: Floats
    num_bytes: int


def watch_group(group: FusionGroup, embedded_TD: torch.Tensor, index: int) -> tuple[MemberView, GroupTruth]:
    """Lets a group compute a prompt, and gives what its member ``index`` has afterwards.

    Args:
        embedded_TD: at most MAX_TOKENS rows.
    """
    num_tokens, members = _checked(embedded_TD), group.members
    session = secrets.token_bytes(16)
    kept: Frames = []
    contributed: dict[tuple[int, Exchange], Floats] = {}
    truth = GroupTruth({}, {})
    steps: list[FusedStep] = []
    masks = _Masks(group, index) if len(members) >= MIN_MASKED_MEMBERS else None

    def on_sent(sent: Sent) -> None:
        if masks is not None:
            masks.on_sent(sent)
        if sent.sender == sent.owner == index:
            contributed[sent.layer, sent.exchange] = floats_of(sent.values_TW)
        elif sent.owner == index:
            kept.append((sent.sender, _partials_frame(session, sent)))
        if (sent.sender, sent.owner) == (0, 0):
            states = {Exchange.QKV: truth.before_TD, Exchange.DOWN: truth.middle_TD}.get(sent.exchange)
            if states is not None:
                states[sent.layer] = np.concatenate([floats_of(s.rows_TD) for s in steps], axis=1)

    for k, cut_Td in enumerate(group.cut(embedded_TD)):
        frame = _step_frame(session, cut_Td, members[k].numerics.wire_dtype)
        if k == index:
            kept.append((USER, frame))
        item = StepInput(chain_of(num_tokens), _decoded_step(frame), (range(num_tokens),))
        steps.extend(members[k].begin([item]))
    group.on_sent = on_sent
    try:
        group.run([[step] for step in steps])
    finally:
        group.on_sent = None

    own = members[index]
    columns = slice(own.own.columns.start, own.own.columns.stop)
    keys, values = {}, {}
    for layer in range(own.layers.start, own.layers.stop):
        pair = group.pools[index].read(layer - own.layers.start, slice(0, num_tokens), torch.float32)
        keys[layer], values[layer] = map(floats_of, pair)
    view = MemberView(
        own.member,
        own.bounds,
        _decoded_partials(kept),
        contributed,
        {layer: rows_TD[:, columns] for layer, rows_TD in truth.before_TD.items()},
        {layer: rows_TD[:, columns] for layer, rows_TD in truth.middle_TD.items()},
        keys,
        values,
        sum(len(frame) for _, frame in kept),
        {} if masks is None else masks.received,
        {} if masks is None else {place: sum_TW - contributed[place] for place, sum_TW in masks.summed.items()},
    )
    return view, truth


def watch_stages(stages: Sequence[Stage], embedded_TD: torch.Tensor) -> list[StageView]:
    """Lets stages compute a prompt one after the other, and gives what each was sent."""
    num_tokens = _checked(embedded_TD)
    session = secrets.token_bytes(16)
    views = []
    rows_TD = embedded_TD
    for stage in stages:
        frame = _step_frame(session, rows_TD, stage.numerics.wire_dtype)
        came_TD = _decoded_step(frame)
        views.append(StageView(stage.layers.start, floats_of(came_TD), len(frame)))
        item = StepInput(chain_of(num_tokens), came_TD, (range(num_tokens),))
        (rows_TD,) = stage.forward([item], stage.new_pool(num_tokens))
    return views


def _checked(embedded_TD: torch.Tensor) -> int:
    if not 1 <= len(embedded_TD) <= MAX_TOKENS:
        raise LocalProtocolError(f"a prompt of {len(embedded_TD)} tokens is no step of 1 to {MAX_TOKENS}")
    return len(embedded_TD)


def chain_of(num_tokens: int) -> StepRows:
    """A prompt as one step, each row after the one before it."""
    return StepRows(
        live_rows=tuple(range(num_tokens)),
        nodes=tuple(range(1, num_tokens + 1)),
        positions=tuple(range(num_tokens)),
        first_slot=0,
        is_chain=True,
        visible=(),
        num_committed=0,
        move=None,
    )


def _step_frame(session: bytes, rows_Td: torch.Tensor, wire_dtype: str) -> bytes:
    meta, payload = encode_rows(rows_Td, wire_dtype)
    num_rows = meta.num_rows
    step = Step(
        session=session,
        epoch=0,
        sequence=0,
        first_node=1,
        parent=0,
        parents=(),
        advance=num_rows,
        want=(num_rows,),
        tensor=meta,
        timings=(),
    )
    return encode_message(step) + bytes(payload)


def _decoded_step(frame: bytes) -> torch.Tensor:
    message, payload = decode_message(frame)
    if not isinstance(message, Step):
        raise LocalProtocolError("a frame of a step is none")
    return decode_rows(message.tensor, payload)


def _partials_frame(session: bytes, sent: Sent) -> bytes:
    _, payload = encode_rows(sent.values_TW, "f32")
    entry = PartialsEntry(alias_of(session, 0), 1, len(sent.values_TW))
    return encode_message(Partials(sent.layer, int(sent.exchange), (entry,))) + bytes(payload)


def _decoded_partials(kept: Frames) -> dict[tuple[int, Exchange, int], Floats]:
    found = {}
    for sender, frame in kept:
        message, payload = decode_message(frame)
        if sender is not USER and isinstance(message, Partials):
            values = np.frombuffer(payload, dtype="<f4").reshape(message.num_rows, -1)
            found[message.layer, Exchange(message.exchange), sender] = values
    return found


def floats_of(tensor: torch.Tensor) -> Floats:
    """A copy of its values."""
    array: Floats = tensor.detach().float().cpu().numpy().copy()
    return array
