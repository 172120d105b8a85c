"""``python -m benchmarks.speculation``: groups that are never mixed up, and how much of each."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.report import Check, finish, parser, report

GROUPS = ("engine",)
"""Modules of this package with ``run(quick) -> (checks, data)``, in the order in which they are made."""


def run(quick: bool, only: list[str]) -> tuple[list[Check], dict[str, Any]]:
    """All groups, or those named."""
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for name in only or GROUPS:
        print(f"{name} …", file=sys.stderr, flush=True)
        found, data[name] = importlib.import_module(f"benchmarks.speculation.{name}").run(quick)
        checks += found
    return checks, data


def main() -> int:
    """The command line."""
    options = parser(
        "speculation",
        description="What speculation brings beside plain decode and other ways of speculating. The engine group runs "
        "the production loop in a virtual clock; in full it takes about 5 minutes.",
    )
    options.add_argument("--only", nargs="+", choices=GROUPS, default=[], help="measure these")
    arguments = options.parse_args()
    document = report("speculation", quick=arguments.quick, run=lambda quick: run(quick, arguments.only))
    return finish(document, arguments)


if __name__ == "__main__":
    sys.exit(main())
