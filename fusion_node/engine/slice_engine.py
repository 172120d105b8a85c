"""The shard of a member of a fusion group: its slice of the layers on one device, and the KV of its heads.

As with whole layers (fusion_node.engine.shard_engine), ``plan`` decides on the event loop where in the KV pool rows go;
``begin`` and ``phase`` compute on the thread of the device.

Shapes: T rows, d own columns, W values per row that a member contributes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_node.engine.shard_engine import KVEngine, PlannedBatch
from fusion_node.engine.sliced_stage import Contributions, FusedStep, SlicedStage
from fusion_node.engine.stage import StepInput
from fusion_node.slices import Dims, Exchange, ModelSlice, SliceBounds


class SliceEngine(KVEngine[SlicedStage]):
    """A slice of layers, and its KV.

    Args:
        kv_budget_bytes: for the KV of all sessions.

    Raises:
        ResourceExhausted: not one block fits into the budget, or the budget not into memory.
    """

    def __init__(self, stage: SlicedStage, *, kv_budget_bytes: int) -> None:
        super().__init__([stage], kv_budget_bytes=kv_budget_bytes)
        self._stage = stage

    @property
    def member(self) -> ModelSlice:
        return self._stage.member

    @property
    def dims(self) -> Dims:
        return self._stage.dims

    @property
    def bounds(self) -> tuple[SliceBounds, ...]:
        """Of all members of the group."""
        return self._stage.bounds

    @property
    def device(self) -> torch.device:
        return self._stage.device

    @property
    def columns(self) -> range:
        """Of the hidden state, that this member is sent and sends on."""
        return self._stage.own.columns

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Those of every layer, in order."""
        return self._stage.exchanges

    def width(self, exchange: Exchange, member: int) -> int:
        """Values per row that each member contributes for this one."""
        return self._stage.width(exchange, member)

    def begin(self, batch: PlannedBatch, rows: Sequence[torch.Tensor]) -> list[FusedStep]:
        """Takes the rows of a batch whose changes to the KV were carried out.

        Args:
            rows: per item of the batch the own columns ``[T, d]``, at least one row.

        Returns:
            Per item what waits for its first phase.
        """
        inputs = [StepInput(i.step, x_Td, i.runs, i.start) for i, x_Td in zip(batch.items, rows, strict=True)]
        return self._stage.begin(inputs, batch.layers)

    def phase(
        self, steps: Sequence[FusedStep], received: Sequence[Contributions] | None
    ) -> list[list[torch.Tensor]] | None:
        """As SlicedStage.phase, with the KV of this engine."""
        return self._stage.phase(steps, received, self._pool(0))

    def release_kv(self) -> bool:
        """As KVEngine.release_kv."""
        self._stage.forget()
        return super().release_kv()
