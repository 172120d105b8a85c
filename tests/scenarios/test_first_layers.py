"""A model some of whose layers use what an earlier layer chose: sessions are routed so, or refused when they open."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.types import LayerRange
from p2p.messages import SessionOpened, SessionRefused, StepResult
from p2p.records import PlanStage
from tests.engine.tiny import tiny_model
from tests.scenarios.swarm import CPU, MemorySwarm, memory_swarm, step

BEGINS = (0, 1, 2, 5)
"""Layers 3, 4 and 6 use the choice of the layer before them."""


@pytest.fixture
async def swarm() -> AsyncIterator[MemorySwarm]:
    model = tiny_model("glm_moe_dsa")
    async with memory_swarm(model, Boundary.load(model, numerics=numerics_class("fp32"), device=CPU)) as made:
        yield made


@pytest.mark.parametrize("cuts", [(), (2,)])
async def test_plan_that_begins_where_no_range_can_is_refused_when_it_opens(
    swarm: MemorySwarm, cuts: tuple[int, ...]
) -> None:
    node = await swarm.node(LayerRange(0, 7), cuts=cuts)
    for start in range(7):
        stranger = swarm.stranger()
        plan = swarm.plan(stranger.peer, [node], stages=(PlanStage(node.peer, start, 7, (node.address,)),))
        await stranger.open(plan, [node])
        if start in BEGINS:
            await stranger.get(SessionOpened)
            stranger.pool.send(node.peer, step(plan, (rows := swarm.rows([5, 6]))[0]), rows[1])
            await stranger.get(StepResult)
        else:
            refused = await stranger.get(SessionRefused)
            assert isinstance(refused, SessionRefused)
            assert (refused.code, refused.session) == ("layers-not-held", plan.session)
            assert f"layer {start}" in refused.reason
    assert node.admission.refused == {"layers-not-held": 3}
