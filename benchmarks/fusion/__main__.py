"""``python -m benchmarks.fusion``: which measurements there are, and in which order."""

from __future__ import annotations

import logging
import sys

import structlog

from benchmarks.report import main_of_groups

MEASUREMENTS = {name: f"benchmarks.fusion.{name}" for name in ("wire", "exchange", "answers")}

if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    sys.exit(
        main_of_groups(
            "fusion",
            MEASUREMENTS,
            description="Bytes of the exchange against their lower bound, its time against torch.distributed, and "
            "whole answers against a pipeline and against the plan, of the built-in model. In full, wire takes about "
            "half a minute, exchange two and answers ten, on a machine that does nothing else.",
        )
    )
