"""Swarms of real processes, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_node.store import StoredModel
from tests.live.swarm_process import Nodes, node_processes


@pytest.fixture(scope="module")
def three_nodes(
    test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """Three nodes with ten layers each. The second and the third know the first one's address and nothing else."""
    with node_processes(test_home, tmp_path_factory.mktemp("nodes")) as nodes:
        nodes.start("0:10", "10:20", "20:30")
        yield nodes
