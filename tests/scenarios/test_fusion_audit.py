"""Answers over fusion groups, with a log at every party: nobody gets more than its slice, also when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from fusion_node.engine.architectures import load_config
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.sliced_layer import fusion_dims
from tests.engine.tiny import TinyModel
from tests.scenarios.swarm import MemorySwarm, memory_swarm
from tests.scenarios.test_audit import judged
from tests.scenarios.test_fusion import Fusion, answer, boundary, home, model
from verification.audit_report import Report

__all__ = ["boundary", "home", "model"]
"""Fixtures: the same model and store."""


class Recorded(Fusion):
    """Nodes and users that keep logs."""

    def __init__(self, swarm: MemorySwarm, home: Path, folder: Path) -> None:
        super().__init__(swarm, home)
        self.folder = folder
        swarm.audit_folder = folder

    def judged(self) -> Report:
        """When all processes have ended."""
        return judged(self.folder, fusion_dims(load_config(self.stored)))


Play: TypeAlias = Callable[[Callable[[Recorded], Awaitable[None]]], Awaitable[Report]]


@pytest.fixture
def played(model: TinyModel, boundary: Boundary, home: Path, tmp_path: Path) -> Play:
    """Plays something, ends all processes, and judges the logs."""

    async def play(work: Callable[[Recorded], Awaitable[None]]) -> Report:
        async with memory_swarm(model, boundary) as swarm:
            recorded = Recorded(swarm, home, tmp_path)
            await work(recorded)
        return recorded.judged()

    return play


@pytest.mark.parametrize("speculation", ["off", "tree"])
async def test_a_member_that_is_killed_is_replaced_and_every_step_closes(played: Play, speculation: str) -> None:
    expected: list[str] = []

    async def work(fusion: Recorded) -> None:
        first = await fusion.group("0:1", "0/2", "1/2")
        second = await fusion.group("1:4", "0/3", "1/3", "2/3")
        spare = await fusion.node("1:4", "1/3", ms=5.0)
        expected.extend(node.peer for node in (*first, *second, spare))
        client = await fusion.client(speculation=speculation)
        killing: list[asyncio.Task[None]] = []

        def kill(count: int) -> None:
            if count == 5:
                killing.append(asyncio.ensure_future(second[1].kill()))

        stats = await answer(client, on_piece=kill)
        await asyncio.gather(*killing)
        assert [repair.kind for repair in stats.repairs] == ["patched"]

    report = await played(work)
    assert report.passed, report.findings
    (session,) = report.sessions
    assert session.epochs == (0, 1)
    assert session.num_closed == session.num_steps > 5
    assert session.num_replays > 0
    sent = {node.peer: node.largest_fraction for node in session.nodes}
    assert [sent[peer] for peer in expected] == [0.5, 0.5, *[pytest.approx(1 / 3)] * 4]
