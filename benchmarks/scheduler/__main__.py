"""``python -m benchmarks.scheduler``: which measurements there are."""

from __future__ import annotations

import sys

from benchmarks.report import main_of_groups

MEASUREMENTS = {
    name: f"benchmarks.scheduler.{name}"
    for name in ("planning", "optimality", "rivals", "churn", "prediction", "recovery", "simulation")
}

if __name__ == "__main__":
    sys.exit(
        main_of_groups(
            "scheduler",
            MEASUREMENTS,
            description="How long planning takes, how good plans are, and what a token takes of what was planned.",
        )
    )
