"""``python -m benchmarks.scheduler``: which measurements there are, and how much of each."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import Check, finish, parser, report

MEASUREMENTS = tuple(
    name
    for name in ("planning", "optimality", "rivals", "prediction", "recovery", "simulation")
    if (Path(__file__).parent / f"{name}.py").is_file()
)
"""Modules of this package with ``run(quick) -> (checks, data)``, in the order in which they are made."""


def run(quick: bool, only: list[str]) -> tuple[list[Check], dict[str, Any]]:
    """All measurements, or those named."""
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for name in only or MEASUREMENTS:
        print(f"{name} …", file=sys.stderr, flush=True)
        found, data[name] = importlib.import_module(f"benchmarks.scheduler.{name}").run(quick)
        checks += found
    return checks, data


def main() -> int:
    """The command line."""
    options = parser(
        "scheduler",
        description="How long planning takes, how good plans are, and what a token takes of what was planned.",
    )
    options.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[], help="measure these")
    arguments = options.parse_args()
    document = report("scheduler", quick=arguments.quick, run=lambda quick: run(quick, arguments.only))
    return finish(document, arguments)


if __name__ == "__main__":
    sys.exit(main())
