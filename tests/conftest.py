"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from fusion_node.store import ModelStore, StoredModel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares fixtures stays with one of the workers that run side by side.

    That is a file, or the home in which nodes of this machine are found by whoever looks for them.
    """
    for item in items:
        group = "home" if "test_home" in getattr(item, "fixturenames", ()) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def test_home() -> Path:
    """A store that outlives the test run, so that the built-in model is downloaded once per machine."""
    configured = os.environ.get("FUSION_TEST_HOME")
    return Path(configured) if configured else user_cache_path("fusion-node-tests")


@pytest.fixture(scope="session")
def builtin_model(test_home: Path) -> StoredModel:
    """The built-in model. Start a process that uses it with FUSION_HOME set to `test_home`."""
    return ModelStore(test_home).pull("smollm2-135m")
