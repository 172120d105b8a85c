"""How every benchmark reports: checks against stated targets, one table, one JSON file.

A benchmark module defines ``run(quick) -> (checks, data)`` and ends in ``main(...)``:

    python -m benchmarks.NAME [--quick] [--json PATH] [--strict]

A package of several such modules ends in ``main_of_groups(...)``, which also takes ``--only NAME ...``.

The exit status is 0 when it ran, whatever the checks say; with ``--strict`` it is 1 when a check is not ok. A benchmark
with options of its own adds them to ``parser(...)`` and ends in ``finish(...)``. What a machine cannot measure is left
out of the checks and listed in ``data["skipped"]``, by name with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

Comparison: TypeAlias = Literal[">=", "<=", "=="]
Run: TypeAlias = Callable[[bool], tuple[list["Check"], dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Check:
    """One measured value against its target. A value that is not a number is never ok."""

    id: str
    what: str
    value: float
    unit: str
    target: float
    comparison: Comparison

    @property
    def ok(self) -> bool:
        if math.isnan(self.value):
            return False
        match self.comparison:
            case ">=":
                return self.value >= self.target
            case "<=":
                return self.value <= self.target
            case "==":
                return self.value == self.target

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "what": self.what,
            "value": self.value if math.isfinite(self.value) else None,
            "unit": self.unit,
            "target": self.target,
            "comparison": self.comparison,
            "ok": self.ok,
        }


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else (0.0, 0.0, 0.0)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_1min_at_start": round(load[0], 2),
    }


def commit() -> str:
    """The commit of the working tree, with ``-dirty`` when it has changes; ``unknown`` outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],  # noqa: S607 - git from PATH
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def report(name: str, *, quick: bool, run: Run) -> dict[str, Any]:
    """Runs a benchmark and returns its JSON document."""
    where, started = machine(), time.monotonic()
    checks, data = run(quick)
    return {
        "name": name,
        "commit": commit(),
        "machine": where,
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "checks": [check.as_dict() for check in checks],
        "data": data,
    }


def print_table(document: dict[str, Any], console: Console | None = None) -> None:
    """Prints the checks of a document as one table."""
    table = Table(title=f"{document['name']} at {document['commit']}{' (quick)' if document['quick'] else ''}")
    for column, justify in (("check", "left"), ("value", "right"), ("target", "right"), ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for check in document["checks"]:
        value = "none" if check["value"] is None else f"{check['value']:.4g} {check['unit']}"
        target = f"{check['comparison']} {check['target']:.4g} {check['unit']}"
        table.add_row(check["what"], value, target, "ok" if check["ok"] else "[bold red]missed[/]")
    for name, reason in document["data"].get("skipped", {}).items():
        table.add_row(f"{name}: {reason}", "", "", "skipped")
    (console or Console()).print(table)


def main(name: str, run: Run, *, description: str, argv: Sequence[str] | None = None) -> int:
    """The command line of a benchmark. ``description`` says what is measured and how long the full run takes."""
    arguments = parser(name, description=description).parse_args(argv)
    return finish(report(name, quick=arguments.quick, run=run), arguments)


def main_of_groups(name: str, groups: Mapping[str, str], *, description: str, argv: Sequence[str] | None = None) -> int:
    """The command line of a benchmark with several groups, which are never mixed up.

    Args:
        groups: modules with ``run(quick) -> (checks, data)`` by name, in the order in which they are made; each is
            imported when its turn comes.
    """
    options = parser(name, description=description)
    options.add_argument("--only", nargs="+", choices=list(groups), default=[], help="measure these")
    arguments = options.parse_args(argv)

    def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
        checks: list[Check] = []
        data: dict[str, Any] = {}
        for group in arguments.only or groups:
            print(f"{group} …", file=sys.stderr, flush=True)
            found, data[group] = importlib.import_module(groups[group]).run(quick)
            checks += found
        return checks, data

    return finish(report(name, quick=arguments.quick, run=run), arguments)


def parser(name: str, *, description: str) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--quick", action="store_true", help="finish in under 3 minutes on 2 cores")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    options.add_argument("--strict", action="store_true", help="exit 1 when a check is not ok")
    return options


def finish(document: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Prints and writes a document as the options of ``parser`` say. Returns the exit status."""
    print_table(document)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"written to {arguments.json}", file=sys.stderr)
    return int(arguments.strict and not all(check["ok"] for check in document["checks"]))


def peak_bytes(pid: int) -> int:
    """The largest resident memory that a process ever had (VmHWM); 0 where the system does not tell."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
