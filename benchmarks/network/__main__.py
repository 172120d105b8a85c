"""``python -m benchmarks.network``: which measurements there are, and how much of each."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.report import Check, finish, parser, report

MEASUREMENTS = ("links", "notice", "join", "idle", "large", "compression")
MODULES = {"notice": "benchmarks.network.detect", "compression": "benchmarks.compression"}


def run(quick: bool, only: list[str]) -> tuple[list[Check], dict[str, Any]]:
    """All measurements, or those named."""
    checks: list[Check] = []
    data: dict[str, Any] = {}
    for name in only or MEASUREMENTS:
        print(f"{name} …", file=sys.stderr, flush=True)
        module = importlib.import_module(MODULES.get(name, f"benchmarks.network.{name}"))
        found, data[name] = module.run(quick)
        checks += found
    return checks, data


def main() -> int:
    """The command line."""
    options = parser(
        "network",
        description="Links, compression, joining, idling, and how soon a lost peer is noticed. Quick: about 3 minutes "
        "on 2 idle cores; full: about 25.",
    )
    options.add_argument("--only", nargs="+", choices=MEASUREMENTS, default=[], help="measure these")
    arguments = options.parse_args()
    document = report("network", quick=arguments.quick, run=lambda quick: run(quick, arguments.only))
    return finish(document, arguments)


if __name__ == "__main__":
    sys.exit(main())
