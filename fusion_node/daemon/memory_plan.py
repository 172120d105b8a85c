"""How much of a device's memory a node takes for weights and KV, within its operator's bound.

Pure arithmetic over bytes. An operator's bound is for the whole process, since that is what a task manager shows: what
the process holds before any weight is loaded counts, and so does room to compute in.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusion_node.errors import ResourceExhausted
from fusion_node.types import LayerRange

WEIGHTS_SHARE = 0.7
"""Of free memory; the rest is for KV, activations and the user of the machine."""

KV_SHARE = 0.25
"""Of free memory, and of what a bound leaves, unless the operator names a number."""

MIN_KV_POSITIONS = 256
"""A question and an answer: a node that cannot hold one such session serves nobody."""

RETAIN_SHARE = 1 / 16
"""Of the machine's free memory, for rows that were handed on: they lie there whatever device computes."""

MAX_RETAIN_BYTES = 2**30
"""Unless the operator names a number: 100 conversations of 2,000 positions at hidden size 2,560 in fp16."""

WORKING_BYTES = 128 * 2**20
"""Activations of a prefill chunk, frames on their way, and what the allocator keeps. Measured on a CPU: 60 MiB for a
chunk of 2,048 rows of hidden size 576, and 12 MiB for the links of one user."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An operator's bound on the memory of the whole process.

    Attributes:
        flag: its name on the command line, for messages.
        max_bytes: the bound.
        used_bytes: what the process holds now.
    """

    flag: str
    max_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        """What is left for weights and KV."""
        return max(0, self.max_bytes - self.used_bytes - WORKING_BYTES)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What may be taken.

    Attributes:
        free_bytes: what the device can still give.
        kv_bytes: KV memory that the operator asked for; None takes a share.
        bound: the operator's bound; None when there is none.
        retain_bytes: of this memory, for rows that were handed on.
    """

    free_bytes: int
    kv_bytes: int | None = None
    bound: Bound | None = None
    retain_bytes: int = 0

    def num_layers(self, layer_bytes: int) -> int:
        """How many layers of ``layer_bytes`` each to load at most, when the operator named none."""
        weights = int(self.free_bytes * WEIGHTS_SHARE)
        if self.bound is not None:
            room = min(self.free_bytes, self.bound.room_bytes)
            weights = min(weights, int(room * (1 - KV_SHARE)) if self.kv_bytes is None else room - self.kv_bytes)
        return max(0, weights) // max(layer_bytes, 1)

    def check_layers(self, layers: str, *, weights_bytes: int, least_kv_bytes: int) -> None:
        """Whether layers that the operator named fit within the bound, before any is loaded.

        Args:
            layers: the range, for the message.
            least_kv_bytes: KV of MIN_KV_POSITIONS positions.

        Raises:
            ResourceExhausted: the message says what is needed and what there is.
        """
        if self.bound is None:
            return
        kv_bytes = least_kv_bytes if self.kv_bytes is None else self.kv_bytes
        if weights_bytes + kv_bytes > self.bound.room_bytes:
            at_least = "at least " if self.kv_bytes is None else ""
            raise ResourceExhausted(
                f"layers {layers} need {_mib(weights_bytes)} and KV {at_least}{_mib(kv_bytes)}; "
                f"{self._what_is_left()}: serve fewer with --layers, or raise {self.bound.flag}"
            )

    def kv_budget(self, *, least_kv_bytes: int) -> int:
        """KV memory for all sessions together, when the weights are loaded: then ``used_bytes`` has them in it.

        Raises:
            ResourceExhausted: less is left than one session needs.
        """
        wanted = int(self.free_bytes * KV_SHARE) if self.kv_bytes is None else self.kv_bytes
        if self.bound is None:
            return wanted
        if self.bound.room_bytes < least_kv_bytes:
            raise ResourceExhausted(
                f"KV needs at least {_mib(least_kv_bytes)}; {self._what_is_left()}: "
                f"serve fewer layers with --layers, or raise {self.bound.flag}"
            )
        return min(wanted, max(least_kv_bytes, self.bound.room_bytes - self.retain_bytes))

    def why_no_layer(self, model: str, layer_bytes: int) -> str:
        """The message when ``num_layers`` is 0."""
        if self.bound is None or self.bound.room_bytes >= self.free_bytes:
            return f"not one layer of {model} ({_mib(layer_bytes)}) fits into the memory that is free"
        return f"not one layer of {model} ({_mib(layer_bytes)}) and its KV fit: {self._what_is_left()}"

    def _what_is_left(self) -> str:
        if self.bound is None:
            return f"{_mib(self.free_bytes)} are free"
        return (
            f"{self.bound.flag} {_mib(self.bound.max_bytes)} leaves {_mib(self.bound.room_bytes)}, because the program "
            f"itself takes {_mib(self.bound.used_bytes)} and computing {_mib(WORKING_BYTES)}"
        )


def retain_budget(free_bytes: int, bound: Bound | None = None) -> int:
    """Memory for rows that were handed on, when the operator named none.

    Args:
        free_bytes: of the machine.
        bound: on the memory of the process there.
    """
    room = free_bytes if bound is None else min(free_bytes, bound.room_bytes)
    return min(int(room * RETAIN_SHARE), MAX_RETAIN_BYTES)


def place_layers(
    layers: LayerRange, capacities: Sequence[int], *, first_layers: Collection[int] | None = None
) -> list[LayerRange | None]:
    """Consecutive layers for each device, in proportion to how many it could hold; None where that comes to none.

    Args:
        first_layers: at which a range may begin; None: at any. The nearest of them are taken, so that a device may be
            given a few more layers than its share.
    """
    total = sum(capacities)
    begins = [layer for layer in first_layers or () if layers.start < layer < layers.stop]
    allowed = sorted([layers.start, *begins, layers.stop])
    cuts = [layers.start]
    for held in itertools.accumulate(capacities):
        cut = layers.start + round(len(layers) * held / total) if total else layers.stop
        cuts.append(cut if first_layers is None else min(allowed, key=lambda layer: abs(layer - cut)))
    return [LayerRange(start, stop) if start < stop else None for start, stop in itertools.pairwise(cuts)]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
