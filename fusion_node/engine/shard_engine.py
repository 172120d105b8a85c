"""The shard of one node: its layers on one or several devices, and the KV of all sessions.

What holds for whole layers and for slices of them alike is in KVEngine; fusion_node.engine.slice_engine is the other.

Two halves that never wait for each other: ``plan`` decides on the event loop where in the KV pool a batch goes, and
``run`` computes it on the thread of a device. Batches are run in the order in which they were planned.

Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from fusion_node.engine.block_manager_core import BLOCK_SLOTS, BlockCopy, BlockManager, SlotMove
from fusion_node.engine.device import memory_errors
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.stage import Stage, StepInput
from fusion_node.engine.taps import Tapped
from fusion_node.errors import InvalidLayers, ResourceExhausted
from fusion_node.types import LayerRange

MAX_PARTS = 32
"""Layer ranges, the most recently used, whose stages are kept per device. Plans choose them, so without a limit they
would be the square of the number of layers. Making one anew takes 0.5 ms."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Live rows ``[start, stop)`` of a step, and where the session's KV lies up to the last of them."""

    step: StepRows
    start: int
    stop: int
    runs: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One forward, ready to run.

    Attributes:
        layers: that all its sessions use.
        changes: to the KV before the forward, in order.
        changed: indices of the items whose sessions they are for.
    """

    layers: LayerRange
    items: tuple[PlannedRows, ...]
    changes: tuple[BlockCopy | SlotMove, ...]
    changed: frozenset[int] = frozenset()


class HoldsLayers(Protocol):
    """What the KV of a shard needs to know of its layers: a Stage, or a slice of one."""

    layers: LayerRange
    numerics: NumericsClass
    device: torch.device
    hidden_size: int
    num_weight_bytes: int

    @property
    def first_layers(self) -> frozenset[int] | None: ...

    @property
    def kv_bytes_per_position(self) -> int: ...

    def new_pool(self, num_slots: int) -> KVPool: ...


S = TypeVar("S", bound=HoldsLayers)


class KVEngine(Generic[S]):
    """The KV of all sessions on the devices of a node.

    Args:
        stages: consecutive layers, one stage per device.
        kv_budget_bytes: for the KV of all sessions, on all devices together.

    Raises:
        ResourceExhausted: not one block fits into the budget, or the budget not into memory.
    """

    def __init__(self, stages: Sequence[S], *, kv_budget_bytes: int) -> None:
        self.stages = tuple(stages)
        for before, after in itertools.pairwise(self.stages):
            if before.layers.stop != after.layers.start:
                raise InvalidLayers(f"layers {after.layers} do not follow {before.layers}")
        self.layers = LayerRange(self.stages[0].layers.start, self.stages[-1].layers.stop)
        self.kv_bytes_per_position = sum(stage.kv_bytes_per_position for stage in self.stages)
        num_blocks = kv_budget_bytes // (self.kv_bytes_per_position * BLOCK_SLOTS)
        if num_blocks == 0:
            raise ResourceExhausted(
                f"{kv_budget_bytes / 2**20:.0f} MiB for KV hold less than {BLOCK_SLOTS} positions of layers "
                f"{self.layers}: serve fewer with --layers, or give more with --kv-memory"
            )
        self.blocks = BlockManager(num_blocks)
        self._num_slots = num_blocks * BLOCK_SLOTS
        self._pools: list[KVPool | None] = [stage.new_pool(self._num_slots) for stage in self.stages]

    @property
    def numerics(self) -> str:
        return self.stages[0].numerics.name

    @property
    def wire_dtype(self) -> str:
        return self.stages[0].numerics.wire_dtype

    @property
    def hidden_size(self) -> int:
        return self.stages[0].hidden_size

    @property
    def first_layers(self) -> frozenset[int] | None:
        """Layers of the model at which a session may begin; None: all of them."""
        return self.stages[0].first_layers

    @property
    def num_devices(self) -> int:
        return len(self.stages)

    @property
    def num_weight_bytes(self) -> int:
        return sum(stage.num_weight_bytes for stage in self.stages)

    def plan(self, layers: LayerRange, work: Sequence[tuple[Hashable, StepRows, int, int, bool]]) -> PlannedBatch:
        """Finds room for a batch.

        Args:
            layers: that all sessions of the batch use; within this shard's.
            work: per piece the session's block table, the step, which of its live rows ``[start, stop)``, and whether
                what the step moves is still to be moved.

        Raises:
            LocalProtocolError: a table is not open, or rows do not fit what it reserved.
        """
        items: list[PlannedRows] = []
        changes: list[BlockCopy | SlotMove] = []
        changed: set[int] = set()
        for index, (key, step, start, stop, moves) in enumerate(work):
            num_before = len(changes)
            if moves and step.move is not None:
                copies, move = self.blocks.move(key, step.move.first_slot, step.move.sources)
                changes += copies
                if move.sources:
                    changes.append(move)
            num_slots = step.first_slot + stop
            changes += self.blocks.extend(key, num_slots, first_written=step.first_slot + start)
            if len(changes) > num_before:
                changed.add(index)
            items.append(PlannedRows(step, start, stop, self.blocks.runs(key, num_slots)))
        return PlannedBatch(layers, tuple(items), tuple(changes), frozenset(changed))

    def change_kv(self, batch: PlannedBatch, *, device: int = 0) -> None:
        """Carries out what a batch changes in the KV, once and on every device, before it is run there.

        Raises:
            ResourceExhausted: memory ran out. The KV of the batch's sessions is not what their logs say then.
        """
        pool = self._pool(device)
        with memory_errors(f"no memory left on {self.stages[device].device} to move KV"):
            for change in batch.changes:
                if isinstance(change, BlockCopy):
                    pool.copy_block(change, BLOCK_SLOTS)
                else:
                    pool.move(change)

    def release_kv(self) -> bool:
        """Gives the KV memory back, and with it what was retained; the next forward takes it again.

        Returns:
            False, and nothing is done, while a session is open.
        """
        if self.blocks.num_open:
            return False
        self.blocks.evict(self.blocks.num_blocks)
        self._pools = [None for _ in self.stages]
        return True

    def _pool(self, device: int) -> KVPool:
        pool = self._pools[device]
        if pool is None:
            pool = self._pools[device] = self.stages[device].new_pool(self._num_slots)
        return pool


class ShardEngine(KVEngine[Stage]):
    """Whole layers, and their KV."""

    def __init__(self, stages: Sequence[Stage], *, kv_budget_bytes: int) -> None:
        super().__init__(stages, kv_budget_bytes=kv_budget_bytes)
        self._parts = [functools.lru_cache(MAX_PARTS)(stage.part) for stage in self.stages]

    @property
    def num_parts(self) -> int:
        """Layer ranges whose stages are kept ready, on all devices."""
        return sum(part.cache_info().currsize for part in self._parts)

    def run(
        self,
        batch: PlannedBatch,
        rows: Sequence[torch.Tensor | None],
        *,
        device: int = 0,
        tapped: Sequence[Tapped | None] = (),
    ) -> list[torch.Tensor | None]:
        """Computes a batch on one of the devices: the first takes what came, the others what the one before made.

        Args:
            rows: per item of the batch, ``[T, D]``; None leaves the item out.
            tapped: per item, what is to be taken of this device's layers; if not given, nothing.

        Returns:
            Per item, the hidden rows after the last of this device's layers.

        Raises:
            ResourceExhausted: memory ran out. KV of earlier rows is intact, so the rows may be planned again.
        """
        part = self._part(device, batch.layers)
        if part is None:
            return list(rows)
        # An entry of the log may leave no row alive: it is applied, and computes nothing.
        inputs = [
            StepInput(item.step, x_TD, item.runs, item.start, taps)
            for item, x_TD, taps in zip(batch.items, rows, tapped or [None] * len(rows), strict=True)
            if x_TD is not None and len(x_TD)
        ]
        outputs = iter(part.forward(inputs, self._pool(device)) if inputs else ())
        return [x_TD if x_TD is None or not len(x_TD) else next(outputs) for x_TD in rows]

    def _part(self, device: int, layers: LayerRange) -> Stage | None:
        stage = self.stages[device]
        start, stop = max(layers.start, stage.layers.start), min(layers.stop, stage.layers.stop)
        if start >= stop:
            return None
        return self._parts[device](LayerRange(start, stop))
