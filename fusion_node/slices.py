"""Slices: which hidden columns, heads and MLP channels each member of a fusion group holds.

A group splits the layers that it serves among n members by whole numbers, its *weights*: equal ones for equal parts.
From these and the sizes of the model everybody derives the same intervals, so nothing else is announced or agreed on.

Within a layer the members exchange partial sums: every linear map is held by its input columns, so that each member has
a part of every output, and sends each other member the part of the outputs that this one owns. How wide what is sent is
follows from the same sizes.

Source: cumulative rounding, as in Bresenham's line: an interval's ends are within half a unit of its exact share.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_node.errors import ConfigError

MAX_MEMBERS = 16
"""Of one group: each sends to all others four times per layer."""

MAX_WEIGHT = 1000

MIN_MASKED_MEMBERS = 3
"""Of a group whose sums are masked: of two, each is sent what the other one contributes, whatever is added to it."""

VALUE_BYTES = 4
"""Contributions travel as float32."""

MASKED_BYTES = 8
"""Where sums are masked, as integers modulo 2^64."""

MASK_KEY_BYTES = 32
"""Of the key that two members share in one session under one plan."""

UNIT = 8
"""Columns and channels are cut at multiples of this where the model's sizes are: kernels like it."""

_SLICE = re.compile(r"^([0-9]{1,2})/([0-9]{1,4}(?::[0-9]{1,4})*)$")


@dataclass(frozen=True, slots=True, order=True)
class ModelSlice:
    """Member ``index`` of a group whose members share every layer by ``weights``.

    Raises:
        ConfigError: there is no such member, or the weights are not 1 to MAX_MEMBERS whole numbers within MAX_WEIGHT.
    """

    index: int
    weights: tuple[int, ...]

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if not 0 <= self.index < len(self.weights):
            raise ConfigError(f"there is no slice {self.index} of {len(self.weights)}: they are counted from 0")

    @classmethod
    def parse(cls, text: str) -> ModelSlice:
        """Reads ``K/N``, the part K of N equal ones, counted from 0, or ``K/W0:W1:…``, of parts by weights.

        Raises:
            ConfigError: the text is neither.
        """
        match = _SLICE.match(text.strip())
        if match is None:
            raise ConfigError(f"slice {text!r} is none: write K/N, for example 0/3, or K/W0:W1:…, for example 0/2:1:1")
        numbers = [int(number) for number in match[2].split(":")]
        if len(numbers) == 1 and numbers[0] > MAX_MEMBERS:
            raise ConfigError(f"slice {text!r} is one of {numbers[0]}: a group has {MAX_MEMBERS} members at most")
        return cls(int(match[1]), tuple(numbers) if len(numbers) > 1 else (1,) * numbers[0])

    @property
    def num_members(self) -> int:
        return len(self.weights)

    def __str__(self) -> str:
        if len(set(self.weights)) == 1:
            return f"{self.index}/{len(self.weights)}"
        return f"{self.index}/{':'.join(map(str, self.weights))}"


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a decoder layer.

    Attributes:
        channels: intermediate size of the MLP, or of each expert.
        num_experts: 0 for a dense MLP.
        shared_channels: intermediate size of an expert that every row passes; 0: there is none.
        experts_per_row: how many of the experts a row is handed to.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    channels: int
    num_experts: int = 0
    shared_channels: int = 0
    experts_per_row: int = 0


class Exchange(enum.IntEnum):
    """What members exchange within a layer, in this order."""

    QKV = 0
    """Partial queries, keys and values, to the owner of the heads, with the sum of squares of the sender's columns."""
    O = 1  # noqa: E741
    """Partial outputs of the attention, to the owner of the columns."""
    ROUTER = 2
    """With experts only: partial scores of all experts, to everybody, with the sum of squares."""
    GATE_UP = 3
    """Partial gates and ups, to the owner of the channels, with the sum of squares unless ROUTER had it. With experts:
    of those that a row is handed to, from the highest score down."""
    DOWN = 4
    """Partial outputs of the MLP, to the owner of the columns."""


@dataclass(frozen=True, slots=True)
class SliceBounds:
    """What one member holds of every layer.

    Attributes:
        columns: of the hidden state.
        heads: query heads.
        kv_heads: KV heads that they read, one per ``heads_per_kv`` query heads and in their order. One that other
            members' heads read as well is kept by each of them, and one may stand here twice.
        channels: of the MLP, or of every expert.
        shared_channels: of the shared expert.
    """

    columns: range
    heads: range
    kv_heads: tuple[int, ...]
    channels: range
    shared_channels: range

    @property
    def heads_per_kv(self) -> int:
        return len(self.heads) // len(self.kv_heads)


def check_weights(weights: Sequence[int]) -> None:
    """Raises ConfigError when a group cannot be split by these numbers."""
    if not 1 <= len(weights) <= MAX_MEMBERS:
        raise ConfigError(f"a group of {len(weights)} members: there can be 1 to {MAX_MEMBERS}")
    if any(not 1 <= weight <= MAX_WEIGHT for weight in weights):
        raise ConfigError(f"weights {':'.join(map(str, weights))} of a group: each must be within 1 and {MAX_WEIGHT}")


def split(dims: Dims, weights: Sequence[int]) -> tuple[SliceBounds, ...]:
    """What each member of a group holds.

    Heads are split by KV heads, each with all of its query heads, while there is one for everybody; among more members
    query heads are split, and KV heads that several members read are held several times.

    Raises:
        ConfigError: the weights are out of bounds, or a member would be left with nothing.
    """
    columns = split_columns(dims.hidden, weights)
    channels = _cut(dims.channels, weights, "channels of the MLP", unit=UNIT)
    shared = [range(0)] * len(weights)
    if dims.shared_channels:
        shared = _cut(dims.shared_channels, weights, "channels of the shared expert", unit=UNIT)
    per_kv = dims.heads // dims.kv_heads
    if len(weights) <= dims.kv_heads:
        by_kv = _cut(dims.kv_heads, weights, "KV heads")
        heads = [range(kv.start * per_kv, kv.stop * per_kv) for kv in by_kv]
    else:
        heads = _cut(dims.heads, weights, "query heads")
    return tuple(
        SliceBounds(
            columns=columns[k],
            heads=heads[k],
            kv_heads=_kv_heads(heads[k], per_kv),
            channels=channels[k],
            shared_channels=shared[k],
        )
        for k in range(len(weights))
    )


def exchanges(dims: Dims) -> tuple[Exchange, ...]:
    """Those of one layer, in order."""
    return tuple(exchange for exchange in Exchange if exchange is not Exchange.ROUTER or dims.num_experts)


def exchange_width(dims: Dims, owner: SliceBounds, exchange: Exchange) -> int:
    """Values per row that each member contributes for this one. A KV head is sent once, however often it is kept."""
    match exchange:
        case Exchange.QKV:
            return (len(owner.heads) + 2 * len(set(owner.kv_heads))) * dims.head_dim + 1
        case Exchange.ROUTER:
            return dims.num_experts + 1
        case Exchange.GATE_UP if dims.num_experts:
            return 2 * len(owner.channels) * dims.experts_per_row
        case Exchange.GATE_UP:
            return 2 * len(owner.channels) + 1
        case Exchange.O | Exchange.DOWN:
            return len(owner.columns)


def has_squares(dims: Dims, exchange: Exchange) -> bool:
    """Whether the last value of a contribution to this one is a sum of squares."""
    if exchange is Exchange.GATE_UP:
        return not dims.num_experts
    return exchange in (Exchange.QKV, Exchange.ROUTER)


def masked_width(dims: Dims, owner: SliceBounds, exchange: Exchange) -> int:
    """The same where sums are masked: values of MASKED_BYTES, a sum of squares being two of them."""
    return exchange_width(dims, owner, exchange) + has_squares(dims, exchange)


def contribution_bytes(dims: Dims, owner: SliceBounds, exchange: Exchange, *, is_masked: bool) -> int:
    """Of one row of one contribution on the wire."""
    if is_masked:
        return MASKED_BYTES * masked_width(dims, owner, exchange)
    return VALUE_BYTES * exchange_width(dims, owner, exchange)


def split_columns(hidden: int, weights: Sequence[int]) -> tuple[range, ...]:
    """Which columns of the hidden state each member of a group holds: all that its neighbours have to know of it.

    Raises:
        ConfigError: the weights are out of bounds, or a member would be left with nothing.
    """
    check_weights(weights)
    return tuple(_cut(hidden, weights, "columns of the hidden state", unit=UNIT))


def overlap(a: range, b: range) -> range:
    """The columns that are in both of two intervals; empty if none is."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, max(start, stop))


def _cut(size: int, weights: Sequence[int], what: str, *, unit: int = 1) -> list[range]:
    if size % unit or size // unit < len(weights):
        unit = 1
    num_units, total = size // unit, sum(weights)
    if num_units < len(weights):
        raise ConfigError(f"{size} {what} cannot be split among {len(weights)} members: use fewer")
    ends = [0]
    for number, summed in enumerate(itertools.accumulate(weights), start=1):
        end = (2 * num_units * summed + total) // (2 * total)
        # One for everybody, those to come included.
        ends.append(min(max(end, ends[-1] + 1), num_units - (len(weights) - number)))
    return [range(start * unit, stop * unit) for start, stop in itertools.pairwise(ends)]


def _kv_heads(heads: range, per_kv: int) -> tuple[int, ...]:
    """One KV head for as many query heads as all of a member's KV heads can serve alike."""
    runs = [len(overlap(heads, range(kv * per_kv, (kv + 1) * per_kv))) for kv in _read_by(heads, per_kv)]
    alike = math.gcd(*runs)
    return tuple(head // per_kv for head in heads[::alike])


def _read_by(heads: range, per_kv: int) -> range:
    return range(heads.start // per_kv, (heads.stop - 1) // per_kv + 1)
