"""``python -m benchmarks.network``: which measurements there are."""

from __future__ import annotations

import sys

from benchmarks.report import main_of_groups

MEASUREMENTS = {
    "links": "benchmarks.network.links",
    "notice": "benchmarks.network.detect",
    "join": "benchmarks.network.join",
    "idle": "benchmarks.network.idle",
    "large": "benchmarks.network.large",
    "compression": "benchmarks.compression",
}

if __name__ == "__main__":
    sys.exit(
        main_of_groups(
            "network",
            MEASUREMENTS,
            description="Links, compression, joining, idling, and how soon a lost peer is noticed. Quick: about 3 "
            "minutes on 2 idle cores; full: about 25.",
        )
    )
