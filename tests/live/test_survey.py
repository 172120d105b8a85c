"""Two real nodes measure one another and themselves, and a user plans with what their records say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fusion_node.client.connection import SwarmConnection
from fusion_node.client.topology import SwarmTopology
from fusion_node.store import StoredModel
from fusion_node.types import PeerId
from p2p.records import NodeRecord
from scheduler.topology import LegSource
from tests.live.swarm_process import MODEL, Nodes, node_processes, run_cli

# Nodes look around for the first time after seconds, and announce what they found in their next records.
pytestmark = [pytest.mark.live, pytest.mark.slow]

WITHIN_S = 90.0
"""Announcements are 20 s apart, and a record is asked for again when it is 30 s old; the rest is for busy machines."""


@pytest.fixture(scope="module")
def nodes(test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with node_processes(test_home, tmp_path_factory.mktemp("nodes")) as nodes:
        nodes.start("0:15", "15:30", options=["--region", "eu-west", "--price", "0.5"])
        yield nodes


async def records_that(nodes: Nodes, is_wanted: Callable[[NodeRecord], bool]) -> Sequence[NodeRecord]:
    """What a new user finds, once both records are as they should be."""
    deadline = time.monotonic() + WITHIN_S
    async with SwarmConnection([nodes.current[0].addresses[0]], mdns=False, home=None) as swarm:
        while True:
            records = await swarm.find(None)
            if len(records) == 2 and all(map(is_wanted, records)):
                return records
            assert time.monotonic() < deadline, records
            await asyncio.sleep(1.0)


async def test_neighbours_announce_their_round_trip_and_users_plan_with_it(nodes: Nodes) -> None:
    records = await records_that(nodes, lambda record: len(record.round_trips) == 1)
    one, other = (PeerId(record.peer) for record in records)

    assert {record.region for record in records} == {"eu-west"}
    assert {record.price for record in records} == {0.5}
    assert all(record.coordinate is not None and record.coordinate.error < 1.0 for record in records)
    leg = SwarmTopology(records, round_trips_s={}).leg(one, other)
    assert leg.source is LegSource.ANNOUNCED
    assert 0.0 < leg.one_way_s < 1.0


async def test_speeds_are_measured_again_while_serving(nodes: Nodes, test_home: Path) -> None:
    before = {record.peer: record.shards[0].seconds_per_layer for record in await records_that(nodes, lambda _: True)}
    arguments = ("generate", MODEL, "Name a river.", "--max-tokens", "12", "--no-mdns", "--threads", "1", "--peer")
    done = await asyncio.to_thread(run_cli, *arguments, nodes.current[0].addresses[0], home=test_home)
    assert done.returncode == 0, done.stderr

    after = await records_that(nodes, lambda record: record.shards[0].seconds_per_layer != before[record.peer])
    for record in after:
        one, some, many = record.shards[0].seconds_per_layer
        assert 0.0 < one <= some <= many < 10.0
        assert record.shards[0].queue_s >= 0.0
