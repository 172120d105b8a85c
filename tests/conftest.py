"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from platformdirs import user_cache_path

from fusion_node.store import ModelStore, StoredModel

LONG_FILES = (
    "live/test_chaos.py",
    "sim/test_membership_sim.py",
    "live/test_swarm.py",
    "live/test_demo.py",
    "live/test_bad_input.py",
    "live/test_swarm_of_twelve.py",
    "live/test_manners.py",
    "live/test_gateway_live.py",
    "live/test_private_swarm.py",
)
"""The longest first: run side by side with the others, none of them is what is waited for at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share its fixtures, so they stay with one of the workers that run side by side."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    return next((at for at, name in enumerate(LONG_FILES) if str(item.path).endswith(name)), len(LONG_FILES))


@pytest.fixture(scope="session")
def model_home() -> Path:
    """A store that outlives the test run, so that the built-in model is downloaded once per machine."""
    configured = os.environ.get("FUSION_TEST_HOME")
    return Path(configured) if configured else user_cache_path("fusion-node-tests")


@pytest.fixture(scope="session")
def builtin_model(model_home: Path) -> StoredModel:
    """The built-in model. Start a process that uses it with FUSION_HOME set to `test_home`."""
    return ModelStore(model_home).pull("smollm2-135m")


@pytest.fixture(scope="module")
def test_home(builtin_model: StoredModel, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the models of that store. Of the nodes that one file starts in it, those of another never hear."""
    home = tmp_path_factory.mktemp("home")
    (home / "models").symlink_to(model_home / "models")
    return home
