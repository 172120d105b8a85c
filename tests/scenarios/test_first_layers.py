"""A model some of whose layers use what an earlier layer chose: sessions are routed so, or refused when they open."""

from __future__ import annotations

import pytest

from fusion_node.types import LayerRange
from p2p.messages import SessionOpened, SessionRefused, StepResult
from p2p.records import PlanStage
from tests.engine.tiny import TinyModel, tiny_model
from tests.scenarios.swarm import MemorySwarm, step

BEGINS = (0, 1, 2, 5)
"""Layers 3, 4 and 6 use the choice of the layer before them."""


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("glm_moe_dsa")


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
