"""Fusion groups against the stage of whole layers: what members compute together is what one node computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusion_node.engine.block_manager_core import SlotMove
from fusion_node.types import LayerRange
from tests.engine.fusion_group import FusionGroup
from tests.engine.test_parity import FP32, MAX_ERROR, Pipeline, run_mixed_batches
from tests.engine.tiny import tiny_model

WHOLE = LayerRange(0, 7)
EVERY_LAYER_HAS_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class GroupStage:
    """A group in the place of a Stage, in a Pipeline."""

    def __init__(self, group: FusionGroup) -> None:
        self.group = group

    def forward(self, batch, pool):  # type: ignore[no-untyped-def]
        return self.group.forward(batch)

    def move(self, move: SlotMove) -> None:
        for pool in self.group.pools:
            pool.move(move)


@pytest.mark.parametrize("weights", [(1,), (1, 1), (2, 1), (1, 1, 1), (3, 1, 2, 1)])
def test_mixed_packed_batches_of_a_group_equal_the_whole_model(weights: tuple[int, ...]) -> None:
    model = tiny_model("llama")
    pipe = Pipeline(model, (0, 7))
    stage = GroupStage(FusionGroup.load(model, WHOLE, weights, numerics=FP32, num_slots=pipe.pools[0].num_slots))
    pipe.stages, pipe.pools = [stage], [stage]  # type: ignore[list-item]
    assert run_mixed_batches(pipe) <= MAX_ERROR
