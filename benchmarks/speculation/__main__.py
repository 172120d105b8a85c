"""``python -m benchmarks.speculation``: which groups there are."""

from __future__ import annotations

import sys

from benchmarks.report import main_of_groups

GROUPS = {name: f"benchmarks.speculation.{name}" for name in ("engine",)}

if __name__ == "__main__":
    sys.exit(
        main_of_groups(
            "speculation",
            GROUPS,
            description="What speculation brings beside plain decode and other ways of speculating. The engine group "
            "runs the production loop in a virtual clock; in full it takes about 5 minutes.",
        )
    )
