"""What most scenarios play in; a file that wants another model has a fixture ``model`` of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from tests.engine.tiny import TinyModel, tiny_model
from tests.scenarios.swarm import CPU, MemorySwarm, memory_swarm

# Tiny models gain nothing from a second thread, and lose much where other programs compute as well.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def boundary(model: TinyModel) -> Boundary:
    return Boundary.load(model, numerics=numerics_class("fp32"), device=CPU)


@pytest.fixture
async def swarm(model: TinyModel, boundary: Boundary) -> AsyncIterator[MemorySwarm]:
    async with memory_swarm(model, boundary) as made:
        yield made
