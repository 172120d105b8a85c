"""A fusion group in one process: the members of a layer range, and a loop in place of the network between them.

What members compute and contribute is what they do as nodes; nothing here is asked by one. Tests compare a group with a
stage by it, and fusion_node.privacy shows by it what a member can make of what it is sent.

Shapes: T packed rows, D hidden size, W values per row that a member contributes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fusion_node.engine.block_manager_core import SlotMove
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.sliced_stage import FusedStep, SlicedStage
from fusion_node.engine.stage import StepInput
from fusion_node.engine.weights import TensorSource
from fusion_node.slices import Exchange, ModelSlice
from fusion_node.types import LayerRange


@dataclass(frozen=True)
class Sent:
    """What one member sent another, or itself, in one exchange: ``values_TW``, all steps of the phase together."""

    layer: int
    exchange: Exchange
    sender: int
    owner: int
    values_TW: torch.Tensor


@dataclass
class FusionGroup:
    """All members of a group, each with its own KV.

    Attributes:
        on_sent: told of every contribution, in order: what an owner really has to see.
        on_layer: told after each layer of its number and of the residual, whole as none of the members has it:
            ``[T, D]`` of all steps that pass it.
    """

    members: list[SlicedStage]
    on_sent: Callable[[Sent], None] | None = None
    on_layer: Callable[[int, list[torch.Tensor]], None] | None = None
    pools: list[KVPool] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        source: TensorSource,
        layers: LayerRange,
        weights: Sequence[int],
        *,
        numerics: NumericsClass,
        num_slots: int,
    ) -> FusionGroup:
        device = torch.device("cpu")
        slices = [ModelSlice(index, tuple(weights)) for index in range(len(weights))]
        group = cls([SlicedStage.load(source, layers, each, numerics=numerics, device=device) for each in slices])
        group.pools = [member.new_pool(num_slots) for member in group.members]
        return group

    def cut(self, rows_TD: torch.Tensor) -> list[torch.Tensor]:
        """Whole rows, as the user has them, for each member."""
        columns = [b.columns for b in self.members[0].bounds]
        return [rows_TD[:, c.start : c.stop].contiguous() for c in columns]

    def forward(self, batch: Sequence[StepInput], layers: LayerRange | None = None) -> list[torch.Tensor]:
        """What Stage.forward gives for these steps, whose rows are whole: ``[T, D]`` each."""
        rows = [self.cut(item.rows_TD) for item in batch]
        of_member = [
            member.begin(
                [StepInput(i.step, r[k], i.runs, i.first_row) for i, r in zip(batch, rows, strict=True)], layers
            )
            for k, member in enumerate(self.members)
        ]
        self.run(of_member)
        return [torch.cat([steps[i].rows_TD for steps in of_member], dim=1) for i in range(len(batch))]

    def run(self, of_member: Sequence[Sequence[FusedStep]]) -> None:
        """Runs all phases of steps that each member has begun, the same ones in the same order.

        Those at the earliest place are taken together, so that steps that pass different layers meet.
        """
        waiting = [tuple(steps) for steps in zip(*of_member, strict=True)]
        held: dict[FusedStep, list[list[torch.Tensor]]] = {}
        while waiting:
            place = min(steps[0].position for steps in waiting)
            at_place = [steps for steps in waiting if steps[0].position == place]
            # Those that begin here have nothing to sum yet.
            chosen = [steps for steps in at_place if not steps[0].has_begun] or at_place
            self._phase(chosen, held)
            waiting = [steps for steps in waiting if not steps[0].is_done]

    def compute(
        self, k: int, steps: Sequence[FusedStep], received: Sequence[Sequence[torch.Tensor]] | None
    ) -> list[list[torch.Tensor]] | None:
        """One phase of one member."""
        return self.members[k].phase(steps, received, self.pools[k])

    def move(self, move: SlotMove) -> None:
        """As KVPool.move, with every member."""
        for pool in self.pools:
            pool.move(move)

    def _phase(self, chosen: Sequence[tuple[FusedStep, ...]], held: dict[FusedStep, list[list[torch.Tensor]]]) -> None:
        """One phase of all members.

        Args:
            chosen: the same steps, of each member.
            held: by the first member's step, what was sent: by sender and owner.
        """
        layer, exchange = chosen[0][0].position
        is_fresh = not chosen[0][0].has_begun
        received = [held.pop(steps[0], []) for steps in chosen]
        sent: list[list[list[torch.Tensor]]] = []
        for k in range(len(self.members)):
            own = None if is_fresh else [[of_sender[k] for of_sender in of_step] for of_step in received]
            out = self.compute(k, [steps[k] for steps in chosen], own)
            sent.append(out if out is not None else [[] for _ in chosen])
        if self.on_layer is not None and exchange is Exchange.DOWN and not is_fresh:
            self.on_layer(layer, [torch.cat([step.rows_TD for step in steps], dim=1) for steps in chosen])
        going = [index for index, steps in enumerate(chosen) if not steps[0].is_done]
        for index in going:
            held[chosen[index][0]] = [of_sender[index] for of_sender in sent]
        if self.on_sent is not None and going:
            layer, exchange = chosen[going[0]][0].position
            for sender, owner in itertools.product(range(len(self.members)), repeat=2):
                values_TW = torch.cat([sent[sender][index][owner] for index in going])
                self.on_sent(Sent(layer, exchange, sender, owner, values_TW))
