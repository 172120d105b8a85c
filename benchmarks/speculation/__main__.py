"""``python -m benchmarks.speculation``: which groups there are.

Three groups, each with its own label in everything that is printed, drawn and written, since none may pass for another:
``engine`` is the production loop in a virtual clock with a drafter of known quality; ``novel`` is real processes, real
drafts and new text; ``copied`` is the same with answers that repeat a given text.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from benchmarks.report import Check, finish, parser, report

NO_DRAFT = "none"
GROUPS = {name: f"benchmarks.speculation.{name}" for name in ("engine", "novel", "copied")}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    options = parser(
        "speculation",
        description="What speculation brings beside plain decode and other ways of speculating, in three groups. In "
        "full, engine takes about 5 minutes, novel 19 and copied 6, on a machine that does nothing else.",
    )
    options.add_argument("--only", nargs="+", choices=list(GROUPS), default=[], help="measure these")
    options.add_argument(
        "--draft",
        type=Path,
        metavar="DIR|none",
        help="trained draft head for the group novel; if not given, the one that comes with the program",
    )
    options.add_argument(
        "--numerics",
        choices=("fp32", "f16r32", "bf16"),
        default="fp32",
        help="class in which novel and copied are computed; bf16 is for CPUs that multiply it in hardware, on which a "
        "wide pass then costs little more than a narrow one, as on GPUs",
    )
    options.add_argument("--plot", type=Path, metavar="SVG", help="draw tokens per second against the round trip")
    arguments = options.parse_args(argv)
    if (
        arguments.draft is not None
        and arguments.draft != Path(NO_DRAFT)
        and not (arguments.draft / "config.json").is_file()
    ):
        options.error(f"there is no draft head in {arguments.draft}")
    document = report("speculation", quick=arguments.quick, run=lambda quick: _run(quick, arguments))
    status = finish(document, arguments)
    if arguments.plot is not None:
        from benchmarks.speculation.plot import draw

        draw([document], arguments.plot)
        print(f"drawn to {arguments.plot}", file=sys.stderr)
    return status


def _run(quick: bool, arguments: argparse.Namespace) -> tuple[list[Check], dict[str, Any]]:
    checks: list[Check] = []
    data: dict[str, Any] = {"skipped": {}}
    for group in arguments.only or GROUPS:
        print(f"{group} …", file=sys.stderr, flush=True)
        module = importlib.import_module(GROUPS[group])
        settings: dict[str, Any] = {} if group == "engine" else {"numerics": arguments.numerics}
        if group == "novel":
            settings["draft"] = _draft(arguments.draft)
        found, data[group] = module.run(quick, **settings)
        data["skipped"] |= data[group].get("skipped", {})
        checks += found
        if arguments.json is not None:  # an hour's work is not to be lost by what comes after it
            arguments.json.write_text(json.dumps({"data": data}, indent=2) + "\n")
    return checks, data


def _draft(told: Path | None) -> Path | None:
    """The head to measure; None: none."""
    if told is not None:
        return None if told == Path(NO_DRAFT) else told
    from benchmarks.speculation.rig import MODEL
    from fusion_node.engine.shipped_heads import shipped_head
    from fusion_node.store import ModelStore

    return shipped_head(ModelStore().pull(MODEL).model_id)


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sys.exit(main())
