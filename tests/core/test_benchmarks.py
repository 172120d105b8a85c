"""How benchmarks of several groups report, with groups that measure nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks.fusion.__main__ import MEASUREMENTS as FUSION
from benchmarks.network.__main__ import MEASUREMENTS as NETWORK
from benchmarks.report import main_of_groups
from benchmarks.scheduler.__main__ import MEASUREMENTS as SCHEDULER
from benchmarks.speculation.__main__ import GROUPS as SPECULATION

GROUP = """
from benchmarks.report import Check

def run(quick):
    return [Check("{name}", "seconds of {name}", {value}, "s", 1.0, "<=")], {{"is_quick": quick}}
"""


@pytest.mark.parametrize(
    "groups",
    [FUSION, NETWORK, SCHEDULER, SPECULATION],
    ids=["fusion", "network", "scheduler", "speculation"],
)
def test_every_group_is_there(groups: dict[str, str]) -> None:
    assert [module for module in groups.values() if importlib.util.find_spec(module) is None] == []


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in (("fast", 0.5), ("slow", 2.0)):
        (tmp_path / f"group_that_is_{name}.py").write_text(GROUP.format(name=name, value=value))
    monkeypatch.syspath_prepend(tmp_path)
    return {name: f"group_that_is_{name}" for name in ("fast", "slow")}


@pytest.mark.parametrize(("options", "names", "status"), [([], ["fast", "slow"], 1), (["--only", "fast"], ["fast"], 0)])
def test_groups_are_measured_in_order_or_those_that_are_named(
    groups: dict[str, str], tmp_path: Path, options: list[str], names: list[str], status: int
) -> None:
    path = tmp_path / "told.json"
    line = ["--quick", "--strict", "--json", str(path), *options]
    assert main_of_groups("example", groups, description="Nothing.", argv=line) == status
    told = json.loads(path.read_text())
    assert [check["id"] for check in told["checks"]] == names
    assert told["data"] == {name: {"is_quick": True} for name in names}


def test_a_group_that_does_not_exist_is_refused(groups: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_of_groups("example", groups, description="Nothing.", argv=["--only", "other"])
    assert "other" in capsys.readouterr().err
